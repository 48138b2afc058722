"""Objects of one class as JSON, by msgspec or pydantic; see `serde.model` (rules G1, G10).

Neither library gives back every object: a NaN becomes null, a subclass its base, a secret
asterisks. So each object is decoded before it is sent, and compared (`Checked`).
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Iterator
from typing import Any

from exclusivelog import _core
from exclusivelog.comparing import Checked

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]

# Levels of JSON. pydantic takes 5 KiB of a thread's stack for each, which may have 128 KiB.
PYDANTIC_LEVELS = 16


class Model(Checked):
    """The serialiser of the objects of a class. Pickled, it is made anew from the class."""

    def __init__(self, cls: Any) -> None:
        levels = levels_read = PYDANTIC_LEVELS
        if is_pydantic(cls):
            encode, decode = _by_pydantic(cls)
        elif is_duck(cls):
            encode, decode = _by_methods(cls)
        else:
            encode, decode = _by_msgspec(cls)
            levels, levels_read = _core.MOST_LEVELS, _core.MOST_LEVELS_READ
        super().__init__(encode, decode, levels)
        self._cls, self._decode, self._levels_read = cls, decode, levels_read
        self._kind = dict if typing.is_typeddict(cls) else cls
        self.loads = self._load

    def dumps(self, value: Any) -> bytes:
        """Encode an object; TypeError if it is one of another class."""
        if type(value) is not self._kind:  # one of a subclass would come back as one of the class
            raise TypeError(f"value takes {self._cls.__name__}, not {type(value).__name__}")
        try:
            return super().dumps(value)
        except (TypeError, ValueError, OverflowError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self._cls.__name__}: {error}") from error

    def _load(self, data: bytes) -> Any:
        _core.check_json_depth(data, self._levels_read)
        return self._decode(data)

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


def _by_msgspec(cls: Any) -> Codec:
    json, inspect = _needed("msgspec.json", cls), _needed("msgspec.inspect", cls)
    try:
        decoder = json.Decoder(cls)
        unknown = _unknown(inspect, inspect.type_info(cls))
    except NameError as error:
        raise TypeError(
            f"the types of the fields of {cls.__name__} cannot be found: {error}; define the "
            "classes that they name in the module, not in a function"
        ) from None
    except TypeError as error:
        raise TypeError(f"{cls.__name__}: {error}") from error
    if unknown is not None:
        raise TypeError(
            f"{unknown}, which `serde.model` cannot store as JSON; see its documentation, or write "
            "a Serde"
        )
    return json.Encoder().encode, decoder.decode


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
