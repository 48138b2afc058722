"""The directory is moved, removed or replaced under those who use it (rule C7)."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from proof.environments.actors import Hands
from proof.environments.cases import SLACK, WINDOW, Scene, case

LARGE = 300_000


def renamed(path: Path) -> None:
    path.rename(path.with_name("log.old"))


def removed(path: Path) -> None:
    shutil.rmtree(path)


def emptied(path: Path) -> None:
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


FATES = {fate.__name__: fate for fate in (renamed, removed, emptied)}


@case(*FATES)
def an_owner_without_its_directory(scene: Scene, variant: str) -> None:
    """`mv`, `rm -rf`, or `rm -rf ledger/*` under an owner: it gets an error, and acknowledges
    nothing more."""
    owner = scene.owner()
    scene.strike(FATES[variant], scene.ledger)
    scene.ends(owner)
    scene.lives(owner.close())
    if variant == "renamed" and scene.struck:
        scene.keeps(scene.where / "log.old")
    elif not scene.struck:
        scene.keeps()


@case(*FATES)
def a_new_ledger_at_the_old_path(scene: Scene, variant: str) -> None:
    """Another process opens the path anew, and owns the topic there. The old owner's large entries
    must not get into the new ledger, nor may both be acknowledged for longer than the window."""
    old, fresh = scene.owner(acknowledged=[]), scene.acknowledged
    scene.works(old.send(b"old/large", LARGE))
    scene.strike(FATES[variant], scene.ledger)
    new = scene.actor(acknowledged=fresh, name="the new owner")
    if not scene.struck:
        scene.works(old.close())
    scene.works(new.open())
    scene.works(new.own())
    for number in range(10):
        scene.works(new.send(b"new/large/%d" % number, LARGE))
        scene.lives(old.send(b"old/large/%d" % number, LARGE)) if scene.struck else None
    if scene.struck:
        scene.ends(old)
    for number in range(10):
        scene.works(new.send(b"new/more/%d" % number, LARGE))
    scene.keeps(actor=new)
    if variant == "renamed" and scene.struck:
        old.kill()
        scene.keeps(scene.where / "log.old", [])


@case(*FATES)
def a_waiter_without_its_directory(scene: Scene, variant: str) -> None:
    """A waiting producer gets an error, too, instead of waiting for ever."""
    owner = scene.owner()
    waiter = scene.actor(name="the waiter")
    scene.works(waiter.open(keepalive=4.0))
    waiter.start("own", "wait_for_exclusive", timeout=60 if scene.struck else 15)
    time.sleep(0.3)
    scene.strike(FATES[variant], scene.ledger)
    if not scene.struck:
        scene.works(owner.close())
    said = waiter.said(WINDOW + 2 * SLACK + 2)
    scene.refuses(said)
    scene.keeps() if not scene.struck else None
    if scene.struck:
        scene.ends(owner)


@case()
def a_symbolic_link_that_is_switched(scene: Scene) -> None:
    """The path is a link, as in blue-green deployments; it leads to another ledger from now on."""
    link = scene.where / "current"
    (scene.where / "blue").mkdir()
    (scene.where / "green").mkdir()
    link.symlink_to("blue")
    owner = scene.owner(link / "log")
    if scene.struck:
        (scene.where / "next").symlink_to("green")
        (scene.where / "next").rename(link)
    scene.ends(owner, link / "log")
    scene.lives(owner.close(), link / "log")
    scene.keeps(scene.where / "blue" / "log")


@case()
def a_parent_that_is_renamed(scene: Scene) -> None:
    """A directory above the ledger gets another name."""
    parent = scene.where / "parent"
    parent.mkdir()
    owner = scene.owner(parent / "log")
    scene.strike(parent.rename, scene.where / "moved")
    scene.ends(owner, parent / "log")
    scene.lives(owner.close(), parent / "log")
    scene.keeps(scene.where / scene.pick("moved", "parent") / "log")


def open_twice(hands: Hands, recreate: bool) -> list[str]:
    """Open the path, let it be made anew, open it again; what the second one has."""
    hands.open()
    hands.own()
    hands.send(b"old")
    if recreate:
        shutil.rmtree(hands.path)
    old, hands.producer = hands.engine, None
    hands.open()
    found = [value.decode() for value in hands.read()]
    hands.own("exclusive_with_fencing")
    hands.send(b"new")
    assert old is not None
    return found


@case("in the same process")
def a_path_that_is_made_anew(scene: Scene, variant: str) -> None:
    """One process opens a path that has been removed while it had it open: it gets a new ledger, or
    an error; not the old one, which no other process will ever see."""
    made = scene.actor()
    said = made.ask(open_twice, scene.struck)
    scene.lives(said)
    if said.ok and scene.struck and said.value:
        scene.blame("keeps", f"it got the removed ledger: {said.value}")
    if said.ok:
        scene.acknowledged += [b"new"] if scene.struck else [b"old", b"new"]
    scene.keeps()


@case()
def moved_and_moved_back(scene: Scene) -> None:
    """A tool moves the directory away for a moment: nothing that is acknowledged is lost."""
    owner = scene.owner()
    owner.start("stream", "w", str(scene.where / "notes"), 1.0)
    time.sleep(0.3)
    scene.strike(scene.ledger.rename, scene.where / "away")
    time.sleep(0.2)
    scene.strike((scene.where / "away").rename, scene.ledger)
    scene.lives(owner.said())
    # The stream ends with the first error, and has noted all before: hiding it does no harm.
    scene.judged.discard("refuses")
    scene.note(scene.where / "notes")
    scene.end()
    scene.keeps()


def open_relative(hands: Hands) -> None:
    """Open by a relative path, then go elsewhere."""
    os.chdir(Path(hands.path).parent)
    hands.open("log")
    os.chdir("/")


@case(twin=False)
def a_relative_path_and_chdir(scene: Scene) -> None:
    """A daemon opens by a relative path, and changes to `/`: its path means what it meant."""
    made = scene.actor()
    scene.works(made.ask(open_relative))
    scene.works(made.own())
    scene.works(made.send(b"1", LARGE))
    time.sleep(WINDOW + 0.5)
    scene.works(made.send(b"2", LARGE))
    scene.works(made.backup(str(scene.where / "backup")))
    scene.keeps(actor=made)


@case(twin=False)
def two_names_by_a_link(scene: Scene) -> None:
    """Processes that come by a symbolic link and by the real path share one ledger."""
    (scene.where / "link").symlink_to(scene.ledger)
    owner = scene.owner()
    second = scene.actor(scene.where / "link")
    scene.works(second.open())
    scene.fenced(second.own())
    owner.kill()
    scene.works(second.own("wait_for_exclusive", timeout=10))
    scene.works(second.send(b"3"))
    scene.keeps()
