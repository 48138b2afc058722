"""Fuzzing of what decodes bytes: entries, the journal's frames, topic rows.

An input that reaches new code of the decoder is kept, and mutated further.
The compiler reports the places (`-fsanitize-coverage=trace-pc`) to a few lines of C that are
loaded before everything else; AddressSanitizer is loaded beside them, so that a single byte read
behind an end is a death. Most inputs get a checksum that holds, or nothing would get past it. A
decoder may refuse an input with ValueError, and do nothing else than that or its work.

Without such a build (`--blind`) inputs are mutated from samples only, or from what a guided run
has kept (`--seeds`), and some fifty times as many are tried.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import functools
import json
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c

from exclusivelog import _core
from exclusivelog.local.shm.lockfile import JOURNAL_OFFSET, SIZE, TOPICS
from exclusivelog.local.storage import compression
from testing.entries import (
    BLOCKED,
    COMPRESSED,
    FIELDS,
    FOOTER,
    LZ4,
    PLAIN,
    ZSTD,
    blocked,
    compressed,
    encode,
    examine,
    refooted,
    resealed,
    resummed,
    values,
)
from testing.journals import FRAME, MAGIC

COVERAGE = r"""
#include <stdint.h>
static uint8_t seen[1 << 16];
static uint32_t fresh, all;
void __sanitizer_cov_trace_pc(void) {
    uintptr_t pc = (uintptr_t)__builtin_return_address(0);
    uint32_t at = (pc ^ pc >> 16) & 0xffff;
    if (!seen[at]) { seen[at] = 1; fresh++; all++; }
}
uint32_t fresh_places(void) { uint32_t n = fresh; fresh = 0; return n; }
uint32_t all_places(void) { return all; }
"""
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address -fsanitize-coverage=trace-pc"
SMALL = (0, 1, 2, 7, 8, 16, 63, 64, 255, 256, 4095, 1 << 15, 1 << 16)
LARGE = (2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
INTERESTING = (*SMALL, *LARGE)
LONGEST = 4096
CAPACITY = 8192
GENERATION = 7
BOUND = "    if (size > (size_t)(end - here)) return NULL;\n"
SECONDS, SECONDS_OF_AN_INPUT = 120.0, 0.01  # at most, on a busy machine
PLANTED = "planted"  # a deliberate defect: a decoder that stumbles over something it should refuse


# ---- what is fuzzed ----------------------------------------------------------------------


def entry(data: bytes) -> bool:
    """Decode an entry, and touch every part of it."""
    try:
        examine(_core.Entry(data))
    except ValueError:
        return False
    return True


def row(data: bytes) -> bool:
    """Decode a topic row, and pack it again."""
    try:
        _core.TopicRow.unpack(data).pack()
    except ValueError:
        return False
    return True


class Ring:
    """A journal whose ring contains the input."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the ring
        self.file.truncate(_core.JOURNAL_HEADER_BYTES + CAPACITY)
        self.words = _core.SharedWords(mmap.mmap(-1, SIZE))
        self.journal = _core.Journal(
            self.words, JOURNAL_OFFSET, TOPICS, self.file.fileno(), CAPACITY
        )
        self.journal.start(1)

    def __call__(self, data: bytes) -> bool:
        """Recover it, read it, and take it over into tables."""
        os.pwrite(self.file.fileno(), data.ljust(CAPACITY, b"\0"), _core.JOURNAL_HEADER_BYTES)
        try:
            end = self.journal.live_end(0, GENERATION)
            for stop in {end, CAPACITY}:
                for topic in (1, 2):
                    for packed in (False, True):
                        self.journal.collect(topic, 0, 0, stop, GENERATION, 1 << 20, packed)
                    self.journal.end_of(topic, 0, stop, GENERATION)
                with self.journal.gather(0, stop, GENERATION) as bundles:
                    for bundle in bundles:
                        bundle.pack(None, 1 << 16)
                        bundle.producers()
        except (ValueError, _core.JournalOverwritten):
            return False
        return end > 0


# ---- samples, and checksums that hold ----------------------------------------------------


def entries() -> list[bytes]:
    """Sound entries of every kind."""
    full = [
        (
            None if n % 3 == 0 else b"v" * n,
            None if n % 2 else b"k%d" % n,
            b"\x81\xa1a\xa1b" if n % 4 == 0 else None,
            n if n % 5 else None,
            10 * n + 1,
        )
        for n in range(9)
    ]
    made = [encode(full), values([b"x"]), values([b"abc" * 50, None, b""]), values([None] * 9)]
    return (
        made
        + [blocked(data) for data in made]
        + [
            compressed(data, compression.method(number).compress, number)
            for number in (LZ4, ZSTD)
            for data in made
        ]
    )


