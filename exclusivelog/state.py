"""State that several processes share: its write-ahead log is a topic (rules I1-I4).

Every process has the state in its own memory, and brings it up to date from the topic. Who
writes is the topic's exclusive owner while it does, and stays it until somebody else asks.

What is guaranteed, and by which rule:

1. A write's operations are computed from the state as all former writes left it, appended
   atomically, and applied: nobody writes in between, because the writer owns the topic
   (B2, G3, I1). So writes are linearisable, in the order of the topic's offsets.
2. A read with `latest=True` sees every write that had returned before it began, in whatever
   process (G5, G6). Without, it sees all writes of this process, and others' as of some moment
   that never goes back.
3. A write that has returned is as durable as the engine's `durability` says (H1). One that
   raised has appended nothing, unless the error says `maybe_written` (B9, I3).
4. A leader that was paused, killed or forked cannot write any more (B2, C2, C3): a write that
   meets this begins anew, as the next owner.
5. User functions get copies, and may be called more than once; what they return is encoded
   before anything is appended, and applied as it is decoded, in every process alike (I3).
6. Opening costs what the state has, not what its history has, if there are snapshots (I4).

It follows Pulsar's shared-state manager and map (apache/pulsar#13490).
"""

from __future__ import annotations

import concurrent.futures
import copy as _copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from exclusivelog import _core, serde
from exclusivelog.replica import Later, Replica
from exclusivelog.snapshots import Item
from exclusivelog.topic import Topic

S = TypeVar("S")
Op = TypeVar("Op")
K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")
D = TypeVar("D")

SNAPSHOT_EVERY = 100_000


