"""Real Kafka brokers from Maven's jars (Java 17) as processes of this machine, one or three.

    with KafkaBroker(folder) as broker: broker.kill(); broker.start()  # Same ports and data.
    with KafkaCluster(folder) as cluster: cluster.nodes[0].kill()

A broker dies with the thread that started it. `settings` add to or replace lines of
server.properties; `format_with` are arguments of `kafka-storage format`.
"""

import fcntl
import gc
import os
import secrets
import shlex
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
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "kafka"
HOST, NODES, PORT_STEP = "127.0.0.1", 3, 10_000
START_LIMIT_S, STOP_LIMIT_S, TOOL_LIMIT_S, JARS_LIMIT_S = 60, 20, 60, 300
POLL_S = 0.05
PORTS = range(10_000, 32_000)
"""Ports below those of outgoing connections, which could take one while a broker is down."""
JVM = ("-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
TOOLS: Mapping[str, str] = {
    "kafka-acls.sh": "org.apache.kafka.tools.AclCommand",
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
    "kafka-delete-records.sh": "org.apache.kafka.tools.DeleteRecordsCommand",
    "kafka-features.sh": "org.apache.kafka.tools.FeatureCommand",
    "kafka-reassign-partitions.sh": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
}


class BrokerError(RuntimeError):
    """A broker or tool failed; the message ends with the end of its log."""


class Listener(NamedTuple):
    """An additional listener of a broker; `advertised` is `host:port` of a proxy."""

    name: str
    protocol: str = "PLAINTEXT"
    advertised: str = ""


class Brokers:
    """Brokers that start and end together."""

    nodes: "Sequence[KafkaBroker]"

    @property
    def bootstrap(self) -> str:
        """`host:port` of every listener without security, joined by commas; known after a start."""
        return ",".join(node.address("PLAINTEXT") for node in self.nodes)

    def start(self) -> None:
        """Start every broker that does not run; return when all take part. Raises BrokerError."""
        nodes = self.nodes
        if not all(node.formatted for node in nodes):
            for node in nodes:
                if not node.fixed:
                    node.port = free_ports(len(node.listeners) + 1)[0]
            with ThreadPoolExecutor(len(nodes)) as pool:
                list(pool.map(KafkaBroker.format, nodes, [new_cluster()] * len(nodes)))
        try:
            for node in nodes:
                if not node.running:
                    node.launch()
            for node in nodes:
                node.await_ready()
        except BrokerError:
            self.kill()
            raise

    def stop(self) -> None:
        """Shut down cleanly."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: what was acknowledged must survive it."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        for node in self.nodes:
            node.signal(number)
        for node in self.nodes:
            node.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class KafkaBroker(Brokers):
    """A broker that is a controller too. Ports are drawn at the first start; with `port` they are
    fixed, and data in the folder is used again. `host` is its name for other machines."""

    def __init__(
        self,
        folder: Path,
        *,
        node: int = 1,
        port: int | None = None,
        listeners: Sequence[Listener] = (),
        settings: Mapping[str, str] | None = None,
        format_with: Sequence[str] = (),
        host: str = HOST,
        jvm: Sequence[str] = (),
    ) -> None:
        self.folder, self.node, self.host, self.data = folder, node, host, folder / "data"
        self.listeners = (Listener("PLAINTEXT"), *listeners)
        self.nodes: Sequence[KafkaBroker] = (self,)
        self.voters: Sequence[KafkaBroker] = self.nodes
        self.fixed, self.port = port is not None, port or 0
        self.formatted = False
        self._settings, self._format_with, self._jvm = dict(settings or {}), format_with, jvm
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running broker."""
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its process exists; a paused one runs."""
        return self._process is not None and self._process.poll() is None

    def address(self, listener: str) -> str:
        """`host:port` of a listener."""
        assert self.port, "the broker was never started"
        names = [each.name for each in self.listeners]
        return f"{self.host}:{self.port + names.index(listener)}"

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers, until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def log(self) -> str:
        """Everything that the broker printed."""
        path = self.folder / "broker.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def format(self, cluster: str) -> None:
        """Write server.properties, and the data folder of a new member. Raises BrokerError."""
        if self.data.exists() and not self.fixed:
            shutil.rmtree(self.data)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "server.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in self._properties().items()))
        if not self.data.exists():
            words = ("format", "-t", cluster, "-c", str(path), *self._format_with)
            tool("kafka.tools.StorageTool", *words)
        self.formatted = True

    def launch(self) -> None:
        """Start the process; it may not answer yet. Raises BrokerError."""
        for port in range(self.port, self.port + len(self.listeners) + 1):
            if not _free(port):
                raise BrokerError(f"{HOST}:{port} is already in use")
        with (self.folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                java("kafka.Kafka", str(self.folder / "server.properties"), jvm=self._jvm),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the program that started it.
            )

    def await_ready(self) -> None:
        """Return when the broker takes part. Raises BrokerError, and then it does not run."""
        limit = time.monotonic() + START_LIMIT_S
        with tidied_client():
            while not _answers(self.bootstrap, self.node):
                if not self.running or time.monotonic() > limit:
                    self.kill()
                    raise BrokerError(f"no broker at {self.bootstrap}:\n{self.log()[-2000:]}")
                time.sleep(POLL_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to a running broker, also to a paused one."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)

    def join(self) -> None:
        """Wait for its end, and kill it after the limit."""
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _properties(self) -> dict[str, str]:
        controller = self.port + len(self.listeners)
        doors = {
            listener: f"{listener.name}://{self.address(listener.name)}"
            for listener in self.listeners
        }
        shown = [f"{door.name}://{door.advertised or self.address(door.name)}" for door in doors]
        protocols = {"CONTROLLER": "PLAINTEXT"} | {door.name: door.protocol for door in doors}
        voters = [
            f"{voter.node}@{HOST}:{voter.port + len(voter.listeners)}" for voter in self.voters
        ]
        return {
            **read_properties(HERE / "server.properties"),
            "node.id": str(self.node),
            "controller.quorum.voters": ",".join(voters),
            "listeners": ",".join([*doors.values(), f"CONTROLLER://{HOST}:{controller}"]),
            "advertised.listeners": ",".join(shown),
            "listener.security.protocol.map": ",".join(f"{k}:{v}" for k, v in protocols.items()),
            "log.dirs": str(self.data),
            **self._settings,
        }


class KafkaCluster(Brokers):
    """Brokers 1 to 3: topics have 3 replicas, of which 2 must answer. See `KafkaBroker`."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        listeners: Sequence[Listener] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes: Sequence[KafkaBroker] = tuple(
            KafkaBroker(
                folder / f"node-{node}",
                node=node,
                port=port and port + (node - 1) * PORT_STEP,
                listeners=listeners,
                settings=read_properties(HERE / "cluster.properties") | dict(settings or {}),
            )
            for node in range(1, NODES + 1)
        )
        for node in self.nodes:
            node.voters = self.nodes


