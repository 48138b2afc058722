"""Reading without a reader: `topic[7]`, `topic[-1]`, `topic[10:20]`, `for message in topic` (rules
G5, G8, G12)."""

from __future__ import annotations

from typing import Any

import pytest

import exclusivelog as xl
from testing.processes import EXCLUSIVE

COUNT = 30


@pytest.fixture
def filled(topic: xl.Topic) -> xl.Topic:
    """Thirty messages, in two entries and a few single ones."""
    with topic.producer(EXCLUSIVE) as producer:
        producer.send_many([b"%d" % number for number in range(COUNT - 3)])
        for number in range(COUNT - 3, COUNT):
            producer.send(b"%d" % number)
    return topic


def offsets(messages: Any) -> list[int]:
    return [message.offset for message in messages]


@pytest.mark.rule("G5")
def test_an_offset_or_a_place_from_the_end_is_one_message(filled: xl.Topic) -> None:
    everything = list(range(COUNT))
    for index in range(-COUNT, COUNT):
        message = filled[index]
        assert (message.offset, message.value) == (everything[index], b"%d" % everything[index])


@pytest.mark.rule("G5")
def test_a_slice_is_that_of_a_list_of_offsets(filled: xl.Topic) -> None:
    everything = list(range(COUNT))
    bounds = (None, 0, 1, 12, COUNT - 1, COUNT, COUNT + 5, -1, -2, -COUNT, -COUNT - 5)
    for start in bounds:
        for stop in bounds:
            assert offsets(filled[start:stop]) == everything[start:stop], (start, stop)
    assert offsets(filled[::1]) == everything
    assert offsets(filled) == everything


@pytest.mark.parametrize("index", [0, -1, 7])
def test_an_empty_topic_has_no_message(topic: xl.Topic, index: int) -> None:
    with pytest.raises(IndexError, match=r"topic 'orders' has no message at .*none"):
        topic[index]
    assert topic[index:] == topic[:] == list(topic) == []


@pytest.mark.parametrize("index", [COUNT, COUNT + 7, -COUNT - 1])
def test_an_index_beyond_the_topic_is_refused(filled: xl.Topic, index: int) -> None:
    with pytest.raises(IndexError, match="its offsets are 0 to 29"):
        filled[index]


@pytest.mark.rule("G8")
@pytest.mark.rule("G12")
@pytest.mark.needs("retention")
def test_what_was_trimmed_is_told_and_never_left_out(filled: xl.Topic) -> None:
    first = filled.trim(before=10)
    assert first == 10
    for index in (0, 9):
        with pytest.raises(xl.OffsetTrimmedError):
            filled[index]
        with pytest.raises(xl.OffsetTrimmedError):
            filled[index:]
    with pytest.raises(xl.OffsetTrimmedError):
        filled[3:5]
    with pytest.raises(IndexError, match="its offsets are 10 to 29"):
        filled[-21]
    assert filled[-20].offset == filled[10].offset == 10
    for found in (filled, filled[:], filled[-100:], filled[10:]):
        assert offsets(found) == list(range(10, COUNT))
    assert offsets(filled[:12]) == [10, 11]


@pytest.mark.parametrize("index", ["1", 1.0, None, True, b"1"])
def test_what_is_no_offset_is_refused(filled: xl.Topic, index: Any) -> None:
    with pytest.raises(TypeError, match="it takes an offset"):
        filled[index]


def test_wrong_slices_are_refused(filled: xl.Topic) -> None:
    for step in (2, -1):
        with pytest.raises(ValueError, match="no step"):
            filled[::step]
    with pytest.raises(TypeError, match="it takes offsets"):
        filled["a":]  # type: ignore[misc]
    with pytest.raises(TypeError):
        reversed(filled)  # type: ignore[call-overload]


def test_whole_numbers_of_numpy_are_offsets(filled: xl.Topic) -> None:
    numpy = pytest.importorskip("numpy")
    assert filled[numpy.int64(3)].offset == 3
    assert offsets(filled[numpy.uint8(3) : numpy.int32(5)]) == [3, 4]


def test_iterating_ends_at_the_end_that_was_there(filled: xl.Topic) -> None:
    found = []
    with filled.producer(EXCLUSIVE) as producer:
        for message in filled:
            found.append(message.offset)
            producer.send(b"more")
    assert found == list(range(COUNT))
