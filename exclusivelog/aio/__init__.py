"""The public interface for asyncio, with the same names as `exclusivelog`.

```python
import exclusivelog.aio as xl

async with xl.open("data/log") as engine:
    topic = engine.topic("orders")
    async with topic.producer("wait_for_exclusive") as producer:
        await producer.send(b"hello")
    async for message in topic.reader():
        ...
```

This module has every public name of `exclusivelog`, with the same parameters. Every call that may
have to wait is awaited, and never blocks the loop. Facts that are only read, from memory or from
the ledger, such as `topic.next_offset`, are not awaited.

A call that opens something can be awaited, or entered by `async with`, which also closes it:
`producer = await topic.producer()`, `async with topic.producer() as producer`.

If a task is cancelled at any await, it leaves no waiter and no owner, and loses no message that was
read. A call that is in progress in a thread is completed: a message that is being sent may still
enter the log.

docs/asyncio.md describes how it works, and the cost of a call.

>>> async def example():
...     async with aio.open(path) as engine:
...         async with engine.topic("orders").producer("exclusive") as producer:
...             offset = await producer.send(b"hello")
...         return offset, [message.value async for message in engine.topic("orders").reader()]
>>> asyncio.run(example())
(0, [b'hello'])
"""

import functools
import os
from collections.abc import Mapping
from typing import Literal

from exclusivelog import errors as errors
from exclusivelog import events as events
from exclusivelog import opening as _opening
from exclusivelog import serde
from exclusivelog import types as types
from exclusivelog._core import Message
from exclusivelog.aio.calls import in_thread, opened
from exclusivelog.aio.engines import Engine
from exclusivelog.aio.handles import Opening
from exclusivelog.aio.producers import Producer, Receipt, UnloadFuture
from exclusivelog.aio.readers import GroupReader, Reader
from exclusivelog.aio.roles import Role, RoleFuture
from exclusivelog.aio.states import MapWatch, SharedMap, SharedState
from exclusivelog.aio.topics import Topic
from exclusivelog.aio.transactions import Claim, Transaction
from exclusivelog.engine import Engine as _SyncEngine
from exclusivelog.errors import (
    ClusterError,
    DeserializationError,
    DuplicateSequenceError,
    EngineClosedError,
    ExclusiveLogError,
    InvalidEpochError,
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    LedgerIOError,
    LedgerVersionError,
    MirrorMismatchError,
    MissingLibraryError,
    OffsetTrimmedError,
    OwnershipError,
    OwnershipLostError,
    ProducerBusyError,
    ProducerFencedError,
    ProducerMovedError,
    ProducerRevokedError,
    ReaderFencedError,
    StateError,
    TopicNotFoundError,
    TopicTerminatedError,
    TransactionAbortedError,
    UnsupportedError,
    WaitTimeoutError,
)
from exclusivelog.events import Event
from exclusivelog.opening import DEFAULT_MAP_SIZE, DEFAULT_MAX_READERS, Upgrade
from exclusivelog.state.map import Change
from exclusivelog.state.past import MapChange
from exclusivelog.types import (
    AccessMode,
    Announcement,
    ClaimInfo,
    EngineInfo,
    EngineStats,
    GroupInfo,
    Histogram,
    Move,
    OwnerInfo,
    ProducerStats,
    Report,
    Retention,
    RoleInfo,
    TopicStats,
    TransferInfo,
    WaiterInfo,
)
from exclusivelog.version import __version__

__all__ = [
    "AccessMode",
    "Announcement",
    "Change",
    "Claim",
    "ClaimInfo",
    "ClusterError",
    "DeserializationError",
    "DuplicateSequenceError",
    "Engine",
    "EngineClosedError",
    "EngineInfo",
    "EngineStats",
    "Event",
    "ExclusiveLogError",
    "GroupInfo",
    "GroupReader",
    "Histogram",
    "InvalidEpochError",
    "LedgerCorruptedError",
    "LedgerError",
    "LedgerFullError",
    "LedgerIOError",
    "LedgerVersionError",
    "MapChange",
    "MapWatch",
    "Message",
    "MirrorMismatchError",
    "MissingLibraryError",
    "Move",
    "OffsetTrimmedError",
    "OwnerInfo",
    "OwnershipError",
    "OwnershipLostError",
    "Producer",
    "ProducerBusyError",
    "ProducerFencedError",
    "ProducerMovedError",
    "ProducerRevokedError",
    "ProducerStats",
    "Reader",
    "ReaderFencedError",
    "Receipt",
    "Report",
    "Retention",
    "Role",
    "RoleFuture",
    "RoleInfo",
    "SharedMap",
    "SharedState",
    "StateError",
    "Topic",
    "TopicNotFoundError",
    "TopicStats",
    "TopicTerminatedError",
    "Transaction",
    "TransactionAbortedError",
    "TransferInfo",
    "UnloadFuture",
    "UnsupportedError",
    "Upgrade",
    "WaitTimeoutError",
    "WaiterInfo",
    "__version__",
    "open",
    "serde",
    "upgrade",
]


def open(
    path: str | os.PathLike[str],
    name: str | None = None,
    properties: Mapping[str, str] | None = None,
    *,
    durability: Literal["power", "process"] = "power",
    keepalive: float | None = 30.0,
    readonly: bool = False,
    create: bool = True,
    mode: int = 0o700,
    map_size: int = DEFAULT_MAP_SIZE,
    max_readers: int = DEFAULT_MAX_READERS,
    kill_stalled: bool = False,
    admin: str | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls_trust_certs: str | None = None,
    check_policies: bool | None = None,
) -> Opening[Engine]:
    """Open the ledger in a directory: `await` it, or `async with` it. Parameters and errors are
    those of `exclusivelog.open`.

    Raises RuntimeError outside of asyncio, as on trio.

    >>> async def example():
    ...     async with aio.open(path, name="worker-1") as engine:
    ...         return engine.name, engine.topics()
    >>> asyncio.run(example())
    ('worker-1', [])
    """
    call = functools.partial(
        _opening.open, path, name, properties, durability=durability, keepalive=keepalive,
        readonly=readonly, create=create, mode=mode, map_size=map_size, max_readers=max_readers,
        kill_stalled=kill_stalled,
        admin=admin, token=token, token_file=token_file, tls_trust_certs=tls_trust_certs,
        check_policies=check_policies,
    )  # fmt: skip

    async def begin() -> Engine:
        return Engine(await opened(call, _SyncEngine.close))

    return Opening("exclusivelog.aio.open(...)", Engine, begin, Engine.close)


async def upgrade(
    path: str | os.PathLike[str],
    backup: str | os.PathLike[str] | None = None,
    *,
    despite_damage: bool = False,
) -> Upgrade:
    """Upgrade a ledger of an earlier format after a backup, as `exclusivelog.upgrade`. It runs to
    its end even if the task is cancelled."""
    return await in_thread(_opening.upgrade, path, backup, despite_damage=despite_damage)
