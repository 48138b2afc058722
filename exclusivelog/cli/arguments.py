"""A command's arguments, read from the signature of its function.

Each parameter of the function is `Annotated` with an `Argument` or an `Option`. Only the command
that runs is read, with the standard library alone: so the command starts at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_origin, get_type_hints

LONGEST_LINE = 100


class Argument:
    """A parameter that is told by its place. `min`: the least number that it takes."""

    def __init__(
        self, help: str, *, metavar: str | None = None, min: float | None = None,
        choices: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.help, self.metavar, self.min = help, metavar, min
        self.choices = tuple(choices)


class Option(Argument):
    """A parameter that is told by a flag; without `flags`, by its own name. A bool takes no value,
    and a list takes one each time."""

    def __init__(self, *flags: str, help: str, **rest: Any) -> None:
        super().__init__(help, **rest)
        self.flags = flags


class WrongArgument(Exception):
    """An argument does not fit; told as argparse tells it."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    # The width is given: argparse would import all of shutil to ask for it.
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=_width())

    def add_usage(
        self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None
    ) -> None:
        super().add_usage(usage, actions, groups, prefix or "Usage: ")


def _width() -> int:
    try:
        columns = int(os.environ.get("COLUMNS", "")) or os.get_terminal_size().columns
    except (ValueError, OSError):
        columns = 80
    return max(20, min(columns, LONGEST_LINE) - 2)


def summary(command: Callable[..., None]) -> str:
    """The first line of a command's docstring."""
    return (command.__doc__ or "").partition("\n")[0]


def parser_of(prog: str, command: Callable[..., None]) -> argparse.ArgumentParser:
    """The parser of a command's arguments.

    >>> from typing import Annotated
    >>> def greet(name: Annotated[str, Argument("Whom.")]) -> None:
    ...     print(f"hello, {name}")
    >>> vars(parser_of("greet", greet).parse_args(["you"]))
    {'name': 'you'}
    """
    lines = (command.__doc__ or "").strip().split("\n")
    parser = argparse.ArgumentParser(
        prog=prog, description="\n".join(map(str.strip, lines)), formatter_class=_Formatter,
        allow_abbrev=False,
    )  # fmt: skip
    hints = get_type_hints(command, include_extras=True)
    names = command.__code__.co_varnames[: command.__code__.co_argcount]
    defaults = command.__defaults__ or ()
    without = len(names) - len(defaults)
    for place, name in enumerate(names):
        kind, told = get_args(hints[name])
        given = {"default": defaults[place - without]} if place >= without else {}
        _add(parser, name, kind, told, given)
    return parser


def _add(
    parser: argparse.ArgumentParser, name: str, kind: Any, told: Argument, given: dict[str, Any]
) -> None:
    if type(None) in get_args(kind):  # `int | None`
        kind = next(part for part in get_args(kind) if part is not type(None))
    default = given.get("default")
    shown = f" (default: {default})" if default not in (None, False, "") else ""
    how: dict[str, Any] = {"help": told.help.replace("%", "%%") + shown, **given}
    several = get_origin(kind) is list
    if kind is not bool:
        how["metavar"] = told.metavar or "|".join(told.choices) or name.upper()
        how["type"] = _reader(str if several else kind, told)
    if isinstance(told, Option):
        how["action"] = "store_true" if kind is bool else "append" if several else "store"
        flags = told.flags or ("--" + name.replace("_", "-"),)
        parser.add_argument(*flags, dest=name, **how)
    else:
        if several:
            how["nargs"] = "*" if given else "+"
        elif given:
            how["nargs"] = "?"
        parser.add_argument(name, **how)


def _reader(kind: Callable[[str], Any], told: Argument) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}") from None
        if told.min is not None and not value >= told.min:
            raise argparse.ArgumentTypeError(f"{text} is below {told.min}")
        if told.choices and value not in told.choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(told.choices)}")
        return value

    return read


def read(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, Any]:
    """The parameters by name; options may stand anywhere before `--`. Leaves with status 2, and
    says why, if they are wrong."""
    if "--" in words:
        at = words.index("--")
        # Else argparse takes what comes behind it for options.
        words = [*words[:at], *("\0" + word for word in words[at + 1 :])]
    found = vars(parser.parse_intermixed_args(words))
    return {name: _bare(value) for name, value in found.items()}


def _bare(value: Any) -> Any:
    if isinstance(value, list):
        return [_bare(part) for part in value]
    return value.removeprefix("\0") if isinstance(value, str) else value
