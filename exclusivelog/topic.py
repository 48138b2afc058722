"""Topics: making them, looking at them, opening producers and readers on them."""

from __future__ import annotations

import concurrent.futures
import datetime as dt
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError, ProducerBusyError, TopicNotFoundError
from exclusivelog.ledger import Ledger
from exclusivelog.producer import Options, Producer, check_seconds, encode_properties
from exclusivelog.reader import Reader
from exclusivelog.serde import pick_dumps
from exclusivelog.sessions import Sessions, describe, owner_info
from exclusivelog.tables import Tables
from exclusivelog.types import AccessMode, OwnerInfo, WaiterInfo

if TYPE_CHECKING:
    from exclusivelog.engine import Engine, ProducerFuture

NAME_BYTES = 255
DROPPED_AT_ONCE = 1000
SENDING = (
    "linger", "max_batch_messages", "max_batch_bytes", "max_pending_bytes", "on_fenced",
)  # fmt: skip
LOWEST, HIGHEST = -(2**63), 2**63 - 1


class ProducerOptions(TypedDict, total=False):
    """The options of `Topic.producer`, which tells what each means."""

    name: str | None
    priority: int
    topic_epoch: int | None
    timeout: float | None
    properties: Mapping[str, str] | None
    linger: float
    max_batch_messages: int
    max_batch_bytes: int
    max_pending_bytes: int
    serializer: Any
    on_fenced: Callable[[Producer, Any], object] | None


