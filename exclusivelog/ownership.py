"""Claims as the application has them: `engine.own`, and the `Claim` that it returns.

claims.py has the rules, and the record of who holds what.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from exclusivelog import _core
from exclusivelog.claims import (
    NO_GROUP,
    Claims,
    check_generation,
    check_group,
    check_resource,
    describe_claim,
    severed_text,
)
from exclusivelog.errors import OwnershipError, OwnershipLostError
from exclusivelog.ledger import Ledger
from exclusivelog.moved_claims import moved_error
from exclusivelog.runtime import Runtime
from exclusivelog.tables import Claimant, Tables

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
        self, engine: Runtime, claims: Claims, claimant: Claimant, on_lost: OnLost | None = None
    ) -> None:
        self.group = claimant.group
        self._engine = engine
        self._claims = claims
        self._claimant = claimant
        self._on_lost = on_lost
        self._released = False

    @property
    def id(self) -> int:
        """The claim session's number, never given to another one on this ledger."""
        return self._claimant.id

    @property
    def engine(self) -> Runtime:
        """The engine that made this claim."""
        return self._engine

    @property
    def ledger(self) -> Ledger:
        """The ledger that stores this claim."""
        return self._engine.ledger

    @property
    def is_valid(self) -> bool:
        """True while the whole claim is held; each call reads the ledger (rule F5)."""
        if self._released or self._engine.closed:
            return False
        return self._claims.holds(self._claimant)

    def check(self) -> None:
        """Raise OwnershipLostError unless the whole claim is still held (rule F5).

        If the claim was handed over, the error's `successor` names the destination."""
        self._engine.check_open()
        if self._released or not self._claims.holds(self._claimant):
            raise self._lost_error()

    def check_in(self, tables: Tables) -> None:
        """As `check`, within a transaction: all that it writes is written under this claim."""
        if tables.claimant(self.id) is None:
            raise self._lost_error()

    def _lost_error(self) -> OwnershipLostError:
        if self._released:
            return OwnershipLostError(f"{self!r} was released; make a new one with engine.own")
        successor = self._claims.successor(self._claimant, self._engine.mailbox.successors)
        if successor is not None:
            return moved_error(repr(self), successor)
        return OwnershipLostError(severed_text(self._claimant, None))

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
        return dict(self._claimant.generations)

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
            self._claims.release(self._claimant)
            self._released = True
            self._engine.forget_claim(self.id)

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
        return describe_claim(self._claimant)


# ---- the call ----------------------------------------------------------------------------


def own(
    engine: Runtime, group: str | Mapping[str, int | None] | None,
    resources: Mapping[str, int | None] | None, timeout: float | None, on_lost: OnLost | None,
) -> Claim:  # fmt: skip
    """What `Engine.own` does, arguments and waiting included."""
    claims = Claims(engine.ledger, engine.sessions)
    slot = engine.slot  # or why there is none
    if isinstance(group, Mapping) and resources is None:
        group, resources = None, group
    if group is not None:
        check_group(group)
    name = group if isinstance(group, str) else NO_GROUP
    if on_lost is not None and not callable(on_lost):
        raise TypeError("on_lost takes a function of (claim, error)")
    if not isinstance(resources, Mapping) or not resources:
        raise TypeError("resources takes a mapping of names to generations, one at least")
    for resource, generation in resources.items():
        check_resource("resources", resource)
        check_generation(resource, generation)
    end = time.monotonic() + (timeout or 0.0)
    while True:
        engine.check_open()
        seen = claims.changes()
        made: list[Claimant] = []
        try:
            # Its loss must not be told before the engine knows it.
            with _core.Holding(engine.mailbox.lock):
                engine.check_open()  # closing it releases what is registered by then
                claimant = claims.take(engine.info, slot, name, resources, made=made)
                claim = Claim(engine, claims, claimant, on_lost)
                engine.keep_claim(claimant.id, claim)
            return claim
        except OwnershipError as error:
            left = end - time.monotonic()
            if left <= 0 or not error.retriable:
                raise
        except BaseException:  # Ctrl-C behind the commit: nobody has this claim
            engine.give_up_claims(made, claims.release)
            raise
        claims.wait_for_a_change(seen, left)
