"""Stopping a process inside a ledger's critical section, where all other writers wait for it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

import exclusivelog as xl
from testing.processes import PATIENCE, State, Worker, within


def in_a_transaction(engine: xl.Engine) -> None:
    """No process may append, nor change the tables."""
    with engine.ledger.write_exclusive():
        signal.raise_signal(signal.SIGSTOP)


def in_a_commit(engine: xl.Engine) -> None:
    """No process may change the tables, such as a reader group's cursor."""
    with engine.ledger.write_concurrent():
        signal.raise_signal(signal.SIGSTOP)


def in_an_append(engine: xl.Engine) -> None:
    """No process may append."""
    journal = engine.ledger.journal
    journal.lock()
    signal.raise_signal(signal.SIGSTOP)
    journal.unlock()


PLACES = {place.__name__: place for place in (in_a_transaction, in_a_commit, in_an_append)}


def stop_yourself(state: State, place: str) -> None:
    """Another thread than the main one stops the process: the kernel knows it by its own id."""
    within(lambda: PLACES[place](state.engine), 2 * PATIENCE)


@contextlib.contextmanager
def stopped(
    process: Worker, place: str, begin: Callable[[State, str], None] = stop_yourself
) -> Iterator[None]:
    """The process is stopped there, and goes on afterwards unless it was killed."""
    process.start(begin, place)
    process.await_stop()
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.signal(signal.SIGCONT)
