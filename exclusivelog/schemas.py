"""What the schema of a pydantic model says of objects that another process may read otherwise.

An object is decoded and compared before it is sent (`comparing.Checked`). That does not show what
depends on the reader's process: the default of a field that is not stored, the time, the disk. So
the schema is searched for them, once for each class (rule G10).
"""

from __future__ import annotations

import collections
import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from exclusivelog import _core

Node = dict[str, Any]

# Types whose empty object is the same in every process.
_EMPTY = (
    int,
    float,
    str,
    bytes,
    list,
    dict,
    tuple,
    set,
    frozenset,
    collections.deque,
    collections.OrderedDict,
    collections.Counter,
)
ADVICE = "store it, or let its default be None, a bool, zero or empty"


@dataclass
class Findings:
    """What was found in the schema of a class.

    - `refusal`: why none of its objects is sent; None: some may be.
    - `defaults`: the fields whose defaults another process may not have, by their models. An object
      is not sent if it gets one of these when it is decoded.
    """

    refusal: str | None = None
    defaults: dict[type, frozenset[str]] = field(default_factory=dict)

    def refuse(self, text: str) -> None:
        """Note why no object is sent; the first reason is kept."""
        self.refusal = self.refusal or text


def search(schema: Any, name: str) -> Findings:
    """Search the schema of pydantic's core for a class or type, `TypeAdapter(cls).core_schema`."""
    found = Findings()
    nodes = list(_nodes(schema, name))
    rewrites = any(_is_rewritten(node) for node, _ in nodes)
    for node, where in nodes:
        if "now_op" in node:
            found.refuse(
                f"{where} takes only what is in the {node['now_op']} when it is read: declare it "
                "without that condition, and check it before you send"
            )
        kind = str(node.get("type", ""))
        if kind.startswith("function-") and _looks_at_disk(node):
            found.refuse(
                f"{where} takes only what is, or is not, on the disk when it is read: declare it "
                "as pathlib.Path, and check it before you send"
            )
        elif kind == "model":
            found.defaults.update(_defaults(node, rewrites))
            _check_private(node["cls"], found)
        elif kind == "dataclass":
            _check_dataclass(node, found)
    return found


def _nodes(schema: Any, name: str) -> Iterator[tuple[Node, str]]:
    """All nodes of a schema that are for decoding, each with the field that it belongs to."""
    left: list[tuple[Any, str]] = [(schema, name)]
    seen: set[int] = set()
    while left:
        node, where = left.pop()
        if isinstance(node, (list, tuple)):
            left += [(each, where) for each in node]
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node.get("cls"), type):
            where = node["cls"].__name__
        yield node, where
        fields = _fields_of(node)
        left += [(each, f"{where}.{name}") for name, each in fields.items()]
        left += [
            (part, where)
            for key, part in node.items()
            if key not in _NOT_FOR_DECODING and not (fields and key == "fields")
        ]


_NOT_FOR_DECODING = {
    "metadata",
    "serialization",
    "default",
    "config",
    "computed_fields",
    "json_schema_input_schema",
}


def _fields_of(node: Node) -> dict[str, Node]:
    """The fields of a model or dataclass, by name."""
    fields = node.get("fields")
    if isinstance(fields, dict):
        return fields
    if node.get("type") == "dataclass-args":
        return {each["name"]: each for each in fields or ()}
    return {}


def _inner_fields(node: Node) -> dict[str, Node]:
    """The fields of the node of a class, which validators may wrap."""
    inner: Any = node.get("schema")
    while isinstance(inner, dict):
        fields = _fields_of(inner)
        if fields:
            return fields
        inner = inner.get("schema")
    return {}


# ---- fields that are not stored ----------------------------------------------------------


def _is_rewritten(node: Node) -> bool:
    """Whether a serializer of the application's stores something else than the object's fields."""
    function = (node.get("serialization") or {}).get("function")
    module = str(getattr(function, "__module__", ""))
    return function is not None and module.partition(".")[0] not in ("pydantic", "pydantic_core")


def _is_left_out(node: Node) -> bool:
    return bool(node.get("serialization_exclude") or "serialization_exclude_if" in node)


def _defaults(node: Node, rewrites: bool) -> dict[type, frozenset[str]]:
    """The fields of a model that may be left out, and have a default of this process's own."""
    names = frozenset(
        name
        for name, each in _inner_fields(node).items()
        if (rewrites or _is_left_out(each)) and _has_own_default(each)
    )
    return {node["cls"]: names} if names else {}


def _check_dataclass(node: Node, found: Findings) -> None:
    # Its objects do not tell which of their fields have got their defaults.
    rewritten = _is_rewritten(node)
    for name, each in _inner_fields(node).items():
        if (rewritten or _is_left_out(each)) and _has_own_default(each):
            found.refuse(not_stored(f"{node['cls'].__name__}.{name}"))


def _check_private(cls: Any, found: Findings) -> None:
    for name, each in getattr(cls, "__private_attributes__", {}).items():
        if _may_differ(_default_of(each)):
            found.refuse(not_stored(f"{cls.__name__}.{name}"))


