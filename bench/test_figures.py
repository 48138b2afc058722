"""The figures that need several processes, in their smallest form: they run, and their counts are
correct. Nothing is measured here."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

import exclusivelog as xl
from bench import (
    beside,
    cluster,
    exactly_once,
    following,
    handover,
    in_company,
    last_writer,
    models,
    paused,
    plots,
    report,
    rust_logs,
    spark,
    start,
    state,
    turns,
    unflushed,
    waiters,
    waiting,
    zombies,
)
from bench.conftest import RESULTS
from bench.measure import POWER, Figure, Row, Settings, Stores, prepare_directory
from bench.native import LOGS_PROGRAM
from bench.zombies import Tenure, Told, judge, value
from testing.broker import QUICK, missing, own_broker
from testing.disks import needs_strace
from testing.spark_home import spark_home
from testing.strace import traced


@pytest.fixture
def settings() -> Settings:
    return Settings(prepare_directory(RESULTS), rounds=1)


def counts(figure: Figure, results: Path) -> dict[str, Row]:
    """The rows that count something. All can be printed, saved, drawn and read again."""
    assert report.plain(figure)
    report.save(figure, {}, results)
    assert plots.draw(figure, results)
    assert report.load(results) == [({}, figure)]
    assert report.write_table(results).exists()
    section = (results / "beside-others.md").read_text()
    assert (f"({figure.id})" in section) == (figure.id in report.BESIDE_OTHERS)
    return {row.what: row for row in figure.rows if not row.unit}


def test_p9(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "ROUNDS", {1: 1, 30: 1})
    rows = counts(handover.p9(settings), tmp_path)
    for topics in ("1 topic", "30 topics"):
        assert rows[f"wake-ups of engines that stand by, {topics}: max"].ours == 0
        assert rows[f"wake-ups, all engines, {topics}: max"].ours >= 2


def test_p10(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "WAITERS", 60)
    monkeypatch.setattr(waiters, "ONE_BY_ONE", 5)  # the others in bulk
    monkeypatch.setattr(waiters, "TOPICS", 20)
    rows = counts(waiters.p10(settings), tmp_path)
    assert rows["wake-ups per promotion, all processes, most"].ours == 1


def test_p14(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "KEYS", 1_000)
    monkeypatch.setattr(state, "UPDATES", 5_000)
    monkeypatch.setattr(state, "AT_ONCE", 1_000)
    monkeypatch.setattr(state, "CALLS", 5)
    counts(state.p14(settings), tmp_path)


def test_p17(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zombies, "EVICTION_EVERY", 2)
    monkeypatch.setattr(zombies, "MOST_SECONDS", 20.0)  # nothing is measured: a busy machine may
    settings = Settings(prepare_directory(RESULTS), rounds=4)
    rows = counts(zombies.p17(settings), tmp_path)
    for what, row in rows.items():
        assert row.holds is not False, what
    assert rows["appends tried by former owners"].ours > 4 * zombies.TRIES


def test_p23(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "OPENINGS", 1)
    figure = start.p23(settings)
    counts(figure, tmp_path)
    assert {row.unit for row in figure.rows} == {"s", "B"}


def test_p26(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"TOPICS": 20, "AT_ONCE": 100, "WINDOW_SECONDS": 0.02}.items():
        monkeypatch.setattr(beside, name, number)
    figure = beside.p26(settings)
    counts(figure, tmp_path)
    assert all(row.ours > 0 for row in figure.rows)


def test_p27(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers begin anew at the end of their topics."""
    small = {"CALLS": 20, "INPUTS": 7, "THREADS": 2, "SECONDS": 0.05}
    for name, number in small.items():
        monkeypatch.setattr(exactly_once, name, number)
    figure = exactly_once.p27(settings)
    counts(figure, tmp_path)
    assert len(figure.rows) == 4


