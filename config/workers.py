"""Sections of rollout workers and their engines."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dora_pipe.config.section import NonNegative, NonNegativeFloat, Positive, Section


class Vllm(Section, frozen=True, kw_only=True):
    """The vLLM engine (docs/engines.md)."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and computation in the engine."""
    enforce_eager: bool = True
    """Disable compiled graphs and CUDA graphs: a faster start, slower generation on a GPU."""
    kv_cache_gb: NonNegativeFloat = 0.0
    """GiB of KV cache per worker; 0: enough for max_num_seqs full sequences."""
    tensor_parallel_size: Positive = 1
    """GPUs of one worker that share every layer; must divide the model's attention heads."""
    pipeline_parallel_size: Positive = 1
    """Pipeline stages of one worker, each with `tensor_parallel_size` GPUs. KV caches cannot move
    with more than one."""
    addresses: tuple[str, ...] = ()
    """http://HOST:PORT of running servers for w0, w1, ...; a worker without one starts its own.
    VLLM_API_KEY holds the key."""

    args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Other vLLM options, such as `max_num_batched_tokens = 8192`; part of the engine version that
    a worker reports. docs/engines.md lists refused options."""

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class Workers(Section, frozen=True, kw_only=True):
    """Rollout workers."""

    count: NonNegative = 2
    """Workers that `run` starts; others may join."""
    engine: str = "torch"
    """torch, vllm, or `module:attribute` (docs/engines.md)."""
    gpus: tuple[NonNegative, ...] = ()
    """GPUs of w0, w1, ..., `vllm.tensor_parallel_size` each, counted from 0 among the visible ones;
    empty: all workers use the first. For the vLLM engine."""
    vllm: Vllm = Vllm()
    max_num_seqs: Positive = 64
    """Requests that one worker generates concurrently."""
    max_model_len: Positive = 1024
    """Tokens of the longest sequence, prompt and response."""
    prefix_cache_ratio: NonNegativeFloat = 1.0
    """Prefix cache of the torch engine for prompts and for sequences between calls, as a multiple
    of max_num_seqs * max_model_len tokens; 0 disables it. The cache evicts the least recently used
    entries. vLLM caches prefixes itself."""
    checkpoint_tokens: Positive = 128
    """Sampled tokens between progress records."""
    threads: Positive = 1
    """CPU threads per worker; changing this changes results bitwise."""
    endpoint: str = "127.0.0.1:0"
    """HOST:PORT of the endpoint for agents; port 0: any free port. There is no TLS: read
    docs/agents.md before you use another host."""
    colocated: NonNegative = 0
    """The last workers of `count` that share their GPUs with the trainer: they sleep during a step
    (docs/staleness.md)."""
    max_resident_versions: Positive = 4
    """Versions that one worker serves concurrently, if they are adapters (`lora.rank`)."""

    @property
    def prefetch(self) -> int:
        """Placed requests that a worker holds in addition to its slots; requests that wait for an
        environment, a tool or a reward do not count."""
        return self.max_num_seqs // 2

    def is_colocated(self, name: str) -> bool:
        """Return whether this worker is one of the last `colocated`."""
        last = range(max(0, self.count - self.colocated), self.count)
        return name in [f"w{number}" for number in last]
