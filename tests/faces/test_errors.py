"""Errors as objects: a pool of processes pickles what its tasks raise, and loses no attribute."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import errors

pytestmark = [pytest.mark.once, pytest.mark.rule("A5")]

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickled": lambda error: pickle.loads(pickle.dumps(error)),
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
}
ATTRIBUTES = {
    "topic": "orders",
    "offset": 3,
    "offsets": range(3, 5),
    "part": "key",
    "raw": b"x",
    "sequence_id": 7,
    "last_sequence_id": 9,
}


def made(kind: type[xl.ExclusiveLogError]) -> xl.ExclusiveLogError:
    """An error with all of its attributes set."""
    takes = inspect.signature(kind).parameters
    error = kind("what", **{name: ATTRIBUTES[name] for name in takes if name in ATTRIBUTES})
    error.maybe_written = True
    if isinstance(error, OSError):
        error.errno = errno.EIO
    return error


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", errors.__all__)
def test_a_copy_of_an_error_has_all_attributes(name: str, how: str) -> None:
    error = made(getattr(errors, name))
    twin = COPIES[how](error)
    assert type(twin) is type(error)
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))
    assert twin.maybe_written
    assert getattr(twin, "errno", None) == getattr(error, "errno", None)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_refusal_names_the_holder(topic: xl.Topic, how: str) -> None:
    with topic.producer("exclusive"), pytest.raises(xl.ProducerFencedError) as refused:
        topic.producer("exclusive")
    assert refused.value.holder is not None
    assert COPIES[how](refused.value).holder == refused.value.holder
