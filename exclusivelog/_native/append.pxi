# Appending to the journal: the critical section, which a robust mutex guards (rule B2).
#
# Inside it the session's validity is compared, offsets are assigned, frames are written, and `tail`
# moves. No user code runs there, nothing is encoded, and the GIL is not needed.

cdef extern from "<errno.h>":
    int EBADF
    int EDEADLK
    int EIO
    int ETIMEDOUT
    int ENOSPC
    int EDQUOT
    int EFBIG


# The outcomes of an attempt to append.
cpdef enum Outcome:
    PLACED = 0
    QUEUED = 1      # earlier messages of the producer wait: this one must be queued
    STALE = 2       # the tables must be read: ownership may have changed
    FULL = 3        # a checkpoint must make room
    DUPLICATE = 4   # the sequence id is not above the last one
    BROKEN = 5      # a write or flush has failed, here or elsewhere; or the directory is lost
    NO_ROOM = 6     # the disk is full: nothing was written
    HELD_HERE = 7   # this thread holds the mutex already
    LOST = 8        # it was written, but the flush has failed
    CLOSED = 9      # the ledger was closed here, or is the parent's of a forked child


cdef enum:
    SHARED_OUT = 8  # see `_has_room`


# One atomic append: all of its pieces, in order, or none.
cdef struct Placing:
    uint64_t topic
    uint64_t epoch
    uint64_t session
    uint64_t version        # of the topic when the session was last checked
    const uint64_t* changed # shared: the word of that version
    bint alone              # no other session may write to the topic
    bint durable            # stored such that a flush is cheap
    bint flushed            # ... and flushed at once
    bint impatient          # return QUEUED instead of waiting for another append
    uint64_t* ended         # shared: the end of the last frame of the topic, or of one like it
    uint64_t* known         # the same, as this process has left it
    bint foreign            # out: another process has appended to a topic that is its own `alone`
    Piece* pieces
    Py_ssize_t count
    int64_t sequence        # of the first message; -1: the one after `last`
    int64_t* last           # the producer's last sequence id
    int64_t logged          # the last one that is known to be in the log
    int64_t began           # when the call began, if it is timed; 0: it is not
    uint64_t base_offset    # out
    uint64_t end            # out: the position after it
    uint64_t generation     # out: of that position
    int error               # out: an errno
    bint wanted             # out: a checkpoint should be made soon


cdef void _catch_up(Journal journal) noexcept nogil:
    """Read the frames that other processes have appended since, into `tails`. Under the mutex."""
    cdef uint64_t position = journal.seen
    cdef uint64_t stop = journal.shared.tail
    cdef Found found
    cdef Tail* tail
    journal.seen = stop
    if _may_be_overwritten(journal, position):
        journal.tails_generation += 1
        return
    while _next(&journal.ring, position, journal.generation, stop, &found):
        tail = _find_tail(&journal.tails, found.topic)
        if tail != NULL:
            _follow(tail, &found)
        position = found.next


cdef void _begin_generation(Journal journal) noexcept nogil:
    if journal.generation != journal.shared.generation:
        journal.generation = journal.shared.generation
        journal.tails_generation += 1
        journal.seen = journal.shared.tail


# The end of a topic, as it was in the tables when the topic had this version.
cdef struct Fresh:
    Tail tail
    uint64_t version
    bint valid              # it has that version still


cdef bint _may_learn(Journal journal, uint64_t at, uint64_t generation) noexcept nogil:
    """Under the mutex: do the tables, as read at position `at`, have everything that the journal
    no longer has?"""
    _begin_generation(journal)
    return (journal.generation == generation and not journal.shared.unsettled
            and not _may_be_overwritten(journal, at))


