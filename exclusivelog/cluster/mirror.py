"""Mirrors: topics of a ledger, copied to a namespace of a Pulsar cluster while they are written.

The ledger stays the master. Each topic has one exclusive producer, and a thread that reads the
ledger and sends *copies*: Pulsar messages that hold one frame (see `frames`) or, in a plain mirror,
one message each. A copy's sequence id is the last offset in it.

Exactly once (rule J4) rests on this:

- A mirror begins by becoming the target's only producer, and reading back the target's last copy.
  It continues with the next offset. So it stores no position of its own, and any process on any
  machine that has the ledger can continue.
- The last copy must equal the source at these offsets, and the first copy must be the beginning of
  the log. If not, the mirror stops: the target belongs to another log, source or target was
  restored from an older state, or messages are missing. Each copy names the log and the topic.
- Within one connection or after a reconnect, the client may send a copy twice. The broker's
  deduplication drops it by its sequence id.
- A copy that was in flight when a process died may be in the target; the next process reads it
  back.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from exclusivelog import _core
from exclusivelog._core import Message
from exclusivelog.closing import Closing
from exclusivelog.cluster.copies import (
    OF_ENGINES,
    Copied,
    Copies,
    Decoding,
    FrameCopies,
    PlainCopies,
)
from exclusivelog.cluster.frames import Content, Frame
from exclusivelog.cluster.pulsar import Access, Cluster, PulsarWriter
from exclusivelog.errors import (
    ClusterError,
    EngineClosedError,
    ExclusiveLogError,
    MirrorMismatchError,
    OffsetTrimmedError,
    TopicNotFoundError,
    TopicTerminatedError,
    UnsupportedError,
    WaitTimeoutError,
)
from exclusivelog.waits import in_slices, wait_for

__all__ = ["Comparison", "Mirror", "Progress"]

READ_MESSAGES = 2000  # most messages of one copy
READ_BYTES = 8 << 20  # most bytes of one read
READ_AT_ONCE = 32  # messages, which may be large
IN_FLIGHT_BYTES = 32 << 20
POLL_SECONDS = 5.0  # between checks for new topics, and at the source's end
CHECK_SECONDS = 60.0  # between checks of an idle topic's target
CLOSE_SECONDS = 10.0  # for copies in flight to be stored, when a mirror is closed
END_SECONDS = 1.0  # for threads to end, once none waits for the broker
ANSWER_SECONDS = 5.0  # for the client to report that the broker did not answer in time
STORED_SECONDS = 30.0  # for the last copies of a former mirror to be stored
EMPTY_SECONDS = 5.0  # for a target that unexpectedly seems empty to show its messages


# ---- the source --------------------------------------------------------------------------


class Reading(Protocol):
    """A reader of the source: `exclusivelog.Reader`."""

    @property
    def position(self) -> int:
        """The offset of the next message."""
        ...

    def read_next(self, timeout: float | None = None) -> Message:
        """The next message; waits for it."""
        ...

    def read_batch(self, max_messages: int) -> list[Message]:
        """The next messages, without waiting."""
        ...

    def close(self) -> None:
        """Wake a thread that waits."""
        ...


class SourceTopic(Protocol):
    """A topic of the source: `exclusivelog.Topic`."""

    @property
    def id(self) -> int:
        """Its id in the log; a topic that is deleted and made again has another one."""
        ...

    @property
    def first_offset(self) -> int:
        """The first offset that was not trimmed."""
        ...

    @property
    def next_offset(self) -> int:
        """The offset of the next message."""
        ...

    def reader(self, start: Any = "earliest") -> Reading:
        """A reader from this offset on."""
        ...


class Source(Protocol):
    """The log that is copied: `exclusivelog.Engine`."""

    @property
    def path(self) -> str:
        """Its path."""
        ...

    @property
    def ledger(self) -> Any:
        """The object with its `uuid`."""
        ...

    def topics(self) -> list[str]:
        """The names of its topics."""
        ...

    def topic(self, name: str, create: bool = True) -> Any:
        """The topic of that name."""
        ...


# ---- progress ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one topic's mirror.

    - `position`: the next offset to be stored by the target; all before it are stored.
    - `end`: the source's next offset. `lag`: how many are missing in the target.
    - `copied`: messages that this mirror has copied since it was started.
    - `begun`: False until this mirror has read what the target has. Until then `position` is 0, and
      `lag` counts all offsets of the source.

    A topic that was deleted from the log keeps the last `end` that was seen.
    """

    topic: str
    position: int
    end: int
    copied: int
    begun: bool = True

    @property
    def lag(self) -> int:
        """Offsets of the source that the target does not have yet. Those that were trimmed before
        they were copied count: the mirror stops at them, with an OffsetTrimmedError."""
        return max(0, self.end - self.position)


