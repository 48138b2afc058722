"""The streams of the command: pipes that are non-blocking, as another program of the pipeline makes
them; output in an encoding that lacks characters; readers that leave; and messages that are large.
No line is lost, and none ends the command."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.cli import streams
from exclusivelog.cli.output import BATCH_BYTES, read_some_of
from testing.processes import PATIENCE, until
from tests.faces.test_cli import PROGRAM

pytestmark = pytest.mark.once

COUNT = 5000
UNBUFFERED = {**os.environ, "PYTHONUNBUFFERED": "1"}
ASCII = {**os.environ, "PYTHONIOENCODING": "ascii"}
NAME = "bestellungen-für-øre-東京"


@pytest.fixture
def filled(path: str) -> str:
    with xl.open(path, durability="process") as engine, engine.topic("t").producer() as producer:
        producer.send_many([b"%d" % number for number in range(COUNT)])
    return path


def through_a_nonblocking_pipe(*words: str) -> tuple[int, list[bytes]]:
    """The status and the lines of the command; its stdout is a non-blocking pipe that is read only
    after it is full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with subprocess.Popen([*PROGRAM, *words], stdout=writing, env=UNBUFFERED) as process:
        os.close(writing)
        with open(reading, "rb") as out:
            found = out.read()
        return process.wait(PATIENCE), found.splitlines()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words", ["tail {path} t --from earliest", "tail {path} t -n 5000", "export {path} t"]
)
def test_no_line_is_lost_in_a_nonblocking_pipe(filled: str, words: str) -> None:
    status, found = through_a_nonblocking_pipe(*words.format(path=filled).split())
    assert (status, len(found)) == (0, COUNT)
    assert [b"%d" % number in line for number, line in enumerate(found)] == [True] * COUNT


@pytest.mark.long
def test_nor_is_an_offset_of_send(path: str) -> None:
    status, found = through_a_nonblocking_pipe("send", path, "t", *map(str, range(COUNT)))
    assert (status, found) == (0, [b"%d" % number for number in range(COUNT)])


def test_send_waits_for_a_nonblocking_stdin(path: str) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with subprocess.Popen(
        [*PROGRAM, "send", path, "t"], stdin=reading, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        os.close(reading)
        for number in range(3):
            os.write(writing, b"line %d\n" % number)
            assert process.stdout.readline() == b"%d\n" % number
        os.close(writing)
        assert process.wait(PATIENCE) == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    [
        "tail {path} {topic}",
        "topics {path}",
        "tail {path} {topic} --json",
        "owners {path}",
        "owners {path} --history",
        "info {path}",
        "groups {path}",
        "info {path} {topic}",
        "claims {path}",
        "stats {path}",
        "export {path} {topic}",
        "metrics {path}",
        "audit {path}",
    ],
)
def test_a_character_that_stdout_cannot_encode_is_escaped(path: str, words: str) -> None:
    with xl.open(path, "wörker") as engine:
        with engine.topic(NAME).producer("exclusive", name="prödücer") as producer:
            producer.send_many(["naïve".encode(), b"plain"], keys=["ключ", "k"])
            engine.topic(NAME).reader(group="größe").commit()
            done = subprocess.run(
                [*PROGRAM, *words.format(path=path, topic=NAME).split()],
                capture_output=True,
                timeout=PATIENCE,
                env=ASCII,
            )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    if words.startswith("tail"):
        assert done.stdout.count(b"\n") == 2


def gone_from(process: subprocess.Popen[bytes]) -> int:
    """The exit status once no program reads its output any more."""
    assert process.stdout is not None
    process.stdout.close()
    until(lambda: process.poll() is not None)
    return process.wait(PATIENCE)


def test_tail_ends_when_its_reader_has_left(path: str) -> None:
    """Also if there is nothing to write."""
    with xl.open(path) as engine:
        engine.topic("t").producer().send(b"x")
    command = [*PROGRAM, "tail", "-f", path, "t"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(b"x\n")
        assert process.poll() is None
        assert gone_from(process) == 128 + 13


# ---- large messages ----------------------------------------------------------------------


def test_large_messages_are_held_one_at_a_time(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send_many([bytes(400_000)] * 6 + [b"x"] * 5)
    reader, sizes = topic.reader(), []
    while some := read_some_of(reader, 1000):
        sizes.append(len(some))
    assert sizes == [-(-BATCH_BYTES // 400_000)] * 2 + [5]
    assert len(read_some_of(topic.reader(6), 2)) == 2


def test_what_is_before_an_error_is_shown_first(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"1", b"2"])
    reader = topic.reader()
    taken: Callable[[], list[bytes]] = lambda: [m.value for m in read_some_of(reader, 9)]  # noqa: E731
    real = reader.cursor.take_one
    answers: Iterator[bool] = iter([True, False, False])

    class Cursor:
        check = staticmethod(reader.cursor.check)

        def take_one(self) -> xl.Message | None:
            if next(answers):
                return real()
            raise xl.LedgerCorruptedError("damaged", topic="t", offsets=range(1, 2))

    reader.cursor = Cursor()  # type: ignore[assignment]
    assert taken() == [b"1"]
    with pytest.raises(xl.LedgerCorruptedError):
        taken()


def seconds_for(data: bytes, monkeypatch: pytest.MonkeyPatch) -> float:
    """The CPU time to split this input into lines."""
    chunks = iter([data[at : at + 65536] for at in range(0, len(data), 65536)])
    monkeypatch.setattr(streams, "read_some", lambda _, most: next(chunks, b""))
    began = time.process_time()
    found = b"\n".join(line for lines in streams.lines_of(0, 65536) for line in lines)
    took = time.process_time() - began
    assert found == data.removesuffix(b"\n")
    return took


def test_a_long_line_of_stdin_costs_no_more_than_short_ones(monkeypatch) -> None:
    """It cost the square of its length."""
    size = 24 << 20
    line, lines = bytes(size), (b"x" * 99 + b"\n") * (size // 100)
    assert any(
        seconds_for(line, monkeypatch) < 5 * seconds_for(lines, monkeypatch) for _ in range(5)
    )


@pytest.mark.parametrize(
    "text", [b"", b"a", b"a\n", b"\n", b"\na", b"a\n\nb", b"a" * 70000 + b"\nb"]
)
def test_lines_of_stdin_are_split_at_their_ends(text: bytes, monkeypatch) -> None:
    seconds_for(text, monkeypatch)


# ---- export --------------------------------------------------------------------------------


@pytest.mark.long
def test_export_refuses_an_ending_that_it_does_not_know(filled: str, tmp_path: Path) -> None:
    for name in ("x.xlsx", "x.json", "x.jsonl.gz"):
        done = subprocess.run(
            [*PROGRAM, "export", filled, "t", str(tmp_path / name)],
            capture_output=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 2
        assert b".jsonl, .csv, .parquet; give --format" in done.stderr
        assert not (tmp_path / name).exists()
    for words in ([str(tmp_path / "plain")], [str(tmp_path / "x.txt"), "--format", "jsonl"]):
        subprocess.run([*PROGRAM, "export", filled, "t", *words], check=True, timeout=PATIENCE)
        with open(words[0], encoding="utf-8") as file:
            assert json.loads(next(file))["value"] == "0"
