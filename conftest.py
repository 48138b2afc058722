"""What every test and every doctest finds: an engine on a fresh ledger."""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule

import exclusivelog as xl
import testing
from exclusivelog import aio
from testing import rules
from testing.journals import small_journal
from testing.processes import Worker, workers

LIBRARY = Path(xl.__file__).parent

pytest.register_assert_rewrite("testing.loops")  # its assertions say what they have seen
pytest_plugins = ["pytester", "exclusivelog.testing"]


def pytest_configure(config: pytest.Config) -> None:
    durability = config.getoption("--durability")
    if durability != "power":  # for the programs that tests start, and theirs
        startup = str(Path(testing.__file__).parent / "startup")
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{startup}{os.pathsep}{before}" if before else startup
        os.environ[testing.DURABILITY] = durability
        testing.choose_durability()
    if config.getoption("--benchmark"):
        choose_benchmarks(config)
    config.addinivalue_line(
        "markers", "rule(number, ...): the test backs these rules of docs/semantics.md"
    )
    config.addinivalue_line(
        "markers", "needs(capability, ...): the test needs what `Engine.supports` names so"
    )
    config.addinivalue_line(
        "markers", "once: durability makes no difference to the test; `make test-all` runs it once"
    )
    config.addinivalue_line(
        "markers", "long: the test takes more than a second; only `make test-all` runs it"
    )
    config.addinivalue_line("markers", "sampled: `make test` runs the first case of the test alone")
    config.addinivalue_line(
        "markers", "every: `make test` runs all cases of the test: each tests something else"
    )
    config.addinivalue_line(
        "markers", "smoke: `make test` runs the test for a subject whose other tests are long"
    )
    config.addinivalue_line(
        "markers", "usual_journal: ledgers that the test makes have a journal of the usual size"
    )
    config.addinivalue_line(
        "markers", "on_broker: the conformance test runs on a Pulsar broker, too"
    )
    config.addinivalue_line(
        "markers", "broker: the test needs Pulsar; `make test-all` runs it once, beside few others"
    )
    if numbers := config.getoption("--rule"):
        choose_rules(config, numbers)
    # A job in the background of a shell is deaf to Ctrl-C, and its children with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def choose_benchmarks(config: pytest.Config) -> None:
    """What `--benchmark` stands for: --benchmark-only, and bench/ where no path is given."""
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("--benchmark needs pytest-benchmark: make .venv/ready")
    config.option.benchmark_only = True
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(config.rootpath / "bench")]


def choose_rules(config: pytest.Config, numbers: list[str]) -> None:
    """Where no path is given, `--rule` collects only the files that back one of these rules."""
    stated = rules.stated(rules.PAGE.read_text())
    if unknown := [number for number in numbers if number not in stated]:
        raise pytest.UsageError(
            f"--rule {unknown[0]}: docs/semantics.md has no such rule; it has {', '.join(stated)}"
        )
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        behind = rules.backing(rules.sources())
        files = sorted({name for number in numbers for name in behind.get(number, [])})
        config.args = [str(rules.ROOT / name) for name in files]


