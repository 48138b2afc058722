"""LMDB's environment: where it may be, how it is made and opened, and what is refused before LMDB
touches it (rule H2)."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import struct
from typing import Any

import lmdb
import msgpack

from exclusivelog.errors import LedgerCorruptedError, LedgerError, LedgerVersionError
from exclusivelog.faults import translated
from exclusivelog.segments import sync_directory
from exclusivelog.tables import FORMAT, NAMES

LMDB_MAGIC = 0xBEEFC0DE
LMDB_ENGINE = 0  # the 0.9 file format, whatever this machine's py-lmdb would choose
# Locks, shared mappings and flushes do not hold there what they hold on a local disk.
REMOTE_FILE_SYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gfs2",
    "ocfs2", "beegfs", "gpfs", "fuse", "fuseblk", "virtiofs", "vboxsf", "prl_fs",
}  # fmt: skip
# LMDB's meta pages, the first two of the file: where the size of a page, the number of the
# last page in use and the transaction's number stand in them.
META_PAGE_SIZE, META_LAST_PAGE, META_TXN, META_BYTES = 40, 136, 144, 152


# ---- where -------------------------------------------------------------------------------


def file_system(path: str) -> str:
    """The type of the file system that `path` is on, as the kernel names it.

    >>> file_system("/proc")
    'proc'
    """
    path = os.path.realpath(path)
    best, kind = "", "unknown"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
            inside = path == mount or path.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, after.split()[0]
    return kind


def refuse_remote(path: str) -> None:
    """LedgerError where locks and shared mappings cannot be trusted."""
    kind = file_system(path)
    if kind in REMOTE_FILE_SYSTEMS or kind.startswith("fuse."):
        raise LedgerError(
            f"{path} is on a {kind} file system, where locks and shared mappings cannot be "
            "trusted; put the ledger on a local disk"
        )


def identity(path: str) -> tuple[int, int]:
    """What a directory is, by whatever name."""
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


# ---- made whole, and looked at before it is opened ---------------------------------------


def make_directory(path: str, mode: int) -> None:
    """The directory, unless it is there."""
    if not os.path.isdir(path):
        with translated(path):
            try:
                os.makedirs(path, mode=mode, exist_ok=True)
            except FileExistsError:
                raise LedgerError(f"{path} is a file; a ledger lives in a directory") from None
            sync_directory(os.path.dirname(path))


def create_environment(path: str, mode: int) -> None:
    """A whole data.mdb or none: LMDB's own creation leaves a file that is void for ever if it
    is interrupted."""
    for leftover in os.listdir(path):
        if leftover.startswith(".creating-"):
            shutil.rmtree(os.path.join(path, leftover))
    temporary = os.path.join(path, f".creating-{secrets.token_hex(8)}")
    os.mkdir(temporary, mode)
    try:
        env = lmdb.open(
            temporary, map_size=1 << 22, max_dbs=len(NAMES), mode=mode & 0o666, lock=False,
            lib_version=LMDB_ENGINE,
        )  # fmt: skip
        with env, env.begin(write=True) as txn:
            for name in NAMES:
                database = env.open_db(name.encode(), txn=txn)
                if name == "meta":
                    header = {"version": FORMAT, "uuid": secrets.token_hex(16)}
                    txn.put(b"format", msgpack.packb(header), db=database)
        sync_directory(temporary)
        os.rename(os.path.join(temporary, "data.mdb"), os.path.join(path, "data.mdb"))
        sync_directory(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_header(data: str) -> None:
    """Refuse what LMDB would take for its own, or die of."""
    with open(data, "rb") as file:
        head = file.read(24)
        _check_kind(data, head)
        metas = [head + file.read(META_BYTES - 24)]
        page_size = struct.unpack_from("<I", metas[0].ljust(META_BYTES), META_PAGE_SIZE)[0]
        file.seek(page_size)
        metas.append(file.read(META_BYTES))
        size = os.fstat(file.fileno()).st_size  # after them: a writer may be at work
    whole = [meta for meta in metas if len(meta) == META_BYTES]
    newest = max(whole, key=lambda meta: struct.unpack_from("<Q", meta, META_TXN), default=None)
    last_page = 1 if newest is None else struct.unpack_from("<Q", newest, META_LAST_PAGE)[0]
    wanted = (last_page + 1) * page_size
    if size < wanted:
        # A page that is not in the file is a SIGBUS to whoever touches its mapping.
        raise LedgerCorruptedError(f"{data} is cut off: it has {size} bytes of {wanted}")


def _check_kind(data: str, head: bytes) -> None:
    if len(head) < 24:
        raise LedgerCorruptedError(f"{data} is cut off after {len(head)} bytes")
    magic, version = struct.unpack_from("<II", head, 16)
    if magic != LMDB_MAGIC:
        raise LedgerVersionError(f"{data} is no ledger's file; choose another directory")
    if version != 1:
        raise LedgerVersionError(
            f"{data} has LMDB file format {version}; this version of exclusivelog reads format 1"
        )


# ---- opened ------------------------------------------------------------------------------


def open_environment(
    path: str, mode: int, map_size: int, max_readers: int, readonly: bool
) -> lmdb.Environment:
    """LMDB's environment in this directory, where there is one."""
    lock = os.path.join(path, "lock.mdb")
    if not os.path.exists(lock) and not readonly:
        # LMDB would make a sparse one, and die of SIGBUS on a full disk.
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode & 0o666)
        try:
            os.posix_fallocate(fd, 0, 64 * (max_readers + 2))
        except OSError:
            os.unlink(lock)
            raise
        finally:
            os.close(fd)
    env = lmdb.open(
        path, map_size=map_size, max_dbs=len(NAMES), max_readers=max_readers, readonly=readonly,
        create=False, mode=mode & 0o666, lib_version=LMDB_ENGINE,
    )  # fmt: skip
    env.reader_check()
    return env


def open_tables(env: lmdb.Environment, path: str, readonly: bool) -> tuple[dict[str, Any], str]:
    """The tables by name, and the ledger's uuid."""
    with translated(path, readonly):
        try:
            databases = _open_databases(env, readonly)
            with env.begin() as txn:
                header = msgpack.unpackb(txn.get(b"format", db=databases["meta"]))
            version, uuid = header["version"], str(header["uuid"])
        except (lmdb.NotFoundError, lmdb.IncompatibleError, TypeError, ValueError, KeyError):
            raise LedgerVersionError(
                f"{path}/data.mdb is an LMDB file, but not a ledger's; choose another directory"
            ) from None
    if version != FORMAT:
        raise LedgerVersionError(
            f"{path} has ledger format {version}; this version of exclusivelog reads format "
            f"{FORMAT}. Use a newer one"
        )
    return databases, uuid


def _open_databases(env: lmdb.Environment, readonly: bool) -> dict[str, Any]:
    # py-lmdb forgets handles that were opened in a read transaction, and without a transaction
    # it waits for the writer's lock with the GIL held, unless read-only.
    if readonly:
        return {name: env.open_db(name.encode(), create=False) for name in NAMES}
    with env.begin(write=True) as txn:
        return {name: env.open_db(name.encode(), txn=txn, create=False) for name in NAMES}
