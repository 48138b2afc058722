"""The pipelines: what each leaves behind, that doing it again changes nothing, and that one that
was interrupted goes on where it was."""

from __future__ import annotations

import datetime as dt
import errno
import io
import json
import os
import shutil
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from rich.console import Console

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.audit import audit as judge_here
from exclusivelog.audit import judging, leaders
from exclusivelog.audit.judging import Summary, judge
from exclusivelog.audit.leaders import Change, LeaderReport, Story, Tenure
from exclusivelog.audit.page import page
from exclusivelog.cli import demo
from exclusivelog.messages import Columns
from exclusivelog.once import Run, append_once, recorded
from exclusivelog.spark import __main__ as commands
from exclusivelog.spark import (
    archive,
    audit,
    compact,
    files,
    plan,
    replay,
    report,
)
from exclusivelog.spark.errors import SourceError
from exclusivelog.spark.pipelines import Progress
from exclusivelog.spark.session import local_session
from tests.spark.sparks import as_bytes, epochs, fill, read, trim, values

pytestmark = pytest.mark.once


def rows(spark, where: str | Path) -> list[tuple[int, bytes]]:
    frame = spark.read.parquet(str(where)).orderBy("offset")
    return [(row.offset, bytes(row.value)) for row in frame.collect()]


def expected(*offsets: int) -> list[tuple[int, bytes]]:
    return [(n, b"%d" % n) for n in offsets]


# ---- archive -----------------------------------------------------------------------------


@pytest.mark.long
def test_an_archive_grows_by_what_is_new(spark, path, tmp_path) -> None:
    fill(path, count=10)
    to = str(tmp_path / "archive")
    done = archive.run(spark, path, "orders", to)
    assert (done.start, done.end) == (0, 10)
    fill(path, count=5, start=10)
    done = archive.run(spark, path, "orders", to)
    assert (done.start, done.end) == (10, 15)
    done = archive.run(spark, path, "orders", to)
    assert (done.start, done.end) == (15, 15)
    assert rows(spark, f"{to}/orders") == expected(*range(15))
    frame = spark.read.parquet(f"{to}/orders")
    day = dt.datetime.now(dt.UTC).date()
    assert {row.date for row in frame.select("date").collect()} <= {day, day - dt.timedelta(1)}
    assert {row.epoch for row in frame.select("epoch").collect()} == {1, 2}
    assert ".zstd.parquet" in str(next(Path(to).rglob("*.parquet")))


@pytest.mark.long
def test_an_archive_in_ranges_tells_its_progress(spark, path, tmp_path) -> None:
    fill(path, "eu/orders", 10)
    out = io.StringIO()
    archive.run(spark, path, "eu/orders", str(tmp_path / "a"), chunk=4, before=9, out=out)
    said = out.getvalue()
    assert "offsets 0 to 3: " in said
    assert "offsets 8 to 8: " in said
    assert rows(spark, tmp_path / "a" / "eu%2Forders") == expected(*range(9))


@pytest.mark.long
def test_an_archive_that_was_interrupted_goes_on(spark, path, tmp_path, monkeypatch) -> None:
    fill(path, count=10)
    to = tmp_path / "archive"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    # Just after the first range is there, and before the ledger knows.
    monkeypatch.setattr(archive, "record", die)
    with pytest.raises(KeyboardInterrupt):
        archive.run(spark, path, "orders", str(to), chunk=4)
    monkeypatch.undo()
    # While the second one is written.
    monkeypatch.setattr(archive, "_check", die)
    with pytest.raises(KeyboardInterrupt):
        archive.run(spark, path, "orders", str(to), chunk=7)
    monkeypatch.undo()
    done = archive.run(spark, path, "orders", str(to), chunk=7)
    assert done.end == 10
    assert rows(spark, to / "orders") == expected(*range(10))
    names = sorted(entry.name for entry in (to / "orders").iterdir())
    found = [name for name in names if name.startswith("range")]
    assert found == [f"range={0:020d}-{4:020d}", f"range={4:020d}-{10:020d}"]
    assert "_writing" not in names


@pytest.mark.long
def test_an_archive_that_was_damaged_is_not_recorded(spark, path, tmp_path, monkeypatch) -> None:
    fill(path, count=10)
    to = tmp_path / "archive"
    write = archive.Archive._write

    def lose_one(self, start, stop, aside):
        write(self, start, stop - 1, aside)
        return {}

    monkeypatch.setattr(archive.Archive, "_write", lose_one)
    with pytest.raises(SourceError, match=r"PIPELINE.*9 messages from 0 to 8"):
        archive.run(spark, path, "orders", str(to))
    with xl.open(path, readonly=True) as engine:
        assert recorded(engine, "orders") == {}
    monkeypatch.undo()
    archive.run(spark, path, "orders", str(to))
    assert rows(spark, to / "orders") == expected(*range(10))