cdef Py_ssize_t _learn(Journal journal, Fresh* fresh, Py_ssize_t n, uint64_t at) noexcept nogil:
    """Load the ends of these topics into `tails`, from the tables and the journal's later frames,
    but for topics that have changed meanwhile. Under the mutex. Returns how many; -1 if there is no
    memory."""
    cdef uint64_t stop = journal.shared.tail
    cdef uint64_t position = at
    cdef Py_ssize_t learned = 0
    cdef Found found
    cdef Tail* tail
    cdef Py_ssize_t i
    _catch_up(journal)
    for i in range(n):
        fresh[i].valid = journal._is_current(
            journal._word(fresh[i].tail.topic), fresh[i].version)
    for i in range(n):  # all or none: a known topic must include all of the journal's frames
        if fresh[i].valid and _make_tail(&journal.tails, fresh[i].tail.topic) == NULL:
            return -1
    for i in range(n):
        if not fresh[i].valid:
            continue
        tail = _find_tail(&journal.tails, fresh[i].tail.topic)
        tail[0] = fresh[i].tail
        tail.tails_generation = journal.tails_generation
        learned += 1
    while _next(&journal.ring, position, journal.generation, stop, &found):
        tail = _find_tail(&journal.tails, found.topic)
        if tail != NULL:
            _follow(tail, &found)
        position = found.next
    for i in range(n):
        if fresh[i].valid:
            _find_tail(&journal.tails, fresh[i].tail.topic).at = stop
    return learned


cdef int _stopped(Journal journal) noexcept nogil:
    """The errno with which appends are refused, or 0."""
    if journal._lost():
        return EIO
    return xl_load(&journal.gone) or xl_load(&journal.shared.failed)


cdef int _judge(Journal journal, Placing* p, Tail** tail) noexcept nogil:
    """Check that this may be appended now (rule B2), set its sequence id, and find the topic's end.
    Under the mutex.

    This process knows the end from its own last append. If the topic's word has moved since by other
    hands, it looks again, also for a session that is `alone`, whatever the reason (rule C8)."""
    cdef bint looks = p.ended[0] != p.known[0]
    cdef uint64_t expected
    journal.compared += 1
    if journal.shared.generation != journal.generation:
        return STALE
    if not journal._is_current(p.changed, p.version):
        return STALE
    tail[0] = _find_tail(&journal.tails, p.topic)
    if tail[0] == NULL:
        return STALE
    if looks:
        expected = tail[0].next_offset
        _catch_up(journal)
    if (looks or not p.alone) and tail[0].tails_generation != journal.tails_generation:
        return STALE
    if looks:
        p.foreign = p.alone and tail[0].next_offset != expected
    if p.sequence < 0:
        if p.last[0] == INT64_MAX:
            return DUPLICATE
        p.sequence = p.last[0] + 1
    elif p.sequence <= p.last[0]:
        return DUPLICATE
    return DUPLICATE if p.sequence <= p.logged else PLACED


cdef int _place(Journal journal, Placing* p) noexcept nogil:
    """The critical section (rule B2). Under the mutex."""
    cdef xj_header* header = journal.shared
    cdef Tail* tail
    cdef uint64_t before = header.tail
    cdef uint64_t offset, end
    cdef int64_t sequence, now
    cdef Py_ssize_t i
    cdef int outcome
    p.error = _stopped(journal)
    if p.error:
        return BROKEN
    outcome = _judge(journal, p, &tail)
    if outcome != PLACED:
        return outcome
    end = _end_of_frames(journal, p, before)
    if not _has_room(journal, end, end - before):
        return FULL
    now = max(tail.publish_time, xj_wall_ms())
    offset, sequence = tail.next_offset, p.sequence
    for i in range(p.count):
        _stamp(&p.pieces[i], p.topic, offset, p.epoch, p.session, sequence, now)
        offset += p.pieces[i].count
        sequence += p.pieces[i].count
    p.error = _write(journal, p, before, tail.next_offset)
    if p.error == 0 and journal._lost():
        p.error = EIO       # a store into the mapping did not reach the file
    if p.error:
        return _refused(journal, p)
    p.base_offset, p.end, p.generation = tail.next_offset, end, journal.generation
    p.last[0] = sequence - 1
    tail.next_offset, tail.publish_time = offset, now
    tail.at = end
    if journal.seen == before:
        journal.seen = end
    _note_end(p, end)
    xl_store64(&header.tail, end)
    header.messages += offset - p.base_offset
    p.wanted = _wants_checkpoint(journal, before, end)
    if journal._lost():
        p.error = EIO
        return LOST
    journal.placed += 1
    return PLACED


