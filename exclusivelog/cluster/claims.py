"""Claims on a cluster, and the cursors of reader groups (rules F1 to F6).

Each resource of a group has a log of its own, with the same rule as a topic: a claim is a grant,
with the generation among its holder's properties, and a release ends it. So a claim counts only if
no other came first, and a revoked one is seen as fenced. A group's committed position is a message
of that log, which counts only while its reader has the claim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from exclusivelog import _core
from exclusivelog.admission import ClaimVerdict, judge_claim
from exclusivelog.backend import ClaimSession, Held, Owned, Place
from exclusivelog.cluster.following import (
    ANSWER_SECONDS,
    Owning,
    TopicLog,
    inspect,
    now_ms,
)
from exclusivelog.cluster.frames import Holder
from exclusivelog.cluster.refused import refusal, refuses
from exclusivelog.errors import (
    ExclusiveLogError,
    ProducerFencedError,
    ProducerMovedError,
    ReaderFencedError,
    WaitTimeoutError,
)
from exclusivelog.refusals import claim_refused, claim_revoked, describe_claim, reader_fenced
from exclusivelog.types import AccessMode, ClaimInfo, EngineInfo, GroupInfo

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine

__all__ = ["ClusterClaims"]

PREFIX = "__claim__/"
POLL_SECONDS = 0.02  # while waiting for a claim; deaths send no wake-up


def log_name(group: str, resource: str) -> str:
    """The name of a resource's log.

    >>> log_name("reports", "march"), parts_of(log_name("a/b", "c"))
    ('__claim__/7/reports/march', ('a/b', 'c'))
    """
    return f"{PREFIX}{len(group)}/{group}/{resource}"


def parts_of(name: str) -> tuple[str, str]:
    """(group, resource) of a log's name."""
    length, _, rest = name.removeprefix(PREFIX).partition("/")
    return rest[: int(length)], rest[int(length) + 1 :]


# ---- one claim ---------------------------------------------------------------------------


class ClusterClaim:
    """One claim that an engine has made; see `exclusivelog.backend.ClaimSession`."""

    is_held_in = refuses("transactions")

    def __init__(
        self,
        host: ClusterEngine,
        owning: Owning,
        log: TopicLog,
        group: str,
        resource: str,
        generation: int,
    ) -> None:
        self.id = owning.writer.session
        self.group = group
        self.generations = {resource: generation}
        self.log, self.owning = log, owning
        self.told: Owned | None = None
        self._host = host

    @property
    def ledger(self) -> Place:
        """Where it is kept."""
        return self._host.ledger

    @property
    def is_lost(self) -> bool:
        """Was it revoked, as far as the log was read?"""
        return self.owning.writer.status == "fenced"

    def is_held(self) -> bool:
        """Is it still valid?"""
        self.log.catch_up()
        return self.owning.writer.status == "owner"

    def successor(self) -> EngineInfo | None:
        """None: claims are not handed over on a cluster."""
        return None

    def reason_of(self, error: ExclusiveLogError) -> ExclusiveLogError:
        """The error that ends it."""
        return error

    def lose(self, error: ExclusiveLogError) -> None:
        """End the claim, which was revoked."""
        told, self.told = self.told, None
        if told is not None:
            told.lose(claim_revoked(repr(self), latest_engine(self.log)))

    def notify_wanted(self) -> None:
        """No effect: claims have no queue."""

    def hand_over(self, error: ProducerMovedError, target: str) -> None:
        """Never called: a claim's log is never assigned."""

    def release(self) -> None:
        """Release it, unless it is lost."""
        self.told = None
        self.owning.release(ANSWER_SECONDS)
        self._host.registry.forget(self.owning)

    def __repr__(self) -> str:
        return describe_claim(self.group, self.generations)


