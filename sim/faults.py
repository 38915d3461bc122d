"""All faults, and where they apply."""

from __future__ import annotations

from typing import Final

from dora_pipe.sim.agents import AGENT_HANGS, AGENT_LOST, AGENT_RAISES, AGENT_WANDERS

FAULTS: Final[dict[str, str]] = {
    "kill-worker": "a worker dies and is started again",
    "kill-trainer": "the trainer dies and is started again",
    "kill-orchestrator": "the orchestrator dies and is started again",
    "kill-appending": "a role dies in the middle of an append, some records of which land",
    "pause-worker": "a worker is stopped and continued, often beyond its lease",
    "pause-trainer": "the trainer is stopped and continued",
    "pause-orchestrator": "the orchestrator is stopped and continued",
    "zombie-worker": "a worker is stopped, another takes its name, then it continues",
    "zombie-trainer": "the trainer is stopped, another takes over, then it continues",
    "zombie-orchestrator": "the orchestrator is stopped, another takes over, then it continues",
    "outage": "no role reaches the bus for a while",
    "outage-one": "one role does not reach the bus for a while",
    "append-refused": "an append is refused: the bus is away or full",
    "append-unknown": "an append lands without acknowledgement; a plain writer appends again",
    "append-torn": "some records of an append land without acknowledgement",
    "delayed": "what a worker appends becomes visible later",
    "poll-refused": "a poll fails",
    "clock-rate": "monotonic clocks run slow or fast",
    "clock-jump": "a wall clock jumps, forwards or back",
    "join": "another worker joins, or one that had left comes back",
    "drain": "a user drains a worker",
    "terminate": "a worker is asked to stop and leaves in order",
    "depart": "a worker dies and never comes back",
    "reward-raises": "a reward raises",
    "reward-hangs": "a reward hangs until its time limit",
    "prompt-fails": "a prompt cannot be made",
    "episode-lost": "the process of an episode dies",
    "command-pause": "a user pauses the run, and resumes it later",
    "command-bound": "a user sets max_staleness and async_batches, up and down",
    "command-odd": "a user sends an invalid command",
    "command-fail-batch": "a user ends the batch in training",
    "command-stop": "a user stops the run early, now or when its groups are trained",
    "garbage": "a foreign record in control, metrics or trajectories",
    "gaps": "offsets have large gaps",
    "handover-full": "a KV cache that moves finds no room",
    "handover-lost": "a KV cache that moves is lost",
    "handover-damaged": "a KV cache that moves was damaged",
    "move-source-dies": "the source worker of a move dies",
    "move-target-dies": "the target worker of a move dies",
    "command-settings": "a user changes a setting of the trainer",
    "policy-unreadable": "a worker cannot load its weights",
    "environment-hangs": "a turn, a tool, a reward or an agent hangs until the end",
    "task-process-dies": "a task process dies, with all its episodes and agents",
    "retry": "a prompt or a turn raises `Retry` permanently",
    "endpoint-dies": "the process that agents call dies",
    "agent-lost": "an agent's process dies, or it raises `Retry`",
    "agent-raises": "an agent raises",
    "agent-wanders": "an agent differs between two runs",
    "copies-lost": "a machine has lost versions that it had copied or made",
    "delta-damaged": "a delta on a machine is damaged, and its result is lost",
}

HANGING: Final = AGENT_HANGS
"""Needs time limits or redundant trajectories."""

OF_EPISODES: Final = ("task-process-dies", "retry")
OF_AGENTS: Final = ("endpoint-dies", AGENT_LOST, AGENT_RAISES, AGENT_WANDERS)
OF_DELTAS: Final = ("copies-lost", "delta-damaged")
APART: Final = (HANGING, *OF_EPISODES, *OF_AGENTS, *OF_DELTAS)

STRIKING: Final = (
    "kill-worker",
    "pause-worker",
    "kill-orchestrator",
    "kill-trainer",
    "zombie-worker",
)
"""Every seed has one of these."""

MOVING: Final = tuple(name for name in FAULTS if name.startswith(("handover-", "move-")))
"""Faults of moves, which are rare: three of four slow seeds enable all of these."""
