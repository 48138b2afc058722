"""Rule G10: what a class declares of its values, and what its objects have beside them.

A bound (`gt=0`, `max_length=3`) is checked by whoever reads, so it is checked before a value is
sent: `model_construct` and assignments do not. That costs a look at the object, not another
decoding. A name for a type (`type Orders = list[Order]`) is a schema as a class is one. What no
field has, and neither library stores, is refused by name: items of a dataclass that extends list,
a slot of a subclass of datetime, numbers that JSON or another process does not take.
"""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import datetime as dt
import decimal
import fractions
import functools
import json
import pickle
import subprocess
import sys
import time
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, NewType, TypedDict, TypeVar, cast

import attrs
import msgspec
import numpy as np
import pydantic
import pydantic.alias_generators
import pydantic.dataclasses
import pytest
import typing_extensions

import exclusivelog as xl
from exclusivelog import serde
from exclusivelog.comparing import difference
from testing.children import ROOT
from testing.kinds import Bill, Item, Order, Point, Tag

pytestmark = [pytest.mark.once, pytest.mark.rule("G10")]

D = decimal.Decimal
ZERO = D(0)
REFUSALS = (TypeError, ValueError)
JANUARY, MAY = dt.datetime(2026, 1, 2), dt.datetime(2026, 5, 6)


def is_plain(cls: Any, value: Any) -> bool:
    """Whether an object is encoded without decoding it."""
    return bool(serde.model(cls).dumps.__self__.shape.holds(value))  # type: ignore[attr-defined]


# ---- bounds ------------------------------------------------------------------------------


class Bounded(pydantic.BaseModel):
    count: int = pydantic.Field(default=1, gt=0, le=5)
    price: float = pydantic.Field(default=1.0, ge=0, lt=10.5)
    dozen: int = pydantic.Field(default=0, multiple_of=12)
    name: str = pydantic.Field(default="ab", min_length=2, max_length=3)
    data: bytes = pydantic.Field(default=b"", max_length=3)
    amount: D = pydantic.Field(default=D(1), max_digits=5, decimal_places=2, gt=-1000)
    at: dt.datetime = pydantic.Field(default=MAY, ge=JANUARY)
    codes: list[int] = pydantic.Field(default=[1], min_length=1, max_length=2)
    tags: set[str] = pydantic.Field(default={"a"}, max_length=2)
    row: tuple[int, ...] = pydantic.Field(default=(), max_length=2)
    by_name: dict[Annotated[str, pydantic.Field(max_length=2)], int] = pydantic.Field(
        default={}, max_length=1
    )
    maybe: pydantic.PositiveInt | None = None


@dataclasses.dataclass
class Limited:
    count: Annotated[int, msgspec.Meta(gt=0, le=5, multiple_of=1)] = 1
    price: Annotated[float, msgspec.Meta(ge=0.0, lt=10.5)] = 1.0
    name: Annotated[str, msgspec.Meta(min_length=2, max_length=3)] = "ab"
    codes: Annotated[list[int], msgspec.Meta(min_length=1, max_length=2)] = dataclasses.field(
        default_factory=lambda: [1]
    )
    by_name: Annotated[dict[str, int], msgspec.Meta(max_length=1)] = dataclasses.field(
        default_factory=dict
    )
    maybe: Annotated[int, msgspec.Meta(gt=0)] | None = None


def bounded(**fields: Any) -> Bounded:
    return Bounded.model_construct(**fields)


