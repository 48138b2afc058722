"""Who an engine on a cluster is, and whether it may be used."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from exclusivelog import logs, threads
from exclusivelog.errors import EngineClosedError, LedgerError
from exclusivelog.types import EngineInfo

__all__ = ["Identity", "Ledger"]

log = logging.getLogger(__name__)


class Ledger:
    """Where an engine reads and writes: what its readers, producers and transactions compare."""

    def __init__(self, path: str) -> None:
        self.path = path


class Identity:
    """Base of `ClusterEngine`: its name and state, and its calls of application code."""

    def __init__(self, path: str, name: str, properties: Mapping[str, str], readonly: bool) -> None:
        self.name, self.path, self.readonly = name, path, readonly
        self.id = secrets.token_hex(8)
        self.info = EngineInfo(self.id, name, os.getpid(), dict(properties), 0.0)
        self.ledger = Ledger(path)
        self.closed = self.forked = False
        self._locks = threading.Lock  # as it was: the compiled core sees if it is patched later

    def check_not_forked(self) -> None:
        """EngineClosedError in a forked child (rule C5)."""
        if self.forked:
            raise EngineClosedError(
                f"engine {self.name!r} on {self.path} was inherited through fork(); open one of "
                "your own in the child"
            )

    def check_open(self) -> None:
        """EngineClosedError unless this engine can be used here."""
        self.check_not_forked()
        if self.closed:
            raise EngineClosedError(f"engine {self.name!r} on {self.path} is closed")

    def check_writable(self) -> None:
        """An error unless this engine can be used here, and to write."""
        self.check_open()
        if self.readonly:
            raise LedgerError(f"{self.path} is open with readonly=True; nothing can be changed")

    def check_free(self) -> None:
        """A call never waits for its own thread."""

    @property
    def busy_here(self) -> bool:
        """Does this thread hold an engine lock? None is held while anything is waited for."""
        return False

    @property
    def callbacks(self) -> Any:
        """Runs code of the application."""
        return self

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run application code in a thread of its own."""
        thread = threading.Thread(
            target=self._call, args=(function,), name="exclusivelog-callback", daemon=True
        )
        threads.start(self.path, thread)

    call_later = call_soon

    def _call(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            self.say(logs.CALLBACK_FAILED, error=error, reason=repr(error))

    def say(self, line: logs.Line, **fields: Any) -> None:
        """Log a line about this engine."""
        logs.emit(log, line, ledger=self.path, engine=self.name, engine_id=self.id, **fields)
