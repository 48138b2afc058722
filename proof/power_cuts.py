"""Power cuts, worked out from what strace has seen a process write and flush.

A cut keeps what was flushed. Of each block that was written since, the disk may have any version;
of the changes of names, as many as the file system's log took. What a process says as
`ack <name>` counts as acknowledged from then on.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# ---- what was written and flushed ----------------------------------------------------

CALLS = (
    "write,writev,pwrite64,pwritev,pwritev2,lseek,fdatasync,fsync,msync,sync_file_range,"
    "ftruncate,fallocate,rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,rmdir,"
    "openat,close"
)
CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)(?:<([^>]*)>)?", re.DOTALL)
BEGUN = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>", re.DOTALL)
ENDED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)", re.DOTALL)
FD = re.compile(r"(\d+)<([^>]*)>")
DIRECTORY = re.compile(r"(?:\d+|AT_FDCWD)<([^>]*)>")
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(frozen=True)
class Called:
    """One system call, as strace tells it."""

    name: str
    begun: int  # the lines of the trace
    ended: int
    fd: int
    path: str
    strings: tuple[bytes, ...]
    text: str  # without the strings
    result: int
    result_path: str

    def paths(self) -> list[str]:
        """What its strings name: relative to the directories that stand before them, if any do."""
        names = [string.decode(errors="surrogateescape") for string in self.strings]
        places = [plain(place) for place in DIRECTORY.findall(self.text)]
        if len(places) < len(names):
            return names
        return [os.path.join(place, name) for place, name in zip(places, names, strict=False)]


def plain(text: str) -> str:
    return bytes.fromhex(text.replace("\\x", "")).decode()


def calls(trace: Path) -> list[Called]:
    """All that succeeded, in the order in which they were begun."""
    found, begun = [], {}
    with trace.open() as lines:
        for number, text in enumerate(lines):
            start = number
            if match := BEGUN.match(text):
                begun[match[1], match[2]] = number, f"{match[1]} {match[2]}({match[3]}"
                continue
            if match := ENDED.match(text):
                start, before = begun.pop((match[1], match[2]))
                text = before + match[3] + "\n"
            if (match := CALL.match(text)) and int(match[4]) >= 0:
                found.append(_called(match, start, number))
    return sorted(found, key=lambda call: call.begun)


def _called(match: re.Match[str], begun: int, ended: int) -> Called:
    _, name, arguments, result, result_path = match.groups()
    assert '"...' not in arguments, "strace has cut a string off"
    strings = tuple(bytes.fromhex(s.replace("\\x", "")) for s in STRING.findall(arguments))
    text = STRING.sub('""', arguments)
    fd = FD.match(text)
    return Called(
        name,
        begun,
        ended,
        int(fd[1]) if fd else -1,
        plain(fd[2]) if fd else "",
        strings,
        text,
        int(result),
        plain(result_path or ""),
    )


# ---- the disk, and what a power cut makes of it --------------------------------------

SECTOR = 512


@dataclass
class File:
    """A file's content as it is flushed, and what was written since."""

    flushed: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, int, bytes]] = field(default_factory=list)  # (ended, at, data)

    def write(self, ended: int, at: int, data: bytes) -> None:
        self.pending.append((ended, at, data))

    def flush(self, sure: Callable[[int], bool]) -> None:
        """Writes that ended at a line of which `sure` is true are durable now."""
        for ended, at, data in self.pending:
            if sure(ended):
                put(self.flushed, at, data)
        self.pending = [write for write in self.pending if not sure(write[0])]

    def shorten(self, size: int) -> None:
        """Taken to come through at once: a cut before it is the one without it."""
        del self.flushed[size:]
        kept = [(ended, at, data[: max(0, size - at)]) for ended, at, data in self.pending]
        self.pending = [write for write in kept if write[2]]

    def versions(self, block: int) -> dict[int, list[bytes]]:
        """{number of a block: what it has been since the last flush, oldest first}. The oldest
        is what was flushed, and is not in the list."""
        now = bytearray(self.flushed)
        found: dict[int, list[bytes]] = collections.defaultdict(list)
        for _, at, data in self.pending:
            put(now, at, data)
            for number in range(at // block, -(-(at + len(data)) // block)):
                found[number].append(bytes(now[number * block : (number + 1) * block]))
        return found


def put(content: bytearray, at: int, data: bytes) -> None:
    if len(content) < at:
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data


Names = dict[str, File]
Change = tuple[str, Callable[[Names], object]]  # (directory, what it does to names)


@dataclass
class Disk:
    """The files below `root`, as they are and as they are flushed."""

    root: str
    names: Names = field(default_factory=dict)  # relative ones, as the process sees them
    flushed: Names = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # of file descriptors
    synchronous: set[int] = field(default_factory=set)
    said: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path, said: list[str]) -> Disk:
        """With the files that are there now, all of them durable."""
        names = {
            str(path.relative_to(root)): File(bytearray(path.read_bytes()))
            for path in root.rglob("*")
            if path.is_file()
        }
        return cls(str(root), names, dict(names), said=said)

    def relative(self, path: str | bytes) -> str | None:
        path = path.decode() if isinstance(path, bytes) else path
        return os.path.relpath(path, self.root) if path.startswith(self.root + "/") else None

    def change(self, name: str, do: Callable[[Names], object]) -> None:
        do(self.names)
        self.changes.append((os.path.dirname(name), do))

    def flush_names(self, directory: str) -> None:
        for change in [c for c in self.changes if c[0] == directory]:
            change[1](self.flushed)
            self.changes.remove(change)

    # ---- what a call does ----------------------------------------------------------------

    def do(self, call: Called) -> str:
        """Let the call happen; what it was, as far as a power cut is concerned."""
        name = self.relative(call.path)
        if call.name == "write" and call.strings[0].startswith(b"ack "):
            self.said.append(call.strings[0].decode().split()[1])
            return "said"
        if call.name == "openat":
            return self._open(call)
        if call.name.startswith(("rename", "link")):
            return self._rename(call)
        if call.name in ("unlink", "unlinkat") and (gone := self.relative(call.paths()[0])):
            self.change(gone, lambda names: names.pop(gone, None))
        elif call.name == "lseek":
            self.places[call.fd] = call.result
        elif call.path == self.root and call.name == "fsync":
            self.flush_names("")
        elif name in self.names:
            return self._on_file(call, self.names[name])
        elif name is not None and call.name == "fsync":
            self.flush_names(name)
        return ""

    def _open(self, call: Called) -> str:
        name = self.relative(call.result_path)
        self.places[call.result] = 0
        self.synchronous.discard(call.result)
        if "O_DSYNC" in call.text or "O_SYNC" in call.text:
            self.synchronous.add(call.result)
        if name is not None and name not in self.names and "O_CREAT" in call.text:
            fresh = File()
            self.change(name, lambda names: names.update({name: fresh}))
        return ""

    def _rename(self, call: Called) -> str:
        old, new = (self.relative(path) for path in call.paths())
        if old in self.names:
            file, removes = self.names[old], call.name.startswith("rename")
            assert new is not None
            self.change(new, lambda names: names.update({new: file}))
            if removes:
                self.change(old, lambda names: names.pop(old, None))
        return ""

    def _on_file(self, call: Called, file: File) -> str:
        numbers = [int(n) for n in re.findall(r", (\d+)(?=,|$)", call.text)]
        if call.name.startswith(("write", "pwrite")):
            at = numbers[-1] if call.name.startswith("p") else self.places[call.fd]
            data = b"".join(call.strings)
            assert call.result == len(data), "a write that was cut short"
            self.places[call.fd] = at + len(data)
            file.write(call.ended, at, data)
            if call.fd in self.synchronous:
                return "flush"  # of this write alone
            return "write"
        if call.name in ("fdatasync", "fsync"):
            return "flush"
        if call.name == "fallocate" and "KEEP_SIZE" not in call.text:  # else no content changes
            file.write(call.ended, numbers[-1] - 1, b"\0")
        if call.name == "ftruncate":
            assert numbers[-1] <= len(materialised(file)), "a file is not made longer like that"
            file.shorten(numbers[-1])
        return ""

    def flush(self, call: Called) -> None:
        """What the call has flushed is sure from now on."""
        file = self.names[self.relative(call.path) or ""]
        if call.name in ("fdatasync", "fsync"):
            file.flush(lambda ended: ended < call.begun)
        else:
            file.flush(lambda ended: ended == call.ended)


