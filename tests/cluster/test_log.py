"""Writers and readers on a log that loses, doubles and delays what it is given (J2, B9)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from exclusivelog.cluster.frames import MAX_MESSAGES, Grant, Holder, Release, encode
from exclusivelog.cluster.log import Message, Reader, Ticket, Writer, messages
from exclusivelog.cluster.memory import Chances, MemoryLog, UnreliableLog
from exclusivelog.errors import (
    DuplicateSequenceError,
    EngineClosedError,
    InvalidEpochError,
    LedgerIOError,
    OffsetTrimmedError,
    ProducerBusyError,
    ProducerFencedError,
    UnsupportedError,
)
from exclusivelog.messages import Encoded
from exclusivelog.types import AccessMode

pytestmark = pytest.mark.once
SOUND = Chances()


class Process:
    """A reader and a writer on a connection of their own."""

    def __init__(
        self,
        log: MemoryLog,
        name: str = "p",
        chances: Chances = SOUND,
        dice: random.Random | None = None,
        window: int = 64,
    ) -> None:
        self.link = UnreliableLog(log, chances, dice)
        self.reader = Reader(self.link)
        holder = Holder(name, name, 1, name, AccessMode.EXCLUSIVE)
        self.writer = Writer(self.reader.state, self.link.append, holder, window=window)
        self.read: list[Message] = []

    def catch_up(self) -> None:
        for judged in self.reader.records():
            self.writer.saw(judged)
            self.read += messages(judged)

    def own(self, topic_epoch: int | None = None) -> Process:
        self.catch_up()
        self.writer.ask(topic_epoch)
        self.catch_up()
        assert self.writer.status == "owner"
        return self

    def send(self, *values: bytes, now: int = 0) -> Ticket:
        return self.writer.send([one(value) for value in values], now)

    def try_again(self) -> None:
        """As a driver does from time to time."""
        self.catch_up()
        self.writer.resend()
        self.catch_up()


def one(value: bytes, sequence: int | None = None) -> Encoded:
    return value, None, None, None, sequence


def values(log: MemoryLog) -> list[bytes | None]:
    return [message.content.value for message in Reader(log).messages()]


@pytest.fixture
def log() -> Iterator[MemoryLog]:
    log = MemoryLog()
    yield log
    log.close()


# ---- acknowledgements --------------------------------------------------------------------


def test_j2_a_send_is_acknowledged_when_it_was_read_back(log: MemoryLog) -> None:
    """The backend's own answer acknowledges nothing."""
    writer = Process(log).own()
    ticket = writer.send(b"a", b"b")
    assert values(log) == [b"a", b"b"]
    assert not ticket.done
    writer.catch_up()
    assert (ticket.done, ticket.offset, ticket.error) == (True, 0, None)
    later = writer.send(b"c")
    writer.catch_up()
    assert later.offset == 2


def test_j2_a_resend_is_not_a_second_message(log: MemoryLog) -> None:
    writer = Process(log, chances=Chances(doubled=1.0)).own()
    tickets = [writer.send(b"%d" % n) for n in range(5)]
    for _ in range(3):
        writer.writer.resend()
    writer.catch_up()
    assert [ticket.offset for ticket in tickets] == [0, 1, 2, 3, 4]
    assert values(log) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.rule("J2", "B9", "B10", "B2")
def test_what_was_under_way_when_another_took_over_never_counts(log: MemoryLog) -> None:
    stale = Process(log, "stale").own()
    written = stale.send(b"in time")
    stale.link._chances = Chances(delayed=1.0)
    lost = stale.send(b"too late")
    rival = Process(log, "rival").own()
    rival.send(b"new")
    stale.catch_up()
    assert written.offset == 0
    assert isinstance(lost.error, ProducerFencedError)
    assert lost.error.holder is not None
    assert (lost.error.holder.engine_id, lost.error.holder.epoch) == ("rival", 2)
    assert not lost.error.maybe_written
    stale.link.deliver()
    assert values(log) == [b"in time", b"new"]


