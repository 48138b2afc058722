"""The ledger: its files and its transactions.

A ledger is a directory:

```text
data.mdb      the LMDB environment: every table (see tables.py)
lock.mdb      LMDB's own lock file
journal       what was appended last, on its way into the tables (see journal.py)
segments/     large entries, which the tables refer to (see segments.py)
owners.lock   who lives, and whom to wake (see lockfile.py)
```

All of them are reached from a descriptor of the directory (files.py). Who is alone on the ledger,
and so recovers it, the kernel's locks say (presence.py).

Every write transaction begins and commits within one call of one thread, and is synced before
it counts (rules A2, H1). The files around this one know of LMDB, too, and no others:
environment.py makes and checks its file, faults.py says what its errors mean.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import lmdb

from exclusivelog import _core, threads
from exclusivelog.environment import (
    DATA,
    check_format,
    check_header,
    copy_up,
    create_environment,
    identity,
    is_mounted_read_only,
    make_directory,
    open_environment,
    open_tables,
    refuse_file_system,
    refuse_incomplete,
    refuse_remains,
    refuse_strangers,
)
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    LedgerIOError,
)
from exclusivelog.events import write_events
from exclusivelog.faults import translated, translation
from exclusivelog.files import Directory, fill_holes, standard_descriptors_taken
from exclusivelog.hangs import Watch
from exclusivelog.journal import NAME as JOURNAL
from exclusivelog.journal import inode, open_file
from exclusivelog.lockfile import JOURNAL_WORDS, LockFile
from exclusivelog.pinned import PinnedPages
from exclusivelog.presence import Presence, writers_live
from exclusivelog.segments import Segments
from exclusivelog.tables import Tables
from exclusivelog.versions import LOCK_VERSION, in_use, lock_version, refuse_other_lock_file

log = logging.getLogger("exclusivelog")

DEFAULT_MAP_SIZE = 1 << 40  # address space that is reserved, not disk that is used
DEFAULT_MAX_READERS = 1022
FORK_WAIT_SECONDS = 5.0
CHILD_WAIT_SECONDS = 0.5
ADOPTION_SECONDS = 600.0  # for the end of a read that began before the map was made larger
CHECKPOINT_SECONDS = 1.0  # the longest that an append waits for its checkpoint
RETRY_SECONDS = 0.25  # after a checkpoint that failed
JOURNAL_GIVEN_UP = "journal-given-up"
PLACE_SECONDS = 1.0  # between two comparisons of the path with the directory, where one is used
# A change of ownership keeps everybody from appending while it takes the journal over. What
# is more than this is taken over before, while others go on.
TAKEN_OVER_AT_ONCE = 256 << 10
MOST_LOOKS = 100

Found = TypeVar("Found")

# An LMDB environment may be open once in a process: engines on one directory share it.
_open_ledgers: dict[tuple[int, int], Ledger] = {}
_opening = threading.RLock()


class Ledger:
    """One directory's tables, shared by all engines of this process. Use `Ledger.open`."""

    def __init__(
        self, path: str, *, create: bool, mode: int, map_size: int, max_readers: int,
        readonly: bool, kill_hung: bool = False,
    ) -> None:  # fmt: skip
        self.path = path
        self.readonly = readonly
        self.users = 0
        self._failure: LedgerError | None = None
        self._writing: Any = threading.RLock()  # it knows its thread
        self._resizing = threading.Lock()
        self._quiet = False
        # Whoever makes producers stand still has it, so that nobody waits for another who does:
        # a transaction while it is committed, a hand-over.
        self.standstill: Any = threading.RLock()
        self._gate = _core.Gate()
        self._starting = threading.Lock()
        self._checkpointer: threading.Thread | None = None
        self._tended = -1  # where the journal's backlog began when we looked last
        self._tend_due = 0.0  # when it is ours to take it out, should nobody else have
        self.closed = self._over = False
        self.journal: _core.Journal | None = None
        self.watch: Watch | None = None
        self._killers = int(kill_hung)
        self._ending = threading.Event()
        # {name: (inode, size)} of the files that must stay.
        self._files: dict[str, tuple[int, int]] = {}
        self._place_due = 0.0
        self._presence: Presence | None = None
        self._beside_writers = False  # when a reader opened it
        self._unguarded = -1  # the journal, where a reader cannot keep writers off its pages
        self._lmdb_lock = -1
        self._guards: list[_core.FileGuard] = []  # of the files that LMDB has mapped
        with contextlib.ExitStack() as undo, translated(path, readonly):
            undo.enter_context(standard_descriptors_taken())
            undo_open = undo.enter_context(contextlib.ExitStack())
            self._open(undo_open, create, mode, map_size, max_readers)
            self.pinned = PinnedPages(path, self.lockfile, self.watch)
            if not readonly:
                self._go_on()
            undo_open.pop_all()

    # ---- open and close ------------------------------------------------------------------

    @classmethod
    def open(
        cls, path: str, *, create: bool, mode: int, map_size: int, max_readers: int,
        readonly: bool, kill_hung: bool = False, power: bool = False,
    ) -> Ledger:  # fmt: skip
        """This directory's ledger: a new one, or the one that this process has open. `power`: what
        is acknowledged is to survive a power loss."""
        path = os.path.abspath(path)
        with _opening, translated(path, readonly):
            refuse_file_system(path, power and not readonly)
            if create and not readonly:
                make_directory(path, mode)
            if not os.path.isdir(path):
                raise LedgerError(f"{path} is no directory; a ledger lives in one of its own")
            # Open ones keep their directories open, so that no other directory has their identity.
            ledger = _open_ledgers.get(identity(path))
            if ledger is None:
                ledger = cls(
                    path, create=create and not readonly, mode=mode, map_size=map_size,
                    max_readers=max_readers, readonly=readonly, kill_hung=kill_hung,
                )  # fmt: skip
                _open_ledgers[ledger.directory.identity] = ledger
            elif ledger.readonly and not readonly:
                raise LedgerError(
                    f"{path} is open with readonly=True in this process; close that engine first"
                )
            elif kill_hung and ledger.watch is not None:
                ledger.watch.killers += 1
            ledger.users += 1
            return ledger

    @staticmethod
    def is_open_here(path: str) -> bool:
        """Does an engine of this process have the ledger at this path open?"""
        with _opening:
            return identity(path) in _open_ledgers

    def close(self) -> None:
        """One user less; the last one closes the files."""
        with _opening:
            self.users -= 1
            if self.users == 0:
                for identity, ledger in list(_open_ledgers.items()):
                    if ledger is self:
                        del _open_ledgers[identity]
                self._end_checkpoints()
                with self._writing:
                    self._gate.close(FORK_WAIT_SECONDS)
                    self._over = True  # whoever is inside still only looks, and loses nothing
                    self._gate.end()
                    self._leave_the_watch()
                    if self.journal is not None:
                        self.journal.close()
                    # Else the descriptors' numbers are other files' by now.
                    if self.directory.is_open:
                        self._env.close()
                        self.segments.close()
                        self._close_files()

    def _close_files(self) -> None:
        self._close_lmdb_lock()
        if self._unguarded >= 0:
            os.close(self._unguarded)
            self._unguarded = -1
        if self._presence is not None:
            self._presence.close()
        self.lockfile.close()
        self.directory.close()

    def _open(
        self, undo: contextlib.ExitStack, create: bool, mode: int, map_size: int, max_readers: int
    ) -> None:
        """Open every file, one process at a time; what is to be undone should that fail."""
        path = self.path
        if not os.access(path, os.R_OK | os.X_OK):
            raise LedgerError(f"{path} may not be looked into by this user; check its owner")
        self.directory = Directory(path)
        undo.callback(self.directory.close)
        refuse_incomplete(self.directory)
        if not create and self.directory.facts(DATA) is None:
            raise LedgerError(
                f"{path} holds no ledger, and "
                f"{'readonly=True' if self.readonly else 'create=False'}"
            )
        refuse_strangers(self.directory)
        refuse_remains(self.directory)
        if self.directory.facts(DATA) is not None and not inode(self.directory):
            self._check_tables_alone()
        else:
            self._check_other_version()
        self.segments = Segments(self.directory, map_size)
        undo.callback(self.segments.close)
        self.lockfile = LockFile(self.directory, mode=mode & 0o666, readonly=self.readonly)
        undo.callback(self.lockfile.close)
        # Who only looks need not wait for one who waits there for the ledger.
        looks = self.readonly and self.lockfile.in_use
        with contextlib.nullcontext() if looks else self.lockfile.opening():
            if not self.readonly:
                self.lockfile.check_in_place()
            if self.directory.facts(DATA) is None:
                create_environment(self.directory, mode)
            if self.readonly:
                copy_up(self.directory, (DATA, JOURNAL))
            check_header(self.directory)
            presence = self._enter(undo, mode)
            self._open_environment(undo, mode, map_size, max_readers)
            with self._turn(presence):
                self._db, header = open_tables(
                    self._env, self.directory, self.readonly, self._is_beside_others(presence)
                )
                self.format, self.uuid = header["version"], header["uuid"]
                if presence is not None and self.journal is not None:
                    self._recover(self.journal, presence.alone)
                    presence.admit_others()
        self._files = {
            name: (facts.st_ino, facts.st_size)
            for name in (DATA, JOURNAL)
            if (facts := self.directory.facts(name))
        }

    def _check_tables_alone(self) -> None:
        """There is no journal: because nobody has opened the tables yet, or it was removed."""
        check_header(self.directory)
        used = check_format(self.directory, self.readonly, in_use(self.directory))
        given_up = self.directory.facts(JOURNAL_GIVEN_UP) is not None
        if used and not given_up and not inode(self.directory):
            raise LedgerCorruptedError(
                f"{self.path}/journal was removed; what was acknowledged last may have been in it. "
                f"Put it back, restore a backup, or make an empty file {JOURNAL_GIVEN_UP!r} there "
                "to go on without it"
            )
        if given_up and not self.readonly:
            self.directory.remove(JOURNAL_GIVEN_UP)

    def _check_other_version(self) -> None:
        """Another version's lock file is replaced only in a ledger that this one opens."""
        if lock_version(self.directory) not in (None, LOCK_VERSION):
            refuse_other_lock_file(self.directory, self.readonly)
            if self.directory.facts(DATA) is not None:
                check_header(self.directory)
                check_format(self.directory, self.readonly, beside_others=False)

    def _open_environment(
        self, undo: contextlib.ExitStack, mode: int, map_size: int, max_readers: int
    ) -> None:
        self._env, self._lmdb_lock = open_environment(
            self.directory, mode, map_size, max_readers, self.readonly, self._guards
        )
        undo.callback(self._close_lmdb_lock)
        undo.callback(self._env.close)
        if any(guard.lost for guard in self._guards):
            raise LedgerFullError(
                f"{self.path}: the disk did not take what LMDB stored in its lock file; make room, "
                "then open it again"
            )
        # C functions, as `_core.Section` wants them.
        self._begin_read = functools.partial(self._env.begin)
        self._begin_write = functools.partial(self._env.begin, write=True)

    def _close_lmdb_lock(self) -> None:
        if self._lmdb_lock >= 0:
            os.close(self._lmdb_lock)
            self._lmdb_lock = -1

    def _go_on(self) -> None:
        """Clear away what a dead process has left, and take over what it has appended."""
        with self.write() as tables:
            ends = {segment: end for segment, (end, _) in tables.large.segments().items()}
            self.segments.sweep(ends)
        if self.journal is not None and self.journal.backlog:
            self.start_checkpoints()  # whoever appended that may be dead

    def _leave_the_watch(self) -> None:
        if self.journal is not None:
            self.journal.on_stall = None  # it would keep us

    # ---- the journal ---------------------------------------------------------------------

    def _enter(self, undo: contextlib.ExitStack, mode: int) -> Presence | None:
        """Open the journal, and find out whether the words about it are to be believed."""
        if self.readonly and not inode(self.directory):
            return None  # there never was one: nobody has opened this ledger to write
        fd, capacity = open_file(self.directory, mode & 0o666, self.readonly)
        try:
            self.journal = _core.Journal(
                self.lockfile.words, JOURNAL_WORDS, fd, capacity, self.readonly
            )
            undo.callback(self.journal.close)
            self.watch = Watch(self.path, self.lockfile, self.journal, self._killers)
            self.journal.on_stall = self.watch.stalled
            undo.callback(self._leave_the_watch)
            if self.readonly:
                self._believe_writers(self.journal, fd)
                return None
            self._presence = presence = Presence(self.directory)
            undo.callback(presence.close)
            presence.enter()
            if not presence.alone:
                self._check_same_files(self.journal)
                self.lockfile.refuse_other_namespaces()
            else:
                fill_holes(fd)
        finally:
            os.close(fd)
        return presence

    def _is_beside_others(self, presence: Presence | None) -> bool:
        """Do other engines have the ledger open to write?"""
        if presence is not None:
            return not presence.alone
        return self._beside_writers

    def _believe_writers(self, journal: _core.Journal, fd: int) -> None:
        self._beside_writers = writers_live(fd)
        if self._beside_writers and self.lockfile.in_use:
            self.lockfile.refuse_other_namespaces()
        else:
            journal.disbelieve()
        if is_mounted_read_only(fd):
            self._unguarded = self.directory.open(JOURNAL, os.O_RDONLY)
            self._refuse_to_read_unguarded()

    def _refuse_to_read_unguarded(self) -> None:
        """A reader on a read-only mount has no place in LMDB's table of readers: writers, through
        another mount, would write over the pages that it reads."""
        if writers_live(self._unguarded):
            raise LedgerError(
                f"{self.path} is mounted read-only here, and an engine writes to it by another "
                "mount: it cannot know what is read here. Mount it read-write and open it with "
                "readonly=True, or read a backup"
            )

    def _check_same_files(self, journal: _core.Journal) -> None:
        """Others live: what we have opened must be what they have."""
        self.lockfile.check_same_life()
        if journal.inode != inode(self.directory):
            engines = self.lockfile.present()
            user = f"engine {engines[0].name!r} (pid {engines[0].pid}) uses" if engines else "used"
            raise LedgerError(
                f"{self.path}/journal was replaced while {user} it; close every engine on the "
                "ledger, then open it"
            )

    @contextlib.contextmanager
    def _turn(self, presence: Presence | None) -> Iterator[None]:
        """Nobody else changes the tables. Who is alone need not mind: nobody else can."""
        journal = self.journal
        if journal is None or presence is None or presence.alone:
            yield
            return
        journal.take_turn()
        try:
            yield
        finally:
            journal.give_turn()

    def _recover(self, journal: _core.Journal, alone: bool) -> None:
        """Take over what a journal has, where nobody knows what is in it: nobody has it open, or
        its flush has failed."""
        if not alone and not journal.failed:
            return
        with self._env.begin(write=True) as txn:
            tables = Tables(txn, self._db, self.path, self.segments, journal)
            # What was acknowledged for certain counts even if something before it is damaged.
            known = journal.known_end(tables.applied, tables.generation)
            if alone:
                self.lockfile.begin_life()
                journal.start(inode(self.directory))
            journal.lock()
            try:
                end = tables.live_end()
                if known > end:
                    log.error(
                        "%s/journal is damaged at position %d, or an older one was put back",
                        self.path, end,
                    )  # fmt: skip
                stop = max(end, known) if alone else journal.tail
                generation = secrets.randbits(63) | 1
                # Nobody can append before a transaction of this life lets him, which records
                # the generation: a flush less for whoever only opens the ledger.
                if stop > tables.applied or not alone or not tables.generation:
                    tables.apply(stop)
                    tables.begin_generation(generation, tables.applied)
                    tables.large.sync()
                    txn.commit()
                journal.begin(generation, tables.applied)
            except BaseException:
                tables.large.undo()
                raise
            finally:
                journal.unlock()

    def checkpoint(self) -> None:
        """Move what the journal has into the tables. Appends go on meanwhile."""
        if self.journal is not None and self.journal.backlog:
            with self._transaction(exclusive=False):
                pass

    def flush(self) -> None:
        """Make durable what the journal has, whoever wrote it."""
        journal = self.journal
        if journal is not None and journal.synced < journal.tail:
            journal.flush_all()
            self.check()

    def settle(self) -> None:
        """Find out what became of a transaction whose process died while it committed."""
        with self.write():
            pass  # it begins behind whatever was committed

    def start_checkpoints(self) -> None:
        """Start the thread that makes checkpoints, unless it runs."""
        if self._checkpointer is None:
            with self._starting:
                if self._checkpointer is None:
                    run = functools.partial(
                        _core.keep_running, self._keep_checkpointing, self._stumbled
                    )
                    thread = threading.Thread(
                        target=run, name="exclusivelog-checkpoint", daemon=True
                    )
                    self._checkpointer = threads.start(self.path, thread)

    def _stumbled(self, error: BaseException) -> None:
        log.error("%s: the thread that makes checkpoints stumbled", self.path, exc_info=error)

    def tend(self) -> None:
        """Have a checkpoint made of what nobody takes out of the journal: whoever appended it
        may be dead. Call it now and then."""
        if self.journal is None or self.readonly:
            return
        applied, now = self.journal.tail - self.journal.backlog, time.monotonic()
        if not self.journal.backlog or applied != self._tended:
            self._tended, self._tend_due = applied, now + 2 * CHECKPOINT_SECONDS
        elif now > self._tend_due:
            self._tend_due = now + 2 * CHECKPOINT_SECONDS
            self.start_checkpoints()
            self.journal.ask()

    def _keep_checkpointing(self) -> None:
        journal = self.journal
        assert journal is not None
        due = 0.0
        while True:
            seen = journal.expect()  # before `closed`: what is said from here on ends the wait
            if self.closed:
                return
            backlog = journal.backlog
            if not backlog:
                journal.await_due(seen, -1.0)
                due = time.monotonic() + CHECKPOINT_SECONDS
                continue
            left = due - time.monotonic()
            if backlog < journal.capacity // 2 and left > 0:
                journal.await_due(seen, left)
                continue
            due = time.monotonic() + CHECKPOINT_SECONDS
            try:
                self.checkpoint()
            except LedgerError as error:  # a full disk, say: appends go on while there is room
                if self._failure is not None:
                    return
                log.warning("%s", error)
                self._ending.wait(RETRY_SECONDS)
            except Exception:
                log.exception("%s: a checkpoint failed", self.path)
                self._ending.wait(RETRY_SECONDS)

    def _end_checkpoints(self) -> None:
        self.closed = True
        self._ending.set()
        if self.journal is None or self.readonly:
            return
        self.journal.ask()
        if self._checkpointer is not None:
            self._checkpointer.join(timeout=60)
        if self._failure is None:
            try:
                self.checkpoint()
            except LedgerError as error:
                log.warning("%s: the journal keeps what it has: %s", self.path, error)

    # ---- transactions --------------------------------------------------------------------

    def write(self) -> Transaction:
        """A write transaction that nobody appends beside (rule B2).

        Durable when the block is left; undone when it is left by an exception. Nobody is
        woken before it is durable. No user code, no waiting inside.

        The tables may lack what the journal has: it suits changes of who may write, which
        must be possible even where there is no room to take the journal over.
        """
        return self._transaction(exclusive=True, applied=False)

    def write_beside(self) -> Transaction:
        """The same, and others append meanwhile: it suits what has nothing to do with who may
        write. What readers have seen is durable before it."""
        return self._transaction(exclusive=False, applied=False)

    def write_all(self) -> Transaction:
        """The same, with all that the journal has in the tables."""
        if self.journal is not None and self.journal.backlog > TAKEN_OVER_AT_ONCE:
            self.checkpoint()
        return self._transaction(exclusive=True)

    def _transaction(self, *, exclusive: bool, applied: bool = True) -> Transaction:
        if self.readonly:
            raise LedgerError(f"{self.path} is open with readonly=True; nothing can be changed")
        if self.busy_here:
            raise LedgerError(
                f"{self.path}: this thread is inside a transaction already; a signal handler or a "
                "finalizer must leave its change to another thread, or to later"
            )
        self.check_place()
        kind = Transaction if applied else Change
        return kind(self, self._writing, self._gate, self._begin_write, self.journal, exclusive)

    @property
    def busy_here(self) -> bool:
        """Is this thread inside a write transaction?"""
        return bool(self._writing._is_owned())

    def read(self) -> Transaction:
        """A read transaction on the tables alone: one consistent moment. Keep it short, it pins
        pages."""
        return Transaction(self, None, self._gate, self._begin_read)

    def look(self, find: Callable[[Tables], Found], unflushed: bool = False) -> Found:
        """What `find` finds in tables and journal. `unflushed`: also among messages that a power
        cut could still take away (rule G6). `find` may be called more than once."""
        for _ in range(MOST_LOOKS):
            # Before the tables: what they lack is then in the journal, without a gap.
            visible = self._visible(unflushed)
            try:
                with self.read() as tables:
                    tables.see(visible)
                    found = find(tables)
                if self._is_lost():  # it may have been found in a page that could not be read
                    self.check()
                return found
            except _core.Outrun:
                continue
        raise LedgerError(f"{self.path}: the journal outran {MOST_LOOKS} looks at it; try again")

    def _visible(self, unflushed: bool) -> int | None:
        if self.journal is None:
            return 0
        if not self.journal.ready:
            return None
        return self.journal.tail if unflushed else self.journal.synced

    def tables(self, txn: lmdb.Transaction[bytes]) -> Tables:
        """The tables in a transaction, unless this ledger has failed."""
        self.check()
        return Tables(txn, self._db, self.path, self.segments, self.journal)

    def check(self) -> None:
        """Raise what this ledger has failed with, here or in another process."""
        if self._failure is None:
            self._look_after_the_place()
        failed = 0 if self.journal is None else self.journal.failed
        if self._failure is None and failed:
            # Only here: somebody may have opened it afresh by now, and that one goes on.
            self._failure = LedgerIOError(
                f"{self.path}: a write or flush failed ({os.strerror(failed)}), and nothing may "
                "pretend to be durable; close every engine on it and open it again"
            )
            log.error("%s", self._failure)
        if self._failure is not None:
            raise self._failure

    def _is_lost(self) -> bool:
        """Could a page of a mapped file not be read or written (see _guard.pxi)?"""
        lost = self.journal is not None and self.journal.lost
        return lost or any(guard.lost for guard in self._guards)

    def _look_after_the_place(self) -> None:
        if self._is_lost():
            self.fail(LedgerIOError(
                f"{self.path}: the disk did not read or take a page of a mapped file (it is full "
                "or was shut down, or a file was cut off); close every engine and open it again"
            ))  # fmt: skip
        elif time.monotonic() > self._place_due or (self.journal and self.journal.left):
            self.check_place()
            if self._unguarded >= 0:
                self._refuse_to_read_unguarded()

    def check_place(self) -> None:
        """LedgerError, for good, once the directory or a file of it is not the one that was opened
        (rule C7): nothing more is acknowledged here. Other processes find out for themselves."""
        self._place_due = time.monotonic() + PLACE_SECONDS
        if self._failure is None and not self._over and self._files:
            why = self.directory.lost() or self._replaced()
            if why and not self._over:  # else it is being closed, by another thread
                self._lose(LedgerError(
                    f"{self.path} is no longer the ledger that this engine has open: {why}; close "
                    "the engine and open the ledger again"
                ))  # fmt: skip
        if self._failure is not None:
            raise self._failure

    def _replaced(self) -> str:
        for name, (number, size) in self._files.items():
            try:
                facts = self.directory.facts(name)
            except OSError:  # privileges were dropped, or another thread closes the ledger
                continue  # then it cannot be told; whatever needs the file says why
            if facts is None or facts.st_ino != number:
                return f"its {name} was {'removed' if facts is None else 'replaced'}"
            if facts.st_size < size:
                return f"its {name} was cut off"
            self._files[name] = number, facts.st_size  # neither of them ever shrinks
        return ""

    def _lose(self, error: LedgerError) -> None:
        self._failure = error
        if self.journal is not None and not self.readonly:
            self.journal.leave(errno.ESTALE)
        log.error("%s", error)

    @property
    def over(self) -> bool:
        """Has this ledger failed for good? Then nothing that is waited for will come."""
        return self._failure is not None

    def recover(self, error: BaseException) -> None:
        """Make a second try to begin a transaction worthwhile; raises if it cannot be."""
        if isinstance(error, lmdb.MapResizedError):
            self._adopt_map_size()
        elif isinstance(error, lmdb.ReadersFullError):
            self._env.reader_check()  # rows of dead processes
        else:
            raised = self.translated(error)
            if raised is not None:
                raise raised from error
            raise error

    def translated(self, error: BaseException) -> ExclusiveLogError | None:
        """The library's own error for one of LMDB's or the system's; None for any other."""
        if self._over and isinstance(error, lmdb.Error):
            return EngineClosedError(f"the ledger {self.path} was closed meanwhile")
        raised = translation(self.path, error, self.readonly)
        if isinstance(raised, LedgerIOError):
            self.fail(raised)
        return raised

    @contextlib.contextmanager
    def environment(self) -> Iterator[lmdb.Environment]:
        """LMDB's environment, which stays open while the block runs."""
        if self._failure is not None:
            raise self._failure
        if not self._gate.enter():
            raise EngineClosedError(f"the ledger {self.path} was closed meanwhile")
        try:
            yield self._env
        finally:
            self._gate.leave()

    def _adopt_map_size(self) -> None:
        # Another process has made the map larger than ours. LMDB moves it, which it can only
        # do while this process has no transaction.
        with self._resizing:
            end = time.monotonic() + ADOPTION_SECONDS
            while not self._adopted():
                # A long read of this process is still under way. It is not to fail, nor is who
                # waits for it; and it may itself have to go in a second time.
                if time.monotonic() > end:
                    raise LedgerError(
                        f"{self.path}: another process has made the map larger, and one read of "
                        f"this process has been under way for {ADOPTION_SECONDS:.0f} s; open it "
                        "with the same map_size in every process"
                    )

    def _adopted(self) -> bool:
        try:
            if not self._gate.close(FORK_WAIT_SECONDS):
                return False
            self._env.set_mapsize(0)
            return True
        finally:
            self._gate.open()

    def fail(self, error: LedgerIOError) -> None:
        """Refuse everything from now on: after a failed flush nothing may pretend to be
        durable. Closing and opening again starts from what is."""
        if self._failure is None and not self._over:
            self._failure = error
            if self.journal is not None and not self.readonly:
                self.journal.fail(errno.EIO)
            log.error("%s", error)

    # ---- facts ---------------------------------------------------------------------------

    def find_pinned(self) -> None:
        """Report who makes the tables grow by a read that does not end. Call it now and then."""
        if self.pinned.due:
            with self.environment() as env:
                self.pinned.look(env)

    def oldest_reader(self) -> dict[str, object] | None:
        """Who reads the oldest snapshot; None where no read is behind."""
        with self.environment() as env:
            return self.pinned.oldest(env)

    def stats(self) -> dict[str, int]:
        """Sizes in bytes and counts, as LMDB knows them."""
        with self.environment() as env, translated(self.path, fail=self.fail):
            info = env.info()
            page = env.stat()["psize"]
            with env.begin() as txn:
                large = self.tables(txn).large.total_bytes()
            return {
                "map_size": info["map_size"],
                "used_bytes": (info["last_pgno"] + 1) * page,
                "journal_bytes": 0 if self.journal is None else self.journal.backlog,
                "large_bytes": large,
                "transactions": info["last_txnid"],
                "max_readers": info["max_readers"],
                "readers": info["num_readers"],
            }

    # ---- fork ----------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Before a fork: wait until no transaction runs, so that the child can close its copy.
        Not for one of this very thread, which a signal handler has interrupted."""
        busy = self.busy_here
        self._quiet = self._gate.close(0.0 if busy else FORK_WAIT_SECONDS)
        if busy and self._gate.inside == 1:
            self._quiet = True  # and nobody else is: this thread is not in LMDB itself

    def resume(self) -> None:
        """After a fork, in the parent."""
        self._gate.open()

    def abandon(self) -> None:
        """After a fork, in the child: let go of the inherited copy without touching the
        parent's. LMDB may be opened once in a process, and the child wants it for itself."""
        self._over = True  # what fails here from now on is no matter of the parent's
        if self._leave_the_readers():
            if self._quiet:
                self._env.close()
            else:  # a thread of the parent's may have been inside LMDB, which waits for it then
                closing = threading.Thread(target=self._env.close, daemon=True)
                closing.start()
                closing.join(CHILD_WAIT_SECONDS)
            self.segments.forget()
            self._close_files()
        if self.journal is not None:
            self.journal.abandon()
        if self._presence is not None:
            self._presence.close()

    def _leave_the_readers(self) -> bool:
        # A transaction that is over keeps its place in LMDB's table of readers until its object
        # is gone. Closing gives the places of all such objects back, and they are the parent's:
        # in a table of the child's own that harms nobody.
        try:
            facts = os.fstat(self._lmdb_lock)
            with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
                lines = [line.split(maxsplit=5) for line in maps]
        except OSError:
            return False
        for span, _, _, _, number, *name in lines:
            if int(number) == facts.st_ino and name and "/lock.mdb" in name[0]:
                start, end = (int(text, 16) for text in span.split("-"))
                _core.make_private(start, end - start)
                return True
        return False


