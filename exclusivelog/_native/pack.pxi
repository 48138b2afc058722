# Packing: combines many small entries of one topic into few large ones, column by column. Then
# messages that were sent one at a time take as little space, and are read as fast, as batches.
#
# Entries are combined if one footer fits all: the same epoch, session and producer, and offsets
# without a gap. Publish times and sequence ids get columns of their own if they differ. Entries of
# a compacted view are combined in the same way, with a column of gaps.

cdef bint _follows(const Laid* a, const Laid* b, const Laid* first) noexcept nogil:
    """May the entry `b` follow `a` in an entry that begins with `first`?"""
    if _end_of(a) > b.base_offset or (a.gaps == NULL and _end_of(a) != b.base_offset):
        return False
    return (a.session == b.session
            and a.epoch == b.epoch and a.name_length == b.name_length
            and memcmp(a.name, b.name, a.name_length) == 0
            and b.publish_time - first.publish_time < (<int64_t>1 << 31)
            and _end_of(b) - first.base_offset < (<uint64_t>1 << 31))


cdef int64_t _last_sequence(const Laid* part) noexcept nogil:
    if part.sequences != NULL:
        return part.sequences[part.count - 1]
    return part.base_sequence + part.count - 1


# The sums over the entries of a run.
cdef struct Sums:
    uint32_t count
    uint16_t flags
    Sizes sizes


cdef void _add_up(const Laid* parts, Py_ssize_t i, Sums* sums) noexcept nogil:
    """Add the part at `i` to the sums of those before it; the first one begins them."""
    cdef const Laid* part = &parts[i]
    if i == 0:
        memset(sums, 0, sizeof(Sums))
        sums.sizes.name = part.name_length
    else:
        if part.base_sequence != _last_sequence(&parts[i - 1]) + 1:
            sums.flags |= SEQUENCES
        if part.base_offset != _end_of(&parts[i - 1]):
            sums.flags |= GAPS
    if part.publish_time != parts[0].publish_time:
        sums.flags |= TIMES
    sums.count += part.count
    sums.flags |= part.flags
    sums.sizes.values += part.value_offsets[part.count]
    if part.keys != NULL:
        sums.sizes.keys += part.key_offsets[part.count]
    if part.properties != NULL:
        sums.sizes.properties += part.property_offsets[part.count]


cdef inline void _set_bits(uint8_t* bits, size_t at, const uint8_t* given, size_t n) noexcept nogil:
    # `given` NULL: all of them are set.
    cdef size_t i
    for i in range(n):
        if given == NULL or (given[i >> 3] >> (i & 7)) & 1:
            bits[(at + i) >> 3] |= 1 << ((at + i) & 7)


cdef inline uint32_t _shift_offsets(uint32_t* to, const uint32_t* given, size_t n,
                                    uint32_t by) noexcept nogil:
    cdef size_t i
    for i in range(n):
        to[i + 1] = by + (given[i + 1] if given != NULL else 0)
    return to[n] if n else by


