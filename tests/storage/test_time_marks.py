"""Messages that were sent under a wrong wall clock: publish times still never go backwards (rule
G4), and retention by age, trimming and seeking by time go by the time marks (rules G5, G8)."""

from __future__ import annotations

import datetime as dt
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

import exclusivelog as xl
from exclusivelog.local import records, time_marks
from exclusivelog.local.log import appending, reading
from exclusivelog.local.log.reading import offset_at_time
from exclusivelog.local.maintenance import retention
from exclusivelog.local.ownership import notifications
from exclusivelog.local.records import U64
from exclusivelog.local.storage import tables
from testing.clocks import DAY, YEAR, WallClock
from testing.journals import published_last_at
from testing.processes import PATIENCE, State, Worker, until, values
from tests.log.test_readers import moment

pytestmark = pytest.mark.once  # either durability leaves the same on the disk

AHEAD = 10 * YEAR
YOUNG = 3600  # seconds: what a test has sent is younger


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who keeps topics within their limits looks often."""
    monkeypatch.setattr(retention, "ROUND_SECONDS", 0.05)
    monkeypatch.setattr(notifications, "LONGEST_SLEEP_SECONDS", 0.05)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def send_one(state: State, value: bytes) -> int:
    """Into the tables, at the worker's time; its publish time."""
    with state.topic.producer() as producer:
        offset = producer.send(value)
    state.engine.ledger.checkpoint()
    return next(iter(state.topic.reader(offset))).publish_time


def fill(topic: xl.Topic, count: int) -> None:
    with topic.producer() as producer:
        for number in range(count):
            producer.send(b"%d" % number)
    topic.engine.ledger.checkpoint()


def marks(topic: xl.Topic) -> list[time_marks.Mark]:
    with topic.engine.ledger.read() as found:
        return found.topics.marks(topic.id)


def published(topic: xl.Topic) -> list[int]:
    return [message.publish_time for message in topic.reader()]


# ---- one message from the future ---------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("ahead", [AHEAD, 0], ids=["10 years ahead", "control"])
def test_g8_one_message_from_the_future_keeps_no_other(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker], often: None, ahead: int
) -> None:
    """103 messages, one of them sent under a clock ten years ahead: all go once they are old."""
    fill(topic, 51)
    clock.jump(ahead)
    process = worker(name="ahead")
    sent = process.call(send_one, b"wrong")
    assert abs(sent / 1000 - time.time() - ahead) < 60
    process.kill()
    fill(topic, 51)
    assert published(topic) == sorted(published(topic))
    begin = time.monotonic()
    topic.retention(max_age=1.0)
    until(lambda: topic.first_offset == topic.next_offset == 103)
    assert time.monotonic() - begin < PATIENCE
    topic.retention(max_age=None)  # it would remove the next one, too, a second later
    assert bool(ahead) is (published_of_next(topic) > now_ms() + 5 * YEAR * 1000)
    assert topic.engine.verify().ok


def published_of_next(topic: xl.Topic) -> int:
    """The publish time of a message that is sent now."""
    with topic.producer() as producer:
        offset = producer.send(b"next")
    return next(iter(topic.reader(offset))).publish_time


@pytest.mark.long
def test_g8_a_topic_with_nothing_but_a_message_from_the_future_is_trimmed(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker], often: None
) -> None:
    """It gets no more messages: the retention worker itself marks the time, and the message
    goes `max_age` later, not earlier."""
    clock.jump(AHEAD)
    process = worker(name="ahead")
    process.call(send_one, b"wrong")
    process.kill()
    assert marks(topic) == []
    before = now_ms()
    topic.retention(max_age=1.5)
    [(offset, when)] = until(lambda: marks(topic))
    assert offset == 1
    assert before <= when <= now_ms()
    until(lambda: topic.first_offset == 1)
    assert now_ms() >= when + 1500
    until(lambda: marks(topic) == [])  # trimmed past


