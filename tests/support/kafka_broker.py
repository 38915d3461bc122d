"""Runs a real Kafka broker from Maven's jars as a plain process, and decides nothing about its use.

In a test, take the fixture `kafka_broker` (one broker per session). A test that kills or stops its
broker makes one of its own:

    with KafkaBroker(tmp_path) as broker:
        broker.kill()      # SIGKILL
        broker.start()     # same ports, same data

On a terminal: `make kafka` runs `python -m tests.support.kafka_broker` in the foreground.
"""

import argparse
import base64
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from string import Template
from types import FrameType, TracebackType

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra" / "kafka"
CACHE = ROOT / "build" / "kafka"

START_LIMIT_S = 60.0
"""A broker is up in 2 to 3 s; a loaded machine may take ten times that."""
STOP_LIMIT_S = 20.0
JARS_LIMIT_S = 300.0
"""Maven downloads 54 MB the first time."""
POLL_S = 0.05
MAX_STARTS = 3
"""Another process may take a free port between our looking and the broker's binding."""
JVM = (
    "-Xms256m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    f"-Dlog4j2.configurationFile={INFRA / 'log4j2.properties'}",
)


class BrokerError(RuntimeError):
    """The broker did not do what it was told; the message ends with the last lines of its log."""


def missing_tools() -> list[str]:
    """The programs that a broker needs and this machine lacks."""
    return [name for name in ("java", "mvn") if shutil.which(name) is None]


def jars() -> Path:
    """The folder of the broker's jars, copied once by Maven and then kept under build/."""
    pom = INFRA / "pom.xml"
    folder = CACHE / f"lib-{uuid.uuid5(uuid.NAMESPACE_OID, pom.read_text()).hex[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several pytest processes ask at once
        if not folder.is_dir():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
            done = subprocess.run(
                [*command, f"-DoutputDirectory={part}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=JARS_LIMIT_S,
                check=False,
            )
            if done.returncode:
                raise BrokerError(f"Maven copied no jars:\n{done.stdout[-2000:]}{done.stderr}")
            part.rename(folder)
    return folder


def free_ports(count: int) -> list[int]:
    """That many different TCP ports of the loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class KafkaBroker:
    """One broker that is its own controller, with its data in a folder that the caller owns.

    Ports are drawn once, at the first start, so `start` after `kill` or `stop` comes back under
    the same address with the same data.
    """

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        self.folder = folder
        self._wanted_port = port
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port` for `bootstrap_servers`; known once the broker was started."""
        assert self._ports, "the broker was never started"
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        """The broker's process; it must be running."""
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    def start(self) -> None:
        """Start and return when the broker answers; a stopped or killed one comes back as it was.

        Raises BrokerError when it does not answer within `START_LIMIT_S`.
        """
        assert self._process is None, "the broker is running already"
        again = bool(self._ports)
        for attempt in range(1, MAX_STARTS + 1):
            if not again:
                self._format()
            try:
                self._launch()
                return
            except BrokerError:
                if again or self._wanted_port or attempt == MAX_STARTS:
                    raise

    def stop(self) -> None:
        """Ask the broker to shut down cleanly and wait for it; nothing happens if it is down."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: what was acknowledged must survive this."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers, until `thaw`."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT after `freeze`."""
        os.kill(self.pid, signal.SIGCONT)

    def log(self) -> str:
        """Everything that the broker wrote so far."""
        path = self.folder / "broker.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self) -> int:
        """Block until the broker ends by itself; its exit status."""
        assert self._process is not None, "the broker is not running"
        return self._process.wait()

    def __enter__(self) -> "KafkaBroker":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def _java(self, *arguments: str) -> list[str]:
        # A test process that dies must not leave a broker behind.
        tie = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        return [*tie, "java", *JVM, "-cp", f"{jars()}/*", *arguments]

    def _format(self) -> None:
        data = self.folder / "data"
        if data.exists() and self._wanted_port is None:
            shutil.rmtree(data)
        self.folder.mkdir(parents=True, exist_ok=True)
        drawn = free_ports(2)
        # With a port of the caller's choice both are fixed, so that old data is found again.
        self._ports = [self._wanted_port, self._wanted_port + 1] if self._wanted_port else drawn
        text = Template((INFRA / "server.properties").read_text()).substitute(
            port=self._ports[0], controller_port=self._ports[1], data=data
        )
        properties = self.folder / "server.properties"
        properties.write_text(text)
        if data.exists():
            return
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        storage = ["kafka.tools.StorageTool", "format", "--standalone", "-t", cluster]
        done = subprocess.run(
            self._java(*storage, "-c", str(properties)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise BrokerError(f"the data folder was not formatted:\n{done.stdout}{done.stderr}")

    def _launch(self) -> None:
        with (self.folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._java("kafka.Kafka", str(self.folder / "server.properties")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests, which then stop the broker
            )
        limit = time.monotonic() + START_LIMIT_S
        while not _answers(self.bootstrap):
            if self._process.poll() is not None or time.monotonic() > limit:
                self.kill()
                raise BrokerError(f"no broker at {self.bootstrap}:\n{self.log()[-2000:]}")
            time.sleep(POLL_S)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)  # a frozen one hears nothing
        process.send_signal(how)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_LIMIT_S)


def _answers(bootstrap: str) -> bool:
    """Whether the broker lists itself as serving: before that it refuses new topics."""
    from kafka import KafkaAdminClient
    from kafka.errors import KafkaError

    host, port = bootstrap.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=POLL_S).close()
    except OSError:
        return False  # ask the client only when somebody listens: its own retries are slow
    try:
        admin = KafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=5_000)
    except KafkaError:
        return False
    try:
        brokers = admin.describe_cluster()["brokers"]
        return any(not broker["is_fenced"] for broker in brokers)
    except KafkaError:
        return False
    finally:
        admin.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a broker on a fixed port in the foreground until Ctrl-C; its data is kept."""
    parser = argparse.ArgumentParser(prog="make kafka", description=main.__doc__)
    parser.add_argument("--port", type=int, default=9092)
    parser.add_argument("--folder", type=Path, default=CACHE / "foreground")
    options = parser.parse_args(arguments)
    missing = missing_tools()
    if missing:
        print(f"error: {' and '.join(missing)} not found", file=sys.stderr)
        print("hint: a broker without containers needs Java 17 and Maven", file=sys.stderr)
        return 1

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    broker = KafkaBroker(options.folder, port=options.port)
    try:
        broker.start()
        print(f"broker at {broker.bootstrap}, data in {options.folder}; Ctrl-C stops it")
        sys.stdout.flush()
        return broker.wait()
    except KeyboardInterrupt:
        return 0
    except BrokerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        broker.stop()


if __name__ == "__main__":
    sys.exit(main())
