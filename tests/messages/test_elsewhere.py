"""Rule G10: what comes back in the process that sends it, and otherwise in another one.

Each object is decoded and compared before it is sent. That shows nothing of what the reader's
process adds: the default of a field that is not stored, the present time, a file, the seed of
`hash`. So these are refused, before anything is appended.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import functools
import io
import logging
import os
import pathlib
import subprocess
import sys
import time
import uuid
from typing import Annotated, Any

import attrs
import msgspec
import pydantic
import pydantic.dataclasses
import pytest

import exclusivelog as xl
from exclusivelog import serde
from exclusivelog.comparing import difference
from testing.children import ROOT
from testing.kinds import Level

pytestmark = [pytest.mark.once, pytest.mark.rule("G10")]

START = time.time()
PID = os.getpid()


# ---- containers ----------------------------------------------------------------------------


class Queue(pydantic.BaseModel):
    items: collections.deque[Any] = collections.deque()
    times: collections.deque[dt.datetime] = collections.deque()
    nested: collections.deque[Queue] = collections.deque()
    counts: collections.defaultdict[str, int] = collections.defaultdict(int)
    ordered: collections.OrderedDict[str, int] = collections.OrderedDict()
    counter: collections.Counter[str] = collections.Counter()
    sequence: collections.abc.Sequence[Any] = []


def queue(**fields: Any) -> Queue:
    """Unchecked, as what a program assigns is."""
    return Queue.model_construct(**fields)


@pytest.mark.parametrize(
    "value",
    [
        queue(items=collections.deque([Level.LOW])),
        queue(items=collections.deque([(1,)])),
        queue(items=collections.deque([1], maxlen=2)),
        queue(times=collections.deque([dt.datetime(2026, 10, 25, 2, 30, fold=1)])),
        queue(sequence=collections.deque([True, Level.LOW])),
        queue(counts=collections.defaultdict(lambda: 7, a=1)),
        queue(nested=collections.deque([queue(items=collections.deque([Level.LOW]))])),
    ],
    ids=["an Enum", "a tuple", "maxlen", "fold", "as a sequence", "default_factory", "nested"],
)
def test_g10_what_a_container_loses_is_refused(value: Queue) -> None:
    with pytest.raises(ValueError, match="does not come back"):
        serde.model(Queue).dumps(value)


def test_g10_containers_come_back(topic: xl.Topic) -> None:
    value = queue(
        items=collections.deque([1, "a", [2.5]], maxlen=None), sequence=[1],
        counts=collections.defaultdict(int, a=1), counter=collections.Counter("aab"),
        ordered=collections.OrderedDict(b=2, a=1),
    )  # fmt: skip
    with topic.producer(serializer=Queue) as producer:
        producer.send(value)
    found = next(topic.reader(deserializer=Queue)).value
    assert difference(value, found) is None
    assert type(found.items) is collections.deque


def test_g10_a_deque_counts_as_a_level() -> None:
    """Otherwise a thread with a small stack would die of it."""
    value = queue()
    for _ in range(120):
        value = queue(nested=collections.deque([value]))
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        serde.model(Queue).dumps(value)


def test_g10_the_difference_in_a_deque_is_named() -> None:
    a, b = collections.deque([1, Level.LOW]), collections.deque([1, 1])
    assert difference(a, b) == "value[1] is Level <Level.LOW: 1>, and comes back as int 1"
    bounded = collections.deque([1], 3)
    text = difference(bounded, collections.deque([1]))
    assert text == "value.maxlen is int 3, and comes back as NoneType None"


def test_g10_mappings_are_compared_by_what_equality_ignores() -> None:
    def seven() -> int:
        return 7

    assert difference(collections.defaultdict(int, a=1), collections.defaultdict(int, a=1)) is None
    assert difference(collections.defaultdict(int), collections.defaultdict(seven)) is not None
    ordered = collections.OrderedDict(a=1, b=2)
    assert difference(ordered, collections.OrderedDict(a=1, b=2)) is None
    assert difference(ordered, collections.OrderedDict(b=2, a=1)) is not None
    users = collections.UserDict({"a": Level.LOW})
    assert difference(users, collections.UserDict({"a": 1})) is not None
    assert difference(users, collections.UserDict({"a": Level.LOW})) is None


# ---- attributes that are no fields ---------------------------------------------------------


@dataclasses.dataclass(init=False)
class Own:
    n: int

    def __init__(self, n: int) -> None:
        self.n, self.total = n, [n]


class Loose(msgspec.Struct, dict=True):
    n: int = 0


@attrs.define(slots=False)
class Open:
    n: int = 0


def loose(cls: Any) -> Any:
    value = cls(1)
    value.total = [1]
    return value


@pytest.mark.parametrize(
    "value", [Own(1), loose(Loose), loose(Open)], ids=["own", "msgspec", "attrs"]
)
def test_g10_an_attribute_that_is_no_field_is_refused(topic: xl.Topic, value: Any) -> None:
    with topic.producer(serializer=type(value)) as producer:
        with pytest.raises(ValueError, match=r"the attribute total list \[1\] does not come back"):
            producer.send(value)
    assert topic.next_offset == 0


@dataclasses.dataclass
class Cached:
    n: int

    @functools.cached_property
    def doubled(self) -> int:
        return 2 * self.n


def test_g10_a_cached_property_is_no_attribute_of_its_own() -> None:
    """The reader computes it again."""
    value = Cached(2)
    assert value.doubled == 4
    codec = serde.model(Cached)
    assert codec.loads(codec.dumps(value)).doubled == 4


# ---- defaults of what is not stored --------------------------------------------------------


class Excluded(pydantic.BaseModel):
    pid: int = pydantic.Field(default_factory=os.getpid, exclude=True)


class ExcludedConstant(pydantic.BaseModel):
    pid: int = pydantic.Field(default=PID, exclude=True)


class Private(pydantic.BaseModel):
    _pid: int = pydantic.PrivateAttr(default_factory=os.getpid)


class PrivateConstant(pydantic.BaseModel):
    _pid: int = PID


class Omitted(msgspec.Struct, omit_defaults=True):
    pid: int = PID


@pydantic.dataclasses.dataclass
class ExcludedField:
    pid: int = pydantic.Field(default=PID, exclude=True)


def containing(cls: Any) -> list[Any]:
    """Classes that have objects of a class in their fields."""
    if issubclass(cls, msgspec.Struct):
        return [dataclasses.make_dataclass("Outer", [("parts", list[cls])])]
    return [pydantic.create_model("Outer", parts=(dict[str, list[cls]], {}))]


@pytest.mark.parametrize(
    "cls", [Excluded, ExcludedConstant, Private, PrivateConstant, Omitted, ExcludedField]
)
def test_g10_a_default_of_the_process_is_refused_for_what_is_not_stored(cls: Any) -> None:
    for each in (cls, *containing(cls)):
        with pytest.raises(
            TypeError, match=rf"{cls.__name__}\._?pid is not stored, and comes back as"
        ):
            serde.model(each)


class Harmless(pydantic.BaseModel):
    uid: uuid.UUID = pydantic.Field(default_factory=uuid.uuid4)
    made: float = pydantic.Field(default_factory=time.time)
    cache: dict[str, int] = pydantic.Field(default_factory=dict, exclude=True)
    debug: bool = pydantic.Field(default=True, exclude=True)
    level: Level = pydantic.Field(default=Level.HIGH, exclude=True)
    pair: tuple[int, str] = pydantic.Field(default=(0, ""), exclude=True)
    _seen: list[int] = pydantic.PrivateAttr(default_factory=list)
    _client: Any = None
    _later: int = pydantic.PrivateAttr()


class Sparse(msgspec.Struct, omit_defaults=True):
    n: int
    name: str = ""
    note: str | None = None
    paid: bool = False
    tags: list[str] = []
    uid: uuid.UUID = msgspec.field(default_factory=uuid.uuid4)


@pytest.mark.parametrize("value", [Harmless(), Sparse(1), Sparse(1, "a", "b", True, ["c"])])
def test_g10_defaults_that_are_stored_or_empty_are_taken(topic: xl.Topic, value: Any) -> None:
    with topic.producer(serializer=type(value)) as producer:
        producer.send(value)
    found = next(topic.reader(deserializer=type(value))).value
    assert difference(value, found) is None


# ---- types that depend on the time or the disk ---------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (pydantic.FutureDatetime, "future"), (pydantic.PastDatetime, "past"),
        (pydantic.FutureDate, "future"), (pydantic.PastDate, "past"),
        (pydantic.FilePath, "on the disk"), (pydantic.DirectoryPath, "on the disk"),
        (pydantic.NewPath, "on the disk"), (list[pydantic.FilePath | None], "on the disk"),
        (Annotated[int, pydantic.AfterValidator(hash)], r"made by hash\(\)"),
    ],
)  # fmt: skip
def test_g10_a_type_that_depends_on_the_time_or_the_disk_is_refused(kind: Any, words: str) -> None:
    cls = pydantic.create_model("Timed", at=(kind, ...))
    with pytest.raises(TypeError, match=rf"Timed\.at .*{words}"):
        serde.model(cls)


# ---- code of a class -----------------------------------------------------------------------


def helper(text: str) -> int:
    return hash(text)


@dataclasses.dataclass
class Hashed:
    name: str
    number: int = 0

    def __post_init__(self) -> None:
        self.number = helper(self.name)


class HashedStruct(msgspec.Struct):
    name: str
    number: int = 0

    def __post_init__(self) -> None:
        self.number = self.number or hash(self.name)


@attrs.define
class HashedAttrs:
    name: str
    number: int = 0

    def __attrs_post_init__(self) -> None:
        self.number = hash(self.name)


class HashedModel(pydantic.BaseModel):
    name: str
    number: int = 0

    @pydantic.model_validator(mode="after")
    def count(self) -> HashedModel:
        self.number = hash(self.name)
        return self


class Stamped(pydantic.BaseModel):
    name: str = "a"
    pid: int = 0

    def model_post_init(self, context: Any) -> None:
        self.pid = os.getpid()


class Existing(pydantic.BaseModel):
    name: str

    @pydantic.field_validator("name")
    @classmethod
    def check(cls, name: str) -> str:
        if not pathlib.Path(name).exists():
            raise ValueError("there is no such file")
        return name


class Recent(pydantic.BaseModel):
    name: str
    at: float

    @pydantic.field_validator("at")
    @classmethod
    def check(cls, at: float) -> float:
        if time.time() - at > 60:
            raise ValueError("too old")
        return at


class Duck:
    """It has the methods of a model of pydantic, and no more."""

    def __init__(self, name: str) -> None:
        self.name, self.number = name, hash(name)

    def model_dump_json(self) -> str:
        return f'"{self.name}"'

    @classmethod
    def model_validate_json(cls, data: bytes) -> Duck:
        return cls(data.decode().strip('"'))


@pytest.mark.parametrize(
    ("value", "asks"),
    [
        (Hashed("a"), "hash()"), (HashedAttrs("a"), "hash()"), (HashedModel(name="a"), "hash()"),
        (Stamped(), "os.getpid()"), (Existing(name=__file__), "the file system"),
        (Recent(name="a", at=START + 3600), "time.time()"), (Duck("a"), "hash()"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)  # fmt: skip
def test_g10_code_that_asks_for_what_differs_elsewhere_is_noticed(
    topic: xl.Topic, value: Any, asks: str
) -> None:
    with topic.producer(serializer=type(value)) as producer:
        with pytest.raises(ValueError, match="code of its class asks for") as caught:
            producer.send(value)
    assert asks in str(caught.value)
    assert topic.next_offset == 0
    assert sys.getprofile() is None


@dataclasses.dataclass(frozen=True)
class Member:
    name: str


def careful() -> Any:
    log = logging.getLogger("of the application")
    log.addHandler(logging.StreamHandler(io.StringIO()))
    log.setLevel(logging.INFO)

    class Careful(pydantic.BaseModel):
        name: str
        at: dt.datetime | None = None
        members: set[Member] = set()

        @pydantic.model_validator(mode="after")
        def fill(self) -> Careful:
            import this_is_slow  # type: ignore[import-not-found]

            log.info("made %s", this_is_slow.__name__)
            self.at = self.at or dt.datetime.now(dt.UTC)
            return self

    return Careful


def test_g10_code_may_ask_for_the_time_where_none_is_stored(
    topic: xl.Topic, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write logs, import modules, and have objects with a hash in sets, too."""
    (tmp_path / "this_is_slow.py").write_text("import os\nwhen = os.stat('.')\n")
    monkeypatch.syspath_prepend(tmp_path)
    cls = careful()
    value = cls(name="a", members={Member("b"), Member("c")})
    monkeypatch.delitem(sys.modules, "this_is_slow")
    with topic.producer(serializer=cls) as producer:
        producer.send(value)
    assert difference(value, next(topic.reader(deserializer=cls)).value) is None
    struct = HashedStruct("a", 5)
    codec = serde.model(HashedStruct)
    assert codec.loads(codec.dumps(struct)) == struct


def test_g10_a_profiler_goes_on(topic: xl.Topic) -> None:
    seen: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        seen.append(event)

    sys.setprofile(note)
    try:
        serde.model(Harmless).dumps(Harmless())
        serde.model(Stamped).dumps(Stamped())  # not looked at
        assert sys.getprofile() is note
    finally:
        sys.setprofile(None)
    assert seen


PROGRAM = """
import sys
from tests.messages import test_elsewhere as here
from exclusivelog import serde
for name, data in (("Harmless", sys.argv[1]), ("Sparse", sys.argv[2]), ("Queue", sys.argv[3])):
    print(repr(serde.model(getattr(here, name)).loads(bytes.fromhex(data))))
"""


def test_g10_what_is_taken_comes_back_in_another_process() -> None:
    values = [Harmless(), Sparse(2, note="n"), queue(items=collections.deque([1, "a"]))]
    stored = [serde.model(type(value)).dumps(value).hex() for value in values]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *stored], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert ran.stdout.splitlines() == [
        repr(values[0]),
        repr(values[1]),
        repr(Queue(items=[1, "a"])),
    ]
