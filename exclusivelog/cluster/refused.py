"""What an engine on a cluster refuses, and why (rule J3). docs/cluster.md has the same table.

>>> REASONS["transactions"]
'a cluster has no transactions over several topics; send_many appends to one topic atomically'
"""

from __future__ import annotations

from typing import Any, NoReturn

from exclusivelog.errors import UnsupportedError

__all__ = ["REASONS", "Refusing", "refusal"]

# What is refused -> why, and what to use instead.
REASONS = {
    "announcements": "announcements are kept by a local log; send a message that says the same",
    "backup": "a cluster keeps its own copies; `exclusivelog mirror NEW --from URL` makes a local log of it",
    "claims": "claims on resources need transactions; make each resource a topic, and own that",
    "compaction": "compaction by the cluster would remove grants; read all messages, or keep a SharedMap",
    "compression": "the cluster stores what it is given; compress the values",
    "deletion": "a topic that is deleted and made again would begin its epochs anew (rule B1)",
    "durability": "what survives is up to the cluster: its replicas, and whether they flush",
    "inspection": "query plans need a local log; make one: `exclusivelog mirror NEW --from URL`",
    "many_producers": "opening producers on several topics at once needs transactions; open each by itself",
    "once": "numbered batches need transactions; send with sequence ids",
    "reader_groups": "committed positions need transactions; store the offset with what was made of it",
    "retention": "the rule counts grants from a log's first record on, so nothing of it may be removed",
    "roles": "roles need transactions; own each topic by itself",
    "settle": "settle= delays grants by clocks of one machine; leave it out",
    "shared_producers": "a message counts only if its producer owns the topic, so that a topic has one at a time; use another access_mode",
    "snapshots": "snapshots of shared states are kept by a local log; a state is read from its first message",
    "statistics": "how messages are stored is known to the cluster alone; ask its admin API",
    "termination": "the rule has no record that ends a topic; stop its producers",
    "transactions": "a cluster has no transactions over several topics; send_many appends to one topic atomically",
    "unload": "a hand-over to a chosen engine needs a transaction; close the producer, and let the other one wait with a priority",
    "verify": "records are verified when they are read; read the topics",
}  # fmt: skip


def refusal(what: str) -> UnsupportedError:
    """The error for something of `REASONS`."""
    return UnsupportedError(f"{what}: {REASONS[what]}")


class Refusing:
    """Stands for a part of an engine that a cluster does not have: every call of it raises.

    >>> Refusing("claims").hold("group", {})
    Traceback (most recent call last):
        ...
    exclusivelog.errors.UnsupportedError: claims: claims on resources need transactions; make each \
resource a topic, and own that
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal(self._what)
