"""Each instrument of the proof: what it does, at what size, and its control."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from exclusivelog import admission
from proof import (
    claims_model,
    cluster_model,
    cluster_rules,
    cluster_torture,
    cluster_world,
    compactions,
    environments,
    failpoints,
    fuzz,
    maps,
    model,
    mutants,
    random_kills,
    round_trips,
    shutdowns,
    stateful,
    stops,
    suites,
    unreported,
    world,
)
from proof.bit_flips import flip_beside, flip_frames_beside
from proof.environments import running
from proof.environments.actors import FORGETS, SAYS_YES
from proof.environments.cases import FAULT
from proof.faults import crew
from proof.map_clients import WRITERS
from proof.power import Verdicts, judge_all, record, stored_cuts
from proof.power_cuts import Disk, cuts
from proof.report import Figure
from proof.rules import CONTROLS, MOVING_CONTROLS, Rules
from proof.sizes import Size
from proof.syscall_crashes import EARLY, sweep
from proof.traffic import TOPICS, UNCHECKED, Record, judge_ledger, read_notes
from proof.work import TOPICS as WORKED_ON
from testing import rules
from testing.children import ROOT
from testing.journals import small_journal
from testing.judges import ACKNOWLEDGED, REFUSED, about

NO_STRACE = "strace is not installed"


# ---- rules -------------------------------------------------------------------------------


def count_rules(size: Size, where: Path) -> Figure:
    """Every rule of docs/semantics.md that this version has is backed by tests, and every test that
    names a rule names one of them."""
    figure, page, sources = Figure("rules"), rules.PAGE.read_text(), rules.sources()
    wanted, behind = rules.built(page), rules.backing(sources)
    figure.most(rules=len(wanted), with_tests=sum(rule in behind for rule in wanted))
    figure.broken += rules.problems(page, sources)
    without = {
        name: text.replace("_b2_", "_").replace('"B2"', '"B1"') for name, text in sources.items()
    }
    figure.controls["without the tests of B2"] = "B2 has no test" in rules.problems(page, without)
    return figure


def run_suite(size: Size, name: str, file: str, mutant: str) -> Figure:
    """An instrument that is a test file; its control is the same with a mutant."""
    figure = Figure(name)
    if size.name in ("tiny", "small"):
        figure.skipped = f"{file} is part of make test-all, and takes longer than this size has"
        return figure
    ran = suites.run(file)
    figure.count(cases=ran.cases - len(ran.skipped), skipped=len(ran.skipped))
    figure.notes += [f"skipped: {text}" for text in ran.skipped]
    figure.broken += ran.broken
    [broken] = [each for each in mutants.MUTANTS if each.name == mutant]
    with mutants.tree(broken) as copy:
        figure.controls[mutant] = bool(mutants.run_check(copy, file))
    return figure


def suite(name: str, file: str, mutant: str) -> Callable[[Size, Path], Figure]:
    """`run_suite` as an instrument."""
    return lambda size, where: run_suite(size, name, file, mutant)


# ---- stateful ----------------------------------------------------------------------------


def compare_with_a_list(size: Size, where: Path) -> Figure:
    """Random calls, beside a model that is a list and a number."""
    figure = Figure("stateful")
    steps, wrong = stateful.run(size.examples)
    figure.count(steps=steps)
    figure.broken += [wrong] if wrong else []
    if size.controlled:
        figure.controls["a take-over that keeps the epoch"] = _keeps_the_epoch()
    return figure


def _keeps_the_epoch() -> bool:
    usual = admission.admit

    def keeps_the_epoch(**facts: Any) -> admission.Decision:
        decision = usual(**facts)
        taken = decision.verdict is admission.Verdict.TAKE_OVER
        return decision._replace(epoch=facts["epoch"]) if taken else decision

    with mock.patch.object(admission, "admit", keeps_the_epoch):
        _, wrong = stateful.run(50)
    return bool(wrong)


# ---- model -------------------------------------------------------------------------------


def walk_model(size: Size, where: Path) -> Figure:
    """Every interleaving of small worlds, decided by the library's own admission.py."""
    figure = Figure("model")
    for small in size.share(size.worlds):
        try:
            states, steps = model.walk(small, Rules(), most=10**8)
        except world.Violation as violation:
            figure.broken.append(f"{small}: {violation}")
        else:  # the same again is nothing new
            figure.most(
                **{f"worlds/{small}": 1, f"states/{small}": states, f"steps/{small}": steps}
            )
    if not size.controlled:
        return figure
    controls: list[tuple[Rules, tuple[world.World, ...]]]
    controls = [(broken, world.SMALL_WORLDS) for broken in CONTROLS.values()]
    controls += [(broken, world.SMALL_MOVING_WORLDS) for broken in MOVING_CONTROLS.values()]
    if size.name == "small":
        controls = controls[::5]
    noticed = sum(model.find_out(broken, worlds) is not None for broken, worlds in controls)
    figure.controls[f"{len(controls)} broken rules, one by one"] = noticed == len(controls)
    return figure


