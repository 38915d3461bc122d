"""Control records for tests of the orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dora_pipe.config.model import Config, Evaluation, Task
from dora_pipe.config.several import pool_specs
from dora_pipe.orchestrator.planner import PLANNER
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import (
    BatchRefused,
    Command,
    DataSet,
    ExclusiveRole,
    GroupScored,
    Offender,
    RequestFailed,
    RequestReleased,
    Resume,
    RoleStarted,
    RunStarted,
    ScoredSample,
    StepCommitted,
    TakenGroup,
    TrajectoryLogged,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
    config_digest,
)
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.schemas.rounds import ScheduledRequest, ScoreGroup
from dora_pipe.schemas.wire import sha256_hex

RUN = "tiny"
ASSETS = sha256_hex(b"assets")


def make_config(**changes: Any) -> Config:
    """Small run: 2 groups of 2 per step, max_staleness 1, 4 steps;
    ``make_config(staleness__x=...)``."""
    plain: dict[str, Any] = {
        "run": {"name": RUN, "steps": 4, "seed": 7},
        "model": {"path": "model"},
        "task": {"kind": "arithmetic"},
        "rollout": {"group_size": 2, "prompts_per_step": 2, "max_attempts": 3},
        "staleness": {"max_staleness": 1},
        "evaluation": {"prompts": 0},
        "bus": {"partitions": 2},
        "timing": {"heartbeat_s": 0.5, "lease_s": 5.0},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        plain.setdefault(section, {})[name] = value
    return msgspec.convert(plain, Config)


def with_several(
    config: Config, tasks: dict[str, float], evaluations: Sequence[Evaluation] = ()
) -> Config:
    of = [Task(kind="arithmetic", name=name, ratio=ratio) for name, ratio in tasks.items()]
    first, *more = evaluations or (config.evaluation,)
    return msgspec.structs.replace(
        config,
        task=of[0],
        more_tasks=tuple(of[1:]),
        evaluation=first,
        more_evaluations=tuple(more) or msgspec.UNSET,
    )


def weights(version: int) -> str:
    return sha256_hex(f"weights {version}".encode())


def manifest(version: int) -> Manifest:
    return Manifest(digest=weights(version), bytes=0, tensors=())


def run_started(
    config: Config, *, rows: int = 10, eval_rows: int = 4, together: tuple[str, ...] = ()
) -> RunStarted:
    """Groups of the sources in `together` are scored together."""
    plain = msgspec.to_builtins(config)
    return RunStarted(
        at_ns=0,
        run=config.run.name,
        schema_version=1,
        config=plain,
        config_digest=config_digest(plain),
        dataset_digest=sha256_hex(b"data"),
        dataset_rows=rows,
        eval_digest=sha256_hex(b"eval data"),
        eval_rows=eval_rows,
        seed=config.run.seed,
        policy=manifest(0),
        assets_digest=ASSETS,
        planner=PLANNER,
        package="0",
        scored_together=together,
        datasets={
            source: DataSet(digest=data_of(source), rows=rows)
            for spec in pool_specs(config)
            for source in spec.sources
            if "/" in source
        },
    )


def data_of(source: str) -> str:
    return sha256_hex(source.encode())


def role_started(role: ExclusiveRole, incarnation: int) -> RoleStarted:
    return RoleStarted(
        at_ns=0, role=role, incarnation=incarnation, instance="i", host="h", pid=1, package="0"
    )


def joined(
    worker: str,
    *,
    slots: int = 4,
    prefetch: int = 0,
    assets: str = ASSETS,
    kv_tokens: int = 1024,
    moves: bool = False,
    versions: int = 1,
    colocated: bool = False,
) -> WorkerJoined:
    return WorkerJoined(
        at_ns=0,
        worker=worker,
        instance="i",
        host="h",
        pid=1,
        slots=slots,
        prefetch=prefetch,
        kv_tokens=kv_tokens,
        engine="test",
        engine_version="0",
        dtype="float32",
        device="cpu",
        declares=("moves",) if moves else (),
        assets_digest=assets,
        reward_digest="",
        package="0",
        max_resident_versions=versions,
        colocated=colocated,
    )


def ready(
    worker: str, incarnation: int, version: int, digest: str | None = None, *, load_ms: float = 1.0
) -> WorkerReady:
    result = weights(version) if digest is None else digest
    return WorkerReady(
        at_ns=0,
        worker=worker,
        incarnation=incarnation,
        version=version,
        digest=result,
        load_ms=load_ms,
    )


def left(worker: str, incarnation: int, progress: dict[str, Resume] | None = None) -> WorkerLeft:
    return WorkerLeft(
        at_ns=0, worker=worker, incarnation=incarnation, reason="test", progress=progress or {}
    )


def logged(
    request: ScheduledRequest, *, reward: float | None = 1.0, offset: int = 100
) -> TrajectoryLogged:
    return TrajectoryLogged(
        at_ns=0,
        worker=request.worker,
        incarnation=request.incarnation,
        trajectory=request.trajectory,
        attempt=request.attempt,
        version=request.spec.version,
        digest=request.spec.digest,
        partition=request.spec.partition,
        offset=offset,
        sha256=sha256_hex(f"{request.trajectory} {request.attempt}".encode()),
        bytes=1000,
        tokens=20,
        reward=reward,
        finish="stop",
        error="",
    )


def released(
    request: ScheduledRequest, resume: Resume | None = None, kv: Blob | None = None
) -> RequestReleased:
    return RequestReleased(
        at_ns=0,
        worker=request.worker,
        incarnation=request.incarnation,
        trajectory=request.trajectory,
        attempt=request.attempt,
        resume=resume,
        kv=kv,
    )


def failed(
    request: ScheduledRequest, *, retryable: bool = True, error: str = "EngineError"
) -> RequestFailed:
    return RequestFailed(
        at_ns=0,
        worker=request.worker,
        incarnation=request.incarnation,
        trajectory=request.trajectory,
        attempt=request.attempt,
        error=error,
        message="test",
        retryable=retryable,
    )


def scored(
    decision: ScoreGroup, rewards: Sequence[float] = (), *, error: str = "", retryable: bool = False
) -> GroupScored:
    names = [trajectory.trajectory for trajectory in decision.trajectories]
    return GroupScored(
        at_ns=0,
        worker=decision.worker,
        incarnation=decision.incarnation,
        group=decision.spec.group,
        attempt=decision.attempt,
        samples=tuple(
            ScoredSample(trajectory=name, reward=reward)
            for name, reward in zip(names, rewards, strict=not error)
        ),
        error=error,
        retryable=retryable,
    )


def committed(
    step: int, groups: tuple[TakenGroup, ...], *, attempt: int = 1, incarnation: int = 0
) -> StepCommitted:
    return StepCommitted(
        at_ns=0,
        step=step,
        attempt=attempt,
        incarnation=incarnation,
        groups=groups,
        batch_digest=batch_digest(groups),
        digest_before=weights(step),
        digest_after=weights(step + 1),
        policy=manifest(step + 1),
        contributions=Blob(sha256=sha256_hex(b""), bytes=0),
        metrics={"loss": 0.5},
        settings={},
        numerics={},
        decisions_next=0,
        compute_s=0.1,
    )


def refused(
    step: int, groups: list[str], *, attempt: int = 1, incarnation: int = 0
) -> BatchRefused:
    offenders = tuple(
        Offender(group=group, trajectory=f"{group}-000", reason="test") for group in groups
    )
    return BatchRefused(
        at_ns=0, step=step, attempt=attempt, incarnation=incarnation, offenders=offenders
    )


def command(verb: str, **args: Any) -> Command:
    plain = {key.replace("__", "."): value for key, value in args.items()}
    return Command(at_ns=0, user="tester", verb=verb, args=plain)
