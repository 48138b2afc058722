"""What the public interface requires of the place that keeps a log.

The public interface imports this file and never a backend, so that a log can lie elsewhere than in
`exclusivelog.local`. A backend imports it for the values that the two exchange.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeGuard, TypeVar

from exclusivelog import _core
from exclusivelog.errors import (
    ExclusiveLogError,
    OwnershipLostError,
    ProducerFencedError,
    ProducerMovedError,
    WaitTimeoutError,
)
from exclusivelog.events import Event
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
    RoleInfo,
    TopicStats,
    TransferInfo,
    WaiterInfo,
)
from exclusivelog.waits import AnyFuture, Requests, check_seconds, check_timeout

State = Literal["open", "fenced", "moved", "closed"]
Kind = Mapping[str, str | None]  # what a topic holds, and its serialisers
Snapshot = tuple[int, list[Item]]  # the offset that it goes up to, and what it consists of
Who = TypeVar("Who", bound="TransactionProducer")

# ---- names ------------------------------------------------------------------------------

NAME_BYTES = 255
MOST_QUOTED = 300  # characters of an argument in an error


def quoted(value: object) -> str:
    """An argument, for an error's text; a long one is cut off."""
    text = repr(value)
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}..."


def check_name(name: object, argument: str) -> str:
    """The name, if it is one; else ValueError or TypeError."""
    if not isinstance(name, str):
        raise TypeError(f"{argument} takes a str, not {type(name).__name__}")
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError(f"{argument}={quoted(name)} cannot be written as UTF-8") from None
    if not 1 <= size <= NAME_BYTES or not name.isprintable():
        raise ValueError(
            f"{argument}={quoted(name)}: it takes 1 to {NAME_BYTES} bytes of UTF-8 without control "
            "characters"
        )
    return name


def is_internal(name: str) -> bool:
    """Is this topic the library's own? It can be read, and is not listed."""
    return name.startswith("__")


def check_not_internal(name: str) -> None:
    """Raise ValueError if this topic is the library's own."""
    if is_internal(name):
        raise ValueError(f"topic {name!r} is internal to the library; it can only be read")


# ---- requests ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleDefinition:
    """What one request wants its role to bind: the ids of topics; of each group the topics that it
    reads, {name: id}; and of each group the resources to claim, {name: generation}."""

    topics: tuple[int, ...]
    groups: dict[str, dict[str, int]]
    claims: dict[str, dict[str, int | None]]


