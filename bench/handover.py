"""Handing topics over, compared with closing their producers and promoting the waiters (P9).

There are four processes: the owner of all topics, and three that wait for each of them. All
messages are durable. A hand-over goes to the worst waiter in the queue, an election to the best;
the others only wait.

The owner sends to its topics one after the other until it has lost them; with many topics to a
sample of them, because otherwise the gap would be the time of a round. Its successor sends to each
topic as soon as it has that topic's producer. A topic's publish gap is the time between the owner's
last message and the successor's first, each at the time when it was durable. These two have
adjacent offsets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bench.measure import (
    POWER,
    Arm,
    Figure,
    Series,
    Settings,
    Stores,
    Target,
    latencies,
    take_turns,
)
from bench.topics import names, own
from exclusivelog import Engine, EngineClosedError, Producer, ProducerFencedError
from exclusivelog._core import Receipt, now
from exclusivelog.local.shm.slots import SLOT_COUNT, SLOT_SIZE, SLOTS, WAKE_UPS
from testing.processes import State, Worker, workers

NS = 1e-9
ROUNDS = {1: 30, 1_000: 7}  # by the number of topics
PROCESSES = 4
LONGEST = 21e-3  # seconds: a quarter of the longest gap with chunks of a fixed number of topics
STEPS = 2  # of a hand-over, each one transaction: it is announced; it is released and granted
COUNTED_AS_ONE = 250  # topics: the target of transactions is for chunks of this size
TRAFFIC_SECONDS = 0.1  # before the topics move
SAMPLED = 5  # topics that the owner sends to, the first and the last of all among them
SIZE = 100
PAUSE_SECONDS = 0.002  # between two messages of a bystander to a topic of its own
ROUND_PAUSE_SECONDS = 0.001  # after a message to each topic
PATIENCE = 300.0
HAND_OVER, ELECTION = "hand-over", "close and elect"
GAP = "longest publish gap"

Sent = tuple[int, int]  # a message's offset, and when it was durable


def p9(settings: Settings) -> Figure:
    """Both ways to another owner, of one topic and of many."""
    figure = Figure("P9", "hand-over against close-and-elect: longest publish gap per topic")
    for count, rounds in ROUNDS.items():
        with Stores(settings) as stores:
            moves = _measure(stores, names(count), settings.rounds_or(rounds))
        _judge(figure, count, moves)
    figure.notes += [
        f"{PROCESSES} processes: the owner, the next one, and {PROCESSES - 2} more that wait for "
        f"the same topics; the gap is that of {SAMPLED} topics, which the owner sends to in turn "
        "until they are gone",
        "transactions are the whole ledger's: a checkpoint a second and process may be among them",
    ]
    return figure


def topics_text(count: int) -> str:
    return f"{count:,} topic{'s' * (count > 1)}"


# ---- what came of it ---------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """The numbers of the ledger's transactions, and of each slot's notifications."""

    transactions: int
    notifications: list[int]

    @classmethod
    def of(cls, engine: Engine) -> Counts:
        words = engine.ledger.lockfile.atomics
        notifications = [words.load(SLOTS + i * SLOT_SIZE + WAKE_UPS) for i in range(SLOT_COUNT)]
        return cls(engine.stats()["transactions"], notifications)

    def since(self, before: Counts) -> Counts:
        notifications = [
            new - old for new, old in zip(self.notifications, before.notifications, strict=True)
        ]
        return Counts(self.transactions - before.transactions, notifications)


@dataclass(frozen=True)
class Left:
    """The report of the old owner: when it began to move its topics, the number of notifications
    until then, and its last message to each topic that it sent to."""

    begun: int
    before: Counts
    last: dict[str, Sent]


@dataclass(frozen=True)
class Moved:
    """One change of owners."""

    gaps: list[float]  # seconds, one for each topic that was sent to
    whole: float  # seconds, until all topics had a message of their new owner
    transactions: int
    notifications: int
    notifications_of_bystanders: int
    pause: float  # seconds, the longest send of a bystander to a topic that stays where it is


def _judge(figure: Figure, count: int, moves: Mapping[str, list[Moved]]) -> None:
    topics, steps = topics_text(count), STEPS * -(-count // COUNTED_AS_ONE)
    longest = Target(most=LONGEST) if count > 1 else None
    for what, unit, targets, of in (
        (GAP, "s", {"p50": Target(most=5e-3), "max": longest}, lambda move: move.gaps),
        ("all moved and written to", "s", {"p50": None}, lambda move: [move.whole]),
        (
            "longest send to another topic meanwhile",
            "s",
            {"p50": None, "max": None},
            lambda move: [move.pause],
        ),
        ("transactions", "", {"p50": Target(most=steps)}, lambda move: [move.transactions]),
        ("wake-ups, all engines", "", {"max": None}, lambda move: [move.notifications]),
        (
            "wake-ups of engines that stand by",
            "",
            {"max": Target(least=0, most=0)},
            lambda move: [move.notifications_of_bystanders],
        ),
    ):
        ours, peer = (
            _series(f"{what}, {way}, {topics}", unit, moves[way], of)
            for way in (HAND_OVER, ELECTION)
        )
        drawn = what == GAP
        figure.series += [replace(one, drawn=drawn).thinned() for one in (ours, peer)]
        peer = replace(peer, name=ELECTION)
        for name, target in targets.items():
            if name == "p50":
                figure.compare(f"{what}, {topics}: p50", ours, peer, target)
            else:
                figure.compare_at(1.0, f"{what}, {topics}: max", ours, peer, target)


def _series(
    name: str, unit: str, moves: Sequence[Moved], of: Callable[[Moved], list[Any]]
) -> Series:
    samples = [float(sample) for move in moves for sample in of(move)]
    return Series(name, unit, samples, POWER if name.startswith(GAP) else "")


# ---- moving topics around ----------------------------------------------------------------


@dataclass
class Crew:
    """The processes: the owner, and the waiters, best first. The owner sends to a sample of the
    topics, one message after the other; with `all_publish`, to all of them by `send_async`."""

    engine: Engine
    names: list[str]
    members: list[Worker]
    all_publish: bool = False
    places: dict[Worker, tuple[str, int]] = field(default_factory=dict)  # engine and slot

    def take_posts(self) -> None:
        owner, *waiting = self.members
        owner.call(own_all, self.names)
        for worker in waiting:
            worker.start(queue_up, self.names)
            worker.answer(PATIENCE)
        self.places = {worker: worker.call(place) for worker in self.members}

    def move(self, way: str) -> Moved:
        """Give all topics to one of the waiters; the old owner queues behind them."""
        owner, *waiting = self.members
        successor = waiting.pop(-1 if way == HAND_OVER else 0)
        bystanders = waiting
        bystanders[0].call(begin_beside)
        left = self._give_up(owner, way, self.places[successor][0])
        successor.start(first_messages, len(self.names))
        first: dict[str, Sent] = successor.answer(PATIENCE)
        done = Counts.of(self.engine).since(left.before)
        pause: float = bystanders[0].call(end_beside)
        owner.start(queue_up, self.names)
        owner.answer(PATIENCE)
        self.members = [successor, *bystanders, owner]
        return Moved(
            [_gap(name, last, first[name]) for name, last in left.last.items()],
            (max(at for _, at in first.values()) - left.begun) * NS,
            done.transactions,
            sum(done.notifications),
            sum(done.notifications[self.places[worker][1]] for worker in bystanders),
            pause,
        )

    def _give_up(self, owner: Worker, way: str, to: str) -> Left:
        owner.start(give_up, way, self.names, to, self.all_publish)
        left: Left = owner.answer(PATIENCE)
        return left


def _gap(name: str, last: Sent, first: Sent) -> float:
    if first[0] != last[0] + 1:
        raise RuntimeError(
            f"{name}: the old owner's last message has offset {last[0]}, the new one's first "
            f"{first[0]}"
        )
    return (first[1] - last[1]) * NS


def _measure(stores: Stores, names: list[str], rounds: int) -> dict[str, list[Moved]]:
    engine = stores.engine()
    moves: dict[str, list[Moved]] = {HAND_OVER: [], ELECTION: []}
    with workers() as make:
        crew = Crew(engine, names, [make(engine.path, f"engine-{i}") for i in range(PROCESSES)])
        crew.take_posts()
        take_turns([arm_of(crew, way, kept) for way, kept in moves.items()], rounds)
        for worker in crew.members:
            worker.kill()
    problems = engine.verify().problems
    if problems:
        raise RuntimeError(f"the log is not sound: {problems[0]}")
    return {way: kept[-rounds:] for way, kept in moves.items()}


def arm_of(crew: Crew, way: str, kept: list[Moved], name: str = "", durability: str = POWER) -> Arm:
    """The gaps of one change of owners; `kept` gets all of them."""

    def work(_: object) -> list[float]:
        kept.append(crew.move(way))
        return kept[-1].gaps

    return Arm(name or way, work, unit="s", durability=durability)


# ---- in the workers: who waits -----------------------------------------------------------


def place(state: State) -> tuple[str, int]:
    """This process's engine, and its slot in the lock file."""
    assert state.engine.backend._slot is not None
    return state.engine.id, state.engine.backend._slot.index


