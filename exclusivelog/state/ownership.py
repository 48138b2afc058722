"""Exclusive ownership of a state's topic: acquired by the first write, kept until another process
waits for the topic (rules B2, D8, I1)."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

from exclusivelog import _core
from exclusivelog.errors import EngineClosedError, ProducerFencedError
from exclusivelog.producer import Producer, ProducerFuture
from exclusivelog.state.calls import CallFuture, Calls
from exclusivelog.topic import Topic

# Minimum tenure under contention: each change of owner costs two transactions, and two processes
# that write all the time would do little else.
TENURE_SECONDS = 0.005


class Ownership(_core.OwnershipBase):
    """This process's ownership of one topic.

    - `writing`: the lock that serialises writes; it is held to acquire or release.
    - `prepare`: called by each new owner before its first write: it has to catch up.
    """

    def __init__(
        self, topic: Topic, writing: _core.Lock, calls: Calls, prepare: Callable[[], None]
    ) -> None:  # fmt: skip
        self.producer: Producer | None = None
        self.asked: Producer | None = None  # to be released before the next write
        self.checked = -1  # the ownership version as of which the topic was still ours
        self._topic, self._writing, self._calls, self._prepare = topic, writing, calls, prepare
        self._engine = topic.engine
        self._waiting: ProducerFuture | None = None  # for the topic,
        self._waiting_for: CallFuture[Any] | None = None  # on behalf of this background call
        self._since = 0.0
        self._ended = False

    def is_held(self) -> bool:
        """Is this process still the owner? Then no other process has written."""
        producer = self.producer
        if producer is None:
            return False
        version = self._engine.ownership_version
        if version == self.checked:
            return True
        if producer.state != "open":
            self.release()
            return False
        self.checked = version
        return True

    def acquire(self, end: float | None) -> Producer:
        """Return the producer of an owner that has seen everything its predecessors wrote; wait
        for the topic until `end` (monotonic; None: for ever)."""
        asked, self.asked = self.asked, None
        if asked is not None:
            self._give_back(asked)
        if self.is_held() and self.producer is not None:
            return self.producer
        producer = self._await_producer(end)
        try:
            self._prepare()
        except BaseException:
            producer.close()
            raise
        self._since, self.checked = time.monotonic(), -1
        self.producer = producer
        return producer

    def _await_producer(self, end: float | None) -> Producer:
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            # Set first: giving up an earlier call must not end the wait of this one.
            self._waiting_for = call = self._calls.current
            self._waiting = future = self._topic.producer_async(
                "wait_for_exclusive", timeout=left, follow=False, on_fenced=self._lost,
                on_wanted=self._wanted,
            )  # fmt: skip
            try:
                if self._ended or (call is not None and call.given_up):
                    future.cancel()  # `end` or `give_up` may have run before `_waiting` was set
                return future.result()
            except ProducerFencedError:  # by a producer that fences instead of waiting: queue again
                continue
            except concurrent.futures.CancelledError:
                if self._ended:
                    raise closed_error(self._topic.name) from None
                raise
            except BaseException:
                future.give_up()
                raise
            finally:
                self._waiting = None

    def release(self) -> None:
        """Give the topic back, if this process owns it."""
        producer, self.producer = self.producer, None
        if producer is not None:
            producer.close()

    def _give_back(self, producer: Producer) -> None:
        if self.producer is producer:
            self.producer = None
        producer.close()

    # ---- called in threads of their own --------------------------------------------------

    def _lost(self, producer: Producer, error: ProducerFencedError) -> None:
        """Another process owns the topic: reads must look for what it writes."""
        with self._writing:
            if self.producer is producer:
                self.release()

    def _wanted(self, producer: Producer) -> None:
        """Another process waits for the topic."""
        left = self._since + TENURE_SECONDS - time.monotonic()
        if 0 < left <= TENURE_SECONDS:
            time.sleep(left)
        self.asked = producer  # the next write releases it, if it comes before this thread
        with self._writing:
            self._give_back(producer)
            if self.asked is producer:
                self.asked = None

    # ---- giving up -----------------------------------------------------------------------

    def give_up(self, call: CallFuture[Any]) -> None:
        """Stop waiting for the topic if that is on behalf of this call, now or later."""
        call.given_up = True
        waiting = self._waiting
        if waiting is not None and self._waiting_for is call:
            waiting.cancel()

    def end(self) -> None:
        """Stop waiting, and wait no more: EngineClosedError."""
        self._ended = True
        waiting = self._waiting
        if waiting is not None and not self._engine.closed:
            waiting.cancel()


def closed_error(topic: str) -> EngineClosedError:
    """The error of a call of a state that is closed."""
    return EngineClosedError(f"this state of topic {topic!r} is closed")
