"""Copies: the Pulsar messages that a mirror sends for a ledger's messages, and their decoding.

Every copy names the topic that it was made from, in the property "exclusivelog.topic", and its id
there in "exclusivelog.topic_id" (a topic that is deleted and made again has another one).
`FrameCopies` puts up to some thousand messages into one Pulsar message, a frame (see `frames`).
`PlainCopies` makes one Pulsar message of each, for other programs: value, key (as the partition
key), properties and event time are in Pulsar's own fields, and everything else is in properties
whose names begin with "exclusivelog.":

```text
exclusivelog.offset, .epoch, .session, .producer, .sequence_id
exclusivelog.publish_time, .event_time    ms since 1970; no event time: the latter is missing
exclusivelog.source, .topic, .topic_id    the id of the ledger, and name and id of its topic
exclusivelog.key                          base64 of a key that is empty, or not UTF-8
exclusivelog.gap                          of the first copy: offsets that the source had lost
```
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from exclusivelog._core import Message
from exclusivelog.cluster import frames, waiting
from exclusivelog.cluster.facts import is_birth
from exclusivelog.cluster.frames import Content, Frame
from exclusivelog.cluster.pulsar import Outgoing
from exclusivelog.errors import UnsupportedError

__all__ = ["AnyCopies", "Copied", "Copies", "FrameCopies", "PlainCopies"]

FRAME_BYTES = 1 << 20  # of values and keys; the next message begins another frame
PREFIX = "exclusivelog."
TOPIC, TOPIC_ID, OFFSET = f"{PREFIX}topic", f"{PREFIX}topic_id", f"{PREFIX}offset"
OF_ENGINES = "an engine on a cluster writes to it; mirror to a new namespace"
FOREIGN = (
    "it has messages that no mirror has sent. Name the other topics, or mirror to a new namespace"
)


@dataclass(frozen=True, slots=True)
class Copied:
    """Consecutive messages of one owner, as one Pulsar message.

    `topic`, `topic_id`: of the source; None if a copy that was read has none. `frame.gap`: how many
    offsets before its first one the source no longer had. `message`: what is to be sent; None if
    it was read. `size`: in bytes."""

    topic: str | None
    topic_id: int | None
    frame: Frame
    message: Outgoing | None = None
    size: int = 0

    @property
    def first(self) -> int:
        """The offset of its first message."""
        return self.frame.first

    @property
    def end(self) -> int:
        """The offset after its last message."""
        return self.frame.end


class Decoding(Protocol):
    """Decodes copies."""

    def decode(self, message: Any) -> Copied | str:
        """The copy in a message of the Pulsar client, or a text that says why it is none."""
        ...


class Copies(Decoding, Protocol):
    """One of the two kinds. `in_flight`: how many of them are sent before the first is stored."""

    in_flight: int

    def encode(
        self, messages: Sequence[Message], topic: str, topic_id: int, source: str, gap: int
    ) -> Iterator[Copied]:
        """Copies of consecutive messages of a topic; UnsupportedError for one that does not fit
        into any. `gap`: how many offsets before the first one the source has lost."""
        ...


# ---- frames ------------------------------------------------------------------------------


class FrameCopies:
    """Many messages in one frame."""

    in_flight = 8  # few, so that new messages gather into larger frames meanwhile

    def encode(
        self, messages: Sequence[Message], topic: str, topic_id: int, source: str, gap: int
    ) -> Iterator[Copied]:
        """See `Copies`."""
        named = {TOPIC: topic, TOPIC_ID: str(topic_id)}
        for run in runs(messages):
            for frame, data in frames.split(frame_of(run, source, gap)):
                yield Copied(topic, topic_id, frame, Outgoing(data, properties=named), len(data))
            gap = 0

    def decode(self, message: Any) -> Copied | str:
        """See `Copies`."""
        record = frames.decode(message.data())
        if isinstance(record, Frame) and record.source is not None:
            named = message.properties()
            return Copied(named.get(TOPIC), _maybe_int(named.get(TOPIC_ID)), record)
        if record is not None or _is_of_engines(message.data()):
            return OF_ENGINES
        if OFFSET in message.properties():
            return "it is a plain mirror; mirror to it with plain=True (--plain)"
        return FOREIGN


def _is_of_engines(data: bytes) -> bool:
    return is_birth(data) or waiting.decode(data) is not None


def frame_of(messages: Sequence[Message], source: str, gap: int) -> Frame:
    """A frame of consecutive messages of one owner."""
    first = messages[0]
    return Frame(
        first.epoch, first.session, first.offset, tuple(map(Content.of, messages)), gap, source
    )


def runs(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Split messages into runs of one epoch and session, of up to about FRAME_BYTES."""
    for _, group in itertools.groupby(messages, lambda each: (each.epoch, each.session)):
        run: list[Message] = []
        size = 0
        for message in group:
            size += len(message.raw_value or b"") + len(message.key or b"")
            if run and size > FRAME_BYTES:
                yield run
                run, size = [], 0
            run.append(message)
        yield run


