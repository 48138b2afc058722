
# Objects of a class, and whether they must be decoded to find out that they come back (rule G10).
#
# A class is looked at once: what its objects consist of is a `Shape`. An object is then looked at
# part by part, which costs less than to encode it.

cdef extern from *:
    """
    #include <stddef.h>
    #include "structmember.h"

    /* Where a slot is in an object of its class; 0 if it is no slot. */
    static Py_ssize_t slot_offset(PyObject* found) {
        if (!Py_IS_TYPE(found, &PyMemberDescr_Type)) return 0;
        PyMemberDef* member = ((PyMemberDescrObject*)found)->d_member;
        return member->type == T_OBJECT_EX ? member->offset : 0;
    }
    """
    Py_ssize_t slot_offset(object found)

cdef extern from "Python.h":
    object PyObject_GenericGetDict(object, void*)
    PyObject* PyDict_GetItemWithError(dict, object)
    Py_ssize_t PyDict_Size(dict)

cdef enum:  # what is looked at in an object of a class
    NOTHING_MORE  # it comes back
    AN_INT
    A_FLOAT
    A_DATETIME
    A_TIME
    A_DECIMAL
    A_MEMBER
    A_TEXT
    ONE_OF  # a literal
    ITEMS  # each has one shape
    A_DICT
    A_ROW  # a tuple: each item has a shape of its own
    FIELDS

_SHAPES = {
    "": NOTHING_MORE, "int": AN_INT, "float": A_FLOAT, "datetime": A_DATETIME, "time": A_TIME,
    "decimal": A_DECIMAL, "member": A_MEMBER, "text": A_TEXT, "one of": ONE_OF,
    "items": ITEMS, "dict": A_DICT, "row": A_ROW, "fields": FIELDS,
}

cdef enum:  # what a class declares of a value
    ABOVE
    AT_LEAST
    BELOW
    AT_MOST
    A_MULTIPLE
    AT_LEAST_LONG
    AT_MOST_LONG
    DIGITS
    PLACES
    WHOLE_DIGITS

_BOUNDS = {
    "gt": ABOVE, "ge": AT_LEAST, "lt": BELOW, "le": AT_MOST, "multiple_of": A_MULTIPLE,
    "min_length": AT_LEAST_LONG, "max_length": AT_MOST_LONG, "max_digits": DIGITS,
    "decimal_places": PLACES, "whole_digits": WHOLE_DIGITS,
}


@cython.final
cdef class Shape:
    """What objects of a class consist of, if msgspec gives back each object that consists of it, so
    that those need not be decoded to find out.

    - `kind`: their class; None: nothing is known of them. `look`: a key of `_SHAPES`.
    - `names`, `parts`: the fields, and their shapes. `parts` alone: the items of a tuple, the
      members of an Enum, or the values of a literal.
    - `item`: that of each item of a list, a tuple or a set, or of each value of a dict.
    - `key`: that of the keys of a dict.
    - `optional`: the shape that it has unless it is None. `choices`: one for each class.
    - `bounds`: what its class declares of its value: {"gt": 0, "max_digits": 5}, by `_BOUNDS`.
    """

    cdef public object kind
    cdef readonly tuple names
    cdef public tuple parts
    cdef Py_ssize_t* slots  # of each field: where it is in an object; 0: its `__dict__` may have it
    cdef bint has_dict
    cdef Py_ssize_t in_dict  # how many fields the `__dict__` of an object has
    cdef public Shape key, item, optional
    cdef public dict choices
    cdef tuple bounds
    cdef int look

    def __init__(
        self, kind=None, str look="", Shape item=None, Shape key=None, tuple parts=(),
        Shape optional=None, dict choices=None, dict bounds=None,
    ):
        self.kind, self.look = kind, _SHAPES[look]
        self.item, self.key, self.parts = item, key, parts
        self.optional, self.choices, self.names = optional, choices, ()
        self.bounds = tuple([(_BOUNDS[name], limit) for name, limit in (bounds or {}).items()])

    def __dealloc__(self):
        free(self.slots)

    def has_fields(self, tuple names not None, tuple parts not None):
        """Objects consist of these fields. Called once."""
        self.slots = <Py_ssize_t*>malloc(max(1, len(names)) * sizeof(Py_ssize_t))
        if self.slots == NULL:
            raise MemoryError()
        for at, name in enumerate(names):
            self.slots[at] = slot_offset(_static(self.kind, name))
            self.in_dict += self.slots[at] == 0
        self.has_dict = self.kind.__dictoffset__ != 0
        self.names, self.parts = names, parts
        if _base_of_c(self.kind) is not None or not names_of_slots(self.kind) <= {*names}:
            self.kind = None  # they have more than fields: nothing is known of them

    def holds(self, value):
        """Whether an object consists of this. False: nothing is known of it."""
        return bool(_holds(self, value, LEVELS))


cdef Shape _UNKNOWN = Shape()
cdef object _UTC = _datetime.UTC


cdef object _static(object kind, object name):
    """What a class has by this name, not bound to an object; None if nothing."""
    for base in kind.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


