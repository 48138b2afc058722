"""Programs that a ledger is opened in: patched threads, limits of the system (rule H2)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import threading
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio, threads
from exclusivelog.local.shm import slots
from exclusivelog.local.shm.slots import SLOT_COUNT
from exclusivelog.local.storage import ledger
from exclusivelog.threads import Helpers
from testing.children import child, finish, line
from testing.processes import PATIENCE, until, values

# ---- threads that are none --------------------------------------------------------------

PATCHED = """
    import sys
    from gevent import monkey
    monkey.patch_all(thread=sys.argv[2] == "True")
    import exclusivelog as xl

    try:
        with xl.open(sys.argv[1]) as engine, engine.topic("t").producer("exclusive") as producer:
            print(producer.send(b"x"), producer.send_async(b"y").result())
    except xl.LedgerError as error:
        print(error)
"""


@pytest.mark.long
def test_h2_threads_that_gevent_has_replaced_are_refused_at_open(path) -> None:
    pytest.importorskip("gevent")
    said = finish(PATCHED, path, True)
    assert "threading was patched" in said
    assert "thread=False" in said
    assert not os.path.exists(path)


@pytest.mark.long
def test_h2_gevent_that_leaves_threads_alone_is_welcome(path) -> None:
    pytest.importorskip("gevent")
    assert finish(PATCHED, path, False) == "0 1\n"


PATCHED_LATER = """
    import sys
    import exclusivelog as xl
    from gevent import monkey

    with xl.open(sys.argv[1]) as engine:
        topic = engine.topic("t")
        with topic.producer("exclusive") as producer:
            producer.send(b"before")
            monkey.patch_all()
            print(producer.send(b"behind"))
            for call in (lambda: engine.topic("u"), lambda: topic.producer("shared")):
                try:
                    call()
                except xl.LedgerError as error:
                    print("threading was patched" in str(error))
