"""`SharedState`: a state that several processes share, with a topic as its log (rules I1-I7).

Each process has the state in its own memory, and updates it from the topic. A process that writes
becomes the topic's exclusive owner, and stays the owner until another process requests the topic.

The guarantees, and their rules:

1. A write's operations are computed from the state after all earlier writes, appended atomically,
   and applied. No other process writes in between, because the writer owns the topic (B2, G3, I1).
   So writes are linearisable, in the order of the topic's offsets.
2. A read with `latest=True` sees every write that had returned before it began, in any process
   (G5, G6). Without it, a read sees all writes of this process, and those of other processes up to
   some earlier moment; later reads never see an older state.
3. A write that has returned is as durable as the engine's `durability` says (H1). One that
   raised has appended nothing, unless the error has `maybe_written` set (B9, I3) or is that of the
   function that reads its result.
4. An owner that was paused, killed or forked cannot write any more (B2, C2, C3): its write is
   retried once this process owns the topic again.
5. User functions cannot change the state, and may be called more than once. What they return is
   encoded before anything is appended, and every process applies what it decodes from that (I3).
6. With snapshots, the cost of opening depends on the size of the state, not on its history (I4).
   A snapshot is stored only if decoding it returns an equal state.
7. Writes of many threads and tasks share flushes (I5).

It follows Pulsar's shared-state manager and map (apache/pulsar#13490).
"""

from __future__ import annotations

import copy as _copy
import reprlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from exclusivelog import serde
from exclusivelog.comparing import difference
from exclusivelog.foreign import pass_on_of_a_handler
from exclusivelog.messages import MAX_MESSAGE_BYTES, Item
from exclusivelog.state.shared import SNAPSHOT_EVERY, Shared, SnapshotRefused, in_background
from exclusivelog.state.views import Scope, thaw
from exclusivelog.topic import Topic
from exclusivelog.transaction import Claim, HoldsClaim, Transaction

__all__ = ["SharedState"]

S = TypeVar("S")
Op = TypeVar("Op")
R = TypeVar("R")

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]

# (encode, decode) of serialisers that refuse what they would not give back (rule G10).
_PROVEN = frozenset(
    (one.dumps, one.loads) for one in (serde.exact, serde.msgpack, serde.json, serde.str)
)

OWN, EXACT = b"own", b"exact"  # the codec mark of a snapshot; None: the operations' codec


