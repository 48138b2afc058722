# Words in a file that several processes map: atomic access, futexes, and liveness words, which the
# kernel marks when their process dies (_native/futex.h, _native/liveness.h).

cdef extern from "_native/futex.h":
    ctypedef struct xl_waiter:
        uint64_t val
        uint64_t uaddr
        uint32_t flags
        uint32_t reserved
    uint32_t xl_load(uint32_t*) noexcept nogil
    void xl_store(uint32_t*, uint32_t) noexcept nogil
    uint32_t xl_add(uint32_t*, uint32_t) noexcept nogil
    uint32_t xl_or(uint32_t*, uint32_t) noexcept nogil
    bint xl_swap(uint32_t*, uint32_t, uint32_t) noexcept nogil
    uint64_t xl_load64(uint64_t*) noexcept nogil
    void xl_store64(uint64_t*, uint64_t) noexcept nogil
    int XL_WORD
    int64_t xl_now() noexcept nogil
    int xl_wait(uint32_t*, uint32_t, int64_t) noexcept nogil
    long xl_wake(uint32_t*, int) noexcept nogil
    int xl_wait_any(xl_waiter*, unsigned, int64_t) noexcept nogil
    bint xl_watch(uint32_t*, uint32_t, int64_t) noexcept nogil
    int errno
    int EAGAIN
    int EBUSY
    int EINTR
    int INT_MAX
    uint32_t FUTEX_OWNER_DIED
    uint32_t FUTEX_TID_MASK
    uint32_t FUTEX_WAITERS

cdef extern from "_native/liveness.h":
    ctypedef struct xl_holder:
        int tid
    xl_holder* xl_take_hold(uint32_t*, void*, uint32_t*) noexcept nogil
    void xl_let_go(xl_holder*) noexcept nogil


OWNER_DIED = FUTEX_OWNER_DIED
HELD_BY = FUTEX_TID_MASK
MUTEX_WORD = XL_WORD            # where a pthread_mutex_t of this C library has its holder
SLEEPERS = FUTEX_WAITERS
MOST_WAITED_FOR = 128

# How far this process's time namespace puts its monotonic clock ahead of the machine's, in ns.
cdef int64_t _clock_offset = 0


def now():
    """Nanoseconds of the monotonic clock that all processes of the machine share (rule C4),
    whatever their time namespaces, once `set_clock_offset` has been called."""
    return xl_now() - _clock_offset


def monotonic():
    """Seconds of the kernel's monotonic clock, for deadlines: `time.monotonic`, but for libraries
    that replace that (freezegun, libfaketime)."""
    return xl_now() / 1e9


def set_clock_offset(int64_t ns):
    """Set how many nanoseconds this process's monotonic clock is ahead of the machine's."""
    global _clock_offset
    _clock_offset = ns


cdef enum:
    COUNTER = 64            # bytes of a topic's counter
    COUNTER_END = 16        # in it: the position behind the last frame of its topics
    COUNTER_CHANGED = 24    # in it: the versions of the last changes of its subjects (changes.pxi)
    COUNTERS_OF_TOPICS = 1024

COUNTERS = COUNTERS_OF_TOPICS


cdef inline uint64_t _spread(uint64_t number) noexcept nogil:
    """A number whose low bits differ for numbers that follow one another."""
    return number * <uint64_t>0x9E3779B1


def counter_of(uint64_t topic):
    """Which of the `COUNTERS` counters is the topic's."""
    return _spread(topic) % COUNTERS_OF_TOPICS


cdef inline void _announce_at(uint32_t* word) noexcept nogil:
    # A topic's counter: u32 commits, u32 readers that sleep, u64 when the first append was
    # announced to those, u64 the end of the last frame (append.pxi), four u64 of changes.pxi. The
    # clock is read only where a reader is to be woken.
    cdef uint64_t* announced = <uint64_t*>(word + 2)
    xl_add(word, 1)
    if xl_load(word + 1):
        if xl_load64(announced) == 0:
            xl_store64(announced, <uint64_t>(xl_now() - _clock_offset))
        xl_wake(word, INT_MAX)


