"""Backups, restores, and copies that are made with everyday tools."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import re
import shutil
import subprocess
import tarfile
import threading
import time
from pathlib import Path

from exclusivelog.local.storage.environment import parse_readers
from proof.environments.actors import Actor, Hands
from proof.environments.cases import Scene, case
from proof.shutdowns import do
from testing.disks import another_boot, leave

LOCKS = ("owners.lock", "lock.mdb")
MISSING = re.compile(r"offsets (\d+) to \d+ are missing")


def with_cp(source: Path, target: Path) -> None:
    do("cp", "-a", f"{source}/.", str(target))


def with_tar(source: Path, target: Path) -> None:
    do("sh", "-c", f"tar -C {source} -c . | tar -C {target} -x")


def file_by_file(source: Path, target: Path) -> None:
    """As rsync does it: each file under another name, then renamed."""
    for file in (f for f in source.rglob("*") if f.is_file()):
        place = target / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copy2(file, place.with_name(f".{place.name}.tmp"))
        place.with_name(f".{place.name}.tmp").replace(place)


def replaced(source: Path, target: Path) -> None:
    """Remove everything first."""
    shutil.rmtree(target)
    shutil.copytree(source, target)


RESTORES = {"cp": with_cp, "tar": with_tar, "rsync": file_by_file, "rm and cp": replaced}


def fill(made: Actor, scene: Scene, name: str, count: int = 200) -> None:
    """Send small and large messages, which are acknowledged."""
    for number in range(count):
        value = f"{name}/{number}".encode()
        if not scene.works(made.send(value, 300_000 if number % 40 == 39 else 4000)):
            return


def backed_up(scene: Scene) -> Path:
    """A ledger that goes on, and is closed, after a backup was made of it."""
    made, copy = scene.actor(name="the maker"), scene.where / "backup"
    scene.works(made.open())
    scene.works(made.own())
    fill(made, scene, "before")
    scene.works(made.backup(str(copy)))
    made.acknowledged = []
    fill(made, scene, "later", 200)
    made.kill()
    for name in ("reopened", "once-more"):  # with a reboot in between
        another_boot(scene.ledger)
        made = scene.actor(acknowledged=[])
        scene.works(made.open())
        scene.works(made.own())
        fill(made, scene, name, 100)
        scene.works(made.close())
        made.kill()
    return copy


@case(*(f"{tool} {locks}" for tool in RESTORES for locks in ("over locks", "without locks")))
def a_backup_put_back(scene: Scene, variant: str) -> None:
    """A backup is copied over the ledger, which no process has open, with its lock files there or
    removed; a sender then goes on for a while."""
    copy = backed_up(scene)
    tool = variant.removesuffix(" over locks").removesuffix(" without locks")
    scene.strike(RESTORES[tool], copy, scene.ledger)
    if "without" in variant:
        for name in LOCKS:
            scene.strike((scene.ledger / name).unlink, missing_ok=True)
    scene.keeps()
    made = scene.owner()
    fill(made, scene, "after", 60)
    made.kill()
    scene.keeps()


@case()
def a_backup_put_back_under_an_owner(scene: Scene) -> None:
    """A backup is restored while the ledger is in use: no process hangs or dies of it, and
    one that goes on afterwards finds what was acknowledged afterwards."""
    made, copy = scene.owner(), scene.where / "backup"
    fill(made, scene, "before", 50)
    scene.works(made.backup(str(copy)))
    scene.strike(file_by_file, copy, scene.ledger)
    scene.ends(made)
    scene.lives(made.close())
    made.kill()
    scene.keeps()


@case(0, 1, 2, 3, 4, 5, twin=False)
def a_backup_that_is_killed(scene: Scene, variant: int) -> None:
    """A backup is killed after so much of its work: what is there is refused, or complete; running
    it again succeeds."""
    made, copy = scene.actor(), scene.where / "backup"
    scene.works(made.open())
    scene.works(made.own())
    fill(made, scene, "before", 150)
    made.start("backup", str(copy))
    until_copied(copy, variant)
    made.kill()
    second = scene.actor(copy, acknowledged=[])
    said = second.open()
    if scene.lives(said, copy):
        scene.keeps(actor=second)
        scene.works(second.close())
    elif "LedgerError" not in said.kinds:
        scene.blame("refuses", said)
    second.kill()
    shutil.rmtree(scene.where / "again", ignore_errors=True)
    again = scene.actor()
    scene.works(again.open())
    if said.ok:
        copy = scene.where / "again"
    scene.works(again.backup(str(copy)))
    scene.keeps(copy)


def until_copied(copy: Path, files: int) -> None:
    """Wait until so many files are in the backup."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if files == 0 and copy.exists():
            return
        with contextlib.suppress(FileNotFoundError):  # what is installed meanwhile
            if sum(1 for f in copy.rglob("*") if f.is_file()) >= files > 0:
                return


