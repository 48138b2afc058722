"""One topic of Apache Pulsar as an ordered log.

A Pulsar topic without partitions has one order of messages, which all of its readers see: that is
all that `exclusivelog.cluster.rule` needs. So the producers here are *shared* ones, which any
number of processes may have at the same time: a stale owner may get records into the topic, and
the rule skips them. No safety depends on Pulsar's exclusive producers, or on its deduplication,
which only saves copies.

- A record is one Pulsar message. The client does not batch: the broker's deduplication would drop
  messages of a batch that are not there yet.
- An error or a time limit says nothing about what was sent before it: it may be stored, or will be.
- A duplicate is stored, at a position that the broker does not tell: it answers (-1,-1).
- A position is ledger, entry and index in a batch (of another program), big-endian.

>>> log = PulsarLog(Access.parse("pulsar://broker:6650/tenant/space"), "orders")  # doctest: +SKIP
>>> log.append(b"record")                                                        # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from exclusivelog.backend import Closing
from exclusivelog.cluster.frames import MAX_BYTES
from exclusivelog.cluster.ordered import Answer, Answered, Position, Record, Tail, ignore
from exclusivelog.cluster.pulsar import Access, Cluster, meaning_of
from exclusivelog.errors import (
    ClusterError,
    EngineClosedError,
    ExclusiveLogError,
    LedgerIOError,
    OffsetTrimmedError,
)

__all__ = ["PulsarLog"]

PLACE = struct.Struct(">QQI")  # ledger, entry, index in the batch + 1 (0: no batch)
PENDING_APPENDS = 256  # that the client keeps without an answer; a writer has 64 frames under way
AHEAD_RECORDS = 64  # that a tail's client fetches before they are asked for
CLOSE_SECONDS = 2.0  # for the broker to answer, before the connection is cut off
WAKE_SECONDS = 1.0  # after so long, a tail that waits looks whether it was closed

# Names of the client's results that come before anything is sent.
NOT_SENT = ("ProducerQueueIsFull", "MemoryBufferIsFull", "MessageTooBig")
# ... and of those after which a producer sends nothing any more.
ENDED = ("ProducerFenced", "ProducerBusy", "AlreadyClosed", "ProducerNotInitialized")


# ---- positions ---------------------------------------------------------------------------


def _position(place: Any) -> Position:
    """The position of a Pulsar message id."""
    return Position(PLACE.pack(place.ledger_id(), place.entry_id(), place.batch_index() + 1))


def _unpack(position: Position) -> tuple[int, int, int]:
    if len(position) != PLACE.size:
        raise ValueError(f"after={position!r} is no position of a Pulsar topic")
    ledger, entry, index = PLACE.unpack(position)
    return ledger, entry, index - 1


def _follows(position: Position, last: Position) -> bool:
    """Can it be the next one? Pulsar numbers the entries of a ledger without gaps, from 0."""
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

    Raises `ClusterError` if the topic cannot be used, or its messages could be removed."""

    max_bytes = MAX_BYTES

    def __init__(
        self, access: Access, topic: str, *, timeout: float = 30.0, check_policies: bool = True
    ) -> None:
        self.topic, self._timeout = topic, timeout
        self._cluster = Cluster(access, timeout)
        self._closed = self._inherited = False
        try:
            if check_policies:
                self._cluster.check_policies()
            self._address = self._cluster.address(topic)
            self._client = self._cluster.client
            self._sender = _Sender(self._cluster, self._client, self._address, timeout)
        except BaseException:
            self._cluster.close()
            raise
        _open.add(self)

    def __repr__(self) -> str:
        return f"PulsarLog({self._cluster.access.url!r}, {self.topic!r})"

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        """Hand a record over to be appended, without waiting for the broker's answer."""
        if len(data) > self.max_bytes:
            raise ValueError(f"data has {len(data)} bytes; this log takes {self.max_bytes}")
        self.check_open()
        self._sender.send(data, answered)

    def tail(self, after: Position | None = None) -> Tail:
        """Read the records after this position; None: from the first record on.

        The record at `after` must still be kept: without it, Pulsar does not say whether those
        behind it were removed. Otherwise `next` raises `OffsetTrimmedError`."""
        import _pulsar

        start = _pulsar.MessageId.earliest
        if after is not None:
            start = _pulsar.MessageId(-1, *_unpack(after))
        return _PulsarTail(self, self._reader(start, AHEAD_RECORDS), after)

    def end(self) -> Position | None:
        """The position of the last record at this moment; None for an empty log."""
        import _pulsar

        return self._look(_pulsar.MessageId.latest)

    def first(self) -> Position | None:
        """The position of the first record that is still kept; None for an empty log."""
        import _pulsar

        return self._look(_pulsar.MessageId.earliest)

    def _look(self, start: Any) -> Position | None:
        """The position of the message there."""
        reader = self._reader(start, 1)
        try:
            if not reader.has_message_available():
                return None
            return _position(reader.read_next(int(self._timeout * 1000)).message_id())
        except Exception as error:
            self.check_open()
            self._cluster.failed(f"topic {self.topic!r} cannot be read", error)
        finally:
            with contextlib.suppress(Exception):
                reader.close()

    def _reader(self, start: Any, ahead: int) -> Any:
        self.check_open()
        try:
            return self._client.create_reader(
                self._address, start, start_message_id_inclusive=True, receiver_queue_size=ahead
            )
        except Exception as error:
            self.check_open()
            self._cluster.failed(f"topic {self.topic!r} cannot be read", error)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep all others from appending during the block; for one thread at a time.

        It is how to take the topic from an owner that sends without a pause: a grant counts only if
        nothing has come between it and what its process has read.

        >>> with log.alone():                         # doctest: +SKIP
        ...     follower.acquire(timeout=10)

        No safety depends on it: it ends early if another log does the same. What others append in
        the meantime is unknown to them, and they come back by themselves. Raises `ClusterError`."""
        self.check_open()
        producer = self._sender.take()
        try:
            yield
        finally:
            self._sender.give_back(producer)

    def close(self) -> None:
        """Close the connection; an append without an answer remains unknown. Twice does nothing."""
        if not self._closed:
            self._closed = True
            _open.discard(self)
            self._close_client()
            self._cluster.close()

    def _close_client(self) -> None:
        # A shutdown alone holds the interpreter's lock while it waits for the client's threads. One
        # that is about to call Python waits for that lock: then it takes ten seconds.
        # No callback: one that ends while the interpreter does aborts the process.
        thread = threading.Thread(target=self._await_close, name="exclusivelog-close", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)

    def _await_close(self) -> None:
        with contextlib.suppress(Exception):
            self._client.close()

    def check_open(self) -> None:
        """Raises `EngineClosedError` once it is closed, and in a forked child (rule C5)."""
        if self._inherited:
            raise EngineClosedError(f"{self} was inherited through fork(); open one of your own")
        if self._closed:
            raise EngineClosedError(f"{self} is closed; open a new one")

    def forget(self) -> None:
        """In a forked child: the connection is the parent's. No thread of the client is here, and
        its destructors would wait for them, or tell the broker that the parent has left."""
        self._inherited = self._closed = True
        _keep_for_ever(self._client)
        self._sender.forget()


_open: weakref.WeakSet[PulsarLog] = weakref.WeakSet()
_tails: weakref.WeakSet[_PulsarTail] = weakref.WeakSet()


def _keep_for_ever(thing: object) -> None:
    # A reference in a module is dropped while the interpreter ends; one that nobody has is not.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _forget_all() -> None:
    for log in list(_open):
        log.forget()
    for tail in list(_tails):
        tail.forget()
    _open.clear()
    _tails.clear()


os.register_at_fork(after_in_child=_forget_all)


# ---- appending ---------------------------------------------------------------------------


class _Sender:
    """Sends to one topic. The client connects again by itself; a producer that has ended for good
    (another program has made itself the exclusive one for a while) is replaced here."""

    def __init__(self, cluster: Cluster, client: Any, address: str, timeout: float) -> None:
        self._cluster, self._client, self._address = cluster, client, address
        self._lock = threading.Lock()
        self._opening = False
        self._timeout = timeout
        self._options = _options(timeout)
        try:
            # The raw one: the client's own API knows no `create_producer_async`.
            self._producer = client._client.create_producer(address, self._options)
        except Exception as error:
            cluster.failed(f"{address} cannot be written to", error)

    def send(self, data: bytes, answered: Answered) -> None:
        """Send one message; `answered` is called on a thread of the client, or at once."""
        import _pulsar

        producer = self._usable()
        if producer is None:
            answered(Answer(False, error=self._error("the producer was evicted, or is opened")))
            return

        def told(result: Any, place: Any) -> None:
            if _name(result) in ENDED:
                self._drop(producer)
            answered(_answer(result, place, self._error))

        builder = _pulsar.MessageBuilder()
        builder.content(data)
        try:
            producer.send_async(builder.build(), told)
        except Exception as error:
            self._drop(producer)
            answered(Answer(None, error=self._error(error)))

    def _error(self, cause: object) -> ClusterError:
        what = cause if isinstance(cause, str) else meaning_of(cause)
        return ClusterError(f"{self._cluster.access.url}: {self._address}: {what}")

    def _usable(self) -> Any:
        """The producer; None, and soon a new one, if there is none."""
        with self._lock:
            if self._producer is not None or self._opening:
                return self._producer
            self._opening = True
        try:
            self._client._client.create_producer_async(self._address, self._options, self._opened)
        except Exception:
            self._opened(None, None)
        return None

    def _opened(self, result: Any, producer: Any) -> None:
        with self._lock:
            self._opening = False
            self._producer = producer if _name(result) == "Ok" else None

    def _drop(self, producer: Any) -> None:
        """It has ended. Not closed here: the client may hold its lock while it calls `told`."""
        with self._lock:
            if self._producer is producer:
                self._producer = None

    def take(self) -> Any:
        """Evict all producers of the topic; the one that does so sends from now on."""
        import _pulsar

        options = _options(self._timeout)
        options.access_mode(_pulsar.ProducerAccessMode.ExclusiveWithFencing)
        try:
            producer = self._client._client.create_producer(self._address, options)
        except Exception as error:
            self._cluster.failed(f"{self._address} cannot be taken", error)
        with self._lock:
            self._producer = producer
        return producer

    def give_back(self, producer: Any) -> None:
        """Let others in again."""
        with contextlib.suppress(Exception):
            producer.flush()
        with contextlib.suppress(Exception):
            producer.close()
        self._drop(producer)

    def forget(self) -> None:
        """In a forked child."""
        _keep_for_ever(self._producer)


def _options(timeout: float) -> Any:
    import _pulsar

    options = _pulsar.ProducerConfiguration()
    options.batching_enabled(False)
    options.send_timeout_millis(int(timeout * 1000))
    options.max_pending_messages(PENDING_APPENDS)
    options.access_mode(_pulsar.ProducerAccessMode.Shared)
    return options


def _answer(result: Any, place: Any, error: Callable[[object], ClusterError]) -> Answer:
    """What the broker's result means."""
    name = _name(result)
    if name == "Ok":
        known = place is not None and place.ledger_id() >= 0 and place.entry_id() >= 0
        return Answer(True, _position(place) if known else None)
    return Answer(False if name in NOT_SENT else None, error=error(result))


