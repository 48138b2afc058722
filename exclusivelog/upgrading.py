"""Raise a ledger of an earlier format to this version's, after a backup (rule H2).

Opening a ledger never raises its format, because the earlier version could not open it afterwards.
During an upgrade, from before the backup until the new format is durable, no engine of any version
may have the ledger open: see docs/format.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from exclusivelog.engine import open as open_engine
from exclusivelog.errors import LedgerCorruptedError, LedgerVersionError
from exclusivelog.local.faults import translated
from exclusivelog.local.files import DATA, LOCK, Directory, is_locked, lock_open_file
from exclusivelog.local.maintenance.backup import copy_at_rest
from exclusivelog.local.maintenance.backup_target import FILES as BACKED_UP
from exclusivelog.local.shm.lockfile import NAME as OWNERS
from exclusivelog.local.shm.lockfile import make_lock_file
from exclusivelog.local.storage.environment import check_format, check_header, raise_format
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.location import UNFINISHED_BACKUP, check_path
from exclusivelog.local.versions import FORMAT, told_users

ALONE_SECONDS = 5.0  # a process that ends right now has its locks for a moment


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What `upgrade` did to the ledger at `path`.

    - `path`: the ledger's directory.
    - `before`, `after`: its formats; equal if there was nothing to upgrade.
    - `backup`: the directory of the backup; None if there was nothing to upgrade.
    - `problems`: the damage found in the backup, and so in the ledger; empty unless
      `despite_damage` was given.
    """

    path: str
    before: int
    after: int
    backup: str | None
    problems: tuple[str, ...] = ()


def upgrade(
    path: str | os.PathLike[str],
    backup: str | os.PathLike[str] | None = None,
    *,
    despite_damage: bool = False,
) -> Upgrade:
    """Raise a ledger of an earlier format to this version's; a complete backup is made first.

    - `path`: the ledger's directory. No process, of any version, may have it open.
    - `backup`: an empty or new directory for the backup (default: `<path>.format-<N>` beside the
      ledger, or `<path>.format-<N>.2` and so on if that is taken; N is the old format). The backup
      is a ledger of the old format, which the old version can open.
    - `despite_damage`: upgrade although `Engine.verify` finds damage in the backup. Upgrading
      neither repairs nor adds damage. Default: refuse with LedgerCorruptedError.

    Returns an `Upgrade`. A ledger that already has this version's format is left as it is. An
    upgrade that fails or is killed leaves the ledger whole, in one of the two formats; call it
    again.

    Raises LedgerVersionError if the format cannot be upgraded, or a process has the ledger open
    (the message names its pid); LedgerCorruptedError if the backup shows damage; LedgerFullError
    if there is no room for the backup; LedgerError if the backup cannot be made at that place.

    >>> with xl.open(path) as engine:
    ...     orders = engine.topic("orders")
    >>> done = xl.upgrade(path)
    >>> done.before == done.after, done.backup
    (True, None)
    """
    place = os.path.abspath(check_path(path))
    with open_engine(place, "upgrade", readonly=True) as engine:  # or why it cannot be upgraded
        before = engine.ledger.format
    if before == FORMAT:
        return Upgrade(place, FORMAT, FORMAT, None)
    if Ledger.is_open_here(place):
        raise LedgerVersionError(f"{place} is open in this process; close its engines first")
    with contextlib.closing(Directory(place)) as directory, translated(place), _alone(directory):
        check_header(directory)
        check_format(directory, readonly=True, beside_others=False)
        target = _target(place, backup, before)
        copy_at_rest(directory, target)
        problems = _check_backup(place, target, despite_damage)
        raise_format(directory)
    return Upgrade(place, before, FORMAT, target, problems)


def _target(place: str, backup: str | os.PathLike[str] | None, before: int) -> str:
    if backup is not None:
        return os.path.abspath(check_path(backup, "backup"))
    names = [f"{place}.format-{before}{more}" for more in ("", *(f".{n}" for n in range(2, 1000)))]
    return next(name for name in names if _is_free(name))


def _is_free(path: str) -> bool:
    """May a backup go there: nothing, an empty directory, or what a killed upgrade left?"""
    try:
        found = set(os.listdir(path))
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False
    return not found or (UNFINISHED_BACKUP in found and found <= {UNFINISHED_BACKUP, *BACKED_UP})


def _check_backup(place: str, target: str, despite_damage: bool) -> tuple[str, ...]:
    with open_engine(target, "upgrade", readonly=True) as engine:
        problems = engine.verify().problems
    if problems and not despite_damage:
        raise LedgerCorruptedError(
            f"{place} was not upgraded: its backup shows damage ({len(problems)}: {problems[0]}). "
            f"The backup is at {target}. Restore an earlier backup, or upgrade with "
            "despite_damage=True (--despite-damage), which leaves the damage as it is"
        )
    return problems


@contextlib.contextmanager
def _alone(directory: Directory) -> Iterator[None]:
    """Keep every process, of any version, from opening the ledger to write. LedgerVersionError
    while one has it open."""
    os.close(make_lock_file(directory))  # every version locks it first
    fds = [
        directory.open(name, os.O_RDWR)
        for name in (OWNERS, "journal", DATA)
        if directory.facts(name) is not None
    ]
    try:
        end = time.monotonic() + ALONE_SECONDS
        while not _take_all(directory, fds):
            if time.monotonic() > end:
                raise LedgerVersionError(
                    f"{directory.path} is in use by {told_users(directory)}. No engine may have "
                    "it open during an upgrade: close these processes first"
                )
            time.sleep(0.01)
        yield
    finally:
        for fd in fds:
            os.close(fd)


def _take_all(directory: Directory, fds: list[int]) -> bool:
    """Lock the files as each version does that opens them, the earliest ones by `flock`."""
    try:
        for fd in fds:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return all(lock_open_file(fd, "write") for fd in fds) and not _is_read(directory)


def _is_read(directory: Directory) -> bool:
    """Does any process have LMDB's lock file open? A read-only engine locks nothing else."""
    if directory.facts(LOCK) is None:
        return False
    fd = directory.open(LOCK, os.O_RDONLY)
    try:
        return is_locked(fd)
    finally:
        os.close(fd)
