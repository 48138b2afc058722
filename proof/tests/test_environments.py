"""What users have and builders forget: the quick cases of the proof's instrument `environments`.

A container, cron job, backup tool or administrator does something to a ledger, its disk or
its processes. In each case nothing acknowledged is lost, no topic has two owners, and each error
says why. Each case runs in a mount namespace of its own; its docstring describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from proof.environments import CASES
from proof.environments.cases import FAULT
from proof.environments.running import Verdict, controls, runner, verdicts

pytestmark = pytest.mark.once

Run = Callable[..., Verdict]


@pytest.fixture(scope="module")
def verdict_of() -> Iterator[Run]:
    with runner() as run:
        yield run


def cases(area: str) -> pytest.MarkDecorator:
    """The cases of one file that are quick enough."""
    names = [name for name, case in CASES.items() if case.tested and name.startswith(f"{area}-")]
    return pytest.mark.parametrize("name", names)


def check(verdict: Verdict) -> None:
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert verdict.broken == []


@pytest.mark.sampled
@cases("mounts")
def test_h3_file_systems_that_go_and_come_back(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.long
@cases("copies")
def test_h4_backups_restores_and_copies(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.sampled
@cases("moves")
def test_c7_a_directory_that_is_moved_or_removed(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.sampled
@cases("files")
def test_h2_files_and_paths(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.sampled
@cases("descriptors")
def test_h2_descriptors(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.sampled
@cases("users")
def test_h2_users_and_permissions(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.sampled
@cases("limits")
def test_h2_limits(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.long
@cases("clocks")
def test_c4_clocks(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.sampled
@cases("programs")
def test_c5_programs(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.sampled
@cases("platform")
def test_c8_platforms_that_fork_confine_and_time_programs(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.sampled
@cases("kernel")
def test_c8_deaths_signals_and_stops(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


@pytest.mark.sampled
@cases("storage")
def test_h3_disks_that_share_roll_back_and_rot(name: str, verdict_of: Run) -> None:
    check(verdict_of(name))


# ---- the judges --------------------------------------------------------------------------

JUDGED = (
    "moves-an-owner-without-its-directory-renamed",
    "files-an-empty-path",
    "users-another-umask-63",
    "copies-a-backup-put-back-cp-without-locks",
)


@pytest.mark.long
@pytest.mark.parametrize("name", JUDGED)
def test_controls_of_environments(name: str) -> None:
    """Without its fault a case holds; with a library that is worse than it is, it does not."""
    found = controls(list(verdicts([(name, FAULT)], lanes=1)), lanes=1)
    assert found.false_alarms == []
    assert not any(found.missed.values()), found.missed
    assert len(found.tried) > 1


def test_every_case_tells_a_story() -> None:
    assert len(CASES) > 60
    for case in CASES.values():
        play = getattr(case.play, "func", case.play)
        assert play.__doc__, case.name
