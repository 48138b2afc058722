"""docs/proof.md's tables, out of files of results, added up: `python -m proof.table [FILE ...]`.

Runs beside each other write files of their own (`python -m proof --results FILE`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from proof import totals
from proof.report import RESULTS, Card, Figure


def figures(card: Card) -> list[str]:
    """One line for each instrument."""
    lines = ["| instrument | verdict | figure | controls that turned it red |", "|---|---|---|---|"]
    for figure in card.figures.values():
        counts = ", ".join(f"{count:,} {name}" for name, count in figure.shown.items())
        if figure.runs > 1:
            counts += f" (in {figure.runs} runs)"
        red = "; ".join(name for name, noticed in figure.controls.items() if noticed)
        lines.append(
            f"| {figure.instrument} | {figure.verdict} | {counts or figure.skipped} | {red} |"
        )
    return lines


def caught(figure: Figure) -> list[str]:
    """One line for each mutant."""
    lines = ["| mutant | caught by |", "|---|---|"]
    for note in figure.notes:
        name, _, rest = note.partition(": caught by ")
        if rest:
            lines.append(f"| {name} | {rest.partition(':')[0]} |")
    return lines


def added_up(paths: Sequence[Path]) -> Card:
    """What all of them have about the library as it is."""
    card = Card.here()
    for path in paths:
        found = Card.load(path)
        if found.dropped or not path.exists():
            raise SystemExit(f"{path} has no figures of the library as it is")
        for figure in found.figures.values():
            card.add(figure)
    return card


def main() -> None:
    """Print them."""
    card = added_up([Path(name) for name in sys.argv[1:]] or [RESULTS])
    print(
        "\n".join([", ".join(card.machine.values()), "", *figures(card), "", *totals.table(card)])
    )
    if "mutants" in card.figures:
        print("\n".join(["", *caught(card.figures["mutants"])]))


if __name__ == "__main__":
    main()
