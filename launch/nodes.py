"""Start and supervise the trainer ranks of one node.

When a rank fails, the others end or are killed. systemd, Slurm or Kubernetes restarts all nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from dora_pipe.config.model import Config
from dora_pipe.core.errors import ConfigError, ResourceError, UsageError
from dora_pipe.core.system.console import say
from dora_pipe.core.system.linux import die_with
from dora_pipe.launch.supervisor import how

RANK: Final = "RANK"

NOTICE_S: Final = 15.0

STOP_GRACE_S: Final = 10.0
"""In addition to `timing.stop_timeout_s`."""

LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Index of a trainer node, and the rendezvous of all ranks."""

    nodes: int
    node: int
    rendezvous: str
    """HOST:PORT of node 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise UsageError(f"--node {self.node}: {self.nodes} nodes are 0 to {self.nodes - 1}")
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(
                f"--rendezvous: `{self.rendezvous}` is not HOST:PORT",
                hint="an address of node 0 that all nodes can reach, with a free port",
            )


def ranks_per_node(config: Config, node: Node) -> int:
    """Return the ranks per node. Raises ConfigError if they do not divide evenly."""
    trainer = config.trainer
    if trainer.kind != "deepspeed":
        raise ConfigError(
            f"--nodes {node.nodes}: trainer {trainer.kind} is one process",
            hint="trainer.kind = 'deepspeed'",
        )
    if trainer.ranks % node.nodes:
        raise ConfigError(
            f"trainer.ranks: {trainer.ranks} is not a multiple of {node.nodes} nodes",
            hint=f"trainer.ranks = {node.nodes} times the GPUs of a node",
        )
    return trainer.ranks // node.nodes


def environments(node: Node, ranks: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank of this node, as under torchrun."""
    host, _, port = node.rendezvous.rpartition(":")
    return [
        {
            RANK: str(node.node * ranks + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(node.nodes * ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }
        for local in range(ranks)
    ]


def run_node(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    stop_s: float,
    notice_s: float = NOTICE_S,
) -> int:
    """Start the ranks of a node and wait for them.

    Returns the exit code of the first failed rank, or 0; stopped ranks (SIGTERM, SIGINT) have
    `stop_s`.
    """
    with_all = {"TORCH_CPP_LOG_LEVEL": "FATAL", **os.environ}  # errors are reported in one line
    ranks = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # only this process receives Ctrl-C; it stops the ranks
            preexec_fn=partial(die_with, os.getpid()),
            env={**with_all, **environment},
        )
        for environment in environments
    ]
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    try:
        failed = _first_failure(ranks, signals)
        if signals:
            _end(ranks, stop_s)
            return 0
        if failed is None:
            return 0
        say(f"rank {environments[failed][RANK]} of the trainer {how(ranks[failed].returncode)}")
        _wait(ranks, notice_s)
        code = ranks[failed].returncode
        return code if code > 0 else ResourceError.exit_code
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]], signals: Sequence[int]) -> int | None:
    while not signals:
        codes = [rank.poll() for rank in ranks]
        failed = [local for local, code in enumerate(codes) if code]
        if failed:
            return failed[0]
        if None not in codes:
            return None
        time.sleep(LOOK_S)
    return None


def _end(ranks: Sequence[subprocess.Popen[bytes]], stop_s: float) -> None:
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    _wait(ranks, stop_s)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], wait_s: float) -> None:
    give_up_s = time.monotonic() + wait_s
    while time.monotonic() < give_up_s and any(rank.poll() is None for rank in ranks):
        time.sleep(LOOK_S)


def command_of(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", "from dora_pipe.cli.main import main; main()", *words]