@dataclass(frozen=True, slots=True)
class ProducerRequest:
    """A request for a producer; `Topic.producer` describes each option.

    - `topic`: its id; `mode`: the value of an `AccessMode`; `name`: None for a new one.
    - `settle`: in nanoseconds. `created`: when the request was made (ns of
      the monotonic clock), as the backend sets it.
    - `notify_on_contention`: it is notified when another one waits for the topic.
    - `bound_to`: the id of the claim that it ends with; 0: none.
    - `lineage`: of the hand-over that it continues. The request is refused if another producer
      has had the topic since (rule E2). None: it continues none.
    - `role`: what a grant binds, where the topic is a role's own.
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


LONGEST_SETTLE = 86400
LOWEST, HIGHEST = -(2**63), 2**63 - 1


def check_queue_options(priority: object, timeout: float | None, settle: float) -> None:
    """Raise ValueError or TypeError if one of these is wrong."""
    if not is_whole(priority) or not LOWEST <= priority <= HIGHEST:
        raise ValueError(f"priority={priority!r}: it takes a signed 64-bit whole number")
    check_timeout(timeout)
    check_seconds(settle, "settle", f"seconds from 0 to {LONGEST_SETTLE}")
    if settle > LONGEST_SETTLE:
        raise ValueError(f"settle={settle}: it takes seconds from 0 to {LONGEST_SETTLE}")


# ---- a producer's session ----------------------------------------------------------------

SENT_AT_ONCE = 64 << 10  # bytes; a larger message is queued, and checked first

MOST = {
    "max_batch_messages": 10_000_000,
    "max_batch_bytes": 1 << 30,
    "max_pending_bytes": 2**63 - 1,
}


@dataclass(frozen=True)
class SessionOptions:
    """How a session sends; `Topic.producer` describes each option."""

    linger: float = 0.0
    max_batch_messages: int = 100_000
    max_batch_bytes: int = 1 << 20
    max_pending_bytes: int = 64 << 20
    follow: bool = True

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if not is_whole(value) or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r}: it takes a whole number, 1 to {most}")
        check_seconds(self.linger, "linger", "seconds from 0 on")


class SessionPaused(ProducerMovedError):
    """Internal: a hand-over or a transaction is in progress; wait, and retry. No caller ever sees
    it."""


class SessionListener(Protocol):
    """A producer, which is notified of what happens to its session."""

    def lost(self, error: ExclusiveLogError) -> None:
        """The session has ended for good."""

    def ended(self) -> None:
        """The session was closed: by another producer that uses it, or with its engine."""

    def wanted(self) -> None:
        """Another producer waits for the topic."""

    def moved_to(self, session: ProducerSession, error: ProducerMovedError) -> None:
        """The topic was handed over within this process: go on with this session. `error`: what is
        raised once there is no way to go on."""


class Sending(Protocol):
    """The way to append under a session.

    `appender` is the compiled part, whose `send` is one call. Every append raises `SessionPaused`
    while the session is paused, and the session's `moved` once its topic was handed over.
    """

    appender: _core.Appender

    def send(self, message: Encoded, timeout: float | None) -> int:
        """Append one message; its offset, once it is durable."""

    def send_async(self, message: Encoded) -> _core.Receipt:
        """Queue one message; commit what waits if that exceeds `max_pending_bytes`."""

    def offer(self, message: Encoded) -> _core.Receipt | None:
        """The same, but leave the commit to the background; None, and nothing was queued, while
        other threads append past the queue."""

    def commit_if_full(self) -> None:
        """Commit what waits if it exceeds `max_pending_bytes`."""

    def send_batch(self, columns: Columns, sequence: int | None, timeout: float | None) -> int:
        """Append messages atomically; the first one's offset."""

    def append(self, messages: Sequence[Raw]) -> tuple[int, int, int] | int:
        """Append messages atomically: (offset, position, generation), the last two for
        `await_flush`; or the offset of what is flushed already."""

    def await_flush(self, position: int, generation: int) -> None:
        """Return once what `append` has appended is durable."""

    def duplicate(self, appender: _core.Appender, sequence: int | None) -> ExclusiveLogError:
        """The error for a sequence id that was used before."""

    def drain(self) -> None:
        """Commit what was accepted so far."""

    def private_appender(self) -> _core.Appender:
        """One for a transaction, which continues the numbering of `appender`."""


