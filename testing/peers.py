"""Processes that each have an engine and a producer on one topic of Pulsar, and a judge of what is
there.

A test controls a peer by calls; while it streams, it reports acknowledged messages:

```python
peer.call("acquire")                    # its epoch
peer.stream()                           # sends from now on, until it is stopped
peer.await_sends(100)
peer.kill()
check(log, [peer])                      # each acknowledged message is there once, in order
```
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import exclusivelog as xl
from exclusivelog.cluster.frames import Frame, Grant
from exclusivelog.cluster.log import Reader
from exclusivelog.cluster.ordered import OrderedLog
from exclusivelog.cluster.pulsar import Access
from exclusivelog.cluster.pulsar_log import PulsarLog
from testing.broker import Namespace
from testing.processes import FENCING, PATIENCE, forks, stop

AT_ONCE = 16  # sends that a stream has under way


def access(namespace: Namespace) -> Access:
    """How to get into a test's namespace."""
    return Access.parse(namespace.url, admin=namespace.admin, token=namespace.token)


def open_log(namespace: Namespace, topic: str = "orders", **options: Any) -> PulsarLog:
    """The topic as an ordered log."""
    return PulsarLog(access(namespace), topic, **options)


def open_engine(namespace: Namespace, name: str = "p", **options: Any) -> xl.Engine:
    """An engine in a test's namespace."""
    return xl.open(
        namespace.url, name=name, admin=namespace.admin, token=namespace.token, **options
    )


# ---- in the peer's process ---------------------------------------------------------------


class Served:
    """The calls that a peer's process serves."""

    def __init__(self, says: Connection, namespace: Namespace, name: str, **options: Any) -> None:
        self._says, self._name, self._lock = says, name, threading.Lock()
        self.engine = open_engine(namespace, name, **options)
        self.topic = self.engine.topic("orders")
        self._producer: xl.Producer | None = None
        self._stop = threading.Event()
        self._stop.set()
        self._thread: threading.Thread | None = None

    def say(self, kind: str, *what: Any) -> None:
        with self._lock:
            self._says.send((kind, *what))

    @property
    def producer(self) -> xl.Producer:
        """The newest one."""
        assert self._producer is not None
        return self._producer

    def acquire(self) -> int:
        """Take the topic from an owner that may be sending; the epoch."""
        self._producer = self.topic.producer(FENCING, name=self._name)
        return self._producer.topic_epoch

    def send(self, value: bytes) -> int:
        return self.producer.send(value, timeout=PATIENCE)

    def status(self) -> str:
        return self.producer.state

    def stream(self) -> None:
        """Send until it is stopped or fenced, several at once."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._stream, daemon=True)
        self._thread.start()

    def _stream(self) -> None:
        room = threading.Semaphore(AT_ONCE)
        number = 0
        producer = self.producer
        epoch = producer.topic_epoch
        while not self._stop.is_set():
            if not room.acquire(timeout=0.1):
                continue
            value = b"%s.%d.%d" % (self._name.encode(), epoch, number)
            number += 1
            try:
                receipt = producer.send_async(value)
            except xl.ProducerFencedError as error:
                self.say("failed", value, type(error).__name__)
                return
            except Exception:
                return
            receipt.add_done_callback(lambda done, value=value: self._ended(done, value, room))

    def _ended(self, done: xl.Receipt, value: bytes, room: threading.Semaphore) -> None:
        error = done.exception()
        if error is None:
            self.say("sent", value, done.result())
        else:
            self.say("failed", value, type(error).__name__)
        room.release()

    def stop(self) -> None:
        """End the stream; what was sent gets its outcome later, or has it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def release(self) -> None:
        """Release the topic, once all is settled."""
        self.producer.close()

    def break_connections(self) -> int:
        """End this process's connections, as a network does; how many."""
        broken = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    one.shutdown(socket.SHUT_RDWR)
                    broken += 1
        return broken

    def close(self) -> None:
        self.engine.close()


def _serve(pipe: Connection, namespace: Namespace, name: str, options: dict[str, Any]) -> None:
    served = Served(pipe, namespace, name, **options)
    served.say("done", None)
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        if call is None:
            served.close()
            return
        try:
            served.say("done", getattr(served, call[0])(*call[1:]))
        except Exception as error:
            served.say("raised", type(error).__name__, str(error))


# ---- here --------------------------------------------------------------------------------


