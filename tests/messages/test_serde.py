"""What may stand for a serialiser, and models (rule G1). What comes back: test_round_trip.py."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import pickle
import types
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgpack
import pytest

import exclusivelog as xl
from exclusivelog import serde

pytestmark = [pytest.mark.once, pytest.mark.rule("G1")]
DATA = {"text": "é", "list": [1, 2.5, None, True]}


def round_trip(topic: xl.Topic, option: Any, *values: Any) -> list[Any]:
    with topic.producer(serializer=option) as producer:
        producer.send(values[0])
        producer.send_many([*values[1:], None])
    found = [message.value for message in topic.reader(deserializer=option)]
    assert found.pop() is None  # a tombstone is None with every serializer
    return found


# ---- what stands for one -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "stored"),
    [
        (json, DATA, serde.json.dumps(DATA)),
        (msgpack, DATA, serde.msgpack.dumps(DATA)),
        (pickle, DATA, pickle.dumps(DATA)),
        (str, "é", "é".encode()),
        (bytes, b"\xff", b"\xff"),
        ("exact", (1, "a"), serde.exact.dumps((1, "a"))),
    ],
    ids=["json", "msgpack", "pickle", "str", "bytes", "exact"],
)
def test_modules_and_types_stand_for_what_they_are_called(topic, option, value, stored) -> None:
    assert round_trip(topic, option, value, value) == [value, value]
    assert [message.value for message in topic.reader()] == [stored, stored, None]


def test_a_module_whose_dumps_returns_text_is_encoded(topic) -> None:
    module: Any = types.ModuleType("simplejson")
    module.dumps, module.loads = json.dumps, json.loads
    assert round_trip(topic, module, DATA) == [DATA]


def test_json_dumps_itself_is_encoded(topic) -> None:
    with topic.producer(serializer=json.dumps) as producer:
        producer.send(DATA)
    assert next(topic.reader(deserializer=json.loads)).value == DATA


def test_a_function_that_returns_text_is_told_what_it_must_return(topic) -> None:
    with topic.producer(serializer=repr) as producer, pytest.raises(TypeError, match="bytes"):
        producer.send(1)
    assert topic.next_offset == 0


class Plain:
    """No model."""


@pytest.mark.parametrize("option", [Plain, Plain(), 7, object(), math, int, dict])
def test_what_is_no_serializer_is_refused_when_the_producer_is_opened(topic, option) -> None:
    with pytest.raises(TypeError, match=r"serializer=.*it takes bytes, str, json"):
        topic.producer(serializer=option)
    assert topic.holders == []


@pytest.mark.parametrize("option", [Plain(), 7, object(), math])
def test_what_is_no_deserializer_is_refused_when_the_reader_is_opened(topic, option) -> None:
    with pytest.raises(TypeError, match=r"deserializer=.*it takes bytes, str, json"):
        topic.reader(deserializer=option)
    with pytest.raises(TypeError, match=r"key_deserializer=.*it takes bytes, str, json"):
        topic.reader(key_deserializer=option)


@pytest.mark.parametrize("option", ["pickle", "", "JSON"])
def test_an_unknown_name_is_a_wrong_value(topic, option) -> None:
    with pytest.raises(ValueError, match=f"serializer={option!r}"):
        topic.producer(serializer=option)
    with pytest.raises(ValueError, match=f"deserializer={option!r}"):
        topic.reader(deserializer=option)


def test_a_map_takes_what_a_producer_takes(topic) -> None:
    with xl.SharedMap(topic, key=str, value=json) as shared:
        shared.put("a", [1])
        assert topic.serializers == {"key": "str", "value": "json"}
    with xl.SharedMap(topic, key="str", value=serde.json) as shared:
        assert shared.get("a") == [1]


def test_a_map_of_models(topic) -> None:
    with xl.SharedMap(topic, value=Item) as shared:
        shared.put("a", Item("tea", 2))
        assert shared.get("a") == Item("tea", 2)
    with xl.SharedMap(topic, value=serde.model(Item)) as shared:
        assert shared.get("a", latest=True) == Item("tea", 2)


# ---- dataclasses -------------------------------------------------------------------------


@dataclasses.dataclass
class Item:
    name: str
    count: int = 1


class Kind(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Colour(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Order:
    number: int
    price: float
    paid: bool
    note: str | None
    items: list[Item]
    by_name: dict[str, Item]
    pair: tuple[int, str]
    many: tuple[int, ...]
    tags: set[str]
    fixed: frozenset[int]
    kind: Kind
    colour: Colour
    mode: Literal["a", "b", 3]
    at: dt.datetime
    day: dt.date
    hour: dt.time
    amount: decimal.Decimal
    uid: uuid.UUID
    anything: Any
    either: int | str | None
    sequence: Sequence[int]
    mapping: Mapping[str, float]
    marked: Annotated[int, "mark"]
    bare: list
    maybe: Item | None = None
    parts: list[Order] = dataclasses.field(default_factory=list)  # of its own type
    doubled: int = dataclasses.field(init=False, default=0)
    LIMIT: ClassVar[int] = 5


ORDER = Order(
    number=7,
    price=2.5,
    paid=True,
    note=None,
    items=[Item("tea", 2)],
    by_name={"x": Item("é")},
    pair=(1, "a"),
    many=(1, 2, 3),
    tags={"t"},
    fixed=frozenset({4}),
    kind=Kind.SLOW,
    colour=Colour.RED,
    mode=3,
    at=dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC),
    day=dt.date(2026, 1, 2),
    hour=dt.time(3, 4),
    amount=decimal.Decimal("1.10"),
    uid=uuid.UUID(int=5),
    anything={"a": [None, 1.5]},
    either="x",
    sequence=[1],
    mapping={"a": 1.5},
    marked=9,
    bare=[1, "b"],
    maybe=Item("maybe"),
)


@pytest.mark.parametrize("option", [Order, serde.model(Order)], ids=["class", "serde"])
def test_a_dataclass_comes_back_as_it_was(topic, option) -> None:
    nested = dataclasses.replace(ORDER, parts=[ORDER, dataclasses.replace(ORDER, either=3)])
    assert round_trip(topic, option, ORDER, nested) == [ORDER, nested]
    stored = json.loads(next(topic.reader()).value)
    assert (stored["kind"], stored["amount"], stored["pair"]) == ("slow", "1.10", [1, "a"])
    assert "doubled" not in stored


def test_unknown_fields_are_left_out_and_missing_ones_have_their_defaults() -> None:
    items = serde.model(Item)
    assert items.loads(b'{"name":"tea","colour":"green"}') == Item("tea", 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"number": "7"}, r"Expected `int`, got `str` - at `\$.number`"),
        ({"number": True}, r"\$\.number"),
        ({"paid": 1}, r"\$\.paid"),
        ({"price": "2"}, r"\$\.price"),
        ({"items": {}}, r"Expected `array`, got `object` - at `\$\.items`"),
        ({"items": [{"name": 5}]}, r"\$\.items\[0\]\.name"),
        ({"items": [[]]}, r"\$\.items"),
        ({"by_name": []}, r"\$\.by_name"),
        ({"pair": [1]}, r"\$\.pair"),
        ({"kind": "medium"}, "Invalid enum value 'medium'"),
        ({"mode": 3.5}, r"\$\.mode"),
        ({"at": "now"}, r"\$\.at"),
        ({"at": []}, r"\$\.at"),
        ({"amount": "many"}, r"\$\.amount"),
        ({"uid": "5"}, r"\$\.uid"),
        ({"either": 1.5}, r"Expected `int \| str \| null`"),
        ({"maybe": 1}, r"\$\.maybe"),
        ({"tags": ["a", 1]}, r"\$\.tags"),
    ],
)
def test_a_message_that_is_none_of_a_dataclass_is_named(topic, changes, said) -> None:
    stored = json.loads(serde.model(Order).dumps(ORDER))
    with topic.producer(serializer="json") as producer:
        producer.send({**stored, **changes})
        producer.send(stored)
    wrong, right = topic.reader(deserializer=Order)
    with pytest.raises(xl.DeserializationError, match=said):
        _ = wrong.value
    assert right.value == ORDER


@pytest.mark.parametrize("stored", [b"", b"[]", b"7", b"null", b"{}", b"\xff", b'{"count":1}'])
def test_json_that_is_no_dataclass_is_named(topic, stored) -> None:
    with topic.producer() as producer:
        producer.send(stored)
    with pytest.raises(xl.DeserializationError) as caught:
        list(topic.reader(deserializer=Item).values())
    assert caught.value.raw == stored


@pytest.mark.parametrize(
    "value", [{"name": "tea"}, "tea", 5, Plain(), Item(5), Item("tea", "2"), Item("tea", True)]
)
def test_an_object_that_is_none_of_the_dataclass_is_not_sent(topic, value) -> None:
    with topic.producer(serializer=Item) as producer:
        with pytest.raises((TypeError, ValueError), match="Item"):
            producer.send(value)
        with pytest.raises((TypeError, ValueError), match="Item"):
            producer.send_many([Item("tea"), value])
    assert topic.next_offset == 0


class Pair(enum.Enum):
    ONE = (1, "a")


class Mixed(enum.Enum):
    ONE, TWO = 1, "two"


WRONG_FIELDS = [
    complex,
    Plain,
    list[Plain],
    Item | Plain,
    object(),
    type[int],
    Item | Order,
    Pair,
    Mixed,
    dict[str, tuple[Plain, int]],
    dataclasses.InitVar[int],
]


@pytest.mark.parametrize("hint", WRONG_FIELDS)
def test_a_dataclass_with_a_field_that_json_cannot_have_is_refused(topic, hint) -> None:
    made = dataclasses.make_dataclass("Made", [("good", int), ("wrong", hint)])
    for call in (
        lambda: serde.model(made),
        lambda: topic.producer(serializer=made),
        lambda: topic.reader(deserializer=made),
    ):
        with pytest.raises(TypeError, match="Made"):
            call()
    assert topic.holders == []


def test_types_that_cannot_be_found_are_told() -> None:
    made = dataclasses.make_dataclass("Made", [("part", "Nowhere")])
    with pytest.raises(TypeError, match="Made cannot be found: name 'Nowhere'"):
        serde.model(made)


@pytest.mark.parametrize("option", [Plain, int, Item("tea"), None, "json", dict])
def test_what_is_no_model_is_refused(option) -> None:
    with pytest.raises(TypeError, match="model takes"):
        serde.model(option)


def test_a_message_of_a_dataclass_can_be_pickled(topic) -> None:
    with topic.producer(serializer=Order) as producer:
        producer.send(ORDER)
    message = next(topic.reader(deserializer=Order))
    assert pickle.loads(pickle.dumps(message)).value == ORDER


# ---- pydantic ----------------------------------------------------------------------------


class Duck:
    """What this library asks of a pydantic model."""

    def __init__(self, data: str) -> None:
        self.data = data

    def model_dump_json(self) -> str:
        return json.dumps(self.data)

    @classmethod
    def model_validate_json(cls, data: bytes) -> Duck:
        return cls(json.loads(data))


def test_a_model_is_told_by_its_methods(topic) -> None:
    (found,) = round_trip(topic, Duck, Duck("quack"))
    assert (type(found), found.data) == (Duck, "quack")
    with topic.producer(serializer=Duck) as producer, pytest.raises(TypeError, match="takes Duck"):
        producer.send("quack")


def test_pydantic_models(topic) -> None:
    pydantic = pytest.importorskip("pydantic", minversion="2")

    class Payment(pydantic.BaseModel):
        number: int
        amount: decimal.Decimal
        at: dt.datetime

    class Refund(Payment):
        why: str = ""

    payment = Payment(number=1, amount="1.10", at=dt.datetime(2026, 1, 2, tzinfo=dt.UTC))
    refund = Refund(**payment.model_dump(), why="broken")
    assert round_trip(topic, Payment, payment, payment) == [payment, payment]
    with topic.producer(serializer=serde.model(Payment)) as producer:
        for other, name in ((refund, "Refund"), ({"number": 1}, "dict")):
            with pytest.raises(TypeError, match=f"value takes Payment, not {name}"):
                producer.send(other)
    with topic.producer() as producer:
        producer.send(b'{"number":"one"}')
    reader = topic.reader(-1, deserializer=Payment)
    with pytest.raises(xl.DeserializationError, match="ValidationError: 3 validation errors"):
        _ = next(reader).value


def test_a_message_of_a_pydantic_model_can_be_pickled(topic) -> None:
    pydantic = pytest.importorskip("pydantic", minversion="2")
    model = pydantic.create_model("Model", number=(int, ...), __module__=__name__)
    globals()["Model"] = model
    try:
        with topic.producer(serializer=model) as producer:
            producer.send(model(number=5))
        message = next(topic.reader(deserializer=model))
        assert pickle.loads(pickle.dumps(message)).value == model(number=5)
    finally:
        del globals()["Model"]


# ---- values that a serialiser refuses ----------------------------------------------------


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("option", "value"), [("msgpack", 1 << 70), ("json", nested(100_000))], ids=["large", "deep"]
)
def test_a_value_that_the_serialiser_cannot_hold_is_named(
    topic: xl.Topic, option: str, value: Any
) -> None:
    """msgpack raises OverflowError, and json RecursionError: neither names the argument."""
    with topic.producer(serializer=option) as producer:
        for send in (
            producer.send,
            producer.send_async,
            lambda each: producer.send_many([1, each]),
        ):
            with pytest.raises(ValueError, match="value="):
                send(value)
    assert topic.next_offset == 0


@pytest.mark.parametrize(
    ("codec", "value"), [("msgpack", 1 << 70), ("json", nested(100_000))], ids=["large", "deep"]
)
def test_a_map_names_a_value_that_its_serialiser_cannot_hold(
    topic: xl.Topic, codec: str, value: Any
) -> None:
    with xl.SharedMap(topic, value=codec) as settings:
        for put in (
            lambda: settings.put("key", value),
            lambda: settings.update("key", lambda _: value),
            lambda: settings.update({"other": 1, "key": value}),
        ):
            with pytest.raises(ValueError, match="value="):
                put()
        assert dict(settings) == {}