@pytest.mark.long
def test_what_was_trimmed_unarchived_is_missed(spark, path, tmp_path) -> None:
    fill(path, count=10)
    to = str(tmp_path / "archive")
    archive.run(spark, path, "orders", to, before=4)
    trim(path, "orders", 6)
    with pytest.raises(SourceError, match=r"DATA_LOSS.*those from 4 on"):
        archive.run(spark, path, "orders", to)
    # A new archive begins where the topic does.
    assert archive.run(spark, path, "orders", str(tmp_path / "new")).start == 6


@pytest.mark.long
@pytest.mark.parametrize("topic", ["\u65e5" * 85, "a/b *?[c]{d}%2F", "_.\\'\" =:#"])
def test_a_topic_of_any_name_has_an_archive(spark, path, tmp_path, topic) -> None:
    """Quoted, 255 bytes are three times as many: too long for a file's name."""
    fill(path, topic)
    to = str(tmp_path / "archive")
    assert archive.run(spark, path, topic, to).end == 10
    assert replay.run(spark, to, topic, str(tmp_path / "copy")).messages == 10
    assert values(str(tmp_path / "copy"), topic) == values(path, topic)


@pytest.mark.long
@pytest.mark.parametrize("name", ["a[1]", "a{b,c}", "a*", "a\\b"])
def test_a_directory_is_no_pattern(spark, path, tmp_path, name) -> None:
    """Spark finds nothing in "a[1]", and in "a*" what is in "abc", too."""
    fill(path)
    fill(str(tmp_path / "other"), count=20)
    archive.run(spark, str(tmp_path / "other"), "orders", str(tmp_path / "abc"))
    to = str(tmp_path / name)
    assert archive.run(spark, path, "orders", to).end == 10
    assert replay.run(spark, to, "orders", str(tmp_path / "copy")).messages == 10
    assert values(str(tmp_path / "copy"), "orders") == as_bytes(range(10))
    assert compact.run(spark, path, "orders", to=str(tmp_path / "abc" / "latest")).keys == 3
    assert compact.run(spark, path, "orders", to=f"{to}/latest").keys == 3


def test_an_archive_belongs_to_one_topic(spark, path, tmp_path) -> None:
    fill(path)
    other = str(tmp_path / "other")
    fill(other)
    to = str(tmp_path / "archive")
    archive.run(spark, path, "orders", to)
    with pytest.raises(SourceError, match=r"PIPELINE.*another ledger"):
        archive.run(spark, other, "orders", to)


def make_anew(path: str) -> None:
    with xl.open(path) as engine:
        engine.delete_topic("orders")
    fill(path, count=20, start=100)


@pytest.mark.long
def test_a_topic_that_is_made_anew_while_it_is_archived_is_told_of(
    spark, path, tmp_path, monkeypatch
) -> None:
    """Between two ranges: the archive keeps what it has, and nothing of the new topic is in it,
    nor is anything recorded for that one."""
    fill(path, count=10)
    original = archive.record

    def record_and_replace(*args: object) -> None:
        original(*args)
        make_anew(path)

    monkeypatch.setattr(archive, "record", record_and_replace)
    with pytest.raises((SourceError, PySparkException), match=r"created again|was deleted"):
        archive.run(spark, path, "orders", str(tmp_path / "a"), chunk=4)
    monkeypatch.undo()
    assert rows(spark, tmp_path / "a" / "orders") == expected(*range(4))
    with xl.open(path) as engine:
        assert recorded(engine, "orders") == {}


