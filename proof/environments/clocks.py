"""Clocks that are wrong, or are another namespace's."""

from __future__ import annotations

import datetime as dt
import os
import struct
import subprocess
import time

from proof.environments.actors import Actor, Hands
from proof.environments.cases import NEW_TIME, Scene, case, unshare
from proof.shutdowns import do
from testing.clocks import CLOCK

YEAR = 365 * 86400
SHIFTED = """
    import sys
    import exclusivelog as xl
    with xl.open(sys.argv[1]) as engine, engine.topic("t").producer("exclusive") as producer:
        producer.send(sys.argv[2].encode())
"""


def send_by_a_wrong_clock(scene: Scene, value: bytes, seconds: int) -> None:
    """A program whose wall clock is that much ahead sends one message."""
    from testing.children import ROOT, command

    library, shift = scene.where / "clock.so", scene.where / "shift"
    if not library.exists():
        library.with_suffix(".c").write_text(CLOCK)
        do("gcc", "-shared", "-fPIC", "-o", str(library), str(library.with_suffix(".c")), "-ldl")
    shift.write_bytes(struct.pack("q", seconds))
    environment = {**os.environ, "LD_PRELOAD": str(library), "WALL_CLOCK_SHIFT": str(shift)}
    subprocess.run(
        command(SHIFTED, scene.ledger, value.decode()),
        env=environment,
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    scene.acknowledged.append(value)


def in_time(hands: Hands, since: float) -> list[str]:
    """What a reader gets that begins at a time."""
    start = dt.datetime.fromtimestamp(since, dt.UTC)
    return [(m.value or b"").decode() for m in hands.topic.reader(start)]


def retain(hands: Hands, seconds: float) -> int:
    """Trim all that is older; the first offset that is left."""
    hands.topic.trim(before=dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds))
    return hands.topic.first_offset


@case(tools=("gcc",))
def ten_years_ahead_once(scene: Scene) -> None:
    """One message is sent by a clock ten years ahead. Later ones can still be found by time, and
    trimmed by age."""
    scene.ledger_with(b"0")
    send_by_a_wrong_clock(scene, b"from-the-future", scene.pick(10 * YEAR, 0))
    owner = scene.owner()
    time.sleep(1.2)
    between = time.time()
    time.sleep(0.2)
    scene.works(owner.send(b"now"))
    said = owner.ask(in_time, between)
    if (scene.works(said) and "now" not in said.value) or len(said.value) > 2:
        scene.blame("keeps", f"from then on there is {said.value}")
    scene.keeps(actor=owner)
    time.sleep(1.0)
    said = owner.ask(retain, 1.1)
    if scene.works(said) and said.value < 4:
        scene.blame("keeps", f"trimmed by age, the topic begins at {said.value}")


@case(tools=("gcc",))
def a_year_behind(scene: Scene) -> None:
    """A machine boots without a battery: its clock is behind. All works, in order."""
    scene.ledger_with(b"0")
    send_by_a_wrong_clock(scene, b"from-the-past", scene.pick(-YEAR, 0))
    owner = scene.owner()
    scene.works(owner.send(b"now"))
    scene.keeps(actor=owner)


def another_time() -> None:
    """A time namespace whose monotonic clock is ten days ahead."""
    unshare(NEW_TIME)


@case("second", "first")
def another_time_namespace(scene: Scene, variant: str) -> None:
    """A container has a monotonic clock of its own, ten days ahead: it evicts no healthy owner, and
    its own silence is not ten days long."""
    ahead = another_time if scene.struck else None
    keepalive = 10.0  # less than ten days, and more than a busy machine takes
    first = ahead if variant == "first" else None
    owner = scene.owner(before=first, opening={"keepalive": keepalive})
    second: Actor = scene.actor(before=ahead if variant == "second" else None)
    said = second.open(keepalive=keepalive)
    if scene.lives(said):
        scene.fenced(second.own("exclusive"))
        scene.lives(second.read())
    time.sleep(0.5)
    scene.works(owner.send(b"3"))
    if said.ok:
        time.sleep(2.5)
        scene.works(owner.send(b"4"))
    scene.keeps(actor=owner)


@case(tools=("gcc",), twin=False)
def before_the_epoch(scene: Scene) -> None:
    """A clock that shows 1969."""
    scene.ledger_with(b"0")
    send_by_a_wrong_clock(scene, b"sixties", -int(time.time()) - YEAR // 2)
    scene.keeps()
