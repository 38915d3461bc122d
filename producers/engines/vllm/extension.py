"""Extension of vLLM's worker (`worker_extension_cls`), called by /collective_rpc.

Methods return a dict of JSON, with `error` on rejection: exceptions lose their message.
"""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from vllm import envs
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from dora_pipe.config.model import LINEAR_LAYERS
from dora_pipe.core.errors import PolicyError, ResourceError, reason
from dora_pipe.producers.engines.torch.weights import open_weights
from dora_pipe.producers.engines.vllm import core as vllm_core
from dora_pipe.producers.engines.vllm import kv as vllm_kv
from dora_pipe.producers.engines.vllm import lora as vllm_lora
from dora_pipe.producers.engines.vllm import weights as vllm_weights
from dora_pipe.producers.engines.vllm.kv_files import CacheFacts, is_seen, opened
from dora_pipe.producers.engines.vllm.plugins import ClearingScheduler
from dora_pipe.producers.engines.vllm.sampler import KeptRoutes, ServerSampler
from dora_pipe.producers.engines.vllm.wire import (
    ID_PREFIX,
    KV_COPIED,
    KV_ENDED,
    KeptExperts,
    KeptPart,
)

vllm_weights.register()
if vllm_core.device_name() == "cpu":
    vllm_core.wake_bfloat16()


class Extension:
    """Mixin with `dora_` names."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    list_loras: Any
    remove_lora: Any
    dora_folder: TemporaryDirectory[str] | None = None
    dora_before: frozenset[int] = frozenset()
    """Adapters loaded before `dora_write`."""
    dora_kept: KeptRoutes | None = None
    dora_cache: vllm_kv.RankCache | None = None

    def dora_open(self, routes: str, unassigned: str) -> dict[str, Any]:
        """Replace the sampler, and keep experts if `routes` is not empty; return the engine's
        properties or an error."""
        config = self.vllm_config
        plain = getattr(self.model_runner.sampler, "topk_topp_sampler", None)
        if not isinstance(plain, TopKTopPSampler):
            return {"error": "its model runner has no V1 sampler"}
        if config.scheduler_config.async_scheduling:
            return {"error": "it schedules ahead of its samples (async_scheduling)"}
        if type(self.weight_transfer_engine).__name__ != vllm_weights.ENGINE_NAME:
            return {"error": f"its weight transfer is not {vllm_weights.BACKEND!r}"}
        lacking = _lacks_for_adapters(config)
        if lacking:
            return {"error": lacking}
        ids = msgspec.json.decode(unassigned, type=list[int])
        engine = self.weight_transfer_engine
        self.model_runner.sampler = ServerSampler(self.model_runner, engine, ids)
        _make_intermediate_tensors(self.model_runner)
        if routes and config.parallel_config.pipeline_parallel_size > 1:
            return {"error": "routing is split over processes (pipeline_parallel_size)"}
        if routes:
            try:
                self.dora_kept = KeptRoutes(self.model_runner)
            except PolicyError as error:
                return {"error": error.message}
            self.model_runner.sampler.heard = self.dora_kept
        cache, lora = config.cache_config, config.lora_config
        return {
            "version": vllm_core.version(),
            "slots": config.scheduler_config.max_num_seqs,
            "context_tokens": config.model_config.max_model_len,
            "kv_tokens": int(cache.num_gpu_blocks or 0) * int(cache.block_size),
            "vocabulary": config.model_config.get_vocab_size(),
            "device": vllm_core.device_name(),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "lora_rank": lora.max_lora_rank if lora is not None else 0,
            "max_resident_versions": lora.max_loras if lora is not None else 1,
            "weights": engine.loaded,
            "sleeps": config.model_config.enable_sleep_mode,
        }

    def dora_read(self, path: str, digest: str, version: str) -> dict[str, Any]:
        """Read, check and hold weights."""
        weights = Path(path)
        try:
            expected = _expected(self.vllm_config.model_config.model)
            opened = open_weights(weights, version, digest, *expected)
        except PolicyError as error:
            return {"error": error.message}
        except (OSError, ResourceError) as error:
            return {"error": f"{weights}: {reason(error)}", "here": True}
        self.weight_transfer_engine.hold(digest, opened)
        return {"tensors": len(opened)}

    def dora_write(self, path: str, digest: str, base: str, rank: str) -> dict[str, Any]:
        """Check an adapter and write its directory for vLLM."""
        self.dora_forget()
        shapes, *_ = _expected(self.vllm_config.model_config.model)
        try:
            self.dora_folder = vllm_lora.written(
                Path(path), digest=digest, base=base, rank=int(rank), shapes=shapes
            )
        except PolicyError as error:
            return {"error": error.message}
        except (OSError, ResourceError) as error:
            return {"error": f"{path}: {reason(error)}", "here": True}
        self.dora_before = frozenset(self.list_loras())
        return {"folder": self.dora_folder.name}

    def dora_forget(self) -> dict[str, Any]:
        """Remove the directory; return the adapters loaded since `dora_write`."""
        if self.dora_folder is not None:
            self.dora_folder.cleanup()
            self.dora_folder = None
        return {"numbers": sorted(self.list_loras() - self.dora_before)}

    def dora_experts(self, parts: str, finished: str) -> dict[str, Any]:
        """Return kept experts; forget finished attempts."""
        assert self.dora_kept is not None
        experts = tuple(
            self.dora_kept.part(part.attempt, part.start, part.end)
            for part in msgspec.json.decode(parts, type=list[KeptPart])
        )
        for attempt in msgspec.json.decode(finished, type=list[str]):
            self.dora_kept.forget(attempt)
        answer: dict[str, Any] = msgspec.to_builtins(KeptExperts(parts=experts))
        return answer

    def dora_kv(self, folder: str, mark: str) -> dict[str, Any]:
        """Return the KV caches' layout (`CacheFacts`); none with pipeline parallelism."""
        facts = CacheFacts()
        if self.vllm_config.parallel_config.pipeline_parallel_size == 1:
            if self.dora_cache is None:
                self.dora_cache = vllm_kv.RankCache(self.model_runner, vllm_core.version())
            if is_seen(Path(folder), mark):
                facts = self.dora_cache.facts
        answer: dict[str, Any] = msgspec.to_builtins(facts)
        return answer

    def dora_copy_kv(self, attempt: str, path: str) -> dict[str, Any]:
        """Copy this process's heads of a KV cache; the file sets the number of positions.

        Blocks of a request that ended in the last step are not reused yet.
        """
        assert self.dora_cache is not None
        runner, prefix = self.model_runner, f"{ID_PREFIX}{attempt}-"
        name = next((request for request in runner.requests if request.startswith(prefix)), "")
        if not name:
            return {"state": KV_ENDED}
        try:
            array = opened(Path(path), write=True)
        except (OSError, ValueError) as error:
            return {"error": f"{path}: {reason(error)}", "here": True}
        if _computed(runner, name) < array.shape[2]:
            return {"state": "not computed"}
        (blocks,) = runner.requests[name].block_ids
        self.dora_cache.read_into(blocks, array)
        return {"state": KV_COPIED}

    def dora_drop(self, number: str) -> dict[str, Any]:
        """Remove an adapter, which vLLM's unload leaves in the worker."""
        return {"dropped": self.remove_lora(int(number))}

    def dora_drop_all(self) -> dict[str, Any]:
        numbers = sorted(self.list_loras())
        for number in numbers:
            self.remove_lora(number)
        return {"numbers": numbers}


