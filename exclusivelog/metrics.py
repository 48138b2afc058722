"""Metrics of a ledger for Prometheus; needs the extra `[metrics]` (prometheus_client).

Each scrape reads the figures that all processes of a ledger count together (`engine.stats()`), so
one process that exports them is enough: the others need neither this module nor a port.
docs/operations.md lists the metrics.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from exclusivelog.errors import ExclusiveLogError, MissingLibraryError
from exclusivelog.types import EngineStats, Histogram, TopicStats

if TYPE_CHECKING:
    from exclusivelog.engine import Engine

__all__ = ["Collector", "names", "render"]

PREFIX = "exclusivelog_"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

# (name, kind, field of EngineStats, help text). Prometheus adds _total to counters.
OF_LEDGER = (
    ("topics", GAUGE, "topics", "Topics."),
    ("engines", GAUGE, "engines", "Engines that have the ledger open."),
    ("unresponsive_engines", GAUGE, "unresponsive",
     "Engines that have been silent for longer than their keepalive."),
    ("waiters", GAUGE, "waiters", "Requests that wait in the queues of topics, locks and roles."),
    ("appended_messages", COUNTER, "appended_messages", "Messages that were appended."),
    ("appended_bytes", COUNTER, "appended_bytes", "Bytes that were appended, with headers."),
    ("flushed_messages", HISTOGRAM, "flushed_messages", "Messages that one flush made durable."),
    ("flush_seconds", HISTOGRAM, "flush_seconds", "Time of each flush of the journal."),
    ("append_seconds", HISTOGRAM, "append_seconds",
     "Time until a message is in the journal, of one append in 256."),
    ("durable_seconds", HISTOGRAM, "durable_seconds",
     "Time from the append until the flush, of each call that waits for the flush."),
    ("wake_up_seconds", HISTOGRAM, "wake_up_seconds",
     "Time from an append until a reader that it woke continues."),
    ("promotion_seconds", HISTOGRAM, "promotion_seconds",
     "Time from a grant to a waiter until its process has the producer."),
    ("checkpoint_seconds", HISTOGRAM, "checkpoint_seconds", "Time of each checkpoint."),
    ("checkpoint_bytes", COUNTER, "checkpoint_bytes", "Bytes that checkpoints moved."),
    ("hand_overs", COUNTER, "hand_overs", "Topics that an owner took over by a hand-over."),
    ("evictions", COUNTER, "evictions",
     "Owners that were evicted because they were dead or unresponsive."),
    ("fencings", COUNTER, "fencings", "Owners that were fenced by another producer."),
    ("journal_backlog_bytes", GAUGE, "journal_bytes",
     "Bytes of the journal that wait for a checkpoint."),
    ("journal_capacity_bytes", GAUGE, "journal_capacity", "Bytes that can wait for one."),
    ("tables_used_bytes", GAUGE, "used_bytes", "Bytes of the tables in use."),
    ("tables_map_bytes", GAUGE, "map_size", "Bytes that the tables can grow to."),
    ("large_bytes", GAUGE, "large_bytes", "Bytes of large entries beside the tables."),
    ("disk_bytes", GAUGE, "disk_bytes", "Bytes of all files, as allocated."),
    ("disk_free_bytes", GAUGE, "disk_free_bytes", "Bytes that can still be written to the disk."),
    ("disk_low", GAUGE, "disk_low", "1 if the disk has little room left, else 0."),
    ("transactions", COUNTER, "transactions", "Transactions of the tables."),
    ("readers", GAUGE, "readers", "Slots for read transactions in use."),
    ("max_readers", GAUGE, "max_readers", "Slots for read transactions."),
    ("pending_messages", GAUGE, "pending_messages",
     "Messages that the exporting engine's producers have queued."),
    ("pending_bytes", GAUGE, "pending_bytes",
     "Bytes that the exporting engine's producers have queued."),
)  # fmt: skip
OF_TOPICS = (
    ("topic_messages", GAUGE, "messages", "Messages in the topic."),
    ("topic_appended_messages", COUNTER, "next_offset", "Messages that the topic has ever had."),
    ("topic_owners", COUNTER, "epoch", "Owners that the topic has had: its epoch."),
    ("topic_holders", GAUGE, "holders", "Producers that may write to the topic."),
    ("topic_waiters", GAUGE, "waiters", "Producers that wait in the topic's queue."),
)
UP = ("up", GAUGE, "", "1 if the figures could be read, else 0.")
BEHIND = (
    "oldest_reader_transactions",
    GAUGE,
    "oldest_reader",
    "How many transactions the oldest read is behind; the tables reuse no page freed since.",
)
LAG = ("group_lag_messages", GAUGE, "lag", "Messages that a reader group has not committed yet.")


def names() -> list[str]:
    """The names of all metrics as Prometheus stores them; a histogram has one, without suffix.

    >>> [name for name in names() if "topic_owners" in name]
    ['exclusivelog_topic_owners_total']
    """
    every = (UP, *OF_LEDGER, BEHIND, LAG, *OF_TOPICS)
    return [
        f"{PREFIX}{name}_total" if kind == COUNTER else PREFIX + name for name, kind, *_ in every
    ]


class Collector:
    """A collector for prometheus_client: `prometheus_client.REGISTRY.register(Collector(engine))`.

    - `engines`: open engines, one for each ledger; those with readonly=True are enough. A registry
      takes one collector, so give all ledgers of a process to the same one.
    - `topics`: True: also metrics of each topic, as of the last checkpoint (about a second ago).
      False: leave them out, where there are many thousand topics.

    Every metric has the label `ledger`, the directory. If the figures cannot be read, for example
    because the engine is closed, `exclusivelog_up` is 0 and all other metrics are missing.

    Raises MissingLibraryError without prometheus_client.

    >>> with topic.producer() as producer:
    ...     _ = producer.send_many([b"a", b"b"])
    >>> families = {family.name: family for family in Collector(engine).collect()}
    >>> families["exclusivelog_appended_messages"].samples[0].value
    2
    """

    def __init__(self, *engines: Engine, topics: bool = True) -> None:
        if not engines:
            raise TypeError("engines: it takes at least one open engine")
        self._families = _families()
        self._engines = engines
        self._topics = topics

    def describe(self) -> Iterator[Any]:
        """The metrics without values, so that a registry refuses a second collector, whose
        families would appear twice in its text."""
        for metric in (UP, *OF_LEDGER, BEHIND, LAG, *OF_TOPICS):
            yield self._family(metric, ("ledger",), ())

    def collect(self) -> Iterator[Any]:
        """The present values of all metrics, for prometheus_client: one family for each metric,
        with the values of all ledgers."""
        read = {_label_of(engine): self._read(engine) for engine in self._engines}
        found = {path: each for path, each in read.items() if each is not None}
        up = [((path,), int(path in found)) for path in read]
        yield self._family(UP, ("ledger",), up)
        if not found:
            return
        for metric in OF_LEDGER:
            values = [((path,), _number(stats[metric[2]])) for path, (stats, _) in found.items()]
            yield self._family(metric, ("ledger",), values)
        behind = [((path,), _behind(stats)) for path, (stats, _) in found.items()]
        yield self._family(BEHIND, ("ledger",), behind)
        yield self._family(
            LAG,
            ("ledger", "group", "topic"),
            [
                ((path, info.group, info.topic), info.lag)
                for path, (stats, _) in found.items()
                for info in stats.groups
                if info.lag is not None
            ],
        )
        for metric in OF_TOPICS if self._topics else ():
            yield self._family(
                metric,
                ("ledger", "topic"),
                [
                    ((path, name), getattr(topic, metric[2]))
                    for path, (_, topics) in found.items()
                    for name, topic in topics
                ],
            )

    def _read(self, engine: Engine) -> tuple[EngineStats, list[tuple[str, TopicStats]]] | None:
        """The figures of a ledger and of its topics; None if they cannot be read."""
        try:
            stats = engine.stats()
            return stats, engine.backend.catalog.topic_stats() if self._topics else []
        except ExclusiveLogError:
            return None

    def _family(
        self,
        metric: tuple[str, str, str, str],
        labels: Sequence[str],
        values: Sequence[tuple[tuple[str, ...], Any]],
    ) -> Any:
        name, kind, _, about = metric
        family = self._families[kind](PREFIX + name, about, labels=labels)
        for label, value in values:
            if kind == HISTOGRAM:
                family.add_metric(label, _buckets(value), value.sum)
            else:
                family.add_metric(label, value)
        return family


def render(*engines: Engine, topics: bool = True, openmetrics: bool = True) -> str:
    """All metrics as text; control characters in names are escaped, so that they do nothing to a
    terminal. `engines` and `topics` as in `Collector`.

    - `openmetrics`: True: in the format OpenMetrics. False: in Prometheus' own text format, for the
      textfile collector of a node exporter and for a Pushgateway: in OpenMetrics they find no type
      for a counter.

    Raises MissingLibraryError without prometheus_client.

    >>> render(engine).splitlines()[-1]
    '# EOF'
    >>> "# TYPE exclusivelog_appended_messages_total counter" in render(engine, openmetrics=False)
    True
    """
    collector = Collector(*engines, topics=topics)
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.openmetrics import exposition

    registry = CollectorRegistry()
    registry.register(collector)
    write: Any = exposition.generate_latest if openmetrics else generate_latest
    text: bytes = write(registry)
    return "\n".join(map(_printable, text.decode().split("\n")))


def _printable(line: str) -> str:
    r"""A line of OpenMetrics in which control characters of labels are escaped, as text.

    >>> print(_printable('topics{topic="\x1b[31m"} 1'))
    topics{topic="\\x1b[31m"} 1
    """
    if line.isprintable():
        return line
    # In a label, a backslash is written as two.
    return "".join(c if c.isprintable() else "\\" + repr(c)[1:-1] for c in line)


def _label_of(engine: Engine) -> str:
    """The ledger's path; bytes of it that are no UTF-8, which Prometheus does not take, escaped."""
    return os.fsencode(engine.path).decode(errors="backslashreplace")


def _families() -> dict[str, Any]:
    try:
        from prometheus_client import core
    except ImportError:
        raise MissingLibraryError(
            "metrics need prometheus_client; pip install 'exclusivelog[metrics]'"
        ) from None
    return {
        COUNTER: core.CounterMetricFamily,
        GAUGE: core.GaugeMetricFamily,
        HISTOGRAM: core.HistogramMetricFamily,
    }


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """The buckets of Prometheus: cumulative counts up to each bound."""
    seen = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        seen += count
        found.append(("+Inf" if bound == float("inf") else repr(bound), seen))
    return found


def _number(figure: Any) -> Any:
    """The value for Prometheus; NaN if it is unknown."""
    if figure is None:
        return float("nan")
    return len(figure) if isinstance(figure, tuple) else figure


def _behind(stats: EngineStats) -> int:
    return 0 if stats.oldest_reader is None else stats.oldest_reader["transactions_behind"]
