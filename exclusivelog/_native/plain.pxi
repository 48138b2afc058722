
# What a serialiser takes and gives back (rule G10).
#
# `Plain` looks at a value before it is encoded, `same` compares it with what decoding gives back,
# `depth` and `json_depth` bound what decoders of others may recurse into. All of them
# bound their own recursion: a thread's stack of 128 KiB is enough.

cdef enum:
    LEVELS = 100  # of a value that is written
    LEVELS_READ = 250  # older versions wrote deeper ones

MOST_LEVELS, MOST_LEVELS_READ = LEVELS, LEVELS_READ


cdef extern from "<math.h>" nogil:
    double floor(double)
    bint isfinite(double)


cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int*) except? -1


def dump_str(value):
    """Encode a str as UTF-8; TypeError for an object of another class, subclasses included."""
    if type(value) is not str:
        raise TypeError(f"it takes str, not {type(value).__name__}")
    return (<str>value).encode("utf-8")


def dump_bytes(value):
    """Return bytes as they are, and a copy of what is bytes-like; TypeError for other objects."""
    if type(value) is bytes:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"it takes bytes, not {type(value).__name__}")


@cython.final
cdef class Plain:
    """Refuses what a serialiser would not give back: `check(value)` raises TypeError or ValueError.

    - `name`: the serialiser's, for errors.
    - `kinds`: the classes that it takes, without their subclasses.
    - `extended`: those that it stores by means of its own; `check` returns whether there are any.
      A function looks at each object of its class; None: it takes all.
    - `json`: dicts have keys that are str, floats are finite, ints are not endless.
    - `key`: for keys of maps: what equals another key is refused unless it has the same bytes.
    """

    cdef str name
    cdef frozenset kinds
    cdef dict extended
    cdef bint json, key

    def __init__(self, str name, kinds, dict extended, *, bint json=False, bint key=False):
        self.name, self.kinds, self.extended = name, frozenset(kinds), extended
        self.json, self.key = json, key

    def check(self, value):
        return bool(_look(self, value, LEVELS, self.key))


MOST_BITS = 2100  # of an int as text: any Python reads 640 digits, whatever its limit is


cdef int _look(Plain plain, object value, int left, bint hashed) except -1:
    """Whether the value, at most `left` levels deep, has parts of extended classes. `hashed`: it is
    in a set, or a key of a dict."""
    cdef object kind = type(value)
    if kind is str or value is None:
        return 0
    if kind is int:
        return _look_at_int(plain, value)
    if kind is float:
        _look_at_float(plain, value, hashed)
        return 0
    if kind not in plain.kinds:
        raise _not_taken(plain, value)
    if kind is list or kind is tuple or kind is dict or kind is set or kind is frozenset:
        return _look_inside(plain, value, kind, left, hashed)
    if kind not in plain.extended:
        return 0
    check = plain.extended[kind]
    if check is not None:
        check(value, hashed)
    return 1


cdef object _not_taken(Plain plain, object value):
    from reprlib import repr as shortened  # of a value that may be deep

    what = f"{type(value).__name__}{' as a key' if plain.key else ''}"
    return TypeError(f"{plain.name} does not take {what}: {shortened(value)}")


cdef int _look_at_int(Plain plain, object value) except -1:
    cdef int overflow = 0
    PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow == 0:
        return 0
    if plain.json:
        if value.bit_length() > MOST_BITS:
            raise ValueError(_too_large(value))
        return 0
    if 0 < value < 1 << 64:
        return 0
    if int not in plain.extended:
        raise ValueError(
            f"an int of {value.bit_length()} bits: {plain.name} takes those from -2**63 to 2**64 - 1; "
            "store its str, or use 'exact'"
        )
    return 1


cdef int _look_at_float(Plain plain, double value, bint hashed) except -1:
    if plain.json and not isfinite(value):
        raise ValueError(f"JSON has no {value}: store None or a str instead, or use 'exact'")
    if hashed and value != value:
        raise ValueError("NaN in a set, or as a key, cannot be found again")
    if plain.key and value == floor(value):
        raise TypeError(f"as a key, {value} equals an int, which has other bytes; use that")
    return 0


