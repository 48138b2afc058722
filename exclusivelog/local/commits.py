"""The commit of a transaction: messages, reader cursors and announcements, together or not at all.

Most transactions become one run of frames in the journal, which is checked, written and
acknowledged as a send is (rule K2): `FramedAttempt`. The others, because they are larger than a run
may be, or write rows, are transactions of the tables: `TableAttempt`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

from exclusivelog import _core
from exclusivelog._core import Outcome
from exclusivelog.backend import SessionPaused, TransactionParts, Who
from exclusivelog.errors import DuplicateSequenceError, ExclusiveLogError, ProducerFencedError
from exclusivelog.local.log.appending import (
    REPAIRABLE,
    Placed,
    Work,
    append_one,
    failure,
    refusal,
    repair,
    versions_of,
)
from exclusivelog.local.storage.ledger import Ledger, Transaction
from exclusivelog.local.storage.tables import announcement_row

if TYPE_CHECKING:
    from exclusivelog.local.ownership.claims import LocalGroupCursor, Positions
    from exclusivelog.local.session import LocalSession
    from exclusivelog.local.storage.tables import Tables

# Then the producers are paused, so that their other messages do not come before for ever.
UNPAUSED_ATTEMPTS = 3


def commit_at_once(ledger: Ledger, parts: TransactionParts[Who], durable: bool) -> bool:
    """Commit all parts, or none, without pausing a producer or changing the tables: an exception
    that is raised in this thread meanwhile leaves nothing behind. False if it cannot be done so.
    `durable`: return once it survives a power loss (rule H1)."""
    try:
        for _ in range(UNPAUSED_ATTEMPTS):
            if _succeeds(FramedAttempt(ledger, parts, durable)):
                return True
    except _TooLarge:
        pass
    return False


def commit(ledger: Ledger, parts: TransactionParts[Who], durable: bool) -> None:
    """Commit all parts, or none, although producers must be paused or tables changed for it."""
    framed = True
    while True:
        attempt: Attempt[Who] = (
            FramedAttempt(ledger, parts, durable, paused=True)
            if framed
            else TableAttempt(ledger, parts)
        )
        try:
            if _succeeds(attempt):
                return
        except _TooLarge:
            framed = False


def _succeeds(attempt: Attempt[Who]) -> bool:
    """Make this attempt; False if nothing was written, and another one may succeed."""
    try:
        return attempt.commit()
    except _Refused as refused:
        # Raised after the resume: while it was paused, its topic seemed to be handed over.
        error = refused.session.refused(refused.error)
        if not isinstance(error, SessionPaused) and error is not refused.session.moved:
            raise error from None
    except DuplicateSequenceError as error:
        if not attempt.learn(error):
            raise
    return False


class _Refused(Exception):
    """A session that was fenced, and its error."""

    def __init__(self, session: LocalSession, error: ProducerFencedError) -> None:
        super().__init__(str(error))
        self.session, self.error = session, error


class _TooLarge(Exception):
    """The transaction does not go into the journal."""


class Attempt(Generic[Who]):
    """One attempt to commit. Follows topics that were handed over within this process."""

    def __init__(self, ledger: Ledger, parts: TransactionParts[Who]) -> None:
        self._ledger, self._parts = ledger, parts
        # The session of each producer with messages or a requirement. A transaction takes producers
        # and readers of its own ledger only: their sessions and cursors are of this package.
        here: dict[Who, Any] = {
            producer: producer.here(producer in parts.numbered) for producer in parts.puts
        }
        cursors: list[Any] = [*parts.cursors.values()]
        self._here: dict[Who, LocalSession] = here
        self._cursors: list[tuple[LocalGroupCursor, Positions]] = cursors
        self._sessions: list[LocalSession] = [*dict.fromkeys(here.values())]
        self._counts: dict[Who, int] = {}
        # Their appenders have used sequence ids whose messages may fail yet.
        self._undecided: list[LocalSession] = []
        self._writing: _core.Joint | Transaction | None = None  # that puts all of it into the log

    def _check_claims(self, tables: Tables) -> None:
        """OwnershipLostError unless the claims that the transaction requires are held."""
        for claim in self._parts.claims:
            if not claim.session.is_held_in(tables):
                raise claim.lost()

    @property
    def tried(self) -> bool:
        """Was the commit begun? Before that, nothing can be in the log."""
        return self._writing is not None and self._writing.tried

    @property
    def committed(self) -> bool:
        """Is it known to be in the log, whatever was raised afterwards?"""
        return self._writing is not None and self._writing.committed

    @property
    def offsets(self) -> dict[Who, range]:
        """The offsets of each producer's messages, once it is committed."""
        ends = self._firsts()
        offsets = {}
        for producer, session in self._here.items():
            if session not in ends or not self._counts[producer]:
                continue
            first, ends[session] = ends[session], ends[session] + self._counts[producer]
            offsets[producer] = range(first, ends[session])
        return offsets

    def _firsts(self) -> dict[LocalSession, int]:
        """The first offset of each session that has messages."""
        raise NotImplementedError

    def commit(self) -> bool:
        """False if a session is paused, or messages come in between, and nothing was written."""
        raise NotImplementedError

    def learn(self, error: DuplicateSequenceError) -> bool:
        """Whether the next attempt is to have other sequence ids."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _senders_paused(self) -> Iterator[bool]:
        """Pause all sessions, and commit what they have accepted. False if one is paused, or moved,
        already."""
        paused: list[LocalSession] = []
        for session in self._sessions:
            session.sending.await_turns()
        with self._ledger.pause_lock:
            try:
                for session in self._sessions:
                    if not session.pause_for_transaction():
                        yield False
                        return
                    paused.append(session)
                    session.sending.drain()
                yield True
            finally:
                while paused:
                    paused.pop().resume()

    def _put(self) -> dict[LocalSession, _core.Appender]:
        """Each session's messages, in an appender that continues its sequence ids."""
        appenders = {session: session.sending.private_appender() for session in self._sessions}
        self._undecided = [
            session
            for session, appender in appenders.items()
            if appender.last_sequence > session.sending.appender.durable_sequence
        ]
        for producer, session in self._here.items():
            appender = appenders[session]
            before = appender.pending_messages
            for put in self._parts.puts[producer]:
                if not isinstance(put, tuple):
                    put(appender)
                elif appender.add(*put) is None:
                    raise session.sending.duplicate(appender, put[4])
            self._counts[producer] = appender.pending_messages - before
        return appenders


