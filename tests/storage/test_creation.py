"""The first and the last moment of a ledger's life: it is made while processes die or compete,
and found again after a copy, a power cut or a removal of its lock file (rule H2)."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import random
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.local import files
from exclusivelog.local.shm import lockfile, slots
from exclusivelog.local.storage import environment
from testing.children import ROOT, child, command, line, tell
from testing.disks import needs_strace
from testing.processes import PATIENCE, open_producer, send, values

pytestmark = pytest.mark.once

# ---- H2: dying while a ledger is made ----------------------------------------------------

MAKES = """
    import os, sys
    import exclusivelog as xl
    for path in sys.stdin:
        with xl.open(path.strip()) as engine:
            producer = engine.topic("t").producer()
            for n in range(3):
                os.write(1, b"%d\\n" % producer.send(b"%d" % n))
            producer.send_many([b"3", b"4", b"5"])
            os.write(1, b"5\\n")
"""


def works_after(path: Path, acknowledged: int) -> None:
    """The ledger opens, holds what was acknowledged, and a batch only whole; it can be written."""
    with xl.open(path) as engine:
        topic = engine.topic("t")
        found = values(topic)
        assert found == [b"%d" % n for n in range(len(found))]
        assert acknowledged < len(found) <= 6
        assert len(found) in (0, 1, 2, 3, 6)
        assert engine.verify().ok
        with topic.producer("exclusive", timeout=PATIENCE) as producer:
            assert producer.send(b"next") == len(found)


def test_a_new_journal_is_written_in_small_pieces(path, monkeypatch) -> None:
    """ext4 keeps what one call has written as one folio, and a flush goes through all of it."""
    written, write = [], os.pwrite

    def pwrite(fd, data, at):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{os.path.realpath(path)}/journal"):
            written.append((at, len(data)))
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    xl.open(path).close()
    size = os.stat(f"{path}/journal").st_size
    assert {byte for at, n in written for byte in range(at, at + n, 4096)} >= set(
        range(0, size, 4096)
    )
    assert max(n for _, n in written) <= 16 << 10


@pytest.mark.long
def test_h2_dying_at_random_moments_of_creation(tmp_path, sweep) -> None:
    """A process is killed while it makes a new ledger; afterwards it can be opened all the
    same. One process makes them one after another, so that the moment is well spread."""
    dice, moments = random.Random(8), collections.Counter()
    for number in itertools.count():
        if number >= sweep(15, 30) and moments["complete"] < number:
            break
        path = tmp_path / str(number)
        with child(MAKES) as process:
            tell(process, str(tmp_path / f"warm-{number}"))
            for _ in range(4):
                line(process)
            tell(process, str(path))
            time.sleep(dice.random() * 0.012)
            process.kill()
            process.wait(PATIENCE)
            said = process.stdout.read().split()
        acknowledged = max((int(n) for n in said if n.isdigit()), default=-1)
        made = (path / "data.mdb").exists()
        moments["complete" if acknowledged == 5 else "made" if made else "begun"] += 1
        works_after(path, acknowledged)


SWEPT = """
    write writev pwrite64 pwritev fsync fdatasync msync rename renameat renameat2 link linkat unlink
    unlinkat mkdir mkdirat rmdir fallocate ftruncate flock
