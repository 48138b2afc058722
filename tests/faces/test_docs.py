"""The documentation: what its pages show is what happens, its pictures are drawn by the program
beside them, and its reference has every public name. `make docs` builds it and checks its links."""

from __future__ import annotations

import importlib.util
import re
import runpy
import tarfile
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from types import ModuleType

import pytest

import exclusivelog as xl
from testing.pages import Reader, blocks, reader_of

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# Pages whose Python and console blocks are run here.
RUN = [
    "docs/asyncio.md",
    "docs/howto/backend.md",
    "docs/howto/choose.md",
    "docs/howto/configuration.md",
    "docs/howto/cron.md",
    "docs/howto/drain.md",
    "docs/howto/exactly-once.md",
    "docs/howto/scheduler.md",
    "docs/howto/standby.md",
    "docs/howto/state-machine.md",
    "docs/howto/upgrade.md",
    "docs/howto/values.md",
    "docs/tutorial.md",
]

# A ledger of an earlier version, for the page that upgrades one.
EARLIER = ROOT / "tests" / "storage" / "ledgers" / "format-5-231ddc5.tar.xz"

# Where what the others show is run.
ELSEWHERE = {
    "CONTRIBUTING.md": "commands of this repository",
    "README.md": "doctest, from pyproject.toml; its commands are those of this repository",
    "docs/cluster.md": "needs a Pulsar broker: tests/cluster/",
    "docs/deployment.md": "needs servers: tests/operations/test_pages.py",
    "docs/guide.md": "doctest, from pyproject.toml; commands that exist: below",
    "docs/howto/gunicorn.md": "needs a server: tests/faces/test_gunicorn.py",
    "docs/operations.md": "tests/operations/, tests/faces/test_cli_check.py",
    "docs/runbook.md": "commands that exist: tests/operations/test_pages.py",
    "docs/spark.md": "needs Java: tests/spark/",
    "docs/testing.md": "tests/faces/test_testing.py",
    "examples/README.md": "tests/faces/test_examples.py, test_state_examples.py",
}


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Tables show its path: that of `tmp_path` is as long as the test's name, and is folded."""
    with tempfile.TemporaryDirectory(prefix="page-") as directory:
        yield Path(directory)


def pages() -> dict[str, Path]:
    found = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "examples" / "README.md"]
    return {str(page.relative_to(ROOT)): page for page in sorted(found)}


@pytest.mark.long
@pytest.mark.parametrize("name", RUN)
def test_what_a_page_shows_is_what_happens(name: str, short_directory: Path) -> None:
    if name == "docs/howto/upgrade.md":
        with tarfile.open(EARLIER) as archive:
            archive.extractall(short_directory / "data", filter="data")
    with reader_of(ROOT / name, short_directory) as reader:
        assert reader.read() > 0


def test_the_page_about_backends_names_every_part_of_the_seam() -> None:
    page = (DOCS / "howto" / "backend.md").read_text()
    seam = (ROOT / "exclusivelog" / "backend.py").read_text()
    parts = re.findall(r"^class (\w+)\(.*(?:Protocol|OpenEngine)\)", seam, re.MULTILINE)
    assert len(parts) >= 12
    assert [name for name in parts if f"`{name}`" not in page] == []


def test_every_page_with_code_is_run_somewhere() -> None:
    shown = {
        name
        for name, page in pages().items()
        if any(block.language in ("python", "console") for block in blocks(page.read_text()))
    }
    assert shown == {*RUN, *ELSEWHERE}


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        (
            "```python\nprint(1)\n```\n\n<!-- prints -->\n```text\n2\n```\n",
            "the page says\n2\n\nbut it is\n1",
        ),
        ("```python\n>>> 1 + 1\n3\n```\n", "Expected:"),
        ("```python\n# a.py\nprint(1)\n```\n```console\n$ python a.py\n2\n```\n", "but it is\n1"),
        ("```console\n$ exclusivelog topics nowhere\n```\n", "does not exist"),
        ("```console\n$ pip install x\n```\n", "does not run this"),
    ],
)
def test_what_a_page_shows_wrongly_is_told(
    page: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=re.escape(wrong)):
        Reader(page).read()


def test_what_is_not_run_must_compile(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError):
        Reader("<!-- not run: no broker -->\n```python\nx = (\n```\n").read()


