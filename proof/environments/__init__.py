"""Environments that tests rarely have: file systems that are unmounted and mounted again, copies,
moves, other users, limits, closed descriptors, wrong clocks, patched programs.

Each case is a small scenario with real processes, in a mount namespace of its own, and returns a
list of violations: a lost acknowledged message, an owner that continues where it must not, a
call that hangs, a process that dies by a signal, an error that does not say what is wrong.

- `cases`   the parts of a case (file systems, actors, judges), and how cases are registered
- `actors`   processes that use a ledger
- `running`  runs each case in its own process: with its fault, without it, and with the
  deliberate defects that its judge must notice
- the cases: `mounts`, `copies`, `moves`, `files`, `descriptors`, `users`, `limits`, `clocks`,
  `programs`, `many_processes`, `platform`, `kernel`, `storage`
"""

from proof.environments import (
    clocks,
    copies,
    descriptors,
    files,
    kernel,
    limits,
    many_processes,
    mounts,
    moves,
    platform,
    programs,
    storage,
    users,
)
from proof.environments.cases import CASES

__all__ = [
    "CASES",
    "clocks",
    "copies",
    "descriptors",
    "files",
    "kernel",
    "limits",
    "many_processes",
    "mounts",
    "moves",
    "platform",
    "programs",
    "storage",
    "users",
]
