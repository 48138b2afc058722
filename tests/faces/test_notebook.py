"""What a notebook shows of engines, topics, messages and maps: short, escaped, never an error."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.notebook import LONGEST, MOST_CHARACTERS

pytestmark = pytest.mark.once

HOSTILE = "<script>alert(1)</script>&\"'<img src=//evil>"
LARGEST = 12_000  # characters of what is shown


class Shown(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.rows = 0
        self.text = ""
        html = thing._repr_html_()
        assert len(html) < LARGEST
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.rows += tag == "tr"
        assert attributes == []  # nothing to load, and nothing to run

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def shown(thing: Any) -> Shown:
    found = Shown(thing)
    assert found.tags <= {"div", "b", "table", "tr", "th", "td", "code"}
    return found


def test_an_engine_lists_ten_topics(path: str) -> None:
    with xl.open(path, name=HOSTILE) as engine:
        for number in range(13):
            engine.topic(f"{HOSTILE}{number:02}")
        with engine.topic(f"{HOSTILE}00").producer("exclusive", name=HOSTILE) as producer:
            producer.send_many([b"x"] * 1234)
            found = shown(engine)
    assert found.rows == 11
    assert f"{HOSTILE}09" in found.text
    assert f"{HOSTILE}10" not in found.text
    assert "1,234" in found.text
    assert "3 more" in found.text
    assert "<Engine" in shown(engine).text  # closed
    assert shown(engine).rows == 0


def test_a_topic_shows_its_facts(engine: xl.Engine, topic: xl.Topic) -> None:
    with topic.producer(name="a") as one, topic.producer(name="b"):
        one.send(b"x")
        assert "2 shared" in shown(topic).text
    with topic.producer("exclusive", name="leader"):
        topic.trim(before=1)
        text = shown(topic).text
    assert "owner leader" in " ".join(text.split())
    assert "first offset 1" in " ".join(text.split())
    engine.close()
    assert "<Topic 'orders'>" in shown(topic).text


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def refuse(data: bytes) -> object:
    raise ValueError("poison")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"hello", "b'hello'"),
        (None, "value None"),
        (HOSTILE.encode(), "<script>alert(1)"),
        (b"x" * (1 << 20), f"and {(1 << 20) - MOST_CHARACTERS:,} more"),
    ],
)
def test_a_message_shows_its_parts_cut(topic: xl.Topic, value: bytes | None, text: str) -> None:
    with topic.producer(name=HOSTILE) as producer:
        producer.send(value, key=b"k\xff" * 1000, properties={HOSTILE: HOSTILE * 100})
    found = shown(topic[0])
    assert text in " ".join(found.text.split())
    assert HOSTILE in found.text
    assert len(found.text) < 4 * LONGEST


def test_what_cannot_be_decoded_or_told_is_shown_all_the_same(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send(b"raw value")
    for loads in (refuse, lambda _: Broken(), lambda _: [b"y" * 10**6] * 3, lambda _: 10**5000):
        (message,) = topic.reader(deserializer=loads)
        found = shown(message)
        assert "value" in found.text
    assert "b'raw value'" in shown(next(iter(topic.reader(deserializer=refuse)))).text


def test_a_map_shows_ten_keys(engine: xl.Engine) -> None:
    with xl.SharedMap(engine.topic("settings"), value=xl.serde.json) as settings:
        assert shown(settings).rows == 1
        settings.put_all({f"{HOSTILE}{n:02}": {"n": n, "long": "x" * 5000} for n in range(12)})
        found = shown(settings)
        assert (found.rows, HOSTILE in found.text) == (11, True)
        assert "2 more" in found.text
    assert "<SharedMap on topic 'settings'>" in shown(settings).text


def test_a_value_of_a_map_that_cannot_be_read_hides_no_other(engine: xl.Engine) -> None:
    half = xl.serde.Serde(xl.serde.bytes.dumps, xl.serde.json.loads)
    with xl.SharedMap(engine.topic("settings"), value=half) as settings:
        settings.put("good", b"1")
        settings.put("bad", b"{")
        found = shown(settings)
    assert found.rows == 3
    assert "1" in found.text
    assert "'settings'" in found.text


def test_a_cluster_is_not_asked(monkeypatch: pytest.MonkeyPatch, engine: xl.Engine) -> None:
    """It may be far away, or gone: showing it must not wait for it."""
    topic = engine.topic("orders")

    def asked(*_: object) -> Any:
        raise AssertionError("it was asked")

    monkeypatch.setattr(engine, "path", "pulsar://127.0.0.1:1/a/b")
    monkeypatch.setattr(xl.Engine, "topics", asked)
    monkeypatch.setattr(xl.Topic, "holders", property(asked))
    assert "on pulsar://127.0.0.1:1/a/b" in shown(engine).text
    assert "<Topic 'orders'>" in shown(topic).text
