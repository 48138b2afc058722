"""Going on from a checkpoint is the same as reading a topic from its first record (rule J1)."""

from __future__ import annotations

import datetime as dt
import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

import exclusivelog as xl
from exclusivelog.cluster import blobs, checkpoints, waiting
from exclusivelog.cluster.checkpoints import NOWHERE, PREFIX, Anchor, Checkpoint, holds, load
from exclusivelog.cluster.frames import (
    Content,
    Frame,
    Grant,
    Holder,
    Join,
    Release,
    Terminate,
    encode,
)
from exclusivelog.cluster.log import Reader
from exclusivelog.cluster.memory import MemoryLog, MemoryPlace
from exclusivelog.cluster.rule import Judged, State
from exclusivelog.types import AccessMode
from testing.processes import EXCLUSIVE, PATIENCE, WAIT, until, values

pytestmark = [pytest.mark.timeout(120), pytest.mark.once]

HOLDER = Holder("e", "host", 1, "p", AccessMode.EXCLUSIVE)


def frame(epoch: int, session: int, first: int, sequence: int = 0, name: str = "p") -> bytes:
    content = Content(b"x", None, {}, None, 5 + sequence, name, sequence)
    return encode(Frame(epoch, session, first, (content,)))


# Of two owners and a mirror; each may come at any place, and any number of times.
RECORDS = [
    encode(Grant(1, 0, 7, HOLDER)),
    encode(Grant(2, 1, 8, HOLDER)),
    encode(Grant(1, 1, 9, HOLDER, continues=7)),
    frame(1, 7, 0, sequence=4),
    frame(1, 9, 1, sequence=5),
    frame(2, 8, 1, name="q"),
    encode(Release(1, 7)),
    encode(Terminate(1, 7)),
    encode(Join(1, 7, 0, 10, replace(HOLDER, access_mode=AccessMode.SHARED))),
    encode(Frame(1, 10, 0, (Content(b"s", None, {}, None, 3, "p", 6),), number=1)),
    encode(Frame(1, 0, 0, (Content(b"c", None, {}, None, 1, "m", 1),), 0, "source")),
    b"another program's",
]
LENGTH = 4


def logs() -> Iterator[tuple[bytes, ...]]:
    """All that begin with a record that counts, or with one that is foreign."""
    firsts = [RECORDS[0], RECORDS[-2], RECORDS[-1]]
    return itertools.product(firsts, *[RECORDS] * (LENGTH - 1))


def fold(log: MemoryLog, state: State | None = None) -> list[Judged]:
    reader = Reader(log, state)
    try:
        return list(reader.records())
    finally:
        reader.close()


def first_difference(resumed: Callable[[State], State | None]) -> tuple[bytes, ...] | None:
    """The first log of which some state, saved and restored, is not what all records give."""
    for records in logs():
        log = MemoryLog()
        for data in records:
            log.append(data)
        whole = State()
        reader = Reader(log, whole)
        expected = list(reader.records())
        for length in range(1, LENGTH):
            state = State()
            tail = log.tail()
            for _ in range(length):
                record = tail.next(0)
                assert record is not None
                state.fold(record)
            again = resumed(state)
            if again is None or fold(log, again) != expected[length:] or again != whole:
                return records
    return None


def kept(state: State) -> State | None:
    """What a checkpoint makes of it."""
    anchor = Anchor(None, state.position, 3)
    found = Checkpoint.restore(Checkpoint(anchor, state, -1).save("t"), "t")
    return None if found is None else found.state


@pytest.mark.long
@pytest.mark.rule("J1")
def test_j1_each_log_reads_alike_from_each_of_its_checkpoints() -> None:
    assert first_difference(kept) is None


@pytest.mark.sampled
@pytest.mark.rule("J1")
@pytest.mark.parametrize(
    "field",
    [
        "epoch",
        "session",
        "owned",
        "next",
        "grant",
        "sequences",
        "source",
        "published",
        "joins",
        "shared",
        "terminated",
    ],
)
def test_j1_control_a_checkpoint_that_forgets_a_field_is_found_out(field: str) -> None:
    def forgetful(state: State) -> State | None:
        found = kept(state)
        setattr(found, field, getattr(State(), field))
        return found

    assert first_difference(forgetful) is not None


# ---- what is no checkpoint of this log ---------------------------------------------------


def a_log(*records: bytes) -> tuple[MemoryLog, Checkpoint]:
    """A log, and the checkpoint of all of it."""
    log, state, anchor = MemoryLog(), State(), NOWHERE
    for data in records:
        log.append(data)
    tail = log.tail()
    while (record := tail.next(0)) is not None:
        state.fold(record)
        anchor = anchor.then(record)
    return log, Checkpoint(anchor, state, 0)


def test_a_damaged_checkpoint_is_none() -> None:
    _, found = a_log(*RECORDS[:4])
    data = found.save("t")
    assert Checkpoint.restore(data, "t") == found
    assert Checkpoint.restore(data, "other") is None
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        assert Checkpoint.restore(bytes(flipped), "t") is None
    assert all(Checkpoint.restore(data[:cut], "t") is None for cut in range(len(data)))


