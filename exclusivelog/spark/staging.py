"""Staging: executors pass their output to the driver, as columns for the log, in the commit message
if it is small, else in Arrow files in a shared directory.

```text
<stagingDir>/.exclusivelog-staging                     a random id: identifies the directory
<stagingDir>/<job>/<run>/<batch>/part-<p>-<attempt>.arrow     a task's, of all its topics
```

The columns are value, key, properties (packed) and event_time (ms). Executors convert them in
parallel, so that the transaction that appends is short.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from exclusivelog import _core
from exclusivelog.foreign import Ignoring, pass_on_foreign, remove_tree
from exclusivelog.messages import (
    MAX_MESSAGE_BYTES,
    MAX_TIME,
    Columns,
    arrow_column,
    encode_properties,
)
from exclusivelog.spark.errors import SCHEMA, STAGING, SourceError
from exclusivelog.spark.options import file_name

PROBE = ".exclusivelog-staging"
LEFT_BEHIND_SECONDS = 7 * 86_400
# Bytes that are gathered before they are written, so that the log gets large entries: per topic,
# and for all topics of a task.
CHUNK_BYTES, MOST_WAITING = 4 << 20, 64 << 20

STAGED = pa.schema(
    [
        ("value", pa.binary()),
        ("key", pa.binary()),
        ("properties", pa.binary()),
        ("event_time", pa.int64()),
    ]
)


# ---- the directory -----------------------------------------------------------------------


@dataclass(frozen=True)
class Directory:
    """The directory of one batch of one run of a job, and its id, by which an executor checks that
    its directory is the driver's."""

    root: str
    probe: str

    @classmethod
    def prepare(cls, root: str) -> Directory:
        """On the driver: create it, with an id."""
        try:
            os.makedirs(root, mode=0o700, exist_ok=True)
            return cls(root, _mark(os.path.join(root, PROBE)))
        except OSError as error:
            pass_on_foreign(error)
            raise SourceError(
                STAGING, f"{root} cannot be used: {error}; name a directory with stagingDir"
            ) from error

    @property
    def shared(self) -> bool:
        """Is the directory of this name, on this machine, the driver's?"""
        try:
            with open(os.path.join(self.root, PROBE), encoding="ascii") as file:
                return file.read() == self.probe
        except OSError as error:
            pass_on_foreign(error)
            return False

    def of(self, *names: object) -> str:
        """The directory of a job, a run or a batch in it. Names are quoted, so that none leads out
        of it.

        >>> Directory("/staging", "").of("..", "a/b", 3)
        '/staging/%2E%2E/a%2Fb/3'
        """
        return os.path.join(self.root, *(_safe(str(name)) for name in names))

    def remove(self, *names: object) -> None:
        """Remove a directory in it. If a late task writes into it meanwhile, the next batch removes
        the rest."""
        remove_tree(self.of(*names))

    def remove_old(self, *names: object) -> None:
        """Remove files of killed runs from a directory: those that were not modified for long."""
        with Ignoring(OSError):  # the batch is in the log: errors here must not fail it
            for entry in list(os.scandir(self.of(*names))):
                if time.time() - entry.stat().st_mtime > LEFT_BEHIND_SECONDS:
                    remove_tree(entry.path)


def _safe(name: str) -> str:
    return file_name(quote(name, safe="").replace(".", "%2E"))


def _mark(path: str) -> str:
    """The id in this file, which is created with a new id if it is missing."""
    if not os.path.exists(path):
        temporary = f"{path}-{secrets.token_hex(8)}"
        try:
            with open(temporary, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(16))
            with Ignoring(FileExistsError):  # another driver has created it
                os.link(temporary, path)  # atomically
        finally:
            os.unlink(temporary)
    with open(path, encoding="ascii") as file:
        return file.read()


# ---- on an executor ----------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Messages for one topic: some `batches` of an Arrow file, in `data` or at `path`."""

    topic: str
    rows: int
    batches: Sequence[int]
    data: bytes | None = None
    path: str | None = None


class Stage:
    """One task's output. It stays in memory up to `limit` bytes; more goes to one file for all
    topics, because a process can have only few files open."""

    def __init__(self, directory: Directory, where: str, name: str, limit: int) -> None:
        self._directory = directory
        self._where = where
        self._name = name
        self._limit = limit
        self._topics: dict[str, _Output] = {}
        self._size = 0  # bytes in memory
        self._file: _File | None = None

    def add(self, topic: str, batch: pa.RecordBatch) -> None:
        """Take messages for a topic, with the columns of `STAGED`."""
        output = self._topics.setdefault(topic, _Output())
        output.add(batch)
        self._size += batch.nbytes
        if self._file is None and self._size > self._limit:
            self._file = self._new_file()
        if self._file is not None and output.size >= CHUNK_BYTES:
            self._write(self._file, [output])
        if self._file is not None and self._size >= MOST_WAITING:
            self._write(self._file, self._topics.values())

    def _new_file(self) -> _File:
        if not self._directory.shared:
            raise SourceError(
                STAGING,
                f"the output of this task is larger than inlineLimit={self._limit} bytes. But "
                f"{self._directory.root} on {socket.gethostname()!r} is not the driver's "
                "directory of that name. Set stagingDir to one that all machines share, or "
                "raise inlineLimit",
            )
        os.makedirs(self._where, exist_ok=True)
        return _File(os.path.join(self._where, f"{self._name}.arrow"))

    def _write(self, file: _File, outputs: Iterable[_Output]) -> None:
        for output in outputs:
            self._size -= output.size
            output.batches += file.write(output.take())

    def finish(self) -> list[Piece]:
        """The commit message for the driver."""
        if self._file is None:
            return [output.in_memory(topic) for topic, output in self._topics.items()]
        self._write(self._file, self._topics.values())
        self._file.close()
        return [
            Piece(topic, output.rows, output.batches, path=self._file.path)
            for topic, output in self._topics.items()
        ]


