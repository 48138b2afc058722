"""Many waiters: on one topic, and on many topics whose owner dies (P10)."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path

from bench.measure import POWER, Figure, Series, Settings, Stores, Target
from bench.topics import chunks, make_topics, names, own
from exclusivelog import Engine, Producer, Topic
from exclusivelog._core import now
from exclusivelog.local.records import Session
from exclusivelog.local.shm.slots import SLOT_COUNT, SLOT_SIZE, SLOTS, WAKE_UPS
from exclusivelog.producer import Options, ProducerFuture
from testing.processes import State, Worker, until, workers

NS = 1e-9
WAITERS, PROCESSES, PROMOTIONS = 100_000, 4, 30
ONE_BY_ONE = 250  # of each process's waiters, which are timed
TOPICS, TOPICS_IN_FULL = 10_000, 100_000
PATIENCE = 900.0  # seconds, for setting up one durable transaction after another


def p10(settings: Settings) -> Figure:
    """Promotion in a long queue, and of many waiters at the death of their owner."""
    figure = Figure("P10", f"{WAITERS:,} waiters on one topic, and many topics with one each")
    promotions = settings.rounds_or(PROMOTIONS)
    with Stores(settings) as stores:
        _one_long_queue(figure, stores, promotions)
    with Stores(settings) as stores:
        _many_short_queues(figure, stores, TOPICS_IN_FULL if settings.full else TOPICS)
    return figure


# ---- one topic ---------------------------------------------------------------------------


def _one_long_queue(figure: Figure, stores: Stores, promotions: int) -> None:
    engine = stores.engine()
    owner = engine.topic("orders").producer("exclusive")
    count = -(-WAITERS // PROCESSES)
    first = min(count, ONE_BY_ONE)
    with workers() as make:
        waiting = [make(engine.path, f"waiters-{i}") for i in range(PROCESSES)]
        setup = time.perf_counter()
        for worker in waiting:
            worker.start(queue_up, first)
        for worker in waiting:
            worker.answer(PATIENCE)
        setup = time.perf_counter() - setup
        memory = []
        for worker in waiting:
            worker.start(queue_up_in_bulk, count - first)
            memory.append(worker.answer(PATIENCE) / max(1, count - first))
        queue = len(engine.topic("orders").waiters)
        times, wake_ups, others = _promote(engine, owner, waiting, promotions)
        for worker in waiting:
            worker.kill()
    promoted = Series(f"promotion, {queue:,} waiters", "s", times, POWER)
    figure.series += [promoted, Series("memory per waiter", "B", memory)]
    figure.series.append(Series("wake-ups per promotion", "", [float(n) for n in wake_ups]))
    woken = Series("threads run in processes that only wait", "", [float(n) for n in others])
    figure.series.append(woken)
    what = f"promotion out of {queue:,} waiters in {PROCESSES} processes"
    figure.compare(f"{what}, p50", promoted, target=Target(most=2e-3))
    figure.state(f"{what}, max", max(times), "s")
    figure.state(
        "wake-ups per promotion, all processes, most", max(wake_ups), "", Target(least=1, most=1)
    )
    figure.compare("threads that ran meanwhile in processes that only wait, p50", woken)
    figure.state("memory per waiter (private, grown)", max(memory), "B")
    queueing = PROCESSES * first / setup
    figure.state(f"queueing, {PROCESSES} processes at once", queueing, "/s")
    figure.notes.append(f"the first {first} waiters of each process one by one, the others in bulk")
    figure.notes.append("a process that waits looks around by itself four times a second")


def _promote(
    engine: Engine, owner: Producer, waiting: list[Worker], promotions: int
) -> tuple[list[float], list[int], list[int]]:
    """The duration of each promotion from the release until the process has the producer, the
    number of engines that it notified, and the number of context switches in other processes."""
    times, notified, others = [], [], []
    topic = engine.topic("orders")
    workers_by_pid = {worker.pid: worker for worker in waiting}
    holder: Worker | None = None
    for _ in range(promotions):
        before, epoch = notification_counts(engine), topic.epoch
        ran, closing = {worker: switches(worker) for worker in waiting}, holder
        if holder is None:
            begun = now()
            owner.close()
        else:
            begun = holder.call(release)
        until(functools.partial(has_moved_on, topic, epoch))
        promoted = topic.owner
        assert promoted is not None
        holder = workers_by_pid[promoted.pid]
        times.append((holder.call(granted_at, promoted.epoch) - begun) * NS)
        notified.append(notification_counts(engine) - before)
        idle = [worker for worker in waiting if worker not in (closing, holder)]
        others.append(sum(switches(worker) - ran[worker] for worker in idle))
    return times, notified, others


def has_moved_on(topic: Topic, epoch: int) -> bool:
    return topic.epoch > epoch


def notification_counts(engine: Engine) -> int:
    """The number of notifications of all engines."""
    words = engine.ledger.lockfile.atomics
    return sum(words.load(SLOTS + i * SLOT_SIZE + WAKE_UPS) for i in range(SLOT_COUNT))


def switches(worker: Worker) -> int:
    """How often a thread of this process has gone to sleep, so it was woken as often."""
    count = 0
    for task in Path(f"/proc/{worker.pid}/task").iterdir():
        status = (task / "status").read_text()
        count += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return count


def queue_up(state: State, count: int) -> None:
    """Wait for the topic with so many requests."""
    wait_for(
        state,
        [
            state.topic.producer_async("wait_for_exclusive", priority=random.randrange(10))
            for _ in range(count)
        ],
    )


def queue_up_in_bulk(state: State, count: int) -> int:
    """The same, with many requests in a transaction; return by how many bytes this process grew."""
    before = private_memory()
    futures: list[Future[Producer]] = []
    for part in chunks(range(count)):
        futures += await_turns(state.topic, len(part))
    grown = private_memory() - before
    wait_for(state, futures)
    return grown


def await_turns(topic: Topic, count: int) -> list[ProducerFuture]:
    """What `topic.producer_async("wait_for_exclusive")` does on a topic that is taken, many times
    in one transaction."""
    engine = topic.engine
    futures: list[ProducerFuture] = []
    with engine.backend.pending.lock:
        _register_waiters(topic, count, futures)
        for future in futures:
            engine.backend.pending.queue(future, None)
    return futures


def _register_waiters(topic: Topic, count: int, futures: list[ProducerFuture]) -> None:
    engine = topic.engine
    with engine.ledger.write_exclusive() as tables:
        for _ in range(count):
            number = tables.rows.next_id(b"session")
            session = Session(
                id=number,
                topic=topic.id,
                engine=engine.id,
                slot=engine.backend.slot,
                pid=os.getpid(),
                engine_name=engine.name,
                name=f"{engine.name}-{number}",
                mode="wait_for_exclusive",
                priority=random.randrange(10),
                created=now(),
                tie=random.getrandbits(32),
                since=time.time_ns() // 1_000_000,
            )
            future = ProducerFuture(engine.backend, topic.id, topic.name, Options())
            row = tables.topics.get(topic.id)
            decide = engine.backend.sessions.requests.decide
            future.session = decide(tables, row, session, None, True).session
            futures.append(future)


def wait_for(state: State, futures: Sequence[Future[Producer]]) -> None:
    """Note in the background when each of them has its producer."""
    grants: dict[int, tuple[int, Producer]] = state.kept.setdefault("grants", {})

    def note(at: int, producer: Producer) -> None:
        grants[producer.topic_epoch] = (at, producer)

    threading.Thread(target=collect, args=(futures, note), daemon=True).start()


def collect(futures: Sequence[Future[Producer]], note: Callable[[int, Producer], None]) -> None:
    """Note when each of the futures had its producer: one thread waits for all of them."""
    for future in as_completed(futures):
        note(now(), future.result())


def granted_at(state: State, epoch: int) -> int:
    """The time at which this process had the producer of that epoch."""
    grant: tuple[int, Producer] = until(lambda: state.kept["grants"].get(epoch))
    at, state.producer = grant
    return at


def release(state: State) -> int:
    """Close the owner; return the time at which that began."""
    assert state.producer is not None
    begun = now()
    state.producer.close()
    return begun


def private_memory() -> int:
    """Resident bytes that are not a mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


