"""What the cluster's model is judged by: the rules, spelled out once more."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from exclusivelog.admission import Decision, Verdict
from exclusivelog.cluster.frames import Frame, Grant, Join, Parsed, Release, Terminate
from exclusivelog.cluster.rule import State, is_written
from proof.cluster_world import Player, Records, Violation, World, contents, value

# The access modes in which processes ask.
SHARED, EXCLUSIVE, FENCING = "shared", "exclusive", "exclusive_with_fencing"


class History(NamedTuple):
    """What counts in a log, as a reader has it that folds from the first record on."""

    state: State
    grants: tuple[Grant, ...] = ()
    owned: bool = False
    messages: tuple[tuple[bytes, int], ...] = ()  # value, session: by offset
    joins: tuple[Join, ...] = ()  # all that have counted
    shared: tuple[int, ...] = ()  # the sessions that share the topic
    sequences: tuple[tuple[str, int], ...] = ()  # producer name, sequence id: by offset
    terminated: bool = False

    @property
    def sessions(self) -> list[int]:
        """All that there were."""
        return [each.session for each in self.grants] + [each.session for each in self.joins]


class Judge:
    """Judges states of one walk."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._histories: dict[tuple[int, ...], History] = {(): History(State())}
        self.written = 0  # the most messages that counted in one state

    def judge(self, world: World) -> None:
        """Is this state allowed?"""
        history = self.history(world.log)
        offsets = {each: offset for offset, (each, _) in enumerate(history.messages)}
        for number in range(len(world.tickets)):
            self._judge_ticket(world, number, history, offsets)
        for player in world.players:
            self._judge_owner(world, player)
            self._judge_waiter(world, player)

    # ---- the log -------------------------------------------------------------------------

    def history(self, log: tuple[int, ...]) -> History:
        """What counts in this log. A Violation if it must not."""
        if log not in self._histories:
            self._histories[log] = self._extend(self.history(log[:-1]), log)
        return self._histories[log]

    def _extend(self, history: History, log: tuple[int, ...]) -> History:
        state = copy(history.state)
        judged = state.fold(self._records.at(log))
        if state != self._records.folded(log)[0]:
            raise Violation("J1: a reader that goes on from a saved state has another one")
        history = history._replace(state=state)
        if not judged.counts or judged.parsed is None:
            return history
        return self._count(history, judged.parsed)

    def _count(self, history: History, parsed: Parsed) -> History:
        if history.terminated:
            raise Violation(f"G8: {parsed} counts, and the topic is terminated")
        if isinstance(parsed, Terminate):
            judge_termination(history, parsed)
            return history._replace(terminated=True, owned=False, shared=())
        if isinstance(parsed, Grant):
            judge_grant(history, parsed)
            return history._replace(grants=(*history.grants, parsed), owned=True, shared=())
        if isinstance(parsed, Join):
            judge_join(history, parsed)
            shared = (*history.shared, parsed.session)
            return history._replace(joins=(*history.joins, parsed), shared=shared)
        if parsed.session in history.shared:
            if isinstance(parsed, Frame):
                return self._count_frame(history, parsed)
            left = tuple([each for each in history.shared if each != parsed.session])
            return history._replace(shared=left)
        owner = history.grants[-1] if history.grants and history.owned else None
        if owner is None or (parsed.epoch, parsed.session) != (owner.epoch, owner.session):
            raise Violation(f"B2, B7, B10: {parsed} counts, and the owner is {owner}")
        if isinstance(parsed, Release):
            return history._replace(owned=False)
        return self._count_frame(history, parsed) if isinstance(parsed, Frame) else history

    def _count_frame(self, history: History, parsed: Frame) -> History:
        judge_frame(history, parsed)
        messages = [(content.value or b"", parsed.session) for content in parsed.contents]
        self.written = max(self.written, len(history.messages) + len(messages))
        sequences = [(each.producer_name, each.sequence_id) for each in parsed.contents]
        return history._replace(
            messages=(*history.messages, *messages), sequences=(*history.sequences, *sequences)
        )

    # ---- writers -------------------------------------------------------------------------

    def _judge_ticket(
        self, world: World, number: int, history: History, offsets: dict[bytes, int]
    ) -> None:
        ticket, offset = world.tickets[number], offsets.get(value(number))
        if ticket.kind == "written" and offset != ticket.offset:
            raise Violation(
                f"J2: send {number} was acknowledged at {ticket.offset}, is at {offset}"
            )
        if ticket.kind in ("fenced", "never") and offset is not None:
            raise Violation(f"B9, B10: send {number} failed, and is in the log at {offset}")
        if ticket.kind == "doubt":
            self._judge_doubt(number, ticket.offset, ticket.session, history, offset)
        for index, _ in enumerate(contents(number, 0)):
            there = offsets.get(value(number, index))
            if (there is None) != (offset is None):
                raise Violation(f"G3: send {number} is in the log in part")

    def _judge_doubt(
        self, number: int, planned: int, session: int, history: History, offset: int | None
    ) -> None:
        """The next grant after its session's own settles it (J2)."""
        if planned < 0:
            return  # of a shared session: its frames count in their order, or never
        if offset not in (None, planned):
            raise Violation(f"J2: send {number} was to be at {planned}, and is at {offset}")
        sessions = [grant.session for grant in history.grants]
        if session in sessions and sessions[-1] != session:
            settling = history.grants[sessions.index(session) + 1]
            if is_written(planned, settling) != (offset is not None):
                raise Violation(f"J2: {settling} does not settle send {number}, at {offset}")

    def _judge_owner(self, world: World, player: Player) -> None:
        if player.status not in ("owner", "closing"):
            return
        known = self.history(world.log[: player.read])
        if player.shared and player.session not in known.shared:
            raise Violation(f"B2: {player} has read that its session has ended, and goes on")
        if player.shared:
            return
        owner = known.grants[-1] if known.grants and known.owned else None
        if owner is None or owner.session != player.session:
            raise Violation(f"B2: {player} has read who owns the topic, {owner}, and goes on")
        if player.claim and player.epoch != player.claim:
            raise Violation(f"B5: epoch {player.claim} was to go on, not {player.epoch}")

    def _judge_waiter(self, world: World, player: Player) -> None:
        number = player.waits or player.left
        known = self.history(world.log[: player.read])
        if number and any(grant.waiter == number for grant in known.grants):
            raise Violation(f"C1: {player} has read that it was passed the topic, and waits on")


