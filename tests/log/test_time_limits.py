"""A time limit, as job queues set it by SIGALRM, raises an exception in the middle of a call. That
says nothing of the message that is being read or applied (rules G1, G11, I3)."""

from __future__ import annotations

import itertools
import linecache
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import serde
from exclusivelog.cluster import following
from testing.processes import PATIENCE

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


@pytest.mark.rule("I6")
def test_a_watch_whose_value_is_read_too_slowly_returns_it_at_the_next_call(
    topic: xl.Topic, late: list[int]
) -> None:
    codec = serde.Serde(str.encode, limited(late, bytes.decode))
    with xl.SharedMap(topic, value=codec) as shared:
        watch = shared.watch()
        for key in "abc":
            shared.put(key, key)
        assert watch.read_next(PATIENCE).value == "a"
        late.append(1)
        with pytest.raises(LimitError):
            watch.read_next(PATIENCE)
        assert [watch.read_next(PATIENCE).value for _ in range(2)] == ["b", "c"]
        watch.close()


# ---- at any place of a read ----------------------------------------------------------------

READING = ("local/log/reading.py", "cluster/cursor.py", "state/past.py")


class Strike:
    """Raises an error at the n-th line, or return, of the code that reads entries."""

    def __init__(self, number: int) -> None:
        self.left = number

    def during(self, call: Callable[[], object]) -> None:
        """Call it; its error is ignored."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            call()
        except LimitError:
            pass
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._look if frame.f_code.co_filename.endswith(READING) else None

    def _look(self, frame: FrameType, event: str, arg: object) -> Any:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # Python looks for signals behind calls: not before a block's end is run, for example.
        if line.startswith("with ") or event == "return" or line == "return change":
            return self._look
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            raise LimitError(f"at {frame.f_code.co_name}:{frame.f_lineno}")
        return self._look


def passed(topic: xl.Topic, reader: xl.Reader, number: int, batches: int) -> bool:
    """Interrupt the read of new messages at the n-th place; all are read afterwards. False if there
    are no more places."""
    first = topic.next_offset
    with topic.producer() as producer:
        for _ in range(batches):
            producer.send_many([b"x" * 1000] * 40)
    strike, found = Strike(number), list[int]()

    def read() -> None:
        if (message := reader.read_next(0)) is not None:
            found.append(message.offset)

    strike.during(read)
    assert not reader.has_message_available() or reader.position < topic.next_offset
    found += [message.offset for message in reader]
    assert found == list(range(first, topic.next_offset)), number
    return strike.left <= 0


@pytest.mark.parametrize("where", ["local", "cluster"])
def test_g11_a_read_that_is_interrupted_anywhere_passes_over_nothing(
    path: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "KEPT_BYTES", 100)  # on a cluster, the log is read again
    with xl.open(path if where == "local" else f"memory://{path}") as engine:
        topic = engine.topic("orders")
        reader = topic.reader()
        numbers = itertools.takewhile(
            lambda number: passed(topic, reader, number, 1), itertools.count(1)
        )
        assert sum(1 for _ in numbers) > 10


@pytest.mark.rule("I6")
def test_g11_a_watch_that_is_interrupted_anywhere_passes_over_nothing(topic: xl.Topic) -> None:
    with xl.SharedMap(topic) as shared:
        watch, value = shared.watch(), 0
        for number in itertools.count(1):
            first = value
            for value in range(first + 1, first + 4):
                shared.put("k", value)
            strike, found = Strike(number), list[Any]()
            strike.during(lambda found=found: found.append(watch.read_next(PATIENCE)))
            while len(found) < 3:
                found.append(watch.read_next(PATIENCE))
            assert [change.value for change in found] == list(range(first + 1, first + 4)), number
            assert [change.previous for change in found] == [first or None, first + 1, first + 2]
            if strike.left > 0:
                break
        assert number > 20
        watch.close()
