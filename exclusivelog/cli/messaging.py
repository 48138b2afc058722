"""`tail`, `get` and `send`: read and send messages."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

import exclusivelog as xl
from exclusivelog.cli.json_lines import InputError, arguments_of
from exclusivelog.cli.output import (
    BATCH,
    Table,
    decoded,
    message_facts,
    pairs_of,
    print_table,
    printable,
    read_some_of,
    time_of,
)
from exclusivelog.cli.program import (
    Argument,
    NumberCommand,
    as_json,
    ledger_path,
    open_to_read,
    open_to_write,
    program,
    start_of,
    topic_name,
    topic_to_append_to,
)
from exclusivelog.cli.streams import has_reader, lines_of

LOOK_SECONDS = 1.0  # how often `tail -f` looks whether its output is still read
READ_BYTES = 1 << 16
# The names of xl.AccessMode: a help text does not import it.
MODES = ("shared", "exclusive", "wait_for_exclusive", "exclusive_with_fencing")
MESSAGES = ("offset", "epoch", "time", "producer", "key", "value", "properties")


@program.command()
@ledger_path
@topic_name
@click.option("--follow", "-f", is_flag=True, help="At the end, wait for new messages.")
@click.option(
    "-n",
    "count",
    metavar="N",
    type=click.IntRange(min=0),
    help="The last N messages (default 10). With --from: the first N from there.",
)
@click.option(
    "--from",
    "--since",
    "start",
    metavar="earliest|latest|OFFSET|TIME|AGE",
    help="Start there, and show all messages up to the end. An AGE: 90s, 15m, 1h, 7d. A TIME "
    "without a zone is local.",
)
@as_json
def tail(
    path: str, topic: str, follow: bool, count: int | None, start: str | None, as_json: bool
) -> None:
    """Show a topic's messages.

    A line has offset, epoch, time, producer, key, value and properties, separated by tabs; on a
    terminal it is a row of a table. `send --json` reads what --json prints.
    """
    shown = _Shown(as_json)
    with open_to_read(path) as engine:
        with engine.topic(topic).reader() as reader:
            left = _move(reader, engine.topic(topic), count, start)
            while left is None or left > 0:
                batch = read_some_of(reader, BATCH if left is None else min(BATCH, left))
                if not batch and not follow:
                    return
                # When following, show the available messages before waiting for more.
                messages = batch or [_next(reader)]
                shown.print(messages)
                left = None if left is None else left - len(messages)


class _Shown:
    """What `tail` prints."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._table = (
            Table(MESSAGES, grows="value") if sys.stdout.isatty() and not as_json else None
        )

    def print(self, messages: Sequence[xl.Message]) -> None:
        """Print these messages."""
        if self._table is not None:
            self._table.print([*parts_of(m), ""][: len(MESSAGES)] for m in messages)
            return
        for message in messages:
            print(
                json.dumps(message_facts(message))
                if self._as_json
                else "\t".join(parts_of(message))
            )


def _next(reader: xl.Reader) -> xl.Message:
    """The next message; BrokenPipeError if the program that reads the output ends before it."""
    sys.stdout.flush()
    while True:
        try:
            return reader.read_next(timeout=LOOK_SECONDS)
        except xl.WaitTimeoutError:
            if not has_reader(sys.stdout.fileno()):
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from None


def _move(reader: xl.Reader, topic: xl.Topic, count: int | None, start: str | None) -> int | None:
    """Move the reader to where the options say; return how many messages to show, None for all."""
    if start is None:
        first = topic.next_offset - (10 if count is None else count)
        reader.seek(max(topic.first_offset, first))
        return None
    reader.seek(start_of(start, "--from"))
    return count


def parts_of(message: xl.Message) -> list[str]:
    """The parts of a message that a line shows."""
    parts: list[str] = [
        str(message.offset),
        str(message.epoch),
        time_of(message.publish_time),
        printable(message.producer_name),
        "-" if message.key is None else printable(decoded(message.key)),
        "(none)" if message.value is None else printable(decoded(message.value)),
    ]
    if message.properties:
        parts.append(printable(pairs_of(message.properties)))
    return parts