@pytest.mark.long
def test_a_topic_that_is_made_anew_while_it_is_compacted_is_told_of(
    spark, path, tmp_path, monkeypatch
) -> None:
    fill(path, count=10)
    original = plan.row

    def find_and_replace(*args: object) -> object:
        found = original(*args)
        monkeypatch.undo()
        make_anew(path)
        return found

    monkeypatch.setattr(plan, "row", find_and_replace)
    with pytest.raises((SourceError, PySparkException), match=r"created again|was deleted"):
        compact.run(spark, path, "orders", to=str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


@pytest.mark.long
def test_what_is_archived_can_be_trimmed(spark, path, tmp_path) -> None:
    fill(path, count=10)
    done = archive.run(spark, path, "orders", str(tmp_path / "a"), before=6, keep=dt.timedelta(0))
    assert done.end == 6
    with xl.open(path, readonly=True) as engine:
        assert 0 < engine.topic("orders").first_offset <= 6
    fill(path, count=2, start=10)
    archive.run(spark, path, "orders", str(tmp_path / "a"))
    assert rows(spark, tmp_path / "a" / "orders") == expected(*range(12))


@pytest.mark.long
def test_an_archive_that_is_not_there_any_more_is_missed(spark, path, tmp_path) -> None:
    """A disk that is not mounted, say: to go on would trim what is in no archive."""
    fill(path, count=10)
    to = tmp_path / "archive"
    archive.run(spark, path, "orders", str(to))
    to.rename(tmp_path / "elsewhere")
    fill(path, count=5, start=10)
    with pytest.raises(SourceError, match=r"PIPELINE.*before 10.*mounted"):
        archive.run(spark, path, "orders", str(to), keep=dt.timedelta(0))
    with xl.open(path, readonly=True) as engine:
        assert engine.topic("orders").first_offset == 0


@pytest.mark.long
def test_an_archive_that_was_moved_is_continued(spark, path, tmp_path) -> None:
    """Also after a trim of the topic: then its ranges alone tell what it has."""
    fill(path, count=10)
    archive.run(spark, path, "orders", str(tmp_path / "a"), chunk=4)
    with xl.open(path) as engine:
        engine.topic("orders").trim(before=6)
    (tmp_path / "a").rename(tmp_path / "b")
    fill(path, count=5, start=10)
    done = archive.run(spark, path, "orders", str(tmp_path / "b"), keep=dt.timedelta(0))
    assert (done.end, done.first_offset) == (15, 15)
    assert rows(spark, tmp_path / "b" / "orders") == expected(*range(15))


@pytest.mark.long
def test_a_moved_archive_of_another_future_is_not_continued(spark, path, tmp_path) -> None:
    fill(path, count=6)
    shutil.copytree(path, tmp_path / "copy")
    fill(path, count=4, start=6)
    archive.run(spark, path, "orders", str(tmp_path / "a"))
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "copy", path)
    fill(path, count=4, start=16)
    with xl.open(path) as engine:
        engine.topic("orders").trim(before=3)
    (tmp_path / "a").rename(tmp_path / "b")
    words = r"does not hold offsets 3 to 9 as the topic has them.* to another directory"
    with pytest.raises(SourceError, match=words):
        archive.run(spark, path, "orders", str(tmp_path / "b"))


@pytest.mark.long
def test_of_two_archive_runs_at_a_time_one_is_refused(spark, path, tmp_path, monkeypatch) -> None:
    """Started by a timer, say, while the last one runs: both would write the same messages."""
    fill(path, count=10)
    write, refused = archive.Archive._write, list[str]()

    def write_beside_another(self, start, stop, aside):
        where, silent = str(tmp_path / "a"), Progress(spark, None)
        other = archive.Archive(spark, self._engine, "orders", where, silent)
        with pytest.raises(SourceError) as error, other.alone():
            raise AssertionError
        refused.append(str(error.value))
        return write(self, start, stop, aside)

    monkeypatch.setattr(archive.Archive, "_write", write_beside_another)
    assert archive.run(spark, path, "orders", str(tmp_path / "a")).end == 10
    assert "is being written by another run: lock 'archive:" in refused[0]
    assert rows(spark, tmp_path / "a" / "orders") == expected(*range(10))


@pytest.mark.long
@pytest.mark.parametrize("size", [240, 241, 255, 256])
def test_a_long_path_has_a_lock(spark, path, tmp_path, size) -> None:
    """A lock's name may have 240 bytes, and a writer's 255."""
    fill(path, count=1)
    short = f"archive:1:file:{tmp_path}//orders"
    to = str(tmp_path / ("x" * (size - len(short))))
    with xl.open(path) as engine:
        job = archive.Archive(spark, engine, "orders", to, Progress(spark, None))
        with job.alone():
            [held] = [info.name for info in engine.roles()]
    assert (len(held) == size) == (size <= 240)


@pytest.mark.long
def test_a_run_that_has_lost_its_lock_puts_nothing_in_place(
    spark, path, tmp_path, monkeypatch
) -> None:
    """It was paused for longer than its keepalive, and another one has gone on."""
    fill(path, count=10)
    write = archive.Archive._write

    def lose(self, start, stop, aside):
        self._lock.close()
        return write(self, start, stop, aside)

    monkeypatch.setattr(archive.Archive, "_write", lose)
    with pytest.raises(SourceError, match=r"OWNERSHIP_LOST.*archive:"):
        archive.run(spark, path, "orders", str(tmp_path / "a"))
    assert list((tmp_path / "a").rglob("range=*")) == []


@pytest.mark.long
def test_ranges_with_the_same_messages_are_told_of(spark, path, tmp_path) -> None:
    fill(path, count=10)
    archive.run(spark, path, "orders", str(tmp_path / "a"), chunk=5)
    place = tmp_path / "a" / "orders"
    shutil.copytree(place / f"range={0:020d}-{5:020d}", place / f"range={0:020d}-{8:020d}")
    with pytest.raises(SourceError, match="have the same messages twice"):
        archive.run(spark, path, "orders", str(tmp_path / "a"), keep=dt.timedelta(0))


