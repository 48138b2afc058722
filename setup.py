"""Builds the one extension module; everything else is in pyproject.toml."""

from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    ext_modules=cythonize(
        [
            Extension(
                "exclusivelog._core",
                ["exclusivelog/_core.pyx"],
                include_dirs=["exclusivelog"],  # of _native/*
                depends=sorted(glob("exclusivelog/_native/*")),
                extra_compile_args=["-O3"],
            )
        ],
        build_dir="build",
    )
)
