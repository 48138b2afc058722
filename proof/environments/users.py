"""Several users, umasks and permissions."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable
from pathlib import Path

from proof.environments.cases import Scene, case
from proof.environments.cases import become as be

ALICE, BOB, GROUP = 1234, 1235, 4321


def files(ledger: Path) -> list[Path]:
    return [path for path in ledger.rglob("*") if path.is_file()]


def modes_differ(scene: Scene, ledger: Path) -> None:
    """Blame files whose group or rights are not those of data.mdb."""
    wanted = (ledger / "data.mdb").stat()
    for path in files(ledger):
        found = path.stat()
        rights = stat.S_IMODE(found.st_mode) & 0o666
        if (found.st_gid, rights) != (wanted.st_gid, stat.S_IMODE(wanted.st_mode) & 0o666):
            scene.blame("keeps", f"{path.name} has mode {found.st_mode:o}, group {found.st_gid}")


def shared_by_a_group(scene: Scene) -> None:
    """A directory for a group, as an administrator makes it."""
    scene.ledger.mkdir()
    os.chown(scene.ledger, ALICE, GROUP)
    scene.ledger.chmod(0o2770)


@case(0o077, 0o027, 0o002)
def another_umask(scene: Scene, variant: int) -> None:
    """Two users of one group share a ledger; the second one's umask gives the group nothing. What
    it writes must stay within the first one's reach."""
    shared_by_a_group(scene)
    alice = be(ALICE, GROUP, umask=0o007)
    bob = be(BOB, GROUP, umask=scene.pick(variant, 0o007))
    first = scene.actor(before=alice, name="alice")
    scene.works(first.open(mode=0o770))
    scene.works(first.own())
    scene.works(first.send(b"alice"))
    scene.works(first.close())
    second = scene.actor(before=bob, name="bob")
    if scene.works(second.open(mode=0o770)):
        scene.works(second.own())
        scene.works(second.send(b"bob", 300_000))
        scene.works(second.close())
    third = scene.actor(before=alice, name="alice again")
    scene.works(third.open(mode=0o770))
    scene.keeps(actor=third)
    modes_differ(scene, scene.ledger)


@case("once", "first", "locks gone")
def root_once(scene: Scene, variant: str) -> None:
    """Root opens a user's ledger, for a look or a repair: it stays the user's."""
    shared_by_a_group(scene)
    alice = be(ALICE, GROUP)
    first = scene.actor(before=alice)
    if variant != "first":
        scene.works(first.open())
        scene.works(first.own())
        scene.works(first.send(b"1"))
        scene.works(first.close())
    if variant == "locks gone":
        for name in ("owners.lock", "lock.mdb"):
            (scene.ledger / name).unlink()
    root = scene.actor(before=None if scene.struck else alice, name="root")
    scene.works(root.open())
    scene.works(root.own())
    scene.works(root.send(b"root", 300_000))
    scene.works(root.close())
    again = scene.actor(before=alice, name="the user")
    said = again.open()
    if variant == "first" and scene.struck:
        if scene.lives(said):
            scene.keeps(actor=again)
        else:
            scene.keeps()
        return
    scene.works(said)
    scene.works(again.own())
    scene.works(again.send(b"2", 300_000))
    scene.keeps(actor=again)


@case("nothing", "no execute", "files of others", "one file of others")
def no_permission(scene: Scene, variant: str) -> None:
    """The user may not get at it: an error that names what may not be opened."""
    shared_by_a_group(scene)
    alice = be(ALICE, GROUP)
    first = scene.actor(before=alice)
    scene.works(first.open())
    scene.works(first.own())
    scene.works(first.send(b"1"))
    scene.works(first.send(b"2", 300_000))
    scene.works(first.close())
    if scene.struck:
        spoil_rights(scene.ledger, variant)
    second = scene.actor(before=alice)
    scene.refuses(second.open())
    scene.end()
    scene.ledger.chmod(0o2770)
    for path in files(scene.ledger):
        os.chown(path, ALICE, GROUP)
    second = scene.actor(before=alice)
    scene.works(second.open())
    scene.keeps(actor=second)


