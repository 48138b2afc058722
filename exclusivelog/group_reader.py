"""One reader of a group on several topics: one claim, one commit of all positions (rule F6)."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.errors import (
    EngineClosedError,
    TopicNotFoundError,
    TopicTerminatedError,
    WaitTimeoutError,
)
from exclusivelog.waits import check_timeout

if TYPE_CHECKING:
    from exclusivelog.groups import Membership
    from exclusivelog.reader import Reader
    from exclusivelog.runtime import Runtime

Found = tuple[str, _core.Message]


class GroupReader:
    """Reads several topics for a group. Made by `engine.reader`; for one thread at a time.

    It hands out (topic's name, message): in order within each topic, and topics that have
    messages take turns. One claim covers all topics: the group's next reader on any of them fences
    this one on all, which raises ReaderFencedError from then on. `commit` writes the positions on
    all topics in one transaction, and `transaction.commit_cursor(reader)` makes them a part of
    another one.

    >>> for name in "ab":
    ...     _ = engine.topic(name).producer().send_many([b"1", b"2"])
    >>> reader = engine.reader(["a", "b"], group="billing")
    >>> [(name, message.value) for name, message in reader.read_batch(3)]
    [('a', b'1'), ('b', b'1'), ('a', b'2')]
    >>> reader.commit(); reader.positions
    {'a': 2, 'b': 1}
    """

    def __init__(self, engine: Runtime, readers: Sequence[Reader], membership: Membership) -> None:
        self.membership = membership
        self.readers = tuple(readers)  # one for each topic
        self._engine = engine
        self._next = 0  # the reader whose turn it is
        self._words = [reader.word for reader in readers]
        self._closed = False
        for reader in readers:
            reader.join(membership)

    # ---- where ---------------------------------------------------------------------------

    @property
    def topics(self) -> list[str]:
        """The names of its topics."""
        return [reader.topic for reader in self.readers]

    @property
    def group(self) -> str:
        """The group that it is the reader of."""
        return self.membership.group

    @property
    def generations(self) -> dict[str, int]:
        """{topic: generation} of its claim."""
        return dict(self.membership.generations)

    @property
    def positions(self) -> dict[str, int]:
        """{topic: the offset of the next message}."""
        return {reader.topic: reader.position for reader in self.readers}

    def offsets_to_commit(self) -> dict[int, int]:
        """{topic id: the offset that a commit now lets the group go on at}."""
        return {reader.topic_id: reader.position for reader in self.readers}

    def seek(
        self, start: str | int | dt.datetime, *, topic: str | None = None, inclusive: bool = True
    ) -> None:
        """Go on from "earliest", "latest", an offset, or a datetime, as `Reader.seek`: on one
        topic, or (None) on all."""
        self._check()
        chosen = [reader for reader in self.readers if topic in (None, reader.topic)]
        if not chosen:
            raise TopicNotFoundError(f"topic={topic!r} is none of {', '.join(self.topics)}")
        for reader in chosen:
            reader.seek(start, inclusive=inclusive)

    def has_message_available(self) -> bool:
        """True if there is a message at or behind the position on any topic."""
        self._check()
        return any(reader.has_message_available() for reader in self.readers)

    # ---- read ----------------------------------------------------------------------------

    def read_next(self, timeout: float | None = None) -> Found:
        """The next message of any topic, with the topic's name; waits for it where all are at
        their end.

        `timeout` in seconds (None: for ever; 0: not at all), then WaitTimeoutError. At the end of
        all topics, if all are terminated: TopicTerminatedError.
        """
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            marks = [reader.mark() for reader in self.readers]  # before: what comes after wakes
            found = self._take()
            if found is not None:
                return found
            if all(reader.is_over() for reader in self.readers):
                raise TopicTerminatedError(f"all of topics {', '.join(self.topics)} have ended")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise self.nothing_came(timeout)
            seconds = 3600.0 if left is None else left
            self._engine.ledger.lockfile.await_topics(self._words, marks, seconds)

    def nothing_came(self, timeout: float | None) -> WaitTimeoutError:
        """What `read_next` raises after so many seconds."""
        return WaitTimeoutError(
            f"none of topics {', '.join(self.topics)} had a message within {timeout} s"
        )

    def _take(self) -> Found | None:
        self._check()
        for _ in self.readers:
            reader = self.readers[self._next]
            self._next = (self._next + 1) % len(self.readers)
            message = reader.take_one()
            if message is not None:
                return reader.topic, message
        return None

    def read_batch(self, max_messages: int) -> list[Found]:
        """Up to `max_messages` next messages, without waiting; an empty list at the end."""
        if not isinstance(max_messages, int) or max_messages < 1:
            raise ValueError(f"max_messages={max_messages!r}: it takes a whole number from 1 on")
        before, turn = [reader.position for reader in self.readers], self._next
        found: list[Found] = []
        try:
            while len(found) < max_messages and (one := self._take()) is not None:
                found.append(one)
        except BaseException:  # what was taken must be read again
            for reader, position in zip(self.readers, before, strict=True):
                reader.move_to(position)
            self._next = turn
            raise
        return found

    def __iter__(self) -> Iterator[Found]:
        """The messages up to the ends of all topics as they are now."""
        self._check()
        return self._walk([(reader.topic, iter(reader)) for reader in self.readers])

    def _walk(self, walks: list[tuple[str, Iterator[_core.Message]]]) -> Iterator[Found]:
        while walks:
            left = []
            for name, messages in walks:
                message = next(messages, None)
                if message is not None:
                    yield name, message
                    left.append((name, messages))
            walks = left

    def follow(self, timeout: float | None = None) -> Iterator[Found]:
        """The messages, for ever: at the ends of all topics it waits. Ends when nothing has come
        for `timeout` seconds (None: never), or nothing can come any more."""
        while True:
            try:
                found = self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield found

    # ---- commit and close ----------------------------------------------------------------

    def commit(self) -> None:
        """Let the group go on at the positions of all topics, durably, in one transaction.

        Raises ReaderFencedError if a later reader of the group has come on any of the topics.
        """
        self._check()
        self.membership.commit(self.offsets_to_commit())

    def _check(self) -> None:
        self._engine.check_open()
        if self._closed:
            raise EngineClosedError(f"this reader of group {self.group!r} is closed")
        self.membership.check()

    def close(self) -> None:
        """End reading; a thread that waits in `read_next` gets EngineClosedError."""
        self._closed = True
        for reader in self.readers:
            reader.close()

    def __enter__(self) -> GroupReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GroupReader of group {self.group!r} at {self.positions}>"
