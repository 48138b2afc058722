"""The proof's own parts: its quick instruments, and that each of them can turn red."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proof import failpoints, fuzz, mutants, shutdowns, stateful, suites
from proof.deaths import EARLY
from proof.flips import flip_beside
from proof.judges import about
from proof.report import Card, Figure
from tests.children import ROOT


def test_g9_flipped_bits_of_any_file_are_harmless_or_named(tmp_path: Path) -> None:
    [found] = flip_beside(tmp_path, [(1, 100, False)], seconds=100)
    assert found.broken == []
    assert found.named > 10


def test_g9_control_values_under_checksums_that_hold_are_found_out(tmp_path: Path) -> None:
    [found] = flip_beside(tmp_path, [(1, 2, True)], seconds=60)
    assert all("wrong data" in text for text in found.broken)
    assert found.broken


def test_decoders_take_arbitrary_bytes() -> None:
    found = fuzz.run(ROOT, 20_000, 1, "")
    assert found.broken == []
    assert found.decoded > 2000, "hardly any checksum holds"


def test_control_the_fuzzer_finds_what_was_planted() -> None:
    found = fuzz.run(ROOT, 5000, 1, "", fuzz.PLANTED)
    assert any("planted" in text for text in found.broken)


PLACES = ("checkpoint", "take frames over", "finish a transaction", "flush a segment", "admit")


def test_h1_death_at_named_places(tmp_path: Path) -> None:
    found = failpoints.sweep(tmp_path, 1, places=PLACES)
    assert found.broken == []
    assert found.reached == set(PLACES)


def test_h1_control_of_death_at_named_places(tmp_path: Path) -> None:
    found = failpoints.sweep(tmp_path, 1, EARLY, places=PLACES[:1])
    assert about(found.broken, "H1")


@pytest.mark.parametrize("place", failpoints.PLACES)
def test_every_failpoint_is_a_place_and_is_left_as_it_was(place: str) -> None:
    owner, name = failpoints.found(place)
    usual = getattr(owner, name)
    with failpoints.armed(place, lambda: None):
        assert getattr(owner, name) is not usual
    assert getattr(owner, name) is usual


def test_a_list_and_a_ledger_agree() -> None:
    steps, wrong = stateful.run(5)
    assert wrong == ""
    assert steps > 50


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_h1_the_power_of_a_file_system_fails(tmp_path: Path, kind: str) -> None:
    if reason := shutdowns.missing(kind):
        pytest.skip(reason)
    found = shutdowns.cut_again_and_again(tmp_path, kind, 2)
    assert found.broken == []
    assert found.cuts == 2


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_what_is_there(mutant: mutants.Mutant) -> None:
    assert mutant.old in (ROOT / "exclusivelog" / mutant.file).read_text()
    assert mutant.hunters


def test_every_rule_that_is_built_has_a_test() -> None:
    covered = suites.rules_with_tests(suites.sources())
    assert set(suites.all_rules()) - set(suites.NOT_BUILT) <= covered
    assert "b2" not in suites.rules_with_tests(["def test_b3_something() -> None: ..."])


def test_runs_are_added_up_and_kept(tmp_path: Path) -> None:
    path, card = tmp_path / "card.json", Card.here()
    for broken in ([], ["H1 at offset 3: gone"]):
        figure = Figure("torture", {"kills": 2}, list(broken), {"no check": True})
        card.add(figure)
        card.save(path)
        card = Card.load(path)
    (kept,) = card.figures.values()
    assert (kept.counts, kept.runs, kept.verdict) == ({"kills": 4}, 2, "BROKEN")
    assert not card.green
    assert "H1 at offset 3: gone" in card.text()


def test_figures_of_another_library_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    card = Card.here()
    card.add(Figure("torture", {"kills": 2}, controls={"no check": True}))
    path.write_text(json.dumps(card.as_json() | {"library": "another"}))
    assert Card.load(path).figures == {}


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure("a", controls={"x": True}), "holds"),
        (Figure("a", controls={"x": True, "y": False}), "BLIND"),
        (Figure("a"), "NO CONTROL"),
        (Figure("a", skipped="no strace"), "skipped"),
        (Figure("a", broken=["x"], skipped="no strace"), "BROKEN"),
    ],
)
def test_a_figure_is_green_only_with_controls_that_turn_it_red(
    figure: Figure, verdict: str
) -> None:
    assert figure.verdict == verdict
    assert figure.green == (verdict in ("holds", "skipped"))