@case(0o022, 0o077)
def a_mode_for_a_group(scene: Scene, variant: int) -> None:
    """`mode=0o770` under an everyday umask: the group can write, as was asked for."""
    above = scene.where / "shared"
    above.mkdir()
    os.chown(above, ALICE, GROUP)
    scene.where.chmod(0o755)
    ledger = above / "log"
    first = scene.actor(ledger, before=be(ALICE, GROUP, umask=scene.pick(variant, 0o007)))
    scene.works(first.open(mode=0o770))
    scene.works(first.own())
    scene.works(first.send(b"alice", 300_000))
    scene.works(first.close())
    above.chmod(0o755)
    second = scene.actor(ledger, before=be(BOB, GROUP), name="bob")
    if scene.works(second.open()):
        scene.works(second.own())
        scene.works(second.send(b"bob", 300_000))
        scene.keeps(ledger, actor=second)
    modes_differ(scene, ledger)


NEW_USERS = 0x10000000


def in_a_container(ids: str) -> Callable[[], None]:
    """Be root in a new user namespace with these ids, and of the group outside."""

    def change() -> None:
        be(BOB, BOB, GROUP)()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_USERS):
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        for kind in ("uid", "gid"):
            Path(f"/proc/self/{kind}_map").write_text(ids)

    return change


@case()
def a_rootless_container(scene: Scene) -> None:
    """A container of the group makes files in a ledger whose owner has no id there: the owner can
    use them."""
    shared_by_a_group(scene)
    alice = be(ALICE, GROUP)
    first = scene.actor(before=alice, name="alice")
    scene.works(first.open(mode=0o770))
    scene.works(first.close())
    (scene.ledger / "lock.mdb").unlink()
    inside = in_a_container(f"0 {BOB} 1")
    second = scene.actor(before=scene.pick(inside, be(BOB, GROUP)), name="the container")
    scene.works(second.open())
    scene.works(second.own())
    scene.works(second.send(b"1", 300_000))
    scene.works(second.close())
    again = scene.actor(before=alice, name="alice again")
    if scene.works(again.open()):
        scene.works(again.own())
        scene.works(again.send(b"2", 300_000))
        scene.keeps(actor=again)


def spoil_rights(ledger: Path, variant: str) -> None:
    """Take rights away."""
    if variant == "nothing":
        ledger.chmod(0)
    elif variant == "no execute":
        ledger.chmod(0o660)
    else:
        for path in files(ledger) if variant == "files of others" else [ledger / "journal"]:
            os.chown(path, 0, 0)
            path.chmod(0o600)


@case()
def a_reader_without_the_right_to_write(scene: Scene) -> None:
    """Another user may only read: it reads, or gets an error; the writer is not disturbed."""
    owner = scene.owner(before=lambda: os.umask(0o022), opening={"mode": 0o755})
    for path in (scene.ledger, *scene.ledger.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    reader = scene.actor(before=be(BOB, BOB) if scene.struck else None, name="the reader")
    said = reader.open(readonly=True)
    for number in range(50):
        scene.works(owner.send(b"more/%d" % number, 20_000))
    if scene.lives(said) and scene.lives(read := reader.read()):
        scene.has(read.value, scene.acknowledged)
    scene.refuses(scene.actor(before=be(BOB, BOB) if scene.struck else None).open())
    scene.keeps(actor=owner)


@case(twin=False)
def a_parent_that_cannot_be_written(scene: Scene) -> None:
    """A user makes a ledger below root's directory."""
    made = scene.actor(scene.where / "of-root" / "log", before=be(ALICE, GROUP))
    (scene.where / "of-root").mkdir(mode=0o755)
    scene.refuses(made.open(), path=scene.where / "of-root")
    scene.ledger_with(b"1")
    scene.keeps()
