"""What others do to single files of a ledger, and what a path may be."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgpack

from proof.environments.cases import KEEPALIVE, Scene, case
from proof.shutdowns import do

NAMES = ("data.mdb", "journal", "segments", "owners.lock", "lock.mdb")


def file_of(ledger: Path, name: str) -> Path:
    """The file of that name; of the segments, the first."""
    return min((ledger / "segments").iterdir()) if name == "segments" else ledger / name


def halve(ledger: Path, name: str) -> None:
    path = file_of(ledger, name)
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


def empty(ledger: Path, name: str) -> None:
    os.truncate(file_of(ledger, name), 0)


def remove(ledger: Path, name: str) -> None:
    file_of(ledger, name).unlink()


DAMAGES: dict[str, Callable[[Path, str], None]] = {
    "halved": halve,
    "emptied": empty,
    "removed": remove,
}
DAMAGED = [f"{name} {damage}" for name in NAMES for damage in DAMAGES]


def whole(scene: Scene) -> None:
    """A closed ledger with small and large messages, some of them in the journal alone."""
    scene.ledger_with(*(b"%d" % number for number in range(20)))
    made = scene.owner()
    scene.works(made.send(b"large", 300_000))
    scene.works(made.send(b"small"))
    made.kill()


@case(*DAMAGED)
def a_file_damaged_while_closed(scene: Scene, variant: str) -> None:
    """A file is cut off or removed while no process has the ledger open. The next one gets an
    error that names what is missing, or misses nothing."""
    whole(scene)
    name, _, damage = variant.partition(" ")
    scene.strike(DAMAGES[damage], scene.ledger, name)
    scene.tells_or_keeps(scene.acknowledged)


@case(*DAMAGED)
def a_file_damaged_under_an_owner(scene: Scene, variant: str) -> None:
    """The same under a living owner: no process dies or hangs of it, and the next one
    gets an error that names what is missing, or misses nothing."""
    whole(scene)
    owner, reader = scene.owner(), scene.actor(name="the reader")
    scene.works(reader.open(keepalive=KEEPALIVE))
    scene.works(reader.read())
    name, _, damage = variant.partition(" ")
    scene.strike(DAMAGES[damage], scene.ledger, name)
    for number in range(30):
        said = owner.send(b"after/%d" % number, 300_000 if number % 10 == 5 else 3000)
        if not scene.lives(said):
            break
        if not scene.lives(reader.read()):
            break
    scene.lives(owner.close())
    scene.lives(reader.close())
    scene.end()
    scene.tells_or_keeps(scene.acknowledged)


# ---- other versions ----------------------------------------------------------------------


def another_lock_file(ledger: Path) -> None:
    """Of another version: its magic and its size differ."""
    path = ledger / "owners.lock"
    data = bytearray(path.read_bytes() if path.exists() else bytes(1 << 16))
    data[:8] = b"XLLOCK\x00\xff"[::-1]
    path.write_bytes(bytes(data) + bytes(4096))


def a_newer_format(ledger: Path) -> None:
    """As a later version leaves it."""
    with lmdb.open(str(ledger), max_dbs=64, lock=False) as env:
        meta = env.open_db(b"meta", create=False)
        with env.begin(write=True, db=meta) as txn:
            header = msgpack.unpackb(txn.get(b"format"))
            txn.put(b"format", msgpack.packb({**header, "version": 10**6}))


def a_newer_journal(ledger: Path) -> None:
    """Its magic has another version."""
    with (ledger / "journal").open("r+b") as file:
        file.seek(7)
        file.write(b"\xfe")


CHANGES = {change.__name__: change for change in (a_newer_format, a_newer_journal)}


@case(*CHANGES)
def another_version_was_here(scene: Scene, variant: str) -> None:
    """A newer version has used the ledger: this one refuses it, and changes nothing."""
    whole(scene)
    scene.strike(CHANGES[variant.replace(" ", "_")], scene.ledger)
    before = {name: (scene.ledger / name).read_bytes() for name in ("data.mdb", "journal")}
    made = scene.actor()
    scene.refuses(made.open(), kind="LedgerVersionError")
    if scene.struck and any(
        (scene.ledger / name).read_bytes() != data for name, data in before.items()
    ):
        scene.blame("refuses", "the refused ledger was changed")
    scene.end()
    scene.keeps() if not scene.struck else None


@case("closed", "beside an owner")
def a_lock_file_of_another_version(scene: Scene, variant: str) -> None:
    """`owners.lock` is another version's: that is found before either writes."""
    if variant == "closed":
        whole(scene)
        scene.strike(another_lock_file, scene.ledger)
        scene.tells_or_keeps(scene.acknowledged)
        return
    owner = scene.owner()
    scene.strike(another_lock_file, scene.ledger)
    second = scene.actor()
    scene.refuses(second.open())
    scene.lives(owner.send(b"3"))
    scene.lives(owner.close())
    scene.keeps() if not scene.struck else None


