"""The `exclusivelog` command, run as users run it: a process, its output, its exit status.

Commands that read do not affect other processes, and show what these do. An error is one line on
stderr and status 1, never a traceback; an interrupt, or output that `| head` cuts off, is not an
error and prints nothing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import typing
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import exclusivelog as xl
from exclusivelog import __version__
from exclusivelog.cli import demo, demonstrating, load, messaging
from exclusivelog.local.storage.tables import PAIR
from exclusivelog.local.versions import FORMAT
from exclusivelog.types import ModeName
from testing.commands import run
from testing.processes import PATIENCE, open_producer, until

pytestmark = pytest.mark.once
COMMANDS = load().commands
PROGRAM = [sys.executable, "-m", "exclusivelog.cli"]


def lines(*arguments: str, stdin: bytes = b"") -> list[list[str]]:
    """The output of a command that succeeds and has nothing to say on stderr."""
    done = run(*arguments, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b"")
    return [line.split("\t") for line in done.stdout.decode().splitlines()]


def refusal(*arguments: str) -> str:
    """The one line that a command which fails has to say."""
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("exclusivelog: ")
    return line.removeprefix("exclusivelog: ")


@contextlib.contextmanager
def start(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The command at work; killed at the end, should it not have ended by itself."""
    with subprocess.Popen(
        [*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def fill(topic: xl.Topic, values: Sequence[bytes]) -> None:
    with topic.producer(name="filler") as producer:
        producer.send_many(values)


# ---- looking -----------------------------------------------------------------------------


def test_topics_and_owners_show_who_holds_and_who_waits(engine, path, worker) -> None:
    fill(engine.topic("orders"), [b"a", b"b"])
    engine.topic("empty")
    holder, standby = worker(name="boss"), worker(name="deputy")
    holder.call(open_producer, "exclusive", name="p1", priority=4)
    standby.start(open_producer, "wait_for_exclusive", name="p2", priority=7)
    until(lambda: engine.topic("orders").waiters)

    assert lines("topics", path) == [
        ["topic", "messages", "epoch", "owner", "waiters", "kind"],
        ["empty", "0", "0", "-", "0", "messages"],
        ["orders", "2", "1", f"p1 (pid {holder.pid})", "1", "messages"],
    ]
    header, *rows = lines("owners", path)
    wanted = [
        "topic",
        "state",
        "producer",
        "mode",
        "priority",
        "epoch",
        "engine",
        "engine id",
        "pid",
    ]
    assert header == [*wanted, "since"]
    ids = {e.name: e.id for e in engine.engines()}
    boss = ["boss", ids["boss"], str(holder.pid)]
    deputy = ["deputy", ids["deputy"], str(standby.pid)]
    assert [row[:-1] for row in rows] == [
        ["orders", "holds", "p1", "exclusive", "4", "1", *boss],
        ["orders", "waits", "p2", "wait_for_exclusive", "7", "-", *deputy],
    ]
    assert lines("owners", path, "empty") == [header]
    facts = dict(lines("info", path, "orders"))
    assert (facts["owner"], facts["waiters"]) == (f"p1 (pid {holder.pid})", "1")


def test_owners_shows_who_holds_a_lock_and_who_waits(engine, path) -> None:
    pid = str(os.getpid())
    with engine.lock("free"):
        pass
    with engine.lock("job", priority=2), xl.open(path, name="next") as other:
        waiting = other.role_async("job", priority=1)
        until(lambda: any(info.waiters for info in engine.roles()))
        topics, header, *rows = lines("owners", path)
        assert (topics[0], header[0]) == ("topic", "lock or role")
        assert [[*row[:2], *row[3:6], row[7]] for row in rows] == [
            ["job", "holds", "2", "1", "test", pid],
            ["job", "waits", "1", "-", "next", pid],
        ]
        facts = [json.loads(line) for (line,) in lines("owners", path, "--json")]
        assert [(each["role"], each["state"], each.get("epoch")) for each in facts] == [
            ("job", "holds", 1),
            ("job", "waits", None),
        ]
        assert lines("owners", path, "job") == [header, *rows]
        assert [json.loads(line) for (line,) in lines("owners", path, "job", "--json")] == facts
        engine.topic("job")  # a topic of that name is another thing
        topics, lock, *both = lines("owners", path, "job")
        assert (topics[0], lock, both) == ("topic", header, rows)
        waiting.cancel()
    told = lines("owners", path, "free", "--history")[1:]
    assert [row[1:4] for row in told] == [
        ["lock or role free", "1", "grant"],
        ["lock or role free", "1", "release"],
    ]
    assert {row[1] for row in lines("owners", path, "--history")[1:]} == {
        "lock or role free",
        "lock or role job",
    }


def test_owners_takes_the_name_of_a_lock_on_a_cluster_too() -> None:
    url = f"memory://{uuid.uuid4().hex}"

    def shown(name: str) -> list[list[str]]:
        """In this process, which has that memory."""
        done = CliRunner().invoke(load(), ["owners", url, name])
        assert done.exit_code == 0, done.output
        return [line.split("\t") for line in done.output.splitlines()]

    with xl.open(url, "holder") as engine, engine.lock("job"), engine.lock("orders"):
        with engine.topic("orders").producer("exclusive", name="p"):
            header, row = shown("job")
            assert (header[0], row[0], row[1]) == ("lock or role", "job", "holds")
            # Locks are not listed beside a topic: each costs a look at its log.
            header, row = shown("orders")
            assert (header[0], row[:3]) == ("topic", ["orders", "holds", "p"])


def test_claims_are_listed_and_their_history_told(engine, path) -> None:
    first = engine.own("shards", {"s1": None, "s2": 7})
    engine.own({"lonely": None})
    reader = engine.topic("orders").reader(group="billing")
    columns = ["group", "resource", "generation", "kind", "engine", "engine id", "pid", "since"]
    who = ["test", engine.id, str(os.getpid())]
    listed = lines("claims", path)
    assert listed[0] == columns
    assert [row[:7] for row in listed[1:]] == [
        ["shards", "s1", "1", "claim", *who],
        ["shards", "s2", "7", "claim", *who],
        ["-", "lonely", "1", "claim", *who],
        ["billing", "orders", "1", "reader", *who],
    ]
    assert [row[1] for row in lines("claims", path, "shards")[1:]] == ["s1", "s2"]
    found = [json.loads(line) for line in run("claims", path, "--json").stdout.splitlines()]
    assert found[1] == {
        "group": "shards",
        "resource": "s2",
        "generation": 7,
        "kind": "claim",
        "engine": "test",
        "engine_id": engine.id,
        "pid": os.getpid(),
        "since": engine.claims()[0].since,
    }
    first.release()
    reader.close()
    told = lines("claims", path, "--history")
    assert told[0] == ["time", "group", "resource", "generation", "kind", "reason", "from", "to"]
    kinds = [(row[1], row[2], row[4], row[5]) for row in told[1:]]
    assert kinds[:2] == [("shards", "s1", "own", "claim"), ("shards", "s2", "own", "claim")]
    assert kinds[3] == ("billing", "orders", "own", "reader")
    assert kinds[-1] == ("billing", "orders", "release", "closed")
    assert told[-1][6:] == [f"test (id {engine.id}, pid {os.getpid()})", "-"]
    as_json = run("claims", path, "billing", "--history", "--json").stdout.splitlines()
    assert [json.loads(line)["kind"] for line in as_json] == ["own", "release"]
    assert [row[1] for row in lines("owners", path, "--history")[1:]] == []


def test_roles_are_listed_and_their_history_told(engine, path) -> None:
    binds = {"topics": ["a", "b"], "groups": {"g": ["c"]}, "claims": {"s": {"s1": None}}}
    role = engine.role("billing", **binds)
    waiting = engine.role_async("billing", **binds)
    engine.role("idle").close()
    columns = [
        "role",
        "epoch",
        "topics",
        "groups",
        "claims",
        "waiting",
        "engine",
        "engine id",
        "pid",
        "since",
    ]
    who = ["test", engine.id, str(os.getpid())]
    listed = lines("roles", path)
    assert listed[0] == columns
    assert [row[:9] for row in listed[1:]] == [
        ["billing", "1", "a, b", "g: c", "s: s1", "1", *who],
        ["idle", "1", "-", "-", "-", "0", "-", "-", "-"],
    ]
    found = json.loads(run("roles", path, "billing", "--json").stdout)
    assert found == {
        "role": "billing",
        "epoch": 1,
        "topics": ["a", "b"],
        "groups": {"g": ["c"]},
        "claims": {"s": ["s1"]},
        "waiting": 1,
        "engine": "test",
        "engine_id": engine.id,
        "pid": os.getpid(),
        "since": engine.roles()[0].holder.since,
    }
    role.close()
    waiting.result(PATIENCE).close()
    told = lines("roles", path, "billing", "--history")
    assert [(row[2], row[3], row[4]) for row in told[1:]] == [
        ("1", "grant", "request"),
        ("1", "release", "closed"),
        ("2", "grant", "promotion"),
        ("2", "release", "closed"),
    ]


def test_groups_are_listed(engine, path) -> None:
    for name in ("orders", "other"):
        fill(engine.topic(name), [b"1", b"2", b"3"])
    with engine.reader(["orders", "other"], group="billing") as reader:
        reader.read_batch(3)
        reader.commit()
    kept = engine.topic("other").reader(group="audit")
    listed = lines("groups", path)
    assert listed[0] == ["group", "topic", "position", "lag", "engine", "engine id", "pid", "since"]
    assert [row[:7] for row in listed[1:]] == [
        ["audit", "other", "-", "-", "test", engine.id, str(os.getpid())],
        ["billing", "orders", "2", "1", "-", "-", "-"],
        ["billing", "other", "1", "2", "-", "-", "-"],
    ]
    (only,) = run("groups", path, "audit", "--json").stdout.splitlines()
    assert json.loads(only)["topic"] == "other"
    kept.close()
    assert [len(lines(command, path)) for command in ("claims", "groups")] == [1, 3]


def test_info_tells_what_the_ledger_uses_and_who_has_it_open(engine, path) -> None:
    fill(engine.topic("orders"), [b"a", b"b"])
    rows = lines("info", path)
    blank = rows.index([""])
    facts = dict(rows[:blank])
    assert (facts["path"], facts["topics"], facts["engines"]) == (path, "1", "1")
    assert rows[blank + 1] == ["engine", "id", "pid", "heartbeat", "properties"]
    assert [row[:3] for row in rows[blank + 2 :]] == [["test", engine.id, str(os.getpid())]]
    facts = dict(lines("info", path, "orders"))
    assert (facts["messages"], facts["next offset"], facts["epoch"]) == ("2", "2", "0")
    assert facts["last message"].endswith("by filler")


def objects(*arguments: str) -> list[dict[str, Any]]:
    """The JSON objects that a command prints, one a line."""
    return [json.loads(line) for (line,) in lines(*arguments)]


def test_topics_and_info_tell_what_a_topic_holds(engine, path) -> None:
    fill(engine.topic("orders"), [b"a"])
    with xl.SharedMap(engine.topic("settings"), value=xl.serde.json) as settings:
        settings.put("colour", "blue")
    with xl.SharedState(engine.topic("counts"), apply=lambda state, op: op) as counts:
        counts.write(lambda state: [{"n": 1}])
    kinds = {"__events__": "events", "counts": "state", "orders": "messages", "settings": "map"}
    assert {row[0]: row[-1] for row in lines("topics", path)[1:]} == {
        name: kind for name, kind in kinds.items() if name in engine.topics()
    }
    told = {topic["topic"]: topic for topic in objects("topics", path, "--json")}
    assert list(told) == engine.topics()
    assert {name: topic["kind"] for name, topic in told.items()} == {
        name: kinds[name] for name in told
    }
    assert told["settings"]["serializers"] == {"key": "str", "value": "json"}
    assert told["orders"]["serializers"] == {}
    assert dict(lines("info", path, "settings"))["kind"] == "map (key=str, value=json)"
    assert dict(lines("info", path, "orders"))["kind"] == "messages"
    (facts,) = objects("info", path, "__events__", "--json")
    assert facts["kind"] == "events"


def test_info_and_topics_give_their_facts_as_json(engine, path) -> None:
    fill(engine.topic("orders"), [b"a", b"b"])
    with engine.topic("orders").producer("exclusive", name="boss"):
        (listed,) = (t for t in objects("topics", path, "--json") if t["topic"] == "orders")
        (facts,) = objects("info", path, "orders", "--json")
    last = facts.pop("last_message")
    assert (last["value"], last["offset"]) == ("b", 1)
    assert listed == facts
    assert (facts["messages"], facts["first_offset"], facts["next_offset"]) == (2, 0, 2)
    assert [(h["producer_name"], h["pid"]) for h in facts["holders"]] == [("boss", os.getpid())]
    (ledger,) = objects("info", path, "--json")
    assert (ledger["path"], ledger["format"]) == (path, FORMAT)
    assert [(e["name"], e["pid"]) for e in ledger["engines"]] == [("test", os.getpid())]
    engine.topic("empty")
    assert objects("info", path, "empty", "--json")[0]["last_message"] is None


def test_upgrade_has_nothing_to_do_in_this_versions_format(engine, path) -> None:
    said = lines("upgrade", path)
    assert said == [[f"{path} has format {FORMAT} already: nothing to do"]]


def test_who_looks_takes_no_slot_and_changes_nothing(engine, path) -> None:
    fill(engine.topic("orders"), [b"a"])
    engine.ledger.checkpoint()
    before = engine.stats()["transactions"]
    for command in ("info", "owners", "verify"):
        lines(command, path)
    assert engine.stats()["transactions"] == before


def test_verify_names_the_damage_and_fails(engine, path) -> None:
    fill(engine.topic("orders"), [b"a", b"b"])
    assert lines("verify", path) == [["1 topics, 1 entries, 2 messages: sound"]]
    with engine.ledger.write_checkpointed() as tables:
        ((last, data),) = tables.entries.walk(engine.topic("orders").id, 0)
        tables.rows.put("entries", PAIR.pack(engine.topic("orders").id, last), b"?" + data[1:])
    done = run("verify", path)
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"offsets 0 to 1 is damaged" in done.stdout
    assert b"1 problems" in done.stdout
    assert "offsets 0 to 1 is damaged" in refusal("tail", path, "orders")


def test_compression_is_set_and_shown(topic, path) -> None:
    pytest.importorskip("lz4")
    (first,) = lines("compression", path, "orders", "lz4")
    assert first == ["orders: compression of new messages: lz4"]
    with topic.producer() as producer:
        producer.send_many([b"%d, and more of the same" % n for n in range(9000)])
    shown = json.loads(run("compression", path, "orders", "--json").stdout)
    stats = topic.stats()
    assert (shown["compression"], shown["entries"], shown["methods"]) == ("lz4", 1, stats.methods)
    assert (shown["raw_bytes"], shown["stored_bytes"]) == (stats.raw_bytes, stats.stored_bytes)
    assert shown["ratio"] == round(stats.ratio, 2) > 2
    text = run("compression", path, "orders").stdout.decode()
    assert "stored as lz4" in text
    assert lines("compression", path, "orders", "none")[0][0].endswith("messages: none")
    assert topic.stats().compression is None
    assert "has no topic 'none'" in refusal("compression", path, "none", "lz4")


def test_compact_and_trim(topic, path) -> None:
    with topic.producer() as producer:
        producer.send_many([b"1", b"2", b"3"], keys=["a", "b", "a"])
    assert lines("compact", path, "orders") == [["orders is compacted: 2 messages"]]
    assert lines("trim", path, "orders", "--before", "2") == [
        ["orders begins at offset 2: 2 messages removed"]
    ]
    nothing = run("trim", path, "orders")
    assert (nothing.returncode, nothing.stdout) == (2, b"")
    assert b"give --before OFFSET, --max-bytes BYTES, or both" in nothing.stderr
    assert [message.offset for message in topic.reader()] == [2]
    assert [message.offset for message in topic.reader(read_compacted=True)] == [1, 2]
    assert "has no topic 'none'" in refusal("compact", path, "none")


def test_backup_is_a_ledger_of_its_own(engine, path, tmp_path) -> None:
    fill(engine.topic("orders"), [b"a", b"b"])
    copy = str(tmp_path / "copy")
    assert lines("backup", path, copy) == [[f"{path} is copied to {copy}"]]
    assert [row[-1] for row in lines("tail", copy, "orders")] == ["a", "b"]
    assert "is not empty" in refusal("backup", path, copy)


# ---- tail --------------------------------------------------------------------------------


def shown(*arguments: str) -> list[str]:
    return [row[5] for row in lines("tail", *arguments)]


def test_tail_begins_and_ends_where_it_is_told(engine, path) -> None:
    fill(engine.topic("orders"), [b"%d" % number for number in range(30)])
    numbers = [str(number) for number in range(30)]
    assert shown(path, "orders") == numbers[-10:]
    assert shown(path, "orders", "-n", "3") == numbers[-3:]
    assert shown(path, "orders", "--from", "earliest") == numbers
    assert shown(path, "orders", "--from", "5", "-n", "2") == numbers[5:7]
    assert shown(path, "orders", "--from", "latest") == []


def test_tail_shows_all_parts_on_one_line(engine, path) -> None:
    with engine.topic("orders").producer("exclusive", name="p") as producer:
        producer.send(b"v\x1b[2J\n\xff", key="k", properties={"a": "b"}, event_time=5)
        producer.send(None, key=b"\xff")
    first, second = lines("tail", path, "orders")
    assert (first[:2], first[3:]) == (["0", "1"], ["p", "k", "v\\x1b[2J\\n\\xff", "a=b"])
    assert second[3:] == ["p", "\\xff", "(none)"]
    one, two = (json.loads(row[0]) for row in lines("tail", path, "orders", "--json"))
    assert base64.b64decode(one["value_base64"]) == b"v\x1b[2J\n\xff"
    assert (one["key"], one["properties"], one["event_time"]) == ("k", {"a": "b"}, 5)
    assert (one["offset"], one["epoch"], one["producer"], one["sequence_id"]) == (0, 1, "p", 0)
    assert (two["value"], two["key_base64"], two["event_time"]) == (None, "/w==", None)


def test_tail_follows_until_it_is_interrupted(engine, path) -> None:
    fill(engine.topic("orders"), [b"old"])
    with start("tail", path, "orders", "-f") as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline().endswith(b"old\n")
        fill(engine.topic("orders"), [b"new"])
        assert tail.stdout.readline().endswith(b"new\n")
        tail.send_signal(signal.SIGINT)
        rest, errors = tail.communicate(timeout=PATIENCE)
    assert (rest, errors, tail.returncode) == (b"", b"", 130)


def test_a_closed_pipe_ends_quietly(engine, path) -> None:
    fill(engine.topic("orders"), [b"x" * 100] * 5000)
    with start("tail", path, "orders", "--from", "earliest") as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        tail.stdout.readline()
        tail.stdout.close()
        assert tail.wait(PATIENCE) == 128 + signal.SIGPIPE
        assert tail.stderr.read() == b""


# ---- send --------------------------------------------------------------------------------


def test_send_prints_the_offsets_of_its_arguments_and_makes_what_is_missing(path) -> None:
    options = "--key k --name me --mode exclusive --property x=1 --property y=2=3"
    sent = lines("send", path, "orders", "a", "b c", *options.split())
    assert sent == [["0"], ["1"]]
    with xl.open(path) as engine:
        first, second = engine.topic("orders").reader()
        assert (first.value, second.value) == (b"a", b"b c")
        assert (first.key, first.epoch, first.producer_name) == (b"k", 1, "me")
        assert first.properties == {"x": "1", "y": "2=3"}


def test_send_takes_lines_from_stdin(path) -> None:
    many = [b"line %d" % number for number in range(20_000)]
    sent = lines("send", path, "orders", stdin=b"\n".join(many))
    assert sent == [[str(number)] for number in range(len(many))]
    with xl.open(path) as engine:
        assert [message.value for message in engine.topic("orders").reader()] == many


def test_a_line_from_stdin_is_sent_at_once(path) -> None:
    with start("send", path, "orders", "--mode", "exclusive", stdin=subprocess.PIPE) as send:
        assert send.stdin is not None
        assert send.stdout is not None
        for offset in range(2):
            send.stdin.write(b"a line\n")
            send.stdin.flush()
            assert int(send.stdout.readline()) == offset
        send.send_signal(signal.SIGINT)
        rest, errors = send.communicate(timeout=PATIENCE)
    assert (rest, errors, send.returncode) == (b"", b"", 130)
    assert lines("owners", path)[1:] == []


def test_send_says_who_is_in_the_way(engine, path) -> None:
    holder = engine.topic("orders").producer("exclusive", name="boss")
    text = refusal("send", path, "orders", "v", "--mode", "exclusive")
    assert "held by producer 'boss'" in text
    assert f"pid {os.getpid()}" in text
    text = refusal("send", path, "orders", "v", "--mode", "wait_for_exclusive", "--timeout", "0.1")
    assert "was not granted the topic within its timeout" in text
    lines("send", path, "orders", "v", "--mode", "exclusive_with_fencing")
    assert holder.state == "fenced"


# ---- errors ------------------------------------------------------------------------------


def test_a_path_without_a_ledger_is_refused_and_left_as_it_is(tmp_path) -> None:
    assert str(tmp_path / "nowhere") in refusal("topics", str(tmp_path / "nowhere"))
    for command in ("info", "verify"):
        assert "holds no ledger" in refusal(command, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_topic_that_is_not_there_is_named(engine, path) -> None:
    engine.topic("orders")
    for command in ("tail", "info", "owners"):
        assert "no topic 'nope'" in refusal(command, path, "nope")
        assert "no topic 'oders'; did you mean 'orders'?" in refusal(command, path, "oders")
    assert engine.topics() == ["orders"]


def test_a_backup_by_a_url_is_refused(engine, path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = "pulsar://broker:6650/a/b"
    for command in ("backup", "restore"):
        assert f"mirror {path} --to {url}" in refusal(command, path, url)
    assert list(tmp_path.iterdir()) == [Path(path)]


def test_a_lock_on_a_cluster_takes_the_options_of_a_cluster() -> None:
    run_there = ("run", "pulsar://127.0.0.1:1/a/b", "job", "--admin", "http://127.0.0.1:2")
    assert refusal(*run_there, "--", "true").startswith("http://127.0.0.1:2: the admin API cannot")
    said = refusal("run", "memory://here", "job", "--keepalive", "5", "--", "true")
    assert said.startswith("--keepalive 5.0: the cluster's broker decides")


def test_an_argument_is_named_as_it_is_typed(engine, path, tmp_path) -> None:
    used = str(tmp_path / "used")
    os.mkdir(used)
    (tmp_path / "used" / "file").touch()
    there = "pulsar://127.0.0.1:1/a/b"
    for words, said in (
        (("topics", path, "--admin", "x"), "--admin is for clusters; a local ledger takes none"),
        (("topics", there, "--admin", "x"), "--admin 'x' is no URL of an admin API; it takes "),
        (("topics", there, "--token-file", "/no"), "/no: No such file or directory"),
        (("topics", there, "--admin", "http://127.0.0.1:1"), UNREACHABLE),
        (("run", path, "job", "--timeout", "nan", "--", "true"), "--timeout nan: it takes seconds"),
        (("run", path, "", "--", "true"), "NAME '': it takes 1 to 255 bytes of UTF-8"),
        (("send", path, "", "x"), "TOPIC '': it takes 1 to 255 bytes of UTF-8"),
        (("send", path, "t", "x", "--priority", "9" * 20), "--priority 99999999999999999999: it "),
        (("run", used, "job", "--", "true"), f"{used} has other files ('file') but no ledger; "),
    ):
        told = refusal(*words)
        assert told.startswith(said)
        assert not re.search(r"\bNone\b|Errno|open\(\)", told)


UNREACHABLE = "http://127.0.0.1:1: the admin API cannot be reached: Connection refused; give its "


@pytest.mark.sampled
@pytest.mark.parametrize(
    "arguments",
    [
        ["topics"],
        ["bogus"],
        ["tail", "PATH", "t", "--from", "x"],
        ["tail", "PATH", "t", "-n", "-1"],
        ["send", "PATH", "t", "v", "--mode", "exklusive"],
        ["send", "PATH", "t", "v", "--property", "x"],
        ["send", "-", "t", "v"],
        ["backup", "PATH", "-"],
        ["restore", "-", "PATH"],
        ["upgrade", "PATH", "--backup", "-"],
        ["top", "PATH", "--interval", "inf"],
        ["demo", "--rate", "inf"],
    ],
)
def test_wrong_arguments_are_explained(arguments, engine, path) -> None:
    engine.topic("t")
    done = run(*(path if argument == "PATH" else argument for argument in arguments))
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"Usage: " in done.stderr
    assert b"Traceback" not in done.stderr
    assert engine.topic("t").next_offset == 0


def test_every_command_has_a_help_text_and_there_is_a_version() -> None:
    overview = run("--help").stdout.decode()
    for command in (
        "topics",
        "info",
        "tail",
        "send",
        "owners",
        "verify",
        "backup",
        "upgrade",
        "demo",
    ):
        assert f" {command} " in overview
    assert "--follow" in run("tail", "--help").stdout.decode()
    assert lines("--version") == [[f"exclusivelog {__version__}"]]


def without(module: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    program = f"""
import sys
sys.modules[{module!r}] = None
sys.argv = ['exclusivelog', *{arguments!r}]
from exclusivelog.cli import main
main()
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE)


@pytest.mark.parametrize(("module", "command"), [("click", "--help"), ("rich", "demo")])
def test_without_its_extra_it_says_what_to_install(module, command) -> None:
    done = without(module, command)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == (
        "exclusivelog: the command needs the extra cli: pip install 'exclusivelog[cli]'\n"
    )


def test_only_tables_on_a_terminal_and_the_demo_need_rich(engine, path) -> None:
    fill(engine.topic("orders"), [b"a"])
    done = without("rich", "topics", path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.splitlines()[1].startswith(b"orders\t1\t")


def test_a_table_is_drawn_on_a_terminal(engine, path) -> None:
    fill(engine.topic("orders"), [b"a"])
    ours, its = os.openpty()
    try:
        subprocess.run([*PROGRAM, "topics", path], stdout=its, timeout=PATIENCE, check=True)
        drawn = b""
        while b"orders" not in drawn:
            assert select.select([ours], [], [], PATIENCE)[0], drawn
            drawn += os.read(ours, 4096)
    finally:
        os.close(its)
        os.close(ours)
    assert "\u2500\u2500\u2500".encode() in drawn
    assert b"\t" not in drawn


def words(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


@pytest.mark.long
def test_every_command_tells_its_arguments() -> None:
    overview = words(run("--help").stdout.decode())
    for name, command in COMMANDS.items():
        done = run(name, "--help")
        assert (done.returncode, done.stderr) == (0, b"")
        said = words(done.stdout.decode())
        assert said.startswith(f"Usage: exclusivelog {name} ")
        assert command.help is not None
        assert words(command.help) in said
        assert f" {name} {words(command.help).partition('. ')[0]}" in overview
        for parameter in command.params:
            assert words(getattr(parameter, "help", None) or "?") in said, parameter.name


def test_without_a_command_it_lists_them() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, b"")
    assert all(f"  {name} " in done.stderr.decode() for name in COMMANDS)


def test_a_closed_pipe_ends_a_help_text_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        for arguments in (["--help"], ["--version"], ["topics", "--help"]):
            done = subprocess.run(
                [*PROGRAM, *arguments], stdout=closed, stderr=subprocess.PIPE, timeout=PATIENCE
            )
            assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_the_command_knows_the_access_modes_and_the_demos_defaults() -> None:
    modes = {mode.value for mode in xl.AccessMode}
    assert set(messaging.MODES) == set(typing.get_args(ModeName)) == modes
    assert (demonstrating.KILLS, demonstrating.RATE) == (demo.DEFAULT_KILLS, demo.DEFAULT_RATE)


# ---- completion --------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_it_prints_a_completion_script(shell) -> None:
    done = subprocess.run(
        PROGRAM,
        env={**os.environ, "_EXCLUSIVELOG_COMPLETE": f"{shell}_source"},
        capture_output=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"_EXCLUSIVELOG_COMPLETE=%s_complete" % shell.encode() in done.stdout


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["tai"], ["tail"]),
        (["u"], ["unload", "upgrade"]),
        (["tail", "--fo"], ["--follow"]),
        (["send", "log", "orders", "--mode", "wait"], ["wait_for_exclusive"]),
    ],
)
def test_bash_completes_commands_and_options(typed, completed, tmp_path) -> None:
    command = tmp_path / "exclusivelog"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(PROGRAM)} "$@"\n')
    command.chmod(0o755)
    script = f"""
eval "$(_EXCLUSIVELOG_COMPLETE=bash_source exclusivelog)"
COMP_WORDS=({shlex.join(["exclusivelog", *typed])}) COMP_CWORD={len(typed)}
_exclusivelog_completion exclusivelog
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert (done.stdout.split(), done.stderr) == (completed, "")


def test_options_stand_anywhere_before_two_dashes(path) -> None:
    found = lines("send", path, "--key", "k", "orders", "a", "--", "--key", "-")
    assert found == [["0"], ["1"], ["2"]]
    with xl.open(path) as engine:
        sent = [(message.key, message.value) for message in engine.topic("orders").reader()]
    assert sent == [(b"k", b"a"), (b"k", b"--key"), (b"k", b"-")]


def test_a_value_need_not_be_unicode(path) -> None:
    assert lines("send", path, "orders", os.fsdecode(b"\xff"), "") == [["0"], ["1"]]
    with xl.open(path) as engine:
        assert [message.value for message in engine.topic("orders").reader()] == [b"\xff", b""]


# Nothing of these is needed to look at a ledger; each would cost more than the rest.
HEAVY = """
    argcomplete asyncio numpy pyarrow pydantic pyspark rich ssl subprocess tempfile typer
""".split()


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["--help", "topics --help", "topics PATH", "tail PATH orders"])
def test_a_command_imports_only_what_it_needs(command, engine, path) -> None:
    fill(engine.topic("orders"), [b"a"])
    words = [path if word == "PATH" else word for word in command.split()]
    program = f"""
import contextlib, sys
from exclusivelog.cli import main
sys.argv = ['exclusivelog', *{words!r}]
with contextlib.suppress(SystemExit):
    main()
print(*sorted(sys.modules), file=sys.stderr)
"""
    # -S: the environment of the tests may load modules at the start, for editable packages.
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        timeout=PATIENCE,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    loaded = set(done.stderr.decode().split())
    assert loaded.isdisjoint(HEAVY), loaded.intersection(HEAVY)
    if "--help" in words:
        assert "exclusivelog._core" not in loaded
