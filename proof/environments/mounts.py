"""File systems that go and come back, fill up, freeze, or are seen by another path."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import time
from functools import partial
from pathlib import Path

from proof.environments.cases import (
    NEW_MOUNTS,
    NEW_PIDS,
    WINDOW,
    Scene,
    Skip,
    case,
    frozen,
    unshare,
)
from proof.shutdowns import do
from testing.disks import leave

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def write_and_cut(scene: Scene, ledger: Path, name: str, **opening: object) -> None:
    """A sender is in full flow when the file system goes away and comes back."""
    writer, notes = scene.actor(ledger, name=name), scene.where / f"notes-{name}"
    scene.works(writer.open(**opening))
    scene.works(writer.own("exclusive_with_fencing"))
    large = opening.get("durability") != "process"  # else its file fails before the mapping does
    writer.start("stream", name, str(notes), 60.0 if scene.struck else 0.5, large)
    time.sleep(0.5)
    scene.strike(scene.shut_down)
    said = writer.said()
    scene.refuses(said, path=ledger)
    scene.cut()
    if opening.get("durability") != "process" or not scene.struck:
        scene.note(notes)


@case("ext4", "xfs")
def power_cuts_without_a_reboot(scene: Scene, variant: str) -> None:
    """A file system is shut down and mounted again under a running kernel, three times: the lock
    files stay as they are."""
    ledger = scene.disk(variant) / "log"
    for name in ("first", "second", "third"):
        write_and_cut(scene, ledger, name)
        scene.keeps(ledger)
        scene.remount()  # which writes the lock files' pages: the next cut finds them old


@case("ext4", "xfs")
def a_cut_under_process_writers(scene: Scene, variant: str) -> None:
    """The file system is shut down under writers through a shared mapping: an error, no SIGBUS."""
    ledger = scene.disk(variant) / "log"
    scene.ledger_with(b"before", path=ledger)
    write_and_cut(scene, ledger, "writer", durability="process")
    scene.keeps(ledger, durability="process")


@case("ext4", "xfs")
def readers_of_a_dead_file_system(scene: Scene, variant: str) -> None:
    """An engine that only reads, and one that waits, outlive the shutdown of their file system."""
    ledger = scene.disk(variant) / "log"
    owner = scene.owner(ledger)
    reader = scene.actor(ledger, name="the reader")
    scene.works(reader.open(readonly=True))
    scene.works(reader.read())
    scene.strike(scene.shut_down)
    scene.lives(reader.read(), ledger)
    scene.refuses(owner.send(b"behind"), path=ledger)
    scene.lives(reader.close(), ledger)
    scene.lives(owner.close(), ledger)
    scene.cut()
    scene.keeps(ledger)


@case("ext4", "xfs")
def a_snapshot_rolled_back(scene: Scene, variant: str) -> None:
    """The disk's image is put back to what it was: what was acknowledged before is there."""
    ledger = scene.disk(variant) / "log"
    scene.ledger_with(b"1", b"2", path=ledger)
    scene.unmount()
    shutil.copy(scene.where / "image", scene.where / "snapshot")
    scene.mount()
    later = scene.actor(ledger, acknowledged=[])
    scene.works(later.open())
    scene.works(later.own())
    for number in range(300):
        scene.works(later.send(b"later/%d" % number, 5000))
    scene.works(later.close())
    later.kill()
    scene.unmount()
    scene.strike(shutil.copy, scene.where / "snapshot", scene.where / "image")
    scene.mount()
    scene.keeps(ledger)
    scene.keeps(ledger)


@case("ext4", "xfs", "btrfs")
def a_snapshot_of_a_frozen_disk(scene: Scene, variant: str) -> None:
    """A snapshot is taken beside a sender, as volume managers do; it is opened elsewhere."""
    ledger = scene.disk(variant) / "log"
    writer, notes = scene.actor(ledger), scene.where / "notes"
    scene.works(writer.open())
    scene.works(writer.own())
    writer.start("stream", "w", str(notes), 1.0)
    time.sleep(0.5)
    with frozen(scene.where / "disk"):
        scene.note(notes)
        shutil.copy(scene.where / "image", scene.where / "snapshot")
    scene.works(writer.said())
    scene.end()
    scene.unmount()
    scene.strike(shutil.copy, scene.where / "snapshot", scene.where / "image")
    scene.mount()
    scene.keeps(ledger)


