"""`completion`: a script with which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from exclusivelog.cli.program import Argument, program

SHELLS = ("bash", "zsh", "fish")


@program.command()
@click.argument(
    "shell",
    cls=Argument,
    metavar="bash|zsh|fish",
    type=click.Choice(SHELLS),
    help="The shell that reads it.",
)
def completion(shell: str) -> None:
    """Print the completion for a shell.

    bash: add eval "$(exclusivelog completion bash)" to ~/.bashrc; zsh: the same to ~/.zshrc; fish:
    exclusivelog completion fish > ~/.config/fish/completions/exclusivelog.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    print(kind(program, {}, "exclusivelog", "_EXCLUSIVELOG_COMPLETE").source())
