"""OpenTelemetry spans for sends, promotions and hand-overs. Needs the extra `[otel]`.

>>> from exclusivelog import tracing
>>> tracing.instrument()
>>> producer.send(b"paid")            # makes a span, if the application configured OpenTelemetry
0
>>> tracing.uninstrument()

Before `instrument()` nothing is traced, and a send runs no code for it.

```text
send {topic}        PRODUCER   send, send_many; send_async, until its receipt is settled
promote {topic}     INTERNAL   from the request of a producer until it is granted
hand over {topic}   INTERNAL   engine.unload, unload_async, producer.move; an event for each topic
```

Attributes are those of OpenTelemetry's conventions for messaging (`messaging.system` is
"exclusivelog", `messaging.destination.name` the topic, `messaging.message.id` the offset,
`messaging.client.id` the producer's name), and `exclusivelog.epoch`, `.engine`, `.ledger`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from exclusivelog.aio.producers import Producer as AsyncProducer
from exclusivelog.engine import Engine
from exclusivelog.producer import Producer, ProducerFuture
from exclusivelog.types import Move
from exclusivelog.version import __version__

__all__ = ["instrument", "uninstrument"]

try:
    from opentelemetry import trace
except ImportError as lacking:
    raise ImportError(
        "tracing needs opentelemetry-api, which is not installed: pip install 'exclusivelog[otel]'"
    ) from lacking

Attributes = dict[str, Any]
_originals: dict[tuple[type, str], Any] = {}


def instrument(tracer_provider: trace.TracerProvider | None = None) -> None:
    """Trace the calls of this process from now on, including those of open engines. Calling it
    again changes the provider.

    - `tracer_provider`: the provider that gets the spans. Default: the application's global one.

    >>> from exclusivelog import tracing
    >>> tracing.instrument()
    >>> tracing.uninstrument()
    """
    uninstrument()
    tracer = trace.get_tracer("exclusivelog", __version__, tracer_provider)
    _wrap(Producer, "send", functools.partial(_send, tracer))
    _wrap(Producer, "send_many", functools.partial(_send_many, tracer))
    _wrap(Producer, "send_async", functools.partial(_send_async, tracer))
    _wrap(Producer, "move", functools.partial(_move, tracer))
    _wrap(AsyncProducer, "send", functools.partial(_awaited_send, tracer))
    _wrap(AsyncProducer, "send_async", functools.partial(_send_async, tracer))
    _wrap(ProducerFuture, "__init__", _requested)
    _wrap(ProducerFuture, "make", functools.partial(_promoted, tracer))
    _wrap(Engine, "unload", functools.partial(_unload, tracer))
    _wrap(Engine, "unload_async", functools.partial(_unload_async, tracer))


def uninstrument() -> None:
    """Stop tracing; without `instrument` before it, nothing happens.

    >>> from exclusivelog import tracing
    >>> tracing.uninstrument()
    """
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    _originals[owner, name] = original

    @functools.wraps(original)
    def traced(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    setattr(owner, name, traced)


# ---- sends -------------------------------------------------------------------------------


def _begin(tracer: trace.Tracer, producer: Any) -> trace.Span:
    return tracer.start_span(
        f"send {producer.topic}",
        kind=trace.SpanKind.PRODUCER,
        attributes={
            **_messaging(producer.topic, "send", "send"),
            "messaging.client.id": producer.name,
            "exclusivelog.epoch": producer.topic_epoch,
        },
    )


def _messaging(topic: str, operation: str, kind: str | None = None) -> Attributes:
    found = {
        "messaging.system": "exclusivelog",
        "messaging.destination.name": topic,
        "messaging.operation.name": operation,
    }
    return found if kind is None else {**found, "messaging.operation.type": kind}


def _fail(span: trace.Span, error: BaseException) -> None:
    span.record_exception(error)
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(trace.StatusCode.ERROR, str(error))


def _traced(span: trace.Span, call: Callable[[], Any], sent: Callable[[Any], Attributes]) -> Any:
    with trace.use_span(
        span, end_on_exit=True, record_exception=False, set_status_on_exception=False
    ):
        try:
            result = call()
        except BaseException as error:
            _fail(span, error)
            raise
        span.set_attributes(sent(result))
        return result


def _size(value: Any) -> Attributes:
    return {"messaging.message.body.size": len(value)} if isinstance(value, bytes) else {}


def _send(tracer: trace.Tracer, original: Any, producer: Any, value: Any, **options: Any) -> int:
    span = _begin(tracer, producer)
    span.set_attributes(_size(value))
    call = functools.partial(original, producer, value, **options)
    return int(_traced(span, call, lambda offset: {"messaging.message.id": str(offset)}))


def _send_many(
    tracer: trace.Tracer, original: Any, producer: Any, values: Iterable[Any], **options: Any
) -> range:
    def sent(offsets: range) -> Attributes:
        return {
            "messaging.batch.message_count": len(offsets),
            "messaging.message.id": str(offsets.start),
        }

    call = functools.partial(original, producer, values, **options)
    found: range = _traced(_begin(tracer, producer), call, sent)
    return found


def _send_async(
    tracer: trace.Tracer, original: Any, producer: Any, value: Any, **options: Any
) -> Any:
    span = _begin(tracer, producer)
    span.set_attributes(_size(value))
    try:
        receipt = original(producer, value, **options)
    except BaseException as error:
        _fail(span, error)
        span.end()
        raise
    receipt.add_done_callback(functools.partial(_end, span))
    return receipt


def _end(span: trace.Span, receipt: Any) -> None:
    try:
        span.set_attribute("messaging.message.id", str(receipt.result()))
    except BaseException as error:
        _fail(span, error)
    span.end()


async def _awaited_send(
    tracer: trace.Tracer,
    original: Callable[..., Awaitable[int]],
    producer: Any,
    value: Any,
    **options: Any,
) -> int:
    span = _begin(tracer, producer)
    span.set_attributes(_size(value))
    with trace.use_span(
        span, end_on_exit=True, record_exception=False, set_status_on_exception=False
    ):
        try:
            offset = await original(producer, value, **options)
        except BaseException as error:
            _fail(span, error)
            raise
        span.set_attribute("messaging.message.id", str(offset))
        return offset


# ---- promotions and hand-overs -----------------------------------------------------------


def _requested(original: Any, future: Any, *arguments: Any, **options: Any) -> None:
    future.requested = time.time_ns(), trace.get_current_span().get_span_context()
    original(future, *arguments, **options)


def _promoted(
    tracer: trace.Tracer, original: Any, future: Any, session: Any, last_sequence: int
) -> Producer:
    """Make a span that is a child of the request's span, although another thread may settle the
    promotion."""
    since, parent = getattr(future, "requested", (None, trace.INVALID_SPAN_CONTEXT))
    context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
    span = tracer.start_span(
        f"promote {future._topic}",
        context,
        start_time=since,
        attributes={
            **_messaging(future._topic, "promote"),
            "messaging.client.id": session.name,
            "exclusivelog.epoch": session.epoch,
            "exclusivelog.engine": future._engine.name,
            "exclusivelog.access_mode": session.mode,
            "exclusivelog.priority": session.priority,
        },
    )
    call = functools.partial(original, future, session, last_sequence)
    made: Producer = _traced(span, call, lambda producer: {})
    return made


def _hand_over(
    tracer: trace.Tracer, topics: Sequence[str], to: str, ledger: str | None = None
) -> trace.Span:
    name = topics[0] if len(topics) == 1 else f"{len(topics)} topics"
    attributes = _messaging(name, "hand over")
    if len(topics) != 1:
        del attributes["messaging.destination.name"]
    return tracer.start_span(
        f"hand over {name}",
        attributes={
            **attributes,
            "exclusivelog.target": to,
            **({} if ledger is None else {"exclusivelog.ledger": ledger}),
        },
    )


def _tell(span: trace.Span, moves: Iterable[Move]) -> Attributes:
    failed = []
    for move in moves:
        span.add_event(
            move.state,
            {
                "messaging.destination.name": move.topic,
                "exclusivelog.epoch": move.epoch,
                "exclusivelog.engine": move.target.name,
                "exclusivelog.reason": move.reason,
            },
        )
        failed += [] if move.ok else [f"{move.topic}: {move.reason or move.state}"]
    if failed:
        span.set_status(trace.StatusCode.ERROR, "; ".join(failed))
    return {}


def _names(topics: str | Iterable[str]) -> list[str]:
    return [topics] if isinstance(topics, str) else list(topics)


def _unload(
    tracer: trace.Tracer,
    original: Any,
    engine: Engine,
    topics: str | Iterable[str],
    to: str,
    *arguments: Any,
    **options: Any,
) -> list[Move]:
    names = _names(topics)
    span = _hand_over(tracer, names, to, engine.path)
    call = functools.partial(original, engine, names, to, *arguments, **options)
    moves: list[Move] = _traced(span, call, functools.partial(_tell, span))
    return moves


def _unload_async(
    tracer: trace.Tracer,
    original: Any,
    engine: Engine,
    topics: str | Iterable[str],
    to: str,
    *arguments: Any,
    **options: Any,
) -> Any:
    names = _names(topics)
    span = _hand_over(tracer, names, to, engine.path)
    try:
        future = original(engine, names, to, *arguments, **options)
    except BaseException as error:
        _fail(span, error)
        span.end()
        raise

    def ended(done: Any) -> None:
        try:
            _tell(span, done.result())
        except BaseException as error:  # also that it was cancelled
            _fail(span, error)
        span.end()

    future.add_done_callback(ended)
    return future


def _move(
    tracer: trace.Tracer,
    original: Any,
    producer: Producer,
    to: str,
    *arguments: Any,
    **options: Mapping[str, Any],
) -> Move:
    span = _hand_over(tracer, [producer.topic], to)
    call = functools.partial(original, producer, to, *arguments, **options)
    move: Move = _traced(span, call, lambda move: _tell(span, [move]))
    return move
