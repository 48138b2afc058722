"""The small world of the cluster's model: processes with writers, and an ordered log that may let
in anything late, twice or never. The writers are `exclusivelog.cluster.log.Writer`, and the rule is
`exclusivelog.cluster.rule`.

A state is a value: a writer is taken apart into a `Player`, and put together again for its next
step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from exclusivelog.admission import Decision, Request
from exclusivelog.cluster.following import Having, look
from exclusivelog.cluster.frames import (
    Content,
    Grant,
    Holder,
    Join,
    Parsed,
    Release,
    Terminate,
    decode,
    encode,
)
from exclusivelog.cluster.log import Sent, Status, Ticket, Writer
from exclusivelog.cluster.ordered import Position, Record
from exclusivelog.cluster.requests import decide
from exclusivelog.cluster.rule import Judged, State
from exclusivelog.types import AccessMode

NAME = "p"  # of all exclusive producers: their sequence ids go on with one another's
HOLDER = Holder("e", "host", 1, NAME, AccessMode.EXCLUSIVE)
WAITER = replace(HOLDER, access_mode=AccessMode.WAIT_FOR_EXCLUSIVE)
FIRST_SESSION = 7
DRAWN_APART = 10  # sessions that are drawn one after the other; those of heirs come in between


WAITING = ("asking", "cancelled")  # statuses of a writer with a request


class Violation(Exception):
    """The judge's verdict; the notes are the way to it."""


class Under(NamedTuple):
    """A frame that was appended and not read back: as `log.Sent`, by number."""

    first: int
    end: int
    record: int
    tickets: tuple[tuple[int, int], ...]  # number, sequence id of its first message


class Player(NamedTuple):
    """A process with a reader and a writer. `read` counts the records that it has read; `claim` is
    the `topic_epoch` that it has asked with, and `mine` the last epoch that it had. `shared`: it
    asks to share the topic. `base` counts the records that had been removed when it opened the
    log. `waits`: its number in the queue; `left`: the number with which it has left that; `heir`:
    the number to which it passes the topic on."""

    read: int = 0
    status: Status = "refused"
    epoch: int = 0
    session: int = 0
    request: int = 0
    sent: tuple[Under, ...] = ()
    unsent: tuple[tuple[int, int], ...] = ()
    first: int = 0
    sequence: int = -1
    claim: int = 0
    mine: int = 0
    shared: bool = False
    base: int = 0
    waits: int = 0
    left: int = 0
    heir: int = 0


class Outcome(NamedTuple):
    """What has become of a send: "open", "written" at `offset`, "fenced", "never" (its process died
    before it was appended), or "doubt" (after): it was to be at `offset`, by `session`."""

    kind: str = "open"
    offset: int = -1
    session: int = 0


class World(NamedTuple):
    """A state. Records are numbers of `Records`; the last fields say what may still happen.

    `sent` has all records that were ever appended: each may come in at any time, any number of
    times, or never. The log has those that have come in and count. (In a world that `keeps`, it has
    all that have come in, each append comes in once, and `copies` more.)"""

    log: tuple[int, ...]
    sent: tuple[int, ...]  # sorted
    players: tuple[Player, ...]  # sorted: one is like the other
    tickets: tuple[Outcome, ...]
    asks: int
    sends: int
    releases: int
    crashes: int
    copies: int
    terminations: int
    trims: int
    passes: int
    removed: int = 0  # records at the beginning, which a process that opens the log does not get


class Size(NamedTuple):
    """How much may happen in a walk. `window` is the writers'; where it `evicts`, a process may
    release the session of another one, which uses up one of `releases`, too. `shared`: 1, shared
    producers of one name ask as well; 2, each has its own name. `terminations`: of the topic, by
    any process. `trims`: how often the beginning of the log is removed. `passes`: how often an
    owner passes the topic on to a waiter."""

    name: str
    players: int = 2
    asks: int = 2
    sends: int = 2
    releases: int = 1
    crashes: int = 0
    copies: int = 0
    terminations: int = 0
    trims: int = 0
    passes: int = 0
    window: int = 2
    keeps: bool = False
    evicts: bool = False
    shared: int = 0

    def __str__(self) -> str:
        return self.name

    def start(self) -> World:
        """The first state."""
        return World((), (), (Player(),) * self.players, (), *self[2:10])


