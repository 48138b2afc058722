"""The C of the compiled core, alone: built without warnings, and run under the sanitizers.

`native/native_test.c` has the tests; each runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from testing.patience import PATIENCE

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
NATIVE = Path(__file__).parent / "native"
HEADERS = sorted((ROOT / "exclusivelog" / "_native").glob("*.h"))
STRICT = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "exclusivelog")]
COMPILER = os.environ.get("CC", "cc")
SANITIZERS = {
    "none": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
# A fault in a mapping is the core's to handle, not the sanitizer's.
OPTIONS = {
    "ASAN_OPTIONS": "handle_sigbus=0",
    "TSAN_OPTIONS": f"handle_sigbus=0:die_after_fork=0:suppressions={NATIVE}/thread-sanitizer.supp",
}
TESTS = [
    "futex",
    "liveness",
    "journal_lock",
    "journal_deaths",
    "deaths",
    "unreported_deaths",
    "journal_file",
    "spare_room",
    "fault_guard",
    "crc32c",
    "fraction",
    "sections",
    "blocks",
    "ahead",
]
# ThreadSanitizer follows one process: it takes a mutex that a dead process has left for unlocked.
LEFT_LOCKED = [("thread", "journal_deaths"), ("thread", "unreported_deaths")]
RUNS = [(s, t) for s in SANITIZERS for t in TESTS if (s, t) not in LEFT_LOCKED]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
        env={**os.environ, **OPTIONS},
    )


@pytest.fixture(scope="module")
def fixed() -> tuple[str, ...]:
    """What starts a program without random addresses, where that is permitted: with as many as
    newer kernels have, ThreadSanitizer finds its own places taken now and then, and ends."""
    words = ("setarch", "-R")
    with contextlib.suppress(FileNotFoundError):
        return words if run(*words, "true").returncode == 0 else ()
    return ()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}
    directory = tmp_path_factory.mktemp("native")

    def build(sanitizer: str) -> Path:
        if sanitizer not in made:
            _check_there_is(sanitizer, directory)
            program = directory / sanitizer
            source = NATIVE / "native_test.c"
            flags = [*STRICT, "-O1", "-g", *SANITIZERS[sanitizer]]
            compiled = run(COMPILER, *flags, source, "-o", program, "-lpthread", "-ldl")
            assert (compiled.returncode, compiled.stderr) == (0, "")
            made[sanitizer] = program
        return made[sanitizer]

    return build


def _check_there_is(sanitizer: str, directory: Path) -> None:
    empty = directory / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    tried = run(COMPILER, *SANITIZERS[sanitizer], empty, "-o", directory / "empty")
    if tried.returncode:
        pytest.skip(f"{COMPILER} has no {' '.join(SANITIZERS[sanitizer])}: {tried.stderr[:200]}")


@pytest.mark.sampled
@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_each_header_stands_alone_and_gives_no_warning(header: Path) -> None:
    compiled = run(COMPILER, *STRICT, "-Wpedantic", "-x", "c", "-fsyntax-only", header)
    assert (compiled.returncode, compiled.stderr) == (0, "")


def test_the_core_imports_nothing_of_the_library() -> None:
    """The library stands on it, and is not there yet when it is loaded."""
    core = ROOT / "exclusivelog"
    for path in (core / "_core.pyx", *sorted((core / "_native").glob("*.pxi"))):
        assert re.findall(r"^\s*(?:from|c?import) +exclusivelog.*", path.read_text(), re.M) == []


@pytest.mark.long
def test_every_test_of_the_c_program_is_run(built: Callable[[str], Path]) -> None:
    assert run(built("none")).stdout.split() == TESTS


@pytest.mark.sampled
@pytest.mark.parametrize(("sanitizer", "test"), RUNS)
def test_b2_h2_the_native_core_keeps_its_promises(
    built: Callable[[str], Path], fixed: tuple[str, ...], sanitizer: str, test: str
) -> None:
    """Mutual exclusion, the repair after a death, the mark of a death, whole frames, and stores
    that cannot reach the file."""
    ended = run(*fixed, built(sanitizer), test)
    assert (ended.returncode, ended.stderr) == (0, "")
