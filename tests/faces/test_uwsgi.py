"""uWSGI in its default mode: the application is loaded in the master, which forks workers in C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.processes import PATIENCE, until
from tests.faces.test_web_service import free_port

pytestmark = [pytest.mark.once, pytest.mark.long, pytest.mark.rule("C8")]

WORKERS, REQUESTS = 4, 60

APPLICATION = """
import os

import exclusivelog as xl

engine = None


def open_engine():
    global engine, producer
    engine = xl.open(os.environ["LEDGER"])
    producer = engine.topic("orders").producer(os.environ["MODE"])


OPEN


def application(environ, start_response):
    try:
        answer = f"{producer.send(str(os.getpid()).encode())} {os.getpid()}"
    except xl.ExclusiveLogError as error:
        answer = type(error).__name__
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [answer.encode()]
"""


@pytest.fixture
def uwsgi() -> str:
    """The command; it embeds an interpreter, which must have the version of this one."""
    command = shutil.which("uwsgi")
    if command is None:
        pytest.skip("uwsgi is not in PATH (pip install uwsgi builds it)")
    shown = subprocess.run(
        [command, "--python-version"], capture_output=True, text=True, check=True
    )
    if shown.stdout.strip() != sys.version.split()[0]:
        pytest.skip(f"uwsgi embeds Python {shown.stdout.strip()}, not {sys.version.split()[0]}")
    return command


def serve(
    uwsgi: str, folder: Path, ledger: str, mode: str, opening: str, *more: str
) -> Iterator[str]:
    """Run the application until the generator is closed, and yield its address."""
    (folder / "app.py").write_text(APPLICATION.replace("OPEN", opening))
    address = f"127.0.0.1:{free_port()}"
    server = f"--http-socket {address} --master --die-on-term --processes {WORKERS}"
    command = [uwsgi, *server.split(), "--wsgi-file", "app.py", *more]
    paths = os.pathsep.join(path for path in (str(Path.cwd()), *sys.path) if path)
    settings = {"LEDGER": ledger, "MODE": mode, "PYTHONPATH": paths}
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | settings,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield f"http://{address}"
        process.terminate()
        # A worker that was forked while a thread of the master asked for the GIL may never end.
        with suppress(subprocess.TimeoutExpired):
            process.wait(3)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)


def answers(address: str) -> list[list[str]]:
    def get(_: object = None) -> list[str]:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            return str(answer.read().decode()).split()

    def serves() -> bool:
        with suppress(OSError):
            get()
            return True
        return False

    until(serves)
    with ThreadPoolExecutor(2 * WORKERS) as threads:
        return list(threads.map(get, range(REQUESTS)))


def test_c8_no_worker_sends_as_the_owner_that_was_opened_in_the_master(
    uwsgi: str, path: str, tmp_path: Path
) -> None:
    for address in serve(uwsgi, tmp_path, path, "exclusive", "open_engine()"):
        assert Counter(map(tuple, answers(address))) == {("EngineClosedError",): REQUESTS}
    with xl.open(path) as engine:
        assert list(engine.topic("orders").reader()) == []
        assert engine.verify().problems == ()


def test_c8_a_worker_that_opens_its_own_engine_after_the_fork_sends(
    uwsgi: str, path: str, tmp_path: Path
) -> None:
    opening = "from uwsgidecorators import postfork; postfork(open_engine)"
    for address in serve(uwsgi, tmp_path, path, "shared", opening, "--enable-threads"):
        acknowledged = {int(offset): pid for offset, pid in answers(address)}
    assert len(acknowledged) == REQUESTS
    with xl.open(path) as engine:
        found = {
            message.offset: message.value.decode() for message in engine.topic("orders").reader()
        }
        assert acknowledged.items() <= found.items()
        assert engine.verify().problems == ()
