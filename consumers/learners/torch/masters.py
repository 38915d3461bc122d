"""The float32 masters of parameters that are published in bfloat16; decides how they are held.

A pass computes with what is published, so that log-probs of trainer and sampler are of the same
weights; the optimizer changes float32 numbers, since most of its steps are smaller than half a unit
of bfloat16's last place. Both need no second copy: a parameter holds the published value, and what
the master has beyond it is a remainder of sixteen bits, the difference of the two bit patterns. So
a master costs two bytes a parameter beside the value, and a checkpoint as much.

A master that lies in the middle between two values and is rounded down has a remainder of 32 768,
one more than sixteen bits hold: it moves down by one unit of float32's last place, always.
Truncation would always fit, but it moves every weight toward 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

REMAINDER_MAX: Final = 2**15 - 1


class Masters:
    """The remainders of named parameters (float32), each int16 of the parameter's shape.

    Example: ``with Masters({"lm_head.weight": parameter}).present(): adamw.step()``
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """The parameters' values are the masters, until there are others."""
        self._parameters = dict(parameters)
        self.remainders: dict[str, Tensor] = {
            name: torch.zeros_like(one, dtype=torch.int16) for name, one in parameters.items()
        }

    @contextmanager
    def present(self) -> Iterator[None]:
        """With the masters in place of the published values, which are then those of the masters as
        they are left."""
        for name, one in self._parameters.items():
            _bits(one).add_(self.remainders[name])
        yield
        for name, one in self._parameters.items():
            self.remainders[name].copy_(_round(one))

    def kept(self) -> list[Tensor]:
        """A copy of the remainders."""
        return [one.clone() for one in self.remainders.values()]

    def go_back(self, kept: Sequence[Tensor]) -> None:
        """Have the remainders of a copy; the values are put back by whoever copied them."""
        for one, before in zip(self.remainders.values(), kept, strict=True):
            one.copy_(before)

    def fit(self) -> None:
        """Let go of remainders that were taken from a checkpoint of other weights: where a value
        with its remainder is no master of that value."""
        for name, one in self._parameters.items():
            master = one.detach().clone()
            _bits(master).add_(self.remainders[name])
            _round(master)
            self.remainders[name].mul_(_bits(master) == _bits(one))


def _bits(tensor: Tensor) -> Tensor:
    """The numbers' bit patterns, int32, in place."""
    return tensor.detach().view(torch.int32)


def _round(tensor: Tensor) -> Tensor:
    """Round float32 numbers to bfloat16 in place, to nearest, ties to even; what was beyond."""
    rounded = tensor.detach().to(torch.bfloat16).to(torch.float32)
    beyond = _bits(tensor) - _bits(rounded)
    tensor.detach().copy_(rounded)
    return beyond.clamp_(max=REMAINDER_MAX).to(torch.int16)
