"""vLLM options that a run passes through (`workers.vllm.args`), and rejected ones: set elsewhere,
or breaking the match of tokens and version (C1) or of log-probs and sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from dora_pipe.core.errors import ConfigError

KEYS: Final[Mapping[str, str]] = {
    "dtype": "workers.vllm.dtype",
    "enable_lora": "lora.rank",
    "enable_sleep_mode": "workers.colocated",
    "enforce_eager": "workers.vllm.enforce_eager",
    "kv_cache_memory_bytes": "workers.vllm.kv_cache_gb",
    "max_lora_rank": "lora.rank",
    "max_loras": "workers.max_resident_versions",
    "max_model_len": "workers.max_model_len",
    "max_num_seqs": "workers.max_num_seqs",
    "model": "model.path",
    "pipeline_parallel_size": "workers.vllm.pipeline_parallel_size",
    "tensor_parallel_size": "workers.vllm.tensor_parallel_size",
}
"""Options with a config key."""

_OWN: Final = """
    api_key api_server_count block_size config disable_uvicorn_access_log
    enable_return_routed_experts generation_config grpc headless host kv_transfer_config load_format
    lora_modules lora_target_modules max_cpu_loras middleware nnodes node_rank port root_path
    scheduler_cls seed served_model_name skip_tokenizer_init ssl_certfile ssl_keyfile tokens_only
    uds weight_transfer_config worker_cls worker_extension_cls
"""
_WEIGHTS: Final = """
    code_revision config_format data_parallel_address data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_rank data_parallel_size
    data_parallel_size_local decode_context_parallel_size ec_transfer_config enable_elastic_ep
    enable_eplb hf_config_path hf_overrides kv_offloading_backend kv_offloading_size
    model_class_overrides model_loader_extra_config prefill_context_parallel_size quantization
    quantization_config revision
"""
_LOGPROBS: Final = """
    async_scheduling enable_batch_sharded_sampling kv_sharing_fast_prefill logits_processors
    logprobs_mode max_logprobs override_generation_config spec_method spec_model spec_tokens
    speculative_config watermark watermark_config
"""

REASONS: Final[Mapping[str, str]] = {
    **{name: f"{key} sets it" for name, key in KEYS.items()},
    **dict.fromkeys(_OWN.split(), "the engine sets it"),
    **dict.fromkeys(
        _WEIGHTS.split(), "sampling would not use the published weights of the version"
    ),
    **dict.fromkeys(_LOGPROBS.split(), "recorded log-probs would not match the sampled tokens"),
}


def check_args(args: Mapping[str, Any]) -> None:
    """Raise ConfigError for a rejected option; vLLM reports unknown ones."""
    for name in args:
        option = option_of(name)
        reason = REASONS.get(option)
        if reason is not None:
            hint = KEYS.get(option)
            raise ConfigError(
                f"workers.vllm.args.{name}: {reason}",
                hint=f"set {hint}" if hint else "remove it from [workers.vllm.args]",
            )


def option_of(name: str) -> str:
    """Return vLLM's name of an option; `hf_overrides.x` is a member of `hf_overrides`."""
    return name.partition(".")[0].replace("-", "_")


def command_words(args: Mapping[str, Any]) -> list[str]:
    """Return command-line arguments.

    Example: ``command_words({"enable_prefix_caching": False, "swap_space": 2})`` is
    ``["--no-enable-prefix-caching", "--swap-space=2"]``.
    """
    words = []
    for name, value in args.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            words.append(f"--{option}={text}")
    return words


def described(args: Mapping[str, Any]) -> str:
    """Return the options as part of an engine version."""
    return "".join(f" {name}={json.dumps(args[name])}" for name in sorted(args))