def test_a_checkpoint_of_another_log_is_not_used() -> None:
    log, found = a_log(*RECORDS[:4])
    assert holds(log, found.anchor)
    for other in (RECORDS[:3], RECORDS[1:5], [*RECORDS[:3], b"x"], []):
        assert not holds(a_log(*other)[0], found.anchor)


# ---- engines -----------------------------------------------------------------------------


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(checkpoints, "EVERY_RECORDS", 20)
    monkeypatch.setattr("exclusivelog.cluster.following.MARK_EVERY", 5)
    return f"memory://{secrets.token_hex(8)}"


def fill(path: str, count: int = 100) -> None:
    with xl.open(path) as engine, engine.topic("t").producer(EXCLUSIVE, name="p") as producer:
        for n in range(count):
            producer.send(b"%d" % n, event_time=n)


def first_read(path: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Where the logs of topic "t" are read from, from now on."""
    places: list[object] = []
    there = MemoryPlace.named(path.partition("://")[2]).open("t")
    opened = type(there).tail

    def tail(link: object, after: object = None) -> object:
        if link._log is there._log:  # type: ignore[attr-defined]
            places.append(after)
        return opened(link, after)  # type: ignore[arg-type]

    monkeypatch.setattr(type(there), "tail", tail)
    return places


@pytest.mark.rule("J1", "G2")
def test_an_engine_goes_on_from_the_newest_checkpoint(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    places = first_read(path, monkeypatch)
    with xl.open(path) as engine:
        topic = engine.topic("t")
        assert topic.next_offset == 100
        assert None not in places
        assert [m.offset for m in topic.reader(90)] == list(range(90, 100))
        published = next(iter(topic.reader(70))).publish_time
        at = dt.datetime.fromtimestamp(published / 1000, dt.UTC)
        assert next(iter(topic.reader(at))).publish_time == published
        assert None not in places  # neither read from the beginning
        assert values(topic) == [b"%d" % n for n in range(100)]
        with topic.producer(EXCLUSIVE, name="p") as producer:
            assert (producer.topic_epoch, producer.last_sequence_id) == (2, 99)
            with pytest.raises(xl.DuplicateSequenceError):
                producer.send(b"x", sequence_id=99)
            assert producer.send(b"100") == 100


@pytest.mark.rule("J1", "B1")
def test_a_wrong_checkpoint_is_not_used(path: str) -> None:
    fill(path, 30)
    place = MemoryPlace.named(path.partition("://")[2])
    _, wrong = a_log(*RECORDS[:4])
    wrong.state.epoch, wrong.state.next = 1000, 1000
    blobs.store(place.open(PREFIX + "t"), wrong.save("t"))
    assert load(place, "t", place.open("t")) is None
    with xl.open(path) as engine:
        assert engine.topic("t").next_offset == 30
        with engine.topic("t").producer(EXCLUSIVE) as producer:
            assert (producer.topic_epoch, producer.send(b"x")) == (2, 30)


@pytest.mark.rule("D1")
def test_waiters_are_in_a_checkpoint(path: str) -> None:
    with xl.open(path) as a, xl.open(path) as b:
        owner = a.topic("t").producer(EXCLUSIVE)
        future = b.topic("t").producer_async(WAIT, name="w", priority=3)
        for _ in range(60):
            owner.send(b"x")
        place = MemoryPlace.named(path.partition("://")[2])
        with xl.open(path) as late:
            found = until(lambda: load(place, "t", place.open("t")))  # a thread saves it
            assert [
                each.producer_name for each in found.queue if isinstance(each, waiting.Wait)
            ] == ["w"]
            assert [each.producer_name for each in late.topic("t").waiters] == ["w"]
        owner.close()
        future.result(PATIENCE).close()


def test_an_assignment_is_in_a_checkpoint() -> None:
    _, found = a_log(*RECORDS[:4])
    wait = waiting.Wait(1, "e", "host", 1, "w", 3, 5)
    assign = waiting.Assign(2, 7, "f", "other", 1, {}, 5, 10)
    queue = waiting.Waiters()
    for record in (assign, wait):
        queue.take(record)
    found.queue = queue.records()
    again = Checkpoint.restore(found.save("t"), "t")
    assert again is not None
    restored = waiting.Waiters()
    for record in again.queue:
        restored.take(record)
    assert (list(restored), restored.assigned) == ([wait], assign)


# ---- values beside a topic ---------------------------------------------------------------


def test_a_value_of_several_records() -> None:
    log = MemoryLog()
    assert blobs.load(log) is None
    small, large = b"small", bytes(range(256)) * 40_000
    for value in (b"", small, large):
        blobs.store(log, value)
        assert blobs.load(log) == value
    log.append(b"another program's")
    assert blobs.load(log) == large


def test_a_value_whose_writer_died_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "PART_BYTES", 3)
    whole = MemoryLog()
    blobs.store(whole, b"abcdefg")
    tail = whole.tail()
    parts = [tail.next(0) for _ in range(3)]
    log = MemoryLog()
    blobs.store(log, b"the one before")
    for part in parts[:2]:
        assert part is not None
        log.append(part.data)
        assert blobs.load(log) == b"the one before"
    log.append(waiting.encode(waiting.Leave((1,))))
    assert parts[2] is not None
    log.append(parts[2].data)
    assert blobs.load(log) == b"abcdefg"
