"""Append batches exactly once, from any process of a job (rules A2, B2, G3).

A job in several processes, such as a Spark query, cannot keep a producer open: the process that
commits its first batch may not exist any more at the second. And a batch may be committed twice,
because the job does not know whether the first attempt succeeded. So the ledger stores

- for each *token*, which names one run of the job, the epoch under which the run writes. The run
  keeps this epoch as long as it is the topic's epoch, and is fenced for ever once another writer,
  such as another run of the same job, has owned the topic (rules B4, B5);
- for each *writer*, which names the job in all its runs, the number of its last batch. A batch
  whose number is not higher is in the log already, and is not appended again.

The ledger stores, for each topic, the 4096 tokens and the 4096 writers that appended last. A run
that returns after so many others counts as a new one.

Both are read and written in the transaction that appends. Between two batches no process owns the
topic: an exclusive producer that is opened then fences the run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.backend import check_name, is_internal
from exclusivelog.errors import LedgerError
from exclusivelog.local import records
from exclusivelog.local.records import Session
from exclusivelog.local.storage.tables import Tables
from exclusivelog.local.topics import create_topic, existing
from exclusivelog.messages.encoding import Columns
from exclusivelog.types import AccessMode

if TYPE_CHECKING:
    from exclusivelog.local.runtime import Runtime
    from exclusivelog.topic import Topic


ENTRY_BYTES, ENTRY_MESSAGES = 1 << 20, 1_000_000
MOST_NUMBER = 2**63 - 1
MODES = (records.SHARED, records.EXCLUSIVE, records.FENCING)


@dataclass(frozen=True)
class Appended:
    """The outcome of a batch in one topic: its offsets (empty if it was in the log before), and
    the epoch under which it was written."""

    offsets: range
    epoch: int


@dataclass(frozen=True)
class Run:
    """The run of a job that appends.

    - `writer`: the job's name, under which the number of its last batch is stored; None: its
      batches are not numbered.
    - `token`: this run's name, under which its epoch is stored; None: every batch takes a new
      epoch.
    - `producer`: the producer name of its messages, to which their sequence ids belong (rule G2).
    - `access_mode`: "exclusive_with_fencing" (default), "exclusive", or "shared" (no epoch of its
      own, and it fences no other producer). "wait_for_exclusive" is not possible here.
    """

    writer: str | None
    token: str | None
    producer: str
    access_mode: AccessMode | str = AccessMode.EXCLUSIVE_WITH_FENCING

    def check(self) -> None:
        """Raise ValueError or TypeError for an invalid field."""
        mode = AccessMode.parse(self.access_mode)
        if mode.value not in MODES:
            raise ValueError(f"access_mode={mode.value!r}: it takes one of {', '.join(MODES)}")
        check_name(self.producer, "producer")
        for name in ("writer", "token"):
            if getattr(self, name) is not None:
                check_name(getattr(self, name), name)


def append_once(
    engine: Runtime, run: Run, number: int | None, batches: Mapping[str, Iterable[Columns]]
) -> dict[str, Appended]:
    """Append a batch to one or several topics, once: all of it or nothing.

    - `number`: the batch's number, increasing; None if `run` has no writer.
    - `batches`: topic name -> its messages. Topics that do not exist are created.

    Returns topic name -> `Appended`. Raises ProducerFencedError if a later run, or another
    producer, has owned one of the topics since (rules B3, B4); ProducerBusyError;
    TopicTerminatedError; LedgerError if a new run begins with a batch before its job's last one,
    or the ledger cannot be written; ValueError for an internal topic.

    >>> def part(*values):
    ...     return Columns(_core.strings(list(values)))
    >>> first, second = Run("job", "run-1", "spark"), Run("job", "run-2", "spark")
    >>> append_once(engine, first, 0, {"orders": [part(b"a", b"b")]})
    {'orders': Appended(offsets=range(0, 2), epoch=1)}
    >>> append_once(engine, second, 0, {"orders": [part(b"a", b"b")]})
    {'orders': Appended(offsets=range(2, 2), epoch=2)}
    >>> append_once(engine, first, 1, {"orders": [part(b"c")]})
    Traceback (most recent call last):
        ...
    exclusivelog.errors.ProducerFencedError: topic 'orders' is at epoch 2, ...
    """
    run.check()
    if number is not None:
        _check_number(number)
    if (number is None) != (run.writer is None):
        raise ValueError(f"number={number!r} and writer={run.writer!r}: give both or neither")
    for name in batches:
        check_writable(name)
    try:
        with (
            engine.ledger.write_checkpointed() as tables
        ):  # creates topics, too; a failure leaves none
            return {
                name: _append(engine, tables, _topic(tables, name), run, number, parts)
                for name, parts in batches.items()
            }
    except _SourceFailed as failed:
        raise failed.error from None


def _check_number(number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"number takes an int, not {type(number).__name__}")
    if not -MOST_NUMBER <= number <= MOST_NUMBER:
        raise ValueError(f"number={number}: it takes {-MOST_NUMBER} to {MOST_NUMBER}")


class _SourceFailed(Exception):
    """The caller's source of messages raised: this is no error of the ledger (rule H2)."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _each(parts: Iterable[Columns]) -> Iterator[Columns]:
    try:
        yield from parts
    except Exception as error:
        raise _SourceFailed(error) from error