cdef bint _has_room(Journal journal, uint64_t end, uint64_t nbytes) noexcept nogil:
    """Is there room for frames of so many bytes up to the position `end`? Under the mutex.

    The last eighth of the journal is shared out: between two checkpoints, a process gets an eighth
    of that. So one that sends at full speed, and is stopped while it makes the checkpoint, has left
    room for the sends of others (rule K3)."""
    cdef uint64_t applied = xl_load64(&journal.shared.applied)
    cdef uint64_t capacity = journal.ring.capacity
    if end - applied <= capacity - capacity / SHARED_OUT:
        return True
    if end - applied > capacity:
        return False
    if journal.shared.tail == applied:
        return True         # a checkpoint makes no more room
    if journal.shares_since != applied:
        journal.shares_since, journal.share = applied, capacity / SHARED_OUT / SHARED_OUT
    if nbytes > journal.share:
        return False
    journal.share -= nbytes
    return True


cdef inline void _note_end(Placing* p, uint64_t end) noexcept nogil:
    p.known[0] = end
    xl_store64(p.ended, end)


cdef bint _wants_checkpoint(Journal journal, uint64_t before, uint64_t end) noexcept nogil:
    """Has the backlog crossed a threshold for a checkpoint, as the tail moved from `before` to
    `end`?"""
    cdef uint64_t applied = xl_load64(&journal.shared.applied)
    return before == applied or (
        before - applied < journal.ring.capacity / 2 <= end - applied)


cdef int _refused(Journal journal, Placing* p) noexcept nogil:
    # Parts of its frames may be after `tail`, and over frames that other processes still read; the
    # tails of a run are ahead of it. With other versions each append reads the tables first.
    xj_change_everything(journal.shared)
    if xl_load(&journal.gone):
        return BROKEN       # only here: other processes have the file
    if p.error == ENOSPC or p.error == EDQUOT or p.error == EFBIG:
        return NO_ROOM
    xl_swap(&journal.shared.failed, 0, p.error)
    return BROKEN


cdef uint64_t _start_of(Journal journal, uint64_t position, size_t entry) noexcept nogil:
    # A frame does not wrap around the end of the file.
    cdef uint64_t left = _left(&journal.ring, position)
    return position if _frame_bytes(entry) <= left else position + left


cdef uint64_t _end_of_frames(Journal journal, Placing* p, uint64_t position) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(p.count):
        position = _start_of(journal, position, p.pieces[i].size)
        position += _frame_bytes(p.pieces[i].size)
    return position


cdef int _write(Journal journal, Placing* p, uint64_t position,
                uint64_t base_offset) noexcept nogil:
    cdef uint64_t start
    cdef uint64_t offset = base_offset
    cdef xj_frame frame
    cdef int failed
    cdef Py_ssize_t i
    for i in range(p.count):
        memset(&frame, 0, FRAME)
        start = _start_of(journal, position, p.pieces[i].size)
        if start != position:
            failed = _write_padding(journal, position, p.durable)
            if failed:
                return failed
        frame.size = <uint32_t>p.pieces[i].size | (MORE if i < p.count - 1 else 0)
        frame.topic, frame.base_offset, frame.count = p.topic, offset, p.pieces[i].count
        failed = _write_frame(
            journal, start, &frame, p.pieces[i].data, p.pieces[i].size, p.durable)
        if failed:
            return failed
        offset += p.pieces[i].count
        position = start + _frame_bytes(p.pieces[i].size)
    return 0


cdef void _seal_frame(Journal journal, uint64_t position, xj_frame* frame) noexcept nogil:
    frame.magic, frame.position, frame.generation = FRAME_MAGIC, position, journal.generation
    frame.version = journal.shared.version
    frame.durable = xl_load64(&journal.shared.synced)
    frame.crc = _crc(<char*>frame, FRAME - 4)


cdef inline bint _is_written(Journal journal, bint durable) noexcept nogil:
    """Are frames written to the file, not stored through its mapping? On a full disk, a write fails,
    where a store needs the spare room."""
    return durable or xr_is_spent(journal.spare)


