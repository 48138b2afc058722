"""Readers of one topic, and of several topics for a group."""

from __future__ import annotations

import contextlib
import datetime as dt
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from exclusivelog import _core
from exclusivelog._core import Message
from exclusivelog.arguments import ago, as_int, check_count, check_flag, check_timeout
from exclusivelog.backend import Cursor, EngineBackend, GroupCursor
from exclusivelog.closing import Closing
from exclusivelog.errors import (
    DeserializationError,
    EngineClosedError,
    ExclusiveLogError,
    TopicNotFoundError,
    TopicTerminatedError,
    WaitTimeoutError,
)
from exclusivelog.members import GroupMember
from exclusivelog.messages import COLUMNS, arrow_stream, import_pyarrow, record_batch
from exclusivelog.reads import Positions
from exclusivelog.serde import pick_loads

__all__ = ["GroupReader", "Message", "Reader"]

if TYPE_CHECKING:
    import pyarrow as pa

# With one more entry of at most 1 GiB, the offsets of an Arrow array still fit 32 bits.
MAX_ARROW_BYTES = 512 << 20

Found = tuple[str, Message]
# `Topic.reader` describes each.
Start = Literal["earliest", "latest"] | int | dt.datetime | dt.timedelta
T = TypeVar("T")


def _deserializer(topic: str, value: Any, key: Any) -> _core.Deserializer | None:
    """The deserializer for the options of a reader; None: values and keys are bytes."""
    loads, load_key = pick_loads(value), pick_loads(key, "key_deserializer")
    if loads is None and load_key is None:
        return None
    return _core.Deserializer(topic, loads, load_key)


def check_following(follow: bool, timeout: float | None) -> None:
    """Raise ValueError for a wrong timeout, or for a timeout without `follow`."""
    if timeout is not None:
        check_timeout(timeout)
        if not follow:
            raise ValueError(f"timeout={timeout!r}: values() waits only with follow=True")


