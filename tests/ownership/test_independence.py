"""Rule K1: what happens on one topic sends nobody on another to the tables; and what happens on the
own topic is noticed all the same.

What is remembered of the tables has a version for each topic and each claim. The tests count how
often the tables are read; the last ones look at the versions themselves.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.log import appending
from exclusivelog.local.records import NAMES, OF_CLAIMS, OF_TOPICS, READ_ANEW, U64
from exclusivelog.local.shm.lockfile import JOURNAL_OFFSET, SIZE, TOPICS
from exclusivelog.local.storage.ledger import Ledger
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    Failed,
    State,
    Worker,
    hang,
    open_producer,
    send,
    within,
)

# ---- what happens on one topic -------------------------------------------------------------


def transact(topic: xl.Topic) -> None:
    with topic.producer(FENCING) as producer, topic.engine.transaction() as txn:
        producer.send(b"x", transaction=txn)


def fence(topic: xl.Topic) -> None:
    topic.producer(FENCING)
    topic.producer(FENCING).close()


def wait_and_cancel(topic: xl.Topic) -> None:
    with topic.producer(FENCING):
        assert topic.producer_async(WAIT).cancel()


def promote(topic: xl.Topic) -> None:
    owner = topic.producer(FENCING)
    future = topic.producer_async(WAIT)
    owner.close()
    future.result(PATIENCE).close()


def send_large(topic: xl.Topic) -> None:
    with topic.producer(FENCING) as producer:
        producer.send(bytes(200_000))  # too much for the journal


def claim(topic: xl.Topic) -> None:
    topic.engine.own("claims", {"resource": None}).release()


def read_as_a_group(topic: xl.Topic) -> None:
    with topic.reader(group="group") as reader:
        reader.commit()


def unload(topic: xl.Topic) -> None:
    with xl.open(topic.engine.path, name="to") as to:
        owner = topic.producer(FENCING)
        future = to.topic(topic.name).producer_async(WAIT)
        topic.engine.unload(topic.name, to=to.id, timeout=PATIENCE)
        future.result(PATIENCE).close()
        owner.close()


def trim(topic: xl.Topic) -> None:
    with topic.producer(FENCING) as producer:
        producer.send(b"x")
    topic.trim(topic.next_offset)


def delete(topic: xl.Topic) -> None:
    topic.engine.delete_topic(topic.name)
    topic.engine.topic(topic.name)


def announce(topic: xl.Topic) -> None:
    with topic.producer(FENCING) as producer:
        producer.announce({"at": "here"})


Event = Callable[[xl.Topic], None]
HAPPENINGS: dict[str, Event] = {
    "a transaction": transact,
    "a producer that fences another": fence,
    "a waiter that comes and goes": wait_and_cancel,
    "a promotion": promote,
    "a large message": send_large,
    "a claim": claim,
    "a reader of a group": read_as_a_group,
    "a hand-over": unload,
    "a trim": trim,
    "a deletion": delete,
    "an announcement": announce,
}
every_event = pytest.mark.parametrize("happens", HAPPENINGS.values(), ids=HAPPENINGS)


class Reads:
    """Counts how often this thread reads tables, and how often any thread looks up who may write to
    a topic."""

    def __init__(self, thread: int) -> None:
        self.thread, self.of_tables = thread, 0
        self.looked_up: list[int] = []  # topics

    def begin(self) -> None:
        """Count from now on."""
        self.of_tables, self.looked_up = 0, []


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    counts = Reads(threading.get_ident())
    read, look_up, look_up_some = Ledger.read, appending.look_up, appending._look_up_some

    def counted_read(ledger: Ledger) -> Any:
        counts.of_tables += threading.get_ident() == counts.thread
        return read(ledger)

    def counted_look_up(ledger: Any, appender: _core.Appender) -> None:
        counts.looked_up.append(appender.session.topic)
        look_up(ledger, appender)

    def counted_look_up_some(ledger: Any, appenders: Any) -> None:
        counts.looked_up += [appender.session.topic for appender in appenders]
        look_up_some(ledger, appenders)

    monkeypatch.setattr(Ledger, "read", counted_read)
    monkeypatch.setattr(appending, "look_up", counted_look_up)
    monkeypatch.setattr(appending, "_look_up_some", counted_look_up_some)
    return counts


@pytest.mark.rule("K1")
@every_event
@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
def test_k1_a_send_on_another_topic_looks_nothing_up(
    engine: xl.Engine, topic: xl.Topic, reads: Reads, mode: str, happens: Event
) -> None:
    another = engine.topic("another")
    with another.producer(mode) as producer:
        producer.send(b"0")
        producer.send_async(b"1").result(PATIENCE)
        happens(topic)
        reads.begin()
        assert producer.send(b"2") == 2
        assert producer.send_async(b"3").result(PATIENCE) == 3
        assert another.id not in reads.looked_up


@pytest.mark.rule("K1")
def test_k1_the_frames_that_a_transaction_applies_concern_nobody(
    engine: xl.Engine, topic: xl.Topic, reads: Reads
) -> None:
    """It moves what other topics have in the journal into the tables, and so writes their rows."""
    others = [engine.topic(f"another {n}").producer(EXCLUSIVE) for n in range(3)]
    journal = engine.ledger.journal
    assert journal is not None
    with topic.producer() as producer:
        for other in others:
            other.send(b"0")
        engine.ledger.checkpoint()
        with engine.transaction() as txn:
            for other in others:
                other.send(b"1")
            sent = journal.tail
            producer.send(bytes(200_000), transaction=txn)  # it goes into the tables
        assert journal.applied >= sent
        reads.begin()
        assert [other.send(b"2") for other in others] == [2, 2, 2]
        assert not reads.looked_up


@pytest.mark.rule("K1")
@every_event
def test_k1_a_reader_of_another_topic_reads_no_tables(
    engine: xl.Engine, topic: xl.Topic, reads: Reads, happens: Event
) -> None:
    """Neither for what it has read ahead, nor for what was sent meanwhile."""
    with engine.topic("another").producer() as producer, engine.topic("another").reader() as reader:
        for number in range(3):
            producer.send(b"%d" % number)
        assert next(reader).value == b"0"
        happens(topic)
        reads.begin()
        assert [message.value for message in reader.read_batch(2)] == [b"1", b"2"]
        assert reads.of_tables == 0


@pytest.mark.rule("K1")
@every_event
def test_k1_the_owner_of_a_map_on_another_topic_stays_sure(
    engine: xl.Engine, topic: xl.Topic, reads: Reads, happens: Event
) -> None:
    with xl.SharedMap(engine.topic("another")) as shared:
        shared.put("a", 1)
        assert shared.get("a", latest=True) == 1
        happens(topic)
        reads.begin()
        [key] = shared._content.entries
        assert shared._get_at_once(key, True) is not _core.NOT_NOW
        shared.put("a", 2)
        assert reads.of_tables == 0


@pytest.mark.rule("K1")
@every_event
def test_k1_a_reader_of_another_group_is_sure_of_its_claim(
    engine: xl.Engine, topic: xl.Topic, reads: Reads, happens: Event
) -> None:
    with engine.topic("another").producer() as producer:
        producer.send_many([b"0", b"1"])
    with engine.topic("another").reader(group="another") as reader:
        assert next(reader).value == b"0"
        happens(topic)
        reads.begin()
        assert next(reader).value == b"1"
        assert reads.of_tables == 0


# ---- what happens on the own one -----------------------------------------------------------


@pytest.mark.every
@pytest.mark.rule("B2", "K1")
@every_event
def test_b2_what_happens_on_the_own_topic_changes_its_version(
    engine: xl.Engine, topic: xl.Topic, happens: Event
) -> None:
    """Of a claim that is made and released the number is a new one, so that no version is expected;
    the readers of its group are asked below."""
    journal = engine.ledger.journal
    assert journal is not None
    before, every = journal.version_of(topic.id), journal.version
    happens(topic)
    if happens in (claim, read_as_a_group):
        assert journal.version > every
    else:
        assert journal.version_of(topic.id) > before


@pytest.mark.rule("F2", "K1")
def test_f2_a_group_s_reader_notices_that_its_claim_has_ended(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    with topic.producer() as producer:
        producer.send_many([b"0", b"1", b"2"])
    journal = engine.ledger.journal
    assert journal is not None
    with xl.open(engine.path) as other, topic.reader(group="group") as reader:
        assert next(reader).value == b"0"
        before = journal.version_of(topic.id)
        with other.topic("orders").reader(group="group"):
            assert journal.version_of(topic.id) == before  # nothing on the topic has changed
            with pytest.raises(xl.ReaderFencedError):
                next(reader)


# ---- the versions --------------------------------------------------------------------------


class Header:
    """A header and counters in memory; `commit` notes these changes as a transaction does."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(_core.JOURNAL_HEADER_BYTES + 4096)
            self.journal = _core.Journal(
                _core.SharedWords(bytearray(SIZE)), JOURNAL_OFFSET, TOPICS, file.fileno(), 4096
            )
        self.journal.start(1)

    def commit(self, changes: _core.Changes | None) -> int:
        """Returns the version of the commit."""
        self.journal.committed(0, True, changes)
        return self.journal.version

    def changed(self, subjects: list[int], version: int) -> list[int]:
        """Those of the subjects that have this version."""
        return [each for each in subjects if self.journal.version_of(each) == version]


