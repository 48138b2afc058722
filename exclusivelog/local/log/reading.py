"""Reading: entries, cursors, and the verification of every entry.

A message lies in up to three places, and a cursor reads them in this order:

1. the topic's compacted view, for offsets below the cursor's horizon (rule G7);
2. the end of the journal, once the cursor has read the tables up to there: no LMDB transaction;
3. the tables with the journal's frames on top, as one snapshot.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from exclusivelog import _core
from exclusivelog.arguments import offset_of
from exclusivelog.errors import (
    LedgerCorruptedError,
    LedgerError,
    OffsetTrimmedError,
    TopicNotFoundError,
)
from exclusivelog.local.faults import retry_damaged
from exclusivelog.local.records import OF_TOPICS, U64, View
from exclusivelog.local.storage.compression import naming
from exclusivelog.local.storage.segments import OpenEntries, is_reference
from exclusivelog.local.storage.tables import CURSORS, Tables, damaged_rows, existing
from exclusivelog.local.time_marks import SLACK_MS, first_marked_since, is_ahead, wall_ms
from exclusivelog.messages import to_ms
from exclusivelog.refusals import reader_closed, trimmed
from exclusivelog.types import Report
from exclusivelog.waits import READER_LOOK_UP_SECONDS

if TYPE_CHECKING:
    from exclusivelog.backend import GroupCursor
    from exclusivelog.local.runtime import Runtime
    from exclusivelog.local.storage.ledger import Ledger

Found = TypeVar("Found")

READ_BYTES = 1 << 20
# The next wait spins first only if the last one was at most this long. For messages that come less
# often, spinning would cost the writer more than the reader gains.
BUSY_SECONDS = 80e-6
MIN_READ_AHEAD = 64 << 10  # bytes, from the second read at a position on

# ---- entries -----------------------------------------------------------------------------


def read_entries(
    tables: Tables,
    topic: _core.TopicRow,
    offset: int,
    loads: _core.Deserializer | None,
    most_bytes: int = READ_BYTES,
    since: int = 0,
    packed: bool = False,
) -> list[_core.Entry]:
    """Entries from the one that holds `offset` on, about `most_bytes` of them. `since` and `packed`
    as in `Tables.entries.walk`.

    Raises LedgerCorruptedError for a damaged entry, once it is the first (rule G9).
    """
    found: list[_core.Entry] = []
    size = 0
    expected = None
    for last, data in tables.entries.walk(topic.id, offset, since, packed, topic.next_offset):
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
    tables: Tables,
    topic: int,
    position: int,
    horizon: int,
    loads: _core.Deserializer | None,
    most_bytes: int,
) -> list[_core.Entry]:
    """Entries of the topic's view from `position` on, with the messages before `horizon`. It may be
    a later view than the one that the reader began with. Messages that this one lacks were replaced
    by messages behind that horizon.

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
                topic=name,
                offsets=range(position, last + 1),
            ) from None
        if entry.base_offset >= horizon:
            break
        if entry.end > horizon:
            count = sum(entry.message(i).offset < horizon for i in range(entry.count))
            entry = _core.Entry(_core.keep(entry, list(range(count)), entry.topic)[1], loads)
            if entry.end <= position:  # a later view's: the messages in between were replaced
                break
        found.append(entry)
        size += entry.nbytes
        if size >= most_bytes:
            break
    return found


def read_entry(
    tables: Tables,
    topic: _core.TopicRow,
    offset: int,
    loads: _core.Deserializer | None,
    known: OpenEntries,
) -> _core.Entry | None:
    """The entry of the tables that holds `offset`, taken from `known` if possible. None if it is
    not in the tables, or damaged: then `read_entries` finds it or reports the damage."""
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
    """The error for a damaged entry at `offset`. Its key says that it ends with `last`, but that
    may be damaged, too. So the error names the offsets between its sound neighbours."""
    before = tables.entries.last_offset_before(topic.id, offset)
    first = topic.first_offset if before is None else before + 1
    stop = _next_sound(tables, topic, offset)
    if offset <= last < stop:
        stop = last + 1
    return LedgerCorruptedError(
        f"topic {topic.name!r}: the entry with offsets {first} to {stop - 1} is damaged: {error}; "
        f"seek({stop}) steps over it",
        topic=topic.name,
        offsets=range(first, stop),
    )


