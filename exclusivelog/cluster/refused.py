"""The operations that an engine on a cluster refuses, and why (rule J3). docs/cluster.md has the
same table.

>>> str(REASONS["transactions"])
'topics have logs of their own; send_many appends to one topic atomically'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from exclusivelog.errors import UnsupportedError

__all__ = ["REASONS", "Reason", "refusal", "refuses"]


class Reason(NamedTuple):
    """Why something is refused, and what to do instead."""

    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.why}; {self.instead}"


REASONS = {
    "backup": Reason(
        "there are no files to copy", "make a local log of it: exclusivelog mirror NEW --from URL"
    ),
    "bound_producers": Reason(
        "only its topic's log decides if a message counts", "own the topic instead of a resource"
    ),
    "compression": Reason("the cluster stores values as they are", "compress the values"),
    "deletion": Reason(
        "its epochs would begin at 1 again (rule B1)", "terminate the topic, and use another name"
    ),
    "large_messages": Reason(
        "a record has 5 MB at most", "store the value elsewhere, and send a reference"
    ),
    "moved_claims": Reason(
        "claims and topics have logs of their own",
        "close the group's reader, and open one at the destination",
    ),
    "once": Reason("numbered batches need transactions", "send with sequence ids"),
    "retention": Reason(
        "grants are read from a log's first record on",
        "begin another topic, and terminate the old one",
    ),
    "roles": Reason(
        "what a role binds has logs of its own", "hold a lock, and own each topic by itself"
    ),
    "transactions": Reason(
        "topics have logs of their own", "send_many appends to one topic atomically"
    ),
}


def refusal(what: str, given: str = "") -> UnsupportedError:
    """The error for something of `REASONS`; `given`: what the call has asked for.

    >>> str(refusal("once"))
    'a cluster engine has no once: numbered batches need transactions; send with sequence ids'
    """
    more = f". {given}" if given else ""
    return UnsupportedError(f"a cluster engine has no {what}: {REASONS[what]}{more}")


def refuses(what: str) -> Callable[..., NoReturn]:
    """A method that raises this error."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise refusal(what)

    return refuse
