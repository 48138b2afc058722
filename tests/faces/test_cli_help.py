"""What the command tells of itself: its help texts with examples, what a shell completes, and the
names of options in errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

import exclusivelog as xl
from exclusivelog.cli.examples import EXAMPLES, SECTIONS
from exclusivelog.cli.names import SAFE
from exclusivelog.cli.program import program
from tests.faces.test_cli import COMMANDS, run
from tests.operations.test_pages import commands_of, wrong

pytestmark = pytest.mark.once

HOSTILE = ("$(touch owned)", "a b", "-x", "`id`", "a;b", "a'b", "~root", "*", "a\\b", "é")


# ---- help --------------------------------------------------------------------------------


def test_every_command_is_in_one_section() -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS)
    said = run("--help").stdout.decode()
    places = [said.index(f"\n{heading}:\n") for heading in SECTIONS]
    assert places == sorted(places)
    for heading, names in SECTIONS.items():
        part = said.split(f"\n{heading}:\n")[1].split("\n\n")[0]
        assert [line.split()[0] for line in part.splitlines() if line[2] != " "] == list(names)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_a_command_are_taken_as_they_stand(name: str) -> None:
    said = run(name, "--help").stdout.decode()
    shown = said.partition("\nExamples:\n")[2].splitlines()
    assert len(shown) == len(EXAMPLES[name])
    assert max(map(len, shown)) <= 80
    for line in shown:
        ((words, whole),) = commands_of(f"```sh\n{line.strip()}\n```")
        assert words[0] == name
        assert wrong(words, whole) == ""


# ---- completion --------------------------------------------------------------------------


def completed(*words: str) -> list[str]:
    """What a shell is offered for the last of these words."""
    shell = ShellComplete(program, {}, "exclusivelog", "_EXCLUSIVELOG_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_names_of_topics_groups_roles_and_engines_are_completed(path: str) -> None:
    with xl.open(path, "worker-1") as engine, xl.open(path, "worker-2"):
        for name in ("orders", "order-lines", "other"):
            engine.topic(name)
        with engine.topic("orders").reader(group="billing") as reader:
            reader.commit()
            engine.own("shards", {"s1": None})
            with engine.lock("nightly"):
                assert completed("tail", path, "ord") == ["order-lines", "orders"]
                assert completed("tail", "--json", path, "oth") == ["other"]
                assert completed("get", path, "oth") == ["other"]
                assert completed("audit", path, "orders", "ot") == ["other"]
                assert completed("groups", path, "b") == ["billing"]
                assert completed("claims", path, "sh") == ["shards"]
                assert completed("roles", path, "") == ["nightly"]
                assert completed("run", path, "n") == ["nightly"]
                found = completed("unload", path, "orders", "--to", "wor")
                assert found == ["worker-1", "worker-2"]
                assert completed("unload", path, "--group", "s") == ["shards"]


def test_a_name_that_a_shell_would_read_as_something_else_is_not_offered(path: str) -> None:
    assert [name for name in HOSTILE if SAFE.fullmatch(name)] == []
    with xl.open(path) as engine:
        for name in (*HOSTILE, "a.b:c/d@e-1"):
            with engine.topic("t").reader(group=name) as reader:
                reader.commit()
    assert completed("groups", path, "") == ["a.b:c/d@e-1"]


def test_where_no_ledger_can_be_read_nothing_is_completed_or_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.mdb").write_bytes(b"damaged" * 5000)
    for path in (str(tmp_path / "nowhere"), str(tmp_path), "pulsar://127.0.0.1:1/a/b"):
        assert completed("tail", path, "") == []
        assert completed("unload", path, "orders", "--to", "") == []
    assert capfd.readouterr() == ("", "")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.mdb"]


# ---- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["tail", "export"])
@pytest.mark.parametrize("typed", [["--since", "1w"], ["--since=1w"], ["--from", "1w"]])
def test_an_error_names_the_option_that_was_typed(topic, path, command, typed) -> None:
    done = run(command, path, "orders", *typed)
    assert (done.returncode, done.stdout) == (2, b"")
    name = typed[0].partition("=")[0]
    assert f"Invalid value: {name} 1w: it takes earliest" in done.stderr.decode()


@pytest.mark.parametrize(
    "value", ["9" * 12 + "d", "9" * 30, "9" * 5000, "0001-01-01T00:00", "1e9d", "-1d"]
)
def test_a_start_that_no_log_has_is_a_wrong_argument(topic, path, value) -> None:
    done = run("tail", path, "orders", f"--since={value}")
    assert (done.returncode, done.stdout) == (2, b"")
    assert "--since " in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