cdef int _look_inside(Plain plain, object value, object kind, int left, bint hashed) except -1:
    cdef int found = kind in plain.extended
    if left == 0:
        raise ValueError(f"it is nested deeper than {LEVELS} levels")
    if kind is dict:
        for name, item in (<dict>value).items():
            if plain.json and type(name) is not str:
                raise TypeError(f"JSON takes keys that are str, not {type(name).__name__}")
            found |= _look(plain, name, left - 1, True) | _look(plain, item, left - 1, hashed)
    else:
        hashed = hashed or kind is set or kind is frozenset
        for item in value:
            found |= _look(plain, item, left - 1, hashed)
    return found


cdef object _MISSING = object()


# ---- depth -----------------------------------------------------------------------------------


def json_depth(bytes data not None, int deepest):
    """The levels of a JSON text; ValueError if it is nested deeper than that."""
    return _json_depth(data, deepest)


cdef int _json_depth(bytes data, int deepest) except -1:
    cdef const unsigned char* at = <const unsigned char*>PyBytes_AS_STRING(data)
    cdef const unsigned char* end = at + PyBytes_GET_SIZE(data)
    cdef int depth = 0, found = 0
    cdef bint quoted = False
    while at < end:
        if quoted:
            if at[0] == c'\\':
                at += 1
            elif at[0] == c'"':
                quoted = False
        elif at[0] == c'"':
            quoted = True
        elif at[0] == c'[' or at[0] == c'{':
            depth += 1
            if depth > found:
                found = depth
                if depth > deepest:
                    raise ValueError(f"it is nested deeper than {deepest} levels")
        elif at[0] == c']' or at[0] == c'}':
            depth -= 1
        at += 1
    return found


def depth(value, int deepest, *, bint json=False):
    """The levels of an object, its fields included; ValueError if it is nested deeper than that.

    - `json`: it is stored as JSON: ValueError also if it has a number that is too large for that.
    """
    return _look_down(value, deepest, deepest, json)


cdef int _look_down(object value, int left, int deepest, bint json) except -1:
    cdef int found = 0
    cdef object parts = _parts_of(value)
    if parts is None:
        if json and value is not None and type(value) is not str:
            _check_size(value)
        return 0
    if left == 0:
        raise ValueError(f"it is nested deeper than {deepest} levels")
    for part in parts:
        found = max(found, _look_down(part, left - 1, deepest, json))
    if json and isinstance(value, dict):
        for key in value:
            _look_down(key, left - 1, deepest, json)
    return found + 1


MOST_EXPONENT = 6144  # of a Decimal: that of 128 bits; written out, it has as many digits


cdef int _check_size(object value) except -1:
    """Raise ValueError for a number that takes others too long to read, or that they refuse."""
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise ValueError(_too_large(value))
    elif hasattr(value, "adjusted") and not -MOST_EXPONENT <= value.adjusted() <= MOST_EXPONENT:
        raise ValueError(
            f"a {type(value).__name__} with the exponent {value.adjusted()}: JSON takes those up "
            f"to {MOST_EXPONENT} either way; store its str, or use 'exact'"
        )
    return 0


cdef str _too_large(object value):
    return (
        f"an int of {value.bit_length()} bits: JSON takes {MOST_BITS}; store its str or its hex, or "
        "use 'exact'"
    )


cdef object _parts_of(object value):
    """The items of a collection, the values of a dict, or the fields of an object; None for what
    has none."""
    cdef object kind = type(value)
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return None
    if isinstance(value, _enum.Enum):  # it is encoded as its value; an item of a flag is a flag
        return _parts_of(value._value_)
    if isinstance(value, dict):
        return (<object>value).values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    names = _fields_of(kind)
    if names is not None:
        return [getattr(value, name, None) for name in names]
    return _items_of(value) if _is_collection(kind) else None


