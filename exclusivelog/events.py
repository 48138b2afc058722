"""`__events__`: the topic with every change of ownership (rule E5).

A record is written in the same transaction as the change, so that neither is
there without the other. It can be read like any topic; its values are JSON, its keys the
names of the topics (claims have none):

```text
time, topic, epoch      when (ms since 1970), of which topic, and its epoch afterwards
kind                    what has happened (see `Event`)
reason                  why
priority                of the producer, in the queue
from, to                who had it, who has it or is to have it: engine, engine_name, pid,
                        producer, properties (of the producer), engine_properties; or null
group, resource,        of a claim, one record for each resource; missing in records about topics.
generation              `topic` is "" there, `epoch` 0, `producer` null, and there is no key
```
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exclusivelog import _core

EVENTS = "__events__"

# Kinds that ledgers of this format may have under another name: {former: present}.
FORMER_KINDS = {"sever": "revoke"}

Party = Mapping[str, Any]
_encode = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` makes one at each call


@dataclass(frozen=True)
class Event:
    """One change of who owns a topic, or a claim's resource. Of a topic, `kind` is one of

    - `grant`: `target` owns the topic now; `reason` is request, reconnect, promotion, fencing
      or hand-over, or role: with the role that binds the topic.
    - `release`: `source` gave it back; `reason` is closed, hand-over, claim: the claim that the
      producer was bound to was released, or role: with the role that binds the topic.
    - `evict`: it was taken from `source`; `reason` is dead, hung, fenced, claim: the claim that
      the producer was bound to is gone, or role: the role is lost.
    - `releasing`, `assigned`: the steps of a hand-over from `source` to `target` (rule E1);
      `reason` is unload, producer where one shared producer moves by itself, or role: the topic is
      reserved with the role that binds it.
    - `admit`: the shared producer `target` has the place of one that was moved by itself.
    - `moved`: a claim of an engine, `source`, was handed over with the topic; `reason` names the
      group.
    - `cancel`: the hand-over to `target` has ended without it; `reason` says why.

    Of a claim, `group`, `resource` and `generation` are set (None in all others), and `kind` is

    - `own`: `target` has the resource now; `reason` is claim, or reader for a group's reader.
    - `revoke`: `source` lost it because `target` made a claim; `reason` is claimed, dead or hung;
      or role: it was lost with a role, and `target` is None.
    - `release`: `source` gave it back; `reason` is closed, or role: with the role.

    A role's own topic is `__role__/` and its name: its events are those of the role's holders.

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
        """As the value of a message."""
        facts = {
            "time": self.time, "topic": self.topic, "epoch": self.epoch, "kind": self.kind,
            "reason": self.reason, "priority": self.priority, "from": self.source,
            "to": self.target,
        }  # fmt: skip
        if self.group is not None:
            facts |= {
                "group": self.group, "resource": self.resource, "generation": self.generation,
            }  # fmt: skip
        return _encode(facts).encode()

    @classmethod
    def loads(cls, value: bytes) -> Event:
        """What `dumps` gave, also that of earlier versions."""
        facts = json.loads(value)
        facts["kind"] = FORMER_KINDS.get(facts["kind"], facts["kind"])
        facts["source"], facts["target"] = facts.pop("from"), facts.pop("to")
        return cls(**facts)


def select(
    messages: Iterator[_core.Message], topic: str | None, group: str | None
) -> Iterator[Event]:
    """The events among messages of `__events__` that are about a topic, or about the claims of a
    group (both None: all)."""
    for message in messages:
        if message.value is None or (topic is not None and message.key != topic.encode()):
            continue
        event = Event.loads(message.value)
        if group is None or event.group == group:
            yield event
