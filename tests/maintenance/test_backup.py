"""A backup that is made beside everything else: what it has is of one moment (rules B1, G3, H1).

It copies tables, segments and journal one after the other. What another process does between
two of them must not show: neither as a hole, nor as a backup that cannot be opened.

A backup that is killed, finds no room, or is still being made can neither be opened nor verified,
and a second run succeeds (rule H4). Processes that make one are killed at system calls and at
random; the judge must turn red where the copy is made without its marker, or is not flushed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.files import Directory
from exclusivelog.local.maintenance import backup
from exclusivelog.local.storage import opening, segments
from exclusivelog.local.storage.environment import UNFINISHED_BACKUP
from testing.children import PATIENCE, child, finish, line, tell
from testing.disks import disk, leave, needs_strace
from testing.journals import no_checkpoints, small_journal
from testing.processes import State, collect, open_producer, send, values
from testing.strace import Point
from tests.maintenance.backups import (
    UNMARKED,
    UNSYNCED,
    WAYS,
    backup_server,
    deaths,
    die_at,
    ext4,
    fill,
    judge,
    judge_both,
    make_again,
    message,
    sending,
    whats_wrong,
)

BEFORE = [b"%d" % number for number in range(5)]


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`around(step, before, behind)` has functions called each time that a backup begins a step,
    and when it has done it."""

    def strike(step: str, before: Callable[[], object], behind: Callable[[], object]) -> None:
        original = getattr(backup, step)

        def struck(*args: Any) -> Any:
            before()
            result = original(*args)
            behind()
            return result

        monkeypatch.setattr(backup, step, struck)

    return strike


def make_a_topic(state: State) -> None:
    state.engine.topic("new").producer().send(b"first of a new topic")


def send_a_large_batch(state: State) -> None:
    assert state.producer is not None
    state.producer.send_many([bytes(100_000), bytes(100_000)])
    state.producer.send(b"behind it")


def commit_a_large_transaction(state: State) -> None:
    with state.engine.transaction() as txn:
        state.producer.send(bytes(200_000), transaction=txn)
    state.producer.send(b"behind it")


def change_the_owner(state: State) -> None:
    open_producer(state, "exclusive_with_fencing")
    send(state, b"of the next owner")


def make_it_anew(state: State) -> None:
    state.producer.close()
    state.engine.delete_topic("orders")
    state.engine.topic("orders").producer().send(b"of another topic")


CHANGES = [
    make_a_topic,
    send_a_large_batch,
    commit_a_large_transaction,
    change_the_owner,
    make_it_anew,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_h1_a_backup_is_of_one_moment(path, worker, around, tmp_path, change) -> None:
    """The journal is copied last, and has what was sent to a topic, by an owner, or behind a
    batch that the copied tables know nothing of."""
    other = worker()
    other.call(open_producer, "exclusive")
    for value in BEFORE:
        other.call(send, value)
    around("_copy_tables", int, lambda: other.call(change))
    with xl.open(path) as engine:
        engine.backup(tmp_path / "copy")
    with xl.open(tmp_path / "copy") as copy:
        assert copy.topics() == ["orders"]
        assert values(copy.topic("orders")) == BEFORE
        assert copy.verify().ok
        with copy.topic("orders").producer("exclusive") as producer:
            assert producer.topic_epoch == 2
            assert producer.send(b"next") == len(BEFORE)


def send_much(state: State) -> None:
    """More than a journal has room for."""
    for _ in range(200):
        state.producer.send(bytes(60_000))


def test_h1_a_backup_beside_one_who_sends_fast_is_none_without_messages(
    path, worker, around, tmp_path, monkeypatch
) -> None:
    """Each time that the tables are copied, the journal has been around meanwhile. A backup that
    gave up returned as if it had succeeded, and there was an empty directory."""
    monkeypatch.setattr(backup, "MOST_ATTEMPTS", 3)
    other = worker(durability="process")
    other.call(open_producer, "exclusive")
    for value in BEFORE:
        other.call(send, value)
    around("_copy_tables", int, lambda: other.call(send_much))
    with xl.open(path) as engine:
        engine.backup(tmp_path / "copy")
    with xl.open(tmp_path / "copy", create=False) as copy:
        assert values(copy.topic("orders"))[: len(BEFORE)] == BEFORE
        assert copy.verify().ok


def begin_a_segment(state: State) -> None:
    with state.engine.topic("large").producer() as producer:
        producer.send(bytes(200_000))


def remove_it(state: State) -> None:
    state.engine.delete_topic("large")


def test_g9_a_segment_that_comes_and_goes_beside_a_backup_is_no_damage(
    path, worker, around, tmp_path
) -> None:
    """It is begun when the backup has opened all segments, and removed when the copied tables
    refer to it."""
    other = worker()
    other.call(open_producer, "exclusive")
    for value in BEFORE:
        other.call(send, value)
    once = iter([begin_a_segment, remove_it])

    def strike() -> None:
        for function in itertools.islice(once, 1):
            other.call(function)

    around("_copy_tables", strike, strike)
    with xl.open(path) as engine:
        engine.backup(tmp_path / "copy")
    with xl.open(tmp_path / "copy") as copy:
        assert values(copy.topic("orders")) == BEFORE
        assert copy.verify().ok


# ---- H4: complete or refused -------------------------------------------------------------

COUNT = 140  # messages: some in the tables, some in two segments, some only in the journal
MOST_SENT = 500  # messages beside one backup, which rarely takes so long


@pytest.fixture
def source(tmp_path, monkeypatch) -> Iterator[xl.Engine]:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 400_000)
    path = tmp_path / "source"
    with small_journal(), xl.open(path, durability="process") as engine:
        fill(engine, 120)
    with xl.open(path, durability="process") as engine, no_checkpoints(engine):
        fill(engine, COUNT - 120)
        assert len(os.listdir(path / "segments")) == 2
        assert engine.ledger.journal.backlog
        yield engine


