"""Claims (`engine.own`), and transactions that may require them.

A transaction appends messages to several topics and stores reader cursors, together. Nothing is
written before the commit. The commit is one transaction of the ledger, which checks every session,
every reader's claim and all that was required. So it is atomic after any crash, and fenced as a
whole (rules B3, F5, F6, G3). Consume, process and produce exactly once:

>>> with topic.producer() as producer:
...     _ = producer.send_many([b"1", b"2"])
>>> squares = engine.topic("squares").producer("exclusive")
>>> with topic.reader(group="squarer") as reader, engine.transaction() as txn:
...     for message in reader:
...         _ = squares.send(b"%d" % int(message.value) ** 2, transaction=txn)
...     txn.commit_cursor(reader)
>>> [message.value for message in engine.topic("squares").reader()], txn.offsets[squares]
([b'1', b'4'], range(0, 2))
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from exclusivelog import _core, threads
from exclusivelog.arguments import check_generation, check_group, check_resource, check_timeout
from exclusivelog.backend import (
    ClaimSession,
    EngineBackend,
    Opened,
    Put,
    Required,
    TransactionParts,
    TransactionSender,
)
from exclusivelog.closing import OfThisProcess
from exclusivelog.errors import (
    ExclusiveLogError,
    OwnershipError,
    OwnershipLostError,
    ProducerFencedError,
    TransactionAbortedError,
    describe_engine,
)
from exclusivelog.futures import Future
from exclusivelog.members import GroupMember, members_in_use
from exclusivelog.reads import Caller, begin, end, open_ones_of, this_caller
from exclusivelog.waits import in_slices, time_limit, until_settled

__all__ = ["Claim", "Transaction"]

# ---- claims ----------------------------------------------------------------------------


OnLost = Callable[["Claim", OwnershipLostError], object]


class Claim(OfThisProcess):
    """The resources that one call of `engine.own` has claimed. They are lost as a whole.

    `group` is the group's name, "" if it was left out. A claim is held until it is released or
    revoked, or its engine closes: dropping this object does not release it.

    >>> with engine.own("reports", {"march": None}) as claim:
    ...     claim.is_valid, claim.generations
    (True, {'march': 1})
    """

    def __init__(
        self, engine: Opened, session: ClaimSession, on_lost: OnLost | None = None
    ) -> None:
        self.group = session.group
        self.engine: Any = engine  # that made this claim
        self._engine: EngineBackend = engine.backend
        self._session = session
        self._on_lost = on_lost
        self._released = self._revoked = False

    @property
    def id(self) -> int:
        """The claim session's number, never given to another one on this ledger."""
        return self._session.id

    @property
    def is_valid(self) -> bool:
        """True while the whole claim is held; each call reads the ledger (rule F5)."""
        if self._released or self._engine.closed:
            return False
        return self._session.is_held()

    def check(self) -> None:
        """Raise OwnershipLostError unless the whole claim is still held (rule F5).

        If the claim was handed over, the error's `successor` names the destination."""
        self._engine.check_open()
        if self._released or not self._session.is_held():
            raise self._lost_error()

    def _lost_error(self) -> OwnershipLostError:
        if self._released:
            return OwnershipLostError(f"{self!r} was released; make a new one with engine.own")
        successor = self._session.successor()
        if successor is None:
            return OwnershipLostError(
                f"{self!r} was revoked: one of its resources was claimed with an equal or higher "
                "generation, or with 0. Make a new one with engine.own"
            )
        return OwnershipLostError(
            f"{self!r} was handed over with its topic to {describe_engine(successor)}; claim it "
            "there",
            successor=successor,
        )

    def _required(self) -> Required:
        """What a transaction that requires it checks: what it writes is written only if the claim
        is held then."""
        return Required(self._session, self._lost_error)

    def _lose(self, error: OwnershipLostError) -> None:
        """The claim was revoked: call `on_lost`."""
        self._revoked = True
        on_lost = self._on_lost
        if on_lost is not None and not self._released:
            self._engine.call_soon(lambda: on_lost(self, error))

    @property
    def generations(self) -> dict[str, int]:
        """{resource: generation}, to store as a fencing token in other systems. Raises
        OwnershipLostError once the claim is lost (rule F5)."""
        self.check()
        return dict(self._session.generations)

    def release(self) -> None:
        """Release the claim. A second call, one after the claim was revoked, or one in a forked
        child, does nothing.

        Producers that are bound to it first commit what they have accepted; then they end with
        ProducerRevokedError."""
        if not (self._released or self._engine.forked or self._engine.closed):
            self._engine.claims.drain_bound(self.id)
            self._end()

    def _end(self) -> None:
        """Release the claim; for an engine that is closing."""
        if not self._released:
            self._session.release()
            self._released = True

    def __enter__(self) -> Claim:
        self._check_enters()
        return self

    def _check_enters(self) -> None:
        """Raise unless it is held, as far as this process knows: to ask may fail, which would leave
        it held."""
        self._engine.check_open()
        if self._is_over:
            raise self._lost_error()

    @property
    def _is_over(self) -> bool:
        """Is it known here that it is not held any more?"""
        return self._released or self._revoked

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return repr(self._session)


