"""What the command prints: JSON for programs, tables that fit a terminal for people, errors that
advise its own options; and streams that are closed, full or not read, which change no result."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.cli.messaging import MESSAGES
from exclusivelog.cli.program import ADVICE, advised, program
from testing.processes import PATIENCE
from testing.terminal import Terminal
from tests.faces.test_cli import COMMANDS, PROGRAM, lines, run

pytestmark = pytest.mark.once

LONG = "a-topic-with-a-name-that-is-as-long-as-some-people-make-them-" + "x" * 60
ENGINE = "an-engine-with-a-name-of-a-host-and-of-a-data-centre.example.com"
OTHER = f"{ENGINE}.2"

# The arguments of each listing; {path} is the ledger.
LISTINGS = (
    "topics {path}",
    "info {path}",
    "info {path} {topic}",
    "stats {path}",
    "stats {path} {topic}",
    "owners {path}",
    "owners {path} --history",
    "claims {path}",
    "claims {path} --history",
    "groups {path}",
    "roles {path}",
    "roles {path} --history",
    "audit {path}",
    "tail {path} {topic}",
    "compression {path} {topic}",
    "top {path} -n 1",
)
RESULTS = (
    "unload {path} {topic} --to {other}",
    "verify {path}",
    "compact {path} {topic}",
    "trim {path} {topic} --before 1",
    "compression {path} {topic} none",
    "backup {path} {tmp}/b",
    "upgrade {path}",
    "export {path} {topic} {tmp}/e.csv",
    "report {path} {tmp}/page.html",
    "retention {path} {topic} --max-age 1d",
    "terminate {path} plain --yes",
    "delete {path} plain --yes",
    "check {path}",
    "get {path} {topic} -1",
    "import {path} again {tmp}/e.csv",
    "restore {tmp}/b {tmp}/r",
)
WITHOUT_JSON = {
    "metrics": "OpenMetrics",
    "completion": "a script",
    "demo": "a show",
    "run": "its command prints",
    "serve": "a page",
    "send": "each line is a number: its --json is about its input",
}
ELSEWHERE = {"mirror": "tests/cluster/test_mirror_command.py"}


@pytest.fixture
def ledger(path: str) -> Iterator[str]:
    """A ledger with something for each listing, under long names."""
    with xl.open(path, ENGINE, {"address": "tcp://" + ENGINE}) as one, xl.open(path, OTHER) as two:
        with one.topic(LONG).producer("exclusive", name=f"producer-of-{LONG}") as producer:
            producer.send_many([b"v" * 300, b"w"], keys=["k" * 90, "k"])
            waiting = two.topic(LONG).producer_async("wait_for_exclusive", name=f"next-{LONG}")
            with one.topic("plain").producer() as other:
                other.send(b"x")
            one.topic("plain").reader(group=f"group-of-{LONG}").commit()
            one.own(f"claims-of-{LONG}", {f"resource-{LONG}": None})
            one.role(f"role-{LONG}", topics=["a", "b"])
            yield path
            waiting.cancel()


def arguments(shown: str, path: str, tmp: Path) -> list[str]:
    return [word.format(path=path, topic=LONG, other=OTHER, tmp=tmp) for word in shown.split()]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process, which is quicker; its status, output and errors."""

    def of(*words: str) -> tuple[int, str, str]:
        status = 0
        try:
            program.main(list(words), standalone_mode=False)
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return of


# ---- JSON --------------------------------------------------------------------------------


def test_every_command_has_json_but_those_that_print_something_else() -> None:
    with_json = {
        name
        for name, command in COMMANDS.items()
        if name != "send" and any("--json" in option.opts for option in command.params)
    }
    assert set(COMMANDS) - with_json == set(WITHOUT_JSON)
    shown = {line.split()[0] for line in LISTINGS + RESULTS}
    assert with_json == shown | set(ELSEWHERE)


