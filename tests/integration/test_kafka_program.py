"""`python -m infra.kafka`, alone and around a command: it keeps data and says who dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.port import Append, TopicPartition, TopicSpec
from infra.kafka.broker import NODES, PORT_STEP
from tests.support.kafka_broker import ROOT, free_ports

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

LIMIT_S = 120

APPEND = """
import sys
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
address = sys.argv[1]
admin = KafkaAdminClient(bootstrap_servers=address)
if "kept" not in admin.list_topics():
    admin.create_topics({"kept": {"num_partitions": 1, "replication_factor": 1}})
    admin.wait_for_topics(["kept"])
producer = KafkaProducer(bootstrap_servers=address, acks="all")
print("offset", producer.send("kept", b"value").get(30).offset)
producer.close()
admin.close()
sys.exit(7)
"""


def _program(port: int, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = ["--port", str(port), "--folder", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "infra.kafka", *words, "--", *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_command_gets_the_address_and_the_next_one_finds_what_it_wrote(tmp_path: Path) -> None:
    port, _ = free_ports(2)  # the controller takes the one above
    for offset in (0, 1):
        done = _program(port, tmp_path / "data", sys.executable, "-c", APPEND, "{bootstrap}")
        assert done.returncode == 7, done.stderr
        assert f"kafka://127.0.0.1:{port}" in done.stdout
        assert f"offset {offset}" in done.stdout
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()


def test_a_port_that_somebody_has_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _program(port, tmp_path / "data", "true")
    assert done.returncode == 1
    assert done.stderr == f"error: somebody has 127.0.0.1:{port} already\n"


class Terminal:
    """Three brokers in the foreground of a terminal that somebody reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _port_of_a_cluster()
        words = ["--brokers", "3", "--port", str(self.port), "--folder", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "infra.kafka", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)

    def line(self, *words: str) -> str:
        """The newest line with these words, as soon as there is one."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            for line in reversed(list(self.lines)):
                if all(word in line for word in words):
                    return line
            time.sleep(0.1)
        raise AssertionError(f"no {words} in {self.lines}")

    def pid(self, node: int, *words: str) -> int:
        """The process of a broker, as the terminal tells it."""
        return int(self.line(f"broker {node} at", *words, "process ").rpartition(" ")[2])

    def stop(self) -> None:
        """Press Ctrl-C and wait for its end."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(LIMIT_S)

    def close(self) -> None:
        """Leave nothing behind."""
        self.process.kill()  # its brokers die with it
        self.process.wait(LIMIT_S)
        self._reading.join(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def _port_of_a_cluster() -> int:
    """A port that is free for a cluster: those of all brokers and their controllers."""
    for first in range(10_000, 12_000, 7):
        ports = [first + node * PORT_STEP + more for node in range(NODES) for more in (0, 1)]
        try:
            for port in ports:
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return first
    raise AssertionError("no ports")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with closing(Terminal(tmp_path / "data")) as made:
        yield made


def test_a_killed_broker_is_started_again_while_the_others_go_on(terminal: Terminal) -> None:
    at = TopicPartition("kept", 0)
    url = terminal.line("kafka://").partition("kafka://")[2].partition(", data in")[0]
    first = terminal.pid(2)
    with closing(KafkaBus(url.split(","))) as bus:
        bus.create([TopicSpec(name="kept")])
        bus.writer().append([Append(topic="kept", value=b"before")])
        os.kill(first, signal.SIGKILL)
        terminal.line("broker 2 ended (-9)", "it starts again in 10 s")
        bus.writer().append([Append(topic="kept", value=b"without it")])
        until_s = time.monotonic() + LIMIT_S
        while (second := terminal.pid(2)) == first:
            assert time.monotonic() < until_s
            time.sleep(0.1)
        assert bus.end(at) == 2
    terminal.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_a_broker_that_does_not_stop_in_its_time_is_named_and_killed(terminal: Terminal) -> None:
    pids = [terminal.pid(node) for node in (1, 2, 3)]
    terminal.process.send_signal(signal.SIGINT)
    while terminal.process.poll() is None:  # the terminal wakes a paused broker before it stops it
        with suppress(ProcessLookupError):
            os.kill(pids[2], signal.SIGSTOP)
        time.sleep(0.05)
    terminal.line("broker 3 did not stop in time: killed")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
