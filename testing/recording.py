"""A session of `exclusivelog top`, recorded: a real ledger, real processes, a real terminal.

`python -m testing.recording` prints the scenes, and with --write puts them into docs/operations.md.

>>> outline("a 12  c\\n\\nid 0123456789abcdef, 1.5 s")
['a # c', 'id #, # s']
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from pathlib import Path

import exclusivelog as xl
from testing.operations import PAGE
from testing.processes import State, open_producer, until, workers
from testing.terminal import Terminal

SIZE = 24, 80
# (keys that are typed, what has to stand on the screen then: up to the last line, drawn last)
SCENES = (
    ("", r"orders +[1-9][\d,]* .*ann \(pid \d+\) +1 +\d(?s:.)*billing/orders own(?s:.)*q quit\Z"),
    ("s/bil\r", r"1 of 3 topics by topic(?s:.)*q quit\Z"),
    ("/\x1bjuworker-2", r"unload orders to the engine \(name or id\): worker-2_\Z"),
    ("\r", r"bob \(pid (?s:.)*grant \(hand-over\)(?s:.)*orders owned 2 worker-1 worker-2 -\Z"),
)


def send_for_ever(state: State) -> None:
    """Send in the background, a hundred messages at a time, until the topic is lost."""

    def work() -> None:
        with state.topic.producer("wait_for_exclusive", name="ann") as producer:
            try:
                while True:
                    producer.send_many([b"an order"] * 100)
                    pause.wait(0.05)
            except xl.ProducerFencedError:
                pass

    pause = threading.Event()
    threading.Thread(target=work, daemon=True).start()


def session(path: Path) -> list[str]:
    """What the screen shows at each scene."""
    with workers() as make, xl.open(str(path), "watch") as engine:
        first = make(str(path), "worker-1")
        first.call(send_for_ever)
        until(lambda: engine.topic("orders").owner)
        second = make(str(path), "worker-2")
        second.start(open_producer, "wait_for_exclusive", name="bob")
        until(lambda: engine.topic("orders").waiters)
        engine.topic("orders").reader(group="billing").commit()
        for name in ("bills", "returns"):
            engine.topic(name).producer(name="clerk").send(b"a")
        command = [sys.executable, "-m", "exclusivelog", "top", path.name, "--interval", "0.3"]
        shown = []
        with Terminal(command, SIZE, directory=path.parent) as screen:
            for keys, expected in SCENES:
                screen.type(keys)
                screen.see(expected)
                shown.append(screen.text())
            screen.type("q")
            assert screen.wait() == 0
        second.answer()
        return shown


def outline(scene: str) -> list[str]:
    """A scene without what differs from one run to the next: numbers, times, ids, and widths."""
    text = re.sub(r"\b[0-9a-f]{16}\b", "#", scene)
    text = re.sub(r"(?<![\w-])\d(?:[\d,.:]*\d)?\b", "#", text)
    text = re.sub("[\u2500-\u257f]+", "", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.split()]


def written(page: str, scenes: list[str]) -> str:
    """The page with these scenes."""
    for number, scene in enumerate(scenes, 1):
        block = re.compile(rf"(<!-- top: {number} -->\n+```text\n).*?(```)", re.DOTALL)
        page, count = block.subn(lambda m, s=scene: f"{m[1]}{s}\n{m[2]}", page)
        assert count == 1, number
    return page


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        played = session(Path(directory) / "log")
    if "--write" in sys.argv:
        PAGE.write_text(written(PAGE.read_text(), played))
    else:
        print("\n\n".join(played))
