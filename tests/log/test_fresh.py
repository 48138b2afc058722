"""Readers of what is in the journal alone: its frames are packed on the way, and nothing of them
gets lost or changes."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import exclusivelog as xl
from exclusivelog import _core
from testing.journals import flip, frames, no_checkpoints

pytestmark = [pytest.mark.once, pytest.mark.rule("G5")]
FACTS = """
    offset epoch key value properties publish_time event_time producer_name sequence_id
""".split()
names = itertools.count()


def facts(message: _core.Message) -> list[Any]:
    return [getattr(message, fact) for fact in FACTS]


def entries(reader: xl.Reader) -> list[_core.Entry]:
    found = []
    while (taken := reader.cursor.take_entry()) is not None:
        found.append(taken[0])
    return found


def in_frames(engine: xl.Engine, topic: xl.Topic) -> list[list[Any]]:
    """What the frames of the topic hold, frame by frame."""
    found = [_core.Entry(frame.entry) for frame in frames(engine)]
    return [
        facts(entry.message(index))
        for entry in found
        if entry.topic == topic.id
        for index in range(entry.count)
    ]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[xl.Engine]:
    path = Path(tmp_path_factory.mktemp("fresh")) / "ledger"
    with xl.open(str(path), name="fresh", durability="process") as engine:
        yield engine


# Which of two producers sends, how many messages, and what they have besides values.
sends = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from([1, 1, 1, 2, 30]),
        st.lists(st.sampled_from(["keys", "properties", "event_times", "nothing"]), unique=True),
        st.none() | st.integers(1, 50),
    ),
    max_size=30,
)


def send(producer: xl.Producer, size: int, kinds: list[str], gap: int | None) -> None:
    values: list[bytes | None] = [b"%d" % at * at for at in range(size)]
    if "nothing" in kinds:
        values[-1] = None
    options: dict[str, Any] = {
        "keys": ["k"] * size,
        "properties": [{"n": "1"}] * size,
        "event_times": [7] * size,
    }
    chosen = {kind: options[kind] for kind in kinds if kind in options}
    sequence = None if gap is None else producer.last_sequence_id + gap
    producer.send_many(values, sequence_id=sequence, **chosen)


@pytest.mark.long
@given(sent=sends, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_messages_are_what_their_frames_hold(ledger, sent, seed) -> None:
    """Of several topics and producers between one another, from any offset on, also those that
    come after the end was met."""
    ledger.ledger.checkpoint()
    topic, beside = (ledger.topic(f"t{next(names)}") for _ in range(2))
    half = random.Random(seed).randrange(len(sent) + 1)
    with no_checkpoints(ledger), topic.producer() as one, topic.producer() as two:
        with beside.producer() as other, topic.reader() as following:
            seen = []
            for number, (which, *rest) in enumerate(sent):
                if number == half:
                    seen += [facts(message) for message in following]
                send([one, two][which], *rest)
                other.send(b"beside")
            expected = in_frames(ledger, topic)
            seen += [facts(message) for message in following]
            assert seen == expected
            for start in range(0, len(expected), 7):
                assert [facts(message) for message in topic.reader(start)] == expected[start:]
            assert list(beside.reader().values()) == [b"beside"] * len(sent)


def test_messages_that_were_sent_one_by_one_are_read_in_few_entries(engine, topic) -> None:
    with no_checkpoints(engine), topic.producer() as producer:
        reader = topic.reader()
        for round_ in range(2):  # by the tables, and by the journal alone
            for number in range(100):
                producer.send(b"%d" % number)
            found = entries(reader)
            assert sum(entry.count for entry in found) == 100
            assert len(found) <= 3, round_
        assert len(frames(engine)) == 200


@pytest.mark.parametrize("damaged", [0, 7, 19])
def test_a_damaged_frame_is_named_alone_and_its_neighbours_are_read(engine, topic, damaged) -> None:
    with no_checkpoints(engine), topic.producer() as producer:
        for number in range(20):
            producer.send(b"%d" % number)
        flip(engine.path, frames(engine)[damaged].entry_at + 8)
        reader, found = topic.reader(), []
        with pytest.raises(xl.LedgerCorruptedError) as caught:
            found += reader.values()
        assert caught.value.offsets == range(damaged, damaged + 1)
        assert reader.position == damaged
        reader.seek(caught.value.offsets.stop)
        assert list(reader.values()) == [b"%d" % number for number in range(damaged + 1, 20)]


def test_no_more_is_collected_than_was_asked_for(engine, topic) -> None:
    """One entry at least, whose position says where the rest begins."""
    journal = engine.ledger.journal
    with no_checkpoints(engine), topic.producer() as producer:
        for number in range(10):
            producer.send(b"%d" % number)
        with engine.ledger.read() as tables:
            start, generation = tables.journal.applied, tables.journal.generation
        arguments = topic.id, 3, start, journal.tail, generation
        single = journal.collect(*arguments, 1 << 20)
        assert [last for last, _, _ in single] == [*range(3, 10)]
        assert journal.collect(*arguments, 1, packed=True) == single[:1]
        assert journal.collect(*arguments, 0, packed=True) == []
        (packed,) = journal.collect(*arguments, 1 << 20, packed=True)
        assert (packed[0], packed[2]) == (9, single[-1][2])
        assert _core.Entry(packed[1]).count == 7
        with pytest.raises(_core.JournalOverwritten):
            journal.collect(topic.id, 3, start, journal.tail, generation + 1, 1 << 20, packed=True)


@contextlib.contextmanager
def sent(engine: xl.Engine, *topics: xl.Topic) -> Iterator[tuple[int, int, list[int]]]:
    """Ten messages to each, in turn: the journal's position before, its generation, and its tail
    behind each message."""
    journal, tails = engine.ledger.journal, []
    with no_checkpoints(engine), contextlib.ExitStack() as stack:
        producers = [stack.enter_context(topic.producer()) for topic in topics]
        with engine.ledger.read() as tables:
            start, generation = tables.journal.applied, tables.journal.generation
        for number in range(10):
            for producer in producers:
                producer.send(b"%d" % number)
                tails.append(journal.tail)
        yield start, generation, tails


def test_the_end_of_a_topic_is_found_however_far_the_journal_was_walked(engine) -> None:
    one, two = engine.topic("one"), engine.topic("two")
    with sent(engine, one, two) as (start, generation, tails):
        starts = [start, *tails]
        asked = [
            (which, since, until)
            for which in (0, 1)
            for since in range(len(starts))
            for until in range(since, len(starts))
        ]
        random.Random(1).shuffle(asked)
        for which, since, until in asked:
            found = engine.ledger.journal.end_of(
                (one, two)[which].id, starts[since], starts[until], generation
            )
            mine = [at for at in range(since, until) if at % 2 == which]
            assert (found and found[0]) == (mine[-1] // 2 + 1 if mine else None)
        with pytest.raises(_core.JournalOverwritten):
            engine.ledger.journal.end_of(one.id, start, tails[-1], generation + 1)


def test_a_damaged_entry_at_the_end_counts_with_the_time_of_those_before_it(engine, topic) -> None:
    with sent(engine, topic) as (start, generation, tails):
        found = frames(engine)
        flip(engine.path, found[-1].entry_at + 8)
        before = _core.Entry(found[-2].entry).publish_time
        end = engine.ledger.journal.end_of(topic.id, start, tails[-1], generation)
        assert end == (10, before)


def test_what_was_walked_of_the_journal_is_not_walked_again(engine, topic) -> None:
    with sent(engine, topic) as (start, generation, tails):
        arguments = topic.id, start, tails[-1], generation
        end = engine.ledger.journal.end_of(*arguments)
        last = frames(engine)[-1]
        flip(engine.path, last.at + 30)
        flip(engine.path, last.entry_at + 8)
        assert engine.ledger.journal.end_of(*arguments) == end
        engine.ledger.journal.end_of(topic.id, start, tails[-2], generation)  # forgets the last one
        assert engine.ledger.journal.end_of(*arguments)[0] == 9
