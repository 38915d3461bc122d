"""How long calls of a task may take."""

from __future__ import annotations

from typing import Final

from dora_pipe.config import model
from dora_pipe.producers.tasks import claims
from dora_pipe.producers.tasks.calls import AgentCall, Claim, GroupCall, RewardCall, TaskCall
from dora_pipe.producers.tasks.child import OpenCall

EPISODE_TIMEOUT: Final = "EpisodeTimeout"
LATE: Final = ("TimedOut", EPISODE_TIMEOUT)
"""What calls end with that are beyond their limits."""

_NS: Final = 1_000_000_000


def limit_s(task: model.Task, call: TaskCall, *, tools: bool) -> float:
    """For a try at a call; `tools`: its episode has some."""
    if isinstance(call, RewardCall | GroupCall):
        return task.reward_timeout_s
    if isinstance(call, AgentCall):
        return task.agent_timeout_s
    if isinstance(call, Claim):
        return claims.LIMIT_S
    seconds = task.environment_timeout_s
    return seconds + (task.tool_timeout_s or seconds) if tools else seconds


def episode_too_long(task: model.Task) -> str:
    """What is said of an episode that is beyond `task.episode_seconds`."""
    return f"the episode took longer than {task.episode_seconds:g} s"


def late(task: model.Task, call: OpenCall) -> str:
    """What is said of a call that is beyond its limit."""
    if call.late == EPISODE_TIMEOUT:
        return episode_too_long(task)
    return f"timed out after {call.limit_ns / _NS:g} s"