class ProducerSession(Protocol):
    """One producer's registration on a topic. `moved` is set once the topic was handed over to
    another engine of this process; `follow` then gives the listeners a new session."""

    moved: ProducerMovedError | None

    @property
    def lost(self) -> ExclusiveLogError | None:
        """The error of a session that has ended for good; the listeners are notified soon after."""

    @property
    def sending(self) -> Sending:
        """The way to append under it."""

    @property
    def session(self) -> Any:
        """What the log keeps of it: id, topic, name, mode, priority, epoch, ..."""

    @property
    def engine(self) -> Any:
        """The engine that granted it."""

    @property
    def closed(self) -> bool:
        """Is it, or its engine, closed?"""

    @property
    def usable(self) -> bool:
        """True unless it is known to be closed, fenced or moved."""

    def status(self) -> State:
        """Its state by the log; changes nothing."""

    def verify(self) -> None:
        """ProducerFencedError unless, by the log, it may still append."""

    def flush(self, timeout: float | None) -> None:
        """Wait until everything that was accepted has its outcome."""

    def await_resumed(self, timeout: float | None) -> bool:
        """Wait until it is not paused; False after `timeout` seconds."""

    def follow(self, timeout: float | None) -> bool:
        """Give the listeners the session that has the topic now, or end this one; False after
        `timeout` seconds."""

    def refused(self, error: ProducerFencedError) -> ExclusiveLogError:
        """The error to raise in a caller whose append failed with this one."""

    def pause_for_transaction(self) -> bool:
        """Let appends wait; False if they wait for a hand-over already."""

    def resume(self) -> None:
        """Let appends go on."""

    def has_announced(self, info: dict[str, str]) -> None:
        """This announcement is committed."""

    def subscribe(self, listener: SessionListener, owner: bool) -> None:
        """Notify this producer of what happens to the session; the `owner` closes it."""

    def leave(self, listener: SessionListener) -> ExclusiveLogError | None:
        """This producer is closed. The owner, and the last one, drain and release the session.
        Returns what the last of the accepted messages failed with."""

    def abandon(self) -> None:
        """No caller has this session, as after an interrupt: have its engine release it."""


def without_outcome(topic: str, timeout: float | None) -> WaitTimeoutError:
    """The error for a send whose outcome took longer than its timeout: sending again would append
    the message twice."""
    error = WaitTimeoutError(
        f"topic {topic!r}: no outcome within timeout={timeout} s; what was sent is still on its "
        "way. Send it again only with the same sequence_id"
    )
    error.retriable, error.maybe_written = False, True
    return error


# ---- topics ------------------------------------------------------------------------------


class TopicStore(Protocol):
    """One topic, as the log has it."""

    def facts(self) -> _core.TopicRow:
        """Its epoch, offsets and flags; TopicNotFoundError if it was deleted."""

    def next_offset(self) -> int:
        """The offset that the next message will have."""

    def owner(self) -> OwnerInfo | None:
        """The session that owns it."""

    def holders(self) -> list[OwnerInfo]:
        """The sessions that may write."""

    def waiters(self) -> list[WaiterInfo]:
        """The sessions in its queue, best first."""

    def transfers(self) -> list[TransferInfo]:
        """The hand-overs that are under way."""

    def kind(self) -> tuple[str, dict[str, str | None]]:
        """What it holds ("messages", "map", "state"), and a map's serialisers."""

    def check_kind(self, kind: Kind) -> bool:
        """Is it recorded that the topic holds this? False if nothing is recorded yet; StateError if
        it holds something else."""

    def record_kind(self, kind: Kind) -> None:
        """Record what the topic holds; StateError if it holds something else."""

    def newest(self, position: int, views: bool) -> tuple[int, Snapshot | None]:
        """The topic's first offset and its newest snapshot, or None.

        With `views`, a map's compacted view stands in for a snapshot where messages were trimmed
        that are neither in the snapshot nor before `position`.
        """

    def change_counter(self) -> tuple[_core.SharedWords, int]:
        """Where the counter lies that changes with every commit to the topic."""

    def announcement(self) -> Announcement | None:
        """What an owner announced last."""

    def compact(self) -> int:
        """Rebuild the compacted view; the number of its messages."""

    def trim(self, before: int, before_ms: int | None, max_bytes: int | None) -> int:
        """Remove the messages before an offset, and before a time (ms since 1970), and all but
        `max_bytes`; the new first offset."""

    def retain(self, max_age: float | None, max_bytes: int | None) -> None:
        """Remove old messages in the background from now on."""

    def compress(self, setting: str | None) -> None:
        """Compress new entries from now on by this setting ("lz4", "zstd" or None)."""

    def stats(self, storage: bool) -> TopicStats:
        """How much it has; with `storage`, also how its entries are stored."""

    def terminate(self) -> int:
        """Terminate the topic; the next offset."""


