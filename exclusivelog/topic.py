"""Topics: creating and inspecting them, opening producers and readers on them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypedDict, Unpack, cast, overload

from exclusivelog.arguments import (
    as_int,
    check_flag,
    check_name,
    check_not_internal,
    check_queue_options,
    check_seconds,
    is_internal,
    is_whole,
)
from exclusivelog.backend import EngineBackend, Opened, ProducerRequest, TopicStore
from exclusivelog.closing import OfThisProcess
from exclusivelog.events import EVENTS
from exclusivelog.lookups import message_at, messages_in
from exclusivelog.messages import check_info, encode_properties, to_ms
from exclusivelog.notebook import facts, html_of
from exclusivelog.owners import OwnerWatch, RecordedChanges
from exclusivelog.producer import Options, Producer, ProducerFuture
from exclusivelog.reader import Message, Reader, Start
from exclusivelog.serde import pick_dumps
from exclusivelog.terms import OnFenced, Terms
from exclusivelog.transaction import Claim
from exclusivelog.types import (
    UNCHANGED,
    AccessMode,
    Announcement,
    ModeName,
    OwnerInfo,
    Retention,
    TopicStats,
    TransferInfo,
    Unchanged,
    WaiterInfo,
)
from exclusivelog.waits import await_all, give_up_all

__all__ = ["Topic"]

COMPRESSIONS = ("lz4", "zstd", None)
SENDING = """
    linger max_batch_messages max_batch_bytes max_pending_bytes on_fenced on_wanted follow
""".split()


ROW = ("topic", "kind", "messages", "epoch", "owner", "waiters")  # of a topic in a notebook


class TermOptions(TypedDict, total=False):
    """The further options of `Topic.terms`; `Topic.producer` describes each."""

    properties: Mapping[str, str] | None
    announce: Mapping[str, str] | None
    linger: float
    max_batch_messages: int
    max_batch_bytes: int
    max_pending_bytes: int
    serializer: Any


class AnyOptions(TermOptions, total=False):
    """The options of all producers, also of asyncio's; `Topic.producer` describes each."""

    name: str | None
    follow: bool


class QueueOptions(TypedDict, total=False):
    """The options of a producer that may wait in the queue; `Topic.producer` describes each."""

    priority: int
    timeout: float | None
    settle: float


class ManyOptions(AnyOptions, QueueOptions, total=False):
    """The options of `Engine.producers`."""

    on_fenced: Callable[[Producer, Any], object] | None
    on_wanted: Callable[[Producer], object] | None
    claim: Claim | None


class ProducerOptions(ManyOptions, total=False):
    """The options of `Topic.producer`."""

    topic_epoch: int | None


