"""Rule G10: what goes in comes out.

A serialiser that takes what it does not give back loses it: the sender is told that all is well,
and the reader finds out, later, when nothing can be done. So each value comes back equal and of the
same types, in every process, or is refused before anything is appended; and no value that one
process accepts ends another.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import io
import json
import pickle
import subprocess
import sys
import threading
import uuid
import zoneinfo
from typing import Any

import attrs
import msgpack
import pydantic
import pytest
import typing_extensions

import exclusivelog as xl
from exclusivelog import serde
from exclusivelog.comparing import difference
from testing import pythons, round_trips
from testing.children import ROOT
from testing.kinds import (
    OPTIONS,
    Bill,
    Bits,
    Choice,
    Colour,
    Growing,
    Item,
    Lenient,
    Level,
    Limits,
    Masks,
    Option,
    Order,
    Owner,
    Payment,
    Point,
    Rights,
    Size,
    Swapped,
    Tag,
    Text,
    learn,
)
from testing.patience import PATIENCE

pytestmark = [pytest.mark.once, pytest.mark.rule("G10")]

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NAN, INF = float("nan"), float("inf")
REFUSALS = (TypeError, ValueError)


def nested(depth: int, make: Any, value: Any = ()) -> Any:
    for _ in range(depth):
        value = make(value)
    return value


# ---- all kinds, in other processes -------------------------------------------------------


def test_g10_what_one_process_encodes_another_decodes() -> None:
    """Another hash seed, and both in threads with a small stack. `proof` does it with more."""
    outcome = round_trips.round_trip(examples=15, number=1)
    assert outcome.broken == []
    assert outcome.cases > 100
    assert outcome.types > 20


@pytest.mark.long
@pytest.mark.parametrize("number", range(3))
def test_g10_so_it_is_for_many_values(number: int) -> None:
    outcome = round_trips.round_trip(examples=150, number=number)
    assert outcome.broken == []


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("version", pythons.VERSIONS)
def test_g10_so_it_is_in_another_python(version: str) -> None:
    path = pythons.found().get(version)
    if path is None:
        pytest.skip(f"no other Python {version} is installed (on PATH, by pyenv or by uv)")
    try:
        other = pythons.with_library(version, path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Python {version} has no build of the library: {error.stderr.strip()[-200:]}")
    outcome = round_trips.round_trip(50, 2, python=other.python, tree=other.where)
    assert outcome.broken == []
    lossy = round_trips.Case("json", b"[1]", pickle.dumps((1,)))
    assert len(round_trips.judged_elsewhere([lossy], 1, other.python, other.where)) == 1


@pytest.mark.long
def test_g10_a_serialiser_that_loses_something_is_noticed() -> None:
    """Python's own json, which makes lists of tuples; and sets in the order of the hash seed."""
    loses = round_trips.Case("json", json.dumps([1, (2,)]).encode(), b"")
    values = [(1, (2,)), {"a": (1,)}, {1: 2}]
    cases = [
        loses._replace(data=json.dumps(value).encode(), value=pickle.dumps(value))
        for value in values
    ]
    assert len(round_trips.judged_elsewhere(cases, 1)) == len(values)
    keys = [frozenset({"a", "b", "c", "d"}), frozenset({1, "x"})]
    unordered = [
        round_trips.Case(
            "exact",
            msgpack.packb(msgpack.ExtType(2, msgpack.packb(sorted(key, key=str)[::-1]))),
            pickle.dumps(key),
            is_key=True,
        )
        for key in keys
    ]
    assert any("other bytes" in text for text in round_trips.judged_elsewhere(unordered, 2))


# ---- what each takes, and refuses --------------------------------------------------------

TAKEN: list[tuple[str, Any]] = [
    ("json", [1, -1.5, None, True, {"a": ["é"]}, 2**70, -0.0]),
    ("msgpack", {1: [b"x"], 2.5: None}),
    ("msgpack", [NAN, (1 << 64) - 1, -(1 << 63), msgpack.ExtType(127, b"x")]),
    ("str", "é"),
    ("msgpack", [msgpack.Timestamp((1 << 63) - 1, 999_999_999), msgpack.Timestamp(-(1 << 63))]),
    ("bytes", b""),
    ("exact", {(1, 2): {3, (4,)}}),
    ("exact", frozenset({"a", "b"})),
    ("exact", 1 << 9000),
    ("exact", dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN)),
    ("exact", dt.datetime(2026, 10, 25, 2, 30, fold=1)),
    ("exact", dt.time(2, fold=1, tzinfo=BERLIN)),
    ("exact", dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=1)))),
    ("exact", dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(seconds=1, microseconds=1)))),
    ("exact", [decimal.Decimal("1.10"), decimal.Decimal("sNaN"), complex(NAN, -0.0), -0.0]),
    ("dataclass", Order(1, tags={"a", "b"}, by_number={1: "a"}, data=b"\xff", point=Point(1))),
    ("dataclass", Order(1, tag=Tag("t"), owner=Owner("o"), limits=Limits(least=1), anything=[1])),
    ("dataclass", Order(1 << 70)),
    ("struct", Tag("a")),
    ("attrs", Owner("a", dt.date(2026, 1, 2))),
    ("named tuple", Point(1)),
    ("typed dict", Limits(most=1.5)),
    ("pydantic", nested(40, lambda v: Payment(parts=[v] if v else []))),
    ("pydantic", Payment(no=7)),
    ("pydantic", Payment(no=7, parts=[Payment(no=8)])),
    ("pydantic", Payment(no=7, at=dt.datetime(2026, 1, 2, tzinfo=dt.UTC), tags={"a", "b"})),
]


