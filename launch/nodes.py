"""Start and supervise the trainer ranks of one node.

When a rank fails, the others are stopped. systemd, Slurm or Kubernetes restarts all nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from dora_pipe.config.model import Config, Timing
from dora_pipe.core.errors import ConfigError, UsageError
from dora_pipe.core.system.console import say
from dora_pipe.core.system.linux import die_with
from dora_pipe.launch.supervisor import RunFailed, Supervisor

RANK: Final = "RANK"

STOP_GRACE_S: Final = 10.0
"""In addition to `timing.stop_timeout_s`."""


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
    """Return the environment variables of each rank of this node."""
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
    command: Sequence[str], environments: Sequence[Mapping[str, str]], *, stop_s: float
) -> int:
    """Start the ranks of a node and wait for them.

    Returns the exit code of the first failed rank, or 0; stopped ranks have `stop_s`.
    """
    ranks = {
        f"rank {environment[RANK]} of the trainer": environment for environment in environments
    }
    with_all = {"TORCH_CPP_LOG_LEVEL": "FATAL", **os.environ}  # errors are reported in one line

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # only this process receives Ctrl-C; it stops the ranks
            preexec_fn=partial(die_with, os.getpid()),
            env={**with_all, **ranks[name]},
        )

    timing = Timing(max_restarts=0, stop_timeout_s=stop_s)
    try:
        Supervisor(start, stop_order={"ranks": tuple(ranks)}, timing=timing).run()
    except RunFailed as failed:
        say(failed.message)
        return failed.exit_code
    return 0


def run_trainer_node(config: Config, node: Node, words: Sequence[str]) -> int:
    """Run the ranks of this node with the words of a command line; see `run_node`."""
    command = [sys.executable, "-c", "from dora_pipe.cli.main import main; main()", *words]
    ranks = environments(node, ranks_per_node(config, node))
    return run_node(command, ranks, stop_s=config.timing.stop_timeout_s + STOP_GRACE_S)