class Topic(OfThisProcess):
    """An ordered log of messages with dense offsets from 0. `engine.topic` returns it.

    >>> topic = engine.topic("orders")
    >>> topic.name, topic.epoch, topic.next_offset, topic.owner
    ('orders', 0, 0, None)

    `len(topic)` is the number of its messages, without those that were trimmed. `bool(topic)` is
    always True, also if it is empty.

    >>> with topic.producer() as producer:
    ...     _ = producer.send_many([b"a", b"b", b"c"])
    >>> _ = topic.trim(before=1)
    >>> len(topic), topic.first_offset, topic.next_offset
    (2, 1, 3)
    """

    def __init__(self, engine: Opened, topic: int, name: str) -> None:
        self.id = topic
        self.name = name
        self.engine: Any = engine  # that it was opened with
        self._engine: EngineBackend = engine.backend
        self._store: TopicStore = self._engine.topic_store(topic)

    # ---- facts ---------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of owners that the topic has had (rule B1)."""
        return self._store.facts().epoch

    @property
    def first_offset(self) -> int:
        """The offset of the first message that was not trimmed."""
        return self._store.facts().first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        return self._store.latest().next_offset

    def __len__(self) -> int:
        first = self.first_offset  # read it first: a trim may come between the two reads
        return self.next_offset - first

    def __bool__(self) -> bool:
        return True  # `if topic:` must not depend on the number of messages

    @property
    def owner(self) -> OwnerInfo | None:
        """The session that owns the topic; None if no live engine owns it."""
        return self._store.owner()

    @property
    def holders(self) -> list[OwnerInfo]:
        """The sessions that may write: the owner's, or those of the shared producers."""
        return self._store.holders()

    @property
    def transfer(self) -> TransferInfo | None:
        """The topic's hand-over to another engine: its state, source, destination and deadline
        (rules E1, E3). None if no hand-over is under way, or it can no longer succeed.

        >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        ...     topic = a.topic("orders")
        ...     producer = topic.producer("exclusive")
        ...     _ = a.unload("orders", to=b.id)
        ...     topic.transfer.state, topic.transfer.target.name, topic.owner
        ('assigned', 'b', None)
        """
        return next((each for each in self.transfers if each.producer is None), None)

    @property
    def transfers(self) -> list[TransferInfo]:
        """The topic's hand-over, if there is one, and those of single shared producers
        (`Producer.move`)."""
        return self._store.transfers()

    @property
    def waiters(self) -> list[WaiterInfo]:
        """The producers in the topic's queue, in the order of their promotion (rule D1)."""
        return self._store.waiters()

    @property
    def kind(self) -> str:
        """What the topic holds: "messages", "map" (`SharedMap`), "state" (`SharedState`), or
        "events" (`__events__`). A map that was last written in ledger format 3 is shown as "state"
        if it has a snapshot, and as "messages" if not.

        >>> topic = engine.topic("settings")
        >>> with xl.SharedMap(topic) as settings:
        ...     _ = settings.put("colour", "blue")
        >>> topic.kind, topic.serializers
        ('map', {'key': 'str', 'value': 'msgpack'})
        """
        return "events" if self.name == EVENTS else self._store.kind()[0]

    @property
    def serializers(self) -> dict[str, str | None]:
        """The names of a map's serialisers, by "key" and "value" (None: the application's own);
        empty if the topic's `kind` is not "map"."""
        return self._store.kind()[1]

    @property
    def announcement(self) -> Announcement | None:
        """The last announcement of an owner of the topic (`Producer.announce`); None if there is
        none. It stays when that owner leaves, until a later owner announces. Deleting the topic
        removes it.

        >>> with topic.producer("exclusive", announce={"address": "tcp://127.0.0.1:7001"}):
        ...     topic.announcement.info["address"], topic.announcement.epoch
        ('tcp://127.0.0.1:7001', 1)
        """
        return self._store.announcement()

    def watch_owner(self, start: Start = "latest") -> OwnerWatch:
        """Watch every change of the topic's owner as it comes, without polling.

        - `start`: "latest": the changes from now on; "earliest": all that `__events__` still has
          (on a cluster, all); a datetime or timedelta, as in `reader`; or a `position` of a former
          watch. Default: "latest".

        Each change is an `Event`, as in `engine.history(topic)`; those of shared producers and the
        steps of hand-overs are among them. On a cluster, every start but "latest" reads the topic's
        log from its first record, and the death of an owner, which is no record, is told by this
        engine: see docs/cluster.md.

        >>> with topic.producer("exclusive", name="leader"):
        ...     pass
        >>> with topic.watch_owner("earliest") as watch:
        ...     [(event.kind, event.epoch) for event in watch.follow(timeout=0)]
        [('grant', 1), ('release', 1)]
        """
        self._engine.check_supports("owner_watches")
        self._engine.check_open()
        changes = self._engine.watch_owner(self.id, start)
        if changes is None:
            changes = RecordedChanges(self.name, self.engine.topic(EVENTS).reader(start))
        return OwnerWatch(self.name, changes)

    # ---- write ---------------------------------------------------------------------------

    def producer(
        self,
        access_mode: AccessMode | ModeName = AccessMode.SHARED,
        *,
        name: str | None = None,
        priority: int = 0,
        topic_epoch: int | None = None,
        timeout: float | None = None,
        settle: float = 0.0,
        properties: Mapping[str, str] | None = None,
        announce: Mapping[str, str] | None = None,
        linger: float = 0.0,
        max_batch_messages: int = 100_000,
        max_batch_bytes: int = 1 << 20,
        max_pending_bytes: int = 64 << 20,
        serializer: Any = None,
        on_fenced: Callable[[Producer, Any], object] | None = None,
        on_wanted: Callable[[Producer], object] | None = None,
        follow: bool = True,
        claim: Claim | None = None,
    ) -> Producer:
        """Open a producer (PIP-68; the table of rule A).

        - `access_mode`: shared, exclusive, wait_for_exclusive or exclusive_with_fencing.
        - `name`: sequence ids are counted for each name (rule G2). At most one live producer of a
          topic has a given name (rule A6). Default: a new, unique name, which is forgotten some
          time after its producer has ended.
        - `priority`: in the queue, higher first; a signed 64-bit number (PIP-440, rule D1).
          Other modes ignore it.
        - `topic_epoch`: the epoch that this producer had before it lost the topic. The grant keeps
          this epoch if no other producer has owned the topic since (rule B5).
        - `timeout`: seconds to wait in the queue; in shared and exclusive mode, seconds to wait
          while the topic is being handed over to this engine (rule E3). None: without limit. In all
          modes, it also bounds the wait for a process that is stopped inside a write transaction
          and blocks the request; the error names that process.
        - `settle`: the longest delay, in seconds, before a waiter that has just joined the queue
          takes a free topic, so that waiters of higher priority can reconnect first (rule D7).
          Default 0, at most 86400; other modes ignore it. Of the priorities known on the topic,
          the lowest waits the whole delay, the highest not at all, those in between in proportion;
          while only one is known, every waiter waits the whole delay. The delay starts when the
          topic becomes free, or when the ledger is opened again after all engines have closed it or
          died. A waiter that had already been queued for its delay when the topic became free is
          promoted at once. Only the delay of the best waiter counts.
        - `properties`: a mapping of str to str that other processes read in `topic.owner`.
        - `announce`: what to announce in the transaction of the grant, a mapping of str to str;
          others read it as `topic.announcement` (see `Producer.announce`). Shared producers
          cannot announce.
        - `linger`: seconds that `send_async` may hold a message back to commit it with
          others. 0: no deliberate delay.
        - `max_batch_messages`, `max_batch_bytes`: the largest batch that is encoded as one entry.
          Checkpoints pack small entries into larger ones.
        - `max_pending_bytes`: `send_async` commits when this many bytes wait for a commit.
        - `serializer`: bytes, str, json, msgpack, exact (names of `exclusivelog.serde`), a Serde, a
          pydantic model, a dataclass, an object with `dumps`, or a function that returns bytes
          (rule G1). Default: values are bytes.
        - `on_fenced`: called with (producer, error), in a thread of its own, when the topic
          is lost (rule C6).
        - `on_wanted`: called with (producer), in a thread of its own, when another producer begins
          to wait for the topic that this one owns; it may close this producer to release the topic.
        - `follow`: True: after a hand-over to an engine of this process, sends go through that
          engine. False: any hand-over ends this producer. Use it if a send is correct only after
          the owner has read all earlier messages (rule E2).
        - `claim`: a claim of this engine, or a role's (`role.claim`), that the producer is bound
          to. It can append, or wait in the queue, only while the claim is held; each append checks
          that in its critical section. Afterwards every call raises ProducerRevokedError (rules
          B4, F5). Implies `follow=False`.

        Raises ProducerBusyError, ProducerFencedError, InvalidEpochError, WaitTimeoutError,
        TopicNotFoundError, TopicTerminatedError, OwnershipLostError (`claim` is lost); ValueError
        and TypeError for wrong arguments. A request that is refused, times out or is interrupted
        changes nothing (rule A2).

        >>> leader = topic.producer("exclusive", name="leader")
        >>> leader.topic_epoch
        1
        >>> topic.producer("exclusive")
        Traceback (most recent call last):
            ...
        exclusivelog.errors.ProducerFencedError: topic 'orders' is not free for an exclusive \
producer; it is held by producer 'leader' ...
        """
        future, request = self._request(
            access_mode,
            name=name,
            priority=priority,
            topic_epoch=topic_epoch,
            timeout=timeout,
            settle=settle,
            properties=properties,
            announce=announce,
            linger=linger,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            max_pending_bytes=max_pending_bytes,
            serializer=serializer,
            on_fenced=on_fenced,
            on_wanted=on_wanted,
            follow=follow,
            claim=claim,
        )
        try:
            self._engine.open_producer(future, request)
            return future.result()
        except BaseException:
            future.give_up()  # interrupted, perhaps
            raise

    def producer_async(
        self,
        access_mode: AccessMode | ModeName = AccessMode.SHARED,
        **options: Unpack[ProducerOptions],
    ) -> ProducerFuture:
        """Open a producer as `producer` does, with the same options, and return a future at once.

        The future returns the producer once it is promoted, or raises WaitTimeoutError after
        `timeout`. `cancel()` removes the request, or returns False if it was already granted (rule
        D5). A waiter needs no thread. A refused request raises from the future; wrong arguments
        raise from this call.

        >>> with topic.producer("exclusive"):
        ...     standby = topic.producer_async("wait_for_exclusive", priority=7)
        ...     standby.done()
        False
        >>> standby.result(timeout=5).topic_epoch
        2
        """
        for name in options.keys() - ProducerOptions.__annotations__.keys():
            raise TypeError(f"producer_async takes no option {name!r} (rule A4)")
        future, request = self._request(access_mode, **options)
        self._engine.open_producer(future, request)
        return future

    def terms(
        self,
        name: str | None = None,
        priority: int = 0,
        *,
        timeout: float | None = None,
        settle: float = 0.0,
        **options: Unpack[TermOptions],
    ) -> Terms:
        """Lead in a loop: iterate over the turns of this process as the topic's owner. Between two
        turns it waits in the queue.

        - `name`, `priority`, `settle`: of each request, as in `producer`.
        - `timeout`: seconds that each wait takes at most. None, the default: without limit.
        - `options`: `properties`, `announce`, `linger`, `max_batch_messages`, `max_batch_bytes`,
          `max_pending_bytes` and `serializer`, as in `producer`.

        Each turn is a `Term`: `with term as producer` gives the producer. If the topic is lost, the
        block ends quietly, and the loop waits again. If the block ends by itself, the topic is
        given up, and the loop waits at the end of the queue. Any other exception ends the loop,
        and gives the topic up, as `break` does. `Terms.stop` ends the loop from elsewhere. Nothing
        is requested before the first turn, and a waiter that is fenced queues again.

        The loop raises WaitTimeoutError after `timeout`, EngineClosedError once the engine is
        closed, TopicTerminatedError and TopicNotFoundError once the topic is terminated or deleted.

        >>> for term in topic.terms(name="worker-1"):
        ...     with term as producer:
        ...         print("epoch", term.epoch)
        ...         if term.epoch > 1:
        ...             break
        ...         with topic.producer("exclusive_with_fencing"):    # another process takes over
        ...             producer.send(b"too late")                    # and this ends the block
        epoch 1
        epoch 3
        """
        check_term_options(options)
        mode = AccessMode.WAIT_FOR_EXCLUSIVE
        self._request(
            mode, name=name, priority=priority, timeout=timeout, settle=settle, **options
        )  # only checked

        def request(seconds: float | None, on_fenced: OnFenced) -> ProducerFuture:
            return self.producer_async(
                mode,
                name=name,
                priority=priority,
                timeout=seconds,
                settle=settle,
                follow=False,
                on_fenced=on_fenced,
                **options,
            )

        return Terms(request, timeout)

    def _request(
        self, access_mode: AccessMode | ModeName, **options: Unpack[ProducerOptions]
    ) -> tuple[ProducerFuture, ProducerRequest]:
        sending = sending_options(options)
        request = _request_for(self, access_mode, options, sending.on_wanted is not None)
        return ProducerFuture(self._engine, self.id, self.name, sending), request

    # ---- keep ----------------------------------------------------------------------------

    def compact(self) -> int:
        """Rebuild the topic's compacted view: the last message of every key, at its own offset.

        A tombstone removes its key; a message without a key stays (rule G7). Readers with
        `read_compacted=True` see the view. Appends continue meanwhile. Returns the number of
        messages in the view.

        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b"1", b"2", b"3", None], keys=["a", "b", "a", "b"])
        >>> topic.compact()
        1
        >>> [(m.offset, m.key, m.value) for m in topic.reader(read_compacted=True)]
        [(2, b'a', b'3')]
        """
        return self._store.compact()

    def trim(
        self,
        before: int | dt.datetime | None = None,
        max_bytes: int | None = None,
        *,
        dry_run: bool = False,
    ) -> int:
        """Remove old messages permanently (rule G8). Returns the topic's new first offset.

        - `before`: an offset, or a datetime (naive: local time). Earlier messages are removed.
        - `max_bytes`: how many bytes of the newest entries may stay, without those in the journal.
          An entry has up to about 1 MB of messages that were sent one by one, or one batch; the
          newest one stays in any case, unless `max_bytes` is 0.
        - `dry_run`: True removes nothing, and returns the first offset that would stay.

        It takes one of them, or both: TypeError if neither is given.

        Sequence ids stay used. A reader whose position is removed raises OffsetTrimmedError or
        continues at the earliest message, according to its option `trimmed`. If the topic holds a
        shared map, a snapshot of it is stored first. If it holds another shared state, and the
        newest snapshot does not cover what would be removed, this raises StateError.

        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b"a", b"b", b"c"])
        >>> topic.trim(before=2), [message.value for message in topic.reader()]
        (2, [b'c'])
        """
        check_flag("dry_run", dry_run)
        if dry_run:
            self._engine.check_open()
        else:
            self._engine.check_writable()
        if before is None and max_bytes is None:
            raise TypeError(
                "trim takes before= (an offset or a datetime), max_bytes=, or both; none was given"
            )
        before, max_bytes = as_int(before), as_int(max_bytes)
        if isinstance(before, bool) or not isinstance(before, (int, dt.datetime, type(None))):
            raise TypeError(f"before={before!r}: it takes an offset, a datetime or None")
        if isinstance(before, int) and before < 0:
            raise ValueError(f"before={before}: it takes an offset from 0 on")
        _check_max_bytes(max_bytes)
        if isinstance(before, dt.datetime):
            return self._store.trim(0, to_ms(before), max_bytes, dry_run)
        return self._store.trim(before or 0, None, max_bytes, dry_run)

    def retention(
        self,
        max_age: float | dt.timedelta | Unchanged | None = UNCHANGED,
        max_bytes: int | Unchanged | None = UNCHANGED,
        keep: Literal["keys"] | Unchanged | None = UNCHANGED,
    ) -> Retention:
        """Return the topic's retention; or change it: old messages are removed in the background
        from now on (rule G8), by any process that has the ledger open.

        An argument that is left out changes nothing, so `topic.retention()` only tells.

        - `max_age`: seconds, or a timedelta, since a message was published. Messages that seem to
          be more than an hour too old are removed only after another hour (or `max_age`, if that is
          less), because the clock may have been set ahead by mistake.
        - `max_bytes`: how many bytes of the newest entries are kept, as in `trim`; for compressed
          entries, their compressed size counts.
        - `keep`: "keys": compact the topic before messages are removed, by retention or `trim`, so
          that readers with `read_compacted=True` still find the last message of every key. Without
          it, the keys of a topic that was never compacted go with its messages.

        None removes a limit; a new topic has none of the three, and keeps everything.

        Messages that a shared state's newest snapshot does not cover are kept (rule I4). The topic
        `__events__` keeps its newest 250,000 by default; `max_age=math.inf` keeps all of them.

        >>> topic.retention(max_age=dt.timedelta(days=7), max_bytes=1 << 30)
        Retention(max_age=604800.0, max_bytes=1073741824, keep=None)
        >>> topic.retention(max_age=None)
        Retention(max_age=None, max_bytes=1073741824, keep=None)
        """
        changes: dict[str, Any] = {}
        if max_age is not UNCHANGED:
            changes["max_age"] = _max_age(max_age)
        if max_bytes is not UNCHANGED:
            max_bytes = as_int(max_bytes)
            _check_max_bytes(max_bytes)
            changes["max_bytes"] = max_bytes
        if keep is not UNCHANGED:
            if keep not in ("keys", None):
                raise ValueError(f"keep={keep!r}: it takes 'keys' or None")
            changes["keep"] = keep
        if not changes:
            return self._store.retention()
        self._engine.check_writable()
        return self._store.retain(changes)

    def compression(self, method: Literal["lz4", "zstd"] | None) -> None:
        """Compress the topic's messages on disk from now on, from all processes. Readers need no
        setting: they read compressed and uncompressed messages.

        - `method`: "lz4": new messages are compressed with LZ4; what is already stored stays as it
          is. "zstd": the same, and any process that has the ledger open compresses messages older
          than ten minutes again with Zstandard, in the background: about half as many bytes as
          with LZ4, and slower to read. None, the setting of a new topic: new messages are not
          compressed.

        Every process that writes to the ledger, or reads the topic, needs the library: `pip install
        'exclusivelog[lz4]'` or `'exclusivelog[zstd]'`. Without it, `open`, reads and this call
        raise MissingLibraryError. `stats` shows the ratio.

        >>> topic.compression("lz4")
        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b'{"order": %d, "state": "paid"}' % n for n in range(9000)])
        >>> topic.stats().compression, topic.stats().ratio > 2
        ('lz4', True)
        """
        self._engine.check_writable()
        if method not in COMPRESSIONS:
            raise ValueError(f"method={method!r}: it takes 'lz4', 'zstd' or None")
        check_not_internal(self.name)
        self._store.compress(method)

    def stats(self, storage: bool = True) -> TopicStats:
        """Figures of the topic: messages, waiters, reader groups, and how the messages are stored
        (compression, and bytes with and without it). See `TopicStats`.

        - `storage`: False leaves out how they are stored, which takes a scan that reads the end of
          each entry. The fields about entries are 0 then. Default: True.

        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b"%d" % n for n in range(100_000)])
        >>> stats = topic.stats()
        >>> stats.compression, stats.entries, stats.raw_bytes == stats.stored_bytes, stats.ratio
        (None, 1, True, 1.0)
        >>> topic.stats(storage=False).messages
        100000
        """
        return self._store.stats(storage)

    def terminate(self) -> int:
        """Terminate the topic permanently: it can be read, but not written again (rule G8).

        Returns the offset after the last message. Its producers and waiters hold and await it no
        more: they raise TopicTerminatedError at their next call, and so do readers that reach the
        end. A role with this topic goes on with its others.

        >>> topic.terminate()
        0
        """
        self._engine.check_writable()
        check_not_internal(self.name)
        return self._store.terminate()

    # ---- read ----------------------------------------------------------------------------

    def reader(
        self,
        start: Start = "earliest",
        *,
        inclusive: bool = True,
        read_compacted: bool = False,
        group: str | None = None,
        generation: int | None = None,
        trimmed: Literal["error", "earliest"] = "error",
        deserializer: Any = None,
        key_deserializer: Any = None,
    ) -> Reader:
        """Open a reader (rule G5).

        - `start`: "earliest"; "latest" (the end: only later messages); an offset; -n: the last n
          messages, or all if there are fewer; a datetime (naive: local time): the first message
          published at that time or later; a timedelta: the first message published at that time
          before now, or later.
        - `inclusive`: False begins after the message at that offset or time.
        - `read_compacted`: read the present compacted view, if there is one (see `compact`), then
          all messages after it (rule G7).
        - `group`: become the only reader of this group on the topic. The group's former reader is
          fenced, and raises ReaderFencedError from then on (rule F6). The new one continues at the
          group's last `reader.commit()`, or at `start` if there is none. It claims (group, topic)
          as `engine.own` does. `engine.reader` reads several topics of a group.
        - `generation`: the generation of that claim, as in `engine.own`. None takes the next one.
          A number below the last one is refused with OwnershipError. An equal or higher one, and
          always 0, fences the group's former reader.
        - `trimmed`: what to do if the position has been trimmed: "error" raises
          OffsetTrimmedError, "earliest" continues with the first remaining message (rule G8). A
          compacted reader that has read messages raises it also with "earliest" if it may have
          missed the deletion of a key (rule G12).
        - `deserializer`, `key_deserializer`: bytes, str, json, msgpack, exact (names of
          `exclusivelog.serde`), a Serde, a pydantic model, a dataclass, an object with `loads`, or
          a function of bytes. It computes `value` and `key` of each message; they raise
          DeserializationError if it raises. Default: they are bytes.

        Raises TopicNotFoundError if the topic was deleted, and what `engine.own` raises with
        `group`; ValueError and TypeError for wrong arguments.

        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b"a", b"b", b"c"])
        >>> [message.value for message in topic.reader(start=1)]
        [b'b', b'c']
        >>> [message.value for message in topic.reader(start=-1)]
        [b'c']
        >>> with topic.reader(group="billing") as reader:
        ...     _ = reader.read_next(timeout=1); reader.commit()
        >>> topic.reader(group="billing").position
        1
        """
        self._engine.check_open()
        check_flag("read_compacted", read_compacted)
        if group is None and generation is not None:
            raise ValueError(f"generation={generation!r}: it needs group= as well")
        reader = Reader(
            self._engine,
            self.id,
            self.name,
            start,
            inclusive=inclusive,
            deserializer=deserializer,
            key_deserializer=key_deserializer,
            read_compacted=read_compacted,
            trimmed=trimmed,
        )
        if group is not None:  # only now: a call that is refused must not fence another reader
            given = as_int(generation)
            reader._join(self._engine.join_group(group, {self.name: self.id}, given))
        return reader

    @overload
    def __getitem__(self, which: int) -> Message: ...
    @overload
    def __getitem__(self, which: slice) -> list[Message]: ...
    def __getitem__(self, which: int | slice) -> Message | list[Message]:
        """Read without a reader: `topic[7]` is the message at offset 7, `topic[-1]` the last one,
        `topic[10:20]` a list of those from 10 to 19, and `topic[-3:]` of the last three. Values and
        keys are bytes.

        A slice ends where the topic ends. Raises IndexError if there is no such message, and
        OffsetTrimmedError if it was trimmed.

        >>> with topic.producer() as producer:
        ...     _ = producer.send_many([b"a", b"b", b"c"])
        >>> topic[0].value, topic[-1].value, [message.value for message in topic[1:]]
        (b'a', b'c', [b'b', b'c'])
        >>> [message.offset for message in topic]
        [0, 1, 2]
        """
        reader, first = self.reader(), self.first_offset
        if isinstance(which, slice):
            return messages_in(reader, first, which)
        return message_at(reader, first, which)

    def __iter__(self) -> Iterator[Message]:
        """Iterate over the messages from the earliest up to the present end."""
        return iter(self.reader())

    # Python's own would begin at the number of messages, as if none was trimmed.
    __reversed__ = None

    def _row(self) -> tuple[object, ...]:
        """What the topic has for each of `ROW`."""
        holders = self.holders
        owner = holders[0].producer_name if len(holders) == 1 else f"{len(holders)} shared"
        shown = owner if holders else "-"
        return self.name, self.kind, len(self), self.epoch, shown, len(self.waiters)

    def _repr_html_(self) -> str:
        return html_of(self, self._as_html)

    def _as_html(self) -> str:
        if self.engine.backend.is_remote:
            return facts(repr(self), [])
        places = ("first offset", self.first_offset), ("next offset", self.next_offset)
        return facts(repr(self), [*zip(ROW[1:], self._row()[1:], strict=True), *places])

    def __repr__(self) -> str:
        return f"<Topic {self.name!r}>"


