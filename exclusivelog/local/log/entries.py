"""Appending to topics and reading them, entry by entry."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from exclusivelog import _core
from exclusivelog._core import Outcome
from exclusivelog.errors import (
    DuplicateSequenceError,
    EngineClosedError,
    ExclusiveLogError,
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    LedgerIOError,
    called_reentrantly,
)
from exclusivelog.local.records import SLACK_MS, Session, first_marked_since, is_ahead, wall_ms
from exclusivelog.local.storage.compression import naming
from exclusivelog.local.storage.segments import OpenEntries, is_reference
from exclusivelog.local.storage.tables import Store, Tables, check_may_write
from exclusivelog.types import Report

READ_BYTES = 1 << 20
APPENDED_AT_ONCE = 1 << 15  # appenders: what they have is held in memory once more meanwhile
LOOKED_UP_AT_ONCE = 1000  # sessions: no process appends while the journal learns of them
LOOK_UP_SECONDS = 30.0  # more than a thousand changes of ownership by other processes


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


def append_together(ledger: Store, appenders: Sequence[_core.Appender]) -> Sequence[_core.Appender]:
    """Append what these appenders have, durably, all in one call of the compiled core, and tell
    each its outcome. Returns those that have something left: too large for the journal, say, or
    refused; `append` knows what becomes of it.
    """
    left: list[_core.Appender] = []
    for start in range(0, len(appenders), APPENDED_AT_ONCE):
        left += _append_together(ledger, list(appenders[start : start + APPENDED_AT_ONCE]))
    return left


def _append_together(ledger: Store, appenders: list[_core.Appender]) -> list[_core.Appender]:
    renewed = False
    while appenders:
        try:
            appenders, outcome = _core.append_together(appenders)
            if outcome == Outcome.FULL:
                ledger.checkpoint()
            elif outcome == Outcome.STALE and not renewed:
                look_up_all(ledger, appenders)
                renewed = True
            else:
                break
        except Exception:  # the next append of each meets the same, and tells it
            break
    return appenders


def append(ledger: Store, works: Sequence[Work]) -> None:
    """Append all batches, durably, and tell each its outcome (rule B9).

    Small ones go into the journal, large ones straight into the tables. The refusal of one
    producer's messages does not fail the others'.
    """
    small: list[Work] = []
    large: list[Work] = []
    for work in works:
        fits = all(batch.small for batch in work.batches)
        (small if fits else large).append(work)
    try:
        if small:
            _append_to_journal(ledger, small)
    finally:
        if large:
            append_to_tables(ledger, large)


def _append_to_journal(ledger: Store, works: Sequence[Work]) -> None:
    """One flush for all of them."""
    errors: list[ExclusiveLogError | None] = [None for _ in works]
    try:
        for index, work in enumerate(works):
            try:
                _place(ledger, work)
            except ExclusiveLogError as error:
                errors[index] = error
    finally:
        # After any exception: what is in the journal by now is flushed and acknowledged.
        for work, refused in zip(works, errors, strict=True):
            _flush_and_settle(ledger, work, refused)


def _place(ledger: Store, work: Work) -> None:
    for batch in work.batches:
        if batch.placed:
            continue  # by a commit that was interrupted before its flush
        outcome = work.appender.place(batch)
        while outcome in REPAIRABLE:
            repair(ledger, work.appender, outcome)
            outcome = work.appender.place(batch)
        if outcome != Outcome.PLACED:
            raise refusal(ledger, work.appender, outcome, batch.base_sequence)


def _flush_and_settle(ledger: Store, work: Work, error: ExclusiveLogError | None) -> None:
    appender = work.appender
    placed = [batch for batch in work.batches if batch.placed]
    if len(placed) < len(work.batches) and error is None:
        error = LedgerError(f"{ledger.path}: the append was interrupted; nothing was written")
    if placed and appender.flushes and ledger.journal is not None:
        last = placed[-1]
        outcome = ledger.journal.flush_to(last.end, last.generation_placed)
        if outcome != Outcome.PLACED:
            placed, error = [], refusal(ledger, appender, outcome)
    if placed:
        appender.announce()
    passing = (DuplicateSequenceError, LedgerError)
    durable = error.last_sequence_id if isinstance(error, DuplicateSequenceError) else None
    final = error is not None and not isinstance(error, passing)
    appender.settle([(batch, batch.base_offset) for batch in placed], error, final, durable)


# ---- what keeps an append out of the journal ---------------------------------------------

REPAIRABLE = (Outcome.STALE, Outcome.FULL)


def repair(ledger: Store, appender: _core.Appender, outcome: int) -> None:
    """Make a second try worthwhile; raises if it cannot be."""
    if outcome == Outcome.STALE:
        look_up(ledger, appender)
    else:
        ledger.checkpoint()


def look_up(ledger: Store, appender: _core.Appender) -> None:
    """Find out whether this session may still write, and what its next message follows."""
    session, journal = appender.session, ledger.journal
    assert journal is not None
    ledger.check()
    end = time.monotonic() + LOOK_UP_SECONDS
    while time.monotonic() < end:
        version = journal.version  # before the tables: what changes later is seen by it
        if journal.unsettled:
            ledger.settle()
            continue
        with ledger.read() as tables:
            row = tables.topics.get(session.topic)
            check_may_write(tables, row, session)
            sequence, _ = tables.producers.get(session.topic, session.name)
            generation, applied = tables.journal.generation, tables.journal.applied
        if journal.learn(
            session.topic, row.next_offset, row.last_publish_time, applied, generation, version
        ):
            appender.looked_up(version, sequence)
            return
    raise LedgerError(
        f"{ledger.path}: tables and shared memory have disagreed for {LOOK_UP_SECONDS:.0f} s; was "
        "a file restored while a process had the ledger open? Close every engine, and end the "
        "children of processes that had it open; then open it again"
    )


def look_up_all(ledger: Store, appenders: Sequence[_core.Appender]) -> None:
    """What `look_up` does, for many sessions at a time. One that may not write any more is left as
    it is, as are all where the tables change meanwhile: the next append of each finds out."""
    stale = [appender for appender in appenders if appender.stale]
    for start in range(0, len(stale), LOOKED_UP_AT_ONCE):
        _look_up_some(ledger, stale[start : start + LOOKED_UP_AT_ONCE])


def _look_up_some(ledger: Store, appenders: Sequence[_core.Appender]) -> None:
    journal = ledger.journal
    assert journal is not None
    found: list[tuple[int, int, int]] = []
    valid: list[tuple[_core.Appender, int]] = []
    version = journal.version  # before the tables: what changes later is seen by it
    with ledger.read() as tables:
        for appender in appenders:
            session = appender.session
            with contextlib.suppress(ExclusiveLogError):
                row = tables.topics.get(session.topic)
                check_may_write(tables, row, session)
                sequence, _ = tables.producers.get(session.topic, session.name)
                found.append((session.topic, row.next_offset, row.last_publish_time))
                valid.append((appender, sequence))
        generation, applied = tables.journal.generation, tables.journal.applied
    if journal.learn_all(found, applied, generation, version):
        for appender, sequence in valid:
            appender.looked_up(version, sequence)


def refusal(
    ledger: Store, appender: _core.Appender, outcome: int, sequence: int | None = None
) -> ExclusiveLogError:
    """The error for an append that did not succeed."""
    if outcome == Outcome.DUPLICATE:
        return duplicate(ledger, appender, sequence)
    if outcome == Outcome.NO_ROOM:
        return LedgerFullError(
            f"{ledger.path}/journal: no space left on the disk; nothing was written. Free some"
        )
    if outcome == Outcome.HELD_HERE:
        return called_reentrantly(ledger.path)
    try:
        ledger.check()
    except LedgerIOError as error:
        return error
    if outcome == Outcome.CLOSED:
        return EngineClosedError(
            f"the ledger {ledger.path} was closed during the call; open it again"
        )
    return LedgerIOError(
        f"{ledger.path}/journal was recovered by another process while this waited for its "
        "flush. Send again with the same sequence_id: a message that is in the log is refused"
    )


def duplicate(
    ledger: Store, appender: _core.Appender, sequence: int | None
) -> DuplicateSequenceError:
    """This producer has sent that sequence id already."""
    last = appender.last_sequence
    with ledger.read() as tables:
        topic = tables.topics.get(appender.session.topic).name
    return DuplicateSequenceError(
        f"topic {topic!r}: producer {appender.session.name!r} has sent sequence id {last} "
        f"already; {sequence} was not appended again",
        sequence_id=last if sequence is None else sequence,
        last_sequence_id=last,
    )


# ---- large batches -----------------------------------------------------------------------


def append_to_tables(ledger: Store, works: Sequence[Work]) -> None:
    """Append all batches in one transaction of the tables."""
    placed: list[Placed] = [[] for _ in works]
    refused: list[ExclusiveLogError | None] = [None for _ in works]
    try:
        with ledger.write_checkpointed() as tables:
            for index, work in enumerate(works):
                try:
                    placed[index] = append_one(tables, work)
                except LedgerError:
                    raise  # something may be half written
                except ExclusiveLogError as error:
                    refused[index] = error
    except ExclusiveLogError as error:
        if isinstance(error, LedgerFullError) and len(works) > 1:
            _append_each(ledger, works)  # one large batch must not fail the small ones
            return
        for work in works:
            work.appender.settle([], error)
        raise
    except BaseException as error:
        # It may have come after the commit: the tables say what each outcome is.
        for work, batches in zip(works, placed, strict=True):
            _settle_by_the_tables(ledger, work, batches, error)
        raise
    for work, batches, error_of_one in zip(works, placed, refused, strict=True):
        durable = None
        if isinstance(error_of_one, DuplicateSequenceError):
            durable = error_of_one.last_sequence_id
        final = error_of_one is not None and durable is None
        work.appender.settle(batches, error_of_one, final, durable)


def _append_each(ledger: Store, works: Sequence[Work]) -> None:
    for work in works:
        with contextlib.suppress(ExclusiveLogError):  # its receipts tell
            append_to_tables(ledger, [work])


def _settle_by_the_tables(ledger: Store, work: Work, placed: Placed, cause: BaseException) -> None:
    """After an interrupted transaction: what is in the ledger is acknowledged, the rest failed."""
    written: Placed = []
    durable = None
    error: LedgerError = LedgerError(
        f"{ledger.path}: the commit was interrupted by {cause!r}; nothing was written"
    )
    try:
        with ledger.read() as tables:
            written = [place for place in placed if _is_written(tables, work.session, *place)]
            durable, _ = tables.producers.get(work.session.topic, work.session.name)
    except Exception as failure:
        error = LedgerIOError(
            f"{ledger.path}: the commit was interrupted by {cause!r}, and it is unknown "
            f"whether it completed: {failure}"
        )
    work.appender.settle(written, error, False, durable)


def _is_written(tables: Tables, session: Session, batch: _core.Batch, base_offset: int) -> bool:
    for _, data in tables.entries.walk(session.topic, base_offset):
        entry = _core.Entry(tables.entries.load(data))
        if entry.session != session.id or entry.base_offset > base_offset:
            return False
        message = entry.message(base_offset - entry.base_offset)
        return bool(message.sequence_id == batch.base_sequence)
    return False


def _was_written(tables: Tables, session: Session, batch: _core.Batch) -> bool:
    """By a commit that was cut short before it could say so."""
    return batch.base_offset >= 0 and _is_written(tables, session, batch, batch.base_offset)


def append_one(tables: Tables, work: Work) -> Placed:
    """Append one producer's batches within a transaction, if it may write (rules B2, G2)."""
    session = work.session
    row = tables.topics.get(session.topic)
    check_may_write(tables, row, session)
    sequence, _ = tables.producers.get(session.topic, session.name)
    publish_time = max(row.last_publish_time, wall_ms())
    placed: Placed = []
    messages, size = tables.appended or (0, 0)
    for batch in work.batches:
        if batch.base_sequence <= sequence and _was_written(tables, session, batch):
            placed.append((batch, batch.base_offset))
            continue
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
            tables.entries.put(session.topic, last, tables.compression.compressed(row, entry))
            messages, size = messages + last + 1 - row.next_offset, size + len(entry)
            row.next_offset = last + 1
        sequence = batch.last_sequence
        placed.append((batch, base_offset))
    if placed:
        tables.appended = messages, size
        row.last_publish_time = publish_time
        tables.topics.put(row)
        tables.producers.put(session.topic, session.name, sequence, session.id)
        tables.announce.add(session.topic)
    return placed


