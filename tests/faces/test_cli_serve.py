"""`exclusivelog serve`: a page to look into a ledger, by real HTTP.

Who does not have the token sees nothing; nobody can change anything. Names and values come from any
program that writes to the ledger: the page shows them as they are, cut, and as text.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

import exclusivelog as xl
from exclusivelog.cli.page import content as contents
from exclusivelog.cli.page import server as servers
from exclusivelog.cli.page.content import Content
from exclusivelog.cli.page.server import PageServer
from testing.browser import browser, complaints, problems, resize
from testing.processes import PATIENCE, until
from tests.faces.test_cli import PROGRAM, refusal, run

pytestmark = pytest.mark.once

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&\"'"


class Client:
    """Sends requests to a server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.port, self.root = parts.port, parts.path

    def request(self, path: str, method: str = "GET", host: str | None = None) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            headers = {} if host is None else {"Host": host}
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            answer.body = answer.read()  # type: ignore[attr-defined]
            return answer

    def text(self, path: str, status: int = 200, **how: str) -> str:
        answer = self.request(path, **how)
        assert answer.status == status
        return str(answer.body.decode())  # type: ignore[attr-defined]

    def ask(self, what: str, **query: str) -> Any:
        return json.loads(self.text(f"{self.root}api/{what}?{urlencode(query)}"))

    def error(self, what: str, status: int, **query: str) -> str:
        return self.text(f"{self.root}api/{what}?{urlencode(query)}", status).rstrip("\n")


@contextlib.contextmanager
def serving(path: str) -> Iterator[PageServer]:
    with xl.open(path, readonly=True) as engine:
        with PageServer(("127.0.0.1", 0), Content(engine)) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield server
            finally:
                server.shutdown()
                thread.join(PATIENCE)
                server.end()


@pytest.fixture
def client(engine: xl.Engine, path: str) -> Iterator[Client]:
    """Of a server of the ledger that `engine` writes to."""
    with serving(path) as server:
        yield Client(server.url)


# ---- who may read ------------------------------------------------------------------------


def test_without_the_token_everything_is_refused(client: Client) -> None:
    token = client.root.strip("/")
    wrong = token[:-1] + ("a" if token[-1] != "a" else "b")
    others = ("favicon.ico", "page.js", "api/ledger", f"{wrong}/", f"{wrong}/page.js")
    for path in ("/", *(f"/{each}" for each in (*others, f"{token}x/", f"x/{token}/", "%e9/"))):
        answer = client.request(path)
        assert answer.status == 403, path
        assert b"exclusivelog" not in answer.body  # type: ignore[attr-defined]
    assert "<title>" in client.text(client.root)


def test_each_server_has_another_token(path: str) -> None:
    xl.open(path).close()
    with serving(path) as one, serving(path) as two:
        assert one.token != two.token
        assert len(one.token) >= 32


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_site_whose_name_was_bound_to_this_machine_is_refused(client: Client, host: str) -> None:
    assert client.text(client.root, 403, host=host) == "this is the server of another host\n"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1"])
def test_a_port_that_is_forwarded_has_another_number(client: Client, host: str) -> None:
    assert "<title>" in client.text(client.root, host=host)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get"])
def test_nothing_but_reading_is_taken(client: Client, method: str) -> None:
    answer = client.request(client.root, method)
    assert (answer.status, answer.getheader("Allow")) == (405, "GET, HEAD")


def test_head_is_get_without_a_body(client: Client) -> None:
    whole, head = client.request(client.root), client.request(client.root, "HEAD")
    assert head.body == b""  # type: ignore[attr-defined]
    assert head.getheader("Content-Length") == whole.getheader("Content-Length") != "0"


def test_the_page_runs_and_loads_only_its_own_files(client: Client) -> None:
    for part in ("", "page.js", "page.css", "api/ledger", "nothing"):
        answer = client.request(client.root + part)
        policy = str(answer.getheader("Content-Security-Policy"))
        assert "default-src 'none'; script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.getheader("Referrer-Policy") == "no-referrer"
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert answer.getheader("Cache-Control") == "no-store"
    page = client.text(client.root)
    assert "http" not in page.replace("http-equiv", "")
    assert "innerHTML" not in client.text(f"{client.root}page.js")
    assert client.text(f"{client.root}../../etc/passwd", 404)
    assert client.text(f"{client.root}page.html", 404)


