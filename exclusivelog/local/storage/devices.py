"""The block devices below a file system: is what a flush writes there only in memory (rule H5)?"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

from exclusivelog.foreign import Ignoring
from exclusivelog.local.files import read_whole

DEVICES, VIRTUAL = "/sys/dev/block", "/devices/virtual/"
# Compressed memory, a RAM disk, and the test device of the kernel.
IN_MEMORY = re.compile(r"(?:zram|ram|nullb)\d+")
MOST_DEVICES = 8  # one on the other: a loop device, encryption, a volume, a RAID
SECTOR = 512


def why_in_memory(
    number: int, why_file: Callable[[str, int], str], depth: int = MOST_DEVICES
) -> str:
    """Why a power loss takes what is on this device (`st_dev`), as the kernel shows it; empty if it
    does not, or if that cannot be seen. `why_file(path, depth)` is asked about the file of a
    loop device, and may follow `depth` devices below it."""
    with Ignoring(OSError):
        place = f"{DEVICES}/{os.major(number)}:{os.minor(number)}"
        target = os.readlink(place)
        if VIRTUAL not in target:
            return ""  # hardware, or what looks like it
        if os.path.exists(f"{place}/partition"):
            place, target = f"{place}/..", os.path.dirname(target)
        name = os.path.basename(target)
        if IN_MEMORY.fullmatch(name):
            return f"{name}, a block device in memory"
        if depth and (file := _file_of_loop(place)) and (why := why_file(file, depth - 1)):
            return f"{name}, a loop device whose file is on {why}"
        below = (
            [why_in_memory(each, why_file, depth - 1) for each in _below(place)] if depth else []
        )
        if any(below) and (all(below) or not _is_mirror(place)):
            return f"{name}, which is on {next(filter(None, below))}"
    return ""


def _file_of_loop(place: str) -> str:
    """The path of a loop device's file; empty if it has none, or if that path leads to another file
    here: it is one of the namespace in which the device was made."""
    with Ignoring(OSError, ValueError):  # it is no loop device
        path = os.fsdecode(_text(f"{place}/loop/backing_file"))
        end = int(_text(f"{place}/loop/offset")) + SECTOR * int(_text(f"{place}/size"))
        return path if 0 < end <= os.stat(path).st_size else ""
    return ""


def _below(place: str) -> Iterator[int]:
    """The numbers of the devices that this one is made of."""
    for name in os.listdir(f"{place}/slaves"):
        major, _, minor = _text(f"{place}/slaves/{name}/dev").partition(b":")
        yield os.makedev(int(major), int(minor))


def _is_mirror(place: str) -> bool:
    """Does each device below have all of the data?"""
    with Ignoring(OSError):
        return _text(f"{place}/md/level") == b"raid1"
    return False


def _text(path: str) -> bytes:
    return read_whole(path).removesuffix(b"\n")
