"""What each open transaction has read by each reader of a group, and whose transactions are open.

A message that an open transaction has read is committed by that transaction, or by another one of
the same thread or task, or it is read again (rule G11). So

- no commit of another caller passes it;
- an abort takes the reader back to it, and to the group's position if no other open transaction has
  read by the reader;
- an abort also takes back what other transactions have read behind that message. Those cannot
  commit the reader's position any more.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from exclusivelog import _core

# A thread's token or a task of asyncio. Such references are equal if they refer to the same one.
Caller = weakref.ref[Any]
Positions = dict[int, int]  # {topic id: offset}


# ---- who reads ---------------------------------------------------------------------------

running_loop: Callable[[], object] | None = None  # of asyncio, once a caller may be a task


class _Token:
    """Stands for a thread, and ends with it."""


class _Here(threading.local):
    """Of each thread. `mark`: another object after each begin of a transaction."""

    def __init__(self) -> None:
        self.token: object = _Token()
        self.mark = object()


here = _Here()


def this_caller() -> Caller:
    """The present thread, or in an event loop, the present task."""
    return weakref.ref(present())


def present() -> object:
    """A token of the present thread, or in an event loop, the present task."""
    global running_loop
    asyncio = sys.modules.get("asyncio")  # without it, there are no tasks
    task = None
    if asyncio is not None:
        running_loop = asyncio._get_running_loop
        with contextlib.suppress(RuntimeError):  # no event loop runs in this thread
            task = asyncio.current_task()
    return here.token if task is None else task


def called_by(caller: Caller, call: Callable[[], object]) -> None:
    """Make a call for another caller, a task whose calls take place in a thread of their own."""
    own = here.token
    here.token = caller() or own
    try:
        call()
    finally:
        here.token = own


# ---- open transactions -------------------------------------------------------------------


class Ending(Protocol):
    """A transaction that may have a reader's position."""

    __weakref__: Any  # a reader does not keep it: one that its program has dropped cannot commit
    _number: int
    _maker: Caller
    _readers: dict[int, Any]  # the `GroupMember`s that have a span of it, by their ids

    @property
    def _ledger(self) -> object:
        """What it commits to."""

    @property
    def _may_commit(self) -> bool:
        """Whether it has neither been committed nor aborted."""

    def _settle_readers(self) -> None:
        """After its end, tell its readers their groups' positions, or let them go back."""


# Transactions that have not ended, by number, and the numbers of each caller's.
_begun: weakref.WeakValueDictionary[int, Ending] = weakref.WeakValueDictionary()
_of_callers: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
clock = itertools.count()  # of begins, and of what readers note


def begin(transaction: Ending) -> int:
    """A caller begins a transaction. Returns its number: later ones have higher ones."""
    number = next(clock)
    _begun[number] = transaction
    _of_callers.setdefault(present(), []).append(number)
    here.mark = object()
    return number


def end(transaction: Ending) -> None:
    """It has ended, and its readers know how."""
    _begun.pop(transaction._number, None)
    who = transaction._maker()
    try:
        if who is not None:
            _of_callers[who].remove(transaction._number)
    except (KeyError, ValueError):  # its begin was interrupted
        pass


def open_ones_of(who: object, ledger: object) -> Iterator[Any]:
    """The open transactions of a thread or task on a ledger, the latest one first."""
    for number in reversed(list(_of_callers.get(who, ()))):
        transaction = _begun.get(number)
        if transaction is not None and transaction._may_commit and transaction._ledger is ledger:
            yield transaction


# ---- what was read -----------------------------------------------------------------------


class Span:
    """What a transaction has read by one reader, or a caller outside of transactions.

    - `since`: when that began, by `clock`. `first`: where. `last`: where it ended; None: no other
      caller has read since.
    - `is_again`: the reader was committed since the transaction read by it first.
    - `has_aborted`: so that it is read again. Until that, only its caller can commit past it, who
      still has what it read. `is_dropped`: nobody can: the program may have been about to go on
      with what it had read.
    - `is_stale`: because another transaction has aborted, what it had sent is read again, so it
      cannot commit the position. `holds`: not all was given back for that, or it has read since.
    """

    __slots__ = (
        "caller",
        "first",
        "has_aborted",
        "holds",
        "is_again",
        "is_dropped",
        "is_stale",
        "last",
        "since",
    )

    def __init__(
        self, caller: Caller, since: int, first: Positions, *, is_again: bool = False
    ) -> None:
        self.caller, self.since, self.first, self.is_again = caller, since, first, is_again
        self.last: Positions | None = None
        self.has_aborted = self.is_dropped = self.is_stale = False
        self.holds = True

    @property
    def is_open(self) -> bool:
        """Whether its transaction has not ended, and what it has read is not to be read again."""
        return self.holds and not self.has_aborted

    def begins_before(self, positions: Positions) -> bool:
        """Whether it begins before these positions, on any topic."""
        return any(offset < positions[topic] for topic, offset in self.first.items())

    def ends_behind(self, positions: Positions, at: Positions) -> bool:
        """Whether it ends behind these positions, on any topic. `at`: those of the reader."""
        last = at if self.last is None else self.last
        return any(offset > positions[topic] for topic, offset in last.items())

    def give_back(self, positions: Positions) -> None:
        """What it has read from there on is read again: another transaction has aborted."""
        self.is_stale, self.holds = True, self.begins_before(positions)

    def read_again(self, at: Positions) -> None:
        """Its caller reads on, from here."""
        if not self.holds:
            self.first, self.holds = at, True

    def reach_back(self, other: Span | None) -> None:
        """It includes what the other one holds, and begins there."""
        if other is None or not other.holds:
            return
        if self.holds:
            firsts = self.first.items()
            self.first = {topic: min(offset, other.first[topic]) for topic, offset in firsts}
        else:
            self.first, self.holds = other.first, True

    def abort(self, is_dropped: bool) -> None:
        """Its transaction has aborted; or its program has dropped it."""
        self.is_dropped = self.is_dropped or (is_dropped and not self.is_again)
        self.has_aborted = True


def _after_fork_in_child() -> None:
    global _begun, _of_callers
    _begun, _of_callers = weakref.WeakValueDictionary(), weakref.WeakKeyDictionary()


_core.in_forked_child(_after_fork_in_child)
