"""What all runs together amount to, beside what was aimed at.

>>> card = Card.here()
>>> card.add(Figure("torture", {"kills": 4000, "operations": 9}))
>>> card.add(Figure("random kills", {"kills": 6000}))
>>> kills, *_ = totals(card)
>>> kills.name, kills.reached, kills.verdict
('kills', 10000, 'reached')
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from proof.mutants import MUTANTS
from proof.report import Card, Figure

# Where each total comes from: (instrument, count).
KILLS = (
    ("random kills", "kills"),
    ("torture", "kills"),
    ("kill sweep", "deaths"),
    ("failpoints", "deaths"),
    ("state", "kills"),
    ("compaction", "kills"),
)
OPERATIONS = ("random kills", "torture", "histories", "power cuts", "state", "compaction")


@dataclass(frozen=True)
class Total:
    """One of them."""

    name: str
    target: int
    parts: tuple[tuple[str, str], ...]
    reached: int = 0

    @property
    def verdict(self) -> str:
        """In one word."""
        return "reached" if self.reached >= self.target else "missed"

    def of(self, card: Card) -> Total:
        """The same with what the card has."""
        found = sum(
            card.figures[instrument].shown.get(count.replace("_", " "), 0)
            for instrument, count in self.parts
            if instrument in card.figures
        )
        return Total(self.name, self.target, self.parts, found)


AIMS = (
    Total("kills", 10_000, KILLS),
    Total("power cuts on ext4", 250, (("power cuts", "cuts_on_ext4"),)),
    Total("power cuts on xfs", 250, (("power cuts", "cuts_on_xfs"),)),
    Total("cuts without a reboot, ext4", 250, (("power cuts", "cuts_without_reboot_on_ext4"),)),
    Total("cuts without a reboot, xfs", 250, (("power cuts", "cuts_without_reboot_on_xfs"),)),
    Total("crash states", 20_000, (("crash states", "states"),)),
    Total("model states", 1_000_000, (("model", "states"),)),
    Total("flips", 100_000, (("bit flips", "flips"),)),
    Total("inputs", 10_000_000, (("fuzz", "inputs"),)),
    Total("operations", 10_000_000, tuple((name, "operations") for name in OPERATIONS)),
    Total("environments", 60, (("environments", "cases"),)),
    Total("mutants caught", len(MUTANTS), (("mutants", "caught"),)),
)


def totals(card: Card) -> list[Total]:
    """All of them."""
    return [aim.of(card) for aim in AIMS]


def lines(card: Card) -> Iterator[str]:
    """A table, for people."""
    yield f"{'total':<30}{'is':>12}{'aim':>12}"
    for total in totals(card):
        yield f"{total.name:<30}{total.reached:>12,}{total.target:>12,}  {total.verdict}"


def table(card: Card) -> Iterator[str]:
    """The same for docs/proof.md."""
    yield from ("| total | is | aim | |", "|---|---|---|---|")
    for total in totals(card):
        yield f"| {total.name} | {total.reached:,} | {total.target:,} | {total.verdict} |"


def as_json(card: Card) -> list[dict[str, object]]:
    """The same for programs."""
    return [
        {"name": t.name, "is": t.reached, "aim": t.target, "verdict": t.verdict}
        for t in totals(card)
    ]


__all__ = ["AIMS", "Card", "Figure", "Total", "as_json", "lines", "table", "totals"]