def framed(parts: list[bytes]) -> bytes:
    """A ring with these entries, one frame after the other."""
    ring = b""
    for number, data in enumerate(parts):
        footer = dict(zip(FIELDS, FOOTER.unpack(data[-FOOTER.size :]), strict=True))
        head = FRAME.pack(
            MAGIC,
            len(data),
            len(ring),
            GENERATION,
            footer["topic"],
            footer["base_offset"],
            number,
            0,
            footer["count"],
            0,
        )
        ring += _with_sum(head) + data
        ring += bytes(-len(ring) % 16)
    return ring[:CAPACITY]


def _with_sum(head: bytes) -> bytes:
    return head[:-4] + struct.pack("<I", google_crc32c.value(head[:-4]))


def rows() -> list[bytes]:
    """Sound topic rows."""
    made = []
    for name in ("t", "ä" * 40):
        one = _core.TopicRow()
        one.name, one.id, one.epoch, one.owner = name, 1, 3, 7
        made.append(one.pack())
    return made


def sound_entry(data: bytes, dice: random.Random) -> bytes:
    """The same with a checksum and a magic number that hold."""
    if len(data) < FOOTER.size or dice.random() < 0.1:
        return data
    if data[-8:-4] == BLOCKED.to_bytes(4, "little") and dice.random() < 0.9:
        return resummed(data) if dice.random() < 0.9 else refooted(data)
    if data[-8:-4] == COMPRESSED.to_bytes(4, "little") and dice.random() < 0.9:
        with contextlib.suppress(struct.error):
            return resealed(data)
    return refooted(data, magic=PLAIN)


def sound_ring(data: bytes, dice: random.Random) -> bytes:
    """The same with headers whose checksums hold, and most entries' too."""
    ring = bytearray(data)
    position = 0
    while position + FRAME.size <= len(ring):
        fields = list(FRAME.unpack_from(ring, position))
        size = fields[1] & ((1 << 30) - 1)
        if dice.random() < 0.95:
            fields[0], fields[2], fields[3] = MAGIC, position, GENERATION
            ring[position : position + FRAME.size] = _with_sum(FRAME.pack(*fields))
        start = position + FRAME.size
        if FOOTER.size <= size <= len(ring) - start and dice.random() < 0.9:
            ring[start : start + size] = sound_entry(bytes(ring[start : start + size]), dice)
        position = (start + size + 15) // 16 * 16
    return bytes(ring)


# ---- the fuzzer --------------------------------------------------------------------------


@dataclass
class Target:
    """A decoder, what it is given first, and what makes an input pass its checksum."""

    decode: Callable[[bytes], bool]
    corpus: list[bytes]
    fix: Callable[[bytes, random.Random], bytes]


Seed = tuple[int, str]  # which target, and an input for it, in hex


@dataclass
class Fuzzed:
    """What came of it."""

    inputs: int = 0
    decoded: int = 0  # the others were refused
    kept: int = 0
    places: int = 0
    seeds: list[Seed] = field(default_factory=list)  # what was kept
    broken: list[str] = field(default_factory=list)


