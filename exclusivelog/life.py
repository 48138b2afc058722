"""The life of an open engine, as far as all backends decide it alike: open, closed, inherited by a
forked child, left open at the end of the interpreter; its calls of application code."""

from __future__ import annotations

import abc
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from exclusivelog import _core, logs, threads
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerError,
    called_reentrantly,
)
from exclusivelog.members import living
from exclusivelog.types import EngineInfo

log = logging.getLogger(__name__)

LOGGED_WITHIN = 2.0  # seconds that a closing engine waits for slow log handlers

Engine = TypeVar("Engine", bound="OpenEngine")

# Of this process, until they are closed; by id. A WeakSet cannot be gone through while another
# thread adds one.
_engines: weakref.WeakValueDictionary[int, OpenEngine] = weakref.WeakValueDictionary()


def open_here(kind: type[Engine]) -> list[Engine]:
    """The open engines of this process that are of this kind."""
    return [each for each in living(_engines) if isinstance(each, kind) and not each.closed]


class OpenEngine(abc.ABC):
    """One open engine, from its opening to its end.

    Subclasses are the engines of backends. They call `register` once they have something to
    close; the methods below "what a backend does" have their part of the rest.
    """

    id: str
    info: EngineInfo
    callbacks: Callbacks

    def __init__(
        self, id: str, path: str, name: str, properties: Mapping[str, str], readonly: bool
    ) -> None:
        self.path, self.name, self.readonly = path, name, readonly
        self.identify(id, properties)
        self.closed = False  # does it refuse calls?
        self.ended = False  # has it released what it held?
        self._over = False  # is all done that belongs to its end?
        self._closing = threading.RLock()
        self._process = _core.this_process()
        self._locks = threading.Lock  # to detect a later monkey patch

    def identify(self, id: str, properties: Mapping[str, str]) -> None:
        """Give it its id."""
        self.id = id
        self.info = EngineInfo(id, self.name, os.getpid(), dict(properties), 0.0)

    def register(self) -> None:
        """Have it closed at the end of the interpreter, and dropped in forked children."""
        _engines[id(self)] = self

    # ---- state ---------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Is this a child of the process that opened it, however it was forked (rule C8)?"""
        return self._process != _core.this_process()

    def check_not_forked(self) -> None:
        """EngineClosedError in a forked child (rule C5)."""
        if self.forked:
            raise EngineClosedError(
                f"engine {self.name!r} on {self.path} was inherited through fork(); open one of "
                "your own in the child"
            )

    def check_open(self) -> None:
        """EngineClosedError unless this engine can be used here (rule C5)."""
        if self._process != _core.this_process():
            self.check_not_forked()
        if self.closed:
            raise self.closed_error()
        if threading.Lock is not self._locks:  # since it was opened
            threads.refuse_patched(self.path)

    def closed_error(self) -> EngineClosedError:
        """The error of a call after it was closed."""
        return EngineClosedError(
            f"engine {self.name!r} on {self.path} is closed; open the ledger again"
        )

    def check_writable(self) -> None:
        """Raise an error unless this engine can be used here, and is open to write."""
        self.check_open()
        if self.readonly:
            raise LedgerError(f"{self.path} is open with readonly=True; nothing can be changed")

    @property
    def busy_here(self) -> bool:
        """Does this thread hold an engine lock? A signal handler or a finalizer that runs in this
        thread then must not wait for that lock. Not where no call waits while it holds one."""
        return False

    def check_free(self) -> None:
        """LedgerError if this thread holds a lock of the engine, for which it would wait."""
        if self.busy_here:
            raise called_reentrantly(self.path)

    def engine_here(self, engine: str) -> Self | None:
        """The engine of that id, of this kind, if this process has it open."""
        return next((each for each in open_here(type(self)) if each.id == engine), None)

    def emit(self, line: logs.Line, **fields: Any) -> None:
        """Log a line about this engine."""
        logs.emit(log, line, ledger=self.path, engine=self.name, engine_id=self.id, **fields)

    # ---- application code ----------------------------------------------------------------

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run application code in a thread of its own."""
        self.callbacks.call_soon(function)

    def call_later(self, function: Callable[[], object]) -> None:
        """The same; LedgerError if no thread can be started now."""
        self.callbacks.call_later(function)

    def call_after(self, seconds: float, function: Callable[[], object]) -> None:
        """The same after so many seconds; never if the engine is closed or read-only by then."""
        self.callbacks.alarms.set(seconds, function)
        self._alarm_was_set()

    # ---- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Commit pending sends, release topics and claims, and end the threads. A second call has
        no effect, or completes a first one that was interrupted.

        If a signal handler or a finalizer calls this during a transaction of the same thread,
        another thread closes the engine as soon as that transaction is over."""
        if self.forked or self._over:
            return
        if self.busy_here:
            closing = threading.Thread(target=self.close, name="exclusivelog-close")
            threads.start(self.path, closing)
            return
        with self._closing:
            if self._over:
                return
            try:
                self._refuse_calls()
                self._finish_work()
            except ExclusiveLogError as error:
                self.emit(logs.CLOSING_FAILED, reason=str(error))
            finally:
                self.closed = self.ended = True
                self._end()
                logs.drain(LOGGED_WITHIN)
                self._end_once()

    def _end_once(self) -> None:
        if not self._over:  # a signal handler may have closed it meanwhile
            self._over = True
            self._let_go()
            self.emit(logs.CLOSED)
            _engines.pop(id(self), None)

    def forget(self) -> None:
        """Drop everything in a forked child, because it is the parent's (rule C5)."""
        self.closed = self.ended = self._over = True
        self._forget()

    # ---- what a backend does -------------------------------------------------------------

    def _refuse_calls(self) -> None:
        """Set `closed`, so that no call begins any more."""
        self.closed = True

    @abc.abstractmethod
    def _alarm_was_set(self) -> None:
        """Wake or start the thread that watches `callbacks.alarms`."""

    @abc.abstractmethod
    def _finish_work(self) -> None:
        """Send what was accepted, and release what the engine holds. An ExclusiveLogError is
        logged."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Fail what is left, and end the threads. After an interrupt it is called again, so that
        each step must allow to be repeated."""

    @abc.abstractmethod
    def _let_go(self) -> None:
        """Close what the engine stands on; called once."""

    @abc.abstractmethod
    def _forget(self) -> None:
        """Drop the parent's locks, files and threads in a forked child, without a change to
        them."""


