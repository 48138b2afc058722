"""One policy for every backend: who may write, in which order, after which delay, and how a refusal
reads (rule J5). The same calls are made on one machine's log and on a cluster's, and after each of
them all that a caller sees is compared: results, epochs, types and texts of errors, the holders
that they name, the queue, states and notifications (`tests.cluster.sides`).

The calls are listed, by rule, and random. A sample runs on a Pulsar broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from testing.broker import Namespace
from testing.followers import idle_producers_stay
from testing.processes import EXCLUSIVE, FENCING, MODES, PATIENCE, SHARED, WAIT
from tests.cluster.sides import (
    ENGINES,
    SETTLED,
    SHORT,
    TOPICS,
    Call,
    Different,
    Pair,
    pair,
    random_calls,
)

pytestmark = [pytest.mark.rule("J5"), pytest.mark.once]

Calls = Iterator[Call]
CHANGES = [Call("changes", "", {"engine": "b", "topic": name}) for name in TOPICS]
WATCHED = [
    Call("watch", f"watch {name} {engine}", {"engine": engine, "topic": name})
    for name in TOPICS
    for engine in ENGINES
]
TOLD = [Call("told", watch.label) for watch in WATCHED]


def opened(label: str, mode: str = EXCLUSIVE, engine: str = "a", **options: Any) -> Call:
    given = {"topic": "one", "name": label, **options}
    return Call("open", label, {"engine": engine, "mode": mode, **given})


def waiting(label: str, engine: str = "a", **options: object) -> Call:
    return Call("wait", label, {"engine": engine, "topic": "one", "name": label, **options})


def owned(label: str, engine: str = "a", wanted: int | None = None, **options: object) -> Call:
    given = {"group": "g", "resource": "x", **options}
    return Call("own", label, {"engine": engine, "wanted": wanted, **given})


def moved(engine: str, to: str, **options: Any) -> Call:
    given = {"engine": engine, "topics": "one", "to": to, "timeout": PATIENCE, **options}
    return Call("unload", "", given)


# ---- the listed calls --------------------------------------------------------------------


STATES = {
    "free": [],
    "shared": [opened("s", SHARED)],
    "owned": [opened("o", priority=3)],
    "shared and awaited": [opened("s", SHARED), waiting("w", priority=2)],
    "owned and awaited": [opened("o", priority=3), waiting("w", priority=2)],
}


def access(state: str, mode: str) -> Calls:
    """Table A: this mode against this state of a topic, and the first session's life after it."""
    yield from STATES[state]
    timeout = {"timeout": SHORT} if mode == WAIT else {}
    yield opened("n", mode, "b", **timeout)
    for label in ("s", "o", "n"):
        yield Call("send", label)
    for label in ("s", "o", "w", "n"):
        yield Call("close", label)


def many(state: str, mode: str) -> Calls:
    """Rules A2 and A6: a producer on each of two topics at once, one of which has others; all are
    opened, or none."""
    for call in STATES[state]:
        yield call._replace(options={**call.options, "topic": "two"})
    yield Call("open_many", "m", {"engine": "b", "mode": mode, "name": "s"})
    yield Call("open_many", "n", {"engine": "a", "mode": mode, "name": "n"})
    for label in ("s", "o", "m one", "m two", "n one", "n two"):
        yield Call("send", label)
    for label in ("m one", "n one", "s", "o", "w", "m two", "n two"):
        yield Call("close", label)


def many_ends() -> Calls:
    """Rules G8 and E3: one of the topics is terminated, or moves to the engine that asks."""
    yield opened("o", topic="one")
    yield moved("a", "b")
    for mode in (SHARED, EXCLUSIVE, FENCING):
        yield Call("open_many", f"a {mode}", {"engine": "a", "mode": mode, "name": mode})
    yield Call("open_many", "b", {"engine": "b", "mode": EXCLUSIVE, "name": "b"})
    yield Call("close", "b one")
    yield Call("terminate", "", {"engine": "b", "topic": "two"})
    for mode in (SHARED, EXCLUSIVE, FENCING):
        yield Call("open_many", f"late {mode}", {"engine": "b", "mode": mode, "name": mode})