@pytest.mark.parametrize(("codec", "value"), TAKEN)
def test_g10_it_comes_back(topic: xl.Topic, codec: str, value: Any) -> None:
    option = OPTIONS[codec]
    with topic.producer(serializer=option) as producer:
        producer.send(value)
    assert difference(value, next(topic.reader(deserializer=option)).value) is None


class Data(bytes):
    """A subclass."""


LOOP: list[Any] = []
LOOP.append(LOOP)
REFUSED: list[tuple[str, Any]] = [
    ("json", (1,)), ("json", {1: 2}), ("json", {"a": [NAN]}), ("json", INF), ("json", Text("x")),
    ("json", Colour.RED), ("json", Level.LOW), ("json", {Colour.RED: 1}), ("json", b"x"),
    ("json", Point(1)), ("json", collections.OrderedDict(a=1)), ("json", "\ud800"),
    ("json", 1 << 3000), ("json", nested(101, lambda v: [v])), ("json", LOOP),
    ("msgpack", {(1, 2): 3}), ("msgpack", [(1,)]), ("msgpack", bytearray(b"x")),
    ("msgpack", memoryview(b"x")), ("msgpack", Level.LOW), ("msgpack", {NAN: 1}),
    ("msgpack", 1 << 64), ("msgpack", [-(1 << 63) - 1]), ("msgpack", {1 << 64: 1}),
    ("msgpack", msgpack.Timestamp(1 << 63)), ("msgpack", msgpack.Timestamp(-(1 << 63) - 1)),
    ("msgpack", msgpack.Timestamp(True)), ("msgpack", [msgpack.Timestamp(1, True)]),
    ("msgpack", msgpack.ExtType(True, b"x")), ("msgpack", msgpack.ExtType(5, Data(b"x"))),
    ("msgpack", msgpack.ExtType._make((300, b""))), ("msgpack", msgpack.ExtType._make((-1, b""))),
    ("msgpack", LOOP), ("msgpack", Text("x")), ("msgpack", {Text("x"): 1}),
    ("exact", bytearray(b"x")), ("exact", memoryview(b"x")), ("exact", msgpack.ExtType(5, b"x")),
    ("exact", msgpack.Timestamp(1)), ("exact", Level.LOW), ("exact", Point(1)), ("exact", {NAN}),
    ("exact", {decimal.Decimal("NaN")}), ("exact", {(1, NAN): 1}), ("exact", Text("x")),
    ("exact", collections.OrderedDict()), ("exact", nested(101, lambda v: (v,))),
    ("exact", dt.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo.no_cache("Europe/Berlin"))),
    ("exact", dt.time(1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET"))), ("exact", range(3)),
    ("exact", dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(microseconds=1)))),
    ("exact", dt.time(1, tzinfo=dt.timezone(dt.timedelta(microseconds=-999_999)))),
    ("str", Text("x")), ("str", Colour.RED), ("str", b"x"), ("str", "\ud800"), ("bytes", "x"),
    ("dataclass", Order(1, price=NAN)), ("dataclass", Order(1, price=2)),
    ("dataclass", Order(True)), ("dataclass", Order(1, anything=(1,))),
    ("dataclass", Order(1, anything={1: 2})),
    ("dataclass", Order(1, at=dt.datetime(2026, 10, 25, 2, 30, fold=1))),
    ("dataclass", Order(1, at=dt.datetime(2026, 1, 2, tzinfo=BERLIN))),
    ("dataclass", Order(1, limits={"least": 1, "more": 2})),  # type: ignore[typeddict-unknown-key]
    ("dataclass", Order(1, parts=[Order(1, price=INF)])), ("dataclass", nested(60, Order)),
    ("dataclass", Order(1, note=Text("x"))), ("attrs", Owner(5)),  # type: ignore[arg-type]
    ("struct", Tag("x", NAN)), ("named tuple", Point(1, 2)), ("named tuple", (1, 2.0)),
    ("typed dict", {"least": "a"}), ("typed dict", {"other": 1}),
    ("pydantic", Payment(no=1, price=NAN)), ("pydantic", Payment(no=1, maybe=INF)),
    ("pydantic", Payment(no=1, secret="hidden")), ("pydantic", Payment(no=1, left_out=3)),
    ("pydantic", Payment(no=1, anything=(1, 2))), ("pydantic", Payment(no=1, by_pair={(1, 2): ""})),
    ("pydantic", Payment.model_construct(number="one")),
    ("pydantic", Payment(no=1, at=dt.datetime(2026, 1, 2, tzinfo=BERLIN))),
    ("pydantic", nested(101, lambda v: Payment(parts=[v] if v else []))),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "value"), REFUSED)
