# Reading entries, column by column. Checked as a whole or, if they have blocks, block by block when
# messages are read.

cdef str _UNSOUND = "its checksum does not hold"


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Entry:
    """A decoded entry. Raises ValueError, with the reason, if it is damaged; damage to a block is
    found when a part of that is read.

    `data` is bytes or a buffer like them, and is not copied. `loads` is applied to values and keys
    as they are read (None: bytes as they are). Of a compressed entry, the attribute `data` is what
    it is decompressed into, block by block as it is needed.
    """

    def __cinit__(self, object data not None, Deserializer loads=None):
        PyObject_GetBuffer(data, &self.view, PyBUF_SIMPLE)
        cdef Py_ssize_t size = self.view.len
        cdef const char* start = <const char*>self.view.buf
        cdef const char* footer = start + size - FOOTER
        cdef int damage
        self.mapped = not PyBytes_CheckExact(data)
        if self.mapped and size >= MAPPED_END:
            xl_prefetch(start + size - MAPPED_END, MAPPED_END)
        damage = _read_footer(start, size, &self.laid)
        if damage != WHOLE:
            raise ValueError(_DAMAGE[damage])
        self.data = data
        if self.laid.version != PLAIN:
            damage = self._find_blocks()
        elif _sum_all(start, size) ^ _sum(footer + F_CRC, 4) != (<uint32_t*>(footer + F_CRC))[0]:
            raise ValueError(_UNSOUND)
        else:
            damage = xe_find(&self.laid)
            self.sound_to = self.laid.count
        if damage != WHOLE:
            raise ValueError(_DAMAGE[damage])
        self.nbytes = self.laid.size
        self.loads = loads
        self.end = _end_of(&self.laid)

    cdef int _find_blocks(self) except -1:
        cdef Laid* laid = &self.laid
        cdef int damage = xe_find(laid)
        if damage != WHOLE:
            return damage
        if not xb_tail_is_sound(laid):
            raise ValueError(_UNSOUND)
        self.seen = <uint8_t*>calloc(max(laid.blocks, 1), 1)
        if self.seen == NULL:
            raise MemoryError
        if laid.version == COMPRESSED:
            damage = self._open_compressed()
            if damage != WHOLE:
                return damage
        # The offsets that locate messages.
        if laid.gaps != NULL and not (
                self._is_section_sound(laid.gaps)
                and xb_grow(laid.gaps, 0, laid.count, laid.count, laid.last_gap)):
            raise ValueError(_UNSOUND)
        return WHOLE

    cdef int _open_compressed(self) except -1:
        cdef Laid* laid = &self.laid
        self.decompress = _find_codec(laid.method)
        self.places = <ChunkPlace*>malloc(max(laid.blocks, 1) * sizeof(ChunkPlace))
        if self.places == NULL:
            raise MemoryError
        if not xe_place_chunks(laid, self.places):
            return BAD_CHUNKS
        self.data = PyBytes_FromStringAndSize(NULL, laid.sections)
        xe_pass_decompressed(laid, PyBytes_AS_STRING(self.data))
        if laid.method == _lz4:
            self._open_job()
        return WHOLE

    cdef int _open_job(self) except -1:
        cdef size_t states = self.laid.blocks * sizeof(uint32_t)
        self.job = <Job*>calloc(1, sizeof(Job) + states)
        if self.job == NULL:
            raise MemoryError
        self.job.from_, self.job.to = <const char*>self.view.buf, PyBytes_AS_STRING(self.data)
        self.job.places, self.job.chunk = self.places, self.laid.chunk
        self.job.states = <uint32_t*>(<char*>self.job + sizeof(Job))
        self.process = xi_here()
        return 0

    cdef bint _decompress_requested(self) except -1:
        """Decompress the requested chunks. False if there were none: then the caller's messages are
        damaged. A damaged chunk is skipped, as another thread or an interrupted call may have
        requested it."""
        cdef bint some = False
        cdef size_t number
        for number in range(self.laid.blocks):
            if self.seen[number] == XB_REQUESTED:
                self._decompress(number)
                some = True
        return some

    cdef bint _make(self, size_t number) except -1:
        """Decompress the chunk without a copy; when reading in order, have the next ones
        decompressed meanwhile. False if that is impossible."""
        cdef Job* job = self.job
        cdef size_t last = min(number + XA_MOST, self.laid.blocks - 1)
        cdef const ChunkPlace* end = &self.places[last]
        cdef uint32_t state
        cdef size_t i
        if self.process != xi_here():      # forked: the parent's thread may have taken chunks
            self.process = xi_here()
            for i in range(self.laid.blocks):
                if job.states[i] == XA_TAKEN:
                    job.states[i] = XA_FREE
        if job.states[number] == XA_FREE:
            if number == 0 or self.seen[number - 1] != XB_SOUND:
                last, end = number, &self.places[number]
            if self.mapped:
                xl_prefetch(job.from_ + self.places[number].at, end.at + end.size - self.places[number].at)
            if last > number:
                xa_request(job, number + 1, last + 1)
        state = xa_try(job, number)
        if state == XA_TAKEN:
            with nogil:
                state = xa_await(job, number)
        return state == XA_MADE

    cdef bint _decompress(self, size_t number) except -1:
        # Another thread may do the same meanwhile: it writes the same bytes.
        cdef const ChunkPlace* place = &self.places[number]
        if self.job != NULL and self._make(number):
            self.seen[number] = XB_SOUND
            return True
        cdef const char* chunk = <const char*>self.view.buf + place.at
        cdef char* to = PyBytes_AS_STRING(self.data) + number * self.laid.chunk
        cdef object made
        if self.mapped:
            xl_prefetch(chunk, place.size)
        if _crc(chunk, place.size) != place.sum:
            return _damaged_chunk(self, number, _UNSOUND)
        if place.size == place.decompressed:
            memcpy(to, chunk, place.size)
            self.seen[number] = XB_SOUND
            return True
        try:
            made = self.decompress(
                PyMemoryView_FromMemory(<char*>chunk, place.size, PyBUF_READ), place.decompressed)
        except ValueError as error:
            return _damaged_chunk(self, number, str(error))
        if not PyBytes_CheckExact(made) or <size_t>PyBytes_GET_SIZE(made) != place.decompressed:
            return _damaged_chunk(self, number, "it is decompressed to another size")
        memcpy(to, PyBytes_AS_STRING(made), place.decompressed)
        self.seen[number] = XB_SOUND
        return True

    cdef bint _are_sound(self, uint32_t start, uint32_t stop, bint out_of_order) except -1:
        """Whether these messages are undamaged. Decompresses the chunks that contain them."""
        if self.laid.chunk == 0:
            return xb_messages_are_sound(&self.laid, self.seen, start, stop, out_of_order)
        while not xb_messages_are_sound(&self.laid, self.seen, start, stop, False):
            if not self._decompress_requested():
                return False
        return True

    cdef bint _is_section_sound(self, const void* section) except -1:
        while not xb_section_is_sound(&self.laid, self.seen, section):
            if self.laid.chunk == 0 or not self._decompress_requested():
                return False
        return True

    cdef bint verify(self, uint32_t index, uint32_t ahead) except -1:
        """Is the message at `index` undamaged? Also verifies the next ones, up to `ahead` in all,
        and remembers the result."""
        cdef uint32_t stop = index + min(max(ahead, 1), self.laid.count - index)
        if self.sound_from <= index < self.sound_to:
            return True
        if self.sound_from <= stop < self.sound_to and index < self.sound_from:
            stop = self.sound_from
        if self.mapped and ahead <= 1 and self.laid.chunk == 0:
            xb_prefetch_message(&self.laid, self.seen, index)
        if not self._are_sound(index, stop, self.mapped and ahead <= 1):
            stop = index + 1
            if not self._are_sound(index, stop, False):
                return False
        if index == self.sound_to:
            self.sound_to = stop
        elif stop == self.sound_from:
            self.sound_from = index
        else:
            self.sound_from, self.sound_to = index, stop
        return True

    cdef bint _is_whole(self) noexcept:
        return self.sound_from == 0 and self.sound_to == self.laid.count

    def check(self):
        """Verify all blocks: ValueError if any is damaged."""
        cdef bint sound
        if self._is_whole():
            return
        if self.laid.chunk or self.nbytes < WITHOUT_GIL:
            sound = self._are_sound(0, self.laid.count, False)
        else:
            with nogil:
                sound = xb_messages_are_sound(&self.laid, self.seen, 0, self.laid.count, False)
        if not sound:
            raise ValueError(_UNSOUND)
        self.sound_from, self.sound_to = 0, self.laid.count

    def damage_from(self, uint32_t index):
        """The first run of messages in damaged blocks, from `index` on: (index of the first, index
        behind the last). Both are `count` if there is none."""
        cdef uint32_t start = index
        cdef uint32_t stop
        while start < self.laid.count and self.verify(start, max(64, self._ahead())):
            start = max(start + 1, self.sound_to)
        stop = start
        while stop < self.laid.count and not self.verify(stop, 1):
            stop += 1
        if start == index:  # the run may have begun before
            while start > 0 and start < self.laid.count and not self.verify(start - 1, 1):
                start -= 1
        return start, stop

    cdef uint32_t _ahead(self) noexcept:
        # Verify twice as many as have been read in order, up to some blocks, so that verified bytes
        # are still in the processor's cache when they are read.
        cdef uint64_t most = <uint64_t>READ_AHEAD * self.laid.count // self.nbytes
        return <uint32_t>min(max(most, 1), 2 * <uint64_t>(self.sound_to - self.sound_from))

    def offset_at(self, uint32_t index):
        """The offset of the message at `index`; of that at `count`, the offset behind the last one."""
        return self.end if index >= self.laid.count else _offset_at(self, index)

    def __dealloc__(self):
        if self.job != NULL:
            xa_withdraw(self.job)
            free(self.job)
        free(self.seen)
        free(self.places)
        PyBuffer_Release(&self.view)

    @property
    def topic(self):
        return self.laid.topic

    @property
    def base_offset(self):
        return self.laid.base_offset

    @property
    def epoch(self):
        return self.laid.epoch

    @property
    def session(self):
        return self.laid.session

    @property
    def base_sequence(self):
        return self.laid.base_sequence

    @property
    def publish_time(self):
        return self.laid.publish_time

    @property
    def count(self):
        return self.laid.count

    @property
    def flags(self):
        return self.laid.flags

    @property
    def compression(self):
        """The number of the method that it is compressed by; 0 if it is not."""
        return self.laid.method

    @property
    def stored(self):
        """The bytes that it has where it is stored."""
        return self.view.len

    @property
    def has_publish_times(self):
        return self.laid.times != NULL

    @property
    def last_publish_time(self):
        return self.laid.publish_time + self.laid.last_time

    def first_published_at(self, int64_t time):
        """The offset of the first message published at or after `time`, in ms; the offset
        behind the last one if there is none."""
        cdef uint32_t i = 0
        if self.laid.times != NULL and self.seen != NULL and not self._is_section_sound(
                self.laid.times):
            raise ValueError(_UNSOUND)
        while i < self.laid.count and self.laid.publish_time + (
                self.laid.times[i] if self.laid.times != NULL else 0) < time:
            i += 1
        return self.end if i == self.laid.count else _offset_at(self, i)

    @property
    def producer_name(self):
        if self._name is None:
            self._name = self.laid.name[:self.laid.name_length].decode("utf-8")
        return self._name

    @property
    def has_properties(self):
        return self.laid.properties != NULL

    def message(self, uint32_t index):
        """The message at `index` within the entry."""
        if index >= self.laid.count:
            raise IndexError(f"the entry has {self.laid.count} messages, none at {index}")
        if not self.verify(index, 1):
            raise ValueError(_UNSOUND)
        return _message(self, index)

    def column(self, str name not None):
        """The place of the column `name` in `data`, for Arrow to wrap: (position of its validity
        or -1, of its offsets, of its data), or None if it is absent."""
        self.check()
        cdef const Laid* laid = &self.laid
        cdef const char* start = laid.start
        if name == "value":
            return (-1 if laid.value_valid == NULL else <const char*>laid.value_valid - start,
                    <const char*>laid.value_offsets - start, laid.values - start)
        if name == "key":
            if laid.keys == NULL:
                return None
            return (<const char*>laid.key_valid - start,
                    <const char*>laid.key_offsets - start, laid.keys - start)
        if name == "event_time":
            if laid.events == NULL:
                return None
            return <const char*>laid.event_valid - start, -1, <const char*>laid.events - start
        raise ValueError(f"name={name!r}: it takes value, key or event_time")

    def numbers(self, str name not None, uint32_t start=0):
        """The column `name` from message `start` on as bytes of int64."""
        self.check()
        if start > self.laid.count:
            raise IndexError(f"the entry has {self.laid.count} messages, none at {start}")
        cdef uint32_t i
        cdef uint32_t n = self.laid.count - start
        cdef int64_t base
        cdef bytes out = PyBytes_FromStringAndSize(NULL, 8 * <Py_ssize_t>n)
        cdef int64_t* numbers = <int64_t*>PyBytes_AS_STRING(out)
        if name == "event_time" and self.laid.events != NULL:
            for i in range(n):
                numbers[i] = self.laid.events[start + i] * 1000
            return out
        if name == "sequence_id" and self.laid.sequences != NULL:
            memcpy(numbers, self.laid.sequences + start, 8 * <size_t>n)
            return out
        if name == "sequence_id":
            base = self.laid.base_sequence + start
        elif name == "publish_time":
            for i in range(n):
                numbers[i] = 1000 * (self.laid.publish_time + (
                    self.laid.times[start + i] if self.laid.times != NULL else 0))
            return out
        elif name == "offset" and self.laid.gaps != NULL:
            for i in range(n):
                numbers[i] = self.laid.base_offset + self.laid.gaps[start + i]
            return out
        elif name == "offset":
            base = self.laid.base_offset + start
        else:
            raise ValueError(f"name={name!r} is no column of numbers here")
        for i in range(n):
            numbers[i] = base + i
        return out


