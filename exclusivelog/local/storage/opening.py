"""Opening a ledger: its files are checked, created and opened, by one process at a time.

If no other process has the ledger open, as the kernel's locks show, it is recovered (slots.py)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from exclusivelog import _core, logs, threads
from exclusivelog.errors import LedgerCorruptedError, LedgerError
from exclusivelog.foreign import Ignoring, pass_on_foreign
from exclusivelog.local.blocks import SpareRoom, own_blocks, unshare
from exclusivelog.local.files import DATA, JOURNAL, Directory
from exclusivelog.local.shm.lockfile import JOURNAL_OFFSET, TOPICS, LockFile
from exclusivelog.local.shm.locks import lock_of_readers
from exclusivelog.local.shm.slots import Presence, StallWatch, writers_live
from exclusivelog.local.storage.environment import (
    META_PAGES_BYTES,
    Environment,
    check_format,
    check_header,
    create_environment,
    open_tables,
    own_meta_pages,
    refuse_incomplete,
    refuse_missing_data,
    refuse_other_files,
)
from exclusivelog.local.storage.journal import JOURNAL_GIVEN_UP, inode, open_file
from exclusivelog.local.storage.mounts import (
    copy_up,
    is_mounted_read_only,
    refuse_elsewhere,
    shares_blocks,
)
from exclusivelog.local.storage.segments import Segments
from exclusivelog.local.versions import LOCK_VERSION, in_use, lock_version, refuse_other_lock_file

log = logging.getLogger(__name__)


class Options(NamedTuple):
    """How a ledger is opened, as `exclusivelog.open` documents it."""

    create: bool
    mode: int
    map_size: int
    max_readers: int
    readonly: bool
    kill_stalled: bool = False


class OpenFiles:
    """The open files of one ledger: `directory`, `lockfile`, `environment` with its `databases`,
    `journal` (None for a reader of a ledger that no engine has written) and `segments`.

    `recover(files, journal, alone)` is called while no other process can open the ledger, in each
    process that opens it to write. `alone`: no other process has it open.
    """

    def __init__(
        self, path: str, options: Options, recover: Callable[[OpenFiles, _core.Journal, bool], None]
    ) -> None:
        self.path = path
        self.options = options
        self.readonly = options.readonly
        self.journal: _core.Journal | None = None
        self.watch: StallWatch | None = None
        self._presence: Presence | None = None
        self._has_writers = False  # for a reader
        self._spare: SpareRoom | None = None
        # The journal's descriptor, for a reader that cannot keep writers from reusing its pages.
        self._unprotected = -1
        with contextlib.ExitStack() as undo:
            self._open(undo, recover)
            undo.pop_all()

    def _open(
        self, undo: contextlib.ExitStack, recover: Callable[[OpenFiles, _core.Journal, bool], None]
    ) -> None:
        if not os.access(self.path, os.R_OK | os.X_OK):
            raise LedgerError(f"{self.path} may not be read by this user; check its owner and mode")
        self.directory = directory = Directory(self.path)
        undo.callback(directory.close)
        self._check_directory()
        self.segments = Segments(directory, self.options.map_size)
        undo.callback(self.segments.close)
        mode = self.options.mode & 0o666
        self.lockfile = LockFile(
            directory, mode=mode, readonly=self.readonly, check=self._check_other_version
        )
        undo.callback(self.lockfile.close)
        # A reader does not wait for a process that waits to open a ledger in use.
        at_once = self.readonly and self.lockfile.in_use
        with contextlib.nullcontext() if at_once else self.lockfile.opening():
            if not self.readonly:
                self.lockfile.remove_leftovers()
                self.lockfile.check_in_place()
            if directory.facts(DATA) is None:
                create_environment(directory, self.options.mode)
            if self.readonly:
                copy_up(directory, (DATA, JOURNAL))
            presence = self._open_journal(undo)
            self._watch_deaths(undo)
            self.environment = Environment(
                directory,
                self.options.mode,
                self.options.map_size,
                self.options.max_readers,
                self.readonly,
                functools.partial(self._in_use, presence),
                None if presence is None else presence.data,
                self.deaths,
            )
            undo.callback(self.environment.close)
            if self.environment.unlocked and self._unprotected < 0 and self.journal is not None:
                self._look_for_writers(undo)
            self._shares_blocks = shares_blocks(self.path)
            self.keep_spare_room()
            undo.callback(self._free_spare_room)
            with self._writer_lock(presence):
                has_writers = self._has_writers if presence is None else not presence.alone
                self.databases, header = open_tables(
                    self.environment.lmdb, directory, self.readonly, has_writers
                )
                self.format, self.uuid = header["version"], header["uuid"]
                if presence is not None and self.journal is not None:
                    recover(self, self.journal, presence.alone)
                    self._forget_given_up()
                    presence.admit_others()

    # ---- checked before they are opened --------------------------------------------------

    def _check_directory(self) -> None:
        directory = self.directory
        there, has_journal = refuse_incomplete(directory)
        if not there:
            if not self.options.create:
                raise LedgerError(
                    f"{self.path} holds no ledger, and "
                    f"{'readonly=True' if self.readonly else 'create=False'}"
                )
            refuse_other_files(directory)
            refuse_missing_data(directory)
            there = directory.facts(DATA) is not None
        if there and not has_journal:
            self._check_tables_alone()

    def _check_tables_alone(self) -> None:
        """The journal is missing: find out whether there never was one, or it was removed."""
        check_header(self.directory)
        used = check_format(self.directory, self.readonly, in_use(self.directory))
        given_up = self.directory.facts(JOURNAL_GIVEN_UP) is not None
        if used and not given_up and not inode(self.directory):
            raise LedgerCorruptedError(
                f"{self.path}/journal was removed; the last acknowledged messages may be in it. "
                f"Put it back, restore a backup, or make an empty file {JOURNAL_GIVEN_UP!r} there "
                "to open the ledger without it"
            )

    def _forget_given_up(self) -> None:
        """The journal is there: one that is lost later must not count as given up."""
        if self.directory.facts(JOURNAL_GIVEN_UP) is not None:
            self.directory.remove(JOURNAL_GIVEN_UP)

    def _check_other_version(self) -> None:
        """Check that this version opens the ledger, before another version's lock file is
        replaced."""
        if lock_version(self.directory) not in (None, LOCK_VERSION):
            refuse_other_lock_file(self.directory, self.readonly)
            if self.directory.facts(DATA) is not None:
                check_header(self.directory)
                check_format(self.directory, self.readonly, has_writers=False)

    # ---- the journal, and the processes that have it open --------------------------------

    def _open_journal(self, undo: contextlib.ExitStack) -> Presence | None:
        """Open the journal, and find out whether the shared memory about it is valid. Returns the
        locks of this process; None for a reader."""
        if self.readonly:
            check_header(self.directory)
        if self.readonly and not inode(self.directory):
            return None  # no engine has opened this ledger to write
        fd, capacity = open_file(self.directory, self.options.mode & 0o666, self.readonly)
        try:
            self.journal = journal = _core.Journal(
                self.lockfile.atomics,
                JOURNAL_OFFSET,
                TOPICS,
                fd,
                capacity,
                self.readonly,
                self.lockfile.figures,
            )
            undo.callback(journal.close)
            journal.of_this_boot = self.lockfile.in_use
            killers = int(self.options.kill_stalled)
            self.watch = StallWatch(self.path, self.lockfile.slots, journal, killers)
            journal.on_stall = self.watch.stalled
            journal.on_foreign = functools.partial(_report_foreign, self.path, set())
            undo.callback(self._stop_watching)
            if self.readonly:
                self._check_writers(journal, fd, undo)
                return None
            self._presence = presence = Presence(self.directory)
            undo.callback(presence.close)
            check_header(self.directory, presence.data)
            presence.enter()
            if presence.alone:
                own_blocks(fd)
                own_meta_pages(presence.data)
                self.lockfile.begin_here()
            else:
                self._check_same_files(journal)
                self.lockfile.slots.refuse_other_namespaces()
        finally:
            os.close(fd)
        return presence

    def _watch_deaths(self, undo: contextlib.ExitStack) -> None:
        """From now on, no lock outlives its thread for long: opening takes some, too."""
        self.deaths = deaths = self.lockfile.watch_deaths(self.journal, self.readonly)
        undo.callback(deaths.stop)
        if self.watch is not None:
            holder = functools.partial(lock_of_readers, deaths)
            deaths.on_stall = functools.partial(self.watch.check_readers, holder)
        with threads.needed(self.path):
            deaths.start()

    def refuse_elsewhere(self, power: bool) -> None:
        """LedgerError if one of the open files is where an engine may not write it. `power`:
        acknowledged messages must survive a power loss (rule H5)."""
        if self._presence is None:
            return
        while True:
            newest = self.segments.newest
            files = {**self._presence.files, **self.environment.files, **self.segments.files}
            try:
                refuse_elsewhere(self.directory, files, power)
                return
            except OSError as error:
                pass_on_foreign(error)
                if newest is self.segments.newest:
                    raise
                # A checkpoint has closed it meanwhile: its descriptor is another file's, or none.

    @property
    def written_in_place(self) -> dict[str, tuple[int, int | None]]:
        """{name: (descriptor, size)} of the files, or their first bytes, to which a write must not
        fail for lack of room; none for a reader."""
        presence = self._presence
        if presence is None:
            return {}
        mapped = {**presence.files, **self.environment.files}
        return {
            name: (fd, META_PAGES_BYTES if name == DATA else None) for name, fd in mapped.items()
        }

    def own_meta_pages(self) -> None:
        """Give LMDB's meta pages blocks of their own, where a copy may share them. OSError (ENOSPC)
        if there is no room."""
        if self._presence is not None and self._shares_blocks:
            unshare(self._presence.data, META_PAGES_BYTES)

    def keep_spare_room(self) -> None:
        """Keep room for stores into mapped files, on a disk where copies share blocks: again, if a
        store has needed it. Without it, such a store on a full disk fails the ledger."""
        if self._spare is not None:
            self._spare.renew()
        elif self._shares_blocks and self.journal is not None:
            files = [*self.lockfile.files, *self.environment.files.values()]
            with Ignoring(OSError):  # there is no room, or a reader may not make files
                self._spare = SpareRoom(
                    self.directory.by_descriptor, files, self.journal, self.environment.guards
                )

    def _free_spare_room(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def _in_use(self, presence: Presence | None) -> bool:
        """Do other processes have the ledger open to write?"""
        if presence is not None:
            return not presence.alone and presence.beside_others
        return self._has_writers and in_use(self.directory)

    def _stop_watching(self) -> None:
        if self.journal is not None:
            # The callback refers to the watch, and so to the lock file.
            self.journal.on_stall = None

    def _check_writers(self, journal: _core.Journal, fd: int, undo: contextlib.ExitStack) -> None:
        self._has_writers = writers_live(fd)
        if self._has_writers and self.lockfile.in_use:
            self.lockfile.slots.refuse_other_namespaces()
        else:
            journal.disbelieve()
        if is_mounted_read_only(fd):
            self._look_for_writers(undo)

    def _look_for_writers(self, undo: contextlib.ExitStack) -> None:
        """This reader cannot register in LMDB's table of readers: have `check_readable` look for
        writers."""
        self._unprotected = self.directory.open(JOURNAL, os.O_RDONLY)
        undo.callback(os.close, self._unprotected)
        self.check_readable()

    def check_readable(self) -> None:
        """LedgerError for a reader on a read-only mount, or one that began on a full disk, while
        engines write: it is not in LMDB's table of readers, so they would reuse pages that it
        reads."""
        if self._unprotected < 0 or not writers_live(self._unprotected):
            return
        if is_mounted_read_only(self._unprotected):
            raise LedgerError(
                f"{self.path} is mounted read-only here, and an engine writes to it by another "
                "mount. That engine cannot see which pages are read here; mount it read-write and "
                "open it with readonly=True, or read a backup"
            )
        raise LedgerError(
            f"{self.path} was opened with readonly=True while the disk was full, and an engine "
            "writes to it now. That engine cannot see which pages are read here; close this one "
            "and open it again"
        )

    def _check_same_files(self, journal: _core.Journal) -> None:
        """LedgerError if other engines are alive and have other files open than this process."""
        self.lockfile.check_same_life()
        if journal.inode != inode(self.directory):
            engines = self.lockfile.slots.present()
            user = f"engine {engines[0].name!r} (pid {engines[0].pid}) uses" if engines else "used"
            raise LedgerError(
                f"{self.path}/journal was replaced while {user} it; close every engine on the "
                "ledger, then open it"
            )

    @contextlib.contextmanager
    def _writer_lock(self, presence: Presence | None) -> Iterator[None]:
        """Hold the writer lock, unless this process is a reader or alone."""
        journal = self.journal
        if journal is None or presence is None or presence.alone:
            yield
            return
        journal.take_writer_lock()
        try:
            yield
        finally:
            journal.give_writer_lock()

    # ---- closed --------------------------------------------------------------------------

    def page_lost(self) -> bool:
        """Could a page of LMDB's files not be read or written?"""
        return self.environment.lost

    def close(self) -> None:
        """Close all files."""
        self.deaths.stop()
        self._stop_watching()
        if self.journal is not None:
            self.journal.close()
        if self.directory.is_open:  # else other files may have their descriptors' numbers by now
            self._free_spare_room()
            self.environment.close()
            self.segments.close()
            self._close_rest()

    def _close_rest(self) -> None:
        fd, self._unprotected = self._unprotected, -1
        if fd >= 0:
            os.close(fd)
        if self._presence is not None:
            self._presence.close()
        self.lockfile.close()
        self.directory.close()

    def after_fork_in_child(self) -> None:
        """Close the inherited files without a change to the parent's."""
        self.deaths.stop()
        if self.journal is not None:
            self.journal.abandon()
        # A daemon may have closed all descriptors, and opened other files under their numbers.
        ours = self.directory.is_open
        if ours:
            self._free_spare_room()
        if self.environment.after_fork_in_child(ours):
            self.segments.forget()
            self._close_rest()
        elif ours and self._presence is not None:
            self._presence.close()


def _report_foreign(path: str, reported: set[int], topic: int) -> None:
    """Log, once for each topic, that another process has appended as the owner (rule C8)."""
    if topic not in reported:
        reported.add(topic)
        logs.emit(log, logs.FOREIGN, ledger=path, topic_id=topic)
