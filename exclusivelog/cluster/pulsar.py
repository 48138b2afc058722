"""Apache Pulsar: connections, the admin API, and topics to write to and to read from.

Only this module and pulsar_log.py use the Pulsar client. Its errors become a `ClusterError` that
names the cluster, the cause and what to do. No error, log line or repr has the token.

A topic of a ledger is kept in the Pulsar topic `persistent://tenant/namespace/NAME`. Bytes of its
name that are no ASCII letter, digit, `_`, `.` or `-` are written as `=` and two hexadecimal digits,
and so is one character of a name that Pulsar would take for a partition, or for a topic of its own:

>>> topic_name("orders"), topic_name("a/b"), topic_name("x-partition-0")
('orders', 'a=2Fb', 'x=2Dpartition-0')
>>> ledger_name("a=2Fb")
'a/b'
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn, TypeVar

from exclusivelog import _core
from exclusivelog.closing import Closing
from exclusivelog.cluster.native import Native, enter, stay
from exclusivelog.errors import ClusterError, EngineClosedError, ProducerBusyError
from exclusivelog.foreign import Ignoring, is_raised_by_a_handler

TOKEN_VARIABLE = "EXCLUSIVELOG_TOKEN"
ADMIN_VARIABLE, CERTIFICATES_VARIABLE = "EXCLUSIVELOG_ADMIN", "EXCLUSIVELOG_TLS_TRUST_CERTS"
PRODUCER_NAME = "exclusivelog-mirror"
ADMIN_PORTS = {"pulsar": ("http", 8080), "pulsar+ssl": ("https", 8443)}
ADMIN_SECONDS = 30.0  # for an answer, of all URLs together
PROXY_ERRORS = (502, 503, 504)  # of one that cannot reach a broker, or of a broker that starts
PENDING_MESSAGES = 5000  # more than a mirror ever has in flight
CLOSE_SECONDS = 1.5  # for the broker to answer the closing of a client

URL = re.compile(r"(pulsar|pulsar\+ssl)://([^/\s@?#]+)/([-=:.\w]+)/([-=:.\w]+)/?", re.ASCII)
ADMIN_URL = re.compile(r"https?://[^\s@?#]+")
OF_PULSAR = ("__change_events", "__transaction_buffer_snapshot")
PLAIN = re.compile(rb"[A-Za-z0-9_.-]")
TAKEN = re.compile(r"-(?=partition-\d+\Z)|_(?=_transaction_pending_ack\Z)")


def topic_name(name: str) -> str:
    """The name of the Pulsar topic for a topic of a ledger."""
    pieces = (bytes([byte]) for byte in name.encode())
    text = "".join(b.decode() if PLAIN.match(b) else f"={b[0]:02X}" for b in pieces)
    return TAKEN.sub(lambda found: f"={ord(found[0]):02X}", text)


def ledger_name(name: str) -> str:
    """The name of the ledger's topic for which a Pulsar topic was made."""
    data = re.sub(rb"=([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), name.encode())
    return data.decode(errors="replace")


# ---- where it is, and how to get in ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Access:
    """The address of a namespace, and the credentials. Its repr lacks the token.

    - `service`: pulsar://host:port or pulsar+ssl://host:port.
    - `admin`: the URLs of the admin REST API, separated by commas.
    - `token`: a JSON web token, or None.
    - `tls_trust_certs`: a PEM file of the certificates to trust; None: the system's.
    """

    service: str
    tenant: str
    namespace: str
    admin: str
    token: str | None = field(default=None, repr=False)
    tls_trust_certs: str | None = None

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        admin: str | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls_trust_certs: str | None = None,
    ) -> Access:
        """Make it from a URL such as pulsar://host:6650/tenant/namespace.

        `token_file` holds the token; without it and `token`, the environment variable
        EXCLUSIVELOG_TOKEN does. So do EXCLUSIVELOG_ADMIN and EXCLUSIVELOG_TLS_TRUST_CERTS for
        `admin` and `tls_trust_certs`. Raises ValueError for a URL of another form, and for a token
        that is none; no error has the token.

        >>> Access.parse("pulsar://one:6650,two:6650/public/default").admin
        'http://one:8080,http://two:8080'
        """
        found = URL.fullmatch(url)
        if found is None:
            raise ValueError(
                f"{_without_secrets(url)!r} is no URL of a Pulsar namespace; it takes "
                "pulsar://host:port/tenant/namespace or pulsar+ssl://..."
            )
        kind, hosts, tenant, namespace = found.groups()
        if tls_trust_certs is None:
            tls_trust_certs = os.environ.get(CERTIFICATES_VARIABLE) or None
        _check_certificates(tls_trust_certs)
        admin = admin or os.environ.get(ADMIN_VARIABLE) or _default_admin(kind, hosts)
        admins = [each.strip().rstrip("/") for each in admin.split(",")]
        if not all(map(ADMIN_URL.fullmatch, admins)):
            raise ValueError(
                f"admin={_without_secrets(admin)!r} is no URL of an admin API; it takes "
                "http://host:port or https://..., or several, separated by commas"
            )
        return cls(
            f"{kind}://{hosts}",
            tenant,
            namespace,
            ",".join(admins),
            _token(token, token_file),
            tls_trust_certs,
        )

    @property
    def path(self) -> str:
        """tenant/namespace."""
        return f"{self.tenant}/{self.namespace}"

    @property
    def url(self) -> str:
        """The URL from which it was made."""
        return f"{self.service}/{self.path}"