def _max_age(age: float | dt.timedelta | None) -> float | None:
    """The age in seconds; ValueError or TypeError if it is wrong."""
    if isinstance(age, dt.timedelta):
        age = age.total_seconds()
    if age is not None:
        check_seconds(age, "max_age", "seconds from 0 on, a timedelta, or None")
    return as_int(age)  # type: ignore[no-any-return]


def _check_max_bytes(max_bytes: object) -> None:
    if max_bytes is not None and not (is_whole(max_bytes) and 0 <= max_bytes < 1 << 63):
        raise ValueError(f"max_bytes={max_bytes!r}: it takes bytes, 0 to 2**63 - 1, or None")


def check_term_options(options: Iterable[str]) -> None:
    """TypeError if `Topic.terms` does not take one of these options."""
    for option in options:
        if option not in TermOptions.__annotations__:
            raise TypeError(f"terms takes no option {option!r} (rule A4)")


def sending_options(options: ProducerOptions) -> Options:
    """The options that concern how the producer sends."""
    chosen = {name: options[name] for name in SENDING if name in options}  # type: ignore[literal-required]
    if options.get("claim") is not None:
        chosen["follow"] = False
    return Options(**chosen, dumps=pick_dumps(options.get("serializer")))


def open_many(
    engine: Opened, names: Iterable[str], access_mode: AccessMode | ModeName, options: ManyOptions
) -> list[ProducerFuture]:
    """Open producers on many topics; see `Engine.producers`. Only those that wait have no result
    yet."""
    mode = AccessMode.parse(access_mode)
    check_options_of_many(mode, options, ManyOptions)
    chosen = _distinct(names)
    if not chosen:
        return []
    given = cast(ProducerOptions, options)
    sending = sending_options(given)
    first = Topic(engine, 0, chosen[0])
    request = _request_for(first, mode, given, sending.on_wanted is not None)
    backend = engine.backend
    futures = [ProducerFuture(backend, 0, name, sending) for name in chosen]
    if mode.waits:
        _queue_many(backend, chosen, futures, request)
        return futures
    sessions = backend.open_producers(chosen, request, sending)
    for future, name, session in zip(futures, chosen, sessions, strict=True):
        future.topic_id = session.session.topic
        future.set_result(Producer(backend, name, session, sending))
    return futures


