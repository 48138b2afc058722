"""The library's public value types: access modes, and facts about engines, sessions, claims and
hand-overs. All of them are immutable.

>>> AccessMode("wait_for_exclusive") is AccessMode.WAIT_FOR_EXCLUSIVE
True
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

__all__ = [
    "AccessMode",
    "Announcement",
    "ClaimInfo",
    "EngineInfo",
    "EngineStats",
    "GroupInfo",
    "Histogram",
    "Move",
    "OwnerInfo",
    "ProducerStats",
    "Report",
    "Retention",
    "RoleInfo",
    "TopicStats",
    "TransferInfo",
    "WaiterInfo",
]

PREFIX = "__role__/"  # of the names of the roles' own topics


ModeName = Literal["shared", "exclusive", "wait_for_exclusive", "exclusive_with_fencing"]


class AccessMode(str, enum.Enum):
    """How a producer shares its topic with others (PIP-68, rules A1-A6).

    - `SHARED`: the topic may have other shared producers.
    - `EXCLUSIVE`: the only producer; an error if the topic is not free.
    - `WAIT_FOR_EXCLUSIVE`: the only producer; waits for the topic in a priority queue (PIP-440).
    - `EXCLUSIVE_WITH_FENCING`: the only producer, at once: present holders and waiters are fenced.

    The library asks a mode for its properties, and does not compare names:

    >>> mode = AccessMode.WAIT_FOR_EXCLUSIVE
    >>> mode.is_exclusive, mode.waits, mode.fences
    (True, True, False)
    """

    SHARED = "shared"
    EXCLUSIVE = "exclusive"
    WAIT_FOR_EXCLUSIVE = "wait_for_exclusive"
    EXCLUSIVE_WITH_FENCING = "exclusive_with_fencing"

    def __str__(self) -> str:
        return self.value

    @property
    def is_exclusive(self) -> bool:
        """Is such a producer the only one of its topic?"""
        return self is not AccessMode.SHARED

    @property
    def waits(self) -> bool:
        """Does such a request wait in the topic's queue until the topic is free?"""
        return self is AccessMode.WAIT_FOR_EXCLUSIVE

    @property
    def fences(self) -> bool:
        """Does such a request fence the topic's holders and waiters?"""
        return self is AccessMode.EXCLUSIVE_WITH_FENCING

    @classmethod
    def parse(cls, value: AccessMode | str) -> AccessMode:
        """The mode of that name; an unknown one is an error, never a weaker mode (rule A4).

        >>> AccessMode.parse("exclusive").name
        'EXCLUSIVE'
        >>> AccessMode.parse("exklusive")
        Traceback (most recent call last):
            ...
        ValueError: access_mode='exklusive' is unknown; it takes shared, exclusive, \
wait_for_exclusive or exclusive_with_fencing
        """
        try:
            return cls(value)
        except ValueError:
            *others, last = cls
            raise ValueError(
                f"access_mode={value!r} is unknown; it takes {', '.join(others)} or {last}"
            ) from None


# The modes with a property, for rows and requests, which have the name of their mode.
EXCLUSIVE_MODES: frozenset[str] = frozenset(mode.value for mode in AccessMode if mode.is_exclusive)
WAITING_MODES: frozenset[str] = frozenset(mode.value for mode in AccessMode if mode.waits)
FENCING_MODES: frozenset[str] = frozenset(mode.value for mode in AccessMode if mode.fences)


@dataclass(frozen=True)
class EngineInfo:
    """One live engine on a ledger. `heartbeat_age` is in seconds.

    >>> [info] = engine.engines()
    >>> info.name, info.id == engine.id
    ('test', True)
    """

    id: str
    name: str
    pid: int
    properties: Mapping[str, str]
    heartbeat_age: float


@dataclass(frozen=True)
class OwnerInfo:
    """A session that holds a topic, its engine and its epoch. `since` is in ms since 1970.

    >>> leader = topic.producer("exclusive", name="leader")
    >>> topic.owner.producer_name, topic.owner.engine_name, topic.owner.epoch
    ('leader', 'test', 1)
    """

    engine_id: str
    engine_name: str
    pid: int
    producer_name: str
    access_mode: AccessMode
    priority: int
    epoch: int
    since: int
    session: int
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Announcement:
    """The last announcement of a topic (`producer.announce`), and the owner that made it.

    `epoch` is that owner's epoch, `time` is in ms since 1970. If the topic's epoch is higher, the
    topic had later owners, and they have announced nothing.

    >>> leader = topic.producer("exclusive")
    >>> leader.announce({"address": "unix:/run/leader"})
    >>> topic.announcement.info["address"], topic.announcement.epoch
    ('unix:/run/leader', 1)
    """

    info: Mapping[str, str]
    epoch: int
    time: int
    engine_id: str
    engine_name: str
    pid: int
    producer_name: str
    session: int


