"""What someone is told who has no compiler, no built extension, or another Python."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.patience import PATIENCE

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.once


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program that knows of no other copy of the library."""
    program = [sys.executable, "-I", "-S", *map(str, command)]
    return subprocess.run(
        program,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def setup(
    *command: str, beforehand: str = "", compiler: str = "/nowhere/cc"
) -> subprocess.CompletedProcess[str]:
    """Run setup.py with a compiler that does not exist, in an interpreter that was changed."""
    paths = [path for path in sys.path if "site-packages" in path]
    source = (
        f"import sys, sysconfig, runpy; sys.path += {paths}; {beforehand}\n"
        f"sys.argv = ['setup.py', *{list(command)}]; runpy.run_path('setup.py')"
    )
    return run("-c", source, cwd=ROOT, CC=compiler)


def test_without_a_compiler_one_sentence_says_so() -> None:
    done = setup("build_ext")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no C compiler '/nowhere/cc'. On Debian and Ubuntu: apt-get" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_pythons_headers_one_sentence_says_so() -> None:
    nowhere = "sysconfig.get_path = lambda name: '/nowhere/include'"
    done = setup("build_ext", beforehand=nowhere, compiler="true")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Python has no /nowhere/include/Python.h" in done.stderr
    assert "apt-get install python3-dev" in done.stderr
    assert "Traceback" not in done.stderr


ADDRESS = "https://forge.example/exclusivelog"
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)]+)\)")


def description(tree: Path, urls: str = "") -> str:
    """What setup.py says of the project to a package index."""
    (tree / "exclusivelog").mkdir(parents=True)
    for name in ("setup.py", "README.md", "LICENSE", "NOTICE", "exclusivelog/version.py"):
        shutil.copy(ROOT / name, tree / name)
    project = (ROOT / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(project + urls)
    paths = [path for path in sys.path if "site-packages" in path]
    source = (
        f"import sys, runpy; sys.path += {paths}\n"
        "sys.argv = ['setup.py', '-q', '--long-description']; runpy.run_path('setup.py')"
    )
    done = run("-c", source, cwd=tree)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_links_and_pictures_of_the_description_lead_to_the_repository(tmp_path: Path) -> None:
    told = description(tmp_path / "tree", f'[project.urls]\nRepository = "{ADDRESS}"\n')
    links = LINK.findall(told)
    assert len(links) == len(LINK.findall((ROOT / "README.md").read_text())) > 20
    for mark, target in links:
        head = f"{ADDRESS}/{'raw' if mark else 'blob'}/v{xl.__version__}/"
        assert target.startswith(head)
        assert (ROOT / target.removeprefix(head).partition("#")[0]).is_file()


def test_without_an_address_the_description_has_no_dead_link(tmp_path: Path) -> None:
    told = description(tmp_path / "tree")
    assert LINK.findall(told) == []
    assert "In the tutorial you write a worker" in told


@pytest.mark.parametrize(
    ("beforehand", "told"),
    [
        ("sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1", "free-threaded Python"),
        ("import setuptools; sysconfig.get_config_vars(); sys.platform = 'darwin'", "Linux alone"),
    ],
    ids=["free-threaded", "macOS"],
)
def test_where_it_cannot_run_it_is_not_built(beforehand: str, told: str) -> None:
    done = setup("--name", beforehand=beforehand)
    assert (done.returncode, told in done.stderr) == (1, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "source",
    [
        "import exclusivelog as xl; xl.open",
        "from exclusivelog import aio",
        "import exclusivelog.producer",
        "from exclusivelog._core import Message",
    ],
)
def test_in_a_clone_that_was_not_built_an_import_says_what_to_do(
    tmp_path: Path, source: str
) -> None:
    shutil.copytree(
        ROOT / "exclusivelog",
        tmp_path / "exclusivelog",
        ignore=shutil.ignore_patterns("*.so", "__pycache__", "_native"),
    )
    paths = [str(tmp_path), *(path for path in sys.path if "site-packages" in path)]
    done = run("-c", f"import sys; sys.path[:0] = {paths}\n{source}", cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: exclusivelog is not built for this Python in {tmp_path}")
    assert "pip install -e ." in last