# ---- transactions ------------------------------------------------------------------------

Put = Callable[[_core.Appender], object]  # gives messages to an appender


class TransactionSender(Protocol):
    """What sends for a producer."""

    def here(self, numbered: bool) -> ProducerSession:
        """The session that appends what this producer is given, in this process. `numbered`: with
        sequence ids of its own name."""


class TransactionProducer(Protocol):
    """A producer that sends in a transaction, or that it requires."""

    @property
    def sender(self) -> TransactionSender:
        """What sends for it."""


class Condition(Protocol):
    """A claim that a transaction requires."""

    def check_in(self, transaction: Any) -> None:
        """OwnershipLostError unless it is held, within a transaction of the backend."""


class CursorCommit(Protocol):
    """A reader group's positions."""

    def write(self, transaction: Any, positions: Any) -> None:
        """Write them, if the group's claim is held, within a transaction of the backend."""


@dataclass
class TransactionParts(Generic[Who]):
    """What one transaction commits. `written`: all of it is, and may be committed."""

    puts: dict[Who, list[Put]] = field(default_factory=dict)
    numbered: set[Who] = field(default_factory=set)  # those that were given sequence ids
    announced: dict[Who, dict[str, str]] = field(default_factory=dict)
    cursors: dict[Any, tuple[CursorCommit, Any]] = field(default_factory=dict)
    claims: set[Condition] = field(default_factory=set)
    written: bool = False

    def __bool__(self) -> bool:
        return bool(self.puts or self.cursors or self.claims)


# ---- the engine --------------------------------------------------------------------------


class Backend(Protocol):
    """What topics, producers and transactions need of the engine that they were opened with."""

    @property
    def path(self) -> str:
        """Where the log is."""

    @property
    def ledger(self) -> Any:
        """What keeps the log: one object for all that may be in one transaction."""

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""

    def check_not_forked(self) -> None:
        """EngineClosedError in a forked child."""

    def check_free(self) -> None:
        """LedgerError if this thread would wait for itself: it holds a lock of the engine."""

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run application code in a thread of its own."""

    def latest(self, topic: int) -> _core.TopicRow:
        """The topic's facts as they are now."""

    @property
    def pending(self) -> Requests:
        """Where requests wait."""

    def check_writable(self) -> None:
        """Raise an error unless the engine can be used here, and to write."""

    def topic_store(self, topic: int) -> TopicStore:
        """The topic with this id."""

    def open_producer(self, future: AnyFuture, request: ProducerRequest) -> None:
        """Register a producer, or queue it until it is promoted or its timeout has passed."""

    def open_session(
        self, topic: str, session: Any, last_sequence: int, options: SessionOptions,
        keeper: object = None,
    ) -> ProducerSession:  # fmt: skip
        """What a producer sends by, now that its session was granted. `keeper`: what releases
        the session instead of the producer, such as a role."""

    def check_transactions(self) -> None:
        """Raise an error unless a transaction can be begun."""

    def commit_transaction(self, parts: TransactionParts[Who]) -> dict[Who, range]:
        """Commit all parts, or none; the offsets of each producer's messages."""


# ---- reading -----------------------------------------------------------------------------


class Place(Protocol):
    """Where a log is kept: one object for all engines of this process that have it open."""

    path: str


