"""The interface between the public classes and a backend, which stores the log.

The public classes import this file and never a backend, so that there can be others than
`exclusivelog.local`. A backend imports it for the values that the two exchange.
"""

from __future__ import annotations

import abc
import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
)

from exclusivelog import _core
from exclusivelog.arguments import LARGEST_LIMITS, as_limit, check_seconds
from exclusivelog.errors import (
    ExclusiveLogError,
    OwnershipLostError,
    ProducerFencedError,
    ProducerMovedError,
)
from exclusivelog.events import Event
from exclusivelog.life import OpenEngine
from exclusivelog.messages import Columns, Encoded, Item, Raw
from exclusivelog.types import (
    AccessMode,
    Announcement,
    ClaimInfo,
    EngineInfo,
    EngineStats,
    GroupInfo,
    ModeName,
    Move,
    OwnerInfo,
    Report,
    Retention,
    RoleInfo,
    TopicStats,
    TransferInfo,
    WaiterInfo,
)
from exclusivelog.waits import AnyFuture, Requests, time_limit

State = Literal["open", "fenced", "moved", "closed"]
Kind = Mapping[str, str | None]  # what a topic holds, and its serialisers
Snapshot = tuple[int, list[Item]]  # (the offset after its last message, its items)
Who = TypeVar("Who", bound="TransactionSender")

# ---- requests ----------------------------------------------------------------------------


class RoleDefinition(NamedTuple):
    """What one request for a role binds: the ids of its topics; for each reader group the topics
    that it reads, {name: id}; for each group of claims the resources, {name: generation}."""

    topics: tuple[int, ...]
    groups: dict[str, dict[str, int]]
    claims: dict[str, dict[str, int | None]]


@dataclass(frozen=True, slots=True)
class ProducerRequest:
    """A request for a producer; `Topic.producer` describes each option.

    - `topic`: its id; `mode`: the value of an `AccessMode`; `name`: None for a new one.
    - `settle`: in nanoseconds. `created`: when the request was made (ns of
      the monotonic clock), as the backend sets it.
    - `notify_on_contention`: notify the producer when another one waits for the topic.
    - `bound_to`: the id of the claim that the producer is bound to; 0: none.
    - `lineage`: the number of the hand-over that it continues. The request is refused if another
      producer has held the topic since (rule E2). None: it continues none.
    - `role`: what a grant binds, if the topic is a role's own.
    """

    topic: int
    mode: str
    name: str | None = None
    priority: int = 0
    topic_epoch: int | None = None
    timeout: float | None = None
    settle: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    announce: dict[str, str] | None = None
    notify_on_contention: bool = False
    bound_to: int = 0
    lineage: int | None = None
    role: RoleDefinition | None = None
    created: int = 0

    @property
    def until(self) -> int:
        """When its timeout has passed, in ns of the monotonic clock; 0: never."""
        return time_limit(self.timeout, self.created)


# ---- a producer's session ----------------------------------------------------------------

SENT_AT_ONCE = 64 << 10  # bytes; a larger message is queued, and checked first


@dataclass(frozen=True)
class SessionOptions:
    """Options for sending; `Topic.producer` describes each."""

    linger: float = 0.0
    max_batch_messages: int = 100_000
    max_batch_bytes: int = 1 << 20
    max_pending_bytes: int = 64 << 20
    follow: bool = True

    def __post_init__(self) -> None:
        for name, largest in LARGEST_LIMITS.items():
            object.__setattr__(self, name, as_limit(name, getattr(self, name), largest))
        check_seconds(self.linger, "linger", "seconds from 0 on")


class SessionPaused(ProducerMovedError):
    """Internal: a hand-over or a transaction is in progress; wait, and retry. It never reaches an
    application."""


