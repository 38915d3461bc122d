"""The loss of one pass on tensors, as every trainer on torch computes it; it decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dora_pipe.consumers.learners.settings import StepSettings
from dora_pipe.consumers.learners.torch.model import Passage
from dora_pipe.consumers.objectives.registry import needs_proximal, needs_reference, terms_of
from dora_pipe.consumers.objectives.terms import Inputs, RowFigures, row_figures


def per_token(values: Sequence[float], passage: Passage) -> Tensor:
    """A value per row as one per counted token, [N] float32, on the passage's device."""
    spread = torch.tensor(values, dtype=torch.float32).repeat_interleave(
        torch.tensor(passage.lengths)
    )
    return spread.to(passage.ids.device)


def pass_loss(
    passage: Passage,
    logprobs: Tensor,
    *,
    advantages: Tensor,
    weights: Tensor,
    proximal: Tensor | None,
    reference: Callable[[Passage], Tensor],
    step: StepSettings,
) -> tuple[Tensor, list[RowFigures]]:
    """The weighted loss of a pass, and what each of its rows did; tensors are per token, [N].

    `proximal` is None in a step's first update, whose own weights are the step's first ones.
    `reference` is called where the objective needs it.
    """
    objective = step.objective
    if not needs_proximal(objective):
        proximal = None
    elif proximal is None:
        proximal = logprobs.detach()
    inputs = Inputs(
        logprobs=logprobs,
        behaviour=passage.behaviour,
        proximal=proximal,
        reference=reference(passage) if needs_reference(objective) else None,
        advantages=advantages,
        lengths=passage.lengths,
    )
    terms = terms_of(inputs, objective)
    return (terms.loss * weights).sum(), row_figures(terms, weights, passage.lengths)


def temperature_numerics(temperature: float) -> dict[str, str]:
    """What the policy's temperature adds to a trainer's fingerprint: at 1 nothing, as ever."""
    return {} if temperature == 1 else {"temperature": repr(temperature)}
