"""Roles: one name for topics, reader groups and claims that one process holds together.

A role combines the exclusive producer (PIP-68), the priority queue (PIP-440) and the claims of
Kafka's proposal for single readers and writers. It is granted, lost and handed over as a whole, in
one transaction. A process that loses any part loses the whole role, and from that moment none of
its sends, cursors and transactions under the role enters the log (rules B2, E1, F5).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from exclusivelog import _core
from exclusivelog.arguments import (
    check_generation,
    check_group,
    check_name,
    check_queue_options,
    check_resource,
    is_internal,
)
from exclusivelog.backend import (
    ClaimSession,
    EngineBackend,
    Opened,
    ProducerRequest,
    RoleDefinition,
    RoleParts,
)
from exclusivelog.closing import Closing
from exclusivelog.errors import OwnershipLostError, describe_engine
from exclusivelog.producer import Options, Producer
from exclusivelog.reader import GroupReader, Start
from exclusivelog.serde import pick_dumps
from exclusivelog.transaction import Claim, Listening
from exclusivelog.types import PREFIX, AccessMode, ModeName, Move
from exclusivelog.unload import UnloadFuture
from exclusivelog.waits import GrantFuture, time_limit

__all__ = ["Role", "RoleFuture"]

if TYPE_CHECKING:
    from exclusivelog.reader import Reader


NAME_BYTES = 240
OnLost = Callable[["Role", OwnershipLostError], object]
State = Literal["open", "fenced", "moved", "closed"]
Groups = Mapping[str, Iterable[str]] | Iterable[str]
ClaimsOfGroups = Mapping[str, Mapping[str, int | None]]


class SendingOptions(TypedDict, total=False):
    """The options of `Role.producer`; `Topic.producer` describes each."""

    linger: float
    max_batch_messages: int
    max_batch_bytes: int
    max_pending_bytes: int
    serializer: Any


class RoleOptions(TypedDict, total=False):
    """The options of `Engine.role`, which describes each."""

    topics: Iterable[str]
    groups: Groups
    claims: ClaimsOfGroups
    access_mode: AccessMode | ModeName
    priority: int
    timeout: float | None
    settle: float
    on_lost: OnLost | None


class RoleClaim(Claim):
    """The claim that a role is bound to. It is valid as long as the role is held."""

    def __init__(self, role: Role, engine: Opened, session: ClaimSession) -> None:
        super().__init__(engine, session)
        self._role = role

    @property
    def role(self) -> Role:
        """Its role."""
        return self._role

    def _lost_error(self) -> OwnershipLostError:
        kind = self._role._kind
        role = f"{kind} {self._role.name!r}"
        if self._role.closed:
            return OwnershipLostError(f"{role} was closed; request it again with engine.{kind}")
        successor = self._session.successor()
        if successor is not None:
            return OwnershipLostError(
                f"{role} was handed over to {describe_engine(successor)}; request it there",
                successor=successor,
            )
        return OwnershipLostError(
            f"{role} with epoch {self._role.epoch} was lost: another owner has taken it or a "
            f"part of it. Request it again with engine.{kind}"
        )

    def _lose(self, error: OwnershipLostError) -> None:
        """The role was lost: call the role's `on_lost`."""
        self._revoked = True
        self._role._lose(self._lost_error() if error.successor is None else error)

    @property
    def _is_over(self) -> bool:
        return self._role.closed or self._revoked

    def release(self) -> None:
        """Release the role, as `Role.close`."""
        self._role.close()

    def __repr__(self) -> str:
        return f"<Claim of {self._role._kind} {self._role.name!r}, epoch {self._role.epoch}>"