@pytest.mark.long
def test_h1_an_archive_is_durable_before_it_is_recorded(spark, path, tmp_path, monkeypatch) -> None:
    flushed, fsync = set(), os.fsync

    def flush(fd: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def record_what_is_durable(*args: object) -> None:
        there = {str(each) for each in (tmp_path / "a").rglob("*")} | {str(tmp_path / "a")}
        assert {name for name in there - flushed if not name.endswith("._ledger.crc")} == set()
        record(*args)

    fill(path, count=10)
    record = archive.record
    monkeypatch.setattr(archive, "record", record_what_is_durable)
    monkeypatch.setattr(os, "fsync", flush)
    assert archive.run(spark, path, "orders", str(tmp_path / "a")).end == 10
    assert any(name.endswith(".parquet") for name in flushed)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EINVAL])
def test_h1_where_a_directory_cannot_be_flushed_all_is(tmp_path, monkeypatch, code) -> None:
    """It is another user's, or of a file system that does not do that. A failing disk is told."""
    (tmp_path / "range").mkdir()
    (tmp_path / "range" / "file").touch()
    fsync, flushed, failing = os.fsync, list[str](), [code]

    def flush(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(failing[0], "no")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "sync", lambda: flushed.append("all"))
    files.make_durable(f"file:{tmp_path}/range")
    assert flushed != []
    failing[:] = [errno.EIO]
    with pytest.raises(OSError, match="no"):
        files.make_durable(f"file:{tmp_path}/range")


@pytest.mark.long
def test_nothing_is_trimmed_that_the_archive_has_lost(spark, path, tmp_path) -> None:
    """It was brought back from an older copy of it, or files of it are gone."""
    to = tmp_path / "archive"
    fill(path, count=6)
    archive.run(spark, path, "orders", str(to))
    shutil.copytree(to, tmp_path / "copy")
    fill(path, count=4, start=6)
    archive.run(spark, path, "orders", str(to))
    shutil.rmtree(to)
    shutil.copytree(tmp_path / "copy", to)
    with pytest.raises(SourceError, match="offsets 6 to 9 were archived, and are not in"):
        archive.run(spark, path, "orders", str(to), keep=dt.timedelta(0))
    for file in to.rglob("*.parquet"):
        file.unlink()
    with pytest.raises(PySparkException):
        archive.run(spark, path, "orders", str(to), keep=dt.timedelta(0))
    with xl.open(path) as engine:
        assert engine.topic("orders").first_offset == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "words"), [(2, "ends at offset 8: the log is an older copy"), (4, "does not hold")]
)
def test_a_range_of_another_future_is_not_taken_for_the_log_s(
    spark, path, tmp_path, more, words
) -> None:
    """The log was restored from a backup, after the archive had gone on."""
    to = tmp_path / "archive"
    fill(path, count=6)
    archive.run(spark, path, "orders", str(to))
    with xl.open(path) as engine:
        engine.backup(tmp_path / "backup")
    fill(path, count=4, start=6)
    archive.run(spark, path, "orders", str(to))
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "backup", path)
    fill(path, count=more, start=96)
    with pytest.raises(SourceError, match=words):
        archive.run(spark, path, "orders", str(to), keep=dt.timedelta(0))
    with xl.open(path) as engine:
        assert engine.topic("orders").first_offset == 0


# ---- compact -----------------------------------------------------------------------------


def keyed(path: str) -> None:
    with xl.open(path) as engine, engine.topic("orders").producer("exclusive") as producer:
        for key, value in [
            ("a", b"1"),
            ("b", b"1"),
            (None, b"x"),
            ("a", b"2"),
            ("c", b"1"),
            ("b", None),
            ("", b"e"),
        ]:
            producer.send(value, key=key, properties={"p": "q"})


@pytest.mark.long
def test_the_last_message_of_each_key_is_kept(spark, path, tmp_path) -> None:
    keyed(path)
    to, elsewhere = tmp_path / "compacted", tmp_path / "elsewhere"
    to.symlink_to(elsewhere)
    assert compact.run(spark, path, "orders", to=str(to)).keys == 3
    assert to.is_symlink()
    assert elsewhere.is_dir()
    kept = {(r.offset, bytes(r.key), bytes(r.value)) for r in spark.read.parquet(str(to)).collect()}
    assert kept == {(3, b"a", b"2"), (4, b"c", b"1"), (6, b"", b"e")}
    assert compact.run(spark, path, "orders", to=str(to)).keys is None
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send(b"3", key="a")
    assert compact.run(spark, path, "orders", to=str(to)).keys == 3
    assert max(r.offset for r in spark.read.parquet(str(to)).collect()) == 7
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(SourceError, match=r"PIPELINE.*not empty"):
        compact.run(spark, path, "orders", to=str(tmp_path / "mine"))