# ---- plain messages ----------------------------------------------------------------------


class PlainCopies:
    """One Pulsar message each."""

    in_flight = 2000

    def encode(
        self, messages: Sequence[Message], topic: str, topic_id: int, source: str, gap: int
    ) -> Iterator[Copied]:
        """See `Copies`."""
        for message in messages:
            frame = frame_of([message], source, gap)
            outgoing = _outgoing(topic, topic_id, frame)
            size = len(outgoing.value or b"") + sum(map(len, outgoing.properties.values()))
            if size > frames.MAX_BYTES:
                raise UnsupportedError(
                    f"the message at offset {message.offset} does not fit into one message of the "
                    f"cluster; it takes {frames.MAX_BYTES} bytes"
                )
            yield Copied(topic, topic_id, frame, outgoing, size)
            gap = 0

    def decode(self, message: Any) -> Copied | str:
        """See `Copies`."""
        properties = dict(message.properties())
        if OFFSET not in properties:
            if isinstance(frames.decode(message.data()), Frame):
                return "it is a mirror of frames; mirror to it without plain=True (--plain)"
            return FOREIGN
        try:
            return self._copied(message, properties)
        except (KeyError, ValueError):  # other programs may use such names, too
            return FOREIGN

    def _copied(self, message: Any, properties: dict[str, str]) -> Copied:
        own = {name: properties.pop(PREFIX + name) for name in OWN if PREFIX + name in properties}
        content = Content(
            None if message._message.has_null_value() else message.data(),
            _key_of(message.partition_key(), own.get("key")),
            properties,
            _maybe_int(own.get("event_time")),
            int(own["publish_time"]),
            own["producer"],
            int(own["sequence_id"]),
        )
        return Copied(
            own.get("topic"),
            _maybe_int(own.get("topic_id")),
            Frame(
                int(own["epoch"]),
                int(own["session"]),
                int(own["offset"]),
                (content,),
                int(own.get("gap", 0)),
                own["source"],
            ),
        )


class AnyCopies:
    """Reads both kinds."""

    def decode(self, message: Any) -> Copied | str:
        """See `Copies`."""
        plain = OFFSET in message.properties()
        return PlainCopies().decode(message) if plain else FrameCopies().decode(message)


OWN = """
    offset epoch session producer sequence_id publish_time event_time key gap source topic topic_id
""".split()


def _outgoing(topic: str, topic_id: int, frame: Frame) -> Outgoing:
    (content,) = frame.contents
    if taken := [name for name in content.properties if name.startswith(PREFIX)]:
        raise UnsupportedError(
            f"the message at offset {frame.first} has a property {taken[0]!r}; a plain mirror "
            f"keeps names that begin with {PREFIX!r} for itself"
        )
    own: dict[str, object] = {
        "offset": frame.first,
        "epoch": frame.epoch,
        "session": frame.session,
        "producer": content.producer_name,
        "sequence_id": content.sequence_id,
        "publish_time": content.publish_time,
        "source": frame.source,
        "topic": topic,
        "topic_id": topic_id,
    }
    if content.event_time is not None:
        own["event_time"] = content.event_time
    if frame.gap:
        own["gap"] = frame.gap
    key = _text(content.key)
    if content.key is not None and not key:
        own["key"] = base64.b64encode(content.key).decode()
    event_time = content.event_time
    return Outgoing(
        content.value,
        key or None,
        {**content.properties, **{PREFIX + name: str(value) for name, value in own.items()}},
        # In Pulsar it is unsigned.
        event_time if event_time is not None and event_time >= 0 else None,
    )


def _text(key: bytes | None) -> str:
    try:
        return (key or b"").decode()
    except UnicodeDecodeError:
        return ""


def _key_of(text: str, encoded: str | None) -> bytes | None:
    if encoded is not None:
        return base64.b64decode(encoded)
    return text.encode() if text else None


def _maybe_int(text: str | None) -> int | None:
    return None if text is None else int(text)
