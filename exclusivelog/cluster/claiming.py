"""`GroupLog`: the log of a group's claims, which an engine follows and its claims write to.

`exclusivelog.cluster.claimed` says which records count. A record that is not read back is appended
again. A take that comes late, after its caller has given up, is released when it is read.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from exclusivelog import logs
from exclusivelog.cluster import claimed
from exclusivelog.cluster.changes import claims_changed
from exclusivelog.cluster.checkpoints import Checkpoint
from exclusivelog.cluster.claimed import Clearing, Commit, Drop, Holdings, Noting, Ruling, Take
from exclusivelog.cluster.following import ANSWER_SECONDS, TopicLog, now_ms
from exclusivelog.cluster.frames import MAX_BYTES
from exclusivelog.cluster.ordered import Record
from exclusivelog.errors import UnsupportedError
from exclusivelog.events import Event, log_event

__all__ = ["PREFIX", "GroupLog", "Taking", "draw_session", "group_of", "log_name"]

PREFIX = "__claims__/"


def log_name(group: str) -> str:
    """The name of a group's log.

    >>> log_name("a/b"), group_of(log_name("a/b"))
    ('__claims__/a/b', 'a/b')
    """
    return PREFIX + group


def group_of(name: str) -> str:
    """The group whose log has this name."""
    return name.removeprefix(PREFIX)


def draw_session() -> int:
    """A number of a session that no other one has."""
    return 1 + secrets.randbelow(2**62)


class Taking(Protocol):
    """A claim of this engine. The log sets all fields but `take`, with its lock.

    - `ruling`: on its take; None: it was not read back.
    - `rival`: the record that has ended it.
    - `committed`: the number of its last commit that has counted."""

    take: Take
    ruling: Ruling | None
    rival: Noting | None
    committed: int

    def lose(self) -> None:
        """It has ended by its rival."""


Key = tuple[str, int, int]  # kind, session, number: of a record that was not read back


class GroupLog(TopicLog):
    """The log of one group's claims. `holdings`: who holds what, as far as it was read."""

    holdings: Holdings

    def _continue_from(self, start: Checkpoint) -> None:
        super()._continue_from(start)
        self.holdings = start.claims
        self._mine: dict[int, Taking] = {}  # the claims of this engine, by session
        self._leaving: set[int] = set()  # released, or given up, and not known to have ended
        self._unread: dict[Key, bytes] = {}  # in the order of their first appends
        self._lost: list[Taking] = []  # not told yet
        self._made: list[Event] = []  # by this engine, and not logged yet
        self._cleared: dict[int, Ruling] = {}

    def _checkpoint(self) -> Checkpoint:
        made = super()._checkpoint()
        made.claims = self.holdings
        return made

    # ---- calls ---------------------------------------------------------------------------

    def request(self, claim: Taking) -> Ruling:
        """Append its take, and wait until it is read back."""
        data, session = claimed.write(claim.take), claim.take.session
        if len(data) > MAX_BYTES:
            raise UnsupportedError(
                f"a claim of {len(claim.take.generations)} resources does not fit into a record of "
                f"{MAX_BYTES} bytes; claim them in several calls"
            )
        self.begin()
        try:
            with self.changed:
                self.check()
                self._mine[session] = claim
                self._append(("take", session, 0), data)
            self.await_change(
                lambda: claim.ruling is not None, ANSWER_SECONDS, "the claim was not read back"
            )
        except BaseException:
            self.leave([session])
            raise
        ruling = claim.ruling
        assert ruling is not None
        return ruling

    def leave(self, sessions: Iterable[int]) -> None:
        """Release these sessions of this engine: at once, or when their takes come late."""
        with self.changed:
            for session in sessions:
                self._forget(session)
                self._leaving.add(session)
                if not self._ended:
                    self._drop(session)

    def await_end(self, sessions: Collection[int], seconds: float) -> None:
        """Wait until these sessions have nothing."""
        self.await_change(
            lambda: self.holdings.sessions.keys().isdisjoint(sessions),
            seconds,
            "the release of a claim was not read back",
        )

    def commit(self, claim: Taking, positions: Mapping[str, int]) -> bool:
        """Append positions, and wait until they count; False if the claim has ended."""
        session = claim.take.session
        with self.changed:
            self.check()
            if session not in self._mine:
                return False
            # No counter of its own, which an interrupt could leave different from what was sent.
            number = 1 + max([claim.committed, *self._unread_commits(session)])
            data = claimed.write(Commit(session, number, dict(positions)))
            self._append(("commit", session, number), data)
        self.await_change(
            lambda: claim.committed >= number or session not in self._mine,
            ANSWER_SECONDS,
            "the commit was not read back",
        )
        return claim.committed >= number

    def _unread_commits(self, session: int) -> list[int]:
        return [key[2] for key in self._unread if key[:2] == ("commit", session)]

    def settle(self, claim: Taking) -> None:
        """Wait until the outcome of each of its commits is known: one may have been interrupted."""
        session = claim.take.session
        self.await_change(
            lambda: not self._unread_commits(session),
            ANSWER_SECONDS,
            "a commit was not read back",
        )

    def clear(self, takes: int) -> bool:
        """Remove the group's positions; False if more takes than so many have counted by then."""
        self.begin()
        key = "clear", 0, takes
        with self.changed:
            self.check()
            self._cleared.pop(takes, None)
            self._append(key, claimed.write(Clearing(takes)))
        self.await_change(
            lambda: takes in self._cleared, ANSWER_SECONDS, "the deletion was not read back"
        )
        return self._cleared[takes] is Ruling.COUNTS

    def sessions_here(self) -> list[int]:
        """The sessions of this engine's claims."""
        with self.changed:
            return list(self._mine)

    # ---- appending -----------------------------------------------------------------------

    def _append(self, key: Key, data: bytes) -> None:
        self._unread[key] = data
        self._appending.append(data)

    def _drop(self, session: int) -> None:
        self._appending.append(claimed.write(Drop(session, now_ms())))

    def _forget(self, session: int) -> Taking | None:
        """Append no record of this session again."""
        for key in [key for key in self._unread if key[1] == session]:
            del self._unread[key]
        self.changed.notify_all()
        return self._mine.pop(session, None)

    @property
    def _unsettled(self) -> bool:
        return bool(self._unread or self._stale) or super()._unsettled

    @property
    def _stale(self) -> list[int]:
        """The sessions that are to be released, and have something."""
        return [session for session in self._leaving if session in self.holdings.sessions]

    def _append_again(self) -> None:
        super()._append_again()
        for data in list(self._unread.values()):
            self._appending.append(data)
        for session in self._stale:
            self._drop(session)

    # ---- reading -------------------------------------------------------------------------

    def _take_foreign(self, data: bytes) -> bool:
        record = claimed.read(data)
        if record is None:
            return False
        ruling, gone = self.holdings.fold(record)
        if ruling is Ruling.COUNTS and self._is_mine(record, gone):
            self._made += claims_changed(group_of(self.name), record, gone, now_ms())
        self._note(record, ruling)
        for take in gone:
            self._leaving.discard(take.session)
            claim = self._forget(take.session)
            if claim is not None:
                claim.rival = record
                self._lost.append(claim)
        if ruling is Ruling.COUNTS:
            self._appending.progress(self._unsettled)
            if not isinstance(record, Commit):
                self.host.ownership_changed()
        elif ruling is Ruling.AHEAD and self._unsettled:  # an earlier one was lost
            self._appending.resend_soon()
        return False

    def _is_mine(self, record: Noting, gone: Sequence[Take]) -> bool:
        """Has this engine appended this record?"""
        if isinstance(record, Clearing):
            return ("clear", 0, record.takes) in self._unread
        by = record if isinstance(record, Take) else next(iter(gone), None)
        return by is not None and by.engine_id == self.host.id

    def _note(self, record: Noting, ruling: Ruling) -> None:
        """Note the outcome of a record that may be one of this engine."""
        if isinstance(record, Clearing):
            if self._unread.pop(("clear", 0, record.takes), None) is not None:
                self._cleared[record.takes] = ruling
        elif isinstance(record, Take):
            self._note_take(record, ruling)
        elif isinstance(record, Commit) and ruling is not Ruling.AHEAD:
            self._unread.pop(("commit", record.session, record.number), None)
            claim = self._mine.get(record.session)
            if claim is not None and ruling is Ruling.COUNTS:
                claim.committed = record.number

    def _note_take(self, take: Take, ruling: Ruling) -> None:
        claim = self._mine.get(take.session)
        if claim is not None and claim.ruling is None:
            claim.ruling = ruling
            del self._unread["take", take.session, 0]
            if ruling is not Ruling.COUNTS:
                self._forget(take.session)
        elif claim is None and ruling is Ruling.COUNTS and take.engine_id == self.host.id:
            self._leaving.add(take.session)  # its caller has given up
            self._drop(take.session)

    def _advance(self, record: Record | None) -> None:
        super()._advance(record)
        with self.changed:
            lost, self._lost = self._lost, []
            made, self._made = self._made, []
        for claim in lost:
            claim.lose()
        with logs.emitting_later():  # in the thread that reads the log
            for event in made:
                log_event(self.host.path, event)
