"""Claims of an engine on a cluster: one log for each group, whatever its link does to the records
(rules F1 to F6)."""

from __future__ import annotations

import random
import secrets
import threading

import pytest

import exclusivelog as xl
from exclusivelog.cluster import checkpoints, claiming
from exclusivelog.cluster.checkpoints import load
from exclusivelog.cluster.claimed import Take, read
from exclusivelog.cluster.claiming import GroupLog, log_name
from exclusivelog.cluster.memory import Chances, MemoryPlace, UnreliableLog
from testing.processes import EXCLUSIVE, PATIENCE, until, within

pytestmark = [pytest.mark.timeout(120), pytest.mark.once]

FENCED = xl.ReaderFencedError


@pytest.fixture
def path() -> str:
    return f"memory://{secrets.token_hex(8)}"


def place_of(path: str) -> MemoryPlace:
    return MemoryPlace.named(path.partition("://")[2])


def takes(path: str, group: str = "g") -> list[Take]:
    """The takes in a group's log."""
    log = place_of(path)._shared.logs[log_name(group)]
    found = [read(data) for data in log._records]
    return [each for each in found if isinstance(each, Take)]


def log_of(engine: xl.Engine, group: str = "g") -> GroupLog:
    log = engine.backend.topics.named(log_name(group))
    assert isinstance(log, GroupLog)
    return log


@pytest.mark.rule("F1")
def test_f1_a_claim_of_many_resources_is_one_record(engine: xl.Engine, path: str) -> None:
    with engine.own("g", {f"r{number}": None for number in range(1000)}) as claim:
        assert len(claim.generations) == 1000
        assert [len(each.generations) for each in takes(path)] == [1000]
        assert [name for name in place_of(path).topics() if "claims" in name] == ["__claims__/g"]


@pytest.mark.rule("F1")
def test_f1_a_claim_that_no_record_holds_is_refused(engine: xl.Engine) -> None:
    many = {f"{number:0240}": None for number in range(21_000)}
    with pytest.raises(xl.UnsupportedError, match="claim of 21000 resources"):
        engine.own("g", many)
    assert engine.claims() == []


@pytest.mark.rule("F1", "F3")
def test_f3_two_that_claim_at_once_have_one_order(engine: xl.Engine, other: xl.Engine) -> None:
    """The later record has not seen the earlier one: its engine asks again."""
    log = log_of(engine)
    with engine.own("g", {"a": None}):
        judged = log.host.claims._judge
        beaten: list[xl.Claim] = []

        def late(*args: object) -> object:
            found = judged(*args)  # type: ignore[arg-type]
            if not beaten:
                beaten.append(other.own("g", {"a": None, "b": None}))
            return found

        log.host.claims._judge = late  # type: ignore[method-assign,assignment]
        claim = engine.own("g", {"b": None, "c": None})
    assert claim.generations == {"b": 2, "c": 1}
    assert not beaten[0].is_valid


