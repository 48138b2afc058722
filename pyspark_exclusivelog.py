"""Spark looks for modules of this name, and finds the data source `exclusivelog` in them."""

from exclusivelog.spark.source import ExclusiveLogSource as DefaultSource

__all__ = ["DefaultSource"]
