# Group commit: appends the batches of many producers to the journal in runs. While the mutex is
# held once, each message of a run is checked, and all are written by one write; then `tail` moves.
# A process that dies before that has appended nothing of the run.
#
# Each batch here is one frame. The caller handles batches that a run cannot place.

# Limits of one run, which bound how long other processes wait for the mutex.
cdef size_t LARGEST_RUN = 128 << 10


# One batch to be appended, as one entry.
cdef struct Member:
    Placing placing
    Piece piece
    Py_ssize_t first        # the member that has the first batch of the same producer
    int64_t last            # of the first member: the producer's last sequence id
    bint refused            # ... and has one of its batches been refused?
    int outcome
    Tail* tail              # the topic's end
    PyObject* appender      # kept by the group's list; it keeps its batch until the outcome
    PyObject* batch


# The part of a group that is written at once: adjacent frames.
cdef struct Run:
    char* frames
    size_t room             # bytes; at least one frame fits
    size_t used
    uint64_t before         # the tail before it
    uint64_t start          # the position of the first frame
    uint64_t end            # the position behind the last one
    int64_t now             # ms since 1970


@cython.final
cdef class Group:
    """The batches of one commit, in C memory."""

    cdef Journal journal
    cdef Member* members
    cdef Py_ssize_t count
    cdef Py_ssize_t room
    cdef size_t largest     # entry
    cdef Py_ssize_t next    # the first member without an outcome
    cdef Run run
    cdef bint durable
    cdef bint full          # the journal is full: a checkpoint must make room
    cdef bint wanted        # a checkpoint should be made soon
    cdef int64_t began      # when placing began, if that is timed
    cdef uint64_t end       # the end of what was placed, and its generation
    cdef uint64_t generation
    cdef bint lost          # the flush has failed

    def __init__(self):
        raise TypeError("a Group is made by append_together")

    def __dealloc__(self):
        free(self.members)
        free(self.run.frames)

    cdef bint admits(self, Appender appender):
        """Does the appender use this journal, with the same durability?"""
        if appender.journal is None or appender.process != xi_here():
            return False
        if self.journal is None:
            self.journal, self.durable = appender.journal, appender.durable
        return appender.journal is self.journal and appender.durable == self.durable

    cdef bint add(self, Appender appender) except -1:
        """Encode the appender's messages, and add them as members; False if any of them cannot be
        placed here. Messages that other threads send meanwhile are not included."""
        cdef Batch batch
        cdef list batches = appender._shut_all()
        cdef Py_ssize_t first = self.count
        cdef size_t largest = self.largest
        for batch in batches:
            if not _goes_together(batch):
                return False
        self.make_room(PyList_GET_SIZE(batches))
        try:
            for batch in batches:
                self.add_batch(appender, batch, first)
        except BaseException:
            self.count, self.largest = first, largest
            raise
        if self.largest > LARGEST_FRAMES:
            self.count, self.largest = first, largest
            return False
        appender.offered = False
        return True

    cdef make_room(self, Py_ssize_t more):
        cdef Py_ssize_t room = max(2 * self.room, self.count + more, 64)
        cdef Member* grown
        if self.count + more <= self.room:
            return
        grown = <Member*>realloc(self.members, room * sizeof(Member))
        if grown == NULL:
            raise MemoryError
        self.members, self.room = grown, room

    cdef add_batch(self, Appender appender, Batch batch, Py_ssize_t first):
        cdef Member* member = &self.members[self.count]
        batch.taken = True
        if batch.state == OPEN:
            batch._seal_messages(appender.name)
        batch.only.describe(&member.piece)
        self.largest = max(self.largest, member.piece.size)
        appender._describe(&member.placing, NULL, 1, batch.base_sequence)
        member.first, member.last, member.refused = first, appender.durable_sequence, False
        member.outcome = QUEUED
        member.appender, member.batch = <PyObject*>appender, <PyObject*>batch
        self.count += 1

    cdef place(self):
        """Place the members in runs, and flush. Members that were not placed keep waiting."""
        cdef int failed = ETIMEDOUT
        self.make_run()
        if self.journal.ring.memory == NULL:
            return
        if self.journal.groups % XF_SAMPLE == 0:
            self.began = xl_now()
        self.journal.groups += 1
        self.journal.busy += 1
        try:
            if not _is_written(self.journal, self.durable):
                # Without releasing the GIL, as it makes no system call unless it waits.
                failed = self.place_runs(False)
            while failed == ETIMEDOUT or failed == EBUSY:
                with nogil:
                    failed = self.place_runs(True)
                if failed == ETIMEDOUT:
                    self.journal._check_wait(xj_appending(self.journal.shared))
                    if _stopped(self.journal):
                        self.refuse(self.next, self.count, BROKEN)
                        break
        finally:
            self.journal.busy -= 1
            self.note_placed()
        if self.wanted or (self.end and self.journal.idle):
            self.journal._request_checkpoint()

    cdef make_run(self):
        self.run.room = max(_frame_bytes(self.largest), LARGEST_RUN)
        self.run.frames = <char*>malloc(self.run.room)
        if self.run.frames == NULL:
            raise MemoryError

    cdef int place_runs(self, bint wait) noexcept nogil:
        """0, or the errno with which the mutex was refused."""
        cdef int failed = 0
        cdef int error = 0
        while self.next < self.count and not self.full:
            failed = xj_try_lock(self.journal.shared)
            if failed and wait:
                failed = xj_lock(self.journal.shared)
            if failed:
                break           # what was placed before is still flushed
            self.place_run(self.journal)
            xj_unlock(self.journal.shared)
        if self.end and self.began:
            xf_note(&self.journal.figures.append, xl_now() - self.began, XF_TIME)
            self.began = 0
        if self.end and self.durable:
            self.lost = _await_flush(self.journal, self.end, self.generation, &error) != PLACED
        return failed

    cdef void place_run(self, Journal journal) noexcept nogil:
        """Check the next members, write them at once, and move the tail. Under the mutex."""
        cdef xj_header* header = journal.shared
        cdef Run* run = &self.run
        cdef Py_ssize_t first = self.next
        cdef int outcome
        run.used = 0
        run.before = run.start = run.end = header.tail
        run.now = xj_wall_ms()
        if _stopped(journal):
            self.refuse(first, self.count, BROKEN)
            self.next = self.count
            return
        while self.next < self.count and self.take_next():
            self.next += 1
        if run.used == 0:
            return
        outcome = _write_run(journal, run, self.durable)
        if outcome != PLACED:
            self.refuse(first, self.next, outcome)
            return
        if journal.seen == run.before:
            journal.seen = run.end
        self.note_ends(first)
        xl_store64(&header.tail, run.end)
        self.end, self.generation = run.end, journal.generation
        self.wanted = self.wanted or _wants_checkpoint(journal, run.before, run.end)
        self.count_placed(first, LOST if journal._lost() else PLACED)

    cdef bint take_next(self) noexcept nogil:
        """Check the next member, and add it to the run. False if the run ends before it."""
        cdef Member* member = &self.members[self.next]
        cdef Member* leader = &self.members[member.first]
        cdef Placing* p = &member.placing
        cdef Run* run = &self.run
        cdef uint64_t start, end
        cdef int outcome
        if leader.refused:
            return True     # it stays QUEUED, as it must not overtake a refused one
        start = _start_of(self.journal, run.end, member.piece.size)
        end = start + _frame_bytes(member.piece.size)
        if run.used and (end - run.start > run.room or _goes_around(self.journal, run, start)):
            return False
        p.last, p.logged = &leader.last, leader.last
        member.outcome = _judge(self.journal, p, &member.tail)
        if member.outcome == PLACED and not _has_room(self.journal, end, end - run.end):
            member.outcome, self.full = QUEUED, True
            return False
        if member.outcome != PLACED:
            leader.refused = True
            return True
        if run.used == 0:
            run.start = start
        self.put_frame(member, leader, start, end)
        return True

    cdef void put_frame(self, Member* member, Member* leader, uint64_t start,
                        uint64_t end) noexcept nogil:
        cdef Placing* p = &member.placing
        cdef Tail* tail = member.tail
        p.base_offset, p.end, p.generation = tail.next_offset, end, self.journal.generation
        _put_frame(self.journal, &self.run, &member.piece, p, tail, p.sequence, start, False)
        leader.last = p.sequence + member.piece.count - 1

    cdef void refuse(self, Py_ssize_t start, Py_ssize_t stop, int outcome) noexcept nogil:
        """Refuse members of which nothing was written. Their topics' tails are wrong now; `_refused`
        has them read again before the next append."""
        cdef Member* member
        cdef Py_ssize_t i
        for i in range(start, stop):
            member = &self.members[i]
            if member.outcome == PLACED or member.outcome == QUEUED:
                member.outcome = outcome
            self.members[member.first].refused = True

    cdef void note_ends(self, Py_ssize_t start) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(start, self.next):
            if self.members[i].outcome == PLACED:
                _note_end(&self.members[i].placing, self.members[i].placing.end)

    cdef void count_placed(self, Py_ssize_t start, int outcome) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(start, self.next):
            if self.members[i].outcome == PLACED:
                self.members[i].outcome = outcome
                self.journal.placed += outcome == PLACED
                self.journal.shared.messages += self.members[i].piece.count

    cdef void note_placed(self):
        """Mark batches as placed, so that an interrupted commit does not append them again."""
        cdef Member* member
        cdef Batch batch
        cdef Py_ssize_t i
        for i in range(self.count):
            member = &self.members[i]
            if member.placing.foreign:
                self.journal._report_foreign(member.placing.topic)
            if member.outcome == PLACED:
                batch = <Batch>member.batch
                batch.base_offset = member.placing.base_offset
                batch.end, batch.generation_placed = member.placing.end, member.placing.generation
                batch.placed = True
                (<Appender>member.appender).durable_sequence = batch.last_sequence

    cdef settle(self, Appender appender, Py_ssize_t first, Py_ssize_t stop):
        """Acknowledge the placed batches of one appender. Returns whether all were placed."""
        cdef Batch batch
        cdef Py_ssize_t i
        cdef bint all = True
        if self.lost:
            return False
        for i in range(first, stop):
            if self.members[i].outcome != PLACED:
                all = False
                break
            batch = <Batch>self.members[i].batch
            batch.ends = True
        else:
            i = stop
        if i > first:
            appender._announce()
            appender._settle_placed()
        return all

    cdef int outcome(self):
        """FULL, or STALE if any member is, or QUEUED: whether a retry is worthwhile."""
        cdef Py_ssize_t i
        if self.full:
            return FULL
        for i in range(self.count):
            if self.members[i].outcome == STALE:
                return STALE
        return QUEUED


