"""`export`: a topic's messages as JSON lines, CSV or Parquet."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

import click

import exclusivelog as xl
from exclusivelog.cli.output import BATCH, message_facts, print_result, read_some_of
from exclusivelog.cli.program import (
    PATH,
    Argument,
    as_json,
    is_stream,
    ledger_path,
    naming,
    open_to_read,
    program,
    start_of,
    topic_name,
)
from exclusivelog.cli.streams import data_out
from exclusivelog.foreign import Ignoring

FORMATS = ("jsonl", "csv", "parquet")
COLUMNS = """
    offset epoch publish_time event_time producer sequence_id key value key_base64 value_base64
    properties missing
""".split()
ARROW_BYTES = 8 << 20


@program.command()
@ledger_path
@topic_name
@click.argument(
    "file",
    cls=Argument,
    metavar="[FILE]",
    required=False,
    type=PATH,
    help="Where to write. Default: stdout, as with -.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="Default: the ending of FILE; without an ending, jsonl.",
)
@click.option(
    "--from",
    "--since",
    "start",
    metavar="earliest|OFFSET|TIME|AGE",
    default="earliest",
    help="The first message. An AGE: 90s, 15m, 1h, 7d. A TIME without a zone is local.",
)
@click.option("--to", "end", metavar="OFFSET|TIME|AGE", help="End before this one. Default: all.")
@click.option("--key", "-k", help="Only messages with this key.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@as_json
def export(
    path: str,
    topic: str,
    file: str | None,
    kind: str | None,
    start: str,
    end: str | None,
    key: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a topic's messages to a file or to stdout.

    FILE appears when it is complete. In JSON lines, a value that is not UTF-8 text is in the field
    value_base64, and such a key in key_base64. In CSV, the column `missing` tells a message without
    a key or value from one whose key or value is empty. `import` reads each of the formats. Parquet
    needs the extra arrow. --json changes the line about FILE that this command prints, not the
    content of FILE. With -, that line goes to stderr.
    """
    kind = kind or format_of(file or "")
    to_stdout = is_stream(file)
    if kind == "parquet" and to_stdout:
        raise click.UsageError("Parquet cannot be written to stdout; give FILE")
    with open_to_read(path) as engine:
        here = engine.topic(topic, create=False)
        stop = here.next_offset if end is None else _offset(here, end)
        with here.reader() as reader, _written(None if to_stdout else file, force) as out:
            reader.seek(start_of(start, "--from"))
            wanted = Wanted(reader, stop, None if key is None else os.fsencode(key))
            WRITERS[kind](wanted, out)
    if file is not None:
        facts = {"file": file, "messages": wanted.count}
        text = f"{'stdout' if to_stdout else file}: {wanted.count:,} messages"
        print_result(facts, text, as_json, sys.stderr if to_stdout else None)


def format_of(file: str) -> str:
    """The format of a file with this name; click.UsageError if its ending is none of them."""
    ending = os.path.splitext(file)[1].removeprefix(".")
    if ending and ending not in FORMATS:
        endings = ", ".join(f".{kind}" for kind in FORMATS)
        raise click.UsageError(f"{file} ends in none of {endings}; give --format")
    return ending or "jsonl"


def _offset(topic: xl.Topic, end: str) -> int:
    with topic.reader() as reader:
        reader.seek(start_of(end, "--to"))
        return min(reader.position, topic.next_offset)


@contextlib.contextmanager
def _written(file: str | None, force: bool) -> Iterator[IO[bytes]]:
    """A file that appears when it is complete; or stdout."""
    if file is None:
        with naming("stdout", "written"):
            out = data_out()
            yield out
            out.flush()
        return
    _check_replaceable(file, force)
    target = os.path.realpath(file)  # a symbolic link stays one
    part = f"{target}.{os.urandom(4).hex()}.part"  # unique: another export to FILE may be running
    with naming(file, "written"):
        try:
            with open(part, "xb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            os.replace(part, target)
        except BaseException:
            with Ignoring(OSError):
                os.unlink(part)
            raise


def _check_replaceable(file: str, force: bool) -> None:
    if os.path.isdir(file):
        raise IsADirectoryError(f"{file} is a directory; give the name of a file in it")
    if os.path.exists(file) and not os.path.isfile(
        file
    ):  # to replace /dev/stdout breaks the system
        raise FileExistsError(f"{file} is no regular file; to write to it: - > {file}")
    if os.path.exists(file) and not force:
        raise FileExistsError(f"{file} exists; give --force to replace it")


# ---- the messages to export --------------------------------------------------------------


class Wanted:
    """The messages to export: from the reader's position to an offset, with one key or with any."""

    def __init__(self, reader: xl.Reader, end: int, key: bytes | None) -> None:
        self.reader, self.end, self.key = reader, end, key
        self.count = 0  # those that were exported

    def messages(self) -> Iterator[xl.Message]:
        """One by one."""
        while self.reader.position < self.end:
            batch = read_some_of(self.reader, min(BATCH, self.end - self.reader.position))
            if not batch:
                return
            found = [m for m in batch if self.key is None or m.key == self.key]
            self.count += len(found)
            yield from found

    def batches(self) -> Iterator[Any]:
        """As record batches of pyarrow."""
        import pyarrow.compute as pc

        while self.reader.position < self.end:
            batch = self.reader.read_arrow(ARROW_BYTES)
            if batch is None:
                return
            # Whole entries are read, so the last one may extend beyond the end.
            batch = batch.slice(0, batch.num_rows - max(0, self.reader.position - self.end))
            if self.key is not None:
                batch = batch.filter(pc.equal(batch.column("key"), self.key))
            self.count += batch.num_rows
            yield batch


# ---- formats -----------------------------------------------------------------------------


def _write_jsonl(wanted: Wanted, out: IO[bytes]) -> None:
    for message in wanted.messages():
        out.write(json.dumps(message_facts(message)).encode() + b"\n")


def _write_csv(wanted: Wanted, out: IO[bytes]) -> None:
    import csv

    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    rows = csv.DictWriter(text, COLUMNS, restval="")
    rows.writeheader()
    for message in wanted.messages():
        facts = message_facts(message)
        rows.writerow(
            {**facts, "properties": json.dumps(facts["properties"]), "missing": _missing(message)}
        )
    text.detach()


def _missing(message: xl.Message) -> str:
    """The names of what the message has not: an empty cell could also be an empty text."""
    parts = (("key", message.key), ("value", message.value))
    return " ".join(name for name, data in parts if data is None)


def _write_parquet(wanted: Wanted, out: IO[bytes]) -> None:
    from exclusivelog.messages import import_pyarrow

    import_pyarrow()
    import pyarrow.parquet as pq

    writer = None
    for batch in wanted.batches():
        writer = writer or pq.ParquetWriter(out, batch.schema)
        writer.write_batch(batch)
    if writer is None:
        raise ValueError("there is no message to export; Parquet needs one to know its columns")
    writer.close()


WRITERS: dict[str, Callable[[Wanted, IO[bytes]], None]] = {
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "parquet": _write_parquet,
}
