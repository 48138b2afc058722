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

from exclusivelog import serde
from exclusivelog._core import Message, Receipt
from exclusivelog.engine import Engine
from exclusivelog.errors import *  # noqa: F403
from exclusivelog.errors import __all__ as _errors
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
    GroupInfo,
    Move,
    OwnerInfo,
    Report,
    RoleInfo,
    TransferInfo,
    WaiterInfo,
)
from exclusivelog.unload import UnloadFuture
from exclusivelog.version import __version__

__all__ = [
    "AccessMode",
    "Announcement",
    "Change",
    "Claim",
    "ClaimInfo",
    "Engine",
    "EngineInfo",
    "Event",
    "GroupInfo",
    "GroupReader",
    "MapChange",
    "MapWatch",
    "Message",
    "Move",
    "OwnerInfo",
    "Producer",
    "Reader",
    "Receipt",
    "Report",
    "Role",
    "RoleFuture",
    "RoleInfo",
    "SharedMap",
    "SharedState",
    "Topic",
    "Transaction",
    "TransferInfo",
    "UnloadFuture",
    "Upgrade",
    "WaiterInfo",
    "__version__",
    "open",
    "serde",
    "upgrade",
    *_errors,
]