class Role(Closing):
    """A role that this process holds: its topics, reader groups and claims. `engine.role` returns
    it; threads may share it.

    It is held until it is closed, lost or handed over, or its engine closes: dropping this object
    does not release it. A lost role is lost for good (rule B4): request it again.

    >>> _ = engine.topic("orders").producer().send(b"3 apples")
    >>> with engine.role("billing", topics=["invoices"], groups={"biller": ["orders"]}) as role:
    ...     with role.reader("orders") as orders, engine.transaction() as txn:
    ...         order = orders.read_next(timeout=1)
    ...         _ = role.producer("invoices").send(b"bill: " + order.value, transaction=txn)
    ...         txn.commit_cursor(orders)
    ...         txn.require(role)
    >>> [message.value for message in engine.topic("invoices").reader()]
    [b'bill: 3 apples']
    """

    def __init__(
        self,
        engine: Opened,
        seat: Producer,
        parts: RoleParts,
        on_lost: OnLost | None,
        kind: str = "role",
    ) -> None:
        session = seat._session
        self._kind = kind  # what errors call it
        self.name = seat.topic.removeprefix(PREFIX)
        self.epoch = session.epoch
        self._engine: EngineBackend = engine.backend
        self._on_lost = on_lost
        self._parts = parts.topics
        self._generations = parts.generations
        self._memberships = parts.readers
        self._topics_of = parts.groups
        self.claim = RoleClaim(self, engine, parts.claim)
        self._producers: dict[str, Producer] = {}
        self._lock = threading.RLock()
        self.closed = False
        self._seat = seat
        self._claimants = parts.numbers

    def _register(self) -> None:
        """Let its engine keep this object and notify it of changes of the role."""
        roles = self._engine.role_store
        for number, membership in zip(self._claimants, self._memberships.values(), strict=True):
            roles.keep(number, membership)
        roles.keep(self.claim.id, Listening(self.claim))

    def _check_enters(self) -> None:
        self.claim._check_enters()

    # ---- facts ---------------------------------------------------------------------------

    # Attributes: `name`, `epoch` (grows with every holder, so it serves other systems as a fencing
    # token) and `claim`.

    @property
    def topics(self) -> list[str]:
        """The names of the topics that the role owns, sorted."""
        return sorted(self._parts)

    @property
    def groups(self) -> dict[str, list[str]]:
        """{reader group: the names of the topics that it reads}."""
        return {group: list(topics) for group, topics in self._topics_of.items()}

    @property
    def generations(self) -> dict[str, dict[str, int]]:
        """{group: {resource: generation}} of the role's claims, to store as fencing tokens in other
        systems; raises OwnershipLostError once the role is lost.

        >>> role = engine.role("billing", claims={"shards": {"shard-1": None, "shard-2": 7}})
        >>> role.generations
        {'shards': {'shard-1': 1, 'shard-2': 7}}
        """
        self.claim.check()
        found: dict[str, dict[str, int]] = {}
        for group, reads, generations in self._generations:
            if not reads:
                found.setdefault(group, {}).update(generations)
        return found

    @property
    def state(self) -> State:
        """Its state, read from the ledger: "open", "fenced", "moved" or "closed"."""
        return "closed" if self.closed else self._seat.state

    # ---- use -----------------------------------------------------------------------------

    def producer(self, topic: str, **options: Unpack[SendingOptions]) -> Producer:
        """The role's producer of one of its topics. The topic has no other producer.

        - `topic`: one of `topics`.
        - `options`: `linger`, `max_batch_messages`, `max_batch_bytes`, `max_pending_bytes` and
          `serializer`, as in `Topic.producer`. Those of the first call apply until the producer is
          closed.

        It has the role's name, so that sequence ids continue from one holder to the next. Closing
        it commits pending sends; the role keeps the topic. Once the role is lost, sends raise
        ProducerRevokedError, or ProducerMovedError after a hand-over.

        Raises ValueError if the role has no such topic, OwnershipLostError if the role is lost.

        >>> with engine.role("billing", topics=["invoices"]) as role:
        ...     role.producer("invoices").send(b"no. 1"), role.producer("invoices").name
        (0, 'billing')
        """
        for name in options.keys() - SendingOptions.__annotations__.keys():
            raise TypeError(f"role.producer takes no option {name!r}")
        with self._lock:
            self.claim.check()
            session = self._parts.get(topic)
            if session is None:
                raise ValueError(f"topic={topic!r} is none of role {self.name!r}: {self.topics}")
            found = self._producers.get(topic)
            if found is None or not found._sender.usable:
                found = self._producers[topic] = self._open(topic, session, **options)
            return found

    def _open(self, topic: str, session: Any, serializer: Any = None, **sending: Any) -> Producer:
        options = Options(**sending, dumps=pick_dumps(serializer), follow=False)
        last = self._engine.role_store.last_sequence(session)
        opened = self._engine.open_session(topic, session, last, options, keeper=self)
        return Producer(self._engine, topic, opened, options)

    def reader(
        self,
        topic: str,
        *,
        group: str | None = None,
        start: Start = "earliest",
        inclusive: bool = True,
        read_compacted: bool = False,
        trimmed: Literal["error", "earliest"] = "error",
        deserializer: Any = None,
        key_deserializer: Any = None,
    ) -> Reader:
        """Open the reader of one topic of a group that the role binds (rule F6).

        - `group`: may be left out if only one of the role's groups reads the topic.
        - The other parameters are those of `Topic.reader`.

        It continues at the group's last commit, and raises ReaderFencedError once the role is
        lost. After it is closed, the role still holds the group. Use one reader of a topic at a
        time.
        """
        chosen = self._group(group, topic)
        self.claim.check()
        reader: Reader = self.claim.engine.topic(topic, create=False).reader(
            start,
            inclusive=inclusive,
            read_compacted=read_compacted,
            trimmed=trimmed,
            deserializer=deserializer,
            key_deserializer=key_deserializer,
        )
        reader._join(self._memberships[chosen])
        return reader

    def group_reader(
        self,
        group: str | None = None,
        *,
        start: Start = "earliest",
        inclusive: bool = True,
        read_compacted: bool = False,
        trimmed: Literal["error", "earliest"] = "error",
        deserializer: Any = None,
        key_deserializer: Any = None,
    ) -> GroupReader:
        """Open one reader on all topics of a group that the role binds; see `Engine.reader`.

        - `group`: may be left out if the role has one group only.
        """
        chosen = self._group(group, None)
        self.claim.check()
        readers = [
            self.claim.engine.topic(topic, create=False).reader(
                start,
                inclusive=inclusive,
                read_compacted=read_compacted,
                trimmed=trimmed,
                deserializer=deserializer,
                key_deserializer=key_deserializer,
            )
            for topic in self._topics_of[chosen]
        ]
        return GroupReader(readers, self._memberships[chosen])

    def _group(self, group: str | None, topic: str | None) -> str:
        self.claim.check()
        fitting = [
            name for name, topics in self._topics_of.items() if topic is None or topic in topics
        ]
        if group is None and len(fitting) == 1:
            return fitting[0]
        if group not in fitting or group is None:
            of = "" if topic is None else f" that read topic {topic!r}"
            raise ValueError(f"group={group!r}: role {self.name!r} has the groups {fitting}{of}")
        return group

    # ---- the end -------------------------------------------------------------------------

    def hand_over(self, to: str, timeout: float = 10.0) -> Move:
        """Move the role, with all that it binds, to another engine in one transaction (rules E1 to
        E4).

        - `to`: the id of a live engine. Its best waiter for the role gets it; if it has none, the
          role and its topics are reserved for its next request until the deadline.
        - `timeout`: seconds until the deadline.

        What the role's producers have accepted is committed first. Afterwards the role's `state` is
        "moved", and the errors of its parts name the successor. If the move fails, this process
        keeps the role, and `Move.reason` says why. Raises OwnershipLostError if the role is lost,
        and LedgerError if there is no such engine.

        >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        ...     first = a.role("billing", topics=["invoices"])
        ...     waiting = b.role_async("billing", topics=["invoices"])
        ...     first.hand_over(to=b.id).ok, first.state
        ...     second = waiting.result(timeout=10)
        ...     second.epoch, second.producer("invoices").send(b"by b")
        (True, 'moved')
        (2, 0)
        """
        self.claim.check()
        return self._seat.move(to, timeout)

    def hand_over_async(self, to: str, timeout: float = 10.0) -> UnloadFuture:
        """Begin what `hand_over` does, and return a future with a list of one `Move` (see
        `Engine.unload_async`).

        >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        ...     [move] = a.role("billing").hand_over_async(to=b.id).result(timeout=10)
        ...     move.state
        'assigned'
        """
        self.claim.check()
        return self._seat.move_async(to, timeout)

    def _lose(self, error: OwnershipLostError) -> None:
        """The role was lost: wake its readers, and call `on_lost`."""
        for membership in self._memberships.values():
            membership.lose(error)
        on_lost = self._on_lost
        if on_lost is not None and not self.closed:
            self._engine.call_soon(lambda: on_lost(self, error))

    def close(self) -> None:
        """Commit what the role's producers have accepted, then release the role; the next waiter
        gets it in the same transaction. Closing a closed or lost role does nothing."""
        if self._engine.forked:
            return
        if self._engine.busy_here:
            self._engine.call_later(self.close)
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
            producers = list(self._producers.values())
        with contextlib.ExitStack() as steps:
            steps.callback(self._forget)
            steps.callback(self._seat.close)
            for producer in producers:
                steps.callback(producer.close)
            if not self._engine.closed:
                self._engine.claims.drain_bound(self.claim.id)

    def _forget(self) -> None:
        self._engine.role_store.forget((*self._claimants, self.claim.id))

    def __repr__(self) -> str:
        return f"<Role {self.name!r}, epoch {self.epoch}, topics {self.topics}>"


