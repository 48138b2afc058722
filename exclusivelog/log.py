"""Appending to topics and reading them, entry by entry."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from exclusivelog import _core
from exclusivelog.access import Session
from exclusivelog.errors import (
    DuplicateSequenceError,
    ExclusiveLogError,
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    LedgerIOError,
    TopicNotFoundError,
    TopicTerminatedError,
)
from exclusivelog.ledger import Ledger
from exclusivelog.sessions import fenced
from exclusivelog.tables import Tables

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """What one producer wants committed."""

    appender: _core.Appender
    batches: Sequence[_core.Batch]

    @property
    def session(self) -> Session:
        """The producer's session, which must still be valid."""
        session: Session = self.appender.session
        return session


Placed = list[tuple[_core.Batch, int]]


def append(ledger: Ledger, works: Sequence[Work]) -> None:
    """Append all batches in one durable transaction, and tell each its outcome (rule B9).

    A producer that is refused does not keep the others' messages out.
    """
    placed: list[Placed] = [[] for _ in works]
    refused: list[ExclusiveLogError | None] = [None for _ in works]
    try:
        with ledger.write() as tables:
            for index, work in enumerate(works):
                try:
                    placed[index] = _append_one(tables, work)
                except LedgerError:
                    raise  # something may be half written
                except ExclusiveLogError as error:
                    refused[index] = error
    except ExclusiveLogError as error:
        if isinstance(error, LedgerFullError) and len(works) > 1:
            _append_each(ledger, works)  # one large batch must not keep the small ones out
            return
        for work in works:
            work.appender.settle([], error)
        raise
    except BaseException as error:
        # It may have struck behind the commit: nobody may be left without a true answer.
        for work, batches in zip(works, placed, strict=True):
            _settle_by_the_ledger(ledger, work, batches, error)
        raise
    for work, batches, refusal in zip(works, placed, refused, strict=True):
        final = refusal is not None and not isinstance(refusal, DuplicateSequenceError)
        durable = refusal.last_sequence_id if isinstance(refusal, DuplicateSequenceError) else None
        work.appender.settle(batches, refusal, final, durable)


def _append_each(ledger: Ledger, works: Sequence[Work]) -> None:
    for work in works:
        with contextlib.suppress(ExclusiveLogError):  # its receipts tell
            append(ledger, [work])


def _settle_by_the_ledger(ledger: Ledger, work: Work, placed: Placed, cause: BaseException) -> None:
    """After an interrupted transaction: what is in the ledger is acknowledged, the rest failed."""
    written: Placed = []
    durable = None
    error: LedgerError = LedgerError(
        f"{ledger.path}: the commit was interrupted by {cause!r}; nothing was written"
    )
    try:
        with ledger.read() as tables:
            written = [place for place in placed if _is_written(tables, work.session, *place)]
            durable, _ = tables.producer(work.session.topic, work.session.name)
    except Exception as failure:
        error = LedgerIOError(
            f"{ledger.path}: the commit was interrupted by {cause!r}, and the ledger cannot say "
            f"how far it came: {failure}"
        )
    work.appender.settle(written, error, False, durable)


def _is_written(tables: Tables, session: Session, batch: _core.Batch, base_offset: int) -> bool:
    for _, data in tables.entries(session.topic, base_offset):
        entry = _core.Entry(tables.load(data))
        return (entry.session, entry.base_offset, entry.base_sequence) == (
            session.id, base_offset, batch.base_sequence,
        )  # fmt: skip
    return False


