"""Checks of what the application names: TypeError and ValueError say what an argument takes."""

from __future__ import annotations

from collections.abc import Iterable

MAX_NAME_BYTES = 240
MAX_GENERATION = 2**63 - 1


def check_group(group: object) -> None:
    """An error that says what a group's name is, unless this is one."""
    check_resource("group", group)


def check_resource(argument: str, name: object) -> None:
    """An error that says what the name of a group or resource is, unless this is one."""
    if not isinstance(name, str):
        raise TypeError(f"{argument}={name!r}: it takes a str")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{argument}={name!r} cannot be written as UTF-8") from None
    if not 1 <= size <= MAX_NAME_BYTES:
        raise ValueError(f"{argument}={name!r}: it takes 1 to {MAX_NAME_BYTES} bytes of UTF-8")


def check_generation(resource: str, generation: object) -> None:
    """An error that says what a resource's generation is, unless this is one."""
    if generation is None:
        return
    if not isinstance(generation, int) or isinstance(generation, bool):
        raise TypeError(f"generation of {resource!r}: it takes an int or None, not {generation!r}")
    if not 0 <= generation <= MAX_GENERATION:
        raise ValueError(f"generation={generation} of {resource!r}: it takes 0 to 2**63 - 1")


def check_groups(groups: Iterable[str]) -> tuple[str, ...]:
    """The names of the groups, each once; a str is one name."""
    names = (groups,) if isinstance(groups, str) else tuple(dict.fromkeys(groups))
    for name in names:
        check_group(name)
    return names
