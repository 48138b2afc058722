"""Code that Python runs in the middle of ours: signal handlers, finalizers, the collector.

A handler or a finalizer may call the library at any point, also inside a transaction of the
very thread that it interrupts. It must not wait for itself, and must not break anything.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import threads
from exclusivelog.local.storage import ledger
from testing.children import child, finish, line
from testing.processes import PATIENCE, collect, until, values, within

# Python ignores what a handler raises while a finalizer runs: the program would go on, without its
# engine.
CLOSING_HANDLER = """
    import os, signal, sys
    import exclusivelog as xl

    def unraisable(lost):
        if lost.exc_type is SystemExit:
            os._exit(0)
        sys.__unraisablehook__(lost)

    sys.unraisablehook = unraisable

    engine = xl.open(sys.argv[1])
    topic = engine.topic("orders")

    def bye(*_):
        engine.close()
        sys.exit(0)

    signal.signal(signal.SIGTERM, bye)
    print("ready", flush=True)
    while True:
        with topic.producer("exclusive") as producer:
            producer.send(b"x")
"""


@pytest.mark.long
def test_c1_a_signal_handler_may_close_the_engine(path) -> None:
    """SIGTERM strikes wherever the main thread is, mostly inside a transaction. The process
    ends, and leaves nothing behind."""
    dice = random.Random(3)
    for _ in range(12):
        with child(CLOSING_HANDLER, path) as process:
            assert line(process) == "ready"
            time.sleep(dice.uniform(0.01, 0.05))
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
    with xl.open(path) as engine:
        assert engine.verify().ok
        with engine.topic("orders").producer("exclusive") as producer:
            producer.send(b"mine")


def test_an_interrupt_while_a_thread_starts_is_raised(monkeypatch) -> None:
    """Python raises a RuntimeError instead if it comes just before a condition's lock is taken
    again, at the end of the wait in `Thread.start`."""
    ran = threading.Event()

    def interrupted(state: object) -> None:
        raise KeyboardInterrupt

    thread = threading.Thread(target=ran.set)
    started = thread._started  # type: ignore[attr-defined]
    monkeypatch.setattr(started._cond, "_acquire_restore", interrupted)
    monkeypatch.setattr(started, "set", lambda: None)
    wait = started._cond.wait
    monkeypatch.setattr(started._cond, "wait", lambda _: wait(0.01))
    with pytest.raises(KeyboardInterrupt):
        threads.start("a ledger", thread)
    assert ran.wait(PATIENCE)


@pytest.fixture
def busy_collector() -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.set_threshold(50, 3, 3)
    yield
    gc.set_threshold(*threshold)


@pytest.mark.long
def test_c1_a_finalizer_may_close_its_producer(topic, busy_collector) -> None:
    """The collector finds an application's object in the middle of a transaction, and its
    `__del__` closes a producer: that transaction must not wait for itself."""

    class Sink:
        def __init__(self) -> None:
            self.producer, self.me = topic.producer("shared"), self

        def __del__(self) -> None:
            self.producer.close()

    def make() -> None:
        for _ in range(150):
            Sink()

    within(make, PATIENCE)
    collect()
    until(lambda: not topic.holders)


@pytest.mark.parametrize("kind", [xl.Producer, xl.Term])
def test_c1_an_interrupt_right_before_the_block_releases_the_topic(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    """Python calls a handler also between the call that returns an object and its `with` block."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    def lead() -> None:
        if kind is xl.Producer:
            with topic.producer("exclusive"):
                raise AssertionError
        for term in topic.terms():
            with term:
                raise AssertionError

    monkeypatch.setattr(kind, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lead()
    collect()
    until(lambda: topic.owner is None)


def test_a_call_from_inside_a_transaction_says_so(engine, topic) -> None:
    with topic.producer() as producer:
        with engine.ledger.write_exclusive():
            with pytest.raises(xl.LedgerError, match="signal handler"):
                producer.send(b"x")
            with pytest.raises(xl.LedgerError, match="signal handler"):
                producer.send(bytes(200_000))
            with pytest.raises(xl.LedgerError, match="signal handler"):
                topic.producer()
        producer.flush()
        assert values(topic) == [bytes(200_000)]  # it was queued before it was refused
        assert producer.send(b"x") == 1


INTERRUPTED_CLOSE = """
    import os, signal, sys, threading, time
    import exclusivelog as xl
    from testing.patience import PATIENCE

    function, directory = sys.argv[1:]
    xl.open(directory + "/warm").close()

    def strike(path, number):
        # Ctrl-C at one line of the function; False if no code begins in this line.
        struck = []

        def tracer(frame, event, arg):
            code, files = frame.f_code, ("/life.py", "/runtime.py")
            if code.co_name == function and code.co_filename.endswith(files):
                def local(frame, event, arg):
                    here = frame.f_lineno - frame.f_code.co_firstlineno
                    if event == "line" and here == number and not struck:
                        struck.append(here)
                        os.kill(os.getpid(), signal.SIGINT)
                    return local
                return local

        def interrupted(call):
            sys.settrace(tracer)
            try:
                return call()
            except KeyboardInterrupt:
                return None
            finally:
                sys.settrace(None)

        if function in ("__init__", "_join"):
            interrupted(lambda: xl.open(path, name="killed"))
        else:
            engine = xl.open(path, name="killed")
            producer = engine.topic("orders").producer("exclusive")
            receipt = producer.send_async(b"x")
            interrupted(engine.close)
            engine.close()
            assert engine.closed and receipt.done()
        if not struck:
            return False
        end = time.monotonic() + PATIENCE
        while any("killed" in thread.name for thread in threading.enumerate()):
            assert time.monotonic() < end, threading.enumerate()
            time.sleep(0.01)
        with xl.open(path, name="probe") as probe:
            assert [info.name for info in probe.engines()] == ["probe"]
            probe.topic("orders").producer("wait_for_exclusive", timeout=PATIENCE).close()
        return True

    def in_a_process_of_its_own(number):
        pid = os.fork()
        if pid == 0:
            status = 2  # it raised
            try:
                status = 0 if strike(f"{directory}/{number}", number) else 1
            finally:
                if status == 2:
                    sys.excepthook(*sys.exc_info())
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    struck = number = missed = 0
    while missed < 15:
        number += 1
        status = in_a_process_of_its_own(number)
        if status not in (0, 1):
            sys.exit(f"line {number} of {function}: {status}")
        struck, missed = (struck + 1, 0) if status == 0 else (struck, missed + 1)
    print(struck)
"""


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize(
    "function", ["close", "_finish_work", "_end", "_end_once", "__init__", "_join"]
)
def test_c1_an_interrupt_at_any_line_of_opening_and_closing(tmp_path, function) -> None:
    """Ctrl-C at each line in turn. After a second close, everything is released: no owner, no
    engine and no thread stays behind."""
    assert int(finish(INTERRUPTED_CLOSE, function, tmp_path, timeout=3 * PATIENCE)) >= 4


def test_d4_a_grant_that_cannot_be_told_is_told_later(topic, engine, monkeypatch) -> None:
    """The owners leave while no thread can be started: the waiters have callbacks, which need
    one. They learn of their promotion as soon as there is one again."""
    topics = [engine.topic(name) for name in "abc"]
    owners = [each.producer("exclusive") for each in topics]
    waiting = [each.producer_async("wait_for_exclusive") for each in topics]
    told: list[Any] = []
    for future in waiting:
        future.add_done_callback(told.append)
    with monkeypatch.context() as patch:

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", start)
        for owner in owners:
            owner.close()
        time.sleep(0.3)
        assert not told
    until(lambda: len(told) == 3)
    assert [future.result(0).send(b"x") for future in waiting] == [0, 0, 0]


@pytest.mark.parametrize("other", ["send_async", "send"])
def test_g2_the_collector_strikes_while_a_message_is_added(topic, other) -> None:
    """A list is made for the sequence ids, the collector runs, a finalizer lets another thread
    run, and that one sends. Each message keeps the id that it was sent with."""
    collected = threading.Event()

    class Slow:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            collected.set()
            time.sleep(0.01)

    for _ in range(20):
        sent: dict[bytes, int] = {}
        collected.clear()
        producer = topic.producer("shared", linger=100.0)
        producer.send_async(b"ten", sequence_id=10)

        def rival(producer: xl.Producer = producer, sent: dict[bytes, int] = sent) -> None:
            collected.wait(PATIENCE)
            if other == "send":
                producer.send(b"rival", sequence_id=15)
            else:
                producer.send_async(b"rival", sequence_id=15)
            sent[b"rival"] = 15

        thread = threading.Thread(target=rival)
        thread.start()
        gc.disable()
        Slow()
        emptied = [[] for _ in range(300)]  # the lists kept ready are used up
        gc.set_threshold(1)
        gc.enable()
        try:
            producer.send_async(b"twelve", sequence_id=12)
            sent[b"twelve"] = 12
        except xl.DuplicateSequenceError:
            pass
        finally:
            gc.set_threshold(700, 10, 10)
            collected.set()
            thread.join(PATIENCE)
        producer.close()
        del emptied
        name = producer.name
        log = {m.value: m.sequence_id for m in topic.reader() if m.producer_name == name}
        assert log == {b"ten": 10, **sent}


def test_g2_a_refused_message_leaves_no_empty_batch(topic) -> None:
    with topic.producer() as producer:
        producer.send(b"a", sequence_id=5)
        with pytest.raises(xl.DuplicateSequenceError):
            producer.send(b"b", sequence_id=5)
        assert producer.send_many([b"c", b"d"]) == range(1, 3)
        assert producer.last_sequence_id == 7


def test_g1_keys_and_properties_are_bounded_as_values_are(topic, monkeypatch) -> None:
    monkeypatch.setattr("exclusivelog.messages.MAX_MESSAGE_BYTES", 1000)
    with topic.producer() as producer:
        for wrong in ({"key": bytes(1001)}, {"properties": {"a": "b" * 1000}}):
            with pytest.raises(ValueError, match="1000"):
                producer.send(b"x", **wrong)
            with pytest.raises(ValueError, match="1000"):
                producer.send_many(
                    [b"x"],
                    **{"keys" if name == "key" else name: [value] for name, value in wrong.items()},
                )
        assert producer.send(b"x", key=bytes(1000)) == 0


SHORT_OF_FILES = """
    import os, resource, sys
    import exclusivelog as xl

    engine = xl.open(sys.argv[1])
    topic = engine.topic("orders")
    with topic.producer() as producer:
        producer.send(bytes(200_000))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        others = []
        try:
            while True:     # a thread of the engine may have had one open for a moment
                others.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            topic.reader().read_next(0)
            raise SystemExit("there was a file left")
        except xl.LedgerError as error:
            assert not error.maybe_written and "ulimit" in str(error), error
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for other in others:
            os.close(other)
        assert len(topic.reader().read_next(0).value) == 200_000
        assert producer.send(b"small") == 1

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        reader, kept = topic.reader(), []
        for _ in range(100):        # every message that is kept keeps its memory, but no file
            producer.send(bytes(150_000))
            kept += reader.read_batch(10)
        assert len(kept) == 102
    engine.close()
"""


@pytest.mark.long
def test_h2_a_shortage_of_files_passes(path) -> None:
    finish(SHORT_OF_FILES, path)


@pytest.mark.parametrize("call", ["own", "reader"])
def test_f5_a_claim_that_an_interrupt_strikes_behind_its_commit_is_given_back(
    engine, topic, monkeypatch, call
) -> None:
    """Ctrl-C comes when the claim is durable, but the call has not returned it: the next claim gets
    the resource while this engine stays open."""
    waken = ledger.Transaction.waken
    struck: list[Any] = []

    def strike(self: Any, tables: Any) -> Any:
        if not struck:
            struck.append(True)
            raise KeyboardInterrupt
        return waken(self, tables)

    def claim(of: xl.Engine) -> Any:
        if call == "own":
            return of.own("reports", {"march": None})
        return of.topic("orders").reader(group="reports")

    with monkeypatch.context() as patch:
        patch.setattr(ledger.Transaction, "waken", strike)
        with pytest.raises(KeyboardInterrupt):
            claim(engine)
    assert struck

    def claimants() -> int:
        with engine.ledger.read() as tables:
            return len(list(tables.rows.cursor("claimants")))

    until(lambda: not claimants())
    with claim(engine):
        assert claimants() == 1


# ---- errors of signal handlers ------------------------------------------------------------


@dataclass
class Striking:
    """A signal strikes within a call of `os`, and its handler raises an error of the kind that the
    call itself may raise."""

    monkeypatch: pytest.MonkeyPatch
    error: Callable[[], OSError]
    struck: int = 0
    after: int = 0  # so many calls; 0: not at all

    def __post_init__(self) -> None:
        for name in ("stat", "fstat", "open", "readlink", "statvfs", "listdir", "fsync"):
            self.monkeypatch.setattr(os, name, self._then_strike(getattr(os, name)))

    def _then_strike(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def strike(*args: Any, **options: Any) -> Any:
            found = call(*args, **options)
            if self.after and threading.current_thread() is threading.main_thread():
                self.after -= 1
                if not self.after:
                    self.struck += 1
                    signal.raise_signal(signal.SIGALRM)
            return found

        return strike

    def handler(self, number: int, frame: Any) -> None:
        raise self.error()


HANDLERS_ERRORS = {
    "TimeoutError": TimeoutError,
    "with an errno": lambda: TimeoutError(errno.ETIMEDOUT, "too long"),
    "not found": lambda: FileNotFoundError(errno.ENOENT, "not there"),
    "not permitted": lambda: PermissionError(errno.EACCES, "not permitted"),
    "full": lambda: OSError(errno.ENOSPC, "full"),
    "broken": lambda: OSError(errno.EIO, "broken"),
}


@pytest.mark.parametrize("error", HANDLERS_ERRORS.values(), ids=HANDLERS_ERRORS)
def test_h2_the_error_of_a_signal_handler_is_none_of_the_ledger(
    path, tmp_path, monkeypatch, error
) -> None:
    """A time limit by SIGALRM raises it, at any call of the library that asks the system. It
    reaches the caller as it is, or has no effect, and the ledger works on."""
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        producer = topic.producer("exclusive")
        striking = Striking(monkeypatch, error)
        former = signal.signal(signal.SIGALRM, striking.handler)
        other = itertools.count()

        def send_in_a_transaction() -> None:
            with engine.transaction() as txn:
                producer.send(b"t", transaction=txn)

        calls: list[Callable[[], object]] = [
            engine.ledger.integrity.check_place,
            send_in_a_transaction,
            engine.stats,
            engine.verify,
            lambda: producer.send(bytes(200_000)),
            lambda: next(topic.reader()).value,
            lambda: engine.topic(f"t{next(other)}").producer().close(),
            engine.ledger.usage.check_room,
            lambda: xl.open(path).close(),
            lambda: engine.backup(str(tmp_path / f"backup{next(other)}")),
        ]
        try:
            for call in calls:
                for after in (1, 2, 3, 5, 8):
                    striking.after = after
                    with contextlib.suppress(type(error())):
                        call()
                    striking.after = 0
                    assert not engine.ledger.integrity.failed
        finally:
            striking.after = 0
            signal.signal(signal.SIGALRM, former)
        assert striking.struck > len(calls)
        producer.send(b"last")
        assert engine.verify().ok
        assert [message.value for message in topic.reader()][-1] == b"last"


# ---- opening --------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["exclusivelog-heart-", "exclusivelog-mine"])
def test_c3_an_open_that_is_interrupted_as_a_thread_starts_leaves_none(
    path, monkeypatch, which
) -> None:
    """The thread runs, and its `start` has not returned. Left behind, it would beat for the engine
    that gets the slot next, and this would never be evicted."""
    start, struck = threading.Thread.start, []

    def strike(self: threading.Thread) -> None:
        start(self)
        if self.name.startswith(which) and not struck:
            struck.append(self)
            raise KeyboardInterrupt

    with xl.open(path, name="other") as other:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", strike)
            with pytest.raises(KeyboardInterrupt):
                xl.open(path, name="mine")
        assert struck
        until(lambda: not struck[0].is_alive())
        assert [info.name for info in other.engines()] == ["other"]


def test_c3_a_heartbeat_is_for_the_engine_that_it_was_begun_for(path) -> None:
    with xl.open(path) as engine:
        slots = engine.ledger.lockfile.slots
        left = slots.join("left", {}, None)
        left.leave()
        mine = slots.join("next", {}, None)
        assert mine.index == left.index
        beat = slots.silent_for(mine.engine)
        assert beat is not None
        until(lambda: (slots.silent_for(mine.engine) or 0) > 0.05)
        left.beat()
        assert (slots.silent_for(mine.engine) or 0) > 0.05
        mine.leave()


INTERRUPTED_OPEN = """
    import os, sys, threading, time
    import exclusivelog as xl
    from testing.patience import PATIENCE

    directory, step = sys.argv[1], int(sys.argv[2])
    xl.open(directory + "/warm").close()
    OURS = ("/exclusivelog/", "/threading.py")

    def strike(path, number):
        # KeyboardInterrupt at the n-th line; what is wrong then, None if there are fewer lines.
        lines = 0

        def in_a_function(frame, event, arg):
            nonlocal lines
            if event == "line":
                lines += 1
                if lines == number:
                    raise KeyboardInterrupt
            return in_a_function

        def tracer(frame, event, arg):
            if any(ours in frame.f_code.co_filename for ours in OURS) and lines < number:
                return in_a_function

        sys.settrace(tracer)
        try:
            engine = xl.open(path, name="killed")
            sys.settrace(None)
            engine.close()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        end = time.monotonic() + PATIENCE
        while left := [t for t in threading.enumerate() if "killed" in t.name and t.ident]:
            if time.monotonic() > end:
                return f"line {number} leaves {left}"
            time.sleep(0.01)
        with xl.open(path, name="probe") as probe:
            assert [info.name for info in probe.engines()] == ["probe"]
        return None if lines < number else "sound"

    def in_a_process_of_its_own(number):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            found = "it raised"
            try:
                found = str(strike(f"{directory}/{number}", number))
            finally:
                os.write(writing, found.encode())
                os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        with open(reading, "rb") as answer:
            return answer.read().decode()

    number = 1
    while (found := in_a_process_of_its_own(number)) != "None":
        if found != "sound":
            sys.exit(found)
        number += step
    print(number)
"""


@pytest.mark.long
@pytest.mark.once
def test_c3_an_interrupt_at_any_line_of_opening_leaves_no_thread_and_no_slot(
    tmp_path, sweep
) -> None:
    assert int(finish(INTERRUPTED_OPEN, tmp_path, sweep(97, 3), timeout=8 * PATIENCE)) > 1000
