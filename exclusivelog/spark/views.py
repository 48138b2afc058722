"""The columns of the data source: messages, and views (epochs, producers, topics, txns, runs).

Views show what the ledger knows besides the messages. A view is small, and made where the query is
planned.

The view `runs` is drawn up in `exclusivelog.audit.runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from exclusivelog.spark import plan
from exclusivelog.spark.errors import SCHEMA, SourceError
from exclusivelog.types import OwnerInfo, WaiterInfo

if TYPE_CHECKING:
    import exclusivelog as xl

# ---- tables ----------------------------------------------------------------------------


Record = dict[str, Any]

TEXT, NUMBER, BYTES, TIME = StringType(), LongType(), BinaryType(), TimestampType()
COLUMNS: dict[str, dict[str, DataType]] = {
    "messages": {
        "topic": TEXT, "offset": NUMBER, "epoch": NUMBER, "key": BYTES, "value": BYTES,
        "publish_time": TIME, "event_time": TIME, "producer": TEXT, "sequence_id": NUMBER,
        "properties": MapType(TEXT, TEXT),
    },
    "topics": {
        "topic": TEXT, "first_offset": NUMBER, "next_offset": NUMBER, "messages": NUMBER,
        "epoch": NUMBER, "owner": TEXT, "owner_engine": TEXT, "owner_pid": NUMBER,
        "owner_since": TIME, "waiters": NUMBER, "transfer": TEXT, "transfer_to": TEXT,
        "transfer_to_engine": TEXT, "transfer_to_pid": NUMBER, "transfer_until": TIME,
    },
    "owners": {
        "topic": TEXT, "state": TEXT, "producer": TEXT, "mode": TEXT, "priority": NUMBER,
        "epoch": NUMBER, "engine": TEXT, "engine_id": TEXT, "pid": NUMBER, "since": TIME,
        "until": TIME, "from_producer": TEXT, "from_engine": TEXT, "from_engine_id": TEXT,
    },
    "events": {
        "time": TIME, "topic": TEXT, "epoch": NUMBER, "kind": TEXT, "reason": TEXT,
        "priority": NUMBER, "from_producer": TEXT, "from_engine": TEXT, "from_engine_id": TEXT,
        "from_pid": NUMBER, "to_producer": TEXT, "to_engine": TEXT, "to_engine_id": TEXT,
        "to_pid": NUMBER,
    },
    "epochs": {
        "topic": TEXT, "epoch": NUMBER, "first_offset": NUMBER, "last_offset": NUMBER,
        "messages": NUMBER, "producers": ArrayType(TEXT), "first_time": TIME, "last_time": TIME,
    },
    "producers": {
        "topic": TEXT, "producer": TEXT, "last_sequence_id": NUMBER, "live": BooleanType(),
    },
    "txns": {"topic": TEXT, "txn_app_id": TEXT, "txn_version": NUMBER},
    "runs": {
        "topic": TEXT, "epoch": NUMBER, "producer": TEXT, "bucket": TIME, "first_offset": NUMBER,
        "last_offset": NUMBER, "messages": NUMBER, "first_time": TIME, "last_time": TIME,
        "first_sequence_id": NUMBER, "last_sequence_id": NUMBER, "falls": NUMBER, "gaps": NUMBER,
    },
}  # fmt: skip


def schema_of(view: str) -> StructType:
    """All columns of a view. Any of them may be null."""
    schema = StructType()
    for name, kind in COLUMNS[view].items():
        schema = schema.add(name, kind)
    return schema


def check_columns(view: str, schema: StructType) -> None:
    """Refuse columns that the view does not have, or that have another type there."""
    known = COLUMNS[view]
    for field in schema.fields:
        if field.name not in known:
            raise SourceError(
                SCHEMA, f"there is no column {field.name!r}; view={view} has {', '.join(known)}"
            )
        wanted = known[field.name]
        if field.dataType != wanted:
            raise SourceError(
                SCHEMA,
                f"column {field.name!r} is {wanted.simpleString()}, not "
                f"{field.dataType.simpleString()}; cast it after reading",
            )
    if not schema.fields:
        raise SourceError(SCHEMA, "a schema without columns; name at least one")


# ---- the views ---------------------------------------------------------------------------


def records(engine: xl.Engine, view: str, topics: Iterable[str]) -> Iterator[Record]:
    """The rows of a view."""
    return (record for topic in topics for record in VIEWS[view](engine, topic))


def _topics(engine: xl.Engine, name: str) -> Iterator[Record]:
    here, topic = plan.row(engine, name), engine.topic(name, create=False)
    owner, transfer = topic.owner, topic.transfer
    yield {
        "topic": name,
        "first_offset": here.first_offset,
        "next_offset": here.next_offset,
        "messages": here.next_offset - here.first_offset,
        "epoch": here.epoch,
        "owner": owner and owner.producer_name,
        "owner_engine": owner and owner.engine_name,
        "owner_pid": owner and owner.pid,
        "owner_since": owner and owner.since * 1000,
        "waiters": len(topic.waiters),
        "transfer": transfer and transfer.state,
        "transfer_to": transfer and transfer.target.name,
        "transfer_to_engine": transfer and transfer.target.id,
        "transfer_to_pid": transfer and transfer.target.pid,
        "transfer_until": transfer and transfer.until * 1000,
    }


def _owners(engine: xl.Engine, name: str) -> Iterator[Record]:
    topic = engine.topic(name, create=False)
    for holder in topic.holders:
        yield {
            **_session(name, "holds", holder),
            "mode": holder.access_mode.value,
            "epoch": holder.epoch,
        }
    for transfer in topic.transfers:
        source, target = transfer.source, transfer.target
        yield {
            "topic": name,
            "state": transfer.state,
            "producer": transfer.producer,
            "engine": target.name,
            "engine_id": target.id,
            "pid": target.pid,
            "until": transfer.until * 1000,
            "from_producer": source and source.producer_name,
            "from_engine": source and source.engine_name,
            "from_engine_id": source and source.engine_id,
        }
    for waiter in topic.waiters:
        yield {**_session(name, "waits", waiter), "mode": waiter.access_mode.value}


def _session(topic: str, state: str, facts: OwnerInfo | WaiterInfo) -> Record:
    return {
        "topic": topic,
        "state": state,
        "producer": facts.producer_name,
        "priority": facts.priority,
        "engine": facts.engine_name,
        "engine_id": facts.engine_id,
        "pid": facts.pid,
        "since": facts.since * 1000,
    }


def _events(engine: xl.Engine, name: str) -> Iterator[Record]:
    for event in engine.history(name):
        yield {
            "time": event.time * 1000,
            "topic": event.topic,
            "epoch": event.epoch,
            "kind": event.kind,
            "reason": event.reason,
            "priority": event.priority,
            **_party("from", event.source),
            **_party("to", event.target),
        }


def _party(side: str, party: Mapping[str, Any] | None) -> Record:
    facts = party or {}
    return {
        f"{side}_producer": facts.get("producer"),
        f"{side}_engine": facts.get("engine_name"),
        f"{side}_engine_id": facts.get("engine"),
        f"{side}_pid": facts.get("pid"),
    }


def _epochs(engine: xl.Engine, name: str) -> list[Record]:
    here = plan.row(engine, name)
    return [
        {
            "topic": name,
            "epoch": epoch.epoch,
            "first_offset": epoch.first_offset,
            "last_offset": epoch.last_offset,
            "messages": epoch.messages,
            "producers": epoch.producers,
            "first_time": epoch.first_time * 1000,
            "last_time": epoch.last_time * 1000,
        }
        for epoch in engine.backend.topic_store(here.id).epochs(here.first_offset)
    ]


def _producers(engine: xl.Engine, name: str) -> list[Record]:
    found = engine.backend.topic_store(plan.row(engine, name).id).producers()
    return [
        {"topic": name, "producer": producer, "last_sequence_id": last, "live": live}
        for producer, last, live in found
    ]


def _txns(engine: xl.Engine, name: str) -> list[Record]:
    found = engine.backend.topic_store(plan.row(engine, name).id).batches()
    return [
        {"topic": name, "txn_app_id": writer, "txn_version": number}
        for writer, number in found.items()
    ]


VIEWS: dict[str, Callable[[xl.Engine, str], Iterable[Record]]] = {
    "topics": _topics,
    "owners": _owners,
    "events": _events,
    "epochs": _epochs,
    "producers": _producers,
    "txns": _txns,
}
