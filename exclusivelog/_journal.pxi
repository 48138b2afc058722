# The journal: a preallocated file in which every small append goes first. Its words, shared
# by all processes, lie in the lock file; the frames lie in a file of their own, so that a
# flush writes nothing else.
# (_native/journal_file.h has the layout of a frame.)
#
# Frames are appended under a mutex that survives the death of its holder: `tail` moves only
# when a frame is whole, so whoever comes next writes over what a dead holder left behind it.

cdef extern from "_native/journal_lock.h":
    size_t XJ_READY
    ctypedef struct xj_words:
        uint64_t tail
        uint64_t synced
        uint64_t applied
        uint64_t generation
        uint64_t version
        uint64_t inode
        uint32_t ready
        uint32_t failed
        uint32_t flushes
        uint32_t sleepers
        uint32_t arrivals
        uint32_t led
        uint32_t crowd
        uint32_t unsettled
    int xj_start(xj_words*) noexcept nogil
    int xj_lock(xj_words*) noexcept nogil
    int xj_try_lock(xj_words*) noexcept nogil
    void xj_unlock(xj_words*) noexcept nogil
    int xj_take_turn(xj_words*, bint) noexcept nogil
    void xj_give_turn(xj_words*) noexcept nogil
    uint32_t xj_appending(xj_words*) noexcept nogil
    uint32_t xj_writing(xj_words*) noexcept nogil
    int xj_try_flush_lock(xj_words*) noexcept nogil
    void xj_flush_unlock(xj_words*) noexcept nogil
    void xj_raise(uint64_t*, uint64_t) noexcept nogil

cdef extern from "_native/journal_file.h":
    ctypedef struct xj_file:
        pass
    ctypedef struct xj_frame:
        uint32_t magic
        uint32_t size
        uint64_t position
        uint64_t generation
        uint64_t topic
        uint64_t base_offset
        uint64_t version
        uint32_t count
        uint32_t crc
    int xj_identify(int, xj_file*) noexcept nogil
    bint xj_is(int, const xj_file*) noexcept nogil
    int64_t xj_wall_ms() noexcept nogil
    void xj_copy_header(xj_frame*, const void*) noexcept nogil
    int xj_write(int, int64_t, const void*, size_t, const void*, size_t) noexcept nogil

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<unistd.h>" nogil:
    int close_file "close"(int)
    int fdatasync(int)

cdef extern from "<errno.h>":
    int EBADF
    int EDEADLK
    int EIO
    int ETIMEDOUT
    int ENOSPC
    int EDQUOT
    int EFBIG

cdef enum:
    FRAME = 56
    STEP = 16
    JOURNAL_HEADER = 4096

cdef uint32_t PADDING = <uint32_t>1 << 31            # in a frame's size
cdef uint32_t MORE = <uint32_t>1 << 30
cdef uint32_t SIZE = (<uint32_t>1 << 30) - 1

cdef uint32_t FRAME_MAGIC = 0x014A4C58      # b"XLJ\x01"

JOURNAL_HEADER_BYTES = JOURNAL_HEADER
JOURNAL_READY = XJ_READY        # where the word `ready` lies among the words

# What comes of an attempt to append.
cpdef enum Outcome:
    PLACED = 0
    QUEUED = 1      # the producer has messages waiting: this one must stand behind them
    STALE = 2       # who may write has to be looked up in the tables
    FULL = 3        # a checkpoint has to make room
    DUPLICATE = 4   # the sequence id is used up
    BROKEN = 5      # a write or flush has failed, here or elsewhere; or the directory is lost
    NO_ROOM = 6     # the disk is full: nothing was written
    HELD_HERE = 7   # this very thread is inside a change of ownership
    LOST = 8        # it was written, and the flush has failed
    CLOSED = 9      # the ledger was closed here

# A leader lets those who sent along with it the last time catch up, for this long at most.
cdef int64_t CROWD_NS = 80_000
cdef int64_t CLOSING_NS = 5_000_000_000
cdef int64_t FLUSH_LOOK_UP_NS = 20_000_000  # a leader may be stopped, or die


cdef inline size_t _frame_bytes(size_t entry) noexcept nogil:
    return (FRAME + entry + STEP - 1) & ~<size_t>(STEP - 1)


# One entry in the journal, and where it stands.
cdef struct Found:
    uint64_t position
    uint64_t next           # the position behind it
    const char* entry
    size_t size
    uint64_t topic
    uint64_t base_offset
    uint32_t count
    bint more               # the next frame belongs to it


# What the next message of a topic follows, as of position `at`.
cdef struct Tail:
    uint64_t topic          # 0: free
    uint64_t next_offset
    int64_t publish_time
    uint64_t at
    uint64_t lap


cdef void _follow(Tail* tail, const Found* found) noexcept nogil:
    """Take the entry into account, if it is the topic's."""
    if found.topic == tail.topic and found.position >= tail.at:
        tail.next_offset = found.base_offset + found.count
        tail.publish_time = max(tail.publish_time, _published(found))


cdef int64_t _published(const Found* found) noexcept nogil:
    cdef Laid laid
    if _is_sound(found.entry, found.size) and (
            _read_footer(found.entry, found.size, &laid) == WHOLE):
        return laid.publish_time
    return 0


