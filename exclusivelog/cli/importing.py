"""`import`: append the messages of a file that `export` has written.

The producer is named after the file's content, and the sequence id of a message is its place in the
file. So a second import of the file continues where the first one ended, and adds nothing twice.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import click

import exclusivelog as xl
from exclusivelog.cli.exporting import COLUMNS, FORMATS, format_of
from exclusivelog.cli.json_lines import InputError, arguments_from, arguments_of, once
from exclusivelog.cli.output import print_result, printable
from exclusivelog.cli.program import (
    PATH,
    Argument,
    as_json,
    is_stream,
    ledger_path,
    naming,
    open_to_write,
    program,
    topic_name,
    topic_to_append_to,
)
from exclusivelog.cli.streams import lines_of

READ_BYTES = 1 << 20
ROWS = 1000  # of CSV and Parquet, that are appended at once
BATCH_BYTES = 8 << 20  # of Parquet
PROGRESS_SECONDS = 2.0

Record = dict[str, Any]  # the arguments of `send`


@program.command("import")
@ledger_path
@topic_name
@click.argument(
    "file",
    cls=Argument,
    metavar="[FILE]",
    required=False,
    type=PATH,
    help="What to read. Default: stdin, as with -.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="Default: the ending of FILE; without an ending, jsonl.",
)
@click.option(
    "--name",
    help="The producer's name. Default: one made of the content of FILE; for a pipe, a new one.",
)
@as_json
def import_messages(
    path: str, topic: str, file: str | None, kind: str | None, name: str | None, as_json: bool
) -> None:
    """Append the messages of a file that `export` has written, or of one like it.

    Keys, values, properties and event times are those of the file; offsets, epochs, publish times
    and producers are new. The ledger and the topic are created if they are missing.

    An interrupted import is continued by the same command: what is in the topic already is left
    out. So is all of a file that is imported a second time; to import it twice, give another
    --name. With --name, the first messages of the input are left out, as many as a producer of
    that name has sent to the topic. From a pipe, only that prevents duplicates.

    A line or row that is no message ends the command with exit status 2; those before it are
    imported. A corrected file has other content: continue with the --name that the error tells.
    """
    kind = kind or format_of(file or "")
    with _opened(file) as source:
        if kind == "parquet" and not _is_regular(source):
            raise click.UsageError("Parquet is read from a file, not from a pipe; give FILE")
        before = _state_of(source)
        name = name or (_name_of(source) if _is_regular(source) else None)
        with open_to_write(path, create=True) as engine:
            with topic_to_append_to(engine, topic).producer(name=name) as producer:
                work = Import(producer, "line" if kind == "jsonl" else "row")
                try:
                    READERS[kind](source, work)
                except InputError as error:
                    raise _with_advice(error, work) from None
        if _is_regular(source) and _state_of(source) != before:
            raise ValueError(
                f"{'stdin' if is_stream(file) else file} was changed while it was read, so a "
                "repetition would not recognise what is imported; give that --name "
                f"{producer.name}"
            )
    _tell_result(topic, work, as_json)


def _with_advice(error: InputError, work: Import) -> InputError:
    """The error, and how to import what follows once the input is corrected."""
    name = work.producer.name
    if work.producer.last_sequence_id < 0:
        return error
    return InputError(
        f"{error.message}. What is before it is imported; once it is corrected, continue with "
        f"--name {name}, or that is imported again"
    )


def _tell_result(topic: str, work: Import, as_json: bool) -> None:
    facts = {
        "topic": topic,
        "messages": work.count - work.skipped,
        "there_already": work.skipped,
        "producer": work.producer.name,
    }
    text = f"{topic}: {facts['messages']:,} messages imported"
    if work.skipped:
        text += f", {work.skipped:,} were there already"
    print_result(facts, text, as_json)


# ---- the file ----------------------------------------------------------------------------


def _opened(file: str | None) -> io.FileIO:
    if file is None or is_stream(file):
        return io.FileIO(0, closefd=False)
    with naming(file, "read", "; to read stdin, give - or no FILE"):
        return io.FileIO(file)


def _state_of(source: io.FileIO) -> tuple[int, int]:
    found = os.fstat(source.fileno())
    return found.st_size, found.st_mtime_ns


def _is_regular(source: io.FileIO) -> bool:
    return stat.S_ISREG(os.fstat(source.fileno()).st_mode)


def _name_of(source: io.FileIO) -> str:
    """The producer's name for the content of this file, from its present position on."""
    start = source.tell()
    digest = hashlib.file_digest(source, "sha256").hexdigest()
    source.seek(start)
    return f"import-{digest[:32]}"