def most(request: pytest.FixtureRequest, sample: int) -> int:
    return -1 if request.config.getoption("--every-crash") else sample


def path_of(engine: xl.Engine) -> Path:
    return Path(engine.path)


@pytest.mark.long
@needs_strace
@pytest.mark.timeout(1800)  # with --every-crash
def test_h4_a_backup_killed_at_a_system_call_is_complete_or_refused(
    source, tmp_path, request
) -> None:
    opened = died = 0
    with backup_server(path_of(source)) as one:
        found = deaths(one, tmp_path, most(request, 40))
        for number, point in enumerate(found):
            target = tmp_path / f"copy-{number}"
            died += die_at(one, target, point)
            verdict = judge_both(path_of(source), target, lambda: COUNT, COUNT)
            assert verdict.problems == [], str(point)
            opened += verdict.opened
            shutil.rmtree(target)
    print(f"\n{len(found)} points, {died} deaths, {opened} complete")
    assert died >= len(found) * 2 // 3
    assert opened < died


@pytest.mark.long
@needs_strace
@pytest.mark.timeout(1800)  # with --every-crash
def test_h4_a_backup_killed_beside_a_writer_has_all_or_is_refused(source, tmp_path, request):
    died = 0
    with backup_server(path_of(source), readonly=False) as one, sending(source) as sender:
        for number, point in enumerate(deaths(one, tmp_path, most(request, 30))):
            target = tmp_path / f"copy-{number}"
            count = sender.acknowledged
            with sender.at_work(MOST_SENT):
                died += die_at(one, target, point)
            verdict = judge_both(path_of(source), target, lambda: sender.acknowledged, count)
            assert verdict.problems == [], str(point)
            shutil.rmtree(target)
    assert died >= 20


@pytest.mark.long
def test_h4_a_backup_killed_at_random_has_all_or_is_refused(source, tmp_path) -> None:
    began, dice, left = time.monotonic(), random.Random(), {True: 0, False: 0}
    with backup_server(path_of(source), readonly=False) as one, sending(source) as sender:
        one.run(tmp_path / "whole")
        lasts = time.monotonic() - began
        for number in itertools.count():
            if number >= 30 and left[False]:
                break
            target = tmp_path / f"copy-{number}"
            pid, count = one.start(target), sender.acknowledged
            with sender.at_work(MOST_SENT), ThreadPoolExecutor(1) as pool:
                ending = pool.submit(one.end)
                time.sleep(dice.random() * min(lasts, 0.1))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                ending.result(PATIENCE)
            verdict = judge_both(path_of(source), target, lambda: sender.acknowledged, count)
            assert verdict.problems == []
            left[verdict.opened] += 1
            shutil.rmtree(target)
    print(f"\n{left}")


@pytest.mark.long
@needs_strace
def test_h4_the_judge_finds_a_backup_without_its_marker_that_was_killed(source, tmp_path) -> None:
    """The control: the copy is made where it is to be, as it used to be."""
    wanted = ("acknowledged messages are missing", "a second run was refused")
    problems: list[str] = []
    with backup_server(path_of(source), defect=UNMARKED) as one:
        for number, point in enumerate(deaths(one, tmp_path, -1)):
            target = tmp_path / f"copy-{number}"
            if die_at(one, target, point):
                problems += judge_both(path_of(source), target, lambda: COUNT, COUNT).problems
            told = "\n".join(problems)
            if all(text in told for text in wanted):
                return
    assert [text for text in wanted if text not in told] == []