# ---- reading -----------------------------------------------------------------------------


def read_entries(
    tables: Tables, topic: _core.TopicRow, offset: int, loads: _core.Deserializer | None,
    most_bytes: int = READ_BYTES, since: int = 0, packed: bool = False,
) -> list[_core.Entry]:  # fmt: skip
    """Entries from the one that holds `offset` on, about `most_bytes` of them. `since` and `packed`
    as in `Tables.entries.walk`.

    Raises LedgerCorruptedError for a damaged entry, once it is the first (rule G9).
    """
    found: list[_core.Entry] = []
    size = 0
    expected = None
    for last, data in tables.entries.walk(topic.id, offset, since, packed):
        try:
            entry = _core.Entry(tables.entries.load(data), loads)
            check_place(entry, topic.id, last, expected)
            if entry.base_offset > offset and not found:
                raise _missing(topic, offset, entry.base_offset)
        except ValueError as error:
            if found:
                break
            raise _damaged(tables, topic, offset, last, error) from None
        expected = last + 1
        found.append(entry)
        size += entry.nbytes
        if size >= most_bytes:
            break
    if not found and offset < topic.next_offset:
        raise _missing(topic, offset, topic.next_offset)
    return found


def view_entries(
    tables: Tables, topic: int, position: int, horizon: int,
    loads: _core.Deserializer | None, most_bytes: int,
) -> list[_core.Entry]:  # fmt: skip
    """Entries of the topic's view from `position` on, of their messages those that stand before
    `horizon`. It may be a later view than the one that the reader began with: what it lacks
    has been replaced by messages behind that horizon.

    Raises LedgerCorruptedError for a damaged entry, once it is the first (rule G9).
    """
    found: list[_core.Entry] = []
    size = 0
    view = tables.views.view(topic)
    for last, data in () if view is None else tables.entries.walk(view.id, position):
        try:
            entry = _core.Entry(tables.entries.load(data), loads)
            check_place(entry, view.id if view else 0, last, None)
            entry.check()
        except ValueError as error:
            if found:
                break
            name = tables.topics.get(topic).name
            raise LedgerCorruptedError(
                f"topic {name!r}: an entry of its compacted view, up to offset {last}, is "
                f"damaged: {error}; compact() builds it again from what is not trimmed, and "
                f"seek({last + 1}) steps over it",
                topic=name, offsets=range(position, last + 1),
            ) from None  # fmt: skip
        if entry.base_offset >= horizon:
            break
        if entry.end > horizon:
            count = sum(entry.message(i).offset < horizon for i in range(entry.count))
            entry = _core.Entry(_core.keep(entry, list(range(count)), entry.topic)[1], loads)
            if entry.end <= position:  # a later view's: what stood in between has been replaced
                break
        found.append(entry)
        size += entry.nbytes
        if size >= most_bytes:
            break
    return found


