"""Replicas: a copy of what a topic says, in the memory of each process that has one (rules I1-I5).

A replica follows its topic. A process that writes becomes the topic's exclusive owner first, then
catches up, appends, and applies what it has appended; it stays the owner until another one asks.
What a message means, the subclasses say (state.py).

Writers hold the state's lock only to compute, append and apply. They wait for the flush without
it, so that one flush serves all who wait (rule I5), and return behind it. A read that has seen
something unflushed waits for that flush, too: no caller learns what a power cut could take.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from exclusivelog import _core, threads
from exclusivelog.calls import Calls
from exclusivelog.errors import (
    EngineClosedError,
    LedgerCorruptedError,
    LedgerError,
    OffsetTrimmedError,
    ProducerFencedError,
    StateError,
)
from exclusivelog.faults import met_twice
from exclusivelog.producer import Appended, Producer, ProducerFuture
from exclusivelog.snapshots import (
    Item,
    SnapshotRefused,
    item_of,
    message_of,
    read_snapshot,
    read_view,
)
from exclusivelog.tables import Kind, Tables
from exclusivelog.topic import Topic
from exclusivelog.waits import check_timeout

log = logging.getLogger("exclusivelog")

R = TypeVar("R")
Later = concurrent.futures.Future

# An owner that was asked to go writes for this long: each change of owner costs two
# transactions, and two processes that write all the time would do little else.
QUANTUM_SECONDS = 0.005


class Token:
    """A call that was submitted, and may be given up."""

    given_up = False


class Write(Generic[R]):
    """One call's write, and what has come of it so far."""

    __slots__ = ("appended", "compute", "done", "result", "then")

    def __init__(
        self, compute: Callable[[], tuple[list[Item], R]], then: Callable[[], R] | None
    ) -> None:
        self.compute, self.then = compute, then
        self.appended: Appended | None = None
        self.done = False
        self.result: R


