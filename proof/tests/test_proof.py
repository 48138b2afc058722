"""The proof's own parts: its quick instruments, and that each of them can turn red."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import exclusivelog as xl
from proof import (
    compactions,
    failpoints,
    fuzz,
    instruments,
    ledger_operations,
    mutants,
    random_kills,
    round_trips,
    shutdowns,
    stateful,
    stops,
    table,
)
from proof.bit_flips import flip_beside, flip_frames_beside
from proof.instruments import INSTRUMENTS
from proof.report import Card, Figure
from proof.sizes import SIZES
from proof.syscall_crashes import EARLY
from proof.totals import AIMS, as_json, lines
from proof.work import act
from testing.children import ROOT
from testing.journals import small_journal
from testing.judges import about
from testing.patience import PATIENCE
from testing.pauses import CONTROL, Kind, measure, name_of

pytestmark = pytest.mark.once


@pytest.mark.long
def test_g9_flipped_bits_of_any_file_are_harmless_or_named(tmp_path: Path) -> None:
    [found] = flip_beside(tmp_path, 100, 1)
    assert found.broken == []
    assert found.named > 10


@pytest.mark.long
def test_g9_control_values_under_checksums_that_hold_are_found_out(tmp_path: Path) -> None:
    [found] = flip_beside(tmp_path, 2, 1, control=True)
    assert all("wrong data" in text for text in found.broken)
    assert found.broken


@pytest.mark.sampled
@pytest.mark.rule("H7")
@pytest.mark.parametrize("blind", [False, True])
def test_each_frame_of_the_journal_damaged(tmp_path, blind) -> None:
    found = flip_frames_beside(tmp_path / "flips", 1, blind)
    assert found.flips > 5
    assert bool(found.broken) == blind, found.broken


@pytest.mark.long
def test_decoders_take_arbitrary_bytes() -> None:
    found = fuzz.run(ROOT, 20_000, 1, "")
    assert found.broken == []
    assert found.decoded > 2000, "hardly any checksum holds"


@pytest.mark.long
def test_control_the_fuzzer_finds_what_was_planted() -> None:
    found = fuzz.run(ROOT, 5000, 1, "", fuzz.PLANTED)
    assert any("planted" in text for text in found.broken)


@pytest.mark.long
@pytest.mark.rule("K3")
@pytest.mark.parametrize("kind", stops.KINDS, ids=name_of)
def test_k3_a_send_is_answered_once_a_stopped_process_goes_on(tmp_path: Path, kind: Kind) -> None:
    found = measure(kind, 3, tmp_path / "log")
    assert (found.stops, found.unanswered) == (3, 0)


def test_control_a_stop_inside_is_noticed(tmp_path: Path) -> None:
    found = measure(CONTROL, 3, tmp_path / "log")
    assert (found.inside, found.unanswered) == (3, 0)


@pytest.mark.long  # it builds the library for the other Pythons of the machine
@pytest.mark.timeout(2000)
@pytest.mark.rule("G10")
def test_g10_values_are_read_in_another_process(tmp_path: Path) -> None:
    size = replace(SIZES["small"], examples=2)
    figure = round_trips.read_elsewhere(size, tmp_path)
    assert figure.verdict == "holds"
    assert figure.counts["values"] > 50


PLACES = ("checkpoint", "finish a transaction", "flush a segment", "put a view in its place")


@pytest.mark.long
def test_h1_death_at_named_places(tmp_path: Path) -> None:
    found = failpoints.sweep(tmp_path, [1], places=PLACES)
    assert found.broken == []
    assert found.reached == set(PLACES)


@pytest.mark.long
def test_h1_control_of_death_at_named_places(tmp_path: Path) -> None:
    found = failpoints.sweep(tmp_path, [1], EARLY, places=PLACES[:1])
    assert about(found.broken, "H1")


@pytest.mark.parametrize("place", failpoints.PLACES)
def test_every_failpoint_is_a_place_and_is_left_as_it_was(place: str) -> None:
    owner, name = failpoints.found(place)
    usual = getattr(owner, name)
    with failpoints.armed(place, lambda: None):
        assert getattr(owner, name) is not usual
    assert getattr(owner, name) is usual


def test_a2_operations_are_done_or_not_done(path: str) -> None:
    with xl.open(path) as engine:
        ledger_operations.do(Path(path), engine)
    assert list(ledger_operations.judge(Path(path))) == []


def half_a_transaction(engine: xl.Engine) -> None:
    engine.topic("made").producer().send(b"of others")


def half_a_write(engine: xl.Engine) -> None:
    shared: xl.SharedMap[str, int] = xl.SharedMap(engine.topic("map"))
    shared.put("a", 2)


def a_claim_too_many(engine: xl.Engine) -> None:
    for _ in range(2):
        engine.own("chores", {"claim": None}).release()


@pytest.mark.parametrize(
    ("spoil", "rule"), [(half_a_transaction, "G3"), (half_a_write, "I1"), (a_claim_too_many, "F2")]
)
def test_a2_controls_of_operations(
    path: str, spoil: Callable[[xl.Engine], None], rule: str
) -> None:
    with xl.open(path) as engine:
        ledger_operations.do(Path(path), engine)
        spoil(engine)
    assert about(ledger_operations.judge(Path(path)), rule)


def test_every_failpoint_is_reached(path: str) -> None:
    seen: set[str] = set()
    with contextlib.ExitStack() as stack:
        for place in failpoints.PLACES:
            stack.enter_context(failpoints.armed(place, partial(seen.add, place)))
        stack.enter_context(small_journal())
        with xl.open(path) as engine:
            ledger_operations.do(Path(path), engine)
            act(engine, "t", lambda: None)
    assert seen == set(failpoints.PLACES)


def test_every_place_comes_to_its_turn() -> None:
    """Where a run takes some of the places, it is not always the same ones."""
    assert 0 < SIZES["small"].failpoint_places < len(failpoints.PLACES)
    assert SIZES["full"].failpoint_places == 0


@pytest.mark.long
def test_h1_control_of_kills_at_full_speed(tmp_path: Path) -> None:
    [found] = random_kills.kill_beside(tmp_path, 12, 1, EARLY)
    assert about(found.broken, "H1")
    assert found.kills == 12


@pytest.mark.long
def test_g7_views_while_everybody_is_killed(tmp_path: Path) -> None:
    [found] = compactions.kill_beside(tmp_path, 16, 1)
    assert found.broken == []
    assert found.kills == 16
    assert min(found.appends, found.compactions, found.trims, found.watches) > 0


@pytest.mark.long
def test_g7_control_of_views_while_everybody_is_killed(tmp_path: Path) -> None:
    """Nearly each run shows it; when a process dies depends on the machine, too."""
    for seed in range(1, 6):
        [found] = compactions.kill_beside(tmp_path / str(seed), 20, seed, compactions.FORGETS)
        if about(found.broken, "G7"):
            return
    raise AssertionError("the judge has not noticed")


SENT: list[compactions.Sent] = [(0, b"a", b"1"), (1, b"b", b"2"), (2, b"a", b"3"), (3, b"b", None)]
SEEN = [[0, "a", "1"], [1, "b", "2"], [2, "a", "3"], [3, "b", None]]


@pytest.mark.parametrize("seen", [SEEN, SEEN[2:], SEEN[1:]], ids=["all", "the view", "an old one"])
def test_g7_what_a_watcher_may_see(seen: list[list[object]]) -> None:
    assert list(compactions.judge_watch(SENT, 3, 4, seen)) == []


def test_g12_a_watcher_must_not_miss_a_tombstone() -> None:
    seen = [*SEEN[:3], [4, "c", "5"]]
    sent: list[compactions.Sent] = [*SENT, (4, b"c", b"5")]
    assert any("dictionary" in text for text in compactions.judge_watch(sent, 4, 5, seen))


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        (SEEN[:3], "missed"),
        (SEEN[::-1], "went back"),
        ([*SEEN[2:], [4, "c", "5"]], "never sent"),
        (SEEN[3:], "dictionary"),
    ],
)
def test_g7_controls_of_what_a_watcher_may_see(seen: list[list[object]], what: str) -> None:
    assert any(what in text for text in compactions.judge_watch(SENT, 3, 4, seen))


@pytest.mark.long
def test_a_list_and_a_ledger_agree() -> None:
    steps, wrong = stateful.run(5)
    assert wrong == ""
    assert steps > 50


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_h1_the_power_of_a_file_system_fails(tmp_path: Path, kind: str) -> None:
    if reason := shutdowns.missing(kind):
        pytest.skip(reason)
    found = shutdowns.cut_again_and_again(tmp_path, kind, 2)
    assert found.broken == []
    assert found.cuts == 2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_h3_the_power_of_a_file_system_fails_without_a_reboot(tmp_path: Path, kind: str) -> None:
    """Several times in a row. The lock file is of this boot, and older than the journal."""
    if reason := shutdowns.missing(kind):
        pytest.skip(reason)
    found = shutdowns.cut_again_and_again(tmp_path, kind, 3, reboots=False)
    assert found.broken == []
    assert found.cuts == 3


@pytest.mark.long
def test_h3_control_who_believes_an_old_lock_file_loses_messages(tmp_path: Path) -> None:
    if reason := shutdowns.missing("ext4"):
        pytest.skip(reason)
    cut = shutdowns.cut_again_and_again
    assert cut(tmp_path, "ext4", 5, shutdowns.BELIEVING, reboots=False).broken


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_what_is_there(mutant: mutants.Mutant) -> None:
    assert mutant.old in mutants.source_of(ROOT, mutant).read_text()
    assert mutant.checks
    for check in mutant.checks:
        assert check in INSTRUMENTS or (ROOT / check.partition("::")[0]).is_file(), check


@pytest.mark.long
def test_every_rule_has_a_test(tmp_path: Path) -> None:
    figure = instruments.count_rules(SIZES["tiny"], tmp_path)
    assert figure.broken == []
    assert figure.controls == {"without the tests of B2": True}


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


def test_what_is_counted_once_is_not_added_up() -> None:
    figure = Figure("model", controls={"x": True})
    for states in (70, 80):
        again = Figure("model")
        again.most(**{"states/a world": states, "states/another one": 5})
        figure.add(again)
    assert figure.shown == {"states": 85}


NO_MESSAGES = """
from exclusivelog import _core
from proof import fuzz
from testing.entries import refooted

