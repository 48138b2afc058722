"""Readers of groups as parts of transactions: who reads, and where they continue after an abort."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from exclusivelog import _core, reads
from exclusivelog.reads import Caller, Ending, Positions, Span


class Part(Protocol):
    """A reader of one topic."""

    topic_id: int
    cursor: Any  # a `Cursor`
    continues_at: int  # of a group's reader, after a transaction has aborted


class GroupMember:
    """Base of the readers that may have a group: `Reader` and `GroupReader`.

    What a transaction's caller has read by it outside of any transaction, before that began, counts
    as read in it: `for message in reader: with engine.transaction()`. After a `commit` of the
    reader's own it does not.

    If the transaction had the reader's position, the reader goes back at once. Otherwise it goes
    back at its next read, unless its position is committed before that: its caller then still has
    what it read.
    """

    membership: Any  # the cursor of its group, a `GroupCursor`; None without a group
    spans: dict[int, Span]  # by the numbers of their transactions
    returns: bool  # go back before the next read: a span has aborted
    alone: dict[Caller, Span]  # of callers, outside of transactions
    current: Span | None  # of the last read
    read_at: object  # the mark of the thread that read by it last; None: note the next read
    # The transaction that has its position, until that has ended. Weak, until it commits.
    transaction: Callable[[], Ending | None] | None
    joined: int  # the number of the transaction that had its position last
    _joined_at: Positions | None  # that position; None: its caller has moved the reader since
    by_itself: bool  # its `commit` was its last one, not that of a transaction
    # What its own `commit` is about to store; None if the outcome is known.
    committing: Positions | None
    _listed: bool  # in `_in_use`

    def _begin_alone(self) -> None:
        """It takes part in no transaction yet."""
        self.returns = self.by_itself = False
        self.transaction = self.committing = self.read_at = self.current = None
        self.spans, self.alone, self.joined = {}, {}, -1
        self._joined_at = None
        self._listed = False

    @property
    def _parts(self) -> Sequence[Part]:
        """Its readers of single topics, or itself."""
        return (cast(Part, self),)

    def _offsets_to_commit(self) -> Positions:
        """{topic id: the offset at which the group continues after a commit now}."""
        return {part.topic_id: part.cursor.position for part in self._parts}

    def _group_positions(self) -> Positions:
        """{topic id: the group's position, or that of the last `seek` after it}."""
        return {part.topic_id: part.continues_at for part in self._parts}

    def _next_positions(self) -> Positions:
        """{topic id: the offset of the next message to read}."""
        at = self._offsets_to_commit()
        return self._target(at) if self.returns else at

    # ---- reads ---------------------------------------------------------------------------

    def _note_use(self) -> None:
        """Note who reads by it, and go back if a transaction has aborted. Before each read."""
        if self.transaction is not None:
            self._settle()
        if self.committing is not None:
            self._settle_own_commit()
        if self.returns:
            self._go_back()
        mark, loop = reads.here.mark, reads.running_loop
        if mark is not self.read_at or (loop is not None and loop() is not None):
            # Another thread, another transaction, or perhaps another task of this thread.
            self._has_user(reads.present())
            self.read_at = mark

    def _has_user(self, who: object) -> None:
        at = self._offsets_to_commit()
        opened = reads.open_ones_of(who, self.membership.ledger) if reads.begun_by(who) else []
        if opened:
            span = self._span_of(opened[0], at)
            span.read_again(at)
            self._goes_on(span, at)
        else:
            self._goes_on(None if self.by_itself else self._aside_of(who, at), at)

    def _goes_on(self, span: Span | None, at: Positions) -> None:
        """What is read from now on, from these positions, is read in this span."""
        before = self.current
        if span is not before:
            if before is not None:
                before.last = at
            if span is not None:
                span.last = None
            self.current = span

    def _aside_of(self, who: object, at: Positions) -> Span:
        caller = weakref.ref(who)
        span = self.alone.get(caller)
        if span is None or span.is_stale:
            if self.alone:
                for other in [each for each in list(self.alone) if each() is None]:
                    self.alone.pop(other, None)
            span = self.alone[caller] = Span(caller, next(reads.clock), at)
            if not self._listed:
                _in_use[id(self)] = self
                self._listed = True
        return span

    def _span_of(self, transaction: Ending, at: Positions) -> Span:
        number = transaction._number
        span = self.spans.get(number)
        if span is None:
            is_again = id(self) in transaction._readers
            transaction._readers[id(self)] = self
            span = self.spans[number] = Span(transaction._maker, number, at, is_again)
        return span

    def _asides(self) -> list[Span]:
        """Of callers that are there, and have read outside of transactions."""
        return [span for span in list(self.alone.values()) if span.caller() is not None]

    def _held(self, besides: Caller | None = None) -> list[Span]:
        """What open transactions have read, or their callers have before they began; not those of
        the caller `besides`."""
        asides, spans = list(self.alone.values()), list(self.spans.values())
        others = [span for span in asides if span.caller != besides and span.is_open]
        held = [span for span in others if self._is_in_use(span)] if others else []
        return held + [span for span in spans if span.caller != besides and span.is_open]

    def _is_in_use(self, aside: Span) -> bool:
        """Whether its caller has begun a transaction since."""
        who = aside.caller()
        begun = [] if who is None else reads.open_ones_of(who, self.membership.ledger)
        return any(transaction._number > aside.since for transaction in begun)

    def _has_sought(self) -> None:
        """Its caller has moved it to another message: what was read before is not read again."""
        self.spans.clear()
        self.alone.clear()
        self._joined_at = None
        self.returns, self.read_at, self.current = False, None, None

    # ---- aborts --------------------------------------------------------------------------

    def _give_back(self, transaction: Ending, *, is_dropped: bool, with_alone: bool) -> None:
        """The transaction has aborted, or was dropped: its caller reads again what it has read.
        Only flags are set, as this may run in any thread. `with_alone`: before it began, too."""
        number = transaction._number
        span = self.spans.get(number)
        before = self._read_before(transaction) if with_alone else None
        if before is not None and span is None:
            span = self.spans[number] = Span(transaction._maker, number, before.first, True)
        if span is not None:
            span.reach_back(before)
        if span is not None and span.holds:
            span.abort(is_dropped)
            self.returns = True

    def _read_before(self, transaction: Ending) -> Span | None:
        """What the caller of a transaction has read by it before that, outside of any."""
        span = self.alone.get(transaction._maker)
        if span is None or span.since > transaction._number:
            return None
        return None if span.caller() is None else span  # none of a thread that has ended

    def _target(self, at: Positions) -> Positions:
        """Where it goes back to, from its positions: not before the position that an open
        transaction has, which will be the group's unless that aborts."""
        target, kept = self._unkept_target(at), self._kept_position()
        return {topic: max(offset, kept.get(topic, 0)) for topic, offset in target.items()}

    def _kept_position(self) -> Positions:
        held = None if self.transaction is None else self.transaction()
        is_open = held is not None and held._may_commit and held._number == self.joined
        return (self._joined_at if is_open else None) or {}

    def _unkept_target(self, at: Positions) -> Positions:
        group = self._group_positions()
        if not self._held():
            return group
        gone = [span.first for span in self._gone()]
        firsts = {topic: min([at[topic], *[first[topic] for first in gone]]) for topic in at}
        return {topic: max(first, group[topic]) for topic, first in firsts.items()}

    def _go_back(self) -> None:
        """Read again what transactions that have aborted had read."""
        at = self._offsets_to_commit()
        target, gone = self._target(at), [*self.spans.items()]
        if (kept := self.spans.get(self.joined)) is not None and self._kept_position():
            firsts = self._unkept_target(at)  # if that transaction aborts, this is read again
            kept.first = {topic: min(first, firsts[topic]) for topic, first in kept.first.items()}
        callers = {span.caller for _, span in gone if span.has_aborted}
        for span in [*self.spans.values(), *self._asides()]:
            if span.is_open and callers - {span.caller} and span.ends_behind(target, at):
                span.give_back(target)
        for part in self._parts:
            part.cursor.move_to(target[part.topic_id])
        self.returns, self.read_at, self.current = False, None, None
        for number, span in gone:
            if span.has_aborted:
                self.spans.pop(number, None)
            span.last = at if span.last is None else span.last

    def _forget(self, transaction: Ending) -> None:
        """It has ended. What its caller has read in it, and it has not committed or given back,
        was read outside of it."""
        span = self.spans.get(transaction._number)
        if span is not None and not span.has_aborted:
            at = self._offsets_to_commit()
            self._goes_on(None, at)
            del self.spans[transaction._number]
            who = transaction._maker()
            if who is not None and span.holds and not self.by_itself:
                aside = self._aside_of(who, at)
                aside.reach_back(span)
                aside.last = span.last
        self.read_at = None

    # ---- commits -------------------------------------------------------------------------

    def _has_committed(self, positions: Positions) -> None:
        """Its group has these positions now."""
        for part in self._parts:
            part.continues_at = positions[part.topic_id]
        at = self._offsets_to_commit()
        for number, span in [*self.spans.items()]:
            if self._is_left(span, positions, at):
                continue
            if span.is_stale:
                span.holds = False
            else:
                self.spans.pop(number, None)
        for span in self._asides():
            if not (
                span.is_stale
                or (self._is_left(span, positions, at) and span.ends_behind(positions, at))
            ):
                self.alone.pop(span.caller, None)
        self.returns = bool(self._gone())
        self.read_at = None

    def _is_left(self, span: Span, positions: Positions, at: Positions) -> bool:
        """Whether a span is needed after a commit; if so, let it begin there."""
        if not span.begins_before(positions):
            return True
        if span.has_aborted or not span.ends_behind(positions, at):
            return False
        span.first = {topic: max(first, positions[topic]) for topic, first in span.first.items()}
        return True

    def _is_in(self, transaction: Ending) -> bool:
        """Whether this transaction has its position."""
        held = self.transaction
        return held is not None and held() is transaction

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
            span = self.spans.get(self.joined)  # none: another caller has moved the reader since
            if span is not None:
                span.abort(True)
                self.returns = True
            self.transaction = None
        return transaction if self.transaction is held else None

    def _joins(self, transaction: Ending) -> None:
        """Its present position is part of this transaction from now on."""
        at = self._offsets_to_commit()
        span = self._span_of(transaction, at)
        span.reach_back(self._read_before(transaction))
        span.is_again = False
        self._goes_on(span, at)
        self.transaction, self.joined = transaction._this, transaction._number
        self._joined_at = at
        self._keep_position()
        self.by_itself = False

    def _keep_position(self) -> None:
        """Its caller commits what it still has: do not go back."""
        self.returns = False
        for number, span in [*self.spans.items()]:
            if span.has_aborted:
                self.spans.pop(number, None)

    def _gone(self) -> list[Span]:
        """What transactions had read that have aborted."""
        return [span for span in [*self.spans.values()] if span.has_aborted]

    def _awaits(self, transaction: Ending) -> None:
        """This transaction commits. If an exception interrupts that, and its program drops it, its
        outcome is needed all the same."""
        self.transaction = lambda: transaction

    def _check_free(self, transaction: Ending | None) -> None:
        """Raise ValueError if the position is part of another open transaction than this one."""
        holder = None if self.transaction is None else self._settle()
        if holder is not None and holder is not transaction:
            raise ValueError(
                f"reader={self!r}: its position is part of another open transaction. Commit or "
                "abort that one first, or use `with`, which aborts it when an exception is raised"
            )

    def _check_joins(self, transaction: Ending) -> None:
        """Raise ValueError if this transaction cannot have the present position."""
        if self._is_read_by(transaction):
            return
        self._check_free(transaction)
        if self._is_to_be_read_again(transaction):
            raise ValueError(
                f"reader={self!r}: a transaction that it was read for has aborted, or was dropped, "
                "so it has gone back. Abort this one, and read again; `with` aborts one at an "
                "exception"
            )
        self._check_beside(transaction._maker)

    def _is_read_by(self, transaction: Ending) -> bool:
        """Whether nobody reads by it but the transaction's caller, who has begun no other one: so
        it nearly always is."""
        before = self.alone.get(transaction._maker)
        return (
            self.transaction is None
            and not self.spans
            and len(self.alone) == (before is not None)
            and not (before is not None and before.is_stale)
        )

    def _is_to_be_read_again(self, transaction: Ending) -> bool:
        """Whether this transaction may have sent what is read again."""
        gone = self._gone()
        if gone and self._is_gone_back(transaction, gone):
            return True
        span, before = self.spans.get(transaction._number), self._read_before(transaction)
        is_stale = span is not None and span.is_stale
        return is_stale or (before is not None and before.is_stale)

    def _is_gone_back(self, transaction: Ending, gone: list[Span]) -> bool:
        # Its caller may still have what the transaction before it had read, and send that.
        kept = [
            span
            for span in gone
            if span.caller == transaction._maker and span.since < transaction._number
        ]
        if any(span.is_dropped for span in kept):
            return True
        if len(gone) > len(kept):
            self._go_back()
            return bool(kept)
        return False

    def _check_beside(self, caller: Caller) -> None:
        """Raise ValueError if a commit would pass what a transaction of another caller has read."""
        others = self._held(besides=caller)
        at = self._offsets_to_commit() if others else {}
        for span in others:
            if span.begins_before(at):
                raise ValueError(
                    f"reader={self!r}: an open transaction of another thread or task has read by "
                    "it, and if it aborted, its messages would be skipped. Commit or abort that "
                    "one first; `with` aborts one at an exception"
                )

    def _commit_alone(self) -> None:
        """Commit its position, in no transaction."""
        self._check_free(None)
        caller = reads.this_caller()
        if any(span.is_dropped or span.caller != caller for span in self._gone()):
            self._go_back()
        self._check_beside(caller)
        self._keep_position()
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

    def _note_own_commit(self, positions: Positions) -> None:
        """It takes part in a transaction again only if it is read in that."""
        self._has_committed(positions)
        self.by_itself, self.committing = True, None


# By their ids. No WeakSet: iterating over one raises an error if another thread adds to it.
_in_use: weakref.WeakValueDictionary[int, GroupMember] = weakref.WeakValueDictionary()


def members_in_use() -> list[GroupMember]:
    """The readers of groups, of all ledgers, that were read outside of transactions."""
    return living(_in_use)


T = TypeVar("T")


def living(objects: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """Those that there are, while other threads add and remove some."""
    return [each for ref in objects.valuerefs() if (each := ref()) is not None]


def _after_fork_in_child() -> None:
    global _in_use
    _in_use = weakref.WeakValueDictionary()


_core.in_forked_child(_after_fork_in_child)
