"""Torture of the cluster engine: processes on two topics, two claims and a shared map.

The processes send, read, hand topics over and claim resources. They are killed, stopped and
continued; the broker is killed and started again; connections are
reset, ended in one direction, and slowed down. What the judges say of a local log, they say here:
nothing acknowledged is lost or twice, nothing stale counts, epochs never decrease, offsets are
dense, reads agree with the log, and the map is linearizable. A claim is not valid once a later one
was granted, and generations rise.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import exclusivelog as xl
from proof.cluster_players import STORED, Claimed, map_calls, read_actions
from proof.fork_server import Forked, fork_server
from proof.linearizability import Call, check_per_key
from proof.map_clients import KEYS, frozen
from proof.report import Figure
from proof.sizes import Size
from proof.traffic import TOPICS, Record, read_notes
from testing.broker import Broker, Namespace, missing
from testing.judges import ACKNOWLEDGED, REFUSED, about, judge, read_rows
from testing.processes import until
from testing.proxy import HIDDEN, Proxy, behind

ON_TOPICS, ON_MAP = 4, 2  # processes
STOPS = (0.01, 0.1, 1.0, 3.0)  # seconds
JUDGE_SECONDS = 90.0  # until the judge has the topic; the owner may be dead
START_SECONDS = END_SECONDS = 120.0
CALM_SECONDS = 3.0  # without faults, at the end

# How often each fault comes, of 100.
FAULTS = {
    "kill": 20,
    "stop": 20,
    "cut": 22,
    "cut_all": 4,
    "half_close": 18,
    "delay": 14,
    "broker": 2,
}
CONTROL_FAULTS = {"kill": 30, "cut": 10}


# ---- the broker and its clients ----------------------------------------------------------


@contextlib.contextmanager
def broker_behind() -> Iterator[tuple[Broker, Proxy]]:
    """A broker of its own, whose clients all come through a proxy."""
    with tempfile.TemporaryDirectory(prefix="broker-", ignore_cleanup_errors=True) as folder:
        broker = Broker(Path(folder), HIDDEN)
        with behind(broker) as proxy:
            try:
                broker.start()
                yield broker, proxy
            finally:
                broker.kill()


@dataclass
class Storm:
    """The processes on one namespace, and what is done to them."""

    path: Path  # of the notes
    broker: Broker
    proxy: Proxy
    namespace: Namespace
    dice: random.Random
    on_topic: Callable[..., Forked]
    on_map: Callable[..., Forked]
    defect: str = ""
    topics: list[Forked] = field(default_factory=list)
    maps: list[Forked] = field(default_factory=list)
    started: int = 0
    done: Counter[str] = field(default_factory=Counter)
    away_until: float = 0.0  # the broker was killed, and may not be back

    @property
    def over(self) -> Path:
        """Its existence ends the processes on the map."""
        return self.path / "over"

    def start(self, on_map: bool) -> None:
        """One process more."""
        self.started += 1
        here = self.namespace.url, self.namespace.admin
        stderr = self.path / f"stderr-{self.started}.txt"
        if on_map:
            notes = self.path / f"map-{self.started}"
            self.maps.append(self.on_map(stderr, *here, str(notes), self.started, str(self.over)))
        else:
            notes, seed = self.path / f"notes-{self.started}.jsonl", self.dice.randrange(1 << 30)
            self.topics.append(self.on_topic(stderr, *here, str(notes), seed, self.defect))

    def all_began(self) -> bool:
        """Has each process noted something?"""
        noted = [*self.path.glob("notes-*"), *self.path.glob("map-*")]
        return len(noted) >= ON_TOPICS + ON_MAP

    def go_on(self, faults: int, weights: dict[str, int], pause: float) -> None:
        """Do so many things to them, one each `pause` seconds on average."""
        while self.done.total() < faults:
            time.sleep(self.dice.random() * 2 * pause)
            [kind] = self.dice.choices(list(weights), list(weights.values()))
            if getattr(self, f"_{kind}")():
                self.done[kind] += 1

    # ---- the faults ----------------------------------------------------------------------

    def _crew(self) -> list[Forked]:
        return self.dice.choice((self.topics, self.topics, self.maps)) or self.topics

    def _kill(self) -> bool:
        crew = self._crew()
        crew.pop(self.dice.randrange(len(crew))).close()
        self.start(crew is self.maps)
        return True

    def _stop(self) -> bool:
        process = self.dice.choice(self._crew())
        process.signal(signal.SIGSTOP)
        time.sleep(self.dice.choice(STOPS))
        process.signal(signal.SIGCONT)
        return True

    def _cut(self) -> bool:
        return self.proxy.cut()

    def _cut_all(self) -> bool:
        return self.proxy.cut_all()

    def _half_close(self) -> bool:
        return self.proxy.half_close()

    def _delay(self) -> bool:
        return self.proxy.delay(self.dice.choice((0.01, 0.05, 0.3)), self.dice.random() * 3)

    def _broker(self) -> bool:
        if time.monotonic() < self.away_until:
            return False
        self.broker.kill()
        self.broker.start(wait=False)
        self.away_until = time.monotonic() + 60
        return True

    def end(self) -> None:
        """Let the map's processes end, and kill all others."""
        self.broker.await_ready()
        time.sleep(CALM_SECONDS)
        self.over.touch()
        deadline = time.monotonic() + END_SECONDS
        while any(each.alive for each in self.maps) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill_all()

    def kill_all(self) -> None:
        """End all processes."""
        for crew in (self.topics, self.maps):
            while crew:
                crew.pop().close()

    # ---- what they noted -----------------------------------------------------------------

    def tracebacks(self) -> list[str]:
        """What a process died of by itself; errors of callbacks are in its log only."""
        texts = [errors.read_text() for errors in self.path.glob("stderr-*.txt")]
        return [text.strip().splitlines()[-1] for text in texts if "in _live" in text]

    def map_history(self) -> list[Call]:
        """All calls of the map."""
        found: list[Call] = []
        for path in self.path.glob("map-*"):
            found += map_calls(path, int(path.name.removeprefix("map-")))
        return found


