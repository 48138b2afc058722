"""Every send has one outcome, whatever goes wrong (rule B9)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.log import appending
from testing.children import finish
from testing.journals import move_away
from testing.loops import held
from testing.processes import PATIENCE, until, values, within
from tests.log.test_sending import run_threads

LARGE = bytes(200_000)  # too much for the journal


class Failing:
    """Makes the next appends end with an error of the test's choice, before anything is written
    or after it is: small ones in the journal, batch by batch, or large ones in the tables."""

    def __init__(self, engine: xl.Engine, error: BaseException, *, after: bool, large: bool):
        self.owner, self.name = (
            (engine.ledger, "write_checkpointed") if large else (appending, "_place")
        )
        self.append = getattr(self.owner, self.name)
        self.error, self.after, self.large, self.times = error, after, large, 1

    @contextlib.contextmanager
    def write_all(self) -> Iterator[Any]:
        if self.fails() and not self.after:
            raise self.error
        with self.append() as tables:
            yield tables
        if self.times < 1:
            self.times = 1 << 30
            raise self.error

    def place(self, *args: Any) -> None:
        fails = self.fails()
        if fails and not self.after:
            raise self.error
        self.append(*args)
        if fails:
            raise self.error

    def fails(self) -> bool:
        self.times -= 1
        return self.times == 0

    def __enter__(self) -> None:
        self.together = appending.append_together
        appending.append_together = lambda _, appenders: appenders
        setattr(self.owner, self.name, self.write_all if self.large else self.place)

    def __exit__(self, *error: object) -> None:
        setattr(self.owner, self.name, self.append)
        appending.append_together = self.together


def test_b3_what_a_fenced_owner_has_queued_fails_by_the_fencing_although_it_is_closed(
    path: str, engine: xl.Engine, topic: xl.Topic
) -> None:
    """It closes before it has noticed anything: closing a stale session is a no-op."""
    for _ in range(10):
        owner = topic.producer("exclusive", linger=60)
        receipts = [owner.send_async(b"x") for _ in range(3)]
        with xl.open(path) as other:
            other.topic(topic.name).producer("exclusive_with_fencing").close()
            owner.close()
        assert {type(each.exception(PATIENCE)) for each in receipts} == {xl.ProducerFencedError}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_b9_an_interrupted_commit_leaves_no_call_without_an_outcome(
    engine, topic, kind, after, large
) -> None:
    """An exception strikes the thread that commits for three producers, before the transaction
    or just after it. All three learn what the ledger knows: it is in the log, or nothing of it
    is; and all three can go on at once."""
    told: list[Any] = []
    size = LARGE if large else b""
    mine, *others = [topic.producer(linger=60) for _ in range(3)]
    waiting = [producer.send_async(b"theirs" + size) for producer in others]
    for receipt in waiting:
        receipt.add_done_callback(lambda r: told.append(r.exception(0)))
    waiting.append(mine.send_async(b"mine" + size))
    with (
        Failing(engine, kind("now"), after=after, large=large),
        contextlib.suppress(kind, xl.LedgerError),
    ):
        mine.flush()
    errors = [receipt.exception(PATIENCE) for receipt in waiting]
    written = sorted(value.rstrip(b"\0") for value in values(topic))
    acknowledged = [error is None for error in errors]
    if after and large:
        assert acknowledged == [True, True, True]
    elif after:  # the first one's was written when it struck
        assert acknowledged.count(True) == 1
    else:
        assert acknowledged == [False, False, False]
    assert len(written) == acknowledged.count(True)
    assert all(error is None or not error.maybe_written for error in errors)
    until(lambda: len(told) == 2)
    for producer in (mine, *others):
        producer.send(b"next")
    assert topic.next_offset == 3 + len(written)


@pytest.mark.sampled
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", [MemoryError, RuntimeError, SystemExit])
def test_b9_a_failure_in_the_background_leaves_no_call_without_an_outcome(
    engine, topic, kind, after, large
) -> None:
    """The same where no caller gets the exception: in the thread that commits for
    `send_async`. It goes on for those who come later, from the moment the outcome is known."""
    with topic.producer(linger=0.1) as producer:
        with Failing(engine, kind("now"), after=after, large=large):
            receipt = producer.send_async(LARGE if large else b"x")
            error = receipt.exception(PATIENCE)
        if after:
            assert error is None
        else:
            assert isinstance(error, xl.LedgerError)
            assert not error.maybe_written
        assert producer.send_async(b"y").result(PATIENCE) == (1 if after else 0)
        assert producer.send_async(b"z").result(PATIENCE) == (2 if after else 1)
        assert [m.sequence_id for m in topic.reader()] == list(range(topic.next_offset))


def test_b9_the_outcome_is_unknown_only_where_the_ledger_cannot_tell(engine, topic) -> None:
    """The commit is interrupted, and then the ledger cannot be read either."""
    with topic.producer(linger=0.1) as producer:
        read = engine.ledger.read

        def unreadable() -> Any:
            raise xl.LedgerIOError("the disk is gone")

        with Failing(engine, MemoryError("now"), after=True, large=True):
            engine.ledger.read = unreadable
            receipt = producer.send_async(LARGE)
            error = receipt.exception(PATIENCE)
        engine.ledger.read = read
        assert isinstance(error, xl.LedgerIOError)
        assert error.maybe_written
        with pytest.raises(xl.DuplicateSequenceError):
            producer.send(b"x")
        assert producer.send(b"y") == 1


def test_b9_a_full_ledger_answers_everybody(path) -> None:
    with xl.open(path, map_size=1 << 20) as engine:
        topic = engine.topic("t")
        producers = [topic.producer(max_batch_messages=3, linger=0.001) for _ in range(3)]
        receipts: list[tuple[bytes, xl.Receipt]] = []

        def fill(number: int) -> None:
            for n in range(500):
                value = b"%d %d " % (number, n) + bytes(20_000)
                receipts.append((value, producers[number].send_async(value)))
                time.sleep(0.0005)

        run_threads(3, fill)
        outcomes = [(value, receipt.exception(PATIENCE)) for value, receipt in receipts]
        sent = {value for value, error in outcomes if error is None}
        errors = [error for _, error in outcomes if error is not None]
        assert len(errors) > 100
        assert {type(error) for error in errors} == {xl.LedgerFullError}
        assert not any(error.maybe_written for error in errors)
        assert set(values(topic)) == sent


INTERRUPTED = """
    import faulthandler, os, random, signal, sys, threading, time
    import exclusivelog as xl

    faulthandler.dump_traceback_later(50, exit=True)    # shows the stack of a thread that hangs
    engine = xl.open(sys.argv[1])
    topic = engine.topic("t")
    producer = topic.producer(name="p", linger=0.0005)
    dice, stop = random.Random(int(sys.argv[2])), threading.Event()

    def disturb():
        while not stop.is_set():
            time.sleep(dice.random() * 0.004)
            os.kill(os.getpid(), signal.SIGINT)

    def strike(number, frame):
        global armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    armed = False       # an interrupt while the last one is dealt with would be this script's end
    signal.signal(signal.SIGINT, strike)
    threading.Thread(target=disturb, daemon=True).start()
    receipts, refused, interrupts, number = [], [], 0, 0
    end = time.monotonic() + 2.5
    while True:
        try:
            armed = True
            while time.monotonic() < end:
                number += 1
                value = b"%d" % number
                if number % 3:
                    receipts.append((value, producer.send_async(value)))
                else:
                    try:
                        producer.send(value)
                    except (xl.LedgerIOError, xl.DuplicateSequenceError) as error:
                        refused.append((value, error))
            armed = False
            break
        except KeyboardInterrupt:
            interrupts += 1
    stop.set()
    for attempt in range(3):        # what was interrupted last may still have its outcome to tell
        try:
            producer.flush()
            producer.send(b"last")
            break
        except (xl.LedgerIOError, xl.DuplicateSequenceError):
            pass
    else:
        raise SystemExit("the producer is stuck")
    log = [m.value for m in topic.reader()]
    assert log[-1] == b"last"
    assert len(set(log)) == len(log), "written twice"
    unknown = 0
    for value, receipt in receipts:
        assert receipt.done(), "silence"
        error = receipt.exception(0)
        if error is None:
            assert log[receipt.result(0)] == value
        elif isinstance(error, xl.DuplicateSequenceError) or error.maybe_written:
            unknown += 1
        else:
            assert value not in log, "written in spite of its error"
    producer.close()
    engine.close()
    with xl.open(sys.argv[1]) as engine:
        assert engine.verify().ok
    print(interrupts, number, unknown)