class Comparison(NamedTuple):
    """The result of `Mirror.verify` for a topic without differences, in numbers of messages.

    - `compared`: those that source and target have. `lag`: those that the target does not have yet.
    - `unknown`: those of the target that the source has lost by trimming.
    """

    compared: int
    lag: int
    unknown: int


# ---- what is in flight -------------------------------------------------------------------


class InFlight:
    """Copies that were sent, but not stored yet."""

    def __init__(self, begin: int, copies: int, timeout: float) -> None:
        self._copies, self._most = copies, timeout + ANSWER_SECONDS
        self.begin = self.position = begin  # all offsets before `position` are stored
        self.ledger: int | None = None  # the Pulsar ledger of the last copy whose place is known
        self.error: ExclusiveLogError | None = None
        self._sent: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()

    def add(self, end: int, size: int) -> None:
        """Add a copy of offsets up to `end` that is to be sent, once there is room."""
        with self._changed:
            self._wait_for(self._has_room)
            self._sent.append((end, size))
            self._bytes += size

    def stored(
        self, end: int, error: ExclusiveLogError | None, place: tuple[int, int] | None
    ) -> None:
        """Handle the broker's answer for a copy, in a thread of the client."""
        with self._changed:
            if error is not None:
                self.error = self.error or error
            while self.error is None and self._sent and self._sent[0][0] <= end:
                self.position, size = self._sent.popleft()
                self._bytes -= size
            if place is not None:
                self.ledger = place[0]
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._sent) < self._copies and self._bytes < IN_FLIGHT_BYTES

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        answered = wait_for(
            self._changed, lambda: condition() or self.error is not None, self._most
        )
        if self.error is not None:
            raise self.error
        if not answered:  # the client retries for ever with a broker that cannot store
            raise ClusterError(
                f"the broker has stored nothing for {self._most:.0f} s; it may be down, "
                "unreachable or full: look for full disks of its bookies"
            )

    def drain(self) -> None:
        """Wait until all copies are stored; raises the broker's refusal."""
        with self._changed:
            self._wait_for(lambda: not self._sent)

    def abandon(self, error: ExclusiveLogError) -> None:
        """End all waits with this error."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()


# ---- one topic ---------------------------------------------------------------------------


class EngineTopicError(MirrorMismatchError):
    """An engine on a cluster writes to the target's topic."""