def pytest_itemcollected(item: pytest.Item) -> None:
    """The name of a test marks it: test_b3_... backs rule B3. One that has the durability as a
    parameter is run with both in one run."""
    if named := rules.rules_of(item.name):
        item.add_marker(pytest.mark.rule(*named))
    if isinstance(item, pytest.Function) and "durability" in item.fixturenames:
        item.add_marker(pytest.mark.once)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--short` and `--rest` leave these tests, `--sample` these cases of each, `--rule` those that
    back one of these rules."""
    not_sampled = sample(items)
    if config.getoption("--sample"):
        leave(config, items, lambda item: item not in not_sampled or is_of_durability(item))
    if config.getoption("--short"):
        check_places(items)
        leave(config, items, is_short)
    if config.getoption("--rest"):
        leave(config, items, lambda item: not is_short(item))
    if wanted := set(config.getoption("--rule")):
        leave(config, items, lambda item: not wanted.isdisjoint(rules_behind(item)))
    if hasattr(config, "workerinput"):  # elsewhere, the tests of a module stay together
        items.sort(key=is_quick)


LONG_TESTS = ("tests/", "proof/tests/")


def sample(items: list[pytest.Item]) -> set[pytest.Item]:
    """Mark the cases that `make test` leaves out as long, and return them. It runs the first, the
    middle and the last case of a test; all cases of one that is marked `every`; the first of a
    `sampled` one."""
    not_sampled = set[pytest.Item]()
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if is_short(item) and item.nodeid.startswith(LONG_TESTS):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        if same[0].get_closest_marker("every"):
            continue
        sampled = same[0].get_closest_marker("sampled")
        chosen = {0} if sampled else {0, len(same) // 2, len(same) - 1}
        for number, item in enumerate(same):
            if number not in chosen:
                item.add_marker(pytest.mark.long)
                not_sampled.add(item)
    return not_sampled


def check_places(items: list[pytest.Item]) -> None:
    """Raise UsageError for a long test in another directory: `make test-long` would not find it."""
    for item in items:
        if not is_short(item) and not item.nodeid.startswith(LONG_TESTS):
            raise pytest.UsageError(f"{item.nodeid} is long: it belongs into {LONG_TESTS}")


def leave(
    config: pytest.Config, items: list[pytest.Item], chosen: Callable[[pytest.Item], bool]
) -> None:
    """Run the chosen ones of these tests only."""
    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = [item for item in items if chosen(item)]


def is_short(item: pytest.Item) -> bool:
    """Does `make test` run this test? (testing/rules.py asks the same of a source.)"""
    marks = {mark.name for mark in item.iter_markers()}
    return "smoke" in marks or marks.isdisjoint({"long", "broker"})


def is_of_durability(item: pytest.Item) -> bool:
    """Does it back a rule of section H?"""
    return any(rule.startswith("H") for rule in rules_behind(item))


def is_quick(item: pytest.Item) -> bool:
    """What is not begins first: a test of half a minute that comes last is waited for by all."""
    return item.get_closest_marker("long") is None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[None]:
    """Doctests are looked for in the library, where docstrings are copied, and in files that hold
    one: to look at all functions of all test files is a tenth of the collection."""
    collectors: Any = yield
    return [
        each
        for each in collectors
        if not isinstance(each, DoctestModule)
        or LIBRARY in file_path.parents
        or b">>>" in file_path.read_bytes()
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected is kept: looking for garbage among it is a fifth of the work."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


MODULES = pytest.StashKey[int]()  # how many were imported when the collector was last told


def pytest_collection_finish(session: pytest.Session) -> None:
    """The collector need not go through thousands of collected tests again and again: that took
    150 ms each time."""
    freeze(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Nor through what earlier tests have imported: with pandas and pyspark, that took 100 ms."""
    if len(sys.modules) != item.config.stash[MODULES]:
        freeze(item.config)


def freeze(config: pytest.Config) -> None:
    """Let the collector leave out all that there is now."""
    gc.collect()
    gc.freeze()
    config.stash[MODULES] = len(sys.modules)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist ends now; what the summary imports elsewhere may ask who refers to it."""
    if not hasattr(session.config, "workerinput"):
        gc.unfreeze()


def rules_behind(item: pytest.Item) -> set[str]:
    return {number for mark in item.iter_markers("rule") for number in mark.args}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whichever worker has one of some tests has all of them."""
    from testing.together import Together

    return Together(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--durability",
        choices=("power", "process"),
        default="power",
        help="what engines promise where a test does not say it",
    )
    # pytest takes no abbreviations: it is none of pytest-benchmark's options, which begin so.
    parser.addoption(
        "--benchmark",
        action="store_true",
        help="run the microbenchmarks in bench/: --benchmark-only bench/",
    )
    parser.addoption(
        "--rule",
        action="append",
        default=[],
        type=str.upper,
        metavar="B3",
        help="run the tests that back this rule of docs/semantics.md, and no others; repeatable",
    )
    parser.addoption(
        "--short", action="store_true", help="run the tests of `make test`: none that is long"
    )
    parser.addoption("--rest", action="store_true", help="run the tests that --short leaves out")
    parser.addoption(
        "--sample",
        action="store_true",
        help="leave out the cases that --short leaves out of a test, but for tests of durability",
    )
    parser.addoption(
        "--torture-seconds",
        type=float,
        help="how long test_torture.py goes on; 12 s by default, 4 with --short",
    )
    parser.addoption(
        "--every-crash",
        action="store_true",
        help="take every system call, line, disk and world of a sweep, not a sample",
    )


@pytest.fixture
def sweep(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """`sweep(few, all)`: how many steps of a long sweep to take; all with --every-crash."""
    every = bool(request.config.getoption("--every-crash"))
    return lambda few, all_of_them: all_of_them if every else few


@pytest.fixture(autouse=True)
def _short_journals(request: pytest.FixtureRequest) -> Iterator[None]:
    """An eighth of the usual bytes: each new journal is written from its beginning to its end, and
    most tests make one. Programs that tests start, and the benchmarks, have the usual ones."""
    if request.node.get_closest_marker("usual_journal"):
        yield
    else:
        with small_journal(1 << 20):
            yield


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture
def engine(path: str) -> Iterator[xl.Engine]:
    with xl.open(path, name="test") as engine:
        yield engine


@pytest.fixture
def topic(engine: xl.Engine) -> xl.Topic:
    return engine.topic("orders")


@pytest.fixture(autouse=True)
def _examples(request: pytest.FixtureRequest) -> None:
    """The names that the examples in docstrings use."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    names = request.getfixturevalue("doctest_namespace")
    names.update(xl=xl, aio=aio, dt=dt, count=itertools.count(), asyncio=asyncio)
    source = "".join(example.source for example in request.node.dtest.examples)
    if any(word in source for word in ("engine", "topic", "producer", "reader", "path")):
        names["path"] = request.getfixturevalue("path")
    if '"data/log"' in source:
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
    if "aio.open" in source:
        return
    if any(word in source for word in ("engine", "topic", "producer", "reader")):
        if "xl.open" not in source:
            names["engine"] = request.getfixturevalue("engine")
            names["topic"] = names["engine"].topic("orders")
        if "producer." in source and "as producer" not in source:
            names["producer"] = names["topic"].producer()
        if "reader." in source and "reader = " not in source:
            names["reader"] = names["topic"].reader()


@pytest.fixture
def worker(path: str) -> Iterator[Callable[..., Worker]]:
    """`worker(name="w", keepalive=...)`: a real process with an engine on `path`."""
    with workers() as make:
        yield lambda name="worker", **options: make(path, name, **options)
