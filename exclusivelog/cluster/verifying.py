"""Reading and checking all logs of a place (`Engine.verify`). It changes nothing.

Each log is read from its first record on, and folded by the rule as engines do. What is found:

- records that are damaged, or of another version. Engines do not read behind them; what follows is
  read here for its checksums, and folded no more;
- logs that lack their beginning. They are folded from their checkpoint, if there is one;
- publish times that go backwards (rule G4), and messages that cannot be decoded;
- checkpoints that cannot be read, or differ from the fold up to their record: an engine that
  begins with one would decide otherwise. One that names a record which the log does not have is not
  used by any engine, and not reported;
- snapshots that are damaged, or of messages that the topic does not have;
- positions of reader groups behind the end of their topic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.arguments import is_internal
from exclusivelog.cluster import births, claimed, facts, kinds, waiting
from exclusivelog.cluster.checkpoints import (
    NOWHERE,
    Anchor,
    Checkpoint,
    Mark,
    checkpoint_bytes,
    holds,
    newest_snapshot,
)
from exclusivelog.cluster.claimed import Holdings
from exclusivelog.cluster.claiming import PREFIX, group_of
from exclusivelog.cluster.frames import Frame, Grant, Join, decode, unsealed
from exclusivelog.cluster.ordered import OrderedLog, Position, Record
from exclusivelog.cluster.rule import Judged, State, Verdict
from exclusivelog.cluster.waiting import Waiters
from exclusivelog.errors import LedgerCorruptedError, LedgerIOError, LedgerVersionError
from exclusivelog.types import PREFIX as ROLES
from exclusivelog.types import Report

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine

__all__ = ["verify"]

FACTS = {births.TOPIC: births.MAGIC, kinds.TOPIC: kinds.MAGIC}
DAMAGE = (LedgerCorruptedError, LedgerVersionError)
READ_SECONDS = 60.0


def verify(engine: ClusterEngine) -> Report:
    """Read and check the logs of the engine's place. Internal ones are checked, but not counted."""
    problems: list[str] = []
    names = engine.place.topics()
    for name in FACTS:
        if name in names:
            problems += _check_facts(engine, name)
    # Groups before topics: a position that was committed meanwhile is of messages that are read.
    groups = [_check_log(engine, name) for name in names if name.startswith(PREFIX)]
    topics = [
        _check_log(engine, name)
        for name in names
        if not is_internal(name) or name.startswith(ROLES)
    ]
    ends = {each.name: each.state.next if each.is_whole else None for each in topics}
    for each in (*groups, *topics):
        problems += each.problems
    for group in groups:
        problems += _behind_the_end(group, ends)
    counted = [each for each in topics if not is_internal(each.name)]
    return Report(
        len(counted),
        sum(each.entries for each in counted),
        sum(each.messages for each in counted),
        tuple(problems),
    )


def _behind_the_end(group: Check, ends: dict[str, int | None]) -> Iterator[str]:
    """The problems of a group's positions. `ends`: None for topics whose end is not known, because
    they are damaged."""
    for topic, position in group.holdings.positions.items():
        end = ends.get(topic, 0)
        if end is not None and position > end:
            yield (
                f"group {group_of(group.name)!r}: its position in topic {topic!r} is {position}, "
                f"and the topic ends at {end}"
            )


def _check_facts(engine: ClusterEngine, name: str) -> list[str]:
    """The problems of a log of facts about topics."""
    problems = []
    log = engine.place.open(name)
    try:
        if facts.was_emptied(engine.place, name, log):
            raise facts.lacks_beginning(name, facts.EMPTIED)
        for number, record in enumerate(_records(engine, name, log, None)):
            if number == 0:
                facts.check_birth(name, record)
            elif is_broken(record.data, FACTS[name], facts.VERSION):
                problems.append(f"topic {name!r}: {_place(record)} is damaged: its checksum")
    except DAMAGE as error:
        problems.append(str(error))
    finally:
        log.close()
    return problems


def _check_log(engine: ClusterEngine, name: str) -> Check:
    """Check a topic's or a group's log, and what is kept beside it."""
    check = Check(name)
    log = engine.place.open(name)
    try:
        check.begin(engine, log)
        for record in _records(engine, name, log, check.state.position):
            check.take(record)
        check.end(engine, log)
    finally:
        log.close()
    return check


def _records(
    engine: ClusterEngine, name: str, log: OrderedLog, after: Position | None
) -> Iterator[Record]:
    """The records after this position, up to the present end."""
    end, position = log.end(), after or b""
    tail, deadline = log.tail(after), _core.monotonic() + READ_SECONDS
    try:
        while end is not None and position < end:
            engine.check_open()
            record = tail.next(1.0)
            if record is not None:
                position, deadline = record.position, _core.monotonic() + READ_SECONDS
                yield record
            elif _core.monotonic() > deadline:
                raise LedgerIOError(
                    f"topic {name!r}: a record could not be read within {READ_SECONDS} s"
                )
    finally:
        tail.close()


def _place(record: Record) -> str:
    return f"the record at position {record.position.hex()}"


def is_broken(data: bytes, magic: bytes, version: int) -> bool:
    """Are these bytes marked as such a record, and none?"""
    return data.startswith(magic) and unsealed(magic, version, data) is None


