"""examples/web_service.py under load: uvicorn with three workers, and the leader is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.processes import PATIENCE, until
from tests.faces.scripts import EXAMPLES

httpx = pytest.importorskip("httpx")
# Only the service imports them: it takes half a second, in each of pytest's workers.
if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
    pytest.skip(f"needs {' and '.join(missing)}", allow_module_level=True)
pytestmark = pytest.mark.once

CLIENTS, ORDERS = 8, 40


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def service(path: str, tmp_path: Path) -> Iterator[str]:
    """The address of the service."""
    port = free_port()
    arguments = f"--workers 3 --port {port} --log-level warning web_service:app"
    command = [sys.executable, "-m", "uvicorn", *arguments.split()]
    env = {**os.environ, "LEDGER": path}
    with open(tmp_path / "output", "w+") as output:
        process = subprocess.Popen(
            command, cwd=EXAMPLES, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield f"http://127.0.0.1:{port}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) in (0, -signal.SIGTERM), output.read()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE)


def order(client: httpx.Client, customer: str) -> int:
    """Send it until it is answered; returns its number. It may be in the log more than once."""
    found = 0

    def answered() -> bool:
        nonlocal found
        with contextlib.suppress(httpx.TransportError):
            answer = client.post("/orders", json={"customer": customer, "cents": 1})
            assert answer.status_code == 200, answer.text
            found = answer.json()["order"]
            return True
        return False

    until(answered)
    return found


def leader(client: httpx.Client) -> dict[str, int]:
    with contextlib.suppress(httpx.TransportError):
        found: dict[str, int] = client.get("/leader").json()
        return found
    return {}


@pytest.mark.long
def test_each_order_has_one_invoice_though_the_leader_is_killed(service: str, path: str) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=service, timeout=PATIENCE))
            for _ in range(CLIENTS)
        ]
        until(lambda: leader(clients[0]), timeout=2 * PATIENCE)
        until(lambda: workers(path) == 3)
        first = leader(clients[0])
        with ThreadPoolExecutor(CLIENTS) as pool:
            work = [
                pool.submit(lambda c, n: [order(c, f"{n}-{i}") for i in range(ORDERS)], client, n)
                for n, client in enumerate(clients)
            ]
            until(lambda: invoices(path))
            os.kill(first["pid"], signal.SIGKILL)
            answered = [number for each in work for number in each.result(4 * PATIENCE)]
        until(lambda: leader(clients[0]).get("epoch", 0) > first["epoch"])
        assert leader(clients[0])["pid"] != first["pid"]
        assert len(set(answered)) == CLIENTS * ORDERS
        with xl.open(path, readonly=True) as engine:
            number = engine.topic("orders").next_offset
        until(lambda: len(invoices(path)) >= number)
        assert invoices(path) == list(range(number))
        assert set(answered) <= set(range(number))
        with xl.open(path, readonly=True) as engine:
            owed = dict(xl.SharedMap[str, int](engine.topic("owed")))
        assert owed == Counter(customers(path))
        assert clients[0].get("/owed/0-0").json() == owed["0-0"]
        last = clients[0].get("/invoices").json()
        assert [each["invoice"] for each in last] == list(range(number - 100, number))


def workers(path: str) -> int:
    with xl.open(path, readonly=True) as engine:
        return sum(info.name.startswith("web-") for info in engine.engines())


def customers(path: str) -> list[str]:
    """Those of all invoices, which are of one cent each."""
    with xl.open(path, readonly=True) as engine:
        reader = engine.topic("invoices").reader(deserializer="json")
        return [message.value["customer"] for message in reader]


def invoices(path: str) -> list[int]:
    """The orders that have invoices, by the invoices' numbers."""
    with xl.open(path, readonly=True) as engine:
        reader = engine.topic("invoices").reader(deserializer="json")
        return [message.value["order"] for message in reader]
