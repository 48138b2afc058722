"""`SharedMap`: a map that several processes share (rule I2)."""

from __future__ import annotations

import datetime as dt
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
from exclusivelog.backend import Kind
from exclusivelog.errors import DeserializationError
from exclusivelog.foreign import pass_on_of_a_handler
from exclusivelog.messages import MAX_MESSAGE_BYTES, Item, Timed, from_ms, timed
from exclusivelog.notebook import MOST_ROWS, Shown, facts, html_of, listing
from exclusivelog.producer import Append
from exclusivelog.state.entries import Entries, apply_to
from exclusivelog.state.expiry import Expiring, Ttl, expecting, ttl_ms
from exclusivelog.state.joining import Overlay
from exclusivelog.state.past import At, MapWatch, map_at, map_since
from exclusivelog.state.shared import SNAPSHOT_EVERY, in_background
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


class MapContent(Entries):
    """A map in memory, as bytes; applies messages to it."""

    restores_views = True
    refusals: type[Exception] = ValueError  # of `apply_to`

    def way_out(self, offset: int) -> str:
        """What to do about a message that another program has sent."""
        return f"remove it: topic.trim(before={offset + 1}) keeps all keys"


class ForkedMap:
    """The map with the writes of a transaction, which do not reach it."""

    def __init__(self, content: MapContent) -> None:
        self.entries = Overlay(content.entries)
        self._content = content
        self._until: dict[bytes, int | None] = {}  # of the keys that were written

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Apply one message."""
        if key is None:
            self._until = dict.fromkeys(self.entries)
        else:
            self._until[key] = value.until if isinstance(value, Timed) else None
        apply_to(self.entries, key, value)

    def until(self, name: bytes) -> int | None:
        """When a key expires; see `Entries`."""
        return self._until[name] if name in self._until else self._content.until(name)


AnyContent = MapContent | ForkedMap


def change(content: AnyContent, name: bytes, data: bytes | None) -> list[Item]:
    """Return the messages that set a key's value, or remove it; none if there is nothing to
    remove."""
    return [(name, data)] if data is not None or name in content.entries else []


def set_if(
    name: bytes, data: bytes | None, expected: Any, content: AnyContent
) -> tuple[list[Item], tuple[bool, bytes | None]]:
    """As `change`, but only if the value is `expected`. Returns (messages, (matched, value
    before))."""
    old = content.entries.get(name)
    made = expected is _core.ANY or old == expected
    return change(content, name, data) if made else [], (made, old)


def renewed(content: AnyContent, name: bytes, data: bytes | None, until: Any) -> bytes | None:
    """The value that a key is set to by a function of its value before. `until`: NOTHING if it is
    to expire when that would have."""
    return timed(data, content.until(name) if until is NOTHING else until)


# The type of all keys of a serialiser that stores a key's beginning as the beginning of its bytes.
ONLY_KEYS: dict[str, type] = {"str": str, "bytes": bytes}


def _begins(prefix: bytes, name: bytes) -> bool:
    return name.startswith(prefix)


class MapCodec(Generic[K, V]):
    """Converts a map's keys and values to and from bytes."""

    def __init__(self, topic: str, key: Any, value: Any) -> None:
        self.topic = topic
        self.dump_key = _checked(serde.key_dumps_of(key, "key"), "key")
        self._load_key: Callable[[bytes], K] = serde.loads_of(key, "key")
        self.dump = _checked(serde.dumps_of(value, "value"), "value")
        self.load_unnamed: Callable[[bytes], V] = serde.loads_of(value, "value")
        self.kind: Kind = {"holds": "map", "key": serde.name_of(key), "value": serde.name_of(value)}
        # An application's own serialisers may block: never run them in an event loop's thread.
        self.never_blocks = None not in self.kind.values()

    def load_key(self, name: bytes) -> K:
        """Decode a key."""
        try:
            return self._load_key(name)
        except Exception as error:
            pass_on_of_a_handler(error)
            raise self._error("a key", name, error, "key", name) from error

    def load(self, data: bytes, name: bytes) -> V:
        """Decode the value of a key."""
        try:
            return self.load_unnamed(data)
        except Exception as error:
            pass_on_of_a_handler(error)
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

    def begins_with(self, prefix: str | bytes) -> Callable[[bytes], bool]:
        """Whether a key, as bytes, begins with the prefix. A key that is not of the prefix's type
        does not; TypeError if none can be."""
        kind = str if isinstance(prefix, str) else bytes
        only = ONLY_KEYS.get(self.kind["key"] or "", kind)
        if not isinstance(prefix, only):
            raise TypeError(
                f"prefix={prefix!r}: it takes the beginning of a key, of type {only.__name__}"
            )
        if self.kind["key"] in ONLY_KEYS:  # their bytes begin as they do
            return partial(_begins, cast(Any, self.dump_key(cast(Any, prefix))))

        def matches(name: bytes) -> bool:
            try:
                key: Any = self.load_key(name)
            except DeserializationError:
                return True  # to be named by the call that returns keys
            return isinstance(key, kind) and key.startswith(cast(Any, prefix))

        return matches

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