cdef class SharedWords:
    """32- and 64-bit words in a writable buffer that other processes map, too. `guarded`: it is
    the mapping of a file, and a store that cannot reach the file must not kill the process (see
    guard.pxi)."""

    cdef Py_buffer view
    cdef bint held
    cdef int guard

    def __cinit__(self, buffer, bint guarded=False):
        self.guard = -1
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.held = True
        if guarded:
            xg_ready()
            _keep_out_of_dumps(self.view.buf, self.view.len)
            self.guard = xg_guard(self.view.buf, self.view.len, 0)

    def __dealloc__(self):
        xg_let_go(self.guard)
        if self.held:
            PyBuffer_Release(&self.view)

    @property
    def lost(self):
        """Has a store failed to reach the file (rule H2)? Then other processes do not see later
        stores."""
        return xg_lost(self.guard) != 0

    cdef uint32_t* word(self, Py_ssize_t offset) except NULL:
        if offset < 0 or offset & 3 or offset + 4 > self.view.len:
            raise IndexError(f"offset={offset} is no word of this mapping")
        xg_ready()
        return <uint32_t*>(<char*>self.view.buf + offset)

    cdef uint64_t* wide(self, Py_ssize_t offset) except NULL:
        if offset < 0 or offset & 7 or offset + 8 > self.view.len:
            raise IndexError(f"offset={offset} is no 64-bit word of this mapping")
        xg_ready()
        return <uint64_t*>(<char*>self.view.buf + offset)

    def load(self, Py_ssize_t offset):
        """The word now."""
        return xl_load(self.word(offset))

    def store(self, Py_ssize_t offset, uint32_t value):
        """Set the word."""
        xl_store(self.word(offset), value)

    def add(self, Py_ssize_t offset, int64_t amount):
        """Add to the word, modulo 2**32; returns the new value."""
        return xl_add(self.word(offset), <uint32_t>amount)

    def mark(self, Py_ssize_t offset, uint32_t bits):
        """Set these bits; returns the new value."""
        return xl_or(self.word(offset), bits)

    def swap(self, Py_ssize_t offset, uint32_t expected, uint32_t value):
        """Set the word if it has the expected value; True if it had."""
        return xl_swap(self.word(offset), expected, value)

    def load64(self, Py_ssize_t offset):
        """The 64-bit word now."""
        return xl_load64(self.wide(offset))

    def store64(self, Py_ssize_t offset, uint64_t value):
        """Set the 64-bit word."""
        xl_store64(self.wide(offset), value)

    def taken(self, Py_ssize_t start, Py_ssize_t step, Py_ssize_t count):
        """[(index, value)] of the nonzero words among `count` 64-bit words, `step` bytes apart."""
        cdef list found = []
        cdef uint64_t value
        cdef Py_ssize_t i
        self.wide(start)
        self.wide(start + step * (count - 1))
        for i in range(count):
            value = xl_load64(<uint64_t*>(<char*>self.view.buf + start + i * step))
            if value:
                found.append((i, value))
        return found

    def clear(self, Py_ssize_t start, Py_ssize_t stop):
        """Set all 64-bit words between two offsets to 0. Does not store to words that are 0,
        because the first store makes a page dirty."""
        cdef Py_ssize_t at
        self.wide(start)
        self.wide(stop - 8)
        for at in range(start, stop, 8):
            if xl_load64(<uint64_t*>(<char*>self.view.buf + at)):
                xl_store64(<uint64_t*>(<char*>self.view.buf + at), 0)

    def wake(self, Py_ssize_t offset, int most=INT_MAX):
        """Wake threads that sleep on the word; returns how many."""
        return xl_wake(self.word(offset), most)

    def announce(self, Py_ssize_t offset):
        """Change a topic's counter after an append, and wake the threads that sleep on it."""
        self.wide(offset + 8)
        _announce_at(self.word(offset))

    def sleep(self, Py_ssize_t offset, uint32_t expected, int64_t ns):
        """Sleep while a topic's counter has this value, at most `ns`, registered as a waiting
        reader. Returns the ns since the append that ended the sleep was announced; -1 if
        unknown."""
        cdef uint32_t* word = self.word(offset)
        cdef uint64_t* announced = self.wide(offset + 8)
        cdef uint64_t when
        # A reader that is killed here stays counted: writers then make an unnecessary wake-up call.
        xl_add(word + 1, 1)
        xl_store64(announced, 0)
        with nogil:
            xl_wait(word, expected, ns)
        xl_add(word + 1, <uint32_t>-1)
        when = xl_load64(announced)
        if when == 0 or xl_load(word) == expected:
            return -1
        xl_store64(announced, 0)
        return max(0, xl_now() - _clock_offset - <int64_t>when)

    def watch(self, Py_ssize_t offset, uint32_t expected, int64_t ns):
        """Spin until the word changes or `ns` have passed; True if it changed."""
        cdef uint32_t* word = self.word(offset)
        cdef bint changed
        with nogil:
            changed = xl_watch(word, expected, ns)
        return changed

    def wait(self, Py_ssize_t offset, uint32_t expected, int64_t ns=-1):
        """Sleep while the word has this value, at most `ns`. A signal ends it early."""
        cdef uint32_t* word = self.word(offset)
        with nogil:
            xl_wait(word, expected, ns)

    def wait_any(self, list offsets not None, list expected not None, int64_t ns):
        """Sleep while all words have these values (at most 128), at most `ns`. False, without
        sleeping, if the kernel refuses it: before Linux 5.16, or in some containers."""
        cdef xl_waiter[128] waiters
        cdef Py_ssize_t i
        cdef unsigned count = min(len(offsets), 128)
        cdef int failed
        memset(waiters, 0, sizeof(waiters))
        for i in range(count):
            waiters[i].val = expected[i]
            waiters[i].uaddr = <uint64_t>self.word(offsets[i])
            waiters[i].flags = 2    # FUTEX_32, shared
        with nogil:
            failed = xl_wait_any(waiters, count, ns)
        # Some lists of permitted system calls answer EPERM.
        return failed == 0 or failed == EAGAIN or failed == ETIMEDOUT or failed == EINTR


