"""What an engine on a cluster refuses, and why (rule J3). docs/cluster.md has the same table.

>>> REASONS["transactions"]
'a cluster has none; send_many appends to one topic atomically'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from exclusivelog.errors import UnsupportedError

__all__ = ["REASONS", "Refusing", "refusal", "refuses"]

# What is refused -> why, and what to use instead.
REASONS = {
    "announcements": "a cluster keeps none; send a message that says the same",
    "backup": "make a local log of it: exclusivelog mirror NEW --from URL",
    "bound_producers": "a message counts by its topic's log alone; own the topic instead",
    "compaction": "it would remove grants; read all messages, or keep a SharedMap",
    "compression": "a cluster stores what it is given; compress the values",
    "deletion": "a topic that is made again would begin its epochs anew (rule B1)",
    "large_messages": "a record takes 5 MB; store the value elsewhere, and send a reference",
    "many_producers": "several grants at once need a transaction; open each by itself",
    "once": "numbered batches need transactions; send with sequence ids",
    "retention": "grants count from a log's first record on; nothing may be removed",
    "roles": "roles need transactions; own each topic by itself",
    "several_claims": "several resources at once need a transaction; own each by itself",
    "transactions": "a cluster has none; send_many appends to one topic atomically",
    "verify": "records are verified when they are read; read the topics",
}


def refusal(what: str) -> UnsupportedError:
    """The error for something of `REASONS`."""
    return UnsupportedError(f"{what}: {REASONS[what]}")


def refuses(what: str) -> Callable[..., NoReturn]:
    """A method that raises this error."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise refusal(what)

    return refuse


class Refusing:
    """Stands for a part of an engine that a cluster does not have: every call of it raises.

    >>> Refusing("once").record("orders", "writer", 1)
    Traceback (most recent call last):
        ...
    exclusivelog.errors.UnsupportedError: once: numbered batches need transactions; send with \
sequence ids
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refuses(self._what)
