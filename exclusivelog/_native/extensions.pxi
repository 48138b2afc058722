
# Extension types of msgpack that contain msgpack: the serialiser `exact`.
#
# msgpack takes 48 KiB of a thread's C stack for each call, so extensions are unpacked one after
# another, never inside of one another's calls. Lists and dicts are changed in place.

cdef enum:
    SHALLOW_LEVELS = 40  # which any thread's stack has room for, beside a call of msgpack
    OLDEST_LEVELS = 512  # what older versions may have written: msgpack's own limit


@cython.final
@cython.freelist(64)
cdef class Extension:
    """An extension type that is yet to be decoded. msgpack's hook."""

    cdef int code
    cdef bytes data

    def __cinit__(self, int code, bytes data not None):
        self.code, self.data = code, data


class _Deeper(Exception):
    """A value needs more of the stack than a thread may have."""


@cython.final
cdef class Extensions:
    """Decodes values with extension types.

    - `unpack`: msgpack's function.
    - `kinds`: for each code, a function from what the extension contains to the value; `texts`: the
      same for an extension that contains a str.
    - `with_deep_stack`: calls a function in a thread whose stack suffices for any value.
    """

    cdef str name
    cdef object unpack, with_deep_stack
    cdef tuple kinds, texts

    def __init__(self, str name, unpack, kinds, texts, with_deep_stack):
        self.name, self.unpack, self.with_deep_stack = name, unpack, with_deep_stack
        self.kinds, self.texts = tuple(kinds), tuple(texts)

    def loads(self, data):
        """Decode a value; ValueError if it is nested too deep."""
        try:
            value = self.unpack(data, ext_hook=Extension, strict_map_key=False)
            return self._revived(value, OLDEST_LEVELS, OLDEST_LEVELS - SHALLOW_LEVELS)
        except _Deeper:
            return self.with_deep_stack(lambda: self._loads_deep(data))

    def _loads_deep(self, data):
        value = self.unpack(data, ext_hook=Extension, strict_map_key=False)
        return self._revived(value, OLDEST_LEVELS, 0)

    cdef object _revived(self, object value, int left, int least):
        cdef object kind = type(value)
        if kind is not list and kind is not dict and kind is not Extension:
            return value
        if left <= least:
            if least:
                raise _Deeper
            raise ValueError(f"it is nested deeper than {OLDEST_LEVELS} levels")
        if kind is list:
            self._revive_items(value, left - 1, least)
            return value
        if kind is dict:
            return self._revived_dict(value, left - 1, least)
        return self._decoded(value, left, least)

    cdef int _revive_items(self, list items, int left, int least) except -1:
        cdef Py_ssize_t at
        cdef object item
        for at in range(PyList_GET_SIZE(items)):
            item = <object>PyList_GET_ITEM(items, at)
            if type(item) is list or type(item) is dict or type(item) is Extension:
                items[at] = self._revived(item, left, least)
        return 0

    cdef dict _revived_dict(self, dict items, int left, int least):
        cdef bint plain = True
        for key, item in items.items():
            plain = plain and type(key) is not Extension
            if type(item) is list or type(item) is dict or type(item) is Extension:
                items[key] = self._revived(item, left, least)
        if plain:
            return items
        return {self._revived(key, left, least): item for key, item in items.items()}

    cdef object _decoded(self, Extension each, int left, int least):
        cdef object inside
        if not 0 <= each.code < PyTuple_GET_SIZE(self.kinds):
            raise ValueError(
                f"msgpack extension {each.code} is unknown to the serialiser {self.name}"
            )
        inside = _short_text(each.data)
        if inside is None:
            inside = self.unpack(each.data, ext_hook=Extension, strict_map_key=False)
            # An extension right inside of one is no level of the value, but takes stack, too.
            inside = self._revived(inside, left - (type(inside) is Extension), least)
        return (self.texts if type(inside) is str else self.kinds)[each.code](inside)


cdef object _short_text(bytes data):
    """The str that is all of the bytes, if its length is in the first one; else None."""
    cdef const unsigned char* at = <const unsigned char*>PyBytes_AS_STRING(data)
    cdef Py_ssize_t length = PyBytes_GET_SIZE(data) - 1
    if length < 0 or at[0] != (0xA0 | length) or length > 31:
        return None
    return data[1:].decode("utf-8")