class Replica:
    """What shared states have in common: ownership, catching up, snapshots, the end.

    A subclass says by `_apply_item` what a message does, by `_items` and `_restore` what a
    snapshot has, and by `_begin` what everything begins with.
    """

    _restores_views = False  # can it begin with a compacted view?
    _appended = Appended  # for what is compiled

    def __init__(
        self, topic: Topic, kind: Kind, snapshot_every: int | None, timeout: float | None
    ) -> None:
        if snapshot_every is not None and (
            not isinstance(snapshot_every, int) or snapshot_every < 1
        ):
            raise ValueError(f"snapshot_every={snapshot_every!r}: it takes a number of writes")
        check_timeout(timeout)
        if not isinstance(topic, Topic):
            raise TypeError(f"topic takes a Topic, not {type(topic).__name__}")
        self.topic = topic
        self._kind, self._kind_is_known = kind, False
        self._engine = topic.engine
        self._snapshot_every = snapshot_every
        self._timeout = timeout
        self._writing = threading.RLock()  # taken before the next one; not to wait for a flush
        self._lock = threading.RLock()  # of the state: never held to wait for topic or flush
        self._inside = 0  # the thread that is in a user function, which must not call back
        self._closing = self._closed = False
        self._failure: StateError | None = None
        self._refused: SnapshotRefused | None = None  # in the background: the next call is told
        self._producer: Producer | None = None
        self._unflushed: Appended | None = None  # what was appended last
        self._asked: Producer | None = None  # that is to give the topic back
        self._waiting: ProducerFuture | None = None  # to become owner,
        self._waiting_for: Token | None = None  # for the sake of this call
        self._tokens: weakref.WeakKeyDictionary[Later[Any], Token] = weakref.WeakKeyDictionary()
        self._called = threading.local()
        self._owned_since = 0.0
        self._checked = -1  # the journal's version when we were last known to own the topic
        self._position = 0  # what stands before it is applied; the reader may be elsewhere
        self._torn = False  # something is half applied
        self._snapshot_at = 0
        self._snapshots: threading.Thread | None = None
        self._calls = Calls(self._flush)
        self._words = self._engine.ledger.lockfile.words
        self._word = self._engine.ledger.lockfile.topic_word(topic.id)
        self._seen = -1
        self._open()

    # ---- for the subclass ----------------------------------------------------------------

    def _apply_item(self, key: bytes | None, value: bytes | None) -> None:
        raise NotImplementedError

    def _items(self) -> list[Item]:
        raise NotImplementedError

    def _restore(self, items: list[Item]) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        raise NotImplementedError

    # ---- catching up ---------------------------------------------------------------------

    def _open(self) -> None:
        with self._engine.ledger.read() as tables:
            self._kind_is_known = check_kind(tables, self.topic.id, self._kind)
        self._begin()
        self._take_snapshot()
        self._reader = self.topic.reader(self._position)
        self._catch_up()

    def _begin_anew(self) -> None:
        # An applier was interrupted, in the middle of its work for all that is known.
        self._begin()
        self._position = 0
        self._take_snapshot()
        self._torn = False

    def _take_snapshot(self) -> bool:
        """Go on from the newest snapshot, if that is ahead of what we have."""
        try:
            found = met_twice(self._read_snapshot)
        except LedgerCorruptedError as error:
            if self.topic.first_offset > self._position:
                raise
            log.warning("%s; reading all messages instead", error)
            return False
        if found is None or found[0] <= self._position:
            return False
        self._torn = True
        try:
            self._restore(found[1])
        except Exception as error:
            return self._do_without(found[0], error)
        self._position = self._snapshot_at = found[0]
        self._torn = False
        return True

    def _do_without(self, offset: int, error: Exception) -> bool:
        # The application's own encode and decode do not fit each other.
        text = f"topic {self.topic.name!r}: the snapshot as of offset {offset} cannot be decoded"
        if self.topic.first_offset > 0:
            raise StateError(f"{text}: {error!r}, and older messages were trimmed") from error
        log.warning("%s: %r; reading all messages instead", text, error)
        self._begin()
        self._position = 0
        self._torn = False
        return False

    def _read_snapshot(self) -> tuple[int, list[Item]] | None:
        with self._engine.ledger.read() as tables:
            found = read_snapshot(tables, self.topic.id)
            reached = max(self._position, found[0] if found else 0)
            if self._restores_views and tables.topic(self.topic.id).first_offset > reached:
                found = read_view(tables, self.topic.id) or found
            return found

    def _catch_up(self) -> None:
        """Apply what others have written."""
        if self._unflushed is not None:  # else the reader would not see it
            self._flush(self._unflushed)
        seen = self._words.load(self._word)  # before the look
        if self._torn:
            self._begin_anew()
        while True:
            try:
                self._read_on()
                break
            except OffsetTrimmedError as error:
                # Others may trim what is in a snapshot, and we have slept meanwhile, perhaps
                # again while we restored it.
                if not self._take_snapshot():
                    raise OffsetTrimmedError(
                        f"the state in topic {self.topic.name!r} cannot be restored: {error}; its "
                        f"snapshot goes up to offset {self._position}"
                    ) from error
        self._seen = seen

    def _read_on(self) -> None:
        if self._reader.position != self._position:
            self._reader.move_to(self._position)
        for message in self._reader:
            self._apply_one(message.offset, *item_of(message))

    def _apply_one(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        self._torn = True  # until it is applied and counted, should Ctrl-C strike
        try:
            self._apply_item(key, value)
        except Exception as error:
            self._failure = StateError(
                f"topic {self.topic.name!r}: the message at offset {offset} could not be applied: "
                f"{error!r}. It is in the log; open the state with an applier that can"
            )
            raise self._failure from error
        self._position = offset + 1
        self._torn = False

    def _freshen(self, latest: bool) -> None:
        """Before a read: catch up, cheaply where nothing has come."""
        if latest:
            if self._torn or not self._still_owner():
                self._engine.make_visible()
                self._catch_up()
        elif self._torn or (self._producer is None and self._words.load(self._word) != self._seen):
            self._catch_up()

    def _still_owner(self) -> bool:
        # Nobody else has written, if nobody else has become owner; that would show here.
        producer = self._producer
        if producer is None:
            return False
        version = self._engine.ownership_version
        if version == self._checked:
            return True
        if producer.state != "open":
            self._forget_producer()
            return False
        self._checked = version
        return True

    def _check(self) -> None:
        """May it be used here, and by this thread?"""
        if _core.usable(self):
            return
        self._check_usable()
        if self._busy_here:
            raise LedgerError(
                f"topic {self.topic.name!r}: called from a signal handler or a finalizer that "
                "struck inside a call of this very thread; leave it to another thread, or to later"
            )

    @property
    def _busy_here(self) -> bool:
        return bool(self._writing._is_owned() or self._lock._is_owned())  # type: ignore[attr-defined]

    def _check_usable(self) -> None:
        # Without a lock: in a forked child, nobody would ever give it back.
        self._check_open()
        self._check_failure()
        self._check_outside()
        if self._refused is not None:
            error, self._refused = self._refused, None
            raise SnapshotRefused(f"{error}. This call did nothing; no more are taken") from error

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise StateError(str(self._failure)) from self._failure.__cause__

    def _check_outside(self) -> None:
        if self._inside == threading.get_ident():
            raise RuntimeError(
                f"topic {self.topic.name!r}: called from inside one of its own functions, whose "
                "result would rest on what this changes; call it afterwards"
            )

    @contextlib.contextmanager
    def _calling_out(self) -> Iterator[None]:
        self._inside = threading.get_ident()
        try:
            yield
        finally:
            self._inside = 0

    # ---- reading -------------------------------------------------------------------------

    def _read(self, look: Callable[[], R], latest: bool) -> R:
        """What `look()` finds in the state, once that is durable."""
        self._check()
        with _core.Holding(self._lock):
            self._freshen(latest)
            result = look()
            seen = self._unflushed
        if seen is not None and not seen.flushed:
            self._settle(seen)
        return result

    def _await_what_was_read(self) -> None:
        seen = self._unflushed
        if seen is not None:
            self._flush(seen)

    # ---- writing -------------------------------------------------------------------------

    def _append(
        self, compute: Callable[[], tuple[list[Item], R]], then: Callable[[], R] | None = None
    ) -> R:
        """Append what `compute` makes of the newest state, as its owner: (messages, result).
        `then()`, before anything else changes the state, gives the result in its stead."""
        self._check()
        write = Write(compute, then)
        try:
            self._write_in_turn(write)
        finally:
            if write.appended is not None and not write.appended.flushed:
                self._settle(write.appended)
        return write.result

    def _write_in_turn(self, write: Write[Any]) -> None:
        end = None if self._timeout is None else time.monotonic() + self._timeout
        with _core.Holding(self._writing):
            while not write.done:
                self._check_usable()
                producer = self._own(end)
                with _core.Holding(self._lock):
                    if self._producer is producer:
                        self._write(producer, write)

    def _write(self, producer: Producer, write: Write[Any]) -> None:
        """Compute, append and apply; `write.done` stays False where the topic was lost before."""
        self._check_failure()
        write.appended = self._unflushed  # what it rests on, should it append nothing
        self._inside = threading.get_ident()
        try:
            items, write.result = write.compute()
        finally:
            self._inside = 0
        if items and not self._send(producer, items, write):
            return
        write.done = True
        self._snapshot_if_due()
        if write.then is not None:
            write.result = write.then()

    def _own(self, end: float | None) -> Producer:
        """The producer, of one who has seen all that its predecessors wrote (rule D8)."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._give_back(asked)
        if self._still_owner() and self._producer is not None:
            return self._producer
        producer = self._await_producer(end)
        try:
            self._begin_to_own()
            with _core.Holding(self._lock):
                self._catch_up()
        except BaseException:
            producer.close()
            raise
        self._owned_since, self._checked = time.monotonic(), -1
        self._producer = producer
        return producer

    def _begin_to_own(self) -> None:
        if not self._kind_is_known:  # before the first message
            with self._engine.ledger.write_beside() as tables:
                if not check_kind(tables, self.topic.id, self._kind):
                    tables.put_kind(self.topic.id, self._kind)
            self._kind_is_known = True

    def _await_producer(self, end: float | None) -> Producer:
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            # Before: who gives another call up must not take this wait for that one's.
            self._waiting_for = token = getattr(self._called, "token", None)
            self._waiting = future = self.topic.producer_async(
                "wait_for_exclusive", timeout=left, follow=False, on_fenced=self._lost,
                on_wanted=self._wanted,
            )  # fmt: skip
            try:
                if self._closing or (token is not None and token.given_up):
                    future.cancel()  # it was too early to see this one
                return future.result()
            except ProducerFencedError:  # by somebody who did not wait; he will go
                continue
            except concurrent.futures.CancelledError:
                if self._closing:
                    raise self._closed_error() from None
                raise
            except BaseException:
                future.give_up()
                raise
            finally:
                self._waiting = None

    def _send(self, producer: Producer, items: list[Item], write: Write[Any]) -> bool:
        """Append and apply; False if the topic was lost before."""
        try:
            self._unflushed = write.appended = producer.append(
                [message_of(*item) for item in items]
            )
            self._take_over(write.appended.offset, items)
        except ProducerFencedError:
            self._forget_producer()
            return False
        except StateError as error:
            self._forget_producer()
            error.maybe_written = True  # it is
            raise
        except BaseException:
            # Nobody knows how far it came: whoever owns the topic next reads it from the log.
            self._forget_producer()
            raise
        return True

    def _take_over(self, first: int, items: list[Item]) -> None:
        if first != self._position:
            self._catch_up()
            return
        for offset, item in enumerate(items, first):
            self._apply_one(offset, *item)

    def _settle(self, appended: Appended) -> None:
        """Return once this is durable; in the background, leave that to the acknowledgement."""
        if not self._calls.defer(appended):
            self._flush(appended)

    def _flush(self, appended: Appended) -> None:
        try:
            appended.producer.await_flush(appended)
        except Exception:
            # It may be in the log, or not: the state is made anew from there.
            with _core.Holding(self._lock):
                self._unflushed = None
                self._torn = True
                self._forget_producer()
            raise

    def _forget_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def _lost(self, producer: Producer, error: ProducerFencedError) -> None:
        """The topic is somebody else's: reads must look for what he writes."""
        with self._writing:
            if self._producer is producer:
                self._forget_producer()

    def _wanted(self, producer: Producer) -> None:
        """Another process waits for the topic."""
        left = self._owned_since + QUANTUM_SECONDS - time.monotonic()
        if 0 < left <= QUANTUM_SECONDS:
            time.sleep(left)
        self._asked = producer  # whoever writes next gives it back, if that is before us
        with self._writing:
            self._give_back(producer)
            if self._asked is producer:
                self._asked = None

    def _give_back(self, producer: Producer) -> None:
        if self._producer is producer:
            self._producer = None
        producer.close()

    # ---- snapshots -----------------------------------------------------------------------

    def snapshot(self) -> int:
        """Keep the state as it is, so that opening it need not read what led to it (rule I4).
        Returns the offset that it goes up to: `topic.trim(before=...)` can take what is older.
        """
        self._check()
        with _core.Holding(self._lock):
            self._freshen(latest=False)
            offset, items = self._position, self._items()
            seen = self._unflushed
        if seen is not None:
            self._flush(seen)  # a snapshot must not go beyond what is durable
        self._engine.snapshot(self.topic.id, offset, items)
        self._snapshot_at = max(self._snapshot_at, offset)
        return offset

    def snapshot_async(self) -> Later[int]:
        """`snapshot`, as a future."""
        return self.submit(self.snapshot)

    def _snapshot_if_due(self) -> None:
        due = self._snapshot_every is not None and (
            self._position - self._snapshot_at >= self._snapshot_every
        )
        if due and (self._snapshots is None or not self._snapshots.is_alive()):
            self._snapshot_at = self._position
            thread = threading.Thread(
                target=self._snapshot_quietly, name="exclusivelog-snapshot", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # too many threads; what was written is in the log
                log.warning("topic %r: no snapshot: %s", self.topic.name, error)
            else:
                self._snapshots = thread

    def _snapshot_quietly(self) -> None:
        try:
            self.snapshot()
        except SnapshotRefused as error:
            self._snapshot_every, self._refused = None, error
        except Exception as error:  # the next one may do
            if not self._closed and not self._engine.closed:
                log.warning("topic %r: no snapshot: %s", self.topic.name, error)

    # ---- futures -------------------------------------------------------------------------

    def submit(
        self, call: Callable[..., R], *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[R]:
        """`call(*args, **kwargs)`, one of this state's own methods, in the background; calls are
        made in the order in which they were submitted. `cancel()` on the future is too late
        once a call has begun; see `give_up`."""
        self._check_open()
        token = Token()
        if self._closing:
            raise self._closed_error()
        try:
            with threads.needed(self._engine.path):
                future = self._calls.submit(
                    functools.partial(self._call_for, token, call, *args, **kwargs)
                )
        except (RuntimeError, LedgerError):
            if self._closing:  # by another thread, just now
                raise self._closed_error() from None
            raise
        self._tokens[future] = token
        return future

    def _acknowledge(self, future: Any, result: Any, appended: Appended) -> None:
        """`future.set_result(result)` in the background, once `appended` is durable."""
        self._calls.acknowledge(future, result, appended)

    def _call_for(self, token: Token, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        self._called.token = token
        return call(*args, **kwargs)

    def give_up(self, future: concurrent.futures.Future[Any]) -> None:
        """A call that was submitted need not wait for the topic, if it does: it leaves the
        queue then. What it has begun to write takes its course."""
        token = self._tokens.get(future)
        if token is not None:
            token.given_up = True
            waiting = self._waiting
            if waiting is not None and self._waiting_for is token:
                waiting.cancel()

    def _check_open(self) -> None:
        self._engine.check_open()
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> EngineClosedError:
        return EngineClosedError(f"this state of topic {self.topic.name!r} is closed")

    # ---- close ---------------------------------------------------------------------------

    def close(self) -> None:
        """Give the topic back, end what runs in the background. Twice does nothing. Calls that
        were submitted before are made; those that would have to wait for another owner end,
        with EngineClosedError. RuntimeError inside one of its own functions."""
        if self._engine.forked:
            return
        self._check_outside()  # it would wait for calls that wait for this one
        if self._busy_here:
            self._engine.call_later(self.close)  # a signal handler calls it, or a finalizer
            return
        self._closing = True  # no call is submitted from now on
        self._stop_waiting()
        self._calls.close()
        with _core.Holding(self._writing):
            if self._closed:
                return
            self._closed = True
            if not self._engine.closed:
                self._forget_producer()
                self._reader.close()
        if self._snapshots is not None:
            self._snapshots.join(timeout=60)

    def _stop_waiting(self) -> None:
        waiting = self._waiting
        if waiting is not None and not self._engine.closed:
            waiting.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on topic {self.topic.name!r}>"


def check_kind(tables: Tables, topic: int, kind: Kind) -> bool:
    """Does the topic hold this? StateError if it holds something else; False if none knows yet."""
    held = tables.kind(topic)
    if any(value and (held.get(name) or value) != value for name, value in kind.items()):
        name = tables.topic(topic).name
        raise StateError(
            f"topic {name!r} holds {_told(held)}; it cannot be opened as {_told(kind)}"
        )
    return bool(held)


def _told(kind: Kind) -> str:
    codecs = ", ".join(f"{name}={value}" for name, value in kind.items() if name != "holds")
    return f"a {kind['holds']}" + (f" ({codecs})" if codecs else "")
