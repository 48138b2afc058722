"""Which records of an ordered log count, and what a log amounts to (rule J1).

`proof.cluster_model` tries the rule in every interleaving of small worlds. Here are the cases that
those worlds do not have: copies, foreign records, saved states of any log.
"""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exclusivelog import _core
from exclusivelog.cluster.frames import (
    Announce,
    Content,
    Frame,
    Grant,
    Holder,
    Join,
    Packed,
    Parsed,
    Release,
    Terminate,
    encode,
)
from exclusivelog.cluster.ordered import Position, Record
from exclusivelog.cluster.rule import State, Verdict, is_written
from exclusivelog.errors import LedgerCorruptedError, LedgerVersionError
from exclusivelog.types import AccessMode

pytestmark = [pytest.mark.once, pytest.mark.rule("J1")]

HOLDER = Holder("e1", "host", 12, "p", AccessMode.EXCLUSIVE, properties={"a": "b"})


def grant(epoch: int, first: int, session: int, continues: int = 0, joins: int = 0) -> Grant:
    return Grant(epoch, first, session, HOLDER, continues, joins)


def passed(epoch: int, first: int, session: int, by: int) -> Grant:
    waiter = Holder("e2", "host", 13, "w", AccessMode.WAIT_FOR_EXCLUSIVE)
    return Grant(epoch, first, session, waiter, by=by, waiter=5)


def announce(epoch: int, session: int, number: int, **info: str) -> Announce:
    return Announce(epoch, session, number, 1000 + number, info)


def join(session: int, joins: int = 0, *, epoch: int = 0, granted: int = 0, name: str = "") -> Join:
    holder = Holder("e1", "host", 12, name or f"p{session}", AccessMode.SHARED)
    return Join(epoch, granted, joins, session, holder)


def shared(session: int, number: int, epoch: int = 0, time: int = 100) -> Frame:
    content = Content(b"x", None, {}, None, time, f"p{session}", number - 1)
    return Frame(epoch, session, 0, (content,), number=number)


def frame(epoch: int, session: int, first: int, count: int = 1) -> Frame:
    contents = [
        Content(b"%d" % n, None, {}, None, 100 + n, "p", n) for n in range(first, first + count)
    ]
    return Frame(epoch, session, first, tuple(contents))


def packed(epoch: int, session: int, first: int, announces: bool) -> Packed:
    """One message, whose properties are an announcement."""
    appender = _core.Appender(b"p", -1, 1, 1 << 20)
    appender.add(b"x", None, msgpack.packb({"a": "b"}), None, first)
    [batch] = appender.take()
    [(_, entry)] = batch.stamp(0, first, epoch, session, 100)
    return Packed(epoch, session, first, [entry], announces)


def copied(epoch: int, first: int, gap: int = 0, source: str = "here") -> Frame:
    return Frame(epoch, 0, first, frame(0, 0, first).contents, gap, source)


def position(number: int) -> Position:
    return Position(number.to_bytes(4, "big"))


class Log:
    """Folds one record after the other."""

    def __init__(self, state: State | None = None) -> None:
        self.state = State() if state is None else state
        self.number = 0

    def fold(self, record: Parsed | bytes) -> str:
        self.number += 1
        data = record if isinstance(record, bytes) else encode(record)
        return self.state.fold(Record(position(self.number), data)).verdict.name

    def said(self) -> tuple[int, int, dict[str, str]]:
        """(epoch, time, info) of the last announcement."""
        found = self.state.announced
        assert found is not None
        return found.grant.epoch, found.time, found.info

    def folds(self, *records: Parsed | bytes) -> list[str]:
        return [self.fold(record) for record in records]

    def expect(self, *pairs: tuple[Parsed | bytes, str]) -> None:
        """Fold each record, with the verdict beside it."""
        verdicts = [verdict for _, verdict in pairs]
        assert self.folds(*(record for record, _ in pairs)) == verdicts


# ---- owners ------------------------------------------------------------------------------


@pytest.mark.rule("B2", "B3")
def test_only_the_owner_announces_and_in_order() -> None:
    log = Log()
    log.expect(
        (announce(1, 7, 1, a="early"), "EPOCH"),
        (replace(grant(1, 0, 7), announce={"a": "0"}), "COUNTS"),
        (announce(1, 7, 2, a="2"), "AHEAD"),
        (announce(1, 7, 1, a="1"), "COUNTS"),
        (announce(1, 7, 2, a="2"), "COUNTS"),
        (announce(1, 7, 1, a="1"), "BEHIND"),
        (announce(1, 8, 3, a="3"), "SESSION"),
    )
    assert log.said() == (1, 1002, {"a": "2"})
    log.expect((packed(1, 7, 0, announces=True), "COUNTS"))
    assert log.said() == (1, 100, {"a": "b"})
    log.expect((grant(2, 1, 8), "COUNTS"), (announce(1, 7, 3, a="late"), "EPOCH"))
    assert log.said() == (1, 100, {"a": "b"}), "the second owner has announced nothing"
    log.expect((announce(2, 8, 1, b="1"), "COUNTS"), (Release(2, 8, ""), "COUNTS"))
    log.expect((announce(2, 8, 2, b="2"), "ENDED"))
    assert log.said() == (2, 1001, {"b": "1"})
    assert State.restore(log.state.save()) == log.state


