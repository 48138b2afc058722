# Transactions that are safe against interrupts. Ctrl-C can interrupt between two instructions of
# Python. In this code there are none between taking a lock and recording that, so that every lock is
# released.

cdef enum:
    MOST_FENCED = 64    # words; for more, all appends are excluded until the end

_of_parents = []  # transactions of the parent during which this process was forked


cdef class Gate:
    """Counts the threads in a section, and can be shut. The GIL makes each step atomic."""

    cdef readonly Py_ssize_t inside
    cdef unsigned long threads[32]      # those inside, as far as there is room; 0: free
    cdef readonly Py_ssize_t shut       # by so many calls of `close`
    cdef bint ended
    cdef DeathWatch deaths

    def look_at(self, DeathWatch deaths not None):
        """Let reads begin only while nobody holds LMDB's lock of readers, as `deaths` sees it."""
        self.deaths = deaths

    def enter(self):
        """Enter; wait while the gate is shut. False if it is shut permanently."""
        cdef uint32_t process = xi_here()
        xg_ready()
        while self.shut or self.ended:
            if process != xi_here():
                raise _inherited()
            if self.ended:
                return False
            _time.sleep(0.0002)
        self.inside += 1
        self._replace(0, PyThread_get_thread_ident())
        return True

    def leave(self):
        """Leave the section."""
        cdef Py_ssize_t i
        self.inside -= 1
        self._replace(PyThread_get_thread_ident(), 0)
        if self.inside == 0:    # one that another thread has left may still be noted
            for i in range(32):
                self.threads[i] = 0

    cdef void _replace(self, unsigned long old, unsigned long new) noexcept:
        cdef Py_ssize_t i
        for i in range(32):
            if self.threads[i] == old:
                self.threads[i] = new
                return

    def of_this_thread(self):
        """How often this thread is inside: a signal handler may have interrupted it there."""
        cdef unsigned long thread = PyThread_get_thread_ident()
        cdef Py_ssize_t i, found = 0
        for i in range(32):
            found += self.threads[i] == thread
        return found

    def close(self, double timeout, Py_ssize_t but=0):
        """Shut the gate and wait until no thread is inside, but so often the present one; False if
        this takes longer than `timeout` seconds; the gate then stays shut until `open`."""
        cdef int64_t end = xl_now() + <int64_t>(timeout * 1e9)
        self.shut += 1
        while self.inside > but:
            if xl_now() > end:
                return False
            _time.sleep(0.0002)
        return True

    def end(self):
        """Shut the gate permanently."""
        self.ended = True

    def open(self):
        """End one `close`. The gate lets threads in again after the last, unless it was shut
        permanently."""
        if self.shut:
            self.shut -= 1


cdef inline bint is_over(int64_t until) noexcept:
    # `until` is a time of `now()`.
    return until != 0 and xl_now() - _clock_offset >= until


cdef _hold(lock, int64_t until=0, Journal journal=None):
    cdef uint32_t process = xi_here()
    if lock.acquire(False):
        return
    while not lock.acquire(True, 0.5):
        if process != xi_here():
            raise _inherited()      # its holder is a thread of the parent's
        if journal is not None and is_over(until):
            raise journal.overdue()


@cython.final
@cython.freelist(16)
cdef class Holding:
    """`with Holding(lock)` is `with lock`, but does not wait without end in a child that is forked
    during the wait. `until`: the deadline of a wait for a thread that uses the journal."""

    cdef object lock
    cdef int64_t until
    cdef Journal journal

    def __cinit__(self, object lock not None, int64_t until=0, Journal journal=None):
        self.lock = lock
        self.until = until
        self.journal = journal

    def __enter__(self):
        _hold(self.lock, self.until, self.journal)

    def __exit__(self, *error):
        self.lock.release()