# One atomic append: pieces that stand one behind the other, or not at all.
cdef struct Placing:
    uint64_t topic
    uint64_t epoch
    uint64_t session
    uint64_t version        # of the words when the session was last looked up
    bint alone              # nobody else may write to the topic
    bint durable            # stored such that a flush is cheap
    bint flushed            # ... and flushed at once
    bint impatient          # QUEUED where another one appends right now
    Piece* pieces
    Py_ssize_t count
    int64_t sequence        # of the first message; -1: the one after `last`
    int64_t* last           # the producer's last sequence id
    int64_t logged          # the last one that is known to be in the log
    uint64_t base_offset    # out
    uint64_t end            # out: the position behind it
    uint64_t generation     # out: of that position
    int error               # out: an errno
    bint wanted             # out: somebody should make a checkpoint soon


class Outrun(Exception):
    """What was to be read in the journal has moved into the tables: look there again."""


cdef bint _is_sound(const char* entry, size_t size) noexcept nogil:
    """Does the entry's checksum hold?"""
    cdef const char* footer = entry + size - FOOTER
    if size < FOOTER or size & 7:
        return False
    return _crc(entry, size) ^ _sum(footer + F_CRC, 4) == (<uint32_t*>(footer + F_CRC))[0]


@cython.final
cdef class Journal:
    """The journal as this process sees it: `fd` mapped, the words at `at` in `words`.

    Every method without the GIL inside is safe for any thread and process.
    """

    cdef SharedWords words
    cdef xj_words* shared
    cdef char* memory
    cdef int fd
    cdef int lone_fd
    cdef xj_file file           # that both are open for
    cdef uint32_t alone         # somebody here flushes by `lone_fd`
    cdef bint readonly
    cdef readonly uint64_t capacity
    cdef uint64_t seen          # frames before it are in `tails`
    cdef uint64_t lap           # tails of another lap are void
    cdef uint64_t generation    # of `tails`
    cdef Tail* tails            # open addressing; under the mutex, as all of these
    cdef size_t used
    cdef size_t room            # a power of two
    cdef public object on_stall # called with a thread's id while somebody waits for it
    cdef Py_ssize_t busy        # threads that use the mapping; counted under the GIL
    cdef uint32_t due           # changes when a checkpoint is wanted: futex
    cdef int watchers
    cdef bint idle              # nobody here knows of anything for a checkpoint
    cdef int guard              # of the mapping (see _guard.pxi)
    cdef uint32_t gone          # errno: this process may not append any more, others may
    cdef uint64_t disbelieved   # words of this generation say nothing
    cdef readonly uint64_t compared     # times that an append was compared with who may write, and
    cdef readonly uint64_t placed       # appends that came through, in this process

    def __cinit__(self, SharedWords words not None, Py_ssize_t at, int fd, uint64_t capacity,
                  bint readonly=False):
        if at < 0 or at & 63 or at + <Py_ssize_t>sizeof(xj_words) > words.view.len:
            raise IndexError(f"at={at}: the words do not fit there")
        cdef int access = PROT_READ if readonly else PROT_READ | PROT_WRITE
        self.words = words
        self.shared = <xj_words*>(<char*>words.view.buf + at)
        self.capacity = capacity
        self.readonly = readonly
        self.lap = 1
        self.fd = self.lone_fd = self.guard = -1
        memory = mmap(NULL, JOURNAL_HEADER + capacity, access, MAP_SHARED, fd, 0)
        if memory == MAP_FAILED:
            raise OSError(errno, _os.strerror(errno))
        self.memory = <char*>memory
        self.guard = xg_guard(memory, JOURNAL_HEADER + capacity, 0)
        self.fd = _os.dup(fd)
        xj_identify(self.fd, &self.file)
        self.lone_fd = _os.open(f"/proc/self/fd/{fd}", _os.O_RDONLY | _os.O_CLOEXEC)

    def __dealloc__(self):
        self._let_go()
        free(self.tails)

    def close(self):
        """Let go of the file, once nobody here uses it any more: what is kept of a closed ledger
        must not keep the room that its file takes."""
        cdef int64_t end = xl_now() + CLOSING_NS
        while self.busy:
            if xl_now() > end:
                return  # it goes with its last user
            _time.sleep(0.0002)
        self._let_go()

    def abandon(self):
        """In a forked child: close what was inherited. The locks of the open file are its parent's,
        and last as long as any process has it open. The mapping stays."""
        self._close_files()

    cdef _let_go(self):
        xg_let_go(self.guard)
        self.guard = -1
        if self.memory != NULL:
            munmap(self.memory, JOURNAL_HEADER + self.capacity)
            self.memory = NULL
        self._close_files()

    cdef _close_files(self):
        for fd in (self.fd, self.lone_fd):
            if fd >= 0 and xj_is(fd, &self.file):
                close_file(fd)
        self.fd = self.lone_fd = -1

    cdef _enter(self):
        if self.memory == NULL:
            raise _closed_meanwhile()
        self.busy += 1

    # ---- the words -----------------------------------------------------------------------

    @property
    def ready(self):
        """Have the words been set by the engines that live now, or were the last to?"""
        return self._believed()

    cdef bint _believed(self) noexcept nogil:
        return (xl_load(&self.shared.ready) != 0
                and (self.disbelieved == 0
                     or xl_load64(&self.shared.generation) != self.disbelieved))

    def disbelieve(self):
        """No engine lives: what the words say now may be older than the file (rule H3). The next
        engine that writes begins a new generation, and that is believed."""
        self.disbelieved = xl_load64(&self.shared.generation)

    @property
    def lost(self):
        """Has a store failed to reach the file, or the shared words' file (rule H2)?"""
        return self._lost()

    cdef bint _lost(self) noexcept nogil:
        return xg_lost(self.guard) != 0 or xg_lost(self.words.guard) != 0

    @property
    def left(self):
        """The errno with which this process has stopped appending; 0 if it has not."""
        return xl_load(&self.gone)

    def leave(self, uint32_t error):
        """Append and acknowledge nothing more here; other processes go on (rule C7)."""
        xl_store(&self.gone, error)
        self._tell_flushed()

    def known_end(self, uint64_t position, uint64_t generation):
        """How far the frames from `position` on were flushed for certain, by what is left of
        the words of an earlier boot."""
        if self.shared.generation != generation or self.shared.synced < position:
            return position
        return min(self.shared.synced, position + self.capacity)

    @property
    def inode(self):
        """Of the file that the words are about."""
        return self.shared.inode

    @property
    def failed(self):
        """The errno of a write or flush that failed, in whatever process; 0 if none has."""
        return xl_load(&self.shared.failed)

    def fail(self, uint32_t error):
        """Stop every process that uses this journal."""
        xl_swap(&self.shared.failed, 0, error)
        self._tell_flushed()

    @property
    def version(self):
        """Changes with whatever may change who may write."""
        return xl_load64(&self.shared.version)

    @property
    def tail(self):
        """The position where the next frame goes."""
        return xl_load64(&self.shared.tail)

    @property
    def synced(self):
        """The position up to which the frames are durable."""
        return xl_load64(&self.shared.synced)

    @property
    def backlog(self):
        """Bytes of frames that no checkpoint has taken yet."""
        return xl_load64(&self.shared.tail) - xl_load64(&self.shared.applied)

    def start(self, uint64_t inode):
        """Make the words anew. Nobody else may use them yet."""
        if xj_start(self.shared):
            raise OSError(errno, "the journal's mutexes cannot be made")
        self.shared.inode = inode

    def begin(self, uint64_t generation, uint64_t position):
        """What follows is of a new generation; everything before is in the tables. Under the
        mutex."""
        self.shared.generation = generation
        xl_store64(&self.shared.tail, position)
        xl_store64(&self.shared.synced, position)
        xl_store64(&self.shared.applied, position)
        xl_store64(&self.shared.version, self.shared.version + 1)
        xl_store(&self.shared.failed, 0)
        xl_store(&self.shared.unsettled, 0)
        xl_store(&self.shared.ready, 1)
        self._tell_flushed()

    def unrecorded_generation(self, uint64_t generation, uint64_t position):
        """The generation of what will be appended, where the tables have another one and the first
        frame has not been written yet; else 0."""
        if (self.shared.generation == generation
                or xl_load64(&self.shared.tail) != position
                or xl_load64(&self.shared.applied) != position):
            return 0
        return self.shared.generation

    def lock(self):
        """Keep everybody from appending. OSError (EDEADLK) if this thread does already."""
        cdef int failed = xj_try_lock(self.shared)
        while failed == EBUSY or failed == ETIMEDOUT:
            with nogil:
                failed = xj_lock(self.shared)
            if failed == ETIMEDOUT:
                self._look_around(xj_appending(self.shared))
        if failed:
            raise OSError(failed, _os.strerror(failed))

    def unlock(self):
        """Let others append again."""
        xj_unlock(self.shared)

    @property
    def unsettled(self):
        """Has a process died whose last transaction the tables may not show yet? A transaction
        that nobody appends beside settles it."""
        return xl_load(&self.shared.unsettled) != 0

    cdef void _settle(self) noexcept:
        # With the mutex held, in a transaction of LMDB's, which knows of all that was committed.
        if self.shared.unsettled:
            xl_store64(&self.shared.version, self.shared.version + 1)
            xl_store(&self.shared.unsettled, 0)

    def take_turn(self):
        """Be the only one who changes the tables. In front of LMDB's own lock, because here a
        wait can be interrupted, and it is known for whom. OSError (EDEADLK) in a thread that
        has the turn already."""
        cdef int failed = xj_take_turn(self.shared, False)
        while failed == EBUSY or failed == ETIMEDOUT:
            with nogil:
                failed = xj_take_turn(self.shared, True)
            if failed == ETIMEDOUT:
                self._look_around(xj_writing(self.shared))
        if failed:
            raise OSError(failed, _os.strerror(failed))

    def give_turn(self):
        """Let others change the tables again."""
        xj_give_turn(self.shared)

    @property
    def inside(self):
        """The ids of the threads that are in the critical section, and that change the tables;
        0 for nobody. By the kernel's own word."""
        if not self.ready:
            return 0, 0
        return xj_appending(self.shared), xj_writing(self.shared)

    cdef _look_around(self, uint32_t thread):
        """Half a second has been waited for this thread."""
        cdef int before = _generation
        PyErr_CheckSignals()
        if before != _generation:
            raise _inherited()
        if self._lost():
            raise OSError(EIO, _os.strerror(EIO))
        if self.on_stall is not None and thread:
            self.on_stall(thread)

    def committed(self, uint64_t position, bint ownership):
        """The tables have, durably, what stands before `position`; and, with the mutex held,
        perhaps other owners."""
        xj_raise(&self.shared.applied, position)
        xj_raise(&self.shared.synced, position)
        if ownership:
            xl_store64(&self.shared.version, self.shared.version + 1)
        self._tell_flushed()

    cdef _tell_flushed(self):
        xl_add(&self.shared.flushes, 1)
        if xl_load(&self.shared.sleepers):
            xl_wake(&self.shared.flushes, INT_MAX)

    # ---- frames --------------------------------------------------------------------------

    cdef inline xj_frame* _at(self, uint64_t position) noexcept nogil:
        return <xj_frame*>(self.memory + JOURNAL_HEADER + position % self.capacity)

    cdef inline uint64_t _left(self, uint64_t position) noexcept nogil:
        return self.capacity - position % self.capacity

    cdef bint _lives(self, uint64_t position, uint64_t generation, xj_frame* frame) noexcept nogil:
        """Is there a frame? Its header then."""
        cdef uint64_t left = self._left(position)
        if left < FRAME:
            return False
        xj_copy_header(frame, self._at(position))
        return (frame.magic == FRAME_MAGIC and frame.position == position
                and frame.generation == generation
                and FRAME + <uint64_t>(frame.size & SIZE) <= left
                and frame.crc == _crc(<char*>frame, FRAME - 4))

    cdef bint _next(self, uint64_t position, uint64_t generation, uint64_t stop,
                    Found* found) noexcept nogil:
        """The next entry from `position` on; False if there is none before `stop`. What is
        damaged in between is stepped over, with its entry if that can still be told."""
        cdef uint64_t after
        cdef xj_frame frame
        while position < stop:
            if self._left(position) < FRAME:
                position += self._left(position)
            elif not self._lives(position, generation, &frame):
                after = position + STEP
                while after < stop and not self._lives(after, generation, &frame):
                    after += STEP
                if self._salvage(position, after, found):
                    return True
                position = after
            elif frame.size & PADDING:
                position += self._left(position)
            else:
                self._describe(position, &frame, found)
                return True
        return False

    cdef void _describe(self, uint64_t position, const xj_frame* frame,
                        Found* found) noexcept nogil:
        found.position = position
        found.entry = <char*>self._at(position) + FRAME
        found.size = frame.size & SIZE
        found.next = position + _frame_bytes(found.size)
        found.topic, found.base_offset = frame.topic, frame.base_offset
        found.count, found.more = frame.count, frame.size & MORE != 0

    cdef bint _is_of_another_time(self, uint64_t position) noexcept nogil:
        """Is there a sound header that is not this position's? Then nothing was damaged here: the
        frame was never written, or the file is older than who asks believes."""
        cdef xj_frame frame
        xj_copy_header(&frame, self._at(position))
        return frame.magic == FRAME_MAGIC and frame.crc == _crc(<char*>&frame, FRAME - 4)

    cdef bint _salvage(self, uint64_t position, uint64_t after, Found* found) noexcept nogil:
        """Is there a whole entry behind the damaged header of the frame that ends at `after`?"""
        cdef size_t room, padding
        cdef Laid laid
        if after - position < FRAME + FOOTER or after - position > self._left(position):
            return False
        if self._is_of_another_time(position):
            return False
        room = after - position - FRAME
        found.entry = <char*>self._at(position) + FRAME
        for padding in range(0, min(STEP, room - FOOTER + 1), 8):
            found.size = room - padding
            if _is_sound(found.entry, found.size) and (
                    _read_footer(found.entry, found.size, &laid) == WHOLE):
                found.position, found.next, found.more = position, after, False
                found.topic, found.base_offset = laid.topic, laid.base_offset
                found.count = laid.count
                return True
        return False

    def live_end(self, uint64_t position, uint64_t generation, uint64_t mark=0,
                 uint64_t oldest=0):
        """Where the unbroken run of live frames from `position` on ends: what to trust after a
        power cut, when nobody knows how far the journal came. From the position `mark` on, a frame
        of a version before `oldest` was left behind by one who died, and does not live."""
        cdef uint64_t whole = position
        cdef uint64_t last = position + self.capacity
        cdef uint64_t version = 0
        cdef xj_frame frame
        cdef Found found
        self._enter()
        with nogil:
            while position < last:
                if self._left(position) < FRAME:
                    position += self._left(position)
                    continue
                if not self._lives(position, generation, &frame) or frame.version < version:
                    break
                if position >= mark and frame.version < oldest:
                    break
                version = frame.version
                if frame.size & PADDING:
                    position += self._left(position)
                    continue
                self._describe(position, &frame, &found)
                if not _is_sound(found.entry, found.size):
                    break
                position = found.next
                if not found.more:
                    whole = position
        self.busy -= 1
        return whole

    # ---- what every append follows -------------------------------------------------------

    cdef Tail* _find(self, uint64_t topic) noexcept nogil:
        cdef size_t at
        if self.room == 0:
            return NULL
        at = <size_t>(topic * <uint64_t>0x9E3779B97F4A7C15) & (self.room - 1)
        while self.tails[at].topic != topic:
            if self.tails[at].topic == 0:
                return NULL
            at = (at + 1) & (self.room - 1)
        return &self.tails[at]

    cdef Tail* _make(self, uint64_t topic) noexcept nogil:
        cdef Tail* old = self.tails
        cdef size_t old_room = self.room
        cdef Tail* found = self._find(topic)
        cdef size_t at, i
        if found != NULL:
            return found
        if 2 * self.used >= self.room:
            self.tails = <Tail*>calloc(max(64, 2 * old_room), sizeof(Tail))
            if self.tails == NULL:
                self.tails = old
                return NULL
            self.room = max(64, 2 * old_room)
            self.used = 0
            for i in range(old_room):
                if old[i].topic:
                    self._make(old[i].topic)[0] = old[i]
            free(old)
        at = <size_t>(topic * <uint64_t>0x9E3779B97F4A7C15) & (self.room - 1)
        while self.tails[at].topic:
            at = (at + 1) & (self.room - 1)
        self.used += 1
        self.tails[at].topic = topic
        return &self.tails[at]

    cdef uint64_t _scan_for(self, Tail* tail, uint64_t position, uint64_t stop) noexcept nogil:
        cdef Found found
        while self._next(position, self.generation, stop, &found):
            _follow(tail, &found)
            position = found.next
        return stop

    cdef void _catch_up(self) noexcept nogil:
        """Under the mutex: what other processes have appended since."""
        cdef uint64_t position = self.seen
        cdef uint64_t stop = self.shared.tail
        cdef Found found
        cdef Tail* tail
        self.seen = stop
        if self._outran(position):
            self.lap += 1
            return
        while self._next(position, self.generation, stop, &found):
            tail = self._find(found.topic)
            if tail != NULL:
                _follow(tail, &found)
            position = found.next

    cdef void _adopt_generation(self) noexcept nogil:
        if self.generation != self.shared.generation:
            self.generation = self.shared.generation
            self.lap += 1
            self.seen = self.shared.tail

    def learn(self, uint64_t topic, uint64_t next_offset, int64_t publish_time, uint64_t at,
              uint64_t generation, uint64_t version):
        """What the tables say of a topic as of position `at`, read when the words had this
        `version`. False if they know more by now."""
        cdef Tail fresh
        cdef Tail* tail = NULL
        cdef uint64_t position = at
        cdef bint there
        memset(&fresh, 0, sizeof(Tail))
        fresh.topic, fresh.next_offset, fresh.publish_time = topic, next_offset, publish_time
        fresh.at = at
        self._enter()
        try:
            self.lock()
        except BaseException:
            self.busy -= 1
            raise
        with nogil:
            self._adopt_generation()
            there = (self.generation == generation and self.shared.version == version
                     and not self.shared.unsettled and not self._outran(at))
            if there:
                self._catch_up()
                self._scan_for(&fresh, at, self.shared.tail)
                tail = self._make(topic)
            if tail != NULL:
                tail[0] = fresh
                tail.at = self.shared.tail
                tail.lap = self.lap
            xj_unlock(self.shared)
        self.busy -= 1
        if there and tail == NULL:
            raise MemoryError
        return there

    # ---- append --------------------------------------------------------------------------

    cdef int _stopped(self) noexcept nogil:
        """Why nothing may be appended: an errno, or 0."""
        if self._lost():
            return EIO
        return xl_load(&self.gone) or xl_load(&self.shared.failed)

    cdef int _place(self, Placing* p) noexcept nogil:
        """The critical section (rule B2): the mutex is held."""
        cdef xj_words* words = self.shared
        cdef Tail* tail
        cdef uint64_t before = words.tail
        cdef uint64_t offset, end
        cdef int64_t sequence, now
        cdef Py_ssize_t i
        p.error = self._stopped()
        if p.error:
            return BROKEN
        self.compared += 1
        if words.generation != self.generation or words.version != p.version:
            return STALE
        if not p.alone:
            self._catch_up()
        tail = self._find(p.topic)
        if tail == NULL or (not p.alone and tail.lap != self.lap):
            return STALE
        if p.sequence < 0:
            if p.last[0] == INT64_MAX:
                return DUPLICATE
            p.sequence = p.last[0] + 1
        elif p.sequence <= p.last[0]:
            return DUPLICATE
        if p.sequence <= p.logged:
            return DUPLICATE
        end = self._end_of(p, before)
        if end - xl_load64(&words.applied) > self.capacity:
            return FULL
        now = max(tail.publish_time, xj_wall_ms())
        offset, sequence = tail.next_offset, p.sequence
        for i in range(p.count):
            _stamp(&p.pieces[i], p.topic, offset, p.epoch, p.session, sequence, now)
            offset += p.pieces[i].count
            sequence += p.pieces[i].count
        p.error = self._write(p, before, tail.next_offset)
        if p.error == 0 and self._lost():
            p.error = EIO       # a store into the mapping did not reach the file
        if p.error:
            return self._refused(p)
        p.base_offset, p.end, p.generation = tail.next_offset, end, self.generation
        p.last[0] = sequence - 1
        tail.next_offset, tail.publish_time = offset, now
        tail.at = end
        if self.seen == before:
            self.seen = end
        xl_store64(&words.tail, end)
        offset = xl_load64(&words.applied)
        p.wanted = before == offset or (before - offset < self.capacity / 2 <= end - offset)
        if self._lost():
            p.error = EIO
            return LOST
        self.placed += 1
        return PLACED

    cdef int _refused(self, Placing* p) noexcept nogil:
        # Parts of its frames may stand behind `tail`, and over frames that others still want.
        xl_store64(&self.shared.version, self.shared.version + 1)
        if xl_load(&self.gone):
            return BROKEN       # here alone: others have the file
        if p.error == ENOSPC or p.error == EDQUOT or p.error == EFBIG:
            return NO_ROOM
        xl_swap(&self.shared.failed, 0, p.error)
        return BROKEN

    cdef uint64_t _start_of(self, uint64_t position, size_t entry) noexcept nogil:
        # A frame does not go around the end of the file.
        cdef uint64_t left = self._left(position)
        return position if _frame_bytes(entry) <= left else position + left

    cdef uint64_t _end_of(self, Placing* p, uint64_t position) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(p.count):
            position = self._start_of(position, p.pieces[i].size)
            position += _frame_bytes(p.pieces[i].size)
        return position

    cdef int _write(self, Placing* p, uint64_t position, uint64_t base_offset) noexcept nogil:
        cdef uint64_t start
        cdef uint64_t offset = base_offset
        cdef xj_frame frame
        cdef int failed
        cdef Py_ssize_t i
        for i in range(p.count):
            memset(&frame, 0, FRAME)
            start = self._start_of(position, p.pieces[i].size)
            if start != position and self._left(position) >= FRAME:
                frame.size = PADDING
                failed = self._write_frame(position, &frame, NULL, 0, p.durable)
                if failed:
                    return failed
            frame.size = <uint32_t>p.pieces[i].size | (MORE if i < p.count - 1 else 0)
            frame.topic, frame.base_offset, frame.count = p.topic, offset, p.pieces[i].count
            failed = self._write_frame(
                start, &frame, p.pieces[i].data, p.pieces[i].size, p.durable)
            if failed:
                return failed
            offset += p.pieces[i].count
            position = start + _frame_bytes(p.pieces[i].size)
        return 0

    cdef int _write_frame(self, uint64_t position, xj_frame* frame, const char* entry,
                          size_t size, bint durable) noexcept nogil:
        cdef char* at = <char*>self._at(position)
        frame.magic, frame.position, frame.generation = FRAME_MAGIC, position, self.generation
        frame.version = self.shared.version
        frame.crc = _crc(<char*>frame, FRAME - 4)
        # Storing through the mapping is the cheaper way as long as nobody flushes: after each
        # flush the first store into a page is a fault.
        if durable:
            if not xj_is(self.fd, &self.file):
                xl_store(&self.gone, EBADF)
                return EBADF
            return xj_write(self.fd, at - self.memory, frame, FRAME, entry, size)
        if size:
            memcpy(at + FRAME, entry, size)
        memcpy(at, frame, FRAME)
        return 0

    cdef int _place_and_leave(self, Placing* p) noexcept nogil:
        cdef int outcome = self._place(p)
        xj_unlock(self.shared)
        if outcome == PLACED and p.flushed:
            outcome = self.flush(p.end, p.generation, &p.error)
        return outcome

    cdef int place(self, Placing* p) except -1:
        """Append, or say why not. The GIL is given up to wait, and for system calls; it is not
        needed again before all is over, flush included."""
        cdef int failed
        cdef int outcome = BROKEN
        if self.memory == NULL:
            return CLOSED
        self.busy += 1
        try:
            failed = xj_try_lock(self.shared)
            if failed == 0 and not p.durable:
                outcome = self._place_and_leave(p)
            elif failed and p.impatient:
                return QUEUED
            else:
                while True:
                    with nogil:
                        if failed:
                            failed = xj_lock(self.shared)
                        if failed == 0:
                            outcome = self._place_and_leave(p)
                    if failed != ETIMEDOUT:
                        break
                    self._look_around(xj_appending(self.shared))
        finally:
            self.busy -= 1
        if failed == EDEADLK:
            return HELD_HERE
        if failed:
            p.error = failed
            return BROKEN
        if outcome == PLACED and (p.wanted or self.idle):
            self._ask_for_a_checkpoint()
        return outcome

    # ---- flush ---------------------------------------------------------------------------

    cdef int flush(self, uint64_t end, uint64_t generation, int* error) noexcept nogil:
        """Return when everything before `end` is durable: one flush for all who wait, in
        whatever process."""
        cdef xj_words* words = self.shared
        cdef uint32_t seen
        cdef bint late
        xl_add(&words.arrivals, 1)
        while True:
            if xl_load64(&words.generation) != generation:
                return LOST     # recovered meanwhile, with it or without
            if self._lost() or xl_load(&self.gone):
                error[0] = self._stopped()
                return LOST
            if xl_load64(&words.synced) >= end:
                return PLACED
            if xl_load(&words.failed):
                error[0] = words.failed
                return LOST
            seen = xl_load(&words.flushes)
            if xj_try_flush_lock(words) == 0:
                if xl_load64(&words.synced) < end:
                    self._lead()
                xj_flush_unlock(words)
                xl_add(&words.flushes, 1)
                if xl_load(&words.sleepers):
                    xl_wake(&words.flushes, INT_MAX)
            else:
                xl_add(&words.sleepers, 1)
                late = (xl_load64(&words.synced) < end
                        and xl_wait(&words.flushes, seen, FLUSH_LOOK_UP_NS) == ETIMEDOUT)
                xl_add(&words.sleepers, <uint32_t>-1)
                if late:
                    self._sync_alone()

    cdef void _lead(self) noexcept nogil:
        cdef xj_words* words = self.shared
        cdef int64_t deadline
        cdef uint32_t before = words.led
        # Those who were served the last time, or came too late for it, are about to come: one
        # flush for all of them is better than two.
        if xl_load(&words.arrivals) - before < words.crowd:
            deadline = xl_now() + CROWD_NS
            while xl_load(&words.arrivals) - before < words.crowd and xl_now() < deadline:
                sched_yield()
        words.led = xl_load(&words.arrivals)
        self._sync(self.fd)
        words.crowd = xl_load(&words.arrivals) - before

    cdef void _sync(self, int fd) noexcept nogil:
        cdef xj_words* words = self.shared
        cdef uint64_t generation = xl_load64(&words.generation)
        cdef uint64_t target = xl_load64(&words.tail)
        if xl_load(&words.failed):
            return
        if not xj_is(fd, &self.file):
            xl_store(&self.gone, EBADF)
        elif fdatasync(fd):
            xl_swap(&words.failed, 0, errno)
        elif xl_load64(&words.generation) == generation and not xl_load(&words.failed):
            xj_raise(&words.synced, target)

    cdef void _sync_alone(self) noexcept nogil:
        """Beside a leader that may be stopped. By a file of its own: the system tells of a
        failed write once for each open file, and must not have told only the other."""
        if xl_swap(&self.alone, 0, 1):
            self._sync(self.lone_fd)
            xl_store(&self.alone, 0)

    def flush_to(self, uint64_t end, uint64_t generation):
        """Wait until everything before `end` is durable; 0, or what came of it instead."""
        cdef int error = 0
        cdef int outcome
        if self.memory == NULL:
            return CLOSED
        self.busy += 1
        with nogil:
            outcome = self.flush(end, generation, &error)
        self.busy -= 1
        return outcome

    def flush_all(self):
        """Flush what is there now, also what nobody waits for."""
        cdef int error = 0
        cdef uint64_t tail = xl_load64(&self.shared.tail)
        cdef uint64_t generation = xl_load64(&self.shared.generation)
        if self.memory == NULL:
            raise _closed_meanwhile()
        self.busy += 1
        with nogil:
            self.flush(tail, generation, &error)
        self.busy -= 1

    # ---- checkpoints ---------------------------------------------------------------------

    cdef void _ask_for_a_checkpoint(self) noexcept:
        self.idle = False
        xl_add(&self.due, 1)
        if self.watchers:
            xl_wake(&self.due, INT_MAX)

    def ask(self):
        """Wake who waits in `await_due`."""
        self._ask_for_a_checkpoint()

    def expect(self):
        """What `await_due` takes. The next append of this process ends a wait for ever, even if
        it is another process's turn to make a checkpoint: that one may be dead."""
        self.idle = True
        return xl_load(&self.due)

    def await_due(self, uint32_t seen, double seconds):
        """Sleep until a checkpoint is wanted that was not when `expect` gave `seen`, `seconds`
        at most (below 0: for ever)."""
        cdef uint32_t* word = &self.due
        if seconds >= 0:
            self.idle = False   # it will look by itself: no append need wake it
        self.watchers += 1
        with nogil:
            xl_wait(word, seen, <int64_t>(seconds * 1e9))
        self.watchers -= 1

    def gather(self, uint64_t start, uint64_t stop, uint64_t generation):
        """The entries of the frames between two positions, by topic: a context manager that
        gives a list of Bundles."""
        cdef Frames frames = Frames.__new__(Frames)
        self._enter()
        frames.journal = self
        # The GIL is kept: a busy thread would not give it back for 5 ms each time.
        if not frames.fill(start, stop, generation):
            raise MemoryError
        return frames

    # ---- read ----------------------------------------------------------------------------

    def collect(self, uint64_t topic, uint64_t offset, uint64_t start, uint64_t stop,
                uint64_t generation, Py_ssize_t most):
        """A topic's entries from the one that holds `offset` on, `most` bytes or a little more:
        (last offset, copy of the entry, the position behind it). Raises Outrun."""
        cdef list entries = []
        cdef Found found
        cdef uint64_t position = start
        cdef Py_ssize_t size = 0
        cdef bint more = True
        self._enter()
        try:
            while size < most:
                with nogil:
                    more = self._next_of(topic, offset, position, stop, generation, &found)
                if not more:
                    break
                size += found.size
                position = found.next
                entries.append((found.base_offset + found.count - 1,
                                found.entry[:found.size], position))
        finally:
            self.busy -= 1
        self._check_not_outrun(start, generation)
        return entries

    cdef bint _next_of(self, uint64_t topic, uint64_t offset, uint64_t position, uint64_t stop,
                       uint64_t generation, Found* found) noexcept nogil:
        while self._next(position, generation, stop, found):
            if found.topic == topic and found.base_offset + found.count > offset:
                return True
            position = found.next
        return False

    cdef bint _outran(self, uint64_t position) noexcept nogil:
        """May the frames from this position on be overwritten? Room before `applied` may be
        written to at any moment, by an append of at most half the file."""
        return (xl_load64(&self.shared.applied) > position
                and xl_load64(&self.shared.tail) + self.capacity / 2 > position + self.capacity)

    cdef _check_not_outrun(self, uint64_t position, uint64_t generation):
        if not self._believed():
            return
        if xl_load64(&self.shared.generation) != generation or self._outran(position):
            raise Outrun("the journal was overwritten while it was read")

    def end_of(self, uint64_t topic, uint64_t start, uint64_t stop, uint64_t generation):
        """(next offset, publish time) behind a topic's last frame between two positions; None
        if it has none there. Raises Outrun."""
        cdef Tail tail
        cdef uint64_t position = start
        cdef Found found
        memset(&tail, 0, sizeof(Tail))
        tail.topic = topic
        self._enter()
        with nogil:
            while self._next_of(topic, 0, position, stop, generation, &found):
                _follow(&tail, &found)
                position = found.next
        self.busy -= 1
        self._check_not_outrun(start, generation)
        return (tail.next_offset, tail.publish_time) if tail.next_offset else None


