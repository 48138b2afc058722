"""A Spark session on this machine, for the commands, the tests and the benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from exclusivelog.spark.errors import PIPELINE, SourceError, missing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REMOTE = (
    "SPARK_REMOTE is set, and this makes a session without Spark Connect; unset it, or call "
    "exclusivelog.spark.NAME.run(spark, ...) with a session of SparkSession.builder.remote(...)"
)

# Short jobs on small machines: little compilation, one thread to collect, no web server.
SETTINGS = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # Without this, Arrow checks bounds at every access, which takes a tenth of a scan.
    "spark.driver.extraJavaOptions": "-Darrow.enable_unsafe_memory_access=true",
}


def local_session(
    master: str = "local[*]", settings: Mapping[str, str] | None = None, name: str = "exclusivelog"
) -> SparkSession:
    """A session with the data source registered.

    - `master`: where Spark runs; "local[2]" is two threads of this machine.
    - `settings`: Spark's own, over those of this module.

    Raises SourceError where PySpark or Java is missing; it says how to install it. Also where the
    environment asks for Spark Connect, whose sessions have no `master`.
    """
    lacking = REMOTE if "SPARK_REMOTE" in os.environ else missing()
    if lacking:
        raise SourceError(PIPELINE, lacking)
    from pyspark.sql import SparkSession

    from exclusivelog.spark.source import register

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in {**SETTINGS, **(settings or {})}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark
