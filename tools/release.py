"""`make release-check`: what a release still needs, and whether its files can be made.

Prints a line for each item: `ok`, `MISSING` with what to do, or `not here` for what this machine
cannot try. Exits with status 1 if anything is missing.
"""

from __future__ import annotations

import email
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import cross
import wheels
from wheels import TREE

PROJECT = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
LINK = re.compile(r"\]\(([^)]+)\)")
FULL_LICENCE = "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION"
MISSING = []


def tell(what: str, problem: str = "") -> None:
    """A line of the result."""
    print(f"{'MISSING ' if problem else 'ok      '}  {what}{': ' if problem else ''}{problem}")
    if problem:
        MISSING.append(what)


def check_texts() -> None:
    """The project's own files."""
    tell(
        "address of the repository",
        ""
        if "Repository" in PROJECT.get("urls", {})
        else "set project.urls.Repository in "
        "pyproject.toml; the description then has its links and its picture",
    )
    readme = (TREE / "README.md").read_text()
    tell(
        "installation by name",
        "README.md says that it is not on PyPI" if "not on PyPI" in readme else "",
    )
    version = runpy.run_path(str(TREE / "exclusivelog" / "version.py"))["__version__"]
    section = re.search(
        rf"^## {re.escape(version)} \((.+)\)", (TREE / "CHANGELOG.md").read_text(), re.M
    )
    dated = section is not None and section[1] != "unreleased"
    tell("changelog", "" if dated else f"the section {version} of CHANGELOG.md has no date")
    tagged = subprocess.run(
        ["git", "rev-parse", "-q", "--verify", f"v{version}^{{commit}}"],
        cwd=TREE,
        capture_output=True,
        check=False,
    )
    tell("tag", "" if tagged.returncode == 0 else f"git tag v{version}, once the rest is ok")


def check_metadata(text: str) -> None:
    """What a package index shows."""
    told = email.message_from_string(text)
    for name in ("Author", "License-Expression", "Requires-Python", "Summary"):
        tell(f"metadata: {name}", "" if told[name] else "pyproject.toml does not say it")
    description = str(told.get_payload())
    relative = [link for link in LINK.findall(description) if not re.match(r"https?://|#", link)]
    tell("absolute links in the description", ", ".join(relative))


def check_archive(archive: Path) -> None:
    """The source archive."""
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = {"LICENSE", "NOTICE", "exclusivelog/_core.pyx", "tests/smoke.py"}
    tell(f"source archive, {archive.stat().st_size:,} bytes", ", ".join(wanted - names))


def check_wheel(wheel: Path) -> None:
    """The contents of a wheel, and the libraries that its compiled file asks for."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        read = {Path(name).name: file.read(name) for name in names if ".dist-info/" in name}
        compiled = [name for name in names if ".so" in Path(name).suffixes]
        check_metadata(read["METADATA"].decode())
        full = FULL_LICENCE.encode() in read.get("LICENSE", b"")
        tell("full text of the licence in the wheel", "" if full else "LICENSE is incomplete")
        told = b"What is compiled in" in read.get("NOTICE", b"")
        tell("what is compiled in", "" if told else "NOTICE does not list it")
        tell("no data of the demo in the wheel", ", ".join(n for n in names if "demo_data" in n))
        one = "" if len(compiled) == 1 else f"{compiled} instead of one"
        tell("one compiled file, and no bundled library", one)


def tried() -> Iterator[str]:
    """Build and try the wheels of this machine's Pythons; the versions that it has not."""
    archive = wheels.make_archive()
    check_archive(archive)
    found = wheels.interpreters([])
    for python in found.values():
        tell(wheels.build_and_try(python, archive))
    check_wheel(max(wheels.DIST.glob("*.whl"), key=lambda file: file.stat().st_mtime))
    for wheel in cross.build_all(archive):
        tell(f"{wheel.name}, {wheel.stat().st_size:,} bytes: compiles; not run")
    yield from (version for version in wheels.VERSIONS if version not in found)


def main() -> None:
    """Check all of it."""
    check_texts()
    for version in tried():
        print(f"not here  Python {version}: this machine has none")
    if MISSING:
        sys.exit(f"a release needs {len(MISSING)} more: {', '.join(MISSING)}")


if __name__ == "__main__":
    main()
