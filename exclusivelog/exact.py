"""The serialiser `exact`: msgpack with extension types for more of Python's types (rule G10).

Extensions are packed and unpacked one after another, never inside of one another's calls: msgpack
takes 48 KiB of a thread's C stack for each. Items of sets are ordered by their bytes, so that a set
has the same bytes in every process.

>>> loads(dumps({(1, "a"): {2, 3}}))
{(1, 'a'): {2, 3}}
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import msgpack

from exclusivelog import _core, stacks

# ---- times -------------------------------------------------------------------------------


SECOND = dt.timedelta(seconds=1)


def _zone_of(value: Any) -> str | None:
    """The name of a time's zone; None for an offset, which its text has. ValueError for others."""
    zone = value.tzinfo
    if zone is None:
        return None
    if type(zone) is dt.timezone and repr(zone) == repr(dt.timezone(zone.utcoffset(None))):
        if zone != dt.UTC and abs(zone.utcoffset(None)) < SECOND:  # `fromisoformat` reads UTC
            raise ValueError(f"the zone {zone!r} cannot be kept: it is less than a second from UTC")
        return None
    if type(zone) is zoneinfo.ZoneInfo and zone.key and zoneinfo.ZoneInfo(zone.key) is zone:
        return str(zone.key)
    raise ValueError(f"the zone {zone!r} cannot be kept: it takes a timezone or a ZoneInfo by key")


def _dump_time(value: Any) -> Any:
    """Its text; with `fold` and the zone's key beside it, if it has them."""
    zone = _zone_of(value)
    if zone is None and not value.fold:
        return value.isoformat()
    kept = value if zone is None else value.replace(tzinfo=None)
    return [kept.isoformat(), value.fold, zone]


def _load_time(kind: Any, stored: Any) -> Any:
    text, fold, zone = stored
    value = kind.fromisoformat(text)
    zone = value.tzinfo if zone is None else zoneinfo.ZoneInfo(zone)
    return value.replace(fold=fold, tzinfo=zone)


def _dump_int(value: int) -> str:
    # Python limits the digits of an int that it reads, but not of one in hexadecimal.
    return str(value) if value.bit_length() <= 2048 else hex(value)


# (type, encode, decode); the index in this list is the extension type's code on disk.
_KINDS: list[tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (tuple, list, tuple),
    (set, list, set),
    (frozenset, list, frozenset),
    (int, _dump_int, lambda text: int(text, 0)),  # of more than 64 bits
    (dt.datetime, _dump_time, functools.partial(_load_time, dt.datetime)),
    (dt.date, dt.date.isoformat, dt.date.fromisoformat),
    (dt.time, _dump_time, functools.partial(_load_time, dt.time)),
    (dt.timedelta, lambda d: [d.days, d.seconds, d.microseconds], lambda d: dt.timedelta(*d)),
    (decimal.Decimal, str, decimal.Decimal),
    (complex, lambda c: [c.real, c.imag], lambda c: complex(*c)),
    (uuid.UUID, lambda u: u.hex, uuid.UUID),
]
# How to decode those of which most are stored as a str.
_OF_TEXT: dict[type, Callable[[str], Any]] = {
    dt.datetime: dt.datetime.fromisoformat,
    dt.time: dt.time.fromisoformat,
}
_CODES = {kind: code for code, (kind, _, _) in enumerate(_KINDS)}


def _check_time(value: Any, hashed: bool) -> None:
    _zone_of(value)


def _check_number(value: Any, hashed: bool) -> None:
    if hashed and value != value:
        raise ValueError("NaN in a set, or as a key, cannot be found again")


_EXTENDED: dict[type, Callable[[Any, bool], object] | None] = {
    **dict.fromkeys(_CODES),
    dt.datetime: _check_time,
    dt.time: _check_time,
    decimal.Decimal: _check_number,
    complex: _check_number,
}
PLAIN = (str, int, float, bool, bytes, list, dict)
_values = _core.Plain("exact", (*PLAIN, *_CODES), _EXTENDED)


def dumps(value: Any) -> bytes:
    """Encode a value; TypeError or ValueError if it would not come back."""
    extended = _values.check(value)
    return _pack(_flat(value) if extended else value)


def _flat(value: Any) -> Any:
    """The value with what msgpack does not have as extensions. They are packed from the inside out,
    never inside of one another's calls: those would take a thread's C stack."""
    kind = type(value)
    if kind is list:
        return [_flat(item) for item in value]
    if kind is dict:
        return {_flat(key): _flat(item) for key, item in value.items()}
    code = _CODES.get(kind)
    if code is None or (kind is int and -(1 << 63) <= value < 1 << 64):
        return value
    if kind is set or kind is frozenset:  # ordered, to have the same bytes in every process
        items = sorted([_pack(_flat(item)) for item in value])
        return msgpack.ExtType(code, _array_header(len(items)) + b"".join(items))
    return msgpack.ExtType(code, _pack(_flat(_KINDS[code][1](value))))


def _array_header(length: int) -> bytes:
    header: bytes = msgpack.Packer().pack_array_header(length)
    return header


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.Packer(strict_types=True).pack(value)
    return packed


_extensions = _core.Extensions(
    "exact",
    msgpack.unpackb,
    [load for _, _, load in _KINDS],
    [_OF_TEXT.get(kind, load) for kind, _, load in _KINDS],
    stacks.with_deep_stack,
)


def loads(data: bytes) -> Any:
    """Decode a value."""
    return _extensions.loads(data)


# ---- keys --------------------------------------------------------------------------------


def _check_time_of_key(value: Any, hashed: bool) -> None:
    zones = (None,) if type(value) is dt.time else (None, dt.UTC)
    if value.fold or not any(value.tzinfo is zone for zone in zones):
        raise ValueError(f"as a key, {value!r} may equal another one: use UTC, and no fold")


# Without bool, Decimal and complex: True equals 1, and Decimal("1.0") equals Decimal("1").
_keys = _core.Plain(
    "exact",
    (
        str,
        int,
        float,
        bytes,
        tuple,
        frozenset,
        dt.datetime,
        dt.date,
        dt.time,
        dt.timedelta,
        uuid.UUID,
    ),
    {**_EXTENDED, dt.datetime: _check_time_of_key, dt.time: _check_time_of_key},
    key=True,
)


def dumps_key(value: Any) -> bytes:
    """Encode a key of a map: equal ones have equal bytes. TypeError or ValueError for others."""
    extended = _keys.check(value)
    return _pack(_flat(value) if extended else value)
