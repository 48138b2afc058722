"""A reader group's position is a note in the journal until a checkpoint (rules K2, F6): it is
committed by one append, seen by all at once, and never overtaken by an older one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.ownership.claims import LocalGroupCursor
from exclusivelog.local.storage import checkpointer, ledger
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.tables import AppliedJournal
from testing.journals import checkpoint, flip, frames, no_checkpoints, small_journal
from testing.kills import strays
from testing.processes import State, Worker, until, values, within
from testing.stops import stopped

pytestmark = pytest.mark.rule("K2")


@pytest.fixture
def topic(engine: xl.Engine, topic: xl.Topic) -> Iterator[xl.Topic]:
    """A topic with ten messages; no checkpoint is made but by `checkpoint`."""
    with topic.producer() as producer:  # a dropped one is released later, in a transaction
        producer.send_many([b"%d" % number for number in range(10)])
    with no_checkpoints(engine):
        yield topic


def read_and_commit(reader: xl.Reader, count: int = 1) -> None:
    """Read so many messages, and commit the position."""
    for _ in range(count):
        reader.read_next(0)
    reader.commit()


def position(topic: xl.Topic, group: str = "g") -> int | None:
    """The group's position, as everybody is told it."""
    return next((g.position for g in topic.engine.groups() if g.group == group), None)


def position_there(state: State) -> int | None:
    assert state.topic is not None
    return position(state.topic)


# ---- one append --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["alone", "in a transaction"])
def test_a_commit_makes_no_transaction_of_the_tables(engine, topic, monkeypatch, how) -> None:
    reader = topic.reader(group="g")
    read_and_commit(reader)
    begun, transaction_of = [], Ledger._transaction
    monkeypatch.setattr(
        Ledger, "_transaction", lambda *a, **k: begun.append(k) or transaction_of(*a, **k)
    )
    before = engine.ledger.journal.tail
    reader.read_next(0)
    if how == "alone":
        reader.commit()
    else:
        with engine.transaction() as txn:
            txn.commit_cursor(reader)
    assert begun == []
    assert len(frames(engine, before)) == 1
    assert position(topic) == 2


def test_a_commit_waits_for_no_process_that_is_stopped_with_the_writer_lock(topic, worker) -> None:
    reader, process = topic.reader(group="g"), worker()
    with stopped(process, "in_a_commit"):
        within(lambda: read_and_commit(reader))
        assert position(topic) == 1
    process.answer()


# ---- seen by all -------------------------------------------------------------------------


def test_all_see_it_before_and_behind_the_checkpoint(engine, topic, worker) -> None:
    other = worker()
    reader = topic.reader(group="g")
    read_and_commit(reader, 4)
    for _ in range(2):
        assert position(topic) == 4
        assert other.call(position_there) == 4
        assert topic.reader(group="g").position == 4
        checkpoint(engine)
    assert engine.verify().ok


def test_a_copy_has_it(engine, topic, tmp_path) -> None:
    """What a crash leaves, a backup, and what a read-only engine sees of it."""
    reader = topic.reader(group="g")  # kept: nothing writes while the files are copied
    read_and_commit(reader, 4)
    copy = shutil.copytree(engine.path, tmp_path / "copy")
    with xl.open(copy, readonly=True) as reading:
        assert position(reading.topic("orders")) == 4
    engine.backup(tmp_path / "backup")
    for where in (copy, tmp_path / "backup"):
        with xl.open(where) as opened:
            assert opened.topic("orders").reader(group="g").position == 4


def commit_for_ever(state: State) -> None:
    """Commit positions, each with its number in another topic, until the process is killed."""
    assert state.topic is not None
    out = state.engine.topic("out").producer("exclusive_with_fencing")
    with state.topic.reader(group="g") as reader:
        while True:
            with state.engine.transaction() as txn:
                reader.seek(reader.position % 10)
                reader.read_next(0)
                out.send(b"%d" % reader.position, transaction=txn)
                txn.commit_cursor(reader)


@pytest.mark.rule("F6")
@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_killed_process_leaves_position_and_messages_together(
    engine, topic, worker: Callable[..., Worker], durability
) -> None:
    process = worker(durability=durability)
    process.start(commit_for_ever)
    until(lambda: len(values(engine.topic("out"))) > 20)
    process.kill()
    reader = topic.reader(group="g")  # all that it left is flushed
    assert b"%d" % reader.position == values(engine.topic("out"))[-1]


