"""Rule F6: readers of a group, of which there is one at a time, and where it goes on.

A reader with `group=` takes the topic from the group's reader before it, be that one dead,
hung, or busy reading in another process. What it has committed is where the next one begins:
nothing is skipped, and nothing is read twice but what came after the last commit.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local import runtime
from exclusivelog.local.shm import lockfile
from testing.journals import checkpoint
from testing.processes import (
    PATIENCE,
    Failed,
    State,
    Worker,
    forked,
    hang,
    rows,
    until,
)

pytestmark = pytest.mark.once  # durability changes appends, not who may append

EXCLUSIVE = "exclusive"
FENCED = xl.ReaderFencedError


@pytest.fixture
def orders(topic: xl.Topic) -> xl.Topic:
    """A topic with a hundred messages: fifty in one entry, which is read at once, fifty not."""
    with topic.producer() as producer:
        producer.send_many([b"%d" % i for i in range(50)])
        for number in range(50, 100):
            producer.send(b"%d" % number)
    return topic


def cursor(topic: xl.Topic, group: str) -> int | None:
    """Where the group goes on, by the ledger."""
    found: int | None = topic.engine.ledger.inspect(lambda t: t.cursors.get(topic.id, group))
    return found


def read(reader: xl.Reader, count: int) -> list[int]:
    """The next offsets."""
    return [reader.read_next(timeout=PATIENCE).offset for _ in range(count)]


# ---- one reader at a time ----------------------------------------------------------------

USES: dict[str, Callable[[xl.Reader], Any]] = {
    "read_next": lambda reader: reader.read_next(timeout=0),
    "read_next, with time": lambda reader: reader.read_next(timeout=PATIENCE),
    "read_batch": lambda reader: reader.read_batch(10),
    "iteration": list,
    "follow": lambda reader: next(reader.follow()),
    "has_message_available": lambda reader: reader.has_message_available(),
    "seek": lambda reader: reader.seek("earliest"),
    "commit": lambda reader: reader.commit(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_f6_a_reader_fences_the_one_before_it(
    path: str, orders: xl.Topic, use: Callable[[xl.Reader], Any]
) -> None:
    """Every later call of the reader raises the error, also after the rival has left."""
    with xl.open(path, name="rival") as other:
        first = orders.reader(group="g")
        read(first, 3)
        second = other.topic("orders").reader(group="g")
        with pytest.raises(FENCED, match=r"'orders'.*group 'g'.*engine 'rival'"):
            use(first)
        second.close()
        with pytest.raises(FENCED):
            use(first)
        first.close()
    with pytest.raises(xl.EngineClosedError):
        use(first)


def test_f6_what_was_read_ahead_is_fenced_too(orders: xl.Topic) -> None:
    """Fifty messages came out of the ledger in one piece, of which the application has had
    three when it is fenced. It does not get the fourth."""
    walks: list[Callable[[xl.Reader], Iterator[xl.Message]]] = [iter, xl.Reader.follow]
    for walk in walks:
        reader = orders.reader(group="g")
        messages = walk(reader)
        assert [next(messages).offset for _ in range(3)] == [0, 1, 2]
        with orders.reader(group="g"):
            with pytest.raises(FENCED):
                next(messages)
        with pytest.raises(FENCED):
            reader.read_next(timeout=0)


def test_f6_it_may_be_fenced_by_its_own_engine_or_in_its_own_thread(orders: xl.Topic) -> None:
    readers = [orders.reader(group="g") for _ in range(5)]
    for reader in readers[:-1]:
        with pytest.raises(FENCED):
            reader.read_next(timeout=0)
        reader.close()
    assert read(readers[-1], 2) == [0, 1]


def test_f6_closing_a_fenced_reader_affects_no_other(orders: xl.Topic) -> None:
    first = orders.reader(group="g")
    second = orders.reader(group="g")
    first.close()
    first.close()
    assert read(second, 3) == [0, 1, 2]
    second.commit()
    assert cursor(orders, "g") == 3


def test_f6_readers_of_no_group_affect_no_other(orders: xl.Topic) -> None:
    grouped, plain = orders.reader(group="g"), orders.reader()
    assert (grouped.group, plain.group) == ("g", None)
    orders.reader()
    assert read(grouped, 2) == read(plain, 2) == [0, 1]
    with pytest.raises(ValueError, match="open it with group="):
        plain.commit()
    assert read(plain, 1) == [2]


def test_f6_groups_and_topics_do_not_conflict(engine: xl.Engine, orders: xl.Topic) -> None:
    """Nor do such as read the same when group and topic are joined."""
    pairs = [("g", "x"), ("gx", "x"), ("g", "xx"), ("gx", "y"), ("g" * 240, "x" * 240)]
    for _, name in pairs:
        with engine.topic(name).producer() as producer:
            producer.send_many([b"a"] * 10)
    readers = [engine.topic(name).reader(group=group) for group, name in pairs]
    for number, reader in enumerate(readers, start=1):
        assert read(reader, number) == list(range(number))
        reader.commit()
    for number, (group, name) in enumerate(pairs, start=1):
        assert engine.topic(name).reader(group=group).position == number


def open_reader(state: State, **options: Any) -> int:
    """Be the group's reader; where it begins."""
    state.kept["reader"] = state.topic.reader(**options)
    return state.kept["reader"].position


