"""`exclusivelog.testing`: what its page says, and what it does when a user's test goes wrong."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog import testing
from exclusivelog.testing import Process, Start, fence, wait_until
from testing.patience import PATIENCE

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
pytestmark = pytest.mark.once


def add(one: int, other: int) -> int:
    return one + other


def refuse(text: str) -> None:
    raise ValueError(text)


def unsendable() -> object:
    return lambda: None


def hold(path: str, topic: str) -> None:
    with xl.open(path, keepalive=60.0) as engine, engine.topic(topic).producer("exclusive"):
        signal.pause()


def start_another(pid_file: str) -> None:
    """A test run that is killed while its second process runs."""
    process = Process(signal.pause)
    Path(pid_file).write_text(str(process.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def is_gone(pid: int) -> bool:
    """Has it ended, reaped or not?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.long
def test_the_example_of_the_page_passes(pytester: pytest.Pytester) -> None:
    for block in re.findall(r"```python\n(# (\S+)\n.*?)```", PAGE.read_text(), re.DOTALL):
        Path(pytester.path, block[1]).write_text(block[0])
    found = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=PATIENCE)
    found.assert_outcomes(passed=2)


def test_the_page_names_everything() -> None:
    page = PAGE.read_text()
    public = [name for name in vars(Process) if not name.startswith("_")] + ["pid"]
    assert {name for name in public if f"process.{name}" not in page} == set()
    assert all(f"`{name}" in page for name in ("ledger", "second_process", "fence", "wait_until"))


def test_a_result_comes_back(second_process: Start) -> None:
    process = second_process(add, 1, other=2)
    assert (process.result(), process.result()) == (3, 3)
    wait_until(lambda: not process.is_alive)


def test_an_error_comes_back_with_its_traceback(second_process: Start) -> None:
    process = second_process(refuse, "no")
    with pytest.raises(ValueError, match="no") as caught:
        process.result()
    assert str(caught.value) == "no"
    assert "in refuse" in caught.value.__notes__[0]


def test_what_cannot_be_sent_back_is_told(second_process: Start) -> None:
    with pytest.raises(RuntimeError, match="cannot be sent to the test"):
        second_process(unsendable).result()


def test_a_killed_process_has_no_result(second_process: Start) -> None:
    process = second_process(signal.pause)
    with pytest.raises(TimeoutError, match="still runs"):
        process.result(timeout=0.01)
    process.kill()
    with pytest.raises(ChildProcessError, match="signal 9"):
        process.result()
    for act in (process.stop, process.resume):
        with pytest.raises(ProcessLookupError, match="nothing to signal"):
            act()


def test_a_stopped_process_is_stopped_when_that_returns(second_process: Start) -> None:
    process = second_process(signal.pause)
    for _ in range(3):
        process.stop()
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        assert process.is_alive
        process.resume()
        wait_until(lambda: not testing._is_stopped(process.pid))


@pytest.mark.long
def test_fencing_takes_a_topic_from_another_process(
    ledger: xl.Engine, second_process: Start
) -> None:
    second_process(hold, ledger.path, "orders")
    topic = ledger.topic("orders")
    before = wait_until(lambda: topic.owner)
    assert fence(ledger, "orders") == before.epoch + 1
    assert topic.owner is None


@pytest.mark.long
def test_an_error_that_was_not_retrieved_fails_the_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["exclusivelog.testing"]')
    pytester.makepyfile(
        """
        import math
        from exclusivelog.testing import wait_until

        def test_not_asked(second_process):
            process = second_process(math.sqrt, -1)
            wait_until(lambda: not process.is_alive)

        def test_running(second_process):
            second_process(math.sqrt, 4)
        """
    )
    found = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=PATIENCE)
    found.assert_outcomes(passed=2, errors=1)
    found.stdout.fnmatch_lines(["*ValueError*"])


def test_a_process_ends_with_its_test(second_process: Start, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(ChildProcessError):
        second_process(start_another, str(file)).result()
    wait_until(lambda: is_gone(int(file.read_text())))


def test_waiting_has_an_end() -> None:
    never: Callable[[], bool] = lambda: False  # noqa: E731
    with pytest.raises(AssertionError, match=r"waited 0.02 s for rain"):
        wait_until(never, timeout=0.02, what="rain")