# ---- the cluster's model -----------------------------------------------------------------


def walk_cluster_model(size: Size, where: Path) -> Figure:
    """Every interleaving of writers on one ordered log, carried out by the library's own writers
    and its rule."""
    figure = Figure("cluster model")
    for small in size.share(size.cluster_worlds):
        try:
            states, steps = cluster_model.walk(small)
        except cluster_world.Violation as violation:
            figure.broken.append(f"{small}: {violation}")
        else:
            figure.most(
                **{f"worlds/{small}": 1, f"states/{small}": states, f"steps/{small}": steps}
            )
    if size.controlled:
        for name, patches in cluster_rules.CONTROLS.items():
            found = cluster_model.find_out(patches, cluster_world.SMALL_SIZES)
            figure.controls[name] = found is not None
    return figure


def walk_claims_model(size: Size, where: Path) -> Figure:
    """Every order in which records of a group's claims can arrive, by the library's own rule."""
    figure = Figure("claims model")
    for small in size.share(claims_model.SMALL_SIZES if size.quick else claims_model.ALL_SIZES):
        try:
            states, steps = claims_model.walk(small)
        except claims_model.Violation as violation:
            figure.broken.append(f"{small}: {violation}")
        else:
            figure.most(
                **{f"worlds/{small}": 1, f"states/{small}": states, f"steps/{small}": steps}
            )
    if size.controlled:
        for name, patches in claims_model.CONTROLS.items():
            figure.controls[name] = claims_model.find_out(patches) is not None
    return figure


# ---- torture -----------------------------------------------------------------------------


def torture(where: Path, seconds: float, seed: int, defect: str = "") -> Figure:
    """Random traffic of several processes that are killed and stopped; then judge what is left."""
    figure = Figure("torture")
    with crew(where, seed, defect) as processes:
        processes.go_on(seconds)
    record = read_notes(where)
    figure.count(
        kills=processes.kills,
        stops=processes.stops,
        operations=record.operations,
        acknowledged=record.count(ACKNOWLEDGED),
        refused=record.count(REFUSED, stale=False),
        zombie_appends_tried=record.count(REFUSED, True) + record.count(ACKNOWLEDGED, True),
        zombie_appends_accepted=record.count(ACKNOWLEDGED, True),
    )
    figure.broken = [
        *record.trouble,
        *processes.tracebacks(),
        *judge_ledger(where / "log", record, TOPICS),
    ]
    figure.count(lost=about(figure.broken, "H1"))
    if figure.broken:
        figure.notes.append(f"seed {seed}")
    return figure


def torture_figure(size: Size, where: Path) -> Figure:
    """Random traffic, random deaths; the control does not check which session owns a topic."""
    seed = int.from_bytes(os.urandom(4), "little")
    figure = torture(made(where / "sound"), size.torture_seconds, seed)
    if not size.controlled:
        return figure
    control = torture(made(where / "control"), min(10, size.torture_seconds), seed, UNCHECKED)
    figure.controls["appends that do not check which session owns the topic"] = bool(
        about(control.broken, "B1", "B3", "B8")
    )
    return figure