def own_all(state: State, names: Sequence[str]) -> None:
    producers = own(state.engine, names, one_by_one=False)
    state.kept["producers"] = dict(zip(names, producers, strict=True))


@dataclass
class Arrivals:
    """The first message that this process sends to each topic once it is promoted there."""

    count: int
    first: dict[str, Sent] = field(default_factory=dict)
    everything: threading.Event = field(default_factory=threading.Event)

    def note(self, name: str, offset: int) -> None:
        self.first[name] = offset, now()
        if len(self.first) == self.count:
            self.everything.set()


def queue_up(state: State, names: Sequence[str]) -> None:
    """Drop the lost producers, and wait for their topics again."""
    for producer in state.kept.get("producers", {}).values():
        producer.close()
    arrivals, producers = Arrivals(len(names)), dict[str, Producer]()
    state.kept.update(arrivals=arrivals, producers=producers)
    futures: dict[Future[Producer], str] = {
        state.engine.topic(name).producer_async("wait_for_exclusive"): name for name in names
    }

    def begin_at_once() -> None:
        for future in as_completed(futures):
            name, producer = futures[future], future.result()
            producers[name] = producer
            publish(producer, len(names) == 1, partial(arrivals.note, name))

    threading.Thread(target=begin_at_once, daemon=True).start()