cdef int _write_frame(Journal journal, uint64_t position, xj_frame* frame, const char* entry,
                      size_t size, bint durable) noexcept nogil:
    cdef char* at = <char*>_frame_at(&journal.ring, position)
    _seal_frame(journal, position, frame)
    # Storing through the mapping is the cheaper way as long as no thread flushes: after each
    # flush the first store into a page is a fault.
    if _is_written(journal, durable):
        if not xj_is(journal.fd, &journal.file):
            xl_store(&journal.gone, EBADF)
            return EBADF
        return xj_write(journal.fd, at - journal.ring.memory, frame, FRAME, entry, size)
    if size:
        memcpy(at + FRAME, entry, size)
    memcpy(at, frame, FRAME)
    return 0


cdef int _write_padding(Journal journal, uint64_t position, bint durable) noexcept nogil:
    """Fill the rest of the ring: frames that a dead process left there would seem to be valid if the
    header of this one were damaged."""
    cdef char[4096] zeros
    cdef uint64_t left = _left(&journal.ring, position)
    cdef uint64_t size
    cdef xj_frame frame
    cdef int failed
    if left < FRAME:
        return 0
    memset(&frame, 0, FRAME)
    frame.size = PADDING
    failed = _write_frame(journal, position, &frame, NULL, 0, durable)
    memset(zeros, 0, sizeof(zeros))
    position += FRAME
    left -= FRAME
    while left and failed == 0:
        size = min(left, <uint64_t>sizeof(zeros))
        if _is_written(journal, durable):
            failed = xj_write(journal.fd, JOURNAL_HEADER + position % journal.ring.capacity,
                              zeros, size, NULL, 0)
        else:
            memset(_frame_at(&journal.ring, position), 0, size)
        position += size
        left -= size
    return failed


cdef int _place_and_leave(Journal journal, Placing* p) noexcept nogil:
    cdef int outcome = _place(journal, p)
    xj_unlock(journal.shared)
    if p.began and outcome == PLACED:
        xf_note(&journal.figures.append, xl_now() - p.began, XF_TIME)
    if outcome == PLACED and p.flushed:
        outcome = _await_flush(journal, p.end, p.generation, &p.error)
    return outcome


cdef bint _may_be_overwritten(Journal journal, uint64_t position) noexcept nogil:
    """Whether the frames from this position on may have been overwritten. Space before `applied`
    can be overwritten at any moment, by an append of at most half the file."""
    cdef uint64_t capacity = journal.ring.capacity
    return (xl_load64(&journal.shared.applied) > position
            and xl_load64(&journal.shared.tail) + capacity / 2 > position + capacity)


cdef int _append(Journal journal, Placing* p) except -1:
    """Append, or return another outcome. Releases the GIL for waits and system calls, and takes it
    again at the end, after the flush."""
    cdef int failed
    cdef int outcome = BROKEN
    if journal.ring.memory == NULL or journal.process != xi_here():
        return CLOSED
    xg_ready()
    if journal.placed % XF_SAMPLE == 0:
        p.began = xl_now()
    journal.busy += 1
    try:
        failed = xj_try_lock(journal.shared)
        if failed == 0 and not _is_written(journal, p.durable):
            outcome = _place_and_leave(journal, p)
        elif failed and p.impatient:
            return QUEUED
        else:
            while True:
                with nogil:
                    if failed:
                        failed = xj_lock(journal.shared)
                    if failed == 0:
                        outcome = _place_and_leave(journal, p)
                if failed != ETIMEDOUT:
                    break
                journal._check_wait(xj_appending(journal.shared))
                if _stopped(journal):
                    failed = _stopped(journal)
                    break
    finally:
        journal.busy -= 1
    if failed == EDEADLK:
        return HELD_HERE
    if failed:
        p.error = failed
        return BROKEN
    if p.foreign:
        journal._report_foreign(p.topic)
    if outcome == PLACED and (p.wanted or journal.idle):
        journal._request_checkpoint()
    return outcome
