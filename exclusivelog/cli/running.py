"""`run`: a command that runs while this process holds a lock."""

from __future__ import annotations

import click

from exclusivelog.cli import names
from exclusivelog.cli.program import Argument, access, leave, ledger_path, program


@program.command()
@ledger_path
@click.argument(
    "name",
    cls=Argument,
    metavar="NAME",
    help="The lock's name.",
    shell_complete=names.roles,
)
@click.argument(
    "command",
    cls=Argument,
    metavar="COMMAND...",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    help="The command and its arguments, after --.",
)
@click.option("--priority", metavar="N", type=int, default=0, help="In the queue; higher is first.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="Give up after that wait; 0 tries once. Default: wait without limit.",
)
@click.option(
    "--grace",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=10.0,
    help="From SIGTERM to SIGKILL, when the lock is lost.",
)
@click.option(
    "--keepalive",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=30.0,
    help="Of silence, after which a paused process loses the lock.",
)
def run(
    path: str,
    name: str,
    command: tuple[str, ...],
    priority: int,
    timeout: float | None,
    grace: float,
    keepalive: float,
) -> None:
    """Run a command while holding a lock: one process at a time, of all that use the same PATH and
    NAME.

    It waits in a queue for the lock, and then starts the command, with the lock's epoch in
    EXCLUSIVELOG_EPOCH. If the lock is lost, the process group of the command gets SIGTERM, and
    SIGKILL after --grace; so does what the command leaves of its group when it ends. If this
    process is killed, the process group is killed at once, because the lock is free then. A process
    that leaves the group, as setsid and timeout do, goes on.

    Signals are passed on, and so is the exit status: 128+n if signal n has ended the command, 127
    if there is no such command, 126 if it cannot be executed, 1 if the wait was too long, or if the
    lock was lost and the command has ended with 0 on SIGTERM.

    Under systemd with Type=notify, the unit is ready once it waits; its status says if it leads.

    PATH is created if it does not exist. On a cluster, the broker decides when a silent process
    loses the lock: leave --keepalive out.
    """
    from exclusivelog.cli.leading import lead  # here: help does not need it

    options = {"keepalive": keepalive, **access()}
    status = lead(path, name, command, priority, timeout, grace, options)
    leave(status)