def read_on(state: State, count: int, commit: bool = True) -> list[int]:
    """Read so many messages, wait for them if need be; their offsets."""
    reader = state.kept["reader"]
    offsets = [reader.read_next().offset for _ in range(count)]
    if commit:
        reader.commit()
    return offsets


def test_f6_a_reader_that_waits_in_another_process_is_woken(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It sleeps at the end of the topic, where nothing comes. It learns of its successor at
    once, and need not look up for that."""
    process = worker()
    process.call(look_up_no_more)
    for _ in range(5):
        process.call(open_reader, group="g")
        process.start(read_on, 1)
        time.sleep(0.1)
        with topic.reader(group="g"), pytest.raises(Failed, match="ReaderFencedError"):
            process.answer()


def look_up_no_more(state: State) -> None:
    """A reader that sleeps here goes on only when it is woken."""
    lockfile.READER_LOOK_UP_SECONDS = 10 * PATIENCE


def test_f6_a_reader_that_waits_in_another_thread_is_woken(topic: xl.Topic) -> None:
    reader = topic.reader(group="g")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.read_next)
        time.sleep(0.1)
        topic.reader(group="g")
        with pytest.raises(FENCED):
            waiting.result(PATIENCE)


def test_f6_a_reader_that_hung_is_fenced_when_it_goes_on(
    orders: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(keepalive=0.3)
    process.call(open_reader, group="g")
    assert process.call(read_on, 10, commit=True) == list(range(10))
    assert process.call(read_on, 5, commit=False) == list(range(10, 15))
    hang(process)
    with orders.reader(group="g") as reader:
        assert read(reader, 10) == list(range(10, 20))
        reader.commit()
        process.signal(signal.SIGCONT)
        with pytest.raises(Failed, match="ReaderFencedError"):
            process.call(commit_kept)
        with pytest.raises(Failed, match="ReaderFencedError"):
            process.call(read_on, 1)
        assert cursor(orders, "g") == 20
        assert read(reader, 1) == [20]


def commit_kept(state: State) -> None:
    state.kept["reader"].commit()


def test_f6_a_reader_that_hung_and_was_not_missed_goes_on(
    orders: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(keepalive=0.3)
    process.call(open_reader, group="g")
    hang(process)
    until(lambda: len(orders.engine.engines()) == 1)
    process.signal(signal.SIGCONT)
    assert process.call(read_on, 2) == [0, 1]
    assert cursor(orders, "g") == 2


# ---- where it goes on --------------------------------------------------------------------


def test_f6_the_next_one_begins_at_the_last_commit(orders: xl.Topic) -> None:
    """Not where its predecessor was, but where it had committed."""
    with orders.reader(group="g") as reader:
        read(reader, 30)
        reader.commit()
        read(reader, 30)
    with orders.reader(group="g") as reader:
        assert (reader.position, read(reader, 2)) == (30, [30, 31])
    assert orders.reader(group="g").position == 30


def test_f6_a_commit_counts_the_messages_that_were_handed_out(orders: xl.Topic) -> None:
    """One by one, in a loop, in batches: never what was only read ahead."""
    reader = orders.reader(group="g")
    for count, message in enumerate(reader, start=1):
        assert message.offset == count - 1
        reader.commit()
        assert cursor(orders, "g") == count
        if count == 20:
            break
    assert len(reader.read_batch(15)) == 15
    reader.commit()
    assert cursor(orders, "g") == 35
    reader.seek(7)
    reader.commit()
    assert cursor(orders, "g") == 7


STARTS: dict[str, tuple[dict[str, Any], int]] = {
    "earliest": ({"start": "earliest"}, 0),
    "latest": ({"start": "latest"}, 100),
    "an offset": ({"start": 42}, 42),
    "behind an offset": ({"start": 42, "inclusive": False}, 43),
    "a time": ({"start": dt.datetime(1990, 1, 1)}, 0),
}


@pytest.mark.parametrize(("options", "begin"), STARTS.values(), ids=STARTS)
def test_f6_start_counts_only_before_the_first_commit(
    orders: xl.Topic, options: dict[str, Any], begin: int
) -> None:
    for _ in range(2):
        assert orders.reader(group="g", **options).position == begin
    with orders.reader(group="g") as reader:
        reader.seek(12)
        reader.commit()
    assert orders.reader(group="g", **options).position == 12


def test_f6_the_cursor_survives_the_process(
    orders: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """SIGKILL right behind a commit; the next process goes on there."""
    for number in range(3):
        process = worker(name=f"reader-{number}")
        assert process.call(open_reader, group="g") == 10 * number
        assert process.call(read_on, 10) == list(range(10 * number, 10 * number + 10))
        process.start(read_on, 200, commit=False)  # more than there are
        process.kill()
    assert orders.reader(group="g").position == 30


@pytest.mark.parametrize("durability", ["power", "process"])
def test_f6_the_cursor_survives_the_ledger_s_closing(path: str, durability: Any) -> None:
    for number in range(3):
        with xl.open(path, durability=durability) as engine:
            topic = engine.topic("orders")
            with topic.producer() as producer:
                producer.send_many([b"x"] * 10)
            reader = topic.reader(group="g", start="latest" if number else "earliest")
            assert read(reader, 10) == list(range(10 * number, 10 * number + 10))
            reader.commit()
    with xl.open(path, readonly=True) as engine:
        assert cursor(engine.topic("orders"), "g") == 30


def test_f6_a_fenced_reader_s_commit_changes_nothing(
    orders: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It has read further than its successor, and finds out only when it commits."""
    process = worker()
    process.call(open_reader, group="g")
    process.call(read_on, 60, commit=False)
    with orders.reader(group="g") as reader:
        for position in (0, 5, 10):
            reader.seek(position)
            reader.commit()
            checkpoint(orders.engine)  # else one in the background might change the rows
            before = rows(orders.engine)
            with pytest.raises(Failed, match="ReaderFencedError"):
                process.call(commit_kept)
            assert rows(orders.engine) == before
    assert orders.reader(group="g").position == 10


def test_f6_the_cursor_goes_with_its_topic(engine: xl.Engine, orders: xl.Topic) -> None:
    reader = orders.reader(group="g")
    read(reader, 100)
    reader.commit()
    engine.delete_topic("orders")
    for use in (USES["read_next"], USES["commit"], USES["seek"]):
        with pytest.raises(xl.TopicNotFoundError):
            use(reader)
    assert rows(engine)["cursors"] == []
    again = engine.topic("orders")
    with again.producer() as producer:
        producer.send(b"new")
    assert [message.value for message in again.reader(group="g")] == [b"new"]
    reader.close()


# ---- beside engine.own -------------------------------------------------------------------


def test_f6_it_is_a_claim_on_the_topic(engine: xl.Engine, orders: xl.Topic) -> None:
    """`own` takes (group, topic) from the reader, and a reader from `own`, with all that the
    claim had beside it (rule F3)."""
    reader = orders.reader(group="g")
    claim = engine.own("g", {"orders": None, "more": None})
    assert claim.generations == {"orders": 2, "more": 1}
    with pytest.raises(FENCED):
        reader.read_next(timeout=0)
    with pytest.raises(FENCED):
        reader.commit()
    reader.close()
    assert claim.is_valid
    with orders.reader(group="g") as second:
        with pytest.raises(xl.OwnershipLostError):
            claim.check()
        assert engine.own("g", {"more": 1}).is_valid
        assert read(second, 1) == [0]
        with pytest.raises(xl.OwnershipError, match="generation 3"):
            engine.own("g", {"orders": 2})
        assert read(second, 1) == [1]
    assert engine.own("g", {"orders": None}).generations == {"orders": 4}


def test_f6_own_wakes_who_waits_soon_enough(topic: xl.Topic) -> None:
    reader = topic.reader(group="g")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.read_next)
        time.sleep(0.05)
        topic.engine.own("g", {"orders": None})
        with pytest.raises(FENCED):
            waiting.result(PATIENCE)


