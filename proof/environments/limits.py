"""Limits of a process, a user, and a cgroup."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from proof.environments.actors import Actor, Hands
from proof.environments.cases import KEEPALIVE, Scene, Skip, become, case
from testing.processes import await_stop, until

CGROUPS = Path("/sys/fs/cgroup")


def limited(which: int, soft: int) -> Callable[[], None]:
    """A limit for the actor."""

    def change() -> None:
        resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))

    return change


def change_limit(hands: Hands, which: int, soft: int) -> None:
    """A limit, changed while it runs."""
    limited(which, soft)()


@case("memory", "processes")
def a_limit_at_open(scene: Scene, variant: str) -> None:
    """RLIMIT_AS smaller than the smallest map, or RLIMIT_NPROC without room for a thread: the error
    says which limit, or which argument, it is about."""
    (scene.where).chmod(0o777)
    if variant == "memory":
        made = scene.actor()
        if scene.struck:
            made.ask(change_limit, resource.RLIMIT_AS, 1 << 30)
        words: tuple[str, ...] = ("map_size",)
    else:
        made = scene.actor(before=become(1300, 1300))
        if scene.struck:
            made.ask(change_limit, resource.RLIMIT_NPROC, 1)
        words = ("RLIMIT_NPROC",)
    scene.refuses(made.open(), *words)
    which = resource.RLIMIT_AS if variant == "memory" else resource.RLIMIT_NPROC
    made.ask(change_limit, which, resource.getrlimit(which)[1])
    if scene.struck:
        scene.works(made.open())
    scene.works(made.own())
    scene.works(made.send(b"1"))
    scene.keeps(actor=made)


@case()
def no_threads_for_an_open_engine(scene: Scene) -> None:
    """RLIMIT_NPROC is reached after the engine was opened, when a producer or reader needs a
    thread."""
    scene.where.chmod(0o777)
    made = scene.actor(before=become(1301, 1301))
    scene.works(made.open())
    if scene.struck:
        made.ask(change_limit, resource.RLIMIT_NPROC, 1)
    if scene.lives(made.own()):
        for number in range(5):
            scene.lives(made.send(b"%d" % number, 300_000))
        scene.lives(made.ask(send_async))
    made.ask(change_limit, resource.RLIMIT_NPROC, resource.getrlimit(resource.RLIMIT_NPROC)[1])
    scene.lives(made.close())
    made.kill()
    scene.ledger_with(b"last")
    scene.keeps()


def send_async(hands: Hands) -> None:
    """Send, and wait for it elsewhere."""
    assert hands.producer is not None
    hands.producer.send_async(b"async").result(10)


@case("power", "process")
def a_file_size_limit(scene: Scene, variant: str) -> None:
    """RLIMIT_FSIZE strikes in the middle of a large message: an error, no SIGXFSZ; with more, the
    same producer goes on."""
    owner = scene.owner(opening={"durability": variant})
    if scene.struck:
        owner.ask(change_limit, resource.RLIMIT_FSIZE, 1 << 20)
    scene.refuses(owner.send(b"too-large", 20 << 20), kind="LedgerFullError")
    scene.lives(owner.send(b"small"))
    owner.ask(change_limit, resource.RLIMIT_FSIZE, -1)
    scene.works(owner.send(b"large", 20 << 20))
    scene.keeps(actor=owner)


@case()
def memory_that_runs_out(scene: Scene) -> None:
    """RLIMIT_AS strikes an open engine in the middle of large messages: an error each time, and it
    works again."""
    owner = scene.owner()
    used = int(owner.ask(address_space).value or 0)
    if scene.struck:
        owner.ask(change_limit, resource.RLIMIT_AS, used + (30 << 20))
        for number in range(5):
            said = owner.send(b"huge/%d" % number, 20 << 20)
            if "MemoryError" not in said.kinds:
                scene.lives(said)
        owner.ask(change_limit, resource.RLIMIT_AS, -1)
    scene.works(owner.send(b"3", 20 << 20))
    scene.keeps(actor=owner)


def address_space(hands: Hands) -> int:
    """Bytes that are mapped now."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# ---- cgroups -----------------------------------------------------------------------------


@contextlib.contextmanager
def cgroup(controller: str) -> Iterator[Path]:
    """A group of the first version's controller, as long as the block runs."""
    group = CGROUPS / controller / f"exclusivelog-{os.getpid()}"
    if not (CGROUPS / controller / "cgroup.procs").exists():
        raise Skip(f"there is no cgroup controller {controller} at {CGROUPS}")
    try:
        group.mkdir()
    except OSError as error:
        raise Skip(f"{group} cannot be made: {error.strerror}") from error
    try:
        yield group
    finally:
        for task in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(task)
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)


def stop_outside(
    stopped: Actor, witness: Actor, stop: Callable[[], object], go_on: Callable[[], object]
) -> None:
    """Stop an actor at any moment but one inside the ledger, where it would hold up all others."""

    def is_outside() -> bool:
        stop()
        if witness.ask(who_is_inside).value != stopped.pid:
            return True
        go_on()
        return False

    until(is_outside)


