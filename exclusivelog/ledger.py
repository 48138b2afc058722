"""The ledger: its files and its transactions.

A ledger is a directory:

```text
data.mdb      the LMDB environment: every table (see tables.py)
lock.mdb      LMDB's own lock file
journal       what was appended last, on its way into the tables (see journal.py)
segments/     large entries, which the tables refer to (see segments.py)
owners.lock   who lives, and whom to wake (see lockfile.py)
```

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

from exclusivelog import _core
from exclusivelog.environment import (
    check_header,
    create_environment,
    identity,
    make_directory,
    open_environment,
    open_tables,
    refuse_remote,
)
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerError,
    LedgerIOError,
)
from exclusivelog.events import write_events
from exclusivelog.faults import translated, translation
from exclusivelog.hangs import Watch
from exclusivelog.journal import inode, open_journal, refuse_a_second_life
from exclusivelog.lockfile import LockFile
from exclusivelog.segments import Segments
from exclusivelog.tables import Tables

log = logging.getLogger("exclusivelog")

DEFAULT_MAP_SIZE = 1 << 40  # address space that is reserved, not disk that is used
DEFAULT_MAX_READERS = 1022
FORK_WAIT_SECONDS = 5.0
CHILD_WAIT_SECONDS = 0.5
CHECKPOINT_SECONDS = 1.0  # the longest that an append waits for its checkpoint
RETRY_SECONDS = 0.25  # after a checkpoint that failed
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
        self._failure: LedgerIOError | None = None
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
        self.closed = self._over = False
        self.journal: _core.Journal | None = None
        self.watch: Watch | None = None
        self._killers = int(kill_hung)
        self._ending = threading.Event()
        self.segments = Segments(path, mode, map_size)
        with contextlib.ExitStack() as undo:
            undo.callback(self.segments.close)
            with translated(path, readonly):
                self._open(undo, create, mode, map_size, max_readers)
            if not readonly:
                self._go_on()
            undo.pop_all()

    # ---- open and close ------------------------------------------------------------------

    @classmethod
    def open(
        cls, path: str, *, create: bool, mode: int, map_size: int, max_readers: int,
        readonly: bool, kill_hung: bool = False,
    ) -> Ledger:  # fmt: skip
        """This directory's ledger: a new one, or the one that this process has open."""
        path = os.path.abspath(path)
        with _opening:
            if create and not readonly:
                make_directory(path, mode)
            if not os.path.isdir(path):
                raise LedgerError(f"{path} is no directory; a ledger lives in one of its own")
            ledger = _open_ledgers.get(identity(path))
            if ledger is None:
                ledger = cls(
                    path, create=create and not readonly, mode=mode, map_size=map_size,
                    max_readers=max_readers, readonly=readonly, kill_hung=kill_hung,
                )  # fmt: skip
                _open_ledgers[identity(path)] = ledger
            elif ledger.readonly and not readonly:
                raise LedgerError(
                    f"{path} is open with readonly=True in this process; close that engine first"
                )
            elif kill_hung and ledger.watch is not None:
                ledger.watch.killers += 1
            ledger.users += 1
            return ledger

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
                    self._env.close()
                    self.segments.close()
                    self._leave_the_watch()
                    if self.journal is not None:
                        self.journal.close()
                self.lockfile.close()

    def _open(
        self, undo: contextlib.ExitStack, create: bool, mode: int, map_size: int, max_readers: int
    ) -> None:
        """Open every file, one process at a time; what is to be undone should that fail."""
        path, data = self.path, os.path.join(self.path, "data.mdb")
        refuse_remote(path)
        if not os.access(path, os.R_OK | os.X_OK):
            raise LedgerError(f"{path} may not be looked into by this user; check its owner")
        if not create and not os.path.exists(data):
            raise LedgerError(
                f"{path} holds no ledger, and "
                f"{'readonly=True' if self.readonly else 'create=False'}"
            )
        owners = os.path.join(path, "owners.lock")
        if not self.readonly:
            refuse_a_second_life(path, owners)
        self.lockfile = LockFile(owners, mode=mode & 0o666, readonly=self.readonly)
        undo.callback(self.lockfile.close)
        # Who only looks need not wait for one who waits there for the ledger.
        looks = self.readonly and self.lockfile.in_use and os.path.exists(data)
        with contextlib.nullcontext() if looks else self.lockfile.opening():
            self.lockfile.refuse_other_namespaces()
            if not os.path.exists(data):
                create_environment(path, mode)
            check_header(data)
            self._env = open_environment(path, mode, map_size, max_readers, self.readonly)
            undo.callback(self._env.close)
            # C functions, as `_core.Section` wants them.
            self._begin_read = functools.partial(self._env.begin)
            self._begin_write = functools.partial(self._env.begin, write=True)
            self.journal = self._open_journal(mode)
            undo.callback(self._leave_the_watch)
            with self._turn():
                self._db, self.uuid = open_tables(self._env, path, self.readonly)
                if self.journal is not None and not self.readonly:
                    self._recover(self.journal)

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

    def _open_journal(self, mode: int) -> _core.Journal | None:
        if self.readonly and not inode(self.path):
            return None  # there never was one: nobody has opened this ledger to write
        journal = open_journal(self.path, self.lockfile, mode & 0o666, self.readonly)
        self.watch = Watch(self.path, self.lockfile, journal, self._killers)
        journal.on_stall = self.watch.stalled
        return journal

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Nobody else changes the tables. Before the journal is ready, nobody else can."""
        journal = self.journal
        if (
            journal is None or self.readonly
            or not journal.ready or journal.inode != inode(self.path)
        ):  # fmt: skip
            yield
            return
        journal.take_turn()
        try:
            yield
        finally:
            journal.give_turn()

    def _recover(self, journal: _core.Journal) -> None:
        """Take over what a journal has that nobody has used since the machine was started, or
        whose flush has failed."""
        file = inode(self.path)
        if journal.ready and journal.inode != file:
            self._check_nobody_lives()
        elif journal.ready and not journal.failed:
            return
        fresh = not journal.ready or journal.inode != file
        with self._env.begin(write=True) as txn:
            tables = Tables(txn, self._db, self.path, self.segments, journal)
            # What was acknowledged for certain counts even if something before it is damaged.
            known = journal.known_end(tables.applied, tables.generation)
            if fresh:
                journal.start(file)
            journal.lock()
            try:
                end = journal.live_end(tables.applied, tables.generation)
                if known > end:
                    log.error("%s/journal is damaged at position %d", self.path, end)
                tables.apply(max(end, known) if fresh else journal.tail)
                tables.begin_generation(secrets.randbits(63) | 1, 0 if fresh else tables.applied)
                tables.large.sync()
                txn.commit()
                journal.begin(tables.generation, tables.applied)
            except BaseException:
                tables.large.undo()
                raise
            finally:
                journal.unlock()

    def _check_nobody_lives(self) -> None:
        engines = self.lockfile.present()
        if engines:
            raise LedgerError(
                f"{self.path}/journal was replaced while engine {engines[0].name!r} (pid "
                f"{engines[0].pid}) uses it; close every engine on the ledger, then open it"
            )
        log.error("%s/journal was replaced: what was in the old one is lost", self.path)

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
                    thread = threading.Thread(
                        target=self._keep_checkpointing, name="exclusivelog-checkpoint", daemon=True
                    )
                    thread.start()
                    self._checkpointer = thread

    def tend(self) -> None:
        """Have a checkpoint made of what nobody takes out of the journal: whoever appended it
        may be dead. Call it now and then."""
        if self.journal is None or self.readonly:
            return
        applied = self.journal.tail - self.journal.backlog
        if self.journal.backlog and applied == self._tended:
            self.start_checkpoints()
            self.journal.ask()
        self._tended = applied

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
                    return find(tables)
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
            try:
                if not self._gate.close(FORK_WAIT_SECONDS):
                    raise LedgerError(
                        f"{self.path}: the map has grown, but a transaction stays open"
                    )
                self._env.set_mapsize(0)
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
            self.lockfile.close()

    def _leave_the_readers(self) -> bool:
        # A transaction that is over keeps its place in LMDB's table of readers until its object
        # is gone. Closing gives the places of all such objects back, and they are the parent's:
        # in a table of the child's own that harms nobody.
        try:
            inode = os.stat(os.path.join(self.path, "lock.mdb")).st_ino
            with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
                lines = [line.split(maxsplit=5) for line in maps]
        except OSError:
            return False
        for span, _, _, _, number, *name in lines:
            if int(number) == inode and name and name[0].rstrip("\n").endswith("/lock.mdb"):
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
                tables.apply(self.journal.tail)
        except BaseException:
            tables.large.undo()
            raise

    def recover(self, error: BaseException) -> None:
        """It could not begin."""
        self.ledger.recover(error)

    def finish(self, tables: Tables) -> None:
        """What must be done before the commit."""
        write_events(tables)
        tables.large.sync()

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
        return readers + [(lockfile.ring, (slot,)) for slot in tables.ring] + empty


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
