"""Large entries in their segments: read as all others, without a copy; gone when the last of
them is; whole after every death and fault (rules G3, G5, G8, G9, H1, H2)."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import errno
import os
import random
import re
import resource
import shutil
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local import files as files_module
from exclusivelog.local.records import U64
from exclusivelog.local.storage import opening, segments
from exclusivelog.local.storage.segments import REFERENCE, REFERENCE_MAGIC, Segments
from testing.children import child, finish, line, tell
from testing.disks import disk, leave, needs_strace
from testing.processes import PATIENCE, State, open_producer, until, values
from testing.strace import ForkServer, fork_server, injecting
from tests.log.test_damage import Damage, caught, step_over
from tests.storage.test_faults import FAILS, check_full, fill

pytest.importorskip("pyarrow")
from tests.messages.test_arrow import as_messages, facts

LARGE = 200_000  # bytes, more than segments.LARGE_ENTRY


def some(number: int, size: int = LARGE) -> bytes:
    """A message of its own."""
    return b"%06d" % number + random.Random(number).randbytes(size - 6)


def batch(number: int) -> list[bytes]:
    """Four messages of one large entry."""
    return [some(4 * number + n, LARGE // 4) for n in range(4)]


def send(engine: xl.Engine, name: str, *sizes: int) -> None:
    """Messages 0, 1 ... of these sizes, each an entry of its own."""
    with engine.topic(name).producer() as producer:
        for number, size in enumerate(sizes or [LARGE]):
            producer.send(some(number, size))


def files(path: str | Path) -> dict[int, int]:
    """{segment: size} of the files that are there."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for file in (Path(path) / "segments").iterdir():
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found[int(file.name, 16)] = file.stat().st_size
    return found


def only(path: str | Path) -> Path:
    """The ledger's only segment."""
    (segment,) = (Path(path) / "segments").iterdir()
    return segment


def known(engine: xl.Engine) -> dict[int, int]:
    """{segment: bytes in use} as the tables say."""
    with engine.ledger.read() as inside:
        return {segment: end for segment, (end, _) in inside.large.segments().items()}


def sizes(engine: xl.Engine) -> tuple[dict[int, int], int]:
    """The files, and the bytes that they are said to take. A read of a thread in the background may
    have kept what is not needed any more."""
    known_to = set(known(engine))
    until(lambda: is_removed(engine, known_to))
    return files(engine.path), engine.stats()["large_bytes"]


def is_removed(engine: xl.Engine, needed: set[int]) -> bool:
    """Is there no file of a segment but these?"""
    engine.ledger.remove_unneeded()
    return set(files(engine.path)) <= needed


def abort(engine: xl.Engine, topic: xl.Topic) -> None:
    """Write a large entry in a transaction that does not commit."""
    with contextlib.suppress(KeyError), engine.ledger.write_exclusive() as inside:
        inside.entries.put(topic.id, topic.next_offset, some(99, 3 * LARGE))
        raise KeyError


# ---- what workers are told ---------------------------------------------------------------


def everything(state: State) -> list[Any]:
    return [facts(message) for message in state.topic.reader()]


def read_all(state: State, name: str) -> list[bytes]:
    return values(state.engine.topic(name, create=False))


def delete(state: State, name: str = "orders") -> None:
    state.engine.delete_topic(name)


def look_around(state: State) -> None:
    state.engine.backend.worker.wake()


def tail(state: State, count: int, arrow: bool) -> list[tuple[int, bytes]]:
    reader, seen = state.topic.reader(), []
    while len(seen) < count:
        if arrow and (found := reader.read_arrow(columns=["offset", "value"])):
            seen += [(row["offset"], row["value"][:6]) for row in found.to_pylist()]
        else:
            message = reader.read_next(PATIENCE)
            seen.append((message.offset, message.value[:6]))
    return seen


# ---- G5: read as all others --------------------------------------------------------------


