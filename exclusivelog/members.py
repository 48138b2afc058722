"""Readers of groups as parts of transactions: who reads, and where they continue after an abort."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from exclusivelog import _core

# A thread, and a task of its event loop. A weak reference, which is equal to others of that task.
Caller = tuple[int, weakref.ref[Any] | None]
Mark = tuple[object, int]  # of a thread, and of its newest transaction; see `_Newest`
UNREAD: Mark = (None, -1)


_running_loop: Callable[[], object] | None = None  # of asyncio, once a caller may be a task


def this_caller() -> Caller:
    """The present thread and, in an event loop, the present task."""
    global _running_loop
    asyncio = sys.modules.get("asyncio")  # without it, there are no tasks
    task = None
    if asyncio is not None:
        _running_loop = asyncio._get_running_loop
        with contextlib.suppress(RuntimeError):  # no event loop runs in this thread
            task = asyncio.current_task()
    return threading.get_ident(), None if task is None else weakref.ref(task)


class Ending(Protocol):
    """A transaction that has a reader's position."""

    __weakref__: Any  # a reader does not keep it: one that its program has dropped cannot commit

    def _settle_readers(self) -> None:
        """After its end, tell its readers their groups' positions, or let them go back."""


class Part(Protocol):
    """A reader of one topic."""

    topic_id: int
    cursor: Any  # a `Cursor`
    continues_at: int  # of a group's reader, after a transaction has aborted


