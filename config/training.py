"""The section [trainer] and its learning rates."""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal

from msgspec import Meta

from dora_pipe.config.section import (
    ComputeDtype,
    NonNegative,
    NonNegativeFloat,
    OptimizerName,
    Positive,
    PositiveFloat,
    Section,
    Share,
)

RateSchedule = Literal["constant", "linear", "cosine"]

_TERMS: Final = 12
"""Terms of the cosine's series; within a right angle the next one is below 1e-19."""


def rate_of(
    step: int, *, peak: float, schedule: RateSchedule, warmup: int, end: int, least: float
) -> float:
    """Return the learning rate of `step` (from 0).

    It grows linearly to `peak` over `warmup` steps, then falls linearly or on half a cosine to
    `least` (a share of the peak) at step `end`. It uses basic arithmetic only: `math.cos` differs
    in its last bit between C libraries, and an audit recomputes the decision. Example:
    ``rate_of(50, peak=1.0, schedule="linear", warmup=0, end=100, least=0.0) == 0.5``
    """
    if step < warmup:
        return peak * ((step + 1) / warmup)
    if schedule == "constant":
        return peak
    if step >= end:
        return peak * least
    progress = (step - warmup) / (end - warmup)
    factor = (
        1.0 - progress if schedule == "linear" else (1.0 + _cosine_of_half_turns(progress)) / 2.0
    )
    return peak * (least + (1.0 - least) * factor)


def _cosine_of_half_turns(turns: float) -> float:
    if turns > 0.5:
        return -_cosine_of_half_turns(1.0 - turns)
    square = (math.pi * turns) * (math.pi * turns)
    term = total = 1.0
    for number in range(1, _TERMS):
        term = -term * square / ((2 * number - 1) * (2 * number))
        total += term
    return total


class Trainer(Section, frozen=True, kw_only=True):
    """The trainer and its optimizer."""

    kind: str = "torch"
    """torch, deepspeed (with the keys from `ranks` to `expert_parallel_size`;
    docs/large-models.md) or `module:attribute` (docs/training.md)."""
    optimizer: OptimizerName = "adamw"
    """AdamW; Muon for matrices of hidden layers with AdamW for the rest; or AdamW with 8-bit
    moments (extra `adamw8bit`)."""
    learning_rate: PositiveFloat = 1e-5
    """Learning rate, the peak of a schedule. May be changed between steps."""
    schedule: RateSchedule = "constant"
    """Decay after the peak: constant, linear or cosine."""
    warmup_steps: NonNegative = 0
    """Warm-up steps."""
    min_lr_ratio: Share = 0.0
    """Final learning rate of a schedule, as a share of the peak."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW betas; below 1."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW and Muon, times the learning rate; excludes norms and biases."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient clipping norm."""
    minibatches: Positive = 1
    """Optimizer updates per step."""
    batch_parts: Positive = 1
    """Parts of a batch. The trainer computes the gradient of `rollout.prompts_per_step` /
    `batch_parts` finished groups while workers generate the others; 1: when the batch is complete.
    Default 4, fewer if a part had less than 4 groups, and 1 with several `minibatches`, colocated
    workers, `offload_between_steps` or `version-baseline`. With as many `minibatches`, each part
    is an update."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens of one forward and backward pass."""
    router_aux_loss: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a mixture's routers, per sequence
    (docs/large-models.md); 0: none."""
    packing: bool = False
    """Concatenate short sequences into one row of a pass: less padding, different rounding."""
    gradient_checkpointing: bool | Literal["offload"] = False
    """Keep only each layer's input and recompute the rest in the backward pass: equal bits, a third
    more compute, a fraction of the memory. "offload" keeps these inputs in host memory."""
    offload_between_steps: bool = False
    """Move weights and optimizer state to host memory between steps, so that colocated workers can
    use the GPU: equal bits, two copies per step."""
    checkpoint_every: Positive = 10
    """Steps between optimizer checkpoints."""
    threads: Positive = 1
    """CPU threads of the trainer; changing this changes results bitwise."""
    ranks: Positive = 1
    """Ranks, started on the trainer's machine or on its `--nodes`."""
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 2
    """ZeRO stage: 1 shards AdamW's moments, 2 also gradients, 3 also weights."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Keep AdamW's moments and its update in host memory, or also weights (stage 3)."""
    expert_parallel_size: Positive = 1
    """Ranks that share the experts of each layer of a mixture; divides ranks and experts. 1: every
    rank holds all experts."""
    dtype: ComputeDtype = "float32"
    """Type of matrix products; weights are updated in float32. Use bfloat16 on GPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if torch finds one (for `deepspeed` one per rank), otherwise the CPU."""
    gpus: tuple[NonNegative, ...] = ()
    """GPU of each rank on a machine, counted from 0 among the visible ones; empty: the first
    ones."""

    @property
    def stage_without_effect(self) -> str:
        """Return a note on a `zero_stage` without effect, or an empty string."""
        if self.kind != "torch" or self.zero_stage == Trainer().zero_stage:
            return ""
        return (
            f"trainer.zero_stage = {self.zero_stage} does nothing with trainer.kind = 'torch', "
            "which has one process; 'deepspeed' spreads what it names over ranks"
        )

    @property
    def chunks_refused(self) -> bool:
        """Return whether chunked blocks are impossible: ZeRO 3 gathers weights per call on all
        ranks, whose passes differ in length."""
        return self.kind == "deepspeed" and self.zero_stage == 3
