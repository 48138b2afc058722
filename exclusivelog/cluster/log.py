"""`Writer` and `Reader` of an ordered log, as steps without threads or clocks.

`Reader` yields the messages that count. `Writer` asks for the topic, sends frames, and acknowledges
a send when its own tail has read the frame back as one that counts (rule J2). Correctness does not
depend on the backend's answers to appends, which may be lost, late or doubled. So:

- `Writer.resend` appends again what has not been read back. A duplicate does not count.
- Each send has one outcome (rule B9). It is acknowledged with its offset, or it fails with
  `ProducerFencedError` when another owner's grant counts, or with `TopicTerminatedError` when a
  termination does; then its messages are not in the log, and never will be.

The caller is a thread that follows the log (`exclusivelog.cluster.following`), or a test. It folds
each record into the `State` that it shares with the writer, and passes the verdict to `Writer.saw`.

>>> from exclusivelog.cluster.frames import Holder
>>> from exclusivelog.cluster.memory import MemoryLog
>>> from exclusivelog.types import AccessMode
>>> log = MemoryLog()
>>> reader = Reader(log)
>>> writer = Writer(reader.state, log.append, Holder("e1", "host", 1, "p", AccessMode.EXCLUSIVE))
>>> writer.ask()
>>> for judged in reader.records():
...     writer.saw(judged)
>>> writer.status, writer.epoch
('owner', 1)
>>> sent = writer.send([(b"hello", None, None, None, None)], now=0)
>>> sent.done
False
>>> for judged in reader.records():
...     writer.saw(judged)
>>> sent.done, sent.offset
(True, 0)
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgpack

from exclusivelog._core import Batch, Entry
from exclusivelog.cluster.frames import (
    MAX_BYTES,
    MAX_MESSAGES,
    Announce,
    Content,
    Frame,
    Grant,
    Holder,
    Join,
    Packed,
    Release,
    Terminate,
    encode,
)
from exclusivelog.cluster.ordered import OrderedLog, Record
from exclusivelog.cluster.refused import refusal
from exclusivelog.cluster.rule import Judged, State, Verdict, judge
from exclusivelog.errors import (
    DuplicateSequenceError,
    EngineClosedError,
    ExclusiveLogError,
    InvalidEpochError,
    ProducerBusyError,
    ProducerFencedError,
)
from exclusivelog.messages import Encoded
from exclusivelog.refusals import fenced, terminated

__all__ = [
    "CLOSED",
    "Heir",
    "Message",
    "Reader",
    "Status",
    "Ticket",
    "Writer",
    "draw_session",
    "messages",
]

Status = Literal["asking", "refused", "cancelled", "owner", "closing", "fenced", "closed"]

CLOSED = "closed"  # the reason of a release by the session itself
WINDOW = 64  # most unread frames of a writer
MESSAGE_OVERHEAD = 64  # bytes; an upper bound of what msgpack adds to one message
FRAME_OVERHEAD = 4096  # bytes; an upper bound of a frame without its messages
MOST_MESSAGE_BYTES = MAX_BYTES - FRAME_OVERHEAD


def draw_session(after: int) -> int:
    """A session id that no other writer draws; higher than `after` (`rule` says why)."""
    return after + 1 + secrets.randbelow(2**48)


# ---- reading -----------------------------------------------------------------------------


class Message(NamedTuple):
    """A message that counts, with its place in the log."""

    offset: int
    epoch: int
    session: int
    content: Content


def messages(judged: Judged) -> Iterator[Message]:
    """The messages of a record; none if it does not count or is no frame."""
    frame = judged.parsed
    if isinstance(frame, Frame) and judged.counts:
        for index, content in enumerate(frame.contents):
            yield Message(frame.first + index, frame.epoch, frame.session, content)


class Reader:
    """Follows a log from its first record, or from a saved state, and applies the rule.

    `check_first` is given the log's first record, unless this begins with a saved state."""

    def __init__(
        self,
        log: OrderedLog,
        state: State | None = None,
        check_first: Callable[[Record], None] | None = None,
    ) -> None:
        self.state = State() if state is None else state
        self._check_first = check_first
        self._tail = log.tail(self.state.position)

    def next(self, timeout: float | None = None) -> Judged | None:
        """The next record with its verdict; None if `timeout` seconds have passed without one."""
        record = self.receive(timeout)
        return None if record is None else self.fold(record)

    def receive(self, timeout: float | None = None) -> Record | None:
        """The next record, before `fold`: the caller waits for it without a lock."""
        return self._tail.next(timeout)

    def fold(self, record: Record) -> Judged:
        """Apply a record to the state; returns it with its verdict."""
        if self._check_first is not None and self.state.position is None:
            self._check_first(record)
        return self.state.fold(record)

    def records(self) -> Iterator[Judged]:
        """The available records with their verdicts, without waiting for more."""
        while (judged := self.next(0)) is not None:
            yield judged

    def messages(self) -> Iterator[Message]:
        """The available messages, without waiting for more."""
        for judged in self.records():
            yield from messages(judged)

    def close(self) -> None:
        """Stop reading; a `next` that waits in another thread ends with `EngineClosedError`."""
        self._tail.close()


