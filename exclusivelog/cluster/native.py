"""Protects objects of a native client library from being used in a forked child.

The child has none of the client's threads, which may hold its locks, and shares the parent's
sockets: a call may wait for ever, and a destructor may, too, or end the parent's connection. A
garbage collection in the child would run destructors.

So each object of the client is put into a `Native` as soon as it is made. In a forked child,
`Native.use` raises `EngineClosedError` without taking a lock, and the object is never destroyed,
neither by the garbage collector nor at the interpreter's end. That holds also where the `Native` is
gone: the traceback of an error keeps the object, or a reference cycle inside of the client (a
client keeps its readers, and these the client). A fork of which Python does not know is noticed
before a `Native` is dropped, and before each collection.

When a thread of the client calls into Python, Python makes a thread state, under a lock that 3.11.0
to 3.11.9 leave locked in a child that is forked meanwhile: the child then waits for ever inside
os.fork() (python/cpython#112275). So these threads keep their state (`stay`) from their first call
on, and forks wait for that call (`enter`).

>>> native = Native({1, 2}, "this set")
>>> len(native.use())
2
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from exclusivelog import _core
from exclusivelog.errors import EngineClosedError

__all__ = ["Native", "enter", "spare", "stay"]

_increase = ctypes.pythonapi.Py_IncRef
_increase.argtypes, _increase.restype = [ctypes.py_object], None

CHILDREN_HANG = sys.version_info < (3, 11, 10)
ENTER_SECONDS = 1.0  # the longest time that a fork waits for a client's first callback


# ---- what children never destroy -------------------------------------------------------------


class _Inherited:
    """All objects that are to be spared, while they exist."""

    def __init__(self) -> None:
        self.references: dict[int, weakref.KeyedRef[int, Any]] = {}  # by the object's id
        # Kept here, because the names of a module are gone at the interpreter's end.
        self._ask, self._increase = _core.this_process, _increase
        self._process = self._ask()

    def add(self, thing: Any) -> None:
        """Spare this object from now on."""
        known = self.references.get(id(thing))
        # All objects of a client can be referred to. Ctrl-C may have kept `_drop` from its work.
        if type(thing).__weakrefoffset__ and (known is None or known() is not thing):
            self.references[id(thing)] = weakref.KeyedRef(thing, self._drop, id(thing))

    def _drop(self, reference: weakref.KeyedRef[int, Any]) -> None:
        self.notice()  # an object's attributes are dropped after it, and may be the client's
        self.references.pop(reference.key, None)

    def notice(self) -> None:
        """In a forked child, spare them. It must be called before anything is dropped there, also
        by what other modules do first in a child."""
        here = self._ask()
        if here == self._process:
            return
        for reference in list(self.references.values()):
            # A module's references are dropped when the interpreter ends; this extra count is not.
            if (thing := reference()) is not None:
                self._increase(thing)
        self._process = here


_inherited = _Inherited()


def spare(thing: Any) -> None:
    """Never destroy this object in a forked child, nor those in its attributes, whoever drops the
    last reference to them."""
    for each in (thing, *getattr(thing, "__dict__", {}).values()):
        _inherited.add(each)


class Native:
    """Keeps one object of the client, and those in its attributes. `what` names it in errors."""

    __slots__ = ("_process", "_thing", "_what")

    def __init__(self, thing: Any, what: str) -> None:
        self._thing, self._what, self._process = thing, what, _core.this_process()
        spare(thing)  # only now: what a child makes of its own is not spared there

    def __del__(self, notice: Callable[[], None] = _inherited.notice) -> None:
        notice()

    @property
    def inherited(self) -> bool:
        """Is this a forked child of the process that made it?"""
        return self._process != _core.this_process()

    def use(self) -> Any:
        """The object; ask again before each call. Raises `EngineClosedError` in a forked child."""
        if self.inherited:
            raise EngineClosedError(
                f"{self._what} was inherited through fork(); open one of your own"
            )
        return self._thing


def _before_collection(phase: str, info: object) -> None:
    if phase == "start":
        _inherited.notice()


gc.callbacks.append(_before_collection)


# ---- threads of a client that call back -----------------------------------------------------


_ensure = ctypes.pythonapi.PyGILState_Ensure
_here = threading.local()  # is freed with the thread state
_entering = threading.Lock()
_fork_holds_it = False


def stay() -> None:
    """Keep this thread's state. Each callback calls it first."""
    if CHILDREN_HANG and not hasattr(_here, "stays"):
        _here.stays = True
        _ensure()  # without the matching release, so that the state stays


def enter(call: Callable[[Callable[..., None]], object]) -> None:
    """Have a client call back for the first time, while no thread forks.

    `call` is given a function that the client's thread is to call soon, with any arguments."""
    if not CHILDREN_HANG:
        return
    entered = threading.Event()

    def answered(*what: object) -> None:
        stay()
        entered.set()

    with _entering:
        call(answered)
        entered.wait(ENTER_SECONDS)


def _before_fork() -> None:
    global _fork_holds_it
    _fork_holds_it = _entering.acquire(timeout=ENTER_SECONDS)


def _after_fork_in_parent() -> None:
    if _fork_holds_it:
        _entering.release()


def _after_fork_in_child() -> None:
    global _entering
    _entering = threading.Lock()
    _inherited.notice()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
_core.in_forked_child(_after_fork_in_child)