@pytest.mark.long
def test_a_compaction_replaces_no_other_one(spark, path, tmp_path) -> None:
    """Of another topic, whatever its name."""
    for name in ("orders", "orders.before", "orders.writing"):
        fill(path, count=3, topic=name)
        compact.run(spark, path, name, to=f"{tmp_path}/{name}")
    fill(path, count=3, start=3)
    compact.run(spark, path, "orders", to=f"{tmp_path}/orders")
    for name in ("orders", "orders.before", "orders.writing"):
        assert (tmp_path / name).is_dir()
    fill(path, count=1, topic="other")
    with pytest.raises(SourceError, match=r"the compacted topic 'orders' .*not topic 'other'"):
        compact.run(spark, path, "other", to=f"{tmp_path}/orders")
    assert sorted(each.name for each in tmp_path.iterdir() if "exclusivelog-" in each.name) == []


@pytest.mark.long
def test_a_compacted_topic_is_written_once(spark, path) -> None:
    keyed(path)
    assert compact.run(spark, path, "orders", to_topic="last").keys == 3
    assert compact.run(spark, path, "orders", to_topic="last").keys is None
    with xl.open(path, readonly=True) as engine:
        messages = list(engine.topic("last").reader())
    assert [(m.key, m.value) for m in messages] == [(b"a", b"2"), (b"c", b"1"), (b"", b"e")]
    assert messages[0].properties == {"p": "q", "origin_offset": "3", "origin_epoch": "1"}


@pytest.mark.long
def test_a_key_that_is_gone_is_gone_from_the_compacted_topic(spark, path) -> None:
    """What it was compacted into has its last value from before: only a tombstone ends that."""
    keyed(path)
    compact.run(spark, path, "orders", to_topic="last")
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send(None, key="a")
    compact.run(spark, path, "orders", to_topic="last")
    with xl.open(path, readonly=True) as engine:
        latest = {message.key: message.value for message in engine.topic("last").reader()}
    assert {key for key, value in latest.items() if value is not None} == {b"c", b""}


@pytest.mark.long
def test_a_topic_that_was_made_anew_is_compacted_anew(spark, path) -> None:
    keyed(path)
    compact.run(spark, path, "orders", to_topic="last")
    with xl.open(path) as engine:
        engine.delete_topic("orders")
    fill(path, count=3)
    assert compact.run(spark, path, "orders", to_topic="last").keys == 3
    with pytest.raises(SourceError, match="into itself"):
        compact.run(spark, path, "orders", to_topic="orders")


# ---- replay ------------------------------------------------------------------------------


@pytest.mark.long
def test_a_replay_of_a_range_goes_on_where_it_was(spark, path, tmp_path, monkeypatch) -> None:
    fill(path, count=10)
    to = str(tmp_path / "copy")
    done = replay.run(spark, path, "orders", to, end=4)
    assert (done.start, done.end, done.messages) == (0, 4, 4)
    done = replay.run(spark, path, "orders", to, chunk=5)
    assert (done.start, done.end, done.messages) == (4, 10, 6)
    assert replay.run(spark, path, "orders", to).messages == 0
    assert values(to, "orders") == as_bytes(range(10))
    with xl.open(to, readonly=True) as engine:
        origins = [m.properties["origin_offset"] for m in engine.topic("orders").reader()]
        assert origins == [str(n) for n in range(10)]
        assert {m.key for m in engine.topic("orders").reader()} == {b"k0", b"k1", b"k2"}
    again = replay.run(spark, path, "orders", path, to_topic="again", start=7)
    assert again.messages == 3
    assert values(path, "again") == as_bytes(range(7, 10))


@pytest.mark.long
def test_a_replay_may_go_on_from_the_archive(spark, path, tmp_path) -> None:
    fill(path, count=10)
    to, copy = str(tmp_path / "archive"), str(tmp_path / "copy")
    replay.run(spark, path, "orders", copy, end=3)
    archive.run(spark, path, "orders", to, chunk=4)
    assert replay.run(spark, to, "orders", copy).messages == 7
    assert values(copy, "orders") == as_bytes(range(10))


@pytest.mark.long
def test_a_replay_of_what_is_not_there_is_refused(spark, path, tmp_path) -> None:
    fill(path)
    with pytest.raises(SourceError, match=r"DATA_LOSS.*offsets 0 to 9"):
        replay.run(spark, path, "orders", str(tmp_path / "copy"), end=11)
    with pytest.raises(SourceError, match="into itself"):
        replay.run(spark, path, "orders", path)
    with pytest.raises(SourceError, match="neither a ledger nor an archive"):
        replay.run(spark, str(tmp_path), "orders", path, to_topic="x")


@pytest.mark.long
def test_a_replay_does_not_step_over_what_was_trimmed(spark, path, tmp_path) -> None:
    fill(path, count=10)
    copy = str(tmp_path / "copy")
    replay.run(spark, path, "orders", copy, end=4)
    archive.run(spark, path, "orders", str(tmp_path / "archive"))
    trim(path, "orders", 6)
    with pytest.raises(SourceError, match=r"DATA_LOSS.*not all of 4 to 9"):
        replay.run(spark, path, "orders", copy)
    assert replay.run(spark, str(tmp_path / "archive"), "orders", copy).messages == 6
    assert replay.run(spark, path, "orders", copy).messages == 0
    assert values(copy, "orders") == as_bytes(range(10))