@pytest.mark.rule("F3", "F5")
def test_f5_a_claim_that_was_given_up_is_released_when_its_record_comes(
    path: str, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exclusivelog.cluster.appending.RESEND_SECONDS", 60)
    other.own("g", {"a": None}).release()
    with xl.open(path) as engine:
        engine.own("g", {"b": None}).release()  # it follows the log
        log = log_of(engine)
        link = UnreliableLog(log.log, Chances(delayed=1.0))
        log._appending._log = link
        with monkeypatch.context() as patch:
            patch.setattr(claiming, "ANSWER_SECONDS", 0.1)
            with pytest.raises(xl.WaitTimeoutError, match="the claim was not read back"):
                engine.own("g", {"a": None})
        monkeypatch.setattr(link, "_chances", Chances())
        link.deliver(0)  # the take, and only then
        until(lambda: other.claims("g") == [])
        assert [each.generations for each in takes(path)][-1] == {"a": 2}
        assert other.own("g", {"a": None}).generations == {"a": 3}


BAD = Chances(lost=0.2, doubled=0.2, delayed=0.2, answer_lost=0.3, answer_doubled=0.2)


@pytest.mark.rule("F1", "F2", "F3", "F6", "J1")
def test_f3_each_generation_has_one_claim_whatever_the_log_does(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines take what overlaps from each other, and commit positions, while records are lost,
    doubled and late."""
    open_link, dice = MemoryPlace.open, random.Random(5)

    def open_badly(place: MemoryPlace, topic: str) -> UnreliableLog:
        return UnreliableLog(open_link(place, topic), BAD, random.Random(dice.random()))

    monkeypatch.setattr(MemoryPlace, "open", open_badly)
    monkeypatch.setattr("exclusivelog.cluster.appending.RESEND_SECONDS", 0.02)
    granted: list[tuple[str, int]] = []
    with xl.open(path, name="one") as one, xl.open(path, name="two") as two:
        with one.topic("t").producer(EXCLUSIVE) as producer:
            producer.send_many([b"x"] * 50)
        former: xl.Claim | None = None
        for turn in range(14):
            engine = (one, two)[turn % 2]
            claim = within(lambda e=engine, t=turn: e.own("g", {"all": None, f"r{t % 3}": None}))
            granted += claim.generations.items()
            assert former is None or not former.is_valid
            former = claim
            with engine.topic("t").reader(group="h") as reader:
                assert reader.position == turn
                reader.read_batch(1)
                reader.commit()
        assert len(granted) == len(set(granted))
        assert dict(former.generations)["all"] == 14
        assert one.groups() == two.groups()


@pytest.mark.rule("F2", "F6", "J1")
def test_f2_claims_and_positions_are_in_a_checkpoint(
    path: str, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "EVERY_RECORDS", 20)
    other.topic("t")
    with xl.open(path) as engine:
        held = other.own("g", {"kept": 7})
        for _ in range(20):
            engine.own("g", {"a": None})
        with engine.topic("t").reader(group="g") as reader:
            reader.commit()
    place = place_of(path)
    with xl.open(path) as late:
        found = load(place, log_name("g"), place.open(log_name("g")))
        assert found is not None
        assert found.claims.last("a").generation >= 10
        assert held.is_valid
        with pytest.raises(xl.OwnershipError, match="held with generation 7"):
            late.own("g", {"kept": 6})
        assert late.own("g", {"a": None}).generations == {"a": 21}
        assert [each.position for each in late.groups()] == [0]


@pytest.mark.rule("F6")
def test_f6_a_reader_that_comes_while_its_group_is_deleted_keeps_it(
    engine: xl.Engine, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = other.topic("t")
    with topic.reader(group="g") as reader:
        reader.commit()
    clear, come = GroupLog.clear, list[xl.Reader]()

    def late(log: GroupLog, takes: int) -> bool:
        come.append(topic.reader(group="g"))
        return clear(log, takes)

    monkeypatch.setattr(GroupLog, "clear", late)
    with pytest.raises(xl.OwnershipError, match="while it is read by engine 'other'"):
        engine.delete_group("g")
    come[0].commit()
    come[0].close()
    monkeypatch.setattr(GroupLog, "clear", clear)
    assert engine.delete_group("g") == 1


@pytest.mark.rule("F6", "G5")
def test_g5_a_reader_of_several_topics_is_woken_by_each_of_them(
    engine: xl.Engine, other: xl.Engine
) -> None:
    for name in "abc":
        other.topic(name)
    with (
        engine.reader(list("abc"), group="g") as reader,
        other.topic("c").producer(EXCLUSIVE) as producer,
    ):
        sending = threading.Timer(0.05, producer.send, [b"x"])
        sending.start()
        name, message = within(lambda: reader.read_next(PATIENCE))
        sending.join()
        assert (name, message.value) == ("c", b"x")
        fencing = threading.Timer(0.05, lambda: other.topic("b").reader(group="g"))
        fencing.start()
        with pytest.raises(FENCED):
            within(lambda: reader.read_next(PATIENCE))
        fencing.join()
        for log in engine.backend.topics.all():
            assert log.frames.others == []


@pytest.mark.rule("F5")
def test_f5_closing_an_engine_releases_its_claims(path: str, other: xl.Engine) -> None:
    with xl.open(path) as engine:
        claims = [engine.own("g", {"a": None, "b": None}), engine.own(None, {"c": None})]
    assert not any(claim.is_valid for claim in claims)
    log = log_of(other)
    log.catch_up()
    assert log.holdings.sessions == {}
    released = [(each.kind, each.reason, each.resource) for each in other.history(group="g")]
    assert released[-2:] == [("release", "closed", "a"), ("release", "closed", "b")]


def test_f2_claims_of_an_earlier_version_are_refused(engine: xl.Engine, path: str) -> None:
    """Their generations would be given again."""
    place_of(path).open("__claim__/1/g/march")
    with pytest.raises(xl.LedgerVersionError, match=r"earlier development version.*march"):
        engine.own("g", {"march": None})
    with pytest.raises(xl.LedgerVersionError, match="begin at 1 again"):
        engine.topic("t").reader(group="g")
