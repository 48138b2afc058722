"""The admin API of a cluster: several brokers answer it, and some are down (J3)."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest

import exclusivelog as xl
from exclusivelog.cluster.pulsar import Access, Cluster, _ToOwner
from testing.processes import PATIENCE

pytestmark = [pytest.mark.once, pytest.mark.rule("J3")]

URL = "pulsar://127.0.0.1:1/public/default"


class Asked(NamedTuple):
    """A request that a broker has got."""

    method: str
    path: str
    token: str | None
    body: Any


class Broker:
    """A server that answers each request of the admin API with this status, and notes it."""

    def __init__(self, status: int = 200, location: str = "") -> None:
        self.asked: list[Asked] = []
        self.location = location
        broker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                token = self.headers.get("Authorization")
                broker.asked.append(Asked(self.command, self.path, token, body))
                self.send_response(status)
                if broker.location:
                    self.send_header("Location", broker.location + self.path)
                answer = b"true"
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def do_PUT(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Broker]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(PATIENCE)


def nobody() -> str:
    """A URL at which nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def cluster(*admins: str, token: str | None = None) -> Cluster:
    return Cluster(Access.parse(URL, admin=",".join(admins), token=token))


def test_one_that_is_down_is_passed_over() -> None:
    with Broker().running() as up:
        assert cluster(nobody(), up.url).admin("GET", "here") is True
        assert [each.path for each in up.asked] == ["/admin/v2/here"]


def test_one_that_cannot_reach_its_broker_is_passed_over_and_asked_last_from_then_on() -> None:
    with Broker(503).running() as proxy, Broker().running() as up:
        asking = cluster(proxy.url, up.url)
        assert asking.admin("GET", "here") is True
        assert asking.admin("GET", "there") is True
        assert [each.path for each in proxy.asked] == ["/admin/v2/here"]
        assert [each.path for each in up.asked] == ["/admin/v2/here", "/admin/v2/there"]
        with pytest.raises(xl.ClusterError, match="HTTP 503"):
            cluster(proxy.url).admin("GET", "here")


def test_an_answer_that_refuses_is_an_answer() -> None:
    with Broker(403).running() as refusing, Broker().running() as other:
        with pytest.raises(xl.ClusterError, match=f"{refusing.url}: the admin API refuses here"):
            cluster(refusing.url, other.url).admin("GET", "here")
        assert other.asked == []


def test_if_none_answers_the_error_names_them_all() -> None:
    one, two = nobody(), nobody()
    with pytest.raises(xl.ClusterError) as raised:
        cluster(one, two).admin("GET", "here")
    said = str(raised.value)
    assert said.startswith(f"{one},{two}: the admin API cannot be reached: {one}: Connection ref")
    assert f"; {two}: Connection refused; give its URL (admin=, --admin)" in said


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_broker_without_the_topic_names_the_one_that_has_it(method: str) -> None:
    """That is asked by the same method, with the body and the token."""
    with Broker().running() as owner, Broker(307, owner.url).running() as other:
        asking = cluster(other.url, token="e30.e30.e30")
        body = {"a": "b"} if method == "PUT" else None
        assert asking.admin(method, "here", body) is True
        assert owner.asked == other.asked
        assert owner.asked == [Asked(method, "/admin/v2/here", "Bearer e30.e30.e30", body)]


def test_brokers_that_send_it_to_and_fro_are_an_error() -> None:
    with Broker(307).running() as one, Broker(307, one.url).running() as two:
        one.location = two.url
        with pytest.raises(xl.ClusterError, match="HTTP 307"):
            cluster(one.url).admin("GET", "here")
        assert len(one.asked) > 1


def test_the_token_is_not_sent_on_in_the_clear() -> None:
    request = urllib.request.Request("https://one:8443/here")
    following = _ToOwner()
    there = "http://two:8080/here"
    found = following.redirect_request(request, io.BytesIO(), 307, "", HTTPMessage(), there)
    assert found is None


def test_each_host_of_the_url_has_one() -> None:
    found = Access.parse("pulsar+ssl://one:6651,two:6651/public/default")
    assert found.admin == "https://one:8443,https://two:8443"
    found = Access.parse(URL, admin="http://one:1/ , http://two:2")
    assert found.admin == "http://one:1,http://two:2"
    with pytest.raises(ValueError, match="several, separated by commas"):
        Access.parse(URL, admin="http://one:1,two:2")
