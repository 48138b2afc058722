# The journal: a preallocated file into which every small append goes first. Its header, shared by
# all processes, is in the lock file; the frames have a file of their own, so that a flush writes
# nothing else. (_native/journal_file.h has the layout of a frame.)
#
# Frames are appended under a robust mutex: `tail` moves only when a frame is complete, so that the
# next append overwrites an incomplete frame of a dead holder.

cdef extern from "_native/journal_lock.h":
    size_t XJ_READY
    ctypedef struct xj_header:
        uint64_t tail
        uint64_t synced
        uint64_t applied
        uint64_t generation
        uint64_t version
        uint64_t messages
        uint32_t ready
        uint32_t failed
        uint32_t flushes
        uint32_t sleepers
        uint32_t arrivals
        uint32_t batch_start
        uint32_t batch_size
        uint32_t unsettled
        uint64_t inode
        uint64_t begun
        uint64_t bytes
        uint64_t everything
        uint32_t fencing
        uint32_t changing
    uint64_t XJ_FENCED
    int XJ_LOCKS
    void xj_words(xj_header*, uint32_t**) noexcept nogil
    int xj_start(xj_header*) noexcept nogil
    uint64_t xj_next_version(xj_header*) noexcept nogil
    void xj_change_everything(xj_header*) noexcept nogil
    int xj_lock(xj_header*) noexcept nogil
    int xj_try_lock(xj_header*) noexcept nogil
    void xj_unlock(xj_header*) noexcept nogil
    int xj_take_writer_lock(xj_header*, bint) noexcept nogil
    void xj_leave_writer_lock(xj_header*) noexcept nogil
    uint32_t xj_appending(xj_header*) noexcept nogil
    uint32_t xj_writing(xj_header*) noexcept nogil
    int xj_try_flush_lock(xj_header*) noexcept nogil
    void xj_flush_unlock(xj_header*) noexcept nogil
    void xj_raise(uint64_t*, uint64_t) noexcept nogil

cdef extern from "<unistd.h>" nogil:
    int close_file "close"(int)


# Where nothing was appended since the last recovery, according to a header of this boot, only so many
# bytes are searched for frames: a search of all takes longer than the rest of the opening.
cdef uint64_t LOOK_AHEAD = 16 << 10

cdef int64_t CLOSING_NS = 5_000_000_000

JOURNAL_HEADER_BYTES = JOURNAL_HEADER
JOURNAL_CUT_OFF = JOURNAL_CUT_OFF_AT    # in the file's header: the generation that a backup has cut off
JOURNAL_READY = XJ_READY        # the offset of `ready` in the header


class JournalOverwritten(Exception):
    """The frames to be read have moved into the tables: read these again."""


