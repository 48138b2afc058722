"""What goes on beside a measurement: a thread that does one thing again and again, here or in
another process, on topics of its own (P26, P35, P36)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import exclusivelog as xl
from bench.append import messages
from testing.processes import State, Worker

BATCH = 100  # messages that a checkpoint finds at least
WAIT_SECONDS = 0.05  # of a reader at the end of its topic
PATIENCE = 60.0

NOTHING = object()  # what an act returns if there was nothing to do

Act = Callable[[], object]


# ---- again and again -----------------------------------------------------------------------


class Repeated:
    """Does this from now on, `rate` times a second (None: without pauses), in a thread. It has been
    done once when the constructor returns. `count`: how often something came of it."""

    def __init__(self, act: Act, rate: float | None = None) -> None:
        self.count = 0
        self._act, self._rate = act, rate
        self._begun, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="company", daemon=True)
        self._thread.start()
        if not self._begun.wait(PATIENCE):
            raise TimeoutError(f"{act} did not end")

    def _run(self) -> None:
        try:
            self._go_on()
        except BaseException as error:
            self._error = error
        finally:
            self._begun.set()

    def _go_on(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            self.count += self._act() is not NOTHING
            self._begun.set()
            if self._rate is not None:
                due += 1 / self._rate
                self._stop.wait(max(0.0, due - time.monotonic()))

    def end(self) -> int:
        """End it; returns the count."""
        self._stop.set()
        self._thread.join(PATIENCE)
        if self._error is not None:
            raise self._error
        return self.count


@contextlib.contextmanager
def meanwhile(*acts: Act) -> Iterator[None]:
    """Threads of this process that do these things meanwhile."""
    threads = [Repeated(act) for act in acts]
    try:
        yield
    finally:
        for thread in threads:
            thread.end()


# ---- in another process --------------------------------------------------------------------


def transact(state: State) -> Act:
    """A transaction of one message."""
    if state.producer is None:
        state.producer = state.topic.producer("exclusive")
    return partial(send_in_transaction, state.engine, state.producer, b"x")


def send_in_transaction(engine: xl.Engine, producer: xl.Producer, value: bytes) -> None:
    with engine.transaction() as txn:
        producer.send(value, transaction=txn)


def grant(state: State) -> Act:
    """A grant, by fencing, and its release."""
    return lambda: state.engine.topic("granted").producer("exclusive_with_fencing").close()


def claim(state: State) -> Act:
    """A claim, and its release."""
    return lambda: state.engine.own("bench", {"resource": None}).release()


def checkpoint(state: State) -> Act:
    """Some messages, and a checkpoint."""
    if "checkpointed" not in state.kept:
        state.kept["checkpointed"] = state.engine.topic("checkpointed").producer()
    producer, values = state.kept["checkpointed"], messages(BATCH)

    def act() -> None:
        producer.send_many(values)
        state.engine.ledger.checkpoint()

    return act


def tail(state: State, topic: str) -> Act:
    """What is new in the topic, message by message."""
    reader = state.engine.topic(topic).reader("latest")

    def act() -> object:
        try:
            return reader.read_next(timeout=WAIT_SECONDS)
        except xl.WaitTimeoutError:
            return NOTHING

    return act


def scan(state: State, topic: str) -> Act:
    """A part of the topic, over and over."""
    reader = state.engine.topic(topic).reader()

    def act() -> None:
        if not reader.read_batch(1_000):
            reader.seek("earliest")

    return act


Kind = Callable[..., Act]
COMPANY: dict[str, Kind] = {"transactions": transact, "grants": grant, "claims": claim}
_company: dict[str, Repeated] = {}  # of this process


def begin(state: State, name: str, kind: Kind, rate: float | None, *args: object) -> None:
    _company[name] = Repeated(kind(state, *args), rate)


def end(state: State, name: str) -> int:
    """End that; returns how often it was done."""
    return _company.pop(name).end()


@contextlib.contextmanager
def beside(
    worker: Worker,
    kinds: Mapping[str, tuple[Kind, float | None, tuple[object, ...]]],
    rates: Mapping[str, list[float]],
) -> Iterator[None]:
    """Have the worker do these meanwhile: {name: (what, times a second, for what)}. The rate of
    each is added to `rates`."""
    began = time.perf_counter()
    for name, (kind, rate, args) in kinds.items():
        worker.call(begin, name, kind, rate, *args)
    try:
        yield
    finally:
        for name in kinds:
            rates[name].append(worker.call(end, name) / (time.perf_counter() - began))
