"""Rule C8: deaths of which the kernel's robust lists do not tell.

A process whose memory is freed before it has ended, one that dumps core, or one on a system without
such lists leaves its locks as they are. They must not stay so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.files import LOCK, lock_open_file, pid_namespace
from exclusivelog.local.shm import lockfile
from exclusivelog.local.shm.slots import ALIVE, NAMESPACE, SLOT_SIZE, SLOTS
from exclusivelog.local.storage.environment import MAP_RESERVED
from testing.children import child, finish, line, script
from testing.deaths import (
    FLUSH,
    LOCKS,
    READERS,
    TABLES,
    WRITER,
    address_of,
    die_unreported,
    hold,
    reap_early,
)
from testing.disks import disk
from testing.handovers import begin
from testing.namespaces import in_a_namespace, needs_namespaces
from testing.processes import PATIENCE, State, Worker, open_producer, send, until, within
from testing.stops import stopped

pytestmark = [pytest.mark.once, pytest.mark.rule("C8")]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may be other users")

A_WHILE = 5.0  # seconds: much longer than what the rule allows until a lock or a slot is free


NOBODY = 0x3FFFFFFE  # an id that no thread has: they end at 2**22


def hold_and_wait(state: State, lock: str) -> None:
    hold(state.engine, lock)
    signal.pause()


def gone(process: Worker) -> None:
    process.process.join(PATIENCE)
    assert process.process.exitcode == -9


def await_freed(engine: xl.Engine, lock: str, thread: int) -> None:
    """Wait until the lock is not that thread's any more, for as long as the rule allows. What then
    follows may take longer on a busy machine."""
    until(lambda: engine.ledger.deaths.held()[LOCKS.index(lock)] != thread, A_WHILE)


def await_given_up(engine: xl.Engine, name: str) -> None:
    """The same, until an engine counts as dead."""
    until(lambda: name not in {each.name for each in engine.engines()}, A_WHILE)


@pytest.mark.parametrize("lock", LOCKS)
def test_c8_a_lock_does_not_outlive_a_thread_whose_death_is_not_reported(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], lock: str
) -> None:
    """Others append, flush, change the tables and read; a new process opens the ledger."""
    process, witness = worker(name="killed"), worker(name="witness")
    witness.call(open_producer, "shared")
    process.start(die_unreported, lock)
    gone(process)
    witness.start(send, b"x")
    opening = begin(xl.open, engine.path)
    asking = begin(lambda: engine.topic("another").producer())
    await_freed(engine, lock, process.pid)
    with opening.result(PATIENCE), asking.result(PATIENCE) as producer:
        assert producer.send(b"y") == 0
    assert witness.answer() == 0
    assert [message.value for message in topic.reader()] == [b"x"]


ZOMBIE = """
    import sys, exclusivelog as xl
    from testing.deaths import die_unreported
    from testing.processes import State
    engine = xl.open(sys.argv[1])
    die_unreported(State(engine, engine.topic("orders")), sys.argv[2])
"""


def test_c8_a_process_that_is_not_reaped_is_dead(engine: xl.Engine, topic: xl.Topic) -> None:
    """The thread that holds the lock is the first of its process, which stays a zombie."""
    with child(ZOMBIE, engine.path, WRITER) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        asking = begin(topic.producer)
        await_freed(engine, WRITER, process.pid)
        with asking.result(PATIENCE) as producer:
            assert producer.send(b"x") == 0


def test_c8_an_engine_whose_death_is_not_reported_gives_up_its_topics(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """A waiter is promoted, and a request without a wait is granted; its slot is used again."""
    process = worker(name="killed", keepalive=None)
    process.call(open_producer, "exclusive")
    assert topic.owner is not None
    process.start(die_unreported, None)
    gone(process)
    waiting = topic.producer_async("wait_for_exclusive")
    await_given_up(engine, "killed")
    with waiting.result(PATIENCE) as producer:
        assert producer.topic_epoch == 2

    process = worker(name="killed", keepalive=None)
    process.call(open_producer, "exclusive")
    process.start(die_unreported, None)
    gone(process)
    await_given_up(engine, "killed")
    with until(lambda: granted(topic)) as producer:
        assert producer.topic_epoch == 4


def granted(topic: xl.Topic) -> xl.Producer | None:
    with contextlib.suppress(xl.ProducerFencedError):
        return topic.producer("exclusive")
    return None


def test_c8_memory_that_is_freed_before_the_end(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """As earlyoom and the kernel do it. Whether the kernel is quick enough is up to it."""
    try:
        for _ in range(5):
            process = worker(name="killed")
            process.start(hold_and_wait, TABLES)
            until(lambda: engine.ledger.deaths.held()[LOCKS.index(TABLES)])
            reap_early(process.pid)
            gone(process)
            asking = begin(topic.producer)
            await_freed(engine, TABLES, process.pid)
            with asking.result(PATIENCE) as producer:
                producer.send(b"x")
    except OSError as error:
        if error.errno == errno.ENOSYS:
            pytest.skip("this kernel has no process_mrelease")
        raise


def test_c8_a_living_holder_keeps_its_lock(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It may be stopped for long: a lock is taken only from who cannot come back."""
    process = worker(name="stopped")
    with ThreadPoolExecutor(1) as pool:
        with stopped(process, "in_a_transaction"):
            waiting = pool.submit(topic.producer)
            with pytest.raises(TimeoutError):
                waiting.result(1.5)
            assert engine.ledger.deaths.marked == 0
        waiting.result(PATIENCE).close()