cdef void _put_frame(Journal journal, Run* run, const Piece* piece, const Placing* p, Tail* tail,
                     int64_t sequence, uint64_t start, bint more) noexcept nogil:
    """Add a frame at the position `start` to the run, and move the topic's end behind it. `sequence`:
    the sequence id of its first message; `more`: the next frame belongs to it."""
    cdef size_t size = _frame_bytes(piece.size)
    cdef char* at = run.frames + run.used
    cdef xj_frame frame
    tail.publish_time = max(tail.publish_time, run.now)
    _stamp(piece, p.topic, tail.next_offset, p.epoch, p.session, sequence, tail.publish_time)
    memset(&frame, 0, FRAME)
    frame.size = <uint32_t>piece.size | (MORE if more else 0)
    frame.topic, frame.base_offset, frame.count = p.topic, tail.next_offset, piece.count
    _seal_frame(journal, start, &frame)
    memcpy(at, &frame, FRAME)
    memcpy(at + FRAME, piece.data, piece.size)
    memset(at + FRAME + piece.size, 0, size - FRAME - piece.size)
    tail.next_offset += piece.count
    tail.at = run.end = start + size
    run.used += size


cdef int _write_run(Journal journal, const Run* run, bint durable) noexcept nogil:
    """Write the run's frames; its outcome."""
    cdef char* at = <char*>_frame_at(&journal.ring, run.start)
    cdef Placing refused
    refused.error = 0
    if run.start != run.before:
        refused.error = _write_padding(journal, run.before, durable)
    if refused.error == 0 and _is_written(journal, durable):
        refused.error = EBADF
        if xj_is(journal.fd, &journal.file):
            refused.error = xj_write(
                journal.fd, at - journal.ring.memory, run.frames, run.used, NULL, 0)
        else:
            xl_store(&journal.gone, EBADF)
    elif refused.error == 0:
        memcpy(at, run.frames, run.used)
    if refused.error == 0 and journal._lost():
        refused.error = EIO
    return _refused(journal, &refused) if refused.error else PLACED


