"""What a ledger's directory may hold, or may not allow: it cannot be written, its files are
foreign, newer, cut off or strange (rule H2). Each is refused by name, and left as it is."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import pytest

import exclusivelog as xl
from exclusivelog.local import files, records
from exclusivelog.local.shm import lockfile, slots
from exclusivelog.local.storage import mounts
from exclusivelog.local.storage.mounts import file_system
from testing.children import command, finish
from testing.disks import OPENS, TELLS_ALL, digest, disk
from testing.processes import PATIENCE, collect, values, within
from tests.log.test_readers import rest

pytestmark = pytest.mark.once


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    with disk(tmp_path / "disk", 12) as where:
        yield where


# ---- H2: a directory that cannot be written ----------------------------------------------


@contextlib.contextmanager
def read_only(where: Path) -> Iterator[None]:
    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", where], check=True, timeout=PATIENCE)

    remount("ro")
    try:
        yield
    finally:
        remount("rw")


READS = """
    import sys
    import exclusivelog as xl
    with xl.open(sys.argv[1], readonly=True) as engine:
        topic = engine.topic("t")
        print([m.value for m in topic.reader()], topic.next_offset, topic.epoch, topic.owner,
              engine.topics(), engine.verify().ok, engine.stats()["topics"] > 0)
        for refused in (topic.producer, lambda: engine.delete_topic("t"),
                        lambda: engine.topic("new")):
            try:
                refused()
            except xl.ExclusiveLogError:
                pass
            else:
                raise SystemExit("changed something")
        reader = topic.reader("latest")
        try:
            reader.read_next(0.1)
        except xl.WaitTimeoutError:
            pass
"""
READ = "[b'x'] 1 0 None ['t'] True True\n"


def test_h2_a_read_only_directory(small_disk) -> None:
    path = small_disk / "log"
    assert finish(OPENS, path) == "opened\n"
    before = digest(path)
    with read_only(small_disk):
        with pytest.raises(xl.LedgerError, match="readonly=True") as caught:
            xl.open(path)
        assert not isinstance(caught.value, (xl.LedgerIOError, xl.LedgerFullError))
        with pytest.raises(xl.LedgerError):
            xl.open(small_disk / "new")
        with pytest.raises(xl.LedgerError):
            xl.open(small_disk / "new", readonly=True)
        assert finish(READS, path) == READ
    assert digest(path)["data.mdb"] == before["data.mdb"]
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        assert producer.send(b"y") == 1


def test_h2_a_read_only_copy_without_lock_files(small_disk) -> None:
    """Such as a backup on a read-only medium."""
    path = small_disk / "log"
    assert finish(OPENS, path) == "opened\n"
    for name in ("owners.lock", "lock.mdb"):
        (path / name).unlink()
    with read_only(small_disk):
        assert finish(READS, path) == READ
    assert sorted(file.name for file in path.iterdir()) == ["data.mdb", "journal"]


def test_h2_reading_changes_nothing(path) -> None:
    assert finish(OPENS, path) == "opened\n"
    before = digest(Path(path))
    assert finish(READS, path) == READ
    assert digest(Path(path))["data.mdb"] == before["data.mdb"]


def test_h2_reading_what_is_not_there_makes_nothing(tmp_path) -> None:
    for options in ({"readonly": True}, {"create": False}):
        with pytest.raises(xl.LedgerError):
            xl.open(tmp_path / "missing", **options)
        assert not (tmp_path / "missing").exists()
        (tmp_path / "empty").mkdir()
        with pytest.raises(xl.LedgerError):
            xl.open(tmp_path / "empty", **options)
        assert list((tmp_path / "empty").iterdir()) == []
        (tmp_path / "empty").rmdir()


def test_h2_a_read_only_engine_beside_a_writer_deletes_nothing(path) -> None:
    """Engines of one process share the open files: only the engine itself refuses."""
    with xl.open(path) as engine, xl.open(path, readonly=True) as reading:
        engine.topic("t").producer().send(b"x")
        for change in (
            lambda: reading.delete_topic("t"),
            lambda: reading.topic("t").terminate(),
            lambda: reading.topic("t").trim(before=1),
            lambda: reading.topic("t").retention(max_bytes=1),
            lambda: reading.topic("t").compact(),
            lambda: reading.topic("t").compression(None),
            lambda: reading.delete_role("r"),
            lambda: reading.cancel_unload("t"),
        ):
            with pytest.raises(xl.LedgerError, match="readonly=True"):
                change()
        assert [message.value for message in reading.topic("t").reader()] == [b"x"]


OPENS_WITH_FEW_DESCRIPTORS = """
    import errno, os, resource, sys
    import exclusivelog as xl
    xl.open(sys.argv[1]).close()    # whatever is imported late is imported now
    there = max(map(int, os.listdir("/proc/self/fd")))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    codes = []
    for more in range(1, 100):
        resource.setrlimit(resource.RLIMIT_NOFILE, (there + more, hard))
        try:
            xl.open(sys.argv[1]).close()
            break
        except xl.LedgerError as error:
            codes.append(error.errno)
    print(len(codes) > 3, set(codes) == {errno.EMFILE})
