"""Tests of nodes of a distributed trainer."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dora_pipe.config.model import Config
from dora_pipe.core.errors import ConfigError, UsageError
from dora_pipe.launch.nodes import Node, environments, ranks_per_node
from tests.support.configs import small_config
from tests.support.user_run import until

AT = "trainer-0:29400"


def _config(**trainer: object) -> Config:
    return small_config(trainer={"kind": "deepspeed", **trainer})


def test_ranks_of_all_nodes_are_numbered_through_and_meet_at_the_first() -> None:
    node = Node(nodes=3, node=1, rendezvous=AT)
    assert ranks_per_node(_config(ranks=6), node) == 2
    first, second = environments(node, 2)
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("2", "3", "6")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"], first["LOCAL_WORLD_SIZE"]) == ("0", "1", "2")
    assert {(row["MASTER_ADDR"], row["MASTER_PORT"]) for row in (first, second)} == {
        ("trainer-0", "29400")
    }


@pytest.mark.parametrize(
    ("nodes", "node", "position", "text"),
    [
        (2, 2, AT, "2 nodes are 0 to 1"),
        (2, 0, "", "is not HOST:PORT"),
        (2, 0, "trainer-0", "is not HOST:PORT"),
        (2, 0, "trainer-0:http", "is not HOST:PORT"),
    ],
)
def test_a_node_that_cannot_be_is_one_line(nodes: int, node: int, position: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Node(nodes=nodes, node=node, rendezvous=position)


def test_ranks_that_are_no_equal_shares_and_trainers_of_one_process_are_refused() -> None:
    node = Node(nodes=2, node=0, rendezvous=AT)
    with pytest.raises(ConfigError, match="3 is not a multiple of 2 nodes"):
        ranks_per_node(_config(ranks=3), node)
    with pytest.raises(ConfigError, match="trainer torch is one process"):
        ranks_per_node(_config(kind="torch"), node)


PARENT = """
import sys
from dora_pipe.launch.nodes import Node, environments, run_node
each = environments(Node(nodes=2, node=0, rendezvous="h:1"), 2)
sys.exit(run_node([sys.executable, "-c", sys.argv[1]], each, stop_s={stop_s}))
"""


def _node(rank_does: str, stop_s: float = 5.0) -> subprocess.Popen[str]:
    script = f"import os, signal, sys, time\nrank = os.environ['RANK']\n{rank_does}"
    return subprocess.Popen(
        [sys.executable, "-c", PARENT.format(stop_s=stop_s), script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output = process.communicate(timeout=60)
    return process.returncode, "".join(output)


def test_a_node_ends_well_when_all_its_ranks_have() -> None:
    assert _ended(_node("pass")) == (0, "")


def test_a_node_ends_with_the_code_of_the_rank_that_failed_and_kills_who_stays() -> None:
    code, text = _ended(_node("sys.exit(3) if rank == '1' else time.sleep(600)", 0.2))
    assert code == 3
    assert "rank 1 of the trainer ended with exit code 3" in text


def test_a_rank_that_is_killed_is_named_and_the_node_may_be_started_again() -> None:
    code, text = _ended(_node("os.kill(os.getpid(), 9) if rank == '0' else sys.exit(7)"))
    assert code in (1, 7), "both may be started again"
    assert "rank 0 of the trainer was killed (SIGKILL)" in text or "exit code 7" in text


def test_a_node_that_is_told_to_stop_tells_its_ranks_and_ends_well() -> None:
    does = "signal.signal(15, lambda *_: sys.exit(0)); os.write(1, b'up\\n'); time.sleep(600)"
    node = _node(does)
    assert node.stdout is not None
    assert [node.stdout.readline(), node.stdout.readline()] == ["up\n", "up\n"]
    node.send_signal(signal.SIGTERM)
    code, text = _ended(node)
    assert (code, "stopping: ranks" in text) == (0, True)


def test_ranks_do_not_outlive_a_node_that_is_killed() -> None:
    does = "os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(600)"
    with _node(does) as node:
        assert node.stdout is not None
        try:
            ranks = [int(node.stdout.readline()) for _ in range(2)]
        finally:
            node.kill()
    until(lambda: not any(map(_lives, ranks)))
    assert [rank for rank in ranks if _lives(rank)] == []


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
