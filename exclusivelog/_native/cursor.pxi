# `Cursor`: reading message by message, from entries that a subclass reads.

cdef uint64_t _nothing_is_removed = 0


cdef inline uint64_t _removals(Cursor cursor) noexcept nogil:
    return max(xl_load64(cursor.everything), xl_load64(cursor.removals))


cdef inline bint _may_be_gone(Cursor cursor) noexcept nogil:
    """May what was read ahead have been removed from the log meanwhile (rule G8)?"""
    return _removals(cursor) != cursor.seen


cdef inline Message _take_from(Cursor cursor, Entry entry):
    """Return the message at the position, and advance. None if `_verify_message` returns False."""
    cdef uint32_t index
    if entry.laid.gaps == NULL:
        index = <uint32_t>(cursor.position - entry.laid.base_offset)
        if index >= entry.sound_to or index < entry.sound_from:
            if not _verify_message(cursor, entry, index):
                return None
        cursor.position += 1
        return _message(entry, index)
    index = _index_of(entry, cursor.position)
    if index >= entry.sound_to or index < entry.sound_from:
        if not _verify_message(cursor, entry, index):
            return None
    cursor.position = _offset_at(entry, index) + 1
    return _message(entry, index)


cdef bint _verify_message(Cursor cursor, Entry entry, uint32_t index) except -1:
    """Verify the message, or raise; when reading in order, also some of the next ones. False if the
    cursor has moved: while a block is decompressed, a signal handler may use it."""
    cdef uint32_t ahead = entry._ahead() if index == entry.sound_to else 1
    cdef uint64_t position = cursor.position
    cdef bint sound = entry.verify(index, ahead)
    if cursor.entry is not entry or cursor.position != position:
        return False
    if not sound:
        _refuse(cursor, entry, index)
    return True


cdef _refuse(Cursor cursor, Entry entry, uint32_t index):
    start, stop = entry.damage_from(index)
    cursor.refuse(entry.offset_at(start), entry.offset_at(stop), entry.damage)
    raise ValueError(_UNSOUND)


cdef class Cursor:
    """Reads entries message by message. A subclass has `refill()`, which returns some entries from
    `position` on, or an empty list at the end of the log, and `refuse()`; if messages can be
    removed from the log (`Journal.watch`), also `recheck()`."""

    def __cinit__(self, *args, **kwargs):
        self.queue = []
        self.removals = self.everything = &_nothing_is_removed

    def refill(self):
        raise TypeError("Cursor is abstract")

    def refuse(self, uint64_t start, uint64_t stop, str damage):
        """Raise the error for the offsets of messages in a damaged block. `damage` says what is
        wrong with it, if it is compressed."""
        raise ValueError(_UNSOUND)

    def recheck(self):
        """Raise an error if the log was deleted; `move_to(position)` if the message there was
        removed. It is called before a message that was read ahead is returned, if anything may have
        been removed since."""

    cdef bint look_again(self) except -1:
        cdef uint64_t now = _removals(self)     # before: the next look finds later removals
        self.recheck()
        self.seen = now
        return True

    def move_to(self, uint64_t position):
        """Continue at this offset; discard what was read ahead."""
        self.position = position
        self.entry = None
        self.queue = []
        self.queued = 0

    cdef bint advance(self) except -1:
        # The next entry that holds a message at or after the position.
        cdef uint64_t now
        while True:
            if self.queued < PyList_GET_SIZE(self.queue) and _may_be_gone(self):
                self.look_again()
                continue
            if self.queued >= PyList_GET_SIZE(self.queue):
                self.entry = None
                self.queue = []
                now = _removals(self)
                entries = self.refill()     # a signal handler may use the cursor meanwhile
                self.queue, self.queued, self.seen = entries, 0, now
                if not entries:
                    return False
            self.entry = self.queue[self.queued]
            self.queue[self.queued] = None
            self.queued += 1
            if self.position < self.entry.laid.base_offset:
                self.position = self.entry.laid.base_offset
            if self.position < self.entry.end:
                return True

    cdef Message take(self):
        """Return the message at the position, and advance; None at the end."""
        cdef Message message = None
        while message is None:
            if self.entry is None or self.position >= self.entry.end:
                if not self.advance():
                    return None
            elif _may_be_gone(self):
                self.look_again()
                continue
            message = _take_from(self, self.entry)
        return message

    def take_ready(self):
        """The next message if it has been read ahead, else None."""
        if self.entry is None or self.position >= self.entry.end:
            return None
        return self.take()

    def take_one(self):
        """The next message, or None at the end."""
        return self.take()

    def take_many(self, Py_ssize_t most, errors):
        """Up to `most` next messages. Behind the first one, `errors` of these classes end it: the
        next call raises the error again."""
        cdef list messages = []
        cdef Message message
        while PyList_GET_SIZE(messages) < most:
            try:
                message = self.take()
            except errors:
                if not messages:
                    raise
                break
            if message is None:
                break
            messages.append(message)
        return messages

    def take_entry(self, Py_ssize_t most=PY_SSIZE_T_MAX):
        """The next entry and the index in it of the message at the position, which moves
        behind it; None at the end, or if the entry has more than `most` bytes."""
        cdef Entry entry
        cdef uint64_t position
        while True:
            if self.entry is None or self.position >= self.entry.end:
                if not self.advance():
                    return None
            elif _may_be_gone(self):
                self.look_again()
                continue
            entry, position = self.entry, self.position
            if entry.nbytes > most:
                return None
            index = _index_of(entry, position)
            try:
                entry.check()
            except ValueError:
                entry, index = self._sound_part(entry, index), 0
            if self.position == position:  # else a signal handler has used the cursor meanwhile
                self.position = entry.end
                return entry, index

    cdef Entry _sound_part(self, Entry entry, uint32_t index):
        """A copy of the messages from `index` up to the first damaged block."""
        stop, _ = entry.damage_from(index)
        if stop <= index:
            _refuse(self, entry, index)
        return Entry(keep(entry, list(range(index, stop)), entry.laid.topic)[1], entry.loads)

    def scan(self, uint64_t end):
        """An iterator over the messages before the offset `end`."""
        cdef Scan scan = Scan.__new__(Scan)
        scan.cursor = self
        scan.end = end
        return scan

    def values(self, uint64_t end):
        """An iterator over the values of the messages before the offset `end`."""
        cdef Values values = Values.__new__(Values)
        values.cursor = self
        values.end = end
        return values


@cython.final
cdef class Scan:
    """The iterator of `for message in reader`."""

    def __init__(self):
        raise TypeError("a Scan is made by a Cursor")

    cdef Cursor cursor
    cdef uint64_t end

    def __iter__(self):
        return self

    def __next__(self):
        cdef Cursor cursor = self.cursor
        cdef Entry entry = cursor.entry
        cdef uint64_t index
        if (entry is not None and entry.laid.gaps == NULL and cursor.position < self.end
                and not _may_be_gone(cursor)):
            index = cursor.position - entry.laid.base_offset    # huge if it is before the entry
            if entry.sound_from <= index < entry.sound_to:
                cursor.position += 1
                return _message(entry, <uint32_t>index)
        return self._next_unverified()

    cdef Message _next_unverified(self):
        cdef Cursor cursor = self.cursor
        cdef Message message = None
        if cursor.position < self.end:
            message = cursor.take()
        if message is None:
            raise StopIteration
        return message
