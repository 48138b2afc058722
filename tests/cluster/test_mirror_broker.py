"""A broker that dies, hangs, comes back or checks tokens: clear errors, and nothing is skipped."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.cluster import Mirror
from exclusivelog.restoring import restore
from testing.broker import (
    Broker,
    Namespace,
    checks_tokens,
    missing,
    own_broker,
    speaks_tls,
    token,
)
from testing.mirrors import compare, finish, kill_at_random
from testing.processes import PATIENCE, stop, until, within

pytestmark = [pytest.mark.rule("J4"), pytest.mark.broker]


@pytest.fixture(scope="module")
def admin_token() -> str:
    return token("admin")


@pytest.fixture(scope="module")
def broker(admin_token: str) -> Iterator[Broker]:
    """A broker of these tests alone, which checks tokens."""
    if reason := missing():
        pytest.skip(reason)
    with own_broker(checks_tokens()) as broker:
        yield broker


@pytest.fixture
def namespace(broker: Broker, admin_token: str, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setenv("EXCLUSIVELOG_TOKEN", admin_token)
    return Namespace.make(broker.url, broker.admin, token=admin_token)


def copy(engine: xl.Engine, namespace: Namespace, timeout: float = 90.0, **options: Any) -> None:
    with Mirror(
        engine, namespace.url, admin=namespace.admin, timeout=timeout, **options
    ) as running:
        within(running.run, PATIENCE)


# ---- it dies -----------------------------------------------------------------------------


def test_mirror_writer_and_broker_are_killed(
    path: str, namespace: Namespace, broker: Broker
) -> None:
    kinds = {"mirror": 2.0, "writer": 1.0, "broker": 1.0}
    done = kill_at_random(
        kinds, path, namespace, broker, kills=7, pause=0.5, rate=5000.0, chance=random.Random(4)
    )
    assert done["broker"] > 0
    finish(path, namespace)
    assert compare(path, namespace) > 1000


def test_a_broker_that_dies_and_does_not_come_back(
    topic: xl.Topic, namespace: Namespace, broker: Broker
) -> None:
    with topic.producer() as producer:
        with Mirror(topic.engine, namespace.url, admin=namespace.admin, timeout=10.0) as running:
            running.start(follow=True)
            producer.send(b"a")
            until(lambda: running.wait(0) or [one.position for one in running.progress()] == [1])
            broker.kill()
            try:
                producer.send(b"b")
                with pytest.raises(xl.ClusterError, match="did not answer in time"):
                    within(lambda: running.wait(PATIENCE), PATIENCE)
                assert [one.lag for one in running.progress()] == [1]
            finally:
                broker.start()
    copy(topic.engine, namespace)
    assert compare(topic.engine.path, namespace) == 2


def test_a_broker_that_hangs(topic: xl.Topic, namespace: Namespace, broker: Broker) -> None:
    with topic.producer() as producer:
        with Mirror(topic.engine, namespace.url, admin=namespace.admin, timeout=10.0) as running:
            running.start(follow=True)
            producer.send(b"a")
            until(lambda: running.wait(0) or [one.position for one in running.progress()] == [1])
            stop(broker.pid)
            try:
                producer.send(b"b")
                with pytest.raises(xl.ClusterError, match="did not answer in time"):
                    within(lambda: running.wait(PATIENCE), PATIENCE)
            finally:
                os.kill(broker.pid, signal.SIGCONT)
                broker.await_ready()
    copy(topic.engine, namespace)  # what was in flight may have arrived after all
    assert compare(topic.engine.path, namespace) == 2


# ---- TLS ---------------------------------------------------------------------------------


def test_tls_with_certificates_that_are_trusted(
    topic: xl.Topic, admin_token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := missing():
        pytest.skip(reason)
    monkeypatch.setenv("EXCLUSIVELOG_TOKEN", admin_token)
    topic.producer().send(b"a")
    with own_broker(checks_tokens() | speaks_tls(tmp_path)) as broker:
        plain = Namespace.make(broker.url, broker.admin, token=admin_token)
        namespace = replace(plain, broker=broker.tls_url, admin=broker.tls_admin)
        copy(topic.engine, namespace, tls_trust_certs=str(tmp_path / "cert.pem"))
        assert compare(topic.engine.path, plain) == 1
        with pytest.raises(xl.ClusterError, match=r"admin API cannot be reached: .*CERTIFICATE"):
            copy(topic.engine, namespace)
        with pytest.raises(xl.ClusterError):
            copy(topic.engine, namespace, timeout=3.0, check_policies=False)


# ---- tokens ------------------------------------------------------------------------------


def test_wrong_tokens_are_clear_errors_that_do_not_have_them(
    topic: xl.Topic,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic.producer().send(b"a")
    wrong = {
        "forged": token("admin", b"another secret"),
        "powerless": token("nobody"),
        "no token at all": "nonsense",
    }
    said = []
    for each in wrong.values():
        with pytest.raises(
            xl.ClusterError, match=r"refuses .*give a token with admin rights"
        ) as no:
            copy(topic.engine, namespace, token=each)
        said.append(str(no.value))
        with Mirror(
            topic.engine,
            namespace.url,
            admin=namespace.admin,
            token=each,
            check_policies=False,
            timeout=5.0,
        ) as running:
            said.append(repr(running) + repr(running.cluster) + repr(running.cluster.access))
            with pytest.raises(xl.ClusterError, match="token") as no:
                within(running.run)
        said.append(str(no.value))
    monkeypatch.delenv("EXCLUSIVELOG_TOKEN")
    with pytest.raises(xl.ClusterError, match="HTTP 401"):
        copy(topic.engine, namespace)
    output = "".join([*said, *capfd.readouterr(), caplog.text])
    assert not [name for name, each in wrong.items() if each in output]
    assert not [each for each in wrong.values() if each.split(".")[-1] in output]


def test_a_token_from_a_file(
    topic: xl.Topic,
    namespace: Namespace,
    admin_token: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EXCLUSIVELOG_TOKEN")
    topic.producer().send(b"a")
    (tmp_path / "token").write_text(admin_token + "\n")
    copy(topic.engine, namespace, token_file=str(tmp_path / "token"))
    counts = restore(
        tmp_path / "back", namespace.url, admin=namespace.admin, token_file=str(tmp_path / "token")
    )
    assert counts == {"orders": 1}
    with pytest.raises(FileNotFoundError):
        copy(topic.engine, namespace, token_file=str(tmp_path / "nothing"))