def test_the_guide_names_commands_that_exist() -> None:
    from exclusivelog.cli import load

    program = load()
    texts = "".join(pages()[name].read_text() for name in ("docs/guide.md", "docs/operations.md"))
    named = set(re.findall(r"^\$ (?:.*\| )?exclusivelog ([a-z]+)", texts, re.MULTILINE))
    assert len(named) >= 20
    assert named <= set(program.commands)


def test_pictures_are_what_their_program_draws() -> None:
    pictures = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["PICTURES"]
    drawn = {f"{name}.svg": draw().svg() for name, draw in pictures.items()}
    there = {file.name: file.read_text() for file in (DOCS / "pictures").glob("*.svg")}
    assert there == drawn, "run: python docs/pictures/draw.py"


# ---- the reference -----------------------------------------------------------------------

MODULES = [
    "exclusivelog",
    "exclusivelog.aio",
    "exclusivelog.cluster",
    "exclusivelog.metrics",
    "exclusivelog.once",
    "exclusivelog.spark",
    "exclusivelog.testing",
    "exclusivelog.tracing",
]


def documented() -> set[str]:
    """The names that the pages of the reference let Sphinx describe."""
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    return set(re.findall(r"^\.\. auto(?:class|function|exception|module):: (\S+)", text, re.M))


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_every_public_name(module: str) -> None:
    """What is the same object in exclusivelog.aio has its place under exclusivelog."""
    import exclusivelog

    there = importlib.import_module(module)
    names = set(there.__all__) - {"__version__"}
    if module == "exclusivelog.aio":
        names = {n for n in names if getattr(there, n) is not getattr(exclusivelog, n)}
    assert {f"{module}.{name}" for name in names} <= documented()


# ---- the site ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    pytest.importorskip("sphinx_click")
    spec = importlib.util.spec_from_file_location("conf_of_docs", ROOT / "docs/conf.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("parts", "summary"),
    [
        (["Open it. Then use it."], "Open it."),
        (["Two: ", "x", ". More."], "Two."),
        (["Whole without an end"], "Whole without an end"),
        (["Open a producer (PIP-68; a table). More."], "Open a producer (PIP-68; a table)."),
        (["{topic: position} of it. More."], "{topic: position} of it."),
        (["At a time (a ", "x.y", "; naive: local). More."], "At a time (a x.y; naive: local)."),
        (["Programs, e.g. workers. More."], "Programs, e.g. workers."),
    ],
)
def test_a_summary_is_a_whole_sentence(conf: ModuleType, parts: list[str], summary: str) -> None:
    from docutils import nodes

    made = [nodes.literal("", p) if p.startswith("x") else nodes.Text(p) for p in parts]
    shown = conf._first_sentence(nodes.paragraph("", "", *made))
    assert "".join(node.astext() for node in shown) == summary


def test_a_cut_summary_fails_the_build(conf: ModuleType, tmp_path: Path) -> None:
    rows = "".join(
        f"<tr class='row-odd'><td><p>{name}</p></td>\n<td><p>{text}</p></td></tr>"
        for name, text in (("whole", "Is it (so)? No."), ("cut", "It is (None."), ("open", "It is"))
    )
    (tmp_path / "a.html").write_text(f'<table class="members docutils">{rows}</table>')
    assert [line.partition(" is ")[0] for line in conf.cut_summaries(tmp_path)] == [
        "a.html: cut",
        "a.html: open",
    ]


def test_the_site_names_no_internal_base_class(conf: ModuleType) -> None:
    for shown, bases in (
        (xl.SharedMap, [MutableMapping]),
        (xl.Topic, [object]),
        (xl.OwnershipLostError, [xl.ExclusiveLogError]),
        (xl.Engine, [object]),
    ):
        found = list(shown.__bases__)
        conf.name_public_bases(None, "", shown, None, found)
        assert found == bases


def test_the_site_links_the_pages_that_docstrings_name(conf: ModuleType) -> None:
    lines = ["See docs/cluster.md, and (docs/spark.md).", "", ">>> 1", "see docs/cluster.md"]
    conf.as_restructured(None, "", "", None, None, lines)
    clusters, spark = ":doc:`Clusters </docs/cluster>`", ":doc:`Spark on a log </docs/spark>`"
    assert lines == [f"See {clusters}, and ({spark}).", *lines[1:3], "see docs/cluster.md"]
