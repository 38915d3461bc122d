"""Runs a real Kafka broker from Maven's jars as a plain process, and decides nothing about its use.

with KafkaBroker(tmp_path) as broker:
    broker.kill()      # SIGKILL
    broker.start()     # same ports, same data

A broker always has a listener PLAINTEXT, which `bootstrap` names, for its peers and for those who
watch over it. What is tested on another protocol gets a listener of its own, at `address(NAME)`:

KafkaBroker(
    tmp_path,
    listeners=[Listener(name="SECURE", protocol="SASL_SSL")],
    settings={"sasl.enabled.mechanisms": "SCRAM-SHA-256", "ssl.keystore.location": ...},
    format_with=["--add-scram", "SCRAM-SHA-256=[name=w0,password=secret]"],
)
"""

import base64
import fcntl
import gc
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.kafka.jars import (
    CACHE,
    HERE,
    TOOL_LIMIT_S,
    BrokerError,
    class_archive,
    java,
    run_bounded,
)

START_LIMIT_S = 60.0
"""A broker is up in 2 to 3 s; a loaded machine may take ten times that."""
STOP_LIMIT_S = 20.0
POLL_S = 0.05
MAX_STARTS = 3
"""Another process may take a free port between our looking and the broker's binding."""
HOST = "127.0.0.1"
LOWEST_PORT = 10_000
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that the system gives to connections going out; where it is not: 32768 and above."""
MAX_DRAWS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One more door of a broker, on a port of its own."""

    name: str
    protocol: str = "PLAINTEXT"
    """PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL."""
    advertised: str = ""
    """`host:port` that clients are sent to, e.g. a proxy's; empty: the listener itself."""