@pytest.fixture
def stranger() -> Iterator[int]:
    """The id of a process that has nothing of the ledger."""
    with subprocess.Popen(["sleep", f"{2 * PATIENCE}"]) as process:
        yield process.pid
        process.kill()


def test_c8_an_id_that_was_given_anew_is_not_the_holder(
    engine: xl.Engine, topic: xl.Topic, stranger: int
) -> None:
    """A program that has nothing of the ledger has the id of the thread that held the lock."""
    word = ctypes.c_uint32.from_address(address_of(engine, WRITER))
    word.value = stranger
    asking = begin(topic.producer)
    await_freed(engine, WRITER, stranger)
    with asking.result(PATIENCE) as producer:
        assert producer.send(b"x") == 0


OTHER_USER = 1234
AS_ANOTHER_USER = """
    import ctypes, os, sys, tempfile
    import exclusivelog as xl
    from testing.deaths import LOCKS, address_of
    from testing.processes import within
    path, user, holder, patience = sys.argv[1], *map(int, sys.argv[2:5])
    with tempfile.TemporaryDirectory() as place, xl.open(place + "/log") as engine:
        with engine.topic("orders").producer() as producer:  # import all, while root may read it
            producer.send(b"x")
        list(engine.topic("orders").reader())
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    engine = xl.open(path)
    topic = engine.topic("orders")
    words = {lock: ctypes.c_uint32.from_address(address_of(engine, lock)) for lock in LOCKS}
"""
WATCHES = """
    words["append"].value = holder
    for _ in range(4):
        words["flush"].value = nobody
        until(lambda: words["flush"].value != nobody)
    print(words["append"].value == holder, flush=True)
    words["append"].value = 0
"""


@pytest.mark.long
@needs_root
def test_c8_a_living_holder_of_another_user_keeps_its_lock(reachable: str) -> None:
    """An unprivileged process may not look at what another user's program has mapped. Each look is
    at both locks."""
    watches = WATCHES.replace("nobody", str(NOBODY))
    source = script(AS_ANOTHER_USER, "from testing.processes import until", watches)
    with xl.open(reachable, mode=0o777):
        assert finish(source, reachable, OTHER_USER, os.getpid(), 0) == "True\n"


REPLACES = """
    import os, subprocess, sys
    from pathlib import Path
    import exclusivelog as xl
    from testing.children import child, line, tell

    path, user, watches = sys.argv[1], sys.argv[2], sys.argv[3]

    def sleeper(pid=None):
        for _ in range(50):
            if pid is not None:
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
            process = subprocess.Popen(["sleep", "600"])
            if pid in (None, process.pid):
                return process
            process.kill()
            process.wait()
        raise RuntimeError("the id was not given anew")

    with xl.open(path, mode=0o777) as engine:
        engine.topic("orders").producer().close()
    first = sleeper()
    with child(watches, path, user, first.pid, 0) as watcher:
        assert line(watcher) == "held"
        first.kill()
        first.wait()
        second = sleeper(first.pid)
        tell(watcher)
        print(line(watcher))
    second.kill()
    second.wait()
"""
WATCHES_BOTH = """
    words["append"].value = holder
    for _ in range(3):
        words["flush"].value = nobody
        until(lambda: words["flush"].value != nobody)
    assert words["append"].value == holder
    print("held", flush=True)
    input()
    until(lambda: words["append"].value & 0x3FFFFFFF != holder)
    print("freed", flush=True)
"""


