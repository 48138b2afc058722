# Locks that outlive their thread, because the kernel did not tell of its death (_native/deaths.h).

cdef extern from "_native/deaths.h":
    ctypedef struct xd_file:
        char[32] name
        int fd
        uint64_t inode
    ctypedef struct xd_lock:
        uint32_t* word
        bint repair
        xd_file* file
    ctypedef struct xd_watch:
        uint64_t* life
        uint64_t namespace
        xd_file file
        xd_lock* locks
        unsigned count
        char* slots
        size_t step
        size_t slot_count
        uint32_t* lmdb
        xd_file lmdb_file
        xd_lock* lmdb_locks
        uint32_t marked
    int64_t XD_NAMESPACES
    bint xd_is_lmdb(xd_watch*) noexcept nogil
    bint xd_has_ended(uint32_t, bint) noexcept nogil
    bint xd_proc_is_ours() noexcept nogil
    int xd_start(xd_watch*) noexcept nogil
    void xd_stop(xd_watch*) noexcept nogil
    int xd_add_lmdb(xd_watch*, int, bint) noexcept nogil
    void xd_remove_lmdb(xd_watch*) noexcept nogil


# Each process that opens lock.mdb holds a lock on a byte of it: here, plus the inode of its pid
# namespace.
NAMESPACES = XD_NAMESPACES
cdef int SPINS_FOR_READERS = 2000
cdef int64_t STALL_NS = 500_000_000


def has_ended(uint32_t thread):
    """Has this thread ended, so that it will never run again? False if that is unknown. The id is
    one of this pid namespace."""
    cdef bint ended
    with nogil:
        ended = xd_has_ended(thread, xd_proc_is_ours())
    return ended


cdef class DeathWatch:
    """Looks, from a thread, for locks of a ledger whose threads have ended, and marks them as the
    kernel would have done: within half a second, until `stop`.

    `life`: the offset in `words` of the pid namespace in which the thread ids are valid;
    `namespace`: this process's. Without equality nothing is marked. `name` and `inode` are those of
    the file that all holders have mapped, `file` its descriptor, which stays open until `stop`, or -1.
    `readonly`: mark only the mutex that readers take.
    """

    cdef SharedWords words
    cdef xd_watch watch
    cdef bint readonly
    cdef bint started
    cdef public object on_stall     # called after each half second of a wait in `await_readers`

    def __cinit__(self, SharedWords words not None, Py_ssize_t life, uint64_t namespace,
                  bytes name not None, uint64_t inode, bint readonly=False, int file=-1):
        self.words = words
        self.readonly = readonly
        self.watch.life = words.wide(life)
        self.watch.namespace = namespace
        memcpy(self.watch.file.name, <const char*>name, min(len(name), 31))
        self.watch.file.inode = inode
        self.watch.file.fd = file
        self.watch.lmdb_file.fd = -1

    def __dealloc__(self):
        self._stop()

    def add_journal(self, Journal journal not None):
        """Look at the journal's mutexes. Before `start`."""
        cdef (uint32_t*)[3] found
        xj_words(journal.shared, found)
        for i in range(XJ_LOCKS):
            self.watch.locks[i].word = found[i]
            self.watch.locks[i].repair = not self.readonly
            self.watch.locks[i].file = &self.watch.file
        self.watch.count = XJ_LOCKS

    def add_slots(self, Py_ssize_t first, Py_ssize_t step, Py_ssize_t count):
        """Look at the liveness words of engines. Before `start`."""
        self.words.word(first + step * (count - 1))
        self.watch.slots = <char*>self.words.word(first)
        self.watch.step = step
        self.watch.slot_count = count

    def add_lmdb(self, int fd):
        """Look at the mutexes in LMDB's lock file, too."""
        if self.watch.lmdb == NULL and (failed := xd_add_lmdb(&self.watch, fd, not self.readonly)):
            raise OSError(failed, _os.strerror(failed))

    def start(self):
        """Begin to look. RuntimeError if no thread could be started."""
        cdef int failed = xd_start(&self.watch)
        if failed:
            raise _no_thread(failed)
        self.started = True

    def stop(self):
        """Look no more, and unmap LMDB's lock file: a mapping keeps the locks of its descriptor.
        Also in a forked child. A second call has no effect."""
        self.on_stall = None  # it refers to this object
        self._stop()

    cdef void _stop(self) noexcept:
        if self.started:
            self.started = False
            with nogil:
                xd_stop(&self.watch)
        xd_remove_lmdb(&self.watch)

    cdef uint32_t _reader(self) noexcept:
        # The thread that holds LMDB's lock of readers.
        if not xd_is_lmdb(&self.watch):
            return 0
        return xl_load(self.watch.lmdb_locks[0].word) & FUTEX_TID_MASK

    cpdef await_readers(self):
        """Wait until no thread holds LMDB's lock of readers. LMDB would wait for a process that is
        stopped with it with the interpreter's lock, so that nothing in this process could go on."""
        cdef uint32_t process
        cdef int64_t looked
        if not self._reader():
            return
        for _ in range(SPINS_FOR_READERS):  # it is held for less than a microsecond
            if not self._reader():
                return
        process, looked = xi_here(), xl_now()
        while self._reader():
            _time.sleep(0.0002)
            if process != xi_here():
                raise _inherited()
            if xl_now() - looked >= STALL_NS:
                looked = xl_now()
                if self.on_stall is not None:
                    self.on_stall()

    @property
    def marked(self):
        """How many locks this process has marked."""
        return self.watch.marked

    def held(self):
        """The ids of the threads that hold the locks now, 0 for none: those of appends, of flushes,
        of writers, and LMDB's of readers and of writers."""
        cdef list found = [xl_load(self.watch.locks[i].word) & FUTEX_TID_MASK
                           for i in range(self.watch.count)]
        found += [0] * (XJ_LOCKS - len(found))
        for i in range(2):
            found.append(xl_load(self.watch.lmdb_locks[i].word) & FUTEX_TID_MASK
                         if xd_is_lmdb(&self.watch) else 0)
        return found
