"""The `exclusivelog` command: inspect a ledger, send, verify, back up, and the demo.

Needs the extra `[cli]`. Commands that only read open the ledger with `readonly=True`. Tables are
drawn on a terminal, and are tab-separated lines anywhere else. Exit status: 0 for success, 1 for
an error, 2 for wrong arguments.
"""

from __future__ import annotations

import sys

PROGRAM = "exclusivelog"
EXTRA = ("click", "rich")


def main() -> None:
    """The entry point."""
    try:
        from exclusivelog.cli import auditing, completion, exporting, removing, top  # noqa: F401
        from exclusivelog.cli.commands import program

        program(prog_name=PROGRAM)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        sys.exit(f"{PROGRAM}: the command needs the extra cli: pip install 'exclusivelog[cli]'")
