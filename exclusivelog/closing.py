"""What can be closed, as a context manager."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self


class _Closable(Protocol):
    def close(self) -> None:
        """Close it; closing twice does nothing."""


class Closing:
    """Base of classes with a `close()`: `with` calls it at the end of the block."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: _Closable,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
