"""Read-only views of a state, for the functions that read it (rule I3).

A view copies nothing: it reads the state itself, one level at a time. It has no method that changes
the state. It is valid until the function returns, because the state may change afterwards. Views in
the function's result are replaced by plain copies.

>>> with Scope() as scope:
...     seen = scope.view({"a": [1, 2]})
...     seen["a"][0], thaw(seen)
(1, {'a': [1, 2]})
>>> seen["a"]
Traceback (most recent call last):
    ...
RuntimeError: this view of the state has expired: it is valid only inside the function ...
"""

from __future__ import annotations

import copy as _copy
import datetime as dt
import decimal
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import TracebackType
from typing import Any, Self

from exclusivelog.comparing import difference as difference

# Exactly these types, because objects of subclasses may be mutable.
PLAIN = frozenset({
    bool, bytes, complex, decimal.Decimal, dt.date, dt.datetime, dt.time, dt.timedelta, float, int,
    range, str, type(None), uuid.UUID,
})  # fmt: skip


class Scope:
    """Views are valid during the `with` block of their scope. `copy` copies objects that have no
    view."""

    __slots__ = ("copy", "over")

    def __init__(self, copy: Callable[[Any], Any] | None = _copy.deepcopy) -> None:
        self.copy = copy
        self.over = False

    def view(self, value: Any) -> Any:
        """Return an immutable value itself, a view of a dict, list or set, and else a copy."""
        kind = type(value)
        if kind in PLAIN:
            return value
        make = VIEWS.get(kind)
        if make is not None:
            return make(value, self)
        return value if self.copy is None else self.copy(value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.over = True


class _View:
    __slots__ = ("_of", "_scope")

    def __init__(self, of: Any, scope: Scope) -> None:
        self._of, self._scope = of, scope

    def _valid(self) -> Any:
        if self._scope.over:
            raise RuntimeError(
                "this view of the state has expired: it is valid only inside the function that was "
                "given it; return what you need, or `copy()` it there"
            )
        return self._of

    def copy(self) -> Any:
        """Return a plain deep copy."""
        return copied(self._valid(), self._scope.copy)

    def __len__(self) -> int:
        return len(self._valid())

    def __contains__(self, item: object) -> bool:
        return thaw(item) in self._valid()

    def __eq__(self, other: object) -> bool:
        return bool(self._valid() == thaw(other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "<a view that is no longer valid>" if self._scope.over else repr(self._of)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        return _itself, (self.copy(),)


def _itself(value: Any) -> Any:
    return value


class DictView(_View, Mapping[Any, Any]):
    """A dict that can only be read."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        return self._scope.view(self._valid()[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._valid())

    def __or__(self, other: Any) -> Any:
        return self.copy() | thaw(other)


class ListView(_View, Sequence[Any]):
    """A list that can only be read."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        found = self._valid()[index]
        if isinstance(index, slice):
            return [self._scope.view(item) for item in found]
        return self._scope.view(found)

    def __iter__(self) -> Iterator[Any]:
        return map(self._scope.view, self._valid())

    def __add__(self, other: Any) -> Any:
        return self.copy() + thaw(other)


class SetView(_View, Set[Any]):
    """A set that can only be read."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._valid())

    @classmethod
    def _from_iterable(cls, items: Iterable[Any]) -> Any:
        return set(items)


def _tuple(value: tuple[Any, ...], scope: Scope) -> tuple[Any, ...]:
    return tuple(map(scope.view, value))


VIEWS: dict[type, Callable[[Any, Scope], Any]] = {
    dict: DictView,
    list: ListView,
    set: SetView,
    tuple: _tuple,
}


def copied(value: Any, copy: Callable[[Any], Any] | None) -> Any:
    """Return a deep copy of dicts, lists, sets and tuples. `copy` copies other objects, unless they
    are immutable; None: all of them are."""
    kind = type(value)
    if copy is _copy.deepcopy:
        return copy(value)  # it keeps what is one object in several places one
    if kind is dict:
        return {key: copied(item, copy) for key, item in value.items()}
    if kind in (list, tuple):
        return kind([copied(item, copy) for item in value])
    if kind is set:
        return set(value)
    return value if kind in PLAIN or copy is None else copy(value)


def thaw(value: Any) -> Any:
    """Return the value with every view in it replaced by a plain copy."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, _View):
        return value.copy()
    if kind is dict:
        changed = {key: thaw(item) for key, item in value.items()}
        return changed if any(changed[key] is not value[key] for key in value) else value
    if kind in (list, tuple):
        items = [thaw(item) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else kind(items)
    return value
