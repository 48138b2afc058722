"""What an engine says that it can do."""

from __future__ import annotations

import pytest

import exclusivelog as xl
from exclusivelog.backend import CAPABILITIES


@pytest.mark.parametrize("capability", sorted(CAPABILITIES))
def test_every_capability_has_an_answer(engine: xl.Engine, capability: str) -> None:
    assert engine.supports(capability) in (True, False)


def test_a_name_that_is_no_capability_is_refused_with_those_that_are(engine: xl.Engine) -> None:
    with pytest.raises(ValueError, match=r"capability='magic'.* backup, .* unload"):
        engine.supports("magic")


@pytest.mark.once
def test_a_backend_that_is_not_there_is_named() -> None:
    with pytest.raises(xl.UnsupportedError, match="no engine opens kafka://"):
        xl.open("kafka://user:secret@host/topic")
