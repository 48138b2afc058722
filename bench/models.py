"""Objects as values: a dataclass against msgspec alone, a model against pydantic alone (P34)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.measure import Arm, Figure, Settings, Target, take_turns
from bench.unflushed import RUN, RUNS, cost_of_runs
from exclusivelog import serde

Call = Callable[[], object]


@dataclasses.dataclass
class Line:
    name: str
    count: int
    price: float


@dataclasses.dataclass
class Order:
    number: int
    customer: str
    paid: bool
    note: str | None
    tags: list[str]
    lines: list[Line]


@dataclasses.dataclass
class Item:
    id: int
    name: str
    tags: list[str]
    price: float


LINES = [Line("tea", 2, 1.5), Line("cup", 1, 2.25), Line("pot", 1, 20.0)]
ORDER = Order(7, "ada", True, None, ["a", "b", "c"], LINES)
ITEM = Item(1, "a" * 20, ["x", "y"], 1.5)


def p34(settings: Settings) -> Figure:
    """The cost of dumping and loading one object, without any log."""
    figure = Figure("P34", "a dataclass or a pydantic model as value")
    kinds = {
        "a dataclass": _by_msgspec(ITEM),
        "a dataclass with a list of others": _by_msgspec(ORDER),
        "a pydantic model": _by_pydantic(),
    }
    pairs = {
        f"{what} {name}": pair for name, calls in kinds.items() for what, pair in calls.items()
    }
    arms = []
    for name, (ours, rival, theirs) in pairs.items():
        arms += [_arm(name, ours), _arm(f"{name}, by {rival}", theirs, rival=True)]
    results = take_turns(arms, settings.rounds_or(15))
    figure.series = list(results.values())
    for name, (_, rival, _) in pairs.items():
        peer = results[f"{name}, by {rival}"]
        figure.compare(name, results[name], peer, Target(most_ratio=1.3))
    figure.notes.append("both give the same bytes, and read them into equal objects")
    return figure


def _arm(name: str, call: Call, rival: bool = False) -> Arm:
    return Arm(name, lambda _: cost_of_runs(call), RUN * RUNS, "s", rival=rival)


Calls = dict[str, tuple[Call, str, Call]]  # ours, and those of the library of that name


def _by_msgspec(value: Any) -> Calls:
    import msgspec

    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(type(value)).decode
    return _calls(value, "msgspec", encode, decode)


def _by_pydantic() -> Calls:
    import pydantic

    class Model(pydantic.BaseModel):
        id: int
        name: str
        tags: list[str]
        price: float

    value, adapter = Model(**dataclasses.asdict(ITEM)), pydantic.TypeAdapter(Model)
    return _calls(value, "pydantic", adapter.dump_json, adapter.validate_json)


def _calls(
    value: Any, name: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
) -> Calls:
    """Dumps and loads of one object, by the serialiser of its class and by its library."""
    ours = serde.model(type(value))
    data = ours.dumps(value)
    if data != encode(value) or not value == ours.loads(data) == decode(data):
        raise RuntimeError(f"not the same as by {name}: {value}")
    return {
        "dump": (partial(ours.dumps, value), name, partial(encode, value)),
        "load": (partial(ours.loads, data), name, partial(decode, data)),
    }
