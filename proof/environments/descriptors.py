"""File descriptors: closed standard streams, inherited ones, too few of them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from proof.environments.actors import Hands
from proof.environments.cases import Scene, case

STREAMS = {"stdin": (0,), "stdout": (1,), "stderr": (2,), "all": (0, 1, 2)}


def standard_streams(hands: Hands) -> list[str]:
    """What descriptors 0 to 2 are, where they are the ledger's."""
    found = []
    for number in range(3):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(os.path.realpath(hands.path)):
            found.append(f"{number} is {target}")
    return found


def print_from_c(hands: Hands) -> None:
    """Write to standard output and error, as C code does."""
    for _ in range(200):
        for number in (1, 2):
            try:
                os.write(number, b"\xff" * 4096)
            except OSError:
                break


@case(*STREAMS)
def a_daemon_without_standard_streams(scene: Scene, variant: str) -> None:
    """Started with `2>&-` or the like: none of the ledger's files may become descriptor 0, 1 or 2,
    where prints go."""

    def close() -> None:
        for number in range(3):
            os.dup2(os.open("/dev/null", os.O_RDWR), number)
        for number in scene.pick(STREAMS[variant], ()):
            os.close(number)

    owner = scene.owner(before=close)
    second = scene.actor()
    scene.works(second.open())
    if said := owner.ask(standard_streams).value:
        scene.blame("keeps", said)
    owner.ask(print_from_c)
    scene.works(owner.send(b"3", 300_000))
    scene.works(second.read())
    owner.kill()
    scene.works(second.own("wait_for_exclusive", timeout=10))
    scene.works(second.send(b"4"))
    scene.keeps()


def spawn(hands: Hands) -> int:
    """Start a program that inherits all that can be inherited; its process id."""
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    hands.kept["program"] = subprocess.Popen(words, close_fds=False)
    return int(hands.kept["program"].pid)


def fork(hands: Hands) -> int:
    """Fork a child that does nothing; its process id."""
    pid = os.fork()
    if pid == 0:
        import time

        time.sleep(60)
        os._exit(0)
    return pid


@case("a program", "a fork")
def an_orphan_of_a_dead_owner(scene: Scene, variant: str) -> None:
    """The owner is killed, and a child of it lives on with what it has inherited: the next owner
    is not held up."""
    owner = scene.owner()
    pid = 0
    if scene.struck:
        said = owner.ask(spawn if variant == "a program" else fork)
        if scene.works(said):
            pid = said.value
    owner.kill()
    second = scene.actor()
    scene.works(second.open())
    scene.works(second.own("wait_for_exclusive", timeout=10))
    scene.works(second.send(b"3", 300_000))
    scene.works(second.close())
    second.kill()
    scene.keeps()
    if pid:
        os.kill(pid, 9)


def close_all(hands: Hands) -> None:
    """What daemons do to start afresh. The actor keeps its own pipe."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and not os.path.realpath(f"/proc/self/fd/{name}").startswith("/proc"):
            os.close(int(name))


@case()
def a_process_that_closes_everything(scene: Scene) -> None:
    """A program calls `closerange(3, ...)` with an engine open, and opens files of its own: no
    acknowledged message is lost, and no other file is written into."""
    owner, target = scene.owner(), scene.where / "diary"
    target.write_bytes(b"")
    if scene.struck:
        owner.ask(close_all)
        owner.ask(open_diary, str(target))
    for number in range(10):
        if not scene.lives(owner.send(b"more/%d" % number, 300_000 if number == 5 else 2000)):
            break
    owner.kill()
    if target.read_bytes():
        scene.blame("keeps", f"{target.stat().st_size} bytes of ours are in another file")
    scene.keeps()


def open_diary(hands: Hands, path: str) -> None:
    """Take the lowest free descriptors."""
    hands.kept["diary"] = [os.open(path, os.O_RDWR) for _ in range(20)]


def limit(number: int) -> None:
    """So many files may be open from now on."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, 20000))


def open_files(hands: Hands) -> int:
    """How many are open."""
    return len(os.listdir("/proc/self/fd")) - 1


@case(0, 1, 2, 3, 4, 6)
def too_few_descriptors(scene: Scene, variant: int) -> None:
    """`ulimit -n` leaves so many: `open` says so, or all works; with more, it works."""
    scene.ledger_with(b"1", b"2")
    made = scene.actor()
    used = made.ask(open_files).value
    if scene.struck:
        made.ask(lower, used + variant)
    said = made.open()
    if scene.lives(said) and scene.lives(made.own()):
        scene.lives(made.send(b"3", 300_000))
        scene.lives(made.read())
    if not said.ok and "files" not in said.text:
        scene.blame("refuses", f"{said} does not say that there are too many open files")
    made.ask(lower, 20000)
    if not said.ok:
        scene.works(made.open())
    scene.keeps(actor=made)


def lower(hands: Hands, number: int) -> None:
    """Change the limit."""
    limit(number)


@case(twin=False)
def a_path_in_proc(scene: Scene) -> None:
    """The path goes through a descriptor, as programs do that were handed a directory."""
    scene.ledger_with(b"1")
    fd = os.open(scene.where, os.O_RDONLY | os.O_DIRECTORY)
    made = scene.actor(Path(f"/proc/self/fd/{fd}/log"))
    if scene.lives(made.open(), f"/proc/self/fd/{fd}/log"):
        scene.works(made.own())
        scene.works(made.send(b"2", 300_000))
    made.kill()
    scene.keeps()