def test_f6_a_high_generation_does_not_keep_a_reader_out(orders: xl.Topic) -> None:
    claim = orders.engine.own("g", {"orders": 10**18})
    with orders.reader(group="g") as reader:
        assert read(reader, 1) == [0]
        assert not claim.is_valid


# ---- closing -----------------------------------------------------------------------------


def test_f6_closing_leaves_the_group_to_others_and_nothing_behind(
    path: str, orders: xl.Topic
) -> None:
    engine = orders.engine
    with orders.reader(group="g") as reader:
        read(reader, 3)
    with pytest.raises(xl.EngineClosedError):
        reader.commit()
    assert rows(engine)["claimants"] == []
    with xl.open(path) as other:
        kept = [other.topic("orders").reader(group=group) for group in "abc"]
        assert len(rows(engine)["claimants"]) == 3
    assert rows(engine)["claimants"] == []
    for reader in kept:
        for use in (USES["read_next"], USES["commit"]):
            with pytest.raises(xl.EngineClosedError):
                use(reader)
        reader.close()


def test_f6_closing_ends_a_wait(path: str, orders: xl.Topic) -> None:
    for close in (lambda engine, reader: reader.close(), lambda engine, reader: engine.close()):
        engine = xl.open(path)
        reader = engine.topic("orders").reader("latest", group="g")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.read_next)
            time.sleep(0.05)
            close(engine, reader)
            with pytest.raises(xl.EngineClosedError):
                waiting.result(PATIENCE)
        engine.close()


