# File locks that no forked child inherits (_native/private_lock.h).

cdef extern from "_native/private_lock.h" nogil:
    ctypedef struct xp_lock:
        pass
    xp_lock* xp_take(int, int64_t)
    void xp_release(xp_lock*)


cdef class PrivateLock:
    """A shared lock of the byte at `at` of an open file, until `release` or the end of this process.
    Neither a forked child nor a close of the file changes it. `fd` may be closed meanwhile.

    OSError if the system has no such locks (Linux before 5.9, a list of permitted calls).
    """

    cdef xp_lock* lock

    def __cinit__(self, int fd, int64_t at):
        with nogil:
            self.lock = xp_take(fd, at)
        if self.lock == NULL:
            raise OSError(errno, _os.strerror(errno))

    def __dealloc__(self):
        self._release()

    def release(self):
        """Release the lock; in a forked child without an effect. A second call has no effect."""
        self._release()

    cdef void _release(self) noexcept:
        cdef xp_lock* lock = self.lock
        self.lock = NULL
        if lock != NULL:
            with nogil:
                xp_release(lock)
