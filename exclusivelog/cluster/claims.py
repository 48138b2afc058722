"""Claims on a cluster, and the cursors of reader groups (rules F1 to F6).

The claims of one group are one ordered log (`claiming`), whose records every engine folds by the
same rule (`claimed`): a claim of many resources is one record, and so is a commit of a reader
group's positions on many topics. Both count only while nothing has ended their session.

A claim on a cluster guards what is in this log: other claims of the group, and the positions of its
readers. It guards no message of a topic, as topics have logs of their own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from exclusivelog import _core
from exclusivelog.admission import ClaimVerdict, judge_claim
from exclusivelog.backend import ClaimSession, Held, Owned
from exclusivelog.cluster.claimed import Noting, Ruling, Take
from exclusivelog.cluster.claiming import PREFIX, GroupLog, draw_session, group_of, log_name
from exclusivelog.cluster.following import ANSWER_SECONDS, CLOSE_SECONDS, await_any, now_ms
from exclusivelog.cluster.refused import refuses
from exclusivelog.errors import (
    ClusterError,
    ExclusiveLogError,
    LedgerVersionError,
    OwnershipError,
    OwnershipLostError,
    ReaderFencedError,
    WaitTimeoutError,
)
from exclusivelog.refusals import (
    claim_refused,
    claim_revoked,
    describe_claim,
    group_is_read,
    reader_fenced,
)
from exclusivelog.types import ClaimInfo, EngineInfo, GroupInfo

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine

__all__ = ["ClusterClaims"]

POLL_SECONDS = 0.02  # while waiting for a claim; deaths send no wake-up
EARLIER = "__claim__/"  # begins the name of a resource's log, which earlier versions wrote


# ---- one claim ---------------------------------------------------------------------------


class ClusterClaim:
    """One claim that an engine has made; see `exclusivelog.backend.ClaimSession`."""

    is_held_in = refuses("transactions")

    def __init__(self, host: ClusterEngine, log: GroupLog, take: Take) -> None:
        self.id = take.session
        self.group = group_of(log.name)
        self.generations = dict(take.generations)
        self.log, self.take = log, take
        self.ruling: Ruling | None = None
        self.rival: Noting | None = None
        self.committed = 0
        self._told: Owned | None = None
        self._host = host

    @property
    def ledger(self) -> object:
        """Where it is kept."""
        return self._host.ledger

    def is_held(self) -> bool:
        """Is it still valid?"""
        self.log.catch_up()
        return self.id in self.log.holdings.sessions

    def successor(self) -> EngineInfo | None:
        """None: claims are not handed over on a cluster."""
        return None

    def tell(self, owned: Owned) -> None:
        """Notify this object when the claim is lost: at once, if it is."""
        with self.log.changed:
            self._told = owned
            lost = self.rival is not None
        if lost:
            self.lose()

    def lose(self) -> None:
        """It was revoked."""
        with self.log.changed:
            told, self._told = self._told, None
        if told is not None:
            told.lose(claim_revoked(repr(self), self._rival_engine))

    @property
    def _rival_engine(self) -> EngineInfo | None:
        return self.rival.engine if isinstance(self.rival, Take) else None

    def release(self) -> None:
        """Release it, unless it is lost."""
        with self.log.changed:
            self._told = None
        if self.rival is None:
            self.log.leave([self.id])
            self.log.await_end([self.id], ANSWER_SECONDS)

    def __repr__(self) -> str:
        return describe_claim(self.group, self.generations)


class ClusterGroupCursor(ClusterClaim):
    """A group's committed positions on its topics; see `exclusivelog.backend.GroupCursor`."""

    topics: Mapping[str, int] = {}  # name: id
    _error: ReaderFencedError | None = None

    def check(self) -> None:
        """ReaderFencedError if a later reader of the group has come, as far as the log was read."""
        if self.rival is not None:
            raise self._fenced()

    def _fenced(self) -> ReaderFencedError:
        if self._error is None:
            names = ", ".join(map(repr, self.topics))
            self._error = reader_fenced(names, self.group, self._rival_engine)
        return self._error

    def positions(self, topics: Iterable[int]) -> dict[int, int]:
        """The committed positions, {topic id: offset}, where there is one."""
        self.log.settle(self)
        committed = self.log.holdings.positions
        found = {number: committed.get(name) for name, number in self.topics.items()}
        return {topic: at for topic in topics if (at := found.get(topic)) is not None}

    def commit(self, positions: Mapping[int, int]) -> None:
        """Commit {topic id: position}, if the claim is still held."""
        named = {
            name: positions[number] for name, number in self.topics.items() if number in positions
        }
        if not self.log.commit(self, named):
            raise self._fenced()

    def wait(self, cursors: Sequence[Any], marks: Sequence[int], seconds: float) -> None:
        """Sleep until the `mark()` of one of these cursors has changed, or so long, or less."""
        await_any([each.changes for each in cursors], marks, seconds)

    def lose(self, error: OwnershipLostError | None = None) -> None:
        """A later reader has come: wake a thread that waits for messages."""
        for topic in self.topics.values():
            self._host.topics.followed(topic).frames.wake()

    def end(self) -> None:
        """Release the claim."""
        self.release()