class Check:
    """What one log has, and what is wrong with it. `holdings`: of a group's log."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state, self.waiters, self.holdings = State(), Waiters(), Holdings()
        self.entries = self.messages = 0
        self.problems: list[str] = []
        self._first = -1  # the first offset
        self._anchor = NOWHERE
        self._checkpoint: Checkpoint | None = None
        self._marks: dict[Position, Mark] = {}
        self._wrong_marks = False
        self._folds = True

    @property
    def is_whole(self) -> bool:
        """Was it folded up to its end?"""
        return self._folds

    # ---- the beginning -------------------------------------------------------------------

    def begin(self, engine: ClusterEngine, log: OrderedLog) -> None:
        """Find out with which record the log begins, and what its checkpoint is."""
        self._load_checkpoint(engine)
        try:
            if facts.was_emptied(engine.place, self.name, log):
                raise facts.lacks_beginning(self.name, facts.EMPTIED)
            known = self._known_first(engine)
            record = next(_records(engine, self.name, log, None), None)
            births.check_first(self.name, known, record)
        except DAMAGE as error:
            self.problems.append(str(error))
            self._go_on_from_checkpoint(log)

    def _known_first(self, engine: ClusterEngine) -> Anchor | None:
        try:
            return engine.births.of(self.name)
        except LedgerCorruptedError:  # a problem of that log
            return None

    def _load_checkpoint(self, engine: ClusterEngine) -> None:
        data = checkpoint_bytes(engine.place, self.name)
        if data is None:
            return
        self._checkpoint = Checkpoint.restore(data, self.name)
        if self._checkpoint is None:
            self.problems.append(f"topic {self.name!r}: its checkpoint cannot be read")
            return
        for mark in self._checkpoint.marks:
            if mark.state.position is not None:
                self._marks[mark.state.position] = mark

    def _go_on_from_checkpoint(self, log: OrderedLog) -> None:
        """Fold from the checkpoint, as an engine does that opens a log without its beginning."""
        checkpoint, self._checkpoint = self._checkpoint, None
        self._folds = checkpoint is not None and holds(log, checkpoint.anchor)
        if checkpoint is not None and self._folds:
            self.state, self.holdings = checkpoint.state, checkpoint.claims
            for record in checkpoint.queue:
                self.waiters.take(record)

    # ---- records -------------------------------------------------------------------------

    def take(self, record: Record) -> None:
        """Check the next record."""
        self._anchor = self._anchor.then(record)
        try:
            if self._folds:
                self._fold(record)
            else:
                self._parse(record)
        except DAMAGE as error:
            self._folds = False
            self._note(record, str(error))
        if is_broken(record.data, waiting.MAGIC, waiting.VERSION):  # skipped by all alike
            self._note(record, "a record of its queue is damaged: its checksum does not hold")

    def _note(self, record: Record, why: str) -> None:
        self.problems.append(
            f"topic {self.name!r}: {_place(record)}, behind offset {self.state.next - 1}: {why}"
        )

    def _parse(self, record: Record) -> None:
        if decode(record.data) is None and self.name.startswith(PREFIX):
            claimed.read(record.data)

    def _fold(self, record: Record) -> None:
        state, before = self.state, (self.state.session, self.state.owned)
        published = state.published
        judged = state.fold(record)
        births.check_granted(self.name, state, judged)
        if judged.verdict is Verdict.FOREIGN:
            self._fold_foreign(record.data)
        elif judged.counts:
            self._fold_counting(record, judged, before, published)
        self._compare(record.position)

    def _fold_foreign(self, data: bytes) -> None:
        self.waiters.take(waiting.decode(data), self.state.owning)
        note = claimed.read(data) if self.name.startswith(PREFIX) else None
        if note is not None:
            self.holdings.fold(note)

    def _fold_counting(
        self, record: Record, judged: Judged, before: tuple[int, bool], published: int
    ) -> None:
        parsed = judged.parsed
        if isinstance(parsed, Grant):
            self.waiters.granted(parsed, *before)
        elif isinstance(parsed, Join):
            self.waiters.joined()
        elif isinstance(parsed, Frame):
            self.entries += 1
            self._first = parsed.first if self._first < 0 else self._first
            self._check_messages(record, parsed, published)

    def _check_messages(self, record: Record, frame: Frame, published: int) -> None:
        try:
            contents = frame.contents
        except ValueError as error:
            self._note(record, f"its messages cannot be decoded: {error}")
            return
        self.messages += len(contents)
        for offset, content in enumerate(contents, frame.first):
            if content.publish_time < published:
                self._note(record, f"offset {offset} was published before its predecessor")
            published = max(published, content.publish_time)

    # ---- what is kept beside it ------------------------------------------------------------

    def _compare(self, position: Position) -> None:
        """Compare the fold up to here with the checkpoint, and with its places to read from."""
        mark = self._marks.pop(position, None)
        if mark is not None and mark.state != Mark.of(self.state).state:
            self._wrong_marks = True
        checkpoint = self._checkpoint
        if checkpoint is None or checkpoint.anchor != self._anchor:
            return
        folded = (self.state, self._first, self.waiters.records(), self.holdings)
        kept = (checkpoint.state, checkpoint.first, checkpoint.queue, checkpoint.claims)
        if folded != kept or self._wrong_marks:
            self.problems.append(
                f"topic {self.name!r}: its checkpoint differs from its records up to offset "
                f"{self.state.next}: engines that begin with it decide otherwise"
            )

    def end(self, engine: ClusterEngine, log: OrderedLog) -> None:
        """Check the snapshot, after the last record."""
        try:
            found = newest_snapshot(engine.place, self.name, log, -1)
        except LedgerCorruptedError as error:
            self.problems.append(str(error))
            return
        if found is not None and self._folds and found[0] > self.state.next:
            self.problems.append(
                f"topic {self.name!r}: its snapshot is of {found[0]} messages, and the topic ends "
                f"at offset {self.state.next}"
            )