def test_g10_it_is_refused_before_anything_is_appended(
    topic: xl.Topic, codec: str, value: Any
) -> None:
    good = dict(TAKEN)[codec]
    with topic.producer(serializer=OPTIONS[codec]) as producer:
        for send in (producer.send, producer.send_async, lambda each: producer.send_many([each])):
            with pytest.raises(REFUSALS, match="value="):
                send(value)
        with pytest.raises(REFUSALS):
            producer.send_many([good, value])
    assert topic.next_offset == 0
    with xl.SharedMap(topic, value=OPTIONS[codec]) as shared:
        with pytest.raises(REFUSALS, match="value="):
            shared.put("a", value)
        assert (topic.next_offset, len(shared)) == (0, 0)


@pytest.mark.parametrize("codec", ["json", "msgpack", "exact", "str", "bytes"])
def test_g10_a_serialiser_raises_only_these_errors_itself(codec: str) -> None:
    """Not what a library below it raises, such as OverflowError."""
    serialiser = getattr(serde, codec)
    for name, value in REFUSED:
        if name in ("json", "msgpack", "exact", "str", "bytes"):
            with contextlib.suppress(*REFUSALS):
                serialiser.dumps(value)
            with contextlib.suppress(*REFUSALS):
                serde.key_dumps_of(codec, "key")(value)


def test_g10_objects_with_plain_fields_alone_are_not_decoded_to_find_out() -> None:
    """A shape holds what `test_g10_what_one_process_encodes_another_decodes` finds to come back."""
    shape = serde.model(Item).dumps.__self__.shape  # type: ignore[attr-defined]
    inner = Item("b", codes=(1,), by_name={"x": Item("c")}, at=dt.datetime(2026, 1, 2))
    assert shape.holds(Item("a", 1, 2.5, True, tags={"x"}, parts=[inner], inner=inner, data=b"x"))
    assert shape.holds(Item("a", took=dt.timedelta(1), either=[True], by_number={1: "a"}))
    assert shape.holds(Item("a", either="x", amount=decimal.Decimal("1.10"), hour=dt.time(3)))
    for odd in (
        Item("a", True),
        Item("a", 1, NAN),
        Item("a", 1, 2),
        Item("a", 1 << 70),
        Item(Text("a")),
        Item("a", codes=[1]),
        Item("a", by_name={Text("x"): inner}),
        Item("a", tags={1}),  # type: ignore[arg-type]
        Item("a", at=dt.datetime(2026, 1, 2, fold=1)),
        Item("a", parts=[Item("b", 1, INF)]),
        Item("a", at=dt.datetime(2026, 1, 2, tzinfo=BERLIN)),
        "a",
        None,
        Item("a", pair=(1,)),
        Item("a", pair=(1, 2)),
        Item("a", either=True),  # type: ignore[arg-type]
        Item("a", either=1.5),
        Item("a", either=["x"]),
        Item("a", by_number={True: "a"}),  # type: ignore[arg-type,list-item]
        Item("a", amount=decimal.Decimal("NaN")),
        Item("a", hour=dt.time(1, fold=1)),
        nested(101, lambda v: Item("", inner=v), None),
    ):
        assert not shape.holds(odd), odd


def test_g10_so_it_is_with_models_of_pydantic() -> None:
    shape = serde.model(Bill).dumps.__self__.shape  # type: ignore[attr-defined]
    inner = Bill(name="b", by_name={"x": 1}, maybe=2.5)
    assert shape.holds(Bill(name="a", parts=[inner], inner=inner, tags=["x"]))
    assert shape.holds(Bill(name="a", at=dt.datetime(2026, 1, 2, tzinfo=dt.UTC)))
    assert shape.holds(Bill(name="a", size=Size.LARGE, level=Level.HIGH, mode="b", codes={1, 2}))
    assert shape.holds(Bill(name="a", uid=uuid.UUID(int=5), amount=decimal.Decimal("1.10")))
    assert shape.holds(Bill(name="a", names=frozenset("ab"), row=(1.5, 2.5), data=b"x"))
    bills = [
        {"count": True},
        {"price": NAN},
        {"price": 2},
        {"count": 1 << 70},
        {"tags": ("a",)},
        {"name": Text("a")},
        {"by_name": {Text("x"): 1}},
        {"by_name": {"\ud800": 1}},
        {"tags": [Text("x")]},
        {"maybe": 1},
        {"at": dt.datetime(2026, 1, 2, fold=1)},
        {"at": dt.datetime(2026, 1, 2, tzinfo=BERLIN)},
        {"parts": [Bill.model_construct(name="b", price=INF)]},
        {"inner": Payment()},
        {"more": 1},
        {"day": dt.datetime(2026, 1, 2)},
        {"size": "l"},
        {"level": 2},
        {"mode": "c"},
        {"mode": Text("a")},
        {"codes": {True}},
        {"codes": frozenset()},
        {"names": set()},
        {"pair": (True, "a")},
        {"pair": (1,)},
        {"pair": [1, "a"]},
        {"row": (1,)},
        {"row": (NAN,)},
        {"amount": decimal.Decimal("NaN")},
        {"amount": 1},
        {"hour": dt.time(1, fold=1)},
    ]
    for fields in bills:
        odd = Bill.model_construct(**{"name": "a", **fields})
        if "more" in fields:
            odd.__dict__["more"] = 1
        assert not shape.holds(odd), fields
    missing = Bill(name="a")
    del missing.__dict__["tags"]
    assert not shape.holds(missing)


