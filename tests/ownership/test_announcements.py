"""Announcements: what an owner says about itself, durable and fenced as its messages are.

Rules B2 to B4 (a stale producer says nothing), B10, C1, E1 (hand-overs), G3 (with a message: both,
or nothing), H1 (it survives).
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.local.commits import FramedAttempt, TableAttempt
from exclusivelog.local.records import ANNOUNCED, pack_session, unpack_session
from exclusivelog.local.storage.tables import AnnouncementTable
from testing.processes import PATIENCE, State, Worker, hang, until

pytestmark = pytest.mark.once  # durability changes appends, not who may append

SHARED, EXCLUSIVE = "shared", "exclusive"
WAIT, FENCING = "wait_for_exclusive", "exclusive_with_fencing"
HERE, THERE = {"address": "tcp://here:1"}, {"address": "tcp://there:2"}


def own(state: State, mode: str, **options: Any) -> int:
    state.producer = state.topic.producer(mode, **options)
    return state.producer.topic_epoch


def announce(state: State, info: dict[str, str], **options: Any) -> str:
    """What came of it."""
    assert state.producer is not None
    try:
        state.producer.announce(info, **options)
    except xl.ExclusiveLogError as error:
        return type(error).__name__
    return "announced"


def said(topic: xl.Topic) -> tuple[dict[str, str], int]:
    """(info, epoch) of the topic's announcement."""
    found = topic.announcement
    assert found is not None
    return dict(found.info), found.epoch


# ---- what everybody reads ----------------------------------------------------------------


