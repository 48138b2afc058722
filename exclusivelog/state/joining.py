"""Writes of a shared map or state in a transaction (rules G3, G11, I8).

The functions of these writes run when they are called, on the newest content and what the
transaction has written so far. Only their results are kept, with the position that they were
computed from. Nothing is locked until the commit, so that a transaction that is never committed
keeps nobody from writing.

The commit waits to own the topic, and then compares the position: if something else was written
since, it appends nothing. The frames are appended under the session of the owner, which the append
compares (rule B2). Meanwhile this process keeps no producer of the topic, so that reads take the
content from the log, whatever interrupts the commit and wherever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from exclusivelog import _core
from exclusivelog.errors import (
    ProducerFencedError,
    StateError,
    TransactionAbortedError,
)
from exclusivelog.foreign import is_raised_by_a_handler
from exclusivelog.messages import Item, message_of
from exclusivelog.transaction import Sender, State, Transaction, Wait

__all__ = ["Joinable", "Overlay", "StateWriter", "writer_in"]

R = TypeVar("R")

# What a write does with the content of its map or state: return (messages, result); and the result
# once those are applied.
Compute = Callable[[Any], tuple[list[Item], R]]
Then = Callable[[Any], R]


class Applies(Protocol):
    """Content that messages change."""

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Apply one message."""


class Owner(Sender, Protocol):
    """The sender of the producer that owns a topic."""

    def was_lost_by(self, error: ProducerFencedError) -> bool:
        """Has it lost its topic by this error?"""


class Joinable(Protocol):
    """A map or state, as its writes in a transaction use it."""

    @property
    def topic(self) -> Any:
        """Its topic."""

    def _call_on(self, compute: Compute[R], content: Any) -> tuple[list[Item], R]:
        """`compute(content)`, which must not call back."""

    def _version(self) -> tuple[int, int]:
        """What differs once anything was written. StateError if a message cannot be applied."""

    def _newest(self) -> Any:
        """The content."""

    def _fork(self) -> Applies:
        """The content, for changes that do not reach it."""

    def _lend(self, locks: _core.Locks, check: Callable[[], object]) -> Owner | Wait:
        """The owner's sender, once the content has caught up, and `check()` has returned. What to
        wait for before another attempt, if others keep the lock of writes, or the topic."""

    def _check_claim(self) -> None:
        """OwnershipLostError if it is bound to a claim that was lost."""

    def _take_back(self, first: int, items: list[Item]) -> None:
        """Own the topic again, and apply the messages that were appended at `first`."""

    def _give_up_lent(self) -> None:
        """Own the topic no more; it is not known what was appended."""


# ---- one map or state in a transaction ---------------------------------------------------


def writer_in(transaction: Transaction, shared: Joinable, ledger: object) -> StateWriter:
    """What this map or state writes in the transaction, so far."""
    found = transaction._writer_to(shared.topic.id, ledger)
    if found is None:
        return StateWriter(shared)
    if not (isinstance(found, StateWriter) and found.shared is shared):
        raise ValueError(
            f"transaction: topic {shared.topic.name!r} is written by another map or state of this "
            "process in it; use one object for each topic"
        )
    return found


