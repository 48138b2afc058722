"""Reading at the end of a topic from another process (P7)."""

from __future__ import annotations

import contextlib
import resource
import statistics
import time
from collections.abc import Callable

import exclusivelog as xl
from bench.append import messages
from bench.measure import POWER, Arm, Figure, Series, Settings, Stores, Target, take_turns
from exclusivelog._core import now
from testing.processes import State, Worker, workers

PACED, PAUSE_SECONDS = 500, 0.002
IDLE_SECONDS = 2.0
WINDOW_SECONDS = 0.7
READERS = 4
END = b"end"
NS = 1e-9


def p7(settings: Settings) -> Figure:
    """Latency to a reader in another process, its cost while idle, and its cost to the writer."""
    figure = Figure("P7", "tail in another process")
    with Stores(settings) as stores, workers() as make:
        quick = stores.engine("process", durability="process").topic("orders").producer("exclusive")
        reader = make(stores.path("process"), "reader", durability="process")
        _measure_latency(figure, quick, reader, "process")
        path = stores.path("ours")
        producer = stores.engine().topic("orders").producer("exclusive")
        readers = [make(path, f"reader-{i}") for i in range(READERS)]
        _measure_latency(figure, producer, readers[0], "power")
        _measure_idling(figure, readers[0])
        _measure_writer(figure, stores, producer, readers, settings.rounds_or(5))
    return figure


# ---- latency -----------------------------------------------------------------------------


def _measure_latency(
    figure: Figure, producer: xl.Producer, reader: Worker, durability: str
) -> None:
    survives = POWER if durability == "power" else "survives the process"
    for name, pause, count in (
        (f"{durability}, a reader that sleeps", PAUSE_SECONDS, PACED),
        (f"{durability}, a reader that is busy", 0.0, 4 * PACED),
    ):
        reader.call(open_reader)
        reader.start(receive, count)
        time.sleep(0.2)
        begun, returned = _send_paced(producer, count, pause)
        arrived = reader.answer()
        delays = [(there - here) * NS for there, here in zip(arrived, returned, strict=True)]
        whole = [(there - here) * NS for there, here in zip(arrived, begun, strict=True)]
        after = Series(f"{name}: after send returned", "s", delays, survives)
        since = Series(f"{name}: since send was called", "s", whole, survives)
        figure.series += [after, since]
        target = Target(most=60e-6) if pause and durability == "process" else None
        figure.compare(f"send returned to message in hand, p50; {name}", after, target=target)
        p99 = after.percentile(0.99)
        figure.state(f"send returned to message in hand, p99; {name}", p99, "s")
        figure.compare(f"send called to message in hand, p50; {name}", since)
    figure.notes.append(
        "a message can be in hand before send has returned; such delays are below 0"
    )


def _send_paced(producer: xl.Producer, count: int, pause: float) -> tuple[list[int], list[int]]:
    begun, returned = [], []
    for value in messages(count):
        begun.append(now())
        producer.send(value)
        returned.append(now())
        if pause:
            time.sleep(pause)
    return begun, returned


def open_reader(state: State) -> None:
    state.kept["reader"] = state.topic.reader("latest")


def receive(state: State, count: int) -> list[int]:
    """The times at which the next messages were read (ns of the monotonic clock)."""
    arrived = []
    reader = state.kept["reader"]
    for _ in range(count):
        assert reader.read_next(timeout=20).value
        arrived.append(now())
    return arrived


# ---- idling ------------------------------------------------------------------------------


def _measure_idling(figure: Figure, reader: Worker) -> None:
    reader.call(open_reader)
    cpu, switches = reader.call(idle, IDLE_SECONDS)
    figure.state("CPU of an idle tailing process", 100 * cpu / IDLE_SECONDS, "%", Target(most=0.1))
    figure.state("times that it woke up in a second", switches / IDLE_SECONDS, "")


def idle(state: State, seconds: float) -> tuple[float, int]:
    """CPU seconds and context switches of this process while no message comes."""
    before, cpu = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    with contextlib.suppress(xl.WaitTimeoutError):
        state.kept["reader"].read_next(timeout=seconds)
    after, cpu = resource.getrusage(resource.RUSAGE_SELF), time.process_time() - cpu
    return cpu, after.ru_nvcsw - before.ru_nvcsw


# ---- the writer's rate -------------------------------------------------------------------


def _measure_writer(
    figure: Figure, stores: Stores, producer: xl.Producer, readers: list[Worker], rounds: int
) -> None:
    value = messages(1)[0]

    def pipelined() -> int:
        for _ in range(20_000):
            producer.send_async(value)
        producer.flush()
        return 20_000

    def single() -> int:
        producer.send(value)
        return 1

    for name, step, target in (
        ("send", single, Target(least_ratio=0.8)),
        ("send_async", pipelined, None),
    ):
        costs: list[float] = []
        arms = _writer_arms(name, step, producer, readers, costs)
        alone, tailed = take_turns(arms, rounds, before=stores.warm_memory).values()
        figure.series += [alone, tailed]
        figure.compare(f"the writer's rate, {tailed.name}", tailed, alone, target)
        cost = statistics.median(costs)
        figure.state(f"CPU of a tailing reader per message, {name}", cost, "s")


def _writer_arms(
    name: str,
    step: Callable[[], int],
    producer: xl.Producer,
    readers: list[Worker],
    costs: list[float],
) -> list[Arm]:
    return [
        Arm(f"{name}, no reader", lambda _: write_for_a_while(step), durability=POWER),
        Arm(
            f"{name}, {READERS} tailing readers",
            lambda _: _while_tailed(producer, readers, step, costs),
            durability=POWER,
        ),
    ]


def write_for_a_while(step: Callable[[], int]) -> list[float]:
    """Messages per second."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < WINDOW_SECONDS:
        count += step()
    return [count / passed]


def _while_tailed(
    producer: xl.Producer, readers: list[Worker], step: Callable[[], int], costs: list[float]
) -> list[float]:
    """The writer's rate; adds the cost of a message for each reader to `costs`."""
    for reader in readers:
        reader.call(open_reader)
        reader.start(read_to_the_end)
    time.sleep(0.05)
    rate = write_for_a_while(step)
    producer.send(END)
    answers = [reader.answer() for reader in readers]
    if len({count for count, _ in answers}) != 1:
        raise RuntimeError(f"the readers disagree about how many messages came: {answers}")
    costs += [cpu / count for count, cpu in answers]
    return rate


def read_to_the_end(state: State) -> tuple[int, float]:
    """How many messages came before the end, and the CPU seconds that they took."""
    reader, cpu = state.kept["reader"], time.process_time()
    count = 0
    while reader.read_next(timeout=20).value != END:
        count += 1
    return count, time.process_time() - cpu
