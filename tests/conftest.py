"""A second engine on the ledger, a pipe that is full, clocks that are wrong, and a real Pulsar
broker, shared by all workers of a test run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.broker import Namespace, missing, shared_broker
from testing.clocks import WallClock, build
from testing.processes import preload

preload("hypothesis")  # test modules import it, and so would each worker: 350 ms


@pytest.fixture
def other(engine: xl.Engine) -> Iterator[xl.Topic]:
    """The topic, as another engine sees it."""
    with xl.open(engine.path, name="other") as other:
        yield other.topic("orders")


@pytest.fixture
def reachable() -> Iterator[str]:
    """A path for a ledger that other users can reach, too."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield f"{place}/log"


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The writing end of a pipe that is full, and that no process reads."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    yield writing
    os.close(reading)
    os.close(writing)


@pytest.fixture(scope="session")
def false_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that stands between a process and its wall clock."""
    library = build(Path(tmp_path_factory.mktemp("clock")))
    if library is None:
        pytest.skip("there is no C compiler to make a false clock with")
    return library


@pytest.fixture
def clock(false_clock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WallClock:
    """The workers of this test go by it."""
    monkeypatch.setenv("LD_PRELOAD", str(false_clock))
    monkeypatch.setenv("WALL_CLOCK_SHIFT", str(tmp_path / "shift"))
    return WallClock(tmp_path / "shift")


# ---- a broker ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def broker() -> Iterator[tuple[str, str]]:
    """(URL, admin URL) of the broker of this test run."""
    if reason := missing():
        pytest.skip(reason)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    with shared_broker(Path(tempfile.gettempdir()) / f"exclusivelog-broker-{run}") as place:
        yield place


@pytest.fixture
def make_namespace(broker: tuple[str, str]) -> Callable[..., Namespace]:
    """`make_namespace(deduplication=True, retention=-1)`: a new namespace."""
    return lambda **policies: Namespace.make(*broker, **policies)


@pytest.fixture
def namespace(make_namespace: Callable[..., Namespace]) -> Namespace:
    """A new namespace with the policies that a mirror needs."""
    return make_namespace()
