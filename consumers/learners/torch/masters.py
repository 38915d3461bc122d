"""Float32 masters of parameters published in bfloat16.

Passes use published values, as the sampler does; the optimizer needs masters, since most updates
are below half a unit in bfloat16's last place. A parameter holds the published value; an int16
remainder, the difference of bit patterns, costs two bytes, also in checkpoints.

A master halfway between two values that rounds down has remainder 32,768, one too many for int16:
it moves down by one float32 unit. Truncation would always fit but biases weights toward 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

REMAINDER_MAX: Final = 2**15 - 1


class Masters:
    """Int16 remainders of named float32 parameters."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self.remainders: dict[str, Tensor] = {
            name: torch.zeros_like(parameter, dtype=torch.int16)
            for name, parameter in parameters.items()
        }

    @contextmanager
    def present(self) -> Iterator[None]:
        """Replace published values by masters; on exit publish the changed masters."""
        for name, parameter in self._parameters.items():
            _bits(parameter).add_(self.remainders[name])
        yield
        for name, parameter in self._parameters.items():
            self.remainders[name].copy_(_round(parameter))

    def kept(self) -> list[Tensor]:
        return [remainder.clone() for remainder in self.remainders.values()]

    def restore_copy(self, kept: Sequence[Tensor]) -> None:
        """Restore remainders; the caller restores values."""
        for remainder, before in zip(self.remainders.values(), kept, strict=True):
            remainder.copy_(before)

    def fit(self) -> None:
        """Zero remainders that do not match their values (a checkpoint of other weights)."""
        for name, parameter in self._parameters.items():
            master = parameter.detach().clone()
            _bits(master).add_(self.remainders[name])
            _round(master)
            self.remainders[name].mul_(_bits(master) == _bits(parameter))


def _bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns, int32, as a view."""
    return tensor.detach().view(torch.int32)


def _round(tensor: Tensor) -> Tensor:
    rounded = tensor.detach().to(torch.bfloat16).to(torch.float32)
    beyond = _bits(tensor) - _bits(rounded)
    tensor.detach().copy_(rounded)
    return beyond.clamp_(max=REMAINDER_MAX).to(torch.int16)
