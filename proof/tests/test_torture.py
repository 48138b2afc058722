"""Rules A to D and G2, all at once: processes with random calls, which are killed.

Several processes open producers in random modes, send, read, close, fence each other, fork, are
stopped for longer than their keepalive and go on, and die by SIGKILL at random moments. Each notes
in a file of its own what it is about to do and what came of it. In the end one judge reads the
log and the notes: nothing acknowledged may be missing or elsewhere, nothing may be there twice or
in part, no epoch may go back, within an epoch no other message may stand between an owner's, and
the order of the log is that of the clock, for writers and readers.

The same judge must turn red for a log in which a rule is broken: those are its controls.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proof.instruments import torture
from testing.judges import Call, Read, Row, judge


@pytest.mark.smoke
@pytest.mark.long
@pytest.mark.rule("B1", "B3", "B8", "B9", "C2", "C3", "C5", "G2", "G3", "G5", "H1")  # as it judges
def test_torture(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    short = request.config.getoption("--short")
    seconds = request.config.getoption("--torture-seconds") or (4.0 if short else 12.0)
    for longer in (1, 2, 4, 8, 16):  # on a busy machine, little happens in a short time
        where = tmp_path / str(longer)
        where.mkdir()
        seed = int.from_bytes(os.urandom(4), "little")
        found = torture(where, longer * seconds, seed)
        print(f"\n{longer * seconds:.0f} s, seed {seed}: {found.counts}")
        assert found.broken == []
        if found.counts["acknowledged"] > 10 * seconds:
            break
    assert found.counts["acknowledged"] > 10 * seconds


def sent(sender: str, at: int, epoch: int, *values: bytes, exclusive: bool = True) -> Call:
    """One that was acknowledged at an offset, at the time of that name."""
    call = Call(sender, values, begun=10 * at, exclusive=exclusive)
    return call.acknowledged(10 * at + 5, offset=at, epoch=epoch)


ROWS = [Row(0, 1, 7, b"a"), Row(1, 1, 8, b"b"), Row(2, 2, 9, b"c"), Row(3, 2, 9, b"d")]
CALLS = [
    sent("one", 0, 1, b"a"),
    sent("two", 1, 1, b"b", exclusive=False),
    sent("three", 2, 2, b"c", b"d"),
]
UNTOLD = [Call("four", (b"x", b"y"), 40), Call("five", (b"z",), 40), Call("five", (b"w",), 41)]
STALE = Call("one", (b"old",), 40, stale=True)


@pytest.mark.once
@pytest.mark.parametrize(
    ("rule", "rows", "calls"),
    [
        ("H1", ROWS[:2], CALLS),
        ("H1", [*ROWS, Row(4, 3, 5, b"w")], [*CALLS, *UNTOLD]),
        ("B9", [ROWS[1], ROWS[0], *ROWS[2:]], CALLS),
        ("B9", [*ROWS, Row(4, 3, 5, b"nobody's")], CALLS),
        ("B9", [*ROWS, Row(4, 3, 5, b"z")], [*CALLS, UNTOLD[1].refused(50)]),
        (
            "B9",
            ROWS,
            [
                *CALLS[:2],
                Call("three", (b"c", b"d"), 0).acknowledged(1),
                Call("one", (b"a",), 2, exclusive=False),
            ],
        ),
        ("B8", [*ROWS, Row(4, 1, 7, b"z")], [*CALLS, *UNTOLD]),
        (
            "B8",
            [*ROWS, Row(4, 2, 5, b"x"), Row(5, 2, 5, b"y"), Row(6, 2, 9, b"z")],
            [*CALLS, *UNTOLD],
        ),
        ("B8", ROWS, [*CALLS[:2], sent("three", 2, 5, b"c", b"d")]),
        ("B1", [*ROWS, Row(4, 2, 5, b"z")], [*CALLS, *UNTOLD]),
        ("B3", [*ROWS, Row(4, 3, 5, b"old")], [*CALLS, STALE.acknowledged(50, 4)]),
        ("G2", [*ROWS, Row(4, 3, 5, b"a")], CALLS),
        ("G3", [*ROWS, Row(4, 3, 5, b"x")], [*CALLS, *UNTOLD]),
        ("G3", [*ROWS, Row(4, 3, 5, b"y"), Row(5, 3, 5, b"x")], [*CALLS, *UNTOLD]),
        ("G5", [*ROWS[:2], ROWS[2]._replace(offset=3)], CALLS[:2]),
    ],
)
def test_controls_turn_the_judge_red(rule: str, rows: list[Row], calls: list[Call]) -> None:
    assert judge(ROWS, [*CALLS, *UNTOLD]) == []
    assert rule in {broken.rule for broken in judge(rows, calls)}


@pytest.mark.once
@pytest.mark.parametrize(
    ("begun", "start", "values", "sound"),
    [
        (100, 0, (b"a", b"b", b"c", b"d"), True),
        (100, 2, (b"c", b"d"), True),
        (12, 0, (b"a",), True),  # the next one was not acknowledged yet
        (100, 0, (b"a", b"b", b"c"), False),
        (100, 0, (b"a", b"c", b"d"), False),
        (100, 4, (b"e",), False),
    ],
)
def test_controls_turn_the_judge_of_reads_red(
    begun: int, start: int, values: tuple[bytes, ...], sound: bool
) -> None:
    read = Read("reader", begun, begun + 1, start, values)
    assert (judge(ROWS, CALLS, [read]) == []) == sound


def test_a_reader_misses_nothing_that_another_one_has_read() -> None:
    rows = [*ROWS, Row(4, 3, 5, b"z")]
    first = Read("one", 60, 61, 0, tuple(row.value for row in rows))
    second = Read("two", 70, 71, 0, first.values[:4])
    assert judge(rows, [*CALLS, *UNTOLD], [first, replace_begun(second, 60)]) == []
    assert {b.rule for b in judge(rows, [*CALLS, *UNTOLD], [first, second])} == {"G5"}


def replace_begun(read: Read, begun: int) -> Read:
    return Read(read.reader, begun, begun + 1, read.start, read.values)
