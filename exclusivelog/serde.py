"""Serialisers, for the edges of the log (rule G1). Never pickle: reading a log runs no code.

>>> json.loads(json.dumps({"a": 1}))
{'a': 1}
>>> msgpack.dumps([1, "x"])
b'\\x92\\x01\\xa1x'
"""

from __future__ import annotations

import builtins
import json as _json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack as _msgpack

__all__ = ["Serde", "bytes", "json", "msgpack", "pick_dumps", "pick_loads", "str"]


@dataclass(frozen=True)
class Serde:
    """A pair of functions: `dumps(value)` gives bytes, `loads(data)` the value again."""

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

_NAMED = {"bytes": bytes, "str": str, "json": json, "msgpack": msgpack}


def _pick(option: Any, argument: builtins.str, side: builtins.str) -> Callable[[Any], Any] | None:
    if option is None:
        return None
    if isinstance(option, builtins.str):
        option = _NAMED.get(option)
    function = getattr(option, side, option)
    if not callable(function):
        raise ValueError(f"{argument} takes bytes, str, json, msgpack, a Serde or a function")
    chosen: Callable[[Any], Any] = function
    return chosen


def dumps_of(option: Any, argument: builtins.str) -> Callable[[Any], builtins.bytes]:
    """The function that encodes, of a Serde or the name of one."""
    return _side_of(option, argument, "dumps")


def loads_of(option: Any, argument: builtins.str) -> Callable[[builtins.bytes], Any]:
    """The function that decodes, of a Serde or the name of one."""
    return _side_of(option, argument, "loads")


def _side_of(option: Any, argument: builtins.str, side: builtins.str) -> Callable[[Any], Any]:
    if isinstance(option, builtins.str):
        option = _NAMED.get(option)
    function = getattr(option, side, None)
    if not callable(function):
        raise ValueError(f"{argument} takes bytes, str, json, msgpack, or a Serde")
    chosen: Callable[[Any], Any] = function
    return chosen


def pick_dumps(option: Any) -> Callable[[Any], builtins.bytes] | None:
    """The function behind a `serializer=` option: a name, a Serde or the function itself."""
    return _pick(option, "serializer", "dumps")


def pick_loads(option: Any) -> Callable[[builtins.bytes], Any] | None:
    """The function behind a `deserializer=` option."""
    return _pick(option, "deserializer", "loads")
