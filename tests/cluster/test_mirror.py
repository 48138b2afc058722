"""A mirror has every message of the log exactly once, with every field as it was (rule J4)."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

import exclusivelog as xl
from exclusivelog.cluster import Mirror, pulsar
from exclusivelog.cluster.mirror import READ_AT_ONCE, READ_BYTES, read_some
from exclusivelog.cluster.native import Native
from exclusivelog.cluster.ordered import Position, Record
from exclusivelog.cluster.pulsar import TopicReader
from exclusivelog.cluster.rule import State, Verdict
from exclusivelog.restoring import restore
from testing.broker import Namespace
from testing.mirrors import Fields, fields
from testing.processes import PATIENCE, forked, until, within

pytestmark = [pytest.mark.rule("J4"), pytest.mark.broker]


def mirror(engine: xl.Engine, namespace: Namespace, *topics: str, **options: Any) -> Mirror:
    options.setdefault("timeout", 90.0)
    return Mirror(engine, namespace.url, topics or None, admin=namespace.admin, **options)


def copy(engine: xl.Engine, namespace: Namespace, *topics: str, **options: Any) -> None:
    """Mirror everything that there is."""
    with mirror(engine, namespace, *topics, **options) as running:
        within(running.run, PATIENCE)
        assert sum(one.lag for one in running.progress()) == 0


def source(topic: xl.Topic) -> list[Fields]:
    return [fields(message) for message in topic.reader()]


def unpacked(data: bytes) -> Iterator[Fields]:
    """The messages of a frame, by docs/cluster.md and not by the library."""
    assert data[:4] == b"XLO\x01"
    kind, epoch, _, first, _, _, names, sequences, published, values, keys, events, properties = (
        msgpack.unpackb(data[8:])
    )
    assert kind == "f"
    for i, value in enumerate(values):
        yield (
            first + i,
            epoch,
            keys and keys[i],
            value,
            (properties and properties[i]) or {},
            events and events[i],
            published if isinstance(published, int) else published[i],
            names if isinstance(names, str) else names[i],
            sequences + i if isinstance(sequences, int) else sequences[i],
        )


def target(namespace: Namespace, topic: str = "orders") -> list[Fields]:
    return [one for message in namespace.messages(topic) for one in unpacked(message.data())]


def write_everything(topic: xl.Topic) -> None:
    """Messages with all kinds of fields, of several owners."""
    with topic.producer("exclusive", name="first") as producer:
        producer.send(b"", key=b"")
        producer.send(None, key=b"\xff\x00")
        producer.send(b"\x00" * 70_000, properties={"a": "", "": "b", "ü": "ß"})
        producer.send(b"x", event_time=0, sequence_id=1 << 40)
        producer.send(b"x", event_time=dt.datetime(1969, 1, 1, tzinfo=dt.UTC), sequence_id=1 << 62)
    with topic.producer("shared", name="one") as one, topic.producer("shared", name="two") as two:
        for i in range(50):
            (one if i % 3 else two).send(b"%d" % i, key=f"k{i % 5}")
    with topic.producer("exclusive", name="last") as producer:
        producer.send_many([b"m%d" % i for i in range(5000)], keys=[None, b"k"] * 2500)


def test_copies_count_by_the_rule_of_ordered_logs(topic: xl.Topic, namespace: Namespace) -> None:
    write_everything(topic)
    copy(topic.engine, namespace)
    state = State()
    for number, message in enumerate(namespace.messages("orders")):
        record = Record(Position(number.to_bytes(8, "big")), message.data())
        assert state.fold(record).verdict is Verdict.COUNTS
    assert (state.next, state.epoch) == (topic.next_offset, topic.epoch)


# ---- what is mirrored --------------------------------------------------------------------


@pytest.mark.smoke
def test_every_field_is_as_it_was(topic: xl.Topic, namespace: Namespace) -> None:
    write_everything(topic)
    copy(topic.engine, namespace)
    assert target(namespace) == source(topic)
    assert {one[1] for one in source(topic)} == {1, 2}  # epochs


def test_copies_go_on_where_they_ended(topic: xl.Topic, namespace: Namespace) -> None:
    for i in range(4):
        with topic.producer("exclusive") as producer:
            producer.send_many([b"%d" % n for n in range(100 * i)])
        copy(topic.engine, namespace)
        copy(topic.engine, namespace)
    assert target(namespace) == source(topic)


def test_all_topics_or_those_that_are_named(engine: xl.Engine, namespace: Namespace) -> None:
    names = ["a", "a/b", "ü b", "x-partition-0", "a%2Fb", "a=2Fb"]
    for name in names:
        engine.topic(name).producer().send(name.encode())
    copy(engine, namespace, "a/b")
    with pulsar.Cluster(pulsar.Access.parse(namespace.url, admin=namespace.admin)) as cluster:
        assert cluster.topics() == ["a/b"]
        copy(engine, namespace)
        assert cluster.topics() == sorted(names)
    for name in names:
        assert [one[3] for one in target(namespace, pulsar.topic_name(name))] == [name.encode()]


def test_a_mirror_of_nothing(topic: xl.Topic, namespace: Namespace) -> None:
    copy(topic.engine, namespace)
    copy(topic.engine, namespace)
    assert target(namespace) == []
    with pytest.raises(xl.TopicNotFoundError):
        copy(topic.engine, namespace, "nothing")


def test_large_batches_and_large_messages(topic: xl.Topic, namespace: Namespace) -> None:
    with topic.producer() as producer:
        producer.send_many([b"x" * 1000] * 20_000)
        producer.send(b"y" * 4_900_000)
        producer.send(b"z")
    copy(topic.engine, namespace)
    assert target(namespace) == source(topic)


def test_large_messages_are_not_read_all_at_once(topic: xl.Topic) -> None:
    # Compressed ones would take as much memory as all of them have without compression.
    topic.compression("lz4")
    with topic.producer() as producer:
        producer.send_many([b"x" * (1 << 20)] * 100)
    reader, most = topic.reader(), READ_BYTES // (1 << 20) + READ_AT_ONCE
    sizes = list(map(len, iter(lambda: read_some(reader), [])))
    assert sum(sizes) == 100
    assert max(sizes) <= most


def test_what_does_not_fit_is_refused_and_not_skipped(
    topic: xl.Topic, namespace: Namespace
) -> None:
    with topic.producer() as producer:
        producer.send(b"a")
        producer.send(b"y" * 5_000_001)
        producer.send(b"b")
    with pytest.raises(xl.UnsupportedError, match="the message at offset 1 does not fit"):
        copy(topic.engine, namespace)
    assert [one[0] for one in target(namespace)] == [0]


@pytest.mark.parametrize("plain", [False, True])
def test_a_follower_copies_what_is_written_meanwhile(
    engine: xl.Engine, namespace: Namespace, plain: bool
) -> None:
    topic = engine.topic("orders")
    with mirror(engine, namespace, plain=plain) as running:
        running.start(follow=True)
        with topic.producer("exclusive") as producer:
            for i in range(300):
                producer.send(b"%d" % i)
            until(lambda: [one.position for one in running.progress()] == [300])
            producer.send(b"300")
            until(lambda: [one.position for one in running.progress()] == [301])
        engine.topic("later").producer().send(b"x")  # a topic that is made meanwhile
        until(lambda: {one.topic: one.position for one in running.progress()}.get("later") == 1)
        running.stop()
        assert running.wait(PATIENCE)
        assert running.verify() == {"later": (1, 0, 0), "orders": (301, 0, 0)}


def test_a_follower_that_is_idle_costs_no_cpu(topic: xl.Topic, namespace: Namespace) -> None:
    with topic.producer() as producer, mirror(topic.engine, namespace) as running:
        running.start(follow=True)
        producer.send(b"x")
        until(lambda: [one.position for one in running.progress()] == [1])
        time.sleep(1.0)

        def is_idle() -> bool:
            before = time.process_time()
            assert not running.wait(6.0)
            return time.process_time() - before < 0.06  # 1 %

        until(is_idle)  # what other tests have left in this process may end first


def test_progress_tells_the_lag(topic: xl.Topic, namespace: Namespace) -> None:
    with topic.producer() as producer:
        producer.send_many([b"x"] * 1000)
    with mirror(topic.engine, namespace) as running:
        within(running.run, PATIENCE)
        (one,) = running.progress()
        found = (one.topic, one.position, one.end, one.copied, one.lag)
        assert found == ("orders", 1000, 1000, 1000, 0)


def test_progress_before_and_after_the_target_is_read(
    topic: xl.Topic, namespace: Namespace
) -> None:
    with topic.producer() as producer:
        producer.send_many([b"x"] * 1000)
        copy(topic.engine, namespace)
        seen = set()
        with mirror(topic.engine, namespace) as running:
            running.start(follow=True)
            while (0, True) not in seen:
                (one,) = running.progress()
                assert (one.lag, one.copied) == (0 if one.begun else 1000, 0)
                seen.add((one.lag, one.begun))
                assert not running.wait(0)
            producer.send(b"y")
            until(lambda: [(p.lag, p.copied) for p in running.progress()] == [(0, 1)])


def test_progress_of_a_topic_that_is_trimmed_or_deleted(
    engine: xl.Engine, namespace: Namespace
) -> None:
    topic = engine.topic("orders")
    with topic.producer() as producer:
        producer.send_many([b"x"] * 10)
        with mirror(engine, namespace, "orders") as running:
            running.start(follow=True)
            until(lambda: [one.position for one in running.progress()] == [10])
            topic.trim(before=10)  # all that there is, and the target has it
            producer.send(b"y")
            until(lambda: [(one.position, one.lag) for one in running.progress()] == [(11, 0)])
            producer.close()
            engine.delete_topic("orders")
            with pytest.raises(xl.TopicNotFoundError):
                within(lambda: running.wait(PATIENCE))
            (one,) = running.progress()
            assert (one.position, one.end, one.lag) == (11, 11, 0)


def test_the_source_may_be_open_read_only(path: str, topic: xl.Topic, namespace: Namespace) -> None:
    with topic.producer() as producer:
        producer.send(b"a")
        with xl.open(path, readonly=True) as engine:
            with mirror(engine, namespace) as running:
                running.start(follow=True)
                producer.send(b"b")
                until(lambda: [one.position for one in running.progress()] == [2])
    assert target(namespace) == source(topic)


# ---- plain messages ----------------------------------------------------------------------


def test_plain_consumers_find_the_fields_where_they_look(
    topic: xl.Topic, namespace: Namespace
) -> None:
    write_everything(topic)
    copy(topic.engine, namespace, plain=True)
    found = namespace.messages("orders")
    assert len(found) == topic.next_offset
    for message, sent in zip(found, topic.reader(), strict=True):
        own = message.properties()
        assert int(own["exclusivelog.offset"]) == sent.offset
        assert int(own["exclusivelog.epoch"]) == sent.epoch
        assert own["exclusivelog.producer"] == sent.producer_name
        assert message._message.has_null_value() == (sent.value is None)
        assert message.data() == (sent.value or b"")
        assert {**own, **sent.properties} == own
        if sent.key not in (None, b"", b"\xff\x00"):
            assert message.partition_key().encode() == sent.key
        if sent.event_time is not None and sent.event_time > 0:
            assert message.event_timestamp() == sent.event_time
    with mirror(topic.engine, namespace, plain=True) as running:
        assert running.verify() == {"orders": (topic.next_offset, 0, 0)}  # every field


def test_both_kinds_do_not_mix(topic: xl.Topic, make_namespace: Any) -> None:
    topic.producer().send(b"x")
    for plain in (False, True):
        namespace = make_namespace()
        copy(topic.engine, namespace, plain=plain)
        with pytest.raises(xl.MirrorMismatchError, match="--plain"):
            copy(topic.engine, namespace, plain=not plain)


def test_plain_refuses_properties_that_are_its_own(topic: xl.Topic, namespace: Namespace) -> None:
    topic.producer().send(b"x", properties={"exclusivelog.offset": "7"})
    with pytest.raises(xl.UnsupportedError, match=r"'exclusivelog.offset'"):
        copy(topic.engine, namespace, plain=True)
    assert namespace.messages("orders") == []


# ---- source and target disagree ----------------------------------------------------------


def test_another_log_with_other_messages_is_refused(
    topic: xl.Topic, namespace: Namespace, tmp_path: Any
) -> None:
    with topic.producer(name="p") as producer:
        producer.send_many([b"a", b"b", b"c"])
    copy(topic.engine, namespace)
    with xl.open(tmp_path / "other") as engine:
        with engine.topic("orders").producer(name="p") as producer:
            producer.send_many([b"a", b"B", b"c", b"d"])
        with pytest.raises(xl.MirrorMismatchError, match="it is one of the log with") as raised:
            copy(engine, namespace)
        assert (raised.value.topic, raised.value.offset) == ("orders", 0)
    assert target(namespace) == source(topic)


def test_a_log_that_was_restored_from_an_older_backup_is_refused(
    topic: xl.Topic, namespace: Namespace, tmp_path: Any
) -> None:
    with topic.producer(name="p") as producer:
        producer.send(b"a")
        topic.engine.backup(tmp_path / "backup")
        producer.send(b"b")
    copy(topic.engine, namespace)
    with xl.open(tmp_path / "backup") as engine:
        with pytest.raises(xl.MirrorMismatchError, match=r"at offset 1.*offsets up to 1"):
            copy(engine, namespace)
        engine.topic("orders").producer(name="p").send(b"B")
        with pytest.raises(xl.MirrorMismatchError, match=r"at offset 1.*its value: 1 bytes"):
            copy(engine, namespace)


def test_a_topic_that_was_made_anew_is_refused(engine: xl.Engine, namespace: Namespace) -> None:
    engine.topic("orders").producer().send(b"a")
    copy(engine, namespace)
    engine.delete_topic("orders")
    engine.topic("orders").producer().send(b"b")
    with pytest.raises(xl.MirrorMismatchError, match="at offset 0"):
        copy(engine, namespace)


@pytest.mark.parametrize("plain", [False, True])
def test_a_topic_that_was_made_anew_and_trimmed_to_the_end_of_the_copies_is_refused(
    engine: xl.Engine, namespace: Namespace, plain: bool
) -> None:
    """No message is left to compare."""
    engine.topic("orders").producer().send_many([b"a", b"b"])
    copy(engine, namespace, plain=plain)
    engine.topic("orders").trim(before=2)
    copy(engine, namespace, plain=plain)  # what is mirrored may go
    engine.delete_topic("orders")
    with engine.topic("orders").producer() as producer:
        producer.send_many([b"A", b"B", b"C"])
    engine.topic("orders").trim(before=2)
    with pytest.raises(xl.MirrorMismatchError, match="of this name that was deleted"):
        copy(engine, namespace, plain=plain)


def test_messages_of_others_are_not_taken_for_copies(topic: xl.Topic, namespace: Namespace) -> None:
    topic.producer().send(b"a")
    with namespace.client() as client:
        client.create_producer(f"persistent://{namespace.path}/orders").send(b"hello")
    for plain in (False, True):
        with pytest.raises(xl.MirrorMismatchError, match="messages that no mirror has sent"):
            copy(topic.engine, namespace, plain=plain)


def test_a_target_that_was_deleted_is_noticed(topic: xl.Topic, namespace: Namespace) -> None:
    # Pulsar makes it anew, empty, under a producer that goes on unaware.
    with topic.producer() as producer, mirror(topic.engine, namespace) as running:
        running.start(follow=True)
        for count, value in enumerate((b"a", b"b"), 1):  # the look after the first has ended then
            producer.send(value)
            until(lambda count=count: [one.position for one in running.progress()] == [count])
        namespace.call("DELETE", f"persistent/{namespace.path}/orders?force=true")
        producer.send(b"c")
        with pytest.raises(xl.MirrorMismatchError, match="begins with offset 2"):
            within(lambda: running.wait(PATIENCE), PATIENCE)
    with pytest.raises(xl.MirrorMismatchError, match="begins with offset 2"):
        copy(topic.engine, namespace)


def test_a_topic_that_is_deleted_under_its_reader_is_empty(
    topic: xl.Topic, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has said that there is a message, and never sends it.
    monkeypatch.setattr(pulsar, "PATIENCE_SECONDS", 0.5)
    with mirror(topic.engine, namespace) as running:
        reader = running.cluster.reader("orders")

        class SaysThatThereIsOne:
            close = staticmethod(reader._reader.use().close)
            read_next = staticmethod(reader._reader.use().read_next)

            def has_message_available(self) -> bool:
                return True

        monkeypatch.setattr(reader, "_reader", Native(SaysThatThereIsOne(), "it"))
        assert within(reader.next, PATIENCE) is None


@pytest.mark.rule("C5")
def test_a_forked_child_harms_no_mirror(topic: xl.Topic, namespace: Namespace) -> None:
    with topic.producer() as producer, mirror(topic.engine, namespace) as running:
        running.start(follow=True)
        producer.send(b"a")
        until(lambda: [one.position for one in running.progress()] == [1])

        def end() -> None:
            running.stop()
            running.close()
            with pytest.raises(xl.EngineClosedError, match=r"inherited through fork\(\)"):
                running.cluster.reader("orders")
            running.cluster.close()

        forked(end)
        producer.send(b"b")
        until(lambda: [one.position for one in running.progress()] == [2])
        assert not running.wait(0)


@pytest.mark.parametrize("again", [False, True])
def test_a_target_that_was_deleted_is_noticed_by_an_idle_mirror(
    topic: xl.Topic, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr("exclusivelog.cluster.mirror.POLL_SECONDS", 0.2)
    monkeypatch.setattr("exclusivelog.cluster.mirror.CHECK_SECONDS", 0.5)
    topic.producer().send(b"a")
    if again:
        copy(topic.engine, namespace)
    with mirror(topic.engine, namespace, "orders") as running:
        running.start(follow=True)
        until(lambda: [one.position for one in running.progress()] == [1])
        assert not running.wait(2)  # nothing is wrong yet
        namespace.call("DELETE", f"persistent/{namespace.path}/orders?force=true")
        with pytest.raises(xl.MirrorMismatchError, match="it is empty, and was not before"):
            within(lambda: running.wait(PATIENCE))


def test_a_target_that_looks_empty_for_a_moment_is_gone_on_with(
    topic: xl.Topic, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that had just come back was seen to report a topic as empty that was not."""
    read, looked = TopicReader.next, list[TopicReader]()

    def read_nothing_at_first(reader: TopicReader) -> Any:
        if reader._last or looked:
            return read(reader)
        looked.append(reader)
        return None

    topic.producer().send(b"a")
    copy(topic.engine, namespace)
    monkeypatch.setattr(TopicReader, "next", read_nothing_at_first)
    topic.producer().send(b"b")
    copy(topic.engine, namespace)
    assert looked


