"""`verify`, `check`, `audit` and `report`: check a log for damage, its health and its history."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import click

import exclusivelog as xl
from exclusivelog.cli.output import counts_of, fields_of, jsonable, print_result, print_table
from exclusivelog.cli.program import (
    PATH,
    Argument,
    as_json,
    leave,
    ledger_path,
    maybe_topics,
    open_to_read,
    program,
)

if TYPE_CHECKING:
    from exclusivelog.backend import LastingLock

BLOCKED, ATTENTION = 1, 3  # exit statuses; 2 says that the arguments are wrong
FULL_BYTES = 1 << 20
MAP_SHARE, JOURNAL_SHARE, MOST_BEHIND = 0.8, 0.75, 100  # as in docs/operations/alerts.yml


@dataclass(frozen=True)
class Finding:
    """A finding. `blocks`: it prevents all writes, or all reads."""

    check: str
    blocks: bool
    text: str


def findings(
    stats: xl.EngineStats, inside: xl.EngineInfo | None, locks: Iterable[LastingLock] = ()
) -> Iterator[Finding]:
    """The problems that these figures show. `inside`: the engine inside the critical section;
    `locks`: those that are held without progress."""
    told = inside is not None and inside.id in {engine.id for engine in stats.unresponsive}
    for _, group in groupby(locks, lambda lock: (lock.holder, lock.ended)):
        held = list(group)
        if held[0].ended or not told:
            yield _about_locks(held)
    for engine in stats.unresponsive:
        who = f"engine {engine.name!r} (id {engine.id}, pid {engine.pid})"
        silent = f"{who} has been silent for {engine.heartbeat_age:.1f} s"
        if inside is not None and inside.id == engine.id:
            yield Finding(
                "writers", True, f"{silent}, and holds the writer lock: resume or end its process"
            )
        else:
            yield Finding("engines", False, f"{silent}: resume or end its process")
    if stats.disk_low and stats.disk_free_bytes is not None:
        full = stats.disk_free_bytes < FULL_BYTES
        how = "the disk is full" if full else "the disk has little room left"
        text = f"{how}, {stats.disk_free_bytes:,} bytes are free: make room, or trim topics"
        yield Finding("disk", full, text)
    if stats.used_bytes > MAP_SHARE * stats.map_size:
        used = f"the tables use {stats.used_bytes:,} of map_size={stats.map_size:,} bytes"
        yield Finding("tables", False, f"{used}: open the log with a larger one, or trim topics")
    if stats.journal_bytes > JOURNAL_SHARE * stats.journal_capacity:
        wait = f"{stats.journal_bytes:,} of {stats.journal_capacity:,} bytes of the journal wait"
        yield Finding("journal", False, f"{wait} for a checkpoint: is the disk too slow, or full?")
    oldest = stats.oldest_reader
    if oldest is not None and oldest["transactions_behind"] > MOST_BEHIND:
        text = f"a read in process {oldest['pid']} keeps the tables from reusing space: end it"
        yield Finding("readers", False, text)


def _about_locks(locks: Sequence[LastingLock]) -> Finding:
    """About the locks of one thread."""
    names = " and ".join(lock.lock for lock in locks)
    first = locks[0]
    since = f"{first.seconds:.1f} s or longer"
    if first.ended:
        return Finding(
            "locks",
            True,
            f"a thread that has ended ({first.holder}) still holds {names}, for {since}. An engine "
            "that runs takes a dead thread's lock: resume those that are stopped, or end them",
        )
    held = f"{first.holder} has held {names} for {since}"
    if first.stopped:
        return Finding("locks", True, f"{held}, and is stopped: resume or end its process")
    return Finding("locks", False, f"{held}: is the disk slow, or the machine overloaded?")


def _examine(path: str) -> list[Finding]:
    try:
        with open_to_read(path) as engine:
            locks = engine.backend.catalog.lasting_locks()
            return list(findings(engine.stats(), engine.inside(), locks))
    except xl.ExclusiveLogError as error:
        return [Finding("open", True, str(error))]


@program.command()
@ledger_path
@click.option("--strict", is_flag=True, help="What needs attention fails, too: exit status 3.")
@as_json
def check(path: str, strict: bool, as_json: bool) -> None:
    """Is the log healthy? Changes nothing, and takes no lock: made for probes.

    The exit status is 1 if it cannot be opened, the disk is full, or a process that is stopped or
    dead holds a lock; with --strict, 3 if something needs attention: an engine that does not
    respond, a lock that is held for long, a disk with little room left, tables or a journal that
    are nearly full, a read that lasts. `verify` reads the messages, too.
    """
    found = _examine(path)
    if as_json:
        print(json.dumps({"healthy": not found, "findings": list(map(fields_of, found))}))
    elif found:
        rows = ((f.check, "blocked" if f.blocks else "attention", f.text) for f in found)
        print_table(("check", "state", "what it is"), rows)
    else:
        print(f"{path} is healthy")
    if any(finding.blocks for finding in found):
        leave(BLOCKED)
    leave(ATTENTION if found and strict else 0)


# ---- checks that read the whole log --------------------------------------------------------


@program.command()
@ledger_path
@as_json
def verify(path: str, as_json: bool) -> None:
    """Read the whole ledger and check it. The exit status is 1 if there is damage."""
    with open_to_read(path) as engine:
        report = engine.verify()
    text = "\n".join([*map(str, report.problems), counts_of(report)])
    print_result({"ok": report.ok, **jsonable(report)}, text, as_json)
    if not report.ok:
        leave(1)


@program.command()
@ledger_path
@maybe_topics
@as_json
def audit(path: str, topics: tuple[str, ...], as_json: bool) -> None:
    """Check by its messages whether a log keeps the promises of exclusive access.

    Epochs never interleave, offsets are dense, each exclusive epoch has one producer and was
    granted once, sequence ids rise. The exit status is 1 if a claim does not hold.
    """
    from exclusivelog.audit import audit

    gc.disable()  # it would only slow this down: millions of objects live until the end
    with open_to_read(path) as engine:
        verdicts = audit(engine, topics or None)
    if as_json:
        for verdict in verdicts:
            print(json.dumps(fields_of(verdict)))
    else:
        print_table(
            ("topic", "holds", "claim", "facts"),
            ((v.topic, "yes" if v.holds else "NO", v.claim, v.facts) for v in verdicts),
        )
    if not all(verdict.holds for verdict in verdicts):
        leave(1)


@program.command()
@ledger_path
@click.argument("page", cls=Argument, metavar="PAGE", type=PATH, help="The HTML file to write.")
@maybe_topics
@as_json
def report(path: str, page: str, topics: tuple[str, ...], as_json: bool) -> None:
    """Write an HTML page: the leaders over time, how long each failover took, and the load."""
    from exclusivelog.audit import report

    gc.disable()  # as above
    with open_to_read(path) as engine:
        told = report(engine, page, topics or None)
    facts = {"page": page, "topics": len(told.stories), "take_overs": len(told.silences)}
    text = f"{page}: {facts['topics']} topics, {facts['take_overs']} take-overs"
    print_result(facts, text, as_json)
