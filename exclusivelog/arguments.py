"""Checks of the arguments of public calls, which every module shares.

A check returns the value as the library uses it, or nothing. It raises TypeError or ValueError for
one that the call does not take; the error names the argument.
"""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Iterable
from typing import Any, TypeGuard

NAME_BYTES = 255  # of a topic's or a producer's name
MAX_NAME_BYTES = 240  # of the name of a group or resource
MAX_GENERATION = 2**63 - 1
LONGEST_SETTLE = 86400  # seconds
LOWEST, HIGHEST = -(2**63), 2**63 - 1  # priorities
LARGEST_LIMITS = {  # of what a producer queues
    "max_batch_messages": 10_000_000,
    "max_batch_bytes": 1 << 30,
    "max_pending_bytes": 2**63 - 1,
}
MOST_QUOTED = 300  # characters of an argument in an error


def quoted(value: object) -> str:
    """An argument, for an error's text; a long one is cut off."""
    text = repr(value)
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}..."


# ---- numbers and flags ------------------------------------------------------------------


def as_int(value: Any) -> Any:
    """A whole number of another type, such as numpy's, as an int; anything else as it is.

    >>> as_int(7), as_int(True), as_int("7")
    (7, True, '7')
    """
    if type(value) is int or isinstance(value, bool) or not hasattr(type(value), "__index__"):
        return value
    try:
        return operator.index(value)
    except TypeError:  # numpy's True, or an array of several numbers
        return value


def as_limit(argument: str, value: Any, largest: int) -> int:
    """A limit of what a producer queues, as an int; ValueError unless it is 1 to `largest`."""
    value = as_int(value)
    if not is_whole(value) or not 1 <= value <= largest:
        raise ValueError(f"{argument}={value!r}: it takes a whole number, 1 to {largest}")
    return value


def check_flag(argument: str, value: object) -> None:
    """Raise TypeError unless this is True or False: "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument}={quoted(value)}: it takes True or False")


def is_whole(value: object) -> TypeGuard[int]:
    """Is this a whole number? True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(value: object, argument: str) -> int:
    """Return this whole number; ValueError unless it is one from 1 on.

    >>> check_count(7, "max_messages")
    7
    """
    number = as_int(value)
    if not is_whole(number) or number < 1:
        raise ValueError(f"{argument}={number!r}: it takes a whole number from 1 on")
    return number


def check_timeout(timeout: object) -> None:
    """Raise TypeError or ValueError unless this is a number of seconds from 0 on, or None."""
    if timeout is None:
        return
    if (type(timeout) is float or type(timeout) is int) and timeout >= 0:
        return  # nearly all are
    check_seconds(timeout, "timeout", "seconds from 0 on, or None")


def check_seconds(value: object, argument: str, takes: str) -> None:
    """Raise TypeError or ValueError unless this is a number of seconds from 0 on."""
    number = as_int(value)
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise TypeError(f"{argument}={value!r}: it takes {takes}")
    if not number >= 0:
        raise ValueError(f"{argument}={value!r}: it takes {takes}")


# ---- names ------------------------------------------------------------------------------


def check_name(name: object, argument: str) -> str:
    """Return the name; ValueError or TypeError if it is invalid."""
    if not isinstance(name, str):
        raise TypeError(f"{argument} takes a str, not {type(name).__name__}")
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError(f"{argument}={quoted(name)} cannot be written as UTF-8") from None
    if not 1 <= size <= NAME_BYTES or not name.isprintable():
        raise ValueError(
            f"{argument}={quoted(name)}: it takes 1 to {NAME_BYTES} bytes of UTF-8 without control "
            "characters"
        )
    return name


def is_internal(name: str) -> bool:
    """Whether a topic is internal to the library: it can be read, and is not listed."""
    return name.startswith("__")


def check_not_internal(name: str) -> None:
    """Raise ValueError if this topic is the library's own."""
    if is_internal(name):
        raise ValueError(f"topic {name!r} is internal to the library; it can only be read")


