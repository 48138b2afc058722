"""Spans of OpenTelemetry, as its own SDK receives them: what an operator finds in a trace, and that
nothing of it is on the path of a send before it is asked for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import exclusivelog as xl
from exclusivelog import aio, tracing
from exclusivelog.producer import Producer
from testing.processes import PATIENCE, until

pytestmark = pytest.mark.once


class Spans:
    """What was exported since one looked last."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def new(self) -> list[ReadableSpan]:
        found = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return found

    def one(self, name: str) -> ReadableSpan:
        until(lambda: any(s.name == name for s in self.exporter.get_finished_spans()))
        [span] = [span for span in self.new() if span.name == name]
        return span


@pytest.fixture
def spans() -> Iterator[Spans]:
    found = Spans()
    tracing.instrument(found.provider)
    yield found
    tracing.uninstrument()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[xl.Engine]:
    with xl.open(tmp_path / "log", name="one") as found:
        yield found


def test_each_send_is_a_span_with_the_attributes_of_messaging(
    engine: xl.Engine, spans: Spans
) -> None:
    with engine.topic("orders").producer("exclusive", name="leader") as producer:
        spans.new()
        producer.send(b"paid")
        span = spans.one("send orders")
        assert span.kind is SpanKind.PRODUCER
        assert dict(span.attributes or {}) == {
            "messaging.system": "exclusivelog",
            "messaging.destination.name": "orders",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.client.id": "leader",
            "messaging.message.id": "0",
            "messaging.message.body.size": 4,
            "exclusivelog.epoch": 1,
        }
        producer.send_many([b"a", b"b"])
        assert spans.one("send orders").attributes["messaging.batch.message_count"] == 2
        assert producer.send_async(b"late").result() == 3
        assert spans.one("send orders").attributes["messaging.message.id"] == "3"


def test_a_send_that_is_refused_says_so(engine: xl.Engine, spans: Spans) -> None:
    topic = engine.topic("orders")
    producer = topic.producer("exclusive")
    with topic.producer("exclusive_with_fencing"):
        for send in producer.send, producer.send_async:
            spans.new()
            with pytest.raises(xl.ProducerFencedError):
                send(b"x")
            span = spans.one("send orders")
            assert span.status.status_code is StatusCode.ERROR
            assert span.attributes["error.type"] == "ProducerFencedError"
            assert [event.name for event in span.events] == ["exception"]


def test_a_promotion_lasts_from_the_request_to_the_grant_in_the_trace_of_the_request(
    engine: xl.Engine, spans: Spans
) -> None:
    topic, tracer = engine.topic("orders"), spans.provider.get_tracer("application")
    former = topic.producer("exclusive")
    with tracer.start_as_current_span("work") as work:
        future = topic.producer_async("wait_for_exclusive", name="next", priority=3)
    assert not future.done()
    spans.new()
    former.close()
    with future.result(PATIENCE):
        span = spans.one("promote orders")
    assert span.parent is not None
    assert span.parent.span_id == work.get_span_context().span_id
    assert span.start_time <= work.end_time < span.end_time
    assert span.attributes["exclusivelog.epoch"] == 2
    assert span.attributes["messaging.client.id"] == "next"
    assert span.attributes["exclusivelog.priority"] == 3


def test_a_hand_over_tells_what_became_of_each_topic(
    engine: xl.Engine, spans: Spans, tmp_path: Path
) -> None:
    with xl.open(engine.path, name="two") as two:
        kept = [engine.topic(name).producer("exclusive") for name in "ab"]
        moves = engine.unload(["a", "b"], to=two.id)
        span = spans.one("hand over 2 topics")
        told = [(e.name, e.attributes["messaging.destination.name"]) for e in span.events]
        assert told == [(move.state, move.topic) for move in moves]
        assert span.status.status_code is StatusCode.UNSET
        two.unload_async(["a"], to=engine.id).result(PATIENCE)
        assert spans.one("hand over a").attributes["exclusivelog.target"] == engine.id
        with pytest.raises(xl.LedgerError):
            engine.unload("b", to="nobody")
        assert spans.one("hand over b").status.status_code is StatusCode.ERROR
        for producer in kept:
            producer.close()


def test_sends_of_an_event_loop_are_spans_of_its_tasks(spans: Spans, tmp_path: Path) -> None:
    async def work() -> None:
        async with aio.open(tmp_path / "log") as engine:
            topic = await engine.topic("orders")
            async with await topic.producer() as producer:
                with spans.provider.get_tracer("application").start_as_current_span("task"):
                    await producer.send(b"x")
                    await producer.send_async(b"y")

    asyncio.run(work())
    found = {span.name: span for span in spans.new()}
    task = found["task"].get_span_context()
    assert found["send orders"].parent.span_id == task.span_id
    assert found["send orders"].attributes["messaging.message.id"] == "1"


def test_nothing_is_on_the_path_of_a_send_before_or_afterwards(engine: xl.Engine) -> None:
    before = {name: Producer.__dict__[name] for name in ("send", "send_many", "send_async", "move")}
    tracing.instrument(Spans().provider)
    tracing.instrument(Spans().provider)  # twice: no wrapper around a wrapper
    assert Producer.__dict__["send"] is not before["send"]
    tracing.uninstrument()
    assert {name: Producer.__dict__[name] for name in before} == before


def test_the_library_imports_no_opentelemetry_and_names_the_extra() -> None:
    program = (
        "import sys, exclusivelog, exclusivelog.aio, exclusivelog.cli\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "sys.modules['opentelemetry'] = None\n"
        "try:\n    import exclusivelog.tracing\n"
        "except ImportError as error:\n    assert 'exclusivelog[otel]' in str(error)\n"
        "else:\n    raise SystemExit('imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, b"")
