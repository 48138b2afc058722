"""A compiler that does not optimise: where a build of the library is not measured, that saves three
quarters of its time."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path


def unoptimised(where: Path) -> str:
    """The path of one, in that directory, for CC. It puts -O0 behind the flags of setup.py, and the
    last one counts. As its name is not gcc's, setup.py does not ask for optimised links, either."""
    usual = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    compiler = where / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {usual} "$@" -O0\n')
    compiler.chmod(0o755)
    return str(compiler)