_OPTIONS = Options(follow=False)  # of the producer that owns the role's own topic


class RoleFuture(GrantFuture[Role]):
    """A future with a role; `engine.role_async` returns it. `cancel()` removes the request (rule
    D5).

    >>> role = engine.role("billing", topics=["invoices"])
    >>> future = engine.role_async("billing", topics=["invoices"])
    >>> future.done(), future.cancel()
    (False, True)
    """

    _engine: EngineBackend

    def __init__(
        self,
        engine: Opened,
        name: str,
        definition: RoleDefinition,
        on_lost: OnLost | None,
        until: int = 0,
        kind: str = "role",
    ) -> None:
        own, self._topic = engine.backend.role_store.own_topic(name, until)
        super().__init__(engine.backend, own)
        self.engine, self.name = engine, name
        self.definition = definition
        self._on_lost, self._kind = on_lost, kind

    @property
    def topics(self) -> frozenset[int]:
        """The ids of the role's own topic, and of those that it binds."""
        return frozenset((self.topic_id, *self.definition.topics))

    @property
    def waited(self) -> str:
        """The text of a timeout's error."""
        return f"{self._kind} {self.name!r} was not granted within its timeout"

    def blocking(self) -> Set[int]:
        """The topics that must become free for it, and the roles that hold its claims."""
        return self.topics | self._engine.role_store.conflicting_roles(self.definition)

    def make(self, session: Any, last_sequence: int) -> Role:
        """The role."""
        found = self._engine.role_store.find(session)
        opened = self._engine.open_session(self._topic, session, last_sequence, _OPTIONS)
        seat = Producer(self._engine, self._topic, opened, _OPTIONS)
        try:
            self.granted = Role(self.engine, seat, found, self._on_lost, self._kind)
        except BaseException:
            seat._sender.session.abandon()
            raise
        self.granted._register()  # last: after an interrupt before this, `give_up` closes the role
        return self.granted

    def give_up(self) -> None:
        """Leave the queue. If the role was granted already, release it."""
        granted = self.granted
        super().give_up()
        if granted is not None:
            granted.close()


