"""The pages and the tests agree: each rule of docs/semantics.md has tests, each test names a rule
that is there, and every link from page to page leads somewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import choose_rules
from testing import rules
from testing.children import run_pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples/README.md",
    ROOT / "tests/storage/ledgers/README.md",
]
CITING = [page for page in PAGES if page != rules.PAGE]
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
CITED = re.compile(r"\b[A-J][0-9]{1,2}\b")


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


# ---- rules and their tests ---------------------------------------------------------------


@pytest.mark.long
def test_the_page_and_the_tests_agree() -> None:
    assert list(rules.problems(rules.PAGE.read_text(), rules.sources())) == []


SMALL = '<a id="a1"></a>\n**A1. One.**\n\n<a id="j3"></a>\n**J3. Later.**\n\n## B\n\nText.\n'
FILES = {"tests/test_x.py": "def test_a1_holds(): pass"}


def said(page: str, files: dict[str, str]) -> str:
    return " / ".join(rules.problems(page, files))


@pytest.fixture
def _j3_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "NOT_BUILT", frozenset({"J3"}))


@pytest.mark.usefixtures("_j3_is_not_built")
def test_lists_are_made_from_the_tests_and_made_anew() -> None:
    page = rules.render(SMALL, rules.backing(FILES))
    assert "**A1. One.**\n\nTests: [test_x](../tests/test_x.py).\n\n<a id" in page
    assert "**J3. Later.**\n\nTests: none. This version does not have it.\n\n## B\n" in page
    assert said(page, FILES) == ""
    more = {**FILES, "tests/test_y.py": "async def test_a1_too(): pass"}
    assert "not up to date" in said(page, more)
    assert said(rules.render(page, rules.backing(more)), more) == ""


@pytest.mark.usefixtures("_j3_is_not_built")
def test_what_disagrees_is_named() -> None:
    page = rules.render(SMALL, rules.backing(FILES))
    assert "A1 has no test" in said(page, {})
    assert "tests/test_x.py: B3 is no rule of the page" in said(
        page, {"tests/test_x.py": "def test_a1_b3_holds(): pass"}
    )
    assert "J3 has tests now" in said(
        page, {**FILES, "tests/test_h.py": "def test_j3_holds(): pass"}
    )
    assert "A1 stands twice" in said(SMALL + SMALL, FILES)


def test_marks_count_as_names_do() -> None:
    source = """
pytestmark = [pytest.mark.timeout(9), pytest.mark.rule("A1")]

class TestIt:
    @pytest.mark.rule("B3", "H1")
    def test_something(self): pass

@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.rule("C2"))])
def test_d1_d4(x): pass

TEXT = "def test_e1_in_a_string(): pass"
@pytest.mark.rule(NUMBER)
def test_h264_is_a_codec(): pass
"""
    assert rules.rules_in(source) == {"A1", "B3", "H1", "C2", "D1", "D4", "H264", "NUMBER"}


def test_what_make_test_leaves_out_backs_no_rule_there() -> None:
    source = """
@pytest.mark.long
def test_a1_takes_long(): pass
@pytest.mark.broker
def test_a2_needs_a_broker(): pass
@pytest.mark.long
@pytest.mark.smoke
@pytest.mark.rule("B1")
async def test_a3_for_all_that_are_long(): pass
@pytest.mark.sampled
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=[pytest.mark.long])])
def test_a4_its_first_case(x): pass
class TestLong:
    pytestmark = [pytest.mark.long, pytest.mark.rule("B2")]
    def test_a5(self): pass
"""
    assert rules.rules_in(source, short=True) == {"A3", "A4", "B1"}
    of_all = 'pytestmark = [pytest.mark.long, pytest.mark.rule("C1")]\n'
    assert rules.rules_in(f"{of_all}def test_a1(): pass", short=True) == set()
    found = rules.rules_in(f"{of_all}@pytest.mark.smoke\ndef test_a1(): pass", short=True)
    assert found == {"A1", "C1"}
    page = rules.render(SMALL, rules.backing({"tests/test_x.py": source}))
    assert "`make test` runs no test of A1" in said(page, {"tests/test_x.py": source})


# ---- pytest --rule -----------------------------------------------------------------------


@pytest.mark.long
def test_the_option_runs_exactly_the_tests_of_its_rules(tmp_path) -> None:
    tests = tmp_path / "test_tiny.py"
    tests.write_text("""
