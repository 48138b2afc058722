"""The sessions, claims and readers of one open engine, to be notified of what happens to them."""

from __future__ import annotations

import weakref
from typing import Protocol

from exclusivelog import _core
from exclusivelog.backend import Owned, Sending
from exclusivelog.errors import EngineClosedError, ExclusiveLogError, OwnershipLostError
from exclusivelog.local.records import Session, Transfer, is_role


class Pausing(Protocol):
    """Pauses the appends of one session."""

    def begin(self) -> None:
        """Pause appends until `end` has been called as often as this."""

    def end(self) -> None:
        """Resume appends, if this ends the last pause."""


class Listener(Protocol):
    """A session of this engine, which receives the notifications about it."""

    session: Session
    topic: str

    @property
    def sending(self) -> Sending:
        """The object that appends for it."""

    @property
    def pauses(self) -> Pausing:
        """The object that pauses its appends."""

    def end_unless_within_reach(self) -> None:
        """End it if its topic was handed over and its producers cannot follow any more."""

    def begin_to_follow(self) -> None:
        """Let its producers follow its topic soon, although they do not send."""

    def follows_in(self) -> float:
        """The seconds until that is due; negative if it is overdue."""

    def lose(self, error: ExclusiveLogError) -> None:
        """End the session for good, with this error."""

    def notify_wanted(self) -> None:
        """Another producer waits for the topic."""

    def hand_off(self, to: Transfer) -> None:
        """The topic was handed over."""

    def end(self, error: EngineClosedError) -> None:
        """The engine is closing: accept nothing more."""


class Follower(Protocol):
    """A reader of a topic, which may wait for messages."""

    @property
    def topic_id(self) -> int:
        """Its topic."""


class Registry:
    """The sessions, readers and claims that one engine has open. It refers to sessions and readers
    weakly; claims stay until they are released or revoked."""

    def __init__(self) -> None:
        self.lock = _core.Lock()  # of all sessions: held briefly, by each change of one
        self._sessions = weakref.WeakValueDictionary[int, Listener]()
        self._handed_over: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._readers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._claims: dict[int, Owned] = {}

    # ---- sessions --------------------------------------------------------------------------

    def register(self, session: Listener) -> None:
        """Deliver notifications about this session to it."""
        self._sessions[session.session.id] = session

    def unregister(self, session: Listener) -> None:
        """Remove a session that is closed."""
        self._sessions.pop(session.session.id, None)
        with self.lock:
            self._handed_over.discard(session)

    def note_hand_over(self, session: Listener) -> None:
        """Record that this session's topic was handed over to another engine of this process."""
        with self.lock:
            self._handed_over.add(session)

    def handed_over(self) -> list[Listener]:
        """The sessions that were handed over, and that no producer has followed yet."""
        with self.lock:
            return list(self._handed_over)

    def find_session(self, number: int) -> Listener | None:
        """The session with that id."""
        return self._sessions.get(number)

    def sessions(self) -> list[Listener]:
        """All sessions that are open."""
        return list(self._sessions.values())

    def bound_to(self, claim: int) -> list[Listener]:
        """The sessions that are bound to this claim, and end with it."""
        return [each for each in self.sessions() if each.session.bound_to == claim]

    def bound_to_role(self, seat: Listener) -> list[Listener]:
        """The sessions that are bound to the role with this seat; none if it is no role's seat."""
        if not is_role(seat.topic):
            return []
        return [each for each in self.bound_to(seat.session.bound_to) if each is not seat]

    # ---- claims ----------------------------------------------------------------------------

    def keep_claim(self, number: int, claim: Owned) -> None:
        """Deliver notifications about this claim to it, and release it when the engine is
        closed."""
        self._claims[number] = claim

    def forget_claim(self, number: int) -> None:
        """Remove a claim that was released."""
        self._claims.pop(number, None)

    def lose_claim(self, number: int, error: OwnershipLostError) -> None:
        """End a claim that was revoked, with this error."""
        claim = self._claims.pop(number, None)
        if claim is not None:
            claim.lose(error)

    def claims(self) -> list[Owned]:
        """All claims that are held."""
        return list(self._claims.values())

    # ---- readers ---------------------------------------------------------------------------

    def register_reader(self, reader: Follower) -> None:
        """Wake this reader when the engine is closed."""
        self._readers.add(reader)

    def readers(self) -> list[Follower]:
        """All readers that are open."""
        return list(self._readers)