class StateWriter:
    """What one map or state writes in a transaction; see `exclusivelog.transaction.Writer`. It does
    not refer to the transaction, which has aborted once the program has dropped it."""

    def __init__(self, shared: Joinable) -> None:
        self.shared = shared
        self._items: list[Item] = []
        self._read: tuple[int, int] | None = None  # what all of it was computed from
        self._content: Applies | None = None  # with its items applied, once that is needed
        self._applied = 0  # items of these
        self._complete = False  # the commit has begun
        self._lent: Owner | None = None  # during the commit

    @property
    def is_new(self) -> bool:
        """Whether the transaction has not written by it yet."""
        return self._read is None

    # ---- before the commit; under the lock of the content, which has caught up -------------

    def write(self, transaction: Transaction, compute: Compute[Any], then: Then[Any] | None) -> Any:
        """Keep the messages of one write, and return its result."""
        self._check_newest(transaction)
        content = self._newest(transaction)
        items, result = self.shared._call_on(compute, content)
        if self._complete:  # by a task that was cancelled, while another one commits
            raise TransactionAbortedError("the commit has begun; this write is no part of it")
        self._items += items
        transaction._join(self.shared.topic.id, self)
        return result if then is None else then(self._newest(transaction))

    def _check_newest(self, transaction: Transaction) -> None:
        """Abort the transaction if something else was written since its first write."""
        now = self.shared._version()
        if self._read is None:
            self._read = now
        elif self._read != now:
            transaction.abort()
            raise self._outdated()

    def _outdated(self) -> TransactionAbortedError:
        return TransactionAbortedError(
            f"topic {self.shared.topic.name!r} was written to since the transaction has read it, "
            "by a write that is not part of it; nothing was committed. Run the transaction again"
        )

    def _newest(self, transaction: Transaction) -> Any:
        """The content with the transaction's own writes."""
        if not self._items:
            return self.shared._newest()
        content = self._content
        if content is None:
            content = self._content = self.shared._fork()
        try:
            for item in self._items[self._applied :]:
                content.apply(*item)
                self._applied += 1
        except Exception as error:
            if is_raised_by_a_handler(error):
                self._content, self._applied = None, 0
                raise
            transaction.abort()
            raise StateError(
                f"topic {self.shared.topic.name!r}: an operation of the transaction could not be "
                f"applied: {error!r}. The transaction was aborted, and nothing was written"
            ) from error
        except BaseException:
            # It is unknown how much was applied: the next write copies the content again.
            self._content, self._applied = None, 0
            raise
        return content

    # ---- the commit ----------------------------------------------------------------------

    def begin(self, transaction: Transaction, locks: _core.Locks) -> Wait | None:
        """Own the topic, check that nothing else was written, and add the messages to the parts.
        Returns what to wait for, holding nothing, if others keep the lock of writes or the topic.
        """

        def check() -> None:
            self._check_newest(transaction)
            self._complete = True

        lent = self.shared._lend(locks, check)
        if isinstance(lent, AbstractContextManager):
            return lent
        self._lent = lent
        transaction._parts.puts[lent] = [self._put] if self._items else []
        return None

    def _put(self, appender: _core.Appender) -> None:
        for item in self._items:
            key, value, properties = message_of(*item)
            appender.add(value, key, properties)

    def refuse(self, error: ProducerFencedError) -> None:
        """Raise what the caller can act on, if this topic was lost."""
        if self._lent is not None and self._lent.was_lost_by(error):
            self.shared._check_claim()
            raise self._outdated() from error

    def end(self, transaction: Transaction, state: State) -> None:
        """Take the topic back, and apply what was appended. Reads find it in the log if that is not
        known."""
        lent = self._lent
        if lent is None or transaction._is_running:
            return
        self._lent = None
        if state == "unknown":
            self.shared._give_up_lent()
        elif state == "committed" and self._items:
            attempt = transaction._parts.attempt
            assert attempt is not None
            self.shared._take_back(attempt.offsets[lent].start, self._items)
        else:
            # By the next attempt, another producer may own the topic.
            transaction._parts.puts.pop(lent, None)
            self.shared._take_back(0, [])


# ---- a map with the writes of a transaction ----------------------------------------------


class Overlay(MutableMapping[bytes, bytes]):
    """A dict with changes that do not reach it. The dict must not change meanwhile.

    Keys come in the order in which they were put, as in the dict once it is changed.

    >>> below = {b"a": b"1", b"b": b"2"}
    >>> above = Overlay(below)
    >>> above[b"c"] = b"3"
    >>> del above[b"a"]
    >>> list(above), list(reversed(above)), below
    ([b'b', b'c'], [b'c', b'b'], {b'a': b'1', b'b': b'2'})
    """

    def __init__(self, below: dict[bytes, bytes]) -> None:
        self._below = below
        self._changed: dict[bytes, bytes] = {}  # keys of the dict that have kept their place
        self._gone: set[bytes] = set()  # keys of the dict that have lost it
        self._added: dict[bytes, bytes] = {}

    def _keeps(self, name: bytes) -> bool:
        return name in self._below and name not in self._gone

    def __getitem__(self, name: bytes) -> bytes:
        if not self._keeps(name):
            return self._added[name]
        found = self._changed.get(name)
        return self._below[name] if found is None else found

    def __setitem__(self, name: bytes, data: bytes) -> None:
        (self._changed if self._keeps(name) else self._added)[name] = data

    def __delitem__(self, name: bytes) -> None:
        if self._keeps(name):
            self._gone.add(name)
            self._changed.pop(name, None)
        else:
            del self._added[name]

    def clear(self) -> None:
        """Remove all keys."""
        self._below = {}
        self._changed, self._gone, self._added = {}, set(), {}

    def __len__(self) -> int:
        return len(self._below) - len(self._gone) + len(self._added)

    def __iter__(self) -> Iterator[bytes]:
        yield from (name for name in self._below if name not in self._gone)
        yield from self._added

    def __reversed__(self) -> Iterator[bytes]:
        yield from reversed(self._added)
        yield from (name for name in reversed(self._below) if name not in self._gone)
