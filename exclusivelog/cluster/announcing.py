"""Announcing on a cluster: by a record that counts only while its session owns the topic, or by a
mark at a message. The state of the rule has the last announcement that counts."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from exclusivelog import _core
from exclusivelog.backend import TransactionParts, Who
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
        self.tried = False  # may it be in the log?
        self.ticket: Ticket | None = None  # of an announcement without a message
        self.receipt: _core.Receipt | None = None  # of one with a message

    @property
    def committed(self) -> bool:
        """Does it count?"""
        if self.ticket is not None:
            return self.ticket.done and self.ticket.error is None
        receipt = self.receipt
        return receipt is not None and receipt.done() and receipt.exception(0) is None

    @property
    def offsets(self) -> dict[Any, range]:
        """The offset of its message, once that counts."""
        if self.receipt is None or not self.committed:
            return {}
        offset = self.receipt.result(0)
        return {self._sender: range(offset, offset + 1)}


def announce(parts: TransactionParts[Who]) -> None:
    """Announce, with a message if there is one; returns once that counts."""
    [(sender, info)] = parts.announced.items()
    [puts] = parts.puts.values()
    parts.attempt = attempt = Attempt(sender)
    message = cast("Encoded | None", puts[0] if puts else None)
    producer: Any = sender  # which follows its topic, and waits while that is handed over
    producer.call(partial(_announce_by, attempt, info, message), None)


def _announce_by(
    attempt: Attempt,
    info: dict[str, str],
    message: Encoded | None,
    session: ClusterSession,
    timeout: float | None,
) -> None:
    session.sending.await_announced()
    attempt.tried = True
    if message is None:
        attempt.ticket = ticket = session.owning.announce(info)
        _await(session, ticket)
    else:
        attempt.receipt = session.sending.announce(message)
        session.sending.outcome(attempt.receipt, timeout)


def _await(session: ClusterSession, ticket: Ticket) -> None:
    topic = session.owning.topic
    try:
        topic.await_change(lambda: ticket.done, ANSWER_SECONDS, "")
    except WaitTimeoutError:
        raise without_outcome(topic.name, ANSWER_SECONDS) from None
    if ticket.error is not None:
        raise ticket.error
