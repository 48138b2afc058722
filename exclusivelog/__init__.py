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

_FILES = frozenset(os.listdir(__path__[0]))
if not {"_core" + suffix for suffix in EXTENSION_SUFFIXES} & _FILES:
    raise ImportError(
        f"exclusivelog is not built for this Python in {__path__[0]}. In a clone, run "
        "`pip install -e .` first; to use the installed library, start Python in another directory"
    )
del os, EXTENSION_SUFFIXES

TYPE_CHECKING = False  # instead of typing's: that import takes longer than the rest of this file

# The public names are those that these modules list in `__all__`, from the lowest module up.
if TYPE_CHECKING:
    from exclusivelog import errors as errors
    from exclusivelog import events as events
    from exclusivelog import serde as serde
    from exclusivelog import types as types
    from exclusivelog.engine import *
    from exclusivelog.errors import *
    from exclusivelog.events import *
    from exclusivelog.locks import *
    from exclusivelog.losses import *
    from exclusivelog.opening import *
    from exclusivelog.owners import *
    from exclusivelog.producer import *
    from exclusivelog.reader import *
    from exclusivelog.roles import *
    from exclusivelog.state.map import *
    from exclusivelog.state.past import *
    from exclusivelog.state.state import *
    from exclusivelog.terms import *
    from exclusivelog.topic import *
    from exclusivelog.transaction import *
    from exclusivelog.types import *
    from exclusivelog.unload import *
    from exclusivelog.version import __version__ as __version__

# A module is imported when one of its names, or of those behind it, is first used (PEP 562): a
# program that only sends imports no shared maps, and the command's help imports none of them.
_MODULES = ("errors", "events", "serde", "types")
_PARTS = """
    errors types events reader losses producer transaction unload owners terms topic roles locks
    engine opening state.map state.past state.state
""".split()

if not TYPE_CHECKING:  # a type checker would accept any name because of these functions

    def __getattr__(name):
        if name == "__all__":
            found = sorted([*_names(), "__version__", "serde"])
        elif name in _MODULES:
            found = _part(name)
        else:
            found = _public(name)
        globals()[name] = found  # later uses do not call this function
        return found

    def _part(name):
        from importlib import import_module

        return import_module(f"exclusivelog.{name}")

    def _public(name):
        # `from exclusivelog import logs` asks for it here first, and then imports the module.
        if not (name.startswith("_") or name in _FILES or f"{name}.py" in _FILES):
            for module in map(_part, _PARTS):
                if name in module.__all__:
                    return getattr(module, name)
        raise AttributeError(f"module 'exclusivelog' has no attribute {name!r}")

    def _names():
        return [name for module in map(_part, _PARTS) for name in module.__all__]

    def __dir__():
        own = [name for name in globals() if name.startswith("__") and name.endswith("__")]
        return sorted({*own, *_names(), *_MODULES})
