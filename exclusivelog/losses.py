"""Learning that what a process holds, such as a topic or a lock, is lost."""

from __future__ import annotations

from collections.abc import Callable

from exclusivelog import _core
from exclusivelog.arguments import check_timeout
from exclusivelog.waits import in_slices

__all__ = ["Loss"]


class Loss:
    """Whether a term or a lock is lost, for work that does not send. `term.lost` and `lock.lost`
    are of this class. It is true once the topic or lock is not held any more: taken by another
    process, handed over, given up, or released by closing the engine. It stays true.

    Any thread may use it. It raises LedgerError where the ledger cannot be read any more, as after
    its directory was removed.

    A process can be paused between its look and what it does next: what must not happen after a
    loss has to be a send, or has to pass `epoch` on as a fencing token.

    >>> for term in topic.terms():
    ...     with term:
    ...         if not term.lost:
    ...             print("lead")
    ...         rival = topic.producer("exclusive_with_fencing")
    ...         print(term.lost.wait(timeout=10), bool(term.lost))
    ...     break
    lead
    True True
    """

    def __init__(self, is_held: Callable[[], bool]) -> None:
        self._is_held = is_held
        self._signal = _core.Signal()
        self._told = False

    def _tell(self) -> None:
        """It is lost, or was given up; wakes the threads that wait."""
        self._told = True
        self._signal.set()

    def is_set(self) -> bool:
        """The same as `bool(...)`. It reads the ledger, and does not wait."""
        if not self._told and not self._is_held():
            self._tell()
        return self._told

    def __bool__(self) -> bool:
        return self.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is lost. Returns True then, and False after `timeout` seconds (None, the
        default: without limit). The wait costs no CPU."""
        check_timeout(timeout)
        return in_slices(self._is_set_within, timeout, bool)

    def _is_set_within(self, seconds: float) -> bool:
        # A loss that no callback tells of, such as a closed engine, is seen at the next look.
        return self.is_set() or self._signal.wait(seconds) or self.is_set()

    def __repr__(self) -> str:
        return f"<Loss {self.is_set()}>"