def left_out(value, dict defaults not None):
    """The first field that an object, which was decoded, has not read but got by default; None if
    there is none.

    - `defaults`: the names of the fields to look at, by their classes.
    """
    return _left_out(value, defaults, LEVELS_READ + 10)


cdef str _left_out(object value, dict defaults, int left):
    cdef object kind = type(value), parts = _parts_of(value)
    if parts is None:
        return None
    if left == 0:
        raise ValueError("it is nested too deep to be searched")
    names = defaults.get(kind)
    if names is not None and not names <= value.__pydantic_fields_set__:
        return f"{kind.__name__}.{min(names - value.__pydantic_fields_set__)}"
    for part in parts:
        found = _left_out(part, defaults, left - 1)
        if found is not None:
            return found
    return None


# ---- collections that are no list, tuple, dict or set ----------------------------------------


cdef bint _is_collection(object kind):
    """Whether objects of a class have items, such as those of a deque or of a class of the
    application's."""
    return (
        _static(kind, "__len__") is not None and _static(kind, "__iter__") is not None
        and not issubclass(kind, (str, bytes, bytearray, memoryview, range, type))
    )


cdef object _items_of(object value):
    """The items of a collection; those of a mapping with their keys."""
    return list(value.items() if hasattr(value, "keys") and hasattr(value, "items") else value)


# ---- comparison ------------------------------------------------------------------------------


cdef dict _known_fields = {}  # by class


cdef object _fields_of(object kind):
    """The names of what objects of a class are compared by; None: by ==."""
    found = _known_fields.get(kind, False)
    if found is False:
        found = _known_fields[kind] = _find_fields(kind)
    return found


def _find_fields(kind):
    if hasattr(kind, "__pydantic_fields__"):  # also of pydantic's own dataclasses
        return (*kind.__pydantic_fields__, "__pydantic_extra__", "__pydantic_private__")
    if hasattr(kind, "__dataclass_fields__"):
        import dataclasses

        return tuple([field.name for field in dataclasses.fields(kind)])
    if hasattr(kind, "__struct_fields__"):
        return tuple(kind.__struct_fields__)
    if hasattr(kind, "__attrs_attrs__"):
        return tuple([field.name for field in kind.__attrs_attrs__])
    return _attributes(kind) if kind.__eq__ is object.__eq__ else None


