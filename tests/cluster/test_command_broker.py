"""Every command of `exclusivelog` by the URL of a cluster, and the demo on one.

A person moves from a local log to a namespace and types the same commands with a URL. What works
shows what the cluster has; what a cluster cannot do is refused with one sentence that names what to
use instead; nothing else happens, and nothing is a traceback.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import exclusivelog as xl
from exclusivelog.cli import load
from exclusivelog.cluster.refused import REASONS
from testing.broker import Namespace, run_in
from testing.processes import PATIENCE

program = load()

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240), pytest.mark.rule("J3")]


@dataclass
class Filled:
    """A namespace with two engines, an owner, a waiter, a group, a claim and a lock."""

    namespace: Namespace
    engine: xl.Engine

    def run(self, arguments: str, folder: Path) -> Result:
        """Run a command; URL, FILE and NEW stand for what they say."""
        space = self.namespace
        named = {"URL": space.url, "FILE": str(folder / "file"), "NEW": str(folder / "new")}
        words = [named.get(word, word) for word in arguments.split()]
        return CliRunner().invoke(program, [words[0], "--admin", space.admin, *words[1:]])


@pytest.fixture(scope="module")
def filled(broker: tuple[str, str]) -> Iterator[Filled]:
    space = Namespace.make(*broker)
    with (
        xl.open(space.url, "there", admin=space.admin),
        xl.open(space.url, "here", {"at": "home"}, admin=space.admin) as engine,
    ):
        topic, _ = engine.topic("orders"), engine.topic("ended")
        with topic.producer("exclusive", name="p", priority=7) as producer:
            producer.send(b"one", key=b"k", properties={"a": "b"}, event_time=5)
            producer.send_many([b"two", None, b"\xff"])
            waiter = topic.producer_async("wait_for_exclusive", name="w", priority=2)
            reader = topic.reader(group="billing")
            reader.read_batch(1)
            reader.commit()
            claim = engine.own("shards", {"s1": 4})
            lock = engine.lock("nightly")
            with engine.topic("moving").producer("exclusive", name="m") as moving:
                moving.send(b"x")
                yield Filled(space, engine)
            waiter.cancel()
            reader.close()
            claim.release()
            lock.close()


WORKS = [
    ("topics URL", r"^moving\t1\t1\tm \(pid \d+\)\t0\tmessages\norders\t4\t1\tp \(pid"),
    ("topics URL --json", r'"topic": "orders", "kind": "messages".*"next_offset": 4, "epoch": 1'),
    ("info URL", r"^topics\t[3-6]\nengines\t2\n\n(.*\n)*here\t\w+\t\d+\t.* ago\tat=home$"),
    ("info URL orders", r"^epoch\t1\nmessages\t4\n(.*\n)*last message\t.* by p\nowner\tp "),
    ("info URL orders --json", r'"last_message": \{"offset": 3.*"value_base64": "/w=="'),
    ("stats URL", r"^topics\t[3-6]\nengines\t2\nwaiters\t1\ngroups\tbilling on orders: 3\n$"),
    ("stats URL orders", r"^messages\t4\n(.*\n)*holders\t1\nwaiters\t1\n"),
    ("stats URL --json", r'^\{"topics": [3-6], "engines": 2, "waiters": 1, "groups": \[.*\]\}$'),
    ("metrics URL", r'^exclusivelog_topic_messages\{.*topic="orders"\} 4\.0$'),
    ("metrics URL --no-topics", r"^exclusivelog_engines\{.*\} 2\.0$"),
    ("owners URL orders", r"\norders\tholds\tp\texclusive\t7\t1\there\t.*\norders\twaits\tw\twait"),
    ("owners URL orders --history", r"\torders\t1\tgrant\trequest\t-\tp of here "),
    ("claims URL", r"^shards\ts1\t4\tclaim\there\t"),
    ("roles URL", r"^nightly\t1\t.*\there\t"),
    ("roles URL nightly --history", r"\tlock or role nightly\t1\tgrant\trequest\t-\t"),
    ("groups URL", r"^billing\torders\t1\t3\there\t"),
    ("tail URL orders", r"^0\t1\t.*\tp\tk\tone\ta=b\n1\t1\t.*\ttwo\n2\t.*\(none\)\n3\t.*\\xff$"),
    ("tail URL orders -n 1 --json", r'^\{"offset": 3, "epoch": 1'),
    ("get URL orders -1 --json", r'^\{"offset": 3, "epoch": 1'),
    ("export URL orders --from 1 --to 3", r'^\{"offset": 1.*\n\{"offset": 2.*\n$'),
    ("export URL orders FILE --format csv", r"file: 4 messages$"),
    ("export URL orders FILE --format parquet --force", r"file: 4 messages$"),
    ("top URL -n 1", r"^orders\t0\t4\t1\tp \(pid \d+\)\t1\t3\n(.*\n)*here\t"),
    ("check URL", r"^pulsar://.* is healthy$"),
    ("verify URL", r"^\d+ topics, \d+ entries, \d+ messages: sound$"),
    ("audit URL orders", r"^orders\tyes\tevery epoch is granted once\t1 grants$"),
    ("report URL FILE", r"file: [3-6] topics, 0 take-overs$"),
    ("send URL more a --mode exclusive --name q", r"^0$"),
    ("unload URL moving --to there --timeout 30", r"^moving\tassigned\t1\there\tthere\t"),
    ("import URL taken FILE --format csv", r"^taken: 4 messages imported$"),
    ("compact URL orders", r"^orders is compacted: \d+ messages$"),
    ("terminate URL ended --yes", r"^ended is terminated at offset 0$"),
    ("mirror NEW orders --from URL", r"^orders: 4 messages$"),
]
REFUSED = {
    "backup URL FILE": str(REASONS["backup"]),
    "compression URL orders": str(REASONS["compression"]),
    "compression URL orders lz4": str(REASONS["compression"]),
    "delete URL orders --yes": str(REASONS["deletion"]),
    "mirror URL --to URL": "exclusivelog mirror NEW --from URL",
    "retention URL orders --max-age 1d": str(REASONS["retention"]),
    "trim URL orders --before 1": str(REASONS["retention"]),
}
LOCAL = {
    "upgrade URL": "is for a local ledger",
    "restore URL NEW": "exclusivelog mirror NEW --from URL",
    "serve URL": "is for a local ledger",
}
FOUR = b"key,value,missing\nk,one,\n,two,key\n,,key value\nk,,\n"
OTHERS = {"completion", "demo", "run"}  # the last two have tests of their own


@pytest.mark.parametrize(("command", "shown"), WORKS, ids=[command for command, _ in WORKS])
def test_a_command_by_url_shows_what_the_cluster_has(
    filled: Filled, tmp_path: Path, command: str, shown: str
) -> None:
    if "--force" in command or "import" in command:
        (tmp_path / "file").write_bytes(FOUR if "import" in command else b"")
    done = filled.run(command, tmp_path)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert re.search(shown, done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("command", [*REFUSED, *LOCAL])
def test_j3_a_command_that_a_cluster_cannot_do_names_the_way_round(
    filled: Filled, tmp_path: Path, command: str
) -> None:
    if command in LOCAL:  # it takes no option of a cluster
        words = command.replace("URL", filled.namespace.url).split()
        done = CliRunner().invoke(
            program, words, env={"EXCLUSIVELOG_ADMIN": filled.namespace.admin}
        )
    else:
        done = filled.run(command, tmp_path)
    assert (done.exit_code, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    reason = (REFUSED | LOCAL)[command].replace("--from URL", "--from ")
    assert line.startswith("exclusivelog: ")
    assert reason in line
    assert filled.engine.topic("orders").next_offset == 4
    assert not list(tmp_path.iterdir())


def test_every_command_is_in_one_of_the_tables() -> None:
    listed = {command.split()[0] for command in [*dict(WORKS), *REFUSED, *LOCAL]}
    assert listed | OTHERS == set(program.commands)


def test_j3_the_way_round_for_backup_makes_a_log_with_every_field(
    filled: Filled, tmp_path: Path
) -> None:
    assert filled.run("mirror NEW --from URL", tmp_path).exit_code == 0
    with xl.open(tmp_path / "new") as back:
        here = list(filled.engine.topic("orders").reader())
        assert list(back.topic("orders").reader()) == here
        with back.topic("orders").producer("exclusive", name="p") as producer:
            assert (producer.last_sequence_id, producer.topic_epoch) == (3, 2)
        assert back.topics() == filled.engine.topics()


def test_the_environment_names_the_admin_api(filled: Filled) -> None:
    space = filled.namespace
    command = [sys.executable, "-m", "exclusivelog", "topics", "{}", "--json"]
    assert run_in(space, command, timeout=PATIENCE, stdout=subprocess.DEVNULL) == 0
    wrong = {**os.environ, "EXCLUSIVELOG_ADMIN": "http://127.0.0.1:1"}
    words = [space.url if word == "{}" else word for word in command]
    done = subprocess.run(words, env=wrong, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "http://127.0.0.1:1: the admin API cannot be reached" in done.stderr


@pytest.mark.rule("A1")
def test_a_command_runs_while_it_holds_a_lock(filled: Filled, tmp_path: Path) -> None:
    space, output = filled.namespace, tmp_path / "output"
    command = [sys.executable, "-m", "exclusivelog", "run", "{}", "job", "--", "sh", "-c"]
    for _ in range(2):
        with output.open("w") as file:
            told = [*command, "echo epoch $EXCLUSIVELOG_EPOCH"]
            assert run_in(space, told, timeout=PATIENCE, stdout=file) == 0
    assert output.read_text() == "epoch 2\n"


@pytest.mark.rule("B10", "C2", "G2")
def test_the_demo_runs_on_a_cluster(namespace: Namespace, tmp_path: Path) -> None:
    """What `make demo ON=pulsar` runs, once its broker is there, with fewer events."""
    output = tmp_path / "output"
    command = [sys.executable, "-m", "exclusivelog", "demo", "--path", "{}"]
    # Slow enough for a busy machine to see the leader before it is through.
    few = ["--events", "400", "--rate", "80", "--kills", "1", "--seed", "7"]
    with output.open("w") as file:
        status = run_in(namespace, [*command, *few], timeout=4 * PATIENCE, stdout=file)
    told = output.read_text()
    assert status == 0, told
    assert told.count(" is killed, ") == 1
    assert "every event exactly once, in order: 400 events" in told
    assert "the audit of its grants and messages: 5 claims hold" in told
    assert told.endswith("verdict: all of it holds\n")


def test_spark_draws_no_leaders_of_a_cluster() -> None:
    url = "pulsar://127.0.0.1:1/public/default"
    done = CliRunner().invoke(program, ["demo", "--path", url, "--report", "page.html"])
    assert done.exit_code == 1
    assert "exclusivelog report URL PAGE" in done.stderr


def test_options_of_a_cluster_are_refused_for_a_directory(path: str) -> None:
    xl.open(path).close()
    done = CliRunner().invoke(program, ["topics", path, "--admin", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert json.dumps(done.stderr).count("--admin is for clusters") == 1