def read_entry(
    tables: Tables, topic: _core.TopicRow, offset: int, loads: _core.Deserializer | None,
    known: OpenEntries,
) -> _core.Entry | None:  # fmt: skip
    """The entry of the tables that holds `offset`, from those that are `known` if it is there. None
    if it is not in the tables, or damaged: `read_entries` then finds it or names the damage."""
    place = tables.entries.at(topic.id, offset)
    if place is None:
        return None
    last, data = place
    entry = known.get(last, data)
    try:
        if entry is None:
            loaded, newest = tables.entries.load(data), known.newest
            if newest is not None and is_reference(data):
                begin = tables.entries.begin(topic, last)
                if begin <= offset:
                    _core.prefetch_like(newest, loaded, offset - begin, last + 1 - begin)
            entry = _core.Entry(loaded, loads)
        check_place(entry, topic.id, last, None)
    except ValueError:
        return None
    if entry.base_offset > offset:
        return None
    known.put(last, data, entry)
    return entry


def check_place(entry: _core.Entry, topic: int, last: int, expected: int | None) -> None:
    """ValueError unless the entry is of this topic and follows the one before it."""
    if entry.topic != topic:
        raise ValueError("it is another topic's")
    if entry.end != last + 1:
        raise ValueError("it is at an offset that is not its own")
    if expected is not None and entry.base_offset != expected:
        raise ValueError(f"offsets {expected} to {entry.base_offset - 1} are missing before it")


