"""The ledger: its transactions, and its files, which all engines of this process share.

A ledger is a directory:

```text
data.mdb      the LMDB environment: every table (see tables.py)
lock.mdb      LMDB's own lock file
journal       the newest messages, until a checkpoint moves them into the tables (see journal.py)
segments/     large entries, to which the tables refer (see segments.py)
owners.lock   liveness and wake-up counters of engines (see lockfile.py)
```

Every write transaction begins and commits within one call of one thread, and is flushed before it
counts (rules A2, H1). `_core.Section` takes and releases the locks of a transaction; `Transaction`
and `FlushingTransaction` have the steps before and after its block.

opening.py opens the files, relative to a descriptor of the directory (files.py); integrity.py fails
the ledger when they are lost; checkpointer.py makes checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import lmdb

from exclusivelog import _core, threads
from exclusivelog.errors import EngineClosedError, LedgerError
from exclusivelog.foreign import pass_on_foreign
from exclusivelog.local.faults import (
    is_nearly_full,
    map_full,
    may_be_truncated,
    no_room,
    translated,
)
from exclusivelog.local.files import DATA, JOURNAL, LOCK, OWNERS, standard_descriptors_taken
from exclusivelog.local.storage.before_commit import BeforeCommit
from exclusivelog.local.storage.changes import is_logged, log_changes
from exclusivelog.local.storage.checkpointer import Checkpointer, apply_frames, recover
from exclusivelog.local.storage.environment import (
    BUSY_FORK_WAIT_SECONDS,
    MAP_RESERVED,
    identity,
    make_directory,
)
from exclusivelog.local.storage.environment import DEFAULT_MAP_SIZE as DEFAULT_MAP_SIZE
from exclusivelog.local.storage.forgetting import forget
from exclusivelog.local.storage.integrity import Integrity
from exclusivelog.local.storage.journal import inode
from exclusivelog.local.storage.mounts import refuse_file_system
from exclusivelog.local.storage.opening import OpenFiles, Options
from exclusivelog.local.storage.reserve import Reserve
from exclusivelog.local.storage.tables import Tables
from exclusivelog.local.storage.usage import Usage

DEFAULT_MAX_READERS = 1022
CLOSE_WAIT_SECONDS = 5.0
# What a transaction has applied of the journal is lost if it is refused, and a checkpointed one
# stops all appends meanwhile. A backlog of more bytes than this is applied by a checkpoint before.
APPLIED_AT_ONCE = 256 << 10
FENCE_SECONDS = 0.005  # a change of owners rarely takes longer
MOST_ATTEMPTS = 100
READ_POLL_SECONDS = 0.002

Found = TypeVar("Found")
Calls = list[tuple[Callable[..., None], tuple[Any, ...]]]

if TYPE_CHECKING:
    _Section = _core.Section[Tables]
else:
    _Section = _core.Section

# LMDB allows one environment on a file in a process: engines on one directory share a ledger.
_open_ledgers: dict[tuple[int, int], Ledger] = {}
_opening = threading.RLock()


def _identity_of_directory(path: str) -> tuple[int, int]:
    """What `identity` returns; LedgerError if the path leads to no directory."""
    facts: os.stat_result | None = None
    try:
        facts = os.stat(path)
    except PermissionError as error:
        pass_on_foreign(error)
        raise LedgerError(
            f"{path} cannot be reached by this user; check owner and mode of the directories above"
        ) from None
    except OSError as error:
        pass_on_foreign(error)
    if facts is None or not stat.S_ISDIR(facts.st_mode):
        raise LedgerError(f"{path} does not exist or is not a directory; a ledger is a directory")
    return facts.st_dev, facts.st_ino


class Ledger:
    """One directory's tables, shared by all engines of this process. Use `Ledger.open`.

    `pause_lock` serialises the operations that pause producers (a transaction while it commits, a
    hand-over), in all engines of this process: two of them would wait for each other's producers.
    """

    def __init__(self, path: str, options: Options) -> None:
        self.path = path
        self.readonly = options.readonly
        self.users = 0
        self.holders: list[str] = []  # names of engines
        self.dropped: list[str] = []  # of those, read-only engines that were dropped, not closed
        self.before_commit = BeforeCommit()
        # An RLock, because it knows whether this thread holds it.
        self._writing: Any = threading.RLock()
        self.pause_lock: Any = threading.RLock()
        with translated(path, options.readonly), standard_descriptors_taken():
            self._files = files = OpenFiles(path, options, recover_journal)
            try:
                self.directory, self.segments = files.directory, files.segments
                self.lockfile, self.journal, self.watch = files.lockfile, files.journal, files.watch
                self.deaths = files.deaths
                self.format, self.uuid = files.format, files.uuid
                self._environment = files.environment
                self.integrity = integrity = Integrity(
                    self.directory,
                    (DATA, JOURNAL, LOCK, OWNERS),
                    self.journal,
                    self.readonly,
                    page_lost=files.page_lost,
                    check_readable=files.check_readable,
                )
                # No reference cycle, so that the files are unmapped with their last user.
                ledger = weakref.proxy(self)
                self.usage = Usage(
                    files,
                    integrity.fail,
                    lambda: ledger.environment(),
                    lambda txn: ledger.tables(txn).large.total_bytes(),
                    files.environment.grow,
                )
                self.checkpointer = Checkpointer(
                    path,
                    None if self.readonly else self.journal,
                    lambda: ledger.checkpoint(),
                    lambda: integrity.failed,
                )
                self.reserve = Reserve(
                    files.directory, 0 if self.journal is None else self.journal.capacity
                )
                if not self.readonly:
                    self._clear_up()
                    self.reserve.keep()
            except BaseException:
                files.close()
                raise

    # ---- open and close ------------------------------------------------------------------

    @classmethod
    def open(cls, path: str, options: Options, power: bool = False) -> Ledger:
        """This directory's ledger: the one that this process has open, or else opened now. `power`:
        acknowledged messages must survive a power loss."""
        path = os.path.abspath(path)
        with _opening, translated(path, options.readonly):
            refuse_file_system(path, power and not options.readonly)
            if options.create:
                make_directory(path, options.mode)
            # An open ledger keeps its directory open, so no other directory has its identity.
            where = _identity_of_directory(path)
            ledger = _open_ledgers.get(where)
            if ledger is not None and ledger.readonly and not options.readonly:
                ledger._close_dropped()
                ledger = _open_ledgers.get(where)
            if ledger is None:
                ledger = cls(path, options)
                _open_ledgers[ledger.directory.identity] = ledger
            elif ledger.readonly and not options.readonly:
                raise LedgerError(
                    f"{path} is open with readonly=True in this process, by "
                    f"{', '.join(sorted(map(repr, ledger.holders)))}; close that engine first, or "
                    "open it to write: an engine that writes reads, too"
                )
            elif options.kill_stalled and ledger.watch is not None:
                ledger.watch.killers += 1
            ledger.users += 1
            try:
                ledger._files.refuse_elsewhere(power and not options.readonly)
            except BaseException:
                ledger.close()
                raise
            return ledger

    @staticmethod
    def is_open_here(path: str) -> bool:
        """Does an engine of this process have this ledger open?"""
        with _opening:
            return identity(path) in _open_ledgers

    def _close_dropped(self) -> None:
        while self.dropped:
            self.holders.remove(self.dropped.pop())
            self.close()

    def close(self) -> None:
        """Remove one user; the last one closes the files."""
        with _opening:
            self.users -= 1
            if self.users == 0:
                for identity, ledger in list(_open_ledgers.items()):
                    if ledger is self:
                        del _open_ledgers[identity]
                self.checkpointer.stop()
                with self._writing:
                    gate = self._environment.gate
                    gate.close(CLOSE_WAIT_SECONDS)
                    # A transaction that is still running can only read.
                    self.integrity.closed = True
                    gate.end()
                    self._files.close()

    def _clear_up(self) -> None:
        """Remove segments that dead processes left, and apply what they appended."""
        with self.write_exclusive() as tables:
            tables.compression.check_libraries()
            tables.large.sweep()
        self.remove_unneeded()
        if self.journal is not None and self.journal.backlog:
            self.checkpointer.start()

    # ---- transactions --------------------------------------------------------------------

    def write_exclusive(self, until: int = 0) -> Transaction:
        """An exclusive write transaction: no process appends meanwhile (rule B2).

        It is durable when the block is left, and rolled back when the block raises. Waiting engines
        and readers are woken once it is durable. Run no user code in it, and wait for nothing.

        The tables may lack messages that the journal has.

        WaitTimeoutError if the transaction cannot begin before `until` (ns of the monotonic clock,
        0: no limit), because another process is stopped inside one.
        """
        return self._transaction(exclusive=True, kind=FlushingTransaction, until=until)

    def write_fencing(self, until: int = 0, applied: bool = False) -> Transaction:
        """A fencing write transaction: as `write_exclusive`, but only for the topics that it
        concerns (rule K3): for changes of ownership. Nobody appends to a topic from the time when
        the block asks for its end, or for the last sequence id of a producer, until the commit;
        nor during the commit to any topic that the block has changed. So the process may be paused
        inside, and appends to other topics go on.

        `applied`: the tables have the journal's messages as of the beginning. Without, it succeeds
        even if there is no room to apply them."""
        if applied and self.journal is not None and self.journal.backlog > APPLIED_AT_ONCE:
            self.checkpoint(until)
        kind = Transaction if applied else FlushingTransaction
        return self._transaction(fencing=True, kind=kind, until=until)

    def write_concurrent(self, until: int = 0) -> Transaction:
        """A concurrent write transaction: as `write_exclusive`, but appends go on meanwhile. Use it
        for changes that do not concern ownership. What readers have seen is flushed before it
        commits."""
        return self._transaction(exclusive=False, kind=FlushingTransaction, until=until)

    def write_checkpointed(self, until: int = 0) -> Transaction:
        """A checkpointed write transaction: as `write_exclusive`, with the whole journal applied to
        the tables."""
        if self.journal is not None and self.journal.backlog > APPLIED_AT_ONCE:
            self.checkpoint(until)
        return self._transaction(exclusive=True, until=until)

    def write_freeing(self) -> Transaction:
        """A checkpointed write transaction that may use the reserve: for trims, which remove some
        of the journal's messages as soon as the tables have them."""
        return self._transaction(exclusive=True, kind=FreeingTransaction)

    def _transaction(
        self,
        *,
        exclusive: bool = False,
        fencing: bool = False,
        kind: type[Transaction] | None = None,
        until: int = 0,
    ) -> Transaction:
        if self.readonly:
            raise LedgerError(f"{self.path} is open with readonly=True; nothing can be changed")
        if self.busy_here:
            raise LedgerError(
                f"{self.path}: called re-entrantly, from a signal handler or a finalizer that "
                "interrupted a transaction of the same thread; call it from another thread"
            )
        self.integrity.check_place()
        environment = self._environment
        return (kind or Transaction)(
            self,
            self._writing,
            environment.gate,
            environment.begin_write,
            self.journal,
            exclusive,
            until,
            fencing,
        )

    @property
    def busy_here(self) -> bool:
        """Is this thread inside a write transaction?"""
        return bool(self._writing._is_owned())

    @property
    def inside_here(self) -> bool:
        """Is this thread inside any transaction, or on its way into one?"""
        return self.busy_here or self._environment.gate.of_this_thread() > 0

    def checkpoint(self, until: int = 0) -> None:
        """Move the journal's messages into the tables. Appends go on meanwhile. `until` as in
        `write_exclusive`."""
        journal = self.journal
        if journal is not None and journal.backlog:
            began, applied = _core.now(), journal.applied
            with self._transaction(exclusive=False, until=until):
                pass
            if self.reserve.spent:
                self.reserve.keep()
            moved = max(0, journal.applied - applied)
            self.lockfile.figures.note_checkpoint(_core.now() - began, moved)

    def flush(self) -> None:
        """Flush the journal, with the messages of all processes."""
        journal = self.journal
        if journal is not None and journal.synced < journal.tail:
            journal.flush_all()
            self.check()

    def settle(self, until: int = 0) -> None:
        """Wait for the end of a transaction that has fenced topics; determine whether one has
        committed whose process died during the commit. `until` as in `write_exclusive`."""
        if self.journal is not None and self.journal.await_fences(FENCE_SECONDS):
            return
        with self._transaction(fencing=True, kind=EmptyTransaction, until=until):
            pass  # beginning a transaction is enough

    def read(self) -> Transaction:
        """A read transaction: a snapshot of the tables, without the journal. Keep it short: LMDB
        cannot reuse the pages that it may read."""
        return Transaction(self, None, self._environment.gate, self._environment.begin_read)

    def scan(self) -> Transaction:
        """The same, with rows as memoryviews, which copy no values: for work that looks at many."""
        return Transaction(self, None, self._environment.gate, self._environment.begin_scan)

    def inspect(self, find: Callable[[Tables], Found], unflushed: bool = False) -> Found:
        """Call `find` with a snapshot of tables and journal, and return its result. `unflushed`:
        include messages that a power loss could still take away (rule G6). `find` may be called
        repeatedly.

        Raises LedgerError if the journal was overwritten during every attempt.
        """
        for _ in range(MOST_ATTEMPTS):
            # Read before the tables: the journal then has all that they lack.
            visible = self._visible(unflushed)
            try:
                with self.read() as tables:
                    tables.journal.see(visible)
                    found = find(tables)
                self.integrity.check_pages()
                return found
            except _core.JournalOverwritten:
                continue
        raise LedgerError(
            f"{self.path}: the journal was overwritten during each of {MOST_ATTEMPTS} reads; retry"
        )

    def _visible(self, unflushed: bool) -> int | None:
        if self.journal is None:
            return 0
        if not self.journal.ready:
            return None
        return self.journal.tail if unflushed else self.journal.synced

    # ---- segments that no row refers to --------------------------------------------------

    def remove_unneeded(self, patience: float = 0.0) -> None:
        """Remove segments to which no row refers, and no open read. Waits up to `patience` seconds
        for the ends of reads; what they last longer for is left to a later call, or to the next
        process that opens the ledger."""
        end = _core.monotonic() + patience
        while self.segments.unneeded:
            self.segments.unneeded.remove(self.usage.oldest_read())
            if _core.monotonic() >= end:
                break
            if self.segments.unneeded:
                time.sleep(READ_POLL_SECONDS)

    # ---- for a transaction ---------------------------------------------------------------

    def tables(self, txn: lmdb.Transaction[bytes]) -> Tables:
        """The tables in a transaction, unless this ledger has failed."""
        self.integrity.check()
        return _tables(self._files, txn)

    def check(self) -> None:
        """Raise the error with which this ledger has failed, here or in another process."""
        self.integrity.check()

    def recover(self, error: BaseException) -> None:
        """Remove the cause for which a transaction could not begin, for a second attempt; raise if
        that is impossible."""
        if isinstance(error, lmdb.MapResizedError):
            self._environment.adopt_map_size()
        elif isinstance(error, lmdb.ReadersFullError):
            self._environment.lmdb.reader_check()  # frees the places of dead processes
        else:
            self.refuse_in_child(error)
            raised = self.translated(error)
            if raised is not None:
                raise raised from error
            raise error

    def refuse_in_child(self, error: BaseException) -> None:
        """EngineClosedError in a forked child, whatever error there was: a signal handler that
        forked may have interrupted a transaction, or what leads to one (rule C5)."""
        if self._environment.inherited and isinstance(error, Exception):
            raise EngineClosedError(
                f"the ledger {self.path} was inherited through fork(); open an engine of your own "
                "in the child"
            ) from error

    def translated(self, error: BaseException) -> Exception | None:
        """The library's error for one of LMDB's or the system's; None for any other."""
        if isinstance(error, lmdb.MapFullError):
            return map_full(self.path, self._pinned_by())
        return self.integrity.translated(error)

    def is_nearly_full(self) -> bool:
        """Has the disk hardly any room?"""
        return is_nearly_full(self._files.directory.fd)

    def own_meta_pages(self) -> None:
        """Give the pages with which LMDB ends a transaction blocks of their own, where a copy may
        share them. OSError (ENOSPC) if there is no room: if LMDB found that out, it would fail."""
        self._files.own_meta_pages()

    def _pinned_by(self) -> str:
        pinned = self._environment.pinned
        with contextlib.suppress(LedgerError):
            return self.usage.describe_oldest(pinned) if pinned else ""
        return ""

    # ---- facts ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def environment(self) -> Iterator[lmdb.Environment]:
        """LMDB's environment, kept open while the block runs."""
        self.integrity.raise_failure()
        with self._environment.use() as env:
            yield env

    # ---- fork ----------------------------------------------------------------------------

    def after_fork_in_child(self) -> None:
        """Close the inherited files without a change to the parent's."""
        self.integrity.closed = True  # an error in the child does not fail the parent's ledger
        self._files.after_fork_in_child()
        for lock in (self._writing, self.pause_lock):
            threads.renew(lock)


