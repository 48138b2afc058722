"""Who may write, in which order, and after which delay: the decisions of every backend (rule J5).

Pure functions of facts: no rows, I/O, clock or lock (rules A1 to A6, B5, B6, D1, D7, F1 to F4). A
backend collects the facts, carries the verdict out, and raises the errors of `refusals`.

>>> admit(epoch=3, owner=None, shared=False, waiting=False, request=Request("exclusive"))
Decision(verdict=<Verdict.GRANT: 'grant'>, epoch=4)
>>> judge_claim(4, False, None)
(<ClaimVerdict.GRANT: 'grant'>, 5)
>>> eligible_at(created=500, priority=1, settle=900, freed=1000, known=(3, 1))
1900
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from exclusivelog import _core
from exclusivelog.types import EXCLUSIVE_MODES, FENCING_MODES, WAITING_MODES

Known = tuple[int, int]  # the best and the lowest priority of a topic's waiters so far


# ---- who may write (rules A, B5, B6) -----------------------------------------------------


class Request(NamedTuple):
    """A producer's request. `mode` is the name of an access mode, `claimed_epoch` its
    `topic_epoch=` (rule B5)."""

    mode: str
    claimed_epoch: int | None = None


class Verdict(enum.Enum):
    """The decision about a request."""

    ADMIT = "admit"  # as one of several shared producers
    GRANT = "grant"  # as the owner
    TAKE_OVER = "take over"  # as the owner; all holders and waiters are fenced
    QUEUE = "queue"
    BUSY = "busy"
    FENCED = "fenced"
    STALE = "stale"  # its claimed epoch is lower than the topic's
    INVALID = "invalid"  # its claimed epoch is higher


ADMITTED = (Verdict.ADMIT, Verdict.GRANT, Verdict.TAKE_OVER)


class Decision(NamedTuple):
    """The verdict, and the topic's epoch once it is carried out."""

    verdict: Verdict
    epoch: int


def admit(
    *,
    epoch: int,
    owner: object | None,
    shared: bool,
    waiting: bool,
    request: Request,
    in_transit: bool = False,
    recreated: bool = False,
) -> Decision:
    """The table of rule A, and the claimed epochs of B5 and B6: validated before any session is
    evicted.

    `owner`, `shared` and `waiting` count only sessions of live engines; for a request that waits
    itself, `waiting` counts those before it. A topic that is `in_transit` gets a new epoch in any
    case (rule E1). One that is `recreated` had its epoch before it was deleted: no owner gets that
    again (rule B1).
    """
    claimed = request.claimed_epoch
    if is_stale(epoch, claimed) or (recreated and claimed == epoch):
        return Decision(Verdict.STALE, epoch)
    owned = request.mode in EXCLUSIVE_MODES
    if claimed is not None and (claimed > epoch or (claimed == 0 and owned)):
        # Epoch 0 has no owner, but may have had shared producers.
        return Decision(Verdict.INVALID, epoch)
    free = owner is None and not shared
    if not owned:
        refused = owner is not None or waiting
        return Decision(Verdict.BUSY if refused else Verdict.ADMIT, epoch)
    if request.mode in FENCING_MODES:
        if not free or waiting:
            return Decision(Verdict.TAKE_OVER, epoch + 1)
        return Decision(Verdict.GRANT, granted_epoch(epoch, claimed, in_transit))
    if free and not waiting:
        return Decision(Verdict.GRANT, granted_epoch(epoch, claimed, in_transit))
    return Decision(Verdict.QUEUE if request.mode in WAITING_MODES else Verdict.FENCED, epoch)


def is_stale(epoch: int, claimed: int | None) -> bool:
    """Has the topic had another owner since the one that claims to come back (rule B5)?"""
    return claimed is not None and claimed < epoch


def granted_epoch(epoch: int, claimed: int | None, in_transit: bool) -> int:
    """The epoch of a new owner of a free topic: its own old one (rule B5), or the next, as
    always after a hand-over (rule E1)."""
    return epoch if claimed == epoch and not in_transit else epoch + 1


HANDED_OVER = "hand-over"  # the reason of a grant, and of the release before it


PROMOTION = "promotion"  # the first of the queue was granted the topic


def reason_of_grant(*, takes: bool, moved: bool, continues: bool, waited: bool) -> str:
    """Why a topic was granted, for its event and its log line (rule E5).

    `takes`: its holders or waiters were fenced for it. `moved`: a hand-over has reserved it for the
    new owner. `continues`: that has its old epoch. `waited`: it was in the queue.

    >>> reason_of_grant(takes=False, moved=False, continues=True, waited=True)
    'reconnect'
    """
    if takes:
        return "fencing"
    if moved:
        return HANDED_OVER
    if continues:
        return "reconnect"
    return PROMOTION if waited else "request"


# Why a hand-over has failed, as its event says.
NO_DESTINATION = "the destination is gone"
OVERTAKEN = "another owner came first"


def end_of_move(*, lives: bool, late: bool, overtaken: bool) -> str:
    """Why a hand-over cannot succeed any more (rule E4); empty if it can.

    `lives`: its destination does. `late`: its deadline has passed. `overtaken`: the topic has
    another owner than at its beginning.

    >>> end_of_move(lives=True, late=True, overtaken=False)
    'deadline'
    """
    if not lives:
        return NO_DESTINATION
    if late:
        return "deadline"
    return OVERTAKEN if overtaken else ""


