"""A run on SQLite whose log takes 64 KiB a record, although a third of its trajectories has more.

They are large by what an environment answered: `OBSERVED` tokens that nothing compresses. Large
values lie in ``policies/claims``, as in a real run directory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from dora_pipe.bus import open_bus
from dora_pipe.bus.claim_check import ClaimFiles
from dora_pipe.bus.port import Bus
from dora_pipe.config.load import dump_toml
from dora_pipe.config.model import Config
from dora_pipe.producers.tasks.calls import EnvObserved, EnvStep
from dora_pipe.schemas.wire import sha256_hex
from tests.support.cluster import Cluster, make_config, reward_by_text
from tests.support.inline_tasks import InlineTasks

RECORD_BYTES_MAX = 64 * 1024
"""The least that a configuration may say."""

OBSERVED = 18_000
CLAIMS = "claims"


class Killed(BaseException):
    """A process ends where it stands."""


@dataclass
class Deaths:
    """Whether the next writer of a large value dies when it lies there; who did."""

    due: bool = False
    died: list[str] = field(default_factory=list)


class MortalClaims(ClaimFiles):
    """Dies between a value and the record that would claim it, if that is due."""

    def __init__(self, folder: Path, deaths: Deaths) -> None:
        super().__init__(folder)
        self._deaths = deaths

    def write(self, digest: str, value: bytes) -> None:
        super().write(digest, value)
        if self._deaths.due:
            self._deaths.due = False
            self._deaths.died.append(digest)
            raise Killed


@dataclass
class ClaimCluster(Cluster):
    """A `Cluster` as `dora-pipe run` opens its log."""

    deaths: Deaths = field(default_factory=Deaths)

    def open_log(self) -> Bus:
        claims = MortalClaims(self.store.root / CLAIMS, self.deaths)
        return open_bus(f"sqlite:{self.path}", claims=claims)


def claimed_config(**changes: Any) -> Config:
    """Three steps; contexts that hold what environments say."""
    defaults: dict[str, Any] = {
        "run__steps": 3,
        "run__name": "claimed",
        "groups__per_step": 2,
        "bus__record_bytes_max": RECORD_BYTES_MAX,
        "workers__context_tokens": 2 * OBSERVED,
        "trainer__micro_batch_tokens": 2 * OBSERVED,
        "sampling__max_tokens": 40,
        "evaluation__prompts": 2,
    }
    return make_config(**{**defaults, **changes})


def talkative_tasks() -> InlineTasks:
    """Episodes of two turns; one in three environments says very much in between."""
    tasks = InlineTasks(episodes=True, reward=reward_by_text)
    tasks.step = partial(_observe, tasks)
    return tasks


def _observe(tasks: InlineTasks, call: EnvStep) -> EnvObserved:
    steps = sum(isinstance(one, EnvStep) and one.request == call.request for one in tasks.seen)
    drawn = int(sha256_hex(call.request.encode())[:8], 16)
    chance = Random(drawn)
    count = OBSERVED if drawn % 3 == 0 else 2
    text = " ".join(str(chance.randrange(1, 1 << 31)) for _ in range(count))
    return EnvObserved(request=call.request, text=text, done=steps > 1, tool="calc", ok=True)


def claim_cluster(directory: Path, **changes: Any) -> ClaimCluster:
    """The cluster, with its configuration beside the log."""
    config = claimed_config(**changes)
    cluster = ClaimCluster(directory, config, tasks=talkative_tasks)
    (directory / "config.toml").write_text(dump_toml(config))
    return cluster
