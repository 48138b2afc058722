"""What a notebook shows of an object: a short table as HTML.

Everything is escaped and cut; there is no script, and nothing that a browser would load. An object
that cannot tell its facts, such as a topic of a closed engine, is shown by its repr.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import islice
from typing import Any

from exclusivelog import _core

MOST_ROWS = 10
MOST_CHARACTERS = 80  # of a value
LONGEST = 400  # characters of a cell


class _Short(reprlib.Repr):
    def repr_bytes(self, value: bytes, _: int) -> str:
        """Of the first bytes: there may be a gigabyte."""
        cut = "" if len(value) <= MOST_CHARACTERS else f" and {len(value) - MOST_CHARACTERS:,} more"
        return f"{bytes(value[:MOST_CHARACTERS])!r}{cut}"


_short = _Short()
_short.maxstring = _short.maxother = MOST_CHARACTERS
_short.maxlevel = 3


def html_of(shown: object, make: Callable[[], str]) -> str:
    """What `make` returns; if that raises an error, the object's repr."""
    try:
        return make()
    except Exception:  # a notebook would show a traceback instead of the object
        return f"<code>{_text(_repr(shown))}</code>"


def facts(title: object, found: Iterable[tuple[str, object]]) -> str:
    """The facts of one object."""
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_cell(fact)}</td></tr>" for name, fact in found)
    return f"<div><b>{_text(_repr(title))}</b><table>{rows}</table></div>"


def listing(
    title: object, names: Sequence[str], rows: Iterable[Sequence[object]], count: int
) -> str:
    """The first rows of `count`."""
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>"
        for row in islice(rows, MOST_ROWS)
    )
    more = f"<div>{count - MOST_ROWS:,} more</div>" if count > MOST_ROWS else ""
    return f"<div><b>{_text(_repr(title))}</b><table><tr>{head}</tr>{body}</table>{more}</div>"


class Shown:
    """A value whose repr is shown; other cells are texts, or numbers."""

    def __init__(self, value: Any) -> None:
        self.value = value


def message_html(message: Any) -> str:
    """What `Message._repr_html_` returns."""

    def make() -> str:
        found = [
            ("epoch", message.epoch),
            ("published", message.published_at.isoformat(" ", "milliseconds")),
            ("producer", message.producer_name),
            ("key", Shown(_decoded(message, "key"))),
            ("value", Shown(_decoded(message, "value"))),
            ("properties", Shown(message.properties)),
        ]
        return facts(f"message {message.offset}", found)

    return html_of(message, make)


_core.show_messages_by(message_html)


def _decoded(message: Any, name: str) -> object:
    """A part of a message; its bytes if its reader's deserializer cannot read them."""
    try:
        return getattr(message, name)
    except Exception:
        return getattr(message, f"raw_{name}")


def _cell(fact: object) -> str:
    if isinstance(fact, Shown):
        return f"<code>{_text(_repr(fact.value))}</code>"
    return _text(f"{fact:,}" if type(fact) is int else str(fact))


def _repr(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return _short.repr(value)
    except Exception:  # of a class of the application
        return f"<{type(value).__name__}>"


def _text(text: str) -> str:
    return escape(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}")
