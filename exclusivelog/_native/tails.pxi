# The last offset and publish time of each topic that this process appends to.

# The end of a topic, as of position `at` of the journal.
cdef struct Tail:
    uint64_t topic          # 0: free
    uint64_t next_offset
    int64_t publish_time
    uint64_t at
    uint64_t tails_generation


# A hash table of them with open addressing.
cdef struct Tails:
    Tail* items
    size_t used
    size_t room             # a power of two


cdef void _follow(Tail* tail, const Found* found) noexcept nogil:
    """Update a topic's end by an entry."""
    if found.topic == tail.topic and found.position >= tail.at:
        tail.next_offset = max(tail.next_offset, found.base_offset + found.count)
        tail.publish_time = max(tail.publish_time, _published(found))


cdef int64_t _published(const Found* found) noexcept nogil:
    cdef Laid laid
    if _is_sound(found.entry, found.size) and (
            _read_footer(found.entry, found.size, &laid) == WHOLE):
        return laid.publish_time
    return 0


cdef Tail* _find_tail(Tails* tails, uint64_t topic) noexcept nogil:
    cdef size_t at
    if tails.room == 0:
        return NULL
    at = <size_t>(topic * <uint64_t>0x9E3779B97F4A7C15) & (tails.room - 1)
    while tails.items[at].topic != topic:
        if tails.items[at].topic == 0:
            return NULL
        at = (at + 1) & (tails.room - 1)
    return &tails.items[at]


cdef Tail* _make_tail(Tails* tails, uint64_t topic) noexcept nogil:
    cdef Tail* old = tails.items
    cdef size_t old_room = tails.room
    cdef Tail* found = _find_tail(tails, topic)
    cdef size_t at, i
    if found != NULL:
        return found
    if 2 * tails.used >= tails.room:
        tails.items = <Tail*>calloc(max(64, 2 * old_room), sizeof(Tail))
        if tails.items == NULL:
            tails.items = old
            return NULL
        tails.room = max(64, 2 * old_room)
        tails.used = 0
        for i in range(old_room):
            if old[i].topic:
                _make_tail(tails, old[i].topic)[0] = old[i]
        free(old)
    at = <size_t>(topic * <uint64_t>0x9E3779B97F4A7C15) & (tails.room - 1)
    while tails.items[at].topic:
        at = (at + 1) & (tails.room - 1)
    tails.used += 1
    tails.items[at].topic = topic
    return &tails.items[at]


# ---- the end of a topic in the journal ---------------------------------------------------

# The topic's end according to the frames before the position `reached`.
cdef struct End:
    uint64_t topic          # 0: nothing
    uint64_t generation
    uint64_t last           # the position of its last frame
    uint64_t reached
    uint64_t next_offset    # 0: it has no frame
    int64_t publish_time


cdef bint _is_known(const End* end, uint64_t topic, uint64_t start, uint64_t stop,
                    uint64_t generation) noexcept nogil:
    """Whether it is valid for the frames from `start` on, and can be continued to `stop`."""
    return (end.topic == topic and end.generation == generation and end.next_offset != 0
            and start <= end.last and end.reached <= stop)


cdef void _find_end(const Ring* ring, uint64_t stop, End* end) noexcept nogil:
    """Continue to `stop`. Publish times never decrease (rule G4), so the last entry has the newest
    one; if it is damaged, the one before it counts."""
    cdef uint64_t start = end.reached
    cdef uint64_t position = start
    cdef int64_t published = 0
    cdef uint64_t next_offset = end.next_offset
    cdef Found found, last
    last.next = 0
    while _next_of(ring, end.topic, 0, position, stop, end.generation, &found):
        last = found
        next_offset = max(next_offset, found.base_offset + found.count)
        position = found.next
    end.reached = stop
    if last.next == 0:
        return
    end.last, end.next_offset = last.position, next_offset
    published = _published(&last)
    position = start
    while published == 0 and _next_of(
            ring, end.topic, 0, position, last.position, end.generation, &found):
        end.publish_time = max(end.publish_time, _published(&found))
        position = found.next
    end.publish_time = max(end.publish_time, published)
