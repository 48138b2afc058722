"""The sessions, claims and readers of one open engine, to be notified of what happens to them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.backend import Owned
from exclusivelog.errors import OwnershipLostError
from exclusivelog.local.records import is_role
from exclusivelog.members import living

if TYPE_CHECKING:
    from exclusivelog.local.log.reading import LogCursor
    from exclusivelog.local.session import LocalSession


class Registry:
    """The sessions, readers and claims that one engine has open. It refers to sessions and readers
    weakly; claims stay until they are released or revoked."""

    def __init__(self) -> None:
        self.lock = _core.Lock()  # of all sessions: held briefly, by each change of one
        self._sessions: weakref.WeakValueDictionary[int, LocalSession] = (
            weakref.WeakValueDictionary()
        )
        self._handed_over: weakref.WeakSet[LocalSession] = weakref.WeakSet()
        self._readers: weakref.WeakSet[LogCursor] = weakref.WeakSet()
        self._claims: dict[int, Owned] = {}

    # ---- sessions --------------------------------------------------------------------------

    def register(self, session: LocalSession) -> None:
        """Deliver notifications about this session to it."""
        self._sessions[session.session.id] = session

    def unregister(self, session: LocalSession) -> None:
        """Remove a session that is closed."""
        self._sessions.pop(session.session.id, None)
        with self.lock:
            self._handed_over.discard(session)

    def note_hand_over(self, session: LocalSession) -> None:
        """Record that this session's topic was handed over to another engine of this process."""
        with self.lock:
            self._handed_over.add(session)

    def handed_over(self) -> list[LocalSession]:
        """The sessions that were handed over, and that no producer has followed yet."""
        with self.lock:
            return list(self._handed_over)

    def find_session(self, number: int) -> LocalSession | None:
        """The session with that id."""
        return self._sessions.get(number)

    def sessions(self) -> list[LocalSession]:
        """All sessions that are open."""
        return living(self._sessions)

    def bound_to(self, claim: int) -> list[LocalSession]:
        """The sessions that are bound to this claim, and end with it."""
        return [each for each in self.sessions() if each.session.bound_to == claim]

    def bound_to_role(self, seat: LocalSession) -> list[LocalSession]:
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

    def register_reader(self, reader: LogCursor) -> None:
        """Wake this reader when the engine is closed."""
        with self.lock:
            self._readers.add(reader)

    def readers(self) -> list[LogCursor]:
        """All readers that are open."""
        with self.lock:
            return list(self._readers)