@dataclass(frozen=True)
class Listening:
    """What the backend keeps for a claim, and calls; see `exclusivelog.backend.Owned`."""

    claim: Claim

    def lose(self, error: OwnershipLostError) -> None:
        """It was revoked."""
        self.claim._lose(error)

    def end(self) -> None:
        """The engine is closing: release it."""
        self.claim._end()


# ---- the call ----------------------------------------------------------------------------


def check_transaction(given: object) -> Transaction:
    """Return the `transaction` argument of a send, or raise TypeError."""
    if not isinstance(given, Transaction):
        raise TypeError(f"transaction takes what engine.transaction() returns, not {given!r}")
    return given


def own(
    engine: Opened,
    group: str | Mapping[str, int | None] | None,
    resources: Mapping[str, int | None] | None,
    timeout: float | None,
    on_lost: OnLost | None,
) -> Claim:
    """Check the arguments, and make a claim within `timeout` seconds; see `Engine.own`."""
    backend: EngineBackend = engine.backend
    backend.check_writable()
    if isinstance(group, Mapping) and resources is None:
        group, resources = None, group
    if group is not None and resources is None:
        raise TypeError(
            f"own takes a mapping of resources to generations (or None), not {group!r}: "
            "own({'shard-7': None}), or own('group', {'shard-7': None})"
        )
    if group is not None:
        check_group(group)
    name = group if isinstance(group, str) else ""
    check_timeout(timeout)
    if on_lost is not None and not callable(on_lost):
        raise TypeError("on_lost takes a function of (claim, error)")
    if not isinstance(resources, Mapping) or not resources:
        raise TypeError("resources takes a mapping of names to generations, at least one")
    wanted: dict[str, int | None] = {}
    for resource, generation in resources.items():
        check_resource("resources", resource)
        wanted[resource] = check_generation(resource, generation)

    def make(session: ClaimSession) -> Listening:
        return Listening(Claim(engine, session, on_lost))

    end = _core.monotonic() + (timeout or 0.0)
    until = time_limit(timeout, _core.now())
    while True:
        backend.check_open()
        seen = backend.claims.mark()
        try:
            return backend.claims.hold(name, wanted, make, until).claim
        except OwnershipError as error:
            left = end - _core.monotonic()
            if left <= 0 or not error.retriable:
                raise
        backend.claims.wait(seen, left)


# ---- transactions ----------------------------------------------------------------------


State = Literal["open", "committed", "aborted", "unknown"]
R = TypeVar("R")


class HoldsClaim(Protocol):
    """A role: it is lost with its claim."""

    @property
    def claim(self) -> Claim:
        """The claim that the role is bound to."""


_committing = threads.Helpers("exclusivelog-transaction")
_core.in_forked_child(_committing.forget)


class Sender(TransactionSender, Protocol):
    """The sender of a producer, as a transaction uses it."""

    @property
    def ledger(self) -> object:
        """What stores its messages."""

    def enlist(self, producer: SendingProducer, caller: Caller) -> None:
        """A `with` block of this caller has begun to send by the producer in a transaction."""

    def discharge(self, producer: SendingProducer, caller: Caller) -> bool:
        """The block of this caller has ended."""


class SendingProducer:
    """Base of the producers that can send in a transaction."""

    __slots__ = ()

    _sender: Sender


Wait = contextlib.AbstractContextManager[object]  # which waits when it is entered


class Writer(Protocol):
    """What one map or state writes in a transaction."""

    def begin(self, transaction: Transaction, locks: _core.Locks) -> Wait | None:
        """The commit begins: own the topic, and add what is to be appended to the parts. Takes the
        lock of the map's or state's other writes. Returns what to wait for if others keep it, or
        keep the topic. TransactionAbortedError if something else was written since the transaction
        has read it."""

    def refuse(self, error: ProducerFencedError) -> None:
        """The commit was refused with this error: raise another one if the map's or state's topic
        was lost."""

    def end(self, transaction: Transaction, state: State) -> None:
        """The commit has ended: apply what it has appended, if it has."""