def test_an_idle_mirror_of_nothing_goes_on(
    topic: xl.Topic, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exclusivelog.cluster.mirror.POLL_SECONDS", 0.2)
    monkeypatch.setattr("exclusivelog.cluster.mirror.CHECK_SECONDS", 0.0)
    with mirror(topic.engine, namespace, "orders") as running:
        running.start(follow=True)
        assert not running.wait(2)


def test_verify_names_the_first_difference(topic: xl.Topic, namespace: Namespace) -> None:
    topic.producer().send_many([b"a"] * 10)
    copy(topic.engine, namespace)
    with mirror(topic.engine, namespace) as running:
        assert running.verify() == {"orders": (10, 0, 0)}
        topic.producer().send(b"b")
        assert running.verify() == {"orders": (10, 1, 0)}
        (message,) = namespace.messages("orders")
        with namespace.client() as client:  # the same copy once more
            producer = client.create_producer(f"persistent://{namespace.path}/orders")
            producer.send(message.data(), properties=message.properties())
        with pytest.raises(xl.MirrorMismatchError, match="offset 0 comes where 10 should be"):
            running.verify()


def test_verify_creates_nothing(engine: xl.Engine, namespace: Namespace) -> None:
    topics = f"persistent/{namespace.path}"
    with mirror(engine, namespace) as running:
        with pytest.raises(xl.TopicNotFoundError, match=r"nothing of .* is mirrored there"):
            running.verify()
        for name in ("idle", "orders", "bills"):
            engine.topic(name)
        with pytest.raises(xl.TopicNotFoundError, match=r"nothing of .* is mirrored there"):
            running.verify()
        engine.topic("orders").producer().send(b"x")
        with pytest.raises(xl.TopicNotFoundError, match=r"nothing of .* is mirrored there"):
            running.verify()
        assert namespace.call("GET", topics) == []
        copy(engine, namespace, "orders")
        assert running.verify() == {"bills": (0, 0, 0), "idle": (0, 0, 0), "orders": (1, 0, 0)}
        engine.topic("bills").producer().send(b"x")
        with pytest.raises(xl.TopicNotFoundError, match="'bills' is not mirrored there"):
            running.verify()
    with mirror(engine, namespace, "orders") as running:
        assert running.verify() == {"orders": (1, 0, 0)}
    assert namespace.call("GET", topics) == [f"persistent://{namespace.path}/orders"]


def test_verify_needs_to_know_which_topics_there_are(topic: xl.Topic, namespace: Namespace) -> None:
    nowhere = "http://127.0.0.1:1"
    with Mirror(topic.engine, namespace.url, admin=nowhere, check_policies=False) as running:
        with pytest.raises(xl.ClusterError, match=r"admin API cannot be reached.*--admin"):
            running.verify()
    assert namespace.call("GET", f"persistent/{namespace.path}") == []


def test_verify_of_an_empty_copy(topic: xl.Topic, namespace: Namespace) -> None:
    copy(topic.engine, namespace)
    topic.producer().send(b"x")
    with mirror(topic.engine, namespace) as running:
        with pytest.raises(xl.TopicNotFoundError, match=r"nothing of .* is mirrored there"):
            running.verify()


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("value", "its value: 7 bytes, the source's: 8 bytes; the first 6 bytes are the same"),
        ("key", "its key: 7 bytes, the source's: 8 bytes; the first 6 bytes are the same"),
        ("properties", "its properties: 1 of them, the source's: 1 of them"),
    ],
)
def test_differences_do_not_show_what_may_be_secret(
    topic: xl.Topic, namespace: Namespace, tmp_path: Path, field: str, said: str
) -> None:
    def send(engine: xl.Engine, text: str) -> None:
        fields = {"value": "", "key": "", "properties": ""} | {field: text}
        engine.topic("orders").producer(name="p").send(
            fields["value"].encode(),
            key=fields["key"].encode(),
            properties={"name": fields["properties"]},
            event_time=0,
        )

    topic.engine.backup(tmp_path / "backup")
    send(topic.engine, "secret1")
    copy(topic.engine, namespace)
    with xl.open(tmp_path / "backup") as engine:
        send(engine, "secret22")
        with pytest.raises(xl.MirrorMismatchError, match=f"at offset 0: .*: {said}$") as raised:
            copy(engine, namespace)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("plain", [False, True])