class SessionListener(Protocol):
    """A producer, which is notified of what happens to its session."""

    def lost(self, error: ExclusiveLogError) -> None:
        """The session was lost."""

    def ended(self) -> None:
        """The session was closed: by another producer that uses it, or with its engine."""

    def wanted(self) -> None:
        """Another producer waits for the topic."""

    def moved_to(self, session: ProducerSession, error: ProducerMovedError) -> None:
        """The topic was handed over within this process: continue with this session. `error`: what
        to raise if that is not possible."""


class Sending(Protocol):
    """Appends messages for a session.

    `appender` is the compiled part. Every append raises `SessionPaused` while the session is
    paused, and the session's `moved` after its topic was handed over.
    """

    appender: _core.Appender

    def send(self, message: Encoded, timeout: float | None) -> int:
        """Append one message; return its offset once it is durable."""

    def send_async(self, message: Encoded) -> _core.Receipt:
        """Queue one message; commit the queue if it exceeds `max_pending_bytes`."""

    def offer(self, message: Encoded) -> _core.Receipt | None:
        """The same, but leave the commit to the background. Returns None, and queues nothing, while
        another thread appends without the queue."""

    def commit_if_full(self) -> None:
        """Commit the queue if it exceeds `max_pending_bytes`."""

    def send_batch(self, columns: Columns, sequence: int | None, timeout: float | None) -> int:
        """Append messages atomically; return the offset of the first."""

    def append(self, messages: Sequence[Raw]) -> tuple[int, int, int] | int:
        """Append messages atomically. Returns (offset, position, generation), the last two for
        `await_flush`; or only the offset, if they are flushed already."""

    def await_flush(self, position: int, generation: int) -> None:
        """Return once what `append` has appended is durable."""

    def served(self) -> None:
        """The call of this thread that has waited by `await_resumed` has been made."""

    def duplicate(
        self, appender: _core.Appender, sequence: int | None, count: int = 1
    ) -> ExclusiveLogError:
        """The error for a sequence id that was used before."""


class ProducerSession(Protocol):
    """A producer's session on a topic. `moved` is set once the topic was handed over to another
    engine of this process; `follow` then gives the listeners a new session."""

    moved: ProducerMovedError | None

    @property
    def lost(self) -> ExclusiveLogError | None:
        """The error of a lost session, else None; the listeners are notified soon after."""

    @property
    def sending(self) -> Sending:
        """Appends messages for it."""

    @property
    def session(self) -> Any:
        """What the log stores of it: id, topic, name, mode, priority, epoch, ..."""

    @property
    def engine(self) -> EngineBackend:
        """The engine that granted it."""

    @property
    def closed(self) -> bool:
        """Whether it, or its engine, is closed."""

    @property
    def usable(self) -> bool:
        """False once it is known to be closed, fenced or moved."""

    def status(self) -> State:
        """Its state, read from the log; changes nothing."""

    def verify(self) -> None:
        """Read from the log whether it may still append; raise ProducerFencedError if not."""

    def flush(self, timeout: float | None) -> None:
        """Wait until every accepted message is durable or has failed."""

    def await_resumed(self, timeout: float | None) -> bool:
        """Wait until it is not paused; False after `timeout` seconds."""

    def follow(self, timeout: float | None) -> bool:
        """Give the listeners the session that now holds the topic, or end this one; False after
        `timeout` seconds."""

    def refused(self, error: ProducerFencedError) -> ExclusiveLogError:
        """The error to raise in a caller whose append failed with this one."""

    def subscribe(self, listener: SessionListener, owner: bool) -> None:
        """Notify this producer of what happens to the session; the `owner` closes it."""

    def leave(self, listener: SessionListener) -> ExclusiveLogError | None:
        """This producer is closed. If it is the owner, or the last one, drain and release the
        session. Returns the error of the last accepted message, if that failed."""

    def abandon(self) -> None:
        """No caller has this session, for example after an interrupt: let its engine release it."""


# ---- topics ------------------------------------------------------------------------------


@dataclass(slots=True)
class Epoch:
    """The messages of one epoch of a topic; times in ms since 1970."""

    epoch: int
    first_offset: int
    first_time: int
    last_offset: int = 0
    last_time: int = 0
    messages: int = 0
    producers: list[str] = field(default_factory=list)


