"""What commands print: tables, and the fields of messages and of what holds a topic."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import exclusivelog as xl


def fields_of(info: Any) -> dict[str, Any]:
    """The fields of a dataclass."""
    from dataclasses import asdict  # an engine has imported it; the help need not

    return asdict(info)


def holder_of(topic: xl.Topic) -> str:
    """Who may write to the topic."""
    holders = topic.holders
    if holders and holders[0].access_mode is xl.AccessMode.SHARED:
        return f"{len(holders)} shared"
    return f"{holders[0].producer_name} (pid {holders[0].pid})" if holders else "-"


def message_facts(message: xl.Message) -> dict[str, object]:
    """The parts of a message, for JSON."""
    facts: dict[str, object] = {
        "offset": message.offset, "epoch": message.epoch, "publish_time": message.publish_time,
        "event_time": message.event_time, "producer": message.producer_name,
        "sequence_id": message.sequence_id, "properties": message.properties,
    }  # fmt: skip
    data: bytes | None
    for name, data in (("key", message.key), ("value", message.value)):
        try:
            facts[name] = None if data is None else data.decode()
        except UnicodeDecodeError:
            facts[f"{name}_base64"] = base64.b64encode(data or b"").decode()
    return facts


def print_table(
    names: Sequence[str], rows: Iterable[Sequence[object]], header: bool = True
) -> None:
    """Print a table on a terminal; anywhere else, lines with tabs."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if not (sys.stdout.isatty() and _draw(names, cells, header)):
        for line in [names, *cells] if header else cells:
            print("\t".join(line))


def _draw(names: Sequence[str], cells: Iterable[Sequence[str]], header: bool) -> bool:
    """Draw a table; False where rich is not installed."""
    try:  # here: its import takes as long as all the rest
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(*names, box=box.SIMPLE_HEAD, show_header=header)
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    # A terminal that is too narrow breaks the lines; rich would cut the cells. Without a height, it
    # takes 80 columns where TERM is dumb.
    needed = Console(width=1000, height=25).measure(table).maximum
    Console(width=max(needed, Console().width), height=25).print(table)
    return True


def decoded(data: bytes) -> str:
    """The text; bytes that are none are escaped."""
    return data.decode(errors="backslashreplace")


def printable(text: str) -> str:
    """Control characters escaped: a message must not move the cursor, or end its line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def pairs_of(properties: Mapping[str, str]) -> str:
    """name=value, for each."""
    return " ".join(f"{name}={value}" for name, value in properties.items())


def time_of(ms: int) -> str:
    """The time in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