NUMBERS = [*range(5000), 2**32 + 1, 2**63, 2**64 - 1]
HASHED = 4096  # topics, as many words as there are


@pytest.mark.rule("B2", "K1")
def test_b2_a_change_of_a_topic_gives_it_a_new_version_whatever_its_number() -> None:
    header, dice = Header(), random.Random(7)  # which luck cannot let share a word
    for number in NUMBERS:
        changes = _core.Changes()
        changes.note(U64.pack(number))
        version = header.commit(changes)
        assert header.journal.version_of(number) == version
        # Of others, the few that have the same word.
        among = dice.sample(range(10 * HASHED), 50)
        assert len(header.changed(among, version)) <= 2


@pytest.mark.rule("K1")
def test_k1_neighbours_have_words_of_their_own() -> None:
    header, topics = Header(), list(range(1, HASHED + 1))
    changes = _core.Changes()
    changes.note(U64.pack(17))
    assert header.changed(topics, header.commit(changes)) == [17]


@pytest.mark.rule("B2", "K1")
def test_b2_topics_with_one_word_are_both_noticed() -> None:
    header = Header()
    for changed, beside in ((1, 1 + HASHED), (1 + HASHED, 1)):
        before = header.journal.version_of(beside)
        changes = _core.Changes()
        changes.note(U64.pack(changed))
        version = header.commit(changes)
        assert header.journal.version_of(changed) == version > before
        assert header.journal.version_of(beside) == version  # it looks in vain


