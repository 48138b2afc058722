"""A real Pulsar broker to test with, where Java 17 and Maven are.

One broker serves all xdist workers of a test run. The first worker that asks starts a *supervisor*
(this module as a program), and that starts the broker. Every user holds a shared lock of one file;
when the supervisor gets that lock exclusively, no user is left, and it ends the broker. The kernel
releases the locks of processes that are killed, so a killed test run leaves no broker behind, and
the broker itself dies with its supervisor (PR_SET_PDEATHSIG).

    python -m testing.broker                    # start one, print its URL, run it until Ctrl-C
    python -m testing.broker -- COMMAND ... {}  # run a command on one: {} is a namespace's URL

The distribution (245 MB) is fetched with Maven, once per user and machine, into
`~/.cache/exclusivelog` (or `$XDG_CACHE_HOME/exclusivelog`), where every clone finds it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import hashlib
import hmac
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from exclusivelog.cluster.native import spare
from testing.children import ROOT, dying_with_this
from testing.patience import PATIENCE

VERSION = "4.0.8"
ARTIFACT = f"org.apache.pulsar:pulsar-server-distribution:{VERSION}:tar.gz:bin"
OLDEST_JAVA = 17
FETCH_SECONDS, READY_SECONDS, STOP_SECONDS = 600.0, 180.0, 20.0
MEMORY = "-Xms64m -Xmx768m -XX:MaxDirectMemorySize=512m -XX:+ExitOnOutOfMemoryError"
# Half the time to start, and slower when it has run for long; and its own classes need no check.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
SETTINGS = {
    "bindAddress": "127.0.0.1",
    "advertisedAddress": "127.0.0.1",
    "journalSyncData": "true",
    "brokerDeleteInactiveTopicsEnabled": "false",
    "topicLoadTimeoutSeconds": "10",  # loading a topic may fail right after it was deleted
}
SECRET = b"a secret that only these tests know"  # brokers that check tokens verify them with it


# ---- what it needs -----------------------------------------------------------------------


@functools.cache
def missing() -> str | None:
    """Why no broker can be started here; None if it can."""
    if shutil.which("java") is None or shutil.which("mvn") is None:
        return "a Pulsar broker needs Java 17 and Maven (java, mvn), which are not installed"
    said = subprocess.run(
        ["java", "-version"], capture_output=True, text=True, timeout=PATIENCE
    ).stderr
    found = re.search(r'version "(\d+)', said)
    if found is None or int(found[1]) < OLDEST_JAVA:
        return f"a Pulsar broker needs Java {OLDEST_JAVA}; found: {said.splitlines()[:1]}"
    try:
        import pulsar  # noqa: F401
    except ImportError:
        return "the Pulsar client is not installed: pip install 'exclusivelog[cluster]'"
    try:
        distribution()
    except (subprocess.SubprocessError, StopIteration) as error:
        return f"Maven cannot fetch {ARTIFACT}: {error}"
    return None


def distribution() -> Path:
    """The unpacked distribution; fetched if need be."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exclusivelog"
    base.mkdir(parents=True, exist_ok=True)
    home = base / f"apache-pulsar-{VERSION}"
    with _locked(base / "lock", fcntl.LOCK_EX):
        if not home.exists():
            with tempfile.TemporaryDirectory(dir=base) as folder:
                _unpack(_fetch(Path(folder)), Path(folder)).rename(home)
    return home