"""


@pytest.mark.long
def test_h2_threads_that_are_replaced_behind_open_are_told_of(path) -> None:
    """What is open goes on, and closes; what would begin something new says what is wrong."""
    pytest.importorskip("gevent")
    assert finish(PATCHED_LATER, path).split() == ["1", "True", "True"]
    with xl.open(path) as engine:
        assert values(engine.topic("t")) == [b"before", b"behind"]


def test_h2_other_replacements_of_threads_are_known_too(path, monkeypatch) -> None:
    """As eventlet does it; a debugger that only wraps the start of threads is none of them."""
    import _thread

    class Green:
        pass

    monkeypatch.setattr(_thread, "start_new_thread", lambda *args: 0)
    assert not threads.patched()
    monkeypatch.setattr(threading, "Lock", Green)
    with pytest.raises(xl.LedgerError, match="threading was patched"):
        xl.open(path)


# ---- no more threads --------------------------------------------------------------------

NOBODY = 64_123  # a user without any processes

FEW_THREADS = """
    import os, resource, sys, threading, time
    import exclusivelog as xl
    from testing.patience import PATIENCE
    xl.open  # imported now: later there are no descriptors, or no right, for it

    path, most = sys.argv[1], int(sys.argv[2])
    os.setuid(int(sys.argv[3]))
    descriptors = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most + 100))
    said = "done"
    try:
        with xl.open(path) as engine, engine.topic("t").producer("exclusive") as producer:
            producer.send(b"x")
    except xl.LedgerError as error:
        said = str(error)
    engine = producer = None  # drop them: they keep the mapping
    resource.setrlimit(resource.RLIMIT_NPROC, (most + 100, most + 100))
    assert len(os.listdir("/proc/self/fd")) == descriptors, os.listdir("/proc/self/fd")
    end = time.monotonic() + PATIENCE  # a thread that was joined may still be on its way out
    while len(os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < end, os.listdir("/proc/self/task")
        time.sleep(0.01)
    with xl.open(path) as engine:
        assert len(engine.engines()) == 1
        assert not [holder for name in engine.topics() for holder in engine.topic(name).holders]
    print(said)
"""


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="root has no such limit, and only root can change")
def test_h2_a_limit_on_threads_is_named_and_leaves_nothing_behind() -> None:
    """RLIMIT_NPROC lets 1, 2, ... threads start: the call that needs one more names the limit."""
    said = []
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are root's alone
        os.chmod(folder, 0o755)
        for most in range(1, 10):
            path = os.path.join(folder, str(most))
            os.mkdir(path)
            os.chown(path, NOBODY + most, NOBODY)
            said.append(finish(FEW_THREADS, path, most, NOBODY + most).strip())
    assert said[-1] == "done"
    refused = [each for each in said if each != "done"]
    assert len(refused) >= 4
    for each in refused:
        assert "RLIMIT_NPROC" in each
        assert "refuses another thread" in each
        assert "512" not in each


def no_threads(patch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", start)
    patch.setattr("exclusivelog.transaction._committing", Helpers("test"))  # none is idle


@pytest.mark.parametrize("call", ["producer", "producer_async", "transaction", "aio", "close"])
def test_h2_a_call_that_finds_no_thread_says_so_and_can_be_repeated(
    path, monkeypatch, call
) -> None:
    """And what it did not do is not done later."""
    with xl.open(path) as engine:
        topic = engine.topic("t")

        def transaction() -> None:
            with engine.transaction() as txn:
                producer.send(bytes(1 << 20), transaction=txn)  # in the tables

        def close() -> None:
            with xl.open(path) as other, other.topic("t").producer("shared") as another:
                with monkeypatch.context() as patch:
                    no_threads(patch)
                    another.send(b"x")
                    other.close()
                raise xl.LedgerError("no more threads were needed")

        async def asynchronously() -> None:
            there = aio.Engine(engine)
            with monkeypatch.context() as patch:
                no_threads(patch)
                await there.verify()

        calls: dict[str, Any] = {
            "producer": lambda: topic.producer("exclusive", name="new"),
            "producer_async": lambda: topic.producer_async("wait_for_exclusive").result(PATIENCE),
            "transaction": transaction,
            "aio": lambda: asyncio.run(asynchronously()),
            "close": close,
        }
        if call == "transaction":
            producer = topic.producer("exclusive")
        epoch = topic.epoch
        with monkeypatch.context() as patch:
            if call not in ("aio", "close"):
                no_threads(patch)
            with pytest.raises(xl.LedgerError, match=r"no more threads|refuses another thread"):
                calls[call]()
        assert topic.epoch == epoch
        assert call == "close" or values(topic) == []
        if call not in ("aio", "close"):
            calls[call]()


# ---- no more address space, descriptors, engines ----------------------------------------

LITTLE_SPACE = """
    import os, resource, sys
    import exclusivelog as xl

    descriptors = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    try:
        xl.open(sys.argv[1], map_size=1 << 39)
    except xl.LedgerError as error:
        print(error)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with xl.open(sys.argv[1], map_size=64 << 20) as engine:
        with engine.topic("t").producer("exclusive") as producer:
            producer.send(b"x")
"""
LITTLE_SPACE_BY_DEFAULT = """
    import resource, sys
    import exclusivelog as xl

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, -1))
    with xl.open(sys.argv[1]) as engine, engine.topic("t").producer("exclusive") as producer:
        producer.send(b"x")
        before = engine.stats()["map_size"]
        ledger = engine.ledger
        with ledger.environment() as env:  # as if the tables had filled half of the map
            info = env.info()
        wide = info | {"last_pgno": before // 4096 // 2 + 1}
        class Wide:
            def __getattr__(self, name):
                return (lambda: wide) if name == "info" else getattr(env, name)

        environment = ledger._environment
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        environment.lmdb = Wide()
        environment.grow()
        environment.lmdb = env
        producer.send(b"x" * 100_000)
        print(before, engine.stats()["map_size"], len(list(engine.topic("t").reader())))
"""


@pytest.mark.sampled
@pytest.mark.parametrize("there", [False, True])
def test_h2_a_limit_on_address_space_names_map_size(path, there) -> None:
    if there:
        with xl.open(path) as engine:
            engine.topic("t")
    said = finish(LITTLE_SPACE, path)
    assert f"map_size={1 << 39}" in said
    assert str(8 << 30) in said
    assert "ulimit -v" in said


def test_h2_the_default_map_is_smaller_where_there_is_less_address_space_and_grows(path) -> None:
    assert finish(LITTLE_SPACE_BY_DEFAULT, path).split() == [str(1 << 32), str(1 << 40), "2"]


@pytest.mark.long
def test_h2_a_process_may_have_many_ledgers(tmp_path) -> None:
    """Of 128 maps of 1 TiB each, the last has no room in the address space: it is smaller."""
    said = finish(
        """
        import contextlib, sys
        import exclusivelog as xl
        with contextlib.ExitStack() as stack:
            engines = [
                stack.enter_context(xl.open(f"{sys.argv[1]}/{number}", durability="process"))
                for number in range(135)
            ]
            for engine in engines:
                assert engine.topic("t").producer("exclusive").send(b"x") == 0
            sizes = [engine.stats()["map_size"] for engine in engines]
            print(max(sizes) == 1 << 40, min(sizes) < 1 << 40)
        """,
        tmp_path,
        timeout=3 * PATIENCE,
    )
    assert said.split() == ["True", "True"]


@pytest.mark.long
def test_h2_the_513th_engine_is_told_of_the_512_others(path) -> None:
    with contextlib.ExitStack() as engines:
        first = engines.enter_context(xl.open(path))
        with first.ledger.lockfile.opening():
            slots = [first.ledger.lockfile.slots.join("e", {}, None) for _ in range(SLOT_COUNT - 1)]
        with pytest.raises(xl.LedgerFullError, match="512 engines"):
            xl.open(path)
        slots.pop().leave()
        engines.enter_context(xl.open(path))
        for slot in slots:
            slot.leave()


def test_h2_threads_that_open_at_once_share_one_ledger(path) -> None:
    found: list[Any] = []

    def open_and_send() -> None:
        with xl.open(path) as engine, engine.topic("t").producer() as producer:
            found.append(producer.send(b"x"))

    together = [threading.Thread(target=open_and_send, daemon=True) for _ in range(8)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join(PATIENCE)
    assert sorted(found) == list(range(8))


AT_EXIT = """
    import atexit, sys

    def late():
        try:
            with xl.open(sys.argv[1]) as engine, engine.topic("t").producer() as producer:
                print(producer.send(b"late"), flush=True)
        except xl.LedgerError as error:
            print(error, flush=True)

    if sys.argv[2] == "before":
        atexit.register(late)
    import exclusivelog as xl
    if sys.argv[2] == "behind":
        atexit.register(late)
    with xl.open(sys.argv[1]) as engine, engine.topic("t").producer() as producer:
        producer.send(b"x")
"""


@pytest.mark.sampled
@pytest.mark.parametrize("when", ["before", "behind"])
def test_h2_a_ledger_can_be_opened_by_what_runs_at_exit(path, when) -> None:
    """Or says that it cannot: newer versions of Python start no thread there."""
    said = finish(AT_EXIT, path, when).strip()
    assert said == "1" or "the interpreter shuts down" in said


# ---- where ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_h2_a_path_that_is_none_is_named(tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path="):
        xl.open(name)
    assert list(tmp_path.iterdir()) == []


def test_h2_a_path_of_bytes_is_refused(tmp_path) -> None:
    with pytest.raises(TypeError, match="path="):
        xl.open(bytes(tmp_path / "x"))  # type: ignore[arg-type]


def test_h2_a_directory_with_other_files_is_not_mixed_into(tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(xl.LedgerError, match="thesis"):
        xl.open(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(xl.LedgerError, match="no ledger"):
        xl.open(tmp_path, create=False)


def test_h2_what_a_creation_has_left_is_no_stranger(tmp_path) -> None:
    left = ("owners.lock.77.0123abcd", "journal.77.0123abcd", ".creating-ab")
    others = ("owners.lock.1", "journal.1")  # logrotate makes such names
    for name in (*left, *others):
        (tmp_path / name).mkdir() if name.startswith(".") else (tmp_path / name).write_bytes(b"")
    (tmp_path / "lost+found").mkdir()
    with xl.open(tmp_path) as engine:
        assert engine.topics() == []
    names = {each.name for each in tmp_path.iterdir()}
    assert names.isdisjoint(left)
    assert names.issuperset(others)


# ---- limits on descriptors and on the size of files -------------------------------------

LIMITED = """
    import os, resource, shutil, signal, sys
    import exclusivelog as xl
    xl.open  # imported now: later there are no descriptors, or no right, for it

    path, kind = sys.argv[1], sys.argv[2]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = resource.RLIMIT_NOFILE if kind == "descriptors" else resource.RLIMIT_FSIZE
    before = resource.getrlimit(limit)
    sent, said = [], []

    def limits():
        if kind == "descriptors":
            there = max(map(int, os.listdir("/proc/self/fd")))
            return range(3, there + 6)
        return [0, 1, 4096, 100_000, 300_000, 1 << 20, 5 << 20]

    def send(producer, value):
        producer.send(value)
        sent.append(value)

    def attempt(what, call):
        for most in limits():
            resource.setrlimit(limit, (most, before[1]))
            try:
                call(most)
            except xl.ExclusiveLogError as error:
                resource.setrlimit(limit, before)
                assert not isinstance(error, (xl.LedgerIOError, xl.LedgerCorruptedError)), error
                said.append(what)
            finally:
                resource.setrlimit(limit, before)

    def use(most):
        with xl.open(path) as engine, engine.topic("t").producer("exclusive") as producer:
            send(producer, b"%d use" % most)

    attempt("open", use)
    with xl.open(path) as engine, engine.topic("t").producer("exclusive") as producer:
        attempt("send", lambda most: send(producer, b"%d send" % most))
        attempt("large", lambda most: send(producer, b"%d large" % most + bytes(200_000)))
        attempt("segment", lambda most: send(producer, b"%d segment" % most + bytes(3 << 20)))
        attempt("checkpoint", lambda most: engine.ledger.checkpoint())
        attempt("topic", lambda most: engine.topic("topic %d" % most))

        def backup(most):
            shutil.rmtree(path + ".backup", ignore_errors=True)
            engine.backup(path + ".backup")

        attempt("backup", backup)
        send(producer, b"end")
        backup(0)
        assert engine.verify().ok, engine.verify()
        assert [m.value for m in engine.topic("t").reader()] == sent
    for name in (path, path + ".backup"):
        with xl.open(name) as engine:
            assert [m.value for m in engine.topic("t").reader()] == sent
            with engine.topic("t").producer("exclusive") as producer:
                producer.send(b"again")
    print(*sorted(set(said)))
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "struck"),
    [
        ("descriptors", {"open", "large", "backup"}),
        ("sizes", {"open", "segment", "backup", "large"}),
    ],
)
def test_h2_a_limit_of_the_process_costs_nothing_that_was_acknowledged(path, kind, struck) -> None:
    """RLIMIT_NOFILE and RLIMIT_FSIZE, at one value after another, around every kind of write. The
    error says what is short, and with the limit raised the same engine goes on."""
    assert set(finish(LIMITED, path, kind).split()) >= struck