if TYPE_CHECKING:
    _Section = _core.Section[Tables]
else:
    _Section = _core.Section


class Transaction(_Section):
    """A transaction on a ledger, as a context manager that gives its tables."""

    __slots__ = ()

    def opened(self, txn: lmdb.Transaction[bytes]) -> Tables:
        """What the block works with."""
        tables: Tables = self.ledger.tables(txn)
        self._take_over(tables)
        return tables

    def caught_up(self, tables: Tables) -> None:
        """Nobody appends from now on: take over what has come meanwhile."""
        self._take_over(tables)

    def _take_over(self, tables: Tables) -> None:
        try:
            if self.journal is not None:
                version = self.journal.version  # before the tail: what comes behind it has no less
                tables.apply(self.journal.tail, version)
        except BaseException:
            tables.large.undo()
            raise

    def recover(self, error: BaseException) -> None:
        """It could not begin."""
        self.ledger.recover(error)

    def finish(self, tables: Tables) -> None:
        """What must be done before the commit."""
        if tables.settle is not None:
            tables.settle(tables)
        write_events(tables)
        tables.record_generation()
        if self.held and self.journal is not None and tables.rows.changed:
            tables.mark(self.journal.tail, self.journal.version + 1)  # that of after the commit
        tables.large.sync()
        self.ledger.check()  # what was read may have come from a page that could not be read

    def undo(self, tables: Tables) -> None:
        """What must be done where there is no commit."""
        tables.large.undo()

    def failed(self, error: BaseException) -> None:
        """The block, or the commit, has failed."""
        raised = self.ledger.translated(error)
        if raised is not None:
            raise raised from error

    def waken(self, tables: Tables) -> list[tuple[Callable[[int], None], tuple[int]]]:
        """Whom to wake now that it is durable."""
        lockfile: LockFile = self.ledger.lockfile
        readers = [(lockfile.announce, (topic,)) for topic in tables.announce]
        empty = [(self.ledger.segments.remove, (segment,)) for segment in tables.large.emptied]
        engines = [(lockfile.ring, (slot,)) for slot in tables.ring]  # one may have become owner
        return engines + readers + empty


class Change(Transaction):
    """A transaction that leaves the journal where it is, but flushes it: whoever becomes owner
    must see what the former owners have written, also if they died before their own flush."""

    __slots__ = ()

    def opened(self, txn: lmdb.Transaction[bytes]) -> Tables:
        """What the block works with."""
        tables: Tables = self.ledger.tables(txn)
        self.ledger.flush()  # most of it while others go on appending
        return tables

    def caught_up(self, tables: Tables) -> None:
        """Nobody appends from now on: flush what has come meanwhile."""
        self.ledger.flush()


def _before_fork() -> None:
    _opening.acquire()
    for ledger in _open_ledgers.values():
        ledger.quiesce()


def _after_fork_in_parent() -> None:
    for ledger in _open_ledgers.values():
        ledger.resume()
    _opening.release()


_inherited: list[Ledger] = []


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.RLock()
    for ledger in _open_ledgers.values():
        ledger.abandon()
        _inherited.append(ledger)  # its destructor must not run either
    _open_ledgers.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