class Cursor(Protocol):
    """A position in one topic, for one thread at a time. Reading advances it.

    Its four `take` methods return messages or entries, or None (an empty list) at the topic's end;
    they never wait.
    """

    membership: Any  # the reader group's `GroupCursor`, which `check` checks too, or None

    @property
    def position(self) -> int:
        """The offset of the next message, if the topic has it."""

    @property
    def ledger(self) -> Place:
        """Where it reads."""

    def check(self) -> None:
        """EngineClosedError or ReaderFencedError unless it can be used."""

    def seek(self, start: str | int | dt.datetime, inclusive: bool) -> None:
        """Continue at "earliest", "latest", an offset from 0 on, or a datetime (naive: local)."""

    def move_to(self, position: int) -> None:
        """Continue at this offset; drops what was read ahead."""

    def take_ready(self) -> _core.Message | None:
        """The next message if it has been read ahead already."""

    def take_one(self) -> _core.Message | None:
        """The next message."""

    def take_many(self, most: int) -> list[_core.Message]:
        """Up to so many next messages."""

    def take_entry(self, most: int = ...) -> tuple[_core.Entry, int] | None:
        """The next entry, and the index of the message at the position in it; None also if it has
        more than `most` bytes."""

    def scan(self, end: int) -> Iterator[_core.Message]:
        """The messages before the offset `end`."""

    def values(self, end: int) -> Iterator[Any]:
        """The values of these messages; the position moves as by `scan`, but stays at a message
        whose value cannot be deserialised."""

    def has_more(self) -> bool:
        """Is there a message at or behind the position (rule G5)?"""

    def end(self) -> int:
        """The topic's end as it is now."""

    def is_over(self) -> bool:
        """Is this the end of a terminated topic?"""

    def mark(self) -> int:
        """A number that changes with every append to the topic, for `wait`."""

    def wait(self, seen: int, seconds: float | None) -> None:
        """Sleep until `mark()` is no longer `seen`, or for so many seconds, or less."""

    def await_mark(self, seen: int, seconds: float) -> None:
        """As `wait`; any thread may call it while another one reads."""

    def close(self) -> bool:
        """End reading, and wake a thread that waits; False if that was done before, or its engine
        is gone."""


class GroupCursor(Protocol):
    """The committed positions of a reader group on one or more topics, and the claim under which
    one reader may change them (rule F6)."""

    @property
    def group(self) -> str:
        """The group's name."""

    @property
    def generations(self) -> Mapping[str, int]:
        """{topic: generation of the claim}."""

    @property
    def ledger(self) -> Place:
        """Where the positions are kept."""

    def check(self) -> None:
        """ReaderFencedError if a later reader of the group has come."""

    def position(self, topic: int) -> int | None:
        """The committed position; None before the group's first commit."""

    def commit(self, positions: Mapping[int, int]) -> None:
        """Commit {topic id: position}, if the claim is still held."""

    def write(self, transaction: Any, positions: Mapping[int, int]) -> None:
        """The same, within a transaction of the backend."""

    def wait(self, cursors: Sequence[Any], marks: Sequence[int], seconds: float) -> None:
        """Sleep until one of these cursors' `mark()` is no longer what was seen, or for so many
        seconds, or less."""

    def lose(self, error: OwnershipLostError) -> None:
        """A later reader has come: wake a thread that waits for messages."""

    def end(self) -> None:
        """Release the claim."""


class CursorStore(Protocol):
    """Opens cursors."""

    def latest(self, topic: int) -> _core.TopicRow:
        """The topic's facts as they are now."""

    def open_cursor(
        self, topic: int, name: str, loads: _core.Deserializer | None, compacted: bool,
        skip_trimmed: bool,
    ) -> Cursor:  # fmt: skip
        """A cursor, not yet at a position. `compacted`: read the topic's compacted view first.
        `skip_trimmed`: continue with the first message that is left where the position was
        trimmed, instead of OffsetTrimmedError."""

    def join_group(
        self, group: str, topics: Mapping[str, int], generation: int | None
    ) -> GroupCursor:
        """Become the group's reader of these topics, {name: id}; the one before is fenced."""


# ---- claims ------------------------------------------------------------------------------


class ClaimSession(Protocol):
    """One claim on resources, as its engine holds it (rules F1-F5)."""

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
    def ledger(self) -> Place:
        """Where it is kept."""

    def is_held(self) -> bool:
        """Is it still valid?"""

    def is_held_in(self, transaction: Any) -> bool:
        """The same, within a transaction of the backend."""

    def successor(self) -> EngineInfo | None:
        """The engine that a lost claim was handed over to; None if it was revoked."""

    def release(self) -> None:
        """Release it, unless it is lost."""


