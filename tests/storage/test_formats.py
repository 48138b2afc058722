"""Formats and versions (rule H2): a ledger that another version made is opened, upgraded, or
refused by a sentence that says what opens it; and two versions on one ledger are told apart before
either writes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import pytest

import exclusivelog as xl
import exclusivelog.aio
from exclusivelog import _core, opening
from exclusivelog.local import versions
from exclusivelog.local.records import NAMES
from exclusivelog.local.shm import lockfile, slots
from exclusivelog.local.versions import EARLIER_FORMATS, FORMAT
from testing.children import child, command, finish, line, tell
from testing.processes import PATIENCE, Worker, open_producer, send, workers

pytestmark = pytest.mark.once  # either durability leaves the same on the disk

STORED = sorted((Path(__file__).parent / "ledgers").glob("format-*.tar.xz"))
Fact = list[Any]


@dataclass
class Made:
    """A ledger that an earlier commit made, and what that version read from it."""

    path: str
    told: dict[str, Any]

    @property
    def format(self) -> int:
        return int(self.told["format"])


def unpack(archive: Path, where: Path) -> Made:
    with tarfile.open(archive) as file:
        file.extractall(where, filter="data")
    return Made(str(where / "log"), json.loads((where / "told.json").read_text()))


def stored(*formats: int) -> pytest.MarkDecorator:
    """The stored ledgers of these formats."""
    wanted = [path for path in STORED if int(path.name.split("-")[1]) in formats]
    return pytest.mark.parametrize(
        "archive", wanted, ids=[path.name.removesuffix(".tar.xz") for path in wanted]
    )


@pytest.fixture
def made(archive, tmp_path) -> Made:
    return unpack(archive, tmp_path)


def text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def fact(m: xl.Message) -> Fact:
    return [
        m.offset,
        m.epoch,
        text(m.key),
        text(m.value),
        dict(m.properties),
        m.publish_time,
        m.event_time,
        m.producer_name,
        m.sequence_id,
    ]


def messages(topic: xl.Topic, **options: Any) -> list[Fact]:
    with topic.reader(**options) as reader:
        return [fact(m) for m in reader]


def content(path: str) -> dict[str, bytes]:
    """All files that say what is in the ledger, and the lock file."""
    files = (file for file in Path(path).rglob("*") if file.is_file() and file.name != "lock.mdb")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def ledger_files(path: str) -> dict[str, bytes]:
    return {name: data for name, data in content(path).items() if name != "owners.lock"}


def check_messages(engine: xl.Engine, told: dict[str, Any]) -> None:
    """Every topic is as it was read by the version that made it."""
    names = [name for name in engine.topics() if not name.startswith("__")]
    assert names == sorted(told["topics"])
    for name, wanted in told["topics"].items():
        topic = engine.topic(name)
        assert (topic.epoch, topic.first_offset, topic.next_offset) == (
            wanted["epoch"],
            wanted["first"],
            wanted["next"],
        ), name
        assert messages(topic) == wanted["messages"], name
    assert engine.verify().problems == ()
    compacted = engine.topic("orders").reader(read_compacted=True)
    newer = [one for one in told["topics"]["orders"]["messages"] if one[0] > 21]
    assert [fact(m) for m in compacted] == told["compacted"] + newer


def check_writing(engine: xl.Engine, told: dict[str, Any]) -> None:
    """What goes on from what the ledger had: ids, epochs, groups, maps, seals."""
    orders, ids = engine.topic("orders"), engine.topic("ids")
    epoch = told["topics"]["orders"]["epoch"]
    with orders.producer("exclusive", name="next") as producer:
        assert producer.topic_epoch == epoch + 1
        assert producer.send(b"more") == told["topics"]["orders"]["next"]
    with ids.producer(name="numbered") as producer:
        assert producer.last_sequence_id == 2**40 + 1
        with pytest.raises(xl.DuplicateSequenceError):
            producer.send(b"again", sequence_id=2**40)
    topic, group, position = told["group"]
    assert engine.topic(topic).reader(group=group).position == position
    with pytest.raises(xl.TopicTerminatedError):
        engine.topic("sealed").producer()
    with xl.SharedMap(engine.topic("map")) as the_map:
        assert dict(the_map.items()) == told["map"]
        the_map.put("new", 1)
    with pytest.raises(xl.TopicNotFoundError):
        engine.topic("gone", create=False)
    claim = engine.own("group", {"partition": None})  # its owner is dead
    assert claim.generations == {"partition": told["claims"]["partition"] + 1}


def refusal(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(xl.LedgerVersionError) as caught:
        function(*args, **options)
    return str(caught.value)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("from exclusivelog.cli import main; main()", *arguments),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


# ---- what earlier commits made -------------------------------------------------------------


def test_h2_a_ledger_of_every_earlier_format_is_stored() -> None:
    formats = {int(path.name.split("-")[1]) for path in STORED}
    assert set(EARLIER_FORMATS) < formats
    assert set(versions.OPENED_BY) == set(range(1, FORMAT))
    assert all(path.stat().st_size < 40_000 for path in STORED)


@stored(3, 4)
def test_h2_a_stored_journal_has_what_its_tables_do_not_have(made) -> None:
    with lmdb.open(made.path, max_dbs=len(NAMES), readonly=True, lock=False, lib_version=0) as env:
        topics = env.open_db(b"topics", create=False)
        with env.begin(db=topics) as txn:
            rows = [_core.TopicRow.unpack(data) for _, data in txn.cursor()]
    behind = {row.name for row in rows} & {
        row.name
        for row in rows
        if row.name in made.told["topics"]
        and row.next_offset < made.told["topics"][row.name]["next"]
    }
    assert behind == {"orders", "ids"}


@stored(FORMAT)
def test_h2_a_ledger_of_this_format_opens_with_every_message(made) -> None:
    with xl.open(made.path, readonly=True) as engine:
        check_messages(engine, made.told)
    with xl.open(made.path) as engine:
        check_messages(engine, made.told)
        check_writing(engine, made.told)
    assert xl.upgrade(made.path).backup is None


@stored(*EARLIER_FORMATS)
def test_h2_an_earlier_format_is_read_without_a_change(made) -> None:
    # Counters of wake-ups are in a lock file of this version, and count.
    files = ledger_files if made.told["lock"] == versions.LOCK_VERSION else content
    before = files(made.path)
    with xl.open(made.path, readonly=True) as engine:
        check_messages(engine, made.told)
        assert engine.ledger.format == made.format
    assert files(made.path) == before


@stored(*EARLIER_FORMATS)
def test_h2_an_earlier_format_is_not_raised_by_opening_it(made) -> None:
    before = content(made.path)
    said = refusal(xl.open, made.path)
    assert f"{made.path} has ledger format {made.format}" in said
    assert f"Run `exclusivelog upgrade {made.path}`, or open it with readonly=True" in said
    assert versions.OPENED_BY[made.format] in said
    assert content(made.path) == before


@stored(*EARLIER_FORMATS)
def test_h2_an_upgrade_makes_a_backup_and_keeps_every_message(made) -> None:
    before = ledger_files(made.path)
    done = xl.upgrade(made.path)
    copy = f"{made.path}.format-{made.format}"
    assert done == xl.Upgrade(made.path, made.format, FORMAT, copy)
    assert ledger_files(copy) == before
    with xl.open(made.path) as engine:
        check_messages(engine, made.told)
        check_writing(engine, made.told)
    with xl.open(copy, readonly=True) as engine:
        assert engine.ledger.format == made.format
        check_messages(engine, made.told)
    assert xl.upgrade(made.path) == xl.Upgrade(made.path, FORMAT, FORMAT, None)


@stored(3)
def test_h2_a_url_is_no_place_for_the_backup(made, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = content(made.path)
    url = "pulsar://broker:6650/tenant/backup"
    with pytest.raises(ValueError, match=r"backup='pulsar:.*takes the name of a directory"):
        xl.upgrade(made.path, url)
    done = run("upgrade", made.path, "--backup", url)
    assert (done.returncode, "this is a URL" in done.stderr) == (1, True)
    assert content(made.path) == before
    assert not Path("pulsar:").exists()


@stored(8)
def test_h2_of_two_upgrades_at_once_one_does_it(made, monkeypatch) -> None:
    """The other one finds it done, and makes no backup of what is no old format any more."""
    alone = opening._alone

    def late(directory):
        monkeypatch.undo()
        finish("import sys, exclusivelog as xl; xl.upgrade(sys.argv[1])", made.path)
        return alone(directory)

    monkeypatch.setattr(opening, "_alone", late)
    assert xl.upgrade(made.path) == xl.Upgrade(made.path, FORMAT, FORMAT, None)
    there = Path(made.path).parent.glob("log*")
    assert sorted(each.name for each in there) == ["log", "log.format-8"]
    with xl.open(made.path) as engine:
        check_messages(engine, made.told)


@stored(3)
def test_h2_a_task_upgrades(made, tmp_path) -> None:
    done = asyncio.run(xl.aio.upgrade(made.path, tmp_path / "copy"))
    assert done == xl.Upgrade(made.path, 3, FORMAT, str(tmp_path / "copy"))
    with xl.open(made.path) as engine:
        check_messages(engine, made.told)


@pytest.mark.sampled
@stored(3)
def test_h2_the_command_upgrades_into_the_backup_that_it_is_given(made, tmp_path) -> None:
    refused = run("send", made.path, "orders", "x")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.count("\n") == 1
    assert "exclusivelog upgrade" in refused.stderr
    copy = str(tmp_path / "copy")
    done = run("upgrade", made.path, "--backup", copy)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{made.path} was upgraded from format 3 to {FORMAT}; backup: {copy}\n"
    with xl.open(made.path) as engine:
        check_messages(engine, made.told)
    with xl.open(copy, readonly=True) as engine:
        check_messages(engine, made.told)


@stored(1)
def test_h2_a_format_that_is_not_read_is_refused_by_what_opens_it(made) -> None:
    before = content(made.path)
    for attempt in (
        lambda: xl.open(made.path),
        lambda: xl.open(made.path, readonly=True),
        lambda: xl.upgrade(made.path),
    ):
        said = refusal(attempt)
        assert f"{made.path} has ledger format 1; exclusivelog {xl.__version__} opens" in said
        assert "It is opened by git commit 2576025 and those before it" in said
        assert "exclusivelog tail" in said
    assert content(made.path) == before
    assert not Path(f"{made.path}.format-1").exists()


# ---- an upgrade that does not come to its end ----------------------------------------------

UPGRADES = """
    import sys
    import exclusivelog as xl
    print(xl.upgrade(sys.argv[1]).backup)
