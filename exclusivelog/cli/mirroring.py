"""`mirror`: a log's copy on a cluster, and back."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

import exclusivelog as xl
from exclusivelog.cli.output import fields_of, print_result
from exclusivelog.cli.program import (
    ENGINE_NAME,
    Argument,
    access,
    access_options,
    as_json,
    is_url,
    local_path,
    program,
)

PROGRESS_SECONDS = 2.0


@program.command()
@local_path
@click.argument(
    "topics", cls=Argument, metavar="[TOPIC]...", nargs=-1, help="Only these. Default: all."
)  # fmt: skip
@click.option(
    "--to", metavar="URL",
    help="Copy to this Pulsar namespace: pulsar://host:6650/tenant/namespace.",
)  # fmt: skip
@click.option(
    "--from", "origin", metavar="URL",
    help="Bring a log back: make PATH, a new directory, of what this namespace has.",
)  # fmt: skip
@click.option("--follow", "-f", is_flag=True, help="Go on with what is written meanwhile.")
@click.option(
    "--plain", is_flag=True,
    help="One Pulsar message each, for any consumer; slower. Default: frames of many messages.",
)  # fmt: skip
@click.option(
    "--verify", is_flag=True, help="Compare all that is mirrored with PATH; copy nothing."
)
@click.option(
    "--trimmed", type=click.Choice(("error", "earliest")), default="error",
    help="Where PATH has lost its oldest messages before the first copy: begin with the rest?",
)  # fmt: skip
@click.option(
    "--timeout", metavar="SECONDS", type=click.FloatRange(min=1), default=60.0,
    help="Seconds within which the broker has to store a message.",
)  # fmt: skip
@access_options
@as_json
def mirror(
    path: str, topics: tuple[str, ...], to: str | None, origin: str | None, follow: bool,
    plain: bool, verify: bool, trimmed: Any, timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Copy a log to a namespace of a Pulsar cluster, exactly once, or bring it back from there.

    Every few seconds it prints how far each topic is. Stop it whenever you like, and run it again:
    it goes on behind the last message that the cluster has.
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
            "mirror copies a local log to a cluster; bring one back first: "
            f"exclusivelog mirror NEW --from {path}"
        )
    from exclusivelog.cluster import Mirror

    with xl.open(path, ENGINE_NAME, readonly=True) as engine:
        with Mirror(
            engine, to, topics or None, plain=plain, trimmed=trimmed, timeout=timeout, **access()
        ) as copy:  # fmt: skip
            if verify:
                for name, found in copy.verify().items():
                    text = f"{found.compared:,} compared, no difference; {found.lag:,} behind"
                    facts = {"topic": name, "compared": found.compared, "lag": found.lag}
                    print_result(facts, f"{name}: {text}", as_json)
            else:
                _run_mirror(copy, follow, as_json)


def _restore_from(
    path: str, topics: Sequence[str], origin: str, timeout: float, as_json: bool
) -> None:  # fmt: skip
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
        if now != before or ended:  # nothing new is nothing to say
            for one in now:
                if as_json:
                    print(json.dumps({**fields_of(one), "lag": one.lag}))
                elif one.begun:
                    print(f"{one.topic}: {one.position:,} mirrored, {one.lag:,} behind")
            sys.stdout.flush()
        if ended:
            return
        before = now