def damaged_block(
    name: str, offsets: range, damage: str | None = None, where: str = ""
) -> LedgerCorruptedError:
    """The error for a damaged block of this topic, which holds the messages at `offsets`. `damage`
    and `where`: what is wrong with a compressed block, and its file."""
    why = "its checksum does not hold" if damage is None else f"{damage}, in {where}"
    return LedgerCorruptedError(
        f"topic {name!r}: the block with offsets {offsets.start} to {offsets.stop - 1} is damaged: "
        f"{why}; seek({offsets.stop}) steps over it",
        topic=name,
        offsets=offsets,
    )


def _damaged_blocks(entry: _core.Entry, index: int = 0) -> Iterator[tuple[range, str | None]]:
    """(offsets, damage) for each damaged block of the entry, from the message at `index` on."""
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
        topic=topic.name,
        offsets=range(start, stop),
    )


def offset_at_time(tables: Tables, topic: _core.TopicRow, time_ms: int) -> int:
    """The first offset published at or after `time_ms`; the end if there is none.

    Uses effective times (see time_marks.py). A `time_ms` ahead of the clock is compared with
    publish times alone, because it must be one.
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
    """The same by publish times alone: a binary search, as they never decrease in a topic (rule
    G4)."""
    low, high = topic.first_offset, topic.next_offset
    while low < high:
        middle = (low + high) // 2
        entry = read_entries(tables, topic, middle, None, most_bytes=1)[0]
        if entry.last_publish_time < time_ms:
            low = entry.end
        elif entry.publish_time < time_ms:
            # The entry may begin before.
            return max(low, _first_within(tables, topic, entry, time_ms))
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
    """(entries, messages, problems) of one topic. Checks checksums, gaps, epochs and times."""
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
            # The first entry may begin with messages that were trimmed.
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
                if offsets.stop > start  # else all its messages were trimmed
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
        if view is not None:
            for problem in _verify_view(tables, view):
                yield f"topic {topic.name!r}: its {name} is damaged: {problem}"


def _verify_view(tables: Tables, view: View) -> Iterator[str]:
    found, count, sound = 0, tables.views.count(view), True
    for last, data in tables.entries.walk(view.id, 0):
        try:
            entry = _core.Entry(tables.entries.load(data))
            check_place(entry, view.id, last, None)
            entry.check()
            found += entry.count
        except ValueError as error:
            sound = False
            yield f"the entry {last}: {error}"
    if sound and count is not None and found != count:
        yield f"it has {found} messages of {count}"


def verify(ledger: Ledger, unflushed: bool = False) -> Report:
    """Read and check every topic, each in one snapshot. Internal topics are checked, but not
    counted."""
    topics, entries, messages, problems = 0, 0, 0, list[str]()
    with ledger.read() as tables:
        there = tables.topics.readable()
        damaged = tables.journal.damaged_at()
        rows = [*_damaged_rows(tables, there), *tables.topics.misnamed()]
        rows += tables.large.problems()
    if damaged is not None:
        problems.append(
            f"the journal is damaged at position {damaged}; the last messages of topics may be "
            "missing"
        )
    for name, topic in sorted(there.items()):
        with naming(name):
            result = _verify_one(ledger, topic, unflushed)
            if result is not None and result[2]:
                # The topic may have been deleted meanwhile.
                result = _verify_one(ledger, topic, unflushed)
        if result is None:
            continue
        problems += result[2]
        if not name.startswith("__"):
            topics, entries, messages = topics + 1, entries + result[0], messages + result[1]
    problems += ledger.inspect(_damaged_notes, unflushed)
    if not problems:  # messages that are missing say the same
        problems += ledger.inspect(_destroyed, unflushed)
    problems += ledger.inspect(_repeated, unflushed)
    problems += rows
    return Report(topics, entries, messages, tuple(problems))


def _damaged_rows(tables: Tables, there: Mapping[str, int]) -> Iterator[str]:
    names = {U64.pack(topic): name for name, topic in there.items()}
    for table, key, error in damaged_rows(tables.rows):
        name = key.decode(errors="backslashreplace") if table == "names" else None
        if table in (*OF_TOPICS, CURSORS):
            name = names.get(key[: U64.size])
        yield str(error) if name is None else f"topic {name!r}: {error}"


def _damaged_notes(tables: Tables) -> list[str]:
    damaged = tables.journal.damaged_notes
    if not damaged:
        return []
    return [
        f"{damaged} frames of the journal with positions of reader groups are damaged; a group may "
        "read again what it has read"
    ]


def _destroyed(tables: Tables) -> list[str]:
    """Frames of which nothing tells what they were."""
    destroyed = tables.journal.destroyed_bytes
    if not destroyed:
        return []
    return [
        f"{destroyed} bytes of the journal are destroyed; if they had positions of reader groups, "
        "a group may read again what it has read"
    ]


def _repeated(tables: Tables) -> list[str]:
    """Frames of the journal at offsets that other messages have; a checkpoint leaves them out."""
    journal, problems = tables.journal, list[str]()
    if journal.file is None or journal.visible <= journal.applied:
        return problems
    with journal.file.gather(journal.applied, journal.visible, journal.generation) as bundles:
        for bundle in bundles:
            row = tables.topics.intact(bundle.topic, "its frames in the journal are not checked")
            if row is None or row.flags & _core.DELETED:
                continue
            bundle.follow(row.next_offset)
            problems += [
                f"topic {row.name!r}: the journal has {count} messages at offset {offset}, which "
                "other messages have already"
                for offset, count in bundle.repeated
            ]
    return problems


def _verify_one(ledger: Ledger, topic: int, unflushed: bool) -> tuple[int, int, list[str]] | None:
    def check(tables: Tables) -> tuple[int, int, list[str]] | None:
        row = tables.latest(topic)
        return None if row.flags & _core.DELETED else verify_topic(tables, row)

    try:
        return ledger.inspect(check, unflushed)
    except LedgerCorruptedError as error:
        return 0, 0, [str(error)]
    except TopicNotFoundError:  # it was deleted and made again meanwhile, and then forgotten
        return None


# ---- cursors -----------------------------------------------------------------------------


Scanned = tuple[int, int]  # generation and position: earlier frames have been read


class JournalTail:
    """Reads one topic's frames at the end of the journal, behind what its cursor has read."""

    def __init__(self, host: Runtime, topic: int, loads: _core.Deserializer | None) -> None:
        self._host = host
        self._topic = topic
        self._loads = loads
        self._version = 0  # the topic's version when the tables were last read
        self._read_at = 0.0  # the time of that, in seconds of the monotonic clock
        self.forget()

    def forget(self) -> None:
        """Have the next read start from the tables, because the cursor's position has changed."""
        self._scanned: Scanned = 0, 0

    def since(self, tables: Tables) -> int:
        """The position in the journal up to which its frames have been read."""
        generation, position = self._scanned
        return position if generation == tables.journal.generation else 0

    @property
    def version(self) -> int:
        """A number that every change of the topic in the tables except a checkpoint changes."""
        journal = self._host.ledger.journal
        return 0 if journal is None else journal.version_of(self._topic)

    def note_read(self, version: int) -> None:
        """Record that the tables were read after the topic had this version."""
        self._version, self._read_at = version, _core.monotonic()

    @property
    def is_current(self) -> bool:
        """Has the topic been neither deleted nor trimmed since the tables were read? Both change
        the version. False after a while in any case: a process may have died between its commit and
        that change."""
        journal = self._host.ledger.journal
        return (
            journal is not None
            and journal.version_of(self._topic) == self._version
            and bool(journal.ready)
            and _core.monotonic() - self._read_at < READER_LOOK_UP_SECONDS / 2
        )

    def continue_behind(self, tables: Tables) -> None:
        """Record that everything in this snapshot has been read."""
        self._scanned = tables.journal.generation, tables.entries.scanned

    def continue_at(self, scanned: Scanned) -> None:
        """Record that the frames before this position have been read."""
        self._scanned = scanned

    def read(self, position: int, most_bytes: int) -> tuple[list[_core.Entry], Scanned] | None:
        """The entries from the offset `position` on, and where to continue; None: read the
        tables."""
        ledger, (generation, since) = self._host.ledger, self._scanned
        journal = ledger.journal
        if journal is None or not generation or not journal.ready or journal.failed:
            return None
        if journal.version_of(self._topic) != self._version:
            return None
        visible = journal.tail if self._host.unflushed else journal.synced
        if since >= visible:
            # The process that committed may have died before it changed the version.
            recently = _core.monotonic() - self._read_at < READER_LOOK_UP_SECONDS / 2
            return ([], self._scanned) if recently else None
        found: list[_core.Entry] = []
        try:
            for last, data, reached in journal.collect(
                self._topic, position, since, visible, generation, most_bytes, packed=True
            ):
                entry = _core.Entry(data, self._loads)
                check_place(entry, self._topic, last, position)
                found.append(entry)
                position, since = last + 1, reached
        except (ValueError, _core.JournalOverwritten):
            if not found:
                return None  # it is in the tables, or reading those reports the damage
        return found, (generation, since if found else visible)


