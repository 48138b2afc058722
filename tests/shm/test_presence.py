"""What is believed of shared memory, and who is alone (rule H3); files that are reached by the
directory's descriptor (C7); stores that cannot reach the disk (H2).

A boot id, a device number and an inode said once whether the words in `owners.lock` were those of
engines that live. A file system that came back under a running kernel made them older than the
journal, and acknowledged messages were lost; another boot id made a newcomer wipe the words of
engines that lived. Now the kernel's locks say who lives. proof/environments has more cases.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.files import (
    Directory,
    above_standard,
    is_locked,
    lock_open_file,
    standard_descriptors_taken,
)
from exclusivelog.local.shm.slots import FILES, Presence
from exclusivelog.local.storage.environment import Reading, parse_readers
from testing.children import ROOT, child, command, finish, line, tell
from testing.journals import no_checkpoints
from testing.processes import PATIENCE, open_producer, send, until, values

pytestmark = pytest.mark.once  # durability changes appends, not who may append

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


# ---- H3: who is alone --------------------------------------------------------------------


def test_h3_only_one_of_two_is_alone_and_only_while_no_other_lives(path) -> None:
    """Two sets of open files, as two processes have them."""
    with xl.open(path):
        pass
    directory = Directory(path)
    one, two, three = (Presence(directory) for _ in range(3))
    try:
        one.enter()
        assert one.alone
        one.admit_others()
        assert not one.alone
        two.enter()
        assert not two.alone
        one.close()
        two.close()
        three.enter()
        assert three.alone
    finally:
        for each in (one, two, three):
            each.close()
        directory.close()


@pytest.mark.parametrize("name", FILES)
def test_h3_one_of_the_files_is_enough_to_be_there(path, name) -> None:
    """The others were replaced under the engine that has it."""
    with xl.open(path):
        pass
    other = os.open(Path(path) / name, os.O_RDWR)
    directory = Directory(path)
    presence = Presence(directory)
    try:
        assert lock_open_file(other, "read")
        presence.enter()
        assert not presence.alone
    finally:
        os.close(other)
        presence.close()
        directory.close()


@pytest.mark.parametrize("how", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_h3_other_programs_locks_of_the_directory_are_no_engines(path, how) -> None:
    """`flock LEDGER program`, as cron jobs have it."""
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(b"x")
    for name in (".", "journal", "data.mdb"):
        fd = os.open(Path(path) / name, os.O_RDONLY)
        try:
            fcntl.flock(fd, how)
            with xl.open(path) as engine:
                assert values(engine.topic("t")) == [b"x"]
                assert [info.pid for info in engine.engines()] == [os.getpid()]
        finally:
            os.close(fd)


def test_h3_a_child_keeps_none_of_its_dead_parents_locks(path, worker) -> None:
    """multiprocessing forks a child of an owner, and the owner is killed: the next process to open
    is alone, also where a backup was put back."""
    source = """
        import os, sys, time
        import exclusivelog as xl
        from testing.patience import PATIENCE
        engine = xl.open(sys.argv[1])
        producer = engine.topic("t").producer("exclusive")
        producer.send(b"x")
        if os.fork() == 0:
            print(os.getpid(), flush=True)  # it has given the locks back: fork has returned
        time.sleep(PATIENCE)
        os._exit(0)
    """
    with child(source, path) as process:
        orphan = int(line(process))
        try:
            process.kill()
            process.wait(PATIENCE)
            directory = Directory(path)
            presence = Presence(directory)
            presence.enter()
            assert presence.alone
            presence.close()
            directory.close()
            with xl.open(path) as engine, engine.topic("t").producer("exclusive") as producer:
                assert producer.send(b"y") == 1
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_h3_words_that_are_older_than_the_journal_are_not_believed(path, tmp_path) -> None:
    """The file system comes back with an older owners.lock: what was acknowledged since is in the
    journal, and nothing says so but its frames."""
    with xl.open(path, durability="power") as engine, no_checkpoints(engine):
        with engine.topic("orders").producer() as producer:
            producer.send(b"0")
            words = (Path(path) / "owners.lock").read_bytes()
            for number in range(1, 50):
                producer.send(b"%d" % number)
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
    owners = copy / "owners.lock"
    facts = owners.stat()
    older = bytearray(words)
    older[8:16] = facts.st_dev.to_bytes(8, "little")
    older[16:24] = facts.st_ino.to_bytes(8, "little")
    owners.write_bytes(older)
    with xl.open(copy, readonly=True) as engine:
        assert values(engine.topic("orders")) == [b"%d" % n for n in range(50)]
    with xl.open(copy) as engine, engine.topic("orders").producer() as producer:
        assert producer.send(b"50") == 50
        assert values(engine.topic("orders")) == [b"%d" % n for n in range(51)]


@pytest.mark.parametrize("keep", [True, False])
def test_h3_a_backup_put_back_over_a_ledger_can_be_written(path, tmp_path, keep) -> None:
    """`cp -a backup/. ledger/`: the lock file is of another generation than the tables. Every send
    span for ever."""
    with xl.open(path) as engine:
        with engine.topic("orders").producer() as producer:
            producer.send_many([b"%d" % n for n in range(20)])
            engine.backup(tmp_path / "backup")
            producer.send_many([b"late"] * 20)
    if not keep:
        for name in ("owners.lock", "lock.mdb"):
            (Path(path) / name).unlink()
    subprocess.run(["cp", "-a", f"{tmp_path}/backup/.", path], check=True, timeout=PATIENCE)
    source = """
        import sys
        import exclusivelog as xl
        with xl.open(sys.argv[1]) as engine, engine.topic("orders").producer() as producer:
            print(producer.send(b"next"))
    """
    assert finish(source, path) == "20\n"
    with xl.open(path) as engine:
        assert values(engine.topic("orders")) == [b"%d" % n for n in range(20)] + [b"next"]
        assert engine.verify().ok


@needs_root
def test_h3_another_boot_id_beside_an_owner_is_an_error_and_wipes_nothing(path, worker) -> None:
    """systemd-nspawn, for one, binds a boot id of its own over the kernel's."""
    owner = worker()
    owner.call(open_producer, "exclusive")
    owner.call(send, b"x")
    source = """
        import sys
        import exclusivelog as xl
        try:
            xl.open(sys.argv[1])
        except xl.LedgerError as error:
            print(error)
    """
    other = Path(path).parent / "boot_id"
    other.write_text("00000000-1111-2222-3333-444444444444\n")
    bind = f'mount --bind {other} /proc/sys/kernel/random/boot_id && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", bind, "sh", *command(source, path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no boot id can be mounted here: {done.stderr.strip()}")
    assert "another file or boot id" in done.stdout
    assert owner.call(send, b"y") == 1
    with xl.open(path) as engine:
        assert engine.topic("orders").owner.pid == owner.pid


def test_h2_a_backup_put_back_under_a_read_only_engine_is_named(path, tmp_path) -> None:
    """The read-only engine keeps LMDB's lock file open, and the restored tables lack the newest
    transaction in it. Other engines once found no tables, and raised that this is not a ledger."""
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send(b"x")
        engine.backup(tmp_path / "backup")
        for number in range(20):
            engine.topic(f"t{number}")
    source = """
        import sys
        import exclusivelog as xl
        with xl.open(sys.argv[1], readonly=True):
            print("open", flush=True)
            input()
    """
    with child(source, path) as reader:
        assert line(reader) == "open"
        subprocess.run(["cp", "-a", f"{tmp_path}/backup/.", path], check=True, timeout=PATIENCE)
        for readonly in (False, True):
            with pytest.raises(xl.LedgerError, match="replaced by an older one"):
                xl.open(path, readonly=readonly)
        tell(reader)
        reader.wait(PATIENCE)
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        assert producer.send(b"y") == 1


@pytest.mark.long
@needs_root
def test_h2_an_engine_whose_process_gave_up_privileges_sends_on(path) -> None:
    """Opened by root, before the daemon becomes a user who may not look into the directory."""
    source = """
        import os, sys, time
        import exclusivelog as xl
        engine = xl.open(sys.argv[1], keepalive=2.0)
        producer = engine.topic("orders").producer("exclusive")
        os.setgid(65534)
        os.setuid(65534)
        for number in range(3):
            print(producer.send(b"x"), flush=True)
            time.sleep(1.1)     # the place is looked at again
        engine.close()
        print("closed", flush=True)
    """
    with child(source, path) as process:
        assert [line(process) for _ in range(4)] == ["0", "1", "2", "closed"]
        assert process.wait(PATIENCE) == 0
    with xl.open(path) as engine:
        assert values(engine.topic("orders")) == [b"x"] * 3


