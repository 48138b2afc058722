"""The shape of the library, as docs/architecture.md describes it: few floors."""

import ast
import builtins
import contextlib
import functools
import io
import os
import re
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

import exclusivelog

pytestmark = pytest.mark.once

ROOT = Path(exclusivelog.__file__).parent
REPOSITORY = ROOT.parent
MOST_FLOORS = 14  # of them, `backend` on `life`: its engine extends that of `life`
TYPES_MAY_POINT_UP = {"cluster", "local"}  # runtime-imports.toml has their contracts


@functools.cache
def trees() -> dict[str, ast.Module]:
    """{name of a module: its tree}; of the compiled core, its types."""
    found = {}
    for path in (*ROOT.rglob("*.py"), ROOT / "_core.pyi"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    return found


def names_in(tree: ast.Module, ours: str | None = None) -> set[str]:
    """What a module imports, also within functions, and for types alone; but not what a module of
    the package `ours` imports of that for types, which may point up.

    `import exclusivelog` is not followed: programs use the package by its name, as users do.
    """
    found = set()
    up = {id(node) for node in for_types(tree) if ours and package_of(node) == ours}
    for node in ast.walk(tree):
        if id(node) in up:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0  # imports are absolute
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in within if name.partition(".")[2] in trees()}
            found |= modules or {str(node.module)}
    return {name.partition(".")[2] for name in found if name.startswith("exclusivelog.")}


def for_types(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    """The imports under `if TYPE_CHECKING`."""
    for node in tree.body:
        if isinstance(node, ast.If) and names(node.test) == {"TYPE_CHECKING"}:
            yield from (each for each in node.body if isinstance(each, ast.ImportFrom))


def package_of(node: ast.ImportFrom) -> str:
    return package(str(node.module).partition(".")[2])


@functools.cache
def imports(module: str) -> frozenset[str]:
    ours = package(module)
    found = names_in(trees()[module], ours if ours in TYPES_MAY_POINT_UP else None)
    return frozenset(name for name in found if name in trees()) - {module}


@functools.cache
def longest_chain(module: str) -> tuple[str, ...]:
    """The longest chain of imports from this module down; ends with RecursionError in a circle."""
    below = [longest_chain(each) for each in imports(module)]
    return (module, *max(below, key=len, default=()))


@pytest.mark.long
def test_no_chain_of_imports_is_long() -> None:
    longest = max(map(longest_chain, trees()), key=len)
    assert len(longest) <= MOST_FLOORS, " > ".join(longest)
    assert not imports(longest[-1])  # it was followed to the bottom


# ---- one class, one name ---------------------------------------------------------------


def classes(tree: ast.Module) -> set[str]:
    """The classes of a module."""
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def package(module: str) -> str:
    """`local`, `cluster` or another package, with all below it; "" for the modules above them."""
    return module.partition(".")[0] if (ROOT / module.partition(".")[0]).is_dir() else ""


def repeated(found: dict[str, ast.Module]) -> list[str]:
    """Names that classes of two modules of one package have."""
    homes: dict[tuple[str, str], list[str]] = {}
    for module, tree in found.items():
        for name in classes(tree):
            homes.setdefault((package(module), name), []).append(module)
    return [f"{name}: {', '.join(where)}" for (_, name), where in homes.items() if len(where) > 1]


@pytest.mark.long
def test_no_two_classes_of_a_package_have_one_name() -> None:
    python = {module: tree for module, tree in trees().items() if module != "_core"}
    assert repeated(python) == []


def test_a_name_that_two_classes_have_is_found() -> None:
    one, protocol = ast.parse("class A: ..."), ast.parse("class A(Protocol[T]): ...")
    assert repeated({"local.a": one, "local.b.c": one}) == ["A: local.a, local.b.c"]
    assert repeated({"local.a": one, "local.b": protocol}) == ["A: local.a, local.b"]
    assert repeated({"local.a": one, "cluster.a": one}) == []


# ---- a Protocol has several implementations, or one elsewhere ----------------------------


def bases(node: ast.ClassDef) -> list[str]:
    return [str(getattr(base, "id", getattr(base, "attr", ""))) for base in map(plain, node.bases)]


def plain(base: ast.expr) -> ast.expr:
    """`A` of `A[T]`."""
    return base.value if isinstance(base, ast.Subscript) else base


def attributes(node: ast.ClassDef) -> set[str]:
    """What a class defines: its methods and fields, and what its methods set on `self`."""
    found = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            found |= {each.attr} if names(each.value) == {"self"} else set()
    fields = (each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign))
    for field in fields:
        targets = field.targets if isinstance(field, ast.Assign) else [field.target]
        found |= set().union(*map(names, targets))
    return {name for name in found if not name.startswith("__")}


