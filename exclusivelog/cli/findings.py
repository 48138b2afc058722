"""What is wrong with a ledger, by its figures: for `check`, and for the page of `serve`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import exclusivelog as xl

if TYPE_CHECKING:
    from exclusivelog.backend import LastingLock

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