def epochs(mode: str) -> Calls:
    """Rules B5 and B6: an instance comes back with its old epoch, or a wrong one."""
    for number in range(3):
        yield opened(f"first{number}", name="first")
        yield Call("close", f"first{number}")
    timeout = {"timeout": SHORT} if mode == WAIT else {}
    for claim in (0, 2, 9, 3):
        yield opened(f"again{claim}", mode, "b", name="first", topic_epoch=claim, **timeout)
    yield opened("late", mode, topic_epoch=2, **timeout)
    yield opened("next", FENCING)
    yield Call("send", "again3")


def names() -> Calls:
    """Rules A6 and D9: a name that another producer has."""
    yield opened("first", SHARED, name="p")
    yield opened("second", SHARED, "b", name="p")
    yield opened("other", SHARED, "b", name="q")
    yield waiting("waiter", "b", name="p")
    yield Call("close", "first")
    yield Call("close", "other")
    yield opened("third", EXCLUSIVE, name="p")
    yield Call("send", "waiter")


def queue() -> Calls:
    """Rules D1, D3, D5: order, timeouts and cancelling."""
    yield opened("leader")
    for label, priority in (("low", -1), ("high", 7), ("middle", 2), ("second", 2)):
        yield waiting(label, "b", priority=priority)
    yield opened("late", WAIT, "b", timeout=SHORT)
    yield opened("never", WAIT, "b", timeout=0)
    yield Call("cancel", "middle")
    for label in ("leader", "high", "second", "low"):
        yield Call("set_priority", label)
        yield Call("close", label)


def namesakes() -> Calls:
    """Rules D4 and D9: several wait under one name, in one engine, too."""
    yield opened("leader", name="p")
    for label, engine in (("first", "a"), ("second", "a"), ("third", "b")):
        yield waiting(label, engine, name="p")
    for label in ("leader", "first", "second", "third"):
        yield Call("send", label)
        yield Call("close", label)


def reserved() -> Calls:
    """Rules D1 and E1: a topic that is reserved for an engine is granted past the queue, which
    stays, and the new owner is asked for the topic."""
    yield opened("first")
    yield waiting("waiter", "a", name="p")
    for label, mode in (("takes", FENCING), ("waits", WAIT), ("asks", EXCLUSIVE)):
        yield moved("a", "b")
        timeout = {"timeout": PATIENCE} if mode == WAIT else {}
        yield opened(label, mode, "b", name="p", **timeout)
        yield Call("send", label)
        yield moved("b", "a")
        yield Call("send", "waiter")
        yield Call("close", "waiter")
        yield waiting("waiter", "a", name="p")


def stale_waiters() -> Calls:
    """Rules B5 and D4: a waiter whose epoch goes out of date while it waits."""
    yield opened("first")
    yield waiting("old", "b", topic_epoch=1)
    yield waiting("new", "b", priority=5)
    yield Call("close", "first")
    yield Call("close", "new")


def fencing() -> Calls:
    """Rules A1, B4 and B10: waiters and an owner are fenced."""
    yield opened("owner")
    yield waiting("waiter", "b", topic_epoch=1)
    yield opened("rival", FENCING, "b")
    yield Call("send", "owner")
    yield Call("flush", "owner")
    yield Call("close", "owner")
    yield Call("close", "rival")


def settling() -> Calls:
    """Rule D7: the best priority that is known gets the topic at once, and the lowest waits."""
    for priority in (1, 5):
        yield opened(f"known{priority}", WAIT, priority=priority)
        yield Call("close", f"known{priority}")
    # "At once" is before the end of a much longer delay; "delayed": not within a short one.
    for number, (priority, patience) in enumerate(
        ((5, PATIENCE), (1, SHORT), (9, PATIENCE), (5, SHORT))
    ):
        options = {"priority": priority, "settle": SETTLED, "timeout": patience}
        yield opened(f"settles{number}", WAIT, "b", **options)
        yield Call("close", f"settles{number}")
    yield opened("none", WAIT, "b", priority=1, timeout=PATIENCE)


