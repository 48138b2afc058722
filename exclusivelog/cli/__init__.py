"""The `exclusivelog` command: inspect a ledger, send, verify, back up, and run the demo.

Needs the extra `[cli]`. Commands that only read open the ledger with `readonly=True`. Output is a
table on a terminal, and tab-separated lines elsewhere. Exit status: 0 for success, 1 for an error,
2 for wrong arguments; `check --strict` also returns 3.
"""

from __future__ import annotations

import importlib
import sys

from exclusivelog.cli import streams

TYPE_CHECKING = False  # instead of typing's, to save its import

if TYPE_CHECKING:
    import click

PROGRAM = "exclusivelog"
EXTRA = ("click", "rich")
# In the order of the help text.
COMMANDS = """
    inspecting owning running messaging exporting importing removing maintaining checking serving
    mirroring demonstrating top completion
""".split()


def load() -> click.Group:
    """The program with all of its commands."""
    from exclusivelog.cli.program import program

    for module in COMMANDS:  # each adds its commands
        importlib.import_module(f"exclusivelog.cli.{module}")
    return program


def main() -> None:
    """The entry point."""
    streams.set_up()
    try:
        load()(prog_name=PROGRAM)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        sys.exit(f"{PROGRAM}: the command needs the extra cli: pip install 'exclusivelog[cli]'")
