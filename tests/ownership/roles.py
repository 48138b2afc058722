"""Helpers of the tests of roles: workers that hold one, everything that a holder can do, and two
judges.

`Auditor` reads the ledger at many moments: at each, one engine has the whole role, or no engine has
any part of it. `judge_logs` reads what the holders have written to the topics.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import exclusivelog as xl
from exclusivelog.local.ownership import role_rows
from exclusivelog.local.storage.tables import Tables, owner_of
from exclusivelog.types import PREFIX
from testing.processes import EXCLUSIVE, FENCING, MODES, PATIENCE, WAIT, State, rows, until

ROLE = "billing"
TOPICS = ["invoices", "payments"]
GROUP, READ = "billers", "orders"
BINDS: dict[str, Any] = {
    "topics": TOPICS,
    "groups": {GROUP: [READ]},
    "claims": {"shards": {"shard-1": None}},
}
AUDIT = "audit"  # where anybody may write, and a holder requires its role
LOST = (xl.OwnershipLostError, xl.ProducerFencedError, xl.ReaderFencedError)


# ---- what a holder can do ----------------------------------------------------------------


def send_to(role: xl.Role, topic: str, note: str) -> None:
    """A message that says who is the holder."""
    value = json.dumps([role.epoch, note]).encode()
    role.producer(topic).send(value)


def require(role: xl.Role, note: str) -> None:
    """A transaction that has nothing to do with the role's topics, and requires the role."""
    engine = role.claim.engine
    with engine.topic(AUDIT).producer() as producer, engine.transaction() as txn:
        producer.send(json.dumps([role.epoch, note]).encode(), transaction=txn)
        txn.require(role)


def send_to_both(role: xl.Role, note: str) -> None:
    """One message in each topic, or none."""
    with role.claim.engine.transaction() as txn:
        for topic in TOPICS:
            role.producer(topic).send(json.dumps([role.epoch, note]).encode(), transaction=txn)


def commit(role: xl.Role, reader: xl.Reader) -> None:
    """Let the group go on at the role's epoch: a position that no former holder has."""
    reader.seek(role.epoch)
    reader.commit()


def acts(role: xl.Role, reader: xl.Reader, note: str) -> dict[str, Callable[[], Any]]:
    """All that only the holder may do."""
    return {
        **{topic: lambda topic=topic: send_to(role, topic, note) for topic in TOPICS},
        "both": lambda: send_to_both(role, note),
        "cursor": lambda: commit(role, reader),
        "require": lambda: require(role, note),
    }


def outcome(act: Callable[[], Any]) -> str:
    """ "done", or the error that says that the role is lost."""
    try:
        act()
    except LOST as error:
        if error.maybe_written:
            raise
        return type(error).__name__
    return "done"


DONE = dict.fromkeys([*TOPICS, "both", "cursor", "require"], "done")


# ---- what workers are told ---------------------------------------------------------------


def hold(state: State, **options: Any) -> int:
    """Become the holder, and open everything; the role's epoch."""
    return keep(state, state.engine.role(ROLE, **{**BINDS, **options}))


def keep(state: State, role: xl.Role) -> int:
    """Be ready to act as this role's holder."""
    state.kept["role"] = role
    state.kept["reader"] = role.reader(READ)
    for topic in TOPICS:
        role.producer(topic)
    return role.epoch


def queue(state: State, **options: Any) -> None:
    """Wait for the role, without waiting here."""
    state.kept["future"] = state.engine.role_async(ROLE, **{**BINDS, **options})


def take(state: State) -> int:
    """Keep the role that was waited for; its epoch."""
    return keep(state, state.kept.pop("future").result(PATIENCE))


def act(state: State, note: str = "x") -> dict[str, str]:
    """What becomes of all that only the holder may do."""
    role, reader = state.kept["role"], state.kept["reader"]
    return {name: outcome(each) for name, each in acts(role, reader, note).items()}


def role_state(state: State) -> str:
    """What became of the kept role."""
    return state.kept["role"].state


def close(state: State) -> None:
    """Give the kept role back."""
    state.kept.pop("role").close()


def hand_over(state: State, to: str, timeout: float = PATIENCE) -> tuple[str, str]:
    """(state, reason) of the kept role's move."""
    move = state.kept["role"].hand_over(to, timeout)
    return move.state, move.reason