def _make_intermediate_tensors(runner: Any) -> None:
    """Allocate a pipeline stage's input: vLLM 0.32 does so in a trial step, which it skips on a
    CPU."""
    from vllm.distributed import get_pp_group

    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _computed(runner: Any, name: str) -> int:
    """Return the positions in a request's blocks; 0 if it was not in the last step, as they may be
    reused."""
    batch = runner.input_batch
    row = batch.req_id_to_index.get(name)
    if row is None:
        return 0
    first, end = runner.query_start_loc.np[row : row + 2].tolist()
    return int(batch.num_computed_tokens_cpu[row] + end - first)


@functools.cache
def _expected(model_dir: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str], range]:
    return vllm_weights.expected_tensors(Path(model_dir))


def _lacks_for_adapters(config: Any) -> str:
    """Return why adapters cannot work, or empty."""
    lora, scheduler = config.lora_config, config.scheduler_config.get_scheduler_cls()
    if lora is None:
        return ""
    if not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        return "it loads no adapters at run time (VLLM_ALLOW_RUNTIME_LORA_UPDATING)"
    if vllm_core.device_name() == "cpu" and not issubclass(scheduler, ClearingScheduler):
        return "its scheduler does not clear blocks of the KV cache (scheduler_cls)"
    if (lora.max_cpu_loras or 0) <= lora.max_loras:
        return "it has no room for one more adapter (max_cpu_loras)"
    if set(LINEAR_LAYERS) - set(lora.target_modules or LINEAR_LAYERS):
        return "it does not adapt all linear layers (lora_target_modules)"
    return ""
