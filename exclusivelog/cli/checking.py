"""`verify`, `check`, `audit` and `report`: check a log for damage, its health and its history."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterator

import click

import exclusivelog as xl
from exclusivelog.cli.findings import Finding, findings
from exclusivelog.cli.output import counts_of, fields_of, jsonable, print_result, print_table
from exclusivelog.cli.program import (
    PATH,
    Argument,
    as_json,
    is_stream,
    leave,
    ledger_path,
    maybe_topics,
    naming,
    open_to_read,
    program,
)
from exclusivelog.cli.streams import data_out

BLOCKED, ATTENTION = 1, 3  # exit statuses; 2 says that the arguments are wrong


def _examine(path: str) -> list[Finding]:
    try:
        with open_to_read(path) as engine:
            engine.backend.catalog.check_readable()
            locks = engine.backend.catalog.lasting_locks()
            return list(findings(engine.stats(), engine.inside(), locks))
    except xl.ExclusiveLogError as error:
        return [Finding("open", True, str(error))]


@program.command()
@ledger_path
@click.option("--strict", is_flag=True, help="What needs attention fails, too: exit status 3.")
@as_json
def check(path: str, strict: bool, as_json: bool) -> None:
    """Is the log healthy? Changes nothing, and takes no lock: made for probes.

    The exit status is 1 if it cannot be opened, the disk is full, or a process that is stopped or
    dead holds a lock; with --strict, 3 if something needs attention: an engine that does not
    respond, a lock that is held for long, a disk with little room left, tables or a journal that
    are nearly full, a read that lasts. `verify` reads the messages, too.
    """
    found = _examine(path)
    if as_json:
        print(json.dumps({"healthy": not found, "findings": list(map(fields_of, found))}))
    elif found:
        rows = ((f.check, "blocked" if f.blocks else "attention", f.text) for f in found)
        print_table(("check", "state", "what it is"), rows)
    else:
        print(f"{path} is healthy")
    if any(finding.blocks for finding in found):
        leave(BLOCKED)
    leave(ATTENTION if found and strict else 0)


# ---- checks that read the whole log --------------------------------------------------------


@program.command()
@ledger_path
@as_json
def verify(path: str, as_json: bool) -> None:
    """Read the whole ledger and check it. The exit status is 1 if there is damage."""
    with open_to_read(path) as engine:
        report = engine.verify()
    text = "\n".join([*map(str, report.problems), counts_of(report)])
    print_result({"ok": report.ok, **jsonable(report)}, text, as_json)
    if not report.ok:
        leave(1)


@program.command()
@ledger_path
@maybe_topics
@as_json
def audit(path: str, topics: tuple[str, ...], as_json: bool) -> None:
    """Check by its messages whether a log keeps the promises of exclusive access.

    Epochs never interleave, offsets are dense, each exclusive epoch has one producer and was
    granted once, sequence ids rise. The exit status is 1 if a claim does not hold.
    """
    from exclusivelog.audit import audit

    gc.disable()  # it would only slow this down: millions of objects live until the end
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
@click.argument(
    "page", cls=Argument, metavar="PAGE", type=PATH, help="The HTML file to write. With -, stdout."
)
@maybe_topics
@as_json
def report(path: str, page: str, topics: tuple[str, ...], as_json: bool) -> None:
    """Write an HTML page: the leaders over time, how long each failover took, and the load."""
    from exclusivelog.audit import report

    gc.disable()  # as above
    with open_to_read(path) as engine:
        with _page_file(page) as file:
            told = report(engine, file, topics or None)
    facts = {"page": page, "topics": len(told.stories), "take_overs": len(told.silences)}
    where = "stdout" if is_stream(page) else page
    text = f"{where}: {facts['topics']} topics, {facts['take_overs']} take-overs"
    print_result(facts, text, as_json, sys.stderr if is_stream(page) else None)


@contextlib.contextmanager
def _page_file(page: str) -> Iterator[str]:
    """The file to write the page to; if that is stdout, one that is copied to it."""
    if not is_stream(page):
        with naming(page, "written"):
            yield page
        return
    import shutil  # here: help does not need them
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        yield file.name
        with naming("stdout", "written"):
            out = data_out()
            shutil.copyfileobj(file, out)
            out.flush()