# ---- judges ------------------------------------------------------------------------------


def traces(engine: xl.Engine) -> dict[str, list[Any]]:
    """All that the tables hold of sessions, claims and roles."""
    found: dict[str, list[Any]] = {
        table: [key for key, _ in there]
        for table, there in rows(engine).items()
        if table in ("holders", "queue", "engines", "claimants", "transfers")
    }
    with engine.ledger.read() as tables:
        found["roles"] = [
            key
            for key, _ in tables.rows.cursor("meta")
            if key.startswith(role_rows.REQUEST) and not key.startswith(role_rows.LAST)
        ]
        found["waiting"] = [tables.topics.get(topic).waiting for _, topic in tables.topics.all()]
    return found


def check_whole(engine: xl.Engine, name: str = ROLE) -> str | None:
    """The engine that has the whole role at this moment; an error if more than one engine has any
    of it, or one has a part of it only."""
    with engine.ledger.read() as tables:
        own = tables.topics.find(PREFIX + name)
        seat = None if own is None else owner_of(tables, own)
        role = None if seat is None else role_rows.find(tables, seat.bound_to)
        parts = {}
        for topic, _ in tables.topics.all():
            row = tables.topics.find(topic)
            owner = None if row is None or topic.startswith("__") else owner_of(tables, row)
            bound = role_rows.role_of_session(tables, owner)
            if bound is not None and bound.name == name:
                assert owner is not None
                parts[topic] = (owner.engine, bound.claim)
        claims = [
            (claimant.engine, anchor.claim)
            for claimant in tables.claims.claimants()
            if (anchor := role_rows.role_of_claim(tables, claimant.id)) and anchor.name == name
        ]
    if seat is None or role is None:
        assert (parts, claims) == ({}, []), "parts of a role without a holder"
        assert seat is None or role is not None, "a seat that binds nothing"
        return None
    assert set(parts.values()) | set(claims) <= {(seat.engine, seat.bound_to)}
    assert len(parts) == len(role.topics)
    assert len(claims) == len(role.groups) + len(role.claims)
    return seat.engine


class Auditor:
    """Within the block, `check_whole` and `find_idle` are asked all the time, in a thread of its
    own."""

    def __init__(self, engine: xl.Engine, *names: str) -> None:
        self._engine, self._names = engine, names or (ROLE,)
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self.checks = 0
        self._thread = threading.Thread(target=self._run, name="auditor", daemon=True)

    def _run(self) -> None:
        try:
            while not self._over.wait(0.001):
                for name in self._names:
                    check_whole(self._engine, name)
                idle = find_idle(self._engine)
                assert idle is None, f"role {idle[0]!r} is free, and {idle[1]!r} waits for it"
                self.checks += 1
        except BaseException as error:
            self._failure = error

    def __enter__(self) -> Auditor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(AssertionError):
            until(lambda: self.checks or self._failure)
        self._over.set()
        self._thread.join(PATIENCE)
        if self._failure is not None:
            raise self._failure
        assert self.checks


def judge_logs(engine: xl.Engine) -> int:
    """Read what all holders have written: in no topic does anything of a former holder stand behind
    its successor's, and of each topic's epoch only one holder is the writer. How much it was."""
    count = 0
    for name in (*TOPICS, AUDIT):
        if name not in engine.topics():
            continue
        last, reigns = 0, dict[int, int]()
        for message in engine.topic(name).reader():
            epoch = json.loads(message.value)[0]
            assert epoch >= last, f"{name}: {message} stands behind epoch {last}"
            if name != AUDIT:
                assert reigns.setdefault(message.epoch, epoch) == epoch, f"{name}: {message}"
            last = epoch
            count += 1
    both = [[m.value for m in engine.topic(name).reader() if b"both" in m.value] for name in TOPICS]
    assert both[0] == both[1]
    assert engine.verify().ok
    return count