class Transaction(_Section):
    """A transaction that applies the journal's frames to the tables, where it may write."""

    __slots__ = ("_scarce",)  # had the disk hardly any room, just before the commit?

    def opened(self, txn: lmdb.Transaction[bytes]) -> Tables:
        """The tables for the block."""
        tables: Tables = self.ledger.tables(txn)
        self._apply_journal(tables, forget)
        if self.fencing:
            tables.fence = self.fence
        return tables

    def caught_up(self, tables: Tables) -> None:
        """Apply what was appended meanwhile; appends are excluded from here on."""
        self._apply_journal(tables)

    def _apply_journal(
        self, tables: Tables, then: Callable[[Tables], object] = lambda tables: None
    ) -> None:
        try:
            if self.journal is not None:
                # Read before the tail, so that no later frame has a lower version.
                version = self.journal.version
                apply_frames(tables, self.journal.tail, version)
                then(tables)
                # Nothing else was written yet. Who remembers a topic's end follows the journal,
                # wherever its frames are.
                tables.rows.changes.clear()
        except BaseException:
            tables.large.undo()
            raise

    def recover(self, error: BaseException) -> None:
        """Remove the cause for which the transaction could not begin, or raise."""
        self.ledger.recover(error)

    def finish(self, tables: Tables) -> None:
        """The steps before the commit."""
        self.ledger.before_commit.settle(tables)
        tables.check_room()
        if not (self.exclusive or self.fencing):  # it concerns no owner
            tables.check_reserve()
        self.fence_changes(tables.rows.changes)
        self.ledger.before_commit.record(tables)  # in `__events__`, to which nobody appends
        tables.journal.record_generation()
        if self.journal is not None and tables.rows.changed:
            if self.held:
                version = self.journal.version + 1  # the one after the commit
                tables.journal.mark(self.journal.tail, version)
            elif self.fenced_version:
                tables.journal.mark(self.fenced_at, self.fenced_version)
        if self.fencing:
            self._flush_what_was_fenced(tables)
        tables.large.sync()
        self.ledger.own_meta_pages()
        self._scarce = self.ledger.is_nearly_full()
        self.ledger.check()  # what was read may have come from a page that was lost

    def _flush_what_was_fenced(self, tables: Tables) -> None:
        # What the former owners have written, even if they died before their own flush.
        journal, end = self.journal, self.fenced_at
        if journal is not None and self.held:
            end = journal.tail
        if journal is not None and end > max(journal.synced, tables.journal.applied):
            self.ledger.flush()

    def undo(self, tables: Tables) -> None:
        """The steps of a rollback."""
        tables.large.undo()

    def failed(self, error: BaseException) -> None:
        """Translate an error of the block or the commit; a final one fails the ledger."""
        self.ledger.refuse_in_child(error)
        if self.tried and self._scarce and may_be_truncated(error):
            # Also if there is room by now.
            raise no_room(self.ledger.path, error) from error
        raised = self.ledger.translated(error)
        if raised is not None:
            raise raised from error

    def waken(self, tables: Tables) -> Calls:
        """The calls that wake engines and readers, to be made once the transaction is durable."""
        lockfile = self.ledger.lockfile
        engines: Calls = [(lockfile.slots.notify, (slot,)) for slot in tables.to_notify]  # first
        readers: Calls = [(lockfile.counters.announce, (topic,)) for topic in tables.announce]
        empty = self._remove_segments(tables)
        return engines + readers + empty + self._count(tables) + self._log_changes(tables)

    def _remove_segments(self, tables: Tables) -> Calls:
        if not tables.large.emptied:
            return []
        discard = (self.ledger.segments.unneeded.add, (tables.large.emptied,))
        return [discard, (self.ledger.remove_unneeded, ())]

    def _count(self, tables: Tables) -> Calls:
        if not tables.appended:
            return []
        return [(self.ledger.lockfile.figures.note_tables, tables.appended)]

    def _log_changes(self, tables: Tables) -> Calls:
        if not tables.committed or not is_logged():
            return []
        ledger = self.ledger
        return [(log_changes, (ledger.path, tables.committed, ledger.lockfile.slots))]