@needs_root
def test_b3_an_overlay_and_its_upper_directory_have_one_owner(tmp_path) -> None:
    """Two file systems show the same files and share no locks: the one that comes second finds out
    that a living thread sleeps on the same memory."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mounted = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, tmp_path / "merged"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no overlay can be mounted here: {mounted.stderr.strip()}")
    try:
        with xl.open(tmp_path / "merged" / "log") as engine:
            producer = engine.topic("t").producer("exclusive")
            producer.send(b"x")
            with pytest.raises(xl.LedgerError, match="through another path"):
                xl.open(tmp_path / "upper" / "log")
            assert producer.send(b"y") == 1
        with xl.open(tmp_path / "upper" / "log") as engine:  # the control: no live engine
            assert values(engine.topic("t")) == [b"x", b"y"]
    finally:
        subprocess.run(["umount", "-l", tmp_path / "merged"], check=True, timeout=PATIENCE)


def test_h3_a_reader_believes_no_words_once_no_engine_lives(path, worker) -> None:
    """A read-only engine opens after the last writer has died: it reads the frames themselves."""
    other = worker()
    other.call(open_producer, "exclusive")
    other.call(send, b"x")
    other.kill()
    with xl.open(path, readonly=True) as engine:
        assert not engine.ledger.journal.ready
        assert values(engine.topic("orders")) == [b"x"]
        with xl_in_a_child(path) as process:  # and those of the next life again
            tell(process, "y")
            assert line(process) == "1"
            until(lambda: engine.ledger.journal.ready)
            assert values(engine.topic("orders")) == [b"x", b"y"]


def xl_in_a_child(path: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return child(
        """
        import sys
        import exclusivelog as xl
        with xl.open(sys.argv[1]) as engine, engine.topic("orders").producer() as producer:
            for word in sys.stdin:
                print(producer.send(word.strip().encode()), flush=True)
        """,
        path,
    )


# ---- C7: the directory goes --------------------------------------------------------------


FATES = {
    "renamed": lambda path: path.rename(path.with_name("elsewhere")),
    "removed": shutil.rmtree,
    "its parent renamed": lambda path: path.parent.rename(path.parent.with_name("other")),
    "its tables replaced": lambda path: (
        shutil.copy(path / "data.mdb", path / "new"),
        (path / "new").rename(path / "data.mdb"),
    ),
    "its lock file removed": lambda path: (path / "owners.lock").unlink(),
    "LMDB's lock file removed": lambda path: (path / "lock.mdb").unlink(),
    "LMDB's lock file replaced": lambda path: (
        shutil.copy(path / "lock.mdb", path / "new"),
        (path / "new").rename(path / "lock.mdb"),
    ),
}


def send_for(seconds: float, producer: xl.Producer) -> None:
    """Not counting the time in which a busy machine does not let this process run."""
    for _ in range(int(seconds / 0.01)):
        producer.send(b"after")
        time.sleep(0.01)


@pytest.mark.parametrize("fate", FATES)
def test_c7_an_owner_whose_directory_goes_is_told_within_a_beat(tmp_path, fate) -> None:
    path = tmp_path / "parent" / "log"
    path.parent.mkdir()
    with xl.open(path, keepalive=2.0) as engine:
        producer = engine.topic("t").producer("exclusive")
        producer.send(b"before")
        FATES[fate](path)
        with pytest.raises(xl.LedgerError, match=str(path)):
            send_for(2.0 / 4 + 4.0, producer)
        with pytest.raises(xl.LedgerError):
            producer.send(b"again")
        with pytest.raises(xl.LedgerError):
            engine.topic("t").reader().read_next(timeout=1)


def test_c7_large_entries_of_a_renamed_ledger_stay_out_of_the_new_one(tmp_path) -> None:
    """The old engine wrote them into the new ledger's segments, over acknowledged ones."""
    path, large = tmp_path / "log", b"x" * 300_000
    with xl.open(path) as old:
        producer = old.topic("t").producer()
        producer.send(b"old" + large)
        path.rename(tmp_path / "log.old")
        with xl.open(path) as new:
            fresh = new.topic("t").producer()
            for number in range(5):
                fresh.send(b"new%d" % number + large)
                with pytest.raises(xl.LedgerError):
                    producer.send(b"bad" + large)
            assert values(new.topic("t")) == [b"new%d" % n + large for n in range(5)]
            assert new.verify().ok
    with xl.open(tmp_path / "log.old") as moved:
        assert values(moved.topic("t")) == [b"old" + large]