@cython.final
cdef class Journal:
    """This process's mapping of the journal: `fd`, and the header at `at` in `words`; `topics` is
    where the counters of topics begin there.

    Every method without the GIL inside is safe for any thread and process.
    """

    cdef SharedWords words
    cdef xj_header* shared
    cdef char* topics           # their counters (shared.pxi)
    cdef Ring ring
    cdef int fd
    cdef int lone_fd
    cdef xj_file file           # the file that both descriptors refer to
    cdef uint32_t alone         # a thread of this process flushes by `lone_fd`
    cdef bint readonly
    cdef uint64_t seen          # frames before it are in `tails`
    cdef uint64_t shares_since  # the checkpoint since which this process has that `share` left
    cdef uint64_t share
    cdef uint64_t tails_generation           # tails of another tails_generation are invalid
    cdef uint64_t generation    # of `tails`
    cdef Tails tails            # under the mutex, as the three above
    cdef End ended              # end of the topic that was requested last; under the GIL
    cdef uint64_t* ends         # of topics, by their counters, as this process has left them
    cdef Py_ssize_t counters    # how many there are
    cdef public object on_stall # called with a thread's id while another one waits for it
    cdef public object on_foreign   # called with a topic of an exclusive owner, if another appends
    cdef Py_ssize_t busy        # threads that use the mapping; counted under the GIL
    cdef uint32_t due           # changes when a checkpoint is requested: futex
    cdef int watchers
    cdef bint idle              # no append of this process since the last checkpoint
    cdef int guard              # of the mapping (see guard.pxi)
    cdef int spare              # the index of a `SpareRoom`; -1: none
    cdef uint32_t gone          # errno: this process, but not others, may not append any more
    cdef public bint of_this_boot   # the header was initialised in this boot, and not copied
    cdef uint64_t searched_generation   # of the last search in `known_end`, and its position
    cdef uint64_t searched_from
    cdef uint64_t searched_end  # its result
    cdef uint64_t disbelieved   # the header is not valid for this generation
    cdef Figures kept           # with them `figures`
    cdef xf_figures* figures
    cdef uint32_t groups        # commits of a queue, in this process
    cdef int64_t slowest_flush  # ns, of this process, since the last query
    cdef readonly uint64_t compared     # how often an append was compared with the ownership, and
    cdef readonly uint64_t placed       # how many appends succeeded, in this process
    cdef uint32_t process       # the one that has opened it

    def __cinit__(self, SharedWords words not None, Py_ssize_t at, Py_ssize_t topics, int fd,
                  uint64_t capacity, bint readonly=False, Figures figures=None):
        if at < 0 or at & 63 or at + <Py_ssize_t>sizeof(xj_header) > words.view.len:
            raise IndexError(f"at={at}: the header does not fit there")
        if topics < 0 or topics & 63 or topics + COUNTERS_OF_TOPICS * COUNTER > words.view.len:
            raise IndexError(f"topics={topics}: the counters do not fit there")
        cdef int access = PROT_READ if readonly else PROT_READ | PROT_WRITE
        self.words, self.process = words, xi_here()
        self.shared = <xj_header*>(<char*>words.view.buf + at)
        self.topics = <char*>words.view.buf + topics
        if figures is None:     # figures of this process only
            figures = Figures(SharedWords(bytearray(FIGURES_SIZE)), 0)
        self.kept, self.figures = figures, figures.shared
        self.ring.capacity = capacity
        self.readonly = readonly
        self.counters = words.view.len // COUNTER
        self.ends = <uint64_t*>calloc(max(1, self.counters), sizeof(uint64_t))
        if self.ends == NULL:
            raise MemoryError
        self.tails_generation = 1
        self.shares_since = UINT64_MAX
        self.fd = self.lone_fd = self.guard = self.spare = -1
        memory = mmap(NULL, JOURNAL_HEADER + capacity, access, MAP_SHARED, fd, 0)
        if memory == MAP_FAILED:
            raise OSError(errno, _os.strerror(errno))
        self.ring.memory = <char*>memory
        _keep_out_of_dumps(memory, JOURNAL_HEADER + capacity)
        self.guard = xg_guard(memory, JOURNAL_HEADER + capacity, 0)
        self.fd = _os.dup(fd)
        xj_identify(self.fd, &self.file)
        self.lone_fd = _os.open(f"/proc/self/fd/{fd}", _os.O_RDONLY | _os.O_CLOEXEC)

    def __dealloc__(self):
        self._let_go()
        free(self.tails.items)
        free(self.ends)

    def close(self):
        """Close the file, once no thread of this process uses it, so that an object that outlives
        the ledger does not keep the disk space."""
        cdef int64_t end = xl_now() + CLOSING_NS
        while self.busy:
            if xl_now() > end:
                return  # its last user closes it
            _time.sleep(0.0002)
        self._let_go()

    def abandon(self):
        """Close the inherited descriptors in a forked child. The mapping stays. The locks of the
        open file are its parent's, and last until all processes have closed it."""
        self._close_files()

    cdef _let_go(self):
        xg_let_go(self.guard)
        self.guard = -1
        if self.ring.memory != NULL:
            munmap(self.ring.memory, JOURNAL_HEADER + self.ring.capacity)
            self.ring.memory = NULL
        self._close_files()

    cdef _close_files(self):
        for fd in (self.fd, self.lone_fd):
            if fd >= 0 and xj_is(fd, &self.file):
                close_file(fd)
        self.fd = self.lone_fd = -1

    cdef inline int _check_here(self) except -1:
        # The mutexes are the parent's: a forked child neither waits for them nor takes them.
        if self.process != xi_here():
            raise _inherited()
        xg_ready()
        return 0

    cdef _enter(self):
        self._check_here()
        if self.ring.memory == NULL:
            raise _closed_meanwhile()
        self.busy += 1

    @property
    def capacity(self):
        """Bytes of frames for which the file has room."""
        return self.ring.capacity

    # ---- the header ----------------------------------------------------------------------

    @property
    def ready(self):
        """Was the header initialised since the boot, by the current or the last engines?"""
        return self._believed()

    cdef bint _believed(self) noexcept nogil:
        return (xl_load(&self.shared.ready) != 0
                and (self.disbelieved == 0
                     or xl_load64(&self.shared.generation) != self.disbelieved))

    def disbelieve(self):
        """Ignore the header's current generation, because without live engines it may be older than
        the file (rule H3). The next engine that writes begins a new generation, which is valid."""
        self.disbelieved = xl_load64(&self.shared.generation)

    @property
    def lost(self):
        """Has a store failed to reach the journal or the lock file (rule H2)?"""
        return self._lost()

    cdef bint _lost(self) noexcept nogil:
        return xg_lost(self.guard) != 0 or xg_lost(self.words.guard) != 0

    @property
    def left(self):
        """The errno with which this process has stopped appending; 0 if it has not."""
        return xl_load(&self.gone)

    def leave(self, uint32_t error):
        """Stop appends and acknowledgements of this process, but not of others (rule C7)."""
        xl_store(&self.gone, error)
        self._notify_flushed()

    def known_end(self, uint64_t position, uint64_t generation):
        """Up to where the frames from `position` on were certainly flushed: by themselves, and by the
        header, which may be that of an earlier boot."""
        cdef uint64_t end = position
        cdef uint64_t last = position + self.ring.capacity
        cdef uint64_t cut_off = (<uint64_t*>(self.ring.memory + JOURNAL_CUT_OFF_AT))[0]
        # What was behind the end of a backup is known to the lock file that it was put beside.
        if (self.shared.generation == generation and self.shared.synced > position
                and cut_off != generation):
            end = min(self.shared.synced, last)
        if self.of_this_boot and self.shared.tail == position and self.shared.applied == position:
            last = min(last, position + LOOK_AHEAD)
        # A reader without a live writer asks again for each of its reads.
        if (self.searched_generation, self.searched_from) != (generation, position):
            self._enter()
            with nogil:
                self.searched_end = _durable_end(&self.ring, position, last, generation)
            self.busy -= 1
            self.searched_generation, self.searched_from = generation, position
        return max(end, self.searched_end)

    @property
    def inode(self):
        """The inode of the file that the header describes."""
        return self.shared.inode

    @property
    def failed(self):
        """The errno of a write or flush that failed in any process; 0 if none has."""
        return xl_load(&self.shared.failed)

    def fail(self, uint32_t error):
        """Stop every process that uses this journal."""
        xl_swap(&self.shared.failed, 0, error)
        self._notify_flushed()

    @property
    def version(self):
        """A counter that every possible change of ownership increments, whatever its topic."""
        return xl_load64(&self.shared.version)

    cdef inline uint64_t* _word(self, uint64_t subject) noexcept nogil:
        return _word_of(self.topics, _place_of(subject))

    cdef inline uint64_t _version_of(self, const uint64_t* word) noexcept nogil:
        return max(xl_load64(&self.shared.everything), xl_load64(<uint64_t*>word))

    cdef inline bint _is_current(self, const uint64_t* word, uint64_t version) noexcept nogil:
        return self._version_of(word) == version and not version & XJ_FENCED

    def version_of(self, uint64_t topic):
        """A number that every change of the topic that may concern others changes: of who may
        write, of its rows, and of its entries other than by a checkpoint. Read it before the tables,
        to notice later changes. While the topic `is_fenced`, no append accepts the number."""
        return self._version_of(self._word(topic))

    def version_of_claim(self, uint64_t claim):
        """The same for a claim session: that it ends."""
        return self._version_of(self._word(_as_subject(claim)))

    @staticmethod
    def is_fenced(uint64_t version):
        """Is this the version of a topic or claim that a transaction has fenced, which may not have
        ended yet? If its process has died, the next transaction that fences ends that."""
        return version & XJ_FENCED != 0

    def watch(self, Cursor cursor not None, uint64_t topic):
        """Let this cursor on the topic notice when messages may have been removed, or the topic
        deleted: both are changes of its version."""
        cursor.watched = self
        cursor.removals, cursor.everything = self._word(topic), &self.shared.everything
        cursor.seen = _removals(cursor)

    @property
    def tail(self):
        """The position where the next frame goes."""
        return xl_load64(&self.shared.tail)

    @property
    def synced(self):
        """The position up to which the frames are durable."""
        return xl_load64(&self.shared.synced)

    @property
    def applied(self):
        """The position up to which the frames are in the tables."""
        return xl_load64(&self.shared.applied)

    @property
    def appended(self):
        """(messages, bytes) that went into the journal since the first engine opened the ledger."""
        cdef uint64_t now = xl_load64(&self.shared.tail) - xl_load64(&self.shared.begun)
        return xl_load64(&self.shared.messages), xl_load64(&self.shared.bytes) + now

    @property
    def backlog(self):
        """Bytes of frames that no checkpoint has taken yet."""
        return xl_load64(&self.shared.tail) - xl_load64(&self.shared.applied)

    def start(self, uint64_t inode):
        """Initialise the header. No other process may use it yet."""
        cdef int failed = xj_start(self.shared)
        if failed:
            raise OSError(failed, f"{_os.strerror(failed)}: robust mutexes")
        self.shared.inode = inode

    def begin(self, uint64_t generation, uint64_t position):
        """Begin a new generation; all frames of the former one are in the tables. Under the
        mutex."""
        self.shared.bytes += self.shared.tail - self.shared.begun
        self.shared.begun = position
        self.shared.generation = generation
        xl_store64(&self.shared.tail, position)
        xl_store64(&self.shared.synced, position)
        xl_store64(&self.shared.applied, position)
        xj_change_everything(self.shared)
        xl_store(&self.shared.failed, 0)
        xl_store(&self.shared.unsettled, 0)
        xl_store(&self.shared.ready, 1)
        self._notify_flushed()

    def resume(self, uint64_t generation, uint64_t position, uint64_t mark, uint64_t oldest,
               uint64_t known):
        """Continue the generation of an earlier life, whose frames from `position` on the tables do
        not have, and return where they end. The others as in `live_end`. Under the mutex.

        What is behind them is erased: the remains of lost frames could be valid behind new ones."""
        cdef Recovery run
        cdef uint64_t end
        cdef int failed
        _begin_recovery(&self.ring, &run, position, generation, mark, oldest)
        end = _live_end(&self.ring, &run, known)
        failed = self._erase(end, position + self.ring.capacity)
        if failed:
            raise OSError(failed, _os.strerror(failed))
        self.shares_since, self.share = position, 0    # the former life has used it up
        self.shared.begun = end
        self.shared.generation = generation
        xl_store64(&self.shared.applied, position)
        xl_store64(&self.shared.tail, end)
        xl_store64(&self.shared.synced, end)
        xl_store64(&self.shared.version, max(self.shared.version, run.newest, oldest))
        xj_change_everything(self.shared)
        xl_store(&self.shared.ready, 1)
        self._notify_flushed()
        return end

    cdef int _erase(self, uint64_t start, uint64_t stop) noexcept:
        # And flush the file: what is kept may be in the system's cache only.
        cdef char[4096] zeros
        cdef uint64_t size
        cdef int failed
        memset(zeros, 0, sizeof(zeros))
        while start < stop:
            size = min(<uint64_t>sizeof(zeros), stop - start, _left(&self.ring, start))
            failed = xj_write(self.fd, JOURNAL_HEADER + start % self.ring.capacity, zeros, 0,
                              zeros, size)
            if failed:
                return failed
            start += size
        return errno if fdatasync(self.fd) else 0

    def unrecorded_generation(self, uint64_t generation, uint64_t position):
        """The current generation, if the tables do not have it, and its first frame is not written
        yet; else 0."""
        if (self.shared.generation == generation
                or xl_load64(&self.shared.tail) != position
                or xl_load64(&self.shared.applied) != position):
            return 0
        return self.shared.generation

    def lock(self, int64_t until=0):
        """Take the append mutex, which excludes all appends. OSError (EDEADLK) if this thread holds
        it; `until` as in `take_writer_lock`."""
        self._check_here()
        cdef int failed = xj_try_lock(self.shared)
        while failed == EBUSY or failed == ETIMEDOUT:
            with nogil:
                failed = xj_lock(self.shared)
            if failed == ETIMEDOUT:
                failed = self._check_wait(xj_appending(self.shared), until)
        if failed:
            raise OSError(failed, _os.strerror(failed))
        xl_store(&self.shared.changing, 1)

    def unlock(self):
        """Release the append mutex."""
        xl_store(&self.shared.changing, 0)
        xj_unlock(self.shared)

    @property
    def unsettled(self):
        """Has a process died whose last transaction the tables may not show yet? A transaction that
        excludes appends resolves this."""
        return xl_load(&self.shared.unsettled) != 0

    def await_fences(self, double seconds):
        """Wait so long for the end of a transaction that has fenced topics: without the writer lock,
        which those who wait would take one after the other. False if one may go on, or its process
        has died."""
        cdef int64_t end = xl_now() + <int64_t>(seconds * 1e9)
        while xl_load(&self.shared.fencing) and not xl_load(&self.shared.unsettled):
            if xl_now() > end:
                return False
            _time.sleep(0.0001)
        return self._is_settled()

    cdef inline bint _is_settled(self) noexcept:
        return not xl_load(&self.shared.unsettled) and not xl_load(&self.shared.fencing)

    cdef void _settle(self) noexcept:
        # Resolve that, and end the fences of a process that has died. Under the mutex, in a
        # transaction of LMDB, which sees all commits.
        if self.shared.unsettled:
            xj_change_everything(self.shared)
            xl_store(&self.shared.unsettled, 0)
        if self.shared.fencing:
            _end_all_fences(self.topics, xj_next_version(self.shared))
            xl_store(&self.shared.fencing, 0)

    cdef void _fence(self, Changes fences) noexcept:
        # Under the mutex, with the writer lock.
        cdef uint64_t version = xj_next_version(self.shared)
        xl_store(&self.shared.fencing, 1)
        fences._store(self.topics, version | XJ_FENCED)

    cdef void _end_fences(self, Changes fences) noexcept:
        # With the writer lock, but without the mutex: it makes appends possible, and none impossible.
        fences._store(self.topics, xj_next_version(self.shared))
        xl_store(&self.shared.fencing, 0)

    def take_writer_lock(self, int64_t until=0):
        """Take the writer lock, which permits changes of the tables. Unlike waits for LMDB's own
        lock, a wait for this one can be interrupted, and its holder is known. OSError (EDEADLK) in
        a thread that holds it.

        It looks at `until` (ns; 0: no limit) every half second, and raises `overdue` once that has
        passed. So even a limit of 0 waits for a holder that runs."""
        self._check_here()
        cdef int failed = xj_take_writer_lock(self.shared, False)
        while failed == EBUSY or failed == ETIMEDOUT:
            with nogil:
                failed = xj_take_writer_lock(self.shared, True)
            if failed == ETIMEDOUT:
                failed = self._check_wait(xj_writing(self.shared), until)
        if failed:
            raise OSError(failed, _os.strerror(failed))

    def give_writer_lock(self):
        """Release the writer lock."""
        xj_leave_writer_lock(self.shared)

    @property
    def inside(self):
        """The ids of the threads that hold the append mutex and the writer lock, from the kernel's
        words; 0 for none."""
        if not self.ready:
            return 0, 0
        return xj_appending(self.shared), xj_writing(self.shared)

    cdef int _check_wait(self, uint32_t thread, int64_t until=0) except -1:
        """Called after each half second of a wait for this thread. ETIMEDOUT to go on, or the errno
        to end the wait with: the mutex may belong to a replaced directory, or be overwritten."""
        cdef uint32_t before = xi_here()
        cdef int failed
        PyErr_CheckSignals()
        if before != xi_here():
            raise _inherited()
        if self.on_stall is not None and thread:
            self.on_stall(thread)
        failed = _stopped(self)
        if not failed and is_over(until):
            raise self.overdue()
        return failed or ETIMEDOUT

    def overdue(self):
        """The error of a call whose deadline has passed while it waited to begin a transaction."""
        cdef uint32_t thread = xj_appending(self.shared) or xj_writing(self.shared)
        holder = self.on_stall(thread) if self.on_stall is not None and thread else None
        return _wait_timeout(
            f"the timeout has passed during the wait for the writer lock, which is held by "
            f"{holder or 'another thread'}; nothing was changed. Resume or end that process, and call "
            "again; open(kill_stalled=True) kills one that is silent for longer than its keepalive")

    def committed(self, uint64_t position, bint ownership, Changes changes=None):
        """Note a commit: the tables durably have the frames before `position` and, if the mutex is
        held, perhaps other owners, as far as `changes` says (None: of everything)."""
        xj_raise(&self.shared.applied, position)
        xj_raise(&self.shared.synced, position)
        if ownership:
            self._note_changes(changes)
        self._notify_flushed()

    cdef void _note_changes(self, Changes changes) noexcept:
        if changes is None or changes.everything:
            xj_change_everything(self.shared)
            return
        changes._store(self.topics, xj_next_version(self.shared))

    cdef _notify_flushed(self):
        xl_add(&self.shared.flushes, 1)
        if xl_load(&self.shared.sleepers):
            xl_wake(&self.shared.flushes, INT_MAX)

    # ---- frames --------------------------------------------------------------------------

    def live_end(self, uint64_t position, uint64_t generation, uint64_t mark=0,
                 uint64_t oldest=0, uint64_t known=0):
        """The end of the run of valid frames from `position` on, when the journal's end is unknown
        after a power loss. The run is unbroken, except by damage before `known`, up to where the
        frames were certainly flushed. From the position `mark` on, a frame with a version before
        `oldest` is not valid: a process died before it had moved the tail."""
        cdef Recovery run
        cdef uint64_t end
        _begin_recovery(&self.ring, &run, position, generation, mark, oldest)
        self._enter()
        with nogil:
            end = _live_end(&self.ring, &run, known)
        self.busy -= 1
        return end

    def holes(self, uint64_t start, uint64_t stop, uint64_t generation):
        """(bytes, position behind the last one) of the parts between two positions in which neither
        a frame's header nor its entry is left, so that nobody knows what was there."""
        cdef Holes holes
        self._enter()
        with nogil:
            holes = _find_holes(&self.ring, start, stop, generation)
        self.busy -= 1
        return holes.size, holes.behind

    # ---- the ends of topics -------------------------------------------------------

    def learn(self, uint64_t topic, uint64_t next_offset, int64_t publish_time, uint64_t at,
              uint64_t generation, uint64_t version):
        """Load a topic's end from the tables: as of position `at`, read when the topic had this
        `version`. False if the topic or the journal is ahead of that by now."""
        return self.learn_all([(topic, next_offset, publish_time, version)], at, generation) == 1

    def learn_all(self, list rows not None, uint64_t at, uint64_t generation):
        """The same for several topics, in one hold of the mutex; `rows` has (topic, next offset,
        publish time, version) of each. Returns how many were loaded."""
        cdef Py_ssize_t n = PyList_GET_SIZE(rows)
        cdef Py_ssize_t i
        cdef Py_ssize_t learned = 0
        cdef Fresh* fresh = <Fresh*>calloc(max(n, 1), sizeof(Fresh))
        if fresh == NULL:
            raise MemoryError
        self.busy += 1
        try:
            for i in range(n):
                (fresh[i].tail.topic, fresh[i].tail.next_offset, fresh[i].tail.publish_time,
                 fresh[i].version) = rows[i]
                fresh[i].tail.at = at
            if self.ring.memory == NULL:
                raise _closed_meanwhile()
            self.lock()
            with nogil:
                if _may_learn(self, at, generation):
                    learned = _learn(self, fresh, n, at)
                xj_unlock(self.shared)
        finally:
            self.busy -= 1
            free(fresh)
        if learned < 0:
            raise MemoryError
        return learned

    # ---- flush ---------------------------------------------------------------------------

    def flush_to(self, uint64_t end, uint64_t generation):
        """Wait until everything before `end` is durable; returns 0, or another outcome."""
        cdef int error = 0
        cdef int outcome
        if self.ring.memory == NULL or self.process != xi_here():
            return CLOSED
        self.busy += 1
        with nogil:
            outcome = _await_flush(self, end, generation, &error)
        self.busy -= 1
        return outcome

    def take_slowest_flush(self):
        """How long the slowest flush of this process took since the last call, in ns."""
        cdef int64_t slowest = self.slowest_flush
        self.slowest_flush = 0
        return slowest

    def flush_all(self):
        """Flush everything that was appended so far."""
        cdef int error = 0
        cdef uint64_t tail = xl_load64(&self.shared.tail)
        cdef uint64_t generation = xl_load64(&self.shared.generation)
        self._enter()
        with nogil:
            _flush(self, tail, generation, &error)
        self.busy -= 1

    # ---- checkpoints ---------------------------------------------------------------------

    cdef void _report_foreign(self, uint64_t topic) noexcept:
        if self.on_foreign is not None:
            self.on_foreign(topic)

    cdef void _request_checkpoint(self) noexcept:
        self.idle = False
        xl_add(&self.due, 1)
        if self.watchers:
            xl_wake(&self.due, INT_MAX)

    def request_checkpoint(self):
        """End a wait in `await_due`."""
        self._request_checkpoint()

    def expect(self):
        """The counter for `await_due`. From now on an append of this process ends a wait without a
        time limit, because the process that should make the next checkpoint may be dead."""
        self.idle = True
        return xl_load(&self.due)

    def await_due(self, uint32_t seen, double seconds):
        """Sleep until a checkpoint is requested after `expect` returned `seen`, at most `seconds`
        (below 0: no limit)."""
        cdef uint32_t* word = &self.due
        if seconds >= 0:
            self.idle = False   # it wakes by itself, without an append
        self.watchers += 1
        with nogil:
            xl_wait(word, seen, <int64_t>(seconds * 1e9))
        self.watchers -= 1

    def gather(self, uint64_t start, uint64_t stop, uint64_t generation):
        """The entries between two positions, by topic: a context manager that returns a list of
        Bundles."""
        cdef Frames frames = Frames.__new__(Frames)
        self._enter()
        frames.journal = self
        # Keep the GIL: each time it is released, a busy thread may keep it for 5 ms.
        if not frames.fill(start, stop, generation):
            raise MemoryError
        return frames

    def notes(self, uint64_t start, uint64_t stop, uint64_t generation, keys=None):
        """What `Frames.notes` returns for the frames between two positions; only the rows with one
        of these keys (None: all). Raises JournalOverwritten."""
        cdef list rows = []
        cdef Py_ssize_t damaged = 0
        cdef Found found
        cdef uint64_t position = start
        self._enter()
        try:
            while True:
                with nogil:
                    more = _next_of(
                        &self.ring, NOTES_TOPIC, 0, position, stop, generation, &found)
                if not more:
                    break
                position = found.next
                if not _add_note(rows, &found, keys):
                    damaged += 1
        finally:
            self.busy -= 1
            # After an error, too: another process may have overwritten an entry that was sound.
            self._check_not_overwritten(start, generation)
        return rows, damaged

    # ---- read ----------------------------------------------------------------------------

    def collect(self, uint64_t topic, uint64_t offset, uint64_t start, uint64_t stop,
                uint64_t generation, Py_ssize_t most, bint packed=False):
        """A topic's entries from the one that holds `offset` on, about `most` bytes: (last offset,
        copy of the entry, the position after it). `packed`: combined into few large entries. Raises
        JournalOverwritten."""
        if packed:
            return _collect_packed(self, topic, offset, start, stop, generation, max(most, 0))
        cdef list entries = []
        cdef Found found
        cdef uint64_t position = start
        cdef Py_ssize_t size = 0
        cdef bint more = True
        self._enter()
        try:
            while size < most:
                with nogil:
                    more = _next_of(&self.ring, topic, offset, position, stop, generation, &found)
                if not more:
                    break
                size += found.size
                position, offset = found.next, found.base_offset + found.count
                entries.append((found.base_offset + found.count - 1,
                                found.entry[:found.size], position))
        finally:
            self.busy -= 1
        self._check_not_overwritten(start, generation)
        return entries

    cdef _check_not_overwritten(self, uint64_t position, uint64_t generation):
        if not self._believed():
            return
        if xl_load64(&self.shared.generation) != generation or _may_be_overwritten(self, position):
            raise JournalOverwritten("the journal was overwritten while it was read")

    def end_of(self, uint64_t topic, uint64_t start, uint64_t stop, uint64_t generation):
        """(next offset, publish time) after a topic's last frame between two positions; None if it
        has none there. Raises JournalOverwritten."""
        cdef End end
        memset(&end, 0, sizeof(End))
        end.topic, end.generation, end.reached = topic, generation, start
        # Each new reader calls this twice, and the result stays valid until the frames are
        # overwritten.
        if _is_known(&self.ended, topic, start, stop, generation):
            end = self.ended
        self._enter()
        with nogil:
            _find_end(&self.ring, stop, &end)
        self.busy -= 1
        self._check_not_overwritten(start, generation)
        if end.next_offset:
            self.ended = end
        return (end.next_offset, end.publish_time) if end.next_offset else None
