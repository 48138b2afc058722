"""Most of the commands: each imports what it needs, and nothing else."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import click

import exclusivelog as xl
from exclusivelog.cli.output import (
    Table,
    decoded,
    fields_of,
    holder_of,
    message_facts,
    pairs_of,
    print_result,
    print_table,
    printable,
    second_of,
    time_of,
)
from exclusivelog.cli.program import (
    ENGINE_NAME,
    PATH,
    Argument,
    access,
    access_options,
    as_json,
    is_url,
    leave,
    ledger_path,
    local_path,
    maybe_group,
    maybe_topic,
    open_to_read,
    open_to_write,
    program,
    start_of,
    topic_name,
)

READ_BYTES = 1 << 16
# The names of xl.AccessMode and the defaults of the demo: a help text imports neither.
MODES = ("shared", "exclusive", "wait_for_exclusive", "exclusive_with_fencing")
KILLS, RATE = 20, 2000.0
PROGRESS_SECONDS = 2.0
HOLDER = ("engine", "engine_id", "pid", "since")
CLAIMS = ("group", "resource", "generation", "kind", *HOLDER)
ROLES = ("role", "epoch", "topics", "groups", "claims", "waiting", *HOLDER)
CLAIM_HISTORY = ("time", "group", "resource", "generation", "kind", "reason", "from", "to")
SIZES = (
    "map_size", "used_bytes", "journal_bytes", "large_bytes", "transactions", "max_readers",
    "readers", "topics", "engines", "oldest_reader",
)  # fmt: skip
# The figures that an engine has of a cluster which it only looks at.
ON_A_CLUSTER = (
    "topics", "engines", "waiters", "groups", "messages", "first_offset", "next_offset", "epoch",
    "holders",
)  # fmt: skip
GROUPS = ("group", "topic", "position", "lag", *HOLDER)
MOVES = ("topic", "state", "epoch", "from", "to", "reason")
MESSAGES = ("offset", "epoch", "time", "producer", "key", "value", "properties")


# ---- reading -----------------------------------------------------------------------------


@program.command()
@ledger_path
@as_json
def topics(path: str, as_json: bool) -> None:
    """List the topics: number of messages, epoch, owner, number of waiters, and kind.

    The kind is what the topic holds: messages, map, state, or events.
    """
    with open_to_read(path) as engine:
        found = (engine.topic(name) for name in engine.topics())
        if as_json:
            for topic in found:
                print(json.dumps(_topic_object(topic)))
            return
        print_table(
            ("topic", "messages", "epoch", "owner", "waiters", "kind"), map(_topic_row, found)
        )


def _topic_row(topic: xl.Topic) -> Sequence[object]:
    messages = topic.next_offset - topic.first_offset
    return topic.name, messages, topic.epoch, holder_of(topic), len(topic.waiters), topic.kind


def _topic_object(topic: xl.Topic) -> dict[str, object]:
    first, end = topic.first_offset, topic.next_offset
    return {
        "topic": topic.name, "kind": topic.kind, "serializers": topic.serializers,
        "messages": end - first, "first_offset": first, "next_offset": end, "epoch": topic.epoch,
        "holders": [fields_of(holder) for holder in topic.holders],
        "waiters": [fields_of(waiter) for waiter in topic.waiters],
    }  # fmt: skip


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
    if is_url(engine.path):
        return {"path": engine.path, "topics": stats.topics, "engines": stats.engines}
    facts = {"path": engine.path, "format": engine.ledger.format}
    return facts | {name: stats[name] for name in SIZES}


@program.command()
@ledger_path
@maybe_topic
@as_json
def stats(path: str, topic: str | None, as_json: bool) -> None:
    """Show what a ledger's processes count: messages, flushes, latencies, queues, lags, sizes.

    It counts since the first of the engines opened the ledger that have it open now. With a topic,
    show how much it has, its reader groups, and how its messages are stored. Of a cluster it shows
    topics, engines, queues and lags: each engine there counts its messages by itself.
    """
    with open_to_read(path) as engine:
        if is_url(path) and topic is None:
            _follow_topics(engine)
        found: Any = engine.stats() if topic is None else engine.topic(topic, False).stats()
    kept = ON_A_CLUSTER if is_url(path) else None
    shown = {name: value for name, value in _fields(found) if kept is None or name in kept}
    if as_json:
        print(json.dumps(_jsonable(shown)))
        return
    rows = [(name.replace("_", " "), _figure(name, value)) for name, value in shown.items()]
    print_table(("name", "value"), rows, header=False)


def _follow_topics(engine: xl.Engine) -> None:
    """An engine on a cluster has figures of those topics that it has used."""
    for name in engine.topics():
        _ = engine.topic(name, create=False).next_offset


def _fields(found: Any) -> Iterator[tuple[str, Any]]:
    from dataclasses import fields

    for each in fields(found):
        yield each.name, getattr(found, each.name)


def _jsonable(value: Any) -> Any:
    from dataclasses import is_dataclass

    if isinstance(value, xl.Histogram):
        buckets = zip(value.bounds, value.counts, strict=True)
        return {
            "count": value.count, "sum": value.sum,
            "buckets": [[None if bound == float("inf") else bound, n] for bound, n in buckets if n],
        }  # fmt: skip
    if is_dataclass(value):
        return {name: _jsonable(held) for name, held in _fields(value)}
    if isinstance(value, Mapping):
        return {name: _jsonable(held) for name, held in value.items()}
    if isinstance(value, (tuple, list)):
        return [_jsonable(held) for held in value]
    return value


def _figure(name: str, value: Any) -> str:
    if isinstance(value, xl.Histogram):
        return _histogram_text(name, value)
    if name == "oldest_reader":
        return _reader_facts(value)
    if name == "groups":
        lags = (f"{each.group} on {each.topic}: {_cell('lag', each.lag)}" for each in value)
        return ", ".join(lags) or "-"
    if name == "unresponsive":
        return ", ".join(f"{each.name} (pid {each.pid})" for each in value) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {held}" for key, held in value.items()) or "-"
    return _cell(name, value)


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
def metrics(path: str, no_topics: bool) -> None:
    """Print a ledger's metrics as OpenMetrics text, for Prometheus; needs the extra [metrics]."""
    from exclusivelog.metrics import render

    with open_to_read(path) as engine:
        if is_url(path) and not no_topics:
            _follow_topics(engine)
        sys.stdout.write(render(engine, topics=not no_topics))