def die_unreported(size: Size, where: Path) -> Figure:
    """Deaths, forks and lost locks of which nobody tells the library, at random."""
    return unreported.unreported_deaths(size.unreported_seconds, size.controlled, where)


# ---- histories ---------------------------------------------------------------------------


def histories(size: Size, where: Path) -> Figure:
    """The same traffic without faults: as many calls as possible, judged by the clock."""
    figure = Figure("histories")
    with crew(where, random.randrange(1 << 30)) as processes:
        time.sleep(size.history_seconds)
        processes.end()
    record = read_notes(where)
    figure.broken += [*record.trouble, *processes.tracebacks()]
    figure.broken += judge_ledger(where / "log", record, TOPICS, send=False)
    figure.count(
        operations=record.operations,
        acknowledged=record.count(ACKNOWLEDGED),
        reads=sum(map(len, record.reads.values())),
        anomalies=len(figure.broken),
    )
    spoils = (("two calls at each other's time", swap_times), ("a read with a gap", gap))
    for name, spoil in spoils if size.controlled else ():
        spoilt = read_notes(where)
        spoil(spoilt)
        found = judge_ledger(where / "log", spoilt, TOPICS, send=False)
        figure.controls[name] = bool(about(found, "B9", "G5"))
    return figure


def swap_times(record: Record) -> None:
    """Let the first and the last acknowledged call of a topic have changed places in time."""
    calls = record.calls[TOPICS[0]]
    sent = [call for call in calls if call.outcome == ACKNOWLEDGED]
    first, last = min(sent, key=lambda c: c.begun), max(sent, key=lambda c: c.begun)
    calls[calls.index(first)] = replace(first, begun=last.begun, ended=last.ended)
    calls[calls.index(last)] = replace(last, begun=first.begun, ended=first.ended)


def gap(record: Record) -> None:
    """Let a reader have missed one message."""
    reads = record.reads[TOPICS[0]]
    number, read = next((n, r) for n, r in enumerate(reads) if len(r.values) > 2)
    reads[number] = replace(read, values=read.values[:1] + read.values[2:])


# ---- shared state ------------------------------------------------------------------------

ONE_BY_ONE = "one by one"  # the writer that is a control


def share_state(size: Size, where: Path) -> Figure:
    """Histories of a map are linearizable, and no death tears a write to many keys."""
    figure, dice = Figure("state"), random.Random()
    for name, (style, options) in maps.STYLES.items():
        place = made(where / name.replace(" ", "-"))
        played = maps.record(place, style, size.state_seconds, dice, **options)
        failure = maps.judge(style, played.calls)
        figure.count(
            operations=len(played.calls),
            kills=played.kills,
            stops=played.stops,
            anomalies=int(failure is not None),
        )
        if failure is not None:
            figure.broken.append(f"I2: {name}: {maps.explanation(failure, played.calls, place)}")
    for writer in WRITERS.keys() - {ONE_BY_ONE}:
        torn = list(maps.torn(made(where / writer.replace(" ", "-")), writer, size.torn_writes))
        figure.count(kills=len(torn), torn=sum(torn))
        figure.broken += [f"I1: {writer}: only some of the keys were written"] * any(torn)
    if size.controlled:
        control = maps.record_untroubled(made(where / "control"), "two calls", 1.5)
        figure.controls["an update of two calls"] = maps.judge("two calls", control) is not None
        torn_one_by_one = maps.torn(made(where / "torn"), ONE_BY_ONE, 50)
        figure.controls["keys put one by one"] = any(torn_one_by_one)
    return figure


# ---- compaction --------------------------------------------------------------------------


