"""Items: the messages of shared states and maps, and what snapshots consist of."""

from __future__ import annotations

import msgpack

from exclusivelog import _core
from exclusivelog.messages.encoding import Raw

# (key, value). In a map, the value None removes the key, and (None, None) removes all keys.
Item = tuple[bytes | None, bytes | None]
CLEAR: bytes = msgpack.packb({"map": "clear"})  # properties of the message that removes all keys


def message_of(key: bytes | None, value: bytes | None) -> Raw:
    """Return the message that stores an item in the log."""
    return key, value, CLEAR if key is None and value is None else None


def is_clear(message: _core.Message) -> bool:
    """Does this message remove all keys of a map? Compaction honours it, too (rule G7)."""
    nothing = message.raw_value is None and message.key is None
    return nothing and message.properties == {"map": "clear"}


def item_of(message: _core.Message) -> Item:
    """Return the item that a message stores. An empty message without the properties of a clear
    is not one: it becomes an item that no map accepts."""
    if message.key is None and message.raw_value is None and not is_clear(message):
        return None, b""
    return message.key, message.raw_value
