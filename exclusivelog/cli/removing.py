"""`trim`, `retention`, `delete` and `terminate`: remove messages, and end topics."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any, Literal

import click

import exclusivelog as xl
from exclusivelog.cli.output import fields_of, print_result
from exclusivelog.cli.program import (
    SECONDS,
    age_of,
    as_json,
    ask,
    confirm,
    ledger_path,
    open_to_read,
    open_to_write,
    program,
    start_of,
    topic_name,
    yes,
)


def _messages(count: int) -> str:
    return f"{count:,} message" + ("" if count == 1 else "s")


# ---- sizes and ages ----------------------------------------------------------------------

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b", re.IGNORECASE)


def size_of(text: str) -> int | None:
    """The bytes of 1000, 10kB, 1.5GB or 1GiB; None for another text.

    >>> size_of("1000"), size_of("1.5GB"), size_of("1GiB"), size_of("1G")
    (1000, 1500000000, 1073741824, None)
    """
    if text.isdecimal():
        return int(text)
    found = SIZE.fullmatch(text)
    if found is None or (found[3] and not found[2]):
        return None
    unit: int = (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ")
    return round(float(found[1]) * unit)


class _Bytes(click.ParamType[int]):
    name = "bytes"

    def convert(self, value: object, param: object, ctx: object) -> int:
        """Bytes, from 1000, 10kB, 1GB or 1GiB."""
        size = value if isinstance(value, int) else size_of(str(value))
        if size is None:
            raise click.BadParameter(
                f"{value}: it takes bytes, or a size such as 500kB, 10MB, 1GB or 1GiB"
            )
        return size


class _Age(click.ParamType[float]):
    name = "age"

    def convert(self, value: object, param: object, ctx: object) -> float:
        """Seconds, from 90s, 15m, 24h or 7d."""
        age = value if isinstance(value, float) else age_of(str(value))
        if age is None:
            units = f"{value}s, {value}m, {value}h or {value}d"
            raise click.BadParameter(
                f"{value}: it takes an age with its unit: "
                + (units if str(value).isdecimal() else "90s, 15m, 24h or 7d")
            )
        return age


class _OrNone(click.ParamType[Any]):
    """A value, or "none": no limit."""

    def __init__(self, kind: click.ParamType[Any]) -> None:
        self._kind = kind
        self.name = kind.name

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value; "none" as it is."""
        return value if value == NONE else self._kind.convert(value, param, ctx)


NONE = "none"


# ---- trim, delete, terminate -------------------------------------------------------------


@program.command()
@ledger_path
@topic_name
@click.option(
    "--before",
    metavar="OFFSET|TIME|AGE",
    help="Remove messages before this offset or time, or older than an AGE: 90s, 15m, 1h, 7d. A "
    "TIME without a zone is local.",
)
@click.option(
    "--max-bytes",
    metavar="BYTES",
    type=_Bytes(),
    help="Keep at most so many bytes of the newest messages: 1000000, 10MB, 1GB, 1GiB.",
)
@yes
@as_json
def trim(
    path: str, topic: str, before: str | None, max_bytes: int | None, yes: bool, as_json: bool
) -> None:
    """Remove a topic's old messages permanently.

    On a terminal it says how many, and asks first.
    """
    if before is None and max_bytes is None:
        raise click.UsageError("give --before OFFSET, --max-bytes BYTES, or both")
    end = None if before is None else start_of(before, "--before")
    with open_to_write(path) as engine:
        here = engine.topic(topic, create=False)
        began, count = here.first_offset, len(here)
        gone = here.trim(end, max_bytes, dry_run=True) - began
        if gone:
            ask(f"Remove {gone:,} of the {_messages(count)} of {topic}?", yes)
        first = here.trim(end, max_bytes)
    facts = {"topic": topic, "first_offset": first, "removed_messages": first - began}
    text = f"{topic} begins at offset {first}: {_messages(first - began)} removed"
    print_result(facts, text, as_json)


@program.command()
@ledger_path
@topic_name
@yes
@as_json
def delete(path: str, topic: str, yes: bool, as_json: bool) -> None:
    """Remove a topic and its messages permanently. The topic must have no holder and no waiter."""
    with open_to_write(path) as engine:
        count = len(engine.topic(topic, create=False))
        confirm(f"Delete {topic} with {_messages(count)}?", yes)
        engine.delete_topic(topic)
    text = f"{topic} is deleted: {_messages(count)} removed"
    print_result({"topic": topic, "deleted_messages": count}, text, as_json)


