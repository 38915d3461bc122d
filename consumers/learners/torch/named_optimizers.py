"""Optimizers of `trainer.optimizer`; AdamW takes the remaining parameters.

DeepSpeed's own Muon differs in bits and checkpoint, so `muon` is rejected there.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any, Final

import torch
from torch import Tensor

from dora_pipe.config.section import OptimizerName

MUON_MOMENTUM: Final = 0.95
"""Keller Jordan (https://kellerjordan.github.io/posts/muon/), with Nesterov momentum."""

MUON_SCALE: Final = "match_rms_adamw"
"""Matches AdamW's RMS, so learning rates carry over (arXiv 2502.16982, section 2.2)."""

EIGHT_BITS_LIBRARY: Final = "bitsandbytes"
EIGHT_BITS_NUMBERS_MIN: Final = 4096
"""Smallest parameter with 8-bit moments, as in the library."""
EIGHT_BITS_BLOCK: Final = 256
"""Values per scale, as in the library."""

MOMENTS: Final = ("exp_avg", "exp_avg_sq")

_MOMENTS: Final[dict[OptimizerName, tuple[str, ...]]] = {
    "adamw": MOMENTS,
    "muon": ("momentum_buffer",),
    "adamw8bit": ("state1", "absmax1", "state2", "absmax2"),
}


def parameters_of(optimizer: OptimizerName, network: Any, named: dict[str, Tensor]) -> list[str]:
    """Return the names of the parameters that this optimizer updates."""
    modules = network.modules()
    tables = {id(module.weight) for module in modules if isinstance(module, torch.nn.Embedding)}
    if optimizer == "adamw8bit":
        large = [
            name for name, parameter in named.items() if parameter.numel() >= EIGHT_BITS_NUMBERS_MIN
        ]
        return [name for name in large if id(named[name]) not in tables]
    if optimizer == "muon":
        head = network.get_output_embeddings()
        ends = tables | ({id(head.weight)} if head is not None else set())
        matrices = [name for name, parameter in named.items() if parameter.ndim == 2]
        return [name for name in matrices if id(named[name]) not in ends]
    return []


def make_optimizer(
    optimizer: OptimizerName, groups: list[dict[str, Any]], betas: tuple[float, float]
) -> Any:
    """Return an optimizer over these groups, at rate 0."""
    if optimizer == "muon":
        return torch.optim.Muon(groups, lr=0.0, momentum=MUON_MOMENTUM, adjust_lr_fn=MUON_SCALE)
    if optimizer == "adamw8bit":
        library: Any = importlib.import_module(f"{EIGHT_BITS_LIBRARY}.optim")
        return library.AdamW8bit(groups, lr=0.0, betas=betas, min_8bit_size=EIGHT_BITS_NUMBERS_MIN)
    # No foreach: its temporaries take as much memory as the weights.
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, foreach=False)


def moments_of(optimizer: OptimizerName, parameter: Tensor) -> dict[str, torch.Size]:
    """Return names and shapes of a parameter's checkpoint tensors."""
    blocks = -(-parameter.numel() // EIGHT_BITS_BLOCK)
    return {
        moment: torch.Size([blocks]) if moment.startswith("absmax") else parameter.shape
        for moment in _MOMENTS[optimizer]
    }


def state_of(
    optimizer: OptimizerName, optimizer_: Any, moments: dict[str, Tensor], steps: int
) -> dict[str, Any]:
    """Return the optimizer's state of a parameter after `steps` updates."""
    if optimizer == "muon":
        return dict(moments)
    if optimizer == "adamw":
        return {"step": torch.tensor(steps, dtype=torch.float32), **moments}
    if "dynamic" not in optimizer_.name2qmap:
        optimizer_.fill_qmap()
    device = moments["state1"].device
    tables = {
        "qmap1": optimizer_.name2qmap["dynamic"].to(device),
        "qmap2": optimizer_.name2qmap["udynamic"].to(device),
    }
    return {"step": steps, **tables, **moments}


def optimizer_numerics(optimizer: OptimizerName) -> dict[str, str]:
    if optimizer == "adamw":
        return {}
    if optimizer == "muon":
        return {"optimizer": optimizer}
    return {"optimizer": f"{optimizer} of {EIGHT_BITS_LIBRARY} {version(EIGHT_BITS_LIBRARY)}"}
