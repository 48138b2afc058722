"""Claims as the application has them: `engine.own`, and the `Claim` that it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from exclusivelog.backend import ClaimSession, ClaimStore, Place
from exclusivelog.errors import OwnershipError, OwnershipLostError, describe_engine
from exclusivelog.validation import check_generation, check_group, check_resource

OnLost = Callable[["Claim", OwnershipLostError], object]


class Claim:
    """The resources that one call of `engine.own` has claimed. They are lost as a whole.

    `group` is the group's name, "" if it was left out. A claim is held until it is released or
    revoked, or its engine closes: dropping this object does not release it.

    >>> with engine.own("reports", {"march": None}) as claim:
    ...     claim.is_valid, claim.generations
    (True, {'march': 1})
    """

    def __init__(
        self, engine: ClaimStore, session: ClaimSession, on_lost: OnLost | None = None
    ) -> None:
        self.group = session.group
        self._engine = engine
        self._session = session
        self._on_lost = on_lost
        self._released = False

    @property
    def id(self) -> int:
        """The claim session's number, never given to another one on this ledger."""
        return self._session.id

    @property
    def engine(self) -> ClaimStore:
        """The engine that made this claim."""
        return self._engine

    @property
    def ledger(self) -> Place:
        """The ledger that stores this claim."""
        return self._session.ledger

    @property
    def is_valid(self) -> bool:
        """True while the whole claim is held; each call reads the ledger (rule F5)."""
        if self._released or self._engine.closed:
            return False
        return self._session.is_held()

    def check(self) -> None:
        """Raise OwnershipLostError unless the whole claim is still held (rule F5).

        If the claim was handed over, the error's `successor` names the destination."""
        self._engine.check_open()
        if self._released or not self._session.is_held():
            raise self._lost_error()

    def check_in(self, transaction: Any) -> None:
        """As `check`, within a transaction: all that it writes is written under this claim."""
        if not self._session.is_held_in(transaction):
            raise self._lost_error()

    def _lost_error(self) -> OwnershipLostError:
        if self._released:
            return OwnershipLostError(f"{self!r} was released; make a new one with engine.own")
        successor = self._session.successor()
        if successor is None:
            return OwnershipLostError(
                f"{self!r} was revoked: one of its resources was claimed with an equal or higher "
                "generation, or with 0. Make a new one with engine.own"
            )
        return OwnershipLostError(
            f"{self!r} was handed over with its topic to {describe_engine(successor)}; claim it "
            "there",
            successor=successor,
        )

    def lose(self, error: OwnershipLostError) -> None:
        """The claim was revoked: call `on_lost`."""
        on_lost = self._on_lost
        if on_lost is not None and not self._released:
            self._engine.call_soon(lambda: on_lost(self, error))

    @property
    def generations(self) -> dict[str, int]:
        """{resource: generation}, to store as a fencing token in other systems. Raises
        OwnershipLostError once the claim is lost (rule F5)."""
        self.check()
        return dict(self._session.generations)

    def release(self) -> None:
        """Release the claim. A second call, or one after the claim was revoked, does nothing.

        Producers that are bound to it first commit what they have accepted; then they end with
        ProducerRevokedError."""
        if not (self._released or self._engine.closed):
            self._engine.drain_bound(self.id)
            self.end()

    def end(self) -> None:
        """Release the claim; for an engine that is closing."""
        if not self._released:
            self._session.release()
            self._released = True

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return repr(self._session)


# ---- the call ----------------------------------------------------------------------------


def own(
    engine: ClaimStore, group: str | Mapping[str, int | None] | None,
    resources: Mapping[str, int | None] | None, timeout: float | None, on_lost: OnLost | None,
) -> Claim:  # fmt: skip
    """What `Engine.own` does, with its checks of the arguments and its waiting."""
    engine.check_writable()
    if isinstance(group, Mapping) and resources is None:
        group, resources = None, group
    if group is not None:
        check_group(group)
    name = group if isinstance(group, str) else ""
    if on_lost is not None and not callable(on_lost):
        raise TypeError("on_lost takes a function of (claim, error)")
    if not isinstance(resources, Mapping) or not resources:
        raise TypeError("resources takes a mapping of names to generations, at least one")
    for resource, generation in resources.items():
        check_resource("resources", resource)
        check_generation(resource, generation)

    def make(session: ClaimSession) -> Claim:
        return Claim(engine, session, on_lost)

    end = time.monotonic() + (timeout or 0.0)
    while True:
        engine.check_open()
        seen = engine.claims_mark()
        try:
            return engine.hold_claim(name, resources, make)
        except OwnershipError as error:
            left = end - time.monotonic()
            if left <= 0 or not error.retriable:
                raise
        engine.await_claims(seen, left)
