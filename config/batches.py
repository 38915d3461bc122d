"""Conditions between groups, updates and parts of a batch, and the default number of parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.config.objectives import rewarded
from dora_pipe.config.section import GROUP_SIZE_MAX

PARTS: Final = 4
PART_GROUPS: Final = 4
"""Default parts: at most this many, of at least this many groups."""


def group_problems(config: Config) -> Iterator[str]:
    """Return the problems, one line each."""
    rollout, minibatches = config.rollout, config.trainer.minibatches
    if rollout.min_valid_trajectories > rollout.group_size:
        yield (
            f"rollout.min_valid_trajectories: {rollout.min_valid_trajectories} exceeds"
            f" rollout.group_size, {rollout.group_size}: every group would fail"
        )
    if rollout.group_size + rollout.group_redundancy > GROUP_SIZE_MAX:
        yield (
            f"rollout.group_redundancy: {rollout.group_redundancy} and rollout.group_size,"
            f" {rollout.group_size}, are more than {GROUP_SIZE_MAX} trajectories"
        )
    if rollout.group_size == 1 and needs_difference(config):
        yield (
            "rollout.group_size: a group of 1 has no advantage, so no step has a gradient; set 8,"
            ' or objective.advantage = "version-baseline"'
        )
    if minibatches > rollout.group_size * rollout.prompts_per_step:
        yield (
            f"trainer.minibatches: {minibatches} is more than the"
            f" {rollout.group_size * rollout.prompts_per_step} trajectories of a batch"
        )
    if config.trainer.batch_parts > 1:
        yield from _part_problems(config)


def needs_difference(config: Config) -> bool:
    """Return whether a step has a gradient only if rewards differ within a group."""
    objective = config.objective
    compares = objective.advantage in ("group", "leave-one-out") and rewarded(objective.kind)
    other = objective.kl_coef or objective.teacher_weight or config.trainer.router_aux_loss
    return compares and not other


def gradient_notes(config: Config) -> Iterator[str]:
    """Return notes on settings under which hardly any step has a gradient, one line each."""
    if not needs_difference(config):
        return
    if config.sampling.temperature == 0:
        yield (
            "sampling.temperature = 0: the trajectories of a group are equal unless the task draws"
            " by chance, so no group has an advantage and no step a gradient; set 1.0"
        )
    for task in config.tasks:
        if task.kind == "dataset" and task.reward == "none" and not task.has_agent:
            name = f"task.{task.name}.reward" if task.name else "task.reward"
            yield (
                f'{name} = "none": every reward is 0, so no group has an advantage and no step a'
                " gradient; name a reward"
            )


def why_no_parts(config: Config) -> str:
    """Return why a batch has no parts, or an empty string."""
    updates, parts = config.trainer.minibatches, config.trainer.batch_parts
    if updates not in (1, parts):
        return f"trainer.minibatches: {updates} updates must be 1 or one per part"
    if config.objective.advantage == "version-baseline":
        return "objective.advantage: version-baseline compares with all of a batch"
    return ""


def with_parts(config: Config) -> Config:
    """Return the configuration of a new run with the default number of parts."""
    parts = min(PARTS, config.rollout.prompts_per_step // PART_GROUPS)
    trainer = msgspec.structs.replace(config.trainer, batch_parts=parts)
    parted = msgspec.structs.replace(config, trainer=trainer)
    shared = config.workers.colocated or config.trainer.offload_between_steps
    return config if parts < 2 or shared or why_no_parts(parted) else parted


def _part_problems(config: Config) -> Iterator[str]:
    parts, per_step = config.trainer.batch_parts, config.rollout.prompts_per_step
    if parts > per_step:
        yield f"trainer.batch_parts: {parts} are more than rollout.prompts_per_step, {per_step}"
    if why := why_no_parts(config):
        yield f"trainer.batch_parts: {parts} is impossible: {why}"
