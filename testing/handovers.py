"""Shared parts of the tests of hand-overs: fast processes, points at which one is killed or
stopped, and `Chronicle`, which checks the result.

A round of `Stage` has a source that owns the topic and sends, a destination, and a process that
asks for the move. One of them is killed or stopped, at a point that `POINTS` names. Then the
survivors and a bystander use the topic, and the chronicle reads the log and `__events__`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.events import EVENTS, Event
from exclusivelog.local.log.appending import Committer, Pauses
from exclusivelog.local.ownership.notifications import Notifications, Releases
from exclusivelog.local.ownership.pending import Outcomes, Pending
from exclusivelog.local.ownership.sessions import Sessions
from exclusivelog.local.ownership.transfers import HandOver
from exclusivelog.local.session import LocalSession
from exclusivelog.local.shm import slots
from exclusivelog.local.storage.ledger import Transaction
from exclusivelog.producer import Producer
from testing.processes import (
    EXCLUSIVE,
    PATIENCE,
    WAIT,
    Failed,
    State,
    Worker,
    preload,
    until,
    workers,
)

KEEPALIVE = 0.5  # of those that are stopped, from then on

preload("testing.handovers")


class Quick(Worker):
    """A worker that can be killed or stopped at a point of its code."""

    def await_strike(self) -> None:
        """Wait until it has stopped, by `strike`, and not inside the ledger. Another of its
        threads may be there at that moment, sending: that would block all writers, which
        test_stalls.py tests, so it goes on for a moment, and stops again."""
        with xl.open(self.path, readonly=True) as watcher:
            journal = watcher.ledger.journal
            assert journal is not None
            while True:
                until(self.stopped)
                self.await_stop()
                if not self.threads() & set(journal.inside):
                    return
                _once_more(self.path, self.pid).touch()
                self.signal(signal.SIGCONT)
                until(lambda: not _once_more(self.path, self.pid).exists())


def _once_more(path: str, pid: int | None) -> Path:
    """The file that asks a process which goes on to stop again."""
    return Path(f"{path}.stop-{pid}")


@contextlib.contextmanager
def quick_workers(path: str) -> Iterator[Callable[..., Quick]]:
    """A factory of quick workers on `path`, all ended, and reaped, afterwards."""
    with workers(Quick) as make:
        yield functools.partial(make, path)


# ---- what happens beside the test --------------------------------------------------------


def begin(function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Run `function(*args)` in a thread of its own; returns its future. If it does not return, only
    the test that needs its result fails."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="beside", daemon=True).start()
    return future


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time, and return their results."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        return function()

    return [future.result(4 * PATIENCE) for future in [begin(run, each) for each in functions]]


class HeldUp:
    """Within the block, an engine of this process that is to hand topics over has drained them
    (`reached`), and releases them after `go_on()`."""

    def __init__(self, engine: xl.Engine) -> None:
        self._engine = engine
        self._release = engine.backend.hand_over.release
        self._reached, self._go = threading.Event(), threading.Event()

    def __enter__(self) -> HeldUp:
        self._engine.backend.hand_over.release = self._wait_and_release
        return self

    def _wait_and_release(self, sessions: Any) -> Any:
        self._reached.set()
        self._go.wait(PATIENCE)
        return self._release(sessions)

    @property
    def reached(self) -> bool:
        """Are the topics drained?"""
        return self._reached.is_set()

    def await_it(self) -> None:
        """Return when the topics are drained."""
        assert self._reached.wait(PATIENCE)

    def go_on(self) -> None:
        """Let it release them."""
        self._go.set()

    def __exit__(self, *error: object) -> None:
        self._go.set()
        self._engine.backend.hand_over.release = self._release


def wake_ups(engines: Iterable[xl.Engine]) -> list[int]:
    """How often each of these engines has been woken so far."""
    return [engine.backend._slot.wake_up_count() for engine in engines]


def quiet_wake_ups(engines: list[xl.Engine]) -> list[int]:
    """The same, once the counts do not change any more."""
    counts: list[int] = []
    while counts != (counts := wake_ups(engines)):
        time.sleep(0.1)
    return counts


# ---- all ways to send -------------------------------------------------------------------


def large(number: int) -> bytes:
    """Goes past the journal, straight into the tables."""
    return b"%06d" % number * 30_000


Use = Callable[[xl.Producer], Any]
SENDS: dict[str, Use] = {
    "send": lambda producer: producer.send(b"x"),
    "send with a key": lambda producer: producer.send(b"x", key="k"),
    "send within": lambda producer: producer.send(b"x", timeout=PATIENCE),
    "send something large": lambda producer: producer.send(large(1)),
    "send_async": lambda producer: producer.send_async(b"x").result(PATIENCE),
    "send_async with a key": lambda producer: producer.send_async(b"x", key="k").result(PATIENCE),
    "send_many": lambda producer: producer.send_many([b"x", b"y"])[0],
    "send_many within": lambda producer: producer.send_many([b"x"], timeout=PATIENCE)[0],
}
COUNTS = [2 if name == "send_many" else 1 for name in SENDS]


def catch_up(producer: xl.Producer) -> list[bytes]:
    """What an owner reads before it writes (rule D8)."""
    reader = xl.Engine(producer._sender.engine).topic(producer.topic).reader()
    return [message.value for message in producer.catch_up(reader)]


def end_reservations(engine: xl.Engine, seconds: float) -> None:
    """What is reserved for the destination of a move is so for so many seconds from now on. A busy
    machine may not complete a move that has so short a deadline from the beginning."""
    until = _core.now() + int(seconds * 1e9)
    with engine.ledger.write_exclusive() as tables:
        topics = [topic for _, topic in tables.topics.all()]
        for topic in topics:
            if (transfer := tables.transfers.get(topic)) is not None:
                tables.transfers.put(transfer._replace(until=until))
            for session, seat in list(tables.transfers.seats(topic)):
                tables.transfers.put_seat(session, seat._replace(until=until))
    engine.backend.sessions.promote_again(topics)  # whoever waits learns of the new time


def moved(moves: list[xl.Move] | list[Any]) -> list[tuple[str, str]]:
    """The outcome for each topic."""
    return [(move.topic, move.state) for move in moves]


# ---- what workers are told ---------------------------------------------------------------


def unload(state: State, topics: Any, to: str, timeout: float = PATIENCE) -> list[tuple[str, str]]:
    """(topic, state) of the moves."""
    return [(move.topic, move.state) for move in state.engine.unload(topics, to, timeout)]


def unload_and_tell(state: State, to: str, flag: str) -> list[tuple[str, str]]:
    """Move the topic, and make the file once the call waits for its release."""
    wait = state.engine.backend.hand_over.wait_for_a_change

    def tell_and_wait(*about: Any) -> None:
        Path(flag).touch()
        wait(*about)

    state.engine.backend.hand_over.wait_for_a_change = tell_and_wait
    try:
        return unload(state, "orders", to, PATIENCE)
    finally:
        del state.engine.backend.hand_over.wait_for_a_change


def begin_to_wait(worker: Worker, to: str) -> None:
    """Let a worker move the topic; returns once its call waits for the release. An interrupt before
    that may leave the move to go on without it."""
    flag = f"{worker.path}.waits"
    worker.start(unload_and_tell, to, flag)
    until(lambda: os.path.exists(flag))


def queue_up(state: State, **options: Any) -> None:
    """Wait for the topic, without waiting here."""
    state.kept["future"] = state.topic.producer_async(WAIT, **options)
    # A producer without a reference is closed as soon as it exists.
    state.kept.setdefault("futures", []).append(state.kept["future"])


def take_writer_lock(state: State) -> int:
    """Keep the producer that was waited for; its epoch."""
    state.producer = state.kept.pop("future").result(PATIENCE)
    return state.producer.topic_epoch


def stop_here(state: State, keepalive: float | None) -> None:
    """Stop this process as a whole, but not inside the ledger, whose lock it would keep."""
    with short_of_patience(state.engine, keepalive):
        strike(state.engine, signal.SIGSTOP)


def freeze(worker: Quick, keepalive: float | None = None) -> None:
    """Stop a worker. It goes on with SIGCONT. With `keepalive` it counts as unresponsive after
    so many seconds; one that was opened with so little might while it is merely slow."""
    worker.start(stop_here, keepalive)
    worker.await_strike()


@contextlib.contextmanager
def short_of_patience(engine: xl.Engine, keepalive: float | None) -> Iterator[None]:
    """Within the block, others may evict this engine after so many seconds of silence. None: after
    as many as before."""
    slot = engine.backend._slot
    assert slot is not None
    words, at = slot._atomics, slot._at + slots.KEEPALIVE
    before = words.load64(at)
    if keepalive is not None:
        slot.beat()
        words.store64(at, int(keepalive * 1e9))
    try:
        yield
    finally:
        words.store64(at, before)


def thaw(worker: Quick) -> None:
    """Resume a stopped worker."""
    worker.signal(signal.SIGCONT)
    worker.answer()


# ---- sending, and noting what came of it -------------------------------------------------


class Notes:
    """A file that survives its writer: what was acknowledged, and what was refused."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def take(self, value: bytes, outcome: Callable[[], int]) -> None:
        """Note the offset that `outcome()` gives, or that it raises for sure; and raise."""
        try:
            offset = outcome()
        except xl.ExclusiveLogError as error:
            if not error.maybe_written:
                os.write(self._file, b"%s -1\n" % value)
            raise
        os.write(self._file, b"%s %d\n" % (value, offset))


