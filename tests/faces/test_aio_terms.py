"""exclusivelog.aio: leading in a loop. The loss of the topic cancels the body of `async with term`,
and nothing else; a cancellation from outside ends the task as ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.loops import play, soon
from testing.processes import PATIENCE, until

EXCLUSIVE, WAIT, FENCING = "exclusive", "wait_for_exclusive", "exclusive_with_fencing"
NEVER = 3600.0

pytestmark = pytest.mark.once


def take_over(topic: xl.Topic) -> None:
    topic.producer(FENCING).close()


@contextlib.asynccontextmanager
async def opened(path: str) -> AsyncIterator[aio.Topic]:
    async with aio.open(path, name="mine") as engine:
        yield await engine.topic("orders")


def is_free(topic: xl.Topic) -> bool:
    return topic.owner is None and topic.waiters == []


# ---- the loss cancels the body ---------------------------------------------------------------


async def sleep(term: aio.Term, producer: aio.Producer) -> None:
    await asyncio.sleep(NEVER)


async def send(term: aio.Term, producer: aio.Producer) -> None:
    while True:
        await producer.send(b"x")


async def send_in_a_group(term: aio.Term, producer: aio.Producer) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(send(term, producer))
        group.create_task(asyncio.sleep(NEVER))


async def sleep_with_a_timeout(term: aio.Term, producer: aio.Producer) -> None:
    async with asyncio.timeout(NEVER):
        await asyncio.sleep(NEVER)


async def swallow_the_cancellation(term: aio.Term, producer: aio.Producer) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(NEVER)
    await asyncio.sleep(0)  # it is cancelled once


async def ask(term: aio.Term, producer: aio.Producer) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await term.lost.wait()


BODIES = [sleep, send, send_in_a_group, sleep_with_a_timeout, swallow_the_cancellation, ask]


@pytest.mark.rule("B4")
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_loss_of_the_topic_ends_the_body_and_the_loop_leads_again(
    path: str, topic: xl.Topic, body: Callable[[aio.Term, aio.Producer], Awaitable[None]]
) -> None:
    async def main() -> list[int]:
        epochs = []
        async with opened(path) as mine:
            async for term in mine.terms():
                async with term as producer:
                    epochs.append(term.epoch)
                    if len(epochs) == 3:
                        return epochs
                    await asyncio.sleep(0)
                    taking = asyncio.create_task(asyncio.to_thread(take_over, topic))
                    await body(term, producer)
                await taking
                assert term.lost
                task = asyncio.current_task()
                assert task is not None
                # Before Python 3.13, a failed task group leaves its own cancellation counted.
                assert task.cancelling() == 0 or body is send_in_a_group
                await asyncio.sleep(0)  # nothing is left that would cancel this
        return epochs

    assert play(main) == [1, 3, 5]
    assert is_free(topic)


def test_a_topic_that_is_lost_before_its_block_begins_ends_the_block(
    path: str, topic: xl.Topic
) -> None:
    async def main() -> list[int]:
        epochs = []
        async with opened(path) as mine:
            async for term in mine.terms():
                epochs.append(term.epoch)
                if len(epochs) == 2:
                    break
                await asyncio.to_thread(take_over, topic)
                await term.lost._event.wait()
                async with term:
                    await asyncio.sleep(NEVER)
        return epochs

    assert play(main) == [1, 3]
    until(lambda: is_free(topic))


def test_a_loss_after_the_body_cancels_nothing(path: str, topic: xl.Topic) -> None:
    async def main() -> None:
        async with opened(path) as mine:
            async for term in mine.terms():
                async with term:
                    taking = asyncio.create_task(asyncio.to_thread(take_over, topic))
                await taking
                for _ in range(10):
                    await asyncio.sleep(0.001)
                break

    play(main)


# ---- a cancellation from outside ---------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
def test_a_cancellation_from_outside_leaves_the_block(
    path: str, topic: xl.Topic, lost: bool
) -> None:
    """Also if it comes together with the loss."""

    async def lead(mine: aio.Topic, began: asyncio.Event) -> None:
        async for term in mine.terms():
            async with term:
                began.set()
                try:
                    await asyncio.sleep(NEVER)
                finally:
                    if lost:
                        term._body.cancel()

    async def main() -> None:
        async with opened(path) as mine:
            began = asyncio.Event()
            task = asyncio.create_task(lead(mine, began))
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    play(main)
    assert (topic.epoch, is_free(topic)) == (1, True)


def test_so_does_one_that_the_body_turns_into_the_error_of_the_loss(
    path: str, topic: xl.Topic
) -> None:
    async def lead(mine: aio.Topic, began: asyncio.Event) -> None:
        async for term in mine.terms():
            async with term as producer:
                try:
                    began.set()
                    await asyncio.sleep(NEVER)
                finally:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.to_thread(take_over, topic)
                    await producer.send(b"the last word")

    async def main() -> None:
        async with opened(path) as mine:
            began = asyncio.Event()
            task = asyncio.create_task(lead(mine, began))
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    play(main)
    assert (topic.next_offset, is_free(topic)) == (0, True)


def test_a_timeout_around_the_loop_expires(path: str, topic: xl.Topic) -> None:
    async def main() -> None:
        async with opened(path) as mine, asyncio.timeout(None) as limit:
            async for term in mine.terms():
                async with term:
                    limit.reschedule(asyncio.get_running_loop().time() + 0.05)
                    await asyncio.sleep(NEVER)

    with pytest.raises(TimeoutError):
        play(main)
    assert (topic.epoch, is_free(topic)) == (1, True)


@pytest.mark.parametrize("kind", [LookupError, xl.ProducerFencedError])
def test_any_other_exception_leaves_the_loop(
    path: str, topic: xl.Topic, kind: type[Exception]
) -> None:
    async def main() -> None:
        async with opened(path) as mine:
            async for term in mine.terms():
                async with term:
                    raise kind("of the application")

    with pytest.raises(kind, match="of the application"):
        play(main)
    assert (topic.epoch, is_free(topic)) == (1, True)


# ---- the wait ----------------------------------------------------------------------------


@pytest.mark.rule("D5")
@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_wait_that_is_cancelled_or_stopped_leaves_the_queue(
    path: str, topic: xl.Topic, how: str
) -> None:
    async def lead(terms: aio.Terms) -> int:
        return len([term async for term in terms])

    async def main() -> None:
        async with opened(path) as mine:
            terms = mine.terms()
            task = asyncio.create_task(lead(terms))
            await soon(lambda: topic.waiters)
            if how == "stop":
                terms.stop()
                assert await task == 0
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await soon(lambda: topic.waiters == [])

    with topic.producer(EXCLUSIVE) as owner:
        play(main)
        assert owner.state == "open"


@pytest.mark.parametrize("moment", range(4))
def test_a_stop_that_races_with_the_grant_leaves_no_owner(
    path: str, topic: xl.Topic, moment: int
) -> None:
    async def main() -> None:
        async with opened(path) as mine:
            terms = mine.terms()
            waiting = asyncio.ensure_future(anext(terms, None))
            for _ in range(moment):
                await asyncio.sleep(0)
            terms.stop()
            if (term := await waiting) is not None:
                async with term:
                    assert topic.owner is not None
            assert await anext(terms, None) is None

    play(main)
    until(lambda: is_free(topic))


def test_stop_lets_a_turn_reach_its_end(path: str, topic: xl.Topic) -> None:
    async def main() -> int:
        async with opened(path) as mine:
            terms, offset = mine.terms(), -1
            async for term in terms:
                async with term as producer:
                    terms.stop()
                    offset = await producer.send(b"x")
            return offset

    assert play(main) == 0
    assert is_free(topic)


def test_a_wait_that_is_too_long_raises(path: str, topic: xl.Topic) -> None:
    async def main() -> None:
        async with opened(path) as mine:
            await anext(mine.terms(timeout=0.01))

    with topic.producer(EXCLUSIVE, name="holder"):
        with pytest.raises(xl.WaitTimeoutError, match="'holder'"):
            play(main)
        assert topic.waiters == []


@pytest.mark.long  # a second, until it is seen
@pytest.mark.rule("C6")
@pytest.mark.parametrize("end", ["terminated", "closed"])
def test_the_body_is_cancelled_when_the_topic_ends(path: str, topic: xl.Topic, end: str) -> None:
    """No rival tells of it. The next turn then raises what there is to say."""
    bodies = []

    async def main() -> None:
        async with aio.open(path, name="mine") as mine:

            async def finish() -> None:
                await soon(lambda: bodies)
                if end == "closed":
                    await mine.close()
                else:
                    await asyncio.to_thread(topic.terminate)

            ending = asyncio.ensure_future(finish())
            try:
                async for term in (await mine.topic("orders")).terms():
                    async with term:
                        bodies.append(term)
                        await asyncio.sleep(PATIENCE)
                        raise AssertionError("the body goes on")
            finally:
                await ending

    with pytest.raises((xl.EngineClosedError, xl.TopicTerminatedError)):
        play(main)
    assert len(bodies) == 1


@pytest.mark.rule("A1")
def test_a_waiter_that_is_fenced_queues_again(path: str, topic: xl.Topic) -> None:
    async def main() -> int:
        async with opened(path) as mine:
            terms = mine.terms()
            waiting = asyncio.ensure_future(anext(terms))
            await soon(lambda: topic.waiters)
            await asyncio.to_thread(take_over, topic)
            async with await waiting:
                return (await waiting).epoch

    topic.producer(EXCLUSIVE).close()
    with topic.producer(EXCLUSIVE):
        assert play(main) == 4


def test_a_term_that_was_never_entered_is_given_up_with_its_loop(
    path: str, topic: xl.Topic
) -> None:
    async def main() -> None:
        async with opened(path) as mine:
            async for term in mine.terms():
                assert term.epoch == 1
                break
            await soon(lambda: is_free(topic))
            with pytest.raises(RuntimeError, match="this term is over"):
                await term.__aenter__()

    play(main)


# ---- what is lost ------------------------------------------------------------------------


def test_another_task_can_wait_for_the_loss(path: str, topic: xl.Topic) -> None:
    async def main() -> None:
        async with opened(path) as mine:
            async for term in mine.terms():
                async with term:
                    assert not await term.lost.wait(0.01)
                    watching = asyncio.create_task(term.lost.wait(PATIENCE))
                    await asyncio.to_thread(take_over, topic)
                    await asyncio.sleep(NEVER)
                assert await watching
                break

    play(main)


def test_a_wrong_option_is_refused(path: str) -> None:
    async def main() -> None:
        async with opened(path) as mine:
            with pytest.raises(TypeError, match="terms takes no option 'follow'"):
                mine.terms(follow=True)  # type: ignore[call-arg]
            with pytest.raises(ValueError, match="priority"):
                await anext(mine.terms(priority=1.5))  # type: ignore[arg-type]

    play(main)