def _default_of(private: Any) -> Node:
    """The default of a private attribute, as a schema has that of a field."""
    if private.default_factory is not None:
        return {"default_factory": private.default_factory}
    if type(private.default).__name__ == "PydanticUndefinedType":
        return {}
    return {"default": private.default}


def _has_own_default(node: Node) -> bool:
    inner: Any = node.get("schema")
    while isinstance(inner, dict):
        if inner.get("type") == "default":
            return _may_differ(inner)
        inner = inner.get("schema")
    return False  # without a default, it cannot be read


def _may_differ(node: Node) -> bool:
    """Whether another process may have another default."""
    factory = node.get("default_factory")
    if factory is not None:
        return factory not in _EMPTY
    default = node.get("default")
    return default is not None and not (
        type(default) is bool or (type(default) in _EMPTY and not default)
    )


def not_stored(what: str) -> str:
    """Why an object with such a field or attribute is not sent."""
    return f"{what} is not stored, and its default may be another one in another process: {ADVICE}"


# ---- the disk ----------------------------------------------------------------------------


def _looks_at_disk(node: Node) -> bool:
    """Whether it is the schema of FilePath, DirectoryPath, NewPath or SocketPath."""
    function = (node.get("function") or {}).get("function")
    name = str(getattr(function, "__qualname__", ""))
    return str(getattr(function, "__module__", "")) == "pydantic.types" and name.startswith(
        "PathType.validate_"
    )


# ---- shapes ------------------------------------------------------------------------------

_PLAIN_CONFIG = {
    "title",
    "frozen",
    "extra_fields_behavior",
    "validate_default",
    "from_attributes",
    "hide_input_in_errors",
    "validation_error_cause",
    "validate_by_alias",
    "validate_by_name",
    "populate_by_name",
    "loc_by_alias",
}
_PLAIN_MODEL = {
    "type",
    "cls",
    "schema",
    "config",
    "custom_init",
    "root_model",
    "ref",
    "metadata",
    "strict",
}


Members = Callable[[Any], tuple[Any, ...]]


def shape_of(schema: Any, members: Members) -> _core.Shape:
    """The shape of the objects of a model that pydantic gives back: those that consist of plain
    fields, and of collections of them. Where there is a doubt (a pattern, code of the
    application's, a setting), the shape is empty. `members`: those of an Enum that it gives
    back."""
    return _SchemaShapes(schema, members).of(schema)


class _SchemaShapes:
    """Makes the shapes of the nodes of one schema."""

    def __init__(self, schema: Any, members: Members) -> None:
        from decimal import Decimal  # 3 ms with uuid, which each `open` would take
        from uuid import UUID

        self._members = members
        self._leaves = {**_LEAVES, "uuid": (UUID, ""), "decimal": (Decimal, "decimal")}
        self._nodes = {node["ref"]: node for node, _ in _nodes(schema, "") if "ref" in node}
        self._known: dict[int, _core.Shape] = {}
        self._kinds = {
            "model": self._of_model,
            "list": self._of_list,
            "dict": self._of_dict,
            "default": self._of_inner,
            "definitions": self._of_inner,
            "nullable": self._of_nullable,
            "definition-ref": self._of_reference,
            "set": self._of_list,
            "frozenset": self._of_list,
            "tuple": self._of_tuple,
            "enum": self._of_enum,
            "literal": self._of_literal,
        }

    def of(self, node: Any) -> _core.Shape:
        """The shape of what a node takes."""
        kind = node.get("type")
        if "serialization" in node or kind is None:
            return _core.Shape()
        if kind in self._leaves:
            cls, look = self._leaves[kind]
            bounds = _bounds(node, cls)
            return _core.Shape() if bounds is None else _core.Shape(cls, look, bounds=bounds)
        make = self._kinds.get(kind)
        return _core.Shape() if make is None else make(node)

    def _of_inner(self, node: Node) -> _core.Shape:
        return self.of(node["schema"])

    def _of_reference(self, node: Node) -> _core.Shape:
        found = self._nodes.get(node["schema_ref"])
        return _core.Shape() if found is None else self.of(found)

    def _of_nullable(self, node: Node) -> _core.Shape:
        return _core.Shape(optional=self.of(node["schema"]))

    def _of_list(self, node: Node) -> _core.Shape:
        kind = _SEVERAL[node["type"]]
        bounds = _bounds(node, kind, "items_schema")
        if bounds is None or "items_schema" not in node:
            return _core.Shape()
        return _core.Shape(kind, "items", self.of(node["items_schema"]), bounds=bounds)

    def _of_tuple(self, node: Node) -> _core.Shape:
        items = [self.of(each) for each in node["items_schema"]]
        bounds = _bounds(node, tuple, "items_schema", "variadic_item_index")
        if bounds is None:
            return _core.Shape()
        if "variadic_item_index" not in node:
            return _core.Shape(tuple, "row", parts=tuple(items), bounds=bounds)
        if len(items) > 1:
            return _core.Shape()
        return _core.Shape(tuple, "items", items[0], bounds=bounds)

    def _of_enum(self, node: Node) -> _core.Shape:
        if not _has_only(node, "type", "cls", "members", "sub_type", "missing"):
            return _core.Shape()
        return _core.Shape(node["cls"], "member", parts=self._members(node["cls"]))

    def _of_literal(self, node: Node) -> _core.Shape:
        expected = node["expected"]
        if not _has_only(node, "type", "expected") or {*map(type, expected)} != {str}:
            return _core.Shape()
        return _core.Shape(str, "one of", parts=tuple(expected))

    def _of_dict(self, node: Node) -> _core.Shape:
        keys = node.get("keys_schema", {})
        bounds = _bounds(node, dict, "keys_schema", "values_schema")
        if bounds is None or "values_schema" not in node:
            return _core.Shape()
        if keys.get("type") != "str" or self.of(keys).kind is None:
            return _core.Shape()
        key = _core.Shape(str, "text", bounds=_bounds(keys, str))
        return _core.Shape(dict, "dict", self.of(node["values_schema"]), key, bounds=bounds)

    def _of_model(self, node: Node) -> _core.Shape:
        if id(node) in self._known:  # a class may have fields of its own type
            return self._known[id(node)]
        shape = self._known[id(node)] = _core.Shape(node["cls"], "fields")
        fields = _plain_fields(node)
        if fields is None:
            shape.kind = None  # it holds nothing
            return shape
        nothing = _core.Shape(type(None), "")
        shape.has_fields(
            (*fields, "__pydantic_extra__", "__pydantic_private__"),
            (*[self.of(each["schema"]) for each in fields.values()], nothing, nothing),
        )
        return shape


