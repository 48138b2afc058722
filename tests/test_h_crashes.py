"""Rules H1, G3, B2, B9, G9: whatever dies, at whatever moment, what was acknowledged is in the log.

First processes die: by SIGKILL at a system call, before it or right behind it, and at full speed
between two instructions. Those that live go on at once, and so does whoever comes next.

Then the power fails. strace has written down what a process wrote and flushed, and when it
acknowledged what. A cut keeps what was flushed; of each block that was written since, the disk may
have any version. Such disks are made by the hundred, and each is started up: all that was
acknowledged must be there, batches whole or not at all, nothing damaged, and it goes on. What a
process stores through a mapping (owners.lock) is lost in a cut; where the journal is written like
that (`process`), any block of it may be an old one.

The judge must turn red where the flush is left out, or a checksum, or the mark that holds the
entries of a batch together: those are its controls.

`pytest --every-crash` takes every system call and every disk, not a sample.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import itertools
import json
import logging
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core, journal, lockfile
from exclusivelog.ledger import Ledger
from tests.children import PATIENCE, ROOT, child, command, line, tell
from tests.disks import needs_strace
from tests.journals import FRAME, MAGIC, MORE, PADDING, checkpoint, no_checkpoints
from tests.power_cuts import CALLS, SECTOR, Cut, Disk, File, Image, cut_here, cuts, materialised
from tests.processes import until, values, within

CAPACITY = 512 << 10  # of the journal: so small that it goes around within one test
AT_ONCE = 2.0  # seconds, on a busy machine; nothing in the library takes half of that

# ---- the work ----------------------------------------------------------------------------


def some(name: str, number: int, size: int) -> bytes:
    """A message of its own."""
    head = f"{name}/{number}/".encode()
    return head + random.Random(f"{name}{number}").randbytes(max(0, size - len(head)))


@functools.cache
def steps(name: str, rounds: int = 1) -> list[list[bytes]]:
    """What is sent to a topic: each step is one atomic append. With `max_batch_messages=2` the
    longer ones are several entries."""
    sizes = [[9], [700], [9] * 5, [40_000], [200_000], [9], [3000] * 5, [9], [90_000] * 4, [100]]
    numbers = itertools.count()
    return [[some(name, next(numbers), size) for size in step] for step in sizes * rounds]


FENCED_BEFORE = 5  # the step that a new owner begins with
CHECKPOINTS = (1, 3, 7)  # there is one behind these steps
TOPICS = ("t", "u")


def act(engine: xl.Engine, name: str, acknowledge: Callable[[], object], rounds: int = 1) -> None:
    """Send every step that is not there yet, by an owner that is fenced on the way, and by the
    one who fenced it."""
    topic = engine.topic(name)
    there = whole_steps(values(topic), steps(name, rounds))
    producer = topic.producer("exclusive", name=name, max_batch_messages=2, timeout=10)
    for number, step in enumerate(steps(name, rounds)[there:], there):
        if number % 10 == FENCED_BEFORE:
            rival = topic.producer(
                "exclusive_with_fencing", name=f"{name}{number}", max_batch_messages=2
            )
            refused(producer)
            producer = rival
        if len(step) == 1:
            producer.send(step[0])
        else:
            producer.send_many(step)
        acknowledge()
        if number % 10 in CHECKPOINTS:
            engine.ledger.checkpoint()
    producer.close()


def refused(producer: xl.Producer) -> None:
    try:
        producer.send(b"of a fenced owner")
    except xl.ProducerFencedError:
        return
    raise AssertionError("B2: a fenced owner has sent")


def whole_steps(found: list[bytes], expected: list[list[bytes]]) -> int | None:
    """So many of the steps are in the log, whole and in order, and nothing else; else None."""
    at = 0
    for number, step in enumerate(expected):
        if at == len(found):
            return number
        if found[at : at + len(step)] != step:
            return None
        at += len(step)
    return len(expected) if at == len(found) else None


def judge_topic(engine: xl.Engine, name: str, acknowledged: int, rounds: int = 1) -> list[str]:
    """Every broken rule. Somebody sends: what a dead process had written, and nobody flushed, is
    in the log from then on, or is not; no reader sees it before (rule G6)."""
    topic = engine.topic(name)
    before = values(topic)
    with topic.producer("exclusive_with_fencing", name=name) as producer:
        offset = producer.send(b"next")
        epoch = producer.topic_epoch
    messages = list(topic.reader())
    found = [message.value for message in messages]
    broken = []
    for seen in (before, found[:-1]):
        count = whole_steps(seen, steps(name, rounds))
        if count is None:
            broken.append(f"G3: {name} has a part of a step: {[value[:12] for value in seen]}")
        elif count < acknowledged:
            broken.append(f"H1: {name} has {count} of {acknowledged} acknowledged steps")
    if found[: len(before)] != before or found[-1] != b"next" or offset != len(found) - 1:
        broken.append(f"B9: {name} has another end after {offset} was sent: {len(found)} messages")
    epochs = [message.epoch for message in messages]
    if epochs != sorted(epochs) or epochs[-1] != epoch:
        broken.append(f"B8: {name} has epochs {epochs}")
    return broken


def judge(
    path: str | Path, durability: str, acknowledged: dict[str, int], rounds: int = 1
) -> list[str]:
    """Every rule that this ledger breaks once it is opened."""
    try:
        with xl.open(path, durability=durability) as engine:
            broken = list(engine.verify().problems)
            for name, count in acknowledged.items():
                broken += judge_topic(engine, name, count, rounds)
            return broken + [f"at last: {problem}" for problem in engine.verify().problems]
    except xl.ExclusiveLogError as error:
        return [f"H1: {type(error).__name__}: {error}"]


# ---- H1, G3: death at a system call ------------------------------------------------------


def die_with_parent() -> None:
    """Else what a test has started could outlive it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def play(path: str, durability: str, go: int, says: int) -> None:
    """What a victim does; it says a byte for each step that was acknowledged."""
    journal.CAPACITY = CAPACITY
    os.read(go, 1)
    with xl.open(path, durability=durability, name="victim") as engine:
        act(engine, "t", lambda: os.write(says, b"."))