def end_by_grant(*, shared: bool, reason: str) -> str:
    """Why the hand-over of a topic fails by this grant, or by a producer that shares the topic
    (rule E4); empty if it is the grant to its destination.

    >>> end_by_grant(shared=False, reason="fencing")
    'another owner came first'
    """
    if shared:
        return "a shared producer of it came first"
    return "" if reason == HANDED_OVER else OVERTAKEN


def awaits_release(mode: str, verdict: Verdict, *, waiting: bool, expected: bool) -> bool:
    """Is a request refused only because the topic is still to be released to its engine (rule E3)?

    `waiting`: the queue is not empty, which keeps shared producers out. `expected`: a waiter of the
    engine is in it, which becomes owner at the release.

    >>> awaits_release("exclusive", Verdict.FENCED, waiting=True, expected=False)
    True
    """
    if verdict not in (Verdict.BUSY, Verdict.FENCED):
        return False
    return not (expected if mode in EXCLUSIVE_MODES else waiting)


def held_back(
    mode: str,
    *,
    waiting: bool,
    settled: Callable[[], bool],
    reserved_for_it: bool | None = None,
) -> bool:
    """Must a request wait, although its topic has no holder?

    `waiting`: others are before it in the queue. `settled`: has its delay passed (rule D7)? Asked
    of a waiter alone: to find out takes a look-up. `reserved_for_it`: None unless the topic is in
    transit; then it is for its destination alone, where it goes past the queue (rule E3).

    >>> held_back("exclusive", waiting=True, settled=lambda: True, reserved_for_it=True)
    False
    """
    if reserved_for_it is not None:
        return not reserved_for_it or (waiting and mode not in EXCLUSIVE_MODES)
    return waiting or (mode in WAITING_MODES and not settled())


def decide(
    *,
    epoch: int,
    owner: object | None,
    shared: bool,
    waiting: bool,
    request: Request,
    settled: Callable[[], bool],
    reserved_for_it: bool | None = None,
    recreated: bool = False,
) -> Decision:
    """The decision about a request: that of `admit`, and of `held_back` where the topic is free.

    >>> given = {"epoch": 3, "owner": None, "shared": False, "waiting": False}
    >>> decide(**given, request=Request("wait_for_exclusive"), settled=lambda: False)
    Decision(verdict=<Verdict.QUEUE: 'queue'>, epoch=3)
    """
    if owner is None and not shared:
        waiting = held_back(
            request.mode, waiting=waiting, settled=settled, reserved_for_it=reserved_for_it
        )
    return admit(
        epoch=epoch,
        owner=owner,
        shared=shared,
        waiting=waiting,
        request=request,
        in_transit=reserved_for_it is not None,
        recreated=recreated,
    )


# ---- in which order, and after which delay (rules D1, D7) --------------------------------


def place(priority: int, arrived: int, tie: int = 0) -> tuple[int, int, int]:
    """The sort key of a waiter, best first: the highest priority, then the earliest. `tie`: a
    random number, for those that arrived at the same time.

    >>> sorted([place(0, 1), place(7, 3), place(7, 2)])
    [(-7, 2, 0), (-7, 3, 0), (0, 1, 0)]
    """
    return -priority, arrived, tie


def widened(known: Known | None, *priorities: int) -> Known:
    """The range of priorities, extended to these.

    >>> widened((5, 1), 7), widened(None, 3)
    ((7, 1), (3, 3))
    """
    seen = (*(known or ()), *priorities)
    return max(seen), min(seen)


def eligible_at(
    *, created: int, priority: int, settle: int, freed: int, known: Known | None
) -> int:
    """The time from which a waiter of that priority may own a topic that has been free since
    `freed`: at once for the best priority that is known there, after `settle` for the lowest. All
    times are in ns of one monotonic clock; compiled: `_core.delay` and `_core.eligible_at`."""
    return _core.eligible_at(created, _core.delay(priority, settle, known), freed)


# ---- claims (rules F1 to F4) -------------------------------------------------------------


class ClaimVerdict(enum.Enum):
    """The decision about a claim on one resource."""

    GRANT = "grant"
    REVOKE = "revoke"  # granted; the holder loses its whole claim
    STALE = "stale"  # its generation is below the last one
    HELD = "held"  # its holder has a higher generation


def judge_claim(last: int, held: bool, wanted: int | None) -> tuple[ClaimVerdict, int]:
    """The verdict, and the resource's generation if it is granted.

    `last` is the resource's last generation (0: none yet), `held`: its holder lives.

    >>> judge_claim(4, False, None), judge_claim(4, True, 3)
    ((<ClaimVerdict.GRANT: 'grant'>, 5), (<ClaimVerdict.HELD: 'held'>, 3))
    """
    generation = last + 1 if wanted is None else wanted
    if generation < last and generation != 0:  # 0 always wins, and begins anew (rule F4)
        return (ClaimVerdict.HELD if held else ClaimVerdict.STALE), generation
    return (ClaimVerdict.REVOKE if held else ClaimVerdict.GRANT), generation
