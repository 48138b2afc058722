"""A trial of dynamic_config.py: what watchers see, with one killed and two administrators.

    $ python examples/dynamic_config_trial.py

1. All processes see a change of one process within milliseconds.
2. Host and port belong together. They are put in one write, and no process ever sees only one of
   the two changed.
3. Two administrators change the same setting at the same time, each based on the value it has
   read. One succeeds; the other one is told, and reads again.
4. A watcher is killed, and restarted after the next changes. It has the newest configuration at
   once, from a snapshot; the messages before it have been trimmed.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dynamic_config import CONFIG, Config, double, watch
from processes import PATIENCE, directory, processes, run, until, verdict

import exclusivelog as xl

SEEN = "seen"


def take_part(path: str, name: str) -> None:
    """A watcher, in a process of its own: it reports what it sees."""
    first = True

    def report(config: Config) -> None:
        nonlocal first
        seen.send({"watcher": name, "pid": os.getpid(), "first": first, "config": config})
        first = False

    with xl.open(path, name) as engine:
        with engine.topic(SEEN).producer(serializer="json") as seen:
            watch(engine, report)


class Watched:
    """What each watcher saw last, and everything that any of them saw."""

    def __init__(self, engine: xl.Engine) -> None:
        self.last: dict[str, Config] = {}
        self.all: list[Config] = []
        self.first: dict[int, Config] = {}  # by process id
        self._reader = engine.topic(SEEN).reader("latest", deserializer="json")
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        try:
            for message in self._reader.follow():
                seen = message.value
                self.all.append(seen["config"])
                if seen["first"]:
                    self.first[seen["pid"]] = seen["config"]
                self.last[seen["watcher"]] = seen["config"]
        except xl.EngineClosedError:
            return

    def await_change(self, watchers: set[str], key: str, value: object) -> float:
        """Wait until all of these watchers have seen it; return the seconds that it took."""
        begun = time.monotonic()
        until(
            f"{watchers} see {key}={value!r}",
            lambda: all(self.last.get(name, {}).get(key) == value for name in watchers),
        )
        return time.monotonic() - begun


def main() -> int:
    """Change the configuration, and check what the watchers see."""
    parser = argparse.ArgumentParser(description="Configuration that processes share.")
    parser.add_argument("--watchers", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--changes", type=int, default=40, help="of host and port (default: 40)")
    parser.add_argument(
        "--slowest",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="until a change must be seen (default: 5)",
    )
    parser.add_argument("--path", help="the ledger's directory, kept (default: a temporary one)")
    options = parser.parse_args()
    names = {f"watcher-{number}" for number in range(1, options.watchers + 1)}
    with (
        directory(options.path) as path,
        xl.open(path, "a") as engine,
        xl.open(path, "b") as rival,
        xl.SharedMap[str, Any](engine.topic(CONFIG)) as config,
        processes() as start,
    ):
        config.put_all({"limit": 10, "host": "host-0", "port": 7000})
        watched = Watched(engine)
        running = {name: start(name, take_part, path, name) for name in sorted(names)}
        watched.await_change(names, "limit", 10)

        took: list[float] = []
        for number in range(1, options.changes + 1):
            config.put_all({"host": f"host-{number}", "port": 7000 + number})
            took.append(watched.await_change(names, "port", 7000 + number))
        mean, most = 1000 * sum(took) / len(took), 1000 * max(took)
        print(f"{len(took)} changes, seen by {len(names)} after {mean:.1f} ms, at most {most:.1f}")

        both = threading.Barrier(2)
        with xl.SharedMap[str, Any](rival.topic(CONFIG)) as other, ThreadPoolExecutor(2) as pool:

            def double_at_once(admin: xl.SharedMap[str, Any]) -> list[bool]:
                return double(admin, "limit", lambda: both.wait(PATIENCE))

            tries = list(pool.map(double_at_once, (config, other)))
        print(f"two administrators double the limit: {sorted(tries)}, and it is {config['limit']}")
        watched.await_change(names, "limit", 40)

        killed = min(names)
        running[killed].kill()
        running[killed].join()
        config.put("limit", 50)
        watched.await_change(names - {killed}, "limit", 50)
        trimmed = engine.topic(CONFIG).trim(before=config.snapshot())
        again = start(killed, take_part, path, killed)
        watched.await_change(names, "limit", 50)
        first = watched.first[again.pid or 0]
        print(f"{killed}, restarted after a trim to offset {trimmed}, begins with {first}\n")

        torn = [seen for seen in watched.all if seen["host"][5:] != str(seen["port"] - 7000)]
        return verdict(
            {
                "every change was seen by all, in time": max(took) < options.slowest,
                "no process saw a host with another host's port": not torn,
                "of two administrators one succeeded first, the other retried": sorted(tries)
                == [[False, True], [True]]
                and config["limit"] == 50,
                "the restarted watcher began with the newest configuration": trimmed > 0
                and first == dict(config.scan()),
            }
        )


if __name__ == "__main__":
    run(main)
