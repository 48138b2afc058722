"""Readers: walking a topic, and waiting at its end."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from exclusivelog import _core
from exclusivelog.arrow import COLUMNS, import_pyarrow, record_batch
from exclusivelog.compaction import view_entries
from exclusivelog.encoding import to_ms
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    OffsetTrimmedError,
    TopicNotFoundError,
    TopicTerminatedError,
    WaitTimeoutError,
)
from exclusivelog.faults import met_twice
from exclusivelog.lockfile import READER_LOOK_UP_SECONDS
from exclusivelog.log import READ_BYTES, check_place, offset_at_time, read_entries
from exclusivelog.serde import pick_loads
from exclusivelog.tables import Tables
from exclusivelog.waits import check_timeout

if TYPE_CHECKING:
    import pyarrow as pa

    from exclusivelog.groups import Membership
    from exclusivelog.ledger import Ledger
    from exclusivelog.runtime import Runtime

Found = TypeVar("Found")

# A reader that had to wait no longer than this looks hard before it sleeps the next time: for
# what comes less often, that would cost the writer more than it gains.
BUSY_SECONDS = 80e-6
LEAST_AHEAD = 64 << 10  # bytes that are read at once by who goes on
# One more entry of at most 1 GiB, and the offsets of an Arrow array still are 32 bits.
MOST_ARROW_BYTES = 512 << 20


class Reader(_core.Cursor):
    """Reads one topic. Made by `topic.reader`; for one thread at a time.

    A reader never counts as a producer (rule A1), and sees nothing that is not durable
    (rule G6). Damage raises LedgerCorruptedError and leaves the position where it is:
    `seek(error.offsets.stop)` steps over it (rule G9).

    >>> reader = topic.reader()
    >>> reader.has_message_available()
    False
    >>> with topic.producer() as producer:
    ...     _ = producer.send(b"hello")
    >>> reader.read_next(timeout=1).value
    b'hello'
    """

    def __init__(
        self, engine: Runtime, topic: int, name: str, start: str | int | dt.datetime, *,
        inclusive: bool, deserializer: Any, read_compacted: bool = False, trimmed: str = "error",
    ) -> None:  # fmt: skip
        if trimmed not in ("error", "earliest"):
            raise ValueError(f"trimmed={trimmed!r}: it takes 'error' or 'earliest'")
        self._trimmed = trimmed
        self._compacted = read_compacted
        self._horizon = 0  # before it, the compacted view is read
        self.membership: Membership | None = None
        self.topic_id = topic
        self.topic = name
        self._engine = engine
        self._loads = pick_loads(deserializer)
        self._closed = False
        self._busy_until = 0.0
        self._scanned = 0, 0  # (generation, position): how far the journal lies behind us
        self._read_to = 0
        self._known_end = 0  # the topic had messages up to there when it was last looked at
        self._version = 0  # of the journal when the tables were looked into,
        self._looked = 0.0  # and when that was
        self._ahead = 1
        self._word = engine.ledger.lockfile.topic_word(topic)
        self.seek(start, inclusive=inclusive)
        engine.register_reader(self)

    # ---- where ---------------------------------------------------------------------------

    def seek(self, start: str | int | dt.datetime, *, inclusive: bool = True) -> None:
        """Go on from "earliest", "latest", an offset, or a datetime (naive: UTC). Where publish
        times are ahead of the clock, a datetime up to now is compared with the times that the
        ledger has noted for them instead.

        `inclusive=False` goes on behind the message at that offset or time.

        >>> reader.seek("latest"); reader.position
        0
        """
        self._check()
        self.move_to(self._look(lambda tables: self._find(tables, start, inclusive)))

    def _look(self, look: Callable[[Tables], Found]) -> Found:
        return met_twice(lambda: self._engine.look(look))

    def _find(self, tables: Tables, start: str | int | dt.datetime, inclusive: bool) -> int:
        row = self._existing(tables.latest(self.topic_id))
        if self._compacted:
            view = tables.view(self.topic_id)
            self._horizon = 0 if view is None else view.horizon
        if start == "earliest":
            return 0 if self._horizon else row.first_offset
        if start == "latest":
            return row.next_offset
        if isinstance(start, dt.datetime):
            offset = offset_at_time(tables, row, to_ms(start) + (0 if inclusive else 1))
            # What the topic has from then on may have begun in its view.
            return 0 if self._horizon and offset == row.first_offset else offset
        if isinstance(start, int) and not isinstance(start, bool) and 0 <= start < 2**63:
            return start if inclusive else start + 1
        raise ValueError(
            f"start={start!r}: it takes 'earliest', 'latest', an offset from 0 on or a datetime"
        )

    def _existing(self, row: _core.TopicRow) -> _core.TopicRow:
        if row.flags & _core.DELETED:
            raise TopicNotFoundError(f"topic {row.name!r} was deleted")
        return row

    def _since(self, tables: Tables) -> int:
        # What lies before it in the journal is behind us.
        generation, position = self._scanned
        return position if generation == tables.generation else 0

    def has_message_available(self) -> bool:
        """True if there is a message at or behind the position. Exact: no message in flight
        counts, none that is there is missed (rule G5).

        >>> reader.has_message_available()
        False
        """
        self._check()
        return self._engine.look(self._has_more)

    def _has_more(self, tables: Tables) -> bool:
        row = self._existing(tables.latest(self.topic_id, self._since(tables)))
        end = self._known_end = max(row.next_offset, self._read_to)
        horizon = self._horizon_over(tables, row)
        if end > max(self.position, horizon, row.first_offset):
            return True
        return self.position < horizon and bool(
            view_entries(tables, self.topic_id, self.position, horizon, None, 1)
        )

    def _horizon_over(self, tables: Tables, row: _core.TopicRow) -> int:
        """Before it, the compacted view is read: what had been compacted when the reader began
        and, for trimmed="earliest", what has been trimmed since. Not more, for the topic still
        has messages there that a later view lacks (rule G7)."""
        overtaken = max(self.position, self._horizon) < row.first_offset
        if not (self._compacted and overtaken and self._trimmed == "earliest"):
            return self._horizon
        view = tables.view(self.topic_id)
        return self._horizon if view is None else min(view.horizon, row.first_offset)

    def _end(self) -> int:
        def look(tables: Tables) -> int:
            row = tables.latest(self.topic_id, self._since(tables))
            return self._existing(row).next_offset

        self._known_end = max(self._engine.look(look), self._read_to)
        return self._known_end

    # ---- read ----------------------------------------------------------------------------

    def refill(self) -> list[_core.Entry]:
        """The next entries of the ledger; what the iteration calls when it has run dry."""
        self._check()
        if self.position < self._horizon:
            view = self._look(self._read_view)
            if view:
                return view
            self.move_to(self._horizon)
        found = self._read_on_in_journal()
        # Between a commit and the news of it the tables may have what the journal hides yet.
        if found or (found is not None and self.position >= self._known_end):
            return found
        journal = self._engine.ledger.journal
        version = 0 if journal is None else journal.version
        found = self._look(self._read_on)
        self._version, self._looked = version, time.monotonic()
        return found

    def _read_on_in_journal(self) -> list[_core.Entry] | None:
        """What follows in the journal. Who is at the end of it already, and knows that nothing has
        gone straight into the tables since, need not look there. None: look there."""
        ledger, (generation, since) = self._engine.ledger, self._scanned
        journal = ledger.journal
        if journal is None or not generation or not journal.ready or journal.failed:
            return None
        if journal.version != self._version:
            return None
        visible = journal.tail if self._engine.unflushed else journal.synced
        found: list[_core.Entry] = []
        expected = self.position
        if since >= visible:
            # A process that died between its commit and the news of it leaves no trace here.
            recently = time.monotonic() - self._looked < READER_LOOK_UP_SECONDS / 2
            return found if recently else None
        try:
            frames = journal.collect(
                self.topic_id, self.position, since, visible, generation, self._ahead
            )
            for last, data, position in frames:
                entry = _core.Entry(data, self._loads)
                check_place(entry, self.topic_id, last, expected)
                found.append(entry)
                expected = self._read_to = last + 1
                self._scanned = generation, position
        except (ValueError, _core.Outrun):
            return found or None  # the tables have it, or name the damage
        if not found:
            self._scanned = generation, visible
        return found

    def _read_view(self, tables: Tables) -> list[_core.Entry]:
        self._existing(tables.topic(self.topic_id))
        found = view_entries(
            tables, self.topic_id, self.position, self._horizon, self._loads, self._ahead
        )
        self._ahead = min(READ_BYTES, max(LEAST_AHEAD, 8 * self._ahead))
        return found

    def _read_on(self, tables: Tables) -> list[_core.Entry]:
        row = self._existing(tables.topic(self.topic_id))
        if self.position < row.first_offset and self._trimmed == "earliest":
            self._horizon = self._horizon_over(tables, row)
            if self.position < self._horizon and (found := self._read_view(tables)):
                return found
            self.move_to(row.first_offset)
        if self.position < row.first_offset:
            raise OffsetTrimmedError(
                f"topic {self.topic!r} begins at offset {row.first_offset}; {self.position} "
                'was trimmed. seek("earliest") goes on with what there is'
            )
        since = self._since(tables)
        found = read_entries(
            tables, row, self.position, self._loads, most_bytes=self._ahead, since=since
        )
        self._ahead = min(READ_BYTES, max(LEAST_AHEAD, 8 * self._ahead))
        if found:
            self._read_to = found[-1].end
        if tables.scanned and max(self.position, self._read_to) >= row.next_offset:
            self._scanned = tables.generation, tables.scanned
        return found

    def move_to(self, position: int) -> None:
        """Go on at this offset; forgets what was read ahead."""
        self._scanned, self._read_to = (0, 0), 0
        self._ahead = 1  # one entry: whoever seeks may want one message
        super().move_to(position)

    def read_next(self, timeout: float | None = None) -> _core.Message:
        """The next message; waits for it at the end of the topic.

        `timeout` in seconds (None: for ever; 0: not at all), then WaitTimeoutError. Waiting
        costs no CPU: the writer wakes the reader, also from another process. At the end of a
        topic that was sealed: TopicTerminatedError.

        >>> reader.read_next(timeout=0)
        Traceback (most recent call last):
            ...
        exclusivelog.errors.WaitTimeoutError: topic 'orders' had no message at offset 0 within 0 s
        """
        check_timeout(timeout)
        self._check()
        message = self.take_ready()
        if message is not None:
            return message
        lockfile = self._engine.ledger.lockfile
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            seen = lockfile.words.load(self._word)  # before looking: what comes after wakes
            message = self.take_one()
            if message is not None:
                return message
            self._check()
            now = time.monotonic()
            left = None if deadline is None else deadline - now
            if self.is_over():
                raise TopicTerminatedError(
                    f"topic {self.topic!r} is sealed, and ends at offset {self.position}"
                )
            if left is not None and left <= 0:
                raise self.nothing_came(timeout)
            lockfile.await_topic(self._word, seen, left, spin=now < self._busy_until)
            woken = time.monotonic()
            if woken - now < BUSY_SECONDS:
                self._busy_until = woken + BUSY_SECONDS

    def nothing_came(self, timeout: float | None) -> WaitTimeoutError:
        """What `read_next` raises after so many seconds."""
        return WaitTimeoutError(
            f"topic {self.topic!r} had no message at offset {self.position} within {timeout} s"
        )

    @property
    def word(self) -> int:
        """Where the topic's counter of commits lies in the lock file."""
        return self._word

    def mark(self) -> int:
        """Changes with whatever is appended, for `await_mark`."""
        return self._engine.ledger.lockfile.words.load(self._word)

    def await_mark(self, seen: int, seconds: float) -> None:
        """Sleep until `mark()` is no longer `seen`, or so many seconds have passed. Takes
        nothing, and may be called beside everything else."""
        self._engine.check_open()
        self._engine.ledger.lockfile.await_topic(self._word, seen, seconds, spin=False)

    def is_over(self) -> bool:
        """Is this the end of a terminated topic?"""
        with self._engine.ledger.read() as tables:
            row = self._existing(tables.topic(self.topic_id))
            return bool(row.flags & _core.TERMINATED) and self.position >= row.next_offset

    def read_batch(self, max_messages: int) -> list[_core.Message]:
        """Up to `max_messages` next messages, without waiting; an empty list at the end.

        >>> reader.read_batch(100)
        []
        """
        if not isinstance(max_messages, int) or max_messages < 1:
            raise ValueError(f"max_messages={max_messages!r}: it takes a whole number from 1 on")
        self._check()
        with self._taken_by_somebody():
            return self.take_many(max_messages)

    @contextlib.contextmanager
    def _taken_by_somebody(self) -> Iterator[None]:
        # What was taken by a call that fails, or is interrupted, nobody got.
        start = self.position
        try:
            yield
        except BaseException:
            self.move_to(start)
            raise

    def read_arrow(
        self, max_bytes: int = 1 << 20, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch | None:
        """The next messages as a pyarrow RecordBatch, without waiting; None at the end.

        As many whole entries as `max_bytes` hold (at most 512 MiB), and at least one. Large
        entries are wrapped where they lie, with no copy. `columns`: any of offset, epoch,
        key, value, publish_time, event_time, producer, sequence_id, properties (default:
        all). Needs the extra `[arrow]`.
        """
        self._check()
        chosen = COLUMNS if columns is None else tuple(columns)
        for name in chosen:
            if name not in COLUMNS:
                raise ValueError(f"columns: {name!r} is none of {', '.join(COLUMNS)}")
        if not isinstance(max_bytes, int) or max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes!r}: it takes a whole number from 1 on")
        import_pyarrow()  # before anything is taken
        max_bytes = min(max_bytes, MOST_ARROW_BYTES)
        with self._taken_by_somebody():
            parts = self._take_entries(max_bytes)
            return record_batch(parts, chosen) if parts else None

    def _take_entries(self, max_bytes: int) -> list[tuple[_core.Entry, int]]:
        parts: list[tuple[_core.Entry, int]] = []
        size = 0
        while size < max_bytes:
            try:
                part = self.take_entry(max_bytes - size) if parts else self.take_entry()
            except ExclusiveLogError:
                if not parts:
                    raise
                break  # what was taken must not be lost; the next call meets it again
            if part is None:
                break
            parts.append(part)
            size += part[0].nbytes
        return parts

    def __iter__(self) -> Iterator[_core.Message]:
        """The messages up to the end as it is now."""
        self._check()
        messages = self.scan(self._end())
        return messages if self.membership is None else self._checked(messages)

    def _checked(self, messages: Iterator[_core.Message]) -> Iterator[_core.Message]:
        for message in messages:
            self._check()  # it may have been read ahead
            yield message

    def follow(self, timeout: float | None = None) -> Iterator[_core.Message]:
        """The messages, for ever: at the end it waits. Ends when nothing has come for
        `timeout` seconds (None: never), or nothing can come any more.

        >>> [message.value for message in reader.follow(timeout=0)]
        []
        """
        while True:
            try:
                message = self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield message

    @property
    def ledger(self) -> Ledger:
        """Where it reads."""
        return self._engine.ledger

    # ---- groups --------------------------------------------------------------------------

    def join(self, membership: Membership) -> None:
        """Read for a group from now on: from where it was, if it has committed before."""
        self.membership = membership
        try:
            cursor = membership.cursor(self.topic_id)
            if cursor is not None:
                self.seek(cursor)
        except BaseException:
            membership.end()
            raise

    @property
    def group(self) -> str | None:
        """The group that it is the reader of."""
        return None if self.membership is None else self.membership.group

    @property
    def generation(self) -> int | None:
        """Of its claim on (group, topic); None without a group."""
        return None if self.membership is None else self.membership.generations[self.topic]

    def offsets_to_commit(self) -> dict[int, int]:
        """{topic id: the offset that a commit now lets the group go on at}."""
        return {self.topic_id: self.position}

    def commit(self) -> None:
        """Let the group go on at the position, durably: the next reader of it begins there
        (rule F6).

        Raises ReaderFencedError if a later reader of the group has come, and ValueError
        without a group.

        >>> with topic.reader(group="billing") as reader:
        ...     reader.commit(); reader.position
        0
        """
        self._check()
        if self.membership is None:
            raise ValueError(
                f"this reader of topic {self.topic!r} has no cursor; open it with group="
            )
        self.membership.commit(self.offsets_to_commit())

    # ---- close ---------------------------------------------------------------------------

    def _check(self) -> None:
        self._engine.check_open()
        if self._closed:
            raise EngineClosedError(f"this reader of topic {self.topic!r} is closed")
        if self.membership is not None:
            self.membership.check()

    def close(self) -> None:
        """End reading; a thread that waits in `read_next` gets EngineClosedError."""
        if not self._closed:
            self._closed = True
            self.move_to(self.position)
            if not (self._engine.closed or self._engine.forked):
                self._engine.ledger.lockfile.announce(self.topic_id)
                if self.membership is not None:
                    self.membership.end()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Reader of topic {self.topic!r} at offset {self.position}>"
