# A checkpoint groups the journal's frames by topic, and packs them into large entries.

# A checkpoint has tens of thousands of these, and goes through them several times: keep it small.
cdef struct Framed:
    Found found
    uint64_t index
    uint64_t session        # if it is undamaged
    int64_t publish_time    # the same
    bint sound
    bint repeated           # at offsets that were used already: it is left out


cdef int _by_topic(const void* a, const void* b) noexcept nogil:
    cdef const Framed* x = <const Framed*>a
    cdef const Framed* y = <const Framed*>b
    if x.found.topic != y.found.topic:
        return -1 if x.found.topic < y.found.topic else 1
    return -1 if x.index < y.index else 1


@cython.final
cdef class Frames:
    """The entries of a run of frames, in the mapped journal, ordered by topic."""

    cdef Journal journal
    cdef Framed* items
    cdef Py_ssize_t used
    cdef Py_ssize_t room
    cdef uint64_t start
    cdef uint64_t generation

    def __init__(self):
        raise TypeError("Frames are made by a Journal")

    def __dealloc__(self):
        self._let_go()

    cdef _let_go(self):
        free(self.items)
        self.items = NULL
        self.used = 0
        if self.journal is not None:
            self.journal.busy -= 1
            self.journal = None

    def __enter__(self):
        return self.bundles()

    def __exit__(self, kind, error, trace):
        self._let_go()

    cdef bint fill(self, uint64_t position, uint64_t stop, uint64_t generation) noexcept nogil:
        cdef Framed* grown
        cdef Framed* item
        cdef Found found
        cdef Laid laid
        cdef uint64_t topic = 0
        cdef bint in_order = True
        self.start, self.generation = position, generation
        while _next(&self.journal.ring, position, generation, stop, &found):
            if self.used == self.room:
                grown = <Framed*>realloc(self.items, (2 * self.room + 256) * sizeof(Framed))
                if grown == NULL:
                    return False
                self.items = grown
                self.room = 2 * self.room + 256
            item = &self.items[self.used]
            item.index, item.found, item.repeated = self.used, found, False
            # A damaged entry keeps its place in the log, where reading it reports the damage.
            item.sound = _is_whole(&found, &laid)
            item.session, item.publish_time = laid.session, laid.publish_time
            in_order = in_order and topic <= found.topic
            topic = found.topic
            self.used += 1
            position = found.next
        if not in_order:
            qsort(self.items, self.used, sizeof(Framed), _by_topic)
        return True

    cdef list bundles(self):
        cdef list found = []
        cdef Py_ssize_t start = 0
        cdef Py_ssize_t stop
        while start < self.used and self.items[start].found.topic != NOTES_TOPIC:
            stop = start + 1
            while (stop < self.used
                   and self.items[stop].found.topic == self.items[start].found.topic):
                stop += 1
            found.append(_bundle(self, start, stop))
            start = stop
        return found


    def notes(self):
        """(rows, damaged): the rows that transactions have changed, (table, key, data, position)
        each, in order; and how many notes cannot be read. Raises JournalOverwritten."""
        if self.journal is None:
            raise ValueError("the frames were let go")
        try:
            return self._notes()
        finally:
            # After an error, too: another process may have overwritten an entry that was sound.
            self.journal._check_not_overwritten(self.start, self.generation)

    cdef _notes(self):
        cdef list rows = []
        cdef Py_ssize_t damaged = 0
        cdef Py_ssize_t i
        for i in range(self.used - 1, -1, -1):      # they are the last ones
            if self.items[i].found.topic != NOTES_TOPIC:
                break
            if not _add_note(rows, &self.items[i].found, None):
                damaged += 1
        rows.reverse()
        return rows, damaged


cdef bint _add_note(list rows, const Found* found, keys) except -1:
    """Add the row of a note, if its key is among `keys` (None: any). False if it is damaged."""
    cdef Laid laid
    cdef bytes key
    if not _is_whole(found, &laid):
        return False
    key = PyBytes_FromStringAndSize(laid.keys, laid.key_offsets[1])
    if keys is None or key in keys:
        rows.append((
            laid.name[:laid.name_length].decode("utf-8"), key,
            PyBytes_FromStringAndSize(laid.values, laid.value_offsets[1]), found.position))
    return True


