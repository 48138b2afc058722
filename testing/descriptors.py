"""Waiting for what a descriptor has to say."""

from __future__ import annotations

import select
from typing import Protocol


class HasDescriptor(Protocol):
    """A file, a pipe."""

    def fileno(self) -> int:
        """Its descriptor."""


def readable(file: int | HasDescriptor, seconds: float) -> bool:
    """Whether there is something to read within so many seconds, or nothing will ever be. Unlike
    `select`, it takes descriptors beyond 1,023."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
