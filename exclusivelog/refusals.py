"""The errors of refused requests, of lost sessions, and of sends without an outcome.

They are the same for every backend (rules A5, J5).

`what` is a topic, or the role that it stands for: "topic 'orders'".

>>> str(refused("topic 'orders'", Verdict.INVALID, epoch=3, claimed_epoch=9, by=None))[:47]
"topic 'orders': topic_epoch=9 was never granted"
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from exclusivelog.admission import Verdict
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    InvalidEpochError,
    LedgerError,
    OffsetTrimmedError,
    OwnershipError,
    OwnershipLostError,
    ProducerBusyError,
    ProducerFencedError,
    ProducerMovedError,
    ReaderFencedError,
    StateError,
    TopicNotFoundError,
    TopicTerminatedError,
    WaitTimeoutError,
    describe_engine,
)
from exclusivelog.types import PREFIX, ClaimInfo, EngineInfo, OwnerInfo

# ---- who holds it ------------------------------------------------------------------------


def topic_label(topic: str) -> str:
    """The name of a topic, or of the role that it stands for, for a message.

    >>> topic_label("orders"), topic_label("__role__/billing")
    ("topic 'orders'", "role 'billing'")
    """
    is_role = topic.startswith(PREFIX)
    return f"role {topic.removeprefix(PREFIX)!r}" if is_role else f"topic {topic!r}"


def describe(owner: OwnerInfo) -> str:
    """A producer that holds a topic, or waits for it, for a message."""
    epoch = f"epoch {owner.epoch}, " if owner.epoch and owner.access_mode.is_exclusive else ""
    return (
        f"producer {owner.producer_name!r} of engine {owner.engine_name!r} (id {owner.engine_id}, "
        f"pid {owner.pid}, {epoch}since {utc(owner.since)})"
    )


def no_engine(path: str, to: str, there: Iterable[EngineInfo]) -> LedgerError:
    """The error of a move to an engine that is not live. `there`: the live ones."""
    found = ", ".join(f"{engine.name!r} (id {engine.id})" for engine in there)
    return LedgerError(f"to={to!r} is not a live engine on {path}; there is {found or 'none'}")


def nothing_to_move(topic: str) -> TopicNotFoundError:
    """The error of a move of a topic that does not exist."""
    return TopicNotFoundError(f"there is no topic {topic!r} to move")


def utc(ms: int) -> str:
    """A time in ms since 1970, for a message."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ms / 1000))


def held_by(owner: OwnerInfo | None) -> str:
    """Who holds the topic, or waits for it, as a part of an error (rule A5); "" for None.

    The waiter that a refusal names may be the only one that keeps the topic from the request: the
    topic is kept for it."""
    if owner is None:
        return ""
    waits = owner.access_mode.waits and not owner.epoch
    return f"; it is {'awaited' if waits else 'held'} by {describe(owner)}"


def moves_to(engine_name: str, engine_id: str) -> str:
    """Why another hand-over of a topic fails (rule E4)."""
    return f"it is being handed over to engine {engine_name!r} (id {engine_id})"


def moving_to(engine_name: str, engine_id: str) -> str:
    """Where the topic is being handed over to, as a part of an error."""
    return f"; {moves_to(engine_name, engine_id)}"


# Why a topic with shared producers is not moved (rule E1).
NO_OWNER = "shared producers have it, it has no owner"


def not_there(producer: str) -> str:
    """Why the topic of this producer is not moved."""
    return f"no producer {producer!r} holds it"


def state_of_move(*, arrived: bool, in_transit: bool, holder: OwnerInfo | None) -> tuple[str, str]:
    """The state of a move, and why it has failed (rule E4). `arrived`: the destination has the
    topic; `in_transit`: its hand-over to there goes on; `holder`: who has the topic."""
    if arrived:
        return "owned", ""
    if in_transit:
        return "assigned" if holder is None else "releasing", ""
    return (
        "failed",
        "no producer holds it" if holder is None else f"it is held by {describe(holder)}",
    )


# ---- requests that are refused -----------------------------------------------------------


def refused(
    what: str,
    verdict: Verdict,
    *,
    epoch: int,
    claimed_epoch: int | None,
    by: OwnerInfo | None,
    moving: str = "",
) -> ExclusiveLogError:
    """The error of a request with this verdict. `epoch`: the topic's; `claimed_epoch`: the
    request's `topic_epoch`; `by`: who holds the topic; `moving`: of `moving_to`."""
    if verdict is Verdict.INVALID:
        return InvalidEpochError(
            f"{what}: topic_epoch={claimed_epoch} was never granted: the topic is at epoch {epoch}"
            ". Pass the epoch that this producer had, or None"
        )
    if verdict is Verdict.STALE:
        return ProducerFencedError(
            f"{what} is at epoch {epoch}: topic_epoch={claimed_epoch} is out of date: another "
            f"owner came since{held_by(by)}{moving}. Open a producer without topic_epoch",
            holder=by,
        )
    if verdict is Verdict.BUSY:
        return ProducerBusyError(
            f"{what} is not free for a shared producer{held_by(by)}{moving}; try again when it is "
            "free, or use another access mode",
            holder=by,
        )
    holds = "holder" if what.startswith("role ") else "producer"
    return ProducerFencedError(
        f"{what} is not free for an exclusive {holds}{held_by(by)}{moving}; wait_for_exclusive "
        "waits for it, exclusive_with_fencing takes it",
        holder=by,
    )


