# The frames of a transaction: batches of several producers, appended together or not at all (rule K2).
#
# While the mutex is held once, the session of each producer, and whatever else the transaction
# requires, is checked; then all frames are written by one write, and `tail` moves behind the last one.
# Each frame but the last has the flag MORE, so that a recovery takes all of them or none.
#
# A transaction may also change rows of tables, such as the position of a reader group. The journal
# has each of these rows as a *note*: an entry of the topic NOTES, which has no row of its own. Its
# producer name is that of the table, its key and value are those of the row. A checkpoint writes the
# rows in the order of their notes; until then, they are read from the journal.

LARGEST_TRANSACTION = LARGEST_RUN      # bytes of frames


# What one producer has in a transaction; without parts, its session is only checked.
cdef struct Share:
    Placing placing
    Py_ssize_t first        # of its parts
    Py_ssize_t stop
    int64_t* counted        # the producer's last sequence id ...
    int64_t last            # ... and the one after this transaction
    Tail* tail              # the topic's end


# One entry of a transaction.
cdef struct Part:
    Piece piece
    int64_t sequence        # of its first message; -1: the next one of its producer
    int64_t last            # of its last message, unless `sequence` is -1
    uint64_t base_offset    # out


# A topic or claim that must not have changed since it was checked.
cdef struct Watched:
    const uint64_t* word
    uint64_t version


cdef inline size_t _length(bytes part) noexcept:
    return 0 if part is None else <size_t>PyBytes_GET_SIZE(part)


cdef void* _grown(void* items, Py_ssize_t used, size_t size) except NULL:
    """The items, with room for one more behind the `used` first ones."""
    cdef void* grown = items
    if used & (used - 1) == 0:      # a power of two, or none yet: it was full
        grown = realloc(items, max(1, 2 * used) * size)
        if grown == NULL:
            raise MemoryError
    return grown


