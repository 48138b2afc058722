"""Rule G10: what comes back in the process that sends it, but not in another one, or only in part.

Each object is decoded and compared before it is sent. `==` is not enough for that: it ignores the
classes of items, the bound of a deque, attributes that are no fields. Nor is decoding: the reader's
process adds the defaults of fields that are not stored, the time, and what is on its disk. All of
that is refused before anything is appended, or stored after all.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import functools
import os
import pathlib
import subprocess
import sys
import types
import uuid
from typing import Annotated, Any, NamedTuple

import attrs
import msgspec
import pydantic
import pydantic.dataclasses
import pytest

import exclusivelog as xl
from exclusivelog import serde
from exclusivelog.comparing import difference
from testing.children import ROOT
from testing.kinds import Level, Sparse, Stock, Text

pytestmark = [pytest.mark.once, pytest.mark.rule("G10")]

deque = collections.deque


# ---- collections -------------------------------------------------------------------------


def stock(**fields: Any) -> Stock:
    """Not checked, as what a program assigns is not."""
    return Stock.model_construct(**fields)


@pytest.mark.parametrize(
    "value",
    [
        stock(newest=deque([Level.LOW])),
        stock(newest=deque([1], maxlen=2)),
        stock(newest=deque([dt.datetime(2026, 10, 25, 2, 30, fold=1)])),
        stock(newest=deque([True, {"a": (1,)}])),
        stock(counts=collections.defaultdict(lambda: 7, a=1)),
        stock(counts=collections.defaultdict(None, a=1)),
        stock(counts={"a": 1}),
        stock(ordered={"a": 1}),
        stock(listed=(1,)),
        stock(parts=deque([stock(newest=deque([Text("x")]))])),
    ],
)
def test_g10_what_a_collection_loses_is_refused(topic: xl.Topic, value: Stock) -> None:
    with topic.producer(serializer=Stock) as producer:
        with pytest.raises(ValueError, match=r"value=.*"):
            producer.send(value)
    assert topic.next_offset == 0


def test_g10_collections_come_back(topic: xl.Topic) -> None:
    value = stock(
        newest=deque([1, "a", [2.5]]),
        listed=[1],
        counted=collections.Counter("aab"),
        counts=collections.defaultdict(int, a=1),
        ordered=collections.OrderedDict(b=2, a=1),
        parts=deque([stock()]),
    )
    with topic.producer(serializer=Stock) as producer:
        producer.send(value)
    assert difference(value, next(topic.reader(deserializer=Stock)).value) is None


def test_g10_a_deque_counts_as_a_level() -> None:
    """Otherwise a value could be too deep for the stack of a thread that reads it."""
    value = stock()
    for _ in range(120):
        value = stock(parts=deque([value]))
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        serde.model(Stock).dumps(value)


class Labelled(str):
    """It has attributes, which `==` of a str ignores."""


def labelled(text: str, label: Any) -> Labelled:
    made = Labelled(text)
    made.label = label  # type: ignore[attr-defined]
    return made


class Amount:
    """`==` of its own does not look at classes."""

    def __init__(self, value: Any, seen: int = 0) -> None:
        self.value, self.seen = value, seen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Amount) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


class Rows(collections.UserList[Any]):
    """A list of the application's."""


def seven() -> int:
    return 7


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (deque([1]), deque([True])),
        (deque([1], 2), deque([1])),
        (deque([1]), deque([1, 1])),
        (collections.defaultdict(int), collections.defaultdict(seven)),
        (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
        (collections.UserDict({"a": Level.LOW}), collections.UserDict({"a": 1})),
        (Rows([Level.LOW]), Rows([1])),
        (Rows([(1,)]), Rows([[1]])),
        (types.MappingProxyType({"a": 1}), types.MappingProxyType({"a": True})),
        (collections.ChainMap({"a": 1}), collections.ChainMap({"a": 1.0})),
        ({"a": 1}.keys(), {"b": 1}.keys()),
        (labelled("a", 1), labelled("a", 2)),
        (labelled("a", 1), Labelled("a")),
        (labelled("a", 1), labelled("a", True)),
        (Amount(1), Amount(Level.LOW)),
        (Amount(1), Amount(1.0)),
        (Amount([1]), Amount([True])),
    ],
)
def test_g10_what_equality_ignores_is_a_difference(a: Any, b: Any) -> None:
    assert difference(a, b) is not None
    assert difference(b, a) is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: deque([1, "a"], 5),
        lambda: collections.defaultdict(seven, a=1),
        lambda: collections.OrderedDict(a=1, b=2),
        lambda: collections.UserDict({"a": Level.LOW}),
        lambda: Rows([1, (2,)]),
        lambda: types.MappingProxyType({"a": 1}),
        lambda: {"a": 1, "b": 2}.keys(),
        lambda: labelled("a", [1]),
        lambda: Amount((1, "a")),
        lambda: uuid.UUID(int=5),
        lambda: pathlib.Path("a/b"),
        lambda: range(3),
        lambda: dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
    ],
)
def test_g10_what_is_made_alike_is_no_difference(make: Any) -> None:
    a, b = make(), make()
    hash(a) if isinstance(a, pathlib.Path) else None  # it remembers that
    assert difference(a, b) is None


