"""The options of the data source: what each means, and what it takes (docs/spark.md).

Options that Spark's Kafka source has, too, have the same names and meanings. An unknown option is
an error, and never ignored (rule A4).
"""

from __future__ import annotations

import datetime as dt
import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from exclusivelog.arguments import check_name
from exclusivelog.errors import ExclusiveLogError
from exclusivelog.messages import to_ms
from exclusivelog.once import Run, check_run, check_writable
from exclusivelog.spark.errors import OPTION, SourceError
from exclusivelog.types import AccessMode

EARLIEST, LATEST = "earliest", "latest"
VIEWS = ("messages", "epochs", "events", "owners", "producers", "topics", "txns", "runs")
DIRECT, INLINE = "direct", "inline"
INLINE_BYTES = 1 << 20
NAME = "exclusivelog"  # of the format
STAGING_NAME = "staging"
MOST = 2**63 - 1

WHICH = ("topic", "topics", "topicsPattern", "subscribe", "subscribePattern")
ACCESS = ("admin", "token", "token_file", "tls_trust_certs", "check_policies")  # to a cluster
READING = (
    *WHICH,
    *ACCESS,
    "path",
    "startingOffsets",
    "startingTimestamp",
    "failOnDataLoss",
    "minPartitions",
    "access",
)
BATCH = (*READING, "endingOffsets", "endingTimestamp", "view", "bucketMs", "topicIds")
STREAM = (*READING, "maxOffsetsPerTrigger", "maxBytesPerTrigger")
WRITING = ("path", "topic", "producerName", "producerAccessMode", "stagingDir", "inlineLimit")
BATCH_WRITING = (*WRITING, "txnAppId", "txnVersion")
STREAM_WRITING = (*WRITING, "checkpointLocation", "queryName")

Options = Mapping[str, str]
Where = str | int | dt.datetime  # earliest, latest, an offset, a time


def refuse(text: str) -> SourceError:
    """An error about an option."""
    return SourceError(OPTION, text)


def check_known(options: Options, known: tuple[str, ...], what: str) -> None:
    """Refuse options that this kind of reading or writing does not have."""
    names = {name.lower(): name for name in known}
    for name in options:
        if name.lower() not in names:
            close = difflib.get_close_matches(name.lower(), names, 1)
            hint = f"; is {names[close[0]]} meant?" if close else ""
            raise refuse(f"{name} is no option of {what}{hint} It takes {', '.join(known)}")


def ledger_path(options: Options) -> str:
    """The ledger's directory, absolute: an executor has a working directory of its own. Or the URL
    of a cluster's namespace."""
    path = options.get("path", "")
    if not path:
        raise refuse('path is missing: the ledger\'s directory, as in load("data/log")')
    if is_url(path):
        return path
    return os.path.abspath(re.sub(r"^file:(//)?", "", path))


def is_url(path: str) -> bool:
    """Is it the URL of a cluster's namespace?

    >>> is_url("pulsar://broker:6650/a/b"), is_url("data/log"), is_url("file:///data/log")
    (True, False, False)
    """
    return "://" in path and not path.startswith("file:")


def _access(options: Options, path: str) -> dict[str, str]:
    found = {name: options[name] for name in ACCESS if name in options}
    if found and not is_url(path):
        raise refuse(f"{next(iter(found))} is for clusters; a local ledger takes none")
    return found


# ---- reading -----------------------------------------------------------------------------


def view_of(options: Options) -> str:
    """The view to read."""
    return _one_of(options, "view", VIEWS)


@dataclass(frozen=True)
class Bounds:
    """The start or end of reading: a default place, and exceptions for some topics."""

    everywhere: Where
    topics: Mapping[str, Where]

    def of(self, topic: str) -> Where:
        """The place in one topic."""
        return self.topics.get(topic, self.everywhere)


@dataclass(frozen=True)
class ReadOptions:
    """The options of a reader. `names` are topics, or None: all that match `pattern`."""

    path: str
    names: tuple[str, ...] | None
    pattern: str
    start: Bounds
    end: Bounds
    fail_on_data_loss: bool
    min_partitions: int
    max_offsets: int | None
    max_bytes: int | None
    view: str
    inline: bool
    bucket_ms: int = 0
    ids: Mapping[str, int] = field(default_factory=dict)  # expected topic ids; others are an error
    access: Mapping[str, str] = field(default_factory=dict, repr=False)  # to a cluster


