"""Flipped bits: any byte of any of a ledger's files is damaged; a child opens it and reads all.

A reader may get what was sent, or an error that names the place; never anything else, and never
the death of the interpreter. Tables, segments and a journal with frames that are in no table yet
are in the ledger when it is damaged: as after the death of all processes, or after a power cut
(without the lock files).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import exclusivelog as xl
from exclusivelog.local.storage import journal
from exclusivelog.local.storage.tables import AppliedJournal
from proof.jobs import spread
from testing.entries import refooted
from testing.journals import FRAME, MAGIC, MORE, PADDING, checkpoint, no_checkpoints
from testing.judges import Broken, judge_damage

PAGE = 4096
DEADLINE = 10  # seconds for a child
MOST_BROKEN = 5  # then it is clear enough
SOUND, REFUSED, STRAY, NAMED, WRONG = 0, 1, 2, 3, 9  # how a child ends
LOCKS = ("owners.lock", "lock.mdb")
Files = dict[str, bytes]
Sent = dict[str, dict[int, bytes | None]]


# ---- the ledger that is damaged ----------------------------------------------------------


def make(path: Path) -> tuple[Files, Sent]:
    """The files of a ledger that its process has left with a sudden death."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            _fill(path)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "the ledger could not be made"
    files = {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }
    sent: Sent = {
        name: {int(offset): bytes.fromhex(value) for offset, value in values.items()}
        for name, values in json.loads((path.parent / "sent.json").read_text()).items()
    }
    return files, sent


def _fill(path: Path) -> None:
    journal.CAPACITY = 256 << 10
    dice = random.Random(6)
    sent = {}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(xl.open(path, durability="power"))
        stack.enter_context(no_checkpoints(engine))
        for rounds in range(2):
            # Large ones take the journal over into the tables: what stays in it comes last.
            for name, size in (("large", 90_000), ("medium", 2000), ("small", 20)):
                with engine.topic(name).producer() as producer:
                    for _ in range(6):
                        many = 2 if name == "large" else 10
                        producer.send_many([dice.randbytes(size) for _ in range(many)])
            if rounds == 0:
                checkpoint(engine)
        for name in engine.topics():
            topic = engine.topic(name)
            sent[name] = {m.offset: (m.value or b"").hex() for m in topic.reader()}
        (path.parent / "sent.json").write_text(json.dumps(sent))
        os._exit(0)  # everything stays as it is


# ---- damage ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """Some bits of one file."""

    file: str
    flips: tuple[tuple[int, int], ...]  # (byte, bits)

    def done_to(self, content: bytes) -> bytes:
        """The file with it."""
        changed = bytearray(content)
        for at, bits in self.flips:
            changed[at] ^= bits
        return bytes(changed)