@pytest.mark.long
def test_g5_large_entries_are_read_as_all_others(topic, worker) -> None:
    """Large messages alone and in batches, with everything that a message can have, and small
    ones between them."""
    sent: list[Any] = []
    items = [None if n % 7 == 0 else some(n, 1000) for n in range(800)]
    keys = [None if n % 3 == 0 else b"%d" % n for n in range(800)]
    times = [None if n % 5 == 0 else n for n in range(800)]
    extra = [{"n": str(n)} if n % 2 else {} for n in range(800)]
    with topic.producer(max_batch_messages=500) as producer:
        for number in range(3):
            producer.send(b"small")
            producer.send(some(number), key="k", properties={"a": "é"}, event_time=number)
            producer.send(bytes(LARGE))
            producer.send_many(items)
            producer.send_many(items, keys=keys, event_times=times, properties=extra)
            sent += [(b"small", None, None, {}), (some(number), b"k", number, {"a": "é"})]
            sent += [(bytes(LARGE), None, None, {}), *((item, None, None, {}) for item in items)]
            sent += zip(items, keys, times, extra, strict=True)
    expected = [facts(message) for message in topic.reader()]
    assert [(row[3], row[2], row[5], row[8]) for row in expected] == sent
    assert [row[0] for row in expected] == list(range(len(sent)))
    reader = topic.reader()
    assert [facts(reader.read_next(0)) for _ in sent] == expected
    reader, dice, seen = topic.reader(), random.Random(1), []
    while messages := reader.read_batch(dice.randrange(1, 900)):
        seen += map(facts, messages)
    assert seen == expected
    for most in (1, 1 << 20, 1 << 29):
        reader, seen = topic.reader(3), []
        while (found := reader.read_arrow(most)) is not None:
            seen += as_messages(found)
        assert seen == expected[3:]
    assert worker().call(everything) == expected
    assert worker(readonly=True).call(everything) == expected


@pytest.mark.long
def test_g5_other_processes_follow_large_batches(engine, topic, worker, monkeypatch) -> None:
    """Each message once, in order, while segments grow, begin, and are removed beside them."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 20)
    readers = [worker(), worker(readonly=True), worker()]
    for index, reader in enumerate(readers):
        reader.start(tail, 200, index == 2)
    with topic.producer() as producer:
        for number in range(40):
            producer.send_many(batch(number))
            producer.send(b"%06d" % number)
            if number % 8 == 0:
                send(engine, "other")
                engine.delete_topic("other")
    expected = [(m.offset, m.value[:6]) for m in topic.reader()]
    assert [offset for offset, _ in expected] == list(range(200))
    for reader in readers:
        assert reader.answer() == expected


OUTLIVES = """
    import sys
    import exclusivelog as xl
    from testing.processes import forked
    from tests.storage.test_segments import LARGE, send, sizes, some, values
    path, sent = sys.argv[1], [some(n, 1000) for n in range(300)]
    with xl.open(path) as engine:
        topic = engine.topic("t")
        with topic.producer(max_batch_messages=300) as producer:
            producer.send(some(1))
            producer.send_many(sent)
        messages, batch = list(topic.reader()), topic.reader(1).read_arrow()

        def look():
            assert [m.value for m in messages] == [some(1), *sent]
            assert batch.column("value").to_pylist() == sent

        def in_child():
            look()
            with xl.open(path) as mine:
                assert values(mine.topic("t")) == [some(1), *sent]
                mine.delete_topic("t")
                assert sizes(mine) == ({}, 0)
            look()

        forked(in_child)
        look()
        send(engine, "more")
        assert values(engine.topic("more")) == [some(0)]
        forked(look)
    del engine, topic, producer
    look()
    forked(look)
"""


@pytest.mark.long
@pytest.mark.rule("H5")
def test_h5_a_checkpoint_may_close_a_segment_beside_an_opening(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which looks at the mounts of all open files."""
    look, looks = opening.refuse_elsewhere, []
    with xl.open(path) as engine:
        send(engine, "t")
        open_here = engine.ledger.segments
        assert open_here.newest is not None

        def look_late(*arguments: Any) -> None:
            looks.append(arguments)
            if len(looks) == 1:
                open_here._close_newest()
            look(*arguments)

        monkeypatch.setattr(opening, "refuse_elsewhere", look_late)
        xl.open(path, name="second").close()
    assert len(looks) == 2


def test_g5_what_was_read_outlives_topic_file_and_engine_also_in_a_fork(path) -> None:
    finish(OUTLIVES, path)


# ---- G8: gone when the last of them is ---------------------------------------------------


