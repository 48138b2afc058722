"""exclusivelog.aio has every name of exclusivelog, with the same parameters, or a reason."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio

pytestmark = pytest.mark.once

# Values and errors are the same objects in both; of these, each module has its own.
OWN = {
    *"Claim Engine GroupReader Lock Loss MapWatch OwnerWatch Producer Reader Receipt Role".split(),
    *"RoleFuture SharedMap SharedState Term Terms Topic Transaction UnloadFuture".split(),
    *"open upgrade".split(),
}

TASKS = {"RoleFuture", "UnloadFuture"}  # types of asyncio's tasks, which stand for these futures

# What a transaction uses of the readers of groups.
OF_MEMBERS = """
    alone by_itself committing current joined read_at returns spans transaction
""".split()

# What has no counterpart, by class: what the library's modules use of one another's objects, and
# the engine that a topic or a claim was opened with, which the caller has at hand.
MISSING: dict[str, set[str]] = {
    "Claim": {"engine"},
    "Engine": {"backend", "ledger"},
    "GroupReader": {"membership", "readers", *OF_MEMBERS},
    "Lock": set(),
    "Loss": set(),
    "MapWatch": {"reader"},
    "OwnerWatch": set(),
    "Producer": set(),
    "Reader": {"continues_at", "cursor", "membership", "topic_id", *OF_MEMBERS},
    "Receipt": set(),
    "Role": set(),
    "SharedMap": set(),
    "SharedState": set(),
    "Term": set(),
    "Terms": set(),
    "Topic": {"engine"},
    "Transaction": set(),
}

# Where the parameters differ.
DIFFERENT = {
    "Receipt.result": "asyncio.wait_for(receipt, timeout) has the timeout",
    "Receipt.exception": "asyncio.wait_for(receipt, timeout) has the timeout",
    "Topic.producer_async": "it has the parameters of `producer`, one by one",
}

# What only this module has.
MORE = {"SharedMap": {"wrap"}, "SharedState": {"wrap"}}


@pytest.fixture
def objects(path: str) -> Any:
    """{class: a synchronous object of it}: their attributes are public names, too."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(xl.open(path))
        topic = engine.topic("orders")
        producer = stack.enter_context(topic.producer())
        watched = stack.enter_context(xl.SharedMap[str, int](engine.topic("map")))
        state: xl.SharedState[Any, Any] = xl.SharedState(engine.topic("state"), dict, print)
        found = [
            engine,
            topic,
            producer,
            producer.send_async(b"x"),
            topic.reader(),
            watched,
            engine.reader(["orders"], group="g"),
            engine.role("r"),
            engine.own({"a": None}),
            engine.transaction(),
            watched.watch(),
            stack.enter_context(state),
            terms := engine.topic("led").terms(),
            term := next(terms),
            term.lost,
            engine.lock("l"),
            stack.enter_context(topic.watch_owner()),
        ]
        yield {type(one).__name__: one for one in found}


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_every_public_name_is_there() -> None:
    assert set(aio.__all__) == set(xl.__all__)
    for name in (*xl.__all__, "errors", "events", "serde", "types"):
        same = getattr(aio, name) is getattr(xl, name)
        assert same != (name in OWN), name


def test_every_public_method_and_property_is_there(objects: dict[str, Any]) -> None:
    classes = {name for name in OWN - TASKS if inspect.isclass(getattr(aio, name))}
    assert set(objects) == classes
    for name, sync in objects.items():
        ours = public(dir(getattr(aio, name)))
        theirs = public(dir(sync))
        instance = {"name"} if name == "Topic" else set()  # an attribute
        assert theirs - ours - instance == MISSING[name], name
        assert ours - theirs - {"sync"} == MORE.get(name, set()), name


def test_their_parameters_are_the_same() -> None:
    for name in sorted(OWN - TASKS):
        ours, theirs = getattr(aio, name), getattr(xl, name)
        if not inspect.isclass(ours):
            compare(name, ours, theirs)
        for method in sorted(public(dir(ours)) & public(dir(theirs))):
            if callable(getattr(theirs, method)):
                compare(f"{name}.{method}", getattr(ours, method), getattr(theirs, method))
    for name in ("SharedMap", "SharedState"):
        compare(name, getattr(aio, name), getattr(xl, name))
    compare("its options", aio.Topic.producer_async, xl.Topic.producer)


def compare(name: str, ours: Any, theirs: Any) -> None:
    found, wanted = parameters(ours), parameters(theirs)
    assert (found == wanted) != (name in DIFFERENT), (name, found, wanted)


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """(name, kind, default) of each; the first one of a method may have any name."""
    found = inspect.signature(function).parameters.values()
    given = [(each.name, each.kind, each.default) for each in found]
    return [one for one in given if one[0] != "self"]


def test_the_judge_sees_a_difference() -> None:
    def ours(self: Any, *, key: Any = None) -> None: ...
    def theirs(self: Any, *, key: Any = 0) -> None: ...
    def third(self: Any, key: Any = None) -> None: ...

    compare("same", ours, ours)
    for other in (theirs, third):
        with pytest.raises(AssertionError):
            compare("different", ours, other)


def test_every_method_has_its_documentation() -> None:
    for name in OWN - TASKS:
        ours = getattr(aio, name)
        assert ours.__doc__
        for method in public(dir(ours)) if inspect.isclass(ours) else ():
            told = getattr(ours, method).__doc__
            assert told, f"{name}.{method}"
            assert ">>>" not in told or "aio" in told, f"the example of {name}.{method} cannot run"
