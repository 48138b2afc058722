"""Is a recorded history linearizable? After Wing and Gong, with Lowe's memory of dead ends.

A history is a list of calls by several processes, each with the time when it began and when it
ended. It is linearizable if every call can be given one moment between the two at which it
happened, such that each result is what a single process would have got that made the calls in
that order.

The outcome of a call is unknown if its process died in the middle of it: then it happened at
some moment before the death, or never.

>>> put, get = Call(0, "put", "k", 1, begin=0, end=1), Call(1, "get", "k", result=1, begin=2, end=3)
>>> check([put, get], MapOfOne) is None
True
>>> print(check([put, get, Call(2, "get", "k", result=None, begin=4, end=5)], MapOfOne))
no order explains 1 of 3 calls; the state was [('k', 1)] when none of these could come next:
  2 get('k') -> None  [4, 5]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

UNKNOWN = object()


@dataclass(frozen=True)
class Call:
    """One call: which process made it, what, when, and its result (`UNKNOWN`: the process died)."""

    process: int
    name: str
    key: Any = None
    value: Any = None
    result: Any = None
    begin: int = 0
    end: int = 0

    @property
    def known(self) -> bool:
        """Did it return?"""
        return self.result is not UNKNOWN

    def __str__(self) -> str:
        given = ", ".join(repr(part) for part in (self.key, self.value) if part is not None)
        result = repr(self.result) if self.known else "?"
        return f"{self.process} {self.name}({given}) -> {result}  [{self.begin}, {self.end}]"


class Model(Protocol):
    """What a single process would do. States are hashable."""

    first: Hashable

    def apply(self, state: Any, call: Call) -> tuple[Any, Any]:
        """(the next state, the result) of a call."""


# ---- models ------------------------------------------------------------------------------


class _Map:
    """A map as `SharedMap` is one. A state is its items, sorted.

    To show which call saw what, the value of an update is (a new value, the old one's first part).
    Writes of one key result in what was there before, conditional ones in (made, that), an update
    in (that, the new value).
    """

    first: Hashable = ()

    def apply(self, state: Any, call: Call) -> tuple[Any, Any]:
        items = dict(state)
        result = _CALLS[call.name](items, call.key, call.value)
        return tuple(sorted(items.items())), result


def _put(items: dict[Any, Any], key: Any, value: Any) -> Any:
    old = items.get(key)
    items[key] = value
    return old


def _put_if_absent(items: dict[Any, Any], key: Any, value: Any) -> tuple[bool, Any]:
    old = items.get(key)
    items.setdefault(key, value)
    return old is None, old


def _replace(items: dict[Any, Any], key: Any, value: Any) -> tuple[bool, Any]:
    expected, new = value
    old = items.get(key)
    if old == expected:
        items[key] = new
    return old == expected, old


def updated(old: Any, value: Any) -> Any:
    """What an update with this value makes of what was there."""
    return value, old[0] if isinstance(old, tuple) else old


def _update(items: dict[Any, Any], key: Any, value: Any) -> Any:
    old = items.get(key)
    items[key] = updated(old, value)
    return old, items[key]


def _delete(items: dict[Any, Any], key: Any, value: Any) -> Any:
    return items.pop(key, None)


def _put_all(items: dict[Any, Any], key: Any, value: Any) -> None:
    items.update(value)


def _update_all(items: dict[Any, Any], key: Any, value: Any) -> int:
    for name, old in items.items():
        items[name] = updated(old, value)
    return len(items)


_CALLS: dict[str, Callable[[dict[Any, Any], Any, Any], Any]] = {
    "get": lambda items, key, value: items.get(key),
    "scan": lambda items, key, value: tuple(sorted(items.items())),
    "clear": lambda items, key, value: items.clear(),
    "put": _put,
    "put_if_absent": _put_if_absent,
    "replace": _replace,
    "update": _update,
    "delete": _delete,
    "put_all": _put_all,
    "update_all": _update_all,
}

WholeMap: Model = _Map()
MapOfOne: Model = _Map()  # the same, of the calls of a single key


# ---- the checker -------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """Why there is no such order: how far the best one came, and what could not come next."""

    calls: int
    left: int
    state: Any
    candidates: tuple[Call, ...]

    def __str__(self) -> str:
        return "\n  ".join(
            [
                f"no order explains {self.left} of {self.calls} calls; the state was "
                f"{list(self.state)!r} when none of these could come next:",
                *map(str, self.candidates),
            ]
        )


def check(history: Iterable[Call], model: Model) -> Failure | None:
    """None if the history is linearizable, else how far it is."""
    calls = sorted(history, key=lambda call: call.begin)
    # A node: all calls before `base` are done, and those whose bits are set behind it; the state.
    start = (0, 0, model.first)
    nodes, seen, best = [start], {start}, start
    while nodes:
        node = nodes.pop()
        if _done(node) > _done(best):
            best = node
        if node[0] == len(calls):
            return None
        for successor in _successors(calls, model, *node):
            if successor not in seen:
                seen.add(successor)
                nodes.append(successor)
    base, mask, state = best
    candidates = tuple(calls[index] for index in _candidates(calls, base, mask))
    return Failure(len(calls), len(calls) - _done(best), state, candidates)


def _done(node: tuple[int, int, Any]) -> int:
    return node[0] + node[1].bit_count()


def _candidates(calls: list[Call], base: int, mask: int) -> list[int]:
    """What may come next: what began before the first end of all that is left."""
    first_end, found = None, []
    for index in range(base, len(calls)):
        if first_end is not None and calls[index].begin > first_end:
            break
        if not mask >> (index - base) & 1:
            found.append(index)
            end = calls[index].end
            first_end = end if first_end is None else min(first_end, end)
    return [index for index in found if calls[index].begin <= (first_end or 0)]


def _successors(
    calls: list[Call], model: Model, base: int, mask: int, state: Any
) -> list[tuple[int, int, Any]]:
    """The nodes that can come next, the best last: calls with an unknown outcome are left for
    when another call shows that they took effect."""
    likely, unlikely = [], []
    for index in _candidates(calls, base, mask):
        call = calls[index]
        after, result = model.apply(state, call)
        done = _mark(base, mask, index)
        if not call.known:
            unlikely += [(*done, state), (*done, after)]
        elif result == call.result:
            likely.append((*done, after))
    return unlikely + likely[::-1]


def _mark(base: int, mask: int, index: int) -> tuple[int, int]:
    mask |= 1 << (index - base)
    while mask & 1:
        base, mask = base + 1, mask >> 1
    return base, mask


def check_per_key(history: Iterable[Call]) -> Failure | None:
    """The same for calls that each have one key: keys are independent of one another."""
    by_key: defaultdict[Any, list[Call]] = defaultdict(list)
    for call in history:
        by_key[call.key].append(call)
    for calls in by_key.values():
        failure = check(calls, MapOfOne)
        if failure is not None:
            return failure
    return None