@pytest.mark.long
def test_a_topic_that_was_made_anew_is_replayed_anew(spark, path, tmp_path) -> None:
    fill(path, count=10)
    copy = str(tmp_path / "copy")
    replay.run(spark, path, "orders", copy)
    with xl.open(path) as engine:
        engine.delete_topic("orders")
    fill(path, count=5, start=10)
    assert replay.run(spark, path, "orders", copy).messages == 5
    assert values(copy, "orders") == as_bytes(range(15))


@pytest.mark.long
@pytest.mark.parametrize("run", [archive.run, replay.run])
def test_chunks_of_nothing_are_refused(spark, path, tmp_path, run) -> None:
    fill(path)
    with pytest.raises(SourceError, match="chunk=0"):
        run(spark, path, "orders", str(tmp_path / "to"), chunk=0)


def test_spark_connect_in_the_environment_is_told_of(monkeypatch, path, capsys) -> None:
    fill(path)
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1")
    assert commands.main(["audit", path]) == 1
    assert "SPARK_REMOTE is set" in capsys.readouterr().err


# ---- audit -------------------------------------------------------------------------------


def history(path: str) -> None:
    """Leaders that come and go, a crash, a run of batches, and shared producers."""
    with xl.open(path, "one") as one, xl.open(path, "two") as two:
        for engine, name in ((one, "alice"), (two, "bob")):
            with engine.topic("orders").producer("exclusive", name=name) as producer:
                producer.send_many([b"x"] * 1000)
        part = Columns(_core.strings([b"y"] * 500))
        for number in range(2):
            append_once(one, Run("job", "run", "spark"), number, {"orders": [part]})
        with two.topic("orders").producer("exclusive_with_fencing", name="bob") as producer:
            producer.send(b"z")
        with one.topic("chat").producer() as first, two.topic("chat").producer() as second:
            for producer in (first, second, first):
                producer.send(b"hello")


def test_a_sound_log_passes(spark, path) -> None:
    history(path)
    verdicts = audit.run(spark, path)
    assert [v for v in verdicts if not v.holds] == []
    with xl.open(path, readonly=True) as engine:
        assert judge_here(engine) == verdicts  # without Spark
    facts = {(v.topic, v.claim): v.facts for v in verdicts}
    assert facts["orders", "offsets are dense"] == "3,001 messages from 0 to 3000"
    assert facts["orders", "epochs never interleave"] == "4 epochs"
    assert facts["chat", "one producer in each exclusive epoch"] == "0 exclusive epochs"


@pytest.mark.long
def test_e5_claims_among_the_events_are_no_topic_s(spark, path, tmp_path) -> None:
    """Neither the audit nor the report takes a claim for a tenure; Spark reads the events, of which
    those about claims have no key."""
    history(path)
    with xl.open(path, "holder") as engine:
        topic = engine.topic("orders")
        claim = engine.own("shards", {"orders": None})
        with topic.producer("exclusive", name="carol", claim=claim) as producer:
            producer.send(b"x")
            engine.own("shards", {"orders": None}).release()
        with topic.reader(group="billing"), engine.reader(["orders", "chat"], group="billing"):
            pass
        kinds = [event.kind for event in engine.history()]
    assert [v for v in audit.run(spark, path) if not v.holds] == []
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")  # of what DDL calls timestamp
    try:
        assert [v for v in audit.run(spark, path) if not v.holds] == []
        told = report.run(spark, path, str(tmp_path / "report.html"))
    finally:
        spark.conf.unset("spark.sql.timestampType")
    (orders,) = [story for story in told.stories if story.topic == "orders"]
    assert (orders.tenures[-1].producer, orders.tenures[-1].why) == ("carol", "claim")
    assert {story.topic for story in told.stories} == {"orders", "chat"}
    found = read(spark, path, "__events__").orderBy("offset").collect()
    assert [json.loads(row.value)["kind"] for row in found] == kinds
    about = [(row.key, json.loads(row.value).get("group")) for row in found]
    assert {group for key, group in about if key is None} == {"shards", "billing"}
    assert all(group is None for key, group in about if key is not None)


def run_of(epoch: int, producer: str, first: int, last: int, **other: int) -> dict[str, object]:
    return {
        "epoch": epoch,
        "producer": producer,
        "first_offset": first,
        "last_offset": last,
        "messages": last - first + 1,
        "first_sequence_id": first,
        "last_sequence_id": last,
        "falls": 0,
        "gaps": 0,
        **other,
    }