@pytest.mark.long
@needs_root
@needs_namespaces
def test_c8_an_id_that_was_given_anew_to_another_user_is_not_the_holder(reachable: str) -> None:
    """Nobody may see what that user's program has mapped, but when it began."""
    watches = WATCHES_BOTH.replace("nobody", str(NOBODY))
    source = script(AS_ANOTHER_USER, "from testing.processes import until", watches)
    assert in_a_namespace(script(REPLACES), reachable, OTHER_USER, source) == "freed\n"


STOPS = """
        os.kill(watcher.pid, signal.SIGSTOP)
        first.kill()
        first.wait()
        second = sleeper(first.pid)
        time.sleep(3)
        os.kill(watcher.pid, signal.SIGCONT)
"""
KEEPS = """
    for _ in range(4):
        words["flush"].value = nobody
        until(lambda: words["flush"].value != nobody)
    print("kept" if words["append"].value == holder else "freed", flush=True)
"""


@pytest.mark.long
@needs_root
@needs_namespaces
def test_c8_a_process_that_was_paused_takes_no_later_holder_with_the_same_id_for_dead(
    reachable: str,
) -> None:
    """While it was paused, the first holder may have released the lock, and the second taken it."""
    replaces = REPLACES.replace("import os,", "import os, signal, time,").replace(
        """
        first.kill()
        first.wait()
        second = sleeper(first.pid)
""",
        STOPS,
    )
    watches = WATCHES_BOTH.split('    until(lambda: words["append"]')[0] + KEEPS[1:]
    watches = watches.replace("nobody", str(NOBODY))
    source = script(AS_ANOTHER_USER, "from testing.processes import until", watches)
    assert in_a_namespace(script(replaces), reachable, OTHER_USER, source) == "kept\n"


@pytest.mark.long
def test_c8_an_engine_whose_thread_s_id_was_given_anew_is_dead(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], stranger: int
) -> None:
    """It counted as alive for as long as the program with that id ran: it has no keepalive."""
    process = worker(name="killed", keepalive=None)
    process.call(open_producer, "exclusive")
    index, _ = next(
        found for found in engine.ledger.lockfile.slots._taken() if found[1] != engine.id
    )
    engine.ledger.lockfile.atomics.store(SLOTS + SLOT_SIZE * index + ALIVE, stranger)
    with topic.producer("wait_for_exclusive", timeout=PATIENCE) as producer:
        assert producer.topic_epoch == 2


MAPS = """
import mmap, signal, sys
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 4096)
    print("mapped", flush=True)
    signal.pause()
"""


def test_c8_a_reader_of_a_backup_keeps_lmdbs_lock(engine: xl.Engine) -> None:
    """It has LMDB's lock file alone: the backup had no `owners.lock` when it was opened."""
    readers = ctypes.c_uint32.from_address(address_of(engine, READERS))
    flushes = ctypes.c_uint32.from_address(address_of(engine, FLUSH))
    with child(MAPS, os.path.join(engine.path, LOCK)) as process:
        assert line(process) == "mapped"
        readers.value = process.pid
        for _ in range(3):  # looks at the locks
            flushes.value = NOBODY
            until(lambda: flushes.value != NOBODY)
        assert readers.value == process.pid
        process.kill()
        until(lambda: readers.value != process.pid)


@pytest.mark.parametrize("namespace", [-1, 1])
def test_c8_readers_of_another_pid_namespace_keep_lmdbs_lock(
    engine: xl.Engine, namespace: int
) -> None:
    """A read-only engine may be of another one: it was open before any engine wrote. No thread has
    this id here."""
    readers = ctypes.c_uint32.from_address(address_of(engine, READERS))
    flushes = ctypes.c_uint32.from_address(address_of(engine, FLUSH))
    with (Path(engine.path) / LOCK).open("r+b") as file:
        there = _core.NAMESPACES + pid_namespace() + namespace
        assert lock_open_file(file.fileno(), "read", there)
        readers.value = NOBODY
        for _ in range(2):  # looks at the locks
            flushes.value = NOBODY
            until(lambda: flushes.value != NOBODY)
        assert readers.value == NOBODY
        assert lock_open_file(file.fileno(), "none", there)
        until(lambda: readers.value != NOBODY)


def test_c8_ids_of_another_pid_namespace_say_nothing(
    engine: xl.Engine, topic: xl.Topic, path: str
) -> None:
    """No thread has this id here. It may have it there, where the engines are that began."""
    atomics = engine.ledger.lockfile.atomics
    word = ctypes.c_uint32.from_address(address_of(engine, WRITER))
    with ThreadPoolExecutor(1) as pool:
        atomics.store64(NAMESPACE, pid_namespace() + 1)
        word.value = NOBODY
        try:
            waiting = pool.submit(topic.producer)
            with pytest.raises(TimeoutError):
                waiting.result(1.5)
            assert word.value & _core.HELD_BY == NOBODY
            with pytest.raises(AssertionError, match="another pid namespace"):
                finish("import sys, exclusivelog as xl; xl.open(sys.argv[1])", path)
        finally:
            atomics.store64(NAMESPACE, pid_namespace())
        waiting.result(PATIENCE).close()