class Validated(pydantic.BaseModel):
    n: int

    @pydantic.field_validator("n")
    @classmethod
    def grow(cls, n: int) -> int:
        return n + 1


class Computed(pydantic.BaseModel):
    n: int

    @pydantic.model_serializer
    def store(self) -> dict[str, int]:
        return {"n": self.n + 1}


class Finished(pydantic.BaseModel):
    n: int

    def model_post_init(self, context: object) -> None:
        self.n += 1


class Crossed(pydantic.BaseModel):
    """Read by its alias, `n` would be the other field."""

    n: int = pydantic.Field(alias="m")
    m: int


class Stripped(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(str_strip_whitespace=True)
    n: str


class Twice(pydantic.BaseModel):
    n: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return 2 * self.n


class Bounded(pydantic.BaseModel):
    n: int = pydantic.Field(le=5)


class Made(pydantic.BaseModel):
    n: int

    def __init__(self, n: int) -> None:
        super().__init__(n=n + 1)


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (Validated, {"n": 1}),
        (Computed, {"n": 1}),
        (Finished, {"n": 1}),
        (Made, {"n": 1}),
        (Crossed, {"n": 1, "m": 2}),
        (Stripped, {"n": " a "}),
        (Bounded, {"n": 6}),
    ],
)
def test_g10_a_model_that_changes_what_it_is_given_is_decoded_to_find_out(
    cls: Any, fields: dict[str, Any]
) -> None:
    parts = pydantic.create_model("Outer", parts=(list[cls], ...))
    value = cls.model_construct(_fields_set=None, **fields)
    if cls is Crossed:
        value = cls(m=2)
        value.__dict__.update(fields)
    for kind, one in ((cls, value), (parts, parts.model_construct(parts=[value]))):
        with pytest.raises(REFUSALS, match=r"does not come back|could not be read back"):
            serde.model(kind).dumps(one)


@dataclasses.dataclass
class HalfSlotted:
    """The slot of `first` stands where an object of a class with one slot more has `second`."""

    __slots__ = ("first",)
    first: int


@dataclasses.dataclass
class Wider(HalfSlotted):
    second: str
    third: float = 0.5


@dataclasses.dataclass(slots=True)
class WhollySlotted(HalfSlotted):
    second: str


@pytest.mark.parametrize("cls", [Wider, WhollySlotted])
def test_g10_fields_are_found_in_slots_and_in_the_dict(cls: Any) -> None:
    shape = serde.model(cls).dumps.__self__.shape  # type: ignore[attr-defined]
    good = cls(1, "a")
    assert shape.holds(good)
    for first, second in ((True, "a"), (1, Text("a")), (1 << 70, "a")):
        assert not shape.holds(cls(first, second))
    for name in ("first", "second"):
        without = cls(1, "a")
        delattr(without, name)
        assert not shape.holds(without)
    if cls is Wider:  # a default of the class is not what the object has
        good.__dict__.pop("third")
        assert difference(good, serde.model(cls).loads(serde.model(cls).dumps(good))) is None


@pytest.mark.parametrize("cls", [Choice, Option])
def test_g10_of_an_enum_only_what_every_process_has_is_taken(topic: xl.Topic, cls: Any) -> None:
    """Not a member that a process has added, nor one that is encoded as another one."""
    learnt = [learn(Growing, "learnt"), learn(Masks, 64)]
    taken = [
        cls(growing=Growing.KNOWN, rights=Rights(9), masks=Masks.LEFT | Masks.RIGHT),
        cls(lenient=Lenient.WRONG, masks=Masks(0), rights=Rights.READ, bits=Bits.LEFT),
        cls(bits=Bits(9)),
    ]
    refused = [
        cls(growing=learnt[0]),
        cls(several=[learnt[0]]),
        cls(by_name={learnt[0]: 1}),
        cls(masks=learnt[1]),
    ]
    if cls is Choice:  # pydantic encodes it by the name that it is found by
        refused.append(cls(swapped=Swapped.FIRST))
    with topic.producer(serializer=cls) as producer:
        for value in taken:
            producer.send(value)
        for value in refused:
            with pytest.raises(REFUSALS, match=r"value=.*(no member of its Enum|come back)"):
                producer.send(value)
    found = [message.value for message in topic.reader(deserializer=cls)]
    assert [each.lenient for each in found] == [None, Lenient.WRONG, None]
    assert found[1].lenient is Lenient.WRONG
    assert [each.rights for each in found] == [Rights(9), Rights.READ, None]
    assert [each.bits for each in found] == [None, Bits.LEFT, Bits(9)]


def test_g10_an_enum_that_cannot_be_stored_is_refused_with_its_class() -> None:
    huge = enum.Enum("huge", {"ONE": 1 << 70})
    for kind in (huge, enum.Enum("pairs", {"ONE": (1, 2)}), enum.Enum("mixed", {"A": 1, "B": "b"})):
        cls = dataclasses.make_dataclass("Wrong", [("kind", kind)])
        with pytest.raises(TypeError, match="Wrong: "):
            serde.model(cls)


