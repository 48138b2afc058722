"""Comments and docstrings that an edit has spoilt: words that stand there twice, and names of what
is gone."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.once,
    pytest.mark.long,
]

ROOT = Path(__file__).parent.parent
TOPS = ("exclusivelog", "testing", "tests", "proof", "bench", "tools", "examples")
SUFFIXES = (".py", ".pyx", ".pxi", ".pxd", ".pyi", ".h")
TWICE = re.compile(r"\b([a-z]+(?: [a-z]+)?)(?: |\n *(?:# )?)\1\b")
COMMENT = re.compile(r'/\*.*?\*/|#[^\n]*|"""(?:.|\n)*?"""', re.S)
CODE_IN_PROSE = re.compile(r"`[^`]*`|>>>.*|\.\.\. .*")
WORD = re.compile(r"[A-Za-z_]\w+")
# Names of the system, of Python and of Spark's errors, which no code of ours has.
FOREIGN = {
    "lstat",
    "callHandlers",
    "REGISTRY",
    "EXCLUSIVELOG_PRODUCER_FENCED",
    "EXCLUSIVELOG_LEDGER_CORRUPTED",
}


@cache
def sources() -> dict[str, str]:
    """{path: text} of all that is written in Python, Cython and C."""
    paths = [path for top in TOPS for path in sorted((ROOT / top).rglob("*"))]
    return {
        str(path.relative_to(ROOT)): path.read_text() for path in paths if path.suffix in SUFFIXES
    }


@cache
def prose(path: str) -> tuple[str, ...]:
    """The comments and docstrings of a file."""
    return tuple(_prose(path, sources()[path]))


def _prose(path: str, text: str) -> Iterator[str]:
    if not path.endswith(".py"):
        yield from COMMENT.findall(text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and (found := ast.get_docstring(node)):
            yield found


def doubled(text: str) -> list[str]:
    """Words that stand in a text twice in a row.

    >>> doubled("How many how many `x x` it flushes flushes the the log")
    ['flushes flushes', 'the the']
    """
    return [match[0] for match in TWICE.finditer(CODE_IN_PROSE.sub(" ` ", text))]


def test_no_word_stands_twice_in_a_row() -> None:
    found = [
        f"{path}: {words}"
        for path in sources()
        if path != "tests/test_words.py"
        for part in prose(path)
        for words in doubled(part)
    ]
    assert found == []


def said_again(text: str) -> list[str]:
    """Sentences of six words or more that stand in a text more than once.

    >>> said_again("One is lost. It is then told to all. Why? It is then\\ntold to all.")
    ['It is then told to all']
    """
    sentences = [" ".join(each.split()) for each in re.split(r"[.?!:](?=\s|$)", text)]
    long = [each for each in sentences if each.count(" ") >= 5]
    return sorted({each for each in long if long.count(each) > 1})


def test_no_sentence_is_said_twice_in_a_text() -> None:
    found = [
        f"{path}: {sentence}"
        for path in sources()
        if path != "tests/test_words.py"
        for part in prose(path)
        for sentence in said_again(part)
    ]
    assert found == []


def test_what_comments_name_exists() -> None:
    """In backticks, names of methods that are gone send a reader to look for them."""
    code = {
        word for text in sources().values() for word in WORD.findall(re.sub(r"`[^`\n]*`", "", text))
    }
    code.update(WORD.findall((ROOT / "pyproject.toml").read_text()))
    code.update(WORD.findall((ROOT / "Makefile").read_text()))
    gone = {
        f"{path}: {name}"
        for path in sources()
        if path.startswith("exclusivelog/")
        for part in prose(path)
        for quoted in re.findall(r"`([^`\n]+)`", part)
        for name in WORD.findall(quoted)
        if name not in code | FOREIGN
    }
    assert gone == set()