def members(node: ast.ClassDef, there: dict[str, ast.ClassDef]) -> set[str]:
    """The same, with what it has of its base classes in its package."""
    inherited = (
        members(there[base], there) for base in bases(node) if base in there and base != node.name
    )
    return attributes(node).union(*inherited)


def by_package(found: dict[str, ast.Module]) -> dict[str, list[ast.ClassDef]]:
    """{package: its classes}; the compiled core is one."""
    packages: dict[str, list[ast.ClassDef]] = {}
    for module, tree in found.items():
        there = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        packages.setdefault("_core" if module == "_core" else package(module), []).extend(there)
    return packages


def needless_protocols(found: dict[str, ast.Module]) -> list[str]:
    """Protocols of packages that have one implementation in the library, in their package or in the
    compiled core: an annotation can name that class."""
    protocols, real = [], []
    for ours, there in by_package(found).items():
        known = {node.name: node for node in there}
        for node in there:
            is_protocol = "Protocol" in bases(node)
            (protocols if is_protocol else real).append((ours, node.name, members(node, known)))
    result = []
    for ours, name, wanted in protocols:
        match [each for each in real if wanted <= each[2]]:
            case [(where, one, _)] if ours and wanted and where in (ours, "_core"):
                result.append(f"{ours}.{name} is {where}.{one}")
    return sorted(result)


@pytest.mark.long
def test_no_protocol_stands_for_one_class_of_its_package() -> None:
    assert needless_protocols(trees()) == []


def test_a_protocol_that_one_class_implements_is_found() -> None:
    host = ast.parse("class Host(Named, Protocol):\n  def close(self): ...")
    named = ast.parse("class Named(Protocol):\n  name: str")
    base = ast.parse("class Base:\n  def __init__(self):\n    self.name = ''")
    engine = ast.parse("class Engine(Base[int]):\n  def close(self): ...")
    core = ast.parse("class Batch: ...")
    there = {"_core": core, "aio.a": host, "aio.b": named, "aio.c": base, "aio.d": engine}
    assert needless_protocols(there) == ["aio.Host is aio.Engine"]  # two have a name
    other = ast.parse("class Other:\n  name = ''\n  def close(self): ...")
    assert needless_protocols({**there, "aio.e": other}) == []
    assert needless_protocols({**there, "cluster.e": other}) == []
    batch = ast.parse("class Batch:\n  name: str\n  def close(self): ...")
    there = {"_core": batch, "aio.a": host, "aio.b": named}
    assert needless_protocols(there) == ["aio.Host is _core.Batch", "aio.Named is _core.Batch"]


# ---- the formatter lays out all but tables of data ---------------------------------------


FOLDERS = ("exclusivelog", "tests", "testing", "proof", "bench", "examples", "tools", "docs")
MOST_TABLES = 25  # each is there because its columns mean something
SKIP = re.compile(r"# fmt: (skip|off)$")
OWNERS = (ast.Module, ast.ClassDef)
LITERAL = (ast.List, ast.Tuple, ast.Set, ast.Dict)


def is_data(node: ast.expr | None) -> bool:
    """A literal of several values, or a call that is given only one, such as frozenset({...})."""
    return isinstance(node, LITERAL) or (
        isinstance(node, ast.Call)
        and not node.keywords
        and [isinstance(each, LITERAL) for each in node.args] == [True]
    )


