"""What the page shows of a ledger, as JSON: bounded, cut, and printable.

Names and values come from any program that may write to the ledger. Control characters are escaped
here; the page sets all of it as text, never as HTML.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import exclusivelog as xl
from exclusivelog.cli.findings import findings
from exclusivelog.cli.locks import in_use, role_line, subject_of
from exclusivelog.cli.output import (
    decoded,
    holder_of,
    lags_of,
    of_each,
    party_of,
    printable,
    read_some_of,
)
from exclusivelog.cli.owning import owner_facts
from exclusivelog.cli.program import start_of
from exclusivelog.state.past import map_at

MOST_TOPICS = 200
MOST_ROWS = 100  # of engines, groups, locks and roles, owners and waiters
MOST_EVENTS = 30
MOST_MESSAGES = 50
MOST_KEYS = 200
MOST_SCANNED = 100_000  # messages for each answer, while a key is searched
SCAN_SECONDS = 1.0
CHARACTERS = 2000  # of a value
DECODED_BYTES = 1 << 16  # longer values of maps are shown as they are stored
# Serialisers of maps whose values are shown as what they stand for. None of them runs code.
READABLE = ("str", "json", "msgpack", "exact")

Query = Mapping[str, str]
Answer = dict[str, Any]


class Content:
    """Answers the requests of the page. For any number of threads at once."""

    def __init__(self, engine: xl.Engine) -> None:
        self._engine = engine
        self._map = threading.Lock()  # a map is read as a whole: one at a time
        self.answers: dict[str, Callable[[Query], Answer]] = {
            "ledger": self.ledger,
            "topic": self.topic,
            "messages": self.messages,
            "map": self.map,
        }

    # ---- the ledger ----------------------------------------------------------------------

    def ledger(self, query: Query) -> Answer:
        """Topics whose names have the text `filter`, locks and roles, engines, groups, the latest
        events. `more`: how many of a list are left out."""
        stats = self._engine.stats()
        roles, engines = [*in_use(self._engine)], self._engine.engines()
        lags = lags_of(stats)
        names = self._engine.topics()
        wanted = [name for name in names if query.get("filter", "") in name]
        return {
            "path": printable(str(self._engine.path)),
            "time": round(time.time() * 1000),
            "findings": [each.text for each in findings(stats, self._engine.inside())],
            "waiters": stats.waiters,
            "used_bytes": stats.used_bytes,
            "topic_count": len(names),
            "found_count": len(wanted),
            "topics": list(self._topic_rows(wanted, lags)),
            "roles": [_role_row(each) for each in roles[:MOST_ROWS]],
            "engine_count": stats.engines,
            "engines": [_engine_row(each) for each in engines[:MOST_ROWS]],
            "groups": [_group_row(each) for each in stats.groups[:MOST_ROWS]],
            "events": self._events(),
            "more": {
                "roles": _left_out(roles),
                "engines": _left_out(engines),
                "groups": _left_out(stats.groups),
            },
        }

    def _topic_rows(self, names: Iterable[str], lags: Mapping[str, int]) -> Iterator[Answer]:
        def row(topic: xl.Topic) -> Iterator[Answer]:
            yield {
                "name": topic.name,
                "kind": topic.kind,
                "first": topic.first_offset,
                "next": topic.next_offset,
                "epoch": topic.epoch,
                "owner": printable(holder_of(topic)),
                "waiters": len(topic.waiters),
                "moving": len(topic.transfers),
                "lag": lags.get(topic.name),
            }

        return of_each(self._engine, islice(names, MOST_TOPICS), row)

    def _events(self) -> list[Answer]:
        try:
            events = self._engine.topic("__events__", create=False)
        except xl.TopicNotFoundError:  # nothing has happened yet
            return []
        start = max(events.first_offset, events.next_offset - MOST_EVENTS)
        with events.reader(start=start, trimmed="earliest") as reader:
            found = [xl.Event.loads(message.value) for message in reader.read_batch(MOST_EVENTS)]
        return [_event_row(event) for event in found][::-1]

    # ---- a topic -------------------------------------------------------------------------

    def topic(self, query: Query) -> Answer:
        """Owners, hand-overs under way and waiters of a topic, in the order of the queue; `more`:
        how many are left out."""
        topic = self._named(query)
        rows = [*owner_facts(topic)]
        return {
            "name": topic.name,
            "kind": topic.kind,
            "first": topic.first_offset,
            "next": topic.next_offset,
            "owners": [_owner_row(each) for each in rows[:MOST_ROWS]],
            "more": _left_out(rows),
        }

    def messages(self, query: Query) -> Answer:
        """Messages from `from` on: an offset, -n for the last n, a time, an age, or the end; with
        `key`, only those with that key. `next` is where to go on; `more` says whether to."""
        topic = self._named(query)
        key = os.fsencode(query["key"]) if query.get("key") else None
        end = topic.next_offset
        with topic.reader() as reader:
            reader.seek(_start(topic, query.get("from", "")))
            found = _search(reader, end, key)
            return {
                "messages": [_message_row(message) for message in found],
                "next": reader.position,
                "end": end,
                "more": reader.position < end,
            }

    def map(self, query: Query) -> Answer:
        """The keys of a map that begin with `prefix`, with their values, and when they expire, as
        they were at `at`: an offset, a time, an age; now, without it."""
        topic = self._named(query)
        if topic.kind != "map":
            raise ValueError(f"topic {topic.name!r} holds {topic.kind}, no map")
        at = query.get("at", "")
        when = topic.next_offset if at in ("", "latest") else start_of(at, "at")
        if when == "earliest":
            when = topic.first_offset
        with self._map:
            offset, found = map_at(topic, when)
        entries = found.entries
        prefix = os.fsencode(query.get("prefix", ""))
        wanted = sorted(key for key in entries if key.startswith(prefix))
        reads = topic.serializers
        rows = [
            {
                "key": _shown(key, reads.get("key")),
                "value": _shown(entries[key], reads.get("value")),
                "expires": found.until(key),
            }
            for key in wanted[:MOST_KEYS]
        ]
        return {"at": offset, "count": len(entries), "found": len(wanted), "entries": rows}

    def _named(self, query: Query) -> xl.Topic:
        return self._engine.topic(query.get("topic", ""), create=False)


# ---- messages ----------------------------------------------------------------------------


def _start(topic: xl.Topic, text: str) -> Any:
    """Where to begin. Before the first message that is there, it is that one."""
    if text == "":
        text = f"-{MOST_MESSAGES}"
    if text.startswith("-") and text[1:].isdecimal():
        return max(topic.first_offset, topic.next_offset - int(text[1:]))
    start = start_of(text, "from")
    return max(start, topic.first_offset) if isinstance(start, int) else start


def _search(reader: xl.Reader, end: int, key: bytes | None) -> list[xl.Message]:
    """The next messages before the offset `end`, up to the bounds of an answer. The reader's
    position is behind the last one that was looked at."""
    found: list[xl.Message] = []
    last, until = reader.position + MOST_SCANNED, time.monotonic() + SCAN_SECONDS
    while reader.position < min(end, last) and time.monotonic() < until:
        most = min(end, last) - reader.position
        if key is None:
            most = min(most, MOST_MESSAGES - len(found))
        for message in read_some_of(reader, min(most, 1000)):
            if key is None or message.key == key:
                found.append(message)
            if len(found) == MOST_MESSAGES:
                reader.seek(message.offset + 1)
                return found
    return found


def _message_row(message: xl.Message) -> Answer:
    properties = islice(message.properties.items(), MOST_ROWS)
    return {
        "offset": message.offset,
        "epoch": message.epoch,
        "time": message.publish_time,
        "producer": printable(message.producer_name),
        "key": _shown(message.key),
        "value": _shown(message.value),
        "properties": _cut(" ".join(f"{name}={value}" for name, value in properties)),
    }


def _shown(data: bytes | None, serializer: str | None = None) -> Answer | None:
    """Bytes as text, cut; those of a map as what they stand for."""
    if data is None:
        return None
    text = None
    if serializer in READABLE and len(data) <= DECODED_BYTES:
        with suppress(Exception):  # the serializer's own: the bytes are shown instead
            found = getattr(xl.serde, serializer).loads(data)
            text = found if isinstance(found, str) else repr(found)
    if text is None:
        text = decoded(data[: 4 * CHARACTERS])
    cut = len(text) > CHARACTERS or len(data) > max(DECODED_BYTES, 4 * CHARACTERS)
    return {"text": _cut(text), "bytes": len(data), "cut": cut}


def _cut(text: str) -> str:
    return printable(text[:CHARACTERS])


# ---- rows --------------------------------------------------------------------------------


def _left_out(rows: Sequence[object]) -> int:
    """How many of these are not shown."""
    return max(0, len(rows) - MOST_ROWS)


def _role_row(info: xl.RoleInfo) -> Answer:
    line = role_line(info)
    queue = [*map(printable, line.queue)]
    return {**line._asdict(), "holder": printable(line.holder), "queue": queue}


def _engine_row(engine: xl.EngineInfo) -> Answer:
    pairs = " ".join(f"{name}={value}" for name, value in engine.properties.items())
    return {
        "name": printable(engine.name),
        "id": engine.id,
        "pid": engine.pid,
        "heartbeat_age": round(engine.heartbeat_age, 1),
        "properties": _cut(pairs),
    }


def _group_row(group: xl.GroupInfo) -> Answer:
    reader = group.reader
    return {
        "group": printable(group.group),
        "topic": group.topic,
        "position": group.position,
        "lag": group.lag,
        "engine": None if reader is None else printable(reader.engine_name),
        "pid": None if reader is None else reader.pid,
    }


def _owner_row(facts: Mapping[str, Any]) -> Answer:
    names = ("state", "producer", "mode", "priority", "epoch", "engine", "pid", "since", "until")
    found = {name: facts.get(name) for name in names}
    return {n: printable(v) if isinstance(v, str) else v for n, v in found.items()}


def _event_row(event: xl.Event) -> Answer:
    return {
        "time": event.time,
        "what": printable(subject_of(event)),
        "kind": event.kind,
        "reason": event.reason,
        "epoch": event.epoch,
        "from": printable(party_of(event.source)),
        "to": printable(party_of(event.target)),
    }