def reign(state: State, notes: str, tag: str) -> None:
    """Own the topic, and send until it is lost or `retire` is called."""
    state.producer = state.topic.producer(EXCLUSIVE)
    state.kept["stop"] = stop = threading.Event()
    arguments = (state.producer, Notes(notes), tag, stop)
    state.kept["sender"] = thread = threading.Thread(target=_send_on, args=arguments)
    thread.start()


def _send_on(producer: Producer, notes: Notes, tag: str, stop: threading.Event) -> None:
    with contextlib.suppress(xl.ExclusiveLogError):
        for number in range(10**6):
            value = b"%s-%d" % (tag.encode(), number)
            if number % 8 < 3:
                notes.take(value, functools.partial(producer.send, value))
            else:
                receipt = producer.send_async(value)
                notes.take(value, functools.partial(receipt.result, PATIENCE))
            if stop.wait(0.0005):
                return


def reign_and_queue(state: State, notes: str, tag: str) -> None:
    """Own the topic, send a message, and leave three in the queue: then no call is in progress."""
    state.producer = state.topic.producer(EXCLUSIVE, linger=60)
    taken = Notes(notes)
    first = f"{tag}-first".encode()
    taken.take(first, lambda: state.producer.send(first))
    values = [f"{tag}-{number}".encode() for number in range(3)]
    receipts = [(value, state.producer.send_async(value)) for value in values]
    state.kept["queued"] = (taken, receipts)