def skipped(text: str) -> list[int]:
    """Lines with such a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.start[0] for token in tokens if SKIP.match(token.string)]


def laid_out_by_hand(text: str) -> list[int]:
    """Lines with `fmt: skip` that do not end an assignment of data to a constant."""
    bodies = [node.body for node in ast.walk(ast.parse(text)) if isinstance(node, OWNERS)]
    data = {
        node.end_lineno
        for body in bodies
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_data(node.value)
    }
    return [number for number in skipped(text) if number not in data]


def sources() -> Iterator[Path]:
    """All Python files of the repository."""
    for folder in FOLDERS:
        yield from (REPOSITORY / folder).rglob("*.py")
    yield from REPOSITORY.glob("*.py")


@pytest.mark.long
def test_the_formatter_lays_out_all_but_tables_of_data() -> None:
    texts = {path.relative_to(REPOSITORY): path.read_text() for path in sources()}
    marked = {path: text for path, text in texts.items() if "# fmt: " in text}
    assert [f"{p}:{n}" for p, text in marked.items() for n in laid_out_by_hand(text)] == []
    assert sum(len(skipped(text)) for text in marked.values()) <= MOST_TABLES


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("A = [\n  1, 2,\n]", []),
        ("A: set[int] = frozenset({\n  1, 2,\n})", []),
        ("def f(\n  a, b,\n) -> None:", [3]),
        ("call(\n  1, 2,\n)", [3]),
        ("A = call(\n  1, 2,\n)", [3]),
        ("class A:\n  b = (\n    1, 2,\n  )", []),
        ("def f():\n  a = [\n    1, 2,\n  ]", [4]),
    ],
)
def test_what_is_laid_out_by_hand_is_found(code: str, lines: list[int]) -> None:
    body = "\n  ..." if code.endswith(":") else ""
    assert laid_out_by_hand(f"{code}  # fmt: skip{body}") == lines


# ---- errors of the system --------------------------------------------------------------


ASKED = {
    "pass_on_foreign",
    "is_foreign",
    "is_raised_by_a_handler",
    "expired",  # of asyncio.timeout
}


def is_of_the_system(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, OSError)


def names(node: ast.AST) -> set[str]:
    return {
        each.id if isinstance(each, ast.Name) else each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute)
    }


def tuples_of_errors(tree: ast.Module) -> set[str]:
    """Names of a module's constants that contain an OSError, such as NO_PLACE = (OSError, ...)."""
    return {
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and any(map(is_of_the_system, names(node.value)))
        for target in node.targets
        for name in names(target)
    }


def swallows(tree: ast.Module) -> Iterator[int]:
    """Lines that catch errors of the system, and do not ask who raised them."""
    tuples = tuples_of_errors(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught, asked = names(node.type), set().union(*map(names, node.body)) & ASKED
            if isinstance(node.body[0], ast.Raise) and node.body[0].exc is None:
                continue
        elif isinstance(node, ast.Call) and names(node.func) & {"suppress"}:
            caught, asked = set().union(*map(names, node.args), ()), set()
        elif isinstance(node, ast.keyword) and node.arg == "ignore_errors":
            yield node.lineno
            continue
        else:
            continue
        if not asked and (any(map(is_of_the_system, caught)) or caught & tuples):
            yield node.lineno


@pytest.mark.long
@pytest.mark.rule("H2")
def test_h2_each_error_of_the_system_may_be_one_of_a_signal_handler() -> None:
    """A time limit by SIGALRM raises TimeoutError, an OSError, in the middle of any call."""
    found = [f"{module}:{line}" for module, tree in trees().items() for line in swallows(tree)]
    assert not found, f"ask `exclusivelog.foreign` about the error in {', '.join(found)}"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("try: ...\nexcept OSError: pass", [2]),
        ("try: ...\nexcept (KeyError, TimeoutError): pass", [2]),
        ("NONE = (OSError, EOFError)\ntry: ...\nexcept NONE: pass", [3]),
        ("with contextlib.suppress(FileNotFoundError): ...", [1]),
        ("shutil.rmtree(path, ignore_errors=True)", [1]),
        ("try: ...\nexcept OSError as error: pass_on_foreign(error)", []),
        ("try: ...\nexcept OSError: raise", []),
        ("try: ...\nexcept LedgerError: pass", []),
    ],
)
def test_what_swallows_an_error_is_found(code: str, lines: list[int]) -> None:
    assert list(swallows(ast.parse(code))) == lines


# ---- tests wait for a condition, and for as long as the machine needs --------------------


MOST_SECONDS = 4  # of a limit that is a number: a shorter one is no limit, or is to pass
LIMITED = """
    result exception wait join answer communicate read_next finish until within line
""".split()


