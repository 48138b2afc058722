"""The file system of a path that Spark uses: through the JVM, or for a client of Spark Connect,
which has none, this machine's.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from exclusivelog.foreign import pass_on_foreign
from exclusivelog.spark.errors import PIPELINE, SourceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def is_connect(spark: SparkSession) -> bool:
    """Is this a session of Spark Connect, which has no SparkContext?"""
    return type(spark).__module__.startswith("pyspark.sql.connect")


class Files(Protocol):
    """A few operations of the file system that Spark uses for a path."""

    def absolute(self, path: str) -> str:
        """The absolute path, with its scheme."""
        ...

    def exists(self, path: str) -> bool:
        """Does the path exist?"""
        ...

    def names(self, path: str) -> list[str]:
        """What is in a directory, sorted; nothing if there is none."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or a directory with all that is in it, if it is there."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename to a path that does not exist; OSError if that fails."""
        ...

    def read(self, path: str) -> str | None:
        """A small file's text; None if there is none."""
        ...

    def write(self, path: str, text: str) -> None:
        """Write a small file atomically."""
        ...


def files_of(spark: SparkSession, root: str) -> Files:
    """The file system of this path: Hadoop's, local or not. A client of Spark Connect has no
    Hadoop; SourceError unless the path is local."""
    return LocalFiles(root) if is_connect(spark) else HadoopFiles(spark, root)


def make_durable(path: str) -> None:
    """Flush a file or directory of this machine (an absolute path), with all that is in it and its
    name in the two directories above. Other file systems say themselves when a file is durable."""
    if not path.startswith("file:"):
        return
    place = _local(path)
    _flush(place)
    for folder, _, names in os.walk(place):
        for each in (*(Path(folder, name) for name in names), Path(folder)):
            _flush(each)
    for above in (place.parent, place.parent.parent):
        _flush(above)


# A directory above may be closed to this user, and not all file systems flush directories.
NOT_SINGLY = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EROFS)


def _flush(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        pass_on_foreign(error)
        if error.errno not in NOT_SINGLY:
            raise
        os.sync()  # all that this machine has written


def resolved(path: str) -> str:
    """An absolute path without symbolic links, if it is one of this machine: what is renamed to a
    link would take its place."""
    return f"file:{os.path.realpath(_local(path))}" if path.startswith("file:") else path


class HadoopFiles:
    """Through the JVM of a classic session."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        assert spark.sparkContext._jvm is not None
        self._path: Any = spark.sparkContext._jvm.org.apache.hadoop.fs.Path
        hadoop = spark.sparkContext._jsc.hadoopConfiguration()
        self._fs: Any = self._path(root).getFileSystem(hadoop)

    def absolute(self, path: str) -> str:
        """The absolute path, with its scheme."""
        return str(self._fs.makeQualified(self._path(path)).toString())

    def exists(self, path: str) -> bool:
        """Does the path exist?"""
        return bool(self._fs.exists(self._path(path)))

    def names(self, path: str) -> list[str]:
        """What is in a directory, sorted; nothing if there is none."""
        if not self.exists(path):
            return []
        return sorted(str(s.getPath().getName()) for s in self._fs.listStatus(self._path(path)))

    def remove(self, path: str) -> None:
        """Remove a file or a directory with all that is in it, if it is there."""
        self._fs.delete(self._path(path), True)

    def rename(self, source: str, target: str) -> None:
        """Rename to a path that does not exist; OSError if that fails."""
        if self.exists(target) or not self._fs.rename(self._path(source), self._path(target)):
            raise OSError(f"{source} cannot be renamed to {target}")

    def read(self, path: str) -> str | None:
        """A small file's text; None if there is none."""
        if not self.exists(path):
            return None
        stream = self._fs.open(self._path(path))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        """Write a small file atomically."""
        temporary = f"{path}.writing"
        stream = self._fs.create(self._path(temporary), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self.remove(path)
        self.rename(temporary, path)


class LocalFiles:
    """Of this machine, for a client of Spark Connect. Paths read as Hadoop's do, so that a
    pipeline continues what it began in a classic session."""

    def __init__(self, root: str) -> None:
        if re.match(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:", root):
            raise SourceError(
                PIPELINE,
                f"{root} is not on this machine, and a client of Spark Connect reaches no other "
                "file system; name a local directory, or use a session of "
                "SparkSession.builder.master(...), without remote() and SPARK_REMOTE",
            )

    def absolute(self, path: str) -> str:
        """The absolute path, with its scheme."""
        return f"file:{_local(path)}"

    def exists(self, path: str) -> bool:
        """Does the path exist?"""
        return _local(path).exists()

    def names(self, path: str) -> list[str]:
        """What is in a directory, sorted, without Hadoop's checksums; nothing if there is none."""
        found = os.listdir(_local(path)) if self.exists(path) else []
        return sorted(name for name in found if not re.fullmatch(r"\..*\.crc", name))

    def remove(self, path: str) -> None:
        """Remove a file or a directory with all that is in it, if it is there."""
        place = _local(path)
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        # Hadoop would compare what is written in its place with the checksum of what was there.
        place.with_name(f".{place.name}.crc").unlink(missing_ok=True)

    def rename(self, source: str, target: str) -> None:
        """Rename to a path that does not exist; OSError if that fails."""
        if not self.exists(source):
            raise SourceError(
                PIPELINE,
                f"Spark has not written {source} on this machine; run the pipeline where "
                "the server of Spark Connect and its executors run",
            )
        if self.exists(target):
            raise OSError(f"{source} cannot be renamed to {target}")
        _local(source).rename(_local(target))

    def read(self, path: str) -> str | None:
        """A small file's text; None if there is none."""
        return _local(path).read_text() if self.exists(path) else None

    def write(self, path: str, text: str) -> None:
        """Write a small file atomically."""
        place = _local(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f"{place.name}.writing")
        temporary.write_text(text)
        self.remove(path)
        temporary.rename(place)


def _local(path: str) -> Path:
    """A path with or without the scheme `file`, absolute.

    >>> _local("file:///data/log/"), _local("file:/data//log"), _local("/data/a/../log")
    (PosixPath('/data/log'), PosixPath('/data/log'), PosixPath('/data/log'))
    """
    bare = re.sub(r"/+", "/", path.removeprefix("file:"))
    return Path(os.path.abspath(bare))
