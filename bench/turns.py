"""Turns of one engine: no call keeps another one waiting (P35, rule K4).

A send beside back-to-back transactions of the same producer, a grant beside a sender at full
speed, and a checkpoint beside both; each also alone. All are threads of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import exclusivelog as xl
from bench.append import messages
from bench.company import BATCH, Act, meanwhile, send_in_transaction
from bench.measure import (
    POWER,
    PROCESS,
    Arm,
    Figure,
    Series,
    Settings,
    Stores,
    Target,
    consecutive,
    take_turns,
)

SECONDS, MOST_CALLS = 0.5, 100_000  # per round
STALLED = 0.5  # seconds that transactions wait at most for a sender that does not come (K4)
SHARES = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
DURABILITIES = {"power": POWER, "process": PROCESS}


@dataclass(frozen=True)
class Turn:
    """A call, and what goes on beside it."""

    name: str
    call: Act
    company: str
    acts: Sequence[Act]


def p35(settings: Settings) -> Figure:
    """How long each call takes alone, and beside the others, under both durabilities."""
    figure = Figure("P35", "turns: calls beside others of the same producer and engine")
    for durability in DURABILITIES:
        with Stores(settings) as stores:
            engine = stores.engine(durability=durability)
            _measure(figure, turns_of(engine), durability, settings.rounds_or(7))
    figure.notes.append(f"the checkpoint includes a send of {BATCH} messages, which it moves")
    return figure


def turns_of(engine: xl.Engine) -> list[Turn]:
    value = messages(1)[0]
    shared, other = (engine.topic(name).producer("exclusive") for name in ("shared", "other"))
    transactions = partial(send_in_transaction, engine, shared, value)
    sends = partial(other.send, value)
    return [
        Turn("send", partial(shared.send, value), "transactions of its producer", [transactions]),
        Turn("grant", partial(_grant, engine.topic("granted")), "a sender", [sends]),
        Turn("checkpoint", _checkpoints(engine), "both", [transactions, sends]),
    ]


def _grant(topic: xl.Topic) -> None:
    topic.producer("exclusive").close()


def _checkpoints(engine: xl.Engine) -> Act:
    producer, values = engine.topic("checkpointed").producer(), messages(BATCH)

    def checkpoint() -> None:
        producer.send_many(values)
        engine.ledger.checkpoint()

    return checkpoint


def _measure(figure: Figure, turns: Sequence[Turn], durability: str, rounds: int) -> None:
    survives = DURABILITIES[durability]
    arms = []
    for turn in turns:
        for name, acts in ((f"{turn.name} alone", []), (_name(turn), turn.acts)):
            work = partial(_timed, turn.call, acts)
            arms.append(Arm(f"{name}, {durability}", work, unit="s", durability=survives))
    results = take_turns(arms, rounds)
    figure.series += [one.thinned() for one in results.values()]
    for turn in turns:
        alone = results[f"{turn.name} alone, {durability}"]
        _judge(figure, results[f"{_name(turn)}, {durability}"], alone)


def _name(turn: Turn) -> str:
    return f"{turn.name} beside {turn.company}"


def _timed(call: Callable[[], object], acts: Sequence[Act], _: object) -> list[float]:
    with meanwhile(*acts):
        return consecutive(call, MOST_CALLS, SECONDS)


def _judge(figure: Figure, ours: Series, alone: Series) -> None:
    for what, share in SHARES.items():
        target = Target(most=STALLED) if what == "longest" else None
        figure.compare_at(share, f"{ours.name}: {what}", ours, alone, target)
