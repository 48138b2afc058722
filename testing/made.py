"""Classes with odd shapes, each made of a number, and the same in every process (rule G10).

`Made17` is found by its name, also by pickle: its library, its fields, their types, bounds, aliases
and defaults, and its settings are drawn from its number. `values_of(17)` makes objects of it,
without the checks of its library, with values that its fields take, and some that they do not.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import random
import re
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import attrs
import msgspec
import pydantic
import pydantic.dataclasses
from hypothesis import strategies as some

from testing.kinds import DATETIMES, FLOATS, INTS, TEXTS, TIMES, VALUES, Level, Point, Size, Tag

CLASSES = 1000
LIBRARIES = (
    "dataclass",
    "slots",
    "attrs",
    "struct",
    "typed dict",
    "named tuple",
    "pydantic",
    "pydantic dataclass",
)
BY_PYDANTIC = ("pydantic", "pydantic dataclass")
NAMES = ("a", "items", "keys", "é", "from_", "number", "madeAt", "x1", "self_", "type")
D = decimal.Decimal


class Odd(enum.Enum):
    """Values that JSON does not have, or has for something else."""

    PAIR, NOTHING, HALF, YES, LARGE = (1, 2), None, 0.5, True, 1 << 70


class Signed(enum.IntEnum):
    BELOW, NONE, ABOVE = -1, 0, 1 << 40


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: list[str] = []


class Paid(msgspec.Struct, tag=True):
    amount: int


class Refund(msgspec.Struct, tag=True):
    amount: int


Strategy = some.SearchStrategy[Any]
SMALL = some.integers(-2, 9)
Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
PETS = some.builds(Cat) | some.builds(Dog, tricks=some.lists(some.text(max_size=2), max_size=2))
PETS |= some.just(Cat.model_construct(kind="dog"))
PAYMENTS = some.builds(Paid, some.integers(-2, 9)) | some.builds(Refund, some.integers(-2, 9))


class Field(NamedTuple):
    name: str
    kind: Any
    values: Strategy
    default: Any  # NEEDED: none
    options: dict[str, Any]  # of pydantic


NEEDED: Any = object()

# ---- types of fields ---------------------------------------------------------------------


def _plain() -> list[tuple[Any, Strategy, Any]]:
    """(type, values, default)."""
    return [
        (int, INTS | SMALL | FLOATS, 1),
        (float, FLOATS | SMALL, 0.5),
        (str, TEXTS, "s"),
        (bool, some.sampled_from([True, False, 1]), False),
        (bytes, some.binary(max_size=3), b""),
        (D, some.decimals() | SMALL, D("1.0")),
        (uuid.UUID, some.uuids(), uuid.UUID(int=1)),
        (dt.datetime, DATETIMES, dt.datetime(2026, 1, 2)),
        (dt.time, TIMES, dt.time(1)),
        (dt.date, some.dates() | DATETIMES, dt.date(2026, 1, 2)),
        (dt.timedelta, some.timedeltas(), dt.timedelta(1)),
        (Any, VALUES, None),
        (Size, some.sampled_from([*Size, "l"]), Size.LARGE),
        (Level, some.sampled_from([*Level, 2]), Level.LOW),
        (Signed, some.sampled_from([*Signed, -1]), Signed.ABOVE),
        (Literal["a", "b"], some.sampled_from(["a", "b", "c"]), "b"),
        (Literal[1, "1"], some.sampled_from([1, "1", True]), "1"),
        (int | str, SMALL | TEXTS | some.booleans(), 0),
        (int | None, some.none() | SMALL, None),
        (Point, some.builds(Point, SMALL, FLOATS), Point(1)),
    ]


def _of_pydantic() -> list[tuple[Any, Strategy, Any]]:
    return [
        (Odd, some.sampled_from([*Odd]), Odd.HALF),
        (Odd | None, some.sampled_from([*Odd]), None),
        (pydantic.SecretStr, some.builds(pydantic.SecretStr, TEXTS), pydantic.SecretStr("")),
        (pydantic.ByteSize, INTS | SMALL | some.decimals(), pydantic.ByteSize(1)),
        (collections.deque[int], some.builds(collections.deque, some.lists(SMALL)), NEEDED),
        (str | bytes, TEXTS | some.binary(max_size=2), ""),
        (Pet, PETS, NEEDED),
    ]


def _of_msgspec() -> list[tuple[Any, Strategy, Any]]:
    return [
        (Tag, some.builds(Tag, TEXTS, FLOATS), Tag("t")),
        (Paid | Refund | None, PAYMENTS | some.none(), None),
    ]


def _bounded(library: str) -> list[tuple[Any, Strategy, Any]]:
    meta: Callable[..., Any] = pydantic.Field if library in BY_PYDANTIC else msgspec.Meta
    found = [
        (Annotated[int, meta(gt=0, le=5)], SMALL, 1),
        (Annotated[int, meta(multiple_of=3)], SMALL | INTS, 3),
        (Annotated[float, meta(ge=0.0, lt=2.5)], FLOATS, 0.0),
        (Annotated[str, meta(min_length=1, max_length=3)], TEXTS, "ab"),
        (Annotated[str, meta(pattern="^a")], TEXTS | some.just("ab"), "a"),
        (Annotated[list[int], meta(max_length=2)], some.lists(SMALL, max_size=3), NEEDED),
        (
            Annotated[dict[str, int], meta(min_length=1)],
            some.dictionaries(TEXTS, SMALL, max_size=2),
            NEEDED,
        ),
    ]
    if library in BY_PYDANTIC:
        amounts = some.decimals(allow_nan=False, allow_infinity=False, places=2) | some.decimals()
        found += [
            (Annotated[D, meta(max_digits=4, decimal_places=2)], amounts, D("1.25")),
            (Annotated[D, meta(ge=0, multiple_of=D("0.5"))], amounts, D("1.5")),
            (Annotated[dt.date, meta(gt=dt.date(2000, 1, 2))], some.dates(), dt.date(2026, 1, 2)),
        ]
    return found


def _types(library: str) -> list[tuple[Any, Strategy, Any]]:
    others = _of_pydantic() if library in BY_PYDANTIC else _of_msgspec()
    return _plain() + others + 2 * _bounded(library)


def _several(rng: random.Random, one: tuple[Any, Strategy, Any]) -> tuple[Any, Strategy, Any]:
    """A collection of a type."""
    kind, values, _ = one
    texts = some.text(max_size=2) | TEXTS
    return rng.choice(
        [
            (list[kind], some.lists(values, max_size=2), NEEDED),
            (dict[str, kind], some.dictionaries(texts, values, max_size=2), NEEDED),
            (dict[int, kind], some.dictionaries(INTS | SMALL, values, max_size=2), NEEDED),
            (tuple[kind, ...], some.lists(values, max_size=2).map(tuple), ()),
            (tuple[int, kind], some.tuples(SMALL, values), NEEDED),
            (set[str], some.sets(TEXTS, max_size=2), NEEDED),
            (frozenset[int], some.frozensets(INTS | SMALL, max_size=2), frozenset()),
        ]
    )


# ---- fields ------------------------------------------------------------------------------


def _fields(rng: random.Random, library: str, number: int) -> list[Field]:
    found = []
    for name in rng.sample(NAMES, rng.randint(1, 5)):
        kind, values, default = rng.choice(_types(library))
        if rng.random() < 0.3:
            kind, values, default = _several(rng, (kind, values, default))
        elif number >= 2 * len(LIBRARIES) and rng.random() < 0.15:  # of the same library
            inner = number % (2 * len(LIBRARIES))
            kind, values, default = class_of(inner), values_of(inner), NEEDED
        if rng.random() < 0.4:
            default = NEEDED
        options = _aliases(rng) if library == "pydantic" else {}
        found.append(Field(name, kind, values, default, options))
    return sorted(found, key=lambda field: field.default is not NEEDED)


def _aliases(rng: random.Random) -> dict[str, Any]:
    other = rng.choice([*NAMES, "alias", "other"])
    path = pydantic.AliasPath(other, 0)
    return rng.choice(
        [
            *({}, {}, {}),
            {"alias": other},
            {"validation_alias": other},
            {"serialization_alias": other},
            {"validation_alias": path},
            {"exclude": True},
            {"validation_alias": pydantic.AliasChoices("first", path)},
            {"repr": False},
        ]
    )


# ---- classes -----------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    found = re.fullmatch(r"Made(\d+)", name)
    if found is None:
        raise AttributeError(name)
    return class_of(int(found[1]))


def class_of(number: int) -> Any:
    """The class of a number."""
    name = f"Made{number}"
    if name not in globals():
        rng = random.Random(number)
        library = LIBRARIES[number % len(LIBRARIES)]
        fields = _fields(rng, library, number)
        made = _MAKERS[library](name, fields, rng)
        made.__module__, made.__qualname__ = __name__, name
        globals()[name] = made
        _FIELDS[number] = fields
    return globals()[name]


_FIELDS: dict[int, list[Field]] = {}


def _dataclass(
    name: str, fields: list[Field], rng: random.Random, frozen: bool | None = None, **options: Any
) -> Any:
    rows: list[Any] = [
        (each.name, each.kind)
        if each.default is NEEDED
        else (each.name, each.kind, dataclasses.field(default=each.default))
        for each in fields
    ]
    kw_only = rng.random() < 0.3
    frozen = rng.random() < 0.3 if frozen is None else frozen
    return dataclasses.make_dataclass(name, rows, kw_only=kw_only, frozen=frozen, **options)


def _slots(name: str, fields: list[Field], rng: random.Random) -> Any:
    return _dataclass(name, fields, rng, slots=True)


def _attrs(name: str, fields: list[Field], rng: random.Random) -> Any:
    given = {
        each.name: attrs.field(
            type=each.kind, default=attrs.NOTHING if each.default is NEEDED else each.default
        )
        for each in fields
    }
    options = {"slots": rng.random() < 0.5, "frozen": rng.random() < 0.3}
    return attrs.make_class(name, given, cache_hash=False, **options)


def _struct(name: str, fields: list[Field], rng: random.Random) -> Any:
    rows: list[Any] = [
        (each.name, each.kind) if each.default is NEEDED else (each.name, each.kind, each.default)
        for each in fields
    ]
    array_like = rng.random() < 0.3
    tag = rng.choice([None, True, 7, "tag"])
    return msgspec.defstruct(
        name,
        rows,
        module=__name__,
        array_like=array_like,
        frozen=rng.random() < 0.3,
        rename=rng.choice([None, "camel", "upper", {"a": "A B"}]),
        kw_only=rng.random() < 0.3,
        omit_defaults=rng.random() < 0.3,
        tag=tag,
        tag_field=None if tag is None else "kind",
        forbid_unknown_fields=rng.random() < 0.3,
    )


def _typed_dict(name: str, fields: list[Field], rng: random.Random) -> Any:
    rows = {each.name: each.kind for each in fields}
    return TypedDict(name, rows, total=rng.random() < 0.5)  # type: ignore[operator]


def _named_tuple(name: str, fields: list[Field], rng: random.Random) -> Any:
    made: Any = NamedTuple(name, [(each.name, each.kind) for each in fields])  # type: ignore[misc]
    defaults = [each.default for each in fields if each.default is not NEEDED]
    made.__new__.__defaults__ = tuple(defaults)
    made._field_defaults = {
        each.name: each.default for each in fields if each.default is not NEEDED
    }
    return made


def _pydantic(name: str, fields: list[Field], rng: random.Random) -> Any:
    given: dict[str, Any] = {
        each.name: (
            each.kind,
            pydantic.Field(
                **{} if each.default is NEEDED else {"default": each.default}, **each.options
            ),
        )
        for each in fields
    }
    settings: dict[str, Any] = {}
    for setting, choices in _SETTINGS.items():
        if rng.random() < 0.2:
            settings[setting] = rng.choice(choices)
    bases = Computing if rng.random() < 0.2 else pydantic.BaseModel
    made = type(f"{name}Base", (bases,), {"__module__": __name__, "model_config": settings})
    return pydantic.create_model(name, __base__=made, __module__=__name__, **given)


class Computing(pydantic.BaseModel):
    """Has what is computed of its objects."""

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def computed(self) -> int:
        return 7


_SETTINGS: dict[str, tuple[Any, ...]] = {
    "populate_by_name": (True,),
    "extra": ("forbid", "allow", "ignore"),
    "frozen": (True,),
    "use_enum_values": (True,),
    "str_strip_whitespace": (True,),
    "strict": (True,),
    "ser_json_inf_nan": ("strings", "constants"),
    "ser_json_bytes": ("base64", "hex"),
    "val_json_bytes": ("base64", "hex"),
    "ser_json_timedelta": ("float",),
    "validate_default": (True,),
    "alias_generator": (str.upper,),
    "serialize_by_alias": (True,),
    "coerce_numbers_to_str": (True,),
    "str_to_lower": (True,),
    "str_max_length": (3,),
    "allow_inf_nan": (False,),
}


def _pydantic_dataclass(name: str, fields: list[Field], rng: random.Random) -> Any:
    return pydantic.dataclasses.dataclass(_dataclass(name, fields, rng, frozen=False))


_MAKERS: dict[str, Callable[[str, list[Field], random.Random], Any]] = {
    "dataclass": _dataclass,
    "slots": _slots,
    "attrs": _attrs,
    "struct": _struct,
    "typed dict": _typed_dict,
    "named tuple": _named_tuple,
    "pydantic": _pydantic,
    "pydantic dataclass": _pydantic_dataclass,
}

# ---- values ------------------------------------------------------------------------------


def values_of(number: int) -> Strategy:
    """Objects of a class, of fields that are not checked."""
    cls, fields = class_of(number), _FIELDS[number]
    given: dict[str, Strategy] = {}
    for each in fields:
        usual = some.just(each.default) if each.default is not NEEDED else each.values
        given[each.name] = each.values | usual
    return some.fixed_dictionaries(given).map(lambda values: _object(cls, values))


def _object(cls: Any, values: dict[str, Any]) -> Any:
    if hasattr(cls, "model_construct"):
        return cls.model_construct(**values)
    if not hasattr(cls, "__pydantic_validator__"):
        return cls(**values)
    made = object.__new__(cls)
    made.__dict__.update(values)
    return made


# (number, object): of a class that was drawn, too.
MADE: Strategy = some.integers(0, CLASSES - 1).flatmap(
    lambda number: some.tuples(some.just(number), values_of(number))
)
