"""The metrics of a run, one table: what each is called, means, and which records say it.

docs/reference/metrics.md is printed from `METRICS`, and so is what Prometheus reads. It decides
which names of things become labels: those there are few of. A blocker that is a group or a
trajectory is only called so; which one it is, `dora-pipe top` and `why` say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dora_pipe.catalogue.statuses import ORCHESTRATOR, TRAINER
from dora_pipe.observe.metrics.metric import Metric, Sample, counter, each, gauge, histogram, one
from dora_pipe.observe.run_stats import STATES, RunStats
from dora_pipe.schemas.metrics import (
    AnyMetrics,
    Blocker,
    OrchestratorStatus,
    TrainerStatus,
    Wait,
)

FEW: Final = frozenset({"worker", "role", "topic", "user"})
"""Kinds of blockers that are named: a run has few of them."""


def _info(stats: RunStats) -> Iterator[Sample]:
    if stats.started is not None:
        yield (stats.started.package, stats.started.planner), 1


def _lag(stats: RunStats) -> float:
    """What is said behind the last round of a run is for nobody."""
    control = stats.meter.positions.get(("control", 0))
    return 0 if stats.over or control is None else max(0, control.end - stats.control_folded)


RUN: Final = (
    gauge("run_info", "Always 1.", "run started", _info, "package", "planner"),
    gauge("log_up", "1 while the log can be read.", "the reader", one(lambda t: t.log_up)),
    gauge("run_over", "1 once the run has stopped.", "stop run", one(lambda t: t.over)),
    gauge(
        "last_record_timestamp_seconds",
        "The newest moment that a record carries, wall clock.",
        "all",
        one(lambda t: t.last_ns / 1e9 if t.last_ns else None),
    ),
    gauge("planned_steps", "Steps as configured.", "run started", one(lambda t: t.steps_planned)),
    gauge("policy_version", "The newest version.", "step committed", one(lambda t: t.version)),
    counter("rounds_total", "Rounds of the orchestrator.", "rounds", one(lambda t: t.rounds)),
    counter(
        "decisions_total", "Decisions, by kind.", "rounds", each(lambda t: t.decisions), "kind"
    ),
)

BUS: Final = (
    counter(
        "bus_records_total",
        "Records by topic. Those of metrics from the last 100 000 on; trajectories as they were "
        "named in control.",
        "all",
        each(lambda t: {name: one.records for name, one in t.meter.topics.items()}),
        "topic",
    ),
    counter(
        "bus_bytes_total",
        "Bytes of the values of these records.",
        "all",
        each(lambda t: {name: one.bytes for name, one in t.meter.topics.items()}),
        "topic",
    ),
    counter(
        "bus_unreadable_records_total",
        "Those of them that could not be read.",
        "all",
        each(lambda t: {name: one.unreadable for name, one in t.meter.topics.items()}),
        "topic",
    ),
    gauge(
        "bus_end_position",
        "Where the partition ends.",
        "the log",
        each(lambda t: {at: one.end for at, one in t.meter.positions.items()}),
        "topic",
        "partition",
    ),
    gauge(
        "exporter_lag_positions",
        "How far the reader that makes these metrics is behind the end of the partition.",
        "the reader",
        each(lambda t: {at: one.end - one.position for at, one in t.meter.positions.items()}),
        "topic",
        "partition",
    ),
    gauge(
        "orchestrator_lag_positions",
        "Control positions that no round has folded yet: how far the orchestrator is behind.",
        "rounds",
        one(_lag),
    ),
    histogram(
        "control_delay_seconds",
        "From when a fact happened to the round that folds it: writing, the bus, reading, and the "
        "difference of two wall clocks.",
        "control, rounds",
        lambda t: t.delay_s,
    ),
)


def _workers(stats: RunStats) -> Iterator[Sample]:
    """Every state of every hosted version, so that a state that nobody is in any more says 0."""
    counted = stats.worker_states()
    for version in sorted({version for version, _ in counted}):
        for state in STATES:
            yield (str(version), state), counted[version, state]


def _worker_requests(stats: RunStats) -> Iterator[Sample]:
    for worker in stats.present():
        if worker.status is not None:
            yield (worker.name, "active"), worker.status.active
            yield (worker.name, "waiting"), worker.status.waiting


def _kv_used(stats: RunStats) -> Iterator[Sample]:
    for worker in stats.present():
        if worker.status is not None:
            yield (worker.name,), worker.status.kv_used_tokens


def _sampled(stats: RunStats) -> Iterator[Sample]:
    for name, worker in sorted(stats.workers.items()):
        yield (name,), worker.sampled


def _present(stats: RunStats) -> list[tuple[str, AnyMetrics]]:
    """Roles that are there, with what they said last; nobody is, once the run is over."""
    return [] if stats.over else sorted(stats.heard.items())


def _waits(stats: RunStats) -> Iterator[Sample]:
    """What stops the work of each role; 0 for one that works."""
    for role, status in _present(stats):
        still = [wait for wait in status.waits if wait.still][:1]
        for wait in still:
            yield (role, wait.name, _blocker(wait)), max(0, status.at_ns - wait.since_ns) / 1e9
        if not still:
            yield (role, "", ""), 0


def _blocker(wait: Wait) -> str:
    first: Blocker | None = wait.blockers[0] if wait.blockers else None
    if first is None:
        return ""
    return f"{first.kind} {first.id}" if first.kind in FEW else first.kind


def _overdue(stats: RunStats) -> Iterator[Sample]:
    for role, status in _present(stats):
        yield (role,), sum(wait.overdue for wait in status.waits)


def _heard(stats: RunStats) -> Iterator[Sample]:
    for role, status in _present(stats):
        yield (role,), status.at_ns / 1e9


def _cpu(stats: RunStats) -> Iterator[Sample]:
    for role, status in sorted(stats.heard.items()):
        cost = status.cost
        parts = {"bus": cost.bus_s, "codec": cost.codec_s, "control": cost.control_s}
        for part, seconds in parts.items():
            yield (role, part), seconds
        yield (role, "other"), max(0.0, cost.total_s - sum(parts.values()))


def _memory(stats: RunStats) -> Iterator[Sample]:
    for role, status in _present(stats):
        yield (role,), status.cost.rss_bytes


ROLES: Final = (
    gauge(
        "role_heard_timestamp_seconds",
        "The newest status of a role that is not gone, wall clock.",
        "statuses",
        _heard,
        "role",
    ),
    gauge(
        "role_wait_seconds",
        "How long the role's work stands still, as of its newest status; 0 while it works. "
        "`blocker` is what the wait ends with, by name where there are few of its kind.",
        "statuses",
        _waits,
        "role",
        "wait",
        "blocker",
    ),
    gauge(
        "role_overdue_waits",
        "Waits of the role that are beyond their limit: alarms.",
        "statuses",
        _overdue,
        "role",
    ),
    counter(
        "role_cpu_seconds_total",
        "CPU time of the role's process, by what it was spent on.",
        "statuses",
        _cpu,
        "role",
        "part",
    ),
    gauge("role_memory_bytes", "Resident memory.", "statuses", _memory, "role"),
)

WORKERS: Final = (
    gauge(
        "workers",
        "Workers by the version they host (-1: none) and by state; `left` and `fenced` ones stay "
        "until they join again.",
        "worker joined, ready, left; assign, drain, fence; statuses",
        _workers,
        "version",
        "state",
    ),
    gauge(
        "worker_version",
        "The version that the worker hosts; -1 before the first.",
        "worker ready",
        lambda t: (((w.name,), w.history.hosted) for w in t.present()),
        "worker",
    ),
    gauge(
        "worker_slots",
        "Requests in its running batch at most.",
        "worker joined",
        lambda t: (((w.name,), w.history.joined.slots) for w in t.present()),
        "worker",
    ),
    gauge(
        "worker_requests",
        "Its requests: `active` ones have a slot, `waiting` ones do not.",
        "statuses",
        _worker_requests,
        "worker",
        "state",
    ),
    gauge("worker_kv_used_tokens", "Tokens in its KV cache.", "statuses", _kv_used, "worker"),
    gauge(
        "worker_kv_capacity_tokens",
        "Tokens that fit into its KV cache.",
        "worker joined",
        lambda t: (((w.name,), w.history.joined.kv_tokens) for w in t.present()),
        "worker",
    ),
    counter(
        "sampled_tokens_total",
        "Tokens sampled, by all incarnations of the worker; its rate is tokens/s.",
        "statuses",
        _sampled,
        "worker",
    ),
    counter(
        "workers_lost_total",
        "Incarnations that left in order, or were fenced.",
        "worker left, fence",
        each(lambda t: t.lost),
        "how",
    ),
    histogram(
        "weights_load_seconds",
        "From an assignment to loaded and checked weights.",
        "worker ready",
        lambda t: t.load_s,
    ),
)


def _trainer(stats: RunStats) -> TrainerStatus | None:
    status = None if stats.over else stats.heard.get(TRAINER)
    return status if isinstance(status, TrainerStatus) else None


def _phase(stats: RunStats) -> Iterator[Sample]:
    status = _trainer(stats)
    if status is not None:
        yield (status.phase,), 1


def _cached_records(stats: RunStats) -> float | None:
    status = _trainer(stats)
    return None if status is None else status.cached_records


def _cached_bytes(stats: RunStats) -> float | None:
    status = _trainer(stats)
    return None if status is None else status.cached_bytes


def _queued(stats: RunStats) -> float | None:
    status = None if stats.over else stats.heard.get(ORCHESTRATOR)
    return status.queued_requests if isinstance(status, OrchestratorStatus) else None


def _open_groups(stats: RunStats) -> Iterator[Sample]:
    purposes = [group.spec.purpose for group in stats.account.open.values()]
    for purpose in ("eval", "train"):
        yield (purpose,), purposes.count(purpose)


def _figures(stats: RunStats) -> Iterator[Sample]:
    for name, value in sorted({} if stats.commit is None else stats.commit.figures.items()):
        yield (name,), value


def _effective(stats: RunStats) -> float | None:
    return None if stats.contributed is None else stats.contributed.effective


def _mismatch(stats: RunStats) -> Iterator[Sample]:
    for staleness, value in () if stats.contributed is None else stats.contributed.mismatch:
        yield (str(staleness),), value


def _waited(stats: RunStats) -> Iterator[Sample]:
    for worker, waited_ms in sorted(stats.waited_by.items()):
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
        "Attempts at requests, of groups that have ended, by how they ended.",
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

SECTIONS: Final[dict[str, tuple[Metric, ...]]] = {
    "The run": RUN,
    "Every role": ROLES,
    "Workers": WORKERS,
    "Groups and trajectories": GROUPS,
    "Training": TRAINING,
    "The bus": BUS,
}

METRICS: Final = tuple(metric for section in SECTIONS.values() for metric in section)
