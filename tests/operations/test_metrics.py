"""Metrics for Prometheus, the dashboard and the alert rules that use them, and the commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import exclusivelog as xl
from exclusivelog.cli import load
from exclusivelog.local.storage import tables
from exclusivelog.metrics import HISTOGRAM, OF_LEDGER, Collector, names, render
from testing.operations import PAGE, ROOT
from testing.patience import PATIENCE
from testing.processes import Worker, open_producer, preload

preload(__name__)

pytestmark = pytest.mark.once

PAGES = ROOT / "docs" / "operations"
PARTS = {
    f"exclusivelog_{name}{part}"
    for name, kind, *_ in OF_LEDGER
    if kind == HISTOGRAM
    for part in ("_bucket", "_sum", "_count")
}
NAME = re.compile(r"\bexclusivelog_[a-z_]+")


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "exclusivelog.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def samples(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_text_is_openmetrics_with_the_figures(engine: xl.Engine, topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"x"] * 7)
    topic.reader(group="billing").commit()
    engine.ledger.checkpoint()
    families = {f.name: f for f in text_string_to_metric_families(render(engine))}
    found = samples(render(engine))
    assert found["exclusivelog_up"] == 1
    assert found["exclusivelog_appended_messages_total"] == 7
    assert found["exclusivelog_topic_messages"] == 7
    lag = families["exclusivelog_group_lag_messages"].samples[0]
    assert lag.labels == {"ledger": engine.path, "group": "billing", "topic": "orders"}
    assert lag.value == 7


def test_every_name_is_exported_and_no_other(engine: xl.Engine, topic: xl.Topic) -> None:
    topic.reader(group="billing").commit()
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in Collector(engine).collect()
        if family.samples
    }
    assert exported == set(names())


def test_a_histogram_is_cumulative(engine: xl.Engine, topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send(b"x")
    for family in Collector(engine).collect():
        if family.type == "histogram":
            buckets = [s for s in family.samples if s.name.endswith("_bucket")]
            values = [sample.value for sample in buckets]
            assert values == sorted(values)
            assert buckets[-1].labels["le"] == "+Inf"
            [count] = [s.value for s in family.samples if s.name.endswith("_count")]
            assert values[-1] == count


def test_a_registry_takes_it_and_a_closed_engine_is_down(path: str) -> None:
    registry = CollectorRegistry()
    engine = xl.open(path)
    Collector(engine)  # one that is not registered is no obstacle
    registry.register(Collector(engine))
    assert registry.get_sample_value("exclusivelog_up", {"ledger": path}) == 1
    engine.close()
    assert registry.get_sample_value("exclusivelog_up", {"ledger": path}) == 0
    assert registry.get_sample_value("exclusivelog_topics", {"ledger": path}) is None


COUNTERS = {name for name in names() if name.endswith("_total")}


def counters(text: str) -> set[str]:
    """The counters that a reader of Prometheus' text format finds, as a textfile collector is."""
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    shown = set(re.findall(r"^(exclusivelog_\w+)", text, re.MULTILINE))
    return {name for name in shown if typed.get(name) == "counter"}


