"""Whose error is it? OSErrors that other code raises in the middle of a call of the system.

Between two instructions of this library, Python runs signal handlers of the application, and other
threads raise exceptions in this one. Such an OSError, a TimeoutError for example, says nothing of a
file, a process or a network: it must reach the caller as it is.
"""

from __future__ import annotations

import sys
from types import FrameType, TracebackType

CO_VARARGS = 0x04  # of a function's flags: it takes *args; `inspect` takes 5 ms to import


def is_foreign(error: BaseException) -> bool:
    """Did other code raise it than the call in a `try` block, such as a signal handler?

    A system call's error has an errno. A handler, which may give one to its own, has a frame in the
    traceback whose caller is one of its arguments.

    >>> import os
    >>> try:
    ...     os.stat("/nowhere")
    ... except OSError as error:
    ...     is_foreign(error), is_foreign(TimeoutError("raised by a handler"))
    (False, True)
    """
    if isinstance(error, OSError) and error.errno is None:
        return True
    return is_raised_by_a_handler(error)


def is_raised_by_a_handler(error: BaseException) -> bool:
    """Did a signal handler raise it? For calls whose own errors may have no errno, such as those of
    a network, or of an application's function."""
    trace = error.__traceback__
    while trace is not None:
        if _is_of_a_handler(trace.tb_frame):
            return True
        trace = trace.tb_next
    return False


def _is_of_a_handler(frame: FrameType) -> bool:
    caller, code = frame.f_back, frame.f_code
    if caller is None or frame.f_globals.get("__name__", "").startswith("exclusivelog."):
        return False  # not ours: `f_locals` would keep what its variables refer to
    given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        given += frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return any(argument is caller for argument in given)


def pass_on_foreign(error: BaseException) -> None:
    """Raise the error again if it is foreign."""
    if is_foreign(error):
        raise error


class Ignoring:
    """`with Ignoring(FileNotFoundError)` is `with contextlib.suppress(...)`, except for foreign
    errors. With a kind that is no OSError, such as Exception, these are what a handler raised."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds
        of_the_system = all(issubclass(kind, OSError) for kind in kinds)
        self._is_foreign = is_foreign if of_the_system else is_raised_by_a_handler

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return isinstance(error, self._kinds) and not self._is_foreign(error)


def pass_on_of_a_handler(error: BaseException) -> None:
    """Raise the error again if a signal handler has raised it."""
    if is_raised_by_a_handler(error):
        raise error


def remove_tree(path: str) -> None:
    """Remove a directory with what it contains, as far as possible. What a signal handler raises is
    passed on; other errors are ignored, also that it does not exist, or is a symbolic link."""
    import shutil  # here: no ledger needs it to be opened

    # `rmtree` itself raises OSErrors without an errno.
    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=lambda *told: pass_on_of_a_handler(told[2]))
    else:
        shutil.rmtree(path, onerror=lambda *told: pass_on_of_a_handler(told[2][1]))
