"""The names in a ledger, for the completion of a shell.

What is offered is put into the command line as it is, so a name that a shell would read as
something else is left out. Nothing is printed: a ledger that cannot be opened has no names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import click

import exclusivelog as xl
from exclusivelog.arguments import is_url

SAFE = re.compile(r"[\w.:/@%+,][\w.:/@%+,=-]*", re.ASCII)
ENGINE_NAME = "cli"
TYPED = "exclusivelog.typed"  # where a context keeps the words of the command line

Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def _names(find: Callable[[xl.Engine], Iterable[str]]) -> Completion:
    """A completion of the names that `find` returns. A cluster is not asked: that may take long."""

    def complete(context: click.Context, _: click.Parameter, typed: str) -> list[str]:
        path = context.params.get("path") or _first_word(context)
        if not path or is_url(path):
            return []
        try:
            with xl.open(path, ENGINE_NAME, readonly=True) as engine:
                found = sorted(set(find(engine)))
        except Exception:  # whatever it is, the next character is typed over it
            return []
        return [name for name in found if name.startswith(typed) and SAFE.fullmatch(name)]

    return complete


def _first_word(context: click.Context) -> str | None:
    """The path, where click has parsed nothing because an option lacks its value still."""
    return next((word for word in context.meta.get(TYPED, ()) if not word.startswith("-")), None)


topics = _names(lambda engine: engine.topics())
groups = _names(lambda engine: (info.group for info in engine.groups()))
claim_groups = _names(lambda engine: (info.group for info in engine.claims() if info.group))
roles = _names(lambda engine: (info.name for info in engine.roles()))
engines = _names(lambda engine: (info.name for info in engine.engines() if info.id != engine.id))
