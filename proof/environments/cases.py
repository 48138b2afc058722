"""The parts of a case of the instrument `environments`, and its judges.

A case is a function of a `Scene`. It is run in three ways: with its fault; without it (the twin),
where everything that the fault makes fail must work; and with a library that has a deliberate
defect, which each judge that the case has called must notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from proof.environments.actors import FORGETS, GONE, SAYS_YES, Actor, Said
from proof.shutdowns import MEGABYTES, do, shut_down

FAULT, TWIN = "fault", "twin"
NEW_MOUNTS, NEW_PIDS, NEW_TIME = 0x20000, 0x20000000, 0x80
KEEPALIVE = 4.0  # seconds
WINDOW = min(5.0, KEEPALIVE / 4)  # of rule C7
SLACK = 4.0  # seconds, for a busy machine
# The deliberate defects that a judge must notice.
NOTICES = {"keeps": FORGETS, "refuses": SAYS_YES, "ends": SAYS_YES}


MOST_TESTED = 3  # variants of a case; of more, every third


class Skip(Exception):
    """This machine cannot run the case; the text says why."""


@dataclass(frozen=True)
class Case:
    """A case. The docstring of its function describes it."""

    name: str
    play: Callable[[Scene], None]
    fast: bool
    tested: bool  # also a test of `make test-all`
    twin: bool
    tools: tuple[str, ...]

    def lacking(self) -> str:
        """Why it cannot be run here; empty if it can."""
        if os.geteuid() != 0:
            return "only root may mount"
        return next((f"{t} is not installed" for t in self.tools if shutil.which(t) is None), "")


CASES: dict[str, Case] = {}


def case(
    *variants: Any, fast: bool = True, twin: bool = True, tools: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a case; with variants, one for each of them, which the function gets. `twin` is
    False where nothing is left of the case without its fault."""

    def register(play: Callable[..., None]) -> Callable[..., None]:
        area = play.__module__.rpartition(".")[2]
        for number, variant in enumerate(variants or (None,)):
            suffix = "" if variant is None else f"-{variant}"
            name = f"{area}-{play.__name__.replace('_', '-')}{suffix}".replace(" ", "-")
            bound = play if variant is None else partial(play, variant=variant)
            tested = fast and (len(variants) <= MOST_TESTED or number % MOST_TESTED == 0)
            CASES[name] = Case(name, bound, fast, tested, twin, tools)
        return play

    return register


