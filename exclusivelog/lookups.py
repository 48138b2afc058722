"""Messages by their offsets: `topic[-1]`, `topic[10:20]`."""

from __future__ import annotations

from itertools import islice
from typing import Any

from exclusivelog._core import Message
from exclusivelog.arguments import as_int, is_whole
from exclusivelog.reader import Reader

__all__ = ["message_at", "messages_in"]


def message_at(reader: Reader, first: int, offset: Any) -> Message:
    """The message at an offset, or the -n-th from the end; see `Topic.__getitem__`. `first`: the
    offset of the first message that was not trimmed."""
    end, given = reader.cursor.end(), as_int(offset)
    if not is_whole(given):
        raise TypeError(f"topic[{offset!r}]: it takes an offset, -n, or a slice of them")
    at = given if given >= 0 else end + given
    if at >= end or (given < 0 and at < first):
        there = f"{first} to {end - 1}" if end > first else "none"
        raise IndexError(
            f"topic {reader.topic!r} has no message at [{given}]; its offsets are {there}"
        )
    reader.seek(at)
    return reader.read_next(timeout=0)


def messages_in(reader: Reader, first: int, given: slice) -> list[Message]:
    """The messages of a slice of offsets; see `Topic.__getitem__`."""
    end = reader.cursor.end()
    if as_int(given.step) not in (None, 1):
        raise ValueError(f"topic[::{given.step!r}]: a slice of messages has no step")
    start, stop = _place(given.start, first, first, end), _place(given.stop, end, first, end)
    stop = min(stop, end)
    if start >= stop:
        return []
    reader.seek(start)
    return list(islice(reader, stop - start))


def _place(given: Any, default: int, first: int, end: int) -> int:
    """The offset of a bound of a slice."""
    given = as_int(given)
    if given is None:
        return default
    if not is_whole(given):
        raise TypeError(f"topic[{given!r}:]: it takes offsets, or -n from the end")
    return int(given) if given >= 0 else max(first, end + given)