def test_c7_a_path_that_is_made_anew_is_another_ledger_in_one_process(path) -> None:
    with xl.open(path) as old:
        old.topic("old")
        for _ in range(5):  # a removed directory's inode may be given to the next one
            shutil.rmtree(path)
            with xl.open(path) as new:
                assert new.topics() == []
                assert new.ledger is not old.ledger


CHANGED_ROOT = """
    import os, sys, time
    import exclusivelog as xl
    root, fate = sys.argv[1:]
    path = root + "/ledgers/log"
    with xl.open(path, keepalive=0.4) as engine:
        producer = engine.topic("t").producer("exclusive")
        outside = os.open(root + "/ledgers", os.O_RDONLY)
        os.chroot(root + "/jail")
        if fate == "renamed":
            os.rename("log", "other", src_dir_fd=outside, dst_dir_fd=outside)
        try:
            end = time.monotonic() + (10 if fate == "renamed" else 2.5)
            while time.monotonic() < end:
                producer.send(b"x")
                time.sleep(0.01)
            engine.topic("t").trim(before=5)
            print("works", flush=True)
        except xl.LedgerError as error:
            print(error, flush=True)
        os._exit(0)
"""


@needs_root
@pytest.mark.parametrize("fate", ["kept", "renamed"])
def test_c7_a_process_that_changes_its_root_goes_on(tmp_path, fate) -> None:
    """The path leads nowhere from there: the directory is asked itself."""
    (tmp_path / "jail").mkdir()
    (tmp_path / "ledgers").mkdir()
    said = finish(CHANGED_ROOT, tmp_path, fate)
    assert ("works" if fate == "kept" else "no longer the ledger") in said


def test_c7_lmdbs_lock_file_is_not_made_anew_beside_a_living_owner(path) -> None:
    """Two of them are two tables of readers, and two locks for one set of pages."""
    with xl_in_a_child(path) as process:
        tell(process, "0")
        assert line(process) == "0"
        (Path(path) / "lock.mdb").unlink()
        for readonly in (False, True):
            with pytest.raises(xl.LedgerError, match=r"lock\.mdb was removed or replaced"):
                xl.open(path, readonly=readonly)
        assert not (Path(path) / "lock.mdb").exists()
    with xl.open(path) as engine:
        assert values(engine.topic("orders")) == [b"0"]


def test_c7_a_waiter_is_told(tmp_path) -> None:
    path = tmp_path / "log"
    with xl.open(path, keepalive=2.0) as engine:
        owner = engine.topic("t").producer("exclusive")
        waiting = engine.topic("t").producer_async("wait_for_exclusive")
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(xl.LedgerError, match="elsewhere"):
            waiting.result(timeout=PATIENCE)
        with pytest.raises(xl.LedgerError):
            owner.send(b"x")


def test_h2_a_program_that_closes_all_descriptors_writes_into_no_other_file(path, tmp_path) -> None:
    """As daemons do: the numbers are other files' from then on."""
    source = """
        import os, sys
        import exclusivelog as xl
        engine = xl.open(sys.argv[1], durability="power")
        producer = engine.topic("orders").producer()
        print(producer.send(b"before"))
        os.closerange(3, 1000)
        files = [os.open(f"{sys.argv[2]}/{n}", os.O_RDWR | os.O_CREAT) for n in range(40)]
        for value in (b"small", b"x" * 300_000):
            try:
                print("sent", producer.send(value))
            except xl.LedgerError as error:
                print(type(error).__name__)
        engine.close()
        print([os.fstat(fd).st_size for fd in files if os.fstat(fd).st_size])
        os._exit(0)
    """
    said = finish(source, path, tmp_path).splitlines()
    assert said == ["0", "LedgerError", "LedgerError", "[]"]
    with xl.open(path) as engine:
        assert values(engine.topic("orders")) == [b"before"]


