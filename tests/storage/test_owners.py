"""Whose files a ledger's are: those of other users and what is no file are not opened, and new
files can be used by all who could use the others (rule H2).

Whoever may write to a ledger's directory could have root follow a link out of it: root made files
anywhere and gave them away, and copied into a backup what only root may read. A FIFO in a file's
place was waited for. In a user namespace, new files were given to the id that stands for all
others, and the ledger's owner could not open it any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.files import why_foreign
from exclusivelog.local.maintenance import backup
from exclusivelog.local.storage import environment
from testing.children import child, finish, line, script, tell
from testing.processes import PATIENCE, until, values

pytestmark = pytest.mark.once  # durability changes appends, not whose files are opened

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may be other users")

NAMES = ("data.mdb", "journal", "owners.lock", "lock.mdb", "segments")
ALICE, BOB, GROUP = 1234, 1235, 4321


def link(path: Path) -> None:
    path.symlink_to(path.parent.with_name("target"))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)  # the whole path is too long


def other_kind(path: Path) -> None:
    path.write_text("") if path.name == "segments" else path.mkdir()


KINDS = {"link": link, "FIFO": fifo, "socket": sock, "other kind": other_kind}

TRIES = """
    import sys
    import exclusivelog as xl
    for readonly in (True, False):
        try:
            with xl.open(sys.argv[1], readonly=readonly) as engine:
                for message in engine.topic("t").reader():
                    pass
                engine.backup(f"{sys.argv[1]}-backup-{readonly}")
                if not readonly:
                    engine.topic("t").producer().send(bytes(300_000))
        except xl.LedgerError as error:
            print("refused" if "is not opened: it is" in str(error) else error)
        else:
            print("opened")
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for kind in ("link", "FIFO") for name in NAMES]
    + [("journal", "socket"), ("lock.mdb", "socket"), ("data.mdb", "other kind")]
    + [("segments", "other kind")],
)
def test_h2_what_is_no_file_of_a_ledger_is_not_opened(path, name, kind) -> None:
    """Neither followed nor waited for, by no call; and nothing is made elsewhere."""
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(b"x")
    place = Path(path) / name
    if place.exists():
        place.rename(place.with_name("moved"))
    KINDS[kind](place)
    assert finish(TRIES, path, timeout=PATIENCE).split() == ["refused", "refused"]
    assert not Path(path).with_name("target").exists()


