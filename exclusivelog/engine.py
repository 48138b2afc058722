"""The engine: one open handle on a ledger, and the broker of its producers and readers."""

from __future__ import annotations

import atexit
import datetime as dt
import functools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Literal, TypeVar, overload

from exclusivelog import _core, seats, threads
from exclusivelog.access import Session
from exclusivelog.backup import backup
from exclusivelog.commit import Committer
from exclusivelog.compaction import compact
from exclusivelog.encoding import encode_properties
from exclusivelog.environment import check_path
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerError,
    OwnershipLostError,
    TopicNotFoundError,
)
from exclusivelog.events import EVENTS, Event, select
from exclusivelog.group_reader import GroupReader
from exclusivelog.groups import Membership, join
from exclusivelog.handover import HandOver
from exclusivelog.ledger import DEFAULT_MAP_SIZE, DEFAULT_MAX_READERS, Ledger
from exclusivelog.lockfile import Slot
from exclusivelog.log import verify
from exclusivelog.mailbox import AnyFuture, Mailbox, ProducerFuture
from exclusivelog.ownership import Claim, Claims, OnLost, own
from exclusivelog.past import map_at
from exclusivelog.producer import Options, Producer
from exclusivelog.reader import Reader
from exclusivelog.retention import Keeper, empty_trash
from exclusivelog.role_grants import RoleGrants
from exclusivelog.role_rows import PREFIX, Definition, is_role
from exclusivelog.roles import ClaimsOfGroups, Groups, Role, RoleFuture, ask, check_role_name
from exclusivelog.roles import OnLost as OnRoleLost
from exclusivelog.sessions import MOVES, Sessions
from exclusivelog.snapshots import Item, write_snapshot
from exclusivelog.tables import Claimant, Tables
from exclusivelog.topic import (
    Topic,
    check_name,
    create_topic,
    delete_topic,
    is_internal,
    list_topics,
)
from exclusivelog.transaction import Transaction
from exclusivelog.types import AccessMode, ClaimInfo, EngineInfo, GroupInfo, Move, Report, RoleInfo
from exclusivelog.unload import UnloadFuture, Unloading, choose
from exclusivelog.waits import check_seconds

log = logging.getLogger("exclusivelog")

LONGEST_BEAT_SECONDS = 5.0
LONGEST_KEEPALIVE = 1e9  # seconds, more than thirty years
RELEASED_AT_ONCE = 1000

Found = TypeVar("Found")

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _weakly(method: Callable[[int], int]) -> Callable[[int], int]:
    """The method, for a part of an engine: what is dropped lets go of its files at once."""
    reference = weakref.WeakMethod(method)

    def call(topic: int) -> int:
        found = reference()
        if found is None:
            raise EngineClosedError("the engine is gone")
        return found(topic)

    return call


