"""docs/proof.md's two tables, out of a file of results: `python -m proof.table [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from proof.report import RESULTS, Card, Figure


def figures(card: Card) -> list[str]:
    """One line for each instrument."""
    lines = ["| instrument | verdict | figure | controls that turned it red |", "|---|---|---|---|"]
    for figure in card.figures.values():
        counts = ", ".join(f"{count:,} {name}" for name, count in figure.told.items())
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


def main() -> None:
    """Print both."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    card = Card.load(path)
    print("\n".join([", ".join(card.machine.values()), "", *figures(card)]))
    if "mutants" in card.figures:
        print("\n".join(["", *caught(card.figures["mutants"])]))


if __name__ == "__main__":
    main()
