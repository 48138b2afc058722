"""The base of shared states and maps: replica, ownership, snapshots, reads and writes.

A write makes this process the topic's exclusive owner (`Ownership`), brings the copy in memory up
to date (`Replica`), appends, and applies the appended messages. This process stays the owner until
another process waits for the topic; if it does not release it in time, it is evicted (rule I8).

Writers hold the state's lock only to compute, append and apply. They wait for the flush without it,
so that concurrent writers share one flush (rule I5). A read that has seen an unflushed write waits
for that flush, too: otherwise its caller would see a write that a power loss could undo.

**A replica** is a copy of a topic's state in the memory of this process (rules I1, I4). It starts
with the newest snapshot, and applies every later message once, in order. state.py and map.py define
the effect of a message.

**Ownership** of a state's topic is acquired by the first write, and kept until another process
waits for the topic (rules B2, D8, I1). **Snapshots** are taken by a background thread (rule I4).
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from exclusivelog import _core, logs, threads
from exclusivelog.arguments import as_int, check_not_internal, check_timeout, is_whole
from exclusivelog.backend import EngineBackend, Kind, Snapshot, TopicStore
from exclusivelog.closing import Closing
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerCorruptedError,
    LedgerError,
    OffsetTrimmedError,
    OwnershipLostError,
    ProducerFencedError,
    StateError,
    WaitTimeoutError,
    called_reentrantly,
)
from exclusivelog.foreign import is_raised_by_a_handler, pass_on_of_a_handler
from exclusivelog.messages import Item, item_of, message_of
from exclusivelog.producer import Append, Producer, ProducerFuture
from exclusivelog.roles import RoleClaim
from exclusivelog.state.calls import CallFuture, Calls
from exclusivelog.state.joining import Applies, Compute, Owner, Then, writer_in
from exclusivelog.topic import Topic, claim_id
from exclusivelog.transaction import Claim, HoldsClaim, Transaction, Wait, check_transaction
from exclusivelog.waits import time_limit

# ---- snapshots -------------------------------------------------------------------------


log = logging.getLogger(__name__)

NEVER = (1 << 63) - 1


class SnapshotRefused(StateError):
    """A snapshot was not stored, because the state could not be restored from it."""


class Snapshots(_core.SnapshotsBase):
    """The schedule of one state's snapshots.

    - `ledger`, `topic`: for log lines.
    - `every`: take a snapshot after so many messages; None: never.
    - `take`: takes a snapshot; called in the background thread.
    """

    def __init__(
        self, ledger: str, topic: str, every: int | None, take: Callable[[], object]
    ) -> None:
        every = as_int(every)
        if every is not None and (not is_whole(every) or every < 1):
            raise ValueError(f"snapshot_every={every!r}: it takes a number of writes")
        # Set by the background thread; the next call raises it.
        self.refused: SnapshotRefused | None = None
        self._ledger, self._topic = ledger, topic
        self._every, self._take = every, take
        self._newest = 0
        self.due_at = NEVER if every is None else every  # an offset
        self._thread: threading.Thread | None = None

    def note(self, offset: int) -> None:
        """Record that there is a snapshot up to this offset."""
        self._newest = max(self._newest, offset)
        if self._every is not None:
            self.due_at = self._newest + self._every

    def take_if_due(self, position: int) -> None:
        """Take a snapshot in the background, if one is due at this offset and none is running."""
        if position < self.due_at or (self._thread is not None and self._thread.is_alive()):
            return
        self.note(position)
        thread = threading.Thread(
            target=self._take_quietly, name="exclusivelog-snapshot", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # too many threads; the write itself is in the log
            self._log_none(error)
        else:
            self._thread = thread

    def _take_quietly(self) -> None:
        try:
            self._take()
        except SnapshotRefused as error:
            self._every, self.due_at, self.refused = None, NEVER, error
        except Exception as error:  # the next one may succeed
            self._log_none(error)

    def _log_none(self, error: Exception) -> None:
        logs.emit(log, logs.NO_SNAPSHOT, ledger=self._ledger, topic=self._topic, reason=str(error))

    def close(self) -> None:
        """Wait for a snapshot that is being taken."""
        if self._thread is not None:
            self._thread.join(timeout=60)


# ---- the copy in memory ----------------------------------------------------------------


log = logging.getLogger(__name__)


class Content(Applies, Protocol):
    """The content of a replica. `refusals`: what `apply` raises for a message that it does not
    take."""

    refusals: type[Exception]

    def way_out(self, offset: int) -> str:
        """What to do about a message that it does not take, at this offset."""

    @property
    def restores_views(self) -> bool:
        """Whether it can be restored from a compacted view of the topic."""

    def reset(self) -> None:
        """Return to the content before the first message."""

    def to_items(self) -> list[Item]:
        """Return the items of a snapshot; SnapshotRefused if they would not restore the content."""

    def restore(self, items: list[Item]) -> None:
        """Replace the content by that of a snapshot."""


class Replica(_core.ReplicaBase):
    """A copy of one topic's state. Its owner serialises all calls."""

    def __init__(self, topic: Topic, content: Content, snapshots: Snapshots) -> None:
        self.content = content
        self.position = 0  # all messages before it are applied; the reader's position may differ
        self.torn = False  # True: an apply was interrupted, so the content must be restored
        self.restored = 0  # how often that was done
        self.failure: StateError | None = None  # a message that cannot be applied
        self.read_to_time = 0  # the publish time of the last message that was read
        self._store: TopicStore = topic.engine.backend.topic_store(topic.id)
        self.words, self.word = self._store.change_counter()
        self.seen = -1  # no mark
        self._topic, self._snapshots = topic, snapshots
        content.reset()
        self._take_snapshot()
        self._reader = topic.reader(self.position)

    def check(self) -> None:
        """Raise StateError if a message could not be applied."""
        if self.failure is not None:
            raise StateError(str(self.failure)) from self.failure.__cause__

    def catch_up(self) -> None:
        """Apply all messages that the topic has now."""
        seen = self.mark()  # before reading, to notice later messages
        if self.torn:
            self._begin_anew()
        while True:
            try:
                self._read_on()
                break
            except OffsetTrimmedError as error:
                # Other processes may trim messages that a snapshot covers while this one reads.
                if not self._take_snapshot():
                    raise OffsetTrimmedError(
                        f"the state in topic {self._topic.name!r} cannot be restored: {error}; its "
                        f"snapshot goes up to offset {self.position}"
                    ) from error
        self.seen = seen

    def _read_on(self) -> None:
        if self._reader.position != self.position:
            self._reader.cursor.move_to(self.position)
        message = None
        for message in self._reader:
            self._apply_one(message.offset, *item_of(message))
        if message is not None:
            self.read_to_time = message.publish_time

    def apply_own(self, first: int, items: list[Item]) -> None:
        """Apply the messages that this process has just appended at `position`."""
        for offset, item in enumerate(items, first):
            self._apply_one(offset, *item)

    def _apply_one(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        self.torn = True  # until it is applied and counted: an interrupt may come before
        try:
            self.content.apply(key, value)
        except Exception as error:
            pass_on_of_a_handler(error)
            if not isinstance(error, self.content.refusals):
                raise  # another thread has raised it in this one
            self.failure = StateError(
                f"topic {self._topic.name!r}: the message at offset {offset} could not be applied: "
                f"{error!r}. It is in the log; {self.content.way_out(offset)}"
            )
            raise self.failure from error
        self.position = offset + 1
        self.torn = False

    # ---- snapshots -----------------------------------------------------------------------

    def _begin_anew(self) -> None:
        self.restored += 1
        self._reset()
        self._take_snapshot()
        self.torn = False

    def _reset(self) -> None:
        self.content.reset()
        self.position = 0

    def _take_snapshot(self) -> bool:
        """Restore the newest snapshot if it is ahead of `position`. Returns whether it was."""
        found = self._newest()
        if found is None or found[0] <= self.position:
            return False
        self.torn = True
        try:
            self.content.restore(found[1])
        except Exception as error:
            pass_on_of_a_handler(error)
            self._do_without(found[0], error)
            return False
        self.position = found[0]
        self._snapshots.note(found[0])
        self.torn = False
        return True

    def _newest(self) -> Snapshot | None:
        try:
            return self._store.newest(self.position, self.content.restores_views)[1]
        except LedgerCorruptedError as error:
            if self._topic.first_offset > self.position:
                raise
            self._log_damaged(str(error))
            return None

    def _do_without(self, offset: int, error: Exception) -> None:
        # The application's encode and decode functions do not match.
        text = f"topic {self._topic.name!r}: the snapshot as of offset {offset} cannot be decoded"
        if self._topic.first_offset > 0:
            raise StateError(f"{text}: {error!r}, and older messages were trimmed") from error
        self._log_damaged(f"{text}: {error!r}")
        self._reset()
        self.torn = False

    def _log_damaged(self, reason: str) -> None:
        logs.emit(
            log,
            logs.SNAPSHOT_DAMAGED,
            ledger=self._topic.engine.path,
            topic=self._topic.name,
            reason=reason,
        )

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


# ---- the owner -------------------------------------------------------------------------


# Minimum tenure under contention: each change of owner costs two transactions, and two processes
# that write all the time would do little else.
TENURE_SECONDS = 0.005

# An owner that does not release the topic for another process is evicted after 0.1 s (rule I8),
# which are so many looks at these intervals.
LOOKS = 4
LOOK_SECONDS = 0.025

# A commit waits so long for a topic while it keeps the maps and states before: longer than it takes
# to evict an owner, and shorter than others may keep it.
WAITED_WITH_OTHERS_SECONDS = 0.5

# A write whose function takes longer than that is computed anew each time its process was evicted
# meanwhile. After so many times the process keeps the topic until it is done.
LOST_BEFORE_KEPT = 3


class Holding:
    """The producer that owns the topic, and its sender, by which the compiled calls append."""

    __slots__ = ("producer", "sender")

    def __init__(self, producer: Producer) -> None:
        self.producer, self.sender = producer, producer._sender


class Ownership(_core.OwnershipBase):
    """The ownership of one topic by this process.

    - `writing`: the lock that serialises writes; held during an acquire or release.
    - `prepare`: called to catch up after each acquire, before the first write.
    - `claim`: what the owning producers are bound to, if anything.
    """

    def __init__(
        self,
        topic: Topic,
        writing: _core.Lock,
        calls: Calls,
        prepare: Callable[[], None],
        claim: Claim | None,
    ) -> None:
        self.producer: Holding | None = None
        self.asked: Producer | None = None  # the producer to be released before the next write
        self.checked = -1  # the topic's ownership version when this process last was the owner
        self._topic, self._writing, self._calls, self._prepare = topic, writing, calls, prepare
        self._claim = claim
        self._lent: Holding | None = None  # to a commit; afterwards: it was interrupted
        self._engine: EngineBackend = topic.engine.backend
        self._waiting: ProducerFuture | None = None  # the request for the topic, while it waits
        self._waiting_for: CallFuture[Any] | None = None  # the background call that made it
        self._since = 0.0
        self._ended = False
        self._store: TopicStore = self._engine.topic_store(topic.id)

    def is_held(self) -> bool:
        """Whether this process is still the owner, so that no other process can have written."""
        held = self.producer
        if held is None:
            return False
        version = self._engine.ownership_version(self._topic.id)
        if version == self.checked:
            return True
        if held.producer.state != "open":
            self.release()
            return False
        self.checked = version
        return True

    def acquire(self, end: float | None, keep: bool = False) -> Producer:
        """Become the owner and catch up; return the producer. Waits for the topic until `end`
        (monotonic clock; None: no limit). `keep`: do not release it before the next write."""
        self.give_up_lent()
        asked, self.asked = self.asked, None
        if asked is not None:
            self._give_back(asked)
        if self.is_held() and self.producer is not None:
            return self.producer.producer
        try:
            producer = self._await_producer(end, None if keep else self._wanted)
        except OwnershipLostError:
            if self._claim is not None:
                self._claim.check()  # its error says more
            raise
        try:
            self._prepare()
        except BaseException:
            producer.close()
            raise
        self._since, self.checked = _core.monotonic(), -1
        self.producer = Holding(producer)
        return producer

    def is_by(self, producer: Producer) -> bool:
        """Does this producer own the topic, as far as this process knows?"""
        held = self.producer
        return held is not None and held.producer is producer

    def _await_producer(
        self, end: float | None, wanted: Callable[[Producer], object] | None
    ) -> Producer:
        while True:
            left = None if end is None else max(0.0, end - _core.monotonic())
            # Set before the wait: a late cancel of an earlier call must not end it.
            self._waiting_for = call = self._calls.current
            self._waiting = future = self._topic.producer_async(
                "wait_for_exclusive",
                timeout=left,
                follow=False,
                on_fenced=self._lost,
                on_wanted=wanted,
                claim=self._claim,
            )
            try:
                if self._ended or (call is not None and call.given_up):
                    future.cancel()  # `end` or `give_up` may have run before `_waiting` was set
                return self._granted(future)
            except ProducerFencedError:
                # Another producer has fenced this one instead of waiting: queue again. If its claim
                # was lost, the next request says so.
                continue
            except concurrent.futures.CancelledError:
                if self._ended:
                    raise closed_error(self._topic.name) from None
                raise
            except BaseException:
                future.give_up()
                raise
            finally:
                self._waiting = None

    def _granted(self, future: ProducerFuture) -> Producer:
        """Wait for the grant. Evict an owner that does not answer: its process is stopped, or busy
        (rule I8). It takes the topic again with its next write."""
        owner, looks = 0, 0
        while not future._await_end(LOOK_SECONDS):
            before, owner = owner, self._store.yielding_owner()
            if future.session is not None and owner == future.session.id:
                owner = 0  # the grant of this future, whose notification is not read yet
            # Counted, not measured: this process may have been stopped as well (rule C9).
            looks = looks + 1 if owner == before else 0
            if owner and looks >= LOOKS:
                with contextlib.suppress(WaitTimeoutError):  # a stopped process may be in a commit
                    self._store.evict_late(owner, time_limit(LOOK_SECONDS, _core.now()))
        return future.result()

    def release(self) -> None:
        """Release the topic, if this process owns it."""
        held, self.producer = self.producer, None
        if held is not None:
            held.producer.close()

    def _give_back(self, producer: Producer) -> None:
        if self.is_by(producer):
            self.producer = None
        producer.close()

    def lend(self) -> Holding:
        """What owns the topic, for the commit of a transaction. Until `take_back`, reads go to the
        log. Under the lock of writes."""
        self._lent = held = self.producer
        self.producer = None
        assert held is not None
        return held

    def take_back(self) -> None:
        """Own the topic again by what was lent, if it still does."""
        self.producer, self._lent = self._lent, None

    def give_up_lent(self) -> None:
        """Release what was lent: it is not known what the commit has appended."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.producer.close()

    # ---- called in threads of their own --------------------------------------------------

    def _lost(self, producer: Producer, error: ProducerFencedError) -> None:
        """Note that another process owns the topic, so that reads catch up with its writes."""
        with self._writing:
            if self.is_by(producer):
                self.release()

    def _wanted(self, producer: Producer) -> None:
        """Note that another process waits for the topic."""
        left = self._since + TENURE_SECONDS - _core.monotonic()
        if 0 < left <= TENURE_SECONDS:
            time.sleep(left)
        self.asked = producer  # a write that comes before this thread releases it
        with self._writing:
            self._give_back(producer)
            if self.asked is producer:
                self.asked = None

    # ---- cancelling ----------------------------------------------------------------------

    def give_up(self, call: CallFuture[Any]) -> None:
        """Stop waiting for the topic on behalf of this call, now or later."""
        call.given_up = True
        waiting = self._waiting
        if waiting is not None and self._waiting_for is call:
            waiting.cancel()

    def end(self) -> None:
        """End any wait with EngineClosedError, now and later."""
        self._ended = True
        waiting = self._waiting
        if waiting is not None and not self._engine.closed:
            waiting.cancel()


def closed_error(topic: str) -> EngineClosedError:
    """The error of a call after the state was closed."""
    return EngineClosedError(f"this state of topic {topic!r} is closed; open it again")


# ---- a shared state --------------------------------------------------------------------


R = TypeVar("R")
P = ParamSpec("P")
M = TypeVar("M", bound="Shared")
Future = concurrent.futures.Future

SNAPSHOT_EVERY = 100_000


def _wrong_topic(call: str, topic: object) -> TypeError:
    kind = type(topic)
    if kind.__module__.startswith("exclusivelog.aio"):
        return TypeError(
            f"topic={topic!r}: exclusivelog.{call} takes a topic of exclusivelog; use "
            f"exclusivelog.aio.{call} for one of exclusivelog.aio"
        )
    return TypeError(f"topic takes a Topic, not {kind.__name__}")


def bound_claim(topic: Topic, given: Claim | HoldsClaim | None) -> Claim | None:
    """Check the `claim` argument of a map or state: a claim, or a role or lock, which has one."""
    if given is None:
        return None
    claim: Any = getattr(given, "claim", given)
    claim_id(topic, claim)
    topic.engine.backend.check_supports("bound_producers")
    topic.engine.backend.check_open()
    if isinstance(claim, RoleClaim) and topic.name in claim.role.topics:
        raise ValueError(
            f"claim={given!r}: this role owns topic {topic.name!r} itself, which the map or state "
            "would wait for. Leave the topic out of the role's topics"
        )
    claim.check()
    found: Claim = claim
    return found


class Write(Generic[R]):
    """One call's write, and its result so far."""

    __slots__ = ("appended", "appends", "compute", "done", "result", "then")

    def __init__(self, compute: Compute[R], then: Then[R] | None) -> None:
        self.compute, self.then = compute, then
        self.appended: Append | None = None
        self.appends = False  # has it anything to append?
        self.done = False
        self.result: R


class Shared(_core.SharedBase, Closing):
    """The base of `SharedState` and `SharedMap`."""

    _appended = Append  # for the compiled core
    _ownership: Ownership
    _snapshots: Snapshots
    _replica: Replica

    def __init__(
        self,
        topic: Topic,
        kind: Kind,
        content: Content,
        snapshot_every: int | None,
        timeout: float | None,
        claim: Claim | HoldsClaim | None,
    ) -> None:
        check_timeout(timeout)
        if not isinstance(topic, Topic):
            raise _wrong_topic(type(self).__name__, topic)
        check_not_internal(topic.name)
        self.topic = topic
        self._engine: EngineBackend = topic.engine.backend
        self._kind, self._timeout = kind, timeout
        self._claim = bound_claim(topic, claim)
        self._writing = _core.Lock()  # taken before `_lock`; not held to wait for a flush
        self._lock = _core.Lock()  # of the replica: never held to wait for topic or flush
        self._inside = 0  # the thread that runs a user function, which must not call back
        self._closing = self._closed = False
        self._unflushed: Append | None = None  # what was appended last
        self._calls = Calls(self._flush)
        self._ownership = Ownership(
            topic, self._writing, self._calls, self._prepare_to_write, self._claim
        )
        kept = "snapshots" in self._engine.capabilities
        self._snapshots = Snapshots(
            self._engine.path,
            topic.name,
            snapshot_every if kept else None,
            self._snapshot_unless_closed,
        )
        self._store: TopicStore = topic.engine.backend.topic_store(topic.id)
        self._kind_is_known = self._store.check_kind(kind)
        replica = Replica(topic, content, self._snapshots)
        replica.catch_up()
        self._replica = replica  # set last: from now on the state may be called
        _states[id(self)] = self

    # ---- checks --------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise unless the state can be used by this thread."""
        if self._usable():
            return
        self._check_usable()
        if self._busy_here:
            raise called_reentrantly(f"topic {self.topic.name!r}")

    @property
    def _busy_here(self) -> bool:
        return self._writing.held_here() or self._lock.held_here()

    def _check_usable(self) -> None:
        # Takes no lock: in a forked child, it may never be released.
        self._check_open()
        self._replica.check()
        self._check_outside()
        if self._snapshots.refused is not None:
            error, self._snapshots.refused = self._snapshots.refused, None
            raise SnapshotRefused(f"{error}. This call did nothing; no more are taken") from error

    def _check_open(self) -> None:
        self._engine.check_open()
        if self._closed:
            raise closed_error(self.topic.name)

    def _check_enters(self) -> None:
        self._check_open()

    def _check_outside(self) -> None:
        if self._inside == threading.get_ident():
            raise RuntimeError(
                f"topic {self.topic.name!r}: called from inside a function that this state runs, "
                "whose result would depend on this call; call it after that function has returned"
            )

    # ---- reading -------------------------------------------------------------------------

    def _read(self, find: Callable[[], R], latest: bool) -> R:
        """Return what `find()` finds in the content, once that is durable."""
        while True:
            self._check()
            with self._lock:
                self._freshen(latest)
                result = find()
                seen = self._unflushed
            if self._settled(seen):
                return result

    def _freshen(self, latest: bool) -> None:
        """Catch up before a read, unless there can be no new messages."""
        replica, ownership = self._replica, self._ownership
        if latest:
            if replica.torn or not ownership.is_held() or self._engine.latest_needs_log:
                self._engine.make_visible()
                self._catch_up()
        elif replica.torn or (ownership.producer is None and replica.mark() != replica.seen):
            self._catch_up()

    def _catch_up(self) -> None:
        self._settled(self._unflushed, now=True)  # the reader does not see it before its flush
        self._replica.catch_up()

    # ---- writing -------------------------------------------------------------------------

    def _append(
        self,
        compute: Compute[R],
        then: Then[R] | None = None,
        transaction: Transaction | None = None,
    ) -> R:
        """Become the owner, call `compute` on the newest content, and append the messages that it
        returns: (messages, result). If given, `then` computes the result after the messages are
        applied. `transaction`: let its commit do that."""
        if transaction is not None:
            joined: R = self._join(transaction, compute, then)
            return joined
        self._check()
        write = Write(compute, then)
        end = self._time_limit()
        while True:  # until what it has read and appended is in the log
            try:
                self._write_as_owner(write, end)
            except Exception as error:
                if self._settled(write.appended) or is_raised_by_a_handler(error):
                    raise
            except BaseException:
                self._settled(write.appended)
                raise
            else:
                if self._settled(write.appended):
                    return write.result

    def _write_as_owner(self, write: Write[Any], end: float | None) -> None:
        write.done = False
        with self._writing:
            for tries in itertools.count():
                self._check_usable()
                keep = tries >= LOST_BEFORE_KEPT
                producer = self._ownership.acquire(end, keep)
                try:
                    self._write_by(producer, write)
                finally:
                    if keep:
                        self._ownership.release()  # it is not told that others wait
                if write.done:
                    return

    def _write_by(self, producer: Producer, write: Write[Any]) -> None:
        """Write, unless the topic was lost before: `write.done` stays False."""
        write.appends = False
        try:
            with self._lock:
                if self._ownership.is_by(producer):
                    self._write(producer, write)
        except Exception as error:
            if write.appends or is_raised_by_a_handler(error) or self._owns_still(producer):
                raise
        if write.done and not write.appends:
            write.done = self._owns_still(producer)

    def _time_limit(self) -> float | None:
        """Until when a write that begins now waits for the topic (monotonic clock)."""
        return None if self._timeout is None else _core.monotonic() + self._timeout

    def _check_claim(self) -> None:
        """OwnershipLostError if it is bound to a claim that was lost."""
        if self._claim is not None:
            self._claim.check()

    def _prepare_to_write(self) -> None:
        """Catch up, before the first write of a new owner."""
        if not self._kind_is_known:
            self._store.record_kind(self._kind)
            self._kind_is_known = True
        with self._lock:
            self._catch_up()

    def _write(self, producer: Producer, write: Write[Any]) -> None:
        """Compute, append and apply; `write.done` stays False if the topic was lost before the
        append."""
        self._replica.check()
        # A write that appends nothing depends on the unflushed ones that it has read.
        write.appended = self._unflushed
        items, write.result = self._call_on(write.compute, self._content)
        write.appends = bool(items)
        if items and not self._send(producer, items, write):
            return
        write.done = True
        self._take_snapshot_if_due()
        if write.then is not None:
            write.result = write.then(self._content)

    def _owns_still(self, producer: Producer) -> bool:
        """Whether a write that appends nothing has read the newest content. On a cluster another
        machine may have evicted this owner, and an append would have shown it. Without the
        replica's lock: reads need not wait for the log's answer."""
        if not self._engine.latest_needs_log or producer.state == "open":
            return True
        self._ownership.release()
        return False

    def _take_snapshot_if_due(self) -> None:
        if self._replica.position >= self._snapshots.due_at:
            self._snapshots.take_if_due(self._replica.position)

    def _send(self, producer: Producer, items: list[Item], write: Write[Any]) -> bool:
        """Append and apply; False if the topic was lost before."""
        try:
            self._unflushed = write.appended = producer._sender.append(
                [message_of(*item) for item in items]
            )
            self._apply_own(write.appended.offset, items)
        except ProducerFencedError:
            self._ownership.release()
            return False
        except StateError as error:
            self._ownership.release()
            error.maybe_written = True  # the message is in the log
            raise
        except BaseException:
            # It is unknown how much was applied: the next owner reads it from the log.
            self._ownership.release()
            raise
        return True

    def _apply_own(self, first: int, items: list[Item]) -> None:
        if first == self._replica.position:
            self._replica.apply_own(first, items)
        else:
            self._catch_up()

    # ---- in a transaction; see `Joinable` ------------------------------------------------

    def _join(self, transaction: Transaction, compute: Compute[R], then: Then[R] | None) -> R:
        """`_append`, by the commit of a transaction."""
        check_transaction(transaction)
        self._engine.check_supports("transactions")
        self._engine.check_writable()
        self._check()
        self._check_claim()
        writer = writer_in(transaction, self, self._engine.ledger)
        while True:
            with self._lock:
                self._freshen(latest=True)
                if not (writer.is_new and self._has_expired()):
                    result: R = writer.write(transaction, compute, then)
                    seen = self._unflushed
                    break
            self._remove_expired()
        self._settled(seen)  # the result depends on it
        return result

    def _has_expired(self) -> bool:
        """Whether something is to be removed before a transaction writes."""
        return False

    def _remove_expired(self) -> None:
        """Remove it."""

    def _call_on(self, compute: Compute[R], content: Any) -> tuple[list[Item], R]:
        self._inside = threading.get_ident()
        try:
            return compute(content)
        finally:
            self._inside = 0

    def _version(self) -> tuple[int, int]:
        self._replica.check()
        return self._replica.position, self._replica.restored

    def _newest(self) -> Any:
        return self._content

    def _fork(self) -> Applies:
        raise NotImplementedError

    def _lend(self, locks: _core.Locks, check: Callable[[], object]) -> Owner | Wait:
        self._check()
        end = self._time_limit()
        if not locks.take(self._writing):
            return self._writing
        soon = _core.monotonic() + WAITED_WITH_OTHERS_SECONDS
        while True:
            self._check_usable()
            try:
                producer = self._ownership.acquire(soon if end is None else min(soon, end))
            except WaitTimeoutError:
                if end is not None and end <= soon:
                    raise
                return self._own()
            with self._lock:
                if self._replica.torn:
                    self._catch_up()
                check()
                if self._ownership.is_by(producer):  # no read has noticed its loss meanwhile
                    return self._ownership.lend().sender

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        """Wait for the topic, as a write does."""
        with self._writing:
            self._check_usable()
            self._ownership.acquire(self._time_limit())
        yield

    def _take_back(self, first: int, items: list[Item]) -> None:
        with self._lock:
            if self._replica.torn:  # by a read whose flush has failed
                self._catch_up()
            try:
                if items:
                    self._apply_own(first, items)
            except StateError as error:
                error.maybe_written = True
                raise
            self._ownership.take_back()
        self._take_snapshot_if_due()

    def _give_up_lent(self) -> None:
        with contextlib.suppress(ExclusiveLogError):  # the commit raises the reason
            self._ownership.give_up_lent()

    # ---- durability ----------------------------------------------------------------------

    def _settled(self, appended: Append | None, now: bool = False) -> bool:
        """Return once this is durable. False if this process had lost the topic before, as it may
        on a cluster: then it is not in the log, and never will be. `now`: also in a background
        call; else the acknowledgement of that call waits instead, where the topic cannot be lost
        so."""
        if appended is None or appended.flushed:
            return True
        if not (now or self._engine.latest_needs_log) and self._calls.defer(appended):
            return True
        try:
            self._flush(appended)
        except ProducerFencedError:
            return False
        return True

    def _flush(self, appended: Append) -> None:
        try:
            appended.await_flush()
        except Exception:
            # It is unknown whether the append is in the log: restore the content from the log. Not
            # if another thread has done so, and the topic was acquired again.
            with self._lock:
                held = self._ownership.producer
                if held is None or held.sender is appended.sender:
                    self._unflushed = None
                    self._replica.torn = True
                    self._ownership.release()
            raise

    def _flush_what_was_read(self) -> None:
        self._settled(self._unflushed, now=True)

    def snapshot(self) -> int:
        """Store a snapshot, so that opening the state need not read earlier messages (rule I4).
        Returns the offset after the last message that it includes: `topic.trim(before=...)` can
        remove the messages before it.

        Raises StateError if the state could not be restored from it.
        """
        while True:
            self._check()
            with self._lock:
                self._freshen(latest=self._engine.latest_needs_log)
                offset, items = self._replica.position, self._replica.content.to_items()
                seen = self._unflushed
            if self._settled(seen, now=True):  # a snapshot must not contain unflushed writes
                break
        self._engine.snapshot(self.topic.id, offset, items)
        self._snapshots.note(offset)
        return offset

    def _snapshot_unless_closed(self) -> None:
        try:
            self.snapshot()
        except SnapshotRefused:
            raise
        except Exception:
            if not self._closed and not self._engine.closed:
                raise

    # ---- in the background ---------------------------------------------------------------

    def snapshot_async(self) -> Future[int]:
        """`snapshot`, as a future."""
        return self._submit(self.snapshot)

    def _submit(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> Future[R]:
        """Run `call(*args, **kwargs)`, one of this state's own methods, in the background. Calls
        run in the order in which they were submitted. `cancel()` on the future is too late once
        a call has begun; see `_give_up`."""
        self._check_open()
        if self._closing:
            raise closed_error(self.topic.name)
        try:
            with threads.needed(self._engine.path):
                return self._calls.submit(functools.partial(call, *args, **kwargs))
        except (RuntimeError, LedgerError):
            if self._closing:  # another thread has closed it
                raise closed_error(self.topic.name) from None
            raise

    def _give_up(self, future: Future[Any]) -> None:
        """If a submitted call waits for the topic, let it leave the queue. A write that has already
        begun is finished."""
        if isinstance(future, CallFuture):
            self._ownership.give_up(future)

    def close(self) -> None:
        """Release the topic and end the background threads. Closing twice does nothing. Calls
        submitted before are executed; those that would have to wait for the topic end with
        EngineClosedError. Raises RuntimeError in a function that the state runs."""
        if self._engine.forked:
            return
        self._check_outside()  # else a deadlock: the calls that it waits for wait for this one
        if self._busy_here:  # called by a signal handler or a finalizer
            self._engine.call_later(self.close)
            return
        self._closing = True  # from now on, no call can be submitted
        self._ownership.end()
        self._calls.close()
        with self._writing:
            if self._closed:
                return
            self._closed = True
            if not self._engine.closed:
                self._give_up_lent()
                self._ownership.release()
                self._replica.close()
        self._snapshots.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on topic {self.topic.name!r}>"


# By id: a map is not hashable.
_states: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()


def _close_all() -> None:
    # Before the engines, whose function was registered earlier: what was submitted is executed, and
    # what waits for a topic ends.
    for state in list(_states.values()):
        engine = state.topic.engine
        try:
            state.close()
        except Exception as error:
            logs.emit(
                log,
                logs.CLOSING_FAILED,
                ledger=engine.path,
                engine=engine.name,
                engine_id=engine.id,
                reason=str(error),
            )


atexit.register(_close_all)


def acknowledge(shared: Shared, future: Any, result: Any, appended: Append) -> None:
    """Have `future.set_result(result)` called in the background, once `appended` is durable."""
    shared._calls.acknowledge(future, result, appended)


def in_background(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], Future[R]]:
    """The method's second form, which returns a future."""
    name = method.__name__

    def call(self: M, /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return self._submit(getattr(self, name), *args, **kwargs)

    functools.update_wrapper(call, method)
    call.__name__, call.__doc__ = f"{name}_async", f"`{name}`, as a future."
    call.__qualname__ = f"{method.__qualname__}_async"
    return call