class ClusterGroupCursor(ClusterClaim):
    """A group's committed position on one topic; see `exclusivelog.backend.GroupCursor`."""

    topic = 0  # the topic's id
    _error: ReaderFencedError | None = None

    def check(self) -> None:
        """ReaderFencedError if a later reader of the group has come, as far as the log was read."""
        if self.is_lost:
            raise self._fenced()

    def _fenced(self) -> ReaderFencedError:
        if self._error is None:
            topic = repr(next(iter(self.generations)))
            self._error = reader_fenced(topic, self.group, latest_engine(self.log))
        return self._error

    def positions(self, topics: Iterable[int]) -> dict[int, int]:
        """The committed positions, {topic id: offset}, where there is one."""
        found = committed(self._host, self.log)
        return {} if found is None else dict.fromkeys(topics, found)

    def commit(self, positions: Mapping[int, int]) -> None:
        """Commit {topic id: position}, if the claim is still held."""
        try:
            with self.log.changed:
                self.log.check()
                ticket = self.owning.writer.send(
                    [(b"%d" % positions[self.topic], None, None, None, None)], now_ms()
                )
            self.log.await_change(
                lambda: ticket.done, ANSWER_SECONDS, "the commit was not read back"
            )
            if ticket.error is not None:
                raise ticket.error
        except ProducerFencedError:
            raise self._fenced() from None

    def wait(self, cursors: Sequence[Any], marks: Sequence[int], seconds: float) -> None:
        """Sleep until this cursor's `mark()` is no longer what was seen, or so long, or less."""
        cursors[0].await_mark(marks[0], seconds)

    def lose(self, error: ExclusiveLogError) -> None:
        """A later reader has come: wake a thread that waits for messages."""
        self._host.topics.followed(self.topic).frames.wake()

    def end(self) -> None:
        """Release the claim."""
        self.release()


def committed(host: ClusterEngine, log: TopicLog) -> int | None:
    """The position that was committed last in a claim's log, as far as it was read."""
    end = log.state.next
    if not end:
        return None
    cursor = host.open_cursor(log.id, log.name, None, False, True)
    cursor.move_to(end - 1)
    message = cursor.take_one()
    return None if message is None else int(message.value)


Made = TypeVar("Made", bound=ClusterClaim)


# ---- all claims --------------------------------------------------------------------------


