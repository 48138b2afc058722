"""Every error that the library raises.

```text
ExclusiveLogError
├── ProducerBusyError            the topic or the producer name is taken
├── ProducerFencedError          another producer took the topic, or holds it
│   ├── ProducerMovedError       ... because the topic was handed over
│   └── ProducerRevokedError     ... because its claim was lost (also an OwnershipLostError)
├── InvalidEpochError            topic_epoch= is ahead of the topic (also a ValueError)
├── DuplicateSequenceError       this sequence id is in the log already
├── OwnershipError               a claim was refused
├── OwnershipLostError           a claim is lost: revoked, released or handed over
├── ReaderFencedError            a later reader of the group took over, or the group moved
├── TopicNotFoundError, TopicTerminatedError, OffsetTrimmedError
├── DeserializationError         a deserializer cannot read a message (also a ValueError)
├── WaitTimeoutError             the timeout has passed (also a TimeoutError)
├── TransactionAbortedError      the transaction was rolled back
├── StateError                   the applier of a shared state failed
├── EngineClosedError            closed, or inherited by a forked child
├── UnsupportedError             this kind of engine cannot do that (also a NotImplementedError)
├── ClusterError                 a cluster cannot be used as it is: unreachable, refused, full
│   └── MirrorMismatchError      source and target of a mirror disagree: .topic, .offset
└── LedgerError                  something is wrong with the ledger's files (also an OSError)
    ├── MissingLibraryError      a compressed topic needs a library that is not installed
    ├── LedgerCorruptedError     a checksum is wrong: .topic, .offsets
    ├── LedgerFullError          the disk, the map or the quota is full
    ├── LedgerVersionError       another format or version, or not a ledger
    └── LedgerIOError            the operating system failed a read, write or flush
```

Attributes for what to do next:

- `retriable`: the same call may succeed later, without any other change.
- `maybe_written`: the message may be in the log, or may still enter it, although the call failed
  (rule B9). True after an error between the write and its acknowledgement, and after the timeout of
  a send.
- `holder`: the session that holds the topic, if the error is about another producer (rule A5).
- `successor` (of ProducerMovedError, OwnershipLostError and ReaderFencedError): the engine that the
  topic or claim was handed over to, or None.

>>> issubclass(WaitTimeoutError, TimeoutError) and WaitTimeoutError.retriable
True
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from exclusivelog._core import use_errors
from exclusivelog.foreign import is_raised_by_a_handler

if TYPE_CHECKING:
    from exclusivelog.types import EngineInfo, OwnerInfo

__all__ = [
    "ClusterError",
    "DeserializationError",
    "DuplicateSequenceError",
    "EngineClosedError",
    "ExclusiveLogError",
    "InvalidEpochError",
    "LedgerCorruptedError",
    "LedgerError",
    "LedgerFullError",
    "LedgerIOError",
    "LedgerVersionError",
    "MirrorMismatchError",
    "MissingLibraryError",
    "OffsetTrimmedError",
    "OwnershipError",
    "OwnershipLostError",
    "ProducerBusyError",
    "ProducerFencedError",
    "ProducerMovedError",
    "ProducerRevokedError",
    "ReaderFencedError",
    "StateError",
    "TopicNotFoundError",
    "TopicTerminatedError",
    "TransactionAbortedError",
    "UnsupportedError",
    "WaitTimeoutError",
]


class ExclusiveLogError(Exception):
    """Base class of all errors of this library.

    >>> try:
    ...     engine.topic("order", create=False)
    ... except xl.ExclusiveLogError as error:
    ...     print(type(error).__name__, error.retriable, error.maybe_written)
    TopicNotFoundError False False
    """

    retriable: bool = False
    maybe_written: bool = False
    holder: OwnerInfo | None = None

    def __init__(self, message: str, *, holder: OwnerInfo | None = None) -> None:
        super().__init__(message)
        if holder is not None:
            self.holder = holder

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy all attributes: `__init__` may take more than the message."""
        state = dict(self.__dict__)
        if isinstance(self, OSError):
            state["errno"] = self.errno  # not in __dict__
        return _restored, (type(self), self.args, state)


