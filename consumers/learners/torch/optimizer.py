"""Optimizers with state in safetensors.

Tensors: `steps`, `exp_avg/<name>`, `exp_avg_sq/<name>` or those of `named_optimizers`, int16
`remainder/<name>` (`masters`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from dora_pipe.config.section import OptimizerName
from dora_pipe.consumers.learners.torch.masters import Masters
from dora_pipe.consumers.learners.torch.model import read_tensor, tensor_source
from dora_pipe.consumers.learners.torch.named_optimizers import make_optimizer, moments_of, state_of
from dora_pipe.core.errors import PolicyError
from dora_pipe.store.safetensors_file import TensorSource, mapped, read_entries, write_tensors

STEPS: Final = "steps"
REMAINDER: Final = "remainder"


def decay_groups(parameters: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into groups: decaying ones, and vectors without decay."""
    apart = weight_decay > 0
    kept = [parameter for parameter in parameters if apart and parameter.ndim <= 1]
    decaying = [parameter for parameter in parameters if not apart or parameter.ndim > 1]
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@dataclass(slots=True)
class KeptState:
    """Copy of trained state: three times the weights."""

    weights: list[Tensor]
    remainders: list[Tensor]
    moments: list[dict[str, Any]]


class Optimizer:
    """AdamW, with another optimizer over some parameters; clips by the global norm."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        bfloat16: Collection[str] = (),
        other: OptimizerName = "adamw",
        other_names: Collection[str] = (),
    ) -> None:
        """`bfloat16` names parameters with masters, `other_names` those that `other` updates."""
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._kinds = [other if name in other_names else "adamw" for name in self._names]
        self._made: dict[OptimizerName, Any] = {}
        for kind in dict.fromkeys(("adamw", *self._kinds)):
            own = [
                parameter
                for parameter, of in zip(self._parameters, self._kinds, strict=True)
                if of == kind
            ]
            groups = decay_groups(own, weight_decay)
            self._made[kind] = make_optimizer(kind, groups, betas)
        self._masters = Masters(
            {name: parameter for name, parameter in parameters if name in bfloat16}
        )

    def clear(self) -> None:
        """Drop the gradients."""
        for optimizer in self._made.values():
            optimizer.zero_grad(set_to_none=True)

    def divide(self, divisor: float) -> None:
        """Divide the gradients."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)

    def gradient_norm(self, norm_max: float) -> float:
        """Clip the gradients; return their norm before, possibly not finite."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, norm_max)
        return float(norm)

    def update(self, learning_rate: float) -> None:
        """Update once from the present gradients."""
        for optimizer in self._made.values():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        with self._masters.present():
            for optimizer in self._made.values():
                optimizer.step()

    def held(self) -> list[Any]:
        """Return all state besides the parameters."""
        states = [state for optimizer in self._made.values() for state in optimizer.state.values()]
        return [*states, self._masters.remainders]

    def kept(self) -> KeptState:
        """Return a copy of weights and state."""
        return KeptState(
            weights=[parameter.detach().clone() for parameter in self._parameters],
            remainders=self._masters.kept(),
            moments=[
                {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in self._made[kind].state.get(parameter, {}).items()
                }
                for parameter, kind in zip(self._parameters, self._kinds, strict=True)
            ],
        )

    def restore_copy(self, kept: KeptState) -> None:
        """Restore the copy, consuming it."""
        self.clear()
        self._forget()
        self._masters.restore_copy(kept.remainders)
        for parameter, weights in zip(self._parameters, kept.weights, strict=True):
            parameter.data.copy_(weights)
        for parameter, kind, state in zip(self._parameters, self._kinds, kept.moments, strict=True):
            if state:
                self._made[kind].state[parameter] = state

    @contextmanager
    def at(self, kept: KeptState) -> Iterator[None]:
        """Use the copy's weights temporarily."""
        present = [parameter.data for parameter in self._parameters]
        for parameter, weights in zip(self._parameters, kept.weights, strict=True):
            parameter.data = weights
        try:
            yield
        finally:
            for parameter, weights in zip(self._parameters, present, strict=True):
                parameter.data = weights

    def save(self, path: Path) -> None:
        """Write the state to a safetensors file. Raises OSError."""
        write_tensors(path, self._sources())

    def load(self, path: Path) -> None:
        """Load a state file. Raises PolicyError if it has other parameters."""
        entries = {entry.name: entry for entry in read_entries(path)}
        named = list(zip(self._names, self._parameters, self._kinds, strict=True))
        expected = {
            f"{moment}/{name}"
            for name, parameter, kind in named
            for moment in moments_of(kind, parameter)
        }
        expected |= {f"{REMAINDER}/{name}" for name in self._masters.remainders}
        if entries.keys() not in ({STEPS}, {STEPS} | expected):
            raise PolicyError(f"{path} is not the optimizer state of this model")
        with mapped(path) as data:
            tensors = {name: read_tensor(data, entry) for name, entry in entries.items()}
        steps = tensors.pop(STEPS)
        self._forget()
        if not tensors:
            return
        for name, parameter, kind in named:
            moments: dict[str, Tensor] = {}
            for moment, shape in moments_of(kind, parameter).items():
                value = tensors[f"{moment}/{name}"]
                if value.shape != shape:
                    raise PolicyError(f"{path}: {moment} of {name!r} has shape {value.shape}")
                moments[moment] = value.to(parameter.device)
            optimizer = self._made[kind]
            optimizer.state[parameter] = state_of(kind, optimizer, moments, int(steps))
        for name, held in self._masters.remainders.items():
            value = tensors[f"{REMAINDER}/{name}"]
            if (value.shape, value.dtype) != (held.shape, held.dtype):
                raise PolicyError(f"{path}: the remainder of {name!r} is invalid")
            held.copy_(value)
        self._masters.fit()

    def _forget(self) -> None:
        for optimizer in self._made.values():
            optimizer.state.clear()

    def _sources(self) -> list[TensorSource]:
        steps, moments = 0, 0
        sources: list[TensorSource] = []
        named = zip(self._names, self._parameters, self._kinds, strict=True)
        for name, parameter, kind in named:
            own = moments_of(kind, parameter)
            moments += len(own)
            state = self._made[kind].state.get(parameter)
            if not state:
                continue
            steps = int(state.get("step", steps))
            sources += [tensor_source(f"{moment}/{name}", state[moment]) for moment in own]
        assert len(sources) in (0, moments)
        if sources:
            beyond = self._masters.remainders.items()
            sources += [
                tensor_source(f"{REMAINDER}/{name}", remainder) for name, remainder in beyond
            ]
        return [tensor_source(STEPS, torch.tensor(steps, dtype=torch.int64)), *sources]