def test_f6_a_readonly_engine_has_no_groups(path: str, orders: xl.Topic) -> None:
    orders.engine.close()
    with xl.open(path, readonly=True) as engine:
        topic = engine.topic("orders")
        with pytest.raises(xl.LedgerError, match="readonly"):
            topic.reader(group="g")
        assert len(list(topic.reader())) == 100


@pytest.mark.long
def test_f6_a_forked_child_can_neither_read_nor_commit_nor_close(orders: xl.Topic) -> None:
    """Its copy of the reader is the parent's (rule C5)."""
    reader = orders.reader(group="g")
    read(reader, 3)
    for use in (*USES.values(), lambda reader: orders.reader(group="g")):
        with pytest.raises(Failed) as caught:
            forked(lambda use=use: use(reader))
        assert caught.value.kind == "EngineClosedError"
    forked(reader.close)
    reader.commit()
    assert (cursor(orders, "g"), read(reader, 1)) == (3, [3])


def take_group_in_a_child(path: str) -> list[int]:
    with xl.open(path) as engine:
        return read(engine.topic("orders").reader(group="g"), 2)


@pytest.mark.usefixtures("patient_forks")
def test_f6_a_forked_child_s_own_engine_fences_the_parent(path: str, orders: xl.Topic) -> None:
    reader = orders.reader(group="g")
    read(reader, 5)
    reader.commit()
    assert forked(lambda: take_group_in_a_child(path)) == [5, 6]
    with pytest.raises(FENCED):
        reader.read_next(timeout=0)


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ("", ValueError),
        ("g" * 241, ValueError),
        (7, TypeError),
        (b"g", TypeError),
        ("\ud800", ValueError),
    ],
)
def test_f6_wrong_groups_say_what_is_taken(
    orders: xl.Topic, group: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"group=.*(takes|UTF-8)"):
        orders.reader(group=group)


