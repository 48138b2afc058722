"""The comparison with the peers: `python -m bench.compare [P3 P4 ...] [--rounds N] [--dir DIR]`.

Writes raw numbers (`P3.json`), plots and `table.md` into bench/results/. Figures that are not named
keep their former results.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from bench import (
    append,
    beside,
    busy,
    cluster,
    compressed,
    exactly_once,
    following,
    growth,
    handover,
    in_company,
    last_writer,
    models,
    paused,
    plots,
    report,
    rust_logs,
    scan,
    sharing,
    single,
    space,
    spark,
    start,
    state,
    tail,
    takeover,
    topics,
    turns,
    unflushed,
    values,
    waiters,
    waiting,
    zombies,
)
from bench.measure import Figure, Settings, limited, prepare_directory
from testing import machine

RESULTS = Path(__file__).parent / "results"
LIMIT_SECONDS, LIMIT_SECONDS_IN_FULL = 900, 3600

FIGURES: dict[str, Callable[[Settings], Figure]] = {
    "P1": append.p1,
    "P2": unflushed.p2,
    "P3": append.p3,
    "P4": append.p4,
    "P5": sharing.p5,
    "P6": scan.p6,
    "P7": tail.p7,
    "P8": takeover.p8,
    "P9": handover.p9,
    "P10": waiters.p10,
    "P11": topics.p11,
    "P12": growth.p12,
    "P13": space.p13,
    "P14": state.p14,
    "P15": busy.p15,
    "P16": spark.p16,
    "P17": zombies.p17,
    "P18": topics.p18,
    "P19": single.p19,
    "P20": values.p20,
    "P22": compressed.p22,
    "P23": start.p23,
    "P25": cluster.p25,
    "P26": beside.p26,
    "P27": exactly_once.p27,
    "P28": paused.p28,
    "P29": last_writer.p29,
    "P30": following.p30,
    "P31": waiting.p31,
    "P32": rust_logs.p32,
    "P34": models.p34,
    "P35": turns.p35,
    "P36": in_company.p36,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="P3", help=f"default: {', '.join(FIGURES)}")
    parser.add_argument("--rounds", type=int, help="of each figure; default: its own number")
    parser.add_argument("--dir", type=Path, default=RESULTS, help="a directory on the disk to use")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument(
        "--full",
        action="store_true",
        help="set up one by one; 100,000 waiters; 100,000,000 messages (10 GB)",
    )
    given = parser.parse_args()
    for name in given.figures:
        if name not in FIGURES:
            parser.error(f"{name} is none of {', '.join(FIGURES)}")
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds takes a number from 1 on")
    return given


def main() -> None:
    given = parse()
    settings = Settings(prepare_directory(given.dir.resolve()), given.rounds, given.full)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, value in machine.facts(settings.directory).items():
        print(f"{name + ':':14}{value}")
    failed = [name for name in given.figures or FIGURES if not measured(name, settings, given.out)]
    print(f"\n{report.EXPLANATION}\n{report.write_table(given.out)}")
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


def measured(name: str, settings: Settings, out: Path) -> bool:
    """Measure one figure; an error does not prevent the others."""
    try:
        measure(name, settings, out)
    except Exception:
        print(f"\n{name} failed:", file=sys.stderr)
        traceback.print_exc()
        return False
    return True


def measure(name: str, settings: Settings, out: Path) -> None:
    """Measure, print, save and draw one figure."""
    facts = machine.facts(settings.directory)
    start = time.perf_counter()
    with limited(LIMIT_SECONDS_IN_FULL if settings.full else LIMIT_SECONDS, name):
        figure = FIGURES[name](settings)
    print(f"\n{name}: {figure.title} ({time.perf_counter() - start:.0f} s)")
    print(report.plain(figure), flush=True)
    report.save(figure, facts, out)
    plots.draw(figure, out)


if __name__ == "__main__":
    main()
