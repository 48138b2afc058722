# The appenders whose batches wait for a commit in the background, and its thread.

@cython.final
cdef class CommitQueue:
    """The appenders that wait for a commit in the background, and the time of the next commit.

    `with commit_queue as appenders` is one commit. Appenders that still have messages without an
    outcome at its end are in the next one, which is due soon.
    """

    cdef list waiting
    cdef list taken         # by an unfinished commit
    cdef int64_t due        # ns of the monotonic clock; INT64_MAX: nothing is
    cdef int64_t retry      # the same, for what a commit has left without an outcome
    cdef bint stopped
    cdef uint32_t changes   # the thread in the background sleeps on it
    cdef int sleepers

    def __cinit__(self):
        self.waiting = []
        self.taken = []
        self.due = self.retry = INT64_MAX

    def enlist(self, Appender appender not None):
        """Add an appender to the next commit, without a time limit."""
        if not appender.listed:
            self.waiting.append(appender)
            appender.listed = True

    def put(self, Appender appender not None, double delay):
        """Add an appender to a commit within `delay` seconds."""
        self.put_down(appender, <int64_t>(delay * 1e9))

    cdef put_down(self, Appender appender, int64_t delay):
        cdef int64_t due = xl_now() + delay
        self.enlist(appender)
        appender.timed = True
        if due < self.due:
            self.due = due
            self._wake()

    cdef _wake(self):
        xl_add(&self.changes, 1)
        if self.sleepers:
            xl_wake(&self.changes, INT_MAX)

    def pending(self):
        """All appenders that wait, or have messages without an outcome; they are not removed."""
        return self.taken + self.waiting

    def __enter__(self):
        """All appenders that wait; no other thread may be in a commit."""
        cdef list rest = []
        cdef list taken = []
        cdef list answer = []
        cdef Appender appender
        for appender in self.taken:
            if not appender.listed:
                taken.append(appender)
        taken.extend(self.waiting)
        answer.extend(taken)
        # All memory is allocated by now.
        self.taken, self.waiting, self.due = taken, rest, INT64_MAX
        self.retry = xl_now() + RETRY_NS if PyList_GET_SIZE(taken) > 0 else INT64_MAX
        for appender in taken:
            appender.listed = appender.timed = False
            appender.offered = True
        return answer

    def __exit__(self, *error):
        cdef list rest = []
        cdef Appender appender
        try:
            for appender in self.taken:
                if appender.offered or appender._has_taken():
                    rest.append(appender)
            self.taken = rest
        except MemoryError:
            pass  # then all of them are checked again
        self.retry = INT64_MAX
        if PyList_GET_SIZE(self.taken) > 0:
            self.retry = xl_now() + RETRY_NS
            self._wake()

    def sleep(self):
        """Sleep until a commit is due; False once the commit queue was stopped."""
        cdef int64_t left
        cdef uint32_t seen
        cdef uint32_t* word = &self.changes
        while not self.stopped:
            left = min(self.due, self.retry) - xl_now()
            if left <= 0:
                return True
            seen = self.changes
            self.sleepers += 1
            with nogil:
                xl_wait(word, seen, left)
            self.sleepers -= 1
        return False

    def stop(self):
        """End all calls of `sleep`, present and later ones."""
        self.stopped = True
        self._wake()


def keep_running(step, failed):
    """Call `step()` until it returns False or None. An error is passed to `failed(error)`, and does
    not end the loop, because other threads depend on it."""
    while True:
        try:
            if not step():
                return
        except BaseException as error:
            try:
                failed(error)
            except BaseException:
                pass  # no memory even to log it
            with nogil:
                usleep(RETRY_NS // 5000)