# ---- frames on their way into the tables -------------------------------------------------

cdef struct Framed:
    Found found
    Laid laid       # where it is sound
    uint64_t index
    bint sound


cdef int _by_topic(const void* a, const void* b) noexcept nogil:
    cdef const Framed* x = <const Framed*>a
    cdef const Framed* y = <const Framed*>b
    if x.found.topic != y.found.topic:
        return -1 if x.found.topic < y.found.topic else 1
    return -1 if x.index < y.index else 1


@cython.final
cdef class Frames:
    """The entries of a run of frames, where they lie, ordered by topic."""

    cdef Journal journal
    cdef Framed* items
    cdef Py_ssize_t used
    cdef Py_ssize_t room

    def __init__(self):
        raise TypeError("Frames are made by a Journal")

    def __dealloc__(self):
        self._let_go()

    cdef _let_go(self):
        free(self.items)
        self.items = NULL
        self.used = 0
        if self.journal is not None:
            self.journal.busy -= 1
            self.journal = None

    def __enter__(self):
        return self.bundles()

    def __exit__(self, kind, error, trace):
        self._let_go()

    cdef bint fill(self, uint64_t position, uint64_t stop, uint64_t generation) noexcept nogil:
        cdef Framed* grown
        cdef Framed* item
        cdef Found found
        while self.journal._next(position, generation, stop, &found):
            if self.used == self.room:
                grown = <Framed*>realloc(self.items, (2 * self.room + 256) * sizeof(Framed))
                if grown == NULL:
                    return False
                self.items = grown
                self.room = 2 * self.room + 256
            item = &self.items[self.used]
            item.index, item.found = self.used, found
            # A damaged one keeps its place in the log, to be named there.
            item.sound = (_is_sound(found.entry, found.size)
                          and _lay_out(found.entry, found.size, &item.laid) == WHOLE
                          and item.laid.topic == found.topic
                          and item.laid.base_offset == found.base_offset
                          and item.laid.count == found.count)
            self.used += 1
            position = found.next
        qsort(self.items, self.used, sizeof(Framed), _by_topic)
        return True

    cdef list bundles(self):
        cdef list found = []
        cdef Py_ssize_t start = 0
        cdef Py_ssize_t stop
        while start < self.used:
            stop = start + 1
            while stop < self.used and self.items[stop].found.topic == self.items[start].found.topic:
                stop += 1
            found.append(_bundle(self, start, stop))
            start = stop
        return found


