"""State that several processes share: its write-ahead log is a topic (rules I1-I7).

Every process has the state in its own memory, and brings it up to date from the topic. A process
that writes is the topic's exclusive owner while it does, and stays it until another one asks.

What is guaranteed, and by which rule:

1. A write's operations are computed from the state as all former writes left it, appended
   atomically, and applied: no other process writes in between, because the writer owns the topic
   (B2, G3, I1). So writes are linearisable, in the order of the topic's offsets.
2. A read with `latest=True` sees every write that had returned before it began, in whatever
   process (G5, G6). Without, it sees all writes of this process, and others' as of some moment
   that never goes back.
3. A write that has returned is as durable as the engine's `durability` says (H1). One that
   raised has appended nothing, unless the error says `maybe_written` (B9, I3).
4. A leader that was paused, killed or forked cannot write any more (B2, C2, C3): a write that
   meets this begins anew, as the next owner.
5. User functions cannot change the state, and may be called more than once; what they return is
   encoded before anything is appended, and applied as it is decoded, in every process alike (I3).
6. Opening costs what the state has, not what its history has, if there are snapshots (I4). A
   snapshot that would not give back the state as it is is not kept.
7. Writes of many threads and tasks share flushes (I5).

It follows Pulsar's shared-state manager and map (apache/pulsar#13490).
"""

from __future__ import annotations

import copy as _copy
import functools
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    ValuesView,
)
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from exclusivelog import _core, serde
from exclusivelog.past import At, map_at
from exclusivelog.producer import Appended
from exclusivelog.replica import Later, Replica
from exclusivelog.snapshots import Item, SnapshotRefused
from exclusivelog.topic import Topic
from exclusivelog.views import Scope, difference, thaw
from exclusivelog.watch import MapChange, MapWatch

__all__ = ["Change", "MapChange", "MapWatch", "SharedMap", "SharedState"]

S = TypeVar("S")
Op = TypeVar("Op")
K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")
D = TypeVar("D")
P = ParamSpec("P")
M = TypeVar("M", bound=Replica)

SNAPSHOT_EVERY = 100_000
OWN, EXACT = b"own", b"exact"  # the codec of a state's snapshot; None: that of its operations
NOTHING: Any = object()


def _later(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], Later[R]]:
    """The method as a future."""
    name = method.__name__

    def call(self: M, /, *args: P.args, **kwargs: P.kwargs) -> Later[R]:
        return self.submit(getattr(self, name), *args, **kwargs)

    functools.update_wrapper(call, method)
    call.__name__, call.__doc__ = f"{name}_async", f"`{name}`, as a future."
    call.__qualname__ = f"{method.__qualname__}_async"
    return call