def _queue_many(
    backend: EngineBackend,
    names: list[str],
    futures: list[ProducerFuture],
    request: ProducerRequest,
) -> None:
    try:
        backend.queue_producers(names, futures, request)
    except BaseException:
        give_up_all(futures)  # interrupted, perhaps
        raise


def check_options_of_many(mode: AccessMode, options: Iterable[str], takes: Any) -> None:
    """TypeError if `Engine.producers` does not take one of these options in this mode."""
    for option in options:
        if option not in takes.__annotations__:
            raise TypeError(f"producers takes no option {option!r} (rule A4)")
        if option in QueueOptions.__annotations__ and not mode.waits:
            raise TypeError(
                f"producers takes the option {option!r} only with wait_for_exclusive: in the mode "
                f"{mode.value} it does not wait (rule A4)"
            )


def all_granted(futures: list[ProducerFuture]) -> list[Producer]:
    """The producers of these futures, once all of them are granted. If one fails, all others are
    closed, and leave their queues."""
    try:
        await_all(futures)
        return [future.result() for future in futures]
    except BaseException:
        give_up_all(futures)
        raise


def _distinct(names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"names={names!r}: it takes an iterable of names")
    chosen = [check_name(name, "names") for name in names]
    for name in chosen:
        if is_internal(name):
            raise ValueError(f"names: topic {name!r} is the library's own: it can only be read")
    if len(set(chosen)) < len(chosen):
        twice = next(name for name in chosen if chosen.count(name) > 1)
        raise ValueError(f"names: topic {twice!r} is named more than once")
    return chosen