@dataclass(frozen=True)
class WaiterInfo:
    """A session that waits in a topic's queue. `since` is in ms since 1970.

    >>> leader = topic.producer("exclusive")
    >>> future = topic.producer_async("wait_for_exclusive", priority=2)
    >>> [(waiter.priority, waiter.access_mode.value) for waiter in topic.waiters], future.cancel()
    ([(2, 'wait_for_exclusive')], True)
    """

    engine_id: str
    engine_name: str
    pid: int
    producer_name: str
    priority: int
    since: int
    session: int
    properties: Mapping[str, str] = field(default_factory=dict)
    access_mode: AccessMode = AccessMode.WAIT_FOR_EXCLUSIVE


@dataclass(frozen=True)
class ClaimInfo:
    """A claim that is held.

    `group` is "" if it was left out; `since` is in ms since 1970. `reader` is True for the claim of
    a group reader; its resources are the names of the reader's topics.

    >>> claim = engine.own("workers", {"shard-7": None})
    >>> [(info.group, dict(info.generations)) for info in engine.claims()]
    [('workers', {'shard-7': 1})]
    """

    id: int
    group: str
    generations: Mapping[str, int]
    engine_id: str
    engine_name: str
    pid: int
    since: int
    reader: bool = False


@dataclass(frozen=True)
class RoleInfo:
    """A role that was granted or requested at some time (`engine.roles`).

    - `epoch`: how many holders it has had. `holder`: the present one; None if no live engine has
      the role.
    - `topics`, `groups` ({group: names of its topics}), `claims` ({group: resources}): what the
      request of the last holder stated.
    - `waiters`: the sessions that wait for it, in the order of their promotion.

    >>> role = engine.role("billing", topics=["invoices"])
    >>> [(info.name, info.epoch, info.topics) for info in engine.roles()]
    [('billing', 1, ('invoices',))]
    """

    name: str
    epoch: int
    holder: OwnerInfo | None
    topics: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    claims: Mapping[str, tuple[str, ...]]
    waiters: tuple[WaiterInfo, ...]


@dataclass(frozen=True)
class GroupInfo:
    """A reader group on one topic.

    `position` is the offset that the group has committed, the next one to read; `lag` is the number
    of messages from there to the end. Both are None before its first commit. `reader` is the claim
    of its reader; None if it has none.

    >>> _ = topic.producer().send_many([b"a", b"b"])
    >>> with topic.reader(group="billing") as group:
    ...     group.commit()
    >>> [(info.group, info.topic, info.lag) for info in topic.stats().groups]
    [('billing', 'orders', 2)]
    """

    group: str
    topic: str
    position: int | None
    lag: int | None
    reader: ClaimInfo | None


@dataclass(frozen=True)
class TransferInfo:
    """A hand-over that is under way (rules E1-E4).

    - `state`: "releasing": `source` has not released it yet; "assigned": it is reserved for
      `target`.
    - `source`: the session that is to release it; None once it has.
    - `target`: the destination engine.
    - `until`: the deadline, in ms since 1970. If `source` has not released the topic by then, it
      keeps it; a reservation ends then.
    - `producer`: the name of the shared producer that moves alone; None if the ownership of the
      topic moves.
    - `groups`: the groups whose claims on the topic move with it.

    >>> topic.transfer is None    # no hand-over is under way
    True
    """

    topic: str
    state: str
    source: OwnerInfo | None
    target: EngineInfo
    until: int
    producer: str | None = None
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Move:
    """The outcome of `engine.unload` or `producer.move` for one topic, or for one of its shared
    producers (rules E1-E4). `state` is

    - "owned": a producer of the destination owns it, under `epoch`.
    - "assigned": it is reserved for the destination's next producer until the deadline.
    - "releasing": its owner `source` has not released it yet.
    - "failed": it was not moved; `reason` says why, and `source` is its present holder.

    `producer` is the name of the producer that was moved alone; None if the topic was moved.

    >>> with xl.open(path, "a") as a, xl.open(path, "b") as b:
    ...     leader = a.topic("jobs").producer("exclusive")
    ...     [move] = a.unload("jobs", to=b.id)
    ...     move.ok, move.state, move.target.name
    (True, 'assigned', 'b')
    """

    topic: str
    topic_id: int
    epoch: int
    source: OwnerInfo | None
    target: EngineInfo
    state: str
    reason: str = ""
    producer: str | None = None

    @property
    def ok(self) -> bool:
        """True if the destination has it, or it is reserved for the destination."""
        return self.state in ("owned", "assigned")


