"""The rule over a real broker: processes that are killed, stopped, cut off and forked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from exclusivelog import _core
from exclusivelog.cluster import native, pulsar_log
from exclusivelog.cluster.native import Native
from exclusivelog.cluster.ordered import Answer, OrderedLog, Position, Record
from exclusivelog.cluster.places import PulsarPlace
from exclusivelog.cluster.pulsar import Access, Cluster, admitted
from exclusivelog.cluster.pulsar_log import PulsarLog, _answer
from exclusivelog.errors import (
    ClusterError,
    EngineClosedError,
    LedgerIOError,
    OffsetTrimmedError,
)
from testing.broker import Broker, Namespace, missing, own_broker
from testing.children import finish
from testing.peers import Peer, Raised, check, open_engine, open_log, peers, read
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, forked, until, within

pytestmark = [pytest.mark.broker, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """A broker of these tests alone, which may be killed."""
    if reason := missing():
        pytest.skip(reason)
    with own_broker() as broker:
        yield broker


@pytest.fixture
def namespace(broker: Broker) -> Namespace:
    return Namespace.make(broker.url, broker.admin)


@pytest.fixture
def log(namespace: Namespace) -> Iterator[PulsarLog]:
    with open_log(namespace) as log:
        yield log


def append(log: OrderedLog, data: bytes) -> Answer:
    """Append a record, and wait for the answer."""
    answers: list[Answer] = []
    there = threading.Event()

    def told(answer: Answer) -> None:
        answers.append(answer)
        there.set()

    log.append(data, told)
    assert there.wait(PATIENCE)
    return answers[0]


def following(log: OrderedLog, count: int, after: Position | None = None) -> list[Any]:
    """The next records after a position, and None for none."""
    tail = log.tail(after)
    try:
        return [tail.next(PATIENCE) for _ in range(count)] + [tail.next(0.2)]
    finally:
        tail.close()


# ---- a broker that has just started -----------------------------------------------------


def of_client(name: str) -> type[Exception]:
    """An error as the client has it under this name."""
    return type(name, (Exception,), {})


def failing_at_first(*errors: type[Exception]) -> Callable[[], str]:
    """A call that raises these first."""
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


@pytest.mark.parametrize(
    "name", ["AuthorizationError", "UnknownError", "ServiceUnitNotReady", "BrokerMetadataError"]
)
def test_a_broker_that_is_not_ready_is_asked_again_for_a_while(name: str) -> None:
    passing, final = of_client(name), of_client("TopicNotFound")
    assert admitted(failing_at_first(passing, passing)) == "done"
    with pytest.raises(passing):
        admitted(failing_at_first(passing), 0.0)
    with pytest.raises(final):
        admitted(failing_at_first(final))


def test_a_producer_that_gets_no_answer_is_opened_again(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, late = pulsar_log._Sender._create, failing_at_first(of_client("Timeout"))
    monkeypatch.setattr(pulsar_log._Sender, "_create", lambda *given: late() and create(*given))
    with open_log(namespace) as log:
        assert append(log, b"a").stored


# ---- who lives ---------------------------------------------------------------------------


@pytest.mark.rule("C2", "D4")
def test_an_engine_that_is_gone_is_asked_about_once_while_it_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, asked, found = [1000.0], list[str](), [True]
    place = PulsarPlace(Access.parse("pulsar://127.0.0.1:1/public/default"), check_policies=False)
    monkeypatch.setattr(
        "exclusivelog.cluster.places._core", SimpleNamespace(monotonic=lambda: now[0])
    )

    def is_taken(name: str) -> bool:
        asked.append(name)
        now[0] += 0.05  # a busy broker takes longer than what it says is remembered for
        return found[0]

    monkeypatch.setattr(place, "_is_taken", is_taken)
    assert place.lives("e")
    assert place.lives("e")
    assert len(asked) == 1
    now[0] += 0.03
    found[0] = False
    assert not place.lives("e")
    now[0] += 0.1  # the time in which the topic is read to its end
    assert not place.lives("e")
    assert len(asked) == 2
    now[0] += 0.2
    found[0] = True
    assert place.lives("e")


# ---- the five calls ----------------------------------------------------------------------


@pytest.mark.rule("J1")
def test_positions_order_the_records_and_outlive_the_connection(namespace: Namespace) -> None:
    with open_log(namespace) as log:
        assert log.first() is None
        assert log.end() is None
        answers = [append(log, b"%d" % number) for number in range(300)]
        places = [answer.position for answer in answers]
        assert None not in places
        assert all(answer.stored for answer in answers)
        assert places == sorted(set(places))
        assert (log.first(), log.end()) == (places[0], places[-1])
    with open_log(namespace) as log:
        *records, none = following(log, 300)
        assert none is None
        assert [record.position for record in records] == places
        assert [record.data for record in records] == [b"%d" % number for number in range(300)]
        assert [record.position for record in following(log, 99, places[200])[:-1]] == places[201:]
        assert following(log, 0, places[-1]) == [None]
        assert (log.first(), log.end()) == (places[0], places[-1])


def test_a_tail_waits_for_the_next_record(log: PulsarLog) -> None:
    tail = log.tail()
    assert tail.next(0) is None
    began = time.monotonic()
    assert tail.next(0.3) is None
    assert 0.25 < time.monotonic() - began < PATIENCE
    threading.Timer(0.2, append, (log, b"late")).start()
    record = within(tail.next)
    assert record is not None
    assert record.data == b"late"


def test_closing_ends_a_tail_that_waits(log: PulsarLog) -> None:
    for close in (lambda tail: tail.close(), lambda tail: log.close()):
        tail = log.tail()
        threading.Timer(0.2, close, (tail,)).start()
        with pytest.raises(EngineClosedError):
            within(tail.next, PATIENCE)
    for call in (lambda: log.append(b"x"), log.tail, log.end, log.first):
        with pytest.raises(EngineClosedError, match="is closed; open a new one"):
            call()
    log.close()


def test_what_it_does_not_take(log: PulsarLog) -> None:
    with pytest.raises(ValueError, match="this log takes 5000000"):
        log.append(bytes(log.max_bytes + 1))
    assert append(log, bytes(log.max_bytes)).stored
    with pytest.raises(ValueError, match="no position of a Pulsar topic"):
        log.tail(Position(b"x"))


def test_the_last_record_is_found_without_a_reader_at_the_end(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such a reader takes 0.1 s; the admin API tells the position in a few ms.
    import _pulsar

    place = PulsarPlace(Access.parse(namespace.url, admin=namespace.admin))
    with contextlib.closing(place), contextlib.closing(place.open("orders")) as log:
        assert log.last() is None
        read_at, starts = PulsarLog._read_at, list[str]()
        monkeypatch.setattr(
            PulsarLog, "_read_at", lambda log, at: starts.append(str(at)) or read_at(log, at)
        )
        for number in range(3):
            position = append(log, b"%d" % number).position
            assert log.last() == Record(position, b"%d" % number)
        assert len(starts) == 3
        assert str(_pulsar.MessageId.latest) not in starts
        namespace.call("PUT", f"persistent/{namespace.path}/orders/unload")  # a new, empty ledger
        assert log.last() == Record(position, b"2")


def test_the_admin_api_is_asked_again_after_it_was_away(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PulsarPlace(Access.parse(namespace.url, admin=namespace.admin))
    with contextlib.closing(place), contextlib.closing(place.open("orders")) as log:
        position = append(log, b"a").position
        ask, asked = Cluster.admin, list[str]()

        def fail_once(cluster: Cluster, method: str, path: str) -> Any:
            asked.append(path)
            if len(asked) == 1:
                raise ClusterError("it is away")
            return ask(cluster, method, path)

        monkeypatch.setattr(Cluster, "admin", fail_once)
        assert log.end() == position  # as a reader finds it
        assert log.end() == position
        assert len(asked) == 1
        monkeypatch.setattr(log, "_ask_at", _core.monotonic())
        assert log.end() == position
        assert len(asked) == 2


@pytest.mark.rule("J2")
def test_a_duplicate_is_stored_at_an_unknown_position(namespace: Namespace, log: PulsarLog) -> None:
    import _pulsar

    answers: list[Answer] = []
    with namespace.client() as client:
        producer = client.create_producer(log._address, producer_name="p", batching_enabled=False)
        for count in (1, 2):
            builder = _pulsar.MessageBuilder()
            builder.sequence_id(7)
            builder.content(b"x")
            producer._producer.send_async(
                builder.build(),
                lambda result, place: answers.append(_answer(result, place, ClusterError)),
            )
            until(lambda count=count: len(answers) == count)
    assert answers == [Answer(True, log.end()), Answer(True, None)]
    assert len(following(log, 1)) == 2


def test_a_tail_does_not_skip_what_was_removed(namespace: Namespace, log: PulsarLog) -> None:
    places = [append(log, b"%d" % number).position for number in range(3)]
    assert len(following(log, 1, places[1])) == 2
    name = f"persistent/{namespace.path}/orders"
    namespace.call("DELETE", f"{name}?force=true")
    with open_log(namespace) as again:
        append(again, b"new")
        after = again.tail(places[1])
        with pytest.raises(OffsetTrimmedError, match="were removed"):
            within(after.next)


@pytest.mark.rule("J2", "B9")
def test_a_send_into_a_topic_that_was_deleted_is_not_acknowledged(
    namespace: Namespace, log: PulsarLog
) -> None:
    # Pulsar makes the topic anew, empty, under a producer and a reader that go on unaware.
    with open_engine(namespace) as engine:
        producer = engine.topic("orders").producer(EXCLUSIVE)
        assert producer.send(b"a", timeout=PATIENCE) == 0
        namespace.call("DELETE", f"persistent/{namespace.path}/orders?force=true")
        receipt = producer.send_async(b"b")
        with pytest.raises(LedgerIOError, match="were removed") as raised:
            receipt.result(PATIENCE)
        assert raised.value.maybe_written
        with pytest.raises(OffsetTrimmedError, match="were removed") as later:
            producer.send(b"c", timeout=PATIENCE)
        assert not later.value.maybe_written


def test_a_tail_goes_on_where_pulsar_begins_another_ledger(
    namespace: Namespace, log: PulsarLog
) -> None:
    tail, name = log.tail(), f"persistent/{namespace.path}/orders"
    data, ledgers = [], set()
    for number in range(6):
        assert append(log, b"%d" % number).stored
        if number == 3:  # none is read before the next ledger begins
            namespace.call("PUT", f"{name}/unload")
            continue
        while len(data) <= number:
            record = within(tail.next)
            assert record is not None
            data.append(record.data)
            ledgers.add(record.position[:8])
        if number % 2:
            namespace.call("PUT", f"{name}/unload")
    assert data == [b"%d" % number for number in range(6)]
    assert len(ledgers) == 3
    assert tail.next(0.2) is None


@pytest.mark.rule("J2")
@pytest.mark.parametrize("name", ["UnknownError", "ServiceUnitNotReady", "Timeout"])
def test_a_tail_waits_for_a_broker_that_loads_the_topic_still(
    namespace: Namespace, log: PulsarLog, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # A broker that has come back begins another ledger, and its first answers are such errors.
    assert append(log, b"a").stored
    tail = log.tail()
    within(tail.next)
    namespace.call("PUT", f"persistent/{namespace.path}/orders/unload")
    assert append(log, b"b").stored
    open_reader, refused = PulsarLog.reader, list[Any]()

    def refuse_at_first(log: PulsarLog, start: Any, ahead: int) -> Native:
        if len(refused) < 3:
            refused.append(start)
            raise ClusterError("it cannot be read") from of_client(name)()
        return open_reader(log, start, ahead)

    monkeypatch.setattr(PulsarLog, "reader", refuse_at_first)
    assert tail.next(0) is None
    record = within(tail.next)
    assert record is not None
    assert record.data == b"b"
    assert len(refused) == 3


def test_a_tail_ends_where_its_topic_may_not_be_read_any_more(
    namespace: Namespace, log: PulsarLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert append(log, b"a").stored
    tail = log.tail()
    within(tail.next)
    namespace.call("PUT", f"persistent/{namespace.path}/orders/unload")
    assert append(log, b"b").stored

    def refuse(log: PulsarLog, start: Any, ahead: int) -> Native:
        raise ClusterError("it cannot be read") from of_client("AuthorizationError")()

    monkeypatch.setattr(PulsarLog, "reader", refuse)
    with pytest.raises(ClusterError, match="cannot be read"):
        within(tail.next)


def test_a_reader_that_never_sends_what_it_has_is_opened_again(
    log: PulsarLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulsar_log, "PATIENCE_SECONDS", 0.3)
    tail = log.tail()
    append(log, b"a")
    assert within(tail.next).data == b"a"
    sound = tail._reader
    monkeypatch.setattr(tail, "_reader", Native(SaysThatThereIsOne(sound.use()), "it"))
    append(log, b"b")
    record = within(lambda: tail.next(PATIENCE))
    assert record is not None
    assert record.data == b"b"


def test_a_topic_that_is_deleted_under_a_look_is_asked_again(
    log: PulsarLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulsar_log, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(log, "reader", once(log.reader, SaysThatThereIsOne))
    assert within(log.end) is None
    place = append(log, b"a").position
    monkeypatch.setattr(log, "reader", once(log.reader, SaysThatThereIsOne))
    assert within(log.first) == place


class SaysThatThereIsOne:
    """A reader whose topic was deleted once it had said that there is a message."""

    def __init__(self, sound: Any) -> None:
        self.close = sound.close
        self.wait = threading.Event().wait

    def has_message_available(self) -> bool:
        return True

    def read_next(self, milliseconds: int) -> Any:
        import _pulsar

        self.wait(milliseconds / 1000)
        raise _pulsar.Timeout


def once(call: Callable[..., Native], spoil: Callable[[Any], Any]) -> Callable[..., Native]:
    """The call, with its first result spoiled."""
    times: list[None] = []

    def changed(*args: Any) -> Native:
        times.append(None)
        made = call(*args)
        return Native(spoil(made.use()), "it") if len(times) == 1 else made

    return changed


def test_a_namespace_that_removes_messages_is_refused(broker: Broker) -> None:
    short = Namespace.make(broker.url, broker.admin, retention=1)
    with pytest.raises(ClusterError, match="set-retention"):
        open_log(short)


# ---- processes ---------------------------------------------------------------------------


@pytest.mark.rule("J1", "J2", "B1", "B2", "B8", "B10")
def test_two_processes_take_the_topic_from_each_other(namespace: Namespace, log: PulsarLog) -> None:
    with peers(namespace, "a", "b") as both:
        for turn in range(8):
            owner, other = both[turn % 2], both[(turn + 1) % 2]
            assert owner.call("acquire") == turn + 1
            owner.stream()
            owner.await_sends(30)
            if turn:
                until(lambda other=other: other.call("status") == "fenced")
                with pytest.raises(Raised, match="was fenced") as raised:
                    other.call("send", b"stale")
                assert raised.value.kind == "ProducerFencedError"
        for peer in both:
            peer.finish()
        found = check(log, both)
    assert found.owners == {n + 1: "ab"[n % 2] for n in range(8)}
    assert len(found.values) >= 240
    assert b"stale" not in found.values


@pytest.mark.rule("J1", "B1", "B8")
def test_processes_that_ask_at_the_same_time(namespace: Namespace, log: PulsarLog) -> None:
    names = ("a", "b", "c")
    granted: dict[int, str] = {}
    kinds: set[str] = set()
    with peers(namespace, *names) as rivals:
        for _ in range(3):
            for peer in rivals:
                peer.start("acquire")
            for peer in rivals:
                try:
                    epoch = peer.answer()
                except Raised as refused:
                    kinds.add(refused.kind)
                else:
                    assert granted.setdefault(epoch, peer.name) == peer.name
    found = read(log)
    assert kinds <= {"ProducerFencedError"}
    assert len(found.owners) >= 3
    assert granted.items() <= found.owners.items()


@pytest.mark.rule("J1", "J2", "B9", "B10")
def test_an_owner_that_is_killed_amid_its_sends(namespace: Namespace, log: PulsarLog) -> None:
    dead: list[Peer] = []
    for turn in range(4):
        with peers(namespace, f"p{turn}") as [owner]:
            assert owner.call("acquire") == turn + 1
            owner.stream()
            owner.await_sends(20 + 7 * turn)
            owner.kill()
            dead.append(owner)
    found = check(log, dead)
    assert list(found.owners) == [1, 2, 3, 4]
    assert all(len(peer.sent) >= 20 for peer in dead)


@pytest.mark.rule("J1", "J2", "B2", "B7", "B9", "B10")
def test_an_owner_that_was_stopped_is_fenced(namespace: Namespace, log: PulsarLog) -> None:
    with peers(namespace, "stopped", "next") as [stopped, successor]:
        stopped.call("acquire")
        stopped.stream()
        stopped.await_sends(50)
        stopped.hang()
        assert successor.call("acquire") == 2
        assert successor.call("send", b"after") >= 50
        before = read(log)
        stopped.go_on()
        with pytest.raises(Raised) as raised:
            stopped.call("send", b"stale")
        assert raised.value.kind == "ProducerFencedError"
        stopped.await_failure()
        stopped.call("release")
        assert successor.call("send", b"last") == len(before.values)
        assert successor.call("status") == "open"
        stopped.finish()
        found = check(log, [stopped, successor])
    assert found.values == [*before.values, b"last"]
    assert set(stopped.failed.values()) == {"ProducerFencedError"}


@pytest.mark.rule("J1", "J2", "B9")
@pytest.mark.parametrize("deduplication", [True, False])
def test_an_owner_whose_connection_is_lost_again_and_again(
    broker: Broker, deduplication: bool
) -> None:
    namespace = Namespace.make(broker.url, broker.admin, deduplication=deduplication)
    with peers(namespace, "p", check_policies=False) as [owner]:
        owner.call("acquire")
        owner.stream()
        for _ in range(6):
            owner.await_sends(40)
            assert owner.call("break_connections") >= 1
        owner.await_sends(100)
        owner.finish()
        with open_log(namespace, check_policies=False) as log:
            found = check(log, [owner])
    assert not owner.failed
    assert len(found.values) >= len(owner.sent) >= 340


@pytest.mark.rule("J2", "B9")
def test_another_program_that_takes_the_topic_for_itself(
    namespace: Namespace, log: PulsarLog
) -> None:
    import pulsar

    with open_engine(namespace) as engine, namespace.client() as client:
        producer = engine.topic("orders").producer(EXCLUSIVE)
        assert producer.send(b"a", timeout=PATIENCE) == 0
        foreign = client.create_producer(
            log._address, access_mode=pulsar.ProducerAccessMode.ExclusiveWithFencing
        )
        foreign.send(b"foreign")
        receipt = producer.send_async(b"b")
        time.sleep(0.5)
        assert not receipt.done()
        foreign.close()
        assert receipt.result(PATIENCE) == 1
        assert producer.send(b"c", timeout=PATIENCE) == 2
    found = read(log)
    assert found.values == [b"a", b"b", b"c"]
    assert found.skipped >= 1


def test_a_log_that_is_opened_while_another_one_keeps_it_alone_waits(
    namespace: Namespace, log: PulsarLog
) -> None:
    opened = threading.Event()

    def open_it() -> None:
        with open_log(namespace) as second:
            assert append(second, b"second").stored
            opened.set()

    thread = threading.Thread(target=open_it, daemon=True)
    with log.alone():
        thread.start()
        assert not opened.wait(0.5)
    assert opened.wait(PATIENCE)


def test_closing_amid_sends_settles_them_all(namespace: Namespace) -> None:
    for _ in range(5):
        engine = open_engine(namespace)
        producer = engine.topic("orders").producer(EXCLUSIVE)
        receipts = [producer.send_async(b"x") for _ in range(200)]
        receipts[0].result(PATIENCE)
        within(engine.close, PATIENCE)
        assert all(receipt.exception(0) is None for receipt in receipts)


# ---- fork --------------------------------------------------------------------------------


@pytest.mark.rule("C5")
def test_a_forked_child_is_refused(namespace: Namespace, log: PulsarLog) -> None:
    with open_engine(namespace) as engine:
        topic = engine.topic("orders")
        producer = topic.producer(EXCLUSIVE)
        tail = log.tail()
        calls: list[Callable[[], Any]] = [
            lambda: producer.send(b"child", timeout=5),
            lambda: topic.producer(FENCING),
            lambda: topic.next_offset,
            lambda: log.append(b"child"),
            log.tail,
            log.end,
            log.first,
            tail.next,
        ]

        def refused() -> list[str]:
            said = []
            for call in calls:
                with pytest.raises(EngineClosedError) as raised:
                    call()
                said.append(str(raised.value))
            producer.close()
            tail.close()
            log.close()
            engine.close()
            return said

        said = forked(refused)
        assert all("inherited through fork()" in text for text in said)
        assert producer.send(b"parent", timeout=PATIENCE) == 0
    assert read(log).values == [b"parent"]


@pytest.mark.rule("C5")
def test_a_child_that_was_forked_amid_sends_ends_and_harms_no_other(
    namespace: Namespace, log: PulsarLog
) -> None:
    program = """
        import gc, os, sys
        from exclusivelog.errors import EngineClosedError
        from testing.broker import Namespace
        from testing.peers import open_engine
        from testing.patience import PATIENCE

        namespace = Namespace(*sys.argv[1:])
        engine = open_engine(namespace)
        producer = engine.topic("orders").producer("exclusive")
        for turn in range(5):
            receipts = [producer.send_async(b"%d.%d" % (turn, n)) for n in range(50)]
            child = os.fork()
            if child == 0:
                for receipt in receipts:
                    try:
                        receipt.result(PATIENCE)
                    except EngineClosedError:
                        pass
                engine = producer = receipts = receipt = None
                gc.collect()
                sys.exit(7)  # through the whole end of the interpreter
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            offsets = [receipt.result(PATIENCE) for receipt in receipts]
            assert offsets == list(range(turn * 50, turn * 50 + 50))
        engine.close()
    """
    where = (namespace.broker, namespace.admin, namespace.path)
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *where],
        check=True,
        timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert read(log).values == [b"%d.%d" % (turn, n) for turn in range(5) for n in range(50)]


@pytest.mark.rule("C5")
@pytest.mark.skipif(not native.CHILDREN_HANG, reason="this Python frees the lock in the child")
def test_the_clients_thread_keeps_its_state_from_its_first_call_on(log: PulsarLog) -> None:
    # A thread without a state gets one under a lock that hangs a child that is forked meanwhile.
    here, seen = threading.local(), []

    def told(_: Answer) -> None:
        seen.append((hasattr(native._here, "stays"), getattr(here, "times", 0)))
        here.times = len(seen)  # gone with the thread's state

    for count in range(1, 4):
        log.append(b"x", told)
        until(lambda count=count: len(seen) == count)
    assert seen == [(True, 0), (True, 1), (True, 2)]


# In a process of its own: to fork one that has collected all tests takes ten times as long, in
# which the sender is busy. As many forks find a thread of the client that gives its state back.
FORKING = """
import os, sys, threading, time
from testing.broker import Namespace
from testing.peers import open_log
from testing.processes import PATIENCE, forked, until

