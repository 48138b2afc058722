"""The examples, run as a user would, and what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from testing.commands import SLOW
from testing.processes import PATIENCE

EXAMPLES = Path(__file__).parents[2] / "examples"
# Warnings that are true: of a machine that is busy, and of engines that a program kills and stops.
WARNINGS = re.compile(SLOW + "|(is|are) (dead|unresponsive) ")


def run(script: str, *options: object) -> tuple[int, str, str]:
    """(status, output, errors) of an example, but for true warnings."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, options)]
    done = subprocess.run(
        command,
        capture_output=True,
        timeout=3 * PATIENCE,
        text=True,
        env={**os.environ, "EXCLUSIVELOG_EXAMPLE_PATIENCE": f"{PATIENCE}"},
    )
    return done.returncode, done.stdout, unwarned(done.stderr)


def strict_mypy(*programs: Path) -> str:
    """What mypy says of programs, each line with the error's code."""
    options = "--strict --no-error-summary --follow-imports=silent --show-error-codes"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options.split(), *map(str, programs)],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def unwarned(errors: str | bytes) -> str:
    """What a program has written to its standard error, but for true warnings."""
    text = errors.decode() if isinstance(errors, bytes) else errors
    return "".join(line for line in text.splitlines(keepends=True) if not WARNINGS.search(line))


def findings(output: str) -> list[str]:
    """The first word of each line of the verdict."""
    return re.findall(r"^(ok|FAILED) ", output, re.MULTILINE)


def failed(output: str) -> list[str]:
    """What the verdict says of each line that fails."""
    return re.findall(r"^FAILED (.*)", output, re.MULTILINE)
