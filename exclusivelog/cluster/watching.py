"""Watching who owns topics: the changes come from the logs that the engine follows anyway.

Each watched topic has one story (`history`). It takes each record that the topic's log folds, and
its events go to all watches of the topic.

The death of an owner is no record. So the engine's worker asks for it, every `POLL_SECONDS`, while
an owner of another engine is watched. It only tells what it finds, and evicts nobody: an owner that
was cut off keeps its topic until another producer asks for that.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from exclusivelog import _core
from exclusivelog.arguments import ago, as_int, wrong_start
from exclusivelog.cluster.following import TopicLog, now_ms
from exclusivelog.cluster.history import Story, told
from exclusivelog.cluster.ordered import Position
from exclusivelog.cluster.rule import Judged
from exclusivelog.errors import ExclusiveLogError
from exclusivelog.events import Event
from exclusivelog.messages import to_ms
from exclusivelog.refusals import watch_overtaken
from exclusivelog.waits import READER_LOOK_UP_SECONDS

__all__ = ["WatchedOwner", "Watching"]

# Between checks of an owner that lives, and of one that was found dead: it may be back.
POLL_SECONDS, GONE_POLL_SECONDS, IDLE_SECONDS = 0.1, 1.0, 60.0
MOST_KEPT = 250_000  # events that a watch has not taken; a directory keeps as many by default
# A place is the number of a record, times PLACES, and the index of one of its events. What was
# found after a record has the last index.
PLACES, FOUND = 8, 7

Told = tuple[int, Event]


def first_place(position: Position | None) -> int:
    """The place of the first event of this record; 0: there was no record."""
    return 0 if position is None else int.from_bytes(position) * PLACES


def after(position: Position | None) -> int:
    """The first place after this record."""
    return 0 if position is None else first_place(position) + PLACES


def placed(position: Position | None, events: Iterable[Event]) -> list[Told]:
    """The events of this record, with their places."""
    return list(enumerate(events, first_place(position)))


class WatchedOwner:
    """The changes of a topic's owner that one watch takes; see `backend.OwnerChanges`."""

    def __init__(self, watched: Watched) -> None:
        topic = watched.topic
        self.key, self.path = (id(topic.owners), topic.id), topic.host.path
        self.position = 0
        self._topic, self._watched = topic, watched
        self._told: deque[Told] = deque()
        self._overtaken = False

    def begin(self, position: int, events: Iterable[Told] = ()) -> None:
        """Continue at this place, with these events, which come before all that were told."""
        self.position = position
        self._told.extendleft(reversed(list(events)))

    def tell(self, events: Iterable[Told]) -> None:
        """Keep these events until they are taken."""
        self._told.extend(events)
        if len(self._told) > MOST_KEPT:
            self._overtaken = True
            self._told.clear()

    def take(self) -> Event | None:
        """The next change, if it is there."""
        self._topic.host.check_open()
        if self._overtaken:
            raise watch_overtaken(self._topic.name, MOST_KEPT)
        if not self._told:
            self._topic.check()
            return None
        place, event = self._told.popleft()
        self.position = place + 1
        return event

    def catch_up(self) -> None:
        """Have all changes up to now there: read the topic's log up to its end."""
        self._topic.catch_up()

    def mark(self) -> int:
        """A number that changes when there may be another change."""
        return self._topic.owners.mark()

    def wait(self, seen: int, seconds: float | None) -> None:
        """Sleep until `mark()` is no longer `seen`, or for so many seconds, or less."""
        most = READER_LOOK_UP_SECONDS
        left = most if seconds is None else min(max(seconds, 0.0), most)
        self._topic.owners.words.wait(0, seen, int(left * 1e9))

    def await_mark(self, seen: int, seconds: float) -> None:
        """As `wait`; any thread may call it while another one takes changes."""
        self._topic.host.check_open()
        self._topic.check()
        self.wait(seen, seconds)

    def close(self) -> None:
        """Take no more, and wake a thread that waits."""
        if not self._topic.host.forked:  # else threads of the parent may hold the locks
            self._watched.drop(self)
            self._topic.owners.wake()