def compact_and_kill(size: Size, where: Path) -> Figure:
    """A compacted view beside a dictionary; the control trims what no view has."""
    figure, seed = Figure("compaction"), random.randrange(1 << 30)
    for found in compactions.kill_beside(where / "sound", size.compactors, seed):
        figure.count(
            kills=found.kills,
            operations=found.appends,
            compactions=found.compactions,
            trims=found.trims,
            watches=found.watches,
            violations=len(found.broken),
        )
        figure.broken += found.broken
    if figure.broken:
        figure.notes.append(f"seed {seed}")
    if size.controlled:
        control = compactions.kill_beside(where / "control", 40, seed, compactions.FORGETS)
        figure.controls["a trim ignores the end of the compacted view"] = any(
            about(found.broken, "G7") for found in control
        )
    return figure


# ---- failpoints --------------------------------------------------------------------------


def die_at_failpoints(size: Size, where: Path) -> Figure:
    """Death before and behind every named place of the library's own code."""
    figure = Figure("failpoints")
    places = list(failpoints.PLACES)
    if size.failpoint_places:
        places = random.sample(places, size.failpoint_places)
    calls = range(1, 1 + size.failpoint_calls * size.of)
    found = failpoints.sweep(made(where / "sound"), size.share(calls), places=places)
    figure.count(tried=found.tried, deaths=found.deaths, violations=len(found.broken))
    figure.most(**{f"places/{place}": 1 for place in places})
    figure.most(**{f"places reached/{place}": 1 for place in found.reached})
    if size.slice == 0:
        figure.notes += [f"not reached: {p}" for p in places if p not in found.reached]
    figure.broken += found.broken
    if size.controlled:
        control = failpoints.sweep(made(where / "control"), [1], EARLY, ["checkpoint"])
        figure.controls["an append that is acknowledged before it is made"] = bool(
            about(control.broken, "H1")
        )
    return figure


# ---- random kills ------------------------------------------------------------------------


def kill_at_full_speed(size: Size, where: Path) -> Figure:
    """Death between any two instructions of a sender; the control counts an append as made before
    it makes it."""
    figure, seed = Figure("random kills"), random.randrange(1 << 30)
    for found in random_kills.kill_beside(where / "sound", size.random_kills, seed):
        figure.count(
            kills=found.kills,
            operations=found.operations,
            acknowledged=found.acknowledged,
            lost=about(found.broken, "H1"),
            slow=found.slow,
        )
        figure.most(longest_pause_ms=round(1000 * found.longest))
        figure.broken += found.broken
    if figure.broken:
        figure.notes.append(f"seed {seed}")
    if size.controlled:
        [control] = random_kills.kill_beside(where / "control", 12, seed, EARLY)
        figure.controls["an append that is counted before it is made"] = bool(
            about(control.broken, "H1")
        )
    return figure


# ---- the kill sweep ----------------------------------------------------------------------


def kill_sweep(size: Size, where: Path) -> Figure:
    """Death before and behind system calls of a fixed work, alone and beside a survivor."""
    figure = Figure("kill sweep")
    if shutil.which("strace") is None:
        figure.skipped = NO_STRACE
        return figure
    for durability in ("power", "process"):
        for beside in (False, True):
            place = made(where / f"{durability}-{beside}")
            swept = sweep(place, durability, beside, size.kill_points, (size.slice, size.of))
            figure.most(**{f"points/{durability}, {beside}": swept.points})
            figure.count(tried=swept.tried, deaths=swept.died)
            figure.broken += swept.broken
            shutil.rmtree(place)
    if size.controlled:
        control = sweep(made(where / "control"), "power", False, 8, defect=EARLY)
        figure.controls["an append that is acknowledged before it is made"] = bool(
            about(control.broken, "H1")
        )
    return figure


# ---- crash states ------------------------------------------------------------------------


def crash_states(size: Size, where: Path) -> Figure:
    """Every disk that a power cut may leave of a recorded work is started up and judged."""
    figure = Figure("crash states")
    if shutil.which("strace") is None:
        figure.skipped = NO_STRACE
        return figure
    dice, trace = random.Random(), where / "trace"
    path = where / "log"
    with small_journal():
        record(path, trace, 1)
        flushed = cuts(Disk(str(path)), trace, WORKED_ON, size.disks, dice)
        _take_disks(figure, judge_all(flushed, made(where / "power"), "power", 1))
        stored = stored_cuts(where / "stored", 1, size.disks, dice)
        _take_disks(figure, judge_all(stored, made(where / "process"), "process", 1))
        if size.controlled:
            _control_disks(figure, where, trace)
    return figure


