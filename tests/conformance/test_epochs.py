"""Epochs and fencing, on the public interface alone (rules B1 to B10)."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import exclusivelog as xl
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    State,
    Worker,
    open_producer,
    producer_state,
    send,
    until,
    values,
    within,
)

ALONE = (EXCLUSIVE, WAIT, FENCING)
OF_MANY = pytest.param(SHARED, marks=pytest.mark.needs("shared_producers"))
FENCED = xl.ProducerFencedError


@pytest.mark.needs("shared_producers")
def test_b1_every_grant_has_a_new_epoch(path: str) -> None:
    chance = random.Random(1)
    epochs, opened = [], []
    with contextlib.ExitStack() as stack:
        topics = [stack.enter_context(xl.open(path)).topic("orders") for _ in range(3)]
        for _ in range(150):
            if opened and chance.random() < 0.4:
                opened.pop(chance.randrange(len(opened))).close()
                continue
            mode = chance.choice((SHARED, EXCLUSIVE, FENCING, WAIT))
            before = topics[0].epoch
            try:
                producer = chance.choice(topics).producer(mode, timeout=0)
            except (xl.ProducerBusyError, FENCED, xl.WaitTimeoutError):
                assert topics[0].epoch == before
                continue
            opened.append(producer)
            if mode == SHARED:
                assert topics[0].epoch == producer.topic_epoch == before
            else:
                assert topics[0].epoch == producer.topic_epoch == before + 1
                epochs.append(producer.topic_epoch)
    assert epochs == list(range(1, len(epochs) + 1))
    assert len(epochs) > 20


@pytest.mark.on_broker
def test_b1_an_epoch_outlives_all_processes(path: str, worker: Callable[..., Worker]) -> None:
    for epoch in range(1, 4):
        first, second = worker(name="first"), worker(name="second")
        assert first.call(open_producer, EXCLUSIVE) == 2 * epoch - 1
        assert second.call(open_producer, FENCING) == 2 * epoch
        first.kill()
        second.kill()  # now no process has the ledger open
    with xl.open(path) as engine:
        assert engine.topic("orders").epoch == 6
        assert engine.topic("orders").producer(EXCLUSIVE).topic_epoch == 7


@pytest.mark.needs("deletion")
def test_b1_a_deleted_topic_goes_on_counting_when_it_is_made_again(path: str) -> None:
    """A topic is deleted and made again under its name. Its first life had an owner with epoch
    1 that may still be around somewhere: epoch 1 must not be given a second time."""
    last = 0
    for _ in range(4):
        with xl.open(path) as engine:
            topic = engine.topic("orders")
            assert (topic.epoch, topic.next_offset) == (last, 0)
            for _ in range(2):
                with topic.producer(EXCLUSIVE) as producer:
                    assert producer.topic_epoch == last + 1
                    producer.send(b"x")
                last += 1
            engine.delete_topic("orders")
            assert engine.topics() == []
            with pytest.raises(xl.TopicNotFoundError):
                topic.producer(EXCLUSIVE)
            with pytest.raises(xl.TopicNotFoundError):
                engine.topic("orders", create=False)


@pytest.mark.needs("deletion")
@pytest.mark.parametrize("mode", [EXCLUSIVE, WAIT, FENCING])
def test_b1_an_epoch_of_a_deleted_topic_cannot_be_claimed(
    engine: xl.Engine, topic: xl.Topic, mode: str
) -> None:
    """Its old owner comes back with the epoch that it had. The topic of that name is another
    one by now, and has had no owner yet: no epoch is granted twice."""
    topic.producer(EXCLUSIVE).close()
    engine.delete_topic("orders")
    again = engine.topic("orders")
    with pytest.raises(FENCED, match="is out of date"):
        again.producer(mode, topic_epoch=1)
    again.producer(mode).close()
    assert again.epoch == 2
    assert again.producer(EXCLUSIVE, topic_epoch=2).topic_epoch == 2


STALE_CALLS: dict[str, Callable[[xl.Producer], Any]] = {
    "send": lambda producer: producer.send(b"stale"),
    "send a tombstone": lambda producer: producer.send(None, key="k"),
    "send_async": lambda producer: producer.send_async(b"stale").result(PATIENCE),
    "send_many": lambda producer: producer.send_many([b"stale"] * 3),
    "send_many of nothing": lambda producer: producer.send_many([]),
    "flush": lambda producer: producer.flush(timeout=PATIENCE),
}


@pytest.mark.rule("B7")
def test_b3_closing_the_engine_of_a_stale_session_affects_no_other(path: str) -> None:
    with xl.open(path) as engine:
        with xl.open(path) as other:
            stale = other.topic("orders").producer(EXCLUSIVE)
            owner = engine.topic("orders").producer(FENCING)
            assert stale.topic_epoch == 1
        assert owner.state == "open"
        assert owner.send(b"x") == 0


def fence(topic: xl.Topic) -> None:
    """Take the topic, write, and go away again."""
    with topic.producer(FENCING) as rival:
        rival.send(b"rival")


def all_errors(producer: xl.Producer) -> list[BaseException]:
    """What each call on a fenced producer raises."""
    errors = []
    for call in [*STALE_CALLS.values(), *STALE_CALLS.values()]:
        with pytest.raises(FENCED) as error:
            call(producer)
        errors.append(error.value)
    return errors


@pytest.mark.parametrize("mode", [OF_MANY, EXCLUSIVE, FENCING])
@pytest.mark.parametrize("first", ["look", "send", "send_many of nothing", "flush", "wait"])
def test_b4_fenced_is_for_ever_and_always_the_same_error(
    engine: xl.Engine, topic: xl.Topic, mode: str, first: str
) -> None:
    """However the loss is noticed first, every call raises the same error object from then
    on, at once, and also after the rival has gone and the topic is free again."""
    noticed: list[BaseException] = []
    producer = topic.producer(mode, on_fenced=lambda _, error: noticed.append(error))
    with xl.open(engine.path) as other:
        fence(other.topic("orders"))
    if first == "wait":
        until(lambda: noticed)
    elif first == "look":
        assert producer.state == "fenced"
    else:
        with pytest.raises(FENCED) as error:
            STALE_CALLS[first](producer)
        noticed.append(error.value)
    errors = all_errors(producer)
    until(lambda: noticed)
    assert {id(error) for error in errors + noticed} == {id(errors[0])}
    assert producer.state == "fenced"
    assert topic.owner is None
    producer.close()
    assert producer.state == "closed"
    assert topic.producer(EXCLUSIVE).topic_epoch == topic.epoch  # a new one is welcome


def test_b4_all_threads_that_send_get_the_same_error(engine: xl.Engine, topic: xl.Topic) -> None:
    """Several threads send with one producer, with and without waiting, while a rival takes
    the topic: some notice it by a refused commit, some by the notification."""

    def send_until_fenced(producer: xl.Producer, asynchronous: bool) -> BaseException:
        while True:
            try:
                if asynchronous:
                    producer.send_async(b"x").result(PATIENCE)
                else:
                    producer.send(b"x")
            except FENCED as error:
                return error

    with xl.open(engine.path) as other, ThreadPoolExecutor(4) as pool:
        for _ in range(25):
            producer = topic.producer(FENCING)
            senders = [
                pool.submit(send_until_fenced, producer, asynchronous)
                for asynchronous in (False, True, False, True)
            ]
            before = topic.next_offset
            until(lambda before=before: topic.next_offset > before + 3)
            with other.topic("orders").producer(FENCING):
                errors = [sender.result(timeout=PATIENCE) for sender in senders]
                errors += all_errors(producer)
            assert {id(error) for error in errors} == {id(errors[0])}
            producer.close()


@pytest.mark.parametrize("mode", ALONE)
def test_b5_a_free_topic_at_the_same_epoch_is_granted_without_a_new_one(
    engine: xl.Engine, topic: xl.Topic, mode: str
) -> None:
    for _ in range(2):
        topic.producer(EXCLUSIVE).close()
    for _ in range(3):
        with topic.producer(mode, topic_epoch=2) as again:
            assert again.topic_epoch == topic.epoch == 2
            again.send(b"x")
    assert topic.producer(mode).topic_epoch == 3
    assert {message.epoch for message in topic.reader()} == {2}
    assert not engine.supports("verify") or engine.verify().ok


def test_b5_an_epoch_that_was_never_granted_cannot_be_claimed(topic: xl.Topic) -> None:
    for mode in ALONE:
        with pytest.raises(xl.InvalidEpochError):
            topic.producer(mode, topic_epoch=0)
    assert topic.epoch == 0


@pytest.mark.needs("shared_producers")
def test_b5_a_shared_producer_comes_back_with_the_epoch_that_it_had(topic: xl.Topic) -> None:
    for epoch in range(2):
        with topic.producer(SHARED) as before:
            assert before.topic_epoch == epoch
        with topic.producer(SHARED, topic_epoch=before.topic_epoch) as again:
            again.send(b"x")
            assert again.topic_epoch == topic.epoch == epoch
        topic.producer(EXCLUSIVE).close()
        with pytest.raises(FENCED):
            topic.producer(SHARED, topic_epoch=epoch)


def test_b5_a_claim_does_not_beat_a_live_holder(topic: xl.Topic) -> None:
    topic.producer(EXCLUSIVE).close()
    if topic.engine.supports("shared_producers"):
        with topic.producer() as shared, pytest.raises(FENCED):
            topic.producer(EXCLUSIVE, topic_epoch=1)
        assert shared.state == "closed"
    with topic.producer(EXCLUSIVE, topic_epoch=1) as owner:
        with pytest.raises(FENCED):
            topic.producer(EXCLUSIVE, topic_epoch=1)
        assert owner.state == "open"
        # Taking it by force makes a new epoch: the old owner wrote under the one claimed.
        assert topic.producer(FENCING, topic_epoch=1).topic_epoch == 2
        assert owner.state == "fenced"


def test_b5_a_claim_in_the_queue_is_granted_unchanged_without_an_owner_in_between(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """A process is killed and started again. Its new instance has the old one's epoch, and
    queues up behind the shared producers that were quicker."""
    process = worker(name="first life")
    epoch = process.call(open_producer, EXCLUSIVE)
    process.kill()
    with topic.producer():
        again = topic.producer_async(WAIT, topic_epoch=epoch)
        assert not again.done()
    assert again.result(timeout=PATIENCE).topic_epoch == topic.epoch == epoch
    again.result().close()
    assert topic.producer(EXCLUSIVE).topic_epoch == epoch + 1


@pytest.mark.on_broker
def test_b5_a_claim_is_checked_again_at_promotion(topic: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE)
    first = topic.producer_async(WAIT, priority=1)
    claimant = topic.producer_async(WAIT, topic_epoch=1)
    last = topic.producer_async(WAIT)
    owner.close()
    first.result(timeout=PATIENCE).close()  # epoch 2: the claim has become stale in the queue
    with pytest.raises(FENCED) as error:
        claimant.result(timeout=PATIENCE)
    winner = last.result(timeout=PATIENCE)
    assert winner.topic_epoch == topic.epoch == 3
    assert error.value.holder is not None
    if topic.engine.supports("transactions"):  # one of them passes it over and grants the next
        assert error.value.holder.session == winner._session.id


@pytest.mark.on_broker
def test_b5_a_process_keeps_its_epoch_through_a_restart(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    epoch = process.call(open_producer, EXCLUSIVE, name="ann")
    process.call(send, b"1")
    process.kill()
    process = worker()
    assert process.call(open_producer, EXCLUSIVE, name="ann", topic_epoch=epoch) == epoch
    process.call(send, b"2")
    assert [(m.epoch, m.value, m.sequence_id) for m in topic.reader()] == [
        (1, b"1", 0),
        (1, b"2", 1),
    ]


def send_until_fenced(state: State, name: str) -> list[tuple[int, bytes]]:
    """Send until the topic is lost; what was acknowledged."""
    assert state.producer is not None
    acknowledged: list[tuple[int, bytes]] = []
    for number in itertools.count():
        value = f"{name}-{state.producer.topic_epoch}-{number}".encode()
        try:
            acknowledged.append((state.producer.send(value), value))
        except FENCED:
            return acknowledged
    raise AssertionError


@pytest.mark.on_broker
@pytest.mark.parametrize("claim", [1, 9])
def test_b6_a_stale_fencing_request_evicts_no_engine(
    path: str, topic: xl.Topic, claim: int
) -> None:
    topic.producer(EXCLUSIVE).close()
    owner, waiter = topic.producer(EXCLUSIVE), topic.producer_async(WAIT)
    with xl.open(path) as other, pytest.raises((FENCED, xl.InvalidEpochError)):
        other.topic("orders").producer(FENCING, topic_epoch=claim)
    assert (owner.send(b"still here"), owner.topic_epoch, topic.epoch) == (0, 2, 2)
    assert not waiter.done()
    assert len(topic.waiters) == 1


@pytest.mark.on_broker
def test_b7_a_late_release_leaves_the_successor_as_it_is(topic: xl.Topic) -> None:
    evicted, waiter = topic.producer(EXCLUSIVE), topic.producer_async(WAIT)
    successor = topic.producer(FENCING)
    third = topic.producer_async(WAIT)
    evicted.close()
    assert (successor.send(b"x"), successor.state, third.done()) == (0, "open", False)
    assert isinstance(waiter.exception(timeout=PATIENCE), FENCED)


@pytest.mark.rule("B2")
def test_b8_b10_owners_that_take_the_topic_from_each_other_never_interleave(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Two processes send as fast as they can, and each in turn takes the topic from the other
    in the middle of it. All that was acknowledged stays, where it was acknowledged; the log
    is one segment per epoch."""
    processes = [worker(name=name) for name in ("a", "b")]
    acknowledged: list[tuple[int, bytes]] = []
    epochs = 16
    for epoch in range(1, epochs + 1):
        process, other = processes[epoch % 2], processes[(epoch + 1) % 2]
        assert process.call(open_producer, FENCING) == epoch
        if epoch > 1:
            acknowledged += other.answer()  # it has been thrown out
        before = topic.next_offset
        process.start(send_until_fenced, str(process.pid))
        until(lambda before=before: topic.next_offset >= before + 5)
    fence(topic)
    acknowledged += processes[epochs % 2].answer()

    messages = list(topic.reader())
    seen = {message.offset: message.value for message in messages}
    assert all(seen[offset] == value for offset, value in acknowledged)
    assert len(messages) == len(acknowledged) + 1  # the rival's, and not one unacknowledged
    assert [message.offset for message in messages] == list(range(len(messages)))
    segments = [
        (epoch, {m.producer_name for m in segment})
        for epoch, segment in itertools.groupby(messages, key=lambda message: message.epoch)
    ]
    assert [epoch for epoch, _ in segments] == list(range(1, epochs + 2))
    assert all(len(names) == 1 for _, names in segments)
    assert engine.verify().ok