@program.command(cls=NumberCommand)
@ledger_path
@topic_name
@click.argument(
    "offset",
    cls=Argument,
    metavar="OFFSET",
    type=int,
    help="The message's offset; -1 is the last message, -2 the one before it.",
)
@click.option("--raw", is_flag=True, help="Write the value alone, byte for byte.")
@as_json
def get(path: str, topic: str, offset: int, raw: bool, as_json: bool) -> None:
    """Show one message. --raw writes its value as it is, so that it can go to a file."""
    if raw and as_json:
        raise click.UsageError("give --raw or --json, not both")
    with open_to_read(path) as engine:
        message = engine.topic(topic)[offset]
    if raw:
        if message.value is None:
            raise ValueError(f"topic {topic!r}: the message at {message.offset} has no value")
        sys.stdout.buffer.write(message.value)
    elif as_json:
        print(json.dumps(message_facts(message)))
    else:
        print_table(("name", "value"), _named_parts(message).items(), header=False)


def _named_parts(message: xl.Message) -> Mapping[str, object]:
    time, key, value = message.event_time, message.key, message.value
    return {
        "offset": message.offset,
        "epoch": message.epoch,
        "published": time_of(message.publish_time),
        "event time": "-" if time is None else _time_or_ms(time),
        "producer": message.producer_name,
        "sequence id": message.sequence_id,
        "key": "-" if key is None else decoded(key),
        "value": "(none)" if value is None else decoded(value),
        "properties": pairs_of(message.properties) or "-",
    }


def _time_or_ms(ms: int) -> str:
    """The time; its number where that is outside of what a calendar has."""
    try:
        return time_of(ms)
    except (ValueError, OverflowError):
        return f"{ms} ms"


@program.command()
@ledger_path
@topic_name
@click.argument(
    "values",
    cls=Argument,
    metavar="[VALUE]...",
    nargs=-1,
    help="Messages. Default: the lines of stdin.",
)
@click.option("--key", "-k", help="A key for every message.")
@click.option(
    "--mode", type=click.Choice(MODES), default="shared", help="The producer's access mode."
)
@click.option("--name", help="The producer's name; it has the sequence ids.")
@click.option("--priority", default=0, help="In the queue, higher priorities come first.")
@click.option(
    "--timeout", metavar="SECONDS", type=float, help="Wait in the queue at most this long."
)
@click.option(
    "--property",
    "properties",
    metavar="K=V",
    multiple=True,
    help="A property for every message. Repeatable.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Each message is a JSON object as tail --json prints it: value, key, properties, "
    "event_time.",
)
def send(
    path: str,
    topic: str,
    values: tuple[str, ...],
    key: str | None,
    mode: str,
    name: str | None,
    priority: int,
    timeout: float | None,
    properties: tuple[str, ...],
    as_json: bool,
) -> None:
    """Send messages, and print the offset of each once it is durable: a line with a number.

    The ledger and the topic are created if they are missing. With --json, a line that is no message
    ends the command with exit status 2; the lines before it were sent.
    """
    common = {"key": key, "properties": dict(_split(pair) for pair in properties)}
    source = _Source("VALUE" if values else "line", as_json, common)
    with open_to_write(path, create=True) as engine:
        target = topic_to_append_to(engine, topic)
        with target.producer(
            xl.AccessMode(mode), name=name, priority=priority, timeout=timeout
        ) as producer:
            for chunk in [_encode(values)] if values else lines_of(0, READ_BYTES):
                _send(producer, source, chunk)


class _Source:
    """Makes the arguments of `send` of the messages that the command is given, and counts these."""

    def __init__(self, what: str, as_json: bool, common: dict[str, Any]) -> None:
        self._what, self._as_json, self._common = what, as_json, common
        self._count = 0

    def arguments(self, given: bytes) -> dict[str, Any]:
        """Those of one message. InputError names it, and says what is wrong with it."""
        self._count += 1
        if not self._as_json:
            return {**self._common, "value": given}
        with self.named():
            own = arguments_of(given)
            own["properties"] = self._common["properties"] | own.get("properties", {})
            return {**self._common, **own}

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Turn an error about the arguments into one that names the message."""
        try:
            yield
        except xl.ExclusiveLogError:
            raise
        except (ValueError, TypeError) as error:
            if not self._as_json:
                raise
            raise InputError(f"--json: {self._what} {self._count}: {error}") from None


def _send(producer: xl.Producer, source: _Source, chunk: Sequence[bytes]) -> None:
    """Send messages, and print their offsets; up to one that is wrong, which raises an error."""
    receipts = []
    try:
        for given in chunk:
            arguments = source.arguments(given)
            with source.named():
                receipts.append(producer.send_async(**arguments))
    finally:
        for receipt in receipts:
            print(receipt.result())
        sys.stdout.flush()


def _encode(values: Sequence[str]) -> list[bytes]:
    return [os.fsencode(value) for value in values]  # the bytes that the shell gave us


def _split(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not equals:
        raise click.BadParameter(f"--property {pair}: it takes K=V")
    return name, value
