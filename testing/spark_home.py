"""A home for Spark whose Python processes import pyspark from where it is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def spark_home(home: Path) -> Iterator[Path]:
    """Make it there, and let Spark use it in this block. From the zip, where they look first, each
    of its Python processes compiles pyspark anew: half a second, some dozen times."""
    import pyspark

    installed = Path(pyspark.__file__).parent
    for name in ("bin", "jars"):
        (home / name).symlink_to(installed / name)
    package = home / "python" / "lib" / "pyspark.zip" / "pyspark"
    package.parent.mkdir(parents=True)
    package.symlink_to(installed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(home))
        yield home