class OwnerChanges(Protocol):
    """The changes of a topic's owner, which one watch takes in order."""

    key: tuple[int, int]  # the same for changes that one thread can wait for
    path: str  # of the ledger

    @property
    def position(self) -> int:
        """A number by which a later watch continues here."""

    def take(self) -> Event | None:
        """The next change, if it is there. Raises an error if there can be none any more."""

    def catch_up(self) -> None:
        """Have all changes up to now there."""

    def mark(self) -> int:
        """A number that changes when there may be another change, for `wait`."""

    def wait(self, seen: int, seconds: float | None) -> None:
        """Sleep until `mark()` is no longer `seen`, or for so many seconds, or less."""

    def await_mark(self, seen: int, seconds: float) -> None:
        """As `wait`; any thread may call it while another one takes changes."""

    def close(self) -> None:
        """Take no more, and wake a thread that waits."""


class TopicStore(Protocol):
    """One topic of a log."""

    def facts(self) -> _core.TopicRow:
        """Its epoch, offsets and flags; TopicNotFoundError if it was deleted."""

    def latest(self) -> _core.TopicRow:
        """The same as this engine's readers see it now (rule G6)."""

    def owner(self) -> OwnerInfo | None:
        """The session that owns it."""

    def holders(self) -> list[OwnerInfo]:
        """The sessions that may write."""

    def waiters(self) -> list[WaiterInfo]:
        """The sessions in its queue, best first."""

    def transfers(self) -> list[TransferInfo]:
        """The hand-overs that are under way."""

    def yielding_owner(self) -> int:
        """The session that owns it, if that has agreed to release it when another one waits; 0 if
        there is none, or nothing is known of it."""

    def evict_late(self, owner: int, until: int) -> bool:
        """Evict the owner if it is still this session, and has agreed to release the topic; False
        if not. The next waiter is promoted. WaitTimeoutError if that cannot begin before
        `until`."""

    def kind(self) -> tuple[str, dict[str, str | None]]:
        """What it holds ("messages", "map", "state"), and a map's serialisers."""

    def check_kind(self, kind: Kind) -> bool:
        """True if it is recorded that the topic holds this, False if nothing is recorded yet;
        StateError if it holds something else."""

    def record_kind(self, kind: Kind) -> None:
        """Record what the topic holds; StateError if it holds something else."""

    def newest(self, position: int, views: bool) -> tuple[int, Snapshot | None]:
        """The topic's first offset and its newest snapshot, or None.

        With `views`, a map's compacted view is used instead of a snapshot if messages after both
        the snapshot and `position` were trimmed.
        """

    def change_counter(self) -> tuple[_core.SharedWords, int]:
        """The place in shared memory of the counter that changes with every commit to the topic."""

    def announcement(self) -> Announcement | None:
        """The last announcement of an owner."""

    def compact(self) -> int:
        """Rebuild the compacted view; return the number of its messages."""

    def trim(self, before: int, before_ms: int | None, max_bytes: int | None, dry_run: bool) -> int:
        """Remove the messages before an offset, and before a time (ms since 1970), and all but
        the newest `max_bytes`; return the new first offset. `dry_run`: the same, but change
        nothing."""

    def retention(self) -> Retention:
        """What is removed in the background."""

    def retain(self, changes: Mapping[str, Any]) -> Retention:
        """Change these fields of the retention in one transaction; return all of them."""

    def compress(self, setting: str | None) -> None:
        """Compress new entries from now on with this method ("lz4", "zstd" or None)."""

    def stats(self, storage: bool) -> TopicStats:
        """Its figures; with `storage`, also those of how its entries are stored."""

    def terminate(self) -> int:
        """Terminate the topic; return its next offset."""

    # ---- what a query planner asks -------------------------------------------------------

    def offset_at(self, time_ms: int) -> int:
        """The offset of the first message published at this time or later."""

    def end_within(self, start: int, end: int, most_bytes: int) -> tuple[int, int]:
        """(offset, bytes): the end, at most `end`, of as many whole entries from `start` on as fit
        into `most_bytes`, and their size; at least one entry."""

    def message_bytes(self, samples: Iterable[int]) -> float:
        """The approximate mean size of a message, from the entries near these offsets."""

    def epochs(self, first: int) -> list[Epoch]:
        """The epochs of the messages from the offset `first` on."""

    def producers(self) -> list[tuple[str, int, bool]]:
        """(name, last sequence id, whether it is live) of each producer name."""

    def batches(self) -> dict[str, int]:
        """{writer: number of its last batch}; see `exclusivelog.once`."""

    def record_batch(self, writer: str, number: int) -> None:
        """Store a writer's last number, unless the stored one is higher."""


