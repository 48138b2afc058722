"""Serialisers of keys and values (rules G1, G10). None uses pickle: reading a log runs no code.

What a serialiser takes, it gives back: equal, and of the same types. It refuses everything else
with TypeError or ValueError: a tuple for JSON, a subclass of str, NaN where there is none, what is
nested deeper than 100 levels.

`exact` is msgpack with extension types. It restores every type that it accepts, including tuples,
sets, keys that are not str, large ints, dates and decimals.

`model(cls)` stores objects of a dataclass, of attrs, msgspec or pydantic as JSON.

>>> json.loads(json.dumps({"a": 1}))
{'a': 1}
>>> msgpack.dumps([1, "x"])
b'\\x92\\x01\\xa1x'
>>> exact.loads(exact.dumps({(1, "a"): {2, 3}}))
{(1, 'a'): {2, 3}}
>>> json.dumps((1, 2))
Traceback (most recent call last):
    ...
TypeError: JSON does not take tuple: (1, 2)
"""

from __future__ import annotations

import builtins
import functools as _functools
import json as _json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack as _msgpack

from exclusivelog import _core
from exclusivelog import comparing as _comparing
from exclusivelog import models as _models

__all__ = [
    "Serde",
    "bytes",
    "checked",
    "exact",
    "json",
    "model",
    "msgpack",
    "pick_dumps",
    "pick_loads",
    "str",
]


@dataclass(frozen=True)
class Serde:
    """A pair of functions: `dumps(value)` returns bytes, `loads(data)` returns the value."""

    dumps: Callable[[Any], builtins.bytes]
    loads: Callable[[builtins.bytes], Any]


# Named functions, not lambdas, so that messages of a reader that uses them can be pickled.


def _load_bytes(data: builtins.bytes) -> builtins.bytes:
    return data


def _load_str(data: builtins.bytes) -> builtins.str:
    return data.decode("utf-8")


_JSON = (builtins.str, int, float, bool, list, dict)
_MSGPACK = (*_JSON, builtins.bytes, _msgpack.ExtType, _msgpack.Timestamp)
_plain_json = _core.Plain("JSON", _JSON, {}, json=True)


def _check_extension(value: Any, hashed: bool) -> None:
    code, data = value
    if type(code) is not int or type(data) is not builtins.bytes or not 0 <= code <= 127:
        raise TypeError(f"an ExtType has an int from 0 to 127 and bytes, not {value!r:.80}")


def _check_timestamp(value: Any, hashed: bool) -> None:
    seconds, rest = value.seconds, value.nanoseconds
    if type(seconds) is not int or type(rest) is not int:
        raise TypeError(f"a Timestamp has ints, not {value!r:.80}")
    if not (-(1 << 63) <= seconds < 1 << 63 and 0 <= rest < 1_000_000_000):
        raise ValueError(
            f"a Timestamp has seconds of 64 bits, and less than a second of ns, not {value!r:.80}"
        )


_plain_msgpack = _core.Plain(
    "msgpack", _MSGPACK, {_msgpack.ExtType: _check_extension, _msgpack.Timestamp: _check_timestamp}
)
# Depth is bounded, so a list in itself is found without looking for it.
_to_json = _json.JSONEncoder(
    separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False
).encode


def _dump_json(value: Any) -> builtins.bytes:
    _plain_json.check(value)
    return _to_json(value).encode("utf-8")


def _load_json(data: builtins.bytes | builtins.str) -> Any:
    if isinstance(data, builtins.bytes):
        _core.json_depth(data, _core.MOST_LEVELS_READ)
    return _json.loads(data)


def _pack(value: Any) -> builtins.bytes:
    packed: builtins.bytes = _msgpack.Packer(strict_types=True).pack(value)
    return packed


def _dump_msgpack(value: Any) -> builtins.bytes:
    _plain_msgpack.check(value)
    return _pack(value)


def _load_msgpack(data: builtins.bytes) -> Any:
    return _msgpack.unpackb(data, strict_map_key=False)


bytes = Serde(_core.dump_bytes, _load_bytes)
str = Serde(_core.dump_str, _load_str)
json = Serde(_dump_json, _load_json)
msgpack = Serde(_dump_msgpack, _load_msgpack)


# ---- exact -------------------------------------------------------------------------------


@_functools.cache
def _exact() -> Any:
    from exclusivelog import exact  # what it imports, few applications need

    return exact


def _dump_exact(value: Any) -> builtins.bytes:
    packed: builtins.bytes = _exact().dumps(value)
    return packed


def _load_exact(data: builtins.bytes) -> Any:
    return _exact().loads(data)


exact = Serde(_dump_exact, _load_exact)

# ---- keys --------------------------------------------------------------------------------

