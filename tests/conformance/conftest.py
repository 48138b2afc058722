"""The backends that the conformance tests run against.

`path` is what a backend gives to `xl.open`, and with it the fixtures `engine`, `topic` and `worker`
are on that backend. A test that needs more than every engine can do says so:
`@pytest.mark.needs("transactions")`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import exclusivelog as xl

BACKENDS = {
    "local": lambda place: str(place / "log"),
    "memory": lambda place: f"memory://{place}",  # as on a cluster
}


# On a cluster the cluster decides what is durable: `durability=` is refused there.
@pytest.fixture(params=["local", pytest.param("memory", marks=pytest.mark.once)])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def path(backend: str, tmp_path: Path) -> str:
    return BACKENDS[backend](tmp_path)


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
                pytest.skip(f"the backend {backend!r} does not support {capability!r}")