@cython.final
cdef class Joint:
    """The parts of one transaction, in C memory: what it appends, and what it requires.

    `durable`: it is flushed before it is acknowledged."""

    cdef Journal journal
    cdef bint durable
    cdef list appenders     # one for each share
    cdef list batches       # they keep the memory of the parts
    cdef Share* shares
    cdef Py_ssize_t sharing
    cdef Part* parts
    cdef Py_ssize_t count
    cdef list noted         # they keep the memory of the notes
    cdef Part* notes
    cdef Py_ssize_t noting
    cdef Watched* watched
    cdef Py_ssize_t watching
    cdef Run run
    cdef uint64_t generation        # of the journal, when it was placed
    cdef bint wanted                # a checkpoint should be made soon
    cdef readonly size_t nbytes     # of its frames
    cdef readonly bint tried        # it may be in the log ...
    cdef readonly bint committed    # ... and it certainly is
    cdef readonly Py_ssize_t refused    # the share that was refused; -1: none

    def __cinit__(self, Journal journal not None, bint durable):
        self.journal, self.durable = journal, durable
        self.appenders, self.batches, self.noted = [], [], []
        self.refused = -1

    def __dealloc__(self):
        free(self.shares)
        free(self.parts)
        free(self.notes)
        free(self.watched)
        free(self.run.frames)

    # ---- its parts -----------------------------------------------------------------------

    def add(self, Appender appender not None, batches not None, bint numbered):
        """Add the session of `appender`, which has a journal, and its batches, which are encoded.
        `numbered`: the messages keep their sequence ids; else these continue those of the appender.
        """
        cdef Batch batch
        cdef Py_ssize_t first = self.count
        self._check_journal(appender)
        for batch in batches:
            self._add_batch(batch, numbered)
        self._add_share(appender, first)

    def send(self, Appender appender not None, tuple message):
        """Add the session of `appender`, and one message, as `Appender.send` takes it, which gets the
        next sequence id; None: no message. False, and nothing is added, if the message must be put
        into a batch: it is large, or an earlier one may have used that id."""
        cdef SealedEntry sealed
        cdef Py_ssize_t first = self.count
        self._check_journal(appender)
        if message is not None:
            value, key, properties, event_time, sequence = message
            if sequence is not None or appender.last_sequence != appender.durable_sequence or (
                    appender.last_sequence == INT64_MAX):
                return False
            if _length(value) + _length(key) + _length(properties) > LARGEST_RUN:
                return False
            sealed = _seal_one(value, key, properties, event_time, appender.name)
            self.batches.append(sealed)
            self._add_part(sealed).sequence = -1
        self._add_share(appender, first)
        return True

    cdef _check_journal(self, Appender appender):
        if appender.journal is not self.journal:
            raise ValueError("this appender has another journal")

    cdef _add_share(self, Appender appender, Py_ssize_t first):
        """The parts from the `first` on are those of this appender."""
        cdef Share* share
        self.appenders.append(appender)
        self.shares = <Share*>_grown(self.shares, self.sharing, sizeof(Share))
        share = &self.shares[self.sharing]
        share.first, share.stop = first, self.count
        self.sharing += 1
        self.durable = self.durable or appender.durable

    cdef Part* _add_part(self, SealedEntry sealed) except NULL:
        cdef Part* part
        self.parts = <Part*>_grown(self.parts, self.count, sizeof(Part))
        part = &self.parts[self.count]
        sealed.describe(&part.piece)
        self.nbytes += _frame_bytes(part.piece.size)
        self.count += 1
        return part

    cdef _add_batch(self, Batch batch, bint numbered):
        cdef SealedEntry sealed
        cdef Part* part
        cdef int64_t sequence = batch.base_sequence
        if batch.state != SEALED or batch.columns is not None:
            raise ValueError("the batch is not encoded as a whole")
        self.batches.append(batch)
        for sealed in batch._sealed_entries():
            part = self._add_part(sealed)
            part.sequence = sequence if numbered else -1
            sequence += sealed.count
            # The ids of one entry may have gaps.
            part.last = sequence - 1 if batch.only is None else batch.last_sequence

    def note(self, bytes table not None, bytes key not None, bytes data not None):
        """Add a row of a table."""
        cdef SealedEntry sealed = _seal_one(data, key, None, None, table)
        cdef Part* part
        self.noted.append(sealed)
        self.notes = <Part*>_grown(self.notes, self.noting, sizeof(Part))
        part = &self.notes[self.noting]
        sealed.describe(&part.piece)
        self.nbytes += _frame_bytes(part.piece.size)
        self.noting += 1

    def require_claim(self, uint64_t claim, uint64_t version):
        """Require that the claim has not changed since its version was this one."""
        self._watch(self.journal._word(_as_subject(claim)), version)

    def require_topic(self, uint64_t topic, uint64_t version):
        """The same for a topic."""
        self._watch(self.journal._word(topic), version)

    def forget_requirements(self):
        """Require no claims and topics any more."""
        self.watching = 0

    cdef _watch(self, const uint64_t* word, uint64_t version):
        self.watched = <Watched*>_grown(self.watched, self.watching, sizeof(Watched))
        self.watched[self.watching].word = word
        self.watched[self.watching].version = version
        self.watching += 1

    @property
    def fits(self):
        """Is it small enough to be written at once?"""
        return self.nbytes <= LARGEST_RUN

    # ---- the commit ----------------------------------------------------------------------

    def place(self, bint paused=False):
        """Append all parts, or none, and return the `Outcome`. After STALE or DUPLICATE, `refused` is
        the share; it is -1 if something else that it requires has changed. `paused`: the caller has
        paused the appenders.

        Raises the error of an appender that takes no messages."""
        cdef Appender appender
        cdef int outcome
        if not self.fits:
            raise ValueError(f"{self.nbytes} bytes are too many for one append")
        if not self._may_send(paused):
            return QUEUED
        self._make_run()
        # From here on `sending` keeps other threads from queueing.
        for appender in self.appenders:
            appender.sending += 1
        try:
            self._describe()
            outcome = self._append()
        finally:
            for appender in self.appenders:
                appender.sending -= 1
        self._note_outcome(outcome)
        return outcome

    cdef bint _may_send(self, bint paused) except -1:
        """False if messages wait that must come first."""
        cdef Appender appender
        cdef Py_ssize_t i
        for appender in self.appenders:
            if appender.error is not None and not (paused and appender.paused):
                raise _anew(appender.error)
            if appender.process != xi_here():
                raise _inherited()
        for i in range(self.sharing):
            if self.shares[i].first == self.shares[i].stop:
                continue    # it sends nothing that could come too early
            appender = self.appenders[i]
            if paused:      # those that are about to queue a message are refused
                appender._drop_empty()
            if appender._has_messages() if paused else appender._has_waiting():
                return False
        return True

    cdef _make_run(self):
        if self.run.frames == NULL and self.nbytes:
            self.run.frames = <char*>malloc(self.nbytes)
            if self.run.frames == NULL:
                raise MemoryError
            self.run.room = self.nbytes

    cdef void _describe(self) noexcept:
        cdef Appender appender
        cdef Share* share
        cdef Py_ssize_t i
        for i in range(self.sharing):
            appender = <Appender>PyList_GET_ITEM(self.appenders, i)
            share = &self.shares[i]
            appender._describe(&share.placing, NULL, 0, -1)
            share.counted, share.placing.last = &appender.last_sequence, &share.last

    cdef int _append(self) except -1:
        cdef Journal journal = self.journal
        cdef int failed = EBUSY
        cdef int outcome = BROKEN
        cdef int64_t began = 0
        if journal.ring.memory == NULL or journal.process != xi_here():
            return CLOSED
        xg_ready()
        if journal.placed % XF_SAMPLE == 0:
            began = xl_now()
        journal.busy += 1
        try:
            if not _is_written(journal, self.durable):
                # Without releasing the GIL, as it makes no system call.
                failed = xj_try_lock(journal.shared)
                if failed == 0:
                    outcome = self._place_and_leave(began)
            while failed == EBUSY or failed == ETIMEDOUT:
                with nogil:
                    failed = xj_lock(journal.shared)
                    if failed == 0:
                        outcome = self._place_and_leave(began)
                if failed == ETIMEDOUT:
                    journal._check_wait(xj_appending(journal.shared))
                    if _stopped(journal):
                        break
        finally:
            journal.busy -= 1
        if failed == EDEADLK:
            return HELD_HERE
        if outcome == PLACED and (self.wanted or (self.nbytes and journal.idle)):
            journal._request_checkpoint()
        return outcome

    cdef int _place_and_leave(self, int64_t began) noexcept nogil:
        cdef int error = 0
        cdef int outcome = self._place(self.journal)
        xj_unlock(self.journal.shared)
        if outcome != PLACED or not self.nbytes:
            return outcome
        if began:
            xf_note(&self.journal.figures.append, xl_now() - began, XF_TIME)
        if self.durable:
            outcome = _await_flush(self.journal, self.run.end, self.generation, &error)
        return outcome

    cdef int _place(self, Journal journal) noexcept nogil:
        """The critical section (rules B2, K2). Under the mutex."""
        cdef xj_header* header = journal.shared
        cdef Run* run = &self.run
        cdef int outcome
        if not self.sharing:
            _begin_generation(journal)  # else the first append of a session does, when it looks it up
        outcome = BROKEN if _stopped(journal) else self._judge_all(journal)
        if outcome != PLACED or not self.nbytes:
            return outcome
        run.used, run.before, run.now = 0, header.tail, xj_wall_ms()
        run.start = run.end = _start_of(journal, run.before, self.nbytes - FRAME)
        if not _has_room(journal, run.start + self.nbytes, self.nbytes):
            return FULL
        self._fill(journal)
        outcome = _write_run(journal, run, self.durable)
        if outcome != PLACED:
            self.tried = outcome != NO_ROOM
            return outcome
        self.tried = True
        self.generation = journal.generation
        if journal.seen == run.before:
            journal.seen = run.end
        self._note_ends(journal)
        xl_store64(&header.tail, run.end)
        self.wanted = _wants_checkpoint(journal, run.before, run.end)
        if journal._lost():
            return LOST
        journal.placed += 1
        return PLACED

    cdef int _judge_all(self, Journal journal) noexcept nogil:
        """Check all that it requires. Changes nothing that others see."""
        cdef Share* share
        cdef int outcome
        cdef Py_ssize_t i
        self.refused = -1
        for i in range(self.watching):
            if not journal._is_current(self.watched[i].word, self.watched[i].version):
                return STALE
        for i in range(self.sharing):
            share = &self.shares[i]
            share.last = share.counted[0]
            share.placing.sequence = -1 if share.first == share.stop else (
                self.parts[share.first].sequence)
            outcome = _judge(journal, &share.placing, &share.tail)
            if outcome == DUPLICATE and share.first == share.stop:
                continue    # it has no message to be numbered
            if outcome != PLACED:
                self.refused = i
                return outcome
        return PLACED

    cdef void _fill(self, Journal journal) noexcept nogil:
        """Make the frames, and move the topics' ends behind them."""
        cdef Share* share
        cdef Part* part
        cdef int64_t sequence
        cdef Py_ssize_t i, k
        for i in range(self.sharing):
            share = &self.shares[i]
            for k in range(share.first, share.stop):
                part = &self.parts[k]
                sequence = share.last + 1 if part.sequence < 0 else part.sequence
                part.base_offset = share.tail.next_offset
                self._put(journal, &part.piece, &share.placing, share.tail, sequence)
                share.last = part.last if part.sequence >= 0 else (
                    sequence + part.piece.count - 1)
        self._fill_in_notes(journal)

    cdef void _fill_in_notes(self, Journal journal) noexcept nogil:
        cdef Placing placing
        cdef Tail tail
        cdef Py_ssize_t i
        memset(&placing, 0, sizeof(Placing))
        memset(&tail, 0, sizeof(Tail))
        placing.topic = NOTES_TOPIC
        for i in range(self.noting):
            tail.next_offset = 0
            self._put(journal, &self.notes[i].piece, &placing, &tail, 0)

    cdef void _put(self, Journal journal, const Piece* piece, const Placing* placing, Tail* tail,
                   int64_t sequence) noexcept nogil:
        cdef bint more = self.run.used + _frame_bytes(piece.size) < self.nbytes
        _put_frame(journal, &self.run, piece, placing, tail, sequence, self.run.end, more)

    cdef void _note_ends(self, Journal journal) noexcept nogil:
        cdef Share* share
        cdef Py_ssize_t i, k
        for i in range(self.sharing):
            share = &self.shares[i]
            if share.first < share.stop:
                share.counted[0] = share.last
                _note_end(&share.placing, self.run.end)
                for k in range(share.first, share.stop):
                    journal.shared.messages += self.parts[k].piece.count

    cdef _note_outcome(self, int outcome):
        cdef Appender appender
        cdef Share* share
        cdef Py_ssize_t i, k
        self.committed = outcome == PLACED
        if outcome == DUPLICATE:    # an append whose outcome was unknown is in the log
            appender = <Appender>self.appenders[self.refused]
            appender.last_sequence = max(appender.last_sequence, appender.durable_sequence)
        for i in range(self.sharing):
            share, appender = &self.shares[i], <Appender>self.appenders[i]
            if outcome == LOST or outcome == BROKEN:
                appender._take_back()
            if share.placing.foreign:
                self.journal._report_foreign(share.placing.topic)
            if not self.committed or share.first == share.stop:
                continue
            appender.durable_sequence = max(appender.durable_sequence, share.last)
            for k in range(share.first, share.stop):
                appender.sent += self.parts[k].piece.count
            appender._announce()

    def offsets(self):
        """The first offset of each share's messages; None for one without messages."""
        cdef Py_ssize_t i
        return [self.parts[self.shares[i].first].base_offset
                if self.shares[i].first < self.shares[i].stop else None
                for i in range(self.sharing)]
