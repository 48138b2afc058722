"""When producers that follow a hand-over go on at the destination, for tests."""

from __future__ import annotations

import pytest

from exclusivelog import sessions

NEVER = 1e6  # seconds


def idle_producers_stay(patch: pytest.MonkeyPatch) -> None:
    """Producers that do not send stay where they are. Else they follow after two seconds: on a busy
    machine, before a test's next call."""
    patch.setattr(sessions, "FOLLOWED_AFTER", NEVER)
