"""The engine: one open handle on a ledger, from which its producers and readers are opened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, Unpack, overload

from exclusivelog.arguments import as_int, check_flag, check_name, is_url
from exclusivelog.backend import CAPABILITIES, EngineBackend
from exclusivelog.closing import Closing
from exclusivelog.errors import TopicNotFoundError
from exclusivelog.events import EVENTS, Event, select
from exclusivelog.locks import Lock, acquire
from exclusivelog.locks import OnLost as OnLockLost
from exclusivelog.notebook import MOST_ROWS, facts, html_of, listing
from exclusivelog.producer import Producer, ProducerFuture
from exclusivelog.reader import GroupReader, Start
from exclusivelog.roles import ClaimsOfGroups, Groups, Role, RoleFuture, request_role, role_topic
from exclusivelog.roles import OnLost as OnRoleLost
from exclusivelog.topic import ROW, ManyOptions, Topic, all_granted, open_many
from exclusivelog.transaction import Claim, OnLost, Transaction, own
from exclusivelog.types import (
    AccessMode,
    ClaimInfo,
    EngineInfo,
    EngineStats,
    GroupInfo,
    ModeName,
    Move,
    Report,
    RoleInfo,
)
from exclusivelog.unload import UnloadFuture, moves, selected

__all__ = ["Engine"]


class Engine(Closing):
    """An open handle on a ledger. `exclusivelog.open` returns it; threads may share it.

    Closing it commits pending sends, releases its topics, and ends its threads. Engines that
    are still open when the interpreter exits are closed then.

    >>> with xl.open(path, name="worker-1") as engine:
    ...     with engine.topic("orders").producer() as producer:
    ...         producer.send(b"hello")
    0
    """

    def __init__(self, backend: EngineBackend) -> None:
        self.backend = backend  # what stores the log; not for applications
        self.info = info = backend.info
        self.ledger: Any = backend.ledger
        self.id, self.name, self.path = info.id, info.name, backend.path

    # ---- topics --------------------------------------------------------------------------

    def topic(self, name: str, create: bool = True) -> Topic:
        """Return the topic of that name, and create it if it does not exist.

        - `name`: 1 to 255 bytes of UTF-8 without control characters. Names that begin with "__"
          are reserved for the library.
        - `create`: False raises TopicNotFoundError, with similar names, if there is no such topic.
          Use it to read: a wrong name then does not create an empty topic. Engines opened with
          `readonly=True` never create one.

        >>> engine.topic("orders").next_offset
        0
        >>> engine.topic("order", create=False)
        Traceback (most recent call last):
            ...
        exclusivelog.errors.TopicNotFoundError: ... has no topic 'order'; did you mean 'orders'?
        """
        backend = self.backend
        backend.check_open()
        check_flag("create", create)
        return Topic(self, *backend.catalog.topic(name, create and not backend.readonly))

    @overload
    def producers(
        self,
        names: Iterable[str],
        access_mode: AccessMode | ModeName = AccessMode.SHARED,
        *,
        wait: Literal[True] = True,
        **options: Unpack[ManyOptions],
    ) -> list[Producer]: ...

    @overload
    def producers(
        self,
        names: Iterable[str],
        access_mode: AccessMode | ModeName = AccessMode.SHARED,
        *,
        wait: Literal[False],
        **options: Unpack[ManyOptions],
    ) -> list[ProducerFuture]: ...

    def producers(
        self,
        names: Iterable[str],
        access_mode: AccessMode | ModeName = AccessMode.SHARED,
        *,
        wait: bool = True,
        **options: Unpack[ManyOptions],
    ) -> list[Producer] | list[ProducerFuture]:
        """Open a producer on each of many topics, in one transaction: all of them, or none (rule
        A2); or wait for each of them in its queue (rule D9).

        - `names`: of the topics, each once; topics that do not exist are created.
        - `access_mode`: in shared, exclusive and exclusive_with_fencing, the call never waits in a
          queue. In wait_for_exclusive, each topic is granted by itself.
        - `wait`: True, the default: return the producers, in wait_for_exclusive once all are
          granted. The first request that fails then raises; all others leave their queues, and
          what was granted is released. False: return at once, a `ProducerFuture` for each topic,
          as `Topic.producer_async` does.
        - `options`: those of `topic.producer` except `topic_epoch`; `priority`, `timeout` and
          `settle` only in wait_for_exclusive. They apply to each producer. With `name`, all have
          that name; each counts the sequence ids of its own topic.

        Returns the producers, or futures, in the order of `names`. The call takes some tens of
        microseconds for each. No process can append during its transaction: to keep that short,
        open a few thousand at a time. Requests that wait are queued in transactions of about 5 ms.

        Raises what `topic.producer` raises if any of the topics is refused, also while one is being
        handed over to this engine, and LedgerCorruptedError, which names the topic, if a row of one
        is damaged; then no producer is opened, no topic created, and no other owner fenced. In
        wait_for_exclusive, each topic is decided by itself: its future raises its own error, also
        that of a damaged row. ValueError if a name occurs twice.

        On a cluster, the grants are not one transaction: docs/cluster.md says what follows from
        that.

        >>> orders, bills = engine.producers(["orders", "bills"], "exclusive")
        >>> orders.send(b"a"), bills.send(b"b"), engine.topics()
        (0, 0, ['bills', 'orders'])
        >>> standby = engine.producers(["orders", "bills"], "wait_for_exclusive", wait=False)
        >>> orders.close()
        >>> standby[0].result(timeout=10).topic_epoch, standby[1].done()
        (2, False)
        """
        self.backend.check_open()
        check_flag("wait", wait)
        futures = open_many(self, names, access_mode, options)
        return all_granted(futures) if wait else futures

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return self.backend.catalog.topics()

    def delete_topic(self, name: str) -> None:
        """Remove a topic and its messages (rule G8). If a topic of that name is created again, its
        epoch continues from this one's (rule B1).

        Raises TopicNotFoundError, and ProducerBusyError while a producer holds it or waits for it.
        """
        self.backend.check_writable()
        self.backend.catalog.delete(name)

    # ---- readers -------------------------------------------------------------------------

    def reader(
        self,
        topics: Iterable[str],
        *,
        group: str,
        generation: int | None = None,
        start: Start = "earliest",
        inclusive: bool = True,
        read_compacted: bool = False,
        trimmed: Literal["error", "earliest"] = "error",
        deserializer: Any = None,
        key_deserializer: Any = None,
    ) -> GroupReader:
        """Open one reader of a group on several topics (rule F6). See `GroupReader`.

        It has one claim on all of the topics, and its commit is one transaction.

        - `topics`: names of existing topics, at least one.
        - The other parameters are those of `topic.reader`; `start` applies to the topics on which
          the group has not committed yet.

        A former reader of the group on any of these topics is fenced on all of its topics, also on
        those that are not named here. Raises TopicNotFoundError, and OwnershipError if
        `generation` is refused.

        >>> for name in "ab":
        ...     _ = engine.topic(name).producer().send(b"to " + name.encode())
        >>> with engine.reader(["a", "b"], group="billing") as reader:
        ...     [(name, message.value) for name, message in reader]
        ...     reader.commit()
        [('a', b'to a'), ('b', b'to b')]
        """
        if isinstance(topics, str):
            raise TypeError(
                f"topics={topics!r}: it takes several names; for one topic, use topic.reader"
            )
        names = list(topics)
        if not names:
            raise ValueError("topics is empty; it takes the names of the topics to read")
        self.backend.check_writable()
        there = [self.topic(name, create=False) for name in dict.fromkeys(names)]
        readers = [
            topic.reader(
                start,
                inclusive=inclusive,
                read_compacted=read_compacted,
                trimmed=trimmed,
                deserializer=deserializer,
                key_deserializer=key_deserializer,
            )
            for topic in there
        ]
        # Only now: a call that is refused must not fence another reader.
        membership = self.backend.join_group(
            group, {t.name: t.id for t in there}, as_int(generation)
        )
        return GroupReader(readers, membership)

    # ---- claims --------------------------------------------------------------------------

    @overload
    def own(
        self,
        group: str | None,
        resources: Mapping[str, int | None],
        timeout: float | None = None,
        *,
        on_lost: OnLost | None = None,
    ) -> Claim: ...
    @overload
    def own(
        self,
        group: Mapping[str, int | None],
        *,
        timeout: float | None = None,
        on_lost: OnLost | None = None,
    ) -> Claim: ...
    def own(
        self,
        group: str | Mapping[str, int | None] | None = None,
        resources: Mapping[str, int | None] | None = None,
        timeout: float | None = None,
        *,
        on_lost: OnLost | None = None,
    ) -> Claim:
        """Claim resources, all of them or none (rules F1-F5).

        This is the `own` call of Kafka's proposal for single readers and writers. A resource is any
        name that the caller chooses. Each call creates a claim session of its own.

        - `group`: 1 to 240 bytes of UTF-8. Claims of different groups never conflict. It may be
          left out: `engine.own({name: generation})` claims in a group without a name.
        - `resources`: {name: generation}; a name has 1 to 240 bytes of UTF-8. None takes the next
          generation (the first is 1). A number below the last generation is refused. 0 is always
          granted, and the resource counts from 0 again.
        - `timeout`: seconds to wait for an owner with a higher generation to leave (None: do not
          wait), and for a process that is stopped inside a write transaction (None: no limit).
        - `on_lost`: called once with (claim, error), in a thread of its own, when the claim is
          revoked; not when it is released. A process that was stopped gets the call once it
          resumes.

        A live claim on any of these resources with an equal or lower generation is revoked as a
        whole; other claims of its engine stay. A claim ends with its process, and other processes
        may revoke it if its process is unresponsive for longer than `keepalive`. A claim guards
        only the transactions that require it (`Transaction.require`) and the producers that are
        bound to it (`claim=` of `topic.producer`, `SharedMap` and `SharedState`): they check it in
        the critical section that appends.

        Raises OwnershipError if a generation is refused; it names the owner, if one is alive.

        >>> first = engine.own("reports", {"march": None, "april": 7})
        >>> second = engine.own("reports", {"april": 7})
        >>> first.is_valid, second.generations
        (False, {'april': 7})
        """
        return own(self, group, resources, timeout, on_lost)

    def claims(self, group: str | None = None) -> list[ClaimInfo]:
        """The claims that live engines hold, oldest first, including those of group readers.

        - `group`: a group's name; "": claims without a group; None, the default: all claims.

        >>> claim = engine.own("reports", {"march": None})
        >>> [(info.group, info.generations) for info in engine.claims()]
        [('reports', {'march': 1})]
        """
        self.backend.check_open()
        return self.backend.catalog.claims(group)

    def groups(self) -> list[GroupInfo]:
        """The reader groups, one `GroupInfo` for each group and topic: its position, its lag in
        messages, and its reader.

        >>> topic.reader(group="billing").commit()
        >>> [(info.group, info.topic, info.position, info.lag) for info in engine.groups()]
        [('billing', 'orders', 0, 0)]
        """
        self.backend.check_open()
        return self.backend.catalog.groups()

    def delete_group(self, name: str) -> int:
        """Remove a reader group that is no longer used: its positions on all topics, and so its
        lag. A later reader of that name begins anew, at its `start`.

        Returns the number of topics on which the group had a position. Raises OwnershipError while
        a reader of the group is open, and ValueError if there is no such group.

        >>> with topic.reader(group="billing") as reader:
        ...     reader.commit()
        >>> engine.delete_group("billing")
        1
        >>> engine.groups()
        []
        """
        check_name(name, "name")
        self.backend.check_writable()
        count = self.backend.catalog.delete_group(name)
        if not count:
            raise ValueError(f"name={name!r}: {self.path} has no reader group of that name")
        return count

    # ---- roles ---------------------------------------------------------------------------

    def role(
        self,
        name: str,
        *,
        topics: Iterable[str] = (),
        groups: Groups = (),
        claims: ClaimsOfGroups = MappingProxyType({}),
        access_mode: AccessMode | ModeName = AccessMode.WAIT_FOR_EXCLUSIVE,
        priority: int = 0,
        timeout: float | None = None,
        settle: float = 0.0,
        on_lost: OnRoleLost | None = None,
    ) -> Role:
        """Become the only holder of a role: one name for topics, reader groups and claims.

        It combines PIP-68, PIP-440 and the `own` call of Kafka's proposal: all that the role binds
        is granted, lost and handed over in one transaction. No two processes ever have parts of
        one role, and a former holder can neither send to any of its topics, nor commit a cursor of
        its groups, nor commit a transaction that requires it.

        - `name`: 1 to 240 bytes of UTF-8 without control characters.
        - `topics`: the topics that the role owns. Each gets a new epoch with every holder; send
          with `Role.producer`.
        - `groups`: {reader group: names of the topics that it reads}; or names of groups, which
          then read the role's own topics. Read with `Role.reader`.
        - `claims`: {group: {resource: generation}}, as in `own`.
        - `access_mode`: wait_for_exclusive, the default: wait in the role's queue; exclusive: fail
          at once with ProducerFencedError; exclusive_with_fencing: take the role, and each of its
          topics, from the sessions that hold them or wait for them.
        - `priority`, `settle`: in the queue, as in `Topic.producer`.
        - `timeout`: seconds to wait in the queue, and for a process that is stopped inside a write
          transaction; None: without limit.
        - `on_lost`: called once with (role, error), in a thread of its own, when the role is lost
          or handed over; not when it is closed.

        Topics that do not exist are created. A role is granted once all of its topics are free at
        the same time and no other role has its groups and claims. It holds nothing while it waits,
        so that roles with topics in common cannot deadlock. Readers and claims that belong to no
        role are revoked, as by `own`. If the holder later loses any part, such as a topic to a
        producer that fences, it loses the whole role.

        Each request states what its role binds, and requests for the same role may state different
        things: the request of the present holder counts.

        Raises ProducerFencedError, WaitTimeoutError, OwnershipError (a generation is refused),
        TopicTerminatedError, TopicNotFoundError; ValueError and TypeError for wrong arguments.

        >>> with engine.role(
        ...     "billing", topics=["invoices", "payments"], claims={"shards": {"shard-1": None}}
        ... ) as role:
        ...     role.epoch, role.generations, role.producer("payments").send(b"3 EUR")
        (1, {'shards': {'shard-1': 1}}, 0)
        """
        future = self.role_async(
            name,
            topics=topics,
            groups=groups,
            claims=claims,
            access_mode=access_mode,
            priority=priority,
            timeout=timeout,
            settle=settle,
            on_lost=on_lost,
        )
        try:
            return future.result()
        except BaseException:
            future.give_up()  # interrupted, perhaps
            raise

    def role_async(
        self,
        name: str,
        *,
        topics: Iterable[str] = (),
        groups: Groups = (),
        claims: ClaimsOfGroups = MappingProxyType({}),
        access_mode: AccessMode | ModeName = AccessMode.WAIT_FOR_EXCLUSIVE,
        priority: int = 0,
        timeout: float | None = None,
        settle: float = 0.0,
        on_lost: OnRoleLost | None = None,
    ) -> RoleFuture:
        """Request a role as `role` does, with the same arguments, and return a future at once.

        `cancel()` removes the request, or returns False if it was already granted (rule D5).

        >>> with engine.role("billing", topics=["invoices"]):
        ...     standby = engine.role_async("billing", topics=["invoices"], priority=7)
        ...     standby.done(), [waiter.priority for waiter in engine.roles()[0].waiters]
        (False, [7])
        >>> standby.result(timeout=10).epoch
        2
        """
        return request_role(
            self, name, topics, groups, claims, access_mode, priority, timeout, settle, on_lost
        )

    def roles(self) -> list[RoleInfo]:
        """The roles of this ledger, sorted by name: their holders, waiters, and what they bind.

        >>> role = engine.role("billing", topics=["invoices"])
        >>> [(info.name, info.epoch, info.topics, info.holder.pid) for info in engine.roles()]
        [('billing', 1, ('invoices',), ...)]
        """
        self.backend.check_open()
        return self.backend.catalog.roles()

    def delete_role(self, name: str) -> None:
        """Remove a role without holder and waiters from `roles`. Its topics and messages stay, and
        its epoch continues if it is requested again.

        Raises TopicNotFoundError if there is no such role, and ProducerBusyError while it has
        a holder or a waiter.

        >>> engine.role("billing").close()
        >>> engine.delete_role("billing"), engine.roles()
        (None, [])
        """
        self.backend.check_writable()
        self.backend.catalog.delete(role_topic(name), own=True)

    # ---- locks ---------------------------------------------------------------------------

    def lock(
        self,
        name: str,
        timeout: float | None = None,
        *,
        priority: int = 0,
        on_lost: OnLockLost | None = None,
    ) -> Lock:
        """Wait for a lock, and return it: of all processes that have the ledger open, one at a time
        runs the block of `with engine.lock("job")`.

        - `name`: 1 to 240 bytes of UTF-8 without control characters.
        - `timeout`: seconds until WaitTimeoutError, which names the holder. 0 tries once. None, the
          default: without limit.
        - `priority`: in the queue, as in `Topic.producer`.
        - `on_lost`: called once with (lock, error), in a thread of its own, when the lock is lost;
          not when it is released.

        The others wait in a queue. If the holder dies, the first of them has the lock at once; if
        the holder is unresponsive for longer than its `keepalive`, it loses the lock.

        It is not reentrant: who holds the lock and asks for it again waits for itself, also in
        another thread.

        A lock is a role without parts, so the role and the lock of one name exclude each other, and
        `roles`, `history(role=...)` and `exclusivelog roles` show it. Unlike `own`, it takes
        nothing from its holder.

        >>> with engine.lock("nightly") as lock:
        ...     lock.epoch
        ...     engine.lock("nightly", timeout=0)
        Traceback (most recent call last):
            ...
        exclusivelog.errors.WaitTimeoutError: lock 'nightly' was not granted within its timeout; \
