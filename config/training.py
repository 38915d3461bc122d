"""What trains: the section [trainer] of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from dora_pipe.config.schedule import Schedule
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


class Trainer(Section, frozen=True, kw_only=True):
    """The training engine and its optimizer."""

    kind: str = "torch"
    """Which engine: torch, deepspeed (which has the keys from `ranks` to `expert_parallel`;
    docs/training.md) or `module:attribute` of your own (docs/extending.md)."""
    optimizer: OptimizerName = "adamw"
    """What updates: AdamW, Muon for the matrices of the hidden layers and AdamW for the rest, or
    AdamW whose moments have eight bits (the extra `adamw8bit`)."""
    learning_rate: PositiveFloat = 1e-5
    """Its peak, where there is a schedule; it may be changed between steps."""
    schedule: Schedule = "constant"
    """How the rate goes on from its peak: it stays, or falls on a line or half a cosine."""
    warmup_steps: NonNegative = 0
    """Steps over which the rate grows to its peak."""
    learning_rate_min: Share = 0.0
    """What a schedule falls to, as a share of the peak."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Of AdamW; below 1."""
    weight_decay: NonNegativeFloat = 0.0
    """Of AdamW and Muon, times the learning rate. Tensors of one dimension (norms and biases) are
    left alone."""
    grad_norm_max: PositiveFloat = 1.0
    """Longer gradients are scaled down to this norm."""
    minibatches: Positive = 1
    """Optimizer updates per step."""
    parts: Positive = 1
    """Of a batch: the gradient of finished groups is computed while the others are generated, a
    part of `groups.per_step` / `parts` groups at a time; 1: when the batch is whole. A file that
    says nothing gets 4, fewer where a part had less than 4 groups, and 1 where there can be none
    (several `minibatches`, elastic workers, `offload_between_steps`). With as many `minibatches`
    each part is an update."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens of one forward and backward pass."""
    router_aux_loss: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a mixture's routers beside the objective, of every
    sequence by itself (docs/large-models.md); 0: none."""
    packing: bool = False
    """Several sequences stand in a line of a pass, where there is room, and none sees another:
    less padding, other last digits."""
    gradient_checkpointing: bool | Literal["offload"] = False
    """Of each layer its input alone is held, and the rest computed again when gradients go back:
    equal bits, a third more computing, a fraction of the memory. "offload": these inputs lie in the
    host's memory meanwhile."""
    offload_between_steps: bool = False
    """While no step is computed weights, optimizer state and all else lie in the host's memory, and
    the GPU is free for elastic workers: equal bits, two copies a step."""
    checkpoint_every: Positive = 10
    """Steps between checkpoints of the optimizer state."""
    threads: Positive = 1
    """Of the trainer's process; equal bits are promised under an equal number."""
    ranks: Positive = 1
    """Processes. They are started on the trainer's machine, or on each of its `--nodes`."""
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 2
    """What is spread over the ranks: 1 AdamW's moments, 2 gradients too, 3 weights too."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in the host's memory: AdamW's moments and its update, or weights too (stage 3)."""
    expert_parallel: Positive = 1
    """Ranks that share the experts of each layer of a mixture, and send tokens to each other's; it
    divides ranks and experts. 1: every rank computes all experts."""
    dtype: ComputeDtype = "float32"
    """Of the products of a pass: bfloat16 is what GPUs are fast in. Weights are updated in
    float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU (for `deepspeed` one per rank) where torch finds one, else the CPU."""
    gpus: tuple[NonNegative, ...] = ()
    """GPUs of the ranks on a machine, in their order, counted from 0 among those that are visible;
    empty: the first ones."""

    @property
    def stage_without_effect(self) -> str:
        """What to say of a `zero_stage` that another kind of trainer was given; empty: nothing."""
        if self.kind != "torch" or self.zero_stage == Trainer().zero_stage:
            return ""
        return (
            f"trainer.zero_stage = {self.zero_stage} does nothing with trainer.kind = 'torch', "
            "which has one process; 'deepspeed' spreads what it names over ranks"
        )

    @property
    def chunks_refused(self) -> bool:
        """Whether blocks are never computed in chunks: ZeRO 3 gathers weights for each call, on all
        ranks together, and their passes have other lengths."""
        return self.kind == "deepspeed" and self.zero_stage == 3
