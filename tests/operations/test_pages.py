"""docs/deployment.md, docs/runbook.md and docs/operations.md: what they show is what there is, and
what an operator meets is there. Log lines and metrics: test_logs.py, test_metrics.py."""

from __future__ import annotations

import configparser
import importlib
import ipaddress
import logging
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import prometheus_client
import pytest
import yaml

import exclusivelog as xl
from exclusivelog import cli, logs
from exclusivelog.cli import checking, findings, leading
from testing.patience import PATIENCE

DOCS = Path(__file__).parents[2] / "docs"
DEPLOYMENT, RUNBOOK, OPERATIONS = (
    (DOCS / name).read_text() for name in ("deployment.md", "runbook.md", "operations.md")
)
SOURCES = {path: path.read_text() for path in Path(cli.__file__).parents[1].rglob("*.py")}
program = cli.load()
pytestmark = pytest.mark.once


def section(title: str, page: str = RUNBOOK) -> str:
    """A page's section of that title."""
    return re.split(r"^## ", page.partition(f"## {title}\n")[2], maxsplit=1, flags=re.M)[0]


def rows(title: str, page: str = RUNBOOK) -> list[list[str]]:
    """The cells of the tables of a section, without their headings."""
    lines = re.findall(r"^\| (.*) \|$", section(title, page), re.M)
    return [line.split(" | ") for line in lines][1:]


def first_cells(title: str, page: str = RUNBOOK) -> set[str]:
    """What the rows of a section's table are about."""
    return {name for row in rows(title, page) for name in re.findall(r"`([^`.][^`]*)`", row[0])}


def blocks(language: str) -> list[str]:
    """The page's examples in one language."""
    return re.findall(rf"```{language}\n(.*?)```", DEPLOYMENT, re.S)


@pytest.mark.parametrize(
    ("title", "level"), [("Warnings", logging.WARNING), ("Errors in the log", logging.ERROR)]
)
def test_the_runbook_has_every_line_that_needs_a_person(title: str, level: int) -> None:
    assert first_cells(title) == {e for e, line in logs.LINES.items() if line.level == level}


def every_error() -> set[str]:
    """The names of all errors of the library that a program can get."""
    for each in pkgutil.walk_packages(xl.__path__, "exclusivelog."):
        if not each.name.endswith("__main__"):
            importlib.import_module(each.name)
    found, left = set(), [xl.ExclusiveLogError]
    while left:
        found.add(kind := left.pop())
        left += kind.__subclasses__()
    names = {kind.__name__ for kind in found if kind.__module__ in PUBLIC_ERRORS}
    return {name for name in names if name[0] != "_"}  # and those of other modules are caught there


PUBLIC_ERRORS = ("exclusivelog.errors", "exclusivelog.spark.errors")


def test_the_runbook_has_every_error() -> None:
    assert first_cells("Errors that programs get") == every_error()


def test_the_runbook_has_every_warning_of_python() -> None:
    told = section("Warnings of Python")
    for path, text in SOURCES.items():
        for beginning in re.findall(r"warnings\.warn\(\s*f?\"(.*?)\"", text):
            words = max(re.split(r"\{.*?\}:? ?", beginning), key=len).strip()
            assert words in told, path


@pytest.mark.long
def test_what_the_pages_tell_to_look_for_exists() -> None:
    """`disk_low`, `max_readers`: a name with an underscore is a line, a metric, an attribute, a
    parameter or a field of the library, or a setting of the program that the page names beside."""
    known = {"preload_app", "post_fork", "worker_exit"}  # gunicorn's; Celery's are in the example
    code = "".join(SOURCES.values()) + "".join(blocks("python"))
    for page in (RUNBOOK, OPERATIONS, DEPLOYMENT):
        text = re.sub(r"```.*?```", "", page, flags=re.S)
        for span in re.findall(r"`([^`\n]+)`", text):
            for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", span):
                told = name.removesuffix("_total").removeprefix("exclusivelog_")
                assert re.search(rf"\b{told}\b", code) or name in known, name


