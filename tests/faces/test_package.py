"""What a user installs: a source archive that builds by itself, a wheel with the right files in
it, and a library that needs nothing but its runtime dependencies."""

from __future__ import annotations

import ast
import email
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import exclusivelog as xl
from testing.compilers import unoptimised
from testing.patience import PATIENCE

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_OURS = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "*.so", "_core.c", "__pycache__", "results"
)
OFFLINE = re.compile(
    "No matching distribution|Could not find a version|Temporary failure|NewConnectionError|"
    "Read timed out|ProxyError|Network is unreachable|SSLError"
)

pytestmark = [pytest.mark.once, pytest.mark.timeout(2000)]


class Environment:
    """A new virtual environment, with nothing in it: the pip of this one installs there, because
    one of its own takes 3 s to install."""

    def __init__(self, where: Path) -> None:
        venv.create(where)
        self.bin = where / "bin"
        self._pip = [sys.executable, "-m", "pip", "--python", self.bin / "python"]

    def run(self, *command: object, cwd: Path, status: int = 0) -> str:
        """What the command prints; it must end with `status`."""
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=8 * PATIENCE,
            env=clean_environment(),
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def python(self, source: str, *args: object, cwd: Path) -> str:
        """What `source` prints. Warnings are errors."""
        return self.run(self.bin / "python", "-W", "error", "-c", source, *args, cwd=cwd)

    def installed(self) -> set[str]:
        """The names of what is installed in it."""
        listed = self.run(*self._pip, "list", "--format=json", cwd=ROOT)
        return {each["name"] for each in json.loads(listed)}

    def pip(self, *args: object, **environment: str) -> None:
        """Run pip; skip the test where it cannot reach an index."""
        brief = "-q --disable-pip-version-check --retries 1 --timeout 20".split()
        done = subprocess.run(
            [*map(str, self._pip), *brief, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=8 * PATIENCE,
            check=False,
            env=clean_environment() | environment,
        )
        if done.returncode and OFFLINE.search(done.stderr):
            pytest.skip(f"pip cannot reach an index: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stdout + done.stderr


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with what pyproject.toml says that a build needs."""
    environment = Environment(tmp_path_factory.mktemp("builder"))
    environment.pip("install", "--no-compile", *PROJECT["build-system"]["requires"])
    return environment


@pytest.fixture(scope="module")
def archive(builder: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, made from a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree") / "exclusivelog"
    out = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, tree, ignore=NOT_OURS)
    build = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"
    builder.run(builder.bin / "python", "-c", build, out, cwd=tree)
    (made,) = out.iterdir()
    return made


SETUP_WITHOUT_SOURCES = """
import runpy, Cython.Build, setuptools
Cython.Build.cythonize = lambda found, **options: [setuptools.Extension(found[0].name, [])]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest) -> Path:
    """The wheel. `make test` has just compiled the core, by the same setup.py, and takes that."""
    packed: Path = request.getfixturevalue(
        "wheel_of_what_is_compiled" if request.config.getoption("--short") else "wheel_of_sources"
    )
    return packed


@pytest.fixture(scope="module")
def wheel_of_what_is_compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy of the tree, without a compiler: the core is there."""
    tree, out = tmp_path_factory.mktemp("tree") / "exclusivelog", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, tree, ignore=NOT_OURS)
    (tree / "built" / "exclusivelog").mkdir(parents=True)
    shutil.copy(xl._core.__file__, tree / "built" / "exclusivelog")
    pack = f"-q build --build-lib built bdist_wheel --dist-dir {out}".split()
    subprocess.run(
        [sys.executable, "-c", SETUP_WITHOUT_SOURCES, *pack],
        cwd=tree,
        env=clean_environment() | {"CC": "false"},
        timeout=8 * PATIENCE,
        check=True,
    )
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel_of_sources(
    builder: Environment, archive: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Made from the source archive alone. All other tests have an optimised extension; to optimise
    it once more would take 14 s."""
    out = tmp_path_factory.mktemp("wheel")
    compiler = unoptimised(tmp_path_factory.mktemp("compiler"))
    builder.pip("wheel", "--no-deps", "--no-build-isolation", "-w", out, archive, CC=compiler)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A new environment with the wheel and what it needs at run time."""
    environment = Environment(tmp_path_factory.mktemp("bare"))
    environment.pip("install", wheel)
    return environment


@pytest.fixture(scope="module")
def inside(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


# ---- how a release makes them ------------------------------------------------------------


def test_the_release_workflow_runs_and_passes_on_what_exists() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all("uses" in step or "run" in step for step in steps)
    tools = {re.split("[>=]", name)[0] for name in PROJECT["dependency-groups"]["wheels"]}
    for step in steps:
        if "run" in step:
            *runner, tool, _ = shlex.split(step["run"])
            assert runner == ["pipx", "run"]
            assert tool in tools
    uploads = [step["with"] for step in steps if "upload-artifact" in step.get("uses", "")]
    assert {each["path"] for each in uploads} == {"wheelhouse/*.whl", "dist/*.tar.gz"}
    assert len({each["name"] for each in uploads}) == len(uploads)
    assert {*jobs["publish"]["needs"], "publish"} == set(jobs)


def test_a_release_builds_for_each_python_that_the_project_names() -> None:
    wheels = PROJECT["tool"]["cibuildwheel"]
    prefix = "Programming Language :: Python :: 3."
    minors = [
        each.removeprefix(prefix)
        for each in PROJECT["project"]["classifiers"]
        if each.startswith(prefix)
    ]
    assert wheels["build"] == [f"cp3{minor}-*" for minor in minors]
    here = ast.parse((ROOT / "tools" / "wheels.py").read_text())
    [versions] = [
        ast.literal_eval(each.value)
        for each in here.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "VERSIONS"
    ]
    assert list(versions) == [f"3.{minor}" for minor in minors]
    program, script = shlex.split(wheels["test-command"].format(project=ROOT))
    assert program == "python"
    assert Path(script).is_file()


# ---- what is in them ---------------------------------------------------------------------


NATIVE = ["tests/core/native/native_test.c", "bench/native/death.c", "bench/native/shared_flush.c"]
RUST = [f"bench/native/logs/{name}" for name in ("Cargo.toml", "Cargo.lock", "src/main.rs")]


@pytest.mark.long
def test_the_source_archive_holds_what_a_build_and_its_tests_need(archive) -> None:
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    named = """
        pyproject.toml setup.py README.md LICENSE NOTICE Makefile conftest.py CONTRIBUTING.md
        docs/semantics.md exclusivelog/_core.pyx exclusivelog/_core.pxd exclusivelog/_core.pyi
        exclusivelog/py.typed exclusivelog/engine.py exclusivelog/spark/source.py
        pyspark_exclusivelog.py testing/processes.py tests/core/native/thread-sanitizer.supp
        tests/faces/test_package.py tests/storage/ledgers/README.md
    """
    wanted = [
        *named.split(),
        *NATIVE,
        *RUST,
        *(f"exclusivelog/_native/{path.name}" for path in ROOT.glob("exclusivelog/_native/*")),
        *(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.tar.xz")),
    ]
    assert len([name for name in wanted if name.endswith(".tar.xz")]) >= 8
    assert [name for name in wanted if name not in names] == []
    strange = [name for name in names if name.endswith((".c", ".so", ".pyc")) or "venv" in name]
    assert sorted(strange) == sorted(NATIVE)
    assert archive.stat().st_size < 5 << 20


@pytest.mark.long
def test_the_wheel_holds_the_library_its_types_and_nothing_else(inside) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "exclusivelog").rglob("*.py")}
    assert modules <= inside
    assert {"exclusivelog/py.typed", "exclusivelog/_core.pyi"} <= inside
    page = {f"exclusivelog/audit/page.{kind}" for kind in ("css", "js", "html.j2")}
    assert page <= inside
    assert len([name for name in inside if re.match(r"exclusivelog/_core\..*\.so$", name)]) == 1
    tops = {name.partition("/")[0] for name in inside}
    found = {re.sub(r"-.*(?=\.dist-info)", "", top) for top in tops}
    assert found == {"exclusivelog", "exclusivelog.dist-info", "pyspark_exclusivelog.py"}
    sources = (".c", ".pyc", ".pxi", ".pyx", ".h")
    strange = [name for name in inside if name.endswith(sources) or re.search("test|_data", name)]
    assert strange == ["exclusivelog/testing.py"]


def test_the_wheel_says_what_it_needs(wheel, inside) -> None:
    (metadata,) = [name for name in inside if name.endswith("METADATA")]
    with zipfile.ZipFile(wheel) as file:
        message = email.message_from_bytes(file.read(metadata))
        entry_points = file.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    from exclusivelog import __version__

    assert (message["Name"], message["Version"]) == ("exclusivelog", __version__)
    required = message.get_all("Requires-Dist")
    always = {re.split("[<>=; ]", line)[0] for line in required if "extra" not in line}
    assert always == {"lmdb", "msgpack"}
    assert set(message.get_all("Provides-Extra")) == {
        *"all arrow cli cluster lz4 metrics models otel report spark zstd".split()
    }
    assert (message["License-Expression"], bool(message["Author"])) == ("Apache-2.0", True)
    licences = metadata.replace("METADATA", "licenses/")
    with zipfile.ZipFile(wheel) as file:
        assert b"END OF TERMS AND CONDITIONS" in file.read(f"{licences}LICENSE")
        assert b"What is compiled in" in file.read(f"{licences}NOTICE")
    assert "exclusivelog = exclusivelog.cli:main" in entry_points


# ---- and what it does --------------------------------------------------------------------


@pytest.mark.long
def test_nothing_more_is_installed_than_is_needed(bare) -> None:
    assert bare.installed() == {"exclusivelog", "lmdb", "msgpack"}


def test_it_works_with_its_runtime_dependencies_alone(bare, tmp_path) -> None:
    source = """
import sys
import exclusivelog as xl

assert "site-packages" in xl.__file__, xl.__file__
with xl.open(sys.argv[1], name="bare") as engine:
    topic = engine.topic("orders")
    with topic.producer("exclusive", serializer="json") as producer:
        producer.send({"a": 1}, key="k", properties={"p": "q"})
        producer.send_many([1, 2, None])
        print(producer.send_async("last").result())
    print([message.value for message in topic.reader(deserializer="json")])
    print(engine.verify().ok, topic.epoch)
print([name for name in ("pyarrow", "asyncio", "rich", "numpy") if name in sys.modules])
"""
    said = bare.python(source, tmp_path / "log", cwd=tmp_path).splitlines()
    assert said == ["4", "[{'a': 1}, 1, 2, None, 'last']", "True 1", "[]"]


def test_arrow_says_what_is_missing(bare, tmp_path) -> None:
    source = """
import sys
import exclusivelog as xl

with xl.open(sys.argv[1]) as engine:
    topic = engine.topic("orders")
    with topic.producer() as producer:
        producer.send(b"x")
    reader = topic.reader()
    try:
        reader.read_arrow()
    except ImportError as error:
        print(error)
    print(reader.read_next(0).value)
"""
    message, value = bare.python(source, tmp_path / "log", cwd=tmp_path).splitlines()
    assert "arrow" in message
    assert value == "b'x'"  # what could not be turned into Arrow is not lost


@pytest.mark.long
def test_the_command_needs_its_extra_alone(wheel, tmp_path) -> None:
    environment = Environment(tmp_path / "environment")
    environment.pip("install", f"exclusivelog[cli] @ {wheel.as_uri()}")
    command, here = environment.bin / "exclusivelog", tmp_path
    assert environment.run(command, "send", "log", "orders", "a", "b", cwd=here) == "0\n1\n"
    told = environment.run(command, "topics", "log", cwd=here).splitlines()
    assert told[1].split("\t")[:2] == ["orders", "2"]
    assert "  topics " in environment.run(command, "--help", cwd=here)
    assert "orders\tyes\toffsets are dense" in environment.run(command, "audit", "log", cwd=here)
    demo = environment.run(
        command, "demo", "--kills", "0", "--events", "300", "--rate", "10000", cwd=here
    )
    assert demo.endswith("verdict: all of it holds\n")  # of made-up events


@pytest.mark.parametrize("argument", ["--help", "topics", "demo"])
def test_the_command_says_which_extra_is_missing(argument, bare, tmp_path) -> None:
    said = bare.run(bare.bin / "exclusivelog", argument, cwd=tmp_path, status=1)
    assert "the command needs the extra cli: pip install 'exclusivelog[cli]'" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_every_module_can_be_imported_on_its_own(bare, tmp_path) -> None:
    source = """
import importlib, pkgutil, sys
import exclusivelog
modules = pkgutil.walk_packages(exclusivelog.__path__, "exclusivelog.")
print(*sorted(module.name.partition(".")[2] for module in modules))
importlib.import_module("exclusivelog." + sys.argv[1])
"""
    names = bare.python(source, "engine", cwd=tmp_path).split()
    assert {"engine", "local.storage.ledger", "reader", "_core"} <= set(names)
    everything = (
        source + "for name in sys.argv[2:]: importlib.import_module('exclusivelog.' + name)"
    )
    # Those of Spark, of the command and of traces need their extras, and say so.
    extra = ("spark.", "audit.runs", "cli.", "testing", "tracing")
    bare.python(everything, *(n for n in names if not n.startswith(extra)), cwd=tmp_path)


def test_the_installed_library_is_the_one_that_is_tested() -> None:
    import exclusivelog

    assert Path(exclusivelog.__file__).parent == ROOT / "exclusivelog"
    assert sys.version_info >= (3, 11)


def test_public_names_are_there_and_told() -> None:
    import exclusivelog as xl

    for name in xl.__all__:
        thing = getattr(xl, name)
        assert name == "__version__" or (thing.__doc__ or "").strip(), name
    assert sorted(xl.__all__) == sorted(set(xl.__all__))


def test_every_public_name_is_listed_once_where_it_is_imported_from() -> None:
    """The modules whose names are looked up at run time are those that type checkers see."""
    import exclusivelog as xl

    lists = {part: import_module(f"exclusivelog.{part}").__all__ for part in xl._PARTS}
    listed = [name for names in lists.values() for name in names]
    assert sorted([*listed, "__version__", "serde"]) == xl.__all__
    for part, names in lists.items():
        for name in names:
            assert getattr(xl, name) is getattr(import_module(f"exclusivelog.{part}"), name)
    tree = ast.parse(Path(xl.__file__).read_text())
    found = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and [each.name for each in node.names] == ["*"]
    }
    assert found == {f"exclusivelog.{part}" for part in lists}


@pytest.mark.parametrize("module", ["exclusivelog", "exclusivelog.aio"])
def test_the_package_shows_its_public_names_and_nothing_else(module: str) -> None:
    import exclusivelog as xl

    shown = dir(import_module(module))
    modules = {"errors", "events", "serde", "types"}
    assert {name for name in shown if not name.startswith("_")} == (
        {*xl.__all__, *modules} - {"__version__"}
    )
    assert all(name.startswith("__") for name in shown if name.startswith("_"))
    names: dict[str, object] = {}
    exec(f"from {module} import *", names)
    assert set(xl.__all__) == set(names) - {"__builtins__"}


def test_other_names_are_none_of_the_package() -> None:
    import exclusivelog as xl

    with pytest.raises(AttributeError, match="has no attribute 'Enigne'"):
        _ = xl.Enigne
    for name in ("os", "EXTENSION_SUFFIXES", "_anything"):
        assert not hasattr(xl, name)


def test_a_module_is_imported_without_those_of_the_public_names() -> None:
    """Each module may be the first one that a program imports."""
    code = "import sys; from exclusivelog import logs; print('exclusivelog.engine' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_public_classes_are_pickled_by_their_names() -> None:
    import exclusivelog as xl

    for name in xl.__all__:
        thing = getattr(xl, name)
        if isinstance(thing, type):
            assert pickle.loads(pickle.dumps(thing)) is thing


# Each of these would delay every program that only sends, or never uses the library at all.
HEAVY = """
    asyncio bz2 click decimal gevent lzma numpy pandas pathlib pyarrow pydantic pyspark rich shutil
    ssl subprocess tempfile typer uuid
""".split()


def loaded_after(source: str) -> set[str]:
    """The modules that a new interpreter has imported for this program, -S: without those that the
    environment of the tests may load at the start, for editable packages."""
    paths = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    program = f"import sys; before = {{*sys.modules}}; {source}; print(*{{*sys.modules}} - before)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )
    return set(done.stdout.split())


def test_the_import_alone_loads_no_other_module_of_the_library() -> None:
    loaded = loaded_after("import exclusivelog")
    ours = {name for name in loaded if name.startswith("exclusivelog")}
    assert ours == {"exclusivelog", "exclusivelog.version"}
    assert loaded.isdisjoint({*HEAVY, "dataclasses", "lmdb", "logging", "msgpack", "typing"})


def test_opening_a_ledger_loads_nothing_heavy() -> None:
    loaded = loaded_after("import exclusivelog; exclusivelog.open")
    assert loaded.isdisjoint(HEAVY), loaded.intersection(HEAVY)
    assert not any(name.startswith(("exclusivelog.state", "exclusivelog.cli")) for name in loaded)


def test_the_core_is_stripped_unless_a_debug_build_is_asked_for() -> None:
    from exclusivelog import _core

    assert 'os.environ.get("EXCLUSIVELOG_DEBUG"' in (ROOT / "setup.py").read_text()
    if not os.environ.get("EXCLUSIVELOG_DEBUG"):
        sections = Path(_core.__file__).read_bytes()
        assert b".debug_info" not in sections
        assert b".symtab" not in sections


def test_errors_are_also_those_of_python_that_the_interface_names() -> None:
    also = {
        "UnsupportedError": NotImplementedError,
        "DeserializationError": ValueError,
        "WaitTimeoutError": TimeoutError,
        "InvalidEpochError": ValueError,
        "ProducerMovedError": xl.ProducerFencedError,
    }
    for name in xl.__all__:
        found = getattr(xl, name)
        if not isinstance(found, type) or not issubclass(found, Exception):
            continue
        assert issubclass(found, xl.ExclusiveLogError), name
        assert issubclass(found, also.get(name, Exception)), name
        ledgers = issubclass(found, xl.LedgerError)
        assert issubclass(found, OSError) == (ledgers or name == "WaitTimeoutError"), name