def materialised(file: File) -> bytearray:
    content = bytearray(file.flushed)
    for _, at, data in file.pending:
        put(content, at, data)
    return content


# ---- the disks that a cut may leave --------------------------------------------------

Image = dict[str, bytes]
Pick = dict[tuple[int, int], int]  # {(file, block): which version of it}, else the flushed one


def image(names: Names, files: list[File], block: int, pick: Pick, dice: random.Random) -> Image:
    made = {}
    for name, file in names.items():
        content = bytearray(file.flushed)
        if file in files:
            number = files.index(file)
            versions = file.versions(block)
            for which, version in pick.items():
                if which[0] == number:
                    put(content, which[1] * block, versions[which[1]][version])
            if dice.random() < 0.5:  # the size has come through, and not all of the content
                size = len(materialised(file))
                content.extend(bytes(max(0, size - len(content))))
        made[name] = bytes(content)
    return made


def picks(versions: dict[tuple[int, int], int], dice: random.Random, most: int) -> list[Pick]:
    """Which blocks have come through: each subset of a few, else none, all, one, all but one,
    and random ones in random versions."""
    newest = dict.fromkeys(versions, -1)
    found: list[Pick] = [{}, newest]
    if 0 < len(newest) <= 8:
        for size in range(1, len(newest)):
            found += [dict.fromkeys(some, -1) for some in itertools.combinations(newest, size)]
    else:
        found += [{which: -1} for which in newest]
        found += [{w: v for w, v in newest.items() if w != which} for which in newest]
    for _ in range(8 if versions else 0):
        share = dice.random()
        found.append({w: dice.randrange(n) for w, n in versions.items() if dice.random() < share})
    return found if len(found) <= most else found[:2] + dice.sample(found[2:], most - 2)