# ---- many topics -------------------------------------------------------------------------


def _many_short_queues(figure: Figure, stores: Stores, count: int) -> None:
    engine = stores.engine()
    make_topics(engine, names(count))
    with workers() as make:
        owner, waiter = make(engine.path, "owner"), make(engine.path, "waiter")
        owner.start(own_all, count)
        owner.answer(PATIENCE)
        setup = time.perf_counter()
        waiter.start(await_all, count)
        waiter.answer(PATIENCE)
        setup = time.perf_counter() - setup
        waiter.start(promoted_all, count)
        time.sleep(0.3)
        at = now()
        owner.signal(signal.SIGKILL)
        times = [(granted - at) * NS for granted in waiter.answer(PATIENCE)]
        owner.process.join(30)
        waiter.kill()
    figure.series.append(Series(f"promotion, {count:,} topics of a dead owner", "s", times, POWER))
    figure.state(f"owner of {count:,} topics killed: first waiter promoted", min(times), "s")
    figure.state(f"owner of {count:,} topics killed: last waiter promoted", max(times), "s")
    figure.state("topics given on per second", count / max(times), "/s")
    figure.state("queueing, one process", count / setup, "/s")
    figure.notes.append(f"{count:,} topics and owners registered in bulk, their waiters one by one")


def own_all(state: State, count: int) -> None:
    state.kept["producers"] = own(state.engine, names(count), one_by_one=False)


def await_all(state: State, count: int) -> None:
    """One waiter on each topic."""
    times: list[int] = []
    producers: list[Producer] = []
    everyone = threading.Event()
    state.kept.update(times=times, producers=producers, everyone=everyone)
    futures = [
        state.engine.topic(name).producer_async("wait_for_exclusive") for name in names(count)
    ]

    def note(at: int, producer: Producer) -> None:
        times.append(at)
        producers.append(producer)
        if len(times) == count:
            everyone.set()

    threading.Thread(target=collect, args=(futures, note), daemon=True).start()


def promoted_all(state: State, count: int) -> list[int]:
    """The time at which each of the waiters was promoted."""
    if not state.kept["everyone"].wait(PATIENCE):
        raise TimeoutError(f"{len(state.kept['times'])} of {count} waiters were promoted")
    return list(state.kept["times"])
