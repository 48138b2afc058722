"""Configuration that several processes share and watch.

    $ python examples/dynamic_config.py data/log --name service-1       # watches; and others
    $ python examples/dynamic_config.py data/log --set host=db-2 port=7002
    $ python examples/dynamic_config.py data/log --double limit

Each watcher has the configuration as a `SharedMap`, follows the map's topic, and applies every
change at once: no process polls, and none has to be told to reload. Settings that belong together
are put in one write, and no process ever sees only one of them changed. An administrator who
computes a setting from its old value compares and sets, so that no change of another is lost.

dynamic_config_trial.py kills a watcher, and checks what all of them see.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import exclusivelog as xl

CONFIG = "config"
Config = dict[str, Any]


def watch(engine: xl.Engine, react: Callable[[Config], None]) -> None:
    """Call `react` with the configuration as it is, and after every change."""
    with xl.SharedMap[str, Any](engine.topic(CONFIG)) as config:
        changes = engine.topic(CONFIG).reader("latest")
        react(dict(config.scan(latest=True)))
        for _ in changes.follow():
            react(dict(config.scan(latest=True)))


def double(
    config: xl.SharedMap[str, Any], key: str, when_read: Callable[[], object] = lambda: None
) -> list[bool]:
    """Double a number by compare-and-set; return for each try whether it succeeded."""
    tries: list[bool] = []
    while not any(tries):
        number: int = config.get(key, latest=True) or 0
        if not tries:
            when_read()
        tries.append(bool(config.replace(key, number, 2 * number)))
    return tries


def main() -> None:
    """Watch, or change the configuration."""
    parser = argparse.ArgumentParser(description="Configuration that processes share.")
    parser.add_argument("path", help="the ledger's directory")
    parser.add_argument("--name", help="watch, under this name")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="in one write")
    parser.add_argument("--double", metavar="KEY", help="a number")
    options = parser.parse_args()
    with xl.open(options.path, options.name) as engine:
        if not options.set and not options.double:
            watch(engine, lambda config: print(config, flush=True))
        with xl.SharedMap[str, Any](engine.topic(CONFIG)) as config:
            config.put_all(dict(_pair(each) for each in options.set))
            if options.double:
                double(config, options.double)


def _pair(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, int(value) if value.isdigit() else value


if __name__ == "__main__":
    main()