cdef void _pack(const Laid* parts, Py_ssize_t n, const Space* to) noexcept nogil:
    """Write the run as one entry into zeroed memory, without topic and checksum."""
    cdef const Laid* part
    cdef size_t index = 0
    cdef size_t k, j
    cdef uint32_t values = 0
    cdef uint32_t keys = 0
    cdef uint32_t properties = 0
    cdef Py_ssize_t i
    memcpy(to.name, parts[0].name, parts[0].name_length)
    for i in range(n):
        part = &parts[i]
        k = part.count
        if to.value_valid != NULL:
            _set_bits(to.value_valid, index, part.value_valid, k)
        memcpy(to.values + values, part.values, part.value_offsets[k])
        values = _shift_offsets(to.value_offsets + index, part.value_offsets, k, values)
        if to.keys != NULL:
            if part.keys != NULL:
                _set_bits(to.key_valid, index, part.key_valid, k)
                memcpy(to.keys + keys, part.keys, part.key_offsets[k])
            keys = _shift_offsets(to.key_offsets + index, part.key_offsets, k, keys)
        if to.events != NULL and part.events != NULL:
            _set_bits(to.event_valid, index, part.event_valid, k)
            memcpy(to.events + index, part.events, 8 * k)
        if to.sequences != NULL:
            for j in range(k):
                to.sequences[index + j] = (
                    part.sequences[j] if part.sequences != NULL
                    else part.base_sequence + <int64_t>j)
        if to.properties != NULL:
            if part.properties != NULL:
                memcpy(to.properties + properties, part.properties, part.property_offsets[k])
            properties = _shift_offsets(
                to.property_offsets + index, part.property_offsets, k, properties)
        if to.times != NULL:
            for j in range(k):
                to.times[index + j] = <uint32_t>(part.publish_time - parts[0].publish_time) + (
                    part.times[j] if part.times != NULL else 0)
        if to.gaps != NULL:
            for j in range(k):
                to.gaps[index + j] = <uint32_t>(part.base_offset - parts[0].base_offset) + (
                    part.gaps[j] if part.gaps != NULL else <uint32_t>j)
        index += k


cdef bytes _pack_run(const Laid* parts, Py_ssize_t n, const Sums* sums):
    cdef size_t total = xe_entry_size(sums.flags, sums.count, &sums.sizes)
    cdef bytes data = PyBytes_FromStringAndSize(NULL, total)
    cdef Space space
    cdef Piece piece
    piece.data = PyBytes_AS_STRING(data)
    piece.size = total
    piece.count = sums.count
    piece.flags = sums.flags
    piece.name_length = parts[0].name_length
    memset(piece.data, 0, total)
    xe_place(piece.data, sums.flags, sums.count, &sums.sizes, &space)
    _pack(parts, n, &space)
    piece.blank_crc = _sum_blank(&piece, &sums.sizes, &space)
    _stamp(&piece, parts[0].topic, parts[0].base_offset, parts[0].epoch, parts[0].session,
           parts[0].base_sequence, parts[0].publish_time)
    return data


cdef _pack_parts(const Laid* parts, Py_ssize_t n, size_t most, list packed):
    """Append (last offset, entry) pairs of at most `most` bytes, or of one part, to `packed`."""
    cdef Py_ssize_t start = 0
    cdef Py_ssize_t stop
    cdef Sums sums
    while start < n:
        stop = start + _run_length(&parts[start], n - start, most, &sums)
        if stop == start + 1 and parts[start].chunk == 0:
            data = parts[start].start[:parts[start].size]
        else:
            data = _pack_run(&parts[start], stop - start, &sums)
        packed.append((_end_of(&parts[stop - 1]) - 1, data))
        start = stop


cdef Py_ssize_t _run_length(const Laid* parts, Py_ssize_t n, size_t most,
                            Sums* sums) noexcept nogil:
    """How many of the parts fit into an entry of at most `most` bytes, at least one; computes their
    sums."""
    cdef Sums more
    cdef Py_ssize_t length = 1
    _add_up(parts, 0, sums)
    while length < n and _follows(&parts[length - 1], &parts[length], parts):
        more = sums[0]
        _add_up(parts, length, &more)
        if xe_entry_size(more.flags, more.count, &more.sizes) > most:
            break
        sums[0] = more
        length += 1
    return length


# ---- keeping some messages ---------------------------------------------------------------

# One message of an entry as an entry of its own, without copying its bytes.
cdef struct _Single:
    uint32_t[2] values
    uint32_t[2] keys
    uint32_t[2] properties
    uint32_t[1] gap
    uint8_t value_valid
    uint8_t key_valid
    uint8_t event_valid


