"""One topic of Apache Pulsar as an ordered log.

A Pulsar topic without partitions has one order of messages, which all of its readers see:
`exclusivelog.cluster.rule` needs nothing else. The producers here are *shared* ones, which any
number of processes may have at the same time: a stale owner may append records, and the rule
ignores them. Safety does not depend on Pulsar's exclusive producers, nor on its deduplication,
which only saves space.

- A record is one Pulsar message. The client does not batch: the broker's deduplication would drop
  messages of a batch that are not stored.
- After an error or a time limit, earlier sends are in doubt: they may be stored, or will be.
- For a duplicate, the broker answers (-1,-1) instead of the stored message's position.
- A position is ledger, entry and index in a batch (of another program), big-endian.

>>> log = PulsarLog(Access.parse("pulsar://broker:6650/tenant/space"), "orders")  # doctest: +SKIP
>>> log.append(b"record")                                                        # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from exclusivelog import _core
from exclusivelog.closing import Closing
from exclusivelog.cluster.frames import MAX_BYTES
from exclusivelog.cluster.native import Native, stay
from exclusivelog.cluster.ordered import Answer, Answered, Position, Record, Tail, ignore
from exclusivelog.cluster.pulsar import AWAY, FENCED, PASSING, Access, Cluster, admitted, meaning_of
from exclusivelog.errors import (
    ClusterError,
    EngineClosedError,
    ExclusiveLogError,
    LedgerIOError,
    OffsetTrimmedError,
)
from exclusivelog.foreign import Ignoring

__all__ = ["PulsarLog"]

PLACE = struct.Struct(">QQI")  # ledger, entry, index in the batch + 1 (0: no batch)
PENDING_APPENDS = 256  # appends without an answer, more than the 64 unread frames of a writer
AHEAD_RECORDS = 64  # records that a tail's client prefetches
CLOSE_SECONDS = 2.0  # for the broker to answer, before the connection is cut off
OPEN_SECONDS = 0.1  # between attempts to open a reader again
BUSY_SECONDS = 0.05  # between attempts to open a producer that another one excludes
WAKE_SECONDS = 1.0  # interval at which a waiting tail checks whether it was closed
# After so long without a message, ask the reader whether there is one. If there is, but it does not
# come, open the reader again: a topic that is deleted meanwhile never sends it.
PATIENCE_SECONDS = 5.0

# Names of the client's results that mean that nothing was sent.
NOT_SENT = ("ProducerQueueIsFull", "MemoryBufferIsFull", "MessageTooBig")
# Names of the results after which a producer is unusable.
ENDED = ("ProducerFenced", "ProducerBusy", "AlreadyClosed", "ProducerNotInitialized")


# ---- positions ---------------------------------------------------------------------------


def _position(place: Any) -> Position:
    """The position of a Pulsar message id."""
    return Position(PLACE.pack(place.ledger_id(), place.entry_id(), place.batch_index() + 1))


def _place_of(message: Any) -> Position | None:
    return None if message is None else _position(message.message_id())


def _record_of(message: Any) -> Record | None:
    return None if message is None else Record(_position(message.message_id()), message.data())


def _unpack(position: Position) -> tuple[int, int, int]:
    if len(position) != PLACE.size:
        raise ValueError(f"after={position!r} is no position of a Pulsar topic")
    ledger, entry, index = PLACE.unpack(position)
    return ledger, entry, index - 1


def _follows(position: Position, last: Position) -> bool:
    """Can `position` directly follow `last`? Pulsar numbers the entries of a ledger from 0, without
    gaps."""
    (ledger, entry, _), (last_ledger, last_entry, _) = _unpack(position), _unpack(last)
    return entry <= last_entry + 1 if ledger == last_ledger else entry == 0


# ---- the log -----------------------------------------------------------------------------


class PulsarLog(Closing):
    """The ordered log in one topic of Pulsar; it has a connection of its own.

    - `topic`: its name in a ledger; `pulsar.topic_name` is the name in Pulsar. It is made if there
      is none.
    - `timeout`: seconds within which the broker has to answer a call. An append without an answer
      is unknown after that.
    - `check_policies`: ask the admin API whether the namespace keeps all messages.

    Raises `ClusterError` if the topic cannot be used, or its messages could be removed.

    In a forked child its calls raise `EngineClosedError`, and closing it does nothing (rule C5)."""

    max_bytes = MAX_BYTES

    def __init__(
        self, access: Access, topic: str, *, timeout: float = 30.0, check_policies: bool = True
    ) -> None:
        self.topic, self._timeout = topic, timeout
        self._cluster = Cluster(access, timeout)
        self._closed = False
        try:
            if check_policies:
                self._cluster.check_policies()
            self._address = self._cluster.address(topic)
            self._client = Native(self._cluster.client, repr(self))
            self._sender = _Sender(self._cluster, self._client, self._address, timeout)
        except BaseException:
            self._cluster.close()
            raise

    def __repr__(self) -> str:
        return f"PulsarLog({self._cluster.access.url!r}, {self.topic!r})"

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        """Append a record, without waiting for the broker's answer."""
        if len(data) > self.max_bytes:
            raise ValueError(f"data has {len(data)} bytes; this log takes {self.max_bytes}")
        self.check_open()
        self._sender.send(data, answered)

    def tail(self, after: Position | None = None) -> Tail:
        """Read the records after this position; None: from the first record on.

        The record at `after` must still be kept: without it, Pulsar does not say whether those
        behind it were removed. Otherwise `next` raises `OffsetTrimmedError`."""
        return _PulsarTail(self, after)

    def end(self) -> Position | None:
        """The position of the last record at this moment; None for an empty log."""
        import _pulsar

        return _place_of(self._read_at(_pulsar.MessageId.latest))

    def first(self) -> Position | None:
        """The position of the first record that is still kept; None for an empty log."""
        import _pulsar

        return _place_of(self._read_at(_pulsar.MessageId.earliest))

    def last(self) -> Record | None:
        """The last record at this moment; None for an empty log."""
        import _pulsar

        return _record_of(self._read_at(_pulsar.MessageId.latest))

    def at(self, position: Position) -> Record | None:
        """The record there, or the next one; None behind the last one."""
        import _pulsar

        return _record_of(self._read_at(_pulsar.MessageId(-1, *_unpack(position))))

    def follows(self, position: Position, last: Position) -> bool:
        """Does `position` directly follow `last`? Pulsar numbers the entries of a ledger without
        gaps; only other programs write batches."""
        (ledger, entry, index), (last_ledger, last_entry, last_index) = map(
            _unpack, (position, last)
        )
        return index == last_index == -1 and (ledger, entry) == (last_ledger, last_entry + 1)

    def _read_at(self, start: Any) -> Any:
        """The message at this position; None if there is none."""
        deadline = _core.monotonic() + self._timeout
        while True:
            reader = self.reader(start, 1)
            try:
                if not reader.use().has_message_available():
                    return None
                return reader.use().read_next(int(min(PATIENCE_SECONDS, self._timeout) * 1000))
            except Exception as error:
                self.check_open()
                if type(error).__name__ != "Timeout" or _core.monotonic() > deadline:
                    self._cluster.failed(f"topic {self.topic!r} cannot be read", error)
            finally:
                close_reader(reader)

    def reader(self, start: Any, ahead: int) -> Native:
        """A reader from a message id on, for tails. The client prefetches `ahead` messages."""
        import _pulsar

        self.check_open()
        options = _pulsar.ReaderConfiguration()
        options.start_message_id_inclusive(True)
        options.receiver_queue_size(ahead)
        try:
            # Use the native reader: the client's Python API keeps each reader until it is closed
            # there.
            reader = admitted(
                lambda: self._client.use()._client.create_reader(self._address, start, options)
            )
            return Native(reader, repr(self))
        except Exception as error:
            self.check_open()
            self._cluster.failed(f"topic {self.topic!r} cannot be read", error)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude other appenders during the block; for one thread at a time.

        Use it to take the topic from an owner that sends without a pause: a grant counts only if no
        other record came between it and what its process has read.

        >>> with log.alone():                         # doctest: +SKIP
        ...     grant = ask()

        Safety does not depend on it: it ends early if another log does the same. Appends of others
        are in doubt meanwhile, and they reconnect by themselves. Raises `ClusterError`."""
        self.check_open()
        producer = self._sender.take()
        try:
            yield
        finally:
            self._sender.give_back(producer)

    def close(self) -> None:
        """Close the connection; appends without an answer remain in doubt. A second call has no
        effect."""
        if not self._closed and not self._client.inherited:
            self._closed = True
            self._close_client()
            self._cluster.close()

    def _close_client(self) -> None:
        # A shutdown alone holds the GIL while it waits for the client's threads. If one of these is
        # about to call Python, it waits for the GIL, and the shutdown takes ten seconds. No
        # callback: one that ends during the interpreter's end aborts the process.
        thread = threading.Thread(target=self._await_close, name="exclusivelog-close", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)

    def _await_close(self) -> None:
        with Ignoring(Exception):
            self._client.use().close()

    def check_open(self) -> None:
        """Raises `EngineClosedError` once it is closed, and in a forked child (rule C5)."""
        self._client.use()
        if self._closed:
            raise EngineClosedError(f"{self} is closed; open a new one")


# ---- appending ---------------------------------------------------------------------------


class _Sender:
    """Sends to one topic. The client reconnects by itself; a producer that has ended for good,
    because another program was the exclusive producer for a while, is replaced here."""

    def __init__(self, cluster: Cluster, client: Native, address: str, timeout: float) -> None:
        self._cluster, self._client, self._address = cluster, client, address
        self._lock = threading.Lock()
        self._opening = False
        self._timeout = timeout
        self._options = _options(timeout)
        self._producer: Native | None = self._open(self._options, "cannot be written to")

    def _open(self, options: Any, what: str) -> Native:
        deadline = _core.monotonic() + self._timeout
        while True:
            try:
                # Use the native client: the Python API has no `create_producer_async`.
                producer = admitted(lambda: self._create(options))
            except Exception as error:
                self._client.use()
                # Another log excludes all others for a moment (`alone`), or the broker is busy.
                name = type(error).__name__
                if name not in (*FENCED, *PASSING) or _core.monotonic() > deadline:
                    self._cluster.failed(f"{self._address} {what}", error)
                time.sleep(BUSY_SECONDS)
            else:
                return Native(producer, repr(self._cluster))

    def _create(self, options: Any) -> Any:
        return self._client.use()._client.create_producer(self._address, options)

    def send(self, data: bytes, answered: Answered) -> None:
        """Send one message; `answered` is called at once or in a thread of the client."""
        import _pulsar

        producer = self._usable()
        if producer is None:
            answered(Answer(False, error=self._error("the producer was evicted, or is opened")))
            return

        def told(result: Any, place: Any) -> None:
            stay()
            if _name(result) in ENDED:
                self._drop(producer)
            answered(_answer(result, place, self._error))

        builder = _pulsar.MessageBuilder()
        builder.content(data)
        try:
            producer.use().send_async(builder.build(), told)
        except Exception as error:
            self._drop(producer)
            answered(Answer(None, error=self._error(error)))

    def _error(self, cause: object) -> ClusterError:
        what = cause if isinstance(cause, str) else meaning_of(cause)
        return ClusterError(f"{self._cluster.access.url}: {self._address}: {what}")

    def _usable(self) -> Native | None:
        """The producer; if there is none, starts to open one, and returns None."""
        with self._lock:
            if self._producer is not None or self._opening:
                return self._producer
            self._opening = True
        try:
            self._client.use()._client.create_producer_async(
                self._address, self._options, self._opened
            )
        except Exception:
            self._opened(None, None)
        return None

    def _opened(self, result: Any, producer: Any) -> None:
        stay()
        with self._lock:
            self._opening = False
            opened = _name(result) == "Ok"
            self._producer = Native(producer, repr(self._cluster)) if opened else None

    def _drop(self, producer: Native) -> None:
        """Drop a producer that has ended, without closing it: the client may hold its lock while it
        calls `told`."""
        with self._lock:
            if self._producer is producer:
                self._producer = None

    def take(self) -> Native:
        """Become the exclusive producer of the topic, which evicts all others."""
        import _pulsar

        options = _options(self._timeout)
        options.access_mode(_pulsar.ProducerAccessMode.ExclusiveWithFencing)
        producer = self._open(options, "cannot be taken")
        with self._lock:
            self._producer = producer
        return producer

    def give_back(self, producer: Native) -> None:
        """Become a shared producer again."""
        if producer.inherited:
            return
        with Ignoring(Exception):
            producer.use().flush()
        with Ignoring(Exception):
            producer.use().close()
        self._drop(producer)


def _options(timeout: float) -> Any:
    import _pulsar

    options = _pulsar.ProducerConfiguration()
    options.batching_enabled(False)
    options.send_timeout_millis(int(timeout * 1000))
    options.max_pending_messages(PENDING_APPENDS)
    options.access_mode(_pulsar.ProducerAccessMode.Shared)
    return options


def _answer(result: Any, place: Any, error: Callable[[object], ClusterError]) -> Answer:
    """The answer for a result of the broker."""
    name = _name(result)
    if name == "Ok":
        known = place is not None and place.ledger_id() >= 0 and place.entry_id() >= 0
        return Answer(True, _position(place) if known else None)
    return Answer(False if name in NOT_SENT else None, error=error(result))


def _name(result: object) -> str:
    return str(result).rpartition(".")[2]


def _ignore_result(result: Any) -> None:
    stay()


def close_reader(reader: Native) -> None:
    """Close a reader of the client."""
    with Ignoring(Exception):
        reader.use().close()


# ---- reading -----------------------------------------------------------------------------


class _PulsarTail:
    """Reads a topic forward. The client reconnects by itself, and may then deliver messages again,
    which are dropped. A gap in Pulsar's numbers is an error.

    Pulsar begins a new ledger now and then, and also if a topic is deleted and recreated. So at the
    first record of another ledger, a new reader must find the last record of the former one."""

    def __init__(self, log: PulsarLog, after: Position | None) -> None:
        self._log = log
        self._last = after
        self._more = False  # the reader has announced a message
        self._closed = False
        self._reader: Native | None = None  # while none can be opened
        self._open()

    def _open(self) -> None:
        """Open a reader at the last record, which has to come first."""
        import _pulsar

        start = _pulsar.MessageId.earliest
        if self._last is not None:
            start = _pulsar.MessageId(-1, *_unpack(self._last))
        self._reader = self._log.reader(start, AHEAD_RECORDS)
        self._found = self._last is None
        self._is_new = True  # no record behind `_last` came from this reader yet
        self._ask_at = _core.monotonic() + PATIENCE_SECONDS

    def _open_again(self) -> None:
        """Go on with another reader."""
        if self._reader is not None:
            close_reader(self._reader)
        self._reader, self._more = None, False
        try:
            self._open()
        except ClusterError as error:
            # A restarted broker begins a new ledger, and may still be loading the topic.
            if type(error.__cause__).__name__ not in AWAY:
                raise
        if self._closed and self._reader is not None:  # closed meanwhile, with the former reader
            close_reader(self._reader)

    def next(self, timeout: float | None = None) -> Record | None:
        """The next record; None if `timeout` seconds have passed without one."""
        deadline = float("inf") if timeout is None else _core.monotonic() + timeout
        while True:
            self._check_open()
            left = min(WAKE_SECONDS, max(0.0, deadline - _core.monotonic()))
            message = self._receive(int(left * 1000))
            if message is not None:
                position = _position(message.message_id())
                if self._is_next(position):
                    self._last, self._is_new, self._more = position, False, False
                    self._ask_at = _core.monotonic() + PATIENCE_SECONDS
                    return Record(position, message.data())
                continue
            self._be_patient()
            if _core.monotonic() >= deadline:
                return None

    def _receive(self, milliseconds: int) -> Any:
        if self._reader is None:
            self._open_again()
        if self._reader is None:
            time.sleep(min(OPEN_SECONDS, milliseconds / 1000))
            return None
        try:
            return self._reader.use().read_next(milliseconds)
        except Exception as error:
            if type(error).__name__ == "Timeout":
                return None
            self._check_open()
            raise self._failed(LedgerIOError, f"it cannot be read: {meaning_of(error)}") from error

    def _be_patient(self) -> None:
        """Called when nothing has come for a while: reopen the reader if it announces a message
        again that does not come."""
        if _core.monotonic() < self._ask_at:
            return
        said, self._more = self._more, False
        with Ignoring(Exception):  # the broker may be down
            self._more = self._reader is not None and self._reader.use().has_message_available()
        if said and self._more:
            self._open_again()
        self._ask_at = _core.monotonic() + PATIENCE_SECONDS

    def _is_next(self, position: Position) -> bool:
        last = self._last
        if last is None:
            return True
        if position <= last:
            self._found = self._found or position == last
            return False
        if not self._found or not _follows(position, last):
            raise self._failed(
                OffsetTrimmedError,
                f"records after {_unpack(last)} (ledger, entry, index) were removed: the next one "
                f"is {_unpack(position)}; the namespace must keep its messages",
            )
        if self._is_new or _unpack(position)[0] == _unpack(last)[0]:
            return True
        self._open_again()
        return False

    def _failed(self, kind: type[ExclusiveLogError], what: str) -> ExclusiveLogError:
        return kind(f"{self._log}: {what}")

    def _check_open(self) -> None:
        self._log.check_open()
        if self._closed:
            raise EngineClosedError(f"this tail of {self._log} is closed")

    def close(self) -> None:
        """Stop reading; a `next` that waits ends within a second."""
        if not self._closed:
            self._closed = True
            reader = self._reader
            with Ignoring(Exception):
                if reader is not None:
                    # Does not wait for an unresponsive broker.
                    reader.use().close_async(_ignore_result)