def find_idle(engine: xl.Engine) -> tuple[str, str] | None:
    """A role, and the engine of a live waiter that could have it at this moment (rule D4): all of
    it is free, and no other request waits for its topics. For waiters without `settle`."""
    with engine.ledger.read() as tables:
        for name, topic in role_rows.role_topics(tables):
            row = tables.topics.get(topic)
            if row.owner or tables.transfers.get(topic) is not None:
                continue
            for waiter in tables.sessions.waiters(topic):
                if engine.ledger.lockfile.slots.alive(waiter.slot, waiter.engine):
                    role = role_rows.find(tables, waiter.bound_to)
                    if role is not None and _is_free(tables, role):
                        return name, waiter.engine_name
    return None


def _is_free(tables: Tables, role: role_rows.RoleRow) -> bool:
    for topic in role.topics:
        row = tables.topics.get(topic)
        plain = [
            w for w in tables.sessions.waiters(topic) if not role_rows.role_of_session(tables, w)
        ]
        if row.owner or row.shared or plain or tables.transfers.get(topic) is not None:
            return False
    wanted = [(group, name) for group, names, _ in role.wanted() for name in names]
    return not any(tables.claims.claim(*each)[1] for each in wanted)


# Roles with topics and claims in common.
COMMON: dict[str, dict[str, Any]] = {
    "r1": {"topics": ["a", "b"]},
    "r2": {"topics": ["b", "c"], "claims": {"s": {"x": None}}},
    "r3": {"topics": ["c", "a"], "groups": {"g": [READ]}, "claims": {"s": {"y": None}}},
    "r4": {"claims": {"s": {"x": None, "y": None}}},
    "r5": {"topics": ["a", "b", "c"]},
}
REFUSALS = (*LOST, xl.WaitTimeoutError, xl.ProducerBusyError, xl.LedgerError, xl.OwnershipError)


def wander(state: State, seed: int, seconds: float) -> None:
    """Do at random all that can be done to `COMMON`, and to their topics and claims."""
    rng, end = random.Random(seed), time.monotonic() + seconds
    waiting: list[xl.RoleFuture] = []
    deeds = [_hold_one, _hold_one, _hold_one, _wait_for_one, _take_a_topic, _take_a_claim, _move]
    while time.monotonic() < end:
        with contextlib.suppress(*REFUSALS):
            rng.choice(deeds)(state.engine, rng, waiting)
        if len(waiting) > 3:
            future = waiting.pop(0)
            if not future.cancel():
                with contextlib.suppress(*REFUSALS):
                    future.result(PATIENCE).close()


def _hold_one(engine: xl.Engine, rng: random.Random, _: list[xl.RoleFuture]) -> None:
    name, mode = rng.choice(list(COMMON)), rng.choice([WAIT, WAIT, WAIT, EXCLUSIVE, FENCING])
    timeout = rng.choice([0.01, 0.3, 1.0])
    with engine.role(
        name, **COMMON[name], access_mode=mode, priority=rng.randrange(4), timeout=timeout
    ) as role:
        for topic in role.topics:
            role.producer(topic).send(b"x")
        others = [other for other in engine.engines() if other.id != engine.id]
        if others and rng.random() < 0.4:
            role.hand_over(rng.choice(others).id, timeout=rng.choice([0.05, 0.4, 2.0]))


def _wait_for_one(engine: xl.Engine, rng: random.Random, waiting: list[xl.RoleFuture]) -> None:
    name = rng.choice(list(COMMON))
    waiting.append(engine.role_async(name, **COMMON[name], priority=rng.randrange(4)))


def _take_a_topic(engine: xl.Engine, rng: random.Random, _: list[xl.RoleFuture]) -> None:
    engine.topic(rng.choice("abc")).producer(rng.choice(MODES), timeout=0.2).close()


def _take_a_claim(engine: xl.Engine, rng: random.Random, _: list[xl.RoleFuture]) -> None:
    engine.own("s", {rng.choice("xy"): None}).release()


def _move(engine: xl.Engine, rng: random.Random, _: list[xl.RoleFuture]) -> None:
    topics = ["a", "b", "c", *(PREFIX + name for name in COMMON)]
    if rng.random() < 0.5:
        engine.cancel_unload(rng.choice(topics))
    else:
        to = rng.choice(engine.engines()).id
        engine.unload(rng.choice(topics), to, timeout=rng.choice([0.05, 0.5]))


@contextlib.contextmanager
def crowd(path: str, count: int) -> Iterator[list[xl.Engine]]:
    """Engines of this process."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(xl.open(path, name=f"e{n}")) for n in range(count)]