cdef Bundle _bundle(Frames frames, Py_ssize_t start, Py_ssize_t stop):
    cdef Bundle bundle = Bundle.__new__(Bundle)
    bundle.frames, bundle.start, bundle.stop = frames, start, stop
    bundle.topic = frames.items[start].found.topic
    bundle.follow(frames.items[start].found.base_offset)
    return bundle


@cython.final
@cython.no_gc
cdef class Bundle:
    """One topic's entries in the journal, valid until its `Frames` end."""

    cdef Frames frames
    cdef Py_ssize_t start
    cdef Py_ssize_t stop
    cdef readonly uint64_t topic
    cdef readonly uint64_t base_offset
    cdef readonly uint64_t next_offset
    cdef readonly int64_t publish_time
    cdef readonly size_t nbytes
    cdef readonly list repeated     # (offset, count) of entries at offsets that were used already

    def __init__(self):
        raise TypeError("a Bundle is made by a Journal")

    def follow(self, uint64_t end):
        """Leave out the entries at offsets before `end`, and before those of an earlier entry. False
        if none is left."""
        cdef uint64_t next_offset = end
        cdef bint some = False
        cdef Framed* item
        cdef Py_ssize_t i
        if self.frames.items == NULL:
            raise ValueError("the frames are gone")
        self.repeated, self.nbytes, self.base_offset = [], 0, end
        for i in range(self.start, self.stop):
            item = &self.frames.items[i]
            item.repeated = item.found.base_offset < next_offset
            if item.repeated:
                self.repeated.append((item.found.base_offset, item.found.count))
                continue
            if not some:
                self.base_offset, some = item.found.base_offset, True
            next_offset = item.found.base_offset + item.found.count
            self.nbytes += item.found.size
            if item.sound:
                self.publish_time = item.publish_time
        self.next_offset = next_offset
        return some

    def pack(self, Entry before, size_t most):
        """(last offset, entry) pairs of about `most` bytes each. With `before`, the entry that they
        follow, the first pair replaces that."""
        cdef list packed = []
        cdef Py_ssize_t n = self.stop - self.start
        if self.frames.items == NULL:
            raise ValueError("the frames are gone")
        if before is not None:
            before.check()
        cdef Laid* parts = <Laid*>malloc((n + 1) * sizeof(Laid))
        cdef Py_ssize_t used = 0
        cdef Py_ssize_t i
        cdef Framed* item
        if parts == NULL:
            raise MemoryError
        try:
            if before is not None:
                parts[0] = before.laid
                used = 1
            for i in range(self.start, self.stop):
                item = &self.frames.items[i]
                if item.repeated:
                    continue
                if item.sound and (
                        _lay_out(item.found.entry, item.found.size, &parts[used]) == WHOLE):
                    used += 1
                else:
                    _pack_parts(parts, used, most, packed)
                    used = 0
                    packed.append((item.found.base_offset + item.found.count - 1,
                                   item.found.entry[:item.found.size]))
            _pack_parts(parts, used, most, packed)
        finally:
            free(parts)
        return packed

    def producers(self):
        """{producer name: last sequence id} of its messages."""
        cdef dict found = {}
        cdef Framed* item
        cdef Laid laid
        cdef Py_ssize_t i
        if self.frames.items == NULL:
            raise ValueError("the frames are gone")
        for i in range(self.start, self.stop):
            item = &self.frames.items[i]
            if item.sound and (i + 1 == self.stop or not self.frames.items[i + 1].sound
                               or item.session != self.frames.items[i + 1].session) and (
                    _lay_out(item.found.entry, item.found.size, &laid) == WHOLE):
                found[laid.name[:laid.name_length]] = _last_sequence(&laid)
        return found
