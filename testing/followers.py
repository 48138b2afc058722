"""When producers that follow a hand-over go on at the destination, for tests."""

from __future__ import annotations

import pytest

from exclusivelog.local import followers

NEVER_NS = 10**15


def idle_producers_stay(patch: pytest.MonkeyPatch) -> None:
    """Producers that do not send stay where they are, as on a cluster. On one machine, they follow
    after two seconds: on a busy machine, before a test's next call."""
    patch.setattr(followers, "FOLLOWED_AFTER_NS", NEVER_NS)