def test_a_textfile_collector_finds_the_types_of_counters(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    topic.reader(group="billing").commit()
    text = render(engine, openmetrics=False)
    assert counters(text) == COUNTERS
    assert counters(render(engine)) == set()  # the control


@pytest.mark.parametrize("openmetrics", [True, False])
def test_two_ledgers_are_in_one_family_each(engine: xl.Engine, tmp_path, openmetrics: bool) -> None:
    engine.topic("orders").reader(group="billing").commit()
    with xl.open(tmp_path / "other", durability="process") as other:
        other.topic("a")
        text = render(engine, other, openmetrics=openmetrics)
        types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        assert len(types) == len(set(types)) == len(names())
        for path in (engine.path, other.path):
            assert f'exclusivelog_topics{{ledger="{path}"}} 1.0' in text
        registry = CollectorRegistry()
        registry.register(Collector(engine, other))
        with pytest.raises(ValueError, match="exclusivelog_up"):
            registry.register(Collector(other))
    assert registry.get_sample_value("exclusivelog_up", {"ledger": engine.path}) == 1
    assert registry.get_sample_value("exclusivelog_up", {"ledger": other.path}) == 0
    assert registry.get_sample_value("exclusivelog_topics", {"ledger": engine.path}) == 1
    with pytest.raises(TypeError, match="engines"):
        Collector()


@pytest.mark.parametrize("openmetrics", [True, False])
def test_a_path_that_is_no_utf_8_is_escaped(tmp_path, openmetrics: bool) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/l\xff")
    with xl.open(path, durability="process") as engine:
        text = render(engine, openmetrics=openmetrics)
    assert "l\\\\xff" in text
    text.encode()


# ---- changes of owner --------------------------------------------------------------------


def changes(engine: xl.Engine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.hand_overs, stats.evictions, stats.fencings


def test_hand_overs_evictions_and_fencings_are_counted(
    engine: xl.Engine, topic: xl.Topic, path: str, worker: Callable[..., Worker]
) -> None:
    topic.producer("exclusive").close()
    assert changes(engine) == (0, 0, 0)
    held = [topic.producer(mode) for mode in ("exclusive", *["exclusive_with_fencing"] * 2)]
    assert changes(engine) == (0, 0, 2)
    with xl.open(path, "target") as target:
        waiting = target.topic("orders").producer_async("wait_for_exclusive")
        assert all(move.ok for move in engine.unload("orders", to=target.id))
        waiting.result(PATIENCE)
    assert changes(engine) == (1, 0, 2)
    process = worker()
    process.call(open_producer, "exclusive")
    process.kill()
    held.append(topic.producer("exclusive_with_fencing"))
    assert changes(engine) == (1, 1, 2)
    engine.close()
    with xl.open(path, readonly=True) as again:  # it is the ledger's, not an engine's
        assert changes(again) == (1, 1, 2)
        assert samples(render(again))["exclusivelog_fencings_total"] == 2


def test_stats_do_not_decode_the_claims_of_others_than_readers(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims of dead processes stay until their resources are requested: each cost 10 µs."""
    for number in range(20):
        engine.own("workers", {f"shard {number}": None})
    decoded = []
    unpack = tables._unpack_claimant
    monkeypatch.setattr(
        tables, "_unpack_claimant", lambda data: decoded.append(data) or unpack(data)
    )
    with topic.reader(group="billing"):
        decoded.clear()
        [info] = engine.stats().groups
        assert (info.group, info.reader.engine_id) == ("billing", engine.id)
        assert len(decoded) <= 2
        assert len(engine.claims()) == 21


def test_a_group_that_is_deleted_has_no_lag(engine: xl.Engine, topic: xl.Topic) -> None:
    topic.producer().send_many([b"x"] * 3)
    other = engine.topic("other")
    with engine.reader(["orders", "other"], group="dead") as reader:
        reader.read_batch(2)
        reader.commit()
        with pytest.raises(xl.OwnershipError, match=r"'dead' .* close that reader"):
            engine.delete_group("dead")
    topic.reader(group="dea").commit()
    other.reader(group="xdead").commit()
    assert 'group="dead"' in render(engine)
    assert engine.delete_group("dead") == 2
    assert 'group="dead"' not in render(engine)
    assert {info.group for info in engine.groups()} == {"dea", "xdead"}
    for name in ("dead", "never"):
        with pytest.raises(ValueError, match=f"no reader group .*|name='{name}'"):
            engine.delete_group(name)
    with topic.reader(group="dead") as again:
        assert (again.position, again.generation) == (0, 2)


def test_the_former_reader_of_a_deleted_group_commits_nothing(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    topic.producer().send_many([b"x"] * 3)
    former = topic.reader(group="g")
    former.commit()
    topic.reader(group="g").close()
    engine.delete_group("g")
    with pytest.raises(xl.ReaderFencedError):
        former.commit()
    assert engine.groups() == []


def test_the_command_deletes_a_group(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with xl.open(path) as engine:
        engine.topic("orders").reader(group="dead").commit()

    def status(*words: str) -> int:
        try:
            load().main(["groups", path, *words], standalone_mode=False)
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    assert status("--delete") == 2
    assert status("dead", "--delete") == 2  # no terminal to ask on
    assert "give --yes" in capsys.readouterr().err
    assert status("dead", "--delete", "--yes") == 0
    said = capsys.readouterr().out
    assert said == "group dead is deleted: its positions on 1 topics are removed\n"
    assert status("dead", "--delete", "--yes") == 1


def test_topics_can_be_left_out(engine: xl.Engine, topic: xl.Topic) -> None:
    assert "exclusivelog_topic_messages{" in render(engine)
    assert "exclusivelog_topic" not in render(engine, topics=False).replace("_topics", "")


def test_without_the_library_the_error_says_what_to_install(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for call in (Collector, render):
        with pytest.raises(xl.MissingLibraryError, match=r"exclusivelog\[metrics\]"):
            call(engine)


# ---- dashboard, alerts, page -------------------------------------------------------------


@pytest.mark.parametrize("file", ["alerts.yml", "dashboard.json"])
def test_only_names_that_are_exported_are_used(file: str) -> None:
    used = set(NAME.findall((PAGES / file).read_text()))
    assert len(used) > 8
    assert used - {*names(), *PARTS} == set()


def test_the_dashboard_shows_every_metric_of_the_ledger_once_at_least() -> None:
    text = (PAGES / "dashboard.json").read_text()
    left_out = {"readers", "max_readers", "tables_map_bytes", "transactions", "pending_bytes"}
    missing = [
        name
        for name, *_ in OF_LEDGER
        if f"exclusivelog_{name}" not in text and name not in left_out
    ]
    assert missing == []
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    assert all(panel["targets"] for panel in panels)


def test_the_alert_rules_are_what_prometheus_takes() -> None:
    [group] = yaml.safe_load((PAGES / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert {"alert", "expr", "for", "labels", "annotations"} == set(rule)
        assert f"`{rule['alert']}`" in PAGE.read_text()


def told_of(engine: xl.Engine) -> dict[str, tuple[str, str, str]]:
    """{name: (kind, labels, meaning)} of what is exported."""
    told = {}
    for family in Collector(engine).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({label for s in family.samples for label in s.labels} - {"ledger", "le"})
        told[name] = (family.type, ", ".join(labels), family.documentation)
    return told


def test_the_page_lists_every_metric_as_it_is_exported(engine: xl.Engine, topic: xl.Topic) -> None:
    topic.reader(group="billing").commit()
    row = re.compile(r"^\| `(exclusivelog_\w+)` \| (\w+) \| (.*?) ?\| (.*) \|$", re.MULTILINE)
    assert {name: tuple(rest) for name, *rest in row.findall(PAGE.read_text())} == told_of(engine)


@pytest.mark.parametrize("file", ["alerts.yml", "dashboard.json"])
def test_a_query_uses_labels_that_its_metrics_have(
    file: str, engine: xl.Engine, topic: xl.Topic
) -> None:
    """In `by (...)` of a query, and in the text of the alert or the legend of the panel."""
    topic.reader(group="billing").commit()
    told, text = told_of(engine), (PAGES / file).read_text()
    if file == "alerts.yml":
        rules = yaml.safe_load(text)["groups"][0]["rules"]
        queries = [(rule["expr"], rule["annotations"]["summary"]) for rule in rules]
    else:
        targets = [target for panel in json.loads(text)["panels"] for target in panel["targets"]]
        queries = [(target["expr"], target.get("legendFormat", "")) for target in targets]
    for expression, shown in queries:
        wanted = set(re.findall(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}", shown))
        for by in re.findall(r"by \(([^)]*)\)", expression):
            wanted |= set(re.split(r", *", by))
        for name in NAME.findall(expression):
            base = next(n for n in told if name.startswith(n))
            assert wanted - {"ledger", "le"} <= set(told[base][1].split(", ")), expression


# ---- the commands ------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_prints_the_metrics(path: str) -> None:
    with xl.open(path) as engine:
        with engine.topic("orders").producer() as producer:
            producer.send(b"x")
        found = samples(command("metrics", path, "--openmetrics"))
        assert found["exclusivelog_appended_messages_total"] == 1
        assert "exclusivelog_topic_messages" in found
        less = samples(command("metrics", path, "--openmetrics", "--no-topics"))
        assert "exclusivelog_topic_messages" not in less
        assert counters(command("metrics", path)) == COUNTERS


@pytest.mark.long
def test_the_command_shows_the_figures(path: str) -> None:
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        with topic.producer() as producer:
            for _ in range(3):
                producer.send(b"x")
        topic.reader(group="billing").commit()
        shown = json.loads(command("stats", path, "--json"))
        assert (shown["appended_messages"], shown["topics"]) == (3, 1)
        assert shown["groups"][0]["lag"] == 3
        assert shown["append_seconds"]["count"] == sum(
            count for _, count in shown["append_seconds"]["buckets"]
        )
        text = command("stats", path)
        assert "appended messages\t3" in text
        assert "billing on orders: 3" in text
        shown = json.loads(command("stats", path, "orders", "--json"))
        assert (shown["messages"], shown["waiters"], shown["compression"]) == (3, 0, None)
        assert "messages\t3" in command("stats", path, "orders")