def batch_options(options: Options) -> ReadOptions:
    """The options of `spark.read`.

    >>> found = batch_options({"path": "log", "topic": "a", "startingOffsets": '{"a": 3}'})
    >>> found.names, found.start.of("a"), found.end.of("a"), found.view
    (('a',), 3, 'latest', 'messages')
    """
    check_known(options, BATCH, "spark.read")
    return _read_options(options, EARLIEST)


def stream_options(options: Options) -> ReadOptions:
    """The options of `spark.readStream`.

    >>> stream_options({"path": "log", "topic": "a", "endingOffsets": "latest"})
    Traceback (most recent call last):
        ...
    exclusivelog.spark.errors.SourceError: [EXCLUSIVELOG_OPTION] endingOffsets is no option of ...
    """
    check_known(options, STREAM, "spark.readStream")
    found = _read_options(options, LATEST)
    if found.max_offsets is not None and found.max_bytes is not None:
        raise refuse("maxOffsetsPerTrigger and maxBytesPerTrigger: one of them, or none")
    return found


def _read_options(options: Options, start: str) -> ReadOptions:
    view = view_of(options)
    names, pattern = _which(options, view)
    first, last = _bounds(options, "starting", start), _bounds(options, "ending", LATEST)
    for bounds, name in ((first, "startingOffsets"), (last, "endingOffsets")):
        for topic in bounds.topics:
            if not (re.fullmatch(pattern, topic) if names is None else topic in names):
                raise refuse(f"{name} names the topic {topic!r}, which is not among those read")
    path = ledger_path(options)
    return ReadOptions(
        path=path,
        access=_access(options, path),
        names=names,
        pattern=pattern,
        start=first,
        end=last,
        fail_on_data_loss=_one_of(options, "failOnDataLoss", ("true", "false")) == "true",
        min_partitions=_number(options, "minPartitions", 1) or 1,
        max_offsets=_number(options, "maxOffsetsPerTrigger", None),
        max_bytes=_number(options, "maxBytesPerTrigger", None),
        view=view,
        inline=_one_of(options, "access", (DIRECT, INLINE)) == INLINE,
        bucket_ms=_number(options, "bucketMs", 0) or 0,
        ids=_ids(options),
    )


def _ids(options: Options) -> dict[str, int]:
    value = options.get("topicIds", "{}")
    try:
        return {topic: int(number) for topic, number in json.loads(value).items()}
    except (ValueError, TypeError, AttributeError):
        raise refuse(f'topicIds={value!r}: it takes JSON such as {{"orders": 7}}') from None


def _which(options: Options, view: str) -> tuple[tuple[str, ...] | None, str]:
    given = [name for name in WHICH if options.get(name)]
    if len(given) > 1:
        raise refuse(f"{' and '.join(given)}: one of them")
    if not given:
        if view == "messages":
            raise refuse("topic is missing; or topics=a,b or topicsPattern=REGEX")
        return None, ".*"
    value = options[given[0]]
    if given[0].endswith("Pattern"):
        try:
            re.compile(value)
        except re.error as error:
            raise refuse(f"{given[0]}={value!r} is no regular expression: {error}") from None
        return None, value
    names = [value] if given[0] == "topic" else [name.strip() for name in value.split(",")]
    return tuple(dict.fromkeys(_topic_name(name, given[0]) for name in names)), ""


def _topic_name(name: str, argument: str) -> str:
    try:
        return check_name(name, argument)
    except ValueError as error:
        raise refuse(str(error)) from None


def _bounds(options: Options, end: str, default: str) -> Bounds:
    offsets, time = f"{end}Offsets", f"{end}Timestamp"
    if offsets in options and time in options:
        raise refuse(f"{offsets} and {time}: one of them")
    if time in options:
        return Bounds(_time(options[time], time), {})
    value = options.get(offsets, default).strip()
    if value in (EARLIEST, LATEST):
        return Bounds(value, {})
    try:
        topics = json.loads(value)
        return Bounds(default, {topic: _place(offset) for topic, offset in topics.items()})
    except (ValueError, AttributeError):
        raise refuse(
            f'{offsets}={value!r}: it takes earliest, latest, or JSON such as {{"orders": 23}}'
        ) from None