WITHIN = [
    {},
    {"count": 5},
    {"price": 0.0},
    {"dozen": 24},
    {"name": "abc"},
    {"amount": D("999.99")},
    {"at": JANUARY},
    {"codes": [1, 2]},
    {"row": (1, 2)},
    {"by_name": {"ab": 1}},
    {"maybe": 1},
    {"data": b"abc"},
]
BEYOND = [
    {"count": 0},
    {"count": 6},
    {"price": -0.5},
    {"price": 10.5},
    {"name": "a"},
    {"name": "abcd"},
    {"codes": []},
    {"codes": [1, 2, 3]},
    {"by_name": {"a": 1, "b": 1}},
    {"maybe": 0},
]
BEYOND_BY_PYDANTIC = [
    *BEYOND,
    {"dozen": 13},
    {"data": b"abcd"},
    {"amount": D("1.234")},
    {"amount": D("12345")},
    {"amount": D(-1000)},
    {"amount": D("1E+5")},
    {"at": dt.datetime(2025, 1, 2)},
    {"tags": {"a", "b", "c"}},
    {"row": (1, 2, 3)},
    {"by_name": {"abc": 1}},
]


@pytest.mark.parametrize("fields", WITHIN)
def test_g10_what_is_within_its_bounds_is_not_decoded_to_find_out(fields: Any) -> None:
    value = bounded(**fields)
    assert is_plain(Bounded, value)
    codec = serde.model(Bounded)
    assert difference(value, codec.loads(codec.dumps(value))) is None
    if hasattr(Limited(), *fields or ["count"]):
        assert is_plain(Limited, Limited(**fields))


@pytest.mark.parametrize("fields", BEYOND_BY_PYDANTIC)
def test_g10_what_is_beyond_its_bounds_is_refused(topic: xl.Topic, fields: Any) -> None:
    """Whoever reads would refuse it: it would be lost for good."""
    values: list[Any] = [bounded(**fields)]
    if fields in BEYOND:
        values.append(Limited(**fields))
    for value in values:
        with topic.producer(serializer=type(value)) as producer:
            with pytest.raises(ValueError, match=r"value=.* could not be read back"):
                producer.send(value)
    assert topic.next_offset == 0


def test_g10_a_decimal_is_within_its_bounds_as_its_library_counts() -> None:
    """With zeros at its end, and zero itself: decoded to find out, and taken."""
    codec = serde.model(Bounded)
    for text in ("1.100", "0", "0.00", "0E+3", "999.99", "1E+2"):
        value = bounded(amount=D(text))
        assert difference(value, codec.loads(codec.dumps(value))) is None


class Mixed(pydantic.BaseModel):
    at: dt.datetime = pydantic.Field(gt=JANUARY)


def test_g10_a_bound_that_cannot_be_compared_holds_nothing() -> None:
    assert not is_plain(Mixed, Mixed.model_construct(at=MAY.replace(tzinfo=dt.UTC)))


# ---- aliases -----------------------------------------------------------------------------


