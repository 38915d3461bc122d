"""Table of the metrics of a run; docs/reference/metrics.md is generated from it.

Blockers that are groups or trajectories are labeled by kind, to bound cardinality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from dora_pipe.ledger.statuses import ORCHESTRATOR, TRAINER
from dora_pipe.observe.metrics.metric import Read, Samples, Value, counter, gauge, histogram
from dora_pipe.observe.run_stats import STATES, RunStats, learning_of
from dora_pipe.schemas.control import fault_of
from dora_pipe.schemas.metrics import (
    AnyMetrics,
    FailingServer,
    OrchestratorStatus,
    TrainerStatus,
    Wait,
    WorkerStatus,
)

FEW: Final = frozenset({"worker", "role", "topic", "user"})


def _lag(stats: RunStats) -> float:
    """0 after the run's last round."""
    control = stats.meter.positions.get(("control", 0))
    return 0 if stats.over or control is None else max(0, control.end - stats.control_folded)


def _roles(read: Callable[[AnyMetrics], Value]) -> Read:
    return lambda t: {} if t.over else {role: read(status) for role, status in t.heard.items()}


def _trainer(read: Callable[[TrainerStatus], Samples]) -> Read:
    def samples(stats: RunStats) -> Samples:
        status = None if stats.over else stats.heard.get(TRAINER)
        return read(status) if isinstance(status, TrainerStatus) else None

    return samples


def _queued(stats: RunStats) -> float | None:
    status = None if stats.over else stats.heard.get(ORCHESTRATOR)
    return status.queued_requests if isinstance(status, OrchestratorStatus) else None


def _waits(stats: RunStats) -> Samples:
    samples: dict[tuple[str, str, str], float] = {}
    for role, status in {} if stats.over else stats.heard.items():
        wait = next((wait for wait in status.waits if wait.blocking), None)
        if wait is None:
            samples[role, "", ""] = 0
        else:
            samples[role, wait.name, _blocker(wait)] = max(0, status.at_ns - wait.since_ns) / 1e9
    return samples


def _blocker(wait: Wait) -> str:
    first = wait.blockers[0] if wait.blockers else None
    if first is None:
        return ""
    return f"{first.kind} {first.id}" if first.kind in FEW else first.kind


def _cpu(stats: RunStats) -> Samples:
    samples: dict[tuple[str, str], float] = {}
    for role, status in stats.heard.items():
        cost = status.cost
        parts = {"bus": cost.bus_s, "codec": cost.codec_s, "control": cost.control_s}
        parts["other"] = max(0.0, cost.total_s - sum(parts.values()))
        samples |= {(role, part): seconds for part, seconds in parts.items()}
    return samples


def _open_groups(stats: RunStats) -> Samples:
    purposes = [group.spec.purpose for group in stats.account.open.values()]
    return {purpose: purposes.count(purpose) for purpose in ("eval", "train")}


HERE: Final = "here"
"""Tasks that run on their worker's machine."""


def _workers(stats: RunStats) -> Samples:
    """Include every state of every served version, so that empty states report 0."""
    counted = stats.worker_states()
    versions = {version for version, _ in counted}
    return {(version, state): counted[version, state] for version in versions for state in STATES}


def _heard(stats: RunStats) -> Iterator[tuple[str, WorkerStatus]]:
    return ((worker.name, worker.status) for worker in stats.present() if worker.status is not None)


def _of_places(value: Callable[[FailingServer], float]) -> Callable[[RunStats], Samples]:
    return lambda stats: {
        (name, server.task, server.url or HERE): value(server)
        for name, status in _heard(stats)
        for server in status.failing
    }


def _off_engine(stats: RunStats) -> Samples:
    return {
        (name, what): count
        for name, status in _heard(stats)
        for what, count in (
            ("environment", status.in_environment),
            ("reward", status.being_scored),
            ("agent", status.with_agent),
        )
    }


