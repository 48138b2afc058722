"""What an engine on a cluster refuses, and that docs/cluster.md lists it (rule J3)."""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import once
from exclusivelog.backend import CAPABILITIES
from exclusivelog.cluster.refused import REASONS, Reason
from testing.broker import Namespace

pytestmark = [pytest.mark.rule("J3"), pytest.mark.once]
PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


@pytest.fixture
def path() -> str:
    return f"memory://{secrets.token_hex(8)}"


def transact(engine: xl.Engine) -> None:
    producer = engine.topic("orders").producer("exclusive")
    with engine.transaction() as txn:
        pytest.fail("its block has begun")
        producer.send(b"x", transaction=txn)


def send_large(engine: xl.Engine) -> None:
    engine.topic("orders").producer("exclusive").send(bytes(5_000_000))


def send_many_large(engine: xl.Engine) -> None:
    engine.topic("orders").producer("exclusive").send_many([bytes(1_000_000)] * 6)


def put_in_a_transaction(engine: xl.Engine) -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        xl.open(f"{directory}/log") as local,
        xl.SharedMap(engine.topic("orders")) as shared,
    ):
        shared.put("a", 1, transaction=local.transaction())


Call = Callable[[xl.Engine], Any]
CALLS: dict[str, list[Call]] = {
    "backup": [lambda e: e.backup("/nowhere")],
    "bound_producers": [
        lambda e: e.topic("orders").producer("exclusive", claim=e.own("g", {"r": None})),
        lambda e: xl.SharedMap(e.topic("orders"), claim=e.own("g", {"r": None})),
    ],
    "compression": [lambda e: e.topic("orders").compression("lz4")],
    "deletion": [lambda e: e.delete_topic("orders"), lambda e: e.delete_role("r")],
    "large_messages": [send_large, send_many_large],
    "moved_claims": [lambda e: e.unload("orders", to=e.id, groups=["g"])],
    "once": [lambda e: once.recorded(e, "orders"), lambda e: once.record(e, "orders", "w", 1)],
    "retention": [
        lambda e: e.topic("orders").trim(before=1),
        lambda e: e.topic("orders").retention(max_age=1),
    ],
    "roles": [
        lambda e: e.role("r", topics=["orders"]),
        lambda e: e.role("r", groups={"g": ["orders"]}),
        lambda e: e.role("r", claims={"g": {"a": None}}),
    ],
    "transactions": [transact, put_in_a_transaction],
}


def table() -> dict[str, Reason]:
    """The rows of the page's table."""
    section = PAGE.read_text().partition("### What it refuses")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", section, re.M)
    return {name: Reason(why, instead) for name, why, instead in rows}


def check_refused(engine: xl.Engine, name: str, call: Call) -> None:
    """The call names the backend, the reason and the way round, and changes nothing."""
    engine.topic("orders")
    with pytest.raises(xl.UnsupportedError) as error:
        call(engine)
    first, _, _ = str(error.value).partition(". ")
    assert first == f"a cluster engine has no {name}: {table()[name]}"
    assert len(first.partition(";")[0]) <= 100
    assert not engine.supports(name)
    assert engine.topic("orders").next_offset == 0


@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name, calls in CALLS.items() for n in range(len(calls))]
)
def test_j3_what_a_cluster_cannot_promise_is_refused_at_the_call(
    engine: xl.Engine, name: str, number: int
) -> None:
    check_refused(engine, name, CALLS[name][number])


@pytest.mark.broker
@pytest.mark.timeout(240)
def test_j3_each_row_of_the_page_is_refused_on_a_real_broker(namespace: Namespace) -> None:
    for name in table():
        for call in CALLS[name]:
            with xl.open(namespace.url, admin=namespace.admin) as engine:
                check_refused(engine, name, call)


def test_j3_what_is_refused_has_a_reason_a_test_and_a_line_on_the_page(engine: xl.Engine) -> None:
    missing = {name for name in CAPABILITIES if not engine.supports(name)}
    assert missing == set(REASONS) == set(CALLS)
    assert table() == REASONS


@pytest.mark.parametrize("option", [{"durability": "process"}, {"keepalive": 5.0}])
def test_j3_options_that_a_cluster_cannot_keep_are_refused(
    path: str, option: dict[str, Any]
) -> None:
    with pytest.raises(xl.UnsupportedError, match=next(iter(option))) as error:
        xl.open(path, **option)
    assert "the cluster's" in str(error.value)
    assert str(error.value).endswith("; leave it out")
    assert len(str(error.value)) <= 100


def test_a_refused_url_is_not_shown() -> None:
    with pytest.raises(xl.UnsupportedError) as error:
        xl.open("kafka://user:secret@host/topic")
    assert "secret" not in str(error.value)
    with pytest.raises(ValueError, match="memory://") as wrong:
        xl.open("memory://x", token="secret")
    assert "secret" not in str(wrong.value)


def test_options_of_a_cluster_are_refused_for_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token= is for clusters"):
        xl.open(tmp_path / "log", token="x")
