"""The output of commands: tables, and texts for messages and owners."""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO, TypeVar

import exclusivelog as xl

Row = TypeVar("Row")


def fields_of(info: Any) -> dict[str, Any]:
    """The fields of a dataclass."""
    from dataclasses import asdict  # here: the help text does not need this import

    return asdict(info)


def of_each(
    engine: xl.Engine, names: Iterable[str], rows: Callable[[xl.Topic], Iterable[Row]]
) -> Iterator[Row]:
    """What `rows` returns of these topics; one that is deleted meanwhile is left out."""
    for name in names:
        found: Iterable[Row] = ()
        with contextlib.suppress(xl.TopicNotFoundError):
            found = list(rows(engine.topic(name, create=False)))
        yield from found


def holder_of(topic: xl.Topic) -> str:
    """The topic's owner, or the number of its shared producers."""
    holders = topic.holders
    if holders and not holders[0].access_mode.is_exclusive:
        return f"{len(holders)} shared"
    return f"{holders[0].producer_name} (pid {holders[0].pid})" if holders else "-"


def lags_of(stats: xl.EngineStats) -> dict[str, int]:
    """{topic: lag of the reader group that is farthest behind}."""
    lag: dict[str, int] = {}
    for group in stats.groups:
        if group.lag is not None:
            lag[group.topic] = max(lag.get(group.topic, 0), group.lag)
    return lag


def message_facts(message: xl.Message) -> dict[str, object]:
    """The parts of a message, for JSON."""
    facts: dict[str, object] = {
        "offset": message.offset,
        "epoch": message.epoch,
        "publish_time": message.publish_time,
        "event_time": message.event_time,
        "producer": message.producer_name,
        "sequence_id": message.sequence_id,
        "properties": message.properties,
    }
    data: bytes | None
    for name, data in (("key", message.key), ("value", message.value)):
        try:
            facts[name] = None if data is None else data.decode()
        except UnicodeDecodeError:
            facts[f"{name}_base64"] = base64.b64encode(data or b"").decode()
    return facts


BATCH, BATCH_BYTES = 1000, 1 << 20


def read_some_of(reader: xl.Reader, most: int) -> list[xl.Message]:
    """The next messages: up to `most`, and about a megabyte, because one may have a gigabyte."""
    found: list[xl.Message] = []
    size = 0
    while len(found) < most and size < BATCH_BYTES:
        try:
            message = next(reader, None)
        except xl.ExclusiveLogError:
            if not found:
                raise
            break  # the next call raises it again
        if message is None:
            break
        found.append(message)
        size += len(message.raw_value or b"")
    return found


def print_result(
    facts: Mapping[str, object], text: str, as_json: bool, file: TextIO | None = None
) -> None:
    """Print the result of a command, as a JSON object or as text. Default of `file`: stdout."""
    print(json.dumps(facts) if as_json else printable_lines(text), file=file)


# ---- tables ------------------------------------------------------------------------------

LEAST_WIDTH = 16  # of a column whose cells are folded


def print_table(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    header: bool = True,
    spare: Sequence[str] = (),
) -> None:
    """Print a table on a terminal, and tab-separated lines elsewhere."""
    Table(names, header, spare=spare).print(rows)


class Table:
    """A table that is printed in parts: later rows have the same column widths as the first ones.

    It is at most as wide as the terminal. If it does not fit, `spare` columns are left out, in
    their order, until it does. If that is not enough, long cells are folded. If the columns became
    too narrow for that, each row is printed as a list of its cells. `grows` names a column that
    gets the remaining width.
    """

    def __init__(
        self,
        names: Sequence[str],
        header: bool = True,
        *,
        grows: str = "",
        spare: Sequence[str] = (),
    ) -> None:
        self._names, self._header, self._grows = names, header, grows
        self._spare = list(spare)
        self._widths: dict[str, int] | None = None
        self._begun = False

    def print(self, rows: Iterable[Sequence[object]]) -> None:
        """Print these rows, after the headings at the first call."""
        cells = [[printable(str(cell)) for cell in row] for row in rows]
        if not (sys.stdout.isatty() and self._draw(cells)):
            for line in cells if self._begun or not self._header else [self._names, *cells]:
                print("\t".join(line))
        self._begun = True

    def _draw(self, cells: Sequence[Sequence[str]]) -> bool:
        """Draw the rows; False if rich is not installed."""
        try:  # here: its import takes as long as everything else
            from rich.cells import cell_len
            from rich.console import Console
        except ImportError:
            return False
        console = Console(height=25)  # without a height, it uses 80 columns if TERM is dumb
        if self._widths is None:
            lines = [self._names, *cells] if self._header else cells
            natural = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
            self._widths = self._fit(dict(zip(self._names, natural, strict=True)), console.width)
        if self._widths:
            console.print(self._as_table(cells, self._widths))
        else:
            for line in cells:
                console.print(self._as_list(line))
        return True

    def _fit(self, natural: dict[str, int], width: int) -> dict[str, int]:
        """The width of each visible column; empty if rows must be printed as lists."""
        room = width - 3 * len(natural) - 1  # rich puts three characters between columns
        for name in self._spare:
            if sum(natural.values()) > room:
                room += 3
                del natural[name]
        widths = dict(zip(natural, shares([*natural.values()], room), strict=False))
        if widths and self._grows:
            widths[self._grows] += room - sum(widths.values())
        return widths

    def _as_table(self, cells: Sequence[Sequence[str]], widths: Mapping[str, int]) -> Any:
        from rich import box
        from rich.padding import Padding
        from rich.table import Column, Table
        from rich.text import Text

        first = self._header and not self._begun
        columns = [Column(name, width=width, overflow="fold") for name, width in widths.items()]
        table = Table(*columns, box=box.SIMPLE_HEAD, show_header=first, show_edge=False)
        for line in cells:
            shown = zip(self._names, line, strict=True)
            table.add_row(*(Text(cell) for name, cell in shown if name in widths))
        return Padding(table, (0, 0, 0, 1), expand=False)

    def _as_list(self, line: Sequence[str]) -> Any:
        from rich.table import Column, Table
        from rich.text import Text

        names = max(map(len, self._names))
        table = Table(
            Column(width=names),
            Column(overflow="fold"),
            box=None,
            show_header=False,
            pad_edge=False,
        )
        for name, cell in zip(self._names, line, strict=True):
            table.add_row(Text(name, style="bold"), Text(cell))
        table.add_row()
        return table


