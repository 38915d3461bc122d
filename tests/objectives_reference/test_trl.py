"""Objectives against the loss of trl's GRPOTrainer, fed with log-probs instead of a model."""

from __future__ import annotations

from collections import defaultdict
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.objectives_reference.rectangle import TOKENS, TOLERANCE, Rectangle, difference

trl: Any = pytest.importorskip(
    "trl.trainer.grpo_trainer", reason="trl is not here: make test-objectives"
)

PACKAGE = f"trl {version('trl')}"


class Trainer(SimpleNamespace):
    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.logps, torch.zeros_like(self.logps), None


def loss_of(
    box: Rectangle,
    logprobs: Tensor,
    *,
    kind: str,
    low: float = 0.2,
    high: float = 0.28,
    kl: float = 0.0,
    level: str = "token",
    weights: Tensor | None = None,
) -> Tensor:
    plain = SimpleNamespace(gather=lambda value: value, reduce=lambda value, reduction: value)
    plain.num_processes = 1
    options = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    trainer = Trainer(
        logps=box.padded(logprobs),
        loss_type=kind,
        epsilon_low=low,
        epsilon_high=high,
        beta=kl,
        importance_sampling_level=level,
        max_completion_length=TOKENS,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=plain,
        args=options,
        _metrics={"train": defaultdict(list)},
    )
    mask = box.mask
    empty = torch.zeros(len(mask), 0, dtype=torch.long)
    assert box.inputs.reference is not None
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": box.scores,
        "old_per_token_logps": box.padded(box.inputs.around),
        "ref_per_token_logps": box.padded(box.inputs.reference),
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize(
    ("kind", "of_trl", "loss"),
    [
        ("grpo", "grpo", "sequence-mean"),
        ("grpo", "bnpo", "token-mean"),
        ("dapo", "dapo", "token-mean"),
        ("dr-grpo", "dr_grpo", "constant"),
    ],
)
def test_clipped_ratio(kind: str, of_trl: str, loss: str) -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        return loss_of(box, logprobs, kind=of_trl)

    assert difference(PACKAGE, kind, theirs, clip_high=0.28, loss=loss) < TOLERANCE


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_kl_to_the_reference(loss: str) -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        return loss_of(box, logprobs, kind=loss, kl=0.3)

    mean = {"grpo": "sequence-mean", "dapo": "token-mean"}[loss]
    assert difference(PACKAGE, "grpo", theirs, loss=mean, kl_coef=0.3) < TOLERANCE


def test_cispo_bounds_the_ratio_itself() -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        return loss_of(box, logprobs, kind="cispo", high=5.0)

    assert difference(PACKAGE, "cispo", theirs) < TOLERANCE


def test_gspo() -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        return loss_of(box, logprobs, kind="grpo", low=0.03, high=0.04, level="sequence")

    assert difference(PACKAGE, "gspo", theirs, clip_low=0.03, clip_high=0.04) < TOLERANCE


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", [0.9, 2.0])
def test_truncated_importance_sampling(level: str, bound: float) -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        assert box.inputs.proximal is not None
        apart = box.padded(box.inputs.proximal - box.inputs.behaviour, padding=0.0)
        if level == "sequence":
            apart = apart.sum(dim=-1, keepdim=True)
        return loss_of(box, logprobs, kind="dapo", weights=apart.exp().clamp(max=bound))

    assert difference(PACKAGE, "tis", theirs, level=level, max_weight=bound) < TOLERANCE


def test_masked_importance_sampling_is_decoupled_ppo_with_a_mask() -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        assert box.inputs.proximal is not None
        apart = box.padded(box.inputs.proximal - box.inputs.behaviour, padding=0.0)
        weights = apart.sum(dim=-1, keepdim=True).exp()
        weights = weights.masked_fill((weights < 0.5) | (weights > 2.0), 0.0)
        return loss_of(box, logprobs, kind="dapo", weights=weights)

    keys: dict[str, Any] = {"mask": "sequence", "mask_low": 0.5, "mask_high": 2.0}
    assert difference(PACKAGE, "decoupled-ppo", theirs, level="sequence", **keys) < TOLERANCE
