"""`audit` and `report`: what a log says of its owners."""

from __future__ import annotations

import gc
import json

import click

from exclusivelog.cli.output import fields_of, print_result, print_table
from exclusivelog.cli.program import (
    PATH,
    Argument,
    as_json,
    leave,
    ledger_path,
    open_to_read,
    program,
)

maybe_topics = click.argument(
    "topics", cls=Argument, metavar="[TOPIC]...", nargs=-1, help="Only these. Default: all."
)


@program.command()
@ledger_path
@maybe_topics
@as_json
def audit(path: str, topics: tuple[str, ...], as_json: bool) -> None:
    """Judge from its messages whether a log is what exclusive access promises.

    Epochs never interleave, offsets are dense, each exclusive epoch has one producer and was
    granted once, sequence ids rise. The exit status is 1 if a claim does not hold.
    """
    from exclusivelog.audit import audit

    gc.disable()  # millions of objects that stay until the end
    with open_to_read(path) as engine:
        verdicts = audit(engine, topics or None)
    if as_json:
        for verdict in verdicts:
            print(json.dumps(fields_of(verdict)))
    else:
        print_table(
            ("topic", "holds", "claim", "facts"),
            ((v.topic, "yes" if v.holds else "NO", v.claim, v.facts) for v in verdicts),
        )
    if not all(verdict.holds for verdict in verdicts):
        leave(1)


@program.command()
@ledger_path
@click.argument("page", cls=Argument, metavar="PAGE", type=PATH, help="The HTML file to write.")
@maybe_topics
@as_json
def report(path: str, page: str, topics: tuple[str, ...], as_json: bool) -> None:
    """Write an HTML page: who led when, what each take-over cost, and where the load went."""
    from exclusivelog.audit import report

    gc.disable()  # as above
    with open_to_read(path) as engine:
        told = report(engine, page, topics or None)
    facts = {"page": page, "topics": len(told.stories), "take_overs": len(told.silences)}
    text = f"{page}: {facts['topics']} topics, {facts['take_overs']} take-overs"
    print_result(facts, text, as_json)
