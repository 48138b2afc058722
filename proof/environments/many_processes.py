"""Many processes, many engines, many waiters."""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import Any

import exclusivelog as xl
from exclusivelog.local.shm.slots import SLOT_COUNT
from proof.environments.actors import ANSWERS_WITHIN, Actor, Hands
from proof.environments.cases import Scene, case

IN_MEMORY: dict[str, Any] = {"keepalive": None, "durability": "process"}
LONG = 240.0  # seconds that so many may take


def open_many(hands: Hands, count: int) -> int:
    """Open so many engines in one process."""
    hands.kept["engines"] = [xl.open(hands.path, name=f"e{n}") for n in range(count)]
    return count


def close_one(hands: Hands) -> None:
    """Close the last of them."""
    hands.kept["engines"].pop().close()


@case(fast=False)
def one_engine_too_many(scene: Scene) -> None:
    """All places of the ledger are taken: the next engine's error names how many there are, and
    it gets the first one that becomes free."""
    owner = scene.owner()
    actors, share = [], scene.pick(SLOT_COUNT - 1, 15)
    while share:
        made = scene.actor()
        actors.append(made)
        scene.works(made.ask(open_many, min(64, share), wait=LONG))
        share -= min(64, share)
    late = scene.actor(name="the late one")
    scene.refuses(late.open(), str(SLOT_COUNT), kind="LedgerFullError")
    scene.works(owner.send(b"3"))
    scene.works(actors[0].ask(close_one))
    if scene.struck:
        scene.works(late.open())
    scene.works(late.read())
    actors[1].kill() if len(actors) > 1 else None
    another = scene.actor()
    scene.works(another.open())
    scene.keeps(actor=owner)


@case(500, 60, fast=False, twin=False)
def a_actors_of_processes(scene: Scene, variant: int) -> None:
    """So many processes on one ledger; each owns the topic once and sends; a third of them is
    killed meanwhile."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (20000, 20000))
    actors = [scene.actor(acknowledged=[]) for _ in range(variant)]
    for made in actors:
        made.start("open", keepalive=None)
    for made in actors:
        scene.works(made.said(LONG))
    notes = [scene.where / f"notes-{number}" for number in range(variant)]
    for number, made in enumerate(actors):
        made.start(take_writer_lock, f"p{number}", str(notes[number]))
    time.sleep(1)
    for made in actors[::3]:
        made.kill()
    for number, made in enumerate(actors):
        if number % 3:
            scene.works(made.said(LONG))
    for note in notes:
        scene.note(note)
    judge = scene.actor(acknowledged=[])
    scene.works(judge.open())
    read = judge.read()
    if scene.works(read):
        scene.acknowledged.sort(key=place_in(read.value))
        scene.keeps(actor=judge)


def place_in(found: list[bytes]):  # type: ignore[no-untyped-def]
    """The order of a topic."""
    places = {value: number for number, value in enumerate(found)}
    return lambda value: places.get(value, -1)


def take_writer_lock(hands: Hands, name: str, notes: str) -> None:
    """Wait for the topic, send ten messages, give it back."""
    hands.own("wait_for_exclusive", timeout=LONG)
    fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in range(10):
        value = f"{name}/{number}".encode()
        hands.send(value)
        os.write(fd, value + b"\n")
    assert hands.producer is not None
    hands.producer.close()


def queue(hands: Hands, count: int) -> int:
    """Request the topic so many times at once."""
    hands.open(**IN_MEMORY)
    topic = hands.topic
    hands.kept["requests"] = [
        topic.producer_async("wait_for_exclusive", priority=n % 7) for n in range(count)
    ]
    return len(hands.kept["requests"])


def promoted(hands: Hands, seconds: float) -> int:
    """Wait until one of the requests is granted; how many are."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done := [r for r in hands.kept["requests"] if r.done()]:
            hands.producer = done[0].result(0)
            return len(done)
        time.sleep(0.01)
    return 0


def queued(hands: Hands) -> int:
    """How many wait."""
    return len(hands.topic.waiters)


@case(4, fast=False, twin=False)
def a_queue_of_a_hundred_thousand(scene: Scene, variant: int) -> None:
    """A few processes request one topic 100,000 times; the owner is killed: exactly one of them is
    owner soon afterwards, and the others go with their processes. In memory: each request is a
    durable transaction."""
    each, ledger = 100_000 // variant, scene.tmpfs("memory") / "log"
    owner = scene.owner(ledger, opening=IN_MEMORY)
    actors = [scene.actor(ledger, name=f"queue {number}") for number in range(variant)]
    for made in actors:
        made.start(queue, each)
    for made in actors:
        scene.works(made.said(LONG * 2))
    said = owner.ask(queued, wait=LONG)
    if scene.works(said) and said.value != each * variant:
        scene.blame("keeps", f"{said.value} of {each * variant} wait")
    begun = time.monotonic()
    owner.kill()
    for made in actors:
        made.start(promoted, 10.0)
    winners = [made for made in actors if (answer := made.said(30)).ok and answer.value]
    if len(winners) != 1:
        scene.blame("keeps", f"{len(winners)} owners after {time.monotonic() - begun:.1f} s")
        return
    scene.works(winners[0].send(b"3"))
    for made in actors:
        if made is not winners[0]:
            made.kill()
    winners[0].signal(signal.SIGKILL)
    last: Actor = scene.actor(ledger)
    scene.works(last.open(**IN_MEMORY))
    scene.works(last.own("wait_for_exclusive", timeout=LONG, wait=LONG + ANSWERS_WITHIN))
    scene.works(last.send(b"4"))
    scene.keeps(actor=last)
