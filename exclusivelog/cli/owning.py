"""`owners`, `claims`, `roles`, `groups` and `unload`: owners, waiters and hand-overs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

import exclusivelog as xl
from exclusivelog.cli import names
from exclusivelog.cli.locks import in_use, print_holders, role_facts, subject_of
from exclusivelog.cli.output import (
    announcement_of,
    of_each,
    party_of,
    print_records,
    print_result,
    print_table,
    second_of,
    time_of,
)
from exclusivelog.cli.program import (
    Argument,
    as_json,
    confirm,
    leave,
    ledger_path,
    maybe_group,
    maybe_topic,
    open_to_read,
    open_to_write,
    program,
    yes,
)

HOLDER = ("engine", "engine_id", "pid", "since")
CLAIMS = ("group", "resource", "generation", "kind", *HOLDER)
ROLES = ("role", "epoch", "topics", "groups", "claims", "waiting", *HOLDER)
CLAIM_HISTORY = ("time", "group", "resource", "generation", "kind", "reason", "from", "to")
GROUPS = ("group", "topic", "position", "lag", *HOLDER)
MOVES = ("topic", "state", "epoch", "from", "to", "reason")


@program.command()
@ledger_path
@maybe_topic
@click.option("--history", is_flag=True, help="Show every change of ownership so far instead.")
@as_json
def owners(path: str, topic: str | None, history: bool, as_json: bool) -> None:
    """Show each topic's owner, its hand-over if one is under way, and its queue in order.

    Without TOPIC, also show the holder and the waiters of each lock and role; TOPIC may be the
    name of one.
    """
    with open_to_read(path) as engine:
        topics, roles = _subjects(engine, topic)
        if history:
            for info in roles if topic is not None else ():
                _show_events(engine.history(role=info.name), as_json)
            if topics or topic is None:
                _show_events(engine.history(topic), as_json)
            return
        if as_json:
            for facts in of_each(engine, topics, owner_facts):
                print(json.dumps(facts))
            for info in roles:
                for facts in role_facts(info):
                    print(json.dumps(facts))
            return
        if topics or topic is None:
            _print_owners(engine, topics)
        print_holders(roles)
        inside = engine.inside()
        if inside is not None:
            print(
                f"engine {inside.name!r} (id {inside.id}, pid {inside.pid}), silent for "
                f"{inside.heartbeat_age:.1f} s, is in the critical section; all writers wait for it"
            )


def _subjects(engine: xl.Engine, name: str | None) -> tuple[list[str], list[xl.RoleInfo]]:
    """The topics, and the locks and roles, that are to be shown: all, or those of this name."""
    if name is None:
        return engine.topics(), [*in_use(engine)]
    is_topic = name in engine.topics()
    if is_topic and not engine.supports("roles"):
        return [name], []  # on a cluster, each lock that is listed costs a look at its log
    roles = [info for info in engine.roles() if info.name == name]
    if not is_topic and not roles:
        engine.topic(name, create=False)  # raises the error, with names that are like it
    return [] if roles and not is_topic else [name], roles


def _print_owners(engine: xl.Engine, topics: Sequence[str]) -> None:
    print_table(
        (
            "topic",
            "state",
            "producer",
            "mode",
            "priority",
            "epoch",
            "engine",
            "engine id",
            "pid",
            "since",
        ),
        of_each(engine, topics, _owner_rows),
        spare=("engine id", "priority", "mode"),
    )
    for name, said in of_each(engine, topics, lambda topic: [(topic.name, announcement_of(topic))]):
        if said:
            print(f"topic {name!r}, announced: {said}")


def _owner_rows(topic: xl.Topic) -> Iterator[Sequence[object]]:
    for h in topic.holders:
        yield (
            topic.name,
            "holds",
            h.producer_name,
            h.access_mode,
            h.priority,
            h.epoch if h.access_mode.is_exclusive else "-",
            h.engine_name,
            h.engine_id,
            h.pid,
            second_of(h.since),
        )
    for t in topic.transfers:
        yield (
            topic.name,
            t.state,
            t.producer or (t.source.producer_name if t.source else "-"),
            "-",
            "-",
            "-",
            t.target.name,
            t.target.id,
            t.target.pid,
            f"until {second_of(t.until)}",
        )
    for w in topic.waiters:
        yield (
            topic.name,
            "waits",
            w.producer_name,
            w.access_mode,
            w.priority,
            "-",
            w.engine_name,
            w.engine_id,
            w.pid,
            second_of(w.since),
        )


def owner_facts(topic: xl.Topic) -> Iterator[dict[str, object]]:
    """The topic's holders ("holds"), hand-overs ("releasing", "assigned") and waiters ("waits")."""
    for h in topic.holders:
        yield {
            "topic": topic.name,
            "state": "holds",
            "producer": h.producer_name,
            "mode": str(h.access_mode),
            "priority": h.priority,
            "epoch": h.epoch,
            "engine": h.engine_name,
            "engine_id": h.engine_id,
            "pid": h.pid,
            "since": h.since,
            "properties": dict(h.properties),
        }
    for t in topic.transfers:
        source = t.source
        yield {
            "topic": topic.name,
            "state": t.state,
            "producer": t.producer,
            "from": source
            and {
                "producer": source.producer_name,
                "engine": source.engine_name,
                "engine_id": source.engine_id,
                "pid": source.pid,
                "epoch": source.epoch,
            },
            "engine": t.target.name,
            "engine_id": t.target.id,
            "pid": t.target.pid,
            "engine_properties": dict(t.target.properties),
            "until": t.until,
            "groups": list(t.groups),
        }
    for w in topic.waiters:
        yield {
            "topic": topic.name,
            "state": "waits",
            "producer": w.producer_name,
            "mode": str(w.access_mode),
            "priority": w.priority,
            "engine": w.engine_name,
            "engine_id": w.engine_id,
            "pid": w.pid,
            "since": w.since,
            "properties": dict(w.properties),
        }


