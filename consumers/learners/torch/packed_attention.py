"""Attention of a packed pass: each sequence by itself, or a line at once under a mask.

Under a mask (transformers' way, by positions) a line of n tokens takes n x n of everything, and
most of it is masked. torch's kernel for sequences of several lengths
(`torch.nn.attention.varlen`) takes where they begin; a GPU has it, in half precision.
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
"""Under which transformers has `attend`."""

HEAD_MULTIPLE: Final = 8
"""FlashAttention 2 wants heads of a multiple of so many numbers ..."""

HEAD_MAX: Final = 256
"""... and at most this, on data centres' cards of its time ..."""

HEAD_MAX_ELSEWHERE: Final = 192
"""... or, for gradients, this."""

_PROBE_TOKENS: Final = 4

APART: Final = 0.01
"""Logits of a sequence behind another one in its line may differ by so much of what they do where
it sees that: sums in another order, no more ..."""

NOISE: Final = 1e-5
"""... and by this."""


Kernel = Callable[[Tensor, Tensor, Tensor, "Cuts", float, int], Tensor]
"""Causal attention within each sequence of a pass, [tokens, heads, width], of queries, keys and
values, which may have fewer heads; with a scale, and how many tokens back one sees, -1 for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Where the sequences of a packed pass begin, its lines one after the other."""

    starts: Tensor  # [sequences + 1] int32; the last is the tokens of the pass
    longest: int
    """Tokens of the longest sequence, with what pads its line."""
    kernel: Kernel | None = None
    """None: torch's."""


def cuts_of(positions: Tensor, device: str = "cpu") -> Cuts:
    """Of the positions [lines, width] of tokens in their sequences, which lie on a CPU.

    Example: ``cuts_of(tensor([[0, 1, 0], [0, 1, 2]])).starts.tolist() == [0, 2, 3, 6]``
    """
    flat = positions.flatten()
    starts = torch.cat([torch.nonzero(flat == 0).flatten(), torch.tensor([len(flat)])])
    return Cuts(starts=starts.int().to(device), longest=int(starts.diff().max()))


def by_sequences(cuts: Cuts) -> dict[str, Any]:
    """What a network is given beside ids and positions, that its attention goes by these; layers
    that are computed again are given it again."""
    # Of four dimensions, so transformers takes it for the mask that it would make.
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
    """Attention as transformers asks for it, [rows, heads, tokens, width] to [rows, tokens, heads,
    width]: by sequences where the pass says which there are, else as torch does it.

    Narrower values, and heads of odd widths, are filled up with zeros, which changes no number.
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        given = (module, query, key, value, attention_mask, dropout, scaling)
        found: tuple[Tensor, None] = sdpa_attention_forward(*given, **more)
        return found
    odd = [key for key in ("softcap", "s_aux", "position_bias") if more.get(key) is not None]
    if odd or dropout or more.get("is_causal") is False:
        raise PolicyError(f"attention with {odd[0] if odd else 'dropout, or in both directions'}")
    width, values = query.shape[-1], value.shape[-1]
    whole = head_width(width, values)
    kind, window = computed_in(query), more.get("sliding_window")
    flat = [one.transpose(1, 2).flatten(0, 1).to(kind) for one in (query, key, value)]
    if (width, values) != (whole, whole):
        flat = [pad(one, (0, whole - one.shape[-1])) for one in flat]
    scale = width**-0.5 if scaling is None else scaling
    back = -1 if window is None else window - 1
    made = (packed.kernel or varlen)(flat[0], flat[1], flat[2], packed, scale, back)
    return made[..., :values].reshape(query.shape[0], query.shape[2], -1, values), None


def head_width(width: int, values: int) -> int:
    """Numbers of a head as the kernel is given it."""
    return -(-max(width, values) // HEAD_MULTIPLE) * HEAD_MULTIPLE


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cuts: Cuts, scale: float, window: int
) -> Tensor:
    """torch's kernel (a `Kernel`), deterministic where torch is told to be: then gradients by
    queries are added up in several float32 copies, one after the other."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 looks at the heads by itself, later ones want to be told.
    call: Any = varlen_attn
    told = "enable_gqa" in inspect.signature(varlen_attn).parameters
    more = {"enable_gqa": True} if told else {}
    both = (cuts.starts, cuts.starts, cuts.longest, cuts.longest)  # Of queries and of keys.
    found: Tensor = call(query, key, value, *both, scale=scale, window_size=(window, 0), **more)
    return found


def plain(
    query: Tensor, key: Tensor, value: Tensor, cuts: Cuts, scale: float, window: int
) -> Tensor:
    """The same (a `Kernel`) sequence after sequence, on any device and in any type."""
    groups = query.shape[1] // key.shape[1]
    found = []
    for start, end in zip(cuts.starts.tolist()[:-1], cuts.starts.tolist()[1:], strict=True):
        places = torch.arange(end - start, device=query.device)
        back = places[:, None] - places
        seen = (back >= 0) & ((back <= window) | (window < 0))
        own, *of_groups = (one[start:end].transpose(0, 1) for one in (query, key, value))
        keys, values = (one.repeat_interleave(groups, 0) for one in of_groups)
        found.append(scaled_dot_product_attention(own, keys, values, attn_mask=seen, scale=scale))
    return torch.cat(found, 1).transpose(0, 1)


def goes_by_sequences(network: Any, dtype: ComputeDtype, device: str) -> bool:
    """Whether packed passes of a network can go by sequences; its attention is `attend` then."""
    if not device.startswith("cuda") or dtype != "bfloat16":
        return False
    capability = torch.cuda.get_device_capability(device)
    width = HEAD_MAX if capability in ((8, 0), (9, 0)) else HEAD_MAX_ELSEWHERE
    return capability >= (8, 0) and set_attention(network, width)


def set_attention(network: Any, width: int = HEAD_MAX) -> bool:
    """Have `attend` compute a network's attention, where heads are at most so wide and it makes of
    sequences in a line what it makes of each alone; whether it does."""
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
    except (PolicyError, TypeError, RuntimeError):  # It, or what it calls, takes no such words.
        pass
    network.set_attn_implementation(before)
    return False


def need_apart(network: Any, device: str) -> None:
    """Raise PolicyError for a network in which sequences of one line see each other."""
    if _sees_others(network, torch.device(device), {}):
        raise PolicyError(
            "this model lets the sequences of a packed line see each other",
            hint="trainer.packing = false, --no-packing",
        )


def _probe_positions() -> Tensor:
    return torch.cat([torch.arange(one) for one in (_PROBE_TOKENS, 2 * _PROBE_TOKENS)])


def _sees_others(network: Any, device: torch.device, packed: Mapping[str, Any]) -> bool:
    """Whether a sequence is something else behind another one in its line."""
    ids = torch.arange(3 * _PROBE_TOKENS, device=device).reshape(1, -1) % network.config.vocab_size
    second = ids[:, _PROBE_TOKENS:]
    given = {"position_ids": _probe_positions().reshape(1, -1).to(device), **packed}
    with torch.no_grad():
        alone = network(input_ids=second, use_cache=False).logits
        found = [network(input_ids=ids, use_cache=False, **one).logits for one in (given, {})]
    apart, seen = ((one[:, _PROBE_TOKENS:] - alone).abs().max() for one in found)
    return bool(apart > APART * seen + NOISE)