def missing_tools() -> list[str]:
    """Programs that a broker needs and this machine lacks."""
    return [name for name in ("java", "mvn") if shutil.which(name) is None]


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Let one process at a time into the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def jars() -> Path:
    """The folder of the broker's jars, copied once by Maven and kept. Raises BrokerError."""
    pom = HERE / "pom.xml"
    folder = CACHE / f"lib-{uuid.uuid5(uuid.NAMESPACE_OID, pom.read_text()).hex[:12]}"
    with _locked("lock"):
        if not folder.is_dir():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
            _run([*command, f"-DoutputDirectory={part}"], JARS_LIMIT_S)
            part.rename(folder)
    return folder


def java(*arguments: str, jvm: Sequence[str] = ()) -> list[str]:
    """The command line of a class of the jars; it dies with the thread that starts it."""
    tie = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    logging = f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}"
    archive = jars().with_suffix(".jsa")
    shared = [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []
    return [*tie, "java", *JVM, *shared, *jvm, logging, "-cp", f"{jars()}/*", *arguments]


@cache
def archive_classes() -> None:
    """Keep the loaded classes of one broker, which halves the start of those after it."""
    archive = jars().with_suffix(".jsa")
    with _locked("classes.lock"), TemporaryDirectory(dir=CACHE) as folder:
        if not archive.exists():
            part = Path(folder) / "part.jsa"
            broker = KafkaBroker(Path(folder), jvm=[f"-XX:ArchiveClassesAtExit={part}"])
            broker.start()
            broker.stop()
            if part.exists():  # Not where it had to be killed.
                part.rename(archive)


def tool(*arguments: str) -> str:
    """Run a class of the jars to its end; return what it printed. Raises BrokerError."""
    return _run(java(*arguments), TOOL_LIMIT_S)


def write_tools(folder: Path) -> None:
    """Write Kafka's own commands as scripts for a PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, started in TOOLS.items():
        words = shlex.join([word for word in java(started) if word not in ("--pdeathsig", "KILL")])
        (folder / name).write_text(f'#!/bin/sh\nexec {words.removeprefix("setpriv ")} "$@"\n')
        (folder / name).chmod(0o755)


def read_properties(path: Path) -> dict[str, str]:
    """Read the settings of a properties file."""
    lines = path.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def new_cluster() -> str:
    """Make a cluster id; it never looks like an option."""
    return f"c{secrets.token_urlsafe(16)[1:]}"


def free_ports(count: int) -> list[int]:
    """Draw free TCP ports of the loopback in a row."""
    while True:
        first = secrets.choice(PORTS)
        ports = list(range(first, first + count))
        if all(map(_free, ports)):
            return ports


@contextmanager
def tidied_client() -> Iterator[None]:
    """Collect the sockets of refused connections, which kafka-python leaves to the collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()


def _run(command: Sequence[str], limit_s: float) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
    )
    if done.returncode:
        raise BrokerError(f"{command[-1]} failed:\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout


def _answers(bootstrap: str, node: int) -> bool:
    """Whether the broker lists itself as serving: before that it refuses new topics."""
    from kafka import KafkaAdminClient
    from kafka.errors import KafkaError

    host, port = bootstrap.split(":")
    try:  # The client's own retries are slow.
        socket.create_connection((host, int(port)), timeout=POLL_S).close()
        admin = KafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=5_000)
    except (OSError, KafkaError):
        return False
    try:
        brokers = admin.describe_cluster()["brokers"]
        return any(broker["broker_id"] == node and not broker["is_fenced"] for broker in brokers)
    except KafkaError:
        return False
    finally:
        admin.close()


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As a broker binds.
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
