"""Objects of one class as JSON, by msgspec or pydantic; see `serde.model` (rules G1, G10).

Neither library gives back every object: a NaN becomes null, a subclass its base, a secret
asterisks. So each object is decoded before it is sent, and compared (`Checked`), unless it consists
of nothing but what msgspec gives back (`_core.Shape`): plain fields, lists and dicts of them.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import importlib
import typing
from collections.abc import Callable, Iterator
from typing import Any

from exclusivelog import _core, threads
from exclusivelog.comparing import Checked

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]

# Levels of JSON that pydantic decodes in any thread: each may take 12 KiB of its stack, more with
# an application's validators, and a stack may have 128 KiB.
SHALLOW = 4


class Model(Checked):
    """The serialiser of the objects of a class. Pickled, it is made anew from the class."""

    def __init__(self, cls: Any) -> None:
        self._shape = _core.Shape()  # no object is known to come back
        self._shallow = SHALLOW
        if is_pydantic(cls):
            encode, decode = _by_pydantic(cls)
        elif is_duck(cls):
            encode, decode = _by_methods(cls)
        else:
            encode, decode, self._shape = _by_msgspec(cls)
            self._shallow = _core.MOST_LEVELS_READ
        super().__init__(encode, self._load)
        self._cls, self._decode = cls, decode
        self._kind = dict if typing.is_typeddict(cls) else cls

    def dumps(self, value: Any) -> bytes:
        """Encode an object; TypeError if it is one of another class."""
        if self._shape.holds(value):
            return self._dumps(value)
        if type(value) is not self._kind:  # one of a subclass would come back as one of the class
            raise TypeError(f"value takes {self._cls.__name__}, not {type(value).__name__}")
        try:
            return super().dumps(value)
        except (TypeError, ValueError, OverflowError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self._cls.__name__}: {error}") from error

    def _encoded(self, value: Any, levels: int) -> bytes:
        if levels <= self._shallow:
            return self._dumps(value)
        return threads.with_deep_stack(lambda: self._dumps(value))

    def _load(self, data: bytes) -> Any:
        if _core.json_depth(data, _core.MOST_LEVELS_READ) <= self._shallow:
            return self._decode(data)
        return threads.with_deep_stack(lambda: self._decode(data))

    def __reduce__(self) -> Any:
        return Model, (self._cls,)


def is_model(cls: Any) -> bool:
    """Whether `Model` takes this class."""
    return isinstance(cls, type) and (
        is_pydantic(cls) or is_duck(cls) or dataclasses.is_dataclass(cls)
        or typing.is_typeddict(cls) or hasattr(cls, "__struct_fields__")
        or hasattr(cls, "__attrs_attrs__") or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    )  # fmt: skip


def is_pydantic(cls: Any) -> bool:
    """Whether it is a model or a dataclass of pydantic."""
    return hasattr(cls, "__pydantic_validator__")


def is_duck(cls: Any) -> bool:
    """Whether it has the methods of a pydantic model."""
    names = ("model_dump_json", "model_validate_json")
    return all(callable(getattr(cls, name, None)) for name in names)


def _needed(library: str, cls: Any) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ImportError(
            f"objects of {cls.__name__} as values need {library.partition('.')[0]}, which is not "
            "installed: pip install 'exclusivelog[models]'"
        ) from error


# ---- pydantic ----------------------------------------------------------------------------


def _by_pydantic(cls: Any) -> Codec:
    """By the names of the fields, not by their aliases: one that is only for reading, or only for
    writing, would not come back."""
    pydantic = _needed("pydantic", cls)
    if tuple(map(int, pydantic.VERSION.split(".")[:2])) < (2, 11):  # it cannot read by name
        raise ImportError(f"objects of {cls.__name__} as values need pydantic 2.11 or later")
    try:
        adapter = pydantic.TypeAdapter(cls)
    except pydantic.PydanticUserError as error:
        raise TypeError(f"{cls.__name__}: {error}") from error

    def encode(value: Any) -> bytes:
        # Without what is computed: a model that forbids other fields would not take it back.
        data: bytes = adapter.dump_json(value, by_alias=False, round_trip=True, warnings="error")
        return data

    def decode(data: bytes) -> Any:
        return adapter.validate_json(data, by_alias=True, by_name=True)

    return encode, decode


def _by_methods(cls: Any) -> Codec:
    def encode(value: Any) -> bytes:
        data: str = value.model_dump_json()
        return data.encode("utf-8")

    return encode, cls.model_validate_json


# ---- msgspec -----------------------------------------------------------------------------


def _by_msgspec(cls: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any], _core.Shape]:
    json, inspect = _needed("msgspec.json", cls), _needed("msgspec.inspect", cls)
    try:
        decoder, info = json.Decoder(cls), inspect.type_info(cls)
    except NameError as error:
        raise TypeError(
            f"the types of the fields of {cls.__name__} cannot be found: {error}; define the "
            "classes that they name in the module, not in a function"
        ) from None
    except TypeError as error:
        raise TypeError(f"{cls.__name__}: {error}") from error
    unknown = _unknown(inspect, info)
    if unknown is not None:
        raise TypeError(
            f"{unknown}, which `serde.model` cannot store as JSON; see its documentation, or write "
            "a Serde"
        )
    return json.Encoder().encode, decoder.decode, _Shapes(inspect).of(info)


def _unknown(inspect: Any, info: Any) -> str | None:
    """The first field, in words, whose class msgspec does not know."""
    seen: set[int] = set()
    left = [(info, "")]
    while left:
        each, field = left.pop()
        if isinstance(each, inspect.CustomType):
            return f"{field} has type {each.cls.__name__}"
        if id(each) not in seen:  # a class may have fields of its own type
            seen.add(id(each))
            left += _parts(inspect, each, field)
    return None


def _parts(inspect: Any, info: Any, field: str) -> Iterator[tuple[Any, str]]:
    if isinstance(info, inspect.Field):
        field = f"{field.partition('.')[0]}.{info.name}"
    elif hasattr(info, "fields"):
        field = getattr(info, "cls", type(info)).__name__
    for name in getattr(info, "__struct_fields__", ()):
        found = getattr(info, name)
        for part in found if isinstance(found, tuple) else (found,):
            if isinstance(part, (inspect.Type, inspect.Field)):
                yield part, field


class _Shapes:
    """Makes shapes of what msgspec knows of a class. Where there is a doubt (a constraint, code
    that runs when an object is made, a union of several types), the shape is empty."""

    def __init__(self, inspect: Any) -> None:
        from uuid import UUID  # 3 ms, which each `open` would take

        self._known: dict[int, tuple[Any, _core.Shape]] = {}
        self._leaves = {
            inspect.NoneType: type(None), inspect.BoolType: bool, inspect.IntType: int,
            inspect.FloatType: float, inspect.StrType: str, inspect.BytesType: bytes,
            inspect.DateTimeType: dt.datetime, inspect.DateType: dt.date,
            inspect.UUIDType: UUID,
        }  # fmt: skip
        self._several = {
            inspect.ListType: list, inspect.SetType: set, inspect.FrozenSetType: frozenset,
            inspect.VarTupleType: tuple,
        }  # fmt: skip
        self._inspect = inspect

    def of(self, info: Any) -> _core.Shape:
        """The shape of a type."""
        inspect, kind = self._inspect, type(info)
        if kind in self._leaves:
            return _core.Shape([self._leaves[kind]] if _is_free(info) else [])
        if kind is inspect.EnumType:
            return _core.Shape([] if issubclass(info.cls, enum.Flag) else [info.cls])
        if kind in self._several and _is_free(info, "item_type"):
            return _core.Shape(kind=self._several[kind], item=self.of(info.item_type))
        if kind is inspect.DictType and _is_free(info, "key_type", "value_type"):
            by_name = isinstance(info.key_type, inspect.StrType) and _is_free(info.key_type)
            return _core.Shape(kind=dict if by_name else None, item=self.of(info.value_type))
        if kind is inspect.UnionType:
            return self._of_union(info.types)
        if kind in (inspect.DataclassType, inspect.StructType):
            return self._of_class(info)
        return _core.Shape()

    def _of_union(self, types: Any) -> _core.Shape:
        # One type or None: msgspec tells others apart by their text, too.
        others = [each for each in types if not isinstance(each, self._inspect.NoneType)]
        if len(others) != 1:
            return _core.Shape()
        return _core.Shape(optional=self.of(others[0]))

    def _of_class(self, info: Any) -> _core.Shape:
        if id(info) in self._known:  # a class may have fields of its own type
            return self._known[id(info)][1]
        shape = _core.Shape(kind=info.cls)
        self._known[id(info)] = info, shape  # `info` is kept, and so is its id
        config = getattr(info.cls, "__struct_config__", None)
        if hasattr(info.cls, "__post_init__") or getattr(config, "omit_defaults", False):
            shape.kind = None
        shape.names = tuple(field.name for field in info.fields)
        shape.shapes = tuple(self.of(field.type) for field in info.fields)
        return shape


def _is_free(info: Any, *parts: str) -> bool:
    """Whether a type has no constraints."""
    return all(getattr(info, name) is None for name in info.__struct_fields__ if name not in parts)
