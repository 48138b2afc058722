# The changes of a checkpoint to the tables, for many topics at a time. The caller reads and writes
# the rows, with one call of LMDB for many rows.
#
# It processes topics with intact rows; all others are in `others`, for the caller to process one by
# one.

cdef extern from *:
    uint64_t _swapped "__builtin_bswap64"(uint64_t) noexcept nogil


cdef bytes _key(uint64_t topic):
    cdef uint64_t big = _swapped(topic)
    return PyBytes_FromStringAndSize(<char*>&big, 8)


cdef bytes _pair(uint64_t first, uint64_t second):
    cdef uint64_t[2] big
    big[0], big[1] = _swapped(first), _swapped(second)
    return PyBytes_FromStringAndSize(<char*>big, 16)


cdef bytes _row_of(list found, Py_ssize_t* at, bytes key):
    """The row with this key, or None. `found` has (key, row) pairs in the order of calls; `at` is
    how far it was read."""
    cdef tuple item
    if at[0] < PyList_GET_SIZE(found):
        item = <tuple>found[at[0]]
        if item[0] == key:
            at[0] += 1
            return item[1]
    return None


def topic_keys(list bundles not None):
    """The keys of the topics' rows."""
    cdef Bundle bundle
    return [_key(bundle.topic) for bundle in bundles]


@cython.final
cdef class Merge:
    """Merges the bundles of some topics into the tables."""

    cdef list bundles
    cdef list rows              # of their topics, as they were
    cdef list producer_keys
    cdef list last_sequences
    cdef readonly list others   # bundles that the caller must process
    cdef readonly list damaged  # keys of producers whose rows cannot be read

    def __cinit__(self, list bundles not None, list rows not None, int64_t latest, size_t most):
        """`rows` has (key, row) pairs of the `topic_keys`. `latest`: publish times after it, in ms,
        need a time mark. `most`: a bundle of that many bytes makes large entries."""
        cdef Bundle bundle
        cdef bytes row
        cdef Py_ssize_t at = 0
        self.bundles, self.rows, self.others = [], [], []
        self.producer_keys, self.last_sequences, self.damaged = [], [], []
        for bundle in bundles:
            row = _row_of(rows, &at, _key(bundle.topic))
            if row is not None and bundle.nbytes < most and _continues(bundle, row, latest):
                self.bundles.append(bundle)
                self.rows.append(row)
            else:
                self.others.append(bundle)

    def last_entries(self):
        """The keys of the topics' last entries."""
        cdef list keys = []
        cdef Py_ssize_t i
        for i in range(PyList_GET_SIZE(self.rows)):
            if _has_entries(self.rows[i]):
                keys.append(_last_entry(self.bundles[i]))
        return keys

    def pack(self, list found not None, size_t most, size_t small):
        """(keys to delete, (key, entry) pairs to write): the bundles as entries of up to `most`
        bytes. `found` has (key, entry) pairs of `last_entries`; one that has up to `small` bytes,
        or four times its bundle's, is filled up: it is deleted and written again."""
        cdef list dropped = []
        cdef list entries = []
        cdef Bundle bundle
        cdef Entry before
        cdef bytes data, key
        cdef Py_ssize_t i
        cdef Py_ssize_t at = 0
        for i in range(PyList_GET_SIZE(self.bundles)):
            bundle = <Bundle>self.bundles[i]
            before = None
            if _has_entries(self.rows[i]):
                key = _last_entry(bundle)
                data = _row_of(found, &at, key)
                if data is not None and _is_small(bundle, data, most, small):
                    before = _sound_entry(data)
            if before is not None:
                dropped.append(key)
            for last, entry in <list>bundle.pack(before, most):
                entries.append((_pair(bundle.topic, last), entry))
        return dropped, entries

    def producers(self):
        """The keys of the producers that have sent the messages."""
        cdef Bundle bundle
        for bundle in self.bundles:
            topic = _key(bundle.topic)
            for name, sequence in (<dict>bundle.producers()).items():
                self.producer_keys.append(topic + name)
                self.last_sequences.append(sequence)
        return self.producer_keys

    def sequences(self, list found not None):
        """(key, row) pairs of the producers, with their last sequence ids; `found` has those that
        were there."""
        cdef list written = []
        cdef bytes key, row
        cdef Py_ssize_t i
        cdef Py_ssize_t at = 0
        cdef uint64_t[2] fields
        cdef int64_t sequence
        for i in range(PyList_GET_SIZE(self.producer_keys)):
            key, sequence = self.producer_keys[i], self.last_sequences[i]
            row = _row_of(found, &at, key)
            fields[1] = 0
            if row is not None and PyBytes_GET_SIZE(row) == sizeof(fields):
                memcpy(fields, PyBytes_AS_STRING(row), sizeof(fields))
                sequence = max(sequence, <int64_t>_swapped(fields[0]))
            elif row is not None:
                self.damaged.append(key)
            fields[0] = _swapped(<uint64_t>sequence)
            written.append((key, PyBytes_FromStringAndSize(<char*>fields, sizeof(fields))))
        return written

    def topics(self):
        """(key, row) pairs of the topics, as they are now."""
        cdef list written = []
        cdef Py_ssize_t i
        for i in range(PyList_GET_SIZE(self.bundles)):
            written.append((_key((<Bundle>self.bundles[i]).topic),
                            _advanced(<Bundle>self.bundles[i], self.rows[i])))
        return written

    def ids(self):
        """The ids of the topics."""
        cdef Bundle bundle
        return [bundle.topic for bundle in self.bundles]


