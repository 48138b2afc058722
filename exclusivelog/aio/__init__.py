"""The same names, awaitable: for programs built on asyncio.

```python
import exclusivelog.aio as xl

async with xl.open("data/log") as engine:
    topic = engine.topic("orders")
    async with topic.producer("wait_for_exclusive") as producer:
        await producer.send(b"hello")
    async for message in topic.reader():
        ...
```

Every public name of `exclusivelog` is here, too, with the same parameters. Every call that may have
to wait is awaited, and never blocks the loop. What is only read, from memory or from the ledger,
such as `topic.next_offset`, is not awaited.

Whatever opens something can be awaited, or entered by `async with`, which also closes it:
`producer = await topic.producer()`, `async with topic.producer() as producer`.

Cancellation at any await leaves nothing behind: no waiter, no owner, no message that was taken and
lost. Only what has begun takes its course: a message that is being sent may be in the log.

How it works, and what a call costs, is told in docs/asyncio.md.

>>> async def example():
...     async with aio.open(path) as engine:
...         async with engine.topic("orders").producer("exclusive") as producer:
...             offset = await producer.send(b"hello")
...         return offset, [message.value async for message in engine.topic("orders").reader()]
>>> asyncio.run(example())
(0, [b'hello'])
"""

from exclusivelog import errors as errors
from exclusivelog import events as events
from exclusivelog import serde
from exclusivelog import types as types
from exclusivelog._core import Message
from exclusivelog.aio.engines import Engine, open, upgrade
from exclusivelog.aio.producers import Producer, Receipt, UnloadFuture
from exclusivelog.aio.readers import GroupReader, Reader
from exclusivelog.aio.roles import Role, RoleFuture
from exclusivelog.aio.states import MapWatch, SharedMap, SharedState
from exclusivelog.aio.topics import Topic
from exclusivelog.aio.transactions import Claim, Transaction
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
from exclusivelog.opening import Upgrade
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