def copy(state: State) -> State:
    """A state of its own."""
    return replace(state, sequences=dict(state.sequences), shared=dict(state.shared))


def judge_grant(history: History, grant: Grant) -> None:
    """May this grant count?"""
    last = history.grants[-1] if history.grants else None
    epoch = last.epoch if last else 0
    if grant.first != len(history.messages):
        raise Violation(f"B10: {grant} counts at offset {len(history.messages)}")
    if grant.session in history.sessions:
        raise Violation(f"B2: {grant} has the session of an earlier one")
    if grant.joins != len(history.joins):
        raise Violation(f"A1: {grant} counts behind {history.joins}, and has not seen them")
    if not grant.continues and grant.epoch != epoch + 1:
        raise Violation(f"B1: {grant} counts after epoch {epoch}")
    if grant.by and not (last and history.owned and last.session == grant.by):
        raise Violation(f"B7: {grant} counts, and {last} does not own the topic")
    if grant.continues and (
        last is None or (grant.epoch, grant.continues) != (epoch, last.session)
    ):
        raise Violation(f"B5: {grant} goes on with another session than the last, of {last}")


def judge_termination(history: History, termination: Terminate) -> None:
    """May this termination count?"""
    last = history.grants[-1] if history.grants else None
    seen = (termination.epoch, termination.granted)
    if seen != ((last.epoch, last.session) if last else (0, 0)):
        raise Violation(f"G8: {termination} counts behind {last}, and has not seen it")


def judge_join(history: History, join: Join) -> None:
    """May this join count?"""
    if history.owned or join.epoch != (history.grants[-1].epoch if history.grants else 0):
        raise Violation(f"A1: {join} counts, and the topic has an owner, or had one since")
    if join.session in history.sessions:
        raise Violation(f"B2: {join} has the session of an earlier one")
    names = [each.holder.producer_name for each in history.joins if each.session in history.shared]
    if join.holder.producer_name in names:
        raise Violation(f"A6: {join} has the name of another one")


def judge_frame(history: History, frame: Frame) -> None:
    """May this frame count, which is the owner's or a shared session's?"""
    there = {each for each, _ in history.messages}
    if frame.first != len(history.messages):
        raise Violation(f"J1: {frame} counts at offset {len(history.messages)}")
    if any(content.value in there for content in frame.contents):
        raise Violation(f"J2: {frame} counts twice")
    name = frame.contents[0].producer_name
    before = sum(each == name for each, _ in history.sequences)
    if [content.sequence_id for content in frame.contents] != [
        before + index for index in range(len(frame.contents))
    ]:
        raise Violation(f"G2: {frame} has sequence ids of others")
    mine = [each for each, session in history.messages if session == frame.session]
    if mine and order(mine[-1]) > order(frame.contents[0].value or b""):
        raise Violation(f"B8: {frame} stands behind what was sent later")


def order(message: bytes) -> tuple[int, ...]:
    """The place of a message among all that were sent."""
    return tuple(map(int, message.split(b".")))


# ---- decisions ---------------------------------------------------------------------------


def judge_decision(state: State, mode: str, claim: int, decision: Decision) -> None:
    """Is this the right decision about a request, where all that have the topic live, and nobody
    waits (rules A1, B5)?"""
    right = _right(state, mode, claim)
    if decision != right:
        raise Violation(f"A1: {mode} with claim {claim} at {state.tenure}: {decision}, not {right}")


def _right(state: State, mode: str, claim: int) -> Decision:
    now = state.epoch
    if claim and claim != now:
        return Decision(Verdict.STALE if claim < now else Verdict.INVALID, now)
    if mode == SHARED:
        return Decision(Verdict.BUSY if state.owned else Verdict.ADMIT, now)
    if state.owned or state.shared:
        if mode == EXCLUSIVE:
            return Decision(Verdict.FENCED, now)
        return Decision(Verdict.TAKE_OVER, now + 1)
    return Decision(Verdict.GRANT, now if claim else now + 1)
