"""Print the requirements of a dependency group of pyproject.toml, one in a line."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[1]


def requirements(groups: dict[str, Any], name: str) -> Iterator[str]:
    """Those of this group, and of the groups that it includes."""
    for entry in groups[name]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from requirements(groups, entry["include-group"])


def main() -> None:
    """Print those of each named group."""
    groups = tomllib.loads((TREE / "pyproject.toml").read_text())["dependency-groups"]
    for name in sys.argv[1:]:
        print(*requirements(groups, name), sep="\n")


if __name__ == "__main__":
    main()
