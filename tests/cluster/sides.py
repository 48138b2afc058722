"""Two backends side by side: the same calls, and all that a caller sees of them.

A `Call` is a verb with arguments; a `Side` is one backend with two engines, which makes calls and
shows its outcomes and its `view`: holders, queues, states, results and notifications. A `Pair`
makes each call on both sides, and waits until both show the same.

Ids of engines are replaced by their names, times by a T, and the places by PLACE.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import exclusivelog as xl
from exclusivelog.types import AccessMode
from testing.processes import MODES, PATIENCE, WAIT, within

SHORT = 0.05  # seconds that a waiter waits for a topic that it does not get
SETTLED = 3600.0  # a settle delay that no test waits for
TOPICS = ("one", "two")
NAMES = ("p", "q", "r")
ENGINES = ("a", "b")
GROUPS = ("g", "h")


class Call(NamedTuple):
    """A call. `label` names what it makes, or the object that it is made on."""

    verb: str
    label: str = ""
    options: Mapping[str, Any] = {}

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.verb}({', '.join(filter(None, (self.label, options)))})"


class Lines(logging.Handler):
    """What is logged about who may write in one place."""

    EVENTS = ("granted", "lost", "released", "evicted", "hand_over", "claim", "terminated")
    NAMED = (
        *("event", "topic", "epoch", "reason", "engine", "producer", "mode", "rival"),
        *("step", "source", "target", "group", "resource", "generation", "offset"),
    )

    def __init__(self, ledger: str) -> None:
        super().__init__(logging.INFO)
        self.logged: list[str] = []
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        """Note the line, by its level and attributes."""
        facts = vars(record)
        if facts.get("ledger") == self._ledger and facts.get("event") in self.EVENTS:
            told = {name: str(facts.get(name)) for name in self.NAMED}
            self.logged.append(f"{record.levelname} {told}")


@dataclass
class Side:
    """One backend with two engines, and what was made there. `options` go to `xl.open`;
    `follow`, to its producers."""

    url: str
    follow: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engines = {name: xl.open(self.url, name=name, **self.options) for name in ENGINES}
        self.made: dict[str, Any] = {}
        self._heard: set[str] = set()
        self._lock = threading.Lock()
        self._lines = Lines(str(self.engines["a"].path))
        logger = logging.getLogger("exclusivelog")
        logger.addHandler(self._lines)
        self._level = logger.level
        logger.setLevel(logging.INFO)

    def close(self) -> None:
        """Close both engines, and with them all that they have made."""
        logger = logging.getLogger("exclusivelog")
        logger.setLevel(self._level)
        logger.removeHandler(self._lines)
        for engine in self.engines.values():
            engine.close()

    # ---- calls ---------------------------------------------------------------------------

    def make(self, call: Call) -> object:
        """Make the call; what its caller sees of the result, or of the error."""
        function = getattr(self, f"_{call.verb}")
        if call.verb not in MAKES and call.label and call.label not in self.made:
            return "nothing was made"
        return self.outcome(lambda: function(call.label, **call.options))

    def outcome(self, function: Callable[[], object]) -> object:
        """What a caller sees of a result, or of an error."""
        try:
            return self.seen(within(function))
        except (xl.ExclusiveLogError, ValueError, TypeError, AttributeError) as error:
            return self.error(error)

    def _open(self, label: str, engine: str, topic: str, mode: str, **options: Any) -> object:
        made = self._topic(engine, topic).producer(mode, **options, **self._callbacks(label))
        self.made[label] = made
        return made

    def _open_many(self, label: str, engine: str, mode: str, **options: Any) -> object:
        """Open a producer on each topic at once; each is made with its topic's name behind the
        label."""

        def fenced(producer: xl.Producer, error: xl.ExclusiveLogError) -> None:
            named = f"{label} {producer.topic}"
            self._hear(named, "fenced", producer.name, self.error(error))

        options |= {"on_fenced": fenced, "follow": self.follow}
        made = self.engines[engine].producers(TOPICS, mode, **options)
        self.made |= {f"{label} {each.topic}": each for each in made}
        return made

    def _wait(self, label: str, engine: str, topic: str, **options: Any) -> None:
        """Begin to wait for a topic."""
        options = {"mode": WAIT, **options}
        mode = options.pop("mode")
        self.made[label] = self._topic(engine, topic).producer_async(
            mode, **options, **self._callbacks(label)
        )

    def _own(
        self,
        label: str,
        engine: str,
        group: str,
        resource: str,
        wanted: Any = None,
        others: Mapping[str, int | None] | None = None,
    ) -> object:
        def lost(claim: xl.Claim, error: xl.ExclusiveLogError) -> None:
            self._hear(label, "lost", self.error(error))

        made = self.engines[engine].own(group, {resource: wanted, **(others or {})}, on_lost=lost)
        self.made[label] = made
        return made

    def _read(self, label: str, engine: str, topic: str, group: str) -> None:
        """Open a reader of a group."""
        self.made[label] = self._topic(engine, topic).reader(group=group)

    def _read_all(self, label: str, engine: str, group: str) -> None:
        """Open a reader of a group on all topics."""
        for topic in TOPICS:
            self._topic(engine, topic)
        self.made[label] = self.engines[engine].reader(TOPICS, group=group)

    def _role(self, label: str, engine: str, mode: str, **options: Any) -> None:
        """Ask for a lock, and have that wait if the mode does, and it has no timeout."""

        def lost(role: xl.Role, error: xl.ExclusiveLogError) -> None:
            self._hear(label, "lost", role.name, self.error(error))

        made = self.engines[engine].role_async("job", access_mode=mode, on_lost=lost, **options)
        self.made[label] = made
        if mode != WAIT or "timeout" in options:
            self.made[label] = made.result()

    def _check(self, label: str) -> None:
        made = self.made[label]
        (made.result(PATIENCE) if hasattr(made, "result") else made).claim.check()

    def _hand_over(self, label: str, to: str) -> object:
        made = self.made[label]
        role = made.result(PATIENCE) if hasattr(made, "result") else made
        move = role.hand_over(to=self.engines[to].id, timeout=PATIENCE)
        return move.ok, move.state, self.normal(move.reason), move.epoch

    def _roles(self, _: str, engine: str) -> object:
        return [
            (each.name, each.epoch, self.seen(each.holder), self.seen(each.waiters), each.topics)
            for each in self.engines[engine].roles()
        ]

    def _take(self, label: str) -> object:
        found = self.made[label].read_next(0)
        return (found[0], found[1].value) if isinstance(found, tuple) else found.value

    def _commit(self, label: str) -> None:
        self.made[label].commit()

    def _cancel(self, label: str) -> object:
        return self._if_future(label, lambda future: future.cancel())

    def _if_future(self, label: str, function: Callable[[Any], object]) -> object:
        made = self.made[label]
        return function(made) if hasattr(made, "cancel") else None

    def _send(self, label: str, **options: Any) -> object:
        return self.producer(label).send(b"x", **options)

    def _send_many(self, label: str, count: int) -> object:
        return self.producer(label).send_many([b"x"] * count)

    def _flush(self, label: str) -> object:
        return self.producer(label).flush()

    def _set_priority(self, label: str) -> None:
        self.producer(label).priority = 1

    def _close(self, label: str) -> None:
        """Close a producer or reader, or cancel a request that has no outcome; release a claim."""
        made = self.made.pop(label)
        if isinstance(made, xl.Claim):
            made.release()
            return
        if hasattr(made, "cancel"):
            if made.cancel() or made.exception() is not None:
                return
            made = made.result()
        made.close()

    def producer(self, label: str) -> Any:
        """What a label stands for, once it is granted."""
        made = self.made[label]
        return made.result(0) if hasattr(made, "cancel") and made.done() else made

    def _unload(self, _: str, engine: str, topics: Any, to: str, **options: Any) -> object:
        return self.engines[engine].unload(topics, to=self.engines[to].id, **options)

    def _cancel_unload(self, _: str, engine: str, topics: Any) -> object:
        return self.engines[engine].cancel_unload(topics)

    def _terminate(self, _: str, engine: str, topic: str) -> object:
        return self._topic(engine, topic).terminate()

    def _claims(self, _: str, engine: str, group: str | None = None) -> object:
        return self.engines[engine].claims(group)

    def _groups(self, _: str, engine: str) -> object:
        return [
            (each.group, each.topic, each.position, each.lag, self.seen(each.reader))
            for each in self.engines[engine].groups()
        ]

    def _delete_group(self, _: str, engine: str, group: str) -> object:
        return self.engines[engine].delete_group(group)

    def _history(self, _: str, engine: str, group: str) -> object:
        """The changes of a group's claims."""
        return [
            (
                each.kind,
                each.reason,
                each.resource,
                each.generation,
                each.source and each.source["engine_name"],
                each.target and each.target["engine_name"],
            )
            for each in self.engines[engine].history(group=group)
        ]

    def _find(self, _: str, engine: str, topic: str, create: bool = False) -> object:
        return self.engines[engine].topic(topic, create=create).name

    def _begin(self, _: str, engine: str, topic: str, start: Any) -> object:
        """The position of a reader that starts there."""
        return self._topic(engine, topic).reader(start).position

    def _changes(self, _: str, engine: str, topic: str) -> object:
        """Who has owned a topic, and why it was granted and lost (rule E5)."""
        return self._owners(self.engines[engine].history(topic))

    def _watch(self, label: str, engine: str, topic: str, **options: Any) -> None:
        """Watch who owns a topic."""
        self.made[label] = self._topic(engine, topic).watch_owner(**options)

    def _told(self, label: str) -> object:
        """What a watch has told since it was asked last."""
        return self._owners(self.made[label].follow(timeout=0))

    def _owners(self, events: Iterable[xl.Event]) -> object:
        return [
            (each.kind, each.reason, each.epoch, each.priority, *map(self._party, parties))
            for each in events
            for parties in [(each.source, None if each.kind == "release" else each.target)]
        ]

    def _party(self, party: Mapping[str, Any] | None) -> object:
        return party and (party["engine_name"], self.normal(party["producer"]))

    def _topic(self, engine: str, topic: str) -> xl.Topic:
        return self.engines[engine].topic(topic)

    # ---- notifications -------------------------------------------------------------------

    def _callbacks(self, label: str) -> dict[str, Any]:
        def fenced(producer: xl.Producer, error: xl.ExclusiveLogError) -> None:
            self._hear(label, "fenced", producer.name, self.error(error))

        def wanted(producer: xl.Producer) -> None:
            self._hear(label, "wanted", producer.name)

        return {"on_fenced": fenced, "on_wanted": wanted, "follow": self.follow}

    def _hear(self, *what: object) -> None:
        with self._lock:
            self._heard.add(repr(what))

    # ---- what is seen --------------------------------------------------------------------

    def normal(self, text: str) -> str:
        """A text without what differs from place to place and from run to run."""
        for name, engine in self.engines.items():
            text = text.replace(engine.id, f"ID-{name}")
        text = text.replace("; producer= moves one of them", "")  # a cluster cannot do that (J3)
        text = re.sub(r"since \S+ \S+ UTC", "since T", text)
        text = re.sub(r"\b(producer-[0-9a-f]{16}|[ab]-\d+)\b", "UNNAMED", text)
        return text.replace(self.url.rstrip("/"), "PLACE")

    def error(self, error: BaseException) -> object:
        """An error's type, text, holder and successor, and whether to try again helps."""
        return (
            type(error).__name__,
            self.normal(str(error)),
            self.seen(getattr(error, "holder", None)),
            self.seen(getattr(error, "successor", None)),
            getattr(error, "retriable", None),
            getattr(error, "maybe_written", None),
        )

    def seen(self, found: object) -> object:
        """What a caller sees of a result."""
        if isinstance(found, xl.Producer):
            return (
                found.name,
                found.topic_epoch,
                str(found.access_mode),
                found.last_sequence_id,
                found.priority,
            )
        if isinstance(found, xl.Role):
            return found.name, found.epoch, found.claim.is_valid
        if isinstance(found, xl.Claim):
            return dict(found.generations), found.is_valid
        if isinstance(found, xl.OwnerInfo | xl.WaiterInfo):
            mode, epoch = getattr(found, "access_mode", None), getattr(found, "epoch", None)
            return (
                self.normal(found.producer_name),
                self.normal(found.engine_id),
                found.engine_name,
                found.pid,
                found.priority,
                mode and str(AccessMode(mode)),
                epoch,
                dict(found.properties),
            )
        if isinstance(found, xl.ClaimInfo):
            return (
                found.group,
                dict(found.generations),
                found.engine_name,
                found.pid,
                self.normal(found.engine_id),
                found.reader,
            )
        if isinstance(found, xl.EngineInfo):
            return found.name
        if isinstance(found, xl.Move):
            return (
                found.topic,
                found.epoch,
                found.state,
                self.normal(found.reason),
                self.seen(found.source),
                self.seen(found.target),
                found.producer,
            )
        if isinstance(found, list | tuple):
            return [self.seen(each) for each in found]
        return found

    def view(self) -> dict[str, object]:
        """All that can be seen by now."""
        found: dict[str, object] = {}
        for name in TOPICS:
            topic = self._topic("a", name)
            found[f"topic {name}"] = (
                topic.epoch,
                topic.next_offset,
                self.seen(topic.holders),
                self.seen(topic.owner),
                self.seen(topic.waiters),
                topic.transfer and topic.transfer.state,
            )
        for label, made in sorted(self.made.items()):
            found[label] = self.outcome(lambda made=made: self._state(made))
        found["claims"] = self.seen(
            sorted(
                self.engines["b"].claims(),
                key=lambda claim: (claim.group, sorted(claim.generations)),
            )
        )
        with self._lock:
            found["heard"] = sorted(self._heard)
        found["logged"] = sorted(self.normal(line) for line in list(self._lines.logged))
        return found

    def knows_its_grants(self) -> bool:
        """No future is still without the outcome that its request has in the log."""
        futures = [made for made in self.made.values() if hasattr(made, "cancel")]
        pending = [future for future in futures if not future.done()]
        waiters = [waiter for name in TOPICS for waiter in self._topic("a", name).waiters]
        if len(pending) > len(waiters):
            waiters += [waiter for role in self.engines["a"].roles() for waiter in role.waiters]
        return len(pending) <= len(waiters)

    def has_told_its_losses(self) -> bool:
        """No callback is still to come for what is lost: after a close, it may not come at all."""
        with self._lock:
            heard = set(self._heard)
        return all(
            any(each.startswith(told) for each in heard)
            for told in map(self._loss, list(self.made))
            if told is not None
        )

    def _loss(self, label: str) -> str | None:
        """The beginning of what is heard of the loss of what was made; None if it is not lost."""
        made = self.made[label]
        if hasattr(made, "cancel"):
            if not made.done() or made.cancelled() or made.exception() is not None:
                return None
            made = made.result(0)
        if isinstance(made, xl.Producer):
            return repr((label, "fenced"))[:-1] if made.state in ("fenced", "moved") else None
        claim = made.claim if isinstance(made, xl.Role) else made
        lost = isinstance(claim, xl.Claim) and not claim.is_valid
        return repr((label, "lost"))[:-1] if lost else None

    def _state(self, made: Any) -> object:
        if isinstance(made, xl.Claim):
            return made.is_valid
        if isinstance(made, xl.OwnerWatch):
            return "watches"
        if isinstance(made, xl.Reader):
            return made.position
        if isinstance(made, xl.GroupReader):
            return dict(made.positions)
        if hasattr(made, "cancel"):
            if not made.done() or made.cancelled():
                return made.done()
            made = made.result(0)
        return str(made.state), self.seen(made)


