# Messages on their way into the log. A producer's `Appender` gathers them into batches; a
# batch is written whole or not at all, and has one outcome, which its receipts share: to
# resolve a million messages is to set one field.

def _forget_callbacks():
    global _calling_back, _due_first, _due_last
    _calling_back = _threading.Lock()   # the parent's may be held by a thread of the parent's
    _due_first = _due_last = None


_os.register_at_fork(after_in_child=_forget_callbacks)


cdef enum:
    OPEN = 0        # takes messages
    SEALED = 1      # encoded, waiting for its commit
    DONE = 2        # in the log from base_offset on
    FAILED = 3      # not in the log (or unknown, if error.maybe_written)


cdef double LONGEST_WAIT = 1e9      # seconds
# A signal may come just before the sleep, and must not wait for the end of it.
cdef int64_t SLICE_NS = 500_000_000

# After a commit or a round of a background thread that failed; and how often a task's event
# loop is told again.
cdef int64_t RETRY_NS = 250_000_000
cdef int TELLING_TRIES = 240

# Of a batch larger than this the rest is encoded only as it is written: the memory of one
# entry then serves for the next, where fresh memory would cost more than the encoding.
cdef size_t SEALED_AHEAD = 4 << 20

# A batch with more bytes than this goes straight into the tables.
cdef size_t LARGEST_FRAMES = 128 << 10


@cython.final
cdef class Columns:
    """The messages of a large batch, and how they are cut into entries."""

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
cdef class Batch:
    """Messages of one producer that enter the log together."""

    cdef list values
    cdef list keys
    cdef list properties
    cdef list event_times
    cdef list sequences
    cdef list sealed
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
    cdef uint32_t state     # who waits for the outcome sleeps on it
    cdef int sleepers
    cdef int generation
    cdef list callbacks
    cdef Batch next_due     # whose callbacks are called after this one's
    cdef bint ends          # `settle` is about to say that it is in the log

    def __cinit__(self):
        self.values = []
        self.callbacks = []
        self.base_sequence = -1
        self.last_sequence = -1
        self.base_offset = -1
        self.generation = _generation

    def __init__(self):
        raise TypeError("a Batch is made by an Appender")

    # Creating a list may run the garbage collector, and that other threads, which may do the
    # same to this very batch. So a list is made first, and looked at everything afterwards.

    cdef _make_columns(self, bint key, bint properties, bint event_time):
        cdef list fresh
        if key and self.keys is None:
            fresh = []
            if self.keys is None:
                self.keys = self._filled(fresh)
        if properties and self.properties is None:
            fresh = []
            if self.properties is None:
                self.properties = self._filled(fresh)
        if event_time and self.event_times is None:
            fresh = []
            if self.event_times is None:
                self.event_times = self._filled(fresh)

    cdef list _filled(self, list column):
        while PyList_GET_SIZE(column) < self.count:
            column.append(None)
        return column

    cdef bint _skips(self, int64_t sequence):
        """Would this message's sequence id not follow from those before it?"""
        return self.count and self.sequences is None and sequence != self.last_sequence + 1

    cdef _make_sequences(self):
        cdef list fresh = []
        if self.sequences is None:
            while PyList_GET_SIZE(fresh) < self.count:
                fresh.append(self.base_sequence + PyList_GET_SIZE(fresh))
            self.sequences = fresh

    cdef _add(self, bytes value, bytes key, bytes properties, object event_time,
              int64_t sequence):
        # No allocation here is one that the garbage collector counts.
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
        if self.count == 0:
            self.base_sequence = sequence
        self.last_sequence = sequence
        self.count += 1

    cdef _cut_columns(self):
        # No memory for all columns of a message: none keeps it, or the next one would have
        # this one's key.
        for column in (self.values, self.keys, self.properties, self.event_times, self.sequences):
            if column is not None and PyList_GET_SIZE(column) > self.count:
                (<list>column).pop()

    cdef _seal_messages(self, bytes name):
        self.sealed = [_seal(
            ListStrings(self.values), 0, self.count,
            None if self.keys is None else ListStrings(self.keys),
            None if self.properties is None else ListStrings(self.properties),
            self.event_times, self.sequences, name)]
        self.state = SEALED
        self.values = self.keys = self.properties = self.event_times = self.sequences = None

    @property
    def small(self):
        """Does it go into the journal? The tables are the cheaper way for what is large."""
        cdef size_t size = 0
        if self.columns is not None or self.sealed is None:
            return False
        for sealed in self.sealed:
            size += len(sealed)
        return size <= LARGEST_FRAMES

    def stamp(self, uint64_t topic, uint64_t base_offset, uint64_t epoch, uint64_t session,
              int64_t publish_time):
        """The batch as (last offset, entry bytes) pairs, at their place in the log."""
        cdef SealedEntry sealed
        cdef int64_t sequence = self.base_sequence
        cdef uint64_t offset = base_offset
        cdef Py_ssize_t start, stop
        self.base_offset = base_offset  # should its commit be cut short: where to look for it
        for sealed in self.sealed:
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
            del sealed  # its memory serves for the next one
            yield offset - 1, data
            del data

    cdef _finish(self):
        """Tell everybody who waits. Other threads may run from here on."""
        self.sealed = None
        self.columns = None
        if self.sleepers:
            xl_wake(&self.state, INT_MAX)
        self._have_callbacks_called()

    cdef _have_callbacks_called(self):
        # A chain of batches needs no memory, and so cannot fail.
        global _due_first, _due_last
        if self.callbacks is None or PyList_GET_SIZE(self.callbacks) == 0:
            return
        if _due_last is None:
            _due_first = self
        else:
            _due_last.next_due = self
        _due_last = self

    def wait(self, timeout):
        """True when the outcome is known; waits for it up to `timeout` seconds (None: for ever)."""
        cdef int64_t end = INT64_MAX
        cdef int64_t left
        cdef uint32_t seen
        cdef uint32_t* word = &self.state
        if timeout is not None:
            end = xl_now() + <int64_t>(min(max(0.0, timeout), LONGEST_WAIT) * 1e9)
        while self.state < DONE:
            if self.generation != _generation:
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


