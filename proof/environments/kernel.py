"""What the kernel does to processes: deaths that it does not report, signals, core dumps, stops."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import time
from pathlib import Path

from proof.environments.actors import Hands
from proof.environments.cases import KEEPALIVE, Scene, Skip, case
from testing.deaths import LOCKS, forget_robust_lists, hold, reap_early

SOON = 5.0  # seconds; a lock outlives its thread for one at most

# ---- deaths ------------------------------------------------------------------------------


def die_inside(hands: Hands, lock: str) -> None:
    """End inside a lock, with nothing in the robust lists."""
    assert hands.engine is not None
    hold(hands.engine, lock)
    forget_robust_lists()
    os.kill(os.getpid(), signal.SIGKILL)


@case(*LOCKS)
def a_lock_that_outlives_its_thread(scene: Scene, variant: str) -> None:
    """A process dies inside this lock, and its memory is gone before its robust lists are read: the
    next owner goes on."""
    owner, second = scene.owner(), scene.actor(name="the second")
    scene.works(second.open())
    if scene.struck:
        owner.ask(die_inside, variant)
    owner.kill()
    second.start("own", "wait_for_exclusive", timeout=SOON + 3)
    scene.works(second.said())
    scene.works(second.send(b"small"))
    scene.works(second.send(b"large", 300_000))
    scene.works(second.close())
    second.kill()
    scene.keeps()


@case("power", "process")
def memory_that_is_freed_before_the_end(scene: Scene, variant: str) -> None:
    """earlyoom kills a sender, and frees its memory at once (process_mrelease)."""
    notes = scene.where / "notes"
    second = scene.actor(name="the second")
    scene.works(second.open(durability=variant))
    for number in range(3):
        owner = scene.actor(name="the killed one")
        scene.works(owner.open(durability=variant))
        scene.works(owner.own("wait_for_exclusive", timeout=10))
        owner.start("stream", f"s{number}", str(notes), scene.pick(30.0, 0.2))
        time.sleep(0.3)
        if scene.struck:
            try:
                reap_early(owner.pid)
            except OSError as error:
                raise Skip(f"this kernel has no process_mrelease: {error.strerror}") from error
        else:
            scene.works(owner.said())
        owner.kill()
    scene.note(notes)
    scene.works(second.own("wait_for_exclusive", timeout=10))
    scene.works(second.send(b"the second"))
    scene.keeps(actor=second)


def allow_core(place: str) -> None:
    """A core dump of any size, there, with much to write."""
    os.chdir(place)
    for number in (signal.SIGQUIT, signal.SIGSEGV, signal.SIGABRT):
        signal.signal(number, signal.SIG_DFL)
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def grow(hands: Hands, size: int) -> None:
    """Have memory that a core dump has to write."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size, mmap.PAGESIZE):
        memory[at : at + 8] = b"not zero"
    hands.kept["memory"] = memory


@case("SIGQUIT", "SIGSEGV", "SIGABRT")
def a_core_dump(scene: Scene, variant: str) -> None:
    """An owner dumps core: the next one need not wait for the end of that."""
    place = scene.where / "cores"
    place.mkdir()
    owner = scene.owner(before=lambda: allow_core(str(place)), opening={"keepalive": 30.0})
    waiter = scene.actor(name="the waiter")
    scene.works(waiter.open())
    scene.works(owner.ask(grow, 100 << 20))
    waiter.start("own", "wait_for_exclusive", timeout=10)
    time.sleep(0.2)
    if scene.struck:
        owner.signal(signal.Signals[variant])
    else:
        scene.works(owner.close())
    said = waiter.said()
    scene.works(said)
    if said.seconds > SOON:
        scene.blame("lives", f"the waiter waited for {said.seconds:.1f} s")
    scene.works(waiter.send(b"the waiter"))
    scene.keeps(actor=waiter)


# ---- signals -----------------------------------------------------------------------------


def block_all_signals() -> None:
    """As programs do that wait for signals with sigwait."""
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())