@pytest.mark.rule("B7", "C1")
def test_only_the_owner_passes_the_topic_on() -> None:
    Log().expect(
        (passed(1, 0, 7, by=6), "SESSION"),
        (grant(1, 0, 7), "COUNTS"),
        (passed(2, 0, 8, by=6), "SESSION"),
        (passed(3, 0, 8, by=7), "EPOCH"),
        (frame(1, 7, 0), "COUNTS"),
        (passed(2, 0, 8, by=7), "BEHIND"),
        (passed(2, 1, 8, by=7), "COUNTS"),
        (passed(2, 1, 9, by=7), "EPOCH"),
        (passed(3, 1, 9, by=7), "SESSION"),
        (frame(1, 7, 1), "EPOCH"),
        (frame(2, 8, 1), "COUNTS"),
        (Release(2, 8, "evicted"), "COUNTS"),
        (passed(3, 2, 9, by=8), "ENDED"),
        (grant(3, 2, 9), "COUNTS"),
    )


@pytest.mark.rule("B1", "B10")
def test_a_grant_is_conditional_on_what_its_holder_has_seen() -> None:
    log = Log()
    found = log.folds(grant(2, 0, 5), grant(1, 1, 5), grant(1, 0, 5), grant(1, 0, 6))
    assert found == ["EPOCH", "AHEAD", "COUNTS", "EPOCH"]
    found = log.folds(frame(1, 5, 0, count=3), grant(2, 0, 7), grant(2, 3, 8), frame(1, 5, 3))
    assert found == ["COUNTS", "BEHIND", "COUNTS", "EPOCH"]
    assert (log.state.epoch, log.state.session, log.state.next) == (2, 8, 3)


@pytest.mark.rule("B8")
def test_a_frame_counts_once_and_in_its_place() -> None:
    log = Log()
    assert log.folds(
        frame(1, 5, 0),
        grant(1, 0, 5),
        frame(1, 5, 1),
        frame(1, 5, 0, 2),
        frame(1, 5, 0, 2),
        frame(1, 5, 1),
        frame(1, 6, 2),
        frame(1, 5, 2),
    ) == ["EPOCH", "COUNTS", "AHEAD", "COUNTS", "BEHIND", "BEHIND", "SESSION", "COUNTS"]


@pytest.mark.rule("B5", "B10")
def test_a_session_goes_on_under_the_same_epoch() -> None:
    """Once: a second one that names the same session has lost."""
    log = Log()
    log.folds(grant(1, 0, 5), frame(1, 5, 0))
    log.expect(
        (grant(1, 1, 4, continues=5), "SESSION"),
        (grant(1, 1, 9, continues=4), "SESSION"),
        (grant(2, 1, 9, continues=5), "EPOCH"),
        (grant(1, 0, 9, continues=5), "BEHIND"),
        (grant(1, 1, 9, continues=5), "COUNTS"),
        (grant(1, 1, 10, continues=5), "SESSION"),
        (grant(1, 1, 9, continues=5), "SESSION"),
        (frame(1, 5, 1), "SESSION"),
        (frame(1, 9, 1), "COUNTS"),
    )
    assert log.state.epoch == 1


@pytest.mark.rule("B7")
def test_a_release_ends_the_session_that_it_names() -> None:
    log = Log()
    log.folds(grant(1, 0, 5), grant(2, 0, 6))
    assert log.folds(Release(1, 5), Release(2, 5), frame(2, 6, 0)) == ["EPOCH", "SESSION", "COUNTS"]
    assert log.folds(Release(2, 6), frame(2, 6, 1), Release(2, 6)) == ["COUNTS", "ENDED", "ENDED"]
    assert not log.state.owned
    assert log.fold(grant(2, 1, 7, continues=6)) == "COUNTS"


@pytest.mark.rule("J2")
def test_the_next_grant_settles_what_is_in_doubt() -> None:
    log = Log()
    log.folds(grant(1, 0, 5), frame(1, 5, 0, count=2))
    settling = grant(2, 2, 6)
    assert log.folds(settling, frame(1, 5, 2)) == ["COUNTS", "EPOCH"]
    assert [is_written(offset, settling) for offset in range(4)] == [True, True, False, False]


