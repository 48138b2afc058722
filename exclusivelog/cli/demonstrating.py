"""The options of `demo`; `demo.py` is the program that it runs."""

from __future__ import annotations

import click

from exclusivelog.cli.program import PATH, access, access_options, leave, program

KILLS, RATE = 20, 4000.0  # as in demo.py, which is not imported for the help text


@program.command()
@click.option(
    "--kills",
    metavar="N",
    type=click.IntRange(min=0),
    default=KILLS,
    help="How many leaders to kill.",
)
@click.option("--seed", metavar="N", type=int, help="Seed of the moments. Default: random.")
@click.option(
    "--path",
    metavar="DIR|URL",
    type=PATH,
    help="The log's directory, or a cluster's URL; kept and continued. Default: a temporary one.",
)
@click.option(
    "--data",
    metavar="DIR",
    type=PATH,
    help="The events and their expected result. Default: those of a clone, or made-up ones.",
)
@click.option(
    "--events", metavar="N", type=click.IntRange(min=1), help="Send only the first N events."
)
@click.option(
    "--rate", metavar="N", type=click.FloatRange(1, 1e9), default=RATE, help="Events per second."
)
@click.option(
    "--report",
    metavar="FILE",
    type=PATH,
    help="Audit the log with Spark, and write an HTML page with charts of its leaders.",
)
@access_options
def demo(
    kills: int,
    seed: int | None,
    path: str | None,
    data: str | None,
    events: int | None,
    rate: float,
    report: str | None,
) -> None:
    """Send events while leaders are killed, then check that each is in the log once."""
    import signal
    from pathlib import Path

    from rich.console import Console

    from exclusivelog.cli import demo as job

    # An end by SIGTERM must not leave the temporary ledger behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def where(given: str | None) -> Path | None:
        return None if given is None else Path(given)

    try:
        held = job.demo(
            Console(),
            path=path,
            data=where(data),
            events=events,
            kills=kills,
            seed=seed,
            rate=rate,
            report=where(report),
            access=access(),
        )
    except job.DemoError as error:
        raise ValueError(str(error)) from error
    if not held:
        leave(1)
