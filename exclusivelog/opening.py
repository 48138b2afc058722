"""Open a ledger on this machine, or upgrade one of an earlier format to the format of this version.

Opening a ledger never changes its format, because the earlier version could not open it afterwards.
`upgrade` does, after a backup (rule H2). From before the backup until the new format is durable, no
engine of any version may have the ledger open: see docs/format.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from exclusivelog import _core, logs, threads
from exclusivelog.arguments import (
    as_int,
    check_count,
    check_flag,
    check_name,
    check_seconds,
    is_url,
    is_whole,
)
from exclusivelog.engine import Engine
from exclusivelog.errors import LedgerCorruptedError, LedgerVersionError, UnsupportedError
from exclusivelog.foreign import pass_on_foreign
from exclusivelog.local.faults import translated
from exclusivelog.local.files import DATA, LOCK, Directory, close_locked, is_locked, lock_open_file
from exclusivelog.local.maintenance.backup import FILES as BACKED_UP
from exclusivelog.local.maintenance.backup import copy_at_rest
from exclusivelog.local.runtime import Runtime
from exclusivelog.local.shm.lockfile import NAME as OWNERS
from exclusivelog.local.shm.lockfile import make_lock_file
from exclusivelog.local.storage.environment import (
    UNFINISHED_BACKUP,
    check_format,
    check_header,
    check_path,
    raise_format,
)
from exclusivelog.local.storage.ledger import DEFAULT_MAP_SIZE as DEFAULT_MAP_SIZE
from exclusivelog.local.storage.ledger import DEFAULT_MAX_READERS as DEFAULT_MAX_READERS
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.opening import Options
from exclusivelog.local.versions import FORMAT, describe_users
from exclusivelog.messages import Item, encode_properties
from exclusivelog.topic import Topic
from exclusivelog.waits import Waited

__all__ = ["Upgrade", "open", "upgrade"]

log = logging.getLogger(__name__)

DEFAULT_KEEPALIVE = 30.0  # seconds
LONGEST_KEEPALIVE = 1e9  # seconds, more than thirty years
ALONE_SECONDS = 5.0  # a process that is just ending still holds its locks for a moment


def open(
    path: str | os.PathLike[str],
    name: str | None = None,
    properties: Mapping[str, str] | None = None,
    *,
    durability: Literal["power", "process"] = "power",
    keepalive: float | None = DEFAULT_KEEPALIVE,
    readonly: bool = False,
    create: bool = True,
    mode: int = 0o700,
    map_size: int = DEFAULT_MAP_SIZE,
    max_readers: int = DEFAULT_MAX_READERS,
    kill_stalled: bool = False,
    admin: str | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls_trust_certs: str | None = None,
    check_policies: bool | None = None,
) -> Engine:
    """Open the ledger in a directory, and create it if there is none; or open the topics of a
    cluster.

    - `path`: a directory on a local disk. Network and FUSE file systems are refused, and so is a
      directory that contains other files and no ledger. Or the URL of a namespace of Apache Pulsar,
      `pulsar://host:port/tenant/namespace`: docs/cluster.md says what an engine on a cluster
      guarantees and does not support. Or `memory://NAME`: an engine as on a cluster, but in the
      memory of this process, for tests.
    - `name`: names this engine in errors and listings (default: `engine-` and the process id).
    - `properties`: a mapping of str to str that other processes can read, such as an address.
    - `durability`: "power": what this engine acknowledges survives a power loss; each
      acknowledgement waits for a flush, and concurrent calls share one. "process": it survives the
      death of any process; a power loss may take about the last second, and never damages the log
      (rule H1). Readers return what is durable in the sense of their own engine (rule G6).
    - `keepalive`: seconds without a heartbeat after which other engines may take this engine's
      topics (rule C3). Default: 30; None: never.
    - `readonly`: True: only read; the engine is not listed, and changes nothing. It acknowledges
      nothing either, so it opens a ledger on a file system in memory with any `durability`. While
      it is open, the same process cannot open the ledger to write; other processes can.
    - `create`: False raises LedgerError if there is no ledger.
    - `mode`: permissions of the directory, if it is created; files get its read and write bits.
    - `map_size`: the size in bytes that messages can take in the tables, and large ones beside
      them; 16 MiB more are for changes of ownership and trims. It reserves address space, not disk
      space. LedgerFullError in sends once they take all of it.
    - `max_readers`: how many read transactions all processes together can have open; the first
      engine that opens the ledger decides.
    - `kill_stalled`: True: kill stalled processes. A process that is stopped while it holds the
      writer lock blocks all writers (rare if it sends under "power", likely if it commits
      transactions, or sends at full speed under "process"); one that is stopped in a read
      transaction makes the tables grow. This process then sends it SIGKILL, if permitted, once it
      has sent no heartbeat for longer than its own `keepalive`. Default: False; the log,
      `inside()` and `stats()` then name the process.
    - `admin`, `token`, `token_file`, `tls_trust_certs`, `check_policies`: for a cluster, as in
      `exclusivelog.cluster.Mirror`. The token appears in no error and no repr.

    All options from `durability` to `kill_stalled`, except `readonly` and `create`, are for a local
    directory.

    Raises UnsupportedError (another kind of URL; an option that a cluster does not support),
    ClusterError (the cluster cannot be reached or used), LedgerError (not a directory, no
    permission, a remote file system, other files; no thread or address space available; gevent or
    eventlet has replaced threads), LedgerFullError (no room), LedgerVersionError (another format,
    not a ledger, or in use by engines of an incompatible version), LedgerCorruptedError.

    >>> xl.open(path, name="worker-1").topics()
    []
    """
    if name is not None:
        check_name(name, "name")
    encode_properties(properties or {})
    flags = {"readonly": readonly, "create": create, "kill_stalled": kill_stalled}
    for option, flag in flags.items():
        check_flag(option, flag)
    _core.this_process()  # in a forked child: first let go of what is its parent's
    cluster = {
        "admin": admin,
        "token": token,
        "token_file": token_file,
        "tls_trust_certs": tls_trust_certs,
        "check_policies": check_policies,
    }
    if is_url(path):
        local = (durability, keepalive, mode, map_size, max_readers, kill_stalled)
        _check_cluster_options(*local)
        return _open_cluster(path, name, properties or {}, readonly, cluster)
    for option, value in cluster.items():
        if value is not None:
            raise ValueError(f"{option}= is for clusters; a local ledger takes none")
    mode, map_size, max_readers = map(as_int, (mode, map_size, max_readers))
    _check_options(durability, keepalive, mode, map_size, max_readers)
    where = check_path(path)
    threads.refuse_patched(where)
    threads.refuse_bare_fork(where)
    began = _core.monotonic()
    ledger = Ledger.open(
        where,
        Options(create and not readonly, mode, map_size, max_readers, readonly, kill_stalled),
        power=durability == "power",
    )
    backend = None
    try:
        backend = Runtime(
            ledger,
            name or f"engine-{os.getpid()}",
            properties or {},
            keepalive,
            readonly,
            _map_at,
            unflushed=durability == "process",
            kill_stalled=kill_stalled,
        )
        backend.start()
        logs.emit(
            log,
            logs.OPENED,
            ledger=ledger.path,
            engine=backend.name,
            engine_id=backend.id,
            durability=durability,
            keepalive=keepalive,
            readonly=readonly,
            seconds=_core.monotonic() - began,
        )
        return Engine(backend)
    except BaseException:
        if backend is not None and backend.started:
            backend.close()  # closes the ledger, too
        else:
            ledger.close()
        raise


def _check_cluster_options(
    durability: str,
    keepalive: float | None,
    mode: int,
    map_size: int,
    max_readers: int,
    kill_stalled: bool,
) -> None:
    if durability != "power":
        raise UnsupportedError(
            f"durability={durability!r}: the cluster's replicas and flushes decide; leave it out"
        )
    if keepalive != DEFAULT_KEEPALIVE:
        raise UnsupportedError(
            f"keepalive={keepalive!r}: the cluster's broker decides when a silent engine is gone; "
            "leave it out"
        )
    sizes = (mode, map_size, max_readers, kill_stalled)
    if sizes != (0o700, DEFAULT_MAP_SIZE, DEFAULT_MAX_READERS, False):
        raise ValueError(
            "mode=, map_size=, max_readers= and kill_stalled= are for a local ledger; leave them "
            "out with a URL"
        )


def _open_cluster(
    url: str,
    name: str | None,
    properties: Mapping[str, str],
    readonly: bool,
    options: Mapping[str, Any],
) -> Engine:
    from exclusivelog.cluster.engine import ClusterEngine  # imported only for a cluster
    from exclusivelog.cluster.places import find

    threads.refuse_patched("a cluster's engine")
    place = find(url, options)
    try:
        return Engine(ClusterEngine(place, name or f"engine-{os.getpid()}", properties, readonly))
    except BaseException:
        place.close()
        raise


def _check_options(
    durability: str, keepalive: float | None, mode: int, map_size: int, max_readers: int
) -> None:
    if durability not in ("power", "process"):
        raise ValueError(f"durability={durability!r}: it takes 'power' or 'process'")
    if keepalive is not None:
        check_seconds(keepalive, "keepalive", "seconds above 0, or None for never")
        if not 0 < keepalive <= LONGEST_KEEPALIVE:
            raise ValueError(
                f"keepalive={keepalive!r}: it takes seconds above 0 and up to "
                f"{LONGEST_KEEPALIVE:.0f}, or None for never"
            )
    if not is_whole(mode) or mode & ~0o7777 or mode & 0o700 != 0o700:
        raise ValueError(
            f"mode={oct(mode) if is_whole(mode) else repr(mode)}: it takes permissions of a "
            "directory that its owner can use, such as 0o700 or 0o770"
        )
    if not is_whole(map_size) or map_size < 1 << 20:
        raise ValueError(f"map_size={map_size!r}: it takes bytes, from {1 << 20} on")
    check_count(max_readers, "max_readers")


def _map_at(backend: Runtime, topic: int, name: str, offset: int) -> tuple[int, Iterable[Item]]:
    """(offset, items): a map as of an offset."""
    from exclusivelog.state.past import map_at  # imported only if there is a shared map

    end, entries = map_at(Topic(Engine(backend), topic, name), offset)
    return end, entries.to_items()


# ---- raising a format --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What `upgrade` did to the ledger at `path`.

    - `path`: the ledger's directory.
    - `before`, `after`: its formats; equal if there was nothing to upgrade.
    - `backup`: the directory of the backup; None if there was nothing to upgrade.
    - `problems`: the damage found in the backup, and so in the ledger; empty unless
      `despite_damage` was given.

    >>> engine.close()
    >>> done = xl.upgrade(path)
    >>> done.before == done.after    # the ledger already had the format of this version
    True
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
    """Upgrade a ledger of an earlier format to the format of this version, after a full backup.

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
    if there is no room for the backup; LedgerError if the backup cannot be made at that place;
    ValueError if an argument is empty or a URL.

    >>> with xl.open(path) as engine:
    ...     orders = engine.topic("orders")
    >>> done = xl.upgrade(path)
    >>> done.before == done.after, done.backup
    (True, None)
    """
    place = os.path.abspath(check_path(path))
    wanted = None if backup is None else os.path.abspath(check_path(backup, "backup"))
    with open(place, "upgrade", readonly=True) as engine:  # raises if it cannot be upgraded
        before = engine.ledger.format
    if before == FORMAT:
        return Upgrade(place, FORMAT, FORMAT, None)
    if Ledger.is_open_here(place):
        raise LedgerVersionError(f"{place} is open in this process; close its engines first")
    with contextlib.closing(Directory(place)) as directory, translated(place), _alone(directory):
        check_header(directory)
        if _is_upgraded(directory):  # another process was faster
            return Upgrade(place, FORMAT, FORMAT, None)
        target = wanted or _target(place, before)
        copy_at_rest(directory, target)
        problems = _check_backup(place, target, despite_damage)
        raise_format(directory)
    return Upgrade(place, before, FORMAT, target, problems)


def _is_upgraded(directory: Directory) -> bool:
    try:
        check_format(directory, readonly=False, has_writers=False)
    except LedgerVersionError:
        check_format(directory, readonly=True, has_writers=False)
        return False
    return True


def _target(place: str, before: int) -> str:
    names = [f"{place}.format-{before}{more}" for more in ("", *(f".{n}" for n in range(2, 1000)))]
    return next(name for name in names if _is_free(name))


def _is_free(path: str) -> bool:
    """Whether a backup can go there: the path does not exist, or is an empty directory or what a
    killed upgrade left."""
    try:
        found = set(os.listdir(path))
    except FileNotFoundError as error:
        pass_on_foreign(error)
        return True
    except NotADirectoryError as error:
        pass_on_foreign(error)
        return False
    return not found or (UNFINISHED_BACKUP in found and found <= {UNFINISHED_BACKUP, *BACKED_UP})


def _check_backup(place: str, target: str, despite_damage: bool) -> tuple[str, ...]:
    with open(target, "upgrade", readonly=True) as engine:
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
    """Keep every process, of any version, from opening the ledger to write. Raises
    LedgerVersionError if one has it open."""
    process = _core.this_process()
    os.close(make_lock_file(directory))  # every version locks this file first
    fds = [
        directory.open(name, os.O_RDWR)
        for name in (OWNERS, "journal", DATA)
        if directory.facts(name) is not None
    ]
    try:
        waited = Waited()
        while not _take_all(directory, fds):
            if waited.seconds > ALONE_SECONDS:
                raise LedgerVersionError(
                    f"{directory.path} is in use by {describe_users(directory)}. No engine may "
                    "have it open during an upgrade: close these processes first"
                )
            time.sleep(0.01)
        yield
    finally:
        for fd in fds:
            close_locked(fd, process)


def _take_all(directory: Directory, fds: list[int]) -> bool:
    """Lock the files in the ways in which all versions do; the earliest versions use `flock`."""
    try:
        for fd in fds:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pass_on_foreign(error)
        return False
    return all(lock_open_file(fd, "write") for fd in fds) and not _is_read(directory)


def _is_read(directory: Directory) -> bool:
    """Whether any process has LMDB's lock file open; a read-only engine locks nothing else."""
    if directory.facts(LOCK) is None:
        return False
    fd = directory.open(LOCK, os.O_RDONLY)
    try:
        return is_locked(fd)
    finally:
        os.close(fd)
