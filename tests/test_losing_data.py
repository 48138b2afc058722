"""How to lose data: each claim of docs/losing-data.md that no other test file backs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.children import finish
from testing.journals import flip, frames, no_checkpoints
from testing.processes import PATIENCE, Failed, open_producer, send, values

pytestmark = pytest.mark.once


def fill(engine: xl.Engine, count: int = 5) -> list[bytes]:
    """Some messages that are in no table yet."""
    sent = [b"%d" % number for number in range(count)]
    with engine.topic("orders").producer() as producer:
        for value in sent:
            producer.send(value)
    return sent


def abandoned(path: str) -> None:
    """A process has left its messages in the journal with a sudden death."""
    finish(
        """
        import os, sys
        import exclusivelog as xl
        from testing.journals import no_checkpoints
        from tests.test_losing_data import fill
        engine = xl.open(sys.argv[1], durability="power")
        no_checkpoints(engine).__enter__()
        fill(engine)
        os._exit(0)
        """,
        path,
    )


@pytest.mark.long
def test_h1_without_its_journal_a_ledger_is_refused_until_that_is_given_up(path) -> None:
    """What was acknowledged last may have been only there."""
    abandoned(path)
    (Path(path) / "journal").unlink()
    for options in ({}, {"readonly": True}):
        with pytest.raises(xl.LedgerCorruptedError, match="journal was removed"):
            xl.open(path, **options)
    (Path(path) / "journal-given-up").touch()
    with xl.open(path) as engine:
        assert values(engine.topic("orders")) == []
        assert engine.verify().ok
    assert not (Path(path) / "journal-given-up").exists()


@pytest.mark.sampled
@pytest.mark.parametrize("size", [0, 4096, 1 << 20])
def test_h2_a_journal_that_was_cut_off_is_refused_until_that_is_given_up(path, size) -> None:
    """By logrotate's `copytruncate`, for example."""
    abandoned(path)
    journal = Path(path) / "journal"
    os.truncate(journal, size)
    for options in ({}, {"readonly": True}):
        with pytest.raises(xl.LedgerCorruptedError, match=f"was cut off after {size} bytes"):
            xl.open(path, **options)
    journal.rename(Path(path) / "journal.1")
    (Path(path) / "journal-given-up").touch()
    with xl.open(path) as engine:
        assert values(engine.topic("orders")) == []
    assert (Path(path) / "journal.1").stat().st_size == size  # which is not the library's to remove


@pytest.mark.long
def test_h1_a_journal_is_not_given_up_before_it_is_lost(path) -> None:
    """The marker stayed from a time when the journal could be put back."""
    abandoned(path)
    marker, journal = Path(path) / "journal-given-up", Path(path) / "journal"
    marker.touch()
    with xl.open(path) as engine:
        assert len(values(engine.topic("orders"))) == 5
    assert not marker.exists()
    abandoned(path)
    journal.rename(Path(path) / "journal.1")  # by logrotate, for example
    with pytest.raises(xl.LedgerCorruptedError, match="journal was removed"):
        xl.open(path)
    (Path(path) / "journal.1").rename(journal)
    with xl.open(path) as engine:
        assert len(values(engine.topic("orders"))) == 10


def test_h2_segments_that_are_removed_under_an_engine_are_named(path) -> None:
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send_many([b"x" * 1000] * 1000)
        shutil.rmtree(Path(path) / "segments")
        with pytest.raises(xl.LedgerError, match="segments was removed"):
            producer.send_many([b"x" * 1000] * 1000)
        assert producer.send(b"in the journal") == 1000


def test_h2_a_journal_that_is_replaced_under_living_engines_is_refused(path, worker) -> None:
    other = worker()
    other.call(open_producer, "exclusive")
    other.call(send, b"x")
    journal = Path(path) / "journal"
    shutil.copyfile(journal, journal.with_suffix(".new"))
    os.replace(journal.with_suffix(".new"), journal)
    with pytest.raises(xl.LedgerError, match="was replaced while"):
        xl.open(path)


