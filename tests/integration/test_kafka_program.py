"""`python -m infra.kafka`, alone and around a command: it keeps data and ends its brokers."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.core.pure.records import Append, TopicPartition
from infra.kafka.broker import NODES
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
    assert done.stderr == f"error: 127.0.0.1:{port} is already in use\n"


@contextmanager
def kill_at_end(program: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        program.kill()  # its brokers die with it


def test_three_brokers_end_with_their_terminal(tmp_path: Path) -> None:
    port, _ = free_ports(2, NODES)
    words = ["--brokers", "3", "--port", str(port), "--folder", str(tmp_path / "data")]
    program = subprocess.Popen(
        [sys.executable, "-m", "infra.kafka", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    with program, kill_at_end(program):
        assert program.stdout is not None
        url = program.stdout.readline().partition("kafka://")[2].partition(", data in")[0]
        with closing(KafkaBus(url.split(","))) as bus:
            bus.create([TopicSpec(name="kept")])
            bus.writer().append([Append(topic="kept", value=b"once")])
            assert bus.end(TopicPartition("kept", 0)) == 1
        program.send_signal(signal.SIGINT)
        assert program.wait(LIMIT_S) == 0
    for address in url.split(","):
        host, _, number = address.partition(":")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, int(number)), timeout=1).close()
