"""Power cuts: every disk that one may leave is rebuilt, started up, and judged.

strace has written down what the work wrote and flushed (`proof.power_cuts` reads it). A cut keeps
what was flushed; of each block that was written since, the disk may have any version. Where the
journal is written through its mapping (`process`), any block of it may be an old one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.shm import lockfile
from exclusivelog.local.storage import journal, ledger
from exclusivelog.local.storage.opening import OpenFiles
from proof.jobs import todo_safely
from proof.power_cuts import CALLS, SECTOR, Cut, Disk, File, Image, cut_here, materialised
from proof.work import CHECKPOINTS, act, judge
from testing.children import PATIENCE, ROOT, child, command, die_with_parent, line, tell
from testing.journals import CAPACITY, FRAME, MAGIC, MORE, PADDING, checkpoint, no_checkpoints

RECORDED = """
    import os, sys, threading
    import exclusivelog as xl
    from exclusivelog.local.storage import journal
    from proof.work import TOPICS, act
    from testing.journals import CAPACITY
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
        [
            "strace",
            "-f",
            "-y",
            "-xx",
            "-s",
            str(1 << 20),
            "-o",
            trace,
            "-e",
            f"trace={CALLS}",
            *options,
            *command(RECORDED, path, rounds),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=ROOT,
    )
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


def judge_disks(defect: str) -> None:
    """A child's work: judge each directory that it is given, and print what is broken."""
    die_with_parent(os.getppid())
    journal.CAPACITY = CAPACITY
    logging.disable(logging.CRITICAL)
    if defect != "none":
        trust(defect)
    for job in sys.stdin:
        path, durability, rounds, acknowledged = json.loads(job)
        print(json.dumps(judge(path, durability, acknowledged, rounds)), flush=True)


JUDGES = "import sys; from proof.power import judge_disks; judge_disks(sys.argv[1])"


@dataclass
class Verdicts:
    """What came of the disks that were judged."""

    judged: int = 0
    broken: list[tuple[str, list[str]]] = field(default_factory=list)


def judge_all(
    found: Iterator[Cut], where: Path, durability: str, rounds: int, defect: str = "none"
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
        judges = [stack.enter_context(child(JUDGES, defect)) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, judges))
    return verdicts


@dataclass
class Trusting:
    """A journal that does not check what it should when it is recovered."""

    journal: _core.Journal
    path: str
    defect: str  # "checksum": frames are not; "batch": its entries are not held together

    def __getattr__(self, name: str) -> Any:
        return getattr(self.journal, name)

    def live_end(self, position: int, generation: int, *mark: int) -> int:
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
            if self.defect != "checksum" and not is_sound(data[start : start + size]):
                break
            position += (FRAME.size + size + 15) // 16 * 16
            if self.defect == "batch" or not flags:
                whole = position
        return whole


def is_sound(entry: bytes) -> bool:
    with contextlib.suppress(ValueError):
        _core.Entry(entry)
        return True
    return False


def trust(defect: str) -> None:
    """Recover in this process without checking."""
    recover = ledger.recover_journal

    def without_checks(files: OpenFiles, found: _core.Journal, alone: bool) -> None:
        trusting: Any = Trusting(found, files.path, defect)
        files.journal = trusting
        try:
            recover(files, trusting, alone)
        finally:
            files.journal = found

    ledger.recover_journal = without_checks  # type: ignore[assignment]


def short_life(path: Path, count: int) -> list[str]:
    """Two owners until so many steps are acknowledged; then the process dies. Whose steps?"""
    with child(RECORDED, path, 1) as process:
        said = [line(process).split()[1] for _ in range(count)]
        process.kill()
        process.wait(PATIENCE)
        assert process.stdout is not None
        return said + [word for word in process.stdout.read().split() if word != "ack"]


def power_fails(path: Path, copy: Path) -> Path:
    """A copy of the directory as the next boot finds it, where all that was written is there."""
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("owners.lock", "lock.mdb"))
    return copy


def stored_cuts(path: Path, rounds: int, most: int, dice: random.Random) -> Iterator[Cut]:
    """`process`: the tables as they are after each step, and a journal of whose blocks any may
    be as old as the last checkpoint, or the last flush, as a grant or claim makes it."""
    with xl.open(path, durability="process") as engine, no_checkpoints(engine):
        kept: list[Disk] = []
        file = File()

        def is_flushed() -> None:
            file.flushed, file.pending = bytearray((path / "journal").read_bytes()), []

        def flush() -> None:
            type(engine.ledger).flush(engine.ledger)
            is_flushed()

        def look() -> None:
            if len(kept) % 10 in (0, *CHECKPOINTS):
                checkpoint(engine)
                is_flushed()
            write_difference(file, (path / "journal").read_bytes())
            kept.append(snapshot(path, file))

        engine.ledger.flush = flush
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