# ---- in the journal ----------------------------------------------------------------------


class FramedAttempt(Attempt[Who]):
    """Appends all of it to the journal by one call of the compiled core, as sends of the producers.

    Their other messages may come before and behind it. So the producers need not be paused, unless
    so many messages wait again and again that it never gets its turn (`paused`; rule K4)."""

    def __init__(
        self, ledger: Ledger, parts: TransactionParts[Who], durable: bool, paused: bool = False
    ) -> None:
        super().__init__(ledger, parts)
        self._durable, self._paused = durable, paused
        # Of each session; empty if each has one message at most, which is encoded alone.
        self._batches: list[Sequence[_core.Batch]] = []

    def _firsts(self) -> dict[LocalSession, int]:
        assert isinstance(self._writing, _core.Joint)
        firsts = zip(self._sessions, self._writing.offsets(), strict=True)
        return {session: first for session, first in firsts if first is not None}

    def commit(self) -> bool:
        """False if a session is paused, or messages come in between, and nothing was written."""
        if self._paused:
            with self._senders_paused() as ready:
                return ready and self._append()
        for session in self._sessions:
            if session.appender.error is not None and not session.ready_for_transaction():
                return False
            if session.appender.waits:
                session.commit_queued()
        try:
            return self._append()
        except SessionPaused:
            return False  # also if the pause is over by now
        except DuplicateSequenceError:
            for session in self._undecided:
                session.sending.await_earlier()
            if self._undecided:
                return False
            raise
        except ExclusiveLogError:
            if self.tried:
                raise  # it may be in the log: no second attempt
            # A hand-over that has begun meanwhile refuses it, as it refuses a send.
            if all(session.ready_for_transaction() for session in self._sessions):
                raise
            return False

    def learn(self, error: DuplicateSequenceError) -> bool:
        """False: what it has learned is in the appenders, and `commit` has returned False."""
        return False

    def _append(self) -> bool:
        before = [session.appender.last_sequence for session in self._sessions]
        self._writing = joint = self._join()
        self._parts.attempt = self
        outcome = self.place(joint)
        if outcome == Outcome.PLACED:
            return True
        if outcome == Outcome.QUEUED:
            return False
        if outcome != Outcome.DUPLICATE:
            raise failure(self._ledger, outcome, joint.tried)
        appender = self._sessions[joint.refused].sending.appender
        if appender.last_sequence > before[joint.refused]:
            return False  # others have sent meanwhile, or an interrupted call had
        if not self._batches:
            raise refusal(self._ledger, appender, outcome, before[joint.refused] + 1)
        first = self._batches[joint.refused][0]
        raise refusal(self._ledger, appender, outcome, first.base_sequence, first.count)

    def _join(self) -> _core.Joint:
        """Encode all of it."""
        assert self._ledger.journal is not None
        joint = _core.Joint(self._ledger.journal, self._durable)
        if not self._add_alone(joint):
            joint = _core.Joint(self._ledger.journal, self._durable)
            self._add_batches(joint)
        for cursor, positions in self._cursors:
            cursor.note(joint, positions)
        for producer, info in self._parts.announced.items():
            joint.note(b"meta", *announcement_row(self._here[producer].session, info))
        if not joint.fits:
            raise _TooLarge
        return joint

    def _add_alone(self, joint: _core.Joint) -> bool:
        """Encode the messages if each session has one at most, as a send does. False if they must
        be encoded as batches; the joint is of no use then."""
        if len(self._sessions) < len(self._here) or self._parts.numbered:
            return False
        for producer, session in self._here.items():
            puts = self._parts.puts[producer]
            message = puts[0] if puts else None
            if len(puts) > 1 or callable(message) or not joint.send(session.appender, message):
                return False
            self._counts[producer] = len(puts)
        return True

    def _add_batches(self, joint: _core.Joint) -> None:
        appenders = self._put()
        if (
            sum(appender.pending_bytes for appender in appenders.values())
            > _core.LARGEST_TRANSACTION
        ):
            raise _TooLarge
        for session, appender in appenders.items():
            numbered = any(
                self._here[producer] is session
                for producer in self._parts.numbered & self._here.keys()
            )
            batches = appender.take()
            self._batches.append(batches)
            joint.add(session.sending.appender, batches, numbered)

    def place(self, joint: _core.Joint) -> int:
        """Check all that it requires, and append it; the outcome."""
        self._require(joint)
        outcome = joint.place(self._paused)
        while outcome in REPAIRABLE:
            self._repair(joint, outcome)
            outcome = joint.place(self._paused)
        return outcome

    def _repair(self, joint: _core.Joint, outcome: int) -> None:
        if outcome == Outcome.STALE and joint.refused < 0:
            for cursor, _ in self._cursors:
                cursor.forget_checks()
            self._require(joint)
        elif outcome == Outcome.STALE:
            session = self._sessions[joint.refused]
            try:
                repair(self._ledger, session.sending.appender, outcome)
            except ProducerFencedError as error:
                raise _Refused(session, error) from error
        else:
            self._ledger.checkpoint()

    def _require(self, joint: _core.Joint) -> None:
        """Check claims and cursors in the tables; the append is refused if they change
        afterwards."""
        joint.forget_requirements()
        if self._parts.claims:
            self._require_claims(joint)
        for cursor, positions in self._cursors:
            cursor.require(joint, positions)

    def _require_claims(self, joint: _core.Joint) -> None:
        claims = list(self._parts.claims)
        versions = versions_of(self._ledger, [claim.session.id for claim in claims], ())
        with self._ledger.read() as tables:
            self._check_claims(tables)
        for claim, version in zip(claims, versions, strict=True):
            joint.require_claim(claim.session.id, version)