class Transaction(OfThisProcess):
    """Messages, writes of maps and states, and reader positions that are committed together.
    `engine.transaction` returns it.

    As a context manager it commits when its block ends, and aborts when an exception leaves the
    block. Without `with`, it has aborted once the program has dropped it. For one thread at a time.
    After the commit, `offsets` has the offsets of each producer's messages: {producer: range}.

    A producer that has sent in the transaction warns once (UserWarning) if the same thread or task
    then sends by it within the block without `transaction=`: that message is not a part of it.

    >>> shared = topic.producer()
    >>> with engine.transaction() as txn:
    ...     _ = shared.send(b"a", transaction=txn)
    ...     _ = shared.send(b"b", transaction=txn)
    >>> txn.state, txn.offsets[shared]
    ('committed', range(0, 2))
    """

    _settled = True  # nothing is left to tell its readers; so it is if `__init__` is interrupted
    _caller: Caller | None = None  # the caller whose `with` block this is
    _state: State = "open"
    _complete = False  # its commit has begun
    _refused = False  # by the commit; nothing was written
    _running: Future[None] | None = None  # its commit in a thread of the library
    _number = -1  # until it has begun

    def __init__(self, engine: EngineBackend, ledger: object = None) -> None:
        self._engine, self._ledger = engine, ledger or engine.ledger
        self._parts: TransactionParts[Sender] = TransactionParts()
        self._producers: dict[Sender, SendingProducer] = {}  # whose senders these are
        self._writers: dict[int, Writer] = {}  # maps and states, by the ids of their topics
        self._maker = this_caller()
        self._this = weakref.ref(self)
        self._call = _core.Call()  # its commit in this thread
        self._readers: dict[int, GroupMember] = {}  # that have a span of it, by their ids
        begin(self)
        self._settled = False

    @property
    def state(self) -> State:
        """ "open", "committed", "aborted" or "unknown".

        It is "unknown" during the commit, and after an I/O error in it. After such an error, open
        the engine and the producers again: `last_sequence_id`, or the group's position, shows
        whether the transaction was committed.

        After Ctrl-C, or another exception that was raised in the thread of the commit, it says as
        soon as the commit has ended whether the transaction is in the log."""
        if self._state == "unknown" and not self._is_running:
            self._find_out()
        return self._state

    @property
    def _is_running(self) -> bool:
        running = self._running
        return self._call.running or not (running is None or running.done())

    def _find_out(self) -> None:
        """The commit has ended."""
        attempt = self._parts.attempt
        if attempt is not None and attempt.committed:
            self._state = "committed"
        elif attempt is None or not attempt.tried or self._refused:
            self._state = "aborted"

    @property
    def offsets(self) -> dict[SendingProducer, range]:
        """The offsets of each producer's messages, once it is committed."""
        attempt = self._parts.attempt
        if self.state != "committed" or attempt is None:
            return {}
        return {
            self._producers[sender]: them
            for sender, them in attempt.offsets.items()
            if sender in self._producers  # else it is a map's or state's own
        }

    def _add(self, producer: SendingProducer, put: Put, numbered: bool) -> None:
        """Let the commit append messages of a producer. `put` adds them to an appender;
        `numbered`: they have sequence ids of their own."""
        sender, puts = self._sender_of(producer), self._parts.puts
        before = puts.get(sender)
        if not before and self._caller is not None:
            sender.enlist(producer, self._caller)
        if before is None:
            before = puts.setdefault(sender, [])
        before.append(put)
        if numbered:
            self._parts.numbered.add(sender)

    def _sender_of(self, producer: SendingProducer) -> Sender:
        """The producer's sender, for the commit. ValueError for a producer of another ledger."""
        self._check_open()
        sender = producer._sender
        if sender.ledger is not self._ledger:
            raise ValueError("transaction: it takes producers and readers of its own ledger")
        self._producers[sender] = producer
        return sender

    def require(self, holder: Claim | SendingProducer | HoldsClaim) -> None:
        """Let the commit fail unless this claim or role is held, or this producer still has its
        topic.

        - `holder`: a claim of `engine.own`, a role of `engine.role`, or a producer, which need not
          send in this transaction. To require several, call this for each of them.

        The commit checks it in its critical section. If the check fails, nothing of the transaction
        is in the log, and the commit raises OwnershipLostError for a claim or a role that was
        lost or released. For a producer it raises what the producer's sends would raise:
        ProducerFencedError, ProducerMovedError, EngineClosedError, TopicTerminatedError, ...

        >>> claim = engine.own({"shard-7": None})
        >>> with engine.transaction() as txn, topic.producer() as producer:
        ...     txn.require(claim)
        ...     _ = producer.send(b"by the owner of shard-7", transaction=txn)
        ...     txn.commit()
        """
        self._check_open()
        if not isinstance(holder, Claim | SendingProducer):
            holder = getattr(holder, "claim", holder)  # a role's
        if not isinstance(holder, Claim | SendingProducer):
            raise TypeError(f"require takes a role, a claim or a producer, not {holder!r}")
        if isinstance(holder, SendingProducer):
            self._parts.puts.setdefault(self._sender_of(holder), [])
            return
        if holder._session.ledger is not self._ledger:
            raise ValueError("transaction: it takes claims and producers of its own ledger")
        self._parts.claims.add(holder._required())

    def _writer_to(self, topic: int, ledger: object) -> Writer | None:
        """What writes to a map or state of this ledger and topic in the transaction, so far."""
        self._check_open()
        if ledger is not self._ledger:
            raise ValueError("transaction: it takes maps and states of its own ledger")
        return self._writers.get(topic)

    def _join(self, topic: int, writer: Writer) -> None:
        """Let it write to the map or state of this topic in the transaction."""
        self._writers[topic] = writer
        self._check_open()
        if self._complete:  # another task commits, and this one was cancelled
            raise TransactionAbortedError("the commit has begun, perhaps without this write")

    def _announce(self, producer: SendingProducer, info: dict[str, str]) -> None:
        """Announce when this transaction commits; see `Producer.announce`."""
        sender = self._sender_of(producer)
        self._parts.puts.setdefault(sender, [])  # the commit checks it as one that sends
        self._parts.announced[sender] = info

    def commit_cursor(self, reader: GroupMember) -> None:
        """Store the reader's present position as its group's position when this transaction
        commits (rule F6).

        Raises ValueError if another open transaction has a position of this reader, or if one of
        another thread or task has read by it: if that one aborted, this one would commit past its
        messages. And if one has aborted before whose messages this one may have sent as well."""
        self._check_open()
        if not hasattr(reader, "_offsets_to_commit"):
            raise TypeError(f"commit_cursor takes a reader with group=, not {reader!r}")
        membership = reader.membership
        if membership is None:
            raise ValueError(f"reader={reader!r} has no cursor; open it with group=")
        if membership.ledger is not self._ledger:
            raise ValueError("transaction: it takes producers and readers of its own ledger")
        reader._check_joins(self)
        self._parts.cursors[reader] = membership, reader._offsets_to_commit()
        reader._joins(self)

    def _check_open(self) -> None:
        """Raise TransactionAbortedError if the transaction was committed or aborted."""
        if self._state != "open":
            raise TransactionAbortedError(
                f"this transaction is {self._state}; begin a new one with engine.transaction()"
            )

    def commit(self) -> None:
        """Append and commit everything, or nothing. It is durable when this returns.

        Raises ProducerFencedError, ReaderFencedError, OwnershipLostError, LedgerFullError,
        DuplicateSequenceError, TopicTerminatedError, ... Then nothing of the transaction is in the
        log, unless the error's `maybe_written` is True. Raises TransactionAbortedError if it writes
        to a `SharedMap` or `SharedState` that something else has written to since: run it again.

        Ctrl-C interrupts only the wait: a commit that has begun continues, and `state` shows its
        outcome afterwards.
        """
        self._check_open()
        self._engine.check_free()
        self._complete = True
        try:
            if self._writers:
                self._commit_with_writers()
            else:
                self._call.run(self._commit)
        finally:
            self._writers.clear()
            if self._state == "open":
                self._state = "aborted"  # it has not begun
            if not self._is_running:  # else its thread does it
                self._settle_readers()

    def _commit_with_writers(self) -> None:
        """The same, as the owner of the maps and states, whose other writes wait meanwhile. In one
        order for all transactions, so that none waits for another one that waits for it."""
        writers = [writer for _, writer in sorted(self._writers.items())]
        while (kept := self._try_with(writers)) is not None:
            with kept:
                pass  # wait for it, holding nothing that others may wait for

    def _try_with(self, writers: list[Writer]) -> Wait | None:
        """Commit, or return what to wait for: a lock or a topic that others keep."""
        with _core.Locks() as locks, contextlib.ExitStack() as ends:
            ends.callback(self._end_writers, writers)
            for writer in writers:
                kept = writer.begin(self, locks)
                if kept is not None:
                    return kept
            try:
                self._call.run(self._commit)
            except ProducerFencedError as error:
                for writer in writers:
                    writer.refuse(error)
                raise
        return None

    def _end_writers(self, writers: list[Writer]) -> None:
        state = self.state
        with contextlib.ExitStack() as each:  # if one fails, too
            for writer in writers:
                each.callback(writer.end, self, "aborted" if state == "open" else state)

    def _commit(self) -> None:
        self._engine.check_open()
        if not self._parts:
            self._state = "committed"
            return
        self._state = "unknown"  # first: from here on, `state` finds out how it has ended
        for reader in self._parts.cursors:
            reader._awaits(self)
        if not self._commit_by(self._engine.commit_at_once):
            self._commit_in_thread()

    def _commit_by(self, commit: Callable[[TransactionParts[Sender]], R]) -> R:
        try:
            return commit(self._parts)
        except ExclusiveLogError as error:
            self._refused = not error.maybe_written
            raise

    def _commit_in_thread(self) -> None:
        """Commit in a thread of the library: an exception raised in this one (by a signal handler,
        or the time limit of a task queue) would leave producers paused."""
        self._running = running = Future[None]()
        try:
            _committing.call(self._engine.path, functools.partial(self._commit_for, running))
            in_slices(until_settled(running), None, self._engine.check_not_forked)
            running.result(0)
        finally:
            running.cancel()  # an interrupt may come before the commit has begun
            del running  # it may hold an error whose traceback refers to this frame

    def _commit_for(self, running: Future[None]) -> None:
        try:
            if running.set_running_or_notify_cancel():
                self._commit_now()
                running.set_result(None)
        except BaseException as error:
            running.set_exception(error)
        finally:
            del running

    def _commit_now(self) -> None:
        try:
            self._commit_by(self._engine.commit_transaction)
        finally:
            self._find_out()
            self._settle_readers_now()

    def abort(self) -> None:
        """Abort the transaction: nothing of it is written. After a commit this does nothing.

        Readers whose positions it would have committed go back: they read again what their groups
        have not committed."""
        if self._state == "open":
            self._state = "aborted"
            self._writers.clear()
            self._settle_readers()

    def _settle_readers(self) -> None:
        """After its end, let its readers know their groups' positions, or go back (rule G11). Waits
        for a commit that goes on after an interrupt."""
        running = self._running
        if running is not None and not running.done():
            in_slices(until_settled(running), None, self._engine.check_not_forked)
        if self.state != "open" and not self._is_running:
            self._settle_readers_now()

    def _settle_readers_now(self) -> None:
        for reader, (_, positions) in self._parts.cursors.items():
            # Without a transaction, it has not learned of this one, because of an interrupt.
            unknown = reader.transaction is None and not self._settled
            if not (reader._is_in(self) or unknown):
                continue  # it has gone back, or another transaction has its position now
            if self._state == "committed":
                reader._has_committed(positions)
            elif self._state == "aborted":
                reader._give_back(self, is_dropped=False, with_alone=True)
                reader._go_back()
            reader.transaction = None  # last: after an interrupt, its next read does it again
        if self._state == "aborted" and not self._settled:
            self._give_back(is_dropped=False)
        self._forget()

    def _give_back(self, *, is_dropped: bool) -> None:
        """Let its caller read again what it has read by readers without `commit_cursor`: it would
        have got their positions, had it not failed before."""
        read_alone = [] if self._has_beside() else members_in_use()  # else one beside it will
        for reader in {*self._readers.values(), *filter(self._is_near, read_alone)}:
            if is_dropped or reader not in self._parts.cursors:
                reader._give_back(self, is_dropped=is_dropped, with_alone=bool(read_alone))

    def _is_near(self, reader: GroupMember) -> bool:
        return reader.membership is not None and reader.membership.ledger is self._ledger

    def _forget(self) -> None:
        for reader in list(self._readers.values()):
            reader._forget(self)
        self._settled = True
        end(self)

    @property
    def _may_commit(self) -> bool:
        return self._state in ("open", "unknown")

    def _has_beside(self) -> bool:
        """Does the same caller use another one at the same time?"""
        who = self._maker()
        others = () if who is None else open_ones_of(who, self._ledger)
        return any(other is not self and bool(other._parts) for other in others)

    def __del__(self) -> None:
        """Dropped before it ended, it has aborted. Its readers go back at their next reads: this
        may run in any thread, also while that reads by one of them."""
        if not self._settled and self.state != "committed":
            self._give_back(is_dropped=True)
            self._forget()

    def __enter__(self) -> Transaction:
        self._check_open()
        self._caller = this_caller()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        caller, self._caller = self._caller, None
        if caller is not None:
            for sender, producer in self._producers.items():
                sender.discharge(producer, caller)
        if kind is None and self._state == "open":
            self.commit()
        else:
            self.abort()