@case(tools=("btrfs", "mkfs.btrfs"), twin=False)
def a_btrfs_snapshot_beside_the_original(scene: Scene) -> None:
    """A subvolume is copied under its owner: same inodes, another device; both go on."""
    disk = scene.disk("btrfs")
    do("btrfs", "-q", "subvolume", "create", str(disk / "live"))
    owner = scene.owner(disk / "live" / "log")
    before = list(scene.acknowledged)
    do("btrfs", "-q", "subvolume", "snapshot", str(disk / "live"), str(disk / "copy"))
    scene.works(owner.send(b"behind the snapshot"))
    scene.keeps(disk / "copy" / "log", before)
    scene.works(owner.send(b"at last"))
    scene.keeps(actor=owner)


@case("ext4", "xfs", "btrfs")
def kill_and_open_again(scene: Scene, variant: str) -> None:
    """Open, send, kill, open again, on each file system."""
    ledger = scene.disk(variant) / "log"
    for name in ("first", "second"):
        writer, notes = scene.actor(ledger), scene.where / name
        scene.works(writer.open())
        scene.works(writer.own("exclusive_with_fencing"))
        writer.start("stream", name, str(notes), 60.0 if scene.struck else 0.3)
        time.sleep(0.4)
        scene.strike(writer.kill)
        if not scene.struck:
            scene.works(writer.said())
        scene.end()
        scene.note(notes)
        scene.keeps(ledger)


@case("beside an owner", "alone")
def another_boot_id(scene: Scene, variant: str) -> None:
    """A container runtime binds a boot id of its own over the kernel's."""

    def elsewhere() -> None:
        unshare(NEW_MOUNTS)
        fake.write_text("11111111-2222-3333-4444-555555555555\n")
        do("mount", "--bind", str(fake), str(BOOT_ID))

    fake = scene.where / "boot_id"
    before = elsewhere if scene.struck else None
    if variant == "alone":
        scene.ledger_with(b"1", b"2")
        made = scene.actor(before=before)
        scene.works(made.open())
        scene.keeps(actor=made)
        return
    owner, second = scene.owner(), scene.actor(before=before)
    scene.refuses(second.open())
    scene.works(owner.send(b"3"))
    scene.keeps(actor=owner)


def overlay(scene: Scene, *more: str) -> Path:
    """An overlay with an upper directory, both on a disk."""
    for name in ("lower", "upper", "work", "merged"):
        (scene.where / name).mkdir()
    layers = (f"{name}dir={scene.where / name}" for name in ("lower", "upper", "work"))
    options = ",".join([*layers, *more])
    do("mount", "-t", "overlay", "-o", options, "overlay", str(scene.where / "merged"))
    return scene.where / "merged" / "log"


@case()
def an_overlay_and_its_upper_directory(scene: Scene) -> None:
    """The same files by an overlay's path and by the directory below it: another device."""
    merged = overlay(scene)
    owner = scene.owner(merged)
    below = scene.pick(scene.where / "upper" / "log", merged)
    second = scene.actor(below)
    scene.refuses(second.open(), path=below)
    scene.works(owner.send(b"3"))
    scene.keeps(actor=owner)


@case()
def an_overlay_without_flushes(scene: Scene) -> None:
    """podman --rm, CRI-O and builds mount it `volatile`: it is refused for `power`."""
    merged = overlay(scene, *scene.pick(("volatile",), ()))
    scene.refuses(scene.actor(merged).open(), "volatile", path=merged)
    scene.end()
    if not scene.struck:
        scene.ledger_with(b"1", path=merged)
        scene.keeps(merged)


@case("journal", "data.mdb", "segments")
def a_file_in_memory(scene: Scene, variant: str) -> None:
    """A memory file system is mounted over one of the files: it is refused for `power`, and the
    ledger is whole once it is gone."""
    made = scene.owner()
    scene.works(made.send(b"large", 300_000))
    scene.works(made.close())
    memory, file = scene.tmpfs("memory"), scene.ledger / variant
    if scene.struck:
        do("cp", "-a", str(file), str(memory / variant))
        do("mount", "--bind", str(memory / variant), str(file))
    second = scene.actor()
    scene.refuses(second.open(), "tmpfs")
    scene.end()
    if scene.struck:
        do("umount", str(file))
    scene.keeps()


@case(twin=False)
def a_chroot_with_an_engine_open(scene: Scene) -> None:
    """The path leads nowhere any more; the directory is where it was."""
    (scene.where / "jail").mkdir()
    owner = scene.owner()
    scene.works(owner.ask(change_root, str(scene.where / "jail")))
    scene.works(owner.go_on("jailed", WINDOW + 1, wait=30.0))
    scene.works(owner.send(b"large", 300_000))
    scene.keeps(actor=owner)


def change_root(hands: object, place: str) -> None:
    """Go into a chroot."""
    os.chroot(place)


