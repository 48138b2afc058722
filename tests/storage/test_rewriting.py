"""Segments that keep the space of what was trimmed or deleted: rewritten in the background and, on
a full disk, at once; whole after every death (rules G3, G8, H2)."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.local.maintenance import retention, rewriting
from exclusivelog.local.storage import segments
from testing.children import child, line, tell
from testing.disks import disk, leave, needs_strace
from testing.processes import PATIENCE, until, values
from testing.strace import ForkServer, fork_server
from tests.storage.test_segments import LARGE, files, known, sizes, some

SEGMENT = 10 * LARGE
EVERY = 8  # of so many messages, one is of the topic that keeps all


@pytest.fixture(autouse=True)
def small_segments(monkeypatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", SEGMENT)


def fill_mixed(engine: xl.Engine, count: int, start: int = 0, every: int = EVERY) -> None:
    """Messages of "bulk", and now and then one of "rare"."""
    with engine.topic("bulk").producer() as bulk, engine.topic("rare").producer() as rare:
        for number in range(start, start + count):
            (bulk if number % every else rare).send(some(number))


def rare(count: int) -> list[bytes]:
    return [some(number) for number in range(0, count, EVERY)]


def rewrite(engine: xl.Engine) -> None:
    rewriting.rewrite(engine.ledger)


def on_disk(path: str | Path) -> int:
    return sum(files(path).values())


def is_freed(engine: xl.Engine, live: int) -> bool:
    """Is there no more on the disk than that? A read of a thread in the background, which lasts
    longer on a busy machine, may have kept a segment that was rewritten."""
    engine.ledger.remove_unneeded()
    return on_disk(engine.path) <= bound(live)


def bound(live: int) -> int:
    """What docs/operations.md promises, and the alignment of the entries."""
    return 2 * live + 2 * (SEGMENT + LARGE)


@pytest.mark.rule("G8", "H2")
def test_h2_a_lack_of_descriptors_gives_no_segment_up(engine, path, monkeypatch) -> None:
    """What could not be read for a moment is rewritten later."""
    monkeypatch.setattr(rewriting, "SOME_AT_ONCE", 0)
    fill_mixed(engine, 40)
    engine.topic("bulk").trim(engine.topic("bulk").next_offset)

    def no_descriptor(segment: int) -> int:
        raise OSError(errno.EMFILE, "none is left")

    with monkeypatch.context() as patch:
        patch.setattr(engine.ledger.segments, "open", no_descriptor)
        rewrite(engine)
    assert not engine.ledger.segments.stuck
    rewrite(engine)
    until(lambda: is_freed(engine, len(rare(40)) * LARGE))
    assert values(engine.topic("rare")) == rare(40)


@pytest.mark.rule("G8")
@pytest.mark.long
def test_g8_a_rare_topic_keeps_no_others_trimmed_space(engine, path, monkeypatch) -> None:
    """The background frees it, in each round again; a backup has no more than the ledger."""
    monkeypatch.setattr(retention, "ROUND_SECONDS", 0.02)
    monkeypatch.setattr(rewriting, "SOME_AT_ONCE", 0)  # leave it to the background
    for start in range(0, 160, 40):
        fill_mixed(engine, 40, start)
        engine.topic("bulk").trim(engine.topic("bulk").next_offset)
        kept = len(rare(start + 40)) * LARGE
        until(lambda kept=kept: on_disk(path) <= bound(kept))
        assert values(engine.topic("rare")) == rare(start + 40)
    assert engine.verify().ok
    until(lambda: files(path) == known(engine))
    engine.backup(f"{path}-copy")
    assert on_disk(f"{path}-copy") <= bound(20 * LARGE)
    with xl.open(f"{path}-copy", readonly=True) as copy:
        assert copy.verify().ok
        assert values(copy.topic("rare")) == rare(160)


@pytest.mark.rule("G8")
def test_g8_what_is_rewritten_counts_as_before(engine, path) -> None:
    """And the deletion does it, for programs that are over before the background begins."""
    fill_mixed(engine, 40)
    engine.delete_topic("bulk")
    until(lambda: is_freed(engine, 5 * LARGE))
    assert sizes(engine) == (known(engine), sum(known(engine).values()))
    assert values(engine.topic("rare")) == rare(40)
    engine.delete_topic("rare")
    until(lambda: is_freed(engine, 0) and sizes(engine) == ({}, 0))


@pytest.mark.rule("G8")
def test_g8_segments_of_which_most_lives_are_left_alone(engine, path) -> None:
    fill_mixed(engine, 40)
    before = known(engine)
    engine.topic("bulk").trim(5)
    rewrite(engine)
    assert known(engine) == before


@pytest.mark.rule("G8")
def test_g8_a_segment_whose_dead_bytes_nobody_has_counted_is_rewritten(engine, path) -> None:
    """An earlier version has written it."""
    fill_mixed(engine, 40)
    engine.topic("bulk").trim(10)
    with engine.ledger.write_concurrent() as tables:
        for segment in tables.large.survey():
            tables.rows.delete("meta", b"dead" + segment.id.to_bytes(8))
    engine.delete_topic("bulk")
    until(lambda: is_freed(engine, 5 * LARGE))
    assert values(engine.topic("rare")) == rare(40)


@pytest.mark.rule("G9")
def test_g9_a_damaged_entry_stays_and_is_named_and_the_others_move(engine, path) -> None:
    """Its segment stays, too, and is not read again and again."""
    fill_mixed(engine, 40)
    first = sorted(files(path))[0]
    file = Path(path) / "segments" / f"{first:016x}"
    with file.open("r+b") as opened:
        # The footer of message 0, the first one of "rare": its topic.
        with engine.ledger.read() as tables:
            topic = tables.topics.find("rare").id
            _, row = next(iter(tables.entries.stored(topic, 0)))
        _, segment, position, length = segments.REFERENCE.unpack(row)
        assert segment == first
        opened.seek(position + length - 64)
        opened.write(b"\xff" * 8)
    engine.delete_topic("bulk")
    rewrite(engine)
    assert first in files(path)
    assert engine.ledger.segments.stuck == {first}
    rewrite(engine)
    with pytest.raises(xl.LedgerCorruptedError, match="offsets 0 to 0"):
        values(engine.topic("rare"))
    reader = engine.topic("rare").reader(start=1)
    assert [message.value for message in reader] == rare(40)[1:]


# ---- readers -----------------------------------------------------------------------------


@pytest.mark.rule("G8")
def test_g8_a_file_stays_while_a_snapshot_can_refer_to_it(engine, path) -> None:
    """Also for the first time that the snapshot looks into it."""
    fill_mixed(engine, 40)
    before = set(files(path))
    opened, close = threading.Event(), threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        with engine.ledger.read() as tables:
            topic = tables.topics.find("rare").id
            rows = [row for _, row in tables.entries.stored(topic, 0)]
            opened.set()
            close.wait(PATIENCE)
            seen.extend(bytes(tables.entries.load(row)) for row in rows)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        opened.wait(PATIENCE)
        engine.delete_topic("bulk")
        assert set(files(path)) >= before
    finally:
        close.set()
        reading.join()
    assert len(seen) == 5
    engine.ledger.remove_unneeded(PATIENCE)
    assert files(path) == known(engine)


@pytest.mark.rule("G8")
def test_g8_an_opening_leaves_what_a_read_of_another_process_may_use(engine, path) -> None:
    """The process that rewrote has died before it removed the file."""
    fill_mixed(engine, 40)
    with child(HOLDS_A_SNAPSHOT, path) as holder:
        assert line(holder) == "open"
        left = [Path(path) / "segments" / f"{segment:016x}" for segment in files(path)]
        for file in left:
            os.link(file, f"{path}-{file.name}")
        engine.delete_topic("bulk")
        engine.close()
        for file in left:  # as if it had not come to that
            if not file.exists():
                os.link(f"{path}-{file.name}", file)
            os.unlink(f"{path}-{file.name}")
        with xl.open(path) as again:
            assert set(files(path)) >= {int(file.name, 16) for file in left}
            tell(holder)
            assert line(holder) == "5"
            holder.wait(PATIENCE)
            again.ledger.remove_unneeded(PATIENCE)
            assert files(path) == known(again)


HOLDS_A_SNAPSHOT = """
    import sys
    import exclusivelog as xl
    with xl.open(sys.argv[1], readonly=True) as engine:
        with engine.ledger.read() as tables:
            topic = tables.topics.find("rare").id
            rows = [row for _, row in tables.entries.stored(topic, 0)]
            print("open", flush=True)
            sys.stdin.readline()
            print(len([bytes(tables.entries.load(row)) for row in rows]), flush=True)