def breed() -> None:
    """Bring up a victim for each line of input. One that stops is killed where it stands."""
    for job in sys.stdin:
        path, durability = job.split()
        go, start = os.pipe()
        said, says = os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            with contextlib.suppress(BaseException):
                play(path, durability, go, says)
                os._exit(0)
            os._exit(1)
        os.close(says)
        os.close(go)
        print(pid, flush=True)
        sys.stdin.readline()
        with contextlib.suppress(BrokenPipeError):  # killed while it waits for this
            os.write(start, b"!")
        _, status = os.waitpid(pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(code, len(os.read(said, 1000)), flush=True)
        os.close(start)
        os.close(said)


BREEDS = "from tests.test_h_crashes import breed; breed()"


@dataclass(frozen=True)
class Point:
    """The moment of a death: at the n-th call of a kind that a thread makes."""

    call: str
    when: int
    behind: bool  # it has been made, and nothing since

    def __str__(self) -> str:
        return f"{self.call}-{self.when}-{'behind' if self.behind else 'before'}"

    @property
    def injection(self) -> str:
        # SIGKILL lets the call not begin; SIGSTOP strikes when it returns.
        number = "SIGSTOP" if self.behind else "SIGKILL"
        return f"inject={self.call}:signal={number}:when={self.when}"


@contextlib.contextmanager
def traced(pid: int, *options: str) -> Iterator[None]:
    """The process and its threads under strace, while the block runs."""
    strace = subprocess.Popen(
        ["strace", "-f", "-p", str(pid), *options], stderr=subprocess.PIPE, text=True
    )
    try:
        assert strace.stderr is not None
        assert "attached" in strace.stderr.readline()
        yield
    finally:
        strace.terminate()
        strace.communicate(timeout=20)


def run_victim(breeder: Any, path: Path, durability: str, *options: str) -> tuple[bool, int]:
    """Has it come to its end, and how many steps were acknowledged?"""
    tell(breeder, f"{path} {durability}")
    pid = int(line(breeder))
    with traced(pid, *options):
        tell(breeder)
        status, count = map(int, line(breeder, 30).split())
    assert status in (0, -signal.SIGKILL), f"the victim failed: {path}"
    return status == 0, count


def points(trace: Path) -> list[Point]:
    """Every moment at which a thread of the victim could die."""
    most: collections.Counter[str] = collections.Counter()
    for (_, call), count in collections.Counter(
        re.findall(r"^(\d+) +(\w+)\(", trace.read_text(), re.M)
    ).items():
        most[call] = max(most[call], count)
    return [
        Point(call, when + 1, behind)
        for call, count in most.items() if call not in ("exit", "exit_group")
        for when in range(count) for behind in (False, True)
    ]  # fmt: skip


CHANGING = ("pwritev", "pwrite64", "writev", "fdatasync", "fsync", "rename", "futex", "write")


def chosen(found: list[Point], every: bool, most: int) -> list[Point]:
    """A sample, most of it of calls that change something."""
    if every:
        return found
    changing = [point for point in found if point.call in CHANGING]
    others = [point for point in found if point.call not in CHANGING]
    dice = random.Random(len(found))
    return dice.sample(changing, most * 3 // 4) + dice.sample(others, most // 4)


@dataclass
class Bystander:
    """Somebody in this process who has the ledger open while the victim dies, and sends to
    another topic."""

    engine: xl.Engine
    sent: int = 0
    longest: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with self.engine.topic("others").producer("exclusive") as producer:
            while not self.stop.wait(0.001):
                began = time.monotonic()
                assert producer.send(b"%d" % self.sent) == self.sent
                self.longest = max(self.longest, time.monotonic() - began)
                self.sent += 1


@contextlib.contextmanager
def bystander(path: Path, durability: str) -> Iterator[Bystander]:
    with xl.open(path, durability=durability, name="bystander") as engine:
        other = Bystander(engine)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(other.run)
            try:
                yield other
            finally:
                other.stop.set()
                running.result(PATIENCE)


def power_fails(path: Path, copy: Path) -> Path:
    """A copy of the directory as the next boot finds it, where all that was written is there."""
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("owners.lock", "lock.mdb"))
    return copy


def judge_beside(other: Bystander, path: Path, count: int) -> list[str]:
    """What those that live see, and what a power cut leaves of that."""
    broken = judge_topic(other.engine, "t", count) + list(other.engine.verify().problems)
    if other.longest > AT_ONCE:
        broken.append(f"a survivor's message took {other.longest:.1f} s")
    return broken


def die_alone(breeder: Any, path: Path, durability: str, *options: str) -> tuple[bool, list[str]]:
    """The victim makes the ledger, and is the only one to have it open."""
    ended, count = run_victim(breeder, path, durability, *options)
    return ended, within(lambda: judge(path, durability, {"t": count}))


def die_beside(breeder: Any, path: Path, durability: str, *options: str) -> tuple[bool, list[str]]:
    """Somebody else has the ledger open, goes on, and closes it; then the next one comes."""
    with bystander(path, durability) as other:
        ended, count = run_victim(breeder, path, durability, *options)
        broken = within(lambda: judge_beside(other, path, count))
    with xl.open(path) as engine:
        found = values(engine.topic("t"))
        if found[-1:] != [b"next"] or whole_steps(found[:-1], steps("t")) is None:
            broken.append("B9: the next one to come finds another log")
        if values(engine.topic("others")) != [b"%d" % n for n in range(other.sent)]:
            broken.append("B9: a survivor's messages are not what it sent")
        return ended, broken + list(engine.verify().problems)


@needs_strace
@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_g3_dying_at_a_system_call(tmp_path, request, monkeypatch, durability, beside) -> None:
    """The victim makes the ledger, appends one message, batches of several entries and large
    ones, makes checkpoints, fences its own producer, and closes; death strikes in all of it."""
    monkeypatch.setattr(journal, "CAPACITY", CAPACITY)
    die = die_beside if beside else die_alone
    trace = tmp_path / "trace"
    with contextlib.ExitStack() as stack:
        breeders = [stack.enter_context(child(BREEDS)) for _ in range(2)]
        ended, broken = die(breeders[0], tmp_path / "whole", durability, "-o", str(trace))
        assert (ended, broken) == (True, [])
        wanted = chosen(points(trace), request.config.getoption("--every-crash"), 100)
        todo, results = iter(wanted), []

        def sweep(breeder: Any) -> None:
            for point in todo_safely(todo):
                path = tmp_path / str(point)
                options = ("-o", os.devnull, "-e", f"trace={point.call}", "-e", point.injection)
                results.append((point, *die(breeder, path, durability, *options)))
                shutil.rmtree(path, ignore_errors=True)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(sweep, breeders))
    assert [(str(point), broken) for point, _, broken in results if broken] == []
    died = sum(not ended for _, ended, _ in results)
    print(f"\n{len(results)} points of {len(points(trace))}, {died} deaths")
    assert died > len(results) // 2, "hardly anybody died"


