"""Rotary rotations per position, in float32."""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F

from dora_pipe.producers.engines.torch.causal_lm import CausalLM
from dora_pipe.producers.engines.torch.rope import Rope

YARN_LEAST: Final = 0.001
"""Minimum width of the blend."""


def rotations(model: CausalLM, context_tokens: int) -> torch.Tensor:
    """Return complex64 [context_tokens, head_dim / 2]; with latent attention only rotary
    dimensions."""
    positions = torch.arange(context_tokens, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(model.rope, model.turned))
    still = (0, 0 if model.latent else (model.head_dim - model.turned) // 2)
    cos, sin = angles.cos() * model.rope.stretch, angles.sin() * model.rope.stretch
    return torch.complex(F.pad(cos, still, value=1.0), F.pad(sin, still))


def _frequencies(rope: Rope, turned: int) -> torch.Tensor:
    """Return radians per position; operations ordered as in transformers."""
    exponents = torch.arange(0, turned, 2, dtype=torch.float32) / turned
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "yarn":
        return _yarn(rope, turned)
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_tokens / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    # Long waves are stretched, short ones kept, those between blended.
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(rope: Rope, turned: int) -> torch.Tensor:
    """Return yarn's frequencies (arXiv 2309.00071, section 3.2)."""

    def pair_of(turns: float) -> float:
        return (turned * math.log(rope.original_tokens / (turns * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = pair_of(rope.fast), pair_of(rope.slow)
    if rope.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turned - 1)
    waves = rope.theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    pairs = torch.arange(turned // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low or YARN_LEAST)).clamp(0, 1)
    return 1.0 / (rope.factor * waves) * (1 - kept) + 1.0 / waves * kept
