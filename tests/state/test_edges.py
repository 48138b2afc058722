"""Rules I1 to I3 around the edges: keys and values, wrong arguments, closing, forks, threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import exclusivelog as xl
from testing.children import finish
from testing.processes import (
    PATIENCE,
    State,
    Worker,
    close_producer,
    forked,
    open_producer,
    threads_since,
    until,
    within,
)
from testing.states import CALLS, FENCING, add, everything, one_more, open_counts, opened_afresh

Map = xl.SharedMap[Any, Any]


@pytest.fixture
def shared(topic: xl.Topic) -> Iterator[Map]:
    with xl.SharedMap(topic) as shared:
        yield shared


# ---- serialisers and keys ----------------------------------------------------------------

KINDS = {
    "bytes": ([b"", b"a", bytes(range(256))], [b"", bytes(5)]),
    "str": (["", "a", "h\u00e9 \U0001f600"], ["", "x" * 70_000]),
    "json": (["a", 1, 2.5, None], [{"a": [1, None]}, "", 0, False]),
    "msgpack": (["a", b"a", 1, -1, 2.5, None], [{"a": [1, None]}, b"", 0, False, 2**64 - 1]),
}


@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize("value", ["bytes", "str", "json", "msgpack"])
def test_g1_keys_and_values_of_every_kind(
    topic: xl.Topic, other: xl.Topic, key: str, value: str
) -> None:
    keys, values = KINDS[key][0], KINDS[value][1]
    with xl.SharedMap(topic, key, getattr(xl.serde, value)) as shared:
        for number, name in enumerate(keys):
            shared.put(name, values[number % len(values)])
        expected = [(name, values[number % len(values)]) for number, name in enumerate(keys)]
        assert shared.scan() == expected
        assert shared.list_keys() == keys
        assert shared.replace(keys[0], values[0], values[1])
        changed = shared.update_multiple(lambda k: k == keys[1], lambda k, v: values[0])
        assert changed == {keys[1]: values[0]}
        assert shared.delete(keys[2]) is not None
        assert shared.put_if_absent(keys[2], values[0])
        pairs = shared.scan()
    with xl.SharedMap(other, getattr(xl.serde, key), value) as again:
        assert again.scan() == pairs


def test_i2_none_is_no_value_everywhere(shared: Map, topic: xl.Topic) -> None:
    assert shared.put("a", None) is None
    assert (topic.next_offset, "a" in shared, shared.get_or_default("a", 7)) == (0, False, 7)
    assert shared.put_if_absent("a", None)
    assert shared.replace("a", None, None)
    assert (topic.next_offset, len(shared)) == (0, 0)
    assert shared.replace("a", None, 1)
    assert not shared.replace("a", None, 2)
    assert shared.replace("a", 1, None).previous == 1
    assert (shared.list_keys(), shared.setdefault("a"), shared.get("a", 8)) == ([], None, 8)
    shared.update({"a": 1, "b": 2})
    shared.put_all({"a": None, "c": None})
    assert shared.put("b", None) == 2
    assert shared.update_multiple(None, lambda key, value: None) == {}
    shared["d"] = None
    assert (shared.scan(latest=True), topic.next_offset) == ([], 6)


def test_g1_large_values(topic: xl.Topic, other: xl.Topic) -> None:
    large = {f"k{number}": bytes([number]) * (700_000 * number) for number in range(4)}
    with xl.SharedMap(topic, value="bytes") as shared, xl.SharedMap(other, value="bytes") as again:
        shared.put("k3", large["k3"])
        assert again.get("k3", latest=True) == large["k3"]
        again.put_all(large)
        assert everything(shared) == large


def test_g1_what_was_put_can_be_got_with_numbers_as_keys(shared: Map) -> None:
    shared.put("a", {1: "one"})  # or it must be refused
    assert shared.get("a") == {1: "one"}


# ---- wrong arguments ---------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[xl.Topic], Any], str]] = {
    "key": (lambda t: xl.SharedMap(t, key="pickle"), "key"),
    "key, a function": (lambda t: xl.SharedMap(t, key=len), "key"),
    "value": (lambda t: xl.SharedMap(t, value=None), "value"),
    "snapshot_every": (lambda t: xl.SharedMap(t, snapshot_every=0), "snapshot_every"),
    "snapshot_every, no number": (lambda t: open_counts(t, snapshot_every="1"), "snapshot_every"),
    "initial": (lambda t: xl.SharedState(t, initial={}, apply=add), "initial"),
    "apply": (lambda t: xl.SharedState(t, apply="add"), "apply"),
    "no apply": (lambda t: xl.SharedState(t, initial=dict), "apply"),
    "timeout": (lambda t: xl.SharedMap(t, timeout=-1).put("a", 1), "timeout"),
    "timeout, no number": (lambda t: xl.SharedMap(t, timeout="1").put("a", 1), "timeout"),
}


@pytest.mark.parametrize(("call", "argument"), WRONG.values(), ids=WRONG.keys())
def test_a4_wrong_arguments_are_refused_by_name(
    topic: xl.Topic, call: Callable[[xl.Topic], Any], argument: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=argument):
        call(topic)
    assert (topic.owner, topic.next_offset) == (None, 0)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda t: xl.SharedMap(t).put(5, 1), "key"),
        (lambda t: xl.SharedMap(t).get(5), "key"),
        (lambda t: xl.SharedMap("orders"), "topic"),
        (lambda t: open_counts(t, encode="msgpack"), "encode"),
        (lambda t: open_counts(t, copy="deep"), "copy"),
        (lambda t: xl.SharedMap(t, timeout=-1), "timeout"),
    ],
    ids=["put 5", "get 5", "no topic", "encode", "copy", "timeout, at once"],
)
def test_a4_so_they_are_all(
    topic: xl.Topic, call: Callable[[xl.Topic], Any], argument: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=argument):
        call(topic)


ODD: dict[str, Callable[[str], Any]] = {
    "a bytearray": lambda key: bytearray(key.encode()),
    "a str": lambda key: key,
    "None": lambda key: None,
}


@pytest.mark.parametrize("dumps", ODD.values(), ids=ODD.keys())
def test_i3_a_key_that_is_no_bytes_poisons_nothing(
    topic: xl.Topic, other: xl.Topic, dumps: Callable[[str], Any]
) -> None:
    """A key's serialiser gives something else than bytes. That is refused, or it works; but the
    map must not be broken by it, nor be another one here than there."""
    odd = xl.serde.Serde(dumps, lambda data: bytes(data).decode())
    with xl.SharedMap(topic, odd) as shared:
        try:
            shared.put("a", 1)
        except (TypeError, ValueError):
            assert topic.next_offset == 0
        else:
            assert shared.list_keys() == ["a"]
        assert shared.list_keys() == list(opened_afresh(other))


# ---- closing, forks, threads -------------------------------------------------------------


def every_call(shared: Map) -> dict[str, Callable[[], Any]]:
    calls = {name: lambda call=call: call(shared) for name, call in CALLS.items()}
    return {**calls, "future": lambda: shared.put_async("a", 1), "iter": lambda: list(shared)}


def test_c1_a_closed_map_is_closed_and_its_topic_free(shared: Map, topic: xl.Topic) -> None:
    shared.put("a", 1)
    assert topic.owner is not None
    shared.close()
    shared.close()
    assert topic.owner is None
    for call in every_call(shared).values():
        with pytest.raises(xl.EngineClosedError, match=r"'orders'.* is closed"):
            call()
    assert opened_afresh(topic) == {"a": 1}


def test_c1_closing_does_what_was_asked_for_before(shared: Map, topic: xl.Topic) -> None:
    threads = set(threading.enumerate())
    futures = [shared.update_async("n", one_more) for _ in range(100)]
    shared.close()
    assert [future.result(0).value for future in futures] == list(range(1, 101))
    assert topic.owner is None
    assert threads_since(threads) == []


def test_c1_closing_the_engine_closes_its_maps(path: str) -> None:
    engine = xl.open(path)
    shared: Map = xl.SharedMap(engine.topic("orders"))
    shared.put("a", 1)
    engine.close()
    for call in every_call(shared).values():
        with pytest.raises(xl.EngineClosedError, match="engine"):
            call()
    shared.close()


def test_c1_closing_the_engine_ends_a_write_that_waits(path: str, other: xl.Topic) -> None:
    with other.producer("exclusive"), ThreadPoolExecutor(1) as pool:
        engine = xl.open(path)
        waiting = pool.submit(xl.SharedMap(engine.topic("orders")).put, "a", 1)
        until(lambda: other.waiters)
        engine.close()
        assert isinstance(waiting.exception(PATIENCE), xl.EngineClosedError)
        assert other.waiters == []


def test_c1_closing_waits_no_longer_than_a_write_s_timeout(topic: xl.Topic) -> None:
    with topic.producer("exclusive"), ThreadPoolExecutor(1) as pool:
        shared: Map = xl.SharedMap(topic, timeout=0.5)
        waiting = pool.submit(shared.put, "a", 1)
        until(lambda: topic.waiters or waiting.done())
        within(shared.close)
        assert isinstance(waiting.exception(PATIENCE), (xl.WaitTimeoutError, xl.EngineClosedError))


def test_c1_closing_ends_a_write_that_waits_for_ever(topic: xl.Topic) -> None:
    """As closing a reader or an engine ends those who wait in it."""
    with ThreadPoolExecutor(1) as pool, topic.producer("exclusive"):
        shared: Map = xl.SharedMap(topic)
        waiting = pool.submit(shared.put, "a", 1)
        until(lambda: topic.waiters)
        within(shared.close)
        assert isinstance(waiting.exception(PATIENCE), xl.EngineClosedError)


def test_c5_a_forked_child_is_told_and_the_parent_unharmed(shared: Map, topic: xl.Topic) -> None:
    shared.put("a", 1)

    def try_all() -> list[str]:
        told = []
        for name, call in every_call(shared).items():
            with pytest.raises(xl.EngineClosedError, match="fork"):
                call()
            told.append(name)
        shared.close()
        return told

    assert forked(try_all) == list(every_call(shared))
    assert shared.update("a", one_more).value == 2
    assert topic.epoch == 1


def test_c5_a_state_that_was_opened_in_the_child_is_its_own(shared: Map, path: str) -> None:
    def count() -> int:
        with xl.open(path) as engine, xl.SharedMap(engine.topic("orders")) as own:
            return int(own.update("n", one_more).value or 0)

    def turn(number: int) -> object:
        return forked(count) if number % 2 else shared.update("n", one_more).value

    assert [turn(number) for number in range(6)] == [1, 2, 3, 4, 5, 6]


def test_h2_a_read_only_engine_reads_and_does_not_write(shared: Map, path: str) -> None:
    shared.put("a", 1)
    with xl.open(path, readonly=True) as engine, xl.SharedMap(engine.topic("orders")) as looking:
        for number in range(3):
            shared.put("a", number)
            assert looking.get("a", latest=True) == number
        for call in (lambda: looking.put("a", 5), looking.clear, looking.snapshot):
            with pytest.raises(xl.LedgerError, match="readonly=True"):
                call()
        assert looking.get("a") == 2


def test_g8_a_terminated_topic_s_map_can_be_read(shared: Map, topic: xl.Topic) -> None:
    shared.put("a", 1)
    topic.terminate()
    for _ in range(2):
        with pytest.raises(xl.TopicTerminatedError):
            shared.put("a", 2)
        assert shared.get("a", latest=True) == 1
    assert opened_afresh(topic) == {"a": 1}


def test_g8_a_deleted_topic_s_map_is_gone(shared: Map, topic: xl.Topic, other: xl.Topic) -> None:
    with xl.SharedMap(other) as writer:
        writer.put("a", 1)
    topic.engine.delete_topic("orders")
    for call in (lambda: shared.get("a", latest=True), lambda: shared.put("a", 2)):
        with pytest.raises(xl.TopicNotFoundError, match="'orders' was deleted"):
            call()
    assert opened_afresh(topic.engine.topic("orders")) == {}


def test_i2_many_threads_share_one_map(shared: Map, topic: xl.Topic) -> None:
    def work(thread: int) -> int:
        won = 0
        for number in range(40):
            shared.update("n", one_more)
            shared.put(f"mine-{thread}", number)
            assert shared.get(f"mine-{thread}", latest=number % 2 == 0) == number
            won += bool(shared.put_if_absent(f"once-{number}", thread))
            assert f"once-{number}" in shared
            shared.update_multiple(lambda key: key == "m", lambda key, value: value + 1)
        return won

    shared.put("m", 0)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(work, range(8), timeout=2 * PATIENCE))
    found = everything(shared)
    assert (sum(won), found["n"], found["m"]) == (40, 320, 320)
    assert topic.epoch == 1
    assert opened_afresh(topic) == found


def test_i2_a_map_fenced_for_good_waits(shared: Map, other: xl.Topic) -> None:
    """Another process takes the topic, and keeps it: reads go on, writes wait."""
    shared.put("a", 1)
    rival = other.producer(FENCING)
    assert shared.get("a", latest=True) == 1
    future = shared.put_async("a", 2)
    until(lambda: other.waiters)
    assert not future.done()
    rival.close()
    future.result(PATIENCE)


def test_d5_giving_up_a_call_that_is_over_does_not_end_another_s_wait(
    shared: Map, other: xl.Topic
) -> None:
    """A task is cancelled just when its call has come to its end, and the next one begins to
    wait for the topic: which of them waits must be known by then."""
    asked, go_on = threading.Event(), threading.Event()

    class Slow:
        @property
        def current(self) -> Any:
            asked.set()
            assert go_on.wait(PATIENCE)
            return shared._calls.current

    owner = other.producer("exclusive")
    first = shared.put_async("a", 1)
    until(lambda: shared.topic.waiters)
    owner.close()
    first.result(PATIENCE)
    owner = other.producer(FENCING)
    shared._ownership._calls = Slow()
    second = shared.put_async("b", 2)
    assert asked.wait(PATIENCE)
    shared._give_up(first)
    go_on.set()
    until(lambda: second.done() or shared.topic.waiters)
    owner.close()
    second.result(PATIENCE)
    assert everything(shared) == {"a": 1, "b": 2}


def no_threads(patch: pytest.MonkeyPatch) -> None:
    """As where a limit is reached."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", start)


