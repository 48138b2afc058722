"""exclusivelog: an append-only log with one fenced writer, for the processes of one machine.

```python
import exclusivelog as xl

with xl.open("data/log") as engine:
    topic = engine.topic("orders")
    with topic.producer("wait_for_exclusive", priority=1) as producer:
        producer.send(b"only one process at a time gets here")
    for message in topic.reader():
        print(message.offset, message.epoch, message.value)
```
"""

import os
from importlib.machinery import EXTENSION_SUFFIXES

from exclusivelog.version import __version__

if not {"_core" + suffix for suffix in EXTENSION_SUFFIXES} & {*os.listdir(__path__[0])}:
    raise ImportError(
        f"exclusivelog is not built for this Python in {__path__[0]}. In a clone, run "
        "`pip install -e .` first; to use the installed library, start Python in another directory"
    )

TYPE_CHECKING = False  # instead of typing's: that import takes longer than the rest of this file

if TYPE_CHECKING:
    from exclusivelog import errors as errors
    from exclusivelog import events as events
    from exclusivelog import serde
    from exclusivelog import types as types
    from exclusivelog._core import Message, Receipt
    from exclusivelog.engine import Engine
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
    from exclusivelog.opening import Upgrade, open, upgrade
    from exclusivelog.producer import Producer
    from exclusivelog.reader import GroupReader, Reader
    from exclusivelog.roles import Role, RoleFuture
    from exclusivelog.state.map import Change, SharedMap
    from exclusivelog.state.past import MapChange, MapWatch
    from exclusivelog.state.state import SharedState
    from exclusivelog.topic import Topic
    from exclusivelog.transaction import Claim, Transaction
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
    from exclusivelog.unload import UnloadFuture

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

# The module of each name. It is imported when one of its names is first used (PEP 562): a program
# that only sends imports no shared maps, and the command's help imports none of them.
_MODULES = ("errors", "events", "serde", "types")
_NAMES_OF = {
    "_core": ("Message", "Receipt"),
    "engine": ("Engine",),
    "errors": (
        "ClusterError", "DeserializationError", "DuplicateSequenceError", "EngineClosedError",
        "ExclusiveLogError", "InvalidEpochError", "LedgerCorruptedError", "LedgerError",
        "LedgerFullError", "LedgerIOError", "LedgerVersionError", "MirrorMismatchError",
        "MissingLibraryError", "OffsetTrimmedError", "OwnershipError", "OwnershipLostError",
        "ProducerBusyError", "ProducerFencedError", "ProducerMovedError", "ProducerRevokedError",
        "ReaderFencedError", "StateError", "TopicNotFoundError", "TopicTerminatedError",
        "TransactionAbortedError", "UnsupportedError", "WaitTimeoutError",
    ),
    "events": ("Event",),
    "opening": ("Upgrade", "open", "upgrade"),
    "producer": ("Producer",),
    "reader": ("GroupReader", "Reader"),
    "roles": ("Role", "RoleFuture"),
    "state.map": ("Change", "SharedMap"),
    "state.past": ("MapChange", "MapWatch"),
    "state.state": ("SharedState",),
    "topic": ("Topic",),
    "transaction": ("Claim", "Transaction"),
    "types": (
        "AccessMode", "Announcement", "ClaimInfo", "EngineInfo", "EngineStats", "GroupInfo",
        "Histogram", "Move", "OwnerInfo", "ProducerStats", "Report", "Retention", "RoleInfo",
        "TopicStats",
        "TransferInfo", "WaiterInfo",
    ),
    "unload": ("UnloadFuture",),
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES_OF.items() for name in names}

if not TYPE_CHECKING:  # a type checker would accept any name because of this function

    def __getattr__(name):
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"exclusivelog.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'exclusivelog' has no attribute {name!r}")
        found = getattr(import_module(f"exclusivelog.{_HOMES[name]}"), name)
        globals()[name] = found  # later uses do not call this function
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