def outcome(call: Callable[[], int]) -> int | xl.ExclusiveLogError:
    """The offset, or the error: exactly one of both."""
    try:
        return call()
    except xl.ExclusiveLogError as error:
        return error


def judge(topic: xl.Topic, outcomes: dict[bytes, Any], errors: Any) -> None:
    """What was acknowledged is in the log once, at its offset; what failed is not."""
    log = {message.offset: message.value for message in topic.reader()}
    offsets = [offset for offset in outcomes.values() if isinstance(offset, int)]
    assert len(set(offsets)) == len(offsets)
    present = set(log.values())
    for value, got in outcomes.items():
        if isinstance(got, int):
            assert log[got] == value
        else:
            assert isinstance(got, errors)
            assert got.maybe_written is False
            assert value not in present


@pytest.mark.on_broker
def test_b9_each_send_has_one_outcome_also_while_the_topic_is_lost(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    outcomes: dict[bytes, Any] = {}

    def keep_sending(producer: xl.Producer, thread: int) -> None:
        for number in itertools.count():
            value = f"{producer.topic_epoch}-{thread}-{number}".encode()
            if thread % 2:
                outcomes[value] = outcome(lambda value=value: producer.send(value))
            else:
                receipts: dict[bytes, xl.Receipt] = {}
                with contextlib.suppress(FENCED):
                    for i in range(5):
                        receipts[value + b"-%d" % i] = producer.send_async(value + b"-%d" % i)
                for each, receipt in receipts.items():
                    outcomes[each] = outcome(lambda receipt=receipt: receipt.result(PATIENCE))
            if producer.state != "open":
                return

    with xl.open(engine.path) as other, ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            producer = topic.producer(FENCING, linger=0.001)
            senders = [pool.submit(keep_sending, producer, thread) for thread in range(4)]
            before = topic.next_offset
            until(lambda before=before: topic.next_offset > before + 10)
            with other.topic("orders").producer(FENCING):
                for sender in senders:
                    sender.result(timeout=PATIENCE)
    judge(topic, outcomes, FENCED)
    assert sum(isinstance(got, int) for got in outcomes.values()) > 100


@pytest.mark.sampled
@pytest.mark.parametrize("closed", ["producer", "engine", "last engine of the process"])
def test_b9_each_send_has_one_outcome_also_while_it_is_closed(path: str, closed: str) -> None:
    """One thread closes the producer, or the engine, under the hands of others that send.
    No call may wait for ever for an outcome that cannot come any more."""
    outcomes: dict[bytes, Any] = {}

    def keep_sending(producer: xl.Producer, round_: int, thread: int) -> None:
        for number in itertools.count():
            value = f"{round_}-{thread}-{number}".encode()
            got = outcome(lambda value=value: producer.send(value))
            outcomes[value] = got
            if not isinstance(got, int):
                return

    chance = random.Random(2)
    with contextlib.ExitStack() as stack:
        if closed == "engine":
            stack.enter_context(xl.open(path))
        for round_ in range(25):
            engine = xl.open(path)
            producer = engine.topic("orders").producer(EXCLUSIVE)
            with ThreadPoolExecutor(3) as pool:
                senders = [pool.submit(keep_sending, producer, round_, i) for i in range(3)]
                time.sleep(chance.random() * 0.02)
                within(producer.close if closed == "producer" else engine.close)
                for sender in senders:
                    within(sender.result)
            engine.close()
        judge(stack.enter_context(xl.open(path)).topic("orders"), outcomes, xl.EngineClosedError)


def test_b9_receipts_are_settled_when_the_engine_is_closed(path: str, engine: xl.Engine) -> None:
    other = xl.open(path)
    producer = other.topic("orders").producer(EXCLUSIVE, linger=60)
    receipts = [producer.send_async(b"%d" % i) for i in range(100)]
    other.close()
    assert [receipt.result(timeout=0) for receipt in receipts] == list(range(100))
    assert values(engine.topic("orders")) == [b"%d" % i for i in range(100)]


def send_slowly(state: State, values: list[bytes], linger: float) -> None:
    """Queue messages that are to be committed later."""
    state.producer = state.topic.producer(EXCLUSIVE, linger=linger)
    state.kept["receipts"] = [state.producer.send_async(value) for value in values]


def receipts(state: State) -> list[Any]:
    """What became of them: an offset, or the kind of error."""
    got = [
        outcome(lambda receipt=receipt: receipt.result(PATIENCE))
        for receipt in state.kept["receipts"]
    ]
    return [each if isinstance(each, int) else type(each).__name__ for each in got]


@pytest.mark.on_broker
def test_b10_what_was_not_written_before_the_eviction_is_not_written_after_it(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """A process has messages in its buffer, waiting for more to come, when a rival takes the
    topic and writes. All of them must fail: none may be written behind the rival's."""
    process = worker()
    process.call(send_slowly, [b"buffered"] * 20, linger=60.0)
    fence(topic)
    assert process.call(receipts) == ["ProducerFencedError"] * 20
    assert process.call(producer_state) == "fenced"
    assert values(topic) == [b"rival"]


def test_b10_an_eviction_waits_for_no_sender_and_no_sender_for_it(topic: xl.Topic) -> None:
    """Ten owners in a row, each thrown out while it sends from a thread that has not heard of
    it yet: every acknowledgement given before the eviction precedes the next owner's first
    message."""
    acknowledged: dict[int, int] = {}
    stop = threading.Event()

    def keep_sending(producer: xl.Producer) -> None:
        with contextlib.suppress(FENCED):
            while not stop.is_set():
                acknowledged[producer.send(b"%d" % producer.topic_epoch)] = producer.topic_epoch

    with ThreadPoolExecutor(10) as pool:
        senders = []
        for _ in range(10):
            producer = topic.producer(FENCING)
            senders.append(pool.submit(keep_sending, producer))
            until(lambda epoch=producer.topic_epoch: epoch in acknowledged.values())
        stop.set()
        for sender in senders:
            sender.result(timeout=PATIENCE)
    log = {message.offset: message.epoch for message in topic.reader()}
    assert acknowledged == log
    epochs = [log[offset] for offset in sorted(log)]
    assert epochs == sorted(epochs)


def test_b9_every_send_has_an_outcome_when_the_topic_is_taken_away(path, worker) -> None:
    """Threads send, synchronously and not, while another process takes the topic. What was
    acknowledged is in the log, what was refused is not, and nothing stands behind the rival's
    first message."""
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        producer = topic.producer("exclusive", linger=0.001)
        outcomes: list[tuple[bytes, Any]] = []
        rival = worker()

        def run(number: int) -> None:
            for n in itertools.count():
                value = b"%d %d" % (number, n)
                time.sleep(0.0001)
                try:
                    receipt = producer.send_async(value)
                    outcomes.append((value, receipt if number % 2 else receipt.result(PATIENCE)))
                except xl.ProducerFencedError as error:
                    outcomes.append((value, error))
                    return

        threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        rival.call(open_producer, "exclusive_with_fencing")
        end = topic.next_offset
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert topic.next_offset == end
        log = {m.offset: m.value for m in topic.reader()}
    refused = 0
    for value, outcome in outcomes:
        if isinstance(outcome, xl.Receipt):
            error = outcome.exception(PATIENCE)
            outcome = error if error is not None else outcome.result(0)
        if isinstance(outcome, int):
            assert log[outcome] == value
        else:
            assert isinstance(outcome, xl.ProducerFencedError)
            assert value not in log.values()
            refused += 1
    assert refused >= 4
    assert len(outcomes) - refused == len(log)


@pytest.mark.sampled
def test_b9_every_send_has_an_outcome_when_the_engine_is_closed(path) -> None:
    """Threads send without a pause while the engine is closed under them. No call hangs; what
    was acknowledged is in the log, and nothing else is."""
    total = 0
    for _ in range(15):
        engine = xl.open(path)
        topic = engine.topic("t")
        first = topic.next_offset
        producer = topic.producer(EXCLUSIVE, linger=0.0005)
        outcomes: list[tuple[bytes, Any]] = []

        def run(
            number: int, producer: xl.Producer = producer, outcomes: list[Any] = outcomes
        ) -> None:
            for n in itertools.count():
                value = b"%d %d" % (number, n)
                time.sleep(0.0001)
                try:
                    if number % 2:
                        outcomes.append((value, producer.send_async(value)))
                    else:
                        outcomes.append((value, producer.send(value)))
                except xl.EngineClosedError:
                    return

        threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        until(lambda outcomes=outcomes: outcomes)
        time.sleep(0.03)
        within(engine.close, PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        with xl.open(path) as engine:
            log = {m.offset: m.value for m in engine.topic("t").reader(first)}
        acknowledged = 0
        for value, outcome in outcomes:
            if isinstance(outcome, xl.Receipt):
                error = outcome.exception(PATIENCE)
                assert error is None or isinstance(error, xl.EngineClosedError)
                if error is not None:
                    assert not error.maybe_written
                    assert value not in log.values()
                    continue
                outcome = outcome.result(0)
            assert log[outcome] == value
            acknowledged += 1
        assert acknowledged == len(log)
        total += acknowledged
    assert total > 0


@pytest.mark.rule("B5", "E5")
def test_b5_e5_a_waiter_that_gets_its_old_epoch_back_reconnects(
    topic: xl.Topic, engine: xl.Engine
) -> None:
    owner = topic.producer(EXCLUSIVE, name="leader")
    waiting = topic.producer_async(WAIT, name="leader", topic_epoch=1)
    until(lambda: topic.waiters)
    owner.close()
    assert waiting.result(PATIENCE).topic_epoch == 1
    grants = [event.reason for event in engine.history("orders") if event.kind == "grant"]
    assert grants == ["request", "reconnect"]


@pytest.mark.rule("J5")
def test_j5_the_life_of_a_producer_is_logged_alike(
    topic: xl.Topic, caplog: pytest.LogCaptureFixture
) -> None:
    def heard(event: str) -> list[tuple[str, str, int, str]]:
        there = [r for r in caplog.records if getattr(r, "event", None) == event]
        return [(r.topic, r.producer, r.epoch, r.reason) for r in there]

    caplog.set_level(logging.INFO, "exclusivelog")
    first = topic.producer(EXCLUSIVE, name="first")
    second = topic.producer(FENCING, name="second")
    until(lambda: heard("lost"))
    second.close()
    first.close()
    until(lambda: heard("released"))
    assert heard("granted") == [
        ("orders", "first", 1, "request"),
        ("orders", "second", 2, "fencing"),
    ]
    assert heard("evicted") == [("orders", "first", 1, "fenced")]
    assert [lost[:3] for lost in heard("lost")] == [("orders", "first", 1)]
    assert heard("released") == [("orders", "second", 2, "closed")]
    topic.engine.close()
    assert [r.engine for r in caplog.records if getattr(r, "event", None) == "closed"]