cdef _no_thread(int failed):
    # As Python's own threads say it, whose callers know these words.
    return RuntimeError(f"can't start new thread ({_os.strerror(failed)})")


cdef class Hold:
    """Holds a word of a `SharedWords` as long as this process lives, or until `release`.

    `node` is the offset of 8 bytes for the kernel's list; `presence` that of a word on which its
    thread sleeps, so that waking it proves that the memory is shared. Raises OSError if the word is
    not 0 (BlockingIOError), and RuntimeError, as Python's own threads do, if no thread could be
    started.
    """

    cdef SharedWords words
    cdef xl_holder* holder

    def __cinit__(self, SharedWords words not None, Py_ssize_t word, Py_ssize_t node,
                  Py_ssize_t presence):
        cdef uint32_t* at = words.word(word)
        cdef void* beside = words.wide(node)
        cdef uint32_t* sleeps_on = words.word(presence)
        self.words = words
        with nogil:
            self.holder = xl_take_hold(at, beside, sleeps_on)
        if self.holder == NULL:
            if errno == EBUSY:
                raise BlockingIOError(EBUSY, "the word is held")
            raise _no_thread(errno)

    def __dealloc__(self):
        # Release it before the mapping is freed: the kernel could not mark the word any more.
        if self.holder != NULL:
            xl_let_go(self.holder)

    @property
    def tid(self):
        """The id of the thread that holds the word."""
        return self.holder.tid if self.holder != NULL else 0

    def release(self):
        """Set the word to 0, and wake the threads that watch it."""
        cdef xl_holder* holder = self.holder
        self.holder = NULL
        if holder != NULL:
            with nogil:
                xl_let_go(holder)

    def forget(self):
        """Drop it in a forked child, without releasing: the thread is the parent's."""
        self.holder = NULL