class Priced(pydantic.BaseModel):
    price: float = 0


@dataclasses.dataclass
class Costs:
    price: float = 0


class ByValue(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(use_enum_values=True)
    size: Size = Size.SMALL


@pytest.mark.parametrize(
    ("cls", "advice"),
    [(Priced, "write 0.0 for"), (Costs, "write 0.0 for"), (ByValue, "comes back as str 's'")],
)
def test_g10_a_default_of_another_type_is_refused_with_the_reason(cls: Any, advice: str) -> None:
    """No library checks defaults. It would be another value for who reads it."""
    with pytest.raises(ValueError, match=rf"{cls.__name__}: .*{advice}"):
        serde.model(cls).dumps(cls())
    if cls is not ByValue:
        given = cls(price=0.0)
        assert difference(given, serde.model(cls).loads(serde.model(cls).dumps(given))) is None


def test_g10_what_is_computed_is_not_stored() -> None:
    assert serde.model(Twice).dumps(Twice(n=1)) == b'{"n":1}'


@pytest.mark.parametrize("fields", [{"name": "\ud800"}, {"by_name": {"\ud800": 1}}], ids=str)
def test_g10_a_text_that_cannot_be_encoded_is_refused_with_its_class(fields: Any) -> None:
    with pytest.raises(ValueError, match=r"^Bill: "):
        serde.model(Bill).dumps(Bill.model_construct(**{"name": "a", **fields}))


def test_g10_a_typed_dict_of_typing_extensions_is_one() -> None:
    cls: Any = typing_extensions.TypedDict("cls", {"least": int})
    assert serde.model(cls).loads(serde.model(cls).dumps({"least": 1})) == {"least": 1}
    with pytest.raises(ValueError, match="cls: "):
        serde.model(cls).dumps({"least": "a"})


def test_g10_an_alias_with_a_default_comes_back(topic: xl.Topic) -> None:
    """Written by its name, and read by both: by its alias, from another program, too."""
    with topic.producer(serializer=Payment) as producer:
        producer.send(Payment(no=7))
    with topic.producer() as producer:
        producer.send_many([b'{"number":8}', b'{"no":9}'])
    assert [each.number for each in topic.reader(deserializer=Payment).values()] == [7, 8, 9]
    with xl.SharedMap(topic.engine.topic("map"), value=Payment) as shared:
        shared["a"] = Payment(no=7)
        assert shared["a"].number == 7


def test_g10_aliases_for_one_direction_alone_come_back(topic: xl.Topic) -> None:
    class Odd(pydantic.BaseModel):
        a: int = pydantic.Field(serialization_alias="x")
        b: int = pydantic.Field(validation_alias="y")

    codec = serde.model(Odd)
    value = Odd(a=1, y=2)  # type: ignore[call-arg]
    assert codec.loads(codec.dumps(value)) == value


def test_g10_a_secret_that_is_written_comes_back() -> None:
    class Login(pydantic.BaseModel):
        secret: pydantic.SecretStr

        @pydantic.field_serializer("secret")
        def reveal(self, secret: pydantic.SecretStr) -> str:
            return secret.get_secret_value()

    codec = serde.model(Login)
    value = Login(secret=pydantic.SecretStr("hidden"))
    assert codec.loads(codec.dumps(value)) == value


def test_g10_an_object_with_private_attributes_of_its_own_is_refused() -> None:
    class Counted(pydantic.BaseModel):
        _count: int = pydantic.PrivateAttr(default=0)

    codec, value = serde.model(Counted), Counted()
    codec.dumps(value)
    value._count = 5
    with pytest.raises(ValueError, match="does not come back"):
        codec.dumps(value)


def test_g10_properties_are_str_and_no_subclass(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        for properties in ({"a": Colour.RED}, {Text("a"): "b"}, {"a": "\ud800"}):
            with pytest.raises(REFUSALS, match="properties="):
                producer.send(b"", properties=properties)
    assert topic.next_offset == 0


def test_g10_a_foreign_serialiser_can_be_checked(topic: xl.Topic) -> None:
    class Lossy:
        dumps, loads = json.dumps, json.loads

    with topic.producer(serializer=serde.checked(Lossy)) as producer:
        producer.send([1, "a"])
        with pytest.raises(ValueError, match="does not come back"):
            producer.send((1, "a"))
        with pytest.raises(ValueError, match="does not come back"):
            producer.send({1: 2})
    assert topic.next_offset == 1


def test_g10_what_older_versions_wrote_of_a_dataclass_is_read() -> None:
    stored = (
        '{"number":7,"price":2.5,"size":"l","level":2,"mode":3,"paid":true,"note":null,'
        '"tags":["t"],"codes":[4],"pair":[1,"a"],"at":"2026-01-02T03:04:05.000006+00:00",'
        '"hour":"03:04:00","amount":"1.10","uid":"00000000-0000-0000-0000-000000000005",'
        '"anything":{"a":[null]},"parts":[{"number":8}]}'
    )
    found = serde.model(Order).loads(stored.encode())
    expected = Order(
        7,
        2.5,
        Size.LARGE,
        Level.HIGH,
        3,
        True,
        None,
        {"t"},
        frozenset({4}),
        (1, "a"),
        at=dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC),
        hour=dt.time(3, 4),
        amount=decimal.Decimal("1.10"),
        uid=uuid.UUID(int=5),
        anything={"a": [None]},
        parts=[Order(8)],
    )
    assert difference(expected, found) is None


class Slotted:
    __slots__ = ("__hidden", "seen")

    def __init__(self, seen: int, hidden: int) -> None:
        self.seen, self.__hidden = seen, hidden


def test_g10_objects_without_equality_are_compared_by_what_they_consist_of() -> None:
    assert difference(Slotted(1, 2), Slotted(1, 2)) is None
    for other in (Slotted(1, 3), Slotted(2, 2)):
        assert difference(Slotted(1, 2), other) is not None
    for a, b in (
        (io.BytesIO(b"a"), io.BytesIO(b"b")),
        (threading.Lock(), threading.Lock()),
        (lambda: 1, lambda: 2),
        (object(), object()),
    ):
        assert difference(a, b) is not None


def test_g10_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, topic: xl.Topic) -> None:
    for name in ("msgspec", "msgspec.json"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"Tag .*msgspec.*pip install 'exclusivelog\[models\]'"):
        topic.producer(serializer=Tag)


