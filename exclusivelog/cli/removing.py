"""`trim`, `retention`, `delete` and `terminate`: remove messages, and end topics."""

from __future__ import annotations

import sys

import click

from exclusivelog.cli.output import print_result
from exclusivelog.cli.program import (
    SECONDS,
    age_of,
    as_json,
    ledger_path,
    open_to_write,
    program,
    start_of,
    topic_name,
)

yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} This cannot be undone: give --yes")
    click.confirm(f"{question} This cannot be undone.", abort=True, err=True)


@program.command()
@ledger_path
@topic_name
@click.option(
    "--before", metavar="OFFSET|TIME|AGE",
    help="Remove messages before this offset or time, or older than an AGE: 90s, 15m, 1h, 7d. A "
    "TIME without a zone is local.",
)  # fmt: skip
@click.option(
    "--max-bytes", metavar="BYTES", type=click.IntRange(min=0),
    help="Keep at most so many bytes of the newest messages.",
)  # fmt: skip
@as_json
def trim(
    path: str, topic: str, before: str | None, max_bytes: int | None, as_json: bool
) -> None:  # fmt: skip
    """Remove a topic's old messages permanently."""
    if before is None and max_bytes is None:
        raise click.UsageError("give --before OFFSET, --max-bytes BYTES, or both")
    end = None if before is None else start_of(before, "--before")
    with open_to_write(path) as engine:
        first = engine.topic(topic, create=False).trim(end, max_bytes)
    text = f"{topic} begins at offset {first}"
    print_result({"topic": topic, "first_offset": first}, text, as_json)


@program.command()
@ledger_path
@topic_name
@yes
@as_json
def delete(path: str, topic: str, yes: bool, as_json: bool) -> None:
    """Remove a topic and its messages permanently. The topic must have no holder and no waiter."""
    with open_to_write(path) as engine:
        here = engine.topic(topic, create=False)
        count = here.next_offset - here.first_offset
        _confirm(f"Delete {topic} with {count:,} messages?", yes)
        engine.delete_topic(topic)
    print_result({"topic": topic, "deleted_messages": count}, f"{topic} is deleted", as_json)


@program.command()
@ledger_path
@topic_name
@yes
@as_json
def terminate(path: str, topic: str, yes: bool, as_json: bool) -> None:
    """End all writing to a topic permanently. Its messages can still be read."""
    with open_to_write(path) as engine:
        here = engine.topic(topic, create=False)
        _confirm(f"End all writing to {topic}?", yes)
        offset = here.terminate()
    text = f"{topic} is terminated at offset {offset}"
    print_result({"topic": topic, "next_offset": offset}, text, as_json)


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: object, param: object, ctx: object) -> float:
        """Seconds, from 90, 90s, 15m, 24h or 7d."""
        if isinstance(value, float):
            return value
        age = float(str(value)) if str(value).isdecimal() else age_of(str(value))
        if age is None:
            raise click.BadParameter(f"{value}: it takes seconds, or 90s, 15m, 24h, 7d")
        return age


@program.command()
@ledger_path
@topic_name
@click.option(
    "--max-age", metavar="AGE", type=_Duration(),
    help="Remove messages older than this: seconds, or 90s, 15m, 24h, 7d.",
)  # fmt: skip
@click.option(
    "--max-bytes", metavar="BYTES", type=click.IntRange(min=0),
    help="Keep at most so many bytes of the newest messages.",
)  # fmt: skip
@click.option("--off", is_flag=True, help="Keep everything; for __events__, the default limit.")
@as_json
def retention(
    path: str, topic: str, max_age: float | None, max_bytes: int | None, off: bool, as_json: bool
) -> None:  # fmt: skip
    """Remove a topic's old messages in the background from now on."""
    if off == (max_age is not None or max_bytes is not None):
        raise click.UsageError("give --max-age, --max-bytes or both; or --off alone")
    with open_to_write(path) as engine:
        engine.topic(topic, create=False).retention(max_age, max_bytes)
    kept = [f"messages of the last {_age_text(max_age)}"] if max_age is not None else []
    kept += [f"at most {max_bytes:,} bytes"] if max_bytes is not None else []
    all_of_it = "what it keeps by default" if topic == "__events__" else "everything"
    text = f"{topic} keeps {' and '.join(kept) or all_of_it}"
    print_result({"topic": topic, "max_age": max_age, "max_bytes": max_bytes}, text, as_json)


def _age_text(seconds: float) -> str:
    """The duration in the largest unit that needs no fraction.

    >>> _age_text(604800.0), _age_text(5400.0), _age_text(0.5)
    ('7d', '90m', '0.5s')
    """
    for unit, length in reversed(SECONDS.items()):
        if seconds and seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:g}s"