@pytest.mark.rule("B4")
def test_a_fenced_writer_stays_fenced(log: MemoryLog) -> None:
    stale, rival = Process(log, "stale").own(), Process(log, "rival").own()
    rival.writer.release()
    rival.catch_up()
    stale.catch_up()
    with pytest.raises(ProducerFencedError) as first:
        stale.send(b"x")
    with pytest.raises(ProducerFencedError) as second:
        stale.send(b"x")
    assert first.value is second.value
    with pytest.raises(ProducerBusyError):
        stale.writer.ask()


@pytest.mark.rule("J2", "B9")
@pytest.mark.parametrize("seed", range(12))
def test_every_send_has_one_outcome_whatever_the_log_does(log: MemoryLog, seed: int) -> None:
    """Three processes take the topic from one another, on links that fail in every way."""
    dice = random.Random(seed)
    chances = Chances(lost=0.2, doubled=0.2, delayed=0.3, answer_lost=0.3, answer_doubled=0.2)
    processes = [Process(log, f"p{n}", chances, dice, window=3) for n in range(3)]
    tickets: list[tuple[bytes, Ticket]] = []
    for turn in range(400):
        process = dice.choice(processes)
        play(process, dice, turn, tickets)
        if process.writer.status in ("fenced", "closed"):
            number = processes.index(process)
            processes[number] = Process(log, f"p{number}", chances, dice, window=3)
    for process in processes:
        process.link._chances = Chances()
        while process.link.under_way:
            process.link.deliver()
    for _ in range(20):
        for process in processes:
            process.try_again()
    there = values(log)
    assert len(set(there)) == len(there)
    for value, ticket in tickets:
        assert ticket.done, value
        if ticket.error is None:
            assert there[ticket.offset or 0] == value
        else:
            assert value not in there
    assert 20 < len(there) < len(tickets)


def play(
    process: Process, dice: random.Random, turn: int, tickets: list[tuple[bytes, Ticket]]
) -> None:
    writer = process.writer
    if dice.random() < 0.6:
        process.catch_up()
    if writer.status == "owner" and dice.random() < 0.7:
        value = b"%d" % turn
        tickets.append((value, process.send(value)))
    elif writer.status == "refused" and dice.random() < 0.3:
        writer.ask()
    elif writer.status == "owner" and dice.random() < 0.1:
        writer.release()
    elif dice.random() < 0.4:
        writer.resend()


# ---- asking ------------------------------------------------------------------------------


@pytest.mark.rule("B1", "J1")
def test_of_two_that_ask_at_once_one_is_granted(log: MemoryLog) -> None:
    one, two = Process(log, "one"), Process(log, "two")
    one.writer.ask()
    two.writer.ask()
    one.catch_up()
    two.catch_up()
    assert (one.writer.status, two.writer.status) == ("owner", "refused")
    two.own()
    one.catch_up()
    assert (one.writer.status, two.writer.epoch) == ("fenced", 2)


@pytest.mark.rule("B5")
def test_an_old_epoch_goes_on(log: MemoryLog) -> None:
    first = Process(log).own()
    first.send(b"a")
    first.catch_up()
    again = Process(log).own(topic_epoch=1)
    assert again.writer.epoch == 1
    first.catch_up()
    assert first.writer.status == "fenced"
    with pytest.raises(InvalidEpochError):
        Process(log).own(topic_epoch=2)
    Process(log, "rival").own()
    with pytest.raises(ProducerFencedError, match="topic_epoch=1 is stale"):
        Process(log).own(topic_epoch=1)


@pytest.mark.rule("D5")
def test_a_request_that_was_given_up_leaves_no_owner(log: MemoryLog) -> None:
    process = Process(log)
    process.link._chances = Chances(delayed=1.0)
    process.writer.ask()
    process.writer.cancel()
    process.link._chances = Chances()
    process.link.deliver()
    process.catch_up()
    process.catch_up()
    assert process.writer.status == "closed"
    assert not process.reader.state.owned


@pytest.mark.rule("D5")
def test_a_request_that_was_given_up_is_not_appended_again(log: MemoryLog) -> None:
    """It would fence an owner without a producer that uses the topic. A retry repeats the same
    request."""
    owner, process = Process(log, "owner").own(), Process(log)
    process.catch_up()
    process.link._chances = Chances(lost=1.0)
    process.writer.ask()
    process.writer.cancel()
    process.link._chances = SOUND
    process.try_again()
    owner.catch_up()
    assert (process.writer.status, owner.writer.status) == ("cancelled", "owner")
    with pytest.raises(ProducerBusyError):
        process.writer.ask(topic_epoch=1)
    process.writer.ask()
    process.catch_up()
    assert (process.writer.status, process.writer.epoch) == ("owner", 2)


