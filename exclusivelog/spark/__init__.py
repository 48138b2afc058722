"""PySpark on exclusivelog: a data source for batch and streaming, and the pipelines.

Needs the extra `[spark]` and Java 17. docs/spark.md tells what each option does.

```python
from exclusivelog.spark import register

register(spark)
orders = spark.read.format("exclusivelog").option("topic", "orders").load("data/log")
```

`scan` reads a topic faster, for batches:

```python
from exclusivelog.spark import scan

orders = scan(spark, "data/log", "orders", ["offset", "value"], startingOffsets=1_000_000)
```

```text
source.py    the data source: reading, batch and streaming      options.py   the options
staging.py   output of executors, until it is committed        plan.py      offsets, partitions
views.py     epochs, producers, topics, txns as tables          session.py   a local session
pipelines.py what the pipelines share; ../audit judges, and draws the page
scan.py      a topic through mapInArrow                        files.py     directories
archive.py compact.py replay.py audit.py report.py              the pipelines: run(spark, ...)
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from exclusivelog.spark.scan import scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "scan"]


def register(spark: SparkSession) -> None:
    """Make the format "exclusivelog" known to a session.

    Not needed where the library is installed in the Python of the driver: Spark then finds it
    by itself, through the module `pyspark_exclusivelog`.
    """
    from exclusivelog.spark import source

    source.register(spark)
