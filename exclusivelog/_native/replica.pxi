# The most frequent calls of a shared state: get and set a map's key.
#
# Each is one compiled step if this process owns the topic and the journal has room. Otherwise it
# returns NOT_NOW, and state/shared.py waits, or raises. The threads of a process share the GIL, so
# that their throughput depends on the time of one write (rule I5).
#
# The classes here are the compiled bases of those in state/, with the fields that these calls read.

_ANY = object()
ANY = _ANY              # a key may have any value, or none
_NOT_NOW = object()
NOT_NOW = _NOT_NOW      # the call has to wait, or it has to raise
cdef Py_ssize_t SET_AT_ONCE = 64 << 10      # bytes; state/shared.py appends larger messages
# A thread that holds a lock for longer is waiting for something else.
cdef int64_t SHORT_WAIT_NS = 50_000_000
cdef dict _of_threading = _threading.__dict__


cdef class OwnershipBase:
    """Of `Ownership` in state/shared.py: which producer owns the topic."""

    cdef public object producer     # None: this process is not the owner
    cdef public object asked        # the producer that must be released before the next write
    # The topic's ownership version at which this process last found itself the owner.
    cdef public int64_t checked

    cdef bint surely_held(self) except -1:
        """Whether this process is certainly still the owner, without reading the producer's state."""
        cdef Appender appender = self.producer.sender.appender
        return (appender.journal is not None
                and <int64_t>appender._topic_version() == self.checked)


cdef class ReplicaBase:
    """Of `Replica` in state/shared.py: the position of the copy in memory."""

    cdef public int64_t position    # all messages before it are applied
    cdef public bint torn           # was an apply interrupted?
    cdef public object failure      # StateError of a message that cannot be applied
    cdef public SharedWords words   # shared memory, in which the topic's counter of commits
    cdef public Py_ssize_t word     # has this index
    cdef public int64_t seen        # the counter when all messages were applied last

    cpdef int64_t mark(self) except -2:
        """The topic's counter of commits."""
        return xl_load(self.words.word(self.word))


cdef class SnapshotsBase:
    """Of `Snapshots` in state/shared.py: when a snapshot is due."""

    cdef public int64_t due_at      # an offset
    cdef public object refused      # the error of a snapshot in the background


cdef class MapBase:
    """Of state/entries.py: the map as bytes, and when its keys expire."""

    cdef public dict entries
    cdef public dict deadlines      # of the keys that expire: ms since 1970, by the log's time
    cdef public int64_t due_at      # no key expires before; INT64_MAX if none does
    cdef int64_t _base, _base_at    # a time that was seen, in ms, and when (ns, monotonic clock)

    cpdef int64_t now(self) except -2:
        """The log's time, in ms since 1970: that of the wall clock. Where a time that was seen is
        ahead of that, it goes on from there, as the monotonic clock does."""
        # Behind, if the thread is paused in between: the wall clock then corrects it. Never ahead.
        cdef int64_t wall = xj_wall_ms(), at = xl_now()
        cdef int64_t time = self._base + (at - self._base_at) // 1_000_000
        if wall < time:
            return time
        self._base, self._base_at = wall, at
        return wall

    def see(self, int64_t time):
        """Note a time of the log."""
        if time > self.now():
            self._base, self._base_at = time, xl_now()

    cdef bint _may_be_due(self) except -1:
        return self.due_at != INT64_MAX and self.due_at <= self.now()


