"""`SharedMap`: a map that several processes share (rule I2)."""

from __future__ import annotations

import itertools
import reprlib
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
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast, overload

from exclusivelog import _core, serde
from exclusivelog.arguments import is_url
from exclusivelog.backend import Kind
from exclusivelog.errors import DeserializationError
from exclusivelog.messages import MAX_MESSAGE_BYTES, Item
from exclusivelog.notebook import MOST_ROWS, Shown, facts, html_of, listing
from exclusivelog.producer import Append
from exclusivelog.state.joining import Overlay
from exclusivelog.state.past import At, MapWatch, apply_to, map_at, map_since
from exclusivelog.state.shared import SNAPSHOT_EVERY, Shared, in_background
from exclusivelog.topic import Topic
from exclusivelog.transaction import Claim, HoldsClaim, Transaction

__all__ = ["Change", "SharedMap"]

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

NOTHING: Any = object()
NOT_NOW = _core.NOT_NOW


@dataclass(frozen=True, slots=True)
class Change(Generic[V]):
    """The outcome of a conditional write of a map: true if the write was made.

    - `previous`: the key's value just before; None if it had none. If the write was not made,
      this value is the reason.
    - `value`: the key's value now.

    >>> bool(Change(True, None, 1)), bool(Change(False, 2, 2))
    (True, False)
    """

    made: bool
    previous: V | None
    value: V | None

    def __bool__(self) -> bool:
        return self.made


class MapContent(_core.MapBase):
    """A map in memory, as bytes; applies messages to it."""

    restores_views = True

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}

    def reset(self) -> None:
        """Remove all keys."""
        self.entries = {}

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Apply one message."""
        apply_to(self.entries, key, value)

    def to_items(self) -> list[Item]:
        """Return the keys with their values."""
        return list(self.entries.items())

    def restore(self, items: list[Item]) -> None:
        """Replace the map by that of a snapshot."""
        if any(key is None or value is None for key, value in items):
            raise ValueError("it is not a snapshot of a map")
        self.entries = {k: v for k, v in items if k is not None and v is not None}


class ForkedMap:
    """The map with the writes of a transaction, which do not reach it."""

    def __init__(self, content: MapContent) -> None:
        self.entries = Overlay(content.entries)

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Apply one message."""
        apply_to(self.entries, key, value)


Entries = MapContent | ForkedMap


def change(content: Entries, name: bytes, data: bytes | None) -> list[Item]:
    """Return the messages that set a key's value, or remove it; none if there is nothing to
    remove."""
    return [(name, data)] if data is not None or name in content.entries else []


def set_if(
    name: bytes, data: bytes | None, expected: Any, content: Entries
) -> tuple[list[Item], tuple[bool, bytes | None]]:
    """As `change`, but only if the value is `expected`. Returns (messages, (matched, value
    before))."""
    old = content.entries.get(name)
    made = expected is _core.ANY or old == expected
    return change(content, name, data) if made else [], (made, old)


class MapCodec(Generic[K, V]):
    """Converts a map's keys and values to and from bytes."""

    def __init__(self, topic: str, key: Any, value: Any) -> None:
        self.topic = topic
        self.dump_key = _checked(serde.key_dumps_of(key, "key"), "key")
        self._load_key: Callable[[bytes], K] = serde.loads_of(key, "key")
        self.dump = _checked(serde.dumps_of(value, "value"), "value")
        self.load_unnamed: Callable[[bytes], V] = serde.loads_of(value, "value")
        self.kind: Kind = {
            "holds": "map", "key": serde.name_of(key), "value": serde.name_of(value),
        }  # fmt: skip
        # An application's own serialisers may block: never run them in an event loop's thread.
        self.never_blocks = None not in self.kind.values()

    def load_key(self, name: bytes) -> K:
        """Decode a key."""
        try:
            return self._load_key(name)
        except Exception as error:
            raise self._error("a key", name, error, "key", name) from error

    def load(self, data: bytes, name: bytes) -> V:
        """Decode the value of a key."""
        try:
            return self.load_unnamed(data)
        except Exception as error:
            raise self.undecodable(data, error, name) from error

    def undecodable(
        self, data: bytes | None, cause: Exception, name: bytes
    ) -> DeserializationError:
        """The error for the value of a key at which its deserializer raised `cause`."""
        try:
            key: Any = self._load_key(name)
        except Exception:
            key = name
        return self._error(
            f"the value of the key {reprlib.repr(key)}", data or b"", cause, "value", name
        )

    def _error(
        self, what: str, raw: bytes, cause: Exception, part: str, name: bytes
    ) -> DeserializationError:
        return DeserializationError(
            f"topic {self.topic!r}: {what} of its map cannot be deserialised: "
            f"{type(cause).__name__}: {reprlib.repr(str(cause))}. This error has its bytes as "
            "`raw`, and those of the key as `key`; the other keys can be read one by one",
            topic=self.topic,
            part=part,
            raw=raw,
            key=name,
        )

    def unpack(self, data: bytes | None, name: bytes) -> V | None:
        """Decode the value of a key; None stays None."""
        return None if data is None else self.load(data, name)

    def load_pair(self, name: bytes, data: bytes) -> tuple[K, V]:
        """Decode a key and its value."""
        return self.load_key(name), self.load(data, name)

    def pack(self, value: V | None) -> bytes | None:
        """Encode a value; None stays None."""
        return None if value is None else self.dump(value)

    def load_all(self, entries: Mapping[bytes, bytes]) -> dict[K, V]:
        """Decode a whole map."""
        return dict(self.load_pair(name, data) for name, data in entries.items())


