"""Rules H1, G3, B2, B9, G9: after a crash at any moment, what was acknowledged is in the log.

First processes die: by SIGKILL at a system call, before it or right behind it, and at full speed
between two instructions. The others go on at once, and so does the next one to open the ledger.

Then the power fails. strace has written down what a process wrote and flushed, and when it
acknowledged what. A cut keeps what was flushed; of each block that was written since, the disk may
have any version. Such disks are made by the hundred, and each is started up: all that was
acknowledged must be there, batches whole or not at all, nothing damaged, and it goes on. What a
process stores through a mapping (owners.lock) is lost in a cut; where the journal is written like
that (`process`), any block of it may be an old one.

The judge must turn red where the flush is left out, or a checksum, or the mark that holds the
entries of a batch together: those are its controls.

`pytest --every-crash` takes every system call and every disk, not a sample.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.local.storage import journal
from proof.power import judge_all, power_fails, record, short_life, stored_cuts
from proof.power_cuts import Disk, cuts
from proof.random_kills import judge_random_kills, kill_beside
from proof.syscall_crashes import AT_ONCE
from proof.syscall_crashes import sweep as die_at_system_calls
from proof.work import TOPICS
from testing.children import PATIENCE, child, line, tell
from testing.descriptors import readable
from testing.disks import needs_strace
from testing.journals import CAPACITY, no_checkpoints
from testing.processes import until, values
from testing.strace import traced

# ---- H1, G3: death at a system call ------------------------------------------------------


@pytest.mark.long
@pytest.mark.once
@needs_strace
@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_g3_dying_at_a_system_call(tmp_path, sweep, durability, beside) -> None:
    """The process creates the ledger, appends one message, batches of several entries and large
    ones, makes checkpoints, fences its own producer, and closes; it is killed in all of it."""
    swept = die_at_system_calls(tmp_path, durability, beside, sweep(20, -1))
    print(f"\n{swept.tried} points of {swept.points}, {swept.died} deaths")
    assert swept.broken == []
    assert swept.died > swept.tried // 2, "hardly any process died"


def die_in_a_batch(path: Path, when: int, values: str) -> None:
    """An owner's process dies inside the critical section, right behind the `when`-th write of a
    batch of three entries."""
    with child(DIES_IN_A_BATCH, path, values) as process:
        pid = int(line(process))
        # Stopped, not killed, by that write, which is thus made; then it is killed.
        injection = f"inject=pwritev:signal=SIGSTOP:when={when}"
        with traced(pid, "-o", os.devnull, "-e", "trace=pwritev", "-e", injection):
            tell(process)
            until(lambda: os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG))
            process.kill()
            process.wait(PATIENCE)


DIES_IN_A_BATCH = """
    import os, sys
    import exclusivelog as xl
    with xl.open(sys.argv[1], durability="power") as engine:
        producer = engine.topic("t").producer(
            "exclusive_with_fencing", name="v", max_batch_messages=1
        )
        print(os.getpid(), flush=True)
        input()
        producer.send_many([value.encode() for value in sys.argv[2]])
"""


@pytest.mark.long
@needs_strace
def test_g3_a_dead_owners_batch_does_not_come_back(path, tmp_path) -> None:
    """The owner dies with its batch of three entries written, but not yet counted. The next owner
    writes one message over the first of them, of the same size, and is told that it is durable.
    Then the power fails: behind that message the rest of the dead owner's batch must not stand."""
    with xl.open(path, durability="power") as engine, no_checkpoints(engine):
        die_in_a_batch(path, 3, "123")
        with engine.topic("t").producer("exclusive_with_fencing", name="v") as producer:
            assert producer.send(b"n") == 0
            copy = power_fails(path, tmp_path / "copy")
        assert values(engine.topic("t")) == [b"n"]
    with xl.open(copy) as engine:
        assert values(engine.topic("t")) == [b"n"]
        assert engine.verify().problems == ()


