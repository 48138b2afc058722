"""`python -m proof [--size small|medium|full] [--fresh] [INSTRUMENT ...]`

Runs the instruments, adds what they found to build/proof.json, and prints the report card. The
exit code is 0 only if no rule was broken and every control was noticed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from proof.instruments import INSTRUMENTS, SIZES, run
from proof.report import RESULTS, Card


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument("instruments", nargs="*", metavar="INSTRUMENT",
                        help=f"all of them by default: {', '.join(INSTRUMENTS)}")  # fmt: skip
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--fresh", action="store_true", help="forget the runs before")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of JSON")
    options = parser.parse_args()
    known = {*INSTRUMENTS, *(n for n in options.instruments if n.startswith("mutants:"))}
    if unknown := set(options.instruments) - known:
        parser.error(f"there is no instrument {', '.join(sorted(unknown))}")
    card = Card.here() if options.fresh else Card.load(options.results)
    for name in options.instruments or INSTRUMENTS:
        with tempfile.TemporaryDirectory(prefix="proof-") as where:
            figure = run(name, SIZES[options.size], Path(where))
        print(f"{name}: {figure.verdict} in {figure.seconds:.0f} s", file=sys.stderr, flush=True)
        card.add(figure)
        card.save(options.results)  # after each: a long proof may be ended
    print(card.text())
    return 0 if card.green else 1


if __name__ == "__main__":
    sys.exit(main())