class Owned(Protocol):
    """A claim as the application has it."""

    def lose(self, error: OwnershipLostError) -> None:
        """It was revoked."""

    def end(self) -> None:
        """The engine is closing: release it."""


Held = TypeVar("Held", bound=Owned)


class ClaimStore(Protocol):
    """Holds claims, and notifies them of their loss."""

    def hold(
        self, group: str, resources: Mapping[str, int | None], make: Callable[[ClaimSession], Held]
    ) -> Held:
        """Claim all of the resources or none, and keep what `make` makes of it. Raises
        OwnershipError for a generation that is refused."""

    def mark(self) -> int:
        """A number that changes with every release of a claim, for `wait`."""

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep until `mark()` is no longer `seen`, or for so many seconds, or less."""

    def drain_bound(self, claim: int) -> None:
        """Commit what the producers that are bound to a claim have accepted."""


# ---- roles -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleParts:
    """What a granted role consists of.

    - `topics`: {name: session}; `groups`: {reader group: the names of the topics that it reads}.
    - `readers`: {reader group: its claim}; `numbers`: the ids of these claims, in that order.
    - `generations`: (group, is it a reader's?, {resource: generation}) of each claim.
    - `claim`: what the role's producers and transactions are bound to.
    """

    topics: dict[str, Any]
    groups: dict[str, list[str]]
    readers: dict[str, GroupCursor]
    numbers: list[int]
    generations: list[tuple[str, bool, dict[str, int]]]
    claim: ClaimSession


class RoleStore(Protocol):
    """The roles of a ledger."""

    def own_topic(self, name: str) -> tuple[int, str]:
        """(id, name) of the topic that stands for the role of that name."""

    def conflicting_roles(self, definition: RoleDefinition) -> set[int]:
        """The own topics of the roles that have what this request wants to claim."""

    def find(self, seat: Any) -> RoleParts:
        """What the role consists of whose seat, a session, was granted."""

    def last_sequence(self, session: Any) -> int:
        """The last sequence id of a session's producer name."""

    def keep(self, number: int, claim: Owned) -> None:
        """Notifications about this claim go to it, and closing the engine releases it."""

    def forget(self, numbers: Iterable[int]) -> None:
        """These claims are released."""


# ---- all topics --------------------------------------------------------------------------


class Catalog(Protocol):
    """All that a ledger has: topics, roles, claims, engines."""

    def topic(self, name: str, create: bool) -> tuple[int, str]:
        """(id, name) of the topic of that name, made if need be; or TopicNotFoundError."""

    def topics(self) -> list[str]:
        """The names of the topics that exist, sorted; without the library's own."""

    def delete(self, name: str, own: bool = False) -> None:
        """Remove a topic that no producer holds or awaits; `own`: it is one of the library's."""

    def claims(self, group: str | None) -> list[ClaimInfo]:
        """The claims that live engines hold, the oldest first."""

    def groups(self) -> list[GroupInfo]:
        """The reader groups of all topics."""

    def roles(self) -> list[RoleInfo]:
        """All roles, by name."""

    def engines(self) -> list[EngineInfo]:
        """The engines that have this ledger open."""

    def inside(self) -> EngineInfo | None:
        """The engine that is inside the critical section now."""

    def stats(self) -> EngineStats:
        """Its figures."""

    def topic_stats(self) -> list[tuple[str, TopicStats]]:
        """How much each topic has, by name, without groups and storage; may be a second old."""

    def verify(self) -> Report:
        """Read everything."""


# ---- inspection --------------------------------------------------------------------------


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


class Inspection(Protocol):
    """Facts about a topic for a query planner, by its id."""

    def row(self, topic: int) -> _core.TopicRow:
        """The topic's row as it is now; TopicNotFoundError once it was deleted."""

    def offset_at(self, topic: int, time_ms: int) -> int:
        """The offset of the first message published at this time or later."""

    def end_within(self, topic: int, start: int, end: int, most_bytes: int) -> tuple[int, int]:
        """(offset, bytes): where the whole entries from `start` on reach `most_bytes`, at most at
        `end`; one entry at least."""

    def message_bytes(self, topic: int, samples: Iterable[int]) -> float:
        """About how long a message is, from the entries near these offsets."""

    def epochs(self, topic: int, first: int) -> list[Epoch]:
        """The epochs of the messages from the offset `first` on."""

    def producers(self, topic: int) -> list[tuple[str, int, bool]]:
        """(name, last sequence id, is it live?) of each producer name."""

    def batches(self, topic: int) -> list[tuple[str, int]]:
        """(writer, number of its last batch); see `exclusivelog.once`."""


# ---- batches that are appended once -------------------------------------------------------


@dataclass(frozen=True)
class Appended:
    """The outcome of a batch in one topic: its offsets (empty if it was in the log before), and
    the epoch under which it was written."""

    offsets: range
    epoch: int


class OnceRun(Protocol):
    """The run of a job that appends; see `exclusivelog.once.Run`."""

    @property
    def writer(self) -> str | None:
        """The job's name."""

    @property
    def token(self) -> str | None:
        """This run's name."""

    @property
    def producer(self) -> str:
        """The producer name of its messages."""

    @property
    def access_mode(self) -> AccessMode | ModeName:
        """How it takes the topics."""


class Once(Protocol):
    """Batches and their numbers."""

    def append(
        self, run: OnceRun, number: int | None, batches: Mapping[str, Iterable[Columns]]
    ) -> dict[str, Appended]:
        """Append a batch to topics, unless it is in them already."""

    def record(self, topic: str | int, writer: str, number: int) -> None:
        """Store a writer's last number, unless it has come further."""

    def recorded(self, topic: str | int) -> dict[str, int]:
        """Writer -> its last number."""


# ---- moves -------------------------------------------------------------------------------


class MoveCancelled(ExclusiveLogError):
    """Internal: the call was cancelled. No caller ever sees it."""


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


class MoveHost(Protocol):
    """The engine that moves something."""

    path: str

    def check_not_forked(self) -> None:
        """EngineClosedError in a forked child."""

    def check_free(self) -> None:
        """LedgerError if this thread would wait for itself."""


# ---- all of it ---------------------------------------------------------------------------


# What engines of one kind can do and those of another kind cannot.
CAPABILITIES = frozenset(
    {
        "announcements", "backup", "bound_producers", "claims", "compaction", "compression",
        "deletion", "history", "inspection", "large_messages", "many_producers", "once",
        "reader_groups", "retention", "roles", "settle", "several_claims", "shared_producers",
        "shared_state", "snapshots", "statistics", "termination", "transactions", "unload",
        "verify",
    }
)  # fmt: skip


class EngineBackend(Backend, CursorStore, Protocol):
    """What an engine's public interface needs of the place that keeps the log."""

    name: str
    id: str
    path: str
    info: EngineInfo
    closed: bool
    forked: bool
    readonly: bool
    capabilities: frozenset[str]  # those of CAPABILITIES that it has
    latest_needs_log: (
        bool  # must an owner, too, look into the log before a `latest` read (rule I2)?
    )

    def moves(
        self, topics: str | Iterable[str], to: str, timeout: float, groups: Iterable[str],
        producer: str | None,
    ) -> Moves:  # fmt: skip
        """What `Engine.unload` does, to be begun or run."""

    def cancel_moves(self, topics: str | Iterable[str]) -> list[str]:
        """End the moves of these topics. Returns the names of those that were under way."""

    @property
    def catalog(self) -> Catalog:
        """What the ledger has."""

    @property
    def role_store(self) -> RoleStore:
        """Its roles."""

    @property
    def busy_here(self) -> bool:
        """Does this thread hold an engine lock?"""

    @property
    def callbacks(self) -> Any:
        """Runs code of the application."""

    @property
    def inspection(self) -> Inspection:
        """Facts about its topics."""

    @property
    def claims(self) -> ClaimStore:
        """The claims that it holds."""

    @property
    def once(self) -> Once:
        """Batches that are appended once."""

    @property
    def ownership_version(self) -> int:
        """Changes with whatever may change who owns a topic."""

    def make_visible(self) -> None:
        """Let this engine's readers see all that any engine has acknowledged by now (rule G6)."""

    def events(self, topic: str | None, group: str | None) -> Iterator[Event] | None:
        """The changes of ownership of a topic, of a group's claims, or (None) all; None if they are
        messages of the topic `__events__`."""

    def snapshot(self, topic: int, offset: int, items: Iterable[Item]) -> None:
        """Keep what a topic's messages before an offset add up to (rule I4)."""

    def open_producers(
        self, names: Sequence[str], request: ProducerRequest, options: SessionOptions
    ) -> Sequence[ProducerSession]:
        """Register a producer on each of these topics, all or none; what they send by."""

    def backup(self, path: str) -> None:
        """Copy the ledger into a directory."""

    def close(self) -> None:
        """Close it; closing twice does nothing."""


class Opened(Protocol):
    """An engine as the application has it."""

    @property
    def backend(self) -> EngineBackend:
        """The place that keeps its log."""


# ---- arguments -------------------------------------------------------------------------


MAX_NAME_BYTES = 240
MAX_GENERATION = 2**63 - 1


def check_flag(argument: str, value: object) -> None:
    """Raise TypeError unless this is True or False: "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument}={quoted(value)}: it takes True or False")


def is_whole(value: object) -> TypeGuard[int]:
    """Is this a whole number? True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_engine_id(to: object) -> None:
    """Raise TypeError unless this may be an engine's id."""
    if not isinstance(to, str):
        raise TypeError(f"to={quoted(to)}: it takes an engine's id, a str")


def check_group(group: object) -> None:
    """Raise ValueError or TypeError unless this is a group's name."""
    check_resource("group", group)


def check_resource(argument: str, name: object) -> None:
    """Raise ValueError or TypeError unless this is the name of a group or resource."""
    if not isinstance(name, str):
        raise TypeError(f"{argument}={quoted(name)}: it takes a str")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{argument}={quoted(name)} cannot be written as UTF-8") from None
    if not 1 <= size <= MAX_NAME_BYTES:
        raise ValueError(
            f"{argument}={quoted(name)}: it takes 1 to {MAX_NAME_BYTES} bytes of UTF-8"
        )


def check_generation(resource: str, generation: object) -> None:
    """Raise ValueError or TypeError unless this is a resource's generation."""
    if generation is None:
        return
    if not isinstance(generation, int) or isinstance(generation, bool):
        raise TypeError(f"generation of {resource!r}: it takes an int or None, not {generation!r}")
    if not 0 <= generation <= MAX_GENERATION:
        raise ValueError(f"generation={generation} of {resource!r}: it takes 0 to 2**63 - 1")


def check_groups(groups: Iterable[str]) -> tuple[str, ...]:
    """The names of the groups, each once; a str is one name."""
    names = (groups,) if isinstance(groups, str) else tuple(dict.fromkeys(groups))
    for name in names:
        check_group(name)
    return names


# ---- context managers ------------------------------------------------------------------


class _Closable(Protocol):
    def close(self) -> None:
        """Close it; closing twice does nothing."""


class Closing:
    """Base of classes with a `close()`: `with` calls it at the end of the block."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: _Closable,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
