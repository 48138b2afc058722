"""The rows of roles (see roles.py) in the table `meta`.

```text
b"role", claim session             msgpack of RoleRow: one request for a role, waiting or granted
b"role in", topic, claim session   empty: that request has a part on this topic
b"role of", claim session          the claim session of the role that this claim is a part of (u64)
b"role last", topic of the role    msgpack: the topics, groups and claims of the last holder
```

A role's own topic has the name `__role__/<name>`. A request is an ordinary exclusive session there,
its *seat*, which is granted, fenced and handed over as every owner is. A claim session without
resources, its *anchor*, binds the parts to it: the sessions on the role's topics, admitted with the
seat or waiting beside it, and all producers that are opened with `claim=role.claim`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import msgpack

from exclusivelog import _core
from exclusivelog.backend import RoleDefinition
from exclusivelog.local.records import (
    PAIR,
    ROLE,
    U64,
    Claimant,
    Session,
    is_role,
    owner_info,
    u64,
    waiter_info,
)
from exclusivelog.local.storage.tables import Tables, owner_of
from exclusivelog.types import PREFIX, RoleInfo

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger

ANCHORS = "__role__"  # the group of the claim sessions that bind the parts
REQUEST, PART, PART_OF, LAST = ROLE, ROLE + b" in", ROLE + b" of", ROLE + b" last"

Wanted = dict[str, dict[str, int | None]]  # {group: {resource: generation}}


@dataclass(slots=True)
class RoleRow:
    """One request for a role: `topic` is the role's own, `parts` has the session on each bound
    topic, `claimants` the claim sessions of its groups and claims once it is granted."""

    claim: int
    topic: int
    seat: int
    name: str
    topics: list[int]
    groups: dict[str, dict[str, int]]
    claims: Wanted
    parts: dict[int, int] = field(default_factory=dict)
    claimants: list[int] = field(default_factory=list)
    held: bool = False

    def wanted(self) -> Iterator[tuple[str, dict[str, int | None], bool]]:
        """(group, {resource: generation}, is it a reader's) of all that it claims."""
        for group, topics in self.groups.items():
            yield group, dict.fromkeys(topics), True
        for group, resources in self.claims.items():
            yield group, resources, False

    def has(self, session: Session) -> bool:
        """Is this session the seat, or one of the parts on topics?"""
        return session.id in (self.seat, self.parts.get(session.topic))


FIELDS = [each.name for each in fields(RoleRow)]


def find(tables: Tables, claim: int) -> RoleRow | None:
    """The request whose anchor this claim session is; None for any other claim. All callers within
    a transaction get one object, until it is `put`."""
    if not claim:
        return None
    return tables.rows.find_kept("meta", REQUEST + U64.pack(claim), _unpack)


def put(tables: Tables, role: RoleRow) -> None:
    """Write the rows that `find` and `requests_on` read."""
    tables.without_roles = False
    row = msgpack.packb([getattr(role, name) for name in FIELDS])
    tables.rows.put("meta", REQUEST + U64.pack(role.claim), row)
    for topic in role.topics:
        tables.rows.put("meta", PART + PAIR.pack(topic, role.claim), b"")


def drop(tables: Tables, role: RoleRow) -> None:
    """Delete the rows of a request that has ended."""
    tables.rows.delete("meta", REQUEST + U64.pack(role.claim))
    for topic in role.topics:
        tables.rows.delete("meta", PART + PAIR.pack(topic, role.claim))
    for claimant in role.claimants:
        tables.rows.delete("meta", PART_OF + U64.pack(claimant))


def requests_on(tables: Tables, topic: int) -> list[int]:
    """The anchors of the requests that have a part on this topic."""
    return [] if tables.without_roles else list(_with_prefix(tables, PART + U64.pack(topic)))


def are_requests_on(tables: Tables, topic: int) -> bool:
    """Is there such a request? A ledger without roles is asked once in a transaction."""
    if tables.without_roles is None:
        tables.without_roles = next(_with_prefix(tables, PART), None) is None
    return not tables.without_roles and bool(requests_on(tables, topic))


def _with_prefix(tables: Tables, prefix: bytes) -> Iterator[int]:
    """The numbers at the ends of the keys with this prefix."""
    cursor = tables.rows.cursor("meta")
    if cursor.set_range(prefix):
        for key, _ in cursor:
            if not key.startswith(prefix):
                return
            yield u64(key[-U64.size :])


def claim_part(tables: Tables, claimant: int, role: RoleRow) -> None:
    """Record that this claim session is a part of the role."""
    tables.rows.put("meta", PART_OF + U64.pack(claimant), U64.pack(role.claim))
    role.claimants.append(claimant)


def role_of_claim(tables: Tables, claimant: int) -> RoleRow | None:
    """The role that this claim session is a part of; None for any other claim."""
    anchor = tables.rows.find("meta", PART_OF + U64.pack(claimant), u64)
    return None if anchor is None else find(tables, anchor)


def role_of_session(tables: Tables, session: Session | None) -> RoleRow | None:
    """The role whose seat, or part, this session is."""
    role = None if session is None else find(tables, session.bound_to)
    return role if role is not None and session is not None and role.has(session) else None


def put_last(tables: Tables, role: RoleRow) -> None:
    """Record what the role binds, for listings after it was released."""
    row = msgpack.packb([role.topics, role.groups, role.claims])
    tables.rows.put("meta", LAST + U64.pack(role.topic), row)


def last(tables: Tables, topic: int) -> RoleDefinition | None:
    """What the role with this own topic bound when it was last granted; None if it never was."""
    return tables.rows.find("meta", LAST + U64.pack(topic), _unpack_last)


def role_topics(tables: Tables) -> list[tuple[str, int]]:
    """(name of the role, id of its own topic) of all roles, sorted."""
    cursor, prefix = tables.rows.cursor("names"), PREFIX.encode()
    found = []
    if cursor.set_range(prefix):
        for key, data in cursor:
            if not key.startswith(prefix):
                break
            topic = tables.rows.decode("names", u64, data)
            row = tables.topics.intact(topic, "its role is not listed")
            if row is not None and not row.flags & _core.DELETED:
                found.append((key[len(prefix) :].decode(), topic))
    return found


def count_waiters(tables: Tables) -> int:
    """How many requests wait for roles."""
    return sum(tables.topics.get(topic).waiting for _, topic in role_topics(tables))


# ---- what is a part of a role ------------------------------------------------------------


def owned_by(tables: Tables, owner: Session | None) -> int | None:
    """The own topic of the role that this owner's session is a part of; None if it is part of
    none."""
    role = role_of_session(tables, owner)
    return None if role is None or owner is None or role.seat == owner.id else role.topic


def binds(tables: Tables, session: Session) -> bool:
    """Is this session a part, but not the seat, of a role that is held or awaited?"""
    role = role_of_session(tables, session)
    return role is not None and role.seat != session.id


def is_anchor(tables: Tables, claimant: Claimant) -> bool:
    """Does this claim session bind a role? Then no application has made it."""
    return claimant.group == ANCHORS and find(tables, claimant.id) is not None


def parts(tables: Tables, seat: Session) -> tuple[RoleRow, list[Session], list[Claimant]]:
    """The parts of a granted role; none if it was lost meanwhile."""
    role = find(tables, seat.bound_to)
    if role is None:
        return RoleRow(seat.bound_to, seat.topic, seat.id, "", [], {}, {}), [], []
    held = [tables.sessions.holder(topic, number) for topic, number in role.parts.items()]
    claims = [tables.claims.claimant(number) for number in role.claimants]
    return role, [s for s in held if s is not None], [c for c in claims if c is not None]


def conflicting_roles(tables: Tables, definition: RoleDefinition) -> set[int]:
    """The own topics of the roles that hold claims which this request wants."""
    wanted = [(group, topic) for group, read in definition.groups.items() for topic in read]
    wanted += [(group, name) for group, names in definition.claims.items() for name in names]
    holders = [tables.claims.claim(*each)[1] for each in wanted]
    found = [role_of_claim(tables, holder) for holder in holders if holder]
    return {role.topic for role in found if role is not None}


def _unpack(data: bytes) -> RoleRow:
    return RoleRow(*msgpack.unpackb(data, strict_map_key=False))


def _unpack_last(data: bytes) -> RoleDefinition:
    topics, groups, claims = msgpack.unpackb(data)
    return RoleDefinition(tuple(topics), groups, claims)


# ---- what is left for the end of a transaction -------------------------------------------
# The end of a role changes the rows of several topics, and whoever notices it may hold one of these
# in memory, changed and not yet written. A topic that a role waits for may go to that role only
# with its other parts. So both are noted here, and `RoleGrants.settle` carries them out before the
# commit, when all rows are written.

Noted = tuple[str, str, int]  # kind and reason of an end, and the session that ended first


def end_role_of(tables: Tables, session: Session, kind: str, reason: str) -> None:
    """A bound session has ended. If it is part of a role, the whole role ends in this
    transaction."""
    role = role_of_session(tables, session)
    if role is not None:
        end_role(tables, role, (kind, reason, session.id))


def end_role_with(tables: Tables, claimant: Claimant, kind: str) -> None:
    """The same for a claim."""
    role = role_of_claim(tables, claimant.id) or find(tables, claimant.id)
    if role is not None:
        end_role(tables, role, (kind, "claim", 0))


def end_role(tables: Tables, role: RoleRow, end: Noted) -> None:
    """End this role, unless that is noted already."""
    tables.role_ends.setdefault(role.claim, end)


def postpones(tables: Tables, row: _core.TopicRow) -> bool:
    """Is this topic's next owner chosen at the end of the transaction, because a role may wait for
    it?"""
    if not is_role(row.name) and not (row.waiting and are_requests_on(tables, row.id)):
        return False
    tables.to_promote.add(row.id)
    return True


# ---- listing ---------------------------------------------------------------------------


def list_roles(ledger: Ledger) -> list[RoleInfo]:
    """All roles, by name."""
    with ledger.read() as tables:
        alive = ledger.lockfile.slots.alive
        return [_info(tables, alive, *each) for each in role_topics(tables)]


def _names(tables: Tables, topics: Iterable[int]) -> tuple[str, ...]:
    """Their names, sorted. One that was deleted since may be forgotten."""
    rows = [tables.topics.intact(each, "its name is not listed with its role") for each in topics]
    return tuple(sorted(row.name for row in rows if row is not None))


def _info(tables: Tables, alive: Callable[[int, str], bool], name: str, topic: int) -> RoleInfo:
    row = tables.topics.get(topic)
    owner = owner_of(tables, row)
    holder = owner if owner is not None and alive(owner.slot, owner.engine) else None
    bound = last(tables, topic) or RoleDefinition((), {}, {})
    waiters = [waiter_info(w) for w in tables.sessions.waiters(topic) if alive(w.slot, w.engine)]
    return RoleInfo(
        name,
        row.epoch,
        None if holder is None else owner_info(holder),
        _names(tables, bound.topics),
        {group: tuple(topics) for group, topics in bound.groups.items()},
        {group: tuple(resources) for group, resources in bound.claims.items()},
        tuple(waiters),
    )