class TopicMirror:
    """Copies one topic, in a thread of its own."""

    def __init__(self, mirror: Mirror, name: str) -> None:
        self.name = name
        self.running = True
        self.error: BaseException | None = None
        self._mirror = mirror
        self._copies, self._cluster = mirror.copies, mirror.cluster
        self._topic: SourceTopic = mirror.source.topic(name, create=False)
        self._flight, self._begun = self._in_flight(0), False
        self._end = 0
        self._reader: Reading | None = None
        self._ledger: int | None = None
        self._had_copies = False
        self._checked = _core.monotonic()
        self._target = Target(self._cluster, self._copies, name, mirror.source_id)
        self._thread = threading.Thread(target=self._run, name=f"mirror-{name}", daemon=True)

    def _in_flight(self, position: int) -> InFlight:
        return InFlight(position, self._copies.in_flight, self._mirror.timeout)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end once what was read is stored."""
        if self._reader is not None:
            self._reader.close()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    def abandon(self) -> None:
        """Give up copies in flight."""
        self._flight.abandon(ClusterError(f"the mirror of topic {self.name!r} was stopped"))

    def progress(self) -> Progress:
        """The topic's progress."""
        # Read in this order: `_copy` sets them in the other.
        begun, flight = self._begun, self._flight
        position = flight.position
        with contextlib.suppress(ExclusiveLogError):  # the engine is closed, or the topic deleted
            self._end = self._topic.next_offset
        end = max(self._end, position)
        return Progress(self.name, position, end, position - flight.begin, begun)

    def _run(self) -> None:
        try:
            writer = self._cluster.writer(self.name)
            self._copy(writer)
            writer.close()  # not after an error, when it would wait for the broker's answer
        except BaseException as error:
            self.error = error
            self._mirror.follow = False  # the others copy up to where they ended at their start
        finally:
            self.running = False
            self._mirror.notify()

    def _copy(self, writer: PulsarWriter) -> None:
        target = self._target
        position, gap = target.resume(self._topic, writer, self._mirror.trimmed)
        self._had_copies = position > gap
        self._flight = self._in_flight(position)
        self._begun = True
        self._reader = self._topic.reader(position)
        try:
            for messages in self._batches(self._reader):
                for copied in self._copies.encode(
                    messages, self.name, self._topic.id, target.source, gap
                ):
                    self._send(writer, copied)
                gap = 0
                self._check_target()
        except EngineClosedError:
            if not self._mirror.stopping:
                raise
        except UnsupportedError:  # a message that does not fit: store all messages before it
            self._drain()
            raise
        self._drain()

    def _send(self, writer: PulsarWriter, copied: Copied) -> None:
        flight, end = self._flight, copied.end
        assert copied.message is not None
        flight.add(end, copied.size)
        writer.send(copied.message, end - 1, lambda error, place: flight.stored(end, error, place))

    def _drain(self) -> None:
        self._flight.drain()
        self._check_target()

    def _check_target(self) -> None:
        # A Pulsar topic that was deleted is recreated empty, without an error for its producer.
        ledger = self._flight.ledger
        if ledger != self._ledger:
            self._target.check_beginning()
            self._ledger = ledger

    def _check_idle(self) -> None:
        # Check now, to detect a deleted target before the next message is sent.
        empty = not self._had_copies and self._flight.position == self._flight.begin
        if empty or _core.monotonic() - self._checked < CHECK_SECONDS:
            return
        try:
            self._target.check_beginning()
        except MirrorMismatchError:
            raise
        except ClusterError:
            # The broker is unreachable, which does not matter before the next message.
            pass
        self._checked = _core.monotonic()

    def _batches(self, reader: Reading) -> Iterator[Sequence[Message]]:
        goal = self._topic.next_offset
        while not self._mirror.stopping:
            if reader.position >= goal and not self._mirror.follow:
                return
            batch = read_some(reader)
            if batch:
                yield batch
                continue
            self._drain()
            try:
                yield [reader.read_next(POLL_SECONDS)]
            except WaitTimeoutError:
                self._check_idle()
            except TopicTerminatedError:
                return


def read_some(reader: Reading) -> list[Message]:
    """The next messages, without waiting. Few at once: compressed ones take memory when they are
    read."""
    batch: list[Message] = []
    size = 0
    while len(batch) < READ_MESSAGES and size < READ_BYTES:
        found = reader.read_batch(READ_AT_ONCE)
        if not found:
            break
        batch += found
        size += sum(len(each.raw_value or b"") for each in found)
    return batch


# ---- the target --------------------------------------------------------------------------