MAKES = ("open", "open_many", "wait", "own", "read", "read_all", "role", "watch")


class Different(AssertionError):
    """The two sides do not show the same."""


class Pair:
    """Two backends, `first` and `second`, that are given the same calls."""

    def __init__(self, first: Side, second: Side) -> None:
        self.first, self.second = first, second
        self.calls: list[Call] = []

    def make(self, *calls: Call) -> None:
        """Make these calls on both; Different if the outcomes, or what is seen after each, do not
        become the same. Each is made when all have seen the outcomes of those before it."""
        for call in calls:
            self.calls.append(call)
            outcomes = self.first.make(call), self.second.make(call)
            if outcomes[0] != outcomes[1]:
                raise self._different(str(call), *outcomes)
            self._compare_views()

    def _compare_views(self) -> None:
        deadline, pause = time.monotonic() + PATIENCE, 0.0005
        while (first := self.first.view()) != (second := self.second.view()) or not (
            self.first.knows_its_grants()
            and self.second.knows_its_grants()
            and self.first.has_told_its_losses()
            and self.second.has_told_its_losses()
        ):
            if time.monotonic() > deadline:
                unlike = [
                    what for what in {**first, **second} if first.get(what) != second.get(what)
                ]
                what = unlike[0] if unlike else "a grant or a loss that was not told"
                a, b = first.get(what), second.get(what)
                if isinstance(a, list) and isinstance(b, list):
                    a, b = [x for x in a if x not in b], [x for x in b if x not in a]
                raise self._different(what, a, b)
            time.sleep(pause := min(0.01, 2 * pause))

    def _different(self, what: str, first: object, second: object) -> Different:
        calls = "\n  ".join(map(str, self.calls))
        return Different(f"after\n  {calls}\n{what}:\n  {first}\n  {second}")


