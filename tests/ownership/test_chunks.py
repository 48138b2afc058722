"""An engine that hands many topics over releases them chunk by chunk: sends to a topic wait for its
chunk alone. The time of one chunk gives the size of the next."""

from __future__ import annotations

import pytest

import exclusivelog as xl
from exclusivelog.local.ownership import notifications
from exclusivelog.local.ownership.notifications import Releases
from testing.patience import PATIENCE

pytestmark = pytest.mark.once  # durability changes appends, not who may append

NAMES = [f"t{i:03}" for i in range(250)]


@pytest.mark.sampled
@pytest.mark.usefixtures("only_who_sends_follows")
@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1e-9, [32, 32, 32, 29] * 2), (1e9, [32, 64, 29, 125])],
    ids=["slow", "fast"],
)
def test_e1_chunks_are_as_large_as_the_time_allows(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch, seconds, expected
) -> None:
    sizes: list[int] = []
    hand_over = Releases._hand_over

    def counted(self, asked):
        sizes.append(len(asked))
        hand_over(self, asked)

    monkeypatch.setattr(Releases, "_hand_over", counted)
    monkeypatch.setattr(notifications, "CHUNK_SECONDS", seconds)
    producers = engine.producers(NAMES, "exclusive")
    receipts = [p.send_async(b"before") for p in producers]
    with xl.open(path, name="to") as to:
        moves = engine.unload(NAMES, to=to.id, timeout=PATIENCE)
        assert [(move.topic, move.state) for move in moves] == [(n, "assigned") for n in NAMES]
        assert sizes == expected
        assert [r.result(0) for r in receipts] == [0] * len(NAMES)
        assert [p.send(b"x") for p in producers] == [1] * len(NAMES)  # they follow


def test_e4_what_fails_in_the_middle_is_released_in_the_next_round(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over, failures = Releases._hand_over, [False, True]

    def failing(self, asked):
        if failures and failures.pop(0):
            raise xl.LedgerFullError("no room for a moment")
        hand_over(self, asked)

    monkeypatch.setattr(Releases, "_hand_over", failing)
    engine.producers(NAMES[:1], "exclusive")[0].close()
    producers = engine.producers(NAMES, "exclusive", follow=False)
    with xl.open(path, name="to") as to:
        moves = engine.unload(NAMES, to=to.id, timeout=PATIENCE)
        assert all(move.ok for move in moves)
        assert [p.topic_epoch for p in producers] == [2] + [1] * (len(NAMES) - 1)
        assert {engine.topic(name).transfer.target.id for name in NAMES} == {to.id}
