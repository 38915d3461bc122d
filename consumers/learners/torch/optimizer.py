"""AdamW and Muon with a state that can be written to a safetensors file and taken back bit for bit.

It decides nothing but the names in that file: `steps`, and per parameter `exp_avg/<name>` and
`exp_avg_sq/<name>`, or `momentum_buffer/<name>` where Muon updates it; `remainder/<name>` (int16)
where it is published in bfloat16 (`masters`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from dora_pipe.config.section import WeightDecayExclude
from dora_pipe.consumers.learners.torch.masters import Masters
from dora_pipe.consumers.learners.torch.model import read_tensor, tensor_source
from dora_pipe.core.errors import PolicyError
from dora_pipe.store.safetensors_file import TensorSource, mapped, read_entries, write_tensors

STEPS: Final = "steps"
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS: Final = ("momentum_buffer",)
MUON_MOMENTUM: Final = 0.95
"""As Keller Jordan has it (https://kellerjordan.github.io/posts/muon/), with Nesterov's."""

MUON_SCALE: Final = "match_rms_adamw"
"""Updates as long as AdamW's, so that its learning rates hold (arXiv 2502.16982, section 2.2)."""

REMAINDER: Final = "remainder"


def decay_groups(
    parameters: Sequence[Tensor], weight_decay: float, exclude: WeightDecayExclude
) -> list[dict[str, Any]]:
    """An optimizer's groups of parameters: those that decay, and vectors apart where they do not.

    One group wherever one will do: that is how older optimizers were made, to their bits.
    """
    apart = weight_decay > 0 and exclude == "vectors"
    kept = [one for one in parameters if apart and one.ndim <= 1]
    decaying = [one for one in parameters if not apart or one.ndim > 1]
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [one for one in groups if one["params"]]


@dataclass(slots=True)
class KeptState:
    """A copy of what updates change: three times the size of what is trained."""

    weights: list[Tensor]
    remainders: list[Tensor]
    """Of the masters, where what is published is not float32."""
    moments: list[dict[str, Tensor]]
    """By parameter; empty before the first update."""


class Optimizer:
    """AdamW over named parameters, Muon over some of them; gradients are clipped by their global
    norm."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        exclude: WeightDecayExclude = "none",
        bfloat16: Collection[str] = (),
        muon: Collection[str] = (),
    ) -> None:
        """`bfloat16` names the parameters whose values are to be bfloat16 between updates, `muon`
        the matrices, not all of the parameters, that Muon updates."""
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        others = [one for name, one in parameters if name not in muon]
        matrices = [one for name, one in parameters if name in muon]
        groups = decay_groups(others, weight_decay, exclude)
        adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas)
        self._optimizers: list[torch.optim.Optimizer] = [adamw]
        if matrices:
            groups = decay_groups(matrices, weight_decay, exclude)
            self._optimizers.append(
                torch.optim.Muon(groups, lr=0.0, momentum=MUON_MOMENTUM, adjust_lr_fn=MUON_SCALE)
            )
        self._owners = [self._optimizers[name in muon] for name in self._names]
        self._masters = Masters({name: one for name, one in parameters if name in bfloat16})

    def clear(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def divide(self, divisor: float) -> None:
        """Divide the gradients."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)

    def gradient_norm(self, norm_max: float) -> float:
        """Clip the gradients to `norm_max`; returns their norm before. May not be finite."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, norm_max)
        return float(norm)

    def update(self, learning_rate: float) -> None:
        """One update from the gradients that are there."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        with self._masters.present():
            for optimizer in self._optimizers:
                optimizer.step()

    def kept(self) -> KeptState:
        """A copy of weights and state."""
        return KeptState(
            weights=[one.detach().clone() for one in self._parameters],
            remainders=self._masters.kept(),
            moments=[
                {name: value.clone() for name, value in owner.state.get(one, {}).items()}
                for one, owner in zip(self._parameters, self._owners, strict=True)
            ],
        )

    def go_back(self, kept: KeptState) -> None:
        """Be as the copy is, which is used up."""
        self.clear()
        self._forget()
        self._masters.go_back(kept.remainders)
        for one, weights in zip(self._parameters, kept.weights, strict=True):
            one.data.copy_(weights)
        for one, owner, state in zip(self._parameters, self._owners, kept.moments, strict=True):
            if state:
                owner.state[one] = state

    @contextmanager
    def at(self, kept: KeptState) -> Iterator[None]:
        """With the weights of the copy in place of the present ones."""
        present = [one.data for one in self._parameters]
        for one, weights in zip(self._parameters, kept.weights, strict=True):
            one.data = weights
        try:
            yield
        finally:
            for one, weights in zip(self._parameters, present, strict=True):
                one.data = weights

    def save(self, path: Path) -> None:
        """Write the state to a safetensors file. Raises OSError."""
        write_tensors(path, self._sources())

    def load(self, path: Path) -> None:
        """Take the state of a file. Raises PolicyError if it is not of these parameters."""
        entries = {entry.name: entry for entry in read_entries(path)}
        named = list(zip(self._names, self._owners, strict=True))
        wanted = {f"{moment}/{name}" for name, owner in named for moment in _moments(owner)}
        wanted |= {f"{REMAINDER}/{name}" for name in self._masters.remainders}
        if entries.keys() not in ({STEPS}, {STEPS} | wanted):
            raise PolicyError(f"{path} is not the optimizer state of this model")
        with mapped(path) as data:
            tensors = {name: read_tensor(data, entry) for name, entry in entries.items()}
        steps = tensors.pop(STEPS)
        self._forget()
        if not tensors:
            return
        for (name, owner), parameter in zip(named, self._parameters, strict=True):
            adamw = owner is self._optimizers[0]
            state: dict[str, Tensor] = {"step": steps.to(torch.float32).clone()} if adamw else {}
            for moment in _moments(owner):
                value = tensors[f"{moment}/{name}"]
                if value.shape != parameter.shape:
                    raise PolicyError(f"{path}: {moment} of {name!r} has shape {value.shape}")
                state[moment] = value.to(parameter.device)
            owner.state[parameter] = state
        for name, held in self._masters.remainders.items():
            value = tensors[f"{REMAINDER}/{name}"]
            if (value.shape, value.dtype) != (held.shape, held.dtype):
                raise PolicyError(f"{path}: the remainder of {name!r} is none")
            self._masters.take(name, value)

    def _forget(self) -> None:
        """Be as before the first update."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _sources(self) -> list[TensorSource]:
        steps, moments = 0, 0
        sources: list[TensorSource] = []
        named = zip(self._names, self._parameters, self._owners, strict=True)
        for name, parameter, owner in named:
            moments += len(_moments(owner))
            state = owner.state.get(parameter)
            if not state:
                continue
            steps = int(state.get("step", steps))
            sources += [tensor_source(f"{one}/{name}", state[one]) for one in _moments(owner)]
        assert len(sources) in (0, moments)
        if sources:
            beyond = self._masters.remainders.items()
            sources += [tensor_source(f"{REMAINDER}/{name}", one) for name, one in beyond]
        return [tensor_source(STEPS, torch.tensor(steps, dtype=torch.int64)), *sources]


def _moments(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """What a parameter of it has in a checkpoint."""
    return MUON_MOMENTS if isinstance(optimizer, torch.optim.Muon) else MOMENTS
