"""Rules I1 to I3: what the methods of a shared map and a shared state do, one by one.

The first part is what the sample of Pulsar's shared-state proposal tests of its map, and what
it gets wrong: there, the filter of `update_multiple` has no effect, a compare that fails is
appended all the same and not told, and a list of operations is appended one by one.

Which process owns the topic, and how that changes, is in test_ownership.py.
"""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from testing.journals import appends
from testing.processes import PATIENCE, Worker, until, within
from testing.states import (
    CALLS,
    Later,
    add,
    call_map,
    everything,
    one_more,
    open_counts,
    open_map,
    take_over,
)

FENCED = xl.ProducerFencedError

Map = xl.SharedMap[Any, Any]


@pytest.fixture
def shared(topic: xl.Topic) -> Iterator[Map]:
    with xl.SharedMap(topic) as shared:
        yield shared


@pytest.fixture(params=["plain", "future"])
def form(shared: Map, request: pytest.FixtureRequest) -> Any:
    """The map, in the plain form of its calls and in the one that gives futures."""
    return shared if request.param == "plain" else Later(shared)


# ---- I2: read ----------------------------------------------------------------------------


@pytest.mark.parametrize("latest", [False, True])
def test_i2_what_was_put_can_be_got(form: Any, latest: bool) -> None:
    assert form.get("a", latest=latest) is None
    assert form.get("a", "nothing", latest=latest) == "nothing"
    assert form.put("a", 1) is None
    assert form.get("a", latest=latest) == 1
    assert form.get("a", "nothing", latest=latest) == 1
    form.put("a", 2)
    assert form.get("a", latest=latest) == 2
    assert form.get("b", latest=latest) is None


@pytest.mark.parametrize("latest", [False, True])
def test_i2_get_or_default(form: Any, latest: bool) -> None:
    assert form.get_or_default("a", 7, latest) == 7
    assert form.get("a") is None  # it does not put
    form.put("a", 1)
    assert form.get_or_default("a", 7, latest) == 1


@pytest.mark.parametrize("latest", [False, True])
def test_i2_scan_and_list_keys(form: Any, latest: bool) -> None:
    assert (form.scan(latest=latest), form.list_keys(latest)) == ([], [])
    for number, key in enumerate("cab"):
        form.put(key, number)
    form.put("c", 9)
    assert form.list_keys(latest) == ["c", "a", "b"]  # as they were put first
    assert form.scan(latest=latest) == [("c", 9), ("a", 1), ("b", 2)]
    seen: list[Any] = []
    assert form.scan(lambda *pair: seen.append(pair), latest=latest) == seen
    assert len(seen) == 3


def test_i2_it_looks_like_a_mapping(shared: Map) -> None:
    shared["a"] = 1
    shared["b"] = 2
    assert (shared["a"], len(shared), list(shared)) == (1, 2, ["a", "b"])
    assert "a" in shared
    assert "z" not in shared
    del shared["a"]
    assert "a" not in shared
    for call in (lambda: shared["a"], lambda: shared.__delitem__("a")):
        with pytest.raises(KeyError, match="a"):
            call()
    assert repr(shared) == "<SharedMap on topic 'orders'>"


# ---- I2: write ---------------------------------------------------------------------------


def test_i2_put_if_absent(form: Any) -> None:
    assert form.put_if_absent("a", 1) == xl.Change(True, None, 1)
    assert form.put_if_absent("a", 2) == xl.Change(False, 1, 1)  # the loser learns who won
    assert form.get("a") == 1
    form.delete("a")
    assert form.put_if_absent("a", 3)


def test_i2_replace_reports_whether_it_did(form: Any) -> None:
    assert form.replace("a", 1, 2) == xl.Change(False, None, None)  # absent
    assert form.get("a") is None
    form.put("a", 1)
    assert form.replace("a", 1, 2) == xl.Change(True, 1, 2)
    assert form.replace("a", 1, 3) == xl.Change(False, 2, 2)
    assert not form.replace("a", 1, 3)
    assert form.get("a") == 2
    form.put("b", {"x": [1, 2]})
    assert form.replace("b", {"x": [1, 2]}, "equal, not identical").made


def test_i2_delete_and_clear(form: Any) -> None:
    for key in "abc":
        form.put(key, key)
    assert form.delete("b") == "b"
    assert form.delete("b") is None
    assert form.list_keys() == ["a", "c"]
    assert form.clear() is None
    assert form.list_keys(latest=True) == []
    form.put("a", "again")
    assert form.scan() == [("a", "again")]