def retire(state: State, tag: str) -> str:
    """End all use of the topic by this process; return "owner", or how it lost the topic."""
    if "sender" in state.kept:
        state.kept.pop("stop").set()
        state.kept.pop("sender").join(PATIENCE)
    outcome = "nobody"
    try:
        future = state.kept.pop("future", None)
        if future is not None and not future.cancel():
            state.producer = future.result(PATIENCE)
        if state.producer is not None:
            with state.producer as producer:
                state.producer = None
                producer.send(f"{tag}-last-words".encode())
                outcome = "owner"
    except xl.ExclusiveLogError as error:
        outcome = type(error).__name__
    state.kept.pop("futures", None)
    taken, receipts = state.kept.pop("queued", (None, []))
    for value, receipt in receipts:
        with contextlib.suppress(xl.ExclusiveLogError):
            taken.take(value, functools.partial(receipt.result, PATIENCE))
    return outcome


# ---- points at which a process falls -----------------------------------------------------


class Point(NamedTuple):
    """`moment`: before or after the call; or, in the transaction that it makes, right before
    the commit ("committing"), or right after it, when no process has been woken yet ("committed").
    """

    role: str
    where: type
    method: str
    moment: str

    @property
    def inside(self) -> bool:
        """In the ledger's critical section, where a stopped process blocks all writers."""
        return self.moment == "committing"


