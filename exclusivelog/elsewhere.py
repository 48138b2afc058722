"""What may come out otherwise in another process, although it comes back in this one (rule G10).

An object is decoded and compared before it is sent (`comparing.Checked`). That does not show what
the reader's process adds of its own: the default of a field that is not stored, the present time, a
file, the seed of `hash`. So a class is looked at for the first once (`check_defaults`,
`check_schema`), and what its own code asks for is noted while an object is decoded (`watched`).
"""

from __future__ import annotations

import builtins
import collections
import datetime as dt
import enum
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from exclusivelog.comparing import Unrepeatable

# ---- fields that are not stored ----------------------------------------------------------

_EMPTY = (list, dict, set, collections.deque, collections.OrderedDict, collections.Counter)
_PLAIN = (int, float, str, bytes, tuple, frozenset)
_FACTORIES = frozenset((*_EMPTY, *_PLAIN, bool))


def check_default(where: str, default: Any, factory: Any = None) -> None:
    """Raise TypeError unless the default of a field that is not stored is the same in each process,
    by all appearances: None, a bool, a member of an Enum, 0 or empty. A module may have computed
    any other one as it was imported."""
    stable = factory in _FACTORIES if factory is not None else is_stable(default)
    if not stable:
        raise TypeError(
            f"{where} is not stored, and comes back as its default, which may be another one in "
            "another process: store it, or give it None, False, 0 or an empty value as default"
        )


def is_stable(default: Any) -> bool:
    """Whether a default is the same in each process, by all appearances."""
    if default is None or isinstance(default, (bool, enum.Enum)):
        return True
    kind = type(default)
    if kind in (tuple, frozenset):
        return all(map(is_stable, default))
    return kind in (*_EMPTY, *_PLAIN, dt.timedelta) and not default


# ---- the schema of pydantic --------------------------------------------------------------


def check_schema(schema: Any, name: str) -> bool:
    """Raise TypeError for a type that takes what depends on the time or the disk, and for a field
    that is not stored. Return whether code of the application runs when an object is decoded.

    - `schema`: that of pydantic's core, for the class with this name.
    """
    has_code = False
    for node, where in _nodes(schema, name):
        kind = str(node.get("type", ""))
        if "now_op" in node:
            raise TypeError(
                f"{where} has to be in the {node['now_op']} also when it is read: give it the type "
                "without that condition, and check it before you send"
            )
        if kind.startswith("function-"):
            has_code |= _check_function(node["function"]["function"], where)
        elif kind.endswith("-field"):
            _check_field(node, where)
        elif kind == "model":
            _check_private(node["cls"])
        has_code |= bool(node.get("post_init") or node.get("custom_init") or kind == "call")
    return has_code


def _nodes(schema: Any, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """All parts of a schema that are for decoding, and to which field each belongs, in words."""
    left = [(schema, name)]
    while left:
        node, where = left.pop()
        if isinstance(node, (list, tuple)):
            left += [(each, where) for each in node]
        if not isinstance(node, dict):
            continue
        if isinstance(node.get("cls"), type):
            where = node["cls"].__name__
        if isinstance(node.get("name"), str) and str(node.get("type", "")).endswith("-field"):
            where = f"{where}.{node['name']}"
        yield node, where
        for key, part in node.items():
            if key == "fields" and isinstance(part, dict):
                left += [(field, f"{where}.{field_name}") for field_name, field in part.items()]
            elif key not in ("metadata", "serialization", "default"):
                left.append((part, where))


def _check_function(function: Any, where: str) -> bool:
    """Whether a validator is the application's. TypeError if it depends on the process."""
    found = _DIFFERS.get(function) if callable(function) and _is_hashable(function) else None
    if found is not None:
        raise TypeError(f"{where} is made by {found}: another process gets another value")
    module = str(getattr(function, "__module__", "")).partition(".")[0]
    if module not in _LIBRARIES:
        return True
    if str(getattr(function, "__qualname__", "")).startswith("PathType.validate_"):
        raise TypeError(
            f"{where} has to be on the disk, or not to be there, also when it is read: give it the "
            "type pathlib.Path, and check it before you send"
        )
    return False


def _is_hashable(function: Any) -> bool:
    try:
        hash(function)
    except TypeError:
        return False
    return True


def _check_field(node: dict[str, Any], where: str) -> None:
    stored = not node.get("serialization_exclude") and "serialization_exclude_if" not in node
    if stored and node.get("init", True):
        return
    inner = node["schema"]
    while isinstance(inner, dict) and inner.get("type") != "default":
        inner = inner.get("schema")
    if inner is not None:  # else a reader could not do without it
        check_default(where, inner.get("default"), inner.get("default_factory"))


def _check_private(cls: Any) -> None:
    for name, private in getattr(cls, "__private_attributes__", {}).items():
        if (
            type(private.default).__name__ == "PydanticUndefinedType"
            and not private.default_factory
        ):
            continue  # there is no default
        check_default(f"{cls.__name__}.{name}", private.default, private.default_factory)


# ---- code of a class ---------------------------------------------------------------------

# What has one result all along in this process, or whatever it is asked for, and another one in
# another process or later. `uuid4`, `random` need not be here: two calls differ.
_DIFFERS: dict[Any, str] = {
    builtins.hash: "hash()", os.getpid: "os.getpid()", os.getppid: "os.getppid()",
    time.time: "time.time()", time.time_ns: "time.time_ns()", dt.datetime.now: "datetime.now()",
    dt.datetime.utcnow: "datetime.utcnow()", dt.datetime.today: "datetime.today()",
    dt.date.today: "date.today()", os.stat: "the file system (os.stat)",
    os.lstat: "the file system (os.lstat)", os.listdir: "the file system (os.listdir)",
    os.scandir: "the file system (os.scandir)", io.open: "the file system (open)",
}  # fmt: skip
_LIBRARIES = {"pydantic", "pydantic_core", "msgspec", "attr", "attrs"}
_IMPORTING = {"importlib", "_frozen_importlib"}
_PATHS = {"os", "pathlib", "genericpath", "posixpath"}  # they ask for the application


def watched(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wrap a decoder: it raises `Unrepeatable` if code of the application asks for what another
    process has otherwise. That of Python and of the libraries does not count: it writes logs."""

    def decoded(data: bytes) -> Any:
        if sys.getprofile() is not None:  # a profiler runs, which must not be interrupted
            return decode(data)
        asked: list[str] = []

        def note(frame: FrameType, event: str, function: Any) -> None:
            if event == "c_call" and function in _DIFFERS and _is_applications(frame):
                asked.append(_DIFFERS[function])

        sys.setprofile(note)
        try:
            found = decode(data)
        finally:
            sys.setprofile(None)
        if asked:
            raise Unrepeatable(
                f"code of its class asks for {asked[0]} when it is read: another process may get "
                "another object, or none. Do that before you make the object, and store the result"
            )
        return found

    return decoded


def _is_applications(caller: FrameType) -> bool:
    """Whether a call comes from the application's code, and is neither for a set or a dict, nor by
    a module that is being imported."""
    frame: FrameType | None = caller
    while frame is not None and _root(frame) in _PATHS:
        frame = frame.f_back
    if frame is None or frame.f_code.co_name == "__hash__":
        return False
    if _root(frame) in _LIBRARIES | sys.stdlib_module_names:
        return False
    while frame is not None and frame.f_globals is not globals():  # that of `decoded`
        if _root(frame) in _IMPORTING:
            return False
        frame = frame.f_back
    return True


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