def _damaged(
    tables: Tables, topic: _core.TopicRow, offset: int, last: int, error: ValueError
) -> LedgerCorruptedError:
    """What stands at `offset` is damaged: an entry that is to end with `last`, unless that is
    damaged itself. Of where it begins and ends its neighbours are the better witnesses."""
    before = tables.entries.last_offset_before(topic.id, offset)
    first = topic.first_offset if before is None else before + 1
    stop = _next_sound(tables, topic, offset)
    if offset <= last < stop:
        stop = last + 1
    return LedgerCorruptedError(
        f"topic {topic.name!r}: the entry with offsets {first} to {stop - 1} is damaged: {error}; "
        f"seek({stop}) steps over it",
        topic=topic.name, offsets=range(first, stop),
    )  # fmt: skip


def damaged_block(
    name: str, offsets: range, damage: str | None = None, where: str = ""
) -> LedgerCorruptedError:
    """The error for what a damaged block costs of the topic of this name: these offsets. `damage`
    and `where`: what is wrong with a compressed one, and its file."""
    why = "its checksum does not hold" if damage is None else f"{damage}, in {where}"
    return LedgerCorruptedError(
        f"topic {name!r}: the block with offsets {offsets.start} to {offsets.stop - 1} is damaged: "
        f"{why}; seek({offsets.stop}) steps over it",
        topic=name, offsets=offsets,
    )  # fmt: skip