@pytest.mark.long
@needs_strace
@pytest.mark.timeout(1800)  # with --every-crash
def test_h4_a_backup_that_loses_its_power_is_complete_or_refused(source, tmp_path, request) -> None:
    """The process is killed, or ends, and the target's disk loses what was not flushed."""
    died = ended = 0
    with ext4(tmp_path) as target_disk, backup_server(path_of(source)) as one:
        copy = target_disk.path / "new" / "copy"
        found: list[Point | None] = [*deaths(one, tmp_path, most(request, 40)), None, None]
        for point in found:
            killed = die_at(one, copy, point) if point else one.run(copy)[0] != 0
            target_disk.cut_power()
            verdict = judge_both(path_of(source), copy, lambda: COUNT, COUNT)
            assert verdict.problems == [], str(point)
            assert killed or verdict.opened, "a backup that had succeeded is gone"
            died += killed
            ended += not killed
            shutil.rmtree(copy.parent)
    assert died >= 20
    assert ended >= 2


@pytest.mark.long
def test_h4_the_judge_finds_a_backup_that_was_not_flushed(source, tmp_path) -> None:
    """The control of the one above."""
    with ext4(tmp_path) as target_disk, backup_server(path_of(source), defect=UNSYNCED) as one:
        copy = target_disk.path / "copy"
        assert one.run(copy) == (0, "")
        target_disk.cut_power()
        verdict = judge(copy, COUNT)
        assert not verdict.opened or verdict.problems


# ---- H4: full disks, failing disks, interrupts -------------------------------------------


def refused_in_every_way(target: Path) -> None:
    assert (target / UNFINISHED_BACKUP).is_dir()
    verdict = judge(target, 0)
    assert (verdict.opened, verdict.problems) == (False, [])


def nothing_but_the_marker(target: Path) -> None:
    assert os.listdir(target) == [UNFINISHED_BACKUP]
    assert os.listdir(target / UNFINISHED_BACKUP) in ([], ["lock"])


def complete(target: Path, count: int = COUNT) -> None:
    verdict = judge(target, count)
    assert verdict.opened
    assert verdict.problems == []
    assert not (target / UNFINISHED_BACKUP).exists()


