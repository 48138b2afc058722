"""Locks and roles, as `owners`, `top` and `serve` show them: who holds each, and who waits for it.

One that is free, and for which no process waits, is left out; `roles` lists it until it is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import exclusivelog as xl
from exclusivelog.cli.output import print_table, second_of
from exclusivelog.types import PREFIX

COLUMNS = ("lock or role", "epoch", "holder", "waiters", "queue")
FIELDS = ("role", "state", "mode", "priority", "epoch", "engine", "engine_id", "pid", "since")
QUEUE_SHOWN = 10  # of a line's waiters


class RoleLine(NamedTuple):
    """A lock or role at one moment. `queue`: its first waiters, in the order of promotion."""

    role: str
    epoch: int
    holder: str
    waiters: int
    queue: list[str]


def in_use(engine: xl.Engine) -> Iterator[xl.RoleInfo]:
    """The locks and roles that have a holder or a waiter, by name."""
    return (info for info in engine.roles() if info.holder is not None or info.waiters)


def role_line(info: xl.RoleInfo) -> RoleLine:
    """A line about it."""
    holder = "-" if info.holder is None else _engine_of(info.holder)
    queue = [_engine_of(each) for each in info.waiters[:QUEUE_SHOWN]]
    return RoleLine(info.name, info.epoch, holder, len(info.waiters), queue)


def role_cells(line: RoleLine) -> tuple[str, ...]:
    """Its cells in a table with `COLUMNS`."""
    hidden = line.waiters - len(line.queue)
    queue = [*line.queue, f"{hidden:,} more"] if hidden else line.queue
    return line.role, str(line.epoch), line.holder, str(line.waiters), ", ".join(queue) or "-"


def _engine_of(session: xl.OwnerInfo | xl.WaiterInfo) -> str:
    return f"{session.engine_name} (pid {session.pid})"


def subject_of(event: xl.Event) -> str:
    """What a change of ownership is about: a topic, a lock or role, or a claimed resource."""
    if not event.topic:
        return f"{event.group}/{event.resource}"
    name = event.topic.removeprefix(PREFIX)
    return name if name == event.topic else f"lock or role {name}"


def role_facts(info: xl.RoleInfo) -> Iterator[dict[str, Any]]:
    """Its holder ("holds"), and its waiters ("waits") in the order of their promotion."""
    holders = () if info.holder is None else (info.holder,)
    for state, sessions in (("holds", holders), ("waits", info.waiters)):
        for each in sessions:
            yield {
                "role": info.name,
                "state": state,
                "mode": str(each.access_mode),
                "priority": each.priority,
                **({"epoch": each.epoch} if isinstance(each, xl.OwnerInfo) else {}),
                "engine": each.engine_name,
                "engine_id": each.engine_id,
                "pid": each.pid,
                "since": each.since,
            }


def print_holders(roles: Sequence[xl.RoleInfo]) -> None:
    """Print the table of `owners`; nothing if there are none."""
    if roles:
        headings = [name.replace("_", " ") for name in FIELDS[1:]]
        print_table(
            ("lock or role", *headings),
            (_holder_cells(facts) for info in roles for facts in role_facts(info)),
            spare=("engine id", "priority", "mode"),
        )


def _holder_cells(facts: dict[str, Any]) -> tuple[object, ...]:
    *shown, since = (facts.get(name, "-") for name in FIELDS)
    return *shown, second_of(since)