def _show_events(events: Iterable[xl.Event], as_json: bool) -> None:
    if as_json:
        for event in events:
            print(event.dumps().decode())
        return
    print_table(
        ("time", "topic", "epoch", "what", "reason", "from", "to", "priority"),
        (
            (
                time_of(event.time),
                subject_of(event),
                event.epoch,
                event.kind,
                event.reason,
                party_of(event.source),
                party_of(event.target),
                event.priority,
            )
            for event in events
            if event.group is None
        ),
    )


@program.command()
@ledger_path
@maybe_group(names.claim_groups)
@click.option("--history", is_flag=True, help="Show every claim, loss and release so far instead.")
@as_json
def claims(path: str, group: str | None, history: bool, as_json: bool) -> None:
    """Show each claimed resource and its holder, including the readers of reader groups."""
    with open_to_read(path) as engine:
        if history:
            records = (
                _claim_event(event)
                for event in engine.history(group=group)
                if event.group is not None
            )
            print_records(CLAIM_HISTORY, records, as_json)
        else:
            held = (row for info in engine.claims(group) for row in _claim_rows(info))
            print_records(CLAIMS, held, as_json)


def _claim_rows(info: xl.ClaimInfo) -> Iterator[dict[str, Any]]:
    for resource, generation in info.generations.items():
        yield {
            "group": info.group,
            "resource": resource,
            "generation": generation,
            "kind": "reader" if info.reader else "claim",
            "engine": info.engine_name,
            "engine_id": info.engine_id,
            "pid": info.pid,
            "since": info.since,
        }


def _claim_event(event: xl.Event) -> dict[str, Any]:
    return {
        "time": event.time,
        "group": event.group,
        "resource": event.resource,
        "generation": event.generation,
        "kind": event.kind,
        "reason": event.reason,
        "from": event.source,
        "to": event.target,
    }


@program.command()
@ledger_path
@click.argument(
    "role",
    cls=Argument,
    metavar="[ROLE]",
    required=False,
    help="Only this role.",
    shell_complete=names.roles,
)
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
            print_records(ROLES, map(_role_row, found), as_json)


