"""Objects of a client in a forked child: nothing is called, nothing is destroyed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from exclusivelog.cluster.native import Native, _inherited
from exclusivelog.errors import EngineClosedError
from testing.children import finish
from testing.processes import PATIENCE, UNSEEN_FORKS, collect, forked

pytestmark = pytest.mark.once
FORKS = {"os.fork": os.fork, **UNSEEN_FORKS}


class Thing:
    """Says in a file that it was destroyed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.me: object = None

    def __del__(self) -> None:
        self.path.write_text(f"{os.getpid()}")


@pytest.mark.rule("C5")
def test_a_forked_child_may_not_use_it(tmp_path: Path) -> None:
    thing = Thing(tmp_path / "destroyed")
    native = Native(thing, "the log 'orders'")

    def use() -> bool:
        with pytest.raises(EngineClosedError, match=r"the log 'orders' was inherited through fork"):
            native.use()
        return native.inherited

    assert native.use() is thing
    assert forked(use) is True
    assert native.inherited is False
    assert native.use() is thing


@pytest.mark.rule("C5")
def test_what_a_child_makes_is_its_own(tmp_path: Path) -> None:
    def make() -> str:
        native = Native(Thing(tmp_path / "destroyed"), "it")
        assert not native.inherited
        path = native.use().path
        del native
        return str(path.read_text())

    assert forked(make) not in ("", str(os.getpid()))


@pytest.mark.rule("C5")
@pytest.mark.rule("C8")
@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
def test_a_forked_child_destroys_nothing_of_its_parent(
    tmp_path: Path, fork: Callable[[], int]
) -> None:
    held = Native(Thing(tmp_path / "held"), "it")
    garbage = Native(Thing(tmp_path / "garbage"), "it")
    garbage.use().me = garbage  # only the garbage collector can find it
    held_by = [held]
    gc.disable()
    try:
        del garbage

        def destroy() -> None:
            held_by.clear()
            collect()

        del held
        forked(destroy, fork=fork)
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()
    held_by.clear()
    collect()
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {
        "held": str(os.getpid()),
        "garbage": str(os.getpid()),
    }


class Client:
    """Made in Python around a native object, and kept by its readers, as it keeps them."""

    def __init__(self, path: Path) -> None:
        self._client = Thing(path)
        self.readers: list[object] = []


@pytest.mark.rule("C5", "C8")
@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
@pytest.mark.parametrize("kept", ["by a cycle", "by an error"])
def test_what_is_kept_after_its_native_is_not_destroyed_either(
    tmp_path: Path, fork: Callable[[], int], kept: str
) -> None:
    client = Client(tmp_path / "destroyed")
    Native(client, "the connection")  # of an engine that was closed, and is gone
    held: list[object] = [client]
    if kept == "by a cycle":
        client.readers.append(client)
        held.clear()
    gc.disable()
    try:
        del client

        def destroy() -> None:
            held.clear()
            if kept == "by a cycle":
                collect()

        forked(destroy, fork=fork)
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()
    held.clear()
    collect()
    assert (tmp_path / "destroyed").read_text() == str(os.getpid())


@pytest.mark.long
@pytest.mark.rule("C5", "C8")
@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"])
def test_a_collection_amid_what_a_child_does_first_destroys_nothing(
    tmp_path: Path, fork: str
) -> None:
    program = """
        import ctypes, gc, os, sys
        from exclusivelog import _core
        _core.in_forked_child(gc.collect)  # before all others
        from pathlib import Path
        from exclusivelog.cluster.native import Native
        from tests.cluster.test_native import Client

        gc.disable()
        client = Client(Path(sys.argv[1]))
        client.readers.append(client)
        Native(client, "the connection")
        del client
        child = FORK()
        if child == 0:
            _core.this_process()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not Path(sys.argv[1]).exists()
    """
    finish(textwrap.dedent(program).replace("FORK", fork), tmp_path / "destroyed")


def test_nothing_is_remembered_of_what_is_gone_and_nothing_twice(tmp_path: Path) -> None:
    collect()
    before = len(_inherited.references)
    client = Client(tmp_path / "destroyed")
    made = [Native(client, "it") for _ in range(3)]
    made += [Native(Client(tmp_path / "destroyed"), "it") for _ in range(3)]
    assert len(_inherited.references) == before + 8
    del client
    made.clear()
    assert len(_inherited.references) == before


@pytest.mark.long
@pytest.mark.rule("C5")
@pytest.mark.rule("C8")
@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"])
def test_not_even_at_the_end_of_the_childs_interpreter(tmp_path: Path, fork: str) -> None:
    program = """
        import ctypes, os, sys
        from pathlib import Path
        from exclusivelog.cluster.native import Native
        from tests.cluster.test_native import Thing

        native = Native(Thing(Path(sys.argv[1])), "it")
        native.use().me = native
        sys.modules["kept"] = native
        child = FORK()
        if child == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not Path(sys.argv[1]).exists()
    """
    program = textwrap.dedent(program).replace("FORK", fork)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "destroyed"],
        timeout=PATIENCE,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, signal.strsignal(-done.returncode)