KILLED_BY_SIZE = """
    import resource, signal, sys
    import exclusivelog as xl

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with xl.open(sys.argv[1]) as engine, engine.topic("t").producer("exclusive") as producer:
        for n in range(20):
            producer.send(b"%d" % n)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; a host program may not
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        print("ready", flush=True)
        for n in range(20, 1000):
            producer.send(b"%d" % n + bytes(300_000))
            print(n, flush=True)
"""


def test_h2_a_process_that_sigxfsz_kills_loses_nothing(path) -> None:
    with child(KILLED_BY_SIZE, path) as process:
        assert line(process) == "ready"
        rest = process.stdout.read().split()
        assert process.wait(PATIENCE) == -signal.SIGXFSZ
    with xl.open(path) as engine:
        assert engine.verify().ok
        found = [value.rstrip(b"\0") for value in values(engine.topic("t"))]
        assert found[: 20 + len(rest)] == [b"%d" % n for n in range(20 + len(rest))]


# ---- what strikes the library's own threads ---------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [MemoryError, SystemExit])
@pytest.mark.parametrize("thread", ["guard", "heart", "checkpoint"])
def test_h2_the_librarys_threads_outlive_what_strikes_them(path, monkeypatch, kind, thread) -> None:
    """An exception where none is expected, and so none is caught: the guard goes on to promote,
    the heart to beat, and the journal is taken over."""
    owner, name = {
        "guard": (slots.Slot, "wake_up_count"),
        "heart": (slots.Slot, "beat"),
        "checkpoint": (ledger.Ledger, "checkpoint"),
    }[thread]
    original, struck = getattr(owner, name), threading.Event()

    def strike(self: Any) -> Any:
        current = threading.current_thread()
        if current.name.startswith("exclusivelog") and not struck.is_set():
            struck.set()
            raise kind("struck")
        return original(self)

    with xl.open(path, name="other") as other, xl.open(path, name="e", keepalive=1.0) as engine:
        owner_of_it = other.topic("t").producer("exclusive")
        monkeypatch.setattr(owner, name, strike)
        waiting = engine.topic("t").producer_async("wait_for_exclusive")
        owner_of_it.send(b"x")
        until(struck.is_set)
        if thread == "heart":
            assert engine.backend._slot is not None
            at = slots.SLOTS + engine.backend._slot.index * slots.SLOT_SIZE + slots.HEARTBEAT
            seen = engine.ledger.lockfile.atomics.load64(at)
            until(lambda: engine.ledger.lockfile.atomics.load64(at) > seen)
        elif thread == "checkpoint":
            assert engine.ledger.journal is not None
            until(lambda: not engine.ledger.journal.backlog)
        owner_of_it.close()
        assert waiting.result(PATIENCE).send(b"y") == 1
