"""Objects of a client that is not written in Python, and what a forked child may do with them.

Nothing. The client's threads are not in the child, its locks may be held by one of them, and its
sockets are the parent's: a call may wait for ever, and a destructor may do so too, or end the
parent's connection. Whoever collects the garbage of the parent runs destructors.

So each object of the client is kept in a `Native` from the moment it is made. In a forked child
`Native.use` raises `EngineClosedError` before anything is called and before any lock is taken, and
the object is never destroyed, neither by the garbage collector nor at the interpreter's end.

>>> native = Native([1, 2], "this list")
>>> native.use().pop()
2
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from exclusivelog.errors import EngineClosedError

__all__ = ["Native"]

_increase = ctypes.pythonapi.Py_IncRef  # looked up here: a child need not ask the loader
_increase.argtypes = [ctypes.py_object]
_increase.restype = None

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
        # A reference in a module is dropped while the interpreter ends; one that nobody has is not.
        _increase(self._thing)


_natives: weakref.WeakSet[Native] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    global _forks
    _forks += 1
    for native in list(_natives):
        native.keep_for_ever()


os.register_at_fork(after_in_child=_after_fork_in_child)
