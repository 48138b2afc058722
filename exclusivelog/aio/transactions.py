"""Claims and transactions, awaitable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from exclusivelog.aio.calls import in_thread, like
from exclusivelog.aio.handles import Handle, Wrapper, _NoWith, finished
from exclusivelog.members import GroupMember
from exclusivelog.producer import Producer as SyncProducer
from exclusivelog.transaction import Claim as SyncClaim
from exclusivelog.transaction import HoldsClaim, State
from exclusivelog.transaction import Transaction as SyncTransaction

__all__ = ["Claim", "Transaction"]

T = TypeVar("T")

# ---- claims ------------------------------------------------------------------------------


class Claim(Wrapper[SyncClaim], _NoWith):
    """An awaitable wrapper of an `exclusivelog.Claim`, which is `sync`. `Engine.own` returns it.
    `async with` releases it at the end of the block."""

    @property
    def group(self) -> str:
        """The group's name; "" if it was left out."""
        return self.sync.group

    @property
    def id(self) -> int:
        """The claim session's number, never given to another one on this ledger."""
        return self.sync.id

    @property
    def is_valid(self) -> bool:
        """True while the whole claim is held; each call reads the ledger (rule F5)."""
        return self.sync.is_valid

    @property
    def generations(self) -> Mapping[str, int]:
        """{resource: generation}, to store as a fencing token in other systems. Raises
        OwnershipLostError once the claim is lost (rule F5)."""
        return self.sync.generations

    @like(SyncClaim.check)
    def check(self) -> None:
        self.sync.check()

    @like(SyncClaim.release)
    async def release(self) -> None:
        await in_thread(self.sync.release)

    async def __aenter__(self) -> Self:
        self.sync._check_enters()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await finished(self.release())


# ---- transactions --------------------------------------------------------------------------


class Sender(Handle[SyncProducer]):
    """A producer, as a transaction uses it."""


class _Required(Protocol):
    """A claim, a role or a producer of this package."""

    @property
    def sync(self) -> SyncClaim | SyncProducer | HoldsClaim:
        """The synchronous object."""


class _GroupMember(Protocol):
    """A reader of this package."""

    @property
    def sync(self) -> GroupMember:
        """The synchronous object."""


class Transaction(Wrapper[SyncTransaction], _NoWith):
    """An awaitable wrapper of an `exclusivelog.Transaction`, which is `sync`. `Engine.transaction`
    returns it. `async with` commits at the end of the block, or aborts if an exception leaves it.

    A `commit` that has begun runs to its end even if it is cancelled; afterwards `state` shows its
    outcome. One that is cancelled while no thread is free for it aborts the transaction.
    """

    def __init__(self, sync: SyncTransaction) -> None:
        super().__init__(sync)
        self._senders: set[Sender] = set()

    @property
    def state(self) -> State:
        """Its state: "open", "committed", "aborted" or "unknown"."""
        return self.sync.state

    @property
    def offsets(self) -> dict[Sender, range]:
        """After the commit: the offsets of each producer's messages."""
        there = self.sync.offsets
        return {p: there[p.sync] for p in self._senders if p.sync in there}

    def _joined_by(self, sender: Sender) -> SyncTransaction:
        """Note that a producer sends in it; return the synchronous transaction."""
        self._senders.add(sender)
        return self.sync

    @like(SyncTransaction.require)
    def require(self, holder: _Required) -> None:
        self.sync.require(unwrapped("holder", holder))

    @like(SyncTransaction.commit_cursor)
    def commit_cursor(self, reader: _GroupMember) -> None:
        self.sync.commit_cursor(unwrapped("reader", reader))

    @like(SyncTransaction.commit)
    async def commit(self) -> None:
        turn = [self.sync]  # for the first to take it

        def commit() -> None:
            for transaction in _taken_from(turn):
                transaction.commit()

        try:
            await in_thread(commit)
        except asyncio.CancelledError:
            for transaction in _taken_from(turn):
                transaction.abort()
            raise

    @like(SyncTransaction.abort)
    def abort(self) -> None:
        self.sync.abort()

    async def __aenter__(self) -> Self:
        self.sync._check_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self.sync.state == "open":
            await self.commit()
        else:
            self.sync.abort()


def _taken_from(turn: list[T]) -> list[T]:
    """What is in the list, for one caller in any thread; nothing for all others."""
    with contextlib.suppress(IndexError):
        return [turn.pop()]
    return []


def unwrapped(argument: str, given: Any) -> Any:
    """The synchronous object of one of this package; TypeError for anything else."""
    if not isinstance(given, Wrapper):
        raise TypeError(
            f"{argument}={given!r}: exclusivelog.aio takes what exclusivelog.aio has opened, after "
            "its `await`"
        )
    return given.sync


def joined(transaction: Transaction | None, sender: Sender) -> SyncTransaction | None:
    """Let this producer send in a transaction; return the synchronous one, or None for None."""
    if transaction is None:
        return None
    sync_transaction(transaction)
    return transaction._joined_by(sender)


def sync_transaction(transaction: Transaction) -> SyncTransaction:
    """The synchronous transaction; TypeError for anything else than one of this package."""
    if not isinstance(transaction, Transaction):
        raise TypeError(
            f"transaction={transaction!r}: it takes what engine.transaction() of exclusivelog.aio "
            "returns"
        )
    return transaction.sync
