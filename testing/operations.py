"""What docs/operations.md lists, to be compared with the code.

>>> lines_of("| `opened` | INFO | a text | |")
{'opened': ('INFO', 'a text')}
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from exclusivelog.logs import LINES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "operations.md"

_ROW = re.compile(r"^\| `([a-z_]+)` \| ([A-Z]+) \| (.*?) \|", re.MULTILINE)


def lines_of(page: str) -> dict[str, tuple[str, str]]:
    """{event: (level, text)} of the table of log lines."""
    return {event: (level, text) for event, level, text in _ROW.findall(page)}


def table() -> str:
    """That table as it has to be: `python -m testing.operations` prints it."""
    rows = [
        f"| `{line.event}` | {logging.getLevelName(line.level)} | {line.text} |"
        for line in LINES.values()
    ]
    return "\n".join(["| event | level | text |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
