"""The version, where the build can read it without building anything."""

__version__ = "0.1.0"