room, stop, answers = threading.Semaphore(200), threading.Event(), []

def told(_):
    answers.append(None)
    room.release()

def send():
    while not stop.is_set():
        if room.acquire(timeout=0.1):
            log.append(b"x", told)

with open_log(Namespace(*sys.argv[1:])) as log:
    sender = threading.Thread(target=send)
    sender.start()
    try:
        enough = time.monotonic() + PATIENCE / 6  # 1,200 forks take half of it
        for _ in range(1200):
            if time.monotonic() > enough:
                break
            assert forked(os.getpid, 10.0) != os.getpid()
        until(lambda: len(answers) > 400)
    finally:
        stop.set()
        sender.join(PATIENCE)
print(len(answers))
"""


@pytest.mark.rule("C5")
def test_children_that_are_forked_while_answers_come_do_not_hang(namespace: Namespace) -> None:
    answers = int(finish(FORKING, namespace.broker, namespace.admin, namespace.path))
    assert answers > 400


# ---- the broker dies; last, as it takes long to come back ----------------------------------


@pytest.mark.rule("J1", "J2", "B9", "B10")
def test_the_broker_is_killed_amid_sends_and_comes_back(
    broker: Broker, namespace: Namespace, log: PulsarLog
) -> None:
    with peers(namespace, "owner", "next") as [owner, successor]:
        owner.call("acquire")
        owner.stream()
        owner.await_sends(100)
        broker.kill()
        broker.start()
        owner.await_sends(100, timeout=PATIENCE)
        assert not owner.failed
        assert successor.call("acquire") == 2
        successor.stream()
        successor.await_sends(20)
        for peer in (owner, successor):
            peer.finish()
        check(log, [owner, successor])
        assert set(owner.failed.values()) <= {"ProducerFencedError"}
