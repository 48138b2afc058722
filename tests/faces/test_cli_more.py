"""Commands that export, audit, report, delete, terminate, retain and complete."""

from __future__ import annotations

import csv
import datetime as dt
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import exclusivelog as xl
from exclusivelog import audit as audits
from exclusivelog.audit import leaders, plain, runs
from exclusivelog.cli.json_lines import arguments_of
from exclusivelog.cli.program import program
from testing.processes import PATIENCE
from testing.terminal import Terminal
from tests.faces.test_cli import PROGRAM, lines, refusal, run

pytestmark = pytest.mark.once


@pytest.fixture
def orders(path: str) -> str:
    """A ledger whose topic "orders" has four messages, of all kinds."""
    with xl.open(path) as engine, engine.topic("orders").producer(name="p") as producer:
        producer.send(b"a", key=b"k", properties={"x": "1"}, event_time=5)
        producer.send(b"\xff", key=b"\xfe")
        producer.send(None)
        producer.send(b"", key=b"k")
    return path


def contents(path: str, topic: str) -> list[tuple[object, ...]]:
    with xl.open(path, readonly=True) as engine:
        return [(m.key, m.value, m.properties, m.event_time) for m in engine.topic(topic).reader()]


# ---- export, and send ----------------------------------------------------------------------


def test_what_is_exported_can_be_sent_again(orders, tmp_path) -> None:
    done = run("export", orders, "orders")
    assert done.returncode == 0
    assert lines("send", orders, "again", "--json", stdin=done.stdout) == [
        ["0"],
        ["1"],
        ["2"],
        ["3"],
    ]
    assert contents(orders, "again") == contents(orders, "orders")
    assert run("tail", orders, "orders", "--json").stdout == done.stdout