def test_a_copy_of_another_topic_is_not_taken_for_one_of_this(
    engine: xl.Engine, namespace: Namespace, plain: bool, tmp_path: Path
) -> None:
    # As a tool does that copies Pulsar topics: all is there, under another name.
    for name in ("orders", "bills"):
        engine.topic(name).producer().send(b"x")
    copy(engine, namespace, "orders", plain=plain)
    with namespace.client() as client:
        producer = client.create_producer(f"persistent://{namespace.path}/bills")
        for message in namespace.messages("orders"):
            producer.send(message.data(), properties=message.properties())
    said = "'bills' at offset 0: .* is a copy of topic 'orders'"
    with pytest.raises(xl.MirrorMismatchError, match=said):
        copy(engine, namespace, plain=plain)
    with mirror(engine, namespace, "bills", plain=plain) as running:
        with pytest.raises(xl.MirrorMismatchError, match=said):
            running.verify()
    with pytest.raises(xl.MirrorMismatchError, match=said):
        restore(tmp_path / "back", namespace.url, ["bills"], admin=namespace.admin)


def test_a_property_that_only_looks_like_ours(topic: xl.Topic, namespace: Namespace) -> None:
    topic.producer().send(b"a")
    with namespace.client() as client:
        producer = client.create_producer(f"persistent://{namespace.path}/orders")
        producer.send(b"hello", properties={"exclusivelog.offset": "seven"})
    with pytest.raises(xl.MirrorMismatchError, match="messages that no mirror has sent"):
        copy(topic.engine, namespace, plain=True)


