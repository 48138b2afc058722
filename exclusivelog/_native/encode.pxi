# Encoding messages as a sealed entry: complete except for offsets and owner, which `stamp` adds.

@cython.final
cdef class SealedEntry:
    """An encoded entry without offsets and owner; `stamp()` adds these."""

    def __init__(self):
        raise TypeError("a SealedEntry is made by an Appender")

    cdef bytes data
    cdef readonly uint32_t count
    cdef uint16_t flags
    cdef uint16_t name_length
    cdef uint8_t version
    cdef uint32_t blank_crc

    def __len__(self):
        return PyBytes_GET_SIZE(self.data)

    def stamp(self, uint64_t topic, uint64_t base_offset, uint64_t epoch, uint64_t session,
              int64_t base_sequence, int64_t publish_time):
        """The entry's bytes with these offsets: the buffer is filled in, not copied."""
        cdef Piece piece
        self.describe(&piece)
        _stamp(&piece, topic, base_offset, epoch, session, base_sequence, publish_time)
        return self.data

    cdef inline void describe(self, Piece* piece) noexcept:
        piece.data = PyBytes_AS_STRING(self.data)
        piece.size = PyBytes_GET_SIZE(self.data)
        piece.count = self.count
        piece.flags = self.flags
        piece.name_length = self.name_length
        piece.version = self.version
        piece.blank_crc = self.blank_crc


# A sealed entry without its Python object, for code without the GIL.
cdef struct Piece:
    char* data
    size_t size
    uint32_t count
    uint16_t flags
    uint16_t name_length
    uint8_t version
    uint32_t blank_crc


cdef void _stamp(const Piece* piece, uint64_t topic, uint64_t base_offset, uint64_t epoch,
                 uint64_t session, int64_t base_sequence, int64_t publish_time) noexcept nogil:
    cdef char* footer = piece.data + piece.size - FOOTER
    (<uint64_t*>(footer + F_TOPIC))[0] = topic
    (<uint64_t*>(footer + F_BASE_OFFSET))[0] = base_offset
    (<uint64_t*>(footer + F_EPOCH))[0] = epoch
    (<uint64_t*>(footer + F_SESSION))[0] = session
    (<int64_t*>(footer + F_BASE_SEQUENCE))[0] = base_sequence
    (<int64_t*>(footer + F_PUBLISH_TIME))[0] = publish_time
    (<uint32_t*>(footer + F_COUNT))[0] = piece.count
    (<uint16_t*>(footer + F_FLAGS))[0] = piece.flags
    (<uint16_t*>(footer + F_NAME_LENGTH))[0] = piece.name_length
    (<uint32_t*>(footer + F_MAGIC))[0] = MAGIC + piece.version * VERSION
    (<uint32_t*>(footer + F_CRC))[0] = 0
    (<uint32_t*>(footer + F_CRC))[0] = piece.blank_crc ^ _sum(footer, FOOTER)


cdef int _put_events(uint8_t* valid, int64_t* times, list events, Py_ssize_t start,
                     Py_ssize_t stop) except -1:
    cdef Py_ssize_t i
    cdef object event
    for i in range(stop - start):
        event = events[start + i]
        if event is not None:
            valid[i >> 3] |= 1 << (i & 7)
            times[i] = event
    return 0


cdef uint32_t _sum_blank(Piece* piece, const Sizes* sizes, const Space* space) noexcept nogil:
    """The checksum of an entry with a zero footer; also writes the checksums of its blocks."""
    cdef size_t plain = xe_plain_size(piece.flags, piece.count, sizes)
    cdef size_t tail = xb_seal(piece.data, plain, piece.flags, piece.count, sizes,
                               space)
    piece.version = PLAIN if tail == 0 else BLOCKED
    return _crc(piece.data + tail, piece.size - tail)


cdef SealedEntry _sealed(bytes data, Py_ssize_t count, uint16_t flags, const Sizes* sizes,
                         const Space* space):
    cdef SealedEntry sealed = SealedEntry.__new__(SealedEntry)
    cdef Piece piece
    sealed.data = data
    sealed.count = count
    sealed.flags = flags
    sealed.name_length = sizes.name
    sealed.describe(&piece)
    if piece.size < WITHOUT_GIL:
        sealed.blank_crc = _sum_blank(&piece, sizes, space)
    else:
        with nogil:
            piece.blank_crc = _sum_blank(&piece, sizes, space)
        sealed.blank_crc = piece.blank_crc
    sealed.version = piece.version
    return sealed