def _without_secrets(url: str) -> str:
    """The URL for errors, without a password before the last "@" or a token behind a "?"."""
    return re.sub(
        r"[?#].*", "?...", re.sub(r"//.*@", "//...@", url, flags=re.DOTALL), flags=re.DOTALL
    )


def _token(token: str | None, file: str | os.PathLike[str] | None) -> str | None:
    """The token, without a line break at the end."""
    if file is not None:
        try:
            with open(file, encoding="ascii") as opened:
                token = opened.read()
        except UnicodeDecodeError:
            raise ValueError(
                f"token_file={os.fspath(file)!r} is no token: it has characters that are not ASCII"
            ) from None
        if not token.strip():
            raise ValueError(f"token_file={os.fspath(file)!r} is empty")
    token = (token or os.environ.get(TOKEN_VARIABLE) or "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(  # the error does not show the token, as the HTTP library's would
            "the token has blanks, line breaks or characters that are not ASCII; give one JSON web "
            f"token (token, token_file or {TOKEN_VARIABLE})"
        )
    return token or None


def _check_certificates(file: str | None) -> None:
    # Check here, because the client's errors would be about connections or tokens.
    if file is None:
        return
    with open(file, "rb"):  # its OSError names the file
        pass
    try:
        ssl.create_default_context(cafile=file)
    except ssl.SSLError:
        raise ValueError(f"tls_trust_certs={file!r} has no certificates in PEM form") from None


def _default_admin(kind: str, hosts: str) -> str:
    scheme, port = ADMIN_PORTS[kind]
    return ",".join(
        f"{scheme}://{re.sub(r':[0-9]+$', '', host)}:{port}" for host in hosts.split(",")
    )


class _UnreachableError(Exception):
    """Nothing answers at one URL of the admin API; another one may."""