# ---- the end -----------------------------------------------------------------------------


def test_closing_does_not_stop_the_process(namespace: Namespace) -> None:
    # While the broker's answers arrive: the client called back under the interpreter's lock.
    access = pulsar.Access.parse(namespace.url, admin=namespace.admin)
    longest, ended = 0.0, threading.Event()

    def beat() -> None:
        nonlocal longest
        before = time.monotonic()
        while not ended.wait(0.01):
            longest, before = max(longest, time.monotonic() - before), time.monotonic()

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        for i in range(8):
            cluster = pulsar.Cluster(access)
            writer = cluster.writer(f"t{i}")
            for n in range(1500):
                writer.send(pulsar.Outgoing(b"x" * 1000), n, lambda error, place: None)
            began = time.monotonic()
            cluster.close()
            assert time.monotonic() - began < 5.0  # it was 10.7
    finally:
        ended.set()
        heart.join()
    assert longest < 5.0


# ---- a trimmed source --------------------------------------------------------------------


def test_a_trimmed_source_is_an_error_unless_allowed(topic: xl.Topic, namespace: Namespace) -> None:
    with topic.producer() as producer:
        producer.send_many([b"%d" % i for i in range(10)])
        topic.trim(before=4)
        with pytest.raises(xl.OffsetTrimmedError, match="--trimmed earliest"):
            copy(topic.engine, namespace)
        assert namespace.messages("orders") == []
        copy(topic.engine, namespace, trimmed="earliest")
        producer.send(b"10")
    topic.trim(before=8)  # what the target has already may go
    copy(topic.engine, namespace)
    assert [one[0] for one in target(namespace)] == list(range(4, 11))
    with mirror(topic.engine, namespace) as running:
        assert running.verify() == {"orders": (3, 0, 4)}