@program.command()
@ledger_path
@topic_name
@yes
@as_json
def terminate(path: str, topic: str, yes: bool, as_json: bool) -> None:
    """End all writing to a topic permanently. Its messages can still be read."""
    with open_to_write(path) as engine:
        here = engine.topic(topic, create=False)
        confirm(f"End all writing to {topic}?", yes)
        offset = here.terminate()
    text = f"{topic} is terminated at offset {offset}"
    print_result({"topic": topic, "next_offset": offset}, text, as_json)


# ---- retention ---------------------------------------------------------------------------


@program.command()
@ledger_path
@topic_name
@click.option(
    "--max-age",
    metavar="AGE",
    type=_OrNone(_Age()),
    help="Remove messages older than this: 90s, 15m, 24h, 7d; none: no limit.",
)
@click.option(
    "--max-bytes",
    metavar="BYTES",
    type=_OrNone(_Bytes()),
    help="Keep at most so many bytes of the newest messages: 1000000, 10MB, 1GB; none: no limit.",
)
@click.option(
    "--keep",
    type=click.Choice(("keys", NONE)),
    help="keys: compact the topic before messages are removed, so that compacted readers find the "
    "last message of every key.",
)
@click.option("--off", is_flag=True, help="Keep everything; for __events__, the default limit.")
@yes
@as_json
def retention(
    path: str,
    topic: str,
    max_age: float | Literal["none"] | None,
    max_bytes: int | Literal["none"] | None,
    keep: Literal["keys", "none"] | None,
    off: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Show a topic's retention; or change it, to remove old messages in the background.

    An option that is left out stays as it is. On a terminal it says how many messages will be
    removed, and asks first. Those that are more than an hour too old are removed an hour later, as
    a clock may be wrong.
    """
    given = {"max_age": max_age, "max_bytes": max_bytes, "keep": keep}
    changes: dict[str, Any] = {
        name: None if value == NONE else value for name, value in given.items() if value is not None
    }
    if off and changes:
        raise click.UsageError("give --off alone, or --max-age, --max-bytes and --keep")
    if off:
        changes = dict.fromkeys(given)
    with open_to_write(path) if changes else open_to_read(path) as engine:
        here = engine.topic(topic, create=False)
        made = here.retention()
        due = 0
        if changes:
            wanted = xl.Retention(**{**fields_of(made), **changes})
            if due := _due(here, wanted):
                ask(f"{_kept(topic, wanted)}. Remove {_messages(due)} of it?", yes)
            made = here.retention(**changes)
    text = _kept(topic, made) + (f"; {_messages(due)} will be removed, {SOON}" if due else "")
    told = {"due_messages": due} if changes else {}
    print_result({"topic": topic, **fields_of(made), **told}, text, as_json)


SOON = "in the background; in an hour, if they are more than an hour too old"


def _due(topic: xl.Topic, wanted: xl.Retention) -> int:
    """How many messages this retention removes as soon as it may."""
    before = None
    if wanted.max_age is not None and wanted.max_age < time.time():
        before = datetime.fromtimestamp(time.time() - wanted.max_age, UTC)
    if before is None and wanted.max_bytes is None:
        return 0
    first = topic.first_offset
    return topic.trim(before, wanted.max_bytes, dry_run=True) - first


def _kept(topic: str, made: xl.Retention) -> str:
    kept = [] if made.max_age is None else [f"messages of the last {_age_text(made.max_age)}"]
    kept += [] if made.max_bytes is None else [f"at most {made.max_bytes:,} bytes"]
    all_of_it = "what it keeps by default" if topic == "__events__" else "everything"
    keys = "" if made.keep is None else ", and the last message of every key"
    if not kept and keys:
        keys = "; a trim keeps the last message of every key"
    return f"{topic} keeps {' and '.join(kept) or all_of_it}{keys}"


def _age_text(seconds: float) -> str:
    """The duration in the largest unit that needs no fraction.

    >>> _age_text(604800.0), _age_text(5400.0), _age_text(0.5)
    ('7d', '90m', '0.5s')
    """
    for unit, length in reversed(SECONDS.items()):
        if seconds and seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:g}s"
