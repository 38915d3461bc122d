"""Rows of unequal length as the padded rectangles that other packages take, and the comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from dora_pipe.consumers.objectives.advantage import token_weights
from dora_pipe.consumers.objectives.registry import needs_proximal, terms_of
from dora_pipe.consumers.objectives.terms import Inputs
from tests.support.objectives import chosen, random_inputs

TOLERANCE: Final = 1e-6
"""Greatest absolute difference of a loss or of a gradient's element."""

TOKENS: Final = 64
"""What a trajectory counts as with loss = "constant"."""

LENGTHS: Final = ((5, 1, 12), (3, 3, 3, 3), (40, 2, 17, 9, 1, 26))
SPREADS: Final = (0.05, 0.4, 1.5)
"""Nats between the policies: next to on-policy, stale, far off."""

RECORD: Final = os.environ.get("OBJECTIVES_RECORD", "")
"""File for a JSON line per comparison."""


@dataclass(frozen=True)
class Rectangle:
    inputs: Inputs

    def padded(self, values: Tensor, *, padding: float = -0.7) -> Tensor:
        parts = torch.split(values, list(self.inputs.lengths))
        full = torch.full((len(parts), self.width), padding, dtype=values.dtype)
        rows = [torch.cat([part, pad[len(part) :]]) for part, pad in zip(parts, full, strict=True)]
        return torch.stack(rows)

    @property
    def width(self) -> int:
        return max(self.inputs.lengths)

    @property
    def mask(self) -> Tensor:
        size = sum(self.inputs.lengths)
        return self.padded(torch.ones(size, dtype=torch.float64), padding=0.0)

    @property
    def scores(self) -> Tensor:
        return self.padded(self.inputs.advantages)[:, 0]


Theirs = Callable[[Rectangle, Tensor], Tensor]
"""Their loss, from the rectangle and the log-probs [N] of the policy that is trained."""


def difference(
    package: str, kind: str, theirs: Theirs, *, spreads: Sequence[float] = SPREADS, **keys: Any
) -> float:
    worst = 0.0
    settings = chosen(kind, **keys)
    assert settings.loss is not None
    for seed, lengths in enumerate(LENGTHS):
        for spread in spreads:
            inputs = random_inputs(seed, lengths, spread=spread, proximal=needs_proximal(settings))
            weights = token_weights(lengths, settings.loss, tokens=settings.loss_tokens)
            spread_weights = torch.tensor(weights, dtype=torch.float64).repeat_interleave(
                torch.tensor(lengths)
            )

            def ours(tensor: Tensor, of: Inputs = inputs, by: Tensor = spread_weights) -> Tensor:
                return (terms_of(replace(of, logprobs=tensor), settings).loss * by).sum()

            def other(tensor: Tensor, of: Inputs = inputs) -> Tensor:
                return theirs(Rectangle(of), tensor)

            worst = max(worst, _difference(ours, other, inputs.logprobs))
    note(package, kind, keys, worst)
    return worst


def note(package: str, what: str, keys: dict[str, Any], worst: float) -> None:
    if RECORD:
        line = {"package": package, "what": what, "keys": keys, "difference": worst}
        with Path(RECORD).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _difference(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], logprobs: Tensor
) -> float:
    results = []
    for loss in (ours, theirs):
        grad = logprobs.detach().clone().requires_grad_()
        value = loss(grad)
        (slope,) = torch.autograd.grad(value, grad)
        results.append(torch.cat([value.detach().reshape(1).double(), slope]))
    return float((results[0] - results[1]).abs().max())