def test_listings_and_results_are_objects(ledger: str, tmp_path: Path, command) -> None:
    for shown in LISTINGS + RESULTS:
        status, said, errors = command(*arguments(shown, ledger, tmp_path), "--json")
        assert (status, errors) == (0, ""), shown
        found = [json.loads(line) for line in said.splitlines()]
        assert found, shown
        assert all(isinstance(each, dict) for each in found), shown


def test_verify_gives_its_problems_as_json(engine, topic, path) -> None:
    with topic.producer() as producer:
        producer.send_many([b"a", b"b"])
    [sound] = lines("verify", path, "--json")
    found = json.loads(sound[0])
    assert found == {"ok": True, "topics": 1, "entries": 1, "messages": 2, "problems": []}


# ---- tables ------------------------------------------------------------------------------

ON_A_TERMINAL = """
import contextlib, json, sys
from exclusivelog.cli import main
for arguments in json.loads(sys.argv[1]):
    print("###", flush=True)
    sys.argv[1:] = arguments
    with contextlib.suppress(SystemExit):
        main()
"""


def drawn(every: list[list[str]], columns: int) -> list[list[str]]:
    """The lines that each of these commands prints on a terminal of that width."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, columns))
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    with subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, json.dumps(every)],
        stdin=subprocess.DEVNULL,
        stdout=its,
        stderr=its,
        env={**environment, "TERM": "xterm"},
    ) as process:
        os.close(its)
        data = b""
        with contextlib.suppress(OSError):  # the end
            while part := os.read(ours, 1 << 16):
                data += part
        process.wait(PATIENCE)
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode())
    return [part.splitlines() for part in text.split("###\r\n")[1:]]


@pytest.mark.long
def test_tables_fit_a_terminal_whatever_the_names(ledger: str, tmp_path: Path) -> None:
    from rich.cells import cell_len

    every = [arguments(shown, ledger, tmp_path) for shown in LISTINGS]
    for columns in (80, 132):
        for shown, printed in zip(LISTINGS, drawn(every, columns), strict=True):
            assert printed, shown
            assert [line for line in printed if cell_len(line) > columns] == [], shown
    # Where even that is too narrow for columns, each row is a list, and nothing is missing.
    owners = dict(zip(LISTINGS, drawn(every, 80), strict=True))["owners {path}"]
    whole = "".join(line[10:].strip() for line in owners)
    assert f"producer-of-{LONG}" in whole
    assert f"next-{LONG}" in whole


@pytest.mark.long
def test_tail_on_a_terminal_is_a_table(engine, topic, path) -> None:
    with topic.producer(name="p") as producer:
        producer.send_many([b"%d" % number for number in range(3)], keys=["a", "b", "c"])
    [printed] = drawn([["tail", path, "orders"]], 100)
    assert printed[0].split() == [*MESSAGES]
    assert [line.split()[0] for line in printed[2:]] == ["0", "1", "2"]
    at = printed[0].index("value")
    assert [line[at] for line in printed[2:]] == ["0", "1", "2"]


@pytest.mark.long
def test_a_table_in_parts_keeps_its_columns(path: str) -> None:
    """`tail -f`: what comes later stands below what was there."""
    with xl.open(path) as engine, engine.topic("orders").producer(name="p") as producer:
        producer.send_many([b"first"] * 1000)  # `tail` reads as many at a time
        producer.send(b"one that is longer than others")
    [printed] = drawn([["tail", path, "orders", "--from", "earliest"]], 120)
    assert printed[-1].split()[0] == "1000"
    assert printed[-1].index("one that") == printed[2].index("first")


# ---- times -------------------------------------------------------------------------------


def test_an_age_is_a_time(topic, path, command) -> None:
    with topic.producer() as producer:
        producer.send(b"x")
    for age, count in (("1h", 1), ("1.5d", 1), ("0s", 0)):
        assert command("tail", path, "orders", "--since", age)[1].count("\n") == count
    for age, first in (("7d", 0), ("0s", 1)):
        said = f"orders begins at offset {first}: {first} message{'' if first else 's'} removed\n"
        assert command("trim", path, "orders", "--before", age) == (0, said, "")
    assert "an age such as 90s" in command("tail", path, "orders", "--since", "1w")[2]


# ---- what removes messages ---------------------------------------------------------------


def on_terminal(*words: str, answer: str) -> str:
    """What the command shows on a terminal, on which this is typed."""
    with Terminal([*PROGRAM, *words], size=(20, 200)) as screen:
        screen.see(r"cannot be undone")
        screen.type(f"{answer}\r")
        screen.wait()
        screen.see(r"removed|Aborted")
        return screen.text()


def test_what_removes_messages_says_how_many_and_asks(topic, path) -> None:
    with topic.producer() as producer:
        producer.send_many([b"x"] * 5)
    trim = ("trim", path, "orders", "--before", "1000000")
    assert "Remove 5 of the 5 messages of orders?" in on_terminal(*trim, answer="n")
    shown = on_terminal("retention", path, "orders", "--max-age", "0s", answer="n")
    assert "orders keeps messages of the last 0s. Remove 5 messages of it?" in shown
    assert (len(topic), topic.retention()) == (5, xl.Retention())
    shown = on_terminal("trim", path, "orders", "--before", "2", answer="y")
    assert "orders begins at offset 2: 2 messages removed" in shown
    assert topic.first_offset == 2


def test_a_retention_says_when_it_removes_them(topic, path, command) -> None:
    with topic.producer() as producer:
        producer.send_many([b"x"] * 5)
    _, told, _ = command("retention", path, "orders", "--max-bytes", "0", "--yes")
    assert "; 5 messages will be removed, in the background; in an hour, if" in told


def test_an_age_needs_its_unit(topic, path, command) -> None:
    status, _, told = command("retention", path, "orders", "--max-age", "7")
    assert status == 2
    assert "7s, 7m, 7h or 7d" in told
    assert topic.retention() == xl.Retention()


def test_sizes_have_units(topic, path, command) -> None:
    for text, size in (("1GB", 10**9), ("1.5 kb", 1500), ("2MiB", 2 << 20), ("77", 77)):
        assert command("retention", path, "orders", "--max-bytes", text)[0] == 0
        assert topic.retention().max_bytes == size
    for wrong in ("1G", "1iB", "-1", "1.5", ""):
        status, _, told = command("retention", path, "orders", "--max-bytes", wrong)
        assert (status, "1GB or 1GiB" in told) == (2, True)


def test_the_retention_is_shown_and_changed_in_parts(topic, path, command) -> None:
    def said(*words: str) -> str:
        return command("retention", path, "orders", *words)[1]

    assert said() == "orders keeps everything\n"
    assert said("--max-age", "7d") == "orders keeps messages of the last 7d\n"
    both = "orders keeps messages of the last 7d and at most 1,000 bytes"
    assert said("--max-bytes", "1kB", "--keep", "keys") == (
        f"{both}, and the last message of every key\n"
    )
    assert said() == f"{both}, and the last message of every key\n"
    assert json.loads(said("--keep", "none", "--max-age", "none", "--json")) == {
        "topic": "orders",
        "max_age": None,
        "max_bytes": 1000,
        "keep": None,
        "due_messages": 0,
    }
    assert said("--off") == said() == "orders keeps everything\n"


# ---- errors ------------------------------------------------------------------------------

# Python's calls and arguments, which no one can type into a shell.
PYTHON = re.compile(r"\b(?:readonly|create|topic|to|engine)=|\w\(\S*\)|\bxl\.|engine\.\w+")


def test_errors_advise_options_of_the_command(topic, path, tmp_path, command) -> None:
    (tmp_path / "empty").mkdir()
    with topic.producer() as producer:
        producer.send_many([b"x"] * 3)
    topic.trim(before=2)
    there = "http://127.0.0.1:1"
    told = [
        command(*words)[2]
        for words in (
            ("topics", str(tmp_path / "empty")),
            ("topics", str(tmp_path / "nowhere")),
            ("tail", path, "orders", "--from", "0"),
            ("unload", path, "orders", "--to", "nobody"),
            ("delete", path, "__events__", "--yes"),
            ("mirror", path, "--to", "pulsar://127.0.0.1:1/a/b", "--admin", there),
        )
    ]
    assert all(text.startswith("exclusivelog: ") for text in told)
    assert [text for text in told if PYTHON.search(text)] == []
    assert "--from earliest continues at the first message" in told[2]
    assert f"--to 'nobody' is not a live engine on {path}; there is 'test' (id " in told[3]
    assert "'cli'" not in told[3]  # which ends with the command


def test_each_advice_is_about_a_text_of_the_library() -> None:
    """A text that was changed would be advised no more, unseen."""
    root = Path(xl.__file__).parent
    code = "".join(f.read_text() for f in root.rglob("*.py") if f.parent.name != "cli")
    code = re.sub(r"\"\s+f?\"", "", code).replace("{", "").replace("}", "")
    samples = (
        'seek("earliest") continues',
        "seek(stop) steps over it",
        "holds no ledger, and ",
        "to=to!r is not a live engine",
        "or open it with readonly=True",
        " and open it with readonly=True, or read a backup",
        "topic.compression(...)",
        "admin=, --admin",
        "check_policies=False, --unchecked-policies",
        "option= is for clusters",  # such as check_policies
        "seconds from 0 on, or None",
        "open() creates it",
        "is internal to the library",
        "open the ledger with a larger map_size",
    )
    assert len(samples) == len(ADVICE)
    assert [text for text in samples if text not in code] == []
    assert advised("seek(7) steps over it") == "--from 7 goes on behind it"


# ---- streams -----------------------------------------------------------------------------


@pytest.fixture(params=["closed", "full disk", "full pipe"])
def shell(request: pytest.FixtureRequest, full_pipe: int) -> Callable[..., tuple[int, bytes]]:
    """Runs the command with such a stderr; its status and output."""
    redirection = {"closed": "2>&-", "full disk": "2>/dev/full", "full pipe": ""}

    def of(*words: str) -> tuple[int, bytes]:
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {redirection[request.param]}', "sh", *PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=full_pipe,
            timeout=PATIENCE,
        )
        return done.returncode, done.stdout

    return of


@pytest.mark.long
def test_no_stderr_changes_what_a_command_does(shell, path: str) -> None:
    assert shell("send", path, "orders", "a") == (0, b"0\n")
    assert shell("tail", path, "none") == (1, b"")
    assert shell("tail", path) == (2, b"")
    assert shell() == (2, b"")
    assert shell("verify", path) == (0, b"1 topics, 1 entries, 1 messages: sound\n")
    with xl.open(path, readonly=True) as engine:
        assert [message.value for message in engine.topic("orders").reader()] == [b"a"]


@pytest.mark.long
def test_a_closed_stdout_or_stdin_is_an_empty_one(path: str) -> None:
    def status(*words: str, closed: str) -> tuple[int, bytes]:
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *PROGRAM, *words],
            capture_output=True,
            timeout=PATIENCE,
        )
        return done.returncode, done.stderr

    assert status("send", path, "orders", "a", closed=">&-") == (0, b"")
    assert status("topics", path, closed=">&-") == (0, b"")
    assert status("send", path, "orders", closed="<&-") == (0, b"")
    assert status("delete", path, "orders", closed="<&-")[0] == 2
    with xl.open(path, readonly=True) as engine:
        assert engine.topic("orders").next_offset == 1
        assert engine.verify().ok


@pytest.mark.long
def test_a_full_disk_behind_stdout_is_an_error(path: str) -> None:
    run("send", path, "orders", "a")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*PROGRAM, "tail", path, "orders"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
        )
    assert (done.returncode, b"No space left" in done.stderr) == (1, True)
    assert done.stderr.count(b"\n") == 1
