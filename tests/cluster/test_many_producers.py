"""`engine.producers` on a cluster, where many grants are not one step: others come in between, and
interrupts (rule A2). What is the same on all backends is tested in
`tests/conformance/test_many_producers.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.cluster import requests
from exclusivelog.cluster.requests import Requests
from testing.processes import EXCLUSIVE, FENCING, SHARED, until

pytestmark = [pytest.mark.once, pytest.mark.rule("A2")]
NAMES = ["t0", "t1", "t2"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return f"memory://{tmp_path}"


def holders(engine: xl.Engine) -> list[list[str]]:
    return [[each.producer_name for each in engine.topic(name).holders] for name in NAMES]


@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE])
def test_what_was_granted_is_released_if_another_one_comes_in_between(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    with xl.open(path, name="other") as other:
        check = Requests.check
        rivals: list[xl.Producer] = []

        def checked(here: Requests, topic: Any, *args: Any) -> None:
            check(here, topic, *args)
            if topic.name == "t2":  # all of them are free until now
                rivals.append(other.topic("t1").producer(EXCLUSIVE, name="rival"))

        for name in NAMES:
            engine.topic(name)
        monkeypatch.setattr(Requests, "check", checked)
        with pytest.raises((xl.ProducerFencedError, xl.ProducerBusyError), match="'rival'"):
            engine.producers(NAMES, mode)
        assert holders(engine) == [[], ["rival"], []]
        rivals[0].close()
        monkeypatch.setattr(Requests, "check", check)
        producers = engine.producers(NAMES, mode)
        epochs = [0, 1, 0] if mode == SHARED else [2, 2, 1]
        assert [each.topic_epoch for each in producers] == epochs


def test_one_that_is_terminated_in_between_is_refused_as_usual(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Requests, "check", lambda *args: None)
    engine.topic("t1").terminate()
    with pytest.raises(xl.TopicTerminatedError):
        engine.producers(NAMES, FENCING)
    assert holders(engine) == [[], [], []]


@pytest.mark.parametrize("when", ["before the grant", "after the grant"])
def test_an_interrupt_leaves_no_owner(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    ask = Requests.open

    def interrupted(here: Requests, topic: Any, *args: Any) -> None:
        if topic.name != "t1":
            return ask(here, topic, *args)
        if when == "after the grant":
            ask(here, topic, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Requests, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.producers(NAMES, EXCLUSIVE)
    assert holders(engine) == [[], [], []]


@pytest.mark.rule("E3")
def test_it_does_not_wait_for_a_release_to_its_engine(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single producer would wait for it (rule E3)."""
    with xl.open(path, name="other") as other:
        producer = other.topic("t0").producer(EXCLUSIVE, name="former")
        monkeypatch.setattr(
            "exclusivelog.cluster.following.Owning.hand_over_if_due", lambda owning: None
        )
        monkeypatch.setattr(requests, "awaits_release", lambda *args: pytest.fail("it would wait"))
        move = other.unload_async("t0", to=engine.id)
        until(lambda: engine.topic("t0").transfer)
        for checked in (True, False):
            if not checked:
                monkeypatch.setattr(Requests, "check", lambda *args: None)
            with pytest.raises(xl.ProducerFencedError, match="'former'"):
                engine.producers(["t1", "t0"], EXCLUSIVE)
        assert not engine.topic("t1").holders
        move.cancel()
        assert producer.send(b"x") == 0
