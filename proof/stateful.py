"""A machine of Hypothesis beside a model: a list of messages, and an epoch.

Two engines on one ledger, in one process. The result of every call must be that of the model: which
request is admitted, with which epoch, the offset of each message, which session is fenced, and
what a reader returns, also after a crash (the directory is copied as it is,
without its lock files, and opened anew).
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import exclusivelog as xl
from exclusivelog.local.storage import journal

MODES = ("shared", "exclusive", "exclusive_with_fencing")
ENGINES = st.integers(0, 1)
ANY = st.integers(0, 9)
VALUES = st.lists(st.binary(max_size=40), min_size=1, max_size=5)
CAPACITY = 64 << 10  # of the journal: a copy of it costs little


@dataclass
class Held:
    """A producer, and what the model thinks of it."""

    producer: xl.Producer
    engine: int
    exclusive: bool
    epoch: int
    fenced: bool = False


class Machine(RuleBasedStateMachine):
    """What may be done, and what must come of it."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.lives = 0
        self.log: list[tuple[bytes, int]] = []
        self.epoch = 0
        self.held: list[Held] = []
        self.open()

    def open(self) -> None:
        self.path = self.place / str(self.lives)
        self.engines = [xl.open(self.path, durability="process") for _ in range(2)]

    @property
    def holders(self) -> list[Held]:
        return [held for held in self.held if not held.fenced]

    def topic(self, engine: int) -> xl.Topic:
        return self.engines[engine].topic("t")

    @rule(engine=ENGINES, mode=st.sampled_from(MODES))
    def open_producer(self, engine: int, mode: str) -> None:
        expected: type[Exception] | None = None
        if mode == "shared" and any(held.exclusive for held in self.holders):
            expected = xl.ProducerBusyError
        elif mode == "exclusive" and self.holders:
            expected = xl.ProducerFencedError
        try:
            producer = self.topic(engine).producer(xl.AccessMode(mode))
        except (xl.ProducerBusyError, xl.ProducerFencedError) as error:
            assert expected is type(error), f"{mode} was refused: {error}"  # noqa: PT017
            return
        assert expected is None, f"{mode} was admitted beside {self.holders}"
        if mode != "shared":
            self.epoch += 1
            for held in self.holders:
                held.fenced = True
            assert producer.topic_epoch == self.epoch, "A: the epoch of a grant"
        self.held.append(Held(producer, engine, mode != "shared", self.epoch))

    @rule(which=ANY, values=VALUES)
    def send(self, which: int, values: list[bytes]) -> None:
        if not self.held:
            return
        held = self.held[which % len(self.held)]
        try:
            offsets = held.producer.send_many(values)
        except xl.ProducerFencedError:
            assert held.fenced, "an owner was refused"
            return
        assert not held.fenced, "a fenced producer has sent"
        assert list(offsets) == list(range(len(self.log), len(self.log) + len(values)))
        self.log += [(value, self.epoch) for value in values]

    @rule(which=ANY)
    def close(self, which: int) -> None:
        if self.held:
            self.held.pop(which % len(self.held)).producer.close()

    @rule(which=ANY)
    def come_back(self, which: int) -> None:
        """Close, and claim the same epoch again (rule B5)."""
        mine = [held for held in self.held if held.exclusive]
        if not mine:
            return
        held = mine[which % len(mine)]
        held.producer.close()
        self.held.remove(held)
        try:
            producer = self.topic(held.engine).producer("exclusive", topic_epoch=held.epoch)
        except xl.ProducerFencedError:
            assert held.epoch < self.epoch or self.holders
            return
        assert held.epoch == self.epoch == producer.topic_epoch
        assert not self.holders
        self.held.append(Held(producer, held.engine, True, self.epoch))

    @rule(engine=ENGINES)
    def leave(self, engine: int) -> None:
        """Close an engine, and with it all that it holds; open another one."""
        self.engines[engine].close()
        self.held = [held for held in self.held if held.engine != engine]
        self.engines[engine] = xl.open(self.path, durability="process")

    @rule(checkpoint=st.booleans())
    def crash(self, checkpoint: bool) -> None:
        """All that is left is what stands in the files."""
        if checkpoint:
            self.engines[0].ledger.checkpoint()
        self.lives += 1
        ignore = shutil.ignore_patterns("owners.lock", "lock.mdb")
        shutil.copytree(self.path, self.place / str(self.lives), ignore=ignore)
        for engine in self.engines:
            engine.close()
        shutil.rmtree(self.path)
        self.held = []
        self.open()

    @rule(engine=ENGINES, start=st.integers(0, 30))
    def read(self, engine: int, start: int) -> None:
        start = min(start, len(self.log))
        messages = list(self.topic(engine).reader(start))
        assert [(m.value, m.epoch) for m in messages] == self.log[start:]

    @invariant()
    def count(self) -> None:
        Machine.steps += 1
        assert self.topic(0).next_offset == len(self.log)

    def teardown(self) -> None:
        for engine in self.engines:
            engine.close()
        shutil.rmtree(self.place)


def run(examples: int, steps: int = 40) -> tuple[int, str]:
    """How many steps were run, and what went wrong, if anything did."""
    before, usual = Machine.steps, journal.CAPACITY
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    journal.CAPACITY = CAPACITY
    try:
        run_state_machine_as_test(Machine, settings=options)
    except (AssertionError, xl.ExclusiveLogError) as error:
        return Machine.steps - before, f"{type(error).__name__}: {error}"
    finally:
        journal.CAPACITY = usual
    return Machine.steps - before, ""
