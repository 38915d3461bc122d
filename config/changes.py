"""Keys that a resumed run must keep (frozen) or may change between steps (logged). All others are
free: addresses, sizes, timing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dora_pipe.config.model import Config, Objective, async_batches
from dora_pipe.config.objectives import FOR_GOOD, refused_kind, settled

LOGGED = frozenset(
    {
        "run.steps",
        "rollout.max_failed_share",
        "staleness.max_staleness",
        "staleness.async_batches",
        "trainer.learning_rate",
        "trainer.max_grad_norm",
        "trainer.minibatches",
        *(f"objective.{name}" for name in Objective.__struct_fields__ if name not in FOR_GOOD),
    }
)
"""A change is a `set` command in the control topic."""

_FROZEN = """
run.name run.seed model.path model.chat_template task.name task.ratio
task.kind task.data task.eval_data task.reward
task.split task.eval_split task.eval_share task.filter task.columns
task.chat task.system_prompt task.tools task.mcp
task.options task.max_turns task.agent
task.unsupported_sampling task.special_tokens task.chat_template_kwargs task.renderer
task.tool_parser task.rewritten_history sampling rollout.group_size rollout.prompts_per_step
rollout.group_redundancy rollout.group_timeout_s
rollout.min_valid_trajectories rollout.filter_zero_advantage rollout.max_attempts
staleness.partial_rollout task.sampler task.max_solve_rate teacher.model teacher.digest
evaluation objective.options objective.reference_every lora trainer.kind trainer.betas
trainer.optimizer trainer.weight_decay trainer.schedule
trainer.warmup_steps trainer.min_lr_ratio trainer.micro_batch_tokens
bus.partitions trainer.packing
trainer.batch_parts trainer.ranks trainer.zero_stage trainer.offload
trainer.dtype policies.dtype trainer.router_aux_loss trainer.expert_parallel_size
"""
FROZEN = frozenset(_FROZEN.split())
"""A name denotes its whole section."""


def kind_of(key: str) -> str:
    """Return `frozen`, `logged` or `free` for a dotted key."""
    if key in LOGGED:
        return "logged"
    if key in FROZEN or key.split(".")[0] in FROZEN:
        return "frozen"
    return "free"


def with_settings(config: Config, changes: Mapping[str, Any], *, step: int = 0) -> Config:
    """Return the configuration with logged keys changed before `step`. Raises ValueError with the
    reason."""
    plain = msgspec.to_builtins(config)
    objective: dict[str, Any] = {}
    for key, value in changes.items():
        if key not in LOGGED:
            raise ValueError(f"{key} cannot change in a run")
        section, _, name = key.partition(".")
        (objective if section == "objective" else plain[section])[name] = value
    if why := refused_kind(config.objective.kind, objective.get("kind", config.objective.kind)):
        raise ValueError(why)
    plain["objective"] = settled(plain["objective"], objective)
    changed = msgspec.convert(plain, Config)  # ValidationError is a ValueError.
    if async_batches(changed.staleness) < 1:
        raise ValueError("staleness.async_batches is below 1: no batch could fill")
    if changed.run.steps < step:
        raise ValueError(f"run.steps = {changed.run.steps}, but step {step} comes next")
    return changed
