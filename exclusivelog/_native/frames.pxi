# Reading frames of the journal, one after the other; skips damaged ones.

cdef extern from "_native/journal_file.h":
    ctypedef struct xj_file:
        pass
    ctypedef struct xj_frame:
        uint32_t magic
        uint32_t size
        uint64_t position
        uint64_t generation
        uint64_t topic
        uint64_t base_offset
        uint64_t version
        uint64_t durable
        uint32_t count
        uint32_t crc
    uint32_t xj_renew_header(xj_frame*) noexcept nogil
    int xj_identify(int, xj_file*) noexcept nogil
    bint xj_is(int, const xj_file*) noexcept nogil
    int64_t xj_wall_ms() noexcept nogil
    void xj_copy_header(xj_frame*, const void*) noexcept nogil
    int xj_write(int, int64_t, const void*, size_t, const void*, size_t) noexcept nogil


cdef enum:
    FRAME = 64
    FRAME_1 = 56            # of a frame of version 1, in which no position is durable
    STEP = 16
    JOURNAL_HEADER = 4096
    JOURNAL_CUT_OFF_AT = 16


cdef uint32_t PADDING = <uint32_t>1 << 31            # in a frame's size
cdef uint32_t MORE = <uint32_t>1 << 30
cdef uint32_t SIZE = (<uint32_t>1 << 30) - 1

# The topic of notes (joint.pxi); no topic has this number. All notes have the offset 0.
cdef uint64_t NOTES_TOPIC = UINT64_MAX
NOTES = NOTES_TOPIC

cdef uint32_t FRAME_MAGIC = 0x024A4C58      # b"XLJ\x02"
cdef uint32_t FRAME_MAGIC_1 = 0x014A4C58

# The mapped file. (_native/journal_file.h has the layout of a frame.)
cdef struct Ring:
    char* memory
    uint64_t capacity


cdef inline size_t _in_steps(size_t size) noexcept nogil:
    return (size + STEP - 1) & ~<size_t>(STEP - 1)


cdef inline size_t _frame_bytes(size_t entry) noexcept nogil:
    return _in_steps(FRAME + entry)


# One entry in the journal, and where it stands.
cdef struct Found:
    uint64_t position
    uint64_t next           # the position behind it
    const char* entry
    size_t size
    uint64_t topic
    uint64_t base_offset
    uint32_t count
    bint more               # the next frame belongs to it


cdef inline xj_frame* _frame_at(const Ring* ring, uint64_t position) noexcept nogil:
    return <xj_frame*>(ring.memory + JOURNAL_HEADER + position % ring.capacity)


cdef inline uint64_t _left(const Ring* ring, uint64_t position) noexcept nogil:
    return ring.capacity - position % ring.capacity


cdef size_t _read_header(const Ring* ring, uint64_t position, xj_frame* frame) noexcept nogil:
    """Copy the header there, and return its size; 0 if its checksum does not hold."""
    cdef uint32_t crc
    if _left(ring, position) < FRAME:       # as for FRAME_1: both are multiples of STEP
        return 0
    xj_copy_header(frame, _frame_at(ring, position))
    if frame.magic == FRAME_MAGIC:
        return FRAME if frame.crc == _crc(<char*>frame, FRAME - 4) else 0
    if frame.magic != FRAME_MAGIC_1:
        return 0
    crc = _crc(<char*>frame, FRAME_1 - 4)
    return FRAME_1 if xj_renew_header(frame) == crc else 0


cdef size_t _lives(const Ring* ring, uint64_t position, uint64_t generation,
                   xj_frame* frame) noexcept nogil:
    """The size of the header of a valid frame at this position, which is copied; 0 if there is
    none."""
    cdef size_t header = _read_header(ring, position, frame)
    return header if (header and frame.position == position and frame.generation == generation
                      and header + (frame.size & SIZE) <= _left(ring, position)) else 0


