"""How a batch becomes the next policy: the objective and the trainer.

Each class is a section; the docstrings are what `config show` prints (see `model`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dora_pipe.config import objectives
from dora_pipe.config.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
)

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Those that an adapter may stand beside: of attention and of the gated block."""


LEARNING_RATE_MAX = 1e3
"""Gradients are clipped, so below this an update cannot overflow float32."""


class Objective(Section, frozen=True, kw_only=True):
    """The loss. Every kind uses keys of its own, and knows a default for each; a key that it does
    not use is an error (docs/objectives.md)."""

    kind: str = "grpo"
    """Which objective: grpo, dapo, dr-grpo, decoupled-ppo, tis, cispo, topr, weighted-topr, gspo,
    or `module:attribute` of your own (docs/extending.md). Another kind than before starts from its
    own defaults. Those of `grpo` are DAPO's (token-mean, clip_high 0.28), as older logs have it;
    GRPO as published is loss = "sequence-mean", clip_high = 0.2, kl = 0.04."""
    clip_low: PositiveFloat | None = None
    """The ratio is clipped below 1 - clip_low. 0.2; cispo: 1, gspo: 0.0003."""
    clip_high: PositiveFloat | None = None
    """The ratio is clipped above 1 + clip_high. 0.28; dr-grpo: 0.2, cispo: 4, gspo: 0.0004."""
    proximal: objectives.Proximal | None = None
    """The policy that ratios are clipped around: the one that sampled, or that of the step's first
    weights, whose log-probs the trainer computes. "behaviour"; decoupled-ppo, tis: "recomputed"."""
    weight_max: PositiveFloat | None = None
    """Bound of the weight proximal / behaviour. decoupled-ppo leaves tokens above it out (5), tis
    truncates them to it (2)."""
    level: objectives.Level | None = None
    """Weights per token, or one per trajectory from the product of its ratios. "token"; topr and
    weighted-topr: "sequence"."""
    positive_weight: NonNegativeFloat | None = None
    """Of trajectories with a positive advantage, in weighted-topr. 1."""
    negative_weight: NonNegativeFloat | None = None
    """Of trajectories with a negative advantage, in weighted-topr. 1."""
    loss: objectives.Averaging | None = None
    """Mean over all tokens of a minibatch, or over trajectories of their means, or their sum over
    trajectories times loss_tokens. "token-mean"; dr-grpo: "constant", gspo: "sequence-mean"."""
    loss_tokens: Positive | None = None
    """With loss = "constant": tokens that a trajectory counts as. sampling.max_tokens."""
    advantage: objectives.Advantage | None = None
    """A reward is compared with its group's mean, with the mean of its siblings (RLOO), or with
    the mean of all that its version sampled in the batch. "group"."""
    advantage_std: bool | None = None
    """Divide advantages by the standard deviation of what they are compared with. true; dr-grpo:
    false."""
    kl: NonNegativeFloat | None = None
    """Weight of the KL to the reference policy (version 0). 0; not in dapo."""
    kl_estimate: objectives.KlEstimate | None = None
    """How that KL is estimated. "k3"."""
    mask: objectives.Mask | None = None
    """Leave out tokens whose ratio of trainer to engine is out of bounds, or trajectories by the
    product of theirs or by its geometric mean. "none"."""
    mask_low: PositiveFloat | None = None
    """Lower bound of `mask`. 0.5."""
    mask_high: PositiveFloat | None = None
    """Upper bound of `mask`. 5."""
    options: dict[str, float | int | str | bool] = {}  # noqa: RUF012 - msgspec copies it
    """What an objective of your own declares."""

    def __post_init__(self) -> None:
        objectives.check_kind(self.kind)
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        for key in objectives.unused(given):
            raise ValueError(objectives.why_unused(given, key))
        for key, value in objectives.defaults_of(given).items():
            if given[key] is None:
                msgspec.structs.force_setattr(self, key, value)
        low, high = self.mask_low, self.mask_high
        if low is not None and high is not None and low >= high:
            raise ValueError(f"mask_low: {low:g} is not below mask_high, {high:g}")


class Lora(Section, frozen=True, kw_only=True):
    """A policy of version 0's weights and an adapter, which alone is trained (docs/training.md)."""

    rank: NonNegative = 0
    """Of the adapter's matrices; 0: all weights are trained, there is no adapter."""
    alpha: PositiveFloat = 16.0
    """What an adapter makes counts alpha / rank times."""
    targets: tuple[str, ...] = LINEAR_LAYERS
    """The linear layers that are adapted, in every decoder layer."""


class Trainer(Section, frozen=True, kw_only=True):
    """The training engine and its optimizer (AdamW)."""

    kind: str = "torch"
    """Which engine: torch, deepspeed (which has the keys from `ranks` to `dtype`; docs/training.md)
    or `module:attribute` of your own (docs/extending.md)."""
    learning_rate: PositiveFloat = 1e-5
    """Constant; it may be changed between steps."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Of AdamW; below 1."""
    weight_decay: NonNegativeFloat = 0.0
    """Of AdamW."""
    grad_norm_max: PositiveFloat = 1.0
    """Longer gradients are scaled down to this norm."""
    minibatches: Positive = 1
    """Optimizer updates per step."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens of one forward and backward pass."""
    checkpoint_every: Positive = 10
    """Steps between checkpoints of the optimizer state."""
    threads: Positive = 1
    """Of the trainer's process; equal bits are promised under an equal number."""
    ranks: Positive = 1
    """Processes. They are started on the trainer's machine, or by torchrun on several."""
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 2
    """What is spread over the ranks: 1 AdamW's moments, 2 gradients too, 3 weights too."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in the host's memory: AdamW's moments and its update, or weights too (stage 3)."""
    gradient_accumulation: Positive = 1
    """Passes of a rank per update, at least; `micro_batch_tokens` may ask for more."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computation; weights are updated and published in float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: for `deepspeed` a GPU per rank if there is one, for `torch` the CPU."""
    gpus: tuple[NonNegative, ...] = ()
    """GPUs of the ranks on a machine, in their order, counted from 0 among those that are visible;
    empty: the first ones."""
