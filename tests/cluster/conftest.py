"""A real Pulsar broker, shared by all workers of a test run, and a namespace for each test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testing.broker import Namespace, missing, shared_broker


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