# ---- writing -----------------------------------------------------------------------------


class Ticket:
    """One send. Its messages are in one frame, so that all or none are written (rule G3).

    `offset` is the first message's once the send is acknowledged. A ticket that is `done` has been
    acknowledged if `error` is None."""

    __slots__ = (
        "announces",
        "batch",
        "contents",
        "count",
        "done",
        "error",
        "offset",
        "on_done",
        "time",
        "weight",
    )

    def __init__(
        self,
        contents: Sequence[Content],
        weight: int,
        on_done: Callable[[Ticket], None] | None,
        batch: Batch | None = None,
        time: int = 0,
        announces: bool = False,
    ) -> None:
        self.contents = tuple(contents)
        self.batch, self.time = batch, time  # given instead of `contents`, and its publish time
        self.count = len(self.contents) if batch is None else batch.count
        self.weight = weight
        self.announces = announces  # by its last message
        self.on_done = on_done
        self.offset: int | None = None
        self.error: ExclusiveLogError | None = None
        self.done = False

    def settle(self, offset: int | None, error: ExclusiveLogError | None = None) -> None:
        """Set the outcome, an offset or an error. The first call counts."""
        self.offset, self.error, self.done = offset, error, True
        if self.on_done is not None:
            self.on_done(self)


class Sent(NamedTuple):
    """An unread frame: its bytes, and its tickets. `first` and `end` are offsets, or, for a shared
    session, which does not know offsets beforehand, numbers of frames."""

    first: int
    end: int
    data: bytes
    tickets: tuple[Ticket, ...]


Heir = tuple[int, Holder, dict[str, str] | None]


class Said(NamedTuple):
    """An unread announcement without a message: its number, its bytes, and its ticket."""

    number: int
    data: bytes
    ticket: Ticket