def _restored(
    kind: type[ExclusiveLogError], args: tuple[Any, ...], state: dict[str, Any]
) -> ExclusiveLogError:
    error = kind.__new__(kind, *args)
    error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error


def describe_engine(engine: EngineInfo) -> str:
    """Text that identifies an engine in an error message."""
    return f"engine {engine.name!r} (id {engine.id}, pid {engine.pid})"


class ProducerBusyError(ExclusiveLogError):
    """The topic, or the producer's name, is held by a live session (rules A1, A3, A6).

    >>> leader = topic.producer("exclusive")
    >>> topic.producer("shared")
    Traceback (most recent call last):
        ...
    exclusivelog.errors.ProducerBusyError: topic 'orders' ...
    """

    retriable = True


class ProducerFencedError(ExclusiveLogError):
    """Another producer took the topic, or holds it. This is final for the producer (rule B4).

    Open a new one.

    >>> leader = topic.producer("exclusive")
    >>> successor = topic.producer("exclusive_with_fencing")
    >>> leader.send(b"too late")
    Traceback (most recent call last):
        ...
    exclusivelog.errors.ProducerFencedError: topic 'orders': producer ... was fenced; ...
    >>> leader.state
    'fenced'
    """


class ProducerMovedError(ProducerFencedError):
    """The topic was handed over (rule E2). `successor` is the destination: id, name, pid,
    properties.

    >>> def send(producer, value):
    ...     try:
    ...         producer.send(value)
    ...     except xl.ProducerMovedError as moved:
    ...         print("ask", moved.successor.name, "at", moved.successor.properties["address"])
    """

    successor: EngineInfo | None = None


class InvalidEpochError(ExclusiveLogError, ValueError):
    """`topic_epoch` is higher than the topic's epoch (rule B5).

    >>> topic.producer("exclusive", topic_epoch=7)
    Traceback (most recent call last):
        ...
    exclusivelog.errors.InvalidEpochError: ...
    """


class DuplicateSequenceError(ExclusiveLogError):
    """A message with this sequence id, or a later one, is in the log already (rule G2).

    Nothing was appended. `repeated` tells the two cases apart:

    - True: the producer's last message in the log has just this sequence id. If the message was
      sent again, after a crash or an unknown outcome, the first attempt had succeeded.
    - False: a later one is in the log. The log keeps only the last id of a producer, so whether
      there was ever a message with this one is not known: it may be lost if it is not sent under
      an id above `last_sequence_id`. Or the ids do not grow within a transaction: then no message
      of that is in the log, and `last_sequence_id` is the last one that is.

    >>> shared = topic.producer(name="feed")
    >>> shared.send(b"x", sequence_id=7)
    0
    >>> try:
    ...     shared.send(b"x", sequence_id=7)
    ... except xl.DuplicateSequenceError as error:
    ...     print(error.sequence_id, error.last_sequence_id, error.repeated)
    7 7 True
    >>> try:
    ...     shared.send(b"y", sequence_id=3)
    ... except xl.DuplicateSequenceError as error:
    ...     print(error.sequence_id, error.last_sequence_id, error.repeated)
    3 7 False
    """

    def __init__(
        self, message: str, *, sequence_id: int, last_sequence_id: int, count: int = 1
    ) -> None:
        super().__init__(message)
        self.sequence_id = sequence_id  # of the first message
        self.last_sequence_id = last_sequence_id
        self.count = count  # of messages that were to be appended together

    @property
    def repeated(self) -> bool:
        """Whether the last message of the producer is this one, or the last one of these."""
        return self.last_sequence_id == self.sequence_id + self.count - 1


