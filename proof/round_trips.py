"""What one process encodes, another decodes: values of all kinds, of all serialisers (rule G10)."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from proof.report import Figure
from proof.sizes import Size
from testing import round_trips
from testing.children import ROOT

NEEDED = "import attrs, hypothesis, msgspec, pydantic; import exclusivelog._core"


def other_pythons() -> list[str]:
    """Interpreters of other versions that can import the library from here."""
    here = f"python3.{sys.version_info.minor}"
    names = [f"python3.{minor}" for minor in range(11, 16)]
    found = [shutil.which(name) for name in names if name != here]
    return [python for python in found if python is not None and _can_import(python)]


def _can_import(python: str) -> bool:
    return subprocess.run([python, "-c", NEEDED], cwd=ROOT, capture_output=True).returncode == 0


def loses_tuples(codec: str, is_key: bool) -> Callable[[Any], bytes]:
    """msgpack as it is by itself, which makes lists of tuples; the other serialisers as usual."""
    if codec == "msgpack" and not is_key:
        pack: Callable[[Any], bytes] = msgpack.packb
        return pack
    return round_trips.dumps_of(codec, is_key)


def read_elsewhere(size: Size, where: Path) -> Figure:
    """Written with one hash seed, read with another, both in threads with a small stack."""
    figure = Figure("round-trips")
    pythons = [sys.executable, *other_pythons()]
    if len(pythons) == 1:
        figure.notes.append("no other Python on PATH can import the library: this one alone")
    for python in pythons:
        number = random.randrange(1 << 30)
        outcome = round_trips.round_trip(4 * size.examples, number, python=python)
        figure.count(values=outcome.cases, refused=outcome.refused, processes=2)
        figure.most(types=outcome.types, Pythons=len(pythons))
        figure.broken += [f"{text} (seed {number}, {python})" for text in outcome.broken]
    if size.controlled:
        outcome = round_trips.round_trip(100, 1, loses_tuples)
        figure.controls["a msgpack that makes lists of tuples"] = bool(outcome.broken)
    return figure