@pytest.mark.long
def test_g8_what_is_young_stays_behind_a_message_from_the_future(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker]
) -> None:
    """Trimming and seeking by time tell messages apart that all have the same publish time."""
    clock.jump(AHEAD)
    far = worker(name="ahead").call(send_one, b"wrong")
    between = []
    for value in (b"a", b"b", b"c"):
        with topic.producer() as producer:
            producer.send(value)
        topic.engine.ledger.checkpoint()
        time.sleep(0.05)
        between.append(moment(now_ms()))
        time.sleep(0.05)
    assert len(set(published(topic))) == 1
    assert [topic.reader(when).position for when in between] == [2, 3, 4]
    assert topic.reader(between[0] - dt.timedelta(hours=1)).position == 0
    # A program has kept a publish time, to go on from there.
    assert topic.reader(moment(far)).position == 0
    assert topic.reader(moment(far), inclusive=False).position == 4
    assert topic.trim(before=between[1]) == 3
    assert values(topic) == [b"c"]
    assert topic.trim(before=between[1]) == 3


def test_g8_messages_in_the_journal_are_young(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker]
) -> None:
    """Those that no mark tells of yet count as sent just now."""
    clock.jump(AHEAD)
    worker(name="ahead").call(send_one, b"wrong")
    fill(topic, 3)
    time.sleep(0.1)
    when = moment(now_ms())
    with topic.producer() as producer:
        producer.send(b"young")
        assert topic.reader(when).position == 4
    assert topic.trim(before=when) == 4
    assert values(topic) == [b"young"]


def test_g8_a_mark_from_the_future_is_not_believed(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker], often: None
) -> None:
    """A clock of nine years ahead has marked what one of ten years ahead has sent."""
    clock.jump(AHEAD)
    process = worker(name="ahead")
    process.call(send_one, b"wrong")
    clock.jump(9 * YEAR)
    process.call(send_one, b"wrong")
    process.kill()
    assert all(when > now_ms() + 8 * YEAR * 1000 for _, when in marks(topic))
    assert len(marks(topic)) >= 1
    topic.retention(max_age=1.0)
    until(lambda: topic.first_offset == 2)
    until(lambda: marks(topic) == [])


# ---- clocks that are behind --------------------------------------------------------------


def keep(state: State, seconds: float) -> None:
    retention.ROUND_SECONDS = 0.05
    retain(state.topic, seconds)


def retain(topic: xl.Topic, seconds: float) -> None:
    """Have messages removed that are older, and wait until this process has looked at them."""
    keeper, looked = topic.engine.backend.retention_worker, threading.Event()
    go_round = keeper.go_round

    def note_it() -> None:
        go_round()
        if topic.id in keeper._ages:
            looked.set()

    keeper.go_round = note_it  # type: ignore[method-assign]
    topic.retention(max_age=seconds)
    assert looked.wait(PATIENCE)


@pytest.mark.long
@pytest.mark.parametrize("behind", [300 * DAY, 50 * YEAR], ids=["300 days", "50 years"])
def test_g8_a_clock_that_is_behind_lets_no_process_remove_young_messages(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker], often: None, behind: int
) -> None:
    """It takes right publish times for wrong ones, and marks them with a time long ago."""
    fill(topic, 5)
    clock.jump(-behind)
    process = worker(name="behind")
    process.call(send_one, b"behind")
    process.call(keep, YOUNG)
    fill(topic, 5)
    topic.retention(max_age=YOUNG)
    for _ in range(10):
        process.call(send_one, b"behind")
        time.sleep(0.1)
    assert (topic.first_offset, topic.next_offset) == (0, 21)
    assert published(topic) == sorted(published(topic))
    assert topic.trim(before=moment(now_ms() - YOUNG * 1000)) == 0
    found = marks(topic)
    if behind == 300 * DAY:  # the control: believing them would remove young messages
        assert time_marks.first_marked_since(found, now_ms() - YOUNG * 1000, 0, now_ms()) > 0
    else:
        assert found == []  # a clock that was never set


