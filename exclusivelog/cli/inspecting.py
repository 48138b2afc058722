"""`topics`, `info`, `stats` and `metrics`: the content and the figures of a log."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

import exclusivelog as xl
from exclusivelog.cli.output import (
    announcement_of,
    cell_of,
    fields_of,
    holder_of,
    items_of,
    jsonable,
    message_facts,
    of_each,
    pairs_of,
    print_table,
    time_of,
)
from exclusivelog.cli.program import (
    as_json,
    ledger_path,
    maybe_topic,
    open_to_read,
    program,
)

SIZES = """
    map_size used_bytes journal_bytes large_bytes transactions max_readers readers topics engines
    oldest_reader
""".split()
# The figures that a read-only engine has of a cluster.
ON_A_CLUSTER = """
    topics engines waiters groups messages first_offset next_offset epoch holders
""".split()


@program.command()
@ledger_path
@as_json
def topics(path: str, as_json: bool) -> None:
    """List the topics: number of messages, epoch, owner, number of waiters, and kind.

    The kind is what the topic holds: messages, map, state, or events.
    """
    with open_to_read(path) as engine:
        names = engine.topics()
        if as_json:
            for facts in of_each(engine, names, lambda topic: [_topic_object(topic)]):
                print(json.dumps(facts))
            return
        print_table(
            ("topic", "messages", "epoch", "owner", "waiters", "kind"),
            of_each(engine, names, lambda topic: [_topic_row(topic)]),
        )


def _topic_row(topic: xl.Topic) -> Sequence[object]:
    messages = topic.next_offset - topic.first_offset
    return topic.name, messages, topic.epoch, holder_of(topic), len(topic.waiters), topic.kind


def _topic_object(topic: xl.Topic) -> dict[str, object]:
    first, end = topic.first_offset, topic.next_offset
    return {
        "topic": topic.name,
        "kind": topic.kind,
        "serializers": topic.serializers,
        "messages": end - first,
        "first_offset": first,
        "next_offset": end,
        "epoch": topic.epoch,
        "holders": [fields_of(holder) for holder in topic.holders],
        "waiters": [fields_of(waiter) for waiter in topic.waiters],
    }


@program.command()
@ledger_path
@maybe_topic
@as_json
def info(path: str, topic: str | None, as_json: bool) -> None:
    """Show a ledger's statistics and open engines, or the details of one topic."""
    with open_to_read(path) as engine:
        if topic is not None:
            _show_topic(engine.topic(topic), as_json)
            return
        facts = _ledger_facts(engine)
        if as_json:
            print(json.dumps({**facts, "engines": [fields_of(e) for e in engine.engines()]}))
            return
        if "oldest_reader" in facts:
            facts["oldest_reader"] = _reader_facts(facts["oldest_reader"])
        rows = ((name.replace("_", " "), fact) for name, fact in facts.items())
        print_table(("name", "value"), rows, header=False)
        print()
        print_table(
            ("engine", "id", "pid", "heartbeat", "properties"),
            (
                (e.name, e.id, e.pid, f"{e.heartbeat_age:.1f} s ago", pairs_of(e.properties))
                for e in engine.engines()
            ),
        )


def _ledger_facts(engine: xl.Engine) -> dict[str, Any]:
    stats = engine.stats()
    if engine.backend.is_remote:
        return {"path": engine.path, "topics": stats.topics, "engines": stats.engines}
    facts = {"path": engine.path, "format": engine.ledger.format}
    return facts | {name: stats[name] for name in SIZES}


def _show_topic(topic: xl.Topic, as_json: bool) -> None:
    if not as_json:
        print_table(("name", "value"), _topic_facts(topic), header=False)
        return
    last = _last_message(topic)
    print(
        json.dumps(
            {**_topic_object(topic), "last_message": None if last is None else message_facts(last)}
        )
    )