class SharedState(Replica, Generic[S, Op]):
    """Any state, changed by operations that are messages of a topic (rule I1).

    - `initial`: a function that makes the state that everything begins with.
    - `apply`: `apply(state, op)` changes the state in place, or returns the new one. It must
      come to the same in every process: no clock, no chance, no I/O.
    - `encode`, `decode`: an operation as bytes (default: msgpack). What is applied is what
      `decode` gives, also where it was written.
    - `encode_state`, `decode_state`: the state as bytes, for snapshots. Default: `serde.exact`,
      which knows Python's containers, numbers, dates; for another state, `encode` and `decode`.
    - `snapshot_every`: after so many operations written here a snapshot is taken in the
      background; None: only by `snapshot()`.
    - `copy`: what copies objects that are no dict, list, set, tuple or immutable, when functions
      are given them (default: `copy.deepcopy`; None: such objects are immutable).
    - `timeout`: seconds that a write waits to become owner (None: for ever), then
      WaitTimeoutError.

    Functions read the state through views of its dicts, lists and sets: nothing is copied, nothing
    can be changed, and a view is over when the function returns. What it returns is made plain.

    >>> def add(state, op):
    ...     state[op["name"]] = state.get(op["name"], 0) + op["amount"]
    >>> with xl.SharedState(topic, initial=dict, apply=add) as accounts:
    ...     accounts.write(lambda state: [{"name": "a", "amount": 5}, {"name": "b", "amount": 1}])
    ...     accounts.write(lambda state: [{"name": "a", "amount": -state["a"]}], lambda s: s["a"])
    ...     accounts.read(lambda state: state["b"], latest=True)
    0
    1
    """

    def __init__(
        self, topic: Topic, initial: Callable[[], S] = dict,  # type: ignore[assignment]
        apply: Callable[[S, Op], S | None] | None = None, *,
        encode: Callable[[Any], bytes] = serde.msgpack.dumps,
        decode: Callable[[bytes], Any] = serde.msgpack.loads,
        encode_state: Callable[[S], bytes] | None = None,
        decode_state: Callable[[bytes], S] | None = None,
        snapshot_every: int | None = SNAPSHOT_EVERY,
        copy: Callable[[Any], Any] | None = _copy.deepcopy, timeout: float | None = None,
    ) -> None:  # fmt: skip
        if not callable(initial):
            raise TypeError("initial takes a function that makes the first state")
        if not callable(apply):
            raise TypeError("apply takes a function of (state, op)")
        functions: dict[str, Any] = {
            "encode": encode, "decode": decode, "copy": copy or id,
            "encode_state": encode_state or id, "decode_state": decode_state or id,
        }  # fmt: skip
        for name, function in functions.items():
            if not callable(function):
                raise TypeError(f"{name} takes a function, not {function!r}")
        self._state: S
        self._initial, self._apply = initial, apply
        self._encode, self._decode = encode, decode
        self._codecs = _state_codecs(encode, decode, encode_state, decode_state)
        self._copy = copy
        super().__init__(topic, {"holds": "state"}, snapshot_every, timeout)

    # ---- messages and snapshots ----------------------------------------------------------

    def _apply_item(self, key: bytes | None, value: bytes | None) -> None:
        if key is not None:
            raise ValueError("it is no message of a state: it has a key")
        changed = self._apply(self._state, self._decode(value or b""))
        if changed is not None:
            self._state = changed

    def _begin(self) -> None:
        self._state = self._initial()

    def _items(self) -> list[Item]:
        """The state as bytes that give it back, types included; else SnapshotRefused."""
        refused = []
        for mark, (encode, decode) in self._codecs.items():
            try:
                data = encode(self._state)
                found = None if type(data) is bytes else "encode_state gives no bytes"
                found = found or difference(self._state, decode(data))
            except Exception as error:
                found = repr(error)
            if found is None:
                return [(mark, data)]
            refused.append(found)
            if mark is OWN:
                break
        raise SnapshotRefused(
            f"topic {self.topic.name!r}: no snapshot was kept, because the state does not come "
            f"back from it: {refused[0]}. Give encode_state and decode_state that give it back"
        )

    def _restore(self, items: list[Item]) -> None:
        [(mark, data)] = items
        codec = self._codecs.get(mark)
        if codec is None:
            raise ValueError(f"it was written with another codec ({(mark or b'').decode()})")
        self._state = codec[1](data or b"")

    # ---- read and write ------------------------------------------------------------------

    def read(self, fn: Callable[[S], R], latest: bool = False) -> R:
        """`fn(state)`. `latest`: every write that has returned by now, in any process, is in the
        state. The function cannot change it; see the class."""
        return self._read(lambda: self._call(fn), latest)

    def _call(self, fn: Callable[[S], R]) -> R:
        with self._calling_out(), Scope(self._copy) as scope:
            result: R = thaw(fn(scope.view(self._state)))
            return result

    def write(
        self, ops_fn: Callable[[S], Iterable[Op]], read_fn: Callable[[S], R] | None = None
    ) -> R | None:
        """Append the operations that `ops_fn(state)` gives for the newest state, all of them or
        none, and apply them; then `read_fn(state)`. No operations: nothing is appended. `ops_fn`
        may be called more than once; `read_fn` is called before the operations are durable, and
        what it returns is returned once they are (rules I3, I5)."""

        def compute() -> tuple[list[Item], R | None]:
            with Scope(self._copy) as scope:
                ops = [thaw(op) for op in ops_fn(scope.view(self._state))]
            return [(None, self._encoded(op)) for op in ops], None

        if read_fn is None:
            return self._append(compute)
        return self._append(compute, lambda: self._call(read_fn))

    def _encoded(self, op: Op) -> bytes:
        data = self._encode(op)
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"encode gives {type(data).__name__} for {op!r}; it must give bytes")
        return bytes(data)

    read_async = _later(read)
    write_async = _later(write)