def test_i2_update(form: Any) -> None:
    assert form.update("a", one_more).value == 1
    assert form.update("a", one_more).value == 2
    assert form.get("a") == 2
    assert form.update("a", lambda old: old) == xl.Change(True, 2, 2)
    assert form.update("a", lambda old: None) == xl.Change(True, 2, None)  # it is to have none
    assert form.update("a", lambda old: None) == xl.Change(False, None, None)
    assert form.update("a", lambda key, old: f"{key} {old}", with_key=True).value == "a None"
    form.delete("a")
    assert form.list_keys() == []


def test_i2_update_multiple_heeds_its_filter(form: Any) -> None:
    form.put_all({"a": 1, "b": 2, "c": 3, "d": 4})
    changed = form.update_multiple(lambda key: key in "bd", lambda key, value: -value)
    assert changed == {"b": -2, "d": -4}
    assert dict(form.scan()) == {"a": 1, "b": -2, "c": 3, "d": -4}
    changed = form.update_multiple(lambda key: key < "c", lambda key, value: None)
    assert changed == {"a": None, "b": None}  # deleted
    assert dict(form.scan()) == {"c": 3, "d": -4}
    assert form.update_multiple(None, lambda key, value: value + 10) == {"c": 13, "d": 6}
    assert form.update_multiple(lambda *_: False, lambda *_: 1 / 0) == {}


def test_i2_put_all(form: Any, topic: xl.Topic) -> None:
    values = {f"k{number}": number for number in range(50)}
    form.put_all(values)
    assert dict(form.scan()) == values
    assert topic.next_offset == 50


def test_i2_every_call_has_a_form_that_gives_a_future() -> None:
    """With the same arguments."""
    no_twin = {"close", "watch", "keys", "items", "values"}
    for kind, some in ((xl.SharedMap, "replace"), (xl.SharedState, "write")):
        names = {name for name in dir(kind) if not name.startswith("_")}
        plain = {name for name in names if not name.endswith("_async")} - no_twin
        assert some in plain
        assert names == plain | {f"{name}_async" for name in plain} | (no_twin & set(dir(kind)))
        for name in plain:
            twins = [inspect.signature(getattr(kind, n)) for n in (name, f"{name}_async")]
            assert twins[0].parameters == twins[1].parameters


def test_i2_futures_are_done_in_the_order_in_which_they_were_asked_for(shared: Map) -> None:
    futures = [shared.update_async("n", one_more) for _ in range(50)]
    futures.append(shared.get_async("n"))
    results = [future.result(PATIENCE) for future in futures]
    assert [made.value for made in results[:50]] + results[50:] == [*range(1, 51), 50]
    failed = shared.update_async("n", lambda old: 1 / 0)
    assert isinstance(failed.exception(PATIENCE), ZeroDivisionError)
    assert shared._submit(shared.snapshot).result(PATIENCE) == 50


# ---- I2: others see it -------------------------------------------------------------------


@pytest.mark.parametrize("where", ["same engine", "another engine"])
def test_i2_a_second_instance_sees_what_the_first_one_wrote(
    shared: Map, topic: xl.Topic, other: xl.Topic, where: str
) -> None:
    shared.put("before", 1)
    with xl.SharedMap(topic if where == "same engine" else other) as second:
        assert second.get("before") == 1
        for number in range(50):
            writer, reader = (shared, second) if number % 10 else (second, shared)
            writer.put("n", number)
            assert reader.get("n", latest=True) == number
            assert reader.get("n") == number  # it never goes back
        shared.clear()
        assert second.list_keys(latest=True) == []


def test_i2_another_process_sees_it_too(shared: Map, worker: Callable[..., Worker]) -> None:
    process = worker()
    process.call(open_map)
    for number in range(20):
        shared.put("n", number)
        assert process.call(call_map, "get", "n", latest=True) == number
    assert process.call(call_map, "update", "n", one_more).value == 20
    assert shared.get("n", latest=True) == 20


def test_i2_reads_without_latest_come_along_and_never_go_back(
    shared: Map, worker: Callable[..., Worker]
) -> None:
    process = worker()
    process.call(open_map)
    last = -1
    for number in range(30):
        process.call(call_map, "put", "n", number)
        seen = shared.get("n", -1)
        assert last <= seen <= number
        last = seen
    until(lambda: shared.get("n") == 29)


