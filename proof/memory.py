"""The library's own transactions over tables in memory.

`Transactions` takes the rows of a `State`, lets the library do what it does to a ledger with them,
and makes a `State` of what it has written. The library's `Sessions`, `Requests`, `Succession`,
`HandOver` and `Tables` run as they are; only LMDB, the lock file and the clock are others.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgpack

from exclusivelog import _core
from exclusivelog.backend import ProducerRequest
from exclusivelog.errors import ExclusiveLogError
from exclusivelog.local.ownership.sessions import Sessions
from exclusivelog.local.ownership.steps import RETRY_AT
from exclusivelog.local.ownership.transfers import HandOver, Wish
from exclusivelog.local.records import NAMES, U64, Session, StillReleasing, Transfer, unpack_session
from exclusivelog.local.storage.before_commit import BeforeCommit
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.tables import Tables
from exclusivelog.types import EngineInfo
from proof.model_judge import Watch, judge_outcome
from proof.world import (
    NO_SESSION,
    PAST,
    SETTLE,
    SETTLES,
    TRANSIT,
    Client,
    Engine,
    Move,
    Row,
    State,
    Violation,
    World,
    is_alive,
)

TOPIC, NAME = 1, "t"
# Time is what these say: a waiter has come since `COME`, and the topic was freed at `FREED`, which
# is too soon for all but the patient; once it has settled it is `SETTLED`.
COME, FREED = 10**6, 10**6 + 10**3
SETTLED = FREED + SETTLE
LATE, DEADLINE, PROLONGED = FREED - 1, FREED + 8 * SETTLE, FREED + 9 * SETTLE
LONG_AGO = 1
TRANSFER_SLOT = Transfer._fields.index("slot")

Store = dict[str, dict[bytes, bytes]]  # {table: its rows}


# ---- LMDB in memory ----------------------------------------------------------------------


class Cursor:
    """What the library uses of LMDB's cursors."""

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self._rows = rows
        self._keys = sorted(rows)
        self._at = 0

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        for key in self._keys[self._at :]:
            yield key, self._rows[key]

    def set_range(self, key: bytes) -> bool:
        if len(self._keys) != len(self._rows):  # rows were deleted
            self._keys = sorted(self._rows)
        self._at = bisect_left(self._keys, key)
        return self._at < len(self._keys)

    def first(self) -> bool:
        self._at = 0
        return bool(self._keys)

    def last(self) -> bool:
        self._at = len(self._keys) - 1
        return bool(self._keys)

    def prev(self) -> bool:
        self._at -= 1
        return self._at >= 0

    def key(self) -> bytes:
        return self._keys[self._at]

    def value(self) -> bytes:
        return self._rows[self._keys[self._at]]


class Changes:
    """What the library uses of an LMDB transaction; `watch` sees every change of a row."""

    def __init__(self, store: Store, watch: Watch | None = None) -> None:
        self.store = {table: dict(rows) for table, rows in store.items()}
        self._watch = watch

    def get(self, key: bytes, db: str) -> bytes | None:
        return self.store.get(db, {}).get(key)

    def put(self, key: bytes, data: bytes, overwrite: bool, db: str) -> bool:
        rows = self.store.setdefault(db, {})
        if key in rows and not overwrite:
            return False
        rows[key] = data
        if self._watch is not None and db == "holders":
            self._watch.admitted(row_of(data), [row_of(d) for d in rows.values()], self._queue())
        elif self._watch is not None and db == "transfers":
            self._watch.reserved(msgpack.unpackb(data)[TRANSFER_SLOT])
        return True

    def _queue(self) -> list[Row]:
        return [row_of(data) for data in self.store.get("queue", {}).values()]

    def delete(self, key: bytes, db: str) -> bool:
        data = self.store.get(db, {}).pop(key, None)
        if self._watch is not None and db in ("holders", "queue") and data is not None:
            self._watch.dropped(row_of(data))
        return data is not None

    def cursor(self, db: str) -> Cursor:
        return Cursor(self.store.setdefault(db, {}))


DATABASES = {name: name for name in NAMES}


def tables_of(changes: Changes) -> Tables:
    """The library's tables on these rows."""
    return Tables(cast(Any, changes), DATABASES, "memory", cast(Any, None))


