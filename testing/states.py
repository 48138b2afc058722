"""Shared states for tests: what is done to them, in this process and in workers."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exclusivelog as xl
from testing.processes import PATIENCE, State, until

FENCING = "exclusive_with_fencing"

Counts = dict[str, int]


# ---- what states are made of -------------------------------------------------------------


def one_more(old: int | None) -> int:
    """For `update`: a counter."""
    return (old or 0) + 1


def add(counts: Counts, op: list[Any]) -> None:
    """For `SharedState`: an operation is [name, amount]."""
    name, amount = op
    counts[name] = counts.get(name, 0) + amount


def open_counts(topic: xl.Topic, **options: Any) -> xl.SharedState[Counts, list[Any]]:
    """A state that counts."""
    return xl.SharedState(topic, initial=dict, apply=add, **options)


# Every call of a map, as a function of it; there is a key "a" whose value is 1.
CALLS: dict[str, Callable[[xl.SharedMap[Any, Any]], Any]] = {
    "get": lambda m: m.get("a"),
    "get, latest": lambda m: m.get("a", latest=True),
    "scan": lambda m: m.scan(),
    "list_keys": lambda m: m.list_keys(),
    "len": len,
    "in": lambda m: "a" in m,
    "put": lambda m: m.put("a", 2),
    "put_if_absent": lambda m: m.put_if_absent("z", 2),
    "replace": lambda m: m.replace("a", 1, 2),
    "update": lambda m: m.update("a", one_more),
    "update_multiple": lambda m: m.update_multiple(None, lambda k, v: v),
    "put_all": lambda m: m.put_all({"a": 2}),
    "delete": lambda m: m.delete("a"),
    "clear": lambda m: m.clear(),
    "snapshot": lambda m: m.snapshot(),
}


# ---- here --------------------------------------------------------------------------------


class Later:
    """A state whose every call goes by its `_async` form, and is waited for."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._shared, name + "_async")
        return lambda *args, **kwargs: method(*args, **kwargs).result(PATIENCE)


def take_over(topic: xl.Topic) -> None:
    """Fence the topic's owner, and leave the topic free."""
    topic.producer(FENCING).close()


def everything(shared: xl.SharedMap[Any, Any]) -> dict[Any, Any]:
    """What the map has now."""
    return dict(shared.scan(latest=True))


def opened_afresh(topic: xl.Topic, **options: Any) -> dict[Any, Any]:
    """What a process finds that opens the map now."""
    with xl.SharedMap(topic, **options) as fresh:
        return everything(fresh)


class Struck(KeyboardInterrupt):
    """Ctrl-C, as it were."""


def struck_after(seconds: float, call: Callable[[], object]) -> None:
    """`call()`, interrupted by Ctrl-C so many seconds after it began, if it takes as long."""

    def strike(number: int, frame: Any) -> None:
        while frame is not None:
            code = frame.f_code  # nothing can be raised from weakref, nor from a finalizer
            if "weakref" in code.co_filename or code.co_name == "__del__":
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                return
            frame = frame.f_back
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    gc.disable()  # nor from its callbacks, which test tools have
    # A condition variable of Python's that is struck may say RuntimeError instead.
    with contextlib.suppress(Struck, RuntimeError):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    gc.enable()
    signal.signal(signal.SIGALRM, before)


# ---- in a worker -------------------------------------------------------------------------


def open_map(state: State, **options: Any) -> None:
    """Open the map, and keep it."""
    state.kept["map"] = xl.SharedMap(state.topic, **options)


def call_map(state: State, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call the kept map."""
    return getattr(state.kept["map"], method)(*args, **kwargs)


def count_up(state: State, key: str, seconds: float) -> tuple[int, float]:
    """Add 1 again and again; how often that was, and how long one took at most, in seconds."""
    times, longest = 0, 0.0
    end = time.monotonic() + seconds
    while (begin := time.monotonic()) < end:
        state.kept["map"].update(key, one_more)
        longest = max(longest, time.monotonic() - begin)
        times += 1
    return times, longest


def count_up_until(state: State, key: str, flag: str) -> int:
    """Add 1 again and again until this file is there; how often that was."""
    times = 0
    while not os.path.exists(flag):
        state.kept["map"].update(key, one_more)
        times += 1
    return times


def count_up_slowly(state: State, key: str, gate: str) -> list[int | None]:
    """Add 1 by a function that, the first time, waits until the file `gate`.go is there. It
    makes the file `gate`.in before. Returns what the function was called with."""
    seen: list[int | None] = []

    def one_more_in_a_while(old: int | None) -> int:
        seen.append(old)
        if len(seen) == 1:
            Path(f"{gate}.in").touch()
            until(lambda: os.path.exists(f"{gate}.go"))
        return one_more(old)

    state.kept["map"].update(key, one_more_in_a_while)
    return seen