@pytest.mark.long
def test_i2_what_was_not_flushed_is_seen_by_latest_reads_of_the_careful(path: str) -> None:
    """One engine acknowledges before the flush, another one shows only what is flushed. Reads
    that ask for the latest have it flushed; the others see it a moment later."""
    with (
        xl.open(path, durability="process") as fast,
        xl.open(path, durability="power") as careful,
        xl.SharedMap(fast.topic("m")) as writer,
        xl.SharedMap(careful.topic("m")) as reader,
    ):
        for number in range(100):
            writer.put("n", number)
            assert reader.get("n", latest=True) == number
        for number in range(50):  # and who writes has seen what is not flushed yet
            assert writer.update("n", one_more).value == 100 + 2 * number
            assert reader.update("n", one_more).value == 101 + 2 * number
        writer.put("n", -1)
        until(lambda: reader.get("n") == -1)


# ---- I3: a failed compare ----------------------------------------------------------------

NOTHING: dict[str, Callable[[Any], Any]] = {
    "put_if_absent": lambda m: m.put_if_absent("a", 2),
    "replace, another value": lambda m: m.replace("a", 2, 3),
    "replace, no value": lambda m: m.replace("b", 2, 3),
    "delete": lambda m: m.delete("b"),
    "update": lambda m: m.update("b", lambda old: None),
    "update_multiple": lambda m: m.update_multiple(lambda k: k > "a", lambda k, v: 0),
    "put_all": lambda m: m.put_all({}),
}


@pytest.mark.parametrize("call", NOTHING.values(), ids=NOTHING.keys())
def test_i3_what_changes_nothing_appends_nothing_and_says_so(
    form: Any, topic: xl.Topic, call: Callable[[Any], Any]
) -> None:
    form.put("a", 1)
    assert not call(form)
    assert topic.next_offset == 1
    assert form.scan(latest=True) == [("a", 1)]


def test_i3_clearing_an_empty_map_appends_nothing(form: Any, topic: xl.Topic) -> None:
    form.clear()
    assert topic.next_offset == 0
    form.put("a", 1)
    form.clear()
    form.clear()
    assert topic.next_offset == 2


def test_i3_no_operations_append_nothing(topic: xl.Topic) -> None:
    with open_counts(topic) as counts:
        assert counts.write(lambda state: [], lambda state: state) == {}
        assert counts.write(lambda state: iter(())) is None
        assert topic.next_offset == 0


# ---- I1: read and write ------------------------------------------------------------------


def test_i1_a_list_of_operations_is_one_atomic_append(engine: xl.Engine, topic: xl.Topic) -> None:
    with open_counts(topic) as counts, xl.SharedMap(engine.topic("map")) as shared:
        counts.write(lambda state: [["a", 1]])
        shared.put("a", 1)
        for write in (
            lambda: counts.write(lambda state: [["a", 1]] * 20),
            lambda: shared.put_all(dict.fromkeys("abcdef", 1)),
            lambda: shared.update_multiple(None, lambda key, value: 2),
        ):
            since = engine.ledger.journal.tail
            write()
            assert appends(engine, since) == 1
        assert counts.read(dict) == {"a": 21}
        assert topic.next_offset == 21


# ---- I3: functions get copies ------------------------------------------------------------


def test_i3_functions_cannot_break_the_state(topic: xl.Topic) -> None:
    def spoil(state: dict[str, int]) -> dict[str, int]:
        state["a"] = state["c"] = 100
        return state

    with open_counts(topic) as counts:
        counts.write(lambda state: [["a", 1]])
        for call in (
            lambda: counts.read(spoil),
            lambda: counts.write(lambda state: [["b", spoil(state)["a"]]]),
        ):
            with pytest.raises(TypeError, match="DictView"):
                call()
        with pytest.raises(TypeError, match="DictView"):
            counts.write(lambda state: [["b", 100]], spoil)
        kept: list[dict[str, int]] = []
        counts.read(kept.append)
        with pytest.raises(RuntimeError, match="this view of the state has expired"):
            len(kept[0])
        assert spoil(counts.read(lambda state: state)) == {"a": 100, "b": 100, "c": 100}
        assert counts.read(dict) == {"a": 1, "b": 100}


def test_i3_what_an_operation_was_made_of_can_change_afterwards(topic: xl.Topic) -> None:
    mine = ["x"]
    with xl.SharedState(topic, initial=list, apply=lambda state, op: state.append(op)) as lists:
        lists.write(lambda state: [mine])
        mine.append("changed")
        assert lists.read(lambda state: state) == [["x"]]


