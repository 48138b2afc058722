"""Append batches exactly once, from any process of a job (rules A2, B2, G3).

A job in several processes, such as a Spark query, cannot keep a producer open: the process that
commits its first batch may not exist any more at the second. And a batch may be committed twice,
because the job does not know whether the first attempt succeeded. So the ledger stores

- for each *token*, which names one run of the job, the epoch under which the run writes. The run
  keeps this epoch as long as it is the topic's epoch, and is fenced permanently once another
  writer, such as another run of the same job, has owned the topic (rules B4, B5);
- for each *writer*, which names the job in all its runs, the number of its last batch. A batch
  whose number is not higher is already in the log, and is not appended again.

For each topic, the ledger stores the 4096 tokens and the 4096 writers that appended last. A run
whose token was removed for newer ones counts as a new run.

Both are read and written in the transaction that appends. Between two batches no process owns the
topic: an exclusive producer that is opened then fences the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from exclusivelog.arguments import as_int, check_name, is_internal
from exclusivelog.backend import Appended, Opened, Run, TopicStore
from exclusivelog.messages import Columns
from exclusivelog.types import AccessMode

__all__ = ["Appended", "Run", "append_once", "record", "recorded"]

MOST_NUMBER = 2**63 - 1
MODES = tuple(mode for mode in AccessMode if not mode.waits)


class HasId(Protocol):
    """A `Topic`."""

    @property
    def id(self) -> int:
        """Its id."""


def check_run(run: Run) -> None:
    """Raise ValueError or TypeError for an invalid field."""
    mode = AccessMode.parse(run.access_mode)
    if mode not in MODES:
        raise ValueError(f"access_mode={mode.value!r}: it takes one of {', '.join(MODES)}")
    check_name(run.producer, "producer")
    for name in ("writer", "token"):
        if getattr(run, name) is not None:
            check_name(getattr(run, name), name)


def append_once(
    engine: Opened, run: Run, number: int | None, batches: Mapping[str, Iterable[Columns]]
) -> dict[str, Appended]:
    """Append a batch to one or several topics, once: all of it or nothing.

    - `number`: the batch's number, increasing; None if `run` has no writer.
    - `batches`: topic name -> its messages. Topics that do not exist are created.

    Returns topic name -> `Appended`. Raises ProducerFencedError if a later run, or another
    producer, has owned one of the topics since (rules B3, B4); ProducerBusyError;
    TopicTerminatedError; LedgerError if a new run begins with a batch before its job's last one,
    or the ledger cannot be written; ValueError for an internal topic.

    >>> from exclusivelog import _core
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
    exclusivelog.errors.ProducerFencedError: topic 'orders' is at epoch 2: ...
    """
    check_run(run)
    if number is not None:
        number = as_int(number)
        _check_number(number)
    if (number is None) != (run.writer is None):
        raise ValueError(f"number={number!r} and writer={run.writer!r}: give both or neither")
    for name in batches:
        check_writable(name)
    return engine.backend.append_once(run, number, batches)


def _check_number(number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"number takes an int, not {type(number).__name__}")
    if not -MOST_NUMBER <= number <= MOST_NUMBER:
        raise ValueError(f"number={number}: it takes {-MOST_NUMBER} to {MOST_NUMBER}")


def check_writable(topic: object) -> str:
    """Return the name; ValueError or TypeError if no topic of that name can be appended to."""
    name = check_name(topic, "topic")
    if is_internal(name):
        raise ValueError(f"topic {name!r} is internal to the library; it can only be read")
    return name


# ---- numbers without messages ------------------------------------------------------------


def record(engine: Opened, topic: str | HasId, writer: str, number: int) -> None:
    """Store the progress of a job on a topic that it only reads: its last number, which never
    decreases. This fences no producer. Raises TopicNotFoundError if a `Topic` was deleted, even if
    one of the same name was created since.

    >>> record(engine, "orders", "archive", 7); recorded(engine, "orders")
    {'archive': 7}
    """
    check_name(writer, "writer")
    _check_number(number)
    _store(engine, topic).record_batch(writer, number)


def _store(engine: Opened, topic: str | HasId) -> TopicStore:
    backend = engine.backend
    backend.check_open()
    backend.check_supports("once")
    number = backend.catalog.topic(topic, False)[0] if isinstance(topic, str) else topic.id
    return backend.topic_store(number)


def recorded(engine: Opened, topic: str | HasId) -> dict[str, int]:
    """Return writer -> the number of its last batch, for all writers of a topic.

    >>> recorded(engine, "orders")
    {}
    """
    return _store(engine, topic).batches()
