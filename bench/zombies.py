"""Owners that are stopped, replaced and continued: how many of their appends get in (P17).

The owner of a topic sends without pauses and is stopped (SIGSTOP) at a random moment. A rival takes
the topic, by fencing or, sometimes, because the owner has been
silent for longer than its keepalive, and sends. Then the former owner resumes: the message that it
was about to send, its pending messages, and every later send must raise ProducerFencedError. It
sends with its producer, and with handles on its old session that get no notification, so that the
ledger has to refuse them.

A judge reads the whole log in the end and compares it with what was acknowledged to each process.
Its negative control is the same run with processes that append without checking the owner.
"""

from __future__ import annotations

import logging
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.measure import POWER, PROCESS, Figure, Series, Settings, Stores, Target
from exclusivelog import Engine, Producer, ProducerFencedError
from exclusivelog._core import now
from exclusivelog.local.log import appending
from exclusivelog.producer import Options
from testing.processes import State, Worker, until, workers

NS = 1e-9
ROUNDS, CONTROL_ROUNDS = 300, 6
TRIES = 60  # of a former owner in each round, once it knows
AT_ONCE = 20  # messages of one send_many, or on their way by send_async
EVICTION_EVERY = 10  # rounds
FENCING, EVICTION = "by fencing", "after its keepalive"
MODES = {FENCING: "exclusive_with_fencing", EVICTION: "wait_for_exclusive"}
KEEPALIVE = 0.5
LONGEST_REIGNS = {"power": 0.02, "process": 0.003}  # seconds until it is stopped
POLL_SECONDS, MOST_SECONDS = 0.1, 2.0  # for a take-over, which takes milliseconds
PATIENCE = 60.0
NONE = Target(least=0, most=0)