# ---- transactions ------------------------------------------------------------------------

# One message, or what adds messages to an appender.
Put = Encoded | Callable[[_core.Appender], object]


class TransactionSender(Protocol):
    """The sender of a producer that sends in a transaction, or that the transaction requires."""

    def here(self, numbered: bool) -> ProducerSession:
        """The session of this process that appends the producer's messages. `numbered`: they have
        sequence ids of its name."""


class CommitAttempt(Protocol[Who]):
    """One attempt to commit a transaction."""

    @property
    def tried(self) -> bool:
        """Was the commit begun? Before that, nothing can be in the log."""

    @property
    def committed(self) -> bool:
        """Is it known to be in the log, whatever was raised afterwards?"""

    @property
    def offsets(self) -> dict[Who, range]:
        """The offsets of each producer's messages, once it is committed."""


class Required(NamedTuple):
    """A claim that a transaction requires: `session.is_held_in` the backend's transaction, or that
    raises what `lost` makes."""

    session: ClaimSession
    lost: Callable[[], OwnershipLostError]


@dataclass
class TransactionParts(Generic[Who]):
    """The parts of a transaction. `attempt`: the last attempt to commit them; None before the first
    one."""

    puts: dict[Who, list[Put]] = field(default_factory=dict)
    numbered: set[Who] = field(default_factory=set)  # those that were given sequence ids
    announced: dict[Who, dict[str, str]] = field(default_factory=dict)
    cursors: dict[Any, tuple[GroupCursor, Mapping[int, int]]] = field(default_factory=dict)
    claims: set[Required] = field(default_factory=set)
    attempt: CommitAttempt[Who] | None = None

    def __bool__(self) -> bool:
        return bool(self.puts or self.cursors or self.claims)


# ---- reading -----------------------------------------------------------------------------


class Cursor(Protocol):
    """A position in one topic, for one thread at a time. Reading advances it.

    Its four `take` methods return messages or entries, or None (an empty list) at the topic's end;
    they never wait.
    """

    membership: GroupCursor | None  # of its reader group; `check` checks it, too

    @property
    def position(self) -> int:
        """The offset of the next message to read; the topic may not have it yet."""

    @property
    def ledger(self) -> object:
        """Identifies what it reads from: one object for all engines of this process that have it
        open."""

    def check(self) -> None:
        """Raise EngineClosedError or ReaderFencedError unless it can be used."""

    def seek(self, start: str | int | dt.datetime, inclusive: bool, resumes: bool = False) -> None:
        """Continue at "earliest", "latest", an offset from 0 on, or a datetime (naive: local).
        `resumes`: an earlier reader ended at this offset; a compacted reader misses no deletion of
        a key since."""

    def move_to(self, position: int) -> None:
        """Continue at this offset; discard what was read ahead."""

    def take_ready(self) -> _core.Message | None:
        """The next message if it has been read ahead already."""

    def take_one(self) -> _core.Message | None:
        """The next message."""

    def take_many(self, most: int, errors: type[Exception]) -> list[_core.Message]:
        """Up to so many next messages. Behind the first one, `errors` of this class end it: the
        next call raises the error again."""

    def take_entry(self, most: int = ...) -> tuple[_core.Entry, int] | None:
        """The next entry, and the index of the message at the position in it; None also if it has
        more than `most` bytes."""

    def scan(self, end: int) -> Iterator[_core.Message]:
        """The messages before the offset `end`."""

    def values(self, end: int) -> Iterator[Any]:
        """The values of these messages; the position moves as by `scan`, but stays at a message
        whose value cannot be deserialised."""

    def has_more(self) -> bool:
        """Whether there is a message at or after the position (rule G5)."""

    def end(self) -> int:
        """The topic's present end."""

    is_remote: bool  # may a read miss what other machines have appended before it?

    def look_up(self) -> None:
        """If so: let the next one find it. It asks them."""

    def is_over(self) -> bool:
        """Whether the position is the end of a terminated topic."""

    def mark(self) -> int:
        """A number that changes with every append to the topic, for `wait`."""

    def wait(self, seen: int, seconds: float | None) -> None:
        """Sleep until `mark()` is no longer `seen`, at most for so many seconds; it may return
        earlier."""

    def await_mark(self, seen: int, seconds: float) -> None:
        """As `wait`; any thread may call it while another one reads."""

    def close(self) -> bool:
        """End reading, and wake a thread that waits; False if it is already closed, or its engine
        is."""


