"""Real Kafka brokers from Maven's jars (Java 17) as processes of this machine, one or three.

    with KafkaBroker(folder, 9092) as broker: broker.kill(); broker.start()  # Same data.
    with KafkaCluster(folder, 29092) as cluster: cluster.nodes[0].kill()

A broker dies with the thread that started it.
"""

import fcntl
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "kafka"
HOST, NODES, PORT_STEP = "127.0.0.1", 3, 10_000
START_LIMIT_S, STOP_LIMIT_S, TOOL_LIMIT_S, JARS_LIMIT_S = 60, 20, 60, 300
POLL_S = 0.05
STARTED = b"Kafka Server started"
"""What a broker logs once the controllers count it as serving: before that it refuses topics."""
CLUSTER_ID = "4L6g3nShT-eMCtK--X86sw"
JVM = ("-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class BrokerError(RuntimeError):
    """A broker or tool failed; the message ends with the end of its log."""


class Brokers:
    """Brokers that start and end together."""

    nodes: "list[KafkaBroker]"

    @property
    def bootstrap(self) -> str:
        """`host:port` of every listener without security, joined by commas."""
        return ",".join(node.address("PLAINTEXT") for node in self.nodes)

    def start(self) -> None:
        """Start every broker that does not run; return when all take part. Raises BrokerError."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(KafkaBroker.format, self.nodes))
        try:
            for node in self.nodes:
                if not node.running:
                    node.launch()
            for node in self.nodes:
                node.await_ready()
        except BrokerError:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL: what was acknowledged must survive it."""
        self.stop(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, also to paused brokers, and wait until they are gone."""
        ending = [node.process for node in self.nodes if node.process is not None]
        for process in ending:
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
        for process in ending:
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@dataclass(eq=False)
class KafkaBroker(Brokers):
    """A broker that is a controller too, with the data of its folder."""

    folder: Path
    port: int
    """First of its ports: one per listener, and the controller's."""
    node: int = 1
    host: str = HOST
    """Its name for other machines."""
    listeners: dict[str, str] = field(default_factory=lambda: {"PLAINTEXT": "PLAINTEXT"})
    """Listeners with their protocols."""
    settings: dict[str, str] = field(default_factory=dict)
    """Lines that are added to server.properties or replace its lines."""
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.nodes = self.voters = [self]
        self._log, self._log_start = self.folder / "broker.log", 0

    @property
    def running(self) -> bool:
        """Whether its process exists; a paused one runs."""
        return self.process is not None and self.process.poll() is None

    def address(self, listener: str) -> str:
        return f"{self.host}:{self.port + [*self.listeners].index(listener)}"

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def format(self, *arguments: str) -> None:
        """Write server.properties, and a new data folder by `kafka-storage format`.

        Raises BrokerError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "server.properties"
        own = "".join(f"{key}={value}\n" for key, value in self._properties().items())
        names = ("server", "cluster")[: len(self.voters)]
        files = [(HERE / f"{name}.properties").read_text() for name in names]
        path.write_text("".join([*files, own]))  # The last line of a key counts.
        if not (self.folder / "data").exists():
            words = ("format", "-t", CLUSTER_ID, "-c", str(path))
            tool("kafka.tools.StorageTool", *words, *arguments)

    def launch(self) -> None:
        """Start the process; it may not answer yet. Raises BrokerError."""
        for port in range(self.port, self.port + len(self.listeners) + 1):
            if not is_free(port):
                raise BrokerError(f"{HOST}:{port} is already in use")
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                java("kafka.Kafka", str(self.folder / "server.properties")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the program that started it.
            )

    def await_ready(self) -> None:
        """Return when the broker takes part. Raises BrokerError, and then it does not run."""
        limit = time.monotonic() + START_LIMIT_S
        while STARTED not in self._log.read_bytes()[self._log_start :]:
            if not self.running or time.monotonic() > limit:
                self.kill()
                raise BrokerError(f"no broker at {self.bootstrap}:\n{self.log()[-2000:]}")
            time.sleep(POLL_S)

    def _properties(self) -> dict[str, str]:
        bound = [f"{name}://{self.address(name)}" for name in self.listeners]
        protocols = {"CONTROLLER": "PLAINTEXT", **self.listeners}
        controllers = {
            node.node: f"{HOST}:{node.port + len(node.listeners)}" for node in self.voters
        }
        return {
            "node.id": str(self.node),
            "controller.quorum.voters": ",".join(f"{n}@{door}" for n, door in controllers.items()),
            "listeners": ",".join([*bound, f"CONTROLLER://{controllers[self.node]}"]),
            "advertised.listeners": ",".join(bound),
            "listener.security.protocol.map": ",".join(map(":".join, protocols.items())),
            "log.dirs": str(self.folder / "data"),
            **self.settings,
        }


class KafkaCluster(Brokers):
    """Brokers 1 to 3: topics have 3 replicas, of which 2 must answer. See `KafkaBroker`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.nodes = [
            KafkaBroker(folder / f"node-{node}", port + (node - 1) * PORT_STEP, node)
            for node in range(1, NODES + 1)
        ]
        for broker in self.nodes:
            broker.voters = self.nodes


def missing_tools() -> list[str]:
    return [name for name in ("java", "mvn") if shutil.which(name) is None]


def jars() -> Path:
    """The folder of the broker's jars, copied once by Maven and kept. Raises BrokerError."""
    pom = HERE / "pom.xml"
    folder = CACHE / f"lib-{uuid.uuid5(uuid.NAMESPACE_OID, pom.read_text()).hex[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # One process at a time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
            _run([*command, f"-DoutputDirectory={part}"], JARS_LIMIT_S)
            part.rename(folder)
    return folder


def java(*arguments: str) -> list[str]:
    """The command line of a class of the jars, which dies with the thread that starts it."""
    tie = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    logging = f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}"
    archive = jars().with_suffix(".jsa")  # Of tests: it halves the time of a start.
    shared = [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []
    return [*tie, "java", *JVM, *shared, logging, "-cp", f"{jars()}/*", *arguments]


def tool(*arguments: str) -> str:
    """Run a class of the jars to its end; return what it printed. Raises BrokerError."""
    return _run(java(*arguments), TOOL_LIMIT_S)


def _run(command: Sequence[str], limit_s: float) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
    )
    if done.returncode:
        raise BrokerError(f"{command[-1]} failed:\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As a broker binds.
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