def _fetch(folder: Path) -> Path:
    subprocess.run(
        [
            "mvn",
            "-q",
            "-B",
            "dependency:copy",
            f"-Dartifact={ARTIFACT}",
            f"-DoutputDirectory={folder}",
        ],
        check=True,
        timeout=FETCH_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    return next(folder.glob("*.tar.gz"))


def _unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"apache-pulsar-{VERSION}"


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[IO[str]]:
    with path.open("a") as file:
        fcntl.flock(file, kind)
        yield file


# ---- one broker --------------------------------------------------------------------------


class Broker:
    """A Pulsar standalone: broker, bookie and metadata in one JVM, all below `directory`.

    `start()` after `kill()` or `stop()` runs it again on the same ports and the same data.
    `settings` go into its standalone.conf; `options` are more options for the JVM.
    """

    def __init__(
        self, directory: Path, settings: Mapping[str, str] | None = None, options: str = QUICK
    ) -> None:
        self._directory = directory.absolute()
        self._settings = dict(settings or {})
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        port, web, tls, tls_web = _free_ports(4)
        self.url, self.admin = f"pulsar://127.0.0.1:{port}", f"http://127.0.0.1:{web}"
        self.tls_url = f"pulsar+ssl://127.0.0.1:{tls}"
        self.tls_admin = f"https://127.0.0.1:{tls_web}"
        self._ports = {"brokerServicePort": str(port), "webServicePort": str(web)}
        if "tlsCertificateFilePath" in self._settings:
            self._ports |= {"brokerServicePortTls": str(tls), "webServicePortTls": str(tls_web)}

    @property
    def pid(self) -> int:
        """The JVM's process id."""
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Start it; `wait`: until it answers."""
        home = distribution()
        self._directory.mkdir(parents=True, exist_ok=True)
        configuration = self._configure(home)
        environment = {
            **os.environ,
            "PULSAR_STANDALONE_USE_ZOOKEEPER": "0",
            "PULSAR_STANDALONE_CONF": str(configuration),
            "PULSAR_MEM": MEMORY,
            "PULSAR_GC": f"-XX:+UseSerialGC {self._options}",
            "PULSAR_GC_LOG": " ",
            "PULSAR_LOG_LEVEL": "warn",
            "PULSAR_LOG_DIR": str(self._directory / "logs"),
            "PULSAR_LOG_APPENDER": "Console",
        }
        with (self._directory / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [
                    "bin/pulsar",
                    "standalone",
                    "-nss",
                    "-nfw",
                    "-a",
                    "127.0.0.1",
                    "--metadata-dir",
                    str(self._directory / "metadata"),
                    "--bookkeeper-dir",
                    str(self._directory / "bookkeeper"),
                ],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=dying_with_this(),
            )
        if wait:
            self.await_ready()

    def _configure(self, home: Path) -> Path:
        path = self._directory / "standalone.conf"
        settings = SETTINGS | self._ports | self._settings
        lines = "".join(f"{name}={value}\n" for name, value in settings.items())
        path.write_text((home / "conf" / "standalone.conf").read_text() + "\n" + lines)
        return path

    def await_ready(self, timeout: float = READY_SECONDS) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + timeout
        while not self._answers():
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"the broker has ended:\n{self.output()}")
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"no broker within {timeout} s:\n{self.output()}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        request = urllib.request.Request(f"{self.admin}/admin/v2/namespaces/public/default")
        if self._settings.get("authenticationEnabled") == "true":
            request.add_header("Authorization", f"Bearer {token('admin')}")
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except OSError:
            return False

    def output(self) -> str:
        """The end of what it printed."""
        return (self._directory / "output").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_SECONDS)
            self._process = None

    # Its data is removed, or continued as after a crash: an orderly end would only take seconds.
    stop = kill


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def own_broker(settings: Mapping[str, str] | None = None, options: str = QUICK) -> Iterator[Broker]:
    """A broker for one test alone, which may kill it; its data is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="broker-", ignore_cleanup_errors=True) as folder:
        broker = Broker(Path(folder), settings, options)
        try:
            broker.start()
            yield broker
        finally:
            broker.kill()


# ---- namespaces --------------------------------------------------------------------------