class Target:
    """One Pulsar topic that copies are sent to; see the module's text for what is checked."""

    def __init__(self, cluster: Cluster, copies: Decoding, topic: str, source: str) -> None:
        self.topic, self.source = topic, source
        self._cluster, self._copies = cluster, copies

    def resume(self, topic: SourceTopic, writer: PulsarWriter, trimmed: str) -> tuple[int, int]:
        """Returns (the next offset to copy, how many offsets before it the source has lost).

        Raises MirrorMismatchError if source and target disagree, and OffsetTrimmedError if the
        source has lost messages that the target does not have."""
        last = self._last(writer)
        first = topic.first_offset
        if last is None:
            if first and trimmed != "earliest":
                raise OffsetTrimmedError(
                    f"topic {self.topic!r} begins at offset {first}; what was before was trimmed "
                    'and cannot be mirrored. trimmed="earliest" (--trimmed earliest) mirrors the '
                    "rest"
                )
            return first, first
        if last.frame.source != self.source:
            raise self.mismatch(
                0,
                f"it is one of the log with the id {last.frame.source}; this log's is "
                f"{self.source}. Mirror to a new namespace",
            )
        self.check_beginning()
        compared = self._compare(topic, [last]).compared
        if not compared and last.topic_id not in (None, topic.id):
            raise self.mismatch(
                first,
                "its last copy is of a topic of this name that was deleted, or was in the log "
                "before it was restored. Mirror to a new namespace",
            )
        self._check_nothing_lost(last.end, first)
        return last.end, 0

    def _check_nothing_lost(self, end: int, first: int) -> None:
        """OffsetTrimmedError if the source begins at `first`, behind the end of the copies."""
        if end < first:
            raise OffsetTrimmedError(
                f"topic {self.topic!r}: offsets {end} to {first - 1} were trimmed before they "
                f"were mirrored to {self._cluster.access.url}; mirror to a new namespace"
            )

    def _last(self, writer: PulsarWriter) -> Copied | None:
        """The last copy, once all earlier sends are stored."""
        sent, deadline = writer.last_sequence_id, _core.monotonic() + STORED_SECONDS
        while True:
            last = self._read_last()
            end = 0 if last is None else last.end
            if sent < 0 or sent == end - 1:
                # The broker forgets producers that are silent for hours.
                return last
            if _core.monotonic() > deadline:
                raise self.mismatch(
                    end,
                    f"it ends before offset {end}, and the broker has got {sent}: messages of "
                    "it were lost",
                )
            time.sleep(0.1)

    def _read_last(self) -> Copied | None:
        with self._cluster.reader(self.topic, last=True) as reader:
            message = reader.next()
            return None if message is None else self._decode(message)

    def _decode(self, message: Any) -> Copied:
        found = self._copies.decode(message)
        if found is OF_ENGINES:
            raise self.mismatch(0, OF_ENGINES, EngineTopicError)
        if not isinstance(found, Copied):
            raise self.mismatch(0, found)
        if found.topic != self.topic:
            raise self.mismatch(found.first, f"it is a copy of topic {found.topic!r}")
        return found

    def mismatch(
        self, offset: int, why: str, kind: type[MirrorMismatchError] = MirrorMismatchError
    ) -> MirrorMismatchError:
        """The error for a disagreement."""
        return kind(
            f"topic {self.topic!r} at offset {offset}: {self._cluster.access.url} is not a mirror "
            f"of this log: {why}",
            topic=self.topic,
            offset=offset,
        )

    def check_beginning(self) -> None:
        """MirrorMismatchError unless the first copy is the beginning of the log."""
        message = self._first()
        if message is None:
            raise self.mismatch(0, "it is empty, and was not before")
        copied = self._decode(message)
        if copied.first != copied.frame.gap:
            raise self.mismatch(
                0, f"it begins with offset {copied.first}; what was before it was removed"
            )

    def _first(self) -> Any:
        """The first message; None if none comes for a while: a broker that has just started may
        report a topic as empty that is not."""
        deadline = _core.monotonic() + EMPTY_SECONDS
        while True:
            with self._cluster.reader(self.topic) as reader:
                message = reader.next()
            if message is not None or _core.monotonic() > deadline:
                return message
            time.sleep(0.2)

    def copied(self) -> Iterator[Copied]:
        """All copies, in order; MirrorMismatchError if one is missing or duplicated."""
        expected = None
        with self._cluster.reader(self.topic) as reader:
            for message in reader:
                copied = self._decode(message)
                begin = copied.frame.gap if expected is None else expected
                if copied.first != begin or (expected is not None and copied.frame.gap):
                    raise self.mismatch(
                        begin, f"offset {copied.first} comes where {begin} should be"
                    )
                expected = copied.end
                yield copied

    def compare_all(self, topic: SourceTopic) -> Comparison:
        """Compare the whole target with the source."""
        return self._compare(topic, self.copied())

    def _compare(self, topic: SourceTopic, copies: Iterable[Copied]) -> Comparison:
        count = unknown = position = 0
        reader = None
        for copied in copies:
            position = copied.end
            first, end = topic.first_offset, topic.next_offset
            if copied.end > end:
                raise self.mismatch(end, f"it has offsets up to {copied.end - 1}")
            begin = max(copied.first, first)
            unknown += min(begin, copied.end) - copied.first
            if begin >= copied.end:
                continue
            if reader is None or reader.position != begin:
                reader = topic.reader(begin)
            messages = list(_take(reader, copied.end - begin))
            self._compare_one(messages, copied.frame)
            count += len(messages)
        first = topic.first_offset
        if position:
            self._check_nothing_lost(position, first)
        return Comparison(count, topic.next_offset - max(position, first), unknown)

    def _compare_one(self, messages: Sequence[Message], frame: Frame) -> None:
        for message in messages:
            there = frame.contents[message.offset - frame.first]
            if message.epoch != frame.epoch:
                raise self.mismatch(
                    message.offset, f"it has epoch {frame.epoch}, the source {message.epoch}"
                )
            here = Content.of(message)
            for name, ours, theirs in zip(Content._fields, here, there, strict=True):
                if ours != theirs:
                    raise self.mismatch(
                        message.offset,
                        f"its {name}: {described(theirs)}, the source's: {described(ours)}"
                        + same_bytes(ours, theirs),
                    )


