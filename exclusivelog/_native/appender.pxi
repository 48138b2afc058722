# `Appender`: a producer's sends, directly into the journal or queued as batches.

_UNDECIDED = object()
UNDECIDED = _UNDECIDED  # a sequence id is used by a message that has no outcome yet


cdef object _anew(object error):
    """A stored error that every call raises, without the tracebacks of earlier calls."""
    error.__traceback__ = None
    return error


@cython.final
cdef class Appender:
    """Sends the messages of one producer in order, and has those that are not committed yet.

    Every method runs under the GIL from start to end, which makes it atomic among threads.
    """

    # A process may have a hundred thousand: the small fields come last, so that none is padded.
    cdef readonly bytes name
    cdef readonly int64_t last_sequence
    cdef readonly int64_t durable_sequence  # the last one that is known to be in the log
    cdef readonly size_t pending_bytes
    cdef readonly Py_ssize_t pending_messages
    cdef Py_ssize_t max_messages
    cdef size_t max_bytes
    cdef Batch current      # the newest one
    # Earlier ones, in order; None: there are none. A commit takes the oldest ones.
    cdef list older
    # The error of the newest batch that has failed since `take_failure`, in a list, which a receipt
    # empties when it raises that error. Not the batch itself: the garbage collector does not follow a
    # batch's references, and the error's traceback may lead back to this object.
    cdef list untold
    cdef readonly object error
    cdef readonly object session
    cdef CommitQueue commit_queue
    cdef Finalizer finalizer        # keeps the session while messages wait
    cdef int64_t linger
    cdef Journal journal
    cdef SharedWords words
    cdef Py_ssize_t topic_word
    cdef uint64_t topic
    cdef uint64_t epoch
    cdef uint64_t session_id
    cdef uint64_t version   # of the topic when the session was last checked
    cdef readonly uint64_t sent             # messages that were appended, by this object
    cdef uint64_t sent_before       # ... before that error
    cdef uint32_t process
    cdef int sending        # threads that are appending without the queue
    cdef int queueing       # threads that wait for those; no other thread may overtake them
    cdef uint8_t paused     # `error` is temporary
    cdef uint8_t listed     # on the commit queue
    cdef uint8_t timed      # ... with a time limit
    cdef uint8_t offered    # taken by a commit that has not called `take` yet
    cdef uint8_t alone
    cdef uint8_t durable

    def __cinit__(self, bytes name not None, int64_t last_sequence, Py_ssize_t max_messages,
                  size_t max_bytes, object session=None, CommitQueue commit_queue=None, double linger=0.0,
                  Finalizer finalizer=None):
        self.name = name
        self.session = session
        self.process = xi_here()
        self.commit_queue = commit_queue
        self.finalizer = finalizer
        self.linger = <int64_t>(min(linger, LONGEST_WAIT) * 1e9)
        self.last_sequence = self.durable_sequence = last_sequence
        self.max_messages = max_messages
        self.max_bytes = max_bytes

    def connect(self, Journal journal not None, SharedWords words not None,
                Py_ssize_t topic_word, uint64_t topic, uint64_t epoch, uint64_t session,
                bint alone, bint durable):
        """Append to this journal, and announce it by the word at `topic_word`. `alone`: no
        other session writes to the topic; `durable`: sent is flushed."""
        self.journal, self.words, self.topic_word = journal, words, topic_word
        self.topic, self.epoch, self.session_id = topic, epoch, session
        self.alone, self.durable = alone, durable
        self.version = UINT64_MAX
        words.wide(topic_word + COUNTER_END)    # it must fit
        if topic_word // COUNTER >= journal.counters:
            raise IndexError(f"topic_word={topic_word}: the journal has no such counter")

    def looked_up(self, uint64_t version, int64_t sequence):
        """Record that the session was valid at this version of the topic, with this last sequence
        id."""
        self.version = version
        self.durable_sequence = max(self.durable_sequence, sequence)

    cdef bint _has_waiting(self) noexcept:
        """Does anyone come before a message that is sent now? An empty batch keeps the place of a
        message that is still to be queued (`NOT_NOW`)."""
        return self.queueing or self.current is not None or self._has_older()

    cdef bint _has_messages(self) noexcept:
        return self._has_older() or (self.current is not None and self.current.count > 0)

    cdef void _drop_empty(self) noexcept:
        """Keep no place for a message that was refused."""
        if self.current is not None and self.current.count == 0:
            self.current = None

    cdef inline bint _has_older(self) noexcept:
        return self.older is not None and PyList_GET_SIZE(self.older) > 0

    cdef bint _has_taken(self):
        """Has a commit taken a batch that has no outcome yet?"""
        if self._has_older():
            return (<Batch>self.older[0]).taken
        return self.current is not None and self.current.taken

    def send(self, bytes value, bytes key=None, bytes properties=None, object event_time=None,
             object sequence=None):
        """Append one message now; returns its offset, or a negative `Outcome`."""
        cdef Piece piece
        cdef SealedEntry sealed = _seal_one(value, key, properties, event_time, self.name)
        sealed.describe(&piece)
        return self._send(&piece, 1, 1, -1 if sequence is None else sequence)

    def send_batch(self, Batch batch not None, object sequence=None):
        """Append a small batch now; returns its first offset, or a negative `Outcome`."""
        return self._send_pieces(batch, -1 if sequence is None else sequence)

    cdef _send_pieces(self, Batch batch, int64_t sequence):
        cdef Piece* pieces = _pieces(batch)
        try:
            return self._send(pieces, _count_pieces(batch), batch.count, sequence)
        finally:
            free(pieces)

    cdef _send(self, Piece* pieces, Py_ssize_t n, Py_ssize_t count, int64_t sequence):
        cdef Placing placing
        cdef int outcome = self._place_now(&placing, pieces, n, count, sequence, self.durable)
        if outcome != PLACED:
            return -outcome
        self._announce()
        return placing.base_offset

    cdef int _place_now(self, Placing* placing, Piece* pieces, Py_ssize_t n, Py_ssize_t count,
                        int64_t sequence, bint flushed, bint impatient=False) except -1:
        cdef int outcome
        if self.error is not None:
            raise _anew(self.error)
        if self.process != xi_here():
            raise _inherited()
        if sequence >= 0 and count - 1 > INT64_MAX - sequence:
            raise ValueError("sequence_id: the batch would run past 2**63 - 1")
        if self.journal is None or self._has_waiting():
            return QUEUED
        # From here on `sending` keeps other threads from queueing.
        self.sending += 1
        try:
            self._describe(placing, pieces, n, sequence)
            placing.flushed, placing.impatient = flushed, impatient
            outcome = _append(self.journal, placing)
        finally:
            self.sending -= 1
        if outcome == PLACED:
            self.durable_sequence = max(self.durable_sequence, placing.sequence + count - 1)
            self.sent += count
        elif outcome == LOST or outcome == BROKEN:
            self._take_back()
        elif outcome == DUPLICATE:
            if self.sending and sequence > self.durable_sequence:
                return QUEUED   # `add` waits for the thread that is sending it
            # A send whose outcome was unknown is in the log.
            self.last_sequence = max(self.last_sequence, self.durable_sequence)
        return outcome

    cdef void _take_back(self) noexcept:
        """A flush has failed, so that the next append reads the last sequence id in the log again:
        count on from that one."""
        if not self.sending and not self._has_messages():
            self.last_sequence = self.durable_sequence

    def append(self, bytes value, bytes key=None, bytes properties=None):
        """Append one message now, without waiting for its flush. Returns (offset, position,
        generation), the last two for `Journal.flush_to`, or a negative `Outcome`. The caller calls
        `announce` after the flush."""
        cdef Piece piece
        cdef SealedEntry sealed = _seal_one(value, key, properties, None, self.name)
        sealed.describe(&piece)
        return self._append(&piece, 1, 1)

    def append_batch(self, Batch batch not None):
        """The same for a batch, which must be small; the offset is its first message's."""
        cdef Piece* pieces = _pieces(batch)
        try:
            return self._append(pieces, _count_pieces(batch), batch.count)
        finally:
            free(pieces)

    cdef _append(self, Piece* pieces, Py_ssize_t n, Py_ssize_t count):
        cdef Placing placing
        cdef int outcome = self._place_now(&placing, pieces, n, count, -1, False)
        if outcome != PLACED:
            return -outcome
        return placing.base_offset, placing.end, placing.generation

    cdef inline void _describe(self, Placing* placing, Piece* pieces, Py_ssize_t n,
                               int64_t sequence) noexcept:
        memset(placing, 0, sizeof(Placing))
        placing.topic, placing.epoch, placing.session = self.topic, self.epoch, self.session_id
        placing.version, placing.alone = self.version, self.alone
        placing.durable = placing.flushed = self.durable
        placing.pieces, placing.count = pieces, n
        placing.sequence, placing.last = sequence, &self.last_sequence
        placing.logged = self.durable_sequence
        if self.journal is not None:
            placing.ended = <uint64_t*>(
                <char*>self.words.view.buf + self.topic_word + COUNTER_END)
            placing.known = &self.journal.ends[self.topic_word // COUNTER]
            placing.changed = self.journal._word(self.topic)

    cdef _announce(self):
        _announce_at(self.words.word(self.topic_word))

    def place(self, Batch batch not None):
        """Append a small batch of the queue, which the caller flushes; its
        `Outcome`."""
        cdef Placing placing
        cdef int outcome
        cdef int64_t last = self.durable_sequence
        cdef Piece* pieces = _pieces(batch)
        if self.journal is None:
            raise TypeError("this appender has no journal")
        try:
            self._describe(&placing, pieces, _count_pieces(batch), batch.base_sequence)
            placing.last, placing.flushed = &last, False
            outcome = _append(self.journal, &placing)
        finally:
            free(pieces)
        if outcome == PLACED:
            self.durable_sequence = batch.last_sequence
            batch.base_offset = placing.base_offset
            batch.end, batch.generation_placed = placing.end, placing.generation
            batch.placed = True
        return outcome

    @property
    def stale(self):
        """Whether ownership may have changed since its session was last checked."""
        return self.journal is not None and self.version != self._topic_version()

    cdef inline uint64_t _topic_version(self) noexcept:
        return self.journal._version_of(self.journal._word(self.topic))

    @property
    def waits(self):
        """Whether messages are queued, that come before what is sent now."""
        return self._has_messages()

    @property
    def flushes(self):
        """Whether its messages are flushed before they are acknowledged (rule H1). Without a
        journal, the code that takes its batches is responsible for that."""
        return self.durable or self.journal is None

    def announce(self):
        """Wake the readers of the topic; without a journal, the code that takes its
        batches does."""
        if self.words is not None:
            self._announce()

    def add(self, bytes value, bytes key=None, bytes properties=None, object event_time=None,
            object sequence=None, bint later=False, bint patient=True):
        """Queue one message. None if its sequence id is used up (rule G2); UNDECIDED if a message
        that is queued has the id, or a later one, and may fail yet.

        With `later` it is put on the commit queue, to be committed within `linger`. Unless
        `patient`, it returns NOT_NOW, and queues nothing, while another thread appends without the
        queue.
        """
        cdef int64_t number
        cdef size_t size = 0
        if value is not None:
            size = PyBytes_GET_SIZE(value)
        if key is not None:
            size += PyBytes_GET_SIZE(key)
        if properties is not None:
            size += PyBytes_GET_SIZE(properties)
        cdef Batch batch
        cdef Receipt receipt = Receipt.__new__(Receipt)
        if self.commit_queue is not None:
            self.commit_queue.enlist(self)  # first, because it allocates memory and may fail
        while True:
            batch = self._open_batch(
                size, key is not None, properties is not None, event_time is not None)
            if self.error is not None:
                self._drop_empty()
                raise _anew(self.error)
            if self.process != xi_here():
                raise _inherited()
            if self.sending and not patient:
                return _NOT_NOW
            if self.sending:
                self._let_them_send()
                continue
            number = self.last_sequence + 1 if sequence is None else sequence
            if number <= self.last_sequence:
                self._drop_empty()
                return self._used(sequence)
            if not batch._skips(number):
                break
            batch._make_sequences()
        # No other thread runs from here on.
        batch._add(value, key, properties, event_time, number)
        batch.nbytes += size
        self.last_sequence = number
        self.pending_bytes += size
        self.pending_messages += 1
        receipt.batch, receipt.index = batch, batch.count - 1
        if self._is_full(batch):
            try:
                self._seal()
            except MemoryError:
                pass  # the next message seals it
        if self.commit_queue is not None:
            self._put_on_the_commit_queue(later)
        return receipt

    cdef object _used(self, object sequence):
        """What to return for a sequence id that is not above the last one."""
        if sequence is None or sequence <= self.durable_sequence or self.commit_queue is None:
            return None
        return _UNDECIDED if self._has_messages() else None

    cdef bint _is_full(self, Batch batch) noexcept:
        return batch.count >= self.max_messages or batch.nbytes >= self.max_bytes

    cdef _let_them_send(self):
        self.queueing += 1
        try:
            # They are in the critical section, or about to enter it, and do not need the GIL.
            with nogil:
                usleep(20)
            PyErr_CheckSignals()
        finally:
            self.queueing -= 1

    cdef _put_on_the_commit_queue(self, bint later):
        if not later:
            self.commit_queue.enlist(self)  # a commit may have removed it meanwhile
        elif self._has_full():  # then it need not wait for `linger`
            self.commit_queue.put_down(self, 0)
        elif not self.timed:
            self.commit_queue.put_down(self, self.linger)

    cdef bint _has_full(self):
        """Does a full batch wait for a commit?"""
        return self._has_older() and not (
            <Batch>self.older[PyList_GET_SIZE(self.older) - 1]).taken

    cdef Batch _open_batch(self, size_t size, bint key, bint properties, bint event_time):
        cdef Batch batch, fresh
        while True:
            batch = self.current
            if batch is not None and (batch.shut or (batch.count and (
                    batch.nbytes + size > self.max_bytes or self._is_full(batch)))):
                self._seal()
            if self.current is None:
                fresh = Batch.__new__(Batch)
                if self.current is None:
                    self.current = fresh
            batch = self.current
            batch._make_columns(key, properties, event_time)
            if batch is self.current and not batch.shut:
                return batch

    def make_batch(self, Strings values not None, Strings keys, Strings properties,
                   list event_times):
        """Make a batch of messages that enter the log together."""
        cdef Py_ssize_t start = 0
        cdef Py_ssize_t stop
        cdef SealedEntry sealed
        cdef Columns columns = Columns.__new__(Columns)
        cdef Batch batch = Batch.__new__(Batch)
        columns.values, columns.keys, columns.properties = values, keys, properties
        columns.event_times, columns.name = event_times, self.name
        columns.max_bytes, columns.max_messages = self.max_bytes, self.max_messages
        batch.sealed = []
        batch.state, batch.shut = SEALED, True
        batch.count = values.count
        while start < values.count and batch.nbytes < SEALED_AHEAD:
            stop = columns.cut(start)
            sealed = columns.seal(start, stop)
            batch.sealed.append(sealed)
            batch.nbytes += len(sealed)
            start = stop
        batch.unsealed_from = start
        if start < values.count:
            batch.columns = columns
            batch.nbytes += values.size(start, values.count)
        return batch

    def add_batch(self, Batch batch not None, object sequence=None):
        """Queue a batch from `make_batch`. None and UNDECIDED as in `add`."""
        self.queueing += 1
        try:
            while self.sending:
                self._let_them_send()
            return self._add_batch(batch, sequence)
        finally:
            self.queueing -= 1

    cdef _add_batch(self, Batch batch, object sequence):
        cdef int64_t number
        self._make_older()
        # Number it only now, when the batch is ready: the checksum of a large entry is computed
        # without the GIL.
        if self.error is not None:
            raise _anew(self.error)
        number = self.last_sequence + 1 if sequence is None else sequence
        if number <= self.last_sequence:
            return self._used(sequence)
        if batch.count - 1 > INT64_MAX - number:
            raise ValueError("sequence_id: the batch would run past 2**63 - 1")
        batch.base_sequence = number
        batch.last_sequence = number + batch.count - 1
        receipt = _receipt(batch, 0)
        if self.commit_queue is not None:
            self.commit_queue.enlist(self)
        if self.current is not None:
            self._seal()
        self.older.append(batch)  # the last allocation: either this fails, or the batch is queued
        self.last_sequence = batch.last_sequence
        self.pending_bytes += batch.nbytes
        self.pending_messages += batch.count
        return receipt

    def holds(self, size_t most):
        """Whether that many bytes are pending. Allocates nothing, so that it cannot fail after the
        message was queued."""
        return self.pending_bytes >= most

    def newest(self):
        """A receipt for the last message that waits; None if none does."""
        cdef Batch batch = self.current
        if batch is None or batch.count == 0:
            if not self._has_older():
                return None
            batch = self.older[PyList_GET_SIZE(self.older) - 1]
        return _receipt(batch, batch.count - 1)

    def take_failure(self):
        """The error of the last message, if it has failed since the last call, and its receipt has
        not told of it."""
        cdef list untold = self.untold
        self.untold = None
        return untold[0] if untold and self.sent == self.sent_before else None

    cdef _make_older(self):
        cdef list fresh
        if self.older is None:
            fresh = []  # other threads may run
            if self.older is None:
                self.older = fresh

    cdef _seal(self):
        cdef Batch batch
        self._make_older()
        batch = self.current
        if batch is not None and batch.count:  # the only message of it may have been refused
            batch.shut = True
            self.older.append(batch)
        self.current = None

    cdef _shut_current(self):
        """Close the newest batch for more messages."""
        self._drop_empty()
        if self.current is not None:
            self.current.shut = True

    cdef list _shut_all(self):
        """Close and encode all batches; returns them in order. Batches that other threads add
        meanwhile are not in the list."""
        cdef list batches = []  # made first, so that no other thread runs between the next lines
        self._shut_current()
        if self.older is not None:
            batches.extend(self.older)
        if self.current is not None:
            batches.append(self.current)
        return batches

    def take(self):
        """All batches that wait, encoded, in order. They count as pending until `settle`.

        A second call before `settle` returns the same ones and later ones, because batches that an
        interrupted commit has placed in the journal are still to be flushed.
        """
        cdef Batch batch
        cdef list taken = self._shut_all()
        for batch in taken:
            batch.taken = True
        for batch in taken:
            if batch.state == OPEN:
                batch._seal_messages(self.name)
        self.offered = False
        return taken

    def settle(self, list placed not None, object error=None, bint final=False, durable=None):
        """Settle batches: `placed`, (batch, base offset) pairs, are in the log and durable. With an
        `error`, all others that were taken fail.

        - `final`: later messages fail, too.
        - `durable`: the last sequence id in the ledger, if it may differ.

        Later messages must not overtake failed ones: those that were queued behind them fail, too,
        and sequence ids continue from the last message in the log. This is done before any waiter
        is notified.
        """
        cdef Batch batch
        cdef list settled = []
        cdef list rest = []
        if error is not None and final:
            known = self.close_with(error)
            if not isinstance(known, _engine_closed):   # what came before a close has its own reason
                error = known
        for batch, base_offset in placed:
            if batch.state < DONE:
                batch.base_offset = base_offset
                batch.ends = True
        self._settle(settled, rest, error, durable)

    cdef _settle(self, list settled, list rest, object error, object durable):
        """Settle the batches marked by `ends`, or with an error all of them. The caller has made
        the empty lists `settled` and `rest`, because allocations may let other threads run."""
        cdef Batch batch
        cdef Batch newest
        cdef list untold = None
        former = self.untold    # is dropped at the end: what that frees may let other threads run
        if error is not None:
            untold = [error]
            self._shut_current()
        newest = self.current
        if self.older is not None:
            for batch in self.older:
                (settled if batch.ends or error is not None else rest).append(batch)
        if newest is not None and (newest.ends or error is not None):
            settled.append(newest)
            newest = None
        # All memory is allocated by now, so that nothing can fail half-way.
        self.older = rest if PyList_GET_SIZE(rest) else None
        self.current = newest
        for batch in settled:
            self._give_outcome(batch, error)
            if batch.state == FAILED:
                batch.untold = self.untold = untold
                self.sent_before = self.sent
        if durable is not None:
            self.durable_sequence = max(self.durable_sequence, durable)
        if error is not None:
            self.last_sequence = self.durable_sequence
        for batch in settled:
            batch._finish()

    cdef _settle_placed(self):
        """Settle all batches that a commit has placed, which are durable now."""
        cdef Batch batch = self.current
        cdef list settled, rest
        if not self._has_older() and batch is not None and batch.ends:
            self.current = None
            self._give_outcome(batch, None)
            batch._finish()
            return
        settled, rest = [], []
        self._settle(settled, rest, None, None)

    cdef void _give_outcome(self, Batch batch, object error) noexcept:
        self.pending_bytes -= batch.nbytes
        self.pending_messages -= batch.count
        if batch.ends:
            batch.state = DONE
            self.durable_sequence = batch.last_sequence
            self.sent += batch.count
        else:
            batch.error = error
            batch.state = FAILED

    def await_sends(self):
        """Wait for threads that are appending without the queue."""
        while self.sending:
            self._let_them_send()

    def advance(self, int64_t sequence):
        """Note that the log has this sequence id, from another appender."""
        self.durable_sequence = max(self.durable_sequence, sequence)
        self.last_sequence = max(self.last_sequence, sequence)

    def close_with(self, error not None):
        """Take no more messages. Returns the error that later calls raise, that of the first
        `close_with`."""
        if self.error is None or self.paused:
            self.error = error
            self.paused = False
        return self.error

    def pause(self, error not None):
        """Refuse messages until `resume`; what is queued is still sent."""
        if self.error is None:
            self.error = error
            self.paused = True

    def resume(self):
        """Take messages again, unless it was closed meanwhile."""
        if self.paused:
            self.error = None
            self.paused = False
