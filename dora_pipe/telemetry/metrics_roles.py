"""Metrics of roles and workers; it decides which names of things become labels.

Those there are few of do. A blocker that is a group or a trajectory is only called so; which one it
is, `dora-pipe top` and `why` say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dora_pipe.schemas.metrics import AnyMetrics, Blocker, Wait
from dora_pipe.telemetry.fleet import STATES
from dora_pipe.telemetry.metric import Sample, counter, each, gauge, histogram
from dora_pipe.telemetry.tally import Tally

FEW: Final = frozenset({"worker", "role", "topic", "user"})
"""Kinds of blockers that are named: a run has few of them."""


def _workers(tally: Tally) -> Iterator[Sample]:
    """Every state of every hosted version, so that a state that nobody is in any more says 0."""
    counted = tally.fleet.counted()
    for version in sorted({version for version, _ in counted}):
        for state in STATES:
            yield (str(version), state), counted[version, state]


def _worker_requests(tally: Tally) -> Iterator[Sample]:
    for worker in tally.fleet.present():
        if worker.status is not None:
            yield (worker.name, "active"), worker.status.active
            yield (worker.name, "waiting"), worker.status.waiting


def _kv_used(tally: Tally) -> Iterator[Sample]:
    for worker in tally.fleet.present():
        if worker.status is not None:
            yield (worker.name,), worker.status.kv_used_tokens


def _sampled(tally: Tally) -> Iterator[Sample]:
    for name, worker in sorted(tally.fleet.workers.items()):
        yield (name,), worker.sampled


def _present(tally: Tally) -> list[tuple[str, AnyMetrics]]:
    """Roles that are there, with what they said last; nobody is, once the run is over."""
    return [] if tally.over else sorted(tally.fleet.heard.items())


def _waits(tally: Tally) -> Iterator[Sample]:
    """What stops the work of each role; 0 for one that works."""
    for role, status in _present(tally):
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


def _overdue(tally: Tally) -> Iterator[Sample]:
    for role, status in _present(tally):
        yield (role,), sum(wait.overdue for wait in status.waits)


def _heard(tally: Tally) -> Iterator[Sample]:
    for role, status in _present(tally):
        yield (role,), status.at_ns / 1e9


def _cpu(tally: Tally) -> Iterator[Sample]:
    for role, status in sorted(tally.fleet.heard.items()):
        cost = status.cost
        parts = {"bus": cost.bus_s, "codec": cost.codec_s, "control": cost.control_s}
        for part, seconds in parts.items():
            yield (role, part), seconds
        yield (role, "other"), max(0.0, cost.total_s - sum(parts.values()))


def _memory(tally: Tally) -> Iterator[Sample]:
    for role, status in _present(tally):
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
        lambda t: (((w.name,), w.hosted) for w in t.fleet.present()),
        "worker",
    ),
    gauge(
        "worker_slots",
        "Requests in its running batch at most.",
        "worker joined",
        lambda t: (((w.name,), w.slots) for w in t.fleet.present()),
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
        lambda t: (((w.name,), w.kv_tokens) for w in t.fleet.present()),
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
        each(lambda t: t.fleet.lost),
        "how",
    ),
    histogram(
        "weights_load_seconds",
        "From an assignment to loaded and checked weights.",
        "worker ready",
        lambda t: t.fleet.load_s,
    ),
)