def test_i3_values_of_a_map_are_copies(shared: Map) -> None:
    mine = [1]
    shared.put("a", mine)
    mine.append(2)
    got = shared.get("a")
    got.append(3)
    shared.scan(lambda key, value: value.append(4))
    shared.update_multiple(None, lambda key, value: value.append(5) or value[:1])
    changed = shared.update("b", lambda old: mine).value
    changed.append(6)
    with pytest.raises(ZeroDivisionError):
        shared.update("a", lambda old: old.append(7) or 1 / 0)
    assert everything(shared) == {"a": [1], "b": [1, 2]}


# ---- I3: functions may run more than once ------------------------------------------------


class Interrupted:
    """A user's function, in the midst of whose first call something else happens."""

    def __init__(self, function: Callable[..., Any], happens: Callable[[], object]) -> None:
        self._function, self._happens = function, happens
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        result = self._function(*args)
        self.calls += 1
        if self.calls == 1:
            self._happens()
        return result


def test_i3_a_write_that_was_fenced_begins_anew_from_the_newest_state(
    shared: Map, other: xl.Topic
) -> None:
    """While the function runs, a rival takes the topic away and writes. What was computed from
    the old state never enters the log."""
    with xl.SharedMap(other) as rival:

        def intrude() -> None:
            take_over(other)
            rival.put("n", 100)

        shared.put_all({"n": 1, "m": 5})
        function = Interrupted(one_more, intrude)
        assert shared.update("n", function).value == 101
        assert function.calls == 2
        function = Interrupted(lambda key, value: value + 1, intrude)
        assert shared.update_multiple(None, function) == {"n": 101, "m": 6}
        chosen = Interrupted(lambda key: key == "n", intrude)
        assert shared.update_multiple(chosen, lambda key, value: 0) == {"n": 0}
        assert everything(rival) == {"n": 0, "m": 6}
        values = [message.value for message in other.reader(deserializer="msgpack")]
        assert values == [1, 5, 100, 101, 100, 101, 6, 100, 0]


def test_i3_so_does_a_state_s(topic: xl.Topic, other: xl.Topic) -> None:
    with open_counts(topic) as counts, open_counts(other) as rival:

        def intrude() -> None:
            take_over(other)
            rival.write(lambda state: [["a", 10]])

        counts.write(lambda state: [["a", 1]])
        ops = Interrupted(lambda state: [["b", state["a"]]], intrude)
        assert counts.write(ops, dict) == {"a": 11, "b": 11}
        assert (ops.calls, topic.next_offset) == (2, 3)


def test_i3_a_compare_that_was_fenced_is_made_again(shared: Map, other: xl.Topic) -> None:
    with xl.SharedMap(other) as rival:
        shared.put("a", 1)
        take_over(other)
        rival.put("a", 2)
        assert shared.replace("a", 1, 3).previous == 2
        take_over(other)
        rival.delete("a")
        assert shared.put_if_absent("a", 4).previous is None
        assert everything(rival) == {"a": 4}


def test_i3_a_former_owner_reads_what_the_successor_wrote(shared: Map, other: xl.Topic) -> None:
    with xl.SharedMap(other) as rival:
        for number in range(20):
            shared.put("n", -number)
            take_over(other)
            rival.put("n", number)
            assert shared.get("n", latest=True) == number


# ---- I3: functions must not call back ----------------------------------------------------


def test_i3_functions_must_not_call_back(shared: Map, topic: xl.Topic) -> None:
    shared.put("a", 1)
    for back in CALLS.values():

        def once_more(*_: Any, back: Callable[[Map], Any] = back) -> Any:
            back(shared)
            return 9

        for call in (
            lambda: shared.update("a", once_more),
            lambda: shared.update_multiple(once_more, lambda key, value: 8),
            lambda: shared.update_multiple(None, once_more),
        ):
            with pytest.raises(RuntimeError, match="a function that this state runs"):
                within(call, PATIENCE)
    assert topic.next_offset == 1
    assert shared.update("a", one_more).value == 2


def test_i3_functions_of_a_state_must_not_call_back(topic: xl.Topic) -> None:
    with open_counts(topic) as counts:
        for back in (
            lambda *_: counts.read(dict),
            lambda *_: counts.read(dict, latest=True),
            lambda *_: counts.write(lambda state: []),
            lambda *_: counts.snapshot(),
        ):
            for call in (
                lambda back=back: counts.read(back),
                lambda back=back: counts.write(back),
                lambda back=back: counts.write(lambda state: [["a", 1]], back),
            ):
                with pytest.raises(RuntimeError, match="a function that this state runs"):
                    within(call, PATIENCE)
        assert counts.write(lambda state: [["b", 1]], dict) == {"a": 4, "b": 1}


