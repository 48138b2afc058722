"""What every test and every doctest finds: an engine on a fresh ledger."""

from __future__ import annotations

import datetime as dt
import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from tests.processes import Worker, workers


def pytest_configure() -> None:
    # A job in the background of a shell is deaf to Ctrl-C, and its children with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torture-seconds", type=float, default=20.0, help="how long test_torture.py goes on"
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture
def engine(path: str) -> Iterator[xl.Engine]:
    with xl.open(path, name="test") as engine:
        yield engine


@pytest.fixture
def topic(engine: xl.Engine) -> xl.Topic:
    return engine.topic("orders")


@pytest.fixture(autouse=True)
def _examples(request: pytest.FixtureRequest) -> None:
    """The names that the examples in docstrings use."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    names = request.getfixturevalue("doctest_namespace")
    names.update(xl=xl, dt=dt, count=itertools.count())
    source = "".join(example.source for example in request.node.dtest.examples)
    if any(word in source for word in ("engine", "topic", "producer", "reader", "path")):
        names["path"] = request.getfixturevalue("path")
    if any(word in source for word in ("engine", "topic", "producer", "reader")):
        if "xl.open" not in source:
            names["engine"] = request.getfixturevalue("engine")
            names["topic"] = names["engine"].topic("orders")
        if "producer." in source and "as producer" not in source:
            names["producer"] = names["topic"].producer()
        if "reader." in source and "reader = " not in source:
            names["reader"] = names["topic"].reader()


@pytest.fixture
def worker(path: str) -> Iterator[Callable[..., Worker]]:
    """`worker(name="w", keepalive=...)`: a real process with an engine on `path`."""
    with workers() as make:
        yield lambda name="worker", **options: make(path, name, **options)
