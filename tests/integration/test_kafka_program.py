"""`python -m infra.kafka` around a command: its data is kept; what it cannot do is one line."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
