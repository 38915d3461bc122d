"""What a resumed run may change of its configuration: keys that are frozen or logged, by name.

Everything else is free: addresses, sizes, timing.
"""

from __future__ import annotations

from dora_pipe.config.model import Objective
from dora_pipe.config.objectives import FOR_GOOD

LOGGED = frozenset(
    {
        "run.steps",
        "groups.failed_share_max",
        "staleness.max_staleness",
        "staleness.in_flight_batches",
        "planner.moves",
        "planner.moves_max",
        "planner.pack",
        "planner.kv_pressure",
        "trainer.learning_rate",
        "trainer.grad_norm_max",
        "trainer.minibatches",
        *(f"objective.{name}" for name in Objective.__struct_fields__ if name not in FOR_GOOD),
    }
)
"""May change between steps; a change is a `set` command in the control topic."""

_FROZEN = """
run.name run.seed model.path model.dtype model.chat_template task.name task.ratio
task.kind task.data task.eval_data task.reward task.rewards
task.split task.eval_split task.eval_share task.filter task.columns task.prompt_column
task.answer_column task.chat task.system_prompt task.tools task.mcp
task.options task.turns_max task.agent task.command task.calls_max task.calls_open_max
task.sampling_asked task.special_tokens task.chat_template_kwargs task.renderer
task.chat_date task.tool_parser task.rewritten_history sampling groups.size groups.per_step
groups.spare groups.seconds_max groups.turn_values_share groups.turn_values_samples
groups.min_valid_siblings groups.filter_zero_advantage groups.attempts_max staleness.interruptible
task.sampler task.drop_solved task.drop_solved_of teacher.dtype teacher.model teacher.digest
evaluation objective.options objective.reference_every lora trainer.kind trainer.betas
trainer.optimizer trainer.weight_decay trainer.weight_decay_exclude trainer.schedule
trainer.warmup_steps trainer.learning_rate_min trainer.schedule_steps trainer.micro_batch_tokens
bus.partitions trainer.head_chunk_tokens trainer.mlp_chunk_tokens trainer.packing
trainer.parts trainer.ranks trainer.zero_stage trainer.offload trainer.gradient_accumulation
trainer.dtype policies.dtype trainer.router_aux_loss trainer.expert_parallel
"""
FROZEN = frozenset(_FROZEN.split())
"""A resumed run must have the same; a name stands for its whole section."""


def kind_of(key: str) -> str:
    """`frozen`, `logged` or `free`, of a dotted key."""
    if key in LOGGED:
        return "logged"
    if key in FROZEN or key.split(".")[0] in FROZEN:
        return "frozen"
    return "free"
