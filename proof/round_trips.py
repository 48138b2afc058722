"""What one process encodes, another decodes: values of all kinds, of all serialisers (rule G10)."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from proof.report import Figure
from proof.sizes import Size
from testing import pythons, round_trips
from testing.children import ROOT


def other_pythons(figure: Figure) -> list[pythons.Other]:
    """Every other supported Python of this machine, with the library; what is missing is noted."""
    usable = []
    for version, path in pythons.found().items():
        try:
            usable.append(pythons.with_library(version, path))
        except subprocess.CalledProcessError as error:
            figure.notes.append(f"Python {version} is not used: {error.stderr.strip()[-200:]}")
    if not usable:
        figure.notes.append("ONE PYTHON ALONE: no other supported one could be had on this machine")
    return usable


def loses_tuples(codec: str, is_key: bool) -> Callable[[Any], bytes]:
    """msgpack as it is by itself, which makes lists of tuples; the other serialisers as usual."""
    if codec == "msgpack" and not is_key:
        pack: Callable[[Any], bytes] = msgpack.packb
        return pack
    return round_trips.dumps_of(codec, is_key)


def read_elsewhere(size: Size, where: Path) -> Figure:
    """Written with one hash seed, read with another, both in threads with a small stack."""
    figure = Figure("round-trips")
    here = pythons.Other("this", sys.executable, ROOT)
    readers = [here, *other_pythons(figure)]
    for reader in readers:
        number = random.randrange(1 << 30)
        outcome = round_trips.round_trip(
            4 * size.examples, number, python=reader.python, tree=reader.where
        )
        figure.count(values=outcome.cases, refused=outcome.refused, processes=2)
        figure.most(types=outcome.types, Pythons=len(readers))
        figure.broken += [f"{text} (seed {number}, {reader.python})" for text in outcome.broken]
    if size.controlled:
        outcome = round_trips.round_trip(100, 1, loses_tuples)
        figure.controls["a msgpack that makes lists of tuples"] = bool(outcome.broken)
    return figure
