"""How much each instrument does.

A full run is made of slices, each of them added to the card when it is done: it can be ended at any
moment, and none of its time limits grows with the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from proof import cluster_world, world

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Size:
    """What one slice of each instrument does."""

    name: str
    worlds: tuple[world.World, ...]
    torture_seconds: float
    unreported_seconds: float
    kill_points: int  # of each of the four sweeps; -1: every one
    random_kills: int  # kills at full speed
    flips: int
    holed_journals: int
    disks: int  # for each flush
    cuts: int  # of the power, on each file system
    inputs: int  # of the fuzzer,
    guided: int  # and so many more that coverage guides, with AddressSanitizer
    examples: int  # of the state machine
    history_seconds: float
    failpoint_calls: int  # of each place,
    failpoint_places: int  # of so many of them, at random; 0: of all
    state_seconds: float  # of each kind of history
    torn_writes: int  # by each kind of writer
    compactors: int  # that are killed
    cluster_faults: int  # of the cluster's torture
    cluster_worlds: tuple[cluster_world.Size, ...]  # of the cluster's model
    slices: Mapping[str, int] = field(default_factory=dict)  # of an instrument; else one
    slice: int = 0  # this one,
    of: int = 1  # of so many

    def sliced(self, instrument: str) -> Iterator[Size]:
        """The slices of this instrument."""
        of = self.slices.get(instrument, 1)
        for number in range(of):
            yield replace(self, slice=number, of=of)

    @property
    def controlled(self) -> bool:
        """Do the controls belong to this slice? The first one has them for all; the check of a
        mutant needs none."""
        return self.slice == 0 and self.name != "tiny"

    @property
    def quick(self) -> bool:
        """Is it to be done within a minute or two?"""
        return self.name in ("tiny", "small")

    def share(self, things: Sequence[Thing]) -> list[Thing]:
        """This slice's part of what all slices together go through."""
        return list(things[self.slice :: self.of])


SMALL_WORLDS = (*world.SMALL_WORLDS[:2], *world.SMALL_MOVING_WORLDS[:3])
SIZES = {
    size.name: size
    for size in (
        Size(
            "tiny",
            SMALL_WORLDS,
            torture_seconds=8,
            unreported_seconds=8,
            kill_points=12,
            random_kills=40,
            flips=300,
            holed_journals=1,
            disks=3,
            cuts=2,
            inputs=30_000,
            guided=0,
            examples=20,
            history_seconds=6,
            failpoint_calls=1,
            failpoint_places=0,
            state_seconds=2,
            torn_writes=10,
            compactors=40,
            cluster_faults=25,
            cluster_worlds=cluster_world.SMALL_SIZES,
        ),
        Size(
            "small",
            SMALL_WORLDS,
            torture_seconds=20,
            unreported_seconds=10,
            kill_points=12,
            random_kills=60,
            flips=400,
            holed_journals=1,
            disks=2,
            cuts=4,
            inputs=100_000,
            guided=0,
            examples=15,
            history_seconds=8,
            failpoint_calls=1,
            failpoint_places=7,
            state_seconds=3,
            torn_writes=10,
            compactors=40,
            cluster_faults=25,
            cluster_worlds=cluster_world.SMALL_SIZES,
        ),
        Size(
            "medium",
            tuple(world.WORLDS.values())[:3],
            torture_seconds=150,
            unreported_seconds=120,
            kill_points=100,
            random_kills=1000,
            flips=3000,
            holed_journals=3,
            disks=20,
            cuts=25,
            inputs=500_000,
            guided=60_000,
            examples=150,
            history_seconds=60,
            failpoint_calls=3,
            failpoint_places=0,
            state_seconds=20,
            torn_writes=50,
            compactors=200,
            cluster_faults=100,
            cluster_worlds=cluster_world.MEDIUM_SIZES,
        ),
        Size(
            "full",
            (*world.WORLDS.values(), *world.MOVING_WORLDS.values(), *world.LARGE_WORLDS.values()),
            torture_seconds=150,
            unreported_seconds=150,
            kill_points=-1,
            random_kills=1000,
            flips=1000,
            holed_journals=3,
            disks=20,
            cuts=25,
            inputs=1_000_000,
            guided=200_000,
            examples=500,
            history_seconds=60,
            failpoint_calls=3,
            failpoint_places=0,
            state_seconds=20,
            torn_writes=50,
            compactors=200,
            cluster_faults=110,
            cluster_worlds=cluster_world.ALL_SIZES,
            slices={
                "model": 16,
                "cluster-model": len(cluster_world.ALL_SIZES),
                "stateful": 20,
                "torture": 8,
                "unreported": 8,
                "cluster-torture": 10,
                "histories": 10,
                "state": 10,
                "compaction": 10,
                "failpoints": 10,
                "kill-sweep": 6,
                "random-kills": 11,
                "crash-states": 33,
                "power-cuts": 10,
                "environments": 4,
                "bit-flips": 100,
                "fuzz": 10,
                "round-trips": 5,
                "mutants": 8,
            },
        ),
    )
}
