"""The shape of the library, as docs/architecture.md describes it: few floors."""

import ast
import functools
from pathlib import Path

import pytest

import exclusivelog

pytestmark = pytest.mark.once

ROOT = Path(exclusivelog.__file__).parent
MOST_FLOORS = 12


@functools.cache
def trees() -> dict[str, ast.Module]:
    """{name of a module: its tree}; of the compiled core, its types."""
    found = {}
    for path in (*ROOT.rglob("*.py"), ROOT / "_core.pyi"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    return found


def names_in(tree: ast.Module) -> set[str]:
    """What a module imports, also within functions, and for types alone.

    `import exclusivelog` is not followed: programs use the package by its name, as users do.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0  # imports are absolute
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in within if name.partition(".")[2] in trees()}
            found |= modules or {str(node.module)}
    return {name.partition(".")[2] for name in found if name.startswith("exclusivelog.")}


@functools.cache
def imports(module: str) -> frozenset[str]:
    return frozenset(name for name in names_in(trees()[module]) if name in trees()) - {module}


@functools.cache
def longest_chain(module: str) -> tuple[str, ...]:
    """The longest chain of imports from this module down; ends with RecursionError in a circle."""
    below = [longest_chain(each) for each in imports(module)]
    return (module, *max(below, key=len, default=()))


@pytest.mark.long
def test_no_chain_of_imports_is_long() -> None:
    longest = max(map(longest_chain, trees()), key=len)
    assert len(longest) <= MOST_FLOORS, " > ".join(longest)
    assert longest[-1] in {"_core", "types"}  # it was followed to the bottom