class SharedMap(Expiring, MutableMapping[K, V]):
    """A map that several processes share (rule I2): a MutableMapping whose writes are atomic, and
    linearisable with one another and with reads with `latest=True`.

    - `key`, `value`: serialisers: a `Serde`, or the name of one ("bytes", "str", "json",
      "msgpack", "exact"); default: str for keys, msgpack for values. Equal keys must have equal
      bytes.
    - `prefix`: hold only the keys that begin with it, a str or bytes (default: None, all keys).
      For reads, other keys are not there; ValueError for a write of one. Such a map takes no
      snapshots by itself; `snapshot()` makes one of all keys, from the log.
    - `snapshot_every`, `timeout`, `claim`: as for `SharedState`.

    None always means "no value": a key that is set to None is removed. `put`, `delete` and `pop`
    return the value before. `put_if_absent`, `replace` and `update(key, fn)` return a `Change`,
    which is true if the write was made, and has the value before as `previous`.

    Writes with `ttl` (seconds, or a timedelta; default: None, no limit) let the key expire: once so
    much of the log's time has passed, the owner of the topic removes it, by a message as `delete`
    appends. Until that message is in the log, reads in all processes return the value (rule I2).
    Every write first removes the keys that have expired.

    Every message of the topic sets one key, removes one key, or removes all keys; so the topic's
    compacted view also contains the map. Each method that may wait has a second form, which ends in
    `_async` and returns a future. The call is made in the background: do not change its arguments
    before the future is done.

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
        prefix: str | bytes | None = None,
        snapshot_every: int | None = SNAPSHOT_EVERY,
        timeout: float | None = None,
        claim: Claim | HoldsClaim | None = None,
    ) -> None:
        self._codec: MapCodec[K, V] = MapCodec(getattr(topic, "name", ""), key, value)
        # Bound once, because `get` is called most often.
        self._dump_key, self._load = self._codec.dump_key, self._codec.load_unnamed
        self._dump_written = self._dump_key  # the key of a write
        self._prefix = prefix
        self._holds: Callable[[bytes], bool] = _every_key
        holds = None
        if prefix is not None:
            holds = self._holds = self._codec.begins_with(prefix)
            self._dump_written, snapshot_every = self._dump_own, None
        self._content: MapContent = MapContent(holds)
        super().__init__(topic, self._codec.kind, self._content, snapshot_every, timeout, claim)

    def _dump_own(self, key: K) -> bytes:
        """Encode a key that is to be written; ValueError if the map does not hold it."""
        name = self._codec.dump_key(key)
        if not self._holds(name):
            raise ValueError(
                f"key={key!r} does not begin with {self._prefix!r}; this map of topic "
                f"{self.topic.name!r} holds and writes only keys that do"
            )
        return name

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
            pass_on_of_a_handler(error)
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

    def list_keys(self, latest: bool = False, *, prefix: str | bytes | None = None) -> list[K]:
        """Return all keys, in the order in which they were first put; `latest` as for `get`.

        Once the topic was compacted and trimmed, a process that begins later has them in the order
        of their last changes.

        - `prefix`: only the keys that begin with it, a str or bytes (default: None, all keys).
        """
        begins = _every_key if prefix is None else self._codec.begins_with(prefix)
        names = self._read(lambda: list(self._content.entries), latest)
        return [self._codec.load_key(name) for name in names if begins(name)]

    def expires_at(self, key: K, *, latest: bool = False) -> dt.datetime | None:
        """Return the log's time (UTC) from which on the key is to be removed; None if it does not
        expire, or has no value. `latest` as for `get`.

        >>> with xl.SharedMap(topic) as sessions:
        ...     _ = sessions.put("a", "new", ttl=3600), sessions.put("b", "new")
        ...     sessions.expires_at("a") > dt.datetime.now(dt.UTC), sessions.expires_at("b")
        (True, None)
        """
        name = self._dump_key(key)
        until = self._read(lambda: self._content.until(name), latest)
        return None if until is None else from_ms(until)

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

    def put(
        self,
        key: K,
        value: V | None,
        *,
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> V | None:
        """Set the key's value; None removes the key. Returns the previous value, or None.

        - `ttl`: remove the key after so many seconds, or a timedelta, of the log's time, unless it
          is written again before (default: None, never).
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
        >>> with xl.SharedMap(topic) as sessions:
        ...     sessions.put("session/7", "ann", ttl=dt.timedelta(minutes=30))
        ...     sessions.get("session/7")
        'ann'
        """
        data = None if value is None else self._codec.dump(value)
        name = self._dump_written(key)
        return self._written(self._set(name, data, _core.ANY, ttl, transaction)[1], name)

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
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> tuple[bool, bytes | None]:
        """Set the value if it is `expected` (None: no value). Returns (matched, value before)."""
        if ttl is not None:
            return self._set_for(ttl_ms(ttl), name, data, expected, transaction)
        if transaction is not None:
            return self._append(partial(set_if, name, data, expected), None, transaction)
        found = self._set_at_once(name, data, expected, True)
        if found is NOT_NOW:  # the slow path: it has to wait, or raises
            return self._append(partial(set_if, name, data, expected))
        made: bool
        old: bytes | None
        made, old, seen = found
        self._settled(seen)
        return made, old

    def _set_for(
        self,
        lasts: int,
        name: bytes,
        data: bytes | None,
        expected: Any,
        transaction: Transaction | None,
    ) -> tuple[bool, bytes | None]:
        """As `_set`; the value expires after `lasts` milliseconds."""

        def compute(content: AnyContent) -> tuple[list[Item], tuple[bool, bytes | None]]:
            return set_if(name, timed(data, self._deadline(lasts)), expected, content)

        return self._append(compute, None, transaction)

    def __setitem__(self, key: K, value: V | None) -> None:
        self._set(self._dump_written(key), self._codec.pack(value), _core.ANY)

    def put_if_absent(
        self,
        key: K,
        value: V | None,
        *,
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> Change[V]:
        """Set the key's value if it has none. If it had one, the `Change` is false, and its
        `previous` is that value. `ttl` and `transaction` as for `put`."""
        name = self._dump_written(key)
        made, old = self._set(name, self._codec.pack(value), None, ttl, transaction)
        previous = self._codec.unpack(old, name)
        return Change(made, previous, value if made else previous)

    def replace(
        self,
        key: K,
        expected: V | None,
        value: V | None,
        *,
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> Change[V]:
        """Set the key's value if its present value is `expected`: equal, and of the same types
        (None: no value). If it is another one, nothing is appended (rule I3), the `Change` is
        false, and its `previous` is the present value. `ttl` and `transaction` as for
        `put`."""
        name, data, wanted = (
            self._dump_written(key),
            self._codec.pack(value),
            self._codec.pack(expected),
        )
        while True:
            made, old = self._set(name, data, wanted, ttl, transaction)
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
        ttl: Ttl | None = ...,
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
        ttl: Ttl | None = ...,
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
        ttl: Any = NOTHING,
        transaction: Any = None,
        **more: Any,
    ) -> Change[V] | None:
        """Set one key's value by a function, or several keys' values, atomically.

        - `update(key, fn)`: set it to `fn(value)`, or with `with_key=True` to `fn(key, value)`.
          None means no value, as argument and as result. Returns a `Change`. `fn` may be called
          more than once. `ttl` as for `put`; if it is not given, the key expires when it would have
          expired before.
        - `update(values, name=value, ...)`: set those of a mapping or of (key, value) pairs, and
          those that are named, as `dict.update`. They do not expire; see `put_all`.
        - `transaction`: as for `put`.
        """
        if fn is None:
            if with_key is not False:
                more["with_key"] = with_key
            if ttl is not NOTHING:
                more["ttl"] = ttl
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
        name, lasts = self._dump_written(key), _given_ms(ttl)

        def compute(content: AnyContent) -> tuple[list[Item], Change[V]]:
            old = content.entries.get(name)
            unpack = self._codec.unpack
            given = unpack(old, name)  # a new object, which `fn` may change
            new = self._codec.pack(fn(key, given) if with_key else fn(given))
            items = change(content, name, renewed(content, name, new, self._until(lasts)))
            return items, Change(bool(items), unpack(old, name), unpack(new, name))

        return self._append(compute, None, transaction)

    def update_multiple(
        self,
        filter: Callable[[K], object] | None,
        fn: Callable[[K, V], V | None],
        *,
        ttl: Ttl | None = NOTHING,
        transaction: Transaction | None = None,
    ) -> dict[K, V | None]:
        """Set the values of all keys for which `filter(key)` is true (None: of all keys) to
        `fn(key, value)`, in one atomic append.

        - `ttl`: as for `put`; if it is not given, keys expire when they would have expired before.

        Returns {key: new value} of the keys that changed, or were given a `ttl`; None for those
        that were removed. Other keys' values are not decoded. Both functions may be called more
        than once. `transaction` as for `put`."""
        lasts = _given_ms(ttl)

        def compute(content: AnyContent) -> tuple[list[Item], dict[K, V | None]]:
            items: list[Item] = []
            changed: dict[K, V | None] = {}
            until = self._until(lasts)  # the same for all
            for name, data in content.entries.items():
                key = self._codec.load_key(name)
                if filter is None or filter(key):
                    value = fn(key, self._codec.load(data, name))
                    new = self._codec.pack(value)
                    if new != data or lasts is not NOTHING:
                        changed[key] = value
                        items.append((name, renewed(content, name, new, until)))
            return items, changed

        return self._append(compute, None, transaction)

    def _until(self, lasts: Any) -> Any:
        return lasts if lasts is None or lasts is NOTHING else self._deadline(lasts)

    def put_all(
        self,
        values: Mapping[K, V],
        *,
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> None:
        """Set several keys' values, all of them or none; None removes a key. `ttl` and
        `transaction` as for `put`."""
        given = [(self._dump_written(k), self._codec.pack(v)) for k, v in values.items()]
        lasts = _given_ms(ttl)

        def compute(content: AnyContent) -> tuple[list[Item], None]:
            until = self._until(lasts)
            pairs = [(name, timed(data, until)) for name, data in given]
            return [item for pair in pairs for item in change(content, *pair)], None

        self._append(compute, None, transaction)

    def setdefault(  # type: ignore[override]
        self,
        key: K,
        default: V | None = None,
        *,
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> V | None:
        """Return the key's value; if it has none, set it to `default` and return that. `ttl` and
        `transaction` as for `put`."""
        return self.put_if_absent(key, default, ttl=ttl, transaction=transaction).value

    def delete(self, key: K, *, transaction: Transaction | None = None) -> V | None:
        """Remove a key. Returns the previous value, or None. `transaction` as for `put`."""
        return self.put(key, None, transaction=transaction)

    def __delitem__(self, key: K) -> None:
        if self._remove(self._dump_written(key)) is None:
            raise KeyError(key)

    def pop(self, key: K, default: Any = NOTHING, *, transaction: Transaction | None = None) -> Any:
        """Remove a key and return its value; if it has none, return `default` or raise KeyError.
        `transaction` as for `put`."""
        name = self._dump_written(key)
        old = self._remove(name, transaction)
        if old is None and default is NOTHING:
            raise KeyError(key)
        return default if old is None else self._written(old, name)

    def _remove(self, name: bytes, transaction: Transaction | None = None) -> bytes | None:
        """Remove a key; return its value before."""

        def compute(content: AnyContent) -> tuple[list[Item], bytes | None]:
            old = content.entries.get(name)
            return [] if old is None else [(name, None)], old

        return self._append(compute, None, transaction)

    def popitem(self, *, transaction: Transaction | None = None) -> tuple[K, V]:
        """Remove the key that was put last; return (key, value). KeyError if the map is empty.
        `transaction` as for `put`."""

        def compute(content: AnyContent) -> tuple[list[Item], tuple[bytes, bytes]]:
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
        """Remove all keys, with a single message; of a map with a prefix, its own ones, with a
        message for each. `transaction` as for `put`."""

        def compute(content: AnyContent) -> tuple[list[Item], None]:
            if self._prefix is not None:
                return [(name, None) for name in content.entries], None
            return [(None, None)] if content.entries else [], None

        self._append(compute, None, transaction)

    def snapshot(self) -> int:
        """Store a snapshot, so that opening the map need not read earlier messages (rule I4).
        Returns the offset after the last message that it includes: `topic.trim(before=...)` can
        remove the messages before it. A map with a prefix reads all keys from the log for it, and
        has them in memory meanwhile."""
        if self._prefix is None:
            return super().snapshot()
        self._check()
        offset, entries = map_at(self.topic, self.topic.next_offset)
        self._engine.snapshot(self.topic.id, offset, entries.to_items())
        return offset

    # ---- changes, and the past -----------------------------------------------------------

    def watch(
        self,
        key: K | None = None,
        *,
        prefix: str | bytes | None = None,
        start: Literal["earliest", "latest"] | At | None = None,
        existing: bool = False,
    ) -> MapWatch[K, V]:
        """Watch every change of one key, of the keys that begin with `prefix`, or of all keys, in
        order (rule I6); see `MapWatch`.

        - `start`: the offset of the first message to watch, or a datetime (naive: local time).
          "earliest": from the earliest map that can be restored: all changes, unless some were
          trimmed. "latest" or None, the default: only later writes.
        - `existing`: True: first return the keys that have a value as of `start`, as changes that
          have no value before, at the offset before `start`; then every change, without a gap.
          Default: False.

        Raises OffsetTrimmedError if the map as of `start` can no longer be restored.

        >>> with xl.SharedMap(topic) as jobs, jobs.watch(prefix="job/") as watch:
        ...     _ = jobs.put("job/1", "new"), jobs.put("other", 1), jobs.put("job/1", "done")
        ...     for change in watch.follow(timeout=0):
        ...         change.offset, change.key, change.previous, change.value
        (0, 'job/1', None, 'new')
        (2, 'job/1', 'new', 'done')
        >>> with xl.SharedMap(topic) as jobs, jobs.watch("job/1", existing=True) as watch:
        ...     change = watch.read_next()
        ...     change.key, change.previous, change.value
        ('job/1', None, 'done')
        """
        if key is not None and prefix is not None:
            raise TypeError("watch takes a key or a prefix, not both")
        matches = self._watched(key, prefix)
        if start in (None, "latest"):
            begin, items = self._read(
                lambda: (self._replica.position, self._content.entries.copy()), latest=True
            )
        else:
            self._check()
            begin, entries = map_since(self.topic, cast(Any, start), matches)
            items = entries.entries
        codec = self._codec
        return MapWatch(
            self.topic,
            begin,
            items,
            matches,
            codec.load_key,
            codec.load,
            existing,
            expecting(self),
        )

    def _watched(self, key: K | None, prefix: str | bytes | None) -> Callable[[bytes], bool]:
        """Whether a watch returns the changes of a key, as bytes."""
        if key is not None:
            return self._dump_written(key).__eq__
        if prefix is None:
            return self._holds
        begins, holds = self._codec.begins_with(prefix), self._holds
        return lambda name: begins(name) and holds(name)

    def _entries_at(self, when: At) -> dict[bytes, bytes]:
        return map_at(self.topic, when, None if self._prefix is None else self._holds)[1].entries

    def at(self, when: At) -> dict[K, V]:
        """Return the map as it was before the message at an offset, or at a time (a datetime;
        naive: local time).

        A write of several keys, or a transaction, is several messages of the same time. At an
        offset between them, the map has a part of that write. At a time it has all of a write or
        nothing, so `at(topic[offset].published_at)` is the map before the whole write.

        Raises OffsetTrimmedError if any messages were trimmed, and the newest snapshot is later.

        >>> with xl.SharedMap(topic) as settings:
        ...     settings.put_all({"host": "db-1", "port": 1})
        ...     settings.at(0), settings.at(1), settings.at(2)
        ...     settings.at(topic[1].published_at)
        ({}, {'host': 'db-1'}, {'host': 'db-1', 'port': 1})
        {}
        """
        self._check()
        return self._codec.load_all(self._entries_at(when))

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
        old, new = self._entries_at(a), self._entries_at(b)
        return {
            self._codec.load_key(name): (unpack(old.get(name), name), unpack(new.get(name), name))
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        }

    # ---- notebooks -----------------------------------------------------------------------

    def _repr_html_(self) -> str:
        return html_of(self, self._as_html)

    def _as_html(self) -> str:
        if self.topic.engine.backend.is_remote:
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
    expires_at_async = in_background(expires_at)
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
    name = shared._dump_written(key)
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


def _every_key(name: bytes) -> bool:
    return True


def _given_ms(ttl: Any) -> Any:
    return ttl if ttl is None or ttl is NOTHING else ttl_ms(ttl)
