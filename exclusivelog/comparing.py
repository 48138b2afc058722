"""Where a value differs from what a serialiser gives back for it (rule G10)."""

from __future__ import annotations

import collections
import enum
import reprlib
from collections.abc import Callable
from typing import Any

from exclusivelog import _core


def difference(a: Any, b: Any, path: str = "value") -> str | None:
    """Describe where `b` differs from `a`, types included; None if it does not. ValueError if they
    are nested too deep.

    >>> difference({"a": [1, (2,)]}, {"a": [1, [2]]})
    "value['a'][1] is tuple (2,), and comes back as list [2]"
    """
    if _core.same(a, b):
        return None
    if type(a) is type(b):
        found = _inside(a, b, path)
        if found is not None:
            return found
    if isinstance(a, enum.Enum) and not _core.is_member(a):
        return f"{path} is {a!r}, no member of its Enum: another process may not know it"
    return f"{path} is {_described(a)}, and comes back as {_described(b)}{_advice(a, b)}"


def first_part(value: Any, is_wanted: Callable[[Any], bool]) -> tuple[str, Any] | None:
    """The path and the first part of a value that is wanted; None if there is none. ValueError if
    the value is nested too deep."""
    _core.depth(value, _core.MOST_LEVELS)
    left = [("value", value)]
    while left:
        path, part = left.pop()
        if is_wanted(part):
            return path, part
        left += [(where, each) for each, _, where in reversed(_known_parts(part, part, path))]
    return None


def _advice(a: Any, b: Any) -> str:
    """What to write instead, where a class declares another type than it is given: often by its
    own default, which no library checks."""
    if type(a) is int and type(b) is float:
        return f": write {float(a)!r} for a field that is a float, also as its default"
    base = _core.base_of_c(type(a))
    if type(a) is type(b) and base is not None and base is not type(a):
        return f": what it is as {base.__name__} is not stored; keep that in a field"
    return ""


def _inside(a: Any, b: Any, path: str) -> str | None:
    # Loops, not `next` of a generator: that would take a thread's C stack.
    for x, y, where in _parts(a, b, path):
        if y is _NOTHING:
            return f"{path}: the {where} {_described(x)} does not come back"
        if x is _NOTHING:
            return f"{path}: the {where} {_described(y)} comes back, and was not there"
        if not _core.same(x, y):
            return difference(x, y, where)
    return None


_NOTHING: Any = object()
Part = tuple[Any, Any, str]  # of a, of b, and its path


def _parts(a: Any, b: Any, path: str) -> list[Part]:
    return _known_parts(a, b, path) + [
        (
            _core.attribute_of(a, name, _NOTHING),
            _core.attribute_of(b, name, _NOTHING),
            f"attribute {name}",
        )
        for name in _core.extras_of(a, b)
    ]


def _known_parts(a: Any, b: Any, path: str) -> list[Part]:
    names = _core.fields_of(type(a)) or ()
    fields = [(getattr(a, name, None), getattr(b, name, None), f"{path}.{name}") for name in names]
    return fields + _items_and_keys(a, b, path)


def _items_and_keys(a: Any, b: Any, path: str) -> list[Part]:
    if isinstance(a, (list, tuple, collections.deque)):
        return _items(a, b, path)
    if isinstance(a, dict):
        values = [(a[key], b[key], f"{path}[{reprlib.repr(key)}]") for key in a if key in b]
        return _members(a, b, path, "key") + values
    if isinstance(a, (set, frozenset)):
        return _members(dict.fromkeys(a), dict.fromkeys(b), path, "item")
    return []


def _items(a: Any, b: Any, path: str) -> list[Part]:
    if len(a) != len(b):
        return [(len(a), len(b), f"the length of {path}")]
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return [(a.maxlen, b.maxlen, f"{path}.maxlen")]
    return [(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]


def _members(a: dict[Any, Any], b: dict[Any, Any], path: str, what: str) -> list[Part]:
    own = {key: key for key in b}
    gone = [(key, own.get(key, _NOTHING), _where(key, own, path, what)) for key in a]
    return gone + [(_NOTHING, key, what) for key in b if key not in a]


def _where(key: Any, own: dict[Any, Any], path: str, what: str) -> str:
    return f"{path}: its {what}" if key in own else what


def _described(value: Any) -> str:
    kind = type(value).__name__
    # A model's text may be long, and contain what is secret.
    return kind if _core.fields_of(type(value)) is not None else f"{kind} {reprlib.repr(value)}"


class Checked:
    """A serialiser that decodes what it has encoded, and refuses a value that does not come back:
    equal, and of the same types.
    """

    def __init__(self, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any]) -> None:
        self._dumps, self._loads = dumps, loads

    def dumps(self, value: Any) -> bytes:
        """Encode a value; TypeError or ValueError if decoding does not give it back."""
        data = self._encoded(value, self._depth_of(value))
        try:
            found = self._loads(data)
        except Exception as error:
            raise ValueError(
                f"it could not be read back: {type(error).__name__}: {error}"
            ) from error
        if not _core.same(value, found):
            raise ValueError(f"it does not come back: {difference(value, found)}")
        self._check_found(found)
        return data

    def loads(self, data: bytes) -> Any:
        """Decode a value."""
        return self._loads(data)

    def _depth_of(self, value: Any) -> int:
        return _core.depth(value, _core.MOST_LEVELS)

    def _encoded(self, value: Any, levels: int) -> bytes:
        return self._dumps(value)

    def _check_found(self, found: Any) -> None:
        """Raise ValueError if what was decoded may be another value in another process."""
