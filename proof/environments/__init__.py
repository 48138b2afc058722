"""What users have and builders forget: file systems that go and come back, copies, moves, other
users, limits, closed descriptors, wrong clocks, patched programs.

Each case is a small scenario with real processes, in a mount namespace of its own, that ends in a
list of violations: an acknowledged message that is lost, an owner that goes on where it must not, a
call that hangs, a process that dies by a signal, an error that does not say what is wrong.

- `cases`   what a case is made of: file systems, actors, judges; how cases are registered
- `actors`   processes that use a ledger
- `running`  each case in a process of its own, with its clean twin and its sabotage
- the cases: `mounts`, `copies`, `moves`, `files`, `descriptors`, `users`, `limits`, `clocks`,
  `programs`, `many_processes`
"""

from proof.environments import (
    clocks,
    copies,
    descriptors,
    files,
    limits,
    many_processes,
    mounts,
    moves,
    programs,
    users,
)
from proof.environments.cases import CASES

__all__ = [
    "CASES",
    "clocks",
    "copies",
    "descriptors",
    "files",
    "limits",
    "many_processes",
    "mounts",
    "moves",
    "programs",
    "users",
]  # fmt: skip