@case(twin=False)
def a_ledger_in_an_overlay(scene: Scene) -> None:
    """A container's own layer: all of it works, and survives a kill."""
    merged = overlay(scene)
    owner = scene.owner(merged)
    owner.kill()
    scene.keeps(merged)


@case()
def an_image_layer_that_is_copied_up(scene: Scene) -> None:
    """A reader has a ledger of an image's lower layer open when the first writer copies it up: it
    reads on, or gets an error; it does not read old files for ever."""
    scene.ledger_with(b"1", b"2", path=scene.where / "lower-log")
    merged = overlay(scene)
    shutil.move(scene.where / "lower-log", scene.where / "lower" / "log")
    do("mount", "-o", "remount", str(scene.where / "merged"))
    reader = scene.actor(merged, name="the reader")
    if not scene.lives(reader.open(readonly=True), merged):
        scene.keeps(merged)
        return
    scene.works(reader.read())
    writer = scene.actor(merged)
    scene.works(writer.open())
    scene.works(writer.own())
    if scene.struck:
        scene.works(writer.send(b"3", 100_000))
    time.sleep(WINDOW + 1)
    said = reader.read()
    if scene.lives(said, merged) and said.value != scene.acknowledged:
        scene.blame("keeps", f"the reader still reads {said.value}")
    scene.keeps(actor=writer)


@case(twin=False)
def two_paths_of_one_ledger(scene: Scene) -> None:
    """A bind mount: processes that come by either path share one ledger."""
    (scene.where / "real").mkdir()
    other = scene.bind(scene.where / "real", "bound") / "log"
    owner = scene.owner(scene.where / "real" / "log")
    second = scene.actor(other)
    scene.works(second.open())
    scene.fenced(second.own())
    second.start("own", "wait_for_exclusive", timeout=15)
    time.sleep(0.2)
    scene.works(owner.send(b"3"))
    scene.works(owner.close())
    scene.works(second.said())
    scene.works(second.send(b"4"))
    scene.keeps(other)
    scene.keeps(scene.where / "real" / "log", scene.acknowledged)


@case("with proc", "without proc")
def in_a_chroot(scene: Scene, variant: str) -> None:
    """A process in a chroot beside one outside: one ledger, or a clear error."""
    root = scene.where / "root"
    for name in ("data", "proc", "dev"):
        (root / name).mkdir(parents=True)
    if variant == "with proc":
        do("mount", "--bind", "/proc", str(root / "proc"))
    owner = scene.owner(root / "data" / "log")
    inside = scene.actor(Path("/data/log"), before=partial(os.chroot, root), acknowledged=[])
    if scene.lives(inside.open(), "/data/log"):
        scene.fenced(inside.own())
        said = inside.read()
        if scene.works(said) and said.value != scene.acknowledged:
            scene.blame("keeps", f"inside, there is {said.value}")
    scene.works(owner.send(b"3"))
    scene.keeps(actor=owner)


@case("beside a writer", "alone")
def a_read_only_bind_mount(scene: Scene, variant: str) -> None:
    """A container gets the ledger read-only while its file system is writable elsewhere."""
    (scene.where / "real").mkdir()
    real = scene.where / "real" / "log"
    if variant == "alone":
        scene.ledger_with(b"1", b"2", path=real)
    else:
        owner = scene.owner(real)
    other = scene.bind(scene.where / "real", "bound", *scene.pick(("ro",), ())) / "log"
    reader = scene.actor(other, name="the reader")
    if variant == "alone":
        scene.keeps(other, readonly=True)
        return
    scene.refuses(reader.open(readonly=True), path=other)
    for number in range(50):
        scene.works(owner.send(b"more/%d" % number, 20_000))
    scene.lives(reader.ask(read_if_open), other)
    scene.keeps(actor=owner)


def read_if_open(hands: object) -> None:
    """Read if the engine is open."""
    if getattr(hands, "engine", None) is not None:
        hands.read()  # type: ignore[attr-defined]


@case()
def a_read_only_file_system(scene: Scene) -> None:
    """A read-only medium: it can be read, and a writer gets an error."""
    ledger = scene.disk() / "log"
    scene.ledger_with(b"1", b"2", path=ledger)
    scene.strike(do, "mount", "-o", "remount,ro", str(scene.where / "disk"))
    scene.refuses(scene.actor(ledger).open(), path=ledger)
    scene.end()
    scene.keeps(ledger, readonly=True)