@contextlib.contextmanager
def pair(first: str, second: str, follow: bool = False, **options: Any) -> Iterator[Pair]:
    """A pair of backends at these places; `options` are for the second. `follow`: producers go on
    after a hand-over within this process."""
    with contextlib.ExitStack() as closing:
        sides = []
        for url, given in ((first, {}), (second, options)):
            side = Side(url, follow, given)
            closing.callback(side.close)
            sides.append(side)
        yield Pair(*sides)


# ---- random calls ------------------------------------------------------------------------


def random_calls(seed: int, count: int) -> Iterator[Call]:
    """Calls that any backend must answer alike, chosen by this number."""
    choose = random.Random(seed)
    labels: list[str] = []
    for number in range(count):
        verb = choose.choices([each for each, _ in WEIGHTS], [weight for _, weight in WEIGHTS])[0]
        options = OPTIONS[verb](choose)
        if verb in MAKES:
            labels.append(f"{verb}{number}")
            yield Call(verb, labels[-1], options)
        elif verb in ("unload", "cancel_unload", "claims"):
            yield Call(verb, "", options)
        elif labels:
            label = choose.choice(labels[-6:])  # most of the others are gone
            yield Call(verb, label, options)


def _some(choose: random.Random, **choices: Sequence[object]) -> dict[str, object]:
    """One of each; an argument whose choice is None is left out."""
    chosen = {name: choose.choice(each) for name, each in choices.items()}
    return {name: value for name, value in chosen.items() if value is not None}


