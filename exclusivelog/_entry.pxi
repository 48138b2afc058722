# The entry: a run of consecutive messages of one producer in one topic. Columnar, so
# that Arrow can wrap a column where it lies; little-endian; every section starts at a
# multiple of 8. A section is there only if its flag says so:
#
#   section           size                       there when
#   value validity    ceil(n/8)                  VALUE_NULLS   (bit clear = tombstone)
#   value offsets     4 * (n + 1), from 0        always
#   values            value offsets[n]           always
#   key validity      ceil(n/8)                  KEYS
#   key offsets       4 * (n + 1), from 0        KEYS
#   keys              key offsets[n]             KEYS
#   event validity    ceil(n/8)                  EVENT_TIMES
#   event times       8 * n, ms since 1970       EVENT_TIMES
#   sequence ids      8 * n                      SEQUENCES     (else base_sequence + i)
#   property offsets  4 * (n + 1), from 0        PROPERTIES
#   properties        property offsets[n]        PROPERTIES    (msgpack maps; empty = none)
#   publish times     4 * n, ms after the first  TIMES         (else all the footer's)
#   gaps              4 * n, offsets after the   GAPS          (else 0, 1, 2, ...: only a
#                     first, rising                            compacted entry lacks some)
#   producer name     name_length, UTF-8         always
#   footer            64                         always
#
# The footer stands last because only it depends on where the entry lands in the log:
# the sections are written and summed before the critical section, and inside it only
# these 64 bytes are filled in.
#
#   offset  size  field
cdef enum:
    F_TOPIC = 0                             # u64
    F_BASE_OFFSET = F_TOPIC + 8             # u64
    F_EPOCH = F_BASE_OFFSET + 8             # u64
    F_SESSION = F_EPOCH + 8                 # u64
    F_BASE_SEQUENCE = F_SESSION + 8         # i64
    F_PUBLISH_TIME = F_BASE_SEQUENCE + 8    # i64, ms since 1970, of the first message
    F_COUNT = F_PUBLISH_TIME + 8            # u32
    F_FLAGS = F_COUNT + 4                   # u16
    F_NAME_LENGTH = F_FLAGS + 2             # u16
    F_MAGIC = F_NAME_LENGTH + 2             # u32, b"XLE" and the version
    F_CRC = F_MAGIC + 4                     # u32, CRC-32C of the entry with this field 0
    FOOTER = F_CRC + 4

cdef enum:
    VALUE_NULLS = 1
    KEYS = 2
    EVENT_TIMES = 4
    SEQUENCES = 8
    PROPERTIES = 16
    TIMES = 32
    GAPS = 64
    KNOWN_FLAGS = 127

cdef uint32_t MAGIC = 0x01454C58            # b"XLE\x01"

FOOTER_BYTES = FOOTER


# ---- checksum ----------------------------------------------------------------------------
# A CRC is linear: crc(a ^ b) = crc(a) ^ sum(b), where sum() is the CRC without its initial
# and final inversion, and leading zeros add nothing to sum(). So the checksum of an entry is
# the one taken while its footer was still zero, XOR the sum of the footer alone.

cdef uint32_t[256] _crc_table


cdef void _fill_crc_table() noexcept:
    cdef uint32_t i, crc
    cdef int bit
    for i in range(256):
        crc = i
        for bit in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        _crc_table[i] = crc


_fill_crc_table()


