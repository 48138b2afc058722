"""Requests for topics: who is granted, who waits, who is refused (rules A, B5, D).

The first attempt is made in the caller's thread: it reads the log to its end, decides, and asks. A
request that waits is a record in the topic's log (`waiting`), and a row here. The engine's
background thread makes its next attempt when the topic is free and it is the first living waiter:
when the log shows a release, and every `LOOK_SECONDS`, as a process that dies writes nothing.

Deciding is for order alone. Two that ask at once are told apart by the log (rule J1).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from exclusivelog import logs
from exclusivelog.backend import ProducerRequest
from exclusivelog.cluster.following import TopicLog, fenced_error
from exclusivelog.cluster.frames import Grant, Holder
from exclusivelog.cluster.owning import ANSWER_SECONDS, Owning, now_ms
from exclusivelog.cluster.session import Registration
from exclusivelog.cluster.waiting import Wait
from exclusivelog.errors import (
    ClusterError,
    EngineClosedError,
    ExclusiveLogError,
    InvalidEpochError,
    ProducerBusyError,
    ProducerFencedError,
    WaitTimeoutError,
)
from exclusivelog.types import AccessMode, EngineInfo, OwnerInfo
from exclusivelog.waits import AnyFuture, give_granted

__all__ = ["LOOK_SECONDS", "Asking", "Requests"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1


class Host(Protocol):
    """The engine that is asked."""

    info: EngineInfo
    id: str
    name: str

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""

    def lives(self, engine: str) -> bool:
        """Does the engine of that id live?"""

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run application code in a thread of its own."""


class Granted(Protocol):
    """The sessions of the engine."""

    def keep(self, number: int, owning: Owning) -> None:
        """This session was granted; `open_session` takes it."""

    def drop(self, number: int) -> None:
        """Nobody takes it: release it."""


@dataclass(eq=False)
class Asking:
    """One request. `number` is its own alone; `deadline` of the monotonic clock."""

    topic: TopicLog
    future: AnyFuture
    request: ProducerRequest
    name: str
    number: int
    since: int
    deadline: float | None
    lock: threading.Lock = field(default_factory=threading.Lock)  # held during an attempt
    ended: bool = False

    @property
    def mode(self) -> AccessMode:
        """How it asks."""
        return AccessMode(self.request.mode)


