# Reading a topic's frames from the journal, packed as a checkpoint packs them: then messages that
# were just sent one by one are read about as fast as a batch.
#
# All frames are copied before they are decoded, as a writer may overwrite the journal meanwhile.

cdef struct Copied:
    size_t at               # in the copies
    size_t size
    uint64_t base_offset
    uint64_t next           # the position behind its frame
    uint32_t count


cdef struct Copies:
    char* memory
    size_t used
    size_t room
    Copied* frames
    Py_ssize_t count
    Py_ssize_t slots


cdef bint _make_room(Copies* copies, size_t size) noexcept nogil:
    cdef char* memory
    cdef Copied* frames
    if copies.used + size > copies.room:
        memory = <char*>realloc(copies.memory, 2 * copies.room + size)
        if memory == NULL:
            return False
        copies.memory, copies.room = memory, 2 * copies.room + size
    if copies.count == copies.slots:
        frames = <Copied*>realloc(copies.frames, (2 * copies.slots + 8) * sizeof(Copied))
        if frames == NULL:
            return False
        copies.frames, copies.slots = frames, 2 * copies.slots + 8
    return True


cdef bint _copy_frames(const Ring* ring, uint64_t topic, uint64_t offset, uint64_t position,
                       uint64_t stop, uint64_t generation, size_t most,
                       Copies* copies) noexcept nogil:
    """`most` bytes of entries, or a little more. False: there is no memory for them."""
    cdef Found found
    cdef Copied* frame
    while copies.used < most and _next_of(ring, topic, offset, position, stop, generation, &found):
        if not _make_room(copies, found.size + 8):
            return False
        frame = &copies.frames[copies.count]
        frame.at, frame.size, frame.next = copies.used, found.size, found.next
        frame.base_offset, frame.count = found.base_offset, found.count
        memcpy(copies.memory + copies.used, found.entry, found.size)
        copies.used += (found.size + 7) & ~<size_t>7  # also behind a damaged one
        copies.count += 1
        position, offset = found.next, found.base_offset + found.count  # none at a used offset
    return True


cdef bint _is_whole_copy(const Copies* copies, Py_ssize_t i, uint64_t topic, Laid* laid) noexcept nogil:
    """Does the entry match its frame? Fills in `laid`."""
    cdef const Copied* frame = &copies.frames[i]
    cdef const char* entry = copies.memory + frame.at
    return (_lay_out_sound(entry, frame.size, laid)
            and laid.topic == topic and laid.base_offset == frame.base_offset
            and laid.count == frame.count)


cdef list _pack_copies(const Copies* copies, uint64_t topic, Laid* parts):
    # A damaged entry stays separate, so that reading it reports the damage.
    cdef list packed = []
    cdef Py_ssize_t start = 0
    cdef Py_ssize_t stop, sound, length
    cdef const Copied* first
    cdef const Copied* last
    cdef Sums sums
    for sound in range(copies.count):
        if not _is_whole_copy(copies, sound, topic, &parts[sound]):
            parts[sound].count = 0
    while start < copies.count:
        stop = start
        while stop < copies.count and parts[stop].count:
            stop += 1
        first = &copies.frames[start]
        length = 1
        if stop - start > 1:
            length = _run_length(&parts[start], stop - start, copies.used, &sums)
        last = &copies.frames[start + length - 1]
        packed.append((
            last.base_offset + last.count - 1,
            (copies.memory + first.at)[:first.size] if length == 1
            else _pack_run(&parts[start], length, &sums),
            last.next))
        start += length
    return packed


cdef list _collect_packed(Journal journal, uint64_t topic, uint64_t offset, uint64_t start,
                          uint64_t stop, uint64_t generation, size_t most):
    """As `Journal.collect`."""
    cdef Copies copies
    cdef Laid* parts = NULL
    cdef bint enough
    memset(&copies, 0, sizeof(Copies))
    try:
        journal._enter()
        with nogil:
            enough = _copy_frames(
                &journal.ring, topic, offset, start, stop, generation, most, &copies)
        journal.busy -= 1
        journal._check_not_overwritten(start, generation)
        parts = <Laid*>calloc(max(copies.count, 1), sizeof(Laid))
        if not enough or parts == NULL:
            raise MemoryError
        return _pack_copies(&copies, topic, parts)
    finally:
        free(parts)
        free(copies.memory)
        free(copies.frames)