def _request(choose: random.Random) -> dict[str, object]:
    return _some(
        choose,
        engine=ENGINES,
        topic=TOPICS,
        name=NAMES,
        priority=(None, 0, 3, -2),
        topic_epoch=(None, None, None, None, 0, 1, 2, 3),
        properties=(None, None, {"at": "x"}),
    )


def _opening(choose: random.Random) -> dict[str, object]:
    mode = choose.choice(MODES)
    timeout = {"timeout": choose.choice((0, SHORT))} if mode == WAIT else {}
    return {**_request(choose), "mode": mode, **timeout}


OPTIONS: dict[str, Callable[[random.Random], Mapping[str, Any]]] = {
    "open": _opening,
    "wait": _request,
    "own": lambda choose: _some(
        choose,
        engine=ENGINES,
        group=GROUPS,
        resource=("x", "y"),
        wanted=(None, None, 0, 1, 2, 5),
        others=(None, None, {"z": None}, {"z": 3, "w": None}),
    ),
    "send": lambda choose: _some(choose, sequence_id=(None, None, None, 3, 9)),
    "send_many": lambda choose: _some(choose, count=(0, 1, 3)),
    "unload": lambda choose: _some(
        choose, engine=ENGINES, topics=TOPICS, to=ENGINES, timeout=(PATIENCE,)
    ),
    "cancel_unload": lambda choose: _some(choose, engine=ENGINES, topics=TOPICS),
    "claims": lambda choose: _some(choose, engine=ENGINES, group=(None, *GROUPS)),
    **dict.fromkeys(("close", "cancel", "flush", "set_priority"), lambda choose: {}),
}
WEIGHTS = (
    ("open", 30),
    ("wait", 12),
    ("close", 24),
    ("send", 14),
    ("send_many", 3),
    ("own", 8),
    ("cancel", 3),
    ("unload", 4),
    ("cancel_unload", 2),
    ("flush", 2),
    ("set_priority", 1),
    ("claims", 1),
)