def test_what_was_trimmed_before_it_was_mirrored_is_an_error(
    topic: xl.Topic, namespace: Namespace
) -> None:
    with topic.producer() as producer:
        producer.send_many([b"a", b"b"])
        copy(topic.engine, namespace)
        producer.send_many([b"c", b"d"])
        topic.trim(before=3)
    for trimmed in ("error", "earliest"):
        with pytest.raises(xl.OffsetTrimmedError, match="offsets 2 to 2 were trimmed"):
            copy(topic.engine, namespace, trimmed=trimmed)
    with mirror(topic.engine, namespace) as running:
        with pytest.raises(xl.OffsetTrimmedError, match="offsets 2 to 2 were trimmed"):
            running.verify()


# ---- the cluster says no -----------------------------------------------------------------


def test_policies_that_could_lose_messages_are_refused(
    topic: xl.Topic, make_namespace: Any
) -> None:
    topic.producer().send(b"a")
    undeduplicated, fleeting = make_namespace(deduplication=False), make_namespace(retention=1)
    with pytest.raises(xl.ClusterError, match=f"set-deduplication {undeduplicated.path} --enable"):
        copy(topic.engine, undeduplicated)
    with pytest.raises(xl.ClusterError, match=f"set-retention {fleeting.path} --time -1 --size -1"):
        copy(topic.engine, fleeting)
    copy(topic.engine, fleeting, check_policies=False)
    assert len(target(fleeting)) == 1