@pytest.mark.long
@needs_strace
def test_b10_a_disk_that_forgets_a_grant_puts_no_dead_owner_behind_it(path, tmp_path) -> None:
    """As above, and the disk has lied about a flush: the tables are those from before the next
    owner's grant, which would say where the dead owner's entries end. The versions in the entries
    tell it, too."""
    with xl.open(path, durability="process") as engine, no_checkpoints(engine):
        die_in_a_batch(path, 3, "123")
        forgetful = shutil.copy(Path(path) / "data.mdb", tmp_path)
        with engine.topic("t").producer("exclusive_with_fencing", name="v") as producer:
            assert producer.send(b"n") == 0
            copy = power_fails(path, tmp_path / "copy")
    shutil.copy(forgetful, copy / "data.mdb")
    with xl.open(copy) as engine:
        assert values(engine.topic("t")) == [b"n"]


@pytest.mark.sampled
@needs_strace
@pytest.mark.parametrize("opened", ["after a close", "after a power cut"])
@pytest.mark.parametrize("sent", ["nothing", "one message", "a large batch"])
def test_b10_what_a_dead_owner_left_at_the_tail_does_not_come_back(
    path, tmp_path, sent, opened
) -> None:
    """The owner dies with a batch written, but not yet counted; the next owner reads the topic, and
    writes nothing, or a message of the same size, which is taken over into the tables, or a large
    batch, which does not pass through the journal. A process that opens the ledger alone trusts
    frames: those of the dead owner must not follow."""
    with xl.open(path, durability="power") as engine:
        die_in_a_batch(path, *((3, "123") if sent == "one message" else (1, "1")))
        with engine.topic("t").producer("exclusive_with_fencing", name="v") as producer:
            if sent == "one message":
                assert producer.send(b"n") == 0
            elif sent == "a large batch":
                assert producer.send_many([b"n" * 1000] * 3000) == range(3000)
            engine.ledger.checkpoint()
            seen = values(engine.topic("t"))
            assert len(seen) == {"nothing": 0, "one message": 1, "a large batch": 3000}[sent]
            copy = power_fails(path, tmp_path / "copy")
    with xl.open(copy if opened == "after a power cut" else path) as engine:
        assert values(engine.topic("t")) == seen
        assert engine.verify().problems == ()
        with engine.topic("t").producer() as producer:
            assert producer.send(b"next") == len(seen)


@pytest.mark.long
@needs_strace
def test_g3_two_dead_owners_batches_do_not_become_one(path, tmp_path) -> None:
    """The next owner dies, too, when it has written the first entry of its own batch over the
    first one of the other's. Then the power fails: of the two no batch may be made."""
    with xl.open(path, durability="power") as engine, no_checkpoints(engine):
        die_in_a_batch(path, 3, "123")
        die_in_a_batch(path, 1, "abc")
        copy = power_fails(path, tmp_path / "copy")
    with xl.open(copy) as engine:
        assert values(engine.topic("t")) in ([], [b"1", b"2", b"3"], [b"a", b"b", b"c"])
        assert engine.verify().problems == ()


# ---- B2, G3: death between the write that is a commit and the news of it -----------------

# LMDB commits by writing a page, and then sets the word by which its readers find it.
DIES_IN_A_COMMIT = """
    import os, sys
    import exclusivelog as xl
    with xl.open(sys.argv[1]) as engine:
        topic = engine.topic("t")
        shared = topic.producer("shared") if sys.argv[2] == "large" else None
        print(os.getpid(), flush=True)
        input()
        if sys.argv[2] == "large":
            shared.send_many([b"large" * 100] * LARGE)
        elif sys.argv[2] == "take over":
            topic.producer("exclusive_with_fencing", name="taker")
        else:
            topic.terminate()
        print("alive", flush=True)
        input()
"""
LARGE = 1000