def _damaged_blocks(entry: _core.Entry, index: int = 0) -> Iterator[tuple[range, str | None]]:
    """(offsets, what is wrong with the block) of the runs of messages that damaged blocks of the
    entry cost, from the message at `index` on."""
    while index < entry.count:
        start, index = entry.damage_from(index)
        if start < index:
            yield range(entry.offset_at(start), entry.offset_at(index)), entry.damage


def _next_sound(tables: Tables, topic: _core.TopicRow, offset: int) -> int:
    for last, data in tables.entries.walk(topic.id, offset):
        with contextlib.suppress(ValueError):
            entry = _core.Entry(tables.entries.load(data))
            check_place(entry, topic.id, last, None)
            if entry.base_offset > offset:
                return int(entry.base_offset)
    return max(offset + 1, int(tables.latest(topic.id).next_offset))


def _missing(topic: _core.TopicRow, start: int, stop: int) -> LedgerCorruptedError:
    return LedgerCorruptedError(
        f"topic {topic.name!r}: offsets {start} to {stop - 1} are missing; seek({stop}) steps "
        "over them",
        topic=topic.name, offsets=range(start, stop),
    )  # fmt: skip


def offset_at_time(tables: Tables, topic: _core.TopicRow, time_ms: int) -> int:
    """The first offset published at or after `time_ms`; the end if there is none.

    Goes by effective times (see records.py). A `time_ms` ahead of the clock can only have been
    taken from a publish time, and is compared with those alone.
    """
    now = wall_ms()
    found = _first_published(tables, topic, time_ms)
    if is_ahead(time_ms, now) or not is_ahead(topic.last_publish_time, now):
        return found
    doubted = _first_published(tables, topic, now + SLACK_MS + 1)
    if found < doubted:
        return found
    floor = _published(tables, topic, doubted - 1) if doubted > topic.first_offset else 0
    return max(doubted, first_marked_since(tables.topics.marks(topic.id), time_ms, floor, now))


def _first_published(tables: Tables, topic: _core.TopicRow, time_ms: int) -> int:
    """By publish times alone. They never go backwards within a topic (rule G4), so that halving
    finds it."""
    low, high = topic.first_offset, topic.next_offset
    while low < high:
        middle = (low + high) // 2
        entry = read_entries(tables, topic, middle, None, most_bytes=1)[0]
        if entry.last_publish_time < time_ms:
            low = entry.end
        elif entry.publish_time < time_ms:
            return max(low, _first_within(tables, topic, entry, time_ms))  # it may begin before
        else:
            high = entry.base_offset
    return low


def _first_within(tables: Tables, topic: _core.TopicRow, entry: _core.Entry, time_ms: int) -> int:
    try:
        return int(entry.first_published_at(time_ms))
    except ValueError:
        whole = range(entry.base_offset, entry.end)
        gone, damage = next(_damaged_blocks(entry), (whole, entry.damage))
        where = tables.entries.where(topic.id, gone.start)
        raise damaged_block(topic.name, gone, damage, where) from None


