"""What leaves a log by the command comes back: single messages, exports, backups.

An import that is interrupted, repeated or both leaves each message of its file in the topic once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.cli import importing
from testing.processes import PATIENCE
from testing.terminal import Terminal
from tests.faces.test_cli import PROGRAM, lines, objects, refusal, run

pytestmark = pytest.mark.once

FORMATS = ("jsonl", "csv", "parquet")
HARD = [  # key, value, properties, event time
    (b"k", b"a", {"x": "1", "y": ""}, 5),
    (b"\xfe", b"\xff", {}, None),
    (None, None, {}, None),
    (b"", b"", {}, 0),
    (b"\xc3\xbc", b'q"\r,\n\x00 x', {}, -(10**15)),
    (b"k", None, {}, None),
    (None, b"\r", {}, 10**15),
    (None, b"", {}, None),
    (b"\x00", b"v" * 200_000, {}, None),
]


@pytest.fixture
def orders(path: str) -> str:
    """A ledger whose topic "orders" has all kinds of messages."""
    with xl.open(path) as engine, engine.topic("orders").producer(name="p") as producer:
        for key, value, properties, time in HARD:
            producer.send(value, key=key, properties=properties, event_time=time)
    return path


def contents(path: str, topic: str) -> list[tuple[object, ...]]:
    with xl.open(path, readonly=True) as engine:
        return [(m.key, m.value, m.properties, m.event_time) for m in engine.topic(topic)]


# ---- get ---------------------------------------------------------------------------------


@pytest.mark.long
def test_get_shows_one_message_by_its_offset_or_from_the_end(orders) -> None:
    assert dict(lines("get", orders, "orders", "0"))["properties"] == "x=1 y="
    assert dict(lines("get", orders, "orders", "-8"))["value"] == "\\xff"
    assert dict(lines("get", orders, "orders", "6"))["event time"] == f"{10**15} ms"
    (last,) = objects("get", orders, "orders", "-1", "--json")
    (same,) = objects("get", "--json", orders, "orders", "--", "-1")
    assert last == same
    assert (last["offset"], last["key"], last["producer"]) == (8, "\x00", "p")
    for offset in ("9", "-10"):
        assert f"[{offset}]; its offsets are 0 to 8" in refusal("get", orders, "orders", offset)
    assert "no topic 'other'" in refusal("get", orders, "other", "0")
    for words in (("x",), ("-x",), ("-1", "--raw", "--json"), ()):
        assert run("get", orders, "orders", *words).returncode == 2


def test_get_raw_writes_the_value_byte_for_byte(orders) -> None:
    for offset in (1, 2, 3, 4):
        value = HARD[offset][1]
        done = run("get", orders, "orders", str(offset), "--raw")
        if value is None:
            assert (done.returncode, done.stdout) == (1, b"")
            assert f"the message at {offset} has no value" in done.stderr.decode()
        else:
            assert (done.returncode, done.stdout, done.stderr) == (0, value, b"")


# ---- import ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "csv", pytest.param("parquet", marks=pytest.mark.long)])
def test_what_is_exported_comes_back_once(orders, tmp_path, kind) -> None:
    file = str(tmp_path / f"orders.{kind}")
    lines("export", orders, "orders", file)
    assert lines("import", orders, "copy", file) == [["copy: 9 messages imported"]]
    assert contents(orders, "copy") == contents(orders, "orders") == HARD
    said = "copy: 0 messages imported, 9 were there already"
    assert lines("import", orders, "copy", file) == [[said]]
    (told,) = objects("import", orders, "copy", file, "--name", "again", "--json")
    assert told == {"topic": "copy", "messages": 9, "there_already": 0, "producer": "again"}
    assert contents(orders, "copy") == HARD * 2


KILLED = """
import os, signal, sys
from exclusivelog.cli import importing, main
importing.READ_BYTES, importing.ROWS = 1000, 10
send, left = importing.Import._take, [5]
def take(self, size):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return send(self, size)
importing.Import._take = take
main()
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", FORMATS)
def test_an_import_that_was_killed_is_continued(path, tmp_path, kind) -> None:
    file = str(tmp_path / f"orders.{kind}")
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send_many([b"%d" % number for number in range(100)])
    lines("export", path, "orders", file)
    command = [sys.executable, "-c", KILLED, "import", path, "copy", file]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL, done.stderr
    there = len(contents(path, "copy"))
    assert 0 < there < 100
    said = f"copy: {100 - there} messages imported, {there} were there already"
    assert lines("import", path, "copy", file) == [[said]]
    assert contents(path, "copy") == contents(path, "orders")