@case()
def a_disk_that_becomes_read_only(scene: Scene) -> None:
    """The kernel remounts a disk read-only after an error, and an operator writable again."""
    ledger = scene.disk() / "log"
    owner = scene.owner(ledger)
    device = next(m.split()[0] for m in mounts() if m.split()[1] == str(scene.where / "disk"))
    do("mount", "-o", "remount,errors=remount-ro", str(scene.where / "disk"))
    error = Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error")
    scene.strike(error.write_text, "1")
    scene.refuses(owner.send(b"behind", 300_000), path=ledger)
    scene.lives(owner.close(), ledger)
    scene.remount()
    scene.keeps(ledger)


@case(twin=False)
def noexec_nosuid_nodev(scene: Scene) -> None:
    """A data partition that is mounted as carefully as can be."""
    ledger = scene.disk(options="loop,noexec,nosuid,nodev,noatime,sync") / "log"
    owner = scene.owner(ledger)
    owner.kill()
    scene.keeps(ledger)


@case("tmpfs", "ramfs")
def power_in_memory(scene: Scene, variant: str) -> None:
    """Rule H5: a file system in memory cannot keep `power`; `process` it can."""
    ledger = scene.tmpfs("memory", variant) / "log"
    made = scene.actor(ledger)
    scene.refuses(made.open(**scene.pick({}, {"durability": "process"})), "process", path=ledger)
    owner = scene.owner(ledger, opening={"durability": "process"})
    owner.kill()
    scene.keeps(ledger, durability="process")


@case()
def a_full_disk_that_gets_room(scene: Scene) -> None:
    """The disk fills up under a sender; once there is room, the same one goes on."""
    disk = scene.disk()
    owner = scene.owner(disk / "log")
    if scene.struck:
        leave(disk, 1 << 20)
    said = owner.send(b"too-much", 3 << 20)
    scene.refuses(said, path=disk / "log", kind="LedgerFullError")
    (disk / "ballast").unlink(missing_ok=True)
    scene.works(owner.send(b"3", 3 << 20))
    scene.keeps(actor=owner)


@case()
def a_disk_without_inodes(scene: Scene) -> None:
    """There is room, and no inode is left for the next file."""
    disk = scene.disk()
    scene.ledger_with(b"1", path=disk / "log")
    if scene.struck:
        for number in range(os.statvfs(disk).f_ffree):
            (disk / f"inode-{number}").touch()
    owner = scene.actor(disk / "log")
    if scene.lives(owner.open(), disk / "log"):
        scene.works(owner.own())
        said = owner.send(b"large", 3 << 20)
        scene.refuses(said, path=disk / "log", kind="LedgerFullError")
        scene.works(owner.send(b"small"))
    for file in disk.glob("inode-*"):
        file.unlink()
    scene.end()
    scene.keeps(disk / "log")


@case()
def a_quota_that_is_used_up(scene: Scene) -> None:
    """A user's quota ends under a sender: as clear as a full disk."""
    from proof.environments.cases import become

    disk = scene.disk()
    scene.unmount()
    do("tune2fs", "-O", "quota", str(scene.image))
    try:
        scene.mount("loop,usrquota")
    except OSError as error:
        raise Skip(f"quotas cannot be mounted here: {error}") from error
    disk.chmod(0o777)
    owner = scene.owner(disk / "log", before=become(1234, 1234))
    if scene.struck:
        device = next(m.split()[0] for m in mounts() if m.split()[1] == str(disk))
        used = sum(f.stat().st_blocks for f in (disk / "log").rglob("*")) // 2
        limit = struct.pack("=8QI4x", used + 500, used + 500, 0, 0, 0, 0, 0, 0, 1)
        if ctypes.CDLL(None, use_errno=True).quotactl(0x800008 << 8, device.encode(), 1234, limit):
            raise Skip(f"quotas cannot be set here: {os.strerror(ctypes.get_errno())}")
    said = owner.send(b"too-much", 3 << 20)
    scene.refuses(said, path=disk / "log", kind="LedgerFullError")
    scene.keeps(actor=owner)


def mounts() -> list[str]:
    """Lines of /proc/self/mounts."""
    return Path("/proc/self/mounts").read_text().splitlines()


@case()
def a_thin_disk_that_runs_out(scene: Scene) -> None:
    """The disk has room, and the storage behind it has none: writes that seemed done fail at the
    flush."""
    outer = scene.where / "outer"
    outer.mkdir()
    scene.disk(megabytes=40)
    scene.unmount()
    (scene.where / "disk").rmdir()
    inner = scene.where / "image"
    inner.rename(scene.where / "outer-image")
    do("mount", "-o", "loop", str(scene.where / "outer-image"), str(outer))
    scene.image = outer / "image"
    with scene.image.open("wb") as file:
        file.truncate(200 << 20)
    do("mkfs.ext4", "-q", "-E", "nodiscard,lazy_itable_init=1", str(scene.image))
    ledger = scene.mount() / "log"
    owner, notes = scene.owner(ledger), scene.where / "notes"
    if scene.struck:
        leave(outer, 2 << 20)
    owner.start("stream", "w", str(notes), 60.0 if scene.struck else 0.3)
    scene.refuses(owner.said(), path=ledger)
    scene.note(notes)
    scene.end()
    (outer / "ballast").unlink(missing_ok=True)
    subprocess.run(["umount", scene.where / "disk"], check=False, timeout=30)
    scene.mount()
    scene.keeps(ledger)