@pytest.mark.parametrize(
    ("records", "claim", "words"),
    [
        (
            [run_of(1, "a", 0, 4), run_of(2, "b", 3, 9, messages=5)],
            "epochs never interleave",
            "epoch 2 begins at offset 3, within epoch 1",
        ),
        ([run_of(1, "a", 0, 4), run_of(1, "a", 6, 9)], "offsets are dense", "9 messages"),
        ([run_of(1, "a", 0, 4, gaps=2)], "offsets are dense", "2 offsets"),
        (
            [run_of(1, "a", 0, 9, messages=9), run_of(1, "b", 5, 5)],
            "one producer in each exclusive epoch",
            "b in between",
        ),
        (
            [run_of(1, "a", 0, 4), run_of(1, "a", 5, 9, first_sequence_id=4)],
            "sequence ids rise",
            "a at offset 5",
        ),
        ([run_of(1, "a", 0, 4, falls=1)], "sequence ids rise", "a at offset 0"),
        ([run_of(7, "a", 0, 4)], "every epoch is granted once", "epoch 7 was granted 0 times"),
    ],
)
def test_what_is_wrong_is_named(records, claim, words) -> None:
    summary = Summary("orders")
    for record in records:
        summary.add(record)
    grants = Counter({1: 1, 2: 1})
    [failed] = [v for v in judge(summary, grants) if not v.holds and v.claim == claim]
    assert words in failed.facts


@pytest.mark.long
def test_a_topic_that_does_not_exist_is_not_sound(spark, path, tmp_path) -> None:
    fill(path)
    for topic in ("ordres", "__events__"):
        with pytest.raises(SourceError, match="TOPIC_NOT_FOUND"):
            audit.run(spark, path, [topic])
        with pytest.raises(SourceError, match="TOPIC_NOT_FOUND"):
            report.run(spark, path, str(tmp_path / "page.html"), [topic])


@pytest.mark.long
def test_others_may_write_while_an_owner_is_away(spark, path) -> None:
    """Shared producers take no epoch: they write under that of who owned the topic before them.
    It may come back as one of them, or where it was (rule B5), as a run of batches does."""
    part = Columns(_core.strings([b"y"]))
    with xl.open(path) as engine:
        silent = engine.topic("silent")
        silent.producer("exclusive", name="alice").close()
        topic = engine.topic("orders")
        epoch = 0
        for _ in range(2):
            claim = {"topic_epoch": epoch} if epoch else {}
            with topic.producer("exclusive", name="alice", **claim) as alice:
                epoch = alice.topic_epoch
                alice.send(b"x")
            time.sleep(0.002)
            for where in (silent, topic):
                with where.producer(name="bob") as bob, where.producer(name="alice") as alice:
                    for producer in (bob, alice, bob):
                        producer.send(b"z")
            time.sleep(0.002)
        for number in range(2):
            append_once(engine, Run("job", "run", "spark"), number, {"batches": [part]})
            with engine.topic("batches").producer(name="bob") as bob:
                bob.send(b"z")
        assert topic.epoch == 1
    assert [v for v in audit.run(spark, path) if not v.holds] == []


def test_who_wrote_while_another_held_the_topic_is_named() -> None:
    summary = Summary("orders")
    for record in (
        run_of(1, "a", 0, 9, messages=9, first_time=10, last_time=90),
        run_of(1, "b", 5, 5, first_time=50, last_time=50),
    ):
        summary.add(record)
    grant = Change(5, "orders", 1, "grant", "request", "a", "e", 1)
    for end, count in ((95, 1), (40, 0)):
        last = Change(end, "orders", 1, "release", "closed", "a", "e", 1)
        grants = judging.granted([grant, last])
        tenures = judging._tenures("orders", [grant, last], set(), {1})
        failed = [v.facts for v in judge(summary, grants, tenures) if not v.holds]
        assert failed == ["epoch 1: b in between"] * count
    tenures = judging._tenures("orders", [grant], {("orders", 1)}, {1})  # it holds it still
    assert any(v.facts == "epoch 1: b in between" for v in judge(summary, grants, tenures))


# ---- report ------------------------------------------------------------------------------


