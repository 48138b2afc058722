"""The commands, one function each; `arguments.py` reads their arguments from the signatures."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import exclusivelog as xl
from exclusivelog.cli.arguments import Argument, Option, WrongArgument

LedgerPath = Annotated[str, Argument("The ledger's directory.", metavar="PATH")]
TopicName = Annotated[str, Argument("The topic's name.", metavar="TOPIC")]
AsJson = Annotated[bool, Option("--json", help="JSON, with all that is known: an object a line.")]
MaybeGroup = Annotated[str | None, Argument("Only this group.", metavar="GROUP")]
MaybeTopic = Annotated[str | None, Argument("Only this topic.", metavar="TOPIC")]

ENGINE_NAME = "cli"
READ_BYTES = 1 << 16
MODES = ("shared", "exclusive", "wait_for_exclusive", "exclusive_with_fencing")
HOLDER = ("engine", "engine_id", "pid", "since")
CLAIMS = ("group", "resource", "generation", "kind", *HOLDER)
ROLES = ("role", "epoch", "topics", "groups", "claims", "waiting", *HOLDER)
CLAIM_HISTORY = ("time", "group", "resource", "generation", "kind", "reason", "from", "to")
GROUPS = ("group", "topic", "position", "lag", *HOLDER)


class Failed(Exception):
    """The command has said what is wrong: exit status 1."""


def is_told(error: Exception) -> bool:
    """Is this error one line for the user, not a fault of the program?"""
    return isinstance(error, (xl.ExclusiveLogError, ValueError, OSError))


# ---- reading -----------------------------------------------------------------------------


def _look(path: str) -> xl.Engine:
    return xl.open(path, ENGINE_NAME, readonly=True)


def topics(path: LedgerPath, as_json: AsJson = False) -> None:
    """List the topics: messages, epoch, owner, how many wait, and what each holds.

    The last column is messages, map, state, or events.
    """
    with _look(path) as engine:
        found = (engine.topic(name) for name in engine.topics())
        if as_json:
            for topic in found:
                print(json.dumps(_topic_object(topic)))
            return
        _table(("topic", "messages", "epoch", "owner", "waiters", "kind"), map(_topic_row, found))


def _topic_row(topic: xl.Topic) -> Sequence[object]:
    messages = topic.next_offset - topic.first_offset
    return topic.name, messages, topic.epoch, _who_holds(topic), len(topic.waiters), topic.kind


def _topic_object(topic: xl.Topic) -> dict[str, object]:
    first, end = topic.first_offset, topic.next_offset
    return {
        "topic": topic.name, "kind": topic.kind, "serializers": topic.serializers,
        "messages": end - first, "first_offset": first, "next_offset": end, "epoch": topic.epoch,
        "holders": [_object(holder) for holder in topic.holders],
        "waiters": [_object(waiter) for waiter in topic.waiters],
    }  # fmt: skip


def _object(info: Any) -> dict[str, Any]:
    from dataclasses import asdict  # an engine has imported it; the help need not

    return asdict(info)


def _who_holds(topic: xl.Topic) -> str:
    holders = topic.holders
    if holders and holders[0].access_mode is xl.AccessMode.SHARED:
        return f"{len(holders)} shared"
    return f"{holders[0].producer_name} (pid {holders[0].pid})" if holders else "-"


def info(path: LedgerPath, topic: MaybeTopic = None, as_json: AsJson = False) -> None:
    """Show what a ledger uses and who has it open, or a topic's facts."""
    with _look(path) as engine:
        if topic is not None:
            _show_topic(engine.topic(topic), as_json)
            return
        facts = {"path": engine.path, "format": engine.ledger.format, **engine.stats()}
        if as_json:
            print(json.dumps({**facts, "engines": [_object(e) for e in engine.engines()]}))
            return
        facts["oldest_reader"] = _reader_facts(facts["oldest_reader"])
        _table(("", ""), ((name.replace("_", " "), fact) for name, fact in facts.items()),
               header=False)  # fmt: skip
        print()
        _table(
            ("engine", "id", "pid", "heartbeat", "properties"),
            (
                (e.name, e.id, e.pid, f"{e.heartbeat_age:.1f} s ago", _pairs(e.properties))
                for e in engine.engines()
            ),
        )