def damages(files: Files, dice: random.Random, count: int) -> Iterator[Damage]:
    """One file after the other, from its beginning to its end; half of them in the head of a page,
    which is LMDB's own, or of the file."""
    names = [name for name in sorted(files) if files[name]]
    for number in range(count):
        name = names[number % len(names)]
        size = len(files[name])
        rounds = max(1, count // len(names))
        region = size * (number // len(names) % rounds) // rounds
        flips = []
        for _ in range(dice.choice([1, 1, 4])):
            at = min(size - 1, region + dice.randrange(-(-size // rounds)))
            if dice.random() < 0.5:
                at = min(size - 1, at // PAGE * PAGE + at % 64)
            flips.append((at, 1 << dice.randrange(8)))
        yield Damage(name, tuple(flips))


def forged(files: Files) -> Files:
    """The control: values changed in the journal, under checksums that hold."""
    content = bytearray(files["journal"])
    changed = 0
    for at in range(PAGE, len(content) - FRAME.size, 16):
        magic, size, *_ = FRAME.unpack_from(content, at)
        if magic != MAGIC or not 0 < size & (MORE - 1) < 10_000:
            continue
        start, stop = at + FRAME.size, at + FRAME.size + (size & (MORE - 1))
        entry = bytearray(content[start:stop])
        entry[len(entry) // 4] ^= 1
        content[start:stop] = refooted(bytes(entry))
        changed += 1
    assert changed, "there is nothing to forge"
    return {**files, "journal": bytes(content)}


# ---- the judge's children ----------------------------------------------------------------


def read_all(
    path: Path, sent: Sent, readonly: bool, proven: bool = False
) -> tuple[list[Broken], int]:
    """Open the ledger, and judge what every topic of it gives out; how much was named, too.
    `proven`: a later frame of the journal tells that what was damaged was there (rule H7)."""
    broken: list[Broken] = []
    lost = 0
    with xl.open(path, readonly=readonly) as engine:
        for name, expected in sent.items():
            topic = engine.topic(name, create=False)
            seen, named, end = step_over(topic)
            # At the journal's end damage cannot be told from what was never written.
            known = {offset: value for offset, value in expected.items() if proven or offset < end}
            broken += judge_damage(known, seen, named)
            lost += len(named)
        engine.verify()
    return broken, lost


def step_over(topic: xl.Topic) -> tuple[dict[int, bytes | None], set[int], int]:
    """(what is read, what is named as damaged, where it ends)."""
    reader = topic.reader()
    seen: dict[int, bytes | None] = {}
    named: set[int] = set()
    while True:
        try:
            for message in reader:
                seen[message.offset] = message.value
            return seen, named, topic.next_offset
        except xl.LedgerCorruptedError as error:
            if error.offsets is None or error.offsets.stop <= reader.position:
                raise
            named |= set(error.offsets)
            reader.seek(error.offsets.stop)


def in_child(path: Path, sent: Sent, readonly: bool, proven: bool = False) -> tuple[int, str]:
    """How a child ends that reads the ledger, and what it says."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(DEADLINE)
        code = STRAY
        try:
            broken, lost = read_all(path, sent, readonly, proven)
            code = WRONG if broken else NAMED if lost else SOUND
            os.write(theirs, "; ".join(map(str, broken[:3])).encode())
        except (xl.ExclusiveLogError, MemoryError) as error:
            code = REFUSED
            os.write(theirs, repr(error).encode()[:1000])
        except BaseException as error:
            os.write(theirs, repr(error).encode()[:1000])
        os._exit(code)
    os.close(theirs)
    _, status = os.waitpid(pid, 0)
    with open(ours, "rb") as said:
        return os.waitstatus_to_exitcode(status), said.read().decode(errors="replace")


@dataclass
class Flipped:
    """What came of some damages."""

    flips: int = 0
    harmless: int = 0
    named: int = 0  # by the reader, who got all the rest
    refused: int = 0  # by a clear error of the whole ledger
    lmdb_deaths: int = 0  # in LMDB's own pages, which nothing guards
    broken: list[str] = field(default_factory=list)


def flip(where: Path, seed: int, count: int, control: bool = False) -> Flipped:
    """Damage the ledger so many times. Call it in a process that has no engine open."""
    files, sent = make(where / "log")
    if control:
        files = forged(files)
    found, dice = Flipped(), random.Random(seed)
    for number, damage in enumerate(damages(files, dice, count)):
        path = where / str(number)
        changed = files if control else {**files, damage.file: damage.done_to(files[damage.file])}
        locks = dice.random() < 0.5
        _lay_out(path, changed, locks)
        code, said = in_child(path, sent, readonly=dice.random() < 0.3)
        _take(found, damage, code, said)
        shutil.rmtree(path)
        if len(found.broken) > MOST_BROKEN:
            break
    return found


def flip_frames(where: Path, seed: int, blind: bool = False) -> Flipped:
    """Damage each frame of the journal but the last one, after a power cut, which has taken the
    lock files: all that was acknowledged has to be read or named. `blind`, the control: no frame
    is asked what was durable."""
    files, sent = make(where / "log")
    found, dice = Flipped(), random.Random(seed)
    places = list(_frames(files["journal"]))[:-1]
    assert len(places) > MOST_BROKEN
    known_end = AppliedJournal.known_end
    try:
        if blind:
            setattr(AppliedJournal, "known_end", lambda applied: applied.applied)  # noqa: B010
        for number, (start, stop) in enumerate(places):
            damage = Damage("journal", ((dice.randrange(start, stop), 1 << dice.randrange(8)),))
            path = where / str(number)
            _lay_out(path, {**files, "journal": damage.done_to(files["journal"])}, locks=False)
            code, said = in_child(path, sent, readonly=number % 2 == 0, proven=True)
            _take(found, damage, code, said)
            shutil.rmtree(path)
    finally:
        setattr(AppliedJournal, "known_end", known_end)  # noqa: B010
    return found


def _frames(content: bytes) -> Iterator[tuple[int, int]]:
    """(start, stop) of the frames of the newest generation, in their order."""
    generations: dict[int, list[tuple[int, int, int]]] = {}
    for at in range(PAGE, len(content) - FRAME.size, 16):
        magic, size, position, generation, *_ = FRAME.unpack_from(content, at)
        if magic == MAGIC and 0 < size < PADDING:
            stop = at + FRAME.size + (size & (MORE - 1))
            generations.setdefault(generation, []).append((position, at, stop))
    newest = max(generations.values(), key=max)
    return ((at, stop) for _, at, stop in sorted(newest))


def _lay_out(path: Path, files: Files, locks: bool) -> None:
    (path / "segments").mkdir(parents=True)
    for name, content in files.items():
        if locks or name not in LOCKS:
            (path / name).write_bytes(content)


def _take(found: Flipped, damage: Damage, code: int, said: str) -> None:
    found.flips += 1
    if code == SOUND:
        found.harmless += 1
    elif code == NAMED:
        found.named += 1
    elif code == REFUSED:
        found.refused += 1
    elif code < 0 and code != -signal.SIGALRM and damage.file == "data.mdb":
        found.lmdb_deaths += 1
    else:
        how = {WRONG: "wrong data", STRAY: "a stray error"}.get(code, f"ended by signal {-code}")
        found.broken.append(f"{damage}: {how}: {said}")


# ---- in processes of their own -----------------------------------------------------------

SLICE = 250  # damages of one ledger
SECONDS, SECONDS_OF_A_FLIP = (
    60.0,
    2.0,
)  # at most, on a busy machine; a child that hangs has DEADLINE


def flip_some(where: str, seed: int, count: int, control: bool) -> dict[str, object]:
    """One slice."""
    path = Path(where)
    path.mkdir(parents=True)
    found = flip(path, seed, count, control)
    shutil.rmtree(path)
    return vars(found)


def flip_beside(where: Path, count: int, seed: int, control: bool = False) -> Iterator[Flipped]:
    """So many damages in slices, in processes of their own: what came of each slice."""
    jobs = [
        (str(where / str(start)), seed + start, min(SLICE, count - start), control)
        for start in range(0, count, SLICE)
    ]
    seconds = SECONDS + SECONDS_OF_A_FLIP * SLICE
    for found in spread("proof.bit_flips:flip_some", jobs, seconds):
        yield Flipped(**found)


def flip_each_frame(where: str, seed: int, blind: bool) -> dict[str, object]:
    """`flip_frames` as a job."""
    Path(where).mkdir(parents=True)
    return vars(flip_frames(Path(where), seed, blind))


def flip_frames_beside(where: Path, seed: int, blind: bool = False) -> Flipped:
    """`flip_frames` in a process of its own."""
    seconds = SECONDS + SECONDS_OF_A_FLIP * 100
    [found] = spread("proof.bit_flips:flip_each_frame", [(str(where), seed, blind)], seconds)
    return Flipped(**found)
