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
        uint32_t count
        uint32_t crc
    int xj_identify(int, xj_file*) noexcept nogil
    bint xj_is(int, const xj_file*) noexcept nogil
    int64_t xj_wall_ms() noexcept nogil
    void xj_copy_header(xj_frame*, const void*) noexcept nogil
    int xj_write(int, int64_t, const void*, size_t, const void*, size_t) noexcept nogil


cdef enum:
    FRAME = 56
    STEP = 16
    JOURNAL_HEADER = 4096


cdef uint32_t PADDING = <uint32_t>1 << 31            # in a frame's size
cdef uint32_t MORE = <uint32_t>1 << 30
cdef uint32_t SIZE = (<uint32_t>1 << 30) - 1

cdef uint32_t FRAME_MAGIC = 0x014A4C58      # b"XLJ\x01"

# The mapped file. (_native/journal_file.h has the layout of a frame.)
cdef struct Ring:
    char* memory
    uint64_t capacity


cdef inline size_t _frame_bytes(size_t entry) noexcept nogil:
    return (FRAME + entry + STEP - 1) & ~<size_t>(STEP - 1)


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


cdef bint _lives(const Ring* ring, uint64_t position, uint64_t generation,
                 xj_frame* frame) noexcept nogil:
    """Whether there is a valid frame at this position. Copies its header."""
    cdef uint64_t left = _left(ring, position)
    if left < FRAME:
        return False
    xj_copy_header(frame, _frame_at(ring, position))
    return (frame.magic == FRAME_MAGIC and frame.position == position
            and frame.generation == generation
            and FRAME + <uint64_t>(frame.size & SIZE) <= left
            and frame.crc == _crc(<char*>frame, FRAME - 4))


cdef bint _next(const Ring* ring, uint64_t position, uint64_t generation, uint64_t stop,
                Found* found) noexcept nogil:
    """The next entry from `position` on; False if there is none before `stop`. Skips damaged parts,
    but returns an entry whose frame header alone is damaged."""
    cdef uint64_t after
    cdef xj_frame frame
    while position < stop:
        if _left(ring, position) < FRAME:
            position += _left(ring, position)
        elif not _lives(ring, position, generation, &frame):
            after = position + STEP
            while after < stop and not _lives(ring, after, generation, &frame):
                after += STEP
            if _salvage(ring, position, after, found):
                return True
            position = after
        elif frame.size & PADDING:
            position += _left(ring, position)
        else:
            _describe_frame(ring, position, &frame, found)
            return True
    return False


cdef void _describe_frame(const Ring* ring, uint64_t position, const xj_frame* frame,
                          Found* found) noexcept nogil:
    found.position = position
    found.entry = <char*>_frame_at(ring, position) + FRAME
    found.size = frame.size & SIZE
    found.next = position + _frame_bytes(found.size)
    found.topic, found.base_offset = frame.topic, frame.base_offset
    found.count, found.more = frame.count, frame.size & MORE != 0


cdef bint _is_of_another_time(const Ring* ring, uint64_t position) noexcept nogil:
    """Is there a valid header of another position? Then the frame here was never written, or the
    file is older than the caller assumes; it is not damaged."""
    cdef xj_frame frame
    xj_copy_header(&frame, _frame_at(ring, position))
    return frame.magic == FRAME_MAGIC and frame.crc == _crc(<char*>&frame, FRAME - 4)


cdef bint _salvage(const Ring* ring, uint64_t position, uint64_t after,
                   Found* found) noexcept nogil:
    """Is there an undamaged entry after the damaged header of the frame that ends at `after`?"""
    cdef size_t room, padding
    cdef Laid laid
    if after - position < FRAME + FOOTER or after - position > _left(ring, position):
        return False
    if _is_of_another_time(ring, position):
        return False
    room = after - position - FRAME
    found.entry = <char*>_frame_at(ring, position) + FRAME
    for padding in range(0, min(STEP, room - FOOTER + 1), 8):
        found.size = room - padding
        if _is_sound(found.entry, found.size) and (
                _read_footer(found.entry, found.size, &laid) == WHOLE):
            found.position, found.next, found.more = position, after, False
            found.topic, found.base_offset = laid.topic, laid.base_offset
            found.count = laid.count
            return True
    return False


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


cdef uint64_t _live_end(const Ring* ring, uint64_t position, uint64_t generation, uint64_t mark,
                        uint64_t oldest, uint64_t* newest=NULL) noexcept nogil:
    """The end of the unbroken run of valid frames from `position` on; see `Journal.live_end`.
    `newest` gets a version that no frame of it exceeds."""
    cdef uint64_t whole = position
    cdef uint64_t last = position + ring.capacity
    cdef uint64_t version = 0
    cdef xj_frame frame
    cdef Found found
    while position < last:
        if _left(ring, position) < FRAME:
            position += _left(ring, position)
            continue
        if not _lives(ring, position, generation, &frame) or frame.version < version:
            break
        if position >= mark and frame.version < oldest:
            break
        version = frame.version
        if newest != NULL:
            newest[0] = version
        if frame.size & PADDING:
            position += _left(ring, position)
            continue
        _describe_frame(ring, position, &frame, &found)
        if not _is_sound(found.entry, found.size):
            break
        position = found.next
        if not found.more:
            whole = position
    return whole
