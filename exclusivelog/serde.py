"""Serialisers of keys and values (rule G1). None of them uses pickle: reading a log runs no code.

`exact` is msgpack with extension types. It restores every type that it accepts, including tuples,
sets, keys that are not str, large ints, dates and decimals; it raises TypeError for others.

`model(cls)` stores objects of a pydantic model or of a dataclass as JSON.

>>> json.loads(json.dumps({"a": 1}))
{'a': 1}
>>> msgpack.dumps([1, "x"])
b'\\x92\\x01\\xa1x'
>>> exact.loads(exact.dumps({(1, "a"): {2, 3}}))
{(1, 'a'): {2, 3}}
"""

from __future__ import annotations

import builtins
import datetime as _dt
import functools as _functools
import json as _json
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import is_dataclass as _is_dataclass
from typing import Any

import msgpack as _msgpack

__all__ = ["Serde", "bytes", "exact", "json", "model", "msgpack", "pick_dumps", "pick_loads", "str"]


@dataclass(frozen=True)
class Serde:
    """A pair of functions: `dumps(value)` returns bytes, `loads(data)` returns the value."""

    dumps: Callable[[Any], builtins.bytes]
    loads: Callable[[builtins.bytes], Any]


# Named functions, not lambdas, so that messages of a reader that uses them can be pickled.


def _check_bytes(value: Any) -> builtins.bytes:
    if not isinstance(value, (builtins.bytes, bytearray, memoryview)):
        raise TypeError(f"value takes bytes, not {type(value).__name__}; or give a serializer")
    return builtins.bytes(value)


def _load_bytes(data: builtins.bytes) -> builtins.bytes:
    return data


def _load_str(data: builtins.bytes) -> builtins.str:
    return data.decode("utf-8")


def _dump_json(value: Any) -> builtins.bytes:
    return _json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def _load_msgpack(data: builtins.bytes) -> Any:
    return _msgpack.unpackb(data, strict_map_key=False)


bytes = Serde(_check_bytes, _load_bytes)
str = Serde(builtins.str.encode, _load_str)
json = Serde(_dump_json, _json.loads)
msgpack = Serde(_msgpack.packb, _load_msgpack)


# ---- exact -------------------------------------------------------------------------------


@_functools.cache
def _kinds() -> list[tuple[type, Callable[[Any], Any], Callable[[Any], Any]]]:
    """(type, encode, decode); the index in this list is the extension type's code on disk."""
    # Imported only here, because only this serialiser needs them.
    import decimal
    import uuid

    return [
        (tuple, list, tuple),
        (set, list, set),
        (frozenset, list, frozenset),
        (int, builtins.str, int),  # of more than 64 bits
        (_dt.datetime, _dt.datetime.isoformat, _dt.datetime.fromisoformat),
        (_dt.date, _dt.date.isoformat, _dt.date.fromisoformat),
        (_dt.time, _dt.time.isoformat, _dt.time.fromisoformat),
        (_dt.timedelta, lambda d: [d.days, d.seconds, d.microseconds], lambda d: _dt.timedelta(*d)),
        (decimal.Decimal, builtins.str, decimal.Decimal),
        (complex, lambda c: [c.real, c.imag], lambda c: complex(*c)),
        (uuid.UUID, lambda u: u.hex, uuid.UUID),
    ]


@_functools.cache
def _codes() -> dict[type, int]:
    return {kind: code for code, (kind, _, _) in enumerate(_kinds())}


def _to_extension(value: Any) -> _msgpack.ExtType:
    code = _codes().get(type(value))
    if code is None:
        raise TypeError(f"the serialiser exact does not take {type(value).__name__}: {value!r}")
    return _msgpack.ExtType(code, _dump_exact(_kinds()[code][1](value)))


def _from_extension(code: int, data: builtins.bytes) -> Any:
    if code >= len(_kinds()):
        raise ValueError(f"msgpack extension {code} is unknown to the serialiser exact")
    return _kinds()[code][2](_load_exact(data))


def _dump_exact(value: Any) -> builtins.bytes:
    packed: builtins.bytes = _msgpack.packb(value, default=_to_extension, strict_types=True)
    return packed


def _load_exact(data: builtins.bytes) -> Any:
    return _msgpack.unpackb(data, ext_hook=_from_extension, strict_map_key=False)


exact = Serde(_dump_exact, _load_exact)

# ---- models ------------------------------------------------------------------------------