def first_messages(state: State, count: int) -> dict[str, Sent]:
    """The first message to each topic, once all of them have one."""
    arrivals: Arrivals = state.kept["arrivals"]
    if not arrivals.everything.wait(PATIENCE):
        raise TimeoutError(f"{len(arrivals.first)} of {count} topics have come")
    return arrivals.first


def publish(producer: Producer, alone: bool, note: Callable[[int], None]) -> None:
    """Send a message; call `note` with its offset once it is durable. With many topics, do not wait
    for one message before sending the next."""

    def settled(receipt: Receipt) -> None:
        note(receipt.result())

    if alone:
        note(producer.send(stamp()))
    else:
        producer.send_async(stamp()).add_done_callback(settled)


def stamp() -> bytes:
    """A message that contains the time of its send."""
    return now().to_bytes(8, "big") + bytes(SIZE - 8)


# ---- in the workers: who stands by -------------------------------------------------------


def begin_beside(state: State) -> None:
    """Send periodically to a topic that only this process uses."""
    if "sender beside" not in state.kept:
        state.kept["sender beside"] = state.engine.topic(f"of-{state.engine.name}").producer()
    send = partial(state.kept["sender beside"].send, stamp())
    stop, samples = threading.Event(), list[float]()
    thread = threading.Thread(target=now_and_then, args=(send, stop, samples))
    thread.start()
    state.kept["beside"] = thread, stop, samples


def now_and_then(send: Callable[[], object], stop: threading.Event, samples: list[float]) -> None:
    while True:  # at least once, also if the topics move before this process has a core
        samples += latencies(send, 1)
        if stop.wait(PAUSE_SECONDS):
            return


def end_beside(state: State) -> float:
    """The duration of the longest of these sends, in seconds."""
    samples: list[float]
    thread, stop, samples = state.kept.pop("beside")
    stop.set()
    thread.join(PATIENCE)
    return max(samples)


# ---- in the workers: the owner -----------------------------------------------------------


def give_up(state: State, way: str, names: Sequence[str], to: str, all_publish: bool) -> Left:
    """Send until all topics are gone, which begins after a while."""
    producers: dict[str, Producer] = state.kept["producers"]
    last: dict[str, Sent] = {}
    published = {name: producers[name] for name in (names if all_publish else sample(names))}
    publish = keep_sending_async if all_publish else keep_sending
    traffic = threading.Thread(target=publish, args=(published, last))
    traffic.start()
    time.sleep(TRAFFIC_SECONDS)
    before, begun = Counts.of(state.engine), now()
    if way == HAND_OVER:
        failed = [move for move in state.engine.unload(names, to=to) if move.state != "owned"]
        if failed:
            raise RuntimeError(f"not moved: {failed[0]}")
    else:
        for name in names:
            producers[name].close()
    traffic.join(PATIENCE)
    return Left(begun, before, last)


def keep_sending(producers: dict[str, Producer], last: dict[str, Sent]) -> None:
    """Send to each topic in turn until it is closed or has moved."""
    while producers:
        for name, producer in list(producers.items()):
            try:
                last[name] = producer.send(stamp()), now()
            except (ProducerFencedError, EngineClosedError):  # moved, or just closed
                del producers[name]


def keep_sending_async(producers: dict[str, Producer], last: dict[str, Sent]) -> None:
    """The same without waiting for one topic before sending to the next."""

    def note(name: str, receipt: Receipt) -> None:
        if receipt.exception() is None:
            last[name] = receipt.result(), now()

    receipts: dict[str, Receipt] = {}
    while producers:
        for name, producer in list(producers.items()):
            try:
                receipts[name] = producer.send_async(stamp())
                receipts[name].add_done_callback(partial(note, name))
            except (ProducerFencedError, EngineClosedError):
                del producers[name]
        time.sleep(ROUND_PAUSE_SECONDS)
    for receipt in receipts.values():
        receipt.exception(PATIENCE)


def sample(names: Sequence[str]) -> list[str]:
    """A sample, evenly spread, that includes the first and the last."""
    count = min(SAMPLED, len(names))
    return [names[i * (len(names) - 1) // max(1, count - 1)] for i in range(count)]