class SharedMap(Shared, MutableMapping[K, V]):
    """A map that several processes share (rule I2): a MutableMapping whose writes are atomic, and
    linearisable with one another and with reads with `latest=True`.

    - `key`, `value`: serialisers: a `Serde`, or the name of one ("bytes", "str", "json",
      "msgpack", "exact"); default: str for keys, msgpack for values. Equal keys must have equal
      bytes.
    - `snapshot_every`, `timeout`, `claim`: as for `SharedState`.

    None always means "no value": a key that is set to None is removed. `put`, `delete` and `pop`
    return the value before. `put_if_absent`, `replace` and `update(key, fn)` return a `Change`,
    which is true if the write was made, and has the value before as `previous`.

    Every message of the topic sets one key, removes one key, or removes all keys; so the topic's
    compacted view also contains the map. Each method that may wait has a second form, which ends in
    `_async` and returns a future.

    Raises StateError if the topic holds something else, TypeError or ValueError for a wrong
    argument.

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
        self,
        topic: Topic,
        key: Any = serde.str,
        value: Any = serde.msgpack,
        *,
        snapshot_every: int | None = SNAPSHOT_EVERY,
        timeout: float | None = None,
        claim: Claim | HoldsClaim | None = None,
    ) -> None:
        self._codec: MapCodec[K, V] = MapCodec(getattr(topic, "name", ""), key, value)
        # Bound once, because `get` is called most often.
        self._dump_key, self._load = self._codec.dump_key, self._codec.load_unnamed
        self._content: MapContent = MapContent()
        super().__init__(topic, self._codec.kind, self._content, snapshot_every, timeout, claim)

    def _fork(self) -> ForkedMap:
        return ForkedMap(self._content)

    # ---- read ----------------------------------------------------------------------------

    @overload
    def get(self, key: K, default: None = None, *, latest: bool = False) -> V | None: ...
    @overload
    def get(self, key: K, default: D, *, latest: bool = False) -> V | D: ...
    def get(self, key: K, default: Any = None, *, latest: bool = False) -> Any:
        """Return the key's value, or `default`, as `dict.get`.

        - `latest`: True: see every write that has returned by now, in any process. False, the
          default: see all writes of this process, and those of others up to some earlier moment."""
        name = self._dump_key(key)
        data = self._get_at_once(name, latest)
        if data is NOT_NOW:
            data = self._find(name, latest)
        try:
            return default if data is None else self._load(data)
        except Exception as error:
            raise self._codec.undecodable(data, error, name) from error

    def _find(self, name: bytes, latest: bool = False) -> bytes | None:
        data = self._get_at_once(name, latest)
        if data is NOT_NOW:
            data = self._read(lambda: self._content.entries.get(name), latest)
        found: bytes | None = data
        return found

    def get_or_default(self, key: K, default: D, latest: bool = False) -> V | D:
        """Return the key's value, or `default`; `latest` as for `get`."""
        name = self._dump_key(key)
        data = self._find(name, latest)
        return default if data is None else self._codec.load(data, name)

    def scan(
        self,
        fn: Callable[[K, V], object] | None = None,
        *,
        filter: Callable[[K], object] | None = None,
        latest: bool = False,
    ) -> list[tuple[K, V]]:
        """Return the (key, value) pairs as of one moment.

        - `fn`: if given, call `fn(key, value)` for each pair.
        - `filter`: only the keys for which `filter(key)` is true; other values are not decoded.
          Default: all keys.
        - `latest`: as for `get`.
        """
        load_key, load = self._codec.load_key, self._codec.load
        found = [(load_key(name), name, data) for name, data in self._pairs(latest)]
        decoded = [
            (key, load(data, name)) for key, name, data in found if filter is None or filter(key)
        ]
        if fn is not None:
            self._flush_what_was_read()
            for key, value in decoded:
                fn(key, value)
        return decoded

    def _pairs(self, latest: bool = False) -> list[tuple[bytes, bytes]]:
        return self._read(lambda: list(self._content.entries.items()), latest)

    def list_keys(self, latest: bool = False) -> list[K]:
        """Return all keys, in the order in which they were first put; `latest` as for `get`."""
        keys = self._read(lambda: list(self._content.entries), latest)
        return [self._codec.load_key(key) for key in keys]

    def __getitem__(self, key: K) -> V:
        name = self._dump_key(key)
        data = self._find(name)
        if data is None:
            raise KeyError(key)
        return self._codec.load(data, name)

    def __contains__(self, key: object) -> bool:
        return self._find(self._dump_key(key)) is not None

    def __len__(self) -> int:
        return self._read(lambda: len(self._content.entries), False)

    def __iter__(self) -> Iterator[K]:
        return iter(self.list_keys())

    def items(self) -> ItemsView[K, V]:
        """Return a view of the (key, value) pairs; each iteration sees those of one moment. After a
        DeserializationError, `next` of an iterator returns the pair after the one that it names."""
        return _Items(self)

    def values(self) -> ValuesView[V]:
        """Return a view of the values; each iteration sees those of one moment."""
        return _Values(self)

    # ---- write ---------------------------------------------------------------------------

    def put(self, key: K, value: V | None, *, transaction: Transaction | None = None) -> V | None:
        """Set the key's value; None removes the key. Returns the previous value, or None.

        - `transaction`: make the write when that commits, together with all else that it has (rule
          G3). Later writes of the same transaction see it; nothing else does before the commit. The
          commit raises TransactionAbortedError if anything else was written to this map since the
          transaction's first write to it: run the transaction again. Every method that writes takes
          it.

        >>> with xl.SharedMap(topic) as a, xl.SharedMap(engine.topic("b")) as b:
        ...     _ = a.put("anna", 10)
        ...     with engine.transaction() as txn:
        ...         _ = a.update("anna", lambda had: had - 3, transaction=txn)
        ...         _ = b.put("bert", 3, transaction=txn)
        ...         before = a.get("anna"), b.get("bert")
        ...     before, (a.get("anna"), b.get("bert"))
        ((10, None), (7, 3))
        """
        data = None if value is None else self._codec.dump(value)
        name = self._dump_key(key)
        return self._written(self._set(name, data, _core.ANY, transaction)[1], name)

    def _written(self, old: bytes | None, name: bytes) -> V | None:
        """The value that a key had before it was written."""
        try:
            return self._codec.unpack(old, name)
        except DeserializationError as error:
            error.maybe_written = True  # only the value before cannot be returned
            raise

    def _set(
        self,
        name: bytes,
        data: bytes | None,
        expected: Any,
        transaction: Transaction | None = None,
    ) -> tuple[bool, bytes | None]:
        """Set the value if it is `expected` (None: no value). Returns (matched, value before)."""
        if transaction is not None:
            return self._append(partial(set_if, name, data, expected), None, transaction)
        found = self._set_at_once(name, data, expected, True)
        if found is NOT_NOW:  # the slow path: it has to wait, or raises
            return self._append(partial(set_if, name, data, expected))
        made: bool
        old: bytes | None
        made, old, seen = found
        if seen is not None and not seen.flushed:
            self._settle(seen)
        return made, old

    def __setitem__(self, key: K, value: V | None) -> None:
        self._set(self._codec.dump_key(key), self._codec.pack(value), _core.ANY)

    def put_if_absent(
        self, key: K, value: V | None, *, transaction: Transaction | None = None
    ) -> Change[V]:
        """Set the key's value if it has none. If it had one, the `Change` is false, and its
        `previous` is that value. `transaction` as for `put`."""
        name = self._codec.dump_key(key)
        made, old = self._set(name, self._codec.pack(value), None, transaction)
        previous = self._codec.unpack(old, name)
        return Change(made, previous, value if made else previous)

    def replace(
        self,
        key: K,
        expected: V | None,
        value: V | None,
        *,
        transaction: Transaction | None = None,
    ) -> Change[V]:
        """Set the key's value if its present value is `expected`: equal, and of the same types
        (None: no value). If it is another one, nothing is appended (rule I3), the `Change` is
        false, and its `previous` is the present value. `transaction` as for `put`."""
        name, data, wanted = (
            self._dump_key(key),
            self._codec.pack(value),
            self._codec.pack(expected),
        )
        while True:
            made, old = self._set(name, data, wanted, transaction)
            previous = self._codec.unpack(old, name)
            if made or old is None or expected is None or not _core.same(previous, expected):
                return Change(made, previous, value if made else previous)
            wanted = old  # equal, with other bytes: a dict in another order, or a set

    @overload  # type: ignore[override]
    def update(
        self,
        key: K,
        fn: Callable[[V | None], V | None],
        /,
        *,
        with_key: Literal[False] = False,
        transaction: Transaction | None = None,
    ) -> Change[V]: ...
    @overload
    def update(
        self,
        key: K,
        fn: Callable[[K, V | None], V | None],
        /,
        *,
        with_key: Literal[True],
        transaction: Transaction | None = None,
    ) -> Change[V]: ...
    @overload
    def update(
        self,
        values: Mapping[K, V] | Iterable[tuple[K, V]] = ...,
        /,
        *,
        transaction: Transaction | None = None,
        **more: V,
    ) -> None: ...
    def update(
        self,
        key: Any = (),
        fn: Any = None,
        /,
        *,
        with_key: Any = False,
        transaction: Any = None,
        **more: Any,
    ) -> Change[V] | None:
        """Set one key's value by a function, or several keys' values, atomically.

        - `update(key, fn)`: set it to `fn(value)`, or with `with_key=True` to `fn(key, value)`.
          None means no value, as argument and as result. Returns a `Change`. `fn` may be called
          more than once.
        - `update(values, name=value, ...)`: set those of a mapping or of (key, value) pairs, and
          those that are named, as `dict.update`.
        - `transaction`: as for `put`.
        """
        if fn is None:
            if with_key is not False:
                more["with_key"] = with_key
            if not (transaction is None or isinstance(transaction, Transaction)):
                more["transaction"] = transaction
                transaction = None
            if given := {**dict(key), **more}:
                self.put_all(given, transaction=transaction)
            return None
        if more:
            raise TypeError(f"update(key, fn) takes no argument {min(more)!r}")
        if not callable(fn):
            raise TypeError(f"fn takes a function of the value, not {fn!r}")
        name = self._codec.dump_key(key)

        def compute(content: Entries) -> tuple[list[Item], Change[V]]:
            old = content.entries.get(name)
            unpack = self._codec.unpack
            given = unpack(old, name)  # a new object, which `fn` may change
            new = self._codec.pack(fn(key, given) if with_key else fn(given))
            items = change(content, name, new)
            return items, Change(bool(items), unpack(old, name), unpack(new, name))

        return self._append(compute, None, transaction)

    def update_multiple(
        self,
        filter: Callable[[K], object] | None,
        fn: Callable[[K, V], V | None],
        *,
        transaction: Transaction | None = None,
    ) -> dict[K, V | None]:
        """Set the values of all keys for which `filter(key)` is true (None: of all keys) to
        `fn(key, value)`, in one atomic append.

        Returns {key: new value} of the keys that changed; None for those that were removed. Other
        keys' values are not decoded. Both functions may be called more than once. `transaction` as
        for `put`."""

        def compute(content: Entries) -> tuple[list[Item], dict[K, V | None]]:
            items: list[Item] = []
            changed: dict[K, V | None] = {}
            for name, data in content.entries.items():
                key = self._codec.load_key(name)
                if filter is None or filter(key):
                    value = fn(key, self._codec.load(data, name))
                    new = self._codec.pack(value)
                    if new != data:
                        changed[key] = value
                        items.append((name, new))
            return items, changed

        return self._append(compute, None, transaction)

    def put_all(self, values: Mapping[K, V], *, transaction: Transaction | None = None) -> None:
        """Set several keys' values, all of them or none; None removes a key. `transaction` as for
        `put`."""
        given = [(self._codec.dump_key(k), self._codec.pack(v)) for k, v in values.items()]

        def compute(content: Entries) -> tuple[list[Item], None]:
            return [item for name, data in given for item in change(content, name, data)], None

        self._append(compute, None, transaction)

    def setdefault(  # type: ignore[override]
        self, key: K, default: V | None = None, *, transaction: Transaction | None = None
    ) -> V | None:
        """Return the key's value; if it has none, set it to `default` and return that.
        `transaction` as for `put`."""
        return self.put_if_absent(key, default, transaction=transaction).value

    def delete(self, key: K, *, transaction: Transaction | None = None) -> V | None:
        """Remove a key. Returns the previous value, or None. `transaction` as for `put`."""
        return self.put(key, None, transaction=transaction)

    def __delitem__(self, key: K) -> None:
        if self._remove(self._codec.dump_key(key)) is None:
            raise KeyError(key)

    def pop(self, key: K, default: Any = NOTHING, *, transaction: Transaction | None = None) -> Any:
        """Remove a key and return its value; if it has none, return `default` or raise KeyError.
        `transaction` as for `put`."""
        name = self._codec.dump_key(key)
        old = self._remove(name, transaction)
        if old is None and default is NOTHING:
            raise KeyError(key)
        return default if old is None else self._written(old, name)

    def _remove(self, name: bytes, transaction: Transaction | None = None) -> bytes | None:
        """Remove a key; return its value before."""

        def compute(content: Entries) -> tuple[list[Item], bytes | None]:
            old = content.entries.get(name)
            return [] if old is None else [(name, None)], old

        return self._append(compute, None, transaction)

    def popitem(self, *, transaction: Transaction | None = None) -> tuple[K, V]:
        """Remove the key that was put last; return (key, value). KeyError if the map is empty.
        `transaction` as for `put`."""

        def compute(content: Entries) -> tuple[list[Item], tuple[bytes, bytes]]:
            name = next(reversed(content.entries), None)
            if name is None:
                raise KeyError(f"the map in topic {self.topic.name!r} is empty")
            return [(name, None)], (name, content.entries[name])

        name, data = self._append(compute, None, transaction)
        try:
            return self._codec.load_pair(name, data)
        except DeserializationError as error:
            error.maybe_written = True
            raise

    def clear(self, *, transaction: Transaction | None = None) -> None:
        """Remove all keys, with a single message. `transaction` as for `put`."""

        def compute(content: Entries) -> tuple[list[Item], None]:
            return [(None, None)] if content.entries else [], None

        self._append(compute, None, transaction)

    # ---- changes, and the past -----------------------------------------------------------

    def watch(
        self,
        key: K | None = None,
        *,
        prefix: Any = None,
        start: Literal["earliest", "latest"] | At | None = None,
    ) -> MapWatch[K, V]:
        """Watch every change of one key, of the keys that begin with `prefix`, or of all keys, in
        order (rule I6); see `MapWatch`.

        - `start`: the offset of the first message to watch, or a datetime (naive: local time).
          "earliest": from the earliest map that can be restored: all changes, unless some were
          trimmed. "latest" or None, the default: only later writes.

        Raises OffsetTrimmedError if the map as of `start` can no longer be restored.

        >>> with xl.SharedMap(topic) as jobs, jobs.watch(prefix="job/") as watch:
        ...     _ = jobs.put("job/1", "new"), jobs.put("other", 1), jobs.put("job/1", "done")
        ...     for change in watch.follow(timeout=0):
        ...         change.offset, change.key, change.previous, change.value
        (0, 'job/1', None, 'new')
        (2, 'job/1', 'new', 'done')
        """
        if key is not None and prefix is not None:
            raise TypeError("watch takes a key or a prefix, not both")
        wanted = None if key is None else self._codec.dump_key(key)

        def matches(name: bytes) -> bool:
            if prefix is not None:
                key: Any = self._codec.load_key(name)
                return bool(key.startswith(prefix))
            return wanted is None or name == wanted

        if start in (None, "latest"):
            begin, items = self._read(
                lambda: (self._replica.position, self._content.entries.copy()), latest=True
            )
        else:
            self._check()
            begin, items = map_since(self.topic, cast(Any, start))
        return MapWatch(self.topic, begin, items, matches, self._codec.load_key, self._codec.load)

    def at(self, when: At) -> dict[K, V]:
        """Return the map as it was before the message at an offset, or at a time (a datetime;
        naive: local time).

        Raises OffsetTrimmedError if the messages from then were trimmed, and no snapshot is old
        enough.

        >>> with xl.SharedMap(topic) as settings:
        ...     _ = settings.put("a", 1), settings.put("a", 2)
        ...     settings.at(0), settings.at(1), settings.at(2)
        ({}, {'a': 1}, {'a': 2})
        """
        self._check()
        return self._codec.load_all(map_at(self.topic, when)[1])

    def diff(self, a: At, b: At) -> dict[K, tuple[V | None, V | None]]:
        """Return {key: (value at `a`, value at `b`)} of the keys whose values differ; None means no
        value. `a` and `b` are offsets or datetimes, as for `at`.

        >>> with xl.SharedMap(topic) as settings:
        ...     _ = settings.put("a", 1), settings.put("b", 2), settings.delete("a")
        ...     settings.diff(1, 3)
        {'a': (1, None), 'b': (None, 2)}
        """
        self._check()
        unpack = self._codec.unpack
        old, new = map_at(self.topic, a)[1], map_at(self.topic, b)[1]
        return {
            self._codec.load_key(name): (unpack(old.get(name), name), unpack(new.get(name), name))
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        }

    # ---- notebooks -----------------------------------------------------------------------

    def _repr_html_(self) -> str:
        return html_of(self, self._as_html)

    def _as_html(self) -> str:
        if is_url(self.topic.engine.path):  # it would have to be asked
            return facts(repr(self), [])
        rows = ((Shown(key), self._shown(key)) for key in itertools.islice(self, MOST_ROWS))
        return listing(repr(self), ("key", "value"), rows, len(self))

    def _shown(self, key: K) -> Shown | str:
        try:
            return Shown(self.get(key))
        except DeserializationError as error:
            return str(error)

    # ---- futures -------------------------------------------------------------------------

    get_async = in_background(get)
    get_or_default_async = in_background(get_or_default)
    scan_async = in_background(scan)
    list_keys_async = in_background(list_keys)
    put_async = in_background(put)
    put_all_async = in_background(put_all)
    put_if_absent_async = in_background(put_if_absent)
    replace_async = in_background(replace)
    update_async = in_background(update)
    update_multiple_async = in_background(update_multiple)
    setdefault_async = in_background(setdefault)
    delete_async = in_background(delete)
    pop_async = in_background(pop)
    popitem_async = in_background(popitem)
    clear_async = in_background(clear)
    at_async = in_background(at)
    diff_async = in_background(diff)