cdef class Section:
    """One transaction as a context manager: the lock, the gate, and what `begin` returns.

    `begin` must be a C function: it is called with the lock held. A subclass says by
    `opened(txn)` what `as` gets, by `recover(error)` whether a second try is worthwhile (it
    returns) or not (it raises), by `finish(inside)` what comes right before the commit and by
    `undo(inside)` what comes instead of it, by
    `failed(error)` what the caller gets instead, and by `waken(inside)` what is to be done
    after a commit: (function, arguments) pairs. Without a lock it is a read transaction,
    and never committed.

    With a journal, its frames are in the tables up to the position `inside.journal.applied`
    once this is committed, and `inside.rows.changes` has what it changes for others. If it is
    `exclusive`, no append happens from before `caught_up(inside)` until all is over. If it is
    `fencing`, no append to a topic happens from its `fence(topic)` on, and none to any topic that it
    changes from before its commit on; appends to other topics go on. Its waits for locks end with
    a timeout's error after `until` (0: never).

    A child that is forked inside (by a signal handler) leaves it without any effect: the
    transaction and the mutexes are its parent's (rule C5).
    """

    cdef readonly object ledger
    cdef object lock
    cdef Gate gate
    cdef object begin
    cdef readonly Journal journal
    cdef readonly bint exclusive
    cdef int64_t until
    cdef readonly bint held     # all appends are excluded
    cdef Changes fences         # what it has fenced; None if it is not `fencing`
    cdef readonly uint64_t fenced_at    # the journal's end and version at the last fence
    cdef readonly uint64_t fenced_version
    cdef readonly bint tried        # a commit was begun ...
    cdef readonly bint committed    # ... and has succeeded, whatever was raised afterwards
    cdef bint turned
    cdef uint32_t process
    cdef object txn
    cdef object inside

    def __cinit__(self, object ledger, object lock, Gate gate not None, object begin not None,
                  Journal journal=None, bint exclusive=False, int64_t until=0,
                  bint fencing=False):
        if fencing and journal is not None:
            self.fences = Changes()
        self.journal = journal
        self.until = until
        self.exclusive = exclusive
        self.ledger = ledger
        self.lock = lock
        self.gate = gate
        self.begin = begin

    def __enter__(self):
        try:
            self._go_in()
            return self.inside
        except BaseException as error:
            self.recover(error)
        try:
            self._go_in()
            return self.inside
        except BaseException as error:
            self.failed(error)
            raise

    cdef _go_in(self):
        if self.lock is not None:
            _hold(self.lock, self.until, self.journal)
        try:
            self._pass_the_gate()
        except BaseException:
            if self.lock is not None:
                self.lock.release()
            raise

    cdef _pass_the_gate(self):
        if not self.gate.enter():
            raise _closed_meanwhile()
        self.process = xi_here()
        try:
            if self.lock is not None and self.journal is not None:
                self.journal.take_writer_lock(self.until)
                self.turned = True
            if self.lock is None and self.gate.deaths is not None:
                self.gate.deaths.await_readers()
            self.txn = self.begin()
            self.inside = self.opened(self.txn)
            if self.exclusive or (self.fences is not None and not self.journal._is_settled()):
                self._hold_appends()
                self.journal._settle()
            if self.exclusive:
                self.caught_up(self.inside)
            else:
                self._release_appends()
        except BaseException:
            txn, self.txn = self.txn, None
            if self.process != xi_here():
                self._leave_to_the_parent(txn)
                raise
            try:
                if txn is not None:
                    txn.abort()
            finally:
                self._let_others()
                self.gate.leave()
            raise

    cdef _hold_appends(self):
        self.journal.lock(self.until)
        self.held = True

    cdef _release_appends(self):
        if self.held:
            self.held = False
            self.journal.unlock()

    cdef _leave_to_the_parent(self, txn):
        _of_parents.append(txn)  # aborting it would free the parent's place in the table of readers
        self.held = self.turned = False
        self.fences = None

    # ---- fences --------------------------------------------------------------------------

    @property
    def fencing(self):
        """May it change who writes to which topic, while others append?"""
        return self.fences is not None

    def fence(self, uint64_t topic):
        """Let nobody append to the topic until all is over. False if it was fenced before, or all
        appends are excluded. Of many topics, all appends are."""
        if self.fences is None or self.held or self.fences._has(topic):
            return False
        self._check_process(None, None)
        self._hold_appends()
        self.fences._note(topic)
        self._fence_noted()
        return True

    def fence_changes(self, Changes changes not None):
        """The same for all topics and claims that were changed."""
        if self.fences is None or self.held or self.fences._includes(changes):
            return
        self._check_process(None, None)
        self._hold_appends()
        if changes.everything:
            return      # until all is over
        self.fences._include(changes)
        self._fence_noted()

    cdef _fence_noted(self):
        self.journal._fence(self.fences)
        self.fenced_at, self.fenced_version = self.journal.tail, self.journal.version
        if self.fences.count <= MOST_FENCED:
            self._release_appends()

    cdef _let_others(self):
        if self.fences is not None and (self.fenced_version or self.committed):
            self.fenced_version = 0
            self.journal._end_fences(self.fences)
        self._release_appends()
        if self.turned:
            self.turned = False
            self.journal.give_writer_lock()

    def __exit__(self, kind, error, trace):
        txn, self.txn = self.txn, None
        inside, self.inside = self.inside, None
        cdef bint writing = self.lock is not None
        # Signal handlers may fork wherever Python code runs: ask after each of its calls.
        self._check_process(txn, error)
        try:
            if writing and kind is None:
                self.finish(inside)
                self._commit(txn, inside)
        except BaseException as failure:
            error = failure
        self._check_process(txn, error)
        try:
            if writing and not self.tried:  # else the effect of a failed commit is unknown
                self.undo(inside)
        finally:
            self._check_process(txn, error)
            self._give_back(txn)
        if error is not None:
            self.failed(error)
            if kind is None:
                raise error
        if self.committed:
            self._wake(inside)

    cdef _check_process(self, txn, error):
        if self.process != xi_here():
            self._leave_to_the_parent(txn)
            raise _inherited() from error

    cdef _commit(self, txn, inside):
        cdef uint64_t position = 0
        cdef Changes changes = None
        if self.journal is not None:
            position = inside.journal.applied
            changes = inside.rows.changes
        if self.process != xi_here():
            raise _inherited()
        self.tried = True
        try:
            txn.commit()
            self.committed = True
        except BaseException:
            if self.held:
                # The outcome is unknown, so that all processes must read again.
                self.journal.committed(0, True)
            raise
        if self.journal is not None:
            self.journal.committed(position, self.held, changes)
            if self.fences is not None and not self.held:
                self.fences._include(changes)   # their versions change as the fences end

    cdef _give_back(self, txn):
        try:
            txn.abort()  # no effect if it has ended
        finally:
            self._let_others()
            self.gate.leave()
            if self.lock is not None:
                self.lock.release()

    cdef _wake(self, inside):
        # Repeat a call that an interrupt cut off, so that no waiter loses its wake-up.
        interrupt = None
        calls = None
        try:
            calls = self.waken(inside)
        except BaseException as error:
            interrupt = error
            calls = self.waken(inside)
        for function, arguments in calls:
            try:
                function(*arguments)
            except BaseException as error:
                interrupt = error
                function(*arguments)
        if interrupt is not None:
            raise interrupt


def _closed_meanwhile():
    return _engine_closed("the ledger was closed meanwhile")