class _ToOwner(urllib.request.HTTPRedirectHandler):
    """Follows a broker's answer that another one has the topic: with the method, the body and the
    token, which urllib would leave out."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """The request to the other broker; None: the answer is an error."""
        if req.type == "https" and not newurl.startswith("https:"):
            return None  # the token would be sent in the clear
        again = urllib.request.Request(
            newurl, data=req.data, headers=req.headers, method=req.get_method()
        )
        if (token := req.unredirected_hdrs.get("Authorization")) is not None:
            again.add_unredirected_header("Authorization", token)
        return again


# ---- errors ------------------------------------------------------------------------------

OVER_QUOTA = (
    "it is full: the namespace's backlog quota is exceeded; remove or drain the subscription "
    "that holds the backlog, or raise the quota"
)
# Names of the client's exceptions and results -> what they mean, and what to do.
MEANINGS = {
    "AuthenticationError": "it refused the token; give a valid one",
    "AuthorizationError": "the token's role may not use this topic; grant it produce and consume",
    "ErrorGettingAuthenticationData": "the token could not be read",
    "TopicNotFound": "it has no such tenant, namespace or topic, or makes no topics by itself",
    "ProducerBlockedQuotaExceededError": OVER_QUOTA,
    "ProducerBlockedQuotaExceededException": OVER_QUOTA,
    "BrokerPersistenceError": "it could not store the message; look for full disks of its bookies",
    "TopicTerminated": "the Pulsar topic is terminated",
    "MessageTooBig": "a message is larger than the broker takes (maxMessageSize)",
    "InvalidTopicName": "it takes no topic of this name",
    "Timeout": "it did not answer in time; it may be down, unreachable or full",
    "TimeOut": "it did not answer in time; it may be down, unreachable or full",
    "ConnectError": "no connection; it may be down, or the address wrong",
    "NotConnected": "no connection; it may be down, or the address wrong",
    "Disconnected": "the connection was lost",
    "ServiceUnitNotReady": "it is starting up; try again",
    "LookupError": "it is not reachable, or starting up",
    "RetryableError": "it did not answer in time; it may be down, unreachable or full",
    "UnknownError": "it could not load the topic, or does not say what is wrong; look into its log",
    "AlreadyClosed": "the connection was closed",
}
FENCED = ("ProducerFenced", "ProducerBusy")
# Answers of a broker that has just started, while it loads a topic; UnknownError if it has not
# loaded the topic within its own time limit.
PASSING = """
    Timeout ServiceUnitNotReady LookupError Disconnected RetryableError BrokerMetadataError
    UnknownError