class Watched:
    """A topic whose owner is watched. It is begun, and told of each record, with the topic's
    lock."""

    def __init__(self, topic: TopicLog) -> None:
        self.topic = topic
        self.story = Story(topic.name, topic.state, topic.waiters.records())
        self._watches: weakref.WeakSet[WatchedOwner] = weakref.WeakSet()
        self._look_at = 0.0  # by the monotonic clock
        topic.watches.append(self._saw)

    def add(self, watch: WatchedOwner) -> tuple[Position | None, list[Told]]:
        """Tell this watch what comes from now on. Returns the position of the last record before
        that, and what was found since."""
        with self.topic.changed:
            self._watches.add(watch)
            death = self.story.death
            found = [] if death is None else [(self._found_at, death)]
            return self.topic.state.position, found

    def drop(self, watch: WatchedOwner) -> None:
        """Tell it nothing more."""
        with self.topic.changed:
            self._watches.discard(watch)

    def _saw(self, judged: Judged, data: bytes) -> None:
        self._tell(placed(judged.position, self.story.go_on(judged, data)))

    def _tell(self, events: list[Told]) -> None:
        if events:
            for watch in self._watches:
                watch.tell(events)
            self.topic.owners.wake()

    # ---- what is no record ---------------------------------------------------------------

    @property
    def owner_elsewhere(self) -> str:
        """The id of the owner's engine, if it is another one than this; else ""."""
        owner = self.story.owner
        engine = "" if owner is None else owner.holder.engine_id
        return "" if engine == self.topic.host.id else engine

    @property
    def seconds(self) -> float:
        """Seconds until the next `look_if_due`."""
        left = self._look_at - _core.monotonic()
        return max(0.0, left) if self._watches and self.owner_elsewhere else IDLE_SECONDS

    def look_if_due(self) -> None:
        """Find out whether the owner lives, and tell it."""
        if self.seconds == 0.0:
            self.look()

    def look(self) -> None:
        """Do so now."""
        engine = self.owner_elsewhere
        if not engine:
            return
        lives = self.topic.host.seems_to_live(engine)
        self._look_at = _core.monotonic() + (POLL_SECONDS if lives else GONE_POLL_SECONDS)
        if not lives:
            self.topic.catch_up()  # it may have released the topic before its end
        with self.topic.changed:
            if engine == self.owner_elsewhere:
                events = self.story.lives(now_ms()) if lives else self.story.died(now_ms())
                self._tell([(self._found_at, event) for event in events])

    @property
    def _found_at(self) -> int:
        return first_place(self.topic.state.position) + FOUND


class Watching:
    """The topics of an engine whose owners are, or were, watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[TopicLog, Watched] = {}

    def open(self, topic: TopicLog, start: Any) -> WatchedOwner:
        """Watch the owner of a topic from this start on."""
        since = ago(start) if isinstance(start, dt.timedelta) else as_int(start)
        check_start(since)
        topic.catch_up()
        with self._lock, topic.changed:
            watched = self._watched.get(topic)
            if watched is None:
                watched = self._watched[topic] = Watched(topic)
        watched.look()  # a watch is not told of who had died before it began
        watch = WatchedOwner(watched)
        end, found = watched.add(watch)
        if since == "latest":
            watch.begin(after(end))
        else:
            begin(watch, topic, since, end, found)
        return watch

    def _all(self) -> list[Watched]:
        with self._lock:
            return list(self._watched.values())

    def poll(self) -> None:
        """Look whether owners live. Called in the background thread."""
        for watched in self._all():
            with contextlib.suppress(ExclusiveLogError):  # the broker is restarting, say
                watched.look_if_due()

    @property
    def seconds(self) -> float:
        """Seconds until the next `poll`."""
        return min((watched.seconds for watched in self._all()), default=IDLE_SECONDS)


# ---- where a watch begins ------------------------------------------------------------------


def check_start(start: Any) -> None:
    """Raise ValueError unless a watch can begin there."""
    whole = isinstance(start, int) and not isinstance(start, bool)
    if not (whole or isinstance(start, dt.datetime) or start in ("earliest", "latest")):
        raise wrong_start(start)


def begin(
    watch: WatchedOwner, topic: TopicLog, start: Any, end: Position | None, found: list[Told]
) -> None:
    """Give a watch the events from this start up to the record `end`, and those found since."""
    told_so_far = [
        each for position, events in told(topic, end) for each in placed(position, events)
    ]
    events = [*told_so_far, *found]
    if start == "earliest":
        watch.begin(0, events)
    elif isinstance(start, dt.datetime):
        since = to_ms(start)
        watch.begin(after(end), [each for each in events if each[1].time >= since])
    elif start < 0:
        watch.begin(after(end), events[start:])
    else:
        watch.begin(start, [each for each in events if each[0] >= start])
