"""Announcing on a cluster: by a record that counts only while its session owns the topic, or by a
mark at a message. The state of the rule has the last announcement that counts."""

from __future__ import annotations

import contextlib
from typing import Any, cast

from exclusivelog.backend import SessionPaused, TransactionParts, Who
from exclusivelog.cluster.following import ANSWER_SECONDS
from exclusivelog.cluster.log import Ticket
from exclusivelog.cluster.sessions import ClusterSession
from exclusivelog.errors import WaitTimeoutError
from exclusivelog.messages import Encoded
from exclusivelog.refusals import without_outcome

__all__ = ["announce"]


class Attempt:
    """The attempt to announce; see `exclusivelog.backend.CommitAttempt`."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self.ticket: Ticket | None = None

    @property
    def tried(self) -> bool:
        """Was it passed on? Before that, nothing can be in the log."""
        return self.ticket is not None

    @property
    def committed(self) -> bool:
        """Does it count?"""
        return self.ticket is not None and self.ticket.done and self.ticket.error is None

    @property
    def offsets(self) -> dict[Any, range]:
        """The offset of its message, once that counts."""
        ticket = self.ticket
        if ticket is None or not self.committed or not ticket.count:
            return {}
        assert ticket.offset is not None
        return {self._sender: range(ticket.offset, ticket.offset + 1)}


def announce(parts: TransactionParts[Who]) -> None:
    """Announce, with a message if there is one; returns once that counts."""
    [(sender, info)] = parts.announced.items()
    [puts] = parts.puts.values()
    message = cast("Encoded | None", puts[0] if puts else None)
    parts.attempt = attempt = Attempt(sender)
    while (ticket := attempt.ticket) is None:
        session = cast("ClusterSession", sender.here(False))  # of a producer of this engine
        with contextlib.suppress(SessionPaused):  # it is handed over, and goes on or ends
            attempt.ticket = session.announce(info, message)
    _await(session, ticket)


def _await(session: ClusterSession, ticket: Ticket) -> None:
    topic = session.owning.topic
    try:
        topic.await_change(lambda: ticket.done, ANSWER_SECONDS, "")
    except WaitTimeoutError:
        raise without_outcome(topic.name, ANSWER_SECONDS) from None
    if ticket.error is not None:
        raise session.reason_of(ticket.error)
