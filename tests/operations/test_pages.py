"""docs/deployment.md and docs/runbook.md: what they show is what there is."""

from __future__ import annotations

import configparser
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import exclusivelog as xl
from exclusivelog import cli, errors, logs
from exclusivelog.cli import checking
from exclusivelog.cli.program import INTERRUPTED, PIPE_CLOSED

DOCS = Path(__file__).parents[2] / "docs"
DEPLOYMENT, RUNBOOK = (DOCS / "deployment.md").read_text(), (DOCS / "runbook.md").read_text()
pytestmark = pytest.mark.once


def section(title: str) -> str:
    """The runbook's section of that title."""
    return re.split(r"^## ", RUNBOOK.partition(f"## {title}\n")[2], maxsplit=1, flags=re.M)[0]


def first_cells(title: str) -> set[str]:
    """What the rows of a section's table are about."""
    rows = re.findall(r"^\| (`.*?) \|", section(title), re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def blocks(language: str) -> list[str]:
    """The page's examples in one language."""
    return re.findall(rf"```{language}\n(.*?)```", DEPLOYMENT, re.S)


@pytest.mark.parametrize(
    ("title", "level"), [("Warnings", logging.WARNING), ("Errors in the log", logging.ERROR)]
)
def test_the_runbook_has_every_line_that_needs_somebody(title: str, level: int) -> None:
    assert first_cells(title) == {e for e, line in logs.LINES.items() if line.level == level}


def test_the_runbook_has_every_error() -> None:
    public = {
        name
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, xl.ExclusiveLogError) and name[0] != "_"
    }
    assert first_cells("Errors that programs get") == public


def test_the_runbook_has_every_exit_status() -> None:
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", section("Exit statuses"), re.M)
    told = {int(number) for row in rows for number in row.split(", ")}
    assert told == {0, 2, checking.BLOCKED, checking.ATTENTION, INTERRUPTED, PIPE_CLOSED}
    assert "exit status" in (cli.__doc__ or "").lower()


def test_the_pages_name_commands_that_exist() -> None:
    import importlib

    from exclusivelog.cli.program import program

    for module in cli.COMMANDS:
        importlib.import_module(f"exclusivelog.cli.{module}")
    command = r"(?<!import )(?<!from )exclusivelog (?:--\S+ )*([a-z]+)[ `\n]"
    named = set(re.findall(command, DEPLOYMENT + RUNBOOK))
    assert named >= {"check", "owners", "backup", "verify", "retention"}
    assert named <= set(program.commands)


def test_units_are_what_systemd_reads() -> None:
    for unit in blocks("ini"):
        parser = configparser.ConfigParser(interpolation=None, strict=True)
        parser.read_string(unit)
        assert set(parser.sections()) <= {"Unit", "Service", "Install", "Timer"}


def test_containers_share_what_they_must() -> None:
    compose, pod = map(yaml.safe_load, blocks("yaml"))
    owner, first, second = (compose["services"][name] for name in ("pids", "first", "second"))
    assert (first["pid"], first["volumes"]) == (second["pid"], second["volumes"])
    assert (first["pid"], "volumes" in owner) == ("service:pids", False)
    template = pod["spec"]["template"]["spec"]
    assert template["shareProcessNamespace"] is True
    assert {each["volumeMounts"][0]["name"] for each in template["containers"]} == {"log"}


def test_programs_and_scripts_are_sound() -> None:
    for program in blocks("python"):
        compile(program, "deployment.md", "exec")
    for script in blocks("sh"):
        done = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_backup_script_backs_up(path: str, tmp_path: Path) -> None:
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send(b"a")
    [script] = blocks("sh")
    script = script.replace("/var/lib/orders/log", path).replace("/backup", str(tmp_path / "b"))
    (tmp_path / "b" / "orders").mkdir(parents=True)
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for _ in range(2):  # the second week's replaces the first one's
        subprocess.run(["sh"], input=script, text=True, check=True, timeout=60, env=environment)
    [backup] = (tmp_path / "b" / "orders").iterdir()
    with xl.open(backup, readonly=True) as engine:
        assert [message.value for message in engine.topic("orders").reader()] == [b"a"]
