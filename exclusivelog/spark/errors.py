"""Errors with stable codes. Spark passes on only the text of an exception, in which programs find
the code.

```text
[EXCLUSIVELOG_OPTION]            an option is missing, unknown or contradicts another one
[EXCLUSIVELOG_SCHEMA]            columns that do not exist, or have another type
[EXCLUSIVELOG_OVERWRITE]         a log is only ever appended to
[EXCLUSIVELOG_DATA_LOSS]         offsets that are not there (any more), with failOnDataLoss=true
[EXCLUSIVELOG_REMOTE_EXECUTOR]   an executor cannot open the ledger's files
[EXCLUSIVELOG_STAGING]           an executor's staged output does not reach the driver
[EXCLUSIVELOG_PIPELINE]          a pipeline cannot go on, or found something wrong
```

and one for each error of the library, named after its class: `ProducerFencedError` is
`[EXCLUSIVELOG_PRODUCER_FENCED]`, `LedgerCorruptedError` `[EXCLUSIVELOG_LEDGER_CORRUPTED]`, and
so on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from exclusivelog.errors import ExclusiveLogError

OPTION, SCHEMA, OVERWRITE = "OPTION", "SCHEMA", "OVERWRITE"
DATA_LOSS, REMOTE_EXECUTOR, STAGING = "DATA_LOSS", "REMOTE_EXECUTOR", "STAGING"
PIPELINE = "PIPELINE"


class SourceError(ExclusiveLogError):
    """An error of the data source or a pipeline. `code` is without its prefix.

    >>> error = SourceError("OPTION", "topic is missing")
    >>> error.code, str(error)
    ('OPTION', '[EXCLUSIVELOG_OPTION] topic is missing')
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"[EXCLUSIVELOG_{code}] {text}")
        self.code = code


def code_of(error: ExclusiveLogError) -> str:
    """The code of one of the library's errors.

    >>> from exclusivelog import LedgerIOError, ProducerFencedError
    >>> code_of(ProducerFencedError("gone")), code_of(LedgerIOError("disk"))
    ('PRODUCER_FENCED', 'LEDGER_IO')
    """
    name = type(error).__name__.removesuffix("Error")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


@contextlib.contextmanager
def coded() -> Iterator[None]:
    """Translate errors of the library in the block into SourceError."""
    try:
        yield
    except SourceError:
        raise
    except ExclusiveLogError as error:
        raise SourceError(code_of(error), str(error)) from error


# ---- what a machine lacks ----------------------------------------------------------------

NO_JAVA = (
    "Spark needs Java 17 or newer, and there is none; on Debian: "
    "apt-get install openjdk-17-jre-headless (or set JAVA_HOME)"
)
NO_PYSPARK = "this needs PySpark: pip install 'exclusivelog[spark]'"


def java() -> str | None:
    """The Java that Spark would start; None if there is none."""
    home = os.environ.get("JAVA_HOME")
    if home and Path(home, "bin", "java").exists():
        return str(Path(home, "bin", "java"))
    return shutil.which("java")


def missing() -> str | None:
    """What Spark lacks on this machine, with the way to install it; None if nothing.

    >>> missing() is None or missing().startswith(("Spark needs", "this needs"))
    True
    """
    try:
        import pyspark  # noqa: F401
    except ImportError:
        return NO_PYSPARK
    return None if java() else NO_JAVA