def ignore_children() -> None:
    """SIGCHLD is ignored: the kernel reaps children itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def restartable_alarms() -> None:
    """An interval timer interrupts system calls a thousand times a second."""
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)


SIGNALS = {"blocked": block_all_signals, "SIGCHLD": ignore_children, "alarms": restartable_alarms}


@case(*SIGNALS)
def signals_of_a_program(scene: Scene, variant: str) -> None:
    """Signals are blocked, ignored or frequent: all works, and a full disk is LedgerFullError."""
    disk = scene.disk()
    owner = scene.owner(disk / "log", before=scene.pick(SIGNALS[variant], None))
    scene.works(owner.send(b"large", 300_000))
    fill_up(disk)
    for number in range(400):
        said = owner.send(b"full/%d" % number, 100_000)
        if not scene.lives(said, disk / "log"):
            break
    (disk / "ballast").unlink()
    scene.works(owner.send(b"after"))
    scene.keeps(actor=owner)


def fill_up(disk: Path) -> None:
    """Leave 1 MiB of the disk."""
    facts = os.statvfs(disk)
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_frsize - (1 << 20))


# ---- stops -------------------------------------------------------------------------------


@case("in a stream", "idle")
def stopped_and_continued(scene: Scene, variant: str) -> None:
    """An owner is stopped anywhere, for longer than its keepalive, and goes on: what it has got
    acknowledged is there, and it sends no more."""
    keepalive, notes = 1.0, scene.where / "notes"
    owner = scene.owner(opening={"keepalive": keepalive})
    second = scene.actor(name="the second")
    scene.works(second.open(keepalive=KEEPALIVE, kill_stalled=True))
    if variant == "in a stream":
        owner.start("stream", "s", str(notes), scene.pick(60.0, 0.3))
        time.sleep(0.3)
    if scene.struck:
        owner.signal(signal.SIGSTOP)
        time.sleep(keepalive + 0.5)
    elif variant == "in a stream":
        scene.works(owner.said())
    if not scene.struck:
        scene.works(owner.close())
    scene.works(second.own("wait_for_exclusive", timeout=10))
    scene.works(second.send(b"second"))
    if scene.struck:
        owner.signal(signal.SIGCONT)
        time.sleep(0.3)
    owner.kill()
    scene.acknowledged[2:2] = noted(notes)
    scene.works(second.send(b"second/again"))
    scene.keeps(actor=second)


def noted(notes: Path) -> list[bytes]:
    """What a stream has noted."""
    found = notes.read_bytes().splitlines(keepends=True) if notes.exists() else []
    return [line[:-1] for line in found if line.endswith(b"\n")]


# ---- locks that a close drops ------------------------------------------------------------


def read_and_lose_locks(hands: Hands, seconds: float, whole: bool) -> int:
    """Read the ledger's files in the middle of a read of the ledger; the topics that are there."""
    assert hands.engine is not None
    with hands.engine.ledger.read() as tables:
        for file in Path(hands.path).iterdir():
            if whole and file.is_file():
                with file.open("rb") as opened:
                    opened.read(4096)
        end, count = time.monotonic() + seconds, len(tables.topics.all())
        while time.monotonic() < end:
            if len(tables.topics.all()) != count:
                raise RuntimeError("a snapshot changes")
            time.sleep(0.01)
    return count


@case("alone", "beside senders")
def reading_the_files_in_the_middle_of_a_read(scene: Scene, variant: str) -> None:
    """A process loses its POSIX locks while it reads, and others open the ledger, which checks
    LMDB's readers: its place stays its own."""
    owner, reader = scene.owner(), scene.actor(name="the reader")
    scene.works(reader.open(readonly=variant == "alone"))
    reader.start(read_and_lose_locks, 1.5, scene.struck)
    end, number = time.monotonic() + 1.5, 0
    while time.monotonic() < end:
        other = scene.actor(name="another")
        scene.works(other.open())
        if variant != "alone":
            scene.works(owner.send(b"large/%d" % number, 300_000))
        scene.works(owner.send(b"small/%d" % number))
        scene.works(other.close())
        other.kill()
        number += 1
    scene.works(reader.said())
    scene.works(reader.read())
    scene.keeps(actor=owner)