class MemoryLedger:
    """What the library's sessions use of a ledger."""

    path = "a ledger in memory"

    def __init__(self) -> None:
        self.store: Store = {}
        self.watch: Watch | None = None
        self.engines: tuple[Engine, ...] = ()
        self.now = 0
        self.opened = 0
        self.before_commit = BeforeCommit()
        self.keeps_what_failed = False  # a control: half a transaction is committed

    @property
    def lockfile(self) -> MemoryLedger:
        """Where engines register."""
        return self

    @property
    def slots(self) -> MemoryLedger:
        """Which engines live."""
        return self

    def alive(self, slot: int, engine: str) -> bool:
        """Does this engine exist, and respond?"""
        return is_alive(self.engines, slot, int(engine[8:], 16))

    def exists(self, slot: int, engine: str) -> bool:
        """Does this engine exist, responsive or not?"""
        found = self.engines[slot]
        return found.life == int(engine[8:], 16) and found.status != "dead"

    @contextlib.contextmanager
    def read(self) -> Iterator[Tables]:
        """A snapshot."""
        yield tables_of(Changes(self.store))

    @contextlib.contextmanager
    def write_exclusive(self, until: int = 0, applied: bool = True) -> Iterator[Tables]:
        """A transaction: all of it, or nothing."""
        changes = Changes(self.store, self.watch)
        tables = tables_of(changes)
        try:
            yield tables
            self.before_commit.settle(tables)
        except ExclusiveLogError:
            if self.keeps_what_failed:
                self.store = changes.store
            raise
        self.store = changes.store

    write_checkpointed = write_concurrent = write_fencing = write_exclusive


# ---- rows and states ---------------------------------------------------------------------


def engine_id(engine: int, life: int) -> str:
    """The id of an engine in one of its lives."""
    return f"{engine:08x}{life:08x}"


def created_at(number: int, patient: bool) -> int:
    """When a session came; its id says in which order."""
    return number if patient else COME + number


@functools.cache
def session_of(row: Row, home: int) -> Session:
    """The session as the library knows it: `pid` has the producer's number."""
    return Session(
        id=row.id,
        topic=TOPIC,
        engine=engine_id(home, row.life),
        slot=home,
        pid=row.producer,
        engine_name="",
        name=f"-{row.id}",
        mode=row.mode,
        priority=row.priority,
        created=created_at(row.id, row.patient),
        tie=0,
        since=0,
        claimed_epoch=row.claim,
        epoch=row.epoch,
        settle=row.settle,
        lineage=row.id if row.epoch else 0,
    )


@functools.cache
def row_of(data: bytes) -> Row:
    """The session, as the model knows it."""
    session = unpack_session(data)
    return Row(
        session.id,
        session.pid,
        int(session.engine[8:], 16),
        session.mode,
        session.priority,
        session.claimed_epoch,
        session.epoch,
        session.settle,
        session.created < COME,
    )


def transfer_of(move: Move) -> Transfer:
    """The hand-over as the library knows it."""
    target = engine_id(move.target, move.life)
    until = LATE if move.late else DEADLINE
    return Transfer(TOPIC, target, move.target, until, move.session, "", 0, {}, move.session)


def move_of(transfer: Transfer | None) -> Move | None:
    """The hand-over as the model knows it."""
    if transfer is None:
        return None
    life, late = int(transfer.target[8:], 16), transfer.until == LATE
    return Move(transfer.slot, life, transfer.session, late)


@functools.cache
def rows_of(row: Row, home: int, waits: bool) -> Store:
    """All rows of a session."""
    tables = tables_of(changes := Changes({}))
    session = session_of(row, home)
    (tables.sessions.put_waiter if waits else tables.sessions.put_holder)(session)
    tables.producers.put(TOPIC, session.name, -1, session.id)
    return changes.store


@functools.cache
def rows_of_topic(
    epoch: int,
    owner: int,
    shared: int,
    waiting: int,
    later: int,
    due: int,
    move: Move | None,
    known: tuple[int, int] | None,
    last: int,
) -> Store:
    """All rows of a topic, but for its sessions; `last` is the last id of a session."""
    tables = tables_of(changes := Changes({}))
    row = _core.TopicRow()
    row.id, row.name, row.epoch, row.owner, row.freed = TOPIC, NAME, epoch, owner, FREED
    row.shared, row.waiting, row.retry_waiter, row.retry_at = shared, waiting, later, due
    tables.topics.put(row)
    tables.rows.put("names", NAME.encode(), U64.pack(TOPIC))
    tables.rows.put("meta", b"session", U64.pack(last))
    if move is not None:
        tables.transfers.put(transfer_of(move))
    if known is not None:
        tables.sessions.learn(TOPIC, *known)
    return changes.store