class Asker:
    """The base of `Writer`: asks for a topic, to own or share it, by `holder.access_mode`."""

    def __init__(
        self,
        state: State,
        append: Callable[[bytes], Any],
        holder: Holder,
        *,
        topic: str = "the topic",
        draw: Callable[[int], int] = draw_session,
        announce: dict[str, str] | None = None,
    ) -> None:
        self.state = state
        self._announce = announce
        self.topic = topic
        self.status: Status = "refused"
        self.epoch = self.session = 0
        self.is_shared = not holder.access_mode.is_exclusive
        self._append = append
        self.holder = holder
        self._draw = draw
        self._request: Grant | Join | None = None

    def ask(self, topic_epoch: int | None = None) -> None:
        """Ask for the topic on the basis of the records read so far.

        With `topic_epoch`, continue that epoch instead of the next one (rule B5). A shared session
        stays in the topic's epoch. After "refused", or "cancelled" with the same `topic_epoch`, the
        request is repeated. Raises `ProducerFencedError` if the topic's epoch is higher,
        `InvalidEpochError` if it is lower; `ProducerBusyError` with any other `status`, or if a
        shared session finds an owner or its producer name in use; `TopicTerminatedError`."""
        if self.status == "cancelled" and self._has_asked(topic_epoch):
            self.status = "asking"
            self.resend()
            return
        if self.status != "refused":
            raise ProducerBusyError(f"this writer has asked already, and is {self.status!r}")
        if self.state.terminated:
            raise terminated(self.topic, self.state.next)
        continued = topic_epoch is not None and self._check_epoch(topic_epoch)
        self._request = self._join() if self.is_shared else self._grant(continued)
        self.epoch, self.session = self._request.epoch, self._request.session
        self.status = "asking"
        self._append(encode(self._request))

    def _grant(self, continued: bool) -> Grant:
        state = self.state
        continues = state.session if continued else 0
        return Grant(
            state.epoch if continued else state.epoch + 1,
            state.next,
            self._draw(continues),
            self.holder,
            continues,
            state.joins,
            announce=self._announce,
        )

    def _join(self) -> Join:
        state = self.state
        request = Join(state.epoch, state.session, state.joins, self._draw(0), self.holder)
        if judge(state, request) is not Verdict.COUNTS:
            raise ProducerBusyError(
                f"the topic has an owner, or a shared producer named {self.holder.producer_name!r}"
            )
        return request

    def inherit(self, grant: Grant) -> None:
        """Expect this grant, by which an owner passes the topic on to this one's holder, as the
        next record."""
        self._request, self.epoch, self.session = grant, grant.epoch, grant.session
        self.status = "asking"

    def _has_asked(self, topic_epoch: int | None) -> bool:
        request = self._request
        assert request is not None
        claimed = isinstance(request, Grant) and request.continues
        return self.is_shared or topic_epoch == (request.epoch if claimed else None)

    def _check_epoch(self, topic_epoch: int) -> bool:
        """Does the session continue this epoch? False before the first grant."""
        state = self.state
        if topic_epoch > state.epoch:
            raise InvalidEpochError(
                f"topic_epoch={topic_epoch} is ahead of the topic's epoch, {state.epoch}"
            )
        if topic_epoch < state.epoch:
            raise _fenced_by(state.grant, f"topic_epoch={topic_epoch} is stale")
        return state.grant is not None

    def cancel(self) -> None:
        """Withdraw the request. If it counts nevertheless, it is released at once (rule D5)."""
        if self.status == "asking":
            self.status = "cancelled"
        elif self.status == "refused":
            self.status = "closed"

    def resend(self) -> None:
        """Append the request again, if it has not been read back."""
        if self.status == "asking" and self._request is not None:
            self._append(encode(self._request))


