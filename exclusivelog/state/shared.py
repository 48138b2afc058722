"""What shared states and maps have in common: their parts, and how a read and a write use them.

A write makes this process the topic's exclusive owner (`Ownership`), brings the copy in memory up
to date (`Replica`), appends, and applies what it has appended. This process stays the owner until
another one waits for the topic.

Writers hold the state's lock only to compute, append and apply. They wait for the flush without
it, so that one flush serves all that wait (rule I5), and return after it. A read that has seen
something unflushed waits for that flush, too: no caller learns what a power cut could take.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from exclusivelog import _core, threads
from exclusivelog.closing import Closing
from exclusivelog.errors import LedgerError, ProducerFencedError, StateError, called_reentrantly
from exclusivelog.messages.items import Item, message_of
from exclusivelog.producer import Appended, Producer
from exclusivelog.state.backend import Kind, check_kind, record_kind
from exclusivelog.state.calls import CallFuture, Calls
from exclusivelog.state.ownership import Ownership, closed_error
from exclusivelog.state.replica import Content, Replica
from exclusivelog.state.snapshots import SnapshotRefused, Snapshots
from exclusivelog.topic import Topic
from exclusivelog.waits import check_timeout

R = TypeVar("R")
P = ParamSpec("P")
M = TypeVar("M", bound="Shared")
Future = concurrent.futures.Future

SNAPSHOT_EVERY = 100_000


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


class Shared(_core.SharedBase, Closing):
    """The base of `SharedState` and `SharedMap`."""

    _appended = Appended  # for the compiled core
    _ownership: Ownership
    _snapshots: Snapshots
    _replica: Replica

    def __init__(
        self, topic: Topic, kind: Kind, content: Content, snapshot_every: int | None,
        timeout: float | None,
    ) -> None:  # fmt: skip
        check_timeout(timeout)
        if not isinstance(topic, Topic):
            raise TypeError(f"topic takes a Topic, not {type(topic).__name__}")
        self.topic = topic
        self._engine = topic.engine
        self._kind, self._timeout = kind, timeout
        self._writing = _core.Lock()  # taken before `_lock`; not held to wait for a flush
        self._lock = _core.Lock()  # of the replica: never held to wait for topic or flush
        self._inside = 0  # the thread that runs a user function, which must not call back
        self._closing = self._closed = False
        self._unflushed: Appended | None = None  # what was appended last
        self._calls = Calls(self._flush)
        self._ownership = Ownership(topic, self._writing, self._calls, self._prepare_to_write)
        self._snapshots = Snapshots(topic.name, snapshot_every, self._snapshot_unless_closed)
        self._kind_is_known = check_kind(topic, kind)
        replica = Replica(topic, content, self._snapshots)
        replica.catch_up()
        self._replica = replica  # last: now it may be called

    # ---- may it be called? ---------------------------------------------------------------

    def _check(self) -> None:
        """Raise unless it can be used, and by this thread."""
        if self._usable():
            return
        self._check_usable()
        if self._busy_here:
            raise called_reentrantly(f"topic {self.topic.name!r}")

    @property
    def _busy_here(self) -> bool:
        return self._writing.held_here() or self._lock.held_here()

    def _check_usable(self) -> None:
        # Without a lock: in a forked child, no thread would ever release it.
        self._check_open()
        self._replica.check()
        self._check_outside()
        if self._snapshots.refused is not None:
            error, self._snapshots.refused = self._snapshots.refused, None
            raise SnapshotRefused(f"{error}. This call did nothing; no more are taken") from error

    def _check_open(self) -> None:
        self._engine.check_open()
        if self._closed:
            raise closed_error(self.topic.name)

    def _check_outside(self) -> None:
        if self._inside == threading.get_ident():
            raise RuntimeError(
                f"topic {self.topic.name!r}: called from inside a function that this state runs, "
                "whose result would depend on this call; call it after that function has returned"
            )

    # ---- reading -------------------------------------------------------------------------

    def _read(self, find: Callable[[], R], latest: bool) -> R:
        """Return what `find()` finds in the content, once that is durable."""
        self._check()
        with self._lock:
            self._freshen(latest)
            result = find()
            seen = self._unflushed
        if seen is not None and not seen.flushed:
            self._settle(seen)
        return result

    def _freshen(self, latest: bool) -> None:
        """Before a read: catch up, unless nothing can have come."""
        replica, ownership = self._replica, self._ownership
        if latest:
            if replica.torn or not ownership.is_held():
                self._engine.make_visible()
                self._catch_up()
        elif replica.torn or (ownership.producer is None and replica.mark() != replica.seen):
            self._catch_up()

    def _catch_up(self) -> None:
        if self._unflushed is not None:  # the reader does not see it yet
            self._flush(self._unflushed)
        self._replica.catch_up()

    # ---- writing -------------------------------------------------------------------------

    def _append(
        self, compute: Callable[[], tuple[list[Item], R]], then: Callable[[], R] | None = None
    ) -> R:
        """Become the owner, and append what `compute` makes of the newest content: (messages,
        result). `then()`, before anything else changes the content, gives the result instead."""
        self._check()
        write = Write(compute, then)
        try:
            self._write_as_owner(write)
        finally:
            if write.appended is not None and not write.appended.flushed:
                self._settle(write.appended)
        return write.result

    def _write_as_owner(self, write: Write[Any]) -> None:
        end = None if self._timeout is None else time.monotonic() + self._timeout
        with self._writing:
            while not write.done:
                self._check_usable()
                producer = self._ownership.acquire(end)
                with self._lock:
                    if self._ownership.producer is producer:
                        self._write(producer, write)

    def _prepare_to_write(self) -> None:
        """As a new owner, before the first write."""
        if not self._kind_is_known:
            record_kind(self.topic, self._kind)
            self._kind_is_known = True
        with self._lock:
            self._catch_up()

    def _write(self, producer: Producer, write: Write[Any]) -> None:
        """Compute, append and apply; `write.done` stays False if the topic was lost before."""
        self._replica.check()
        write.appended = self._unflushed  # its result rests on it, should it append nothing
        self._inside = threading.get_ident()
        try:
            items, write.result = write.compute()
        finally:
            self._inside = 0
        if items and not self._send(producer, items, write):
            return
        write.done = True
        if self._replica.position >= self._snapshots.due_at:
            self._snapshots.take_if_due(self._replica.position)
        if write.then is not None:
            write.result = write.then()

    def _send(self, producer: Producer, items: list[Item], write: Write[Any]) -> bool:
        """Append and apply; False if the topic was lost before."""
        try:
            self._unflushed = write.appended = producer.append(
                [message_of(*item) for item in items]
            )
            self._apply_own(write.appended.offset, items)
        except ProducerFencedError:
            self._ownership.release()
            return False
        except StateError as error:
            self._ownership.release()
            error.maybe_written = True  # it is
            raise
        except BaseException:
            # How far it came is unknown: the next owner reads it from the log.
            self._ownership.release()
            raise
        return True

    def _apply_own(self, first: int, items: list[Item]) -> None:
        if first == self._replica.position:
            self._replica.apply_own(first, items)
        else:
            self._catch_up()

    # ---- durability ----------------------------------------------------------------------

    def _settle(self, appended: Appended) -> None:
        """Return once this is durable; in a background call, leave that to its acknowledgement."""
        if not self._calls.defer(appended):
            self._flush(appended)

    def _flush(self, appended: Appended) -> None:
        try:
            appended.producer.await_flush(appended)
        except Exception:
            # It may be in the log, or not: the content is read anew from there.
            with self._lock:
                self._unflushed = None
                self._replica.torn = True
                self._ownership.release()
            raise

    def _flush_what_was_read(self) -> None:
        seen = self._unflushed
        if seen is not None:
            self._flush(seen)

    def snapshot(self) -> int:
        """Store a snapshot, so that opening the state need not read what led to it (rule I4).
        Returns the offset that it goes up to: `topic.trim(before=...)` can remove what is older.

        Raises StateError if the state would not come back from it as it is.
        """
        self._check()
        with self._lock:
            self._freshen(latest=False)
            offset, items = self._replica.position, self._replica.content.to_items()
            seen = self._unflushed
        if seen is not None:
            self._flush(seen)  # a snapshot must not go beyond what is durable
        self._engine.snapshot(self.topic.id, offset, items)
        self._snapshots.note(offset)
        return offset

    def _snapshot_unless_closed(self) -> None:
        try:
            self.snapshot()
        except SnapshotRefused:
            raise
        except Exception:
            if not self._closed and not self._engine.closed:
                raise

    # ---- in the background ---------------------------------------------------------------

    def snapshot_async(self) -> Future[int]:
        """`snapshot`, as a future."""
        return self.submit(self.snapshot)

    def submit(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> Future[R]:
        """Run `call(*args, **kwargs)`, one of this state's own methods, in the background. Calls
        run in the order in which they were submitted. `cancel()` on the future is too late once
        a call has begun; see `give_up`."""
        self._check_open()
        if self._closing:
            raise closed_error(self.topic.name)
        try:
            with threads.needed(self._engine.path):
                return self._calls.submit(functools.partial(call, *args, **kwargs))
        except (RuntimeError, LedgerError):
            if self._closing:  # by another thread in between
                raise closed_error(self.topic.name) from None
            raise

    def give_up(self, future: Future[Any]) -> None:
        """Let a call that was submitted stop waiting for the topic, if it does: it leaves the
        queue. A write that has begun takes its course."""
        if isinstance(future, CallFuture):
            self._ownership.give_up(future)

    def close(self) -> None:
        """Give the topic back and end the background threads. Closing twice does nothing. Calls
        that were submitted before are run; those that would have to wait for the topic end with
        EngineClosedError. Raises RuntimeError inside one of the state's own functions."""
        if self._engine.forked:
            return
        self._check_outside()  # it would wait for calls that wait for this one
        if self._busy_here:  # a signal handler calls it, or a finalizer
            self._engine.callbacks.call_later(self.close)
            return
        self._closing = True  # no call is submitted from now on
        self._ownership.end()
        self._calls.close()
        with self._writing:
            if self._closed:
                return
            self._closed = True
            if not self._engine.closed:
                self._ownership.release()
                self._replica.close()
        self._snapshots.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on topic {self.topic.name!r}>"


def acknowledge(shared: Shared, future: Any, result: Any, appended: Appended) -> None:
    """Have `future.set_result(result)` called in the background, once `appended` is durable."""
    shared._calls.acknowledge(future, result, appended)


def in_background(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], Future[R]]:
    """The method's second form, which returns a future."""
    name = method.__name__

    def call(self: M, /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return self.submit(getattr(self, name), *args, **kwargs)

    functools.update_wrapper(call, method)
    call.__name__, call.__doc__ = f"{name}_async", f"`{name}`, as a future."
    call.__qualname__ = f"{method.__qualname__}_async"
    return call
