"""Topics by name: finding, creating, listing them."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.arguments import check_name, check_not_reserved, is_internal
from exclusivelog.errors import LedgerCorruptedError, TopicNotFoundError
from exclusivelog.events import EVENTS
from exclusivelog.local.storage.tables import Tables
from exclusivelog.refusals import no_topic
from exclusivelog.types import TopicStats

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger


def create_topic(ledger: Ledger, name: str, create: bool, until: int = 0) -> tuple[int, str]:
    """(id, name) of the topic, created if `create`; else TopicNotFoundError if it is missing.
    WaitTimeoutError if it cannot be created before `until`."""
    check_name(name, "topic")
    with ledger.read() as tables:
        row = tables.topics.find(name)
    if row is not None:
        return row.id, row.name
    if not create:
        raise no_topic(ledger.path, name, list_topics(ledger))
    if name != EVENTS:
        check_not_reserved(name)
    with ledger.write_fencing(until) as tables:
        row = tables.topics.find(name) or tables.topics.create(name)
        return row.id, row.name


def relist_topics(ledger: Ledger) -> None:
    """Make the list of topics, if a version that does not know it has used the ledger."""
    with ledger.read() as tables:
        listed = tables.topics.list.is_complete
    if not listed:
        with ledger.write_concurrent() as tables:
            tables.topics.relist()


def list_topics(ledger: Ledger) -> list[str]:
    """The names of the topics, sorted; without internal ones."""
    with ledger.read() as tables:
        return [
            name
            for name, topic in tables.topics.all()
            if not is_internal(name) and not _is_deleted(tables, topic)
        ]


def list_read_topics(ledger: Ledger, read: Container[str]) -> list[tuple[str, int]]:
    """(name, id) of the topics on which a reader group has committed, and of those named in `read`,
    sorted; without internal ones."""

    def find(tables: Tables) -> list[tuple[str, int]]:
        committed = tables.cursors.topics()
        return [
            (name, topic)
            for name, topic in tables.topics.all()
            if (topic in committed or name in read)
            and not is_internal(name)
            and not _is_deleted(tables, topic)
        ]

    return ledger.inspect(find, unflushed=True)


def topic_rows(ledger: Ledger) -> tuple[list[_core.TopicRow], int]:
    """The rows of all topics by name, as of the last checkpoint and without internal ones; and the
    number of damaged rows."""
    rows: list[_core.TopicRow] = []
    damaged = 0
    with ledger.read() as tables:
        for name, topic in tables.topics.all():
            if is_internal(name):
                continue
            try:
                row = tables.topics.get(topic)
            except (LedgerCorruptedError, TopicNotFoundError):
                damaged += 1  # opening it reports the damage
                continue
            if not row.flags & _core.DELETED:
                rows.append(row)
    return rows, damaged


def stats_of(row: _core.TopicRow, end: int) -> TopicStats:
    """The size of a topic, from its row and its next offset `end`."""
    return TopicStats(
        None,
        0,
        0,
        0,
        {},
        messages=end - row.first_offset,
        first_offset=row.first_offset,
        next_offset=end,
        epoch=row.epoch,
        holders=row.shared + bool(row.owner),
        waiters=row.waiting,
    )


def _is_deleted(tables: Tables, topic: int) -> bool:
    try:
        return bool(tables.topics.get(topic).flags & _core.DELETED)
    except (LedgerCorruptedError, TopicNotFoundError):
        return False  # it exists, and opening it reports the damage