def test_i3_closing_inside_a_function_appends_nothing(shared: Map, topic: xl.Topic) -> None:
    with pytest.raises((RuntimeError, xl.EngineClosedError)):
        shared.update("a", lambda old: shared.close() or 1)
    assert topic.next_offset == 0


@pytest.mark.parametrize("inside", ["read", "write"])
@pytest.mark.parametrize("waits", ["submitted", "thread"])
def test_i3_closing_inside_a_function_waits_for_no_call_that_waits_for_it(
    topic: xl.Topic, inside: str, waits: str
) -> None:
    """Others write meanwhile, and wait until the function has returned: to wait for them in the
    function, as closing does, would never end."""
    counts = open_counts(topic)

    def write() -> None:
        counts.write(lambda state: [["a", 1]])

    def close(state: Any) -> list[Any]:
        if waits == "submitted":
            counts._submit(write)
        else:
            threading.Thread(target=write, daemon=True).start()
        time.sleep(0.2)
        counts.close()
        return []

    with pytest.raises(RuntimeError, match="a function that this state runs"):
        within(lambda: (counts.read if inside == "read" else counts.write)(close))
    until(lambda: topic.next_offset == 1)
    counts.close()


def test_i3_a_scan_s_function_is_called_afterwards_and_may(shared: Map) -> None:
    shared.put_all({"a": 1, "b": 2})
    shared.scan(lambda key, value: shared.put(key, value + 1))
    assert everything(shared) == {"a": 2, "b": 3}


# ---- I3: exceptions in functions ---------------------------------------------------------


def fail(*_: Any) -> Any:
    raise ZeroDivisionError


def begin_and_fail(state: Any) -> Iterator[list[Any]]:
    yield ["a", 1]
    raise ZeroDivisionError


def test_i3_an_exception_in_a_function_appends_nothing(form: Any, topic: xl.Topic) -> None:
    form.put_all({"a": 1, "b": 2})
    for call in (
        lambda: form.update("a", fail),
        lambda: form.update_multiple(fail, lambda key, value: 3),
        lambda: form.update_multiple(None, lambda key, value: 3 if key == "a" else fail()),
    ):
        with pytest.raises(ZeroDivisionError):
            call()
    for value in (object(), 1 << 100):
        with pytest.raises((TypeError, ValueError)):
            form.put("c", value)
        with pytest.raises((TypeError, ValueError)):
            form.update("c", lambda old, value=value: value)
        with pytest.raises((TypeError, ValueError)):
            form.put_all({"d": 1, "e": value})
    assert (topic.next_offset, topic.epoch) == (2, 1)  # and the topic is kept
    assert form.update("a", one_more).value == 2


def test_i3_so_it_does_in_a_state_s(topic: xl.Topic) -> None:
    with open_counts(topic) as counts:
        for ops in (fail, begin_and_fail, lambda state: [["a", 1], ["b", object()]]):
            with pytest.raises((ZeroDivisionError, TypeError)):
                counts.write(ops)
        with pytest.raises(ZeroDivisionError):
            counts.read(fail)
        assert (topic.next_offset, counts.read(dict)) == (0, {})


def test_i3_an_exception_in_what_reads_after_a_write_is_too_late(topic: xl.Topic) -> None:
    with open_counts(topic) as counts:
        with pytest.raises(ZeroDivisionError):
            counts.write(lambda state: [["a", 1]], fail)
        assert (topic.next_offset, counts.read(dict)) == (1, {"a": 1})


# ---- I3: a failing applier ---------------------------------------------------------------


def add_small(counts: dict[str, int], op: list[Any]) -> None:
    """Like `add`, but older: it does not know amounts above 9."""
    if op[1] > 9:
        raise ValueError(f"amount {op[1]}")
    add(counts, op)


def old_counts(topic: xl.Topic) -> xl.SharedState[Any, Any]:
    return xl.SharedState(topic, initial=dict, apply=add_small)