def test_alerts_have_an_entry_each_and_no_other() -> None:
    [group] = yaml.safe_load((DOCS / "operations" / "alerts.yml").read_text())["groups"]
    assert first_cells("Alerts", OPERATIONS) == {rule["alert"] for rule in group["rules"]}


# ---- exit statuses, and what `check` finds -----------------------------------------------


def statuses(page: str, title: str) -> set[int]:
    return {int(n) for row in rows(title, page) for n in row[0].split(", ") if n.isdigit()}


def test_the_pages_have_every_exit_status() -> None:
    """0 and 2 are click's own, the others are given to `leave`. `run` passes one on."""
    given = {0, 2, leading.NOT_EXECUTABLE, leading.NOT_FOUND}
    for path, text in SOURCES.items():
        if path.parent.name == "cli" and "def leave(" not in text:
            for name in set(re.findall(r"\bleave\((\w+)", text)) - {"status"}:
                given.add(int(name) if name.isdigit() else getattr(checking, name))
    given |= {
        getattr(sys.modules["exclusivelog.cli.program"], name)
        for name in re.findall(
            r"leave\(([A-Z_]+)\)", SOURCES[Path(cli.__file__).parent / "program.py"]
        )
    }
    assert given == {0, 1, 2, 3, 126, 127, 130, 141}
    assert statuses(RUNBOOK, "Exit statuses") == given
    assert statuses(OPERATIONS, "Health") == {0, checking.BLOCKED, checking.ATTENTION}


def test_the_runbook_has_what_check_finds() -> None:
    source = "".join(SOURCES[Path(str(module.__file__))] for module in (checking, findings))
    found = set(re.findall(r"Finding\(\s*\"(\w+)\"", source))
    assert len(found) >= 7
    assert first_cells("What `check` finds") == found
    blocking = set(re.findall(r"Finding\(\s*\"(\w+)\", (?:True|full)", source))
    told = {row[0].strip("`") for row in rows("What `check` finds") if "1" in row[1]}
    assert told == blocking


def test_check_and_the_alerts_have_the_same_limits() -> None:
    [group] = yaml.safe_load((DOCS / "operations" / "alerts.yml").read_text())["groups"]
    limits = {
        rule["alert"].removeprefix("Exclusivelog"): float(rule["expr"].split()[-1])
        for rule in group["rules"]
    }
    assert limits["TablesNearlyFull"] == findings.MAP_SHARE
    assert limits["JournalFull"] == findings.JOURNAL_SHARE
    assert limits["ReaderPinsTables"] == findings.MOST_BEHIND


# ---- commands ----------------------------------------------------------------------------

# A command in a block for a shell, or in the text; not the import of a module.
IN_BLOCK = re.compile(r"^(?:\$ )?(?:.*?[|(] ?|\S+=\S+ )*(?:\S*/)?exclusivelog ([^|)&;>\n]*)", re.M)
IN_TEXT = re.compile(r"`exclusivelog ([a-z][^`\n]*)`")
SHELL_BLOCK = re.compile(r"```(?:console|sh|bash)\n(.*?)```", re.S)


