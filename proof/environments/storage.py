"""Disks that share, copy, roll back and rot; and full ones on which topics share their files."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from proof.environments.actors import Hands
from proof.environments.cases import Scene, case
from proof.environments.files import file_of, whole
from proof.shutdowns import do
from testing.disks import leave

# ---- copies that share blocks ------------------------------------------------------------


@case("btrfs cp -a", "xfs cp -a", "xfs reflink")
def a_copy_that_shares_its_blocks(scene: Scene, variant: str) -> None:
    """A closed ledger is copied within its disk; then both are written, each its own, until the
    disk is full, and go on when there is room; on btrfs, the copy once it is opened again."""
    kind, _, tool = variant.partition(" ")
    disk = scene.disk(kind, megabytes=400)
    ledger, copy = disk / "log", disk / "copy"
    scene.ledger_with(*(b"%d" % number for number in range(20)), path=ledger)
    before = list(scene.acknowledged)
    how = scene.pick("always" if tool == "reflink" else "auto", "never")
    do("cp", "-a", f"--reflink={how}", str(ledger), str(copy))
    there: list[bytes] = list(before)
    first, second = scene.owner(ledger), scene.owner(copy, acknowledged=there)
    leave(disk, 4 << 20)
    for each, path in ((first, ledger), (second, copy)):
        for number in range(60):
            if not scene.lives(each.send(b"more/%d" % number, 200_000), path):
                break
    (disk / "ballast").unlink()
    if kind == "btrfs" and not second.send(b"room").ok:
        second.kill()
        second = scene.owner(copy, acknowledged=there)
    for each in (first, second):
        scene.works(each.send(b"after", 200_000))
        scene.works(each.close())
        each.kill()
    scene.keeps(ledger)
    scene.keeps(copy, there)


@case("closed", "beside an owner", tools=("btrfs", "mkfs.btrfs"))
def a_btrfs_snapshot_rolled_back(scene: Scene, variant: str) -> None:
    """A subvolume is replaced by its snapshot, closed or under its owner, who is refused from then
    on. The ledger is as it was, and goes on."""
    disk = scene.disk("btrfs", megabytes=300)
    live, saved = disk / "live", disk / "saved"
    do("btrfs", "-q", "subvolume", "create", str(live))
    owner = scene.owner(live / "log")
    scene.works(owner.send(b"large", 300_000))
    before = list(scene.acknowledged)
    do("btrfs", "-q", "subvolume", "snapshot", str(live), str(saved))
    scene.works(owner.send(b"behind the snapshot", 300_000))
    if variant == "closed":
        scene.works(owner.close())
        owner.kill()
    if scene.struck:
        live.rename(disk / "away")
        saved.rename(live)
        scene.acknowledged[:] = before
    if variant != "closed":
        scene.ends(owner, live / "log")
        owner.kill()
    scene.keeps(live / "log")


@case("ext4", "xfs", "btrfs")
def a_copy_on_write_disk_that_is_full(scene: Scene, variant: str) -> None:
    """A disk is filled to its last byte under an owner: errors, and it goes on with room. Closed,
    it can be opened to read."""
    disk = scene.disk(variant, megabytes=400)
    owner = scene.owner(disk / "log")
    if scene.struck:
        leave(disk, 1 << 20)
        for number in range(300):
            if not scene.lives(owner.send(b"full/%d" % number, 60_000), disk / "log"):
                break
        reader = scene.actor(disk / "log", name="the reader", acknowledged=[])
        scene.works(reader.open(readonly=True))
        if scene.works(said := reader.read()):
            scene.has(said.value, list(scene.acknowledged))
        reader.kill()
        (disk / "ballast").unlink()
    for number in range(20):
        scene.works(owner.send(b"room/%d" % number, 60_000))
    scene.works(owner.close())
    owner.kill()
    scene.keeps(disk / "log")


# ---- topics that share their files -------------------------------------------------------


def fill_a_disk(hands: Hands, most: int) -> int:
    """Large messages of "bulk", and now and then one of the topic, until the disk is full."""
    import exclusivelog as xl

    assert hands.engine is not None
    count = 0
    with hands.engine.topic("bulk").producer() as bulk:
        try:
            for number in range(most):
                bulk.send(random.Random(number).randbytes(400_000))
                if number % 8 == 0:
                    hands.send(b"rare/%d" % count, 200_000)
                    count += 1
        except xl.LedgerFullError:
            pass
    return count


def delete_bulk(hands: Hands) -> None:
    """Free what the disk is full of."""
    assert hands.engine is not None
    hands.engine.delete_topic("bulk")


@case("ext4", "xfs", "btrfs")
def a_topic_that_shares_its_files_is_deleted(scene: Scene, variant: str) -> None:
    """On a full disk: its space is free for others, and the other topic has all of its messages."""
    disk = scene.disk(variant, megabytes=400)
    leave(disk, 120 << 20)
    (disk / "ballast").rename(disk / "others")
    owner = scene.owner(disk / "log")
    said = owner.ask(fill_a_disk, scene.pick(10_000, 50))
    if scene.works(said):
        scene.acknowledged += [b"rare/%d" % number for number in range(said.value)]
    if scene.struck:
        leave(disk, 0)
    before = used(disk / "log")
    scene.works(owner.ask(delete_bulk))
    if scene.struck and used(disk / "log") > before // 2:
        scene.blame("works", f"it has {used(disk / 'log')} bytes of {before}")
    scene.works(owner.send(b"large", 1_000_000))
    scene.works(owner.close())
    owner.kill()
    scene.keeps(disk / "log")


def used(ledger: Path) -> int:
    """The bytes of its segments."""
    return sum(file.stat().st_size for file in (ledger / "segments").iterdir())


# ---- bit rot -----------------------------------------------------------------------------


def rot(path: Path, seed: str) -> None:
    """Flip three bits of its contents."""
    dice, data = random.Random(seed), bytearray(path.read_bytes())
    there = [at for at in range(4096, len(data)) if data[at]] or [0]
    for _ in range(3):
        data[dice.choice(there)] ^= 1 << dice.randrange(8)
    with path.open("r+b") as file:
        file.write(data)


ROTTEN = ("journal", "segments", "owners.lock", "lock.mdb")


@case(*ROTTEN)
def bits_that_rot_while_closed(scene: Scene, variant: str) -> None:
    """A file's bits change on the disk while no process has the ledger open: nothing is missing
    without an error."""
    whole(scene)
    scene.strike(rot, file_of(scene.ledger, variant), variant)
    scene.tells_or_keeps(scene.acknowledged)


@case("journal", "segments")
def bits_that_rot_under_an_owner(scene: Scene, variant: str) -> None:
    """The same while an owner sends: it goes on, or gets an error."""
    whole(scene)
    owner = scene.owner()
    scene.works(owner.send(b"large/again", 300_000))
    scene.strike(rot, file_of(scene.ledger, variant), variant)
    for number in range(10):
        if not scene.lives(owner.send(b"after/%d" % number, 3000)):
            break
    scene.lives(owner.read())
    scene.lives(owner.close())
    scene.end()
    scene.tells_or_keeps(scene.acknowledged)


@case("journal", "segments")
def bits_that_rot_in_a_backup(scene: Scene, variant: str) -> None:
    """Of a backup: what is restored from it names what is missing."""
    whole(scene)
    made, copy = scene.owner(), scene.where / "backup"
    scene.works(made.send(b"large/again", 300_000))
    scene.works(made.backup(str(copy)))
    scene.works(made.close())
    scene.end()
    scene.strike(rot, file_of(copy, variant), variant)
    shutil.rmtree(scene.ledger)
    os.rename(copy, scene.ledger)
    scene.tells_or_keeps(scene.acknowledged)