def test_g8_a_segment_goes_with_the_last_topic_in_it(engine, path) -> None:
    for name in "abc":
        send(engine, name)
    before = sizes(engine)
    assert before == ({1: known(engine)[1]}, known(engine)[1])
    engine.delete_topic("b")
    engine.delete_topic("a")
    assert sizes(engine) == before
    assert values(engine.topic("c")) == [some(0)]
    engine.delete_topic("c")
    assert sizes(engine) == ({}, 0)


def test_g8_segments_follow_each_other_and_no_id_comes_twice(path, monkeypatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 3 * LARGE)
    monkeypatch.setattr(segments, "KEPT_IN_MEMORY", 1000)
    last = 0
    for _ in range(3):
        with xl.open(path) as engine:
            send(engine, "t", *[LARGE] * 10)
            now = files(path)
            assert sorted(now) == list(range(last + 1, last + 5))
            assert known(engine) == now
            assert sum(now.values()) == engine.stats()["large_bytes"]
            assert values(engine.topic("t")) == [some(n) for n in range(10)]
            engine.delete_topic("t")
            assert sizes(engine) == ({}, 0)
        last = max(now)


def held(engine: xl.Engine, pid: int | None) -> list[str]:
    """The ledger's segments that are removed, and take their room all the same, because of a
    process. (This one may still hold another test's.)"""
    names = Path(f"/proc/{pid}/maps").read_text().splitlines()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    ours = f"{engine.path}/segments/"
    return [name for name in names if ours in name and name.endswith("(deleted)")]


@pytest.mark.sampled
@pytest.mark.parametrize("readonly", [False, True])
def test_g8_another_process_that_read_lets_go_of_what_was_removed(engine, worker, readonly) -> None:
    send(engine, "gone")
    engine.topic("orders")
    other = worker(readonly=readonly)
    assert other.call(read_all, "gone") == [some(0)]
    engine.delete_topic("gone")
    send(engine, "next")
    assert other.call(read_all, "next") == [some(0)]
    other.call(look_around)
    until(lambda: not held(engine, other.pid))


@pytest.mark.sampled
@pytest.mark.parametrize("who", ["itself", "another"])
def test_g8_who_wrote_lets_go_of_what_was_removed(engine, topic, worker, who) -> None:
    send(engine, "t")
    engine.delete_topic("t") if who == "itself" else worker().call(delete, "t")
    look_around(State(engine, topic))
    until(lambda: not held(engine, os.getpid()))


@pytest.mark.long
def test_g8_a_deletion_that_death_cut_short_is_ended_by_the_next_opening(path) -> None:
    """The topic is marked as deleted; the process dies before its entries are removed."""
    finish(
        """
        import os, sys
        import exclusivelog as xl
        from exclusivelog.local import catalog
        from tests.storage.test_segments import send
        engine = xl.open(sys.argv[1])
        send(engine, "t")
        catalog.delete_pending = lambda ledger: os._exit(0)
        engine.delete_topic("t")
        """,
        path,
    )
    with xl.open(path) as engine:
        assert engine.topics() == []
        assert sizes(engine) == ({}, 0)


@pytest.fixture(params=[False, True], ids=["kept", "gone"])
def vanishing(topic, worker, monkeypatch, path, request) -> bool:
    """Another process deletes the topic just when a reader, in its transaction, looks for the
    first entry's bytes. The file stays for that reader, unless somebody removes it. Is it gone?"""
    with topic.producer() as producer:
        for number in range(10):
            producer.send(some(number))
    other, load = worker(), Segments.load

    def vanish(self: Segments, row: bytes) -> bytes | memoryview:
        monkeypatch.setattr(Segments, "load", load)
        other.call(delete)
        for file in (Path(path) / "segments").iterdir() if request.param else ():
            file.unlink()
        return load(self, row)

    monkeypatch.setattr(Segments, "load", vanish)
    return request.param