_taking = threading.Lock()


def todo_safely(items: Iterator[Any]) -> Iterator[Any]:
    """The same items, for several threads."""
    while True:
        with _taking:
            item = next(items, None)
        if item is None:
            return
        yield item


def die_in_a_batch(path: Path, when: int, values: str) -> None:
    """An owner's process dies inside the critical section, right behind the `when`-th write of a
    batch of three entries."""
    with child(DIES_IN_A_BATCH, path, values) as victim:
        pid = int(line(victim))
        # Stopped, not killed, by that write, which is thus made; then it is killed.
        injection = f"inject=pwritev:signal=SIGSTOP:when={when}"
        with traced(pid, "-o", os.devnull, "-e", "trace=pwritev", "-e", injection):
            tell(victim)
            until(lambda: os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG))
            victim.kill()
            victim.wait(PATIENCE)


DIES_IN_A_BATCH = """
    import os, sys
    import exclusivelog as xl
    with xl.open(sys.argv[1], durability="power") as engine:
        producer = engine.topic("t").producer(
            "exclusive_with_fencing", name="v", max_batch_messages=1
        )
        print(os.getpid(), flush=True)
        input()
        producer.send_many([value.encode() for value in sys.argv[2]])
"""


@needs_strace
def test_g3_a_dead_owners_batch_does_not_come_back(path, tmp_path) -> None:
    """The owner dies with its batch of three entries written, but not yet counted. The next owner
    writes one message over the first of them, of the same size, and is told that it is durable.
    Then the power fails: behind that message the rest of the dead owner's batch must not stand."""
    with xl.open(path, durability="power") as engine, no_checkpoints(engine):
        die_in_a_batch(path, 3, "123")
        with engine.topic("t").producer("exclusive_with_fencing", name="v") as producer:
            assert producer.send(b"n") == 0
            copy = power_fails(path, tmp_path / "copy")
        assert values(engine.topic("t")) == [b"n"]
    with xl.open(copy) as engine:
        assert values(engine.topic("t")) == [b"n"]
        assert engine.verify().problems == ()