DUMP = """
    import mmap, os, resource, signal, sys
    import exclusivelog as xl
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a job in the background of a shell ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
    os.chdir(sys.argv[2])
    engine = xl.open(sys.argv[1], keepalive=None)
    producer = engine.topic("orders").producer("exclusive")
    memory = mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at : at + 8] = b"not zero"
    print("owns", flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
def test_c8_a_process_that_dumps_core_is_dead_before_the_dump_is_over(
    engine: xl.Engine, topic: xl.Topic, tmp_path: Path
) -> None:
    for tries in range(5):  # on a busy machine, this process may learn of it too late
        with child(DUMP, engine.path, tmp_path) as process:
            assert line(process) == "owns"
            waiting = topic.producer_async("wait_for_exclusive")
            process.send_signal(signal.SIGQUIT)
            with waiting.result(PATIENCE) as producer:
                over = process.poll() is not None
                assert producer.topic_epoch == 2 * tries + 2
            process.wait(PATIENCE)
        if not over or not list(tmp_path.glob("core*")):
            break
    if process.returncode != -signal.SIGQUIT or not list(tmp_path.glob("core*")):
        pytest.skip("no core is dumped into the working directory here")
    assert not over


# ---- core dumps with files' mappings ------------------------------------------------------


def kept_in_dumps(path: str, pid: int | str) -> list[str]:
    """The mapped files of a ledger that a core dump of the process would have (no flag `dd`)."""
    found, name = [], ""
    for row in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = row.split()
        if not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else ""
        elif words[0] == "VmFlags:" and name.startswith(path) and "dd" not in words:
            found.append(Path(name).name)
    return found


@pytest.mark.rule("C8")
@pytest.mark.parametrize("readonly", [False, True])
def test_c8_no_file_of_a_ledger_is_in_a_core_dump(path: str, readonly: bool) -> None:
    """LMDB's map of 1 TiB would be walked, for half a minute."""
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send_many([bytes(200_000)] * 3)
        engine.ledger.checkpoint()
    with xl.open(path, readonly=readonly) as engine:
        assert len(list(engine.topic("orders").reader())) == 3
        mapped = Path("/proc/self/maps").read_text()
        assert f"{path}/data.mdb" in mapped
        assert f"{path}/segments/" in mapped
        assert set(kept_in_dumps(path, "self")) <= {"lock.mdb"}


def test_c8_a_map_that_was_made_larger_is_not_in_a_core_dump(path: str) -> None:
    with xl.open(path, map_size=1 << 26) as engine:
        environment = engine.ledger._environment
        environment._wanted_size = 1 << 28
        assert environment._resized(PATIENCE)
        assert environment.lmdb.info()["map_size"] == (1 << 28) + MAP_RESERVED
        assert set(kept_in_dumps(path, "self")) <= {"lock.mdb"}


@pytest.mark.long
@pytest.mark.rule("C8")
def test_c8_a_core_dump_with_files_mappings_does_not_walk_the_map(
    engine: xl.Engine, topic: xl.Topic, tmp_path: Path
) -> None:
    """With coredump_filter 0x3f the dump was 1 TiB long, with holes."""
    source = DUMP.replace("600 << 20", "1 << 20").replace(
        "    engine = xl.open",
        '    open("/proc/self/coredump_filter", "w").write("0x3f")\n    engine = xl.open',
    )
    with child(source, engine.path, tmp_path) as process:
        assert line(process) == "owns"
        waiting = topic.producer_async("wait_for_exclusive")
        process.send_signal(signal.SIGQUIT)
        waiting.result(PATIENCE).close()
        process.wait(PATIENCE)
    dumps = list(tmp_path.glob("core*"))
    if process.returncode != -signal.SIGQUIT or not dumps:
        pytest.skip("no core is dumped into the working directory here")
    assert dumps[0].stat().st_size < 2 << 30


def send_for_ever(state: State, acknowledged: str) -> None:
    """Append to the file what is acknowledged; change tables and read in between."""
    with open(acknowledged, "ab", buffering=0) as file, state.topic.producer("shared") as producer:
        for number in itertools.count():
            value = b"%d-%d" % (os.getpid(), number)
            producer.send(value)
            file.write(value + b"\n")
            if number % 20 == 0:
                state.engine.ledger.checkpoint()
                state.topic.stats()


