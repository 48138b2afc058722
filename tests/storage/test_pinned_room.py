"""A long read pins the pages of a small map (rule H2): LMDB reuses no page that the read may use.

So the map can be full although little lives in it. Messages stop at `map_size`, trims and all else
that changes no owner at the middle of the reserve, and changes of ownership have the rest. The
error names the read. All goes on when it ends, or once the ledger is opened with a larger map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.ownership import recording
from exclusivelog.local.storage import environment, free_pages, ledger, usage
from testing.journals import small_journal
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, State, Worker, until

# Durability changes appends alone.
pytestmark = [pytest.mark.rule("H2"), pytest.mark.once, pytest.mark.long]

MAP = 2 << 20
RESERVED = 1 << 20
SIZE = 20_000


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in environment, ledger, recording, usage:
        monkeypatch.setattr(module, "MAP_RESERVED", RESERVED)


def hold_a_read(state: State) -> None:
    """Begin a read, and do not end it. This process has the usual map and reserve: its checkpoints,
    every ten seconds where those of others fail, would find room."""
    state.engine.ledger.checkpoint = lambda: None
    state.kept["read"] = read = state.engine.ledger.read()
    read.__enter__()


def end_the_read(state: State) -> None:
    """End it."""
    state.kept.pop("read").__exit__(None, None, None)


def churn(engine: xl.Engine, producer: xl.Producer) -> xl.LedgerFullError:
    """Send and trim, so that hardly anything lives, until no message fits; the error."""
    topic = engine.topic("t")
    for _ in range(1000):
        try:
            producer.send(bytes(SIZE))
            engine.ledger.checkpoint()
            topic.trim(before=topic.next_offset)
        except xl.LedgerFullError as error:
            return error
    raise AssertionError("the read pins nothing")


def trim_again_and_again(engine: xl.Engine) -> xl.LedgerFullError:
    """Make small trims until one is refused; the error."""
    topic = engine.topic("many")
    for offset in range(1, topic.next_offset):
        try:
            topic.trim(before=offset)
        except xl.LedgerFullError as error:
            return error
    raise AssertionError("no trim was refused")


def take_over(engine: xl.Engine, times: int) -> None:
    for _ in range(times):
        owner = engine.topic("t").producer(FENCING, name="p")
    owner.close()


def sends(producer: xl.Producer, size: int = 1) -> bool:
    try:
        return producer.send(bytes(size)) >= 0
    except xl.LedgerFullError:
        return False


@pytest.fixture
def reading(path: str, worker: Callable[..., Worker]) -> Callable[..., Worker]:
    def make() -> Worker:
        made = worker("reading", keepalive=None)
        made.call(hold_a_read)
        return made

    return make


def prepare(path: str, **options: Any) -> xl.Engine:
    engine = xl.open(path, map_size=MAP, **options)
    with engine.topic("many").producer() as producer:
        for _ in range(500):
            producer.send(b"small")
    engine.ledger.checkpoint()
    return engine


def test_h2_a_send_beside_a_long_read_names_it_and_goes_on_after_it(
    path: str, reading: Callable[..., Worker]
) -> None:
    with prepare(path) as engine:
        reader = reading()
        producer = engine.topic("t").producer(EXCLUSIVE, name="p")
        error = churn(engine, producer)
        assert f"pid {reader.pid}" in str(error)
        assert "'reading'" in str(error)
        assert "larger map_size" in str(error)
        take_over(engine, 5)  # the reserve is still there
        producer = engine.topic("t").producer(EXCLUSIVE, name="p")
        reader.call(end_the_read)
        until(lambda: sends(producer))
        assert [producer.send(bytes(SIZE)) >= 0 for _ in range(5)] == [True] * 5
        engine.ledger.checkpoint()
        assert engine.verify().ok


def test_h2_trims_beside_a_long_read_leave_a_part_of_the_reserve(
    path: str, reading: Callable[..., Worker]
) -> None:
    with prepare(path) as engine:
        reader = reading()
        with engine.topic("t").producer(EXCLUSIVE, name="p") as producer:
            churn(engine, producer)
        assert f"pid {reader.pid}" in str(trim_again_and_again(engine))
        assert engine.ledger.reserve.left  # that of the disk would be no help
        take_over(engine, 5)
        with (
            xl.open(path, name="other", map_size=MAP) as other,
            engine.topic("t").producer(EXCLUSIVE),
        ):
            assert engine.unload("t", to=other.id, timeout=PATIENCE)[0].ok
            other.topic("t").producer(EXCLUSIVE).close()
        reader.call(end_the_read)
        topic = engine.topic("many")
        assert topic.trim(before=topic.next_offset) == topic.next_offset
        with engine.topic("t").producer(EXCLUSIVE, name="p") as producer:
            until(lambda: sends(producer))
        assert engine.verify().ok


def test_h2_commits_of_positions_beside_a_long_read_leave_a_part_of_the_reserve(
    path: str, reading: Callable[..., Worker]
) -> None:
    """The journal is full, too, so that they go into the tables."""
    with small_journal(), prepare(path, durability="process") as engine:
        process = reading()
        reader = engine.topic("many").reader(group="g")
        with engine.topic("t").producer(EXCLUSIVE, name="p") as producer:
            churn(engine, producer)
            until(lambda: not sends(producer, 2000))  # most of it, soon
            until(lambda: not sends(producer))
        with pytest.raises(xl.LedgerFullError, match=f"pid {process.pid}"):
            commit_again_and_again(reader)
        take_over(engine, 5)
        process.call(end_the_read)
        until(lambda: commits(reader))
        assert engine.groups()[0].position == reader.position
        assert engine.verify().ok


def commit_again_and_again(reader: xl.Reader) -> None:
    """Commit a position until that is refused."""
    for offset in range(10_000):
        reader.seek(offset % 500)
        reader.commit()


def commits(reader: xl.Reader) -> bool:
    try:
        reader.commit()
        return True
    except xl.LedgerFullError:
        return False


def test_h2_a_larger_map_goes_on_beside_the_read(path: str, reading: Callable[..., Worker]) -> None:
    """Even changes of ownership have used up their part."""
    with prepare(path) as engine:
        reader = reading()
        producer = engine.topic("t").producer(EXCLUSIVE, name="p")
        churn(engine, producer)
        with pytest.raises(xl.LedgerFullError, match="larger map_size"):
            take_over(engine, 10_000)
    with xl.open(path, map_size=4 * MAP) as engine:
        take_over(engine, 5)
        with engine.topic("t").producer(EXCLUSIVE, name="p") as producer:
            assert producer.send(bytes(SIZE)) >= 0
            engine.ledger.checkpoint()
        topic = engine.topic("many")
        assert topic.trim(before=topic.next_offset) == topic.next_offset
        assert engine.verify().ok
    reader.kill()


def test_h2_the_read_of_a_dead_process_pins_nothing(
    path: str, reading: Callable[..., Worker]
) -> None:
    with prepare(path) as engine:
        reader = reading()
        producer = engine.topic("t").producer(EXCLUSIVE, name="p")
        churn(engine, producer)
        reader.kill()
        until(lambda: sends(producer))
        assert engine.verify().ok


def test_h2_a_transaction_beside_a_long_read_counts_what_the_last_one_has_freed(
    path: str, reading: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not again all that was freed since the read began, while others wait to write."""
    looks, record = [0], free_pages._record

    def counted(*args: Any) -> tuple[int, int]:
        looks[0] += 1
        return record(*args)

    monkeypatch.setattr(free_pages, "_record", counted)
    with prepare(path) as engine:
        reading()
        with engine.topic("t").producer(EXCLUSIVE, name="p") as producer:
            churn(engine, producer)
        environment = engine.ledger._environment
        with engine.ledger.write_exclusive() as tables:
            looks[0] = 0
            environment.room(tables.rows)
            assert looks[0] <= 10
            again = environment.pinned
            environment._known_pinned = free_pages.NOTHING
            environment.room(tables.rows)
            assert environment.pinned == again > 0
            assert looks[0] > 20