@needs_strace
def test_g3_two_dead_owners_batches_do_not_become_one(path, tmp_path) -> None:
    """The next owner dies, too, when it has written the first entry of its own batch over the
    first one of the other's. Then the power fails: of the two no batch may be made."""
    with xl.open(path, durability="power") as engine, no_checkpoints(engine):
        die_in_a_batch(path, 3, "123")
        die_in_a_batch(path, 1, "abc")
        copy = power_fails(path, tmp_path / "copy")
    with xl.open(copy) as engine:
        assert values(engine.topic("t")) in ([], [b"1", b"2", b"3"], [b"a", b"b", b"c"])
        assert engine.verify().problems == ()


# ---- H1, B9: death between two instructions ----------------------------------------------

# What a sprinter and the one beside it tell the test, without a system call.
PACER, PACER_COUNT, SPRINTERS = 0, 1, 2  # numbers in the notes: go on?, count, counts
Notes = memoryview  # of 64-bit numbers: each is stored at once, unlike with struct.pack_into


def note(where: Path) -> Notes:
    """Shared memory that outlives whoever writes into it."""
    with where.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")


def parts(count: int) -> int:
    """Every tenth append is a batch of three entries, the others are one message."""
    return 3 if count % 10 == 9 else 1


def sprint(path: str, notes: Notes, at: int, name: str, pause: Callable[[], object]) -> None:
    """Send as fast as can be, and count what was acknowledged."""
    with xl.open(path, durability="process", name=name) as engine:
        producer = engine.topic("t").producer("shared", name=name, max_batch_messages=1)
        for count in itertools.count():
            pause()
            if parts(count) == 1:
                producer.send(b"%s/%d/0" % (name.encode(), count))
            else:
                producer.send_many([b"%s/%d/%d" % (name.encode(), count, n) for n in range(3)])
            notes[at] = count + 1