def _take_disks(figure: Figure, verdicts: Verdicts) -> None:
    figure.broken += [f"{where}: {text}" for where, texts in verdicts.broken for text in texts]
    lost = sum(about(texts, "H1") > 0 for _, texts in verdicts.broken)
    figure.count(states=verdicts.judged, acknowledged_lost=lost)
    figure.count(corrupt=len(verdicts.broken) - lost)


def _control_disks(figure: Figure, where: Path, trace: Path) -> None:
    unheard = cuts(
        Disk(str(where / "log")), trace, WORKED_ON, 3, random.Random(2), never_flushed="/journal"
    )
    found = judge_all(unheard, made(where / "unheard"), "power", 1)
    figure.controls["a disk that ignores the journal's flushes"] = any(
        about(texts, "H1") for _, texts in found.broken
    )
    for defect in ("checksum", "batch"):
        stored = stored_cuts(where / f"log-{defect}", 1, 30, random.Random(3))
        found = judge_all(stored, made(where / defect), "process", 1, defect)
        figure.controls[f"a recovery that ignores the {defect}"] = bool(found.broken)


# ---- power cuts --------------------------------------------------------------------------


def power_cuts(size: Size, where: Path) -> Figure:
    """The power fails under processes that write to a file system of its own, with a reboot and
    without. The controls are a disk that says it has flushed, and has not, and processes that
    believe a lock file that is older than the journal."""
    figure = Figure("power cuts")
    for kind in ("ext4", "xfs"):
        if reason := shutdowns.missing(kind):
            figure.notes.append(f"{kind} was skipped: {reason}")
            continue
        for reboots, name in ((True, "cuts_on"), (False, "cuts_without_reboot_on")):
            place = where / f"{kind}-{name}"
            found = shutdowns.cut_again_and_again(place, kind, size.cuts, reboots=reboots)
            figure.count(
                cuts=found.cuts,
                operations=found.operations,
                acknowledged=found.acknowledged,
                lost=about(found.broken, "H1"),
            )
            figure.count(**{f"{name}_{kind}": found.cuts})
            figure.broken += [f"{name} {kind}: {text}" for text in found.broken]
    if not figure.counts:
        figure.skipped = "; ".join(figure.notes)
    elif size.controlled:
        kind = next(kind for kind in ("ext4", "xfs") if not shutdowns.missing(kind))
        cut = shutdowns.cut_again_and_again
        lying = cut(where / "lying", kind, 3, shutdowns.LYING)
        figure.controls["a disk that lies about its flushes"] = bool(about(lying.broken, "H1"))
        believing = cut(where / "believing", kind, 5, shutdowns.BELIEVING, reboots=False)
        figure.controls["an open that trusts the lock file"] = bool(believing.broken)
    return figure


# ---- fuzz --------------------------------------------------------------------------------


def fuzz_decoders(size: Size, where: Path) -> Figure:
    """Entries, frames and rows of arbitrary bytes: guided by coverage, with AddressSanitizer, and
    then many more of them on the usual build. The control has a bound unchecked."""
    figure, seed = Figure("fuzz"), random.randrange(1 << 30)
    seeds: list[fuzz.Seed] = []
    if not size.guided or fuzz.missing():
        figure.notes.append(
            "blind, without AddressSanitizer: " + (fuzz.missing() or "that takes a larger SIZE")
        )
        planted = fuzz.run(ROOT, 20_000, seed, "", fuzz.PLANTED)
        figure.controls["a decoder that stumbles over one kind of entry"] = bool(planted.broken)
    else:
        tree, preload = fuzz.sanitized_once()
        guided = fuzz.run_lanes(tree, size.guided, seed, preload)
        figure.count(with_sanitizer=size.guided)
        _take_fuzzed(figure, guided)
        seeds = [each for lane in guided for each in lane.seeds]
        if size.controlled:
            with fuzz.sanitized(fuzz.unbounded) as (tree, preload):
                found = fuzz.run(tree, 200_000, seed, preload)
            name = "a decoder that does not look where a section ends"
            figure.controls[name] = bool(found.broken)
    _take_fuzzed(figure, fuzz.run_lanes(ROOT, size.inputs, seed, "", seeds))
    return figure


