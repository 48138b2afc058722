"""`engine.verify()` on a cluster: what is damaged in the logs of a place, and beside them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

import pytest
from click.testing import CliRunner

import exclusivelog as xl
from exclusivelog.cli import load
from exclusivelog.cluster import blobs, checkpoints, claimed, waiting
from exclusivelog.cluster.checkpoints import PREFIX, SNAPSHOTS, Checkpoint
from exclusivelog.cluster.claimed import Commit
from exclusivelog.cluster.frames import Content, Frame, decode, encode
from exclusivelog.cluster.memory import MemoryLog, MemoryPlace
from testing.processes import EXCLUSIVE, WAIT, until

pytestmark = [pytest.mark.once, pytest.mark.rule("G9")]
Damage = Callable[[MemoryLog], None]


@pytest.fixture
def path() -> str:
    return f"memory://{secrets.token_hex(8)}"


def log_of(path: str, name: str) -> MemoryLog:
    return MemoryPlace.named(path.partition("://")[2])._shared.logs[name]


def filled(path: str, monkeypatch: pytest.MonkeyPatch, every: int = 5_000) -> None:
    """Two topics, a group with a position, a lock, and a waiter that was promoted."""
    monkeypatch.setattr(checkpoints, "EVERY_RECORDS", every)
    with xl.open(path) as engine, xl.open(path) as other:
        topic = engine.topic("orders")
        with topic.producer(EXCLUSIVE, name="p") as producer:
            waiter = other.topic("orders").producer_async(WAIT)
            producer.send_many([b"a", b"b"])
            for _ in range(4):
                producer.send(b"c")
        waiter.result().close()
        with topic.producer("shared") as shared:
            shared.send(b"d")
        with topic.reader(group="billing") as reader:
            reader.read_batch(3)
            reader.commit()
        with engine.topic("bills").producer() as producer:
            producer.send(b"e")
        with engine.lock("nightly"):
            pass


def found(path: str) -> tuple[str, ...]:
    with xl.open(path, readonly=True) as engine:
        report = engine.verify()
        assert engine.verify() == report  # it repairs nothing, and ends nothing
    assert report.ok == (not report.problems)
    return report.problems


def alter(log: MemoryLog, number: int, change: Callable[[bytes], bytes]) -> None:
    log._records[number] = change(log._records[number])


def number_of(log: MemoryLog, magic: bytes) -> int:
    """The number of the first such record."""
    return next(number for number, data in enumerate(log._records) if data.startswith(magic))


def frames_in(log: MemoryLog) -> list[int]:
    """The numbers of its frames."""
    return [number for number, data in enumerate(log._records) if isinstance(decode(data), Frame)]


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


# ---- what is sound -----------------------------------------------------------------------


@pytest.mark.parametrize("every", [5_000, 20])
def test_what_engines_write_is_sound(
    path: str, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    filled(path, monkeypatch, every)
    with xl.open(path) as engine:
        with xl.SharedMap(engine.topic("map"), snapshot_every=3) as shared:
            for number in range(8):
                shared.put("key", number)
        report = engine.verify()
        assert (report.problems, report.topics, report.messages) == ((), 3, 16)
        assert report.entries >= 14
    assert (PREFIX + "orders" in MemoryPlace.named(path[9:])._shared.logs) == (every == 20)
    done = CliRunner().invoke(load(), ["verify", path])
    assert (done.exit_code, done.stdout.endswith("16 messages: sound\n")) == (0, True)


def test_it_can_be_asked_while_others_write(path: str, engine: xl.Engine) -> None:
    topic = engine.topic("orders")
    with topic.producer(EXCLUSIVE) as producer:
        producer.send(b"x")
        with topic.reader(group="billing") as reader, xl.open(path) as other:
            assert reader.read_next(0).value == b"x"
            reader.commit()
            assert other.verify().ok
        assert producer.send(b"y") == 1


def test_what_other_programs_write_is_no_damage(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, monkeypatch)
    log_of(path, "orders").append(b"another program's")
    assert found(path) == ()


# ---- records -----------------------------------------------------------------------------


def test_damaged_records_are_named_and_the_other_topics_are_read(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path, monkeypatch)
    log = log_of(path, "orders")
    _, second, third, fourth, *_ = frames_in(log)
    alter(log, second, flipped)
    alter(log, third, lambda data: data[:6])
    alter(log, fourth, lambda data: data[:3] + b"\x63" + data[4:])
    problems = found(path)
    assert len(problems) == 3
    assert all(each.startswith("topic 'orders': the record at position ") for each in problems)
    assert all("behind offset 1: " in each for each in problems)
    assert "its checksum does not hold" in problems[0]
    assert "it is cut short" in problems[1]
    assert "version 99" in problems[2]
    with xl.open(path, readonly=True) as engine:
        assert engine.verify().topics == 2
    done = CliRunner().invoke(load(), ["verify", path])
    assert (done.exit_code, problems[0] in done.stdout) == (1, True)


def test_a_damaged_record_of_the_queue_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, monkeypatch)
    log = log_of(path, "orders")
    alter(log, number_of(log, waiting.MAGIC), flipped)
    [problem] = found(path)
    assert "a record of its queue is damaged" in problem


def test_a_damaged_claim_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, monkeypatch)
    log = log_of(path, "__claims__/billing")
    alter(log, number_of(log, claimed.MAGIC), flipped)
    [problem] = found(path)
    assert problem.startswith("topic '__claims__/billing': the record at position ")


def test_damaged_facts_are_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, monkeypatch)
    alter(log_of(path, "__births__"), 1, flipped)
    [problem] = found(path)
    assert problem.startswith("topic '__births__': the record at position ")


@pytest.mark.rule("G4")
def test_a_publish_time_that_goes_backwards_is_named(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        with topic.producer(EXCLUSIVE) as producer:
            producer.send(b"x")
            state = engine.backend.followed(topic.id).state  # type: ignore[attr-defined]
            late = Content(b"y", None, {}, None, 1, "p", 7)
            log_of(path, "orders").append(encode(Frame(1, state.session, 1, (late,))))
            until(lambda: topic.next_offset == 2)
    [problem] = found(path)
    assert problem.endswith("offset 1 was published before its predecessor")


# ---- beginnings --------------------------------------------------------------------------


@pytest.mark.parametrize("every", [5_000, 20])
def test_a_log_without_its_beginning_is_named(
    path: str, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """With a checkpoint, the rest is folded, too."""
    filled(path, monkeypatch, every)
    log = log_of(path, "orders")
    log.trim(2)
    log._records[-1] = flipped(log._records[-1])
    problems = found(path)
    assert "topic 'orders' lacks its beginning" in problems[0]
    assert "its checksum does not hold" in problems[1]


def test_an_emptied_log_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, monkeypatch)
    log = log_of(path, "orders")
    log.trim(len(log._records))
    [problem] = found(path)
    assert "topic 'orders' lacks its beginning: it is empty, and was not" in problem


def test_facts_without_their_beginning_are_named(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path, monkeypatch)
    log_of(path, "__births__").trim(1)
    [problem] = found(path)
    assert "topic '__births__' lacks its beginning" in problem


# ---- groups, checkpoints, snapshots ------------------------------------------------------


@pytest.mark.rule("F6")
def test_a_position_behind_the_end_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, monkeypatch)
    with xl.open(path) as engine, engine.topic("orders").reader(group="billing"):
        [(_, log)] = engine.backend.claims.logs("billing")  # type: ignore[attr-defined]
        [session] = log.holdings.sessions
        log_of(path, "__claims__/billing").append(
            claimed.write(Commit(session, 1, {"orders": 99, "gone": 1}))
        )
        assert found(path) == (
            "group 'billing': its position in topic 'orders' is 99, and the topic ends at 7",
            "group 'billing': its position in topic 'gone' is 1, and the topic ends at 0",
        )


def restored(path: str, topic: str) -> Checkpoint:
    data = blobs.load(log_of(path, PREFIX + topic))
    assert data is not None
    checkpoint = Checkpoint.restore(data, topic)
    assert checkpoint is not None
    return checkpoint


WRONG: dict[str, Callable[[Checkpoint], object]] = {
    "epoch": lambda each: setattr(each.state, "epoch", each.state.epoch + 1),
    "sequence ids": lambda each: each.state.sequences.clear(),
    "first offset": lambda each: setattr(each, "first", each.first + 1),
    "queue": lambda each: each.queue.append(waiting.Wait(1, "e", "n", 1, "p", 0, 0)),
    "marks": lambda each: setattr(each.marks[-1].state, "next", 0),
}


@pytest.mark.rule("J1")
@pytest.mark.parametrize("what", WRONG)
def test_a_checkpoint_that_differs_from_the_records_is_named(
    path: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("exclusivelog.cluster.following.MARK_EVERY", 4)
    filled(path, monkeypatch, 20)
    checkpoint = restored(path, "orders")
    WRONG[what](checkpoint)
    blobs.store(log_of(path, PREFIX + "orders"), checkpoint.save("orders"))
    [problem] = found(path)
    assert problem.startswith("topic 'orders': its checkpoint differs from its records up to")


def test_a_checkpoint_of_another_log_is_not_used_and_no_damage(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path, monkeypatch, 20)
    checkpoint = restored(path, "orders")
    other = replace(checkpoint, anchor=checkpoint.anchor._replace(crc=7))
    other.state.epoch += 1
    blobs.store(log_of(path, PREFIX + "orders"), other.save("orders"))
    assert found(path) == ()


def test_a_damaged_checkpoint_and_snapshot_are_named(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path, monkeypatch, 20)
    blobs.store(log_of(path, PREFIX + "orders"), b"damaged")
    with xl.open(path) as engine:
        engine.backend.place.open(SNAPSHOTS + "orders")  # type: ignore[attr-defined]
    blobs.store(log_of(path, SNAPSHOTS + "orders"), b"damaged")
    assert found(path) == (
        "topic 'orders': its checkpoint cannot be read",
        "topic 'orders': its snapshot is damaged: checksum",
    )
