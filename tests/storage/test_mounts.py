"""Where a ledger's files are: what `power` promises is judged by the open files, not by the path
of their directory (rule H5).

An overlay that is mounted `volatile` makes no flush: 100 messages were acknowledged there, and none
was left after a power cut. A journal on a memory file system inside a directory on a disk did the
same.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.disks import disk
from testing.processes import values

pytestmark = [
    pytest.mark.once,  # it sets durability itself
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount"),
]


@contextlib.contextmanager
def mounted(place: Path, *words: object) -> Iterator[Path]:
    subprocess.run(["mount", *map(str, words), str(place)], check=True, timeout=30)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=30)


def needs_process(path: Path, match: str) -> None:
    """Refused for "power", and taken for "process"."""
    with pytest.raises(xl.LedgerError, match=match):
        xl.open(path, durability="power")
    with xl.open(path, durability="process") as engine:
        with engine.topic("t").producer() as producer:
            producer.send(b"x")
        with pytest.raises(xl.LedgerError, match=match):  # the ledger is open in this process
            xl.open(path, durability="power")
        assert values(engine.topic("t"))[-1] == b"x"
    with xl.open(path, durability="power", readonly=True) as engine:  # it acknowledges nothing
        assert values(engine.topic("t"))[-1] == b"x"


@pytest.mark.parametrize("volatile", [True, False])
def test_h5_an_overlay_without_flushes_is_for_process_only(tmp_path, volatile) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    options += ",volatile" if volatile else ""
    with mounted(tmp_path / "merged", "-t", "overlay", "-o", options, "overlay") as merged:
        if volatile:
            needs_process(merged / "log", "mounted volatile")
        else:
            xl.open(merged / "log", durability="power").close()


@pytest.mark.parametrize("name", ["journal", "data.mdb", "segments"])
def test_h5_a_file_of_a_ledger_in_memory_is_for_process_only(path, tmp_path, name) -> None:
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(bytes(300_000))
    with disk(tmp_path / "memory", 24, "tmpfs") as memory:
        file = Path(path) / name
        subprocess.run(["cp", "-a", file, memory / name], check=True, timeout=30)
        with mounted(file, "--bind", memory / name):
            needs_process(Path(path), f"{name} is on tmpfs")
    xl.open(path, durability="power").close()


def test_h5_a_file_of_a_ledger_on_another_disk_is_for_process_only(path, tmp_path) -> None:
    """Two disks do not come back from a power cut or a snapshot together."""
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(bytes(300_000))
    with disk(tmp_path / "other", 64, "ext4") as other:
        file = Path(path) / "segments"
        subprocess.run(["cp", "-a", file, other / "segments"], check=True, timeout=30)
        with mounted(file, "--bind", other / "segments"):
            needs_process(Path(path), "segments is on another file system")


def test_h5_a_directory_of_the_same_disk_may_be_mounted_in_a_ledger(path, tmp_path) -> None:
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(bytes(300_000))
    file = Path(path) / "segments"
    subprocess.run(["cp", "-a", file, tmp_path / "segments"], check=True, timeout=30)
    with mounted(file, "--bind", tmp_path / "segments"), xl.open(path, durability="power"):
        pass