class Requests:
    """One engine's requests that wait, and the attempts of all."""

    def __init__(self, host: Host, granted: Granted) -> None:
        self._host, self._granted = host, granted
        self._waiting: dict[int, Asking] = {}
        self._names: dict[tuple[int, str], Asking] = {}  # of requests that have no outcome
        self._lock = threading.Lock()

    # ---- what `GrantFuture` asks -----------------------------------------------------------

    def forget(self, future: AnyFuture) -> bool:
        """Take a request out of its queue; False if it does not wait. An attempt that is being made
        ends first."""
        asking = next((each for each in self.all() if each.future is future), None)
        if asking is None:
            return False
        with asking.lock:
            if asking.ended:
                return False
            self._end(asking)
            return True

    def withdraw(self, session: Any) -> bool:
        """A session is not in a queue any more."""
        return False

    def settles(self, session: Any) -> bool:
        """Its future is settled before anybody knows of it."""
        return False

    # ---- waiting ---------------------------------------------------------------------------

    def all(self) -> list[Asking]:
        """The requests that wait."""
        with self._lock:
            return list(self._waiting.values())

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def _end(self, asking: Asking, granted: bool = False) -> None:
        """It has an outcome, or it is withdrawn. With its lock."""
        asking.ended = True
        with self._lock:
            waited = self._waiting.pop(asking.number, None) is not None
            if self._names.get((asking.topic.id, asking.name)) is asking:
                del self._names[asking.topic.id, asking.name]
        if waited and not granted:
            asking.topic.leave_queue(asking.number)

    def _fail(self, asking: Asking, error: ExclusiveLogError) -> None:
        self._end(asking)

        def settle() -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
                asking.future.set_exception(error)

        self._settle(asking.future, settle)

    def _settle(self, future: AnyFuture, settle: Callable[[], None]) -> None:
        """Code of the application may hang on the future: not in a thread of the library."""
        if future.has_callbacks:
            self._host.call_soon(settle)
        else:
            settle()

    # ---- the first attempt -------------------------------------------------------------------

    def open(self, topic: TopicLog, future: AnyFuture, request: ProducerRequest) -> None:
        """Grant, queue or refuse this request. What refuses it is raised by the future."""
        timeout = request.timeout
        asking = Asking(
            topic, future, request, request.name or f"producer-{secrets.token_hex(8)}",
            secrets.randbits(62), now_ms(), None if timeout is None else time.monotonic() + timeout,
        )  # fmt: skip
        with asking.lock:
            try:
                self._reserve_name(asking)
                self._try_first(asking)
            except ExclusiveLogError as error:
                self._fail(asking, error)
            except BaseException:
                self._end(asking)
                raise

    def _reserve_name(self, asking: Asking) -> None:
        """Of two requests here with one name, the second is refused at once (rule A6)."""
        if asking.mode is AccessMode.EXCLUSIVE_WITH_FENCING:
            return
        with self._lock:
            first = self._names.setdefault((asking.topic.id, asking.name), asking)
        if first is not asking:
            raise self._busy(asking, self._wait_of(first))

    def _try_first(self, asking: Asking) -> None:
        end = time.monotonic() + ANSWER_SECONDS
        patient = True
        while not self._attempt(asking, patient):
            if asking.number in self._waiting:
                return
            if time.monotonic() > end:
                raise WaitTimeoutError(
                    f"topic {asking.topic.name!r} was not granted within {ANSWER_SECONDS} s: "
                    "others append to it all the time"
                )
            patient = False

    def _attempt(self, asking: Asking, patient: bool = True) -> bool:
        """Decide, and ask. False if it waits, or another record came first."""
        topic = asking.topic
        topic.catch_up()
        fencing = asking.mode is AccessMode.EXCLUSIVE_WITH_FENCING
        with contextlib.nullcontext() if patient or not fencing else topic.alone():
            if not patient:
                topic.catch_up()
            with topic.changed:
                seen, owner, queue = topic.tenure, topic.owner, topic.waiters.in_order()
            if owner is not None and not self._host.lives(owner.holder.engine_id):
                owner = None
            ahead = [
                each for each in queue
                if each.number != asking.number and self._host.lives(each.engine_id)
            ]  # fmt: skip
            self._check_claim(asking, topic)
            if asking.number not in self._waiting:
                self._check_name(asking, owner, ahead)
            queue = [each for each in queue if each in ahead or each.number == asking.number]
            first = not queue or queue[0].number == asking.number
            if not fencing and (owner is not None or not first):
                return self._queue(asking, owner)
            return self._ask(asking, owner is None and not ahead, seen)

    def _check_claim(self, asking: Asking, topic: TopicLog) -> None:
        """Rules B5 and B6: before anybody is disturbed."""
        claim, epoch = asking.request.topic_epoch, topic.state.epoch
        if claim is None:
            return
        if claim < epoch:
            raise fenced_error(
                topic.name, f"has epoch {epoch}: topic_epoch={claim} is out of date",
                topic.state.grant,
            )  # fmt: skip
        if claim > epoch or claim == 0:
            raise InvalidEpochError(
                f"topic {topic.name!r}: topic_epoch={claim} was never granted: the topic is at "
                f"epoch {epoch}"
            )

    def _check_name(self, asking: Asking, owner: Grant | None, waiting: Iterable[Wait]) -> None:
        if asking.mode is AccessMode.EXCLUSIVE_WITH_FENCING:
            return
        if owner is not None and owner.holder.producer_name == asking.name:
            raise self._busy(asking, owner)
        for each in waiting:
            if each.producer_name == asking.name:
                raise self._busy(asking, each)

    def _busy(self, asking: Asking, by: Grant | Wait) -> ProducerBusyError:
        held = by.owner() if isinstance(by, Grant) else _holder(by, asking.topic.state.epoch)
        return ProducerBusyError(
            f"topic {asking.topic.name!r} has a live producer named {asking.name!r}, of engine "
            f"{held.engine_name!r} (id {held.engine_id}, pid {held.pid}); use another name, or "
            "close that one first",
            holder=held,
        )

    def _wait_of(self, asking: Asking) -> Wait:
        info, request = self._host.info, asking.request
        return Wait(
            asking.number, info.id, info.name, info.pid, asking.name, request.priority,
            asking.since, request.properties,
        )  # fmt: skip

    def _queue(self, asking: Asking, owner: Grant | None) -> bool:
        if asking.mode is not AccessMode.WAIT_FOR_EXCLUSIVE:
            what = "is not free for an exclusive producer"
            raise fenced_error(
                asking.topic.name, what if owner is not None else f"{what}: others wait for it",
                owner,
            )  # fmt: skip
        if asking.number not in self._waiting:
            with self._lock:
                self._waiting[asking.number] = asking
            asking.topic.join_queue(self._wait_of(asking))
        return False

    def _ask(self, asking: Asking, free: bool, seen: tuple[int, bool]) -> bool:
        info, request = self._host.info, asking.request
        holder = Holder(
            info.id, info.name, info.pid, asking.name, asking.mode, request.priority, now_ms(),
            request.properties,
        )  # fmt: skip
        try:
            owning = asking.topic.ask(holder, request.topic_epoch if free else None, seen)
        except (ProducerFencedError, InvalidEpochError):
            return False  # the epoch has changed just now: decide again
        if owning is None:
            return False
        self._grant(asking, owning)
        return True

    def _grant(self, asking: Asking, owning: Owning) -> None:
        writer, request, future = owning.writer, asking.request, asking.future
        session = Registration(
            writer.session, asking.topic.id, asking.name, request.mode, request.priority,
            writer.epoch, request.properties, request.notify_on_contention,
        )  # fmt: skip
        self._granted.keep(session.id, owning)
        try:
            future.session = session
            future.granted = future.make(session, writer.last_sequence)
        except BaseException:
            self._granted.drop(session.id)
            raise
        self._end(asking, granted=True)
        self._settle(future, lambda: give_granted(future))

    # ---- later attempts ----------------------------------------------------------------------

    def look(self) -> None:
        """Give those their turn whose turn it is, and end what has timed out. In the engine's
        background thread."""
        by_topic: dict[TopicLog, list[Asking]] = {}
        for asking in self.all():
            by_topic.setdefault(asking.topic, []).append(asking)
        for topic, waiting in by_topic.items():
            try:
                self._look_at(topic, waiting)
            except (ClusterError, WaitTimeoutError) as error:  # the broker restarts, say
                logs.emit(
                    log, logs.WAITERS_WAIT_ON, engine=self._host.name, engine_id=self._host.id,
                    topic=topic.name, reason=str(error),
                )  # fmt: skip

    def _look_at(self, topic: TopicLog, waiting: list[Asking]) -> None:
        with topic.changed:
            owner, queue = topic.owner, topic.waiters.in_order()
        turn = None
        if owner is None or not self._host.lives(owner.holder.engine_id):
            first = next((each for each in queue if self._host.lives(each.engine_id)), None)
            turn = None if first is None else first.number
        queued = {each.number for each in queue}
        for asking in waiting:
            if asking.lock.acquire(blocking=False):
                try:
                    if not asking.ended:
                        self._look_at_one(asking, asking.number in queued, owner, turn)
                finally:
                    asking.lock.release()

    def _look_at_one(
        self, asking: Asking, queued: bool, owner: Grant | None, turn: int | None
    ) -> None:
        topic = asking.topic
        try:
            topic.check()
            if not queued and asking.number not in topic.waiters:
                raise fenced_error(topic.name, "was taken by a producer that fences", owner)
            if asking.deadline is not None and time.monotonic() >= asking.deadline:
                self._fail(asking, WaitTimeoutError(asking.future.waited))
            elif asking.number == turn:
                self._attempt(asking)
        except (ClusterError, WaitTimeoutError):
            raise
        except ExclusiveLogError as error:
            self._fail(asking, error)

    @property
    def seconds(self) -> float | None:
        """How long until somebody has to look again; None: nobody waits."""
        waiting = self.all()
        if not waiting:
            return None
        deadlines = [each.deadline for each in waiting if each.deadline is not None]
        left = min(deadlines, default=float("inf")) - time.monotonic()
        return max(0.0, min(LOOK_SECONDS, left))

    # ---- the end -----------------------------------------------------------------------------

    def fail_all(self, error: EngineClosedError) -> None:
        """The engine is closing."""
        for asking in self.all():
            with asking.lock:
                if not asking.ended:
                    self._fail(asking, error)


def _holder(waiter: Wait, epoch: int) -> OwnerInfo:
    """A waiter, as errors show who has a name."""
    return OwnerInfo(
        engine_id=waiter.engine_id, engine_name=waiter.engine_name, pid=waiter.pid,
        producer_name=waiter.producer_name, access_mode=AccessMode.WAIT_FOR_EXCLUSIVE,
        priority=waiter.priority, epoch=epoch, since=waiter.since, session=waiter.number,
        properties=waiter.properties,
    )  # fmt: skip