def test_g8_a_clock_ahead_and_another_one_behind_remove_nothing_young_of_a_right_one_s(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker], often: None
) -> None:
    """A mark that a clock behind makes after one that a right clock has made is contradicted by
    it, and ignored."""
    clock.jump(AHEAD)
    process = worker(name="wrong")
    process.call(send_one, b"ahead")
    fill(topic, 1)
    clock.jump(-300 * DAY)
    process.call(send_one, b"behind")
    fill(topic, 1)
    assert min(when for _, when in marks(topic)) < now_ms() - 299 * DAY * 1000
    assert topic.trim(before=moment(now_ms() - YOUNG * 1000)) == 0
    topic.retention(max_age=YOUNG)
    time.sleep(0.5)
    assert (topic.first_offset, topic.next_offset) == (0, 4)


# ---- the retention worker's own clock ----------------------------------------------------


def be_patient(state: State, seconds: float) -> None:
    retention.PATIENCE_SECONDS = seconds


def forget_arrivals(state: State) -> None:
    retention.ArrivalHistory.note = lambda self, next_offset, max_age: next_offset  # type: ignore[method-assign]


@pytest.mark.sampled
@pytest.mark.parametrize("control", [False, True], ids=["", "control"])
def test_g8_what_arrives_while_the_retention_worker_s_clock_is_ahead_stays(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker], control: bool
) -> None:
    """One process applies retention, by a clock ten years ahead: to it all messages are old. It
    has seen them come. Control: it believes its clock."""
    clock.jump(AHEAD)
    keeper = worker(name="keeper")
    keeper.call(be_patient, 0.0)
    if control:
        keeper.call(forget_arrivals)
    keeper.call(keep, YOUNG)
    fill(topic, 20)
    if control:
        until(lambda: topic.first_offset == 20)
        return
    time.sleep(1.0)
    assert (topic.first_offset, topic.next_offset) == (0, 20)


@pytest.mark.sampled
@pytest.mark.parametrize("control", [False, True], ids=["", "control"])
def test_g8_a_message_that_seems_old_when_it_comes_stays(
    topic: xl.Topic,
    clock: WallClock,
    worker: Callable[..., Worker],
    often: None,
    monkeypatch: pytest.MonkeyPatch,
    control: bool,
) -> None:
    """It was sent under a clock that is fifty years behind, into an empty topic. Control: the
    retention worker goes by its publish time alone."""
    monkeypatch.setattr(retention, "PATIENCE_SECONDS", 0.0)
    if control:
        monkeypatch.setattr(retention.ArrivalHistory, "note", lambda self, end, max_age: end)
    retain(topic, YOUNG)
    clock.jump(-50 * YEAR)
    sent = worker(name="behind").call(send_one, b"young")
    assert sent < now_ms() - 49 * YEAR * 1000
    if control:
        until(lambda: topic.first_offset == 1)
        return
    time.sleep(1.0)
    assert topic.first_offset == 0


@pytest.mark.sampled
@pytest.mark.parametrize("control", [False, True], ids=["", "control"])
def test_g8_a_retention_worker_that_begins_with_a_clock_ahead_removes_nothing_at_once(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker], control: bool
) -> None:
    """All messages were there before it came, and to its clock all are old; but it waits for an
    hour. Control: it does not."""
    fill(topic, 20)
    clock.jump(AHEAD)
    keeper = worker(name="keeper")
    if control:
        keeper.call(be_patient, 0.0)
    keeper.call(keep, 7 * DAY)
    if control:
        until(lambda: topic.first_offset == 20)
        return
    until(lambda: overdue(topic))
    time.sleep(1.0)
    assert (topic.first_offset, topic.next_offset) == (0, 20)


def overdue(topic: xl.Topic) -> tuple[bytes, int] | None:
    with topic.engine.ledger.read() as found:
        return found.retention.overdue(topic.id)


@pytest.mark.long
@pytest.mark.parametrize("alone", [False, True], ids=["beside a right one", "control: alone"])
def test_g8_a_retention_worker_with_a_right_clock_stops_one_with_a_wrong_one(
    topic: xl.Topic,
    clock: WallClock,
    worker: Callable[..., Worker],
    often: None,
    monkeypatch: pytest.MonkeyPatch,
    alone: bool,
) -> None:
    """The wrong one never gets its hour, which is a few seconds here. Control: it is alone, and
    believed at the end of it."""
    fill(topic, 20)
    monkeypatch.setattr(retention, "PATIENCE_SECONDS", 4.0)
    if alone:
        monkeypatch.setattr(retention.RetentionWorker, "start", lambda self: None)
    clock.jump(AHEAD)
    keeper = worker(name="keeper")
    keeper.call(be_patient, 4.0)
    begin = time.monotonic()
    keeper.call(keep, 7 * DAY)
    if alone:
        until(lambda: topic.first_offset == 20)
        assert time.monotonic() - begin >= 4.0
        return
    topic.retention(max_age=7 * DAY)
    time.sleep(9.0)
    assert (topic.first_offset, topic.next_offset) == (0, 20)


