"""Builds and probes the network of a config.json."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from dora_pipe.consumers.learners.torch.chunked_layers import chunk_layers
from dora_pipe.consumers.learners.torch.memory import (
    AT_ONCE,
    MemoryOptions,
    UnassignedRows,
    checkpoint_layers,
)
from dora_pipe.consumers.learners.torch.narrow_weights import NarrowWeights
from dora_pipe.core.errors import PolicyError
from dora_pipe.store.model_dir import unassigned_ids

GROUPED: Final = "grouped_mm"
"""transformers' default implementation of experts: one grouped product."""
GROUPED_IN_AUTOCAST: Final = "grouped_mm_in_autocast"
_PROBE_TOKENS: Final = 4


class SharedMemory:
    """Memory shared by equal-shaped parameters of all layers during probing, to hold one layer at
    most.

    Storages over it are separate, because file names are found by storage.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Tensor] = {}
        self._made: set[int] = set()

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Share parameters created meanwhile; one thread builds one network at a time."""
        handle = register_module_parameter_registration_hook(self._share)
        try:
            yield
        finally:
            handle.remove()

    def _share(self, module: Any, name: str, parameter: Any) -> Any:
        if parameter is None or id(parameter) in self._made:
            return None  # a tied parameter stays unchanged
        key = type(module), name, parameter.shape, parameter.dtype
        is_held = key in self._held
        held = self._held.setdefault(key, parameter.detach())
        memory = held.reshape(-1).view(torch.uint8).numpy()
        shared = torch.from_numpy(memory).view(held.dtype).reshape(held.shape)
        tied = torch.nn.Parameter(shared, parameter.requires_grad)
        tied._is_hf_initialized = is_held  # type: ignore[attr-defined]  # transformers' own word
        self._made.add(id(tied))
        return tied


def build(
    assets: Path,
    memory: MemoryOptions = AT_ONCE,
    narrow: NarrowWeights | None = None,
    shared: SharedMemory | None = None,
) -> Any:
    """Build a network with arbitrary weights, optionally `shared`. Raises PolicyError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    try:
        config = AutoConfig.from_pretrained(assets, local_files_only=True)
        with ExitStack() as making:
            for weights in (narrow, shared):
                if weights is not None:
                    making.enter_context(weights.registered())
            network = make(config, dtype=torch.float32, attn_implementation="sdpa")
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        raise PolicyError(f"cannot build a causal LM from {assets}: {_line(error)}") from error
    network.eval()
    network.unassigned = UnassignedRows(unassigned_ids(assets), network.config.vocab_size)
    if narrow is not None:
        narrow.widen(network)
    _compute_experts_in_autocast(network)
    chunk_layers(network, memory)
    if memory.gradient_checkpointing:
        checkpoint_layers(network, offload=memory.activation_offload)
    return network


def _compute_experts_in_autocast(network: Any) -> None:
    """torch's autocast does not cover grouped expert products."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if getattr(network.config, "_experts_implementation", None) != GROUPED:
        return
    ALL_EXPERTS_FUNCTIONS.register(GROUPED_IN_AUTOCAST, _experts_in_autocast)
    network.set_experts_implementation(GROUPED_IN_AUTOCAST)


def _experts_in_autocast(experts: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward as forward

    if not torch.is_autocast_enabled(hidden.device.type):
        output: Tensor = forward(experts, hidden, *routing)
        return output
    narrow = torch.get_autocast_dtype(hidden.device.type)
    narrowed: Any = _Narrowed(experts, narrow)
    return forward(narrowed, hidden.to(narrow), *routing).to(hidden.dtype)


class _Narrowed:
    """Proxy of a module that converts its matrices on access."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        matrix = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if matrix else value


def head_is_all(network: Any, device: str) -> bool:
    """Return whether logits are exactly the head on the last hidden states."""
    head = network.get_output_embeddings()
    if head is None or network.base_model is network:
        return False
    ids = torch.arange(_PROBE_TOKENS, device=device).reshape(1, -1) % network.config.vocab_size
    with torch.no_grad():
        logits = network(input_ids=ids, use_cache=False).logits
        lean = head(network.base_model(input_ids=ids, use_cache=False)[0])
    return torch.equal(logits, lean)


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
