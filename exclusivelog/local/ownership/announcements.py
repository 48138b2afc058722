"""What the owner of a topic announces: where it can be reached, say, or what it is at.

One row per topic, written by its owner alone: in the transaction of its grant (`announce=`), or
later in one that compares session and epoch as an append does (`producer.announce`). It stays
when its owner leaves, until another one announces: who succeeds reads what the last one said.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from exclusivelog.local.records import ANNOUNCED, U64, Session, wall_ms
from exclusivelog.local.storage.tables import Tables
from exclusivelog.types import Announcement


def put_announcement(tables: Tables, session: Session, info: Mapping[str, str]) -> None:
    """Replace the topic's announcement. The session owns the topic: the caller has compared."""
    row = [
        dict(info), session.epoch, wall_ms(), session.engine, session.engine_name, session.pid,
        session.name, session.id,
    ]  # fmt: skip
    tables.rows.put("meta", ANNOUNCED + U64.pack(session.topic), msgpack.packb(row))


def announcement(tables: Tables, topic: int) -> Announcement | None:
    """What was announced last; None where nothing ever was."""
    return tables.rows.find("meta", ANNOUNCED + U64.pack(topic), _unpack)


def _unpack(data: bytes) -> Announcement:
    return Announcement(*msgpack.unpackb(data))