cdef SealedEntry _seal(Strings values, Py_ssize_t start, Py_ssize_t stop, Strings keys,
                       Strings properties, list events, list sequences, bytes name):
    cdef Py_ssize_t count = stop - start
    cdef Py_ssize_t i
    cdef uint16_t flags = 0
    cdef Sizes sizes
    cdef Space to
    cdef size_t total, head
    cdef bytes data
    cdef char* at
    memset(&sizes, 0, sizeof(Sizes))
    sizes.values = values.size(start, stop)
    sizes.name = PyBytes_GET_SIZE(name)
    if values.has_nulls(start, stop):
        flags |= VALUE_NULLS
    if keys is not None:
        flags |= KEYS
        sizes.keys = keys.size(start, stop)
    if events is not None:
        flags |= EVENT_TIMES
    if sequences is not None:
        flags |= SEQUENCES
    if properties is not None:
        flags |= PROPERTIES
        sizes.properties = properties.size(start, stop)
    total = xe_entry_size(flags, count, &sizes)
    if sizes.values > UINT32_MAX or sizes.keys > UINT32_MAX or total > UINT32_MAX:
        raise ValueError("a batch is larger than 4 GiB")

    data = PyBytes_FromStringAndSize(NULL, total)
    at = PyBytes_AS_STRING(data)
    xe_place(at, flags, count, &sizes, &to)
    # Padding and bitmaps must be zero; the value bytes are overwritten at once, so that
    # clearing only the rest is worth its two lines for large entries.
    head = to.values - at
    memset(at, 0, head)
    memset(to.values + sizes.values, 0, total - head - sizes.values)
    values.copy(start, stop, to.value_valid, to.value_offsets, to.values)
    if keys is not None:
        keys.copy(start, stop, to.key_valid, to.key_offsets, to.keys)
    if events is not None:
        _put_events(to.event_valid, to.events, events, start, stop)
    if sequences is not None:
        for i in range(count):
            to.sequences[i] = sequences[start + i]
    if properties is not None:
        properties.copy(start, stop, NULL, to.property_offsets, to.properties)
    memcpy(to.name, PyBytes_AS_STRING(name), sizes.name)
    return _sealed(data, count, flags, &sizes, &to)


cdef SealedEntry _seal_one(bytes value, bytes key, bytes properties, object event_time,
                           bytes name):
    """Encode one message as an entry, as `send` does, without the lists of a batch."""
    cdef uint16_t flags = 0
    cdef Sizes sizes
    cdef Space to
    memset(&sizes, 0, sizeof(Sizes))
    sizes.name = PyBytes_GET_SIZE(name)
    if value is None:
        flags |= VALUE_NULLS
    else:
        sizes.values = PyBytes_GET_SIZE(value)
    if key is not None:
        flags |= KEYS
        sizes.keys = PyBytes_GET_SIZE(key)
    if event_time is not None:
        flags |= EVENT_TIMES
    if properties is not None:
        flags |= PROPERTIES
        sizes.properties = PyBytes_GET_SIZE(properties)
    cdef size_t total = xe_entry_size(flags, 1, &sizes)
    cdef bytes data = PyBytes_FromStringAndSize(NULL, total)
    memset(PyBytes_AS_STRING(data), 0, total)
    xe_place(PyBytes_AS_STRING(data), flags, 1, &sizes, &to)
    to.value_offsets[1] = <uint32_t>sizes.values
    if sizes.values:
        memcpy(to.values, PyBytes_AS_STRING(value), sizes.values)
    if key is not None:
        to.key_valid[0] = 1
        to.key_offsets[1] = <uint32_t>sizes.keys
        memcpy(to.keys, PyBytes_AS_STRING(key), sizes.keys)
    if event_time is not None:
        to.event_valid[0] = 1
        to.events[0] = event_time
    if properties is not None:
        to.property_offsets[1] = <uint32_t>sizes.properties
        memcpy(to.properties, PyBytes_AS_STRING(properties), sizes.properties)
    memcpy(to.name, PyBytes_AS_STRING(name), sizes.name)
    return _sealed(data, 1, flags, &sizes, &to)