AROUND = ("before", "after")
THROUGHOUT = ("before", "committing", "committed", "after")
CALLS: list[tuple[str, type, str, tuple[str, ...]]] = [
    ("coordinator", HandOver, "begin", THROUGHOUT),
    ("coordinator", HandOver, "inspect", AROUND),
    ("source", Releases, "hand_over", AROUND),
    ("source", Pauses, "begin", AROUND),
    ("source", Committer, "commit", AROUND),
    ("source", HandOver, "release", THROUGHOUT),
    ("source", LocalSession, "hand_off", AROUND),
    ("destination", Notifications, "_granted", AROUND),
    ("destination", Outcomes, "hand_out", AROUND),
    ("heir", Sessions, "request", THROUGHOUT),  # a destination that has not been waiting
    ("arrival", Pending, "_request_again", THROUGHOUT),  # it waited for the release
    ("canceller", HandOver, "cancel", THROUGHOUT),
    ("leaver", Sessions, "release", THROUGHOUT),
]
POINTS = {
    f"{role}, {moment} {method.removeprefix('_')}": Point(role, where, method, moment)
    for role, where, method, moments in CALLS
    for moment in moments
}


def strike(engine: xl.Engine, number: int) -> None:
    """Send this very thread a signal: it goes no step further. One that is to stop does so as
    often as `Quick.await_strike` asks for it."""
    if number != signal.SIGSTOP:
        signal.pthread_kill(threading.get_ident(), number)
        return
    once_more = _once_more(engine.path, os.getpid())
    with engine.ledger._writing:  # so that no other transaction is stopped with it
        signal.pthread_kill(threading.get_ident(), number)
        while once_more.exists():
            once_more.unlink()
            time.sleep(0.01)  # who is inside leaves the ledger
            signal.pthread_kill(threading.get_ident(), number)


def fall_at(state: State, name: str, number: int) -> None:
    """Send this process that signal once it comes to that point."""
    point = POINTS[name]
    inside = threading.local()
    original = getattr(point.where, point.method)
    fallen: list[str] = []

    def fall() -> None:
        if not fallen:
            fallen.append(name)
            keepalive = KEEPALIVE if number == signal.SIGSTOP else None
            with short_of_patience(state.engine, keepalive):
                strike(state.engine, number)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_it(state, point, self):
            return original(self, *args, **kwargs)
        if point.moment == "before":
            fall()
        inside.here = True
        result = original(self, *args, **kwargs)
        inside.here = False
        if point.moment == "after":
            fall()
        return result

    setattr(point.where, point.method, call)
    if point.moment in ("committing", "committed"):
        _watch_the_commit(point.moment, inside, fall)


def _is_it(state: State, point: Point, called: Any) -> bool:
    if point.where is Releases and point.method == "hand_over":
        return bool(called)
    if point.role == "source":  # it does so in its guard; its sender commits, too
        return threading.current_thread().name == f"exclusivelog-{state.engine.name}"
    return True