class Aliased(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    number: int = pydantic.Field(default=5, alias="no")
    read: str = pydantic.Field(default="", validation_alias="r")
    written: str = pydantic.Field(default="", serialization_alias="w")
    one_of: int = pydantic.Field(
        default=0,
        validation_alias=pydantic.AliasChoices("first", pydantic.AliasPath("all", 0)),
    )


class Camel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(alias_generator=pydantic.alias_generators.to_camel)
    made_at: int = 0
    parts: list[Camel] = []


@pytest.mark.parametrize(
    "value",
    [
        Aliased(number=7),
        Aliased(r="x"),
        Aliased.model_construct(written="x", one_of=3),
        Camel(madeAt=3, parts=[Camel(madeAt=4)]),  # type: ignore[call-arg]
    ],
)
def test_g10_aliases_are_no_reason_to_decode(value: Any) -> None:
    codec = serde.model(type(value))
    assert is_plain(type(value), value)
    assert difference(value, codec.loads(codec.dumps(value))) is None


class Swapped(pydantic.BaseModel):
    n: int = pydantic.Field(default=1, validation_alias=pydantic.AliasPath("m", "n"))
    m: int = 2


def test_g10_an_alias_that_is_another_fields_name_is() -> None:
    assert not is_plain(Swapped, Swapped())


# ---- names that are not ASCII ------------------------------------------------------------

KINDS = {
    "dataclass": "@dataclasses.dataclass\nclass Made:\n {name}: int = 0\n b: int = 0",
    "inherited": "class Base:\n {name}: int = 0\n"
    "Base = dataclasses.dataclass(Base)\n@dataclasses.dataclass\nclass Made(Base):\n b: int = 0",
    "attrs": "@attrs.define\nclass Made:\n {name}: int = 0\n b: int = 0",
    "typed dict": "class Made(TypedDict, total=False):\n {name}: int\n b: int",
    "struct": "class Made(msgspec.Struct):\n {name}: int = 0\n b: int = 0",
    "pydantic": "class Made(pydantic.BaseModel):\n {name}: int = 0\n b: int = 0",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outer", [False, True], ids=["alone", "in a list"])
def test_g10_a_field_may_have_a_name_that_is_not_ascii(kind: str, outer: bool) -> None:
    """msgspec finds it only once it has encoded that name: not in a process that only reads."""
    name = f"é{kind.replace(' ', '_')}{outer}"  # one that no other test has encoded
    made = {**vars(typing_extensions), **globals()}
    exec(KINDS[kind].format(name=name), made)
    cls: Any = made["Made"]
    cls = list[cls] if outer else cls
    data = json.dumps({name: 7, "b": 8})
    found = serde.model(cls).loads((f"[{data}]" if outer else data).encode())
    [found] = found if outer else [found]
    assert (found[name] if kind == "typed dict" else getattr(found, name)) == 7


# ---- names for types ---------------------------------------------------------------------

Orders = typing_extensions.TypeAliasType("Orders", list[Order])  # type Orders = list[Order]
Bills = typing_extensions.TypeAliasType("Bills", dict[str, Bill])
Named = typing_extensions.TypeAliasType("Named", Orders)  # type: ignore[valid-type]
Place = NewType("Place", Point)
Number = NewType("Number", int)
Selves = typing_extensions.TypeAliasType("Selves", "Selves")  # type: ignore[misc]


class Cat(pydantic.BaseModel):
    kind: str = "cat"
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: str = "dog"
    tricks: list[str] = []


class Paid(msgspec.Struct, tag=True):
    amount: int


class Refund(msgspec.Struct, tag=True):
    amount: int


def by_kind(value: Any) -> str:
    return str(value["kind"] if isinstance(value, dict) else value.kind)


Pet = Annotated[
    Annotated[Cat, pydantic.Tag("cat")] | Annotated[Dog, pydantic.Tag("dog")],
    pydantic.Discriminator(by_kind),
]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Orders, [Order(1), Order(2)]),
        (Named, [Order(1)]),
        (Place, Point(1, 2.0)),
        (Bills, {"a": Bill(name="b")}),
        (Number, 5),
        (list[Item], [Item("a")]),
        (Paid | Refund, Refund(1)),
        (Item | None, Item("a")),
        (Pet, Dog(tricks=["sit"])),
        (list[Pet], [Cat(), Dog()]),
        (tuple[int, Tag], (1, Tag("a"))),
    ],
)
def test_g10_a_name_for_a_type_is_a_schema(topic: xl.Topic, kind: Any, value: Any) -> None:
    with topic.producer(serializer=kind) as producer:
        producer.send(value)
        with pytest.raises(REFUSALS, match="value="):
            producer.send({"other": (1,)})
    found = next(topic.reader(deserializer=kind)).value
    assert difference(value, found) is None
    assert topic.next_offset == 1
    with xl.SharedMap(topic.engine.topic("map"), value=kind) as shared:
        shared["a"] = value
        assert difference(value, shared["a"]) is None


def test_g10_objects_of_a_named_type_are_looked_at_too() -> None:
    for kind in (list[Item], typing_extensions.TypeAliasType("Items", list[Item])):
        assert is_plain(kind, [Item("a"), Item("b")])
        assert not is_plain(kind, [Item("a", 1, float("nan"))])
    assert is_plain(Bills, {"a": Bill(name="b")})


