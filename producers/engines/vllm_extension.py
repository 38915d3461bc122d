"""What the vllm-server engine needs inside vLLM's worker process; decides what may be loaded.

vLLM imports this where `worker_extension_cls` names it, and mixes the class into its worker; its
methods are called over HTTP by /collective_rpc. They answer with a dict of JSON, and with `error`
in it where something is refused: an exception would reach the caller as a status 500 without words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from dora_pipe.errors import PolicyError
from dora_pipe.producers.engines import vllm_core, vllm_weights
from dora_pipe.producers.engines.torch_weights import check_fit, read_tensors
from dora_pipe.producers.engines.vllm_wire import BOTH, SAMPLED_FROM

vllm_weights.register()
if vllm_core.device_name() == "cpu":
    vllm_core.wake_bfloat16()


def sampler_class() -> type[Any]:
    """The sampler that is seeded for every token, and sends both log-probs where they are asked."""
    base: Any = vllm_core.sampler_class()

    class ServerSampler(base):  # type: ignore[misc]
        """See vllm_core; what a request asks for decides, nobody stands beside this process."""

        chosen: Any = None
        """Log-probs of the last step's tokens in what they were drawn from, if it was asked."""

        def forward(self, logits: Any, sampling_metadata: Any, *rest: Any, **named: Any) -> Any:
            """See vLLM's."""
            self.ask((sampling_metadata.max_num_logprobs or 0) >= BOTH)
            self.chosen = None
            output = super().forward(logits, sampling_metadata, *rest, **named)
            if self.chosen is not None:
                output.logprobs_tensors.logprob_token_ids[:, 1] = SAMPLED_FROM
                output.logprobs_tensors.logprobs[:, 1] = self.chosen
            return output

        def note(self, chosen: Any) -> None:
            """Keep them where they are, on the device."""
            self.chosen = chosen

    return ServerSampler


class Extension:
    """Mixed into vLLM's worker; every name has a prefix of its own."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any

    def dora_open(self) -> dict[str, Any]:
        """Take the place of the sampler; what the engine has, or why it cannot be used."""
        config = self.vllm_config
        plain = getattr(self.model_runner.sampler, "topk_topp_sampler", None)
        if not isinstance(plain, TopKTopPSampler):
            return {"error": "its model runner has no sampler of vLLM's first kind"}
        if config.scheduler_config.async_scheduling:
            return {"error": "it schedules ahead of its samples (async_scheduling)"}
        if type(self.weight_transfer_engine).__name__ != vllm_weights.HELD_NAME:
            return {"error": f"its weight transfer is not {vllm_weights.HELD_BACKEND!r}"}
        self.model_runner.sampler = sampler_class()(self.model_runner)
        cache = config.cache_config
        return {
            "version": vllm_core.version(),
            "slots": config.scheduler_config.max_num_seqs,
            "context_tokens": config.model_config.max_model_len,
            "kv_tokens": int(cache.num_gpu_blocks or 0) * int(cache.block_size),
            "vocabulary": config.model_config.get_vocab_size(),
            "device": vllm_core.device_name(),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
        }

    def dora_read(self, path: str, digest: str, version: str) -> dict[str, Any]:
        """Read, digest and hold the weights that vLLM's interface will be asked to load next."""
        weights = Path(path)
        try:
            tensors, found = read_tensors([weights])
            if found != digest:
                return {"error": vllm_weights.other_digest(weights, found, version, digest)}
            model_dir = Path(self.vllm_config.model_config.model)
            check_fit(*vllm_weights.expected_tensors(model_dir), tensors, weights)
        except PolicyError as error:
            return {"error": error.message}
        except OSError as error:
            return {"error": f"{weights}: {error.strerror or error}"}
        self.weight_transfer_engine.hold(digest, tensors)
        return {"tensors": len(tensors)}