def _request_for(
    topic: Topic, access_mode: AccessMode | ModeName, options: ProducerOptions, notify: bool
) -> ProducerRequest:
    """The request, once all of its options are checked."""
    mode = AccessMode.parse(access_mode)
    check_not_internal(topic.name)
    name, epoch = options.get("name"), as_int(options.get("topic_epoch"))
    if name is not None:
        check_name(name, "name")
    timeout, settle = options.get("timeout"), options.get("settle", 0.0)
    priority = check_queue_options(options.get("priority", 0), timeout, settle)
    check_flag("follow", options.get("follow", True))
    if epoch is not None and (not is_whole(epoch) or epoch < 0):
        raise ValueError(f"topic_epoch={epoch!r}: it takes an epoch, or None")
    properties = options.get("properties") or {}
    encode_properties(properties)
    announce = options.get("announce")
    if announce is not None and not mode.is_exclusive:
        raise ValueError("announce: a shared producer cannot announce; use another access_mode")
    return ProducerRequest(
        topic.id,
        mode.value,
        name,
        priority,
        epoch,
        timeout,
        int(settle * 1e9),
        dict(properties),
        None if announce is None else check_info(announce, "announce"),
        notify,
        claim_id(topic, options.get("claim")),
    )


def claim_id(topic: Topic, claim: Claim | None) -> int:
    """The id of the claim that a producer is to be bound to; 0 for none."""
    if claim is None:
        return 0
    if not isinstance(claim, Claim):
        raise TypeError(
            f"claim={claim!r}: it takes a claim of engine.own, the claim of a role, or None"
        )
    if claim.engine.backend is not topic.engine.backend:
        raise ValueError(f"claim={claim!r}: it takes a claim of the engine of the topic")
    return claim.id