def cut_here(disk: Disk, dice: random.Random, most: int) -> Iterator[Image]:
    """Disks as a cut at this moment may leave them."""
    block = dice.choice((SECTOR, 4096))
    names = dict(disk.flushed)
    for _, change in disk.changes[: dice.randint(0, len(disk.changes))]:
        change(names)
    # What no boot looks at is not worth a disk of its own.
    names = {n: f for n, f in names.items() if not n.startswith(("owners.lock", "lock.mdb"))}
    files = [file for file in names.values() if file.pending]
    versions = {
        (number, at): len(found)
        for number, file in enumerate(files)
        for at, found in file.versions(block).items()
    }
    for pick in picks(versions, dice, most):
        yield image(names, files, block, pick, dice)


@dataclass(frozen=True)
class Cut:
    """A disk after a power cut, and what was acknowledged before it."""

    image: Image
    acknowledged: dict[str, int]
    moment: str


def cuts(
    disk: Disk,
    trace: Path,
    named: tuple[str, ...],
    most: int,
    dice: random.Random,
    never_flushed: str = "",
) -> Iterator[Cut]:
    """A cut before and behind each flush, behind each acknowledgement and each write. `most`
    disks for each flush; with each comes a count of what was acknowledged to each of `named`."""
    seen: set[bytes] = set()
    for call in calls(trace):
        what = disk.do(call)
        moments = {"flush": most, "said": 2, "write": 2}.get(what, 0)
        for made in cut_here(disk, dice, moments) if moments else ():
            acknowledged = {name: disk.said.count(name) for name in named}
            if fresh(made, acknowledged, seen):
                moment = f"{call.name} of {os.path.basename(call.path)}, line {call.ended + 1}"
                yield Cut(made, acknowledged, moment)
        if what == "flush" and not call.path.endswith(never_flushed or "/"):
            disk.flush(call)


def fresh(made: Image, acknowledged: dict[str, int], seen: set[bytes]) -> bool:
    digest = hashlib.blake2b(repr(sorted(acknowledged.items())).encode())
    for name, content in sorted(made.items()):
        digest.update(f"{name}/{len(content)}/".encode() + content)
    known = digest.digest() in seen
    seen.add(digest.digest())
    return not known
