"""How often a process that is stopped holds the writer lock: SIGSTOP at random instants.

The chance is a figure, not a promise: no number breaks a rule (K2, K3). But each send of another
process must be answered once the stopped one goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from proof.report import Figure
from proof.sizes import Size
from testing.pauses import CONTROL, Kind, measured, name_of

DURABILITIES: tuple[Literal["power", "process"], ...] = ("power", "process")
# Of "sends" at full speed under `process`, most are in a checkpoint: the journal fills in no time.
KINDS: list[Kind] = [
    *(("sends", durability, number) for durability in DURABILITIES for number in (0, 100)),
    *(("commits", durability, number) for durability in DURABILITIES for number in (0, 100, 10)),
    ("grants", "power", 0),
    ("grants", "power", 10),
    ("moves", "power", 0),
]


def stop_writers(size: Size, where: Path) -> Figure:
    """All kinds of work, one after another; the chance of each is a note."""
    figure = Figure("stops")
    count = 10 if size.quick else 300
    for kind in KINDS:
        found = measured(kind, count, where)
        figure.count(stops=found.stops, inside=found.inside)
        figure.notes.append(f"{name_of(kind)}: inside in {found.share}")
        figure.broken += ["a send was not answered after SIGCONT"] * found.unanswered
    if size.controlled:
        found = measured(CONTROL, 5, where)
        figure.controls["a process that never leaves"] = found.inside == found.stops
    return figure
