"""What the cluster's model is judged by: the rules, spelled out once more."""

from __future__ import annotations

from typing import NamedTuple

from exclusivelog.cluster.frames import Frame, Grant, Parsed, Release
from exclusivelog.cluster.rule import State, is_written
from proof.cluster_world import Player, Records, Violation, World, contents, value


class History(NamedTuple):
    """What counts in a log, as a reader has it that folds from the first record on."""

    state: State
    grants: tuple[Grant, ...] = ()
    owned: bool = False
    messages: tuple[tuple[bytes, int], ...] = ()  # value, session: by offset


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
        if isinstance(parsed, Grant):
            judge_grant(history, parsed)
            return history._replace(grants=(*history.grants, parsed), owned=True)
        owner = history.grants[-1] if history.grants and history.owned else None
        if owner is None or (parsed.epoch, parsed.session) != (owner.epoch, owner.session):
            raise Violation(f"B2, B7, B10: {parsed} counts, and the owner is {owner}")
        if isinstance(parsed, Release):
            return history._replace(owned=False)
        judge_frame(history, parsed)
        messages = [(content.value or b"", parsed.session) for content in parsed.contents]
        self.written = max(self.written, len(history.messages) + len(messages))
        return history._replace(messages=(*history.messages, *messages))

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
        owner = known.grants[-1] if known.grants and known.owned else None
        if owner is None or owner.session != player.session:
            raise Violation(f"B2: {player} has read who owns the topic, {owner}, and goes on")
        if player.claim and player.epoch != player.claim:
            raise Violation(f"B5: epoch {player.claim} was to go on, not {player.epoch}")


def copy(state: State) -> State:
    """A state of its own."""
    return State(
        state.position, state.epoch, state.session, state.owned, state.next, state.grant,
        dict(state.sequences), state.published, state.source,
    )  # fmt: skip


def judge_grant(history: History, grant: Grant) -> None:
    """May this grant count?"""
    last = history.grants[-1] if history.grants else None
    epoch = last.epoch if last else 0
    if grant.first != len(history.messages):
        raise Violation(f"B10: {grant} counts at offset {len(history.messages)}")
    if grant.session in [each.session for each in history.grants]:
        raise Violation(f"B2: {grant} has the session of an earlier one")
    if not grant.continues and grant.epoch != epoch + 1:
        raise Violation(f"B1: {grant} counts after epoch {epoch}")
    if grant.continues and (
        last is None or (grant.epoch, grant.continues) != (epoch, last.session)
    ):
        raise Violation(f"B5: {grant} goes on with another session than the last, of {last}")


def judge_frame(history: History, frame: Frame) -> None:
    """May this frame count, which is the owner's?"""
    there = {each for each, _ in history.messages}
    if frame.first != len(history.messages):
        raise Violation(f"J1: {frame} counts at offset {len(history.messages)}")
    if any(content.value in there for content in frame.contents):
        raise Violation(f"J2: {frame} counts twice")
    if [content.sequence_id for content in frame.contents] != [
        frame.first + index for index in range(len(frame.contents))
    ]:
        raise Violation(f"G2: {frame} has sequence ids of others")
    mine = [each for each, session in history.messages if session == frame.session]
    if mine and order(mine[-1]) > order(frame.contents[0].value or b""):
        raise Violation(f"B8: {frame} stands behind what was sent later")


def order(message: bytes) -> tuple[int, ...]:
    """The place of a message among all that were sent."""
    return tuple(map(int, message.split(b".")))