def _state_codecs(
    encode: Callable[[Any], bytes], decode: Callable[[bytes], Any],
    encode_state: Callable[[Any], bytes] | None, decode_state: Callable[[bytes], Any] | None,
) -> dict[bytes | None, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]]:  # fmt: skip
    """{mark: (encode, decode)}, that to write with first."""
    if (encode_state is None) != (decode_state is None):
        raise TypeError("encode_state and decode_state are given both, or neither")
    codecs: dict[bytes | None, Any] = {}
    if encode_state is not None:
        codecs[OWN] = encode_state, decode_state
    codecs[EXACT] = serde.exact.dumps, serde.exact.loads
    codecs[None] = encode, decode
    return codecs


# ---- maps --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change(Generic[V]):
    """What a conditional write of a map came to: true where it was made.

    - `previous`: the key's value just before, None where it had none. Where the write was not
      made, that is what kept it from being made.
    - `value`: the key's value now.

    >>> bool(Change(True, None, 1)), bool(Change(False, 2, 2))
    (True, False)
    """

    made: bool
    previous: V | None
    value: V | None

    def __bool__(self) -> bool:
        return self.made


class SharedMap(Replica, MutableMapping[K, V]):
    """A map that several processes share (rule I2): a MutableMapping whose writes are atomic, and
    linearisable with one another and with reads that ask for the `latest`.

    - `key`, `value`: serialisers (a `Serde`, or bytes, str, json, msgpack, exact). Keys that are
      equal must have equal bytes.
    - `snapshot_every`, `timeout`: as for `SharedState`.

    None means "no value", everywhere: a key that is set to None is removed. `put`, `delete` and
    `pop` return the value before; `put_if_absent`, `replace` and `update(key, fn)` a `Change`,
    which is true where they were made, and has that value as `previous`.

    Every message of the topic is one key's new value, or none, or removes all keys: its compacted
    view is the map, too. Calls have a second form that ends in `_async` and returns a future.

    >>> with xl.SharedMap(topic) as settings:
    ...     settings.put("retries", 3)
    ...     bool(settings.replace("retries", 3, 5)), settings.replace("retries", 3, 7).previous
    ...     settings.update("retries", lambda old: old + 1).value
    ...     settings.get("retries"), settings.get_or_default("timeout", 10), len(settings)
    (True, 5)
    6
    (6, 10, 1)
    """

    def __init__(
        self, topic: Topic, key: Any = serde.str, value: Any = serde.msgpack, *,
        snapshot_every: int | None = SNAPSHOT_EVERY, timeout: float | None = None,
    ) -> None:  # fmt: skip
        self._map: dict[bytes, bytes] = {}
        self._dump_key = _checked(serde.dumps_of(key, "key"), "key")
        self._load_key = serde.loads_of(key, "key")
        self._dump = _checked(serde.dumps_of(value, "value"), "value")
        self._load = serde.loads_of(value, "value")
        # An application's own serialisers may take long, or wait: never in an event loop's thread.
        self._is_plain = None not in (serde.name_of(key), serde.name_of(value))
        kind = {"holds": "map", "key": serde.name_of(key), "value": serde.name_of(value)}
        super().__init__(topic, kind, snapshot_every, timeout)

    # ---- messages and snapshots ----------------------------------------------------------

    def _apply_item(self, key: bytes | None, value: bytes | None) -> None:
        if key is not None and value is not None:
            self._map[key] = value
        elif key is not None:
            self._map.pop(key, None)
        elif value is None:
            self._map = {}
        else:
            raise ValueError("it is no message of a map")

    def _begin(self) -> None:
        self._map = {}

    def _items(self) -> list[Item]:
        return list(self._map.items())

    def _restore(self, items: list[Item]) -> None:
        if any(key is None or value is None for key, value in items):
            raise ValueError("it is no snapshot of a map")
        self._map = {key: value for key, value in items if key is not None and value is not None}

    _restores_views = True

    def _value(self, data: bytes | None) -> V | None:
        return None if data is None else self._load(data)

    def _packed(self, value: V | None) -> bytes | None:
        return None if value is None else self._dump(value)

    # ---- read ----------------------------------------------------------------------------

    def get(self, key: K, default: D | None = None, *, latest: bool = False) -> V | D | None:  # type: ignore[override]
        """The key's value, or `default`, as a dict's. `latest`, by name only: every write that
        has returned by now, in any process, is seen."""
        value = self._find(key, latest)
        return default if value is None else self._load(value)

    def _find(self, key: K, latest: bool = False) -> bytes | None:
        name = self._dump_key(key)
        self._check()  # as `_read`, in fewer steps: nothing is called more often
        with _core.Holding(self._lock):
            self._freshen(latest)
            data = self._map.get(name)
            seen = self._unflushed
        if seen is not None and not seen.flushed:
            self._settle(seen)
        return data

    def get_or_default(self, key: K, default: D, latest: bool = False) -> V | D:
        """The key's value, or `default`."""
        value = self._find(key, latest)
        return default if value is None else self._load(value)

    def scan(
        self, fn: Callable[[K, V], object] | None = None, *,
        filter: Callable[[K], object] | None = None, latest: bool = False,
    ) -> list[tuple[K, V]]:  # fmt: skip
        """The (key, value) pairs of one moment; `fn(key, value)` is called with each. `filter`:
        only of keys for which `filter(key)` is true; other keys' values are not decoded."""
        pairs = self._read(lambda: list(self._map.items()), latest)
        found = [(self._load_key(name), data) for name, data in pairs]
        decoded = [(key, self._load(data)) for key, data in found if filter is None or filter(key)]
        if fn is not None:
            self._await_what_was_read()
            for key, value in decoded:
                fn(key, value)
        return decoded

    def list_keys(self, latest: bool = False) -> list[K]:
        """All keys, in the order in which they were first put."""
        keys = self._read(lambda: list(self._map), latest)
        return [self._load_key(key) for key in keys]

    def __getitem__(self, key: K) -> V:
        value = self._find(key)
        if value is None:
            raise KeyError(key)
        found: V = self._load(value)
        return found

    def __contains__(self, key: object) -> bool:
        return self._find(key) is not None  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._read(lambda: len(self._map), False)

    def __iter__(self) -> Iterator[K]:
        return iter(self.list_keys())

    def items(self) -> ItemsView[K, V]:
        """All (key, value) pairs; those of one moment each time it is walked."""
        return _Items(self)

    def values(self) -> ValuesView[V]:
        """All values; those of one moment each time it is walked."""
        return _Values(self)

    # ---- write ---------------------------------------------------------------------------

    def put(self, key: K, value: V | None) -> V | None:
        """Set the key's value, or remove it (None). Returns the value before, None for none."""
        data = None if value is None else self._dump(value)
        old = self._set(self._dump_key(key), data, _core.ANY)[1]
        return None if old is None else self._load(old)

    def _put_now(self, key: K, value: V | None) -> tuple[V | None, Appended | None] | None:
        """`put`, if it need not wait for anything: its result, and what is to be durable before
        anybody is told. None where it would have to; nothing is done then. For asyncio, whose
        loop must not wait."""
        if not (self._is_plain and self._calls.idle):
            return None
        data = None if value is None else self._dump(value)
        found = _core.set_at_once(self, self._dump_key(key), data, _core.ANY, False)
        if found is None:
            return None
        _, old, seen = found
        return None if old is None else self._load(old), seen

    def _set(self, name: bytes, data: bytes | None, expected: Any) -> tuple[bool, bytes | None]:
        """Set the value where it is `expected` (None: no value); was it, and the value before."""
        found = _core.set_at_once(self, name, data, expected, True)
        if found is None:  # something is in the way, or wrong
            return self._append(functools.partial(self._compute_set, name, data, expected))
        made, old, seen = found
        if seen is not None and not seen.flushed:
            self._settle(seen)
        return made, old

    def _compute_set(
        self, name: bytes, data: bytes | None, expected: Any
    ) -> tuple[list[Item], tuple[bool, bytes | None]]:
        old = self._map.get(name)
        made = expected is _core.ANY or old == expected
        needed = made and not (old is None and data is None)
        return [(name, data)] if needed else [], (made, old)

    def _set_if(self, key: K, value: V | None, expected: bytes | None) -> Change[V]:
        made, old = self._set(self._dump_key(key), self._packed(value), expected)
        previous = self._value(old)
        return Change(made, previous, value if made else previous)

    def __setitem__(self, key: K, value: V | None) -> None:
        self._set(self._dump_key(key), self._packed(value), _core.ANY)

    def put_if_absent(self, key: K, value: V | None) -> Change[V]:
        """Set the key's value if it has none. True if it had none; else `previous` is what it
        has."""
        return self._set_if(key, value, None)

    def replace(self, key: K, expected: V | None, value: V | None) -> Change[V]:
        """Set the key's value if it is `expected` (as it is encoded). True if it was; else
        `previous` is what it is, and nothing is appended (rule I3). None is "no value"."""
        return self._set_if(key, value, self._packed(expected))

    @overload  # type: ignore[override]
    def update(
        self, key: K, fn: Callable[..., V | None], /, *, with_key: bool = False
    ) -> Change[V]: ...
    @overload
    def update(self, values: Mapping[K, V] | Iterable[tuple[K, V]], /) -> None: ...
    def update(self, key: Any, fn: Any = None, /, *, with_key: bool = False) -> Change[V] | None:
        """`update(key, fn)`: set the key's value to `fn(value)`, or to `fn(key, value)` if
        `with_key`; None stands for no value. Returns a `Change`. `fn` may be called more than once.

        `update(values)`: set the values of a mapping or of (key, value) pairs, as a dict's; all of
        them or none.
        """
        if fn is None:
            self.put_all(dict(key))
            return None
        if not callable(fn):
            raise TypeError(f"fn takes a function of the value, not {fn!r}")
        name = self._dump_key(key)

        def compute() -> tuple[list[Item], Change[V]]:
            old = self._map.get(name)
            previous = self._value(old)
            value = fn(key, self._value(old)) if with_key else fn(self._value(old))
            items = self._change(name, self._packed(value))
            return items, Change(bool(items), previous, self._value(self._packed(value)))

        return self._append(compute)

    def update_multiple(
        self, filter: Callable[[K], object] | None, fn: Callable[[K, V], V | None]
    ) -> dict[K, V | None]:
        """Set the values of all keys for which `filter(key)` is true (None: of all) to
        `fn(key, value)`, in one atomic append. Returns {key: new value} of those that changed, None
        for those removed. Other keys' values are not decoded. Both functions may be called more
        than once."""

        def compute() -> tuple[list[Item], dict[K, V | None]]:
            items: list[Item] = []
            changed: dict[K, V | None] = {}
            for name, data in self._map.items():
                key = self._load_key(name)
                if filter is None or filter(key):
                    value = fn(key, self._load(data))
                    new = self._packed(value)
                    if new != data:
                        changed[key] = value
                        items.append((name, new))
            return items, changed

        return self._append(compute)

    def put_all(self, values: Mapping[K, V]) -> None:
        """Set several keys' values, all of them or none; None removes a key."""
        given = [(self._dump_key(k), self._packed(v)) for k, v in values.items()]

        def compute() -> tuple[list[Item], None]:
            return [item for name, data in given for item in self._change(name, data)], None

        self._append(compute)

    def setdefault(self, key: K, default: V | None = None) -> V | None:  # type: ignore[override]
        """The key's value; where it has none, `default`, which it then has."""
        return self.put_if_absent(key, default).value

    def delete(self, key: K) -> V | None:
        """Remove a key. Returns its value before, None if it had none."""
        return self.put(key, None)

    def __delitem__(self, key: K) -> None:
        self.pop(key)

    def pop(self, key: K, default: Any = NOTHING) -> Any:
        """Remove a key, and return its value; where it has none, `default`, or KeyError."""
        name = self._dump_key(key)

        def compute() -> tuple[list[Item], bytes | None]:
            old = self._map.get(name)
            return [] if old is None else [(name, None)], old

        old = self._append(compute)
        if old is None and default is NOTHING:
            raise KeyError(key)
        return default if old is None else self._load(old)

    def popitem(self) -> tuple[K, V]:
        """Remove the key that was put last, and return it and its value; KeyError if there is
        none."""

        def compute() -> tuple[list[Item], tuple[bytes, bytes]]:
            name = next(reversed(self._map), None)
            if name is None:
                raise KeyError(f"the map in topic {self.topic.name!r} is empty")
            return [(name, None)], (name, self._map[name])

        name, data = self._append(compute)
        return self._load_key(name), self._load(data)

    def clear(self) -> None:
        """Remove all keys, by one message."""
        self._append(lambda: ([(None, None)] if self._map else [], None))

    def _change(self, name: bytes, data: bytes | None) -> list[Item]:
        return [(name, data)] if data is not None or name in self._map else []

    # ---- changes, and the past -----------------------------------------------------------

    def watch(
        self, key: K | None = None, *, prefix: Any = None, start: int | None = None
    ) -> MapWatch[K, V]:
        """Every change of a key, of all keys that begin with `prefix`, or of all, in order (rule
        I6); see `MapWatch`. From the offset `start` on; None: of what is written from now on.

        Raises OffsetTrimmedError if the map as of `start` cannot be known any more.

        >>> with xl.SharedMap(topic) as jobs, jobs.watch(prefix="job/") as watch:
        ...     _ = jobs.put("job/1", "new"), jobs.put("other", 1), jobs.put("job/1", "done")
        ...     for change in watch.follow(timeout=0):
        ...         change.offset, change.key, change.previous, change.value
        (0, 'job/1', None, 'new')
        (2, 'job/1', 'new', 'done')
        """
        if key is not None and prefix is not None:
            raise TypeError("watch takes a key or a prefix, not both")
        wanted = None if key is None else self._dump_key(key)

        def matches(name: bytes) -> bool:
            if prefix is not None:
                return bool(self._load_key(name).startswith(prefix))
            return wanted is None or name == wanted

        if start is None:
            start, items = self._read(lambda: (self._position, self._map.copy()), True)
        else:
            self._check()
            start, items = map_at(self.topic, start)
        return MapWatch(self.topic, start, items, matches, self._load_key, self._load)

    def at(self, when: At) -> dict[K, V]:
        """The map as it was before the message at an offset, or at a time (a datetime; naive:
        UTC), from the snapshot and the log.

        Raises OffsetTrimmedError where neither reaches back so far.

        >>> with xl.SharedMap(topic) as settings:
        ...     _ = settings.put("a", 1), settings.put("a", 2)
        ...     settings.at(0), settings.at(1), settings.at(2)
        ({}, {'a': 1}, {'a': 2})
        """
        self._check()
        return self._decoded(map_at(self.topic, when)[1])

    def diff(self, a: At, b: At) -> dict[K, tuple[V | None, V | None]]:
        """{key: (value at `a`, value at `b`)} of the keys that differ; None is no value. `a` and
        `b` as for `at`.

        >>> with xl.SharedMap(topic) as settings:
        ...     _ = settings.put("a", 1), settings.put("b", 2), settings.delete("a")
        ...     settings.diff(1, 3)
        {'a': (1, None), 'b': (None, 2)}
        """
        self._check()
        old, new = map_at(self.topic, a)[1], map_at(self.topic, b)[1]
        return {
            self._load_key(name): (self._value(old.get(name)), self._value(new.get(name)))
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        }

    def _decoded(self, items: Mapping[bytes, bytes]) -> dict[K, V]:
        return {self._load_key(name): self._load(data) for name, data in items.items()}

    # ---- futures -------------------------------------------------------------------------

    get_async = _later(get)
    get_or_default_async = _later(get_or_default)
    scan_async = _later(scan)
    list_keys_async = _later(list_keys)
    put_async = _later(put)
    put_all_async = _later(put_all)
    put_if_absent_async = _later(put_if_absent)
    replace_async = _later(replace)
    update_async = _later(update)
    update_multiple_async = _later(update_multiple)
    setdefault_async = _later(setdefault)
    delete_async = _later(delete)
    pop_async = _later(pop)
    popitem_async = _later(popitem)
    clear_async = _later(clear)
    at_async = _later(at)
    diff_async = _later(diff)


class _Items(ItemsView[K, V]):
    """Of a shared map: one moment's."""

    _mapping: SharedMap[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return iter(self._mapping.scan())


class _Values(ValuesView[V]):
    _mapping: SharedMap[Any, V]

    def __iter__(self) -> Iterator[V]:
        return iter([value for _, value in self._mapping.scan()])

    def __contains__(self, value: object) -> bool:
        return any(value == item for item in self)


def _checked(dumps: Callable[[Any], bytes], argument: str) -> Callable[[Any], bytes]:
    """The same, with errors that say what it was given: nothing else may get into the log, where
    every process would stumble over it."""

    def dump(item: Any) -> bytes:
        try:
            data = dumps(item)
        except (AttributeError, TypeError, UnicodeError) as error:
            raise TypeError(
                f"{argument}={item!r}: its serialiser does not take it: {error}"
            ) from error
        if type(data) is not bytes:
            raise TypeError(
                f"{argument}={item!r}: its serialiser gives {type(data).__name__}, not bytes"
            )
        return data

    return dump
