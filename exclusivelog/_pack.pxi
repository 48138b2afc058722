# Packing: many small entries of one topic become few large ones, column by column. What was
# sent one message at a time then takes no more room, and is read no slower, than what was
# sent in batches.
#
# Entries go together as long as one footer fits all: the same epoch, session and producer,
# offsets without a gap. Publish times and sequence ids get columns of their own where they
# differ. What compaction has left of a topic goes together in the same way, with a column of
# gaps.

cdef bint _follows(const Laid* a, const Laid* b, const Laid* first) noexcept nogil:
    """May the entry `b` stand behind `a` in an entry that begins with `first`?"""
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


# What the entries of a run add up to.
cdef struct Sums:
    uint32_t count
    uint16_t flags
    size_t values
    size_t keys
    size_t properties


cdef void _add_up(const Laid* parts, Py_ssize_t n, Sums* sums) noexcept nogil:
    cdef Py_ssize_t i
    cdef const Laid* part
    memset(sums, 0, sizeof(Sums))
    for i in range(n):
        part = &parts[i]
        sums.count += part.count
        sums.flags |= part.flags
        sums.values += part.value_offsets[part.count]
        if part.keys != NULL:
            sums.keys += part.key_offsets[part.count]
        if part.properties != NULL:
            sums.properties += part.property_offsets[part.count]
        if part.publish_time != parts[0].publish_time:
            sums.flags |= TIMES
        if i and part.base_sequence != _last_sequence(&parts[i - 1]) + 1:
            sums.flags |= SEQUENCES
        if i and part.base_offset != _end_of(&parts[i - 1]):
            sums.flags |= GAPS


cdef size_t _packed_size(const Sums* sums, uint16_t name_length) noexcept nogil:
    cdef size_t n = sums.count
    cdef size_t total = _offsets(n) + _padded(sums.values)
    if sums.flags & VALUE_NULLS:
        total += _bits(n)
    if sums.flags & KEYS:
        total += _bits(n) + _offsets(n) + _padded(sums.keys)
    if sums.flags & EVENT_TIMES:
        total += _bits(n) + 8 * n
    if sums.flags & SEQUENCES:
        total += 8 * n
    if sums.flags & PROPERTIES:
        total += _offsets(n) + _padded(sums.properties)
    if sums.flags & TIMES:
        total += _padded(4 * n)
    if sums.flags & GAPS:
        total += _padded(4 * n)
    return total + _padded(name_length) + FOOTER


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


cdef void _pack(const Laid* parts, Py_ssize_t n, const Sums* sums, char* at) noexcept nogil:
    """Write the run as one entry, whole but for its place and checksum, into zeroed memory."""
    cdef size_t count = sums.count
    cdef uint8_t* value_valid = NULL
    cdef uint32_t* value_offsets
    cdef char* values
    cdef uint8_t* key_valid = NULL
    cdef uint32_t* key_offsets = NULL
    cdef char* keys = NULL
    cdef uint8_t* event_valid = NULL
    cdef int64_t* events = NULL
    cdef int64_t* sequences = NULL
    cdef uint32_t* property_offsets = NULL
    cdef char* properties = NULL
    cdef uint32_t* times = NULL
    cdef uint32_t* gaps = NULL
    cdef const Laid* part
    cdef size_t index = 0
    cdef size_t used, k
    cdef uint32_t values_used = 0
    cdef uint32_t keys_used = 0
    cdef uint32_t properties_used = 0
    cdef Py_ssize_t i
    if sums.flags & VALUE_NULLS:
        value_valid = <uint8_t*>at
        at += _bits(count)
    value_offsets = <uint32_t*>at
    at += _offsets(count)
    values = at
    at += _padded(sums.values)
    if sums.flags & KEYS:
        key_valid = <uint8_t*>at
        at += _bits(count)
        key_offsets = <uint32_t*>at
        at += _offsets(count)
        keys = at
        at += _padded(sums.keys)
    if sums.flags & EVENT_TIMES:
        event_valid = <uint8_t*>at
        at += _bits(count)
        events = <int64_t*>at
        at += 8 * count
    if sums.flags & SEQUENCES:
        sequences = <int64_t*>at
        at += 8 * count
    if sums.flags & PROPERTIES:
        property_offsets = <uint32_t*>at
        at += _offsets(count)
        properties = at
        at += _padded(sums.properties)
    if sums.flags & TIMES:
        times = <uint32_t*>at
        at += _padded(4 * count)
    if sums.flags & GAPS:
        gaps = <uint32_t*>at
        at += _padded(4 * count)
    memcpy(at, parts[0].name, parts[0].name_length)
    for i in range(n):
        part = &parts[i]
        k = part.count
        if value_valid != NULL:
            _set_bits(value_valid, index, part.value_valid, k)
        used = part.value_offsets[k]
        memcpy(values + values_used, part.values, used)
        values_used = _shift_offsets(value_offsets + index, part.value_offsets, k, values_used)
        if keys != NULL:
            if part.keys != NULL:
                _set_bits(key_valid, index, part.key_valid, k)
                memcpy(keys + keys_used, part.keys, part.key_offsets[k])
            keys_used = _shift_offsets(key_offsets + index, part.key_offsets, k, keys_used)
        if events != NULL and part.events != NULL:
            _set_bits(event_valid, index, part.event_valid, k)
            memcpy(events + index, part.events, 8 * k)
        if sequences != NULL:
            for used in range(k):
                sequences[index + used] = (
                    part.sequences[used] if part.sequences != NULL
                    else part.base_sequence + <int64_t>used)
        if properties != NULL:
            if part.properties != NULL:
                memcpy(properties + properties_used, part.properties, part.property_offsets[k])
            properties_used = _shift_offsets(
                property_offsets + index, part.property_offsets, k, properties_used)
        if times != NULL:
            for used in range(k):
                times[index + used] = <uint32_t>(part.publish_time - parts[0].publish_time) + (
                    part.times[used] if part.times != NULL else 0)
        if gaps != NULL:
            for used in range(k):
                gaps[index + used] = <uint32_t>(part.base_offset - parts[0].base_offset) + (
                    part.gaps[used] if part.gaps != NULL else <uint32_t>used)
        index += k


