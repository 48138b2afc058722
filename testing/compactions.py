"""The expected result of a compaction, computed from all sent messages (rule G7).

>>> kept([(0, b"a", b"1"), (1, b"a", b"2"), (2, b"b", b"3"), (3, b"b", None), (4, None, b"4")])
[(1, b'a', b'2'), (4, None, b'4')]
"""

from __future__ import annotations

from typing import Any

import exclusivelog as xl

Sent = tuple[int, bytes | None, bytes | None]  # offset, key, value


def kept(sent: list[Sent]) -> list[Sent]:
    """What rule G7 says must be left of these messages."""
    last = {key: offset for offset, key, _ in sent if key is not None}
    return [
        (offset, key, value)
        for offset, key, value in sent
        if value is not None and (key is None or last[key] == offset)
    ]


def state_of(messages: list[Sent]) -> dict[bytes, bytes]:
    """What a dictionary would say."""
    state: dict[bytes, bytes] = {}
    for _, key, value in messages:
        if key is not None and value is not None:
            state[key] = value
        elif key is not None:
            state.pop(key, None)
    return state


def read(reader: xl.Reader) -> list[Sent]:
    """All that is left to read."""
    return [(message.offset, message.key, message.value) for message in reader]


def compacted(topic: xl.Topic, **options: Any) -> list[Sent]:
    """The view, and what has come since."""
    return read(topic.reader(read_compacted=True, **options))
