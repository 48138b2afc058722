"""Names come from whoever may write to a ledger, and are shown to whoever looks at it. None of them
may move a terminal's cursor, set its title, or begin a line of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import exclusivelog as xl
from testing.patience import PATIENCE
from tests.faces.test_cli import run

pytestmark = pytest.mark.once

EVIL = "n\x1b]0;owned\x07\x1b[31m\r\x9b2J"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A ledger in which every name is hostile that may be (those of topics, engines, producers and
    roles have no control characters), and open in this process."""
    path = str(tmp_path_factory.mktemp("names") / "log")
    properties = {EVIL: EVIL}
    with xl.open(path, name="engine", properties=properties) as engine:
        topic = engine.topic("orders")
        with topic.producer("exclusive", name="p", properties=properties) as producer:
            producer.send(b"x", key=EVIL, properties=properties)
            producer.announce(properties)
            reader = topic.reader("earliest", group=EVIL)
            reader.read_next(timeout=PATIENCE)
            reader.commit()
            claim = engine.own(EVIL, {EVIL: 1})
            role = engine.role("role", groups={EVIL: ["bills"]}, claims={EVIL + "2": {EVIL: 1}})
            yield path
            del claim, role


NAMING = (
    ("metrics",),
    ("owners",),
    ("claims",),
    ("roles",),
    ("groups",),
    ("tail", "orders"),
    ("info", EVIL),
    ("tail", EVIL),
    ("retention", EVIL, "--off"),
    ("compression", EVIL),
    ("terminate", EVIL),
    ("delete", EVIL),
    ("unload", EVIL, "--to", EVIL),
)
OTHERS = (
    ("topics",),
    ("info",),
    ("info", "orders"),
    ("stats",),
    ("owners", "--history"),
    ("check",),
    ("verify",),
    ("audit",),
    ("top", "--count", "1"),
)


@pytest.mark.parametrize(
    "command", [*NAMING, *OTHERS], ids=lambda command: command[0] + str(len(command))
)
def test_no_command_prints_a_name_that_acts_on_a_terminal(
    ledger: str, command: tuple[str, ...]
) -> None:
    done = run(command[0], ledger, *command[1:])
    for output in (done.stdout.decode(), done.stderr.decode()):
        assert [each for each in output if not each.isprintable() and each not in "\t\n"] == []
    if command in NAMING:
        assert "owned" in done.stdout.decode() + done.stderr.decode()


def test_metrics_stay_metrics(ledger: str) -> None:
    """The label of a name that is escaped is still one of OpenMetrics."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = list(
        parser.text_string_to_metric_families(
            run("metrics", "--openmetrics", ledger).stdout.decode()
        )
    )
    labels = {
        sample.labels["group"]
        for family in families
        for sample in family.samples
        if "group" in sample.labels
    }
    assert "n\\x1b]0;owned\\x07\\x1b[31m\\r\\x9b2J" in labels
