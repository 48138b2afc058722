"""Messages come one by one, and the next checkpoint packs them into few entries; the last entry,
while it is small, is taken out and filled up again and again. In whatever entries they are stored,
each message keeps its own offset, time, key, properties, sequence id and sender (rules G1, G2,
G4, B8), for those who read messages as for those who read Arrow, and a search by time finds the
one message it should (rule G5)."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.storage import checkpointer
from testing.journals import checkpoint, no_checkpoints, published_last_at
from tests.messages.test_arrow import as_messages, facts

TO_COME = 4_102_444_800_000  # ms: no clock of this machine interferes
names = itertools.count()


@pytest.fixture(scope="module")
def ledger(tmp_path_factory) -> Iterator[xl.Engine]:
    with xl.open(tmp_path_factory.mktemp("packing") / "log") as engine:
        yield engine


# ---- what is sent ------------------------------------------------------------------------

MAYBE_BYTES = st.none() | st.binary(max_size=12)
TEXT = st.text(max_size=3)
EVENTS = st.none() | st.integers(-(2**40), 2**40)
GAPS = st.just(0) | st.integers(1, 5) | st.integers(0, 2**40)
PAUSES = st.just(0) | st.integers(0, 3) | st.sampled_from([1000, 2**31 - 1, 2**31, 2**32 + 1])

parts = st.tuples(
    MAYBE_BYTES, MAYBE_BYTES, st.none() | st.dictionaries(TEXT, TEXT, max_size=2), EVENTS
)
steps = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 2), parts, GAPS, PAUSES),
    st.tuples(st.just("send_async"), st.integers(0, 2), st.lists(parts, max_size=4), GAPS),
    st.tuples(st.just("send_many"), st.integers(0, 2), st.lists(parts, max_size=4), GAPS),
    st.tuples(st.just("burst"), st.integers(0, 2), st.sampled_from([3, 40, 300]), st.integers(0)),
    st.tuples(st.just("checkpoint")),
)
terms = st.tuples(st.sampled_from(["exclusive", "shared"]), st.lists(steps, max_size=12))


@dataclass
class Author:
    """Sends as it is told and keeps what must be in the topic."""

    engine: xl.Engine
    topic: xl.Topic
    expected: list[tuple[Any, ...]] = field(default_factory=list)
    time: int = TO_COME
    last: dict[str, int] = field(default_factory=dict)

    def serve(self, mode: str, steps: list[tuple[Any, ...]]) -> None:
        """One term: producers are opened, send, and are closed."""
        open_names = ["é"] if mode == "exclusive" else ["é", "b", "c"]
        published_last_at(self.topic, self.time)
        self.producers = [self.topic.producer(mode, name=name) for name in open_names]
        try:
            for kind, *arguments in steps:
                getattr(self, kind)(*arguments)
        finally:
            for producer in self.producers:
                producer.close()

    def note(self, producer: xl.Producer, part: tuple[Any, ...], sequence: int) -> None:
        value, key, properties, event = part
        self.expected.append(
            (
                len(self.expected),
                producer.topic_epoch,
                key,
                value,
                self.time,
                event,
                producer.name,
                sequence,
                properties or {},
            )
        )
        self.last[producer.name] = sequence

    def next_id(self, producer: xl.Producer, gap: int) -> int:
        return self.last.get(producer.name, -1) + 1 + gap

    def send(self, who: int, part: tuple[Any, ...], gap: int, pause: int) -> None:
        if pause:
            self.time += pause
            published_last_at(self.topic, self.time)
        producer = self.producers[who % len(self.producers)]
        value, key, properties, event = part
        sequence = self.next_id(producer, gap)
        given = sequence if gap else None
        producer.send(value, key=key, properties=properties, event_time=event, sequence_id=given)
        self.note(producer, part, sequence)

    def send_async(self, who: int, parts: list[tuple[Any, ...]], gap: int) -> None:
        producer = self.producers[who % len(self.producers)]
        for part in parts:
            value, key, properties, event = part
            sequence = self.next_id(producer, gap)
            producer.send_async(
                value, key=key, properties=properties, event_time=event, sequence_id=sequence
            )
            self.note(producer, part, sequence)
        producer.flush()

    def send_many(self, who: int, parts: list[tuple[Any, ...]], gap: int) -> None:
        producer = self.producers[who % len(self.producers)]
        columns = [list(column) for column in zip(*parts, strict=True)] or [[]] * 4
        sequence = self.next_id(producer, gap)
        producer.send_many(
            columns[0],
            keys=columns[1],
            properties=columns[2],
            event_times=columns[3],
            sequence_id=sequence,
        )
        for number, part in enumerate(parts):
            self.note(producer, part, sequence + number)

    def burst(self, who: int, count: int, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(count):
            part = (
                dice.choice([None, b"", dice.randbytes(dice.randrange(1, 30))]),
                dice.choice([None, None, b"", b"k"]),
                dice.choice([None, None, {}, {"a": "é"}]),
                dice.choice([None, None, 0, dice.randrange(2**40)]),
            )
            self.send(who, part, dice.choice([0, 0, 0, 2]), 0 if dice.random() < 0.95 else 7)

    def checkpoint(self) -> None:
        self.engine.ledger.checkpoint()

    # ---- what is read --------------------------------------------------------------------

    def check(self) -> None:
        assert [facts(message) for message in self.topic.reader()] == self.expected
        self.check_times()

    def check_times(self) -> None:
        times = [row[4] for row in self.expected]
        picked = sorted(set(times))[:40]
        for moment in {at + shift for at in picked for shift in (-1, 0, 1)}:
            start = dt.datetime(1970, 1, 1) + dt.timedelta(milliseconds=moment)
            assert self.topic.reader(start).position == sum(at < moment for at in times)

    def check_arrow(self, start: int) -> None:
        pytest.importorskip("pyarrow")
        reader, seen = self.topic.reader(start), []
        while (batch := reader.read_arrow()) is not None:
            seen += as_messages(batch)
        assert seen == self.expected[start:]


@pytest.mark.long
@given(
    terms=st.lists(terms, min_size=1, max_size=4),
    start=st.integers(0, 40),
    size=st.sampled_from([checkpointer.PACKED_ENTRY, checkpointer.PACKED_ENTRY, 3000, 500]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_g_packed_messages_are_what_was_sent(ledger, terms, start, size) -> None:
    topic = ledger.topic(f"t{next(names)}")
    author = Author(ledger, topic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "PACKED_ENTRY", size)
        for mode, steps in terms:
            author.serve(mode, steps)
        author.check()  # some of it may still be in the journal
        ledger.ledger.checkpoint()
    assert ledger.ledger.journal.backlog == 0
    author.check()
    author.check_arrow(min(start, len(author.expected)))
    assert ledger.verify().ok


# ---- how it is packed --------------------------------------------------------------------


def entries(topic: xl.Topic) -> list[_core.Entry]:
    """The topic's entries in the tables."""
    with topic.engine.ledger.read() as found:
        return [_core.Entry(found.entries.load(row)) for _, row in found.entries.walk(topic.id, 0)]


