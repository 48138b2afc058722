"""Who has a topic and who waits for it, and what follows for a request (rules A, B5, D): no I/O but
asking who lives.

Deciding is for order alone. Two that ask at once are told apart by the log (rule J1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from exclusivelog.cluster.following import TopicLog
from exclusivelog.cluster.frames import Grant, Join
from exclusivelog.cluster.log import terminated_error
from exclusivelog.cluster.owning import now_ms
from exclusivelog.cluster.waiting import Assign, Wait
from exclusivelog.errors import InvalidEpochError, ProducerBusyError, ProducerFencedError
from exclusivelog.types import AccessMode, OwnerInfo

__all__ = [
    "Seen",
    "check_claim",
    "check_name",
    "check_not_terminated",
    "fenced_error",
    "look",
    "name_error",
    "shared_error",
]


class Seen(NamedTuple):
    """Who has a topic and who waits for it, best first, of those whose engines live; whose session
    should be released because its engine is gone; `State.tenure`; and to which engine the topic is
    assigned (rule E3): `elsewhere`, if that is not the one that looks."""

    owner: Grant | None
    shared: tuple[Join, ...]
    queue: tuple[Wait, ...]
    dead: tuple[Grant | Join, ...]
    tenure: tuple[int, bool, int]
    assigned: Assign | None = None
    elsewhere: Assign | None = None

    @property
    def free(self) -> bool:
        """Has nobody the topic, and may this engine have it?"""
        return self.owner is None and not self.shared and self.elsewhere is None

    @property
    def holders(self) -> list[OwnerInfo]:
        """Those who have it."""
        return [each.owner() for each in ((self.owner,) if self.owner else self.shared)]

    def first(self, leave_out: int = 0) -> OwnerInfo | None:
        """Because of whom a request is refused (rule A5)."""
        waiters = [_waiter(each) for each in self.queue if each.number != leave_out]
        return next(iter([*self.holders, *waiters]), None)


def look(topic: TopicLog, lives: Callable[[str], bool], engine: str = "") -> Seen:
    """Who has the topic and who waits, as far as its log was read, for a request of this engine: a
    topic that is assigned to it goes past those who wait elsewhere."""
    with topic.changed:
        owner, tenure, queue = topic.state.owner, topic.state.tenure, topic.waiters.in_order()
        assigned = topic.waiters.assigned_at(now_ms())
        shared = [each.join for each in topic.state.shared.values()]
    having: list[Grant | Join] = [*([] if owner is None else [owner]), *shared]
    alive = {each.holder.engine_id for each in having} | {each.engine_id for each in queue}
    alive = {each for each in alive if lives(each)}
    owner_lives = owner is not None and owner.holder.engine_id in alive
    if assigned is not None and not lives(assigned.engine_id):
        assigned = None
    elsewhere = assigned if assigned is not None and assigned.engine_id != engine else None
    if assigned is not None and elsewhere is None and not (owner_lives or shared):
        queue = [each for each in queue if each.engine_id == engine]
    return Seen(
        owner if owner_lives else None,
        tuple([each for each in shared if each.holder.engine_id in alive]),
        tuple([each for each in queue if each.engine_id in alive]),
        tuple([each for each in having if each.holder.engine_id not in alive]), tenure, assigned,
        elsewhere,
    )  # fmt: skip


def _waiter(waiter: Wait) -> OwnerInfo:
    """A waiter, as errors show it."""
    return OwnerInfo(
        engine_id=waiter.engine_id, engine_name=waiter.engine_name, pid=waiter.pid,
        producer_name=waiter.producer_name, access_mode=AccessMode.WAIT_FOR_EXCLUSIVE,
        priority=waiter.priority, epoch=0, since=waiter.since, session=waiter.number,
        properties=waiter.properties,
    )  # fmt: skip


# ---- what is refused ---------------------------------------------------------------------


def check_not_terminated(topic: TopicLog) -> None:
    """TopicTerminatedError if nothing may be written any more (rule G8)."""
    if topic.state.terminated:
        raise terminated_error(f"topic {topic.name!r}", topic.state)


def check_claim(topic: TopicLog, claim: int | None) -> None:
    """Rules B5 and B6: before anybody is disturbed."""
    epoch, grant = topic.state.epoch, topic.state.grant
    if claim is None:
        return
    if claim < epoch:
        raise fenced_error(
            topic.name, f"has epoch {epoch}: topic_epoch={claim} is out of date",
            None if grant is None else grant.owner(),
        )  # fmt: skip
    if claim > epoch or claim == 0:
        raise InvalidEpochError(
            f"topic {topic.name!r}: topic_epoch={claim} was never granted: the topic is at "
            f"epoch {epoch}"
        )


def check_name(topic: str, name: str, seen: Seen, number: int) -> None:
    """Rule A6, but for a producer that fences."""
    waiters = [_waiter(each) for each in seen.queue if each.number != number]
    for each in (*seen.holders, *waiters):
        if each.producer_name == name:
            raise name_error(topic, each)


def name_error(topic: str, by: OwnerInfo | Wait) -> ProducerBusyError:
    """The error for a producer name that is in use."""
    held = _waiter(by) if isinstance(by, Wait) else by
    return ProducerBusyError(
        f"topic {topic!r} has a live producer named {held.producer_name!r}, of engine "
        f"{held.engine_name!r} (id {held.engine_id}, pid {held.pid}); use another name, or "
        "close that one first",
        holder=held,
    )


def shared_error(
    topic: str, by: OwnerInfo | None, assigned: Assign | None = None
) -> ProducerBusyError:
    """The error for a shared producer that is not admitted."""
    return ProducerBusyError(
        f"topic {topic!r} is not free for a shared producer{_held(by)}{_moving(assigned)}; try "
        "again when it is free, or use another access mode",
        holder=by,
    )


def fenced_error(
    topic: str, what: str, by: OwnerInfo | None, assigned: Assign | None = None
) -> ProducerFencedError:
    """The error for a request that is refused because of this owner (rule A5)."""
    return ProducerFencedError(f"topic {topic!r} {what}{_held(by)}{_moving(assigned)}", holder=by)


def _moving(assigned: Assign | None) -> str:
    if assigned is None:
        return ""
    return f"; it is handed over to engine {assigned.engine_name!r} (id {assigned.engine_id})"


def _held(by: OwnerInfo | None) -> str:
    if by is None:
        return ""
    verb = "awaited" if by.access_mode is AccessMode.WAIT_FOR_EXCLUSIVE and not by.epoch else "held"
    return (
        f"; it is {verb} by producer {by.producer_name!r} of engine {by.engine_name!r} "
        f"(id {by.engine_id}, pid {by.pid}), epoch {by.epoch}"
    )