def die_in_a_commit(path: Path, what: str, when: int) -> bool:
    """A process dies right behind the `when`-th write of a commit; False if that has fewer."""
    with child(DIES_IN_A_COMMIT.replace("LARGE", str(LARGE)), path, what) as process:
        pid = int(line(process))
        injection = f"inject=pwrite64:signal=SIGSTOP:when={when}"
        with traced(pid, "-o", os.devnull, "-e", "trace=pwrite64", "-e", injection):
            tell(process)

            def stopped() -> bool:
                options = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
                return os.waitid(os.P_PID, pid, options) is not None

            until(lambda: stopped() or readable(process.stdout, 0))
            died = stopped()
            process.kill()
            process.wait(PATIENCE)
            return died


def send_while_possible(producer: xl.Producer, values: list[bytes]) -> list[bytes]:
    """Those of the values that were acknowledged."""
    sent = []
    for value in values:
        with contextlib.suppress(xl.ProducerFencedError, xl.TopicTerminatedError):
            producer.send(value)
            sent.append(value)
    return sent


@pytest.mark.long
@needs_strace
@pytest.mark.parametrize("what", ["large", "take over", "terminate"])
def test_b2_a_commit_whose_process_dies_before_any_process_knows_of_it(tmp_path, what) -> None:
    """At first no process knows whether the commit was made. The next sender must have
    found out before: what it sends is in the log for good, in its place, and once the take-over
    or the end of the topic shows, nothing more gets in."""
    for when in itertools.count(1):
        path = tmp_path / str(when)
        with xl.open(path) as engine, no_checkpoints(engine):
            topic = engine.topic("t")
            with topic.producer("shared" if what == "large" else "exclusive") as mine:
                sent = send_while_possible(mine, [b"0"])
                died = die_in_a_commit(path, what, when)
                sent += send_while_possible(mine, [b"1", b"2"])
                with engine.ledger.write_concurrent():
                    pass  # at the latest now LMDB finds out
                with engine.ledger.read() as tables:
                    row = tables.topics.get(topic.id)
                closed = what != "large" and not (row.owner == mine._session.id and not row.flags)
                sent += send_while_possible(mine, [b"3"])
                assert b"3" not in sent if closed else sent == [b"0", b"1", b"2", b"3"]
            found = values(topic)
            assert [value for value in found if len(value) == 1] == sent
            assert len(found) - len(sent) in (0, LARGE if what == "large" else 0)
            assert engine.verify().problems == ()
        if not died:
            assert when > 1, "hardly anything was written"
            return


# ---- H1, B9: death between two instructions ----------------------------------------------


@pytest.mark.long
@pytest.mark.once
def test_h1_dying_at_full_speed_beside_another_sender(tmp_path, sweep) -> None:
    """`process`: no system call in an append, the death strikes among stores through the mapping
    and inside the critical section. A sender at the same time goes on at once."""
    rounds = sweep(100, 1500)
    slices = list(kill_beside(tmp_path, rounds, 7))
    kills, slow = sum(s.kills for s in slices), sum(s.slow for s in slices)
    longest, sent = max(s.longest for s in slices), sum(s.acknowledged for s in slices)
    print(f"\n{kills} deaths, {sent} messages, {longest:.3f} s at most, {slow} slow")
    assert [text for s in slices for text in s.broken] == []
    assert kills == rounds
    assert longest < AT_ONCE
    assert slow <= rounds // 20


def test_the_judge_of_random_kills_turns_red() -> None:
    """Controls: a message that is missing, twice, out of order, or half a batch."""
    batch = [b"a/9/0", b"a/9/1", b"a/9/2"]
    sound = [*(b"a/%d/0" % n for n in range(9)), *batch, b"b/0/0"]
    assert judge_random_kills(sound, {"a": 10, "b": 0}) == []
    for wrong in (sound[:-2], sound[1:], [*sound, sound[-1]], [*sound[:9], *batch[:2]]):
        assert judge_random_kills(wrong, {"a": 10, "b": 0}) != []
    assert judge_random_kills(sound, {"a": 11, "b": 1}) != []


# ---- H1: power cuts ----------------------------------------------------------------------


