"""Builds the control records of a modelled run; what nobody looks at there is left empty."""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import (
    RoleStarted,
    RunStarted,
    StepCommitted,
    WorkerJoined,
    WorkerReady,
    config_digest,
)
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.schemas.rounds import Assign, TakeBatch
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.sim.modelled_worker import ModelledWorker, WorkerSize

NO_DIGEST: Final = sha256_hex(b"")
"""Stands for every digest that nobody compares."""


class EvaluationSetup(Protocol):
    """What the records say of evaluations."""

    @property
    def every(self) -> int: ...
    @property
    def prompts(self) -> int: ...
    @property
    def siblings(self) -> int: ...


class Setup(Protocol):
    """What the records say of a run."""

    @property
    def group_size(self) -> int: ...
    @property
    def per_step(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def max_staleness(self) -> int: ...
    @property
    def in_flight_batches(self) -> float | None: ...
    @property
    def filter_zero_advantage(self) -> bool: ...
    @property
    def evaluation(self) -> EvaluationSetup | None: ...
    @property
    def plan_period_s(self) -> float: ...
    @property
    def declares(self) -> tuple[str, ...]: ...


def _config(plan: Setup) -> dict[str, Any]:
    staleness: dict[str, Any] = {"max_staleness": plan.max_staleness}
    if plan.in_flight_batches is not None:
        staleness["in_flight_batches"] = plan.in_flight_batches
    return {
        "run": {"name": "modelled", "steps": plan.steps, "seed": 0},
        "model": {"path": "none"},
        "task": {"kind": "none"},
        "groups": {
            "size": plan.group_size,
            "per_step": plan.per_step,
            "filter_zero_advantage": plan.filter_zero_advantage,
        },
        "staleness": staleness,
        "evaluation": _evaluation(plan),
        "bus": {"partitions": 1},
        "timing": {"plan_period_s": plan.plan_period_s},
    }


def _evaluation(plan: Setup) -> dict[str, Any]:
    if plan.evaluation is None:
        return {"prompts": 0}
    one = plan.evaluation
    return {"every": one.every, "prompts": one.prompts, "siblings": one.siblings}


def run_started(plan: Setup) -> RunStarted:
    """The first record of a modelled run."""
    config = msgspec.to_builtins(msgspec.convert(_config(plan), Config))
    return RunStarted(
        at_ns=0,
        run="modelled",
        schema_version=1,
        config=config,
        config_digest=config_digest(config),
        dataset_digest=NO_DIGEST,
        dataset_rows=1,
        eval_digest=NO_DIGEST,
        eval_rows=plan.evaluation.prompts if plan.evaluation is not None else 0,
        seed=0,
        policy=Manifest(digest=NO_DIGEST, bytes=0, tensors=()),
        assets_digest=NO_DIGEST,
        planner="modelled",
        package="modelled",
    )


def role_started() -> RoleStarted:
    """Its trainer begins."""
    return RoleStarted(
        at_ns=0, role="trainer", role_epoch=0, instance="m", host="m", pid=0, package="modelled"
    )


def worker_joined(size: WorkerSize, plan: Setup) -> WorkerJoined:
    """A modelled worker is there."""
    return WorkerJoined(
        at_ns=0,
        worker=size.name,
        instance="m",
        host="m",
        pid=0,
        slots=size.slots,
        prefetch=size.prefetch,
        kv_tokens=0,
        engine="modelled",
        engine_version="1",
        dtype="none",
        device="none",
        declares=plan.declares,
        assets_digest=NO_DIGEST,
        reward_digest="",
        package="modelled",
    )


def worker_ready(worker: ModelledWorker, assigned: Assign) -> WorkerReady:
    """It has loaded what it was assigned."""
    return WorkerReady(
        at_ns=0,
        worker=worker.size.name,
        epoch=worker.epoch,
        version=assigned.version,
        digest=assigned.digest,
        load_ms=worker.batch.rates.load_s * 1e3,
    )


def step_committed(state: State, batch: TakeBatch) -> StepCommitted:
    """The step of this batch is done; weights are names here."""
    after = sha256_hex(f"weights {batch.step + 1}".encode())
    return StepCommitted(
        at_ns=0,
        step=batch.step,
        attempt=batch.attempt,
        role_epoch=0,
        groups=batch.groups,
        batch_digest=batch_digest(batch.groups),
        digest_before=state.policies[state.version],
        digest_after=after,
        policy=Manifest(digest=after, bytes=0, tensors=()),
        contributions=Blob(sha256=NO_DIGEST, bytes=0),
        figures={},
        settings=batch.settings,
        numerics={},
        decisions_next=0,
        compute_s=0.0,
    )
