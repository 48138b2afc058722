"""Convert dataclasses to and from JSON by the types of their fields; see `serde.model`."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import decimal
import enum
import json
import types
import typing
import uuid
from collections.abc import Callable
from typing import Any, Protocol

SCALARS = (str, int, float, bool, types.NoneType)
# Stored as text: (to text, from text).
TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    dt.datetime: (dt.datetime.isoformat, dt.datetime.fromisoformat),
    dt.date: (dt.date.isoformat, dt.date.fromisoformat),
    dt.time: (dt.time.isoformat, dt.time.fromisoformat),
    decimal.Decimal: (str, decimal.Decimal),
    uuid.UUID: (str, uuid.UUID),
}
COLLECTIONS = {
    list: list, set: set, frozenset: frozenset, collections.abc.Sequence: list,
}  # fmt: skip
MAPPINGS = (dict, collections.abc.Mapping)


class Codec(Protocol):
    """Converts one type of field to and from JSON types. Both methods raise TypeError or ValueError
    for a value of another type."""

    def dump(self, value: Any) -> Any:
        """Return the JSON form of a value."""

    def load(self, data: Any) -> Any:
        """Return the value of a JSON form."""


class AsIs:
    """`Any`, and types that are also JSON types."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds  # none: any

    def _check(self, value: Any) -> Any:
        kinds = self._kinds
        if not kinds or type(value) in kinds or (type(value) is int and float in kinds):
            return value
        if isinstance(value, kinds) and not isinstance(value, (bool, enum.Enum)):
            return value
        raise TypeError(f"it takes {_names(kinds)}, not {value!r}")

    dump = load = _check


class Text:
    """A type that is stored as text."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._dump, self._load = TEXTS[kind]

    def dump(self, value: Any) -> str:
        """Its text."""
        if not isinstance(value, self._kind):
            raise TypeError(f"it takes {self._kind.__name__}, not {value!r}")
        return self._dump(value)

    def load(self, data: Any) -> Any:
        """The value of a text."""
        if not isinstance(data, str):
            raise TypeError(f"it takes {self._kind.__name__} as text, not {data!r}")
        try:
            return self._load(data)
        except ArithmeticError:  # decimal.InvalidOperation
            raise ValueError(f"it takes {self._kind.__name__} as text, not {data!r}") from None


class OneOf:
    """An Enum, stored as its value, or a Literal."""

    def __init__(self, choices: collections.abc.Iterable[Any]) -> None:
        self._choices = tuple(choices)

    def dump(self, value: Any) -> Any:
        """What is stored for it."""
        for choice in self._choices:
            if choice == value and type(choice) is type(value):
                return choice.value if isinstance(choice, enum.Enum) else choice
        raise ValueError(f"it takes one of {list(self._choices)}, not {value!r}")

    def load(self, data: Any) -> Any:
        """The choice that is stored as `data`."""
        for choice in self._choices:
            stored = choice.value if isinstance(choice, enum.Enum) else choice
            if stored == data and type(stored) is type(data):
                return choice
        raise ValueError(f"it takes one of {list(self._choices)}, not {data!r}")


class Optional:
    """A type or None."""

    def __init__(self, item: Codec) -> None:
        self._item = item

    def dump(self, value: Any) -> Any:
        """None stays None."""
        return None if value is None else self._item.dump(value)

    def load(self, data: Any) -> Any:
        """None stays None."""
        return None if data is None else self._item.load(data)


class Items:
    """A collection of items of one type, stored as an array."""

    def __init__(self, kind: Callable[[Any], Any], item: Codec) -> None:
        self._kind, self._item = kind, item

    def dump(self, value: Any) -> list[Any]:
        """An array."""
        if isinstance(value, (str, bytes)) or not isinstance(value, collections.abc.Iterable):
            raise TypeError(f"it takes several items, not {value!r}")
        return [self._item.dump(item) for item in value]

    def load(self, data: Any) -> Any:
        """The collection."""
        return self._kind(self._item.load(item) for item in _array(data))


class Fixed:
    """A tuple of items of given types, stored as an array."""

    def __init__(self, items: collections.abc.Iterable[Codec]) -> None:
        self._items = tuple(items)

    def dump(self, value: Any) -> list[Any]:
        """An array."""
        return [item.dump(each) for item, each in zip(self._items, value, strict=True)]

    def load(self, data: Any) -> tuple[Any, ...]:
        """The tuple."""
        found = zip(self._items, _array(data), strict=True)
        return tuple(item.load(each) for item, each in found)


class Values:
    """A dict with keys that are str, stored as an object."""

    def __init__(self, item: Codec) -> None:
        self._item = item

    def dump(self, value: Any) -> dict[str, Any]:
        """An object."""
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"its keys are str, not {key!r}")
        return {key: self._item.dump(item) for key, item in value.items()}

    def load(self, data: Any) -> dict[str, Any]:
        """The dict."""
        if not isinstance(data, dict):
            raise TypeError(f"it takes an object, not {data!r}")
        return {key: self._item.load(item) for key, item in data.items()}


class Fields:
    """A dataclass, stored as an object with the fields that its constructor takes."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls
        self.codecs: dict[str, Codec] = {}

    def dump(self, value: Any) -> dict[str, Any]:
        """An object."""
        if not isinstance(value, self._cls):
            raise TypeError(f"value takes {self._cls.__name__}, not {type(value).__name__}")
        return {
            name: self._with_field(name, codec.dump, getattr(value, name))
            for name, codec in self.codecs.items()
        }

    def load(self, data: Any) -> Any:
        """The dataclass. Unknown fields are left out."""
        if not isinstance(data, dict):
            raise TypeError(f"{self._cls.__name__} takes an object, not {data!r}")
        return self._cls(
            **{
                name: self._with_field(name, codec.load, data[name])
                for name, codec in self.codecs.items()
                if name in data
            }
        )

    def loads(self, data: bytes) -> Any:
        """The dataclass of JSON in bytes."""
        return self.load(json.loads(data))

    def _with_field(self, name: str, convert: Callable[[Any], Any], value: Any) -> Any:
        try:
            return convert(value)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self._cls.__name__}.{name}: {error}") from error