def mutated(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """One to eight small changes."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 3, 8))):
        at = dice.randrange(len(changed) + 1)
        match dice.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << dice.randrange(8)
            case 1:
                width, number = dice.choice((1, 2, 4, 8)), dice.choice(INTERESTING)
                number &= (1 << 8 * width) - 1
                at = at // width * width
                changed[at : at + width] = number.to_bytes(width, "little")
            case 2:
                changed[at:at] = dice.randbytes(dice.choice((1, 4, 8, 8, 64)))
            case 3:
                del changed[at : at + dice.choice((1, 4, 8, 8, 64))]
            case 4 if other:
                start = dice.randrange(len(other))
                piece = other[start : start + dice.choice((8, 16, 64, 400))]
                changed[at : at + len(piece)] = piece
            case _:
                changed += bytes(-len(changed) % 8)
    return bytes(changed[:LONGEST])


def fuzz(
    inputs: int, seed: int, last: Path, blind: bool, defect: str, seeds: Sequence[Seed] = ()
) -> Fuzzed:
    """So many inputs. Each is written down before it is tried: it may be the last."""
    dice, found = random.Random(seed), Fuzzed()
    fresh_places, all_places = _coverage(blind)
    with last.open("r+b") as file:
        note = mmap.mmap(file.fileno(), LONGEST + 8)
    targets = _targets(defect)
    for which, text in seeds:
        targets[which].corpus.append(bytes.fromhex(text))
    for number in range(inputs):
        target = targets[number % len(targets)]
        data = mutated(dice.choice(target.corpus), dice.choice(target.corpus), dice)
        data = target.fix(data, dice)[:LONGEST]
        note[: len(data) + 4] = struct.pack("<I", len(data)) + data
        try:
            found.decoded += target.decode(data)
        except Exception as error:
            found.broken.append(f"{error!r} for {data.hex()}"[:500])
            if len(found.broken) > 5:
                break
        found.inputs += 1
        if fresh_places():
            target.corpus.append(data)
            found.seeds.append((number % len(targets), data.hex()))
            found.kept += 1
    found.places = all_places()
    return found


def _targets(defect: str) -> list[Target]:
    decode = stumbles if defect == PLANTED else entry
    samples = entries()
    return [
        Target(decode, samples, sound_entry),
        Target(Ring(), [framed(samples), framed(samples[:1] * 3)], sound_ring),
        Target(row, rows(), lambda data, dice: data),
    ]


def stumbles(data: bytes) -> bool:
    """The control: it fails over one kind of entry whose checksum holds."""
    if entry(data) and _core.Entry(data).count == 1 and len(data) % 16 == 8:
        raise IndexError("planted")
    return True


def _coverage(blind: bool) -> tuple[Callable[[], int], Callable[[], int]]:
    if blind:
        return (lambda: 0), (lambda: 0)
    library = ctypes.CDLL(None)
    return library.fresh_places, library.all_places


# ---- a process of its own, and the build for it ------------------------------------------


def run_lanes(
    tree: Path, inputs: int, seed: int, preload: str, seeds: Sequence[Seed] = ()
) -> list[Fuzzed]:
    """The same in two processes at once, each of which tries half of the inputs."""
    halves = (inputs // 2, inputs - inputs // 2)
    with ThreadPoolExecutor(len(halves)) as pool:
        done = [
            pool.submit(run, tree, half, seed + lane, preload, "", seeds)
            for lane, half in enumerate(halves)
        ]
        return [each.result() for each in done]


def run(
    tree: Path, inputs: int, seed: int, preload: str, defect: str = "", seeds: Sequence[Seed] = ()
) -> Fuzzed:
    """Fuzz in a child; if it dies, the result has the input that it died of."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as where:
        given = Path(where) / "seeds"
        given.write_text(json.dumps(seeds))
        last = Path(where) / "last"
        last.write_bytes(bytes(LONGEST + 8))
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "LD_PRELOAD": preload,
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:handle_segv=1",
        }
        words = ["-m", "proof.fuzz", str(inputs), str(seed), str(last), defect, str(given)]
        done = subprocess.run(
            [sys.executable, *words, *([] if preload else ["--blind"])],
            cwd=tree,
            text=True,
            env=environment,
            capture_output=True,
            check=False,
            timeout=SECONDS + SECONDS_OF_AN_INPUT * inputs,
        )
        if done.returncode == 0:
            return Fuzzed(**json.loads(done.stdout))
        size, data = struct.unpack_from("<I", last.read_bytes())[0], last.read_bytes()[4:]
        why = [text for text in done.stderr.splitlines() if "ERROR" in text or "Error" in text]
        return Fuzzed(
            broken=[f"ended with {done.returncode}: {why[:1]}: {data[:size].hex()}"[:800]]
        )


@contextlib.contextmanager
def sanitized(change: Callable[[Path], object] = lambda copy: None) -> Iterator[tuple[Path, str]]:
    """A copy of the tree that is built for this, and what must be loaded before Python."""
    from proof.mutants import build, tree

    with tree(None) as copy:
        change(copy)
        build(copy, FLAGS)
        source, library = copy / "coverage.c", copy / "coverage.so"
        source.write_text(COVERAGE)
        subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60
        )
        asan = subprocess.run(
            ["gcc", "-print-file-name=libasan.so"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        yield copy, f"{os.path.realpath(asan)} {library}"


_kept = contextlib.ExitStack()
atexit.register(_kept.close)


@functools.cache
def sanitized_once() -> tuple[Path, str]:
    """The same for all slices of a run: to build it takes a minute."""
    return _kept.enter_context(sanitized())


def unbounded(copy: Path) -> None:
    """The control: sections may reach beyond the entry's end."""
    path = copy / "exclusivelog" / "_native" / "sections.h"
    text = path.read_text()
    assert BOUND in text
    path.write_text(text.replace(BOUND, ""))


def missing() -> str:
    """Why there can be no such build here; empty if there can."""
    if shutil.which("gcc") is None:
        return "gcc is not installed"
    found = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout.strip()
    return "" if os.path.exists(found) else "gcc has no AddressSanitizer here"


def main() -> None:
    """What the child does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("inputs", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("last", type=Path)
    parser.add_argument("defect")
    parser.add_argument("seeds", type=Path)
    parser.add_argument("--blind", action="store_true")
    options = parser.parse_args()
    seeds = json.loads(options.seeds.read_text())
    found = fuzz(options.inputs, options.seed, options.last, options.blind, options.defect, seeds)
    print(json.dumps(vars(found)))


if __name__ == "__main__":
    main()