cdef Batch _due_first = None    # batches whose callbacks are to be called
cdef Batch _due_last = None
_calling_back = _threading.Lock()


def run_callbacks():
    """Call what `add_done_callback` asked for, for outcomes known since.

    Whoever settles batches calls this once it holds no lock: a callback may send again. One
    thread at a time calls back, so that callbacks run in the order of the outcomes.
    """
    cdef list callbacks
    cdef Py_ssize_t i
    interrupt = None
    while _due_first is not None and _calling_back.acquire(False):
        try:
            while _due_first is not None:
                callbacks = _take_callbacks()
                for i in range(PyList_GET_SIZE(callbacks)):
                    due = <tuple>callbacks[i]
                    try:
                        _call_back(due[1], due[0])
                    except BaseException as error:  # Ctrl-C, or sys.exit() in a callback
                        interrupt = error
        finally:
            _calling_back.release()
    if interrupt is not None:
        raise interrupt


cdef list _take_callbacks():
    global _due_first, _due_last
    cdef Batch batch = _due_first
    cdef list callbacks = batch.callbacks
    _due_first = batch.next_due
    if _due_first is None:
        _due_last = None
    batch.next_due = batch.callbacks = None
    return callbacks


cdef _call_back(callback, receipt):
    # One callback's failure must not cost the next one its call, nor the writer its life.
    try:
        callback(receipt)
    except Exception:
        import logging
        logging.getLogger("exclusivelog").exception("a send_async callback failed")


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Receipt:
    """The outcome of one `send_async`: a future with one message's offset (rule B9).

    It can be waited for (`result`), asked (`done`), given callbacks, and awaited.
    """

    def __init__(self):
        raise TypeError("a Receipt is made by Producer.send_async")

    cdef Batch batch
    cdef Py_ssize_t index

    def done(self):
        """True when the outcome is known."""
        return self.batch.state >= DONE

    def exception(self, timeout=None):
        """The error, or None when the message is in the log. Waits as `result` does."""
        if not self.batch.wait(timeout):
            raise _no_outcome(timeout)
        return self.batch.error

    def result(self, timeout=None):
        """The message's offset, once it is durable; raises the error it failed with.

        Waits up to `timeout` seconds (None: for ever), then raises WaitTimeoutError; the
        message stays on its way.
        """
        if self.batch.state < DONE and not self.batch.wait(timeout):
            raise _no_outcome(timeout)
        if self.batch.state == FAILED:
            raise self.batch.error
        return self.batch.base_offset + self.index

    def add_done_callback(self, callback):
        """Call `callback(receipt)` when the outcome is known; at once if it is already.

        It runs in the thread that commits: it should be brief.
        """
        due = (self, callback)  # made first: from here on no other thread comes between
        if self.batch.state >= DONE:
            _call_back(callback, self)
        else:
            self.batch.callbacks.append(due)

    def __await__(self):
        import asyncio
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def settle():
            if future.done():
                return
            error = self.exception()
            if error is None:
                future.set_result(self.result())
            else:
                future.set_exception(error)

        def tell(receipt):
            for _ in range(TELLING_TRIES):
                try:
                    loop.call_soon_threadsafe(settle)
                except MemoryError:  # for a moment: a task that is never told waits for ever
                    _time.sleep(RETRY_NS / 1e9)
                    continue
                except RuntimeError:
                    pass  # the loop was closed meanwhile: nobody is waiting
                return

        self.add_done_callback(tell)
        return future.__await__()

    def __repr__(self):
        if self.batch.state < DONE:
            return "<Receipt pending>"
        if self.batch.state == FAILED:
            return f"<Receipt failed: {self.batch.error!r}>"
        return f"<Receipt offset={self.batch.base_offset + self.index}>"