def _take_fuzzed(figure: Figure, lanes: list[fuzz.Fuzzed]) -> None:
    for found in lanes:
        figure.count(inputs=found.inputs, decoded=found.decoded, kept=found.kept)
        figure.most(places=found.places)
        figure.broken += found.broken


# ---- flipped bits ------------------------------------------------------------------------


def bit_flips(size: Size, where: Path) -> Figure:
    """Damage to every region of every file; the control has checksums that hold."""
    figure, seed = Figure("bit flips"), random.randrange(1 << 30)
    for found in flip_beside(where / "sound", size.flips, seed):
        figure.count(
            flips=found.flips,
            harmless=found.harmless,
            named=found.named,
            clear_errors=found.refused,
            undetected_wrong_data=sum("wrong data" in text for text in found.broken),
            deaths_inside_lmdb=found.lmdb_deaths,
        )
        figure.broken += found.broken
    if figure.counts["deaths_inside_lmdb"] > 0.01 * figure.counts["flips"]:
        figure.broken.append("LMDB dies of its own damaged pages more often than was known")
    if size.controlled:
        [control] = flip_beside(where / "control", 4, seed, control=True)
        figure.controls["values changed under checksums that hold"] = any(
            "wrong data" in text for text in control.broken
        )
    return figure


def make_holes(size: Size, where: Path) -> Figure:
    """Damage in the middle of the journal, after a power cut: what is behind it is read or named,
    and no offset is given again."""
    figure, seed = Figure("journal holes"), random.randrange(1 << 30)
    for number in range(size.holed_journals):
        found = flip_frames_beside(where / str(number), seed + number)
        figure.count(
            holes=found.flips,
            named=found.named,
            harmless=found.harmless,
            clear_errors=found.refused,
        )
        figure.broken += found.broken
    if size.controlled:
        blind = flip_frames_beside(where / "blind", seed, blind=True)
        figure.controls["frames that do not say what was durable"] = bool(blind.broken)
    return figure


# ---- environments ------------------------------------------------------------------------


def live_in_environments(size: Size, where: Path) -> Figure:
    """What users have and builders forget, case by case; each with the same without its fault,
    and with libraries that are worse than they are."""
    figure = Figure("environments")
    names = [name for name, case in environments.CASES.items() if case.fast or not size.quick]
    jobs = [(name, FAULT) for name in size.share(names)]
    found = list(running.verdicts(jobs))
    for verdict in found:
        if verdict.skipped:
            figure.notes.append(f"{verdict.name} was skipped: {verdict.skipped}")
        else:
            figure.most(**{f"cases/{verdict.name}": 1})
        figure.count(violations=len(verdict.broken))
        figure.broken += [f"{verdict.name}: {text}" for text in verdict.broken]
    chosen = random.sample(found, 12) if size.quick else found
    _take_controls(figure, running.controls(chosen))
    return figure


def _take_controls(figure: Figure, found: running.Controls) -> None:
    figure.count(control_runs=sum(found.tried.values()))
    figure.broken += [f"without its fault, {text}" for text in found.false_alarms]
    for defect in (FORGETS, SAYS_YES):
        figure.controls[f"a library that {defect}"] = not found.missed.get(defect)
    for defect, names in found.missed.items():
        figure.notes += [f"{name} misses that the library {defect}" for name in names]


# ---- mutants -----------------------------------------------------------------------------