def _append_one(tables: Tables, work: Work) -> Placed:
    session = work.session
    row = tables.topic(session.topic)
    check_may_write(tables, row, session)
    sequence, _ = tables.producer(session.topic, session.name)
    publish_time = max(row.last_publish_time, time.time_ns() // 1_000_000)
    placed: Placed = []
    for batch in work.batches:
        if batch.base_sequence <= sequence:
            raise DuplicateSequenceError(
                f"topic {row.name!r}: producer {session.name!r} has sequence id {sequence} in the "
                f"log; {batch.base_sequence} was not appended again",
                sequence_id=batch.base_sequence, last_sequence_id=sequence,
            )  # fmt: skip
        base_offset = row.next_offset
        for last, entry in batch.stamp(
            session.topic, base_offset, session.epoch, session.id, publish_time
        ):
            tables.put_entry(session.topic, last, entry)
            row.next_offset = last + 1
        sequence = batch.last_sequence
        placed.append((batch, base_offset))
    if placed:
        row.last_publish_time = publish_time
        tables.put_topic(row)
        tables.put_producer(session.topic, session.name, sequence, session.id)
        tables.announce.add(session.topic)
    return placed


def check_may_write(tables: Tables, row: _core.TopicRow, session: Session) -> None:
    """The fencing check: session and epoch, against the row that the append will change."""
    if row.flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {row.name!r} was deleted")
    if row.flags & _core.TERMINATED:
        raise TopicTerminatedError(f"topic {row.name!r} is sealed at offset {row.next_offset}")
    if session.exclusive:
        valid = row.admits(session.id, session.epoch)
    else:
        valid = tables.holds(session.topic, session.id)
    if not valid:
        raise fenced(tables, row, session)


# ---- reading -----------------------------------------------------------------------------


def read_entries(
    tables: Tables, topic: _core.TopicRow, offset: int, loads: Callable[[bytes], object] | None,
    most_bytes: int = READ_BYTES,
) -> list[_core.Entry]:  # fmt: skip
    """Entries from the one that holds `offset` on, about `most_bytes` of them.

    Raises LedgerCorruptedError for a damaged entry, once it is the first (rule G9).
    """
    found: list[_core.Entry] = []
    size = 0
    expected = None
    for last, data in tables.entries(topic.id, offset):
        try:
            entry = _core.Entry(tables.load(data), loads)
            _check_place(entry, topic, last, expected)
            if entry.base_offset > offset and not found:
                raise _missing(topic, offset, entry.base_offset)
        except ValueError as error:
            if found:
                break
            raise _damaged(tables, topic, last, error) from None
        expected = last + 1
        found.append(entry)
        size += entry.nbytes
        if size >= most_bytes:
            break
    if not found and offset < topic.next_offset:
        raise _missing(topic, offset, topic.next_offset)
    return found


def _check_place(
    entry: _core.Entry, topic: _core.TopicRow, last: int, expected: int | None
) -> None:
    if entry.topic != topic.id:
        raise ValueError("it is another topic's")
    if entry.base_offset + entry.count != last + 1:
        raise ValueError("it stands at an offset that is not its own")
    if expected is not None and entry.base_offset != expected:
        raise ValueError(f"offsets {expected} to {entry.base_offset - 1} are missing before it")


def _damaged(
    tables: Tables, topic: _core.TopicRow, last: int, error: ValueError
) -> LedgerCorruptedError:
    # The entry's own idea of where it begins cannot be trusted: its neighbour's end can.
    before = tables.last_offset_before(topic.id, last)
    first = topic.first_offset if before is None else before + 1
    return LedgerCorruptedError(
        f"topic {topic.name!r}: the entry with offsets {first} to {last} is damaged: {error}; "
        f"seek({last + 1}) steps over it",
        topic=topic.name, offsets=range(first, last + 1),
    )  # fmt: skip


def _missing(topic: _core.TopicRow, start: int, stop: int) -> LedgerCorruptedError:
    return LedgerCorruptedError(
        f"topic {topic.name!r}: offsets {start} to {stop - 1} are missing; seek({stop}) steps "
        "over them",
        topic=topic.name, offsets=range(start, stop),
    )  # fmt: skip


def offset_at_time(tables: Tables, topic: _core.TopicRow, time_ms: int) -> int:
    """The first offset published at or after `time_ms`; the end if there is none.

    Publish times never go backwards within a topic (rule G4), so that halving finds it.
    """
    low, high = topic.first_offset, topic.next_offset
    while low < high:
        middle = (low + high) // 2
        entry = read_entries(tables, topic, middle, None, most_bytes=1)[0]
        if entry.publish_time < time_ms:
            low = entry.base_offset + entry.count
        else:
            high = entry.base_offset
    return low


def verify_topic(tables: Tables, topic: _core.TopicRow) -> tuple[int, int, list[str]]:
    """(entries, messages, problems) of one topic: every checksum, density, epochs, times."""
    entries = messages = epoch = published = 0
    problems: list[str] = []
    expected = topic.first_offset
    for last, data in tables.entries(topic.id, topic.first_offset):
        entries += 1
        try:
            entry = _core.Entry(tables.load(data))
            _check_place(entry, topic, last, expected)
            if entry.epoch < epoch or entry.epoch > topic.epoch:
                raise ValueError(f"its epoch {entry.epoch} follows epoch {epoch}")
            if entry.publish_time < published:
                raise ValueError("it was published before its predecessor")
            epoch, published = entry.epoch, entry.publish_time
            messages += entry.count
        except ValueError as error:
            problems.append(str(_damaged(tables, topic, last, error)))
        expected = last + 1
    if expected != topic.next_offset:
        problems.append(str(_missing(topic, expected, topic.next_offset)))
    return entries, messages, problems


def verify(ledger: Ledger) -> Iterable[tuple[int, int, list[str]]]:
    """`verify_topic` for every topic, each at one moment."""
    with ledger.read() as tables:
        topics = tables.topics()
    for _, topic in topics:
        result = _verify_one(ledger, topic)
        if result is not None and result[2]:
            result = _verify_one(ledger, topic)  # it may have been deleted meanwhile
        if result is not None:
            yield result


def _verify_one(ledger: Ledger, topic: int) -> tuple[int, int, list[str]] | None:
    with ledger.read() as tables:
        try:
            row = tables.topic(topic)
            return None if row.flags & _core.DELETED else verify_topic(tables, row)
        except LedgerCorruptedError as error:
            return 0, 0, [str(error)]
