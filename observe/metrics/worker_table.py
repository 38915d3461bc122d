"""The metrics of workers: a part of the table (`metrics.table`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from dora_pipe.observe.metrics.metric import Samples, counter, gauge, histogram
from dora_pipe.observe.run_stats import STATES, RunStats
from dora_pipe.schemas.metrics import FailingPlace, WorkerStatus

HERE: Final = "here"
"""The place of a task's processes on their worker's machine."""


def _workers(stats: RunStats) -> Samples:
    """Every state of every hosted version, so that a state that nobody is in any more says 0."""
    counted = stats.worker_states()
    versions = {version for version, _ in counted}
    return {(version, state): counted[version, state] for version in versions for state in STATES}


def _heard(stats: RunStats) -> Iterator[tuple[str, WorkerStatus]]:
    """What workers said last that are there."""
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
    """A figure of each place of a task that fails, as its worker said last."""
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
