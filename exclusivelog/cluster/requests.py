"""Requests for topics: decisions, attempts and waiting (rules A, B5, D).

The first attempt is made in the caller's thread: it reads the log to its end, decides, and asks. A
request that waits is a record in the topic's log (`waiting`), and an entry here. When the topic is
free and this is the first live waiter, the engine's background thread makes the next attempt. It
checks that when the log shows a release, and every `FIRST_POLL_SECONDS`, because the death of a
process writes no record.

These decisions only affect the order. If two ask at once, the log decides (rule J1).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exclusivelog import _core, admission, logs
from exclusivelog.admission import (
    ADMITTED,
    PROMOTION,
    Decision,
    Request,
    Verdict,
    eligible_at,
    end_by_grant,
    reason_of_grant,
)
from exclusivelog.backend import ProducerRequest
from exclusivelog.cluster.changes import party
from exclusivelog.cluster.following import (
    ANSWER_SECONDS,
    Owning,
    Seen,
    SessionFacts,
    TopicLog,
    inspect,
    log_change,
    now_ms,
)
from exclusivelog.cluster.frames import Grant, Holder, Join
from exclusivelog.cluster.ordered import Excluding
from exclusivelog.cluster.waiting import Hold, Wait
from exclusivelog.errors import (
    ClusterError,
    EngineClosedError,
    ExclusiveLogError,
    InvalidEpochError,
    ProducerFencedError,
    WaitTimeoutError,
)
from exclusivelog.events import log_gone
from exclusivelog.refusals import (
    late_release,
    moving_to,
    name_in_use,
    overtaken,
    refused,
    terminated,
    timed_out,
    topic_label,
)
from exclusivelog.sessions import log_granted
from exclusivelog.types import EXCLUSIVE_MODES, AccessMode
from exclusivelog.waits import AnyFuture, give_granted, may_block

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine
    from exclusivelog.cluster.sessions import Registry

__all__ = ["Asking", "Requests"]

log = logging.getLogger(__name__)

NO_CONNECTION = "it has no connection to the cluster"
POLL_SECONDS = 0.1
FIRST_POLL_SECONDS = 0.025  # between checks of the first waiter; each is a request to the broker


@dataclass(eq=False)
class Asking:
    """One request. `number` is unique; `deadline` is a time of the monotonic clock."""

    topic: TopicLog
    future: AnyFuture
    request: ProducerRequest
    name: str
    number: int
    since: int
    deadline: float | None
    begun: int = field(default_factory=_core.now)
    at_once: bool = False  # it waits for nothing, also not for a release to its engine
    lock: threading.Lock = field(default_factory=threading.Lock)  # held during an attempt
    ended: bool = False
    # Its error if the topic is not released to this engine, which it waits for (rule E3).
    refusal: ExclusiveLogError | None = None

    @property
    def mode(self) -> AccessMode:
        """The access mode."""
        return AccessMode(self.request.mode)


class Requests:
    """The waiting requests of one engine; makes the attempts of all requests."""

    def __init__(self, host: ClusterEngine, granted: Registry) -> None:
        self._host, self._granted = host, granted
        self._waiting: dict[int, Asking] = {}
        self._pace = POLL_SECONDS
        self._names: dict[tuple[int, str], Asking] = {}  # of requests that have no outcome
        self._lock = threading.Lock()
        self._is_closing = False
        self._taken: set[TopicLog] = set()  # topics that had a holder at the last look

    # ---- what `GrantFuture` asks -----------------------------------------------------------

    def forget(self, future: AnyFuture) -> bool:
        """Remove a request from its queue; False if it does not wait. Waits for the end of an
        attempt."""
        asking = next((each for each in self.all() if each.future is future), None)
        if asking is None:
            return False
        with asking.lock:
            if asking.ended:
                return False
            self._end(asking)
            return True

    def withdraw(self, session: Any) -> bool:
        """False: a session that was granted is in no queue."""
        return False

    def settles(self, session: Any) -> bool:
        """False: futures are settled before their sessions are known."""
        return False

    # ---- waiting ---------------------------------------------------------------------------

    def all(self) -> list[Asking]:
        """The requests that wait."""
        with self._lock:
            return list(self._waiting.values())

    def __contains__(self, number: int) -> bool:
        """Does this request wait? While the engine closes, none does."""
        return number in self._waiting and not self._is_closing

    def _end(self, asking: Asking, granted: Owning | None = None) -> None:
        """Remove a request that has an outcome or is withdrawn. Called with its lock."""
        asking.ended = True
        with self._lock:
            waited = self._waiting.pop(asking.number, None) is not None
            if self._names.get((asking.topic.id, asking.name)) is asking:
                del self._names[asking.topic.id, asking.name]
        queued = waited and asking.refusal is None
        if queued and (granted is None or asking.number in asking.topic.waiters):
            asking.topic.leave_queue(asking.number)
        inherited = asking.topic.disinherit(asking.number)
        if inherited is not None and inherited is not granted:
            self._give_back(inherited)

    def _give_back(self, owning: Owning) -> None:
        """Release a session that was passed on to a request that does not wait any more."""
        number = owning.writer.session
        if owning in self._granted.dropped():
            return  # its grant has failed
        self._granted.keep(number, owning)
        if not self._is_closing:  # else the registry releases all that it has
            self._granted.drop(number)

    def _fail(self, asking: Asking, error: ExclusiveLogError) -> None:
        self._end(asking)

        def settle() -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
                asking.future.set_exception(error)

        self._settle(asking.future, settle)

    def _settle(self, future: AnyFuture, settle: Callable[[], None]) -> None:
        """Call it in a separate thread, as callbacks of the future may block."""
        if may_block(future):
            self._host.call_soon(settle)
        else:
            settle()

    # ---- the first attempt -------------------------------------------------------------------

    def check(self, topic: TopicLog, future: AnyFuture, request: ProducerRequest) -> None:
        """Raise the refusal of a request that waits for nothing, if it is to be refused by now.
        Changes nothing."""
        asking = self._asking(topic, future, request)
        topic.catch_up()
        check_not_terminated(topic)
        seen = inspect(topic, self._host.lives, self._host.id)
        verdict = judge(asking, seen).verdict
        if verdict not in ADMITTED:
            raise refusal(asking, seen, verdict)
        if verdict is Verdict.ADMIT:
            check_name_is_free(asking, seen)

    def _asking(self, topic: TopicLog, future: AnyFuture, request: ProducerRequest) -> Asking:
        timeout = request.timeout
        return Asking(
            topic,
            future,
            request,
            request.name or f"producer-{secrets.token_hex(8)}",
            secrets.randbits(62),
            now_ms(),
            None if timeout is None else _core.monotonic() + timeout,
        )

    def open(
        self,
        topic: TopicLog,
        future: AnyFuture,
        request: ProducerRequest,
        at_once: bool = False,
    ) -> None:
        """Grant, queue or refuse this request. The future raises a refusal. `at_once`: it does not
        wait for a release to this engine either."""
        asking = self._asking(topic, future, request)
        asking.at_once = at_once
        future.producer_name = asking.name
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
        """Refuse the second of two requests of this engine with the same producer name (rule
        A6)."""
        if asking.mode.fences or asking.mode.waits:
            return  # a waiter needs no name before its grant (rule D9)
        with self._lock:
            first = self._names.setdefault((asking.topic.id, asking.name), asking)
        if first is not asking:
            by = self._holder_of(first).owner(0, first.number)
            raise name_in_use(topic_label(asking.topic.name), by)

    def _try_first(self, asking: Asking) -> None:
        end = _core.monotonic() + ANSWER_SECONDS
        patient = True
        while not self._attempt(asking, patient):
            if asking.number in self._waiting:
                self._inherit(asking)
                return
            if _core.monotonic() > end:
                raise WaitTimeoutError(
                    f"{topic_label(asking.topic.name)} was not granted within {ANSWER_SECONDS} s: "
                    "others append to it all the time"
                )
            patient = False

    def _attempt(self, asking: Asking, patient: bool = True) -> bool:
        """Decide, and ask if free. False if it has to wait, or another record came first."""
        topic = asking.topic
        topic.catch_up()
        check_not_terminated(topic)
        with contextlib.nullcontext() if patient or not asking.mode.fences else _alone(topic):
            if not patient:
                topic.catch_up()
            # A request that waits asks again soon.
            lives = self._host.seems_to_live if asking.mode.waits else self._host.lives
            seen = inspect(topic, lives, self._host.id)
            decision = judge(asking, seen)
            if decision.verdict is Verdict.ADMIT:
                return self._share(asking, decision, seen)
            if decision.verdict in ADMITTED:
                return self._ask(asking, decision, seen)
            if decision.verdict is Verdict.QUEUE:
                self._queue(asking)
                return False
            error = refusal(asking, seen, decision.verdict)
            if asking.at_once or not awaits_release(asking, seen, decision.verdict):
                raise error
            asking.refusal = error
            self._keep(asking)
            return False

    def _share(self, asking: Asking, decision: Decision, seen: Seen) -> bool:
        """Join the shared producers."""
        topic = asking.topic
        check_name_is_free(asking, seen)
        in_the_way = [
            each
            for each in seen.dead
            if isinstance(each, Grant) or each.holder.producer_name == asking.name
        ]
        for each in in_the_way:
            topic.evict(each)
            self._log_gone(topic, each)
        return not in_the_way and self._ask(asking, decision, seen)

    def _holder_of(self, asking: Asking) -> Holder:
        info, request = self._host.info, asking.request
        return Holder(
            info.id,
            info.name,
            info.pid,
            asking.name,
            asking.mode,
            request.priority,
            now_ms(),
            request.properties,
        )

    def _wait_of(self, asking: Asking) -> Wait:
        info, request = self._host.info, asking.request
        return Wait(
            asking.number,
            info.id,
            info.name,
            info.pid,
            asking.name,
            request.priority,
            asking.since,
            request.properties,
            request.topic_epoch is None and not request.settle,
            request.announce,
        )

    def _queue(self, asking: Asking) -> None:
        if asking.number not in self._waiting:
            self._keep(asking)
            asking.topic.publish(self._wait_of(asking))

    def _keep(self, asking: Asking) -> None:
        """Let it wait. EngineClosedError if those that wait were failed already."""
        with self._lock:
            if self._is_closing:
                raise self._host.closed_error()
            self._waiting[asking.number] = asking

    def _ask(self, asking: Asking, decision: Decision, seen: Seen) -> bool:
        claimed = continues(decision, asking.request.topic_epoch)
        reason = reason_of_grant(
            takes=decision.verdict is Verdict.TAKE_OVER,
            moved=seen.assigned is not None,
            continues=decision.epoch == asking.request.topic_epoch,
            waited=asking.number in self._waiting,
        )
        try:
            request = asking.request
            owning = asking.topic.ask(
                self._holder_of(asking), claimed, seen.tenure, request.announce, request.lineage
            )
        except (ProducerFencedError, InvalidEpochError):
            return False  # the epoch has changed: decide again
        if owning is None:
            return False
        if any(self._host.lives(each.engine_id) for each in owning.behind):  # rule A3
            owning.release(ANSWER_SECONDS)
            found = inspect(asking.topic, self._host.lives, self._host.id)
            raise refusal(asking, found, Verdict.BUSY)
        self._grant(asking, owning, reason)
        shares = decision.verdict is Verdict.ADMIT
        if not shares:  # each session of others has ended
            self._log_losers(asking.topic, seen, owning.writer.holder)
        failed = end_by_grant(shared=shares, reason=reason)
        if failed and seen.assigned is not None:
            log_change(asking.topic, seen.epoch, "cancel", failed, None, seen.assigned)
        return True

    def _log_losers(self, topic: TopicLog, seen: Seen, winner: Holder) -> None:
        """Log who has lost the topic by a grant of this engine."""
        for dead in seen.dead:
            self._log_gone(topic, dead)
        if seen.owner is not None:
            epoch, loser = seen.owner.epoch, seen.owner.holder
            log_change(topic, epoch, "evict", "fenced", loser, winner)

    def _log_gone(self, topic: TopicLog, session: Grant | Join) -> None:
        log_gone(self._host.path, party(session.holder), "dead", NO_CONNECTION, [topic.name])

    def _grant(self, asking: Asking, owning: Owning, reason: str) -> None:
        writer, request, future = owning.writer, asking.request, asking.future
        session = SessionFacts(
            writer.session,
            asking.topic.id,
            asking.name,
            request.mode,
            request.priority,
            writer.epoch,
            request.properties,
            request.notify_on_contention,
            not writer.is_shared,
        )
        self._granted.keep(session.id, owning)
        try:
            future.session = session
            future.granted = future.make(session, writer.last_sequence)
        except BaseException:
            self._granted.drop(session.id)
            raise
        self._end(asking, owning)
        if request.notify_on_contention and not writer.is_shared:
            with contextlib.suppress(ExclusiveLogError):  # its session tells why it has ended
                asking.topic.agree_to_yield(writer.session)
        log_granted(self._host, asking.topic.name, session, reason, asking.begun)
        self._settle(future, lambda: give_granted(future))

    # ---- later attempts ----------------------------------------------------------------------

    def poll(self) -> None:
        """Promote waiters, and end requests that have timed out. Called in the background
        thread."""
        by_topic: dict[TopicLog, list[Asking]] = {}
        for asking in self.all():
            by_topic.setdefault(asking.topic, []).append(asking)
        self._pace = POLL_SECONDS
        for topic, waiting in by_topic.items():
            try:
                if self._poll_topic(topic, waiting):
                    self._pace = FIRST_POLL_SECONDS
            except (ClusterError, WaitTimeoutError) as error:  # the broker is restarting, say
                logs.emit(
                    log,
                    logs.WAITERS_WAIT_ON,
                    ledger=self._host.path,
                    engine=self._host.name,
                    engine_id=self._host.id,
                    topic=topic.name,
                    reason=str(error),
                )

    def _poll_topic(self, topic: TopicLog, waiting: list[Asking]) -> bool:
        """Do the same for one topic. Returns whether one of these requests is the first in its
        queue."""
        self._each(waiting, self._inherit)
        waiting = [asking for asking in waiting if not asking.ended]
        if not waiting:
            return False
        seen = inspect(topic, self._host.seems_to_live, self._host.id)
        turn = seen.queue[0].number if seen.free and seen.queue else None
        if not self._is_settled(topic, seen, turn):
            turn = None
        self._each(waiting, lambda asking: self._poll_one(asking, seen, turn))
        first = bool(seen.queue) and seen.queue[0].number in self._waiting
        return first or any(asking.refusal is not None for asking in waiting)

    def _each(self, waiting: list[Asking], step: Callable[[Asking], None]) -> None:
        """Do this for each request that has no outcome, and no attempt under way."""
        for asking in waiting:
            if asking.lock.acquire(blocking=False):
                try:
                    if not asking.ended:
                        step(asking)
                finally:
                    asking.lock.release()

    def _inherit(self, asking: Asking) -> None:
        """Grant a topic that its last owner has passed on to this request."""
        owning = asking.topic.inherited(asking.number)
        if owning is None:
            return
        try:
            self._grant(asking, owning, PROMOTION)
        except ExclusiveLogError as error:
            self._fail(asking, error)
        self._host.wake_worker()  # it may have been assigned to another engine meanwhile

    def _is_settled(self, topic: TopicLog, seen: Seen, turn: int | None) -> bool:
        """Has the topic been free for the settle delay of the first waiter (rule D7)?"""
        if not seen.free:
            self._taken.add(topic)
            return False
        if topic in self._taken:  # its holder may have died, which is no record
            self._taken.discard(topic)
            topic.freed = max(topic.freed, _core.now()) if seen.dead else topic.freed
        best = None if turn is None else self._waiting.get(turn)
        return best is None or may_own(best)

    def _poll_one(self, asking: Asking, seen: Seen, turn: int | None) -> None:
        topic = asking.topic
        try:
            topic.check()
            check_not_terminated(topic)
            if asking.refusal is not None:
                self._try_again(asking, asking.refusal, seen)
                return
            queued = any(each.number == asking.number for each in seen.queue)
            if not queued and asking.number not in topic.waiters:
                self._end_overtaken(asking, seen)
            elif asking.deadline is not None and _core.monotonic() >= asking.deadline:
                owner = next(iter(seen.holders), None)
                self._fail(asking, timed_out(asking.future.waited, owner))
            elif asking.number == turn:
                self._attempt(asking)
        except (ClusterError, WaitTimeoutError):
            raise
        except ExclusiveLogError as error:
            self._fail(asking, error)

    def _end_overtaken(self, asking: Asking, seen: Seen) -> None:
        """It is not in the queue any more: the topic was passed on to it, or others fenced it."""
        self._inherit(asking)
        if asking.ended:
            return
        topic, owner = asking.topic, None if seen.owner is None else seen.owner.owner()
        if self._is_closing:
            self._fail(asking, self._host.closed_error())
            return
        # Not raised: the frames of the traceback would keep other requests, and their producers.
        self._fail(
            asking, overtaken(topic_label(topic.name), asking.name, owner, topic.state.epoch)
        )

    def _try_again(self, asking: Asking, refusal: ExclusiveLogError, seen: Seen) -> None:
        """Try again to get a topic that was to be released to this engine."""
        if asking.deadline is not None and _core.monotonic() >= asking.deadline:
            self._fail(asking, late_release(asking.request.timeout, refusal))
        elif not awaits_release(asking, seen, judge(asking, seen).verdict):
            self._attempt(asking)

    @property
    def seconds(self) -> float | None:
        """Seconds until the next `poll`; None: no request waits."""
        waiting = self.all()
        if not waiting:
            return None
        deadlines = [each.deadline for each in waiting if each.deadline is not None]
        left = min(deadlines, default=float("inf")) - _core.monotonic()
        return max(0.0, min(self._pace, left))

    # ---- the end -----------------------------------------------------------------------------

    def fail_all(self, error: EngineClosedError) -> None:
        """Fail all waiting requests, because the engine is closing."""
        with self._lock:
            self._is_closing = True
        for asking in self.all():
            with asking.lock:
                if not asking.ended:
                    self._fail(asking, error)


def may_own(asking: Asking) -> bool:
    """Has this request's delay passed since its topic is free (rule D7)?"""
    topic, request = asking.topic, asking.request
    return _core.now() >= eligible_at(
        created=asking.begun,
        priority=request.priority,
        settle=request.settle,
        freed=topic.freed,
        known=topic.waiters.known,
    )