def test_an_input_without_a_name_is_known_by_its_content_or_by_the_name_it_is_given(path) -> None:
    given = b'{"value": "a"}\n{"value": "b"}'
    for _ in range(2):
        assert run("import", path, "piped", stdin=given).returncode == 0
        assert run("import", path, "named", "--name", "feed", stdin=given).returncode == 0
    assert [len(contents(path, topic)) for topic in ("piped", "named")] == [4, 2]
    more = given + b'\n{"value": "c"}'
    said = "named: 1 messages imported, 2 were there already\n"
    assert run("import", path, "named", "--name", "feed", stdin=more).stdout.decode() == said


@pytest.mark.long
def test_stdin_that_is_a_file_is_known_by_its_content(path, tmp_path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b'{"value": "a"}\n' * 3)
    for _ in range(2):
        with file.open() as given:
            subprocess.run(
                [*PROGRAM, "import", path, "t"],
                stdin=given,
                check=True,
                timeout=PATIENCE,
                stdout=subprocess.DEVNULL,
            )
    assert len(contents(path, "t")) == 3


WRONG = [
    ("jsonl", b'{"value": "a"}\n{"value": 1}\n{"value": "b"}', 1, "line 2: value takes a string"),
    ("jsonl", b'{"value": "a"}\n\n', 1, "line 2: it is no JSON"),
    ("jsonl", b'{"value": "a"}\n{"value": "b", "event_time": 1%s}' % (b"0" * 30), 1, "line 2: "),
    ("csv", b"key,value\na,b\nc\n", 1, "row 2: it has not as many cells"),
    ("csv", b"key,value\na,b\nc,d,e\n", 1, "row 2: it has not as many cells"),
    ("csv", b'key,value\na,b\n"c,d\n', 1, "row 2: unexpected end of data"),
    ("csv", b"key,value\na,b\nc,\xff\n", 1, "row 2: value is no UTF-8"),
    ("csv", b"value,event_time\na,\nb,soon\n", 1, "row 2: event_time takes ms since 1970"),
    ("csv", b"value,properties\na,\nb,{\n", 1, "row 2: properties is no JSON"),
    ("csv", b"value,properties\na,\nb,[1]\n", 1, "row 2: properties takes an object"),
    ("csv", b"value,properties\na,\nb," + b"[" * 9000, 1, "row 2: properties is nested too deep"),
    ("csv", b'value,properties\na,\nb,"{""x"":""1"",""x"":""2""}"\n', 1, '"x" is there twice'),
    ("csv", b"value_base64\nYQ==\nx\n", 1, "row 2: value_base64 is no base64"),
    ("csv", b"value,missing\na,key\nb,all\n", 1, "row 2: missing takes key, value or both"),
    ("csv", b"key\na\n", 0, "row 1: it has neither value nor value_base64"),
    ("csv", b"value,wert\na,b\n", 0, "'wert' is no column of messages"),
    ("csv", b"value,value\na,b\n", 0, "the column value is there twice"),
    ("csv", b"\xff\n", 0, "is no column of messages"),
    ("csv", b'value\na\n""\n\nb\n', 2, 'row 3: it is blank; write "" for an empty cell'),
    ("csv", b'"value\n', 0, "the names of the columns: unexpected end"),
    ("parquet", b"PAR1", 0, "it is no Parquet"),
]


@pytest.mark.parametrize(("kind", "given", "count", "words"), WRONG)
def test_what_is_no_message_is_named_and_what_is_before_it_is_imported(
    path, tmp_path, kind, given, count, words
) -> None:
    file = tmp_path / f"x.{kind}"
    file.write_bytes(given)
    done = run("import", path, "t", str(file))
    assert (done.returncode, done.stdout) == (2, b"")
    (said,) = done.stderr.decode().splitlines()
    assert said.startswith("exclusivelog: ")
    assert words in said
    assert len(contents(path, "t")) == count


