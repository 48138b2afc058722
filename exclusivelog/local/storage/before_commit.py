"""What is done right before each commit of a ledger.

The storage knows how a transaction commits, and not what its rows mean. Whoever knows that
registers here what is to be done at the end of a transaction, in two stages:

- `settle`: carry out what the block has put off until all rows are written. It may change any row.
- `record`: write down what has changed. The room for messages was checked before: a change of
  ownership is recorded also where it takes the last of the reserve (rule H2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exclusivelog.local.storage.tables import Tables

Hook = Callable[["Tables"], object]


class BeforeCommit:
    """The hooks of one ledger. All engines of this process on it register the same: of each subject
    the first one stays. So a hook holds nothing of one engine, and not the ledger, which it would
    keep open."""

    __slots__ = ("_recording", "_settling")

    def __init__(self) -> None:
        self._settling: dict[str, Hook] = {}
        self._recording: dict[str, Hook] = {}

    def settle_by(self, subject: str, hook: Hook) -> None:
        """Call this hook when transactions settle."""
        self._settling.setdefault(subject, hook)

    def record_by(self, subject: str, hook: Hook) -> None:
        """Call this hook when transactions record what has changed."""
        self._recording.setdefault(subject, hook)

    def settle(self, tables: Tables) -> None:
        """The first stage. An exception of a hook rolls the transaction back."""
        _call(self._settling, tables)

    def record(self, tables: Tables) -> None:
        """The second stage."""
        _call(self._recording, tables)


def _call(hooks: dict[str, Hook], tables: Tables) -> None:
    for hook in tuple(hooks.values()):  # another thread may open an engine meanwhile
        hook(tables)
