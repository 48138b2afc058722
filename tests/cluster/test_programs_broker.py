"""Programs that were written for a local log, unchanged, by the URL of a cluster: the examples that
a cluster can keep, and one on asyncio.

A user who moves replaces the path by a URL, and names the admin API in the environment. Workers are
killed, topics are handed over, payments are made twice: what each program claims must hold there.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.cli import load
from testing.broker import Namespace
from testing.processes import PATIENCE, until
from tests.faces.scripts import EXAMPLES, findings, run

program = load()
pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


@pytest.fixture
def url(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EXCLUSIVELOG_ADMIN", namespace.admin)
    return namespace.url


# ---- the examples ------------------------------------------------------------------------


@pytest.mark.rule("I2", "G2", "C2")
def test_payments_are_made_once_by_servers_that_are_killed(url: str) -> None:
    status, output, errors = run("kv_service_trial.py", "--path", url, "--payments", 40)
    assert (status, errors, findings(output)) == (0, "", ["ok"] * 4), output


@pytest.mark.rule("E1", "E2", "E3")
def test_topics_are_drained_to_another_worker(url: str) -> None:
    status, output, errors = run("drain_trial.py", "--path", url, "--topics", 3)
    assert (status, errors, findings(output)) == (0, "", ["ok"] * 5), output


@pytest.fixture
def candidates(url: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    command = [sys.executable, str(EXAMPLES / "leader_election.py"), url]
    names = ("worker-1", "worker-2")
    started = {name: subprocess.Popen([*command, name]) for name in names}
    yield started
    for process in started.values():
        process.kill()
        process.wait(PATIENCE)


@pytest.mark.rule("C2", "B10")
def test_a_killed_leader_is_followed_by_the_next_worker(
    url: str, candidates: dict[str, subprocess.Popen[bytes]]
) -> None:
    with xl.open(url) as engine:
        topic = engine.topic("decisions")
        until(lambda: topic.owner and len(topic.waiters) == 1)
        owner = topic.owner
        assert owner is not None
        until(lambda: topic.next_offset > 3)
        candidates[owner.engine_name].send_signal(signal.SIGKILL)
        follower = until(lambda: (now := topic.owner) and now.epoch == 2 and now)
        end = topic.next_offset
        until(lambda: topic.next_offset > end + 3)
        names = {message.epoch: message.producer_name for message in topic.reader()}
    assert names == {1: owner.engine_name, 2: follower.engine_name}
    assert follower.engine_name != owner.engine_name


# ---- a move ------------------------------------------------------------------------------


def work(address: str) -> tuple[int, int, list[int], int]:
    """A program that knows no cluster: what it sent, under which epoch, read and counted."""
    with xl.open(address, "worker") as engine:
        topic = engine.topic("orders")
        with topic.producer("wait_for_exclusive", name="billing") as producer:
            epoch, last = producer.topic_epoch, producer.send_many([b"x"] * 3)[-1]
        with topic.reader(group="invoices") as reader:
            read = [message.offset for message in reader.read_batch(100)]
            reader.commit()
        with xl.SharedMap(engine.topic("totals")) as totals:
            counted = totals.update("sum", lambda held: (held or 0) + 3)
    return epoch, last, read, counted.value


@pytest.mark.rule("J4", "B1", "F6", "I4")
def test_j4_a_program_moves_in_three_steps(path: str, url: str) -> None:
    """Those of docs/cluster.md."""
    assert work(path) == (1, 2, [0, 1, 2], 3)
    for options in ([], ["--verify"]):
        done = CliRunner().invoke(program, ["mirror", path, "--to", url, *options])
        assert (done.exit_code, done.stderr) == (0, "")
    with xl.open(path, readonly=True) as old, xl.open(url) as new:
        for group in old.groups():
            with new.topic(group.topic).reader(group=group.group) as reader:
                reader.seek(group.position)
                reader.commit()
    assert work(url) == (2, 5, [3, 4, 5], 6)
    done = CliRunner().invoke(program, ["mirror", path, "--to", url])
    assert done.exit_code == 1
    assert "an engine on a cluster writes to it" in done.stderr


# ---- asyncio -----------------------------------------------------------------------------


@pytest.mark.rule("B4", "D5", "F6", "I2")
def test_the_awaitable_interface_by_url(url: str) -> None:
    """Every kind of thing that `aio` opens and a cluster keeps."""

    async def story() -> None:
        async with aio.open(url, "loop") as engine:
            topic = await engine.topic("orders")
            async with topic.producer("exclusive", name="p") as producer:
                assert await producer.send(b"a", key="k") == 0
                receipts = [producer.send_async(b"%d" % n) for n in range(50)]
                assert await asyncio.gather(*receipts) == list(range(1, 51))
                assert await producer.send_many([b"x", b"y"]) == range(51, 53)
                waiting = asyncio.create_task(topic.producer("wait_for_exclusive", name="w"))
                while not topic.waiters:
                    await asyncio.sleep(0.01)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                while topic.waiters:
                    await asyncio.sleep(0.01)
                assert topic.owner is not None
            async with topic.producer("exclusive_with_fencing", name="next") as rival:
                assert rival.topic_epoch == 2
                await rival.send(b"z")
                with pytest.raises(xl.UnsupportedError):
                    async with engine.transaction() as txn:
                        await rival.send(b"never", transaction=txn)
            assert [message.offset async for message in topic.reader(50)] == [50, 51, 52, 53]
            async with topic.reader(group="g") as reader:
                assert (await reader.read_next(PATIENCE)).value == b"a"
                await reader.commit()
            async with engine.own("shards", {"s": None}) as claim:
                assert claim.is_valid
            async with aio.SharedMap(await engine.topic("map")) as counts:
                await counts.update("n", lambda value: (value or 0) + 1)
                assert await counts.get("n", latest=True) == 1
            moves = await engine.unload("orders", to=engine.id, timeout=PATIENCE)
            assert [move.ok for move in moves] == [True]
            found = [event.kind async for event in engine.history("orders")][:2]
            assert found == ["grant", "release"]

    asyncio.run(asyncio.wait_for(story(), 4 * PATIENCE))
