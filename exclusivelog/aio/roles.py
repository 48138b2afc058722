"""Roles, awaitable."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Literal, Unpack

from exclusivelog.aio.calls import in_thread
from exclusivelog.aio.handles import Handle, Opening
from exclusivelog.aio.producers import Producer, UnloadFuture, begun
from exclusivelog.aio.readers import GroupReader, Reader
from exclusivelog.aio.transactions import Claim
from exclusivelog.errors import OwnershipLostError
from exclusivelog.reader import Start
from exclusivelog.roles import Role as SyncRole
from exclusivelog.roles import SendingOptions, State
from exclusivelog.types import Move

__all__ = ["Role", "RoleFuture"]


class Role(Handle[SyncRole]):
    """An awaitable wrapper of an `exclusivelog.Role`, which is `sync`. `Engine.role` returns it."""

    @property
    def name(self) -> str:
        """The role's name."""
        return self.sync.name

    @property
    def epoch(self) -> int:
        """The role's epoch. It grows with every holder, so it serves other systems as a fencing
        token."""
        return int(self.sync.epoch)

    @property
    def claim(self) -> Claim:
        """The claim that its producers and transactions are bound to."""
        return Claim(self.sync.claim)

    @property
    def topics(self) -> list[str]:
        """The names of the topics that the role owns, sorted."""
        return self.sync.topics

    @property
    def groups(self) -> dict[str, list[str]]:
        """{reader group: the names of the topics that it reads}."""
        return self.sync.groups

    @property
    def generations(self) -> dict[str, dict[str, int]]:
        """{group: {resource: generation}} of the role's claims; raises OwnershipLostError once the
        role is lost."""
        return self.sync.generations

    @property
    def state(self) -> State:
        """Its state, read from the ledger: "open", "fenced", "moved" or "closed"."""
        return self.sync.state

    @property
    def closed(self) -> bool:
        """Whether it was closed by this process."""
        return self.sync.closed

    # ---- use -----------------------------------------------------------------------------

    def producer(self, topic: str, **options: Unpack[SendingOptions]) -> Opening[Producer]:
        """Open the role's producer of one of its topics, as `exclusivelog.Role.producer`: `await`
        the call, or enter it by `async with`."""
        for option in options.keys() - SendingOptions.__annotations__.keys():
            raise TypeError(f"role.producer takes no option {option!r}")

        async def begin() -> Producer:
            return Producer(await in_thread(self.sync.producer, topic, **options))

        return Opening("role.producer(...)", Producer, begin, Producer.close)

    def reader(
        self,
        topic: str,
        *,
        group: str | None = None,
        start: Start = "earliest",
        inclusive: bool = True,
        read_compacted: bool = False,
        trimmed: Literal["error", "earliest"] = "error",
        deserializer: object = None,
        key_deserializer: object = None,
    ) -> Reader:
        """Open the reader of one topic of a group that the role binds, as
        `exclusivelog.Role.reader`. It is open at once, because the role already has the group."""
        return Reader(
            self.sync.reader(
                topic,
                group=group,
                start=start,
                inclusive=inclusive,
                read_compacted=read_compacted,
                trimmed=trimmed,
                deserializer=deserializer,
                key_deserializer=key_deserializer,
            )
        )

    def group_reader(
        self,
        group: str | None = None,
        *,
        start: Start = "earliest",
        inclusive: bool = True,
        read_compacted: bool = False,
        trimmed: Literal["error", "earliest"] = "error",
        deserializer: object = None,
        key_deserializer: object = None,
    ) -> GroupReader:
        """Open one reader on all topics of a group that the role binds, as
        `exclusivelog.Role.group_reader`. It is open at once."""
        return GroupReader(
            self.sync.group_reader(
                group,
                start=start,
                inclusive=inclusive,
                read_compacted=read_compacted,
                trimmed=trimmed,
                deserializer=deserializer,
                key_deserializer=key_deserializer,
            )
        )

    # ---- the end -------------------------------------------------------------------------

    async def hand_over(self, to: str, timeout: float = 10.0) -> Move:
        """Move the role to another engine, as `exclusivelog.Role.hand_over`. If cancelled, this
        process keeps the role, unless it has already moved."""
        return (await (await self.hand_over_async(to, timeout)))[0]

    async def hand_over_async(self, to: str, timeout: float = 10.0) -> UnloadFuture:
        """Begin what `hand_over` does, and return a task with a list of one `Move`. If that is
        cancelled, this process keeps the role, unless it has already moved."""
        return await begun(functools.partial(self.sync.hand_over_async, to, timeout))


RoleFuture = asyncio.Task[Role]  # of `Engine.role_async`
OnLost = Callable[[Role, OwnershipLostError], object]