def dataclass_codec(cls: type) -> Fields:
    """The codec of a dataclass; TypeError if the type of one of its fields is not supported."""
    return _fields(cls, {})


def _fields(cls: Any, known: dict[type, Fields]) -> Fields:
    if cls in known:  # a class may have fields of its own type
        return known[cls]
    found = known[cls] = Fields(cls)
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise TypeError(
            f"the types of the fields of {cls.__name__} cannot be found: {error}; define the "
            "classes that they name in the module, not in a function"
        ) from None
    for field in dataclasses.fields(cls):
        if field.init:
            found.codecs[field.name] = _codec(
                hints[field.name], f"{cls.__name__}.{field.name}", known
            )
    return found


def _codec(hint: Any, where: str, known: dict[type, Fields]) -> Codec:
    """The codec for a field of this type; `where` names the field in an error."""
    if hint is Any or hint is object:
        return AsIs()
    if isinstance(hint, type) and not typing.get_origin(hint):
        return _of_class(hint, where, known)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _of_union(hint, args, where, known)
    if origin is typing.Literal:
        return OneOf(args)
    if origin is tuple and args[1:] != (...,):
        return Fixed(_codec(arg, where, known) for arg in args)
    if origin is tuple:
        return Items(tuple, _codec(args[0], where, known))
    if origin in COLLECTIONS:
        return Items(COLLECTIONS[origin], _codec(args[0], where, known))
    if origin in MAPPINGS and args[0] is str:
        return Values(_codec(args[1], where, known))
    raise _unknown(hint, where)


def _of_class(cls: type, where: str, known: dict[type, Fields]) -> Codec:
    if dataclasses.is_dataclass(cls):
        return _fields(cls, known)
    if issubclass(cls, enum.Enum):
        return OneOf(cls)
    if cls in TEXTS:
        return Text(cls)
    if cls in SCALARS:
        return AsIs(cls)
    if cls in COLLECTIONS or cls is tuple:
        return Items(COLLECTIONS.get(cls, tuple), AsIs())
    if cls in MAPPINGS:
        return Values(AsIs())
    raise _unknown(cls, where)


def _of_union(hint: Any, args: tuple[Any, ...], where: str, known: dict[type, Fields]) -> Codec:
    if all(arg in SCALARS for arg in args):
        return AsIs(*args)
    others = [arg for arg in args if arg is not types.NoneType]
    if len(others) > 1:  # `load` could not tell which one was stored
        raise _unknown(hint, where)
    return Optional(_codec(others[0], where, known))


def _unknown(hint: Any, where: str) -> TypeError:
    return TypeError(
        f"{where} has type {hint}, which `serde.model` cannot store as JSON; see its documentation "
        "for those that it takes, or write a Serde"
    )


def _array(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"it takes an array, not {data!r}")
    return data


def _names(kinds: tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)
