"""Objects of one class as JSON, by msgspec or pydantic; see `serde.model` (rules G1, G10).

Neither library gives back every object: a NaN becomes null, a subclass its base, a secret
asterisks. So each object is decoded before it is sent, and compared (`Checked`), unless it consists
of nothing but what msgspec gives back (`_core.Shape`): plain fields, lists and dicts of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from exclusivelog import _core, schemas, stacks
from exclusivelog.comparing import Checked, first_part

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]

# Levels of JSON that pydantic decodes in any thread: each may take 12 KiB of its stack, more with
# an application's validators, and a stack may have 128 KiB.
SHALLOW = 4


class Model(_core.Coder, Checked):
    """The serialiser of the objects of a class or a type. Pickled, it is made anew from that."""

    def __init__(self, cls: Any) -> None:
        shape, shallow = _core.Shape(), SHALLOW  # no object is known to come back
        self._found = schemas.Findings()
        self._name, kind = name_of(cls), _meaning(cls)
        if _is_for_pydantic(kind):
            encode, checked, decode, self._found, shape = _by_pydantic(kind, self._name)
        elif is_duck(kind):
            encode, decode = _by_methods(kind)
            checked = encode
        else:
            encode, decode, shape = _by_msgspec(kind, self._name)
            checked, shallow = encode, _core.MOST_LEVELS_READ
        self._set(encode, decode, shape, shallow)
        Checked.__init__(self, checked, self.loads)
        self._cls, self._decode, self._shallow = cls, decode, shallow
        self._kind = dict if is_typed_dict(kind) else kind

    def _checked(self, value: Any) -> bytes:
        # One of a subclass would come back as one of the class.
        if isinstance(self._kind, type) and type(value) is not self._kind:
            raise TypeError(f"value takes {self._name}, not {type(value).__name__}")
        if self._found.refusal is not None:
            raise TypeError(self._found.refusal)
        try:
            return Checked.dumps(self, value)
        except (TypeError, ValueError, OverflowError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self._name}: {_about_number(value)}{error}") from error

    def _depth_of(self, value: Any) -> int:
        return _core.depth(value, _core.MOST_LEVELS, json=True)

    def _encoded(self, value: Any, levels: int) -> bytes:
        if levels <= self._shallow:
            return self._dumps(value)
        return stacks.with_deep_stack(lambda: self._dumps(value))

    def _check_found(self, found: Any) -> None:
        if self._found.defaults:
            name = _core.left_out(found, self._found.defaults)
            if name is not None:
                raise ValueError(schemas.not_stored(name))

    def _load_deep(self, data: bytes) -> Any:
        return stacks.with_deep_stack(lambda: self._decode(data))

    def __reduce__(self) -> Any:
        return Model, (self._cls,)


def _about_number(value: Any) -> str:
    """What to do about a number that JSON does not have; nothing where there is none."""
    try:
        found = first_part(value, lambda part: isinstance(part, float) and not math.isfinite(part))
    except (ValueError, RecursionError):  # it is nested too deep
        return ""
    if found is None:
        return ""
    return (
        f"{found[0]} is {found[1]}, which JSON does not have: send None or a str in a field that "
        "takes that, or use 'exact'; "
    )


# ---- classes and types -------------------------------------------------------------------


def is_model(cls: Any) -> bool:
    """Whether `Model` takes this class, or type."""
    return is_named_type(cls) or typing.get_origin(cls) is not None or is_model_class(cls)


def is_named_type(cls: Any) -> bool:
    """Whether it is a NewType, or what `type Orders = list[Order]` makes, also by
    typing_extensions."""
    return isinstance(cls, typing.NewType) or type(cls).__name__ == "TypeAliasType"


def _meaning(cls: Any) -> Any:
    """The type that a name stands for."""
    found = cls
    for _ in range(100):  # it may name itself
        if not is_named_type(found):
            return found
        try:
            found = found.__supertype__ if isinstance(found, typing.NewType) else found.__value__
        except NameError as error:
            raise TypeError(f"{name_of(cls)}: {error}") from error
    raise TypeError(f"{name_of(cls)} is a name for itself")


def name_of(cls: Any) -> str:
    """The name of a class or type, for errors."""
    named = isinstance(cls, type) or is_named_type(cls)
    return str(cls.__name__ if named else cls)


def is_model_class(cls: Any) -> bool:
    """Whether it is a class whose objects `Model` takes."""
    return isinstance(cls, type) and (
        is_pydantic(cls)
        or is_duck(cls)
        or dataclasses.is_dataclass(cls)
        or is_typed_dict(cls)
        or hasattr(cls, "__struct_fields__")
        or hasattr(cls, "__attrs_attrs__")
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    )


def is_typed_dict(cls: Any) -> bool:
    """Whether it is a TypedDict, also one of typing_extensions."""
    return typing.is_typeddict(cls) or type(cls).__name__ == "_TypedDictMeta"


def is_pydantic(cls: Any) -> bool:
    """Whether it is a model or a dataclass of pydantic."""
    return hasattr(cls, "__pydantic_validator__")


def _is_for_pydantic(cls: Any) -> bool:
    """Whether it is a model of pydantic, or a type that names one."""
    seen: list[Any] = []
    left = [cls]
    while left:
        each = left.pop()
        if is_named_type(each) and each not in seen:  # it may name itself
            seen.append(each)
            left.append(_meaning(each))
        if is_pydantic(each) or is_pydantic(typing.get_origin(each)):
            return True
        left += typing.get_args(each)
    return False


def is_duck(cls: Any) -> bool:
    """Whether it has the methods of a pydantic model."""
    names = ("model_dump_json", "model_validate_json")
    return all(callable(getattr(cls, name, None)) for name in names)


def _needed(library: str, cls: Any) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ImportError(
            f"objects of {name_of(cls)} as values need {library.partition('.')[0]}, which is not "
            "installed: pip install 'exclusivelog[models]'"
        ) from error


# ---- pydantic ----------------------------------------------------------------------------


class _Pydantic:
    """What pydantic does for a class, without the wrappers of its TypeAdapter."""

    def __init__(self, pydantic: Any, cls: Any) -> None:
        adapter = pydantic.TypeAdapter(cls)
        adapter.rebuild()  # if the class defers that to its first use
        self.schema = adapter.core_schema
        self._to_json, self._validate = adapter.serializer.to_json, adapter.validate_json

    def encode(self, value: Any) -> bytes:
        """Encode an object. Without what is computed: a model that forbids other fields would not
        take it back. By the names of the fields, not by their aliases: one that is only for
        reading, or only for writing, would not come back."""
        data: bytes = self._to_json(value, by_alias=False, round_trip=True, warnings="error")
        return data

    def encode_plain(self, value: Any) -> bytes:
        """Encode an object that its shape holds: `encode` looks for wrong types itself, which takes
        longer than all the rest."""
        data: bytes = self._to_json(value, round_trip=True)
        return data

    def decode(self, data: bytes) -> Any:
        """Decode an object, by names or aliases."""
        return self._validate(data, by_alias=True, by_name=True)


Encode = Callable[[Any], bytes]


def _by_pydantic(
    cls: Any, name: str
) -> tuple[Encode, Encode, Callable[[bytes], Any], schemas.Findings, _core.Shape]:
    pydantic = _needed("pydantic", cls)
    if tuple(map(int, pydantic.VERSION.split(".")[:2])) < (2, 11):  # it cannot read by name
        raise ImportError(f"objects of {name} as values need pydantic 2.11 or later")

    def members(kind: Any) -> tuple[Any, ...]:
        enum = _Pydantic(pydantic, kind)
        return _members(enum.encode, enum.decode, kind)

    try:
        codec = _Pydantic(pydantic, cls)
    except (pydantic.PydanticUserError, NameError) as error:
        raise TypeError(f"{name}: {error}") from error
    found, shape = schemas.search(codec.schema, name), _core.Shape()
    if found.refusal is None and not found.defaults:
        shape = schemas.shape_of(codec.schema, members)
    return codec.encode_plain, codec.encode, codec.decode, found, shape


def _by_methods(cls: Any) -> Codec:
    def encode(value: Any) -> bytes:
        data: str = value.model_dump_json()
        return data.encode("utf-8")

    return encode, cls.model_validate_json


# ---- msgspec -----------------------------------------------------------------------------


def _by_msgspec(
    cls: Any, name: str
) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any], _core.Shape]:
    json, inspect = _needed("msgspec.json", cls), _needed("msgspec.inspect", cls)
    try:
        decoder, info = json.Decoder(cls), inspect.type_info(cls)
    except NameError as error:
        raise TypeError(
            f"the types of the fields of {name} cannot be found: {error}; define the "
            "classes that they name in the module, not in a function"
        ) from None
    except (TypeError, NotImplementedError, RecursionError) as error:
        raise TypeError(f"{name}: {error}") from error
    unknown = _unknown(inspect, info)
    if unknown is not None:
        raise TypeError(
            f"{unknown}, which `serde.model` cannot store as JSON; see its documentation, or write "
            "a Serde"
        )
    encode = json.Encoder().encode
    for each, _ in _types(inspect, info):
        if isinstance(each, inspect.Field):
            encode(each.name)  # it finds a name that is not ASCII only if its UTF-8 is known
    if any(_writes_other_fields(_class_of(each)) for each, _ in _types(inspect, info)):
        whole = _Whole(_needed("msgspec", cls).UNSET)
        return lambda value: encode(whole.of(value)), decoder.decode, _core.Shape()
    return encode, decoder.decode, _TypeShapes(json, inspect).of(info)


def _unknown(inspect: Any, info: Any) -> str | None:
    """The first field, in words, whose class msgspec does not know, or cannot make objects of."""
    for each, field in _types(inspect, info):
        if isinstance(each, inspect.CustomType):
            return f"{field} has type {each.cls.__name__}"
        if isinstance(each, inspect.DataclassType):  # also of attrs
            base = _core.base_of_c(_class_of(each))
            if base is not None:  # a dict that msgspec makes without that of C: a crash when read
                return f"{each.cls.__name__} extends {base.__name__}, what that adds to its fields"
    return None


def _class_of(info: Any) -> Any:
    """The class of the objects of a type; None if it has no class. msgspec names that of `G[int]`,
    whose attributes are not those of G, and gives the types of its fields."""
    cls = getattr(info, "cls", None)
    return typing.get_origin(cls) or cls


def _types(inspect: Any, info: Any) -> Iterator[tuple[Any, str]]:
    """All types that a type consists of, and in words, the field that each belongs to."""
    seen: set[int] = set()
    left = [(info, "")]
    while left:
        each, field = left.pop()
        if id(each) not in seen:  # a class may have fields of its own type
            seen.add(id(each))
            yield each, field
            left += _parts(inspect, each, field)


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


# ---- Classes of which msgspec writes more or less than the fields ------------------------


def _writes_other_fields(cls: Any) -> bool:
    """Whether msgspec leaves fields out that have their defaults, or writes slots that are none."""
    config = getattr(cls, "__struct_config__", None)
    omits = config is not None and bool(config.omit_defaults)
    return omits or (hasattr(cls, "__attrs_attrs__") and bool(_core.keeps_computed(cls)))


class _Whole:
    """Makes of an object what msgspec is to encode for it: with the defaults that a Struct would
    leave out, as another process may have other ones; without what attrs has computed."""

    def __init__(self, unset: Any) -> None:
        self._unset = unset  # the value of what is always left out

    def of(self, value: Any) -> Any:
        """What is to be encoded for a value."""
        kind = type(value)
        if kind is dict:
            return {key: self.of(item) for key, item in value.items()}
        if kind in (list, tuple, set, frozenset) or hasattr(kind, "_fields"):
            return [self.of(item) for item in value]
        if hasattr(kind, "__struct_config__"):
            return self._of_struct(value, kind, kind.__struct_config__)
        if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__"):
            names = _core.fields_of(kind) or ()
            return self._named(names, [getattr(value, name, self._unset) for name in names])
        return value

    def _of_struct(self, value: Any, kind: Any, config: Any) -> Any:
        items = [getattr(value, name) for name in kind.__struct_fields__]
        tag = config.tag
        if config.array_like:
            return ([] if tag is None else [tag]) + [self.of(item) for item in items]
        named = self._named(kind.__struct_encode_fields__, items)
        return named if tag is None else {config.tag_field: tag, **named}

    def _named(self, names: Any, items: list[Any]) -> dict[str, Any]:
        pairs = zip(names, items, strict=True)
        return {name: self.of(item) for name, item in pairs if item is not self._unset}


# ---- shapes ------------------------------------------------------------------------------


class _TypeShapes:
    """Makes shapes of what msgspec knows of a class. Where there is a doubt (a constraint, code
    that runs when an object is made, a union of several types), the shape is empty."""

    def __init__(self, json: Any, inspect: Any) -> None:
        from decimal import Decimal  # 3 ms with uuid, which each `open` would take
        from uuid import UUID

        self._known: dict[int, tuple[Any, _core.Shape]] = {}
        self._leaves: dict[type, tuple[type | None, str]] = {
            inspect.NoneType: (type(None), ""),
            inspect.BoolType: (bool, ""),
            inspect.StrType: (str, ""),
            inspect.BytesType: (bytes, ""),
            inspect.DateType: (dt.date, ""),
            inspect.UUIDType: (UUID, ""),
            inspect.TimeDeltaType: (dt.timedelta, ""),
            inspect.IntType: (int, "int"),
            inspect.FloatType: (float, "float"),
            inspect.DateTimeType: (dt.datetime, "datetime"),
            inspect.TimeType: (dt.time, "time"),
            inspect.DecimalType: (Decimal, "decimal"),
        }
        self._several = {
            inspect.ListType: list,
            inspect.SetType: set,
            inspect.FrozenSetType: frozenset,
            inspect.VarTupleType: tuple,
        }
        self._kinds = {
            inspect.NoneType: "null",
            inspect.BoolType: "bool",
            inspect.IntType: "number",
            inspect.FloatType: "number",
            inspect.StrType: "string",
            inspect.DictType: "object",
            **dict.fromkeys(self._several, "array"),
        }
        self._json, self._inspect = json, inspect

    def of(self, info: Any) -> _core.Shape:
        """The shape of a type."""
        inspect, kind = self._inspect, type(info)
        if kind in self._leaves:
            cls, look = self._leaves[kind]
            bounds = _bounds(info, cls or object)
            return _core.Shape() if bounds is None else _core.Shape(cls, look, bounds=bounds)
        if kind is inspect.EnumType:
            json = self._json
            members = _members(json.encode, json.Decoder(info.cls).decode, info.cls)
            return _core.Shape(info.cls, "member", parts=members)
        if kind in self._several:
            bounds = _bounds(info, self._several[kind], "item_type")
            if bounds is not None:
                item = self.of(info.item_type)
                return _core.Shape(self._several[kind], "items", item, bounds=bounds)
        if kind is inspect.TupleType:
            return _core.Shape(tuple, "row", parts=tuple(map(self.of, info.item_types)))
        if kind is inspect.DictType:
            return self._of_dict(info)
        if kind is inspect.UnionType:
            return self._of_union(info.types)
        if kind in (inspect.DataclassType, inspect.StructType):
            return self._of_class(info)
        return _core.Shape()

    def _of_dict(self, info: Any) -> _core.Shape:
        bounds = _bounds(info, dict, "key_type", "value_type")
        known = isinstance(info.key_type, (self._inspect.StrType, self._inspect.IntType))
        if bounds is None or not known:
            return _core.Shape()
        values, keys = self.of(info.value_type), self.of(info.key_type)
        return _core.Shape(dict, "dict", values, keys, bounds=bounds)

    def _of_union(self, types: Any) -> _core.Shape:
        others = [each for each in types if not isinstance(each, self._inspect.NoneType)]
        if len(others) == 1:
            return _core.Shape(optional=self.of(others[0]))
        # msgspec tells types apart by what is JSON's: a text may be a str or a date.
        kinds = [self._kinds.get(type(each)) for each in types]
        if None in kinds or len({*kinds}) < len(kinds):
            return _core.Shape()
        shapes = [self.of(each) for each in types]
        return _core.Shape(choices={each.kind: each for each in shapes if each.kind is not None})

    def _of_class(self, info: Any) -> _core.Shape:
        if id(info) in self._known:  # a class may have fields of its own type
            return self._known[id(info)][1]
        shape = _core.Shape(_class_of(info), "fields")
        self._known[id(info)] = info, shape  # `info` is kept, and so is its id
        if not _stores_what_it_is_given(info):
            shape.kind = None  # it holds nothing
            return shape
        shape.has_fields(
            tuple(field.name for field in info.fields),
            tuple(self.of(field.type) for field in info.fields),
        )
        return shape


def _stores_what_it_is_given(info: Any) -> bool:
    """Whether an object made of its fields' values has these values: no code of the class, nor of
    attrs, runs meanwhile."""
    kind = _class_of(info)
    if hasattr(kind, "__post_init__") or hasattr(kind, "__attrs_attrs__"):
        return False
    stored = (inspect.getattr_static(kind, field.name, None) for field in info.fields)
    return not any(
        hasattr(each, "__set__") and not isinstance(each, types.MemberDescriptorType)
        for each in stored
    )


def _members(encode: Encode, decode: Callable[[bytes], Any], kind: Any) -> tuple[Any, ...]:
    """The members of an Enum that come back: not one whose value was changed after the Enum had
    noted it, nor what its `_missing_` makes, which another process may not know."""
    found = {}
    for each in kind._member_map_.values():
        with contextlib.suppress(Exception):  # of a `_missing_`
            if decode(encode(each)) is each:
                found[id(each)] = each
    return tuple(found.values())


def _bounds(info: Any, kind: type, *parts: str) -> dict[str, Any] | None:
    """The bounds that a type declares of its values, `parts` aside; None if a shape does not know
    one of them."""
    limits = {name: getattr(info, name) for name in info.__struct_fields__ if name not in parts}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return schemas.bounds_of(given, kind)
