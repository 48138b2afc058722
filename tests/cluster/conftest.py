"""Engines that stand for other machines: on the log of the test's own fixture `path`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import exclusivelog as xl


@pytest.fixture
def other(path: str) -> Iterator[xl.Engine]:
    with xl.open(path, name="other") as engine:
        yield engine


@pytest.fixture
def third(path: str) -> Iterator[xl.Engine]:
    with xl.open(path, name="third") as engine:
        yield engine