Made = TypeVar("Made", bound=ClusterClaim)


# ---- all claims --------------------------------------------------------------------------


class ClusterClaims:
    """Makes claims; see `exclusivelog.backend.ClaimStore`."""

    def __init__(self, host: ClusterEngine) -> None:
        self._host = host
        self._checked = False

    def hold(
        self,
        group: str,
        resources: Mapping[str, int | None],
        make: Callable[[ClaimSession], Held],
        until: int = 0,
    ) -> Held:
        """Claim resources; `make` turns the claim into the object that is notified."""
        claim = self._take(ClusterClaim, group, resources)
        try:
            made = make(claim)
        except BaseException:
            claim.release()
            raise
        claim.tell(made)
        return made

    def join_group(
        self, group: str, topics: Mapping[str, int], generation: int | None
    ) -> ClusterGroupCursor:
        """Become the group's reader of these topics."""
        wanted = dict.fromkeys(topics, generation)
        cursor = self._take(ClusterGroupCursor, group, wanted, reads=True)
        cursor.topics = dict(topics)
        return cursor

    def _take(
        self,
        kind: type[Made],
        group: str,
        resources: Mapping[str, int | None],
        reads: bool = False,
    ) -> Made:
        self._host.check_writable()
        log = self._log(group)
        end = _core.monotonic() + ANSWER_SECONDS
        while _core.monotonic() < end:
            claim = kind(self._host, log, self._judged(log, group, resources, reads))
            if log.request(claim) is Ruling.COUNTS:
                return claim
        raise WaitTimeoutError(
            f"{describe_claim(group, dict(resources))} was not granted within {ANSWER_SECONDS} s: "
            "others claim its resources all the time"
        )

    def _log(self, group: str) -> GroupLog:
        if not self._checked:
            self._refuse_earlier_claims()
            self._checked = True
        log = self._host.topics.named(log_name(group))
        assert isinstance(log, GroupLog)
        return log

    def _refuse_earlier_claims(self) -> None:
        """LedgerVersionError if the place has claims of an earlier version: their generations would
        begin anew, and be given twice (rule F2)."""
        names: list[str] = []
        with contextlib.suppress(ClusterError):  # the admin API cannot be used
            names = [name for name in self._host.place.topics() if name.startswith(EARLIER)]
        if names:
            raise LedgerVersionError(
                f"{self._host.place.url} has claims of an earlier development version, in "
                f"{names[0]!r}; use another namespace, or delete the {len(names)} topics whose "
                f"names begin with {EARLIER!r}: then generations begin at 1 again"
            )

    def _judged(
        self, log: GroupLog, group: str, resources: Mapping[str, int | None], reads: bool
    ) -> Take:
        """The take that would count now. Raises OwnershipError where a generation is refused."""
        try:
            return self._judge(log, group, resources, reads)
        except OwnershipError:  # by what was read so far, which need not be all: the log's rule
            log.catch_up()  # refuses a take that is out of date, but nothing else refuses this
            return self._judge(log, group, resources, reads)

    def _judge(
        self, log: GroupLog, group: str, resources: Mapping[str, int | None], reads: bool
    ) -> Take:
        seen, generations = dict[str, int](), dict[str, int]()
        with log.changed:
            looked = [
                (name, log.holdings.last(name), log.holdings.holder(name)) for name in resources
            ]
        for name, last, holder in looked:
            living = None if holder is None or not self._host.lives(holder.engine_id) else holder
            wanted = resources[name]
            verdict, generation = judge_claim(last.generation, living is not None, wanted)
            if verdict in (ClaimVerdict.STALE, ClaimVerdict.HELD):
                by = None if living is None else (living.engine, living.since)
                raise claim_refused(group, name, wanted, last.generation, by)
            seen[name], generations[name] = last.session, generation
        info = self._host.info
        return Take(
            draw_session(),
            seen,
            generations,
            info.id,
            info.name,
            info.pid,
            dict(info.properties),
            now_ms(),
            reads,
        )

    def mark(self) -> int:
        """A number that changes with every release that this engine reads."""
        return self._host.changes

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep for `seconds` at most."""
        time.sleep(min(seconds, POLL_SECONDS))

    def drain_bound(self, claim: int) -> None:
        """No effect: no producer is bound to a claim on a cluster."""

    def close(self) -> None:
        """Release all claims of this engine, because it is closed."""
        logs = [each for each in self._host.topics.all() if isinstance(each, GroupLog)]
        left = [(log, log.sessions_here()) for log in logs]
        for log, sessions in left:
            log.leave(sessions)
        deadline = _core.monotonic() + CLOSE_SECONDS
        for log, sessions in left:
            with contextlib.suppress(ExclusiveLogError):
                log.await_end(sessions, max(0.0, deadline - _core.monotonic()))

    # ---- inspection ----------------------------------------------------------------------

    def logs(self, group: str | None) -> Iterator[tuple[str, GroupLog]]:
        """(group, its log, read to its end)."""
        for name in self._host.place.topics():
            if name.startswith(PREFIX) and group in (None, group_of(name)):
                log = self._log(group_of(name))
                log.catch_up()
                yield group_of(name), log

    def _living(self, group: str, log: GroupLog) -> list[ClaimInfo]:
        with log.changed:
            takes = list(log.holdings.sessions.values())
        alive = {engine for engine in {t.engine_id for t in takes} if self._host.lives(engine)}
        return [_info(group, take) for take in takes if take.engine_id in alive]

    def living(self, group: str | None) -> list[ClaimInfo]:
        """The claims that live engines hold, the oldest first."""
        found = [info for each, log in self.logs(group) for info in self._living(each, log)]
        return sorted(found, key=lambda info: info.since)

    def groups(self) -> list[GroupInfo]:
        """The reader groups of all topics."""
        found = []
        for group, log in self.logs(None):
            living = [info for info in self._living(group, log) if info.reader]
            readers = {topic: info for info in living for topic in info.generations}
            with log.changed:
                positions = dict(log.holdings.positions)
            for topic in {*positions, *readers}:
                at = positions.get(topic)
                lag = None if at is None else max(0, self._end_of(topic) - at)
                found.append(GroupInfo(group, topic, at, lag, readers.get(topic)))
        return sorted(found, key=lambda info: (info.group, info.topic))

    def _end_of(self, topic: str) -> int:
        read = self._host.topics.named(topic)
        read.catch_up()
        return read.state.next

    def delete_group(self, name: str) -> int:
        """Remove the positions of a reader group without a reader; how many there were."""
        for _, log in self.logs(name):
            while True:
                with log.changed:
                    takes, count = log.holdings.takes, len(log.holdings.positions)
                reader = next((each for each in self._living(name, log) if each.reader), None)
                if reader is not None:
                    raise group_is_read(name, reader)
                if not count or log.clear(takes):
                    return count
        return 0


def _info(group: str, take: Take) -> ClaimInfo:
    return ClaimInfo(
        take.session,
        group,
        dict(take.generations),
        take.engine_id,
        take.engine_name,
        take.pid,
        take.since,
        take.reads,
    )
