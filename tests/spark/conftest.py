"""One Spark session for all tests that want one: starting it costs seconds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from testing.spark_home import spark_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A file system on this machine needs no object store's care, the JVM no second compiler and no
# check of its classes; for a few rows, making and compiling code costs more than it gains.
FAST = {
    "spark.driver.extraJavaOptions": (
        "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    ),
    "spark.driver.memory": "1g",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing"
        ".FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "10",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}


@pytest.fixture(scope="session", name="spark_home")
def _spark_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with spark_home(Path(tmp_path_factory.mktemp("home"))) as home:
        yield home


@pytest.fixture(scope="session")
def spark(spark_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """local[2,3]: two tasks at a time, three attempts each."""
    from exclusivelog.spark.errors import missing
    from exclusivelog.spark.session import local_session

    lacking = missing()
    assert lacking is None, lacking
    where = Path(tmp_path_factory.mktemp("spark"))
    settings = {**FAST, "spark.sql.warehouse.dir": str(where / "warehouse")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Py4J's own sockets
        session = local_session("local[2,3]", settings, "tests")
        yield session
        session.stop()