def _alone(topic: TopicLog) -> contextlib.AbstractContextManager[Any]:
    """Exclude other appenders meanwhile, if the log can do that; else ask the owner's engine for a
    pause. An owner that sends all the time could come first each time."""
    if isinstance(topic.log, Excluding):
        return topic.log.alone()
    topic.publish(Hold(secrets.randbits(62)))
    return contextlib.nullcontext()


# ---- decisions ---------------------------------------------------------------------------


def judge(asking: Asking, seen: Seen) -> Decision:
    """The decision about a request, from what the log shows."""
    request = Request(asking.request.mode, asking.request.topic_epoch)
    return decide(asking.topic.state.epoch, seen, request, asking.number, lambda: may_own(asking))


def decide(
    epoch: int, seen: Seen, request: Request, number: int, settled: Callable[[], bool]
) -> Decision:
    """The decision about a request with this number, at this epoch (rule J5). `settled`: has its
    delay passed? `proof.cluster_model` decides by it, too."""
    queue = seen.queue if request.mode in EXCLUSIVE_MODES else seen.everyone
    return admission.decide(
        epoch=epoch,
        owner=seen.owner,
        shared=bool(seen.shared),
        waiting=bool(queue) and queue[0].number != number,
        request=request,
        settled=settled,
        reserved_for_it=None if seen.assigned is None else seen.elsewhere is None,
    )


