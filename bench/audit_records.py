"""The records of a run that never happened: what was played as production writes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec
import numpy as np

from dora_pipe.config.model import Config
from dora_pipe.orchestrator.planner import PLANNER
from dora_pipe.schemas.control import (
    LoggedEntry,
    RoleStarted,
    RunStarted,
    WorkerJoined,
    WorkerReady,
    config_digest,
)
from dora_pipe.schemas.headers import header_pairs
from dora_pipe.schemas.identity import trajectory_seed
from dora_pipe.schemas.policy import Manifest, Tensor, weights_digest
from dora_pipe.schemas.rounds import (
    PlacedRequest,
)
from dora_pipe.schemas.trajectory import Meta, Segment, Times, Trajectory
from dora_pipe.schemas.trajectory_codec import encode_trajectory
from dora_pipe.schemas.wire import SCHEMA_VERSION, sha256_hex

ASSETS: Final = sha256_hex(b"assets")
TURN_NS: Final = 100_000_000
START_NS: Final = 1_790_000_000_000_000_000
POOL_TOKENS: Final = 1 << 20
"""Random tokens and log-probs that trajectories take slices of."""
VOCABULARY: Final = 32_000
PROMPT_SHARE: Final = 4
"""One token of so many is of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlan:
    """A run to be written. Example: ``LogPlan(trajectories=20_000, tokens=2048)``.

    `trajectories` is rounded up to whole steps; `tokens` is the length of each sequence.
    """

    trajectories: int
    tokens: int
    run: str = "synthetic"
    group_size: int = 8
    per_step: int = 16
    partitions: int = 4
    workers: int = 4
    slots: int = 64
    max_staleness: int = 2
    turn_share: float = 0.5
    """Of its requests, a worker ends so many in a turn."""

    @property
    def steps(self) -> int:
        """Training steps of the run."""
        batch = self.group_size * self.per_step
        return -(-self.trajectories // batch)


@dataclass(slots=True, kw_only=True)
class Player:
    name: str
    epoch: int
    version: int = -1
    digest: str = ""
    requests: deque[PlacedRequest] = field(default_factory=deque)


class Encoder:
    """Makes a trajectory's record: every one has tokens of its own, all of one length."""

    def __init__(self, plan: LogPlan) -> None:
        self._plan = plan
        chance = np.random.default_rng(20)
        ids = np.minimum(chance.zipf(1.3, POOL_TOKENS), VOCABULARY - 1)
        self._ids = ids.astype(np.int32)
        self._logprobs = -chance.exponential(0.7, POOL_TOKENS).astype(np.float32)
        prompt = plan.tokens // PROMPT_SHARE
        self._prompt = prompt
        self._mask = [0] * prompt + [1] * (plan.tokens - prompt)

    def __call__(
        self, request: PlacedRequest, player: Player
    ) -> tuple[bytes, tuple[tuple[str, bytes], ...], LoggedEntry]:
        """Value, headers, and the entry that tells of them, without its offset."""
        trajectory = self._trajectory(request, player)
        value, headers = encode_trajectory(trajectory)
        entry = LoggedEntry(
            trajectory=request.trajectory,
            attempt=request.attempt,
            partition=request.spec.partition,
            offset=-1,
            sha256=headers.sha256,
            bytes=len(value),
            tokens=headers.sampled,
            reward=trajectory.reward,
            finish="stop",
        )
        return value, header_pairs(headers), entry

    def _trajectory(self, request: PlacedRequest, player: Player) -> Trajectory:
        spec, tokens, prompt = request.spec, self._plan.tokens, self._prompt
        start = (spec.ordinal * 7919 + request.sibling * 104729) % (POOL_TOKENS - tokens)
        logprobs = self._logprobs[start : start + tokens].copy()
        logprobs[:prompt] = np.nan
        at_ns = START_NS + spec.ordinal
        generated = Segment(
            kind="model",
            start=prompt,
            end=tokens,
            turn=0,
            start_ns=at_ns + 1,
            end_ns=at_ns + 2,
            worker=player.name,
            epoch=player.epoch,
            version=spec.version,
        )
        asked = Segment(kind="prompt", start=0, end=prompt, turn=0, start_ns=at_ns, end_ns=at_ns)
        return Trajectory(
            trajectory=request.trajectory,
            version=spec.version,
            digest=spec.digest,
            token_ids=cast("Sequence[int]", self._ids[start : start + tokens]),
            logprobs=cast("Sequence[float | None]", logprobs),
            sampler_logprobs=cast("Sequence[float | None]", logprobs),
            loss_mask=self._mask,
            reward=float((spec.ordinal + request.sibling) % 2),
            segments=[asked, generated] if prompt else [generated],
            meta=self._meta(request, player, at_ns),
        )

    def _meta(self, request: PlacedRequest, player: Player, at_ns: int) -> Meta:
        spec = request.spec
        return Meta(
            run=self._plan.run,
            schema_version=SCHEMA_VERSION,
            group=spec.group,
            group_size=spec.size,
            sibling=request.sibling,
            attempt=request.attempt,
            purpose=spec.purpose,
            deadline=spec.deadline,
            dataset_digest=spec.dataset_digest,
            index=spec.index,
            data_epoch=spec.data_epoch,
            seed=trajectory_seed(spec.seed, request.sibling),
            prompt_tokens=self._prompt,
            worker=player.name,
            epoch=player.epoch,
            finish="stop",
            times=Times(placed=at_ns, started=at_ns, first_token=at_ns, finished=at_ns),
            prefills=(self._prompt,),
        )


def config_of(plan: LogPlan) -> Config:
    plain = {
        "run": {"name": plan.run, "steps": plan.steps},
        "model": {"path": "model"},
        "task": {"kind": "arithmetic"},
        "groups": {
            "size": plan.group_size,
            "per_step": plan.per_step,
            "filter_zero_advantage": False,
        },
        "staleness": {"max_staleness": plan.max_staleness},
        "evaluation": {"prompts": 0},
        "bus": {"partitions": plan.partitions},
    }
    return msgspec.convert(plain, Config)


def weights(version: int) -> Manifest:
    tensor = Tensor(
        name="weight", dtype="float32", shape=(4,), sha256=sha256_hex(f"weights {version}".encode())
    )
    return Manifest(digest=weights_digest([tensor]), bytes=16, tensors=(tensor,))


def run_started(config: Config) -> RunStarted:
    plain = msgspec.to_builtins(config)
    return RunStarted(
        at_ns=START_NS,
        run=config.run.name,
        schema_version=SCHEMA_VERSION,
        config=plain,
        config_digest=config_digest(plain),
        dataset_digest=ASSETS,
        dataset_rows=100_000,
        eval_digest=ASSETS,
        eval_rows=0,
        seed=config.run.seed,
        policy=weights(0),
        assets_digest=ASSETS,
        planner=PLANNER,
        package="synthetic",
    )


def role_started(role: Any, role_epoch: int) -> RoleStarted:
    return RoleStarted(
        at_ns=START_NS,
        role=role,
        role_epoch=role_epoch,
        instance="synthetic",
        host="synthetic",
        pid=0,
        package="synthetic",
    )


def worker_joined(name: str, slots: int) -> WorkerJoined:
    return WorkerJoined(
        at_ns=START_NS,
        worker=name,
        instance="synthetic",
        host="synthetic",
        pid=0,
        slots=slots,
        prefetch=0,
        kv_tokens=0,
        engine="synthetic",
        engine_version="1",
        dtype="float32",
        device="none",
        declares=("counter_sampling", "batch_invariant", "prefill_exact", "kv_export"),
        assets_digest=ASSETS,
        reward_digest=ASSETS,
        package="synthetic",
    )


def worker_ready(player: Player) -> WorkerReady:
    return WorkerReady(
        at_ns=START_NS,
        worker=player.name,
        epoch=player.epoch,
        version=player.version,
        digest=player.digest,
        load_ms=1.0,
    )