# ---- never overtaken by an older one -------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["noted", "packed"])
def test_a_deleted_group_stays_deleted(engine, topic, packed) -> None:
    """What it commits when it has begun again counts, before and behind the checkpoint."""
    with topic.reader(group="g") as reader, topic.reader(group="other") as other:
        read_and_commit(other, 2)
        read_and_commit(reader, 5)
    if packed:
        checkpoint(engine)
    assert engine.delete_group("g") == 1
    assert position(topic) is None
    with topic.reader(group="g") as reader:
        assert reader.position == 0
        for number in (1, 2):
            read_and_commit(reader)
            assert position(topic) == number
            checkpoint(engine)
            assert position(topic) == number
    assert position(topic, "other") == 2


def voids(engine: xl.Engine) -> list[bytes]:
    """Rows that let notes of the journal not count."""
    with engine.ledger.read() as tables:
        return [key for key, _ in tables.rows.cursor("meta") if key.startswith(b"void")]


def test_a_deleted_group_leaves_nothing_behind(engine, topic) -> None:
    with topic.reader(group="g") as reader:
        read_and_commit(reader)
    engine.delete_group("g")
    assert len(voids(engine)) == 1
    checkpoint(engine)
    assert voids(engine) == []
    assert position(topic) is None


def test_a_commit_needs_no_room_for_the_journal_in_the_tables(engine, topic, monkeypatch) -> None:
    """The journal is full, and so are the tables but for the reserve. It is not overtaken by what
    the same reader has noted before."""
    reader = topic.reader(group="g")
    read_and_commit(reader)

    def full(self: Any, joint: Any, positions: Any) -> None:
        raise xl.LedgerFullError("the map is full")

    with monkeypatch.context() as patch:
        patch.setattr(LocalGroupCursor, "require", full)
        read_and_commit(reader)
    for _ in range(2):
        assert position(topic) == 2
        checkpoint(engine)
    read_and_commit(reader)
    assert position(topic) == 3
    assert voids(engine) == []


@pytest.mark.rule("H7")
def test_what_is_committed_after_a_lost_journal_counts(engine, topic, tmp_path) -> None:
    """The tables still have the row that let the lost notes not count."""
    reader = topic.reader(group="g")
    read_and_commit(reader, 5)
    reader.membership._write_in(engine.ledger.write_exclusive(), {topic.id: 5})
    assert voids(engine)
    ignored = shutil.ignore_patterns("owners.lock", "journal")
    copy = shutil.copytree(engine.path, tmp_path / "copy", ignore=ignored)
    (copy / "journal-given-up").touch()
    with xl.open(copy) as opened:
        orders = opened.topic("orders")
        with no_checkpoints(opened):
            reader = orders.reader(group="g")
            assert reader.position == 5
            reader.seek(7)
            reader.commit()
            for _ in range(2):
                assert position(orders) == 7
                checkpoint(opened)
        assert voids(opened) == []