def test_e_another_process_reads_who_announces_what(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    owner = worker(name="owner")
    owner.call(own, EXCLUSIVE, name="p")
    assert owner.call(announce, HERE) == "announced"
    found, holder = topic.announcement, topic.owner
    assert found is not None
    assert holder is not None
    assert (found.info, found.epoch, found.producer_name) == (HERE, 1, "p")
    assert (found.engine_id, found.engine_name, found.pid) == (holder.engine_id, "owner", owner.pid)
    assert found.session == holder.session
    assert found.time >= holder.since
    assert owner.call(announce, THERE) == "announced"
    assert said(topic) == (THERE, 1)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_e_it_survives_everybody(
    path: str, worker: Callable[..., Worker], end: signal.Signals
) -> None:
    owner = worker(name="owner")
    owner.call(own, EXCLUSIVE)
    owner.call(announce, HERE)
    owner.signal(end)
    owner.kill()
    for options in ({"readonly": True}, {}):
        with xl.open(path, **options) as engine:
            assert said(engine.topic("orders")) == (HERE, 1)


def test_e_a_deleted_topic_s_goes_with_it(engine: xl.Engine, topic: xl.Topic) -> None:
    topic.producer(EXCLUSIVE, announce=HERE).close()
    engine.delete_topic("orders")
    with pytest.raises(xl.TopicNotFoundError):
        topic.announcement
    assert engine.topic("orders").announcement is None


def test_e_a_backup_has_it(engine: xl.Engine, topic: xl.Topic, tmp_path: Any) -> None:
    with topic.producer(EXCLUSIVE, announce=HERE):
        engine.backup(tmp_path / "backup")
    with xl.open(tmp_path / "backup") as copy:
        assert said(copy.topic("orders")) == (HERE, 1)


def test_e_the_last_one_counts_wherever_it_is_stored(engine: xl.Engine, topic: xl.Topic) -> None:
    """An owner's in the journal, a grant's in the tables, whichever came first."""
    with topic.producer(EXCLUSIVE, announce=HERE) as owner:
        owner.announce({"n": "1"})
        assert said(topic) == ({"n": "1"}, 1)
    with topic.producer(EXCLUSIVE, announce=THERE) as owner:
        assert said(topic) == (THERE, 2), "not the one in the journal"
        engine.ledger.checkpoint()
        assert said(topic) == (THERE, 2)
        owner.announce({"n": "2"})
        owner.announce({"n": "3"})
        engine.ledger.checkpoint()
        assert said(topic) == ({"n": "3"}, 2)


def test_e_one_in_the_journal_leaves_nothing_of_a_deleted_topic(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    before = announced_rows(engine)
    with topic.producer(EXCLUSIVE) as owner:
        owner.announce(HERE)
    engine.delete_topic("orders")
    assert engine.topic("orders").announcement is None
    engine.ledger.checkpoint()
    assert engine.topic("orders").announcement is None
    assert announced_rows(engine) == before == []


def announced_rows(engine: xl.Engine) -> list[bytes]:
    """The keys of all announcements in the tables."""
    with engine.ledger.read() as tables:
        return [key for key, _ in tables.rows.cursor("meta") if key.startswith(ANNOUNCED)]


@pytest.mark.rule("K2")
def test_k2_an_announcement_is_no_transaction_of_the_tables(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with topic.producer(EXCLUSIVE) as owner:
        monkeypatch.setattr(engine.ledger, "write_checkpointed", None)
        owner.announce(HERE)
        assert said(topic) == (HERE, 1)


# ---- fenced ------------------------------------------------------------------------------


def test_b3_a_fenced_owner_announces_nothing(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Nor does it with a message; and what it raises is the very error of its sends (B4)."""
    stale = worker(name="stale")
    stale.call(own, EXCLUSIVE, announce=HERE)
    with topic.producer(FENCING, announce=THERE) as owner:
        assert stale.call(announce, HERE) == "ProducerFencedError"
        assert stale.call(announce, HERE, message=b"mine") == "ProducerFencedError"
        assert said(topic) == (THERE, 2)
        assert list(topic.reader()) == []
        assert stale.call(same_errors) is True
        assert owner.send(b"x") == 0


def same_errors(state: State) -> bool:
    """Of a send and an announcement."""
    assert state.producer is not None
    errors = []
    for call in (lambda: state.producer.send(b"x"), lambda: state.producer.announce({})):
        try:
            call()
        except xl.ProducerFencedError as error:
            errors.append(error)
    return len(errors) == 2 and errors[0] is errors[1]


def test_b3_one_that_hung_announces_nothing_when_it_goes_on(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It did not notice anything, and the epoch is compared where the announcement is written."""
    stale = worker(name="stale", keepalive=0.5)
    stale.call(own, EXCLUSIVE, announce=HERE)
    waiter = topic.producer_async(WAIT, announce=THERE)
    hang(stale)
    with waiter.result(PATIENCE) as owner:
        assert said(topic) == (THERE, 2)
        stale.start(announce, HERE)
        stale.signal(signal.SIGCONT)
        assert stale.answer() == "ProducerFencedError"
        assert said(topic) == (THERE, 2)
        owner.announce({})
    assert said(topic) == ({}, 2)


@pytest.mark.parametrize("how", ["alone", "with a message", "beside a large message"])
def test_b2_the_epoch_is_compared_where_the_announcement_is_written(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The rival comes at the last moment before that; also where nothing is sent."""
    owner = topic.producer(EXCLUSIVE, announce=HERE)
    other, large = engine.topic("other"), bytes(1 << 20 if "large" in how else 1)
    sender, rivals = other.producer(), list[xl.Producer]()
    attempt, step = (TableAttempt, "write") if "large" in how else (FramedAttempt, "place")
    write = getattr(attempt, step)

    def write_late(self: Any, *given: Any) -> Any:
        if not rivals:
            rivals.append(topic.producer(FENCING, announce=THERE))
        return write(self, *given)

    monkeypatch.setattr(attempt, step, write_late)
    message = {"message": b"x"} if how == "with a message" else {}
    txn = engine.transaction()
    sender.send(large, transaction=txn)
    owner.announce(HERE, transaction=txn, **message)
    with pytest.raises(xl.ProducerFencedError):
        txn.commit()
    assert said(topic) == (THERE, 2)
    assert (topic.next_offset, other.next_offset) == (0, 0)
    assert owner.state == "fenced"


# ---- with the grant ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [EXCLUSIVE, WAIT, FENCING])
def test_e_a_grant_announces_in_its_own_transaction(
    topic: xl.Topic, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot announce is not granted either."""

    def fail(*args: Any) -> None:
        raise xl.LedgerFullError("no room left")

    with monkeypatch.context() as patch:
        patch.setattr(AnnouncementTable, "put", fail)
        with pytest.raises(xl.LedgerFullError):
            topic.producer(mode, announce=HERE)
    assert (topic.epoch, topic.owner, topic.announcement) == (0, None, None)
    with topic.producer(mode, announce=HERE):
        assert said(topic) == (HERE, 1)


def test_e_a_promotion_announces_for_the_promoted(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The waiter is stopped when its turn comes: the grant is another process's transaction, and
    so is the announcement."""
    waiter, owner = worker(name="waiter"), topic.producer(EXCLUSIVE, announce=HERE)
    waiter.start(own, WAIT, announce=THERE)
    until(lambda: topic.waiters)
    assert said(topic) == (HERE, 1), "only with the grant"
    hang(waiter)
    owner.close()
    assert said(topic) == (THERE, 2)
    assert topic.owner is not None
    assert topic.owner.engine_name == "waiter"
    waiter.signal(signal.SIGCONT)
    assert waiter.answer() == 2


def test_e1_a_hand_over_announces_for_its_destination(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    destination = worker(name="destination")
    with topic.producer(EXCLUSIVE, announce=HERE) as owner:
        destination.start(own, WAIT, announce=THERE)
        until(lambda: topic.waiters)
        engine.unload("orders", to=topic.waiters[0].engine_id)
        assert destination.answer() == 2
        assert said(topic) == (THERE, 2)
        with pytest.raises(xl.ProducerMovedError):
            owner.announce(HERE)
    assert said(topic) == (THERE, 2)


def test_e2_a_move_within_the_process_repeats_what_was_announced_last(
    path: str, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that announced before it goes on only afterwards."""
    owner, place = topic.producer(EXCLUSIVE), FramedAttempt.place
    announced, go_on = threading.Event(), threading.Event()

    def dawdle(self: Any, joint: Any) -> int:
        outcome = place(self, joint)
        if threading.current_thread() is first:
            announced.set()
            go_on.wait(PATIENCE)
        return outcome

    monkeypatch.setattr(FramedAttempt, "place", dawdle)
    first = threading.Thread(target=owner.announce, args=(HERE,))
    first.start()
    assert announced.wait(PATIENCE)
    owner.announce(THERE)
    go_on.set()
    first.join(PATIENCE)
    with xl.open(path, name="other") as other:
        topic.engine.unload("orders", to=other.id)
        owner.send(b"x")
        assert said(topic) == (THERE, 2)


# ---- with a message ----------------------------------------------------------------------


def test_g3_in_a_transaction_it_is_all_or_nothing(engine: xl.Engine, topic: xl.Topic) -> None:
    owner, other = topic.producer(EXCLUSIVE), engine.topic("other").producer(EXCLUSIVE)
    with engine.transaction() as txn:
        owner.announce(HERE, transaction=txn)
        other.send(b"x", transaction=txn)
        assert topic.announcement is None
    assert said(topic) == (HERE, 1)
    assert txn.offsets == {other: range(1)}
    txn = engine.transaction()
    owner.announce(THERE, transaction=txn)
    other.send(b"x", transaction=txn)  # before, as the producer may learn of it at once
    engine.topic("other").producer(FENCING)
    with pytest.raises(xl.ProducerFencedError):
        txn.commit()
    assert said(topic) == (HERE, 1)
    with engine.transaction() as txn:
        owner.announce(THERE, transaction=txn)
        txn.abort()
    assert said(topic) == (HERE, 1)
    with pytest.raises(xl.TransactionAbortedError):
        owner.announce(THERE, transaction=txn)


# ---- what it takes -----------------------------------------------------------------------


def test_e_a_waiter_without_an_announcement_waits_in_a_shorter_row(topic: xl.Topic) -> None:
    """The row of a session has its information only where there is one."""
    with topic.producer(EXCLUSIVE):
        waiters = [topic.producer_async(WAIT, announce=info) for info in (None, HERE)]
        with topic.engine.ledger.read() as tables:
            plain, announcing = tables.sessions.waiters(topic.id)
        assert [plain.announce, announcing.announce] == [None, HERE]
        assert unpack_session(pack_session(plain)) == plain
        assert unpack_session(pack_session(announcing)) == announcing
        first = [pack_session(session)[:3] for session in (plain, announcing)]
        assert first == [b"\xdc\x00\x14", b"\xdc\x00\x15"]
        assert all(waiter.cancel() for waiter in waiters)


# ---- asyncio, the command ----------------------------------------------------------------


def test_e_asyncio(path: str) -> None:
    async def play() -> Any:
        async with await aio.open(path) as engine:
            topic = engine.topic("orders")
            async with await topic.producer(EXCLUSIVE, announce=HERE) as owner:
                first = topic.announcement
                async with engine.transaction() as txn:
                    await owner.announce(THERE, message=b"x", transaction=txn)
                second = topic.announcement
                await owner.announce({})
                return first.info, second.info, topic.announcement.info

    assert asyncio.run(play()) == (HERE, THERE, {})


@pytest.mark.long
def test_e_the_command_shows_it(path: str, topic: xl.Topic) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "exclusivelog.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        return done.stdout

    assert "announced" not in run("info", path, "orders") + run("owners", path)
    with topic.producer(EXCLUSIVE, name="p", announce={"a": "1", "b": "\x1b"}):
        for output in (run("info", path, "orders"), run("owners", path)):
            [line] = [line for line in output.splitlines() if "announced" in line]
            assert "a=1 b=\\x1b; 20" in line
            assert "by p of test (pid" in line
            assert "epoch 1)" in line
