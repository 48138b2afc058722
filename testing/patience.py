"""How long tests, proof and benchmarks wait for what must happen.

One limit for all waits. It is only reached when something is wrong, so it is generous, and longer
on a machine that has other work to do.
"""

from __future__ import annotations

import os

QUIET = 120.0  # seconds, on a machine that does nothing else
LONGEST = 400.0  # below the time that pytest gives a whole test


def strain() -> float:
    """How many times longer all takes than on a quiet machine: the present load of each core, at
    least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def patience(strain: float) -> float:
    """Seconds to wait.

    >>> patience(1.0), patience(2.0), patience(25.0)
    (120.0, 240.0, 400.0)
    """
    return min(LONGEST, QUIET * strain)


def patience_now() -> float:
    """Seconds to wait by the present load: a run begins on a quiet machine and makes it busy."""
    return patience(strain())


# The same in all processes of a run: pytest's workers must find the same tests, also those whose
# names have a limit in them.
PATIENCE = float(os.environ.setdefault("EXCLUSIVELOG_TEST_PATIENCE", f"{patience_now():.0f}"))
