"""A cluster engine's token and TLS: what gets in, and that no log, error or repr has the token.

An operator runs programs with a token and a certificate of their own authority. Whatever goes wrong
(a wrong token, a host that is away, a topic that another producer owns), its log goes to people who
must not have the token.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.cluster.pulsar import admitted
from testing.broker import Broker, Namespace, checks_tokens, missing, own_broker, speaks_tls, token
from testing.processes import PATIENCE

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240), pytest.mark.rule("J3")]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Path]]:
    """A broker that checks tokens and speaks TLS, and its certificate."""
    if reason := missing():
        pytest.skip(reason)
    folder = Path(tmp_path_factory.mktemp("tls"))
    with own_broker(checks_tokens() | speaks_tls(folder)) as broker:
        yield broker, folder / "cert.pem"


def test_an_engine_waits_for_a_moment_until_it_is_authorised(
    broker: tuple[Broker, Path],
) -> None:
    """A broker that has just started refuses what it has not loaded yet; here, the role gets its
    rights while the engine is opened."""
    running, _ = broker
    space = Namespace.make(running.url, running.admin, token=token("admin"))
    opened: Future[int] = Future()

    def open_and_send() -> None:
        try:
            with xl.open(
                space.url, "ours", admin=running.admin, token=token("late"), check_policies=False
            ) as engine:
                opened.set_result(engine.topic("orders").producer().send(b"a"))
        except BaseException as error:
            opened.set_exception(error)

    thread = threading.Thread(target=open_and_send)
    thread.start()
    with pytest.raises(TimeoutError):
        opened.result(1.0)
    space.call("POST", f"namespaces/{space.path}/permissions/late", ["produce", "consume"])
    assert opened.result(PATIENCE) == 0
    thread.join()


def test_an_engine_without_rights_is_told_so(
    broker: tuple[Broker, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admitted, "__defaults__", (0.5,))
    running, _ = broker
    space = Namespace.make(running.url, running.admin, token=token("admin"))
    with pytest.raises(xl.ClusterError, match="role may not use this topic"):
        xl.open(space.url, admin=running.admin, token=token("nobody"), check_policies=False)


def test_tls_and_a_token_let_an_engine_in_and_nothing_tells_the_token(
    broker: tuple[Broker, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    running, certificate = broker
    right, wrong = token("admin"), token("admin", b"of another broker, and long enough for HS256")
    file = tmp_path / "token"
    file.write_text(right + "\n")
    space = Namespace.make(running.url, running.admin, token=right)
    url = f"{running.tls_url}/{space.path}"
    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    with xl.open(
        url, "ours", admin=running.tls_admin, token_file=file, tls_trust_certs=str(certificate)
    ) as engine:
        topic = engine.topic("orders")
        with topic.producer("exclusive", name="p") as producer:
            assert producer.send(b"a") == 0
            with pytest.raises(xl.ProducerFencedError) as fenced:
                topic.producer("exclusive")
            reader = topic.reader()
            assert [message.value for message in reader] == [b"a"]
            backend = engine.backend
            things = (engine, topic, producer, reader, backend, fenced.value, fenced.value.holder)
            told += [repr(thing) for thing in things]
            told += [repr(vars(thing)) for thing in (backend, vars(backend)["place"])]
    for access in (
        {"token": wrong, "tls_trust_certs": str(certificate), "admin": running.tls_admin},
        {"token": wrong, "check_policies": False, "tls_trust_certs": str(certificate)},
        {"token": right, "admin": "http://127.0.0.1:1"},
        {"token": right, "admin": f"http://{right}@127.0.0.1:1"},
        {"token": f"{right} and more"},
    ):
        with pytest.raises((xl.ExclusiveLogError, ValueError)) as error:
            with xl.open(url, **access) as engine:  # type: ignore[arg-type]
                engine.topic("orders").producer("exclusive")
        told += [str(error.value), repr(error.value), repr(error.value.__cause__)]
    told += [caplog.text, *capfd.readouterr()]
    signatures = [each.rpartition(".")[2] for each in (right, wrong)]
    assert [text for text in told for part in signatures if part in text] == []