"""


@pytest.mark.rule("G8")
@pytest.mark.long
@pytest.mark.parametrize("durability", ["power", "process"])
def test_g8_readers_see_every_byte_while_segments_are_rewritten(path, durability) -> None:
    """Readers in threads and in another process, from the beginning, again and again, and what
    they keep of the first round stays as it was."""
    with xl.open(path, durability=durability) as engine:
        fill_mixed(engine, 40)
        kept = list(engine.topic("rare").reader())
        failures: list[BaseException] = []
        done = threading.Event()

        def read() -> None:
            try:
                while not done.is_set():
                    found = values(engine.topic("rare"))
                    assert found == rare(EVERY * len(found))
            except BaseException as error:
                failures.append(error)

        with child(READS_ON, path) as other:
            assert line(other) == "reading"
            threads = [threading.Thread(target=read) for _ in range(2)]
            for thread in threads:
                thread.start()
            for start in range(40, 160, 40):
                fill_mixed(engine, 40, start)
                engine.topic("bulk").trim(engine.topic("bulk").next_offset)
                rewrite(engine)
            done.set()
            for thread in threads:
                thread.join(PATIENCE)
            tell(other)
            assert line(other) == "sound"
        assert not failures
        assert [message.value for message in kept] == rare(40)
        assert values(engine.topic("rare")) == rare(160)


READS_ON = """
    import random, select, sys
    import exclusivelog as xl
    def some(number, size=200_000):
        return b"%06d" % number + random.Random(number).randbytes(size - 6)
    with xl.open(sys.argv[1], readonly=True) as engine:
        print("reading", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            found = [message.value for message in engine.topic("rare").reader()]
            assert found == [some(8 * n) for n in range(len(found))], len(found)
        assert engine.verify().ok
        print("sound", flush=True)
"""


# ---- a full disk -------------------------------------------------------------------------


@pytest.mark.rule("H2")
@pytest.mark.long
@pytest.mark.usual_journal
@pytest.mark.parametrize("how", ["deletion", "trim"])
@pytest.mark.parametrize("left", [0, 1 << 19], ids=["no room", "half a MiB"])
def test_h2_on_a_full_disk_a_deletion_frees_what_others_shared(
    tmp_path, monkeypatch, how, left
) -> None:
    """Also where the disk has no byte left: the reserve is for that."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 256 << 20)
    with disk(tmp_path / "disk", 60) as where, xl.open(where / "log") as engine:
        path, count = where / "log", 0
        with contextlib.suppress(xl.LedgerFullError):
            while True:
                fill_mixed(engine, EVERY, count)
                count += EVERY
        (where / "ballast").unlink(missing_ok=True)
        leave(where, left)
        before = on_disk(path)
        assert before > 30 << 20
        if how == "deletion":
            engine.delete_topic("bulk")
        else:
            engine.topic("bulk").trim(engine.topic("bulk").next_offset)
        free = os.statvfs(where).f_bavail * os.statvfs(where).f_frsize
        assert free > before * 3 // 4
        found = values(engine.topic("rare"))
        assert found == rare(EVERY * len(found))
        assert len(found) >= count // EVERY
        assert engine.verify().ok
        fill_mixed(engine, EVERY, 100 * EVERY)


@pytest.mark.rule("H2")
@pytest.mark.long
@pytest.mark.usual_journal
@pytest.mark.parametrize("background", [True, False])
def test_h2_rewriting_leaves_room_on_a_disk_that_is_nearly_full(
    tmp_path, monkeypatch, background
) -> None:
    """What lives needs more than is free, and the reserve is spent, or not for the background."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 256 << 20)
    with disk(tmp_path / "disk", 60) as where, xl.open(where / "log") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(segments, "LEAST_SEGMENT_BYTES", 256 << 20)  # as on a larger disk
            fill_mixed(engine, 52, every=2)  # 5.2 MB of "rare", which are moved in two parts
        with monkeypatch.context() as patch:
            patch.setattr(rewriting, "rewrite", lambda *_, **__: None)
            engine.topic("bulk").trim(engine.topic("bulk").next_offset)
        if not background:
            engine.ledger.reserve._spend()
        leave(where, 4300 << 10)  # with 1 MiB of the reserve, it would do
        before = free_on(where)
        if background:
            engine.backend.retention_worker.go_round()
        else:
            rewriting.free_room(engine.ledger)
        assert free_on(where) >= before // 4
        (where / "ballast").unlink()
        assert values(engine.topic("rare")) == [some(number) for number in range(0, 52, 2)]
        assert engine.verify().ok


def free_on(where: Path) -> int:
    facts = os.statvfs(where)
    return facts.f_bavail * facts.f_frsize


@pytest.mark.rule("H2")
def test_h2_a_ledger_at_its_limit_has_room_again_after_a_deletion(path) -> None:
    """The limit is that of all segments together: they are rewritten although it is reached."""
    with xl.open(path, map_size=32 << 20) as engine:
        with pytest.raises(xl.LedgerFullError, match="large entries take"):
            fill_mixed(engine, 1000, every=3)  # several live in each segment
        engine.delete_topic("bulk")
        assert engine.stats()["large_bytes"] < 20 << 20
        fill_mixed(engine, 2 * EVERY, 100 * EVERY)
        assert engine.verify().ok


# ---- death -------------------------------------------------------------------------------


def die_rewriting(path: str, begin: Callable[[], None], say: Callable[[str], None]) -> None:
    """In a thread, as strace counts the calls of each one."""
    segments.SEGMENT_BYTES = SEGMENT
    rewriting.BYTES_AT_ONCE = 2 * LARGE

    def run() -> None:
        with xl.open(path) as engine:
            say("open\n")
            rewriting.rewrite(engine.ledger)
            engine.ledger.remove_unneeded(PATIENCE)  # a thread's read may have kept some
            say("rewritten\n")

    begin()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.fixture
def victims() -> Iterator[ForkServer]:
    with fork_server("tests.storage.test_rewriting:die_rewriting") as victims:
        yield victims


SWEPT = ("pread64", "pwrite64", "pwritev", "fsync", "fdatasync", "unlinkat", "openat")


@pytest.mark.rule("G3", "H1")
@pytest.mark.long
@pytest.mark.once
@needs_strace
@pytest.mark.parametrize("durability", ["power", "process"])
def test_g3_dying_at_every_system_call_of_a_rewriting(tmp_path, sweep, victims, durability) -> None:
    """What lives is there, once; the next opening leaves no file that no row needs."""
    original = tmp_path / "original"
    with xl.open(original, durability=durability) as engine:
        fill_mixed(engine, 40)
        with engine.ledger.write_exclusive() as tables:  # no background takes part
            topic = tables.topics.find("bulk")
            tables.entries.drop(topic.id, 1000, topic.next_offset - 1)
            topic.first_offset = topic.next_offset - 1
            tables.topics.put(topic)

    def traced(name: str, *options: str) -> tuple[Path, int, list[str]]:
        path = tmp_path / name
        shutil.copytree(original, path)
        status, said = victims.run(path, strace=options)
        return path, status, said.split()

    trace = tmp_path / "trace"
    path, _, said = traced("whole", "-o", str(trace), "-e", "trace=" + ",".join(SWEPT))
    assert said == ["open", "rewritten"]
    assert len(files(path)) < len(files(original))
    counts = collections.Counter(re.findall(r"^(\d+) +(\w+)\(", trace.read_text(), re.M))
    # Also a thread in the background may remove a segment, once its read has ended.
    at_work = max({by for by, _ in counts}, key=lambda by: counts[by, "pwrite64"])
    points = [
        (call, n + 1) for (by, call), count in counts.items() if by == at_work for n in range(count)
    ]
    assert len(points) > 20
    died = 0
    for call, when in random.Random(7).sample(points, sweep(12, len(points))):
        inject = f"inject={call}:signal=SIGKILL:when={when}"
        options = ("-o", os.devnull, "-e", f"trace={call}", "-e", inject)
        path, status, _ = traced(f"{call}-{when}", *options)
        died += status == -signal.SIGKILL
        whole_after(path)
        shutil.rmtree(path)
    assert died > sweep(8, len(points) // 2)


def whole_after(path: Path) -> None:
    with xl.open(path) as engine:
        assert values(engine.topic("rare")) == rare(40)
        assert values(engine.topic("bulk")) == [some(39)]
        assert engine.verify().ok
        assert set(files(path)) == set(known(engine))
        rewrite(engine)
        assert values(engine.topic("rare")) == rare(40)
        until(lambda: is_freed(engine, 6 * LARGE))
        engine.delete_topic("rare")
        engine.delete_topic("bulk")
        until(lambda: is_freed(engine, 0) and sizes(engine) == ({}, 0))
