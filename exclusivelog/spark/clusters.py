"""Reading clusters with Spark: engines on the namespace of a URL.

Credentials are options of a query (`options.ACCESS`), and appear in no error, repr or plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import exclusivelog as xl
from exclusivelog.spark.options import is_url, refuse

__all__ = ["open_cluster", "open_log"]


def open_cluster(url: str, access: Mapping[str, str] | None) -> xl.Engine:
    """An engine that reads there. Raises SourceError for options that are wrong, and what
    `exclusivelog.open` does."""
    given: dict[str, Any] = dict(access or {})
    if "check_policies" in given:
        given["check_policies"] = str(given["check_policies"]).lower() != "false"
    try:
        return xl.open(url, name="spark", readonly=True, **given)
    except ValueError as error:
        raise refuse(str(error)) from None


def open_log(path: str, name: str, access: Mapping[str, str] | None, readonly: bool) -> xl.Engine:
    """A ledger that is there, or a cluster's namespace, to be read."""
    if is_url(path):
        return open_cluster(path, access)
    return xl.open(path, name, readonly=readonly, create=False)