def last_id(state: State) -> int:
    """The highest number of a session that is known anywhere."""
    return max(
        [row.id for row in state.holders + state.queue]
        + [client.id for client in state.clients]
        + [0]
    )


# ---- transactions ------------------------------------------------------------------------


class Transactions:
    """What a transaction of the library makes of a state: (its outcome, the next state). Each that
    was seen before is remembered, by all that it may depend on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.ledger = MemoryLedger()
        ledger = cast(Ledger, self.ledger)
        self.sessions = Sessions(ledger, lambda: self.ledger.now)
        self.hand_over = HandOver(ledger, self.sessions.succession)
        self._dead: dict[tuple[Any, ...], list[str]] = {}
        self._seen: dict[tuple[Any, ...], tuple[Any, State, frozenset[tuple[int, str]]]] = {}

    def request(self, state: State, row: Row) -> tuple[str | None, State]:
        """What the client is then, None if it was refused."""

        def ask() -> str | None:
            home = self._world.engine_of[row.producer]
            info = EngineInfo(engine_id(home, row.life), "", row.producer, {}, 0.0)
            try:
                request = ProducerRequest(
                    TOPIC,
                    row.mode,
                    priority=row.priority,
                    topic_epoch=row.claim,
                    settle=row.settle,
                    created=created_at(row.id, False),
                )
                registration = self.sessions.request(request, info, home)
            except StillReleasing:
                return "arriving"
            except ExclusiveLogError:
                return None
            return "waiting" if registration.queued else "open"

        return cast("tuple[str | None, State]", self._run(state, "request", row, ask))

    def cancel(self, state: State, row: Row) -> State:
        """A waiter leaves the queue."""
        session = session_of(row, self._world.engine_of[row.producer])
        return self._run(state, "cancel", row, lambda: self.sessions.cancel(session))[1]

    def close(self, state: State, producer: int, client: Client) -> State:
        """A producer gives back what it believes to have."""
        home = self._world.engine_of[producer]
        row = Row(client.id, producer, state.engines[home].life, client.mode, 0, None, client.epoch)
        session = session_of(row, home)
        return self._run(state, "close", row, lambda: self.sessions.release([session]))[1]

    def find_dead(self, state: State) -> list[str]:
        """The engines whose sessions are to be evicted."""
        key = state.holders, state.queue, state.engines
        if key not in self._dead:
            self._load(state)
            self._dead[key] = self.sessions.find_dead(lambda: {TOPIC})
        return self._dead[key]

    def evict(self, state: State, engine: str) -> State:
        """A waiting engine's background thread evicts the sessions of a dead one."""
        return self._run(
            state, "evict", engine, lambda: list(self.sessions.evict(engine, lambda: {TOPIC}))
        )[1]

    def begin(self, state: State, target: int) -> State:
        """The topic is to be handed over."""
        info = EngineInfo(engine_id(target, state.engines[target].life), "", 0, {}, 0.0)
        wish = Wish(info, target, PROLONGED)
        return self._run(state, "begin", target, lambda: self.hand_over.begin([NAME], wish))[1]

    def release(self, state: State, session: int) -> tuple[bool, State]:
        """Its owner's engine has drained it. Is it the destination's now?"""

        def ask() -> bool:
            [released] = self.hand_over.release([(session, TOPIC)])
            return released.to is not None

        return cast("tuple[bool, State]", self._run(state, "release", session, ask))

    def end_move(self, state: State) -> State:
        """The hand-over is given up."""
        return self._run(state, "end", 0, lambda: self.hand_over.cancel([TOPIC], "cancelled"))[1]

    def promote_again(self, state: State) -> State:
        """An engine retries a promotion that is due."""
        return self._run(state, "retry", 0, lambda: self.sessions.promote_again([TOPIC]))[1]

    def _run(
        self, state: State, name: str, about: Any, operation: Callable[[], Any]
    ) -> tuple[Any, State]:
        key = (
            name,
            about,
            state.epoch,
            state.top,
            state.owner,
            state.holders,
            state.queue,
            state.engines,
            state.move,
            state.settled,
            state.reminded,
            state.known,
        )
        if key not in self._seen:
            self._load(state)
            watch = self.ledger.watch = Watch(self._world, state, name)
            outcome = operation()
            after, reminders = self._save(state, watch.top)
            judge_outcome(self._world, state, name, about, outcome, after)
            self._seen[key] = outcome, after, reminders
        outcome, after, added = self._seen[key]
        return outcome, after._replace(
            clients=state.clients,
            last=state.last,
            past=state.past,
            opens=state.opens,
            deaths=state.deaths,
            stops=state.stops,
            moves=state.moves,
            reminders=_reminders(state, after, added),
        )

    def _load(self, state: State) -> None:
        held, engine_of = bool(state.holders), self._world.engine_of
        later, why = state.reminded
        due = {SETTLES: FREED + SETTLE, TRANSIT: DEADLINE, PAST: LONG_AGO, "": 0}[why]
        if why == TRANSIT and state.move is not None and state.move.late:
            due = LATE
        shared = 0 if state.owner else len(state.holders)
        parts = [
            rows_of_topic(
                state.epoch,
                state.owner,
                shared,
                len(state.queue),
                later,
                due,
                state.move,
                state.known,
                last_id(state),
            )
        ]
        parts += [rows_of(row, engine_of[row.producer], False) for row in state.holders]
        parts += [rows_of(row, engine_of[row.producer], True) for row in state.queue]
        store: Store = {}
        for part in parts:
            for table, rows in part.items():
                store.setdefault(table, {}).update(rows)
        self.ledger.store, self.ledger.engines, self.ledger.watch = store, state.engines, None
        self.ledger.now = FREED if held or not state.settled else SETTLED

    def _save(self, state: State, top: int) -> tuple[State, frozenset[tuple[int, str]]]:
        store, world = self.ledger.store, self._world
        tables = tables_of(Changes(store))
        row, transfer = tables.topics.get(TOPIC), tables.transfers.get(TOPIC)
        holders = [row_of(data) for data in store.get("holders", {}).values()]
        queue = [row_of(data) for data in store.get("queue", {}).values()]
        if (row.shared, row.waiting) != (0 if row.owner else len(holders), len(queue)):
            raise Violation("the topic's row counts its sessions wrong")
        if {number for _, _, number in tables.producers.all(TOPIC)} != {
            each.id for each in holders + queue
        }:
            raise Violation("other names are registered than those of the sessions")
        free_for = self.ledger.now - row.freed
        settled = state.settled if holders else not world.settles or free_for >= SETTLE
        move = move_of(transfer)
        reminded = NO_SESSION
        if row.retry_waiter in {each.id for each in queue}:
            why = PAST
            if not holders and transfer is not None and row.retry_at == transfer.until:
                why = TRANSIT
            elif not holders and transfer is None and row.retry_at == row.freed + SETTLE:
                why = SETTLES
            reminded = (row.retry_waiter, why)
        after = state._replace(
            epoch=row.epoch,
            top=top,
            owner=row.owner,
            holders=tuple(sorted(holders)),
            queue=tuple(sorted(queue)),
            move=move,
            settled=settled,
            reminded=reminded,
            known=tables.sessions.known(TOPIC) if world.settles else None,
        )
        return after, frozenset(self._retries(tables, state))

    def _retries(self, tables: Tables, state: State) -> Iterator[tuple[int, str]]:
        for number, engine in enumerate(state.engines):
            for _, (kind, *details) in tables.notifications.read(engine_id(number, engine.life), 0):
                if kind == RETRY_AT:
                    due = details[-1]
                    yield number, TRANSIT if due in (LATE, DEADLINE, PROLONGED) else SETTLES


def _reminders(
    before: State, after: State, added: frozenset[tuple[int, str]]
) -> tuple[tuple[int, str], ...]:
    """Which engines are to retry. That a topic is held, they find out when they do."""
    if after.holders:
        return ()
    kept = set(before.reminders) | added
    if after.move is None:
        # Worse than it is: in truth they come back when the old deadline is over.
        kept = {reminder for reminder in kept if reminder[1] != TRANSIT}
    return tuple(sorted(kept))
