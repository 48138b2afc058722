"""The cluster's rule and its writers, broken in one place each: the controls of their model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from exclusivelog import admission
from exclusivelog.admission import Decision
from exclusivelog.admission import Verdict as Verdicts
from exclusivelog.cluster import births, requests, rule
from exclusivelog.cluster.frames import Frame, Grant, Join, Parsed, Release, Terminate, encode
from exclusivelog.cluster.log import Sent, Writer
from exclusivelog.cluster.ordered import Record
from exclusivelog.cluster.rule import Judged, State, Verdict
from exclusivelog.errors import ExclusiveLogError
from proof import cluster_judge

Patch = tuple[object, str, Any]  # of which module or class, the name, what stands there instead

# The original functions, while a broken rule replaces them.
_judge, _judge_owner, _judge_offset = rule.judge, rule._judge_owner, rule._judge_offset
_judge_grant, _fold, _save = rule._judge_grant, State.fold, State.save
_judge_join, _judge_shared, _apply = rule._judge_join, rule._judge_shared, State._apply
_ask, _send_frame, _resend = Writer.ask, Writer._send_frame, Writer.resend
_acknowledge, _saw_as_owner = Writer._acknowledge, Writer._saw_as_owner
_admit, _pump = admission.admit, Writer.pump


def counts(good: bool) -> Verdict:
    return Verdict.COUNTS if good else Verdict.EPOCH


# ---- the rule ----------------------------------------------------------------------------


def any_writer(state: State, record: Frame | Release) -> Verdict:
    if isinstance(record, Frame):
        return counts(state.owned)
    return _judge_owner(state, record)


def any_writer_of_the_epoch(state: State, record: Frame | Release) -> Verdict:
    if isinstance(record, Frame):
        return counts(state.owned and record.epoch == state.epoch)
    return _judge_owner(state, record)


def any_release(state: State, record: Frame | Release) -> Verdict:
    if isinstance(record, Release):
        return counts(state.owned)
    return _judge_owner(state, record)


def any_release_of_the_epoch(state: State, record: Frame | Release) -> Verdict:
    if isinstance(record, Release):
        return counts(state.owned and record.epoch == state.epoch)
    return _judge_owner(state, record)


def owner_for_ever(state: State, record: Frame | Release) -> Verdict:
    verdict = _judge_owner(state, record)
    return Verdict.COUNTS if verdict is Verdict.ENDED else verdict


def any_frame_offset(state: State, parsed: Parsed) -> Verdict:
    return _judge_owner(state, parsed) if isinstance(parsed, Frame) else _judge(state, parsed)


def later_frame_offset(state: State, parsed: Parsed) -> Verdict:
    verdict = _judge(state, parsed)
    ahead = verdict is Verdict.AHEAD and isinstance(parsed, Frame)
    return Verdict.COUNTS if ahead else verdict


def any_grant_offset(state: State, grant: Grant) -> Verdict:
    verdict = _judge_grant(state, grant)
    return Verdict.COUNTS if verdict is Verdict.BEHIND else verdict


def same_epoch(state: State, grant: Grant) -> Verdict:
    if not grant.continues and grant.epoch == state.epoch:
        return _judge_offset(state, grant.first)
    return _judge_grant(state, grant)


def any_pass(state: State, grant: Grant) -> Verdict:
    return _judge_grant(state, replace(grant, by=0))


def any_continuation(state: State, grant: Grant) -> Verdict:
    return counts(grant.epoch == state.epoch and grant.session > state.session)


def unseen_joins(state: State, grant: Grant) -> Verdict:
    verdict = _judge_grant(state, grant)
    return _judge_offset(state, grant.first) if verdict is Verdict.UNSEEN else verdict


def join_beside_owner(state: State, join: Join) -> Verdict:
    verdict = _judge_join(state, join)
    return Verdict.COUNTS if verdict is Verdict.OWNED else verdict


def late_join(state: State, join: Join) -> Verdict:
    verdict = _judge_join(state, join)
    late = verdict is Verdict.UNSEEN and not state.owned and join.session not in state.shared
    return Verdict.COUNTS if late else verdict


def any_name(state: State, join: Join) -> Verdict:
    verdict = _judge_join(state, join)
    return Verdict.COUNTS if verdict is Verdict.NAMED else verdict


def shared_frames_in_any_order(state: State, frame: Frame) -> Verdict:
    verdict = _judge_shared(state, frame)
    return Verdict.COUNTS if verdict is Verdict.AHEAD else verdict


def shared_frames_again(state: State, frame: Frame) -> Verdict:
    verdict = _judge_shared(state, frame)
    return Verdict.COUNTS if verdict is Verdict.BEHIND else verdict


def grant_beside_shared(state: State, parsed: Parsed) -> Parsed:
    """A grant does not end the shared sessions."""
    shared = dict(state.shared)
    placed = _apply(state, parsed)
    if isinstance(parsed, Grant):
        state.shared = shared
    return placed


def grants_behind_the_end(state: State, parsed: Parsed) -> Verdict:
    """A termination ends the owner's session only."""
    return _without_the_end(state, parsed, Grant)