class Topic:
    """An ordered log of messages with dense offsets from 0. Made by `engine.topic`.

    >>> topic = engine.topic("orders")
    >>> topic.name, topic.epoch, topic.next_offset, topic.owner
    ('orders', 0, 0, None)
    """

    def __init__(self, engine: Engine, topic: int, name: str) -> None:
        self.id = topic
        self.name = name
        self._engine = engine

    # ---- look ----------------------------------------------------------------------------

    def _row(self) -> _core.TopicRow:
        self._engine.check_open()
        with self._engine.ledger.read() as tables:
            return existing(tables, self.id)

    @property
    def epoch(self) -> int:
        """How many owners the topic has had; grows with each (rule B1)."""
        return self._row().epoch

    @property
    def first_offset(self) -> int:
        """The offset of the first message that is still there."""
        return self._row().first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        self._engine.check_open()
        return checked(self._engine.latest(self.id)).next_offset

    @property
    def owner(self) -> OwnerInfo | None:
        """Who holds exclusive access; None if nobody who lives does."""
        self._engine.check_open()
        return self._engine.sessions.owner(self.id)

    @property
    def holders(self) -> list[OwnerInfo]:
        """Who may write: the owner, or the shared producers."""
        self._engine.check_open()
        return self._engine.sessions.holders(self.id)

    @property
    def waiters(self) -> list[WaiterInfo]:
        """Who waits for the topic, in the order of their promotion (rule D1)."""
        self._engine.check_open()
        return self._engine.sessions.waiters(self.id)

    # ---- write ---------------------------------------------------------------------------

    def producer(
        self,
        access_mode: AccessMode | str = AccessMode.SHARED,
        *,
        name: str | None = None,
        priority: int = 0,
        topic_epoch: int | None = None,
        timeout: float | None = None,
        properties: Mapping[str, str] | None = None,
        linger: float = 0.0,
        max_batch_messages: int = 100_000,
        max_batch_bytes: int = 1 << 20,
        max_pending_bytes: int = 64 << 20,
        serializer: Any = None,
        on_fenced: Callable[[Producer, Any], object] | None = None,
    ) -> Producer:
        """Open a producer (PIP-68; the table of rule A).

        - `access_mode`: shared, exclusive, wait_for_exclusive or exclusive_with_fencing.
        - `name`: sequence ids are counted under it (rule G2); one live producer a name
          (rule A6). Default: one that nobody had before.
        - `priority`: in the queue, higher first; a signed 64-bit number (PIP-440, rule D1).
          Other modes ignore it.
        - `topic_epoch`: the epoch this producer had when it lost its connection: granted
          again unchanged if nobody had the topic since (rule B5).
        - `timeout`: seconds to wait in the queue; None: for ever.
        - `properties`: a mapping of str to str for others to see in `topic.owner`.
        - `linger`: seconds that `send_async` may hold a message back to commit it with
          others. 0: not on purpose.
        - `max_batch_messages`, `max_batch_bytes`: no more is encoded as one entry. Checkpoints
          pack small entries into larger ones.
        - `max_pending_bytes`: `send_async` commits by itself when this much waits.
        - `serializer`: bytes, str, json, msgpack, a Serde or a function (rule G1).
        - `on_fenced`: called with (producer, error), in a thread of its own, when the topic
          is lost (rule C6).

        Raises ProducerBusyError, ProducerFencedError, InvalidEpochError, WaitTimeoutError,
        TopicNotFoundError, TopicTerminatedError; ValueError and TypeError for arguments. A
        producer that was refused, timed out or was interrupted has changed nothing (rule A2).

        >>> leader = topic.producer("exclusive", name="leader")
        >>> leader.topic_epoch
        1
        >>> topic.producer("exclusive")
        Traceback (most recent call last):
            ...
        exclusivelog.errors.ProducerFencedError: topic 'orders' is not free for an exclusive \
producer; it is held by producer 'leader' ...
        """
        options = Options(
            linger, max_batch_messages, max_batch_bytes, max_pending_bytes,
            pick_dumps(serializer), on_fenced,
        )  # fmt: skip
        future = self._engine.future(self, options)
        try:
            self._open(future, access_mode, name, priority, topic_epoch, timeout, properties)
            return future.result()
        except BaseException:
            # Interrupted, perhaps: a grant that came first is given back.
            if not future.cancel():
                future.add_done_callback(_close_producer)
            raise

    def producer_async(
        self,
        access_mode: AccessMode | str = AccessMode.SHARED,
        **options: Unpack[ProducerOptions],
    ) -> ProducerFuture:
        """As `producer`, with the same options, without waiting in the queue: a future that
        has the producer once it is promoted, or WaitTimeoutError after `timeout`. `cancel()`
        leaves no trace, or returns False because the grant came first (rule D5). Waiters cost
        no thread. A request that is refused raises from the future, wrong arguments here.

        >>> with topic.producer("exclusive"):
        ...     standby = topic.producer_async("wait_for_exclusive", priority=7)
        ...     standby.done()
        False
        >>> standby.result(timeout=5).topic_epoch
        2
        """
        for name in options.keys() - ProducerOptions.__annotations__.keys():
            raise TypeError(f"producer_async takes no option {name!r} (rule A4)")
        given: ProducerOptions = options
        sending = Options(
            **{name: given[name] for name in SENDING if name in given},  # type: ignore[literal-required]
            dumps=pick_dumps(given.get("serializer")),
        )
        future = self._engine.future(self, sending)
        self._open(
            future, access_mode, given.get("name"), given.get("priority", 0),
            given.get("topic_epoch"), given.get("timeout"), given.get("properties"),
        )  # fmt: skip
        return future

    def _open(
        self, future: ProducerFuture, access_mode: AccessMode | str, name: str | None,
        priority: int, topic_epoch: int | None, timeout: float | None,
        properties: Mapping[str, str] | None,
    ) -> None:  # fmt: skip
        mode = AccessMode.parse(access_mode)
        if name is not None:
            check_name(name, "name")
        if not isinstance(priority, int) or not LOWEST <= priority <= HIGHEST:
            raise ValueError(f"priority={priority!r}: it takes a signed 64-bit whole number")
        if topic_epoch is not None and (not isinstance(topic_epoch, int) or topic_epoch < 0):
            raise ValueError(f"topic_epoch={topic_epoch!r}: it takes an epoch, or None")
        if timeout is not None:
            check_seconds(timeout, "timeout", "seconds from 0 on, or None")
        encode_properties(properties or {})
        self._engine.open_producer(
            future, mode.value, name=name, priority=priority, claim=topic_epoch,
            timeout=timeout, properties=dict(properties or {}),
        )  # fmt: skip

    # ---- read ----------------------------------------------------------------------------

    def reader(
        self,
        start: str | int | dt.datetime = "earliest",
        *,
        inclusive: bool = True,
        deserializer: Any = None,
    ) -> Reader:
        """Open a reader (rule G5).

        - `start`: "earliest", "latest" (the end: only what comes from now on), an offset, or
          a datetime (naive: UTC): the first message published then or later.
        - `inclusive`: False begins behind the message at that offset or time.
        - `deserializer`: bytes, str, json, msgpack, a Serde or a function, for `value`.

        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b"a", b"b", b"c"])
        >>> [message.value for message in topic.reader(start=1)]
        [b'b', b'c']
        """
        self._engine.check_open()
        return Reader(
            self._engine, self.id, self.name, start, inclusive=inclusive, deserializer=deserializer
        )

    def __repr__(self) -> str:
        return f"<Topic {self.name!r}>"