def _role_row(info: xl.RoleInfo) -> dict[str, Any]:
    holder = info.holder
    return {
        "role": info.name,
        "epoch": info.epoch,
        "topics": list(info.topics),
        "groups": {group: list(topics) for group, topics in info.groups.items()},
        "claims": {group: list(resources) for group, resources in info.claims.items()},
        "waiting": len(info.waiters),
        "engine": holder and holder.engine_name,
        "engine_id": holder and holder.engine_id,
        "pid": holder and holder.pid,
        "since": holder and holder.since,
    }


@program.command()
@ledger_path
@maybe_group(names.groups)
@click.option("--delete", is_flag=True, help="Remove the positions of GROUP, which has no reader.")
@yes
@as_json
def groups(path: str, group: str | None, delete: bool, yes: bool, as_json: bool) -> None:
    """Show each reader group: its position in each topic, its lag, and its reader.

    With --delete, remove a group that is no longer used, so that its lag is no longer reported.
    """
    if delete:
        _delete_group(path, group, yes, as_json)
        return
    with open_to_read(path) as engine:
        found = [info for info in engine.groups() if group in (None, info.group)]
        print_records(GROUPS, (_group_row(info) for info in found), as_json)


def _delete_group(path: str, group: str | None, yes: bool, as_json: bool) -> None:
    if group is None:
        raise click.UsageError("--delete: give GROUP")
    with open_to_write(path) as engine:
        topics = sum(info.group == group for info in engine.groups())
        confirm(f"Remove the positions of group {group} on {topics} topics?", yes)
        count = engine.delete_group(group)
    text = f"group {group} is deleted: its positions on {count} topics are removed"
    print_result({"group": group, "deleted_positions": count}, text, as_json)


def _group_row(info: xl.GroupInfo) -> dict[str, Any]:
    reader = info.reader
    return {
        "group": info.group,
        "topic": info.topic,
        "position": info.position,
        "lag": info.lag,
        "engine": None if reader is None else reader.engine_name,
        "engine_id": None if reader is None else reader.engine_id,
        "pid": None if reader is None else reader.pid,
        "since": None if reader is None else reader.since,
    }


@program.command()
@ledger_path
@click.argument(
    "topics",
    cls=Argument,
    metavar="TOPIC...",
    nargs=-1,
    required=True,
    help="Topics, or one prefix of topic names.",
    shell_complete=names.topics,
)
@click.option(
    "--to",
    metavar="ENGINE",
    required=True,
    help="Its id or its name.",
    shell_complete=names.engines,
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=10.0,
    help="Seconds; a topic not released by then keeps its owner.",
)
@click.option(
    "--group",
    metavar="GROUP",
    multiple=True,
    shell_complete=names.claim_groups,
    help="Also move this group's claims on the topics. Repeatable.",
)
@click.option("--producer", metavar="NAME", help="Move only this producer.")
@as_json
def unload(
    path: str,
    topics: tuple[str, ...],
    to: str,
    timeout: float,
    group: tuple[str, ...],
    producer: str | None,
    as_json: bool,
) -> None:
    """Hand topics over to a chosen engine, whatever the order of the queue."""
    with open_to_write(path) as engine:
        moves = engine.unload(
            topics[0] if len(topics) == 1 else topics,
            to=_engine_id(engine, to),
            timeout=timeout,
            groups=group,
            producer=producer,
        )
    print_records(MOVES, map(_move_row, moves), as_json)
    if not all(move.ok for move in moves):
        leave(1)


def _move_row(move: xl.Move) -> dict[str, Any]:
    return {
        "topic": move.topic,
        "state": move.state,
        "epoch": move.epoch,
        "from": None if move.source is None else move.source.engine_name,
        "to": move.target.name,
        "reason": move.reason,
    }


def _engine_id(engine: xl.Engine, to: str) -> str:
    """The id of the engine with this name or id, other than the command's own."""
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
