"""Reader groups: one reader at a time, and where the next one goes on (rule F6).

A reader with `group=` claims (group, topic) as `engine.own` does, and so severs the reader
that had it; a `GroupReader` claims several topics at once. The cursors are rows of the ledger,
written in a transaction that checks the claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.claims import Claims, check_generation, check_group
from exclusivelog.errors import (
    OwnershipLostError,
    ReaderFencedError,
    TopicNotFoundError,
    describe_engine,
)
from exclusivelog.runtime import Runtime
from exclusivelog.tables import Claimant, Tables

if TYPE_CHECKING:
    from exclusivelog.ledger import Ledger

Positions = Mapping[int, int]  # topic id: offset


class Membership:
    """One reader's place in its group, on all of its topics: {name: id}. One that is `bound` is a
    role's, and does not end with the reader."""

    def __init__(
        self, engine: Runtime, claims: Claims, claimant: Claimant, topics: Mapping[str, int],
        bound: bool = False,
    ) -> None:  # fmt: skip
        self.group = claimant.group
        self.generations = dict(claimant.generations)
        self._engine = engine
        self._claims = claims
        self._claimant = claimant
        self._topics = dict(topics)
        self._version = -1  # of the journal when the claim was last looked up
        self._ended = False
        self._bound = bound

    @property
    def ledger(self) -> Ledger:
        """Where the cursors are kept."""
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
        names = ", ".join(repr(name) for name in self._topics)
        moved = self._engine.mailbox.successors.of(tables, self._claimant)
        if moved is not None:
            raise ReaderFencedError(
                f"topic {names}: group {self.group!r} was handed over with its topic to "
                f"{describe_engine(moved)}; read there",
                successor=moved,
            )
        holder = self._successor(tables)
        by = "" if holder is None else (
            f": engine {holder.engine_name!r} (id {holder.engine}, pid {holder.pid}) reads now"
        )  # fmt: skip
        raise ReaderFencedError(
            f"topic {names}: this reader of group {self.group!r} was fenced by a later "
            f"one{by}. Close it and open a new one"
        )

    def _successor(self, tables: Tables) -> Claimant | None:
        for name in self._topics:
            _, later = tables.claim(self.group, name)
            holder = tables.claimant(later) if later else None
            if holder is not None:
                return holder
        return None

    def cursor(self, topic: int) -> int | None:
        """Where the group goes on; None before its first commit."""
        with self._engine.ledger.read() as tables:
            return tables.cursor(topic, self.group)

    def commit(self, positions: Positions) -> None:
        """Let the group go on at these offsets: checked and written in one transaction."""
        with self._engine.ledger.write_beside() as tables:
            self.write(tables, positions)

    def write(self, tables: Tables, positions: Positions) -> None:
        """The same, as a part of a transaction."""
        self._check_in(tables)
        for name, topic in self._topics.items():
            if topic in positions:
                _check_exists(tables, topic, name)
                tables.put_cursor(topic, self.group, positions[topic])

    def lose(self, error: OwnershipLostError) -> None:
        """A later reader has come: wake a thread that waits for messages."""
        for topic in self._topics.values():
            self._engine.ledger.lockfile.announce(topic)

    def end(self) -> None:
        """Leave the group to others."""
        if not self._ended and not self._bound:
            self._claims.release(self._claimant)
            self._ended = True
            self._engine.forget_claim(self._claimant.id)


def _check_exists(tables: Tables, topic: int, name: str) -> None:
    if tables.topic(topic).flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {name!r} was deleted")


def join(
    engine: Runtime, group: str, topics: Mapping[str, int], generation: int | None
) -> Membership:
    """Become the reader of these topics, {name: id}, in the group; the one before is fenced."""
    claims, slot = Claims(engine.ledger, engine.sessions), engine.slot
    check_group(group)
    for name in topics:
        check_generation(name, generation)

    def check(tables: Tables) -> None:
        # A claim is on the name: of another topic by now, perhaps, whose reader it would fence.
        for name, topic in topics.items():
            _check_exists(tables, topic, name)

    made: list[Claimant] = []
    try:
        # Its loss must not be told before the engine knows it.
        with _core.Holding(engine.mailbox.lock):
            engine.check_open()  # closing it releases what is registered by then
            claimant = claims.take(
                engine.info, slot, group, dict.fromkeys(topics, generation), check, made, reads=True
            )
            membership = Membership(engine, claims, claimant, topics)
            engine.keep_claim(claimant.id, membership)
        for topic in topics.values():  # one that waits for messages must learn of it
            engine.ledger.lockfile.announce(topic)
        return membership
    except BaseException:  # Ctrl-C behind the commit: nobody has this membership
        engine.give_up_claims(made, claims.release)
        raise
