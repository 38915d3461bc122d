"""Control records of synthetic runs."""

from __future__ import annotations

from typing import Final

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.orchestrator.planner import PLANNER
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import (
    ExclusiveRole,
    RoleStarted,
    RunStarted,
    StepCommitted,
    WorkerJoined,
    WorkerReady,
    config_digest,
)
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.schemas.rounds import TakeBatch
from dora_pipe.schemas.wire import sha256_hex

NO_DIGEST: Final = sha256_hex(b"")
"""Placeholder for digests that are not compared."""


def weights(version: int) -> str:
    """Return a version's digest."""
    return sha256_hex(f"weights {version}".encode())


def run_started(config: Config, *, rows: int = 1) -> RunStarted:
    """Return the first record."""
    plain = msgspec.to_builtins(config)
    return RunStarted(
        at_ns=0,
        run=config.run.name,
        schema_version=1,
        config=plain,
        config_digest=config_digest(plain),
        dataset_digest=NO_DIGEST,
        dataset_rows=rows,
        eval_digest=NO_DIGEST,
        eval_rows=config.evaluation.prompts,
        seed=config.run.seed,
        policy=Manifest(digest=weights(0), bytes=0, tensors=()),
        assets_digest=NO_DIGEST,
        planner=PLANNER,
        package="modelled",
    )


def role_started(role: ExclusiveRole) -> RoleStarted:
    return RoleStarted(
        at_ns=0, role=role, incarnation=0, instance="m", host="m", pid=0, package="modelled"
    )


def worker_joined(
    name: str,
    slots: int,
    prefetch: int = 0,
    *,
    kv_tokens: int = 0,
    declares: tuple[str, ...] = ("moves",),
    colocated: bool = False,
) -> WorkerJoined:
    return WorkerJoined(
        at_ns=0,
        worker=name,
        instance="m",
        host="m",
        pid=0,
        slots=slots,
        prefetch=prefetch,
        kv_tokens=kv_tokens,
        engine="modelled",
        engine_version="1",
        dtype="none",
        device="none",
        declares=declares,
        assets_digest=NO_DIGEST,
        reward_digest="",
        package="modelled",
        colocated=colocated,
    )


def worker_ready(
    name: str, incarnation: int, version: int, digest: str, *, load_ms: float
) -> WorkerReady:
    return WorkerReady(
        at_ns=0,
        worker=name,
        incarnation=incarnation,
        version=version,
        digest=digest,
        load_ms=load_ms,
    )


def step_committed(state: State, batch: TakeBatch) -> StepCommitted:
    after = weights(batch.step + 1)
    return StepCommitted(
        at_ns=0,
        step=batch.step,
        attempt=batch.attempt,
        incarnation=state.trainer_incarnation,
        groups=batch.groups,
        batch_digest=batch_digest(batch.groups),
        digest_before=state.policies[state.version],
        digest_after=after,
        policy=Manifest(digest=after, bytes=0, tensors=()),
        contributions=Blob(sha256=NO_DIGEST, bytes=0),
        metrics={},
        settings=batch.settings,
        numerics={},
        decisions_next=0,
        compute_s=0.0,
        parts=batch.parts,
    )