def shares(natural: Sequence[int], room: int, least: int = LEAST_WIDTH) -> list[int]:
    """The widths of columns with these natural widths in a total width of `room`: the widest become
    narrower. Empty if one of these would be narrower than `least`.

    >>> shares([5, 10], 80), shares([5, 100, 30], 60), shares([60, 60, 60], 40)
    ([5, 10], [5, 28, 27], [])
    """
    widths, left = list(natural), room
    order = sorted(range(len(widths)), key=widths.__getitem__)
    for place, column in enumerate(order):
        fair = left // (len(order) - place)
        if widths[column] > fair:
            if fair < least:
                return []
            widths[column] = fair
        left -= widths[column]
    return widths


def shortened(text: str, width: int) -> str:
    """The text, without its middle if it is wider than this on a terminal: names often differ only
    at their ends.

    >>> shortened("orders-2026-01", 9), shortened("orders", 9)
    ('orde…6-01', 'orders')
    """
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{set_cell_size(text, width - 1 - end)}…{set_cell_size(text[::-1], end)[::-1]}"


def decoded(data: bytes) -> str:
    """The bytes as text; invalid UTF-8 is escaped."""
    return data.decode(errors="backslashreplace")


def printable(text: str) -> str:
    """Escape control characters: a message must not move the cursor, or end its line."""
    return text if text.isprintable() else text.translate(ESCAPES)


class _Escapes(dict[int, str]):
    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if character.isprintable() else repr(character)[1:-1]
        return self[code]


ESCAPES = _Escapes()


def printable_lines(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def pairs_of(properties: Mapping[str, str]) -> str:
    """The properties as text: `name=value name=value`."""
    return " ".join(f"{name}={value}" for name, value in properties.items())


def second_of(ms: int) -> str:
    """The time in UTC, without the milliseconds.

    >>> second_of(1_500)
    '1970-01-01 00:00:01Z'
    """
    return datetime.fromtimestamp(ms // 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def time_of(ms: int) -> str:
    """The time in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


# ---- records -----------------------------------------------------------------------------


def counts_of(report: xl.Report) -> str:
    """What a check of a whole ledger has read, and whether that is sound."""
    found = "sound" if report.ok else f"{len(report.problems)} problems"
    counted = f"{report.topics:,} topics, {report.entries:,} entries, {report.messages:,} messages"
    return f"{counted}: {found}"


def items_of(found: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass and their values, without conversion."""
    from dataclasses import fields

    for each in fields(found):
        yield each.name, getattr(found, each.name)


def jsonable(value: Any) -> Any:
    """Convert a value to JSON types."""
    from dataclasses import is_dataclass

    if isinstance(value, xl.Histogram):
        buckets = zip(value.bounds, value.counts, strict=True)
        return {
            "count": value.count,
            "sum": value.sum,
            "buckets": [[None if bound == float("inf") else bound, n] for bound, n in buckets if n],
        }
    if is_dataclass(value):
        return {name: jsonable(held) for name, held in items_of(value)}
    if isinstance(value, Mapping):
        return {name: jsonable(held) for name, held in value.items()}
    if isinstance(value, (tuple, list)):
        return [jsonable(held) for held in value]
    return value


def print_records(
    names: Sequence[str], records: Iterable[Mapping[str, Any]], as_json: bool
) -> None:
    """Print records with these fields, as JSON lines or as a table."""
    if as_json:
        for record in records:
            print(json.dumps(record))
        return
    headings = [name.replace("_", " ") for name in names]
    print_table(headings, ([cell_of(name, record[name]) for name in names] for record in records))


def cell_of(name: str, value: Any) -> str:
    """The cell of a table for the value of a field."""
    if value is None or value == "":
        return "-"
    if name in ("from", "to") and not isinstance(value, str):
        return party_of(value)
    if isinstance(value, dict):
        return "; ".join(f"{key}: {', '.join(names)}" for key, names in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return time_of(value) if name in ("time", "since") else str(value)


def party_of(party: Mapping[str, Any] | None) -> str:
    """One side of a change of ownership."""
    if party is None:
        return "-"
    producer = "" if party["producer"] is None else f"{party['producer']} of "
    return f"{producer}{party['engine_name']} (id {party['engine']}, pid {party['pid']})"


def announcement_of(topic: xl.Topic) -> str:
    """The announcement of the topic's owner as text; "" if there is none."""
    said = topic.announcement
    if said is None:
        return ""
    return (
        f"{printable(pairs_of(said.info))}; {time_of(said.time)} by "
        f"{printable(said.producer_name)} of {printable(said.engine_name)} (pid {said.pid}, epoch "
        f"{said.epoch})"
    )
