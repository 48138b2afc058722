"""Reader groups: one reader at a time, and where the next one goes on (rule F6).

A reader with `group=` claims (group, topic) as `engine.own` does, and so severs the reader
that had it. Its cursor is a row of the ledger, written in a transaction that checks the claim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.errors import ReaderFencedError, TopicNotFoundError
from exclusivelog.ownership import Claims, check_group
from exclusivelog.tables import Claimant, Tables

if TYPE_CHECKING:
    from exclusivelog.engine import Engine
    from exclusivelog.ledger import Ledger


class Membership:
    """One reader's place in its group."""

    def __init__(self, engine: Engine, claims: Claims, claimant: Claimant, topic: int, name: str):
        self.group = claimant.group
        self._engine = engine
        self._claims = claims
        self._claimant = claimant
        self._topic = topic
        self._name = name
        self._version = -1  # of the journal when the claim was last looked up
        self._ended = False

    @property
    def ledger(self) -> Ledger:
        """Where the cursor is kept."""
        return self._engine.ledger

    def check(self) -> None:
        """ReaderFencedError if a later reader of the group has come."""
        journal = self._engine.ledger.journal
        version = 0 if journal is None else journal.version  # before the look
        if version != self._version:
            with self._engine.ledger.read() as tables:
                self._check_in(tables)
            self._version = version

    def _check_in(self, tables: Tables) -> None:
        if tables.claimant(self._claimant.id) is not None:
            return
        _, later = tables.claim(self.group, self._name)
        holder = tables.claimant(later) if later else None
        by = "" if holder is None else (
            f": engine {holder.engine_name!r} (id {holder.engine}, pid {holder.pid}) reads now"
        )  # fmt: skip
        raise ReaderFencedError(
            f"topic {self._name!r}: this reader of group {self.group!r} was fenced by a later "
            f"one{by}. Close it and open a new one"
        )

    def cursor(self) -> int | None:
        """Where the group goes on; None before its first commit."""
        with self._engine.ledger.read() as tables:
            return tables.cursor(self._topic, self.group)

    def commit(self, offset: int) -> None:
        """Let the group go on at this offset: checked and written in one transaction."""
        with self._engine.ledger.write_beside() as tables:
            self.write(tables, offset)

    def write(self, tables: Tables, offset: int) -> None:
        """The same, as a part of a transaction."""
        self._check_in(tables)
        _check_exists(tables, self._topic, self._name)
        tables.put_cursor(self._topic, self.group, offset)

    def end(self) -> None:
        """Leave the group to others."""
        if not self._ended:
            self._claims.release(self._claimant)
            self._ended = True


def _check_exists(tables: Tables, topic: int, name: str) -> None:
    if tables.topic(topic).flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {name!r} was deleted")


def join(
    engine: Engine, claims: Claims, slot: int, group: str, topic: int, name: str
) -> Membership:
    """Become the reader of the topic in its group; the one before is fenced."""
    check_group(group)
    claimant = claims.take(
        engine.info, slot, group, {name: None},
        # A claim is on the name: of another topic by now, perhaps, whose reader it would fence.
        check=lambda tables: _check_exists(tables, topic, name),
    )  # fmt: skip
    engine.ledger.lockfile.announce(topic)  # one that waits for messages must learn of it
    return Membership(engine, claims, claimant, topic, name)