footer, name = fuzz.entries()[1][-fuzz.FOOTER.size :], b"name".ljust(8, b"\\0")
for flags in range(128):
    for extra in range(0, 40, 8):
        data = refooted(bytes(8 + extra) + name + footer, count=0, flags=flags, name_length=4)
        assert not fuzz.entry(data)
        fuzz.Ring()(fuzz.framed([fuzz.entries()[1], data, data]))
"""


@pytest.mark.long
def test_g9_an_entry_without_messages_is_damage() -> None:
    """With any sections. Reading the sequence id of its last message once caused a crash."""
    done = subprocess.run(
        [sys.executable, "-c", NO_MESSAGES], cwd=ROOT, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0


def test_slices_share_what_there_is() -> None:
    slices = list(SIZES["full"].sliced("model"))
    assert sorted(n for size in slices for n in size.share(range(30))) == list(range(30))
    assert [size.controlled for size in slices] == [True] + [False] * (len(slices) - 1)
    assert [size.of for size in SIZES["small"].sliced("model")] == [1]


def test_totals_tell_what_is_missing() -> None:
    card = Card.here()
    assert {total["verdict"] for total in as_json(card)} == {"missed"}
    for aim in AIMS:
        instrument, count = aim.parts[0]
        card.add(Figure(instrument, {count: aim.target}))
    assert {total["verdict"] for total in as_json(card)} == {"reached"}
    assert len(list(lines(card))) == len(AIMS) + 1


def test_the_parts_of_totals_are_counts_of_instruments() -> None:
    """Else a total would stay at nothing without a word."""
    source = (ROOT / "proof" / "instruments.py").read_text()
    for aim in AIMS:
        for instrument, count in aim.parts:
            assert f'Figure("{instrument}")' in source
            assert count.removesuffix("_ext4").removesuffix("_xfs") in source


@pytest.mark.long
def test_files_of_runs_beside_each_other_are_added_up(tmp_path: Path) -> None:
    cards = [Card.here(), Card.here()]
    cards[0].add(Figure("bit flips", {"flips": 99_999}))
    cards[1].add(Figure("bit flips", {"flips": 1}))
    cards[1].add(Figure("model", highest={"states/a world": 5}))
    paths = [tmp_path / "a", tmp_path / "b"]
    for card, path in zip(cards, paths, strict=True):
        card.save(path)
    card = table.added_up(paths)
    assert (card.figures["bit flips"].shown, card.figures["bit flips"].runs) == (
        {"flips": 100_000},
        2,
    )
    assert card.figures["model"].shown == {"states": 5}
    paths[1].write_text(paths[1].read_text().replace(card.library, "another"))
    for wrong in ([paths[1]], [tmp_path / "nowhere"]):
        with pytest.raises(SystemExit, match="no figures"):
            table.added_up(wrong)


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