@case()
def a_backup_to_a_full_disk(scene: Scene) -> None:
    """There is no room for the whole backup: it says so, is refused, and succeeds with room."""
    disk = scene.disk()
    made, copy = scene.actor(), disk / "backup"
    scene.works(made.open())
    scene.works(made.own())
    fill(made, scene, "before", 100)
    if scene.struck:
        leave(disk, 1 << 20)
    scene.refuses(made.backup(str(copy)), path=copy, kind="LedgerFullError")
    if scene.struck:
        scene.refuses(scene.actor(copy).open(create=False), path=copy)
        (disk / "ballast").unlink()
        scene.works(made.backup(str(copy)))
    scene.keeps(copy)


@case()
def a_copy_of_hard_links(scene: Scene) -> None:
    """`cp -al`: two directories share some of their files; neither may be written."""
    scene.ledger_with(b"1", b"2")
    scene.strike(do, "cp", "-al", str(scene.ledger), str(scene.where / "linked"))
    scene.refuses(scene.actor().open())
    if scene.struck:
        linked = scene.where / "linked"
        scene.refuses(scene.actor(linked).open(), path=linked)
        shutil.rmtree(linked)
    scene.end()
    scene.keeps()


@case("cp -a", "cp -a --sparse=always", "tar")
def a_copy_while_in_use(scene: Scene, variant: str) -> None:
    """A cron job copies the files under a sender. The ledger does not mind; the copy is refused,
    or has all that was acknowledged before. It may lack a part of what was sent meanwhile, and then
    names it."""
    owner, copy = scene.owner(), scene.where / "copy"
    fill(owner, scene, "before", 100)
    before = list(scene.acknowledged)
    owner.start("go_on", "meanwhile", 1.0)
    if variant == "tar":
        copy.mkdir()
        scene.strike(with_tar, scene.ledger, copy)
    else:
        scene.strike(do, *variant.split(), str(scene.ledger), str(copy))
    scene.works(owner.said())
    scene.keeps(actor=owner)
    if scene.struck:
        second = scene.actor(copy, acknowledged=[])
        if scene.lives(second.open(), copy):
            missing = MISSING.search(" ".join(second.verify().value or ()))
            if missing is None or int(missing[1]) < len(before):
                scene.keeps(actor=second, acknowledged=before)


@case(0, 100_000, 1_000_000)
def holes_on_a_full_disk(scene: Scene, variant: int) -> None:
    """A copy has holes where the journal has zeros, and the disk has no room to fill them."""
    disk = scene.disk()
    scene.ledger_with(b"1", b"2")
    copy = disk / "log"
    how = scene.pick("always", "never")
    do("cp", "-a", f"--sparse={how}", str(scene.ledger), str(copy))
    if scene.struck:
        leave(disk, variant)
    made = scene.actor(copy)
    for durability in ("power", "process"):
        if scene.lives(made.open(durability=durability), copy):
            if scene.lives(made.own(), copy):
                for number in range(40):
                    if not scene.lives(made.send(b"%s/%d" % (durability.encode(), number), 4000)):
                        break
            scene.lives(made.close(), copy)
    made.kill()
    (disk / "ballast").unlink(missing_ok=True)
    scene.keeps(copy)


def copytree(hands: Hands, target: str) -> None:
    shutil.copytree(hands.path, target)


def tar(hands: Hands, target: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(), mode="w") as archive:
        archive.add(hands.path)


def checksums(hands: Hands, target: str) -> None:
    for file in (f for f in Path(hands.path).rglob("*") if f.is_file()):
        hashlib.sha256(file.read_bytes())