def test_p28(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process works between the stops, and one that is always inside holds up each send."""
    kinds = [("positions", "power", 0), ("checkpoints", "process", 0), paused.IDLE]
    monkeypatch.setattr(paused, "KINDS", kinds)
    figure = paused.p28(Settings(prepare_directory(RESULTS), rounds=2))
    counts(figure, tmp_path)
    assert [row.unit for row in figure.rows] == ["%"] * 3
    assert len(figure.notes) == 4


def test_p29(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "DURABILITIES": {"power": POWER},
        "PROCESSES": (1, 2),
        "SECONDS": 0.05,
        "PUTS_IN_TURN": 4,
        "GIL_SECONDS": 0.5,
    }
    for name, number in small.items():
        monkeypatch.setattr(last_writer, name, number)
    rows = counts(last_writer.p29(settings), tmp_path)
    evicted = [row.ours for what, row in rows.items() if what.endswith("evictions of it")]
    # In two rounds, in the order of the states; an idle one that has no core may be late, too.
    assert len(evicted) == 3
    assert min(evicted[1:]) >= 2


def test_p30(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "TOPICS", 30)
    figure = following.p30(settings)
    rows = counts(figure, tmp_path)
    samples = {series.name: len(series.samples) for series in figure.series}
    assert samples[following.GAP] == samples[following.ELSEWHERE] == 30
    assert all(rows[f"transactions, {where}: p50"].ours >= 2 for where in following.WHERE)


def test_p31(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"TOPICS": 10, "PROCESSES": 2, "DEAD": 20}.items():
        monkeypatch.setattr(waiting, name, number)
    rows = counts(waiting.p31(settings), tmp_path)
    assert rows["dead waiters in the queue, at the release: least"].ours == 20


def test_p32(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the logs of Rust where `python -m bench.compare P32` has built them."""
    built = LOGS_PROGRAM if LOGS_PROGRAM.exists() else None
    monkeypatch.setattr(rust_logs, "build_logs", lambda: built)
    for name, number in {"CALLS": 5, "THREADS": 2, "WINDOW_SECONDS": 0.05}.items():
        monkeypatch.setattr(rust_logs, name, number)
    figure = rust_logs.p32(settings)
    counts(figure, tmp_path)
    logs = rust_logs.LOGS if built else ()
    assert [row.peer_name for row in figure.rows] == [
        f"{name}{threads}" for threads in ("", ", 2 threads") for name in (rust_logs.RAW, *logs)
    ]
    assert bool(figure.notes) == (not built)


@needs_strace
@pytest.mark.skipif(not LOGS_PROGRAM.exists(), reason="the logs of Rust are not built")
@pytest.mark.parametrize("name", rust_logs.LOGS)
def test_each_append_to_a_log_of_rust_is_flushed(name: str, stores: Stores) -> None:
    log, calls = rust_logs.RustLog(LOGS_PROGRAM, name, stores.path(name)), stores.path("calls")
    with closing(log), traced(log.pid, "-o", calls, "-e", "trace=fdatasync,fsync"):
        assert len(log.latencies(20)) == 20
    assert Path(calls).read_text().count("sync(") >= 20


def test_p34(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unflushed, "RUN", 10)
    figure = models.p34(settings)
    counts(figure, tmp_path)
    assert [row.ratio is not None for row in figure.rows] == [True] * 6


def test_p35(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SECONDS", 0.05)
    figure = turns.p35(settings)
    counts(figure, tmp_path)
    assert len(figure.series) == 2 * 2 * 3
    assert len(figure.rows) == 2 * 3 * len(turns.SHARES)


def test_p36(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"SECONDS": 0.05, "TOPICS": 20, "OUT_OF": 2_000, "BATCH": 1_000}
    for name, number in small.items():
        monkeypatch.setattr(in_company, name, number)
    monkeypatch.setattr(beside, "WINDOW_SECONDS", 0.05)
    monkeypatch.setattr(beside, "AT_ONCE", 100)
    figure = in_company.p36(settings)
    counts(figure, tmp_path)
    reached = {row.what.rpartition(": ")[2]: row.ours for row in figure.rows}
    assert reached[in_company.STREAM] > 0
    assert reached[in_company.CHECKPOINTS] > 0
    assert len(figure.series) == 5 * len(in_company.COMPANIES)  # P1 has a file's beside it


# ---- the judge of P17, and its controls --------------------------------------------------

REIGNS = [Tenure(0, [Told(0, 0, 2)]), Tenure(1, [Told(2, 0, 1), Told(3, 2, 1)])]
SOUND = [(0, 1, value(0, 0)), (1, 1, value(0, 1)), (2, 2, value(1, 0)), (3, 2, value(1, 2))]


def test_a_sound_log() -> None:
    tally = judge(SOUND, REIGNS)
    assert (tally.messages, tally.acknowledged) == (4, 4)
    assert (tally.stale, tally.lost, tally.untold) == (0, 0, 0)


@pytest.mark.parametrize(
    ("log", "stale", "lost", "untold"),
    [
        ([*SOUND, (4, 1, value(0, 2))], 1, 0, 1),
        ([*SOUND[:2], (2, 3, b"x"), *((o + 1, e, v) for o, e, v in SOUND[2:])], 2, 2, 1),
        (SOUND[:3], 0, 1, 0),
        ([*SOUND[:3], (3, 2, value(1, 1))], 0, 1, 0),
        ([*SOUND, (4, 2, value(1, 2))], 0, 0, 1),
        ([SOUND[0], *SOUND[2:]], 0, 1, 0),
    ],
    ids=["interleaved", "an epoch goes back", "missing", "changed", "twice", "a hole"],
)
def test_controls_turn_the_judge_red(
    log: list[tuple[int, int, bytes]], stale: int, lost: int, untold: int
) -> None:
    tally = judge(log, REIGNS)
    assert (tally.stale, tally.lost, tally.untold) == (stale, lost, untold)


def test_one_offset_that_two_owners_were_told_of() -> None:
    assert judge(SOUND, [*REIGNS, Tenure(2, [Told(3, 0, 1)])]).lost == 1


def test_an_append_after_the_end_counts_as_accepted() -> None:
    def refused() -> int:
        raise xl.ProducerFencedError("too late")

    tenure = Tenure(0)
    tenure.attempt(lambda: 0, 0)
    tenure.attempt(refused, 1)
    tenure.attempt(lambda: 1, 2)
    assert (tenure.told, tenure.tries, tenure.returned) == ([Told(0, 0, 1), Told(1, 2, 1)], 2, 1)


def test_p16(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"COUNT": 20_000, "CHUNK": 10_000, "WRITTEN": 5_000, "BATCHES": 2}.items():
        monkeypatch.setattr(spark, name, number)
    # A JVM that runs once, for so little, spends most of its time on compiling.
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", f"{QUICK} -XX:+UseSerialGC")
    home = tmp_path / "home"
    home.mkdir()
    with spark_home(home):
        figure = spark.p16(settings)
    counts(figure, tmp_path)
    assert len(figure.rows) == 7


@pytest.mark.broker
@pytest.mark.timeout(240)
def test_p25(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    small = {
        "SENDS": 5,
        "PUTS": 3,
        "QUEUED": 500,
        "UNBATCHED": 50,
        "MANY": 2_000,
        "AT_ONCE": 1_000,
        "READ": 3_000,
        "STORED": 5_000,
        "TAKEOVERS": 1,
    }
    for name, number in small.items():
        monkeypatch.setattr(cluster, name, number)
    monkeypatch.setattr(cluster, "own_broker", lambda options: own_broker(options=QUICK))
    figure = cluster.p25(settings)
    counts(figure, tmp_path)
    assert len(figure.rows) == 8
    assert "opening a topic of 5,000 messages" in {row.what for row in figure.rows}
    assert all(series.samples for series in figure.series)
