"""Messages as JSON objects, a line each, as `tail --json` and `export` print them."""

from __future__ import annotations

import base64
import binascii
import json
import sys
from typing import Any

import click

# What `tail --json` prints of a message besides what `send` takes: it is given anew.
PRINTED = {"offset", "epoch", "publish_time", "producer", "sequence_id"}
TAKEN = ("value", "key", "properties", "event_time")
FIELDS = {*PRINTED, *TAKEN, "value_base64", "key_base64"}


class InputError(click.ClickException):
    """What the command was given to read is wrong: one line on stderr, and exit status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print it."""
        from exclusivelog.cli.output import printable_lines

        print(printable_lines(f"exclusivelog: {self.message}"), file=file or sys.stderr)


def arguments_of(line: bytes) -> dict[str, Any]:
    """The arguments of `send` for an object, without those that it lacks or that are null. `value`
    is always there. ValueError, with the name of the field, unless all of it can be sent.

    >>> arguments_of(b'{"value": "a", "key_base64": "/w==", "offset": 7, "event_time": null}')
    {'value': b'a', 'key': b'\\xff'}
    >>> arguments_of(b'{"value": "a", "properties": {"x": 1}}')
    Traceback (most recent call last):
        ...
    ValueError: properties: "x" takes a string, not 1
    """
    return arguments_from(_object_of(line))


def arguments_from(found: dict[str, Any]) -> dict[str, Any]:
    """The same for the fields of a message."""
    for name in found:
        if name not in FIELDS:
            raise ValueError(
                f"{_shown(name)} is no field of a message: it takes {', '.join(TAKEN)}"
            )
    if "value" not in found and "value_base64" not in found:
        raise ValueError("it has neither value nor value_base64")
    key, properties = _bytes_of(found, "key"), _properties_of(found.get("properties"))
    time = _time_of(found.get("event_time"))
    others = {"key": key, "properties": properties or None, "event_time": time}
    given = {name: other for name, other in others.items() if other is not None}
    return {"value": _bytes_of(found, "value"), **given}


def _object_of(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} at character {error.pos + 1}") from None
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError('it is no object, such as {"value": "text"}')
    return found


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object with each of its names once: which of two is meant is not known."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{_shown(name)} is there twice")
        found[name] = value
    return found


def _bytes_of(found: dict[str, Any], name: str) -> bytes | None:
    """The key or the value: a text, or base64 of bytes. None if it is null, or not there."""
    encoded = f"{name}_base64"
    if name in found and encoded in found:
        raise ValueError(f"it has {name} and {encoded}: which one is meant?")
    if encoded in found:
        return _decoded(encoded, found[encoded])
    text = found.get(name)
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"{name} takes a string or null, not {_shown(text)}")
    return _utf8(name, text).encode()


def _decoded(name: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"{name} takes a string, not {_shown(text)}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{name} is no base64: {_shown(text)}") from None


def _utf8(where: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} has half of a surrogate pair, which is no UTF-8") from None
    return text


def _properties_of(found: Any) -> dict[str, str] | None:
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"properties takes an object or null, not {_shown(found)}")
    for name, value in (found or {}).items():
        if not isinstance(value, str):
            raise ValueError(f"properties: {_shown(name)} takes a string, not {_shown(value)}")
        _utf8("properties", name + value)
    return found


def _time_of(found: Any) -> int | None:
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    raise ValueError(
        f"event_time takes ms since 1970, a whole number, or null, not {_shown(found)}"
    )


def _shown(value: Any) -> str:
    """A value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
