"""`mirror`: copy a log to a cluster, or restore it from there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

import exclusivelog as xl
from exclusivelog.arguments import is_url
from exclusivelog.cli.names import ENGINE_NAME
from exclusivelog.cli.output import fields_of, print_result, printable
from exclusivelog.cli.program import (
    access,
    access_options,
    as_json,
    local_path,
    maybe_topics,
    program,
)

PROGRESS_SECONDS = 2.0


@program.command()
@local_path
@maybe_topics
@click.option(
    "--to",
    metavar="URL",
    help="Copy to this Pulsar namespace: pulsar://host:6650/tenant/namespace.",
)
@click.option(
    "--from",
    "origin",
    metavar="URL",
    help="Restore a log: create PATH, a new directory, from the topics of this namespace.",
)
@click.option("--follow", "-f", is_flag=True, help="Continue with later messages.")
@click.option(
    "--plain",
    is_flag=True,
    help="One Pulsar message for each message, for any consumer; slower. Default: frames of many "
    "messages.",
)
@click.option(
    "--verify", is_flag=True, help="Compare all that is mirrored with PATH; copy nothing."
)
@click.option(
    "--trimmed",
    type=click.Choice(("error", "earliest")),
    default="error",
    help="If the oldest messages were trimmed before the first copy: fail, or begin with the rest.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=60.0,
    help="Seconds that the broker has to store a message.",
)
@access_options
@as_json
def mirror(
    path: str,
    topics: tuple[str, ...],
    to: str | None,
    origin: str | None,
    follow: bool,
    plain: bool,
    verify: bool,
    trimmed: Any,
    timeout: float,
    as_json: bool,
) -> None:
    """Copy a log to a namespace of a Pulsar cluster, exactly once, or restore it from there.

    Every few seconds it prints the progress of each topic. You can stop it at any time and run it
    again: it continues after the last message that the cluster has.
    """
    if to is None:
        if origin is None or follow or plain or verify:
            raise click.UsageError("give --to URL, or --from URL and no option of --to")
        _restore_from(path, topics, origin, timeout, as_json)
        return
    if origin is not None:
        raise click.UsageError("give either --to URL or --from URL")
    if is_url(path):
        raise xl.UnsupportedError(
            "mirror copies a local log to a cluster; restore it first: "
            f"exclusivelog mirror NEW --from {path}"
        )
    from exclusivelog.cluster import Mirror

    with xl.open(path, ENGINE_NAME, readonly=True) as engine:
        with Mirror(
            engine, to, topics or None, plain=plain, trimmed=trimmed, timeout=timeout, **access()
        ) as copy:
            if verify:
                for name, found in copy.verify().items():
                    text = f"{found.compared:,} compared, no difference; {found.lag:,} behind"
                    if found.unknown:
                        text += f"; {found.unknown:,} cannot be compared, as the log has lost them"
                    facts = {"topic": name, **found._asdict()}
                    print_result(facts, f"{name}: {text}", as_json)
            else:
                _run_mirror(copy, follow, as_json)


def _restore_from(
    path: str, topics: Sequence[str], origin: str, timeout: float, as_json: bool
) -> None:
    from exclusivelog.restoring import restore

    given = {name: value for name, value in access().items() if name != "check_policies"}
    for name, count in restore(path, origin, topics or None, timeout=timeout, **given).items():
        print_result({"topic": name, "messages": count}, f"{name}: {count:,} messages", as_json)


def _run_mirror(copy: Any, follow: bool, as_json: bool) -> None:
    import signal

    signal.signal(signal.SIGTERM, lambda *_: copy.stop())
    copy.start(follow)
    before: list[Any] = []
    while True:
        ended = copy.wait(0 if not before else PROGRESS_SECONDS)
        now = copy.progress()
        if now != before or ended:
            for one in now:
                if as_json:
                    print(json.dumps({**fields_of(one), "lag": one.lag}))
                elif one.begun:
                    print(f"{printable(one.topic)}: {one.position:,} mirrored, {one.lag:,} behind")
            sys.stdout.flush()
        if ended:
            return
        before = now
