"""The records that `bench plan` tells its planner and its machine; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.orchestrator.planner import PLANNER
from dora_pipe.orchestrator.state import State, Worker
from dora_pipe.schemas.control import (
    ExclusiveRole,
    LoggedEntry,
    RoleStarted,
    RunStarted,
    TrajectoriesLogged,
    WorkerJoined,
    WorkerReady,
)
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.wire import sha256_hex

GROUP_SIZE: Final = 16
ASSETS: Final = sha256_hex(b"assets")
STEPS: Final = 1_000_000
"""More than any measurement commits."""


def config_of(*, per_step: int, max_staleness: int, in_flight_batches: float) -> Config:
    """A run that never ends and evaluates nothing."""
    plain = {
        "run": {"name": "bench", "steps": STEPS},
        "model": {"path": "model"},
        "task": {"kind": "arithmetic"},
        "groups": {"size": GROUP_SIZE, "per_step": per_step},
        "staleness": {"max_staleness": max_staleness, "in_flight_batches": in_flight_batches},
        "evaluation": {"prompts": 0},
    }
    return msgspec.convert(plain, Config)


def logged(
    state: State, worker: Worker, names: Sequence[str], offset: int, *, version: int | None = None
) -> TrajectoriesLogged:
    """A worker has logged some of its requests; under its own version, if nothing is said."""
    known = worker.target if version is None else version
    return TrajectoriesLogged(
        at_ns=0,
        worker=worker.name,
        epoch=worker.epoch,
        version=known,
        digest=state.policies[known],
        trajectories=tuple(_entry(state, name, offset) for name in names),
    )


def _entry(state: State, trajectory: str, offset: int) -> LoggedEntry:
    request = state.requests[trajectory]
    return LoggedEntry(
        trajectory=trajectory,
        attempt=request.attempt,
        partition=state.groups[request.group].spec.partition,
        offset=offset,
        sha256=ASSETS,
        bytes=1000,
        tokens=100,
        reward=float((request.sibling + offset) % 2),
        finish="stop",
    )


def run_started(config: Config) -> RunStarted:
    """The beginning of the log."""
    return RunStarted(
        at_ns=0,
        run=config.run.name,
        schema_version=1,
        config=msgspec.to_builtins(config),
        config_digest=ASSETS,
        dataset_digest=ASSETS,
        dataset_rows=1_000_000,
        eval_digest=ASSETS,
        eval_rows=0,
        seed=0,
        policy=Manifest(digest=weights(0), bytes=0, tensors=()),
        assets_digest=ASSETS,
        planner=PLANNER,
        package="bench",
    )


def role_started(role: ExclusiveRole) -> RoleStarted:
    """The first incarnation of a role."""
    return RoleStarted(
        at_ns=0, role=role, role_epoch=0, instance="bench", host="bench", pid=0, package="bench"
    )


def joined(name: str, slots: int) -> WorkerJoined:
    """A worker with so many slots, whose requests can move."""
    return WorkerJoined(
        at_ns=0,
        worker=name,
        instance="bench",
        host="bench",
        pid=0,
        slots=slots,
        prefetch=0,
        kv_tokens=1_000_000,
        engine="bench",
        engine_version="0",
        dtype="float32",
        device="none",
        declares=("moves",),
        assets_digest=ASSETS,
        reward_digest=ASSETS,
        package="bench",
    )


def ready(worker: Worker) -> WorkerReady:
    """A worker has loaded its target."""
    return WorkerReady(
        at_ns=0,
        worker=worker.name,
        epoch=worker.epoch,
        version=worker.target,
        digest=worker.digest,
        load_ms=1000.0,
    )


def weights(version: int) -> str:
    """Digest of a version."""
    return sha256_hex(f"weights {version}".encode())