@dataclass
class _Output:
    """One task's messages for one topic: batches in memory, and numbers of batches in the file."""

    rows: int = 0
    size: int = 0  # bytes in memory
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        self.size += batch.nbytes
        self.waiting.append(batch)

    def take(self) -> list[pa.RecordBatch]:
        """The batches in memory, concatenated as far as Arrow can."""
        table = pa.Table.from_batches(self.waiting, STAGED).combine_chunks()
        self.waiting, self.size = [], 0
        return list(table.to_batches())

    def in_memory(self, topic: str) -> Piece:
        """All batches, for the commit message."""
        buffer, found = io.BytesIO(), self.take()
        with pa.ipc.new_file(buffer, STAGED) as file:
            for batch in found:
                file.write_batch(batch)
        return Piece(topic, self.rows, range(len(found)), data=buffer.getvalue())


class _File:
    """An Arrow file that is being written."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._sink = pa.OSFile(path, "wb")
        self._writer = pa.ipc.new_file(self._sink, STAGED)
        self._count = 0

    def write(self, batches: list[pa.RecordBatch]) -> range:
        """Write batches; returns their numbers in the file."""
        first = self._count
        for batch in batches:
            self._writer.write_batch(batch)
            self._count += 1
        return range(first, self._count)

    def close(self) -> None:
        self._writer.close()
        self._sink.close()


# ---- columns -----------------------------------------------------------------------------


def staged(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert a batch of Spark to the columns of the log."""
    names = batch.schema.names
    columns = {name: batch.column(name) for name in STAGED.names if name in names}
    rows = batch.num_rows
    arrays = [
        pa.nulls(rows, kind.type)
        if kind.name not in columns
        else PACK.get(kind.name, _bytes)(columns[kind.name])
        for kind in STAGED
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=STAGED)


def _bytes(column: pa.Array) -> pa.Array:
    return column if column.type == pa.binary() else column.cast(pa.binary())


def _times(column: pa.Array) -> pa.Array:
    # The log has ms. Round down also before 1970, which a division would not.
    if pa.types.is_timestamp(column.type):
        times = column.cast(pa.timestamp("us"))
        first = pc.min(times.cast(pa.int64())).as_py()
        if first is not None and first < -1000 * MAX_TIME:
            raise SourceError(
                SCHEMA, f"event_time={first} us since 1970: it takes {-1000 * MAX_TIME} at least"
            )
        whole = pc.floor_temporal(times, unit="millisecond")
        return pc.divide(whole.cast(pa.int64()), 1000)
    return column.cast(pa.int64())


def _properties(column: pa.Array) -> pa.Array:
    packed = [_pack(pairs) for pairs in column.to_pylist()]
    return pa.array(packed, pa.binary())


def _pack(pairs: list[tuple[str, str | None]] | None) -> bytes | None:
    if not pairs:
        return None
    try:
        return encode_properties(dict(pairs))
    except TypeError:
        raise SourceError(SCHEMA, f"properties={dict(pairs)!r}: a value may not be null") from None


PACK = {"event_time": _times, "properties": _properties}


# ---- on the driver -----------------------------------------------------------------------


def parts(pieces: Iterable[Piece]) -> Iterator[Columns]:
    """The staged messages, as columns for the log. Files are mapped, not copied into memory."""
    for piece in pieces:
        with contextlib.ExitStack() as stack:
            if piece.path is None:
                source = pa.BufferReader(piece.data)
            else:
                source = stack.enter_context(pa.memory_map(piece.path))
            with pa.ipc.open_file(source) as file:
                for index in (
                    range(file.num_record_batches) if piece.path is None else piece.batches
                ):
                    yield _part(file.get_batch(index))


def _part(batch: pa.RecordBatch) -> Columns:
    def strings(name: str) -> _core.Strings | None:
        column = batch.column(name)
        if column.null_count == len(column):
            return None
        return arrow_column(column, name)

    times = batch.column("event_time")
    values = arrow_column(batch.column("value"), "value")
    assert values is not None
    if values.largest > MAX_MESSAGE_BYTES:
        raise SourceError(SCHEMA, f"value has {values.largest} bytes; {MAX_MESSAGE_BYTES} fit")
    return Columns(
        values,
        strings("key"),
        strings("properties"),
        None if times.null_count == len(times) else times.to_pylist(),
    )


def check_arrived(pieces: Mapping[str, list[Piece]]) -> None:
    """SourceError unless the driver sees every staged file, complete."""
    for path in {piece.path for found in pieces.values() for piece in found}:
        if path is not None and not os.path.exists(path):
            raise SourceError(
                STAGING,
                f"{path} is staged, but the driver on {socket.gethostname()!r} does not see it: "
                "another run of this query has removed it, or stagingDir is not shared by all "
                "machines",
            )