# ---- appending ---------------------------------------------------------------------------


class Import:
    """Appends messages, the place of each as its sequence id, and counts them. `skipped`: of these,
    how many an earlier import has appended."""

    def __init__(self, producer: xl.Producer, what: str) -> None:
        self.producer = producer
        self.count = self.skipped = 0
        self._what = what
        self._begun = producer.last_sequence_id + 1
        self._told = time.monotonic()

    def records(self, given: Iterable[Callable[[], Record]]) -> None:
        """Append the messages that these functions make; all before one that raises ValueError,
        which becomes an InputError."""
        found: list[Record] = []
        try:
            for make in given:
                with self._named(self.count + len(found)):
                    found.append(make())
        finally:
            skip, first = self._take(len(found))
            if found := found[skip:]:
                self._append(found, first)

    def batch(self, batch: Any) -> None:
        """Append the messages of a record batch."""
        skip, first = self._take(batch.num_rows)
        if skip == batch.num_rows:
            return
        rows = batch.slice(skip)
        try:
            self.producer.send_many(rows, sequence_id=first)
        except xl.ExclusiveLogError:
            raise
        except (ValueError, TypeError):  # it does not say of which message
            for place in range(rows.num_rows):
                with self._named(first + place):
                    self.producer.send_many(rows.slice(place, 1), sequence_id=first + place)

    def _take(self, size: int) -> tuple[int, int]:
        """Count this many; how many of them are there already, and the place of the next one."""
        skip = min(size, max(0, self._begun - self.count))
        first = self.count + skip
        self.count += size
        self.skipped += skip
        self._tell_progress()
        return skip, first

    def _append(self, records: list[Record], first: int) -> None:
        columns = (
            [record.get(name) for record in records]
            for name in ("value", "key", "properties", "event_time")
        )
        values, keys, properties, times = columns
        try:
            self.producer.send_many(
                values, keys=keys, properties=properties, event_times=times, sequence_id=first
            )
        except xl.ExclusiveLogError:
            raise
        except (ValueError, TypeError):  # it does not say of which message
            for place, record in enumerate(records, first):
                with self._named(place):
                    self.producer.send(**record, sequence_id=place)

    @contextlib.contextmanager
    def _named(self, place: int) -> Iterator[None]:
        """Let an error about a message name it."""
        try:
            yield
        except xl.ExclusiveLogError:
            raise
        except (ValueError, TypeError) as error:
            raise InputError(f"{self._what} {place + 1}: {error}") from None

    def _tell_progress(self) -> None:
        if time.monotonic() - self._told >= PROGRESS_SECONDS and sys.stderr.isatty():
            self._told = time.monotonic()
            print(f"{printable(self.producer.topic)}: {self.count:,} messages", file=sys.stderr)


# ---- formats -----------------------------------------------------------------------------


def _read_jsonl(source: io.FileIO, work: Import) -> None:
    for lines in lines_of(source.fileno(), READ_BYTES):
        work.records(partial(arguments_of, line) for line in lines)


def _read_csv(source: io.FileIO, work: Import) -> None:
    text = io.TextIOWrapper(io.BufferedReader(source), "utf-8-sig", "surrogateescape", newline="")
    before = csv.field_size_limit(sys.maxsize)
    try:
        rows = csv.reader(text, strict=True)
        names = _header(rows)
        while chunk := list(_some_of(rows, names)):
            work.records(partial(_record_of, row) for row in chunk)
    finally:
        csv.field_size_limit(before)
        text.detach().detach()