""".split()
AWAY = (*PASSING, "ConnectError", "NotConnected")
# Answers of a broker that has just started. Pulsar 4.0 accepts requests before all of its services
# run, and returns AuthorizationError for each that fails, even without tokens.
NOT_READY = ("AuthorizationError", "UnknownError", "ServiceUnitNotReady", "BrokerMetadataError")
ADMITTED_WITHIN = 10.0  # seconds; after that, the refusal is final


def meaning_of(error: object) -> str:
    """The meaning of an exception or a result of the client."""
    name = type(error).__name__ if isinstance(error, Exception) else str(error).rpartition(".")[2]
    said = str(error).removeprefix("Pulsar error: ").removeprefix("Result")
    for each in (said, name):
        if each in MEANINGS:
            return MEANINGS[each]
    return f"{said} ({name})" if said != name else name


Made = TypeVar("Made")


def admitted(call: Callable[[], Made], seconds: float = ADMITTED_WITHIN) -> Made:
    """Call `call()`, and again for so many seconds while the broker answers as one that has just
    started; return its result.

    >>> admitted(lambda: "a producer")
    'a producer'
    """
    deadline = _core.monotonic() + seconds
    while True:
        try:
            return call()
        except Exception as error:
            if type(error).__name__ not in NOT_READY or _core.monotonic() > deadline:
                raise
        time.sleep(0.1)


# ---- the cluster -------------------------------------------------------------------------


def import_pulsar() -> Any:
    """Import the Pulsar client; the ImportError says how to install it."""
    try:
        import pulsar
    except ImportError as error:
        raise ImportError(
            "Pulsar needs its client, which is not installed: pip install 'exclusivelog[cluster]'"
        ) from error
    return pulsar


class Cluster(Closing):
    """A namespace of a Pulsar cluster.

    `timeout`: seconds within which the broker has to answer a call, or acknowledge a message.

    In a forked child its calls raise `EngineClosedError`, and closing it does nothing."""

    def __init__(self, access: Access, timeout: float = 60.0) -> None:
        self.access, self._timeout = access, timeout
        self._pulsar = import_pulsar()
        self._client: Native | None = None
        self._entered = False
        self._closed, self._lock = False, Native(threading.Lock(), repr(self))
        self._answered = False  # it has answered before
        self._answering = ""  # the URL of the admin API that has answered last

    def __repr__(self) -> str:
        return f"Cluster({self.access.url!r})"

    @property
    def client(self) -> Any:
        """The client; its first use connects."""
        with self._lock.use():
            if self._closed:
                raise ClusterError(f"{self.access.url}: the connection was closed")
            if self._client is None:
                self._client = Native(self._connect(), repr(self))
            return self._client.use()

    def _connect(self) -> Any:
        access, pulsar = self.access, self._pulsar
        token = access.token
        return pulsar.Client(
            access.service,
            authentication=None if token is None else pulsar.AuthenticationToken(token),
            # Short, because `writer` and `reader` retry calls without an answer.
            operation_timeout_seconds=max(1, int(min(self._timeout / 4, 30))),
            tls_trust_certs_file_path=access.tls_trust_certs,
            tls_validate_hostname=access.service.startswith("pulsar+ssl"),
            # Its errors are raised, too; on stdout they would mix with the program's output.
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
        )

    @property
    def inherited(self) -> bool:
        """Is this a forked child of the process that made it?"""
        return self._lock.inherited

    def check_not_forked(self) -> None:
        """EngineClosedError in a forked child."""
        self._lock.use()

    def close(self) -> None:
        """Close all connections; closing twice does nothing."""
        if self.inherited:
            return
        with self._lock.use():
            client, self._client, self._closed = self._client, None, True
        if client is not None:
            with Ignoring(Exception):
                _close(client.use())

    def failed(self, what: str, error: object) -> NoReturn:
        """Raise the ClusterError for an exception or result of the client."""
        raise self.error(what, error) from (error if isinstance(error, Exception) else None)

    def error(self, what: str, error: object) -> ClusterError:
        """The ClusterError for an exception or result of the client."""
        meaning = meaning_of(error)
        if self.access.service.startswith("pulsar+ssl") and type(error).__name__ in AWAY:
            meaning += "; or its certificate is not trusted, or not for this host name"
        return ClusterError(f"{self.access.url}: {what}: {meaning}")

    # ---- the admin API -------------------------------------------------------------------

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """Call the admin REST API at the first of its URLs that can be reached, beginning with the
        one that has answered last; returns the JSON of the answer, or None. `method` must change
        nothing if it is repeated."""
        self.check_not_forked()
        admins = self.access.admin.split(",")
        reasons = []
        for admin in sorted(admins, key=lambda each: each != self._answering):
            try:
                data = self._ask(admin, method, path, body)
            except _UnreachableError as error:
                reasons.append(f"{admin}: {error}")
                continue
            self._answering = admin
            try:
                return json.loads(data) if data else None
            except ValueError:
                raise ClusterError(
                    f"{admin}: what answers there is no admin API of Pulsar; give its URL "
                    "(admin=, --admin)"
                ) from None
        why = reasons[0].partition(": ")[2] if len(reasons) == 1 else "; ".join(reasons)
        raise ClusterError(
            f"{self.access.admin}: the admin API cannot be reached: {why}; give its URL (admin=, "
            "--admin)"
        )

    def _ask(self, admin: str, method: str, path: str, body: Any) -> bytes:
        """The answer of the admin API at one URL."""
        access = self.access
        request = urllib.request.Request(
            f"{admin}/admin/v2/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        if access.token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {access.token}")
        handlers: list[urllib.request.BaseHandler] = [_ToOwner()]
        if admin.startswith("https"):
            context = ssl.create_default_context(cafile=access.tls_trust_certs)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        seconds = ADMIN_SECONDS / (1 + access.admin.count(","))
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as answer:
                data: bytes = answer.read()
                return data
        except urllib.error.HTTPError as error:
            with error:  # it is the answer, too, and has the connection
                if error.code in PROXY_ERRORS and "," in access.admin:
                    raise _UnreachableError(f"HTTP {error.code}") from None
                raise ClusterError(_refused(access, admin, path, error)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)  # urllib wraps what comes in the middle
            if isinstance(reason, BaseException) and is_raised_by_a_handler(reason):
                raise reason from None
            raise _UnreachableError(str(getattr(reason, "strerror", None) or reason)) from None

    def check_policies(self) -> None:
        """ClusterError unless the namespace deduplicates, and keeps all messages for ever."""
        path = f"namespaces/{self.access.path}"
        if self.admin("GET", f"{path}/deduplication") is not True:
            raise ClusterError(
                f"{self.access.url}: deduplication is not enabled, so that a message could be "
                "there twice. Enable it: pulsar-admin namespaces set-deduplication "
                f"{self.access.path} --enable"
            )
        if not _is_for_ever(self.admin("GET", f"{path}/retention")):
            raise ClusterError(
                f"{self.access.url}: the namespace does not keep its messages for ever, so that "
                "they could be lost. Change that: pulsar-admin namespaces set-retention "
                f"{self.access.path} --time -1 --size -1"
            )

    def check_topic(self, topic: str) -> None:
        """ClusterError if the topic has a policy of its own by which it does not keep all messages;
        where the admin API cannot be asked, the namespace was checked, and that is all."""
        full = f"{self.access.path}/{topic_name(topic)}"
        try:
            kept = self.admin("GET", f"persistent/{full}/retention?applied=true")
        except ClusterError:  # it is not there yet, for example
            return
        if not _is_for_ever(kept):
            raise ClusterError(
                f"{self.access.url}: topic {topic!r} has a policy of its own by which it does not "
                "keep its messages for ever. Remove it: pulsar-admin "
                f"topicPolicies remove-retention persistent://{full}"
            )

    def has_property(self, topic: str, name: str) -> bool:
        """Has the Pulsar topic this property? False if the admin API cannot be used."""
        try:
            found = self.admin("GET", self._properties_of(topic))
        except ClusterError:
            return False
        return name in (found or {})

    def set_property(self, topic: str, name: str) -> None:
        """Give the Pulsar topic this property; ClusterError if the admin API refuses that."""
        self.admin("PUT", self._properties_of(topic), {name: "true"})

    def _properties_of(self, topic: str) -> str:
        return f"persistent/{self.access.path}/{topic_name(topic)}/properties"

    def topics(self) -> list[str]:
        """The names of the ledger's topics there, sorted.

        Raises ClusterError for a topic that no mirror has made: its name says so."""
        names = [name for name in self._topic_names() if not name.startswith("__")]
        if foreign := [name for name in names if topic_name(ledger_name(name)) != name]:
            raise ClusterError(
                f"{self.access.url}: no mirror has made the Pulsar topic {foreign[0]!r}; name the "
                "topics to bring back"
            )
        return sorted(map(ledger_name, names))

    def missing(self, topics: Iterable[str]) -> list[str]:
        """The topics among these that do not exist, by the admin API, because reading them would
        create them.

        A token that may produce or consume in the namespace is enough for this."""
        there = set(self._topic_names())
        return [name for name in topics if topic_name(name) not in there]

    def names(self) -> list[str]:
        """The names of its topics in Pulsar, without those of Pulsar itself."""
        return [name for name in self._topic_names() if name not in OF_PULSAR]

    def _topic_names(self) -> list[str]:
        found = self.admin("GET", f"persistent/{self.access.path}")
        return [text.rpartition("/")[2] for text in found]

    # ---- topics --------------------------------------------------------------------------

    def address(self, topic: str) -> str:
        """The full name of the Pulsar topic for a ledger's topic; ClusterError if it has
        partitions."""
        full, client = f"persistent://{self.access.path}/{topic_name(topic)}", self.client
        try:
            parts = admitted(lambda: client.get_topic_partitions(full))
        except Exception as error:
            if self._token_is_refused():
                raise ClusterError(
                    f"{self.access.url}: {MEANINGS['AuthenticationError']}"
                ) from None
            self.failed(f"topic {topic!r} cannot be found", error)
        self._answered = True
        if not parts:  # the client's answer after it was closed
            raise ClusterError(f"{self.access.url}: the connection was closed")
        self._enter(client, full)
        if parts != [full]:
            raise ClusterError(
                f"{self.access.url}: topic {topic!r} has {len(parts)} partitions, and so no order "
                "of its own. Delete it, and set allowAutoTopicCreationType=non-partitioned"
            )
        return full

    def _enter(self, client: Any, full: str) -> None:
        """Have the client's thread call Python once, before anything is sent; see `native`."""
        if not self._entered:
            self._entered = True
            enter(lambda told: client._client.get_topic_partitions_async(full, told))

    def _token_is_refused(self) -> bool:
        # Check with the admin API, because with a refused token the client retries until its time
        # limit.
        if self.access.token is None:
            return False
        try:
            self.admin("GET", f"namespaces/{self.access.path}/deduplication")
        except ClusterError as error:
            return "(HTTP 401)" in str(error)
        return False

    def writer(self, topic: str) -> PulsarWriter:
        """Become the topic's only producer; creates the Pulsar topic if it is missing.

        Raises ProducerBusyError if another mirror has it for longer than the timeout: the broker
        takes up to a minute to notice that a machine is gone."""
        full, deadline = self.address(topic), _core.monotonic() + self._timeout
        while True:
            try:
                return PulsarWriter(self, topic, self._producer(full))
            except Exception as error:
                name, late = type(error).__name__, _core.monotonic() > deadline
                if name not in (*FENCED, *PASSING) or (late and name in PASSING):
                    self.failed(f"topic {topic!r} cannot be written to", error)
                if late:
                    raise ProducerBusyError(
                        f"{self.access.url}: topic {topic!r} has another exclusive producer, "
                        "perhaps a second mirror; stop it"
                    ) from None
                time.sleep(0.1)

    def _producer(self, full: str) -> Any:
        # No client batching: with it, the broker's deduplication drops messages that are not
        # stored.
        return admitted(
            lambda: self.client.create_producer(
                full,
                producer_name=PRODUCER_NAME,
                send_timeout_millis=int(self._timeout * 1000),
                max_pending_messages=PENDING_MESSAGES,
                batching_enabled=False,
                access_mode=self._pulsar.ProducerAccessMode.Exclusive,
            )
        )

    def reader(self, topic: str, *, last: bool = False) -> TopicReader:
        """Read the Pulsar topic from its first message on; `last`: from its last one."""
        return TopicReader(self, topic, last, self._timeout)

    def open_reader(self, topic: str, last: bool, after: Any, deadline: float) -> Any:
        """Open a reader of the client: after the message id `after`, or else as `reader`."""
        ids = self._pulsar.MessageId
        while True:
            try:
                return admitted(
                    lambda: self.client.create_reader(
                        self.address(topic),
                        after or (ids.latest if last else ids.earliest),
                        start_message_id_inclusive=last and after is None,
                        receiver_queue_size=1 if last else 100,
                    )
                )
            except EngineClosedError:
                raise
            except ClusterError as error:
                away = self._answered and type(error.__cause__).__name__ in AWAY
                if not away or _core.monotonic() > deadline:
                    raise
            except Exception as error:
                if type(error).__name__ not in PASSING or _core.monotonic() > deadline:
                    self.failed(f"topic {topic!r} cannot be read", error)
            time.sleep(0.1)


