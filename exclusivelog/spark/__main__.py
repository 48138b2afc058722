"""The pipelines as commands: `python -m exclusivelog.spark COMMAND ...`, `--help` tells more.

Progress goes to stderr, results to stdout. Exit status: 0; 1 for an error, or an audit that found a
fault; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

import exclusivelog as xl
from exclusivelog.foreign import is_raised_by_a_handler
from exclusivelog.spark.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHUNK = 5_000_000
CODED = re.compile(r"\[EXCLUSIVELOG_\w+\].*")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments.

    >>> parse(["archive", "log", "orders", "to", "--keep", "30"]).keep
    datetime.timedelta(days=30)
    """
    parser = argparse.ArgumentParser(
        prog="python -m exclusivelog.spark", description="Pipelines on a ledger, run by Spark."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_archive, _add_compact, _add_replay, _add_audit, _add_report):
        command = add(commands)
        command.add_argument("--master", default="local[*]", help="where Spark runs (%(default)s)")
        command.add_argument(
            "--conf",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            type=_pair,
            help="a Spark setting; repeatable",
        )
        if add in (_add_archive, _add_audit):
            _add_access(command)
        command.add_argument("--quiet", action="store_true", help="show no progress")
    return parser.parse_args(arguments)


Parser = argparse.ArgumentParser
if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]  # the type has no public name


def _add(commands: Commands, name: str, text: str) -> Parser:
    return commands.add_parser(name, help=text, description=text)


ACCESS = ("admin", "token_file", "tls_trust_certs")


def _add_access(command: Parser) -> None:
    command.add_argument("--admin", metavar="URL", help="a cluster's admin API")
    command.add_argument(
        "--token-file", metavar="FILE", help="a file with a token (default: $EXCLUSIVELOG_TOKEN)"
    )
    command.add_argument("--tls-trust-certs", metavar="FILE", help="certificates to trust")


def _access(given: argparse.Namespace) -> dict[str, str]:
    found = {name: getattr(given, name) for name in ACCESS}
    return {name: value for name, value in found.items() if value is not None}


def _add_archive(commands: Commands) -> Parser:
    parser = _add(commands, "archive", "copy new messages of a topic to Parquet; then trim it")
    parser.add_argument("ledger")
    parser.add_argument("topic")
    parser.add_argument("to", help="a directory, or an address that Spark can write to")
    parser.add_argument("--before", type=_place, metavar="OFFSET|TIME", help="stop there")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="messages per range (%(default)s)")
    parser.add_argument(
        "--keep",
        type=_days,
        metavar="DAYS",
        help="then trim archived messages older than this; 0: all",
    )
    return parser


def _add_compact(commands: Commands) -> Parser:
    parser = _add(commands, "compact", "write each key's last message to Parquet or a topic")
    parser.add_argument("ledger")
    parser.add_argument("topic")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", metavar="DIR", help="write Parquet there, replacing its contents")
    target.add_argument("--to-topic", metavar="TOPIC", help="a topic of the same ledger")
    return parser


def _add_replay(commands: Commands) -> Parser:
    parser = _add(commands, "replay", "copy a range of a topic or an archive to another topic")
    parser.add_argument("source", help="a ledger, or an archive")
    parser.add_argument("topic")
    parser.add_argument("to", help="the ledger to append to")
    parser.add_argument("--to-topic", metavar="TOPIC", help="its topic (default: the same name)")
    parser.add_argument("--start", type=int, metavar="OFFSET", help="the first message")
    parser.add_argument("--end", type=int, metavar="OFFSET", help="the end, exclusive")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="messages at once (%(default)s)")
    return parser


def _add_audit(commands: Commands) -> Parser:
    parser = _add(commands, "audit", "check epochs, offsets and producers; exit status 1: a fault")
    parser.add_argument("ledger")
    parser.add_argument("topics", nargs="*", metavar="topic", help="only these")
    return parser


