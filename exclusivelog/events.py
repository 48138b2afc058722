"""`__events__`: the topic that records every change of ownership (rule E5).

A change and its record are written in the same transaction. The topic can be read like any other.
Its values are JSON; its keys are the names of topics (records about claims have no key):

```text
time, topic, epoch      time (ms since 1970), the topic, and its epoch after the change
kind                    what has happened (see `Event`)
reason                  why
priority                the producer's priority in the queue
from, to                the previous holder, and the new or intended one: engine, engine_name, pid,
                        producer, properties (of the producer), engine_properties; or null
group, resource,        only in records about claims, one for each resource. In these records
generation              `topic` is "", `epoch` 0 and `producer` null
```
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exclusivelog import _core, logs

__all__ = ["Event"]

log = logging.getLogger(__name__)

RESTORED = "restored"
EVENTS = "__events__"
STEPS = ("releasing", "assigned", "admit", "moved", "cancel")  # of a hand-over
GONE = {"dead": "dead", "hung": "unresponsive"}  # reasons of an eviction, and what is logged

# Kinds that had another name in earlier versions: {former name: present name}.
FORMER_KINDS = {"sever": "revoke"}

Party = Mapping[str, Any]
_encode = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would create one per call


@dataclass(frozen=True)
class Event:
    """A change of the owner of a topic, or of a claim's resource.

    For a topic, `kind` is one of

    - `grant`: `target` owns the topic now. `reason`: "request", "reconnect", "promotion", "fencing"
      or "hand-over"; "role": it was granted with the role that binds the topic.
    - `release`: `source` released it. `reason`: "closed" or "hand-over"; "claim": the claim that
      the producer was bound to was released; "role": it was released with the role; "terminated":
      the topic was.
    - `evict`: it was taken from `source`. `reason`: "dead" (its process has ended), "hung" (its
      engine was unresponsive for longer than its keepalive) or "fenced"; "late": a shared state did
      not give the topic to the next writer in time; "claim": the claim that
      the producer was bound to was lost; "role": the role was lost.
    - `releasing`, `assigned`: the steps of a hand-over from `source` to `target` (rule E1).
      `reason`: "unload"; "producer": only one shared producer moves; "role": the topic moves with
      the role that binds it.
    - `admit`: the shared producer `target` took the reserved place of one that was moved alone.
    - `moved`: a claim of the engine `source` was handed over with the topic; `reason` is the name
      of its group.
    - `cancel`: the hand-over to `target` failed or was cancelled; `reason` says why.
    - `restored`: `restore` made the topic from copies, up to this epoch; earlier changes of its
      owner are not recorded. `reason`: "copies".

    For a claim, `group`, `resource` and `generation` are set (for a topic, they are None), and
    `kind` is one of

    - `own`: `target` has the resource now. `reason`: "claim"; "reader": it is a group reader's.
    - `revoke`: `source` lost it because `target` made a claim. `reason`: "claimed", "dead" or
      "hung"; "role": it was lost with a role, and `target` is None.
    - `release`: `source` released it. `reason`: "closed"; "role": it was released with the role.

    The topic `__role__/NAME` stands for a role: its events are those of the role's holders.

    >>> with topic.producer("exclusive", name="leader"):
    ...     event = list(engine.history("orders"))[-1]
    >>> event.kind, event.reason, event.epoch, event.target["producer"]
    ('grant', 'request', 1, 'leader')
    """

    time: int
    topic: str
    epoch: int
    kind: str
    reason: str
    priority: int
    source: Party | None
    target: Party | None
    group: str | None = None
    resource: str | None = None
    generation: int | None = None

    def dumps(self) -> bytes:
        """Encode it as the value of a message."""
        facts = {
            "time": self.time,
            "topic": self.topic,
            "epoch": self.epoch,
            "kind": self.kind,
            "reason": self.reason,
            "priority": self.priority,
            "from": self.source,
            "to": self.target,
        }
        if self.group is not None:
            facts |= {"group": self.group, "resource": self.resource, "generation": self.generation}
        return _encode(facts).encode()

    @classmethod
    def loads(cls, value: bytes) -> Event:
        """Decode what `dumps` of this or an earlier version returned."""
        facts = json.loads(value)
        facts["kind"] = FORMER_KINDS.get(facts["kind"], facts["kind"])
        facts["source"], facts["target"] = facts.pop("from"), facts.pop("to")
        return cls(**facts)


def select(
    messages: Iterator[_core.Message], topic: str | None, group: str | None
) -> Iterator[Event]:
    """Decode messages of `__events__`: the events of a topic, or of the claims of a group (both
    None: all)."""
    for message in messages:
        if message.value is None or (topic is not None and message.key != topic.encode()):
            continue
        event = Event.loads(message.value)
        if group is None or event.group == group:
            yield event


# ---- what is logged of it ----------------------------------------------------------------


def log_event(ledger: str, event: Event) -> None:
    """Log an event that this process has made; not the grants to its own engines, which log them
    themselves."""
    if not log.isEnabledFor(logging.INFO):
        return
    source, target = event.source, event.target
    facts: dict[str, Any] = {"ledger": ledger, "reason": event.reason}
    names: dict[str, Any] = {"source": _name(source), "target": _name(target)}
    if event.group is not None:
        logs.emit(
            log,
            logs.CLAIM,
            **facts,
            **party_fields(target or source),
            **names,
            group=event.group,
            resource=event.resource,
            generation=event.generation,
            step=event.kind,
        )
        return
    facts |= {"topic": event.topic, "epoch": event.epoch}
    if event.kind in STEPS:
        about = party_fields(source or target)
        logs.emit(log, logs.HAND_OVER, **facts, **about, **names, step=event.kind)
    elif event.kind == "release":
        logs.emit(log, logs.RELEASED, **facts, **party_fields(source))
    elif event.kind == "evict":
        logs.emit(log, logs.EVICTED, **facts, **party_fields(source), rival=_name(target))
    elif event.kind == "grant" and target is not None and target["pid"] != os.getpid():
        logs.emit(log, logs.PROMOTED, **facts, **party_fields(target))


def log_gone(ledger: str, engine: Party, reason: str, silence: str, topics: list[str]) -> None:
    """Log that a dead or unresponsive engine was evicted from these topics."""
    logs.emit(
        log,
        logs.ENGINE_GONE,
        ledger=ledger,
        **party_fields(engine),
        reason=GONE[reason],
        silence=silence,
        count=len(topics),
        topics=logs.some(topics),
        topic=topics[0] if len(topics) == 1 else None,
    )


def log_claim_of_gone(ledger: str, event: Event, silence: str) -> None:
    """Log that the claim of a dead or unresponsive engine was revoked."""
    logs.emit(
        log,
        logs.CLAIM_OF_GONE,
        ledger=ledger,
        **party_fields(event.source),
        reason=GONE[event.reason],
        group=event.group,
        resource=event.resource,
        silence=silence,
    )


def party_fields(party: Party | None) -> dict[str, Any]:
    """The attributes of a log record about this party."""
    if party is None:
        return {"engine": None, "engine_id": None, "pid": None, "producer": None}
    return {
        "engine": party["engine_name"],
        "engine_id": party["engine"],
        "pid": party["pid"],
        "producer": party["producer"],
    }


def _name(party: Party | None) -> str:
    if party is None:
        return "no engine"
    return f"engine {party['engine_name']!r} (id {party['engine']}, pid {party['pid']})"
