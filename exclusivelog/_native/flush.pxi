# The flush of the journal: one fdatasync serves all threads of all processes that wait for it.

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<unistd.h>" nogil:
    int fdatasync(int)


# The flushing thread waits at most this long for the threads that the last flush served.
cdef int64_t BATCH_WAIT_NS = 80_000
cdef int64_t FLUSH_LOOK_UP_NS = 20_000_000  # the thread that flushes may be stopped, or die


cdef int _flush(Journal journal, uint64_t end, uint64_t generation, int* error) noexcept nogil:
    """Return when everything before `end` is durable: one flush for all threads that
    wait, in any process."""
    cdef xj_header* header = journal.shared
    cdef uint32_t seen
    cdef bint late
    xl_add(&header.arrivals, 1)
    while True:
        if xl_load64(&header.generation) != generation:
            return LOST     # the journal was recovered meanwhile, with this append or without it
        if journal._lost() or xl_load(&journal.gone):
            error[0] = _stopped(journal)
            return LOST
        if xl_load64(&header.synced) >= end:
            return PLACED
        if xl_load(&header.failed):
            error[0] = header.failed
            return LOST
        seen = xl_load(&header.flushes)
        if xj_try_flush_lock(header) == 0:
            if xl_load64(&header.synced) < end:
                _lead(journal)
            xj_flush_unlock(header)
            xl_add(&header.flushes, 1)
            if xl_load(&header.sleepers):
                xl_wake(&header.flushes, INT_MAX)
        else:
            xl_add(&header.sleepers, 1)
            late = (xl_load64(&header.synced) < end
                    and xl_wait(&header.flushes, seen, FLUSH_LOOK_UP_NS) == ETIMEDOUT)
            xl_add(&header.sleepers, <uint32_t>-1)
            if late:
                _sync_alone(journal)


cdef int _await_flush(Journal journal, uint64_t end, uint64_t generation,
                      int* error) noexcept nogil:
    """The same for a thread that has just appended: its wait is counted."""
    cdef int64_t began = xl_now()
    cdef int outcome = _flush(journal, end, generation, error)
    if outcome == PLACED:
        xf_note(&journal.figures.wait, xl_now() - began, XF_TIME)
    return outcome


cdef void _lead(Journal journal) noexcept nogil:
    cdef xj_header* header = journal.shared
    cdef int64_t deadline
    cdef uint32_t before = header.batch_start
    # Wait for the threads that the last flush served, or that came too late for it: they are about
    # to append again, and one flush for all of them takes less time than two.
    if xl_load(&header.arrivals) - before < header.batch_size:
        deadline = xl_now() + BATCH_WAIT_NS
        while xl_load(&header.arrivals) - before < header.batch_size and xl_now() < deadline:
            sched_yield()
    header.batch_start = xl_load(&header.arrivals)
    _sync(journal, journal.fd)
    header.batch_size = xl_load(&header.arrivals) - before


cdef void _sync(Journal journal, int fd) noexcept nogil:
    cdef xj_header* header = journal.shared
    cdef uint64_t generation = xl_load64(&header.generation)
    cdef uint64_t target = xl_load64(&header.tail)
    cdef uint64_t messages = xl_load64(&header.messages)
    cdef int64_t began, took
    cdef int failed
    if xl_load(&header.failed):
        return
    if not xj_is(fd, &journal.file):
        xl_store(&journal.gone, EBADF)
        return
    began = xl_now()
    failed = errno if fdatasync(fd) else 0
    took = xl_now() - began
    journal.slowest_flush = max(journal.slowest_flush, took)
    xf_note(&journal.figures.flush, took, XF_TIME)
    xf_note(&journal.figures.batch, xf_since(&journal.figures.flushed_messages, messages), 0)
    if failed:
        xl_swap(&header.failed, 0, failed)
    elif xl_load64(&header.generation) == generation and not xl_load(&header.failed):
        xj_raise(&header.synced, target)


cdef void _sync_alone(Journal journal) noexcept nogil:
    """Flush while another flushing thread may be stopped, through a separate descriptor, because
    the system reports a failed write once for each open file."""
    if xl_swap(&journal.alone, 0, 1):
        _sync(journal, journal.lone_fd)
        xl_store(&journal.alone, 0)