cdef bint _next(const Ring* ring, uint64_t position, uint64_t generation, uint64_t stop,
                Found* found) noexcept nogil:
    """The next entry from `position` on; False if there is none before `stop`. Skips damaged parts,
    but returns an entry whose frame header alone is damaged."""
    cdef uint64_t after
    cdef xj_frame frame
    cdef size_t header
    while position < stop:
        if _left(ring, position) < FRAME:
            position += _left(ring, position)
            continue
        header = _lives(ring, position, generation, &frame)
        if header == 0:
            after = position + STEP
            while after < stop and not _lives(ring, after, generation, &frame):
                after += STEP
            if _salvage(ring, position, after, found):
                return True
            position = after
        elif frame.size & PADDING:
            position += _left(ring, position)
        else:
            _describe_frame(ring, position, header, &frame, found)
            return True
    return False


cdef void _describe_frame(const Ring* ring, uint64_t position, size_t header,
                          const xj_frame* frame, Found* found) noexcept nogil:
    found.position = position
    found.entry = <char*>_frame_at(ring, position) + header
    found.size = frame.size & SIZE
    found.next = position + _in_steps(header + found.size)
    found.topic, found.base_offset = frame.topic, frame.base_offset
    found.count, found.more = frame.count, frame.size & MORE != 0


cdef bint _is_of_another_time(const Ring* ring, uint64_t position) noexcept nogil:
    """Is there a valid header of another position? Then the frame here was never written, or the
    file is older than the caller assumes; it is not damaged."""
    cdef xj_frame frame
    return _read_header(ring, position, &frame) != 0


cdef bint _salvage(const Ring* ring, uint64_t position, uint64_t after,
                   Found* found) noexcept nogil:
    """Is there an undamaged entry after the damaged header of the frame that ends at `after`?"""
    return (after - position <= _left(ring, position) and not _is_of_another_time(ring, position)
            and (_salvage_behind(ring, position, after, FRAME, found)
                 or _salvage_behind(ring, position, after, FRAME_1, found)))


cdef bint _salvage_behind(const Ring* ring, uint64_t position, uint64_t after, size_t header,
                          Found* found) noexcept nogil:
    cdef size_t room, padding
    cdef Laid laid
    if after - position < header + FOOTER:
        return False
    room = after - position - header
    found.entry = <char*>_frame_at(ring, position) + header
    for padding in range(0, min(STEP, room - FOOTER + 1), 8):
        found.size = room - padding
        if _is_sound(found.entry, found.size) and (
                _read_footer(found.entry, found.size, &laid) == WHOLE):
            found.position, found.next, found.more = position, after, False
            found.topic, found.base_offset = laid.topic, laid.base_offset
            found.count = laid.count
            return True
    return False


# Destroyed parts of the journal: neither a frame's header nor its entry is left.
cdef struct Holes:
    uint64_t size           # bytes of all of them
    uint64_t behind         # the position behind the last one


cdef Holes _find_holes(const Ring* ring, uint64_t position, uint64_t stop,
                       uint64_t generation) noexcept nogil:
    cdef uint64_t after
    cdef xj_frame frame
    cdef Found found
    cdef Holes holes
    cdef size_t header
    holes.size, holes.behind = 0, position
    while position < stop:
        header = _lives(ring, position, generation, &frame)
        if header and frame.size & PADDING or _left(ring, position) < FRAME:
            position += _left(ring, position)
        elif header:
            _describe_frame(ring, position, header, &frame, &found)
            position = found.next
        else:
            after = position + STEP
            while after < stop and not _lives(ring, after, generation, &frame):
                after += STEP
            if not _salvage(ring, position, after, &found) and (
                    not _is_padding(ring, position, after)):
                holes.size += after - position
                holes.behind = after
            position = after
    return holes