@pytest.mark.rule("B2", "K1")
@pytest.mark.parametrize("count", [1, 63, 1024, 1025, 5000])
def test_b2_a_commit_of_many_topics_changes_them_all(count: int) -> None:
    header = Header()
    changes, topics = _core.Changes(), list(range(7, 7 + count))
    for topic in topics:
        changes.note(U64.pack(topic))
    assert changes.everything == (count > 1024)
    assert header.changed(topics, header.commit(changes)) == topics


@pytest.mark.rule("B2")
def test_b2_a_commit_that_names_nothing_changes_everything() -> None:
    """One whose outcome is unknown, for example."""
    header, topics = Header(), [1, 2, 2**63]
    for changes in (None, noted(b""), noted(b"short")):
        version = header.commit(changes)
        assert header.changed(topics, version) == topics
        assert header.journal.version_of_claim(1) == version


def noted(key: bytes) -> _core.Changes:
    changes = _core.Changes()
    changes.note(key)
    return changes


@pytest.mark.rule("K1")
def test_k1_claims_have_versions_of_their_own() -> None:
    header, changes = Header(), _core.Changes()
    topic = header.journal.version_of(1)
    changes.note_claim(U64.pack(1))
    version = header.commit(changes)
    assert header.journal.version_of_claim(1) == version
    assert header.journal.version_of(1) == topic


@pytest.mark.rule("B2", "K1")
def test_b2_a_row_of_which_nothing_is_known_concerns_everybody(engine: xl.Engine) -> None:
    """All tables are in a list of those that concern one topic, one claim, or nobody; a key of
    `meta` that is in none of its lists concerns all topics."""
    assert OF_TOPICS | OF_CLAIMS | READ_ANEW | {"meta"} == set(NAMES)
    assert len(OF_TOPICS) + len(OF_CLAIMS) + len(READ_ANEW) + 1 == len(NAMES)
    journal = engine.ledger.journal
    assert journal is not None
    with engine.ledger.write_exclusive() as tables:
        assert not tables.rows.changes.everything
        tables.rows.put("meta", b"something new", b"")
        assert tables.rows.changes.everything
    assert journal.version_of(1) == journal.version == journal.version_of_claim(1)


@pytest.mark.rule("B2", "K1")
def test_b2_an_owner_notices_a_rival_of_its_own_topic_amid_others(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Another process is stopped while it owns the topic; meanwhile others are changed, and then
    its own one. Nothing but the version tells it once it goes on."""
    process = worker(name="owner")
    process.call(open_producer, EXCLUSIVE)
    process.call(send, b"0")
    hang(process)
    for name in ("a", "b", "c"):
        transact(engine.topic(name))
    with topic.producer(FENCING) as rival:
        for name in ("d", "e"):
            transact(engine.topic(name))
        process.signal(signal.SIGCONT)
        with pytest.raises(Failed, match="ProducerFencedError"):
            process.call(send, b"zombie")
        assert rival.send(b"1") == 1


class Dying:
    """A transaction of LMDB's after whose commit the process is killed."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def commit(self) -> None:
        self._txn.commit()
        os.kill(os.getpid(), signal.SIGKILL)


def die_behind_a_take_over(state: State) -> None:
    """The take-over is in the tables; no version says so yet."""
    environment = state.engine.ledger._environment
    begin = environment.begin_write
    environment.begin_write = lambda: Dying(begin())
    state.topic.producer(FENCING)


@pytest.mark.rule("B2", "K1")
def test_b2_an_owner_notices_a_rival_that_died_behind_its_commit(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    owner = topic.producer(EXCLUSIVE)
    assert owner.send(b"0") == 0
    rival = worker(name="rival")
    with pytest.raises(EOFError):
        rival.call(die_behind_a_take_over)
    with pytest.raises(xl.ProducerFencedError):
        within(lambda: owner.send(b"zombie"))
    assert topic.epoch == owner.topic_epoch + 1
    assert topic.next_offset == 1