def duplicate_sequence(
    topic: str, producer: str, sequence: int, last: int, count: int = 1
) -> DuplicateSequenceError:
    """The error for messages with the ids from `sequence` on, where `last` is in the log, or on its
    way to it.

    >>> print(duplicate_sequence("orders", "feed", 3, 7))  # doctest: +ELLIPSIS
    topic 'orders': producer 'feed' has sent sequence id 7 last; 3 is below it, and was not ...
    """
    error = DuplicateSequenceError("", sequence_id=sequence, last_sequence_id=last, count=count)
    error.args = (
        f"topic {topic!r}: producer {producer!r} has sent sequence id {last} last; "
        + (
            "the same message was sent again, and was not appended a second time"
            if error.repeated
            else f"{sequence} is below it, and was not appended. Ids must grow: go on with "
            f"{last + 1}"
        ),
    )
    return error


def not_growing(
    topic: str, producer: str, sequence: int, before: int, last: int, count: int = 1
) -> DuplicateSequenceError:
    """The error for messages with the ids from `sequence` on, if the same transaction has the id
    `before` already, and the log has nothing behind `last`.

    >>> print(not_growing("orders", "feed", 8, 9, 7))  # doctest: +ELLIPSIS
    topic 'orders': producer 'feed' sends sequence id 8 behind 9 in a transaction; nothing of it ...
    """
    return DuplicateSequenceError(
        f"topic {topic!r}: producer {producer!r} sends sequence id {sequence} behind {before} in a "
        "transaction; nothing of it was appended. Give each message an id above the one before",
        sequence_id=sequence,
        last_sequence_id=last,
        count=count,
    )


class OwnershipError(ExclusiveLogError):
    """A claim was refused because its generation is too low (rules F2, F3).

    If a live owner has a higher generation, the error is retriable: that owner may leave. If the
    resource had a higher generation before, claim it with None or a higher one.

    >>> claim = engine.own({"shard-7": 5})
    >>> engine.own({"shard-7": 4})
    Traceback (most recent call last):
        ...
    exclusivelog.errors.OwnershipError: ...
    """


class _SuccessorError(ExclusiveLogError):
    """An error that may name the engine that took over."""

    successor: EngineInfo | None = None

    def __init__(
        self, message: str, *, holder: OwnerInfo | None = None, successor: EngineInfo | None = None
    ) -> None:
        super().__init__(message, holder=holder)
        self.successor = successor


class OwnershipLostError(_SuccessorError):
    """A claim was revoked by a later one, released, or handed over with its topic (rule F5).

    After a hand-over, `successor` is the destination: id, name, pid, properties.

    >>> claim, later = engine.own({"shard-7": None}), engine.own({"shard-7": None})
    >>> claim.check()
    Traceback (most recent call last):
        ...
    exclusivelog.errors.OwnershipLostError: ...
    """


class ProducerRevokedError(ProducerFencedError, OwnershipLostError):
    """The claim that this producer was bound to was lost, and the producer with it (rules B4, F5).

    Make a new claim, and open a new producer.

    >>> claim = engine.own({"shard-7": None})
    >>> bound = topic.producer(claim=claim)
    >>> later = engine.own({"shard-7": None})
    >>> bound.send(b"too late")
    Traceback (most recent call last):
        ...
    exclusivelog.errors.ProducerRevokedError: topic 'orders': ...
    """


class ReaderFencedError(_SuccessorError):
    """A later reader of the same group took over, or the group was handed over with its topic
    (rule F6). After a hand-over, `successor` is the destination.

    >>> first, second = topic.reader(group="billing"), topic.reader(group="billing")
    >>> first.commit()
    Traceback (most recent call last):
        ...
    exclusivelog.errors.ReaderFencedError: ...
    """


class TopicNotFoundError(ExclusiveLogError, KeyError):
    """There is no such topic, and the call does not create one. The message has similar names.

    >>> engine.topic("order", create=False)
    Traceback (most recent call last):
        ...
    exclusivelog.errors.TopicNotFoundError: ...
    """

    __str__ = Exception.__str__


class TopicTerminatedError(ExclusiveLogError):
    """The topic is terminated: it can be read, but not written again (rule G8).

    >>> _ = topic.terminate()
    >>> topic.producer()
    Traceback (most recent call last):
        ...
    exclusivelog.errors.TopicTerminatedError: ...
    """