def _show_topic(topic: xl.Topic, as_json: bool) -> None:
    if not as_json:
        _table(("", ""), _topic_facts(topic), header=False)
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
        yield "last message", f"{_time(last.publish_time)} by {last.producer_name}"
    yield "owner", _who_holds(topic)
    yield "waiters", len(topic.waiters)
    if said := _announcement(topic):
        yield "announced", said


def _announcement(topic: xl.Topic) -> str:
    said = topic.announcement
    if said is None:
        return ""
    return (
        f"{_printable(_pairs(said.info))}; {_time(said.time)} by {said.producer_name} of "
        f"{said.engine_name} (pid {said.pid}, epoch {said.epoch})"
    )


def owners(
    path: LedgerPath,
    topic: MaybeTopic = None,
    history: Annotated[
        bool, Option("--history", help="Every change of ownership so far, instead.")
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="One JSON object a line, with all that is known.")
    ] = False,
) -> None:
    """Show who holds, what is being handed over to whom, and who waits, the next one first."""
    with _look(path) as engine:
        if history:
            _show_events(engine.history(topic), as_json)
            return
        names = engine.topics() if topic is None else [topic]
        if as_json:
            for name in names:
                for facts in _owner_facts(engine.topic(name)):
                    print(json.dumps(facts))
            return
        _table(
            ("topic", "", "producer", "mode", "priority", "epoch", "engine", "engine id", "pid",
             "since"),
            (row for name in names for row in _owner_rows(engine.topic(name))),
        )  # fmt: skip
        for name in names:
            if said := _announcement(engine.topic(name)):
                print(f"topic {name!r}, announced: {said}")
        inside = engine.inside()
        if inside is not None:
            print(
                f"engine {inside.name!r} (id {inside.id}, pid {inside.pid}), silent for "
                f"{inside.heartbeat_age:.1f} s, is inside the ledger; others wait for it"
            )


def _show_events(events: Iterable[xl.Event], as_json: bool) -> None:
    if as_json:
        for event in events:
            print(event.dumps().decode())
        return
    _table(
        ("time", "topic", "epoch", "what", "reason", "from", "to", "priority"),
        (
            (
                _time(event.time), event.topic, event.epoch, event.kind, event.reason,
                _party(event.source), _party(event.target), event.priority,
            )
            for event in events
            if event.group is None
        ),
    )  # fmt: skip