"""
DIES_COPYING = """
    import os, signal, sys
    import exclusivelog as xl
    from exclusivelog.local.maintenance import backup
    copied = [0]
    def sendfile(*args, real=os.sendfile):
        copied[0] += 1
        if copied[0] == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    backup.os.sendfile = sendfile
    xl.upgrade(sys.argv[1])
"""
DIES_BEFORE_RAISING = """
    import os, signal, sys
    import exclusivelog as xl
    from exclusivelog import opening
    opening.raise_format = lambda directory: os.kill(os.getpid(), signal.SIGKILL)
    xl.upgrade(sys.argv[1])
"""


def killed(source: str, *args: object) -> None:
    with child(source, *args) as process:
        assert process.wait(PATIENCE) == -signal.SIGKILL


@pytest.fixture
def old(tmp_path) -> Made:
    """A ledger of format 3."""
    (archive,) = (path for path in STORED if "2503875" in path.name)
    return unpack(archive, tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize("copied", [1, 2, 3])
def test_h2_an_upgrade_killed_in_its_backup_changes_nothing_and_is_made_again(old, copied) -> None:
    before, copy = content(old.path), f"{old.path}.format-3"
    killed(DIES_COPYING, old.path, copied)
    assert content(old.path) == before
    with pytest.raises(xl.LedgerError, match="unfinished"):
        xl.open(copy, readonly=True)
    assert finish(UPGRADES, old.path) == f"{copy}\n"
    for path in (copy, old.path):
        with xl.open(path, readonly=True) as engine:
            check_messages(engine, old.told)


@pytest.mark.long
def test_h2_an_upgrade_killed_behind_its_backup_is_made_again_with_another(old) -> None:
    before, copy = content(old.path), f"{old.path}.format-3"
    killed(DIES_BEFORE_RAISING, old.path)
    assert content(old.path) == before
    assert finish(UPGRADES, old.path) == f"{copy}.2\n"
    for path in (copy, f"{copy}.2", old.path):
        with xl.open(path, readonly=True) as engine:
            check_messages(engine, old.told)


def test_h2_an_upgrade_needs_an_empty_place_for_its_backup(old, tmp_path) -> None:
    before = content(old.path)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_bytes(b"somebody's")
    for place, why in ((taken, "not empty"), (Path(old.path) / "in", "inside the ledger")):
        with pytest.raises(xl.LedgerError, match=why):
            xl.upgrade(old.path, place)
    with pytest.raises(ValueError, match="backup=''"):
        xl.upgrade(old.path, "")
    assert content(old.path) == before
    assert [file.name for file in taken.iterdir()] == ["file"]


def test_h2_a_damaged_ledger_is_upgraded_only_if_that_is_asked_for(old) -> None:
    (segment,) = (Path(old.path) / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    data[1000] ^= 1
    segment.write_bytes(data)
    before = content(old.path)
    with pytest.raises(xl.LedgerCorruptedError, match="was not upgraded: its backup shows damage"):
        xl.upgrade(old.path)
    assert content(old.path) == before
    done = xl.upgrade(old.path, despite_damage=True)
    assert (done.after, len(done.problems)) == (FORMAT, 1)
    assert "large" in done.problems[0]
    with xl.open(old.path) as engine:
        wanted = old.told["topics"]["orders"]["messages"]
        assert messages(engine.topic("orders")) == wanted


# ---- two versions at once ------------------------------------------------------------------

NEWER = "from tests.storage.versions import pretend, pretend_to_be_newer"
ATTEMPTS = f"""
    import sys
    import exclusivelog as xl
    {NEWER}
    {{pretended}}
    for attempt in (lambda: xl.open(sys.argv[1]), lambda: xl.open(sys.argv[1], readonly=True),
                    lambda: xl.upgrade(sys.argv[1])):
        try:
            attempt()
        except xl.LedgerVersionError as error:
            print(error)
        else:
            print("not refused")