def _place(value: object) -> Where:
    # -2 and -1 are what Kafka's source calls them in JSON.
    if value in (EARLIEST, -2):
        return EARLIEST
    if value in (LATEST, -1):
        return LATEST
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(value)


def _time(value: str, name: str) -> dt.datetime:
    try:
        if value.strip().lstrip("-").isdecimal():
            time = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=int(value))
        else:
            time = dt.datetime.fromisoformat(value.strip())
        to_ms(time)
    except (ValueError, OverflowError):
        raise refuse(
            f"{name}={value!r}: it takes ISO 8601, such as 2026-01-31T12:00:00+00:00 (without an "
            "offset: local time), or ms since 1970"
        ) from None
    return time


def _one_of(options: Options, name: str, choices: tuple[str, ...]) -> str:
    value = options.get(name, choices[0]).strip().lower()
    if value not in choices:
        raise refuse(f"{name}={options[name]!r}: it takes {' or '.join(choices)}")
    return value


def _number(options: Options, name: str, default: int | None, least: int = 1) -> int | None:
    value = options.get(name)
    if value is None:
        return default
    if not value.strip().isdecimal() or not least <= int(value) <= MOST:
        raise refuse(f"{name}={value!r}: it takes a whole number from {least} on, below 2**63")
    return int(value)


# ---- writing -----------------------------------------------------------------------------


@dataclass(frozen=True)
class WriteOptions:
    """The options of a writer. `topic` None: the column of that name has the topic."""

    path: str
    topic: str | None
    producer: str | None
    access_mode: AccessMode
    staging: str
    inline_limit: int
    app_id: str | None = None
    version: int | None = None


def batch_write_options(options: Options) -> WriteOptions:
    """The options of `df.write`.

    >>> batch_write_options({"path": "/log", "topic": "a", "txnAppId": "job"})
    Traceback (most recent call last):
        ...
    exclusivelog.spark.errors.SourceError: [EXCLUSIVELOG_OPTION] txnAppId and txnVersion: both, ...
    """
    check_known(options, BATCH_WRITING, "df.write")
    app_id, version = options.get("txnAppId"), _number(options, "txnVersion", None, 0)
    if (app_id is None) != (version is None):
        raise refuse("txnAppId and txnVersion: both, or none")
    return _write_options(options, app_id, version)


def stream_write_options(options: Options) -> WriteOptions:
    """The options of `df.writeStream`, which is exactly once by its checkpoint."""
    for name in ("txnAppId", "txnVersion"):
        if name in options:
            raise refuse(f"{name} is for df.write; a stream is known by its checkpoint")
    check_known(options, STREAM_WRITING, "df.writeStream")
    return _write_options(options, None, None)


def _write_options(options: Options, app_id: str | None, version: int | None) -> WriteOptions:
    path, topic = ledger_path(options), options.get("topic")
    if is_url(path):
        raise refuse(
            "a batch is appended once by a transaction, which a cluster does not have; write to a "
            "local ledger, and mirror it, or send with a producer in foreachPartition"
        )
    try:
        if topic is not None:
            check_writable(topic)
        mode = AccessMode.parse(options.get("producerAccessMode", "exclusive_with_fencing"))
        producer = options.get("producerName")
        check_run(Run(app_id, None, producer or "spark", mode))
    except (ValueError, ExclusiveLogError) as error:
        raise refuse(str(error)) from None
    limit = _number(options, "inlineLimit", INLINE_BYTES, 0)
    staging = options.get("stagingDir") or os.path.join(path, STAGING_NAME)
    return WriteOptions(
        path=path,
        topic=topic,
        producer=producer,
        access_mode=mode,
        staging=os.path.abspath(staging),
        inline_limit=INLINE_BYTES if limit is None else limit,
        app_id=app_id,
        version=version,
    )


LONGEST = 255  # bytes of a file's name


def file_name(quoted: str) -> str:
    """A quoted name that is valid for a file. Quoting can triple the bytes of a name, so long ones
    are hashed.

    >>> file_name("orders"), len(file_name("%E6" * 255))
    ('orders', 64)
    """
    return quoted if len(quoted) <= LONGEST else hashlib.sha256(quoted.encode()).hexdigest()