def frames_behind_the_end(state: State, parsed: Parsed) -> Verdict:
    """A termination keeps others from asking only."""
    return _without_the_end(state, parsed, Frame)


def _without_the_end(state: State, parsed: Parsed, kind: type) -> Verdict:
    verdict = _judge(state, parsed)
    if verdict is not Verdict.TERMINATED or not isinstance(parsed, kind):
        return verdict
    state.terminated = False
    try:
        return _judge(state, parsed)
    finally:
        state.terminated = True


def late_termination(state: State, record: Terminate) -> Verdict:
    return Verdict.COUNTS


def terminate_and_keep(state: State, parsed: Parsed) -> Parsed:
    """A termination leaves the owner and the shared sessions."""
    owned, shared = state.owned, dict(state.shared)
    placed = _apply(state, parsed)
    if isinstance(parsed, Terminate):
        state.owned, state.shared = owned, shared
    return placed


def ignore_the_end(writer: Writer, judged: Judged) -> None:
    """A writer takes no notice of a termination."""
    if not isinstance(judged.parsed, Terminate):
        _saw_as_owner(writer, judged)


def fold_all(state: State, record: Record) -> Judged:
    """What does not count raises the epoch all the same."""
    judged = _fold(state, record)
    if isinstance(judged.parsed, Grant):
        state.epoch = max(state.epoch, judged.parsed.epoch)
    return judged


def save_without_session(state: State) -> bytes:
    whole, state.session = state.session, 0
    try:
        return _save(state)
    finally:
        state.session = whole


# ---- writers -----------------------------------------------------------------------------


def ask_and_begin(writer: Writer, topic_epoch: int | None = None) -> None:
    _ask(writer, topic_epoch)
    assert writer._request is not None
    writer._begin(writer._request)


def send_frame_and_acknowledge(writer: Writer, tickets: Any) -> None:
    _send_frame(writer, tickets)
    writer._acknowledge(writer._first)


def resend_behind(writer: Writer) -> None:
    """Send again at new offsets."""
    for sent in list(writer._sent):
        contents = tuple([content for ticket in sent.tickets for content in ticket.contents])
        frame = Frame(writer.epoch, writer.session, writer._first, contents)
        writer._sent.remove(sent)
        writer._sent.append(Sent(frame.first, frame.end, encode(frame), sent.tickets))
        writer._first = frame.end
        writer._append(encode(frame))
    _resend(writer)


def fence_as_written(writer: Writer, error: ExclusiveLogError) -> None:
    writer._acknowledge(writer._first)
    writer.status = "fenced"


def ignore(writer: Writer, *about: Any) -> None:
    """Do nothing."""


def wait_for_ever(writer: Writer, judged: Judged) -> None:
    if judged.counts and writer._request is not None and judged.parsed == writer._request:
        writer._begin(writer._request)


def acknowledge_ahead(writer: Writer, end: int, placed: int | None = None) -> None:
    """One frame that counts acknowledges the next one."""
    for _ in range(min(2, len(writer._sent))):
        sent = writer._sent.popleft()
        sent.tickets[0].settle(sent.first)


def pass_on_at_once(writer: Writer) -> None:
    """A writer that closes does not wait for what it has under way."""
    _pump(writer)
    if writer.status == "closing" and writer._sent:
        writer._append(writer._last_record())


def ignore_own_pass(writer: Writer, judged: Judged) -> None:
    """A writer goes on that has passed the topic on."""
    grant = judged.parsed
    if not (isinstance(grant, Grant) and grant.by == writer.session):
        _saw_as_owner(writer, judged)


def acknowledge_by_number(writer: Writer, end: int, placed: int | None = None) -> None:
    """A shared writer takes the number of its frame for the offset."""
    _acknowledge(writer, end)


# ---- decisions ---------------------------------------------------------------------------


def decides_instead(verdict: Verdicts, instead: Verdicts) -> Any:
    """`admit`, which gives the second verdict in place of the first one."""

    def admit(**facts: Any) -> Decision:
        found = _admit(**facts)
        return found._replace(verdict=instead) if found.verdict is verdict else found

    return admit


def a_new_epoch_for_each(**facts: Any) -> Decision:
    """An instance that comes back gets a new epoch."""
    found = _admit(**facts)
    claimed = found.verdict is Verdicts.GRANT and found.epoch == facts["epoch"]
    return found._replace(epoch=found.epoch + 1) if claimed else found


def the_claimed_epoch_by_force(**facts: Any) -> Decision:
    """A take-over continues the epoch that was claimed."""
    found, claim = _admit(**facts), facts["request"].claimed_epoch
    forced = found.verdict is Verdicts.TAKE_OVER and claim == facts["epoch"]
    return found._replace(epoch=claim) if forced else found


def without_owners(**facts: Any) -> Decision:
    return _admit(**{**facts, "owner": None})


def without_shared(**facts: Any) -> Decision:
    return _admit(**{**facts, "shared": False})