@cython.final
@cython.no_gc_clear
cdef class DropQueue:
    """Puts what is to be released into a deque, and wakes the thread that releases it, which sleeps
    on a counter. In a forked child it has no effect: the thread is the parent's.

    What is left there may refer to the engine, and that to this: the garbage collector follows it,
    so that all can be freed."""

    cdef object items
    cdef SharedWords words
    cdef Py_ssize_t counter
    cdef uint32_t process

    def __cinit__(self, object items not None, SharedWords words not None, Py_ssize_t counter):
        self.items = items
        self.words = words
        self.counter = counter
        self.process = xi_here()

    def put(self, item not None):
        """Queue an item for release."""
        if self.process == xi_here():
            self.items.append(item)
            xl_add(self.words.word(self.counter), 1)
            xl_wake(self.words.word(self.counter), INT_MAX)


@cython.final
@cython.no_gc
cdef class Finalizer:
    """A finalizer that queues `item` for release once the finalizer itself is dropped.

    The last reference may be dropped anywhere, even inside a transaction or at an interrupt, so it
    is all in C.
    """

    cdef object item
    cdef DropQueue queue

    def __cinit__(self, object item, DropQueue queue not None):
        self.item = item
        self.queue = queue

    def __dealloc__(self):
        if self.item is not None:
            self.release()

    def release(self):
        """Queue the item for release now."""
        item, self.item = self.item, None
        if item is not None:
            self.queue.put(item)

    def detach(self):
        """Disable the finalizer."""
        self.item = None

cdef extern from "<sys/mman.h>" nogil:
    void* mmap(void*, size_t, int, int, int, int64_t)
    int madvise(void*, size_t, int)
    int MADV_DONTDUMP
    int munmap(void*, size_t)
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED
    int MAP_PRIVATE
    int MAP_ANONYMOUS
    int MAP_FIXED
    void* MAP_FAILED


@cython.final
@cython.no_gc
cdef class Mapping:
    """`size` bytes of an open file, mapped for reading; may extend beyond the file's end.

    Python's mmap keeps its own file descriptor, and cannot extend beyond the file's end. A reader
    must check the file's size first: an access beyond it kills the process.
    """

    cdef void* memory
    cdef Py_ssize_t size

    def __cinit__(self, int fd, Py_ssize_t size):
        if size <= 0:
            raise ValueError(f"size={size}: it takes a number of bytes from 1 on")
        self.memory = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0)
        if self.memory == MAP_FAILED:
            self.memory = NULL
            raise OSError(errno, _os.strerror(errno))
        self.size = size
        _keep_out_of_dumps(self.memory, size)

    def __dealloc__(self):
        if self.memory != NULL:
            munmap(self.memory, self.size)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.memory, self.size, 1, flags)

    def view(self, Py_ssize_t start, Py_ssize_t stop):
        """A view of the bytes from `start` to `stop`, which keeps the mapping."""
        return memoryview(self)[start:stop]

cdef extern from "<fcntl.h>" nogil:
    int sync_file_range(int, int64_t, int64_t, unsigned int)
    unsigned int SYNC_FILE_RANGE_WRITE


def start_writing(int fd, int64_t position, int64_t size):
    """Start writing these bytes to the disk, so that the later flush has less to do."""
    with nogil:
        sync_file_range(fd, position, size, SYNC_FILE_RANGE_WRITE)  # only a hint

cdef extern from "<sys/vfs.h>" nogil:
    cdef struct statfs_facts "statfs":
        long f_type
    int xl_statfs "statfs"(const char* path, statfs_facts* facts)