cdef bint _damaged_chunk(Entry entry, size_t number, str why) except -1:
    """Remember that the chunk is damaged, and why; False."""
    cdef str method = _method_name(entry.laid.method)
    entry.seen[number] = XB_DAMAGED
    entry.damage = f"{method} block {number} of {entry.laid.blocks}: {why}"
    return False


def prefetch_like(Entry other not None, data not None, uint64_t index, uint64_t count):
    """Start to read a message of an entry in a mapped file from the disk: the one at `index` of
    `count`. Guesses the entry's sections from `other`."""
    cdef Py_buffer view
    if other.seen == NULL or other.laid.chunk or count >= UINT32_MAX or index >= count:
        return
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    xb_prefetch_like(&other.laid, <const char*>view.buf, view.len, index, count)
    PyBuffer_Release(&view)


def ends_as(data, uint64_t topic, uint64_t last):
    """Is this the topic's entry with that last offset? Reads only the footer."""
    cdef Laid laid
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if _read_footer(<const char*>view.buf, view.len, &laid) != WHOLE or laid.topic != topic:
            return False
        if laid.flags & GAPS and xe_find(&laid) != WHOLE:
            return False
        return _end_of(&laid) == last + 1
    finally:
        PyBuffer_Release(&view)


cdef inline uint64_t _offset_at(Entry entry, uint32_t index) noexcept:
    if entry.laid.gaps == NULL:
        return entry.laid.base_offset + index
    return entry.laid.base_offset + entry.laid.gaps[index]