@dataclass
class Scene:
    """One run of a case."""

    where: Path
    how: str = FAULT
    broken: list[str] = field(default_factory=list)
    acknowledged: list[bytes] = field(default_factory=list)
    judged: set[str] = field(default_factory=set)
    actors: list[Actor] = field(default_factory=list)
    image: Path | None = None

    @property
    def ledger(self) -> Path:
        return self.where / "log"

    @property
    def struck(self) -> bool:
        """Whether the case runs with its fault."""
        return self.how != TWIN

    def strike(self, fault: Callable[..., object], *args: Any, **options: Any) -> None:
        """Cause the fault of the case, unless this is the twin."""
        if self.struck:
            fault(*args, **options)

    def pick(self, faulty: Any, clean: Any) -> Any:
        """Return `faulty` in the case, and `clean` in its twin."""
        return faulty if self.struck else clean

    # ---- actors --------------------------------------------------------------------------

    def actor(
        self,
        path: Path | None = None,
        *,
        before: Callable[[], object] | None = None,
        acknowledged: list[bytes] | None = None,
        name: str = "",
    ) -> Actor:
        """A process that has opened nothing yet; `before` is called in it first."""
        notes = self.acknowledged if acknowledged is None else acknowledged
        defect = self.how if self.how in (FORGETS, SAYS_YES) else ""
        label = name or f"actor {len(self.actors) + 1}"
        made = Actor(path or self.ledger, notes, defect, before, label)
        self.actors.append(made)
        return made

    def owner(self, path: Path | None = None, **options: Any) -> Actor:
        """An actor that owns the topic, and has sent two messages."""
        opening = {"keepalive": KEEPALIVE, **options.pop("opening", {})}
        made = self.actor(path, **{"name": "the owner", **options})
        self.works(made.open(**opening))
        self.works(made.own())
        for number in range(2):
            self.works(made.send(b"owner/%d/%d" % (made.pid, number)))
        return made

    def ledger_with(self, *values: bytes, path: Path | None = None) -> None:
        """A ledger that is closed again."""
        made = self.actor(path, name="the maker")
        self.works(made.open())
        self.works(made.own())
        for value in values:
            self.works(made.send(value))
        self.works(made.close())
        made.kill()

    def note(self, notes: Path) -> int:
        """Take in what a stream has noted."""
        found = notes.read_bytes().splitlines(keepends=True) if notes.exists() else []
        self.acknowledged += [line[:-1] for line in found if line.endswith(b"\n")]
        return len(found)

    def end(self) -> None:
        """End all actors."""
        while self.actors:
            self.actors.pop().kill()

    # ---- judges --------------------------------------------------------------------------

    def blame(self, judge: str, what: object) -> None:
        """Something is not as promised."""
        self.broken.append(f"{judge}: {what}")

    def works(self, said: Said) -> bool:
        """The call succeeded."""
        if not said.ok and said.end != GONE:
            self.blame("works", said)
        return said.ok

    def lives(self, said: Said, path: Path | str | None = None) -> bool:
        """The call succeeded, or failed with a clear error."""
        if said.ok:
            return True
        self.judged.add("refuses")  # or `keeps` finds out that it was not
        self._clear("lives", said, path or self.ledger, "ExclusiveLogError", ())
        return False

    def refuses(
        self, said: Said, *words: str, path: Path | str | None = None, kind: str = "LedgerError"
    ) -> None:
        """The call failed, with an error of that kind that names the path and has these words. In
        the clean twin: it succeeded."""
        self.judged.add("refuses")
        if not self.struck:
            self.works(said)
        elif said.ok:
            self.blame("refuses", f"{said.what}: it was not refused")
        else:
            self._clear("refuses", said, self.ledger if path is None else path, kind, words)

    def fenced(self, said: Said) -> None:
        """The topic is another one's, with the fault and without."""
        self.judged.add("refuses")
        if said.ok:
            self.blame("refuses", f"{said.what}: it was not refused")
        else:
            self._clear("refuses", said, "", "ProducerFencedError", ())

    def _clear(
        self, judge: str, said: Said, path: Path | str, kind: str, words: tuple[str, ...]
    ) -> None:
        if said.end == GONE:
            return
        if said.end:
            self.blame(judge, said)
        elif kind not in said.kinds:
            self.blame(judge, f"{said} is no {kind}")
        elif kind.startswith("Ledger") and str(path) not in said.text:
            self.blame(judge, f"{said} does not name {path}")
        elif lacking := [word for word in words if word not in said.text]:
            self.blame(judge, f"{said} does not say {', '.join(lacking)}")

    def ends(self, actor: Actor, path: Path | None = None) -> None:
        """Rule C7: a sender is refused within the window, and from then on. In the clean twin: it
        is not."""
        self.judged.add("ends")
        late: list[bytes] = []
        actor.acknowledged = late
        begun = time.monotonic()
        while time.monotonic() < begun + WINDOW + SLACK:
            said = actor.send(b"late/%d" % len(late))
            if not said.ok:
                break
            time.sleep(0.02)
        if not self.struck:
            self.works(said)
        elif said.ok:
            self.blame("ends", f"{actor.name} still acknowledges after {WINDOW + SLACK} s")
        else:
            self._clear("ends", said, path or self.ledger, "LedgerError", ())
            if (again := actor.send(b"late/again")).ok:
                self.blame("ends", f"{again}: it acknowledges again")

    def keeps(
        self,
        path: Path | None = None,
        acknowledged: list[bytes] | None = None,
        actor: Actor | None = None,
        **options: Any,
    ) -> None:
        """A process that comes now opens the ledger, finds it sound, reads all that was
        acknowledged, in order and once, and can send."""
        self.judged.add("keeps")
        promised = list(self.acknowledged if acknowledged is None else acknowledged)
        made = actor or self.actor(path, name="the judge", acknowledged=[])
        if actor is None and not self.works(made.open(**options)):
            return
        if problems := made.verify().value:
            self.blame("keeps", f"verify says {problems[:3]}")
        said = made.read()
        if self.works(said):
            self.has(said.value, promised)
        if actor is not None:
            return
        if not options.get("readonly") and self.works(made.own("exclusive_with_fencing")):
            self.works(made.send(b"judge/%d" % made.pid))
        made.kill()

    def tells_or_keeps(self, promised: list[bytes]) -> None:
        """A process that opens it now gets an error, or verify reports it, or it reads all."""
        made = self.actor(name="the judge", acknowledged=[])
        if not self.lives(made.open()):
            return
        verified, read = made.verify(), made.read()
        if self.lives(read) and self.lives(verified) and not verified.value:
            self.judged.add("keeps")
            self.has(read.value, promised)
        if verified.ok and not verified.value and not read.ok:
            self.blame("keeps", f"verify does not know of {read}")
        self.lives(made.own())

    def has(self, found: list[bytes], promised: list[bytes]) -> None:
        there = {value: place for place, value in enumerate(found)}
        lost = [value for value in promised if value not in there]
        if lost:
            self.blame("keeps", f"{len(lost)} of {len(promised)} acknowledged are lost: {lost[:3]}")
        elif len(there) != len(found):
            self.blame("keeps", "messages are there twice")
        places = [there[value] for value in promised if value in there]
        if places != sorted(places):
            self.blame("keeps", "messages are there in another order")

    # ---- file systems --------------------------------------------------------------------

    def disk(self, kind: str = "ext4", *, megabytes: int = 0, options: str = "loop") -> Path:
        """Make a file system in a file, and mount it; the ledger is to be on it."""
        if shutil.which(f"mkfs.{kind}") is None:
            raise Skip(f"mkfs.{kind} is not installed")
        self.image = self.where / "image"
        with self.image.open("wb") as file:
            file.truncate((megabytes or {**MEGABYTES, "btrfs": 200}[kind]) << 20)
        nothing_reserved = ("-m", "0") if kind == "ext4" else ()
        do(f"mkfs.{kind}", "-q", *nothing_reserved, str(self.image))
        return self.mount(options)

    def mount(self, options: str = "loop") -> Path:
        """Mount it again, at the same place."""
        place = self.where / "disk"
        place.mkdir(exist_ok=True)
        do("mount", "-o", options, str(self.image), str(place))
        return place

    def unmount(self) -> None:
        """Unmount it, as soon as its users are gone."""
        deadline = time.monotonic() + 10
        while True:
            try:
                do("umount", str(self.where / "disk"))
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        while do("losetup", "-j", str(self.image)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def cut(self) -> None:
        """A power cut without a reboot: the file system goes, and comes back."""
        self.strike(self.shut_down)
        self.remount()

    def shut_down(self) -> None:
        """From now on nothing reaches the disk; also if it is so already."""
        with contextlib.suppress(OSError):
            shut_down(self.where / "disk")

    def remount(self) -> None:
        """All processes end, the file system is unmounted, and is mounted again."""
        self.end()
        self.unmount()
        self.mount()

    def tmpfs(self, name: str, kind: str = "tmpfs") -> Path:
        """A file system in memory."""
        place = self.where / name
        place.mkdir()
        do("mount", "-t", kind, kind, str(place))
        return place

    def bind(self, source: Path, name: str, *options: str) -> Path:
        """The same directory at another path."""
        place = self.where / name
        place.mkdir()
        do("mount", "--bind", str(source), str(place))
        if options:
            do("mount", "-o", ",".join(("remount", "bind", *options)), str(place))
        return place


# ---- what actors do before they begin ------------------------------------------------------


def unshare(flags: int) -> None:
    """Leave namespaces; for those of process ids and of time, go on in a child. Mounts are first:
    the first process in a namespace of process ids must not be a `mount` that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags & NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    if flags & NEW_MOUNTS:
        do("mount", "--make-rprivate", "/")
    if flags & ~NEW_MOUNTS and libc.unshare(flags & ~NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    if flags & NEW_TIME:
        Path("/proc/self/timens_offsets").write_text("monotonic 864000 0\nboottime 864000 0\n")
    if flags & (NEW_PIDS | NEW_TIME):
        _continue_in_a_child()
    if flags & NEW_PIDS:
        do("mount", "-t", "proc", "proc", "/proc")


def _continue_in_a_child() -> None:
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)


def become(uid: int, gid: int, *groups: int, umask: int = 0o022) -> Callable[[], None]:
    """Be another user from now on."""

    def change() -> None:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        os.umask(umask)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # /proc/self stays its own

    return change


@contextlib.contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """The file system takes no writes meanwhile."""
    do("fsfreeze", "-f", str(disk))
    try:
        yield
    finally:
        do("fsfreeze", "-u", str(disk))
