"""Batches that are appended once, by whichever process comes with them (rules A2, B2, G3).

A job in several processes, a Spark query above all, cannot keep a producer open: the process
that commits its first batch may be gone at the second, and a batch may be committed twice,
because nobody knows whether the first attempt came through. So the ledger itself remembers

- for each *token*, the name of one run of the job, the epoch under which it writes: the run
  goes on under it for as long as the topic has it, and is fenced for ever once somebody else
  has had the topic (rules B4, B5), another run of the same job, say;
- for each *writer*, the name of the job whatever runs it, the number of its last batch: a
  batch whose number is not higher is in the log already, and not appended again.

Of each topic the ledger remembers the last 4096 tokens and the 4096 writers that appended last;
a run that comes back after so many others is a new one.

Both are read and written in the one transaction that appends. Between two batches nobody
holds the topic: who opens an exclusive producer on it then fences the run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exclusivelog import _core, access
from exclusivelog.access import Session
from exclusivelog.encoding import Columns
from exclusivelog.errors import LedgerError
from exclusivelog.tables import Tables
from exclusivelog.topic import check_name, existing, is_internal
from exclusivelog.types import AccessMode

if TYPE_CHECKING:
    from exclusivelog.engine import Engine
    from exclusivelog.topic import Topic

ENTRY_BYTES, ENTRY_MESSAGES = 1 << 20, 1_000_000
MOST_NUMBER = 2**63 - 1
MODES = (access.SHARED, access.EXCLUSIVE, access.FENCING)


@dataclass(frozen=True)
class Appended:
    """What became of a batch in one topic: its offsets (empty: it was there before), and the
    epoch under which it was written."""

    offsets: range
    epoch: int


@dataclass(frozen=True)
class Run:
    """Who appends.

    - `writer`: the job's name, by which its batches are numbered; None: they are not.
    - `token`: this run's name, which its epoch is kept under; None: every batch is one of its
      own, and takes a new epoch.
    - `producer`: the name that its messages carry, and that their sequence ids go by (rule G2).
    - `access_mode`: exclusive_with_fencing, exclusive, or shared (no epoch of its own, no
      fence). Waiting is not possible here.
    """

    writer: str | None
    token: str | None
    producer: str
    access_mode: AccessMode | str = AccessMode.EXCLUSIVE_WITH_FENCING

    def check(self) -> None:
        """ValueError or TypeError for what cannot be."""
        mode = AccessMode.parse(self.access_mode)
        if mode.value not in MODES:
            raise ValueError(f"access_mode={mode.value!r}: it takes one of {', '.join(MODES)}")
        check_name(self.producer, "producer")
        for name in ("writer", "token"):
            if getattr(self, name) is not None:
                check_name(getattr(self, name), name)


def append_once(
    engine: Engine, run: Run, number: int | None, batches: Mapping[str, Iterable[Columns]]
) -> dict[str, Appended]:
    """Append a batch to the topics that it has messages for: all of it, once, or nothing.

    - `number`: the batch's, growing; None where `run` has no writer.
    - `batches`: topic name -> its messages. Topics are made if need be.

    Raises ProducerFencedError where a later run, or anybody else, has had one of the topics
    since (rules B3, B4), ProducerBusyError, TopicTerminatedError, LedgerError, above all where a
    new run begins with a batch before its job's last one; ValueError for a topic of the
    library's own.

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
        raise ValueError(f"number={number!r} and writer={run.writer!r}: both, or none")
    for name in batches:
        check_writable(name)
    try:
        with engine.ledger.write_all() as tables:  # makes topics, too: what fails leaves none
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
    """What the caller's own source of messages has raised: no error of the ledger's (rule H2)."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _each(parts: Iterable[Columns]) -> Iterator[Columns]:
    try:
        yield from parts
    except Exception as error:
        raise _SourceFailed(error) from error


def check_writable(topic: object) -> str:
    """The name, or ValueError or TypeError unless a topic of that name can be appended to."""
    name = check_name(topic, "topic")
    if is_internal(name):
        raise ValueError(f"topic {name!r} is the library's own: it can only be read")
    return name


def _topic(tables: Tables, name: str) -> int:
    row = tables.find_topic(name) or tables.new_topic(name)
    return row.id


def _append(
    engine: Engine,
    tables: Tables,
    topic: int,
    run: Run,
    number: int | None,
    parts: Iterable[Columns],
) -> Appended:
    row, session = engine.sessions.visit(tables, _session(engine, tables, topic, run))
    first = row.next_offset
    last = None if run.writer is None else tables.batch(topic, run.writer)
    if run.token is not None and session.exclusive:
        begins = tables.fence(topic, run.token) is None
        if begins and number is not None and last is not None and number < last:
            raise _went_back(row, run, number, last)
        tables.put_fence(topic, run.token, session.epoch)
    if number is None or last is None or number > last:
        _write(tables, row, session, parts)
        if run.writer is not None and number is not None:
            tables.put_batch(topic, run.writer, number)
    tables.put_topic(row)
    return Appended(range(first, row.next_offset), session.epoch)


def _went_back(row: _core.TopicRow, run: Run, number: int, last: int) -> LedgerError:
    # A run begins with the last batch of the one before, or with the next one.
    return LedgerError(
        f"topic {row.name!r}: job {run.writer!r} comes with batch {number}, and its batch {last} "
        "is in the log: this run goes by a copy of its checkpoint, or by one that was put back. "
        "Nothing was written; use the checkpoint that wrote last, or a new one"
    )


def _session(engine: Engine, tables: Tables, topic: int, run: Run) -> Session:
    mode = AccessMode.parse(run.access_mode).value
    shared = mode == access.SHARED
    return Session(
        id=tables.rows.next_id(b"session"), topic=topic, engine=engine.id, slot=engine.slot,
        pid=engine.info.pid, engine_name=engine.name, name=run.producer, mode=mode, priority=0,
        created=_core.now(), tie=secrets.randbits(32), since=time.time_ns() // 1_000_000,
        claim=None if shared or run.token is None else _claim(tables, topic, run.token),
        engine_properties=dict(engine.info.properties),
    )  # fmt: skip


def _claim(tables: Tables, topic: int, token: str) -> int | None:
    epoch, row = tables.fence(topic, token), tables.topic(topic)
    # Of a topic that was made anew no epoch can be claimed; but its last owner was this run.
    return None if row.flags & _core.REBORN and epoch == row.epoch else epoch


def _write(tables: Tables, row: _core.TopicRow, session: Session, parts: Iterable[Columns]) -> None:
    published = max(row.last_publish_time, time.time_ns() // 1_000_000)
    sequence, holder = tables.producer(row.id, session.name)
    appender = _core.Appender(session.name.encode(), sequence, ENTRY_MESSAGES, ENTRY_BYTES)
    for part in _each(parts):
        batch = part.batch(appender)
        appender.add_batch(batch)
        appender.take()
        for last, entry in batch.stamp(
            row.id, row.next_offset, session.epoch, session.id, published
        ):
            tables.put_entry(row.id, last, entry)
            row.next_offset = last + 1
        appender.settle([(batch, batch.base_offset)])
    if appender.last_sequence > sequence:
        row.last_publish_time = published
        tables.put_producer(row.id, session.name, appender.last_sequence, holder)
        tables.announce.add(row.id)


# ---- numbers alone -----------------------------------------------------------------------


def record(engine: Engine, topic: str | Topic, writer: str, number: int) -> None:
    """Write down how far a job has come with a topic that it does not write to: its last
    number, which never goes back. Disturbs nobody. A `Topic` stands for itself alone, and not
    for one that was made anew under its name: that is a TopicNotFoundError.

    >>> record(engine, "orders", "archive", 7); recorded(engine, "orders")
    {'archive': 7}
    """
    check_name(writer, "writer")
    _check_number(number)
    found = _found(engine, topic)
    with engine.ledger.write_beside() as tables:
        existing(tables, found.id)
        before = tables.batch(found.id, writer)
        if before is None or number > before:
            tables.put_batch(found.id, writer, number)


def _found(engine: Engine, topic: str | Topic) -> Topic:
    return engine.topic(topic, create=False) if isinstance(topic, str) else topic


def recorded(engine: Engine, topic: str | Topic) -> dict[str, int]:
    """Writer -> the number of its last batch, of those that were recorded for a topic.

    >>> recorded(engine, "orders")
    {}
    """
    found = _found(engine, topic)
    with engine.ledger.read() as tables:
        return dict(tables.batches(existing(tables, found.id).id))
