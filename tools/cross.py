"""Cross-build wheels for C libraries and processors that this machine does not have.

The compiler is Zig, which PyPI has as `ziglang`; the headers are those of this Python: they are the
same for all 64-bit targets. auditwheel checks the platform tag of each wheel. This shows that the
sources compile there, and what the result asks of a system; nothing is run. A release does not
publish these wheels: those that cibuildwheel builds by GCC are smaller, and Zig's run-time library
(0.17) finds no CRC-32C instruction on x86-64.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from wheels import TOOLS, TREE, make_archive, run

OUT = TREE / "build" / "cross"
BUILD = "import sys, setuptools.build_meta as build; build.build_wheel(sys.argv[1])"


class Target(NamedTuple):
    """What a wheel is built for."""

    tag: str  # of the wheel
    zig: str  # Zig's name of the target
    python: str  # Python's name of it, in the name of the extension

    @property
    def processor(self) -> str:
        """As in the name of a platform."""
        return self.zig.partition("-")[0]


TARGETS = (
    Target("musllinux_1_2_x86_64", "x86_64-linux-musl", "x86_64-linux-musl"),
    Target("musllinux_1_2_aarch64", "aarch64-linux-musl", "aarch64-linux-musl"),
    Target("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", "aarch64-linux-gnu"),
)


def configure(target: Target, where: Path) -> dict[str, str]:
    """Write what Python says of its own build, as a Python of the target would say it. Returns the
    environment in which setuptools reads it."""
    native = dict(import_module(sysconfig._get_sysconfigdata_name()).build_time_vars)  # type: ignore[attr-defined]
    compiler = f"{sys.executable} -m ziglang cc -target {target.zig}"
    name, here = target.python, sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    told = native | {
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared",
        "CFLAGS": "-DNDEBUG -fwrapv",
        "OPT": "",
        "LDFLAGS": "",
        "MULTIARCH": name,
        "EXT_SUFFIX": native["EXT_SUFFIX"].replace(here, name),
        "SOABI": native["SOABI"].replace(here, name),
    }
    where.mkdir()
    (where / "_sysconfigdata_target.py").write_text(f"build_time_vars = {told!r}\n")
    return {
        "CC": compiler,
        "PYTHONPATH": str(where),
        "_PYTHON_SYSCONFIGDATA_NAME": "_sysconfigdata_target",
        "_PYTHON_HOST_PLATFORM": f"linux-{target.processor}",
    }


def name_musl(wheel: Path, processor: str) -> None:
    """Name the C library as the systems with musl do, and auditwheel: Zig calls it libc.so."""
    with tempfile.TemporaryDirectory() as content:
        run(sys.executable, "-m", "wheel", "unpack", "-d", content, wheel)
        (top,) = Path(content).iterdir()
        (core,) = (top / "exclusivelog").glob("_core.*.so")
        names = ("libc.so", f"libc.musl-{processor}.so.1")
        run("patchelf", "--replace-needed", *names, core, PATH=TOOLS)
        run(sys.executable, "-m", "wheel", "pack", "-d", wheel.parent, top)


def build(target: Target, archive: Path) -> Path:
    """The checked wheel, in build/cross."""
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary)
        with tarfile.open(archive) as file:
            file.extractall(where / "source", filter="data")
        (source,) = (where / "source").iterdir()
        environment = configure(target, where / "conf")
        run(sys.executable, "-c", BUILD, where / "raw", cwd=source, **environment)
        (made,) = (where / "raw").glob("*.whl")
        if target.tag.startswith("musl"):
            name_musl(made, target.processor)
        run(
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "-w",
            where / "checked",
            made,
            PATH=TOOLS,
        )
        (wheel,) = (where / "checked").glob("*.whl")
        if target.tag not in wheel.name:
            sys.exit(f"auditwheel gives {wheel.name} another tag than {target.tag}")
        return Path(shutil.copy(wheel, OUT))


def build_all(archive: Path) -> Iterator[Path]:
    """A wheel for each target, one after the other."""
    OUT.mkdir(parents=True, exist_ok=True)
    for target in TARGETS:
        yield build(target, archive)


def main() -> None:
    """Build them from the sources as they are."""
    for wheel in build_all(make_archive()):
        print(
            f"{wheel.name}, {wheel.stat().st_size:,} bytes: compiles, and has the tag's libraries"
        )


if __name__ == "__main__":
    main()
