"""Programs in C: the least that something costs, with the primitives of the compiled core and
without any library. What ours costs is held against them. And one in Rust, with the write-ahead
logs of others, which is built where cargo is."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench.measure import Stores

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "exclusivelog"
STRICT = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I", HEADERS]
PATIENCE = 60
CARGO = Path.home() / ".cargo" / "bin" / "cargo"  # where rustup puts it, often not on PATH
LOGS = HERE.parents[1] / "build" / "logs"
LOGS_PROGRAM = LOGS / "release" / "write-ahead-logs"
PATIENCE_WITH_CARGO = 1800  # it downloads and compiles 130 crates


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


def build_logs() -> Path | None:
    """Build the program with Rust's write-ahead logs, at their locked versions; where it is. None
    without cargo."""
    cargo = shutil.which("cargo") or (CARGO if CARGO.exists() else None)
    if cargo is None:
        return None
    command = [cargo, "build", "--quiet", "--release", "--locked", "--target-dir", LOGS]
    path = f"{Path(cargo).parent}:{os.environ['PATH']}"  # cargo calls rustc
    subprocess.run(
        command,
        cwd=HERE / "logs",
        check=True,
        timeout=PATIENCE_WITH_CARGO,
        env={**os.environ, "PATH": path},
    )
    return LOGS_PROGRAM