# ---- in the tables -----------------------------------------------------------------------


class TableAttempt(Attempt[Who]):
    """Commits all of it in one transaction of the tables, while its producers are paused."""

    def __init__(self, ledger: Ledger, parts: TransactionParts[Who]) -> None:
        super().__init__(ledger, parts)
        self._works: dict[LocalSession, Work] = {}
        self._placed: dict[LocalSession, Placed] = {}
        self._refused: LocalSession | None = None  # whose sequence id is in the log already

    def _firsts(self) -> dict[LocalSession, int]:
        return {session: places[0][1] for session, places in self._placed.items() if places}

    def commit(self) -> bool:
        """False if a session is paused, and nothing was written."""
        with self._senders_paused() as ready:
            if not ready:
                return False
            # The next sequence ids are known.
            self._works = {
                session: Work(appender, appender.take())
                for session, appender in self._put().items()
            }
            try:
                self.write()
            finally:
                if self.committed:
                    self._acknowledge()  # also if an exception came after the commit
        return True

    def write(self) -> None:
        """Check and write all of it in one transaction of the tables."""
        parts = self._parts
        self._writing = section = self._ledger.write_checkpointed()
        parts.attempt = self
        with section as tables:
            self._check_claims(tables)
            for session, work in self._works.items():
                self._refused = session
                try:
                    self._placed[session] = append_one(tables, work)
                except ProducerFencedError as error:
                    raise _Refused(session, error) from error
            self._refused = None
            for cursor, positions in self._cursors:
                cursor.write(tables, positions)
            for producer, info in parts.announced.items():
                tables.announcements.put(self._here[producer].session, info)
            tables.check_reserve()

    def learn(self, error: DuplicateSequenceError) -> bool:
        """Whether the log has a later sequence id than the session knew of, as it has after an
        interrupt behind a commit; the next attempt then continues after that one (rule G11)."""
        session = self._refused
        if session is None or error.last_sequence_id <= session.sending.appender.last_sequence:
            return False
        session.sending.appender.advance(error.last_sequence_id)
        return True

    def _acknowledge(self) -> None:
        """Advance each session's sequence ids."""
        for session, places in self._placed.items():
            if places:  # else it is only required, or only announces
                session.sending.appender.advance(places[-1][0].last_sequence)
