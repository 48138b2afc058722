"""The places of URLs: a namespace of Apache Pulsar, or a name in memory.

An engine in a Pulsar namespace is registered as a producer of the non-persistent topic
`__engines__`, which sends nothing. The producer's name is the engine's id, and a broker admits each
name once: a client that gets the name knows that the engine is dead. The broker notices at once
that a process was killed. If it is stopped or disconnected, a ping shows that within 5 s, when
another client requests the name.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from exclusivelog import _core, threads
from exclusivelog.cluster.memory import MemoryPlace
from exclusivelog.cluster.native import Native
from exclusivelog.cluster.ordered import OrderedLog, Place, Position, Record
from exclusivelog.cluster.pulsar import Access, Cluster, admitted, ledger_name, topic_name
from exclusivelog.cluster.pulsar_log import PLACE, PulsarLog
from exclusivelog.errors import ClusterError, UnsupportedError
from exclusivelog.foreign import Ignoring
from exclusivelog.types import EngineInfo

__all__ = ["SCHEMES", "PulsarPlace", "find"]

TIMEOUT = 30.0  # seconds, for the broker to answer
ENGINES = "__engines__"
WRITTEN = "exclusivelog.written"
# For which results of `lives` are cached: deaths are noticed soon, and one take-over asks once.
REMEMBER_LIVING_SECONDS, REMEMBER_GONE_SECONDS = 0.02, 0.2
SOON_SECONDS = 0.1  # within which a broker says that a process lives that is not stopped
# If the admin API fails to return the end of a topic, it is not asked again for so many seconds and
# so many times the duration of the failed call.
ASK_AGAIN_SECONDS, ASK_AGAIN_TIMES = 1.0, 100


class Asked:
    """A question that may take long, asked in a thread of its own."""

    def __init__(self, place: str, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._begun = self._ended = _core.monotonic()
        self._over = threading.Event()
        self._found = False
        self._error: BaseException | None = None
        thread = threading.Thread(target=self._run, name="exclusivelog-asks", daemon=True)
        threads.start(place, thread)

    def _run(self) -> None:
        try:
            self._found = self._ask()
        except BaseException as error:
            self._error = error
        finally:
            self._ended = _core.monotonic()
            self._over.set()

    @property
    def is_old(self) -> bool:
        """Has nobody taken the answer for so long that it may no longer be true?"""
        return self._over.is_set() and _core.monotonic() > self._ended + REMEMBER_LIVING_SECONDS

    def wait(self, seconds: float) -> bool:
        """Wait until the answer is there; False if it is not so many seconds after the question."""
        return self._over.wait(max(0.0, self._begun + seconds - _core.monotonic()))

    def answer(self) -> bool:
        """Wait for the answer; raises the error of the call."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._found


