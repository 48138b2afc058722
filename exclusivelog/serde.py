"""Serialisers of keys and values (rule G1). None of them is pickle: reading a log runs no code.

`exact` is msgpack that restores every type that it accepts, also tuples, sets, keys that are not
str, large ints, dates and decimals; it raises TypeError for others. Programs without this library
see msgpack's extension types.

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
from typing import Any

import msgpack as _msgpack

__all__ = ["Serde", "bytes", "exact", "json", "msgpack", "pick_dumps", "pick_loads", "str"]


@dataclass(frozen=True)
class Serde:
    """A pair of functions: `dumps(value)` returns bytes, `loads(data)` returns the value."""

    dumps: Callable[[Any], builtins.bytes]
    loads: Callable[[builtins.bytes], Any]


def _check_bytes(value: Any) -> builtins.bytes:
    if not isinstance(value, (builtins.bytes, bytearray, memoryview)):
        raise TypeError(f"value takes bytes, not {type(value).__name__}; or give a serializer")
    return builtins.bytes(value)


bytes = Serde(_check_bytes, lambda data: data)
str = Serde(lambda value: value.encode("utf-8"), lambda data: data.decode("utf-8"))
json = Serde(
    lambda value: _json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8"),
    _json.loads,
)
msgpack = Serde(_msgpack.packb, lambda data: _msgpack.unpackb(data, strict_map_key=False))


# ---- exact -------------------------------------------------------------------------------


@_functools.cache
def _kinds() -> list[tuple[type, Callable[[Any], Any], Callable[[Any], Any]]]:
    """(type, encode, decode); the index in this list is the extension type's code on disk."""
    # Only here: who uses another serialiser need not wait for these two.
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

_NAMED = {"bytes": bytes, "str": str, "json": json, "msgpack": msgpack, "exact": exact}


def _pick(option: Any, argument: builtins.str, side: builtins.str) -> Callable[[Any], Any] | None:
    if option is None:
        return None
    if isinstance(option, builtins.str):
        option = _NAMED.get(option)
    function = getattr(option, side, option)
    if not callable(function):
        raise ValueError(
            f"{argument} takes bytes, str, json, msgpack, exact, a Serde or a function"
        )
    chosen: Callable[[Any], Any] = function
    return chosen


def dumps_of(option: Any, argument: builtins.str) -> Callable[[Any], builtins.bytes]:
    """Return the function that encodes, of a Serde or of the name of one."""
    return _side_of(option, argument, "dumps")


def loads_of(option: Any, argument: builtins.str) -> Callable[[builtins.bytes], Any]:
    """Return the function that decodes, of a Serde or of the name of one."""
    return _side_of(option, argument, "loads")


def _side_of(option: Any, argument: builtins.str, side: builtins.str) -> Callable[[Any], Any]:
    if isinstance(option, builtins.str):
        option = _NAMED.get(option)
    function = getattr(option, side, None)
    if not callable(function):
        raise ValueError(f"{argument} takes bytes, str, json, msgpack, exact, or a Serde")
    chosen: Callable[[Any], Any] = function
    return chosen


def name_of(option: Any) -> builtins.str | None:
    """Return the name of one of the serialisers above; None for the application's own."""
    if isinstance(option, builtins.str):
        return option
    return next((name for name, serde in _NAMED.items() if serde is option), None)


def pick_dumps(option: Any) -> Callable[[Any], builtins.bytes] | None:
    """Return the function for a `serializer=` option: a name, a Serde or the function itself."""
    return _pick(option, "serializer", "dumps")


def pick_loads(option: Any) -> Callable[[builtins.bytes], Any] | None:
    """Return the function for a `deserializer=` option."""
    return _pick(option, "deserializer", "loads")