@pytest.mark.long
def test_c8_processes_that_are_reaped_early_at_random(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """None of their locks stays, and nothing that was acknowledged to them is lost."""
    file = tmp_path / "acknowledged"
    file.touch()
    working = [worker(name="killed", durability="process") for _ in range(3)]
    for process in working:
        process.start(send_for_ever, str(file))
    for _ in range(25):
        seen = file.stat().st_size
        until(lambda seen=seen: file.stat().st_size > seen)
        time.sleep(random.uniform(0, 0.05))
        victim = working.pop(0)
        reap_early(victim.pid)
        gone(victim)
        working.append(within(lambda: worker(name="killed", durability="process")))
        working[-1].start(send_for_ever, str(file))
    for process in working:
        process.kill()
    # This engine shows what a power cut cannot take any more: wait for the next flush.
    acknowledged = set(file.read_bytes().split())
    until(lambda: acknowledged <= {message.value for message in topic.reader()})
    assert engine.verify().ok


STALL = """
    import subprocess, sys, time
    from pathlib import Path
    from testing.deaths import reap_early
    from testing.processes import until

    where, pid = sys.argv[1], int(sys.argv[2])

    def waits_for_the_disk():
        stats = Path(f"/proc/{pid}/task").glob("*/stat")
        return any(stat.read_text().rpartition(")")[2].split()[0] == "D" for stat in stats)

    subprocess.run(["fsfreeze", "-f", where], check=True)
    try:
        until(waits_for_the_disk)
        reap_early(pid)
        time.sleep(0.5)  # in which its memory is gone, and its threads are not
    finally:
        subprocess.run(["fsfreeze", "-u", where], check=True)
"""


@pytest.mark.long
def test_c8_a_process_that_is_reaped_while_the_disk_stalls(tmp_path: Path) -> None:
    """The kernel's OOM killer does that. Its threads end once the disk answers, and their locks
    with them; another process stalls the disk, since this one may wait for it, too."""
    file = tmp_path / "acknowledged"
    file.touch()
    with disk(tmp_path / "disk", 64) as where:
        path = str(where / "log")
        with xl.open(path, keepalive=None) as engine:
            topic = engine.topic("orders")
            for _ in range(4):
                victim = Worker(path, name="killed", keepalive=None)
                seen = file.stat().st_size
                victim.start(send_for_ever, str(file))
                until(lambda seen=seen: file.stat().st_size > seen)
                finish(STALL, where, victim.pid)
                gone(victim)
                with within(lambda: topic.producer("shared")) as producer:
                    within(lambda producer=producer: producer.send(b"next"))
            found = {message.value for message in topic.reader()}
            assert set(file.read_bytes().split()) <= found
            assert engine.verify().ok


def test_c8_without_the_watch_a_lock_stays(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what these tests rest on."""
    monkeypatch.setattr(lockfile.LockFile, "watch_deaths", unwatched)
    with xl.open(path) as engine, ThreadPoolExecutor(1) as pool:
        word = ctypes.c_uint32.from_address(address_of(engine, WRITER))
        word.value = NOBODY
        try:
            waiting = pool.submit(engine.topic, "t")
            with pytest.raises(TimeoutError):
                waiting.result(1.5)
            assert word.value & _core.HELD_BY == NOBODY
        finally:
            word.value = _core.OWNER_DIED
        waiting.result(PATIENCE)


def unwatched(self: lockfile.LockFile, *_: object) -> _core.DeathWatch:
    """One that looks at nothing."""
    return _core.DeathWatch(self.atomics, NAMESPACE, 0, b"", 0)


FORKED_WHILE_THE_WATCH_LOOKS = """
    import os, sys, time
    from exclusivelog import _core
    from testing.processes import bare_fork

    words = _core.SharedWords(bytearray(64))
    watch = _core.DeathWatch(words, 0, 0, b"", 0)
    watch.add_slots(32, 0, 10_000_000)  # one that is free, so often that a look takes its time
    watch.start()
    children = []
    for _ in range(12):  # for longer than from one look to the next
        time.sleep(0.05)
        child = bare_fork()
        if child == 0:
            watch.stop()
            mine = _core.DeathWatch(words, 0, 0, b"", 0)
            mine.start()
            mine.stop()
            os.write(1, b"ended\\n")
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    watch.stop()
"""


def test_c8_a_child_of_c_code_does_not_wait_for_its_parents_watch() -> None:
    """It inherits no lock that the parent's thread has at that moment."""
    assert finish(FORKED_WHILE_THE_WATCH_LOOKS).split() == ["ended"] * 12