cdef void _single_out(Entry entry, uint32_t i, uint64_t topic, _Single* single, Laid* part):
    part.topic, part.base_offset = topic, _offset_at(entry, i)
    part.epoch, part.session, part.count = entry.laid.epoch, entry.laid.session, 1
    part.base_sequence = (
        entry.laid.sequences[i] if entry.laid.sequences != NULL else entry.laid.base_sequence + i)
    part.publish_time = entry.laid.publish_time + (
        entry.laid.times[i] if entry.laid.times != NULL else 0)
    part.name, part.name_length = entry.laid.name, entry.laid.name_length
    part.flags = entry.laid.flags & ~(SEQUENCES | TIMES | GAPS)
    part.gaps = single.gap
    single.values[1] = entry.laid.value_offsets[i + 1] - entry.laid.value_offsets[i]
    part.value_offsets, part.values = single.values, entry.laid.values + entry.laid.value_offsets[i]
    if entry.laid.value_valid != NULL:
        single.value_valid = _bit(entry.laid.value_valid, i)
        part.value_valid = &single.value_valid
    if entry.laid.keys != NULL:
        single.key_valid = _bit(entry.laid.key_valid, i)
        single.keys[1] = entry.laid.key_offsets[i + 1] - entry.laid.key_offsets[i]
        part.key_valid, part.key_offsets = &single.key_valid, single.keys
        part.keys = entry.laid.keys + entry.laid.key_offsets[i]
    if entry.laid.events != NULL:
        single.event_valid = _bit(entry.laid.event_valid, i)
        part.event_valid, part.events = &single.event_valid, entry.laid.events + i
    if entry.laid.properties != NULL:
        single.properties[1] = entry.laid.property_offsets[i + 1] - entry.laid.property_offsets[i]
        part.property_offsets = single.properties
        part.properties = entry.laid.properties + entry.laid.property_offsets[i]


def keep(Entry entry not None, list indices not None, uint64_t topic):
    """(last offset, bytes) of an entry of `topic` with only these messages, at their own offsets.
    `indices` must rise."""
    cdef Py_ssize_t n = PyList_GET_SIZE(indices)
    cdef Laid* parts = <Laid*>calloc(max(n, 1), sizeof(Laid))
    cdef _Single* singles = <_Single*>calloc(max(n, 1), sizeof(_Single))
    cdef list packed = []
    cdef Py_ssize_t i
    cdef Sums sums
    try:
        if parts == NULL or singles == NULL:
            raise MemoryError
        if n == 0:
            raise ValueError("indices: an entry has one message at least")
        for i in range(n):
            if not 0 <= <int64_t>indices[i] < entry.laid.count:
                raise IndexError(f"the entry has {entry.laid.count} messages, none at {indices[i]}")
            if not entry.verify(indices[i], 1):
                raise ValueError(_UNSOUND)
            _single_out(entry, indices[i], topic, &singles[i], &parts[i])
            _add_up(parts, i, &sums)
        sums.flags |= GAPS  # set even without gaps, because the next entry may have some
        return _end_of(&parts[n - 1]) - 1, _pack_run(parts, n, &sums)
    finally:
        free(parts)
        free(singles)


def pack_kept(list entries not None, size_t most):
    """Entries from `keep`, in order, as fewer and larger ones: (last offset, bytes) pairs."""
    cdef Py_ssize_t n = PyList_GET_SIZE(entries)
    cdef Laid* parts = <Laid*>calloc(max(n, 1), sizeof(Laid))
    cdef list packed = []
    cdef Py_ssize_t i
    cdef bytes data
    try:
        if parts == NULL:
            raise MemoryError
        for i in range(n):
            data = entries[i]
            damage = _lay_out(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), &parts[i])
            if damage != WHOLE:
                raise ValueError(_DAMAGE[damage])
        _pack_parts(parts, n, most, packed)
        return packed
    finally:
        free(parts)


# ---- decompressing -----------------------------------------------------------------------


def decompressed(data not None):
    """The uncompressed bytes of an entry. ValueError if it is damaged."""
    cdef Entry entry = Entry(data)
    cdef Sums sums
    entry.check()
    if entry.laid.chunk == 0:
        return bytes(data)
    _add_up(&entry.laid, 0, &sums)
    return _pack_run(&entry.laid, 1, &sums)
