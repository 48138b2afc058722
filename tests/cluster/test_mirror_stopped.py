"""A mirror that was stopped while another one copied on sends nothing twice when it goes on (J4).

It has a copy in flight when its broker dies and it is stopped itself. The broker comes back,
another mirror copies all of that, and the first one is continued: its client sends again what was
in flight. Two protections stand against that, the exclusive producer and the broker's
deduplication. Each is taken away in turn: one alone is enough, and without both the copy is there
twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.broker import Broker, Namespace, missing, own_broker
from testing.children import ROOT, dying_with_this, line
from testing.mirrors import target
from testing.patience import PATIENCE
from testing.processes import stop, until

pytestmark = [pytest.mark.rule("J4"), pytest.mark.broker]

MESSAGES = 6

MIRROR = """
import sys
import exclusivelog as xl
from exclusivelog.cluster import Mirror, pulsar

path, url, admin, exclusive, follow = sys.argv[1:]
if exclusive == "no":
    create = pulsar.Cluster._producer

    class Shared:
        Exclusive = None

    def shared(self, full):
        Shared.Exclusive = self._pulsar.ProducerAccessMode.Shared
        before, self._pulsar = self._pulsar, type("", (), {"ProducerAccessMode": Shared})
        try:
            return create(self, full)
        finally:
            self._pulsar = before

    pulsar.Cluster._producer = shared
with xl.open(path, readonly=True) as engine:
    with Mirror(engine, url, admin=admin, timeout=150.0, check_policies=False) as mirror:
        mirror.start(follow == "yes")
        while not mirror.wait(0.05):
            flights = [one._flight for one in mirror._mirrors.values()]
            print(sum(one.position for one in flights), sum(len(one._sent) for one in flights),
                  all(one._ledger == one._flight.ledger for one in mirror._mirrors.values()))
            sys.stdout.flush()
"""
PROTECTIONS = {
    "both": (True, True),
    "producer": (True, False),
    "deduplication": (False, True),
    "none": (False, False),
}


class Case:
    """A log, a namespace, and a mirror between them that has or lacks a protection."""

    def __init__(self, folder: Path, broker: Broker, exclusive: bool, deduplication: bool) -> None:
        self.namespace = Namespace.make(broker.url, broker.admin, deduplication=deduplication)
        self.engine = xl.open(folder)
        self.producer = self.engine.topic("orders").producer("exclusive")
        self._exclusive = "yes" if exclusive else "no"
        self.first = self.mirror(follow=True)

    def mirror(self, follow: bool) -> subprocess.Popen[str]:
        """Start a mirror."""
        given = (self.engine.path, self.namespace.url, self.namespace.admin, self._exclusive)
        return subprocess.Popen(
            [sys.executable, "-c", MIRROR, *given, "yes" if follow else "no"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=dying_with_this(),
        )

    def await_line(self, wanted: str) -> None:
        """Until the first mirror says so: messages that are stored, copies in flight, and whether
        it has looked at the target after the first one."""
        try:
            until(lambda: line(self.first) == wanted, PATIENCE)
        except AssertionError as failure:
            assert self.first.stderr is not None
            self.first.kill()
            raise AssertionError(f"{failure}; {self.first.stderr.read()}") from None

    def times(self) -> Counter[int]:
        """How often each offset is in the target."""
        return Counter(message[0] for message in target(self.namespace, "orders"))

    def close(self) -> None:
        """End everything."""
        self.first.kill()
        self.first.communicate(timeout=PATIENCE)
        self.producer.close()
        self.engine.close()


@contextlib.contextmanager
def every_case(folder: Path, broker: Broker) -> Iterator[dict[str, Case]]:
    with contextlib.ExitStack() as stack:
        cases = {}
        for name, protections in PROTECTIONS.items():
            cases[name] = Case(folder / name, broker, *protections)
            stack.callback(cases[name].close)
        yield cases


def leave_in_flight(cases: dict[str, Case], broker: Broker) -> None:
    """Each mirror has copies in flight, and is stopped; the broker has died without them."""
    for case in cases.values():
        case.producer.send(b"0")
    for case in cases.values():
        case.await_line("1 0 True")
    stop(broker.pid)  # else it may store the next copy
    for case in cases.values():
        case.producer.send(b"1")
        case.await_line("1 1 True")
        case.producer.send_many([b"%d" % i for i in range(2, MESSAGES)])
    broker.kill()
    for case in cases.values():
        stop(case.first.pid)


def copy_on(case: Case) -> None:
    """Another mirror copies all that there is, and ends."""
    second = case.mirror(follow=False)
    try:
        _, wrong = second.communicate(timeout=PATIENCE)
    finally:
        second.kill()
        second.wait(PATIENCE)
    assert (second.returncode, wrong) == (0, "")


def test_what_a_stopped_mirror_sends_again(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    once = Counter(range(MESSAGES))
    with own_broker() as broker, every_case(tmp_path, broker) as cases:
        leave_in_flight(cases, broker)
        broker.start()
        for case in cases.values():
            copy_on(case)
            assert case.times() == once
            os.kill(case.first.pid, signal.SIGCONT)
        for name in ("both", "producer"):
            _, wrong = cases[name].first.communicate(timeout=PATIENCE)
            assert "another exclusive producer" in wrong
        for name in ("deduplication", "none"):
            cases[name].await_line(f"{MESSAGES} 0 True")
        twice = until(lambda: cases["none"].times() - once)
        assert 1 in twice  # the copy that was in flight
        found = {name: case.times() == once for name, case in cases.items()}
        assert found == {"both": True, "producer": True, "deduplication": True, "none": False}
