"""`scan`: reads a topic as a DataFrame, faster than the data source.

Plan and tasks are those of the data source. But rows get into Spark through `mapInArrow`, where
Spark projects a row once, while it projects the rows of a Python data source twice.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from exclusivelog.spark import plan
from exclusivelog.spark.clusters import open_log
from exclusivelog.spark.errors import SCHEMA, SourceError, coded
from exclusivelog.spark.files import is_connect
from exclusivelog.spark.options import BATCH, WHICH, ReadOptions, batch_options, check_known

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from exclusivelog.spark.source import Rows

Value = str | int | bool | dt.datetime | Mapping[str, str | int] | None
Batches = Iterator["pa.RecordBatch"]

OPTIONS = tuple(name for name in BATCH if name not in (*WHICH, "path", "view", "bucketMs"))
OFFSETS = ("startingoffsets", "endingoffsets")


def scan(
    spark: SparkSession,
    path: str | os.PathLike[str],
    topic: str,
    columns: Sequence[str] | None = None,
    **options: Value,
) -> DataFrame:
    """The messages of a topic as a DataFrame, with the rows and types of the data source.

    - `path`: the ledger's directory, on this machine. It is opened, read-only, for as long as the
      call takes: what is to be read is planned now, and stays so, also if the topic grows.
    - `columns`: names out of topic, offset, epoch, key, value, publish_time, event_time, producer,
      sequence_id and properties, in any order; None: all ten. The fewer, the faster.
    - `options`: those of `spark.read` (docs/spark.md) that bound or cut what is read:
      `startingOffsets`, `endingOffsets` ("earliest", "latest", or a number, exclusive for the end),
      `startingTimestamp`, `endingTimestamp` (a datetime, ISO 8601, or ms since 1970),
      `failOnDataLoss` (default True), `minPartitions`, `topicIds`, and `access="inline"` for
      executors on other machines.

    Raises SourceError with a code: EXCLUSIVELOG_SCHEMA for a column that does not exist,
    EXCLUSIVELOG_OPTION for an option, EXCLUSIVELOG_DATA_LOSS for offsets that are not there, and
    those of the library's errors, such as EXCLUSIVELOG_TOPIC_NOT_FOUND. What goes wrong later,
    while a task reads (the offsets were trimmed meanwhile, an entry is damaged, an executor cannot
    open the ledger), fails the query with the same codes in Spark's text.

    ```python
    from exclusivelog.spark import scan

    orders = scan(spark, "data/log", "orders", ["offset", "value"], startingOffsets=1_000_000)
    orders.selectExpr("count(*)", "sum(length(value))").show()
    ```
    """
    with coded():
        schema = _schema(columns)
        found = _options(os.fspath(path), topic, options)
        slices = _slices(found, schema)
        return _frame(spark, found, schema, slices)


# ---- what is asked for -------------------------------------------------------------------


def _schema(columns: Sequence[str] | None) -> StructType:
    from pyspark.sql.types import StructType

    from exclusivelog.spark.views import schema_of

    everything = schema_of("messages")
    if columns is None:
        return everything
    known = everything.fieldNames()
    if isinstance(columns, str):
        raise SourceError(SCHEMA, f"columns={columns!r}: it takes a list of names, or None for all")
    for name in columns:
        if name not in known:
            raise SourceError(SCHEMA, f"there is no column {name!r}; there are {', '.join(known)}")
    if not columns or len(set(columns)) < len(columns):
        raise SourceError(SCHEMA, f"columns={columns!r}: name at least one, and each once")
    return StructType([everything[name] for name in columns])


def _options(path: str, topic: str, given: Mapping[str, Value]) -> ReadOptions:
    from pyspark.sql.datasource import CaseInsensitiveDict

    texts = {name: _text(name, value, topic) for name, value in given.items() if value is not None}
    check_known(texts, OPTIONS, "scan")
    return batch_options(CaseInsensitiveDict({**texts, "path": path, "topic": topic}))


def _text(name: str, value: Value, topic: str) -> str:
    """An option's value as text, as the data source takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and name.lower() in OFFSETS:
        return json.dumps({topic: value})
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return value.isoformat() if isinstance(value, dt.datetime) else str(value)


# ---- planning, and reading in tasks ------------------------------------------------------


def _slices(options: ReadOptions, schema: StructType) -> list[InputPartition]:
    from exclusivelog.spark.source import BatchReader

    reader = BatchReader(options, schema)
    # Close it: a process that has a ledger open read-only cannot open it to write.
    with open_log(options.path, "spark", options.access, readonly=True) as engine:
        return reader.slices(engine, plan.spans(engine, options))


def _frame(
    spark: SparkSession, options: ReadOptions, schema: StructType, slices: Sequence[InputPartition]
) -> DataFrame:
    from exclusivelog.spark.source import Rows

    rows, count = Rows(schema, options.fail_on_data_loss), len(slices)
    if not count:
        return spark.createDataFrame([], schema)
    if not options.inline:
        return spark.range(0, count, 1, count).mapInArrow(Planned(rows, slices).read, schema)
    return _shipped(spark, [part.data for part in slices]).mapInArrow(Packed(rows).read, schema)  # type: ignore[attr-defined]


def _shipped(spark: SparkSession, data: Sequence[bytes | None]) -> DataFrame:
    """Messages as rows, not with the function, so that each task gets only its own."""
    if is_connect(spark):
        rows = spark.createDataFrame(list(enumerate(data)), "number int, data binary")
        return rows.repartitionByRange(len(data), "number").select("data")
    packed = spark.sparkContext.parallelize([(part,) for part in data], len(data))
    return spark.createDataFrame(packed, "data binary")


class Planned:
    """The function of tasks that open the ledger: numbers of slices in, their messages out."""

    def __init__(self, rows: Rows, slices: Sequence[InputPartition]) -> None:
        self._rows = rows
        self._slices = slices

    def read(self, batches: Batches) -> Batches:
        """The messages of the slices."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._rows.of(self._slices[number])


class Packed:
    """The function of tasks with access=inline: Arrow streams in, messages out."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def read(self, batches: Batches) -> Batches:
        """The messages of the streams."""
        from exclusivelog.spark.source import Slice

        for batch in batches:
            for data in batch.column(0).to_pylist():
                yield from self._rows.of(Slice((), None, data))