def _watch_the_commit(moment: str, inside: threading.local, fall: Callable[[], None]) -> None:
    finish, waken = Transaction.finish, Transaction.waken

    def committing(self: Transaction, tables: Any) -> None:
        finish(self, tables)
        if getattr(inside, "here", False):
            fall()

    def committed(self: Transaction, tables: Any) -> Any:
        if getattr(inside, "here", False):
            fall()
        return waken(self, tables)

    if moment == "committing":
        Transaction.finish = committing
    else:
        Transaction.waken = committed


# ---- the judge ---------------------------------------------------------------------------


class Chronicle:
    """Follows `__events__` and the log of one topic, and fails on:

    - two owners, or a step of a hand-over that does not follow from the one before (E1, E5);
    - an epoch that was left out or used twice (B1), or written by another than its owner (B2);
    - epochs that are interleaved (B8), a message twice, an acknowledged one lost, a refused one
      there all the same (B9).
    """

    def __init__(self, engine: xl.Engine, topic: str = "orders") -> None:
        self.name = topic
        self.events: list[Event] = []
        self.reigns: dict[int, tuple[str, str]] = {}  # epoch: (engine, producer)
        self.offsets: dict[bytes, int] = {}
        self._owner: tuple[str, str] | None = None
        self._going_to: str | None = None
        self._epoch = 0
        self._last = 0
        self._told = engine.topic(EVENTS).reader()
        self._log = engine.topic(topic).reader()

    def read(self) -> list[Event]:
        """Read on, and judge; the new events."""
        messages = list(self._log)  # before the events: these know of every owner then
        told = [Event.loads(message.value) for message in self._told]
        told = [event for event in told if event.topic == self.name]
        for event in told:
            self._tell(event)
        for message in messages:
            self._hear(message)
        return told

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        story = "\n".join(map(str, self.events[-8:]))
        assert getattr(self, f"_{event.kind}")(event), f"this cannot follow:\n{story}"

    def _grant(self, event: Event) -> bool:
        expected = self._epoch + (event.reason != "reconnect")
        fits = self._owner is None and event.epoch == expected
        if self._going_to is not None or event.reason == "hand-over":
            fits = fits and event.target["engine"] == self._going_to
            self._going_to = None
        self._owner, self._epoch = party(event.target), event.epoch
        self.reigns[event.epoch] = self._owner
        return fits

    def _release(self, event: Event) -> bool:
        fits = party(event.source) == self._owner and event.epoch == self._epoch
        if event.reason == "hand-over":
            fits = fits and event.target["engine"] == self._going_to
        self._owner = None
        return fits

    _evict = _release

    def _releasing(self, event: Event) -> bool:
        self._going_to, before = event.target["engine"], self._going_to
        return party(event.source) == self._owner and before in (None, self._going_to)

    def _assigned(self, event: Event) -> bool:
        self._going_to, before = event.target["engine"], self._going_to
        return self._owner is None and before in (None, self._going_to)

    def _cancel(self, event: Event) -> bool:
        fits = event.target["engine"] == self._going_to
        self._going_to = None
        return fits and (event.source is None or party(event.source) == self._owner)

    def _hear(self, message: Any) -> None:
        assert message.offset == len(self.offsets), f"{message} follows {self._last}"
        assert message.epoch >= self._last, f"{message} follows epoch {self._last}"
        assert message.value not in self.offsets, f"{message} is there twice"
        assert self.reigns[message.epoch][1] == message.producer_name, f"{message} of a stranger"
        self.offsets[message.value] = message.offset
        self._last = message.epoch

    def check(self, notes: str) -> int:
        """Compare with what senders have noted; how many messages those were."""
        lines = Path(notes).read_bytes().splitlines() if os.path.exists(notes) else []
        for line in lines:
            value, offset = line.rsplit(b" ", 1)
            assert self.offsets.get(value, -1) == int(offset), f"{value!r}, noted at {offset!r}"
        return len(lines)


def party(facts: Any) -> tuple[str, str]:
    """(engine, producer) of one side of an event."""
    return facts["engine"], facts["producer"]