def claims(
    path: LedgerPath,
    group: MaybeGroup = None,
    history: Annotated[
        bool, Option("--history", help="Every claim, loss and release so far, instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show who holds which resource, a line for each, also readers of groups."""
    with _look(path) as engine:
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


def roles(
    path: LedgerPath,
    role: Annotated[str | None, Argument("Only this role.")] = None,
    history: Annotated[
        bool, Option("--history", help="Every change of holder so far, instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the roles: what each binds, who holds it, and how many wait for it."""
    with _look(path) as engine:
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


def groups(
    path: LedgerPath,
    group: MaybeGroup = None,
    as_json: AsJson = False,
) -> None:
    """Show the reader groups: where they go on in each topic, how far behind, and who reads."""
    with _look(path) as engine:
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
    _table(headings, ([_cell(name, record[name]) for name in names] for record in records))


def _cell(name: str, value: Any) -> str:
    if name in ("from", "to"):
        return _party(value)
    if value is None or value == "":
        return "-"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {', '.join(names)}" for key, names in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return _time(value) if name in ("time", "since") else str(value)


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
            "-" if shared else h.epoch, h.engine_name, h.engine_id, h.pid, _time(h.since),
        )  # fmt: skip
    for t in topic.transfers:
        yield (
            topic.name, t.state, t.producer or (t.source.producer_name if t.source else "-"),
            "-", "-", "-", t.target.name, t.target.id, t.target.pid, f"until {_time(t.until)}",
        )  # fmt: skip
    for w in topic.waiters:
        yield (
            topic.name, "waits", w.producer_name, xl.AccessMode.WAIT_FOR_EXCLUSIVE, w.priority,
            "-", w.engine_name, w.engine_id, w.pid, _time(w.since),
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


def unload(
    path: LedgerPath,
    topics: Annotated[
        list[str],
        Argument("Topics, or one prefix of names.", metavar="TOPIC..."),
    ],
    to: Annotated[
        str,
        Option("--to", metavar="ENGINE", help="Its id, or its name."),
    ],
    timeout: Annotated[
        float, Option(min=0, help="Seconds; an owner that is late keeps its topic.")
    ] = 10.0,
    group: Annotated[
        list[str] | None,
        Option(
            "--group", metavar="GROUP",
            help="Its claims on the topics move along; repeat.",
        ),
    ] = None,
    producer: Annotated[
        str | None,
        Option(
            "--producer", metavar="NAME", help="Only this producer moves."
        ),
    ] = None,
) -> None:  # fmt: skip
    """Move the ownership of topics to another engine, without an election."""
    with xl.open(path, ENGINE_NAME, create=False) as engine:
        moves = engine.unload(
            topics[0] if len(topics) == 1 else topics, to=_engine_id(engine, to), timeout=timeout,
            groups=group or (), producer=producer,
        )  # fmt: skip
    _table(
        ("topic", "state", "epoch", "from", "to", ""),
        (
            (
                move.topic, move.state, move.epoch,
                "-" if move.source is None else move.source.engine_name, move.target.name,
                move.reason,
            )
            for move in moves
        ),
    )  # fmt: skip
    if not all(move.ok for move in moves):
        raise Failed


def _engine_id(engine: xl.Engine, name: str) -> str:
    named = [other.id for other in engine.engines() if other.name == name]
    if len(named) > 1:
        raise ValueError(f"--to {name}: {len(named)} engines have that name; take an id")
    return named[0] if named else name


def verify(path: LedgerPath) -> None:
    """Read and check everything; exit status 1 if something is wrong."""
    with _look(path) as engine:
        report = engine.verify()
    for problem in report.problems:
        print(problem)
    found = "sound" if report.ok else f"{len(report.problems)} problems"
    print(
        f"{report.topics:,} topics, {report.entries:,} entries, {report.messages:,} messages: "
        f"{found}"
    )
    if not report.ok:
        raise Failed


# ---- tail --------------------------------------------------------------------------------


def tail(
    path: LedgerPath,
    topic: TopicName,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Wait for more at the end.")
    ] = False,
    count: Annotated[
        int | None,
        Option(
            "-n", min=0, metavar="N",
            help="The last N messages (10 unless told); with --from: the first N from there.",
        ),
    ] = None,
    start: Annotated[
        str | None,
        Option(
            "--from", metavar="earliest|latest|OFFSET",
            help="Begin there, and show all from there on.",
        ),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="One JSON object a line, with all that is known.")
    ] = False,
) -> None:  # fmt: skip
    """Show a topic's messages.

    A line has offset, epoch, time, producer, key, value and properties, separated by tabs.
    """
    show = _as_json if as_json else _as_text
    with _look(path) as engine:
        with engine.topic(topic).reader() as reader:
            left = _move(reader, engine.topic(topic), count, start)
            while left is None or left > 0:
                batch = reader.read_batch(1000 if left is None else min(1000, left))
                if not batch and not follow:
                    return
                # Whoever follows wants to see what there is before the wait for more.
                messages = batch or [_next(reader)]
                for message in messages:
                    print(show(message))
                left = None if left is None else left - len(messages)


def _next(reader: xl.Reader) -> xl.Message:
    sys.stdout.flush()
    return reader.read_next()


def _move(reader: xl.Reader, topic: xl.Topic, count: int | None, start: str | None) -> int | None:
    """Go where the options say; how many messages to show, None for all."""
    if start is None:
        first = topic.next_offset - (10 if count is None else count)
        reader.seek(max(topic.first_offset, first))
        return None
    if start in ("earliest", "latest"):
        reader.seek(start)
    elif start.isdecimal():
        reader.seek(int(start))
    else:
        raise WrongArgument(f"--from {start}: it takes earliest, latest, or an offset")
    return count


def _as_text(message: xl.Message) -> str:
    parts: list[str] = [
        str(message.offset), str(message.epoch), _time(message.publish_time),
        _printable(message.producer_name),
        "-" if message.key is None else _printable(_text(message.key)),
        "(none)" if message.value is None else _printable(_text(message.value)),
    ]  # fmt: skip
    if message.properties:
        parts.append(_printable(_pairs(message.properties)))
    return "\t".join(parts)


def _as_json(message: xl.Message) -> str:
    facts: dict[str, object] = {
        "offset": message.offset, "epoch": message.epoch, "publish_time": message.publish_time,
        "event_time": message.event_time, "producer": message.producer_name,
        "sequence_id": message.sequence_id, "properties": message.properties,
    }  # fmt: skip
    data: bytes | None
    for name, data in (("key", message.key), ("value", message.value)):
        try:
            facts[name] = None if data is None else data.decode()
        except UnicodeDecodeError:
            facts[f"{name}_base64"] = base64.b64encode(data or b"").decode()
    return json.dumps(facts)


# ---- send, backup, demo ------------------------------------------------------------------


def send(
    path: LedgerPath,
    topic: TopicName,
    values: Annotated[
        list[str] | None,
        Argument("The messages; none: stdin's lines.", metavar="VALUE"),
    ] = None,
    key: Annotated[
        str | None, Option("--key", "-k", help="A key for every message.")
    ] = None,
    mode: Annotated[
        str,
        Option("--mode", choices=MODES, help="How the topic is shared with others."),
    ] = "shared",
    name: Annotated[
        str | None, Option("--name", help="The producer's name; sequence ids go by it.")
    ] = None,
    priority: Annotated[
        int, Option("--priority", help="Place in the queue: higher first.")
    ] = 0,
    timeout: Annotated[
        float | None,
        Option("--timeout", metavar="SECONDS", help="Wait in the queue no longer."),
    ] = None,
    properties: Annotated[
        list[str] | None,
        Option("--property", metavar="K=V", help="A property for every message; repeat."),
    ] = None,
) -> None:  # fmt: skip
    """Send messages, and print each one's offset once it is durable.

    Makes the ledger and the topic if there is none.
    """
    pairs = dict(_split(pair) for pair in properties or [])
    with xl.open(path, ENGINE_NAME) as engine:
        with engine.topic(topic).producer(
            mode, name=name, priority=priority, timeout=timeout
        ) as producer:
            for chunk in [_encode(values)] if values else _lines_of_stdin():
                receipts = [producer.send_async(v, key=key, properties=pairs) for v in chunk]
                for receipt in receipts:
                    print(receipt.result())
                sys.stdout.flush()


def _encode(values: Sequence[str]) -> list[bytes]:
    return [os.fsencode(value) for value in values]  # the bytes that the shell gave us


def _split(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not equals:
        raise WrongArgument(f"--property {pair}: it takes K=V")
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


def compact(path: LedgerPath, topic: TopicName) -> None:
    """Make a topic's compacted view anew: the last message of every key."""
    with xl.open(path, ENGINE_NAME, create=False) as engine:
        kept = engine.topic(topic, create=False).compact()
    print(f"{topic} is compacted: {kept} messages")


def trim(
    path: LedgerPath,
    topic: TopicName,
    before: Annotated[
        int | None, Option(min=0, help="What stands before this offset goes.")
    ] = None,
    max_bytes: Annotated[
        int | None, Option(min=0, help="Of the newest entries that may stay.")
    ] = None,
) -> None:
    """Remove a topic's old messages for good."""
    with xl.open(path, ENGINE_NAME, create=False) as engine:
        first = engine.topic(topic, create=False).trim(before, max_bytes)
    print(f"{topic} begins at offset {first}")


def backup(
    path: LedgerPath,
    to: Annotated[
        str,
        Argument("A new or empty directory, or one with an unfinished backup.", metavar="TO"),
    ],
) -> None:
    """Copy a ledger, consistent and compacted, while others write.

    If it is interrupted, every command refuses the copy; run it again with the same arguments.
    """
    with _look(path) as engine:
        engine.backup(to)
    print(f"{path} is copied to {to}")


def upgrade(
    path: LedgerPath,
    to: Annotated[
        str | None,
        Option(
            "--backup", metavar="TO",
            help="A new or empty directory for the backup; else PATH.format-N, beside the ledger.",
        ),
    ] = None,
    despite_damage: Annotated[
        bool, Option("--despite-damage", help="Upgrade a ledger that is damaged, as it is.")
    ] = False,
) -> None:  # fmt: skip
    """Raise a ledger of an earlier format to this version's, after a complete backup.

    Close every engine on the ledger first. Earlier versions open the backup, and no longer the
    ledger.
    """
    done = xl.upgrade(path, to, despite_damage=despite_damage)
    for problem in done.problems:
        print(problem)
    if done.backup is None:
        print(f"{path} has format {done.after} already: nothing to do")
        return
    print(f"{path} was raised from format {done.before} to {done.after}; backup: {done.backup}")


def demo(
    kills: Annotated[
        int | None, Option(min=0, help="How many leaders to kill; 20 unless told.")
    ] = None,
    seed: Annotated[int | None, Option(help="Chooses when; random unless told.")] = None,
    path: Annotated[
        str | None,
        Option(
            metavar="DIR",
            help="Keep the ledger there, and go on with what is in it; else a temporary one.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        Option(
            metavar="DIR", help="The events and the truth; else examples/data beside the source."
        ),
    ] = None,
    events: Annotated[int | None, Option(min=1, help="Only the first of the events.")] = None,
    rate: Annotated[
        float | None, Option(min=1, help="Events that come in per second; 2000 unless told.")
    ] = None,
    report: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Let Spark audit the log, and write a page with its leaders in pictures.",
        ),
    ] = None,
) -> None:
    """Send real events through leaders that are killed: is each there, once?"""
    import signal
    from pathlib import Path

    try:
        from rich.console import Console
    except ImportError:
        raise ValueError("the demo needs more: pip install exclusivelog[cli]") from None
    from exclusivelog import demo as job

    # An end by SIGTERM must not leave the temporary ledger behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def where(given: str | None) -> Path | None:
        return None if given is None else Path(given)

    try:
        held = job.demo(
            Console(), path=where(path), data=where(data), events=events,
            kills=job.DEFAULT_KILLS if kills is None else kills, seed=seed,
            rate=job.DEFAULT_RATE if rate is None else rate, report=where(report),
        )  # fmt: skip
    except job.DemoError as error:
        raise ValueError(str(error)) from error
    if not held:
        raise Failed


# ---- output ------------------------------------------------------------------------------


def _table(names: Sequence[str], rows: Iterable[Sequence[object]], header: bool = True) -> None:
    cells = [[_printable(str(cell)) for cell in row] for row in rows]
    if not (sys.stdout.isatty() and _draw(names, cells, header)):
        for line in [names, *cells] if header else cells:
            print("\t".join(line))


def _draw(names: Sequence[str], cells: Iterable[Sequence[str]], header: bool) -> bool:
    """Draw a table; False where rich is not installed."""
    try:  # here: its import takes as long as all the rest
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(*names, box=box.SIMPLE_HEAD, show_header=header)
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    # A terminal that is too narrow breaks the lines; rich would cut the cells.
    needed = Console(width=1000).measure(table).maximum
    Console(width=max(needed, Console().width)).print(table)
    return True


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _printable(text: str) -> str:
    """Control characters escaped: a message must not move the cursor, or end its line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _pairs(properties: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in properties.items())


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