def _topic_facts(topic: xl.Topic) -> Iterator[Sequence[object]]:
    first, end = topic.first_offset, topic.next_offset
    yield "topic", topic.name
    names = ", ".join(f"{part}={name}" for part, name in topic.serializers.items())
    yield "kind", f"{topic.kind} ({names})" if names else topic.kind
    yield "epoch", topic.epoch
    yield "messages", end - first
    yield "first offset", first
    yield "next offset", end
    last = _last_message(topic)
    if last is not None:
        yield "last message", f"{time_of(last.publish_time)} by {last.producer_name}"
    yield "owner", holder_of(topic)
    yield "waiters", len(topic.waiters)
    if said := announcement_of(topic):
        yield "announced", said


def _last_message(topic: xl.Topic) -> xl.Message | None:
    end = topic.next_offset
    return topic.reader(start=end - 1).read_next(timeout=0) if end > topic.first_offset else None


def _reader_facts(reader: dict[str, Any] | None) -> str:
    if reader is None:
        return "-"
    name = "" if reader["engine"] is None else f" ({reader['engine']})"
    return f"pid {reader['pid']}{name}, {reader['transactions_behind']} transactions behind"


@program.command()
@ledger_path
@maybe_topic
@as_json
def stats(path: str, topic: str | None, as_json: bool) -> None:
    """Show figures of a ledger, from all processes: messages, flushes, latencies, queues, lags,
    sizes.

    Counters start at 0 when an engine opens a ledger that no other engine has open. With a topic,
    show its size, its reader groups, and how its messages are stored. For a cluster, show topics,
    engines, queues and lags: each engine on a cluster counts its messages by itself.
    """
    with open_to_read(path) as engine:
        if topic is None:
            _follow_topics(engine)
        found: Any = engine.stats() if topic is None else engine.topic(topic, False).stats()
        kept = ON_A_CLUSTER if engine.backend.is_remote else None
    shown = {name: value for name, value in items_of(found) if kept is None or name in kept}
    if as_json:
        print(json.dumps(jsonable(shown)))
        return
    rows = [(name.replace("_", " "), _figure(name, value)) for name, value in shown.items()]
    print_table(("name", "value"), rows, header=False)


def _follow_topics(engine: xl.Engine) -> None:
    """On a cluster, use each topic once: an engine there has figures only of topics that it has
    used."""
    names = engine.topics() if engine.backend.is_remote else ()
    list(of_each(engine, names, lambda topic: [topic.next_offset]))


def _figure(name: str, value: Any) -> str:
    if isinstance(value, xl.Histogram):
        return _histogram_text(name, value)
    if name == "oldest_reader":
        return _reader_facts(value)
    if name == "groups":
        lags = (f"{each.group} on {each.topic}: {cell_of('lag', each.lag)}" for each in value)
        return ", ".join(lags) or "-"
    if name == "unresponsive":
        return ", ".join(f"{each.name} (pid {each.pid})" for each in value) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {held}" for key, held in value.items()) or "-"
    return cell_of(name, value)


def _histogram_text(name: str, value: xl.Histogram) -> str:
    if not value.count:
        return "-"
    median, most = value.quantile(0.5), value.quantile(0.99)
    if not name.endswith("_seconds"):
        return f"{value.count} times, mean {value.mean:.1f}, p50 < {median:g}, p99 < {most:g}"
    return (
        f"{value.count} times, mean {value.mean * 1e6:.1f} us, p50 < {median * 1e6:.1f} us, "
        f"p99 < {most * 1e6:.1f} us"
    )


@program.command()
@ledger_path
@click.option("--no-topics", is_flag=True, help="Leave out the metrics of single topics.")
@click.option("--openmetrics", is_flag=True, help="In the format OpenMetrics instead.")
def metrics(path: str, no_topics: bool, openmetrics: bool) -> None:
    """Print a ledger's metrics as text for Prometheus; needs the extra [metrics].

    A textfile collector and a Pushgateway take this text.
    """
    from exclusivelog.metrics import render

    with open_to_read(path) as engine:
        if not no_topics:
            _follow_topics(engine)
        sys.stdout.write(render(engine, topics=not no_topics, openmetrics=openmetrics))