cdef bytes _pack_run(const Laid* parts, Py_ssize_t n, const Sums* sums):
    cdef size_t total = _packed_size(sums, parts[0].name_length)
    cdef bytes data = PyBytes_FromStringAndSize(NULL, total)
    cdef Piece piece
    piece.data = PyBytes_AS_STRING(data)
    piece.size = total
    piece.count = sums.count
    piece.flags = sums.flags
    piece.name_length = parts[0].name_length
    memset(piece.data, 0, total)
    _pack(parts, n, sums, piece.data)
    piece.blank_crc = _crc(piece.data, total)
    _stamp(&piece, parts[0].topic, parts[0].base_offset, parts[0].epoch, parts[0].session,
           parts[0].base_sequence, parts[0].publish_time)
    return data


cdef _pack_parts(const Laid* parts, Py_ssize_t n, size_t most, list packed):
    """Append (last offset, entry) pairs of at most `most` bytes, or of one part, to `packed`."""
    cdef Py_ssize_t start = 0
    cdef Py_ssize_t stop
    cdef Sums sums
    while start < n:
        stop = _run_end(parts, start, n, most)
        if stop == start + 1:
            data = parts[start].start[:parts[start].size]
        else:
            _add_up(&parts[start], stop - start, &sums)
            data = _pack_run(&parts[start], stop - start, &sums)
        packed.append((_end_of(&parts[stop - 1]) - 1, data))
        start = stop


cdef Py_ssize_t _run_end(const Laid* parts, Py_ssize_t start, Py_ssize_t n,
                         size_t most) noexcept nogil:
    # The size as it would be with every column: a bound that needs no second pass.
    cdef const Laid* first = &parts[start]
    cdef Py_ssize_t stop = start + 1
    cdef size_t size = first.size + 8 * first.count + 64
    while stop < n and _follows(&parts[stop - 1], &parts[stop], first):
        size += _column_bytes(&parts[stop], first)
        if size > most:
            break
        stop += 1
    return stop


cdef size_t _column_bytes(const Laid* part, const Laid* first) noexcept nogil:
    cdef size_t n = part.count
    cdef size_t size = 12 * n + part.value_offsets[n]  # with a publish time and a gap each
    if (part.flags | first.flags) & VALUE_NULLS:
        size += n / 8 + 1
    if part.keys != NULL:
        size += part.key_offsets[n]
    if (part.flags | first.flags) & KEYS:
        size += 4 * n + n / 8 + 1
    if (part.flags | first.flags) & EVENT_TIMES:
        size += 8 * n + n / 8 + 1
    if (part.flags | first.flags) & SEQUENCES:
        size += 8 * n
    if part.properties != NULL:
        size += part.property_offsets[n]
    if (part.flags | first.flags) & PROPERTIES:
        size += 4 * n
    return size


# ---- keeping some ------------------------------------------------------------------------

# One message of an entry as an entry of its own, without its bytes being copied.
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
    part.epoch, part.session, part.count = entry.epoch, entry.session, 1
    part.base_sequence = (
        entry.sequences[i] if entry.sequences != NULL else entry.base_sequence + i)
    part.publish_time = entry.publish_time + (entry.times[i] if entry.times != NULL else 0)
    part.name, part.name_length = entry.name, entry.name_length
    part.flags = entry.flags & ~(SEQUENCES | TIMES | GAPS)
    part.gaps = single.gap
    single.values[1] = entry.value_offsets[i + 1] - entry.value_offsets[i]
    part.value_offsets, part.values = single.values, entry.values + entry.value_offsets[i]
    if entry.value_valid != NULL:
        single.value_valid = _bit(entry.value_valid, i)
        part.value_valid = &single.value_valid
    if entry.keys != NULL:
        single.key_valid = _bit(entry.key_valid, i)
        single.keys[1] = entry.key_offsets[i + 1] - entry.key_offsets[i]
        part.key_valid, part.key_offsets = &single.key_valid, single.keys
        part.keys = entry.keys + entry.key_offsets[i]
    if entry.events != NULL:
        single.event_valid = _bit(entry.event_valid, i)
        part.event_valid, part.events = &single.event_valid, entry.events + i
    if entry.properties != NULL:
        single.properties[1] = entry.property_offsets[i + 1] - entry.property_offsets[i]
        part.property_offsets = single.properties
        part.properties = entry.properties + entry.property_offsets[i]


def keep(Entry entry not None, list indices not None, uint64_t topic):
    """The entry with these of its messages alone, at their own offsets, as one of `topic`:
    (last offset, bytes). `indices` rise."""
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
            if not 0 <= <int64_t>indices[i] < entry.count:
                raise IndexError(f"the entry has {entry.count} messages, none at {indices[i]}")
            _single_out(entry, indices[i], topic, &singles[i], &parts[i])
        _add_up(parts, n, &sums)
        sums.flags |= GAPS  # also where there is none: it says that there may be some behind it
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