def pages() -> Iterator[Path]:
    yield from (*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md")


def commands_of(page: str) -> Iterator[tuple[list[str], bool]]:
    """(words, is it whole) of each command that a page shows."""
    for block in SHELL_BLOCK.findall(page):
        for line in IN_BLOCK.findall(block):
            yield shlex.split(line, comments=True), True
    for line in IN_TEXT.findall(page):
        yield shlex.split(line), False


def wrong(words: list[str], whole: bool) -> str:
    """What the command has against these words; what the text leaves out may be missing."""
    name, *rest = words
    if name not in program.commands:
        return f"no command {name}"
    try:
        with click.Context(program, info_name="exclusivelog") as above:
            program.commands[name].make_context(name, rest, parent=above)
    except click.MissingParameter as error:
        return error.format_message() if whole else ""
    except click.UsageError as error:
        return error.format_message()
    except click.exceptions.Exit:  # --help
        return ""
    return ""


def test_every_command_of_the_pages_is_taken_as_it_stands() -> None:
    seen = 0
    for page in pages():
        for words, whole in commands_of(page.read_text()):
            if words and words[0] not in ("COMMAND", "--version"):
                assert wrong(words, whole) == "", f"{page.name}: exclusivelog {shlex.join(words)}"
                seen += 1
    assert seen > 80


@pytest.mark.parametrize(
    ("shown", "against"),
    [
        ("```sh\nexclusivelog chek LOG\n```", "no command chek"),
        ("```console\n$ echo a | exclusivelog send LOG t --keys k\n```", "No such option"),
        ("```sh\nexclusivelog tail LOG\n```", "Missing argument"),
        ("Run `exclusivelog check --strikt`.", "No such option"),
    ],
)
def test_a_command_of_a_page_that_is_wrong_is_found(shown: str, against: str) -> None:
    [(words, whole)] = commands_of(shown)
    assert against in wrong(words, whole)


def test_the_guide_shows_every_command() -> None:
    guide = section("The command", (DOCS / "guide.md").read_text())
    shown = {words[0] for words, _ in commands_of(guide) if words}
    assert set(program.commands) - shown == set()


def test_the_probe_commands_of_the_page_are_taken() -> None:
    """In the files of systemd, Compose and Kubernetes they are lists of words."""
    lists = re.findall(r"\[((?:\"[^\"]*\",? ?)*)\]", DEPLOYMENT)
    words_of = ([word.strip('" ') for word in found.split(",")] for found in lists)
    probes = [words for words in words_of if "exclusivelog" in words]
    units = re.findall(r"^ExecStart=\S*/exclusivelog (.*)$", DEPLOYMENT, re.M)
    assert len(probes) == 3
    assert len(units) == 2
    for words in [p[p.index("exclusivelog") + 1 :] for p in probes] + [u.split() for u in units]:
        assert wrong(words, True) == ""


# ---- files of others ---------------------------------------------------------------------


def test_units_are_what_systemd_reads() -> None:
    for unit in blocks("ini"):
        parser = configparser.ConfigParser(interpolation=None, strict=True)
        parser.read_string(unit)
        assert set(parser.sections()) <= {"Unit", "Service", "Install", "Timer"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_has_nothing_against_the_units(tmp_path: Path) -> None:
    """Programs and the user of the page are not here: those of this machine stand for them."""
    for unit in blocks("ini"):
        name = re.search(r"^# /etc/systemd/system/(\S+)$", unit, re.M)
        assert name
        unit = re.sub(r"/opt/orders/bin/\w+", "/bin/true", unit.replace("=orders\n", "=root\n"))
        (tmp_path / name[1].replace("@.", "@one.")).write_text(unit)
    (tmp_path / "wrong.service").write_text("[Service]\nExecStart=/bin/true\nRestrt=always\n")

    def against(unit: Path) -> str:
        return subprocess.run(
            ["systemd-analyze", "verify", unit.name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
        ).stderr

    told = {unit.name: against(unit) for unit in sorted(tmp_path.iterdir())}
    assert "Unknown key" in told.pop("wrong.service")
    assert len(told) == 4
    assert set(told.values()) == {""}


def test_containers_share_what_they_must() -> None:
    compose, pod = map(yaml.safe_load, blocks("yaml"))
    owner, first, second = (compose["services"][name] for name in ("pids", "first", "second"))
    assert (first["pid"], first["volumes"]) == (second["pid"], second["volumes"])
    assert (first["pid"], "volumes" in owner) == ("service:pids", False)
    template = pod["spec"]["template"]["spec"]
    assert template["shareProcessNamespace"] is True
    assert {each["volumeMounts"][0]["name"] for each in template["containers"]} == {"log"}


def test_the_metrics_server_of_the_page_is_for_this_machine_alone() -> None:
    """Without an address it would show the names of topics to everybody."""
    found = [page.read_text() for page in DOCS.rglob("*.md")]
    code = "".join(re.findall(r"```python\n(.*?)```", "".join(found), re.S))
    calls = re.findall(r"start_http_server\((.*?)\)", code)
    assert calls
    for call in calls:
        server, thread = eval(
            f"prometheus_client.start_http_server({call})",
            {"prometheus_client": SimpleNamespace(start_http_server=on_a_free_port)},
        )
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE)
        assert ipaddress.ip_address(server.server_address[0]).is_loopback


def on_a_free_port(port: int, **options: Any) -> tuple[Any, Any]:
    """The server as the page starts it, on another port."""
    assert 1024 <= port < 1 << 16
    return prometheus_client.start_http_server(0, **options)


def test_every_test_that_a_page_names_exists() -> None:
    """A page that names what backs it must not go stale."""
    root = DOCS.parent
    files = [file for top in ("tests", "proof") for file in (root / top).rglob("*.py")]
    made = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    named = 0
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        tests, paths = set(re.findall(r"`(test_\w+)`", text)), set(PATHS.findall(text))
        named += len(tests) + len(paths)
        assert tests <= made, page
        assert all((root / path).exists() for path in paths), page
    assert named > 200


PATHS = re.compile(r"(?<![\w/.])((?:tests|proof)/[\w/]+\.py)\b")


def test_each_case_has_a_test_and_was_once_otherwise() -> None:
    cases = re.findall(r"^\| (.*) \|$", (DOCS / "cases.md").read_text(), re.M)[1:]
    for kind, case, before, now, test in (row.split(" | ") for row in cases):
        assert all((kind, case, before, now))
        assert before != now
        assert re.search(r"`test_\w+`|^tests/", test), case
    assert len(cases) > 30


def test_programs_and_scripts_are_sound() -> None:
    for code in blocks("python"):
        compile(code, "deployment.md", "exec")
    for script in blocks("sh"):
        done = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def ledger_with(path: Path, *values: bytes) -> None:
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        for value in values:
            producer.send(value)


def values_of(path: Path) -> list[bytes | None]:
    with xl.open(path, readonly=True) as engine:
        return [message.value for message in engine.topic("orders").reader()]


def run_script(script: str, root: Path) -> subprocess.CompletedProcess[str]:
    """A script of the page, whose machine is in the directory `root`."""
    for place in ("/var/lib/orders", "/backup"):
        script = script.replace(place, f"{root}{place}")
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["sh"], input=script, text=True, capture_output=True, timeout=PATIENCE, env=environment
    )


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The directories that the page's scripts are about."""
    for name in ("var/lib/orders", "backup/orders"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.long
def test_the_drill_of_the_page_brings_a_ledger_back(machine: Path) -> None:
    """Back up twice, damage the ledger, restore, and go on: with the page's commands."""
    log, backups = machine / "var/lib/orders/log", machine / "backup/orders"
    save, restore = blocks("sh")
    ledger_with(log, b"a")
    assert run_script(save, machine).returncode == 0
    ledger_with(log, b"b")
    done = run_script(save, machine)  # next week's replaces this week's
    assert (done.returncode, done.stderr) == (0, "")
    [day] = backups.iterdir()
    ledger_with(log, b"lost")
    (log / "data.mdb").write_bytes(b"damaged" * 5000)
    for name in ("journal", "lock.mdb", "owners.lock"):
        (log / name).unlink()
    assert run_script(save, machine).returncode == 1  # which leaves the backup that there is
    assert values_of(day) == [b"a", b"b"]
    done = run_script(restore.replace("/Mon", f"/{day.name}"), machine)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 messages: sound" in done.stdout
    assert "orders\t2\t" in done.stdout
    ledger_with(log, b"c")
    assert values_of(log) == [b"a", b"b", b"c"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_backup_by_root_belongs_to_the_ledgers_owner(path: str, tmp_path: Path) -> None:
    ledger_with(Path(path), b"a", b"x" * 200_000)
    for file in (Path(path), *Path(path).rglob("*")):
        os.chown(file, 1234, 1234)
    with xl.open(path, readonly=True) as engine:
        engine.backup(str(tmp_path / "copy"))
    copy = tmp_path / "copy"
    assert {f.stat().st_uid for f in (copy, *copy.rglob("*"))} == {1234}
    with xl.open(copy) as engine:  # what root adds is theirs, too
        engine.topic("more").producer().send(b"x" * 200_000)
    assert {f.stat().st_gid for f in (copy, *copy.rglob("*"))} == {1234}