# ---- small stacks ------------------------------------------------------------------------

DEEP = """
import json, threading, msgpack, pydantic
from exclusivelog import serde
from testing.kinds import Bill, Order, Payment

def exact(depth):
    data = msgpack.packb(None)
    for _ in range(depth):
        data = msgpack.packb(msgpack.ExtType(0, b"\\x91" + data))
    return data

def lists(depth, one=b"\\x91", end=b"\\xc0", close=b""):
    return one * depth + end + close * depth

def attempt(loads, data):
    try:
        loads(data)
    except (ValueError, RecursionError):
        pass

class Node(pydantic.BaseModel):
    inner: "Node | None" = None

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def check(cls, value, handler):
        return handler(value)

    @pydantic.model_serializer(mode="wrap")
    def store(self, handler):
        return handler(self)

def nodes():
    codec, value = serde.model(Node), Node()
    for depth in range(60):
        value = Node.model_construct(inner=value)
    assert codec.loads(codec.dumps(value)) == value
    for depth in (100, 240, 300, 5000):
        attempt(codec.loads, lists(depth, b'{"inner":', b"null", b"}"))

def play():
    nodes()
    for depth in (3, 4, 5, 50, 98):
        value = Bill(name="")
        for _ in range(depth):
            value = Bill.model_construct(name="", inner=value)
        assert serde.model(Bill).loads(serde.model(Bill).dumps(value)) == value
    for depth in (10, 100, 250, 300, 1000, 100_000):
        attempt(serde.exact.loads, exact(min(depth, 2000)))
        attempt(serde.exact.loads, lists(depth))
        attempt(serde.msgpack.loads, lists(depth))
        attempt(serde.json.loads, lists(depth, b"[", b"1", b"]"))
        attempt(serde.json.loads, lists(depth, b'{"a":', b"1", b"}"))
        for cls, start in ((Order, b'{"number":1,"parts":['), (Payment, b'{"parts":[')):
            attempt(serde.model(cls).loads, lists(depth, start, b"", b"]}"))
            attempt(serde.model(cls).loads, lists(depth, b'{"number":1,"anything":[', b"1", b"]}"))
    value = ()
    for depth in range(1, 400):
        value = (value,)
        attempt(serde.exact.dumps, value)
    for make, cls in ((lambda v: Order(1, anything=v), Order),
                      (lambda v: Order(1, parts=[v]), Order),
                      (lambda v: Payment.model_construct(parts=[v]), Payment)):
        value = cls.model_construct() if cls is Payment else cls(1)
        for depth in range(1, 200):
            value = make(value)
            attempt(serde.model(cls).dumps, value) if depth % 7 == 0 else None

threading.stack_size(128 << 10)
thread = threading.Thread(target=play)
thread.start()
thread.join()
"""


@pytest.mark.long
def test_g10_no_value_ends_a_thread_with_a_small_stack() -> None:
    """Neither one that is written, nor one that an older version or another program has written."""
    ran = subprocess.run([sys.executable, "-c", DEEP], cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_g10_what_is_nested_too_deep_in_the_log_is_told(topic: xl.Topic) -> None:
    data = msgpack.packb(None)
    for _ in range(600):
        data = msgpack.packb(msgpack.ExtType(0, b"\x91" + data))
    with topic.producer() as producer:
        producer.send_many([data, b"[" * 400 + b"]" * 400])
    for option, offset in (("exact", 0), ("json", 1)):
        with topic.reader(offset, deserializer=option) as reader:
            with pytest.raises(xl.DeserializationError, match=r"nested deeper|recursion depth"):
                _ = next(reader).value


@pytest.mark.parametrize("levels", [30, 100, 250, 500])
def test_g10_what_older_versions_wrote_deep_is_read(levels: int) -> None:
    """In any thread: what needs more stack than it may have is decoded in one of its own."""
    data, value = msgpack.packb(7), nested(levels, lambda v: (v,), 7)
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(0, b"\x91" + data))
    found = round_trips.with_small_stack(lambda: serde.exact.loads(data))
    for _ in range(levels):
        (value,), (found,) = value, found
    assert found == value
    lists = msgpack.packb(nested(levels, lambda v: [v], 7))
    assert round_trips.with_small_stack(lambda: serde.exact.loads(lists))


