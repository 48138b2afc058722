# Reading values one by one from the same entries as `Scan`, without creating messages.

cdef object _deserialized(Cursor cursor, Entry entry, object value, uint64_t behind):
    # The deserializer may use the cursor. A value for which it fails counts as read; one whose
    # reading was interrupted does not.
    cdef uint64_t position = cursor.position
    cursor.position = behind
    try:
        return entry.loads.value(value)
    except BaseException as error:
        raised = error
        if isinstance(error, Exception):
            raised = _undeserialised(entry.loads.topic, behind - 1, "value", value, error)
        if raised is not error:
            raise raised from error
        if cursor.entry is entry and cursor.position == behind:
            cursor.position = position
        raise


cdef inline object _take_value(Cursor cursor, Entry entry, bint* taken):
    """Return the value of the message at the position, and advance. Sets `taken` to False if
    `_verify_message` returns False."""
    cdef uint32_t index
    cdef uint64_t behind
    taken[0] = True
    if entry.laid.gaps == NULL:
        index = <uint32_t>(cursor.position - entry.laid.base_offset)
        behind = cursor.position + 1
    else:
        index = _index_of(entry, cursor.position)
        behind = _offset_at(entry, index) + 1
    if index >= entry.sound_to or index < entry.sound_from:
        taken[0] = _verify_message(cursor, entry, index)
        if not taken[0]:
            return None
    value = _raw_value(entry, index)
    if entry.loads is not None and entry.loads.value is not None and value is not None:
        return _deserialized(cursor, entry, value, behind)
    cursor.position = behind
    return value


@cython.final
cdef class Values:
    """The iterator of `for value in reader.values()`."""

    def __init__(self):
        raise TypeError("Values are made by a Cursor")

    cdef Cursor cursor
    cdef uint64_t end

    def __iter__(self):
        return self

    def __next__(self):
        cdef Cursor cursor = self.cursor
        cdef bint taken
        while cursor.position < self.end:
            if _may_be_gone(cursor):
                cursor.look_again()
                continue
            if cursor.entry is None or cursor.position >= cursor.entry.end:
                if not cursor.advance():
                    break
            value = _take_value(cursor, cursor.entry, &taken)
            if taken:
                return value
        raise StopIteration
