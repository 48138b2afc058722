"""The ledger's tables: keys, rows, and typed access to them within one transaction.

```text
table      key                                              value
meta       b"format" | b"topic", b"session", b"mail", ...   msgpack | last id given (u64)
           b"journal"                                       generation, position applied, a mark and
                                                            the oldest version behind it (u64)
           b"times", topic id                               time marks (see time_marks.py)
           b"overdue", topic id                             boot id, ns of the machine's monotonic
                                                            clock (see ages.py)
           b"kind", topic id                                msgpack: what state the topic holds
           b"announced", topic id                           msgpack: what its owner announced last
                                                            (see announcements.py)
           b"priorities", topic id                          the best and the lowest priority of
                                                            its waiters so far (i64, rule D7)
           b"role ...", ...                                 of roles (see role_rows.py)
names      topic name, UTF-8                                topic id (u64)
topics     topic id                                         topic row (_core.TopicRow)
entries    topic id, last offset of the entry               entry (_core.Entry), or where it is
segments   segment id                                       bytes in use, entries that live (u64)
producers  topic id, producer name                          last sequence id, live session
holders    topic id, session                                msgpack of access.Session
queue      topic id, order of rule D1, session              msgpack of access.Session
engines    engine id, 0 holder | 1 waiter, session          slot (u16), key in holders or queue
mail       engine id, number                                msgpack [kind, session, ...]
trash      topic id                                         empty: it was deleted, its rows are
                                                            still to go; or an offset: those of
                                                            the entries before it; or (slot,
                                                            engine): a view that is being made
views      topic id                                         id and horizon of its compacted view
snapshots  topic id                                         id of a state's snapshot, and the
                                                            offset that it goes up to
claims     group (with its length in front), resource       last generation, claimant or 0 (u64)
claimants  claim session                                    msgpack of Claimant
           claim session, session                           0 holder | 1 waiter, key in holders or
                                                            queue: a producer bound to the claim
transfers  topic id                                         msgpack of access.Transfer
           topic id, session                                the same, of one shared producer
cursors    topic id, group                                  the offset a reader group goes on at
retention  topic id                                         msgpack [max_age (s), max_bytes]
fences     topic id, token of a run                         the epoch it writes under (see once.py)
batches    topic id, writer                                 the number of its last batch (i64),
                                                            and a counter of when that was
```

Numbers in keys are big-endian, so that LMDB's order is theirs. Entries are keyed by their
last offset: the entry that holds an offset is then the first at or after it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from exclusivelog import _core
from exclusivelog._core import TopicRow
from exclusivelog.errors import LedgerCorruptedError
from exclusivelog.local.storage.log_tables import (
    AppliedJournal,
    CursorTable,
    EntryTable,
    LargeEntries,
    OnceTable,
    ProducerTable,
    TopicTable,
)
from exclusivelog.local.storage.maintenance_tables import DeletionTable, RetentionTable, ViewTable
from exclusivelog.local.storage.ownership_tables import (
    ClaimTable,
    NotificationTable,
    SessionTable,
    TransferTable,
)
from exclusivelog.local.storage.rows import PAIR, Rows
from exclusivelog.local.storage.segments import (
    LARGE_ENTRY,
    Segments,
    is_reference,
)
from exclusivelog.local.storage.time_marks import SLACK_MS, wall_ms

if TYPE_CHECKING:
    import lmdb

log = logging.getLogger("exclusivelog")

# LMDB gives a large value whole pages, less 16 bytes: this one takes 16 of them.
PACKED_ENTRY = 16 * 4096 - 16
SMALL_ENTRY = 16 << 10  # is filled up, however little there is to add
# A checkpoint of very many topics writes about this many bytes again, and of each topic these.
FILLED_UP, LEAST_FILLED_UP = 16 << 20, 4 << 10
MERGED_AT_ONCE = 256  # topics: their last entries are held in memory meanwhile
LARGE_PACKED_ENTRY = 1 << 20


class Recorded(Protocol):
    """Something to be told in `__events__` when the transaction commits."""

    @property
    def topic(self) -> str:
        """The name of the topic that it is about; "" if it is about none."""

    def dumps(self) -> bytes:
        """The value of its message."""


class Tables:
    """Typed access within one transaction.

    `ring` and `announce` gather whom to wake once the transaction is durable. `rows` are the
    tables' bytes, `large` the entries that are in segments. The others are groups of tables; those
    that few transactions need are made when they are first asked for.
    """

    def __init__(
        self, txn: lmdb.Transaction[bytes], databases: dict[str, Any], path: str,
        segments: Segments, journal: _core.Journal | None = None,
    ) -> None:  # fmt: skip
        self.rows = Rows(txn, databases, path)
        self.large = LargeEntries(self.rows, segments)
        self.journal = AppliedJournal(self.rows, journal)
        self.ring: set[int] = set()
        self.announce: set[int] = set()
        self.events: list[Recorded] = []  # what is written about this transaction (rule E5)
        # What is left for `settle`, right before the commit: roles that end, by their anchors, and
        # topics whose next owner is still to be chosen (see role_grants.py).
        self.role_ends: dict[int, tuple[str, str, int]] = {}
        self.to_promote: set[int] = set()
        self.settle: Callable[[Tables], None] | None = None
        self.topics = TopicTable(self.rows)
        self.entries = EntryTable(self.rows, self.large, self.journal)
        self.sessions = SessionTable(self.rows)

    @functools.cached_property
    def producers(self) -> ProducerTable:
        """Producer names."""
        return ProducerTable(self.rows)

    @functools.cached_property
    def cursors(self) -> CursorTable:
        """Where reader groups go on."""
        return CursorTable(self.rows)

    @functools.cached_property
    def once(self) -> OnceTable:
        """Batches that are appended once."""
        return OnceTable(self.rows)

    @functools.cached_property
    def notifications(self) -> NotificationTable:
        """What engines are told."""
        return NotificationTable(self.rows, self.ring)

    @functools.cached_property
    def claims(self) -> ClaimTable:
        """Claims and claim sessions."""
        return ClaimTable(self.rows)

    @functools.cached_property
    def transfers(self) -> TransferTable:
        """Hand-overs."""
        return TransferTable(self.rows)

    @functools.cached_property
    def views(self) -> ViewTable:
        """Compacted views and snapshots."""
        return ViewTable(self.rows, self.deletions)

    @functools.cached_property
    def deletions(self) -> DeletionTable:
        """What is still to be deleted."""
        return DeletionTable(self.rows)

    @functools.cached_property
    def retention(self) -> RetentionTable:
        """How long topics keep their messages."""
        return RetentionTable(self.rows)

    def apply(self, stop: int, version: int | None = None) -> None:
        """Take over what the journal has before the position `stop`. `version`: what is appended
        behind that has this one, or a later one (see `AppliedJournal.mark`)."""
        journal = self.journal
        assert journal.file is not None
        if stop <= journal.applied:
            return
        with journal.file.gather(journal.applied, stop, journal.generation) as bundles:
            small = min(SMALL_ENTRY, max(LEAST_FILLED_UP, FILLED_UP // max(1, len(bundles))))
            for start in range(0, len(bundles), MERGED_AT_ONCE):
                for bundle in self._merge(bundles[start : start + MERGED_AT_ONCE], small):
                    self._apply_to(bundle)
        journal.advance(stop, version)

    def _merge(self, bundles: list[_core.Bundle], small: int) -> list[_core.Bundle]:
        """Apply what belongs to topics whose rows are as they should be, many rows in one call of
        LMDB's; returns the others. An entry of up to `small` bytes is filled up."""
        if len(bundles) == 1:
            return bundles
        rows = self.rows
        found = rows.get_many("topics", _core.topic_keys(bundles))
        merge = _core.Merge(bundles, found, wall_ms() + SLACK_MS, LARGE_ENTRY)
        last = rows.get_many("entries", merge.last_entries())
        dropped, entries = merge.pack(last, PACKED_ENTRY, small)
        for key in dropped:
            rows.delete("entries", key)
        if not rows.put_many("entries", entries, overwrite=False):
            raise LedgerCorruptedError(
                f"{rows.path}: a topic has an entry already behind its own end"
            )
        sequences = merge.sequences(rows.get_many("producers", merge.producers()))
        for key in merge.damaged:
            log.error("%s: the row of producer %r is damaged; it is written anew", rows.path, key)
        rows.put_many("producers", sequences)
        rows.put_many("topics", merge.topics())
        self.announce.update(merge.ids())
        return merge.others

    def _apply_to(self, bundle: _core.Bundle) -> None:
        row = self.topics.sound(bundle.topic, "its messages are kept behind the others")
        if row is None:
            self._keep(bundle)
            return
        if row.flags & _core.DELETED:
            return
        if bundle.base_offset != row.next_offset:
            log.error(
                "%s: the journal goes on at offset %d of topic %r, which ends at %d",
                self.rows.path, bundle.base_offset, row.name, row.next_offset,
            )  # fmt: skip
        before = self._entry_to_fill(row, bundle)
        most = PACKED_ENTRY if bundle.nbytes < LARGE_ENTRY else LARGE_PACKED_ENTRY
        for last, entry in bundle.pack(before, most):
            self.entries.put(row.id, last, entry)
        self._count_sequences(bundle)
        row.next_offset = bundle.next_offset
        row.last_publish_time = max(row.last_publish_time, bundle.publish_time)
        self.topics.put(row)
        self.announce.add(row.id)

    def _keep(self, bundle: _core.Bundle) -> None:
        """Keep what the journal has of a topic whose row is damaged where it belongs, by its
        offsets: the journal must be emptied for all others."""
        for last, entry in bundle.pack(None, PACKED_ENTRY):
            key = PAIR.pack(bundle.topic, last)
            if self.rows.get("entries", key) is None:
                self.entries.put(bundle.topic, last, entry)
        self._count_sequences(bundle)

    def _count_sequences(self, bundle: _core.Bundle) -> None:
        for packed_name, sequence in bundle.producers().items():
            name = packed_name.decode()
            try:
                last, session = self.producers.get(bundle.topic, name)
            except LedgerCorruptedError as error:  # the journal has the newest of its ids
                log.error("%s; it is written anew", error)
                last, session = -1, 0
            self.producers.put(bundle.topic, name, max(last, sequence), session)

    def _entry_to_fill(self, row: TopicRow, bundle: _core.Bundle) -> _core.Entry | None:
        """The topic's last entry, taken out, if it is so small that more should go into it."""
        if row.next_offset == row.first_offset:
            return None
        key = PAIR.pack(row.id, row.next_offset - 1)
        data = self.rows.get("entries", key)
        if data is None or is_reference(data) or len(data) >= PACKED_ENTRY:
            return None
        if len(data) > max(SMALL_ENTRY, 4 * bundle.nbytes):
            return None  # not worth writing again
        try:
            entry = _core.Entry(data)
        except ValueError:
            return None  # it stays where it is, to be named
        self.rows.delete("entries", key)
        return entry

    def latest(self, topic: int, since: int = 0) -> TopicRow:
        """The topic's row as it is with what the journal has behind the position `since`."""
        row = self.topics.get(topic)
        end = self.journal.end_of(topic, since)
        if end is not None:
            row.next_offset = max(row.next_offset, end[0])
            row.last_publish_time = max(row.last_publish_time, end[1])
        return row
