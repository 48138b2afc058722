"""Other supported Pythons of this machine, each with the library, in build/pythons/.

They are those on PATH, of pyenv and of uv. Each gets a virtual environment with what serialisers
need, from PyPI, and a build of its own of the library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path
from typing import NamedTuple

from testing.children import ROOT
from testing.compilers import unoptimised

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
BUILDS = ROOT / "build" / "pythons"
NEEDED = ("lmdb", "msgpack", "msgspec", "pydantic", "attrs", "hypothesis")
BUILDERS = ("setuptools", "cython>=3.1")
PLACES = (
    "{pyenv}/versions/{version}.*/bin/python{version}",
    "{uv}/cpython-{version}.*/bin/python{version}",
)
ASK = """
import sys, sysconfig
print(sys.version_info[:2], sysconfig.get_config_var("Py_GIL_DISABLED"))
"""


class Other(NamedTuple):
    """A Python that has the library: start it in `where`."""

    version: str
    python: str
    where: Path


def found() -> dict[str, str]:
    """{version: path} of the other supported Pythons, the newest of each version."""
    here = "{}.{}".format(*sys.version_info[:2])
    candidates = {version: _candidates(version) for version in VERSIONS if version != here}
    return {
        version: good[0]
        for version, paths in candidates.items()
        if (good := [path for path in paths if _starts(path, version)])
    }


def _candidates(version: str) -> list[str]:
    roots = {
        "pyenv": os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv",
        "uv": os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local/share/uv/python",
    }
    on_path = shutil.which(f"python{version}")
    places = [place.format(version=version, **roots) for place in PLACES]
    return [on_path] * (on_path is not None) + [
        path for place in places for path in sorted(glob(place), reverse=True)
    ]


def _starts(path: str, version: str) -> bool:
    # It may be a shim of pyenv that starts nothing, or have no GIL.
    ran = subprocess.run([path, "-c", ASK], capture_output=True, text=True)
    return ran.stdout.strip() in (f"({version.replace('.', ', ')}) {end}" for end in ("0", "None"))


def with_library(version: str, path: str) -> Other:
    """That Python with the library as it is now; CalledProcessError if it cannot be had."""
    home = BUILDS / version
    python, built, mark = home / "venv/bin/python", home / "tree", home / "sources"
    installed = home / "installed"
    if not installed.exists():  # also if that was interrupted
        _run(path, "-m", "venv", "--clear", "--without-pip", str(home / "venv"))
        pip = (sys.executable, "-m", "pip", "--python", str(python))
        _run(*pip, "install", "-q", "--no-compile", *NEEDED, *BUILDERS)
        installed.touch()
    sources = _sources()
    if not mark.exists() or mark.read_text() != sources:
        shutil.rmtree(built, ignore_errors=True)
        _run(
            str(python),
            "setup.py",
            "-q",
            "build_ext",
            "--build-lib",
            str(built),
            "--build-temp",
            str(home / "objects"),
            CC=unoptimised(home),
        )
        _copy_python(built)
        mark.write_text(sources)
    return Other(version, str(python), built)


def _run(*command: str, **environment: str) -> None:
    env = {**os.environ, **environment}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)


def _copy_python(built: Path) -> None:
    foreign = shutil.ignore_patterns("*.so", "__pycache__", "_native")
    shutil.copytree(
        ROOT / "exclusivelog", built / "exclusivelog", ignore=foreign, dirs_exist_ok=True
    )
    shutil.copytree(ROOT / "testing", built / "testing", ignore=foreign)


def _sources() -> str:
    """A digest of what is built and copied."""
    digest = hashlib.sha256()
    files = [ROOT / "setup.py", *ROOT.glob("exclusivelog/**/*"), *ROOT.glob("testing/**/*.py")]
    for file in sorted(files):
        if file.is_file() and file.suffix not in (".so", ".pyc"):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
