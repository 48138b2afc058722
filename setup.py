"""Builds the one extension module; everything else is in pyproject.toml.

`EXCLUSIVELOG_DEBUG=1` in the environment keeps what debuggers and profilers read: line numbers,
the names of all functions, and how frames are unwound. They take six times the space of the rest.
"""

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("EXCLUSIVELOG_DEBUG", "") not in ("", "0")
# Python's own flags ask for -g: the last one counts.
# A small extension, at the same speed: no -O3 below, and no room left to align functions and jumps.
SMALL = [
    "-g0", "-fvisibility=hidden", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables",
    "-fno-align-functions", "-fno-align-jumps", "-fno-align-labels",
]  # fmt: skip
COMPILE = ["-g"] if DEBUG else SMALL
LINK = [] if DEBUG else ["-Wl,-s"]

setup(
    ext_modules=cythonize(
        [
            Extension(
                "exclusivelog._core",
                ["exclusivelog/_core.pyx"],
                include_dirs=["exclusivelog"],  # of _native/*
                depends=["setup.py", *sorted(glob("exclusivelog/_native/*"))],
                extra_compile_args=["-O2", *COMPILE],
                extra_link_args=LINK,
            )
        ],
        build_dir="build",
    )
)
