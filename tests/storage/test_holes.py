"""Damage in the middle of the journal, of which shared memory tells nothing (rule H7)."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.local.maintenance import backup
from exclusivelog.local.storage import journal
from exclusivelog.local.storage.tables import AppliedJournal
from testing.disks import another_boot
from testing.journals import (
    FRAME,
    PADDING,
    Frame,
    checkpoint,
    flip,
    frames,
    no_checkpoints,
    small_journal,
)
from testing.processes import values

pytestmark = pytest.mark.once  # each test says its durability

MESSAGES = 20
SECTOR = 512


def erase(path: Path, start: int, size: int) -> None:
    with (path / "journal").open("r+b") as file:
        file.seek(start)
        file.write(bytes(size))


DAMAGE: dict[str, Callable[[Path, Frame], None]] = {
    "header": lambda path, frame: flip(path, frame.at + 4),
    "position": lambda path, frame: flip(path, frame.at + 8),
    "entry": lambda path, frame: flip(path, frame.entry_at + 25),
    "all of it": lambda path, frame: erase(path, frame.at, FRAME.size + len(frame.entry)),
    "all of it, noise": lambda path, frame: [
        flip(path, at, 0xFF) for at in range(frame.at, frame.entry_at + len(frame.entry))
    ],
    "a sector": lambda path, frame: erase(path, frame.at // SECTOR * SECTOR, SECTOR),
}


def forget(path: Path) -> None:
    """The words of the lock file never reached the disk."""
    with (path / "owners.lock").open("r+b") as file:
        file.seek(8)
        file.write(bytes((path / "owners.lock").stat().st_size - 8))


LOCK_FILE: dict[str, Callable[[Path], None]] = {
    "none": lambda path: (path / "owners.lock").unlink(),
    "of another boot": another_boot,
    "zeros": lambda path: forget(path),
}


def power_cut(path: Path, copy: Path, lock_file: str = "none") -> Path:
    """The directory as the next boot finds it."""
    shutil.copytree(path, copy)
    (copy / "lock.mdb").unlink()
    LOCK_FILE[lock_file](copy)
    return copy


def step_over(topic: xl.Topic) -> tuple[dict[int, bytes | None], set[int]]:
    """(what is read, what is named as damaged)."""
    reader, seen, named = topic.reader(), dict[int, "bytes | None"](), set[int]()
    while True:
        try:
            seen.update((m.offset, m.value) for m in reader)
            return seen, named
        except xl.LedgerCorruptedError as error:
            if error.topic != topic.name or error.offsets is None:
                raise
            named |= set(error.offsets)
            reader.seek(error.offsets.stop)


@pytest.fixture(scope="module")
def cut(tmp_path_factory) -> tuple[Path, list[Frame]]:
    """Messages that were sent one by one to two topics, each flushed; nothing is in the tables."""
    where = tmp_path_factory.mktemp("cut")
    with xl.open(where / "log", durability="power") as engine, no_checkpoints(engine):
        with engine.topic("a").producer() as a, engine.topic("b").producer() as b:
            for n in range(MESSAGES):
                (b if n % 4 == 3 else a).send(b"%d" % n)
        found = frames(engine)
        assert len(found) == MESSAGES
        shutil.copytree(where / "log", where / "copy")
    return where / "copy", found


def expected(name: str) -> dict[int, bytes]:
    sent = [n for n in range(MESSAGES) if (n % 4 == 3) == (name == "b")]
    return {offset: b"%d" % n for offset, n in enumerate(sent)}


def judge(engine: xl.Engine) -> set[tuple[str, int]]:
    """Every acknowledged message is read, or named; returns those that are named."""
    lost = set()
    for name in ("a", "b"):
        seen, named = step_over(engine.topic(name))
        wanted = expected(name)
        kept = {offset: wanted[offset] for offset in wanted.keys() - named}
        assert {offset: seen[offset] for offset in seen if offset in wanted} == kept
        lost |= {(name, offset) for offset in named & wanted.keys()}
    return lost


@pytest.mark.parametrize("lock_file", LOCK_FILE)
@pytest.mark.parametrize("index", [0, 7, 10, 15])
@pytest.mark.parametrize("kind", DAMAGE)
def test_h7_what_lies_behind_a_hole_is_read(cut, tmp_path, caplog, kind, index, lock_file) -> None:
    """The last frame was written when those before it were known to be flushed: damage before it is
    not the end. Its offsets are named, and not given again; also without any lock file."""
    source, found = cut
    path = power_cut(source, tmp_path / "log", lock_file)
    DAMAGE[kind](path, found[index])
    with xl.open(path, readonly=True) as engine:
        assert not engine.verify().ok
        judge(engine)
    for _ in range(2):
        with xl.open(path) as engine:
            lost = judge(engine)
            assert bool(engine.verify().problems) == bool(lost)
    with xl.open(path) as engine:
        for name in ("a", "b"):
            with engine.topic(name).producer() as producer:
                assert producer.send(b"new") >= len(expected(name))
        assert judge(engine) == lost
    if kind == "header":
        assert not lost
    elif kind != "position":
        assert lost
    (line,) = [r for r in caplog.records if "is damaged at position" in r.getMessage()]
    assert line.levelno == logging.ERROR


def test_h7_the_check_would_notice_a_hole_that_is_taken_for_the_end(
    cut, tmp_path, monkeypatch
) -> None:
    """The control: frames say nothing about what was durable."""
    source, found = cut
    path = power_cut(source, tmp_path / "log")
    flip(path, found[7].entry_at + 25)
    monkeypatch.setattr(AppliedJournal, "known_end", lambda applied: applied.applied)
    with xl.open(path) as engine, pytest.raises(AssertionError):
        judge(engine)


def test_h7_the_last_messages_of_a_topic_are_doubted_if_nothing_is_left_of_them(
    cut, tmp_path, caplog
) -> None:
    """Their frames are gone, with the name of their topic: no later frame of it shows a gap."""
    source, found = cut
    path = power_cut(source, tmp_path / "log")
    last_of_a = found[MESSAGES - 2]
    erase(path, last_of_a.at, FRAME.size + len(last_of_a.entry))
    with xl.open(path, readonly=True) as engine:  # it changes nothing, so it can only say so
        assert "the journal is damaged" in engine.verify().problems[0]
    with xl.open(path) as engine:
        assert judge(engine) == {("a", max(expected("a")))}
        seen, named = step_over(engine.topic("b"))
        assert (len(seen), named) == (len(expected("b")), set())  # it has a frame behind the hole
        assert "may have held the last messages of topic 'a'" in caplog.text
        with engine.topic("a").producer() as producer:
            assert producer.send(b"new") > max(expected("a"))


@pytest.mark.parametrize("kind", DAMAGE)
def test_h7_what_was_never_flushed_ends_at_the_first_gap(tmp_path, kind) -> None:
    """Under `process` durability a power cut may take any page that was not flushed. That is the
    end of the journal, as nothing was promised: no error, and nothing from behind it."""
    path = tmp_path / "log"
    with xl.open(path, durability="process") as engine, no_checkpoints(engine):
        topic = engine.topic("orders")
        with topic.producer() as producer:
            for n in range(MESSAGES):
                producer.send(b"%d" % n)
        found = frames(engine)
        copy = power_cut(path, tmp_path / "copy")
    DAMAGE[kind](copy, found[10])
    with xl.open(copy, durability="process") as engine:
        before = 10 if kind != "a sector" else topic_end(engine)
        assert values(engine.topic("orders")) == [b"%d" % n for n in range(before)]
        assert engine.verify().ok
        with engine.topic("orders").producer() as producer:
            assert producer.send(b"new") == before
    with xl.open(copy, durability="process") as engine:
        assert values(engine.topic("orders"))[before:] == [b"new"]


def topic_end(engine: xl.Engine) -> int:
    end = engine.topic("orders").next_offset
    assert 0 < end <= 10
    return end


@pytest.mark.parametrize("lock_file", ["none", "zeros"])
def test_h7_a_torn_end_is_an_end(cut, tmp_path, lock_file) -> None:
    source, found = cut
    path = power_cut(source, tmp_path / "log", lock_file)
    erase(path, found[-1].entry_at, len(found[-1].entry))
    with xl.open(path) as engine:
        assert engine.verify().ok
        assert engine.topic("b").next_offset == len(expected("b")) - 1
        assert engine.topic("a").next_offset == len(expected("a"))


def test_h7_a_hole_in_a_ring_that_has_gone_around(tmp_path) -> None:
    """The rest of the ring behind its last frame is a hole that means nothing, also if the header
    that says so is damaged; frames of the pass before are not taken for new ones."""
    path = tmp_path / "log"
    with small_journal(64 << 10), xl.open(path, durability="power") as engine:
        topic = engine.topic("orders")
        with no_checkpoints(engine), topic.producer() as producer:
            sent = []
            for n in range(160):
                if n in (70, 105):
                    checkpoint(engine)
                sent.append(b"%d" % n * 200)
                producer.send(sent[-1])
            capacity = engine.ledger.journal.capacity
            data = (path / "journal").read_bytes()
            copy = power_cut(path, tmp_path / "copy")
    fillers = [
        at
        for at in range(journal.HEADER, journal.HEADER + capacity - FRAME.size, 16)
        if data[at : at + 4] == b"XLJ\2" and FRAME.unpack_from(data, at)[1] & PADDING
    ]
    assert len(fillers) == 1
    assert not any(data[fillers[0] + FRAME.size :])
    flip(copy, fillers[0] + 8)
    with xl.open(copy) as engine:
        assert values(engine.topic("orders")) == sent
        assert engine.verify().ok


def test_h7_a_backup_ends_where_it_was_begun(tmp_path, monkeypatch) -> None:
    """What is appended while the journal is copied may be in the copy without what was appended
    before it. That is not damage of the copy."""
    path, copy = tmp_path / "log", tmp_path / "copy"
    with xl.open(path, durability="power") as engine, no_checkpoints(engine):
        with engine.topic("orders").producer() as producer:
            sent = [b"%d" % n for n in range(10)]
            for value in sent:
                producer.send(value)
            copy_bytes = backup._copy_bytes

            def while_it_grows(source: int, target: int, size: int) -> None:
                if size < journal.HEADER + engine.ledger.journal.capacity:
                    copy_bytes(source, target, size)
                    return
                gap = len(frames(engine))
                for n in range(10, 20):
                    producer.send(b"%d" % n)
                copy_bytes(source, target, size)
                os.pwrite(target, bytes(FRAME.size + 64), frames(engine)[gap].at)

            monkeypatch.setattr(backup, "_copy_bytes", while_it_grows)
            engine.backup(copy)
    with xl.open(copy) as engine:
        assert values(engine.topic("orders")) == sent
        assert engine.verify().ok


@pytest.mark.long
def test_h7_every_byte_of_the_journal(cut, tmp_path) -> None:
    """Each byte of each frame but the last is damaged, one at a time."""
    source, found = cut
    path = power_cut(source, tmp_path / "log")
    pristine = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    for at in range(found[0].at, found[-1].at):
        shutil.rmtree(path)
        path.mkdir()
        for name, data in pristine.items():
            (path / name).write_bytes(data)
        flip(path, at, 1 << at % 8)
        with xl.open(path, readonly=at % 2 == 0) as engine:
            judge(engine)
