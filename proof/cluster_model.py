"""Every interleaving of small worlds of writers on one ordered log (rules J1, J2; B1-B10).

Up to three processes ask for the topic, alone or to share it, from what they know now or knew
earlier, with and without an old epoch, or wait until it is passed on to them; send, send again,
cancel, release, pass the topic on, evict, terminate the topic, die and start again. The backend
stores what they append at once, much later, after any other record, several times, or never. Each
process reads one record at a time, as late as it likes, so that a stale owner sends on, and a late
grant races with another. All of it is the library's own code: `exclusivelog.cluster.log` and
`exclusivelog.cluster.rule`; and what a process asks the log for is decided, in each access mode, by
`exclusivelog.admission`.

Every state that can be reached is visited once and judged (`proof.cluster_judge`):

- epochs rise by one with each grant that counts, or stay for the session that goes on with the last
  one; no two grants have the same session (B1, B5);
- what counts is the owner's, and stands behind its grant and before the next one; it has the next
  offset, and no message counts twice (B2, B8, B10, J1); a release ends the owner's session (B7);
- an owner passes the topic on only while it has it, and a waiter learns that it was passed it (B7,
  C1);
- shared producers are let in while the topic has no owner, each name once at a time, and what
  counts of each is in the order in which it was sent; a grant has seen all of them, and ends them
  (A1, A6);
- a process that opens the log after its beginning was removed does not take the rest for the whole
  (B1, B2);
- nothing counts behind a termination, which every session has learned that has read so far (G8);
- each decision about a request is that of the table of access modes and of the epochs claimed,
  and the log takes what was decided, under the epoch that was decided (A1, B5, J5);
- an acknowledged send is in the log, once, at its offset, for good; one that has failed is not, and
  never will be; none is settled twice (J2, B9);
- what a dead process had under way is where the next grant says that it is (J2);
- a reader that goes on from a saved state agrees with one that has read all, and what does not
  count changes nothing (J1): so worlds leave it out, but for one that keeps it;
- and from a sample of all states on, everything is settled once the backend lets appends in,
  whether those under way are lost or not (B9).

Each control breaks one rule, and the judge must find it out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from unittest import mock

from exclusivelog.admission import ADMITTED
from exclusivelog.cluster import births, requests
from exclusivelog.cluster.checkpoints import NOWHERE
from exclusivelog.cluster.frames import Frame, decode
from exclusivelog.cluster.rule import State
from exclusivelog.errors import (
    ExclusiveLogError,
    InvalidEpochError,
    LedgerCorruptedError,
    ProducerBusyError,
    ProducerFencedError,
    TopicTerminatedError,
)
from proof.cluster_judge import EXCLUSIVE, FENCING, SHARED, Judge, judge_decision
from proof.cluster_rules import Patch
from proof.cluster_world import (
    DRAWN_APART,
    FIRST_SESSION,
    Effect,
    Hands,
    Outcome,
    Player,
    Records,
    Size,
    Violation,
    World,
    spend,
)

IDLE = ("refused", "closed", "fenced")
SAMPLE = 16  # of so many states one is tried for its end
SHARE = -1  # asked for in place of a claim: to share the topic
DEAD = 1  # the number of a waiter that has died
ROUNDS = 40  # of letting in, reading and sending; more than any world needs


class Steps:
    """What can happen next."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.records = Records()
        self.judge = Judge(self.records)
        # A step depends only on what its process has read, which many states have in common.
        self.effect = functools.cache(self._work_out)
        self.effect_of_asking = functools.cache(self._work_out_asking)
        self.requests = functools.cache(self._work_out_requests)
        self.counts = functools.cache(self._judge_next)

    def _work_out(
        self, step: Callable[..., None], player: Player, log: tuple[int, ...], *facts: int
    ) -> Effect:
        """What this step of a process does that has read so much of the log."""
        hands = Hands(self.records, self.size, player, log)
        step(hands, *facts)
        return hands.effect()

    def after(self, world: World) -> Iterator[tuple[str, World]]:
        """All (step, next state)."""
        for number, player in enumerate(world.players):
            if player.waits or player.left:
                yield from self.wait(world, number, player)
            elif player.status in IDLE:
                yield from self.ask(world, number, player)
                yield from self.begin_to_wait(world, number, player)
            else:
                yield from self.play(world, number, player)
            if world.releases and self.size.evicts:
                yield from self.evict(world, number, player)
            if world.terminations:
                after = self.do(world, number, Hands.terminate)
                yield f"{number} terminates", spend(after, terminations=1)
            if world.crashes and player != Player():
                yield f"{number} dies", self.die(world, number)
        yield from self.trim(world)
        yield from self.let_in_any(world)

    def do(
        self, world: World, number: int, step: Callable[..., None], *facts: int, reads: int = 0
    ) -> World:
        """The state after this step, with so many more records read."""
        player = world.players[number]
        log = world.log[player.base : player.read + reads]
        effect = self.effect(step, player, log, *facts)
        return effect.on(world, number, self.size.keeps)

    def draw(self, world: World) -> int:
        """The next session, or number in the queue."""
        return FIRST_SESSION + DRAWN_APART * (self.size.asks - world.asks)

    # ---- opening -------------------------------------------------------------------------

    def open(self, world: World, player: Player) -> Player | None:
        """A process that has read nothing opens the log; None if that is refused, because its
        beginning was removed."""
        if player.read or not world.removed:
            return player
        known = NOWHERE.then(self.records.at(world.log[:1]))
        left = world.log[world.removed :]
        first = self.records.at(world.log[: world.removed + 1]) if left else None
        try:
            births.check_first("the topic", known, first)
        except LedgerCorruptedError:
            return None
        return player._replace(read=world.removed, base=world.removed)

    def trim(self, world: World) -> Iterator[tuple[str, World]]:
        """The backend removes the beginning of the log."""
        if world.trims:
            for removed in range(world.removed + 1, len(world.log) + 1):
                yield f"{removed} are removed", spend(world._replace(removed=removed), trims=1)

    # ---- asking --------------------------------------------------------------------------

    def ask(self, world: World, number: int, player: Player) -> Iterator[tuple[str, World]]:
        opened = self.open(world, player)
        if not world.asks or opened is None:
            return
        player = opened
        drawn = self.draw(world)
        for stale in (False, True):
            if stale and player.read == len(world.log):
                continue
            asking = player if stale else player._replace(read=len(world.log))
            log = world.log[asking.base : asking.read]
            for request in self.requests(asking, log):
                effect = self.effect_of_asking(asking, log, request, drawn)
                if effect is not None:
                    after = effect.on(world, number, self.size.keeps)
                    what = "to share" if request == SHARE else request
                    yield f"{number} asks {what} {stale}", spend(after, asks=1)

    def _work_out_requests(self, player: Player, log: tuple[int, ...]) -> tuple[int, ...]:
        """What a process asks the log for: in any mode, and with any claim, what
        `exclusivelog.admission` decides; and past that what another program might ask for."""
        state, _ = self.records.folded(log)
        found = {0, state.epoch}
        claims = {0, player.mine, state.epoch, state.epoch + 1} if state.epoch else {0}
        for claim in sorted(claims):
            for mode in (EXCLUSIVE, FENCING):
                found |= self._decided(player, log, mode, claim)
            self.is_taken(self._hands(player, log), claim, state.epoch)
        if self.size.shared:
            found |= {SHARE} | self._decided(player, log, SHARED, 0)
        return tuple(sorted(found))

    def _hands(self, player: Player, log: tuple[int, ...], mode: str = EXCLUSIVE) -> Hands:
        return Hands(self.records, self.size, player, log, FIRST_SESSION, shares=mode == SHARED)

    def _decided(self, player: Player, log: tuple[int, ...], mode: str, claim: int) -> set[int]:
        """The request that the decision leads to, if any. The log must take it, for the epoch that
        was decided, unless the topic is terminated, which is asked first."""
        hands = self._hands(player, log, mode)
        state = hands.writer.state
        decision = hands.decide(mode, claim)
        judge_decision(state, mode, claim, decision)
        if decision.verdict not in ADMITTED or state.terminated:
            return set()
        request = requests.continues(decision, claim) or 0
        try:
            hands.ask(request)
        except ExclusiveLogError as error:
            if not (mode == SHARED and hands.writer.holder.producer_name in names_in(state)):
                raise Violation(f"J5: the log refuses what was decided, {decision}") from error
        else:
            if hands.writer.epoch != decision.epoch:
                raise Violation(f"J5: epoch {hands.writer.epoch} is asked for, not {decision}")
        return {SHARE if mode == SHARED else request}

    def _work_out_asking(
        self, player: Player, log: tuple[int, ...], claim: int, drawn: int
    ) -> Effect | None:
        """What asking does; None if it is refused at once, as it should be."""
        hands = Hands(self.records, self.size, player, log, drawn, shares=claim == SHARE)
        if claim == SHARE:
            with contextlib.suppress(ProducerBusyError, TopicTerminatedError):
                hands.ask()
                return hands.effect()
            return None
        if not self.is_taken(hands, claim, self.records.folded(log)[0].epoch):
            return None
        effect = hands.effect()
        return effect._replace(player=effect.player._replace(claim=claim))

    def is_taken(self, hands: Hands, claim: int, epoch: int) -> bool:
        """Ask; is the claim not refused at once, as it should be?"""
        try:
            hands.ask(claim)
        except TopicTerminatedError:
            return False
        except (ProducerFencedError, InvalidEpochError) as error:
            stale = isinstance(error, ProducerFencedError)
            if claim in (0, epoch) or stale != (claim < epoch):
                raise Violation(f"B5: claim {claim} at epoch {epoch} raises {error!r}") from None
            return False
        if claim not in (0, epoch):
            raise Violation(f"B5: claim {claim} at epoch {epoch} is not refused")
        return True

    # ---- waiting -------------------------------------------------------------------------

    def begin_to_wait(
        self, world: World, number: int, player: Player
    ) -> Iterator[tuple[str, World]]:
        """Its records of the queue are not in the log: an owner may know them early or late."""
        opened = self.open(world, player)
        if world.passes and world.asks and opened is not None:
            waits = self.draw(world)
            after = put(world, number, opened._replace(waits=waits))
            yield f"{number} waits as {waits}", spend(after, asks=1)

    def wait(self, world: World, number: int, player: Player) -> Iterator[tuple[str, World]]:
        if player.read < len(world.log):
            yield f"{number} reads", self.do(world, number, Hands.read_on, reads=1)
        if player.waits:
            after = player._replace(waits=0, left=player.waits)
            yield f"{number} leaves the queue", put(world, number, after)

    def pass_on(self, world: World, number: int, player: Player) -> Iterator[tuple[str, World]]:
        """An owner closes, and passes the topic on to any process that waits, or has waited."""
        heirs = {each.waits or each.left for each in world.players} - {0}
        for heir in sorted(heirs | ({DEAD} if self.size.crashes else set())):
            after = self.do(world, number, Hands.pass_on, heir)
            yield f"{number} passes the topic on to {heir}", spend(after, passes=1)

    # ---- the other steps -----------------------------------------------------------------

    def play(self, world: World, number: int, player: Player) -> Iterator[tuple[str, World]]:
        if player.read < len(world.log):
            yield f"{number} reads", self.do(world, number, Hands.read_on, reads=1)
        if player.status == "owner" and world.sends:
            after = self.do(world, number, Hands.send, len(world.tickets))
            yield f"{number} sends", spend(after, sends=1)
        if player.status == "cancelled" and world.releases:  # as often as it may be cancelled
            yield f"{number} asks after all", self.do(world, number, Hands.ask, player.claim)
        if not self.size.keeps:
            yield f"{number} sends again", self.do(world, number, Hands.resend)
        if player.heir and not self.size.keeps:
            after = self.do(world, number, Hands.resend_to_nobody)
            yield f"{number} sends again, to nobody", after
        if world.passes and player.status == "owner" and not player.shared:
            yield from self.pass_on(world, number, player)
        if world.releases and player.status in ("owner", "asking"):
            after = self.do(world, number, Hands.release)
            yield f"{number} releases", spend(after, releases=1)

    def evict(self, world: World, number: int, player: Player) -> Iterator[tuple[str, World]]:
        state, _ = self.records.folded(world.log[player.base : player.read])
        for session in [*state.shared, *([state.session] if state.owned else [])]:
            if session != player.session:
                after = self.do(world, number, Hands.evict, session)
                yield f"{number} evicts {session}", spend(after, releases=1)

    def die(self, world: World, number: int) -> World:
        """What it has under way stays under way."""
        player = world.players[number]
        tickets = list(world.tickets)
        for ticket, _ in player.unsent:
            tickets[ticket] = Outcome("never")
        for under in player.sent:
            offset = under.first
            for ticket, _ in under.tickets:
                tickets[ticket] = Outcome("doubt", -1 if player.shared else offset, player.session)
                offset += 1 + ticket % 2
        players = list(world.players)
        players[number] = Player()
        dead = world._replace(players=tuple(sorted(players)), tickets=tuple(tickets))
        return spend(dead, crashes=1)

    def let_in_any(self, world: World) -> Iterator[tuple[str, World]]:
        """The backend appends any record that was ever sent."""
        for record in sorted(set(world.sent)):
            after = self.let_in(world, record)
            if after == world:
                continue
            yield f"{record} comes in", after
            if world.copies:
                yield f"a copy of {record} comes in", spend(world._replace(log=after.log), copies=1)

    def let_in(self, world: World, record: int) -> World:
        if self.size.keeps:
            left = list(world.sent)
            left.remove(record)
            return world._replace(log=(*world.log, record), sent=tuple(left))
        return world._replace(log=(*world.log, record)) if self.counts(world.log, record) else world

    def _judge_next(self, log: tuple[int, ...], record: int) -> bool:
        """Does this record count behind this log? If not, it must not change the state."""
        before, (state, judged) = self.records.folded(log)[0], self.records.folded((*log, record))
        assert judged is not None
        if not judged.counts and replace(state, position=before.position) != before:
            raise Violation(f"J1: {judged} changes the state")
        return judged.counts

    # ---- the end -------------------------------------------------------------------------

    def judge_end(self, world: World) -> None:
        """Is everything settled in the end? And if what is under way is lost?"""
        for start in (world, world._replace(sent=())):
            end = self.end(start)
            self.judge.judge(end)
            for number, ticket in enumerate(end.tickets):
                if ticket.kind == "open":
                    raise Violation(f"B9: send {number} is never settled")
            for player in end.players:
                if player.status in ("asking", "closing"):
                    raise Violation(f"B9: {player} is never answered")

    def end(self, world: World) -> World:
        """All is let in and read, and sent again, until nothing changes."""
        for _ in range(ROUNDS):
            before = world
            for record in world.sent:
                world = self.let_in(world, record)
            for number in range(len(world.players)):
                world = self.live_on(world, number)
            if world == before:
                break
        return world

    def live_on(self, world: World, number: int) -> World:
        """A process reads all that there is, and sends again what it has not read back."""
        player = world.players[number]
        waits = player.waits or player.left
        if player.status in IDLE and not waits:
            return world
        if player.read < len(world.log):
            return self.do(world, number, Hands.read_on, reads=1)
        if waits:
            return world
        return self.do(world, number, Hands.resend)