def test_g10_what_a_class_compares_differently_by_itself_is_left_to_it() -> None:
    assert difference(Amount(1, seen=1), Amount(1, seen=2)) is None


def test_g10_the_difference_in_a_deque_is_named() -> None:
    found = difference(deque([1, Level.LOW]), deque([1, 1]))
    assert found == "value[1] is Level <Level.LOW: 1>, and comes back as int 1"
    bounded = difference(deque([1], 3), deque([1]))
    assert bounded == "value.maxlen is int 3, and comes back as NoneType None"


# ---- attributes that are no fields -------------------------------------------------------


@dataclasses.dataclass
class Plain:
    n: int

    @functools.cached_property
    def doubled(self) -> int:
        return 2 * self.n


class Loose(msgspec.Struct, dict=True):
    n: int


@attrs.define(slots=False)
class Open:
    n: int


class Place(NamedTuple):
    n: int


class Placed(Place):
    """It has a dict, as it does not define `__slots__`."""


class Modelled(pydantic.BaseModel):
    n: int

    def __init__(self, n: int) -> None:
        super().__init__(n=n)


@pytest.mark.parametrize("cls", [Plain, Loose, Open, Placed, Modelled])
def test_g10_an_attribute_that_is_no_field_is_refused(topic: xl.Topic, cls: Any) -> None:
    with topic.producer(serializer=cls) as producer:
        producer.send(cls(1))
        value = cls(1)
        value.__dict__["total"] = [1]
        with pytest.raises(ValueError, match=r"the attribute total list \[1\] does not come back"):
            producer.send(value)
    assert topic.next_offset == 1


def test_g10_a_cached_property_is_no_attribute_of_its_own() -> None:
    value = Plain(2)
    assert value.doubled == 4
    codec = serde.model(Plain)
    assert codec.loads(codec.dumps(value)).doubled == 4


# ---- fields that are not stored ----------------------------------------------------------


class Excluded(pydantic.BaseModel):
    pid: int = pydantic.Field(default_factory=os.getpid, exclude=True)


class ExcludedConstant(pydantic.BaseModel):
    pid: str = pydantic.Field(default=os.environ.get("PATH", "none"), exclude=True)


class ExcludedFunction(pydantic.BaseModel):
    pid: str | None = pydantic.Field(
        default_factory=lambda: os.environ.get("EXCLUSIVELOG_NONE"), exclude=True
    )


class ExcludedSometimes(pydantic.BaseModel):
    n: int = 0
    pid: int = pydantic.Field(default_factory=os.getpid)

    @pydantic.model_serializer
    def store(self) -> dict[str, int]:
        return {"n": self.n}


class Private(pydantic.BaseModel):
    _pid: int = pydantic.PrivateAttr(default_factory=os.getpid)


class PrivateConstant(pydantic.BaseModel):
    _pid: int = os.getpid()


@pydantic.dataclasses.dataclass
class ExcludedField:
    pid: int = pydantic.Field(default_factory=os.getpid, exclude=True)


@pytest.mark.parametrize(
    "cls",
    [
        Excluded,
        ExcludedConstant,
        ExcludedFunction,
        ExcludedSometimes,
        Private,
        PrivateConstant,
        ExcludedField,
    ],
)
def test_g10_a_field_that_is_not_stored_is_refused_if_its_default_may_differ(
    topic: xl.Topic, cls: Any
) -> None:
    outer = pydantic.create_model("Outer", parts=(dict[str, list[cls]], ...))
    for kind, value in ((cls, cls()), (outer, outer(parts={"a": [cls()]}))):
        with topic.producer(serializer=kind) as producer:
            with pytest.raises(REFUSALS, match=rf"{cls.__name__}\._?pid is not stored"):
                producer.send(value)
    assert topic.next_offset == 0
    assert serde.model(cls).loads(b"{}") == cls()  # what an older version has stored is read


