"""A cluster engine's token and TLS: authentication works, and no output contains the token.

An operator runs programs with a token and a certificate of their own authority. If something goes
wrong (a wrong token, an unreachable host, a topic that another producer owns), people who must not
have the token read what the programs log, print, trace and count. The controls make the library
leak it in one place after the other: the test must then fail.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import exclusivelog as xl
from exclusivelog import tracing
from exclusivelog.cli import load
from exclusivelog.cluster import Mirror, places
from exclusivelog.cluster.catalog import ClusterCatalog
from exclusivelog.cluster.engine import ClusterEngine
from exclusivelog.cluster.pulsar import Access, Cluster
from exclusivelog.restoring import restore
from testing.broker import Broker, Namespace, checks_tokens, missing, own_broker, speaks_tls, token

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240), pytest.mark.rule("J3")]

COMMANDS = (
    "topics",
    "info",
    "info --json",
    "stats --json",
    "metrics",
    "owners orders",
    "owners --history --json",
    "groups",
    "top -n 1",
    "audit",
    "check",
)
program = load()
RIGHT, WRONG = token("admin"), token("admin", b"of another broker, and long enough for HS256")
PASSWORD = "a-password-of-the-admin-api"
SECRETS = [*(each.rpartition(".")[2] for each in (RIGHT, WRONG)), PASSWORD]  # the signatures


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Path]]:
    """A broker that checks tokens and speaks TLS, and its certificate."""
    if reason := missing():
        pytest.skip(reason)
    folder = Path(tmp_path_factory.mktemp("tls"))
    with own_broker(checks_tokens() | speaks_tls(folder)) as broker:
        yield broker, folder / "cert.pem"


@dataclass
class Told:
    """What was told, by the way on which it was."""

    texts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, way: str, *things: object) -> None:
        """One more text."""
        self.texts.setdefault(way, []).extend(
            thing if isinstance(thing, str) else repr(thing) for thing in things
        )

    def fails(self, way: str, call: Callable[[], object]) -> None:
        """A call that has to fail: its error, its causes and its traceback."""
        with pytest.raises((xl.ExclusiveLogError, ValueError)) as error:
            call()
        self.add(way, str(error.value), error.value, error.value.__cause__, error.value.args)
        self.add(way, "".join(traceback.format_exception(error.value)))

    def leaks(self) -> set[str]:
        """The ways on which a secret came out."""
        return {
            way
            for way, texts in self.texts.items()
            for text in texts
            for secret in SECRETS
            if secret in text
        }


class Story:
    """What a program and an operator do with one namespace; everything that they are told."""

    def __init__(
        self,
        running: Broker,
        certificate: Path,
        folder: Path,
        log: pytest.LogCaptureFixture,
        brief: bool,
    ) -> None:
        self.told, self._brief = Told(), brief
        self._log, self._folder = log, folder
        self._file = folder / "token"
        self._file.write_text(RIGHT + "\n")
        self._space = Namespace.make(running.url, running.admin, token=RIGHT)
        self._url = f"{running.tls_url}/{self._space.path}"
        self._tls = {"tls_trust_certs": str(certificate), "admin": running.tls_admin}
        self._spans = InMemorySpanExporter()

    def tell(self) -> Told:
        """Run it."""
        self._log.set_level(logging.DEBUG)
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        tracing.instrument(provider)
        try:
            with xl.open(self._url, "ours", token_file=self._file, **self._tls) as engine:  # type: ignore[arg-type]
                self._use(engine)
                self._command()
        finally:
            tracing.uninstrument()
        self._be_refused()
        self.told.add("spans", *(span.to_json() for span in self._spans.get_finished_spans()))
        self.told.add("log", self._log.text)
        self.told.add("extra", *(vars(record) for record in self._log.records))
        return self.told

    def _use(self, engine: xl.Engine) -> None:
        told, topic = self.told, engine.topic("orders")
        with topic.producer("exclusive", name="p") as producer:
            assert producer.send(b"a") == 0
            told.fails("errors", lambda: topic.producer("exclusive"))
            with topic.reader(group="g") as reader:
                assert [message.value for message in reader] == [b"a"]
                reader.commit()
                told.add("repr", engine, topic, producer, reader, engine.backend, topic.owner)
                told.add("repr", vars(engine.backend), vars(vars(engine.backend)["place"]))
                told.add("stats", engine.stats(), topic.stats(), producer.stats(), engine.groups())
                engine.unload("orders", to=engine.id)
        told.fails("errors", lambda: engine.unload("orders", to="nobody"))
        told.add("engines", engine.engines(), list(engine.history("orders")))

    def _command(self) -> None:
        access = ["--admin", self._tls["admin"], "--tls-trust-certs", self._tls["tls_trust_certs"]]
        right = [*access, "--token-file", str(self._file)]
        wrong = self._folder / "wrong"
        wrong.write_text(WRONG)
        for words in COMMANDS:
            name, *rest = words.split()
            done = CliRunner().invoke(program, [name, self._url, *rest, *right])
            assert done.exit_code == 0, done.output
            self.told.add("command", done.output)
        for name in ("topics", "check"):
            refused = [name, self._url, *access, "--token-file", str(wrong)]
            done = CliRunner().invoke(program, refused)
            assert done.exit_code == 1
            self.told.add("command", done.output)

    def _be_refused(self) -> None:
        tls = self._tls
        user = f"http://user:{PASSWORD}@127.0.0.1:1"
        if not self._brief:  # the client asks again and again, for seconds
            self.told.fails(
                "errors", lambda: self._open({"token": WRONG, "check_policies": False, **tls})
            )
        for access in (
            {"token": WRONG, **tls},
            {"token": RIGHT, "admin": "http://127.0.0.1:1"},
            {"token": RIGHT, "admin": f"http://{RIGHT}@127.0.0.1:1"},
            {"token": RIGHT, "admin": user},
            {"token": f"{RIGHT} and more"},
        ):
            self.told.fails("errors", partial(self._open, access))
        self.told.fails(
            "errors",
            lambda: restore(self._folder / "new", self._url, token=WRONG, **tls),  # type: ignore[arg-type]
        )
        with xl.open(self._folder / "log", durability="process") as local:
            with closing(Mirror(local, self._url, token=RIGHT, **tls)) as mirror:  # type: ignore[arg-type]
                self.told.add("repr", mirror, vars(mirror))
            if not self._brief:
                self.told.fails(
                    "errors",
                    lambda: Mirror(local, self._url, token=WRONG, **tls).run(),  # type: ignore[arg-type]
                )

    def _open(self, access: Mapping[str, Any]) -> None:
        with xl.open(self._url, **access) as engine:
            engine.topic("orders").producer("exclusive")


@pytest.fixture
def tell(
    broker: tuple[Broker, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Told]:
    def tell(brief: bool = False) -> Told:
        told = Story(*broker, tmp_path, caplog, brief).tell()
        told.add("output", *capfd.readouterr())
        return told

    return tell


def test_tls_and_a_token_let_an_engine_in_and_nothing_tells_the_token(
    tell: Callable[..., Told],
) -> None:
    told = tell()
    assert told.leaks() == set()
    ways = {"errors", "repr", "stats", "engines", "command", "spans", "log", "extra", "output"}
    assert {way for way, texts in told.texts.items() if any(texts)} >= ways - {"output"}


# ---- controls ----------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def in_repr(patch: Patch) -> None:
    patch.setattr(Access, "__repr__", lambda self: f"Access({self.token!r})")


def in_errors(patch: Patch) -> None:
    patch.setattr(
        "exclusivelog.cluster.pulsar._refused", lambda access, *_: f"{access.token} is refused"
    )


def _logging(patch: Patch, line: Callable[[logging.Logger, str], None]) -> None:
    original = ClusterEngine.open_producer

    def open_producer(self: Any, *arguments: Any) -> None:
        line(logging.getLogger("exclusivelog.cluster"), self.place._access.token)
        original(self, *arguments)

    patch.setattr(ClusterEngine, "open_producer", open_producer)


def in_a_line(patch: Patch) -> None:
    _logging(patch, lambda log, token: log.debug("a producer with token %s", token))


def in_the_extra_of_a_line(patch: Patch) -> None:
    _logging(patch, lambda log, token: log.debug("a producer", extra={"access": token}))


def in_what_others_see_of_an_engine(patch: Patch) -> None:
    original = places.PulsarPlace.join

    def join(self: Any, engine: xl.EngineInfo) -> None:
        with_token = xl.EngineInfo(
            engine.id, engine.name, engine.pid, {"token": self._access.token}, 0.0
        )
        original(self, with_token)

    patch.setattr(places.PulsarPlace, "join", join)


def in_the_url(patch: Patch) -> None:
    patch.setattr(Access, "url", property(lambda self: f"{self.service}/{self.path}?{self.token}"))


def in_the_admin_apis_url(patch: Patch) -> None:
    patch.setattr("exclusivelog.cluster.pulsar._without_secrets", lambda url: url)


def on_the_output(patch: Patch) -> None:
    original = Cluster._connect

    def connect(self: Cluster) -> Any:
        print("connecting with", self.access.token)
        return original(self)

    patch.setattr(Cluster, "_connect", connect)


def in_spans(patch: Patch) -> None:
    original = tracing._messaging

    def messaging(*arguments: Any) -> dict[str, Any]:
        return {**original(*arguments), "exclusivelog.token": RIGHT}

    patch.setattr(tracing, "_messaging", messaging)


def in_figures(patch: Patch) -> None:
    stats = xl.EngineStats(oldest_reader={"pid": 1, "engine": RIGHT, "transactions_behind": 0})
    patch.setattr(ClusterCatalog, "stats", lambda _: stats)


LEAKS = {
    in_repr: "repr",
    in_errors: "errors",
    in_a_line: "log",
    in_the_extra_of_a_line: "extra",
    in_what_others_see_of_an_engine: "engines",
    in_spans: "spans",
    in_figures: "stats",
    on_the_output: "output",
}


def test_a_leak_is_seen_on_every_way(tell: Callable[..., Told], monkeypatch: Patch) -> None:
    for leak in LEAKS:  # at once: each leaks on a way of its own
        leak(monkeypatch)
    assert tell(brief=True).leaks() >= set(LEAKS.values())


@pytest.mark.parametrize(
    ("leak", "ways"),
    [(in_the_url, {"repr", "errors", "command"}), (in_the_admin_apis_url, {"errors"})],
)
def test_a_leak_of_an_address_is_seen(
    tell: Callable[..., Told], monkeypatch: Patch, leak: Callable[[Patch], None], ways: set[str]
) -> None:
    leak(monkeypatch)
    assert tell(brief=True).leaks() >= ways