cdef int _holds(Shape shape, object value, int left) except -1:
    cdef int overflow = 0
    if shape.optional is not None:
        if value is None:
            return True
        shape = shape.optional
    elif shape.choices is not None:
        shape = <Shape?>shape.choices.get(type(value), _UNKNOWN)
    if type(value) is not shape.kind:
        return False
    if shape.bounds and not _is_within(shape.bounds, value):
        return False
    if shape.look == NOTHING_MORE:
        return True
    elif shape.look == AN_INT:
        PyLong_AsLongLongAndOverflow(value, &overflow)
        return overflow == 0
    elif shape.look == A_FLOAT:
        return isfinite(PyFloat_AS_DOUBLE(value))
    elif shape.look == A_DATETIME:
        return not value.fold and (value.tzinfo is None or value.tzinfo is _UTC)
    elif shape.look == A_TIME:
        return not value.fold and value.tzinfo is None
    elif shape.look == A_DECIMAL:
        return value.is_finite() and -MOST_EXPONENT <= value.adjusted() <= MOST_EXPONENT
    elif shape.look == A_MEMBER:
        return _is_one_of(shape.parts, value)
    elif shape.look == ONE_OF:
        return value in shape.parts
    elif shape.look == A_TEXT:
        return value.isascii() or _is_utf8(value)
    return left and _hold_parts(shape, value, left - 1)


cdef bint _is_within(tuple bounds, object value):
    """Whether a value is within the bounds of its class. False: nothing is known of it."""
    cdef int bound
    for bound, limit in bounds:
        try:
            if not _keeps(bound, limit, value):
                return False
        except Exception:  # of a time with a zone, compared with one without; of a NaN
            return False
    return True


cdef bint _keeps(int bound, object limit, object value) except -1:
    if bound == ABOVE:
        return value > limit
    elif bound == AT_LEAST:
        return value >= limit
    elif bound == BELOW:
        return value < limit
    elif bound == AT_MOST:
        return value <= limit
    elif bound == A_MULTIPLE:
        return value % limit == 0
    elif bound == AT_LEAST_LONG:
        return len(value) >= limit
    elif bound == AT_MOST_LONG:
        return len(value) <= limit
    # As it is written. A library may take more: 1.00 where one place is allowed.
    _, digits, exponent = value.as_tuple()
    if bound == PLACES:
        return -exponent <= limit
    if bound == WHOLE_DIGITS:
        return len(digits) + exponent <= limit
    return max(len(digits) + max(0, exponent), -exponent) <= limit


cdef bint _is_utf8(str value):
    """Whether it has no surrogates: pydantic writes others for those in a key."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


cdef bint _is_one_of(tuple members, object value):
    cdef Py_ssize_t at
    for at in range(PyTuple_GET_SIZE(members)):
        if value is <object>PyTuple_GET_ITEM(members, at):
            return True
    return False


cdef int _hold_parts(Shape shape, object value, int left) except -1:
    cdef Py_ssize_t at, length = PyTuple_GET_SIZE(shape.parts)
    cdef dict given
    if shape.look == FIELDS:
        given = PyObject_GenericGetDict(value, NULL) if shape.has_dict else None
        if given is not None and PyDict_Size(given) != shape.in_dict:
            return False  # it has other attributes
        for at in range(length):
            part = _field(shape, value, given, at)
            if not _holds(<Shape>PyTuple_GET_ITEM(shape.parts, at), part, left):
                return False
    elif shape.look == A_ROW:
        if PyTuple_GET_SIZE(value) != length:
            return False
        for at in range(length):
            part = <object>PyTuple_GET_ITEM(value, at)
            if not _holds(<Shape>PyTuple_GET_ITEM(shape.parts, at), part, left):
                return False
    elif shape.look == A_DICT:
        for key, part in (<dict>value).items():
            if not (_holds(shape.key, key, left) and _holds(shape.item, part, left)):
                return False
    elif type(value) is list:
        for part in <list>value:
            if not _holds(shape.item, part, left):
                return False
    else:
        for part in value:
            if not _holds(shape.item, part, left):
                return False
    return True


cdef inline object _field(Shape shape, object value, dict given, Py_ssize_t at):
    """A field of an object, read where the encoder reads it: half the time of `getattr`."""
    cdef PyObject* found = NULL
    name = <object>PyTuple_GET_ITEM(shape.names, at)
    if shape.slots[at] != 0:
        found = (<PyObject**>(<char*><PyObject*>value + shape.slots[at]))[0]
    elif given is not None:
        found = PyDict_GetItemWithError(given, name)
    if found != NULL:
        return <object>found
    return getattr(value, name, _MISSING)


cdef class Coder:
    """Encodes objects of a class as JSON, and decodes them. A subclass does what costs more:
    `_checked(value)` encodes what no shape holds, `_load_deep(data)` decodes what may need more
    stack than a thread has.
    """

    cdef readonly Shape shape
    cdef object _encode, _decode
    cdef int _shallow
    cdef int _most  # levels that are encoded without a look at the stack

    def _set(self, encode, decode, Shape shape, int shallow):
        """`encode`: of what the shape holds. `shallow`: the levels that `encode` and `decode` take in
        any thread."""
        self._encode, self._decode = encode, decode
        self._most = min(LEVELS, shallow)
        self.shape, self._shallow = shape, shallow

    def dumps(self, value):
        """Encode an object; TypeError or ValueError if it would not come back."""
        if _holds(self.shape, value, self._most):
            try:
                return self._encode(value)
            except ValueError:  # of a text with surrogates
                pass
        return self._checked(value)

    def loads(self, bytes data not None):
        """Decode an object."""
        if _json_depth(data, LEVELS_READ) <= self._shallow:
            return self._decode(data)
        return self._load_deep(data)
