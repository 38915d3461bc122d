"""Metrics of groups, trajectories and training steps; it decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dora_pipe.schemas.metrics import OrchestratorStatus, TrainerStatus
from dora_pipe.telemetry.fleet import ORCHESTRATOR, TRAINER
from dora_pipe.telemetry.metric import Sample, counter, each, gauge, histogram, one
from dora_pipe.telemetry.tally import Tally


def _trainer(tally: Tally) -> TrainerStatus | None:
    status = None if tally.over else tally.fleet.heard.get(TRAINER)
    return status if isinstance(status, TrainerStatus) else None


def _phase(tally: Tally) -> Iterator[Sample]:
    status = _trainer(tally)
    if status is not None:
        yield (status.phase,), 1


def _cached_records(tally: Tally) -> float | None:
    status = _trainer(tally)
    return None if status is None else status.cached_records


def _cached_bytes(tally: Tally) -> float | None:
    status = _trainer(tally)
    return None if status is None else status.cached_bytes


def _queued(tally: Tally) -> float | None:
    status = None if tally.over else tally.fleet.heard.get(ORCHESTRATOR)
    return status.queued_requests if isinstance(status, OrchestratorStatus) else None


def _open_groups(tally: Tally) -> Iterator[Sample]:
    purposes = [course.spec.purpose for course in tally.courses.open.values()]
    for purpose in ("eval", "train"):
        yield (purpose,), purposes.count(purpose)


def _figures(tally: Tally) -> Iterator[Sample]:
    for name, value in sorted({} if tally.commit is None else tally.commit.figures.items()):
        yield (name,), value


def _effective(tally: Tally) -> float | None:
    return None if tally.contributed is None else tally.contributed.effective


def _mismatch(tally: Tally) -> Iterator[Sample]:
    for staleness, value in () if tally.contributed is None else tally.contributed.mismatch:
        yield (str(staleness),), value


def _waited(tally: Tally) -> Iterator[Sample]:
    for worker, waited_ms in sorted(tally.waited_by.items()):
        yield (worker,), waited_ms / 1000


GROUPS: Final = (
    counter(
        "groups_dispatched_total",
        "Groups dispatched, by purpose.",
        "rounds",
        each(lambda t: t.dispatched),
        "purpose",
    ),
    gauge("open_groups", "Dispatched and not ended.", "rounds", _open_groups, "purpose"),
    gauge(
        "queued_requests",
        "Requests without a place on a worker.",
        "orchestrator status",
        one(_queued),
    ),
    counter(
        "groups_ended_total",
        "Groups by their fate.",
        "rounds, step committed",
        each(lambda t: t.fates),
        "fate",
    ),
    counter(
        "stays_ended_total",
        "Stays of requests on workers, of groups that have ended, by how they ended.",
        "rounds, control",
        each(lambda t: t.outcomes),
        "outcome",
    ),
    counter(
        "moves_total",
        "Moves that were decided, and requests that workers have let go of.",
        "move, request released",
        each(lambda t: t.moves),
        "stage",
    ),
    counter(
        "requests_failed_total",
        "Requests that ended without a trajectory, by error.",
        "request failed",
        each(lambda t: t.faults),
        "error",
    ),
    counter(
        "trajectories_total",
        "Trajectories in the log, by how they ended and whether their reward is valid.",
        "trajectories logged",
        each(lambda t: t.trajectories),
        "finish",
        "valid",
    ),
    histogram(
        "trajectory_tokens",
        "Sampled tokens of the trajectories in the log.",
        "trajectories logged",
        lambda t: t.lengths,
    ),
    histogram(
        "staleness_steps",
        "Staleness of the groups that were trained.",
        "step committed",
        lambda t: t.staleness,
    ),
    counter(
        "groups_beyond_bound_total",
        "Groups that were trained behind their deadline: C3 is broken, which audit proves.",
        "step committed",
        one(lambda t: t.late),
    ),
    gauge(
        "staleness_bound_steps",
        "`max_staleness` as it stood at the newest dispatch.",
        "dispatch",
        one(lambda t: t.bound),
    ),
)

TRAINING: Final = (
    counter(
        "steps_total", "Committed steps.", "step committed", one(lambda t: t.step_s.observations)
    ),
    histogram(
        "step_seconds",
        "From commit to commit; the first one from the trainer's start.",
        "step committed",
        lambda t: t.step_s,
    ),
    histogram(
        "step_training_seconds",
        "From the batch decision, or from when the trainer was free, to the commit.",
        "take batch, step committed",
        lambda t: t.training_s,
    ),
    histogram(
        "trainer_wait_seconds",
        "The trainer was free and its batch not decided, per step.",
        "take batch, step committed",
        lambda t: t.wait_s,
    ),
    counter(
        "trainer_waited_seconds_total",
        "The same added up, by the worker that logged the trajectory which came last; `nobody` "
        "where the batch was there.",
        "take batch, step committed, trajectories logged",
        _waited,
        "worker",
    ),
    counter(
        "trainer_compute_seconds_total",
        "Forward, backward and update.",
        "step committed",
        one(lambda t: t.compute_ms / 1000),
    ),
    gauge("trainer_phase", "1 for what the trainer does now.", "trainer status", _phase, "phase"),
    gauge(
        "trainer_cached_records",
        "Trajectories read ahead of their batch.",
        "trainer status",
        one(_cached_records),
    ),
    gauge(
        "trainer_cached_bytes",
        "Size of the records in the trainer's cache.",
        "trainer status",
        one(_cached_bytes),
    ),
    counter(
        "batches_refused_total",
        "Batches that the trainer refused.",
        "batch refused",
        one(lambda t: t.refused),
    ),
    gauge(
        "step_reward",
        "Mean of the valid rewards of the newest step's batch.",
        "step committed, trajectories logged",
        one(lambda t: t.steps[-1].reward if t.steps else None),
    ),
    gauge(
        "step_tokens",
        "Sampled tokens of the newest step's batch.",
        "step committed, trajectories logged",
        one(lambda t: t.steps[-1].tokens if t.steps else None),
    ),
    gauge(
        "evaluation_reward",
        "Mean valid reward of the newest evaluation that is complete.",
        "end, trajectories logged",
        one(lambda t: None if t.evaluation is None else t.evaluation[1]),
    ),
    gauge(
        "evaluation_version",
        "The version that this evaluation was of.",
        "end",
        one(lambda t: None if t.evaluation is None else t.evaluation[0]),
    ),
    gauge(
        "step_figure",
        "Every figure of the newest commit: `loss`, `grad_norm`, `ratio_mean`, `kl` and so on.",
        "step committed",
        _figures,
        "figure",
    ),
    gauge(
        "step_effective_sample_ratio",
        "Effective sample size of the newest step's trajectories, (sum w)^2 / (n sum w^2) with w "
        "the mean ratio of each; 1: all weigh the same.",
        "the step's contributions file",
        one(_effective),
    ),
    gauge(
        "step_logprob_mismatch",
        "Mean over the newest step's trajectories of |ln(mean ratio)|, trained policy to sampler, "
        "by staleness.",
        "the step's contributions file",
        _mismatch,
        "staleness",
    ),
)