it is held by ...
        """
        return acquire(self, name, timeout, priority, on_lost)

    # ---- transactions --------------------------------------------------------------------

    def transaction(self) -> Transaction:
        """Begin a transaction: its messages to several topics, and its reader cursors, enter the
        log together or not at all (rules F6, G3). See `Transaction`.

        >>> producer = topic.producer()
        >>> with engine.transaction() as txn:
        ...     _ = producer.send(b"debit", transaction=txn)
        ...     _ = producer.send(b"credit", transaction=txn)
        >>> txn.offsets[producer]
        range(0, 2)
        """
        self.backend.check_supports("transactions")
        self.backend.check_writable()
        return Transaction(self.backend)

    # ---- hand-over -----------------------------------------------------------------------

    def unload(
        self,
        topics: str | Iterable[str],
        to: str,
        timeout: float = 10.0,
        *,
        groups: Iterable[str] = (),
        producer: str | None = None,
    ) -> list[Move]:
        """Move the ownership of topics to another engine, without an election (PIP-307, rules
        E1-E4).

        The owner, in this process or another, pauses its sends, commits what it has accepted, and
        releases the topic. Its producers raise ProducerMovedError from then on; where `to` is an
        engine of their own process, their sends go through that engine instead.

        - `topics`: a topic's name; a list of names; or, if no topic has that name, a prefix of
          names, with or without a `*` at its end ("*" alone: all topics). A topic that a role binds
          moves with the whole role, as one `Move` whose topic is the role's own, `__role__/<name>`;
          that name is accepted here, too.
        - `to`: the id of a live engine. Its best waiter becomes owner. If it has none, the topic is
          reserved for its next producer, until the deadline.
        - `timeout`: seconds until the deadline. An owner that has not released a topic by then
          keeps it; so does every owner if the move cannot begin by then, because a process is
          stopped inside a write transaction. The `reason` of the `Move` names it.
        - `groups`: groups whose claims on these topics move, each in the transaction that assigns
          the topic: those of readers with `group=`, and those of `engine.own` on a resource with
          the topic's name. The former holders raise ReaderFencedError or OwnershipLostError, whose
          `successor` is the destination. Committed positions and generations do not change.
        - `producer`: the name of the only producer to move; a shared one moves without the others
          (see `Producer.move`). None, the default: the owner.

        Returns a `Move` for each topic, with a state of its own: if one fails, the others stay
        moved. Calling it again is safe, also after an interrupt.

        Raises TopicNotFoundError, and LedgerError if there is no such engine.

        >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        ...     producer = a.topic("orders").producer("exclusive")
        ...     [move] = a.unload("orders", to=b.id)
        ...     move.topic, move.state, b.topic("orders").producer("exclusive").topic_epoch
        ('orders', 'assigned', 2)
        """
        return moves(self.backend, topics, to, timeout, groups, producer).run()

    def unload_async(
        self,
        topics: str | Iterable[str],
        to: str,
        timeout: float = 10.0,
        *,
        groups: Iterable[str] = (),
        producer: str | None = None,
    ) -> UnloadFuture:
        """Begin what `unload` does, and return a future with its list of `Move`.

        It has the same arguments and errors. When it returns, the moves of the first topics have
        begun; many topics move in turns. `future.moves()` returns the present state of all moves.
        `future.cancel()` ends the moves of topics that have not been released yet, as the deadline
        would; topics that the destination already has stay there.

        >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        ...     producer = a.topic("orders").producer("exclusive")
        ...     future = a.unload_async("orders", to=b.id)
        ...     [move] = future.result(timeout=10)
        ...     move.state
        'assigned'
        """
        begun = moves(self.backend, topics, to, timeout, groups, producer)
        return UnloadFuture(self.backend, begun)._start()

    def cancel_unload(self, topics: str | Iterable[str]) -> list[str]:
        """Cancel hand-overs that are under way (rule E4). Returns the names of their topics.

        A topic that is not released yet stays with its owner. One that is reserved for the
        destination becomes free for the best waiter.

        >>> engine.topic("orders").name, engine.cancel_unload("orders")
        ('orders', [])
        """
        self.backend.check_writable()
        return self.backend.cancel_moves(selected(self.backend, topics))

    def history(
        self, topic: str | None = None, *, group: str | None = None, role: str | None = None
    ) -> Iterator[Event]:
        """Iterate over every change of ownership so far (rule E5).

        - `topic`: only the events of this topic.
        - `group`: only the events of this group's claims; "": of claims without a group.
        - `role`: only the grants, losses and hand-overs of this role. Those of its parts are
          events of their topics and groups, with the reason "role".

        With None for all three, the default, it returns all events. To follow new ones, read the
        topic `__events__`; `Event.loads` decodes its values.

        >>> with engine.topic("orders").producer("exclusive"):
        ...     pass
        >>> [(event.kind, event.reason) for event in engine.history()]
        [('grant', 'request'), ('release', 'closed')]
        """
        self.backend.check_open()
        if role is not None:
            topic = role_topic(role)
        found = self.backend.events(topic, group)
        if found is not None:
            return found
        try:
            reader = self.topic(EVENTS, create=False).reader(trimmed="earliest")
        except TopicNotFoundError:  # nothing has happened yet
            return iter(())
        return select(iter(reader), topic, group)

    # ---- facts ---------------------------------------------------------------------------

    def engines(self) -> list[EngineInfo]:
        """The engines that have this ledger open, in any process of this machine."""
        self.backend.check_open()
        return self.backend.catalog.engines()

    def inside(self) -> EngineInfo | None:
        """The engine that is inside the ledger's critical section now; None if there is none. If
        the same engine stays there, its process was stopped, and it blocks all writers until it
        resumes or dies (see `kill_stalled` of `open`).

        >>> engine.inside() is None
        True
        """
        self.backend.check_open()
        return self.backend.catalog.inside()

    def supports(self, capability: str) -> bool:
        """Whether engines of this kind have a capability. An engine on a local ledger has all.

        - `capability`: "announcements", "backup", "bound_producers" (`claim=` of a producer, map or
          state), "claims" (`own`), "compaction", "compression", "deletion" (`delete_topic`),
          "history", "inspection" (query plans, such as Spark's), "large_messages" (above 5 MB),
          "locks" (`lock`, and a `role` that binds nothing), "many_producers" (`producers`),
          "moved_claims" (`groups=` of `unload`), "once" (`exclusivelog.once`), "owner_watches"
          (`topic.watch_owner`), "reader_groups" (`reader(group=...)`), "retention" (and `trim`),
          "roles" (those that bind topics, groups or claims), "settle", "several_claims" (`own` with
          several resources), "shared_producers", "shared_state" (SharedMap and SharedState),
          "snapshots" (of shared maps and states), "statistics" (`topic.stats`), "termination",
          "transactions", "unload" or "verify".

        A call that needs a missing capability raises UnsupportedError. Raises ValueError for an
        unknown name.

        >>> engine.supports("transactions")
        True
        """
        if capability not in CAPABILITIES:
            raise ValueError(
                f"capability={capability!r}: it takes one of {', '.join(sorted(CAPABILITIES))}"
            )
        return capability in self.backend.capabilities

    def stats(self) -> EngineStats:
        """Figures of the ledger, from all processes that have it open: what was appended and
        flushed, latencies, waiters, the lag of reader groups, sizes. See `EngineStats`.

        It reads the row of every topic (some microseconds each). If a process keeps a read
        transaction open for long, `oldest_reader` names it: the tables cannot reuse pages that
        were freed since then, and grow.

        >>> with topic.producer() as producer:
        ...     offsets = [producer.send(b"x") for _ in range(3)]
        >>> stats = engine.stats()
        >>> stats.topics, stats.appended_messages, stats.oldest_reader
        (1, 3, None)
        >>> stats.append_seconds.quantile(0.5) < 1
        True
        """
        self.backend.check_open()
        return self.backend.catalog.stats()

    def verify(self) -> Report:
        """Read the whole ledger and check it: every checksum, that offsets are dense, that epochs
        and publish times never decrease, and that all rows of its tables can be decoded (rules B8,
        G4, G9). On a cluster, it reads all
        records of the namespace; docs/cluster.md says what it checks there.

        >>> engine.verify().ok
        True
        """
        self.backend.check_open()
        return self.backend.catalog.verify()

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Write a consistent, compacted copy of the ledger, while other processes continue to
        write.

        - `path`: a directory that does not exist or is empty, on any file system.

        The copy is a ledger of its own. It has every message that was acknowledged before the call,
        and is durable when this returns. The files get the modes of their sources and the caller as
        owner.

        A backup that fails or is killed leaves a directory that `xl.open` refuses (rule H4); call
        this again with the same path to repeat the backup. Raises LedgerFullError if there is no
        room; LedgerError if `path` contains anything else, lies in the ledger, cannot be written,
        or is the target of another backup that is running; LedgerCorruptedError if the ledger is
        damaged; ValueError if `path` is empty or a URL.

        >>> with xl.open(path) as engine:
        ...     engine.backup(f"{path}-backup")
        >>> with xl.open(f"{path}-backup", create=False) as copy:
        ...     copy.verify().ok
        True
        """
        self.backend.check_open()
        if not os.fspath(path):
            raise ValueError("path is empty; name the directory that the backup goes into")
        if is_url(path):
            raise ValueError(
                f"{path} is no directory; to copy a ledger to a cluster: "
                f"exclusivelog mirror {self.path} --to {path}"
            )
        self.backend.backup(os.path.abspath(path))

    # ---- close ---------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True once it is closed, or inherited by a forked child."""
        return self.backend.forked or self.backend.closed

    def _check_enters(self) -> None:
        self.backend.check_open()

    def close(self) -> None:
        """Commit pending sends, release topics and claims, and end the threads. A second call does
        nothing, or finishes what an interrupted first call began.

        If a signal handler or a finalizer calls this during a transaction of the same thread,
        another thread closes the engine as soon as that transaction is over."""
        self.backend.close()

    def _repr_html_(self) -> str:
        return html_of(self, self._as_html)

    def _as_html(self) -> str:
        if self.backend.is_remote:
            return facts(repr(self), [])
        names = self.topics()
        rows = (self.topic(name, create=False)._row() for name in names[:MOST_ROWS])
        return listing(repr(self), ROW, rows, len(names))

    def __repr__(self) -> str:
        return f"<Engine {self.name!r} ({self.id}) on {self.path}>"
