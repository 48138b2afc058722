"""Leading in a loop, on the public interface alone: `for term in topic.terms()`.

A turn ends with its block, or with the loss of the topic, and the loop waits in the queue again
(rules C1, B4, D1, D5). Whatever else ends the loop leaves neither an owner nor a waiter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    WAIT,
    State,
    Worker,
    collect,
    hang,
    until,
    within,
)


def take_over(topic: xl.Topic) -> None:
    """Fence the owner, and give the topic up."""
    topic.producer(FENCING).close()


def is_free(topic: xl.Topic) -> bool:
    """Nobody has it, and nobody waits for it."""
    return topic.owner is None and topic.waiters == []


@pytest.fixture
def rival(path: str) -> Iterator[xl.Topic]:
    """The topic, as another engine has it."""
    with xl.open(path, name="rival") as engine:
        yield engine.topic("orders")


def lead_with(topic: xl.Topic, work: Callable[[xl.Producer], object]) -> None:
    """Lead, and do this in each turn."""
    for term in topic.terms():
        with term as producer:
            work(producer)


# ---- turns -------------------------------------------------------------------------------


@pytest.mark.on_broker
@pytest.mark.rule("C1")
def test_a_turn_ends_with_its_block_and_the_loop_waits_at_the_end_of_the_queue(
    topic: xl.Topic, rival: xl.Topic
) -> None:
    epochs = []
    for term in topic.terms(name="leader"):
        with term as producer:
            assert topic.owner is not None
            assert (topic.owner.producer_name, topic.owner.epoch) == ("leader", term.epoch)
            epochs.append(term.epoch)
            producer.send(b"by a leader")
            if len(epochs) == 2:
                break
            other = rival.producer_async(WAIT)
            until(lambda: topic.waiters)
        other.result(PATIENCE).close()  # it is promoted before the loop waits again
    assert epochs == [1, 3]
    assert is_free(topic)


@pytest.mark.rule("D1")
def test_the_requests_of_a_loop_have_its_priority_and_options(
    topic: xl.Topic, rival: xl.Topic
) -> None:
    owner, served = rival.producer(EXCLUSIVE), threading.Event()

    def lead() -> None:
        terms = topic.terms("leader", 7, properties={"at": "home"}, serializer="json")
        for term in terms:
            with term as producer:
                assert producer.send({"a": 1}) == 0
                assert topic.owner is not None
                assert dict(topic.owner.properties) == {"at": "home"}
                break
        served.set()

    thread = threading.Thread(target=lead)
    thread.start()
    [waiter] = until(lambda: topic.waiters)
    assert (waiter.producer_name, waiter.priority) == ("leader", 7)
    owner.close()
    assert served.wait(PATIENCE)
    thread.join(PATIENCE)
    assert topic.reader(deserializer="json").read_next(PATIENCE).value == {"a": 1}


# ---- the loss of the topic ---------------------------------------------------------------


def receipt(producer: xl.Producer) -> object:
    return producer.send_async(b"x").result(PATIENCE)


def in_a_group(producer: xl.Producer) -> object:
    try:
        return producer.send(b"x")
    except xl.ProducerFencedError as error:
        raise ExceptionGroup("of tasks", [error, ExceptionGroup("more", [error])]) from None


CALLS: dict[str, Callable[[xl.Producer], object]] = {
    "send": lambda producer: producer.send(b"x"),
    "send with a key": lambda producer: producer.send(b"x", key="k"),
    "send_many": lambda producer: producer.send_many([b"x"]),
    "send_async": receipt,
    "flush": lambda producer: producer.flush(),
    "in a group": in_a_group,
    "nothing": lambda producer: None,
}


@pytest.mark.rule("B4")
@pytest.mark.parametrize("call", CALLS)
def test_the_loss_of_the_topic_ends_the_block_and_the_loop_leads_again(
    topic: xl.Topic, rival: xl.Topic, call: str
) -> None:
    epochs = []
    for term in topic.terms():
        with term as producer:
            epochs.append(term.epoch)
            if term.epoch > 1:
                break
            take_over(rival)
            CALLS[call](producer)
        assert term.lost
    assert epochs == [1, 3]


@pytest.mark.needs("transactions")
def test_so_does_a_transaction_that_cannot_commit(topic: xl.Topic, rival: xl.Topic) -> None:
    plain = topic.engine.topic("others").producer()
    for term in topic.terms():
        with term as producer:
            if term.epoch > 1:
                break
            with topic.engine.transaction() as transaction:
                plain.send(b"x", transaction=transaction)
                transaction.require(producer)
                take_over(rival)
    assert topic.engine.topic("others").next_offset == 0


@pytest.mark.needs("claims")
@pytest.mark.parametrize("lost", [True, False])
def test_so_does_what_the_successor_takes_with_the_topic(
    topic: xl.Topic, rival: xl.Topic, lost: bool
) -> None:
    """Such as the reader of a group. While the topic is not lost, that is an error."""
    turns = 0
    outcome = contextlib.nullcontext() if lost else pytest.raises(xl.ReaderFencedError)
    with outcome:
        for term in topic.terms():
            with term:
                turns += 1
                if turns > 1:
                    break
                reader = topic.reader(group="invoicing")
                if lost:
                    take_over(rival)
                rival.reader(group="invoicing").close()
                reader.read_next(PATIENCE)
    assert turns == (2 if lost else 1)


@pytest.mark.needs("unload")
def test_a_hand_over_ends_the_block_also_to_an_engine_of_this_process(
    topic: xl.Topic, rival: xl.Topic
) -> None:
    waiting, engine = rival.producer_async(WAIT), topic.engine
    waiting.result(PATIENCE).close()
    epochs = []
    for term in topic.terms():
        with term as producer:
            epochs.append(term.epoch)
            if len(epochs) == 2:
                break
            waiting = rival.producer_async(WAIT)
            until(lambda: topic.waiters)
            [move] = engine.unload("orders", to=rival.engine.id, timeout=PATIENCE)
            assert move.ok
            successor = waiting.result(PATIENCE)
            with contextlib.ExitStack() as stack:
                stack.callback(successor.close)
                producer.send(b"too late")
    assert epochs == [2, 4]
    assert topic.next_offset == 0


@pytest.mark.rule("A1")
def test_a_waiter_that_is_fenced_queues_again(topic: xl.Topic, rival: xl.Topic) -> None:
    owner = rival.producer(EXCLUSIVE)
    leading: list[int] = []

    def lead() -> None:
        for term in topic.terms():
            with term:
                leading.append(term.epoch)
                break

    thread = threading.Thread(target=lead)
    thread.start()
    for _ in range(3):
        until(lambda: topic.waiters)
        before, owner = owner, rival.producer(FENCING)  # fences owner and waiter
        before.close()
    until(lambda: topic.waiters)
    owner.close()
    thread.join(PATIENCE)
    assert leading == [5]


def fence_another(topic: xl.Topic) -> None:
    others = topic.engine.topic("others")
    other = others.producer(EXCLUSIVE, follow=False)
    take_over(others)
    other.send(b"x")


def refused(topic: xl.Topic) -> None:
    with topic.engine.topic("others").producer(EXCLUSIVE):
        topic.engine.topic("others").producer(EXCLUSIVE)


def some_other(topic: xl.Topic) -> None:
    raise LookupError("of the application")


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (fence_another, xl.ProducerFencedError),
        (refused, xl.ProducerFencedError),
        (some_other, LookupError),
    ],
)
def test_any_other_exception_leaves_the_loop_and_gives_the_topic_up(
    topic: xl.Topic, fail: Callable[[xl.Topic], None], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        lead_with(topic, lambda _: fail(topic))
    assert (topic.epoch, is_free(topic)) == (1, True)


@pytest.mark.parametrize("group", [False, True])
def test_an_error_that_was_made_of_the_loss_leaves_the_loop(
    topic: xl.Topic, rival: xl.Topic, group: bool
) -> None:
    def work(producer: xl.Producer) -> None:
        take_over(rival)
        try:
            producer.send(b"x")
        except xl.ProducerFencedError as error:
            if group:
                raise ExceptionGroup("of tasks", [error, LookupError()]) from None
            raise LookupError("the application says more") from error

    with pytest.raises(ExceptionGroup if group else LookupError):
        lead_with(topic, work)
    assert (topic.epoch, is_free(topic)) == (2, True)


def test_an_error_of_a_former_turn_is_not_the_loss_of_this_one(
    topic: xl.Topic, rival: xl.Topic
) -> None:
    former: list[xl.Producer] = []

    def work(producer: xl.Producer) -> None:
        if former:
            former[0].send(b"x")
        former.append(producer)
        take_over(rival)
        producer.send(b"x")

    with pytest.raises(xl.ProducerFencedError):
        lead_with(topic, work)
    assert (len(former), is_free(topic)) == (1, True)


# ---- lost, for work that does not send ----------------------------------------------------


@pytest.mark.rule("C6")
def test_a_term_tells_its_loss_to_work_that_does_not_send(topic: xl.Topic, rival: xl.Topic) -> None:
    for term in topic.terms():
        with term as producer:
            assert not term.lost
            assert not term.lost.wait(0)
            rivalry = threading.Timer(0.01, take_over, [rival])
            rivalry.start()
            assert term.lost.wait(PATIENCE)
            assert term.lost.is_set()
            assert term.lost
            assert producer.state == "fenced"
            rivalry.join(PATIENCE)
        break
    assert term.lost


@pytest.mark.long
def test_a_term_is_lost_once_it_is_given_up_or_its_engine_is_closed(path: str) -> None:
    with xl.open(path) as engine:
        for term in engine.topic("orders").terms():
            with term:
                pass
            break
        assert term.lost.wait(0)
        for term in engine.topic("orders").terms():
            with term:
                closing = threading.Timer(0.01, engine.close)
                closing.start()
                assert term.lost.wait(PATIENCE)
                closing.join(PATIENCE)
            break


def test_a_wrong_timeout_is_refused(topic: xl.Topic) -> None:
    for term in topic.terms():
        with pytest.raises(ValueError, match="timeout"):
            term.lost.wait(-1)
        break


# ---- how the loop ends -------------------------------------------------------------------


@pytest.mark.rule("D5")
def test_a_wait_that_is_too_long_raises_and_names_the_holder(
    topic: xl.Topic, rival: xl.Topic
) -> None:
    with rival.producer(EXCLUSIVE, name="holder"):
        terms = topic.terms(timeout=0.01)
        for _ in range(2):  # it may be asked again
            with pytest.raises(xl.WaitTimeoutError, match="'holder' of engine 'rival'"):
                next(terms)
            assert topic.waiters == []
    with next(terms) as producer:
        assert producer.topic_epoch == 2
    assert is_free(topic)


def test_a_term_that_was_never_entered_is_given_up_with_its_loop(topic: xl.Topic) -> None:
    for term in topic.terms():
        assert topic.owner is not None
        assert topic.owner.epoch == term.epoch
        break
    assert is_free(topic)
    with pytest.raises(RuntimeError, match="this term is over"):
        term.__enter__()
    assert term.lost


def test_the_next_turn_gives_up_one_that_was_never_entered(topic: xl.Topic) -> None:
    terms = topic.terms(timeout=PATIENCE)
    first, second = next(terms), next(terms)
    assert (first.epoch, second.epoch, bool(first.lost), bool(second.lost)) == (1, 2, True, False)
    del terms
    collect()
    assert is_free(topic)


def test_a_term_is_entered_once(topic: xl.Topic) -> None:
    for term in topic.terms():
        with term:
            pass
        with pytest.raises(RuntimeError, match="entered already"):
            term.__enter__()
        break


def test_a_loop_that_nothing_refers_to_keeps_the_term_that_was_entered(topic: xl.Topic) -> None:
    terms = topic.terms()
    with next(terms) as producer:
        del terms
        collect()
        assert producer.send(b"x") == 0
    assert is_free(topic)


def test_nothing_is_requested_before_the_first_turn(topic: xl.Topic) -> None:
    topic.terms()
    terms = topic.terms()
    assert is_free(topic)
    terms.stop()
    assert list(terms) == []
    assert topic.epoch == 0


@pytest.mark.rule("D5")
def test_stop_ends_a_wait_in_the_queue(topic: xl.Topic, rival: xl.Topic) -> None:
    with rival.producer(EXCLUSIVE) as owner:
        terms = topic.terms()
        turns: list[list[xl.Term]] = []
        thread = threading.Thread(target=lambda: turns.append(list(terms)))
        thread.start()
        until(lambda: topic.waiters)
        terms.stop()
        thread.join(PATIENCE)
        assert turns == [[]]
        assert topic.waiters == []
        assert owner.state == "open"


def test_stop_lets_a_turn_reach_its_end(topic: xl.Topic) -> None:
    terms, offsets = topic.terms(), []
    for term in terms:
        with term as producer:
            terms.stop()
            offsets.append(producer.send(b"x"))
    assert (offsets, is_free(topic)) == ([0], True)


@pytest.mark.rule("D5")
@pytest.mark.parametrize("how", ["stop", "KeyboardInterrupt"])
def test_a_signal_handler_can_end_the_wait(topic: xl.Topic, rival: xl.Topic, how: str) -> None:
    terms = topic.terms()

    def handle(*_: object) -> None:
        if how == "KeyboardInterrupt":
            raise KeyboardInterrupt
        terms.stop()

    def interrupt() -> None:
        until(lambda: topic.waiters)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with rival.producer(EXCLUSIVE):
            thread = threading.Thread(target=interrupt)
            thread.start()
            expected = pytest.raises(KeyboardInterrupt) if how != "stop" else None
            with expected or contextlib.nullcontext():
                assert list(terms) == []
            thread.join(PATIENCE)
            until(lambda: topic.waiters == [])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert is_free(topic)


def test_closing_the_engine_ends_the_loop(path: str, topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE), xl.open(path) as engine:
        mine = engine.topic("orders")
        threading.Thread(target=lambda: (until(lambda: topic.waiters), engine.close())).start()
        with pytest.raises(xl.EngineClosedError):
            within(lambda: next(mine.terms()))
    with xl.open(path) as engine, pytest.raises(xl.EngineClosedError):
        lead_with(engine.topic("orders"), lambda producer: (engine.close(), producer.send(b"x")))


@pytest.mark.needs("termination")
def test_termination_ends_the_loop(topic: xl.Topic) -> None:
    with pytest.raises(xl.TopicTerminatedError):
        lead_with(topic, lambda _: topic.terminate())


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"priority": 1.5}, ValueError, "priority=1.5"),
        ({"timeout": -1}, ValueError, "timeout=-1"),
        ({"name": ""}, ValueError, "name"),
        ({"serializer": 7}, TypeError, "serializer"),
        ({"follow": True}, TypeError, "terms takes no option 'follow'"),
        ({"topic_epoch": 1}, TypeError, "terms takes no option 'topic_epoch'"),
    ],
)
@pytest.mark.rule("A4")
def test_wrong_options_are_refused_by_the_call(
    topic: xl.Topic, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        topic.terms(**options)


# ---- in several processes ----------------------------------------------------------------


def lead(state: State, turns: int) -> list[int]:
    """Lead until so many turns were lost or ended; the epochs of all of them."""
    epochs: list[int] = []
    for term in state.topic.terms(name=state.engine.name):
        with term as producer:
            epochs.append(term.epoch)
            if len(epochs) > turns:
                break
            while True:
                producer.send(state.engine.name.encode())
    return epochs


def leader(topic: xl.Topic) -> str:
    """The owner that has sent with its present epoch."""
    owner = topic.owner
    last = next(topic.reader(start=-1), None)
    return owner.producer_name if owner and last and last.epoch == owner.epoch else ""


@pytest.mark.long
@pytest.mark.rule("C2")
@pytest.mark.rule("C3")
def test_loops_in_processes_that_are_killed_and_paused_have_one_leader_at_a_time(
    backend: str, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    if backend != "local":
        pytest.skip("keepalives of running processes are set on a local ledger")
    there = {name: worker(name=name) for name in ("a", "b", "c")}
    for process in there.values():
        process.start(lead, 1)
    killed = until(lambda: leader(topic))
    until(lambda: len(topic.waiters) == 2)
    there[killed].kill()
    paused = until(lambda: leader(topic) not in ("", killed) and leader(topic))
    hang(there[paused], 0.5)
    third = until(lambda: leader(topic) not in ("", killed, paused) and leader(topic))
    there[paused].signal(signal.SIGCONT)
    until(lambda: [waiter.producer_name for waiter in topic.waiters] == [paused])
    take_over(topic)  # fences the leader and the waiter: both wait again, and lead once more
    epochs = {name: there[name].answer() for name in (paused, third)}
    assert sorted(map(len, epochs.values())) == [2, 2]
    messages = list(topic.reader())
    assert [m.epoch for m in messages] == sorted(m.epoch for m in messages)
    assert len({(m.epoch, m.producer_name) for m in messages}) == len({m.epoch for m in messages})
