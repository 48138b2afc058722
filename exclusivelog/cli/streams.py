"""The standard streams of the command. They may be non-blocking, as a pipe that another program has
set so, and stdout may have an encoding that lacks characters: no line is lost for either."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any

from exclusivelog.foreign import is_raised_by_a_handler, pass_on_foreign

TYPE_CHECKING = False  # instead of typing's, to save its import

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_replaced: list[Any] = []  # kept, because their finalizers would close the descriptor
_closed: set[str] = set()  # the standard streams with which the command was not started


def set_up() -> None:
    """Open the standard streams that are closed (as by 2>&-) on nothing, let stdout wait where it
    is non-blocking and full, and escape what it cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # `print(file=None)` writes to stdout
            _closed.add(name)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    out: Any = sys.stdout
    try:
        descriptor = out.fileno()
    except (OSError, ValueError) as error:
        if is_raised_by_a_handler(error):  # `io` gives its own no errno
            raise
        return  # not a stream of the system
    out.flush()
    _replaced.append(out)
    lines = out.line_buffering or out.write_through  # the latter with PYTHONUNBUFFERED
    sys.stdout = io.TextIOWrapper(
        Waiting(io.FileIO(descriptor, "w", closefd=False)),
        out.encoding,
        "backslashreplace",
        line_buffering=lines,
    )


def data_out() -> Any:
    """Stdout, for a command whose result is data: OSError if it is closed, as nothing would get
    it."""
    if "stdout" in _closed:
        raise OSError(errno.EBADF, "it is closed")
    return sys.stdout.buffer


class Waiting(io.BufferedWriter):
    """Waits if its descriptor is non-blocking and full: Python's own stream would lose what it
    cannot write at once. What an interrupted call has written, no later one writes again."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of it; the number of bytes."""
        left = memoryview(data).cast("B")
        size = len(left)
        while True:
            try:
                super().write(left)
            except BlockingIOError as error:
                pass_on_foreign(error)
                left = left[error.characters_written :]
                _wait(self.fileno(), select.POLLOUT)
            else:
                return size

    def flush(self) -> None:
        """Write what is buffered."""
        while True:
            try:
                super().flush()
            except BlockingIOError as error:
                pass_on_foreign(error)
                _wait(self.fileno(), select.POLLOUT)
            else:
                return


def read_some(descriptor: int, most: int) -> bytes:
    """Read up to so many bytes; wait for the first; b"" at the end."""
    while True:
        try:
            return os.read(descriptor, most)
        except BlockingIOError as error:
            pass_on_foreign(error)
            _wait(descriptor, select.POLLIN)


def lines_of(descriptor: int, most: int) -> Iterator[list[bytes]]:
    """The lines that are available, `most` bytes at a time: one line from a keyboard, many at once
    from a file."""
    begun: list[bytes] = []  # parts of a line whose end has not come
    while data := read_some(descriptor, most):
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*begun, lines[0]])
            begun.clear()
            yield lines
        begun.append(rest)
    if last := b"".join(begun):
        yield [last]


def has_reader(descriptor: int) -> bool:
    """False once the program that reads a pipe or socket, or a terminal, has gone."""
    return not _poll(descriptor, 0, 0) & (select.POLLERR | select.POLLHUP)


def becomes_writable(stream: Any, ms: int) -> bool:
    """Whether a stream that is full can be written to before so many ms have passed."""
    return bool(_poll(stream.fileno(), select.POLLOUT, ms) & select.POLLOUT)


def _wait(descriptor: int, event: int) -> None:
    _poll(descriptor, event, None)


def _poll(descriptor: int, events: int, timeout: int | None) -> int:
    poll = select.poll()
    poll.register(descriptor, events)
    found = poll.poll(timeout)
    return found[0][1] if found else 0
