"""A second engine on the ledger, and clocks that are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.clocks import WallClock, build
from testing.processes import preload

preload("hypothesis")  # test modules import it, and so would each worker: 350 ms


@pytest.fixture
def other(engine: xl.Engine) -> Iterator[xl.Topic]:
    """The topic, as another engine sees it."""
    with xl.open(engine.path, name="other") as other:
        yield other.topic("orders")


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
