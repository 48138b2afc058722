"""A user with a full disk opens the ledger, reads it, and trims and deletes topics (rule H2)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.blocks import (
    EXTENT,
    FIEMAP,
    FIEMAP_EXTENT_SHARED,
    FS_IOC_FIEMAP,
    shared_ranges,
)
from exclusivelog.local.faults import translated
from exclusivelog.local.files import DATA, FS_IOC_GETFLAGS, FS_NOCOW_FL, keep_in_place
from exclusivelog.local.storage import reserve, usage
from testing.children import child, finish, line, tell
from testing.disks import another_boot, disk, leave, needs_strace
from testing.processes import PATIENCE, until, values
from testing.strace import injecting

FIEMAP_FLAG_SYNC = 1

pytestmark = pytest.mark.usual_journal


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", 44) as where:
        yield where


# Fills the disk, and dies: "p" has sent the numbers up to the one that it prints.
FILLS = """
    import os, pathlib, sys
    import exclusivelog as xl
    from testing.disks import leave
    path, free, durability = sys.argv[1:]
    engine = xl.open(path, durability=durability)
    other = engine.topic("other")
    with other.producer() as producer:
        producer.send_many([bytes(1000)] * 5000)
    topic = engine.topic("t")
    producer = topic.producer("exclusive", name="p")
    producer.send_many([b"%06d" % n + bytes(20_000) for n in range(100)])
    engine.ledger.checkpoint()
    leave(pathlib.Path(path).parent, int(free))
    count = 100
    try:
        while True:
            producer.send(b"%06d" % count + bytes(20_000))
            count += 1
    except xl.LedgerFullError as error:
        print(count, flush=True)
    os.kill(os.getpid(), 9)
"""


def fill(where: Path, free: int = 0, durability: str = "power") -> int:
    """How many numbers were acknowledged before the disk, and the journal, were full."""
    with child(FILLS, where / "log", free, durability) as process:
        said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL, said
    return int(said)


def damage(journal: Path, number: int) -> None:
    """The journal has lost a part of this message."""
    data = journal.read_bytes()
    with journal.open("r+b") as file:
        file.seek(data.index(b"%06d" % number))
        file.write(b"lost")


def numbers(engine: xl.Engine) -> list[int]:
    return [int(value[:6]) for value in values(engine.topic("t"))]


@pytest.mark.long
@pytest.mark.parametrize("free", [0, 4096, 100_000, 1 << 20])
def test_h2_a_ledger_on_a_full_disk_opens_again_and_again(small_disk, free) -> None:
    """The journal is full of messages that the tables have no room for. They stay there."""
    count = fill(small_disk, free)
    assert count > 300
    path = small_disk / "log"
    with xl.open(path, readonly=True) as engine:
        assert numbers(engine) == list(range(count))
    for _ in range(3):
        finish(DIES_OPEN, path)
        with xl.open(path) as engine:
            assert numbers(engine) == list(range(count))
            assert engine.verify().ok
            with (
                pytest.raises(xl.LedgerFullError, match="or trim or delete topics"),
                engine.topic("t").producer("exclusive") as producer,
            ):
                producer.send(bytes(20_000))  # if there was room for the grant
    (small_disk / "ballast").unlink()
    with xl.open(path) as engine:
        with engine.topic("t").producer("exclusive", name="p") as producer:
            producer.send(b"%06d" % count)
        assert numbers(engine) == list(range(count + 1))
        assert engine.verify().ok
        assert engine.topic("t").producer(name="p").last_sequence_id == count


DIES_OPEN = """
    import os, sys
    import exclusivelog as xl
    engine = xl.open(sys.argv[1])
    print("open", flush=True)
    os._exit(0)