def names_in(state: State) -> list[str]:
    """The producer names of the shared sessions."""
    return [each.join.holder.producer_name for each in state.shared.values()]


def put(world: World, number: int, player: Player) -> World:
    """The state with this process in place of the one with this number."""
    players = list(world.players)
    players[number] = player
    return world._replace(players=tuple(sorted(players)))


# ---- the walk ----------------------------------------------------------------------------


def walk(size: Size, patches: Iterable[Patch] = (), most: int = 10**7) -> tuple[int, int]:
    """(states, steps), or a Violation with a shortest way to it in its notes."""
    with contextlib.ExitStack() as broken:
        for owner, name, instead in patches:
            broken.enter_context(mock.patch.object(owner, name, instead))
        return _walk(size, most)


def _walk(size: Size, most: int) -> tuple[int, int]:
    steps = Steps(size)
    first = size.start()
    came_from: dict[World, tuple[World | None, str]] = {first: (None, "the beginning")}
    frontier, taken = [first], 0
    while frontier:
        following: list[World] = []
        for world in frontier:
            try:
                steps.judge.judge(world)
                for step, after in steps.after(world):
                    taken += 1
                    if after not in came_from:
                        came_from[after] = (world, step)
                        following.append(after)
                        if len(came_from) % SAMPLE == 0:
                            steps.judge_end(after)
            except Violation as violation:
                tell(violation, steps, world, came_from)
                raise
        frontier = following
        assert len(came_from) < most
    assert steps.judge.written >= size.sends, "the walk has not written what it could"
    return len(came_from), taken


def tell(
    violation: Violation,
    steps: Steps,
    world: World | None,
    came_from: dict[World, tuple[World | None, str]],
) -> None:
    """Note the way to the last state, and its log."""
    log = () if world is None else world.log
    way = []
    while world is not None:
        world, step = came_from[world]
        way.append(step)
    for step in reversed(way):
        violation.add_note(step)
    for number in log:
        record = decode(steps.records.data[number])
        kind = [record.first, record.end] if isinstance(record, Frame) else record
        violation.add_note(f"record {number}: {kind}")


def find_out(patches: Iterable[Patch], sizes: Iterable[Size]) -> Violation | None:
    """What the judge has against a broken rule."""
    patches = tuple(patches)
    for size in sizes:
        try:
            walk(size, patches)
        except Violation as violation:
            return violation
    return None
