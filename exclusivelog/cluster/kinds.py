"""The kinds of a place's topics: messages, map or state.

They are kept in a log of their own, `__kinds__`, in which the first record about a topic counts.

>>> from exclusivelog.cluster.memory import MemoryPlace
>>> kinds = Kinds(MemoryPlace.named("example of kinds"))
>>> kinds.check("settings", {"holds": "map", "key": "str"})
False
>>> kinds.record("settings", {"holds": "map", "key": "str"})
>>> kinds.of("settings"), kinds.check("settings", {"holds": "map"})
({'holds': 'map', 'key': 'str'}, True)
"""

from __future__ import annotations

from exclusivelog.backend import Kind
from exclusivelog.cluster.facts import Facts
from exclusivelog.cluster.ordered import Place
from exclusivelog.refusals import is_other_kind, other_kind

__all__ = ["Kinds"]

TOPIC = "__kinds__"
MAGIC = b"XLK"


class Kinds:
    """The kinds of the topics of a place. Every call reads their log to its end."""

    def __init__(self, place: Place) -> None:
        self._facts = Facts(place, TOPIC, MAGIC)

    def of(self, topic: str) -> Kind:
        """The kind recorded for a topic; empty if there is none."""
        return dict(self._facts.of(topic) or {})

    def check(self, topic: str, kind: Kind) -> bool:
        """Is it recorded that the topic holds this? False if nothing is recorded; StateError if it
        holds something else."""
        held = self.of(topic)
        if is_other_kind(held, kind):
            raise other_kind(topic, held, kind)
        return bool(held)

    def record(self, topic: str, kind: Kind) -> None:
        """Record what a topic holds, unless that is recorded; StateError if it holds something
        else."""
        if not self.check(topic, kind):
            self._facts.record(topic, dict(kind))
            self.check(topic, kind)

    def close(self) -> None:
        """Close the log."""
        self._facts.close()
