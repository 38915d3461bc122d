"""The configuration tree: which sections there are, and what a resumed run may change of them.

Keys are `frozen` (a resumed run must have the same), `logged` (may change; in force from the next
step, recorded in the log) or `free` (addresses, sizes, timing). `FROZEN` and `LOGGED` name the
first two; everything else is free. The sections stand in `sections` and are imported from here;
their docstrings are what
`config show` and reference/configuration.md print. `load` reads a file, `checks` says what one
section asks of another.
"""

from __future__ import annotations

import msgspec

from dora_pipe.config.sections import (
    Bus,
    Evaluation,
    Groups,
    Lora,
    Model,
    Objective,
    Planner,
    Run,
    Sampling,
    Section,
    Staleness,
    Store,
    Task,
    Telemetry,
    Timing,
    Trainer,
    Transfers,
    Vllm,
    Workers,
)

__all__ = [
    "FROZEN",
    "LOGGED",
    "Bus",
    "Config",
    "Evaluation",
    "Groups",
    "Lora",
    "Model",
    "Objective",
    "Planner",
    "Run",
    "Sampling",
    "Section",
    "Staleness",
    "Store",
    "Task",
    "Telemetry",
    "Timing",
    "Trainer",
    "Transfers",
    "Vllm",
    "Workers",
    "in_flight_batches",
]


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration of a run."""

    run: Run
    model: Model
    task: Task
    sampling: Sampling = Sampling()
    groups: Groups = Groups()
    staleness: Staleness = Staleness()
    planner: Planner = Planner()
    evaluation: Evaluation = Evaluation()
    objective: Objective = Objective()
    lora: Lora = Lora()
    trainer: Trainer = Trainer()
    workers: Workers = Workers()
    bus: Bus = Bus()
    timing: Timing = Timing()
    store: Store = Store()
    transfers: Transfers = Transfers()
    telemetry: Telemetry = Telemetry()

    def __post_init__(self) -> None:
        objective = self.objective
        if objective.loss == "constant" and objective.loss_tokens is None:
            filled = msgspec.structs.replace(objective, loss_tokens=self.sampling.max_tokens)
            msgspec.structs.force_setattr(self, "objective", filled)


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
        *(f"objective.{name}" for name in Objective.__struct_fields__ if name != "options"),
    }
)
"""May change between steps; a change is a `set` command in the control topic."""

_FROZEN = """
run.name run.seed model.path model.dtype task.kind task.data task.eval_data task.reward
task.options task.turns_max task.special_tokens sampling groups.size groups.per_step
groups.min_valid_siblings groups.filter_zero_advantage groups.attempts_max staleness.interruptible
evaluation objective.options lora trainer.kind trainer.betas trainer.weight_decay
trainer.micro_batch_tokens bus.partitions
trainer.ranks trainer.zero_stage trainer.offload trainer.gradient_accumulation trainer.dtype
"""
FROZEN = frozenset(_FROZEN.split())
"""A resumed run must have the same; a name stands for its whole section."""


def in_flight_batches(staleness: Staleness) -> float:
    """C in force: as configured, else min(2, eta + 1)."""
    if staleness.in_flight_batches is not None:
        return staleness.in_flight_batches
    return min(2.0, staleness.max_staleness + 1.0)


def versions_resident(config: Config) -> int:
    """Versions that one engine hosts at once, in force: several only where they are adapters."""
    return config.workers.versions_resident if config.lora.rank else 1