"""


# Opens a ledger whose recovery is put off, makes room, goes on sending, fills the disk again, and
# dies.
GOES_ON = """
    import os, pathlib, sys
    import exclusivelog as xl
    from testing.disks import leave
    path, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    engine = xl.open(path)
    (path.parent / "ballast").unlink()
    producer = engine.topic("t").producer("exclusive", name="p")
    leave(path.parent, 0)
    try:
        while True:
            producer.send(b"%06d" % count + bytes(2000))
            count += 1
    except xl.LedgerFullError:
        print(count, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.long
@pytest.mark.rule("H1", "H2")
@pytest.mark.parametrize("rebooted", [False, True])
def test_messages_sent_after_a_recovery_was_put_off_survive_their_process(
    small_disk: Path, rebooted: bool
) -> None:
    """They follow those of an earlier life in the same generation of the journal. A reboot leaves
    no shared memory."""
    path, count = small_disk / "log", fill(small_disk)
    for _ in range(3):
        with child(GOES_ON, path, count) as process:
            said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGKILL, said
        assert int(said) > count
        count = int(said)
        if rebooted:
            another_boot(path)
        with xl.open(path) as engine:
            assert engine.ledger.journal.backlog  # it was put off again
            assert numbers(engine) == list(range(count))
            assert engine.verify().ok


@pytest.mark.sampled
@pytest.mark.parametrize("free", [0, 4096, 100_000])
@pytest.mark.parametrize("how", ["trims", "deletes"])
def test_h2_room_is_made_on_a_full_disk(small_disk, free, how) -> None:
    """Without a byte of the disk. Then sends go on."""
    count = fill(small_disk, free)
    with xl.open(small_disk / "log") as engine:
        other = engine.topic("other")
        if how == "trims":
            assert other.trim(other.next_offset) == 5000
        else:
            engine.delete_topic("other")
            assert "other" not in engine.topics()
        topic = engine.topic("t")
        first = topic.trim(topic.next_offset)
        assert 100 <= first <= count
        (small_disk / "ballast").unlink()
        with topic.producer("exclusive", name="p") as producer:
            producer.send(b"%06d" % count)
        assert numbers(engine) == list(range(first, count + 1))
        assert engine.verify().ok


@pytest.mark.long
def test_h2_a_live_engine_trims_on_a_full_disk(small_disk) -> None:
    """Its tables may have no page left for that, but the room that was kept for it."""
    with xl.open(small_disk / "log") as engine:
        topic = engine.topic("t")
        with topic.producer() as producer:
            producer.send_many([b"%06d" % n + bytes(1000) for n in range(20_000)])
            engine.ledger.checkpoint()
            leave(small_disk, 0)
            number = 20_000
            with contextlib.suppress(xl.LedgerFullError):
                while True:
                    producer.send(b"%06d" % number + bytes(1000))
                    number += 1
            assert topic.trim(20_000) == 20_000
            producer.send(b"%06d" % number)
        assert numbers(engine) == list(range(20_000, number + 1))
        assert engine.verify().ok


def test_h2_room_is_kept_for_a_full_disk(small_disk) -> None:
    """Behind the end of the journal; it goes to the tables, and is kept again when there is
    room."""
    path = small_disk / "log"
    journal, data = path / "journal", path / "data.mdb"

    def kept() -> bool:
        facts = journal.stat()
        return facts.st_blocks * 512 >= facts.st_size + reserve.RESERVED

    def write() -> None:
        with data.open("r+b") as file, translated(str(path)):
            os.posix_fallocate(file.fileno(), data.stat().st_size, reserve.RESERVED // 2)

    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(b"000000")
        assert kept()
        leave(small_disk, 0)
        with pytest.raises(xl.LedgerFullError):
            write()
        engine.ledger.reserve.help(write)
        assert not kept()
        with pytest.raises(xl.LedgerFullError):
            engine.ledger.reserve.help(lambda: [write() for _ in range(9)])
        (small_disk / "ballast").unlink()
        producer.send(b"000001")
        engine.ledger.checkpoint()
        until(kept)
        assert numbers(engine) == [0, 1]


@pytest.mark.once
def test_h2_a_small_disk_is_all_for_messages(tmp_path) -> None:
    with disk(tmp_path / "disk", 16) as where, xl.open(where / "log"):
        facts = (where / "log" / "journal").stat()
        assert facts.st_blocks * 512 < facts.st_size + reserve.RESERVED


def test_h2_remains_behind_messages_that_stay_in_the_journal_are_erased(small_disk) -> None:
    """After a power cut, later frames that were not flushed may have reached the disk without an
    earlier one."""
    path = small_disk / "log"
    count = fill(small_disk, durability="process")
    journal = path / "journal"
    damage(journal, count - 5)
    assert journal.read_bytes().find(b"%06d" % (count - 1)) > 0
    (path / "owners.lock").unlink()
    with xl.open(path) as engine:
        assert numbers(engine) == list(range(count - 5))
    assert journal.read_bytes().find(b"%06d" % (count - 1)) < 0
    (small_disk / "ballast").unlink()
    with xl.open(path) as engine, engine.topic("t").producer(name="p") as producer:
        producer.send(b"%06d" % (count - 5))
        assert numbers(engine) == list(range(count - 4))


def test_h7_a_hole_among_messages_that_stay_in_the_journal(small_disk) -> None:
    """They were flushed: what is behind the damage is read, before and after there is room."""
    path = small_disk / "log"
    count = fill(small_disk)
    damage(path / "journal", count - 5)
    (path / "owners.lock").unlink()
    for full in (True, False):
        if not full:
            (small_disk / "ballast").unlink()
        with xl.open(path) as engine:
            reader = engine.topic("t").reader()
            assert len(reader.read_batch(count)) == count - 5
            with pytest.raises(xl.LedgerCorruptedError) as caught:
                reader.read_next(0)
            assert caught.value.offsets == range(count - 5, count - 4)
            reader.seek(count - 4)
            assert len(reader.read_batch(count)) == 4
            assert not engine.verify().ok


@pytest.mark.long
@pytest.mark.rule("H2")
@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_disk_that_copies_what_is_written_fills_up(tmp_path, kind, copied, durability) -> None:
    """btrfs writes to new blocks, and so do both in a copy that shares its blocks with the
    original. The mapped files of a ledger have blocks of their own that are written in place: a
    full disk is LedgerFullError as on any other, and the same engine goes on when there is room."""
    with disk(tmp_path / "disk", 320, kind) as where:
        path = copyable(where, kind) / "log"
        with xl.open(path) as engine, engine.topic("t").producer() as producer:
            producer.send(b"0")
        if copied:
            path = share_blocks(where, kind) / "log"
        with xl.open(path, durability=durability) as engine:
            with engine.topic("t").producer() as producer:
                sent = [b"0", b"1"]
                producer.send(b"1")
                fill_up(where)
                with contextlib.suppress(xl.LedgerFullError):
                    for _ in range(20):
                        producer.send(bytes(1000))
                        sent.append(bytes(1000))
                (where / "ballast").unlink()
                for _ in range(20):
                    producer.send(b"more")
                    sent.append(b"more")
            assert values(engine.topic("t")) == sent
            assert engine.verify().ok
        fill_up(where)
        for readonly in (True, False):
            with xl.open(path, readonly=readonly) as engine:
                assert values(engine.topic("t")) == sent


# Room is made before the library looks why a commit failed.
CUT_SHORT = """
    import os, pathlib, sys, threading
    import exclusivelog as xl
    from testing.disks import leave
    path, full = sys.argv[1:]

    def checkpoint():
        try:
            engine.ledger.checkpoint()
        except xl.ExclusiveLogError as error:
            print(type(error).__name__, flush=True)
        else:
            print("written", flush=True)

    def work():
        producer.send_many([b"first"] * 100)
        ballast = leave(pathlib.Path(path).parent, 0 if full == "True" else 1 << 20)
        print("ready", flush=True)
        input()
        kind = type(engine.ledger)
        look = kind.translated

        def make_room_and_look(ledger, error):
            ballast.unlink(missing_ok=True)
            return look(ledger, error)

        kind.translated = make_room_and_look
        checkpoint()
        ballast.unlink(missing_ok=True)
        input()
        checkpoint()
        if full == "True":
            producer.send(b"more")
            print(sum(1 for _ in engine.topic("t").reader()), engine.verify().ok, flush=True)
        os._exit(0)

    engine = xl.open(path)
    engine.ledger.checkpointer.start = lambda: None  # its thread would write before this one
    producer = engine.topic("t").producer("exclusive")
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


@needs_strace
@pytest.mark.rule("H2")
@pytest.mark.parametrize("full", [True, False])
def test_a_write_that_a_full_disk_cut_short(small_disk, full) -> None:
    """LMDB reports it as an I/O error. If there is room again before anybody looks, the disk was
    full nevertheless, and the same engine goes on; on a disk with room, the disk has failed."""
    data = small_disk / "log" / DATA
    with child(CUT_SHORT, small_disk / "log", full) as process:
        line(process)
        with injecting(process.pid, "pwrite64,pwritev,writev:retval=100:when=1", str(data)):
            tell(process)
            assert line(process) == ("LedgerFullError" if full else "LedgerIOError")
        tell(process)
        if full:
            assert [line(process), line(process)] == ["written", "101 True"]
        else:
            assert line(process) == "LedgerIOError"


def copyable(where: Path, kind: str) -> Path:
    """A new directory that `share_blocks` copies."""
    path = where / "original"
    if kind == "btrfs":
        subprocess.run(["btrfs", "-q", "subvolume", "create", path], check=True)
    else:
        path.mkdir()
    return path


def share_blocks(where: Path, kind: str) -> Path:
    """Copy that directory, so that both have the same blocks."""
    command = {
        "btrfs": ["btrfs", "-q", "subvolume", "snapshot"],
        "xfs": ["cp", "-a", "--reflink=always"],
    }
    subprocess.run([*command[kind], where / "original", where / "copy"], check=True)
    return where / "copy"


def shared(*files: Path) -> list[str]:
    """Those of the files that share a block with others."""
    found = []
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file)
            if list(shared_ranges(file.fileno(), path.stat().st_size)):
                found.append(path.name)
    return found


@pytest.mark.long
@pytest.mark.rule("H2")
@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_ledger_that_is_copied_while_it_is_in_use_has_blocks_of_its_own_again(
    tmp_path, monkeypatch, kind
) -> None:
    """The next store to the mapped files was a SIGBUS on a full disk, and the ledger failed."""
    with disk(tmp_path / "disk", 320, kind) as where:
        path = copyable(where, kind) / "log"
        with xl.open(path, durability="process") as engine:
            topic = engine.topic("t")
            with topic.producer() as producer:
                producer.send(b"0")
                files = [path / name for name in ("journal", "owners.lock", "lock.mdb")]
                with monkeypatch.context() as patch:  # not before it was seen
                    patch.setattr(usage.Usage, "check_blocks", lambda self: None)
                    share_blocks(where, kind)
                    assert shared(*files)
                until(lambda: not shared(*files))
                sent = [b"0"]
                if kind == "xfs":  # a full btrfs takes seconds for each page that is stored to
                    fill_up(where)
                with contextlib.suppress(xl.LedgerFullError):
                    for _ in range(200):
                        producer.send(bytes(1000))
                        sent.append(bytes(1000))
                (where / "ballast").unlink(missing_ok=True)
                producer.send(b"more")
            assert values(topic) == [*sent, b"more"]
            assert engine.verify().ok
        with xl.open(where / "copy" / "log") as engine:
            assert values(engine.topic("t")) == [b"0"]


# All signals are blocked, and nothing gives the files blocks of their own before the disk is full.
COPIED_AND_FULL = """
    import signal, sys
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    import exclusivelog as xl
    from exclusivelog.local.storage.usage import Usage
    from testing.processes import values

    path, durability = sys.argv[1:]
    Usage.check_blocks = lambda usage: None
    sent = []

    def send(value):
        try:
            producer.send(value)
        except xl.ExclusiveLogError as error:
            return type(error).__name__
        sent.append(value)

    with xl.open(path, durability=durability) as engine:
        topic = engine.topic("t")
        with topic.producer() as producer:
            send(b"first")
            # One in the background would take what is freed for the first store.
            engine.ledger.checkpoint()
            print("open", flush=True)
            input()
            print(next(filter(None, (send(bytes(100_000)) for _ in range(200)))), flush=True)
            print(len(list(topic.reader())), len(sent), flush=True)
            input()
            print(*(send(b"more") for _ in range(20)), flush=True)
        print(values(topic) == sent, engine.verify().ok, flush=True)
"""


@pytest.mark.long
@pytest.mark.rule("H2")
@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_h2_a_disk_that_is_full_right_after_a_copy_of_a_ledger_in_use(
    tmp_path, kind, durability
) -> None:
    """Each store into a mapped file needs new blocks then: it was a SIGBUS, and the engine dead."""
    with disk(tmp_path / "disk", 320, kind) as where:
        path = copyable(where, kind) / "log"
        with child(COPIED_AND_FULL, path, durability) as process:
            assert line(process) == "open"
            share_blocks(where, kind)
            fill_up(where)
            tell(process)
            assert line(process) == "LedgerFullError"
            read, sent = line(process).split()
            assert read == sent
            make_room(where)
            tell(process)
            assert line(process) == " ".join(["None"] * 20)
            assert line(process) == "True True"
            assert process.wait(PATIENCE) == 0


WRITES = """
    import sys
    import exclusivelog as xl
    with xl.open(sys.argv[1]) as engine, engine.topic("t").producer() as producer:
        producer.send(b"1")
        print("sent", flush=True)
        input()
"""


@pytest.mark.long
@pytest.mark.once
@pytest.mark.rule("H2")
@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_h2_a_copy_that_shares_its_blocks_can_be_read_on_a_full_disk(tmp_path, kind) -> None:
    """No lock file takes a store, so the reader does without, until somebody writes."""
    with disk(tmp_path / "disk", 320, kind) as where:
        original = copyable(where, kind) / "log"
        with xl.open(original) as engine, engine.topic("t").producer() as producer:
            producer.send(b"0")
        copy = share_blocks(where, kind) / "log"
        fill_up(where)
        for path in (original, copy):
            with pytest.raises(xl.LedgerFullError):
                xl.open(path)
            with xl.open(path, readonly=True) as engine:
                reader = engine.topic("t").reader()
                assert reader.read_next(0).value == b"0"
                with pytest.raises(xl.WaitTimeoutError):
                    reader.read_next(0.01)
        with xl.open(copy, readonly=True) as engine:
            make_room(where)
            with child(WRITES, copy) as process:
                assert line(process) == "sent"

                def is_refused() -> bool:
                    try:
                        values(engine.topic("t"))
                    except xl.LedgerError as error:
                        return "close this one and open it again" in str(error)
                    return False

                until(is_refused)
                tell(process)
                assert process.wait(PATIENCE) == 0
        with xl.open(copy, readonly=True) as engine:
            assert values(engine.topic("t")) == [b"0", b"1"]


@pytest.mark.long
@pytest.mark.once
@pytest.mark.rule("H2")
def test_h2_a_read_only_snapshot_of_btrfs_can_be_read(tmp_path) -> None:
    """It is no read-only mount, but no file in it can be opened to write: LMDB locks nothing."""
    with disk(tmp_path / "disk", 320, "btrfs") as where:
        path = copyable(where, "btrfs") / "log"
        with xl.open(path) as engine, engine.topic("t").producer() as producer:
            producer.send(b"0")
            snapshot = ["btrfs", "-q", "subvolume", "snapshot", "-r"]
            subprocess.run([*snapshot, where / "original", where / "saved"], check=True)
            producer.send(b"1")
            with xl.open(where / "saved" / "log", readonly=True) as saved:
                assert values(saved.topic("t")) == [b"0"]
                assert saved.verify().ok
        with pytest.raises(xl.LedgerError, match="readonly=True"):
            xl.open(where / "saved" / "log")


@pytest.mark.long
@pytest.mark.rule("H2")
def test_blocks_for_which_there_is_no_room_are_named_once(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(usage, "BLOCKS_SECONDS", 0.0)
    with disk(tmp_path / "disk", 320, "xfs") as where:
        path = copyable(where, "xfs") / "journal"
        with path.open("wb") as file:
            keep_in_place(file.fileno())
            file.write(os.urandom(16 << 20))
        share_blocks(where, "xfs")
        leave(where, 1 << 20)
        with path.open("r+b") as file:
            blocks = usage.BlocksOfFiles(str(path.parent))
            for _ in range(2):
                blocks.check({"journal": (file.fileno(), None)})
            assert [text for text in caplog.messages if "blocks of its own" in text] == [
                f"{path.parent}: the disk has no room to give journal blocks of its own, which it "
                "shares with a copy or a snapshot. If the disk becomes full as well, sends fail, "
                "and perhaps the ledger: make room, or remove the copy"
            ]
            (where / "ballast").unlink()

            def are_own() -> bool:
                blocks.check({"journal": (file.fileno(), None)})
                return not shared(path)

            until(are_own)  # xfs frees the blocks of a removed file later
        assert path.read_bytes() == (where / "copy" / "journal").read_bytes()


@pytest.mark.long
@pytest.mark.rule("H2")
def test_what_lmdb_must_write_to_end_a_transaction_has_blocks_of_its_own(tmp_path) -> None:
    """If that write failed, LMDB would fail for good."""
    with disk(tmp_path / "disk", 320, "xfs") as where:
        xl.open(where / "log").close()
        subprocess.run(["cp", "-a", "--reflink=always", where / "log", where / "copy"], check=True)
        data = where / "copy" / DATA
        assert shares_blocks(data, 8192)
        with xl.open(where / "copy"):
            assert not shares_blocks(data, 8192)


@pytest.mark.long
@pytest.mark.rule("H2")
def test_on_btrfs_the_tables_are_written_in_place(tmp_path) -> None:
    with disk(tmp_path / "disk", 320, "btrfs") as where:
        xl.open(where / "log").close()
        with (where / "log" / DATA).open("rb") as file:
            flags = fcntl.ioctl(file, FS_IOC_GETFLAGS, bytes(8))
        assert int.from_bytes(flags[:4], "little") & FS_NOCOW_FL


def shares_blocks(path: Path, length: int) -> bool:
    """Does another file share a block with the first bytes of this one?"""
    query = FIEMAP.pack(0, length, FIEMAP_FLAG_SYNC, 0, 4, 0) + bytes(4 * EXTENT.size)
    with path.open("rb") as file:
        found = fcntl.ioctl(file, FS_IOC_FIEMAP, query)
    count = FIEMAP.unpack_from(found)[3]
    flags = [EXTENT.unpack_from(found, FIEMAP.size + n * EXTENT.size)[2] for n in range(count)]
    return any(flag & FIEMAP_EXTENT_SHARED for flag in flags)


def fill_up(where: Path) -> None:
    """Take all of the disk, and have everything written, so that each page is stored anew."""
    with (where / "ballast").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
        os.fsync(file.fileno())
    subprocess.run(["sync", "-f", where], check=True)


def make_room(where: Path) -> None:
    """Remove what fills the disk. These file systems free its blocks later."""
    (where / "ballast").unlink()
    subprocess.run(["sync", "-f", where], check=True)
    until(lambda: os.statvfs(where).f_bavail * os.statvfs(where).f_frsize > 64 << 20)


# ---- programs that block all signals ---------------------------------------------------------

# Holes in mapped files, as `fallocate -d` makes them, need blocks that a full disk does not have.
BLOCKS_SIGNALS = """
    import ctypes, faulthandler, os, pathlib, signal, sys, threading
    faulthandler.disable()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    import exclusivelog as xl
    from testing.disks import leave
    path, durability, holes = sys.argv[1:]
    engine = xl.open(path, durability=durability)
    topic = engine.topic("t")
    with topic.producer("exclusive") as producer:
        producer.send(b"first")
    if holes == "holes":
        libc = ctypes.CDLL(None, use_errno=True)
        for name in ("journal", "owners.lock", "lock.mdb"):
            fd = os.open(f"{path}/{name}", os.O_RDWR)
            os.fsync(fd)
            size = os.fstat(fd).st_size
            start = 1 << 20 if name == "journal" else 4096
            punch_hole = 3
            done = libc.fallocate(fd, punch_hole, ctypes.c_long(start), ctypes.c_long(size - start))
            assert done == 0, os.strerror(ctypes.get_errno())
            os.close(fd)
    leave(pathlib.Path(path).parent, 0)
    said = []

    def send():
        try:
            with topic.producer("exclusive", name="p") as producer:
                while True:
                    producer.send(bytes(20_000))
        except xl.LedgerError as error:
            said.append(type(error).__name__)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    print(said[0], flush=True)
    os._exit(0)
"""


@pytest.mark.long
@pytest.mark.rule("H2")
@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("holes", ["none", "holes"])
def test_h2_a_full_disk_does_not_kill_a_program_that_blocks_all_signals(
    small_disk, durability, holes
) -> None:
    """A daemon that takes its signals by sigwait(): the kernel runs no handler of SIGBUS there."""
    with child(BLOCKS_SIGNALS, small_disk / "log", durability, holes) as process:
        said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert said.strip() in (
        {"LedgerFullError"} if holes == "none" else {"LedgerFullError", "LedgerIOError"}
    )


def test_h2_spare_room_that_a_disk_does_not_have_uses_up_no_place(engine: xl.Engine, path) -> None:
    """It is tried again every second, and there are places for as many ledgers as can be open."""
    fd = os.open(path, os.O_TMPFILE | os.O_RDWR)
    try:
        for _ in range(1100):
            with pytest.raises(OSError, match=r"No space|too large"):
                _core.SpareRoom(fd, 1 << 60, [], engine.ledger.journal, [])
        _core.SpareRoom(fd, 4096, [], engine.ledger.journal, []).close()
    finally:
        os.close(fd)