@pytest.mark.parametrize("code", [11, 127, -5, -128])
def test_g10_an_unknown_extension_is_named(code: int) -> None:
    data = b"\xc7\x01" + code.to_bytes(1, "big", signed=True) + b"\xc0"
    for stored in (data, b"\x91" + data, b"\x81\xa1a" + data, b"\x81" + data + b"\xc0"):
        with pytest.raises(ValueError, match=rf"extension {code} is unknown"):
            serde.exact.loads(stored)


# ---- keys of maps ------------------------------------------------------------------------


class Whole(enum.IntEnum):
    ONE = 1


BAD_KEYS: list[tuple[str, Any]] = [
    ("json", True), ("json", 1.0), ("json", -0.0), ("json", NAN), ("json", [1]), ("json", {}),
    ("msgpack", False), ("msgpack", 0.0), ("msgpack", NAN), ("msgpack", INF), ("msgpack", (1,)),
    ("exact", (1, True)), ("exact", frozenset({1.0})), ("exact", decimal.Decimal(1)),
    ("exact", [1]),
    ("exact", complex(1)), ("exact", dt.datetime(2026, 1, 2, tzinfo=BERLIN)), ("exact", {1}),
    ("exact", dt.datetime(2026, 1, 2, fold=1)), ("exact", Whole.ONE), ("str", Colour.RED),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "key"), BAD_KEYS)
def test_g10_a_key_that_may_equal_one_with_other_bytes_is_refused(
    topic: xl.Topic, codec: str, key: Any
) -> None:
    with xl.SharedMap(topic, key=codec) as shared:
        for call in (
            lambda: shared.put(key, 1),
            lambda: shared.get(key),
            lambda: shared.pop(key, None),
            lambda: shared.update(key, lambda _: 1),
            lambda: shared.replace(key, None, 1),
        ):
            with pytest.raises(REFUSALS, match="key="):
                call()
    assert topic.next_offset == 0


@pytest.mark.parametrize("codec", ["json", "msgpack", "exact"])
def test_g10_len_dict_and_at_agree(topic: xl.Topic, codec: str) -> None:
    keys: list[Any] = [1, 2.5, "1", None, 2**60]
    if codec == "exact":
        keys += [
            (1, "a"),
            frozenset({"a", "b", "c"}),
            dt.date(2026, 1, 2),
            uuid.UUID(int=1),
            dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        ]
    with xl.SharedMap(topic, key=codec) as shared:
        for key in keys:
            shared.put(key, 1)
        assert len(shared) == len(dict(shared)) == len(shared.at(topic.next_offset)) == len(keys)


def test_g10_objects_of_a_class_are_no_keys(topic: xl.Topic) -> None:
    for option in (Tag, serde.model(Tag), Point):
        with pytest.raises(TypeError, match="cannot be keys"):
            xl.SharedMap(topic, key=option)


SETS = """
import sys
import exclusivelog as xl
with xl.open(sys.argv[1]) as engine, xl.SharedMap(engine.topic("t"), "exact", "exact") as shared:
    [key] = shared.list_keys()
    assert shared.get(key) == {"a", "b", "c", "d"}
    assert shared.get(frozenset({"x", "y", "z"})) is not None
    assert shared.replace(key, shared.get(key), {"a", "b", "c", "d", "e"})
    assert shared.replace(key, {"e", "d", "c", "b", "a"}, {"a", "b", "c", "d"})
"""


@pytest.mark.long
def test_g10_sets_have_the_same_bytes_in_every_process(path: str) -> None:
    with xl.open(path) as engine, xl.SharedMap(engine.topic("t"), "exact", "exact") as shared:
        shared.put(frozenset({"x", "y", "z"}), {"a", "b", "c", "d"})
    for hash_seed in "1234":
        subprocess.run(
            [sys.executable, "-c", SETS, path],
            check=True,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        )


def test_g10_replace_finds_an_equal_value_with_other_bytes(topic: xl.Topic) -> None:
    """A dict in another order; a set that an older version wrote in the order of its process."""
    with xl.SharedMap(topic, value="exact") as shared:
        shared.put("a", {"x": 1, "y": 2})
        assert shared.replace("a", {"y": 2, "x": 1}, {1, 2})
        unordered = msgpack.packb(msgpack.ExtType(1, msgpack.packb([2, 1])))
        shared._append(lambda _: ([(b"a", unordered)], None))
        assert not shared.replace("a", {1, 3}, 0)
        assert shared.replace("a", {1, 2}, 0)


# ---- states and maps ---------------------------------------------------------------------


def keep(state: dict[Any, Any], op: Any) -> None:
    state[len(state)] = op