def check_not_reserved(name: str) -> None:
    """Raise ValueError unless a topic of this name can be created."""
    if is_internal(name):
        raise ValueError(f"topic={name!r}: names that begin with __ are reserved for the library")


def offset_of(start: object, inclusive: bool) -> int:
    """The offset with which a reader begins that is to start at `start`, or behind it."""
    if isinstance(start, int) and not isinstance(start, bool) and 0 <= start < 2**63:
        return start if inclusive else start + 1
    raise wrong_start(start)


def wrong_start(start: object) -> ValueError:
    """The error for a start that no reader takes."""
    return ValueError(
        f"start={start!r}: it takes 'earliest', 'latest', an offset, -n for the last n messages, a "
        "datetime or a timedelta"
    )


def ago(age: dt.timedelta) -> dt.datetime | str:
    """The start that is `age` ago, as a time or "earliest"."""
    if age < dt.timedelta(0):
        raise ValueError(f"start={age!r}: a timedelta is how long ago, from 0 on")
    try:
        return dt.datetime.now(dt.UTC) - age
    except OverflowError:  # before the year 1
        return "earliest"


def check_engine_id(to: object) -> None:
    """Raise TypeError unless this may be an engine's id."""
    if not isinstance(to, str):
        raise TypeError(f"to={quoted(to)}: it takes an engine's id, a str")


def check_selection(topics: str) -> None:
    """Raise ValueError for an empty prefix of topics' names: it selects all of them, which is
    rarely meant."""
    if not topics:
        raise ValueError(
            "topics='': it takes a topic's name, a list of them, or a prefix; '*' is all topics"
        )


def check_group(group: object) -> None:
    """Raise ValueError or TypeError unless this is a group's name."""
    check_resource("group", group)


def check_resource(argument: str, name: object) -> None:
    """Raise ValueError or TypeError unless this is the name of a group or resource."""
    if not isinstance(name, str):
        raise TypeError(f"{argument}={quoted(name)}: it takes a str")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{argument}={quoted(name)} cannot be written as UTF-8") from None
    if not 1 <= size <= MAX_NAME_BYTES:
        raise ValueError(
            f"{argument}={quoted(name)}: it takes 1 to {MAX_NAME_BYTES} bytes of UTF-8"
        )


def check_generation(resource: str, generation: Any) -> int | None:
    """Return a resource's generation; ValueError or TypeError if it is invalid."""
    if generation is None:
        return None
    generation = as_int(generation)
    if not isinstance(generation, int) or isinstance(generation, bool):
        raise TypeError(f"generation of {resource!r}: it takes an int or None, not {generation!r}")
    if not 0 <= generation <= MAX_GENERATION:
        raise ValueError(f"generation={generation} of {resource!r}: it takes 0 to 2**63 - 1")
    return generation


def check_groups(groups: Iterable[str]) -> tuple[str, ...]:
    """The names of the groups, each once; a str is one name."""
    names = (groups,) if isinstance(groups, str) else tuple(dict.fromkeys(groups))
    for name in names:
        check_group(name)
    return names


def is_url(path: object) -> TypeGuard[str]:
    """Whether a path is the URL of a cluster, not a directory."""
    return isinstance(path, str) and "://" in path


# ---- options of producers ----------------------------------------------------------------


def check_queue_options(priority: Any, timeout: float | None, settle: float) -> int:
    """Return the priority; ValueError or TypeError if one of these options is wrong."""
    priority = as_int(priority)
    if not is_whole(priority) or not LOWEST <= priority <= HIGHEST:
        raise ValueError(f"priority={priority!r}: it takes a signed 64-bit whole number")
    check_timeout(timeout)
    check_seconds(settle, "settle", f"seconds from 0 to {LONGEST_SETTLE}")
    if settle > LONGEST_SETTLE:
        raise ValueError(f"settle={settle}: it takes seconds from 0 to {LONGEST_SETTLE}")
    return priority