# ---- validate first, fence second --------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"start": "the beginning"}, {"start": 1.5}, {"deserializer": "pickle"}], ids=repr
)
def test_f6_a_request_that_is_refused_fences_no_other(
    orders: xl.Topic, options: dict[str, Any]
) -> None:
    """A slip of the pen in a program that is just being started must not end the one that runs
    (as in rules A2 and B6: validate first, evict second)."""
    reader = orders.reader(group="g")
    with pytest.raises(ValueError):
        orders.reader(group="g", **options)
    assert read(reader, 1) == [0]


def test_f6_a_request_for_a_deleted_topic_fences_no_other(engine: xl.Engine) -> None:
    former = engine.topic("orders")
    engine.delete_topic("orders")
    topic = engine.topic("orders")
    with topic.producer() as producer:
        producer.send(b"new")
    reader = topic.reader(group="g")
    with pytest.raises(xl.TopicNotFoundError):
        former.reader(group="g")
    assert read(reader, 1) == [0]


def test_f6_nor_does_one_whose_topic_is_made_anew_meanwhile(
    engine: xl.Engine, orders: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its topic and the claim, that is deleted, and there is another one of
    its name, which the group has a reader of. The claim is on the name."""
    readers: list[xl.Reader] = []
    join = runtime.join_group

    def join_late(*args: Any) -> Any:
        engine.delete_topic("orders")
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "join_group", join)
            readers.append(engine.topic("orders").reader(group="g"))
        return join(*args)

    monkeypatch.setattr(runtime, "join_group", join_late)
    with pytest.raises(xl.TopicNotFoundError):
        orders.reader(group="g")
    assert not readers[0].has_message_available()
    readers[0].commit()


def test_f6_a_commit_on_a_deleted_topic_is_no_commit_on_its_successor(
    engine: xl.Engine, orders: xl.Topic
) -> None:
    """The topic was deleted and made again. The reader is still the old one's, and what it
    commits would be left behind for ever."""
    reader = orders.reader(group="g")
    engine.delete_topic("orders")
    engine.topic("orders")
    with pytest.raises(xl.TopicNotFoundError):
        reader.commit()
    assert rows(engine)["cursors"] == []


def test_f6_a_wrong_start_is_an_error_also_where_it_does_not_count(orders: xl.Topic) -> None:
    """Else the mistake shows only in the one run in which the group is new (rule A4)."""
    orders.reader(group="g").commit()
    with pytest.raises(ValueError, match="start="):
        orders.reader("the beginning", group="g")


# ---- many at once ------------------------------------------------------------------------


@pytest.mark.long
def test_f6_many_threads_take_a_group_from_each_other_without_jamming(
    engine: xl.Engine, orders: xl.Topic
) -> None:
    """Threads open, read, wait, commit and close, on two topics and in two groups, while others
    send and take claims. No call waits for ever."""
    end, met = time.monotonic() + 2.0, threading.Event()

    def goes_on() -> bool:
        """On a busy machine, it takes longer until they meet."""
        return time.monotonic() < end or (
            not met.is_set() and time.monotonic() < end + PATIENCE / 2
        )

    def consume_once(chance: random.Random) -> None:
        topic = engine.topic(chance.choice(("orders", "payments")))
        with topic.reader(group=chance.choice("ab")) as reader:
            for _ in range(chance.randrange(20)):
                reader.read_next(timeout=chance.choice((0, 0.01)))
            reader.commit()

    def consume(seed: int) -> None:
        chance = random.Random(seed)
        while goes_on():
            try:
                consume_once(chance)
            except xl.WaitTimeoutError:
                pass
            except FENCED:
                met.set()

    def disturb(seed: int) -> None:
        while goes_on():
            with engine.topic("payments").producer() as producer:
                producer.send(b"x")
            engine.own("a", {"orders": None}).release()

    with ThreadPoolExecutor(10) as pool:
        work = [pool.submit(consume, seed) for seed in range(8)]
        work += [pool.submit(disturb, seed) for seed in range(2)]
        for each in work:
            each.result(PATIENCE)
    assert met.is_set()
    assert rows(engine)["claimants"] == []
    assert engine.verify().ok


Ranges = list[tuple[int, int]]


def consume_in_turn(state: State, seed: int, end: int) -> Ranges:
    """Take the group again and again, read some, commit; the ranges that were committed."""
    chance = random.Random(seed)
    committed: Ranges = []
    over = False
    while not over:
        # It may be fenced already when it is made.
        with contextlib.suppress(FENCED), state.topic.reader(group="g") as reader:
            over = _consume_some(reader, chance, end, committed)
            time.sleep(chance.choice((0, 0.001)))
    return committed


def _consume_some(reader: xl.Reader, chance: random.Random, end: int, committed: Ranges) -> bool:
    for _ in range(chance.randrange(1, 5)):
        first = reader.position
        if first >= end:
            return True
        reader.read_batch(chance.randrange(1, 10))
        reader.commit()
        committed.append((first, reader.position))
    return False


@pytest.mark.long
def test_f6_what_rivals_have_committed_fits_together(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Three processes take the group from each other as fast as they can. Each commit that
    succeeded began where the one before it had ended: together they are the whole topic,
    nothing twice and nothing left out."""
    count, ranges = 0, []
    processes = [worker(name=f"w{number}") for number in range(3)]
    for _ in range(10):  # on a busy machine, one may be through before another begins
        count += 1500
        with topic.producer() as producer:
            for number in range(300):
                producer.send_many([b"%d" % number] * 5)
        for seed, process in enumerate(processes):
            process.start(consume_in_turn, seed, count)
        shares = [process.answer(2 * PATIENCE) for process in processes]
        ranges += [pair for share in shares for pair in share]
        if sum(1 for share in shares if share) > 1:
            break
    else:
        raise AssertionError("they have never met")
    ranges.sort()
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == count == cursor(topic, "g")


# ---- consumers that die ------------------------------------------------------------------


@dataclass
class Life:
    """What one consumer noted before it died: where it began, what it consumed, what it was
    about to commit, and what it had committed."""

    begin: int = -1
    consumed: list[int] = field(default_factory=list)
    tried: int | None = None
    committed: int | None = None

    @classmethod
    def of(cls, notes: Path) -> Life:
        life = cls()
        for note in notes.read_bytes().splitlines():
            word, number = note.split()
            life.take(word.decode(), int(number))
        return life

    def take(self, word: str, number: int) -> None:
        if word == "begin":
            self.begin = number
        elif word == "consume":
            self.consumed.append(number)
        elif word == "try":
            self.tried = number
        else:
            self.tried = None
            if word == "commit":
                self.committed = number


def consume_for_ever(state: State, notes: str, seed: int) -> None:
    """Read, note, and now and then commit, until fenced or killed."""
    chance = random.Random(seed)
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(word: str, number: int) -> None:
        os.write(file, b"%s %d\n" % (word.encode(), number))

    with contextlib.suppress(FENCED), state.topic.reader(group="g") as reader:
        note("begin", reader.position)
        while True:
            note("consume", reader.read_next().offset)
            if chance.random() < 0.15:
                note("try", reader.position)
                try:
                    reader.commit()
                except FENCED:
                    note("refuse", reader.position)
                    raise
                note("commit", reader.position)


class Consumers:
    """One after the other; the one before is killed, or fenced by its successor."""

    def __init__(self, where: Path, engine: xl.Engine, worker: Callable[..., Worker]) -> None:
        self.lives: list[Path] = []
        self._where = where
        self._engine = engine
        self._idle = [worker(name=f"w{number}") for number in range(8)]
        self._reading: list[Worker] = []

    @property
    def can_spare_one(self) -> bool:
        return len(self._idle) > 1

    def next(self) -> None:
        """A new one begins."""
        notes = self._where / f"notes-{len(self.lives)}"
        process = self._idle.pop()
        self._reading.append(process)
        self.lives.append(notes)
        process.start(consume_for_ever, str(notes), len(self.lives))
        until(lambda: notes.exists() and notes.read_bytes().count(b"\n") > 1)

    def end(self, how: str) -> None:
        """Kill the last one; or stop it, so that it goes on behind its successor's back; or
        leave it to be fenced."""
        if how == "kill":
            self._reading.pop().kill()
        elif how == "stop":
            hang(self._reading[-1])

    def go_on(self) -> None:
        """Those before the last one go on, and find themselves fenced."""
        *fenced, last = self._reading
        for process in fenced:
            process.signal(signal.SIGCONT)
            process.answer()
        self._idle += fenced
        self._reading = [last]

    def __enter__(self) -> Consumers:
        return self

    def __exit__(self, *failure: object) -> None:
        for process in self._reading:  # also after a failure, no other process may wait for them
            process.kill()


@contextlib.contextmanager
def traffic(topic: xl.Topic) -> Iterator[None]:
    """Messages keep coming; in the end a known number of them."""
    over = threading.Event()

    def send() -> None:
        with topic.producer() as producer:
            while not over.wait(0.001):
                producer.send(b"x")

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        try:
            yield
        finally:
            over.set()
        sending.result(PATIENCE)


@pytest.mark.long
def test_f6_consumers_that_die_skip_nothing_and_repeat_only_what_was_not_committed(
    topic: xl.Topic, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """Consumers follow one another: killed at any moment, also in the middle of a commit, or
    stopped there, or fenced while they are at it. Each begins where the last successful commit
    was, and goes on from there without a gap; the last one reads to the end."""
    with traffic(topic), Consumers(tmp_path, topic.engine, worker) as consumers:
        consumers.next()
        for _ in range(24):
            time.sleep(random.uniform(0, 0.05))
            hows = ("kill", "stop", "fence") if consumers.can_spare_one else ("stop", "fence")
            consumers.end(random.choice(hows))
            consumers.next()
            consumers.go_on()
        last = topic.next_offset
        until(lambda: Life.of(consumers.lives[-1]).consumed[-1] >= last)
    judge([Life.of(notes) for notes in consumers.lives], last)


def judge(lives: list[Life], end: int) -> None:
    goes_on = {0}  # a commit without an outcome may have been made, or not
    consumed: set[int] = set()
    for life in lives:
        assert life.begin in goes_on, (life.begin, goes_on)
        assert life.consumed == list(range(life.begin, life.begin + len(life.consumed)))
        consumed.update(life.consumed)
        known = life.begin if life.committed is None else life.committed
        goes_on = {known} if life.tried is None else {known, life.tried}
    assert set(range(end)) <= consumed


def test_f6_controls_turn_the_judge_red() -> None:
    sound = [Life(0, [0, 1, 2], None, 2), Life(2, [2, 3, 4], 5, None), Life(5, [5], None, None)]
    judge(sound, 6)
    skips = Life(3, [3, 4], None, None)
    repeats = Life(1, [1, 2, 3, 4, 5], None, None)
    gap = Life(2, [2, 4, 5], None, None)
    for wrong in (skips, repeats, gap):
        with pytest.raises(AssertionError):
            judge([sound[0], wrong], 6)