SHARED_SIZES = (
    Size("shared producers of one name", asks=2, sends=1, releases=2, shared=1, evicts=True),
    Size("shared producers", shared=2),
)
TERMINATION_SIZES = (
    Size("terminations", asks=2, sends=2, terminations=1),
    Size("terminations beside shared producers", sends=1, shared=2, terminations=1),
)
TRIM_SIZES = (Size("a beginning that is removed", asks=2, sends=2, trims=1, keeps=True),)
PASS_SIZES = (
    Size("owners that pass the topic on", asks=3, sends=2, passes=2),
    Size("evictions of owners that pass the topic on", asks=2, sends=1, passes=1, evicts=True),
    Size("owners that pass the topic on to the dead", sends=1, passes=1, crashes=1, releases=0),
)
SMALL_SIZES = (
    Size("rival owners", asks=3, sends=2),
    Size("deaths", asks=3, sends=2, releases=0, crashes=1),
    Size("a full window", asks=2, sends=3, window=1),
    Size("evictions", asks=2, sends=2, releases=2, evicts=True),
    *TERMINATION_SIZES,
    Size("what does not count is kept", sends=1, copies=1, keeps=True),
    *SHARED_SIZES,
    *TRIM_SIZES,
    *PASS_SIZES,
)
MEDIUM_SIZES = (
    *SMALL_SIZES,
    Size("three rivals", players=3, asks=3, sends=3),
    Size("evictions and hand-overs", asks=3, sends=2, releases=2, evicts=True),
    Size("rivals that terminate", asks=3, sends=2, terminations=2),
    Size("rivals of a waiter", players=3, asks=3, sends=2, passes=1),
)
ALL_SIZES = (
    *MEDIUM_SIZES,
    Size("many hand-overs", asks=4, sends=2, releases=2),
    Size("deaths and releases", asks=3, sends=3, crashes=1),
    Size("three shared producers", players=3, asks=3, sends=3, shared=2),
    Size("shared producers that die", asks=3, crashes=1, shared=2, evicts=True),
    Size("shared producers and owners", asks=3, shared=2),
)


class Records:
    """All records of a walk, by number from 1 on, and what logs of them amount to."""

    def __init__(self) -> None:
        self.data: list[bytes] = [b""]
        self._numbers: dict[bytes, int] = {}
        self._parsed: list[Parsed | None] = [None]
        self._folded: dict[tuple[int, ...], tuple[State, Judged | None]] = {(): (State(), None)}

    def number(self, data: bytes) -> int:
        """The number of a record."""
        if data not in self._numbers:
            self._numbers[data] = len(self.data)
            self.data.append(data)
            self._parsed.append(decode(data))
        return self._numbers[data]

    def parsed(self, number: int) -> Parsed | None:
        """The record with this number, decoded."""
        return self._parsed[number]

    def folded(self, log: tuple[int, ...]) -> tuple[State, Judged | None]:
        """The state after these records, saved and restored before each, and the last verdict."""
        if log not in self._folded:
            before, _ = self.folded(log[:-1])
            state = State.restore(before.save())
            self._folded[log] = state, state.fold(self.at(log))
        return self._folded[log]

    def at(self, log: tuple[int, ...]) -> Record:
        """The last record of a log."""
        return Record(Position(len(log).to_bytes(2, "big")), self.data[log[-1]])


def value(ticket: int, index: int = 0) -> bytes:
    """The value of a message; no two messages have the same."""
    return b"%d.%d" % (ticket, index)