def _is_for_ever(retention: Any) -> bool:
    kept = retention or {}
    return (kept.get("retentionTimeInMinutes"), kept.get("retentionSizeInMB")) == (-1, -1)


def _close(client: Any) -> None:
    """Close the client, without waiting for an unresponsive broker."""
    # shutdown() holds the interpreter's lock and waits for the client's threads. If one of them
    # calls back at that moment, it waits for the lock, and the process is blocked for 10 s.
    # close() first ends all sends, without the lock, and leaves nothing to call back.
    closing = threading.Thread(target=_close_orderly, args=(client,), daemon=True)
    closing.start()
    closing.join(CLOSE_SECONDS)
    if closing.is_alive():  # the broker is unresponsive
        client.shutdown()
        closing.join(CLOSE_SECONDS)


def _close_orderly(client: Any) -> None:
    with Ignoring(Exception):
        client.close()


def _refused(access: Access, admin: str, path: str, error: urllib.error.HTTPError) -> str:
    if error.code in (401, 403):
        return (
            f"{admin}: the admin API refuses {path} (HTTP {error.code}); give a token with "
            "admin rights on the namespace (--token-file), or check the policies yourself "
            "(check_policies=False, --unchecked-policies)"
        )
    reason = error.reason
    try:
        reason = json.loads(error.read()).get("reason", reason)
    except (ValueError, AttributeError, OSError) as broken:  # a socket's time-out has no errno
        if is_raised_by_a_handler(broken):
            raise
    missing = " Make it: pulsar-admin namespaces create " + access.path
    return f"{admin}: {path}: {reason} (HTTP {error.code}).{missing if error.code == 404 else ''}"


