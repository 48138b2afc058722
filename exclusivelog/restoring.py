"""Restore a ledger from the topics of a Pulsar namespace."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator

from exclusivelog import _core
from exclusivelog.cluster.copies import AnyCopies
from exclusivelog.cluster.cursor import frames_from
from exclusivelog.cluster.engine import ClusterEngine
from exclusivelog.cluster.frames import Frame
from exclusivelog.cluster.mirror import EngineTopicError, Target
from exclusivelog.cluster.places import PulsarPlace
from exclusivelog.cluster.pulsar import Access, Cluster
from exclusivelog.errors import ClusterError, LedgerCorruptedError, LedgerError, TopicNotFoundError
from exclusivelog.foreign import Ignoring, pass_on_foreign, remove_tree
from exclusivelog.local.files import close_locked, sync_directory
from exclusivelog.local.log.reading import verify
from exclusivelog.local.maintenance.restoring import restore_id, restore_topic
from exclusivelog.local.storage.ledger import DEFAULT_MAP_SIZE, DEFAULT_MAX_READERS, Ledger
from exclusivelog.local.storage.opening import Options

UNFINISHED = ".restoring"
NEW = Options(True, 0o700, DEFAULT_MAP_SIZE, DEFAULT_MAX_READERS, readonly=False)


def restore(
    path: str | os.PathLike[str],
    url: str,
    topics: Iterable[str] | None = None,
    *,
    timeout: float = 60.0,
    admin: str | None = None,
    token: str | None = None,
    token_file: str | None = None,
    tls_trust_certs: str | None = None,
) -> dict[str, int]:
    """Create a ledger from topics that were mirrored to a Pulsar namespace (rule J4), or that
    engines on a cluster wrote there.

    - `path`: a directory that does not exist, or is empty. The ledger is created in
      `<path>.restoring`, verified and then renamed, so `path` never has a part of it. If this was
      killed, run it again.
    - `url`: pulsar://host:port/tenant/namespace, or pulsar+ssl://...
    - `topics`: names of topics. None, the default: all topics of the namespace, according to its
      admin API.
    - `timeout`: seconds that the broker has for an answer.
    - `admin`, `token`, `token_file`, `tls_trust_certs`: as for `exclusivelog.cluster.Mirror`.

    Returns {topic: number of messages}. Offsets, epochs, keys, times, properties, producer names
    and sequence ids are the same as before. What is not part of a message is lost: epochs in which
    nothing was sent, termination, retention, reader groups, announcements. Stop the mirror first:
    messages that it sends meanwhile are not restored.

    Raises LedgerError if the directory is not empty, or is a mount point; TopicNotFoundError if a
    topic does not exist or has no messages; MirrorMismatchError if messages are missing; and
    ClusterError.

    ```python
    from exclusivelog.restoring import restore

    restore("data/log", "pulsar://broker:6650/tenant/backup")
    ```
    """
    access = Access.parse(
        url, admin=admin, token=token, token_file=token_file, tls_trust_certs=tls_trust_certs
    )
    where = os.path.realpath(path)
    _check_free(where)
    with _unfinished(where + UNFINISHED) as folder, Cluster(access, timeout) as cluster:
        there = cluster.topics() if topics is None else _named(cluster, topics)
        made = os.path.join(folder, "log")
        counts = _restore(made, cluster, there)
        if missing := [name for name, count in counts.items() if topics is not None and not count]:
            raise TopicNotFoundError(
                f"{cluster.access.url} has no messages of topic {missing[0]!r}"
            )
        if not any(counts.values()):
            raise TopicNotFoundError(f"{cluster.access.url} has no messages of any topic")
        if os.path.isdir(where):
            os.rmdir(where)
        os.rename(made, where)
        sync_directory(os.path.dirname(where))
    return counts


def _check_free(where: str) -> None:
    if os.path.lexists(where) and (not os.path.isdir(where) or os.listdir(where)):
        raise LedgerError(f"{where} is not empty; restore into a new directory")
    if os.path.ismount(where):  # as volumes of containers are: no directory can be renamed to it
        raise LedgerError(f"{where} is a mount point; restore into a new directory below it")


def _named(cluster: Cluster, topics: Iterable[str]) -> list[str]:
    names, missing = list(dict.fromkeys(topics)), list[str]()
    with contextlib.suppress(ClusterError):  # named topics can be read without the admin API
        missing = cluster.missing(names)
    if missing:
        raise TopicNotFoundError(
            f"{cluster.access.url} has no topic {missing[0]!r}, says {cluster.access.admin}"
        )
    return names


def _restore(path: str, cluster: Cluster, names: Iterable[str]) -> dict[str, int]:
    counts, sources = {}, dict[str, str]()
    # Without an engine: no other process uses this ledger yet, and it needs no background work.
    with contextlib.closing(Ledger.open(path, NEW, power=True)) as ledger:
        for name in names:
            counts[name] = restore_topic(ledger, name, _frames(cluster, name, sources))
        if len(sources) > 1:
            found = ", ".join(f"{topic!r} is of {source}" for source, topic in sources.items())
            raise ClusterError(
                f"{cluster.access.url} has topics of {len(sources)} logs; name those of one: "
                f"{found}"
            )
        for source in sources:
            restore_id(ledger, source)
        report = verify(ledger)
    if not report.ok:
        raise LedgerCorruptedError(f"{path}: {report.problems[0]}")
    return counts


def _frames(cluster: Cluster, topic: str, sources: dict[str, str]) -> Iterator[Frame]:
    """The frames of a topic, in order and without gaps. Adds to `sources` the id of each log that
    they are copies of, with the first topic of that log.

    If engines on the cluster wrote to the topic, also after a mirror, the fencing rule of the
    cluster decides which frames count."""
    end = 0
    try:
        for copied in Target(cluster, AnyCopies(), topic, "").copied():
            if copied.frame.source is not None:
                sources.setdefault(copied.frame.source, topic)
            yield copied.frame
            end = copied.end
    except EngineTopicError:
        yield from _counting(cluster, topic, end)


def _counting(cluster: Cluster, topic: str, first: int) -> Iterator[Frame]:
    """The frames of engines on the cluster, from this offset on."""
    place = PulsarPlace(cluster.access, check_policies=False)
    engine = ClusterEngine(place, "restore", {}, readonly=True)
    try:
        log = engine.topics.named(topic)
        log.catch_up()
        yield from frames_from(log, first)
    finally:
        engine.close()


@contextlib.contextmanager
def _unfinished(path: str) -> Iterator[str]:
    """A directory without "log", locked by this process; removed afterwards."""
    process = _core.this_process()
    os.makedirs(path, mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if (owner := os.fstat(fd).st_uid) != os.geteuid():
            raise LedgerError(f"{path} belongs to user {owner}; remove it, then restore again")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pass_on_foreign(error)
            raise LedgerError(f"another process restores into {path}; wait for its end") from None
        log = f"/proc/self/fd/{fd}/log"  # whoever may rename `path` has nothing else removed
        remove_tree(log)  # of one that was killed
        try:
            yield path
        finally:
            remove_tree(log)
            with Ignoring(OSError):  # another process has put files there
                os.rmdir(path)
    finally:
        close_locked(fd, process)