def described(field: object) -> str:
    """A field, for errors: of contents, which may be secret, only the length.

    >>> described(b"secret"), described({"name": "secret"}), described(None), described(7)
    ('6 bytes', '1 of them', 'none', '7')
    """
    if isinstance(field, bytes):
        return f"{len(field)} bytes"
    if isinstance(field, dict):
        return f"{len(field)} of them"
    return "none" if field is None else repr(field)


def same_bytes(ours: object, theirs: object) -> str:
    """A text that says how many leading bytes are equal, if both are bytes.

    >>> same_bytes(b"secret", b"sea")
    '; the first 2 bytes are the same'
    """
    if not (isinstance(ours, bytes) and isinstance(theirs, bytes)):
        return ""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    return f"; the first {sum(1 for _ in same)} bytes are the same"


def _take(reader: Reading, count: int) -> Iterator[Message]:
    while count > 0:
        found = reader.read_batch(count)
        if not found:
            return
        count -= len(found)
        yield from found


# ---- all topics --------------------------------------------------------------------------


class Mirror(Closing):
    """Copies topics of a ledger to a namespace of a Pulsar cluster, exactly once (rule J4).

    - `source`: an engine on the ledger; it may be open read-only.
    - `url`: pulsar://host:port/tenant/namespace, or pulsar+ssl://...
    - `topics`: names; None: all topics, also those that are made while it follows.
    - `plain`: send every message as one Pulsar message, for programs that know nothing of frames;
      far slower. Default: many messages in a frame, see `exclusivelog.cluster.frames`.
    - `trimmed`: "earliest": where the source has lost its oldest messages before the first copy was
      made, begin with the first that is left. "error": OffsetTrimmedError.
    - `timeout`: seconds within which the broker has to acknowledge a message, and within which a
      former mirror has to be gone; a killed broker needs some twenty to come back.
    - `check_policies`: False leaves out the check that the namespace deduplicates and keeps its
      messages, which needs admin rights.
    - `admin`: URL of the admin API, or several, separated by commas: the first that can be reached
      is asked (default: port 8080 of each host of `url`, with TLS 8443); `token` or
      `token_file`: a JSON web token (default: the environment variable EXCLUSIVELOG_TOKEN);
      `tls_trust_certs`: a PEM file of certificates.

    Raises ClusterError if the cluster cannot be reached or its policies could lose messages.

    ```python
    with xl.open("data/log", readonly=True) as engine:
        with Mirror(engine, "pulsar://broker:6650/tenant/backup") as mirror:
            mirror.run()                   # up to the end as it is now; run(follow=True): for ever
            print(mirror.progress())
    ```
    """

    def __init__(
        self,
        source: Source,
        url: str,
        topics: Iterable[str] | None = None,
        *,
        plain: bool = False,
        trimmed: Literal["error", "earliest"] = "error",
        timeout: float = 60.0,
        check_policies: bool = True,
        admin: str | None = None,
        token: str | None = None,
        token_file: str | None = None,
        tls_trust_certs: str | None = None,
    ) -> None:
        if isinstance(topics, str):
            raise TypeError(f"topics={topics!r}: it takes a list of names, or None for all")
        if trimmed not in ("error", "earliest"):
            raise ValueError(f"trimmed={trimmed!r}: it takes 'error' or 'earliest'")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: it takes seconds above 0")
        self.source, self.trimmed = source, trimmed
        self.copies: Copies = PlainCopies() if plain else FrameCopies()
        self.follow = self.stopping = False
        self._names = None if topics is None else list(dict.fromkeys(topics))
        self._mirrors: dict[str, TopicMirror] = {}
        self._changed, self._stopped = _core.Signal(), _core.Signal()
        self._watch_error: BaseException | None = None
        self._watcher = threading.Thread(
            target=self._watch_topics, name="mirror-topics", daemon=True
        )
        self.timeout = timeout
        access = Access.parse(
            url, admin=admin, token=token, token_file=token_file, tls_trust_certs=tls_trust_certs
        )
        self.cluster = Cluster(access, timeout)
        if check_policies:
            self.cluster.check_policies()

    def __repr__(self) -> str:
        return f"Mirror({self.source.path!r}, {self.cluster.access.url!r})"

    @property
    def source_id(self) -> str:
        """The id that copies have as their source."""
        return str(self.source.ledger.uuid)

    # ---- run -----------------------------------------------------------------------------

    def run(self, follow: bool = False) -> None:
        """Copy all topics up to their current ends; `follow`: go on until `stop()`.

        A topic that cannot go on does not stop the others: its error is raised after they are
        copied up to the ends that they had at the start."""
        self.start(follow)
        try:
            while not self.wait(POLL_SECONDS):
                pass
        except BaseException:
            self.close()
            raise

    def start(self, follow: bool = False) -> None:
        """Start the same in the background; `wait` returns the outcome."""
        self.cluster.check_not_forked()
        self.follow = follow
        self._begin_new()
        if follow and self._names is None:
            self._watcher.start()

    def _watch_topics(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self._begin_new()
            except BaseException as error:  # no thread can be started, for example
                self._watch_error = error
                self.follow = False
                self.notify()
                return

    def wait(self, timeout: float) -> bool:
        """Wait up to so many seconds for the end: True once all topics are copied or `stop` was
        called. Raises the first error of any topic, as `run` does, and EngineClosedError in a
        forked child, which has no thread that copies."""
        self.cluster.check_not_forked()
        if not in_slices(self._await_end, timeout, self.cluster.check_not_forked):
            return False
        if failed := self._failed():
            self.close()
            raise failed
        return True

    def _await_end(self, seconds: float) -> bool:
        if self._is_running():
            self._changed.wait(seconds)
            self._changed.clear()
        return not self._is_running()

    def _is_running(self) -> bool:
        watches = self.follow and self._names is None and not self.stopping
        return watches or any(one.running for one in list(self._mirrors.values()))

    def _failed(self) -> BaseException | None:
        errors = [self._watch_error, *(one.error for one in list(self._mirrors.values()))]
        return next((error for error in errors if error is not None), None)

    def _begin_new(self) -> None:
        for name in self.source.topics() if self._names is None else self._names:
            if name not in self._mirrors and not self.stopping:
                one = TopicMirror(self, name)
                one.start()
                self._mirrors[name] = one

    def notify(self) -> None:
        """Wake waiters, because a topic's copying has ended."""
        self._changed.set()

    def stop(self) -> None:
        """Let `run` return once what was read is stored. May be called from any thread.

        In a forked child, it does nothing, like `close`."""
        if self.cluster.inherited:  # threads of the parent may hold the locks
            return
        self.stopping = True
        self._stopped.set()
        for one in list(self._mirrors.values()):
            one.stop()
        self._changed.set()

    def close(self) -> None:
        """Stop, and close all connections; closing twice does nothing.

        What was read is stored before, if the broker does it within `timeout` and 10 seconds. If
        not, nothing is lost: the next mirror begins behind what the target has."""
        if self.cluster.inherited:
            return
        self.stop()
        self._join(min(self.timeout, CLOSE_SECONDS))
        for one in list(self._mirrors.values()):
            one.abandon()
        self.cluster.close()
        self._join(END_SECONDS)

    def _join(self, timeout: float) -> None:
        """Wait for the ends of all threads, for `timeout` seconds in all."""
        deadline = _core.monotonic() + timeout
        if self._watcher.is_alive():
            self._watcher.join(timeout)
        for one in list(self._mirrors.values()):
            one.join(max(0.0, deadline - _core.monotonic()))

    # ---- inspection ----------------------------------------------------------------------

    def progress(self) -> list[Progress]:
        """The progress of each topic. `sum(one.lag for one in mirror.progress())` is the total
        lag."""
        return [one.progress() for one in list(self._mirrors.values())]

    def verify(self) -> dict[str, Comparison]:
        """Read all copies back and compare them with the source, field by field. It writes
        nothing, creates nothing, and may run beside the mirror.

        Returns a `Comparison` for each topic; raises MirrorMismatchError at the first difference,
        and TopicNotFoundError if a topic that has messages is not mirrored, or nothing is. The
        admin API has to say which topics there are, as to read one would create it."""
        names = self.source.topics() if self._names is None else self._names
        topics = {name: self.source.topic(name, create=False) for name in names}
        missing = set(self.cluster.missing(topics))
        self._check_mirrored(topics, missing)
        found = {name: self._verified(one, name in missing) for name, one in topics.items()}
        if found and all(one.lag and not one.compared + one.unknown for one in found.values()):
            raise self._nothing_mirrored()
        return found

    def _check_mirrored(self, topics: Mapping[str, SourceTopic], missing: Collection[str]) -> None:
        if len(missing) == len(topics):
            raise self._nothing_mirrored()
        if unmirrored := [name for name in topics if name in missing and topics[name].next_offset]:
            raise TopicNotFoundError(
                f"{self.cluster.access.url}: topic {unmirrored[0]!r} is not mirrored there "
                f"({len(unmirrored)} such topics); mirror it, or name the topics to compare"
            )

    def _nothing_mirrored(self) -> TopicNotFoundError:
        return TopicNotFoundError(
            f"{self.cluster.access.url}: nothing of {self.source.path} is mirrored there"
        )

    def _verified(self, topic: Any, missing: bool) -> Comparison:
        if missing:  # and has no messages
            return Comparison(0, 0, 0)
        target = Target(self.cluster, self.copies, topic.name, self.source_id)
        return target.compare_all(topic)
