"""Power cuts of a real file system: the kernel drops it, with all that it has not written yet.

A loop-mounted ext4 or xfs is shut down (`FS_IOC_SHUTDOWN`, without a flush of its log) under
processes that write to it, mounted again, and judged by what they noted elsewhere. After a reboot
the lock file says that it is of another boot. Without one it stays as the disk has it: older than
the journal, and of this boot.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

from proof.faults import Crew, crew_of
from proof.jobs import SERVES
from proof.traffic import TOPICS, judge_ledger, read_notes
from testing.children import child, line, tell
from testing.disks import another_boot
from testing.judges import ACKNOWLEDGED

SHUTDOWN, WITHOUT_THE_LOG = 0x8004587D, 2
MEGABYTES = {"ext4": 64, "xfs": 320}  # the least that xfs takes, about
WRITERS = 2
CUTS_OF_A_LEDGER = 5
UNMOUNTED_WITHIN = 20.0  # seconds
LEAST_SECONDS = 0.1  # of life between two cuts
GOES_ON_WITHIN = 15.0  # seconds, until a send is acknowledged after a cut
JUDGED_WITHIN = 60.0
LYING = "int fsync(int f) { return 0; } int fdatasync(int f) { return 0; }\n"
# A process never takes the journal's lock alone, and so trusts what the lock file says.
BELIEVING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
/* Has the lock file beside this file been used before? Its inode stands at 16 then. */
static int used(int fd) {
    char link[64], path[4096];
    uint64_t inode = 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 20);
    if (size < 0) return 0;
    path[size] = 0;
    strcpy(strrchr(path, '/') + 1, "owners.lock");
    int owners = open(path, O_RDONLY | O_CLOEXEC);
    if (owners < 0) return 0;
    ssize_t n = pread(owners, &inode, sizeof inode, 16);
    close(owners);
    return n == sizeof inode && inode != 0;
}
static int lock(const char *name, int fd, int what, void *arg) {
    int (*real)(int, int, ...) = dlsym(RTLD_NEXT, name);
    if (what == F_OFD_SETLK && ((struct flock *)arg)->l_type == F_WRLCK && used(fd)) {
        errno = EAGAIN;
        return -1;
    }
    return real(fd, what, arg);
}
int fcntl(int fd, int what, ...) {
    va_list rest;
    va_start(rest, what);
    void *arg = va_arg(rest, void *);
    va_end(rest);
    return lock("fcntl", fd, what, arg);
}
int fcntl64(int fd, int what, ...) {
    va_list rest;
    va_start(rest, what);
    void *arg = va_arg(rest, void *);
    va_end(rest);
    return lock("fcntl64", fd, what, arg);
}
"""


@dataclass
class Found:
    """The result of some power cuts."""

    cuts: int = 0
    operations: int = 0
    acknowledged: int = 0
    broken: list[str] = field(default_factory=list)


def missing(kind: str) -> str:
    """Why this machine cannot run it; empty if it can."""
    if os.geteuid() != 0:
        return "only root may mount"
    if shutil.which(f"mkfs.{kind}") is None:
        return f"mkfs.{kind} is not installed"
    return "" if os.path.exists("/dev/loop-control") else "there are no loop devices"