# ---- the call ----------------------------------------------------------------------------


def request_role(
    engine: Opened,
    name: str,
    topics: Iterable[str],
    groups: Groups,
    claims: ClaimsOfGroups,
    access_mode: AccessMode | ModeName,
    priority: int,
    timeout: float | None,
    settle: float,
    on_lost: OnLost | None,
    kind: str = "role",
) -> RoleFuture:
    """What `Engine.role_async` does, with its checks of the arguments. `kind`: what errors call
    it."""
    backend: EngineBackend = engine.backend
    backend.check_writable()
    check_role_name(name)
    chosen = AccessMode.parse(access_mode)
    if not chosen.is_exclusive:
        raise ValueError("access_mode=shared: a role has one holder; use another access mode")
    priority = check_queue_options(priority, timeout, settle)
    if on_lost is not None and not callable(on_lost):
        raise TypeError("on_lost takes a function of (role, error)")
    names = _names("topics", topics)
    reading = _groups(groups, names)
    wanted = _claims(claims, reading)
    if names or reading or wanted:
        backend.check_supports("roles")
    until = time_limit(timeout, _core.now())
    definition = RoleDefinition(
        tuple(backend.catalog.topic(topic, True, until)[0] for topic in names),
        {
            group: {topic: backend.catalog.topic(topic, True, until)[0] for topic in read}
            for group, read in reading.items()
        },
        wanted,
    )
    future = RoleFuture(engine, name, definition, on_lost, until, kind)
    try:
        request = ProducerRequest(
            future.topic_id,
            chosen.value,
            priority=priority,
            timeout=timeout,
            settle=int(settle * 1e9),
            role=definition,
        )
        backend.open_producer(future, request)
    except BaseException:
        future.give_up()  # interrupted
        raise
    return future