READS: dict[str, Callable[[xl.Reader], object]] = {
    "iterate": list,
    "read_next": lambda reader: reader.read_next(0),
    "read_batch": lambda reader: reader.read_batch(3),
    "read_arrow": xl.Reader.read_arrow,
    "seek": lambda reader: reader.seek(dt.datetime.now(dt.UTC)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("how", READS)
def test_g8_a_reader_whose_topic_is_deleted_meets_no_damage(topic, vanishing, how) -> None:
    reader = topic.reader()
    if vanishing or how == "iterate":  # which goes on in a second snapshot
        with pytest.raises(xl.TopicNotFoundError):
            READS[how](reader)
    else:
        READS[how](reader)


@pytest.mark.long
def test_g8_verify_takes_no_topic_that_is_deleted_meanwhile_for_damage(engine, vanishing) -> None:
    assert engine.verify().problems == ()


# ---- G3: what never committed does not count ---------------------------------------------


def test_g3_an_aborted_large_entry_leaves_nothing_that_counts(engine, topic, path) -> None:
    with topic.producer() as producer:
        for number in range(3):
            before = engine.stats()["large_bytes"], known(engine)
            abort(engine, topic)
            assert (engine.stats()["large_bytes"], known(engine)) == before
            assert producer.send(some(number)) == number
    assert values(topic) == [some(0), some(1), some(2)]
    assert 3 * LARGE < known(engine)[1] < 3 * LARGE + 1000  # as if nothing had been
    engine.delete_topic("orders")
    assert sizes(engine) == ({}, 0)


def test_h2_an_aborted_transaction_gives_back_every_segment_it_filled(
    engine, topic, path, monkeypatch
) -> None:
    """A batch that runs out of room may have filled one segment and begun others."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 3 * LARGE)
    send(engine, "t", LARGE)
    (before,) = files(path).values()
    with contextlib.suppress(KeyError), engine.ledger.write_exclusive() as inside:
        for number in range(8):
            inside.entries.put(topic.id, number, some(number))
        assert len(files(path)) == 3
        raise KeyError
    assert sum(files(path).values()) == before
    send(engine, "t", *[LARGE] * 6)
    assert engine.verify().ok
    assert files(path) == known(engine)


def test_g3_an_aborted_first_entry_and_another_process_that_opens(engine, topic, path) -> None:
    """The other one removes the file, to which no row refers; the next batch gets the
    same segment's number, and must not go into the file that is gone."""
    abort(engine, topic)
    finish("import sys, exclusivelog as xl\nxl.open(sys.argv[1]).close()", path)
    with topic.producer() as producer:
        assert producer.send(some(1)) == 0
    assert values(topic) == [some(1)]
    assert list(files(path)) == list(known(engine))


def test_b3_a_fenced_producers_large_batches_take_no_room(engine, topic, worker) -> None:
    loser = topic.producer("exclusive")
    worker().call(open_producer, "exclusive_with_fencing")
    for call in (lambda: loser.send(some(1)), lambda: loser.send_many([some(1)] * 3)):
        with pytest.raises(xl.ProducerFencedError):
            call()
    assert sizes(engine) == ({}, 0)


# ---- H2: faults of the system ------------------------------------------------------------


def test_h2_writes_that_come_short_are_continued(engine, topic, monkeypatch) -> None:
    real, dice = os.pwrite, random.Random(3)
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: real(fd, data[: dice.randrange(1, 9999)], at)
    )
    with topic.producer() as producer:
        producer.send(some(1))
        producer.send_many(batch(2))
    assert values(topic) == [some(1), *batch(2)]
    assert engine.verify().ok


FAILS = FAILS.replace('b"%d" % n', 'b"%d" % n + bytes(200_000)')
FAILS = FAILS.replace("m.value.decode()", "m.value[:1].decode()")
IN_A_THREAD = f"""
import threading
thread = threading.Thread(target=exec, args=({textwrap.dedent(FAILS)!r}, globals()))
thread.start()
thread.join()
"""


@pytest.mark.sampled
@needs_strace
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize(
    ("call", "when"),
    [("mkdirat", "1"), ("openat", "1"), ("fsync", "1"), ("pwrite64", "1+3"), ("fdatasync", "1+3")],
)
def test_h2_a_call_on_a_segment_that_fails(path, call, when, error) -> None:
    """The directory or file cannot be made, written or flushed. What was acknowledged is there
    once; without room the same engine goes on, after an I/O error the next one."""
    target = os.path.join(path, "segments")
    if call not in ("mkdirat", "fsync"):
        target += f"/{1:016x}"
    name = os.path.basename(target)  # as it stands behind the descriptor of a directory
    with child(IN_A_THREAD, path) as process:
        line(process)
        with injecting(process.pid, f"{call}:error={error}:when={when}", target, name):
            tell(process)
            failed = eval(line(process))
        tell(process)
        assert line(process) == f"{[str(n) for n in range(9)]} True"
    assert set(failed) == {"LedgerFullError" if error == "ENOSPC" else "LedgerIOError"}
    with xl.open(path) as engine:
        assert files(path) == known(engine)


@pytest.mark.usual_journal
def test_h2_a_disk_full_of_large_entries(tmp_path) -> None:
    with disk(tmp_path / "disk", 15) as where, xl.open(where / "log") as engine:
        ballast = leave(where, 3 << 20)
        producer = engine.topic("t").producer("exclusive")
        count, error = fill(producer, LARGE)
        check_full(error)
        assert count > 3
        check_full(producer.send_async(some(1)).exception(PATIENCE))
        with pytest.raises(xl.LedgerFullError):
            producer.send_many([some(1)] * 20)
        at = engine.topic("t").next_offset
        assert [int(value[:6]) for value in values(engine.topic("t"))][:count] == [*range(count)]
        ballast.unlink()
        assert producer.send(some(777)) == at
        assert engine.verify().ok


@pytest.mark.usual_journal
def test_h2_a_large_batch_without_room_keeps_no_small_message_out(tmp_path) -> None:
    """Half of it was written when the room ran out: that half must not keep the room."""
    with disk(tmp_path / "disk", 13) as where, xl.open(where / "log") as engine:
        with engine.topic("t").producer(max_batch_bytes=1 << 26) as producer:
            producer.send(b"small")
            with pytest.raises(xl.LedgerFullError):
                producer.send_many([some(1)] * 30)
            assert producer.send(b"small") == 1


def test_h1_the_directorys_own_name_is_flushed_in_the_end(engine, path, monkeypatch) -> None:
    """The first attempt makes the directory and cannot flush its name: the second must do it,
    or a power cut takes all segments with it."""
    real, done = files_module.Directory.sync, []

    def sync(directory: files_module.Directory) -> None:
        if not done:
            done.append("failed")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(directory)
        done.append(directory.path)

    monkeypatch.setattr(files_module.Directory, "sync", sync)
    with pytest.raises(xl.LedgerFullError):
        send(engine, "t")
    send(engine, "t")
    assert {path, os.path.join(path, "segments")} <= set(done)


def test_h2_a_segment_that_cannot_be_removed(engine, path, monkeypatch) -> None:
    """The deletion is durable; that the file stays for the next sweep is no stray OSError."""
    send(engine, "t")

    def unlink(*args: Any, **options: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch, contextlib.suppress(xl.LedgerError):
        patch.setattr(os, "unlink", unlink)
        engine.delete_topic("t")
    assert engine.topics() == []
    engine.close()
    with xl.open(path) as again:
        assert sizes(again) == ({}, 0)


def test_h2_no_file_descriptor_left_to_map_a_segment(engine) -> None:
    """A read raises an error; the engine works again once some are closed."""
    send(engine, "t")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(xl.LedgerError):
            values(engine.topic("t"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert values(engine.topic("t")) == [some(0)]


@pytest.mark.parametrize("name", ["README-dontmove!", "0x00000000000001"])
def test_h2_a_strange_file_beside_the_segments_does_no_harm(path, name) -> None:
    with xl.open(path) as engine:
        send(engine, "t")
    (Path(path) / "segments" / name).write_bytes(b"somebody's")
    with xl.open(path) as engine:
        assert values(engine.topic("t")) == [some(0)]
        engine.backup(f"{path}-copy")


# ---- G3, H1: death -----------------------------------------------------------------------


def die_writing(path: str, begin: Callable[[], None], say: Callable[[str], None]) -> None:
    """In a thread: strace counts the calls of each one, and the main thread leads no commits."""
    segments.SEGMENT_BYTES = 300_000

    def run() -> None:
        with xl.open(path) as engine, engine.topic("t").producer() as producer:
            for number in range(4):
                if number == 2:
                    engine.delete_topic("old")
                    say("deleted\n")
                producer.send_many(batch(number))
                say(f"{number}\n")

    begin()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.fixture
def victims() -> Iterator[ForkServer]:
    with fork_server("tests.storage.test_segments:die_writing") as victims:
        yield victims


SWEPT = ("pwrite64", "pwritev", "fsync", "fdatasync", "mkdirat", "unlinkat", "ftruncate")


@pytest.mark.long
@pytest.mark.once
@needs_strace
def test_g3_dying_at_every_system_call_that_changes_a_segment(tmp_path, sweep, victims) -> None:
    """Large batches, a deletion that removes a segment, and large batches again; death strikes
    at the first, the second, the third ... call of each kind: at 10 of them, unless
    --every-crash."""
    original = tmp_path / "original"
    with xl.open(original) as engine:
        send(engine, "old", 2 * LARGE)

    def traced(name: str, *options: str) -> tuple[Path, int, list[str]]:
        path = tmp_path / name
        shutil.copytree(original, path)
        status, said = victims.run(path, strace=options)
        return path, status, said.split()

    trace = tmp_path / "trace"
    _, _, said = traced("whole", "-o", str(trace), "-e", "trace=" + ",".join(SWEPT))
    assert said == ["0", "1", "deleted", "2", "3"]
    counts = collections.Counter(re.findall(r"^(\d+) +(\w+)\(", trace.read_text(), re.M))
    # Also a thread in the background may remove a segment, once its read has ended.
    at_work = max({by for by, _ in counts}, key=lambda by: counts[by, "pwrite64"])
    points = [
        (call, n + 1) for (by, call), count in counts.items() if by == at_work for n in range(count)
    ]
    assert len(points) > 20
    points = random.Random(7).sample(points, sweep(10, len(points)))

    def die(call: str, when: int) -> None:
        """Where another thread makes one of the calls, this one does not come: then again."""
        inject = f"inject={call}:signal=SIGKILL:when={when}"
        options = ("-o", os.devnull, "-e", f"trace={call}", "-e", inject)
        for attempt in range(10):
            path, status, said = traced(f"{call}-{when}-{attempt}", *options)
            whole_after(path, said)
            if status == -signal.SIGKILL:
                return
            assert status == 0
        raise AssertionError(f"{call} {when} never came")

    for call, when in points:
        die(call, when)


def whole_after(path: Path, said: list[str]) -> None:
    with xl.open(path) as engine:
        assert set(files(path)) == set(known(engine))
        found = values(engine.topic("t"))
        count = len(found) // 4
        assert found == [value for number in range(count) for value in batch(number)]
        assert count >= sum(word.isdigit() for word in said)
        assert "deleted" not in said or engine.topics() == ["t"]
        if "old" in engine.topics():
            assert values(engine.topic("old")) == [some(0, 2 * LARGE)]
            engine.delete_topic("old")
        assert engine.verify().ok
        with engine.topic("t").producer("exclusive", timeout=PATIENCE) as producer:
            assert producer.send_many(batch(9)) == range(4 * count, 4 * count + 4)
        assert values(engine.topic("t")) == found + batch(9)
        engine.delete_topic("t")
        assert sizes(engine) == ({}, 0)


# ---- G9: damage --------------------------------------------------------------------------


@pytest.fixture
def damage(engine, topic) -> Damage:
    """Five large entries, [0, 4), [4, 8) ... [16, 20), and another topic in the same segment."""
    with topic.producer() as producer:
        for number in range(5):
            producer.send_many(batch(number))
    send(engine, "other")
    return Damage(engine, topic)


def pointing(**changes: int) -> Callable[[bytes], bytes]:
    def change(row: bytes) -> bytes:
        _, segment, position, length = REFERENCE.unpack(row)
        fields = {"segment": segment, "position": position, "length": length, **changes}
        return REFERENCE.pack(REFERENCE_MAGIC, *fields.values())

    return change


ROWS: dict[str, Callable[[bytes], bytes]] = {
    "no such segment": pointing(segment=77),
    "segment 0": pointing(segment=0),
    "past the end": pointing(position=1 << 40),
    "far past the end": pointing(position=2**64 - 1),
    "too long": pointing(length=1 << 30),
    "far too long": pointing(length=2**64 - 1),
    "all of it": pointing(position=0, length=1_150_000),
    "nothing": pointing(length=0),
    "too short": pointing(length=1000),
    "another entry": pointing(position=0),
    "cut off": lambda row: row[:-1],
    "another kind": lambda row: b"\0" + row[1:],
    "noise": lambda row: row[:8] + row[:24],
}


def check_named(engine: xl.Engine, topic: xl.Topic) -> None:
    """The entry [8, 12) is damaged, and nothing else is."""
    for call in (lambda: list(topic.reader(8)), lambda: topic.reader(10).read_arrow()):
        assert (caught(call).topic, caught(call).offsets) == ("orders", range(8, 12))
    seen, lost = step_over(topic)
    assert lost == set(range(8, 12))
    expected = {n: some(n, LARGE // 4) for n in range(20) if n not in lost}
    assert {offset: value for offset, (value, _, _) in seen.items()} == expected
    (problem,) = engine.verify().problems
    assert "orders" in problem
    assert "8 to 11" in problem
    assert values(engine.topic("other")) == [some(0)]


@pytest.mark.parametrize("kind", ROWS)
def test_g9_a_reference_to_the_wrong_place_is_named(engine, topic, damage, kind) -> None:
    last, row = damage.entries()[2]
    damage.put(last, ROWS[kind](row))
    check_named(engine, topic)
    with topic.producer() as producer:
        assert producer.send(some(3)) == 20
    engine.delete_topic("orders")  # the damage must not spread
    assert values(engine.topic("other")) == [some(0)]
    assert engine.verify().ok


@pytest.mark.parametrize("at", [0, 8, -8, -70, -100])
def test_g9_a_flipped_bit_in_a_segment_is_named(engine, topic, damage, path, at) -> None:
    _, _, position, length = REFERENCE.unpack(damage.entries()[2][1])
    with only(path).open("r+b", buffering=0) as file:
        file.seek(position + at % length)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    check_named(engine, topic)


@pytest.mark.every
@pytest.mark.parametrize("reopened", [False, True], ids=["open", "reopened"])
@pytest.mark.parametrize(
    "told", [(64, 3), (2 * LARGE, 1), (3 * LARGE, 0), (4 * LARGE, 9), (), None]
)
def test_g9_a_row_that_tells_less_than_a_segment_has_loses_nothing(path, told, reopened) -> None:
    """A flipped bit of such a row decodes. What lies behind the end that it tells is neither
    overwritten nor cut off, and the file stays as long as it has an entry that lives; also when the
    row is damaged altogether, or lost."""
    with xl.open(path) as engine:
        for name in ("a", "b", "c"):
            send(engine, name)
        with engine.ledger.write_exclusive() as inside:
            if told is None:
                inside.rows.delete("segments", U64.pack(1))
            else:
                inside.rows.put("segments", U64.pack(1), b"".join(map(U64.pack, told)))
        assert "segments" in engine.verify().problems[-1]
        if not reopened:
            send(engine, "d")
    with xl.open(path) as engine:
        if reopened:
            send(engine, "d")
        engine.delete_topic("a")
        engine.backend.retention_worker.go_round()
    with xl.open(path) as engine:
        for name in ("b", "c", "d"):
            assert values(engine.topic(name)) == [some(0)]
        assert engine.verify().ok
        for name in ("b", "c"):
            engine.delete_topic(name)
        assert values(engine.topic("d")) == [some(0)]
        engine.delete_topic("d")
        assert sizes(engine) == ({}, 0)


@pytest.mark.every
@pytest.mark.parametrize("row", [b"large", b"dead" + U64.pack(1)])
def test_g9_a_damaged_count_of_large_entries_is_made_anew(path, row) -> None:
    with xl.open(path) as engine:
        for name in ("a", "b"):
            send(engine, name)
        with engine.ledger.write_exclusive() as inside:
            assert inside.rows.get("meta", row) is not None
            inside.rows.put("meta", row, b"\xc1")
    with xl.open(path) as engine:
        send(engine, "c")
        engine.delete_topic("a")
        engine.backend.retention_worker.go_round()
        assert engine.verify().ok
        assert engine.stats()["large_bytes"] == sum(files(path).values())
        for name in ("b", "c"):
            assert values(engine.topic(name)) == [some(0)]
            engine.delete_topic(name)
        assert sizes(engine) == ({}, 0)


CUTS = """
    import os, sys
    import exclusivelog as xl
    from exclusivelog.local.storage.segments import REFERENCE
    from tests.log.test_damage import Damage, step_over
    from tests.storage.test_segments import LARGE, batch, only, some
    path = sys.argv[1]
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        for number in range(5):
            producer.send_many(batch(number))
        rows = [row for _, row in Damage(engine, engine.topic("orders")).entries()]
    ends = [position + length for _, _, position, length in map(REFERENCE.unpack, rows)]
    sound, file = only(path).read_bytes(), only(path)
    for size in [None, 0, 1, 4096, ends[0] - 1, ends[0], ends[2] + 70_000, ends[4] - 1]:
        for mapped in (False, True):
            file.write_bytes(sound)
            with xl.open(path) as engine:
                topic = engine.topic("orders")
                if mapped:
                    topic.reader(16).read_next(0)
                if size is not None:
                    os.truncate(file, size)
                elif not mapped:
                    file.unlink()
                else:
                    continue
                whole = 4 * sum(end <= (size or 0) for end in ends)
                seen, lost = step_over(topic)
                assert lost == set(range(whole, 20)), (size, mapped, lost)
                assert {n: value for n, (value, _, _) in seen.items()} == {
                    n: some(n, LARGE // 4) for n in range(whole)}
                assert len(engine.verify().problems) == 5 - whole // 4
    for harm in (file.unlink, lambda: os.truncate(file, 5000)):     # the next one goes on
        file.write_bytes(sound)
        harm()
        with xl.open(path) as engine, engine.topic("orders").producer() as producer:
            at = producer.send_many(batch(9)).start
            assert [m.value for m in engine.topic("orders").reader(at)] == batch(9)
            assert set(range(20)) <= step_over(engine.topic("orders"))[1]
"""


@pytest.mark.long
def test_g9_a_segment_that_is_cut_off_empty_or_missing_is_named(path) -> None:
    """Before it was mapped and after; in a process of its own, which a SIGBUS would end."""
    finish(CUTS, path)


# ---- backup ------------------------------------------------------------------------------


def test_h2_a_backup_has_all_segments_and_needs_nothing_else(path, monkeypatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 2 * LARGE)
    with xl.open(path) as engine:
        send(engine, "t", *[LARGE] * 9)
        send(engine, "gone")
        engine.delete_topic("gone")
        abort(engine, engine.topic("t"))
        engine.backup(f"{path}-copy")
        expected = known(engine)
    shutil.rmtree(path)
    with xl.open(f"{path}-copy") as engine:
        assert sizes(engine) == (expected, sum(expected.values()))
        assert engine.topics() == ["t"]
        assert values(engine.topic("t")) == [some(n) for n in range(9)]
        assert engine.verify().ok
        send(engine, "t")
        assert values(engine.topic("t"))[9:] == [some(0)]
        engine.delete_topic("t")
        assert sizes(engine) == ({}, 0)


def test_h2_backups_while_large_batches_come_and_topics_go(engine, topic, path) -> None:
    stop = threading.Event()

    def write() -> None:
        with topic.producer() as producer:
            for number in range(10_000):
                producer.send_many(batch(number % 50))
                if number % 5 == 0:
                    send(engine, "other")
                    engine.delete_topic("other")
                if stop.wait(0.005):
                    return

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            until(lambda: topic.next_offset > 8)
            for number in range(4):
                least = topic.next_offset
                engine.backup(f"{path}-{number}")
                with xl.open(f"{path}-{number}") as copy:
                    found = values(copy.topic("orders"))
                    assert len(found) >= least
                    assert found == [some(n % 200, LARGE // 4) for n in range(len(found))]
                    assert copy.verify().ok
        finally:
            stop.set()
        writing.result(PATIENCE)


@pytest.mark.parametrize("how", ["cut off", "missing"])
def test_h2_a_backup_of_a_damaged_segment_says_so(engine, damage, path, how) -> None:
    os.truncate(only(path), 1000) if how == "cut off" else only(path).unlink()
    with pytest.raises(xl.LedgerCorruptedError):
        engine.backup(f"{path}-copy")
