"""Programs in C: the least that something costs, with the primitives of the compiled core and
without any library. What ours costs is held against them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bench.measure import Stores

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "exclusivelog"
STRICT = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I", HEADERS]
PATIENCE = 60


def build(name: str, stores: Stores) -> str:
    """Compile the program; where it is."""
    program = stores.path(name)
    compiler = os.environ.get("CC", "cc")
    subprocess.run(
        [compiler, *STRICT, HERE / f"{name}.c", "-o", program, "-lpthread"],
        check=True,
        timeout=PATIENCE,
    )
    return program