def test_g10_an_operation_is_what_every_process_decodes(topic: xl.Topic) -> None:
    """By default also with keys that are tuples."""
    ops = [{(1, 2): 3}, ("put", {"a"}), [dt.date(2026, 1, 2)]]
    with xl.SharedState(topic, dict, keep) as state:
        state.write(lambda _: ops)
        for bad in (object(), [Point(1)], nested(300, lambda v: (v,)), {NAN}):
            with pytest.raises(REFUSALS):
                state.write(lambda _, bad=bad: [bad])
        with xl.SharedState(topic, dict, keep) as again:
            assert difference(dict(enumerate(ops)), again.read(dict)) is None
    assert topic.next_offset == 3


def test_g10_an_operation_that_cannot_be_decoded_is_not_appended(topic: xl.Topic) -> None:
    codec: dict[str, Any] = {
        "encode": lambda op: msgpack.packb(op),
        "decode": lambda data: msgpack.unpackb(data),
    }
    with xl.SharedState(topic, dict, keep, **codec) as state:
        with pytest.raises(ValueError, match="decode does not take what encode gives"):
            state.write(lambda _: ["good", {1: 2}])
        assert topic.next_offset == 0
        state.write(lambda _: ["good"])
    with xl.SharedState(topic, dict, keep, **codec) as state:
        assert state.read(dict) == {0: "good"}


def test_g10_operations_of_before_are_read(topic: xl.Topic) -> None:
    """Plain msgpack, in which the default was until it kept tuples."""
    with topic.producer() as producer:
        producer.send(msgpack.packb(["put", {"a": 1}]))
    with xl.SharedState(topic, dict, keep) as state:
        assert state.read(dict) == {0: ["put", {"a": 1}]}


def test_g10_a_state_that_has_become_too_deep_has_no_snapshot(topic: xl.Topic) -> None:
    with xl.SharedState(topic, tuple, lambda state, op: (state, op)) as state:
        for number in range(300):
            state.write(lambda _, number=number: [number])
        with pytest.raises(xl.StateError, match="nested deeper"):
            state.snapshot()
    with xl.SharedState(topic, tuple, lambda state, op: (state, op)) as again:
        assert again.read(lambda s: s[1]) == 299


def test_g10_a_map_takes_by_default_what_it_gives_back(topic: xl.Topic) -> None:
    with xl.SharedMap(topic) as shared:
        shared.put("good", {1: [2]})
        for bad in ({(1, 2): 3}, (1, 2), bytearray(b"x")):
            with pytest.raises(TypeError, match="value="):
                shared.put("bad", bad)
        assert dict(shared.items()) == {"good": {1: [2]}}


def test_g10_the_good_keys_of_a_map_can_be_read_past_a_bad_one(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"\x01", b"\xc1", b"\x03"], keys=["a", "bad", "c"])
    with xl.SharedMap(topic) as shared:
        with pytest.raises(xl.DeserializationError, match="key 'bad'") as caught:
            shared.scan()
        assert (caught.value.key, caught.value.raw) == (b"bad", b"\xc1")
        for view, good in ((shared.items(), [("a", 1), ("c", 3)]), (shared.values(), [1, 3])):
            found, passed, each = [], [], iter(view)
            while True:
                try:
                    found.append(next(each))
                except xl.DeserializationError as error:
                    passed.append(error.key)
                except StopIteration:
                    break
            assert (found, passed) == (good, [b"bad"])
        assert shared.scan(filter=lambda key: key != "bad") == [("a", 1), ("c", 3)]
        assert [key for key in shared if key != "bad"] == ["a", "c"]
        del shared["bad"]
        assert dict(shared.items()) == {"a": 1, "c": 3}


def test_g10_a_watch_goes_on_after_a_change_that_cannot_be_read(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"\x01", b"\xc1", b"\x03"], keys=["a", "a", "a"])
    with xl.SharedMap(topic) as shared, shared.watch(start=0) as watch:
        assert watch.read_next(timeout=PATIENCE).value == 1
        for offset in (1, 2):  # the bad value is the one after, then the one before
            with pytest.raises(xl.DeserializationError) as caught:
                watch.read_next(timeout=PATIENCE)
            assert (caught.value.offset, caught.value.key) == (offset, b"a")
        shared["a"] = 4
        change = watch.read_next(timeout=PATIENCE)
        assert (change.previous, change.value) == (3, 4)


# ---- classes that run code of their own --------------------------------------------------


@attrs.define
class WithHook:
    a: int

    def __attrs_post_init__(self) -> None:
        self.a += 1


@attrs.define
class WithPrivate:
    _a: int = 0


class Doubled:
    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, each: Any, owner: type) -> Any:
        return 0 if each is None else getattr(each, self.name, 0)

    def __set__(self, each: Any, value: int) -> None:
        setattr(each, self.name, 2 * value)


@dataclasses.dataclass
class Described:
    a: int = Doubled()  # type: ignore[assignment]


WITH_CODE = [WithHook(1), WithPrivate(3), Described(5)]


@pytest.mark.rule("G10")
@pytest.mark.parametrize("value", WITH_CODE, ids=lambda value: type(value).__name__)
def test_g10_an_object_that_its_class_would_change_is_refused(value: Any, topic: xl.Topic) -> None:
    with topic.producer(serializer=serde.model(type(value))) as producer:
        with pytest.raises((TypeError, ValueError)):
            producer.send(value)
    assert topic.next_offset == 0