class FreeingTransaction(Transaction):
    """A transaction that applies the journal although that exceeds `map_size` for a moment."""

    __slots__ = ()

    def opened(self, txn: lmdb.Transaction[bytes]) -> Tables:
        """The tables for the block."""
        tables: Tables = self.ledger.tables(txn)
        tables.large.excess = MAP_RESERVED
        self._apply_journal(tables)
        return tables


class FlushingTransaction(Transaction):
    """A transaction that flushes the journal without applying it: a new owner must see what the
    former owners have written, even if they died before their own flush."""

    __slots__ = ()

    def opened(self, txn: lmdb.Transaction[bytes]) -> Tables:
        """The tables for the block."""
        tables: Tables = self.ledger.tables(txn)
        self.ledger.flush()  # flushes most of it while other processes go on appending
        if self.fencing:
            tables.fence = self.fence
        return tables

    def caught_up(self, tables: Tables) -> None:
        """Flush what was appended meanwhile; appends are excluded from here on."""
        self.ledger.flush()


class EmptyTransaction(Transaction):
    """A transaction that changes nothing, and so applies and flushes nothing."""

    __slots__ = ()

    def opened(self, txn: lmdb.Transaction[bytes]) -> Tables:
        """The tables for the block."""
        tables: Tables = self.ledger.tables(txn)
        return tables


