# Columns of byte strings, from which messages are encoded: lists of bytes, or Arrow arrays.

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
        # A hand-made array may have wrong offsets; the copy must stay inside its buffers.
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
        # A null may have bytes; they are copied, but not visible.
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


def strings(items):
    """A column for `Appender.make_batch` from a list of bytes or None."""
    return ListStrings(items)


def arrow_strings(valid, offsets, data, shift, count):
    """A column for `Appender.make_batch` from an Arrow binary array's buffers."""
    return ArrowStrings(valid, offsets, data, shift, count)
