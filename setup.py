"""Builds the one extension module; everything else is in pyproject.toml."""

from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    ext_modules=cythonize(
        [Extension("exclusivelog._core", ["exclusivelog/_core.pyx"], extra_compile_args=["-O3"])],
        build_dir="build",
    )
)