cdef uint32_t _table_sum(uint32_t crc, const char* data, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(size):
        crc = (crc >> 8) ^ _crc_table[(crc ^ <uint8_t>data[i]) & 0xFF]
    return crc


# The sum itself is google-crc32c's. Its C function is called directly where it can be found,
# without the GIL and with no Python call for each piece.
ctypedef uint32_t (*_ExtendCrc)(uint32_t, const uint8_t*, size_t) noexcept nogil

cdef _ExtendCrc _extend = NULL


def _find_extend():
    import ctypes

    import google_crc32c
    library = ctypes.CDLL(google_crc32c._crc32c.__file__)
    return ctypes.cast(library.crc32c_extend, ctypes.c_void_p).value


cdef _use_the_library_directly():
    global _extend
    try:
        _extend = <_ExtendCrc><size_t>_find_extend()
    except (ImportError, OSError, AttributeError):
        return
    if _extend(0, <const uint8_t*>b"123456789", 9) != 0xE3069283:
        _extend = NULL


_use_the_library_directly()


cdef uint32_t _crc(const char* data, Py_ssize_t size) noexcept nogil:
    if _extend == NULL:
        return ~_table_sum(UINT32_MAX, data, size)
    return _extend(0, <const uint8_t*>data, size)


cdef uint32_t _sum(const char* data, Py_ssize_t size) noexcept nogil:
    if _extend == NULL:
        return _table_sum(0, data, size)
    return ~_extend(UINT32_MAX, <const uint8_t*>data, size)


# Of an entry in a mapped file the memory comes in while its predecessor is summed: the
# processor's own prefetching ends where a page ends.
cdef enum:
    PIECE = 4096

cdef extern from "_native/prefetch.h":
    void xl_fetch(const char*, size_t) noexcept nogil


cdef uint32_t _sum_large(const char* start, Py_ssize_t size) noexcept nogil:
    cdef uint32_t crc = 0
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t piece
    while at < size:
        piece = min(PIECE, size - at)
        xl_fetch(start + at + piece, min(PIECE, size - at - piece))
        crc = _extend(crc, <const uint8_t*>start + at, piece)
        at += piece
    return crc


cdef uint32_t _sum_all(bytes_or_view, const char* start, Py_ssize_t size) except? 0:
    cdef uint32_t crc
    if _extend == NULL:
        return _crc32c(bytes(bytes_or_view))
    if size < PIECE:
        return _extend(0, <const uint8_t*>start, size)
    with nogil:
        crc = _sum_large(start, size)
    return crc


# ---- columns of byte strings -------------------------------------------------------------

cdef class Strings:
    cdef readonly Py_ssize_t count
    cdef readonly size_t largest

    cdef Py_ssize_t cut(self, Py_ssize_t start, size_t max_bytes):
        """The end of the longest run from `start` that holds at most `max_bytes` (at least one)."""
        raise TypeError("Strings is abstract")

    cdef size_t size(self, Py_ssize_t start, Py_ssize_t stop):
        raise TypeError("Strings is abstract")

    cdef bint has_nulls(self, Py_ssize_t start, Py_ssize_t stop):
        raise TypeError("Strings is abstract")

    cdef void copy(self, Py_ssize_t start, Py_ssize_t stop,
                   uint8_t* valid, uint32_t* offsets, char* data):
        pass


@cython.final
cdef class ListStrings(Strings):
    """A list of `bytes` or None."""

    cdef list items

    def __cinit__(self, list items not None):
        cdef object item
        for item in items:
            if item is None:
                continue
            if not PyBytes_CheckExact(item):
                raise TypeError(f"a message takes bytes or None, not {type(item).__name__}")
            self.largest = max(self.largest, <size_t>PyBytes_GET_SIZE(item))
        self.items = items
        self.count = PyList_GET_SIZE(items)

    cdef Py_ssize_t cut(self, Py_ssize_t start, size_t max_bytes):
        cdef size_t used = 0
        cdef Py_ssize_t i
        cdef PyObject* item
        for i in range(start, self.count):
            item = PyList_GET_ITEM(self.items, i)
            if item != <PyObject*>None:
                used += PyBytes_GET_SIZE(<object>item)
            if used > max_bytes and i > start:
                return i
        return self.count

    cdef size_t size(self, Py_ssize_t start, Py_ssize_t stop):
        cdef size_t used = 0
        cdef Py_ssize_t i
        cdef PyObject* item
        for i in range(start, stop):
            item = PyList_GET_ITEM(self.items, i)
            if item != <PyObject*>None:
                used += PyBytes_GET_SIZE(<object>item)
        return used

    cdef bint has_nulls(self, Py_ssize_t start, Py_ssize_t stop):
        cdef Py_ssize_t i
        for i in range(start, stop):
            if PyList_GET_ITEM(self.items, i) == <PyObject*>None:
                return True
        return False

    cdef void copy(self, Py_ssize_t start, Py_ssize_t stop,
                   uint8_t* valid, uint32_t* offsets, char* data):
        cdef uint32_t at = 0
        cdef Py_ssize_t i, length
        cdef PyObject* item
        offsets[0] = 0
        for i in range(start, stop):
            item = PyList_GET_ITEM(self.items, i)
            if item != <PyObject*>None:
                length = PyBytes_GET_SIZE(<object>item)
                memcpy(data + at, PyBytes_AS_STRING(<object>item), length)
                at += length
                if valid != NULL:
                    valid[(i - start) >> 3] |= 1 << ((i - start) & 7)
            offsets[i - start + 1] = at


@cython.final
cdef class ArrowStrings(Strings):
    """An Arrow binary column: validity bitmap (or None), int32 offsets, data (or None)."""

    cdef Py_buffer valid_view
    cdef Py_buffer offsets_view
    cdef Py_buffer data_view
    cdef const uint8_t* valid
    cdef const int32_t* offsets
    cdef const char* data
    cdef Py_ssize_t shift

    def __cinit__(self, valid, offsets, data, Py_ssize_t shift, Py_ssize_t count):
        self.shift = shift
        self.count = count
        if valid is not None:
            PyObject_GetBuffer(valid, &self.valid_view, PyBUF_SIMPLE)
            self.valid = <const uint8_t*>self.valid_view.buf
        PyObject_GetBuffer(offsets, &self.offsets_view, PyBUF_SIMPLE)
        self.offsets = <const int32_t*>self.offsets_view.buf + shift
        if data is not None:
            PyObject_GetBuffer(data, &self.data_view, PyBUF_SIMPLE)
            self.data = <const char*>self.data_view.buf
        self._check(count, shift)

    def __dealloc__(self):
        PyBuffer_Release(&self.valid_view)
        PyBuffer_Release(&self.offsets_view)
        PyBuffer_Release(&self.data_view)

    cdef _check(self, Py_ssize_t count, Py_ssize_t shift):
        # A hand-made array may lie about its buffers; the copy must stay inside them.
        cdef Py_ssize_t i
        if count < 0 or shift < 0 or (shift + count + 1) * 4 > self.offsets_view.len:
            raise ValueError("values: the arrow array's offsets are shorter than the array")
        if self.valid != NULL and (shift + count + 7) // 8 > self.valid_view.len:
            raise ValueError("values: the arrow array's validity is shorter than the array")
        if self.offsets[0] < 0 or self.offsets[count] > self.data_view.len:
            raise ValueError("values: the arrow array's offsets point outside its data")
        for i in range(count):
            if self.offsets[i + 1] < self.offsets[i]:
                raise ValueError("values: the arrow array's offsets decrease")
            self.largest = max(self.largest, <size_t>(self.offsets[i + 1] - self.offsets[i]))

    cdef bint _is_null(self, Py_ssize_t i):
        i += self.shift
        return self.valid != NULL and not (self.valid[i >> 3] >> (i & 7)) & 1

    cdef Py_ssize_t cut(self, Py_ssize_t start, size_t max_bytes):
        cdef Py_ssize_t i
        for i in range(start, self.count):
            if <size_t>(self.offsets[i + 1] - self.offsets[start]) > max_bytes and i > start:
                return i
        return self.count

    cdef size_t size(self, Py_ssize_t start, Py_ssize_t stop):
        return self.offsets[stop] - self.offsets[start]

    cdef bint has_nulls(self, Py_ssize_t start, Py_ssize_t stop):
        cdef Py_ssize_t i
        if self.valid != NULL:
            for i in range(start, stop):
                if self._is_null(i):
                    return True
        return False

    cdef void copy(self, Py_ssize_t start, Py_ssize_t stop,
                   uint8_t* valid, uint32_t* offsets, char* data):
        # A null may lie over bytes of its own; they are carried along, unseen.
        cdef Py_ssize_t i
        cdef int32_t first = self.offsets[start]
        for i in range(start, stop + 1):
            offsets[i - start] = self.offsets[i] - first
        if self.offsets[stop] > first:
            memcpy(data, self.data + first, self.offsets[stop] - first)
        if valid != NULL:
            for i in range(start, stop):
                if not self._is_null(i):
                    valid[(i - start) >> 3] |= 1 << ((i - start) & 7)


# ---- encode ------------------------------------------------------------------------------

cdef inline size_t _padded(size_t size) noexcept nogil:
    return (size + 7) & ~<size_t>7


cdef inline size_t _bits(Py_ssize_t count) noexcept nogil:
    return _padded((count + 7) // 8)


cdef inline size_t _offsets(Py_ssize_t count) noexcept nogil:
    return _padded(4 * (count + 1))


@cython.final
cdef class SealedEntry:
    """An encoded entry that has no place in the log yet; `stamp()` gives it one."""

    def __init__(self):
        raise TypeError("a SealedEntry is made by an Appender")

    cdef bytes data
    cdef readonly uint32_t count
    cdef uint16_t flags
    cdef uint16_t name_length
    cdef uint32_t blank_crc

    def __len__(self):
        return PyBytes_GET_SIZE(self.data)

    def stamp(self, uint64_t topic, uint64_t base_offset, uint64_t epoch, uint64_t session,
              int64_t base_sequence, int64_t publish_time):
        """The entry's bytes at this place: the buffer is filled in, not copied."""
        cdef Piece piece
        self.describe(&piece)
        _stamp(&piece, topic, base_offset, epoch, session, base_sequence, publish_time)
        return self.data

    cdef void describe(self, Piece* piece):
        piece.data = PyBytes_AS_STRING(self.data)
        piece.size = PyBytes_GET_SIZE(self.data)
        piece.count = self.count
        piece.flags = self.flags
        piece.name_length = self.name_length
        piece.blank_crc = self.blank_crc


# A sealed entry without its Python object, for code without the GIL.
cdef struct Piece:
    char* data
    size_t size
    uint32_t count
    uint16_t flags
    uint16_t name_length
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
    (<uint32_t*>(footer + F_MAGIC))[0] = MAGIC
    (<uint32_t*>(footer + F_CRC))[0] = 0
    (<uint32_t*>(footer + F_CRC))[0] = piece.blank_crc ^ _sum(footer, FOOTER)


cdef char* _put_strings(char* at, Strings column, Py_ssize_t start, Py_ssize_t stop,
                        bint with_validity, size_t size):
    cdef Py_ssize_t count = stop - start
    cdef uint8_t* valid = NULL
    cdef uint32_t* offsets
    if with_validity:
        valid = <uint8_t*>at
        at += _bits(count)
    offsets = <uint32_t*>at
    at += _offsets(count)
    column.copy(start, stop, valid, offsets, at)
    return at + _padded(size)


cdef char* _put_events(char* at, list events, Py_ssize_t start, Py_ssize_t stop) except NULL:
    cdef uint8_t* valid = <uint8_t*>at
    cdef int64_t* times = <int64_t*>(at + _bits(stop - start))
    cdef Py_ssize_t i
    cdef object event
    for i in range(stop - start):
        event = events[start + i]
        if event is not None:
            valid[i >> 3] |= 1 << (i & 7)
            times[i] = event
    return <char*>(times + (stop - start))


cdef SealedEntry _seal(Strings values, Py_ssize_t start, Py_ssize_t stop, Strings keys,
                       Strings properties, list events, list sequences, bytes name):
    cdef Py_ssize_t count = stop - start
    cdef Py_ssize_t i
    cdef uint16_t flags = 0
    cdef size_t value_bytes = values.size(start, stop)
    cdef size_t key_bytes = 0
    cdef size_t property_bytes = 0
    cdef size_t total = _offsets(count) + _padded(value_bytes)
    cdef bytes data
    cdef char* at
    cdef SealedEntry sealed
    if values.has_nulls(start, stop):
        flags |= VALUE_NULLS
        total += _bits(count)
    if keys is not None:
        flags |= KEYS
        key_bytes = keys.size(start, stop)
        total += _bits(count) + _offsets(count) + _padded(key_bytes)
    if events is not None:
        flags |= EVENT_TIMES
        total += _bits(count) + 8 * count
    if sequences is not None:
        flags |= SEQUENCES
        total += 8 * count
    if properties is not None:
        flags |= PROPERTIES
        property_bytes = properties.size(start, stop)
        total += _offsets(count) + _padded(property_bytes)
    total += _padded(PyBytes_GET_SIZE(name)) + FOOTER
    if value_bytes > UINT32_MAX or key_bytes > UINT32_MAX or total > UINT32_MAX:
        raise ValueError("a batch is larger than 4 GiB")

    data = PyBytes_FromStringAndSize(NULL, total)
    at = PyBytes_AS_STRING(data)
    # Padding and bitmaps must be zero; the value bytes are overwritten at once, so that
    # clearing only the rest is worth its two lines for large entries.
    cdef size_t head = (_bits(count) if flags & VALUE_NULLS else 0) + _offsets(count)
    memset(at, 0, head)
    memset(at + head + value_bytes, 0, total - head - value_bytes)
    at = _put_strings(at, values, start, stop, flags & VALUE_NULLS, value_bytes)
    if keys is not None:
        at = _put_strings(at, keys, start, stop, True, key_bytes)
    if events is not None:
        at = _put_events(at, events, start, stop)
    if sequences is not None:
        for i in range(count):
            (<int64_t*>at)[i] = sequences[start + i]
        at += 8 * count
    if properties is not None:
        at = _put_strings(at, properties, start, stop, False, property_bytes)
    memcpy(at, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))

    sealed = SealedEntry.__new__(SealedEntry)
    sealed.data = data
    sealed.count = count
    sealed.flags = flags
    sealed.name_length = PyBytes_GET_SIZE(name)
    sealed.blank_crc = _sum_all(data, PyBytes_AS_STRING(data), total)
    return sealed


cdef SealedEntry _seal_one(bytes value, bytes key, bytes properties, object event_time,
                           bytes name):
    """An entry of one message: what `send` makes, without the lists that a batch needs."""
    cdef uint32_t value_size = 0 if value is None else PyBytes_GET_SIZE(value)
    cdef uint32_t key_size = 0 if key is None else PyBytes_GET_SIZE(key)
    cdef uint32_t property_size = 0 if properties is None else PyBytes_GET_SIZE(properties)
    cdef uint32_t name_size = PyBytes_GET_SIZE(name)
    cdef uint16_t flags = 0
    cdef size_t total = 8 + _padded(value_size) + _padded(name_size) + FOOTER
    cdef char* at
    cdef SealedEntry sealed
    if value is None:
        flags |= VALUE_NULLS
        total += 8
    if key is not None:
        flags |= KEYS
        total += 16 + _padded(key_size)
    if event_time is not None:
        flags |= EVENT_TIMES
        total += 16
    if properties is not None:
        flags |= PROPERTIES
        total += 8 + _padded(property_size)
    cdef bytes data = PyBytes_FromStringAndSize(NULL, total)
    cdef char* start = PyBytes_AS_STRING(data)
    memset(start, 0, total)
    at = start
    if value is None:
        at += 8
    (<uint32_t*>at)[1] = value_size
    at += 8
    if value_size:
        memcpy(at, PyBytes_AS_STRING(value), value_size)
        at += _padded(value_size)
    if key is not None:
        at[0] = 1
        (<uint32_t*>(at + 8))[1] = key_size
        memcpy(at + 16, PyBytes_AS_STRING(key), key_size)
        at += 16 + _padded(key_size)
    if event_time is not None:
        at[0] = 1
        (<int64_t*>(at + 8))[0] = event_time
        at += 16
    if properties is not None:
        (<uint32_t*>at)[1] = property_size
        memcpy(at + 8, PyBytes_AS_STRING(properties), property_size)
        at += 8 + _padded(property_size)
    memcpy(at, PyBytes_AS_STRING(name), name_size)

    sealed = SealedEntry.__new__(SealedEntry)
    sealed.data = data
    sealed.count = 1
    sealed.flags = flags
    sealed.name_length = name_size
    sealed.blank_crc = _crc(start, total) if total < PIECE else _sum_all(data, start, total)
    return sealed


# ---- decode ------------------------------------------------------------------------------

# Where everything in an entry lies. Filled in without the GIL, and never past the entry.
cdef struct Laid:
    const char* start
    size_t size
    uint64_t topic
    uint64_t base_offset
    uint64_t epoch
    uint64_t session
    int64_t base_sequence
    int64_t publish_time
    uint32_t count
    uint16_t flags
    uint16_t name_length
    const uint8_t* value_valid
    const uint32_t* value_offsets
    const char* values
    const uint8_t* key_valid
    const uint32_t* key_offsets
    const char* keys
    const uint8_t* event_valid
    const int64_t* events
    const int64_t* sequences
    const uint32_t* property_offsets
    const char* properties
    const uint32_t* times
    const uint32_t* gaps
    const char* name


cdef inline uint64_t _end_of(const Laid* laid) noexcept nogil:
    """The offset behind the last message."""
    if laid.gaps != NULL:
        return laid.base_offset + laid.gaps[laid.count - 1] + 1
    return laid.base_offset + laid.count


cdef enum:
    WHOLE = 0
    NO_ENTRY = 1
    NO_FOOTER = 2
    UNKNOWN_SECTIONS = 3
    TOO_LONG = 4
    NOT_RISING = 5
    LEFT_OVER = 6
    NO_MESSAGES = 7

_DAMAGE = {
    NO_ENTRY: "its size is no entry's",
    NO_FOOTER: "it does not end as an entry of format 1 does",
    UNKNOWN_SECTIONS: "it has sections that this version does not know",
    TOO_LONG: "its sections are longer than the entry",
    NOT_RISING: "its offsets do not rise from 0",
    LEFT_OVER: "it has bytes that belong to no section",
    NO_MESSAGES: "it has no messages",
}


cdef struct Walk:
    const char* at
    const char* end
    int damage


cdef const char* _take(Walk* walk, size_t size) noexcept nogil:
    cdef const char* here = walk.at
    size = _padded(size)
    if size > <size_t>(walk.end - here):
        walk.damage = TOO_LONG
        return NULL
    walk.at = here + size
    return here


cdef const uint32_t* _take_offsets(Walk* walk, uint32_t count) noexcept nogil:
    cdef const uint32_t* offsets = <const uint32_t*>_take(walk, 4 * (<size_t>count + 1))
    cdef uint32_t i
    cdef bint rising
    if offsets == NULL:
        return NULL
    rising = offsets[0] == 0
    for i in range(count):
        rising &= offsets[i] <= offsets[i + 1]
    if not rising:
        walk.damage = NOT_RISING
        return NULL
    return offsets


cdef const uint32_t* _take_gaps(Walk* walk, uint32_t count) noexcept nogil:
    cdef const uint32_t* gaps = <const uint32_t*>_take(walk, 4 * <size_t>count)
    cdef uint32_t i
    cdef bint rising = count > 0
    if gaps == NULL:
        return NULL
    rising = rising and gaps[0] == 0
    for i in range(1, count):
        rising &= gaps[i - 1] < gaps[i]
    if not rising:
        walk.damage = NOT_RISING
        return NULL
    return gaps


cdef int _read_footer(const char* start, size_t size, Laid* laid) noexcept nogil:
    cdef const char* footer = start + size - FOOTER
    memset(laid, 0, sizeof(Laid))
    if size < FOOTER or size & 7:
        return NO_ENTRY
    laid.start = start
    laid.size = size
    laid.topic = (<uint64_t*>(footer + F_TOPIC))[0]
    laid.base_offset = (<uint64_t*>(footer + F_BASE_OFFSET))[0]
    laid.epoch = (<uint64_t*>(footer + F_EPOCH))[0]
    laid.session = (<uint64_t*>(footer + F_SESSION))[0]
    laid.base_sequence = (<int64_t*>(footer + F_BASE_SEQUENCE))[0]
    laid.publish_time = (<int64_t*>(footer + F_PUBLISH_TIME))[0]
    laid.count = (<uint32_t*>(footer + F_COUNT))[0]
    laid.flags = (<uint16_t*>(footer + F_FLAGS))[0]
    laid.name_length = (<uint16_t*>(footer + F_NAME_LENGTH))[0]
    return WHOLE if (<uint32_t*>(footer + F_MAGIC))[0] == MAGIC else NO_FOOTER


cdef int _lay_out(const char* start, size_t size, Laid* laid) noexcept nogil:
    """Find the sections of an entry whose checksum holds."""
    cdef Walk walk
    cdef int damage = _read_footer(start, size, laid)
    cdef size_t n = laid.count
    if damage != WHOLE:
        return damage
    if laid.flags & ~KNOWN_FLAGS:
        return UNKNOWN_SECTIONS
    if n == 0:  # there is no last one to ask for its offset or sequence id
        return NO_MESSAGES
    walk.at, walk.end, walk.damage = start, start + size - FOOTER, WHOLE
    if laid.flags & VALUE_NULLS:
        laid.value_valid = <const uint8_t*>_take(&walk, (n + 7) // 8)
        if walk.damage: return walk.damage
    laid.value_offsets = _take_offsets(&walk, n)
    if walk.damage: return walk.damage
    laid.values = _take(&walk, laid.value_offsets[n])
    if walk.damage: return walk.damage
    if laid.flags & KEYS:
        laid.key_valid = <const uint8_t*>_take(&walk, (n + 7) // 8)
        if walk.damage: return walk.damage
        laid.key_offsets = _take_offsets(&walk, n)
        if walk.damage: return walk.damage
        laid.keys = _take(&walk, laid.key_offsets[n])
        if walk.damage: return walk.damage
    if laid.flags & EVENT_TIMES:
        laid.event_valid = <const uint8_t*>_take(&walk, (n + 7) // 8)
        if walk.damage: return walk.damage
        laid.events = <const int64_t*>_take(&walk, 8 * n)
    if laid.flags & SEQUENCES:
        laid.sequences = <const int64_t*>_take(&walk, 8 * n)
    if walk.damage: return walk.damage
    if laid.flags & PROPERTIES:
        laid.property_offsets = _take_offsets(&walk, n)
        if walk.damage: return walk.damage
        laid.properties = _take(&walk, laid.property_offsets[n])
    if laid.flags & TIMES:
        laid.times = <const uint32_t*>_take(&walk, 4 * n)
    if laid.flags & GAPS:
        laid.gaps = _take_gaps(&walk, n)
        if walk.damage: return walk.damage
    laid.name = _take(&walk, laid.name_length)
    if walk.damage: return walk.damage
    return WHOLE if walk.at == walk.end else LEFT_OVER


cdef _adopt(Entry entry, const Laid* laid):
    entry.start = laid.start
    entry.topic = laid.topic
    entry.base_offset = laid.base_offset
    entry.epoch = laid.epoch
    entry.session = laid.session
    entry.base_sequence = laid.base_sequence
    entry.publish_time = laid.publish_time
    entry.count = laid.count
    entry.flags = laid.flags
    entry.value_valid = laid.value_valid
    entry.value_offsets = laid.value_offsets
    entry.values = laid.values
    entry.key_valid = laid.key_valid
    entry.key_offsets = laid.key_offsets
    entry.keys = laid.keys
    entry.event_valid = laid.event_valid
    entry.events = laid.events
    entry.sequences = laid.sequences
    entry.property_offsets = laid.property_offsets
    entry.properties = laid.properties
    entry.times = laid.times
    entry.gaps = laid.gaps
    entry.end = _end_of(laid)
    entry.name = laid.name
    entry.name_length = laid.name_length


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Entry:
    """A decoded entry. Raises ValueError, saying what is wrong, on any damage.

    `data` is bytes or a buffer like them, and is not copied. `loads` is applied to every
    value that is read (None: bytes as they are).
    """

    def __cinit__(self, object data not None, object loads=None):
        PyObject_GetBuffer(data, &self.view, PyBUF_SIMPLE)
        cdef Py_ssize_t size = self.view.len
        cdef const char* start = <const char*>self.view.buf
        cdef const char* footer = start + size - FOOTER
        cdef Laid laid
        cdef int damage = _read_footer(start, size, &laid)
        if damage != WHOLE:
            raise ValueError(_DAMAGE[damage])
        if _sum_all(data, start, size) ^ _sum(footer + F_CRC, 4) != (<uint32_t*>(footer + F_CRC))[0]:
            raise ValueError("its checksum does not hold")
        damage = _lay_out(start, size, &laid)
        if damage != WHOLE:
            raise ValueError(_DAMAGE[damage])
        self.data = data
        self.nbytes = size
        self.loads = loads
        _adopt(self, &laid)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    @property
    def has_publish_times(self):
        return self.times != NULL

    @property
    def last_publish_time(self):
        if self.times == NULL:
            return self.publish_time
        return self.publish_time + self.times[self.count - 1]

    def first_published_at(self, int64_t time):
        """The offset of the first message published at or after `time`, in ms; the offset
        behind the last one if there is none."""
        cdef uint32_t i = 0
        while i < self.count and self.publish_time + (
                self.times[i] if self.times != NULL else 0) < time:
            i += 1
        return self.end if i == self.count else _offset_at(self, i)

    @property
    def producer_name(self):
        if self._name is None:
            self._name = self.name[:self.name_length].decode("utf-8")
        return self._name

    @property
    def has_properties(self):
        return self.properties != NULL

    def message(self, uint32_t index):
        """The message at `index` within the entry."""
        if index >= self.count:
            raise IndexError(f"the entry has {self.count} messages, none at {index}")
        return _message(self, index)

    def column(self, str name not None):
        """Where the column `name` lies in `data`, for Arrow to wrap: (position of its validity
        or -1, of its offsets, of its data), or None if it is absent."""
        if name == "value":
            return (
                -1 if self.value_valid == NULL else <const char*>self.value_valid - self.start,
                <const char*>self.value_offsets - self.start, self.values - self.start)
        if name == "key":
            if self.keys == NULL:
                return None
            return (<const char*>self.key_valid - self.start,
                    <const char*>self.key_offsets - self.start, self.keys - self.start)
        if name == "event_time":
            if self.events == NULL:
                return None
            return (<const char*>self.event_valid - self.start, -1,
                    <const char*>self.events - self.start)
        raise ValueError(f"name={name!r}: it takes value, key or event_time")

    def numbers(self, str name not None, uint32_t start=0):
        """The column `name` from message `start` on as bytes of int64."""
        if start > self.count:
            raise IndexError(f"the entry has {self.count} messages, none at {start}")
        cdef uint32_t i
        cdef uint32_t n = self.count - start
        cdef int64_t base
        cdef bytes out = PyBytes_FromStringAndSize(NULL, 8 * <Py_ssize_t>n)
        cdef int64_t* numbers = <int64_t*>PyBytes_AS_STRING(out)
        if name == "event_time" and self.events != NULL:
            for i in range(n):
                numbers[i] = self.events[start + i] * 1000
            return out
        if name == "sequence_id" and self.sequences != NULL:
            memcpy(numbers, self.sequences + start, 8 * <size_t>n)
            return out
        if name == "sequence_id":
            base = self.base_sequence + start
        elif name == "publish_time":
            for i in range(n):
                numbers[i] = 1000 * (self.publish_time + (
                    self.times[start + i] if self.times != NULL else 0))
            return out
        elif name == "offset" and self.gaps != NULL:
            for i in range(n):
                numbers[i] = self.base_offset + self.gaps[start + i]
            return out
        elif name == "offset":
            base = self.base_offset + start
        else:
            raise ValueError(f"name={name!r} is no column of numbers here")
        for i in range(n):
            numbers[i] = base + i
        return out


def ends_as(data, uint64_t topic, uint64_t last):
    """Is this the topic's entry with that last offset? Reads no more than it must."""
    cdef Laid laid
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if _read_footer(<const char*>view.buf, view.len, &laid) != WHOLE or laid.topic != topic:
            return False
        if laid.flags & GAPS and _lay_out(<const char*>view.buf, view.len, &laid) != WHOLE:
            return False
        return _end_of(&laid) == last + 1
    finally:
        PyBuffer_Release(&view)


cdef inline uint64_t _offset_at(Entry entry, uint32_t index) noexcept:
    if entry.gaps == NULL:
        return entry.base_offset + index
    return entry.base_offset + entry.gaps[index]


cdef uint32_t _index_of(Entry entry, uint64_t offset) noexcept:
    """The first message at that offset or behind it; there must be one."""
    cdef uint32_t low = 0
    cdef uint32_t high = entry.count
    cdef uint32_t middle
    if offset <= entry.base_offset:
        return 0
    if entry.gaps == NULL:
        return <uint32_t>(offset - entry.base_offset)
    while low < high:
        middle = (low + high) >> 1
        if entry.base_offset + entry.gaps[middle] < offset:
            low = middle + 1
        else:
            high = middle
    return low


cdef inline Message _message(Entry entry, uint32_t index):
    cdef Message message = Message.__new__(Message)
    message.entry = entry
    message.index = index
    return message


cdef inline bint _bit(const uint8_t* bits, uint32_t i) noexcept nogil:
    return (bits[i >> 3] >> (i & 7)) & 1


cdef inline object _raw_value(Entry entry, uint32_t index):
    cdef uint32_t at
    if entry.value_valid != NULL and not _bit(entry.value_valid, index):
        return None
    at = entry.value_offsets[index]
    return PyBytes_FromStringAndSize(entry.values + at, entry.value_offsets[index + 1] - at)


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Message:
    """One message. Its parts are decoded when they are asked for.

    `offset` is its place in the topic; `epoch` the reign it was written in (rule B8);
    `value` bytes, or None for a tombstone; `key` bytes or None; `properties` a dict of
    strings; `publish_time` and `event_time` ms since 1970 UTC (`event_time` may be None);
    `producer_name` and `sequence_id` say who sent it, and as its which (rules G1, G2).
    """

    def __init__(self):
        raise TypeError("a Message is made by a Reader")

    @property
    def offset(self):
        return _offset_at(self.entry, self.index)

    @property
    def epoch(self):
        return self.entry.epoch

    @property
    def session(self):
        return self.entry.session

    @property
    def publish_time(self):
        if self.entry.times == NULL:
            return self.entry.publish_time
        return self.entry.publish_time + self.entry.times[self.index]

    @property
    def producer_name(self):
        return self.entry.producer_name

    @property
    def raw_value(self):
        return _raw_value(self.entry, self.index)

    @property
    def value(self):
        value = _raw_value(self.entry, self.index)
        if value is None or self.entry.loads is None:
            return value
        return self.entry.loads(value)

    @property
    def key(self):
        cdef Entry entry = self.entry
        cdef uint32_t at
        if entry.keys == NULL or not _bit(entry.key_valid, self.index):
            return None
        at = entry.key_offsets[self.index]
        return PyBytes_FromStringAndSize(entry.keys + at, entry.key_offsets[self.index + 1] - at)

    @property
    def properties(self):
        cdef Entry entry = self.entry
        cdef uint32_t at
        if entry.properties == NULL:
            return {}
        at = entry.property_offsets[self.index]
        if entry.property_offsets[self.index + 1] == at:
            return {}
        return _msgpack.unpackb(
            entry.properties[at:entry.property_offsets[self.index + 1]])

    @property
    def event_time(self):
        cdef Entry entry = self.entry
        if entry.events == NULL or not _bit(entry.event_valid, self.index):
            return None
        return entry.events[self.index]

    @property
    def sequence_id(self):
        cdef Entry entry = self.entry
        if entry.sequences != NULL:
            return entry.sequences[self.index]
        return entry.base_sequence + self.index

    def __repr__(self):
        return (f"<Message offset={self.offset} epoch={self.epoch} key={self.key!r} "
                f"value={self.value!r} producer={self.producer_name!r}>")


# ---- scan --------------------------------------------------------------------------------

cdef inline Message _take_from(Cursor cursor, Entry entry):
    cdef Message message
    if entry.gaps == NULL:
        message = _message(entry, <uint32_t>(cursor.position - entry.base_offset))
        cursor.position += 1
        return message
    message = _message(entry, _index_of(entry, cursor.position))
    cursor.position = _offset_at(entry, message.index) + 1
    return message


cdef class Cursor:
    """Walks entries message by message. A subclass gives `refill()`: the entries from
    `position` on, as many as it likes, or an empty list at the end of the log."""

    def __cinit__(self, *args, **kwargs):
        self.queue = []

    def refill(self):
        raise TypeError("Cursor is abstract")

    def move_to(self, uint64_t position):
        """Go on at this offset; forgets what was read ahead."""
        self.position = position
        self.entry = None
        self.queue = []
        self.queued = 0

    cdef bint advance(self) except -1:
        # The next entry that holds a message at or after the position.
        while True:
            if self.queued >= PyList_GET_SIZE(self.queue):
                self.entry = None
                self.queue = []
                entries = self.refill()     # a signal handler may use the cursor meanwhile
                self.queue, self.queued = entries, 0
                if not entries:
                    return False
            self.entry = self.queue[self.queued]
            self.queue[self.queued] = None
            self.queued += 1
            if self.position < self.entry.base_offset:
                self.position = self.entry.base_offset
            if self.position < self.entry.end:
                return True

    cdef Message take(self):
        """The message at the position, which moves on; None at the end."""
        if self.entry is None or self.position >= self.entry.end:
            if not self.advance():
                return None
        return _take_from(self, self.entry)

    def take_ready(self):
        """The next message if it has been read ahead, else None."""
        if self.entry is None or self.position >= self.entry.end:
            return None
        return self.take()

    def take_one(self):
        """The next message, or None at the end."""
        return self.take()

    def take_many(self, Py_ssize_t most):
        """Up to `most` next messages."""
        cdef list messages = []
        cdef Message message
        while PyList_GET_SIZE(messages) < most:
            try:
                message = self.take()
            except Exception:
                if not messages:
                    raise
                break  # what was taken must not be lost; the next call meets it again
            if message is None:
                break
            messages.append(message)
        return messages

    def take_entry(self, Py_ssize_t most=PY_SSIZE_T_MAX):
        """The next entry and the index in it of the message at the position, which moves
        behind it; None at the end, or if the entry has more than `most` bytes."""
        cdef Entry entry
        if self.entry is None or self.position >= self.entry.end:
            if not self.advance():
                return None
        entry = self.entry
        if entry.nbytes > most:
            return None
        index = _index_of(entry, self.position)
        self.position = entry.end
        return entry, index

    def scan(self, uint64_t end):
        """An iterator over the messages before the offset `end`."""
        cdef Scan scan = Scan.__new__(Scan)
        scan.cursor = self
        scan.end = end
        return scan


@cython.final
cdef class Scan:
    """What `for message in reader` walks."""

    def __init__(self):
        raise TypeError("a Scan is made by a Cursor")

    cdef Cursor cursor
    cdef uint64_t end

    def __iter__(self):
        return self

    def __next__(self):
        cdef Cursor cursor = self.cursor
        cdef Entry entry = cursor.entry
        cdef Message message
        if cursor.position >= self.end:
            raise StopIteration
        if entry is not None and cursor.position < entry.end:
            return _take_from(cursor, entry)
        message = cursor.take()
        if message is None:
            raise StopIteration
        return message