# ---- writing -----------------------------------------------------------------------------

# Called with None or an error, and (ledger, entry) of the message, or None for a duplicate.
Stored = Callable[[ClusterError | None, tuple[int, int] | None], None]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One Pulsar message to be sent; `value` None: a null value."""

    value: bytes | None
    key: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    event_time: int | None = None


class PulsarWriter:
    """The only producer of a Pulsar topic."""

    def __init__(self, cluster: Cluster, topic: str, producer: Any) -> None:
        self._cluster, self._topic = cluster, topic
        self._producer = Native(producer, f"the producer of topic {topic!r}")
        from _pulsar import MessageBuilder, Result

        self._builder, self._ok = MessageBuilder, Result.Ok

    @property
    def last_sequence_id(self) -> int:
        """The last sequence id that the broker knows; -1 if none, or if it has forgotten it."""
        return int(self._producer.use().last_sequence_id())

    def send(self, message: Outgoing, sequence: int, stored: Stored) -> None:
        """Send a message; a thread of the client calls `stored` once it is stored."""
        producer = self._producer.use()
        # Use the native message: the client's Python API omits sequence id 0, event time 0 and key
        # "".
        builder = self._builder()
        builder.sequence_id(sequence)
        if message.value is None:
            builder.set_null_value()
        else:
            builder.content(message.value)
        if message.key is not None:
            builder.partition_key(message.key)
        if message.event_time is not None:
            builder.event_timestamp(message.event_time)
        for name, value in message.properties.items():
            builder.property(name, value)

        def answered(result: Any, place: Any) -> None:
            stay()
            if result == self._ok:
                known = None if place is None or place.ledger_id() < 0 else place
                stored(None, known and (known.ledger_id(), known.entry_id()))
            else:
                stored(self._refused(result), None)

        try:
            producer._producer.send_async(builder.build(), answered)
        except Exception as error:
            raise self._refused(error) from error

    def _refused(self, cause: object) -> ClusterError:
        name = (
            type(cause).__name__ if isinstance(cause, Exception) else str(cause).rpartition(".")[2]
        )
        if name in FENCED:
            return ClusterError(
                f"{self._cluster.access.url}: topic {self._topic!r} was taken by another exclusive "
                "producer, perhaps a second mirror; stop it"
            )
        return self._cluster.error(f"topic {self._topic!r} cannot be written to", cause)

    def close(self) -> None:
        """Close the producer; messages in flight may still be stored."""
        with Ignoring(Exception):
            self._producer.use().close()


# ---- reading -----------------------------------------------------------------------------


# After this many seconds a read is retried with a new reader: if a topic is deleted after it has
# announced a message, that message never comes.
PATIENCE_SECONDS = 5.0


class TopicReader(Closing):
    """Reads a Pulsar topic forward, up to its end."""

    def __init__(self, cluster: Cluster, topic: str, last: bool, timeout: float) -> None:
        self._cluster, self._topic, self._last, self._timeout = cluster, topic, last, timeout
        self._read: Any = None  # the id of the last message that was read
        self._reader = self._open(_core.monotonic() + timeout)

    def _open(self, deadline: float) -> Native:
        reader = self._cluster.open_reader(self._topic, self._last, self._read, deadline)
        return Native(reader, f"the reader of topic {self._topic!r}")

    def __iter__(self) -> Iterator[Any]:
        while (message := self.next()) is not None:
            yield message

    def next(self) -> Any:
        """The next message, as an object of the Pulsar client; None at the end."""
        deadline = _core.monotonic() + self._timeout
        while True:
            try:
                if not self._reader.use().has_message_available():
                    return None
                message = self._reader.use().read_next(int(PATIENCE_SECONDS * 1000))
            except EngineClosedError:
                raise
            except Exception as error:
                if type(error).__name__ != "Timeout" or _core.monotonic() > deadline:
                    self._cluster.failed(f"topic {self._topic!r} cannot be read", error)
            else:
                self._read = message.message_id()
                return message
            self.close()
            self._reader = self._open(deadline)

    def close(self) -> None:
        """Stop reading."""
        with Ignoring(Exception):
            self._reader.use().close()