def test_the_server_only_reads(engine: xl.Engine, client: Client) -> None:
    engine.topic("orders")
    before = engine.stats()["transactions"]
    client.ask("ledger")
    client.ask("messages", topic="orders")
    assert client.error("topic", 404, topic="none").endswith("has no topic 'none'")
    assert engine.topics() == ["orders"]
    assert engine.stats()["transactions"] == before


def connect(server: PageServer, stack: contextlib.ExitStack, *parts: bytes) -> socket.socket:
    """A connection that has sent these."""
    address = ("127.0.0.1", server.server_address[1])
    connection = stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
    for part in parts:
        connection.sendall(part)
    return connection


@pytest.mark.parametrize("sent", [(), (b"GET / HTTP/1.1\r\nHost: loc",)])
def test_connections_without_a_request_delay_none(
    path: str, monkeypatch: pytest.MonkeyPatch, sent: tuple[bytes, ...]
) -> None:
    """Of a browser that connects in advance, or of a port scanner."""
    monkeypatch.setattr(servers, "REQUEST_SECONDS", 10 * PATIENCE)
    monkeypatch.setattr(servers, "SILENT_SECONDS", 0.0)
    xl.open(path).close()
    with serving(path) as server, contextlib.ExitStack() as stack:
        for _ in range(servers.MOST_CONNECTIONS + 4):
            connect(server, stack, *sent)
        until(lambda: len(server._connections) == servers.MOST_CONNECTIONS)
        for _ in range(3):
            assert "<title>" in Client(server.url).text(urlsplit(server.url).path)
        assert len(server._connections) <= servers.MOST_CONNECTIONS