"""
AS_NEWER_FORMAT = ATTEMPTS.format(pretended="pretend_to_be_newer()")
AS_OTHER_LOCK_FILE = ATTEMPTS.format(pretended="pretend(LOCK_VERSION=77, __version__='9.8')")


@pytest.fixture
def owner(tmp_path) -> Iterator[Worker]:
    """A process of this version that owns the topic "orders"."""
    with workers() as make:
        worker = make(str(tmp_path / "log"), name="veteran")
        worker.call(open_producer, "exclusive", name="owner")
        worker.call(send, b"before")
        yield worker


@pytest.mark.parametrize("attempts", [AS_NEWER_FORMAT, AS_OTHER_LOCK_FILE])
def test_h2_a_newcomer_of_another_version_is_refused_by_who_lives(owner, attempts) -> None:
    lock = os.stat(Path(owner.path) / "owners.lock").st_ino
    said = finish(attempts, owner.path).splitlines()
    assert len(said) == 3
    for refused in said:
        assert f"pid {owner.pid} ('veteran', exclusivelog {xl.__version__})" in refused
        assert "exclusivelog 9.8" in refused
    assert owner.call(send, b"after") == 1
    assert os.stat(Path(owner.path) / "owners.lock").st_ino == lock
    owner.kill()
    with xl.open(owner.path) as engine:
        assert [m.value for m in engine.topic("orders").reader()] == [b"before", b"after"]
    assert not Path(f"{owner.path}.format-{FORMAT}").exists()


def test_h2_a_process_with_another_c_library_is_refused_by_who_lives(owner) -> None:
    """Their mutexes in the lock file would exclude neither from what the other does."""
    source = ATTEMPTS.format(pretended=f"pretend(LOCK_VERSION={versions.LOCK_VERSION ^ 128})")
    said = finish(source, owner.path).splitlines()
    assert len(said) == 3
    for refused in said:
        assert "processes with another C library (glibc or musl), whose mutexes differ" in refused
        assert f"pid {owner.pid} ('veteran', exclusivelog {xl.__version__})" in refused
    assert owner.call(send, b"after") == 1


def test_h2_this_version_is_refused_by_a_newer_one_that_lives(tmp_path) -> None:
    path = str(tmp_path / "log")
    source = f"""
        import sys
        import exclusivelog as xl
        {NEWER}
        pretend_to_be_newer()
        pretend(LOCK_VERSION=77)
        with xl.open(sys.argv[1], name="novel") as engine:
            producer = engine.topic("t").producer("exclusive")
            producer.send(b"1")
            print("ready", flush=True)
            sys.stdin.readline()
            print(producer.send(b"2"), flush=True)
            sys.stdin.readline()
    """
    with child(source, path) as process:
        assert line(process) == "ready"
        for readonly in (False, True):
            said = refusal(xl.open, path, readonly=readonly)
            assert f"pid {process.pid} ('novel', exclusivelog 9.8)" in said
        tell(process)
        assert line(process) == "1"
        tell(process)
        process.wait(PATIENCE)
    for attempt in (xl.open, xl.upgrade):
        said = refusal(attempt, path)
        assert f"ledger format {FORMAT + 1}" in said
        assert "Open it with exclusivelog 9.8 or newer" in said


@pytest.mark.long
def test_h2_the_lock_file_of_another_version_is_replaced_once_no_engine_uses_it(tmp_path) -> None:
    path = str(tmp_path / "log")
    source = f"""
        import sys
        import exclusivelog as xl
        {NEWER}
        pretend(LOCK_VERSION=77)
        with xl.open(sys.argv[1]) as engine, engine.topic("t").producer() as producer:
            print(producer.send(b"x"))
    """
    assert finish(source, path) == "0\n"
    other = content(path)["owners.lock"]
    assert other[7] == 77
    with xl.open(path, readonly=True) as engine:
        assert [m.value for m in engine.topic("t").reader()] == [b"x"]
    assert content(path)["owners.lock"] == other
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        assert producer.send(b"y") == 1
    assert content(path)["owners.lock"][7] == versions.LOCK_VERSION
    assert finish(source, path) == "2\n"


def test_h2_a_reader_of_another_lock_file_keeps_its_words(tmp_path) -> None:
    """A writer would replace them; another reader changes nothing."""
    path = str(tmp_path / "log")
    source = f"""
        import sys
        import exclusivelog as xl
        {NEWER}
        pretend(LOCK_VERSION=77)
        with xl.open(sys.argv[1]) as engine, engine.topic("t").producer() as producer:
            producer.send(b"x")
        with xl.open(sys.argv[1], readonly=True) as engine:
            print("ready", flush=True)
            sys.stdin.readline()
            print([m.value for m in engine.topic("t").reader()], flush=True)
    """
    with child(source, path) as process:
        assert line(process) == "ready"
        lock = content(path)["owners.lock"]
        assert f"in use by another version of exclusivelog: pid {process.pid}" in refusal(
            xl.open, path
        )
        with xl.open(path, readonly=True) as engine:
            assert [m.value for m in engine.topic("t").reader()] == [b"x"]
        assert content(path)["owners.lock"] == lock
        tell(process)
        assert line(process) == "[b'x']"
    with xl.open(path) as engine:
        assert [m.value for m in engine.topic("t").reader()] == [b"x"]


NEWER_UPGRADES = f"""
    import sys
    import exclusivelog as xl
    {NEWER}
    from exclusivelog import opening
    pretend_to_be_newer()
    real = opening.raise_format
    def raise_format(directory):
        print("backed up", flush=True)
        sys.stdin.readline()
        real(directory)
    opening.raise_format = raise_format
    opening.ALONE_SECONDS = 0.2
    try:
        print(xl.upgrade(sys.argv[1]).after, flush=True)
    except xl.LedgerVersionError as error:
        print(error, flush=True)
