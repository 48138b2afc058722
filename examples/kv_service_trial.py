"""A trial of kv_service.py: a server is killed while clients pay, and the accounts are judged.

    $ python examples/kv_service_trial.py

Clients pay into accounts through both servers. Then one server is killed; its clients connect to
the other one, and repeat the requests that had no answer. Later the dead server is restarted, and
restores a snapshot and the messages after it. In the end the accounts must show every payment,
exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from typing import Any

from kv_service import serve
from processes import PATIENCE, directory, never_interleaved, processes, run, until, verdict

import exclusivelog as xl

ACCOUNTS = ("alice", "bob", "carol")


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
            total: int = len(clients) * options.payments
            return sum(client.paid for client in clients) / total

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
            with xl.SharedMap[str, Any](topic, value="json") as accounts:
                kept = {key: accounts[key]["balance"] for key in ACCOUNTS}
            log = list(topic.reader())
    again = sum(client.sent_again for client in clients)
    print(f"{len(log)} messages, {log[-1].epoch} epochs, {again} requests sent again\n{kept}\n")
    due = [len(clients) * sum(range(first, options.payments, 3)) for first in range(3)]
    answered = {server for client in clients for server in client.servers}
    return verdict(
        {
            "every payment is there, exactly once": list(kept.values()) == due,
            "server-1, restarted, reports the same": (told, judge.servers) == (kept, {"server-1"}),
            "clients of the dead server continued": again > 0
            and answered == {"server-1", "server-2"},
            "there never were two writers at a time": never_interleaved(log),
        }
    )


if __name__ == "__main__":
    run(main)