""".split()


@pytest.mark.long
@needs_strace
def test_h2_dying_at_every_system_call_of_creation(tmp_path, sweep) -> None:
    """Death strikes at the first, the second, the third ... call of each kind that changes a
    file, from the first mkdir to the release of the last session: at 25 of them, unless
    --every-crash."""

    def traced(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["strace", "-f", "--seccomp-bpf", *options, *command(MAKES)],
            input=f"{path}\n",
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            cwd=ROOT,
        )

    trace = tmp_path / "trace"
    assert traced(tmp_path / "whole", "-o", str(trace), "-e", ",".join(SWEPT)).returncode == 0
    calls = collections.Counter(re.findall(r"^\d+ +(\w+)\(", trace.read_text(), re.M))
    assert calls["fdatasync"] >= 4
    assert calls["rename"] + calls["renameat"] + calls["renameat2"] >= 2

    def die(call: str, when: int) -> tuple[Path, int]:
        path = tmp_path / f"{call}-{when}"
        inject = f"inject={call}:signal=SIGKILL:when={when}"
        done = traced(path, "-o", os.devnull, "-e", f"trace={call}", "-e", inject)
        return path, max((int(n) for n in done.stdout.split()), default=-1)

    points = [(call, when) for call, count in calls.items() for when in range(1, count + 1)]
    assert len(points) > 25
    points = random.Random(7).sample(points, sweep(25, len(points)))
    with ThreadPoolExecutor(2) as pool:
        for path, acknowledged in pool.map(lambda point: die(*point), points):
            works_after(path, acknowledged)


@pytest.mark.long
def test_h2_several_processes_make_the_same_ledger(tmp_path) -> None:
    """Four processes open a ledger that is not there yet, at the same moment, ten times. They
    get the same one, and nothing that any of them sends is lost."""
    source = """
        import os, sys
        import exclusivelog as xl
        print("ready", flush=True)
        for path in sys.stdin:
            with xl.open(path.strip()) as engine:
                with engine.topic("t").producer() as producer:
                    for _ in range(5):
                        producer.send(b"%d" % os.getpid())
                print(engine.ledger.uuid, flush=True)
    """
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(child(source)) for _ in range(4)]
        for process in processes:
            line(process)
        for number in range(10):
            path = tmp_path / str(number)
            for process in processes:
                tell(process, str(path))
            assert len({line(process) for process in processes}) == 1
            with xl.open(path) as engine:
                sent = collections.Counter(values(engine.topic("t")))
                assert engine.verify().ok
            assert sent == {b"%d" % process.pid: 5 for process in processes}
            found = sorted(file.name for file in path.iterdir())
            assert found == ["data.mdb", "journal", "lock.mdb", "owners.lock"]


# ---- H2: another life --------------------------------------------------------------------


def test_h2_a_copy_of_a_directory_in_use_has_no_owner(tmp_path, path, worker) -> None:
    """The lock file is copied with the rest: its words speak of processes that live, but that
    do not have the copy open."""
    other = worker()
    other.call(open_producer, "exclusive")
    other.call(send, b"x")
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", path, copy], check=True, timeout=PATIENCE)
    with xl.open(copy, name="mine") as engine:
        topic = engine.topic("orders")
        assert topic.owner is None
        assert [info.name for info in engine.engines()] == ["mine"]
        assert values(topic) == [b"x"]
        with topic.producer("exclusive") as producer:
            assert producer.topic_epoch == 2
            assert producer.send(b"y") == 1
    assert other.call(send, b"y") == 1
    with xl.open(path) as engine:
        assert engine.topic("orders").owner.pid == other.pid


@pytest.mark.parametrize("rebooted", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_h3_words_of_another_life_are_void(path, worker, rebooted, alone) -> None:
    """The power fails while a process owns a topic: no kernel marks its word. Afterwards the word
    still names a thread; that there is such a thread means nothing, whether it is another boot or
    only the file system that has come back. Who joins others that live believes the words."""
    other = worker()
    other.call(open_producer, "exclusive")
    other.call(send, b"x")
    with xl.open(path) as engine:
        (slot,) = [s for s in range(8) if slot_pid(path, s) == other.pid]
        assert engine.topic("orders").owner.pid == other.pid
    owners = Path(path) / "owners.lock"
    words = bytearray(owners.read_bytes())
    if not alone:
        living = worker()
        words = bytearray(owners.read_bytes())
    other.kill()
    at = slots.SLOTS + slot * slots.SLOT_SIZE
    held = (1).to_bytes(4, "little")  # a process that lives
    if alone:
        words[at : at + 4] = held
        if rebooted:
            words[lockfile.BOOT : lockfile.BOOT + 16] = bytes(range(16))
        owners.write_bytes(words)
        with xl.open(path) as engine:
            topic = engine.topic("orders")
            assert topic.owner is None
            assert [info.pid for info in engine.engines()] == [os.getpid()]
            with topic.producer("exclusive") as producer:
                assert producer.send(b"y") == 1
        return
    with owners.open("r+b") as file:
        if rebooted:
            file.seek(lockfile.BOOT)
            file.write(bytes(range(16)))
        else:  # a process that has mapped the file: else its thread is soon found to be another's
            file.seek(at + slots.PID)
            file.write(living.pid.to_bytes(4, "little"))
            file.seek(at)
            file.write(living.pid.to_bytes(4, "little"))
    if rebooted:
        with pytest.raises(xl.LedgerError, match="another file or boot id"):
            xl.open(path)
    else:
        with xl.open(path) as engine, pytest.raises(xl.ProducerFencedError):
            engine.topic("orders").producer("exclusive")


def slot_pid(path: str, slot: int) -> int:
    with open(Path(path) / "owners.lock", "rb") as file:
        file.seek(slots.SLOTS + slot * slots.SLOT_SIZE + slots.PID)
        return int.from_bytes(file.read(4), "little")


def test_h2_a_lock_file_that_was_removed_is_made_anew(path, worker) -> None:
    """No process has the ledger open; a cleaner has removed what looks like a stale lock."""
    other = worker()
    other.call(open_producer, "exclusive")
    other.call(send, b"x")
    other.kill()
    (Path(path) / "owners.lock").unlink()
    with xl.open(path) as engine, engine.topic("orders").producer("exclusive") as producer:
        assert producer.send(b"y") == 1


def test_c1_a_ledger_that_is_made_while_another_process_opens_it_is_no_stranger(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look finds no ledger; the list of the files, read behind it, has one."""
    xl.open(path).close()
    with contextlib.closing(files.Directory(path)) as directory:
        monkeypatch.setattr(files.Directory, "facts", lambda self, name: None)
        environment.refuse_other_files(directory)