@pytest.mark.long
def test_h4_a_backup_onto_a_full_disk_is_refused_until_there_is_room(source, tmp_path) -> None:
    """The target is a mount point. The disk is full at the tables, the segments, the journal."""
    with disk(tmp_path / "probe", 64) as where:
        source.backup(where)
        files = [where / "data.mdb", *sorted((where / "segments").iterdir()), where / "journal"]
        sizes = [file.stat().st_size for file in files]
    room = [
        0,
        4096,
        *(sum(sizes[:n]) + sizes[n] // 2 for n in range(len(sizes))),
        sum(sizes) - 4096,
    ]
    for number, free in enumerate(room):
        with disk(tmp_path / f"small-{number}", 8) as where:
            ballast = tmp_path / f"small-{number}" / "held"
            where = where / "copy"
            where.mkdir()
            leave(ballast.parent, free)
            with pytest.raises(xl.LedgerFullError, match="run it again"):
                source.backup(where)
            if os.listdir(where):
                refused_in_every_way(where)
                nothing_but_the_marker(where)
            (ballast.parent / "ballast").unlink()
            source.backup(where)
            complete(where)
    source.topic("orders").producer().send(b"the ledger goes on")


def test_h4_a_mount_point_takes_a_backup(source, tmp_path) -> None:
    """And one in memory, with no room for it first."""
    copy = tmp_path / "copy"
    with disk(tmp_path / "disk", 0.5, "tmpfs") as where:
        with pytest.raises(xl.LedgerFullError):
            source.backup(where)
        refused_in_every_way(where)
        subprocess.run(["mount", "-o", "remount,size=64m", where], check=True, timeout=PATIENCE)
        source.backup(where)
        shutil.copytree(where, copy)  # memory cannot keep `power`, and is refused for it
    complete(copy)


FAILS = ["mkdir", "mkdirat", "flock", "fsync", "sendfile", "rename", "unlinkat", "pwrite64"]


@pytest.mark.long
@needs_strace
@pytest.mark.parametrize("call", FAILS)
def test_h4_a_backup_whose_disk_fails_is_refused(source, tmp_path, call) -> None:
    """At the first, second, ... call of a kind, until it does not come so far."""
    failed = 0
    with backup_server(path_of(source)) as one:
        for when in range(1, 30):
            target = tmp_path / f"copy-{when}"
            inject = f"inject={call}:error=EIO:when={when}"
            status, error = one.run(
                target, strace=("-o", os.devnull, "-e", f"trace={call}", "-e", inject)
            )
            count = 0 if status else COUNT
            verdict = judge_both(path_of(source), target, lambda: COUNT, count)
            assert verdict.problems == []
            if status == 0:
                break
            failed += 1
            assert error.startswith("LedgerIOError: "), error
            assert str(tmp_path) in error
    assert status == 0
    assert failed


# What a test needs to stop a backup in the middle.
HOLDS = """
    import os, select, sys
    import exclusivelog as xl
    from exclusivelog.local.maintenance import backup
    original = backup._copy_segments
    def await_line():
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            pass  # a signal that comes right before a call that waits does not end it
        sys.stdin.readline()
    def held(*args):
        os.write(1, b"inside\\n")  # at once, also where PYTHONUNBUFFERED is set: another may print
        await_line()
        return original(*args)
    backup._copy_segments = held
"""

INTERRUPTED = """
    with xl.open(sys.argv[1], readonly=True) as engine:
        try:
            engine.backup(sys.argv[2])
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        backup._copy_segments = original
        sys.stdin.readline()
        engine.backup(sys.argv[2])
        print("made", flush=True)
"""


@pytest.mark.long
def test_h4_a_backup_that_is_interrupted_is_refused_and_made_again(source, tmp_path) -> None:
    """Ctrl-C, in the process that makes it again."""
    target = tmp_path / "copy"
    with child(HOLDS + INTERRUPTED, source.path, target) as process:
        assert line(process) == "inside"
        refused_in_every_way(target)
        process.send_signal(signal.SIGINT)
        assert line(process) == "interrupted"
        nothing_but_the_marker(target)
        refused_in_every_way(target)
        tell(process)
        assert line(process) == "made"
    complete(target)


def run_interrupted(source: xl.Engine, target: Path, strike: int) -> tuple[int, bool]:
    """Make a backup, and raise KeyboardInterrupt before the `strike`-th of its lines: how many
    there were, and whether it was raised."""
    files, lines = (backup.__file__, backup.__file__), 0

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal lines
        finalizer = "__del__" in (frame.f_code.co_name, frame.f_back.f_code.co_name)
        if frame.f_code.co_filename not in files or finalizer:  # Python drops what that raises
            return None
        if event == "line":
            lines += 1
            if lines == strike:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        source.backup(target)
    except KeyboardInterrupt:
        return lines, True
    finally:
        sys.settrace(before)
    return lines, False


@pytest.mark.long
@pytest.mark.once
def test_h4_a_backup_interrupted_at_any_line_is_complete_or_refused(
    source, tmp_path, request
) -> None:
    """And leaves no lock behind in the process, which makes it again."""
    lines, _ = run_interrupted(source, tmp_path / "whole", -1)
    assert lines > 100
    every = range(1, lines + 1)
    sample = most(request, 20)
    strikes, opened = every if sample < 0 else random.sample(every, sample), 0
    for strike in strikes:
        target = tmp_path / f"copy-{strike}"
        _, struck = run_interrupted(source, target, strike)
        assert struck
        collect()  # the frames that it went through
        verdict = judge(target, COUNT)
        opened += verdict.opened
        assert verdict.problems == [], strike
        if not verdict.opened:
            source.backup(target)
            complete(target)
        shutil.rmtree(target)
    assert opened < len(strikes) / 5


COMMAND = """
    from exclusivelog.cli import main
    sys.argv = ["exclusivelog", "backup", *sys.argv[1:]]
    main()
"""


@pytest.mark.long
def test_h4_the_command_is_interrupted_says_so_and_is_run_again(source, tmp_path) -> None:
    target = tmp_path / "copy"
    command = [sys.executable, "-m", "exclusivelog.cli"]
    with child(HOLDS + COMMAND, source.path, target) as process:
        assert line(process) == "inside"
        verified = subprocess.run(
            [*command, "verify", target],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (verified.returncode, "run the backup again" in verified.stderr) == (1, True)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 128 + signal.SIGINT
    refused_in_every_way(target)
    nothing_but_the_marker(target)
    subprocess.run([*command, "backup", source.path, target], check=True, timeout=PATIENCE)
    complete(target)


def test_h4_a_backup_of_a_damaged_ledger_is_no_ledger(source, tmp_path) -> None:
    target = tmp_path / "copy"
    segment = sorted((path_of(source) / "segments").iterdir())[0]
    segment.rename(tmp_path / "taken")
    with pytest.raises(xl.LedgerCorruptedError, match="cannot be copied"):
        source.backup(target)
    refused_in_every_way(target)
    nothing_but_the_marker(target)
    (tmp_path / "taken").rename(segment)
    source.backup(target)
    complete(target)


# ---- H4: several backups into one directory ----------------------------------------------

MAKES = """
    with xl.open(sys.argv[1], readonly=True) as engine:
        engine.backup(sys.argv[2])
"""


@pytest.mark.long
def test_h4_a_backup_that_another_process_makes_is_left_alone(source, tmp_path) -> None:
    target = tmp_path / "copy"
    with child(HOLDS + MAKES, source.path, target) as process:
        assert line(process) == "inside"
        for _ in range(2):
            with pytest.raises(xl.LedgerError, match=rf"another process \(pid {process.pid} on "):
                source.backup(target)
        refused_in_every_way(target)
        tell(process)
        assert process.wait(PATIENCE) == 0
    complete(target)
    with pytest.raises(xl.LedgerError, match="is not empty"):
        source.backup(target)


@pytest.mark.long
def test_h4_what_a_killed_process_has_left_is_cleared(source, tmp_path) -> None:
    target = tmp_path / "copy"
    with child(HOLDS + MAKES, source.path, target) as process:
        assert line(process) == "inside"
        process.kill()
        process.wait(PATIENCE)
    refused_in_every_way(target)
    source.backup(target)
    complete(target)


FORKS = """
    def forked(*args):
        if os.fork() == 0:
            os.write(1, b"%d\\n" % os.getpid())
            sys.stdin.readline()
            os._exit(0)
        return held(*args)
    backup._copy_segments = forked
"""


@pytest.mark.long
def test_h4_a_forked_child_does_not_keep_a_dead_backup_alive(source, tmp_path) -> None:
    """It would inherit the lock."""
    target = tmp_path / "copy"
    with child(HOLDS + FORKS + MAKES, source.path, target) as process:
        said = {line(process), line(process)}
        (heir,) = said - {"inside"}
        process.kill()
        process.wait(PATIENCE)
        try:
            source.backup(target)
        finally:
            os.kill(int(heir), signal.SIGKILL)
    complete(target)


RACES = """
    import sys
    import exclusivelog as xl
    with xl.open(sys.argv[1], readonly=True) as engine:
        for path in sys.stdin:
            try:
                engine.backup(path.strip())
            except xl.LedgerError as error:
                assert "another process" in str(error) or "not empty" in str(error), error
                print("refused", flush=True)
            else:
                print("made", flush=True)
"""


@pytest.mark.long
def test_h4_backups_into_one_directory_at_the_same_moment(source, tmp_path) -> None:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(child(RACES, source.path)) for _ in range(3)]
        for number in range(20):
            target = tmp_path / str(number)
            for process in processes:
                tell(process, str(target))
            said = sorted(line(process) for process in processes)
            assert said == ["made", "refused", "refused"]
            complete(target)
            shutil.rmtree(target)


def test_h4_threads_of_one_process_do_not_mix_their_backups(source, tmp_path, around) -> None:
    target = tmp_path / "copy"
    refusals = []

    def beside() -> None:
        with pytest.raises(xl.LedgerError, match=f"pid {os.getpid()} on") as raised:
            source.backup(target)
        refusals.append(raised)

    around("_copy_tables", beside, int)
    source.backup(target)
    assert len(refusals) == 1
    complete(target)


def test_h4_a_backup_that_has_just_been_finished_is_kept(source, tmp_path, monkeypatch) -> None:
    """By another one, which began when the directory was empty, too."""
    target, original = tmp_path / "copy", backup._make_marker

    def late(place: Directory) -> bool:
        monkeypatch.undo()
        make_again(path_of(source), target)
        return original(place)

    monkeypatch.setattr(backup, "_make_marker", late)
    with pytest.raises(xl.LedgerError, match="is not empty"):
        source.backup(target)
    complete(target)


@pytest.mark.sampled
@pytest.mark.parametrize("when", ["before it is opened", "before it is locked"])
def test_h4_a_marker_that_goes_away_meanwhile(source, tmp_path, monkeypatch, when) -> None:
    """Another backup has ended between two steps of the claim."""
    target = tmp_path / "copy"
    with child(HOLDS + MAKES, source.path, target) as process:
        assert line(process) == "inside"
        name = "__init__" if when == "before it is opened" else "take"
        original = getattr(backup.Lock, name)

        def late(*args: Any) -> Any:
            monkeypatch.undo()
            tell(process)
            assert process.wait(PATIENCE) == 0
            return original(*args)

        monkeypatch.setattr(backup.Lock, name, late)
        with pytest.raises(xl.LedgerError, match="is not empty"):
            source.backup(target)
    complete(target)


def test_h4_a_backup_that_another_takes_over_as_it_ends(source, tmp_path, monkeypatch) -> None:
    """Between the removal of the lock and that of the marker."""
    target, rmdir = tmp_path / "copy", os.rmdir

    def late(path: str, dir_fd: int) -> None:
        monkeypatch.undo()
        (target / UNFINISHED_BACKUP / "lock").write_bytes(b"another's")
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", late)
    with pytest.raises(xl.LedgerError, match="another process began a backup into"):
        source.backup(target)
    refused_in_every_way(target)
    assert (target / "data.mdb").exists()  # the other one's matter now
    source.backup(target)
    complete(target)


def test_h4_a_ledger_is_not_created_where_a_backup_begins(source, tmp_path, monkeypatch) -> None:
    """It begins after `open` has looked; `open` has made `owners.lock` by then."""
    target = tmp_path / "copy"
    monkeypatch.setattr(
        opening, "refuse_missing_data", lambda directory: (target / UNFINISHED_BACKUP).mkdir()
    )
    with pytest.raises(xl.LedgerError, match="run the backup again"):
        xl.open(target)
    monkeypatch.undo()
    assert not (target / "data.mdb").exists()
    with pytest.raises(xl.LedgerError, match=r"'owners\.lock' beside an unfinished backup"):
        source.backup(target)


def test_h4_a_target_that_is_replaced_meanwhile_is_an_error(source, tmp_path, around) -> None:
    target = tmp_path / "copy"

    def replace() -> None:
        target.rename(tmp_path / "moved")
        (target / UNFINISHED_BACKUP).mkdir(parents=True)
        for name in ("data.mdb", "journal"):
            (target / UNFINISHED_BACKUP / name).write_bytes(b"another's")

    around("_copy_journal", int, replace)
    with pytest.raises(xl.LedgerError, match="was removed or replaced"):
        source.backup(target)
    assert (target / UNFINISHED_BACKUP / "journal").read_bytes() == b"another's"


def test_h4_what_others_put_into_the_target_meanwhile_is_kept(source, tmp_path, around) -> None:
    target = tmp_path / "copy"
    around("_copy_journal", int, lambda: (target / "data.mdb").write_bytes(b"another's"))
    with pytest.raises(xl.LedgerError, match=r"'data\.mdb' appeared in"):
        source.backup(target)
    assert (target / "data.mdb").read_bytes() == b"another's"
    assert os.listdir(target / UNFINISHED_BACKUP) == ["lock"]


# ---- H4: where a backup may go -----------------------------------------------------------


def test_h4_a_backup_without_a_path_is_refused(source, tmp_path, monkeypatch) -> None:
    """Not made in the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path is empty"):
        source.backup("")
    assert os.listdir(tmp_path) == ["source"]


def test_h4_a_backup_removes_only_what_a_backup_makes(source, tmp_path) -> None:
    target = tmp_path / "copy"
    work = target / UNFINISHED_BACKUP
    work.mkdir(parents=True)
    (target / "notes").write_bytes(b"mine")
    (target / "data.mdb").write_bytes(b"a leftover")
    with pytest.raises(xl.LedgerError, match="'notes' beside an unfinished backup"):
        source.backup(target)
    assert (target / "data.mdb").read_bytes() == b"a leftover"
    (target / "notes").rename(work / "notes")
    with pytest.raises(xl.LedgerError, match="'notes', which is not from a backup"):
        source.backup(target)
    assert (work / "notes").read_bytes() == b"mine"
    refused_in_every_way(target)
    (work / "notes").unlink()
    (work / "segments").mkdir()
    (work / "segments" / f"{1:016x}").write_bytes(b"a leftover")
    source.backup(target)
    complete(target)


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_h4_a_marker_that_is_no_directory_is_none(source, tmp_path, kind) -> None:
    target, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    target.mkdir()
    if kind == "file":
        (target / UNFINISHED_BACKUP).write_bytes(b"")
    else:
        (target / UNFINISHED_BACKUP).symlink_to(elsewhere)
        if kind == "link":
            elsewhere.mkdir()
            (elsewhere / "journal").write_bytes(b"another's")
    with pytest.raises(xl.LedgerError, match="is not empty"):
        source.backup(target)
    if kind == "link":
        assert os.listdir(elsewhere) == ["journal"]


def test_h4_a_backup_into_the_ledger_itself_is_refused(source, tmp_path) -> None:
    before = sorted(os.listdir(source.path))
    inside = path_of(source)
    link = tmp_path / "link"
    link.symlink_to(inside)
    for target in (inside, inside / "copy", inside / "segments" / "a" / "b", link, link / "copy"):
        with pytest.raises(xl.LedgerError, match="lies inside the ledger"):
            source.backup(target)
    assert sorted(os.listdir(source.path)) == before
    with pytest.raises(xl.LedgerError, match="is not empty"):
        source.backup(tmp_path)  # around the ledger


UNWRITABLE = """
    import os, sys
    import exclusivelog as xl
    with xl.open(sys.argv[1], readonly=True) as engine:
        os.seteuid(65534)
        try:
            engine.backup(sys.argv[2])
        except xl.LedgerError as error:
            print(type(error).__name__, error)
        os.seteuid(0)
"""


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_h4_a_target_that_may_not_be_written_is_named(tmp_path) -> None:
    with tempfile.TemporaryDirectory() as shared:  # tmp_path is root's alone
        where = Path(shared)
        where.chmod(0o755)
        (where / "there").mkdir()
        with xl.open(where / "log", durability="process") as engine:
            fill(engine, 1)
        for target in (where / "new", where / "there"):
            said = finish(UNWRITABLE, where / "log", target)
            assert said.startswith(f"LedgerError {target}: the backup may not be written"), said
        assert sorted(os.listdir(where)) == ["log", "there"]
        assert os.listdir(where / "there") == []


def test_h4_a_target_that_is_mounted_read_only_is_named(source, tmp_path) -> None:
    with disk(tmp_path / "disk", 8) as where:
        subprocess.run(["mount", "-o", "remount,ro", where], check=True, timeout=PATIENCE)
        for target in (where, where / "copy"):
            with pytest.raises(xl.LedgerError, match=r"may not be written .*Read-only"):
                source.backup(target)


def test_h4_a_backup_has_the_modes_of_its_source(source, tmp_path) -> None:
    path = path_of(source)
    modes = {"": 0o750, "data.mdb": 0o640, "journal": 0o664, "segments": 0o770}
    segments = sorted(os.listdir(path / "segments"))
    modes |= {f"segments/{name}": mode for name, mode in zip(segments, (0o600, 0o666), strict=True)}
    for name, mode in modes.items():
        (path / name).chmod(mode)
    before = os.umask(0o077)
    try:
        source.backup(tmp_path / "deep" / "copy")
    finally:
        os.umask(before)
    copy = tmp_path / "deep" / "copy"
    assert {name: stat.S_IMODE((copy / name).stat().st_mode) for name in modes} == modes
    complete(copy)


READ_ONLY = """
    import os, sys
    import exclusivelog as xl
    os.chown(sys.argv[2], 65534, 65534)
    with xl.open(sys.argv[1], readonly=True) as engine:
        os.seteuid(65534)
        try:
            engine.backup(os.path.join(sys.argv[2], "copy"))
        except xl.LedgerError as error:
            print(error)
        os.seteuid(0)
"""


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_h4_a_ledger_whose_directories_are_read_only_can_be_backed_up(source) -> None:
    """By a user who is not root, and to whom the copy then belongs."""
    with tempfile.TemporaryDirectory() as shared:  # tmp_path is root's alone
        where = Path(shared)
        where.chmod(0o755)
        shutil.copytree(source.path, where / "log", ignore=shutil.ignore_patterns("*.lock"))
        copy, files = where / "copy", [file for file in where.rglob("*") if file.is_file()]
        for name in ("log/segments", "log"):
            (where / name).chmod(0o555)
        said = finish(READ_ONLY, where / "log", where)
        assert said.startswith(f"{where / 'log'} cannot be read for a backup "), said
        for file in files:
            file.chmod(0o444)
        assert finish(READ_ONLY, where / "log", where) == ""
        for name in (".", "data.mdb", "journal", "segments"):
            assert (copy / name).stat().st_uid == 65534
        assert stat.S_IMODE((copy / "segments").stat().st_mode) == 0o755
        complete(copy)


CLOSED = """
    import contextlib, os, sys
    import exclusivelog as xl
    from exclusivelog.local.maintenance import backup
    copy_bytes = backup._copy_bytes
    def noise():
        for fd in range(3):
            with contextlib.suppress(OSError):
                os.write(fd, b"printed by C code")
    def noisy(*args):
        noise()
        copy_bytes(*args)
        noise()
    backup._copy_bytes = noisy
    with xl.open(sys.argv[1], readonly=True) as engine:
        os.closerange(0, 3)
        engine.backup(sys.argv[2])
        os._exit(0)
"""


def test_h4_what_is_printed_to_closed_descriptors_is_not_in_a_backup(source, tmp_path) -> None:
    """A daemon started with `<&- >&- 2>&-`."""
    finish(CLOSED, source.path, tmp_path / "copy")
    complete(tmp_path / "copy")


# ---- H4: the source ----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usual_journal
def test_h4_a_ledger_on_a_full_disk_can_be_backed_up(tmp_path) -> None:
    """By its own engine, and by one that only reads."""
    with disk(tmp_path / "disk", 16) as where:
        with xl.open(where / "log", durability="process") as engine, no_checkpoints(engine):
            fill(engine, 40)
            leave(where, 0)
            engine.backup(tmp_path / "copy")
            with xl.open(tmp_path / "copy", durability="process") as copy:
                assert whats_wrong(copy, 40) == []
            finish(
                HOLDS.replace("        await_line()", "        pass") + MAKES,
                engine.path,
                tmp_path / "second",
            )
            complete(tmp_path / "second", 40)


def test_h4_a_backup_while_the_topic_is_trimmed(source, tmp_path) -> None:
    """Large entries come and go with their segments."""
    topic = source.topic("orders")
    with sending(source) as sender, sender.at_work(), ThreadPoolExecutor(1) as pool:

        def trim() -> None:
            while not sender.stop.is_set():
                topic.trim(max(topic.first_offset, sender.acknowledged - 60))
                time.sleep(0.002)

        trimming = pool.submit(trim)
        try:
            for number in range(8):
                count = sender.acknowledged
                source.backup(tmp_path / str(number))
                with xl.open(tmp_path / str(number), durability="process") as copy:
                    assert copy.verify().ok
                    copied = copy.topic("orders")
                    assert copied.next_offset >= count
                    assert values(copied) == [
                        message(n) for n in range(copied.first_offset, copied.next_offset)
                    ]
        finally:
            sender.stop.set()
        trimming.result(PATIENCE)


# ---- copies that share files -------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_h2_a_copy_made_of_hard_links_is_refused(source, tmp_path, way) -> None:
    """`cp -al` shares tables and journal, but no segment that comes later."""
    path, copy, own = path_of(source), tmp_path / "linked", tmp_path / "own"
    source.close()
    subprocess.run(["cp", "-al", path, copy], check=True, timeout=PATIENCE)
    for where in (path, copy):
        with pytest.raises(xl.LedgerError, match=rf"{where}/data.mdb has 2 names .*cp -a"):
            xl.open(where, **way)
    (copy / "data.mdb").unlink()
    with pytest.raises(xl.LedgerError, match=f"{path}/journal has 2 names"):
        xl.open(path, **way)
    shutil.rmtree(copy)
    complete(path)
    subprocess.run(["cp", "-al", path, copy], check=True, timeout=PATIENCE)
    subprocess.run(["cp", "-a", copy, own], check=True, timeout=PATIENCE)  # as the message says
    shutil.rmtree(copy)
    for where in (path, own):
        complete(where)


def test_h2_a_segment_that_two_copies_share_is_not_written_to(source, tmp_path) -> None:
    """As `rsync --link-dest` leaves it, which links what has not changed. Reading is harmless."""
    source.close()
    path, copy = path_of(source), tmp_path / "copy"
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("owners.lock", "lock.mdb"))
    newest = max(os.listdir(path / "segments"))
    (copy / "segments" / newest).unlink()
    os.link(path / "segments" / newest, copy / "segments" / newest)
    before = (path / "segments" / newest).read_bytes()
    with xl.open(copy, readonly=True) as engine:
        assert whats_wrong(engine, COUNT) == []
    for where in (path, copy):
        with pytest.raises(xl.LedgerError, match=f"{where}/segments/{newest} has 2 names"):
            xl.open(where)
    assert (path / "segments" / newest).read_bytes() == before
    shutil.rmtree(copy)
    complete(path)


def test_h2_the_library_makes_no_hard_links(source, tmp_path) -> None:
    """Else it would refuse what it makes, now and then."""
    make_again(path_of(source), tmp_path / "copy")
    complete(tmp_path / "copy")
    for where in (path_of(source), tmp_path / "copy"):
        for file in where.rglob("*"):
            assert file.is_dir() or file.stat().st_nlink == 1, file
