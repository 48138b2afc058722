"""Audit by Spark: checks from the messages that a log keeps the promises of exclusive access.

For each topic: its epochs lie one behind the other and never interleave, offsets are dense,
each exclusive epoch has one producer, sequence ids rise, and every exclusive epoch with
messages was granted once (rules B1, B8, E5, G2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from exclusivelog.audit import names_of, owned, read_changes
from exclusivelog.audit.judging import verdicts
from exclusivelog.audit.leaders import Verdict
from exclusivelog.spark.clusters import open_log
from exclusivelog.spark.errors import coded
from exclusivelog.spark.pipelines import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: SparkSession,
    ledger: str,
    topics: Sequence[str] | None = None,
    *,
    out: TextIO | None = None,
    access: Mapping[str, str] | None = None,
) -> list[Verdict]:
    """Judge topics (None: all); a verdict for each claim about each topic.

    `ledger` may be the URL of a cluster's namespace; `access`: what `exclusivelog.open` takes to
    get in there (admin, token, token_file, tls_trust_certs)."""
    from exclusivelog.spark import source

    progress = Progress(spark, out)
    with coded(), open_log(ledger, "audit", access, readonly=True) as engine:
        names = names_of(engine, topics)
        with progress.step(f"reading {len(names)} topics"):
            found = source.runs(spark, engine.path, names, access=access)
        changes = read_changes(engine)  # read last, to include leaders that came meanwhile
        return verdicts(names, found, changes, owned(engine, names))