def claims() -> Calls:
    """Rules F1 to F5."""
    for label, engine, wanted in (
        ("first", "a", None),
        ("same", "b", 1),
        ("higher", "b", 4),
        ("lower", "a", 3),
        ("next", "a", None),
        ("zero", "b", 0),
        ("afterwards", "a", None),
        ("negative", "a", -1),
    ):
        yield owned(label, engine, wanted)
    yield Call("close", "afterwards")
    yield owned("stale", "b", 0, resource="y")
    yield owned("raised", "b", 5, resource="y")
    yield Call("close", "raised")
    yield owned("out of date", "b", 2, resource="y")
    yield owned("of another group", "b", 7, group="h")
    yield Call("claims", "", {"engine": "a", "group": "g"})


def several_claims() -> Calls:
    """Rules F1 and F3: a claim of several resources gets all or none, and is lost as a whole."""
    yield owned("first", "a", None, others={"y": 5, "z": None})
    yield owned("none of it", "b", 9, others={"v": None, "y": 4})
    yield owned("other", "b", 1, resource="w", others={"v": 1})
    yield owned("takes", "b", None, resource="z")
    yield owned("free again", "a", 1, others={"y": 5})
    yield owned("out of date", "a", 2, resource="u", others={"z": 1})
    yield owned("both", "a", 0, resource="z", others={"w": 0})
    yield Call("close", "other")
    yield Call("close", "both")
    yield owned("after", "b", None, resource="z", others={"w": None, "v": None})
    yield Call("claims", "", {"engine": "a", "group": "g"})
    yield Call("history", "", {"engine": "a", "group": "g"})


def several_groups() -> Calls:
    """Rule F6: one claim on several topics, their positions, and the deletion of a group."""
    for label, topic in (("p1", "one"), ("p2", "two")):
        yield opened(label, topic=topic)
        yield Call("send_many", label, {"count": 2})
    yield Call("delete_group", "", {"engine": "a", "group": "g"})
    yield Call("read_all", "all", {"engine": "a", "group": "g"})
    for _ in range(3):
        yield Call("take", "all")
    yield Call("commit", "all")
    yield Call("groups", "", {"engine": "b"})
    yield Call("delete_group", "", {"engine": "b", "group": "g"})
    yield Call("read", "one", {"engine": "b", "topic": "one", "group": "g"})
    yield Call("commit", "all")
    yield Call("take", "all")
    yield Call("groups", "", {"engine": "a"})
    yield Call("close", "all")
    yield owned("claim", "a", None, resource="one")
    yield Call("commit", "one")
    yield Call("groups", "", {"engine": "a"})
    yield Call("delete_group", "", {"engine": "b", "group": "g"})
    yield Call("groups", "", {"engine": "a"})
    yield Call("read_all", "again", {"engine": "b", "group": "g"})
    yield Call("history", "", {"engine": "b", "group": "g"})


def locks() -> Calls:
    """Rules A1, D1, E2: a lock is owned, awaited, taken and handed over as a topic is."""
    yield Call("role", "first", {"engine": "a", "mode": EXCLUSIVE})
    yield Call("role", "refused", {"engine": "b", "mode": EXCLUSIVE})
    yield Call("role", "waits", {"engine": "b", "mode": WAIT, "priority": 1})
    yield Call("role", "better", {"engine": "b", "mode": WAIT, "priority": 2})
    yield Call("role", "late", {"engine": "b", "mode": WAIT, "timeout": SHORT})
    yield Call("roles", "", {"engine": "b"})
    yield Call("check", "first")
    yield Call("close", "first")
    yield Call("check", "better")
    yield Call("hand_over", "better", {"to": "b"})
    yield Call("role", "takes", {"engine": "a", "mode": FENCING})
    for label in ("better", "waits", "takes"):
        yield Call("check", label)
    yield Call("hand_over", "takes", {"to": "b"})
    yield Call("check", "takes")
    yield Call("role", "there", {"engine": "b", "mode": EXCLUSIVE})
    yield Call("roles", "", {"engine": "a"})
    yield Call("close", "takes")
    yield Call("close", "there")
    yield Call("roles", "", {"engine": "a"})