import pytest
def test_b3_by_name(): pass
def test_b8_b3_by_its_second_number(): pass
def test_b30_is_another_one(): assert False
def test_none_of_b3(): assert False
@pytest.mark.rule("A1", "B3")
def test_by_mark(): pass
class TestOfH1:
    pytestmark = pytest.mark.rule("H1")
    @pytest.mark.parametrize("x", [1, 2])
    def test_by_the_mark_of_its_class(self, x): pass
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.rule("H1"))])
def test_by_the_mark_of_a_parameter(x): assert x == 2
""")
    # The project's conftest.py is loaded by name: the file is not below it.
    found = run_pytest("-q", "-vv", "-p", "conftest", "--rule", "b3", "--rule=H1", tests)
    assert sorted(re.findall(r"::(\S+) PASSED", found)) == [
        "TestOfH1::test_by_the_mark_of_its_class[1]",
        "TestOfH1::test_by_the_mark_of_its_class[2]",
        "test_b3_by_name",
        "test_b8_b3_by_its_second_number",
        "test_by_mark",
        "test_by_the_mark_of_a_parameter[2]",
    ]
    assert "6 passed, 3 deselected" in found


@pytest.mark.parametrize(("source", "wanted"), [("TESTPATHS", "test_x.py"), ("ARGS", "here")])
def test_without_a_path_only_the_files_of_the_rules_are_collected(
    monkeypatch, source, wanted
) -> None:
    """To import all the others takes longer than many a rule's tests."""
    files = {**FILES, "tests/test_y.py": "def test_a2_is_another_one(): pass"}
    monkeypatch.setattr(rules, "sources", lambda: files)
    config = SimpleNamespace(args_source=pytest.Config.ArgsSource[source], args=["here"])
    choose_rules(config, ["A1"])
    assert [Path(each).name for each in config.args] == [wanted]


@pytest.mark.long
def test_the_option_refuses_what_is_no_rule() -> None:
    assert "--rule B99: docs/semantics.md has no such rule; it has A1, A2" in run_pytest(
        "--rule=B99", "tests/test_rules.py", status=pytest.ExitCode.USAGE_ERROR
    )


# ---- pages -------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```|``.*?``|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Where a link into a page can lead: its headings, as GitHub names them, and its own."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = set(re.findall(r'<a id="([^"]+)"></a>', text))
    for heading in re.findall(r"^#{1,6} +(.+)$", text, re.M):
        words = re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading)).lower()
        found.add(words.strip().replace(" ", "-"))
    return found


def broken_links(page: Path) -> Iterator[str]:
    for _, target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists():
            yield f"{target}: there is no such file"
        elif anchor and anchor not in anchors(file):
            yield f"{target}: there is no such anchor"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_link_leads_somewhere(page) -> None:
    assert list(broken_links(page)) == []


def test_broken_links_are_found(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`: *three*\n[ok](#one-two-three) [x](#four) [y](gone.md) [`z`](page.md#five)\n"
        "[w](https://example.org/x#y) `[code](gone.md)`\n"
    )
    assert list(broken_links(page)) == [
        "#four: there is no such anchor",
        "gone.md: there is no such file",
        "page.md#five: there is no such anchor",
    ]


@pytest.mark.parametrize("page", CITING, ids=names(CITING))
def test_a_page_that_cites_rules_cites_rules_that_are_there_and_links_the_first(page) -> None:
    """Someone who does not know the numbers is one step from the text."""
    text = prose(page)
    assert set(CITED.findall(text)) <= set(rules.stated(rules.PAGE.read_text()))
    if first := CITED.search(text):
        where = os.path.relpath(rules.PAGE, page.parent)
        link = f"[{first[0]}]({where}#{first[0].lower()})"
        assert text[first.start() - 1 :].startswith(link)
