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

import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from exclusivelog import _core

# A thread's token or a task of asyncio. Such references are equal if they refer to the same one.
Caller = weakref.ref[Any]
Positions = dict[int, int]  # {topic id: offset}


# ---- who reads ---------------------------------------------------------------------------

running_loop: Callable[[], object] | None = None  # of asyncio, once a caller may be a task


class _Token:
    """Stands for a thread, and ends with it. `begun`: its transactions that have not ended."""

    __slots__ = ("__weakref__", "begun")

    def __init__(self) -> None:
        self.begun: Begun = []


class _Here(threading.local):
    """Of each thread. `mark`: another object after each begin of a transaction."""

    def __init__(self) -> None:
        self.token: object = _Token()
        self.mark = object()


here = _Here()


def this_caller() -> Caller:
    """The present thread, or in an event loop, the present task."""
    caller = weakref.ref(present())
    hash(caller)  # which the reference keeps: it is looked up also once its caller has ended
    return caller


def present() -> object:
    """A token of the present thread, or in an event loop, the present task."""
    global running_loop
    asyncio = sys.modules.get("asyncio")  # without it, there are no tasks
    if asyncio is None:
        return here.token
    running_loop = asyncio._get_running_loop
    task = None if asyncio._get_running_loop() is None else asyncio.current_task()
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

    # To itself: a reader does not keep it, as one that its program has dropped cannot commit.
    _this: weakref.ref[Any]
    _number: int
    _maker: Caller
    _readers: dict[int, Any]  # the `GroupMember`s that have a span of it, by their ids
    _ledger: object  # that it commits to

    @property
    def _may_commit(self) -> bool:
        """Whether it has neither been committed nor aborted."""

    def _settle_readers(self) -> None:
        """After its end, tell its readers their groups' positions, or let them go back."""


Begun = list[weakref.ref[Any]]  # a caller's transactions that have not ended

_of_tasks: weakref.WeakKeyDictionary[Any, Begun] = weakref.WeakKeyDictionary()
clock = itertools.count()  # of begins, and of what readers note


def begin(transaction: Ending) -> None:
    """A caller begins a transaction, which gets its number: later ones have higher ones."""
    transaction._number = next(clock)
    who = transaction._maker()
    begun = who.begun if type(who) is _Token else _of_tasks.setdefault(who, [])
    if begun:  # one may be left of an interrupted begin
        begun[:] = [this for this in begun if this() is not None]
    begun.append(transaction._this)
    here.mark = object()


def end(transaction: Ending) -> None:
    """It has ended, and its readers know how."""
    who = transaction._maker()
    begun = [] if who is None else begun_by(who)
    if transaction._this in begun:  # else its begin was interrupted
        begun.remove(transaction._this)


def begun_by(who: Any) -> Begun:
    """The transactions of a thread or task that have not ended."""
    return who.begun if type(who) is _Token else _of_tasks.get(who) or []


def open_ones_of(who: object, ledger: object) -> list[Any]:
    """The open transactions of a thread or task on a ledger, the latest one first."""
    found = [transaction for this in reversed([*begun_by(who)]) if (transaction := this())]
    return [one for one in found if one._may_commit and one._ledger is ledger]


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
        self, caller: Caller, since: int, first: Positions, is_again: bool = False
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
        for topic, offset in self.first.items():  # noqa: SIM110 - called often, so no generator
            if offset < positions[topic]:
                return True
        return False

    def ends_behind(self, positions: Positions, at: Positions) -> bool:
        """Whether it ends behind these positions, on any topic. `at`: those of the reader."""
        last = at if self.last is None else self.last
        for topic, offset in last.items():  # noqa: SIM110
            if offset > positions[topic]:
                return True
        return False

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
            if other.begins_before(self.first):
                firsts = self.first.items()
                self.first = {topic: min(offset, other.first[topic]) for topic, offset in firsts}
        else:
            self.first, self.holds = other.first, True

    def abort(self, is_dropped: bool) -> None:
        """Its transaction has aborted; or its program has dropped it."""
        self.is_dropped = self.is_dropped or (is_dropped and not self.is_again)
        self.has_aborted = True


def _after_fork_in_child() -> None:
    global _of_tasks
    _of_tasks = weakref.WeakKeyDictionary()
    if type(here.token) is _Token:
        here.token.begun = []


_core.in_forked_child(_after_fork_in_child)