def test_a_file_that_was_corrected_is_continued_by_the_name_that_the_error_tells(
    path, tmp_path
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"value": "a"}\n{"value": 1}\n')
    told = run("import", path, "t", str(file)).stderr.decode()
    name = told.split("--name ")[1].split(",")[0]
    file.write_bytes(b'{"value": "a"}\n{"value": "1"}\n')
    assert lines("import", path, "t", str(file), "--name", name) == [
        ["t: 1 messages imported, 1 were there already"]
    ]
    assert [row[1] for row in contents(path, "t")] == [b"a", b"1"]


def test_a_file_that_changes_while_it_is_named_is_told(path, tmp_path, monkeypatch, capsys) -> None:
    from exclusivelog.cli.program import program

    file, name_of = tmp_path / "x.jsonl", importing._name_of
    file.write_bytes(b'{"value": "a"}\n')

    def named(source: Any) -> str:
        name = name_of(source)
        with file.open("ab") as more:
            more.write(b'{"value": "b"}\n')
        return name

    monkeypatch.setattr(importing, "_name_of", named)
    with pytest.raises(SystemExit) as end:
        program.main(["import", path, "t", str(file)])
    assert end.value.code == 1
    assert "was changed while it was read" in capsys.readouterr().err


def test_csv_of_other_programs_is_taken(path, tmp_path) -> None:
    """A byte order mark, few columns in any order, lines as Windows ends them, an empty value."""
    file = tmp_path / "x.csv"
    file.write_bytes(b"\xef\xbb\xbfvalue,key\r\na,k\r\n,\r\n\r\nb,\r\n")
    assert lines("import", path, "t", str(file)) == [["t: 3 messages imported"]]
    assert [row[:2] for row in contents(path, "t")] == [(b"k", b"a"), (None, b""), (None, b"b")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("column", "values"), [("key", [1, 2]), ("value", [1.5, 2.5]), ("event_time", ["now", "then"])]
)
def test_parquet_of_another_type_is_told_in_one_line(path, tmp_path, column, values) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"value": [b"a", b"b"], column: values}), file)
    done = run("import", path, "t", file)
    assert done.returncode == 2
    [told] = done.stderr.decode().splitlines()
    assert re.search(rf"row 1: {column}s? takes ", told)


@pytest.mark.long
def test_parquet_of_other_programs_is_taken(path, tmp_path, monkeypatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(importing, "BATCH_BYTES", 100)
    file = str(tmp_path / "x.parquet")
    table = {"value": ["a", None, "b" * 300], "n": [1, 2, 3], "properties": [{"x": "1"}] * 3}
    pq.write_table(pa.table(table), file)
    assert lines("import", path, "t", file) == [["t: 3 messages imported"]]
    assert [row[1] for row in contents(path, "t")] == [b"a", None, b"b" * 300]
    assert contents(path, "t")[0] == (None, b"a", {"x": "1"}, None)
    pq.write_table(pa.table({"n": [1]}), file)
    assert "it has no column value" in run("import", path, "t", file).stderr.decode()


def test_endings_that_import_does_not_know_are_refused(path, tmp_path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"value": "a"}')
    done = run("import", path, "t", str(tmp_path / "x.json"))
    assert (done.returncode, done.stdout) == (2, b"")
    assert b".jsonl, .csv, .parquet; give --format" in done.stderr
    assert not os.path.exists(path)
    assert lines("import", path, "t", str(tmp_path / "x.json"), "--format", "jsonl")
    assert b"FILE" in run("import", path, "t", "--format", "parquet").stderr
    none = str(tmp_path / "none.csv")
    reason = "cannot be read: No such file or directory; to read stdin, give - or no FILE"
    assert refusal("import", path, "t", none) == f"{none} {reason}"
    assert refusal("import", path, "t", str(tmp_path)).startswith(f"{tmp_path} cannot be read: Is ")


@pytest.mark.parametrize("kind", FORMATS[:2])
def test_a_dash_is_stdout_and_stdin(orders, tmp_path, monkeypatch, kind) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("export", orders, "orders", "-", "--format", kind)
    assert (done.returncode, done.stderr) == (0, b"stdout: 9 messages\n")
    assert done.stdout == run("export", orders, "orders", "--format", kind).stdout
    given = run("import", orders, "copy", "-", "--format", kind, stdin=done.stdout)
    assert given.stdout == b"copy: 9 messages imported\n"
    assert contents(orders, "copy") == contents(orders, "orders")
    for command in ("export", "import"):
        refused = run(command, orders, "orders", "-", "--format", "parquet")
        assert (refused.returncode, refused.stdout) == (2, b"")
        assert b"; give FILE" in refused.stderr
    assert list(tmp_path.iterdir()) == [Path(orders)]


def test_import_spoils_no_map(engine, path) -> None:
    with xl.SharedMap(engine.topic("settings")) as settings:
        settings.put("a", 1)
    done = run("import", path, "settings", stdin=b'{"value": "a"}')
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"'settings' holds a map" in done.stderr


def test_a_file_that_changes_meanwhile_is_told(path, tmp_path, monkeypatch, capsys) -> None:
    from exclusivelog.cli.program import program

    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"value": "a"}\n')

    def read(source: object, work: importing.Import) -> None:
        with file.open("ab") as more:
            more.write(b'{"value": "b"}\n')

    monkeypatch.setitem(importing.READERS, "jsonl", read)
    with pytest.raises(SystemExit) as end:
        program.main(["import", path, "t", str(file)])
    assert end.value.code == 1
    assert "was changed while it was read" in capsys.readouterr().err