@pytest.mark.rule("F6", "H2")
@pytest.mark.parametrize("lost", [True, False], ids=["frames lost", "frames there"])
def test_a_full_disk_hides_no_commit_behind_a_lost_journal(
    engine: xl.Engine, topic: xl.Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """The tables have a row that lets the notes before some position not count. A power loss has
    taken frames before it. On a full disk the journal went on before that position, and the
    next commits of the group did not count. If the frames are there, the ledger opens as before."""
    reader = topic.reader(group="g")
    for _ in range(5):
        read_and_commit(reader)
    reader.membership._write_in(engine.ledger.write_exclusive(), {topic.id: 5})
    assert voids(engine)
    second = frames(engine)[1].at
    ignored = shutil.ignore_patterns("owners.lock")  # it is of the time before the power loss
    copy = Path(shutil.copytree(engine.path, tmp_path / "copy", ignore=ignored))
    if lost:
        with (copy / "journal").open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(second)
            file.write(bytes(size - second))
    with monkeypatch.context() as full:
        for module in (checkpointer, ledger):
            full.setattr(module, "apply_frames", disk_is_full)
        with pytest.raises(xl.LedgerFullError) if lost else contextlib.nullcontext():
            with xl.open(copy, durability="process") as opened:
                commit_at(opened, 6)
    with xl.open(copy, durability="process") as opened:
        commit_at(opened, 7)
        checkpoint(opened)
        assert position(opened.topic("orders")) == 7
        assert voids(opened) == []


def commit_at(engine: xl.Engine, place: int) -> None:
    with no_checkpoints(engine), engine.topic("orders").reader(group="g") as reader:
        reader.seek(place)
        reader.commit()
        assert position(engine.topic("orders")) == place


def disk_is_full(*_: object) -> None:
    raise xl.LedgerFullError("the disk is full")


@pytest.mark.long
def test_positions_that_do_not_fit_into_one_append(path: str) -> None:
    """They go into the tables, and no note from before overtakes them."""
    with small_journal(1 << 20), xl.open(path) as engine:
        names = [f"t{number}" for number in range(700)]
        for producer in engine.producers(names):
            producer.send(b"0")
            producer.close()
        reader = engine.reader(names, group="g")
        few = reader.membership
        few.commit({reader.readers[0].topic_id: 0})
        assert len(reader.read_batch(700)) == 700
        within(reader.commit)
        for _ in range(2):
            assert [group.position for group in engine.groups()] == [1] * 700
            engine.ledger.checkpoint()


def test_one_append_takes_only_what_fits(engine) -> None:
    joint = _core.Joint(engine.ledger.journal, True)
    while joint.fits:
        joint.note(b"cursors", bytes(8), bytes(8))
    with pytest.raises(ValueError, match="too many"):
        joint.place()


@pytest.mark.parametrize("last", ["note", "row"])
def test_the_last_commit_counts_whichever_way_it_went(engine, topic, last) -> None:
    """A large transaction writes the row, a small one a note."""
    reader, producer = topic.reader(group="g"), engine.topic("out").producer()
    for size in (1, 200_000) if last == "row" else (200_000, 1):
        reader.read_next(0)
        with engine.transaction() as txn:
            producer.send(bytes(size), transaction=txn)
            txn.commit_cursor(reader)
    assert position(topic) == 2
    checkpoint(engine)
    assert position(topic) == 2


def test_nothing_is_left_of_a_deleted_topic(engine, topic) -> None:
    read_and_commit(topic.reader(group="g"))
    engine.delete_topic("orders")
    checkpoint(engine)
    assert not strays(engine).get("cursors")


# ---- read once for all topics --------------------------------------------------------------


def test_the_journal_is_read_once_for_all_topics(engine, topic, monkeypatch) -> None:
    """Also if it has no note."""
    names = [f"t{number}" for number in range(9)]
    for name in names:
        with engine.topic(name).producer() as producer:
            producer.send(b"0")
    read, counting = [0], AppliedJournal.counting

    def counted(journal: AppliedJournal, rows: Any) -> Any:
        read[0] += 1
        return counting(journal, rows)

    monkeypatch.setattr(AppliedJournal, "counting", counted)

    def reads(call: Callable[[], Any]) -> int:
        before = read[0]
        call()
        return read[0] - before

    assert reads(engine.groups) <= 2
    readers: list[Any] = []
    assert reads(lambda: readers.append(engine.reader(names, group="g"))) == 1
    assert len(readers[0].read_batch(9)) == 9
    readers[0].commit()
    assert reads(engine.groups) <= 2
    assert reads(engine.stats) <= 2


# ---- F6: checked in the append -------------------------------------------------------------


def take_group(state: State) -> None:
    assert state.topic is not None
    state.kept["reader"] = state.topic.reader(group="g")


def delete(state: State) -> None:
    state.engine.delete_topic("orders")


@pytest.mark.rule("F6", "B2")
@pytest.mark.parametrize("how", ["alone", "in a transaction"])
@pytest.mark.parametrize(
    ("strike", "error"), [(take_group, xl.ReaderFencedError), (delete, xl.TopicNotFoundError)]
)
def test_what_changes_behind_the_check_is_noticed_in_the_append(
    engine, topic, worker, monkeypatch, how, strike, error
) -> None:
    """Everything has been checked, and only the append is still to come."""
    process, require = worker(), LocalGroupCursor.require
    reader = topic.reader(group="g")
    read_and_commit(reader)
    reader.read_next(0)

    def struck(self: Any, *args: Any) -> None:
        monkeypatch.setattr(LocalGroupCursor, "require", require)
        require(self, *args)
        process.call(strike)

    monkeypatch.setattr(LocalGroupCursor, "require", struck)
    out = engine.topic("out").producer()
    txn = engine.transaction()
    out.send(b"x", transaction=txn)
    if how != "alone":
        txn.commit_cursor(reader)
    with pytest.raises(error):
        (reader if how == "alone" else txn).commit()
    assert values(engine.topic("out")) == []
    assert position(topic) in (1, None)


@pytest.mark.rule("F6")
def test_a_check_of_one_topic_is_none_of_another(engine, topic, worker) -> None:
    """Two readers of a role have one cursor, and all topics have the same version after a change
    of everything."""
    engine.topic("other").producer().send(b"0")
    role = engine.role("r", groups={"g": ["orders", "other"]})
    reader, deleted = role.reader("orders"), role.reader("other")
    reader.read_next(0)
    deleted.read_next(0)
    worker().call(delete_other)
    with engine.ledger.write_exclusive() as tables:
        tables.rows.put("meta", b"anything", b"")
    reader.commit()
    with pytest.raises(xl.TopicNotFoundError), engine.transaction() as txn:
        txn.commit_cursor(deleted)
    assert position(topic) == 1


def delete_other(state: State) -> None:
    state.engine.delete_topic("other")


# ---- G3, G9: torn and damaged ----------------------------------------------------------------


@pytest.mark.rule("G3")
def test_a_torn_transaction_has_neither_messages_nor_position(engine, topic, tmp_path) -> None:
    reader, out = topic.reader(group="g"), engine.topic("out").producer()
    read_and_commit(reader)
    before = engine.ledger.journal.tail
    reader.read_next(0)
    with engine.transaction() as txn:
        out.send(b"x", transaction=txn)
        txn.commit_cursor(reader)
    written = frames(engine, before)
    assert len(written) == 2
    for number, frame in enumerate(written):
        ignored = shutil.ignore_patterns("owners.lock")  # which knows that it was flushed
        torn = shutil.copytree(engine.path, tmp_path / f"torn{number}", ignore=ignored)
        flip(torn, frame.entry_at)
        with xl.open(torn) as opened:
            assert values(opened.topic("out")) == []
            assert opened.topic("orders").reader(group="g").position == 1


@pytest.mark.rule("G9")
def test_a_damaged_note_is_told(engine, topic, caplog) -> None:
    """The position from before stays; what was sent behind it is there."""
    reader, producer = topic.reader(group="g"), topic.producer()
    read_and_commit(reader)
    before = engine.ledger.journal.tail
    read_and_commit(reader)
    producer.send(b"behind it")
    flip(engine.path, frames(engine, before)[0].entry_at)
    assert "positions of reader groups" in engine.verify().problems[0]
    checkpoint(engine)
    assert "positions of reader groups" in caplog.text
    assert position(topic) == 1
    assert values(topic)[-1] == b"behind it"


@pytest.mark.rule("G9")
def test_a_note_that_is_destroyed_is_told(engine, topic, caplog) -> None:
    """Nothing is left of it that says what it was."""
    reader, producer = topic.reader(group="g"), topic.producer()
    read_and_commit(reader)
    before = engine.ledger.journal.tail
    read_and_commit(reader)
    producer.send(b"behind it")
    frame = frames(engine, before)[0]
    flip(engine.path, frame.at + 8)
    flip(engine.path, frame.entry_at)
    assert "if they had positions of reader groups" in engine.verify().problems[0]
    checkpoint(engine)
    assert "If they had positions of reader groups" in caplog.text
    assert values(topic)[-1] == b"behind it"


# ---- beside others that append -------------------------------------------------------------


def test_notes_that_are_overwritten_while_they_are_read_are_read_again(path: str) -> None:
    """Others append meanwhile, so much that they go around the journal: what stands there now is no
    note, whether it is an entry or not."""
    with small_journal(), xl.open(path) as engine:
        topic = engine.topic("t")
        producer = topic.producer()
        producer.send(b"0")
        journal = engine.ledger.journal
        with no_checkpoints(engine):
            read_and_commit(topic.reader(group="g"))
            with engine.ledger.read() as tables:
                applied, generation = tables.journal.applied, tables.journal.generation
            gathered = journal.gather(applied, journal.tail, generation)
            assert len(gathered.notes()[0]) == 1
        for size in range(60_000, 100_000, 4_000):
            producer.send(bytes(size))
        assert journal.tail > journal.capacity
        with pytest.raises(_core.JournalOverwritten):
            gathered.notes()
        del gathered
        assert position(topic) == 1