WRONG = [
    (b"", "it is no JSON"),
    (b"{", "it is no JSON"),
    (b"[" * 100_000, "it is nested too deep"),
    (b"\xff", "it is no UTF-8"),
    (b"[]", "it is no object"),
    (b"{}", "it has neither value nor"),
    (b'{"value": 1}', "value takes a string or null, not 1"),
    (b'{"value": NaN}', "value takes a string or null, not NaN"),
    (b'{"value": ["a"]}', 'value takes a string or null, not ["a"]'),
    (b'{"value": "\\ud800"}', "value has half of a surrogate pair"),
    (b'{"value": "a", "value_base64": "AA=="}', "it has value and value_base64"),
    (b'{"value": null, "value_base64": "AA=="}', "it has value and value_base64"),
    (b'{"value": "a", "value": "b"}', '"value" is there twice'),
    (b'{"value_base64": "x"}', 'value_base64 is no base64: "x"'),
    (b'{"value_base64": "\\u00e9"}', "value_base64 is no base64"),
    (b'{"value_base64": null}', "value_base64 takes a string, not null"),
    (b'{"value": "a", "key": 7}', "key takes a string or null, not 7"),
    (b'{"value": "a", "key": "b", "key_base64": "AA=="}', "it has key and key_base64"),
    (b'{"value": "a", "properties": []}', "properties takes an object or null, not []"),
    (b'{"value": "a", "properties": {"x": 1}}', 'properties: "x" takes a string, not 1'),
    (b'{"value": "a", "properties": {"x": "1", "x": "2"}}', '"x" is there twice'),
    (b'{"value": "a", "properties": {"\\ud800": "1"}}', "properties has half of a surrogate pair"),
    (b'{"value": "a", "event_time": "soon"}', "event_time takes ms since 1970"),
    (b'{"value": "a", "event_time": true}', "event_time takes ms since 1970"),
    (b'{"value": "a", "event_time": 1e300}', "event_time takes ms since 1970"),
    (b'{"value": "a", "event_time": 1' + b"0" * 5000 + b"}", "limit"),
    (b'{"value": "a", "proprties": {}}', '"proprties" is no field of a message'),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_send_names_a_line_that_is_no_message(line: bytes, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        arguments_of(line)
    assert words in str(caught.value)


def test_send_ends_at_a_line_that_is_no_message(path) -> None:
    """Those before it are sent. One sentence names the line and the field; the exit status is that
    of wrong arguments."""
    for number, (line, words) in enumerate(WRONG[6:26:6]):
        done = run("send", path, "orders", "--json", stdin=b'{"value": "a"}\n' + line + b"\n{")
        assert (done.returncode, done.stdout) == (2, b"%d\n" % number)
        assert done.stderr.startswith(b"exclusivelog: --json: line 2: ")
        assert words.encode() in done.stderr
        assert done.stderr.count(b"\n") == 1
    late = b'{"value": "a", "event_time": 1%s}' % (b"0" * 30)  # only the library knows that
    done = run("send", path, "orders", "--json", stdin=late)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"--json: line 1: event_time=1" in done.stderr
    done = run("send", path, "orders", "--json", '{"value": "a"}', '{"value": 5}')
    assert (done.returncode, done.stdout) == (2, b"%d\n" % (number + 1))
    assert b"--json: VALUE 2: value takes a string or null, not 5" in done.stderr


def test_send_adds_what_is_for_every_message_to_what_a_line_lacks(path) -> None:
    """Lines of `tail --json` have null for what is not there."""
    given = b"""{"value": "a", "key": null, "properties": {"x": "1"}, "event_time": null}
{"value": "b", "key": "own", "properties": {"y": "3"}}
{"value": null, "properties": null, "event_time": 0}"""
    options = ("--json", "--key", "k", "--property", "y=2")
    assert run("send", path, "orders", *options, stdin=given).returncode == 0
    assert contents(path, "orders") == [
        (b"k", b"a", {"x": "1", "y": "2"}, None),
        (b"own", b"b", {"y": "3"}, None),
        (b"k", None, {"y": "2"}, 0),
    ]


def test_csv_has_a_row_for_each_message(orders, tmp_path) -> None:
    file = tmp_path / "orders.csv"
    assert lines("export", orders, "orders", str(file)) == [[f"{file}: 4 messages"]]
    with file.open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert [row["offset"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["value"] for row in rows] == ["a", "", "", ""]
    assert [row["value_base64"] for row in rows] == ["", "/w==", "", ""]
    assert json.loads(rows[0]["properties"]) == {"x": "1"}


@pytest.mark.long
def test_parquet_has_what_read_arrow_gives(orders, tmp_path) -> None:
    file = tmp_path / "orders.parquet"
    assert lines("export", orders, "orders", str(file)) == [[f"{file}: 4 messages"]]
    table = pq.read_table(file)
    assert table.column("value").to_pylist() == [b"a", b"\xff", None, b""]
    assert "FILE" in run("export", orders, "orders", "--format", "parquet").stderr.decode()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_part_of_a_topic_is_exported(path, tmp_path, kind) -> None:
    file = tmp_path / f"part.{kind}"
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send_many([b"%d" % i for i in range(100)], keys=[b"a", b"b"] * 50)
        time.sleep(0.05)
        middle = dt.datetime.now(dt.UTC)
        time.sleep(0.05)
        producer.send_many([b"x"] * 100, keys=[b"a", b"b"] * 50)
    part = ("--from", "10", "--to", middle.isoformat(), "--key", "a")
    assert lines("export", path, "orders", str(file), *part) == [[f"{file}: 45 messages"]]
    assert refusal("export", path, "orders", str(file)).endswith("give --force to replace it")
    part = ("--from", middle.isoformat(), "--force")
    assert lines("export", path, "orders", str(file), *part) == [[f"{file}: 100 messages"]]


@pytest.mark.long
def test_two_exports_to_one_file_leave_a_whole_one(path, tmp_path) -> None:
    file = tmp_path / "orders.jsonl"
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send_many([b"%060d" % i for i in range(50_000)])
    command = [*PROGRAM, "export", path, "orders", str(file), "--force"]
    both = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [(p.communicate(timeout=PATIENCE)[1], p.returncode) for p in both] == [(b"", 0)] * 2
    written = [json.loads(line)["offset"] for line in file.read_text().splitlines()]
    assert written == list(range(50_000))
    assert sorted(tmp_path.iterdir()) == [Path(path), file]


def test_an_export_that_fails_leaves_no_file(orders, tmp_path) -> None:
    file = tmp_path / "no.parquet"
    assert "no message" in refusal("export", orders, "orders", str(file), "--from", "latest")
    assert list(tmp_path.iterdir()) == [Path(orders)]
    assert "'other'" in refusal("export", orders, "other", str(file))
    assert list(tmp_path.iterdir()) == [Path(orders)]


def test_an_export_names_a_file_that_cannot_be_written(orders, tmp_path) -> None:
    away, pipe = str(tmp_path / "away" / "x.csv"), str(tmp_path / "pipe.csv")
    os.mkfifo(pipe)
    said = f"{away} cannot be written: No such file or directory"
    assert refusal("export", orders, "orders", away) == said
    for force in ((), ("--force",)):
        assert "is a directory" in refusal("export", orders, "orders", str(tmp_path), *force)
        assert "no regular file; to write" in refusal("export", orders, "orders", pipe, *force)
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_a_full_stdout_is_named_and_no_result_told(orders) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*PROGRAM, "export", orders, "orders", "-"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
        )
    assert done.stderr == b"exclusivelog: stdout cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("command", ["export {} orders -", "export {} orders", "report {} -"])
def test_a_closed_stdout_is_named_and_no_result_told(orders, command) -> None:
    line = shlex.join([*PROGRAM, *command.format(orders).split()])
    done = subprocess.run(["sh", "-c", f"{line} >&-"], capture_output=True, timeout=PATIENCE)
    assert done.stderr == b"exclusivelog: stdout cannot be written: it is closed\n"
    assert done.returncode == 1


@pytest.mark.long
def test_a_report_goes_to_stdout(orders, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("report", orders, "-")
    assert (done.returncode, done.stderr) == (0, b"stdout: 1 topics, 0 take-overs\n")
    assert done.stdout.lower().startswith(b"<!doctype html>")
    assert list(tmp_path.iterdir()) == [Path(orders)]
    away = str(tmp_path / "away" / "page.html")
    assert refusal("report", orders, away) == f"{away} cannot be written: No such file or directory"


def test_a_symbolic_link_to_an_exported_file_stays_one(orders, tmp_path) -> None:
    link, file = tmp_path / "link.jsonl", tmp_path / "there" / "file"
    file.parent.mkdir()
    link.symlink_to(file)
    for force in ((), ("--force",)):
        assert run("export", orders, "orders", str(link), *force).returncode == 0
    assert link.is_symlink()
    assert file.read_bytes().count(b"\n") == 4


def test_times_are_taken_where_offsets_are(orders) -> None:
    later = (dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)).isoformat()
    assert lines("tail", orders, "orders", "--from", later) == []
    assert len(lines("tail", orders, "orders", "--from", "2020-01-01T00:00Z")) == 4
    removed = "orders begins at offset 4: 4 messages removed"
    assert lines("trim", orders, "orders", "--before", later) == [[removed]]
    assert b"it takes earliest" in run("tail", orders, "orders", "--from", "soon").stderr
    assert run("trim", orders, "orders").returncode == 2


# ---- audit and report ------------------------------------------------------------------------


@pytest.mark.long
def test_an_audit_without_spark_judges_each_claim(orders) -> None:
    header, *rows = lines("audit", orders)
    assert header == ["topic", "holds", "claim", "facts"]
    assert [row[1] for row in rows] == ["yes"] * 5
    found = [json.loads(line[0]) for line in lines("audit", orders, "orders", "--json")]
    assert {one["claim"] for one in found} >= {"offsets are dense", "every epoch is granted once"}
    assert "no topic 'other'" in refusal("audit", orders, "other")


@pytest.mark.long
def test_an_audit_that_finds_something_says_so_by_its_status(orders) -> None:
    with xl.open(orders) as engine:
        with engine.ledger.write_exclusive() as tables:
            row = tables.topics.find("orders")
            row.epoch = 7  # of which there is no grant
            tables.topics.put(row)
        with engine.topic("orders").producer() as producer:
            producer.send(b"x")
    done = run("audit", orders)
    assert done.returncode == 1
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    assert [row[2] for row in rows if row[1] == "NO"] == ["every epoch is granted once"]


@pytest.mark.rule("G8")
@pytest.mark.parametrize("command", ["topics", "owners", "audit", "top --json", "report"])
def test_a_topic_that_is_deleted_meanwhile_is_left_out(
    orders, tmp_path, command, monkeypatch
) -> None:
    with xl.open(orders) as engine:
        engine.topic("a").producer("exclusive").close()
        engine.topic("z").producer("exclusive").close()
        owner = engine.topic("orders").producer("exclusive")
        listed = xl.Engine.topics

        def topics(reader: xl.Engine) -> list[str]:
            found = listed(reader)
            if "a" in found:
                engine.delete_topic("a")
            return found

        monkeypatch.setattr(xl.Engine, "topics", topics)
        more = [str(tmp_path / "page.html")] if command == "report" else []
        done = CliRunner().invoke(program, [*command.split(), orders, *more])
        assert (done.exit_code, done.exception) == (0, None)
        assert listed(engine) == ["orders", "z"]
        owner.close()
    told = (tmp_path / "page.html").read_text() if more else done.output
    assert "orders" in told


@pytest.mark.rule("G8")
def test_an_audit_names_a_topic_that_it_was_to_judge_and_that_is_deleted_meanwhile(
    engine, monkeypatch
) -> None:
    engine.topic("a").producer().send(b"x")

    def deleting(engine: xl.Engine, topics: list[str]) -> list[str]:
        engine.delete_topic("a")
        return topics

    monkeypatch.setattr(audits, "names_of", deleting)
    with pytest.raises(xl.TopicNotFoundError):
        audits.audit(engine, ["a"])


@pytest.mark.rule("G8")
@pytest.mark.parametrize("trimmed", ["t", "__events__"])
def test_an_audit_reads_anew_what_is_trimmed_meanwhile(engine, trimmed, monkeypatch) -> None:
    topic = engine.topic("t")
    for _ in range(40):
        with topic.producer("exclusive") as producer:
            producer.send_many([b"x"] * 500)
    monkeypatch.setattr(runs, "READ_BYTES", 1000)
    monkeypatch.setattr(audits, "IN_ONE_PASS", 2)
    reads = {"t": xl.Reader.read_arrow, "__events__": leaders.parsed}
    calls = []

    def read(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            about = engine.topic(trimmed)
            about.trim(before=about.next_offset - 10)
        return reads[trimmed](*arguments)

    if trimmed == "t":
        monkeypatch.setattr(xl.Reader, "read_arrow", read)
    else:
        monkeypatch.setattr(leaders, "parsed", read)
    found = audits.audit(engine, ["t"])
    assert len(calls) > 3
    assert [verdict for verdict in found if not verdict.holds] == []


def run_without(module: str, *command: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command where `module` is not installed."""
    program = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv[0] = 'exclusivelog'; "
        "from exclusivelog.cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, timeout=PATIENCE
    )


@pytest.mark.long
def test_audit_and_report_need_no_spark(orders, tmp_path) -> None:
    page = tmp_path / "page.html"
    with xl.open(orders) as engine, engine.topic("orders").producer("exclusive", name="leader"):
        pass
    for command in (["audit", orders], ["report", orders, str(page)]):
        done = run_without("pyspark", *command)
        assert (done.returncode, done.stderr) == (0, b"")
    assert "leader" in page.read_text()


@pytest.mark.long
def test_an_audit_needs_no_arrow(orders) -> None:
    with xl.open(orders) as engine, engine.topic("orders").producer("exclusive") as producer:
        producer.send(b"x")
    done = run_without("pyarrow", "audit", orders)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == run("audit", orders).stdout


@pytest.mark.parametrize("bucket_ms", [0, 1000])
def test_runs_are_the_same_without_arrow(engine, bucket_ms, monkeypatch) -> None:
    topic = engine.topic("t")
    with topic.producer(name="a") as a, topic.producer(name="b") as b:
        for producer in (a, b, a, b, b):
            producer.send_many([b"x"] * 3)
    with topic.producer("exclusive", name="a") as owner:
        owner.send_async(b"y").result()
    for at_once, least in ((8192, 3), (4, 6)):
        monkeypatch.setattr(plain, "AT_ONCE", at_once)
        monkeypatch.setattr(runs, "BATCH_ROWS", at_once)
        assert len(runs.runs(topic, bucket_ms)) >= least
        assert plain.runs(topic, bucket_ms) == runs.runs(topic, bucket_ms)


@pytest.mark.long
def test_what_an_extra_is_missing_for_is_one_line(orders, tmp_path) -> None:
    for module, command, extra in [
        ("pyarrow", ["export", orders, "orders", str(tmp_path / "o.parquet")], "[arrow]"),
        ("pyarrow", ["report", orders, str(tmp_path / "page.html")], "[report]"),
        ("jinja2", ["report", orders, str(tmp_path / "page.html")], "[report]"),
    ]:
        done = run_without(module, *command)
        told = done.stderr.decode()
        assert (done.returncode, told.count("\n")) == (1, 1), told
        assert f"pip install 'exclusivelog{extra}'" in told
    assert [file.name for file in tmp_path.iterdir()] == [Path(orders).name]


# ---- delete, terminate, retention --------------------------------------------------------------


def test_what_cannot_be_undone_asks_first(orders) -> None:
    for command in ("delete", "terminate"):
        done = run(command, orders, "orders")
        assert (done.returncode, done.stdout) == (2, b"")
        assert b"give --yes" in done.stderr
    assert lines("terminate", orders, "orders", "--yes") == [["orders is terminated at offset 4"]]
    assert lines("delete", orders, "orders", "--yes") == [["orders is deleted: 4 messages removed"]]
    assert refusal("delete", orders, "orders", "--yes").count("orders") == 1


def test_a_topic_that_is_held_is_not_deleted(orders) -> None:
    with xl.open(orders) as engine, engine.topic("orders").producer("exclusive", name="leader"):
        assert "orders" in refusal("delete", orders, "orders", "--yes")
    assert len(contents(orders, "orders")) == 4


def test_retention_takes_ages_as_people_write_them(orders) -> None:
    assert lines("retention", orders, "orders", "--max-age", "7d") == [
        ["orders keeps messages of the last 7d"]
    ]
    both = ("--max-age", "1.5h", "--max-bytes", "1000")
    assert lines("retention", orders, "orders", *both) == [
        ["orders keeps messages of the last 90m and at most 1,000 bytes"]
    ]
    assert lines("retention", orders, "orders", "--off") == [["orders keeps everything"]]
    for wrong in (["--off", "--max-age", "1d"], ["--max-age", "soon"], ["--max-age", "7"]):
        assert run("retention", orders, "orders", *wrong).returncode == 2


# ---- completion ------------------------------------------------------------------------------


TYPED = [
    ("tai", "tail "),
    ("tail --fol", "tail --follow "),
    ("send LOG orders --mode wai", "send LOG orders --mode wait_for_exclusive "),
]


@pytest.fixture(scope="module")
def shells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the command, and with a file for each shell to read."""
    where = tmp_path_factory.mktemp("shells")
    command = where / "exclusivelog"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(PROGRAM)} "$@"\n')
    command.chmod(0o755)
    (where / "rc").write_text(
        f"export PATH={where}:$PATH\nPS1='ready> '\n"
        "bind 'set enable-bracketed-paste off'\n"
        'eval "$(exclusivelog completion bash)"\n'
    )
    (where / ".zshrc").write_text(
        f"export PATH={where}:$PATH\nPS1='ready> '\nunsetopt zle_bracketed_paste 2>/dev/null\n"
        'autoload -Uz compinit; compinit -u -D\neval "$(exclusivelog completion zsh)"\n'
    )
    return where


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_what_is_typed(shell: str, shells: Path) -> None:
    """A real shell, on a terminal, that has read the command's completion."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command = {
        "bash": ["bash", "--rcfile", str(shells / "rc"), "-i"],
        "zsh": ["env", f"ZDOTDIR={shells}", "zsh", "-i"],
    }[shell]
    with Terminal(command, (24, 100), directory=shells) as screen:
        for typed, completed in TYPED:
            screen.see(r"ready> ?\Z")
            screen.type(f"exclusivelog {typed}\t")
            screen.see(rf"ready> exclusivelog {re.escape(completed.strip())} ?\Z")
            screen.type("\x15\x0c")  # forget the line, clear the screen


def test_fish_completes_what_is_typed(shells: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    asked = "; ".join(f"complete -C 'exclusivelog {typed}'" for typed, _ in TYPED)
    script = f"set -x PATH {shells} $PATH; exclusivelog completion fish | source; {asked}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "HOME": str(shells)},
    )
    assert done.stderr == ""
    offered = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert offered == [completed.split()[-1] for _, completed in TYPED]


def test_python_m_exclusivelog_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "exclusivelog", "--version"], capture_output=True, timeout=PATIENCE
    )
    assert done.stdout.startswith(b"exclusivelog ")