"""


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_b9_interrupts_at_random_moments(path, seed) -> None:
    """Ctrl-C, hundreds of times, wherever the sending thread happens to be. Every receipt ends
    with an outcome that is true, nothing is written twice, and the producer can go on."""
    interrupts, sent, _ = map(int, finish(INTERRUPTED, path, seed, timeout=PATIENCE).split())
    assert interrupts > 50
    assert sent > 50


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError, SystemExit])
def test_b9_a_thread_whose_own_commit_is_cut_short_gets_its_outcome(
    topic, monkeypatch, kind
) -> None:
    """The thread that sends leads the commit, and it is cut short before anything of it is
    written: the thread in the background tries again."""
    append, struck = appending.append, []

    def strike(*args: Any) -> None:
        if not struck:
            struck.append(threading.current_thread().name)
            raise kind("struck")
        append(*args)

    monkeypatch.setattr(appending, "append", strike)
    with topic.producer() as producer, topic.producer(linger=60) as other:
        theirs = other.send_async(b"theirs")
        with contextlib.suppress(SystemExit):
            assert within(lambda: producer.send(LARGE)) in (0, 1)
        assert theirs.result(PATIENCE) in (0, 1)
        until(lambda: topic.next_offset == 2)
    assert struck == ["within"]


def test_b9_a_send_that_times_out_says_that_its_message_may_come(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """To send it again, as one does with what is `retriable`, would append it twice."""
    producer = topic.producer()
    with held(engine), pytest.raises(xl.WaitTimeoutError, match="still on its way") as caught:
        producer.send(b"slow", timeout=0.05)
    assert (caught.value.maybe_written, caught.value.retriable) == (True, False)
    producer.flush()
    assert values(topic) == [b"slow"]


@pytest.mark.once  # only `power` flushes
def test_b9_a_send_whose_ledger_is_moved_before_its_flush_may_be_in_the_log(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """It is, where the ledger is now. Later calls say that they have written nothing."""
    producer = topic.producer()
    appended = producer._sender.append([(None, b"1", None)])
    moved = move_away(engine)
    with pytest.raises(xl.LedgerError, match="no longer the ledger") as caught:
        appended.await_flush()
    assert caught.value.maybe_written
    for call in (lambda: producer.send(b"2"), lambda: topic.next_offset):
        with pytest.raises(xl.LedgerError, match="no longer the ledger") as later:
            call()
        assert not later.value.maybe_written
    engine.close()
    with xl.open(moved) as again:
        assert values(again.topic(topic.name)) == [b"1"]


@pytest.mark.once  # only `power` flushes
def test_b9_queued_messages_whose_ledger_is_moved_before_their_flush_have_an_outcome(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = appending._place

    def move_behind(*args: Any) -> None:
        place(*args)
        move_away(engine)

    monkeypatch.setattr(appending, "append_together", lambda _, appenders: appenders)
    monkeypatch.setattr(appending, "_place", move_behind)
    receipt = topic.producer().send_async(b"1")
    error = within(lambda: receipt.exception(PATIENCE))
    assert isinstance(error, xl.LedgerError)
    assert error.maybe_written
