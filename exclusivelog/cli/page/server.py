"""The web server of the page: of this machine, read-only, for those who know its token.

- It listens on 127.0.0.1, or on a Unix socket with mode 0600.
- Each path begins with a random token; without it, everything is 403. So other users of the
  machine, and pages of other sites, reach nothing.
- A request with the name of another host is refused: a site whose name was bound to 127.0.0.1
  (DNS rebinding) sends its own name.
- The page loads nothing from elsewhere, has no inline script, and cannot be framed.
- Each connection has one request, a bounded time, and a thread. A connection that sends nothing, or
  half a request, makes room for the next one: it delays nobody.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
import socketserver
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import click

import exclusivelog as xl
from exclusivelog.cli.output import printable
from exclusivelog.cli.page.content import Content
from exclusivelog.cli.program import advised
from exclusivelog.foreign import Ignoring, pass_on_foreign

MOST_CONNECTIONS = 64
MOST_ANSWERS = 8  # that read the ledger at once; a browser sends 6 requests
REQUEST_SECONDS = 15.0  # from a connection until its answer is read
SILENT_SECONDS = 1.0  # after which one without a request makes room; a busy machine reads late
LOOK_SECONDS = 0.5  # between two looks for connections that last too long
JOIN_SECONDS = 1.0
LONGEST_SOCKET_PATH = 107  # bytes, of Linux
HOSTS = ("127.0.0.1", "localhost")
METHODS = ("GET", "HEAD")
MOST_FIELDS = 10  # of a query

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

# Where the page's parts are; the style is that of a report, and what this page adds.
PARTS = {
    "": ("text/html", (("exclusivelog.cli.page", "page.html"),)),
    "page.css": (
        "text/css",
        (("exclusivelog.audit", "page.css"), ("exclusivelog.cli.page", "page.css")),
    ),
    "page.js": ("text/javascript", (("exclusivelog.cli.page", "page.js"),)),
}


@dataclass
class Connection:
    """One that is open: since when, in seconds of the monotonic clock, whether its request has
    come, and its thread."""

    since: float
    has_asked: bool = False
    thread: threading.Thread | None = None


def _shut_down(request: socket.socket) -> None:
    with Ignoring(OSError):
        request.shutdown(socket.SHUT_RDWR)


class PageServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves the page on a port of 127.0.0.1; 0 is a free one."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 32
    checks_host = True

    def __init__(self, address: Any, content: Content) -> None:
        self.content = content
        self.token = secrets.token_urlsafe(24)
        self.answering = threading.BoundedSemaphore(MOST_ANSWERS)
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, Connection] = {}
        super().__init__(address, Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own. If there are enough of them, one that waits for a request
        ends first."""
        has_room = self._slots.acquire(blocking=False)
        while not has_room:
            self._end_a_silent_one()
            self.service_actions()
            has_room = self._slots.acquire(timeout=LOOK_SECONDS)
        with self._lock:
            self._connections[request] = Connection(time.monotonic())
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The body of that thread."""
        with self._lock:
            found = self._connections.get(request)
            if found is not None:  # else a signal has ended the server while this thread began
                found.thread = threading.current_thread()
        if found is None:
            return
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: Any) -> None:
        with self._lock:
            was_there = self._connections.pop(request, None) is not None
        if was_there:
            self._slots.release()

    def has_asked(self, request: Any) -> None:
        """The request of this connection has come: it is not closed to make room."""
        with self._lock:
            if request in self._connections:
                self._connections[request].has_asked = True

    def _end_a_silent_one(self) -> None:
        """Close the oldest of the connections whose request has not come for a while."""
        before = time.monotonic() - SILENT_SECONDS
        with self._lock:
            silent = (
                each
                for each, found in self._connections.items()
                if found.since <= before and not found.has_asked
            )
            oldest = next(silent, None)
        if oldest is not None:
            _shut_down(oldest)

    def service_actions(self) -> None:
        """Close connections that last too long, such as one that sends a byte each second."""
        before = time.monotonic() - REQUEST_SECONDS
        with self._lock:
            late = [each for each, found in self._connections.items() if found.since < before]
        for request in late:
            _shut_down(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a line, unless it is the browser that has gone."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(printable(f"exclusivelog: {type(error).__name__}: {error}"), file=sys.stderr)

    def end(self) -> None:
        """Close all connections, and wait shortly for their threads."""
        with self._lock:
            open_now = list(self._connections.items())
        for request, _ in open_now:
            _shut_down(request)
        for _, found in open_now:
            if found.thread is not None:
                found.thread.join(JOIN_SECONDS)


class SocketServer(PageServer):
    """Serves the page on a Unix socket that only this user can open."""

    address_family = socket.AF_UNIX
    allow_reuse_address = False
    checks_host = False  # no browser sends a request here on behalf of a site
    _file: os.stat_result | None = None  # once it is bound

    @property
    def url(self) -> str:
        """The address of the page, for a program that speaks HTTP over that socket."""
        return f"http://localhost/{self.token}/"

    def server_bind(self) -> None:
        """Bind the socket, with mode 0600 from the beginning."""
        self._path = str(self.server_address)
        if len(os.fsencode(self._path)) > LONGEST_SOCKET_PATH:
            raise OSError(errno.ENAMETOOLONG, f"it takes {LONGEST_SOCKET_PATH} bytes at most")
        os.fchmod(self.socket.fileno(), 0o600)  # which Linux gives to the file
        _remove_dead(self._path)
        super().server_bind()
        self._file = os.stat(self._path)

    def server_close(self) -> None:
        """Close the socket, and remove its file."""
        super().server_close()
        with Ignoring(OSError):
            if self._file and os.path.samestat(os.stat(self._path), self._file):
                os.unlink(self._path)


def _remove_dead(path: str) -> None:
    """Remove the socket of a server that was killed. What else is there is left to `bind`."""
    with Ignoring(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError as error:
                pass_on_foreign(error)
                os.unlink(path)


# ---- requests ----------------------------------------------------------------------------


class Refused(Exception):
    """A request is not answered, for this reason."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "exclusivelog", ""

    def parse_request(self) -> bool:
        """Read the request, and answer it: whatever its method is."""
        if not super().parse_request():
            return False
        self.server.has_asked(self.request)
        try:
            self._answer(self._checked_path())
        except Refused as refused:
            self._send(refused.status, "text/plain", f"{refused}\n".encode())
        return False  # nothing is left to do

    def _checked_path(self) -> str:
        """What follows the token in the path, with its query."""
        if self.command not in METHODS:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "this page can only be read")
        host = self.headers.get("Host", "").lower().split(":")[0]
        if self.server.checks_host and host not in HOSTS:
            raise Refused(HTTPStatus.FORBIDDEN, "this is the server of another host")
        _, token, rest = [*self.path.split("/", 2), "", ""][:3]
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            raise Refused(HTTPStatus.FORBIDDEN, "open the address that the command has printed")
        return rest

    def _answer(self, path: str) -> None:
        parts = urlsplit(f"/{path}")
        name = parts.path[1:]
        if name in PARTS:
            kind, places = PARTS[name]
            self._send(HTTPStatus.OK, kind, b"".join(map(_read, places)))
            return
        answer = self.server.content.answers.get(name.removeprefix("api/"))
        if answer is None or not name.startswith("api/"):
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")
        with self.server.answering, _explained():
            try:
                query = dict(
                    parse_qsl(parts.query, keep_blank_values=True, max_num_fields=MOST_FIELDS)
                )
                found = answer(query)
            except xl.TopicNotFoundError as error:
                raise Refused(HTTPStatus.NOT_FOUND, str(error)) from None
        self._send(HTTPStatus.OK, "application/json", json.dumps(found).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", ", ".join(METHODS))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing: the address has the token."""


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Let an error of the library, or about an argument, be the text of the answer."""
    try:
        yield
    except click.UsageError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, error.message) from None
    except xl.ExclusiveLogError as error:
        raise Refused(HTTPStatus.CONFLICT, advised(str(error))) from None
    except (ValueError, TypeError) as error:
        raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None


def _read(place: tuple[str, str]) -> bytes:
    package, name = place
    return files(package).joinpath(name).read_bytes()