_LEAVES: dict[str, tuple[type, str]] = {
    "int": (int, "int"),
    "str": (str, ""),
    "float": (float, "float"),
    "bool": (bool, ""),
    "none": (type(None), ""),
    "date": (dt.date, ""),
    "datetime": (dt.datetime, "datetime"),
    "time": (dt.time, "time"),
    "bytes": (bytes, ""),
}
_SEVERAL: dict[str, type] = {"list": list, "set": set, "frozenset": frozenset}


# The precision is for more digits than Python's own times have.
_WITHOUT_EFFECT = {"type", "metadata", "strict", "ref", "microseconds_precision"}


def _has_only(node: Node, *keys: str) -> bool:
    return node.keys() <= {*keys, *_WITHOUT_EFFECT}


def _bounds(node: Node, kind: type, *others: str) -> Node | None:
    """The bounds of the values of a node, `others` aside; None if a shape does not know one."""
    known = {*others, *_WITHOUT_EFFECT}
    return bounds_of({name: bound for name, bound in node.items() if name not in known}, kind)


def bounds_of(limits: Node, kind: type) -> Node | None:
    """The bounds that a library declares of the values of a class, for their shape; None if a shape
    does not know one of them. Values that are not finite are in no shape."""
    limits = {name: limit for name, limit in limits.items() if name != "allow_inf_nan"}
    if not all(_is_known(name, limit, kind) for name, limit in limits.items()):
        return None
    if "max_digits" in limits and "decimal_places" in limits:
        limits["whole_digits"] = limits["max_digits"] - limits["decimal_places"]
    return limits


def _is_known(name: str, limit: Any, kind: type) -> bool:
    if name in ("gt", "ge", "lt", "le"):
        return type(limit) is kind or (
            type(limit) is int and kind.__name__ in ("float", "Decimal") and abs(limit) < 1 << 53
        )
    if name == "multiple_of":  # of a float, libraries differ
        return type(limit) is kind is int
    if name in ("max_digits", "decimal_places"):
        return kind.__name__ == "Decimal"
    return name in ("min_length", "max_length")


def _plain_fields(node: Node) -> dict[str, Node] | None:
    """The fields of a model that is stored, and made, by them alone; None for another one."""
    inner, config = node["schema"], node.get("config", {})
    if inner.get("type") != "model-fields" or not node.keys() <= _PLAIN_MODEL:
        return None
    if node.get("custom_init") or node.get("root_model") or not config.keys() <= _PLAIN_CONFIG:
        return None
    fields: dict[str, Node] = inner["fields"]
    plain = all(_has_only(each, "schema", *_ALIASES) for each in fields.values())
    return fields if plain and not _is_taken_for_another(fields) else None


_ALIASES = ("validation_alias", "serialization_alias")


def _is_taken_for_another(fields: dict[str, Node]) -> bool:
    """Whether the name of a field, by which it is stored, is also the alias of another one."""
    return any(
        other in fields and other != name
        for name, each in fields.items()
        for other in _names_by_alias(each.get("validation_alias", ()))
    )


def _names_by_alias(alias: Any) -> list[str]:
    """The names that are looked up for an alias: a name, a path, or several paths."""
    if isinstance(alias, str):
        return [alias]
    if alias and isinstance(alias[0], (list, tuple)):
        return [path[0] for path in alias]
    return [alias[0]] if alias else []