# ---- shared producers --------------------------------------------------------------------


@pytest.mark.rule("A1", "A6", "B10")
def test_shared_sessions_write_side_by_side_until_a_grant_that_has_seen_them() -> None:
    log = Log()
    log.expect(
        (join(5), "COUNTS"),
        (join(6), "UNSEEN"),
        (join(6, 1), "COUNTS"),
        (join(5, 2), "SESSION"),
        (join(7, 2, name="p5"), "NAMED"),
        (shared(5, 1), "COUNTS"),
        (shared(6, 2), "AHEAD"),
        (shared(6, 1), "COUNTS"),
        (shared(5, 1), "BEHIND"),
        (shared(5, 2), "COUNTS"),
        (shared(7, 1), "SESSION"),
    )
    assert (log.state.next, log.state.epoch, log.state.owned) == (3, 0, False)
    found = log.folds(grant(1, 3, 8), grant(1, 3, 8, joins=1), grant(1, 3, 8, joins=2))
    assert found == ["UNSEEN", "UNSEEN", "COUNTS"]
    found = log.folds(shared(6, 2), shared(6, 2, epoch=1), join(9, 2), frame(1, 8, 3))
    assert found == ["EPOCH", "SESSION", "EPOCH", "COUNTS"]
    assert log.folds(join(9, 2, epoch=1, granted=8), Release(1, 8)) == ["OWNED", "COUNTS"]
    assert log.folds(join(9, 2, epoch=1), join(9, 2, epoch=1, granted=8)) == ["UNSEEN", "COUNTS"]


@pytest.mark.rule("B7")
def test_a_join_that_comes_again_after_its_release_admits_no_session() -> None:
    log = Log()
    late = join(6, 1)
    found = log.folds(join(5), late, Release(0, 6), late, Release(0, 6), shared(6, 1))
    assert found == ["COUNTS", "COUNTS", "COUNTS", "UNSEEN", "SESSION", "SESSION"]
    assert list(log.state.shared) == [5]


@pytest.mark.rule("G4")
def test_a_shared_frame_is_given_its_offset_and_no_time_before_the_last_one() -> None:
    log = Log()
    log.folds(join(5), join(6, 1), shared(5, 1, time=900))
    judged = log.state.fold(Record(position(9), encode(shared(6, 1, time=300))))
    assert isinstance(judged.parsed, Frame)
    assert (judged.parsed.first, judged.parsed.contents[0].publish_time) == (1, 900)


# ---- what does not count -----------------------------------------------------------------


def test_records_of_other_programs_change_nothing() -> None:
    log = Log()
    found = log.folds(b"", b"hello", grant(1, 0, 5), b"{}", frame(1, 5, 0))
    assert found == ["FOREIGN", "FOREIGN", "COUNTS", "FOREIGN", "COUNTS"]


@pytest.mark.rule("G9")
def test_a_reader_stops_at_a_damaged_record_and_stays_there() -> None:
    log = Log()
    log.fold(grant(1, 0, 5))
    damaged = bytearray(encode(frame(1, 5, 0)))
    damaged[-1] ^= 1
    before = log.state.save()
    for _ in range(2):
        with pytest.raises(LedgerCorruptedError):
            log.fold(bytes(damaged))
        assert log.state.save() == before


def test_a_tail_may_repeat_itself() -> None:
    """A backend that connects anew may yield records again; each is folded once."""
    log = Log()
    log.folds(grant(1, 0, 5), frame(1, 5, 0), grant(2, 1, 6))
    log.number = 0
    found = log.folds(grant(1, 0, 5), frame(1, 5, 0), grant(2, 1, 6), frame(2, 6, 1))
    assert found == ["REPEATED", "REPEATED", "REPEATED", "COUNTS"]


# ---- copies ------------------------------------------------------------------------------


def test_copies_count_once_and_in_order_whatever_is_sent_twice() -> None:
    log = Log()
    assert log.folds(
        copied(4, 7),
        copied(4, 7, gap=7),
        copied(4, 9),
        copied(4, 8),
        copied(4, 8),
        copied(6, 9),
        copied(5, 10),
        copied(6, 12, gap=2),
    ) == ["AHEAD", "COUNTS", "AHEAD", "COUNTS", "BEHIND", "COUNTS", "EPOCH", "COUNTS"]
    assert (log.state.epoch, log.state.next, log.state.source) == (6, 13, "here")