cdef class SharedBase:
    """Of state/shared.py: the parts of one shared state."""

    cdef public object _engine
    cdef public Lock _writing
    cdef public Lock _lock
    cdef public unsigned long _inside
    cdef public bint _closing
    cdef public bint _closed
    cdef public object _unflushed
    cdef public object _content
    cdef public OwnershipBase _ownership
    cdef public SnapshotsBase _snapshots
    cdef public ReplicaBase _replica    # set last: before, nothing may be called

    cdef bint _works(self) except -1:
        engine = self._engine
        return not (self._closed or engine.closed or self._replica.failure is not None
                    or self._snapshots.refused is not None
                    or _of_threading["Lock"] is not engine._locks)

    cdef bint _is_usable(self) except -1:
        cdef unsigned long me = PyThread_get_thread_ident()
        return (self._replica is not None and self._inside != me and self._writing.owner != me
                and self._lock.owner != me and self._works())

    def _usable(self):
        """Whether this thread may call the state. If not, `_check_usable` raises the reason."""
        return self._is_usable()

    # ---- get -----------------------------------------------------------------------------

    def _get_at_once(self, bytes name not None, bint latest):
        """A key's value as bytes, None if it has none; `NOT_NOW` if messages must be read first, or
        a flush awaited. No other thread runs meanwhile, so that a free lock need not be taken."""
        cdef MapBase content = self._content
        if not self._is_usable() or self._lock.owner or self._replica.torn:
            return _NOT_NOW
        if self._unflushed is not None and not self._unflushed.flushed:
            return _NOT_NOW
        if self._ownership.producer is None:
            if latest or self._replica.mark() != self._replica.seen:
                return _NOT_NOW
        elif latest and not self._ownership.surely_held():
            return _NOT_NOW
        return content.entries.get(name)

    # ---- set -----------------------------------------------------------------------------

    def _set_at_once(self, bytes name not None, bytes data, expected, bint patient):
        """Set a key's value, or remove it: (was it done, value before, append to be flushed before
        it is acknowledged). `NOT_NOW`, without an effect, if that cannot be done at once.

        - `name`, `data`: as bytes; None as `data` removes the key.
        - `expected`: the value that the key must have, as bytes, or None for none; `ANY`.
        - `patient`: it may wait for a moment, for a lock or another process that appends.
        """
        cdef int64_t most = SHORT_WAIT_NS if patient else 0
        if not self._is_usable() or not self._writing.take(most):
            return _NOT_NOW
        try:
            if not self._lock.take(most):
                return _NOT_NOW
            try:
                return self._set_inside(name, data, expected, patient)
            finally:
                self._lock.leave()
        finally:
            self._writing.leave()

    cdef _set_inside(self, bytes name, bytes data, expected, bint patient):
        cdef MapBase content = self._content
        cdef OwnershipBase ownership = self._ownership
        # Check everything again: another thread may have changed it during the wait.
        if (ownership.producer is None or ownership.asked is not None or self._closing
                or self._replica.torn or not self._works() or not ownership.surely_held()
                or content._may_be_due()):
            return _NOT_NOW
        before = content.entries.get(name)
        if (expected is not _ANY and before != expected) or (before is None and data is None):
            made = expected is _ANY or before == expected
            return made, before, self._unflushed  # the result depends on the last append
        if PyBytes_GET_SIZE(name) + (0 if data is None else PyBytes_GET_SIZE(data)) >= SET_AT_ONCE:
            return _NOT_NOW
        if not self._append_item(name, data, patient):
            return _NOT_NOW
        return True, before, self._unflushed

    cdef bint _append_item(self, bytes name, bytes data, bint patient) except -1:
        """Append and apply; False if nothing was appended."""
        cdef Piece piece
        cdef Placing placing
        sender = self._ownership.producer.sender
        cdef Appender appender = sender.appender
        cdef SealedEntry sealed = _seal_one(data, name, None, None, appender.name)
        if appender.error is not None or appender.process != xi_here():
            return False
        sealed.describe(&piece)
        try:
            if appender._place_now(&placing, &piece, 1, 1, -1, False, not patient) != PLACED:
                return False
            self._apply_placed(sender, appender, &placing, name, data)
        except BaseException:
            self._ownership.release()  # the next owner reads the outcome from the log
            raise
        return True

    cdef _apply_placed(self, sender, Appender appender, Placing* placing, bytes name,
                       bytes data):
        cdef MapBase content = self._content
        cdef dict entries = content.entries
        cdef int64_t behind = placing.base_offset + 1
        if appender.durable:
            self._unflushed = self._appended(
                sender, placing.base_offset, placing.end, placing.generation)
        else:
            appender._announce()
        if self._replica.position != <int64_t>placing.base_offset:
            self._catch_up()
            return
        if content.deadlines:
            content.deadlines.pop(name, None)
        if data is None:
            entries.pop(name, None)
        else:
            entries[name] = data
        self._replica.position = behind
        if behind >= self._snapshots.due_at:
            self._snapshots.take_if_due(behind)