def test_h1_a_backup_has_what_a_copy_may_lack(path, tmp_path) -> None:
    """`cp` of a ledger in use copies its files at different times; backup() at one."""
    with xl.open(path) as engine, no_checkpoints(engine):
        sent = fill(engine)
        torn = tmp_path / "torn"
        torn.mkdir()
        shutil.copy(Path(path) / "data.mdb", torn)
        engine.backup(tmp_path / "backup")
    with pytest.raises(xl.LedgerCorruptedError, match="journal was removed"):
        xl.open(torn)
    (torn / "journal-given-up").touch()
    with xl.open(torn) as engine:  # the journal's moment never came
        assert engine.topics() in ([], ["orders"])
        assert "orders" not in engine.topics() or values(engine.topic("orders")) == []
    with xl.open(tmp_path / "backup") as engine:
        assert values(engine.topic("orders")) == sent


def test_b1_an_older_backup_put_back_takes_the_epochs_back(path, tmp_path) -> None:
    with xl.open(path) as engine:
        engine.topic("orders").producer("exclusive").close()
        engine.backup(tmp_path / "backup")
        with engine.topic("orders").producer("exclusive") as producer:
            assert producer.topic_epoch == 2
    with xl.open(tmp_path / "backup") as engine:
        with engine.topic("orders").producer("exclusive") as producer:
            assert producer.topic_epoch == 2  # once more


def test_h1_what_a_process_ledger_sent_last_is_lost_with_the_power(path, tmp_path) -> None:
    """As promised: never a gap, never damage."""
    with xl.open(path, durability="process") as engine, no_checkpoints(engine):
        fill(engine)
        last = frames(engine)[-1]
        copy = tmp_path / "copy"
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("owners.lock", "lock.mdb"))
    with open(copy / "journal", "r+b") as file:  # its block was never written
        file.seek(last.at)
        file.write(bytes(64 + len(last.entry)))
    with xl.open(copy) as engine:
        assert values(engine.topic("orders")) == [b"0", b"1", b"2", b"3"]
        assert engine.verify().ok


def test_g9_a_value_changed_by_hand_is_never_read(path) -> None:
    with xl.open(path) as engine, no_checkpoints(engine):
        fill(engine)
        flip(path, frames(engine)[2].entry_at + 8)
        with pytest.raises(xl.LedgerCorruptedError):
            values(engine.topic("orders"))


IN_ANOTHER_NAMESPACE = """
import sys
import exclusivelog as xl
try:
    xl.open(sys.argv[1])
except xl.LedgerError as error:
    print(error)
"""


@pytest.mark.long
def test_h2_another_pid_namespace_is_refused(engine, path) -> None:
    words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    done = subprocess.run(
        [*words, IN_ANOTHER_NAMESPACE, path],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no pid namespace can be made here: {done.stderr.strip()}")
    assert "must share a pid namespace" in done.stdout


def test_b3_a_lock_file_removed_under_a_living_owner_is_not_made_anew(path, worker) -> None:
    """Two lock files are two worlds: in each there would be an owner, and the messages of one
    would be lost, although they were acknowledged."""
    other = worker()
    other.call(open_producer, "exclusive")
    other.call(send, b"x")
    (Path(path) / "owners.lock").unlink()
    for _ in range(2):
        with pytest.raises(xl.LedgerError, match="was removed while engines use the ledger"):
            xl.open(path)
    with xl.open(path, readonly=True) as looking:
        assert values(looking.topic("orders")) == [b"x"]
    acknowledged = [b"x"]

    def send_on() -> None:
        while True:
            other.call(send, b"y")
            acknowledged.append(b"y")

    with pytest.raises(Failed, match=r"owners\.lock was re"):  # removed, or replaced by the others
        send_on()
    other.kill()
    with xl.open(path) as engine, engine.topic("orders").producer("exclusive") as producer:
        assert producer.send(b"z") >= len(acknowledged)
        found = values(engine.topic("orders"))
        assert found[: len(acknowledged)] == acknowledged
        assert found[-1] == b"z"
