"""`python -m proof [--size small|medium|full] [--slices N|M-N] [--fresh] [INSTRUMENT ...]`

Runs the instruments, adds what they found to build/proof.json, and prints the report card. The
exit code is 0 only if no rule was broken and every control was noticed. A full run is made of
slices, each of which is added when it is done: it may be ended at any moment.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

from proof.instruments import INSTRUMENTS, run
from proof.report import RESULTS, Card, Figure
from proof.sizes import SIZES, Size
from proof.totals import as_json, lines


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument(
        "instruments",
        nargs="*",
        metavar="INSTRUMENT",
        help=f"all of them by default: {', '.join(INSTRUMENTS)}",
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument(
        "--slices",
        type=slices,
        default=slice(None),
        metavar="N|M-N",
        help="the first N, or the Mth to the Nth, instead of all",
    )
    parser.add_argument("--fresh", action="store_true", help="forget the runs before")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of JSON")
    options = parser.parse_args()
    known = {*INSTRUMENTS, *(n for n in options.instruments if n.startswith("mutants:"))}
    if unknown := set(options.instruments) - known:
        parser.error(f"there is no instrument {', '.join(sorted(unknown))}")
    card = Card.here() if options.fresh else Card.load(options.results)
    for name in options.instruments or INSTRUMENTS:
        for size in list(SIZES[options.size].sliced(name))[options.slices]:
            take(card, name, size)
            card.save(options.results, totals=as_json(card))
    print(card.text(), "", *lines(card), sep="\n")
    return 0 if card.green else 1


def slices(text: str) -> slice:
    """Which slices are meant.

    >>> list(range(1, 12))[slices("3")], list(range(1, 12))[slices("4-6")]
    ([1, 2, 3], [4, 5, 6])
    """
    first, _, last = text.rpartition("-")
    return slice(int(first or 1) - 1, int(last))


def take(card: Card, name: str, size: Size) -> None:
    """Run one slice of an instrument, and add it to the card."""
    with tempfile.TemporaryDirectory(prefix="proof-") as where:
        try:
            figure = run(name, size, Path(where))
        except Exception as error:  # the others, and the slices before, count for all that
            traceback.print_exc()
            figure = Figure(name.partition(":")[0].replace("-", " "))
            figure.broken.append(f"the instrument failed: {error!r}"[:500])
    card.add(figure)
    verdict, part = card.figures[figure.instrument].verdict, f"{size.slice + 1}/{size.of}"
    print(f"{name} {part}: {verdict}, {figure.seconds:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
