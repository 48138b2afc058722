"""The traffic of processes on a cluster engine, and their notes of it.

`play` is a process on the topics, `play_map` one on a shared map. Both are those of the torture on
one machine, except that the connection to the broker is disturbed, so that a call may end with an
error and an unknown outcome. Then the process continues under another name, because such a send may
enter the log after its next one.

Between sends, a process hands topics over to random engines, and claims resources; it notes its
observations of claims, too (`Claimed`).

Stale appends bypass the library: frames with the epoch of a session that was fenced are appended to
the Pulsar topic directly, and claims that have ended are appended to the log of their group again.
The rules must not count them.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import exclusivelog as xl
from exclusivelog.cluster import claimed
from exclusivelog.cluster.claiming import log_name
from exclusivelog.cluster.frames import Content, Frame, encode
from exclusivelog.cluster.ordered import Answer, OrderedLog
from proof import map_clients, traffic
from proof.linearizability import UNKNOWN, Call
from proof.map_clients import frozen, made
from proof.traffic import PATIENCE, TIMEOUTS, TOPICS, Notes

# A deliberate defect: a message is acknowledged when the broker has stored it, whatever the
# fencing rule says.
STORED = "stored"
AGAIN_SECONDS = 0.3  # after an error, before the engine is opened again
FOR_EVER = 1 << 62

# What a call may raise while the broker is away.
AWAY = (xl.ClusterError, xl.LedgerIOError, xl.WaitTimeoutError, xl.EngineClosedError)
REFUSED = (xl.ProducerBusyError, xl.ProducerFencedError)
GROUP, RESOURCES = "crew", ("crane", "lock")
MOVED_WITHIN = (0.1, 0.5, 2.0)  # seconds; the deadline of a hand-over


# ---- claims ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claimed:
    """The observation of a claim by a call from `begun` to `ended` (ns of the monotonic clock):
    this generation was granted, or was valid."""

    kind: str  # "granted" or "valid"
    resource: str
    generation: int
    begun: int
    ended: int


class Actions:
    """A file of one process beside its notes: what it saw of its claims, and how its hand-overs
    ended."""

    def __init__(self, notes: str) -> None:
        path = Path(notes)
        self._path = path.with_name(path.name.replace("notes-", "actions-"))

    def write(self, **facts: object) -> None:
        """One line."""
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def read_actions(directory: Path) -> tuple[list[Claimed], list[str]]:
    """What all processes saw of their claims, and the states of their hand-overs. The last line of
    one that was killed may be cut off."""
    claims, moves = [], []
    for path in directory.glob("actions-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            facts = json.loads(line) if line.endswith("\n") else {}
            if "move" in facts:
                moves.append(facts["move"])
            elif facts:
                claims.append(Claimed(**facts))
    return claims, moves


# ---- on the topics -----------------------------------------------------------------------


@dataclass
class Player(traffic.Player):
    """One process on the topics."""

    raw: dict[str, OrderedLog] = field(default_factory=dict)
    unknown: int = 0  # sends
    actions: Actions | None = None

    def step(self) -> None:
        """Open a producer, use it, and leave it, one way or another."""
        chance = self.rng.random()
        if chance < 0.2:
            self.claim()
        elif chance < 0.35:
            self.hand_over(self.engine.topic(self.rng.choice(TOPICS)))
        topic = self.engine.topic(self.rng.choice(TOPICS))
        self.look(topic)
        mode = self.rng.choice([*xl.AccessMode])
        try:
            producer = topic.producer(
                mode, priority=self.rng.randrange(5), timeout=self.rng.choice(TIMEOUTS)
            )
        except (*REFUSED, xl.WaitTimeoutError):
            return
        exclusive = mode != "shared"
        for _ in range(self.rng.randrange(1, 30)):
            if not self.send(topic, producer, exclusive):
                self.haunt(topic, producer, exclusive)
                break
        if self.rng.random() < 0.8:
            producer.close()  # else it is abandoned, and must not stay an owner

    def claim(self) -> None:
        """Claim some resources, see whether the claim is valid for a while, and release or drop it.
        Once it has ended, append its record again: it must not count."""
        chosen = self.rng.sample(RESOURCES, self.rng.randrange(1, len(RESOURCES) + 1))
        begun = time.monotonic_ns()
        claim = self.engine.own(GROUP, dict.fromkeys(chosen))
        ended = time.monotonic_ns()
        try:
            self._saw("granted", claim.generations, begun, ended)
        except xl.OwnershipLostError:  # by now
            return
        for _ in range(self.rng.randrange(4)):
            time.sleep(self.rng.random() * 0.1)
            begun = time.monotonic_ns()
            if not claim.is_valid:
                self._append_again(claim)
                return
            self._saw("valid", claim._session.generations, begun, time.monotonic_ns())
        if self.rng.random() < 0.7:
            claim.release()
            self._append_again(claim)

    def _saw(self, kind: str, generations: Mapping[str, int], begun: int, ended: int) -> None:
        assert self.actions is not None
        for resource, generation in generations.items():
            self.actions.write(**vars(Claimed(kind, resource, generation, begun, ended)))

    def _append_again(self, claim: xl.Claim) -> None:
        session: Any = claim._session
        self._raw(log_name(GROUP)).append(claimed.write(session.take))

    def hand_over(self, topic: xl.Topic) -> None:
        """Hand the topic over to any engine that lives, perhaps to this one."""
        assert self.actions is not None
        living = self.engine.engines()
        if not living:  # not even this one, while the broker is out of reach
            return
        target = self.rng.choice(living)
        try:
            [move] = topic.engine.unload(
                [topic.name], to=target.id, timeout=self.rng.choice(MOVED_WITHIN)
            )
        except (xl.LedgerError, xl.TopicNotFoundError) as error:
            if isinstance(error, AWAY):
                raise
            self.actions.write(move="the destination was gone")
        else:
            self.actions.write(move=move.state)

    def send(
        self, topic: xl.Topic, producer: xl.Producer, exclusive: bool, stale: bool = False
    ) -> bool:
        """Send one message or a batch; return whether it was accepted."""
        values = self.values(topic.name, self.rng.choice([1, 1, 1, traffic.MOST_AT_ONCE]))
        number = self._begin(topic, values, exclusive, stale)
        try:
            if self.defect == STORED and exclusive and not stale:
                offset = self._ignoring_the_rule(topic, producer, values)
            elif len(values) == 1:
                offset = producer.send(values[0])
            else:
                offset = producer.send_many(values).start
        except xl.ExclusiveLogError as error:
            self._refused(number, error)
            if isinstance(error, (xl.ProducerFencedError, xl.EngineClosedError)):
                return False
            raise
        epoch = producer.topic_epoch if exclusive else None
        self.notes.end(number, offset=offset, epoch=epoch)
        return True

    def _begin(self, topic: xl.Topic, values: list[bytes], exclusive: bool, stale: bool) -> int:
        sender = f"{os.getpid()}-{self.unknown}"
        return self.notes.begin(topic.name, values, exclusive=exclusive, stale=stale, sender=sender)

    def _refused(self, number: int, error: xl.ExclusiveLogError) -> None:
        if error.maybe_written:
            self.unknown += 1
            self.notes.error(error)
        else:
            self.notes.end(number, refused=True)

    def haunt(self, topic: xl.Topic, producer: xl.Producer, exclusive: bool) -> None:
        """It was fenced: its producer refuses what it tries from now on, and frames of its session
        that get into the Pulsar topic do not count, wherever they say that they stand."""
        self.send(topic, producer, exclusive, stale=True)
        if producer.state not in ("fenced", "moved"):  # it may be the owner still
            return
        log, end = self._raw(topic.name), topic.next_offset
        for ahead in (0, 1):
            values = self.values(topic.name, 1)
            self.notes.end(
                self._begin(topic, values, exclusive, True), refused=True
            )  # or it is a fault
            log.append(encode(_frame(producer, end + ahead, values, exclusive)))

    def _raw(self, name: str) -> OrderedLog:
        if name not in self.raw:
            place: Any = self.engine.backend
            self.raw[name] = place.place.open(name)
        return self.raw[name]

    def _ignoring_the_rule(
        self, topic: xl.Topic, producer: xl.Producer, values: list[bytes]
    ) -> int:
        """The control: the broker has stored it, so it is taken to be in the log."""
        first, stored, log = topic.next_offset, Future[bool](), self._raw(topic.name)

        def answered(answer: Answer) -> None:
            if not stored.done():
                stored.set_result(bool(answer.stored))

        log.append(encode(_frame(producer, first, values)), answered)
        if not stored.result(PATIENCE):
            raise xl.LedgerIOError("the broker has not stored it")
        return first

    def close(self) -> None:
        """Close the connections of the stale appends."""
        for log in self.raw.values():
            log.close()


def _frame(producer: xl.Producer, first: int, values: list[bytes], exclusive: bool = True) -> Frame:
    session, now = producer._session, time.time_ns() // 1_000_000
    contents = tuple(
        Content(value, None, {}, None, now, session.name, 10**6 + number)
        for number, value in enumerate(values)
    )
    if not exclusive:  # the next number of its session, or one that is near
        return Frame(session.epoch, session.id, 0, contents, number=first % 30 + 1)
    return Frame(session.epoch, session.id, first, contents)


def play(url: str, admin: str, notes: str, seed: int, defect: str = "") -> None:
    """Be one process until it is killed or no process is left to do so."""
    rng, noted, counted = random.Random(seed), Notes(notes), 0
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            with xl.open(url, f"w{seed}", admin=admin) as engine:
                player = Player(engine, noted, rng, defect, counted, actions=Actions(notes))
                try:
                    while os.getppid() == parent:
                        player.step()
                finally:
                    counted = player.count
                    player.close()
        except AWAY as error:
            noted.error(error)
            time.sleep(AGAIN_SECONDS)


# ---- on the map --------------------------------------------------------------------------


class MapPlayer(map_clients.Player):
    """One process on the map: calls whose outcome is unknown are noted as such."""

    def play(self, over: str) -> None:
        """Call the map until there is a file of that name."""
        parent = os.getppid()
        while not os.path.exists(over) and os.getppid() == parent:
            self.call(*self.choose())
            time.sleep(self._dice.random() * 0.02)


def play_map(url: str, admin: str, notes: str, number: int, over: str) -> None:
    """Be one process on the map until there is a file of that name."""
    parent, ids = os.getppid(), number
    while not os.path.exists(over) and os.getppid() == parent:
        shared: xl.SharedMap[str, Any]
        try:
            with (
                xl.open(url, f"m{number}", admin=admin) as engine,
                xl.SharedMap(engine.topic("map")) as shared,
            ):
                MapPlayer(shared, notes, ids, "one key").play(over)
        except AWAY as error:
            ids += 1000  # no two values are alike
            with Path(notes).open("a") as file:
                file.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            time.sleep(AGAIN_SECONDS)


def map_calls(path: Path, number: int) -> Iterator[Call]:
    """The calls of one process on the map. One that did not return may happen at any later time:
    its record may still be on its way to the broker when its process is dead."""
    begun: dict[str, Any] | None = None
    for text in path.read_text().splitlines(keepends=True):
        facts = json.loads(text) if text.endswith("\n") else {}
        if begun is not None and "end" in facts:
            yield made(number, begun, frozen(facts["result"]), facts["end"])
            begun = None
        elif begun is not None and ("begin" in facts or "error" in facts):
            yield made(number, begun, UNKNOWN, FOR_EVER)
            begun = None
        if "begin" in facts:
            begun = facts
    if begun is not None:
        yield made(number, begun, UNKNOWN, FOR_EVER)