def test_a_second_mirror_is_refused(topic: xl.Topic, namespace: Namespace) -> None:
    topic.producer().send(b"a")
    with mirror(topic.engine, namespace) as running:
        running.start(follow=True)
        until(lambda: [one.position for one in running.progress()] == [1])
        with pytest.raises(xl.ProducerBusyError, match="perhaps a second mirror"):
            copy(topic.engine, namespace, timeout=1.0)


def test_a_namespace_that_does_not_exist(topic: xl.Topic, namespace: Namespace) -> None:
    nowhere = Namespace(namespace.broker, namespace.admin, "public/nowhere")
    with pytest.raises(xl.ClusterError, match="pulsar-admin namespaces create public/nowhere"):
        copy(topic.engine, nowhere)
    with pytest.raises(xl.ClusterError, match="no such tenant, namespace or topic"):
        copy(topic.engine, nowhere, check_policies=False)


def test_a_broker_that_is_not_there(topic: xl.Topic) -> None:
    nowhere = Namespace("pulsar://127.0.0.1:1", "http://127.0.0.1:1", "public/default")
    with pytest.raises(xl.ClusterError, match="admin API cannot be reached"):
        copy(topic.engine, nowhere)
    with pytest.raises(xl.ClusterError, match="may be down"):
        copy(topic.engine, nowhere, check_policies=False, timeout=2.0)


