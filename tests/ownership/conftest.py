"""Processes with an engine each, which are there at once; and moves whose outcome no length of time
decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.local.followers import Following
from exclusivelog.local.storage import environment
from testing.handovers import Quick, quick_workers
from testing.patience import PATIENCE

MOVES = ("unload", "unload_async")
MOVES_OF_ONE = ("move", "move_async")


@pytest.fixture
def quick(path: str) -> Iterator[Callable[..., Quick]]:
    """`quick(name, keepalive=...)`: a process with an engine on `path`, there at once."""
    with quick_workers(path) as make:
        yield make


@pytest.fixture(autouse=True)
def _patient_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move, and the reservation that it leaves, end at a deadline only where a test names one:
    the ten seconds of the default pass on a busy machine."""
    for kind, names in (
        (xl.Engine, MOVES),
        (aio.Engine, MOVES),
        (xl.Producer, MOVES_OF_ONE),
        (aio.Producer, MOVES_OF_ONE),
    ):
        for name in names:
            assert getattr(kind, name).__defaults__ == (10.0,)
            monkeypatch.setattr(getattr(kind, name), "__defaults__", (PATIENCE,))


@pytest.fixture
def patient_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork waits for the transactions of other threads as long as they take. After five seconds
    the child could not open the ledger, and a flush may take as long on a busy machine."""
    monkeypatch.setattr(environment, "FORK_WAIT_SECONDS", PATIENCE)


@pytest.fixture
def only_who_sends_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would follow after two seconds, which pass on a busy machine."""
    monkeypatch.setattr(Following, "due_in", lambda following: math.inf)