RUN: Final = (
    gauge(
        "run_info{package,planner}",
        "Always 1.",
        lambda t: {(one.package, one.planner): 1 for one in [t.started] if one is not None},
    ),
    gauge("up", "1 while the log is readable.", lambda t: t.log_up),
    gauge("run_finished", "1 once the run has stopped.", lambda t: t.over),
    gauge(
        "last_record_timestamp_seconds",
        "Latest time in any record, wall clock.",
        lambda t: t.last_ns / 1e9 if t.last_ns else None,
    ),
    gauge("planned_steps", "Steps in the configuration.", lambda t: t.steps_planned),
    gauge("policy_version", "Newest policy version.", lambda t: t.version),
    counter("rounds_total", "Rounds of the orchestrator.", lambda t: t.rounds),
    counter("decisions_total{kind}", "Decisions by kind.", lambda t: t.decisions),
)

BUS: Final = (
    counter(
        "bus_records_total{topic}",
        "Records by topic: status records from the last 100,000 on, trajectories as control "
        "names them.",
        lambda t: {name: one.records for name, one in t.meter.topics.items()},
    ),
    counter(
        "bus_bytes_total{topic}",
        "Bytes of their values.",
        lambda t: {name: one.bytes for name, one in t.meter.topics.items()},
    ),
    counter(
        "bus_unreadable_records_total{topic}",
        "Records that could not be decoded.",
        lambda t: {name: one.unreadable for name, one in t.meter.topics.items()},
    ),
    gauge(
        "bus_end_offset{topic,partition}",
        "End offset of the partition.",
        lambda t: {at: one.end for at, one in t.meter.positions.items()},
    ),
    gauge(
        "exporter_lag{topic,partition}",
        "Offsets that this exporter has not read.",
        lambda t: {at: one.end - one.position for at, one in t.meter.positions.items()},
    ),
    gauge("orchestrator_lag", "Offsets of control that no round has applied.", _lag),
    histogram(
        "control_delay_seconds",
        "Latency from a control record to the round that applies it. Includes clock differences.",
        lambda t: t.delay_s,
    ),
)

ROLES: Final = (
    gauge(
        "role_last_seen_timestamp_seconds{role}",
        "Time of the role's last status record, wall clock.",
        _roles(lambda s: s.at_ns / 1e9),
    ),
    gauge(
        "role_wait_seconds{role,wait,blocker}",
        "Duration of the role's current wait; 0 while it works. `blocker` names what it waits for.",
        _waits,
    ),
    gauge(
        "role_overdue_waits{role}",
        "Waits of the role beyond their limit.",
        _roles(lambda s: sum(wait.overdue for wait in s.waits)),
    ),
    counter(
        "role_cpu_seconds_total{role,part}",
        "CPU time of the role's process by part: `bus`, `codec`, `control`, `other`.",
        _cpu,
    ),
    gauge(
        "role_memory_bytes{role}",
        "Resident memory of the role's process.",
        _roles(lambda s: s.cost.rss_bytes),
    ),
)

WORKERS: Final = (
    gauge(
        "workers{version,state}",
        "Workers by served version (-1: none) and state. Includes `left` and `fenced` workers"
        " until they rejoin.",
        _workers,
    ),
    gauge(
        "worker_version{worker}",
        "Version that the worker serves; -1 before the first.",
        lambda t: {w.name: w.history.served for w in t.present()},
    ),
    gauge(
        "worker_slots{worker}",
        "Maximum requests in its running batch.",
        lambda t: {w.name: w.history.joined.slots for w in t.present()},
    ),
    gauge(
        "requests_running{worker}",
        "Requests in the running batch.",
        lambda t: {name: status.active for name, status in _heard(t)},
    ),
    gauge(
        "requests_waiting{worker}",
        "Requests that wait for a slot.",
        lambda t: {name: status.waiting for name, status in _heard(t)},
    ),
    gauge(
        "requests_off_engine{worker,state}",
        "Requests that need no slot, by what they wait for: `environment`, `reward`, `agent`.",
        _off_engine,
    ),
    gauge(
        "worker_open_calls{worker}",
        "Agent calls without an answer.",
        lambda t: {name: status.calls_open for name, status in _heard(t)},
    ),
    gauge(
        "worker_oldest_call_seconds{worker}",
        "Age of the oldest unanswered call at the last status; 0 without one.",
        lambda t: {name: status.call_open_s for name, status in _heard(t)},
    ),
    gauge(
        "worker_kv_used_tokens{worker}",
        "Tokens in the KV cache.",
        lambda t: {name: status.kv_used_tokens for name, status in _heard(t)},
    ),
    gauge(
        "worker_kv_capacity_tokens{worker}",
        "Capacity of the KV cache.",
        lambda t: {w.name: w.history.joined.kv_tokens for w in t.present()},
    ),
    counter(
        "sampled_tokens_total{worker}",
        "Sampled tokens; the rate is tokens/s.",
        lambda t: {name: one.counts.sampled for name, one in t.workers.items()},
    ),
    counter(
        "prompt_tokens_total{worker}",
        "Prompt tokens, including resumed sequences and prefix cache hits.",
        lambda t: {
            name: one.counts.computed + one.counts.reused for name, one in t.workers.items()
        },
    ),
    counter(
        "prefix_cache_hit_tokens_total{worker}",
        "Prompt tokens found in the prefix cache.",
        lambda t: {name: one.counts.reused for name, one in t.workers.items()},
    ),
    gauge(
        "task_server_failures{worker,task,server}",
        "Consecutive failures of a task server (`here`: local processes). No sample once it "
        "answers.",
        _of_places(lambda server: server.failures),
    ),
    gauge(
        "task_server_attempts{worker,task,server}",
        "Processes or connections started since the first of these failures.",
        _of_places(lambda server: server.tries),
    ),
    gauge(
        "task_server_suspended{worker,task,server}",
        "1 while the server is in back-off, 0 while one process probes it.",
        _of_places(lambda server: float(server.suspended)),
    ),
    counter(
        "workers_lost_total{reason}",
        "Worker incarnations that ended, by reason: `left` or `fenced`.",
        lambda t: t.lost,
    ),
    histogram(
        "weights_load_seconds",
        "From an assignment to loaded and verified weights.",
        lambda t: t.load_s,
    ),
)

GROUPS: Final = (
    counter("groups_dispatched_total{purpose}", "Dispatched groups.", lambda t: t.dispatched),
    gauge("open_groups{purpose}", "Groups without an outcome.", _open_groups),
    gauge("queued_requests", "Requests not scheduled on a worker.", _queued),
    counter("groups_ended_total{outcome}", "Ended groups by outcome.", lambda t: t.outcomes),
    counter(
        "trajectories_unused_total{outcome}",
        "Trajectories their group did not wait for: `redundant` (enough valid ones), `expired` "
        "(group timeout).",
        lambda t: t.left_over,
    ),
    counter(
        "attempts_total{outcome}", "Finished attempts by outcome.", lambda t: t.attempt_outcomes
    ),
    counter(
        "migrations_total{stage}",
        "Migrations by stage: `decided` by the orchestrator, `released` by the worker.",
        lambda t: t.migrations,
    ),
    counter(
        "requests_failed_total{error}",
        "Requests that ended without a trajectory, by error.",
        lambda t: t.faults,
    ),
    counter(
        "trajectories_total{finish,valid}",
        "Logged trajectories by finish reason and validity of the reward.",
        lambda t: t.trajectories,
    ),
    counter(
        "trajectories_invalid_total{fault,error}",
        "Trajectories without a valid reward, by error class and fault: `infrastructure`, "
        "`answer` (invalid reward value), `code` (the task raised).",
        lambda t: {(fault_of(name), name): count for name, count in t.errors.items()},
    ),
    histogram("trajectory_tokens", "Sampled tokens per logged trajectory.", lambda t: t.lengths),
    histogram("staleness_steps", "Staleness of trained groups.", lambda t: t.staleness),
    counter(
        "groups_over_bound_total",
        "Groups trained after their deadline. Above 0 violates C3.",
        lambda t: t.over_bound,
    ),
    gauge("staleness_bound_steps", "`max_staleness` at the newest dispatch.", lambda t: t.bound),
)

TRAINING: Final = (
    counter("steps_total", "Committed steps.", lambda t: t.step_s.observations),
    counter(
        "steps_without_gradient_total",
        "Steps whose batch had no advantage, so no update.",
        lambda t: t.without_gradient,
    ),
    histogram(
        "step_seconds",
        "Time between commits; for the first, since the trainer started.",
        lambda t: t.step_s,
    ),
    histogram(
        "step_training_seconds",
        "From batch decision and idle trainer to the commit. Excludes parts computed early.",
        lambda t: t.training_s,
    ),
    histogram(
        "trainer_wait_seconds",
        "Idle time of the trainer per step, without a batch or part.",
        lambda t: t.wait_s,
    ),
    counter(
        "trainer_wait_seconds_by_worker_total{worker}",
        "Idle time by the worker that logged the last trajectory; `none` if the batch was ready.",
        lambda t: {name: ms / 1000 for name, ms in t.waited_by.items()},
    ),
    counter(
        "trainer_compute_seconds_total",
        "Forward, backward and update.",
        lambda t: t.compute_ms / 1000,
    ),
    counter(
        "trainer_overlap_seconds_total",
        "Computation of parts before their batch was decided, including reads.",
        lambda t: t.ahead_ms / 1000,
    ),
    gauge(
        "trainer_phase{phase}",
        "1 for the current phase.",
        _trainer(lambda s: {s.phase.partition(" ")[0]: 1}),
    ),
    gauge(
        "trainer_cached_records", "Trajectories read ahead.", _trainer(lambda s: s.cached_records)
    ),
    gauge(
        "trainer_cached_bytes",
        "Size of the trajectories read ahead.",
        _trainer(lambda s: s.cached_bytes),
    ),
    counter("batches_refused_total", "Batches the trainer refused.", lambda t: t.refused),
    gauge(
        "step_reward",
        "Mean valid reward of the newest step.",
        lambda t: t.steps[-1].reward if t.steps else None,
    ),
    gauge(
        "step_task_reward{task}",
        "Mean valid reward of each named task in the newest step.",
        lambda t: dict(t.steps[-1].task_rewards) if t.steps else None,
    ),
    gauge(
        "step_reward_part{task,part}",
        "Mean of each reward component in the newest step, by task (empty: unnamed).",
        lambda t: {
            (task, part): value
            for task, parts in (t.steps[-1].parts if t.steps else {}).items()
            for part, value in parts.items()
        },
    ),
    gauge(
        "step_tokens",
        "Sampled tokens of the newest step.",
        lambda t: t.steps[-1].tokens if t.steps else None,
    ),
    gauge(
        "evaluation_reward{evaluation}",
        "Mean valid reward of the newest complete evaluation.",
        lambda t: {name: one.reward for name, one in t.evaluated.items() if one.reward is not None},
    ),
    gauge(
        "evaluation_metric{evaluation,metric}",
        "Its `mean@k`, `pass@k`, `maj@k` and reward components (`part/NAME`).",
        lambda t: {
            (name, metric): value
            for name, one in t.evaluated.items()
            for metric, value in one.metrics.items()
        },
    ),
    gauge(
        "evaluation_version{evaluation}",
        "Version of that evaluation.",
        lambda t: {name: one.version for name, one in t.evaluated.items()},
    ),
    gauge(
        "step_metric{metric}",
        "All metrics of the newest commit, such as `loss`, `grad_norm`, `entropy`, "
        "`truncated`, `kl`, `clipped_share`.",
        lambda t: {} if t.commit is None else t.commit.metrics,
    ),
    gauge(
        "step_learning_rate",
        "Learning rate of the newest step.",
        lambda t: learning_of({}, t.commit.settings).get("learning_rate") if t.commit else None,
    ),
    gauge(
        "step_effective_sample_ratio",
        "Effective sample size of the newest step's n trajectories, (sum w)^2 / (n sum w^2); "
        "w is a trajectory's mean ratio.",
        lambda t: None if t.contributed is None else t.contributed.effective,
    ),
    gauge(
        "step_logprob_mismatch{staleness}",
        "Mean of |ln w| over the newest step's trajectories, by staleness; w is the mean "
        "ratio of trained policy to sampler.",
        lambda t: {} if t.contributed is None else dict(t.contributed.mismatch),
    ),
)

METRICS: Final = (*RUN, *ROLES, *WORKERS, *GROUPS, *TRAINING, *BUS)