cdef Bundle _bundle(Frames frames, Py_ssize_t start, Py_ssize_t stop):
    cdef Bundle bundle = Bundle.__new__(Bundle)
    cdef Found* last = &frames.items[stop - 1].found
    cdef Py_ssize_t i
    bundle.frames, bundle.start, bundle.stop = frames, start, stop
    bundle.topic = last.topic
    bundle.base_offset = frames.items[start].found.base_offset
    bundle.next_offset = last.base_offset + last.count
    for i in range(start, stop):
        bundle.nbytes += frames.items[i].found.size
        if frames.items[i].sound:
            bundle.publish_time = frames.items[i].laid.publish_time
    return bundle


@cython.final
cdef class Bundle:
    """One topic's entries out of the journal, until its `Frames` are left."""

    cdef Frames frames
    cdef Py_ssize_t start
    cdef Py_ssize_t stop
    cdef readonly uint64_t topic
    cdef readonly uint64_t base_offset
    cdef readonly uint64_t next_offset
    cdef readonly int64_t publish_time
    cdef readonly size_t nbytes

    def __init__(self):
        raise TypeError("a Bundle is made by a Journal")

    def pack(self, Entry before, size_t most):
        """(last offset, entry) pairs of about `most` bytes each. With `before`, the entry that
        they follow, the first of them takes its place."""
        cdef list packed = []
        cdef Py_ssize_t n = self.stop - self.start
        if self.frames.items == NULL:
            raise ValueError("the frames are gone")
        cdef Laid* parts = <Laid*>malloc((n + 1) * sizeof(Laid))
        cdef Py_ssize_t used = 0
        cdef Py_ssize_t i
        cdef Framed* item
        if parts == NULL:
            raise MemoryError
        try:
            if before is not None:
                _lay_out(before.start, before.nbytes, &parts[0])
                used = 1
            for i in range(self.start, self.stop):
                item = &self.frames.items[i]
                if item.sound:
                    parts[used] = item.laid
                    used += 1
                else:
                    _pack_parts(parts, used, most, packed)
                    used = 0
                    packed.append((item.found.base_offset + item.found.count - 1,
                                   item.found.entry[:item.found.size]))
            _pack_parts(parts, used, most, packed)
        finally:
            free(parts)
        return packed

    def producers(self):
        """{producer name: last sequence id} of what is in it."""
        cdef dict found = {}
        cdef Framed* item
        cdef Py_ssize_t i
        if self.frames.items == NULL:
            raise ValueError("the frames are gone")
        for i in range(self.start, self.stop):
            item = &self.frames.items[i]
            if item.sound and (i + 1 == self.stop or not self.frames.items[i + 1].sound
                               or item.laid.session != self.frames.items[i + 1].laid.session):
                found[item.laid.name[:item.laid.name_length]] = _last_sequence(&item.laid)
        return found