def _show_topic(topic: xl.Topic, as_json: bool) -> None:
    if not as_json:
        print_table(("name", "value"), _topic_facts(topic), header=False)
        return
    last = _last_message(topic)
    print(json.dumps({
        **_topic_object(topic),
        "last_message": None if last is None else json.loads(_as_json(last)),
    }))  # fmt: skip


def _last_message(topic: xl.Topic) -> xl.Message | None:
    end = topic.next_offset
    return topic.reader(start=end - 1).read_next(timeout=0) if end > topic.first_offset else None


def _reader_facts(reader: dict[str, Any] | None) -> str:
    if reader is None:
        return "-"
    name = "" if reader["engine"] is None else f" ({reader['engine']})"
    return f"pid {reader['pid']}{name}, {reader['transactions_behind']} transactions behind"


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
    if said := _announcement(topic):
        yield "announced", said


def _announcement(topic: xl.Topic) -> str:
    said = topic.announcement
    if said is None:
        return ""
    return (
        f"{printable(pairs_of(said.info))}; {time_of(said.time)} by {said.producer_name} of "
        f"{said.engine_name} (pid {said.pid}, epoch {said.epoch})"
    )


@program.command()
@ledger_path
@maybe_topic
@click.option("--history", is_flag=True, help="Show every change of ownership so far instead.")
@as_json
def owners(path: str, topic: str | None, history: bool, as_json: bool) -> None:
    """Show each topic's owner, its hand-over if one is under way, and its queue in order."""
    with open_to_read(path) as engine:
        if history:
            _show_events(engine.history(topic), as_json)
            return
        names = engine.topics() if topic is None else [topic]
        if as_json:
            for name in names:
                for facts in _owner_facts(engine.topic(name)):
                    print(json.dumps(facts))
            return
        print_table(
            ("topic", "state", "producer", "mode", "priority", "epoch", "engine", "engine id",
             "pid", "since"),
            (row for name in names for row in _owner_rows(engine.topic(name))),
            spare=("engine id", "priority", "mode"),
        )  # fmt: skip
        for name in names:
            if said := _announcement(engine.topic(name)):
                print(f"topic {name!r}, announced: {said}")
        inside = engine.inside()
        if inside is not None:
            print(
                f"engine {inside.name!r} (id {inside.id}, pid {inside.pid}), silent for "
                f"{inside.heartbeat_age:.1f} s, is in the critical section; all writers wait for it"
            )


