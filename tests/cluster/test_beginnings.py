"""Topics whose beginning was removed, over logs in memory (rules B1, B2, J1).

A log is folded from its first record on. If retention removes that, the rest looks like a log that
has just begun: its next owner was granted epoch 1 again, while the former owner went on.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.cluster import checkpoints
from exclusivelog.cluster.births import Births, is_beginning
from exclusivelog.cluster.checkpoints import NOWHERE
from exclusivelog.cluster.facts import Facts
from exclusivelog.cluster.following import TopicLog
from exclusivelog.cluster.frames import Content, Frame, encode
from exclusivelog.cluster.memory import MemoryLog, MemoryPlace
from exclusivelog.cluster.ordered import OrderedLog, Record
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, SHARED, WAIT, until, values

pytestmark = [pytest.mark.timeout(120), pytest.mark.once]

ALL = 1 << 20  # more records than any log here has
BIRTHS, KINDS = "__births__", "__kinds__"
LACKS = "lacks its beginning"


@pytest.fixture
def path() -> str:
    return f"memory://{secrets.token_hex(8)}"


def logs_of(path: str) -> dict[str, MemoryLog]:
    """All logs of a place."""
    return MemoryPlace.named(path.partition("://")[2])._shared.logs


def records(log: MemoryLog) -> list[bytes]:
    return list(log._records)


def write(path: str, *values: bytes) -> int:
    """Write to the topic as its owner; the epoch."""
    with xl.open(path) as engine, engine.topic("orders").producer(EXCLUSIVE) as producer:
        for value in values:
            producer.send(value)
        return producer.topic_epoch


# ---- what is refused ---------------------------------------------------------------------


CALLS: dict[str, Callable[[xl.Topic], Any]] = {
    "own": lambda topic: topic.producer(EXCLUSIVE),
    "fence": lambda topic: topic.producer(FENCING),
    "share": lambda topic: topic.producer(SHARED),
    "wait": lambda topic: topic.producer(WAIT, timeout=PATIENCE),
    "terminate": lambda topic: topic.terminate(),
    "read": lambda topic: list(topic.reader()),
    "look": lambda topic: topic.owner,
    "count": lambda topic: topic.next_offset,
}


@pytest.mark.rule("B1", "B2", "J1")
@pytest.mark.parametrize("removed", [1, 2, 4, ALL])
@pytest.mark.parametrize("call", CALLS)
def test_b1_a_topic_without_its_beginning_is_not_begun_anew(
    path: str, removed: int, call: str
) -> None:
    with xl.open(path) as engine, engine.topic("orders").producer(EXCLUSIVE) as former:
        for n in range(3):
            former.send(b"%d" % n)
        logs_of(path)["orders"].trim(removed)
        with xl.open(path) as late, pytest.raises(xl.LedgerCorruptedError, match=LACKS) as raised:
            CALLS[call](late.topic("orders"))
        assert raised.value.topic == "orders"
        assert former.send(b"3") == 3  # its engine has read the log from the beginning on
        assert former.topic_epoch == 1


@pytest.mark.rule("B1")
def test_b1_a_read_only_engine_takes_no_rest_for_the_whole(path: str) -> None:
    write(path, b"a")
    logs_of(path)["orders"].trim(ALL)
    with xl.open(path, readonly=True) as engine, pytest.raises(xl.LedgerCorruptedError):
        list(engine.topic("orders").reader())


@pytest.mark.rule("B1")
def test_b1_a_topic_that_was_deleted_is_not_begun_anew(path: str) -> None:
    write(path, b"a")
    del logs_of(path)["orders"]
    with xl.open(path) as engine, pytest.raises(xl.LedgerCorruptedError, match=LACKS):
        engine.topic("orders").producer(EXCLUSIVE)


@pytest.mark.rule("B1", "J1")
@pytest.mark.parametrize("kind", ["births and grants", "all records"])
def test_b1_late_copies_of_the_first_records_are_no_beginning(path: str, kind: str) -> None:
    """A backend may append a record twice, and late (`ordered`)."""
    write(path, b"a")
    log = logs_of(path)["orders"]
    whole = records(log)
    for data in whole if kind == "all records" else whole[:2]:
        log.append(data)
    log.trim(len(whole))
    with xl.open(path) as engine, pytest.raises(xl.LedgerCorruptedError, match=LACKS):
        engine.topic("orders").producer(EXCLUSIVE)


@pytest.mark.rule("B1")
def test_b1_records_of_another_program_are_no_beginning(path: str) -> None:
    MemoryPlace.named(path.partition("://")[2]).open("orders").append(b"another program's")
    with xl.open(path) as engine, pytest.raises(xl.LedgerCorruptedError, match=LACKS):
        engine.topic("orders").producer(EXCLUSIVE)


@pytest.mark.rule("B1", "F2")
def test_f2_a_claim_whose_log_lacks_its_beginning_is_refused(path: str) -> None:
    with xl.open(path) as engine, engine.own("g", {"r": 5}) as claim:
        [name] = [each for each in logs_of(path) if each.startswith("__claims__")]
        logs_of(path)[name].trim(ALL)
        with xl.open(path) as late, pytest.raises(xl.LedgerCorruptedError, match=LACKS):
            late.own("g", {"r": 4})
        assert claim.is_valid


@pytest.mark.rule("B1", "B2")
def test_b2_a_log_that_is_emptied_before_the_first_request_is_noticed(path: str) -> None:
    with xl.open(path) as late, xl.open(path) as engine:
        topic = late.topic("orders")  # it has no record as yet
        log = late.backend.topics.named("orders")
        log._reader.close()  # it reads no more: as if it were slow
        with engine.topic("orders").producer(EXCLUSIVE) as former:
            former.send(b"a")
            logs_of(path)["orders"].trim(ALL)
            with pytest.raises(xl.ExclusiveLogError):
                topic.producer(FENCING)
            assert former.send(b"b") == 1


# ---- what goes on ------------------------------------------------------------------------


@pytest.mark.rule("B1", "J1")
def test_b1_a_checkpoint_goes_on_without_the_beginning(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "EVERY_RECORDS", 20)
    write(path, *[b"%d" % n for n in range(50)])
    log = logs_of(path)["orders"]
    log.trim(len(records(log)) - 5)
    with xl.open(path) as engine:
        with engine.topic("orders").producer(EXCLUSIVE) as producer:
            assert (producer.topic_epoch, producer.send(b"50")) == (2, 50)
        with pytest.raises(xl.LedgerCorruptedError, match=LACKS):
            list(engine.topic("orders").reader())
        with pytest.raises(xl.LedgerCorruptedError, match=LACKS):
            list(engine.history("orders"))


@pytest.mark.rule("J1", "B1")
def test_j1_engines_that_begin_a_topic_at_one_time_agree(path: str) -> None:
    engines = [xl.open(path) for _ in range(6)]
    epochs: list[int] = []
    together = threading.Barrier(len(engines))

    def own(engine: xl.Engine) -> None:
        together.wait(PATIENCE)
        with engine.topic("orders").producer(WAIT, timeout=PATIENCE) as producer:
            producer.send(b"x")
            epochs.append(producer.topic_epoch)

    threads = [threading.Thread(target=own, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    firsts = {engine.backend.topics.named("orders")._first for engine in engines}
    assert epochs == list(range(1, 7))
    assert len(values(engines[0].topic("orders"))) == 6
    assert len(firsts) == 1
    for engine in engines:
        engine.close()


@pytest.mark.rule("J1")
@pytest.mark.parametrize("name", ["orders", BIRTHS])
def test_j1_a_topic_that_is_begun_under_a_look_is_not_refused(
    path: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    was_written, epochs = MemoryPlace.was_written, list[int]()

    def begin_first(place: MemoryPlace, topic: str) -> bool:
        if topic == name and not epochs:
            epochs.append(0)
            epochs.append(write(path, b"a"))
        return was_written(place, topic)

    monkeypatch.setattr(MemoryPlace, "was_written", begin_first)
    assert write(path, b"b") == 2
    assert epochs == [0, 1]


# ---- the log of births -------------------------------------------------------------------


@pytest.mark.rule("B1", "J1")
def test_b1_a_place_whose_log_of_births_lacks_its_beginning_is_refused(path: str) -> None:
    write(path, b"a")
    logs_of(path)[BIRTHS].trim(1)
    with xl.open(path) as engine:
        for _ in range(2):
            with pytest.raises(xl.LedgerCorruptedError, match=f"'{BIRTHS}' {LACKS}"):
                engine.topic("orders").producer(EXCLUSIVE)


@pytest.mark.rule("B1", "J1")
def test_b1_topics_are_registered_again_if_the_log_of_births_is_lost(path: str) -> None:
    write(path, b"a")
    logs = logs_of(path)
    del logs[BIRTHS]
    assert write(path, b"b") == 2
    assert BIRTHS in logs
    del logs[BIRTHS]
    logs["orders"].trim(1)  # and this topic has lost its beginning, too
    with xl.open(path) as engine, pytest.raises(xl.LedgerCorruptedError, match=LACKS):
        engine.topic("orders").producer(EXCLUSIVE)
    logs["orders"].trim(ALL)
    with xl.open(path) as engine, pytest.raises(xl.LedgerCorruptedError, match=LACKS):
        engine.topic("orders").producer(EXCLUSIVE)


@pytest.mark.rule("B1")
def test_b1_all_logs_of_a_place_are_emptied_at_once(path: str) -> None:
    write(path, b"a")
    for log in logs_of(path).values():
        log.trim(ALL)
    with xl.open(path) as engine, pytest.raises(xl.LedgerCorruptedError, match=LACKS):
        engine.topic("orders").producer(EXCLUSIVE)


def test_what_topics_hold_is_not_forgotten(path: str) -> None:
    with xl.open(path) as engine, xl.SharedMap(engine.topic("settings")) as settings:
        settings.put("key", "value")
    logs_of(path)[KINDS].trim(ALL)
    with (
        xl.open(path) as engine,
        pytest.raises(xl.LedgerCorruptedError, match=f"'{KINDS}' {LACKS}"),
    ):
        xl.SharedState(engine.topic("settings"), dict, lambda state, op: state)


@pytest.mark.rule("B1", "B2")
def test_b2_an_engine_that_meets_a_later_epoch_than_it_knows_ends(path: str) -> None:
    """Where the log of births and the topic were lost together, and the place cannot tell."""
    content = Content(b"x", None, {}, None, 5, "p", 0)
    with xl.open(path) as engine, engine.topic("orders").producer(EXCLUSIVE) as producer:
        producer.send(b"a")
        log = logs_of(path)["orders"]
        log.append(encode(Frame(3, 77, 6139, (content,))))  # the former owner goes on
        with pytest.raises(xl.ExclusiveLogError, match=LACKS):
            until(lambda: producer.send(b"b") < 0)


@pytest.mark.rule("B9")
def test_facts_are_recorded_although_appends_are_lost(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exclusivelog.cluster.facts.RESEND_SECONDS", 0.01)
    place = MemoryPlace.named(path.partition("://")[2])
    append, lost = MemoryLog.append, [b""]

    def lose(log: MemoryLog, data: bytes, *answered: Any) -> None:
        if data in lost:
            append(log, data, *answered)
        else:
            lost.append(data)

    monkeypatch.setattr(MemoryLog, "append", lose)
    facts = Facts(place, "__colours__", b"XLC")
    assert facts.record("sky", "blue") == "blue"
    assert len(lost) == 3
    assert Facts(place, "__colours__", b"XLC").of("sky") == "blue"
    facts.close()


# ---- any order of events -----------------------------------------------------------------


REFUSALS = xl.LedgerError, xl.ProducerFencedError, xl.EngineClosedError, xl.OffsetTrimmedError
STEPS = ["open", "own", "own", "send", "send", "send", "trim", "delete"]
SEEDS = 150


class Run:
    """Engines that take a topic from each other and send, while its logs are trimmed and deleted
    at random: between their calls, and before any call of theirs to a log. Notes what was granted
    and acknowledged."""

    def __init__(self, path: str, seed: int) -> None:
        self._path, self._dice = path, random.Random(seed)
        self._engines: list[xl.Engine] = []
        self._owners: list[tuple[xl.Engine, xl.Producer]] = []
        self._busy: xl.Engine | None = None
        self._lost = self._dice.choice(["orders", BIRTHS])  # not both: see docs/cluster.md
        self._thread, self._inside = threading.get_ident(), False
        self.refused = self.inserted = 0
        self.epochs: list[int] = []
        self.sent: list[tuple[int, int]] = []  # offset, epoch

    def step(self) -> None:
        """Let something happen."""
        self._do(self._dice.choice(STEPS))

    def insert(self) -> None:
        """Let something happen before a call to a log, now and then."""
        if self._thread != threading.get_ident() or self._inside or self._dice.random() > 0.1:
            return
        self._inside = True
        try:
            self._do(self._dice.choice(STEPS[1:]))
            self.inserted += 1
        finally:
            self._inside = False

    def _do(self, name: str) -> None:
        try:
            getattr(self, f"_{name}")()
        except REFUSALS:
            self.refused += 1

    def _open(self) -> None:
        self._engines.append(xl.open(self._path))

    def _own(self) -> None:
        engine = self._idle(self._engines, lambda engine: engine)
        if engine is not None:
            owner = engine.topic("orders").producer(FENCING, timeout=PATIENCE)
            self._owners.append((engine, owner))
            self.epochs.append(owner.topic_epoch)

    def _send(self) -> None:
        found = self._idle(self._owners, lambda pair: pair[0])
        if found is not None:
            _, owner = found
            self.sent.append((owner.send(b"x", timeout=PATIENCE), owner.topic_epoch))

    def _idle(self, things: list[Any], engine_of: Callable[[Any], xl.Engine]) -> Any:
        """One of these, of an engine that makes no call meanwhile, which may hold its locks."""
        idle = [each for each in things if not (self._inside and engine_of(each) is self._busy)]
        if not idle:
            return None
        found = self._dice.choice(idle)
        if not self._inside:
            self._busy = engine_of(found)
        return found

    def _trim(self) -> None:
        log = logs_of(self._path).get(self._dice.choice(["orders", BIRTHS]))
        if log is not None:
            log.trim(self._dice.choice([1, 3, ALL]))

    def _delete(self) -> None:
        logs_of(self._path).pop(self._lost, None)

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines:
            engine.close()

    @property
    def fault(self) -> str | None:
        """The rule that was broken, if any."""
        if len(set(self.epochs)) < len(self.epochs):
            return f"B1: epochs {self.epochs}"
        sent = sorted(self.sent)
        if len(dict(sent)) < len(sent) or [e for _, e in sent] != sorted(e for _, e in sent):
            return f"B2: offsets and epochs {sent}"
        return None


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Run]:
    """`ran(seed)`: a run that is over."""
    runs: list[Run] = []
    for name in ("append", "end"):
        monkeypatch.setattr(MemoryLog, name, disturbed(getattr(MemoryLog, name), runs))

    def run(seed: int) -> Run:
        runs.append(Run(f"memory://{secrets.token_hex(8)}", seed))
        try:
            for _ in range(16):
                runs[-1].step()
        finally:
            runs[-1].close()
        return runs[-1]

    return run


def disturbed(call: Callable[..., Any], runs: list[Run]) -> Callable[..., Any]:
    """The same call, before which something else may happen."""

    def disturb(*given: Any) -> Any:
        if runs:
            runs[-1].insert()
        return call(*given)

    return disturb


@pytest.mark.rule("B1", "B2", "J1")
def test_b1_no_order_of_removals_makes_two_owners(ran: Callable[[int], Run]) -> None:
    runs = [ran(seed) for seed in range(SEEDS)]
    assert [run.fault for run in runs if run.fault] == []
    assert sum(len(run.sent) for run in runs) > SEEDS
    assert sum(len(run.epochs) for run in runs) > SEEDS
    assert sum(run.refused for run in runs) > SEEDS // 2
    assert sum(run.inserted for run in runs) > SEEDS


@pytest.mark.parametrize("without", ["the first record", "the log of births", "both"])
def test_control_without_the_checks_there_are_two_owners(
    ran: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    if without != "the log of births":
        monkeypatch.setattr(TopicLog, "check_first", take_first)
        monkeypatch.setattr(TopicLog, "_check_seen", lambda log, judged: None)
    if without != "the first record":
        monkeypatch.setattr(Births, "known", know_nothing)
        monkeypatch.setattr(Births, "register", lambda births, topic, first: first)
    assert any(ran(seed).fault for seed in range(SEEDS))


def take_first(log: TopicLog, record: Record) -> None:
    """Take any record for the first one."""
    log._first = log._first or NOWHERE.then(record)


def know_nothing(births: Births, topic: str, log: OrderedLog, goes_on: bool) -> None:
    """Ask nothing about a topic."""


def test_a_mirror_begins_a_log_with_its_first_copy() -> None:
    content = Content(b"x", None, {}, None, 5, "p", 0)
    assert is_beginning(encode(Frame(4, 0, 9, (content,), 9, "source")))
    assert not is_beginning(encode(Frame(4, 0, 9, (content,), 8, "source")))
    assert not is_beginning(encode(Frame(1, 7, 0, (content,))))