def name_in_use(what: str, by: OwnerInfo) -> ProducerBusyError:
    """The error of a producer whose name another one of the topic has (rule A6)."""
    return ProducerBusyError(
        f"{what}: the producer name {by.producer_name!r} is in use by {describe(by)}; choose "
        "another name, or wait until it is closed",
        holder=by,
    )


def timed_out(waited: str, owner: OwnerInfo | None, blocked: str = "") -> WaitTimeoutError:
    """The error of a waiter whose `timeout` has passed. `waited`: for what, and how long;
    `blocked`: what else has held it up."""
    return WaitTimeoutError(f"{waited}{held_by(owner)}{blocked}", holder=owner)


def late_release(timeout: float | None, refusal: ExclusiveLogError) -> WaitTimeoutError:
    """The error of a request at the destination of a hand-over that was not released within its
    `timeout`. `refusal`: the error that it would get without the hand-over."""
    return WaitTimeoutError(
        f"the hand-over to this engine took longer than timeout={timeout} s: {refusal}",
        holder=refusal.holder,
    )


def terminated(what: str, end: int) -> TopicTerminatedError:
    """The error for producers of a topic that was terminated at this offset (rule G8)."""
    return TopicTerminatedError(f"{what} was terminated at offset {end}; it can only be read")


# ---- topics that are not there, and what was trimmed -------------------------------------

MOST_COMPARED = 10_000  # names; each takes some tens of microseconds


def no_topic(path: str, name: str, there: Sequence[str] | None = None) -> TopicNotFoundError:
    """The error for an unknown topic. `there`: the topics that it may have been meant for.

    >>> print(no_topic("data/log", "order", ["orders"]))
    data/log has no topic 'order'; did you mean 'orders'?
    """
    return TopicNotFoundError(f"{path} has no topic {name!r}{_similar(name, there)}")


def _similar(name: str, there: Sequence[str] | None) -> str:
    from difflib import get_close_matches  # imported only for this error

    if there is None or len(there) > MOST_COMPARED:
        return ""
    if not there:
        return "; it has no topics yet"
    found = " or ".join(repr(other) for other in get_close_matches(name, there, 2))
    return f"; did you mean {found}?" if found else ""


def trimmed(topic: str, first: int, position: int) -> OffsetTrimmedError:
    """The error for a reader whose position was trimmed (rule G8)."""
    return OffsetTrimmedError(
        f"topic {topic!r} begins at offset {first}; {position} was trimmed. "
        'seek("earliest") continues at the first message that is left'
    )


# ---- what topics hold, and objects that are closed ---------------------------------------


def is_other_kind(held: Mapping[str, str | None], wanted: Mapping[str, str | None]) -> bool:
    """Does a topic hold something else than the map or state that is to be opened? What is not
    known of one of them is no difference.

    >>> is_other_kind({"holds": "map", "key": ""}, {"holds": "map", "key": "json"})
    False
    """
    return any(value and (held.get(field) or value) != value for field, value in wanted.items())


def other_kind(
    topic: str, held: Mapping[str, str | None], wanted: Mapping[str, str | None]
) -> StateError:
    """The error in that case."""
    return StateError(
        f"topic {topic!r} holds {_described(held)}; it cannot be opened as {_described(wanted)}"
    )


def _described(kind: Mapping[str, str | None]) -> str:
    codecs = ", ".join(f"{name}={value}" for name, value in kind.items() if name != "holds")
    return f"a {kind['holds']}" + (f" ({codecs})" if codecs else "")


def producer_closed(name: str, topic: str) -> EngineClosedError:
    """The error for calls of a producer that is closed."""
    return EngineClosedError(f"producer {name!r} of topic {topic!r} is closed; open a new one")


def reader_closed(topic: str) -> EngineClosedError:
    """The error for calls of a reader that is closed."""
    return EngineClosedError(f"this reader of topic {topic!r} is closed; open a new one")


def watch_closed(topic: str) -> EngineClosedError:
    """The error for calls of a watch of the topic's owner that is closed."""
    return EngineClosedError(
        f"this watch of the owner of topic {topic!r} is closed; open a new one"
    )


def watch_overtaken(topic: str, most: int) -> OffsetTrimmedError:
    """The error for a watch of which more changes than are kept were not read."""
    return OffsetTrimmedError(
        f"the watch of the owner of topic {topic!r} has fallen behind by more than {most:,} "
        "changes; open a new one"
    )


# ---- sessions that are lost --------------------------------------------------------------