def test_g10_a_type_that_names_itself_is_refused() -> None:
    looped = typing_extensions.TypeAliasType("looped", int)
    vars_of = type("Loop", (), {"__value__": None, "__name__": "Loop"})
    vars_of.__name__ = "TypeAliasType"
    loop = vars_of()
    type(loop).__value__ = property(lambda self: self)
    with pytest.raises(TypeError, match="is a name for itself"):
        serde.model(loop)
    assert serde.model(looped).loads(b"1") == 1


def test_g10_a_message_of_a_named_type_can_be_pickled(topic: xl.Topic) -> None:
    with topic.producer(serializer=Orders) as producer:
        producer.send([Order(1)])
    found = pickle.loads(pickle.dumps(next(topic.reader(deserializer=list[Order]))))
    assert found.value == [Order(1)]


# ---- what C has of an object -------------------------------------------------------------


@dataclasses.dataclass
class Rows(list[int]):
    n: int = 0


@dataclasses.dataclass
class Table(dict[str, int]):
    n: int = 0


@dataclasses.dataclass(init=False)
class Moment(dt.datetime):
    n: int = 0


@dataclasses.dataclass
class Failure(Exception):
    reason: str


@attrs.define(slots=False)
class Words(set[str]):
    n: int = 0


@dataclasses.dataclass
class Outer:
    tables: list[Table] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize("cls", [Rows, Table, Moment, Failure, Words, Outer])
def test_g10_a_dataclass_that_extends_a_class_of_c_is_refused(cls: type, topic: xl.Topic) -> None:
    """msgspec stores its fields alone, and makes such a dict without what C has of a dict: that
    ends the process that reads it."""
    for open_one in (
        lambda: topic.producer(serializer=cls),
        lambda: topic.reader(deserializer=cls),
    ):
        with pytest.raises(TypeError, match=r"\w+ extends (list|dict|date\w*|set|BaseException),"):
            open_one()


@pydantic.dataclasses.dataclass
class ByPydantic(list[int]):
    n: int = 0


@pydantic.dataclasses.dataclass
class TableByPydantic(dict[str, int]):
    n: int = 0


class Noted:
    __slots__ = ("note",)


@dataclasses.dataclass
class WithSlot(Noted):
    n: int = 0


class ModelWithSlot(pydantic.BaseModel):
    __slots__ = ("note",)
    n: int = 0


def rows() -> ByPydantic:
    made = ByPydantic(1)
    made.append(5)
    return made


def table() -> TableByPydantic:
    made = TableByPydantic(1)
    made["a"] = 5
    return made


def noted(value: Any) -> Any:
    object.__setattr__(value, "note", "kept nowhere")
    return value