def file_system_magic(bytes path not None):
    """The number of the type of the file system of a path (statfs(2)); 0 if there is none."""
    cdef statfs_facts facts
    return facts.f_type if xl_statfs(path, &facts) == 0 else 0


cdef extern from "<fcntl.h>" nogil:
    int fallocate(int, int, int64_t, int64_t)

cdef extern from "<linux/falloc.h>" nogil:      # the <fcntl.h> of musl has not all of them
    int FALLOC_FL_KEEP_SIZE
    int FALLOC_FL_UNSHARE_RANGE


def allocate_behind(int fd, int64_t end, int64_t size):
    """Allocate so many bytes of the disk behind the file's end, which stays where it is. OSError if
    there is no room, or the file system cannot do it."""
    if fallocate(fd, FALLOC_FL_KEEP_SIZE, end, size):
        raise OSError(errno, _os.strerror(errno))


def unshare_blocks(int fd, int64_t start, int64_t size):
    """Give this part of a file blocks that no other file shares. OSError if there is no room
    (ENOSPC), or the file system cannot do it (EOPNOTSUPP)."""
    cdef int failed
    with nogil:
        failed = fallocate(fd, FALLOC_FL_UNSHARE_RANGE, start, size)
    if failed:
        raise OSError(errno, _os.strerror(errno))


def store_again(int fd, int64_t start, int64_t size):
    """Store a word of each page in this part of a file again, as it is, also if other processes
    write to it: so the file system writes these pages. `start` is the start of a page. OSError
    (ENOSPC) if there is no room."""
    cdef uint32_t word, lost = 1
    cdef int64_t page, pages = (size + 4095) // 4096    # larger ones are stored to several times
    cdef int guard
    cdef uint32_t* words = <uint32_t*>mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, start)
    if <void*>words == MAP_FAILED:
        raise OSError(errno, _os.strerror(errno))
    xg_ready()
    guard = xg_guard(words, size, 0)
    if guard >= 0:
        with nogil:
            for page in range(pages):
                word = xl_load(words + 1024 * page)
                xl_swap(words + 1024 * page, word, word)    # if it fails, another thread stored
        lost = xg_lost(guard)
        xg_let_go(guard)
    munmap(words, size)
    if lost:
        raise OSError(ENOSPC, _os.strerror(ENOSPC))


cdef extern from "<sched.h>" nogil:
    int unshare(int)
    int CLONE_FILES


def unshare_descriptors():
    """Give this thread a copy of the table of descriptors: what it closes stays open in the others.
    OSError if the system refuses that."""
    if unshare(CLONE_FILES):
        raise OSError(errno, _os.strerror(errno))


def make_private(size_t start, size_t size):
    """Replace the memory by private zeros: it is not shared with other processes any more."""
    cdef int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED
    if mmap(<void*>start, size, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED:
        raise OSError(errno, _os.strerror(errno))


# ---- core dumps ---------------------------------------------------------------------------

# A dump with the filter 0x3f has files' mappings, too. It would have all messages, and the kernel would
# walk the address space that is reserved for LMDB: half a minute during which the dying process keeps
# its topics.

cdef void _keep_out_of_dumps(void* start, size_t size) noexcept nogil:
    madvise(start, size, MADV_DONTDUMP)     # refused by old kernels: the dump is larger


def keep_lmdb_out_of_dumps(value not None, size_t page_size, size_t map_size):
    """Keep LMDB's map out of core dumps. `value`: a buffer of a value on a leaf page of it. Returns
    the address at which the map begins.

    LMDB does not tell that address. Each of its pages begins with its number, 64 bits."""
    cdef Py_buffer view
    cdef size_t page
    PyObject_GetBuffer(value, &view, PyBUF_SIMPLE)
    page = <size_t>view.buf & ~(page_size - 1)
    PyBuffer_Release(&view)
    cdef size_t start = page - (<uint64_t*>page)[0] * page_size
    _keep_out_of_dumps(<void*>start, map_size)
    return start