class Owned(Protocol):
    """What the engine keeps for a claim, and notifies: the application's object, or a reader's
    group."""

    def lose(self, error: OwnershipLostError) -> None:
        """It was revoked."""

    def end(self) -> None:
        """The engine is closing: release it."""


class GroupCursor(Owned, Protocol):
    """The committed positions of a reader group on one or more topics, and the claim under which
    one reader may change them (rule F6)."""

    @property
    def group(self) -> str:
        """The group's name."""

    @property
    def generations(self) -> Mapping[str, int]:
        """{topic: generation of the claim}."""

    @property
    def ledger(self) -> object:
        """What stores the positions."""

    def check(self) -> None:
        """Raise ReaderFencedError if a later reader of the group was opened."""

    def positions(self, topics: Iterable[int]) -> dict[int, int]:
        """The committed positions, {topic id: offset}; without those on which the group has not
        committed yet."""

    def commit(self, positions: Mapping[int, int]) -> None:
        """Commit {topic id: position}, if the claim is still held."""

    def wait(self, cursors: Sequence[Any], marks: Sequence[int], seconds: float) -> None:
        """Sleep until the `mark()` of one of these cursors has changed, at most for so many
        seconds; it may return earlier."""


# ---- claims ------------------------------------------------------------------------------


class ClaimSession(Protocol):
    """A claim on resources, as its engine stores it (rules F1-F5)."""

    @property
    def id(self) -> int:
        """Its number, never given to another one on this ledger."""

    @property
    def group(self) -> str:
        """The group's name; "" if it was left out."""

    @property
    def generations(self) -> Mapping[str, int]:
        """{resource: generation}."""

    @property
    def ledger(self) -> object:
        """What stores it."""

    def is_held(self) -> bool:
        """Whether it is still held."""

    def is_held_in(self, transaction: Any) -> bool:
        """The same, within a transaction of the backend."""

    def successor(self) -> EngineInfo | None:
        """The engine that a lost claim was handed over to; None if it was revoked."""

    def release(self) -> None:
        """Release it, unless it is lost."""


Held = TypeVar("Held", bound=Owned)


