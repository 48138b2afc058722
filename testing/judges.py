"""The judge: compares a topic with the recorded calls, and names each broken rule and its offset.

A `Call` is one append as its sender recorded it: the messages, before the append, and the outcome,
after it. A `Read` has what a reader got. Times are nanoseconds of one clock that all processes of
the machine share. A sender that died in between has recorded no outcome: its call may be in the
log, whole and once, or not.

>>> a = Call("a", (b"1", b"2"), begun=0).acknowledged(offset=0, epoch=1, ended=5)
>>> judge([Row(0, 1, 7, b"1"), Row(1, 1, 7, b"2")], [a])
[]
>>> print(*judge([Row(0, 1, 7, b"1")], [a]), sep="\\n")
G3 at offset 0: 1 of 2 messages of one append by a are there
>>> print(*judge([], [a]), sep="\\n")
H1 at offset 0: b'1' of a was acknowledged, and is gone
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import exclusivelog as xl

ACKNOWLEDGED, REFUSED, UNKNOWN = "acknowledged", "refused", "unknown"


class Row(NamedTuple):
    """A message of the log, as the judge needs it."""

    offset: int
    epoch: int
    session: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Call:
    """One append. `stale` marks one that must be refused."""

    sender: str  # its calls are made one after the other
    values: tuple[bytes, ...]
    begun: int
    exclusive: bool = True
    stale: bool = False
    outcome: str = UNKNOWN
    offset: int | None = None  # None: it was not told
    epoch: int | None = None
    ended: int | None = None

    def acknowledged(self, ended: int, offset: int | None = None, epoch: int | None = None) -> Call:
        """The same call with its end: it was acknowledged."""
        return replace(self, outcome=ACKNOWLEDGED, ended=ended, offset=offset, epoch=epoch)

    def refused(self, ended: int) -> Call:
        """The same call with its end: it raised an error, and is not in the log."""
        return replace(self, outcome=REFUSED, ended=ended)


@dataclass(frozen=True, slots=True)
class Read:
    """What a reader got from the offset `start` on, to the end that the topic then had."""

    reader: str
    begun: int
    ended: int
    start: int
    values: tuple[bytes, ...]


class Broken(NamedTuple):
    """A broken rule, and where."""

    rule: str
    offset: int
    what: str

    def __str__(self) -> str:
        return f"{self.rule} at offset {self.offset}: {self.what}"


def about(texts: Iterable[str], *rules: str) -> int:
    """How many of these texts are about one of these rules.

    >>> about([str(Broken("H1", 3, "it is gone")), "orders: G3 at offset 1: half"], "H1", "B9")
    1
    """
    pattern = re.compile(rf"\b({'|'.join(rules)})( at offset|:)")
    return sum(pattern.search(text) is not None for text in texts)


def read_rows(topic: xl.Topic) -> list[Row]:
    """The whole topic."""
    return [Row(m.offset, m.epoch, m.session, m.value or b"") for m in topic.reader()]


def judge(rows: Sequence[Row], calls: Sequence[Call], reads: Iterable[Read] = ()) -> list[Broken]:
    """Every broken rule. No two messages of `calls` may be alike."""
    case = Case(rows, calls)
    return [
        *case.density(),
        *case.calls_kept(),
        *case.senders_order(),
        *case.epochs(),
        *case.real_time(),
        *case.reads_agree(reads),
    ]


class Case:
    """A topic and the calls on it."""

    def __init__(self, rows: Sequence[Row], calls: Sequence[Call]) -> None:
        self.rows = rows
        self.calls = calls
        self.places: dict[bytes, int] = {}  # of the first message that says so
        for place, row in enumerate(rows):
            self.places.setdefault(row.value, place)
        self.caller = {value: call for call in calls for value in call.values}

    # ---- what stands there ---------------------------------------------------------------

    def density(self) -> Iterator[Broken]:
        """Offsets without a gap; each message has a sender, and is there once."""
        for place, row in enumerate(self.rows):
            if row.offset != place:
                yield Broken("G5", place, f"offset {row.offset} stands here")
            if self.places[row.value] != place:
                first = self.places[row.value]
                yield Broken("G2", place, f"{row.value!r} is here again, after {first}")
            if row.value not in self.caller:
                yield Broken("B9", place, f"{row.value!r} was never sent")

    def calls_kept(self) -> Iterator[Broken]:
        """Check that each call's outcome is true."""
        for call in self.calls:
            there = [self.places[value] for value in call.values if value in self.places]
            if call.stale and call.outcome == ACKNOWLEDGED:
                yield Broken("B3", call.offset or 0, f"{call.sender} was stale, and was accepted")
            if call.outcome == REFUSED and there:
                yield Broken("B9", there[0], f"{call.values[0]!r} was refused, and is here")
            elif there and there != list(range(there[0], there[0] + len(call.values))):
                what = f"{len(there)} of {len(call.values)} messages of one append by {call.sender}"
                yield Broken("G3", there[0], f"{what} are there")
            elif call.outcome == ACKNOWLEDGED:
                yield from self._promised(call, there[0] if there else None)

    def _promised(self, call: Call, place: int | None) -> Iterator[Broken]:
        first = call.values[0]
        if place is None:
            at = len(self.rows) if call.offset is None else call.offset
            yield Broken("H1", at, f"{first!r} of {call.sender} was acknowledged, and is gone")
        elif call.offset is not None and self.rows[place].offset != call.offset:
            yield Broken("B9", place, f"{first!r} was acknowledged at offset {call.offset}")
        elif call.epoch is not None and self.rows[place].epoch != call.epoch:
            what = f"{first!r} of epoch {call.epoch} has epoch {self.rows[place].epoch}"
            yield Broken("B8", place, what)

    def senders_order(self) -> Iterator[Broken]:
        """Check that each sender's calls are in order, without gaps."""
        last: dict[str, int] = collections.defaultdict(lambda: -1)
        missing: dict[str, Call] = {}
        for call in self.calls:
            place = self.places.get(call.values[0])
            if place is None:
                if call.outcome == UNKNOWN:
                    missing[call.sender] = call
                continue
            if place < last[call.sender]:
                yield Broken("B9", place, f"{call.values[0]!r} stands before what came before it")
            if call.sender in missing:
                gone = missing.pop(call.sender).values[0]
                yield Broken("H1", place, f"{gone!r}, sent before {call.values[0]!r}, is missing")
            last[call.sender] = max(last[call.sender], place)

    # ---- epochs --------------------------------------------------------------------------

    def epochs(self) -> Iterator[Broken]:
        """Check that epochs never decrease, an owner's messages are one run, and an epoch has one
        owner."""
        behind: dict[int, set[int]] = collections.defaultdict(set)  # epoch: owners that are over
        previous: Row | None = None
        for place, row in enumerate(self.rows):
            if previous is not None:
                if row.epoch < previous.epoch:
                    yield Broken("B8", place, f"epoch {row.epoch} behind epoch {previous.epoch}")
                if row.session != previous.session and self._alone(previous):
                    behind[previous.epoch].add(previous.session)
            if self._alone(row) and behind[row.epoch]:
                yield from self._second(place, row, behind[row.epoch])
            previous = row

    def _alone(self, row: Row) -> bool:
        call = self.caller.get(row.value)
        return call is not None and call.exclusive

    def _second(self, place: int, row: Row, over: set[int]) -> Iterator[Broken]:
        if row.session in over:
            yield Broken("B8", place, f"session {row.session} is interleaved with others")
        if over - {row.session}:
            yield Broken("B1", place, f"epoch {row.epoch} has a second owner: {row.session}")

    # ---- time ----------------------------------------------------------------------------

    def real_time(self) -> Iterator[Broken]:
        """Check that a call that was acknowledged before another began precedes it."""
        ends = sorted(
            (call.ended, self.places[call.values[-1]])
            for call in self.calls
            if call.ended is not None and call.values[-1] in self.places
        )
        highest = _highest(ends)
        for call in sorted(self.calls, key=lambda call: call.begun):
            place = self.places.get(call.values[0])
            if place is not None and place < (before := highest(call.begun)):
                what = f"{call.values[0]!r} was begun when offset {before} was acknowledged"
                yield Broken("B9", place, what)

    def reads_agree(self, reads: Iterable[Read]) -> Iterator[Broken]:
        """Each read is a run of the log, and has all that was acknowledged, or read by others,
        before it began."""
        ordered = sorted(reads, key=lambda read: read.begun)
        known = [
            (call.ended, self.places[call.values[-1]] + 1)
            for call in self.calls
            if call.outcome == ACKNOWLEDGED
            and call.ended is not None
            and call.values[-1] in self.places
        ]
        known += [(read.ended, read.start + len(read.values)) for read in ordered if read.values]
        least = _highest(sorted(known))
        for read in ordered:
            stop = read.start + len(read.values)
            there = tuple(row.value for row in self.rows[read.start : stop])
            if there != read.values:
                yield Broken("G5", read.start, f"{read.reader} has read what is not in the log")
            if stop < (expected := least(read.begun)):
                yield Broken("G5", stop, f"{read.reader} has missed what was there: {expected}")


class _highest:  # noqa: N801 - it is used as a function
    """The highest number of all (time, number) before a time; asked with times that grow."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.pairs, self.at, self.most = pairs, 0, -1

    def __call__(self, time: int) -> int:
        while self.at < len(self.pairs) and self.pairs[self.at][0] < time:
            self.most = max(self.most, self.pairs[self.at][1])
            self.at += 1
        return self.most


# ---- what a damaged ledger gives out -----------------------------------------------------


def judge_damage(
    sent: Mapping[int, bytes | None], seen: Mapping[int, bytes | None], named: set[int]
) -> list[Broken]:
    """After damage: check that messages are as sent, and that missing ones were named."""
    broken = [
        Broken("G9", offset, f"{value!r} is read, which was never sent here")
        for offset, value in seen.items()
        if offset not in sent or sent[offset] != value
    ]
    return broken + [
        Broken("G9", offset, "neither read nor named as damaged")
        for offset in sent
        if offset not in seen and offset not in named
    ]
