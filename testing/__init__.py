"""Shared parts of tests, proof and benchmarks.

`pytest --durability=process` lets every engine, doctest, worker and script promise that much unless
it says otherwise (rule H1).
"""

import os

DURABILITY = "EXCLUSIVELOG_TEST_DURABILITY"


def choose_durability() -> None:
    """Make what the environment asks for the default of `xl.open`."""
    if durability := os.environ.get(DURABILITY):
        import exclusivelog as xl

        assert xl.open.__kwdefaults__ is not None
        xl.open.__kwdefaults__["durability"] = durability


choose_durability()