class LogCursor(_core.Cursor):
    """A position in one topic; see `exclusivelog.backend.Cursor`."""

    is_remote = False

    def __init__(
        self,
        host: Runtime,
        topic: int,
        name: str,
        loads: _core.Deserializer | None,
        compacted: bool,
        skip_trimmed: bool,
    ) -> None:
        self.topic_id = topic
        self.topic = name
        self.closed = False
        self.membership: GroupCursor | None = None
        self._host = host
        self._check_open = host.check_open  # bound once: `check` runs for every message
        self._loads = loads
        self._compacted = compacted
        self._skip_trimmed = skip_trimmed
        self._horizon = 0  # lower offsets are read from the compacted view
        self._began = 0  # the position if nothing was read yet, from the earliest message on
        self._tail = JournalTail(host, topic, loads)
        self._open = host.ledger.segments.open_entries()
        self._first_offset = 0  # of the topic, when the tables were read
        self._found_at = -1  # the topic's version when `seek` last found it
        self._read_to = 0
        self._known_end = 0  # the topic's end when it was last read
        self._ahead = 1
        self._busy_until = 0.0
        self.word = host.ledger.lockfile.counters.place(topic)
        if host.ledger.journal is not None:
            host.ledger.journal.watch(self, topic)

    @property
    def ledger(self) -> Ledger:
        """The ledger that it reads."""
        return self._host.ledger

    def check(self) -> None:
        """EngineClosedError or ReaderFencedError unless it can be used."""
        self._check_open()
        if self.closed:
            raise reader_closed(self.topic)
        if self.membership is not None:
            self.membership.check()

    # ---- the position --------------------------------------------------------------------

    def seek(self, start: str | int | dt.datetime, inclusive: bool, resumes: bool = False) -> None:
        """Continue at "earliest", "latest", an offset from 0 on, or a datetime (naive: local)."""
        journal, topic = self._host.ledger.journal, self.topic_id
        version = -1 if journal is None or journal.failed else journal.version_of(topic)
        if version != self._found_at or version < 0 or type(start) is not int or self._compacted:
            position = self._inspect(lambda tables: self._find(tables, start, inclusive, resumes))
            self._found_at = version
        else:  # the topic still exists, and the next read finds the offset
            position = offset_of(start, inclusive)
        self.move_to(position)

    def _inspect(self, find: Callable[[Tables], Found]) -> Found:
        with naming(self.topic):
            return retry_damaged(lambda: self._host.inspect(find))

    def _around(self, damage: LedgerCorruptedError) -> list[_core.Entry]:
        """Handle damage to the tables themselves, which names no offsets. Returns the next entry if
        only entries that were read ahead are damaged; else raises an error for the offsets from the
        position to the next readable one."""
        start = self.position
        try:
            if found := self._one_entry(start):
                self._read_further(found[-1])
                return found
            end = self._inspect(lambda tables: tables.topics.existing(self.topic_id))
            stop = _next_readable(
                start,
                max(start + 1, end.next_offset),
                lambda offset: self._one_entry(offset) is not None,
            )
        except LedgerError:
            raise damage from None
        raise LedgerCorruptedError(
            f"topic {self.topic!r}: offsets {start} to {stop - 1} cannot be read: {damage}, or "
            f"step over them with seek({stop})",
            topic=self.topic,
            offsets=range(start, stop),
        ) from damage

    def _one_entry(self, offset: int) -> list[_core.Entry] | None:
        """The entry at this offset; [] if it is damaged, but its offsets are known; None if the
        tables are damaged there."""

        def read(tables: Tables) -> list[_core.Entry]:
            if offset < self._horizon:
                return view_entries(tables, self.topic_id, offset, self._horizon, self._loads, 1)
            row = tables.topics.existing(self.topic_id)
            return read_entries(tables, row, offset, self._loads, most_bytes=1)

        try:
            return self._host.inspect(read)
        except LedgerCorruptedError as error:
            return [] if error.offsets else None

    def _find(
        self, tables: Tables, start: str | int | dt.datetime, inclusive: bool, resumes: bool
    ) -> int:
        row = existing(tables.latest(self.topic_id))
        if self._compacted:
            view = tables.views.view(self.topic_id)
            self._horizon = 0 if view is None else view.horizon
            if resumes and isinstance(start, int) and 0 < start < _deleted_to(tables, row):
                self._horizon = 0  # the view lacks deletions since then; the topic may have them
        earliest = 0 if self._horizon else row.first_offset
        self._began = earliest if start == "earliest" else 0
        if start == "earliest":
            return earliest
        if start == "latest":
            return row.next_offset
        if isinstance(start, dt.datetime):
            offset = offset_at_time(tables, row, to_ms(start) + (0 if inclusive else 1))
            # Messages of the view may be older than the topic's first message since that time.
            return 0 if self._horizon and offset == row.first_offset else offset
        return offset_of(start, inclusive)

    def move_to(self, position: int) -> None:
        """Continue at this offset; drops what was read ahead."""
        self._tail.forget()
        self._read_to = 0
        self._ahead = 1  # one entry at first: perhaps only one message is read
        super().move_to(position)

    # ---- the end -------------------------------------------------------------------------

    def has_more(self) -> bool:
        """Is there a message at or behind the position (rule G5)?"""
        return self._host.inspect(self._has_more)

    def _has_more(self, tables: Tables) -> bool:
        row = existing(tables.latest(self.topic_id, self._tail.since(tables)))
        end = self._known_end = max(row.next_offset, self._read_to)
        horizon = self._horizon_over(tables, row)
        if end > max(self.position, horizon, row.first_offset):
            return True
        if self.position < horizon and view_entries(
            tables, self.topic_id, self.position, horizon, None, 1
        ):
            return True
        if not self._skip_trimmed:
            _check_kept(row, max(self.position, horizon))
        return False

    def _horizon_over(self, tables: Tables, row: _core.TopicRow) -> int:
        """The offset below which the compacted view is read: the view's horizon when the reader
        began or, if trimmed offsets are skipped, the topic's first offset. Never more: above it the
        topic has messages that a later view lacks (rule G7).

        Raises OffsetTrimmedError if a key may have been deleted by a message that was trimmed
        before the reader came to it (rule G12)."""
        known = max(self.position, self._horizon)  # it knows of the deletions before this offset
        if not (self._compacted and known < row.first_offset and self._skip_trimmed):
            return self._horizon
        if self.position not in (0, self._began) and _deleted_to(tables, row) > known:
            raise OffsetTrimmedError(
                f"topic {self.topic!r}: this compacted reader has missed deletions of keys. "
                f"Offsets {known} to {row.first_offset - 1} were trimmed before it came there; the "
                'compacted view shows no deletions. seek("earliest") reads the view from its '
                "beginning; first forget the keys that were read before"
            )
        view = tables.views.view(self.topic_id)
        return self._horizon if view is None else min(view.horizon, row.first_offset)

    def end(self) -> int:
        """The topic's current end."""

        def find(tables: Tables) -> int:
            row = tables.latest(self.topic_id, self._tail.since(tables))
            return existing(row).next_offset

        self._known_end = max(self._host.inspect(find), self._read_to)
        return self._known_end

    def look_up(self) -> None:
        """No effect: each read finds all that is there."""

    def is_over(self) -> bool:
        """Is this the end of a terminated topic?"""
        with self._host.ledger.read() as tables:
            # On a full map, a topic is terminated while its last messages are in the journal alone.
            row = existing(tables.latest(self.topic_id, self._tail.since(tables)))
            end = max(row.next_offset, self._read_to)
            return bool(row.flags & _core.TERMINATED) and self.position >= end

    def mark(self) -> int:
        """A number that changes with every append to the topic, for `wait`."""
        found: int = self._host.ledger.lockfile.atomics.load(self.word)
        return found

    def wait(self, seen: int, seconds: float | None) -> None:
        """Sleep until `mark()` is no longer `seen`, or about so many seconds have passed; spins
        first while messages come in quick succession."""
        began = _core.monotonic()
        spin = began < self._busy_until
        self._host.ledger.lockfile.counters.wait(self.word, seen, seconds, spin=spin)
        woken = _core.monotonic()
        if woken - began < BUSY_SECONDS:
            self._busy_until = woken + BUSY_SECONDS

    def await_mark(self, seen: int, seconds: float) -> None:
        """As `wait`, without spinning; any thread may call it while another one reads."""
        self._host.check_open()
        self._host.ledger.lockfile.counters.wait(self.word, seen, seconds, spin=False)

    # ---- entries -------------------------------------------------------------------------

    def refill(self) -> list[_core.Entry]:
        """The next entries; the compiled base class calls it when it has none left."""
        try:
            return self._refill()
        except LedgerCorruptedError as error:
            if error.offsets:
                raise
            return self._around(error)

    def recheck(self) -> None:
        """Discard what was read ahead if it has been trimmed meanwhile (rule G8); the next read
        raises the error, or continues with the earliest message. TopicNotFoundError if the topic
        was deleted. The compiled base class calls it."""
        self._check_open()
        with self._host.ledger.read() as tables:
            row = tables.topics.existing(self.topic_id)
        if self._horizon <= self.position < row.first_offset:
            self.move_to(self.position)

    def _refill(self) -> list[_core.Entry]:
        self.check()
        if self.position < self._read_to:  # an interrupt came before the cursor had the entries
            self.move_to(self.position)
        if self.position < self._horizon:
            view = self._inspect(self._read_view)
            if view:
                return view
            self.move_to(self._horizon)
        if self._ahead == 1 and self.position >= self._first_offset and self._tail.is_current:
            entry = self._open.holding(self.position)
            if entry is not None:
                self._host.ledger.check()
                self._read_further(entry)
                return [entry]
        tail = self._tail.read(self.position, self._ahead)
        if tail is not None:
            found, scanned = tail
            if found:
                self._read_to = found[-1].end  # first: see above
            self._tail.continue_at(scanned)
            # Between a commit and the change of the version, the tables may be ahead of the
            # journal.
            if found or self.position >= self._known_end:
                return found
        version = self._tail.version
        found = self._inspect(self._read_on)
        self._tail.note_read(version)
        return found

    def _read_view(self, tables: Tables) -> list[_core.Entry]:
        tables.topics.existing(self.topic_id)
        found = view_entries(
            tables, self.topic_id, self.position, self._horizon, self._loads, self._ahead
        )
        self._ahead = min(READ_BYTES, max(MIN_READ_AHEAD, 8 * self._ahead))
        return found

    def _read_on(self, tables: Tables) -> list[_core.Entry]:
        row = tables.topics.existing(self.topic_id)
        if self.position < row.first_offset and self._skip_trimmed:
            self._horizon = self._horizon_over(tables, row)
            if self.position < self._horizon and (found := self._read_view(tables)):
                return found
            self.move_to(row.first_offset)
        _check_kept(row, self.position)
        one = None
        if self._ahead == 1 and self.position < row.next_offset:
            one = read_entry(tables, row, self.position, self._loads, self._open)
        found = (
            [one]
            if one is not None
            else read_entries(
                tables,
                row,
                self.position,
                self._loads,
                most_bytes=self._ahead,
                since=self._tail.since(tables),
                packed=True,
            )
        )
        self._first_offset = row.first_offset
        self._read_further(found[-1] if found else None)
        if tables.entries.scanned and max(self.position, self._read_to) >= row.next_offset:
            self._tail.continue_behind(tables)
        return found

    def _read_further(self, last: _core.Entry | None) -> None:
        self._ahead = min(READ_BYTES, max(MIN_READ_AHEAD, 8 * self._ahead))
        if last is not None:
            self._read_to = last.end

    def refuse(self, start: int, stop: int, damage: str | None) -> None:
        """Raise the error for the messages in a damaged block; the compiled base class calls it."""
        where = ""
        if damage is not None:
            where = self._inspect(lambda tables: tables.entries.where(self.topic_id, start))
        raise damaged_block(self.topic, range(start, stop), damage, where)

    def close(self) -> bool:
        """Close the cursor, and wake a thread that waits. False if it was closed before, or its
        engine is closed."""
        if self.closed:
            return False
        self.closed = True
        self.move_to(self.position)
        self._open.clear()
        if self._host.closed or self._host.forked:
            return False
        self._host.ledger.lockfile.counters.announce(self.topic_id)
        return True


def _next_readable(start: int, end: int, is_readable: Callable[[int], bool]) -> int:
    """The first readable offset behind `start`, found by exponential and then binary search;
    `end` if there is none."""
    unreadable, step = start, 1
    while unreadable + step < end and not is_readable(unreadable + step):
        unreadable, step = unreadable + step, 2 * step
    readable = min(unreadable + step, end)
    while readable - unreadable > 1:
        middle = (readable + unreadable) // 2
        if is_readable(middle):
            readable = middle
        else:
            unreadable = middle
    return readable


def _deleted_to(tables: Tables, row: _core.TopicRow) -> int:
    """The offset before which messages that delete keys may be missing: those that the topic's
    compacted view has applied or, without a view, those that were trimmed."""
    view = tables.views.view(row.id)
    return int(row.first_offset) if view is None else tables.views.deleted_to(view)


def _check_kept(row: _core.TopicRow, position: int) -> None:
    if position < row.first_offset:
        raise trimmed(row.name, row.first_offset, position)