class OuterByPydantic(pydantic.BaseModel):
    tables: list[TableByPydantic] = []


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (rows(), "length of value"),
        (table(), "key str 'a'"),
        (noted(WithSlot(1)), "attribute note"),
        (noted(ModelWithSlot(n=1)), "attribute note"),
        (OuterByPydantic.model_construct(tables=[table()]), r"value\.tables\[0\]: the key str 'a'"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_g10_what_an_object_is_beside_its_fields_is_refused(
    topic: xl.Topic, value: Any, name: str
) -> None:
    """Both libraries store the fields alone."""
    with topic.producer(serializer=type(value)) as producer:
        with pytest.raises(REFUSALS, match=rf"value=.*{name}"):
            producer.send(value)
    assert topic.next_offset == 0


def test_g10_without_such_a_part_it_comes_back() -> None:
    for value in (WithSlot(1), ByPydantic(2), TableByPydantic(3)):
        codec: Any = serde.model(type(value))
        assert difference(value, codec.loads(codec.dumps(value))) is None


def extended(base: type, *args: Any, slots: bool = False) -> Any:
    """An object of a class that extends one of C, with an attribute of its own."""
    own: Any = {"__module__": __name__, **({"__slots__": ("note",)} if slots else {})}
    kind: Any = type(f"Own{base.__name__}", (base,), own)
    return lambda note: _with_note(kind(*args), note)


def _with_note(value: Any, note: Any) -> Any:
    value.note = note
    return value


BASES: list[tuple[type, tuple[Any, ...]]] = [
    (int, (5,)), (float, (1.5,)), (str, ("a",)), (bytes, (b"a",)), (complex, (1j,)), (D, ("1.1",)),
    (fractions.Fraction, (1, 2)), (dt.datetime, (2026, 1, 2)), (dt.date, (2026, 1, 2)),
    (dt.time, (1,)), (dt.timedelta, (1,)), (tuple, ((1,),)), (list, ([1],)), (dict, ({1: 2},)),
    (set, ({1},)), (frozenset, ({1},)), (collections.deque, ([1],)), (collections.UserDict, ()),
    (collections.OrderedDict, ()), (collections.defaultdict, (int,)), (collections.Counter, ("a",)),
    (bytearray, (b"a",)), (array.array, ("i", [1])),
]  # fmt: skip
NO_SLOTS = (int, bytes, tuple)  # C does not take any


@pytest.mark.parametrize("slots", [False, True], ids=["dict", "slots"])
@pytest.mark.parametrize("base", BASES, ids=lambda base: base[0].__name__)
def test_g10_what_a_class_adds_to_one_of_c_is_compared(base: Any, slots: bool) -> None:
    if slots and base[0] in NO_SLOTS:
        return
    make = extended(base[0], *base[1], slots=slots)
    assert difference(make(1), make(1)) is None
    assert "note" in str(difference(make(1), make(2)))
    assert "note" in str(difference(make(1), make(True)))


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int)]


BY_TEXT = time.struct_time((2026, 1, 2, 3, 4, 5, 6, 7, 0), {"tm_zone": "CET", "tm_gmtoff": 3600})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (BY_TEXT, time.struct_time(tuple(BY_TEXT))),
        (Pair(1), Pair(1)),
        ((ctypes.c_int * 1)(1), (ctypes.c_int * 1)(2)),
        (array.array("i", [1]), array.array("l", [1])),
        (ValueError("a"), ValueError("a")),
        (memoryview(b"a"), memoryview(b"a").cast("b")),
        (np.array([1, 2]), np.array([1.0, 2.0])),
        (type("F", (float,), {})("nan"), 0.5),
        (Moment(2026, 1, 2), Moment(2026, 1, 3)),
        (ByPydantic(1), rows()),
    ],
    ids=lambda each: type(each).__name__,
)
def test_g10_what_c_keeps_to_itself_is_a_difference(a: Any, b: Any) -> None:
    assert difference(a, b) is not None
    assert difference(b, a) is not None


def test_g10_floats_of_a_subclass_are_compared_as_floats_are() -> None:
    kind = type("F", (float,), {})
    assert difference(kind("nan"), kind("nan")) is None
    assert difference(kind(0.0), kind(-0.0)) is not None


# ---- what attrs computes -----------------------------------------------------------------


@attrs.define
class Circle:
    radius: int
    _unit: str = "m"

    @functools.cached_property
    def area(self) -> int:
        """Refuses, or makes another object each time, which no library encodes."""
        if self.radius < 0:
            raise ValueError("no circle has that")
        return self.radius**2 if self.radius > 1 else cast("int", object())


@attrs.define
class Named(Noted):
    n: int
    extent: ClassVar[Any]

    @functools.cached_property
    def extent(self) -> int:  # type: ignore[no-redef]
        return self.n

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is looked for")


@attrs.define
class Drawn:
    circles: list[Circle]


