"""Committing messages to several topics, reader cursors and announcements in one transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Generic

from exclusivelog.backend import ProducerSession, SessionPaused, TransactionParts, Who
from exclusivelog.errors import ProducerFencedError
from exclusivelog.local.log.entries import Placed, Work, append_one
from exclusivelog.local.ownership.announcements import put_announcement
from exclusivelog.local.storage.ledger import Ledger


def commit(ledger: Ledger, parts: TransactionParts[Who]) -> dict[Who, range]:
    """Commit all parts, or none; {producer: offsets}. A topic that was handed over within this
    process is followed."""
    while True:
        here = {producer: producer.here(producer in parts.numbered) for producer in parts.puts}
        attempt = Attempt(ledger, parts, here)
        try:
            offsets = attempt.commit()
        except _Refused as refused:
            # Only now: while it was paused, its topic seemed to be handed over.
            error = refused.session.refused(refused.error)
            if not isinstance(error, SessionPaused):
                raise error from None
        else:
            if offsets is not None:
                return offsets


class _Refused(Exception):
    """A session that was fenced, and the error that says so."""

    def __init__(self, session: ProducerSession, error: ProducerFencedError) -> None:
        super().__init__(str(error))
        self.session, self.error = session, error


class Attempt(Generic[Who]):
    """One attempt to commit. `here`: the session that appends for each of the producers that
    messages were given to, or that are required."""

    def __init__(
        self, ledger: Ledger, parts: TransactionParts[Who], here: Mapping[Who, ProducerSession]
    ) -> None:
        self._ledger, self._parts, self._here = ledger, parts, here
        self._sessions = list(dict.fromkeys(here.values()))
        self._works: dict[ProducerSession, Work] = {}
        self._placed: dict[ProducerSession, Placed] = {}
        self._counts: dict[Who, int] = {}

    def commit(self) -> dict[Who, range] | None:
        """{producer: offsets}; None, and nothing is written, where a session is paused."""
        with self._ledger.pause_lock, contextlib.ExitStack() as paused:
            for session in self._sessions:
                if not session.pause_for_transaction():
                    return None
                paused.callback(session.resume)
                session.sending.drain()
            self._encode()
            self.write()
            for producer, info in self._parts.announced.items():
                self._here[producer].has_announced(info)
            return self._acknowledge()

    def _encode(self) -> None:
        """The sessions are paused: now it is known which sequence ids are next."""
        appenders = {session: session.sending.private_appender() for session in self._sessions}
        for producer, session in self._here.items():
            appender = appenders[session]
            before = appender.pending_messages
            for put in self._parts.puts[producer]:
                put(appender)
            self._counts[producer] = appender.pending_messages - before
        self._works = {
            session: Work(appender, appender.take()) for session, appender in appenders.items()
        }

    def write(self) -> None:
        """Check and write all of it in one transaction of the tables."""
        parts = self._parts
        with self._ledger.write_checkpointed() as tables:
            for claim in parts.claims:
                claim.check_in(tables)
            for session, work in self._works.items():
                try:
                    self._placed[session] = append_one(tables, work)
                except ProducerFencedError as error:
                    raise _Refused(session, error) from error
            for cursor, positions in parts.cursors.values():
                cursor.write(tables, positions)
            for producer, info in parts.announced.items():
                put_announcement(tables, self._here[producer].session, info)
            parts.written = True

    def _acknowledge(self) -> dict[Who, range]:
        """It is committed: each session continues behind it."""
        ends = {}
        for session, places in self._placed.items():
            if not places:
                continue  # it is only required, or only announces
            session.sending.appender.advance(places[-1][0].last_sequence)
            ends[session] = places[0][1]
        offsets = {}
        for producer, session in self._here.items():
            if session not in ends or not self._counts[producer]:
                continue
            first, ends[session] = ends[session], ends[session] + self._counts[producer]
            offsets[producer] = range(first, ends[session])
        return offsets