def _attributes(kind):
    """The names of all that an object consists of; None if its class is not all Python's."""
    names = {"__dict__", "__weakref__"}
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.add(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    made_by_class = kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    if not made_by_class or _base_of_c(kind) is not None:
        return None  # a lock, a file: C has something of its own in them
    return tuple(names - {"__weakref__"})


cdef object _base_of_c(object kind):
    """The class that a class extends in whose objects C has something of its own: int of a subclass
    of int; None if there is none."""
    cdef object found = _known_bases.get(kind, False)
    if found is False:
        found = _known_bases[kind] = _find_base_of_c(kind)
    return found


cdef dict _known_bases = {}  # by class


cdef object _find_base_of_c(object kind):
    cdef object base
    while kind is not object:
        base = kind.__base__
        if kind.__itemsize__ != base.__itemsize__:
            return kind
        if kind.__basicsize__ > base.__basicsize__ + 8 * _pointers_added(kind, base):
            return kind
        kind = base
    return None


cdef int _pointers_added(object kind, object base):
    """The slots that the objects of a class have, and those of its base do not."""
    cdef int added = kind.__dictoffset__ > 0 and base.__dictoffset__ == 0
    added += kind.__weakrefoffset__ > 0 and base.__weakrefoffset__ == 0
    return added + len(_slots_of(kind))


cdef list _slots_of(object kind):
    """The names of the slots that a class statement declares, as its objects have them."""
    if "__slots__" not in vars(kind):
        return []
    return [
        name for name, each in vars(kind).items()
        if slot_offset(each) != 0 and each.__objclass__ is kind  # attrs copies those of others
    ]


def fields_of(kind):
    """The names of the fields that objects of a class are compared by; None: by ==."""
    return _fields_of(kind)


def same(a, b):
    """Whether two objects are equal and have the same classes, their parts included. NaN is the
    same as NaN, and 0.0 is not the same as -0.0. ValueError if they are nested too deep."""
    return bool(_same(a, b, LEVELS_READ + 10))


cdef int _same(object a, object b, int left) except -1:
    cdef object kind = type(a)
    if kind is not type(b):
        return False
    if kind is str or kind is int or kind is bytes or kind is bool or a is None:
        return a == b
    if kind is float:
        return a == b and (a != 0 or str(a) == str(b)) or (a != a and b != b)
    if left == 0:
        raise ValueError("it is nested too deep to be compared")
    if kind is list or kind is tuple:
        return _same_items(a, b, left - 1)
    if kind is dict:
        return _same_dicts(a, b, left - 1)
    if isinstance(a, _enum.Enum):
        return a is b and _is_member(a, kind)
    if not _same_attributes(a, b, left - 1):
        return False
    names = _fields_of(kind)
    if names is not None and a is not b:
        for name in names:
            if not _same(getattr(a, name, _MISSING), getattr(b, name, _MISSING), left - 1):
                return False
        if _base_of_c(kind) is None:
            return True
    if isinstance(a, (list, tuple)):
        return _same_items(a, b, left - 1) and _same_hidden(a, b, kind, left - 1)
    if isinstance(a, dict):
        return _are_alike(a, b) and _same_dicts(dict(a), dict(b), left - 1)
    if isinstance(a, (set, frozenset)):
        return _same_dicts(dict.fromkeys(a), dict.fromkeys(b), left - 1)
    return _same_objects(a, b, kind, left - 1)


cdef int _same_hidden(object a, object b, object kind, int left) except -1:
    """Whether two tuples have the same in fields that are no items of them: a `struct_time` has its
    zone there."""
    if not issubclass(kind, tuple) or not hasattr(kind, "n_unnamed_fields"):
        return True
    return _same(a.__reduce__()[1], b.__reduce__()[1], left)


cdef int _same_items(object a, object b, int left) except -1:
    if len(a) != len(b):
        return False
    for x, y in zip(a, b):
        if not _same(x, y, left):
            return False
    return True


cdef int _same_dicts(dict a, dict b, int left) except -1:
    cdef dict keys = None
    if len(a) != len(b):
        return False
    for (key, item), (other, its) in zip(a.items(), b.items()):
        if key != other:
            if keys is None:
                keys = {each: each for each in b}
            if key not in keys:
                return False
            other, its = keys[key], b[key]
        if not (_same(key, other, left) and _same(item, its, left)):
            return False
    return True


cdef int _same_objects(object a, object b, object kind, int left) except -1:
    if a is b:
        return True
    if isinstance(a, (_datetime.datetime, _datetime.time)):
        return _equal(a, b, kind) and a.fold == b.fold and _same_zone(a.tzinfo, b.tzinfo)
    if hasattr(a, "as_tuple"):  # Decimal: == of a signalling NaN raises, and 1.0 equals 1.00
        return a.as_tuple() == b.as_tuple()
    if isinstance(a, float):
        return float.__repr__(a) == float.__repr__(b)
    if isinstance(a, complex):
        return _same(a.real, b.real, left) and _same(a.imag, b.imag, left)
    if not (_equal(a, b, kind) and _are_alike(a, b)):
        return False
    if isinstance(a, _abc.Set):
        return _same_dicts(dict.fromkeys(a), dict.fromkeys(b), left)
    if _is_collection(kind):
        return _same_items(_items_of(a), _items_of(b), left)
    return _same_parts_of_equal(a, b, kind, left)


cdef bint _equal(object a, object b, object kind) except -1:
    """Whether two objects are equal: of a class with fields, which are compared, whose own == knows
    nothing else, what they are in C."""
    if _fields_of(kind) is None:
        return _are_equal(a, b)
    base = _base_of_c(kind)
    return base is not None and base.__eq__(a, b) is True


# By == of a deque, a defaultdict, an array.
cdef tuple IGNORED = ("maxlen", "default_factory", "typecode")


cdef bint _are_alike(object a, object b) except -1:
    """Whether two collections have in common what == ignores; an OrderedDict its order, too."""
    for name in IGNORED:
        x, y = getattr(a, name, None), getattr(b, name, None)
        if x is not y and x != y:
            return False
    if type(a) is memoryview:
        return a.format == b.format and a.shape == b.shape
    return not isinstance(a, _collections.OrderedDict) or list(a) == list(b)


cdef int _same_parts_of_equal(object a, object b, object kind, int left) except -1:
    """Whether two objects that are equal by a method of their class have no attributes that are
    equal, and not the same: 1 and True. What the method ignores is left to it."""
    cdef object names = _known_parts.get(kind)
    if names is None:
        names = _known_parts[kind] = _attributes(kind) or ()
    for name in names:
        for x, y in _pairs(getattr(a, name, _MISSING), getattr(b, name, _MISSING), name):
            if x is not y and _are_equal(x, y) and not _same(x, y, left):
                return False
    return True


cdef dict _known_parts = {}  # by class: the attributes of objects that a method of it compares


cdef list _pairs(object x, object y, str name):
    """An attribute of two objects; of `__dict__`, all that both of them have."""
    if name != "__dict__" or x is _MISSING or y is _MISSING:
        return [(x, y)]
    return [(x[each], y[each]) for each in x if each in y]


cdef bint _are_equal(object x, object y):
    try:
        return bool(x == y)
    except Exception:  # of an array, which is compared item by item
        return False


cdef int _same_attributes(object a, object b, int left) except -1:
    """Whether they have the same attributes beside what their class is compared by."""
    for name in _extras(a, b):
        if not _same(_attribute(a, name), _attribute(b, name), left):
            return False
    return True


def extras_of(a, b):
    """The names of the attributes of two objects of a class that are no fields of it. A cached
    property is none: it is computed again."""
    return _extras(a, b)


def attribute_of(value, name, default):
    """An attribute that `extras_of` names; `default` if the object does not have it."""
    found = _attribute(value, name)
    return default if found is _MISSING else found


cdef object _attribute(object value, object name):
    """What an object has by this name in a slot, in its `__dict__` or from its class; `_MISSING` if
    nothing. No code of the application's runs, as a `__getattr__` that computes it."""
    cdef object kind = type(value), inherited = _MISSING, found
    for base in kind.__mro__:
        found = vars(base).get(name, _MISSING)
        if slot_offset(found) != 0 and issubclass(kind, found.__objclass__):
            try:
                return found.__get__(value)
            except AttributeError:
                return _MISSING
        inherited = found if inherited is _MISSING else inherited
    if kind.__dictoffset__ == 0:
        return inherited
    return PyObject_GenericGetDict(value, NULL).get(name, inherited)


cdef tuple _extras(object a, object b):
    cdef object kind = type(a), known = _known_names.get(kind), found, other
    cdef tuple extras
    if known is None:
        known = _known_names[kind] = _compared_names(kind), _ignored_slots(kind)
    names, extras = known
    if extras:
        extras = tuple([
            name for name in extras
            if _attribute(a, name) is not _MISSING or _attribute(b, name) is not _MISSING
        ])
    if names is None:
        return extras
    found, other = PyObject_GenericGetDict(a, NULL), PyObject_GenericGetDict(b, NULL)
    if found.keys() <= names and other.keys() <= names:
        return extras
    return extras + tuple([
        name for name in {**found, **other}
        if name not in names and not hasattr(_static(kind, name), "__get__")
    ])


cdef dict _known_names = {}  # by class: what its comparison knows, and the slots that it ignores


# `G[int](1)` notes there what it was made by.
cdef frozenset OF_TYPING = frozenset({"__orig_class__"})


cdef object _compared_names(object kind):
    """The names of the fields of a class whose comparison ignores other attributes; None for other
    classes. A method of the application's is believed."""
    if kind.__dictoffset__ == 0 or issubclass(kind, type):
        return None
    names = _fields_of(kind)
    if names is not None:
        return None if "__dict__" in names else OF_TYPING.union(names)
    definer = _definer_of_eq(kind)
    if not hasattr(vars(definer)["__eq__"], "__code__"):
        return OF_TYPING
    # A method of Python's own knows nothing of what a class that extends its own adds.
    return OF_TYPING if _is_of_library(definer) and not _is_of_library(kind) else None


cdef tuple _ignored_slots(object kind):
    """The slots of a class that its comparison ignores."""
    cdef object names = _fields_of(kind), definer = None
    if names is None:
        definer = _definer_of_eq(kind)
        definer = definer if hasattr(vars(definer)["__eq__"], "__code__") else None
    elif "__dict__" in names:
        return ()
    return tuple([name for name in names_of_slots(kind, definer) if name not in (names or ())])


cdef object _definer_of_eq(object kind):
    """The class that defines how objects of a class are compared."""
    for base in kind.__mro__:
        if "__eq__" in vars(base):
            return base
    return object


# They know what their own slots are for.
cdef frozenset LIBRARIES = frozenset({
    *_sys.stdlib_module_names, "pydantic", "pydantic_core", "msgspec", "attr", "attrs",
})


cdef bint _is_of_library(object kind):
    return str(kind.__module__).partition(".")[0] in LIBRARIES


def names_of_slots(kind, until=None):
    """The names of the slots that an application's classes declare, of a class and those that it
    extends, up to one of these. Not of those where attrs keeps what it computes."""
    cdef set found = set(), computed = {"_attrs_cached_hash"}
    for base in kind.__mro__:
        if base is until:
            break
        computed.update(_cached_by_attrs(base))
        if not _is_of_library(base):
            found.update([name for name in _slots_of(base) if name not in computed])
    return found


def keeps_computed(kind):
    """Whether a class has slots for its cached properties."""
    return any([_cached_by_attrs(base) for base in kind.__mro__])


cdef tuple _cached_by_attrs(object kind):
    """The names of the cached properties for which attrs makes slots in a class: its `__getattr__`
    computes what is not there, and has them as a default."""
    cdef object compute = vars(kind).get("__getattr__")
    if "__attrs_attrs__" not in vars(kind) or not hasattr(compute, "__code__"):
        return ()
    if compute.__code__.co_varnames[2:3] != ("cached_properties",) or not compute.__defaults__:
        return ()
    return tuple(compute.__defaults__[0])


def base_of_c(kind):
    """The class that a class extends in whose objects C has something of its own; None: none."""
    return _base_of_c(kind)


def is_member(value):
    """Whether an object of an Enum is the same in every process: a member, or several of a Flag. An
    Enum's own `_missing_` may make others, and know in one process what it does not in another."""
    return _is_member(value, type(value))


cdef bint _is_member(object value, object kind) except -1:
    if kind._member_map_.get(value._name_) is value:
        return True
    if not issubclass(kind, _enum.Flag):
        return False
    own = getattr(kind._missing_, "__func__", kind._missing_)
    return own is _enum.Flag._missing_.__func__ or not value._value_ & ~kind._flag_mask_


cdef bint _same_zone(object a, object b) except -1:
    """Whether it is the same zone, or the same offset: pydantic has a class of its own for those,
    and `datetime.astimezone()` gives them names, which no format has."""
    if a is b or a is None or b is None:
        return a is b
    offset = a.utcoffset(None)
    return offset is not None and offset == b.utcoffset(None) or (type(a) is type(b) and a == b)