def test_h2_a_link_in_the_segments_is_in_no_backup(path, tmp_path) -> None:
    """The pages put `backup` into root's crontab: it copied what only root may read."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 300_200)
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(bytes(300_000))
    segment = next((Path(path) / "segments").iterdir())
    segment.unlink()
    segment.symlink_to(secret)
    with xl.open(path, readonly=True) as engine:
        with pytest.raises(xl.LedgerError, match="symbolic link"):
            engine.backup(tmp_path / "backup")
        with pytest.raises(xl.LedgerError, match="symbolic link"):
            values(engine.topic("t"))
    assert not (tmp_path / "backup" / "segments").exists()


@needs_root
@pytest.mark.parametrize("what", ["a marker of another user", "a link for the marker"])
def test_h4_root_makes_no_backup_in_what_another_user_has_prepared(path, tmp_path, what) -> None:
    """Who owns the directory of the copy could exchange what is in it while root copies."""
    with xl.open(path) as engine:
        engine.topic("t").producer().send(bytes(300_000))
        target, elsewhere = tmp_path / "backup", tmp_path / "elsewhere"
        target.mkdir()
        os.chown(target, ALICE, ALICE)
        elsewhere.mkdir()
        marker = target / "backup-unfinished"
        marker.symlink_to(elsewhere) if "link" in what else marker.mkdir()
        os.chown(marker, ALICE, ALICE, follow_symlinks=False)
        with pytest.raises(xl.LedgerError, match=r"belongs to user 1234|is not empty"):
            engine.backup(target)
        assert list(elsewhere.iterdir()) == []
        marker.unlink() if "link" in what else marker.rmdir()
        engine.backup(target)
    assert (target / "data.mdb").exists()


@needs_root
def test_h4_a_target_that_is_exchanged_meanwhile_gets_nothing(path, tmp_path, monkeypatch) -> None:
    """Its owner puts a link to another directory in its place, while root copies."""
    target, elsewhere = tmp_path / "backup", tmp_path / "elsewhere"
    target.mkdir()
    elsewhere.mkdir()
    original = backup._copy_journal

    def exchange(*args: Any) -> bool:
        if target.is_dir() and not target.is_symlink():
            target.rename(tmp_path / "moved")
            target.symlink_to(elsewhere)
        return original(*args)

    monkeypatch.setattr(backup, "_copy_journal", exchange)
    with xl.open(path) as engine:
        engine.topic("t").producer().send(bytes(300_000))
        with pytest.raises(xl.LedgerError, match="was removed or replaced while the backup"):
            engine.backup(target)
    assert list(elsewhere.iterdir()) == []


@needs_root
def test_h2_a_hard_link_to_roots_file_is_not_opened(path, tmp_path) -> None:
    Path(path).mkdir()
    os.chown(path, ALICE, ALICE)
    secret = tmp_path / "secret"
    secret.write_bytes(b"root's")
    secret.chmod(0o600)
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(b"x")
    for file in filter(Path.is_file, Path(path).rglob("*")):
        os.chown(file, ALICE, ALICE)
    (Path(path) / "lock.mdb").unlink()
    os.link(secret, Path(path) / "lock.mdb")
    with pytest.raises(xl.LedgerError, match="belongs to user 0"):
        xl.open(path)
    assert secret.read_bytes() == b"root's"


@needs_root
def test_h2_a_file_that_is_exchanged_after_its_check_is_not_followed(
    path, tmp_path, monkeypatch
) -> None:
    """The moment between the library's own check and LMDB's opening, which goes by names."""
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(b"x")
    os.chown(path, ALICE, ALICE)
    opened, scratch = environment._next_descriptors, tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(environment, "SCRATCH", (str(scratch),))  # others use the usual one

    def exchange(fd: int) -> list[int]:
        lock = Path(path) / "lock.mdb"
        lock.unlink()
        lock.symlink_to(tmp_path / "target")
        return opened(fd)

    monkeypatch.setattr(environment, "_next_descriptors", exchange)
    with contextlib.suppress(xl.LedgerError), xl.open(path):
        pass
    assert not (tmp_path / "target").exists()
    assert list(scratch.iterdir()) == []


def test_h2_lmdbs_descriptors_are_inherited_by_no_program(path) -> None:
    """A program that a process starts could write to the tables."""
    with xl.open(path):
        words = "ls -l /proc/self/fd"
        said = subprocess.run(words.split(), close_fds=False, capture_output=True, text=True)
    assert said.returncode == 0
    assert path not in said.stdout


# ---- modes -------------------------------------------------------------------------------


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0])
def test_h2_the_mode_of_a_ledger_is_the_one_asked_for(path, mask) -> None:
    """`mode=0o770` under the usual umask made files that the group could not write."""
    with umask(mask), xl.open(path, mode=0o770) as engine:
        with engine.topic("t").producer() as producer:
            producer.send(bytes(300_000))
    modes = {
        str(file.relative_to(path)): stat.S_IMODE(file.stat().st_mode)
        for file in [Path(path), *Path(path).rglob("*")]
    }
    segment = next((Path(path) / "segments").iterdir()).name
    files = ["data.mdb", "journal", "owners.lock", "lock.mdb", f"segments/{segment}"]
    assert modes == {".": 0o770, "segments": 0o770} | dict.fromkeys(files, 0o660)


LEAVES = """
    import os, signal, sys
    import lmdb
    import exclusivelog as xl
    from exclusivelog.local.storage import environment
    path, place, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    environment.SCRATCH = (place,)
    lmdb.open = lambda *_, **__: os.kill(os.getpid(), number)
    xl.open(path)