# ---- attributes --------------------------------------------------------------------------


@case("journal", "data.mdb", "owners.lock", "segments")
def an_immutable_file(scene: Scene, variant: str) -> None:
    """`chattr +i`, as hardening scripts do it."""
    disk = scene.disk()
    ledger = disk / "log"
    owner = scene.owner(ledger)
    scene.works(owner.send(b"large", 300_000))
    scene.works(owner.close())
    target = str(ledger / variant)
    scene.strike(do, "chattr", "+i", target)
    made = scene.actor(ledger)
    said = made.open()
    if variant == "segments":
        scene.works(said)
        scene.works(made.own())
        said = made.send(b"another", 30 << 20)
        scene.lives(said, ledger)
    else:
        scene.refuses(said, path=ledger)
    scene.end()
    do("chattr", "-i", target)
    scene.keeps(ledger)


@case()
def a_directory_to_append_to(scene: Scene) -> None:
    """`chattr +a` on the directory: files may be made there, none may be removed."""
    disk = scene.disk()
    ledger = disk / "log"
    scene.ledger_with(b"1", path=ledger)
    scene.strike(do, "chattr", "+a", str(ledger))
    made = scene.actor(ledger)
    if scene.lives(made.open(), ledger) and scene.lives(made.own(), ledger):
        for number in range(20):
            if not scene.lives(made.send(b"more/%d" % number, 300_000), ledger):
                break
    made.kill()
    do("chattr", "-a", str(ledger))
    scene.keeps(ledger)


# ---- paths -------------------------------------------------------------------------------


@case()
def an_empty_path(scene: Scene) -> None:
    """`open("")`, of a variable that was not set: no ledger in the working directory."""
    made = scene.actor(before=lambda: os.chdir(scene.where))
    scene.refuses(made.open(scene.pick("", "log")), "path", path="", kind="ValueError")
    if scene.struck and list(scene.where.iterdir()):
        scene.blame("refuses", f"it made {[f.name for f in scene.where.iterdir()]}")
    scene.end()
    if not scene.struck:
        scene.ledger_with(b"1")
    scene.keeps() if not scene.struck else None


@case("files", "a data.mdb of another program", "a file")
def what_is_no_ledger(scene: Scene, variant: str) -> None:
    """The path holds something else, a home directory, say: nothing is mixed into it."""
    scene.ledger_with(b"1", path=scene.where / "good")
    if not scene.struck:
        (scene.where / "good").rename(scene.ledger)
    elif variant == "files":
        scene.ledger.mkdir()
        (scene.ledger / "thesis.txt").write_text("years of work")
    elif variant == "a file":
        scene.ledger.write_text("years of work")
    else:
        with lmdb.open(str(scene.ledger)) as env, env.begin(write=True) as txn:
            txn.put(b"years", b"of work")
    before = sorted(f.name for f in scene.ledger.iterdir()) if scene.ledger.is_dir() else []
    scene.refuses(scene.actor().open())
    if scene.struck and before:
        after = sorted(f.name for f in scene.ledger.iterdir())
        if after != before:
            scene.blame("refuses", f"{after} is there now")
    scene.end()
    scene.keeps() if not scene.struck else None