cdef bint _is_padding(const Ring* ring, uint64_t position, uint64_t after) noexcept nogil:
    """Is this the rest of the ring, with zeros behind a damaged header?"""
    cdef const char* at = <const char*>_frame_at(ring, position)
    cdef uint64_t i
    if after - position != _left(ring, position):
        return False
    for i in range(FRAME, after - position):
        if at[i]:
            return False
    return True


cdef bint _is_whole(const Found* found, Laid* laid) noexcept nogil:
    """Is the entry undamaged, and the one that its frame announces? Fills in `laid`."""
    return (_lay_out_sound(found.entry, found.size, laid) and laid.topic == found.topic
            and laid.base_offset == found.base_offset and laid.count == found.count)


cdef bint _next_of(const Ring* ring, uint64_t topic, uint64_t offset, uint64_t position,
                   uint64_t stop, uint64_t generation, Found* found) noexcept nogil:
    """The next entry of the topic from `position` on that ends behind `offset`."""
    while _next(ring, position, generation, stop, found):
        if found.topic == topic and found.base_offset + found.count > offset:
            return True
        position = found.next
    return False


# Frames as a recovery judges them. From the position `mark` on, those of a version before `oldest`
# are void; so are those of a version before `newest`, that of the frames before them.
cdef struct Recovery:
    uint64_t start
    uint64_t last           # a position that no frame reaches
    uint64_t generation
    uint64_t mark
    uint64_t oldest
    uint64_t newest


cdef void _begin_recovery(const Ring* ring, Recovery* run, uint64_t position, uint64_t generation,
                          uint64_t mark, uint64_t oldest) noexcept nogil:
    run.start, run.last, run.generation = position, position + ring.capacity, generation
    run.mark, run.oldest, run.newest = mark, oldest, 0


cdef uint64_t _run_end(const Ring* ring, Recovery* run, uint64_t position) noexcept nogil:
    """The end of the unbroken run of valid frames from `position` on."""
    cdef uint64_t whole = position
    cdef xj_frame frame
    cdef Found found
    cdef size_t header
    while position < run.last:
        if _left(ring, position) < FRAME:
            position += _left(ring, position)
            continue
        header = _lives(ring, position, run.generation, &frame)
        if header == 0 or frame.version < run.newest:
            break
        if position >= run.mark and frame.version < run.oldest:
            break
        run.newest = frame.version
        if frame.size & PADDING:
            position += _left(ring, position)
            continue
        _describe_frame(ring, position, header, &frame, &found)
        if not _is_sound(found.entry, found.size):
            break
        position = found.next
        if not found.more:
            whole = position
    return whole


cdef uint64_t _live_end(const Ring* ring, Recovery* run, uint64_t known) noexcept nogil:
    """The end of all valid frames, if those before `known` were durable: whatever is damaged among
    them, the run goes on there."""
    cdef uint64_t end = _run_end(ring, run, run.start)
    cdef xj_frame frame
    if end >= known:
        return end
    while end < known:
        if _lives(ring, end, run.generation, &frame):
            run.newest = max(run.newest, frame.version)
        end += STEP
    return _run_end(ring, run, known)


cdef uint64_t _durable_end(const Ring* ring, uint64_t position, uint64_t last,
                           uint64_t generation) noexcept nogil:
    """Up to where the journal was durable, as the writers of its frames before `last` have noted in
    them: damage before that is not the end of the journal (rule H7).

    It holds even if a frame with this note is void: its writer knew no later position than the tail.
    So no frame of a version that was overwritten, or was never valid, needs to be told apart."""
    cdef uint64_t durable = position
    cdef uint64_t most = position + ring.capacity
    cdef const char* at
    cdef uint64_t size, i
    cdef xj_frame frame
    while position < last:
        at = <const char*>_frame_at(ring, position)
        size = min(_left(ring, position), last - position)
        i = 0
        while i < size:
            if (<const uint32_t*>(at + i))[0] == FRAME_MAGIC and (
                    _lives(ring, position + i, generation, &frame)):
                durable = max(durable, frame.durable)
            i += STEP
        position += size
    return min(durable, most)