@pytest.mark.long
def test_g8_what_is_overdue_goes_once_that_has_stood_for_a_while(
    topic: xl.Topic,
    clock: WallClock,
    worker: Callable[..., Worker],
    often: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Retention has not run for long: that is logged once, and no row of it stays."""
    monkeypatch.setattr(retention, "PATIENCE_SECONDS", PATIENCE)
    clock.jump(-50 * YEAR)
    process = worker(name="long ago")
    process.call(send_one, b"old")
    process.kill()
    begin = time.monotonic()
    topic.retention(max_age=YOUNG)
    until(lambda: overdue(topic))
    assert topic.first_offset == 0
    monkeypatch.setattr(retention, "PATIENCE_SECONDS", 1.0)
    until(lambda: topic.first_offset == 1)
    assert time.monotonic() - begin >= 1.0
    until(lambda: overdue(topic) is None)
    assert len([text for text in caplog.messages if "Was the clock set ahead?" in text]) == 1


def test_g8_that_messages_are_overdue_goes_with_their_topic(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    with engine.ledger.write_exclusive() as found:
        found.retention.put_overdue(topic.id, (bytes(16), 7))
    assert overdue(topic) == (bytes(16), 7)
    engine.delete_topic("orders")
    assert overdue(topic) is None


def test_g8_arrivals_hold_back_what_is_younger_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four messages a second, for a while, seen each time; then none. What is protected is never
    older than `max_age` and a hundredth."""
    arrivals, times_seen, now = retention.ArrivalHistory(), [], 1000.0
    monkeypatch.setattr(retention, "_core", SimpleNamespace(monotonic=lambda: now))
    for number in range(4000):
        now += 0.25 if number < 3000 else 0.15
        if number < 3000:
            times_seen.append(now)
        protected = arrivals.note(len(times_seen), 100.0)
        assert all(at >= now - 100 * 1.011 for at in times_seen[protected:])
        if protected > 1:  # the first one was there when it first looked
            assert all(at <= now - 100 for at in times_seen[1:protected])
    assert protected == 3000
    assert len(arrivals._seen) <= 102


# ---- any clocks: what may go, and what must ----------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(25))
def test_g8_whatever_clocks_showed_nothing_younger_goes(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Messages are sent and marked under clocks that are right or, all through a run, ahead or
    behind; a right clock asks. No message younger than asked for is before the answer, but for
    those of a clock behind; and with one ten years ahead, none is kept that had been marked by a
    right one in time."""
    chance = random.Random(seed)
    topic = engine.topic("times")
    wrong = chance.choice([AHEAD, DAY, -300 * DAY, -3600])
    real, shown, sent, right_marks = now_ms() + 60_000, [0], [], []
    for module in (tables, appending, reading):
        monkeypatch.setattr(module, "wall_ms", lambda: shown[0])
    for _ in range(chance.randrange(1, 40)):
        real += chance.choice([1, 10, 1000, 60_000, 3_600_000, DAY * 1000])
        shown[0] = real + 1000 * (wrong if chance.random() < 0.4 else 0)
        with engine.ledger.write_checkpointed() as found:
            last = found.topics.get(topic.id).last_publish_time
        published_last_at(topic, max(last, shown[0]))
        # The message itself gets that time: the machine's own clock is behind it by now.
        with topic.producer() as producer:
            producer.send(b"x")
        engine.ledger.checkpoint()
        # What is sent under a clock that is behind seems older than it is.
        sent.append(real if shown[0] >= real else 0)
        if shown[0] == real:
            right_marks.append((len(sent), real))
    shown[0] = real = real + chance.choice([1, 1000, DAY * 1000])
    with engine.ledger.read() as found:
        row = found.topics.get(topic.id)
        for since in [real, real - 1, *(moment + d for moment in sent for d in (-1, 0, 1))]:
            answer = offset_at_time(found, row, min(since, real))
            assert all(at < since + time_marks.SLACK_MS for at in sent[:answer]), (seed, since)
            if wrong == AHEAD:
                due = max((offset for offset, at in right_marks if at < since), default=0)
                assert answer >= due, (seed, since)


# ---- marks themselves --------------------------------------------------------------------


@pytest.mark.long
def test_g8_marks_are_few_and_the_denser_the_younger() -> None:
    """A year of checkpoints, a minute apart: no message seems younger than by two thirds."""
    now, kept, truth = 1_800_000_000_000, [], []
    for number in range(1, YEAR // 60 // 4):
        now += 60_000
        kept = time_marks.with_mark(kept, number, now)
        truth.append(now)
    assert len(kept) == time_marks.MOST_MARKS
    assert kept == sorted(kept)
    for offset, at in enumerate(truth[:: len(truth) // 1000]):
        offset *= len(truth) // 1000
        seems = next(when for end, when in kept if end > offset)
        assert at <= seems
        assert now - seems >= (now - at) / 3 - 60_000


def test_g8_a_topic_s_marks_go_with_it(engine: xl.Engine, topic: xl.Topic) -> None:
    """Also when it is deleted; its successor begins without."""
    published_last_at(topic, now_ms() + AHEAD * 1000)
    before = now_ms()
    fill(topic, 3)
    assert before <= marks(topic)[-1][1] <= now_ms()
    assert marks(topic)[-1][0] == 3
    engine.delete_topic("orders")
    with engine.ledger.read() as found:
        assert found.rows.get("meta", records.TIMES + U64.pack(topic.id)) is None
    again = engine.topic("orders")
    fill(again, 1)
    assert marks(again) == []
    assert abs(published(again)[0] - now_ms()) < 60_000


def test_g8_a_topic_with_right_times_has_no_marks(engine: xl.Engine, topic: xl.Topic) -> None:
    fill(topic, 10)
    published_last_at(topic, now_ms() + 1000)  # a little ahead: a clock that was set
    fill(topic, 10)
    assert marks(topic) == []


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_g9_damaged_marks_keep_messages_and_hold_up_no_checkpoint(
    engine: xl.Engine, topic: xl.Topic, damage: str
) -> None:
    """Every byte counts: what is not whole says nothing, and is written anew."""
    published_last_at(topic, now_ms() + AHEAD * 1000)
    fill(topic, 3)
    key = records.TIMES + U64.pack(topic.id)
    with engine.ledger.write_exclusive() as found:
        row = found.rows.get("meta", key)
    assert row is not None
    for at in range(len(row)):
        broken = {
            "cut": row[:at],
            "flip": row[:at] + bytes([row[at] ^ 4]) + row[at + 1 :],
            "empty": b"",
        }[damage]
        with engine.ledger.write_exclusive() as found:
            found.rows.put("meta", key, broken)
        assert marks(topic) == []
        time.sleep(0.002)
        assert topic.reader(moment(now_ms())).position == 0
    fill(topic, 1)
    assert marks(topic)[-1][0] == 4
    assert engine.verify().ok


def test_g8_marks_are_in_a_backup(engine: xl.Engine, topic: xl.Topic, tmp_path: object) -> None:
    published_last_at(topic, now_ms() + AHEAD * 1000)
    fill(topic, 3)
    engine.backup(f"{tmp_path}/copy")
    with xl.open(f"{tmp_path}/copy", readonly=True) as copy:
        assert marks(copy.topic("orders", create=False)) == marks(topic)


def test_g8_marks_of_equal_times_are_no_riddle() -> None:
    found: list[time_marks.Mark] = []
    for offset in range(5):
        found = time_marks.with_mark(found, offset, 2 * 10**12)
    assert time_marks.first_marked_since(found, 2 * 10**12, 0, 2 * 10**12) == 0
    assert time_marks.first_marked_since(found, 2 * 10**12 + 1, 0, 2 * 10**12 + 1) == 4