def check_writable(topic: object) -> str:
    """Return the name; ValueError or TypeError if no topic of that name can be appended to."""
    name = check_name(topic, "topic")
    if is_internal(name):
        raise ValueError(f"topic {name!r} is internal to the library; it can only be read")
    return name


def _topic(tables: Tables, name: str) -> int:
    row = tables.topics.find(name) or tables.topics.create(name)
    return row.id


def _append(
    engine: Runtime,
    tables: Tables,
    topic: int,
    run: Run,
    number: int | None,
    parts: Iterable[Columns],
) -> Appended:
    row, session = engine.sessions.requests.visit(tables, _session(engine, tables, topic, run))
    first = row.next_offset
    last = None if run.writer is None else tables.once.batch(topic, run.writer)
    if run.token is not None and session.exclusive:
        begins = tables.once.fence(topic, run.token) is None
        if begins and number is not None and last is not None and number < last:
            raise _went_back(row, run, number, last)
        tables.once.put_fence(topic, run.token, session.epoch)
    if number is None or last is None or number > last:
        _write(tables, row, session, parts)
        if run.writer is not None and number is not None:
            tables.once.put_batch(topic, run.writer, number)
    tables.topics.put(row)
    return Appended(range(first, row.next_offset), session.epoch)


def _went_back(row: _core.TopicRow, run: Run, number: int, last: int) -> LedgerError:
    # A run begins with the last batch of the one before, or with the next one.
    return LedgerError(
        f"topic {row.name!r}: job {run.writer!r} sends batch {number}, but its batch {last} "
        "is in the log already: this run uses a copied or restored checkpoint. "
        "Nothing was written; use the original checkpoint, or a new one"
    )


def _session(engine: Runtime, tables: Tables, topic: int, run: Run) -> Session:
    mode = AccessMode.parse(run.access_mode).value
    shared = mode == records.SHARED
    return Session(
        id=tables.rows.next_id(b"session"), topic=topic, engine=engine.id, slot=engine.slot,
        pid=engine.info.pid, engine_name=engine.name, name=run.producer, mode=mode, priority=0,
        created=_core.now(), tie=secrets.randbits(32), since=time.time_ns() // 1_000_000,
        claim=None if shared or run.token is None else _claim(tables, topic, run.token),
        engine_properties=dict(engine.info.properties),
    )  # fmt: skip


def _claim(tables: Tables, topic: int, token: str) -> int | None:
    epoch, row = tables.once.fence(topic, token), tables.topics.get(topic)
    # No epoch of a recreated topic can be claimed; but its last owner was this run.
    return None if row.flags & _core.RECREATED and epoch == row.epoch else epoch


def _write(tables: Tables, row: _core.TopicRow, session: Session, parts: Iterable[Columns]) -> None:
    published = max(row.last_publish_time, time.time_ns() // 1_000_000)
    sequence, holder = tables.producers.get(row.id, session.name)
    appender = _core.Appender(session.name.encode(), sequence, ENTRY_MESSAGES, ENTRY_BYTES)
    for part in _each(parts):
        batch = part.batch(appender)
        appender.add_batch(batch)
        appender.take()
        for last, entry in batch.stamp(
            row.id, row.next_offset, session.epoch, session.id, published
        ):
            tables.entries.put(row.id, last, entry)
            row.next_offset = last + 1
        appender.settle([(batch, batch.base_offset)])
    if appender.last_sequence > sequence:
        row.last_publish_time = published
        tables.producers.put(row.id, session.name, appender.last_sequence, holder)
        tables.announce.add(row.id)


# ---- numbers alone -----------------------------------------------------------------------


def record(engine: Runtime, topic: str | Topic, writer: str, number: int) -> None:
    """Store how far a job has come with a topic that it does not write to: its last number, which
    never decreases. It fences no producer. Raises TopicNotFoundError if a `Topic` was deleted, even
    if one of the same name was created since.

    >>> record(engine, "orders", "archive", 7); recorded(engine, "orders")
    {'archive': 7}
    """
    check_name(writer, "writer")
    _check_number(number)
    found = _id_of(engine, topic)
    with engine.ledger.write_concurrent() as tables:
        existing(tables, found)
        before = tables.once.batch(found, writer)
        if before is None or number > before:
            tables.once.put_batch(found, writer, number)


def _id_of(engine: Runtime, topic: str | Topic) -> int:
    engine.check_open()
    return create_topic(engine.ledger, topic, False)[0] if isinstance(topic, str) else topic.id


def recorded(engine: Runtime, topic: str | Topic) -> dict[str, int]:
    """Return writer -> the number of its last batch, for all writers of a topic.

    >>> recorded(engine, "orders")
    {}
    """
    found = _id_of(engine, topic)
    with engine.ledger.read() as tables:
        return dict(tables.once.batches(existing(tables, found).id))