@pytest.mark.rule("C1")
def test_a_release_comes_after_all_that_was_sent(log: MemoryLog) -> None:
    process = Process(log, window=1).own()
    tickets = [process.send(b"%d" % n) for n in range(4)]
    process.writer.release()
    with pytest.raises(EngineClosedError):
        process.send(b"more")
    process.catch_up()
    assert process.writer.status == "closed"
    assert all(ticket.offset is not None for ticket in tickets)
    assert not process.reader.state.owned


@pytest.mark.rule("C1", "B4")
def test_an_owner_passes_the_topic_on_behind_all_that_was_sent(log: MemoryLog) -> None:
    process = Process(log, window=1).own()
    heir = Process(log, "heir")
    waiter = Holder("heir", "heir", 1, "heir", AccessMode.WAIT_FOR_EXCLUSIVE)
    tickets = [process.send(b"%d" % n) for n in range(3)]
    process.writer.heir = lambda: (5, waiter, None)
    process.writer.release()
    process.catch_up()
    assert process.writer.status == "closed"
    assert [ticket.offset for ticket in tickets] == [0, 1, 2]
    for judged in heir.reader.records():
        if isinstance(judged.parsed, Grant) and judged.parsed.waiter == 5:
            heir.writer.inherit(judged.parsed)
        heir.writer.saw(judged)
    assert (heir.writer.status, heir.writer.epoch) == ("owner", 2)
    ticket = heir.send(b"3")
    process.writer.resend()  # nothing is left to send
    heir.catch_up()
    assert (ticket.offset, values(log)) == (3, [b"0", b"1", b"2", b"3"])


@pytest.mark.rule("C1", "E2")
def test_a_topic_that_is_handed_over_is_not_passed_on(log: MemoryLog) -> None:
    process = Process(log).own()
    process.writer.heir = lambda: (5, process.writer.holder, None)
    process.writer.release("handed over")
    process.catch_up()
    assert (process.writer.status, process.reader.state.owned) == ("closed", False)


@pytest.mark.rule("B7")
def test_an_owner_that_is_fenced_while_it_passes_the_topic_on_has_lost_it(log: MemoryLog) -> None:
    process, rival = Process(log).own(), Process(log, "rival")
    rival.catch_up()
    rival.writer.ask()
    waiter = Holder("heir", "heir", 1, "heir", AccessMode.WAIT_FOR_EXCLUSIVE)
    process.writer.heir = lambda: (5, waiter, None)
    process.writer.release()
    process.catch_up()
    rival.catch_up()
    assert (process.writer.status, rival.writer.status) == ("fenced", "owner")


@pytest.mark.rule("B9", "K4")
def test_a_release_comes_after_what_waits_for_a_request_that_fences(log: MemoryLog) -> None:
    """The request has failed, or its process has gone."""
    owner = Process(log).own()
    owner.writer.hold(True)
    ticket = owner.send(b"waits")
    owner.writer.release()
    owner.try_again()
    assert (ticket.done, owner.writer.status) == (False, "closing")
    owner.writer.hold(False)
    owner.catch_up()
    assert (ticket.offset, owner.writer.status) == (0, "closed")
    assert values(log) == [b"waits"]


def test_a_session_that_another_process_has_released_is_fenced(log: MemoryLog) -> None:
    process = Process(log, window=1).own()
    ticket = process.send(b"a")
    process.link._chances = Chances(lost=1.0)
    late = process.send(b"b")
    process.writer.release()
    log.append(encode(Release(1, process.writer.session, "evicted")))
    process.catch_up()
    assert ticket.offset == 0
    assert isinstance(late.error, ProducerFencedError)


# ---- sending -----------------------------------------------------------------------------