def test_copies_of_two_logs_are_not_mixed() -> None:
    log = Log()
    found = log.folds(copied(1, 0), copied(1, 1, source="there"), copied(1, 1))
    assert found == ["COUNTS", "SOURCE", "COUNTS"]


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_copies_of_rival_mirrors_are_one_copy_however_they_come_in(data: st.DataObject) -> None:
    """Mirrors cut one source into different frames; the log doubles, loses and reorders them."""
    offsets = [0, 1, 2, 5, 6, 7]  # the source has lost two
    pool = [
        Frame(1, 0, run[0], tuple([frame(0, 0, n).contents[0] for n in run]), gap(run), "here")
        for first in range(len(offsets))
        for last in range(first + 1, len(offsets) + 1)
        if len(run := offsets[first:last]) == run[-1] - run[0] + 1
    ]
    log, copied_offsets = Log(), []
    for each in data.draw(st.lists(st.sampled_from(pool), max_size=40)):
        if log.fold(each) == "COUNTS":
            copied_offsets += [content.sequence_id for content in each.contents]
    assert copied_offsets == offsets[: len(copied_offsets)]


def gap(run: list[int]) -> int:
    return 2 if run[0] == 5 else 0


def test_an_owner_ends_the_mirroring() -> None:
    """Who moves to the cluster fences the mirror: what it still copies does not count."""
    log = Log()
    log.fold(copied(7, 0))
    found = log.folds(frame(7, 0, 1), grant(1, 1, 5), grant(8, 0, 5), grant(8, 1, 5))
    assert found == ["ENDED", "EPOCH", "BEHIND", "COUNTS"]
    found = log.folds(copied(7, 1), copied(8, 1), frame(8, 5, 1), copied(9, 2))
    assert found == ["OWNED", "OWNED", "COUNTS", "OWNED"]
    assert log.state.source is None


# ---- saved states ------------------------------------------------------------------------

small = st.integers(0, 3)
sessions = st.integers(1, 4)
records = (
    st.builds(grant, st.integers(1, 3), small, sessions, st.integers(0, 3))
    | st.builds(frame, st.integers(1, 3), sessions, small, st.integers(1, 2))
    | st.builds(Release, st.integers(0, 3), sessions)
    | st.builds(join, sessions, small, epoch=st.integers(0, 2), granted=st.integers(0, 2))
    | st.builds(shared, sessions, st.integers(1, 2), st.integers(0, 2))
    | st.builds(copied, small, small, st.just(0), st.sampled_from(["here", "there"]))
    | st.just(b"foreign")
)


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(st.lists(records, max_size=25), st.data())
def test_a_saved_state_is_as_good_as_all_records_before(
    log: list[Parsed | bytes], data: st.DataObject
) -> None:
    whole, first = Log(), Log()
    cut = data.draw(st.integers(0, len(log)))
    verdicts = whole.folds(*log)
    first.folds(*log[:cut])
    rest = Log(State.restore(first.state.save()))
    rest.number = cut
    assert rest.folds(*log[cut:]) == verdicts[cut:]
    assert rest.state == whole.state
    assert State.restore(whole.state.save()) == whole.state


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(st.lists(records, max_size=25))
def test_what_does_not_count_can_be_left_out(log: list[Parsed | bytes]) -> None:
    whole, short = Log(), Log()
    counting = [record for record in log if whole.fold(record) == Verdict.COUNTS.name]
    assert short.folds(*counting) == ["COUNTS"] * len(counting)
    short.state.position = whole.state.position
    assert short.state == whole.state


def test_a_saved_state_keeps_sequence_ids_and_times() -> None:
    log = Log()
    log.folds(grant(1, 0, 5), frame(1, 5, 0, count=3), copied(1, 0))
    state = State.restore(log.state.save())
    assert (state.sequences, state.published) == ({"p": 2}, 102)
    assert state.grant == grant(1, 0, 5)
    assert state.grant.owner().engine_id == "e1"


@pytest.mark.rule("G9")
def test_a_damaged_saved_state_is_refused() -> None:
    log = Log()
    log.folds(grant(1, 0, 5), frame(1, 5, 0))
    sound = log.state.save()
    for at in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises((LedgerCorruptedError, LedgerVersionError)):
            State.restore(bytes(damaged))
    with pytest.raises(LedgerCorruptedError):
        State.restore(sound[:5])


# ---- the end -----------------------------------------------------------------------------


@pytest.mark.rule("G8")
def test_nothing_counts_behind_a_termination() -> None:
    log = Log()
    assert log.folds(grant(1, 0, 5), frame(1, 5, 0)) == ["COUNTS"] * 2
    assert log.folds(Terminate(0, 0), Terminate(1, 4)) == ["EPOCH", "UNSEEN"]
    assert log.folds(Terminate(1, 5)) == ["COUNTS"]
    late = frame(1, 5, 1), grant(2, 1, 6), join(7, 0, epoch=1, granted=5), Release(1, 5)
    assert log.folds(*late, Terminate(1, 5)) == ["TERMINATED"] * 5
    assert (log.state.terminated, log.state.owner, log.state.next) == (True, None, 1)
