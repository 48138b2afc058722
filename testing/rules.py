"""Which test files back which rule of docs/semantics.md.

A test backs the rules that its name begins with (`test_b3_...`, `test_f2_f3_...`) and those of its
marks (`@pytest.mark.rule("B3", "H1")`; `pytestmark = ...` marks a whole file). The lists of test
files on the page are made from that:

    python -m testing.rules            # what page and tests disagree about; status 1 if anything
    python -m testing.rules --write    # update the lists
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "semantics.md"
# Rules whose subject this version does not have. A rule leaves this list with its first test.
NOT_BUILT: frozenset[str] = frozenset()

NAMED = re.compile(r"test((?:_[a-z][0-9]+)+)(?:_|\Z)")
ANCHOR = re.compile(r'^<a id="([a-z][0-9]+)"></a>', re.M)
BLOCK = re.compile(r'^(?=<a id="[a-z][0-9]+"></a>|#{1,6} )', re.M)
LIST = re.compile(r"^Tests: .*\n?", re.M)


# ---- the tests ---------------------------------------------------------------------------


def rules_of(name: str) -> list[str]:
    """The rules that a test's name begins with.

    >>> rules_of("test_b8_b10_owners_never_interleave"), rules_of("test_a_callback_may_send")
    (['B8', 'B10'], [])
    """
    named = NAMED.match(name)
    return named[1].upper().split("_")[1:] if named else []


@functools.cache
def rules_in(source: str, short: bool = False) -> frozenset[str]:
    """The rules that the tests of a file back; with `short`, those that `make test` runs. An
    argument of a mark that is no string counts by its text, which is no rule of the page."""
    tree: ast.AST = ast.parse(source)
    if short:
        tree = _Short().visit(tree)
    found = set[str]()
    for node in _outside_functions(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.update(rules_of(node.name))
        elif isinstance(node, ast.Call) and _is_mark(node.func):
            found.update(_argument(each) for each in node.args)
    return frozenset(found)


class _Short(ast.NodeTransformer):
    """Leaves out the tests that `make test` does not run: those that are `long`, or need a
    `broker`, and are not marked `smoke`. A file or class without others is left out as a whole."""

    def __init__(self) -> None:
        self._around = set[str]()  # the marks of the file and the class

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        marks = self._around | {name for each in node.decorator_list for name in _marks(each)}
        left_out = not marks.isdisjoint({"long", "broker"}) and "smoke" not in marks
        return None if left_out else node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815

    def visit_Module(self, node: ast.Module) -> ast.AST:
        return self._of_all(node) or ast.Module([], [])

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST | None:
        return self._of_all(node)

    def _of_all(self, node: ast.Module | ast.ClassDef) -> ast.AST | None:
        before, own = self._around, set[str]()
        for each in node.body:
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "pytestmark":
                own.update(_marks(each.value))
        self._around = before | own
        self.generic_visit(node)
        self._around = before
        return node if any(_tests(node)) else None


def _marks(node: ast.AST) -> Iterator[str]:
    """The names of the marks in an expression, but for those of single parameters."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.param":
        return
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark":
        yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from _marks(child)


def _tests(tree: ast.AST) -> Iterator[str]:
    """The names of the tests in a file or class."""
    for node in ast.walk(tree):
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if function and node.name.startswith("test"):
            yield node.name


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those in the functions' bodies, which are most."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _outside_functions(node)
            continue
        for decorator in node.decorator_list:
            yield decorator
            yield from _outside_functions(decorator)


def _is_mark(node: ast.expr) -> bool:
    """Is it `pytest.mark.rule`?"""
    called = isinstance(node, ast.Attribute) and node.attr == "rule"
    return called and ast.unparse(node) == "pytest.mark.rule"


def _argument(node: ast.expr) -> str:
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return ast.literal_eval(node) if constant else ast.unparse(node)


def sources() -> dict[str, str]:
    """The text of every test file, by its path."""
    found = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("proof/tests/test_*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(found)}


def backing(files: Mapping[str, str], short: bool = False) -> dict[str, list[str]]:
    """The paths of the test files behind each rule; with `short`, counting only the tests that
    `make test` runs."""
    found = dict[str, list[str]]()
    for name, source in files.items():
        for rule in rules_in(source, short):
            found.setdefault(rule, []).append(name)
    return found


# ---- the page ----------------------------------------------------------------------------


def stated(page: str) -> list[str]:
    """The rules that a page states, in its order."""
    return [rule.upper() for rule in ANCHOR.findall(page)]


def built(page: str) -> list[str]:
    """Those of them that this version has."""
    return [rule for rule in stated(page) if rule not in NOT_BUILT]


def render(page: str, behind: Mapping[str, list[str]]) -> str:
    """The page with its lists of test files as they are now."""
    return "".join(_render(block, behind) for block in BLOCK.split(page))


def _render(block: str, behind: Mapping[str, list[str]]) -> str:
    anchor = ANCHOR.match(block)
    if anchor is None:
        return block
    return f"{LIST.sub('', block).rstrip()}\n\n{_list(anchor[1].upper(), behind)}\n\n"


def _list(rule: str, behind: Mapping[str, list[str]]) -> str:
    if rule not in behind:
        return "Tests: none." + (" This version does not have it." if rule in NOT_BUILT else "")
    links = (f"[{_title(name)}](../{name})" for name in behind[rule])
    return f"Tests: {', '.join(links)}."


def _title(name: str) -> str:
    return name.removeprefix("tests/").removesuffix(".py")


def problems(page: str, files: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the page or the tests."""
    rules, behind = stated(page), backing(files)
    yield from (f"{rule} stands twice on the page" for rule, n in Counter(rules).items() if n > 1)
    yield from (f"{rule} has no test" for rule in built(page) if rule not in behind)
    short = backing(files, short=True)
    yield from (
        f"`make test` runs no test of {rule}"
        for rule in built(page)
        if rule in behind and rule not in short
    )
    for rule, names in behind.items():
        if rule not in rules:
            yield f"{', '.join(names)}: {rule} is no rule of the page"
        elif rule in NOT_BUILT:
            yield f"{', '.join(names)}: {rule} has tests now; take it out of NOT_BUILT"
    if _trimmed(render(page, behind)) != _trimmed(page):
        yield "the lists of tests are not up to date; run `python -m testing.rules --write`"


def _trimmed(page: str) -> str:
    return page.rstrip()


def main(arguments: list[str] | None = None) -> int:
    """Check the page, or update its lists first. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m testing.rules", description=__doc__)
    parser.add_argument("--write", action="store_true", help="update the lists of tests")
    files, page = sources(), PAGE.read_text()
    if parser.parse_args(arguments).write:
        page = f"{render(page, backing(files)).rstrip()}\n"
        PAGE.write_text(page)
    found = list(problems(page, files))
    print("\n".join(found) or f"{len(stated(page))} rules, {len(built(page))} with tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
