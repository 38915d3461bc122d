"""`infra/slurm/dora-pipe.sbatch` under a fake Slurm whose nodes are local process groups."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.kafka_broker import free_ports
from tests.support.tidy import ROOT
from tests.support.user_run import furnish

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Local node names; the first runs the broker."""


class SlurmJob:
    """User folder shared by all nodes, and the submitted job. `apart` gives each node a private
    disk for policies and a store at an address."""

    def __init__(
        self, folder: Path, *, nodes: int = 2, apart: bool = False, **variables: str
    ) -> None:
        self.folder = folder
        self.scratch = folder / "scratch"
        self.run = f"slurm-{secrets.token_hex(4)}"
        self.port, _, rendezvous = free_ports(3)  # the broker takes two
        self.url = f"kafka://{NODES[0]}:{self.port}/{self.run}"
        self.config = furnish(folder) / "config.toml"
        text = self.config.read_text().replace('"tiny"', f'"{self.run}"')
        key, scheme = ("url", "file://") if apart else ("path", "")
        self.config.write_text(text + f'[store]\n{key} = "{scheme}{folder / "store"}"\n')
        if apart:
            variables["NODE_DIRS"] = str(self.scratch)
        self._variables = {
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": ",".join(NODES[:nodes]),
            "SLURM_JOB_ID": "1",
            "SCRATCH_DIR": str(self.scratch),
            "KAFKA_PORT": str(self.port),
            "RENDEZVOUS_PORT": str(rendezvous),
            "VENV": str(Path(sys.executable).parent.parent),
            "PATH": f"{ROOT / 'tests' / 'support' / 'slurm'}:{os.environ['PATH']}",
            **variables,
        }

    @contextmanager
    def submitted(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        script = ROOT / "infra" / "slurm" / "dora-pipe.sbatch"
        with (self.folder / "job.out").open("ab") as text:
            job = subprocess.Popen(
                ["bash", script, str(self.config), *words],
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=text,
                env={**os.environ, **self._variables},
            )
        try:
            yield job
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(60)

    def output(self) -> str:
        logs = [self.folder / "job.out", *sorted(self.scratch.glob("*.log"))]
        return "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs if log.exists())

    def processes(self, words: str = "") -> list[int]:
        results = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            ours = self.run in line.split() or str(self.folder) in line
            if ours and words in line:
                results.append(int(entry.name))
        return results
