"""Audits and reports of a ledger, computed from its log.

`audit` checks the promises of exclusive access. `report` writes an HTML page that shows the leaders
over time, how long each failover took, and the load. `audit` is about ten times faster with the
extra `[arrow]`; `report` needs the extra `[report]`. For logs that are too large for one process,
`exclusivelog.spark` does the same with Spark.

```text
runs.py      summaries of messages (runs), computed with Arrow
plain.py     the same without pyarrow
leaders.py   tenures of leaders, and costs of failovers, from the recorded changes of ownership
judging.py   the claims about a topic, and their verdicts
page.py      the page and its charts, from page.html.j2, page.css and page.js
```
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from exclusivelog.errors import OffsetTrimmedError, TopicNotFoundError
from exclusivelog.events import EVENTS

if TYPE_CHECKING:
    from exclusivelog.audit.leaders import Changes, LeaderReport, Record, Verdict
    from exclusivelog.engine import Engine
    from exclusivelog.topic import Topic

__all__ = ["audit", "names_of", "owned", "read_changes", "report", "write_page"]

IN_ONE_PASS = 20_000  # events
TRIES = 5  # to read a topic from which retention removes messages

T = TypeVar("T")


def audit(engine: Engine, topics: Sequence[str] | None = None) -> list[Verdict]:
    """Check topics by their messages and the history of their owners.

    - `topics`: names. None, the default: all topics.

    Returns a verdict on each of these claims about each topic: epochs never interleave, offsets are
    dense, each exclusive epoch has one producer, sequence ids rise, and every exclusive epoch with
    messages was granted once (rules B1, B8, E5, G2). Raises TopicNotFoundError.

    >>> from exclusivelog.audit import audit
    >>> producer.send(b"paid")
    0
    >>> [verdict.claim for verdict in audit(engine) if not verdict.holds]
    []
    """
    from exclusivelog.audit.judging import verdicts

    try:
        from exclusivelog.audit.runs import runs
    except ImportError:  # no pyarrow
        from exclusivelog.audit.plain import runs

    found = _of_each(engine, names_of(engine, topics), topics is not None, runs)
    changes = read_changes(engine)  # last, to include the grants of all messages that were read
    return verdicts(found, chain.from_iterable(found.values()), changes, owned(engine, found))


def report(engine: Engine, to: str | Path, topics: Sequence[str] | None = None) -> LeaderReport:
    """Write an HTML page about topics to a file.

    - `to`: the file. It has 5 MB or more, most of it the chart library, and loads nothing else.
    - `topics`: names. None, the default: all topics.

    Raises TopicNotFoundError, OSError, and ImportError without the extra `[report]`.
    """

    def read(buckets: Mapping[str, int]) -> dict[str, list[Record]]:
        from exclusivelog.audit.runs import runs

        return _of_each(
            engine, buckets, topics is not None, lambda topic: runs(topic, buckets[topic.name])
        )

    return write_page(engine, to, topics, read)


def write_page(
    engine: Engine,
    to: str | Path,
    topics: Sequence[str] | None,
    read: Callable[[Mapping[str, int]], Mapping[str, Iterable[Record]]],
) -> LeaderReport:
    """Write the page about topics (None: all). `read` returns the runs of each; its argument is
    {topic: length of its buckets in ms}."""
    from exclusivelog.audit.judging import verdicts
    from exclusivelog.audit.leaders import LeaderReport, stories_of
    from exclusivelog.audit.page import page, parts

    parts()  # checks the installation before the log is read
    names = names_of(engine, topics)
    buckets = _of_each(engine, names, topics is not None, functools.partial(_bucket, engine))
    found = read(buckets)
    runs = list(chain.from_iterable(found.values()))
    changes, held = read_changes(engine), owned(engine, found)
    stories = stories_of({name: buckets[name] for name in found}, runs, changes, held)
    judged = verdicts(found, runs, changes, held)
    silences = [t.silence for s in stories for t in s.take_overs if t.silence is not None]
    told = LeaderReport(engine.path, stories, judged, silences)
    Path(to).write_text(page(told), encoding="utf-8")
    return told


def _bucket(engine: Engine, topic: Topic) -> int:
    """The length of a bucket for the time between the topic's first and last message, in ms."""
    from exclusivelog.audit.leaders import bucket_of

    epochs = engine.backend.topic_store(topic.id).epochs(topic.first_offset)
    first = min((epoch.first_time for epoch in epochs), default=0)
    return bucket_of(max((epoch.last_time for epoch in epochs), default=0) - first)


# ---- reading with an engine; the other modules use none --------------------------------------


def names_of(engine: Engine, topics: Sequence[str] | None) -> list[str]:
    """These topics, or (None) all; TopicNotFoundError for one that does not exist."""
    known = engine.topics()
    for topic in topics or ():
        if topic not in known:
            raise TopicNotFoundError(f"{engine.path} has no topic {topic!r}")
    return known if topics is None else list(dict.fromkeys(topics))


def _of_each(
    engine: Engine, names: Iterable[str], named: bool, read: Callable[[Topic], T]
) -> dict[str, T]:
    """What `read` returns of each topic. A topic that is deleted meanwhile is left out, unless the
    caller named it."""
    found = {}
    for name in names:
        try:
            topic = engine.topic(name, create=False)
            found[name] = _untrimmed(functools.partial(read, topic))
        except TopicNotFoundError:
            if named:
                raise
    return found


def _untrimmed(read: Callable[[], T]) -> T:
    """What `read` returns; it is called again if retention removes messages meanwhile."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(OffsetTrimmedError):
            return read()
    return read()


def owned(engine: Engine, topics: Iterable[str]) -> set[tuple[str, int]]:
    """(topic, epoch) of the topics that have an owner now."""
    found = set()
    for topic in topics:
        with contextlib.suppress(TopicNotFoundError):
            owner = engine.topic(topic, create=False).owner
            if owner is not None:
                found.add((topic, owner.epoch))
    return found


def read_changes(engine: Engine) -> Changes:
    """All recorded changes of ownership."""
    from exclusivelog.audit import leaders

    told = engine.backend.events(None, None)
    if told is not None:  # a cluster derives them from its log, which has all of them
        return leaders.Changes().add(leaders.changes_of(told))
    try:
        topic = engine.topic(EVENTS, create=False)
    except TopicNotFoundError:
        return leaders.Changes()
    return _untrimmed(functools.partial(_changes, topic))


def _changes(topic: Topic) -> Changes:
    from exclusivelog.audit import leaders

    found = leaders.Changes()
    with topic.reader() as reader:
        found.complete = reader.position == 0
        values = (message.value for message in reader if message.value is not None)
        while some := list(islice(values, IN_ONE_PASS)):
            found.add(leaders.parsed(some))
    return found