class Outline(HTMLParser):
    """What a page is made of, and what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags[tag] += 1
        if tag != "meta":
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert found.open == []
    assert found.loads == []
    return found


@pytest.mark.long
def test_the_report_is_one_page_with_its_pictures(spark, path, tmp_path) -> None:
    history(path)
    to = tmp_path / "report.html"
    told = report.run(spark, path, str(to))
    orders = next(story for story in told.stories if story.topic == "orders")
    assert [(t.producer, t.engine, t.why, t.messages) for t in orders.tenures] == [
        ("alice", "one", "closed", 1000),
        ("bob", "two", "closed", 1000),
        ("spark", "one", "superseded", 1000),
        ("bob", "two", "closed", 1),
    ]
    assert [t.epoch for t in orders.tenures] == [1, 2, 3, 4]
    assert sum(sum(buckets.values()) for buckets in orders.load.values()) == 3001
    text = to.read_text()
    found = outline(text)
    assert found.tags["figure"] == 2  # of orders, of chat
    assert "superseded" in text
    assert "every epoch is granted once" in text


@pytest.mark.long
def test_a_report_of_nothing_is_a_page_too(spark, path, tmp_path) -> None:
    fill(path, count=0)
    report.run(spark, path, str(tmp_path / "report.html"))
    outline((tmp_path / "report.html").read_text())
    with pytest.raises(SourceError, match="cannot be written"):
        report.run(spark, path, str(tmp_path / "not" / "there.html"))


def test_names_cannot_break_the_page() -> None:
    evil = '<script>alert("x")</script>&'
    tenures = [
        Tenure(1, evil, evil, 1, 1000, 2000, "dead", 5, 1000, 1990),
        Tenure(2, evil, evil, 2, 2005, None, "", 5, 2006, 3000),
    ]
    story = Story(evil, tenures, 10, 100, {evil: {1000: 5, 2000: 5}})
    text = page(LeaderReport(evil, [story], [leaders.Verdict(evil, "c", False, evil)], [16]))
    assert outline(text).tags["script"] == 3  # the chart's data, Plotly, and the page's own
    assert "16 ms" in text


@pytest.mark.long
def test_the_demo_draws_its_leaders(spark_home, tmp_path) -> None:
    to = tmp_path / "demo.html"
    out = io.StringIO()
    sound = demo.demo(
        Console(file=out, width=200),
        path=str(tmp_path / "log"),
        events=600,
        kills=2,
        seed=3,
        report=to,
    )
    assert sound, out.getvalue()
    assert "Spark's audit" in out.getvalue()
    assert outline(to.read_text()).tags["figure"] == 1


def test_without_java_the_demo_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(demo.DemoError, match="apt-get install openjdk-17"):
        demo.demo(Console(file=io.StringIO()), report=tmp_path / "demo.html")
    with pytest.raises(SourceError, match="apt-get install openjdk-17"):
        local_session()


# ---- commands ----------------------------------------------------------------------------


@pytest.fixture
def command(spark, monkeypatch, capsys):
    """Run a command in this session; (status, stdout, stderr)."""
    monkeypatch.setattr(commands, "_session", lambda given: _kept(spark))

    def run(*arguments: object) -> tuple[int, str, str]:
        status = commands.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


class _kept:  # noqa: N801
    def __init__(self, session) -> None:
        self._session = session

    def __enter__(self):
        return self._session

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.long
def test_the_commands(command, path, tmp_path) -> None:
    fill(path, count=10)
    status, said, told = command("archive", path, "orders", tmp_path / "a", "--before", 7)
    assert (status, "offsets 0 to 7 archived" in said, "offsets 0 to 6: " in told) == (
        0,
        True,
        True,
    )
    status, said, _ = command("compact", path, "orders", "--to", tmp_path / "c", "--quiet")
    assert (status, said) == (0, "orders before offset 10: 3 keys\n")
    status, said, told = command("replay", tmp_path / "a", "orders", tmp_path / "l2", "--quiet")
    assert (status, said, told) == (0, "7 messages replayed, offsets 0 to 7\n", "")
    status, said, _ = command("audit", path)
    assert (status, said.count("ok    \t"), len(said.splitlines())) == (0, 5, 5)
    status, said, _ = command("report", path, tmp_path / "r.html", "orders")
    assert (status, (tmp_path / "r.html").exists()) == (0, True)
    status, said, told = command("audit", tmp_path / "nothing")
    assert (status, said) == (1, "")
    assert "[EXCLUSIVELOG_LEDGER]" in told
    assert set(epochs(path, "orders")) == {1}  # none of them disturbs anybody


@pytest.mark.long
def test_an_audit_that_finds_something_says_so_by_its_status(command, path, monkeypatch) -> None:
    fill(path)
    monkeypatch.setattr(judging, "granted", lambda events: Counter())
    status, said, _ = command("audit", path)
    assert status == 1
    assert "FAILED\torders\tevery epoch is granted once" in said


@pytest.mark.long
def test_what_spark_passes_on_is_told_in_a_line(command, path, monkeypatch) -> None:
    fill(path)

    def read_on(spark, ledger, topic, number, start, stop, access):
        return read(spark, ledger, topic, number, start, stop + 1, access)

    from exclusivelog.spark import source

    read = source.read
    monkeypatch.setattr(source, "read", read_on)
    status, said, told = command("archive", path, "orders", f"{path}-archive", "--quiet")
    assert (status, said, len(told.splitlines())) == (1, "", 1)
    assert "[EXCLUSIVELOG_DATA_LOSS]" in told


def test_wrong_arguments_are_named(capsys) -> None:
    for arguments in (
        ["archive"],
        ["compact", "log", "orders"],
        ["audit", "l", "--conf", "x"],
        ["archive", "log", "orders", "to", "--keep", "inf"],
    ):
        with pytest.raises(SystemExit) as caught:
            commands.parse(arguments)
        assert caught.value.code == 2
    assert "NAME=VALUE" in capsys.readouterr().err