@pytest.mark.long
def test_g4_an_entry_that_is_filled_up_by_many_checkpoints_keeps_every_part(engine, topic) -> None:
    """One message, one checkpoint, three hundred times over: the entry begins without columns of
    keys, times and ids, and gets them as they are needed."""
    author = Author(engine, topic)
    dice = random.Random(8)
    steps: list[tuple[Any, ...]] = []
    for number in range(300):
        key = dice.choice([None, b"k%d" % number]) if number > 50 else None
        properties = dice.choice([None, {"n": str(number)}]) if number > 100 else None
        event = dice.choice([None, number]) if number > 150 else None
        value = None if number % 11 == 10 else b"%d" % number
        gap = number % 5 if number > 200 else 0
        steps += [("send", 0, (value, key, properties, event), gap, number % 3), ("checkpoint",)]
    author.serve("exclusive", steps)
    engine.ledger.checkpoint()
    author.check()
    for start in (0, 1, 150, 299):
        author.check_arrow(start)
    assert [entry.count for entry in entries(topic)] == [300]
    assert engine.verify().ok


@pytest.mark.long
def test_g_single_messages_take_few_entries(engine, topic) -> None:
    """Five thousand messages of 100 bytes make some ten entries of 64 KiB at most, however often
    a checkpoint comes in between."""
    with no_checkpoints(engine), topic.producer() as producer:
        for number in range(5000):
            producer.send(b"%0100d" % number)
            if number % 100 == 0:
                checkpoint(engine)
    engine.ledger.checkpoint()
    found = entries(topic)
    assert max(entry.nbytes for entry in found) <= checkpointer.PACKED_ENTRY
    assert len(found) <= 15
    assert [m.value for m in topic.reader()] == [b"%0100d" % number for number in range(5000)]


@pytest.mark.usual_journal
def test_g_a_full_journal_of_one_topic_takes_large_entries(engine, topic) -> None:
    with no_checkpoints(engine), topic.producer() as producer:
        for number in range(2000):
            producer.send(b"%01000d" % number)
    engine.ledger.checkpoint()
    sizes = [entry.nbytes for entry in entries(topic)]
    assert max(sizes) > checkpointer.PACKED_ENTRY
    assert max(sizes) <= checkpointer.LARGE_PACKED_ENTRY
    assert len(sizes) <= 6
    assert [m.value for m in topic.reader()] == [b"%01000d" % number for number in range(2000)]


def test_b8_an_entry_is_of_one_session_and_one_epoch(engine, topic) -> None:
    for number in range(5):
        with topic.producer("exclusive", name="a") as producer:
            producer.send_many([b"x", b"y"])
            producer.send(b"%d" % number)
            engine.ledger.checkpoint()
    with topic.producer(name="a") as one, topic.producer(name="b") as other:
        for number in range(10):
            (one, other)[number // 5].send(b"%d" % number)
    engine.ledger.checkpoint()
    found = entries(topic)
    assert [entry.count for entry in found] == [3] * 5 + [5, 5]
    assert [entry.epoch for entry in found] == [1, 2, 3, 4, 5, 5, 5]
    assert len({entry.session for entry in found}) == 7
    assert [m.epoch for m in topic.reader()] == sorted(m.epoch for m in topic.reader())