def check_role_name(name: object) -> str:
    """Return the name; ValueError or TypeError if no role can have it."""
    checked = check_name(name, "name")
    if len(checked.encode()) > NAME_BYTES:
        raise ValueError(f"name={name!r}: a role's name has at most {NAME_BYTES} bytes of UTF-8")
    return checked


def role_topic(name: str) -> str:
    """The name of the topic that stands for a role."""
    return PREFIX + check_role_name(name)


def _names(argument: str, names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"{argument}={names!r}: it takes several names; put one into a list")
    found = list(dict.fromkeys(names))
    for name in found:
        if is_internal(check_name(name, argument)):
            raise ValueError(f"{argument}: {name!r} is internal to the library")
    return found


def _groups(groups: Groups, topics: list[str]) -> dict[str, list[str]]:
    if isinstance(groups, Mapping):
        found = {group: _names("groups", read) for group, read in groups.items()}
    else:
        found = dict.fromkeys(_names("groups", groups), topics)
    for group, read in found.items():
        check_group(group)
        if not read:
            raise ValueError(f"groups: {group!r} has no topics to read; it takes at least one")
        for topic in read:
            check_resource("groups", topic)
    return found


def _claims(
    claims: ClaimsOfGroups, reading: Mapping[str, list[str]]
) -> dict[str, dict[str, int | None]]:
    if not isinstance(claims, Mapping):
        raise TypeError(f"claims={claims!r}: it takes {{group: {{resource: generation}}}}")
    found: dict[str, dict[str, int | None]] = {}
    for group, resources in claims.items():
        check_group(group)
        if not isinstance(resources, Mapping) or not resources:
            raise TypeError(f"claims: {group!r} takes a mapping of resources to generations")
        found[group] = {}
        for resource, generation in resources.items():
            check_resource("claims", resource)
            found[group][resource] = check_generation(resource, generation)
            if resource in reading.get(group, ()):
                raise ValueError(
                    f"claims: group {group!r} claims topic {resource!r} already, in groups="
                )
    return found