def send_and_read(hands: Hands, how: str, target: str, notes: str) -> None:
    """Send for a while, and read all files of the ledger again and again meanwhile."""
    over = threading.Event()

    def read() -> None:
        for number in itertools.count():
            if over.wait(0.02) or not how:
                return
            with contextlib.suppress(FileNotFoundError, shutil.Error):  # a file that comes or goes
                READS[how](hands, f"{target}/copy-{number}")

    reader = threading.Thread(target=read)
    reader.start()
    assert hands.engine is not None
    for number in range(10):
        # Another process that opens meanwhile must not free this read's place.
        with hands.engine.ledger.environment() as env, hands.engine.ledger.read():
            hands.stream(f"owner/{number}", notes, 0.1)
            if os.getpid() not in {reading.pid for reading in parse_readers(env.readers())}:
                raise AssertionError("the place of this process in the table of readers was freed")
        use_another_topic(hands, f"mine/{number}")
    over.set()
    reader.join()


def use_another_topic(hands: Hands, name: str) -> None:
    """Change the tables."""
    assert hands.engine is not None
    for number in range(5):
        with hands.engine.topic(f"{name}/{number}").producer() as producer:
            producer.send(b"x")
        hands.engine.ledger.checkpoint()


READS = {read.__name__: read for read in (copytree, tar, checksums)}


@case(*READS)
def reading_ones_own_ledger(scene: Scene, variant: str) -> None:
    """A process reads all files of the ledger that it has open, which closes them again: locks
    that belong to a process's files are gone. Then another process opens, and both work."""
    owner = scene.owner()
    reads = scene.pick(variant, "")
    owner.start(send_and_read, reads, str(scene.where), str(scene.where / "notes"))
    begun = time.monotonic()
    while time.monotonic() < begun + 2:
        second = scene.actor()
        scene.works(second.open())
        scene.works(second.ask(use_another_topic, "other"))
        scene.works(second.read())
        scene.works(second.close())
    scene.works(owner.said())
    second = scene.actor()
    scene.works(second.open())
    scene.note(scene.where / "notes")
    scene.fenced(second.own())
    scene.works(owner.close())
    scene.works(second.own())
    scene.works(second.send(b"second"))
    scene.keeps()


@case(twin=False)
def a_backup_beside_its_original(scene: Scene) -> None:
    """A backup is opened elsewhere while the original is in use: two ledgers."""
    owner, copy = scene.owner(), scene.where / "backup"
    scene.works(owner.backup(str(copy)))
    other: list[bytes] = list(scene.acknowledged)
    second = scene.actor(copy, acknowledged=other)
    scene.works(second.open())
    scene.works(second.own("exclusive_with_fencing"))
    for number in range(20):
        scene.works(owner.send(b"original/%d" % number))
        scene.works(second.send(b"copy/%d" % number))
    scene.keeps(actor=owner)
    scene.keeps(actor=second, acknowledged=other)


@case(twin=False)
def a_copy_in_two_passes(scene: Scene) -> None:
    """As rsync users do: once under a writer, once more when it has stopped."""
    owner, copy = scene.owner(), scene.where / "copy"
    copy.mkdir()
    fill(owner, scene, "before", 50)
    file_by_file(scene.ledger, copy)
    fill(owner, scene, "then", 50)
    scene.works(owner.close())
    owner.kill()
    file_by_file(scene.ledger, copy)
    scene.keeps(copy)


@case()
def a_restore_by_another_user(scene: Scene) -> None:
    """Root puts the backup back for a user: the files are root's, and the user gets an error."""
    from proof.environments.cases import become

    scene.where.chmod(0o777)
    user = become(1234, 1234)
    made = scene.actor(before=user)
    scene.works(made.open())
    scene.works(made.own())
    scene.works(made.send(b"1"))
    scene.works(made.backup(str(scene.where / "backup")))
    made.kill()
    shutil.rmtree(scene.ledger)
    if scene.struck:
        subprocess.run(["cp", "-r", scene.where / "backup", scene.ledger], check=True)
    else:
        do("cp", "-a", str(scene.where / "backup"), str(scene.ledger))
    scene.refuses(scene.actor(before=user).open())
    do("chown", "-R", "1234:1234", str(scene.ledger))
    judge = scene.actor(before=user)
    scene.works(judge.open())
    scene.keeps(actor=judge)
