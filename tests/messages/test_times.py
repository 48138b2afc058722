"""Datetimes: those without a time zone are local time, wherever one is taken (rules G1, G5, G8)."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator

import pytest

import exclusivelog as xl
from exclusivelog.messages import to_ms
from testing.patience import PATIENCE

pytestmark = [pytest.mark.once, pytest.mark.rule("G1", "G5", "G8")]
HOUR = 3_600_000


@pytest.fixture(params=["UTC0", "EST5", "IST-5:30"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """This process is in that zone; how many ms it is behind UTC."""
    behind = {"UTC0": 0, "EST5": 5 * HOUR, "IST-5:30": -11 * HOUR // 2}
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield behind[request.param]
    time.tzset()


def test_a_naive_datetime_is_local_time(zone) -> None:
    assert to_ms(dt.datetime(1970, 1, 1, 0, 0, 1)) == 1000 + zone
    assert to_ms(dt.datetime(2026, 7, 1, 12)) == dt.datetime(2026, 7, 1, 12).timestamp() * 1000
    # The first and the last one that there are, which Python itself does not convert.
    assert to_ms(dt.datetime(1, 1, 1)) == -62_135_596_800_000 + zone
    assert to_ms(dt.datetime.max) == 253_402_300_799_999 + zone


def test_a_datetime_with_a_zone_is_that_moment(zone) -> None:
    east = dt.timezone(dt.timedelta(hours=9, minutes=30))
    assert to_ms(dt.datetime(1970, 1, 1, 9, 30, tzinfo=east)) == 0


class Undecided(dt.tzinfo):
    """A zone that does not tell its offset: Python takes such a datetime for a naive one."""

    def utcoffset(self, when: dt.datetime | None) -> None:
        return None


def test_a_zone_that_tells_no_offset_is_none(zone) -> None:
    assert to_ms(dt.datetime(1970, 1, 1, tzinfo=Undecided())) == zone


def test_a_timestamp_of_pandas_is_a_datetime(zone) -> None:
    pandas = pytest.importorskip("pandas")
    naive = pandas.Timestamp("1970-01-01T00:00:01.5")
    assert to_ms(naive) == 1500 + zone
    assert to_ms(naive.tz_localize("UTC")) == 1500


def test_an_hour_that_comes_twice_is_told_by_its_fold(monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        twice = dt.datetime(2026, 10, 25, 2, 30)
        assert to_ms(twice.replace(fold=1)) - to_ms(twice) == HOUR
    time.tzset()


def test_every_call_takes_naive_datetimes_for_local_time(topic, zone) -> None:
    naive = dt.datetime(2026, 1, 2, 3, 4, 5)
    with topic.producer() as producer:
        producer.send(b"a", event_time=naive)
        producer.send_async(b"b", event_time=naive).result(PATIENCE)
        producer.send_many([b"c"], event_times=[naive])
    moment = naive.replace(tzinfo=dt.UTC) + dt.timedelta(milliseconds=zone)
    assert [message.event_at for message in topic.reader()] == [moment] * 3
    time.sleep(0.002)
    now = dt.datetime.now()
    hour = dt.timedelta(hours=1)
    assert topic.reader(now).position == 3
    assert topic.reader(now - hour).position == 0
    reader = topic.reader()
    reader.seek(now)
    assert reader.position == 3
    assert topic.trim(now - hour) == 0
    assert topic.trim(now) == 3


def test_a_map_as_it_was_takes_local_time(topic, zone) -> None:
    with xl.SharedMap(topic) as shared:
        shared.put("a", 1)
        time.sleep(0.005)
        now = dt.datetime.now()
        time.sleep(0.005)
        shared.put("a", 2)
        assert shared.at(now) == {"a": 1}
        assert shared.at(now - dt.timedelta(hours=1)) == {}
        with shared.watch("a", start=now) as watch:
            assert watch.read_next(timeout=PATIENCE).value == 2
