"""A TCP proxy in front of a broker, which disturbs connections on command.

    broker on 127.0.0.2:PORT  <──  Proxy on 127.0.0.1:PORT  <──  clients

A broker that binds 127.0.0.2 and advertises 127.0.0.1 (`behind`) sends all of its clients through
the proxy, also after a look-up.

>>> server = socket.create_server(("127.0.0.1", 0))
>>> with server, Proxy(("127.0.0.1", 0), server.getsockname()) as proxy:
...     with socket.create_connection(proxy.address) as client, server.accept()[0] as there:
...         client.sendall(b"through")
...         there.recv(10), proxy.half_close(), proxy.cut()
(b'through', True, True)
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from testing.broker import Broker

Address = tuple[str, int]

CHUNK = 1 << 16
CONNECT_SECONDS = 5.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing discards what is in the buffers
BEHIND = "127.0.0.2"


class Connection:
    """One client's connection, and the proxy's own to the broker."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._sockets = client, server
        self._pumps = [
            threading.Thread(target=self._pump, args=(proxy, *ends), daemon=True)
            for ends in ((client, server), (server, client))
        ]
        self.open = True

    def start(self) -> None:
        """Forward in both directions."""
        for pump in self._pumps:
            pump.start()

    def _pump(self, proxy: Proxy, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(CHUNK):
                proxy.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            self.cut()
        if sum(pump.is_alive() for pump in self._pumps) == 1:  # this one is the last
            self.cut()

    def cut(self) -> None:
        """End both connections at once; what is under way is lost."""
        self.open = False
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the pump
            one.close()

    def half_close(self, toward_server: bool) -> None:
        """End one direction; the other one stays open."""
        with contextlib.suppress(OSError):
            self._sockets[toward_server].shutdown(socket.SHUT_WR)


class Proxy:
    """Listens on `address`, and forwards each connection to `target`. All calls may come from any
    thread; those that disturb a connection return whether there was one."""

    def __init__(self, address: Address, target: Address, dice: random.Random | None = None):
        self._target, self._dice = target, dice or random.Random()
        self._connections: list[Connection] = []
        self._lock = threading.Lock()
        self._slow = 0.0, 0.0  # until when, and how long each piece of data waits
        self._closed = False
        self._listener = socket.create_server(address)
        self.address: Address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, CONNECT_SECONDS)
        except OSError:  # the broker is down
            client.close()
            return
        for one in (client, server):
            one.settimeout(None)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made = Connection(self, client, server)
        with self._lock:
            self._connections = [each for each in self._connections if each.open] + [made]
        made.start()

    def wait(self) -> None:
        """Before data goes on: as long as it is held up."""
        until, pause = self._slow
        if time.monotonic() < until:
            time.sleep(pause)

    # ---- what it does to connections -----------------------------------------------------

    def cut(self) -> bool:
        """Reset one connection, at random."""
        chosen = self._choose()
        if chosen is not None:
            chosen.cut()
        return chosen is not None

    def cut_all(self) -> bool:
        """Reset all connections."""
        with self._lock:
            found, self._connections = self._connections, []
        for each in found:
            each.cut()
        return bool(found)

    def half_close(self) -> bool:
        """End one direction of one connection, at random."""
        chosen = self._choose()
        if chosen is not None:
            chosen.half_close(self._dice.random() < 0.5)
        return chosen is not None

    def delay(self, pause: float, seconds: float) -> bool:
        """For so many seconds, let each piece of data wait for `pause` seconds."""
        self._slow = time.monotonic() + seconds, pause
        return True

    def _choose(self) -> Connection | None:
        with self._lock:
            living = [each for each in self._connections if each.open]
        return self._dice.choice(living) if living else None

    def close(self) -> None:
        """End everything."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(CONNECT_SECONDS)
        self.cut_all()


# ---- a broker behind it ------------------------------------------------------------------


@contextlib.contextmanager
def behind(broker: Broker) -> Iterator[Proxy]:
    """A proxy in front of a broker that was made with `HIDDEN` and is not started yet; its admin
    API is forwarded undisturbed."""
    (_, port), (_, web) = (_place(url) for url in (broker.url, broker.admin))
    with (
        Proxy(("127.0.0.1", port), (BEHIND, port)) as proxy,
        Proxy(("127.0.0.1", web), (BEHIND, web)),
    ):
        yield proxy


HIDDEN = {"bindAddress": BEHIND}


def _place(url: str) -> Address:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port