class Writer(Asker):
    """Asks for a topic, owns or shares it (by `holder.access_mode`), and sends to it. For one
    thread at a time.

    - `state` is that of the reader whose records are passed to `saw`.
    - `append` passes bytes to the log, which may append them never, once or repeatedly.
    - `topic`: its name in errors.
    - `draw` returns an unused session id above the one given.

    `status` goes from "asking" to "owner", "refused" (ask again, or give up) or "cancelled"; from
    "owner" to "closing" and "closed", or to "fenced" for good (rule B4).

    `heir` returns the waiter to which an owner that closes passes the topic on (rule C1): its
    number, and what it announces with its grant; None: to none.
    """

    def __init__(
        self,
        state: State,
        append: Callable[[bytes], Any],
        holder: Holder,
        *,
        topic: str = "the topic",
        window: int = WINDOW,
        draw: Callable[[int], int] = draw_session,
        announce: dict[str, str] | None = None,
    ) -> None:
        super().__init__(state, append, holder, topic=topic, draw=draw, announce=announce)
        self.error: ExclusiveLogError | None = None
        self.held = False  # it appends no new frames meanwhile
        self._window = window
        self._unsent: deque[Ticket] = deque()
        self._sent: deque[Sent] = deque()
        self._said: deque[Said] = deque()
        self._numbered = 0  # announcements without a message
        self._first = 0  # the offset, or the number, of the next frame
        self._sequence = -1
        self._published = 0
        self._reason = CLOSED  # of its release
        self.has_passed_on = False
        self.heir: Callable[[], Heir | None] = lambda: None

    @property
    def last_sequence(self) -> int:
        """The last sequence id of its producer name, including unread sends; -1: none."""
        return self._sequence

    @property
    def next_offset(self) -> int:
        """The offset of the next message, if this is the owner and the message gets into the
        log."""
        return self._first + sum(ticket.count for ticket in self._unsent)

    # ---- sending -------------------------------------------------------------------------

    def send(
        self, batch: Sequence[Encoded], now: int, on_done: Callable[[Ticket], None] | None = None
    ) -> Ticket:
        """Send messages, all of them or none, at this time (ms since 1970).

        `on_done` is called when the outcome is known; it must not call this writer. Raises
        `DuplicateSequenceError` if a sequence id is not above the last one, `UnsupportedError` if
        the messages do not fit into one frame, ValueError for none at all, and the error of
        `status` if this is not the owner."""
        self._check_owner()
        weight = sum(map(_weigh, batch))
        _check_fits(len(batch), weight)
        return self._queue(Ticket(self._stamp(batch, now), weight, on_done))

    def send_packed(
        self,
        batch: Batch,
        now: int,
        on_done: Callable[[Ticket], None] | None = None,
        announces: bool = False,
    ) -> Ticket:
        """The same for messages that are encoded already, and have sequence ids. `announces`: the
        properties of the last one are an announcement, too."""
        self._check_owner()
        weight = batch.nbytes + batch.count * MESSAGE_OVERHEAD
        _check_fits(batch.count, weight)
        self._check_sequence(batch.base_sequence)
        self._published, self._sequence = max(now, self._published), batch.last_sequence
        return self._queue(Ticket((), weight, on_done, batch, self._published, announces))

    def announce(self, info: dict[str, str], now: int) -> Ticket:
        """Announce this at this time (ms since 1970), without a message. Raises the error of
        `status` if this is not the owner."""
        self._check_owner()
        self._numbered += 1
        data = encode(Announce(self.epoch, self.session, self._numbered, now, info))
        said = Said(self._numbered, data, Ticket((), len(data), None))
        self._said.append(said)
        self._append(data)
        return said.ticket

    def _queue(self, ticket: Ticket) -> Ticket:
        self._unsent.append(ticket)
        self.pump()
        return ticket

    def _check_owner(self) -> None:
        if self.status == "fenced" and self.error is not None:
            raise self.error
        if self.status in ("closing", "closed", "cancelled"):
            raise EngineClosedError("this writer is closed; open a new one")
        if self.status != "owner":
            raise ProducerBusyError("the topic was not granted to this writer; ask, and wait")

    def _stamp(self, batch: Sequence[Encoded], now: int) -> list[Content]:
        """Add publish times and sequence ids to messages."""
        published, sequence = max(now, self._published), self._sequence
        contents = []
        for value, key, packed, event_time, wanted in batch:
            if wanted is not None:
                self._check_sequence(wanted, sequence)
            sequence = sequence + 1 if wanted is None else wanted
            properties = {} if packed is None else msgpack.unpackb(packed)
            contents.append(
                Content(
                    value,
                    key,
                    properties,
                    event_time,
                    published,
                    self.holder.producer_name,
                    sequence,
                )
            )
        self._published, self._sequence = published, sequence
        return contents

    def _check_sequence(self, wanted: int, last: int | None = None) -> None:
        last = self._sequence if last is None else last
        if wanted <= last:
            raise DuplicateSequenceError(
                f"sequence_id={wanted} is not above the last one of "
                f"{self.holder.producer_name!r}, {last}",
                sequence_id=wanted,
                last_sequence_id=last,
            )

    def pump(self) -> None:
        """Append waiting sends while the window has room, and the release once all is settled."""
        while self._unsent and len(self._sent) < self._window and not self.held:
            self._send_frame(self._take())
        if self.status == "closing" and not (self._unsent or self._sent or self._said):
            self._append(self._last_record())

    def _last_record(self) -> bytes:
        """The record that ends the session. Each attempt may name another heir: the first record
        that counts decides."""
        passes = self._reason == CLOSED and not self.is_shared
        heir = self.heir() if passes else None
        if heir is not None:
            with contextlib.suppress(ValueError):  # another program has written that it waits
                return encode(self._pass_to(*heir))
        return encode(Release(self.epoch, self.session, self._reason))

    def _pass_to(self, number: int, holder: Holder, announce: dict[str, str] | None) -> Grant:
        state = self.state
        return Grant(
            state.epoch + 1,
            state.next,
            self._draw(0),
            holder,
            joins=state.joins,
            by=self.session,
            waiter=number,
            announce=announce,
        )

    def _take(self) -> tuple[Ticket, ...]:
        """The tickets of the next frame."""
        taken = [self._unsent.popleft()]
        weight, count, packed = taken[0].weight, taken[0].count, taken[0].batch is not None
        while self._unsent and packed == (self._unsent[0].batch is not None):
            if taken[-1].announces:
                break
            weight += self._unsent[0].weight
            count += self._unsent[0].count
            if weight > MOST_MESSAGE_BYTES or count > MAX_MESSAGES:
                break
            taken.append(self._unsent.popleft())
        return tuple(taken)

    def _send_frame(self, tickets: tuple[Ticket, ...]) -> None:
        frame = self._frame(tickets)
        end = self._first + 1 if self.is_shared else frame.end
        sent = Sent(self._first, end, encode(frame), tickets)
        self._first = end
        self._sent.append(sent)
        self._append(sent.data)

    def _frame(self, tickets: tuple[Ticket, ...]) -> Frame:
        if self.is_shared:
            contents = tuple(
                [each for ticket in tickets for each in _decoded(ticket, self.epoch, self.session)]
            )
            return Frame(self.epoch, self.session, 0, contents, number=self._first)
        if tickets[0].batch is None:
            contents = tuple([content for ticket in tickets for content in ticket.contents])
            return Frame(self.epoch, self.session, self._first, contents)
        entries: list[bytes] = []
        first = self._first
        for ticket in tickets:
            assert ticket.batch is not None
            stamped = ticket.batch.stamp(0, first, self.epoch, self.session, ticket.time)
            entries += [data for _, data in stamped]
            first += ticket.count
        announces = tickets[-1].announces
        return Packed(self.epoch, self.session, self._first, entries, announces)

    @property
    def has_said(self) -> bool:
        """Was an announcement without a message not read back yet?"""
        return bool(self._said)

    @property
    def unsettled(self) -> bool:
        """Was a request, send or release not read back yet?"""
        return bool(self._sent or self._said) or self.status in ("asking", "closing")

    def resend(self) -> None:
        """Append again what has not been read back: after a failure, an unknown answer, or some
        time without an answer. A duplicate does not count."""
        super().resend()
        for sent in () if self.held else self._sent:
            self._append(sent.data)
        for said in self._said:
            self._append(said.data)
        self.pump()

    def hold(self, held: bool) -> None:
        """Append no frames until this is called once more, with False: a request that fences comes
        first then."""
        self.held = held
        self.pump()

    # ---- reading back --------------------------------------------------------------------

    def saw(self, judged: Judged) -> None:
        """Process the next record, after `state` was folded over it."""
        if self.status in ("asking", "cancelled"):
            self._saw_while_asking(judged)
        elif self.status in ("owner", "closing") and judged.counts:
            self._saw_as_owner(judged)

    def _saw_while_asking(self, judged: Judged) -> None:
        request = self._request
        assert request is not None
        if judged.counts and judged.parsed == request:
            self._begin(request)
        elif judge(self.state, request) is not Verdict.COUNTS:
            # Epochs and offsets only rise, so that the request can never count.
            self.status = "refused" if self.status == "asking" else "closed"

    def _begin(self, request: Grant | Join) -> None:
        """Become the owner, or a shared session, because the request counts."""
        self._first = request.first if isinstance(request, Grant) else 1
        self._sequence = self.state.sequences.get(self.holder.producer_name, -1)
        self._published = self.state.published
        self.status = "owner" if self.status == "asking" else "closing"
        self.pump()

    def _saw_as_owner(self, judged: Judged) -> None:
        parsed = judged.parsed
        if isinstance(parsed, Grant) and parsed.by == self.session and self.status == "closing":
            self.status, self.has_passed_on = "closed", True
        elif isinstance(parsed, Grant):
            holder = self.holder
            self._fence(
                fenced(self.topic, holder.producer_name, self.epoch, parsed.owner(), parsed.epoch)
            )
        elif isinstance(parsed, Terminate):
            self._fence(terminated(self.topic, self.state.next))
        elif parsed is None or parsed.session != self.session:
            return  # a frame of another shared session
        elif isinstance(parsed, Frame):
            if self.is_shared:
                self._acknowledge(parsed.number + 1, parsed.first)
            else:
                self._acknowledge(parsed.end)
            self.pump()
        elif isinstance(parsed, Announce):
            while self._said and self._said[0].number <= parsed.number:
                self._said.popleft().ticket.settle(self.state.next)
            self.pump()
        elif self.status == "closing" and not (self._unsent or self._sent):
            self.status = "closed"
        else:
            self._fence(_fenced_by(None, f"session {self.session} lost the topic"))

    def _acknowledge(self, end: int, placed: int | None = None) -> None:
        """Acknowledge all sends before this offset; of a shared session, its frame before this
        number, at the offset `placed`."""
        while self._sent and self._sent[0].end <= end:
            offset = self._sent[0].first if placed is None else placed
            for ticket in self._sent.popleft().tickets:
                ticket.settle(offset)
                offset += ticket.count

    def _fence(self, error: ExclusiveLogError) -> None:
        """End the session, because another owner's grant, a release by another process, or a
        termination counts. Sends that were not acknowledged before can never count."""
        self.status = "fenced"
        self.error = error
        self._fail(error, error)

    # ---- ending --------------------------------------------------------------------------

    def release(self, reason: str = CLOSED) -> None:
        """Accept no more sends, and release the topic when all sends are settled, or pass it on.
        `reason`: for the topic's history; a topic that is released for another one than `CLOSED` is
        not passed on."""
        if self.status == "owner":
            self.status, self._reason = "closing", reason
            self.pump()
        else:
            self.cancel()

    def give_up(self, in_doubt: ExclusiveLogError, unsent: ExclusiveLogError) -> None:
        """End all sends, because the log is not followed any more: appended ones with `in_doubt`,
        which should have `maybe_written`, the others with `unsent`."""
        if self.status != "fenced":
            self.status = "closed"
        self._fail(in_doubt, unsent)

    def _fail(self, in_doubt: ExclusiveLogError, unsent: ExclusiveLogError) -> None:
        sent, waiting = list(self._sent), list(self._unsent)
        said = list(self._said)
        self._said.clear()
        self._sent.clear()
        self._unsent.clear()
        for each in sent:
            for ticket in each.tickets:
                ticket.settle(None, in_doubt)
        for one in said:
            one.ticket.settle(None, in_doubt)
        for ticket in waiting:
            ticket.settle(None, unsent)