def test_a_full_broker(topic: xl.Topic, namespace: Namespace) -> None:
    with topic.producer() as producer:
        producer.send_many([b"x" * 1000] * 3000)
        copy(topic.engine, namespace)
        quota = {"limitSize": 1000, "limitTime": -1, "policy": "producer_exception"}
        namespace.call("POST", f"namespaces/{namespace.path}/backlogQuota", quota)
        subscription = f"persistent/{namespace.path}/orders/subscription/slow"
        namespace.call("PUT", subscription, {"ledgerId": 0, "entryId": 0, "partitionIndex": -1})
        producer.send(b"y")
        with pytest.raises(xl.ClusterError, match=r"it is full: .*backlog quota"):
            copy(topic.engine, namespace)
        namespace.call("DELETE", subscription + "?force=true")
        namespace.call("DELETE", f"namespaces/{namespace.path}/backlogQuota")
        copy(topic.engine, namespace)
    assert target(namespace) == source(topic)


def test_a_topic_with_partitions_is_refused(topic: xl.Topic, namespace: Namespace) -> None:
    topic.producer().send(b"a")
    namespace.call("PUT", f"persistent/{namespace.path}/orders/partitions", 2)
    with pytest.raises(xl.ClusterError, match="'orders' has 2 partitions"):
        copy(topic.engine, namespace)


@pytest.mark.parametrize(
    "url",
    [
        "http://a/b/c",
        "pulsar://host:6650",
        "pulsar://host:6650/tenant",
        "pulsar://u:secret@h/t/n",
        "pulsar://u:p/secret@h/t",
        "pulsar://h/t/n?token=secret",
        "pulsar://h/t/n?token=/secret",
        "pulsar://h/t/n#secret",
    ],
)
def test_urls_that_are_none(engine: xl.Engine, url: str) -> None:
    with pytest.raises(ValueError, match="pulsar://host:port/tenant/namespace") as raised:
        Mirror(engine, url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "admin", ["localhost:8080", "file:///etc", "http://u:secret@h", "http://a b"]
)
def test_admin_urls_that_are_none(engine: xl.Engine, admin: str) -> None:
    with pytest.raises(ValueError, match="http://host:port or https://") as raised:
        Mirror(engine, "pulsar://127.0.0.1:1/public/default", admin=admin)
    assert "secret" not in str(raised.value)