cdef inline bint _goes_around(Journal journal, const Run* run, uint64_t start) noexcept nogil:
    """Does a frame at `start` wrap to the beginning of the file, after the run?"""
    return start / journal.ring.capacity != run.start / journal.ring.capacity


cdef inline bint _goes_together(Batch batch):
    if batch.placed:
        return False    # placed by a commit that was interrupted before its flush
    if batch.state == OPEN:
        return batch.nbytes <= LARGEST_FRAMES
    return batch.state == SEALED and batch.only is not None and len(batch.only) <= LARGEST_FRAMES


def append_together(list appenders not None):
    """Append the messages of these appenders durably, and acknowledge them (rule B9).

    Returns the appenders that have messages left, and the reason: FULL or STALE if another call is
    useful after a checkpoint, or after reading the tables. Takes only the lock of commits.
    """
    cdef Group group = Group.__new__(Group)
    cdef list together = []
    cdef list ends = []
    cdef list left = []
    cdef Appender appender
    cdef Py_ssize_t i
    cdef Py_ssize_t first = 0
    for appender in appenders:
        if group.admits(appender):
            try:
                if group.add(appender):
                    together.append(appender)
                    ends.append(group.count)
                    continue
            except Exception:
                pass    # `take` raises the same, and its caller reports it
        left.append(appender)
    if group.count:
        group.place()
    for i in range(PyList_GET_SIZE(together)):
        appender = <Appender>together[i]
        if not group.settle(appender, first, ends[i]):
            left.append(appender)
        first = ends[i]
    return left, group.outcome()