class SharedState(Replica, Generic[S, Op]):
    """Any state, changed by operations that are messages of a topic (rule I1).

    - `initial`: a function that makes the state that everything begins with.
    - `apply`: `apply(state, op)` changes the state in place, or returns the new one. It must
      come to the same in every process: no clock, no chance, no I/O.
    - `encode`, `decode`: operations, and the state for snapshots, as bytes (default: msgpack).
    - `snapshot_every`: after so many operations written here a snapshot is taken in the
      background; None: only by `snapshot()`.
    - `copy`: what makes the copies that functions get (default: `copy.deepcopy`; None where the
      state is immutable).
    - `timeout`: seconds that a write waits to become owner (None: for ever), then
      WaitTimeoutError.

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
        snapshot_every: int | None = SNAPSHOT_EVERY,
        copy: Callable[[S], S] | None = _copy.deepcopy, timeout: float | None = None,
    ) -> None:  # fmt: skip
        if not callable(initial):
            raise TypeError("initial takes a function that makes the first state")
        if not callable(apply):
            raise TypeError("apply takes a function of (state, op)")
        for name, function in (("encode", encode), ("decode", decode), ("copy", copy)):
            if not callable(function) and not (name == "copy" and copy is None):
                raise TypeError(f"{name} takes a function, not {function!r}")
        self._state: S
        self._initial, self._apply = initial, apply
        self._encode, self._decode = encode, decode
        self._copy: Callable[[S], S] = copy or (lambda state: state)
        super().__init__(topic, snapshot_every, timeout)

    def _apply_item(self, key: bytes | None, value: bytes | None) -> None:
        changed = self._apply(self._state, self._decode(value or b""))
        if changed is not None:
            self._state = changed

    def _items(self) -> list[Item]:
        return [(None, self._encode(self._state))]

    def _begin(self) -> None:
        self._state = self._initial()

    def _restore(self, items: list[Item]) -> None:
        self._state = self._decode(items[0][1] or b"")

    def read(self, fn: Callable[[S], R], latest: bool = False) -> R:
        """`fn(state)`, with a copy of the state. `latest`: every write that has returned by now,
        in any process, is in it."""
        self._check()
        with _core.Holding(self._lock):
            self._freshen(latest)
            return self._call(fn)

    def _call(self, fn: Callable[[S], R]) -> R:
        with self._calling_out():
            return fn(self._copy(self._state))

    def write(
        self, ops_fn: Callable[[S], Iterable[Op]], read_fn: Callable[[S], R] | None = None
    ) -> R | None:
        """Append the operations that `ops_fn(state)` gives for the newest state, all of them or
        none, and apply them; then `read_fn(state)`. No operations: nothing is appended. Both
        get copies; `ops_fn` may be called more than once (rule I3)."""

        def compute() -> tuple[list[Item], R | None]:
            ops = list(ops_fn(self._copy(self._state)))
            return [(None, self._encode(op)) for op in ops], None

        if read_fn is None:
            return self._append(compute)
        return self._append(compute, lambda: self._call(read_fn))

    def read_async(
        self, fn: Callable[[S], R], latest: bool = False
    ) -> concurrent.futures.Future[R]:
        """`read`, as a future."""
        return self.submit(self.read, fn, latest)

    def write_async(
        self, ops_fn: Callable[[S], Iterable[Op]], read_fn: Callable[[S], R] | None = None
    ) -> concurrent.futures.Future[R | None]:
        """`write`, as a future."""
        return self.submit(self.write, ops_fn, read_fn)


class SharedMap(Replica, Generic[K, V]):
    """A map that several processes share (rule I2). Writes are atomic, and linearisable with
    one another and with reads that ask for the `latest`.

    - `key`, `value`: serialisers (a `Serde`, or bytes, str, json, msgpack). Keys that are equal
      must have equal bytes.
    - `snapshot_every`, `timeout`: as for `SharedState`.

    Every message of the topic is one key's new value, or none: its compacted view is the map,
    too. Every call has a second form that ends in `_async` and returns a future.

    >>> with xl.SharedMap(topic) as settings:
    ...     settings.put("retries", 3)
    ...     settings.replace("retries", 3, 5), settings.replace("retries", 3, 7)
    ...     settings.update("retries", lambda old: old + 1)
    ...     settings.get("retries"), settings.get_or_default("timeout", 10), len(settings)
    (True, False)
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
        super().__init__(topic, snapshot_every, timeout)

    # ---- messages ------------------------------------------------------------------------

    def _apply_item(self, key: bytes | None, value: bytes | None) -> None:
        if key is None:
            raise ValueError("it is no message of a map")
        if value is None:
            self._map.pop(key, None)
        else:
            self._map[key] = value

    def _begin(self) -> None:
        self._map = {}

    def _items(self) -> list[Item]:
        return list(self._map.items())

    def _restore(self, items: list[Item]) -> None:
        self._map = {key: value for key, value in items if key is not None and value is not None}

    # ---- read ----------------------------------------------------------------------------

    def get(self, key: K, default: D | None = None, *, latest: bool = False) -> V | D | None:
        """The key's value, or `default`. `latest`: every write that has returned by now, in any
        process, is seen."""
        value = self._find(key, latest)
        return default if value is None else self._load(value)

    def _find(self, key: K, latest: bool = False) -> bytes | None:
        self._check()
        name = self._dump_key(key)
        with _core.Holding(self._lock):
            self._freshen(latest)
            return self._map.get(name)

    def get_or_default(self, key: K, default: D, latest: bool = False) -> V | D:
        """The key's value, or `default`."""
        value = self._find(key, latest)
        return default if value is None else self._load(value)

    def scan(
        self, fn: Callable[[K, V], object] | None = None, latest: bool = False
    ) -> list[tuple[K, V]]:
        """All (key, value) pairs of one moment; `fn(key, value)` is called with each."""
        self._check()
        with _core.Holding(self._lock):
            self._freshen(latest)
            pairs = list(self._map.items())
        decoded = [(self._load_key(key), self._load(value)) for key, value in pairs]
        if fn is not None:
            for key, value in decoded:
                fn(key, value)
        return decoded

    def list_keys(self, latest: bool = False) -> list[K]:
        """All keys, in the order in which they were first put."""
        self._check()
        with _core.Holding(self._lock):
            self._freshen(latest)
            keys = list(self._map)
        return [self._load_key(key) for key in keys]

    def __getitem__(self, key: K) -> V:
        value = self._find(key)
        if value is None:
            raise KeyError(key)
        found: V = self._load(value)
        return found

    def __contains__(self, key: K) -> bool:
        return self._find(key) is not None

    def __len__(self) -> int:
        self._check()
        with _core.Holding(self._lock):
            self._freshen(False)
            return len(self._map)

    def __iter__(self) -> Iterator[K]:
        return iter(self.list_keys())

    # ---- write ---------------------------------------------------------------------------

    def put(self, key: K, value: V) -> None:
        """Set the key's value."""
        item = self._dump_key(key), self._dump(value)
        self._append(lambda: ([item], None))

    def __setitem__(self, key: K, value: V) -> None:
        self.put(key, value)

    def put_if_absent(self, key: K, value: V) -> bool:
        """Set the key's value if it has none; True if it had none."""
        item = self._dump_key(key), self._dump(value)
        return self._append(lambda: ([], False) if item[0] in self._map else ([item], True))

    def replace(self, key: K, expected: V, value: V) -> bool:
        """Set the key's value if it is `expected` (as it is encoded); True if it was. If not,
        nothing is appended (rule I3)."""
        name, before, after = self._dump_key(key), self._dump(expected), self._dump(value)
        return self._append(
            lambda: ([(name, after)], True) if self._map.get(name) == before else ([], False)
        )

    def update(self, key: K, fn: Callable[[V | None], V | None]) -> V | None:
        """Set the key's value to `fn(value)` (None: it had none; it is to have none); what it is
        then. `fn` may be called more than once."""
        name = self._dump_key(key)

        def compute() -> tuple[list[Item], V | None]:
            old = self._map.get(name)
            new = fn(None if old is None else self._load(old))
            return self._change(name, new), new

        return self._append(compute)

    def update_multiple(
        self, filter: Callable[[K, V], bool] | None, fn: Callable[[K, V], V | None]
    ) -> dict[K, V | None]:
        """Set the values of all keys for which `filter(key, value)` is true (None: of all) to
        `fn(key, value)`, in one atomic append; {key: new value}, None for those deleted. Both
        may be called more than once."""

        def compute() -> tuple[list[Item], dict[K, V | None]]:
            items: list[Item] = []
            changed: dict[K, V | None] = {}
            for name, data in self._map.items():
                key, value = self._load_key(name), self._load(data)
                if filter is None or filter(key, value):
                    changed[key] = fn(key, value)
                    items += self._change(name, changed[key])
            return items, changed

        return self._append(compute)

    def put_all(self, values: Mapping[K, V]) -> None:
        """Set several keys' values, all of them or none."""
        items: list[Item] = [(self._dump_key(k), self._dump(v)) for k, v in values.items()]
        self._append(lambda: (items, None))

    def delete(self, key: K) -> bool:
        """Remove a key; True if it was there."""
        name = self._dump_key(key)
        return self._append(lambda: ([(name, None)], True) if name in self._map else ([], False))

    def __delitem__(self, key: K) -> None:
        if not self.delete(key):
            raise KeyError(key)

    def clear(self) -> None:
        """Remove all keys: a message for each, in one atomic append."""
        self._append(lambda: ([(name, None) for name in self._map], None))

    def _change(self, name: bytes, value: V | None) -> list[Item]:
        if value is None:
            return [(name, None)] if name in self._map else []
        return [(name, self._dump(value))]

    # ---- futures -------------------------------------------------------------------------

    def get_async(
        self, key: K, default: D | None = None, *, latest: bool = False
    ) -> Later[V | D | None]:
        """`get`, as a future."""
        return self.submit(self.get, key, default, latest=latest)

    def get_or_default_async(self, key: K, default: D, latest: bool = False) -> Later[V | D]:
        """`get_or_default`, as a future."""
        return self.submit(self.get_or_default, key, default, latest)

    def scan_async(
        self, fn: Callable[[K, V], object] | None = None, latest: bool = False
    ) -> Later[list[tuple[K, V]]]:
        """`scan`, as a future."""
        return self.submit(self.scan, fn, latest)

    def list_keys_async(self, latest: bool = False) -> Later[list[K]]:
        """`list_keys`, as a future."""
        return self.submit(self.list_keys, latest)

    def put_async(self, key: K, value: V) -> Later[None]:
        """`put`, as a future."""
        return self.submit(self.put, key, value)

    def put_all_async(self, values: Mapping[K, V]) -> Later[None]:
        """`put_all`, as a future."""
        return self.submit(self.put_all, dict(values))

    def put_if_absent_async(self, key: K, value: V) -> Later[bool]:
        """`put_if_absent`, as a future."""
        return self.submit(self.put_if_absent, key, value)

    def replace_async(self, key: K, expected: V, value: V) -> Later[bool]:
        """`replace`, as a future."""
        return self.submit(self.replace, key, expected, value)

    def update_async(self, key: K, fn: Callable[[V | None], V | None]) -> Later[V | None]:
        """`update`, as a future."""
        return self.submit(self.update, key, fn)

    def update_multiple_async(
        self, filter: Callable[[K, V], bool] | None, fn: Callable[[K, V], V | None]
    ) -> Later[dict[K, V | None]]:
        """`update_multiple`, as a future."""
        return self.submit(self.update_multiple, filter, fn)

    def delete_async(self, key: K) -> Later[bool]:
        """`delete`, as a future."""
        return self.submit(self.delete, key)

    def clear_async(self) -> Later[None]:
        """`clear`, as a future."""
        return self.submit(self.clear)


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