# ---- H2: descriptors ---------------------------------------------------------------------


def test_h2_no_file_of_ours_has_a_standard_descriptor(path) -> None:
    """A daemon is started with `2>&-`: what C code prints there must not go into a ledger."""
    source = """
        import os, sys
        import exclusivelog as xl
        out = os.dup(1)
        os.dup2(out, 100)
        os.closerange(0, 100)
        with xl.open(sys.argv[1]) as engine:
            producer = engine.topic("t").producer()
            producer.send(b"x")
            producer.send(b"x" * 300_000)
            list(engine.topic("t").reader())
            low = [fd for fd in range(3) if os.path.exists(f"/proc/self/fd/{fd}")]
            os.write(100, repr(low).encode())
        os._exit(0)
    """
    assert finish(source, path) == "[]"


@pytest.mark.long
def test_h2_reading_ones_own_directory_gives_no_lock_away(path) -> None:
    """To close any descriptor of lock.mdb drops LMDB's POSIX locks: the next process to open reset
    its readers and its mutex under those that live."""
    with xl.open(path) as engine:
        producer = engine.topic("orders").producer("exclusive")
        for number in range(3):
            assert producer.send(b"%d" % number) == 2 * number
            shutil.copytree(path, f"{path}-copy-{number}")
            with xl_in_a_child(path) as process:
                with pytest.raises(AssertionError):  # the topic is held: the child ends
                    line(process, PATIENCE)
            producer.close()
            with xl_in_a_child(path) as process:
                tell(process, "child")
                assert line(process) == str(2 * number + 1)
            producer = engine.topic("orders").producer("exclusive")
        assert engine.verify().ok


def test_h2_a_reader_that_copies_its_own_directory_is_not_taken_for_dead(path) -> None:
    """The copy drops LMDB's POSIX lock, which says that a reader's process lives: the next process
    to open freed the reader's place, and then overwrote the pages that it was reading."""
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send(b"0")
        with engine.ledger.environment() as env, engine.ledger.read():
            shutil.copytree(path, f"{path}-copy")
            before = reads_of_this_thread(env)
            with xl_in_a_child(path) as process:
                tell(process, "child")
                assert line(process) == "1"
            assert reads_of_this_thread(env) == before != []


def reads_of_this_thread(env: Any) -> list[Reading]:
    """Those beside it, and in the other process, come and go."""
    here = os.getpid(), threading.get_ident()
    return [each for each in parse_readers(env.readers()) if (each.pid, each.thread) == here]


def test_h2_the_place_of_a_reader_that_has_died_is_freed(path) -> None:
    """The control: a lock that keeps a place must end with the reader's process."""
    source = """
        import shutil, sys
        import exclusivelog as xl
        with xl.open(sys.argv[1]) as engine, engine.ledger.read():
            shutil.copytree(sys.argv[1], sys.argv[1] + "-copy")
            print("reading", flush=True)
            input()
    """
    with xl.open(path) as engine, engine.ledger.environment() as env:
        with child(source, path) as process:
            assert line(process) == "reading"
            assert process.pid in {reading.pid for reading in parse_readers(env.readers())}
            process.kill()
            process.wait(PATIENCE)
        with child("import sys, exclusivelog as xl; xl.open(sys.argv[1]).close()", path) as other:
            assert other.wait(PATIENCE) == 0
        assert {reading.pid for reading in parse_readers(env.readers())} <= {os.getpid()}


def test_h2_descriptors_and_open_file_locks(tmp_path) -> None:
    """The pieces: a lock is seen from another open file, not lost by a close, freed by the last."""
    name = tmp_path / "file"
    name.write_bytes(b"x")
    one, two = (os.open(name, os.O_RDWR) for _ in range(2))
    assert not is_locked(one)
    assert lock_open_file(one, "read")
    os.close(os.open(name, os.O_RDONLY))
    assert is_locked(two)
    assert not lock_open_file(two, "write")
    assert lock_open_file(two, "read")
    os.close(one)
    assert lock_open_file(two, "write")
    os.close(two)
    one = os.open(name, os.O_RDONLY)
    assert above_standard(one) == one
    os.close(one)
    with standard_descriptors_taken():
        for fd in range(3):
            os.fstat(fd)


