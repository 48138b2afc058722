"""The examples as programs: short, told in docstrings, and typed strictly. `make lint` runs mypy in
strict mode over them; here it has to find mistakes in copies of them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.faces.scripts import EXAMPLES, strict_mypy

pytestmark = pytest.mark.once

MOST_LINES = 80
SPACE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
PROGRAMS = sorted(
    file.name for file in EXAMPLES.glob("*.py") if not file.stem.endswith(("_trial", "processes"))
)


def lines_of(source: str) -> int:
    """The lines of a program that are neither empty nor comments nor docstrings.

    >>> lines_of('"A docstring."\\n\\nx = 1  # a comment\\n# another one\\n')
    1
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SPACE:
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            told = node.body[0]
            lines -= set(range(told.lineno, (told.end_lineno or told.lineno) + 1))
    return len(lines)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_is_short_and_tells_what_it_is(name: str) -> None:
    source = (EXAMPLES / name).read_text()
    assert lines_of(source) <= MOST_LINES
    assert f"    $ python examples/{name}" in source or "    $ cd examples; " in source
    assert f"]({name})" in (EXAMPLES / "README.md").read_text()


# A misspelling in each of these, and the code of the error that mypy has to find.
MISTAKES = [
    ("billing_worker.py", "transaction=txn", "transacton=txn", "call-arg"),
    ("drain.py", "properties=", "propertys=", "call-arg"),
    ("dynamic_config.py", "latest=True", "lastest=True", "call-arg"),
    ("job_table.py", "snapshot_every=", "snapshots_every=", "call-arg"),
    ("kv_service.py", "latest=True", "lastest=True", "call-overload"),
    ("leader_election.py", "keepalive=keepalive", "keepalife=keepalive", "call-arg"),
    ("uptime_checker.py", "priority=", "prio=", "call-arg"),
    ("web_service.py", "keepalive=", "keepalife=", "call-arg"),
]


@pytest.mark.long
def test_mypy_finds_a_misspelt_argument_in_every_example(tmp_path: Path) -> None:
    assert [name for name, *_ in MISTAKES] == PROGRAMS
    for name, right, wrong, _ in MISTAKES:
        source = (EXAMPLES / name).read_text()
        assert right in source, name
        tmp_path.joinpath(name).write_text(source.replace(right, wrong, 1))
    said = strict_mypy(*(tmp_path / name for name in PROGRAMS))
    found = re.findall(r"(\w+\.py):\d+: error: .*\[([a-z-]+)\]", said)
    assert sorted(set(found)) == [(name, code) for name, *_, code in MISTAKES], said