"""


@pytest.mark.long
def test_h2_an_upgrade_needs_the_ledger_alone_also_from_readers(tmp_path) -> None:
    path = str(tmp_path / "log")
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(b"x")
    with xl.open(path, readonly=True) as engine:
        said = finish(NEWER_UPGRADES, path)
        assert f"in use by pid {os.getpid()}" in said
        assert "No engine may have it open" in said
        assert [m.value for m in engine.topic("t").reader()] == [b"x"]
    with child(NEWER_UPGRADES, path) as process:
        assert line(process) == "backed up"
        tell(process)
        assert line(process) == str(FORMAT + 1)


def test_h2_no_engine_comes_in_while_a_ledger_is_upgraded(tmp_path, monkeypatch) -> None:
    path = str(tmp_path / "log")
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(b"x")
    monkeypatch.setattr(lockfile, "OPENING_TIMEOUT", 0.2)
    with child(NEWER_UPGRADES, path) as process:
        assert line(process) == "backed up"
        before = content(path)
        with pytest.raises(xl.LedgerError, match=rf"been locked .* by process {process.pid} "):
            xl.open(path)
        assert content(path) == before
        tell(process)
        assert line(process) == str(FORMAT + 1)
    assert f"ledger format {FORMAT + 1}" in refusal(xl.open, path)


def test_h2_an_engine_of_this_process_is_in_the_way_of_an_upgrade(old) -> None:
    with xl.open(old.path, readonly=True):
        assert "is open in this process" in refusal(xl.upgrade, old.path)
    assert xl.upgrade(old.path).after == FORMAT


# ---- what versions know of each other ------------------------------------------------------


def test_h2_earlier_versions_see_by_a_flock_that_an_engine_lives(engine, path) -> None:
    """They remove the lock file of a later version unless the journal is locked so."""
    with contextlib.closing(os.fdopen(os.open(f"{path}/journal", os.O_RDONLY), "rb")) as journal:
        with pytest.raises(BlockingIOError):
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        engine.close()
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with xl.open(path) as again:  # which another program's lock does not keep from opening
            assert again.verify().ok


def test_h2_the_places_that_all_versions_share_are_the_lock_files_own() -> None:
    found = (versions.SLOTS, versions.SLOT_COUNT, versions.SLOT_SIZE, versions.INFO)
    assert found == (slots.SLOTS, slots.SLOT_COUNT, slots.SLOT_SIZE, slots.INFO)
    slot = bytearray(versions.SLOT_SIZE)
    for at, value in ((slots.ALIVE, 1), (slots.PID, 2), (slots.ENGINE, 3), (slots.INFO_SIZE, 4)):
        slot[at] = value
    alive, pid, _, engine, _, size = versions.SLOT.unpack_from(slot)
    assert (alive, pid, engine, size) == (1, 2, 3, 4)


def test_h2_an_earlier_format_is_read_where_it_lacks_a_table(old) -> None:
    with lmdb.open(old.path, max_dbs=len(NAMES), lock=False, lib_version=0) as env:
        with env.begin(write=True) as txn:
            for name in (b"fences", b"batches", b"transfers"):
                txn.drop(env.open_db(name, txn=txn, create=False))
    with xl.open(old.path, readonly=True) as engine:
        check_messages(engine, old.told)
    assert xl.upgrade(old.path).after == FORMAT
    with xl.open(old.path) as engine:
        check_messages(engine, old.told)
        check_writing(engine, old.told)


def test_h2_a_table_that_this_format_has_is_missed(path) -> None:
    with xl.open(path):
        pass
    with lmdb.open(path, max_dbs=len(NAMES), lock=False, lib_version=0) as env:
        with env.begin(write=True) as txn:
            txn.drop(env.open_db(b"views", txn=txn, create=False))
    for readonly in (False, True):
        with pytest.raises(xl.LedgerCorruptedError, match="lacks tables"):
            xl.open(path, readonly=readonly)


def test_h2_a_new_ledger_says_which_library_made_it(path) -> None:
    with xl.open(path):
        pass
    with lmdb.open(path, max_dbs=len(NAMES), readonly=True, lib_version=0) as env:
        with env.begin() as txn:
            header = msgpack.unpackb(txn.get(b"format", db=env.open_db(b"meta", txn=txn)))
    assert (header["version"], header["library"]) == (FORMAT, xl.__version__)
    assert re.fullmatch("[0-9a-f]{32}", header["uuid"])
    shutil.rmtree(path)
