"""docs/howto/gunicorn.md: its service under gunicorn, whose leading worker is killed or paused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.processes import PATIENCE, until
from tests.faces.test_web_service import free_port

httpx = pytest.importorskip("httpx")
if find_spec("gunicorn") is None:
    pytest.skip("needs gunicorn", allow_module_level=True)
pytestmark = pytest.mark.once

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "gunicorn.md"


@pytest.fixture
def service(path: str, tmp_path: Path) -> Iterator[str]:
    """The page's files, on this ledger and a free port, and gunicorn on them; its address."""
    address = f"127.0.0.1:{free_port()}"
    for name, text in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), re.S):
        text = text.replace("data/log", path).replace("127.0.0.1:8000", address)
        text = text.replace("keepalive=5.0", "keepalive=2.0")
        (tmp_path / name).write_text(text.replace("workers = 3", "workers = 2"))
    # gunicorn loses a SIGTERM of a worker that is just starting, and kills it after this time.
    command = [sys.executable, "-m", "gunicorn", "--graceful-timeout", "3", "service:app"]
    with open(tmp_path / "output", "w+") as output:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, "HOME": str(tmp_path)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield f"http://{address}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0, (tmp_path / "output").read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE)


def order(service: str, item: str) -> int:
    """Send it until it is answered; its number."""
    answers = []

    def answered() -> bool:
        with contextlib.suppress(httpx.TransportError):
            answers.append(httpx.get(f"{service}/{item}", timeout=PATIENCE).text)
        return bool(answers)

    until(answered)
    return int(re.fullmatch(r"order (\d+)\n", answers[0])[1])


def bills(engine: xl.Engine) -> list[int]:
    reader = engine.topic("bills", create=False).reader(deserializer=json)
    return [message.value["order"] for message in reader]


def leader(engine: xl.Engine) -> int:
    """The process id of the worker that writes bills; 0 if none does."""
    owner = engine.topic("bills").owner if "bills" in engine.topics() else None
    return owner.pid if owner else 0


@pytest.mark.smoke
@pytest.mark.long
def test_each_order_is_billed_once_though_the_leading_worker_is_killed(
    service: str, path: str
) -> None:
    assert order(service, "apples") == 0
    with xl.open(path, readonly=True) as engine:
        until(lambda: leader(engine))
        first = leader(engine)
        until(lambda: engine.topic("bills").waiters)
        os.kill(first, signal.SIGKILL)
        until(lambda: leader(engine) not in (0, first))
        last = order(service, "pears")
        until(lambda: bills(engine)[-1:] == [last])
        assert bills(engine) == list(range(last + 1))


@pytest.mark.long
def test_the_leading_worker_takes_orders_again_after_a_pause(service: str, path: str) -> None:
    order(service, "apples")
    with xl.open(path, readonly=True) as engine:
        until(lambda: leader(engine))
        paused = leader(engine)
        until(lambda: engine.topic("bills").waiters)
        os.kill(paused, signal.SIGSTOP)
        try:
            until(lambda: leader(engine) not in (0, paused))
        finally:
            os.kill(paused, signal.SIGCONT)

        def taken_by_it() -> bool:
            number = order(service, "pears")
            return engine.topic("orders")[number].producer_name.startswith(f"engine-{paused}-")

        until(taken_by_it)
        until(lambda: len(bills(engine)) == len(engine.topic("orders")))
        assert bills(engine) == list(range(len(engine.topic("orders"))))