@pytest.mark.parametrize("who", ["writer", "reader", "opener"])
def test_i3_a_failing_applier_stops_the_state_and_loses_nothing(
    topic: xl.Topic, other: xl.Topic, who: str
) -> None:
    """At its own write, at another's, or when it is opened. The error says where, and stays;
    an applier that can goes on."""
    with open_counts(other) as good:
        good.write(lambda state: [["a", 1]])
        if who != "opener":
            old = old_counts(topic)
            assert old.read(dict) == {"a": 1}
            writer = old if who == "writer" else good
            step = (
                (lambda: writer.write(lambda state: [["a", 1], ["b", 10]]))
                if (who == "writer")
                else (lambda: old.read(dict, latest=True))
            )
        if who != "writer":
            good.write(lambda state: [["a", 1], ["b", 10]])
        with pytest.raises(xl.StateError, match=r"offset 2 .*amount 10"):
            old_counts(topic) if who == "opener" else step()
        if who != "opener":
            for call in (lambda: old.read(dict), lambda: old.write(lambda state: []), old.snapshot):
                with pytest.raises(xl.StateError, match="offset 2"):
                    call()
            old.close()
        assert good.write(lambda state: [["c", 1]], dict) == {"a": 2, "b": 10, "c": 1}
    with open_counts(topic) as again:
        assert again.read(dict) == {"a": 2, "b": 10, "c": 1}


def test_i3_who_cannot_apply_gives_the_topic_back(topic: xl.Topic) -> None:
    old = old_counts(topic)
    with pytest.raises(xl.StateError):
        old.write(lambda state: [["a", 10]])
    assert topic.owner is None


def test_i3_the_error_says_that_the_operation_is_in_the_log(topic: xl.Topic) -> None:
    with pytest.raises(xl.StateError) as error, old_counts(topic) as old:
        old.write(lambda state: [["a", 10]])
    assert topic.next_offset == 1
    assert error.value.maybe_written  # rule B9


def test_i3_an_interrupted_applier_loses_no_operation(topic: xl.Topic, other: xl.Topic) -> None:
    """Ctrl-C strikes in the applier. A program that catches it and goes on must not do so with a
    state that lacks an operation."""
    struck: list[int] = []

    def append(state: list[int], op: int) -> None:
        if op == 2 and not struck:
            struck.append(op)
            raise KeyboardInterrupt
        state.append(op)

    writer = xl.SharedState(other, initial=list, apply=lambda state, op: state.append(op))
    reader = xl.SharedState(topic, initial=list, apply=append)
    with writer, reader:
        writer.write(lambda state: [1, 2, 3])
        with pytest.raises(KeyboardInterrupt):
            reader.read(list, latest=True)
        assert reader.read(list, latest=True) == [1, 2, 3]


def test_i3_what_is_no_message_of_a_map_is_named(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send(b"value", key="a")
        producer.send(b"of something else")
    with pytest.raises(xl.StateError, match=r"'orders'.*offset 1 .*not a message of a map"):
        xl.SharedMap(topic)


class Locked:
    """An object that `copy.deepcopy` cannot copy."""

    def __init__(self, value: int) -> None:
        self.value, self.lock = value, threading.Lock()


@pytest.mark.parametrize("copy", [None, lambda one: Locked(one.value)])
def test_i3_objects_are_copied_as_the_application_says(engine: xl.Engine, copy: Any) -> None:
    def apply(state: dict[str, Any], op: list[Any]) -> None:
        state[op[0]] = [Locked(op[1])]

    with xl.SharedState(
        engine.topic("orders"), dict, apply, copy=copy, snapshot_every=None
    ) as state:
        state.write(lambda _: [["a", 1]])
        for read in (lambda seen: seen, lambda seen: seen.copy()):
            found = state.read(read)
            assert found["a"][0].value == 1
            assert (found["a"][0] is state.read(dict)["a"][0]) == (copy is None)
        with engine.transaction() as txn:
            state.write(lambda _: [["b", 2]], transaction=txn)
            state.write(lambda seen: [["c", len(seen)]], transaction=txn)
        assert state.read(lambda seen: seen["c"][0].value) == 2


@pytest.mark.rule("H2", "I4")
def test_i3_what_is_no_message_of_a_map_can_be_removed(topic: xl.Topic) -> None:
    """As the error says."""
    with xl.SharedMap(topic) as shared:
        shared.put("a", 1)
        watch = shared.watch(start=0)
    with topic.producer() as producer:
        producer.send(b"of something else")
        with pytest.raises(xl.StateError, match=re.escape("topic.trim(before=2) keeps all keys")):
            xl.SharedMap(topic)
    assert [change.value for change in watch.follow(timeout=0)] == [1]
    assert topic.trim(before=2) == 2
    with xl.SharedMap(topic) as shared:
        assert shared.put("b", 2) is None
        assert dict(shared) == {"a": 1, "b": 2}
        assert [change.value for change in watch.follow(timeout=0)] == [2]