def _show_events(events: Iterable[xl.Event], as_json: bool) -> None:
    if as_json:
        for event in events:
            print(event.dumps().decode())
        return
    print_table(
        ("time", "topic", "epoch", "what", "reason", "from", "to", "priority"),
        (
            (
                time_of(event.time), event.topic, event.epoch, event.kind, event.reason,
                _party(event.source), _party(event.target), event.priority,
            )
            for event in events
            if event.group is None
        ),
    )  # fmt: skip


@program.command()
@ledger_path
@maybe_group
@click.option("--history", is_flag=True, help="Show every claim, loss and release so far instead.")
@as_json
def claims(path: str, group: str | None, history: bool, as_json: bool) -> None:
    """Show each claimed resource and its holder, including the readers of reader groups."""
    with open_to_read(path) as engine:
        if history:
            records = (_claim_event(event) for event in engine.history(group=group)
                       if event.group is not None)  # fmt: skip
            _list(CLAIM_HISTORY, records, as_json)
        else:
            held = (row for info in engine.claims(group) for row in _claim_rows(info))
            _list(CLAIMS, held, as_json)


def _claim_rows(info: xl.ClaimInfo) -> Iterator[dict[str, Any]]:
    for resource, generation in info.generations.items():
        yield {
            "group": info.group, "resource": resource, "generation": generation,
            "kind": "reader" if info.reader else "claim", "engine": info.engine_name,
            "engine_id": info.engine_id, "pid": info.pid, "since": info.since,
        }  # fmt: skip


def _claim_event(event: xl.Event) -> dict[str, Any]:
    return {
        "time": event.time, "group": event.group, "resource": event.resource,
        "generation": event.generation, "kind": event.kind, "reason": event.reason,
        "from": event.source, "to": event.target,
    }  # fmt: skip


@program.command()
@ledger_path
@click.argument("role", cls=Argument, metavar="[ROLE]", required=False, help="Only this role.")
@click.option("--history", is_flag=True, help="Show every change of holder so far instead.")
@as_json
def roles(path: str, role: str | None, history: bool, as_json: bool) -> None:
    """Show each role: what it binds, its holder, and its number of waiters."""
    with open_to_read(path) as engine:
        found = [info for info in engine.roles() if role in (None, info.name)]
        if history:
            for info in found:
                _show_events(engine.history(role=info.name), as_json)
        else:
            _list(ROLES, map(_role_row, found), as_json)


def _role_row(info: xl.RoleInfo) -> dict[str, Any]:
    holder = info.holder
    return {
        "role": info.name, "epoch": info.epoch, "topics": list(info.topics),
        "groups": {group: list(topics) for group, topics in info.groups.items()},
        "claims": {group: list(resources) for group, resources in info.claims.items()},
        "waiting": len(info.waiters), "engine": holder and holder.engine_name,
        "engine_id": holder and holder.engine_id, "pid": holder and holder.pid,
        "since": holder and holder.since,
    }  # fmt: skip


@program.command()
@ledger_path
@maybe_group
@as_json
def groups(path: str, group: str | None, as_json: bool) -> None:
    """Show each reader group: its position in each topic, its lag, and its reader."""
    with open_to_read(path) as engine:
        found = [info for info in engine.groups() if group in (None, info.group)]
        _list(GROUPS, (_group_row(info) for info in found), as_json)


def _group_row(info: xl.GroupInfo) -> dict[str, Any]:
    reader = info.reader
    return {
        "group": info.group, "topic": info.topic, "position": info.position, "lag": info.lag,
        "engine": None if reader is None else reader.engine_name,
        "engine_id": None if reader is None else reader.engine_id,
        "pid": None if reader is None else reader.pid,
        "since": None if reader is None else reader.since,
    }  # fmt: skip