def groups() -> Calls:
    """Rule F6: a group's reader is fenced by the next one."""
    yield opened("writer")
    yield Call("send_many", "writer", {"count": 3})
    for label, engine in (("one", "a"), ("two", "b")):
        yield Call("read", label, {"engine": engine, "topic": "one", "group": "g"})
        yield Call("take", label)
        yield Call("commit", label)
    yield Call("commit", "one")


def unknown() -> Calls:
    """Topics that are not there, and places where no reader can start."""
    yield Call("find", "", {"engine": "a", "topic": "one"})  # there is no topic yet
    for topic in ("onn", "other", "__other__", "", "x" * 300):
        for create in (False, topic.startswith("_")):
            yield Call("find", "", {"engine": "b", "topic": topic, "create": create})
    for start in ("earliest", "latest", 0, 7, -1, "nowhere", 1.5, True, None, 2**63):
        yield Call("begin", "", {"engine": "b", "topic": "one", "start": start})


def moves() -> Calls:
    """Rules E1 to E3: a topic is moved to a waiter, to nobody, twice, and back."""
    yield moved("a", "b", producer="nobody")
    yield opened("owner")
    yield moved("a", "a")
    yield moved("a", "b", producer="nobody")
    yield moved("a", "a", producer="owner")
    yield waiting("standby", "b")
    yield moved("b", "b")
    yield Call("send", "owner")
    yield moved("b", "a")
    yield moved("b", "b")
    yield opened("elsewhere", EXCLUSIVE, "b")
    yield opened("stale", WAIT, "b", topic_epoch=1, timeout=SHORT)
    yield opened("shared", SHARED, "b")
    yield opened("there", SHARED, "a")
    yield moved("a", "b", producer="nobody")
    yield moved("a", "b")


def ends(*before: Call, between: Sequence[Call] = ()) -> Calls:
    """Rule G8: a topic that is terminated ends all who have it or wait for it."""
    yield from before
    for call in before:
        yield Call("send", call.label)
    yield from between
    yield Call("terminate", "", {"engine": "b", "topic": "one"})
    for mode in MODES:
        yield opened(f"late {mode}", mode, "b")
    for call in before:
        yield Call("send", call.label)
        yield Call("send_many", call.label, {"count": 2})
        yield Call("flush", call.label)
    yield moved("b", "b")
    yield Call("terminate", "", {"engine": "a", "topic": "one"})
    for call in before:
        yield Call("close", call.label)


LISTED: dict[str, Callable[[], Calls]] = {
    **{
        f"{mode}, {state}": lambda state=state, mode=mode: access(state, mode)  # type: ignore[misc]
        for state in STATES
        for mode in MODES
    },
    **{
        f"epochs, {mode}": lambda mode=mode: epochs(mode)  # type: ignore[misc]
        for mode in (EXCLUSIVE, WAIT, FENCING)
    },
    **{
        f"many, {mode}, {state}": lambda state=state, mode=mode: many(state, mode)  # type: ignore[misc]
        for state in ("free", "shared", "owned and awaited")
        for mode in (SHARED, EXCLUSIVE, FENCING)
    },
    "many, ends": many_ends,
    "names": names,
    "queue": queue,
    "namesakes": namesakes,
    "reserved": reserved,
    "stale waiters": stale_waiters,
    "fencing": fencing,
    "settling": settling,
    "claims": claims,
    "several claims": several_claims,
    "groups": groups,
    "locks": locks,
    "several groups": several_groups,
    "moves": moves,
    "unknown": unknown,
    **{
        f"ends, {state}": lambda state=state: ends(*STATES[state])  # type: ignore[misc]
        for state in STATES
    },
    "ends, reserved": lambda: ends(between=[moved("a", "b")]),
    "ends, moved": lambda: ends(opened("o"), between=[moved("b", "b")]),
}


def followed() -> Calls:
    """Rule E2: a producer sends on where its topic is, back and forth, and ends there."""
    yield opened("owner", priority=2, properties={"at": "x"})
    yield Call("send", "owner")
    for here, there in (("a", "b"), ("b", "a"), ("a", "b")):
        yield moved(here, there)
        yield Call("send", "owner")
        yield Call("send_many", "owner", {"count": 2})
        yield Call("flush", "owner")
    yield opened("late", EXCLUSIVE, "b")
    yield opened("stale", EXCLUSIVE, "b", topic_epoch=1)
    yield opened("shared", SHARED, "a")
    yield waiting("waiter", "a")
    yield Call("close", "owner")
    yield Call("send", "waiter")