@dataclass(frozen=True)
class Namespace:
    """A namespace of a broker, and what a test asks the admin API and the client about it."""

    broker: str
    admin: str
    path: str
    token: str | None = None

    @classmethod
    def make(
        cls,
        broker: str,
        admin: str,
        *,
        deduplication: bool = True,
        retention: int = -1,
        token: str | None = None,
    ) -> Namespace:
        """A new one, with these policies; `retention` in MB and minutes."""
        made = cls(broker, admin, f"public/test-{os.urandom(6).hex()}", token)
        made.call("PUT", f"namespaces/{made.path}", {})
        made.call("POST", f"namespaces/{made.path}/deduplication", deduplication)
        policy = {"retentionTimeInMinutes": retention, "retentionSizeInMB": retention}
        made.call("POST", f"namespaces/{made.path}/retention", policy)
        return made

    @property
    def url(self) -> str:
        """What a mirror is given."""
        return f"{self.broker}/{self.path}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer of the admin API."""
        request = urllib.request.Request(
            f"{self.admin}/admin/v2/{path}",
            method=method,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        if self.token is not None:
            request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            data = answer.read()
        return json.loads(data) if data else None

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """A client of its own."""
        client = plain_client(self)
        try:
            yield client
        finally:
            client.close()

    def messages(self, topic: str) -> list[Any]:
        """All messages of a topic, as the client has them."""
        import pulsar

        with self.client() as client:
            name = f"persistent://{self.path}/{topic}"
            reader = client.create_reader(name, pulsar.MessageId.earliest)
            found = []
            while reader.has_message_available():
                found.append(reader.read_next(int(PATIENCE * 1000)))
            reader.close()
        return found


# ---- clients without the library ---------------------------------------------------------


def plain_client(namespace: Namespace, **options: Any) -> Any:
    """A client of Pulsar as it is. No child that a test forks later destroys what it has made: to
    do that, it would wait for threads that it does not have."""
    import pulsar

    class Client(pulsar.Client):  # type: ignore[misc]
        def create_producer(self, *args: Any, **options: Any) -> Any:
            return spared(super().create_producer(*args, **options))

        def create_reader(self, *args: Any, **options: Any) -> Any:
            return spared(super().create_reader(*args, **options))

    token = namespace.token
    authentication = None if token is None else pulsar.AuthenticationToken(token)
    logger = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
    made = Client(namespace.broker, authentication=authentication, logger=logger, **options)
    return spared(made)


def spared(thing: Any) -> Any:
    """The same object of a client, which no forked child destroys."""
    spare(thing)
    return thing


# ---- tokens ------------------------------------------------------------------------------


def token(subject: str, secret: bytes = SECRET) -> str:
    """A JSON web token, as `bin/pulsar tokens create` makes them."""
    parts = [_base64(json.dumps(part).encode()) for part in ({"alg": "HS256"}, {"sub": subject})]
    signed = ".".join(parts)
    return f"{signed}.{_base64(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def checks_tokens() -> dict[str, str]:
    """Settings of a broker that admits only who has a token."""
    mine = token("admin")
    plugin = "org.apache.pulsar.client.impl.auth.AuthenticationToken"
    provider = "org.apache.pulsar.broker.authentication.AuthenticationProviderToken"
    return {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "superUserRoles": "admin",
        "authenticationProviders": provider,
        "tokenSecretKey": "data:;base64," + base64.b64encode(SECRET).decode(),
        "brokerClientAuthenticationPlugin": plugin,
        "brokerClientAuthenticationParameters": f"token:{mine}",
    }


# ---- certificates ------------------------------------------------------------------------


def certificate(folder: Path) -> Path:
    """A self-signed certificate for this machine, in `cert.pem`, and its `key.pem`."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            folder / "key.pem",
            "-out",
            folder / "cert.pem",
        ],
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    return folder / "cert.pem"


def speaks_tls(folder: Path) -> dict[str, str]:
    """Settings of a broker that also takes TLS connections, with a new certificate."""
    path = certificate(folder)
    return {"tlsCertificateFilePath": str(path), "tlsKeyFilePath": str(path.with_name("key.pem"))}


# ---- one broker for all workers of a test run --------------------------------------------


@contextlib.contextmanager
def shared_broker(directory: Path) -> Iterator[tuple[str, str]]:
    """(URL, admin URL) of the one broker that runs in `directory`; the first user starts it, and
    it ends after the last one."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / "users", fcntl.LOCK_SH) as users:
            if not _is_there(users, directory / "users"):
                continue  # the supervisor of the last users was just removing it
            with _locked(directory / "starting", fcntl.LOCK_EX):
                if not (directory / "ready").exists():
                    _start_supervisor(directory)
            facts = json.loads((directory / "ready").read_text())
            yield facts["url"], facts["admin"]
            return


def _is_there(file: IO[str], path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _start_supervisor(directory: Path) -> None:
    with (directory / "supervisor").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "testing.broker", str(directory)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + FETCH_SECONDS + READY_SECONDS
    while not (directory / "ready").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError((directory / "supervisor").read_text())
        time.sleep(0.1)
    process.returncode = 0  # it outlives this process if another one still uses the broker


def _supervise(directory: Path) -> None:
    broker = Broker(directory / "broker")
    broker.start()
    ready = directory / "ready"
    ready.with_suffix(".new").write_text(json.dumps({"url": broker.url, "admin": broker.admin}))
    ready.with_suffix(".new").rename(ready)
    with _locked(directory / "users", fcntl.LOCK_EX):  # no user is left
        broker.kill()
        shutil.rmtree(directory, ignore_errors=True)


def _run_until_interrupted() -> None:
    if reason := missing():
        raise SystemExit(reason)
    with own_broker(options="") as broker, contextlib.suppress(KeyboardInterrupt):
        print(f"{broker.url}  (admin: {broker.admin})", flush=True)
        signal.pause()


def run_in(namespace: Namespace, command: Sequence[str], **options: Any) -> int:
    """Run a command, in which {} stands for the namespace's URL; its exit status. `options` go to
    `subprocess.run`."""
    words = [namespace.url if word == "{}" else word for word in command]
    environment = {**os.environ, "EXCLUSIVELOG_ADMIN": namespace.admin}
    return subprocess.run(words, env=environment, check=False, **options).returncode


def _run(command: Sequence[str]) -> int:
    if reason := missing():
        raise SystemExit(reason)
    print("starting a Pulsar broker", flush=True)
    with own_broker(options="") as broker:
        return run_in(Namespace.make(broker.url, broker.admin), command)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--"]:
        raise SystemExit(_run(sys.argv[2:]))
    if len(sys.argv) > 1:
        _supervise(Path(sys.argv[1]))
    else:
        _run_until_interrupted()