def cut_again_and_again(
    where: Path, kind: str, count: int, defect: str = "", reboots: bool = True
) -> Found:
    """Cut the power `count` times, several times on each ledger. `defect` is the source of a
    C library with a deliberate defect, which is loaded into the writers."""
    found, dice = Found(), random.Random()
    environment = {"LD_PRELOAD": str(_compiled(where, defect))} if defect else {}
    for number in range(-(-count // CUTS_OF_A_LEDGER)):
        place = where / str(number)
        place.mkdir(parents=True)
        cuts = min(CUTS_OF_A_LEDGER, count - found.cuts)
        _one_ledger(place, kind, cuts, dice, environment, found, reboots)
    return found


def _one_ledger(
    place: Path,
    kind: str,
    cuts: int,
    dice: random.Random,
    environment: dict[str, str],
    found: Found,
    reboots: bool,
) -> None:
    image = place / "image"
    with image.open("wb") as file:
        file.truncate(MEGABYTES[kind] << 20)
    do(f"mkfs.{kind}", "-q", str(image))
    with (
        crew_of(place, place / "disk" / "log", dice, environment=environment) as crew,
        child(SERVES, "proof.shutdowns:judge_notes") as judge,
    ):
        for _ in range(cuts):
            broken = _one_cut(place, image, crew, dice, judge, reboots, bool(environment))
            found.cuts += 1
            found.broken += broken
            if broken:
                break
    record = read_notes(place)
    found.operations += record.operations
    found.acknowledged += record.count(ACKNOWLEDGED)


def _one_cut(
    place: Path,
    image: Path,
    crew: Crew,
    dice: random.Random,
    judge: Popen[str],
    reboots: bool,
    controlled: bool,
) -> list[str]:
    with mounted(image, place / "disk") as disk:
        if reboots:
            another_boot(disk / "log")
        try:
            for _ in range(WRITERS):
                crew.start()
            # Beside load they need longer to begin than most cuts leave them. A control is blind
            # where nothing was acknowledged; else some cuts are to come while they begin.
            if controlled or dice.random() < 0.75:
                _sends(place, crew)
            time.sleep(LEAST_SECONDS + dice.random())
            shut_down(disk)
        finally:
            crew.end()
    broken = []
    with mounted(image, place / "disk") as disk:
        if reboots:
            another_boot(disk / "log")
        elif not _goes_on(place, crew):
            broken.append(f"H2: no send is acknowledged within {GOES_ON_WITHIN:.0f} s")
        tell(judge, json.dumps([str(place)]))
        try:
            return broken + list(json.loads(line(judge, JUDGED_WITHIN)))
        except AssertionError as error:
            judge.kill()
            judge.wait()
            return [*broken, f"H2: the judge: {error}"]


def _goes_on(place: Path, crew: Crew) -> bool:
    """Whether a process can open the ledger with the present lock file and send."""
    try:
        crew.start()
        return _sends(place, crew)
    finally:
        crew.end()


def _sends(place: Path, crew: Crew) -> bool:
    """Is a send of the process that was started last acknowledged?"""
    notes = place / f"notes-{crew.started}.jsonl"
    deadline = time.monotonic() + GOES_ON_WITHIN
    while time.monotonic() < deadline:
        if notes.exists() and b'"offset"' in notes.read_bytes():
            return True
        time.sleep(0.02)
    return False


def judge_notes(place: str) -> list[str]:
    """What is broken in the ledger, compared with what was noted; in a process that may hang."""
    ledger = Path(place, "disk", "log")
    return list(judge_ledger(ledger, read_notes(Path(place)), TOPICS, send=False))


@contextlib.contextmanager
def mounted(image: Path, where: Path) -> Iterator[Path]:
    """The file system, while the block runs."""
    where.mkdir(exist_ok=True)
    do("mount", "-o", "loop", str(image), str(where))
    try:
        yield where
    finally:
        _unmount(where, image)


def _unmount(where: Path, image: Path) -> None:
    # A process that makes a mount namespace, anywhere on the machine, keeps it busy for a moment.
    # And a copy of it there is what the next mount would be: a file system that is shut down.
    deadline, mounted_here = time.monotonic() + UNMOUNTED_WITHIN, True
    while True:
        try:
            if mounted_here:
                do("umount", str(where))
            mounted_here = False
            if not do("losetup", "-j", str(image)):
                return
            raise OSError(f"{image} is mounted elsewhere, too")
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def shut_down(disk: Path) -> None:
    """Shut the file system down: what has not reached the disk is lost, and nothing more reaches
    it."""
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", WITHOUT_THE_LOG))
    finally:
        os.close(fd)


def _compiled(where: Path, text: str) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    source, library = where / "defect.c", where / "defect.so"
    source.write_text(text)
    do("gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl")
    return library


def do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
