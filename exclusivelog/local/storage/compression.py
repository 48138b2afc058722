"""Compression of stored entries: the methods, and the libraries that implement them.

With a topic's setting "lz4", its new entries are compressed by LZ4. With "zstd", they are, too, and
older ones are compressed again by Zstandard, in the background. The libraries are optional: an
operation whose library is missing raises MissingLibraryError. The compiled core asks this module
for a method by its number. If the system has liblz4, the core decompresses with that, in the
reading thread and, ahead of it, in a second one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from exclusivelog import _core
from exclusivelog.errors import MissingLibraryError

LZ4, ZSTD = 1, 2  # the numbers in entries
ZSTD_LEVEL = 9
NEW = {"lz4": LZ4, "zstd": LZ4}  # {setting: the method of new entries}
OLD = {"zstd": ZSTD}  # {setting: the method by which older ones are compressed again}

Compress = Callable[[bytes], bytes]
Decompress = Callable[[memoryview, int], bytes]


class Method(NamedTuple):
    """A way to compress bytes. `decompress(data, size)` raises ValueError where `data` is not a
    compressed block of that size; it never makes more than that."""

    name: str
    compress: Compress
    decompress: Decompress


def _load_lz4() -> Method:
    import lz4.block

    _core.use_system_lz4(LZ4)  # faster: without a copy, and by a second thread

    def decompress(data: memoryview, size: int) -> bytes:
        try:
            found: bytes = lz4.block.decompress(data, uncompressed_size=size)
        except lz4.block.LZ4BlockError as error:
            raise ValueError(f"it is not decompressed to {size} bytes: {error}") from None
        return found

    return Method("lz4", functools.partial(lz4.block.compress, store_size=False), decompress)


def _load_zstd() -> Method:
    import zstandard

    own = threading.local()  # one object per thread: they are not thread-safe

    def compress(data: bytes) -> bytes:
        if not hasattr(own, "compressor"):
            own.compressor = zstandard.ZstdCompressor(
                level=ZSTD_LEVEL, write_checksum=False, write_dict_id=False
            )
        made: bytes = own.compressor.compress(data)
        return made

    def decompress(data: memoryview, size: int) -> bytes:
        if not hasattr(own, "decompressor"):
            own.decompressor = zstandard.ZstdDecompressor()
        try:
            # The library allocates as much memory as the block's header states.
            if zstandard.frame_content_size(data) != size:
                raise ValueError(f"its header does not state {size} bytes")
            found: bytes = own.decompressor.decompress(
                data, max_output_size=size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise ValueError(f"it is not decompressed to {size} bytes: {error}") from None
        return found

    return Method("zstd", compress, decompress)


LOADERS: dict[int, tuple[str, str, Callable[[], Method]]] = {  # (name and extra, package, loader)
    LZ4: ("lz4", "lz4", _load_lz4),
    ZSTD: ("zstd", "zstandard", _load_zstd),
}
_loaded: dict[int, Method] = {}


def method(number: int, who: str = "an entry") -> Method:
    """The method with this number. Errors name `who` as the one that needs it: MissingLibraryError
    if the library is not installed, ValueError if this version does not know the number."""
    found = _loaded.get(number)
    if found is None:
        if number not in LOADERS:
            raise ValueError(f"this version does not know its compression method {number}")
        extra, package, load = LOADERS[number]
        try:
            found = _loaded[number] = load()
        except ImportError as error:
            raise MissingLibraryError(
                f"{who} is compressed by {extra}, and the Python package {package} cannot be "
                f"imported ({error}); pip install 'exclusivelog[{extra}]'"
            ) from error
    return found


@contextlib.contextmanager
def naming(topic: str) -> Iterator[None]:
    """Name the topic in the error for a missing library, while the block runs."""
    try:
        yield
    except MissingLibraryError as error:
        raise MissingLibraryError(f"topic {topic!r}: {error}") from error


@functools.cache
def installed() -> tuple[str, ...]:
    """The names of the methods whose libraries seem to be installed; imports none."""
    return tuple(name for name, package, _ in LOADERS.values() if importlib.util.find_spec(package))


def needed(setting: str) -> set[str]:
    """The names of the methods that a setting uses."""
    numbers = {NEW[setting], OLD.get(setting, NEW[setting])}
    return {LOADERS[number][0] for number in numbers}


def check_setting(setting: str, topic: str) -> None:
    """MissingLibraryError unless this process has the libraries for a setting of this topic."""
    for number in (NEW[setting], OLD.get(setting)):
        if number is not None:
            method(number, f"topic {topic!r}")


def compressed(entry: bytes, number: int, topic: str) -> bytes:
    """The entry, compressed by this method if that saves room; errors name `topic`."""
    return _core.compress(entry, number, method(number, f"topic {topic!r}").compress)


def _find(number: int) -> tuple[str, Decompress]:
    found = method(number)
    return found.name, found.decompress


_core.use_codecs(_find)