def test_tokens_that_are_none_are_not_shown(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = "pulsar://127.0.0.1:1/public/default"
    monkeypatch.setenv("EXCLUSIVELOG_TOKEN", "secret\n")
    assert pulsar.Access.parse(url).token == "secret"
    for wrong in ("sec\nret", "sec ret", "sec\0ret", "s\xfccret"):
        with pytest.raises(ValueError, match="the token has blanks, line breaks") as raised:
            Mirror(engine, url, token=wrong)
        assert "ret" not in str(raised.value).replace("secret", "")
        assert wrong not in str(raised.value)
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        Mirror(engine, url, token_file=str(tmp_path / "token"))


@pytest.mark.parametrize("answer", [b"<html>hello</html>", b"no HTTP at all"])
def test_an_admin_url_of_something_else(engine: xl.Engine, answer: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)
    with answering(head + answer if answer[:1] == b"<" else answer) as port:
        with pytest.raises(xl.ClusterError, match=f"127.0.0.1:{port}.*give its URL"):
            Mirror(engine, "pulsar://127.0.0.1:1/public/default", admin=f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def answering(data: bytes) -> Iterator[int]:
    """The port of a server that gives this answer to one request."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(30)
                connection.recv(65536)
                connection.sendall(data)

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        thread.join(PATIENCE)


@pytest.mark.parametrize("follow", [False, True])
def test_a_topic_that_cannot_go_on_does_not_hold_others_up(
    engine: xl.Engine, namespace: Namespace, follow: bool
) -> None:
    with namespace.client() as client:
        client.create_producer(f"persistent://{namespace.path}/bad").send(b"hello")
    for name in ("bad", "good", "idle"):
        with engine.topic(name).producer() as producer:
            producer.send_many([b"x" * 1000] * (20_000 if name == "good" else 1))
    with mirror(engine, namespace) as running:
        with pytest.raises(xl.MirrorMismatchError, match="'bad'"):
            within(lambda: running.run(follow))
        found = {one.topic: one.position for one in running.progress()}
        assert found == {"bad": 0, "good": 20_000, "idle": 1}


@pytest.mark.parametrize("kind", ["ConnectError", "Timeout"])
def test_a_look_at_the_target_waits_for_a_broker_that_was_there(
    topic: xl.Topic, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    access = pulsar.Access.parse(namespace.url, admin=namespace.admin)
    with pulsar.Cluster(access) as cluster:
        cluster.writer("orders").close()
        client, failures = cluster.client, iter(range(3))
        partitions = client.get_topic_partitions

        def away(full: str) -> Any:
            if next(failures, None) is None:
                return partitions(full)
            import pulsar as library

            raise getattr(library, kind)("away")

        monkeypatch.setattr(client, "get_topic_partitions", away)
        with within(lambda: cluster.reader("orders")) as reader:
            assert reader.next() is None
        assert next(failures, None) is None


def test_a_follower_that_cannot_begin_a_new_topic_ends(
    engine: xl.Engine, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A container has no room for another thread, for example.
    with mirror(engine, namespace) as running:
        running.start(follow=True)

        def start(self: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr("exclusivelog.cluster.mirror.TopicMirror.start", start)
        engine.topic("orders")
        with pytest.raises(RuntimeError, match="can't start new thread"):
            within(lambda: running.wait(PATIENCE))


NAMES = [
    *". .. a A %2F a=2Fb a/b".split(),
    "/" * 255,
    "\u00fc" * 127,
    *"partition-0 x-partition-0 -partition-0 x-partition-0-partition-1 x-partition-1y".split(),
    *"x-partition- x__transaction_pending_ack a-DLQ * ?x=1#".split(),
    " ",
]


def test_topics_of_all_names(engine: xl.Engine, namespace: Namespace, tmp_path: Path) -> None:
    for name in NAMES:
        engine.topic(name).producer("shared").send(name.encode())
    copy(engine, namespace)
    assert restore(
        tmp_path / "back", namespace.url, admin=namespace.admin, timeout=PATIENCE
    ) == dict.fromkeys(sorted(NAMES), 1)
    with xl.open(tmp_path / "back") as back:
        for name in NAMES:
            assert back.topic(name).reader().read_next(PATIENCE).value == name.encode()


def test_wrong_arguments(engine: xl.Engine) -> None:
    for wrong in ({"topics": "orders"}, {"trimmed": "no"}, {"timeout": 0}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            Mirror(engine, "pulsar://127.0.0.1:1/public/default", **wrong)  # type: ignore[arg-type]