# Equal keys must have equal bytes: True equals 1 and 1.0, a list cannot be a key at all.
_plain_json_key = _core.Plain("JSON", (builtins.str, int, float), {}, json=True, key=True)
_plain_msgpack_key = _core.Plain(
    "msgpack", (builtins.str, int, float, builtins.bytes), {}, key=True
)


def _dump_json_key(value: Any) -> builtins.bytes:
    _plain_json_key.check(value)
    return _to_json(value).encode("utf-8")


def _dump_msgpack_key(value: Any) -> builtins.bytes:
    _plain_msgpack_key.check(value)
    return _pack(value)


def _dump_exact_key(value: Any) -> builtins.bytes:
    packed: builtins.bytes = _exact().dumps_key(value)
    return packed


# ---- models, and others' serialisers -----------------------------------------------------


def model(cls: Any) -> Serde:
    """Return the serialiser of objects of one class or type, as JSON.

    - a dataclass, a class of attrs, a Struct of msgspec, a TypedDict, a NamedTuple: by msgspec;
    - a model or dataclass of pydantic (2.11 or later), by the names of its fields;
    - a class with the methods `model_dump_json` and `model_validate_json`;
    - a type of these: `list[Order]`, `Order | Refund`, a NewType, or one with a name of its own,
      `type Orders = list[Order]`.

    `pip install 'exclusivelog[models]'` installs both libraries. Reading checks the types of the
    fields, leaves out unknown ones, and gives missing ones their defaults, as the library does.

    Each object is decoded before it is sent, and compared, fields and their types, unless it has
    only plain fields, which are looked at instead. One that would not come back is refused with
    TypeError or ValueError. Examples: NaN, an int in a field of type float, an object of a
    subclass, a SecretStr (give it a serializer that writes the secret), what an Enum's `_missing_`
    makes, which another process may not know, an attribute that is no field.

    So is what another process may read otherwise: in pydantic, a field or private attribute that is
    not stored, unless its default is None, a bool, zero or empty; `FutureDate`, `FilePath` and the
    like, which take a value at one time and not at another. A Struct is stored with the defaults
    that `omit_defaults` would leave out. It is not noticed if a validator or `__post_init__` gives
    another result in another process.

    Raises TypeError for another class, and for a field that cannot be stored; ImportError if the
    library is not installed.

    >>> @dataclass
    ... class Order:
    ...     number: int
    ...     items: list[builtins.str]
    >>> orders = model(Order)
    >>> orders.dumps(Order(7, ["tea"])), orders.loads(b'{"number":7,"items":["tea"]}')
    (b'{"number":7,"items":["tea"]}', Order(number=7, items=['tea']))
    """
    if not _models.is_model(cls):
        raise TypeError(
            f"model takes a pydantic model, a dataclass or the like, or a type of such, not {cls!r}"
        )
    made = _models.Model(cls)
    return Serde(made.dumps, made.loads)


def checked(serializer: Any) -> Serde:
    """Return a serialiser that decodes what it has encoded, and refuses a value that does not come
    back: equal, and of the same types. For modules and functions that do not promise that.

    >>> import marshal
    >>> exotic = checked(marshal)
    >>> exotic.loads(exotic.dumps([1, 2.5]))
    [1, 2.5]
    """
    made = _comparing.Checked(
        dumps_of(serializer, "serializer"), loads_of(serializer, "serializer")
    )
    return Serde(made.dumps, made.loads)


# ---- options -----------------------------------------------------------------------------

_NAMED = {"bytes": bytes, "str": str, "json": json, "msgpack": msgpack, "exact": exact}
# Types and modules that are accepted instead of these names.
_SAME = ((builtins.bytes, bytes), (builtins.str, str), (_json, json), (_msgpack, msgpack))
_TAKES = "bytes, str, json, msgpack, exact, a Serde, a pydantic model or a dataclass"
_KEYS = {"json": _dump_json_key, "msgpack": _dump_msgpack_key, "exact": _dump_exact_key}


def _find(option: Any, argument: builtins.str) -> Any:
    """The Serde that an option means; the option itself if it means none."""
    if isinstance(option, builtins.str):
        if option not in _NAMED:
            raise ValueError(f"{argument}={option!r}: it takes {_TAKES}")
        return _NAMED[option]
    for other, serde in _SAME:
        if option is other:
            return serde
    if _models.is_model(option):
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


def key_dumps_of(option: Any, argument: builtins.str) -> Callable[[Any], builtins.bytes]:
    """Return the `dumps` for keys, which refuses a key that equals one with other bytes."""
    found = _find(option, argument)
    if isinstance(getattr(_method(found, "dumps"), "__self__", None), _models.Model):
        raise TypeError(
            f"{argument}={option!r}: objects of a class cannot be keys, as equal ones may have "
            "other bytes; use 'exact', and a tuple of their fields"
        )
    return _KEYS.get(name_of(found) or "") or dumps_of(found, argument)


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
