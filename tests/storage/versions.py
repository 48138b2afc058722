"""Another version of the library: this one with other numbers, in a process of its own."""

from __future__ import annotations

import sys
from typing import Any

import exclusivelog
from exclusivelog.local.shm import lockfile


def pretend(**numbers: Any) -> None:
    """Give this process's library other numbers: FORMAT, EARLIER_FORMATS, LOCK_VERSION,
    OPENED_BY, `__version__`, in each module that has them."""
    modules = [
        module for name, module in sys.modules.items() if name.startswith(exclusivelog.__name__)
    ]
    for name, value in numbers.items():
        changed = [setattr(module, name, value) for module in modules if name in vars(module)]
        assert changed, name
    if "LOCK_VERSION" in numbers:
        name = lockfile.LOCK_NAME + bytes([numbers["LOCK_VERSION"]])
        lockfile.MAGIC = int.from_bytes(name, "little")


def pretend_to_be_newer() -> None:
    """The next version: its format is one higher, and it upgrades the present one."""
    from exclusivelog.local.versions import EARLIER_FORMATS, FORMAT, OPENED_BY

    pretend(
        FORMAT=FORMAT + 1,
        EARLIER_FORMATS=(*EARLIER_FORMATS, FORMAT),
        __version__="9.8",
        OPENED_BY={**OPENED_BY, FORMAT: "the version that is tested"},
    )