class ClaimStore(Protocol):
    """Holds claims, and notifies them of their loss."""

    def hold(
        self,
        group: str,
        resources: Mapping[str, int | None],
        make: Callable[[ClaimSession], Held],
        until: int = 0,
    ) -> Held:
        """Claim all of the resources or none. Keep the object that `make` returns for the claim,
        and return it. Raises OwnershipError if a generation is refused, and WaitTimeoutError if
        another process keeps it from deciding until then (ns of the monotonic clock; 0: no
        limit)."""

    def mark(self) -> int:
        """A number that changes with every release of a claim, for `wait`."""

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep until `mark()` is no longer `seen`, at most for so many seconds; it may return
        earlier."""

    def drain_bound(self, claim: int) -> None:
        """Commit what the producers that are bound to a claim have accepted."""


# ---- roles -------------------------------------------------------------------------------


class RoleParts(NamedTuple):
    """The parts of a granted role.

    - `topics`: {name: session}; `groups`: {reader group: the names of the topics that it reads}.
    - `readers`: {reader group: its claim}; `numbers`: the ids of these claims, in that order.
    - `generations`: (group, whether it is a reader's, {resource: generation}) of each claim.
    - `claim`: the claim that the role's producers and transactions are bound to.
    """

    topics: dict[str, Any]
    groups: dict[str, list[str]]
    readers: dict[str, GroupCursor]
    numbers: list[int]
    generations: list[tuple[str, bool, dict[str, int]]]
    claim: ClaimSession


class RoleStore(Protocol):
    """The roles of a ledger."""

    def own_topic(self, name: str, until: int = 0) -> tuple[int, str]:
        """(id, name) of the topic that stands for the role of that name. WaitTimeoutError if it
        cannot be created before `until` (ns of the monotonic clock, 0: no limit)."""

    def conflicting_roles(self, definition: RoleDefinition) -> set[int]:
        """The ids of the own topics of roles that hold what this request would claim."""

    def find(self, seat: Any) -> RoleParts:
        """The parts of the role that was granted to this session of its own topic."""

    def last_sequence(self, session: Any) -> int:
        """The last sequence id of a session's producer name."""

    def keep(self, number: int, claim: Owned) -> None:
        """Notify `claim` of what happens to the claim with this id, and release it when the engine
        closes."""

    def forget(self, numbers: Iterable[int]) -> None:
        """End what `keep` began: these claims were released."""


# ---- all topics --------------------------------------------------------------------------


class LastingLock(NamedTuple):
    """A lock of the ledger that one thread has held for `seconds` or longer, without progress.
    `ended`: the thread is dead. `stopped`: it is stopped, by a signal or a debugger."""

    lock: str
    holder: str
    seconds: float
    ended: bool
    stopped: bool


class Catalog(Protocol):
    """The topics, roles, claims and engines of a ledger."""

    def topic(self, name: str, create: bool, until: int = 0) -> tuple[int, str]:
        """(id, name) of the topic of that name. If there is none, create it, or raise
        TopicNotFoundError if `create` is False. WaitTimeoutError if it cannot be created before
        `until` (ns of the monotonic clock, 0: no limit)."""

    def topics(self) -> list[str]:
        """The names of the topics that exist, sorted; without internal ones."""

    def delete(self, name: str, own: bool = False) -> None:
        """Remove a topic that no producer holds or waits for; `own`: it is an internal one."""

    def claims(self, group: str | None) -> list[ClaimInfo]:
        """The claims that live engines hold, oldest first."""

    def groups(self) -> list[GroupInfo]:
        """The reader groups of all topics."""

    def delete_group(self, name: str) -> int:
        """Remove the positions of a reader group that has no reader; how many there were."""

    def roles(self) -> list[RoleInfo]:
        """All roles, by name."""

    def engines(self) -> list[EngineInfo]:
        """The engines that have this ledger open."""

    def inside(self) -> EngineInfo | None:
        """The engine that is inside the critical section now."""

    def check_readable(self) -> None:
        """Raise LedgerCorruptedError if a table of the ledger cannot be read at all."""

    def lasting_locks(self) -> list[LastingLock]:
        """The locks that are held without progress. It looks for a second if one is held."""

    def stats(self) -> EngineStats:
        """The figures of the ledger."""

    def topic_stats(self) -> list[tuple[str, TopicStats]]:
        """The figures of each topic, by name, without groups and storage; may be a second old."""

    def verify(self) -> Report:
        """Read and check the whole ledger."""


# ---- batches that are appended once -------------------------------------------------------


@dataclass(frozen=True)
class Appended:
    """The outcome of a batch in one topic: its offsets (empty if it was in the log before), and
    the epoch under which it was written."""

    offsets: range
    epoch: int


@dataclass(frozen=True)
class Run:
    """The run of a job that appends.

    - `writer`: the job's name, under which the number of its last batch is stored; None: its
      batches are not numbered.
    - `token`: this run's name, under which its epoch is stored; None: every batch takes a new
      epoch.
    - `producer`: the producer name of its messages, to which their sequence ids belong (rule G2).
    - `access_mode`: "exclusive_with_fencing" (default), "exclusive", or "shared" (no epoch of its
      own, and it fences no other producer). "wait_for_exclusive" is not possible here.
    """

    writer: str | None
    token: str | None
    producer: str
    access_mode: AccessMode | ModeName = AccessMode.EXCLUSIVE_WITH_FENCING


# ---- moves -------------------------------------------------------------------------------


class MoveCancelled(ExclusiveLogError):
    """Internal: the call was cancelled. It never reaches an application."""


class Moves(Protocol):
    """Moves of topics, or of one producer, to another engine, for one call."""

    def begin(self) -> None:
        """Begin to move the first topics, unless that has begun."""

    def run(self) -> list[Move]:
        """Move all of them; returns the outcome of each. MoveCancelled after `stop`."""

    def stop(self) -> None:
        """Make `run`, in another thread, raise MoveCancelled, unless it has ended."""

    def give_up(self) -> None:
        """Cancel the moves that have begun, if `run` will not be called."""

    def moves(self) -> list[Move]:
        """The present state of the moves that have begun."""


# ---- the whole backend -------------------------------------------------------------------


# Capabilities that not every backend has; `Engine.supports` describes them.
CAPABILITIES = frozenset(
    {
        "announcements", "backup", "bound_producers", "claims", "compaction", "compression",
        "deletion", "history", "inspection", "large_messages", "locks", "many_producers",
        "moved_claims", "once", "owner_watches", "reader_groups", "retention", "roles", "settle",
        "several_claims", "shared_producers", "shared_state", "snapshots", "statistics",
        "termination", "transactions", "unload", "verify",
    }
)  # fmt: skip


class EngineBackend(OpenEngine):
    """One open engine of a backend, for the public classes."""

    capabilities: frozenset[str]  # those of CAPABILITIES that it has
    is_remote: bool  # would a repr that shows facts ask other machines for them?
    latest_needs_log: bool  # must an owner, too, read the log to see all writes (rule I2)?
    pending: Requests  # those that wait
    # What stores the log, the same object for all engines of this process that have it open: a
    # transaction takes only producers and readers of one.
    ledger: object

    @abc.abstractmethod
    def check_supports(self, capability: str) -> None:
        """Raise UnsupportedError, with the reason, unless it has this capability."""

    # ---- topics --------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def catalog(self) -> Catalog:
        """The topics, roles, claims and engines of the ledger."""

    @abc.abstractmethod
    def topic_store(self, topic: int) -> TopicStore:
        """The topic with this id."""

    @abc.abstractmethod
    def ownership_version(self, topic: int) -> int:
        """A number that changes whenever the owner of this topic may have changed."""

    @abc.abstractmethod
    def events(self, topic: str | None, group: str | None) -> Iterator[Event] | None:
        """The changes of ownership of a topic, of a group's claims, or (None) all; None if they are
        messages of the topic `__events__`."""

    @abc.abstractmethod
    def watch_owner(self, topic: int, start: Any) -> OwnerChanges | None:
        """The changes of a topic's owner from `start` on, which is as `Topic.watch_owner` takes it;
        None if they are messages of the topic `__events__`."""

    @abc.abstractmethod
    def snapshot(self, topic: int, offset: int, items: Iterable[Item]) -> None:
        """Store a snapshot of the state that a topic's messages before `offset` produce (rule
        I4)."""

    @abc.abstractmethod
    def backup(self, path: str) -> None:
        """Copy the ledger into a directory."""

    # ---- producers -----------------------------------------------------------------------

    @abc.abstractmethod
    def open_producer(self, future: AnyFuture, request: ProducerRequest) -> None:
        """Register a producer, or queue it until it is promoted or its timeout has passed."""

    @abc.abstractmethod
    def open_producers(
        self, names: Sequence[str], request: ProducerRequest, options: SessionOptions
    ) -> Sequence[ProducerSession]:
        """Register a producer on each of these topics, all or none; return their sessions."""

    @abc.abstractmethod
    def queue_producers(
        self, names: Sequence[str], futures: Sequence[AnyFuture], request: ProducerRequest
    ) -> None:
        """Register a producer for each future on the topic of that name, or queue it until it is
        promoted or its timeout has passed; create missing topics. Each future gets an outcome of
        its own. `request` waits in a queue; its topic is not used."""

    @abc.abstractmethod
    def open_session(
        self,
        topic: str,
        session: Any,
        last_sequence: int,
        options: SessionOptions,
        keeper: object = None,
    ) -> ProducerSession:
        """Open a session that was granted. `keeper`: the object that releases the session instead
        of the producer, such as a role."""

    # ---- transactions --------------------------------------------------------------------

    @abc.abstractmethod
    def commit_at_once(self, parts: TransactionParts[Who]) -> bool:
        """Commit all parts, or none, if that can be done so that an exception which another thread
        or a signal handler raises in this one harms nobody; `parts.attempt` then has the outcome.
        False if it cannot be done so, and nothing was written: call `commit_transaction`."""

    @abc.abstractmethod
    def commit_transaction(self, parts: TransactionParts[Who]) -> None:
        """Commit all parts, or none, in a thread of the library. An exception may be raised after
        the commit, too: `parts.attempt` has its outcome."""

    @abc.abstractmethod
    def append_once(
        self, run: Run, number: int | None, batches: Mapping[str, Iterable[Columns]]
    ) -> dict[str, Appended]:
        """Append a batch to topics, unless they already have it."""

    # ---- reading -------------------------------------------------------------------------

    @abc.abstractmethod
    def open_cursor(
        self,
        topic: int,
        name: str,
        loads: _core.Deserializer | None,
        compacted: bool,
        skip_trimmed: bool,
    ) -> Cursor:
        """Open a cursor that has no position yet. `compacted`: read the topic's compacted view
        first. `skip_trimmed`: if the position was trimmed, continue with the first remaining
        message instead of raising OffsetTrimmedError."""

    @abc.abstractmethod
    def join_group(
        self, group: str, topics: Mapping[str, int], generation: int | None
    ) -> GroupCursor:
        """Become the group's reader of these topics, {name: id}, and fence the previous one."""

    @abc.abstractmethod
    def make_visible(self) -> None:
        """Make all that any engine has acknowledged by now visible to this engine's readers (rule
        G6)."""

    # ---- ownership -----------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def claims(self) -> ClaimStore:
        """The claims that it holds."""

    @property
    @abc.abstractmethod
    def role_store(self) -> RoleStore:
        """The roles of the ledger."""

    @abc.abstractmethod
    def moves(
        self,
        topics: Sequence[str],
        to: str,
        timeout: float,
        groups: Sequence[str],
        producer: str | None,
        session: Any = None,
    ) -> Moves:
        """The moves of one call of `Engine.unload`, or of `Producer.move`, not begun yet.
        `session`: that of the only producer to be moved, which `producer` names. LedgerError if no
        live engine has the id `to`."""

    @abc.abstractmethod
    def cancel_moves(self, topics: Sequence[str]) -> list[str]:
        """Cancel the moves of these topics. Returns the names of those that were under way."""


class Opened(Protocol):
    """The application's `Engine`."""

    @property
    def backend(self) -> EngineBackend:
        """What stores its log."""
