# A lock of threads that changes hands only under the interpreter's lock (the GIL).
#
# Python's own lock passes to a sleeping thread, which then holds it while it waits for the GIL. The
# running thread finds it taken, sleeps too, and every call costs a switch of threads. Here a woken
# thread takes the lock once it has the GIL, if it is free then. One that has waited for a while
# reserves it: else a thread that takes it again and again would keep it for ever (rule K4).

cdef double LONGEST_WAIT = 1e9      # seconds
# Sleep in slices, because a signal may come just before the sleep.
cdef int64_t SLICE_NS = 500_000_000
cdef int64_t PATIENCE_NS = 50_000_000   # for a lock, while others are taken
cdef int64_t TURN_NS = 5_000_000        # of waiting, until a thread reserves the lock
cdef int64_t RESERVED_NS = 2 * SLICE_NS     # unless renewed: a thread may never run again


@cython.final
cdef class Lock:
    """A reentrant lock: `with lock`, `acquire` and `release` as of `threading.RLock`.

    A signal handler may run during a wait, and end it by raising. In a forked child, a wait for a
    thread of the parent raises EngineClosedError (rule C5).
    """

    cdef unsigned long owner    # 0: it is free
    cdef uint32_t process       # of the owner
    cdef Py_ssize_t depth
    cdef uint32_t changes       # futex of the threads that wait
    cdef uint32_t sleepers
    cdef unsigned long next     # the thread that it is reserved for; 0: for none
    cdef uint32_t next_process
    cdef int64_t next_until     # ns of the monotonic clock

    cdef inline bint is_mine(self) noexcept:
        return self.owner == PyThread_get_thread_ident()

    cdef bint take(self, int64_t ns) except -1:
        """Acquire it within `ns` (0: without a wait, below 0: however long that takes)."""
        if ns == 0:
            if self.owner and not self.is_mine():
                return False
        elif self._is_taken() and not self._wait(ns):
            return False
        self.owner, self.process = PyThread_get_thread_ident(), xi_here()
        self.depth += 1
        return True

    cdef inline bint _is_taken(self) noexcept:
        if self.owner:
            return not self.is_mine()
        return self.next != 0 and self._is_reserved()

    cdef bint _is_reserved(self) noexcept:
        """Is it reserved for another thread, which waits?"""
        if self.next == 0 or self.next == PyThread_get_thread_ident():
            return False
        return self.next_process == xi_here() and xl_now() < self.next_until

    cdef bint _wait(self, int64_t ns) except -1:
        """Wait until it is free; False if that takes longer than `ns`."""
        cdef int64_t began = xl_now(), end
        cdef bint free = False
        end = INT64_MAX if ns < 0 else began + ns
        try:
            while self._is_taken():
                if self.owner and self.process != xi_here():
                    raise _inherited()
                if xl_now() >= end:
                    return False
                self._sleep(end, self._reserve(began))
            free = True
            return True
        finally:
            if self.next == PyThread_get_thread_ident():
                self.next = 0
            if not free:
                self._wake()    # pass on the wake-up, which may have been the only one

    cdef int64_t _reserve(self, int64_t began) noexcept:
        """Reserve it, once it is this thread's turn; returns when to look again."""
        cdef int64_t now = xl_now()
        if now < began + TURN_NS:
            return began + TURN_NS
        if not self._is_reserved():
            self.next, self.next_process = PyThread_get_thread_ident(), xi_here()
            self.next_until = now + RESERVED_NS
        return now + SLICE_NS

    cdef int _sleep(self, int64_t end, int64_t until) except -1:
        cdef int64_t left = min(end, until) - xl_now()
        cdef uint32_t seen = self.changes
        cdef uint32_t* word = &self.changes
        cdef uint32_t* sleepers = &self.sleepers
        xl_add(sleepers, 1)
        with nogil:
            if left > 0:
                xl_wait(word, seen, left)
            xl_add(sleepers, <uint32_t>-1)
        PyErr_CheckSignals()
        return 0

    cdef inline void _wake(self) noexcept:
        if self.owner == 0 and xl_load(&self.sleepers):
            xl_add(&self.changes, 1)
            xl_wake(&self.changes, INT_MAX if self.next else 1)  # that thread among them

    cdef inline void leave(self) noexcept:
        self.depth -= 1
        if self.depth == 0:
            self.owner = 0
            self._wake()

    def acquire(self, bint blocking=True, double timeout=-1):
        """Take it, waiting up to `timeout` seconds (below 0: no limit). Returns whether it was
        taken."""
        if not blocking:
            return self.take(0)
        return self.take(-1 if timeout < 0 else <int64_t>(min(timeout, LONGEST_WAIT) * 1e9))

    def release(self):
        """Release it; RuntimeError in a thread that does not hold it."""
        if not self.is_mine():
            raise RuntimeError("cannot release a lock that this thread does not hold")
        self.leave()

    def held_here(self):
        """Does this thread hold it?"""
        return self.is_mine()

    def __enter__(self):
        self.take(-1)

    def __exit__(self, *error):
        self.release()


@cython.final
cdef class Locks:
    """Locks that are taken one after another within a `with` block, and released at its end. It is all
    in C: an exception that another thread or a signal handler raises leaves no lock taken."""

    cdef list taken

    def __cinit__(self):
        self.taken = []

    def take(self, Lock lock not None):
        """Take this lock, too. False if other threads keep it for a while: they may wait for one that
        is taken here."""
        cdef bint taken = False
        self.taken.append(lock)     # first, because it may fail
        try:
            taken = lock.take(PATIENCE_NS)
        finally:
            if not taken:
                self.taken.pop()
        return taken

    def __enter__(self):
        return self

    def __exit__(self, *error):
        while self.taken:
            (<Lock>self.taken.pop()).leave()


@cython.final
cdef class Condition:
    """A `threading.Condition` that is entered and left without a step of Python, between which a
    signal handler could raise."""

    cdef object lock
    cdef object condition

    def __cinit__(self):
        self.lock = _threading.RLock()
        self.condition = _threading.Condition(self.lock)

    def __enter__(self):
        return self.lock.__enter__()

    def __exit__(self, *error):
        self.lock.release()

    def acquire(self, *args, **options):
        """As its lock's."""
        return self.lock.acquire(*args, **options)

    def release(self):
        """As its lock's."""
        self.lock.release()

    def wait(self, timeout=None):
        """Release the lock, and wait for `notify_all`."""
        return self.condition.wait(timeout)

    def notify_all(self):
        """Wake all threads that wait."""
        self.condition.notify_all()


@cython.final
cdef class Signal:
    """A flag that threads wait for, as `threading.Event`. Its waits end by the kernel's clock, and a
    signal handler may set it that has interrupted another use of it."""

    cdef uint32_t word

    def set(self):
        """Set it, and wake the threads that wait."""
        xl_store(&self.word, 1)
        xl_wake(&self.word, INT_MAX)

    def clear(self):
        """Reset it."""
        xl_store(&self.word, 0)

    def wait(self, double seconds):
        """Wait until it is set, at most so many seconds; returns whether it is."""
        cdef int64_t end = xl_now() + <int64_t>(min(max(seconds, 0.0), LONGEST_WAIT) * 1e9)
        cdef int64_t left
        cdef uint32_t* word = &self.word
        while xl_load(word) == 0:
            left = end - xl_now()
            if left <= 0:
                break
            with nogil:
                xl_wait(word, 0, left)
            PyErr_CheckSignals()
        return xl_load(word) != 0
