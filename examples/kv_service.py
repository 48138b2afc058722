"""A key-value service: several processes answer requests, and share their state through a log.

    $ python examples/kv_service.py data/log /tmp/server-1      # and /tmp/server-2

Each server has a `SharedMap` and listens on a Unix domain socket. A request is a line of JSON,
`{"do": "pay", "key": "alice", "amount": 5, "id": "client-1/17"}`, and so is its answer. A client
can use either server: each write is computed from the newest state, whichever process wrote it.

A request whose answer was lost, because its server has died, may have been carried out already. So
each value contains the id of every client's last request: the client repeats it at another server,
with the same id, and no server carries it out again.

kv_service_trial.py kills a server, and judges the accounts.
"""

from __future__ import annotations

import argparse
import json
import os
import socketserver
from pathlib import Path
from typing import Any

import exclusivelog as xl


def serve(path: str, address: str) -> None:
    """Answer requests for ever."""
    with xl.open(path, name=Path(address).stem) as engine:
        topic = engine.topic("accounts")
        with xl.SharedMap[str, Any](topic, value="json", snapshot_every=100) as accounts:

            class Handler(socketserver.StreamRequestHandler):
                def handle(self) -> None:
                    for line in self.rfile:
                        answer = {**do(accounts, json.loads(line)), "server": engine.name}
                        self.wfile.write(json.dumps(answer).encode() + b"\n")

            # Clients must not find it before it listens: until then it has another name.
            with socketserver.ThreadingUnixStreamServer(f"{address}.new", Handler) as server:
                os.rename(f"{address}.new", address)
                server.serve_forever()


def do(accounts: xl.SharedMap[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request; return its answer."""
    if request["do"] == "get":
        account = accounts.get(request["key"], latest=True)
    else:
        account = accounts.update(request["key"], lambda old: pay(old, request)).value
    return {"balance": account["balance"] if account else 0}


def pay(account: dict[str, Any] | None, request: dict[str, Any]) -> dict[str, Any]:
    """Return the account after this payment; unchanged if the payment is a repeated one.

    >>> request = {"amount": 5, "id": "client-1/17"}
    >>> pay(pay(None, request), request)
    {'balance': 5, 'last': {'client-1': 17}}
    """
    account = account or {"balance": 0, "last": {}}
    client, number = request["id"].split("/")
    if account["last"].get(client, -1) >= int(number):
        return account
    last = {**account["last"], client: int(number)}
    return {"balance": account["balance"] + request["amount"], "last": last}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A server of accounts.")
    parser.add_argument("path", help="the ledger's directory")
    parser.add_argument("address", help="the path of the socket to listen on")
    serve(**vars(parser.parse_args()))