REFUSALS = (TypeError, ValueError)


class Harmless(pydantic.BaseModel):
    uid: uuid.UUID = pydantic.Field(default_factory=uuid.uuid4)
    secret: pydantic.SecretStr = pydantic.SecretStr("s")
    cache: dict[str, int] = pydantic.Field(default_factory=dict, exclude=True)
    debug: bool = pydantic.Field(default=True, exclude=True)
    note: str | None = pydantic.Field(default=None, exclude=True)
    needed: int = pydantic.Field(exclude=True, default=0)
    _seen: list[int] = pydantic.PrivateAttr(default_factory=list)
    _client: Any = None
    _later: int = pydantic.PrivateAttr()

    @pydantic.field_serializer("secret")
    def reveal(self, secret: pydantic.SecretStr) -> str:
        return secret.get_secret_value()


class Deferred(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(defer_build=True)
    parts: list[Deferred] = pydantic.Field(default_factory=list)


@pytest.mark.parametrize("value", [Harmless(), Deferred(parts=[Deferred()])])
def test_g10_what_is_stored_or_empty_in_every_process_is_taken(value: Any) -> None:
    codec = serde.model(type(value))
    assert difference(value, codec.loads(codec.dumps(value))) is None


class Renamed(msgspec.Struct, omit_defaults=True, rename="camel", tag="renamed", frozen=True):
    made_by: int = os.getpid()
    unset: int | msgspec.UnsetType = msgspec.UNSET


class Row(msgspec.Struct, omit_defaults=True, array_like=True, tag=True):
    made_by: int = os.getpid()
    parts: tuple[Renamed, ...] = (Renamed(),)


class Outer(msgspec.Struct):
    by_name: dict[str, list[Renamed]]
    row: Row
    place: Place
    plain: Plain
    open: Open


OUTER = Outer({"a": [Renamed()]}, Row(), Place(1), Plain(2), Open(3))
READS = """
import sys
from exclusivelog import serde
from tests.messages import test_elsewhere as here
for name in ("Sparse", "Renamed", "Row", "Outer"):
    found = serde.model(getattr(here, name)).loads(bytes.fromhex(sys.stdin.readline()))
    print(*here.makers(found))
"""


def makers(value: Any) -> list[int]:
    """The numbers of the processes that an object names."""
    parts = [*value.by_name["a"], value.row] if isinstance(value, Outer) else [value]
    return [each.made_by for each in parts]


@pytest.mark.long
def test_g10_a_struct_is_stored_with_the_defaults_of_its_process() -> None:
    """Those that `omit_defaults` leaves out would be other ones in the process that reads it."""
    objects = [Sparse(inner=Sparse()), Renamed(), Row(), OUTER]
    stored = "".join(f"{serde.model(type(each)).dumps(each).hex()}\n" for each in objects)
    ran = subprocess.run(
        [sys.executable, "-c", READS], input=stored, cwd=ROOT, capture_output=True, text=True
    )
    assert ran.stderr == ""
    assert ran.stdout.split() == [str(os.getpid())] * 5


# ---- types that depend on the time or the disk -------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (pydantic.FutureDatetime, dt.datetime(2999, 1, 2), "in the future"),
        (pydantic.PastDatetime, dt.datetime(2020, 1, 2), "in the past"),
        (pydantic.FutureDate, dt.date(2999, 1, 2), "in the future"),
        (pydantic.PastDate, dt.date(2020, 1, 2), "in the past"),
        (pydantic.FilePath, pathlib.Path(__file__), "on the disk"),
        (pydantic.DirectoryPath, pathlib.Path("/"), "on the disk"),
        (pydantic.NewPath, pathlib.Path("/there-is-none"), "on the disk"),
        (Annotated[pydantic.FilePath | None, "note"], None, "on the disk"),
    ],
)
def test_g10_a_type_that_depends_on_the_time_or_the_disk_is_refused(
    topic: xl.Topic, kind: Any, value: Any, words: str
) -> None:
    """A future date that is stored today cannot be read later."""
    cls = pydantic.create_model("Dated", at=(kind, ...))
    with topic.producer(serializer=cls) as producer:
        with pytest.raises(TypeError, match=rf"Dated\.at takes only what is.* {words}"):
            producer.send(cls(at=value))
    assert topic.next_offset == 0
