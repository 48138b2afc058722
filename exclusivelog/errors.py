"""Every error that the library raises.

```text
ExclusiveLogError
├── ProducerBusyError            the topic or the producer name is taken
├── ProducerFencedError          this producer, or this request, lost to another owner
│   └── ProducerMovedError       ... because the topic was handed over
├── InvalidEpochError            topic_epoch= is ahead of the topic (also a ValueError)
├── DuplicateSequenceError       this sequence id is in the log already
├── OwnershipError, OwnershipLostError, ReaderFencedError
├── TopicNotFoundError, TopicTerminatedError, OffsetTrimmedError
├── WaitTimeoutError             nothing came in time (also a TimeoutError)
├── TransactionAbortedError
├── StateError                   the applier of a shared state failed
├── EngineClosedError            closed, or inherited by a forked child
└── LedgerError                  the files themselves
    ├── LedgerCorruptedError     a checksum does not hold: .topic, .offsets
    ├── LedgerFullError          the disk, the map or the quota is full
    ├── LedgerVersionError       written by a newer version, or no ledger at all
    └── LedgerIOError            the operating system failed a read, write or flush
```

Three attributes say what to do next:

- `retriable`: the same call may succeed later, with nothing else changed.
- `maybe_written`: the message may be in the log although the call failed (rule B9).
  False on every error but one that struck between the write and its answer.
- `holder`: who has the topic (rule A5), where the error is about somebody else.

>>> issubclass(WaitTimeoutError, TimeoutError) and WaitTimeoutError.retriable
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exclusivelog.types import EngineInfo, OwnerInfo

__all__ = [
    "DuplicateSequenceError",
    "EngineClosedError",
    "ExclusiveLogError",
    "InvalidEpochError",
    "LedgerCorruptedError",
    "LedgerError",
    "LedgerFullError",
    "LedgerIOError",
    "LedgerVersionError",
    "OffsetTrimmedError",
    "OwnershipError",
    "OwnershipLostError",
    "ProducerBusyError",
    "ProducerFencedError",
    "ProducerMovedError",
    "ReaderFencedError",
    "StateError",
    "TopicNotFoundError",
    "TopicTerminatedError",
    "TransactionAbortedError",
    "WaitTimeoutError",
]


class ExclusiveLogError(Exception):
    """The root of every error of this library."""

    retriable: bool = False
    maybe_written: bool = False
    holder: OwnerInfo | None = None

    def __init__(self, message: str, *, holder: OwnerInfo | None = None) -> None:
        super().__init__(message)
        if holder is not None:
            self.holder = holder


class ProducerBusyError(ExclusiveLogError):
    """The topic, or the producer's name, is held by a live session (rules A1, A3, A6)."""

    retriable = True


class ProducerFencedError(ExclusiveLogError):
    """Exclusive access is somebody else's. Final for this producer: open a new one (rule B4)."""


class ProducerMovedError(ProducerFencedError):
    """The topic was handed over (rule E2). `successor` says to whom."""

    successor: EngineInfo | None = None


class InvalidEpochError(ExclusiveLogError, ValueError):
    """`topic_epoch` is higher than the topic's epoch ever was (rule B5)."""


class DuplicateSequenceError(ExclusiveLogError):
    """A message with this sequence id, or a later one, is in the log already (rule G2).

    Nothing was appended. After a crash this is good news: the message that was
    sent again had arrived.
    """

    def __init__(self, message: str, *, sequence_id: int, last_sequence_id: int) -> None:
        super().__init__(message)
        self.sequence_id = sequence_id
        self.last_sequence_id = last_sequence_id


class OwnershipError(ExclusiveLogError):
    """A claim was refused: a live owner has a higher generation, or the one asked for is over
    (rules F2, F3). Retriable where there is an owner, who may go."""


class OwnershipLostError(ExclusiveLogError):
    """A claim was severed by a later one (rule F5)."""


class ReaderFencedError(ExclusiveLogError):
    """A later reader of the same group took over (rule F6)."""


class TopicNotFoundError(ExclusiveLogError, KeyError):
    """There is no such topic, and `create=False` was asked for."""

    __str__ = Exception.__str__


class TopicTerminatedError(ExclusiveLogError):
    """The topic is sealed: it can be read, never again written (rule G8)."""


class OffsetTrimmedError(ExclusiveLogError):
    """The position asked for lies before the topic's first offset (rule G8)."""


class WaitTimeoutError(ExclusiveLogError, TimeoutError):
    """Nothing came within the timeout. Nothing is left behind (rules A2, D5)."""

    retriable = True


class TransactionAbortedError(ExclusiveLogError):
    """The transaction was rolled back; none of it is in the log (rule G3)."""


class StateError(ExclusiveLogError):
    """An applier failed at a message: this state goes no further, and what it was is lost to
    nobody: the message is in the log (rule I3). Open the state again with one that can."""


class EngineClosedError(ExclusiveLogError):
    """The engine is closed, or was inherited through fork() (rule C5). Open a new one."""


class LedgerError(ExclusiveLogError):
    """Something is wrong with the ledger's files (rule H2)."""


class LedgerCorruptedError(LedgerError):
    """Damage: a checksum or a structure does not hold (rule G9).

    `topic` names the topic, `offsets` the messages that cannot be read. The rest stays
    readable: `reader.seek(error.offsets.stop)` steps over the damage.
    """

    def __init__(
        self, message: str, *, topic: str | None = None, offsets: range = range(0)
    ) -> None:
        super().__init__(message)
        self.topic = topic
        self.offsets = offsets


class LedgerFullError(LedgerError):
    """Disk, quota or map is full. Nothing was written; works again when there is room."""

    retriable = True


class LedgerVersionError(LedgerError):
    """The files are of a newer format, or not a ledger's at all."""


class LedgerIOError(LedgerError):
    """A read, write or flush failed. What was not acknowledged may or may not be in the log.

    The engine refuses everything from then on: close it and open it again.
    """

    maybe_written = True
