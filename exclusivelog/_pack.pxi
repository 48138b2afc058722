# Packing: many small entries of one topic become few large ones, column by column. What was
# sent one message at a time then takes no more room, and is read no slower, than what was
# sent in batches.
#
# Entries go together as long as one footer fits all: the same epoch, session and producer,
# offsets without a gap. Publish times and sequence ids get columns of their own where they
# differ.

cdef bint _follows(const Laid* a, const Laid* b, const Laid* first) noexcept nogil:
    """May the entry `b` stand behind `a` in an entry that begins with `first`?"""
    return (a.base_offset + a.count == b.base_offset and a.session == b.session
            and a.epoch == b.epoch and a.name_length == b.name_length
            and memcmp(a.name, b.name, a.name_length) == 0
            and b.publish_time - first.publish_time < (<int64_t>1 << 31)
            and <uint64_t>(b.base_offset - first.base_offset) + b.count < (<uint64_t>1 << 31))


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
        packed.append((parts[stop - 1].base_offset + parts[stop - 1].count - 1, data))
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
    cdef size_t size = 8 * n + part.value_offsets[n]  # with a publish time each
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