def steps(events: Iterable[Event]) -> list[tuple[str, str]]:
    """(kind, reason) of events."""
    return [(event.kind, event.reason) for event in events]


# ---- rounds ------------------------------------------------------------------------------


# The fork server says 255 where it has not seen how its child ended.
KILLED = (-signal.SIGKILL, 255)
# How each producer and request of the topic ended.
OUTCOMES = ("owner", "nobody", "ProducerMovedError", "ProducerFencedError")


class Stage:
    """A ledger for rounds of hand-overs, by processes that are killed or stopped.

    The bystander is an engine of this process, which is never harmed.
    """

    def __init__(self, path: str) -> None:
        self.notes = f"{path}.notes"
        self.engine = xl.open(path, name="bystander")
        self.topic = self.engine.topic("orders")
        self.chronicle = Chronicle(self.engine)
        self.rounds = 0
        self._workers = quick_workers(path)
        self._cast: dict[str, Quick] = {}

    def __enter__(self) -> Stage:
        self._make = self._workers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._workers.__exit__(*error)  # first: one that is stopped might hold us up
        self.engine.close()

    def cast(self, role: str) -> Quick:
        """The process in this role; a new one, if the last one was killed."""
        if role not in self._cast:
            self._cast[role] = self._make(role)
        return self._cast[role]

    def dismiss(self) -> None:
        """End all processes: the next round has new ones."""
        for worker in self._cast.values():
            worker.end()
        self._cast.clear()

    def play(self, name: str, asks: str, waiting: bool, number: int) -> None:
        """A round in which `asks` requests the move, and one process is killed or stopped at its
        point."""
        self.rounds += 1
        point, stops = POINTS[name], number == signal.SIGSTOP
        role = {"coordinator": asks, "heir": "destination", "arrival": "destination"}.get(
            point.role, point.role
        )
        falling = self.cast(role)
        self.cast("source").call(
            reign_and_queue if stops else reign, self.notes, f"round-{self.rounds}"
        )
        destination = self.cast("destination")
        if waiting:
            destination.call(queue_up)
        falling.call(fall_at, name, number)
        busy = self._ask(asks, point.role == "heir")
        self._await_the_fall(role, falling, stops)
        upright = [worker for worker in self._cast.values() if worker is not falling]
        if busy in upright:
            busy.answer()
        if destination in upright and not waiting:
            destination.call(queue_up)  # else the topic would stay reserved for it
        self._use_the_topic(upright)
        if stops:
            self._go_on(falling, busy)
        self.chronicle.read()

    def _ask(self, asks: str, heir: bool) -> Quick:
        """Begin the operations that reach the point; returns the processes that have still to
        answer."""
        destination, asking = self.cast("destination"), self.cast(asks)
        asking.start(unload, "orders", destination.id)
        if not heir:
            return asking
        assert asking.answer() == [("orders", "assigned")]
        destination.start(queue_up)
        return destination

    def _await_the_fall(self, role: str, falling: Quick, stops: bool) -> None:
        if stops:
            falling.await_strike()
        else:
            falling.process.join(PATIENCE)
            assert falling.process.exitcode in KILLED
            del self._cast[role]

    def _use_the_topic(self, upright: list[Quick]) -> None:
        """Each survivor uses the topic, and the bystander last."""
        bystander = self.topic.producer_async(WAIT)
        for worker in upright:
            assert worker.call(retire, f"round-{self.rounds}-{worker.pid}") in OUTCOMES
        with bystander.result(PATIENCE) as producer:
            producer.send(b"round-%d-bystander" % self.rounds)

    def _go_on(self, falling: Quick, busy: Quick) -> None:
        """The stopped process finds out the outcome of its topic."""
        falling.signal(signal.SIGCONT)
        if busy is falling:
            with contextlib.suppress(Failed):
                falling.answer()
        assert falling.call(retire, f"round-{self.rounds}-late") in OUTCOMES
        self.dismiss()