def who_is_inside(hands: Hands) -> int | None:
    """The process that is inside the ledger's critical section."""
    assert hands.engine is not None
    inside = hands.engine.inside()
    return None if inside is None else inside.pid


@case()
def frozen_beyond_its_keepalive(scene: Scene) -> None:
    """A container's owner is paused for longer than its keepalive: another takes over, and the
    old one, once it goes on, is fenced."""
    with cgroup("freezer") as group:
        owner = scene.owner(opening={"keepalive": 1.0})
        second = scene.actor(name="the second")
        scene.works(second.open(keepalive=1.0))
        (group / "cgroup.procs").write_text(str(owner.pid))
        state = group / "freezer.state"

        def freeze() -> None:
            state.write_text("FROZEN")
            until(lambda: state.read_text().strip() == "FROZEN")

        if scene.struck:
            stop_outside(owner, second, freeze, lambda: state.write_text("THAWED"))
        else:
            scene.works(owner.close())
        try:
            time.sleep(1.5)
            scene.works(second.own("exclusive", timeout=10))
            scene.works(second.send(b"second"))
        finally:
            state.write_text("THAWED")
        scene.refuses(owner.send(b"late"), kind="ExclusiveLogError") if scene.struck else None
        scene.works(second.send(b"second/again"))
        scene.keeps(actor=second)


@case()
def killed_for_memory(scene: Scene) -> None:
    """The kernel kills an owner whose cgroup is out of memory; a waiter goes on, and nothing that
    was acknowledged is lost."""
    with cgroup("memory") as group:
        owner = scene.actor(name="the killed one")
        scene.works(owner.open())
        scene.works(owner.own())
        waiter = scene.actor(name="the waiter")
        scene.works(waiter.open())
        waiter.start("own", "wait_for_exclusive", timeout=20)
        (group / "memory.limit_in_bytes").write_text(str(60 << 20))
        (group / "cgroup.procs").write_text(str(owner.pid))
        notes = scene.where / "notes"
        owner.start("stream", "w", str(notes), 0.5)
        scene.works(owner.said())
        scene.note(notes)
        owner.start(eat if scene.struck else "close")
        said = owner.said()
        if scene.struck and "SIGKILL" not in said.end:
            raise Skip(f"nothing was killed: {said}")
        scene.works(waiter.said(25))
        scene.works(waiter.send(b"the waiter"))
        scene.keeps(actor=waiter)


def eat(hands: Hands) -> None:
    """Use memory, in the middle of sending."""
    kept = []
    while True:
        kept.append(bytearray(os.urandom(1 << 20)))
        hands.send(b"eaten/%d" % len(kept), 300_000)


# ---- stopped -----------------------------------------------------------------------------


def read_slowly(hands: Hands, notes: str) -> None:
    """Be in the middle of a read until stopped: a snapshot of the tables is kept."""
    assert hands.engine is not None
    with hands.engine.ledger.read():
        Path(notes).write_text("inside")
        time.sleep(60)


def whole_stats(hands: Hands) -> str:
    """All that stats() says, and what was warned of."""
    assert hands.engine is not None
    return repr(hands.engine.stats())


@case()
def stopped_inside_a_read(scene: Scene) -> None:
    """A reader is stopped inside a read, and pins old pages of data.mdb: stats() names it, and the
    file's growth is bounded by what is written meanwhile."""
    owner, reader = scene.owner(), scene.actor(name="the reader")
    inside = scene.where / "inside"
    scene.works(reader.open())
    if scene.struck:
        reader.start(read_slowly, str(inside))
        until(inside.exists)

        def stop() -> None:
            reader.signal(signal.SIGSTOP)
            await_stop(reader.pid)

        stop_outside(reader, owner, stop, lambda: reader.signal(signal.SIGCONT))
    for number in range(200):
        scene.works(owner.send(b"more/%d" % number, 20_000))
    scene.works(owner.ask(checkpoint))
    said = owner.ask(whole_stats)
    if scene.struck and scene.works(said) and str(reader.pid) not in str(said.value):
        scene.blame("works", f"stats() does not name {reader.pid}, which pins pages")
    scene.keeps(actor=owner)


def checkpoint(hands: Hands) -> None:
    """Bring all into the tables."""
    assert hands.engine is not None
    hands.engine.ledger.checkpoint()


@case(twin=False)
def low_priority(scene: Scene) -> None:
    """An owner at the lowest priorities of CPU and disk keeps its topic on a busy machine."""

    def humble() -> None:
        os.nice(19)
        subprocess.run(["ionice", "-c", "3", "-p", str(os.getpid())], check=False)

    owner = scene.owner(before=humble)
    busy = [scene.actor(acknowledged=[]) for _ in range(3)]
    for each in busy:
        each.start(spin, KEEPALIVE + 2.0)
    second = scene.actor()
    scene.works(second.open(keepalive=KEEPALIVE))
    time.sleep(KEEPALIVE + 1.5)
    scene.fenced(second.own())
    scene.works(owner.send(b"3"))
    for each in busy:
        scene.works(each.said())
    scene.keeps(actor=owner)


def spin(hands: Hands, seconds: float) -> None:
    """Use all of a core."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
