"""Checks whether this version of the library may open a ledger, and names those that may.

Two numbers decide. The *format* of the tables and the journal is a row of the table `meta`. The
*lock-file version* is that of the memory that live engines share in `owners.lock`, and of the
rules by which they promote one another's waiters. It is higher by 128 where the library was built
for musl, whose mutexes in that memory are none for glibc. docs/format.md lists both, and what each
version of the library does with them.

The offsets below are the same in the lock files of all versions, so that each version can name the
processes of any other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack

from exclusivelog import _core
from exclusivelog.errors import LedgerVersionError
from exclusivelog.foreign import Ignoring, pass_on_foreign
from exclusivelog.local.files import Directory, is_locked, read_whole
from exclusivelog.version import __version__

FORMAT = 9
EARLIER_FORMATS = (3, 4, 5, 6, 7, 8)  # these can be read, and `upgrade` raises them to this one
LOCK_FILE = "owners.lock"
LOCK_NAME = b"XLLOCK\0"
LOCK_VERSION_BY_MUSL = 128
LOCK_VERSION = 8 + (LOCK_VERSION_BY_MUSL if _core.MUTEX_WORD else 0)
LIFE = struct.Struct("<8xQQ16s")  # after the magic: device, inode, boot id
SLOTS, SLOT_COUNT, SLOT_SIZE = 69632, 512, 1024
SLOT = struct.Struct("<IIQQ16xII")  # liveness, pid, ..., engine id, ..., wake-ups, info size
INFO, INFO_SINCE = 64, 3  # msgpack [name, properties, library]; since version 3

# The versions that open the formats which this version does not write. All are development versions
# of 0.1.0, which are identified by commits.
OPENED_BY = {
    1: "git commit 2576025 and those before it",
    2: "a development version that was never published",
    3: "git commits b3f4a19 to 78870fc",
    4: "a development version of November 2026 that was never published",
    5: "git commits later than 78870fc, up to the last one before format 6 (231ddc5 is one)",
    6: "git commits from 40af260 on, up to the last one before format 7 (af14e81 is one)",
    7: "git commits from fb573cd on, up to the last one before format 8 (c34a6a8 is one)",
    8: "git commits from 56f76ac on, up to the last one before format 9 (c194f60 is one)",
}


class User(NamedTuple):
    """A process that has a ledger open. The `name` of its engine and the version of its `library`
    are empty if unknown."""

    pid: int
    name: str = ""
    library: str = ""

    def __str__(self) -> str:
        facts = [repr(self.name)] if self.name else []
        facts += [f"exclusivelog {self.library}"] if self.library else []
        return f"pid {self.pid}" + (f" ({', '.join(facts)})" if facts else "")


# ---- the processes that have it open -----------------------------------------------------


def lock_version(directory: Directory) -> int | None:
    """The version of the lock file; None if there is none, or the file is not a lock file."""
    with Ignoring(OSError):
        fd = directory.open(LOCK_FILE, os.O_RDONLY)
        try:
            magic = os.pread(fd, 8, 0)
        finally:
            os.close(fd)
        if len(magic) == 8 and magic.startswith(LOCK_NAME):
            return magic[7]
    return None


def in_use(directory: Directory, by_readers: bool = False) -> bool:
    """Does an engine of any version have the ledger open to write (`by_readers`: or to read)? Call
    it before this process takes locks of its own."""
    names = ("journal", "data.mdb", LOCK_FILE)
    for name in (*names, "lock.mdb") if by_readers else names:
        with Ignoring(FileNotFoundError):
            fd = directory.open(name, os.O_RDONLY)
            try:
                if is_locked(fd) or (name == "journal" and _is_flocked(fd)):
                    return True
            finally:
                os.close(fd)
    return False


def _is_flocked(fd: int) -> bool:
    # Before lock-file version 3, only this lock shows that an engine is alive.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pass_on_foreign(error)
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)  # another thread may have forked in C code
    return False


def users(directory: Directory) -> list[User]:
    """The processes that have the ledger open, as far as this process can see them: the engines in
    the lock file, and the processes that have one of its files open."""
    found = {user.pid: user for user in _engines(directory)}
    for pid in _processes_with(directory):
        found.setdefault(pid, User(pid))
    return sorted(found.values(), key=lambda user: user.pid)


def _engines(directory: Directory) -> list[User]:
    data = b""
    with Ignoring(OSError):
        fd = directory.open(LOCK_FILE, os.O_RDONLY)
        with open(fd, "rb") as file:
            facts, data = os.fstat(fd), file.read()
    if len(data) < SLOTS + SLOT_COUNT * SLOT_SIZE or not data.startswith(LOCK_NAME):
        return []
    if LIFE.unpack_from(data) != (facts.st_dev, facts.st_ino, _boot_id()):
        return []  # a copy, or from before the last boot
    slots = (data[at : at + SLOT_SIZE] for at in range(SLOTS, len(data), SLOT_SIZE))
    return [user for slot in slots if (user := _user(slot, data[7])) is not None]


def _user(slot: bytes, version: int) -> User | None:
    alive, pid, _, engine, _, size = SLOT.unpack_from(slot)
    if not alive & _core.HELD_BY or alive & _core.OWNER_DIED or not engine:
        return None
    info: list[Any] = []
    if version >= INFO_SINCE:
        with contextlib.suppress(ValueError, TypeError):
            info = list(msgpack.unpackb(slot[INFO : INFO + size]))
    return User(pid, *(str(info[at]) for at in (0, 2) if at < len(info)))


def _boot_id() -> bytes:
    text = read_whole("/proc/sys/kernel/random/boot_id").decode()
    return bytes.fromhex(text.strip().replace("-", ""))


def _processes_with(directory: Directory) -> set[int]:
    """The other processes that have a file of the ledger open, of those that this user may see."""
    names = (LOCK_FILE, "journal", "data.mdb", "lock.mdb")
    files = {(facts.st_dev, facts.st_ino) for name in names if (facts := directory.facts(name))}
    found = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        if int(process) != os.getpid():
            with Ignoring(OSError):
                opened = f"/proc/{process}/fd"
                if any(_is_one_of(f"{opened}/{fd}", files) for fd in os.listdir(opened)):
                    found.add(int(process))
    return found


def _is_one_of(path: str, files: set[tuple[int, int]]) -> bool:
    with Ignoring(OSError):
        facts = os.stat(path)
        return (facts.st_dev, facts.st_ino) in files
    return False


def describe_users(directory: Directory) -> str:
    """The processes that have the ledger open, for a message."""
    return ", ".join(map(str, users(directory))) or "a process that this user may not see"


# ---- the versions that are refused -------------------------------------------------------


def refuse_other_lock_file(directory: Directory, readonly: bool) -> None:
    """LedgerVersionError while engines of another lock-file version are alive. With `readonly`,
    other read-only engines are ignored, unless they have another C library."""
    version = lock_version(directory)
    is_of_other_libc = version == LOCK_VERSION ^ LOCK_VERSION_BY_MUSL  # readers have mutexes, too
    by_readers = is_of_other_libc or not readonly
    if version not in (None, LOCK_VERSION) and in_use(directory, by_readers):
        if is_of_other_libc:
            raise LedgerVersionError(
                f"{directory.path} is in use by processes with another C library (glibc or musl), "
                f"whose mutexes differ: {describe_users(directory)}. Close these processes first, "
                "or start this one with a Python of their kind"
            )
        raise LedgerVersionError(
            f"{directory.path} is in use by another version of exclusivelog: "
            f"{describe_users(directory)}. It has lock-file version {version}; exclusivelog "
            f"{__version__} has {LOCK_VERSION}. Close these processes first, or use their version"
        )


def refuse_format(
    directory: Directory, header: Mapping[str, Any], readonly: bool, has_writers: bool
) -> None:
    """LedgerVersionError if this version does not open the format that `header` names.
    `has_writers`: engines that know this format have the ledger open to write."""
    version = header["version"]
    if version == FORMAT:
        return
    known = version in EARLIER_FORMATS
    if known and readonly and not has_writers:
        return
    using = f"It is in use by {describe_users(directory)}. " if has_writers else ""
    earlier = ", ".join(map(str, EARLIER_FORMATS))
    raise LedgerVersionError(
        f"{directory.path} has ledger format {version!r}; exclusivelog {__version__} opens format "
        f"{FORMAT} and upgrades format {earlier}. {using}"
        + _way_out(directory.path, version, header, has_writers)
    )


def _way_out(path: str, version: Any, header: Mapping[str, Any], has_writers: bool) -> str:
    if version in EARLIER_FORMATS:
        way = (
            f"Close these processes, then run `exclusivelog upgrade {path}`"
            if has_writers
            else f"Run `exclusivelog upgrade {path}`, or open it with readonly=True"
        )
        return f"{way}. As it is, it is opened by {OPENED_BY[version]}"
    if isinstance(version, int) and version > FORMAT:
        library = header.get("library")
        newer = "a newer version" if library is None else f"exclusivelog {library} or newer"
        return f"Open it with {newer}"
    return (
        f"It is opened by {OPENED_BY.get(version, 'no published version')}: read it there "
        "(`exclusivelog tail PATH TOPIC --from earliest --json`), and send its messages to a new "
        "ledger"
    )