def numeric_limits(text: str, first: int = 1) -> list[int]:
    """Lines with a limit of a wait that is a number, also in the programs that a test starts.
    `not wait(...)` is no such wait: it is to last as long."""
    found, lasting = [], set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.UnaryOp):
            lasting.add(id(node.operand))
        if is_limited(node) and id(node) not in lasting:
            found.append(first - 1 + node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            with contextlib.suppress(SyntaxError, ValueError):  # it is no program
                found += numeric_limits(textwrap.dedent(node.value), first - 1 + node.lineno)
    return found


def is_limited(node: ast.AST) -> TypeGuard[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return called(node.left) == "monotonic" and is_long(node.right)
    if not isinstance(node, ast.Call):
        return False
    if called(node) == "alarm":
        return isinstance(node.args[0], ast.Constant) and node.args[0].value > 0
    limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
    if called(node) in ("until", "within"):
        limits += node.args[1:2]
    elif len(node.args) == 1 and isinstance(node.func, ast.Attribute):
        limits += node.args
    return called(node) in LIMITED and any(map(is_long, limits))


def called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def is_long(node: ast.expr) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int | float) and value >= MOST_SECONDS


@pytest.mark.long
def test_limits_of_waits_grow_with_the_load_of_the_machine() -> None:
    """A number that is enough here is too short on a machine with other work: `PATIENCE` of
    testing/patience.py is no number."""
    folders = ("tests", "testing", "proof/tests")
    files = {file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")}
    files -= {Path(__file__), REPOSITORY / "tests/storage/ledgers/make.py"}  # of earlier versions
    found = {
        str(file.relative_to(REPOSITORY)): lines
        for file in sorted(files)
        if (lines := numeric_limits(file.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("future.result(10)", True),
        ("future.result(timeout=10)", True),
        ("future.result(PATIENCE)", False),
        ("future.result(0.5)", False),
        ("until(condition, 20.0)", True),
        ("end = time.monotonic() + 10", True),
        ("assert not future.wait(6.0)", False),
        ("signal.alarm(2)", True),
        ("signal.alarm(0)", False),
        ('", ".join("abc")', False),
        ("PROGRAM = '''\n  import x\n  thread.join(20)\n'''", True),
    ],
)
def test_a_numeric_limit_of_a_wait_is_found(line: str, is_found: bool) -> None:
    assert bool(numeric_limits(line)) is is_found


# ---- docs/architecture.md names what there is --------------------------------------------


PAGE = REPOSITORY / "docs/architecture.md"
OF_FILES = re.compile(r"[\w./-]+\.(pyx?|pyi|pxi|h|c|md)|[\w./-]+/")
FENCED = re.compile(r"```text\n(.*?)```", re.DOTALL)
SOURCES = {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".h"}


def named(page: str) -> list[str]:
    """What stands in backticks in its sentences and tables."""
    return re.findall(r"`([^`]+)`", FENCED.sub("", page))


def missing(names: list[str], files: set[str], words: set[str]) -> list[str]:
    """Names of files that are none, and names whose words are in no file."""

    def is_there(name: str) -> bool:
        if OF_FILES.fullmatch(name):
            return any(f"/{name}" in f"/{file}" for file in files)
        return set(re.findall(r"[a-zA-Z_]\w*", name)) <= words

    return [name for name in names if not is_there(name)]


def test_the_architecture_names_files_and_words_that_exist() -> None:
    texts = [path.read_text() for path in ROOT.rglob("*") if path.suffix in SOURCES]
    texts += [(REPOSITORY / name).read_text() for name in ("Makefile", "pyproject.toml")]
    words = {"Wall", "Wextra", "Werror", *re.findall(r"\w+", " ".join(texts))}
    folders = [REPOSITORY / folder for folder in FOLDERS]
    files = {str(path.relative_to(REPOSITORY)) for top in folders for path in top.rglob("*")}
    files |= {"segments/", *os.listdir(REPOSITORY)}  # the former: of a ledger
    files |= {f"{folder}/" for folder in FOLDERS}
    assert missing(named(PAGE.read_text()), files, words) == []
    assert missing(["no_such.py", "Producer.no_such", "engine.py"], files, words) == [
        "no_such.py",
        "Producer.no_such",
    ]


@pytest.mark.parametrize(("number", "folder"), [(1, "."), (2, "local"), (3, "cluster")])
def test_the_architecture_lists_every_module(number: int, folder: str) -> None:
    """In the blocks of its layers."""
    listed = set(re.findall(r"\w+", FENCED.findall(PAGE.read_text())[number]))
    there = [path for path in (ROOT / folder).iterdir() if path.suffix == ".py" or path.is_dir()]
    names = {path.stem for path in there} - {"__init__", "__pycache__"}
    assert names - listed == set()