cdef bint _continues(Bundle bundle, bytes row, int64_t latest):
    """Whether this is an undamaged row of a topic that this bundle continues."""
    cdef const char* at = PyBytes_AS_STRING(row)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(row)
    return (not bundle.repeated and size >= R_NAME and (<uint32_t*>(at + R_VERSION))[0] == 1
            and _row_sum(at, size) == (<uint32_t*>(at + R_CRC))[0]
            and (<uint64_t*>(at + R_ID))[0] == bundle.topic
            and not (<uint32_t*>(at + R_FLAGS))[0] & <uint32_t>(DELETED | COMPRESSED_TOPIC)
            and (<uint64_t*>(at + R_NEXT_OFFSET))[0] == bundle.base_offset
            and (<int64_t*>(at + R_LAST_PUBLISH_TIME))[0] <= latest
            and bundle.publish_time <= latest)


cdef bytes _advanced(Bundle bundle, bytes row):
    """The topic's row after the bundle."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(row)
    cdef bytes fresh = PyBytes_FromStringAndSize(PyBytes_AS_STRING(row), size)
    cdef char* at = PyBytes_AS_STRING(fresh)
    cdef int64_t* published = <int64_t*>(at + R_LAST_PUBLISH_TIME)
    (<uint64_t*>(at + R_NEXT_OFFSET))[0] = bundle.next_offset
    published[0] = max(published[0], bundle.publish_time)
    (<uint32_t*>(at + R_CRC))[0] = _row_sum(at, size)
    return fresh


cdef bint _has_entries(bytes row):
    cdef const char* at = PyBytes_AS_STRING(row)
    return (<uint64_t*>(at + R_NEXT_OFFSET))[0] != (<uint64_t*>(at + R_FIRST_OFFSET))[0]


cdef bytes _last_entry(Bundle bundle):
    return _pair(bundle.topic, bundle.base_offset - 1)


cdef bint _is_small(Bundle bundle, bytes data, size_t most, size_t small):
    cdef size_t size = PyBytes_GET_SIZE(data)
    cdef Laid laid
    if size >= most or size > max(small, 4 * bundle.nbytes):
        return False
    # The topic was compressed before, and this process may lack the library.
    return _read_footer(PyBytes_AS_STRING(data), size, &laid) != WHOLE or laid.version != COMPRESSED


cdef Entry _sound_entry(bytes data):
    """The entry, or None: for a reference to a segment, and for a damaged entry, which stays in
    place, where reading it reports the damage."""
    try:
        return Entry(data)
    except ValueError:
        return None
