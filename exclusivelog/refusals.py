"""The errors of requests that are refused, and of producers that are fenced: the same for every
backend (rule A5). `what` is a topic, or the role that it stands for: "topic 'orders'".

>>> str(never_granted("topic 'orders'", 3, 9)).partition(":")[2][:32]
' topic_epoch=9 was never granted'
"""

from __future__ import annotations

from exclusivelog.admission import fenced_text, held_by
from exclusivelog.errors import InvalidEpochError, ProducerBusyError, ProducerFencedError
from exclusivelog.types import OwnerInfo


def not_free_to_share(what: str, by: OwnerInfo | None, moving: str = "") -> ProducerBusyError:
    """The error of a shared producer that is not admitted; `moving`: where the topic goes to."""
    return ProducerBusyError(
        f"{what} is not free for a shared producer{held_by(by)}{moving}; try again when it is "
        "free, or use another access mode",
        holder=by,
    )


def not_free(
    what: str, by: OwnerInfo | None, moving: str = "", holds: str = "producer"
) -> ProducerFencedError:
    """The error of an exclusive producer that is not admitted."""
    return ProducerFencedError(
        f"{what} is not free for an exclusive {holds}{held_by(by)}{moving}; wait_for_exclusive "
        "waits for it, exclusive_with_fencing takes it",
        holder=by,
    )


def out_of_date(
    what: str, epoch: int, claim: int, by: OwnerInfo | None, moving: str = ""
) -> ProducerFencedError:
    """The error of a producer whose `topic_epoch` is lower than the topic's (rule B5)."""
    return ProducerFencedError(
        f"{what} is at epoch {epoch}: topic_epoch={claim} is out of date: another owner came "
        f"since{held_by(by)}{moving}. Open a producer without topic_epoch",
        holder=by,
    )


def never_granted(what: str, epoch: int, claim: int) -> InvalidEpochError:
    """The error of a producer whose `topic_epoch` is higher than the topic's (rule B5)."""
    return InvalidEpochError(
        f"{what}: topic_epoch={claim} was never granted: the topic is at epoch {epoch}. Pass the "
        "epoch that this producer had, or None"
    )


def fenced(
    what: str, name: str, epoch: int, owner: OwnerInfo | None, topic_epoch: int
) -> ProducerFencedError:
    """The error of a fenced producer."""
    return ProducerFencedError(fenced_text(what, name, epoch, owner, topic_epoch), holder=owner)
