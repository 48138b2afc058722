"""Handing topics over to an engine that is named in advance (PIP-307, rules E1-E4).

A move is a row in the table `transfers`, and every step one transaction for up to 250 topics:

```text
Owned(a, e)      nothing under way
Releasing        the row names the destination, and the session that is to release the topic:
                 its engine is told by mail, lets sends wait, and commits what it has accepted
Assigned(b)      the session is released, and the row keeps everybody but b away
Owned(b, e+1)    b's best waiter, or its next producer, has the topic; the row is gone
```

The last two are one transaction where b has a waiter. The row ends by itself: at its deadline,
with the death of its destination, or when somebody else becomes owner first. So whoever dies
at whatever step, the topic has its old owner, its new one, or is promoted as usual.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.access import Session, Transfer
from exclusivelog.errors import (
    LedgerCorruptedError,
    LedgerError,
    ProducerMovedError,
    TopicNotFoundError,
)
from exclusivelog.ledger import Ledger
from exclusivelog.sessions import MOVES, RELEASE, Sessions, describe, owner_info, owner_of
from exclusivelog.tables import Tables
from exclusivelog.types import EngineInfo, Move

if TYPE_CHECKING:
    from exclusivelog.engine import Engine

log = logging.getLogger("exclusivelog")

MOVED_AT_ONCE = 250  # topics in one transaction: others wait for the ledger meanwhile
LONGEST_SECONDS = 10**8  # of a move: about three years
LOOK_UP_SECONDS = 0.25  # a death rings no bell


@dataclass(frozen=True, slots=True)
class Released:
    """What became of one session that was to be handed over: `to` has its topic, or it keeps it
    (None)."""

    session: int
    to: Transfer | None


class HandOver:
    """The steps of moves, each one transaction."""

    def __init__(self, ledger: Ledger, sessions: Sessions) -> None:
        self._ledger = ledger
        self._sessions = sessions

    # ---- Releasing -----------------------------------------------------------------------

    def begin(self, names: Sequence[str], slot: int, to: EngineInfo, until: int) -> list[Move]:
        """Begin to move these topics, all or none; as things stand then."""
        with self._ledger.write() as tables:
            rows = [_existing(tables, name) for name in names]
            return [self._begin_one(tables, row, slot, to, until) for row in rows]

    def _begin_one(
        self, tables: Tables, row: _core.TopicRow, slot: int, to: EngineInfo, until: int
    ) -> Move:
        self._sessions.bury_the_dead(tables, row, "exclusive")
        under_way = self._sessions.transfer(tables, row)
        owner = owner_of(tables, row)
        if owner is not None and owner.engine == to.id:
            return _move(row, owner, to, "owned")
        if under_way is not None and under_way.target != to.id:
            other = f"it is on its way to engine {under_way.name!r} (id {under_way.target})"
            return _move(row, owner, to, "failed", other)
        if row.shared:
            return _move(row, owner, to, "failed", "shared producers have it, it has no owner")
        if under_way is not None:  # somebody has asked for it before: it only gets more time
            tables.put_transfer(replace(under_way, until=max(until, under_way.until)))
            if owner is not None:
                tables.post(owner, RELEASE, row.id)
            return self._look_at(tables, row, to)
        transfer = Transfer(
            row.id, to.id, slot, until, 0 if owner is None else owner.id, to.name, to.pid,
            dict(to.properties), 0 if owner is None else owner.chain,
        )  # fmt: skip
        if owner is None:
            self._sessions.assign(tables, row, transfer)
            self._sessions.promote(tables, row)
        else:
            tables.put_transfer(transfer)
            self._sessions.record(tables, row, "releasing", "unload", source=owner, target=transfer)
            tables.post(owner, RELEASE, row.id)
        tables.put_topic(row)
        return self._look_at(tables, row, to)

    # ---- Assigned, Owned -----------------------------------------------------------------

    def release(self, sessions: Iterable[tuple[int, int]]) -> list[Released]:
        """(session, topic) pairs of an engine that has drained them: give up those that are
        still to be moved."""
        with self._ledger.write() as tables:
            return [
                Released(session, self._release_one(tables, topic, session))
                for session, topic in sessions
            ]

    def _release_one(self, tables: Tables, topic: int, session_id: int) -> Transfer | None:
        row = _sound(tables, topic)
        if row is None:
            return None  # the others are released all the same
        holder = tables.holder(topic, session_id)
        transfer = self._sessions.transfer(tables, row)
        if transfer is None or holder is None or transfer.session != session_id:
            return None
        self._sessions.drop_holder(tables, row, holder, "release", "hand-over", transfer)
        self._sessions.assign(tables, row, transfer, holder)
        self._sessions.promote(tables, row)
        tables.put_topic(row)
        return transfer

    # ---- the end -------------------------------------------------------------------------

    def cancel(self, topics: Iterable[int], reason: str, until: int | None = None) -> list[str]:
        """End moves (only those with this deadline, unless None): who owns the topic keeps it,
        and what is free is promoted as usual. The names of the topics that were on their way."""
        cancelled = []
        with self._ledger.write() as tables:
            for topic in topics:
                row = _sound(tables, topic)
                if row is None:
                    continue
                transfer = self._sessions.transfer(tables, row)
                if transfer is not None and until in (None, transfer.until):
                    self._sessions.cancel_transfer(tables, row, transfer, reason)
                    cancelled.append(row.name)
                self._sessions.promote(tables, row)
                tables.put_topic(row)
            tables.announce.add(MOVES)
        return cancelled

    # ---- look ----------------------------------------------------------------------------

    def look(self, topics: Iterable[int], to: EngineInfo) -> list[Move]:
        """How the moves of these topics stand."""
        with self._ledger.read() as tables:
            return [self._look_at(tables, tables.topic(topic), to) for topic in topics]

    def _look_at(self, tables: Tables, row: _core.TopicRow, to: EngineInfo) -> Move:
        owner = owner_of(tables, row)
        if owner is not None and owner.engine == to.id:
            return _move(row, owner, to, "owned")
        transfer = tables.transfer(row.id)
        if transfer is not None and transfer.target == to.id and _core.now() < transfer.until:
            return _move(row, owner, to, "releasing" if owner is not None else "assigned")
        has = "nobody has it" if owner is None else f"it is held by {describe(owner)}"
        return _move(row, owner, to, "failed", has)

    def changes(self) -> int:
        """Grows with every step of any move."""
        lockfile = self._ledger.lockfile
        return lockfile.words.load(lockfile.topic_word(MOVES))

    def wait_for_a_change(self, seen: int, seconds: float) -> None:
        """Sleep until a move has gone on, or somebody may have died."""
        lockfile = self._ledger.lockfile
        left = min(seconds, LOOK_UP_SECONDS)
        lockfile.await_topic(lockfile.topic_word(MOVES), seen, left, spin=False)


def _sound(tables: Tables, topic: int) -> _core.TopicRow | None:
    try:
        return tables.topic(topic)
    except LedgerCorruptedError as error:
        log.error("%s; it stays where it is", error)
        return None


def _existing(tables: Tables, name: str) -> _core.TopicRow:
    row = tables.find_topic(name)
    if row is None:
        raise TopicNotFoundError(f"there is no topic {name!r} to move")
    return row


def _move(
    row: _core.TopicRow, owner: Session | None, to: EngineInfo, state: str, reason: str = ""
) -> Move:
    return Move(
        row.name, row.id, row.epoch, None if owner is None else owner_info(owner), to, state, reason
    )


# ---- the call ----------------------------------------------------------------------------


def unload(
    engine: Engine, hand_over: HandOver, topics: str | Iterable[str], to: str, timeout: float
) -> list[Move]:
    """What `Engine.unload` does."""
    destination = engine.ledger.lockfile.find(to)
    if destination is None:
        raise LedgerError(f"to={to!r} is no live engine on {engine.path}; {_who_is_there(engine)}")
    names = choose(engine, topics)
    end = time.monotonic() + timeout
    moved: list[Move] = []
    for start in range(0, len(names), MOVED_AT_ONCE):
        chunk = names[start : start + MOVED_AT_ONCE]
        moved += _move_some(engine, hand_over, chunk, *destination, end)
    return moved


def _move_some(
    engine: Engine, hand_over: HandOver, names: Sequence[str], slot: int, to: EngineInfo, end: float
) -> list[Move]:
    left = min(max(0.0, end - time.monotonic()), LONGEST_SECONDS)
    until = _core.now() + int(left * 1e9)
    begun = moves = hand_over.begin(names, slot, to, until)
    try:
        moves = _await(engine, hand_over, moves, to, end)
    except BaseException:
        _give_up(hand_over, begun, moves, "cancelled", until)
        raise
    late = _give_up(hand_over, begun, moves, "deadline", until)
    if late:
        ended = {move.topic_id: move for move in hand_over.look(late, to)}
        moves = [ended.get(move.topic_id, move) for move in moves]
    return [
        replace(move, source=first.source) if move.ok else first if _is_refused(first) else move
        for first, move in zip(begun, moves, strict=True)
    ]


def _give_up(
    hand_over: HandOver, begun: list[Move], moves: list[Move], reason: str, until: int
) -> list[int]:
    """Who has not released a topic by now keeps it; which topics those were."""
    late = [
        move.topic_id
        for first, move in zip(begun, moves, strict=True)
        if first.state == "releasing" and not move.ok
    ]
    if late:
        hand_over.cancel(late, reason, until)
    return late


def _is_refused(move: Move) -> bool:
    return move.state == "failed"


def _await(
    engine: Engine, hand_over: HandOver, moves: list[Move], to: EngineInfo, end: float
) -> list[Move]:
    """How the moves stand when all have come to something, or the time is over. What has been
    reserved stays so in this account, also if the others take longer than the reservation."""
    done: dict[int, Move] = {}
    topics = [move.topic_id for move in moves]
    while True:
        seen = hand_over.changes()
        moves = hand_over.look(topics, to)
        done.update({move.topic_id: move for move in moves if move.ok})
        moves = [done.get(move.topic_id, move) for move in moves]
        releasing = [move for move in moves if move.state == "releasing"]
        left = end - time.monotonic()
        if not releasing or left <= 0:
            return moves
        engine.check_open()
        engine.evict_the_dead({move.source.engine_id for move in releasing if move.source})
        hand_over.wait_for_a_change(seen, left)


def choose(engine: Engine, topics: str | Iterable[str]) -> list[str]:
    """The names that a topic's name, a list of them, or a prefix stand for."""
    if not isinstance(topics, str):
        names = list(topics)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"topics takes a str or an iterable of them, not {name!r}")
            if name.startswith("__"):
                raise ValueError(f"topics: {name!r} is the library's own, and has no owner")
        return list(dict.fromkeys(names))
    there = engine.topics()
    if topics in there:
        return [topics]
    found = [name for name in there if name.startswith(topics.removesuffix("*"))]
    if not found:
        raise TopicNotFoundError(f"{engine.path} has no topic {topics!r}, and none that begins so")
    return found


def _who_is_there(engine: Engine) -> str:
    there = ", ".join(f"{other.name!r} (id {other.id})" for other in engine.engines())
    return f"there is {there}" if there else "there is none"


def moved_error(topic: str, name: str, to: Transfer) -> ProducerMovedError:
    """What the producer `name` of a topic ends with that was handed over."""
    error = ProducerMovedError(
        f"topic {topic!r}: it was handed over by producer {name!r} to engine {to.name!r} (id "
        f"{to.target}, pid {to.pid}); send there"
    )
    error.successor = EngineInfo(to.target, to.name, to.pid, to.properties, 0.0)
    return error
