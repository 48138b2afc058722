"""The report card: one figure per instrument, as text and as JSON, added up over runs.

A long proof is run in parts. Each part adds its counts to those that the file has for the same
state of the library; figures of another state are dropped, and the card says so.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from exclusivelog.local.storage.mounts import file_system
from testing.children import ROOT
from testing.machine import commit, cpu_model, device

RESULTS = ROOT / "build" / "proof.json"
MOST_TOLD = 20  # broken rules


@dataclass
class Figure:
    """What an instrument has found: how much it did, what was broken, and whether its control,
    the same with something broken on purpose, has turned it red."""

    instrument: str
    counts: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    controls: dict[str, bool] = field(default_factory=dict)  # what was broken: was it noticed?
    skipped: str = ""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    runs: int = 1
    highest: dict[str, int] = field(default_factory=dict)  # counts that are not added up

    @property
    def verdict(self) -> str:
        """In one word."""
        if self.broken:
            return "BROKEN"
        if self.skipped:
            return "skipped"
        if not self.controls:
            return "NO CONTROL"
        return "holds" if all(self.controls.values()) else "BLIND"

    @property
    def green(self) -> bool:
        """May the whole be called proven, as far as this goes?"""
        return self.verdict in ("holds", "skipped")

    def count(self, **counts: int) -> None:
        """Add to the counts."""
        for name, number in counts.items():
            self.counts[name] = self.counts.get(name, 0) + number

    def most(self, **counts: int) -> None:
        """Count what another run does again: of each the highest stays."""
        for name, number in counts.items():
            self.highest[name] = max(self.highest.get(name, 0), number)

    @property
    def shown(self) -> dict[str, int]:
        """All counts, for people; `highest` has one for each thing that is counted once, as in
        `caught/a mutant`."""
        found = {name.replace("_", " "): number for name, number in self.counts.items()}
        for name, number in self.highest.items():
            what = name.partition("/")[0].replace("_", " ")
            found[what] = found.get(what, 0) + number
        return found

    def add(self, other: Figure) -> None:
        """Take another run of the same instrument in."""
        self.count(**other.counts)
        self.most(**other.highest)
        self.broken += other.broken
        self.skipped = other.skipped if not self.shown else ""
        self.notes = list(dict.fromkeys(self.notes + other.notes))
        for name, noticed in other.controls.items():
            self.controls[name] = self.controls.get(name, True) and noticed
        self.seconds += other.seconds
        self.runs += other.runs


@dataclass
class Card:
    """All figures of one state of the library."""

    library: str
    machine: dict[str, str]
    figures: dict[str, Figure] = field(default_factory=dict)
    dropped: str = ""  # an older state, whose figures were in the file

    @classmethod
    def here(cls) -> Card:
        """An empty one for this library, on this machine."""
        return cls(library_digest(), machine())

    @classmethod
    def load(cls, path: Path = RESULTS) -> Card:
        """What the file has, as long as it is about this library."""
        card = cls.here()
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["library"] != card.library:
                card.dropped = kept["machine"]["commit"]
            else:
                card.figures = {f["instrument"]: Figure(**f) for f in kept["figures"]}
        return card

    def save(self, path: Path = RESULTS, **more: Any) -> None:
        """Write the file, in one go: a long proof may be ended while we do so."""
        path.parent.mkdir(exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_text(json.dumps(self.as_json() | more, indent=1) + "\n")
        new.replace(path)

    def as_json(self) -> dict[str, Any]:
        """The whole card."""
        figures = [asdict(figure) for figure in self.figures.values()]
        return {"library": self.library, "machine": self.machine, "figures": figures}

    def add(self, figure: Figure) -> None:
        """Add a run to what is there."""
        if figure.instrument in self.figures:
            self.figures[figure.instrument].add(figure)
        else:
            self.figures[figure.instrument] = figure

    @property
    def green(self) -> bool:
        """Does all of it hold?"""
        return all(figure.green for figure in self.figures.values())

    def text(self) -> str:
        """For people."""
        head = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines = [head]
        if self.dropped:
            lines.append(f"figures of another state of the library were dropped: {self.dropped}")
        for figure in self.figures.values():
            lines += ["", *_lines(figure)]
        return "\n".join(lines)


def _lines(figure: Figure) -> Iterable[str]:
    runs = f"{figure.runs} runs added up, " if figure.runs > 1 else ""
    yield f"{figure.instrument:<14}{figure.verdict:<10}({runs}{figure.seconds:.0f} s)"
    if figure.shown:
        yield "  " + ", ".join(f"{number:,} {name}" for name, number in figure.shown.items())
    if figure.skipped:
        yield f"  skipped: {figure.skipped}"
    for name, noticed in figure.controls.items():
        yield f"  control: {name}: {'turns it red' if noticed else 'NOT NOTICED'}"
    for note in figure.notes:
        yield f"  note: {note}"
    for text in figure.broken[:MOST_TOLD]:
        yield f"  broken: {text}"
    if len(figure.broken) > MOST_TOLD:
        yield f"  ... and {len(figure.broken) - MOST_TOLD} more"


def machine() -> dict[str, str]:
    """Where, when, and of what."""
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "cpu": cpu_model(),
        "disk": f"{file_system(str(ROOT))} on {device(ROOT)}",
    }


def library_digest() -> str:
    """The sources that the figures are about: a commit that leaves them alone voids nothing."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "exclusivelog").rglob("*")):
        if path.suffix in (".py", ".pyx", ".pxi", ".pxd", ".h"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
