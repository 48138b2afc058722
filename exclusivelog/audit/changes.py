"""The changes of ownership in `__events__`, as an audit of a million of them needs them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Any, NamedTuple

from exclusivelog.engine import Engine
from exclusivelog.errors import TopicNotFoundError
from exclusivelog.events import EVENTS, Event, Party

IN_ONE_PASS = 20_000
KINDS = ("grant", "release", "evict")


class Change(NamedTuple):
    """A grant, or the end of one. `producer`, `engine` (its name) and `pid` are those of the owner
    that comes or goes."""

    time: int
    topic: str
    epoch: int
    kind: str
    reason: str
    producer: str
    engine: str
    pid: int

    @classmethod
    def of(cls, event: Event) -> Change:
        """As an event tells it."""
        party: Party = (event.target if event.kind == "grant" else event.source) or {}
        return cls(
            event.time, event.topic, event.epoch, event.kind, event.reason,
            party.get("producer") or "?", party.get("engine_name") or "", party.get("pid") or 0,
        )  # fmt: skip


@dataclass
class Changes:
    """Of each topic, in order. `complete`: none has been removed, since the ledger was made."""

    complete: bool = True
    of: dict[str, list[Change]] = field(default_factory=dict)

    def add(self, changes: Iterable[Change]) -> Changes:
        """Take more of them."""
        for change in changes:
            self.of.setdefault(change.topic, []).append(change)
        return self


def read_changes(engine: Engine) -> Changes:
    """All that the ledger has kept."""
    told = engine.backend.events(None, None)
    if told is not None:  # a cluster derives them from its own log, which keeps all
        return Changes().add(_about_topics(told))
    try:
        topic = engine.topic(EVENTS, create=False)
    except TopicNotFoundError:
        return Changes()
    found = Changes()
    with topic.reader(trimmed="earliest") as reader:
        values = (message.value for message in reader if message.value is not None)
        while some := list(islice(values, IN_ONE_PASS)):
            found.add(_parsed(some))
    found.complete = topic.first_offset == 0  # afterwards: some may go while they are read
    return found


def _parsed(values: Sequence[bytes]) -> Iterable[Change]:
    """Without a Python object for each field of each event, which takes most of the time."""
    try:
        return list(_columns(values))
    except (ImportError, ValueError):  # no pyarrow; names with half of a character, as JSON allows
        return list(_about_topics(map(Event.loads, values)))


def _about_topics(events: Iterable[Event]) -> Iterator[Change]:
    return (Change.of(event) for event in events if event.topic and event.kind in KINDS)


def _columns(values: Sequence[bytes]) -> Iterator[Change]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json as pj

    party = pa.struct(
        [("producer", pa.string()), ("engine_name", pa.string()), ("pid", pa.int64())]
    )
    text, number = pa.string(), pa.int64()
    schema = pa.schema([
        ("time", number), ("topic", text), ("epoch", number), ("kind", text), ("reason", text),
        ("from", party), ("to", party),
    ])  # fmt: skip
    data = b"\n".join(values)
    table = pj.read_json(
        io.BytesIO(data), pj.ReadOptions(block_size=len(data) + 1),
        pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )  # fmt: skip
    granted = pc.equal(table["kind"], "grant")

    def of_party(name: str, default: Any) -> Any:
        sides = [pc.struct_field(table[side], name) for side in ("to", "from")]
        return pc.fill_null(pc.if_else(granted, *sides), default)

    wanted = pc.and_(
        pc.is_in(table["kind"], pa.array(KINDS)), pc.not_equal(table["topic"], "")
    ).to_pylist()
    columns = [
        table["time"].to_pylist(), _strings(table["topic"]), table["epoch"].to_pylist(),
        _strings(table["kind"]), _strings(table["reason"]), _strings(of_party("producer", "?")),
        _strings(of_party("engine_name", "")), of_party("pid", 0).to_pylist(),
    ]  # fmt: skip
    return map(Change._make, compress(zip(*columns, strict=True), wanted))


def _strings(column: Any) -> list[str]:
    """Of equal values one object."""
    found = column.combine_chunks().dictionary_encode()
    names = found.dictionary.to_pylist()
    return [names[index] for index in found.indices.to_pylist()]