def put_at_once(
    shared: SharedMap[Any, Any], key: Any, value: Any
) -> tuple[Any, Append | None] | None:
    """`put` without waiting, for asyncio. None, without any effect, if it would have to wait.

    Returns (value before, append that must be durable before the call returns, or None).
    """
    codec = shared._codec
    if not (codec.never_blocks and shared._calls.idle):
        return None
    data = None if value is None else codec.dump(value)
    name = codec.dump_key(key)
    found = shared._set_at_once(name, data, _core.ANY, False)
    if found is NOT_NOW:
        return None
    _, old, seen = found
    return shared._written(old, name), seen


class _Items(ItemsView[K, V]):
    """Pairs of a shared map; each iteration is over a snapshot."""

    _mapping: SharedMap[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        # `map` goes on after an item that raises.
        return itertools.starmap(self._mapping._codec.load_pair, self._mapping._pairs())


class _Values(ValuesView[V]):
    """Values of a shared map; each iteration is over a snapshot."""

    _mapping: SharedMap[Any, V]

    def __iter__(self) -> Iterator[V]:
        load, pairs = self._mapping._codec.load, self._mapping._pairs()
        return map(load, [data for _, data in pairs], [name for name, _ in pairs])

    def __contains__(self, value: object) -> bool:
        return any(value == item for item in self)


def _checked(dumps: Callable[[Any], bytes], argument: str) -> Callable[[Any], bytes]:
    """Wrap `dumps`: raise TypeError if its result is not bytes, and let its errors name the
    argument."""

    def dump(item: Any) -> bytes:
        try:
            data = dumps(item)
        except (AttributeError, TypeError, UnicodeError) as error:
            raise TypeError(
                f"{argument}={reprlib.repr(item)}: its serialiser does not take it: {error}"
            ) from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{argument}={reprlib.repr(item)}: its serialiser does not take it: {error}"
            ) from error
        if type(data) is not bytes:
            raise TypeError(
                f"{argument}={reprlib.repr(item)}: its serialiser gives {type(data).__name__}, not "
                "bytes"
            )
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"{argument} has {len(data)} bytes; a message takes {MAX_MESSAGE_BYTES}"
            )
        return data

    return dump