def test_connections_and_answers_are_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose request has come is not closed for another: that one waits."""
    monkeypatch.setattr(servers, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(servers, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(servers, "MOST_ANSWERS", 2)
    xl.open(path).close()
    running, may_end = threading.Semaphore(0), threading.Event()

    def answer(_: object) -> str:
        running.release()
        assert may_end.wait(PATIENCE)
        return "read"

    with serving(path) as server, contextlib.ExitStack() as stack:
        server.content.answers["ledger"] = answer
        request = f"GET {urlsplit(server.url).path}api/ledger HTTP/1.1\r\nHost: localhost\r\n\r\n"
        asking = [connect(server, stack, request.encode()) for _ in range(3)]
        until(lambda: sum(found.has_asked for found in server._connections.values()) == 3)
        asking.append(connect(server, stack, request.encode()))  # which waits for room
        assert running.acquire(timeout=PATIENCE)
        assert running.acquire(timeout=PATIENCE)
        assert not running.acquire(blocking=False)
        may_end.set()
        for connection in asking:
            assert b"".join(iter(lambda: connection.recv(1 << 16), b"")).endswith(b'"read"')  # noqa: B023
        assert len(server._connections) <= 3


def test_a_request_that_does_not_end_is_ended(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "REQUEST_SECONDS", 0.0)
    xl.open(path).close()
    with serving(path) as server:
        port = server.server_address[1]
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as slow:
            slow.sendall(b"GET / HTTP/1.0\r\n")
            assert slow.recv(100) == b""


# ---- what it shows -----------------------------------------------------------------------


def test_topics_owners_waiters_lags_and_hand_overs(engine: xl.Engine, client: Client) -> None:
    topic = engine.topic("orders")
    engine.topic("other")
    with topic.producer("exclusive", name="boss", priority=3) as producer:
        producer.send_many([b"1", b"2", b"3"])
        with topic.reader(group="billing") as reader:
            reader.read_next(timeout=PATIENCE)
            reader.commit()
        waiting = topic.producer_async("wait_for_exclusive", name="next")
        until(lambda: topic.waiters)
        found = client.ask("ledger")
        (orders,) = client.ask("ledger", filter="ord")["topics"]
        owners = client.ask("topic", topic="orders")["owners"]
        waiting.cancel()
    assert [row["name"] for row in found["topics"]] == ["orders", "other"]
    assert orders == {
        "name": "orders",
        "kind": "messages",
        "first": 0,
        "next": 3,
        "epoch": 1,
        "owner": f"boss (pid {os.getpid()})",
        "waiters": 1,
        "moving": 0,
        "lag": 2,
    }
    got = [(row["state"], row["producer"], row["priority"]) for row in owners]
    assert got == [("holds", "boss", 3), ("waits", "next", 0)]
    assert [(row["name"], row["pid"]) for row in found["engines"]] == [("test", os.getpid())]
    assert [(row["group"], row["position"], row["lag"]) for row in found["groups"]] == [
        ("billing", 1, 2)
    ]
    assert (found["events"][-1]["what"], found["events"][-1]["kind"]) == ("orders", "grant")
    assert (found["waiters"], found["findings"]) == (1, [])


def test_who_holds_a_lock_and_who_waits(engine: xl.Engine, path: str, client: Client) -> None:
    with engine.lock("free"):
        pass
    with engine.lock("job"), xl.open(path, name="next") as other:
        waiting = other.role_async("job")
        until(lambda: client.ask("ledger")["waiters"] == 1)
        found = client.ask("ledger")
        waiting.cancel()
    assert found["topics"] == []
    assert found["roles"] == [
        {
            "role": "job",
            "epoch": 1,
            "holder": f"test (pid {os.getpid()})",
            "waiters": 1,
            "queue": [f"next (pid {os.getpid()})"],
        }
    ]
    assert {row["what"] for row in found["events"]} == {"lock or role free", "lock or role job"}
    assert client.ask("ledger")["roles"] == []


def offsets(found: Any) -> list[int]:
    return [row["offset"] for row in found["messages"]]


def test_it_says_how_many_of_a_long_list_it_leaves_out(
    engine: xl.Engine, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MOST_ROWS", 2)
    topic = engine.topic("orders")
    for number in range(3):
        with topic.reader(group=f"g{number}") as reader:
            reader.commit()
    with topic.producer("exclusive"), engine.lock("a"), engine.lock("b"), engine.lock("c"):
        waiting = [topic.producer_async("wait_for_exclusive") for _ in range(4)]
        until(lambda: len(topic.waiters) == 4)
        found, there = client.ask("ledger"), client.ask("topic", topic="orders")
        for each in waiting:
            each.cancel()
    assert found["more"] == {"roles": 1, "engines": 0, "groups": 1}
    assert [len(found[name]) for name in ("roles", "engines", "groups")] == [2, 1, 2]
    assert (len(there["owners"]), there["more"]) == (2, 3)


def test_messages_are_found_by_offset_time_and_key(
    topic: xl.Topic, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MOST_MESSAGES", 5)
    with topic.producer() as producer:
        producer.send_many([b"%d" % n for n in range(20)], keys=["even", "odd"] * 10)
    assert offsets(client.ask("messages", topic="orders")) == [15, 16, 17, 18, 19]
    found = client.ask("messages", topic="orders", **{"from": "3"})
    assert (offsets(found), found["next"], found["end"]) == ([3, 4, 5, 6, 7], 8, 20)
    assert found["more"] is True
    assert offsets(client.ask("messages", topic="orders", **{"from": "-2"})) == [18, 19]
    later = (dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)).isoformat()
    for start, count in (("1h", 5), (later, 0), ("latest", 0), ("earliest", 5)):
        assert len(offsets(client.ask("messages", topic="orders", **{"from": start}))) == count
    found = client.ask("messages", topic="orders", key="odd", **{"from": "0"})
    assert (offsets(found), found["next"]) == ([1, 3, 5, 7, 9], 10)
    found = client.ask("messages", topic="orders", key="none", **{"from": "0"})
    assert (found["messages"], found["next"], found["more"]) == ([], 20, False)
    topic.trim(before=4)
    assert offsets(client.ask("messages", topic="orders", **{"from": "0"})) == [4, 5, 6, 7, 8]
    assert "from 1w: it takes" in client.error("messages", 400, topic="orders", **{"from": "1w"})


def test_a_search_for_a_key_goes_on_where_it_ended(
    topic: xl.Topic, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MOST_SCANNED", 7)
    with topic.producer() as producer:
        producer.send_many([b""] * 20, keys=[*["a"] * 19, "z"])
    place, answers = "0", []
    while not answers or answers[-1]["more"]:
        answers.append(client.ask("messages", topic="orders", key="z", **{"from": place}))
        place = str(answers[-1]["next"])
    assert [answer["next"] for answer in answers] == [7, 14, 20]
    assert [offsets(answer) for answer in answers] == [[], [], [19]]


def test_values_are_cut_and_printable(topic: xl.Topic, client: Client) -> None:
    with topic.producer(name=f"p{HOSTILE}") as producer:
        producer.send(b"x" * 10_000_000, key=b"\x1b[31m\xff\n", properties={HOSTILE: "\u202e"})
        producer.send(None)
        producer.send(b"")
        producer.send("é".encode() * 3000)
    first, none, empty, cut = client.ask("messages", topic="orders")["messages"]
    assert first["value"] == {"text": "x" * contents.CHARACTERS, "bytes": 10_000_000, "cut": True}
    assert first["key"] == {"text": "\\x1b[31m\\xff\\n", "bytes": 7, "cut": False}
    assert first["producer"] == f"p{HOSTILE}"
    assert first["properties"] == f"{HOSTILE}=\\u202e"
    assert (none["value"], none["key"]) == (None, None)
    assert empty["value"] == {"text": "", "bytes": 0, "cut": False}
    assert cut["value"] == {"text": "é" * contents.CHARACTERS, "bytes": 6000, "cut": True}


def test_a_map_is_shown_as_it_is_and_as_it_was(engine: xl.Engine, client: Client) -> None:
    topic = engine.topic("settings")
    with xl.SharedMap(topic, value=xl.serde.json) as settings:
        settings.put("a", {"n": 1})
        settings.put("b", "x")
        settings.put("a", "new")
        settings.delete("b")

    def at(when: str, **more: str) -> dict[str, str]:
        found = client.ask("map", topic="settings", at=when, **more)
        assert found["found"] == len(found["entries"])
        return {row["key"]["text"]: row["value"]["text"] for row in found["entries"]}

    assert at("") == at("latest") == {"a": "new"}
    assert at("2") == {"a": "{'n': 1}", "b": "x"}
    assert at("2", prefix="b") == {"b": "x"}
    assert at("earliest") == at("1h") == {}
    assert "at 1w: it takes" in client.error("map", 400, topic="settings", at="1w")
    engine.topic("orders")
    assert client.error("map", 400, topic="orders") == "topic 'orders' holds messages, no map"


def test_a_map_shows_when_its_keys_expire(engine: xl.Engine, client: Client) -> None:
    with xl.SharedMap(engine.topic("settings")) as settings:
        settings.put("always", "x")
        settings.put("soon", "x", ttl=1000)
        until_when = settings.expires_at("soon")
    assert until_when is not None
    expires = {
        row["key"]["text"]: row["expires"] for row in client.ask("map", topic="settings")["entries"]
    }
    assert expires == {"always": None, "soon": round(until_when.timestamp() * 1000)}


def test_wrong_requests_are_told(topic: xl.Topic, client: Client) -> None:
    many = urlencode([("a", "b")] * 20)
    assert client.text(f"{client.root}api/ledger?{many}", 400)
    assert client.text(f"{client.root}api/", 404)
    assert client.text(f"{client.root}ledger", 404)
    assert "topic=''" in client.error("topic", 400)


# ---- the command -------------------------------------------------------------------------


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the line that it prints."""
    with subprocess.Popen(
        [*PROGRAM, "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().rstrip("\n")
        finally:
            process.kill()


def test_a_signal_may_come_while_the_thread_of_a_connection_begins(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    start, begun = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        begun.append(thread)
        raise KeyboardInterrupt

    with PageServer(("127.0.0.1", 0), Content(engine)) as server:
        with socket.create_connection(server.server_address):
            request, address = server.get_request()
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    server.process_request(request, address)
            [thread] = begun
            start(thread)
            thread.join(PATIENCE)
            request.close()
        assert failed == []
        assert all(server._slots.acquire(blocking=False) for _ in range(servers.MOST_CONNECTIONS))
        assert not server._slots.acquire(blocking=False)


@pytest.mark.long
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_whatever_is_open(
    engine: xl.Engine, path: str, number: int, status: int
) -> None:
    with started(path) as (process, url):
        client = Client(url)
        assert "<title>" in client.text(client.root)
        with socket.create_connection(("127.0.0.1", client.port)) as slow:
            slow.sendall(b"GET ")
            process.send_signal(number)
            assert process.communicate(timeout=PATIENCE) == ("", "")
    assert process.returncode == status


@pytest.mark.long
def test_a_socket_is_for_this_user_alone_and_removed(path: str, tmp_path: Path) -> None:
    xl.open(path).close()
    file = str(tmp_path / "page.sock")
    before = os.umask(0)
    try:
        with started(path, "--socket", file) as (process, line):
            assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
            named, _, url = line.partition(" ")
            assert named == file
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(PATIENCE)
                connection.connect(file)
                connection.sendall(f"GET {urlsplit(url).path}api/ledger HTTP/1.0\r\n\r\n".encode())
                answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            assert b'"topic_count": 0' in answer
            assert f"{file} cannot be used" in refusal("serve", path, "--socket", file)
            process.terminate()
            process.communicate(timeout=PATIENCE)
            assert not os.path.exists(file)
        with started(path, "--socket", file) as (process, line):  # one that is killed leaves it
            process.kill()
            process.communicate(timeout=PATIENCE)
        assert os.path.exists(file)
        with started(path, "--socket", file) as (_, line):
            assert line.startswith(file)
    finally:
        os.umask(before)
    (tmp_path / "file").write_text("mine")
    assert "cannot be used" in refusal("serve", path, "--socket", str(tmp_path / "file"))
    long = str(tmp_path / ("x" * 108))
    assert f"{long} cannot be used: it takes 107 bytes" in refusal("serve", path, "--socket", long)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.long
def test_what_it_cannot_serve_is_refused(engine: xl.Engine, path: str, tmp_path: Path) -> None:
    assert "is for a local ledger" in refusal("serve", "pulsar://127.0.0.1:1/a/b")
    assert "does not exist" in refusal("serve", str(tmp_path / "nowhere"))
    with serving(path) as server:
        port = str(server.server_address[1])
        assert f"port {port} cannot be used" in refusal("serve", path, "--port", port)
    assert run("serve", path, "--port", "1", "--socket", "x").returncode == 2


# ---- in a browser ------------------------------------------------------------------------


@pytest.fixture
def silent_connections(client: Client) -> Iterator[None]:
    """More than the server takes, of a program that sends nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(servers.MOST_CONNECTIONS + 4):
            stack.enter_context(socket.create_connection(("127.0.0.1", client.port)))
        yield


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_a_browser(
    engine: xl.Engine, client: Client, dark: bool, silent_connections: None
) -> None:
    topic, settings = engine.topic(HOSTILE), engine.topic("settings")
    with xl.SharedMap(settings, value=xl.serde.json) as shared:
        shared.put(HOSTILE, HOSTILE)
        shared.put("later", 1, ttl=1000)
    with (
        engine.lock("job"),
        topic.producer("exclusive", name=HOSTILE) as producer,
        browser(1280, dark=dark) as page,
    ):
        producer.send(HOSTILE.encode(), key=HOSTILE, properties={HOSTILE: HOSTILE})
        page.get(f"http://127.0.0.1:{client.port}{client.root}")

        def shows(place: str, text: str) -> bool:
            return text in page.execute_script(
                "return document.getElementById(arguments[0]).innerText", place
            )

        def submit(form: str, **fields: str) -> None:
            page.execute_script(
                "const form = document.getElementById(arguments[0]);"
                "for (const [name, value] of Object.entries(arguments[1]))"
                "  form.elements[name].value = value;"
                "form.requestSubmit();",
                form,
                fields,
            )

        until(lambda: shows("topics", HOSTILE))
        assert shows("roles", f"job\t1\ttest (pid {os.getpid()})")
        page.execute_script("document.querySelector('#topics button').click()")
        until(lambda: shows("messages", HOSTILE))
        producer.send(b"one that came later")
        until(lambda: shows("messages", "one that came later"))  # live
        submit("search", key=HOSTILE)
        until(lambda: shows("searched", "1 messages before offset 2 of 2"))
        submit("search", **{"from": "1w", "key": ""})
        until(lambda: shows("searched", "it takes earliest"))
        until(lambda: shows("events", HOSTILE))
        for width in (360, 768, 1280):
            resize(page, width, 900)
            assert problems(page) == []
        page.execute_script("location.hash = 'settings'")
        until(lambda: shows("name", "settings"))
        submit("past", at="1")
        until(lambda: shows("keys", "1 of 1 keys, at offset 1"))
        assert shows("entries", HOSTILE)
        assert not shows("entries", "later")
        submit("past", at="")
        until(lambda: shows("entries", "later\t1\t20"))  # of the year in which it expires
        assert page.title.endswith("exclusivelog")
        assert page.execute_script("return document.querySelectorAll('img, script').length") == 1
        assert [each for each in complaints(page) if "400" not in each] == []