"""


def test_h2_an_error_for_want_of_descriptors_has_the_system_s_code(path) -> None:
    """At every call that may lack one: LMDB's errors are no OSErrors, and have a code, too."""
    assert finish(OPENS_WITH_FEW_DESCRIPTORS, path) == "True True\n"


AS_NOBODY = """
    import os, sys
    import exclusivelog as xl
    xl.open(sys.argv[2]).close()    # imports the modules that are imported late
    os.setgid(65534)
    os.setuid(65534)
    for options in ({}, {"readonly": True}):
        try:
            with xl.open(sys.argv[1], **options) as engine:
                print([m.value for m in engine.topic("t").reader()])
        except xl.LedgerError as error:
            print(type(error).__name__, "readonly=True" in str(error))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    ("directory", "files", "said"),
    [
        (0o700, 0o600, ["LedgerError False"]),
        (0o755, 0o600, ["LedgerError False"]),
        (0o755, 0o644, ["LedgerError False", "[b'x']"]),
    ],
)
def test_h2_a_ledger_of_another_user(tmp_path, directory, files, said) -> None:
    """Who may not write is told about readonly=True, unless that was tried. (To be able to read
    while others write, a reader needs to leave its mark in lock.mdb.)"""
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        path = Path(top) / "log"
        assert finish(OPENS, path) == "opened\n"
        os.chmod(path, directory)
        for file in path.iterdir():
            os.chmod(file, files)
        refused, read_only = finish(AS_NOBODY, path, tmp_path).splitlines()
        assert refused == f"LedgerError {directory != 0o700}"  # there it would not help
        assert read_only in said


def test_h2_files_are_made_with_the_mode_that_is_asked_for(tmp_path) -> None:
    def modes(where: Path) -> set[int]:
        return {file.stat().st_mode & 0o777 for file in where.iterdir()}

    umask = os.umask(0o022)
    try:
        for mode, expected in ((0o700, 0o600), (0o755, 0o644)):
            where = tmp_path / f"{mode:o}"
            with xl.open(where, mode=mode):
                assert where.stat().st_mode & 0o777 == mode
                assert modes(where) == {expected}
    finally:
        os.umask(umask)


# ---- H2: what is there is no ledger ------------------------------------------------------


def foreign_lmdb(path: Path, *names: str, **rows: bytes) -> None:
    with lmdb.open(str(path), max_dbs=20, lib_version=0) as env:
        with env.begin(write=True) as txn:
            txn.put(b"some", b"thing")
            for name in names:
                table = env.open_db(name.encode(), txn=txn)
                for key, value in rows.items():
                    txn.put(key.encode(), value, db=table)
    (path / "lock.mdb").unlink()


def database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path / "data.mdb")) as connection:
        connection.execute("create table t (x)")
        connection.commit()


EVERY_TABLE = records.NAMES
FOREIGN: dict[str, Callable[[Path], object]] = {
    "text": lambda path: (path / "data.mdb").write_text("Dear diary,\n" * 1000),
    "zeros": lambda path: (path / "data.mdb").write_bytes(bytes(1 << 16)),
    "noise": lambda path: (path / "data.mdb").write_bytes(random.Random(1).randbytes(1 << 16)),
    "a database": database,
    "an environment of its own": lambda path: foreign_lmdb(path, "customers"),
    "an environment with a table of ours": lambda path: foreign_lmdb(path, "meta", "topics"),
    "an environment with all tables": lambda path: foreign_lmdb(path, *EVERY_TABLE),
    "a strange format row": lambda path: foreign_lmdb(path, *EVERY_TABLE, format=b"\xc1"),
    "a format row without a version": lambda path: foreign_lmdb(
        path, *EVERY_TABLE, format=msgpack.packb({"a": 1})
    ),
    "a format row of another kind": lambda path: foreign_lmdb(
        path, *EVERY_TABLE, format=msgpack.packb([1, 2])
    ),
    "a format row without an id": lambda path: foreign_lmdb(
        path, *EVERY_TABLE, format=msgpack.packb({"version": 1})
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("readonly", [False, True])
def test_h2_a_foreign_file_is_refused_and_left_as_it_is(tmp_path, kind, readonly) -> None:
    path = tmp_path / "log"
    path.mkdir()
    FOREIGN[kind](path)
    before = digest(path)["data.mdb"]
    with pytest.raises((xl.LedgerVersionError, xl.LedgerCorruptedError), match=r"data\.mdb"):
        xl.open(path, readonly=readonly)
    assert digest(path)["data.mdb"] == before
    (path / "data.mdb").unlink()
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        assert producer.send(b"x") == 0


def rewrite_format(path: str, **changes: Any) -> None:
    with lmdb.open(path, max_dbs=20, lib_version=0) as env, env.begin(write=True) as txn:
        table = env.open_db(b"meta", txn=txn)
        header = {**msgpack.unpackb(txn.get(b"format", db=table)), **changes}
        txn.put(b"format", msgpack.packb(header), db=table)


@pytest.mark.parametrize("readonly", [False, True])
def test_h2_a_newer_format_is_refused(path, readonly) -> None:
    from exclusivelog.local.versions import FORMAT

    assert finish(OPENS, path) == "opened\n"
    for version in (FORMAT + 1, 999, 2, "1"):
        rewrite_format(path, version=version)
        with pytest.raises(xl.LedgerVersionError, match=str(version)):
            xl.open(path, readonly=readonly)
    rewrite_format(path, version=FORMAT, further="a field that a later version may add")
    with xl.open(path, readonly=readonly) as engine:
        assert values(engine.topic("t")) == [b"x"]


@pytest.mark.parametrize("version", [2, 999])
def test_h2_another_lmdb_format_is_refused(path, version) -> None:
    assert finish(OPENS, path) == "opened\n"
    data = Path(path) / "data.mdb"
    sound = data.read_bytes()
    changed = bytearray(sound)
    for page in (0, 4096):
        assert changed[page + 20 : page + 24] == b"\x01\0\0\0"
        changed[page + 20 : page + 24] = version.to_bytes(4, "little")
    data.write_bytes(changed)
    for readonly in (False, True):
        with pytest.raises(xl.LedgerVersionError, match="format"):
            xl.open(path, readonly=readonly)
    data.write_bytes(sound)
    with xl.open(path) as engine:
        assert values(engine.topic("t")) == [b"x"]


@pytest.mark.long
def test_h2_a_file_that_is_cut_off(path) -> None:
    """Wherever data.mdb is cut off, its reader raises an error, and is not killed by SIGBUS for
    reading a page behind the end of the file."""
    with xl.open(path) as engine, engine.topic("t").producer(max_batch_messages=5) as producer:
        for number in range(20):
            producer.send_many([b"%03d" % number] * 5)
    data = Path(path) / "data.mdb"
    sound = data.read_bytes()
    everything = [b"%03d" % (n // 5) for n in range(100)]
    inside = [0, 1, 15, 16, 23, 24, 100, 4095, 4096, 4097, 8191, 8192, 12_288, 16_384, 20_480]
    sizes = [*inside, len(sound) // 2, *(len(sound) - less for less in (8192, 4096, 1))]
    crashed = []
    for size in sizes:
        data.write_bytes(sound[:size])
        for name in ("owners.lock", "lock.mdb"):
            (Path(path) / name).unlink(missing_ok=True)
        done = subprocess.run(
            command(TELLS_ALL, path), capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if done.returncode:
            crashed.append((size, done.returncode, done.stderr[-300:]))
            continue
        *read, last = done.stdout.splitlines()
        if not last.startswith(("Ledger", "no such")):
            read.append(last)
        seen = [word.encode() for text in read for word in text.split()]
        assert len(seen) <= len(everything)
        rest = iter(everything)
        assert all(value in rest for value in seen)
    assert crashed == []
    data.write_bytes(sound)
    with xl.open(path) as engine:
        assert values(engine.topic("t")) == everything


# ---- H2: the lock files ------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        bytes(lockfile.SIZE - 1),
        bytes(lockfile.SIZE + 1),
        bytes(lockfile.SIZE),
        b"XLLOCK\x00\x01",
        random.Random(1).randbytes(lockfile.SIZE),
    ],
    ids=["empty", "short", "shorter", "longer", "zeros", "cut off", "noise"],
)
def test_h2_a_strange_owners_lock_is_refused_by_name(path, content) -> None:
    assert finish(OPENS, path) == "opened\n"
    owners = Path(path) / "owners.lock"
    owners.write_bytes(content)
    with pytest.raises(xl.LedgerVersionError, match=r"owners\.lock"):
        xl.open(path)
    assert owners.read_bytes() == content
    owners.unlink()
    with xl.open(path) as engine:
        assert values(engine.topic("t")) == [b"x"]


def test_h2_a_directory_in_the_place_of_a_file(path) -> None:
    for name in ("owners.lock", "data.mdb", "lock.mdb"):
        os.makedirs(Path(path) / name)
        with pytest.raises(xl.LedgerError):
            xl.open(path)
        os.rmdir(Path(path) / name)
    with xl.open(path):
        pass


@pytest.mark.sampled
@pytest.mark.parametrize("content", [None, b"", b"x", bytes(8192), b"noise" * 1000])
def test_h2_a_strange_lock_mdb_is_made_anew_or_refused(path, content) -> None:
    """It holds nothing worth keeping."""
    assert finish(OPENS, path) == "opened\n"
    lock = Path(path) / "lock.mdb"
    lock.unlink()
    if content is not None:
        lock.write_bytes(content)
    said = finish(TELLS_ALL, path)
    if said.startswith("Ledger"):
        lock.unlink()
        said = finish(TELLS_ALL, path)
    assert said == "x\n"


@pytest.mark.parametrize("readonly", [True, False])
def test_h2_an_open_opens_the_tables_and_the_journal_no_more_than_needed(
    path, monkeypatch, readonly
) -> None:
    """Each time costs four system calls. The journal: to map it, and, to write, for its locks."""
    xl.open(path).close()
    opened, names = files.Directory.open, []

    def counted(directory, name, *args):
        names.append(name)
        return opened(directory, name, *args)

    monkeypatch.setattr(files.Directory, "open", counted)
    with xl.open(path, readonly=readonly):
        assert names.count("data.mdb") == (2 if readonly else 1)
        assert names.count("journal") == (1 if readonly else 2)


def test_h2_a_process_is_stopped_while_opening(path, monkeypatch) -> None:
    """A process that holds the file lock for ever is named as the cause; no call waits for ever."""
    import fcntl

    monkeypatch.setattr(lockfile, "OPENING_TIMEOUT", 0.3)
    with xl.open(path):
        pass
    fd = os.open(Path(path) / "owners.lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(xl.LedgerError, match="locked"):
            within(lambda: xl.open(path))
    finally:
        os.close(fd)
    with xl.open(path):
        pass


def test_h2_more_engines_than_a_ledger_takes(path, monkeypatch) -> None:
    monkeypatch.setattr(slots, "SLOT_COUNT", 3)
    engines = [xl.open(path) for _ in range(3)]
    try:
        with pytest.raises(xl.LedgerFullError, match="engines"):
            xl.open(path)
        engines.pop().close()
        engines.append(xl.open(path))
    finally:
        for engine in engines:
            engine.close()


# ---- H2: paths ---------------------------------------------------------------------------


def test_h2_a_path_that_is_no_directory(tmp_path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path in (file, file / "log", tmp_path / "dangling"):
        for options in ({}, {"readonly": True}, {"create": False}):
            with pytest.raises(xl.LedgerError, match=re.escape(str(tmp_path))) as caught:
                xl.open(path, **options)
            assert not isinstance(caught.value, xl.LedgerIOError)
    assert file.read_text() == "x"


def test_h2_any_other_path_will_do(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for path in ("relative", "a/b/c", tmp_path / "link", "dir with späces\n", str(tmp_path / "é")):
        with xl.open(path) as engine, engine.topic("t").producer() as producer:
            assert producer.send(b"x") == 0
    with xl.open("link") as one, xl.open("real") as other:
        assert one.ledger is other.ledger


REMOTE = ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse", "fuse.sshfs", "fuseblk", "virtiofs"]


@pytest.mark.parametrize("kind", REMOTE)
def test_h2_network_and_fuse_file_systems_are_refused(tmp_path, monkeypatch, kind) -> None:
    monkeypatch.setattr(mounts, "mount_of", lambda path: (kind, "rw"))
    with pytest.raises(xl.LedgerError, match=re.escape(kind)):
        xl.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "zfs", "unknown"])
def test_h2_local_file_systems_are_taken(path, monkeypatch, kind) -> None:
    monkeypatch.setattr(mounts, "mount_of", lambda path: (kind, "rw"))
    with xl.open(path):
        pass


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "overlay"])
def test_h5_memory_is_taken_for_process_only(path, monkeypatch, kind) -> None:
    """An overlay is where its upper directory is."""

    def mount_of(where: str) -> tuple[str, str]:
        upper = kind == "overlay" and where != "/mem"
        return (kind, "rw,upperdir=/mem,workdir=/w") if upper else ("tmpfs", "rw")

    monkeypatch.setattr(mounts, "mount_of", mount_of)
    with pytest.raises(xl.LedgerError, match="survives a power loss"):
        xl.open(path, durability="power")
    with (
        xl.open(path, durability="process") as engine,
        engine.topic("orders").producer() as producer,
    ):
        producer.send(b"x")
    with xl.open(path, durability="power", readonly=True) as reading:  # it acknowledges nothing
        assert [message.value for message in reading.topic("orders").reader()] == [b"x"]


@pytest.mark.parametrize("name", ["plain", "with space", "tab\there", "back\\slash", "é ü", "#"])
def test_h2_a_file_system_is_known_whatever_its_mount_is_called(tmp_path, name) -> None:
    """Or a network share at such a place would not be refused."""
    before = file_system(str(tmp_path))
    with disk(tmp_path / name, 1, "tmpfs") as where:
        (where / "log").mkdir()
        assert file_system(str(where)) == "tmpfs"
        assert file_system(str(where / "log")) == "tmpfs"
        assert file_system(f"{where}-beside") == before
        (tmp_path / "link").symlink_to(where / "log")
        assert file_system(str(tmp_path / "link")) == "tmpfs"


# ---- H2: a read-only engine and a writing one in one process -----------------------------


def test_h2_a_writer_beside_an_open_read_only_engine_is_told_its_name(path) -> None:
    xl.open(path).close()
    with xl.open(path, readonly=True, name="looks"), xl.open(path, readonly=True, name="too"):
        with pytest.raises(xl.LedgerError, match="in this process, by 'looks', 'too'; close"):
            xl.open(path)
    with xl.open(path) as engine, xl.open(path, readonly=True) as reading:
        engine.topic("orders").producer().send(b"1")
        assert rest(reading.topic("orders").reader()) == [b"1"]


def test_h2_a_writer_opens_after_a_read_only_engine_that_was_dropped(path) -> None:
    """A reader of it keeps it open, as with a file."""
    with xl.open(path) as engine:
        engine.topic("orders").producer().send(b"1")
    reader = xl.open(path, readonly=True, name="dropped").topic("orders").reader()
    collect()
    assert next(reader).value == b"1"
    with pytest.raises(xl.LedgerError, match="'dropped'"):
        xl.open(path)
    del reader
    collect()
    kept = xl.open(path, readonly=True, name="kept")
    with pytest.raises(xl.LedgerError, match="by 'kept'; close"):
        xl.open(path)
    kept.close()
    before = len(os.listdir("/proc/self/fd"))
    with xl.open(path) as engine:
        engine.topic("orders").producer().send(b"2")
    assert len(os.listdir("/proc/self/fd")) <= before
