"""The backends that the conformance tests run against.

`path` is what a backend gives to `xl.open`, and with it the fixtures `engine`, `topic` and `worker`
are on that backend. A test that needs more than every engine can do says so:
`@pytest.mark.needs("transactions")`. Some run on a real broker as well, where others may be other
processes: `@pytest.mark.on_broker`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.cluster import pulsar
from exclusivelog.cluster.refused import REASONS
from testing import followers
from testing.broker import Namespace
from testing.processes import Worker, workers

# On a cluster the cluster decides what is durable: `durability=` is refused there.
BACKENDS = ["local", pytest.param("memory", marks=pytest.mark.once)]
ON_BROKER = pytest.param(
    "pulsar", marks=[pytest.mark.once, pytest.mark.broker, pytest.mark.timeout(240)]
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        chosen = metafunc.definition.get_closest_marker("on_broker") is not None
        metafunc.parametrize("backend", [*BACKENDS, ON_BROKER] if chosen else BACKENDS)


@pytest.fixture
def idle_producers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    followers.idle_producers_stay(monkeypatch)


@pytest.fixture
def path(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    if backend == "local":
        return str(tmp_path / "log")
    if backend == "memory":
        return f"memory://{tmp_path}"  # as on a cluster
    namespace: Namespace = request.getfixturevalue("namespace")
    monkeypatch.setattr(pulsar, "_default_admin", lambda kind, hosts: namespace.admin)
    return namespace.url


@pytest.fixture
def worker(
    backend: str, path: str, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Worker]]:
    """A factory of processes with an engine on the same log."""
    options = {}
    if backend == "pulsar":
        options["admin"] = request.getfixturevalue("namespace").admin
    with workers() as make:
        yield lambda name="worker", **others: make(path, name, **options, **others)


@pytest.fixture(autouse=True)
def _supported(request: pytest.FixtureRequest, backend: str, path: str) -> None:
    """Skip a test that needs what the backend does not promise."""
    rivals = getattr(request.node, "callspec", None)
    here = rivals is not None and rivals.params.get("rivals") in ("same engine", "another engine")
    if backend == "memory" and "worker" in request.fixturenames and not here:
        pytest.skip("no other process shares this memory")
    needed = [name for mark in request.node.iter_markers("needs") for name in mark.args]
    if not needed:
        return
    with xl.open(path) as engine:
        for capability in needed:
            if not engine.supports(capability):
                why = str(REASONS.get(capability, ""))
                pytest.skip(f"the backend {backend!r} does not support {capability!r}: {why}")