def _close_producer(future: concurrent.futures.Future[Producer]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


# ---- names and rows ----------------------------------------------------------------------


def check_name(name: object, argument: str) -> str:
    """The name, or an error that says what a name is."""
    if not isinstance(name, str):
        raise TypeError(f"{argument} takes a str, not {type(name).__name__}")
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError(f"{argument}={name!r} cannot be written as UTF-8") from None
    if not 1 <= size <= NAME_BYTES or not name.isprintable():
        raise ValueError(
            f"{argument}={name!r}: it takes 1 to {NAME_BYTES} bytes of UTF-8 without control "
            "characters"
        )
    return name


def existing(tables: Tables, topic: int) -> _core.TopicRow:
    """The topic's row, or TopicNotFoundError if it was deleted."""
    return checked(tables.topic(topic))


def checked(row: _core.TopicRow) -> _core.TopicRow:
    """The row, or TopicNotFoundError if its topic was deleted."""
    if row.flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {row.name!r} was deleted")
    return row


def _find(tables: Tables, name: str) -> _core.TopicRow | None:
    topic = tables.topic_id(name)
    if topic is None:
        return None
    row = tables.topic(topic)
    return None if row.flags & _core.DELETED else row


def create_topic(ledger: Ledger, name: str, create: bool) -> tuple[int, str]:
    """(id, name) of the topic of that name, made if need be."""
    check_name(name, "topic")
    with ledger.read() as tables:
        row = _find(tables, name)
    if row is not None:
        return row.id, row.name
    if not create:
        raise TopicNotFoundError(f"{ledger.path} has no topic {name!r}")
    if name.startswith("__"):
        raise ValueError(f"topic={name!r}: names that begin with __ are kept for the library")
    with ledger.write() as tables:
        row = _find(tables, name) or _new_row(tables, name)
        return row.id, row.name


def _new_row(tables: Tables, name: str) -> _core.TopicRow:
    row = _core.TopicRow()
    row.id = tables.next_id(b"topic")
    row.name = name
    former = tables.topic_id(name)
    if former is not None:
        row.epoch = tables.topic(former).epoch  # no epoch is ever used twice (rule B1)
    tables.put_topic(row)
    tables.name_topic(row)
    return row


def list_topics(ledger: Ledger) -> list[str]:
    """The names of the topics that exist, sorted."""
    with ledger.read() as tables:
        return [name for name, topic in tables.topics() if not _is_deleted(tables, topic)]


def _is_deleted(tables: Tables, topic: int) -> bool:
    try:
        return bool(tables.topic(topic).flags & _core.DELETED)
    except LedgerCorruptedError:
        return False  # it is there, and whoever opens it learns what is wrong with it


def delete_topic(ledger: Ledger, sessions: Sessions, name: str) -> None:
    """Remove a topic that nobody holds or awaits; see `Engine.delete_topic`."""
    check_name(name, "name")
    with ledger.write() as tables:
        row = _find(tables, name)
        if row is None:
            raise TopicNotFoundError(f"{ledger.path} has no topic {name!r}")
        holder = sessions.clear(tables, row)
        if holder is not None:
            raise ProducerBusyError(
                f"topic {name!r} cannot be deleted; it is held by {describe(holder)}",
                holder=owner_info(holder),
            )
        row.flags |= _core.DELETED
        tables.put_topic(row)
        tables.discard(row.id)
        tables.announce.add(row.id)
    empty_trash(ledger)


def empty_trash(ledger: Ledger) -> None:
    """Remove what deleted topics have left behind, a bounded number of rows at a time."""
    with ledger.read() as tables:
        discarded = tables.discarded()
    for topic in discarded:
        while True:
            with ledger.write() as tables:
                if not tables.drop_rows(topic, DROPPED_AT_ONCE):
                    tables.empty(topic)
                    break
