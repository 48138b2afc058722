"""Every public name has a docstring, and an example that runs: pytest collects all of them, by
--doctest-modules in pyproject.toml."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import inspect
import io
import pydoc
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from tests.faces.test_docs import MODULES

pytestmark = pytest.mark.once

# Whose examples need what a docstring cannot have, and where they are.
ELSEWHERE = {
    "Mirror": "a broker: docs/cluster.md",
    "Comparison": "a broker",
    "Progress": "a broker",
    "register": "Java: docs/spark.md",
    "scan": "Java: docs/spark.md",
    "ledger": "a test: docs/testing.md",
    "second_process": "a test: docs/testing.md",
    "Process": "a test: docs/testing.md",
    "Start": "a test: docs/testing.md",
    "Run": "in append_once",
    "Appended": "in append_once",
}


def public(module: str) -> dict[str, Any]:
    """The names that have docstrings of their own."""
    found = importlib.import_module(module)
    names = {name: getattr(found, name) for name in found.__all__ if name != "__version__"}
    if module == "exclusivelog.aio":
        import exclusivelog

        return {n: one for n, one in names.items() if one is not getattr(exclusivelog, n)}
    return names


def members(one: Any) -> list[tuple[str, Any]]:
    """The public methods and properties that a class itself defines."""
    if not inspect.isclass(one):
        return []
    return [
        (name, member)
        for name, member in vars(one).items()
        if not name.startswith("_")
        and (callable(member) or isinstance(member, (property, classmethod, staticmethod)))
        and not inspect.isclass(member)
    ]


@pytest.mark.parametrize("compiled", [xl.Message, xl.Receipt])
def test_examples_of_compiled_classes_run(compiled: type, engine: xl.Engine) -> None:
    """pytest finds those of Python files alone."""
    topic = engine.topic("orders")
    names = {"topic": topic, "producer": topic.producer()}
    [test] = doctest.DocTestFinder(recurse=False).find(compiled, module=False, globs=names)
    report = io.StringIO()
    done = doctest.DocTestRunner().run(test, out=report.write)
    assert (done.failed, done.attempted > 2) == (0, True), report.getvalue()


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_and_method_tells_what_it_is(module: str) -> None:
    for name, one in public(module).items():
        assert inspect.getdoc(one), name
        assert (inspect.getdoc(one) or "")[0] != "(", f"{name}: made by dataclass"
        for member, found in members(one):
            assert inspect.getdoc(found), f"{name}.{member}"


@pytest.mark.parametrize("module", [name for name in MODULES if name != "exclusivelog.aio"])
def test_every_public_name_has_an_example(module: str) -> None:
    """In its own docstring, or in one of a method. Those of aio are in docs/asyncio.md."""
    missing = {
        name
        for name, one in public(module).items()
        if ">>>" not in (inspect.getdoc(one) or "")
        and not any(">>>" in (inspect.getdoc(member) or "") for _, member in members(one))
    }
    assert missing <= set(ELSEWHERE), sorted(missing - set(ELSEWHERE))


# ---- help() ------------------------------------------------------------------------------


CLASSES = [
    name
    for name in xl.__all__
    if inspect.isclass(getattr(xl, name)) and not issubclass(getattr(xl, name), BaseException)
]
# Of a future: what makes it, and what `concurrent.futures` has for that.
MAKING = {"running", "set_exception", "set_result", "set_running_or_notify_cancel"}
MAKERS = {
    "RoleFuture": {"blocking", "give_up", "make", "topics", "waited", *MAKING},
    "UnloadFuture": MAKING,
}
PAGES = Path(__file__).parents[2] / "docs"


def listed(name: str) -> set[str]:
    """The public names that `help` lists of a class, but for those of the language's own types."""
    kind = getattr(xl, name)
    text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    found = set(re.findall(r"^ \|  ([a-z]\w*)(?:\(| =|$)", text, re.MULTILINE))
    return {each for each in found if hasattr(kind, each)} - set(dir(str))


def told(pages: str, kind: type, name: str) -> bool:
    """Does a page show it, its docstring have an example, or its class's docstring name it?"""
    own, of_class = inspect.getdoc(getattr(kind, name)) or "", inspect.getdoc(kind) or ""
    return (
        f".{name}" in pages
        or f"`{name}`" in pages
        or ">>>" in own
        or re.search(rf"\b{name}\b", of_class) is not None
    )


@pytest.mark.parametrize("name", CLASSES)
def test_help_lists_what_applications_may_use_and_nothing_else(name: str) -> None:
    """What asyncio's class of that name has, too; of values, and of futures, what is told of."""
    kind, awaited = getattr(xl, name), getattr(aio, name)
    names = listed(name) - MAKERS.get(name, set())
    assert names or not hasattr(kind, "close")
    if awaited is not kind and not issubclass(awaited, asyncio.Future):
        assert names <= set(dir(awaited))
    else:
        pages = "".join(page.read_text() for page in PAGES.glob("**/*.md"))
        interface = set(dir(Future)) if issubclass(kind, Future) or name == "Receipt" else set()
        assert [each for each in sorted(names - interface) if not told(pages, kind, each)] == []


def test_what_makes_a_future_is_all_that_is_left_out() -> None:
    for name, names in MAKERS.items():
        assert names <= listed(name)