class PulsarPlace:
    """A namespace of a Pulsar cluster that one engine has open."""

    def __init__(self, access: Access, check_policies: bool = True) -> None:
        self.url = access.url
        self._access = access
        self._cluster = Cluster(access, TIMEOUT)
        self._address = f"non-persistent://{access.path}/{ENGINES}"
        self._present: Native | None = None
        self._known: dict[str, tuple[float, bool]] = {}
        self._asked: dict[str, Asked] = {}  # without an answer yet
        self._lock = threading.Lock()
        self._checks = check_policies
        if check_policies:
            self._cluster.check_policies()

    def __repr__(self) -> str:
        return f"PulsarPlace({self.url!r})"

    # ---- topics --------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """The names of the topics, sorted, without those whose names show that another program made
        them."""
        found = self._cluster.names()
        return sorted(ledger_name(name) for name in found if topic_name(ledger_name(name)) == name)

    def has(self, topic: str) -> bool:
        """Is there a topic of that name? True if the admin API cannot be used."""
        return not self._cluster.missing([topic])

    def open(self, topic: str) -> OrderedLog:
        """The log of a topic, which is made if there is none.

        Raises ClusterError if the topic has policies of its own that could lose messages."""
        if self._checks:
            self._cluster.check_topic(topic)
        return _AskedLog(self._access, topic, self._cluster)

    def was_written(self, topic: str) -> bool:
        """Does Pulsar know that the topic has had messages? By a property of the topic, which stays
        when messages are removed. False if the admin API cannot be used."""
        return self._cluster.has_property(topic, WRITTEN)

    def note_written(self, topic: str) -> None:
        """Set that property, if the token may."""
        with contextlib.suppress(ClusterError):
            self._cluster.set_property(topic, WRITTEN)

    # ---- engines -------------------------------------------------------------------------

    def join(self, engine: EngineInfo) -> None:
        """This engine lives from now on, until `close`, or the end of its process."""
        facts = {
            "name": engine.name,
            "pid": str(engine.pid),
            "facts": json.dumps(engine.properties),
        }
        try:
            self._present = self._producer(engine.id, facts)
        except Exception as error:
            self._cluster.failed("this engine cannot be announced", error)

    def _producer(self, name: str, facts: Mapping[str, str]) -> Native:
        producer = admitted(
            lambda: self._cluster.client.create_producer(
                self._address, producer_name=name, properties=dict(facts), batching_enabled=False
            )
        )
        return Native(producer, repr(self))

    def lives(self, engine: str, patient: bool = True) -> bool:
        """Does the engine of that id live? The broker answers late where it has to ping a stopped
        process. If not `patient`, do not wait for such an answer: the engine counts as living."""
        with self._lock:
            until, found = self._known.get(engine, (0.0, None))
            if found is not None and _core.monotonic() < until:
                return found
            asked = self._asked.get(engine)
            if asked is None or asked.is_old:
                asked = self._asked[engine] = Asked(self.url, lambda: self._is_taken(engine))
        if not patient and not asked.wait(SOON_SECONDS):
            return found is not False
        return self._take_answer(engine, asked)

    def _take_answer(self, engine: str, asked: Asked) -> bool:
        try:
            found = asked.answer()
        finally:
            with self._lock:
                if self._asked.get(engine) is asked:
                    del self._asked[engine]
        seconds = REMEMBER_LIVING_SECONDS if found else REMEMBER_GONE_SECONDS
        with self._lock:
            self._known[engine] = _core.monotonic() + seconds, found
        return found

    def _is_taken(self, name: str) -> bool:
        try:
            producer = self._producer(name, {})
        except Exception as error:
            if type(error).__name__ == "ProducerBusy":
                return True
            self._cluster.failed(f"whether engine {name} lives cannot be found out", error)
        with Ignoring(Exception):
            producer.use().close()
        return False

    def engines(self) -> list[EngineInfo]:
        """The live engines, from the admin API."""
        there = self._cluster.admin("GET", f"non-persistent/{self._access.path}/{ENGINES}/stats")
        found = []
        for publisher in there.get("publishers", []):
            facts = publisher.get("metadata", {})
            if "pid" in facts:
                found.append(
                    EngineInfo(
                        publisher["producerName"],
                        facts["name"],
                        int(facts["pid"]),
                        json.loads(facts["facts"]),
                        0.0,
                    )
                )
        return found

    def close(self) -> None:
        """Unregister the engine, and close the connection."""
        present, self._present = self._present, None
        if present is not None and not present.inherited:
            with Ignoring(Exception):
                present.use().close()
        self._cluster.close()
        with self._lock:
            asked, self._asked = list(self._asked.values()), {}
        for each in asked:  # their calls of the client fail now; none is left as the process ends
            each.wait(TIMEOUT)

    def forget(self) -> None:
        """In a forked child: `Cluster` detects that itself; the threads that ask are the
        parent's."""
        self._lock, self._asked = threading.Lock(), {}


class _AskedLog(PulsarLog):
    """A log that gets its end from the admin API, in a few ms. Without that, it opens a reader at
    the end, which takes the client 0.1 s."""

    def __init__(self, access: Access, topic: str, cluster: Cluster) -> None:
        super().__init__(access, topic, timeout=TIMEOUT, check_policies=False)
        self._admin = cluster
        self._path = f"persistent/{access.path}/{topic_name(topic)}/lastMessageId"
        self._ask_at = 0.0  # by the monotonic clock

    def end(self) -> Position | None:
        """The position of the last record at this moment; None for an empty log."""
        self.check_open()
        last = None
        began = _core.monotonic()
        if began >= self._ask_at:
            try:
                last = self._admin.admin("GET", self._path)
            except ClusterError:
                now = _core.monotonic()
                self._ask_at = now + ASK_AGAIN_SECONDS + ASK_AGAIN_TIMES * (now - began)
        # No entry: the topic is empty, or has just begun a new ledger.
        if last is None or last["entryId"] < 0 or last["ledgerId"] < 0:
            return super().end()
        return Position(PLACE.pack(last["ledgerId"], last["entryId"], 0))

    def last(self) -> Record | None:
        """The last record at this moment; None for an empty log."""
        end = self.end()
        return None if end is None else self.at(end)


# ---- by URL ------------------------------------------------------------------------------

Opening = Callable[[str, Mapping[str, Any]], Place]


def _memory(url: str, options: Mapping[str, Any]) -> Place:
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option}= is for clusters; memory:// takes none")
    name = url.partition("://")[2]
    if not name:
        raise ValueError(f"path={url!r}: it takes memory:// and a name")
    return MemoryPlace.named(name)


def _pulsar(url: str, options: Mapping[str, Any]) -> Place:
    checked = options["check_policies"] is not False
    access = Access.parse(
        url, **{name: value for name, value in options.items() if name != "check_policies"}
    )
    return PulsarPlace(access, checked)


# The scheme of a URL -> what opens the place.
SCHEMES: dict[str, Opening] = {"memory": _memory, "pulsar": _pulsar, "pulsar+ssl": _pulsar}


def find(url: str, options: Mapping[str, Any]) -> Place:
    """The place of a URL. UnsupportedError for an unknown scheme; it does not show the rest of the
    URL, which may contain a secret."""
    scheme = url.partition("://")[0]
    opening = SCHEMES.get(scheme)
    if opening is None:
        raise UnsupportedError(
            f"path: no engine opens {scheme}:// URLs; give a local directory, or "
            "pulsar://host:port/tenant/namespace"
        )
    return opening(url, options)