# ---- the judges --------------------------------------------------------------------------


def judge_topics(namespace: Namespace, record: Record) -> Iterator[str]:
    """Every broken rule of the topics, compared with what was noted."""
    with xl.open(namespace.url, "judge", admin=namespace.admin) as engine:
        for name in TOPICS:
            topic = engine.topic(name)
            with topic.producer("exclusive_with_fencing") as producer:
                rows = read_rows(topic)
                for broken in judge(rows, record.calls[name], record.reads[name]):
                    yield f"{name}: {broken}"
                if (offset := producer.send(b"after")) != len(rows):
                    yield f"{name}: G5 at offset {offset}: it should be {len(rows)}"
            epochs = [event.epoch for event in engine.history(name) if event.kind == "grant"]
            if epochs != sorted(set(epochs)):
                yield f"{name}: B1: epochs were granted in the order {epochs}"


def judge_claims(seen: Iterable[Claimed]) -> Iterator[str]:
    """Every broken rule of the claims: each generation has one claim, later claims have higher
    generations, and none is valid once a later one was granted."""
    granted: dict[tuple[str, int], Claimed] = {}
    for each in (claim for claim in seen if claim.kind == "granted"):
        if (each.resource, each.generation) in granted:
            yield f"F2: {each.resource}: generation {each.generation} was granted twice"
        granted[each.resource, each.generation] = each
    for one in seen:
        for other in granted.values():
            later = other.resource == one.resource and other.generation > one.generation
            if later and other.ended < one.begun:
                yield f"F5: {one} came after {other}"