def contents(ticket: int, sequence: int, name: str = NAME) -> tuple[Content, ...]:
    """The messages of a send: one, or two for every other send."""
    return tuple(
        [
            Content(value(ticket, index), None, {}, None, 0, name, sequence + index)
            for index in range(1 + ticket % 2)
        ]
    )


class Effect(NamedTuple):
    """What a step of one process does: the process after it, the records that it appends, the
    sends that it settles, and whether it has begun one."""

    player: Player
    appended: tuple[int, ...] = ()
    settled: tuple[tuple[int, Outcome], ...] = ()
    begun: bool = False

    def on(self, world: World, number: int, keeps: bool) -> World:
        """The state after this step of the process with this number."""
        players, tickets, sent = list(world.players), world.tickets, world.sent
        players[number] = self.player
        if self.begun:
            tickets = (*tickets, Outcome())
        if self.settled:
            tickets = self._settle(tickets)
        if self.appended:
            both = (*sent, *self.appended)
            sent = tuple(sorted(both if keeps else set(both)))
        return world._replace(players=tuple(sorted(players)), sent=sent, tickets=tickets)

    def _settle(self, tickets: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
        changed = list(tickets)
        for number, outcome in self.settled:
            if changed[number].kind != "open":
                raise Violation(f"B9: send {number} is settled twice: {changed[number]}")
            changed[number] = outcome
        return tuple(changed)


class Hands:
    """One step of one process that has read this log, from its `base` on: its writer, and what the
    step has appended and settled. `drawn` is the session that it gets if it asks."""

    def __init__(
        self,
        records: Records,
        size: Size,
        player: Player,
        log: tuple[int, ...],
        drawn: int = 0,
        shares: bool = False,
    ) -> None:
        self._size = size
        self._records = records
        self._player = player
        self._log = log
        self._appended: list[bytes] = []
        self._settled: dict[int, Outcome] = {}
        self._begun = False
        self._tickets: dict[Ticket, tuple[int, int]] = {}
        state, _ = records.folded(log[: player.read - player.base])
        self._read = player.read
        self.writer = Writer(
            state,
            self._appended.append,
            self._holder(player.session or drawn) if shares or player.shared else HOLDER,
            window=size.window,
            draw=lambda after: drawn or player.session + 1,
        )
        self._heir = player.heir
        self.writer.heir = lambda: (self._heir, WAITER, None) if self._heir else None
        self._put_together(player)

    def _holder(self, session: int) -> Holder:
        """A shared producer's."""
        name = "s" if self._size.shared == 1 else f"s{session}"
        return Holder("e", "host", 1, name, AccessMode.SHARED)

    def _put_together(self, player: Player) -> None:
        writer = self.writer
        writer.status, writer.epoch, writer.session = player.status, player.epoch, player.session
        if player.request:
            request = self._records.parsed(player.request)
            assert isinstance(request, Grant | Join)
            writer._request = request
        for under in player.sent:
            tickets = tuple([self._ticket(*each) for each in under.tickets])
            data = self._records.data[under.record]
            writer._sent.append(Sent(under.first, under.end, data, tickets))
        writer._unsent.extend(self._ticket(*each) for each in player.unsent)
        writer._first, writer._sequence = player.first, player.sequence

    def _ticket(self, number: int, sequence: int) -> Ticket:
        name = self.writer.holder.producer_name
        ticket = Ticket(contents(number, sequence, name), 1, partial(self._settle, number))
        self._tickets[ticket] = number, sequence
        return ticket

    def _settle(self, number: int, ticket: Ticket) -> None:
        if number in self._settled:
            raise Violation(f"B9: send {number} is settled twice: {self._settled[number]}")
        if ticket.error is None:
            assert ticket.offset is not None
            self._settled[number] = Outcome("written", ticket.offset)
        else:
            self._settled[number] = Outcome("fenced")

    # ---- the steps -----------------------------------------------------------------------

    def decide(self, mode: str, claim: int) -> Decision:
        """What an engine that knows these records decides about a request, by the product's own
        code. All engines live, and none waits."""
        state = self.writer.state
        seen = look(Having.of(state), (), None, lambda engine: True, HOLDER.engine_id)
        return decide(state.epoch, seen, Request(mode, claim or None), 0, settled=lambda: True)

    def ask(self, claim: int = 0) -> None:
        """Ask for the topic, or ask again after all."""
        self.writer.ask(claim or None)

    def send(self, number: int) -> None:
        """Send the next message, or the next two: the send with this number."""
        self._begun = True
        batch = [(value(number, index), None, None, None, None) for index in range(1 + number % 2)]
        ticket = self.writer.send(batch, 0, partial(self._settle, number))
        self._tickets[ticket] = number, ticket.contents[0].sequence_id

    def resend(self) -> None:
        """Append again what has not been read back."""
        self.writer.resend()

    def release(self) -> None:
        """Release the topic."""
        self.writer.release()

    def pass_on(self, heir: int) -> None:
        """Release the topic in favour of this waiter."""
        self._heir = heir
        self.writer.release()

    def resend_to_nobody(self) -> None:
        """The same, but the queue is empty by now."""
        heir, self._heir = self._heir, 0
        self.writer.resend()
        self._heir = heir

    def read_on(self) -> None:
        """Read the next record, and tell the writer."""
        self._read += 1
        state, judged = self._records.folded(self._log[: self._read - self._player.base])
        assert judged is not None
        self.writer.state = state
        if judged.counts and isinstance(judged.parsed, Grant):
            self._inherit(judged.parsed)
        self.writer.saw(judged)

    def _inherit(self, grant: Grant) -> None:
        """As `following.TopicLog` does for its engine's waiters."""
        player = self._player
        if grant.by and grant.waiter in (player.waits, player.left):
            self.writer.inherit(grant)
            if grant.waiter == player.left:
                self.writer.release()

    def evict(self, session: int) -> None:
        """Release a session that has the topic, as far as this process knows."""
        self._appended.append(encode(Release(self.writer.state.epoch, session, "evicted")))

    def terminate(self) -> None:
        """End the topic, as far as this process knows it."""
        state = self.writer.state
        self._appended.append(encode(Terminate(state.epoch, state.session)))

    def effect(self) -> Effect:
        """What the step has done."""
        player = self._taken_apart()
        appended = tuple(map(self._records.number, self._appended))
        return Effect(player, appended, tuple(self._settled.items()), self._begun)

    def _taken_apart(self) -> Player:
        writer, player = self.writer, self._player
        claim, mine = player.claim, player.mine
        if writer.status in ("refused", "closed", "fenced"):  # it begins anew, if at all
            waits, left = player.waits, player.left
            return Player(self._read, mine=mine, base=player.base, waits=waits, left=left)
        request = writer._request
        sent = [
            Under(each.first, each.end, self._records.number(each.data), self._named(each.tickets))
            for each in writer._sent
        ]
        return Player(
            self._read,
            writer.status,
            writer.epoch,
            writer.session,
            self._number_of(request) if request and writer.status in WAITING else 0,
            tuple(sent),
            self._named(writer._unsent),
            writer._first,
            writer._sequence,
            claim,
            writer.epoch if writer.status == "owner" and not writer.is_shared else mine,
            writer.is_shared,
            player.base,
            heir=self._heir if writer.status == "closing" else 0,
        )

    def _number_of(self, request: Grant | Join) -> int:
        if self._player.request:
            return self._player.request
        return self._records.number(self._appended[-1])

    def _named(self, tickets: Iterable[Ticket]) -> tuple[tuple[int, int], ...]:
        return tuple([self._tickets[ticket] for ticket in tickets])


def spend(world: World, **spent: int) -> World:
    """The state with so much less that may happen."""
    left = {name: getattr(world, name) - number for name, number in spent.items()}
    return world._replace(**left)