def fenced(
    what: str, name: str, epoch: int, owner: OwnerInfo | None, topic_epoch: int
) -> ProducerFencedError:
    """The error of a fenced producer, which names the owner. `epoch`: the producer's."""
    now = f"at epoch {topic_epoch}" if owner is None else f"held by {describe(owner)}"
    return ProducerFencedError(
        f"{what}: producer {name!r} with epoch {epoch} was fenced; the topic is {now}. Close this "
        "producer and open a new one",
        holder=owner,
    )


def overtaken(
    what: str, name: str, owner: OwnerInfo | None, topic_epoch: int
) -> ProducerFencedError:
    """The error of a waiter that was fenced (rule A1)."""
    now = f"at epoch {topic_epoch}" if owner is None else f"held by {describe(owner)}"
    return ProducerFencedError(
        f"{what}: producer {name!r} was fenced while it waited; the topic is {now}. Wait for it "
        "again, or use exclusive_with_fencing",
        holder=owner,
    )


def handed_over(topic: str, name: str, to: EngineInfo) -> ProducerMovedError:
    """The error of the producer `name` of a topic that was handed over to this engine (rule E2)."""
    error = ProducerMovedError(
        f"topic {topic!r} was handed over by producer {name!r} to {describe_engine(to)}; send there"
    )
    error.successor = to
    return error


def name_fencing_engine(
    error: ExclusiveLogError, epoch: int, engine_here: Callable[[str], object | None]
) -> None:
    """Name the engine if this process has fenced its own producer, by a second one for example.
    `epoch`: the producer's; `engine_here`: the open engine of that id in this process."""
    holder = error.holder
    if type(error) is not ProducerFencedError or holder is None:
        return
    # Otherwise there may have been another owner in between.
    is_next = holder.epoch == epoch + 1
    if is_next and engine_here(holder.engine_id) is not None:
        error.args = (f"{error}. It was fenced by this process, engine {holder.engine_name!r}",)


# ---- claims ------------------------------------------------------------------------------


def claim_refused(
    group: str, resource: str, wanted: int | None, last: int, holder: tuple[EngineInfo, int] | None
) -> OwnershipError:
    """The error of a claim that is refused. `last`: the resource's last generation; `holder`: the
    live engine that holds it, and since when (ms since 1970)."""
    what = f"resource {resource!r} of group {group!r}"
    if holder is None:
        return OwnershipError(
            f"{what} has been at generation {last}: {wanted} is out of date. Claim it with None "
            "for the next one"
        )
    engine, since = holder
    error = OwnershipError(
        f"{what} is held with generation {last}, above {wanted}, by engine {engine.name!r} (id "
        f"{engine.id}, pid {engine.pid}, since {utc(since)}). Claim it with {last} or more, or "
        "None, to take it"
    )
    error.retriable = True
    return error


def describe_claim(group: str, generations: object) -> str:
    """A claim, for a message."""
    named = f"group {group!r}" if group else "no group"
    return f"<Claim of {generations} in {named}>"


def claim_revoked(claim: str, rival: EngineInfo | None) -> OwnershipLostError:
    """The error for the holder of a claim that was revoked. `claim`: of `describe_claim`;
    `rival`: the engine that has claimed it since."""
    by = "" if rival is None else f" by engine {rival.name!r} (id {rival.id}, pid {rival.pid})"
    return OwnershipLostError(
        f"{claim} was revoked: a resource of it was claimed{by} with an equal or higher "
        "generation, or with 0. Make a new one with engine.own"
    )


def claim_moved(claim: str, successor: EngineInfo) -> OwnershipLostError:
    """The error for the holder of a claim that was handed over to this engine."""
    return OwnershipLostError(
        f"{claim} was handed over with its topic to {describe_engine(successor)}; claim it there",
        successor=successor,
    )


def group_is_read(group: str, reader: ClaimInfo) -> OwnershipError:
    """The error for the deletion of a group that this reader reads."""
    return OwnershipError(
        f"group {group!r} cannot be deleted while it is read by engine {reader.engine_name!r} (id "
        f"{reader.engine_id}, pid {reader.pid}); close that reader first"
    )


def reader_fenced(topics: str, group: str, later: EngineInfo | None) -> ReaderFencedError:
    """The error for a group's reader of these topics after a later one has come, which is this
    engine's (rule F6)."""
    by = (
        ""
        if later is None
        else (f": engine {later.name!r} (id {later.id}, pid {later.pid}) is the reader now")
    )
    return ReaderFencedError(
        f"topic {topics}: this reader of group {group!r} was fenced by a later one{by}. Close this "
        "reader and open a new one"
    )


def without_outcome(topic: str, timeout: float | None) -> WaitTimeoutError:
    """The error for a send that was not acknowledged within its timeout. The message may still be
    committed, so sending it again could append it twice."""
    error = WaitTimeoutError(
        f"topic {topic!r}: no outcome within timeout={timeout} s; what was sent is still on its "
        "way. Send it again only with the same sequence_id"
    )
    error.retriable, error.maybe_written = False, True
    return error
