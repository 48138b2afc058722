"""mypy in strict mode sees a misspelt argument, a forgotten await and an object of the other
module, in programs on exclusivelog.aio as in those on exclusivelog."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faces.scripts import strict_mypy

pytest.importorskip("mypy")
pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]

HEAD = """
import asyncio
import exclusivelog as xl
from exclusivelog import aio

async def program() -> None:
    async with aio.open("log") as engine, engine.topic("orders").producer() as producer:
        topic = engine.topic("orders")
        shared: aio.SharedMap[str, int] = await aio.SharedMap(topic)
        with xl.open("log") as plain:
"""

# Each line, and the code of the error that mypy has to find in it; "" for none.
LINES = [
    ('await producer.send(b"x", key="k", timeout=1.0)', ""),
    ('await producer.send(b"x", keyy=3)', "call-arg"),
    ('await producer.send(b"x", key=3)', "arg-type"),
    ('producer.send_async(b"x", keyy=3)', "call-arg"),
    ('await producer.send_many([b"x"], key=["k"])', "call-arg"),
    ('aio.open("log", keepalife=1.0)', "call-arg"),
    ('aio.open("log", durability="disk")', "arg-type"),
    ('await topic.producer("exclusive", prio=1)', "call-arg"),
    ('await topic.producer("exclusve")', "arg-type"),
    ('await topic.producer(xl.AccessMode("exclusive"))', ""),
    ('plain.topic("a").producer("exclusve")', "arg-type"),
    ('plain.role("r", access_mode="shard")', "arg-type"),
    ('topic.reader("earlest")', "arg-type"),
    ('plain.topic("a").reader(-100).seek("end")', "arg-type"),
    ('await topic.compression("gzip")', "arg-type"),
    ('await shared.update("a", lambda old: old + 1)', "operator"),
    ('await shared.update("a", lambda old: (old or 0) + 1)', ""),
    ('await shared.update("a", lambda key, old: old, with_key=True)', ""),
    ('topic.producer_async("exclusive", prio=1)', "call-arg"),
    ('topic.producer_async("exclusive", priority=1)', ""),
    ('await engine.producers(["a"], topic_epoch=1)', "call-overload"),
    ('topic.reader(grup="g")', "call-arg"),
    ('await engine.role("r", topic=["a"])', "call-arg"),
    ('await engine.own({"a": None}, timeuot=1.0)', "call-overload"),
    ('await engine.own({"a": None}, timeout=1.0)', ""),
    ('await engine.unload("orders", too="b")', "call-arg"),
    ('aio.SharedMap(topic, keys="str")', "call-arg"),
    ('await shared.put("a", "b")', "arg-type"),
    ("await shared.put(1, 1)", "arg-type"),
    ('await shared.get("a", lastest=True)', "call-overload"),
    ('shared.put_async("a", vlaue=1)', "call-arg"),
    ('await shared.put_async("a", value=1)', ""),
    ("engine.nothing", "attr-defined"),
    ("producer.nothing", "attr-defined"),
    ("topic.producer().flush()", "attr-defined"),
    ('topic.producer().send(b"x")', "arg-type"),
    ('producer.send(b"x")', "unused-coroutine"),
    ('aio.SharedMap(plain.topic("orders"))', "arg-type"),
    ("xl.SharedMap(topic)", "arg-type"),
    ('plain.topic("orders").producer(prio=1)', "call-arg"),
    ('plain.topic("orders").producer().send(b"x", keyy=3)', "call-arg"),
    ('plain.topic("orders").producer_async(prio=1)', "call-arg"),
]


@pytest.mark.smoke
@pytest.mark.long
def test_mypy_sees_each_mistake_and_no_other(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    before = HEAD.count("\n")
    indented = ("            " + line for line, _ in LINES)
    program.write_text(HEAD + "\n".join(indented) + "\n")
    said = strict_mypy(program)
    found: dict[int, str] = {}
    for line in said.splitlines():
        if match := re.fullmatch(r".*program\.py:(\d+): error: .*\[([a-z-]+)\]", line):
            found.setdefault(int(match[1]) - before - 1, match[2])
        else:
            assert ": note: " in line, line
    told = [(line, found.get(number, "")) for number, (line, _) in enumerate(LINES)]
    assert told == LINES, said
