"""`compact`, `compression`, `backup`, `restore` and `upgrade`: the maintenance of a ledger."""

from __future__ import annotations

import json
from typing import Literal

import click

import exclusivelog as xl
from exclusivelog.arguments import is_url
from exclusivelog.cli.names import ENGINE_NAME
from exclusivelog.cli.output import counts_of, jsonable, print_result, print_table
from exclusivelog.cli.program import (
    DIRECTORY,
    Argument,
    as_json,
    leave,
    ledger_path,
    local_path,
    open_to_read,
    open_to_write,
    program,
    topic_name,
)


@program.command()
@ledger_path
@topic_name
@as_json
def compact(path: str, topic: str, as_json: bool) -> None:
    """Compact a topic: build the view that has only the last message of each key."""
    with open_to_write(path) as engine:
        kept = engine.topic(topic, create=False).compact()
    text = f"{topic} is compacted: {kept} messages"
    print_result({"topic": topic, "messages": kept}, text, as_json)


@program.command()
@ledger_path
@topic_name
@click.argument(
    "method",
    cls=Argument,
    metavar="[METHOD]",
    required=False,
    type=click.Choice(("lz4", "zstd", "none")),
    help="lz4, zstd or none; without it, show it.",
)
@as_json
def compression(
    path: str, topic: str, method: Literal["lz4", "zstd", "none"] | None, as_json: bool
) -> None:
    """Show a topic's compression and its ratio; or set the method for new messages."""
    if method is None and not is_url(path):
        with open_to_read(path) as engine:
            _show_compression(engine.topic(topic, create=False).stats(), as_json)
        return
    chosen = None if method == "none" else method
    with open_to_write(path) as engine:
        engine.topic(topic, create=False).compression(chosen)  # a cluster refuses it
    text = f"{topic}: compression of new messages: {method}"
    print_result({"topic": topic, "compression": chosen}, text, as_json)


def _show_compression(stats: xl.TopicStats, as_json: bool) -> None:
    facts = {
        "compression": stats.compression,
        "entries": stats.entries,
        "raw_bytes": stats.raw_bytes,
        "stored_bytes": stats.stored_bytes,
        "ratio": round(stats.ratio, 2),
    }
    if as_json:
        print(json.dumps({**facts, "methods": dict(stats.methods)}))
        return
    rows = [(name.replace("_", " "), fact or "none") for name, fact in facts.items()]
    rows += [(f"stored as {name}", f"{size} bytes") for name, size in stats.methods.items()]
    print_table(("name", "value"), rows, header=False)


@program.command()
@ledger_path
@click.argument(
    "to",
    cls=Argument,
    metavar="TO",
    type=DIRECTORY,
    help="A new or empty directory, or one with an unfinished backup.",
)
@as_json
def backup(path: str, to: str, as_json: bool) -> None:
    """Copy a ledger to another directory, consistently, also while it is in use.

    Every command refuses an interrupted backup. Run the backup again with the same arguments.
    """
    with open_to_read(path) as engine:
        engine.backup(to)
    print_result({"path": path, "backup": to}, f"{path} is copied to {to}", as_json)


@program.command()
@click.argument(
    "backup",
    cls=Argument,
    metavar="BACKUP",
    type=DIRECTORY,
    help="The directory that `backup` has written.",
)
@click.argument(
    "path",
    cls=Argument,
    metavar="PATH",
    type=DIRECTORY,
    help="Where to create the log: a new or empty directory.",
)
@as_json
def restore(backup: str, path: str, as_json: bool) -> None:
    """Create a log from a backup, and check all of it. The backup stays as it is.

    An interrupted backup is refused. If this command is interrupted, run it again with the same
    arguments; if it says that PATH is not empty, all is copied, and `verify` checks it. The exit
    status is 1 if the backup is damaged; PATH then has its intact messages.
    """
    if is_url(backup):
        raise xl.UnsupportedError(
            f"restore reads a directory; from a cluster: exclusivelog mirror {path} --from {backup}"
        )
    with xl.open(backup, ENGINE_NAME, readonly=True) as engine:
        engine.backup(path)
    with xl.open(path, ENGINE_NAME, readonly=True) as engine:
        report = engine.verify()
    text = f"{path} is restored from {backup}: {counts_of(report)}"
    facts = {"path": path, "backup": backup, "ok": report.ok, **jsonable(report)}
    print_result(facts, "\n".join([*map(str, report.problems), text]), as_json)
    if not report.ok:
        leave(1)


@program.command()
@local_path
@click.option(
    "--backup",
    "to",
    metavar="TO",
    type=DIRECTORY,
    help="A new or empty directory for the backup. Default: PATH.format-N.",
)
@click.option("--despite-damage", is_flag=True, help="Upgrade although the ledger is damaged.")
@as_json
def upgrade(path: str, to: str | None, despite_damage: bool, as_json: bool) -> None:
    """Back up a ledger of an earlier format, then upgrade it to this version's format.

    Close every engine on the ledger first. Earlier versions can then open only the backup.
    """
    if is_url(path):
        raise xl.UnsupportedError("upgrade is for a local ledger; a cluster has no format to raise")
    done = xl.upgrade(path, to, despite_damage=despite_damage)
    if done.backup is None:
        said = f"{path} has format {done.after} already: nothing to do"
    else:
        formats = f"from format {done.before} to {done.after}"
        said = f"{path} was upgraded {formats}; backup: {done.backup}"
    text = "\n".join([*map(str, done.problems), said])
    print_result({"path": path, **jsonable(done)}, text, as_json)
