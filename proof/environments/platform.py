"""Platforms that load, fork, confine and time programs in their own way."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import textwrap
import time
from collections.abc import Callable

from proof.environments.actors import Hands
from proof.environments.cases import NEW_MOUNTS, Scene, Skip, become, case, unshare
from proof.shutdowns import do
from testing import seccomp
from testing.children import PATIENCE, child, line, tell
from testing.clocks import FAKE_CLOCK
from testing.processes import UNSEEN_FORKS

MCL_FUTURE = 2

# ---- forks that Python does not see ------------------------------------------------------


def use_in_unseen_child(hands: Hands, kind: str) -> str:
    """Send, and close, in a child of C code; what came of it."""
    assert hands.producer is not None
    ours, theirs = os.pipe()
    pid = UNSEEN_FORKS[kind]()
    if pid == 0:
        try:
            hands.producer.send(b"child")
            os.write(theirs, b"was heard")
        except BaseException as error:
            os.write(theirs, type(error).__name__.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as said:
        text = said.read().decode()
    os.waitpid(pid, 0)
    return text


@case(*UNSEEN_FORKS)
def a_worker_that_is_forked_unseen(scene: Scene, variant: str) -> None:
    """A server (uWSGI) forks its workers in C, with a producer open: the worker is refused, and the
    parent stays the owner."""
    owner = scene.owner()
    for number in range(3):
        if scene.struck:
            said = owner.ask(use_in_unseen_child, variant)
            if scene.works(said) and said.value != "EngineClosedError":
                scene.blame("refuses", f"the child: {said.value}")
        scene.works(owner.send(b"parent/%d" % number))
    if scene.works(said := owner.read()) and b"child" in said.value:
        scene.blame("keeps", "a child was heard")
    scene.keeps(actor=owner)


# ---- calls that are refused --------------------------------------------------------------


def refused(scene: Scene, call: str, number: int) -> Callable[[], None] | None:
    """For an actor: answer this call with an errno, unless this is the twin."""
    if not seccomp.NUMBERS:
        raise Skip("the numbers of system calls are not known here")
    return (lambda: seccomp.refuse(call, number)) if scene.struck else None


NAMED = {  # (call, errno): what the error says
    "F_OFD_SETLK": (22, "there are no open-file locks"),
    "fallocate": (38, "the system refuses a call that a ledger needs"),
    "fdatasync": (1, "seccomp"),
}


@case(*NAMED)
def a_call_that_a_container_refuses(scene: Scene, variant: str) -> None:
    """The list of permitted calls lacks one that a ledger needs: the error names it."""
    number, told = NAMED[variant]
    made = scene.actor(before=refused(scene, variant, number))
    said = made.open()
    if said.ok and said.value:
        said = made.own()
    if said.ok and variant == "fdatasync":
        said = made.send(b"1")
    scene.refuses(said, *((told,) if scene.struck else ()))
    made.kill()
    scene.owner()
    scene.keeps()


DISPENSABLE = {"futex_waitv": 1, "set_robust_list": 38}


@case(*DISPENSABLE)
def a_call_that_can_be_done_without(scene: Scene, variant: str) -> None:
    """Container lists and emulators refuse it: waiters wait, and learn of a death."""
    before = refused(scene, variant, DISPENSABLE[variant])
    owner = scene.owner(before=before)
    waiter = scene.actor(before=before, name="the waiter")
    scene.works(waiter.open())
    waiter.start("own", "wait_for_exclusive", timeout=10)
    time.sleep(0.3)
    owner.kill()
    scene.works(waiter.said())
    scene.works(waiter.send(b"the waiter"))
    scene.keeps(actor=waiter)


def see_less_of_proc() -> None:
    """ProcSubset=pid of systemd."""
    unshare(NEW_MOUNTS)
    do("mount", "-t", "proc", "-o", "subset=pid", "proc", "/proc")


@case()
def a_proc_without_its_files(scene: Scene) -> None:
    """systemd's ProcSubset=pid: `open` says what to change."""
    scene.ledger_with(b"1")
    made = scene.actor(before=scene.pick(see_less_of_proc, None))
    scene.refuses(made.open(), *scene.pick(("ProcSubset",), ()), path="")
    made.kill()
    scene.keeps()


def lock_all_memory() -> None:
    """mlockall, under a limit that a map of any size exceeds, without the capability."""
    most = min(32 << 20, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))
    become(1304, 1304)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(MCL_FUTURE):
        raise OSError(ctypes.get_errno(), "mlockall")


@case()
def a_program_that_locks_its_memory(scene: Scene) -> None:
    """A real-time program has called mlockall: the error says so, and names the limit."""
    scene.where.chmod(0o777)
    made = scene.actor(before=scene.pick(lock_all_memory, become(1304, 1304)))
    scene.refuses(made.open(), *scene.pick(("mlockall",), ()))
    made.kill()
    scene.owner(before=become(1304, 1304))
    scene.keeps()


@case(1 << 39, 8 << 30)
def a_small_address_space(scene: Scene, variant: int) -> None:
    """Processors with 39 bits, or `ulimit -v`: the default map is smaller, and all works."""
    limit = (resource.RLIMIT_AS, (variant, variant))
    made = scene.owner(before=scene.pick(lambda: resource.setrlimit(*limit), None))
    scene.works(made.send(b"large", 300_000))
    scene.works(made.close())
    made.kill()
    scene.keeps()


# ---- clocks ------------------------------------------------------------------------------

STANDBY = """
    import sys
    import exclusivelog as xl
    with xl.open(sys.argv[1], name="standby") as engine:
        waiting = engine.topic("t").producer_async("wait_for_exclusive")
        print("waits", flush=True)
        input()
        print(waiting.done(), flush=True)
"""


@case("864000", "=1600000000", tools=("cc",))
def a_standby_with_a_clock_of_its_own(scene: Scene, variant: str) -> None:
    """It runs under libfaketime, ten days ahead or with a clock that stands still: it evicts no
    healthy owner, and its waits end."""
    library = scene.where / "clock.so"
    library.with_suffix(".c").write_text(textwrap.dedent(FAKE_CLOCK))
    do("cc", "-shared", "-fPIC", "-o", str(library), str(library.with_suffix(".c")))
    shift = scene.pick(variant, "0")
    environment = {**os.environ, "LD_PRELOAD": str(library), "CLOCK_SHIFT": shift}
    owner = scene.owner()
    with child(STANDBY, scene.ledger, env=environment) as standby:
        line(standby)
        scene.works(owner.go_on("meanwhile", 1.5))
        tell(standby)
        if line(standby) != "False":
            scene.blame("keeps", "a healthy owner was evicted")
        try:
            standby.wait(PATIENCE / 2)
        except subprocess.TimeoutExpired:
            scene.blame("lives", "the standby does not end")
    scene.works(owner.send(b"last"))
    scene.keeps(actor=owner)


# ---- a root of its own -------------------------------------------------------------------


@case("a daemon", "a thread")
def a_working_directory_that_goes(scene: Scene, variant: str) -> None:
    """A program's working directory is removed while it has the ledger open."""
    place = scene.where / "elsewhere"
    place.mkdir()
    owner = scene.owner(before=lambda: os.chdir(place))
    scene.strike(place.rmdir)
    if variant == "a thread":
        scene.works(owner.send(b"large", 300_000))
    scene.works(owner.go_on("behind", 1.5))
    scene.keeps(actor=owner)
