"""The fencing check, and the errors of a session that may not write."""

from __future__ import annotations

import time

from exclusivelog import _core
from exclusivelog.errors import (
    ProducerFencedError,
    ProducerRevokedError,
    TopicNotFoundError,
    TopicTerminatedError,
)
from exclusivelog.local.records import PREFIX, Session, is_role
from exclusivelog.local.storage.tables import Tables
from exclusivelog.types import AccessMode, OwnerInfo, WaiterInfo


def owner_info(session: Session) -> OwnerInfo:
    """The public facts of a session that holds a topic (rule A5)."""
    return OwnerInfo(
        engine_id=session.engine, engine_name=session.engine_name, pid=session.pid,
        producer_name=session.name, access_mode=AccessMode(session.mode),
        priority=session.priority, epoch=session.epoch, since=session.since,
        session=session.id, properties=session.properties,
    )  # fmt: skip


def waiter_info(session: Session) -> WaiterInfo:
    """The public facts of a session in the queue."""
    return WaiterInfo(
        engine_id=session.engine, engine_name=session.engine_name, pid=session.pid,
        producer_name=session.name, priority=session.priority, since=session.since,
        session=session.id, properties=session.properties,
    )  # fmt: skip


def told(topic: str) -> str:
    """A topic, or the role whose own topic it is, for a message."""
    return f"role {topic.removeprefix(PREFIX)!r}" if is_role(topic) else f"topic {topic!r}"


def describe(session: Session) -> str:
    """The holder, for a message."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(session.since / 1000))
    epoch = f"epoch {session.epoch}, " if session.exclusive else ""
    return (
        f"producer {session.name!r} of engine {session.engine_name!r} (id {session.engine}, "
        f"pid {session.pid}, {epoch}since {since} UTC)"
    )


def fenced(tables: Tables, row: _core.TopicRow, session: Session) -> ProducerFencedError:
    """The error of a session that may no longer write."""
    if session.bound_to and tables.claims.claimant(session.bound_to) is None:
        return revoked(row, session)
    return fenced_by(row, session, owner_of(tables, row))


def fenced_by(row: _core.TopicRow, session: Session, owner: Session | None) -> ProducerFencedError:
    """What a session is told that was fenced, and who owns the topic now."""
    now = f"held by {describe(owner)}" if owner is not None else f"at epoch {row.epoch}"
    return ProducerFencedError(
        f"{told(row.name)}: producer {session.name!r} with epoch {session.epoch} was fenced; "
        f"the topic is {now}. Close this producer and open a new one",
        holder=None if owner is None else owner_info(owner),
    )


def revoked(row: _core.TopicRow, session: Session) -> ProducerRevokedError:
    """The error of a producer whose claim is lost."""
    return ProducerRevokedError(
        f"{told(row.name)}: producer {session.name!r} was fenced: the claim or role that it was "
        "bound to was revoked or released. Make a new one with engine.own or engine.role, and open "
        "a new producer"
    )


def owner_of(tables: Tables, row: _core.TopicRow) -> Session | None:
    """The session that owns the topic; its engine may be dead."""
    return tables.sessions.holder(row.id, row.owner) if row.owner else None


def check_may_write(tables: Tables, row: _core.TopicRow, session: Session) -> None:
    """Raise unless session and epoch may write to the topic, whose row the append will change."""
    if row.flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {row.name!r} was deleted")
    if row.flags & _core.TERMINATED:
        raise TopicTerminatedError(
            f"topic {row.name!r} was terminated at offset {row.next_offset}; it can only be read"
        )
    if session.exclusive:
        valid = row.admits(session.id, session.epoch)
    else:
        valid = tables.sessions.holds(session.topic, session.id)
    if not valid:
        raise fenced(tables, row, session)