def _name(result: object) -> str:
    return str(result).rpartition(".")[2]


def _ignore_result(result: Any) -> None:
    pass


# ---- reading -----------------------------------------------------------------------------


class _PulsarTail:
    """Reads a topic forward. The client connects again by itself, and may then deliver messages
    again: they are left out. A gap in the numbers that Pulsar gives is an error."""

    def __init__(self, log: PulsarLog, reader: Any, after: Position | None) -> None:
        self._log, self._reader = log, reader
        self._last = after
        self._begun = after is None  # else the first message is the one at `after`
        self._closed = False
        _tails.add(self)

    def next(self, timeout: float | None = None) -> Record | None:
        """The next record; None if `timeout` seconds have passed without one."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            self._check_open()
            left = min(WAKE_SECONDS, max(0.0, deadline - time.monotonic()))
            message = self._receive(int(left * 1000))
            if message is not None:
                position = _position(message.message_id())
                if self._is_next(position):
                    self._last = position
                    return Record(position, message.data())
            elif time.monotonic() >= deadline:
                return None

    def _receive(self, milliseconds: int) -> Any:
        try:
            return self._reader.read_next(milliseconds)
        except Exception as error:
            if type(error).__name__ == "Timeout":
                return None
            self._check_open()
            raise self._failed(LedgerIOError, f"it cannot be read: {meaning_of(error)}") from error

    def _is_next(self, position: Position) -> bool:
        last = self._last
        if last is None or (position > last and self._begun and _follows(position, last)):
            return True
        if position > last:
            raise self._failed(
                OffsetTrimmedError,
                f"records after {_unpack(last)} (ledger, entry, index) were removed: the next one "
                f"is {_unpack(position)}; the namespace must keep its messages",
            )
        self._begun = self._begun or position == last
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
            with contextlib.suppress(Exception):
                self._reader._reader.close_async(_ignore_result)  # waits for no broker that hangs

    def forget(self) -> None:
        """In a forked child."""
        self._closed = True
        _keep_for_ever(self._reader)
