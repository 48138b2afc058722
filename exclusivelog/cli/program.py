"""The command group, the arguments that commands share, and the exit status."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NoReturn

import click

import exclusivelog as xl
from exclusivelog.cli import names
from exclusivelog.cli.examples import NOT_FOLDED, SECTIONS, examples_of
from exclusivelog.cli.names import ENGINE_NAME, TYPED
from exclusivelog.cli.streams import becomes_writable
from exclusivelog.foreign import Ignoring, is_raised_by_a_handler, pass_on_foreign
from exclusivelog.version import __version__

WAITED_MS = 1000  # for a program that reads stderr, if the pipe is full
INTERRUPTED, PIPE_CLOSED = 128 + 2, 128 + 13  # a shell's exit statuses for SIGINT and SIGPIPE
AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

# Advice in the library's errors, and the option of the command that replaces it.
ADVICE = tuple(
    (re.compile(pattern), said)
    for pattern, said in (
        (r'seek\("(earliest|latest)"\) ', r"--from \1 "),
        (r"seek\((\d+)\) steps over it", r"--from \1 goes on behind it"),
        (r" holds no ledger, and (?:readonly=True|create=False)", " holds no ledger"),
        (r"^to=('.*?') is not", r"--to \1 is not"),
        (r",? or open it with readonly=True", ""),
        (r" and open it with readonly=True, or read a backup", ", or read a backup"),
        (r"topic\.compression\(\.\.\.\)", "exclusivelog compression PATH TOPIC METHOD"),
        (r"admin=, --admin", "--admin"),
        (r"check_policies=False, --", "--"),
        (r"^check_policies= ?", "--unchecked-policies "),
        (r", or None(?: for never)?$", ""),
        (r"; open\(\) creates it$", ""),
        (r"^(topic)=('.*?') is internal", r"\1 \2 is internal"),
        (
            r"open (?:it|the ledger) with a larger map_size",
            "let a program open it with a larger map_size",
        ),
    )
)


class _Command(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments."""
        ctx.meta[TYPED] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error is printed while its context can tell what is typed for it."""
        with _exit_status_of_a_shell():
            return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, which are not folded."""
        formatter.write(f"\n{(self.epilog or '').removeprefix(NOT_FOLDED)}\n")

    def get_short_help_str(self, limit: int = 0) -> str:
        """The summary in the list of commands, which is never cut."""
        return super().get_short_help_str(1000)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options; those for clusters come last, under their own heading."""
        given = self.get_params(ctx)
        late = [each for each in given if isinstance(each, AccessOption)]
        with _hidden(late):
            super().format_options(ctx, formatter)
        if late:
            with formatter.section("Options for a cluster"):
                formatter.write_dl([each.get_help_record(ctx) or ("", "") for each in late])


@contextlib.contextmanager
def _hidden(options: Sequence[click.Option]) -> Iterator[None]:
    for each in options:
        each.hidden = True
    try:
        yield
    finally:
        for each in options:
            each.hidden = False


NEGATIVE = re.compile(r"-\d+")


class NumberCommand(_Command):
    """A command whose last argument may be a negative number, such as -1, which is no option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments."""
        numbers = [each for each in args if NEGATIVE.fullmatch(each)]
        if numbers and "--" not in args:
            args = [*(each for each in args if each not in numbers), "--", *numbers]
        return super().parse_args(ctx, args)


class _Commands(click.Group):
    """The commands in a fixed order; an error is printed as one line."""

    command_class = _Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added, not sorted by name."""
        return list(self.commands)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command, with its examples at the end of its help text."""
        super().add_command(cmd, name)
        cmd.epilog = examples_of(name or cmd.name or "")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by what they are for."""
        width = max(map(len, self.commands))
        for heading, listed in SECTIONS.items():
            found = [(name, self.commands[name].get_short_help_str()) for name in listed]
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), said) for name, said in found])

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Read the first arguments; prints the help text, and the version."""
        with _exit_status_of_a_shell():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _exit_status_of_a_shell():
            return super().invoke(ctx)


class Argument(click.Argument):
    """An argument with a help text, which click supports from 8.5 on."""

    def __init__(self, names: Sequence[str], help: str, **rest: Any) -> None:
        super().__init__(names, **rest)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """The line of the help text."""
        return self.metavar or "", self.help or ""


@contextlib.contextmanager
def _exit_status_of_a_shell() -> Iterator[None]:
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except BrokenPipeError as error:
        pass_on_foreign(error)
        leave(PIPE_CLOSED)
    except click.exceptions.Exit:
        raise
    except click.ClickException as error:  # before the library's errors, which import the core
        _tell(error.show)
        leave(error.exit_code)
    except (xl.ExclusiveLogError, ValueError, IndexError, OSError, ImportError) as error:
        if isinstance(error, ImportError) and error.name is not None:
            raise  # raised by Python: a defect; the library's own errors name the missing extra
        if is_raised_by_a_handler(error):  # of the program that runs the command as a function
            raise
        from exclusivelog.cli.output import printable_lines  # here: help does not need it

        text = printable_lines(f"exclusivelog: {_as_parameter(advised(_text_of(error)))}")
        _tell(lambda: print(text, file=sys.stderr))
        leave(1)


def _text_of(error: BaseException) -> str:
    """The text of an error; of one of the system, the file and what is wrong, without its number.

    >>> _text_of(FileNotFoundError(2, "No such file or directory", "page/index.html"))
    'page/index.html: No such file or directory'
    """
    if isinstance(error, xl.ExclusiveLogError) or not isinstance(error, OSError):
        return str(error)
    names = (each for each in (error.filename, error.filename2) if each is not None)
    parts = (*(os.fsdecode(name) for name in names if not isinstance(name, int)), error.strerror)
    return ": ".join(filter(None, parts)) or str(error)


def advised(text: str) -> str:
    """The text of an error, with options of the command instead of the library's calls.

    >>> advised('2 was trimmed. seek("earliest") continues at the first message that is left')
    '2 was trimmed. --from earliest continues at the first message that is left'
    """
    for pattern, said in ADVICE:
        text = pattern.sub(said, text)
    return text


KEYWORD = re.compile(r"(\w+)= ?")
METAVAR = re.compile("[A-Z]+")


def _as_parameter(text: str) -> str:
    """An error about an argument of the library, about what is typed for it: --timeout 5 instead of
    timeout=5, and TOPIC instead of topic=."""
    found, context = KEYWORD.match(text), click.get_current_context(silent=True)
    if found is None or context is None:
        return text
    typed = (_shown_as(each) for each in context.command.params if each.name == found[1])
    name = next(typed, None)
    return text if name is None else f"{name} {text[found.end() :]}"


def _shown_as(parameter: click.Parameter) -> str:
    metavar = METAVAR.search(parameter.human_readable_name)
    if isinstance(parameter, click.Argument) and metavar is not None:
        return metavar[0]
    return max(parameter.opts, key=len)


def _tell(write: Callable[[], None]) -> None:
    """Write to stderr, unless that is closed or blocked: then only the exit status reports the
    error."""
    from exclusivelog.logs import is_blocked

    with Ignoring(OSError):
        if not is_blocked(sys.stderr) or becomes_writable(sys.stderr, WAITED_MS):
            write()


def leave(status: int) -> NoReturn:
    """End the process with this exit status."""
    # If the reader of the pipe has ended or the disk is full, buffered output cannot be written.
    # The interpreter would try again at its end, and change the exit status.
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError as error:
            pass_on_foreign(error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    raise SystemExit(status)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(
    __version__, message="%(prog)s %(version)s", help="Show the version, and exit."
)
@click.pass_context
def program(context: click.Context) -> None:
    """Inspect and maintain an append-only log with one fenced writer (a ledger)."""
    if context.invoked_subcommand is None:
        _tell(lambda: click.echo(context.get_help(), err=True))
        leave(2)


# Accepts any path, also one that is not a directory: opening the ledger raises the clearer error.
PATH = click.Path(readable=False)


class _Directory(click.Path):
    """The same for what is no single file: - is refused, which elsewhere is stdin or stdout."""

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> Any:
        """The path."""
        if value == "-":
            self.fail(
                "this needs a directory, and - is a stream; one of that name is ./-", param, ctx
            )
        return super().convert(value, param, ctx)


DIRECTORY = _Directory(readable=False)


def is_stream(file: str | None) -> bool:
    """Does an argument FILE mean stdin or stdout? A file of that name is ./-"""
    return file is None or file == "-"


@contextlib.contextmanager
def naming(file: str, done: str, advice: str = "") -> Iterator[None]:
    """Let an error of the system name the file that cannot be, say, read."""
    try:
        yield
    except (xl.ExclusiveLogError, BrokenPipeError):  # the latter has an exit status of its own
        raise
    except OSError as error:
        pass_on_foreign(error)
        text = f"{file} cannot be {done}: {error.strerror}{advice}"
        raise xl.ExclusiveLogError(text) from None


# ---- the log, and access to a cluster -----------------------------------------------------

ACCESS = "exclusivelog.access"  # where a context keeps the options of AccessOption
Command = Callable[..., Any]


class AccessOption(click.Option):
    """An option for opening the URL of a cluster; `access` returns all of them."""

    def __init__(self, names: Sequence[str], **rest: Any) -> None:
        super().__init__(names, expose_value=False, callback=_keep, **rest)


def _keep(context: click.Context, option: click.Parameter, value: Any) -> None:
    if value:
        context.meta.setdefault(ACCESS, {})[option.name] = value


ACCESS_OPTIONS = (
    click.option(
        "--admin",
        cls=AccessOption,
        metavar="URL,...",
        help="Admin API. Default: EXCLUSIVELOG_ADMIN, or port 8080 (TLS: 8443) of each host.",
    ),
    click.option(
        "--token-file",
        cls=AccessOption,
        metavar="FILE",
        type=PATH,
        help="A file with a token. Default: the environment variable EXCLUSIVELOG_TOKEN.",
    ),
    click.option(
        "--tls-trust-certs",
        cls=AccessOption,
        metavar="FILE",
        type=PATH,
        help="Certificates to trust, for pulsar+ssl. Default: EXCLUSIVELOG_TLS_TRUST_CERTS.",
    ),
    click.option(
        "--unchecked-policies",
        cls=AccessOption,
        is_flag=True,
        help="Do not check that the namespace deduplicates and keeps its messages.",
    ),
)


def access() -> dict[str, Any]:
    """The arguments of `open`, `Mirror` and `restore` for access to a cluster."""
    given = dict(click.get_current_context().meta.get(ACCESS, {}))
    if given.pop("unchecked_policies", False):
        given["check_policies"] = False
    return given


def access_arguments() -> list[str]:
    """The same as command-line arguments, for another process."""
    given = click.get_current_context().meta.get(ACCESS, {})
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in given.items()
    ]


def access_options(command: Command) -> Command:
    """Add the options of `access` to a command."""
    for option in reversed(ACCESS_OPTIONS):
        command = option(command)
    return command


local_path = click.argument(
    "path", cls=Argument, metavar="PATH", type=DIRECTORY, help="The directory of the log."
)


def ledger_path(command: Command) -> Command:
    """Add the argument PATH, and the options for the case that it is a URL."""
    argument = click.argument(
        "path",
        cls=Argument,
        metavar="PATH",
        type=DIRECTORY,
        help="The directory of the log, or a namespace of a cluster: "
        "pulsar://host:6650/tenant/namespace.",
    )
    return argument(access_options(command))


topic_name = click.argument(
    "topic",
    cls=Argument,
    metavar="TOPIC",
    help="The topic's name.",
    shell_complete=names.topics,
)


maybe_topic = click.argument(
    "topic",
    cls=Argument,
    metavar="[TOPIC]",
    required=False,
    help="Only this topic.",
    shell_complete=names.topics,
)


maybe_topics = click.argument(
    "topics",
    cls=Argument,
    metavar="[TOPIC]...",
    nargs=-1,
    help="Only these. Default: all.",
    shell_complete=names.topics,
)


def maybe_group(complete: names.Completion) -> Callable[[Command], Command]:
    """Add the argument GROUP, of which a shell completes the names."""
    return click.argument(
        "group",
        cls=Argument,
        metavar="[GROUP]",
        required=False,
        help="Only this group.",
        shell_complete=complete,
    )


as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print all fields, one JSON object per line."
)


# ---- what cannot be undone ----------------------------------------------------------------

yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
UNDONE = "This cannot be undone."


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; without one, refuse unless `yes`."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} {UNDONE[:-1]}: give --yes")
    click.confirm(f"{question} {UNDONE}", abort=True, err=True)


def ask(question: str, yes: bool) -> None:
    """Ask on a terminal. Without one, a script has been told what to remove."""
    if not yes and sys.stdin.isatty():
        click.confirm(f"{question} {UNDONE}", abort=True, err=True)


def open_to_read(path: str) -> xl.Engine:
    """Open a log for reading."""
    return xl.open(path, ENGINE_NAME, readonly=True, **access())


def open_to_write(path: str, *, create: bool = False) -> xl.Engine:
    """Open a log for writing. `create`: create it if it does not exist."""
    return xl.open(path, ENGINE_NAME, create=create, **access())


def topic_to_append_to(engine: xl.Engine, name: str) -> xl.Topic:
    """The topic; ValueError if it holds a map or a state, which messages would spoil."""
    topic = engine.topic(name)
    if topic.kind in ("map", "state"):
        raise ValueError(
            f"topic {name!r} holds a {topic.kind}, which could not be read any more after a "
            "message of another kind; change it by a program, with SharedMap or SharedState"
        )
    return topic


def age_of(text: str) -> float | None:
    """The seconds of 90s, 15m, 24h or 7d; None for another text.

    >>> age_of("1.5h"), age_of("90")
    (5400.0, None)
    """
    found = AGE.fullmatch(text)
    return None if found is None else float(found[1]) * SECONDS[found[2]]


def start_of(text: str, option: str) -> Any:
    """What `seek` takes: "earliest", "latest", an offset, or a time."""
    if text in ("earliest", "latest"):
        return text
    try:
        if text.isdecimal() and (offset := int(text)) < 1 << 63:
            return offset
        if (age := age_of(text)) is not None:
            return datetime.now().astimezone() - timedelta(seconds=age)
        return datetime.fromisoformat(text).astimezone()  # without a zone: local time
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{_as_typed(option)} {text:.80}: it takes earliest, latest, an offset, an age such "
            "as 90s, 15m, 24h or 7d, or a time such as 2026-01-31T12:00 or 2026-01-31T12:00Z"
        ) from None


SYNONYMS = {"--from": "--since"}


def _as_typed(option: str) -> str:
    """The option by that of its names that was typed."""
    other = SYNONYMS.get(option)
    context = click.get_current_context(silent=True)
    typed = () if context is None else context.meta.get(TYPED, ())
    return other if other and other in {each.partition("=")[0] for each in typed} else option