def judge_map(namespace: Namespace, calls: list[Call]) -> Iterator[str]:
    """Every broken rule of the map."""
    with xl.open(namespace.url, "judge", admin=namespace.admin) as engine:
        shared: xl.SharedMap[str, Any] = xl.SharedMap(engine.topic("map"))
        now = time.monotonic_ns()
        found = {key: shared.get(key, latest=True) for key in KEYS}
        shared.close()
    end = time.monotonic_ns()
    calls += [Call(-1, "get", key, None, frozen(found[key]), now, end) for key in KEYS]
    if (failure := check_per_key(calls)) is not None:
        yield f"I2: {failure}"


# ---- the instrument ----------------------------------------------------------------------


def torture(
    where: Path,
    broker: Broker,
    proxy: Proxy,
    faults: int,
    seed: int,
    defect: str = "",
    weights: dict[str, int] = FAULTS,
    pause: float = 0.5,
) -> Figure:
    """Let processes do what they like, do so many things to them, and judge what is left."""
    figure, namespace = Figure("cluster torture"), Namespace.make(broker.url, broker.admin)
    with (
        fork_server("proof.cluster_players:play") as on_topic,
        fork_server("proof.cluster_players:play_map") as on_map,
    ):
        storm = Storm(
            where, broker, proxy, namespace, random.Random(seed), on_topic, on_map, defect
        )
        try:
            for number in range(ON_TOPICS + ON_MAP):
                storm.start(number >= ON_TOPICS)
            until(storm.all_began, START_SECONDS)
            storm.go_on(faults, weights, pause)
            storm.end()
        finally:
            storm.kill_all()
    _judge(figure, storm)
    if figure.broken:
        figure.notes.append(f"seed {seed}")
    return figure


def _judge(figure: Figure, storm: Storm) -> None:
    record, calls = read_notes(storm.path), storm.map_history()
    claims, moves = read_actions(storm.path)
    figure.count(
        faults=storm.done.total(),
        **{f"fault_{name}": n for name, n in storm.done.items()},
        operations=record.operations,
        acknowledged=record.count(ACKNOWLEDGED),
        stale_appends_tried=record.count(REFUSED, stale=True),
        map_calls=len(calls),
        calls_that_raised=len(record.errors),
        claims=len(claims),
        hand_overs=sum(state in ("owned", "assigned") for state in moves),
        hand_overs_that_failed=sum(state not in ("owned", "assigned") for state in moves),
    )
    figure.broken += [*record.trouble, *storm.tracebacks(), *judge_claims(claims)]
    try:
        figure.broken += judge_topics(storm.namespace, record)
        figure.broken += judge_map(storm.namespace, calls)
    except xl.ExclusiveLogError as error:
        figure.broken.append(f"H1: {type(error).__name__}: {error}")
    figure.count(
        lost=about(figure.broken, "H1"),
        stale_accepted=about(figure.broken, "B3"),
        duplicated=about(figure.broken, "G2"),
    )
    figure.notes += [f"{n} x {text}" for text, n in _kinds(record.errors).most_common(8)]


def _kinds(errors: list[str]) -> Counter[str]:
    """The errors that calls have raised, without names and numbers."""
    return Counter(re.sub(r"[0-9a-f]{4,}|\d+|'[^']*'", "#", text)[:160] for text in errors)


def torture_figure(size: Size, where: Path) -> Figure:
    """Random traffic and faults; the control acknowledges what the broker has stored."""
    if reason := missing():
        return Figure("cluster torture", skipped=reason)
    seed = random.randrange(1 << 30)
    with broker_behind() as (broker, proxy):
        sound, control = where / "sound", where / "control"
        sound.mkdir()
        control.mkdir()
        figure = torture(sound, broker, proxy, size.cluster_faults, seed)
        if size.controlled:
            red = torture(control, broker, proxy, 10, seed, STORED, CONTROL_FAULTS)
            figure.controls["acknowledged when the broker has stored it, without the rule"] = bool(
                about(red.broken, "H1", "B9")
            )
    return figure