class Raised(Exception):
    """The peer's call raised; `kind` is the exception's class name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Peer:
    """A process with an engine and a producer. `sent` has what was acknowledged, `failed` what was
    not, as far as it was read here."""

    def __init__(self, namespace: Namespace, name: str, **options: Any) -> None:
        self.name = name
        self.sent: dict[bytes, int] = {}
        self.failed: dict[bytes, str] = {}
        self._answers: list[tuple[Any, ...]] = []
        self._pipe, theirs = forks.Pipe()
        self.process = forks.Process(
            target=_serve, args=(theirs, namespace, name, options), daemon=True
        )
        self.process.start()
        theirs.close()
        try:
            self.answer()
        except BaseException:
            self.end()
            raise

    def start(self, *call: Any) -> None:
        """Begin a call of `Served`; `answer` has what it gives."""
        self._pipe.send(call)

    def answer(self, timeout: float = PATIENCE) -> Any:
        """What the call that was started gives; Raised if it raised."""
        deadline = time.monotonic() + timeout
        while not self._answers:
            self._read(deadline)
        kind, *what = self._answers.pop(0)
        if kind == "raised":
            raise Raised(*what)
        return what[0]

    def call(self, *call: Any) -> Any:
        """`start` and `answer`."""
        self.start(*call)
        return self.answer()

    def stream(self) -> None:
        """Send one message after the other from now on."""
        self.call("stream")

    def await_sends(self, count: int, timeout: float = PATIENCE) -> None:
        """Wait until so many more sends are acknowledged."""
        wanted, deadline = len(self.sent) + count, time.monotonic() + timeout
        while len(self.sent) < wanted:
            self._read(deadline)

    def await_failure(self, timeout: float = PATIENCE) -> None:
        """Wait until a send has failed."""
        deadline = time.monotonic() + timeout
        while not self.failed:
            self._read(deadline)

    def _read(self, deadline: float) -> None:
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"peer {self.name!r} said nothing in time")
        kind, *what = self._pipe.recv()
        if kind == "sent":
            self.sent[what[0]] = what[1]
        elif kind == "failed":
            self.failed[what[0]] = what[1]
        else:
            self._answers.append((kind, *what))

    def _read_rest(self) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError, TimeoutError):
            while True:
                self._read(time.monotonic() + 0.2)

    def finish(self) -> None:
        """End the stream, and read all that was said."""
        self.call("stop")
        self._read_rest()

    def hang(self) -> None:
        """SIGSTOP; returns once it has stopped."""
        assert self.process.pid is not None
        stop(self.process.pid)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; then read all that it had said."""
        self.process.kill()
        self.process.join(PATIENCE)
        self._read_rest()

    def end(self) -> None:
        """Let it close and exit; kill it if it does not."""
        with contextlib.suppress(OSError, ValueError):
            if self.process.is_alive():
                self.go_on()
                self._pipe.send(None)
        self.process.join(PATIENCE)
        self.process.kill()
        self.process.join(PATIENCE)
        self._pipe.close()


@contextlib.contextmanager
def peers(namespace: Namespace, *names: str, **options: Any) -> Iterator[list[Peer]]:
    """Peers of these names, which are ended and reaped afterwards."""
    made: list[Peer] = []
    try:
        for name in names:
            made.append(Peer(namespace, name, **options))
        yield made
    finally:
        for peer in made:
            peer.end()


# ---- the judge ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a reader of the log finds: values by offset, who was granted which epoch, and how many
    records did not count."""

    values: list[bytes]
    owners: dict[int, str]
    skipped: int


def read(log: OrderedLog) -> Found:
    """Read the log to its end as it is now; offsets are dense, and epochs never decrease."""
    values: list[bytes] = []
    owners: dict[int, str] = {}
    epoch = skipped = 0
    end, reader = log.end(), Reader(log)
    deadline = time.monotonic() + PATIENCE
    try:
        while end is not None and (reader.state.position or b"") < end:
            judged = reader.next(1.0)
            assert time.monotonic() < deadline, "the log was not read to its end in time"
            if judged is None:
                continue
            parsed = judged.parsed
            if not judged.counts:
                skipped += 1
            elif isinstance(parsed, Grant):
                assert parsed.epoch == epoch + 1
                assert parsed.first == len(values)
                epoch = parsed.epoch
                owners[epoch] = parsed.holder.producer_name
            elif isinstance(parsed, Frame):
                assert parsed.epoch == epoch
                assert parsed.first == len(values)
                assert {each.producer_name for each in parsed.contents} == {owners[epoch]}
                values += [each.value or b"" for each in parsed.contents]
    finally:
        reader.close()
    return Found(values, owners, skipped)


def check(log: OrderedLog, senders: Iterable[Peer]) -> Found:
    """Every acknowledged message is there once, at its offset; those of one sender and epoch are in
    the order of their sends; nothing that was fenced is there."""
    found = read(log)
    assert len(set(found.values)) == len(found.values)
    there = set(found.values)
    for peer in senders:
        for value, offset in peer.sent.items():
            assert found.values[offset] == value
        fenced = {value for value, kind in peer.failed.items() if kind == "ProducerFencedError"}
        assert not fenced & there
    runs: dict[bytes, list[int]] = {}
    for value in found.values:
        run, dot, number = value.rpartition(b".")
        if dot:
            runs.setdefault(run, []).append(int(number))
    assert all(numbers == list(range(len(numbers))) for numbers in runs.values())
    return found
