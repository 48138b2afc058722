# Batches: messages of one producer that are being sent. A batch is written as a whole or not at all,
# and has one outcome, which its receipts share: a million messages are acknowledged by one store.

cdef enum:
    OPEN = 0        # takes messages
    SEALED = 1      # encoded, waiting for its commit
    DONE = 2        # in the log from base_offset on
    FAILED = 3      # not in the log (or unknown, if error.maybe_written)


# The part of a batch beyond this size is encoded only when it is written: then all entries use the
# same memory, as fresh memory would cost more than the encoding.
cdef size_t SEALED_AHEAD = 4 << 20

# A batch with more bytes than this goes directly into the tables.
cdef size_t LARGEST_FRAMES = 128 << 10


@cython.final
cdef class Columns:
    """The messages of a large batch, and their division into entries."""

    cdef Strings values
    cdef Strings keys
    cdef Strings properties
    cdef list event_times
    cdef bytes name
    cdef size_t max_bytes
    cdef Py_ssize_t max_messages

    def __init__(self):
        raise TypeError("Columns are made by an Appender")

    cdef Py_ssize_t cut(self, Py_ssize_t start):
        cdef Py_ssize_t stop = min(self.values.cut(start, self.max_bytes),
                                   start + self.max_messages)
        if self.keys is not None:
            stop = min(stop, self.keys.cut(start, self.max_bytes))
        if self.properties is not None:
            stop = min(stop, self.properties.cut(start, self.max_bytes))
        return stop

    cdef SealedEntry seal(self, Py_ssize_t start, Py_ssize_t stop):
        return _seal(self.values, start, stop, self.keys, self.properties, self.event_times,
                     None, self.name)


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Batch:
    """Messages of one producer that enter the log together."""

    # The first message, and lists of all of them from the second one on: most batches of a process
    # with many producers have one message, and lists would have the garbage collector run.
    cdef bytes value
    cdef bytes key
    cdef bytes properties_of_first
    cdef object event_time
    cdef list values
    cdef list keys
    cdef list properties
    cdef list event_times
    cdef list sequences
    cdef SealedEntry only   # encoded as one entry
    cdef list sealed        # ... or as several
    cdef Columns columns
    cdef Py_ssize_t unsealed_from
    cdef readonly int64_t base_sequence
    cdef readonly int64_t last_sequence
    cdef readonly Py_ssize_t count
    cdef readonly size_t nbytes
    cdef readonly int64_t base_offset
    cdef readonly bint placed           # in the journal, flushed or not
    cdef readonly uint64_t end          # ... and to be flushed up to here
    cdef readonly uint64_t generation_placed
    cdef readonly object error
    cdef uint32_t state     # a futex: threads that wait for the outcome sleep on it
    cdef int sleepers
    cdef uint32_t process
    cdef list callbacks
    cdef Batch next_due     # whose callbacks are called after this one's
    cdef bint ends          # `settle` is about to acknowledge that it is in the log
    cdef bint shut          # takes no more messages
    cdef bint taken         # by a commit
    cdef list untold        # see Appender

    def __cinit__(self):
        self.base_sequence = -1
        self.last_sequence = -1
        self.base_offset = -1
        self.process = xi_here()

    def __init__(self):
        raise TypeError("a Batch is made by an Appender")

    # Creating a list may run the garbage collector, and so other threads, which may change this
    # batch. So lists are made first, and everything is checked afterwards.

    cdef _make_columns(self, bint key, bint properties, bint event_time):
        cdef list fresh
        if self.count == 0:
            return
        if self.values is None:
            fresh = []
            if self.values is None:
                self.values = self._filled(fresh, self.value)
        if (key or self.key is not None) and self.keys is None:
            fresh = []
            if self.keys is None:
                self.keys = self._filled(fresh, self.key)
        if (properties or self.properties_of_first is not None) and self.properties is None:
            fresh = []
            if self.properties is None:
                self.properties = self._filled(fresh, self.properties_of_first)
        if (event_time or self.event_time is not None) and self.event_times is None:
            fresh = []
            if self.event_times is None:
                self.event_times = self._filled(fresh, self.event_time)

    cdef list _filled(self, list column, object first):
        if self.count and PyList_GET_SIZE(column) == 0:
            column.append(first)
        while PyList_GET_SIZE(column) < self.count:
            column.append(None)
        return column

    cdef bint _skips(self, int64_t sequence) noexcept:
        """Is this message's sequence id not the next one of the batch?"""
        return self.count and self.sequences is None and sequence != self.last_sequence + 1

    cdef _make_sequences(self):
        cdef list fresh = []
        if self.sequences is None:
            while PyList_GET_SIZE(fresh) < self.count:
                fresh.append(self.base_sequence + PyList_GET_SIZE(fresh))
            self.sequences = fresh

    cdef _add(self, bytes value, bytes key, bytes properties, object event_time,
              int64_t sequence):
        # No allocation here may trigger the garbage collector.
        if self.count == 0:
            self.value, self.key, self.properties_of_first = value, key, properties
            self.event_time = event_time
            self.base_sequence = sequence
        else:
            self._add_to_columns(value, key, properties, event_time, sequence)
        self.last_sequence = sequence
        self.count += 1

    cdef _add_to_columns(self, bytes value, bytes key, bytes properties, object event_time,
                         int64_t sequence):
        try:
            self.values.append(value)
            if self.keys is not None:
                self.keys.append(key)
            if self.properties is not None:
                self.properties.append(properties)
            if self.event_times is not None:
                self.event_times.append(event_time)
            if self.sequences is not None:
                self.sequences.append(sequence)
        except BaseException:
            self._cut_columns()
            raise

    cdef _cut_columns(self):
        # If memory for one column is missing, remove the message from all, or the next message
        # would get this one's key.
        for column in (self.values, self.keys, self.properties, self.event_times, self.sequences):
            if column is not None and PyList_GET_SIZE(column) > self.count:
                (<list>column).pop()

    cdef _seal_messages(self, bytes name):
        if self.count == 1:
            self.only = _seal_one(
                self.value, self.key, self.properties_of_first, self.event_time, name)
        else:
            self.only = _seal(
                ListStrings(self.values), 0, self.count,
                None if self.keys is None else ListStrings(self.keys),
                None if self.properties is None else ListStrings(self.properties),
                self.event_times, self.sequences, name)
        self.state = SEALED
        self.value = self.key = self.properties_of_first = self.event_time = None
        self.values = self.keys = self.properties = self.event_times = self.sequences = None

    cdef list _sealed_entries(self):
        return self.sealed if self.only is None else [self.only]

    @property
    def small(self):
        """Whether it goes into the journal; a large one goes directly into the tables."""
        cdef size_t size = 0
        if self.only is not None:
            return len(self.only) <= LARGEST_FRAMES
        if self.columns is not None or self.sealed is None:
            return False
        for sealed in self.sealed:
            size += len(sealed)
        return size <= LARGEST_FRAMES

    def stamp(self, uint64_t topic, uint64_t base_offset, uint64_t epoch, uint64_t session,
              int64_t publish_time):
        """The batch as (last offset, entry bytes) pairs, with its offsets."""
        cdef SealedEntry sealed
        cdef int64_t sequence = self.base_sequence
        cdef uint64_t offset = base_offset
        cdef Py_ssize_t start, stop
        self.base_offset = base_offset  # where to search for it if its commit is interrupted
        for sealed in self._sealed_entries():
            data = sealed.stamp(topic, offset, epoch, session, sequence, publish_time)
            offset += sealed.count
            sequence += sealed.count
            yield offset - 1, data
        start = self.unsealed_from
        while self.columns is not None and start < self.columns.values.count:
            stop = self.columns.cut(start)
            sealed = self.columns.seal(start, stop)
            data = sealed.stamp(topic, offset, epoch, session, sequence, publish_time)
            offset += sealed.count
            sequence += sealed.count
            start = stop
            del sealed  # its memory is used for the next entry
            yield offset - 1, data
            del data

    cdef _finish(self):
        """Notify all waiters. Other threads may run from here on."""
        self.only = None
        self.sealed = None
        self.columns = None
        if self.sleepers:
            xl_wake(&self.state, INT_MAX)
        self._have_callbacks_called()

    cdef _have_callbacks_called(self):
        # A linked list of batches needs no memory, and so cannot fail.
        global _due_first, _due_last
        if self.callbacks is None or PyList_GET_SIZE(self.callbacks) == 0:
            return
        if _due_last is None:
            _due_first = self
        else:
            _due_last.next_due = self
        _due_last = self

    def wait(self, timeout):
        """True when the outcome is known; waits for it up to `timeout` seconds (None: no limit)."""
        cdef int64_t end = INT64_MAX
        cdef int64_t left
        cdef uint32_t seen
        cdef uint32_t* word = &self.state
        if timeout is not None:
            end = xl_now() + <int64_t>(min(max(0.0, timeout), LONGEST_WAIT) * 1e9)
        while self.state < DONE:
            if self.process != xi_here():
                raise _inherited()
            left = min(end - xl_now(), SLICE_NS)
            if left <= 0:
                return False
            seen = self.state
            self.sleepers += 1
            with nogil:
                xl_wait(word, seen, left)
            self.sleepers -= 1
            PyErr_CheckSignals()
        return True


cdef Py_ssize_t _count_pieces(Batch batch) noexcept:
    return PyList_GET_SIZE(batch.sealed) if batch.only is None else 1


cdef Piece* _pieces(Batch batch) except NULL:
    cdef Py_ssize_t n = _count_pieces(batch)
    cdef Piece* pieces = <Piece*>malloc(max(1, n) * sizeof(Piece))
    cdef Py_ssize_t i
    if pieces == NULL:
        raise MemoryError
    if batch.only is not None:
        batch.only.describe(pieces)
        return pieces
    for i in range(n):
        (<SealedEntry>batch.sealed[i]).describe(&pieces[i])
    return pieces
