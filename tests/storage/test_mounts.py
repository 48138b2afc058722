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
from exclusivelog.local.storage import devices
from testing.disks import disk
from testing.patience import PATIENCE
from testing.processes import values

pytestmark = [
    pytest.mark.once,  # it sets durability itself
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount"),
]


@contextlib.contextmanager
def mounted(place: Path, *words: object) -> Iterator[Path]:
    subprocess.run(["mount", *map(str, words), str(place)], check=True, timeout=PATIENCE)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=PATIENCE)


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
        subprocess.run(["cp", "-a", file, memory / name], check=True, timeout=PATIENCE)
        with mounted(file, "--bind", memory / name):
            needs_process(Path(path), f"{name} is on tmpfs")
    xl.open(path, durability="power").close()


def test_h5_a_file_of_a_ledger_on_another_disk_is_for_process_only(path, tmp_path) -> None:
    """Two disks do not come back from a power cut or a snapshot together."""
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(bytes(300_000))
    with disk(tmp_path / "other", 64, "ext4") as other:
        file = Path(path) / "segments"
        subprocess.run(["cp", "-a", file, other / "segments"], check=True, timeout=PATIENCE)
        with mounted(file, "--bind", other / "segments"):
            needs_process(Path(path), "segments is on another file system")


def test_h5_a_directory_of_the_same_disk_may_be_mounted_in_a_ledger(path, tmp_path) -> None:
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(bytes(300_000))
    file = Path(path) / "segments"
    subprocess.run(["cp", "-a", file, tmp_path / "segments"], check=True, timeout=PATIENCE)
    with mounted(file, "--bind", tmp_path / "segments"), xl.open(path, durability="power"):
        pass


# ---- the devices below -------------------------------------------------------------------


@contextlib.contextmanager
def loop_disk(image: Path, where: Path) -> Iterator[Path]:
    """An ext4 in that file."""
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, timeout=PATIENCE)
    with mounted(where, "-t", "ext4", "-o", "loop", image) as place:
        yield place


def test_h5_a_disk_whose_file_is_in_memory_is_for_process_only(tmp_path: Path) -> None:
    with disk(tmp_path / "memory", 40, "tmpfs") as memory:
        with loop_disk(memory / "image", tmp_path / "disk") as place:
            needs_process(place / "log", r"loop\d+, a loop device whose file is on tmpfs")


def test_h5_an_overlay_on_a_disk_in_memory_is_for_process_only(tmp_path: Path) -> None:
    with disk(tmp_path / "memory", 40, "tmpfs") as memory:
        with loop_disk(memory / "image", tmp_path / "disk") as place:
            for name in ("lower", "upper", "work", "merged"):
                (place / name).mkdir()
            options = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work"
            with mounted(place / "merged", "-t", "overlay", "-o", options, "overlay") as merged:
                needs_process(merged / "log", "whose file is on tmpfs")


def test_h5_a_disk_whose_file_is_on_a_disk_is_one(tmp_path: Path) -> None:
    """The control."""
    with loop_disk(tmp_path / "image", tmp_path / "disk") as place:
        xl.open(place / "log", durability="power").close()


class Devices:
    """An imitation of the kernel's list of block devices."""

    def __init__(self, root: Path) -> None:
        self.root = root / "dev" / "block"
        self.root.mkdir(parents=True)

    def add(self, name: str, *below: str, virtual: bool = True, **files: str) -> int:
        """The number of a new device on those of these names; "disk/part" is a partition."""
        number = os.makedev(200, len(list(self.root.iterdir())))
        where = "virtual" if virtual else "pci0"
        place = self.root.parent.parent / "devices" / where / "block" / name
        (place / "slaves").mkdir(parents=True)
        number_text = f"{os.major(number)}:{os.minor(number)}\n"
        (self.root / number_text.strip()).symlink_to(f"../../devices/{where}/block/{name}")
        for file, text in {"dev": number_text, **files}.items():
            (place / file.replace("__", "/")).parent.mkdir(exist_ok=True)
            (place / file.replace("__", "/")).write_text(text)
        for other in below:
            (place / "slaves" / other).symlink_to(self._place_of(other))
        return number

    def _place_of(self, name: str) -> Path:
        return next((self.root.parent.parent / "devices").glob(f"*/block/{name}"))


def test_h5_devices_are_followed_to_what_they_are_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Devices(tmp_path)
    monkeypatch.setattr(devices, "DEVICES", str(made.root))
    file = tmp_path / "image"
    file.write_bytes(bytes(1024))
    loop = {"size": "2\n", "loop__offset": "0\n", "loop__backing_file": f"{file}\n"}
    disk, zram, ram = made.add("sda", virtual=False), made.add("zram0"), made.add("ram12")
    in_memory = {
        "zram": zram,
        "ram": ram,
        "test device": made.add("nullb0"),
        "partition": made.add("ram12/ram12p1", partition="1\n"),
        "encrypted": made.add("dm-0", "zram0"),
        "on that": made.add("dm-1", "dm-0"),
        "one part of several": made.add("md0", "sda", "ram12", md__level="raid0\n"),
        "a mirror": made.add("md1", "zram0", "ram12", md__level="raid1\n"),
        "a file": made.add("loop0", **loop),
    }
    on_disk = {
        "disk": disk,
        "partition": made.add("sda/sda1", virtual=False, partition="1\n"),
        "encrypted": made.add("dm-2", "sda"),
        "a mirror with a part on a disk": made.add("md2", "sda", "ram12", md__level="raid1\n"),
        "a file of another namespace": made.add("loop1", **loop | {"size": "3\n"}),
        "a file that was removed": made.add(
            "loop2", **loop | {"loop__backing_file": f"{file} (deleted)\n"}
        ),
        "unused": made.add("loop3", size="0\n"),
        "no block device": os.makedev(0, 77),
        "of no kernel": os.makedev(250, 7),
    }

    def why(number: int) -> str:
        return devices.why_in_memory(number, lambda path, _: "tmpfs" if path == str(file) else "")

    assert {name: bool(why(number)) for name, number in in_memory.items()} == dict.fromkeys(
        in_memory, True
    )
    assert {name: why(number) for name, number in on_disk.items()} == dict.fromkeys(on_disk, "")
    assert why(in_memory["on that"]) == (
        "dm-1, which is on dm-0, which is on zram0, a block device in memory"
    )