PATHS: dict[str, bytes] = {
    "newline": b"a\nb",
    "not UTF-8": b"caf\xe9",
    "spaces": b" a  b ",
    "dash": b"-rf",
    "escape": b"a\\012b",
    "long": b"x" * 255,
    "percent": b"%s%n",
    "quotes": b"'\"`$(id)",
}


@case(*PATHS, twin=False)
def a_strange_path(scene: Scene, variant: str) -> None:
    """Names that shells, logs and formats stumble over: they work like any other."""
    path = Path(os.fsdecode(os.fsencode(scene.where) + b"/" + PATHS[variant])) / "log"
    path.parent.mkdir()
    owner = scene.owner(path)
    scene.works(owner.send(b"large", 300_000))
    scene.works(owner.backup(os.fspath(path.with_name("backup"))))
    second = scene.actor(path)
    scene.works(second.open())
    scene.fenced(second.own())
    owner.kill()
    scene.keeps(path)
    scene.keeps(path.with_name("backup"))


@case()
def a_path_that_is_too_long(scene: Scene) -> None:
    """More than PATH_MAX: refused, with an error that can be read."""
    deep = scene.where.joinpath(*["d" * 200] * scene.pick(25, 3))
    if not scene.struck:
        deep.mkdir(parents=True)
    made = scene.actor(deep / "log")
    scene.refuses(made.open(), path=str(scene.where))
    scene.end()
    if not scene.struck:
        scene.ledger_with(b"1", path=deep / "log")
        scene.keeps(deep / "log")


@case(twin=False)
def a_path_just_short_enough(scene: Scene) -> None:
    """The directory's own path fits into PATH_MAX; those of its files do not."""
    deep = scene.where
    while len(os.fspath(deep)) < 4085 - 201:
        deep = deep / ("d" * 200)
    deep = deep / ("d" * max(1, 4085 - len(os.fspath(deep)) - 1))
    subprocess.run(["mkdir", "-p", deep], check=True)
    made = scene.actor(deep)
    if not scene.lives(made.open(), str(scene.where)):
        return
    scene.works(made.own())
    scene.works(made.send(b"1", 300_000))
    scene.works(made.send(b"2"))
    made.kill()
    scene.keeps(deep)


@case(twin=False)
def a_log_file_in_the_directory(scene: Scene) -> None:
    """An operator lets the program log into the ledger's own directory, once it is there."""
    owner = scene.owner()
    with (scene.ledger / "program.log").open("w") as file:
        file.write("line\n" * 1000)
    scene.works(owner.send(b"3"))
    time.sleep(0.2)
    owner.kill()
    made = scene.actor(acknowledged=[])
    if scene.lives(made.open()):
        scene.keeps(actor=made)
        if not (scene.ledger / "program.log").exists():
            scene.blame("keeps", "the log file is gone")


# ---- files of others ---------------------------------------------------------------------


def a_link_out(path: Path) -> None:
    path.symlink_to(path.parent.parent / "elsewhere")


STRANGERS: dict[str, Callable[[Path], None]] = {"link": a_link_out, "FIFO": os.mkfifo}


@case(*(f"{name} {kind}" for kind in STRANGERS for name in NAMES))
def a_stranger_in_a_files_place(scene: Scene, variant: str) -> None:
    """A link or a FIFO is where a file of the ledger was: no command follows it, waits for it, or
    makes a file elsewhere."""
    whole(scene)
    name, _, kind = variant.rpartition(" ")
    path = scene.ledger / name
    if scene.struck:
        path.rename(path.with_name("moved"))
        STRANGERS[kind](path)
    for readonly in (True, False):
        made = scene.actor()
        said = made.open(readonly=readonly)
        if said.ok and name == "segments":  # opened only by calls that need them
            said = made.backup(str(scene.where / f"backup-{readonly}"))
        scene.refuses(said)
        made.kill()
    if (scene.where / "elsewhere").exists():
        scene.blame("refuses", "a file was made at the link's target")
    if scene.struck:
        path.unlink()
        path.with_name("moved").rename(path)
    scene.end()
    scene.keeps()