SHARED_CONTROLS: dict[str, tuple[Patch, ...]] = {
    "a grant counts that has not seen all joins": ((rule, "_judge_grant", unseen_joins),),
    "a join counts beside an owner": ((rule, "_judge_join", join_beside_owner),),
    "a join counts again": ((rule, "_judge_join", late_join),),
    "two shared sessions have one name": ((rule, "_judge_join", any_name),),
    "a shared session's frames count in any order": (
        (rule, "_judge_shared", shared_frames_in_any_order),
    ),
    "a shared session's frame counts again": ((rule, "_judge_shared", shared_frames_again),),
    "a grant does not end shared sessions": ((State, "_apply", grant_beside_shared),),
    "the number of a shared frame is taken for its offset": (
        (Writer, "_acknowledge", acknowledge_by_number),
    ),
    "the decision takes no notice of shared producers": ((admission, "admit", without_shared),),
    "a shared producer is admitted beside an owner": (
        (admission, "admit", decides_instead(Verdicts.BUSY, Verdicts.ADMIT)),
    ),
}
TERMINATION_CONTROLS: dict[str, tuple[Patch, ...]] = {
    "a grant counts behind a termination": ((rule, "judge", grants_behind_the_end),),
    "a frame counts behind a termination": (
        (State, "_apply", terminate_and_keep),
        (rule, "judge", frames_behind_the_end),
    ),
    "a termination counts that has not seen the last grant": (
        (rule, "_judge_termination", late_termination),
    ),
    "a writer ignores a termination": ((Writer, "_saw_as_owner", ignore_the_end),),
}
PASS_CONTROLS: dict[str, tuple[Patch, ...]] = {
    "a session that has ended passes the topic on": ((rule, "_judge_grant", any_pass),),
    "a session goes on that has passed the topic on": ((Writer, "_saw_as_owner", ignore_own_pass),),
    "a topic is passed on before all sends are settled": ((Writer, "pump", pass_on_at_once),),
    "a waiter ignores what was passed on to it": ((Writer, "inherit", ignore),),
}
TRIM_CONTROLS: dict[str, tuple[Patch, ...]] = {
    "the rest of a log is taken for the whole": ((births, "check_first", ignore),),
}
CONTROLS: dict[str, tuple[Patch, ...]] = {
    **SHARED_CONTROLS,
    **PASS_CONTROLS,
    **TRIM_CONTROLS,
    **TERMINATION_CONTROLS,
    "frames of any owner count": ((rule, "_judge_owner", any_writer),),
    "frames of any session of the epoch count": ((rule, "_judge_owner", any_writer_of_the_epoch),),
    "a release of any owner counts": ((rule, "_judge_owner", any_release),),
    "a release of any session of the epoch counts": (
        (rule, "_judge_owner", any_release_of_the_epoch),
    ),
    "a released session goes on": ((rule, "_judge_owner", owner_for_ever),),
    "frames at any offset count": ((rule, "judge", any_frame_offset),),
    "frames count that leave a gap": ((rule, "judge", later_frame_offset),),
    "a grant counts behind messages that it has not seen": (
        (rule, "_judge_grant", any_grant_offset),
    ),
    "a grant counts under the current epoch": ((rule, "_judge_grant", same_epoch),),
    "a grant goes on with any session": ((rule, "_judge_continuation", any_continuation),),
    "what does not count raises the epoch": ((State, "fold", fold_all),),
    "a saved state lacks the session": ((State, "save", save_without_session),),
    "the offset of the next grant is taken for written": (
        (cluster_judge, "is_written", lambda offset, grant: offset <= grant.first),
    ),
    "a writer owns the topic when it has asked": ((Writer, "ask", ask_and_begin),),
    "a stale topic_epoch is taken": ((Writer, "_check_epoch", lambda writer, epoch: True),),
    "a send is acknowledged when it is appended": (
        (Writer, "_send_frame", send_frame_and_acknowledge),
    ),
    "a frame that counts acknowledges the next one": ((Writer, "_acknowledge", acknowledge_ahead),),
    "what is sent again gets a new offset": ((Writer, "resend", resend_behind),),
    "a writer ignores the grants of others": ((Writer, "_fence", ignore),),
    "what was under way is taken for written": ((Writer, "_fence", fence_as_written),),
    "a request that has lost waits for ever": ((Writer, "_saw_while_asking", wait_for_ever),),
    "nothing is sent again": ((Writer, "resend", ignore),),
    "the decision takes no notice of owners": ((admission, "admit", without_owners),),
    "the decision takes a stale topic_epoch": (
        (admission, "admit", decides_instead(Verdicts.STALE, Verdicts.GRANT)),
    ),
    "the decision gives an instance that comes back a new epoch": (
        (admission, "admit", a_new_epoch_for_each),
    ),
    "a take-over continues the epoch": ((admission, "admit", the_claimed_epoch_by_force),),
    "the log is asked for another epoch than was decided": (
        (requests, "continues", lambda decision, claim: None),
    ),
}