# ---- recovery, and forks -----------------------------------------------------------------


def _tables(files: OpenFiles, txn: lmdb.Transaction[bytes]) -> Tables:
    return Tables(
        txn, files.databases, files.path, files.segments, files.journal, files.environment.room
    )


def recover_journal(files: OpenFiles, journal: _core.Journal, alone: bool) -> None:
    """Recover the journal if this process is alone, or if a flush of it has failed."""

    def begin_life() -> None:
        files.lockfile.begin_life()
        journal.start(inode(files.directory))

    if alone or journal.failed:
        with files.environment.lmdb.begin(write=True) as txn:
            recover(_tables(files, txn), txn, journal, begin_life if alone else None)


class Fork:
    """What a fork of this process has shut until it is over."""

    def __init__(self) -> None:
        self.holds_opening = False
        self.shut: list[Ledger] = []

    def begin(self) -> None:
        """Wait until no other thread opens a ledger, or is in a transaction."""
        # A signal handler that forks may have interrupted what such a thread waits for: then the
        # wait is short.
        busy = any(ledger.inside_here for ledger in list(_open_ledgers.values()))
        self.holds_opening = _opening.acquire(timeout=BUSY_FORK_WAIT_SECONDS if busy else -1)
        for ledger in list(_open_ledgers.values()):
            self.shut.append(ledger)
            ledger._environment.before_fork(busy)

    def end(self) -> None:
        """Let others go on, in the parent."""
        for ledger in self.shut:
            ledger._environment.after_fork_in_parent()
        if self.holds_opening:
            _opening.release()


# By thread: two may fork at once, and a signal handler that forks may interrupt another fork.
_forks: dict[int, list[Fork]] = {}


def _before_fork() -> None:
    fork = Fork()
    _forks.setdefault(threading.get_ident(), []).append(fork)
    fork.begin()


def _after_fork_in_parent() -> None:
    mine = _forks[threading.get_ident()]
    mine.pop().end()
    if not mine:
        del _forks[threading.get_ident()]


_inherited: list[Ledger] = []


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.RLock()
    _forks.clear()
    for ledger in _open_ledgers.values():
        ledger.after_fork_in_child()
        # Keep it referenced: its destructor must not run either.
        _inherited.append(ledger)
    _open_ledgers.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
_core.in_forked_child(_after_fork_in_child)