def _published(tables: Tables, topic: _core.TopicRow, offset: int) -> int:
    entry = read_entries(tables, topic, offset, None, most_bytes=1)[0]
    try:
        return int(entry.message(offset - entry.base_offset).publish_time)
    except ValueError:
        gone, damage = next(_damaged_blocks(entry, offset - entry.base_offset))
        where = tables.entries.where(topic.id, gone.start)
        raise damaged_block(topic.name, gone, damage, where) from None


def verify_topic(tables: Tables, topic: _core.TopicRow) -> tuple[int, int, list[str]]:
    """(entries, messages, problems) of one topic: every checksum, density, epochs, times."""
    entries = messages = epoch = published = 0
    problems: list[str] = []
    expected = topic.first_offset
    for last, data in tables.entries.walk(topic.id, topic.first_offset):
        entries += 1
        try:
            entry = _core.Entry(tables.entries.load(data))
            check_place(entry, topic.id, last, None)
            if entry.base_offset > expected:
                problems.append(str(_missing(topic, expected, entry.base_offset)))
            # The first one may begin with messages that were trimmed.
            elif entry.base_offset < expected and entries > 1:
                raise ValueError(f"it begins at offset {entry.base_offset}, in its predecessor")
            if entry.epoch < epoch or entry.epoch > topic.epoch:
                raise ValueError(f"its epoch {entry.epoch} follows epoch {epoch}")
            if entry.publish_time < published:
                raise ValueError("it was published before its predecessor")
            epoch, published = entry.epoch, entry.last_publish_time
            start = max(entry.base_offset, expected)
            gone = [
                (range(max(offsets.start, start), offsets.stop), damage)
                for offsets, damage in _damaged_blocks(entry)
                if offsets.stop > start  # else it was trimmed
            ]
            problems += [
                str(damaged_block(topic.name, offsets, damage, tables.large.where(data)))
                for offsets, damage in gone
            ]
            messages += entry.end - start - sum(len(offsets) for offsets, _ in gone)
            expected = last + 1
        except ValueError as error:
            found = _damaged(tables, topic, expected, last, error)
            problems.append(str(found))
            expected = found.offsets.stop if found.offsets else last + 1
    if expected != topic.next_offset:
        problems.append(str(_missing(topic, expected, topic.next_offset)))
    return entries, messages, problems + list(_verify_more(tables, topic))


def _verify_more(tables: Tables, topic: _core.TopicRow) -> Iterator[str]:
    try:
        tables.compression.get(topic)
    except LedgerCorruptedError as error:
        yield str(error)
    yield from _verify_views(tables, topic)


def _verify_views(tables: Tables, topic: _core.TopicRow) -> Iterator[str]:
    views = {
        "compacted view": tables.views.view(topic.id),
        "snapshot": tables.views.snapshot(topic.id),
    }
    for name, view in views.items():
        for last, data in () if view is None else tables.entries.walk(view.id, 0):
            try:
                entry = _core.Entry(tables.entries.load(data))
                check_place(entry, view.id if view else 0, last, None)
                entry.check()
            except ValueError as error:
                yield f"topic {topic.name!r}: the entry {last} of its {name} is damaged: {error}"


def verify(ledger: Store, unflushed: bool = False) -> Report:
    """Read and check every topic, each at one moment. The library's own are checked, and not
    counted."""
    topics, entries, messages, problems = 0, 0, 0, list[str]()
    with ledger.read() as tables:
        there = tables.topics.all()
    for name, topic in there:
        with naming(name):
            result = _verify_one(ledger, topic, unflushed)
            if result is not None and result[2]:
                result = _verify_one(ledger, topic, unflushed)  # it may have been deleted meanwhile
        if result is None:
            continue
        problems += result[2]
        if not name.startswith("__"):
            topics, entries, messages = topics + 1, entries + result[0], messages + result[1]
    return Report(topics, entries, messages, tuple(problems))


def _verify_one(ledger: Store, topic: int, unflushed: bool) -> tuple[int, int, list[str]] | None:
    def check(tables: Tables) -> tuple[int, int, list[str]] | None:
        row = tables.latest(topic)
        return None if row.flags & _core.DELETED else verify_topic(tables, row)

    try:
        return ledger.inspect(check, unflushed)
    except LedgerCorruptedError as error:
        return 0, 0, [str(error)]
