"""The machine is lost, and the cluster has all that it had: the log comes back as it was (J4)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.audit import audit
from exclusivelog.restoring import restore
from testing.broker import Namespace
from testing.children import ROOT
from testing.processes import PATIENCE, until
from tests.cluster.test_mirror import copy, source, write_everything

pytestmark = [pytest.mark.rule("J4"), pytest.mark.broker]


def brought_back(path: Path, namespace: Namespace, *topics: str) -> dict[str, int]:
    return restore(path, namespace.url, topics or None, admin=namespace.admin, timeout=90.0)


@pytest.mark.parametrize("plain", [False, True])
def test_a_log_comes_back_as_it_was(
    topic: xl.Topic, namespace: Namespace, tmp_path: Path, plain: bool
) -> None:
    write_everything(topic)
    topic.engine.topic("a/b c").producer().send(b"x")
    copy(topic.engine, namespace, plain=plain)
    counts = brought_back(tmp_path / "back", namespace)
    assert counts == {"a/b c": 1, "orders": topic.next_offset}
    with xl.open(tmp_path / "back", readonly=True) as engine:
        assert engine.topics() == ["a/b c", "orders"]
        there = engine.topic("orders")
        assert source(there) == source(topic)
        assert [m.session for m in there.reader()] == [m.session for m in topic.reader()]
        assert there.epoch == topic.epoch
        assert engine.verify().ok
        assert [v for v in audit(engine) if not v.holds] == []
        restored = [event for event in engine.history("orders") if event.kind == "restored"]
        assert [event.epoch for event in restored] == [topic.epoch]
    assert not (tmp_path / "back.restoring").exists()


def test_it_goes_on_as_the_same_log(topic: xl.Topic, namespace: Namespace, tmp_path: Path) -> None:
    write_everything(topic)
    copy(topic.engine, namespace)
    brought_back(tmp_path / "back", namespace)
    with xl.open(tmp_path / "back") as engine:
        there = engine.topic("orders")
        with there.producer("exclusive", name="last") as producer:
            assert producer.topic_epoch == topic.epoch + 1  # rule B1
            assert producer.last_sequence_id == 4999  # rule G2
            with pytest.raises(xl.DuplicateSequenceError):
                producer.send(b"again", sequence_id=4999)
            assert producer.send(b"more") == topic.next_offset
        sessions = [message.session for message in there.reader()]
        assert sessions[-1] > max(sessions[:-1])
        copy(engine, namespace)
        copy(engine, namespace)
        engine.verify()
        assert source(there)[:-1] == source(topic)
    with pytest.raises(xl.MirrorMismatchError):  # the old master has not got that
        copy(topic.engine, namespace)


def test_only_some_topics(engine: xl.Engine, namespace: Namespace, tmp_path: Path) -> None:
    for name in "abc":
        engine.topic(name).producer().send(name.encode())
    copy(engine, namespace)
    assert brought_back(tmp_path / "back", namespace, "a", "c") == {"a": 1, "c": 1}
    with pytest.raises(xl.TopicNotFoundError, match="no topic 'nothing'"):
        brought_back(tmp_path / "none", namespace, "nothing")
    assert not (tmp_path / "none").exists()


def test_a_log_whose_beginning_was_trimmed(
    topic: xl.Topic, namespace: Namespace, tmp_path: Path
) -> None:
    topic.producer().send_many([b"%d" % i for i in range(10)])
    topic.trim(before=4)
    copy(topic.engine, namespace, trimmed="earliest")
    assert brought_back(tmp_path / "back", namespace) == {"orders": 6}
    with xl.open(tmp_path / "back") as engine:
        there = engine.topic("orders")
        assert (there.first_offset, there.next_offset) == (4, 10)
        assert source(there) == source(topic)


def test_what_is_there_is_not_overwritten(
    topic: xl.Topic, namespace: Namespace, tmp_path: Path
) -> None:
    topic.producer().send(b"x")
    copy(topic.engine, namespace)
    with pytest.raises(xl.LedgerError, match="is not empty; restore into a new directory"):
        brought_back(Path(topic.engine.path), namespace)
    (tmp_path / "file").touch()
    with pytest.raises(xl.LedgerError, match="is not empty"):
        brought_back(tmp_path / "file", namespace)
    (tmp_path / "empty").mkdir()
    assert brought_back(tmp_path / "empty", namespace) == {"orders": 1}
    (tmp_path / "empty2").mkdir()
    (tmp_path / "link").symlink_to("empty2")
    (tmp_path / "empty2.restoring").mkdir()
    (tmp_path / "empty2.restoring" / "mine").touch()
    assert brought_back(tmp_path / "link", namespace) == {"orders": 1}
    assert (tmp_path / "empty2.restoring" / "mine").exists()
    assert os.listdir(tmp_path / "empty2") == os.listdir(tmp_path / "empty")


def test_a_mount_point_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(tmp_path))
    with pytest.raises(xl.LedgerError, match="is a mount point; restore into a new directory"):
        restore(tmp_path, "pulsar://127.0.0.1:1/a/b")


def test_nothing_is_not_brought_back(topic: xl.Topic, namespace: Namespace, tmp_path: Path) -> None:
    with pytest.raises(xl.TopicNotFoundError, match="no messages of any topic"):
        brought_back(tmp_path / "back", namespace)
    topic.producer().send(b"x")
    copy(topic.engine, namespace)
    with pytest.raises(xl.TopicNotFoundError, match="no topic 'order'"):
        brought_back(tmp_path / "back", namespace, "order")
    assert brought_back(tmp_path / "back", namespace) == {"orders": 1}  # and no 'order'


def test_topics_of_others_are_not_taken_for_empty_ones(
    topic: xl.Topic, namespace: Namespace, tmp_path: Path
) -> None:
    topic.producer().send(b"x")
    copy(topic.engine, namespace)
    namespace.call("PUT", f"persistent/{namespace.path}/others/partitions", 2)
    with namespace.client() as client:
        client.create_producer(f"persistent://{namespace.path}/others").send(b"hello")
    with pytest.raises(xl.ClusterError, match=r"no mirror has made .*'others-partition-0'; name"):
        brought_back(tmp_path / "back", namespace)
    namespace.call("DELETE", f"persistent/{namespace.path}/others/partitions?force=true")
    with namespace.client() as client:
        client.create_producer(f"persistent://{namespace.path}/another").send(b"hello")
    with pytest.raises(xl.MirrorMismatchError, match=r"'another' .*Name the other topics"):
        brought_back(tmp_path / "back", namespace)
    assert brought_back(tmp_path / "back", namespace, "orders") == {"orders": 1}


def test_topics_of_two_logs_are_told_apart(
    topic: xl.Topic, namespace: Namespace, tmp_path: Path
) -> None:
    topic.producer().send(b"x")
    copy(topic.engine, namespace)
    with xl.open(tmp_path / "other") as other:
        other.topic("bills").producer().send(b"y")
        copy(other, namespace)
        said = f"'bills' is of {other.ledger.uuid}, 'orders' is of {topic.engine.ledger.uuid}"
    with pytest.raises(xl.ClusterError, match=said):
        brought_back(tmp_path / "back", namespace)
    assert brought_back(tmp_path / "back", namespace, "orders") == {"orders": 1}


def test_missing_messages_are_an_error(
    topic: xl.Topic, namespace: Namespace, tmp_path: Path
) -> None:
    with topic.producer() as producer:
        producer.send(b"a")
        copy(topic.engine, namespace)
        producer.send(b"b")
        copy(topic.engine, namespace)
    first, second = (message.data() for message in namespace.messages("orders"))
    with namespace.client() as client:
        hole, twice = (
            client.create_producer(f"persistent://{namespace.path}/{name}")
            for name in ("hole", "twice")
        )
        hole.send(second, properties={"exclusivelog.topic": "hole"})
        twice.send(first, properties={"exclusivelog.topic": "twice"})
        twice.send(first, properties={"exclusivelog.topic": "twice"})
    with pytest.raises(xl.MirrorMismatchError, match="offset 1 comes where 0 should be"):
        brought_back(tmp_path / "back", namespace, "hole")
    with pytest.raises(xl.MirrorMismatchError, match="offset 0 comes where 1 should be"):
        brought_back(tmp_path / "back", namespace, "twice")
    assert not (tmp_path / "back").exists()


def test_it_can_be_killed_and_run_again(
    topic: xl.Topic, namespace: Namespace, tmp_path: Path
) -> None:
    with topic.producer() as producer:
        for _ in range(60):
            producer.send_many([b"x" * 100] * 5000)
    copy(topic.engine, namespace)
    back = tmp_path / "back"
    source = ("--from", namespace.url, "--admin", namespace.admin)
    command = [sys.executable, "-m", "exclusivelog.cli", "mirror", str(back), *source]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for seconds in (0.0, 0.3, 0.6):
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            until(lambda: (tmp_path / "back.restoring" / "log").exists() or back.exists())
            time.sleep(seconds)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)
        if back.exists():  # this machine is fast
            break
    else:
        with pytest.raises(xl.LedgerError):
            xl.open(back, create=False)
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        assert done.stdout == "orders: 300,000 messages\n"
    with xl.open(back) as engine:
        assert engine.topic("orders").next_offset == 300_000
        assert engine.verify().ok
