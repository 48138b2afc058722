"""Make the ledgers of this directory anew: `python tests/storage/ledgers/make.py TREE [TREE ...]`.

A TREE is a checkout of an earlier commit, named by its abbreviated hash, with the extension built
in place; README.md has the commands. For each tree a process that runs that version fills a ledger,
reads it back, and is killed by SIGKILL while it owns topics and while the journal has messages that
the tables do not have. The directory as it is then, and what that version had read, are packed as
`format-N-HASH.tar.xz`.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

FILL = r"""
import base64, json, os, signal, sys, time
import exclusivelog as xl

path, told = sys.argv[1:]
try:
    from exclusivelog.local.versions import FORMAT
except ImportError:
    from exclusivelog.local.storage.ledger import FORMAT
try:
    from exclusivelog.local.shm.lockfile import MAGIC
except ImportError:
    from exclusivelog.local.shm.presence import MAGIC
lock = MAGIC.to_bytes(8, "little")[7]


def text(data):
    return None if data is None else base64.b64encode(data).decode()


def facts(m):
    return [
        m.offset, m.epoch, text(m.key), text(m.value), dict(m.properties), m.publish_time,
        m.event_time, m.producer_name, m.sequence_id,
    ]


engine = xl.open(path, "maker", properties={"version": "old"})
orders, ids, large, trimmed, empty, quiet = [
    engine.topic(name) for name in ("orders", "ids", "large", "trimmed", "empty", "quiet")
]
with orders.producer("exclusive", name="first") as producer:
    for number in range(20):
        producer.send(b"order %d" % number, key="k%d" % (number % 5), event_time=1000 + number)
    producer.send(None, key="k3")
    producer.send(b"", key=b"", properties={"p": "q", "": "\u00fc"})
with ids.producer(name="numbered") as producer:
    for number in (0, 7, 100, 2**40):
        producer.send(b"id %d" % number, sequence_id=number)
if hasattr(large, "compression"):
    large.compression("zstd")
    orders.compression("lz4")
with large.producer(name="bulk") as producer:
    producer.send(b"0123456789abcdef" * 20_000)
    producer.send_many([b"%-40d" % number for number in range(4000)])
with trimmed.producer(name="trimmed") as producer:
    for number in range(10):
        producer.send_many([b"t%d.%d" % (number, n) for n in range(100)])
if hasattr(trimmed, "trim"):
    trimmed.trim(before=500)
with quiet.producer("exclusive"):
    pass  # an epoch, and no message
extra = {}
if hasattr(xl, "SharedMap"):
    held = engine.topic("map")
    with xl.SharedMap(held) as the_map:
        for number in range(30):
            the_map.put("key %d" % number, {"n": number, "text": "x" * number})
        the_map.delete("key 7")
        if hasattr(the_map, "snapshot"):
            the_map.snapshot()
        the_map.put("key 8", "behind the snapshot")
        extra["map"] = {key: the_map.get(key) for key in the_map.list_keys()}
if hasattr(orders, "compact"):
    orders.compact()
    with orders.reader(read_compacted=True) as reader:
        extra["compacted"] = [facts(m) for m in reader]
if hasattr(engine, "own"):
    extra["claims"] = dict(engine.own("group", {"partition": None, "other": 5}).generations)
if FORMAT >= 3:
    reader = orders.reader(group="readers")
    for _ in range(4):
        reader.read_next(10)
    reader.commit()
    extra["group"] = ["orders", "readers", reader.position]
    quiet.retention(max_age=10**9)
    sealed = engine.topic("sealed")
    with sealed.producer() as producer:
        producer.send(b"the last one")
    sealed.terminate()
    extra["terminated"] = ["sealed"]
    gone = engine.topic("gone")
    with gone.producer() as producer:
        producer.send(b"of a deleted topic")
    engine.delete_topic("gone")

owner = orders.producer("exclusive", name="killed", priority=3)
waiter = orders.producer_async("wait_for_exclusive", name="waits", priority=-1)
other = ids.producer("shared", name="numbered")
# Behind the last change of ownership, in less time than a checkpoint takes to come.
for number in range(10):
    owner.send(b"in the journal %d" % number, key="j", properties={"n": str(number)})
other.send(b"in the journal", sequence_id=2**40 + 1)
owner.send_many([b"a group", None, b"of three"])
if FORMAT >= 9:  # the journal has positions of groups, too
    reader.read_next(10)
    reader.commit()
    extra["group"][2] = reader.position
names = [name for name in engine.topics() if not name.startswith("__")]
read = {}
for name in names:
    topic = engine.topic(name)
    with topic.reader() as reader:
        messages = []
        while batch := reader.read_batch(10_000):
            messages += map(facts, batch)
        read[name] = {"epoch": topic.epoch, "first": topic.first_offset,
                      "next": topic.next_offset, "messages": messages}
with open(told, "w") as file:
    json.dump({"format": FORMAT, "lock": lock, "topics": read, "library": xl.__version__, **extra},
              file)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def make(tree: Path) -> Path:
    """The packed ledger that the version in `tree` makes."""
    with tempfile.TemporaryDirectory() as where:
        log, told = Path(where) / "log", Path(where) / "told.json"
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(
            [sys.executable, "-c", FILL, str(log), str(told)],
            env=environment,
            cwd=where,
            timeout=120,
            stdout=subprocess.PIPE,
            check=False,
        )
        if done.returncode != -signal.SIGKILL or done.stdout != b"ready\n":
            sys.exit(f"{tree}: the process ended with {done.returncode} and said {done.stdout!r}")
        facts = json.loads(told.read_text())
        packed = HERE / f"format-{facts['format']}-{tree.name}.tar.xz"
        packed.write_bytes(lzma.compress(_archive(log, told), preset=9 | lzma.PRESET_EXTREME))
    return packed


def _archive(log: Path, told: Path) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        archive.add(told, "told.json", filter=_plain)
        for file in sorted(log.rglob("*")):
            archive.add(file, f"log/{file.relative_to(log)}", recursive=False, filter=_plain)
    return whole.getvalue()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        made = make(Path(argument).absolute())
        print(f"{made.name}: {made.stat().st_size:,} bytes")