def _add_report(commands: Commands) -> Parser:
    parser = _add(commands, "report", "write a page: leaders, cost of take-overs, load over time")
    parser.add_argument("ledger")
    parser.add_argument("to", metavar="to.html")
    parser.add_argument("topics", nargs="*", metavar="topic", help="only these")
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: it takes NAME=VALUE")
    return name, value


def _place(text: str) -> int | dt.datetime:
    try:
        return int(text) if text.isdecimal() else dt.datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: it takes an offset, or a time such as 2026-01-31T12:00"
        ) from None


def _days(text: str) -> dt.timedelta:
    try:
        return dt.timedelta(days=abs(float(text)))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r}: it takes days") from None


# ---- running -----------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    given = parse(arguments)
    out = None if given.quiet else sys.stderr
    try:
        with _session(given) as spark:
            return 0 if COMMANDS[given.command](spark, given, out) else 1
    except KeyboardInterrupt:
        return 130
    except (xl.ExclusiveLogError, ValueError, OSError) as error:
        if is_raised_by_a_handler(error):  # of the program that runs the command as a function
            raise
        print(f"exclusivelog.spark: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # Spark's text, which contains ours and a stack
        found = CODED.search(str(error))
        if found is None or is_raised_by_a_handler(error):
            raise
        print(f"exclusivelog.spark: {found[0]}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _session(given: argparse.Namespace) -> Iterator[SparkSession]:
    if given.master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # else Spark prints a warning
    spark = local_session(given.master, dict(given.conf))
    try:
        yield spark
    finally:
        spark.stop()


def _archive(spark: SparkSession, given: argparse.Namespace, out: TextIO | None) -> bool:
    from exclusivelog.spark import archive

    done = archive.run(
        spark,
        given.ledger,
        given.topic,
        given.to,
        before=given.before,
        chunk=given.chunk,
        keep=given.keep,
        out=out,
        access=_access(given),
    )
    print(
        f"{done.topic}: offsets {done.start} to {done.end} archived now, all before {done.end} "
        f"by now; the topic begins at {done.first_offset}"
    )
    return True


def _compact(spark: SparkSession, given: argparse.Namespace, out: TextIO | None) -> bool:
    from exclusivelog.spark import compact

    done = compact.run(
        spark, given.ledger, given.topic, to=given.to, to_topic=given.to_topic, out=out
    )
    keys = "nothing new" if done.keys is None else f"{done.keys} keys"
    print(f"{done.topic} before offset {done.end}: {keys}")
    return True


def _replay(spark: SparkSession, given: argparse.Namespace, out: TextIO | None) -> bool:
    from exclusivelog.spark import replay

    done = replay.run(
        spark,
        given.source,
        given.topic,
        given.to,
        to_topic=given.to_topic,
        start=given.start,
        end=given.end,
        chunk=given.chunk,
        out=out,
    )
    print(f"{done.messages} messages replayed, offsets {done.start} to {done.end}")
    return True


def _audit(spark: SparkSession, given: argparse.Namespace, out: TextIO | None) -> bool:
    from exclusivelog.spark import audit

    verdicts = audit.run(spark, given.ledger, given.topics or None, out=out, access=_access(given))
    for verdict in verdicts:
        mark = "ok    " if verdict.holds else "FAILED"
        print(f"{mark}\t{verdict.topic}\t{verdict.claim}\t{verdict.facts}")
    return all(verdict.holds for verdict in verdicts)


def _report(spark: SparkSession, given: argparse.Namespace, out: TextIO | None) -> bool:
    from exclusivelog.spark import report

    told = report.run(spark, given.ledger, given.to, given.topics or None, out=out)
    count = sum(len(story.take_overs) for story in told.stories)
    print(f"{given.to}: {len(told.stories)} topics, {count} take-overs")
    return all(verdict.holds for verdict in told.verdicts)


COMMANDS = {
    "archive": _archive,
    "compact": _compact,
    "replay": _replay,
    "audit": _audit,
    "report": _report,
}

if __name__ == "__main__":
    sys.exit(main())