@pytest.mark.long
def test_an_import_tells_its_progress_on_a_terminal(path, tmp_path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"value": "a"}\n' * 3)
    program = (
        "from exclusivelog.cli import importing, main; importing.PROGRESS_SECONDS = 0.0; main()"
    )
    with Terminal([sys.executable, "-c", program, "import", path, "t", str(file)]) as screen:
        screen.see(r"t: 3 messages\s+t: 3 messages imported")
        screen.wait()


# ---- restore -----------------------------------------------------------------------------


def test_a_backup_is_restored_and_checked(orders, tmp_path) -> None:
    copy, back = str(tmp_path / "copy"), str(tmp_path / "back")
    lines("backup", orders, copy)
    ((said,),) = lines("restore", copy, back)
    assert said == f"{back} is restored from {copy}: 1 topics, 2 entries, 9 messages: sound"
    assert contents(back, "orders") == HARD
    lines("send", back, "orders", "more")
    assert (len(contents(copy, "orders")), len(contents(back, "orders"))) == (9, 10)
    assert "is not empty" in refusal("restore", copy, back)
    assert len(contents(back, "orders")) == 10
    assert "holds no ledger" in refusal("restore", str(tmp_path), str(tmp_path / "x"))
    (tmp_path / "empty").mkdir()
    (told,) = objects("restore", copy, str(tmp_path / "empty"), "--json")
    assert (told["ok"], told["messages"]) == (True, 9)


def test_an_interrupted_backup_is_not_restored(orders, tmp_path) -> None:
    copy, back = tmp_path / "copy", tmp_path / "back"
    lines("backup", orders, str(copy))
    (copy / "backup-unfinished").mkdir()
    assert "unfinished" in refusal("restore", str(copy), str(back))
    assert not back.exists()


def test_an_interrupted_restore_is_repeated(orders, tmp_path) -> None:
    copy, back = tmp_path / "copy", tmp_path / "back"
    lines("backup", orders, str(copy))
    (back / "backup-unfinished").mkdir(parents=True)
    assert "unfinished" in refusal("topics", str(back))
    lines("restore", str(copy), str(back))
    assert contents(str(back), "orders") == HARD


@pytest.mark.long
def test_a_damaged_backup_is_told_by_the_status(orders, tmp_path) -> None:
    copy, back = tmp_path / "copy", tmp_path / "back"
    lines("backup", orders, str(copy))
    with xl.open(copy) as engine:
        engine.ledger.checkpoint()  # from the journal, whose end may be missing after a crash
    for file in (copy / "data.mdb", *(copy / "segments").iterdir()):
        file.write_bytes(file.read_bytes().replace(b"v" * 1000, b"v" * 999 + b"?"))
    done = run("restore", str(copy), str(back), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