class ClusterClaims:
    """Makes claims, and registers those of one engine; see `exclusivelog.backend.ClaimStore`."""

    def __init__(self, host: ClusterEngine) -> None:
        self._host = host
        self._held: dict[int, ClusterClaim] = {}  # by session, to be notified of their loss

    def hold(
        self,
        group: str,
        resources: Mapping[str, int | None],
        make: Callable[[ClaimSession], Held],
        until: int = 0,
    ) -> Held:
        """Claim a resource; `make` turns the claim into the object that is registered."""
        claim = self._take(ClusterClaim, group, resources)
        try:
            made = make(claim)
        except BaseException:
            claim.release()
            raise
        claim.told = made
        self._keep(claim)
        return made

    def join_group(
        self, group: str, topics: Mapping[str, int], generation: int | None
    ) -> ClusterGroupCursor:
        """Become the group's reader of a topic."""
        cursor = self._take(ClusterGroupCursor, group, dict.fromkeys(topics, generation), "yes")
        cursor.topic = next(iter(topics.values()))
        self._keep(cursor)
        return cursor

    def _keep(self, claim: ClusterClaim) -> None:
        self._held = {n: each for n, each in self._held.items() if not each.is_lost}
        self._held[claim.id] = claim
        claim.owning.connect(None, claim)
        if claim.is_lost and claim.owning.writer.error is not None:
            claim.lose(claim.owning.writer.error)  # it was revoked before it was registered

    def _take(
        self, kind: type[Made], group: str, resources: Mapping[str, int | None], reads: str = ""
    ) -> Made:
        if len(resources) != 1:
            raise refusal("several_claims")
        self._host.check_writable()
        [(resource, wanted)] = resources.items()
        log = self._host.topics.named(log_name(group, resource))
        end = _core.monotonic() + ANSWER_SECONDS
        while _core.monotonic() < end:
            log.catch_up()
            seen = inspect(log, self._host.lives)
            last = generation_of(log)
            verdict, generation = judge_claim(last, seen.owner is not None, wanted)
            if verdict in (ClaimVerdict.STALE, ClaimVerdict.HELD):
                holder = None if seen.owner is None else seen.owner.holder
                living = None if holder is None else (engine_of(holder), holder.since)
                raise claim_refused(group, resource, wanted, last, living)
            owning = log.ask(self._holder(group, generation, reads), None, seen.tenure)
            if owning is not None:
                self._host.registry.keep(owning.writer.session, owning)
                return kind(self._host, owning, log, group, resource, generation)
        raise WaitTimeoutError(
            f"resource {resource!r} of group {group!r} was not granted within {ANSWER_SECONDS} s: "
            "others claim it all the time"
        )

    def _holder(self, group: str, generation: int, reads: str) -> Holder:
        info = self._host.info
        return Holder(
            info.id,
            info.name,
            info.pid,
            group,
            AccessMode.EXCLUSIVE_WITH_FENCING,
            0,
            now_ms(),
            {"generation": str(generation), "reads": reads},
        )

    def mark(self) -> int:
        """A number that changes with every release that this engine reads."""
        return self._host.changes

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep for `seconds` at most."""
        time.sleep(min(seconds, POLL_SECONDS))

    def drain_bound(self, claim: int) -> None:
        """No effect: no producer is bound to a claim on a cluster."""

    # ---- inspection ----------------------------------------------------------------------

    def logs(self, group: str | None) -> Iterator[tuple[str, str, TopicLog]]:
        """(group, resource, its log, read to its end)."""
        for name in self._host.place.topics():
            if name.startswith(PREFIX) and group in (None, parts_of(name)[0]):
                log = self._host.topics.named(name)
                log.catch_up()
                yield *parts_of(name), log

    def _info(self, group: str, resource: str, log: TopicLog) -> ClaimInfo | None:
        owner = inspect(log, self._host.lives).owner
        if owner is None:
            return None
        holder = owner.holder
        return ClaimInfo(
            owner.session,
            group,
            {resource: generation_of(log)},
            holder.engine_id,
            holder.engine_name,
            holder.pid,
            holder.since,
            bool(holder.properties.get("reads")),
        )

    def living(self, group: str | None) -> list[ClaimInfo]:
        """The claims that live engines hold, the oldest first."""
        found = [self._info(*each) for each in self.logs(group)]
        return sorted([each for each in found if each is not None], key=lambda info: info.since)

    def groups(self) -> list[GroupInfo]:
        """The reader groups of all topics."""
        found = []
        for group, topic, log in self.logs(None):
            reader, position = self._info(group, topic, log), committed(self._host, log)
            reader = reader if reader is not None and reader.reader else None
            if reader is None and position is None:
                continue
            read = self._host.topics.named(topic)
            read.catch_up()
            lag = None if position is None else max(0, read.state.next - position)
            found.append(GroupInfo(group, topic, position, lag, reader))
        return sorted(found, key=lambda info: (info.group, info.topic))


def generation_of(log: TopicLog) -> int:
    """The last generation of a claim's log, as far as it was read."""
    grant = log.state.grant
    return 0 if grant is None else int(grant.holder.properties["generation"])


def latest_engine(log: TopicLog) -> EngineInfo | None:
    """The engine that has made the last claim of a log, as far as it was read."""
    grant = log.state.grant
    return None if grant is None else engine_of(grant.holder)


def engine_of(holder: Holder) -> EngineInfo:
    """The engine of a claim's holder."""
    return EngineInfo(holder.engine_id, holder.engine_name, holder.pid, {}, 0.0)