"""


@pytest.mark.long
def test_h2_what_a_killed_process_has_left_for_lmdb_is_removed(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory with links, by the next process that makes one. Not that of a process which is
    still opening, nor what only looks like it: a ledger of the user's in the same place."""
    place, other = tmp_path / "scratch", f"{path}-2"
    place.mkdir()
    monkeypatch.setattr(environment, "SCRATCH", (str(place),))
    for each in (path, other):
        xl.open(each).close()
        Path(each).chmod(0o770)
    similar = place / "exclusivelog-0123456789abcdef"
    with xl.open(similar) as engine:
        engine.topic("t").producer().send(b"kept")
    with child(LEAVES, path, place, signal.SIGKILL) as process:
        assert process.wait(PATIENCE) == -signal.SIGKILL
    [left] = set(place.iterdir()) - {similar}
    assert sorted(file.name for file in left.iterdir()) == ["data.mdb", "lock.mdb"]
    with child(LEAVES, path, place, signal.SIGSTOP) as process:
        until(lambda: len(set(place.iterdir()) - {similar, left}) == 1)
        [opening] = set(place.iterdir()) - {similar, left}
        until(lambda: len(list(opening.iterdir())) == 2)
        assert not left.exists()
        xl.open(other).close()
        assert set(place.iterdir()) == {similar, opening}
    xl.open(other).close()
    assert set(place.iterdir()) == {similar}
    with xl.open(similar) as engine:
        assert values(engine.topic("t")) == [b"kept"]


# ---- user namespaces ---------------------------------------------------------------------

WARM_UP = """
    import ctypes, os, sys, tempfile
    import exclusivelog as xl
    with tempfile.TemporaryDirectory() as place, xl.open(place + "/log") as engine:
        with engine.topic("t").producer() as producer:  # import all, while root may read it
            producer.send(bytes(300_000))
        list(engine.topic("t").reader())
    while len(os.listdir("/proc/self/task")) > 1:  # one may be on its way out, and has no namespace
        pass
"""
ALICE_IS_HERE = f"""
    os.setgroups([{GROUP}])
    os.setresgid({GROUP}, {GROUP}, {GROUP})
    os.setresuid({ALICE}, {ALICE}, {ALICE})
"""
CONTAINER = """
    path, gid = sys.argv[1], int(sys.argv[2])
    os.setgroups([gid])
    os.setresgid(1235, 1235, 1235)
    os.setresuid(1235, 1235, 1235)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(4, 1, 0, 0, 0)
    assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())
    print("unshared", flush=True)
    input()
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    try:
        with xl.open(path) as engine, engine.topic("t").producer() as producer:
            for number in range(5):
                producer.send(b"%d" % number)
            producer.send(bytes(300_000))
        print("sent", flush=True)
    except xl.LedgerError as error:
        print(str(error), flush=True)
"""


MAKES = """
    xl.open(sys.argv[1], mode=0o770).close()
"""
AGAIN = """
    with xl.open(sys.argv[1]) as engine, engine.topic("t").producer() as producer:
        producer.send(bytes(300_000))
        print(len(list(engine.topic("t").reader())))
"""


def shared_by_a_group(path: str, mode: int, missing: str = "lock.mdb") -> None:
    """A ledger of one user, for all of a group; one of its files is to be made anew."""
    Path(path).mkdir()
    os.chown(path, ALICE, GROUP)
    Path(path).chmod(0o2770)
    finish(script(WARM_UP, ALICE_IS_HERE, MAKES), path)
    Path(path).chmod(mode)
    if missing:
        (Path(path) / missing).unlink()


def in_a_container(path: str, ids: str) -> str:
    """What a program in a user namespace with these ids says, which is of the group."""
    with child(script(WARM_UP, CONTAINER), path, GROUP) as process:
        assert line(process) == "unshared"
        for kind in ("uid", "gid"):
            Path(f"/proc/{process.pid}/{kind}_map").write_text(ids)
        tell(process, "go")
        return line(process)


@pytest.mark.sampled
@needs_root
@pytest.mark.parametrize("ids", ["0 1235 1", "0 100000 65536", "0 1235 1\n1 100001 65535"])
def test_h2_a_container_of_the_group_locks_no_owner_out(reachable, ids) -> None:
    """Its ids are others: the ledger's owner has none there, and is shown as nobody. Files were
    given to the one who has nobody's id outside, or it was an error that ended the engine."""
    shared_by_a_group(reachable, 0o2770)
    if ids.startswith("0 100000"):
        os.chown(reachable, ALICE, GROUP)
    said = in_a_container(reachable, ids)
    assert said == "sent", said
    assert int(finish(script(WARM_UP, ALICE_IS_HERE, AGAIN), reachable)) == 7