class KafkaBroker:
    """One broker that is a controller too, with its data in a folder that the caller owns.

    Ports are drawn once, at the first start, so `start` after `kill` or `stop` comes back under
    the same address with the same data. The process dies with the thread that started it.
    `settings` are lines of server.properties that are added or replace ours; `format_with` are
    words for `kafka-storage format`; `port` fixes the ports (this one and those above it), and
    then data that is in the folder already is used. `host` is where other machines find it; its
    peers and controllers are on this one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node: int = 1,
        port: int | None = None,
        listeners: Sequence[Listener] = (),
        settings: Mapping[str, str] | None = None,
        format_with: Sequence[str] = (),
        jvm: Sequence[str] = (),
        host: str = HOST,
    ) -> None:
        self.folder = folder
        self.host = host
        self.node = node
        self.listeners = (Listener(name="PLAINTEXT"), *listeners)
        self.settings = dict(settings or {})
        self.format_with = tuple(format_with)
        self.jvm = tuple(jvm)
        self.peers: Sequence[KafkaBroker] = (self,)
        self._wanted_port = port
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port` for `bootstrap_servers`; known once the broker was started."""
        return self.address("PLAINTEXT")

    @property
    def data(self) -> Path:
        """Where its log lies."""
        return self.folder / "data"

    @property
    def pid(self) -> int:
        """The broker's process; it must be running."""
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended, by itself or by us; a paused one runs."""
        return self._process is not None and self._process.poll() is None

    def address(self, listener: str) -> str:
        """`host:port` where a listener itself listens; known once the broker was started."""
        assert self._ports, "the broker was never started"
        names = [one.name for one in self.listeners]
        return f"{self.host}:{self._ports[1 + names.index(listener)]}"

    def start(self) -> None:
        """Start and return when the broker answers; a stopped or killed one comes back as it was.

        Raises BrokerError when it does not answer within `START_LIMIT_S`.
        """
        start_all([self])

    def stop(self) -> None:
        """Ask the broker to shut down cleanly and wait for it; nothing happens if it is down."""
        self.signal(signal.SIGTERM)
        self.join()

    def kill(self) -> None:
        """SIGKILL: what was acknowledged must survive this."""
        self.signal(signal.SIGKILL)
        self.join()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers, until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def log(self) -> str:
        """Everything that the broker wrote so far."""
        path = self.folder / "broker.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> "KafkaBroker":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # The steps of a start, for a cluster that takes each with all its brokers.

    def draw(self) -> None:
        """Decide the ports: the controller's, then one for each listener."""
        count = 1 + len(self.listeners)
        first = self._wanted_port
        # With a port of the caller's choice all are fixed, so that old data is found again.
        self._ports = [first + count - 1, *range(first, first + count - 1)] if first else []
        self._ports = self._ports or free_ports(count)

    def format(self, cluster: str) -> None:
        """Write server.properties, and the data folder of a new member of the cluster."""
        if self.data.exists() and self._wanted_port is None:
            shutil.rmtree(self.data)
        self.folder.mkdir(parents=True, exist_ok=True)
        properties = self.folder / "server.properties"
        lines = [f"{name}={value}\n" for name, value in self._properties().items()]
        properties.write_text("".join(lines))
        if self.data.exists():
            return
        words = ["format", "-t", cluster, "-c", str(properties), *self.format_with]
        done = run_bounded(java("kafka.tools.StorageTool", *words), TOOL_LIMIT_S)
        if done.returncode:
            raise BrokerError(f"the data folder was not formatted:\n{done.stdout}{done.stderr}")

    def launch(self) -> None:
        """Start the process; it may not answer yet."""
        assert self._process is None, "the broker is running already"
        for port in self._ports:
            if not _free(port):
                raise BrokerError(f"somebody has {HOST}:{port} already")
        with (self.folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                java("kafka.Kafka", str(self.folder / "server.properties"), jvm=self.jvm),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests, which then stop the broker
            )

    def await_ready(self) -> None:
        """Return when the broker takes part; one that does not is killed. Raises BrokerError."""
        limit = time.monotonic() + START_LIMIT_S
        with tidied_client():
            while not _answers(self.bootstrap, self.node):
                if not self.running or time.monotonic() > limit:
                    self.kill()
                    raise BrokerError(f"no broker at {self.bootstrap}:\n{self.log()[-2000:]}")
                time.sleep(POLL_S)

    def signal(self, how: signal.Signals) -> None:
        """Tell a running broker to end; `join` waits for it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)  # a paused one hears nothing
            self._process.send_signal(how)

    def join(self, limit_s: float = STOP_LIMIT_S) -> bool:
        """Wait for the end of a broker that was told to, and make sure of it: whether in time."""
        process = self._process
        if process is None:
            return True
        in_time = True
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            in_time = False
            process.kill()
            process.wait(STOP_LIMIT_S)
        self._process = None
        return in_time

    @property
    def ended(self) -> int | None:
        """The exit status of a broker that ended and was not waited for; negative: a signal."""
        return None if self._process is None else self._process.poll()

    def _properties(self) -> dict[str, str]:
        own = [(one, self.address(one.name)) for one in self.listeners]
        protocols = {"CONTROLLER": "PLAINTEXT"} | {one.name: one.protocol for one, _ in own}
        controller = f"{HOST}:{self._ports[0]}"
        doors = [f"{one.name}://{address}" for one, address in own]
        outside = [f"{one.name}://{one.advertised or address}" for one, address in own]
        voters = [f"{peer.node}@{HOST}:{peer._ports[0]}" for peer in self.peers]
        drawn = {
            "node.id": str(self.node),
            "controller.quorum.voters": ",".join(voters),
            "listeners": ",".join([*doors, f"CONTROLLER://{controller}"]),
            "advertised.listeners": ",".join(outside),
            "listener.security.protocol.map": ",".join(f"{k}:{v}" for k, v in protocols.items()),
            "log.dirs": str(self.data),
        }
        return {**read_properties(HERE / "server.properties"), **drawn, **self.settings}


def start_all(nodes: Sequence[KafkaBroker]) -> None:
    """Start the brokers of a cluster that do not run, and return when all take part.

    Raises BrokerError when one does not in time; then none of them runs.
    """
    again = bool(nodes[0]._ports)
    for attempt in range(1, MAX_STARTS + 1):
        if not again:
            for node in nodes:
                node.draw()
            with ThreadPoolExecutor(len(nodes)) as pool:
                list(pool.map(KafkaBroker.format, nodes, [new_cluster()] * len(nodes)))
        try:
            for node in nodes:
                if not node.running:
                    node.launch()
            for node in nodes:
                node.await_ready()
            return
        except BrokerError:
            end_all(nodes, signal.SIGKILL)
            if again or nodes[0]._wanted_port or attempt == MAX_STARTS:
                raise


def end_all(nodes: Sequence[KafkaBroker], how: signal.Signals) -> list[KafkaBroker]:
    """Tell all to end, then wait; those that did not in time, and were killed."""
    for node in nodes:
        node.signal(how)
    until_s = time.monotonic() + STOP_LIMIT_S
    return [node for node in nodes if not node.join(max(0.0, until_s - time.monotonic()))]


@cache
def archive_classes() -> None:
    """Let a broker start and stop once, and keep what classes it has loaded for those after it.

    A Java that cannot keep them starts brokers as before. Raises BrokerError.
    """
    target = class_archive()
    with (CACHE / "classes.lock").open("w") as lock, TemporaryDirectory(dir=CACHE) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several pytest processes ask at once
        if target.exists():
            return
        part = target.with_suffix(".part")
        first = KafkaBroker(Path(folder), jvm=[f"-XX:ArchiveClassesAtExit={part}"])
        first.start()
        first.signal(signal.SIGTERM)
        if first.join(START_LIMIT_S) and part.exists():  # whole, unless it had to be killed
            part.rename(target)


def read_properties(path: Path) -> dict[str, str]:
    """The settings of a properties file, in their order."""
    lines = path.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def new_cluster() -> str:
    """A cluster id; like Kafka's own it does not look like an option."""
    while (drawn := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()).startswith("-"):
        pass
    return drawn.rstrip("=")


def free_ports(count: int) -> list[int]:
    """That many TCP ports of the loopback in a row, which nobody has now. Raises BrokerError.

    They lie below those of connections going out: such a connection could take the port of a
    broker that starts, or of one that is down for a moment. Where the system leaves too few there,
    they are any.
    """
    ceiling = int(PORT_RANGE.read_text().split()[0]) if PORT_RANGE.exists() else 32_768
    if ceiling < LOWEST_PORT + MAX_DRAWS:
        ceiling = 65_536
    starts = range(LOWEST_PORT, ceiling - count)
    for _ in range(MAX_DRAWS):
        first = secrets.choice(starts)
        ports = list(range(first, first + count))
        if all(map(_free, ports)):
            return ports
    raise BrokerError(f"no {count} free ports in a row between {LOWEST_PORT} and {ceiling}")


@contextmanager
def tidied_client() -> Iterator[None]:
    """The client leaves the sockets of refused connections to the collector; here it is asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()


def _answers(bootstrap: str, node: int) -> bool:
    """Whether the broker lists itself as serving: before that it refuses new topics."""
    from kafka import KafkaAdminClient
    from kafka.errors import KafkaError

    if not _listens(bootstrap):
        return False  # ask the client only when somebody listens: its own retries are slow
    try:
        admin = KafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=5_000)
    except KafkaError:
        return False
    try:
        brokers = admin.describe_cluster()["brokers"]
        return any(one["broker_id"] == node and not one["is_fenced"] for one in brokers)
    except KafkaError:
        return False
    finally:
        admin.close()


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a broker binds
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _listens(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=POLL_S).close()
    except OSError:
        return False
    return True
