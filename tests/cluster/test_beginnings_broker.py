"""Topics whose beginning is removed by an operator's slip, on a real broker.

Retention was lowered for a while, and the broker removed the beginning of a topic, or all of it. An
engine that was opened later saw a topic without a record, was granted epoch 1 and acknowledged,
while the former owner went on under its own epoch: two owners (rules B1, B2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import exclusivelog as xl
from exclusivelog.cluster.ordered import Answer, Answered, ignore
from exclusivelog.cluster.pulsar_log import PulsarLog
from testing.broker import Namespace
from testing.peers import open_engine, open_log
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, until, values

pytestmark = [pytest.mark.broker, pytest.mark.timeout(150)]

NOTHING = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
NOTED_EVERY, AT_ONCE = 1_000, 100  # records: brokerDeduplicationEntriesInterval
FOR_EVER = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}


def address(namespace: Namespace, topic: str = "orders") -> str:
    return f"persistent/{namespace.path}/{topic}"


@contextlib.contextmanager
def careless(namespace: Namespace) -> Iterator[None]:
    """Nothing is kept meanwhile; then the policy is put right."""
    namespace.call("POST", f"namespaces/{namespace.path}/retention", NOTHING)
    try:
        yield
    finally:
        namespace.call("POST", f"namespaces/{namespace.path}/retention", FOR_EVER)


def ledgers(namespace: Namespace, topic: str = "orders") -> list[int]:
    found = namespace.call("GET", f"{address(namespace, topic)}/internalStats")
    return [each["ledgerId"] for each in found["ledgers"]]


def trim_once(namespace: Namespace, topic: str, first: int) -> bool:
    """Have the broker trim; is the ledger that was the first one gone?"""
    append_for_deduplication(namespace, topic)
    namespace.call("POST", f"{address(namespace, topic)}/trim")
    return first not in ledgers(namespace, topic)


def append_for_deduplication(namespace: Namespace, topic: str = "orders") -> None:
    """Append records of another program until the broker's deduplication, which keeps what it has
    not noted yet, lets the broker remove what was before."""
    with open_log(namespace, topic, check_policies=False) as log:
        stored: list[Answer] = []
        for count in range(0, NOTED_EVERY, AT_ONCE):
            for _ in range(AT_ONCE):
                log.append(b"another program's", stored.append)
            until(lambda end=count + AT_ONCE: len(stored) == end)


def truncate(namespace: Namespace, topic: str = "orders") -> None:
    """Remove all that was written so far, in every ledger but the present one."""
    namespace.call("PUT", f"{address(namespace, topic)}/unload")
    namespace.call("DELETE", f"{address(namespace, topic)}/truncate")


@pytest.mark.long
@pytest.mark.rule("B1", "B2", "J1")
def test_b1_retention_that_was_lowered_for_a_while_makes_no_second_owner(
    namespace: Namespace,
) -> None:
    with open_engine(namespace) as engine:
        former = engine.topic("orders").producer(EXCLUSIVE)
        with careless(namespace):
            former.send_many([b"%d" % n for n in range(5)])
            [first] = ledgers(namespace)
            namespace.call("PUT", f"{address(namespace)}/unload")
            assert former.send(b"5", timeout=PATIENCE) == 5
            until(lambda: trim_once(namespace, "orders", first))
        with open_engine(namespace, "late") as late:
            with pytest.raises(xl.LedgerCorruptedError, match="lacks its beginning"):
                late.topic("orders").producer(FENCING, timeout=PATIENCE)
            with pytest.raises(xl.LedgerCorruptedError, match="lacks its beginning"):
                list(late.topic("orders").reader())
        assert former.send(b"6", timeout=PATIENCE) == 6
        assert former.topic_epoch == 1


@pytest.mark.rule("B1", "B2", "J1")
def test_b1_a_topic_that_was_truncated_is_not_begun_anew(namespace: Namespace) -> None:
    with open_engine(namespace) as engine, engine.topic("orders").producer(EXCLUSIVE) as producer:
        producer.send(b"a")
    truncate(namespace)
    with open_engine(namespace, "late") as late:
        with pytest.raises(xl.LedgerCorruptedError, match="lacks its beginning"):
            late.topic("orders").producer(EXCLUSIVE, timeout=PATIENCE)


# ---- other slips -------------------------------------------------------------------------


@pytest.mark.rule("B1")
@pytest.mark.parametrize("topics", [["__births__"], ["orders", "__births__"]])
def test_b1_a_truncated_log_of_births_does_not_let_topics_begin_anew(
    namespace: Namespace, topics: list[str]
) -> None:
    """All topics of a namespace lose what retention does not keep: the broker knows of each that it
    was written."""
    with open_engine(namespace) as engine, engine.topic("orders").producer(EXCLUSIVE) as producer:
        producer.send(b"a")
    for topic in topics:
        truncate(namespace, topic)
    with open_engine(namespace, "late") as late:
        with pytest.raises(xl.LedgerCorruptedError, match="lacks its beginning"):
            late.topic("orders").producer(EXCLUSIVE, timeout=PATIENCE)


@pytest.mark.rule("B1")
def test_b1_topics_go_on_if_the_log_of_births_was_deleted(namespace: Namespace) -> None:
    with open_engine(namespace) as engine, engine.topic("orders").producer(EXCLUSIVE) as producer:
        producer.send(b"a")
    for epoch in (2, 3):
        namespace.call("DELETE", f"{address(namespace, '__births__')}?force=true")
        with open_engine(namespace) as engine:
            with engine.topic("orders").producer(EXCLUSIVE) as producer:
                assert (producer.topic_epoch, producer.send(b"b")) == (epoch, epoch - 1)
    truncate(namespace)
    namespace.call("DELETE", f"{address(namespace, '__births__')}?force=true")
    with open_engine(namespace, "late") as late:
        with pytest.raises(xl.LedgerCorruptedError, match="lacks its beginning"):
            late.topic("orders").producer(EXCLUSIVE, timeout=PATIENCE)


@pytest.mark.rule("B1", "B2")
def test_b1_a_topic_that_was_deleted_under_its_owner_has_no_second_one(
    namespace: Namespace,
) -> None:
    with open_engine(namespace) as engine:
        former = engine.topic("orders").producer(EXCLUSIVE)
        former.send(b"a")
        namespace.call("DELETE", f"{address(namespace)}?force=true")
        with open_engine(namespace, "late") as late:
            with pytest.raises(xl.LedgerCorruptedError, match="lacks its beginning"):
                late.topic("orders").producer(FENCING, timeout=PATIENCE)
        with pytest.raises(xl.ExclusiveLogError):
            former.send(b"b", timeout=PATIENCE)


@pytest.mark.rule("B1", "B2")
def test_b1_a_topic_that_was_made_again_with_partitions_is_refused(namespace: Namespace) -> None:
    with open_engine(namespace) as engine, engine.topic("orders").producer(EXCLUSIVE) as producer:
        producer.send(b"a")
    namespace.call("DELETE", f"{address(namespace)}?force=true")
    namespace.call("PUT", f"{address(namespace)}/partitions", 3)
    with open_engine(namespace, "late") as late:
        with pytest.raises(xl.ClusterError, match="has 3 partitions"):
            late.topic("orders").producer(EXCLUSIVE, timeout=PATIENCE)


@pytest.mark.rule("B1")
def test_b1_an_engine_whose_log_of_births_was_deleted_enters_no_topic_in_the_next_one(
    namespace: Namespace,
) -> None:
    """Its entry would be the first record there, in place of a birth."""
    with open_engine(namespace) as engine:
        former = engine.topic("orders").producer(EXCLUSIVE)
        namespace.call("DELETE", f"{address(namespace, '__births__')}?force=true")
        with pytest.raises(xl.ExclusiveLogError, match=r"lacks its beginning|were removed"):
            engine.topic("bills").producer(EXCLUSIVE, timeout=PATIENCE)
        assert former.send(b"a", timeout=PATIENCE) == 0
        with open_engine(namespace, "late") as late:
            with late.topic("bills").producer(EXCLUSIVE, timeout=PATIENCE) as producer:
                assert producer.topic_epoch == 1
            assert values(late.topic("orders")) == [b"a"]


@pytest.mark.rule("B2")
def test_b2_the_owner_in_a_namespace_that_was_emptied_acknowledges_nothing(
    namespace: Namespace,
) -> None:
    """Nothing is left that could know of the first topic: the new one begins at epoch 1."""
    with open_engine(namespace) as engine:
        former = engine.topic("orders").producer(EXCLUSIVE)
        former.send(b"a")
        for address_of_one in namespace.call("GET", f"persistent/{namespace.path}"):
            name = address_of_one.rpartition("/")[2]
            namespace.call("DELETE", f"{address(namespace, name)}?force=true")
        with open_engine(namespace, "late") as late:
            with late.topic("orders").producer(FENCING, timeout=PATIENCE) as owner:
                assert (owner.topic_epoch, owner.send(b"new", timeout=PATIENCE)) == (1, 0)
                with pytest.raises(xl.ExclusiveLogError):
                    former.send(b"b", timeout=PATIENCE)
                assert owner.send(b"c", timeout=PATIENCE) == 1
            assert values(late.topic("orders")) == [b"new", b"c"]


@pytest.mark.rule("J1", "B9", "G2")
def test_j1_without_deduplication_a_send_counts_once(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(namespace) as engine:
        producer = engine.topic("orders").producer(EXCLUSIVE)
        producer.send(b"0")
        policy = f"namespaces/{namespace.path}/deduplication"
        namespace.call("POST", policy, False)
        namespace.call("PUT", f"{address(namespace)}/unload")
        append = PulsarLog.append

        def append_twice(log: PulsarLog, data: bytes, answered: Answered = ignore) -> None:
            append(log, data)  # as after an answer that was lost
            append(log, data, answered)

        monkeypatch.setattr(PulsarLog, "append", append_twice)
        assert [producer.send(b"%d" % n, timeout=PATIENCE) for n in range(1, 9)] == [*range(1, 9)]
        with pytest.raises(xl.DuplicateSequenceError):
            producer.send(b"again", sequence_id=3)
        namespace.call("POST", policy, True)
        with open_engine(namespace, "late") as late:
            assert values(late.topic("orders")) == [b"%d" % n for n in range(9)]
            with late.topic("orders").producer(FENCING) as owner:
                assert (owner.topic_epoch, owner.send(b"9", timeout=PATIENCE)) == (2, 9)


def has_compacted(namespace: Namespace) -> bool:
    status = namespace.call("GET", f"{address(namespace)}/compaction")
    return bool(status["status"] == "SUCCESS")


@pytest.mark.rule("B1", "G6")
def test_b1_limits_of_age_and_compaction_remove_nothing(namespace: Namespace) -> None:
    with open_engine(namespace) as engine:
        former = engine.topic("orders").producer(EXCLUSIVE)
        former.send_many([b"%d" % n for n in range(9)], keys=[b"k"] * 9)
        namespace.call("POST", f"namespaces/{namespace.path}/messageTTL", 1)
        namespace.call("PUT", f"namespaces/{namespace.path}/compactionThreshold", 1)
        namespace.call("PUT", f"{address(namespace)}/unload")
        assert former.send(b"9", key=b"k", timeout=PATIENCE) == 9
        namespace.call("PUT", f"{address(namespace)}/compaction")
        until(
            lambda: namespace.call("GET", f"{address(namespace)}/compaction")["status"] != "RUNNING"
        )
        namespace.call("POST", f"{address(namespace)}/trim")
        namespace.call("PUT", f"{address(namespace)}/unload")
        with open_engine(namespace, "late") as late:
            assert len(values(late.topic("orders"))) == 10
            with late.topic("orders").producer(FENCING, timeout=PATIENCE) as owner:
                assert (owner.topic_epoch, owner.send(b"10", timeout=PATIENCE)) == (2, 10)
