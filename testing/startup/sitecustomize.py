"""Python imports this on its own in every program that tests start: conftest.py puts this
directory into PYTHONPATH when the durability is not the usual one."""

import contextlib
import os

with contextlib.suppress(ImportError):  # a program without the library has no use for it
    if durability := os.environ.get("EXCLUSIVELOG_TEST_DURABILITY"):
        import exclusivelog

        exclusivelog.open.__kwdefaults__["durability"] = durability