def _header(rows: Iterator[list[str]]) -> list[str]:
    """The names of the columns."""
    try:
        names = next(rows, [])
    except csv.Error as error:
        raise InputError(f"the names of the columns: {error}") from None
    for place, name in enumerate(names):
        if name not in COLUMNS:
            raise InputError(f"{name!r} is no column of messages; they are {', '.join(COLUMNS)}")
        if name in names[:place]:
            raise InputError(f"the column {name} is there twice")
    return names


def _some_of(rows: Iterator[list[str]], names: list[str]) -> Iterator[Mapping[str, str]]:
    """Up to ROWS rows. One that cannot be read is a row with the reason."""
    for _ in range(ROWS):
        try:
            cells = next(rows, None)
        except csv.Error as error:
            yield {UNREADABLE: str(error)}
            return
        if cells is None:
            return
        yield from _rows_of(cells, names)


def _rows_of(cells: list[str], names: list[str]) -> Iterator[Mapping[str, str]]:
    """The row of these cells, if they are one. A blank line is none; but where there is one column,
    it may be an empty value, which is neither dropped nor made up."""
    if len(cells) == len(names):
        yield dict(zip(names, cells, strict=True))
    elif cells:
        yield {UNREADABLE: "it has not as many cells as the first row"}
    elif len(names) == 1:
        yield {UNREADABLE: 'it is blank; write "" for an empty cell, or remove the line'}


UNREADABLE = "unreadable"


def _record_of(row: Mapping[str, str]) -> Record:
    """The message of a row. An empty cell is nothing, except for a key or a value that `missing`
    does not name, and for a value where there is no such column."""
    if UNREADABLE in row:
        raise ValueError(row[UNREADABLE])
    _check_text(row)
    found: Record = {}
    has_key = row.get("key") or row.get("key_base64")
    missing = row.get("missing", "" if has_key else "key").split()
    if not {"key", "value"}.issuperset(missing):
        raise ValueError(f"missing takes key, value or both, not {row['missing']}")
    for name in ("key", "value"):
        if name in missing:
            found[name] = None
        elif encoded := row.get(f"{name}_base64"):
            found[f"{name}_base64"] = encoded
        elif name in row:
            found[name] = row[name]
    if time_text := row.get("event_time"):
        found["event_time"] = _number(time_text)
    if properties := row.get("properties"):
        found["properties"] = _object(properties)
    return arguments_from(found)


def _check_text(row: Mapping[str, str]) -> None:
    for name, cell in row.items():
        try:
            cell.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{name} is no UTF-8; the columns key_base64 and value_base64 take all bytes"
            ) from None


def _number(text: str) -> int | str:
    return int(text) if text.removeprefix("-").isdecimal() else text


def _object(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("properties is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"properties is no JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"properties: {error}") from None


def _read_parquet(source: io.FileIO, work: Import) -> None:
    from exclusivelog.messages import import_pyarrow

    import_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source)
    except pa.ArrowException as error:
        raise InputError(f"it is no Parquet: {error}") from None
    wanted = [name for name in ARROW_COLUMNS if name in file.schema_arrow.names]
    if "value" not in wanted:
        raise InputError("it has no column value")
    for batch in file.iter_batches(ROWS, columns=wanted):
        for part in _parts(_with_numbers(batch)):
            work.batch(part)


ARROW_COLUMNS = ("value", "key", "properties", "event_time")


def _with_numbers(batch: Any) -> Any:
    """With event times as numbers: a time in ms may lie outside of what a datetime takes."""
    import pyarrow as pa

    place = batch.schema.get_field_index("event_time")
    if place < 0 or not pa.types.is_timestamp(batch.schema.field(place).type):
        return batch
    in_ms = batch.column(place).cast(pa.timestamp("ms", batch.schema.field(place).type.tz))
    return batch.set_column(place, "event_time", in_ms.cast(pa.int64()))


def _parts(batch: Any) -> Iterator[Any]:
    """Parts of a batch that are appended at once: halves of halves, until they are small."""
    if batch.nbytes <= BATCH_BYTES or batch.num_rows <= 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


READERS: dict[str, Callable[[io.FileIO, Import], None]] = {
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "parquet": _read_parquet,
}
