"""`serve`: a web page to look into a ledger."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

import click

import exclusivelog as xl
from exclusivelog.arguments import is_url
from exclusivelog.cli.output import printable
from exclusivelog.cli.program import PATH, leave, local_path, open_to_read, program
from exclusivelog.foreign import pass_on_foreign


@program.command()
@local_path
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=0,
    help="Of 127.0.0.1. 0 is a free one.",
)
@click.option(
    "--socket",
    "file",
    metavar="FILE",
    type=PATH,
    help="A Unix socket instead, which only this user can open.",
)
def serve(path: str, port: int, file: str | None) -> None:
    """Show a ledger in a browser: topics, owners, waiters and lags, live; messages and maps.

    It prints the address of the page, and serves it until it is ended. The page is read-only, for
    this machine, and shows nothing without the token in its address: whoever has the address sees
    all messages. To look from another machine, forward the port: ssh -L 8000:127.0.0.1:8000 HOST.
    """
    from exclusivelog.cli.page.content import Content  # here: help does not need it
    from exclusivelog.cli.page.server import PageServer, SocketServer

    if is_url(path):
        raise xl.UnsupportedError("serve is for a local ledger; for a cluster, use top and tail")
    if file is not None and port:
        raise click.UsageError("give --port or --socket, not both")
    with open_to_read(path) as engine, contextlib.ExitStack() as ending:
        content = Content(engine)
        kind, address = (PageServer, ("127.0.0.1", port)) if file is None else (SocketServer, file)
        try:
            server = ending.enter_context(kind(address, content))
        except OSError as error:
            pass_on_foreign(error)
            where = f"port {port}" if file is None else printable(os.path.abspath(file))
            raise xl.ExclusiveLogError(
                f"{where} cannot be used: {error.strerror or error}"
            ) from None
        ending.callback(server.end)
        signal.signal(signal.SIGTERM, _end)
        print(server.url if file is None else f"{file} {server.url}", flush=True)
        server.serve_forever()


def _end(*_: object) -> NoReturn:
    leave(0)
