"""Builds the one extension module; everything else is in pyproject.toml.

`EXCLUSIVELOG_DEBUG=1` in the environment keeps what debuggers and profilers read: line numbers,
the names of all functions, and how frames are unwound. They take six times the space of the rest.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from glob import glob
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")
COMPILING = {"bdist_wheel", "build", "build_ext", "editable_wheel"}


def description():
    """README.md for the page of a package index, where no other file is: links and pictures lead to
    the repository, at the tag of this version. As long as that has no address, there are none."""
    tree = Path(__file__).parent
    urls = tomllib.loads((tree / "pyproject.toml").read_text())["project"].get("urls", {})
    [version] = re.findall('__version__ = "(.+)"', (tree / "exclusivelog/version.py").read_text())

    def absolute(found):
        mark, text, target = found.groups()
        if "Repository" not in urls:
            return "" if mark else text
        kind = "raw" if mark else "blob"
        return f"{mark}[{text}]({urls['Repository']}/{kind}/v{version}/{target})"

    return RELATIVE.sub(absolute, (tree / "README.md").read_text())


def is_gcc(command):
    """Is it GCC, under any name? Other compilers refuse some of its options."""
    told = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return "Free Software Foundation" in told.stdout


if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "exclusivelog does not support free-threaded Python: its compiled core relies on the GIL. "
        "Use the default build of Python 3.11 to 3.14"
    )
if sys.platform != "linux":
    sys.exit("exclusivelog runs on Linux alone: it needs robust futexes (see README.md)")
is_compiled = bool(COMPILING & set(sys.argv))
if is_compiled:
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    compiler = command[0]
    if shutil.which(compiler) is None:
        sys.exit(
            f"exclusivelog is compiled from source here, and there is no C compiler {compiler!r}. "
            "On Debian and Ubuntu: apt-get install gcc"
        )
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        sys.exit(
            f"exclusivelog is compiled from source here, and Python has no {header}. "
            "On Debian and Ubuntu: apt-get install python3-dev"
        )

DEBUG = os.environ.get("EXCLUSIVELOG_DEBUG", "") not in ("", "0")
# Python's own flags ask for -g: the last one counts.
# A small extension, at the same speed: no -O3 below, no room left to align functions, jumps and
# loops, no code that -O2 would write twice to save a jump, an expression, a call or the sum of an
# address, and no padding between segments.
SMALL = [
    "-g0", "-fvisibility=hidden", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables",
]  # fmt: skip
SMALL_BY_GCC = [
    "-fno-align-functions", "-fno-align-jumps", "-fno-align-labels",
    "-freorder-blocks-algorithm=simple", "-fno-partial-inlining", "-fno-tree-pre",
    "-fno-inline-functions", "-fno-align-loops", "-fno-thread-jumps", "-fno-ivopts",
]  # fmt: skip
COMPILE = ["-g"] if DEBUG else SMALL
LINK = [] if DEBUG else ["-Wl,-s"]
if is_compiled and is_gcc(command):
    # Python's flags ask for all warnings; this one takes GCC 7 s in so large a file, of 12.
    COMPILE = [*COMPILE, "-Wno-misleading-indentation"]
    if not DEBUG:
        COMPILE = [*COMPILE, *SMALL_BY_GCC]
        LINK = [*LINK, "-Wl,-z,noseparate-code"]
# The core is one file of C, which GCC compiles on one processor. With -flto it leaves most of the
# work to the link, and spreads that over all processors with the help of `make`.
if not DEBUG and is_compiled and "gcc" in os.path.basename(compiler) and shutil.which("make"):
    COMPILE = [*COMPILE, "-flto=auto"]
    LINK = ["-O2", *COMPILE, *LINK]

CORE = Extension(
    "exclusivelog._core",
    ["exclusivelog/_core.pyx"],
    include_dirs=["exclusivelog"],  # of _native/*
    depends=["setup.py", *sorted(glob("exclusivelog/_native/*"))],
    libraries=["dl"],  # of its own before glibc 2.34
    extra_compile_args=["-O2", *COMPILE],
    # Objects that the core itself makes are made without a call that packs no arguments.
    define_macros=[("CYTHON_VECTORCALL_TPNEW", "0")],
    extra_link_args=LINK,
)

# A source archive, or metadata, needs no C: that takes ten seconds.
setup(
    ext_modules=cythonize([CORE], build_dir="build") if is_compiled else [CORE],
    long_description=description(),
    long_description_content_type="text/markdown",
)