class OffsetTrimmedError(ExclusiveLogError):
    """The requested position lies before the topic's first offset (rule G8).

    >>> _ = topic.producer().send_many([b"a", b"b", b"c"])
    >>> topic.trim(before=2)
    2
    >>> topic.reader(0).read_next(timeout=1)
    Traceback (most recent call last):
        ...
    exclusivelog.errors.OffsetTrimmedError: ...
    """


class DeserializationError(ExclusiveLogError, ValueError):
    """The reader's deserializer raised an error at a message; that error is the `__cause__`.

    - `topic`, `offset`: the message. `part`: "value" or "key".
    - `raw`: the bytes of that part as they are in the log.
    - `key`: in a shared map, the bytes of the key whose value, or which itself, cannot be read.

    The message counts as read: the next read returns the one after it.
    `reader.seek(error.offset)` reads it again.

    >>> _ = topic.producer().send(b"no JSON")
    >>> try:
    ...     next(topic.reader(deserializer="json")).value
    ... except xl.DeserializationError as error:
    ...     print(error.topic, error.offset, error.part, error.raw)
    orders 0 value b'no JSON'
    """

    def __init__(
        self,
        message: str,
        *,
        topic: str = "",
        offset: int = -1,
        part: str = "value",
        raw: bytes = b"",
        key: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.topic, self.offset, self.part, self.raw, self.key = topic, offset, part, raw, key


LONGEST_CAUSE = 200  # characters of a deserializer's error


def undeserialised(topic: str, offset: int, part: str, raw: bytes, cause: Exception) -> Exception:
    """The error for a part of a message at which a deserializer raised `cause`; `cause` itself if a
    signal handler has raised it meanwhile, such as a time limit: the part may be sound."""
    if is_raised_by_a_handler(cause):
        return cause
    why = " ".join(f"{type(cause).__name__}: {cause}".split())
    if len(why) > LONGEST_CAUSE:
        why = f"{why[:LONGEST_CAUSE]}..."
    return DeserializationError(
        f"topic {topic!r}: the {part} at offset {offset} cannot be deserialised. {why}. This error "
        f"has its {len(raw)} bytes as `raw`; the reader continues after this message",
        topic=topic,
        offset=offset,
        part=part,
        raw=raw,
    )


class WaitTimeoutError(ExclusiveLogError, TimeoutError):
    """The timeout has passed. A request for a topic was removed (rules A2, D5). A send may still be
    committed if `maybe_written` is True.

    >>> topic.reader().read_next(timeout=0.01)
    Traceback (most recent call last):
        ...
    exclusivelog.errors.WaitTimeoutError: ...
    """

    retriable = True


class TransactionAbortedError(ExclusiveLogError):
    """The transaction was rolled back, and none of it is in the log (rule G3).

    A commit raises it if a map or state was written to since the transaction first wrote to it
    (rule I8): run the whole transaction again.

    >>> txn = engine.transaction()
    >>> txn.abort()
    >>> txn.commit()
    Traceback (most recent call last):
        ...
    exclusivelog.errors.TransactionAbortedError: ...
    """


class StateError(ExclusiveLogError):
    """An applier failed at a message; the message remains in the log (rule I3).

    This state applies no further messages. Open it again with an applier that can.

    >>> with xl.SharedMap(engine.topic("settings")) as settings:
    ...     settings.put("limit", 10)
    >>> xl.SharedState(engine.topic("settings"), dict, lambda state, op: None)
    Traceback (most recent call last):
        ...
    exclusivelog.errors.StateError: ...
    """


class UnsupportedError(ExclusiveLogError, NotImplementedError):
    """This kind of engine does not support the call. `Engine.supports` checks that before.

    >>> engine.supports("transactions")
    True
    """


class ClusterError(ExclusiveLogError):
    """A cluster cannot be used as it is: it is unreachable or full, it refuses a call, or its
    policies could lose messages. The error's text names the cluster, the cause and what to do.

    >>> def open_or_tell(url):
    ...     try:
    ...         return xl.open(url)
    ...     except xl.ClusterError as error:
    ...         print("no cluster:", error)
    """


class MirrorMismatchError(ClusterError):
    """Source and target of a mirror disagree (rule J4). Nothing was written.

    `topic` names the topic, `offset` the first offset at which they differ.

    >>> error = MirrorMismatchError("they differ", topic="orders", offset=7)
    >>> error.topic, error.offset
    ('orders', 7)
    """

    def __init__(self, message: str, *, topic: str, offset: int) -> None:
        super().__init__(message)
        self.topic = topic
        self.offset = offset


class EngineClosedError(ExclusiveLogError):
    """The engine is closed, or was inherited through fork() (rule C5). Open a new one.

    >>> engine.close()
    >>> engine.topic("orders")
    Traceback (most recent call last):
        ...
    exclusivelog.errors.EngineClosedError: ...
    """


class LedgerError(ExclusiveLogError, OSError):
    """Something is wrong with the ledger's files (rule H2).

    It is an OSError, too. `errno` is the system's code, such as `errno.ENOSPC`, if a system call
    failed, and else None; the message names the file.

    >>> import errno
    >>> isinstance(LedgerFullError("full"), OSError), LedgerFullError("full").errno == errno.ENOSPC
    (True, True)
    """

    usual_errno: int | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = self.usual_errno


class LedgerCorruptedError(LedgerError):
    """The ledger is damaged: a checksum or a structure is wrong (rule G9).

    `topic` names the topic, `offsets` the messages that cannot be read. The other messages stay
    readable: `reader.seek(error.offsets.stop)` skips the damaged ones.

    >>> def values(reader):
    ...     while reader.has_message_available():
    ...         try:
    ...             yield from reader.values()
    ...         except xl.LedgerCorruptedError as damage:
    ...             print(damage.topic, "cannot be read at", damage.offsets)
    ...             reader.seek(damage.offsets.stop)
    """

    def __init__(
        self, message: str, *, topic: str | None = None, offsets: range = range(0)
    ) -> None:
        super().__init__(message)
        self.topic = topic
        self.offsets = offsets


class LedgerFullError(LedgerError):
    """The disk, the quota or the map is full. Nothing was written. The call succeeds once there is
    room.

    >>> LedgerFullError("the disk is full").retriable
    True
    """

    retriable = True
    usual_errno = errno.ENOSPC


class LedgerVersionError(LedgerError):
    """This version cannot open the ledger.

    The ledger has another format, the files are not a ledger, or an engine of an incompatible
    version has it open. The message names the format, the version that opens it, and what to do
    (see `upgrade`).

    >>> def open_or_upgrade(path):
    ...     try:
    ...         return xl.open(path)
    ...     except xl.LedgerVersionError:
    ...         xl.upgrade(path)
    ...         return xl.open(path)
    """


class MissingLibraryError(LedgerError):
    """A topic is compressed, and the compression library cannot be imported.

    The message names the topic and the extra that installs the library. Nothing was changed.

    >>> issubclass(MissingLibraryError, LedgerError)
    True
    """


def called_reentrantly(what: str) -> LedgerError:
    """The error for a call that would wait for a lock that its own thread holds."""
    return LedgerError(
        f"{what}: called re-entrantly, from a signal handler or a finalizer that interrupted "
        "another call of the same thread; call it from another thread"
    )


class LedgerIOError(LedgerError):
    """A read, write or flush failed. Messages that were not acknowledged may be in the log.

    The engine refuses every call from then on: close it and open it again.

    >>> def send(producer, value):
    ...     try:
    ...         return producer.send(value, sequence_id=producer.last_sequence_id + 1)
    ...     except xl.LedgerIOError as error:
    ...         print("open the ledger again, and send the same id; written:", error.maybe_written)
    """

    maybe_written = True
    usual_errno = errno.EIO


use_errors(closed=EngineClosedError, timeout=WaitTimeoutError, undeserialised=undeserialised)