# ---- H2: a store that cannot reach the disk ----------------------------------------------

STORES = """
    import faulthandler, mmap, os, signal, sys
    from exclusivelog import _core
    if sys.argv[2] == "guarded":
        faulthandler.disable()
    fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8192)
    words = _core.SharedWords(mmap.mmap(fd, 8192), sys.argv[2] == "guarded")
    words.store(0, 7)
    os.ftruncate(fd, 0)                 # the pages are gone: a store is a SIGBUS
    words.store(4096, 5)
    words.store(0, 6)
    print(words.load(4096), words.load(0), words.lost)
"""


def test_h2_a_store_that_cannot_reach_the_file_does_not_kill(tmp_path) -> None:
    assert finish(STORES, tmp_path / "file", "guarded") == "5 6 True\n"
    done = subprocess.run(  # the control
        command(STORES, tmp_path / "file", "not"),
        capture_output=True,
        timeout=PATIENCE,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == -signal.SIGBUS


BLOCKS = """
    import faulthandler, mmap, os, signal, sys, threading
    from exclusivelog import _core
    faulthandler.disable()
    everything = signal.valid_signals()
    if sys.argv[2] == "from the start":     # as programs do that take signals by sigwait()
        signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8192)
    words = _core.SharedWords(mmap.mmap(fd, 8192), True)
    words.store(0, 7)
    if sys.argv[2] == "later":
        signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        for _ in range(64):
            words.load(0)

    def store():
        if sys.argv[2] == "in another thread":
            signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        os.ftruncate(fd, 0)
        words.store(4096, 5)
        if sys.argv[2] == "control":
            import ctypes
            signal.pthread_sigmask(signal.SIG_BLOCK, everything)
            ctypes.memset(at, 1, 1)

    at = None
    if sys.argv[2] == "control":
        import ctypes
        memory = mmap.mmap(fd, 8192)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    thread = threading.Thread(target=store)
    thread.start()
    thread.join()
    print(words.load(4096), words.lost)
"""


@pytest.mark.rule("H2")
@pytest.mark.parametrize("when", ["from the start", "later", "in another thread"])
def test_h2_a_store_that_fails_does_not_kill_a_program_that_blocks_all_signals(tmp_path, when):
    """The kernel runs no handler of SIGBUS where that is blocked."""
    assert finish(BLOCKS, tmp_path / "file", when) == "5 True\n"


def test_h2_a_fault_kills_a_thread_that_blocks_all_signals(tmp_path) -> None:
    """The control: a fault in a mapping of the program's own."""
    done = subprocess.run(
        command(BLOCKS, tmp_path / "file", "control"),
        capture_output=True,
        timeout=PATIENCE,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == -signal.SIGBUS


def test_h2_a_bus_error_that_is_not_ours_still_kills(tmp_path) -> None:
    source = """
        import mmap, os, signal, sys
        from exclusivelog import _core
        words = _core.SharedWords(mmap.mmap(-1, 4096), True)
        fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 4096)
        other = mmap.mmap(fd, 4096)
        os.ftruncate(fd, 0)
        other[0]
    """
    done = subprocess.run(
        command(source, tmp_path / "file"),
        capture_output=True,
        timeout=PATIENCE,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == -signal.SIGBUS


def test_h2_a_file_guard_knows_mappings_of_others(tmp_path) -> None:
    """LMDB maps its files itself: they are known by their inodes. Where two ledgers have files of
    one inode number, on two file systems, both learn of the loss."""
    name = tmp_path / "file"
    with open(name, "w+b") as file:
        file.truncate(8192)
        namesake = _core.FileGuard(os.fstat(file.fileno()).st_ino)
        guard = _core.FileGuard(os.fstat(file.fileno()).st_ino)
        mapped = mmap.mmap(file.fileno(), 8192)
        assert mapped[4096] == 0
        assert not guard.lost
        file.truncate(0)
        assert mapped[4096] == 0
        assert guard.lost
        assert namesake.lost


def test_h2_a_file_is_guarded_beside_those_of_a_hundred_ledgers(tmp_path) -> None:
    """A process may have so many open. A file that is not guarded ends it when it is cut off."""
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(8192)
        others = [_core.FileGuard(number) for number in range(2**40, 2**40 + 1000)]
        guard = _core.FileGuard(os.fstat(file.fileno()).st_ino)
        mapped = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        assert mapped[4096] == 0
        assert guard.lost
        assert not any(other.lost for other in others)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["owners.lock", "journal", "lock.mdb", "data.mdb"])
@pytest.mark.parametrize("durability", ["power", "process"])
def test_h2_a_file_that_is_cut_off_under_an_engine_kills_no_process(path, name, durability) -> None:
    source = """
        import faulthandler, os, sys
        faulthandler.disable()
        import exclusivelog as xl
        engine = xl.open(sys.argv[1], durability=sys.argv[3], keepalive=1.0)
        producer = engine.topic("t").producer()
        for number in range(50):
            producer.send(b"%d" % number)
        os.truncate(f"{sys.argv[1]}/{sys.argv[2]}", 0)
        try:
            for number in range(2000):
                producer.send(b"x" * 1000)
                if number % 50 == 0:
                    engine.topic("other%d" % number)
                    list(engine.topic("t").reader(start=max(0, number - 10)))
        except xl.ExclusiveLogError as error:
            print(type(error).__name__)
        else:
            print("went on")
        engine.close()
    """
    said = finish(source, path, name, durability)
    assert said.split()[0] in ("LedgerIOError", "LedgerError", "LedgerCorruptedError")


def test_c7_a_journal_that_is_cut_off_is_missed(path) -> None:
    with xl.open(path, durability="power", keepalive=2.0) as engine:
        producer = engine.topic("t").producer()
        producer.send(b"x")
        os.truncate(Path(path) / "journal", 0)
        with pytest.raises(xl.LedgerError):
            send_for(2.0 / 4 + 4.0, producer)


def test_h2_a_bus_error_is_survived_though_another_handler_came_meanwhile(path) -> None:
    source = """
        import faulthandler, os, sys
        import exclusivelog as xl
        xl.open(sys.argv[1]).close()
        faulthandler.enable()
        engine = xl.open(sys.argv[1], durability="process")
        producer = engine.topic("t").producer()
        os.truncate(sys.argv[1] + "/owners.lock", 0)
        try:
            for _ in range(1000):
                producer.send(b"x")
        except xl.LedgerError:
            print("told")  # by a send, or by the heartbeat, which looks at the files
        os._exit(0)
    """
    assert finish(source, path) == "told\n"


def test_h5_a_memory_file_system_is_refused_for_power(path) -> None:
    with pytest.raises(xl.LedgerError, match="survives a power loss"):
        xl.open(f"/dev/shm/exclusivelog-test-{os.getpid()}", durability="power")
    assert not os.path.exists(f"/dev/shm/exclusivelog-test-{os.getpid()}")


def test_h2_files_that_root_makes_are_their_owners(tmp_path) -> None:
    """Root opens a ledger of another user, once: everything it makes has the mode and owner of
    data.mdb."""
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    path = tmp_path / "log"
    with xl.open(path, mode=0o770):
        pass
    for file in (path, *path.iterdir()):
        os.chown(file, 65534, 65534)
    for name in ("owners.lock", "lock.mdb"):
        (path / name).unlink()
    before = os.umask(0o077)
    try:
        with xl.open(path) as engine, engine.topic("t").producer() as producer:
            producer.send(b"x" * 300_000)
    finally:
        os.umask(before)
    wanted = (path / "data.mdb").stat()
    for file in (p for p in path.rglob("*") if p.is_file()):
        facts = file.stat()
        assert (facts.st_uid, facts.st_gid) == (65534, 65534), file
        assert facts.st_mode == wanted.st_mode, file
    assert (path / "segments").stat().st_uid == 65534


def test_h2_tables_that_are_gone_are_not_replaced_by_empty_ones(path) -> None:
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(b"x")
    (Path(path) / "data.mdb").unlink()
    for options in ({}, {"create": False}, {"readonly": True}):
        with pytest.raises(xl.LedgerError):
            xl.open(path, **options)
    assert not (Path(path) / "data.mdb").exists()