def awaits_release(asking: Asking, seen: Seen, verdict: Verdict) -> bool:
    """Is it refused only because the topic is still to be released to its engine (rule E3)?"""
    owner, moving = seen.owner, seen.assigned
    if owner is None or moving is None or seen.elsewhere or moving.session != owner.session:
        return False
    expected = any(waiter.engine_id == moving.engine_id for waiter in seen.queue)
    return admission.awaits_release(
        asking.mode, verdict, waiting=bool(seen.everyone), expected=expected
    )


def continues(decision: Decision, claimed: int | None) -> int | None:
    """The epoch that an admitted request asks the log to continue (rule B5); None: it asks for a
    new one."""
    return claimed if decision.epoch == claimed and decision.verdict is not Verdict.ADMIT else None


def refusal(asking: Asking, seen: Seen, verdict: Verdict) -> ExclusiveLogError:
    """The error of a request with this verdict."""
    moving = seen.assigned
    return refused(
        topic_label(asking.topic.name),
        verdict,
        epoch=asking.topic.state.epoch,
        claimed_epoch=asking.request.topic_epoch,
        by=seen.first(asking.number),
        moving="" if moving is None else moving_to(moving.engine_name, moving.engine_id),
    )


def check_name_is_free(asking: Asking, seen: Seen) -> None:
    """ProducerBusyError if a shared producer has this one's name (rule A6)."""
    for holder in seen.holders:
        if holder.producer_name == asking.name:
            raise name_in_use(topic_label(asking.topic.name), holder)


def check_not_terminated(topic: TopicLog) -> None:
    """TopicTerminatedError if nothing may be written any more (rule G8)."""
    if topic.state.terminated:
        raise terminated(f"topic {topic.name!r}", topic.state.next)
