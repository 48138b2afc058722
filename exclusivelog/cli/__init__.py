"""The `exclusivelog` command: inspect a ledger, send, verify, back up, and the demo.

Commands that only read open the ledger with `readonly=True`. Tables are drawn on a terminal (with
the extra `[cli]`), and are tab-separated lines anywhere else. Exit status: 0, 1 for what went
wrong, 2 for wrong arguments. Each command imports what it needs, and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from exclusivelog.cli import commands
from exclusivelog.cli.arguments import WrongArgument, parser_of, read, summary
from exclusivelog.version import __version__

PROGRAM = "exclusivelog"
INTERRUPTED, PIPE_CLOSED = 128 + 2, 128 + 13  # as a shell tells SIGINT and SIGPIPE
COMMANDS = {
    command.__name__: command
    for command in (
        commands.topics, commands.info, commands.tail, commands.send, commands.owners,
        commands.claims, commands.groups, commands.roles, commands.unload, commands.compact,
        commands.trim, commands.verify, commands.backup, commands.upgrade, commands.demo,
    )
}  # fmt: skip
OVERVIEW = """\
Usage: exclusivelog [--version] [--help] COMMAND ...

An append-only log with one fenced writer: inspect a ledger, send, verify.

Commands:
{commands}

`exclusivelog COMMAND --help` tells a command's arguments.
"""


def main() -> None:
    """The entry point."""
    try:
        _run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except BrokenPipeError:
        _leave(PIPE_CLOSED)


def _run(words: Sequence[str]) -> None:
    if not words:
        sys.stderr.write(_overview())
        _leave(2)
    name, *rest = words
    if name in ("--help", "-h"):
        print(_overview(), end="")
    elif name == "--version":
        print(f"{PROGRAM} {__version__}")
    elif name in COMMANDS:
        _call(name, rest)
    else:
        what = "option" if name.startswith("-") else "command"
        sys.stderr.write(f"Usage: {PROGRAM} COMMAND ...\n{PROGRAM}: no {what} {name!r}; --help "
                         "lists the commands\n")  # fmt: skip
        _leave(2)


def _overview() -> str:
    longest = max(map(len, COMMANDS))
    rows = (f"  {name:{longest}}  {summary(command)}" for name, command in COMMANDS.items())
    return OVERVIEW.format(commands="\n".join(rows))


def _call(name: str, words: list[str]) -> None:
    parser = parser_of(f"{PROGRAM} {name}", COMMANDS[name])
    given = read(parser, words)
    try:
        COMMANDS[name](**given)
    except WrongArgument as error:
        parser.error(str(error))
    except commands.Failed:
        _leave(1)
    except BrokenPipeError:
        raise
    except Exception as error:
        if not commands.is_told(error):
            raise
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        _leave(1)


def _leave(status: int) -> None:
    # What is still in stdout's buffer cannot be written if its reader is gone; the
    # interpreter would say so at its end.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(status)