class Reader(GroupMember, Closing):
    """Reads one topic. `topic.reader` returns it; for one thread at a time.

    A reader does not count as a producer (rule A1). It returns only messages that are durable by
    its engine's `durability` (rule G6), and none that was trimmed or deleted before the call (rule
    G8).
    Damaged messages raise LedgerCorruptedError, and the position stays before them:
    `seek(error.offsets.stop)` skips them (rule G9).

    A value or key is deserialised when it is first accessed: reading returns messages, and a
    message's `value` raises DeserializationError if the deserializer fails. The position is then
    after that message, and the other messages of a batch are not affected. `raw_value` has the
    bytes.

    `next(reader)` returns the next message, or raises StopIteration at the present end.
    `cursor` is the position in the log that it reads with.

    >>> reader = topic.reader(deserializer="json")
    >>> reader.has_message_available()
    False
    >>> with topic.producer() as producer:
    ...     _ = producer.send_many([b"[1]", b"not JSON", b"[2]"])
    >>> reader.read_next(timeout=1).value, next(reader).raw_value, next(reader).value
    ([1], b'not JSON', [2])
    """

    def __init__(
        self,
        store: EngineBackend,
        topic: int,
        name: str,
        start: Start,
        *,
        inclusive: bool,
        deserializer: Any,
        key_deserializer: Any = None,
        read_compacted: bool = False,
        trimmed: str = "error",
    ) -> None:
        if trimmed not in ("error", "earliest"):
            raise ValueError(f"trimmed={trimmed!r}: it takes 'error' or 'earliest'")
        self.membership: GroupCursor | None = None
        self._begin_alone()
        self._is_part = False  # of a GroupReader, which is in transactions instead
        self._closed = False
        self.continues_at = 0  # of a group's reader, after a transaction has aborted
        self.topic_id = topic
        self.topic = name
        self._store = store
        self.cursor = store.open_cursor(
            topic,
            name,
            _deserializer(name, deserializer, key_deserializer),
            read_compacted,
            trimmed == "earliest",
        )
        self.seek(start, inclusive=inclusive)

    # ---- the position --------------------------------------------------------------------

    @property
    def _ledger(self) -> object:
        """The ledger that it reads from."""
        return self.cursor.ledger

    def _check(self) -> None:
        """Raise an error unless it can be used; before each read."""
        if self.membership is not None and not self._is_part:
            self._note_use()
        self.cursor.check()

    def _offsets_to_commit(self) -> Positions:
        return {self.topic_id: self.cursor.position}  # without a look for parts: it is called often

    @property
    def position(self) -> int:
        """The offset of the next message to read; the topic may not have it yet."""
        return self._next_positions()[self.topic_id] if self.returns else self.cursor.position

    def seek(self, start: Start, *, inclusive: bool = True) -> None:
        """Continue at another message: `start` and `inclusive` are those of `Topic.reader`.

        Messages whose publish time is ahead of the clock are found by the time at which the ledger
        recorded them, if `start` is a time in the past.

        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b"a", b"b", b"c"])
        >>> reader.seek("latest"); reader.position
        3
        >>> reader.seek(-2); reader.position
        1
        """
        self._check()
        check_flag("inclusive", inclusive)
        start = as_int(start)
        if type(start) is int and start < 0:
            self._seek_back(-start, inclusive)
        else:
            since = ago(start) if isinstance(start, dt.timedelta) else start
            self.cursor.seek(since, inclusive)
        self.continues_at = self.cursor.position
        if self.membership is not None and not self._is_part:
            self._has_sought()

    def _seek_back(self, count: int, inclusive: bool) -> None:
        """Continue at the last `count` messages, or at the earliest if there are fewer."""
        end, first = self.cursor.end(), self._store.topic_store(self.topic_id).latest().first_offset
        if end - count > first:
            self.cursor.seek(end - count, inclusive)
        elif inclusive or end <= first:
            self.cursor.seek("earliest", True)
        else:
            self.cursor.seek(first, False)

    def has_message_available(self) -> bool:
        """True if there is a durable message at or after the position. The answer is exact: a
        message that is not durable yet does not count, and no durable one is missed (rule G5).

        It never answers False where a read would raise (rule G12): it raises OffsetTrimmedError
        if the position and all after it were trimmed, and TopicNotFoundError if the topic was
        deleted.

        >>> reader.has_message_available()
        False
        """
        self._check()
        return self.cursor.has_more()

    # ---- read ----------------------------------------------------------------------------

    def read_next(self, timeout: float | None = None) -> Message:
        """Return the next message; wait for it at the end of the topic.

        - `timeout`: seconds until WaitTimeoutError; 0: do not wait. None, the default: without
          limit.

        Waiting costs no CPU: the writer wakes the reader, also from another process. Raises
        TopicTerminatedError at the end of a terminated topic.

        >>> reader.read_next(timeout=0)
        Traceback (most recent call last):
            ...
        exclusivelog.errors.WaitTimeoutError: topic 'orders' had no message at offset 0 within 0 s
        """
        if timeout is not None:
            check_timeout(timeout)
        cursor = self.cursor
        self._check()
        message = cursor.take_ready()
        if message is not None:
            return message
        deadline = None if timeout is None else _core.monotonic() + timeout
        while True:
            seen = cursor.mark()  # before reading: a later append ends the wait
            message = cursor.take_one()
            if message is not None:
                return message
            cursor.check()
            left = None if deadline is None else deadline - _core.monotonic()
            self._check_goes_on()
            if left is not None and left <= 0:
                return self._take_last(timeout)
            cursor.wait(seen, left)
            if self.membership is not None and not self._is_part:
                self._note_use()  # another caller may have committed meanwhile

    def _check_goes_on(self) -> None:
        if self.cursor.is_over():
            raise TopicTerminatedError(
                f"topic {self.topic!r} is terminated, and ends at offset {self.position}"
            )

    def _take_last(self, timeout: float | None) -> Message:
        """The next message up to now, after `timeout` seconds have passed."""
        self.cursor.look_up()
        message = self._read_known() if self.cursor.is_remote else None
        if message is None:
            raise self._nothing_came(timeout)
        return message

    def _read_known(self) -> Message | None:
        """The next message, unless other machines must be asked for it."""
        self._check()
        message = self.cursor.take_one()
        if message is None:
            self._check_goes_on()
        return message

    def _nothing_came(self, timeout: float | None) -> WaitTimeoutError:
        """The error of `read_next` after `timeout` seconds."""
        return WaitTimeoutError(
            f"topic {self.topic!r} had no message at offset {self.position} within {timeout} s"
        )

    def read_batch(self, max_messages: int) -> list[Message]:
        """Return up to `max_messages` next messages, without waiting; an empty list at the end.

        It deserialises nothing: a message that cannot be deserialised is in the list, too, and its
        `value` raises DeserializationError. To wait for the first message:
        `[reader.read_next(), *reader.read_batch(99)]`.

        >>> reader.read_batch(100)
        []
        """
        found = self._read_known_batch(max_messages)
        if not found and self.cursor.is_remote:
            self.cursor.look_up()
            found = self._read_known_batch(max_messages)
        return found

    def _read_known_batch(self, max_messages: int) -> list[Message]:
        max_messages = check_count(max_messages, "max_messages")
        self._check()
        with self._returned():
            return self.cursor.take_many(min(max_messages, sys.maxsize), ExclusiveLogError)

    @contextlib.contextmanager
    def _returned(self) -> Iterator[None]:
        # If a read fails or is interrupted, its caller has received none of the messages.
        start = self.position
        try:
            yield
        except BaseException:
            self.cursor.move_to(start)
            raise

    def read_arrow(
        self, max_bytes: int = 1 << 20, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch | None:
        """Return the next messages as a pyarrow RecordBatch, without waiting; None at the end.

        - `max_bytes`: read as many whole entries as fit into so many bytes (at most 512 MiB), and
          at least one. Default: 1 MiB.
        - `columns`: any of offset, epoch, key, value, publish_time, event_time, producer,
          sequence_id, properties. Default: all.

        Columns of large entries refer to the ledger's memory, without a copy. Needs the extra
        `[arrow]`.
        """
        self._check()
        chosen = COLUMNS if columns is None else tuple(columns)
        for name in chosen:
            if name not in COLUMNS:
                raise ValueError(f"columns: {name!r} is none of {', '.join(COLUMNS)}")
        max_bytes = check_count(max_bytes, "max_bytes")
        import_pyarrow()  # before anything is taken
        max_bytes = min(max_bytes, MAX_ARROW_BYTES)
        with self._returned():
            parts = _take_entries(self.cursor, max_bytes)
            if not parts and self.cursor.is_remote:
                self.cursor.look_up()
                parts = _take_entries(self.cursor, max_bytes)
            return record_batch(parts, chosen) if parts else None

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The messages up to the present end as an Arrow stream, for libraries that take one as a
        table: `pyarrow.table(reader)`, `polars.DataFrame(reader)`, DuckDB, `pandas.DataFrame
        .from_arrow(reader)`. It has the columns of `read_arrow`, and is read as it is consumed, by
        1 MiB; the position is after what was consumed. If reading fails, the position is where the
        stream began, and the error is one of the other library (OSError for pyarrow) with the text
        of this one's: `read_arrow` raises that. Needs the extra `[arrow]`.

        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b"a", b"b"], keys=["x", "y"])
        >>> import pyarrow
        >>> table = pyarrow.table(topic.reader())
        >>> table.num_rows, table["key"].to_pylist(), table["value"].to_pylist()
        (2, [b'x', b'y'], [b'a', b'b'])
        """
        self._check()
        stream = arrow_stream(self._arrow_batches(self.cursor.end()))
        return stream.__arrow_c_stream__(requested_schema)

    def _arrow_batches(self, end: int) -> Iterator[pa.RecordBatch]:
        start = self.position
        try:
            while self.position < end and (batch := self.read_arrow()) is not None:
                more = self.position - end  # messages that were appended since
                if more > 0:
                    self.cursor.move_to(end)
                    batch = batch.slice(0, batch.num_rows - more)
                yield batch
        except Exception:
            self.cursor.move_to(start)  # who reads the stream has nothing of it
            raise

    def __iter__(self) -> Iterator[Message]:
        """Iterate over the messages up to the present end."""
        self._check()
        messages = self.cursor.scan(self.cursor.end())
        return messages if self.membership is None else _checked(self, messages, self._is_part)

    def __next__(self) -> Message:
        """The next message; StopIteration if there is none now."""
        self._check()
        message = self.cursor.take_one()
        if message is None and self.cursor.is_remote:
            self.cursor.look_up()
            message = self.cursor.take_one()
        if message is None:
            raise StopIteration
        return message

    def values(self, *, follow: bool = False, timeout: float | None = None) -> Iterator[Any]:
        """Iterate over the values only: the fastest way to read them one by one, because nothing
        else is copied. A value is what `message.value` is: bytes, or what `deserializer` returns
        for them, or None for a tombstone.

        - `follow`: False, the default: up to the present end, as iterating over the reader. True:
          wait at the end, as `follow()` does.
        - `timeout`: as in `follow()`.

        The position is always right after the last value that was returned: `commit()`, and any
        other read, continue there.

        Raises DeserializationError at a value that the deserializer cannot read. That value counts
        as read: the next call continues after it, and so does a reader after a `commit()`.

        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b"a", b"b", b"c"])
        >>> reader = topic.reader()
        >>> next(reader.values()), reader.position
        (b'a', 1)
        >>> list(reader.values()), reader.position
        ([b'b', b'c'], 3)

        >>> reader = topic.reader(deserializer=int)
        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b"4", b"5"])
        >>> found = []
        >>> while reader.has_message_available():
        ...     try:
        ...         found.extend(reader.values())
        ...     except xl.DeserializationError as error:
        ...         found.append((error.offset, error.raw))
        >>> found
        [(0, b'a'), (1, b'b'), (2, b'c'), 4, 5]
        """
        check_following(follow, timeout)
        return self._follow_values(timeout) if follow else self._values()

    def _values(self) -> Iterator[Any]:
        self._check()
        values = self.cursor.values(self.cursor.end())
        return values if self.membership is None else _checked(self, values, self._is_part)

    def _follow_values(self, timeout: float | None) -> Iterator[Any]:
        while True:
            yield from self._values()
            try:
                message = self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield self._value_of(message)

    def _value_of(self, message: Message) -> Any:
        """The value of the message that was read last. If this call is interrupted, the next read
        returns that message again; not if its value cannot be deserialised."""
        try:
            return message.value
        except DeserializationError:
            raise
        except BaseException:
            self.cursor.move_to(message.offset)
            raise

    def follow(self, timeout: float | None = None) -> Iterator[Message]:
        """Iterate over the messages, and wait for new ones at the end. It stops if no message comes
        for `timeout` seconds (None, the default: never), or if the topic is terminated.

        >>> [message.value for message in reader.follow(timeout=0)]
        []
        """
        while True:
            try:
                message = self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield message

    # ---- groups --------------------------------------------------------------------------

    def _join(self, membership: GroupCursor, committed: Mapping[int, int] | None = None) -> None:
        """Read for a group from now on, from its committed position if it has one. `committed`: the
        positions on all topics, for a part of a GroupReader."""
        self.membership = self.cursor.membership = membership
        self._is_part = committed is not None
        try:
            if committed is None:
                committed = membership.positions([self.topic_id])
            if self.topic_id in committed:
                self.cursor.seek(committed[self.topic_id], inclusive=True, resumes=True)
                self.continues_at = self.cursor.position
        except BaseException:
            membership.end()
            raise

    @property
    def group(self) -> str | None:
        """The name of its group; None without a group."""
        return None if self.membership is None else self.membership.group

    @property
    def generation(self) -> int | None:
        """The generation of its claim on (group, topic); None without a group."""
        return None if self.membership is None else self.membership.generations[self.topic]

    def commit(self) -> None:
        """Store the position as that of the group, durably: the group's next reader begins there
        (rule F6).

        After a transaction that failed before `commit_cursor`, it stores the position behind what
        was read, although the next read would go back: so a message that fails each time can be
        passed over (rule G11). Read on instead, and the messages come again.

        Raises ReaderFencedError if a later reader of the group was opened, and ValueError
        without a group, or if the position is part of an open transaction.

        >>> with topic.reader(group="billing") as reader:
        ...     reader.commit(); reader.position
        0
        """
        self.cursor.check()
        if self.membership is None:
            raise ValueError(
                f"this reader of topic {self.topic!r} has no cursor; open it with group="
            )
        self._commit_alone()

    # ---- close ---------------------------------------------------------------------------

    def _check_enters(self) -> None:
        if self._closed:
            self.cursor.check()

    def close(self) -> None:
        """End reading; a thread that waits in `read_next` gets EngineClosedError."""
        self._closed = True
        if self.cursor.close() and self.membership is not None:
            self.membership.end()

    def __repr__(self) -> str:
        return f"<Reader of topic {self.topic!r} at offset {self.position}>"


def _take_entries(cursor: Cursor, max_bytes: int) -> list[tuple[_core.Entry, int]]:
    parts: list[tuple[_core.Entry, int]] = []
    size = 0
    while size < max_bytes:
        room = max_bytes - size if parts else sys.maxsize
        try:
            part = cursor.take_entry(room)
        except ExclusiveLogError:
            if not parts:
                raise
            break  # return what was read before the error; the next call raises it again
        if part is None:
            break
        parts.append(part)
        size += part[0].nbytes
    return parts


def _checked(reader: Reader, found: Iterator[T], is_part: bool) -> Iterator[T]:
    for one in found:
        reader.cursor.check()  # `one` was read ahead: the reader may have been fenced meanwhile
        yield one
        if not is_part:
            reader._note_use()  # the next one is an earlier one if a transaction has aborted


class GroupReader(GroupMember, Closing):
    """Reads several topics for a group. `engine.reader` returns it; for one thread at a time.

    It returns (topic's name, message): in order within each topic, and one from each topic in
    turn. One claim covers all topics: the group's next reader on any of them fences this one on all
    of them, and it raises ReaderFencedError from then on. `commit` writes the positions on all
    topics in one transaction; `transaction.commit_cursor(reader)` makes them part of another one.

    >>> for name in "ab":
    ...     _ = engine.topic(name).producer().send_many([b"1", b"2"])
    >>> reader = engine.reader(["a", "b"], group="billing")
    >>> [(name, message.value) for name, message in reader.read_batch(3)]
    [('a', b'1'), ('b', b'1'), ('a', b'2')]
    >>> reader.commit(); reader.positions
    {'a': 2, 'b': 1}
    """

    membership: GroupCursor

    def __init__(self, readers: Sequence[Reader], membership: GroupCursor) -> None:
        self.membership = membership
        self.readers = tuple(readers)  # one for each topic
        self._begin_alone()
        self._next = 0  # the index of the reader to read from next
        self._closed = False
        try:
            committed = membership.positions([reader.topic_id for reader in readers])
        except BaseException:
            membership.end()
            raise
        for reader in readers:
            reader._join(membership, committed)

    @property
    def _parts(self) -> Sequence[Reader]:
        return self.readers

    # ---- where ---------------------------------------------------------------------------

    @property
    def topics(self) -> list[str]:
        """The names of its topics."""
        return [reader.topic for reader in self.readers]

    @property
    def group(self) -> str:
        """The name of its group."""
        return self.membership.group

    @property
    def generations(self) -> dict[str, int]:
        """{topic: generation} of the reader's claim."""
        return dict(self.membership.generations)

    @property
    def positions(self) -> dict[str, int]:
        """{topic: the offset of the next message to read}."""
        at = self._next_positions()
        return {reader.topic: at[reader.topic_id] for reader in self.readers}

    def seek(self, start: Start, *, topic: str | None = None, inclusive: bool = True) -> None:
        """Continue at another message, as `Reader.seek`.

        - `topic`: the topic to do this on. None, the default: on all topics."""
        self._check()
        chosen = [reader for reader in self.readers if topic in (None, reader.topic)]
        if not chosen:
            raise TopicNotFoundError(f"topic={topic!r} is none of {', '.join(self.topics)}")
        for reader in chosen:
            reader.seek(start, inclusive=inclusive)
        if len(chosen) == len(self.readers):
            self._has_sought()

    def has_message_available(self) -> bool:
        """True if there is a durable message at or after the position on any topic."""
        self._check()
        return any(reader.has_message_available() for reader in self.readers)

    # ---- read ----------------------------------------------------------------------------

    def read_next(self, timeout: float | None = None) -> Found:
        """Return the name of a topic and its next message; wait if the reader is at the end of all
        topics.

        - `timeout`: seconds until WaitTimeoutError; 0: do not wait. None, the default: without
          limit.

        Raises TopicTerminatedError at the end of all topics if all of them are terminated.
        """
        check_timeout(timeout)
        deadline = None if timeout is None else _core.monotonic() + timeout
        while True:
            marks = self._marks()  # before reading: a later append ends the wait
            found = self._take()
            if found is not None:
                return found
            self._check_goes_on()
            left = None if deadline is None else deadline - _core.monotonic()
            if left is not None and left <= 0:
                return self._take_last(timeout)
            seconds = 3600.0 if left is None else left
            self.membership.wait([reader.cursor for reader in self.readers], marks, seconds)

    def _marks(self) -> list[int]:
        """A number for each topic that changes with every append to it."""
        return [reader.cursor.mark() for reader in self.readers]

    def _check_goes_on(self) -> None:
        if all(reader.cursor.is_over() for reader in self.readers):
            raise TopicTerminatedError(
                f"topics {', '.join(self.topics)} are all terminated, and read to their ends"
            )

    def _take_last(self, timeout: float | None) -> Found:
        """The next message up to now, after `timeout` seconds have passed."""
        found = self._take_now()
        if found is None:
            self._check_goes_on()
            raise self._nothing_came(timeout)
        return found

    def _read_known(self) -> Found | None:
        """The next message, unless other machines must be asked for it."""
        found = self._take()
        if found is None:
            self._check_goes_on()
        return found

    def _nothing_came(self, timeout: float | None) -> WaitTimeoutError:
        """The error of `read_next` after `timeout` seconds."""
        return WaitTimeoutError(
            f"none of topics {', '.join(self.topics)} had a message within {timeout} s"
        )

    def _take(self) -> Found | None:
        self._check()
        for _ in self.readers:
            reader = self.readers[self._next]
            self._next = (self._next + 1) % len(self.readers)
            message = reader.cursor.take_one()
            if message is not None:
                return reader.topic, message
        return None

    def _take_now(self) -> Found | None:
        """The next message of all that there are by now."""
        found = self._take()
        if found is None and self.readers[0].cursor.is_remote:
            self._look_up()
            found = self._take()
        return found

    def _look_up(self) -> None:
        for reader in self.readers:
            reader.cursor.look_up()

    def read_batch(self, max_messages: int) -> list[Found]:
        """Return up to `max_messages` next messages, without waiting; an empty list at the end. As
        `Reader.read_batch`, it deserialises nothing."""
        found = self._read_known_batch(max_messages)
        if not found and self.readers[0].cursor.is_remote:
            self._look_up()
            found = self._read_known_batch(max_messages)
        return found

    def _read_known_batch(self, max_messages: int) -> list[Found]:
        max_messages = check_count(max_messages, "max_messages")
        self._check()  # it may go back
        before, first = [reader.position for reader in self.readers], self._next
        found: list[Found] = []
        try:
            while len(found) < max_messages and (one := self._take()) is not None:
                found.append(one)
        except BaseException as error:
            if found and isinstance(error, ExclusiveLogError):
                return found  # the next call raises it again
            # The caller gets none of them, so they must be read again.
            for reader, position in zip(self.readers, before, strict=True):
                reader.cursor.move_to(position)
            self._next = first
            raise
        return found

    def __next__(self) -> Found:
        """The next message of any topic, with the topic's name; StopIteration if there is none
        now."""
        found = self._take_now()
        if found is None:
            raise StopIteration
        return found

    def __iter__(self) -> Iterator[Found]:
        """Iterate over the messages up to the present ends of all topics."""
        self._check()
        return self._walk([(reader.topic, iter(reader)) for reader in self.readers])

    def _walk(self, walks: list[tuple[str, Iterator[T]]]) -> Iterator[tuple[str, T]]:
        while walks:
            left = []
            for name, found in walks:
                self._note_use()
                for one in found:
                    yield name, one
                    left.append((name, found))
                    break
            walks = left

    def values(
        self, *, follow: bool = False, timeout: float | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Iterate over the values only, each with the name of its topic; see `Reader.values`.

        >>> for name in "ab":
        ...     _ = engine.topic(name).producer().send_many([b"1", b"2"])
        >>> list(engine.reader(["a", "b"], group="billing").values())
        [('a', b'1'), ('b', b'1'), ('a', b'2'), ('b', b'2')]
        """
        check_following(follow, timeout)
        return self._follow_values(timeout) if follow else self._values()

    def _values(self) -> Iterator[tuple[str, Any]]:
        self._check()
        return self._walk([(reader.topic, reader.values()) for reader in self.readers])

    def _follow_values(self, timeout: float | None) -> Iterator[tuple[str, Any]]:
        while True:
            yield from self._values()
            try:
                found = self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield self._value_of(found)

    def _value_of(self, found: Found) -> tuple[str, Any]:
        """The value of the message that was read last, with its topic; as `Reader._value_of`."""
        name, message = found
        reader = next(reader for reader in self.readers if reader.topic == name)
        return name, reader._value_of(message)

    def follow(self, timeout: float | None = None) -> Iterator[Found]:
        """Iterate over the messages, and wait for new ones at the ends of all topics. It stops if
        no message comes for `timeout` seconds (None, the default: never), or if all topics are
        terminated."""
        while True:
            try:
                found = self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield found

    # ---- commit and close ----------------------------------------------------------------

    def commit(self) -> None:
        """Store the positions on all topics as those of the group, durably, in one transaction.

        Raises ReaderFencedError if a later reader of the group was opened on any of the topics,
        and ValueError if the positions are part of an open transaction.
        """
        self._check_usable()
        self._commit_alone()

    def _check(self) -> None:
        self._note_use()
        self._check_usable()

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineClosedError(
                f"this reader of group {self.group!r} is closed; open a new one"
            )
        self.readers[0].cursor.check()

    def _check_enters(self) -> None:
        if self._closed:
            self._check_usable()

    def close(self) -> None:
        """End reading; a thread that waits in `read_next` gets EngineClosedError."""
        self._closed = True
        for reader in self.readers:
            reader.close()

    def __repr__(self) -> str:
        return f"<GroupReader of group {self.group!r} at {self.positions}>"