def check_mutants(size: Size, where: Path, only: str = "") -> Figure:
    """The library, broken on purpose in one place after the other: a check must catch each.
    `only` those with a word in their names or files."""
    figure = Figure("mutants")
    if size.name == "small":
        figure.skipped = "they take longer than this size has: make proof SIZE=medium PARTS=mutants"
        return figure
    for mutant in size.share(mutants.MUTANTS):
        if only in f"{mutant.name} {mutant.file}":
            check, problem = mutants.catch(mutant)
            take_mutant(figure, mutant.name, check, problem)
            if check and (problem := mutants.false_alarm(check)):
                figure.notes.append(f"{check} fails on the library as it is: {problem}")
                figure.controls[SOUND] = False
    figure.controls.setdefault(SOUND, True)
    return figure


SOUND = "no check fails on the library as it is"
SHORT_RUN_CATCHES = 0.9  # of the mutants


def weigh_short_run(size: Size, where: Path) -> Figure:
    """How many of the mutants are caught by the tests that `make test` runs."""
    figure = Figure("short run")
    if size.name == "small":
        figure.skipped = "it takes hours: make proof SIZE=medium PARTS=short-run"
        return figure
    missed = []
    for mutant in size.share(mutants.MUTANTS):
        check, problem = mutants.catch_in_short_run(mutant)
        figure.most(**{f"mutants/{mutant.name}": 1, f"caught/{mutant.name}": int(bool(check))})
        figure.notes.append(f"{mutant.name}: {f'{check}: {problem}' if check else 'not caught'}")
        missed += [] if check else [mutant.name]
        print(figure.notes[-1], flush=True)
    if len(missed) > (1 - SHORT_RUN_CATCHES) * len(size.share(mutants.MUTANTS)):
        figure.broken.append(f"{len(missed)} mutants were not caught: {', '.join(missed)}")
    figure.controls[SOUND] = mutants.catch_in_short_run(None) == ("", "")
    return figure


def take_mutant(figure: Figure, name: str, check: str, problem: str) -> None:
    """Note which check has caught it."""
    figure.most(**{f"mutants/{name}": 1, f"caught/{name}": int(bool(check))})
    if check:
        figure.notes.append(f"{name}: caught by {check}: {problem}")
    else:
        figure.broken.append(f"{name}: no check has failed")


# ---- all of them -------------------------------------------------------------------------

INSTRUMENTS: dict[str, Callable[[Size, Path], Figure]] = {
    "rules": count_rules,
    "model": walk_model,
    "cluster-model": walk_cluster_model,
    "claims-model": walk_claims_model,
    "stateful": compare_with_a_list,
    "torture": torture_figure,
    "unreported": die_unreported,
    "cluster-torture": cluster_torture.torture_figure,
    "histories": histories,
    "state": share_state,
    "compaction": compact_and_kill,
    "failpoints": die_at_failpoints,
    "kill-sweep": kill_sweep,
    "random-kills": kill_at_full_speed,
    "crash-states": crash_states,
    "power-cuts": power_cuts,
    "faults": suite(
        "faults", "tests/storage/test_faults.py", "a full disk is taken for a failing one"
    ),
    "bit-flips": bit_flips,
    "journal-holes": make_holes,
    "fuzz": fuzz_decoders,
    "round-trips": round_trips.read_elsewhere,
    "stops": stops.stop_writers,
    "clocks": suite("clocks", "tests/shm/test_clocks.py", "heartbeats use the wall clock"),
    "environments": live_in_environments,
    "mutants": check_mutants,
    "short-run": weigh_short_run,
}


def made(path: Path) -> Path:
    """The directory, which is there from now on."""
    path.mkdir(parents=True)
    return path


def run(name: str, size: Size, where: Path) -> Figure:
    """One slice of an instrument, timed; of the mutants also some: `mutants:WORD`."""
    began = time.monotonic()
    name, _, only = name.partition(":")
    instrument = partial(check_mutants, only=only) if only else INSTRUMENTS[name]
    figure = instrument(size, made(where / name))
    figure.seconds = time.monotonic() - began
    return figure