class Callbacks(abc.ABC):
    """Runs code of the application in threads that it may block. It does not refer to its
    engine."""

    def __init__(self, path: str, engine: str) -> None:
        self._path, self._engine = path, engine
        self.alarms = threads.Alarms()  # a thread of the engine calls `ring`

    def ring(self) -> None:
        """Run the functions whose time has come, each in a thread of its own."""
        for function in self.alarms.take_due():
            self.call_soon(function)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run a function in a thread of its own; later, if no thread can be started now."""
        try:
            self.call_later(function)
        except (LedgerError, MemoryError):
            self.retry(function)

    def call_later(self, function: Callable[[], object]) -> None:
        """The same; LedgerError if no thread can be started now."""

        def run() -> None:
            try:
                function()
            except Exception as error:
                logs.emit(
                    log,
                    logs.CALLBACK_FAILED,
                    error=error,
                    ledger=self._path,
                    engine=self._engine,
                    reason=repr(error),
                )

        thread = threading.Thread(target=run, name="exclusivelog-callback", daemon=True)
        threads.start(self._path, thread)

    @abc.abstractmethod
    def retry(self, function: Callable[[], object]) -> None:
        """Have a thread of the engine call `call_later(function)` until that succeeds."""


def thread_of(
    path: str, run: Callable[[], bool | None], name: str, engine: str
) -> threading.Thread:
    """A thread for an engine, to be started. It calls `run`, again after an error, which is
    logged."""

    def failed(error: BaseException) -> None:
        logs.emit(
            log,
            logs.THREAD_FAILED,
            error=error,
            ledger=path,
            engine=engine,
            thread_of=name,
            reason=repr(error),
        )

    def keep() -> None:
        logs.emit_later()
        _core.keep_running(run, failed)

    return threading.Thread(target=keep, name=name, daemon=True)


def _close_all() -> None:
    for engine in living(_engines):
        engine.close()


def _forget_all() -> None:
    for engine in living(_engines):
        engine.forget()
    _engines.clear()


atexit.register(_close_all)
_core.in_forked_child(_forget_all)
