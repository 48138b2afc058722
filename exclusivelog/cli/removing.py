"""`delete`, `terminate` and `retention`: what ends topics, or removes messages by itself."""

from __future__ import annotations

import re
import sys

import click

from exclusivelog.cli.program import ledger_path, open_to_write, program, topic_name

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

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
@yes
def delete(path: str, topic: str, yes: bool) -> None:
    """Remove a topic and its messages for good. Nobody may hold it or wait for it."""
    with open_to_write(path) as engine:
        here = engine.topic(topic, create=False)
        _confirm(f"Delete {topic} with {here.next_offset - here.first_offset:,} messages?", yes)
        engine.delete_topic(topic)
    print(f"{topic} is deleted")


@program.command()
@ledger_path
@topic_name
@yes
def terminate(path: str, topic: str, yes: bool) -> None:
    """End all writing to a topic for good. Its messages can still be read."""
    with open_to_write(path) as engine:
        here = engine.topic(topic, create=False)
        _confirm(f"End all writing to {topic}?", yes)
        offset = here.terminate()
    print(f"{topic} is terminated at offset {offset}")


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: object, param: object, ctx: object) -> float:
        """Seconds, from 90, 90s, 15m, 24h or 7d."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value))
        if found is None:
            raise click.BadParameter(f"{value}: it takes seconds, or 90s, 15m, 24h, 7d")
        return float(found[1]) * SECONDS[found[2] or "s"]


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
@click.option("--off", is_flag=True, help="Keep everything.")
def retention(
    path: str, topic: str, max_age: float | None, max_bytes: int | None, off: bool
) -> None:  # fmt: skip
    """Remove a topic's old messages in the background from now on."""
    if off == (max_age is not None or max_bytes is not None):
        raise click.UsageError("give --max-age, --max-bytes or both; or --off alone")
    with open_to_write(path) as engine:
        engine.topic(topic, create=False).retention(max_age, max_bytes)
    kept = [f"at most {max_age:g} s"] if max_age is not None else []
    kept += [f"at most {max_bytes} bytes"] if max_bytes is not None else []
    print(f"{topic} keeps {' and '.join(kept) or 'everything'}")