def _no_outcome(timeout):
    from exclusivelog.errors import WaitTimeoutError
    return WaitTimeoutError(
        f"no outcome within timeout={timeout} s; the message is still on its way")


cdef Receipt _receipt(Batch batch, Py_ssize_t index):
    cdef Receipt receipt = Receipt.__new__(Receipt)
    receipt.batch = batch
    receipt.index = index
    return receipt


@cython.final
cdef class Appender:
    """What one producer has sent and nobody has committed yet, in order.

    Every method runs under the GIL from start to end, which makes it atomic among threads.
    """

    cdef readonly bytes name
    cdef readonly int64_t last_sequence
    cdef int64_t durable_sequence
    cdef readonly size_t pending_bytes
    cdef readonly Py_ssize_t pending_messages
    cdef Py_ssize_t max_messages
    cdef size_t max_bytes
    cdef Batch current
    cdef list full
    cdef list inflight
    cdef readonly object error
    cdef bint paused        # `error` is for now only
    cdef readonly object session
    cdef Agenda agenda
    cdef Leash leash        # the producer is not gone as long as its messages wait
    cdef int64_t linger
    cdef int generation
    cdef bint listed        # on the agenda
    cdef bint timed         # ... and the agenda knows by when
    cdef bint offered       # to a commit that has not called `take` yet
    cdef Journal journal
    cdef SharedWords words
    cdef Py_ssize_t topic_word
    cdef uint64_t topic
    cdef uint64_t epoch
    cdef uint64_t session_id
    cdef uint64_t version   # of the journal's words when the session was last looked up
    cdef bint alone
    cdef bint durable
    cdef int sending        # threads that append right now, past the queue
    cdef int queueing       # threads that wait for those: nobody else may pass them

    def __cinit__(self, bytes name not None, int64_t last_sequence, Py_ssize_t max_messages,
                  size_t max_bytes, object session=None, Agenda agenda=None, double linger=0.0,
                  Leash leash=None):
        self.name = name
        self.session = session
        self.generation = _generation
        self.agenda = agenda
        self.leash = leash
        self.linger = <int64_t>(min(linger, LONGEST_WAIT) * 1e9)
        self.last_sequence = self.durable_sequence = last_sequence
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.full = []
        self.inflight = []

    def connect(self, Journal journal not None, SharedWords words not None,
                Py_ssize_t topic_word, uint64_t topic, uint64_t epoch, uint64_t session,
                bint alone, bint durable):
        """Append to this journal, and announce it by the word at `topic_word`. `alone`: no
        other session writes to the topic; `durable`: sent is flushed."""
        self.journal, self.words, self.topic_word = journal, words, topic_word
        self.topic, self.epoch, self.session_id = topic, epoch, session
        self.alone, self.durable = alone, durable
        self.version = UINT64_MAX

    def looked_up(self, uint64_t version, int64_t sequence):
        """The session was valid when the journal had this version, and the tables had this
        sequence id of it."""
        self.version = version
        self.durable_sequence = max(self.durable_sequence, sequence)

    cdef bint _has_waiting(self):
        return (self.queueing or self.current is not None or PyList_GET_SIZE(self.full) > 0
                or PyList_GET_SIZE(self.inflight) > 0)

    def send(self, bytes value, bytes key=None, bytes properties=None, object event_time=None,
             object sequence=None):
        """Append one message now; its offset, or a negative `Outcome` that says why not."""
        cdef Piece piece
        cdef SealedEntry sealed = _seal_one(value, key, properties, event_time, self.name)
        sealed.describe(&piece)
        return self._send(&piece, 1, 1, -1 if sequence is None else sequence)

    def send_batch(self, Batch batch not None, object sequence=None):
        """Append a batch now, which must be small; the first offset, or as `send`."""
        return self._send_pieces(batch, -1 if sequence is None else sequence)

    cdef _send_pieces(self, Batch batch, int64_t sequence):
        cdef Piece* pieces = _pieces(batch)
        try:
            return self._send(pieces, PyList_GET_SIZE(batch.sealed), batch.count, sequence)
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
            raise self.error
        if self.generation != _generation:
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
            outcome = self.journal.place(placing)
        finally:
            self.sending -= 1
        if outcome == DUPLICATE:  # a send whose outcome was unknown had come through
            self.last_sequence = max(self.last_sequence, self.durable_sequence)
        if outcome == PLACED:
            self.durable_sequence = self.last_sequence
        return outcome

    def append(self, bytes value, bytes key=None, bytes properties=None):
        """Append one message now, and do not wait for its flush: (offset, position, generation),
        the last two for `Journal.flush_to`; or a negative `Outcome` that says why not. The
        caller wakes the readers by `announce` once it is flushed."""
        cdef Piece piece
        cdef SealedEntry sealed = _seal_one(value, key, properties, None, self.name)
        sealed.describe(&piece)
        return self._append(&piece, 1, 1)

    def append_batch(self, Batch batch not None):
        """The same for a batch, which must be small; the offset is its first message's."""
        cdef Piece* pieces = _pieces(batch)
        try:
            return self._append(pieces, PyList_GET_SIZE(batch.sealed), batch.count)
        finally:
            free(pieces)

    cdef _append(self, Piece* pieces, Py_ssize_t n, Py_ssize_t count):
        cdef Placing placing
        cdef int outcome = self._place_now(&placing, pieces, n, count, -1, False)
        if outcome != PLACED:
            return -outcome
        return placing.base_offset, placing.end, placing.generation

    cdef void _describe(self, Placing* placing, Piece* pieces, Py_ssize_t n, int64_t sequence):
        memset(placing, 0, sizeof(Placing))
        placing.topic, placing.epoch, placing.session = self.topic, self.epoch, self.session_id
        placing.version, placing.alone = self.version, self.alone
        placing.durable = placing.flushed = self.durable
        placing.pieces, placing.count = pieces, n
        placing.sequence, placing.last = sequence, &self.last_sequence
        placing.logged = self.durable_sequence

    cdef _announce(self):
        cdef uint32_t* word = self.words.word(self.topic_word)
        xl_add(word, 1)
        if xl_load(word + 1):
            xl_wake(word, INT_MAX)

    def place(self, Batch batch not None):
        """Append a small batch of the queue, to be flushed by whoever calls this; its
        `Outcome`."""
        cdef Placing placing
        cdef int outcome
        cdef int64_t last = self.durable_sequence
        cdef Piece* pieces = _pieces(batch)
        if self.journal is None:
            raise TypeError("this appender has no journal")
        try:
            self._describe(&placing, pieces, PyList_GET_SIZE(batch.sealed), batch.base_sequence)
            placing.last, placing.flushed = &last, False
            outcome = self.journal.place(&placing)
        finally:
            free(pieces)
        if outcome == PLACED:
            self.durable_sequence = batch.last_sequence
            batch.base_offset = placing.base_offset
            batch.end, batch.generation_placed = placing.end, placing.generation
            batch.placed = True
        return outcome

    @property
    def flushes(self):
        """Is what it sends flushed before it is acknowledged (rule H1)?"""
        return self.durable

    def announce(self):
        """Wake the readers of the topic."""
        self._announce()

    def add(self, bytes value, bytes key=None, bytes properties=None, object event_time=None,
            object sequence=None, bint later=False):
        """Queue one message. None if its sequence id is used up (rule G2).

        With `later` it is put on the agenda, to be committed within `linger`.
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
        if self.agenda is not None:
            self.agenda.enlist(self)  # what needs memory comes first: it may fail
        while True:
            batch = self._open_batch(
                size, key is not None, properties is not None, event_time is not None)
            if self.error is not None:
                raise self.error
            if self.generation != _generation:
                raise _inherited()
            if self.sending:
                self._let_them_send()
                continue
            number = self.last_sequence + 1 if sequence is None else sequence
            if number <= self.last_sequence:
                return None
            if not batch._skips(number):
                break
            batch._make_sequences()
        # From here on no other thread comes between.
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
        if self.agenda is not None:
            self._put_on_the_agenda(later)
        return receipt

    cdef bint _is_full(self, Batch batch):
        return batch.count >= self.max_messages or batch.nbytes >= self.max_bytes

    cdef _let_them_send(self):
        # They are in the critical section, or about to be, and have no need of the GIL there.
        with nogil:
            usleep(20)
        PyErr_CheckSignals()

    cdef _put_on_the_agenda(self, bint later):
        if not later:
            self.agenda.enlist(self)  # a commit may have taken it off meanwhile
        elif PyList_GET_SIZE(self.full) > 0:  # linger need not hold it back
            self.agenda.put_down(self, 0)
        elif not self.timed:
            self.agenda.put_down(self, self.linger)

    cdef Batch _open_batch(self, size_t size, bint key, bint properties, bint event_time):
        cdef Batch batch, fresh
        while True:
            if (self.current is not None and self.current.count
                    and (self.current.nbytes + size > self.max_bytes
                         or self._is_full(self.current))):
                self._seal()
            if self.current is None:
                fresh = Batch.__new__(Batch)
                if self.current is None:
                    self.current = fresh
            batch = self.current
            batch._make_columns(key, properties, event_time)
            if batch is self.current:
                return batch

    def make_batch(self, Strings values not None, Strings keys, Strings properties,
                   list event_times):
        """Messages that enter the log together, however many they are."""
        cdef Py_ssize_t start = 0
        cdef Py_ssize_t stop
        cdef SealedEntry sealed
        cdef Columns columns = Columns.__new__(Columns)
        cdef Batch batch = Batch.__new__(Batch)
        columns.values, columns.keys, columns.properties = values, keys, properties
        columns.event_times, columns.name = event_times, self.name
        columns.max_bytes, columns.max_messages = self.max_bytes, self.max_messages
        batch.values = None
        batch.sealed = []
        batch.state = SEALED
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
        """Queue a batch from `make_batch`. None as in `add`."""
        self.queueing += 1
        try:
            while self.sending:
                self._let_them_send()
            return self._add_batch(batch, sequence)
        finally:
            self.queueing -= 1

    cdef _add_batch(self, Batch batch, object sequence):
        cdef int64_t number
        # The sum of a large entry is taken without the GIL: only now, with the batch ready,
        # is it our turn for a number.
        if self.error is not None:
            raise self.error
        number = self.last_sequence + 1 if sequence is None else sequence
        if number <= self.last_sequence:
            return None
        if batch.count - 1 > INT64_MAX - number:
            raise ValueError("sequence_id: the batch would run past 2**63 - 1")
        batch.base_sequence = number
        batch.last_sequence = number + batch.count - 1
        receipt = _receipt(batch, 0)
        if self.agenda is not None:
            self.agenda.enlist(self)
        if self.current is not None:
            self._seal()
        self.full.append(batch)  # the last that needs memory: it is queued, or the call fails
        self.last_sequence = batch.last_sequence
        self.pending_bytes += batch.nbytes
        self.pending_messages += batch.count
        return receipt

    def holds(self, size_t most):
        """Do that many bytes wait? Needs no memory, as a number would: what is queued is queued."""
        return self.pending_bytes >= most

    def newest(self):
        """A receipt for the last message that waits; None if none does."""
        cdef Batch batch = self.current
        if batch is None or batch.count == 0:
            waiting = <list>(self.full or self.inflight)
            if not waiting:
                return None
            batch = waiting[PyList_GET_SIZE(waiting) - 1]
        return _receipt(batch, batch.count - 1)

    cdef _seal(self):
        cdef Batch batch = self.current
        if batch.count:  # the only message of it may have been refused
            self.full.append(batch)
        self.current = None

    def take(self):
        """All batches that wait, encoded, in order. They count as pending until `settle`.

        A second call before `settle` gives the same ones and what has come since: what a
        commit that was cut short has placed in the journal is still to be flushed.
        """
        cdef Batch batch
        self._gather()
        for batch in self.inflight:
            if batch.state == OPEN:
                batch._seal_messages(self.name)
        self.offered = False
        return self.inflight

    cdef _gather(self):
        cdef list rest = []  # made first: no other thread may add between the two lines below
        if self.current is not None:
            self._seal()
        self.inflight.extend(self.full)
        self.full = rest

    def settle(self, list placed not None, object error=None, bint final=False, durable=None):
        """Give batches their outcome: `placed`, (batch, base offset) pairs, are in the log and
        durable; with an `error` everything else fails with it, unless it has come since.

        - `final`: whatever is added later fails, too.
        - `durable`: the last sequence id that the ledger knows, where that is in question.

        Later messages must not overtake failed ones: what was queued behind them fails with
        them, and counting goes on from the last message known to be in the log. All of it is
        so before the first who waits is told.
        """
        cdef Batch batch
        cdef list told = []
        cdef list rest = []
        if error is not None:
            if final:
                error = self.condemn(error)
            self._gather()
        for batch, base_offset in placed:
            if batch.state < DONE:
                batch.base_offset = base_offset
                batch.ends = True
        for batch in self.inflight:
            (told if batch.ends or error is not None else rest).append(batch)
        # Whatever needs memory has it by now: from here on nothing fails half-way.
        self.inflight = rest
        for batch in told:
            self._give_outcome(batch, error)
        if durable is not None:
            self.durable_sequence = max(self.durable_sequence, durable)
        if error is not None:
            self.last_sequence = self.durable_sequence
        for batch in told:
            batch._finish()

    cdef void _give_outcome(self, Batch batch, object error):
        self.pending_bytes -= batch.nbytes
        self.pending_messages -= batch.count
        if batch.ends:
            batch.state = DONE
            self.durable_sequence = batch.last_sequence
        else:
            batch.error = error
            batch.state = FAILED

    def await_sends(self):
        """Wait for those who append right now, past the queue."""
        while self.sending:
            self._let_them_send()

    def advance(self, int64_t sequence):
        """The log has messages up to this sequence id that did not come from here."""
        self.durable_sequence = max(self.durable_sequence, sequence)
        self.last_sequence = max(self.last_sequence, sequence)

    def condemn(self, error not None):
        """Take no more messages; the error of the first call counts, and is returned."""
        if self.error is None or self.paused:
            self.error = error
            self.paused = False
        return self.error

    def pause(self, error not None):
        """Take no more messages for now; what is queued is still sent."""
        if self.error is None:
            self.error = error
            self.paused = True

    def resume(self):
        """Take messages again, unless it was condemned meanwhile."""
        if self.paused:
            self.error = None
            self.paused = False


@cython.final
cdef class Agenda:
    """Which appenders wait for a commit in the background, and when the next one is due.

    `with agenda as appenders` is one commit: an appender that has anything without an outcome
    at its end, whatever has cut it short, is in the next one, which is due soon.
    """

    cdef list waiting
    cdef list taken         # by a commit that has not come to its end
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
        """Let the next commit take this appender's messages along, whenever that is."""
        if not appender.listed:
            self.waiting.append(appender)
            appender.listed = True

    def put(self, Appender appender not None, double delay):
        """Have this appender's messages committed within `delay` seconds."""
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

    def look(self):
        """All appenders that wait, or have something without an outcome; they stay here."""
        return self.taken + self.waiting

    def __enter__(self):
        """All appenders that wait; nobody else may be in a commit."""
        cdef list rest = []
        cdef list taken = []
        cdef list answer = []
        cdef Appender appender
        for appender in self.taken:
            if not appender.listed:
                taken.append(appender)
        taken.extend(self.waiting)
        answer.extend(taken)
        # Whatever needs memory has it by now.
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
                if appender.offered or PyList_GET_SIZE(appender.inflight) > 0:
                    rest.append(appender)
            self.taken = rest
        except MemoryError:
            pass  # then all of them are looked at again
        self.retry = INT64_MAX
        if PyList_GET_SIZE(self.taken) > 0:
            self.retry = xl_now() + RETRY_NS
            self._wake()

    def sleep(self):
        """Sleep until a commit is due; False once the agenda was stopped."""
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
        """End `sleep`, for good."""
        self.stopped = True
        self._wake()


def keep_running(step, failed):
    """Call `step()` until it returns False or None. What it raises goes to `failed(error)`, and ends
    nothing, whatever it is: this is the life of a thread that others depend on."""
    while True:
        try:
            if not step():
                return
        except BaseException as error:
            try:
                failed(error)
            except BaseException:
                pass  # no memory even to say so
            with nogil:
                usleep(RETRY_NS // 5000)


cdef Piece* _pieces(Batch batch) except NULL:
    cdef Py_ssize_t n = PyList_GET_SIZE(batch.sealed)
    cdef Piece* pieces = <Piece*>malloc(max(1, n) * sizeof(Piece))
    cdef Py_ssize_t i
    if pieces == NULL:
        raise MemoryError
    for i in range(n):
        (<SealedEntry>batch.sealed[i]).describe(&pieces[i])
    return pieces


def strings(items):
    """A column for `Appender.make_batch` from a list of bytes or None."""
    return ListStrings(items)


def arrow_strings(valid, offsets, data, shift, count):
    """A column for `Appender.make_batch` from an Arrow binary array's buffers."""
    return ArrowStrings(valid, offsets, data, shift, count)