def pace(path: str, where: str) -> None:
    """The one who lives: sends as long as the notes say so."""
    notes = note(Path(where))

    def pause() -> None:
        while not notes[PACER]:
            time.sleep(0.0002)

    sprint(path, notes, PACER_COUNT, "pacer", pause)


def sprint_to_death(path: str, where: str, rounds: int, seed: int) -> None:
    """One sprinter after the other is killed; prints how long the pacer then stood still."""
    notes, dice = note(Path(where)), random.Random(seed)
    for number in range(rounds):
        at = SPRINTERS + number
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            with contextlib.suppress(BaseException):
                sprint(path, notes, at, f"s{number}", lambda: None)
            os._exit(1)
        wait_for(lambda at=at: notes[at] > 0)
        notes[PACER] = 1
        time.sleep(dice.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
        began, seen = time.monotonic(), notes[PACER_COUNT]
        wait_for(lambda seen=seen: notes[PACER_COUNT] > seen + 1)
        print(time.monotonic() - began, flush=True)
        notes[PACER] = 0
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "it has failed by itself"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "nobody goes on"
        time.sleep(0.0001)


def judge_sprints(found: list[bytes], acknowledged: dict[str, int]) -> list[str]:
    """Each one's appends are there in order, once, whole; one more than acknowledged may be."""
    broken: list[str] = []
    there: dict[str, int] = collections.defaultdict(int)
    at = 0
    while at < len(found):
        name, count, _ = found[at].decode().split("/")
        size = parts(int(count))
        whole = [f"{name}/{count}/{n}".encode() for n in range(size)]
        if int(count) != there[name] or found[at : at + size] != whole:
            return [f"G3, B9: behind {there[name]} of {name} stand {found[at : at + 4]}"]
        there[name] += 1
        at += size
    for name, count in acknowledged.items():
        if not count <= there[name] <= count + 1:
            broken.append(f"H1: {name} has {there[name]} appends, {count} were acknowledged")
    return broken


def test_h1_dying_at_full_speed_beside_another_sender(tmp_path, request) -> None:
    """`process`: no system call in an append, the death strikes among stores through the mapping
    and inside the critical section. Whoever sends at the same time goes on at once."""
    rounds = 1500 if request.config.getoption("--every-crash") else 150
    path, where = tmp_path / "log", tmp_path / "notes"
    where.write_bytes(bytes(8 * (SPRINTERS + rounds)))
    xl.open(path).close()
    with child(module_call("pace"), path, where) as pacer:
        with child(module_call("sprint_to_death"), path, where, rounds, 7) as sprinters:
            pauses = [float(line(sprinters)) for _ in range(rounds)]
            assert sprinters.wait(PATIENCE) == 0
        assert pacer.poll() is None
        pacer.kill()
        pacer.wait(PATIENCE)
    notes = note(where)
    acknowledged = {f"s{n}": notes[SPRINTERS + n] for n in range(rounds)}
    acknowledged["pacer"] = notes[PACER_COUNT]
    with xl.open(path, durability="process") as engine:
        found = within(lambda: values(engine.topic("t")), 2 * PATIENCE)
        assert judge_sprints(found, acknowledged) == []
        assert engine.verify().problems == ()
        with engine.topic("t").producer("exclusive", timeout=10) as producer:
            assert producer.send(b"next") == len(found)
    slow = sum(pause > 0.4 for pause in pauses)
    print(f"\n{rounds} deaths, {len(found)} messages, {max(pauses):.3f} s at most, {slow} slow")
    assert max(pauses) < AT_ONCE
    assert slow <= rounds // 20


def test_the_judge_of_sprints_turns_red() -> None:
    """Controls: a message that is missing, twice, out of order, or half a batch."""
    batch = [b"a/9/0", b"a/9/1", b"a/9/2"]
    sound = [*(b"a/%d/0" % n for n in range(9)), *batch, b"b/0/0"]
    assert judge_sprints(sound, {"a": 10, "b": 0}) == []
    for wrong in (sound[:-2], sound[1:], [*sound, sound[-1]], [*sound[:9], *batch[:2]]):
        assert judge_sprints(wrong, {"a": 10, "b": 0}) != []
    assert judge_sprints(sound, {"a": 11, "b": 1}) != []


def module_call(function: str) -> str:
    """Source that calls a function of this module with what stands in sys.argv."""
    return f"""
        import sys
        from tests import test_h_crashes
        arguments = [int(a) if a.isdigit() else a for a in sys.argv[1:]]
        test_h_crashes.{function}(*arguments)
    """


# ---- H1: the recording, the judge --------------------------------------------------------

RECORDED = """
    import os, sys, threading
    import exclusivelog as xl
    from exclusivelog import journal
    from tests.test_h_crashes import CAPACITY, TOPICS, act
    journal.CAPACITY = CAPACITY
    with xl.open(sys.argv[1], durability="power") as engine:
        def run(name):
            act(engine, name, lambda: os.write(1, f"ack {name}\\n".encode()), int(sys.argv[2]))
        threads = [threading.Thread(target=run, args=(name,)) for name in TOPICS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
"""


def record(path: Path, trace: Path, rounds: int, *options: str) -> None:
    """Two owners at once, each with its topic, on a ledger that they make."""
    done = subprocess.run(
        ["strace", "-f", "-y", "-xx", "-s", str(1 << 20), "-o", trace, "-e", f"trace={CALLS}",
         *options, *command(RECORDED, path, rounds)],
        capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def lay_out(cut: Image, where: Path, dice: random.Random) -> None:
    """Put the disk's files there. Words of the life before say anything at all."""
    (where / "segments").mkdir(parents=True)
    for name, content in cut.items():
        (where / name).parent.mkdir(exist_ok=True)
        (where / name).write_bytes(content)
    if dice.random() < 0.5:
        words = bytearray(dice.randbytes(lockfile.SIZE))
        words[:8] = lockfile.MAGIC.to_bytes(8, "little")
        (where / "owners.lock").write_bytes(words)


def judge_disks(sabotage: str) -> None:
    """A child's work: judge each directory that it is told, and say what is broken."""
    die_with_parent()
    journal.CAPACITY = CAPACITY
    logging.disable(logging.CRITICAL)
    if sabotage != "none":
        trust(sabotage)
    for job in sys.stdin:
        path, durability, rounds, acknowledged = json.loads(job)
        print(json.dumps(judge(path, durability, acknowledged, rounds)), flush=True)


@dataclass
class Verdicts:
    """What came of the disks that were judged."""

    judged: int = 0
    broken: list[tuple[str, list[str]]] = field(default_factory=list)


def judge_all(
    found: Iterator[Cut], where: Path, durability: str, rounds: int, sabotage: str = "none"
) -> Verdicts:
    """Start each of the disks up, in a process that may crash of it."""
    verdicts, numbers = Verdicts(), itertools.count()

    def work(judge_of_them: Any) -> None:
        for cut in todo_safely(found):
            number = next(numbers)
            path = where / str(number)
            lay_out(cut.image, path, random.Random(number))
            tell(judge_of_them, json.dumps([str(path), durability, rounds, cut.acknowledged]))
            broken = json.loads(line(judge_of_them))
            verdicts.judged += 1
            if broken:
                verdicts.broken.append((f"{path}: cut at {cut.moment}", broken))
                if len(verdicts.broken) > 5:
                    return
            else:
                shutil.rmtree(path)

    with contextlib.ExitStack() as stack:
        judges = [
            stack.enter_context(child(module_call("judge_disks"), sabotage)) for _ in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, judges))
    return verdicts


@dataclass
class Trusting:
    """A journal that does not check what it should when it is recovered."""

    journal: _core.Journal
    path: str
    sabotage: str  # "checksum": frames are not; "batch": its entries are not held together

    def __getattr__(self, name: str) -> Any:
        return getattr(self.journal, name)

    def live_end(self, position: int, generation: int) -> int:
        data, capacity = Path(self.path, "journal").read_bytes(), self.journal.capacity
        whole, stop = position, position + capacity
        while position < stop:
            at = _core.JOURNAL_HEADER_BYTES + position % capacity
            left = capacity - position % capacity
            magic, size, *place = FRAME.unpack_from(data + bytes(FRAME.size), at)
            if left >= FRAME.size and (magic, *place[:2]) != (MAGIC, position, generation):
                break
            if left < FRAME.size or size & PADDING:
                position += left
                continue
            flags, size, start = size & MORE, size & (MORE - 1), at + FRAME.size
            if self.sabotage != "checksum" and not is_sound(data[start : start + size]):
                break
            position += (FRAME.size + size + 15) // 16 * 16
            if self.sabotage == "batch" or not flags:
                whole = position
        return whole


def is_sound(entry: bytes) -> bool:
    with contextlib.suppress(ValueError):
        _core.Entry(entry)
        return True
    return False


def trust(sabotage: str) -> None:
    """Recover in this process without checking."""
    recover = Ledger._recover
    Ledger._recover = lambda ledger, found: recover(  # type: ignore[method-assign]
        ledger, Trusting(found, ledger.path, sabotage)
    )


def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Rounds of work, and disks per flush."""
    return (2, 60) if request.config.getoption("--every-crash") else (2, 6)


@needs_strace
@pytest.mark.timeout(1800)  # with --every-crash
def test_h1_power_cuts_around_every_flush(tmp_path, request) -> None:
    """`power`, from the making of the ledger to its end: small appends, batches of several
    entries, checkpoints, large entries in segments, a data.mdb that grows, a journal that goes
    around. Whatever of the unflushed blocks has come through, nothing acknowledged is lost."""
    rounds, most = sizes(request)
    path, trace = tmp_path / "log", tmp_path / "trace"
    record(path, trace, rounds)
    found = cuts(Disk(str(path)), trace, TOPICS, most, random.Random(1))
    verdicts = judge_all(found, tmp_path / "disks", "power", rounds)
    print(f"\n{verdicts.judged} disks")
    assert verdicts.broken == []
    assert verdicts.judged > 100


def short_life(path: Path, count: int) -> list[str]:
    """Two owners until so many steps are acknowledged; then the process dies. Whose steps?"""
    with child(RECORDED, path, 1) as process:
        said = [line(process).split()[1] for _ in range(count)]
        process.kill()
        process.wait(PATIENCE)
        assert process.stdout is not None
        return said + [word for word in process.stdout.read().split() if word != "ack"]


@needs_strace
@pytest.mark.timeout(1800)  # with --every-crash
def test_h1_power_cuts_while_the_next_boot_recovers(tmp_path, request) -> None:
    """The power fails while the journal has what no table has; and once more while the first one
    to open the ledger moves that into the tables, and goes on."""
    counts = range(1, 15) if request.config.getoption("--every-crash") else (12,)
    for count in counts:
        said = short_life(tmp_path / "first", count)
        path, trace = power_fails(tmp_path / "first", tmp_path / f"log{count}"), tmp_path / "trace"
        disk = Disk.of(path, said)
        record(path, trace, 1)
        found = cuts(disk, trace, TOPICS, 5, random.Random(4))
        verdicts = judge_all(found, tmp_path / f"disks{count}", "power", 1)
        assert verdicts.broken == []
        assert verdicts.judged > 20
        shutil.rmtree(tmp_path / "first")


@needs_strace
def test_h1_control_without_the_flush_messages_are_lost(tmp_path) -> None:
    """The same recording, on a disk that does not hear of the journal's flushes."""
    path, trace = tmp_path / "log", tmp_path / "trace"
    record(path, trace, 1)
    found = cuts(Disk(str(path)), trace, TOPICS, 3, random.Random(2), never_flushed="/journal")
    verdicts = judge_all(found, tmp_path / "disks", "power", 1)
    assert any("acknowledged steps" in text for _, texts in verdicts.broken for text in texts)


# ---- H1: power cuts that nobody has flushed for ------------------------------------------


def stored_cuts(path: Path, rounds: int, most: int, dice: random.Random) -> Iterator[Cut]:
    """`process`: the tables as they are after each step, and a journal of whose blocks any may
    be as old as the last checkpoint."""
    with xl.open(path, durability="process") as engine, no_checkpoints(engine):
        kept: list[Disk] = []
        file = File()

        def look() -> None:
            data = (path / "journal").read_bytes()
            if len(kept) % 10 in (0, *CHECKPOINTS):
                checkpoint(engine)
                file.flushed, file.pending = bytearray(data), []
            write_difference(file, data)
            kept.append(snapshot(path, file))

        act(engine, "t", look, rounds)
    for number, disk in enumerate(kept):
        for made in cut_here(disk, dice, most):
            yield Cut(made, {"t": 0}, f"step {number}")
        whole = {name: bytes(materialised(file)) for name, file in disk.names.items()}
        yield Cut(whole, {"t": number + 1}, f"step {number}, nothing lost")


def write_difference(file: File, data: bytes) -> None:
    now = materialised(file)
    for at in range(0, len(data), SECTOR):
        if now[at : at + SECTOR] != data[at : at + SECTOR]:
            file.write(0, at, data[at : at + SECTOR])


def snapshot(path: Path, file: File) -> Disk:
    names = {"journal": File(bytearray(file.flushed), list(file.pending))}
    for name in ("data.mdb", *(f"segments/{f.name}" for f in path.glob("segments/*"))):
        names[name] = File(bytearray((path / name).read_bytes()))
    return Disk(str(path), names, names)


def test_h1_power_cuts_that_nobody_flushed_for(tmp_path, request, monkeypatch) -> None:
    """`process`: the last messages may be lost, but whatever is read was sent, in order, without
    a gap, batches whole; and it goes on."""
    monkeypatch.setattr(journal, "CAPACITY", CAPACITY)
    rounds, most = sizes(request)
    found = stored_cuts(tmp_path / "log", rounds, min(most, 300), random.Random(3))
    verdicts = judge_all(found, tmp_path / "disks", "process", rounds)
    print(f"\n{verdicts.judged} disks")
    assert verdicts.broken == []
    assert verdicts.judged > 50


@pytest.mark.parametrize("sabotage", ["checksum", "batch"])
def test_g9_control_without_a_check_the_log_is_damaged(tmp_path, monkeypatch, sabotage) -> None:
    """The same disks, recovered by somebody who trusts every frame, or every entry of a batch."""
    monkeypatch.setattr(journal, "CAPACITY", CAPACITY)
    found = stored_cuts(tmp_path / "log", 1, 30, random.Random(3))
    verdicts = judge_all(found, tmp_path / "disks", "process", 1, sabotage)
    assert verdicts.broken != []
    if sabotage == "batch":
        assert any(text.startswith("G3: ") for _, texts in verdicts.broken for text in texts)
