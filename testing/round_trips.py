"""What one process encodes, another decodes: another hash seed, threads with a small stack, another
Python if one is given (rule G10).

The writer keeps each value in two forms: as its serialiser encodes it, and as pickle does. The
reader decodes both and compares them, types included. It also encodes each key again: equal keys
have equal bytes in every process.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings

from exclusivelog import serde
from exclusivelog.comparing import difference
from testing.children import ROOT
from testing.kinds import HASHED, OPTIONS, STRATEGIES
from testing.made import MADE, class_of

SMALL_STACK = 128 << 10  # that of a thread where the C library is musl
REFUSALS = (TypeError, ValueError, OverflowError)
KEYS = ("json", "msgpack", "exact")


class Case(NamedTuple):
    """A value that a serialiser has taken."""

    codec: str
    data: bytes
    value: bytes  # pickled
    is_key: bool = False


class Outcome(NamedTuple):
    cases: int
    refused: int
    types: int
    broken: list[str]


def option_of(codec: str) -> Any:
    """What `serializer=` takes: `made 17` is the class of that number."""
    kind, _, number = codec.partition(" ")
    return class_of(int(number)) if kind == "made" else OPTIONS[codec]


def dumps_of(codec: str, is_key: bool) -> Callable[[Any], bytes]:
    chosen = serde.key_dumps_of if is_key else serde.dumps_of
    return chosen(option_of(codec), "value")


def with_small_stack(call: Callable[[], Any]) -> Any:
    """Run a call in a thread with a small stack."""
    usual = threading.stack_size(SMALL_STACK)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            return threads.submit(call).result()
    finally:
        threading.stack_size(usual)


# ---- writing -----------------------------------------------------------------------------


def written(examples: int, number: int, dumps: Callable[..., Any] = dumps_of) -> Any:
    """Cases that were taken, and how many values were refused."""
    taken: list[Case] = []
    refused: list[str] = []

    def play(codec: str, strategy: Any, is_key: bool) -> None:
        @seed(number)
        @settings(
            max_examples=examples * (4 if codec == "made" else 1),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def one(value: Any) -> None:
            name = codec
            if codec == "made":
                number, value = value
                name = f"made {number}"
            try:
                data = encode_of(name, is_key)(value)
            except REFUSALS as error:
                refused.append(repr(error))
            else:
                taken.append(Case(name, data, pickle.dumps(value), is_key))

        one()

    encode_of = functools.cache(dumps)
    for codec, strategy in {**STRATEGIES, "made": MADE}.items():
        play(codec, strategy, is_key=False)
    for codec in KEYS:
        play(codec, HASHED, is_key=True)
    return taken, len(refused)


# ---- reading -----------------------------------------------------------------------------


def judge(cases: list[Case]) -> list[str]:
    """What does not come back in this process."""
    broken = []
    for case in cases:
        value = pickle.loads(case.value)
        try:
            found = serde.loads_of(option_of(case.codec), "value")(case.data)
            different = difference(value, found)
        except Exception as error:
            different = f"{value!r} cannot be read: {error!r}"
        if different is None and case.is_key:
            different = _other_bytes(case, value)
        if different is not None:
            broken.append(f"{case.codec}: {different}")
    return broken + equal_keys(cases)


def _other_bytes(case: Case, value: Any) -> str | None:
    again = dumps_of(case.codec, is_key=True)(value)
    return None if again == case.data else f"the key {value!r} has other bytes here"


def equal_keys(cases: list[Case]) -> list[str]:
    """Equal keys that have other bytes."""
    broken = []
    for codec in KEYS:
        known: dict[Any, bytes] = {}
        for case in cases:
            if case.is_key and case.codec == codec:
                value = pickle.loads(case.value)
                if known.setdefault(value, case.data) != case.data:
                    broken.append(f"{codec}: two keys that equal {value!r} have other bytes")
    return broken


def judged_elsewhere(
    cases: list[Case], hash_seed: int, python: str = sys.executable, tree: Path = ROOT
) -> list[str]:
    """`judge` in another process, in a thread with a small stack. `tree`: where the library is."""
    with tempfile.TemporaryDirectory() as where:
        file = Path(where) / "cases"
        file.write_bytes(pickle.dumps([tuple(case) for case in cases]))
        ran = subprocess.run(
            [python, "-m", "testing.round_trips", str(file)],
            cwd=tree,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        )
    if ran.returncode != 0:
        return [f"the reader ended with {ran.returncode}: {ran.stderr.strip()[-400:]}"]
    return [line for line in ran.stdout.splitlines() if line]


def round_trip(
    examples: int,
    number: int,
    dumps: Callable[..., Any] = dumps_of,
    python: str = sys.executable,
    tree: Path = ROOT,
) -> Outcome:
    """Write in this process, in a thread with a small stack, and read in another."""
    cases, refused = with_small_stack(lambda: written(examples, number, dumps))
    types = collections.Counter(_kinds_in(cases))
    broken = judged_elsewhere(cases, number % 1000 + 1, python, tree)
    return Outcome(len(cases), refused, len(types), broken)


def _kinds_in(cases: list[Case]) -> list[str]:
    kinds: list[str] = []
    left = [(case.codec, pickle.loads(case.value)) for case in cases]
    while left:
        codec, value = left.pop()
        kinds.append(f"{codec}/{type(value).__name__}")
        if isinstance(value, dict):
            left += [(codec, part) for pair in value.items() for part in pair]
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += [(codec, part) for part in value]
    return kinds


def main() -> None:
    cases = [Case(*each) for each in pickle.loads(Path(sys.argv[1]).read_bytes())]
    print("\n".join(" ".join(text.split()) for text in with_small_stack(lambda: judge(cases))))


if __name__ == "__main__":
    main()