def _list(names: Sequence[str], records: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    """Records of these fields, as JSON lines or as a table."""
    if as_json:
        for record in records:
            print(json.dumps(record))
        return
    headings = [name.replace("_", " ") for name in names]
    print_table(headings, ([_cell(name, record[name]) for name in names] for record in records))


def _cell(name: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if name in ("from", "to") and not isinstance(value, str):
        return _party(value)
    if isinstance(value, dict):
        return "; ".join(f"{key}: {', '.join(names)}" for key, names in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return time_of(value) if name in ("time", "since") else str(value)


def _party(party: Mapping[str, Any] | None) -> str:
    if party is None:
        return "-"
    producer = "" if party["producer"] is None else f"{party['producer']} of "
    return f"{producer}{party['engine_name']} (id {party['engine']}, pid {party['pid']})"


def _owner_rows(topic: xl.Topic) -> Iterator[Sequence[object]]:
    for h in topic.holders:
        shared = h.access_mode is xl.AccessMode.SHARED
        yield (
            topic.name, "holds", h.producer_name, h.access_mode, h.priority,
            "-" if shared else h.epoch, h.engine_name, h.engine_id, h.pid, second_of(h.since),
        )  # fmt: skip
    for t in topic.transfers:
        yield (
            topic.name, t.state, t.producer or (t.source.producer_name if t.source else "-"),
            "-", "-", "-", t.target.name, t.target.id, t.target.pid, f"until {second_of(t.until)}",
        )  # fmt: skip
    for w in topic.waiters:
        yield (
            topic.name, "waits", w.producer_name, xl.AccessMode.WAIT_FOR_EXCLUSIVE, w.priority,
            "-", w.engine_name, w.engine_id, w.pid, second_of(w.since),
        )  # fmt: skip


def _owner_facts(topic: xl.Topic) -> Iterator[dict[str, object]]:
    """Who holds the topic ("holds"), what is handed over ("releasing", "assigned"), who waits."""
    for h in topic.holders:
        yield {
            "topic": topic.name, "state": "holds", "producer": h.producer_name,
            "mode": str(h.access_mode), "priority": h.priority, "epoch": h.epoch,
            "engine": h.engine_name, "engine_id": h.engine_id, "pid": h.pid, "since": h.since,
            "properties": dict(h.properties),
        }  # fmt: skip
    for t in topic.transfers:
        source = t.source
        yield {
            "topic": topic.name, "state": t.state, "producer": t.producer,
            "from": source and {
                "producer": source.producer_name, "engine": source.engine_name,
                "engine_id": source.engine_id, "pid": source.pid, "epoch": source.epoch,
            },
            "engine": t.target.name, "engine_id": t.target.id, "pid": t.target.pid,
            "engine_properties": dict(t.target.properties), "until": t.until,
            "groups": list(t.groups),
        }  # fmt: skip
    for w in topic.waiters:
        yield {
            "topic": topic.name, "state": "waits", "producer": w.producer_name,
            "mode": xl.AccessMode.WAIT_FOR_EXCLUSIVE.value, "priority": w.priority,
            "engine": w.engine_name, "engine_id": w.engine_id, "pid": w.pid, "since": w.since,
            "properties": dict(w.properties),
        }  # fmt: skip


@program.command()
@ledger_path
@click.argument(
    "topics", cls=Argument, metavar="TOPIC...", nargs=-1, required=True,
    help="Topics, or one prefix of topic names.",
)  # fmt: skip
@click.option("--to", metavar="ENGINE", required=True, help="Its id or its name.")
@click.option(
    "--timeout", metavar="SECONDS", type=click.FloatRange(min=0), default=10.0,
    help="Seconds; a topic not released by then keeps its owner.",
)  # fmt: skip
@click.option(
    "--group", metavar="GROUP", multiple=True,
    help="Also move this group's claims on the topics. Repeatable.",
)  # fmt: skip
@click.option("--producer", metavar="NAME", help="Move only this producer.")
@as_json
def unload(
    path: str, topics: tuple[str, ...], to: str, timeout: float, group: tuple[str, ...],
    producer: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Hand topics over to an engine that you name, whatever the order of the queue."""
    with open_to_write(path) as engine:
        moves = engine.unload(
            topics[0] if len(topics) == 1 else topics, to=_engine_id(engine, to), timeout=timeout,
            groups=group, producer=producer,
        )  # fmt: skip
    _list(MOVES, map(_move_row, moves), as_json)
    if not all(move.ok for move in moves):
        leave(1)


def _move_row(move: xl.Move) -> dict[str, Any]:
    return {
        "topic": move.topic, "state": move.state, "epoch": move.epoch,
        "from": None if move.source is None else move.source.engine_name, "to": move.target.name,
        "reason": move.reason,
    }  # fmt: skip


def _engine_id(engine: xl.Engine, to: str) -> str:
    """The id of another engine, by its name or id; the command's own ends with it."""
    others = [other for other in engine.engines() if other.id != engine.id]
    found = [other.id for other in others if to in (other.name, other.id)]
    if len(found) > 1:
        raise ValueError(f"--to {to}: {len(found)} engines have that name; give an engine id")
    if not found:
        there = ", ".join(f"{other.name!r} (id {other.id})" for other in others)
        raise xl.LedgerError(
            f"--to {to!r} is not a live engine on {engine.path}; there is {there or 'no other'}"
        )
    return found[0]


@program.command()
@ledger_path
@as_json
def verify(path: str, as_json: bool) -> None:
    """Read the whole ledger and check it. The exit status is 1 if there is damage."""
    with open_to_read(path) as engine:
        report = engine.verify()
    found = "sound" if report.ok else f"{len(report.problems)} problems"
    counted = f"{report.topics:,} topics, {report.entries:,} entries, {report.messages:,} messages"
    text = "\n".join([*map(str, report.problems), f"{counted}: {found}"])
    print_result({"ok": report.ok, **_jsonable(report)}, text, as_json)
    if not report.ok:
        leave(1)


# ---- tail --------------------------------------------------------------------------------


@program.command()
@ledger_path
@topic_name
@click.option("--follow", "-f", is_flag=True, help="At the end, wait for new messages.")
@click.option(
    "-n", "count", metavar="N", type=click.IntRange(min=0),
    help="The last N messages (default 10). With --from: the first N from there.",
)  # fmt: skip
@click.option(
    "--from", "--since", "start", metavar="earliest|latest|OFFSET|TIME|AGE",
    help="Start there, and show all messages up to the end. An AGE: 90s, 15m, 1h, 7d. A TIME "
    "without a zone is local.",
)  # fmt: skip
@as_json
def tail(
    path: str, topic: str, follow: bool, count: int | None, start: str | None, as_json: bool
) -> None:  # fmt: skip
    """Show a topic's messages.

    A line has offset, epoch, time, producer, key, value and properties, separated by tabs; on a
    terminal it is a row of a table. `send --json` reads what --json prints.
    """
    shown = _Shown(as_json)
    with open_to_read(path) as engine:
        with engine.topic(topic).reader() as reader:
            left = _move(reader, engine.topic(topic), count, start)
            while left is None or left > 0:
                batch = reader.read_batch(1000 if left is None else min(1000, left))
                if not batch and not follow:
                    return
                # Whoever follows wants to see what there is before the wait for more.
                messages = batch or [_next(reader)]
                shown.print(messages)
                left = None if left is None else left - len(messages)


class _Shown:
    """What `tail` prints."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._table = (
            Table(MESSAGES, grows="value") if sys.stdout.isatty() and not as_json else None
        )

    def print(self, messages: Sequence[xl.Message]) -> None:
        """Print these messages."""
        if self._table is not None:
            self._table.print([*_parts(m), ""][: len(MESSAGES)] for m in messages)
            return
        for message in messages:
            print(_as_json(message) if self._as_json else "\t".join(_parts(message)))


def _next(reader: xl.Reader) -> xl.Message:
    sys.stdout.flush()
    return reader.read_next()


def _move(reader: xl.Reader, topic: xl.Topic, count: int | None, start: str | None) -> int | None:
    """Go where the options say; how many messages to show, None for all."""
    if start is None:
        first = topic.next_offset - (10 if count is None else count)
        reader.seek(max(topic.first_offset, first))
        return None
    reader.seek(start_of(start, "--from"))
    return count


def _parts(message: xl.Message) -> list[str]:
    parts: list[str] = [
        str(message.offset), str(message.epoch), time_of(message.publish_time),
        printable(message.producer_name),
        "-" if message.key is None else printable(decoded(message.key)),
        "(none)" if message.value is None else printable(decoded(message.value)),
    ]  # fmt: skip
    if message.properties:
        parts.append(printable(pairs_of(message.properties)))
    return parts


def _as_json(message: xl.Message) -> str:
    return json.dumps(message_facts(message))


# ---- send, backup, demo ------------------------------------------------------------------


@program.command()
@ledger_path
@topic_name
@click.argument(
    "values", cls=Argument, metavar="[VALUE]...", nargs=-1,
    help="Messages. Default: the lines of stdin.",
)  # fmt: skip
@click.option("--key", "-k", help="A key for every message.")
@click.option(
    "--mode", type=click.Choice(MODES), default="shared", help="The producer's access mode."
)
@click.option("--name", help="The producer's name; it has the sequence ids.")
@click.option("--priority", default=0, help="In the queue, higher priorities come first.")
@click.option(
    "--timeout", metavar="SECONDS", type=float, help="Wait in the queue at most this long."
)
@click.option(
    "--property", "properties", metavar="K=V", multiple=True,
    help="A property for every message. Repeatable.",
)  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True,
    help="Each message is a JSON object as tail --json prints it: value, key, properties, "
    "event_time.",
)  # fmt: skip
def send(
    path: str, topic: str, values: tuple[str, ...], key: str | None, mode: str, name: str | None,
    priority: int, timeout: float | None, properties: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Send messages, and print the offset of each once it is durable: a line with a number.

    The ledger and the topic are created if they are missing.
    """
    common = {"key": key, "properties": dict(_split(pair) for pair in properties)}
    with open_to_write(path, create=True) as engine:
        target = engine.topic(topic)
        if target.kind in ("map", "state"):
            raise ValueError(
                f"topic {topic!r} holds a {target.kind}, which could not be read any more after "
                "a message of another kind; change it by a program, with SharedMap or SharedState"
            )
        with target.producer(
            xl.AccessMode(mode), name=name, priority=priority, timeout=timeout
        ) as producer:
            for chunk in [_encode(values)] if values else _lines_of_stdin():
                sent = [_of_json(line) if as_json else {"value": line} for line in chunk]
                receipts = [producer.send_async(**{**common, **one}) for one in sent]
                for receipt in receipts:
                    print(receipt.result())
                sys.stdout.flush()


def _encode(values: Sequence[str]) -> list[bytes]:
    return [os.fsencode(value) for value in values]  # the bytes that the shell gave us


def _of_json(line: bytes) -> dict[str, Any]:
    """The arguments of `send` for a line of `tail --json`; what it does not have is not named."""
    try:
        found = json.loads(line)
        sent = {name: found[name] for name in ("properties", "event_time") if found.get(name)}
        if "event_time" in found:
            sent["event_time"] = found["event_time"]
        for name in ("value", "key"):
            if f"{name}_base64" in found:
                sent[name] = base64.b64decode(found[f"{name}_base64"], validate=True)
            elif name in found:
                sent[name] = None if found[name] is None else found[name].encode()
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"--json: {decoded(line[:80])!r} is no message: {error}") from None
    if "value" not in sent:
        raise ValueError(f"--json: {decoded(line[:80])!r} has neither value nor value_base64")
    return sent


def _split(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not equals:
        raise click.BadParameter(f"--property {pair}: it takes K=V")
    return name, value


def _lines_of_stdin() -> Iterator[list[bytes]]:
    """What has come, line by line: one by one from a keyboard, many at once from a file."""
    rest = b""
    while data := os.read(0, READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


@program.command()
@ledger_path
@topic_name
@as_json
def compact(path: str, topic: str, as_json: bool) -> None:
    """Compact a topic: build the view that has only the last message of each key."""
    with open_to_write(path) as engine:
        kept = engine.topic(topic, create=False).compact()
    text = f"{topic} is compacted: {kept} messages"
    print_result({"topic": topic, "messages": kept}, text, as_json)


@program.command()
@ledger_path
@topic_name
@click.option(
    "--before", metavar="OFFSET|TIME|AGE",
    help="Remove messages before this offset or time, or older than an AGE: 90s, 15m, 1h, 7d. A "
    "TIME without a zone is local.",
)  # fmt: skip
@click.option(
    "--max-bytes", metavar="BYTES", type=click.IntRange(min=0),
    help="Keep at most so many bytes of the newest messages.",
)  # fmt: skip
@as_json
def trim(
    path: str, topic: str, before: str | None, max_bytes: int | None, as_json: bool
) -> None:  # fmt: skip
    """Remove a topic's old messages for good."""
    if before is None and max_bytes is None:
        raise click.UsageError("give --before OFFSET, --max-bytes BYTES, or both")
    end = None if before is None else start_of(before, "--before")
    with open_to_write(path) as engine:
        first = engine.topic(topic, create=False).trim(end, max_bytes)
    text = f"{topic} begins at offset {first}"
    print_result({"topic": topic, "first_offset": first}, text, as_json)


@program.command()
@ledger_path
@topic_name
@click.argument(
    "method", cls=Argument, metavar="[METHOD]", required=False,
    type=click.Choice(("lz4", "zstd", "none")), help="lz4, zstd or none; without it, show it.",
)  # fmt: skip
@as_json
def compression(
    path: str, topic: str, method: Literal["lz4", "zstd", "none"] | None, as_json: bool
) -> None:
    """Show how a topic is compressed, and what that saves; or set it for new messages."""
    if method is None and not is_url(path):
        with open_to_read(path) as engine:
            _show_compression(engine.topic(topic, create=False).stats(), as_json)
        return
    chosen = None if method == "none" else method
    with open_to_write(path) as engine:
        engine.topic(topic, create=False).compression(chosen)  # a cluster refuses it
    text = f"{topic}: compression of new messages: {method}"
    print_result({"topic": topic, "compression": chosen}, text, as_json)


def _show_compression(stats: xl.TopicStats, as_json: bool) -> None:
    facts = {
        "compression": stats.compression, "entries": stats.entries, "raw_bytes": stats.raw_bytes,
        "stored_bytes": stats.stored_bytes, "ratio": round(stats.ratio, 2),
    }  # fmt: skip
    if as_json:
        print(json.dumps({**facts, "methods": dict(stats.methods)}))
        return
    rows = [(name.replace("_", " "), fact or "none") for name, fact in facts.items()]
    rows += [(f"stored as {name}", f"{size} bytes") for name, size in stats.methods.items()]
    print_table(("name", "value"), rows, header=False)


@program.command()
@ledger_path
@click.argument(
    "to", cls=Argument, metavar="TO", type=PATH,
    help="A new or empty directory, or one with an unfinished backup.",
)  # fmt: skip
@as_json
def backup(path: str, to: str, as_json: bool) -> None:
    """Copy a ledger to another directory, consistently, also while it is in use.

    Every command refuses an interrupted backup. Run the backup again with the same arguments.
    """
    with open_to_read(path) as engine:
        engine.backup(to)
    print_result({"path": path, "backup": to}, f"{path} is copied to {to}", as_json)


@program.command()
@local_path
@click.option(
    "--backup", "to", metavar="TO", type=PATH,
    help="A new or empty directory for the backup. Default: PATH.format-N.",
)  # fmt: skip
@click.option("--despite-damage", is_flag=True, help="Upgrade although the ledger is damaged.")
@as_json
def upgrade(path: str, to: str | None, despite_damage: bool, as_json: bool) -> None:
    """Back up a ledger of an earlier format, then upgrade it to this version's format.

    Close every engine on the ledger first. Earlier versions can then open only the backup.
    """
    if is_url(path):
        raise xl.UnsupportedError("upgrade is for a local ledger; a cluster has no format to raise")
    done = xl.upgrade(path, to, despite_damage=despite_damage)
    if done.backup is None:
        said = f"{path} has format {done.after} already: nothing to do"
    else:
        formats = f"from format {done.before} to {done.after}"
        said = f"{path} was upgraded {formats}; backup: {done.backup}"
    text = "\n".join([*map(str, done.problems), said])
    print_result({"path": path, **_jsonable(done)}, text, as_json)


@program.command()
@click.option(
    "--kills", metavar="N", type=click.IntRange(min=0), default=KILLS,
    help="How many leaders to kill.",
)  # fmt: skip
@click.option("--seed", metavar="N", type=int, help="Seed of the moments. Default: random.")
@click.option(
    "--path", metavar="DIR|URL", type=PATH,
    help="The log's directory, or a cluster's URL; kept and continued. Default: a temporary one.",
)  # fmt: skip
@click.option(
    "--data", metavar="DIR", type=PATH,
    help="The events and their expected result. Default: those of the package.",
)  # fmt: skip
@click.option(
    "--events", metavar="N", type=click.IntRange(min=1), help="Send only the first N events."
)
@click.option(
    "--rate", metavar="N", type=click.FloatRange(min=1), default=RATE, help="Events per second."
)
@click.option(
    "--report", metavar="FILE", type=PATH,
    help="Audit the log with Spark, and write an HTML page with charts of its leaders.",
)  # fmt: skip
@access_options
def demo(
    kills: int, seed: int | None, path: str | None, data: str | None, events: int | None,
    rate: float, report: str | None,
) -> None:  # fmt: skip
    """Send real events while leaders are killed, then check that each is there once."""
    import signal
    from pathlib import Path

    from rich.console import Console

    from exclusivelog.cli import demo as job

    # An end by SIGTERM must not leave the temporary ledger behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def where(given: str | None) -> Path | None:
        return None if given is None else Path(given)

    try:
        held = job.demo(
            Console(), path=path, data=where(data), events=events, kills=kills, seed=seed,
            rate=rate, report=where(report), access=access(),
        )  # fmt: skip
    except job.DemoError as error:
        raise ValueError(str(error)) from error
    if not held:
        leave(1)


# ---- mirror ------------------------------------------------------------------------------


@program.command()
@local_path
@click.argument(
    "topics", cls=Argument, metavar="[TOPIC]...", nargs=-1, help="Only these. Default: all."
)  # fmt: skip
@click.option(
    "--to", metavar="URL",
    help="Copy to this Pulsar namespace: pulsar://host:6650/tenant/namespace.",
)  # fmt: skip
@click.option(
    "--from", "origin", metavar="URL",
    help="Bring a log back: make PATH, a new directory, of what this namespace has.",
)  # fmt: skip
@click.option("--follow", "-f", is_flag=True, help="Go on with what is written meanwhile.")
@click.option(
    "--plain", is_flag=True,
    help="One Pulsar message each, for any consumer; slower. Default: frames of many messages.",
)  # fmt: skip
@click.option(
    "--verify", is_flag=True, help="Compare all that is mirrored with PATH; copy nothing."
)
@click.option(
    "--trimmed", type=click.Choice(("error", "earliest")), default="error",
    help="Where PATH has lost its oldest messages before the first copy: begin with the rest?",
)  # fmt: skip
@click.option(
    "--timeout", metavar="SECONDS", type=click.FloatRange(min=1), default=60.0,
    help="Seconds within which the broker has to store a message.",
)  # fmt: skip
@access_options
@as_json
def mirror(
    path: str, topics: tuple[str, ...], to: str | None, origin: str | None, follow: bool,
    plain: bool, verify: bool, trimmed: Any, timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Copy a log to a namespace of a Pulsar cluster, exactly once, or bring it back from there.

    Every few seconds it prints how far each topic is. Stop it whenever you like, and run it again:
    it goes on behind the last message that the cluster has.
    """
    if to is None:
        if origin is None or follow or plain or verify:
            raise click.UsageError("give --to URL, or --from URL and no option of --to")
        _restore_from(path, topics, origin, timeout, as_json)
        return
    if origin is not None:
        raise click.UsageError("give either --to URL or --from URL")
    if is_url(path):
        raise xl.UnsupportedError(
            "mirror copies a local log to a cluster; bring one back first: "
            f"exclusivelog mirror NEW --from {path}"
        )
    from exclusivelog.cluster import Mirror

    with xl.open(path, ENGINE_NAME, readonly=True) as engine:
        with Mirror(
            engine, to, topics or None, plain=plain, trimmed=trimmed, timeout=timeout, **access()
        ) as copy:  # fmt: skip
            if verify:
                for name, found in copy.verify().items():
                    text = f"{found.compared:,} compared, no difference; {found.lag:,} behind"
                    facts = {"topic": name, "compared": found.compared, "lag": found.lag}
                    print_result(facts, f"{name}: {text}", as_json)
            else:
                _run_mirror(copy, follow, as_json)


def _restore_from(
    path: str, topics: Sequence[str], origin: str, timeout: float, as_json: bool
) -> None:  # fmt: skip
    from exclusivelog.restoring import restore

    given = {name: value for name, value in access().items() if name != "check_policies"}
    for name, count in restore(path, origin, topics or None, timeout=timeout, **given).items():
        print_result({"topic": name, "messages": count}, f"{name}: {count:,} messages", as_json)


def _run_mirror(copy: Any, follow: bool, as_json: bool) -> None:
    import signal

    signal.signal(signal.SIGTERM, lambda *_: copy.stop())
    copy.start(follow)
    before: list[Any] = []
    while True:
        ended = copy.wait(0 if not before else PROGRESS_SECONDS)
        now = copy.progress()
        if now != before or ended:  # nothing new is nothing to say
            for one in now:
                if as_json:
                    print(json.dumps({**fields_of(one), "lag": one.lag}))
                elif one.begun:
                    print(f"{one.topic}: {one.position:,} mirrored, {one.lag:,} behind")
            sys.stdout.flush()
        if ended:
            return
        before = now