def test_b9_a_write_succeeds_though_its_snapshot_cannot_be_begun(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the log: an error would have it done again."""
    with xl.SharedMap(topic, snapshot_every=3) as shared:
        shared.put("n", 0)
        with monkeypatch.context() as patch:
            no_threads(patch)
            assert [shared.update("n", one_more).value for _ in range(5)] == [1, 2, 3, 4, 5]
        assert [shared.update("n", one_more).value for _ in range(4)] == [6, 7, 8, 9]
        until(lambda: opened_afresh(topic, snapshot_every=None) == {"n": 9})


def test_b9_a_call_that_cannot_be_submitted_is_not_made_later(
    shared: Map, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        no_threads(patch)
        with pytest.raises(xl.LedgerError, match="thread"):
            shared.put_async("a", 1)
    shared.put_async("b", 2).result(PATIENCE)
    assert everything(shared) == {"b": 2}
    assert topic.next_offset == 1


# ---- I2: signal handlers -----------------------------------------------------------------


def test_i2_a_call_inside_a_call_of_the_same_thread_is_refused(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal strikes in the middle of a write, or while the topic is asked for, and its handler
    uses the map, too. It would compute from a state that lacks what is being written."""
    with xl.SharedMap(topic) as shared:
        refused: list[str] = []

        def use_it() -> None:
            for use in (lambda: shared.put("handler", 1), lambda: shared.get("a", latest=True)):
                try:
                    use()
                except xl.LedgerError as error:
                    refused.append(str(error))

        def strike(method: Callable[..., Any]) -> Callable[..., Any]:
            def struck(*args: Any) -> Any:
                use_it()
                return method(*args)

            return struck

        for name in ("_catch_up", "_apply_own"):
            with monkeypatch.context() as patch:
                patch.setattr(shared, name, strike(getattr(shared, name)))
                shared._ownership.release()
                shared.put("a", 1)
        assert len(refused) >= 4
        assert all("signal handler" in text for text in refused)
        assert shared.list_keys() == ["a"]


@pytest.mark.long
def test_i2_increments_of_a_signal_handler_are_counted_or_refused(path: str) -> None:
    source = """
        import signal, sys
        import exclusivelog as xl

        done = 0

        def increment(*_):
            global done
            try:
                counts.update("n", lambda n: (n or 0) + 1)
            except (xl.LedgerError, RuntimeError):
                return
            done += 1

        def strike(*_):
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            try:
                counts.update("m", lambda n: (n or 0) + 1)
            except (xl.LedgerError, RuntimeError):
                return
            struck.append(1)

        struck = []
        with xl.open(sys.argv[1], durability="process") as engine:
            with xl.SharedMap(engine.topic("counts")) as counts:
                signal.signal(signal.SIGALRM, strike)
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                for _ in range(20000):
                    increment()
                signal.signal(signal.SIGALRM, signal.SIG_IGN)  # it would set the timer again
                signal.setitimer(signal.ITIMER_REAL, 0)
                print(counts.get("n") == done, counts.get("m") == len(struck) > 0)
    """
    assert finish(source, path).strip() == "True True"


@pytest.mark.long
def test_i1_what_a_write_reads_is_what_it_has_written(path: str, topic: xl.Topic) -> None:
    """Several threads of two engines fetch and add. No other write may come between the write and
    its `read_fn`."""
    results: list[int] = []

    def plus(state: dict[str, int], op: int) -> None:
        state["n"] = state.get("n", 0) + op

    def fetch_and_add(shared: xl.SharedState[dict[str, int], int]) -> None:
        for _ in range(60):
            results.append(shared.write(lambda _: [1], lambda state: state["n"]) or 0)
            shared.read(lambda state: state["n"], latest=True)

    with contextlib.ExitStack() as stack:
        other = stack.enter_context(xl.open(path))
        mine = stack.enter_context(xl.SharedState(topic, dict, plus))
        theirs = stack.enter_context(xl.SharedState(other.topic("orders"), dict, plus))
        pool = stack.enter_context(ThreadPoolExecutor(4))
        for work in [pool.submit(fetch_and_add, each) for each in (mine, mine, theirs, theirs)]:
            work.result(PATIENCE)
    assert sorted(results) == list(range(1, 241))


def test_i1_no_call_is_submitted_to_a_state_that_closes(topic: xl.Topic) -> None:
    threads = set(threading.enumerate())
    shared = xl.SharedMap(topic)
    shared.put_async("a", 1).result(PATIENCE)
    shared._closing = True
    with pytest.raises(xl.EngineClosedError):
        shared.put_async("a", 2)
    shared.close()
    assert threads_since(threads) == []


def test_i1_the_next_writer_is_not_seen_by_read_fn(path: str, topic: xl.Topic) -> None:
    """The same, with another's write right behind ours."""

    def plus(state: dict[str, int], op: int) -> None:
        state["n"] = state.get("n", 0) + op

    with (
        xl.open(path) as other,
        xl.SharedState(topic, dict, plus) as mine,
        xl.SharedState(other.topic("orders"), dict, plus) as theirs,
    ):
        append = mine._append

        def append_and_let_others_write(*args: Any) -> Any:
            result = append(*args)
            theirs.write(lambda _: [1])
            assert mine.read(lambda state: state["n"], latest=True) == 2
            return result

        mine._append = append_and_let_others_write
        assert mine.write(lambda _: [1], lambda state: state["n"]) == 1


def put(state: State, key: str) -> None:
    state.kept["map"] = xl.SharedMap(state.topic)
    state.kept["map"].put(key, 1)


def close_another(state: State) -> None:
    state.kept["another"].close()


def own_two(state: State) -> None:
    open_producer(state, "exclusive")
    state.kept["another"] = state.engine.topic("another").producer("exclusive")


def test_i1_one_who_is_just_made_owner_learns_that_a_producer_waits(
    path: str, worker: Callable[..., Worker]
) -> None:
    """A process's map becomes owner, and is notified at the same time that another process waits.
    One thread makes its producer; another one, which cancels a wait for another topic too late, is
    faster with what comes behind. It is never notified again, and the other waits for ever."""
    holder, other = worker(), worker()
    holder.call(own_two)
    with xl.open(path) as engine, ThreadPoolExecutor(1) as pool:
        shared = xl.SharedMap(engine.topic("orders"))
        written = pool.submit(shared.put, "ours", 0)
        until(lambda: len(engine.topic("orders").waiters) == 1)
        other.start(put, "theirs")
        until(lambda: len(engine.topic("orders").waiters) == 2)
        late = engine.topic("another").producer_async("wait_for_exclusive")
        start = engine.ledger.checkpointer.start
        making, go_on = threading.Event(), threading.Event()

        def held_up() -> None:
            if threading.current_thread() is engine.backend.worker.thread and not making.is_set():
                making.set()
                go_on.wait(PATIENCE)
            start()

        engine.ledger.checkpointer.start = held_up
        holder.call(close_producer)
        assert making.wait(PATIENCE)
        holder.call(close_another)
        assert not late.cancel()  # it is ours already
        late.result(PATIENCE).close()
        go_on.set()
        written.result(PATIENCE)
        other.answer(PATIENCE / 2)
        assert shared.get("theirs", latest=True) == 1
        shared.close()


def test_i1_one_to_whom_a_topic_was_handed_over_learns_that_a_producer_waits(
    path: str, worker: Callable[..., Worker]
) -> None:
    """A topic is reserved for a process that does not wait for it yet, and another process does.
    When the first one's map asks for the topic it becomes owner past the queue, and must hear of
    the other one, which has been waiting all the while."""
    source, destination, other = worker(name="source"), worker(name="destination"), worker()
    source.call(open_producer, "exclusive")
    other.start(put, "theirs")
    with xl.open(path) as engine:
        until(lambda: len(engine.topic("orders").waiters) == 1)
        to = next(info.id for info in engine.engines() if info.name == "destination")
        [move] = engine.unload("orders", to=to)
        assert move.state == "assigned"
        destination.call(put, "ours")
        other.answer(PATIENCE / 2)
        with xl.SharedMap(engine.topic("orders")) as shared:
            assert everything(shared) == {"ours": 1, "theirs": 1}


ENDS_WHILE_IT_WAITS = """
    import sys, time
    import exclusivelog as xl

    engine, other = xl.open(sys.argv[1]), xl.open(sys.argv[1], name="other")
    free, taken = (xl.SharedMap(engine.topic(name)) for name in ("free", "taken"))
    owner = other.topic("taken").producer("exclusive")
    waits = taken.put_async("a", 1)
    while not other.topic("taken").waiters:
        time.sleep(0.01)
    for number in range(100):
        free.put_async(str(number), number)
"""


def test_c1_a_program_ends_although_a_background_call_waits_for_its_topic(path) -> None:
    """The interpreter does not wait for it. What need not wait is executed first."""
    finish(ENDS_WHILE_IT_WAITS, path)
    with xl.open(path) as engine:
        assert len(xl.SharedMap(engine.topic("free"))) == 100
        assert len(xl.SharedMap(engine.topic("taken"))) == 0