@pytest.mark.parametrize("radius", [-1, 1, 2])
def test_g10_no_cached_property_is_computed_to_send_an_object(radius: int) -> None:
    """attrs makes slots for those, and computes what is not there when it is looked at."""
    for value in (Circle(radius, "km"), Drawn([Circle(radius)])):
        codec: Any = serde.model(type(value))
        assert codec.loads(codec.dumps(value)) == value
    assert difference(Circle(radius), Circle(radius)) is None


@pytest.mark.parametrize("radius", [1, 2])
def test_g10_what_is_computed_is_not_sent(radius: int) -> None:
    """Whether somebody has looked at it before makes no difference."""
    codec: Any = serde.model(Drawn)
    value = Drawn([Circle(radius)])
    data = codec.dumps(value)
    assert value.circles[0].area is value.circles[0].area
    assert codec.dumps(value) == data
    assert codec.loads(data) == value


def test_g10_a_slot_beside_one_of_attrs_is_compared() -> None:
    """It is read without a method of the class, and is not taken for a cached property."""
    codec: Any = serde.model(Named)
    value = Named(1)
    assert value.extent == 1
    assert codec.loads(codec.dumps(value)) == value
    with pytest.raises(ValueError, match="the attribute note str 'kept nowhere'"):
        codec.dumps(noted(value))


# ---- generic classes ---------------------------------------------------------------------

T = TypeVar("T")


@dataclasses.dataclass
class Box(Generic[T]):
    item: T


@attrs.define
class AttrsBox(Generic[T]):
    item: T


class StructBox(msgspec.Struct, Generic[T]):
    item: T


class ShortBox(msgspec.Struct, Generic[T], omit_defaults=True):
    item: T
    size: int = 1


class TupleBox(NamedTuple, Generic[T]):
    item: T


class DictBox(TypedDict, Generic[T]):
    item: T


@pydantic.dataclasses.dataclass
class PydanticBox(Generic[T]):
    item: T


@dataclasses.dataclass
class Growing(Generic[T]):
    """What is read is not what was written."""

    item: T

    def __post_init__(self) -> None:
        self.item = [self.item]  # type: ignore[assignment]


@dataclasses.dataclass
class BoxedRow(list[int], Generic[T]):
    item: T


BOXES: list[Any] = [Box, AttrsBox, StructBox, ShortBox, TupleBox, DictBox, PydanticBox]


def holder(kind: Any) -> Any:
    return dataclasses.make_dataclass("Holder", [("box", kind)])


@pytest.mark.parametrize("box", BOXES, ids=lambda each: each.__name__)
def test_g10_objects_of_a_generic_class_come_back(box: Any, topic: xl.Topic) -> None:
    """Those that are given as `Box[int](1)` note that: it is no part of what they are."""
    kind = box[int]
    hold = holder(kind)
    pairs: list[tuple[Any, Any]] = [
        (kind, kind(item=1)),
        (kind, box(item=1)),
        (list[kind], [box(item=1), kind(item=2)]),
        (box[kind], box(item=box(item=3))),
        (dict[str, kind], {"a": box(item=1)}),
        (kind | None, box(item=4)),
        (hold, hold(box(item=5))),
    ]
    for of, value in pairs:
        codec: Any = serde.model(of)
        assert difference(value, codec.loads(codec.dumps(value))) is None
    with topic.producer(serializer=kind) as producer:
        producer.send(box(item=6))
    assert next(topic.reader(deserializer=kind)).value == box(item=6)


@pytest.mark.parametrize("box", BOXES, ids=lambda each: each.__name__)
def test_g10_what_is_no_type_of_a_generic_class_is_refused(box: Any) -> None:
    kind = box[int]
    hold = holder(kind)
    for of, wrap in ((kind, lambda each: each), (list[kind], lambda each: [each]), (hold, hold)):
        for item in ("a", True, None, 1.5, box(item=1)):
            with pytest.raises(REFUSALS, match="int"):
                serde.model(of).dumps(wrap(box(item=item)))  # type: ignore[operator]