def _check_fits(count: int, weight: int) -> None:
    if not count:
        raise ValueError("batch is empty; a send has at least one message")
    if weight > MOST_MESSAGE_BYTES or count > MAX_MESSAGES:
        raise refusal(
            "large_messages",
            f"{count:,} message(s) of {weight:,} bytes were to be sent as one; a record takes "
            f"{MAX_MESSAGES:,}, and {MOST_MESSAGE_BYTES:,} bytes",
        )


def _decoded(ticket: Ticket, epoch: int, session: int) -> Iterator[Content]:
    """The decoded messages of a shared producer's ticket: it cannot use entries, as it does not
    know its offsets."""
    yield from ticket.contents
    if ticket.batch is not None:
        for _, data in ticket.batch.stamp(0, 0, epoch, session, ticket.time):
            entry = Entry(data)
            yield from (Content.of(entry.message(index)) for index in range(entry.count))


def _fenced_by(grant: Grant | None, what: str) -> ProducerFencedError:
    if grant is None:
        return ProducerFencedError(f"{what}: the session was released by another process")
    owner = grant.owner()
    return ProducerFencedError(
        f"{what}: epoch {owner.epoch} was granted to {owner.producer_name!r} of engine "
        f"{owner.engine_name!r} (id {owner.engine_id}, pid {owner.pid})",
        holder=owner,
    )


def _weigh(message: Encoded) -> int:
    """An upper bound of one message's bytes in a frame."""
    value, key, properties, _, _ = message
    return (
        sum(len(part) for part in (value, key, properties) if part is not None) + MESSAGE_OVERHEAD
    )