cdef uint32_t _index_of(Entry entry, uint64_t offset) noexcept:
    """The first message at that offset or behind it; there must be one."""
    cdef uint32_t low = 0
    cdef uint32_t high = entry.laid.count
    cdef uint32_t middle
    if offset <= entry.laid.base_offset:
        return 0
    if entry.laid.gaps == NULL:
        return <uint32_t>(offset - entry.laid.base_offset)
    while low < high:
        middle = (low + high) >> 1
        if entry.laid.base_offset + entry.laid.gaps[middle] < offset:
            low = middle + 1
        else:
            high = middle
    return low


cdef inline Message _message(Entry entry, uint32_t index):
    cdef Message message = Message.__new__(Message)
    message.entry = entry
    message.index = index
    return message


cdef inline object _raw_value(Entry entry, uint32_t index):
    cdef const Laid* laid = &entry.laid
    cdef uint32_t at
    if laid.value_valid != NULL and not _bit(laid.value_valid, index):
        return None
    at = laid.value_offsets[index]
    return PyBytes_FromStringAndSize(laid.values + at, laid.value_offsets[index + 1] - at)


cdef inline object _raw_key(Entry entry, uint32_t index):
    cdef const Laid* laid = &entry.laid
    cdef uint32_t at
    if laid.keys == NULL or not _bit(laid.key_valid, index):
        return None
    at = laid.key_offsets[index]
    return PyBytes_FromStringAndSize(laid.keys + at, laid.key_offsets[index + 1] - at)
