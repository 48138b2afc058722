"""The `exclusivelog` command: inspect a ledger, send, verify, back up, and the demo.

Needs the extra `[cli]`. Commands that only read open the ledger with `readonly=True`. Tables are
drawn on a terminal, and are tab-separated lines anywhere else. Exit status: 0 for success, 1 for
an error, 2 for wrong arguments; `check --strict` has 3, too.
"""

from __future__ import annotations

import importlib
import os
import sys

PROGRAM = "exclusivelog"
EXTRA = ("click", "rich")
COMMANDS = ("commands", "removing", "exporting", "auditing", "checking", "top", "completion")


def main() -> None:
    """The entry point."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by 2>&-: print would take stdout for it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        from exclusivelog.cli.program import program

        for module in COMMANDS:  # each adds its commands
            importlib.import_module(f"exclusivelog.cli.{module}")
        program(prog_name=PROGRAM)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        sys.exit(f"{PROGRAM}: the command needs the extra cli: pip install 'exclusivelog[cli]'")
