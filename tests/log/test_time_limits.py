"""A time limit, as job queues set it by SIGALRM, raises an exception in the middle of a call. That
says nothing of the message that is being read or applied (rules G1, G11, I3)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import serde

pytestmark = [pytest.mark.once, pytest.mark.every, pytest.mark.rule("G1", "G11")]


class LimitError(ValueError):
    """Of the kind that deserializers raise, too."""


@pytest.fixture
def late() -> Iterator[list[int]]:
    """While it is not empty, the next step of a function takes too long."""
    due: list[int] = []

    def strike(*_: object) -> None:
        raise LimitError("time limit")

    before = signal.signal(signal.SIGALRM, strike)
    yield due
    signal.signal(signal.SIGALRM, before)


def limited(late: list[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which may be interrupted."""

    def call(*args: Any) -> Any:
        if late:
            late.pop()
            signal.raise_signal(signal.SIGALRM)
        return function(*args)

    return call


def test_a_value_whose_reading_is_interrupted_is_read_again(
    topic: xl.Topic, late: list[int]
) -> None:
    with topic.producer() as producer:
        producer.send_many([b"0", b"1"])
    with topic.reader(group="g", deserializer=limited(late, bytes.decode)) as reader:
        late.append(1)
        with pytest.raises(LimitError):
            list(reader.values())
        assert reader.position == 0
        assert list(reader.values()) == ["0", "1"]
        reader.seek(0)
        late.append(1)
        message = reader.read_next(0)
        with pytest.raises(LimitError):
            _ = message.value
        assert message.value == "0"


def test_a_value_that_cannot_be_read_is_still_passed_over(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"\xff", b"1"])
    values = topic.reader(deserializer="str").values()
    with pytest.raises(xl.DeserializationError):
        next(values)
    assert next(values) == "1"


@pytest.mark.rule("I3")
@pytest.mark.parametrize("what", ["apply", "decode"])
def test_a_state_whose_write_or_reading_is_interrupted_can_be_used(
    topic: xl.Topic, late: list[int], what: str
) -> None:
    def add(state: list[int], op: int) -> None:
        state.append(op)

    functions: dict[str, Callable[..., Any]] = {"apply": add, "decode": serde.json.loads}
    functions[what] = limited(late, functions[what])
    with xl.SharedState(topic, initial=list, encode=serde.json.dumps, **functions) as state:
        state.write(lambda _: [1])
        late.append(1)
        with pytest.raises(LimitError):
            state.write(lambda _: [2])
        late.clear()
        with xl.SharedState(
            topic, initial=list, apply=add, encode=serde.json.dumps, decode=serde.json.loads
        ) as other:
            known = other.read(list)
            assert known in ([1], [1, 2])
            assert state.read(list) == known
            other.write(lambda _: [3])
            late.append(1)
            with pytest.raises(LimitError):
                state.read(list, latest=True)
            assert state.read(list, latest=True) == [*known, 3]


@pytest.mark.rule("I3")
def test_a_map_whose_value_is_read_too_slowly_has_it(topic: xl.Topic, late: list[int]) -> None:
    class Slow:
        dumps = staticmethod(serde.json.dumps)
        loads = staticmethod(limited(late, serde.json.loads))

    with xl.SharedMap(topic, value=Slow) as shared:
        shared.put("a", 1)
        for read in (lambda: shared.get("a"), lambda: shared["a"], lambda: list(shared.values())):
            late.append(1)
            with pytest.raises(LimitError):
                read()
        late.clear()
        assert dict(shared) == {"a": 1}