class GroupMember:
    """Base of the readers that may have a group: `Reader` and `GroupReader`.

    What a group's reader has read since its group's last commit is given back when a transaction
    of the thread or task that reads by it aborts: the reader reads it again (rule G11). If the
    transaction had the reader's position, it goes back at once. Otherwise it goes back at its next
    read, unless its position is committed before that: its caller then still has what it read.
    A transaction that was dropped before it ended has aborted.

    Only one open transaction has a reader's position: if there were two, and the one with the
    earlier messages aborted, the other one would commit past them.
    """

    membership: Any  # the cursor of its group, a `GroupCursor`; None without a group
    returns: bool  # go back before the next read
    refused: bool  # to another transaction: it goes back to what the one that has it has committed
    abandoned: bool  # by another caller's transaction: it has to be read before a commit
    read_at: Mark  # of the thread that read by it last; UNREAD: nothing since the last commit
    # The transaction that has its position, until that has ended. Weak, until it commits.
    transaction: Callable[[], Ending | None] | None
    users: set[Caller]  # who has read by it since the last commit
    by_itself: bool  # its `commit` was its last one, not that of a transaction
    committed_at: int  # the newest transaction of its caller, or the one that committed, then
    joiner: Caller | None  # whose transaction had its position last
    # What its own `commit` is about to store, {topic id: offset}; None if the outcome is known.
    committing: Mapping[int, int] | None

    def _begin_alone(self) -> None:
        """It takes part in no transaction yet."""
        self.returns = self.refused = self.abandoned = self.by_itself = False
        self.transaction = self.committing = self.joiner = None
        self.read_at, self.users, self.committed_at = UNREAD, set(), -1

    @property
    def _parts(self) -> Sequence[Part]:
        """Its readers of single topics, or itself."""
        return getattr(self, "readers", None) or (cast(Part, self),)

    def _offsets_to_commit(self) -> dict[int, int]:
        """{topic id: the offset at which the group continues after a commit now}."""
        return {part.topic_id: part.cursor.position for part in self._parts}

    def _has_committed(self, positions: Mapping[int, int], newest: int) -> None:
        """Its group has these positions now, {topic id: offset}. `newest`: no transaction up to
        this one, if it is dropped from now on, sends the reader back."""
        self.committed_at = max(self.committed_at, newest)
        for part in self._parts:
            part.continues_at = positions[part.topic_id]
        self.returns, self.refused = self.refused, False
        if self._offsets_to_commit() == positions:  # else it has read on meanwhile
            self.read_at, self.users, self.abandoned = UNREAD, set(), False

    def _go_back(self) -> None:
        """Continue at the group's position, or at the last `seek` after that."""
        for part in self._parts:
            part.cursor.move_to(part.continues_at)
        self.returns = self.refused = self.abandoned = False

    def _is_in(self, transaction: Ending) -> bool:
        """Whether this transaction has its position."""
        held = self.transaction
        return held is not None and held() is transaction

    @property
    def _is_behind(self) -> bool:
        """Whether its next read continues at the group's position."""
        held = self.transaction
        return self.returns or (held is not None and held() is None)

    def _settle(self) -> Ending | None:
        """Return the open transaction that has its position. If one that had it has ended, learn
        how; wait for a commit that goes on after an interrupt."""
        held = self.transaction
        if held is None:
            return None
        transaction = held()
        if transaction is not None:
            transaction._settle_readers()
        elif self.transaction is held:  # it was dropped
            if self.joiner in self.users:  # else another caller has moved the reader since
                self._abandon()
            self.transaction = None
        return transaction if self.transaction is held else None

    def _abandon(self) -> None:
        """The transaction that it was read for was dropped: it goes back before it is read, and no
        other one can have its position before that. What that one sends may be of messages that
        are read again."""
        self.abandoned = self.returns = True

    def _note_use(self) -> None:
        """Note who reads by it, and go back if a transaction has aborted. Before each read."""
        if self.transaction is not None:
            self._settle()
        if self.committing is not None:
            self._settle_own_commit()
        mark = newest_here.mark
        if mark[0] is not self.read_at[0] or (
            _running_loop is not None and _running_loop() is not None
        ):  # another thread, or perhaps another task of this one
            self._has_user()
        self.read_at = mark
        if self.returns:
            self._go_back()

    def _joins(self, transaction: Ending) -> None:
        """Its present position is part of this transaction from now on."""
        self.transaction = weakref.ref(transaction)
        self.returns = self.refused = self.by_itself = False
        self.joiner = self._has_user()

    def _has_sought(self) -> None:
        """Its caller has moved it to another message: what other callers have read is not read
        again for them."""
        self.users = set()
        self._has_user()

    def _has_user(self) -> Caller:
        caller = this_caller()
        self.users.add(caller)
        _in_use[id(self)] = self
        return caller

    def _awaits(self, transaction: Ending) -> None:
        """This transaction commits. If an exception interrupts that, and its program drops it, its
        outcome is needed all the same."""
        self.transaction = lambda: transaction

    def _check_free(self, transaction: Ending | None) -> None:
        """Raise ValueError if the position is part of another open transaction than this one."""
        holder = self._settle()
        if holder is not None and holder is not transaction:
            self.refused = True  # what was read for the refused one is read again
            raise ValueError(
                f"reader={self!r}: its position is part of another open transaction. Commit or "
                "abort that one first, or use `with`, which aborts it when an exception is raised"
            )
        if self.abandoned and transaction is not None:
            raise ValueError(
                f"reader={self!r}: a transaction that it was read for has aborted, or was dropped, "
                "so it has gone back. Abort this one, and read again; `with` aborts one at an "
                "exception"
            )

    def _commit_alone(self) -> None:
        """Commit its position, in no transaction."""
        self._check_free(None)
        if self.abandoned:
            self._go_back()
        self.committing = positions = self._offsets_to_commit()
        self.membership.commit(positions)
        self._note_own_commit(positions)  # another thread may have settled it meanwhile

    def _settle_own_commit(self) -> None:
        """If its own commit was interrupted, find out whether the group has its position."""
        positions = self.committing
        if positions is None:
            return
        if self.membership.positions(positions) == positions:
            self._note_own_commit(positions)
        self.committing = None

    def _note_own_commit(self, positions: Mapping[int, int]) -> None:
        """It takes part in a transaction again only if it is read in that."""
        self._has_committed(positions, newest_here.mark[1])
        self.by_itself, self.committing = True, None


class _Newest(threading.local):
    """What a reader notes at a read: the thread, and the number of the newest transaction that the
    thread has begun; -1: none."""

    def __init__(self) -> None:
        self.mark: Mark = (object(), -1)

    def begins(self, number: int) -> None:
        """This thread has begun a transaction."""
        self.mark = (self.mark[0], number)


newest_here = _Newest()


# By their ids. No WeakSet: iterating over one raises an error if another thread adds to it.
_in_use: weakref.WeakValueDictionary[int, GroupMember] = weakref.WeakValueDictionary()


def members_in_use() -> list[GroupMember]:
    """The readers of groups, of all ledgers, that were read."""
    return living(_in_use)


T = TypeVar("T")


def living(objects: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """Those that there are, while other threads add and remove some."""
    return [each for ref in objects.valuerefs() if (each := ref()) is not None]


def _after_fork_in_child() -> None:
    global _in_use
    _in_use = weakref.WeakValueDictionary()


_core.in_forked_child(_after_fork_in_child)
