"""Base classes of public objects: those that one process can use, and those with a `close`."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn, Protocol, Self, SupportsIndex


class _Closable(Protocol):
    def close(self) -> None:
        """Close it; closing twice does nothing."""


class OfThisProcess:
    """Base of objects that only the process that made them can use."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be copied, or passed to another process. Pass the path of the "
            "ledger, and open it there"
        )


class Closing(OfThisProcess):
    """Base of classes with a `close()`: `with` calls it at the end of the block. On an object that
    is over, `with` raises, as its other calls do: no block runs that relies on it."""

    __slots__ = ()

    def __enter__(self) -> Self:
        self._check_enters()
        return self

    def _check_enters(self) -> None:
        """Raise if it is over, as far as this process knows. It asks nobody: if that fails, nothing
        would close it."""

    def __exit__(
        self: _Closable,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