@pytest.mark.rule("G2")
def test_sequence_ids_go_on_and_are_not_used_twice(log: MemoryLog) -> None:
    first = Process(log).own()
    first.writer.send([one(b"a"), one(b"b", 7), one(b"c")], 0)
    with pytest.raises(DuplicateSequenceError) as error:
        first.writer.send([one(b"d", 8)], 0)
    assert error.value.last_sequence_id == 8
    again = Process(log).own()
    with pytest.raises(DuplicateSequenceError):
        again.writer.send([one(b"d", 8)], 0)
    again.writer.send([one(b"d")], 0)
    again.catch_up()
    assert [message.content.sequence_id for message in again.read] == [0, 7, 8, 9]


@pytest.mark.rule("G4")
def test_publish_times_never_go_backwards(log: MemoryLog) -> None:
    first = Process(log).own()
    first.send(b"a", now=50)
    first.send(b"b", now=40)
    second = Process(log).own()
    second.send(b"c", now=10)
    second.catch_up()
    assert [message.content.publish_time for message in second.read] == [50, 50, 50]


def test_sends_that_wait_share_a_frame(log: MemoryLog) -> None:
    process = Process(log, window=1).own()
    tickets = [process.send(b"%d" % n, b"+") for n in range(5)]
    process.catch_up()
    assert [ticket.offset for ticket in tickets] == [0, 2, 4, 6, 8]
    frames = [record for judged in Reader(log).records() if (record := judged.parsed)]
    assert len(frames) == 3  # the grant, the first send, and the four others


@pytest.mark.rule("G3")
def test_a_batch_that_fits_into_no_frame_is_refused_as_a_whole(log: MemoryLog) -> None:
    process = Process(log).own()
    with pytest.raises(UnsupportedError, match=r"100,001 message.* were to be sent as one"):
        process.send(*[b"x"] * (MAX_MESSAGES + 1))
    with pytest.raises(UnsupportedError, match="large_messages: a record has 5 MB at most"):
        process.send(bytes(3_000_000), bytes(3_000_000))
    with pytest.raises(ValueError, match="at least one message"):
        process.send()
    largest = process.send(bytes(4_990_000))
    rest = [process.send(bytes(2_000_000)) for _ in range(4)]
    process.catch_up()
    assert [ticket.offset for ticket in (largest, *rest)] == [0, 1, 2, 3, 4]


@pytest.mark.long
def test_a_batch_of_many_small_messages_fits_as_it_was_weighed(log: MemoryLog) -> None:
    process = Process(log).own()
    most = 4_995_000 // (64 + 3 + 3 + 9)
    packed = b"\x81\xa3abc\xa3def"
    batch: list[Encoded] = [(b"abc", b"def", packed, -(2**62), 2**61 + 2 * n) for n in range(most)]
    process.writer.send(batch, 2**50)
    process.catch_up()
    assert len(process.read) == most


@pytest.mark.rule("B9")
def test_who_gives_up_says_what_may_be_written(log: MemoryLog) -> None:
    process = Process(log, window=1).own()
    sent, waiting = process.send(b"a"), process.send(b"b")
    process.writer.give_up(LedgerIOError("gone"), EngineClosedError("closed"))
    assert sent.error is not None
    assert waiting.error is not None
    assert (sent.error.maybe_written, waiting.error.maybe_written) == (True, False)


# ---- the log in memory -------------------------------------------------------------------


def test_a_tail_that_would_skip_removed_records_says_so(log: MemoryLog) -> None:
    for data in (b"a", b"b", b"c"):
        log.append(data)
    slow, first = log.tail(), log.first()
    log.trim(2)
    with pytest.raises(OffsetTrimmedError):
        slow.next(0)
    assert first != log.first()
    record = log.tail().next(0)
    assert record is not None
    assert (record.position, record.data) == (log.end(), b"c")


def test_a_record_that_is_too_large_is_refused(log: MemoryLog) -> None:
    with pytest.raises(ValueError, match="this log takes"):
        log.append(bytes(log.max_bytes + 1))


def test_answers_are_lost_and_doubled(log: MemoryLog) -> None:
    answers: list[bool | None] = []
    for chances in (
        Chances(lost=1.0),
        Chances(answer_lost=1.0),
        Chances(answer_doubled=1.0, doubled=1.0),
    ):
        UnreliableLog(log, chances).append(b"x", lambda answer: answers.append(answer.stored))
    assert answers == [None, None, True, True]
    assert len(list(Reader(log).records())) == 3
