"""Waits by their names: what each is for, and what to do about it; docs/why.md lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SILENT: Final = "see its log; start it again"
"""About a role that is not heard."""

ADVICE: Final[Mapping[str, str]] = {
    # The trainer's, cut by who had the trajectory that came last of the batch.
    "admission": "admit more: staleness.max_staleness, staleness.in_flight_batches, more slots",
    "queue": "more slots: workers.slots, workers.count",
    "lost": "see that worker's log: it died, or was fenced",
    "sampling": "generate faster: more workers; or sampling.max_tokens",
    "decision": "the orchestrator or the log is slow: bench plan, bench bus",
    "batch": "see whom it ends at",
    "trajectories": "the log is slow to read: bench bus",
    "commit": "the log is slow to acknowledge: bench bus",
    "refusal": "the log is slow to acknowledge: bench bus",
    "replay": "passes; shorter after a restart with trainer.checkpoint_every",
    "decisions": "passes: it reads the log once, at its start",
    # The orchestrator's.
    "trainer": "training is the bottleneck: a faster trainer, or fewer workers",
    "groups": "generation is the bottleneck: more workers or slots",
    "worker": "start a worker: dora-pipe worker; see its log if it does not join",
    "host": "no worker has that version: see the workers' logs",
    "elastic": "they finish what cannot move: planner.moves, and see their logs",
    "pause": "dora-pipe tell RUN resume",
    "halted": "mend what the groups failed with, then run --resume",
    "start": "start the other roles",
    # A worker's.
    "requests": "nothing may be admitted: a larger bound, a faster trainer, or fewer workers",
    "version": "none is assigned: it just joined, or sleeps while a step is computed",
    "weights": "the policy store is slow: transfers.kind, bench moves --weights",
    "prompt": "the task is slow: task.processes",
    "environment": "the task's environment is slow: task.processes, async def",
    "reward": "the reward is slow: task.processes, async def",
    "agent": "agents think: more requests at once, or see what they wait for themselves",
    "call": "the log is slow: bench bus",
    "progress": "the log is slow: bench bus",
    "append": "the log is slow: bench bus",
    "slot": "the engine has no slot free: see its log",
    "tokens": "the engine gives no tokens: see the worker's log",
    "codec": "the machine is busy: a core more",
    "leaving": "passes: it publishes how far its requests are",
    "kv": "the other worker does not hand over: see its log",
    "silent": SILENT,
}
"""What to look at or to change. What `passes` needs nothing."""

WORDS: Final[Mapping[str, str]] = {
    "trainer": "the trainer",
    "groups": "groups to finish",
    "worker": "a worker",
    "admission": "new groups",
    "elastic": "elastic workers to sleep",
    "pause": "the end of a pause",
    "start": "the start of the run",
    "requests": "requests",
    "version": "a version",
    "weights": "weights to be loaded",
    "prompt": "prompts",
    "progress": "progress records",
    "slot": "slots",
    "tokens": "tokens that did not come",
    "environment": "environments",
    "reward": "rewards",
    "agent": "agents",
    "call": "calls to be durable",
    "codec": "the codec",
    "append": "the trajectories topic",
    "leaving": "its last progress records",
    "replay": "the replay of committed steps",
    "decisions": "the decisions before its start",
    "trajectories": "its batch to be read",
    "commit": "the acknowledgement of a commit",
    "refusal": "the acknowledgement of a refusal",
}
"""What a wait is for, whatever its step or version."""
