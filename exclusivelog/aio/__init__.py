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

import functools as _functools
import os as _os
from collections.abc import Mapping as _Mapping
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Literal as _Literal

from exclusivelog import errors as errors
from exclusivelog import events as events
from exclusivelog import opening as _opening
from exclusivelog import serde as serde
from exclusivelog import types as types
from exclusivelog.aio import calls as _calls
from exclusivelog.aio import engines as _engines
from exclusivelog.aio import handles as _handles
from exclusivelog.aio import locks as _locks
from exclusivelog.aio import losses as _losses
from exclusivelog.aio import owners as _owners
from exclusivelog.aio import producers as _producers
from exclusivelog.aio import readers as _readers
from exclusivelog.aio import roles as _roles
from exclusivelog.aio import states as _states
from exclusivelog.aio import terms as _terms
from exclusivelog.aio import topics as _topics
from exclusivelog.aio import transactions as _transactions
from exclusivelog.aio.engines import *
from exclusivelog.aio.locks import *
from exclusivelog.aio.losses import *
from exclusivelog.aio.owners import *
from exclusivelog.aio.producers import *
from exclusivelog.aio.readers import *
from exclusivelog.aio.roles import *
from exclusivelog.aio.states import *
from exclusivelog.aio.terms import *
from exclusivelog.aio.topics import *
from exclusivelog.aio.transactions import *
from exclusivelog.engine import Engine as _SyncEngine
from exclusivelog.errors import *
from exclusivelog.events import *
from exclusivelog.opening import DEFAULT_MAP_SIZE as _MAP_SIZE
from exclusivelog.opening import DEFAULT_MAX_READERS as _MAX_READERS
from exclusivelog.opening import Upgrade as Upgrade
from exclusivelog.types import *
from exclusivelog.version import __version__ as __version__

# The public names are those that these modules list.
_PARTS = (
    errors,
    types,
    events,
    _engines,
    _locks,
    _losses,
    _owners,
    _producers,
    _readers,
    _roles,
    _states,
    _terms,
    _topics,
    _transactions,
)
_OWN = ("Upgrade", "open", "upgrade", "serde", "__version__")
if not _TYPE_CHECKING:  # a type checker knows them by the imports
    __all__ = sorted({*_OWN, *(name for part in _PARTS for name in part.__all__)})


def __dir__() -> list[str]:
    own = [name for name in globals() if name.startswith("__") and name.endswith("__")]
    names = [name for part in _PARTS for name in part.__all__]
    return sorted({*own, *_OWN, *names, "errors", "events", "types"})


def open(
    path: str | _os.PathLike[str],
    name: str | None = None,
    properties: _Mapping[str, str] | None = None,
    *,
    durability: _Literal["power", "process"] = "power",
    keepalive: float | None = 30.0,
    readonly: bool = False,
    create: bool = True,
    mode: int = 0o700,
    map_size: int = _MAP_SIZE,
    max_readers: int = _MAX_READERS,
    kill_stalled: bool = False,
    admin: str | None = None,
    token: str | None = None,
    token_file: str | _os.PathLike[str] | None = None,
    tls_trust_certs: str | None = None,
    check_policies: bool | None = None,
) -> _handles.Opening[_engines.Engine]:
    """Open the ledger in a directory: `await` it, or `async with` it. Parameters and errors are
    those of `exclusivelog.open`.

    Raises RuntimeError outside of asyncio, as on trio.

    >>> async def example():
    ...     async with aio.open(path, name="worker-1") as engine:
    ...         return engine.name, engine.topics()
    >>> asyncio.run(example())
    ('worker-1', [])
    """
    call = _functools.partial(
        _opening.open,
        path,
        name,
        properties,
        durability=durability,
        keepalive=keepalive,
        readonly=readonly,
        create=create,
        mode=mode,
        map_size=map_size,
        max_readers=max_readers,
        kill_stalled=kill_stalled,
        admin=admin,
        token=token,
        token_file=token_file,
        tls_trust_certs=tls_trust_certs,
        check_policies=check_policies,
    )

    async def begin() -> _engines.Engine:
        return _engines.Engine(await _calls.opened(call, _SyncEngine.close))

    kind = _engines.Engine
    return _handles.Opening("exclusivelog.aio.open(...)", kind, begin, kind.close)


async def upgrade(
    path: str | _os.PathLike[str],
    backup: str | _os.PathLike[str] | None = None,
    *,
    despite_damage: bool = False,
) -> Upgrade:
    """Upgrade a ledger of an earlier format after a backup, as `exclusivelog.upgrade`. It runs to
    its end even if the task is cancelled."""
    return await _calls.in_thread(_opening.upgrade, path, backup, despite_damage=despite_damage)
