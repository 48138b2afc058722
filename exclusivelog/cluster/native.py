"""Objects of a client that is not written in Python, and what a forked child may do with them.

Nothing. The client's threads are not in the child, its locks may be held by one of them, and its
sockets are the parent's: a call may wait for ever, and a destructor may do so too, or end the
parent's connection. Whoever collects the garbage of the parent runs destructors.

So each object of the client is kept in a `Native` from the moment it is made. In a forked child
`Native.use` raises `EngineClosedError` before anything is called and before any lock is taken, and
the object is never destroyed, neither by the garbage collector nor at the interpreter's end.

A thread of the client that calls back into Python is given a thread state, under a lock that Python
3.11.0 to 3.11.9 leaves locked in a child that is forked meanwhile: the child waits for ever, inside
of os.fork() (python/cpython#112275). So these threads keep their state (`stay`) from their first
call on, and no thread forks during that one (`enter`).

>>> native = Native([1, 2], "this list")
>>> native.use().pop()
2
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from exclusivelog.errors import EngineClosedError

__all__ = ["Native", "enter", "stay"]

_increase = ctypes.pythonapi.Py_IncRef  # looked up here: a child need not ask the loader
_increase.argtypes = [ctypes.py_object]
_increase.restype = None

CHILDREN_HANG = sys.version_info < (3, 11, 10)
ENTER_SECONDS = 1.0  # for a client to call back; a fork waits for it no longer

_forks = 0  # above this process, since this module was imported


class Native:
    """Keeps one object of the client. `what` names it in errors."""

    __slots__ = ("__weakref__", "_forks", "_thing", "_what")

    def __init__(self, thing: Any, what: str) -> None:
        self._thing, self._what, self._forks = thing, what, _forks
        _natives.add(self)

    @property
    def inherited(self) -> bool:
        """Is it the parent's, seen from a forked child?"""
        return self._forks != _forks

    def use(self) -> Any:
        """The object; ask again before each call. Raises `EngineClosedError` in a forked child."""
        if self._forks != _forks:
            raise EngineClosedError(
                f"{self._what} was inherited through fork(); open one of your own"
            )
        return self._thing

    def keep_for_ever(self) -> None:
        """Never destroy the object."""
        # References in modules are dropped while the interpreter ends; this one is not.
        _increase(self._thing)


_natives: weakref.WeakSet[Native] = weakref.WeakSet()


# ---- threads of a client that call back -----------------------------------------------------


_ensure = ctypes.pythonapi.PyGILState_Ensure
_here = threading.local()  # goes with the thread state
_entering = threading.Lock()
_fork_holds_it = False


def stay() -> None:
    """Keep this thread's state: for each callback to begin with."""
    if CHILDREN_HANG and not hasattr(_here, "stays"):
        _here.stays = True
        _ensure()  # without its counterpart: the state is freed once it is not needed


def enter(call: Callable[[Callable[..., None]], object]) -> None:
    """Let a client call back for the first time, while no thread forks.

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
    global _forks, _entering
    _forks += 1
    _entering = threading.Lock()
    for native in list(_natives):
        native.keep_for_ever()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