def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Rounds of work, and disks per flush."""
    return (2, 60) if request.config.getoption("--every-crash") else (2, 6)


@pytest.mark.long
@pytest.mark.once
@needs_strace
@pytest.mark.timeout(1800)  # with --every-crash
def test_h1_power_cuts_around_every_flush(tmp_path, request) -> None:
    """`power`, from the making of the ledger to its end: small appends, batches of several
    entries, checkpoints, large entries in segments, a data.mdb that grows, a journal that goes
    around. Whichever unflushed blocks reached the disk, nothing acknowledged is lost."""
    rounds, most = sizes(request)
    path, trace = tmp_path / "log", tmp_path / "trace"
    record(path, trace, rounds)
    found = cuts(Disk(str(path)), trace, TOPICS, most, random.Random(1))
    verdicts = judge_all(found, tmp_path / "disks", "power", rounds)
    print(f"\n{verdicts.judged} disks")
    assert verdicts.broken == []
    assert verdicts.judged > 100


@pytest.mark.smoke
@pytest.mark.long
@pytest.mark.once
@needs_strace
@pytest.mark.timeout(1800)  # with --every-crash
def test_h1_power_cuts_while_the_next_boot_recovers(tmp_path, request) -> None:
    """The power fails while the journal has what no table has; and once more while the first one
    to open the ledger moves that into the tables, and goes on."""
    counts = range(1, 15) if request.config.getoption("--every-crash") else (12,)
    for count in counts:
        said = short_life(tmp_path / "first", count)
        path, trace = power_fails(tmp_path / "first", tmp_path / f"log{count}"), tmp_path / "trace"
        disk = Disk.of(path, said)
        record(path, trace, 1)
        found = cuts(disk, trace, TOPICS, 5, random.Random(4))
        verdicts = judge_all(found, tmp_path / f"disks{count}", "power", 1)
        assert verdicts.broken == []
        assert verdicts.judged > 20
        shutil.rmtree(tmp_path / "first")


@pytest.mark.long
@needs_strace
def test_h1_control_without_the_flush_messages_are_lost(tmp_path) -> None:
    """The same recording, on a disk that does not hear of the journal's flushes."""
    path, trace = tmp_path / "log", tmp_path / "trace"
    record(path, trace, 1)
    found = cuts(Disk(str(path)), trace, TOPICS, 3, random.Random(2), never_flushed="/journal")
    verdicts = judge_all(found, tmp_path / "disks", "power", 1)
    assert any("was acknowledged" in text for _, texts in verdicts.broken for text in texts)


# ---- H1: power cuts behind what was not flushed ------------------------------------------


@pytest.mark.long
def test_h1_power_cuts_without_a_flush(tmp_path, request, monkeypatch) -> None:
    """`process`: the last messages may be lost, but what is read was sent, in order, without gaps
    and with complete batches; and the ledger can be used again."""
    monkeypatch.setattr(journal, "CAPACITY", CAPACITY)
    rounds, most = sizes(request)
    found = stored_cuts(tmp_path / "log", rounds, min(most, 300), random.Random(3))
    verdicts = judge_all(found, tmp_path / "disks", "process", rounds)
    print(f"\n{verdicts.judged} disks")
    assert verdicts.broken == []
    assert verdicts.judged > 50


@pytest.mark.long
@pytest.mark.parametrize("defect", ["checksum", "batch"])
def test_g9_control_without_a_check_the_log_is_damaged(tmp_path, monkeypatch, defect) -> None:
    """The same disks, recovered by a process that trusts every frame, or every entry of a batch."""
    monkeypatch.setattr(journal, "CAPACITY", CAPACITY)
    found = stored_cuts(tmp_path / "log", 1, 30, random.Random(3))
    verdicts = judge_all(found, tmp_path / "disks", "process", 1, defect)
    assert verdicts.broken != []
    if defect == "batch":
        assert any(" G3 at " in text for _, texts in verdicts.broken for text in texts)