def p17(settings: Settings) -> Figure:
    """Appends by owners that had lost their topic while they were stopped."""
    figure = Figure("P17", "appends of stopped owners after another engine took their topic")
    rounds, total = settings.rounds_or(ROUNDS), Tally()
    for durability, survives in (("power", POWER), ("process", PROCESS)):
        with Stores(settings) as stores:
            tally, seconds = play(stores, durability, -(-rounds // 2))
        figure.series += [
            Series(f"take-over from a stopped owner {how}, {durability}", "s", samples, survives)
            for how, samples in seconds.items()
            if samples
        ]
        total.add(tally)
    with Stores(settings) as stores:
        control, _ = play(stores, "power", min(rounds, CONTROL_ROUNDS), checked=False)
    _tell(figure, total, control)
    return figure


@dataclass
class Tally:
    """The result of some rounds."""

    rounds: int = 0
    tries: int = 0  # appends by former owners
    returned: int = 0  # ... that were acknowledged
    inside: int = 0  # stops inside the ledger's critical section
    unexplained: int = 0  # take-overs that waited, and not for that
    messages: int = 0
    acknowledged: int = 0
    stale: int = 0  # messages behind one of a newer epoch
    lost: int = 0  # acknowledged, and not where they should be
    untold: int = 0  # in the log, but not acknowledged

    def add(self, other: Tally) -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


def _tell(figure: Figure, total: Tally, control: Tally) -> None:
    for what, count, target in (
        ("owners stopped, replaced and continued", total.rounds, None),
        ("appends tried by former owners", total.tries, None),
        ("accepted, by what the former owners were told", total.returned, NONE),
        ("accepted, by what stands in the log behind a newer epoch", total.stale, NONE),
        ("messages acknowledged", total.acknowledged, None),
        ("lost: not in the log as they were acknowledged", total.lost, NONE),
        ("in the log, but not acknowledged", total.untold, NONE),
        ("stopped inside the ledger's critical section", total.inside, None),
        ("take-overs that had to wait for no such reason", total.unexplained, NONE),
        ("control, without the check: behind a newer epoch", control.stale, Target(least=1)),
    ):
        figure.state(what, count, "", target)
    figure.notes.append(
        f"of the {TRIES} tries of each owner three in four are by handles that have not been told, "
        "so that the ledger refuses them; the others, of up to "
        f"{AT_ONCE} messages, by the producer itself"
    )
    figure.notes.append(
        f"the control: {control.rounds} rounds, {control.tries:,} tries, {control.returned:,} of "
        f"them acknowledged; {control.stale:,} messages behind a newer epoch, {control.lost:,} lost"
    )
    figure.notes.append(
        "who is stopped inside the critical section is continued as soon as that is known; with "
        "kill_stalled=True the library ends it after its keepalive"
    )


# ---- the judge ---------------------------------------------------------------------------


class Told(NamedTuple):
    """Consecutive acknowledged messages of an owner: the offset and number of the first, and how
    many there are."""

    offset: int
    number: int
    messages: int


@dataclass
class Tenure:
    """The report of one owner. Its messages are numbered."""

    owner: int
    told: list[Told] = field(default_factory=list)
    sent: int = 0
    tries: int = 0
    returned: int = 0
    ended: bool = False

    def values(self, count: int) -> list[bytes]:
        """The next messages; all messages of all owners differ."""
        first, self.sent = self.sent, self.sent + count
        return [value(self.owner, number) for number in range(first, self.sent)]

    def attempt(self, send: Callable[[], int], number: int, count: int = 1) -> None:
        """Send these messages. After the first refusal the tenure is over, and every send must be
        refused."""
        try:
            offset = send()
        except ProducerFencedError:
            self.ended = True
            self.tries += count
            return
        self._note(Told(offset, number, count))
        if self.ended:
            self.tries += count
            self.returned += count

    def _note(self, told: Told) -> None:
        last = self.told[-1] if self.told else Told(-1, -1, 0)
        if (last.offset + last.messages, last.number + last.messages) == told[:2]:
            self.told[-1] = last._replace(messages=last.messages + told.messages)
        else:
            self.told.append(told)


def value(owner: int, number: int) -> bytes:
    return owner.to_bytes(8, "big") + number.to_bytes(8, "big")


def promises(tenures: Iterable[Tenure]) -> Iterator[tuple[int, bytes]]:
    """(offset, value) of all acknowledged messages, in the order of the offsets."""
    for told, owner in sorted((told, tenure.owner) for tenure in tenures for told in tenure.told):
        for i in range(told.messages):
            yield told.offset + i, value(owner, told.number + i)


def judge(log: Iterable[tuple[int, int, bytes]], tenures: Sequence[Tenure]) -> Tally:
    """Compare (offset, epoch, value) of all messages with what was acknowledged."""
    tally = Tally(
        tries=sum(tenure.tries for tenure in tenures),
        returned=sum(r.returned for r in tenures),
        acknowledged=sum(told.messages for tenure in tenures for told in tenure.told),
    )
    kept, newest, promised = 0, 0, promises(tenures)
    promise = next(promised, None)
    for offset, epoch, found in log:
        tally.messages += 1
        tally.stale += epoch < newest
        newest = max(newest, epoch)
        while promise is not None and promise[0] < offset:  # it cannot be kept any more
            promise = next(promised, None)
        tally.untold += promise is None or promise[0] > offset
        while promise is not None and promise[0] == offset:
            kept += promise[1] == found
            promise = next(promised, None)
    tally.lost = tally.acknowledged - kept
    return tally


# ---- the game ----------------------------------------------------------------------------


def play(
    stores: Stores, durability: str, rounds: int, checked: bool = True
) -> tuple[Tally, dict[str, list[float]]]:
    """Run two processes that take one topic from each other. Returns the judge's result, and the
    durations of the take-overs."""
    engine = stores.engine("ours", durability=durability)
    with workers() as make:
        players = [
            make(engine.path, name, topic="throne", durability=durability, keepalive=KEEPALIVE)
            for name in ("a", "b")
        ]
        for player in players:
            player.call(prepare, checked)
        game = Game(engine, players, LONGEST_REIGNS[durability])
        tenures = game.play(rounds)
    log = ((m.offset, m.epoch, m.value) for m in engine.topic("throne").reader())
    game.tally.add(judge(log, tenures))
    problems = engine.verify().problems
    if checked and problems:
        raise RuntimeError(f"the log is not sound: {problems[0]}")
    return game.tally, game.seconds


@dataclass
class Game:
    """Two processes that take a topic from each other; the first of `players` owns it."""

    engine: Engine
    players: list[Worker]
    longest: float
    tally: Tally = field(default_factory=Tally)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {FENCING: [], EVICTION: []})

    def play(self, rounds: int) -> list[Tenure]:
        first = self.players[0]
        first.call(take, "exclusive", 0)
        first.start(tenure, random.choice(TRAFFIC))
        tenures = [self._round(number) for number in range(1, rounds + 1)]
        with self.engine.topic("throne").producer(MODES[FENCING]):
            return [*tenures, self.players[0].answer(PATIENCE)]

    def _round(self, number: int) -> Tenure:
        owner, rival = self.players
        how = FENCING if number % EVICTION_EVERY else EVICTION
        self._stop(owner)
        begun = now()
        rival.start(take, MODES[how], number)
        waited = self._wait_for(rival, owner, how)
        taken: int = rival.answer(PATIENCE)
        if not waited:
            self.seconds[how].append((taken - begun) * NS)
        rival.start(tenure, random.choice(TRAFFIC))
        owner.signal(signal.SIGCONT)
        self.tally.rounds += 1
        self.players = [rival, owner]
        over: Tenure = owner.answer(PATIENCE)
        return over

    def _stop(self, owner: Worker) -> None:
        time.sleep(random.random() * self.longest)
        owner.signal(signal.SIGSTOP)
        stat = Path(f"/proc/{owner.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def _wait_for(self, rival: Worker, owner: Worker, how: str) -> bool:
        """Wait until the rival has the topic; return whether the owner had to be resumed."""
        deadline, waited = time.monotonic() + MOST_SECONDS, False
        while not rival.answered(POLL_SECONDS):
            inside = self.engine.inside()
            if inside is not None and inside.pid == owner.pid:
                self.tally.inside += 1
            elif time.monotonic() > deadline:
                self.tally.unexplained += 1
            else:
                continue
            waited = True
            owner.signal(signal.SIGCONT)
            if how == EVICTION:  # it is still the owner
                self._stop(owner)
                deadline = time.monotonic() + MOST_SECONDS
        return waited


# ---- in the workers ----------------------------------------------------------------------


def prepare(state: State, checked: bool) -> None:
    """Do not log stopped processes; without `checked`, append without checking the owner."""
    logging.getLogger("exclusivelog").setLevel(logging.CRITICAL)
    state.kept["checked"] = checked
    if not checked:
        vars(appending)["check_may_write"] = lambda *_: None


def take(state: State, mode: str, number: int) -> int:
    """Become the owner with this number; return the time at which its first message was durable."""
    state.producer = connect(state, state.topic.producer(mode, timeout=PATIENCE / 2))
    state.kept["tenure"] = mine = Tenure(number)
    one_by_one(state.producer, mine)
    return now()


def connect(state: State, producer: Producer) -> Producer:
    """Without the check, several owners append: each must read what others have appended, or the
    ledger would notice two messages at one offset, and fail."""
    if not state.kept["checked"]:
        ledger, session = state.engine.ledger, producer._session
        assert ledger.journal is not None
        producer._sender.appender.connect(
            ledger.journal,
            ledger.lockfile.atomics,
            ledger.lockfile.counters.place(session.topic),
            session.topic,
            session.epoch,
            session.id,
            False,
            True,
        )
    return producer


def tenure(state: State, send: Callable[[Producer, Tenure], None]) -> Tenure:
    """Send until another engine has taken the topic, and continue to send afterwards."""
    mine: Tenure = state.kept.pop("tenure")
    assert state.producer is not None
    while not mine.ended:
        send(state.producer, mine)
    for number in range(TRIES):
        if number % 4:
            try_as_a_stranger(state, state.producer, mine)
        else:
            random.choice(TRAFFIC)(state.producer, mine)
    state.producer.close()
    return mine


def try_as_a_stranger(state: State, former: Producer, mine: Tenure) -> None:
    """Send by a handle on the former owner's session that got no notification of its end."""
    number = mine.sent
    engine, name, options = state.engine, state.topic.name, Options()
    session = engine.backend.open_session(name, former._session, number - 1, options)
    handle = Producer(engine.backend, name, session, options)
    one_by_one(connect(state, handle), mine)
    handle.close()


def one_by_one(producer: Producer, mine: Tenure) -> None:
    number = mine.sent
    [message] = mine.values(1)
    mine.attempt(lambda: producer.send(message), number)


def all_or_none(producer: Producer, mine: Tenure) -> None:
    number = mine.sent
    messages = mine.values(AT_ONCE)
    mine.attempt(lambda: producer.send_many(messages).start, number, AT_ONCE)


def pipelined(producer: Producer, mine: Tenure) -> None:
    first = mine.sent
    outcomes = [hand_in(producer, message) for message in mine.values(AT_ONCE)]
    for number, outcome in enumerate(outcomes, first):
        mine.attempt(outcome, number)


def hand_in(producer: Producer, message: bytes) -> Callable[[], int]:
    """A function that returns the message's offset once it is durable, or raises its error."""
    try:
        return producer.send_async(message).result
    except ProducerFencedError as error:
        return partial(refuse, error)


def refuse(error: ProducerFencedError) -> int:
    raise error


TRAFFIC = (one_by_one, all_or_none, pipelined)