@dataclass(frozen=True)
class Histogram:
    """A histogram whose buckets end at powers of two.

    - `bounds`: the upper bound of each bucket; the last is infinite.
    - `counts`: the number of values in each bucket: below its bound, and not below the previous
      bound.
    - `sum`: the sum of all values.

    Other processes add to it while it is read, so `sum` may lack a value that `counts` includes.

    >>> seconds = Histogram((0.25, 0.5, float("inf")), (3, 1, 0), 0.9)
    >>> seconds.count, seconds.quantile(0.5), seconds.quantile(0.99)
    (4, 0.25, 0.5)
    """

    bounds: tuple[float, ...] = (math.inf,)
    counts: tuple[int, ...] = (0,)
    sum: float = 0.0

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean of the values; 0.0 if there are none.

        >>> engine.stats().flush_seconds.mean >= 0.0
        True
        """
        return self.sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """An upper bound of a quantile, at most twice its true value; 0.0 if there are no values.

        - `share`: 0.5 for the median, 0.99 for the 99th percentile."""
        wanted, seen = share * self.count, 0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return bound
        return 0.0


@dataclass(frozen=True)
class _Figures:
    """A dataclass that can also be read as a mapping: `stats["topics"]`, `dict(stats)`."""

    def keys(self) -> list[str]:
        """The names of the fields."""
        return [each.name for each in fields(self)]

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())


@dataclass(frozen=True)
class EngineStats(_Figures):
    """The figures of a ledger, and of the engine that reads them (`engine.stats()`).

    All processes that have the ledger open count together. Counters start at 0 when an engine
    opens a ledger that no other engine has open. A read-only engine that is alone reads the last
    values. If a process is killed, the event that it was about to count may be missing. Sizes are
    in bytes, times in seconds.

    - `topics`, `engines`: the numbers of topics, and of open engines. `waiters`: how many requests
      wait in the queues of topics, locks and roles; one for a role waits in those of its topics,
      too.
    - `unresponsive`: engines whose processes exist, but have not sent a heartbeat for longer than
      their `keepalive`. `engines` does not count them.
    - `groups`: each reader group on each topic, with its lag in messages.
    - `appended_messages`, `appended_bytes`: appended to the journal and the tables; the bytes
      include headers.
    - `flushed_messages`: how many messages each flush of the journal made durable.
      `flush_seconds`: how long each flush took.
    - `append_seconds`: from the call until the message is in the journal, including the wait for
      other writers. One in 256 calls of a process is timed.
    - `durable_seconds`: from then until the message is flushed, for each call that waits for it.
    - `wake_up_seconds`: from an append until the reader that it woke runs. A reader that polls for
      some microseconds, because messages come in quick succession, is not woken.
    - `promotion_seconds`: from the transaction that grants a topic to a waiter until its process
      has the producer.
    - `checkpoint_seconds`, `checkpoint_bytes`: how long each checkpoint that moved anything took,
      and how much all of them moved from the journal into the tables.
    - `hand_overs`, `evictions`, `fencings`: owners of topics that took a topic over by a hand-over;
      that were evicted because they were dead or unresponsive; and that were fenced by another
      producer. All of them since the ledger was created.
    - `journal_bytes`, `journal_capacity`: how much waits for a checkpoint, and how much fits.
    - `used_bytes`, `map_size`: used bytes and maximum size of the tables. `large_bytes`: size of
      the large entries, which are stored in files of their own.
      `disk_bytes`: disk space that all files occupy. `disk_free_bytes`: space that this user can
      still write, None if it cannot be read; `disk_low`: True if it is so little that the library
      warns.
    - `transactions`: number of transactions of the tables since the ledger was created. `readers`,
      `max_readers`: used slots for read transactions, and all slots.
    - `oldest_reader`: None, or the process whose read transaction keeps the tables from reusing
      space: {"pid": ..., "engine": name or None, "transactions_behind": ...}.
    - `pending_messages`, `pending_bytes`: queued for a commit by the producers of this engine.

    `stats["topics"]` is `stats.topics`, and `dict(stats)` has all fields.

    >>> stats = engine.stats()
    >>> stats.engines, stats.disk_low
    (1, False)
    """

    topics: int = 0
    engines: int = 0
    unresponsive: tuple[EngineInfo, ...] = ()
    waiters: int = 0
    groups: tuple[GroupInfo, ...] = ()
    appended_messages: int = 0
    appended_bytes: int = 0
    flushed_messages: Histogram = Histogram()
    flush_seconds: Histogram = Histogram()
    append_seconds: Histogram = Histogram()
    durable_seconds: Histogram = Histogram()
    wake_up_seconds: Histogram = Histogram()
    promotion_seconds: Histogram = Histogram()
    checkpoint_seconds: Histogram = Histogram()
    checkpoint_bytes: int = 0
    hand_overs: int = 0
    evictions: int = 0
    fencings: int = 0
    journal_bytes: int = 0
    journal_capacity: int = 0
    used_bytes: int = 0
    map_size: int = 0
    large_bytes: int = 0
    disk_bytes: int = 0
    disk_free_bytes: int | None = None
    disk_low: bool = False
    transactions: int = 0
    readers: int = 0
    max_readers: int = 0
    oldest_reader: Mapping[str, Any] | None = None
    pending_messages: int = 0
    pending_bytes: int = 0


@dataclass(frozen=True)
class ProducerStats(_Figures):
    """Figures of one producer (`producer.stats()`), since it was opened or has followed its topic
    to another engine.

    - `messages`: the number of messages appended, without those of transactions.
    - `pending_messages`, `pending_bytes`: queued for a commit.
    - `last_sequence_id`: the sequence id of its last message; -1 if there is none.

    >>> shared = topic.producer(name="feed")
    >>> _ = shared.send(b"x")
    >>> shared.stats().messages, shared.stats().pending_messages
    (1, 0)
    """

    topic: str
    name: str
    epoch: int
    messages: int
    pending_messages: int
    pending_bytes: int
    last_sequence_id: int


@dataclass(frozen=True)
class TopicStats(_Figures):
    """Figures of one topic, and of how its entries are stored (`topic.stats()`).

    - `messages`: the number of messages, without trimmed ones. `first_offset`, `next_offset`: the
      offsets of the first message, and of the next one to be sent.
    - `epoch`, `holders`, `waiters`: how many owners it has had, how many producers may write, and
      how many wait in its queue.
    - `groups`: its reader groups, with their lag in messages.

    The other fields are about the entries in the tables, without those in the journal:

    - `compression`: the topic's setting, "lz4", "zstd" or None. It applies to new entries.
    - `entries`, `raw_bytes`, `stored_bytes`: the number of entries, and their bytes without
      compression and as they are stored.
    - `methods`: {"lz4", "zstd" or "none": stored bytes}.

    >>> _ = topic.producer().send_many([b"a", b"b"])
    >>> topic.stats().messages, topic.stats().next_offset
    (2, 2)
    >>> dict(topic.stats())["messages"]
    2
    """

    compression: str | None
    entries: int
    raw_bytes: int
    stored_bytes: int
    methods: Mapping[str, int]
    messages: int = 0
    first_offset: int = 0
    next_offset: int = 0
    epoch: int = 0
    holders: int = field(default=0, compare=False)
    waiters: int = field(default=0, compare=False)
    groups: tuple[GroupInfo, ...] = field(default=(), compare=False)

    @property
    def ratio(self) -> float:
        """`raw_bytes` divided by `stored_bytes`; 1.0 if there are no entries."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0


class Unchanged(enum.Enum):
    """The default of an argument that changes a setting: it keeps what it is."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED = Unchanged.UNCHANGED


@dataclass(frozen=True)
class Retention:
    """A topic's retention: what is removed in the background. `topic.retention()` returns it.

    - `max_age`: seconds since a message was published; None: no limit.
    - `max_bytes`: how many bytes of the newest entries are kept; None: no limit.
    - `keep`: "keys": the topic is compacted before messages are removed, so that readers with
      `read_compacted=True` find the last message of every key. None: no.

    >>> topic.retention(max_age=3600.0, keep="keys")
    Retention(max_age=3600.0, max_bytes=None, keep='keys')
    """

    max_age: float | None = None
    max_bytes: int | None = None
    keep: Literal["keys"] | None = None


@dataclass(frozen=True)
class Report:
    """The result of `engine.verify()`. `problems` is empty if the ledger is undamaged.

    >>> report = engine.verify()
    >>> report.ok, report.topics
    (True, 1)
    """

    topics: int
    entries: int
    messages: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems
