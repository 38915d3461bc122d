"""Table of the metrics of a run; a test compares it with docs/reference/metrics.md.

Blockers that are groups or trajectories are labeled by kind, to bound cardinality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from dora_pipe.ledger.statuses import ORCHESTRATOR, TRAINER
from dora_pipe.observe.metrics.metric import (
    Read,
    Samples,
    Value,
    counter,
    gauge,
    histogram,
)
from dora_pipe.observe.run_stats import STATES, RunStats, learning_of
from dora_pipe.schemas.control import fault_of
from dora_pipe.schemas.metrics import (
    AnyMetrics,
    FailingPlace,
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
    """Return the wait of each role; 0 for a role that works."""
    found: dict[tuple[str, str, str], float] = {}
    for role, status in {} if stats.over else stats.heard.items():
        wait = next((one for one in status.waits if one.still), None)
        if wait is None:
            found[role, "", ""] = 0
        else:
            found[role, wait.name, _blocker(wait)] = max(0, status.at_ns - wait.since_ns) / 1e9
    return found


def _blocker(wait: Wait) -> str:
    first = wait.blockers[0] if wait.blockers else None
    if first is None:
        return ""
    return f"{first.kind} {first.id}" if first.kind in FEW else first.kind


def _cpu(stats: RunStats) -> Samples:
    found: dict[tuple[str, str], float] = {}
    for role, status in stats.heard.items():
        cost = status.cost
        parts = {"bus": cost.bus_s, "codec": cost.codec_s, "control": cost.control_s}
        parts["other"] = max(0.0, cost.total_s - sum(parts.values()))
        found |= {(role, part): seconds for part, seconds in parts.items()}
    return found


def _open_groups(stats: RunStats) -> Samples:
    purposes = [group.spec.purpose for group in stats.account.open.values()]
    return {purpose: purposes.count(purpose) for purpose in ("eval", "train")}


HERE: Final = "here"
"""Tasks that run on their worker's machine."""


def _workers(stats: RunStats) -> Samples:
    """Include every state of every hosted version, so that empty states report 0."""
    counted = stats.worker_states()
    versions = {version for version, _ in counted}
    return {(version, state): counted[version, state] for version in versions for state in STATES}


def _heard(stats: RunStats) -> Iterator[tuple[str, WorkerStatus]]:
    return ((one.name, one.status) for one in stats.present() if one.status is not None)


def _prompts(stats: RunStats) -> Samples:
    return {
        (name, how): count
        for name, one in stats.workers.items()
        for how, count in (("computed", one.counts.computed), ("reused", one.counts.reused))
    }


def _episodes(stats: RunStats) -> Samples:
    return {
        (name, then): count
        for name, one in stats.workers.items()
        for then, count in (("again", one.counts.started_again), ("told", one.counts.told_again))
    }


def _of_places(value: Callable[[FailingPlace], float]) -> Callable[[RunStats], Samples]:
    return lambda stats: {
        (name, one.task, one.url or HERE): value(one)
        for name, status in _heard(stats)
        for one in status.failing
    }


def _requests(stats: RunStats) -> Samples:
    return {
        (name, what): count
        for name, status in _heard(stats)
        for what, count in (
            ("active", status.active),
            ("waiting", status.waiting),
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
    gauge("log_up", "1 while the log can be read.", lambda t: t.log_up),
    gauge("run_over", "1 once the run has stopped.", lambda t: t.over),
    gauge(
        "last_record_timestamp_seconds",
        "The newest moment that a record carries, wall clock.",
        lambda t: t.last_ns / 1e9 if t.last_ns else None,
    ),
    gauge("planned_steps", "Steps as configured.", lambda t: t.steps_planned),
    gauge("policy_version", "The newest version.", lambda t: t.version),
    counter("rounds_total", "Rounds of the orchestrator.", lambda t: t.rounds),
    counter("decisions_total{kind}", "Decisions, by kind.", lambda t: t.decisions),
)

BUS: Final = (
    counter(
        "bus_records_total{topic}",
        "Records by topic. Those of metrics from the last 100 000 on; trajectories as they were "
        "named in control.",
        lambda t: {name: one.records for name, one in t.meter.topics.items()},
    ),
    counter(
        "bus_bytes_total{topic}",
        "Bytes of the values of these records.",
        lambda t: {name: one.bytes for name, one in t.meter.topics.items()},
    ),
    counter(
        "bus_unreadable_records_total{topic}",
        "Those of them that could not be read.",
        lambda t: {name: one.unreadable for name, one in t.meter.topics.items()},
    ),
    gauge(
        "bus_end_position{topic,partition}",
        "Where the partition ends.",
        lambda t: {at: one.end for at, one in t.meter.positions.items()},
    ),
    gauge(
        "exporter_lag_positions{topic,partition}",
        "How far the reader that makes these metrics is behind the end of the partition.",
        lambda t: {at: one.end - one.position for at, one in t.meter.positions.items()},
    ),
    gauge(
        "orchestrator_lag_positions",
        "Control positions that no round has folded yet: how far the orchestrator is behind.",
        _lag,
    ),
    histogram(
        "control_delay_seconds",
        "From when a fact happened to the round that folds it: writing, the bus, reading, and the "
        "difference of two wall clocks.",
        lambda t: t.delay_s,
    ),
)

ROLES: Final = (
    gauge(
        "role_heard_timestamp_seconds{role}",
        "The newest status of a role that is not gone, wall clock.",
        _roles(lambda s: s.at_ns / 1e9),
    ),
    gauge(
        "role_wait_seconds{role,wait,blocker}",
        "How long the role's work stands still, as of its newest status; 0 while it works. "
        "`blocker` is what the wait ends with, by name where there are few of its kind.",
        _waits,
    ),
    gauge(
        "role_overdue_waits{role}",
        "Waits of the role that are beyond their limit: alarms.",
        _roles(lambda s: sum(wait.overdue for wait in s.waits)),
    ),
    counter(
        "role_cpu_seconds_total{role,part}",
        "CPU time of the role's process, by what it was spent on.",
        _cpu,
    ),
    gauge(
        "role_memory_bytes{role}",
        "Resident memory.",
        _roles(lambda s: s.cost.rss_bytes),
    ),
)

WORKERS: Final = (
    gauge(
        "workers{version,state}",
        "Workers by the version they host (-1: none) and by state; `left` and `fenced` ones stay "
        "until they join again.",
        _workers,
    ),
    gauge(
        "worker_version{worker}",
        "The version that the worker hosts; -1 before the first.",
        lambda t: {w.name: w.history.hosted for w in t.present()},
    ),
    gauge(
        "worker_slots{worker}",
        "Requests in its running batch at most.",
        lambda t: {w.name: w.history.joined.slots for w in t.present()},
    ),
    gauge(
        "worker_requests{worker,state}",
        "Its requests: `active` ones have a slot, `waiting` ones do not yet; the others need none: "
        "their `environment`, their `reward` or their `agent` is waited for.",
        _requests,
    ),
    gauge(
        "worker_calls_open{worker}",
        "Calls of agents that have no answer yet.",
        lambda t: {name: status.calls_open for name, status in _heard(t)},
    ),
    gauge(
        "worker_call_open_seconds{worker}",
        "How long the oldest of these had been open when the worker said so; 0 without one.",
        lambda t: {name: status.call_open_s for name, status in _heard(t)},
    ),
    gauge(
        "worker_kv_used_tokens{worker}",
        "Tokens in its KV cache.",
        lambda t: {name: status.kv_used_tokens for name, status in _heard(t)},
    ),
    gauge(
        "worker_kv_capacity_tokens{worker}",
        "Tokens that fit into its KV cache.",
        lambda t: {w.name: w.history.joined.kv_tokens for w in t.present()},
    ),
    counter(
        "sampled_tokens_total{worker}",
        "Tokens sampled, by all incarnations of the worker; its rate is tokens/s.",
        lambda t: {name: one.sampled for name, one in t.workers.items()},
    ),
    counter(
        "prompt_tokens_total{worker,how}",
        "Tokens of prompts (a sequence that goes on is one, too), by all incarnations of the "
        "worker: `computed`, or `reused` from what it had kept of equal beginnings.",
        _prompts,
    ),
    counter(
        "episodes_interrupted_total{worker,then}",
        "Episodes that had to take another environment, by all incarnations of the worker: they "
        "started `again` from their prompt, or it was `told` their turns and they went on.",
        _episodes,
    ),
    gauge(
        "task_place_failures{worker,task,place}",
        "Failures in a row of a server of a task (`task.url`), or of its processes `here`, that "
        "has not answered since; no sample for one that works.",
        _of_places(lambda one: one.failures),
    ),
    gauge(
        "task_place_tries{worker,task,place}",
        "Processes, or connections, that were begun there since the first of these failures.",
        _of_places(lambda one: one.tries),
    ),
    gauge(
        "task_place_left_alone{worker,task,place}",
        "1 while nothing is asked of it, 0 while it is tried with one process.",
        _of_places(lambda one: float(one.left_alone)),
    ),
    counter(
        "workers_lost_total{how}",
        "Incarnations that left in order, or were fenced.",
        lambda t: t.lost,
    ),
    histogram(
        "weights_load_seconds",
        "From an assignment to loaded and checked weights.",
        lambda t: t.load_s,
    ),
)

GROUPS: Final = (
    counter(
        "groups_dispatched_total{purpose}",
        "Groups dispatched, by purpose.",
        lambda t: t.dispatched,
    ),
    gauge("open_groups{purpose}", "Dispatched and not ended.", _open_groups),
    gauge("queued_requests", "Requests without a place on a worker.", _queued),
    counter(
        "groups_ended_total{fate}",
        "Groups by their fate.",
        lambda t: t.fates,
    ),
    counter(
        "siblings_left_over_total{fate}",
        "Siblings that their groups did not wait for: `surplus`, enough others were valid before; "
        "`expired`, their group was open for too long.",
        lambda t: t.left_over,
    ),
    counter(
        "stays_ended_total{outcome}",
        "Attempts at requests, of groups that have ended, by how they ended.",
        lambda t: t.outcomes,
    ),
    counter(
        "moves_total{stage}",
        "Moves that were decided, and requests that workers have let go of.",
        lambda t: t.moves,
    ),
    counter(
        "requests_failed_total{error}",
        "Requests that ended without a trajectory, by error.",
        lambda t: t.faults,
    ),
    counter(
        "trajectories_total{finish,valid}",
        "Trajectories in the log, by how they ended and whether their reward is valid.",
        lambda t: t.trajectories,
    ),
    counter(
        "trajectories_invalid_total{fault,error}",
        "Those without a valid reward, by whose fault it is (`infrastructure`; `answer`: the task "
        "gave none that is valid; `code`: it raised) and class of error.",
        lambda t: {(fault_of(name), name): count for name, count in t.errors.items()},
    ),
    histogram(
        "trajectory_tokens",
        "Sampled tokens of the trajectories in the log.",
        lambda t: t.lengths,
    ),
    histogram(
        "staleness_steps",
        "Staleness of the groups that were trained.",
        lambda t: t.staleness,
    ),
    counter(
        "groups_beyond_bound_total",
        "Groups that were trained behind their deadline: C3 is broken, which audit proves.",
        lambda t: t.late,
    ),
    gauge(
        "staleness_bound_steps",
        "`max_staleness` as it stood at the newest dispatch.",
        lambda t: t.bound,
    ),
)

TRAINING: Final = (
    counter("steps_total", "Committed steps.", lambda t: t.step_s.observations),
    counter(
        "steps_without_gradient_total",
        "Those of them that updated nothing: no trajectory of the batch had an advantage.",
        lambda t: t.without_gradient,
    ),
    histogram(
        "step_seconds",
        "From commit to commit; the first one from the trainer's start.",
        lambda t: t.step_s,
    ),
    histogram(
        "step_training_seconds",
        "From the batch decision, or from when the trainer was free, to the commit; parts that "
        "were computed ahead of the decision are no part of it.",
        lambda t: t.training_s,
    ),
    histogram(
        "trainer_wait_seconds",
        "The trainer was free and neither its batch nor a part of it decided, per step.",
        lambda t: t.wait_s,
    ),
    counter(
        "trainer_waited_seconds_total{worker}",
        "The same added up, by the worker that logged the trajectory which came last; `nobody` "
        "where the batch was there.",
        lambda t: {name: ms / 1000 for name, ms in t.waited_by.items()},
    ),
    counter(
        "trainer_compute_seconds_total",
        "Forward, backward and update.",
        lambda t: t.compute_ms / 1000,
    ),
    counter(
        "trainer_ahead_seconds_total",
        "Computing parts of a batch before that was taken, with the reading of their records.",
        lambda t: t.ahead_ms / 1000,
    ),
    gauge(
        "trainer_phase{phase}",
        "1 for what the trainer does now.",
        _trainer(lambda s: {s.phase.partition(" ")[0]: 1}),
    ),
    gauge(
        "trainer_cached_records",
        "Trajectories read ahead of their batch.",
        _trainer(lambda s: s.cached_records),
    ),
    gauge(
        "trainer_cached_bytes",
        "Size of the records in the trainer's cache.",
        _trainer(lambda s: s.cached_bytes),
    ),
    counter(
        "batches_refused_total",
        "Batches that the trainer refused.",
        lambda t: t.refused,
    ),
    gauge(
        "step_reward",
        "Mean of the valid rewards of the newest step's batch.",
        lambda t: t.steps[-1].reward if t.steps else None,
    ),
    gauge(
        "step_task_reward{task}",
        "The same of each task with a name.",
        lambda t: dict(t.steps[-1].task_rewards) if t.steps else None,
    ),
    gauge(
        "step_reward_part{task,part}",
        "Mean of each part of these rewards, by task (empty: it has no name).",
        lambda t: {
            (task, part): value
            for task, parts in (t.steps[-1].parts if t.steps else {}).items()
            for part, value in parts.items()
        },
    ),
    gauge(
        "step_tokens",
        "Sampled tokens of the newest step's batch.",
        lambda t: t.steps[-1].tokens if t.steps else None,
    ),
    gauge(
        "evaluation_reward{evaluation}",
        "Mean valid reward of the newest evaluation of this name that is complete.",
        lambda t: {name: one.reward for name, one in t.evaluated.items() if one.reward is not None},
    ),
    gauge(
        "evaluation_figure{evaluation,figure}",
        "Its `mean@k`, `pass@k` and `maj@k`, and the mean of every part of its rewards "
        "(`part/NAME`).",
        lambda t: {
            (name, figure): value
            for name, one in t.evaluated.items()
            for figure, value in one.figures.items()
        },
    ),
    gauge(
        "evaluation_version{evaluation}",
        "The version that this evaluation was of.",
        lambda t: {name: one.version for name, one in t.evaluated.items()},
    ),
    gauge(
        "step_figure{figure}",
        "Every figure of the newest commit: `loss`, `grad_norm`, `entropy`, `truncated`, `kl`, "
        "`clipped_share` and so on.",
        lambda t: {} if t.commit is None else t.commit.figures,
    ),
    gauge(
        "step_learning_rate",
        "Learning rate of the newest step, by its schedule.",
        lambda t: learning_of({}, t.commit.settings).get("learning_rate") if t.commit else None,
    ),
    gauge(
        "step_effective_sample_ratio",
        "Effective sample size of the newest step's trajectories, (sum w)^2 / (n sum w^2) with w "
        "the mean ratio of each; 1: all weigh the same.",
        lambda t: None if t.contributed is None else t.contributed.effective,
    ),
    gauge(
        "step_logprob_mismatch{staleness}",
        "Mean over the newest step's trajectories of |ln(mean ratio)|, trained policy to sampler, "
        "by staleness.",
        lambda t: {} if t.contributed is None else dict(t.contributed.mismatch),
    ),
)

METRICS: Final = (*RUN, *ROLES, *WORKERS, *GROUPS, *TRAINING, *BUS)