@pytest.mark.sampled
@needs_root
@pytest.mark.parametrize(("missing", "kept"), [("lock.mdb", 0), ("", 5)])
def test_h2_a_container_that_cannot_share_its_files_is_refused(reachable, missing, kept) -> None:
    """Without the set-group-ID bit, new files have a group that the owner is not in: the call that
    needs a new file is refused, and what went into the others is the owner's."""
    shared_by_a_group(reachable, 0o770, missing)
    assert "chmod g+s" in in_a_container(reachable, "0 1235 1")
    assert int(finish(script(WARM_UP, ALICE_IS_HERE, AGAIN), reachable)) == kept + 1


# ---- files that were moved there ---------------------------------------------------------


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o770], ids=["private", "of a group"])
@pytest.mark.parametrize("name", ["segments", "journal", "lock.mdb", "owners.lock"])
def test_h2_a_file_of_root_that_a_user_has_moved_there_is_not_opened(
    tmp_path: Path, name: str, mode: int
) -> None:
    """A secret that root has left in a directory of hers: root's `backup` gave her a copy of it."""
    path = tmp_path / "log"
    with xl.open(path, mode=mode) as engine, engine.topic("t").producer() as producer:
        producer.send(bytes(300_000))
    for file in (path, *path.rglob("*")):
        os.chown(file, ALICE, GROUP)
    place = path / name if name != "segments" else next((path / name).iterdir())
    secret = b"secret" * (place.stat().st_size // 6 + 1)
    place.unlink()
    place.write_bytes(secret[: 300_200 if name == "segments" else None])
    place.chmod(0o600)
    with pytest.raises(xl.LedgerError, match="belongs to user 0, and the ledger to user 1234"):
        with xl.open(path, readonly=True) as engine:
            engine.backup(tmp_path / "backup")
    with pytest.raises(xl.LedgerError, match="belongs to user 0, and the ledger to user 1234"):
        with xl.open(path) as engine:
            values(engine.topic("t"))
    backup = (tmp_path / "backup").rglob("*")
    assert not any(b"secretsecret" in each.read_bytes() for each in backup if each.is_file())
    assert place.read_bytes().startswith(b"secretsecret")


@needs_root
def test_h2_what_root_makes_in_a_user_s_ledger_is_the_user_s(tmp_path: Path) -> None:
    """The control: root writes to her ledger, and each file is hers."""
    path = tmp_path / "log"
    with xl.open(path) as engine:
        engine.topic("t")
    for file in (path, *path.rglob("*")):
        os.chown(file, ALICE, GROUP)
    for name in ("owners.lock", "lock.mdb"):
        (path / name).unlink()
    for _ in range(2):
        with xl.open(path) as engine, engine.topic("t").producer() as producer:
            producer.send(bytes(300_000))
    assert {file.stat().st_uid for file in (path, *path.rglob("*"))} == {ALICE}


@needs_root
def test_h2_only_owners_of_a_ledger_are_believed() -> None:
    """The rule by itself, as seen by root."""

    def facts(owner: int, group: int, mode: int, links: int = 1) -> os.stat_result:
        return os.stat_result([mode, 0, 0, links, owner, group, 0, 0, 0, 0])

    def why(
        owner: int,
        links: int,
        place: int,
        mode: int = 0o600,
        data: int | None = 0o600,
        group: int = 0,
        acl: bool = False,
    ) -> str:
        file, directory = stat.S_IFREG | mode, stat.S_IFDIR | place
        return why_foreign(
            facts(owner, group, file, links),
            facts(ALICE, GROUP, directory),
            None if data is None else facts(ALICE, GROUP, stat.S_IFREG | data),
            acl,
        )

    assert not why(ALICE, 1, 0o700)
    assert not why(ALICE, 2, 0o700)
    for shared in (0o700, 0o770):
        assert "belongs to user 0" in why(0, 1, shared)
        assert "belongs to user 0" in why(0, 1, shared, mode=0o640, group=GROUP)
        assert "belongs to user 1235" in why(BOB, 1, shared)
        assert not why(0, 1, shared, mode=0o660, group=GROUP, data=0o660)
        assert not why(BOB, 1, shared, mode=0o666)
        assert not why(0, 1, shared, data=None)  # while the ledger is created
    assert "belongs to user 1235" in why(BOB, 1, 0o700, mode=0o660, acl=True)
    assert not why(BOB, 1, 0o770, mode=0o660, acl=True)
    assert "hard links" in why(0, 2, 0o700)
    assert "hard links" in why(ALICE, 2, 0o770)