@case("detached", "covered")
def a_mount_that_changes_under_an_owner(scene: Scene, variant: str) -> None:
    """The disk is unmounted lazily, or another is mounted over it: rule C7."""
    disk = scene.disk()
    (disk / "data").mkdir()
    owner = scene.owner(disk / "data" / "log")
    if variant == "detached":
        scene.strike(do, "umount", "-l", str(disk))
    else:
        scene.strike(do, "mount", "-t", "tmpfs", "tmpfs", str(disk / "data"))
    scene.ends(owner, disk / "data" / "log")
    scene.end()
    if variant == "detached":
        if scene.struck:
            scene.mount()
    else:
        scene.strike(do, "umount", str(disk / "data"))
    scene.keeps(disk / "data" / "log")


@case()
def a_disk_that_freezes(scene: Scene) -> None:
    """A snapshot tool freezes the file system for a second under a sender, which then goes on."""
    ledger = scene.disk() / "log"
    owner = scene.owner(ledger)
    owner.start("go_on", "slow", 2.0)
    time.sleep(0.3)
    if scene.struck:
        with frozen(scene.where / "disk"):
            time.sleep(1.0)
    scene.works(owner.said())
    scene.keeps(actor=owner)


@case(twin=False)
def a_private_tmp(scene: Scene) -> None:
    """Two services with a private /tmp each name the same path, and have nothing in common."""

    def private() -> None:
        unshare(NEW_MOUNTS)
        place = scene.where / f"private-{os.getpid()}"
        place.mkdir()
        do("mount", "--bind", str(place), "/mnt")

    notes: list[list[bytes]] = [[], []]
    owners = [
        scene.owner(Path("/mnt/log"), before=private, acknowledged=note, name=name)
        for note, name in zip(notes, ("one", "two"), strict=True)
    ]
    for owner, note in zip(owners, notes, strict=True):
        scene.works(owner.send(b"3"))
        scene.keeps(actor=owner, acknowledged=note)


@case("beside an owner", "alone")
def another_pid_namespace(scene: Scene, variant: str) -> None:
    """A container with process ids of its own."""
    before = partial(unshare, NEW_PIDS | NEW_MOUNTS) if scene.struck else None
    if variant == "alone":
        scene.ledger_with(b"1")
        made = scene.actor(before=before)
        scene.works(made.open())
        scene.keeps(actor=made)
        return
    owner, second = scene.owner(), scene.actor(before=before)
    scene.refuses(second.open(), "namespace")
    scene.works(owner.send(b"3"))
    scene.keeps(actor=owner)


def no_device_mapper() -> None:
    """Skip where there are no targets of device-mapper."""
    done = subprocess.run(["dmsetup", "targets"], capture_output=True, text=True, check=False)
    if done.returncode or "flakey" not in done.stdout:
        raise Skip(f"no dm-flakey here: {(done.stderr or done.stdout).strip().splitlines()[0]}")


@case(tools=("dmsetup",))
def a_flaky_device(scene: Scene) -> None:
    """A device fails for a while under a sender, then works again (dm-flakey)."""
    no_device_mapper()
    disk = scene.disk()
    scene.unmount()
    device = do("losetup", "--show", "-f", str(scene.image)).strip()
    sectors, name = scene.image.stat().st_size // 512 if scene.image else 0, f"xl{os.getpid()}"
    table = f"0 {sectors} flakey {device} 0 {scene.pick(1, 60)} {scene.pick(1, 0)}"
    do("dmsetup", "create", name, "--table", table)
    try:
        do("mount", f"/dev/mapper/{name}", str(disk))
        owner, notes = scene.owner(disk / "log"), scene.where / "notes"
        owner.start("stream", "w", str(notes), 3.0)
        scene.refuses(owner.said(), path=disk / "log")
        scene.note(notes)
        scene.end()
        do("umount", str(disk))
    finally:
        do("dmsetup", "remove", name)
        do("losetup", "-d", device)
    scene.mount()
    scene.keeps(disk / "log")