def followed_to_a_waiter() -> Calls:
    """The topic goes to a waiter of the destination: its session is shared with the follower."""
    yield opened("owner")
    yield waiting("standby", "b")
    yield moved("b", "b")
    yield Call("send", "owner")
    yield Call("send", "standby")
    yield Call("close", "standby")
    yield Call("send", "owner")
    yield opened("next")


def followed_and_fenced() -> Calls:
    """A follower is fenced where it has gone, and one whose topic has gone on without it."""
    yield opened("owner")
    yield moved("a", "b")
    yield Call("send", "owner")
    yield opened("rival", FENCING, "a")
    yield Call("send", "owner")
    yield moved("b", "b")
    yield opened("third", FENCING, "a")
    yield Call("send", "rival")
    yield Call("close", "rival")
    yield Call("send", "third")
    yield Call("terminate", "", {"engine": "b", "topic": "one"})
    yield Call("send", "third")


FOLLOWED: dict[str, Callable[[], Calls]] = {
    **{
        f"moves{text}": lambda calls=calls: calls()  # type: ignore[misc]
        for text, calls in (
            ("", moves),
            (", back and forth", followed),
            (", to a waiter", followed_to_a_waiter),
            (", and fenced", followed_and_fenced),
        )
    },
    "ends, moved": LISTED["ends, moved"],
}


# ---- the tests ---------------------------------------------------------------------------


@pytest.fixture
def both(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    """A local log, and a cluster in memory. `follow` is a parameter of the test, if it has one.
    Producers that do not send stay where they are: no time decides when they follow."""
    idle_producers_stay(monkeypatch)
    follow = "follow" in request.fixturenames and request.getfixturevalue("follow")
    with pair(str(tmp_path / "log"), f"memory://{tmp_path}/cluster", follow) as both:
        yield both


@pytest.mark.every
@pytest.mark.rule(
    "A1", "A5", "A6", "B5", "B6", "D1", "D7", "E5", "F1", "F2", "F3", "F4", "F6", "G8"
)
@pytest.mark.parametrize("program", LISTED)
def test_both_backends_decide_and_say_the_same(both: Pair, program: str) -> None:
    watched, told = ([], []) if program == "unknown" else (WATCHED, TOLD)  # they create topics
    both.make(*watched, *LISTED[program](), *told, *CHANGES)


@pytest.mark.rule("E2")
@pytest.mark.parametrize("follow", [True])
@pytest.mark.parametrize("program", FOLLOWED)
def test_producers_follow_alike(both: Pair, program: str, follow: bool) -> None:
    both.make(*WATCHED, *FOLLOWED[program](), *TOLD, *CHANGES)


def test_the_listed_calls_are_many() -> None:
    assert sum(len(list(calls())) for calls in LISTED.values()) >= 200


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_calls_have_the_same_outcomes(both: Pair, seed: int, follow: bool) -> None:
    both.make(*WATCHED, *random_calls(seed, 40), *TOLD, *CHANGES)


@pytest.mark.long
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_random_calls_have_the_same_outcomes(both: Pair, seed: int, follow: bool) -> None:
    both.make(*WATCHED, *random_calls(seed, 60), *TOLD, *CHANGES)


@pytest.mark.broker
@pytest.mark.parametrize(
    "program",
    ["shared, shared", "names", "queue", "fencing", "moves", "several claims", "several groups"],
)
def test_a_broker_decides_and_says_the_same(
    tmp_path: Path, namespace: Namespace, program: str
) -> None:
    given = {"admin": namespace.admin, "token": namespace.token}
    with pair(str(tmp_path / "log"), namespace.url, **given) as both:
        both.make(*LISTED[program]())


def test_a_difference_is_found(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one word, in the text of one backend's error."""
    calls = list(access("owned", EXCLUSIVE))
    normal = both.second.normal
    monkeypatch.setattr(both.second, "normal", lambda text: normal(text).replace("takes", "has"))
    with pytest.raises(Different, match="not free for an exclusive producer"):
        both.make(*calls)
