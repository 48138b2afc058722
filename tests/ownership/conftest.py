"""Processes with an engine each, which are there at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from testing.handovers import Quick, quick_workers


@pytest.fixture
def quick(path: str) -> Iterator[Callable[..., Quick]]:
    """`quick(name, keepalive=...)`: a process with an engine on `path`, there at once."""
    with quick_workers(path) as make:
        yield make