class StateContent(Generic[S, Op]):
    """A state in memory; applies messages to it."""

    restores_views = False
    refusals = Exception  # of the application's functions

    def __init__(
        self,
        topic: Topic,
        initial: Callable[[], S],
        apply: Callable[[S, Op], S | None],
        decode: Callable[[bytes], Any],
        codecs: dict[bytes | None, Codec],
    ) -> None:
        self.state: S
        self._topic, self._initial, self._apply = topic, initial, apply
        self._decode, self._codecs = decode, codecs

    def way_out(self, offset: int) -> str:
        """What to do about a message that the applier refuses."""
        return "open the state with an applier that can"

    def reset(self) -> None:
        """Return to the state before the first message."""
        self.state = self._initial()

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Apply one operation."""
        if key is not None:
            raise ValueError("it is not a message of a state: it has a key")
        changed = self._apply(self.state, self._decode(value or b""))
        if changed is not None:
            self.state = changed

    def to_items(self) -> list[Item]:
        """Encode the state; SnapshotRefused if decoding does not return an equal state with the
        same types."""
        refused = []
        for mark, (encode, decode) in self._codecs.items():
            try:
                data = encode(self.state)
                found = None if type(data) is bytes else "encode_state gives no bytes"
                found = found or difference(self.state, decode(data), "state")
            except Exception as error:
                pass_on_of_a_handler(error)
                found = repr(error)
            if found is None:
                return [(mark, data)]
            refused.append(found)
            if mark is OWN:
                break
        raise SnapshotRefused(
            f"topic {self._topic.name!r}: no snapshot was kept, because the state does not come "
            f"back from it: {refused[0]}. Give encode_state and decode_state that give it back"
        )

    def restore(self, items: list[Item]) -> None:
        """Replace the state by that of a snapshot."""
        [(mark, data)] = items
        codec = self._codecs.get(mark)
        if codec is None:
            raise ValueError(f"it was written with another codec ({(mark or b'').decode()})")
        self.state = codec[1](data or b"")


class SharedState(Shared, Generic[S, Op]):
    """A state that several processes share. The messages of its topic are the operations that
    change it (rule I1).

    - `initial`: a function that returns the first state (default: `dict`).
    - `apply`: `apply(state, op)` changes the state in place, or returns the new one. It must be
      deterministic, as every process calls it: no clock, no random numbers, no I/O.
    - `encode`, `decode`: an operation to and from bytes (default: `serde.exact`, which also reads
      msgpack). What is applied is what `decode` returns, also in the process that wrote it. An
      operation that cannot be decoded is not appended.
    - `encode_state`, `decode_state`: the state to and from bytes, for snapshots. Default:
      `serde.exact`, which supports Python's containers, numbers and dates; for a state that it does
      not support, `encode` and `decode`.
    - `snapshot_every`: take a snapshot in the background after so many operations (default:
      100 000; none if the engine does not support snapshots). None: only by `snapshot()`.
    - `copy`: a function that copies objects of the state other than dicts, lists, sets, tuples and
      immutable ones before they are passed to a function (default: `copy.deepcopy`). None: do not
      copy them, because they are immutable, too.
    - `timeout`: seconds that a write waits to become the topic's owner, then WaitTimeoutError
      (default: None, no limit). It does not limit the append of an owner, which waits for a
      process that is stopped inside a transaction.
    - `claim`: a claim of `engine.own`, a role or a lock of the topic's engine: each write is
      appended only while it is held, which the append compares. Afterwards writes raise
      OwnershipLostError, append nothing and change nothing; reads go on (rule I8). Default: none.

    Functions read the state through read-only views of its dicts, lists and sets: nothing is
    copied. A view is valid until the function returns; views in its result become plain copies.

    Raises StateError if the topic holds something else, TypeError or ValueError for a wrong
    argument.

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
        self,
        topic: Topic,
        initial: Callable[[], S] = dict,  # type: ignore[assignment]
        apply: Callable[[S, Op], S | None] | None = None,
        *,
        encode: Callable[[Any], bytes] = serde.exact.dumps,
        decode: Callable[[bytes], Any] = serde.exact.loads,
        encode_state: Callable[[S], bytes] | None = None,
        decode_state: Callable[[bytes], S] | None = None,
        snapshot_every: int | None = SNAPSHOT_EVERY,
        copy: Callable[[Any], Any] | None = _copy.deepcopy,
        timeout: float | None = None,
        claim: Claim | HoldsClaim | None = None,
    ) -> None:
        if not callable(initial):
            raise TypeError("initial takes a function that returns the first state")
        if not callable(apply):
            raise TypeError("apply takes a function of (state, op)")
        functions: dict[str, Any] = {
            "encode": encode,
            "decode": decode,
            "copy": copy or id,
            "encode_state": encode_state or id,
            "decode_state": decode_state or id,
        }
        for name, function in functions.items():
            if not callable(function):
                raise TypeError(f"{name} takes a function, not {function!r}")
        self._encode, self._decode, self._copy = encode, decode, copy
        self._proven = (encode, decode) in _PROVEN
        codecs = _codecs_of(encode, decode, encode_state, decode_state)
        self._content: StateContent[S, Op] = StateContent(topic, initial, apply, decode, codecs)
        super().__init__(topic, {"holds": "state"}, self._content, snapshot_every, timeout, claim)

    # ---- read and write ------------------------------------------------------------------

    def read(self, fn: Callable[[S], R], latest: bool = False) -> R:
        """Return `fn(state)`. Its argument is a read-only view; see the class.

        - `latest`: True: the state includes every write that has returned by now, in any process.
          Default: False."""
        return self._read(lambda: self._call(fn, self._content), latest)

    def _call(self, fn: Callable[[S], R], content: StateContent[S, Op]) -> R:
        self._inside = threading.get_ident()
        try:
            with Scope(self._copy) as scope:
                result: R = thaw(fn(scope.view(content.state)))
                return result
        finally:
            self._inside = 0

    def write(
        self,
        ops_fn: Callable[[S], Iterable[Op]],
        read_fn: Callable[[S], R] | None = None,
        *,
        transaction: Transaction | None = None,
    ) -> R | None:
        """Append the operations that `ops_fn(state)` returns for the newest state, all of them or
        none, and apply them; return `read_fn(state)`, or None without it.

        If there are no operations, nothing is appended. `ops_fn` may be called more than once.
        Its exception reaches the caller, and nothing is appended; after an exception of `read_fn`,
        the operations are in the log. `read_fn` is called before they are durable; its result is
        returned once they are (rules I3, I5). Raises StateError if an operation cannot be applied.

        - `transaction`: append them when that commits; both functions see what the transaction has
          written so far. See `SharedMap.put`. From the second write on, or with `read_fn`, the
          transaction copies the state.

        >>> def add(state, op):
        ...     state[op["name"]] = state.get(op["name"], 0) + op["amount"]
        >>> with xl.SharedState(topic, initial=dict, apply=add) as accounts:
        ...     with engine.transaction() as txn:
        ...         accounts.write(lambda state: [{"name": "a", "amount": -5}], transaction=txn)
        ...         accounts.write(lambda state: [{"name": "b", "amount": 5}], transaction=txn)
        ...     accounts.read(dict)
        {'a': -5, 'b': 5}
        """

        def compute(content: StateContent[S, Op]) -> tuple[list[Item], R | None]:
            with Scope(self._copy) as scope:
                ops = [thaw(op) for op in ops_fn(scope.view(content.state))]
            return [(None, self._encoded(op)) for op in ops], None

        if read_fn is None:
            return self._append(compute, None, transaction)
        return self._append(compute, lambda content: self._call(read_fn, content), transaction)

    def _fork(self) -> StateContent[S, Op]:
        fork, state = _copy.copy(self._content), self._content.state
        with Scope(self._copy) as scope:
            fork.state = thaw(scope.view(state))
        if fork.state is state:  # `copy=None`: only `apply` changes it, which it does here, too
            fork.state = _copy.deepcopy(state)
        return fork

    def _encoded(self, op: Op) -> bytes:
        data = self._encode(op)
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"encode gives {type(data).__name__} for {reprlib.repr(op)}; it must give bytes"
            )
        data = bytes(data)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"op={reprlib.repr(op)} has {len(data)} bytes; a message takes {MAX_MESSAGE_BYTES}"
            )
        if not self._proven:
            self._check_decodable(op, data)
        return data

    def _check_decodable(self, op: Op, data: bytes) -> None:
        """Raise ValueError if no process could read this operation: none could open the state."""
        try:
            self._decode(data)
        except Exception as error:
            pass_on_of_a_handler(error)
            raise ValueError(
                f"op={reprlib.repr(op)}: decode does not take what encode gives for it: {error!r}"
            ) from error

    read_async = in_background(read)
    write_async = in_background(write)


def _codecs_of(
    encode: Callable[[Any], bytes],
    decode: Callable[[bytes], Any],
    encode_state: Callable[[Any], bytes] | None,
    decode_state: Callable[[bytes], Any] | None,
) -> dict[bytes | None, Codec]:
    """{mark: codec} of snapshots; new ones are written with the first."""
    if (encode_state is None) != (decode_state is None):
        raise TypeError("encode_state and decode_state: give both or neither")
    codecs: dict[bytes | None, Codec] = {}
    if encode_state is not None and decode_state is not None:
        codecs[OWN] = encode_state, decode_state
    codecs[EXACT] = serde.exact.dumps, serde.exact.loads
    codecs[None] = encode, decode
    return codecs
