# Compressing entries. (entry.pxi decompresses them; _native/sections.h has the layout.)
#
# The libraries are registered by `use_codecs`.

cdef object _codec = None       # (number of a method) -> (its name, a function that decompresses)


def use_codecs(find not None):
    """Set the function that finds methods: `find(number)` returns (name, decompress), or raises
    ValueError for an unknown number. `decompress(data, size)` returns that many bytes, or raises
    ValueError."""
    global _codec
    _codec = find


cdef object _find_codec(uint8_t method):
    if _codec is None:
        raise ValueError(f"it is compressed by method {method}, and none is known")
    return _codec(method)[1]


cdef str _method_name(uint8_t method):
    return str(_codec(method)[0])


cdef extern from "_native/ahead.h":
    uint32_t XA_FREE
    uint32_t XA_TAKEN
    uint32_t XA_MADE
    size_t XA_MOST
    bint xa_load() noexcept nogil
    void xa_request(Job*, size_t, size_t) noexcept nogil
    uint32_t xa_try(Job*, size_t) noexcept nogil
    uint32_t xa_await(Job*, size_t) noexcept nogil
    void xa_withdraw(Job*) noexcept nogil


cdef int _lz4 = 0               # the number of the method that ahead.h decompresses; 0: none


def use_system_lz4(uint8_t method):
    """Decompress entries of this method by the system's liblz4 from now on, without the function that
    `use_codecs` finds; 0: none. False if there is no such library."""
    global _lz4
    _lz4 = method if xa_load() else 0
    return _lz4 != 0


def compression_of(data not None):
    """(number of the method, topic id, bytes of its sections) of a compressed entry; None of any other
    data. Checks no checksum."""
    cdef Laid laid
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if (_read_footer(<const char*>view.buf, view.len, &laid) != WHOLE
                or laid.version != COMPRESSED or xe_find(&laid) != WHOLE):
            return None
        return laid.method, laid.topic, laid.sections
    finally:
        PyBuffer_Release(&view)


cdef void _measure(const Laid* laid, Sizes* sizes) noexcept nogil:
    memset(sizes, 0, sizeof(Sizes))
    sizes.name = laid.name_length
    sizes.values = laid.value_offsets[laid.count]
    if laid.keys != NULL:
        sizes.keys = laid.key_offsets[laid.count]
    if laid.properties != NULL:
        sizes.properties = laid.property_offsets[laid.count]


def compress(bytes entry not None, uint8_t method, deflate not None):
    """The entry with each chunk compressed by `deflate`; unchanged if that saves less than an
    eighth, or if it is damaged, too large, or compressed already."""
    cdef const char* start = PyBytes_AS_STRING(entry)
    cdef size_t size = PyBytes_GET_SIZE(entry)
    cdef size_t sections, at, length, total
    cdef Laid laid
    cdef Sizes sizes
    cdef list chunks = []
    cdef bytes chunk, deflated
    if not _lay_out_sound(start, size, &laid):
        return entry
    _measure(&laid, &sizes)
    sections = xe_plain_size(laid.flags, laid.count, &sizes) - FOOTER - xe_padded(sizes.name)
    if sections > MOST_COMPRESSED:
        return entry
    total = 0
    for at in range(0, sections, <size_t>1 << CHUNK_BITS):
        length = min(sections - at, <size_t>1 << CHUNK_BITS)
        chunk = entry[at:at + length]
        deflated = deflate(chunk)
        if len(deflated) < length:
            chunk = deflated
        chunks.append(chunk)
        total += PyBytes_GET_SIZE(chunk)
    total = (xe_padded(total) + xe_padded(sizes.name) + PyList_GET_SIZE(chunks) * sizeof(Chunk)
             + sizeof(Summary) + FOOTER)
    if total > size - size // 8:
        return entry
    return _assemble(&laid, &sizes, chunks, total, method)


cdef bytes _assemble(const Laid* laid, const Sizes* sizes, list chunks, size_t total, uint8_t method):
    """The compressed entry of these chunks, which has `total` bytes."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, total)
    cdef char* start = PyBytes_AS_STRING(data)
    cdef char* at = start
    cdef char* footer = start + total - FOOTER
    cdef char* tail
    cdef bytes chunk
    cdef Chunk header
    cdef Summary summary
    memset(start, 0, total)
    for chunk in chunks:
        memcpy(at, PyBytes_AS_STRING(chunk), PyBytes_GET_SIZE(chunk))
        at += PyBytes_GET_SIZE(chunk)
    tail = start + xe_padded(at - start)
    memcpy(tail, laid.name, sizes.name)
    at = tail + xe_padded(sizes.name)
    for chunk in chunks:
        header.size = <uint32_t>PyBytes_GET_SIZE(chunk)
        header.sum = _crc(PyBytes_AS_STRING(chunk), header.size)
        memcpy(at, &header, sizeof(header))
        at += sizeof(header)
    summary.values, summary.keys = <uint32_t>sizes.values, <uint32_t>sizes.keys
    summary.properties = <uint32_t>sizes.properties
    summary.last_gap, summary.last_time = laid.last_gap, laid.last_time
    summary.compression = method | <uint32_t>CHUNK_BITS << 8
    memcpy(at, &summary, sizeof(summary))
    memcpy(footer, laid.start + laid.size - FOOTER, FOOTER)
    (<uint32_t*>(footer + F_MAGIC))[0] = MAGIC + COMPRESSED * VERSION
    (<uint32_t*>(footer + F_CRC))[0] = 0
    (<uint32_t*>(footer + F_CRC))[0] = _crc(tail, start + total - tail)
    return data
