"""Exceptions that are raised in a running thread from outside, at any of its instructions."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable

from testing.processes import until


class Limit(BaseException):
    """Raised in a thread by another one, as the time limit of a task queue is."""


def raise_in(thread: threading.Thread) -> None:
    """Raise `Limit` in a running thread, at its next instruction of Python.

    In Python 3.11, a thread that is being started has the number of the one that starts it, and
    takes the exception from it; `Thread.start` then never returns.
    """
    assert thread.ident is not None
    limbo: dict[threading.Thread, object] = vars(threading)["_limbo"]
    until(lambda: not limbo)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(Limit)
    )


def where_is(thread: threading.Thread) -> str:
    """What a running thread does."""
    assert thread.ident is not None
    return "".join(traceback.format_stack(sys._current_frames().get(thread.ident)))


class Interrupts:
    """Calls `step(number)` in a thread again and again, and interrupts it at random moments."""

    def __init__(self, step: Callable[[int], None], seconds: float) -> None:
        self.count = 0
        # No events: an interrupt inside one would leave it locked.
        self._begun = self._stepped = False
        self._step, self._longest, self._dice = step, seconds, random.Random(5)

    def run(self, tries: int, first: int = 0) -> None:
        """So many times; `first`: the first number."""
        for number in range(first, first + tries):
            thread = threading.Thread(target=self._call, args=(number,))
            self._begun = self._stepped = False
            thread.start()
            while not self._begun and thread.is_alive():  # for moments: the step is to be hit
                time.sleep(0)
            time.sleep(self._dice.uniform(0, self._longest))
            raise_in(thread)
            try:
                until(lambda: self._has_ended(thread))  # noqa: B023
            except AssertionError as error:
                error.add_note(where_is(thread))
                raise

    def _has_ended(self, thread: threading.Thread) -> bool:
        """Python drops what is raised inside a finalizer or the callback of a weak reference: the
        thread has then done its step, and is interrupted again."""
        thread.join(1.0)
        if thread.is_alive() and self._stepped:
            raise_in(thread)
        return not thread.is_alive()

    def _call(self, number: int) -> None:
        # A thread that did not run for a second may have the second interrupt while it handles
        # the first one.
        with contextlib.suppress(Limit):
            self._step_until_interrupted(number)

    def _step_until_interrupted(self, number: int) -> None:
        try:
            self._begun = True
            self._step(number)
            self._stepped = True
            until(lambda: False)  # the interrupt comes, and in no other thread
        except Limit:
            self._stepped = False
            self.count += 1
