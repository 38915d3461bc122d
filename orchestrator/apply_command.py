"""User commands: set, pause, resume, drain, stop, fail-batch.

| verb | args | effect |
| --- | --- | --- |
| set | logged keys of the configuration | in force from the next step |
| pause | | admits no groups; open groups continue |
| resume | | ends a pause or a halt; restarts the count of failed groups |
| drain | `worker`, else all | workers leave when their requests have moved or finished |
| stop | | ends the run when the groups in flight are trained |
| stop | `after`: a step | ends the run when that step is committed |
| stop | `now`: true | takes no more steps and skips evaluations |
| fail-batch | `step`, as a check | ends the groups in training as failed(non-finite) |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dora_pipe.config.changes import LOGGED, with_settings
from dora_pipe.orchestrator.apply_decision import stop_soon
from dora_pipe.orchestrator.state import State
from dora_pipe.orchestrator.state_ops import fail_batch, give_up_parts, go_on_after_failures
from dora_pipe.schemas.control import Command


def apply_command(state: State, offset: int, record: Command) -> str:
    """Apply a command; return why it is illegal, or an empty string."""
    if state.config is None:
        return "the run has not started"
    handler = _VERBS.get(record.verb)
    if handler is None:
        return f"unknown verb: {record.verb}"
    allowed = ARGS[record.verb]
    extra = sorted(record.args.keys() - allowed)
    if extra and record.verb != "set":
        return f"{record.verb} takes no {extra[0]}"
    return handler(state, record.args)


def _set(state: State, args: dict[str, Any]) -> str:
    assert state.config is not None
    if not args:
        return "no setting given"
    try:
        config = with_settings(state.config, args, step=state.standing().step)
    except ValueError as error:
        return str(error)
    give_up_parts(state)
    state.config = config
    state.trigger = "a user changed the settings"
    return ""


def _pause(state: State, args: dict[str, Any]) -> str:
    if state.paused:
        return "the run is already paused"
    state.paused = True
    return ""


def _resume(state: State, args: dict[str, Any]) -> str:
    if not state.paused and not state.failures.halted:
        return "the run is neither paused nor halted"
    if state.failures.halted:
        go_on_after_failures(state)
    else:
        state.paused = False
        state.trigger = "the pause has ended"
    return ""


def _drain(state: State, args: dict[str, Any]) -> str:
    name = args.get("worker")
    if name is not None and name not in state.workers:
        return f"unknown worker: {name}"
    for worker in state.workers.values():
        if worker.drain == "no" and name in (None, worker.name):
            worker.drain = "asked"
            state.touch(worker)
    state.trigger = "a user drains workers"
    return ""


def _stop(state: State, args: dict[str, Any]) -> str:
    now, after = args.get("now", False), args.get("after")
    if not isinstance(now, bool):
        return "`now` is true or false"
    standing = state.standing()
    if after is None:
        if now:
            state.stop_at = min(standing.steps, standing.step)
            give_up_parts(state)
        else:
            stop_soon(state)
        state.stop_now = state.stop_now or now
        return ""
    if now or isinstance(after, bool) or not isinstance(after, int):
        return "`after` is a step, without `now`"
    if after + 1 < standing.step:
        return f"step {after} has ended, the next step is {standing.step}"
    state.stop_at = after + 1
    if after + 1 == standing.step:
        give_up_parts(state)
    state.trigger = f"the run ends after step {after}"
    return ""


def _fail_batch(state: State, args: dict[str, Any]) -> str:
    training = state.training
    if training is None:
        return "no batch is in training"
    if args.get("step", training.step) != training.step:
        return f"step {training.step} is in training, not {args['step']}"
    fail_batch(state, training)
    return ""


_VERBS: Final[dict[str, Callable[[State, dict[str, Any]], str]]] = {
    "set": _set,
    "pause": _pause,
    "resume": _resume,
    "drain": _drain,
    "stop": _stop,
    "fail-batch": _fail_batch,
}

ARGS: Final[dict[str, frozenset[str]]] = {
    "set": LOGGED,
    "pause": frozenset(),
    "resume": frozenset(),
    "drain": frozenset({"worker"}),
    "stop": frozenset({"now", "after"}),
    "fail-batch": frozenset({"step"}),
}
"""Verbs and their allowed arguments."""
