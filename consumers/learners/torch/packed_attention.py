"""Attention of packed passes: per sequence, or per line under a mask.

A mask costs n x n per line of n tokens. `torch.nn.attention.varlen` avoids it on GPUs in half
precision.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dora_pipe.config.section import ComputeDtype
from dora_pipe.consumers.learners.torch.memory import computed_in
from dora_pipe.core.errors import PolicyError

NAME: Final = "dora_pipe_varlen"

HEAD_MULTIPLE: Final = 8
"""FlashAttention 2 limit: head width multiple."""

HEAD_MAX: Final = 256
"""Largest head width on data center GPUs of compute capability 8.0 and 9.0."""

HEAD_MAX_ELSEWHERE: Final = 192
"""Largest head width with gradients elsewhere."""

_PROBE_TOKENS: Final = 4

APART: Final = 0.01
"""Tolerance of a packed sequence's logits, relative to the effect of seeing others."""

NOISE: Final = 1e-5
"""Absolute tolerance, in addition."""


Kernel = Callable[[Tensor, Tensor, Tensor, "Cuts", float, int], Tensor]
"""Causal attention within sequences, [tokens, heads, width]; keys and values may have fewer heads.
Then scale, and visible tokens back (-1: all).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Sequence bounds of a packed pass, line by line."""

    starts: Tensor  # [sequences + 1] int32; the last is the pass's token count
    longest: int
    """Longest sequence, including its line's padding."""
    kernel: Kernel | None = None


def cuts_of(positions: Tensor, device: str = "cpu") -> Cuts:
    """Return the bounds of positions [lines, width].

    Example: ``cuts_of(tensor([[0, 1, 0], [0, 1, 2]])).starts.tolist() == [0, 2, 3, 6]``
    """
    flat = positions.flatten()
    starts = torch.cat([torch.nonzero(flat == 0).flatten(), torch.tensor([len(flat)])])
    return Cuts(starts=starts.int().to(device), longest=int(starts.diff().max()))


def by_sequences(cuts: Cuts) -> dict[str, Any]:
    """Return the arguments that select attention per sequence, also in recomputation."""
    # Four dimensions: transformers takes it as its final mask.
    return {"packed": cuts, "attention_mask": torch.empty(0, 0, 0, 0)}


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed: Cuts | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers, [rows, heads, tokens, width] to [rows, tokens, heads, width].

    Zero-pads narrow values and odd head widths, which changes no result.
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        given = (module, query, key, value, attention_mask, dropout, scaling)
        output: tuple[Tensor, None] = sdpa_attention_forward(*given, **more)
        return output
    odd = [key for key in ("softcap", "s_aux", "position_bias") if more.get(key) is not None]
    if odd or dropout or more.get("is_causal") is False:
        raise PolicyError(f"attention with {odd[0] if odd else 'dropout, or in both directions'}")
    width, values = query.shape[-1], value.shape[-1]
    full_width = head_width(width, values)
    kind, window = computed_in(query), more.get("sliding_window")
    flat = [states.transpose(1, 2).flatten(0, 1).to(kind) for states in (query, key, value)]
    if (width, values) != (full_width, full_width):
        flat = [pad(states, (0, full_width - states.shape[-1])) for states in flat]
    scale = width**-0.5 if scaling is None else scaling
    back = -1 if window is None else window - 1
    attended = (packed.kernel or varlen)(flat[0], flat[1], flat[2], packed, scale, back)
    return attended[..., :values].reshape(query.shape[0], query.shape[2], -1, values), None


def head_width(width: int, values: int) -> int:
    """Return the padded head width of the kernel."""
    return -(-max(width, values) // HEAD_MULTIPLE) * HEAD_MULTIPLE


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cuts: Cuts, scale: float, window: int
) -> Tensor:
    """Run torch's kernel; deterministic mode sums query gradients in several float32 copies."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 detects grouped heads; later versions need the argument.
    call: Any = varlen_attn
    has_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    more = {"enable_gqa": True} if has_gqa else {}
    both = (cuts.starts, cuts.starts, cuts.longest, cuts.longest)  # queries, keys
    output: Tensor = call(query, key, value, *both, scale=scale, window_size=(window, 0), **more)
    return output


def plain(
    query: Tensor, key: Tensor, value: Tensor, cuts: Cuts, scale: float, window: int
) -> Tensor:
    """Reference `Kernel`, sequence by sequence, for any device and type."""
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for start, end in zip(cuts.starts.tolist()[:-1], cuts.starts.tolist()[1:], strict=True):
        places = torch.arange(end - start, device=query.device)
        back = places[:, None] - places
        visible = (back >= 0) & ((back <= window) | (window < 0))
        own, *of_groups = (states[start:end].transpose(0, 1) for states in (query, key, value))
        keys, values = (states.repeat_interleave(groups, 0) for states in of_groups)
        outputs.append(
            scaled_dot_product_attention(own, keys, values, attn_mask=visible, scale=scale)
        )
    return torch.cat(outputs, 1).transpose(0, 1)


def goes_by_sequences(network: Any, dtype: ComputeDtype, device: str) -> bool:
    """Install `attend` if supported; return whether packed passes use it."""
    if not device.startswith("cuda") or dtype != "bfloat16":
        return False
    capability = torch.cuda.get_device_capability(device)
    width = HEAD_MAX if capability in ((8, 0), (9, 0)) else HEAD_MAX_ELSEWHERE
    return capability >= (8, 0) and set_attention(network, width)


def set_attention(network: Any, width: int = HEAD_MAX) -> bool:
    """Install `attend` if heads fit and a probe shows isolated sequences; return whether it did."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if not (network._supports_attention_backend and network._supports_flash_attn):
        return False
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = network.config._attn_implementation
    network.set_attn_implementation(NAME)
    device = next(network.parameters()).device

    def narrow(query: Tensor, *given: Any) -> Tensor:
        if query.shape[-1] > width:
            raise PolicyError(f"heads of {query.shape[-1]}")
        return plain(query, *given)

    packed = by_sequences(replace(cuts_of(_probe_positions()), kernel=narrow))
    try:
        if not _sees_others(network, device, packed):
            return True
    except (PolicyError, TypeError, RuntimeError):  # unsupported arguments
        pass
    network.set_attn_implementation(before)
    return False


def need_apart(network: Any, device: str) -> None:
    """Raise PolicyError if sequences of one line see each other."""
    if _sees_others(network, torch.device(device), {}):
        raise PolicyError(
            "this model mixes the sequences of a packed row",
            hint="trainer.packing = false, --no-packing",
        )


def _probe_positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in (_PROBE_TOKENS, 2 * _PROBE_TOKENS)])


def _sees_others(network: Any, device: torch.device, packed: Mapping[str, Any]) -> bool:
    ids = torch.arange(3 * _PROBE_TOKENS, device=device).reshape(1, -1) % network.config.vocab_size
    second = ids[:, _PROBE_TOKENS:]
    given = {"position_ids": _probe_positions().reshape(1, -1).to(device), **packed}
    with torch.no_grad():
        alone = network(input_ids=second, use_cache=False).logits
        logits = [
            network(input_ids=ids, use_cache=False, **options).logits for options in (given, {})
        ]
    apart, leaked = ((scores[:, _PROBE_TOKENS:] - alone).abs().max() for scores in logits)
    return bool(apart > APART * leaked + NOISE)