class Engine:
    """One open handle on a ledger directory. Made by `exclusivelog.open`; threads may share it.

    Closing it sends what waits, gives its topics back, and ends its threads. Engines that
    are still open when the interpreter exits are closed then.

    >>> with xl.open(path, name="worker-1") as engine:
    ...     with engine.topic("orders").producer() as producer:
    ...         producer.send(b"hello")
    0
    """

    def __init__(
        self, ledger: Ledger, name: str, properties: Mapping[str, str], keepalive: float | None,
        readonly: bool, unflushed: bool = False, kill_hung: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.path = ledger.path
        self.ledger = ledger
        self.sessions = Sessions(ledger)
        self.committer = Committer(ledger, self.run_callbacks)
        self.hand_over = HandOver(ledger, self.sessions)
        self.mailbox = Mailbox(self)
        self.keeper = Keeper(ledger, _weakly(self.renew))
        self._claims = Claims(ledger, self.sessions)
        self.sessions.roles = RoleGrants(ledger, self.sessions, self._claims)
        self._owned: dict[int, Claim | Membership] = {}  # until they are released or severed
        self.closed = False
        self.forked = False
        self._locks = threading.Lock
        self.unflushed = unflushed  # acknowledged before it is flushed (rule H1)
        self._readonly = readonly
        self._keepalive = keepalive
        self._closing = threading.RLock()
        self._closed_for_good = False
        self._producers: weakref.WeakValueDictionary[int, Producer] = weakref.WeakValueDictionary()
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._abandoned: deque[Session] = deque()
        self._given_up: deque[Claimant] = deque()
        self._orphans_wanted = False
        self._ended = threading.Event()
        self._slot: Slot | None = None
        self._guard: threading.Thread | None = None
        self._heart: threading.Thread | None = None
        self.id = "0" * 16
        self.info = EngineInfo("0" * 16, name, os.getpid(), dict(properties), 0.0)
        self._kill_hung = kill_hung
        try:
            if not readonly:
                self._join(properties)
            _engines.add(self)
        except BaseException:
            self._leave_at_once()
            raise

    def _join(self, properties: Mapping[str, str]) -> None:
        with self.ledger.lockfile.opening(), threads.needed(self.path):
            self._slot = self.ledger.lockfile.join(self.name, properties, self._keepalive)
        self.id = self._slot.engine
        self.info = EngineInfo(self.id, self.name, os.getpid(), dict(properties), 0.0)
        beat = functools.partial(self._keep_beating, self._slot, self._keepalive)
        self._heart = self._start(beat, f"exclusivelog-heart-{self.name}")
        self._clear_up()
        self._guard = self._start(self._keep_watch, f"exclusivelog-{self.name}")

    def _start(self, run: Callable[[], None], name: str) -> threading.Thread:
        keep = functools.partial(_core.keep_running, run, self._stumbled)
        return threads.start(self.path, threading.Thread(target=keep, name=name, daemon=True))

    def _stumbled(self, error: BaseException) -> None:
        log.error("engine %s: one of its threads stumbled", self.name, exc_info=error)

    def _leave_at_once(self) -> None:
        self.closed = True
        self._ended.set()
        self.keeper.stop()
        if self._slot is not None:
            self.ring()
            self._slot.leave()
        for thread in (self._heart, self._guard):
            if thread is not None:
                thread.join(timeout=60)  # it has the lock file's mapping

    # ---- state ---------------------------------------------------------------------------

    def check_alone(self) -> None:
        """EngineClosedError in a forked child (rule C5)."""
        if self.forked:
            raise EngineClosedError(
                f"engine {self.name!r} on {self.path} was inherited through fork(); open one of "
                "your own in the child"
            )

    def check_open(self) -> None:
        """EngineClosedError unless this engine can be used here (rule C5)."""
        self.check_alone()
        if self.closed:
            raise EngineClosedError(f"engine {self.name!r} on {self.path} is closed")
        if threading.Lock is not self._locks:  # since it was opened
            threads.refuse_patched(self.path)

    @property
    def busy_here(self) -> bool:
        """Does this thread hold an engine lock? A signal handler or a finalizer that runs in this
        thread then must not wait for that lock."""
        return (
            bool(self.mailbox.lock._is_owned() or self.ledger.standstill._is_owned())
            or self.committer.busy_here
        )

    def check_free(self) -> None:
        """LedgerError where this thread would wait for itself."""
        if self.busy_here:
            raise LedgerError(
                f"{self.path}: called from a signal handler or a finalizer that struck inside a "
                "transaction of this very thread; leave it to another thread, or to later"
            )

    # ---- topics --------------------------------------------------------------------------

    def topic(self, name: str, create: bool = True) -> Topic:
        """The topic of that name, made if there is none.

        - `name`: 1 to 255 bytes of UTF-8 without control characters; "__" in front is kept
          for the library.
        - `create`: False raises TopicNotFoundError where there is none.

        >>> engine.topic("orders").next_offset
        0
        """
        self.check_open()
        return Topic(self, *create_topic(self.ledger, name, create and not self._readonly))

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        self.check_open()
        return list_topics(self.ledger)

    def delete_topic(self, name: str) -> None:
        """Remove a topic and its messages (rule G8). Its epoch goes on, should a topic of that
        name be made again (rule B1).

        Raises TopicNotFoundError, and ProducerBusyError while somebody holds or awaits it.
        """
        self.check_open()
        delete_topic(self.ledger, self.sessions, name)

    def look(self, find: Callable[[Tables], Found]) -> Found:
        """What `find` finds in all that this engine's readers may see (rule G6)."""
        return self.ledger.look(find, self.unflushed)

    def latest(self, topic: int) -> _core.TopicRow:
        """The topic's row as it is now."""
        return self.look(lambda tables: tables.latest(topic))

    @property
    def ownership_version(self) -> int:
        """Changes with whatever may change who owns a topic."""
        journal = self.ledger.journal
        return 0 if journal is None else journal.version

    def make_visible(self) -> None:
        """Let this engine's readers see all that any engine has acknowledged by now (rule G6)."""
        if not self.unflushed:
            self.ledger.flush()

    @property
    def slot(self) -> int:
        """Its place in the lock file; LedgerError where it is read-only, and has none."""
        self.check_writable()
        assert self._slot is not None
        return self._slot.index

    # ---- producers -----------------------------------------------------------------------

    def future(self, topic: Topic, options: Options) -> ProducerFuture:
        """A future for `open_producer` to settle."""
        return ProducerFuture(self, topic, options)

    def open_producer(
        self, future: AnyFuture, mode: str, *, name: str | None, priority: int,
        claim: int | None, timeout: float | None, settle: int, properties: dict[str, str],
        follows: int | None = None, bound_to: int = 0, announce: dict[str, str] | None = None,
        role: Definition | None = None,
    ) -> None:  # fmt: skip
        """Register a producer, or queue it until it is promoted or `timeout` has passed."""
        self.check_open()
        slot = self._slot
        if slot is None:
            raise LedgerError(f"{self.path} is open with readonly=True; it takes no producers")
        self.ledger.start_checkpoints()  # before anything is registered: they may not start
        self.committer.start()
        created = _core.now()
        self.mailbox.request(
            future,
            lambda: self.sessions.request(
                future.topic.id, self.info, slot.index, mode, name=name, priority=priority,
                claim=claim, created=created, settle=settle,
                yields=future.options.on_wanted is not None, properties=properties,
                follows=follows, bound_to=bound_to, announce=announce, role=role,
            ),
            timeout,
        )  # fmt: skip

    def want_orphans(self) -> None:
        """Have the guard give back what an interrupted call was granted."""
        self._orphans_wanted = True
        self.ring()

    def find_producer(self, session: int) -> Producer | None:
        """The producer of a session of this engine."""
        return self._producers.get(session)

    def sibling(self, engine: str) -> Engine | None:
        """The engine of that id, if it is in this process and open."""
        return next((e for e in list(_engines) if e.id == engine and not e.closed), None)

    def adopt(self, producer: Producer) -> None:
        """Mail about this producer's session goes to it."""
        self._producers[producer.session.id] = producer

    def disown(self, producer: Producer) -> None:
        """The producer is closed."""
        self._producers.pop(producer.session.id, None)

    def release(self, session: Session) -> None:
        """Give one session back."""
        self.sessions.release([session], read=(self.id, self.mailbox.read_up_to))

    def leash(self, session: Session) -> _core.Leash:
        """What gives a session back once its producer is dropped: the collector may run
        anywhere, even inside a transaction, so the release is left to the guard."""
        assert self._slot is not None
        return _core.Leash(session, self._abandoned, self.ledger.lockfile.words, self._slot.bell)

    def run_callbacks(self) -> None:
        """Run the callbacks of receipts that have their outcome: here, unless this is the guard,
        which nobody's code may hold up, or has made senders wait, whom they may join."""
        if threading.current_thread() is self._guard or self.ledger.standstill._is_owned():
            self.call_soon(_core.run_callbacks)
        else:
            _core.run_callbacks()

    def call_later(self, function: Callable[[], object]) -> None:
        """Run application code where it can block nobody."""

        def run() -> None:
            try:
                function()
            except Exception:
                log.exception("a callback of engine %s failed", self.name)

        thread = threading.Thread(target=run, name="exclusivelog-callback", daemon=True)
        threads.start(self.path, thread)

    def call_soon(self, function: Callable[[], object]) -> None:
        """The same; where no thread can be started now, in one of the guard's next rounds."""
        try:
            self.call_later(function)
        except (LedgerError, MemoryError):
            self.mailbox.postpone(lambda: self.call_later(function))
            self.ring()

    def register_reader(self, reader: Reader) -> None:
        """Closing the engine wakes this reader."""
        self._readers.add(reader)

    def join_group(self, group: str, topics: Sequence[Topic], generation: int | None) -> Membership:
        """Claim the topics for a reader of this group; the one before is fenced (rule F6)."""
        ids = {topic.name: topic.id for topic in topics}
        return join(self, self._claims, self.slot, group, ids, generation)

    def reader(
        self, topics: Iterable[str], *, group: str, generation: int | None = None,
        start: str | int | dt.datetime = "earliest", inclusive: bool = True,
        read_compacted: bool = False, trimmed: Literal["error", "earliest"] = "error",
        deserializer: Any = None,
    ) -> GroupReader:  # fmt: skip
        """Open one reader of a group on several topics (rule F6). See `GroupReader`.

        It has one claim on all of the topics, and its commit is one transaction.

        - `topics`: names of topics that exist, one at least.
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
            raise TypeError(f"topics={topics!r}: it takes several names; one has topic.reader")
        names = list(topics)
        if not names:
            raise ValueError("topics is empty; it takes the names of the topics to read")
        self.check_writable()
        there = [self.topic(name, create=False) for name in dict.fromkeys(names)]
        readers = [
            topic.reader(
                start, inclusive=inclusive, read_compacted=read_compacted, trimmed=trimmed,
                deserializer=deserializer,
            )
            for topic in there
        ]  # fmt: skip
        # Only now: what is refused must fence nobody.
        return GroupReader(self, readers, self.join_group(group, there, generation))

    # ---- claims --------------------------------------------------------------------------

    @overload
    def own(
        self, group: str | None, resources: Mapping[str, int | None],
        timeout: float | None = None, *, on_lost: OnLost | None = None,
    ) -> Claim: ...  # fmt: skip
    @overload
    def own(
        self, group: Mapping[str, int | None], *, timeout: float | None = None,
        on_lost: OnLost | None = None,
    ) -> Claim: ...  # fmt: skip
    def own(
        self, group: str | Mapping[str, int | None] | None = None,
        resources: Mapping[str, int | None] | None = None, timeout: float | None = None, *,
        on_lost: OnLost | None = None,
    ) -> Claim:  # fmt: skip
        """Claim resources, all of them or none (rules F1-F5).

        It is the `own` call of Kafka's proposal for single readers and writers. A resource is any
        name that the caller chooses. Each call makes a claim session of its own.

        - `group`: 1 to 240 bytes of UTF-8. Claims of different groups never conflict. It may be
          left out: `engine.own({name: generation})` claims in a group without a name.
        - `resources`: {name: generation}; a name has 1 to 240 bytes of UTF-8. The generation None
          takes the one after the last (the first is 1). A number below the last one is refused. 0
          always wins, and the resource counts from 0 again.
        - `timeout`: seconds to wait for an owner with a higher generation to leave. None: do not
          wait.
        - `on_lost`: called once with (claim, error), in a thread of its own, when the claim is
          revoked; not when it is released. A process that was stopped gets the call once it
          resumes.

        A live claim on any of these resources with an equal or lower generation is revoked as a
        whole; other claims of its engine stay. A claim ends with its process, and
        others may end it once that hangs for longer than `keepalive`. A claim guards only the
        transactions that require it (`Transaction.require`) and the producers that are bound to it
        (`claim=` of `topic.producer`): they check it in the critical section that appends.

        Raises OwnershipError if a generation is refused; it names the owner, if one is alive.

        >>> first = engine.own("reports", {"march": None, "april": 7})
        >>> second = engine.own("reports", {"april": 7})
        >>> first.is_valid, second.generations
        (False, {'april': 7})
        """
        return own(self, self._claims, self.info, self.slot, group, resources, timeout, on_lost)

    def claims(self, group: str | None = None) -> list[ClaimInfo]:
        """The claims that live engines hold, the oldest first, those of group readers included.

        - `group`: a group's name; "": claims without a group; None: all claims.

        >>> claim = engine.own("reports", {"march": None})
        >>> [(info.group, info.generations) for info in engine.claims()]
        [('reports', {'march': 1})]
        """
        self.check_open()
        return self._claims.living(group)

    def groups(self) -> list[GroupInfo]:
        """The reader groups, one `GroupInfo` for each group and topic: its position, its lag in
        messages, and its reader.

        >>> topic.reader(group="billing").commit()
        >>> [(info.group, info.topic, info.position, info.lag) for info in engine.groups()]
        [('billing', 'orders', 0, 0)]
        """
        self.check_open()
        topics = [self.topic(name, create=False) for name in self.topics()]
        return self._claims.groups((t.name, t.id, t.next_offset) for t in topics)

    def keep_claim(self, number: int, claim: Claim | Membership) -> None:
        """Mail about this claim goes to it, and closing the engine releases it."""
        self._owned[number] = claim

    def forget_claim(self, number: int) -> None:
        """The claim is released."""
        self._owned.pop(number, None)

    def lose_claim(self, number: int, error: OwnershipLostError) -> None:
        """The claim was severed."""
        claim = self._owned.pop(number, None)
        if claim is not None:
            claim.lose(error)

    def drain_bound(self, claim: int) -> None:
        """Commit what the producers that are bound to a claim have accepted."""
        for producer in list(self._producers.values()):
            if producer.session.bound_to == claim:
                producer.drain()

    # ---- roles ---------------------------------------------------------------------------

    def role(
        self, name: str, *, topics: Iterable[str] = (), groups: Groups = (),
        claims: ClaimsOfGroups = MappingProxyType({}),
        access_mode: AccessMode | str = AccessMode.WAIT_FOR_EXCLUSIVE, priority: int = 0,
        timeout: float | None = None, settle: float = 0.0, on_lost: OnRoleLost | None = None,
    ) -> Role:  # fmt: skip
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
          topics, from those who have or await them.
        - `priority`, `settle`: in the queue, as in `Topic.producer`.
        - `timeout`: seconds to wait in the queue; None: for ever.
        - `on_lost`: called once with (role, error), in a thread of its own, when the role is lost
          or handed over; not when it is closed.

        Topics that do not exist are made. A role is granted once all of its topics are free at the
        same time, and no other role has its groups and claims; it holds nothing while it waits, so
        that roles with topics in common cannot block each other. Readers and claims that belong to
        no role are taken over, as by `own`. If any part is taken from a holder later, such as a
        topic by a producer that fences, the role is lost as a whole.

        Each request says what its role binds. Holders of one role may differ in that: nobody but
        the holder has anything of it.

        Raises ProducerFencedError, WaitTimeoutError, OwnershipError (a generation is refused),
        TopicTerminatedError, TopicNotFoundError; ValueError and TypeError for wrong arguments.

        >>> with engine.role(
        ...     "billing", topics=["invoices", "payments"], claims={"shards": {"shard-1": None}}
        ... ) as role:
        ...     role.epoch, role.generations, role.producer("payments").send(b"3 EUR")
        (1, {'shards': {'shard-1': 1}}, 0)
        """
        future = self.role_async(
            name, topics=topics, groups=groups, claims=claims, access_mode=access_mode,
            priority=priority, timeout=timeout, settle=settle, on_lost=on_lost,
        )  # fmt: skip
        try:
            return future.result()
        except BaseException:
            future.give_up()  # interrupted, perhaps
            raise

    def role_async(
        self, name: str, *, topics: Iterable[str] = (), groups: Groups = (),
        claims: ClaimsOfGroups = MappingProxyType({}),
        access_mode: AccessMode | str = AccessMode.WAIT_FOR_EXCLUSIVE, priority: int = 0,
        timeout: float | None = None, settle: float = 0.0, on_lost: OnRoleLost | None = None,
    ) -> RoleFuture:  # fmt: skip
        """Ask for a role as `role` does, with the same arguments, and return a future at once.

        `cancel()` removes the request without a trace, or returns False because the grant came
        first (rule D5).

        >>> with engine.role("billing", topics=["invoices"]):
        ...     standby = engine.role_async("billing", topics=["invoices"], priority=7)
        ...     standby.done(), [waiter.priority for waiter in engine.roles()[0].waiters]
        (False, [7])
        >>> standby.result(timeout=10).epoch
        2
        """
        return ask(
            self, self._claims, name, topics, groups, claims, access_mode, priority, timeout,
            settle, on_lost,
        )  # fmt: skip

    def roles(self) -> list[RoleInfo]:
        """The roles of this ledger, sorted by name: their holders, waiters, and what they bind.

        >>> role = engine.role("billing", topics=["invoices"])
        >>> [(info.name, info.epoch, info.topics, info.holder.pid) for info in engine.roles()]
        [('billing', 1, ('invoices',), ...)]
        """
        self.check_open()
        return self.sessions.roles.roles()

    def delete_role(self, name: str) -> None:
        """Remove a role that nobody holds or awaits from `roles`. Its topics and messages stay, and
        its epoch goes on, should it be asked for again.

        Raises TopicNotFoundError if there is no such role, and ProducerBusyError while somebody
        holds or awaits it.

        >>> engine.role("billing").close()
        >>> engine.delete_role("billing"), engine.roles()
        (None, [])
        """
        self.check_writable()
        delete_topic(self.ledger, self.sessions, PREFIX + check_role_name(name), own=True)

    def name_of(self, topic: int) -> str:
        """The name of the topic with this id."""
        with self.ledger.read() as tables:
            return tables.topic(topic).name

    def bound_to_role(self, seat: Producer) -> list[Producer]:
        """The producers that are bound to the role whose seat this is; none for any other."""
        if not is_role(seat.topic):
            return []
        bound_to = seat.session.bound_to
        there = list(self._producers.values())
        return [p for p in there if p is not seat and p.session.bound_to == bound_to]

    # ---- the guard: mail, deaths, timeouts -----------------------------------------------

    def ring(self) -> None:
        """Let the guard go round."""
        if self._slot is not None:
            self.ledger.lockfile.ring(self._slot.index)

    def _keep_watch(self) -> None:
        slot = self._slot
        assert slot is not None
        while not self.closed:
            # What changes after these are read ends the sleep below at once.
            seen, arrivals = slot.mail_count(), slot.arrivals()
            living = slot.living() if self.mailbox.awaits else frozenset()
            try:
                self._do_rounds()
            except ExclusiveLogError as error:
                if self.closed:
                    return
                if error.maybe_written or self.ledger.over:
                    self.mailbox.fail_pending(error)
                if not self.ledger.over:  # that was said when it happened
                    log.warning("engine %s: %s", self.name, error)
            except Exception:  # the guard must not die: waiters depend on it
                log.exception("engine %s: its guard stumbled", self.name)
            if self.closed:
                return
            if self.mailbox.awaits:
                slot.await_mail_or_death(seen, arrivals, living, self.mailbox.nap())
            else:
                slot.await_mail(seen, self.mailbox.nap())

    def _clear_up(self) -> None:
        # What processes left behind that died while they deleted a topic, or before they read
        # what had become of them.
        try:
            empty_trash(self.ledger)
            self.sessions.drop_mail_of_the_gone()
        except ExclusiveLogError as error:
            log.warning("engine %s: %s", self.name, error)

    def _keep_beating(self, slot: Slot, keepalive: float | None) -> None:
        # A thread of its own: the guard may have to wait for a ledger that somebody else has
        # stopped, and is not hung for that (rule C3).
        beat = LONGEST_BEAT_SECONDS if keepalive is None else keepalive / 4
        while not self._ended.wait(min(LONGEST_BEAT_SECONDS, beat)):
            slot.beat()
            try:
                self.ledger.check_place()
            except LedgerError:  # every call tells it from now on; the guard tells who waits
                self.ring()
                return  # what it owns there, others may have

    def _release_orphans(self) -> None:
        """Give back what was granted to a call that was interrupted before it could return."""
        if not self._orphans_wanted:
            return
        with self.mailbox.lock:
            self._orphans_wanted = False
            try:
                known = self.mailbox.known() | set(self._producers.keys())
                with self.ledger.read() as tables:
                    sessions = tables.sessions_of(self.id)
                    reserved = {
                        s.id for s in sessions
                        if seats.reserved(tables, s) or self.sessions.roles.binds(tables, s)
                    }  # fmt: skip
                for session in sessions:
                    if session.id not in known and session.id not in reserved:
                        self.release(session)
            except BaseException:
                self._orphans_wanted = True
                raise

    def _do_rounds(self) -> None:
        failure: ExclusiveLogError | None = None
        self.mailbox.note(True)  # unless it comes to its end
        for step in (
            self._release_abandoned, self._release_claims, self._release_orphans,
            self.mailbox.read,
            self.mailbox.hand_over, self.mailbox.end_waits, self.ledger.segments.forget_removed,
            self._bury_the_dead, self.mailbox.admit_arrivals, self.mailbox.promote_due,
            self.keeper.look, self.ledger.tend,
            self.ledger.find_pinned,
        ):  # fmt: skip
            try:
                step()
            except ExclusiveLogError as error:  # a full disk, say; the other steps may do
                failure = failure or error
        self.mailbox.note(failure is not None)
        if failure is not None:
            raise failure

    def give_up_claims(self, claimants: Iterable[Claimant]) -> None:
        """Have the guard give back what a call has claimed that was interrupted."""
        for claimant in claimants:
            self.forget_claim(claimant.id)
            self._given_up.append(claimant)
        self.ring()

    def _release_claims(self) -> None:
        while self._given_up:
            self._claims.release(self._given_up[0])
            self._given_up.popleft()

    def _release_abandoned(self) -> None:
        while self._abandoned:
            try:
                self.release(self._abandoned[0])
            except ExclusiveLogError:  # a full disk, say: it stays for later, behind the others
                self._abandoned.rotate(-1)
                raise
            self._abandoned.popleft()

    def _bury_the_dead(self) -> None:
        if self.mailbox.awaits:
            self._evict(self.sessions.find_dead(self.mailbox.needed))

    def evict_the_dead(self, among: Iterable[str]) -> None:
        """Take the sessions of those of these engines away that are gone (rules C2, C3)."""
        self._evict([engine for engine in self.sessions.find_dead() if engine in among])

    def _evict(self, engines: Iterable[str]) -> None:
        for engine in engines:
            log.info("engine %s is gone; taking its sessions away", engine)
            for _ in self.sessions.evict(engine):
                self.mailbox.read()

    def compact(self, topic: int) -> int:
        """What `Topic.compact` does."""
        self.check_writable()
        assert self._slot is not None
        return compact(self.ledger, topic, self._slot.index, self.id).kept

    def renew(self, topic: int) -> int:
        """Before old messages go: take a map's snapshot, and make a compacted view anew, up to the
        topic's end as it is now. Returns that."""
        with self.ledger.read() as tables:
            row, kind, view = tables.topic(topic), tables.kind(topic), tables.view(topic)
        end = row.next_offset
        if kind.get("holds") == "map":
            end, items = map_at(Topic(self, topic, row.name), end)
            self.snapshot(topic, end, items.items())
        if view is not None:
            self.compact(topic)
        return end

    def snapshot(self, topic: int, offset: int, items: Iterable[Item]) -> None:
        """Keep what a topic's messages before an offset add up to (rule I4)."""
        self.check_writable()
        assert self._slot is not None
        write_snapshot(self.ledger, topic, self._slot.index, self.id, offset, items)

    # ---- transactions --------------------------------------------------------------------

    def transaction(self) -> Transaction:
        """Messages to several topics, and reader cursors, that enter the log together, or not
        at all (rules F6, G3). See `Transaction`.

        >>> producer = topic.producer()
        >>> with engine.transaction() as txn:
        ...     _ = producer.send(b"debit", transaction=txn)
        ...     _ = producer.send(b"credit", transaction=txn)
        >>> txn.offsets[producer]
        range(0, 2)
        """
        self.check_writable()
        return Transaction(self)

    # ---- hand-over -----------------------------------------------------------------------

    def unload(
        self, topics: str | Iterable[str], to: str, timeout: float = 10.0, *,
        groups: Iterable[str] = (), producer: str | None = None,
    ) -> list[Move]:  # fmt: skip
        """Move the ownership of topics to another engine, without an election (PIP-307, rules
        E1-E4).

        The owner, in this process or another, pauses its sends, commits what it has accepted, and
        releases the topic. Its producers raise ProducerMovedError from then on; where `to` is an
        engine of their own process, their sends go through that engine instead.

        - `topics`: a topic's name; a list of names; or, if no topic has that name, a prefix of
          names, with or without a `*` at its end. A topic that a role binds moves with all of the
          role, as one `Move` whose topic is the role's own, `__role__/<name>`; that name is taken,
          too.
        - `to`: the id of a live engine. Its best waiter becomes owner. If it has none, the topic is
          reserved for its next producer, until the deadline.
        - `timeout`: seconds until the deadline. An owner that has not released a topic by then
          keeps it.
        - `groups`: groups whose claims on these topics move, each in the transaction that assigns
          the topic: those of readers with `group=`, and those of `engine.own` on a resource with
          the topic's name. The former holders raise ReaderFencedError or OwnershipLostError, whose
          `successor` is the destination. Committed positions and generations do not change.
        - `producer`: the name of the one producer to move; a shared one moves without the others
          (see `Producer.move`). None: the owner.

        Returns a `Move` for each topic, with a state of its own: if one fails, the others stay
        moved. Calling it again is safe, also after an interrupt.

        Raises TopicNotFoundError, and LedgerError if there is no such engine.

        >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        ...     producer = a.topic("orders").producer("exclusive")
        ...     [move] = a.unload("orders", to=b.id)
        ...     move.topic, move.state, b.topic("orders").producer("exclusive").topic_epoch
        ('orders', 'assigned', 2)
        """
        return self._unloading(topics, to, timeout, groups, producer).run()

    def unload_async(
        self, topics: str | Iterable[str], to: str, timeout: float = 10.0, *,
        groups: Iterable[str] = (), producer: str | None = None,
    ) -> UnloadFuture:  # fmt: skip
        """Begin what `unload` does, and return a future with its list of `Move`.

        It has the same arguments and errors. When it returns, the moves of the first 250 topics
        have begun. `future.moves()` returns all moves as they are now. `future.cancel()` ends the
        moves of topics that have not been released yet, as the deadline would; topics that the
        destination has stay there.

        >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        ...     producer = a.topic("orders").producer("exclusive")
        ...     future = a.unload_async("orders", to=b.id)
        ...     [move] = future.result(timeout=10)
        ...     move.state
        'assigned'
        """
        unloading = self._unloading(topics, to, timeout, groups, producer)
        return UnloadFuture(self, unloading).start()

    def _unloading(
        self, topics: str | Iterable[str], to: str, timeout: float, groups: Iterable[str],
        producer: str | None, session: Session | None = None,
    ) -> Unloading:  # fmt: skip
        self.check_writable()
        check_seconds(timeout, "timeout", "seconds from 0 on")
        return Unloading(self, topics, to, timeout, groups, producer, session)

    def begin_move(
        self, topic: str, session: Session, to: str, timeout: float, groups: Iterable[str]
    ) -> Unloading:
        """Begin what `Producer.move` does. ProducerFencedError unless the session has its place
        still: its name may be another one's by now."""
        unloading = self._unloading([topic], to, timeout, groups, session.name, session)
        unloading.begin()
        return unloading

    def cancel_unload(self, topics: str | Iterable[str]) -> list[str]:
        """End hand-overs that are under way (rule E4). Returns the names of their topics.

        A topic that is not released yet stays with its owner. One that is reserved for the
        destination is free for the best waiter again.

        >>> engine.topic("orders").name, engine.cancel_unload("orders")
        ('orders', [])
        """
        self.check_writable()
        ids = [self.topic(name, create=False).id for name in choose(self, topics)]
        return self.hand_over.cancel(ids, "cancelled")

    def check_writable(self) -> None:
        """An error unless this engine can be used here, and to write."""
        self.check_open()
        if self._slot is None:
            raise LedgerError(f"{self.path} is open with readonly=True; nothing can be changed")

    def history(
        self, topic: str | None = None, *, group: str | None = None, role: str | None = None
    ) -> Iterator[Event]:
        """Iterate over every change of ownership so far (rule E5).

        - `topic`: only the events of this topic.
        - `group`: only the events of this group's claims; "": of claims without a group.

        - `role`: only the grants, losses and hand-overs of this role. Those of its parts are told
          of their topics and groups, with the reason "role".

        With None for all three, all events. To follow new ones, read the topic `__events__`;
        `Event.loads` decodes its values.

        >>> with engine.topic("orders").producer("exclusive"):
        ...     pass
        >>> [(event.kind, event.reason) for event in engine.history()]
        [('grant', 'request'), ('release', 'closed')]
        """
        self.check_open()
        if role is not None:
            topic = PREFIX + role
        try:
            reader = self.topic(EVENTS, create=False).reader()
        except TopicNotFoundError:  # nothing has happened yet
            return iter(())
        return select(iter(reader), topic, group)

    # ---- facts ---------------------------------------------------------------------------

    def engines(self) -> list[EngineInfo]:
        """The engines that have this ledger open, in any process of this machine."""
        self.check_open()
        return self.ledger.lockfile.engines()

    def inside(self) -> EngineInfo | None:
        """The engine that is inside the ledger's critical section now; None if there is none. One
        that stays there is stopped, and blocks all writers until it resumes or dies (see
        `kill_hung` of `open`).

        >>> engine.inside() is None
        True
        """
        self.check_open()
        return None if self.ledger.watch is None else self.ledger.watch.inside()

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes and counts: what the ledger uses, how many topics and engines.

        `oldest_reader` is None, or says which process is inside a read and how many transactions
        behind: {"pid": ..., "engine": name or None, "transactions_behind": ...}. The tables
        cannot reuse what was freed since, and grow until that read ends.

        >>> engine.stats()["oldest_reader"] is None
        True
        """
        self.check_open()
        topics, engines = self.topics(), self.engines()
        return {
            **self.ledger.stats(), "topics": len(topics), "engines": len(engines),
            "oldest_reader": self.ledger.oldest_reader(),
        }  # fmt: skip

    def verify(self) -> Report:
        """Read everything: every checksum, the density of offsets, epochs and times
        (rules B8, G4, G9).

        >>> engine.verify().ok
        True
        """
        self.check_open()
        results = list(verify(self.ledger, self.unflushed))
        problems = [problem for _, result in results for problem in result[2]]
        counted = [result for name, result in results if not is_internal(name)]
        return Report(
            topics=len(counted), entries=sum(result[0] for result in counted),
            messages=sum(result[1] for result in counted), problems=tuple(problems),
        )  # fmt: skip

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the ledger, consistent and compacted, while others go on writing.

        `path`: a directory that does not exist or is empty, on any file system. The copy has
        every message that was acknowledged before the call, is durable when this returns, and is
        a ledger of its own. The files get the modes of their sources; they belong to the caller.

        A backup that fails or is killed leaves a directory that `xl.open` refuses (rule H4);
        call this again with the same path to make the backup anew. Raises LedgerFullError where
        there is no room; LedgerError where `path` holds anything else, lies in the ledger, cannot
        be written, or is being backed up into by another process; LedgerCorruptedError where the
        ledger is damaged; ValueError where `path` is empty.

        >>> with xl.open(path) as engine:
        ...     engine.backup(f"{path}-backup")
        >>> with xl.open(f"{path}-backup", create=False) as copy:
        ...     copy.verify().ok
        True
        """
        self.check_open()
        if not os.fspath(path):
            raise ValueError("path is empty; name the directory that the backup goes into")
        backup(self.ledger, os.path.abspath(path))

    # ---- close ---------------------------------------------------------------------------

    def close(self) -> None:
        """Commit pending sends, release topics and claims, and end the threads. Closing twice does
        nothing; after an interrupt, the second call finishes what the first one began.

        If a signal handler or a finalizer calls this during a transaction of the same thread,
        another thread closes the engine as soon as that transaction is over."""
        if self.forked or self._closed_for_good:
            return
        if self.busy_here:
            closing = threading.Thread(target=self.close, name="exclusivelog-close")
            threads.start(self.path, closing)
            return
        with self._closing:
            if self._closed_for_good:
                return
            try:
                with self.mailbox.lock:  # who asks for a producer right now is served before
                    self.closed = True
                self._finish_work()
            except ExclusiveLogError as error:
                log.warning("engine %s: closing: %s", self.name, error)
            finally:
                self._end()

    def _finish_work(self) -> None:
        self._stop_guard()
        self.keeper.stop()
        producers = list(self._producers.values())
        waiting = self.mailbox.waiting()
        error = EngineClosedError(f"engine {self.name!r} on {self.path} is closed")
        for producer in producers:
            producer.appender.condemn(error)  # what is queued is still sent, and nothing more
        with self.ledger.standstill:
            pass  # a transaction that is being committed comes to its end
        self.committer.drain()
        self._release_all(waiting)  # first: what we give back must not come back to us
        self._release_all([p.session for p in producers] + list(self._abandoned))
        self._release_claims()
        for claim in list(self._owned.values()):
            claim.end()

    def _stop_guard(self) -> None:
        self._ended.set()
        self.ring()
        if self._guard is not None and self._guard is not threading.current_thread():
            self._guard.join(timeout=60)

    def _release_all(self, sessions: list[Session]) -> None:
        for start in range(0, len(sessions), RELEASED_AT_ONCE):
            chunk = sessions[start : start + RELEASED_AT_ONCE]
            self.sessions.release(chunk, read=(self.id, 2**64 - 1))

    def _end(self) -> None:
        # The slot first: whatever else fails, nobody waits for an engine that is gone. Every
        # step may be taken twice, should an interrupt strike between them.
        self.closed = True
        self._ended.set()
        if self._slot is not None and not self._closed_for_good:
            self.ring()
            self._slot.leave()
        error = EngineClosedError(f"engine {self.name!r} on {self.path} was closed")
        for producer in list(self._producers.values()):
            self.committer.fail(producer.appender, error)
        self.mailbox.fail_all(error)
        self.committer.stop()
        if self._heart is not None and self._heart is not threading.current_thread():
            self._heart.join(timeout=60)  # it has us, and the lock file's mapping
        for reader in list(self._readers):
            self.ledger.lockfile.announce(reader.topic_id)
        self.ledger.lockfile.announce(MOVES)
        if not self._closed_for_good:
            self._closed_for_good = True
            if self._kill_hung and self.ledger.watch is not None:
                self.ledger.watch.killers -= 1
            self.ledger.close()

    def _forget(self) -> None:
        """In a forked child: everything is the parent's (rule C5)."""
        self.forked = self.closed = self._closed_for_good = True
        if self._slot is not None:
            self._slot.forget()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine {self.name!r} ({self.id}) on {self.path}>"


def open(
    path: str | os.PathLike[str],
    name: str | None = None,
    properties: Mapping[str, str] | None = None,
    *,
    durability: Literal["power", "process"] = "power",
    keepalive: float | None = 30.0,
    readonly: bool = False,
    create: bool = True,
    mode: int = 0o700,
    map_size: int = DEFAULT_MAP_SIZE,
    max_readers: int = DEFAULT_MAX_READERS,
    kill_hung: bool = False,
) -> Engine:
    """Open the ledger in a directory; make it if there is none.

    - `path`: a directory on a local disk. Network and FUSE file systems are refused, and so is
      one that has other files and no ledger.
    - `name`: for people, in errors and listings (default: `engine-` and the process id).
    - `properties`: a mapping of str to str for others to see, such as an address.
    - `durability`: "power": what this engine acknowledges survives a power loss, at the price
      of one flush that all who wait share. "process": it survives the death of any process; a
      power loss may take about the last second, and never damages the log (rule H1). Readers
      see what their own engine's durability promises (rule G6).
    - `keepalive`: seconds without a heartbeat after which others may take this engine's
      topics (rule C3); None: never.
    - `readonly`: read only; takes no slot, changes nothing.
    - `create`: False raises LedgerError where there is no ledger.
    - `mode`: of the directory, if it is made; the files get its read and write bits.
    - `map_size`: how many bytes the tables can grow to, and the large entries beside them.
      Address space, not disk.
    - `max_readers`: read transactions at the same time, in all processes together; the
      first opener decides.
    - `kill_hung`: fencing by kill. A process that is stopped inside the ledger's critical
      section (microseconds long, so that it is rare) keeps everybody else out; one that is
      stopped inside a read makes the tables grow. With True, it gets SIGKILL once it has been
      silent for longer than its own `keepalive`, if this process notices it and may. Without,
      the log says who it is, and `inside()` and `stats()` do.

    Raises LedgerError (no directory, no permission, remote, other files; no thread or no address
    space to be had; threads that gevent or eventlet has replaced), LedgerFullError (no room),
    LedgerVersionError (another format, not a ledger, or in use by engines of a version that cannot
    share it), LedgerCorruptedError.

    >>> xl.open(path, name="worker-1").topics()
    []
    """
    if durability not in ("power", "process"):
        raise ValueError(f"durability={durability!r}: it takes 'power' or 'process'")
    if keepalive is not None:
        check_seconds(keepalive, "keepalive", "seconds above 0, or None for never")
        if not 0 < keepalive <= LONGEST_KEEPALIVE:
            raise ValueError(
                f"keepalive={keepalive!r}: it takes seconds above 0 and up to "
                f"{LONGEST_KEEPALIVE:.0f}, or None for never"
            )
    if not isinstance(map_size, int) or map_size < 1 << 20:
        raise ValueError(f"map_size={map_size!r}: it takes bytes, from {1 << 20} on")
    if not isinstance(max_readers, int) or max_readers < 1:
        raise ValueError(f"max_readers={max_readers!r}: it takes a whole number from 1 on")
    if name is not None:
        check_name(name, "name")
    encode_properties(properties or {})
    where = check_path(path)
    threads.refuse_patched(where)
    ledger = Ledger.open(
        where, create=create, mode=mode, map_size=map_size, max_readers=max_readers,
        readonly=readonly, kill_hung=bool(kill_hung), power=durability == "power",
    )  # fmt: skip
    try:
        return Engine(
            ledger, name or f"engine-{os.getpid()}", properties or {}, keepalive, readonly,
            unflushed=durability == "process", kill_hung=bool(kill_hung),
        )  # fmt: skip
    except BaseException:
        ledger.close()
        raise


def _close_all() -> None:
    for engine in list(_engines):
        engine.close()


def _forget_all() -> None:
    for engine in list(_engines):
        engine._forget()
    _engines.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
