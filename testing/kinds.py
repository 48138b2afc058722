"""Values that serialisers take: how to make many of them, and the classes of models (rule G10)."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import os
import uuid
import zoneinfo
from typing import Any, Literal, NamedTuple, TypedDict

import attrs
import msgspec
import pydantic
import pydantic.dataclasses
from hypothesis import strategies as some

# ---- classes -----------------------------------------------------------------------------


class Size(enum.Enum):
    SMALL, LARGE = "s", "l"


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Colour(enum.StrEnum):
    RED = "red"


class Swapped(enum.Enum):
    """Encoded by the value that its `__init__` gives it, found by the one that it had before."""

    FIRST, SECOND = "a", "b"

    def __init__(self, value: str) -> None:
        self._value_ = {"a": "b", "b": "a"}[value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (Swapped, self.name)  # as later Pythons pickle it: by its name


class Lenient(enum.Enum):
    """Takes every value. Its members are told apart by nothing but their identity."""

    RIGHT, WRONG = 1, 2

    @classmethod
    def _missing_(cls, value: object) -> Lenient:
        return cls.RIGHT

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lenient)

    def __hash__(self) -> int:
        return 1


LEARNT: dict[object, Any] = {}


class Growing(str, enum.Enum):
    """`learn` makes members of it, which other processes do not know."""

    KNOWN = "known"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return LEARNT.get(value)


class Rights(enum.Flag, boundary=enum.KEEP):
    READ, WRITE = 1, 2


class Bits(enum.IntFlag):
    """An int that has items, which are such ints."""

    LEFT, RIGHT = 1, 2


class Masks(enum.Flag):
    """One bit of 64 is known where it was learnt."""

    LEFT, RIGHT = 1, 2

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        return LEARNT.get(value) or super()._missing_(value)


def learn(kind: Any, value: Any) -> Any:
    """A member that this process alone has."""
    if value not in LEARNT:
        made = str.__new__(kind, value) if issubclass(kind, str) else object.__new__(kind)
        made._name_, made._value_ = "LEARNT", value
        LEARNT[value] = kind._value2member_map_[value] = made
    return LEARNT[value]


class Point(NamedTuple):
    x: int
    y: float = 0.0


class Limits(TypedDict, total=False):
    least: int
    most: float | None


class Tag(msgspec.Struct, frozen=True):
    name: str
    weight: float = 1.0


@attrs.define
class Owner:
    name: str
    born: dt.date | None = None


@dataclasses.dataclass
class Order:
    number: int
    price: float = 0.0
    size: Size = Size.SMALL
    level: Level = Level.LOW
    mode: Literal["a", "b", 3] = "a"
    paid: bool = False
    note: str | None = None
    tags: set[str] = dataclasses.field(default_factory=set)
    codes: frozenset[int] = frozenset()
    pair: tuple[int, str] = (0, "")
    by_number: dict[int, str] = dataclasses.field(default_factory=dict)
    at: dt.datetime | None = None
    hour: dt.time | None = None
    amount: decimal.Decimal = decimal.Decimal(0)
    uid: uuid.UUID | None = None
    data: bytes = b""
    took: dt.timedelta = dt.timedelta(0)
    anything: Any = None
    point: Point | None = None
    tag: Tag | None = None
    owner: Owner | None = None
    limits: Limits = dataclasses.field(default_factory=lambda: Limits())
    parts: list[Order] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Item:
    """Nothing but what msgspec gives back: such objects are not decoded to find out."""

    name: str
    count: int = 1
    price: float = 0.0
    paid: bool = False
    size: Size | None = None
    level: Level = Level.LOW
    at: dt.datetime | None = None
    day: dt.date | None = None
    uid: uuid.UUID | None = None
    data: bytes = b""
    tags: set[str] = dataclasses.field(default_factory=set)
    codes: tuple[int, ...] = ()
    pair: tuple[int, str] = (0, "")
    amount: decimal.Decimal = decimal.Decimal(0)
    took: dt.timedelta = dt.timedelta(0)
    hour: dt.time | None = None
    either: int | str | list[bool] | None = None
    by_number: dict[int, str] = dataclasses.field(default_factory=dict)
    by_name: dict[str, Item] = dataclasses.field(default_factory=dict)
    parts: list[Item] = dataclasses.field(default_factory=list)
    inner: Item | None = None


@dataclasses.dataclass
class Choice:
    """Enums whose code decides what comes back."""

    swapped: Swapped | None = None
    lenient: Lenient | None = None
    growing: Growing | None = None
    rights: Rights | None = None
    bits: Bits | None = None
    masks: Masks | None = None
    several: list[Growing] = dataclasses.field(default_factory=list)
    by_name: dict[Growing, int] = dataclasses.field(default_factory=dict)


@pydantic.dataclasses.dataclass
class Option:
    """The same, by pydantic."""

    swapped: Swapped | None = None
    lenient: Lenient | None = None
    growing: Growing | None = None
    rights: Rights | None = None
    bits: Bits | None = None
    masks: Masks | None = None
    several: list[Growing] = dataclasses.field(default_factory=list)
    by_name: dict[Growing, int] = dataclasses.field(default_factory=dict)


class Payment(pydantic.BaseModel):
    number: int = pydantic.Field(default=5, alias="no")
    price: float = 0.0
    maybe: float | None = None
    size: Size = Size.SMALL
    tags: set[str] = set()
    pair: tuple[int, str] = (0, "")
    at: dt.datetime | None = None
    amount: decimal.Decimal = decimal.Decimal(0)
    uid: uuid.UUID = uuid.UUID(int=0)
    data: bytes = b""
    took: dt.timedelta = dt.timedelta(0)
    anything: Any = None
    secret: pydantic.SecretStr | None = None
    left_out: int = pydantic.Field(default=0, exclude=True)
    by_pair: dict[tuple[int, int], str] = {}
    parts: list[Payment] = []

    model_config = pydantic.ConfigDict(extra="forbid")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def doubled(self) -> int:
        return 2 * self.number


class Bill(pydantic.BaseModel):
    """Nothing but what pydantic gives back: such objects are not decoded to find out."""

    name: str
    count: int = 1
    price: float = 0.0
    paid: bool = False
    maybe: float | None = None
    at: dt.datetime | None = None
    day: dt.date = dt.date(2026, 1, 2)
    tags: list[str] = []
    by_name: dict[str, int] = {}
    parts: list[Bill] = []
    inner: Bill | None = None
    uid: uuid.UUID | None = None
    amount: decimal.Decimal = decimal.Decimal(0)
    hour: dt.time | None = None
    data: bytes = b""
    size: Size = Size.SMALL
    level: Level = Level.LOW
    mode: Literal["a", "b"] = "a"
    codes: set[int] = set()
    names: frozenset[str] = frozenset()
    pair: tuple[int, str] = (0, "")
    row: tuple[float, ...] = ()


class Sparse(msgspec.Struct, omit_defaults=True):
    """One of its defaults is another one in each process."""

    number: int = 0
    made_by: int = os.getpid()
    tags: list[str] = []
    inner: Sparse | None = None


class Stock(pydantic.BaseModel):
    """Collections that Python compares without the classes of their items."""

    newest: collections.deque[Any] = collections.deque()
    counts: collections.defaultdict[str, int] = collections.defaultdict(int)
    ordered: collections.OrderedDict[str, int] = collections.OrderedDict()
    counted: collections.Counter[str] = collections.Counter()
    listed: collections.abc.Sequence[Any] = []
    parts: collections.deque[Stock] = collections.deque()


# ---- values ------------------------------------------------------------------------------


class Text(str):
    """A subclass."""


TEXTS = some.text(max_size=5) | some.sampled_from(["\ud800", "\x00"])
INTS = some.integers() | some.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63) - 1])
INTS |= some.just(7000).map(lambda bits: 1 << bits)  # not written out in hypothesis' texts
FLOATS = some.floats() | some.sampled_from([0.0, -0.0, 1.0])
ZONES = some.sampled_from(
    [
        None,
        dt.UTC,
        dt.timezone(dt.timedelta(hours=-3, seconds=7)),
        dt.timezone(dt.timedelta(hours=1), "CET"),
        zoneinfo.ZoneInfo("Europe/Berlin"),
        zoneinfo.ZoneInfo.no_cache("Europe/Berlin"),
    ]
)
DATETIMES = some.builds(
    lambda at, zone, fold: at.replace(tzinfo=zone, fold=fold),
    some.datetimes() | some.just(dt.datetime(2026, 10, 25, 2, 30)),
    ZONES,
    some.integers(0, 1),
)
TIMES = some.builds(
    lambda at, zone, fold: at.replace(tzinfo=zone, fold=fold),
    some.times(),
    ZONES,
    some.integers(0, 1),
)
ODD = some.sampled_from(
    [
        Level.HIGH,
        Colour.RED,
        Size.LARGE,
        Point(1),
        Text("x"),
        bytearray(b"x"),
        range(3),
        ...,
        decimal.Decimal("sNaN"),
        decimal.Decimal("1.10"),
        decimal.Decimal("-0"),
        object,
    ]
)
SCALARS = some.one_of(
    some.none(),
    some.booleans(),
    INTS,
    FLOATS,
    TEXTS,
    some.binary(max_size=5),
    DATETIMES,
    TIMES,
    some.dates(),
    some.timedeltas(),
    some.decimals(),
    some.complex_numbers(),
    some.uuids(),
    ODD,
)
HASHED = some.recursive(
    SCALARS.filter(lambda value: _hashable(value)),
    lambda inner: some.tuples(inner, inner) | some.frozensets(inner, max_size=3),
    max_leaves=4,
)
VALUES = some.recursive(
    SCALARS,
    lambda inner: some.one_of(
        some.lists(inner, max_size=3),
        some.tuples(inner, inner),
        some.sets(HASHED, max_size=4),
        some.dictionaries(TEXTS | HASHED, inner, max_size=3),
        HASHED,
        some.dictionaries(some.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def objects(cls: Any, always: str, **fields: Any) -> some.SearchStrategy[Any]:
    """Objects of a class, some fields of which are left out, but never one."""

    def made(given: dict[str, Any]) -> Any:
        # Not checked: what a program assigns is not either.
        return cls.model_construct(**given) if hasattr(cls, "model_construct") else cls(**given)

    names = some.sets(some.sampled_from([*fields]), max_size=4)
    return names.flatmap(
        lambda some_names: some.fixed_dictionaries(
            {name: fields[name] for name in {*some_names, always}}
        )
    ).map(made)


COMMON = {
    "number": some.integers(0, 9) | INTS | FLOATS,
    "price": FLOATS | some.integers(0, 2),
    "size": some.sampled_from([Size.LARGE, "l"]),
    "tags": some.sets(TEXTS, max_size=3),
    "pair": some.sampled_from([(1, "a"), [1, "a"], (1,)]),
    "at": DATETIMES,
    "amount": some.decimals() | some.just(1),
    "uid": some.uuids(),
    "data": some.binary(max_size=3),
    "took": some.timedeltas(),
    "anything": VALUES,
}
ORDERS = objects(
    Order,
    "number",
    **COMMON,
    level=some.sampled_from([Level.HIGH, 2]),
    mode=some.sampled_from(["b", 3, 3.0]),
    paid=some.sampled_from([True, 1]),
    note=TEXTS,
    codes=some.frozensets(INTS, max_size=3),
    by_number=some.dictionaries(INTS | some.booleans(), TEXTS, max_size=2),
    hour=TIMES,
    point=some.builds(Point, some.integers(0, 3), FLOATS),
    tag=some.builds(Tag, TEXTS, FLOATS),
    owner=some.builds(Owner, TEXTS, some.dates()),
    limits=some.fixed_dictionaries({}, optional={"least": INTS, "most": FLOATS, "other": INTS}),
    parts=some.lists(some.builds(Order, some.integers(0, 5)), max_size=2),
)
PAYMENTS = objects(
    Payment,
    "number",
    **COMMON,
    maybe=FLOATS,
    secret=some.builds(pydantic.SecretStr, some.text(max_size=3)),
    left_out=some.integers(0, 3),
    by_pair=some.dictionaries(some.tuples(some.integers(0, 2), some.integers(0, 2)), TEXTS),
    parts=some.lists(some.builds(Payment, no=some.integers(0, 5)), max_size=2),
)
PLAIN_ITEMS = some.builds(Item, TEXTS, some.integers(0, 9) | INTS, FLOATS)
ITEMS = objects(
    Item,
    "name",
    name=TEXTS,
    count=some.integers(0, 9) | INTS,
    price=FLOATS | some.integers(0, 2),
    paid=some.sampled_from([True, 1]),
    size=some.sampled_from([Size.LARGE, "l"]),
    level=some.sampled_from([Level.HIGH, 2]),
    at=DATETIMES,
    day=some.dates() | DATETIMES,
    uid=some.uuids(),
    data=some.binary(max_size=3),
    tags=some.sets(TEXTS | INTS, max_size=3),
    codes=some.tuples(INTS, INTS),
    pair=some.sampled_from([(1, "a"), [1, "a"], (1,), (1, "a", 2)]),
    amount=some.decimals() | some.just(1),
    took=some.timedeltas(),
    hour=TIMES,
    either=INTS | TEXTS | some.lists(some.booleans() | INTS, max_size=2) | FLOATS,
    by_number=some.dictionaries(INTS | some.booleans(), TEXTS, max_size=2),
    by_name=some.dictionaries(TEXTS | INTS, PLAIN_ITEMS, max_size=2),
    parts=some.lists(PLAIN_ITEMS, max_size=2),
    inner=PLAIN_ITEMS,
)
PLAIN_BILLS = some.builds(Bill.model_construct, name=TEXTS, count=INTS | some.booleans())
BILLS = objects(
    Bill,
    "name",
    name=TEXTS,
    count=some.integers(0, 9) | INTS,
    price=FLOATS | some.integers(0, 2),
    paid=some.sampled_from([True, 1]),
    maybe=FLOATS,
    at=DATETIMES,
    day=some.dates() | DATETIMES,
    tags=some.lists(TEXTS, max_size=2),
    by_name=some.dictionaries(TEXTS, INTS, max_size=2),
    parts=some.lists(PLAIN_BILLS, max_size=2),
    inner=PLAIN_BILLS,
    uid=some.uuids(),
    amount=some.decimals() | some.just(1),
    hour=TIMES,
    data=some.binary(max_size=3),
    size=some.sampled_from([Size.LARGE, "l"]),
    level=some.sampled_from([Level.HIGH, 2]),
    mode=some.sampled_from(["a", "b", "c", Text("a")]),
    codes=some.sets(INTS | some.booleans(), max_size=3),
    names=some.frozensets(TEXTS, max_size=3),
    pair=some.sampled_from([(1, "a"), [1, "a"], (1,), (1, "a", 2), (True, "a")]),
    row=some.tuples(FLOATS, FLOATS | some.integers(0, 2)),
)
GROWING = some.builds(learn, some.just(Growing), some.just("new")) | some.just(Growing.KNOWN)
CHOICES = {
    "swapped": some.sampled_from(Swapped),
    "lenient": some.sampled_from(Lenient),
    "growing": GROWING,
    "rights": some.sampled_from([Rights.READ, Rights(0), Rights(3), Rights(9)]),
    "bits": some.sampled_from([Bits.LEFT, Bits(0), Bits(3), Bits(9)]),
    "masks": some.sampled_from([Masks.LEFT, Masks(0), Masks(3)])
    | some.builds(learn, some.just(Masks), some.just(64)),
    "several": some.lists(GROWING, max_size=2),
    "by_name": some.dictionaries(GROWING, some.integers(0, 3), max_size=1),
}
FEW = some.lists(SCALARS, max_size=2)
COUNTS = some.dictionaries(some.text(max_size=2), some.integers(0, 3) | some.booleans(), max_size=2)
STOCKS = objects(
    Stock,
    "newest",
    newest=some.builds(collections.deque, FEW, some.sampled_from([None, None, 3])),
    counts=some.builds(collections.defaultdict, some.sampled_from([int, float, None]), COUNTS),
    ordered=some.builds(collections.OrderedDict, COUNTS) | COUNTS,
    counted=some.builds(collections.Counter, COUNTS),
    listed=FEW | some.builds(collections.deque, FEW) | some.builds(tuple, FEW),
    parts=some.builds(collections.deque, some.lists(some.builds(Stock), max_size=1)),
)
STRATEGIES: dict[str, some.SearchStrategy[Any]] = {
    "str": TEXTS | ODD,
    "bytes": some.binary(),
    "json": VALUES,
    "msgpack": VALUES,
    "exact": VALUES,
    "choices": objects(Choice, "lenient", **CHOICES),
    "pydantic choices": objects(Option, "lenient", **CHOICES),
    "dataclass": ORDERS,
    "plain dataclass": ITEMS,
    "pydantic": PAYMENTS,
    "struct": some.builds(Tag, TEXTS, FLOATS),
    "sparse": some.builds(Sparse, INTS, inner=some.none() | some.builds(Sparse)),
    "collections": STOCKS,
    "plain pydantic": BILLS,
    "attrs": some.builds(Owner, TEXTS, some.none() | some.dates()),
    "named tuple": some.builds(Point, INTS, FLOATS | INTS),
    "typed dict": some.fixed_dictionaries({}, optional={"least": INTS, "most": FLOATS}),
}
OPTIONS: dict[str, Any] = {
    **{name: name for name in ("str", "bytes", "json", "msgpack", "exact")},
    "choices": Choice,
    "pydantic choices": Option,
    "dataclass": Order,
    "plain dataclass": Item,
    "pydantic": Payment,
    "struct": Tag,
    "sparse": Sparse,
    "collections": Stock,
    "plain pydantic": Bill,
    "attrs": Owner,
    "named tuple": Point,
    "typed dict": Limits,
}