def test_g10_each_type_of_a_generic_class_has_a_shape_of_its_own() -> None:
    @dataclasses.dataclass
    class Both:
        number: Box[int]
        text: StructBox[str]

    assert is_plain(Both, Both(Box(1), StructBox("a")))
    assert not is_plain(Both, Both(Box("a"), StructBox("a")))  # type: ignore[arg-type]
    assert not is_plain(Both, Both(Box(1), StructBox(1)))  # type: ignore[arg-type]


def test_g10_the_default_of_a_generic_struct_is_stored() -> None:
    codec: Any = serde.model(list[ShortBox[int]])
    assert json.loads(codec.dumps([ShortBox(2)])) == [{"item": 2, "size": 1}]


def test_g10_a_generic_class_is_looked_at_as_others_are() -> None:
    with pytest.raises(ValueError, match="does not come back"):
        serde.model(Growing[Any]).dumps(Growing(1))
    with pytest.raises(TypeError, match="BoxedRow extends list"):
        serde.model(BoxedRow[int])


# ---- numbers that are too large ----------------------------------------------------------


class Sized(pydantic.BaseModel):
    size: pydantic.ByteSize = pydantic.ByteSize(0)
    amount: D = ZERO
    number: int = 0
    anything: Any = None


@dataclasses.dataclass
class Numbers:
    amount: D = ZERO
    number: int = 0
    price: float = 0.0
    maybe: float | None = None
    anything: Any = None
    by_number: dict[int, int] = dataclasses.field(default_factory=dict)


HUGE = D("1E+999999")
TOO_LARGE: list[Any] = [
    Sized.model_construct(size=HUGE),
    Sized.model_construct(amount=HUGE),
    Sized(number=1 << 2200),
    Sized.model_construct(size=D("1E+999999999999")),
    Sized(anything=[1 << 9000]),
    Sized.model_construct(amount=D("1E-99999")),
    Sized.model_construct(amount=D("0E+999999")),
    Numbers(HUGE),
    Numbers(number=1 << 2200),
    Numbers(number=-(1 << 2200)),
    Numbers(by_number={1 << 2200: 1}),
    Numbers(anything={"a": (HUGE,)}),
]


@pytest.mark.parametrize("number", range(len(TOO_LARGE)))
def test_g10_a_number_without_measure_is_refused(topic: xl.Topic, number: int) -> None:
    """Whoever reads it may count to it, or refuse so many digits."""
    value = TOO_LARGE[number]
    with topic.producer(serializer=type(value)) as producer:
        with pytest.raises(ValueError, match=r"value=.*(bits|exponent).*store its str.*'exact'"):
            producer.send(value)
    assert topic.next_offset == 0


@pytest.mark.long
def test_g10_what_has_a_measure_comes_back_where_python_reads_few_digits() -> None:
    values = [Order(1 << 2000, amount=D("9E+6144")), Order(1, amount=D("1E-6143"))]
    values[1].by_number = {1 << 2000: "a"}
    text = "\n".join(serde.model(Order).dumps(each).decode() for each in values)
    code = (
        "import sys; from exclusivelog import serde; from testing.kinds import Order\n"
        "print(*[serde.model(Order).loads(line.encode()).amount for line in sys.stdin])"
    )
    ran = subprocess.run(
        [sys.executable, "-X", "int_max_str_digits=640", "-c", code],
        input=text,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (ran.stdout.split(), ran.stderr) == (["9E+6144", "1E-6143"], "")


@pytest.mark.parametrize(
    "value", [Numbers(price=float("nan")), Numbers(maybe=float("inf")), Numbers(anything=[-1e999])]
)
def test_g10_a_float_that_json_does_not_have_is_named(topic: xl.Topic, value: Any) -> None:
    with topic.producer(serializer=Numbers) as producer:
        match = r"value\.\w+(\[0\])? is -?(nan|inf), which JSON does not have: send None"
        with pytest.raises(ValueError, match=match):
            producer.send(value)
    assert topic.next_offset == 0
