"""A key-value service: two processes answer requests, and share their state through a log.

    $ python examples/kv_service.py

Each server has a `SharedMap` and listens on a Unix domain socket. A request is a line of JSON,
`{"do": "pay", "key": "alice", "amount": 5, "id": "client-1/17"}`, and so is its answer. A client
can use either server: each write is computed from the newest state, whichever process wrote it.

Clients pay into accounts through both servers. Then one server is killed; its clients connect to
the other one, and repeat the requests that had no answer. Such a request may have been carried out
already: so each value contains the id of every client's last request, and no server carries it out
again. Later the dead server is restarted, and restores a snapshot and the messages after it.

In the end the accounts must show every payment, exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import socketserver
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from processes import PATIENCE, directory, never_interleaved, processes, run, until, verdict

import exclusivelog as xl

ACCOUNTS = ("alice", "bob", "carol")


# ---- a server: its own process -----------------------------------------------------------


def serve(path: str, address: str) -> None:
    """Answer requests for ever."""
    with xl.open(path, name=Path(address).stem) as engine:
        with xl.SharedMap(engine.topic("accounts"), value="json", snapshot_every=100) as accounts:

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
        account = accounts.get(request["key"], {}, latest=True)
    else:
        account = accounts.update(request["key"], lambda old: pay(old, request)).value or {}
    return {"balance": account.get("balance", 0)}


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


# ---- a client: a thread of the parent ----------------------------------------------------


class Client:
    """Sends requests to one server, and to the next one when that is gone."""

    def __init__(self, name: str, addresses: list[str]) -> None:
        self.name = name
        self.servers: set[str] = set()  # the servers that have answered
        self.paid = self.sent_again = 0
        self._addresses = list(addresses)
        self._line: Any = None

    def pay(self, payments: int) -> None:
        """Pay into one account after the other."""
        for number in range(payments):
            key, id_ = ACCOUNTS[number % len(ACCOUNTS)], f"{self.name}/{number}"
            self.ask({"do": "pay", "key": key, "amount": number, "id": id_})
            self.paid += 1

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. It is sent again, with the same id, if need be."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and active_children():  # after Ctrl-C there is no server left
            try:
                if self._line is None:
                    self._line = connect(self._addresses[0])
                self._line.write(json.dumps(request).encode() + b"\n")
                self._line.flush()
                answer: dict[str, Any] = json.loads(self._line.readline())
            except (OSError, ValueError):  # gone, perhaps in the middle of a line
                self._line = None
                self._addresses.append(self._addresses.pop(0))
                self.sent_again += 1
            else:
                self.servers.add(answer["server"])
                return answer
        raise TimeoutError("no server answers")


def connect(address: str) -> Any:
    """Connect, and return the connection as a file of lines."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(PATIENCE)
        line.connect(address)
        return line.makefile("rwb")


# ---- the parent --------------------------------------------------------------------------


def main() -> int:
    """Pay, kill a server, pay, restart the server, pay; then check the accounts."""
    parser = argparse.ArgumentParser(description="A key-value service on a shared log.")
    parser.add_argument("--payments", type=int, default=150, help="of each client (default: 150)")
    parser.add_argument("--path", help="the ledger's directory, kept (default: a temporary one)")
    options = parser.parse_args()
    with directory(None) as sockets, directory(options.path) as path, processes() as start:
        addresses = [os.path.join(sockets, f"server-{number}") for number in (1, 2)]
        server, _ = [start("a server", serve, path, address) for address in addresses]
        until("both listen", lambda: all(map(os.path.exists, addresses)))
        clients = [Client(f"client-{n}", addresses[:: (-1) ** n]) for n in range(4)]

        def paid() -> float:
            return sum(client.paid for client in clients) / (len(clients) * options.payments)

        with ThreadPoolExecutor(len(clients)) as pool:
            working = [pool.submit(client.pay, options.payments) for client in clients]
            until("a third is paid", lambda: paid() > 1 / 3)
            server.kill()
            server.join()
            os.unlink(addresses[0])
            print("server-1 is killed")
            until("two thirds are paid", lambda: paid() > 2 / 3)
            start("server-1 again", serve, path, addresses[0])
            until("it listens again", lambda: os.path.exists(addresses[0]))
            for payment in working:
                payment.result(PATIENCE)
        judge = Client("judge", addresses)
        told = {key: judge.ask({"do": "get", "key": key})["balance"] for key in ACCOUNTS}
        with xl.open(path, "parent") as engine:
            topic = engine.topic("accounts")
            with xl.SharedMap(topic, value="json") as accounts:
                kept = {key: accounts[key]["balance"] for key in ACCOUNTS}
            log = list(topic.reader())
    again = sum(client.sent_again for client in clients)
    print(f"{len(log)} messages, {log[-1].epoch} epochs, {again} requests sent again\n{kept}\n")
    due = [len(clients) * sum(range(first, options.payments, 3)) for first in range(3)]
    answered = set.union(*(client.servers for client in clients))
    return verdict({
        "every payment is there, exactly once": list(kept.values()) == due,
        "server-1, restarted, reports the same": (told, judge.servers) == (kept, {"server-1"}),
        "clients of the dead server continued": again > 0 and answered == {"server-1", "server-2"},
        "there never were two writers at a time": never_interleaved(log),
    })  # fmt: skip


if __name__ == "__main__":
    run(main)