def model(cls: type) -> Serde:
    """Return the serialiser of objects of one class, as JSON: a pydantic model (a class with
    `model_dump_json` and `model_validate_json`), or a dataclass.

    The fields of a dataclass may be str, int, float, bool, None, Any, Literal, Enum, datetime,
    date, time, Decimal, UUID, dataclasses, and list, tuple, set, frozenset, dict[str, ...] and
    `| None` of these. Reading checks their types, leaves out unknown fields, and gives missing ones
    their defaults.

    Raises TypeError for another class, and for a dataclass with a field of another type. Objects of
    other classes are refused with TypeError when they are sent.

    >>> @dataclass
    ... class Order:
    ...     number: int
    ...     items: list[builtins.str]
    >>> orders = model(Order)
    >>> orders.dumps(Order(7, ["tea"])), orders.loads(b'{"number":7,"items":["tea"]}')
    (b'{"number":7,"items":["tea"]}', Order(number=7, items=['tea']))
    """
    if _is_pydantic(cls):
        return _pydantic_model(cls)
    if isinstance(cls, type) and _is_dataclass(cls):
        from exclusivelog.models import dataclass_codec  # few applications need it

        codec = dataclass_codec(cls)
        return Serde(lambda value: _dump_json(codec.dump(value)), codec.loads)
    raise TypeError(f"model takes a pydantic model or a dataclass, not {cls!r}")


def _is_pydantic(cls: Any) -> bool:
    return isinstance(cls, type) and all(
        callable(getattr(cls, name, None)) for name in ("model_dump_json", "model_validate_json")
    )


def _pydantic_model(cls: Any) -> Serde:
    def dumps(value: Any) -> builtins.bytes:
        if not isinstance(value, cls):
            raise TypeError(f"value takes {cls.__name__}, not {type(value).__name__}")
        data: builtins.str = value.model_dump_json()
        return data.encode("utf-8")

    return Serde(dumps, cls.model_validate_json)


# ---- options -----------------------------------------------------------------------------

_NAMED = {"bytes": bytes, "str": str, "json": json, "msgpack": msgpack, "exact": exact}
# Types and modules that are accepted instead of these names.
_SAME = ((builtins.bytes, bytes), (builtins.str, str), (_json, json), (_msgpack, msgpack))
_TAKES = "bytes, str, json, msgpack, exact, a Serde, a pydantic model or a dataclass"


def _find(option: Any, argument: builtins.str) -> Any:
    """The Serde that an option means; the option itself if it means none."""
    if isinstance(option, builtins.str):
        if option not in _NAMED:
            raise ValueError(f"{argument}={option!r}: it takes {_TAKES}")
        return _NAMED[option]
    for other, serde in _SAME:
        if option is other:
            return serde
    if _is_pydantic(option) or (isinstance(option, type) and _is_dataclass(option)):
        return model(option)
    return option


def _method(found: Any, side: builtins.str) -> Callable[[Any], Any] | None:
    """`dumps` or `loads` of a Serde, a module or another object; None if it has none."""
    function: Callable[[Any], Any] | None = getattr(found, side, None)
    if not callable(function):
        return None
    return function if isinstance(found, Serde) or side == "loads" else _as_bytes(function)


def _as_bytes(dumps: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `dumps` so that it returns bytes; that of a module such as simplejson returns str."""

    def encode(value: Any) -> Any:
        made = dumps(value)
        return made.encode("utf-8") if isinstance(made, builtins.str) else made

    return encode


def _side_of(option: Any, argument: builtins.str, side: builtins.str) -> Callable[[Any], Any]:
    function = _method(_find(option, argument), side)
    if function is None:
        raise TypeError(f"{argument}={option!r}: it takes {_TAKES}")
    return function


# Callable, but useless as a deserializer.
_CONTAINERS = (dict, list, tuple, set, frozenset, object)


def _pick(option: Any, argument: builtins.str, side: builtins.str) -> Callable[[Any], Any] | None:
    if option is None:
        return None
    found = _find(option, argument)
    function = _method(found, side)
    if function is not None:
        return function
    if any(found is one for one in _CONTAINERS):
        raise TypeError(f"{argument}={option!r}: it takes {_TAKES}; 'json' is for dicts and lists")
    if not callable(found) or (isinstance(found, type) and side == "dumps"):
        raise TypeError(f"{argument}={option!r}: it takes {_TAKES}, or a function")
    chosen: Callable[[Any], Any] = json.dumps if found is _json.dumps else found
    return chosen


def dumps_of(option: Any, argument: builtins.str) -> Callable[[Any], builtins.bytes]:
    """Return the `dumps` of an option that means a Serde."""
    return _side_of(option, argument, "dumps")


def loads_of(option: Any, argument: builtins.str) -> Callable[[builtins.bytes], Any]:
    """Return the `loads` of an option that means a Serde."""
    return _side_of(option, argument, "loads")


def name_of(option: Any) -> builtins.str | None:
    """Return the name of a serialiser of this module; None for another one."""
    found = _find(option, "serde")
    return next((name for name, serde in _NAMED.items() if serde is found), None)


def pick_dumps(option: Any) -> Callable[[Any], builtins.bytes] | None:
    """Return the function for a `serializer=` option: a name, a Serde, a type or module that means
    one, or the function itself. ValueError for an unknown name, TypeError for anything else."""
    return _pick(option, "serializer", "dumps")


def pick_loads(
    option: Any, argument: builtins.str = "deserializer"
) -> Callable[[builtins.bytes], Any] | None:
    """Return the function for a `deserializer=` or `key_deserializer=` option."""
    return _pick(option, argument, "loads")
