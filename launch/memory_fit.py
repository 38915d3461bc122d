"""Which keys make a run fit into GPUs; decides what is proposed, the ways that change least first.

Pure, as what it is counted by (`memory_estimate`). What is proposed is a configuration that a run
takes: no way is named that another key of it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from operator import attrgetter
from typing import Any, Final, Literal

import msgspec

from dora_pipe.config.checks import problems_of
from dora_pipe.config.model import Config
from dora_pipe.launch.memory_estimate import (
    Gpus,
    parts_bytes,
    slots_that_fit,
    trainer_bytes,
    worker_parts,
)
from dora_pipe.launch.model_shape import ModelShape

SLOTS_LEAST: Final = 8
"""Of a worker with one GPU: rather than fewer it is given several."""

MACHINE_GPUS: Final = 8
"""Of one machine, at most, and so of one worker."""


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    """The configuration with other values of keys, such as ``{"trainer.zero_stage": 3}``."""
    for key, value in keys.items():
        *sections, name = key.split(".")
        holders = [config]
        for section in sections:
            holders.append(getattr(holders[-1], section))
        changed: Any = tuple(value) if isinstance(value, list) else value
        for holder, field in zip(reversed(holders), (name, *reversed(sections)), strict=True):
            changed = msgspec.structs.replace(holder, **{field: changed})
        config = changed
    return config


Fits = Literal["yes", "no", ""]


def fits(bytes_: int, room: int | None) -> Fits:
    """Nothing, where there is no GPU to be in."""
    return "" if room is None else "yes" if bytes_ <= room else "no"


def worker_keys(
    shape: ModelShape, config: Config, room: int, *, slots_least: int = 1
) -> dict[str, Any] | None:
    """Keys with which one worker fits into so many bytes of each of its GPUs, with no fewer slots
    than `slots_least`, or than it has; None: none does."""
    if parts_bytes(worker_parts(shape, config)) <= room:
        return {}
    keys: dict[str, Any] = {}
    if config.workers.vllm.dtype != "bfloat16":
        keys = {"workers.vllm.dtype": "bfloat16"}
    if keys and parts_bytes(worker_parts(shape, with_keys(config, keys))) <= room:
        return keys
    slots = min(config.workers.slots, slots_that_fit(shape, with_keys(config, keys), room))
    least = min(slots_least, config.workers.slots)
    if config.workers.vllm.kv_gb:
        keys = {**keys, "workers.vllm.kv_gb": 0.0}
    return {**keys, "workers.slots": slots} if slots >= least else None


def parallel_keys(shape: ModelShape, config: Config, gpus: Gpus) -> dict[str, Any] | None:
    """Keys with which a worker has as few GPUs of one machine as hold it, one at least being left
    for the trainer; None: no number of them does, or servers that run already have theirs."""
    vllm, count = config.workers.vllm, config.workers.count
    if vllm.addresses:
        return None
    for tensor, stages in _splits(shape, config):
        workers = min(count, (gpus.count - 1) // (tensor * stages))
        if not workers:
            continue
        keys: dict[str, Any] = {"workers.engine": "vllm-server"}
        if config.workers.engines:
            keys["workers.engines"] = []
        if workers < count:
            keys["workers.count"] = workers
        dealt = {"tensor_parallel": tensor, "pipeline_parallel": stages}
        held = {key: getattr(vllm, key) for key in dealt}
        keys |= {f"workers.vllm.{key}": one for key, one in dealt.items() if one != held[key]}
        keys["workers.gpus"] = []
        changed = with_keys(config, keys)
        more = worker_keys(shape, changed, gpus.usable, slots_least=SLOTS_LEAST)
        if more is not None and not any(problems_of(changed)):
            return keys | more
    return None


def _splits(shape: ModelShape, config: Config) -> list[tuple[int, int]]:
    """Into how many parts of layers, and of their number, a worker may be dealt on one machine: as
    few as can be, parts of layers first, since KV caches do not move between pipelines."""
    vllm, of = config.workers.vllm, shape.attention
    heads = of.keys * of.heads // of.queries  # of keys and values, which are dealt or copied whole
    found = [
        (tensor, stages)
        for stages in range(vllm.pipeline_parallel, min(MACHINE_GPUS, shape.layers) + 1)
        for tensor in range(vllm.tensor_parallel, MACHINE_GPUS // stages + 1)
        if tensor * stages > vllm.gpus and not of.heads % tensor
        if not (heads % tensor and tensor % heads)
    ]
    least = vllm.pipeline_parallel
    return sorted(found, key=lambda one: (one[1] > least, one[0] * one[1], one[1]))


def trainer_keys(shape: ModelShape, config: Config, room: int, count: int) -> dict[str, Any] | None:
    """Keys with which a trainer on so many GPUs fits into so many bytes of each, the ways that
    change least first, and of keys that only cost time as few as do; None: none does."""
    many = config.trainer.kind == "deepspeed" and config.trainer.ranks > count
    for way in ({"trainer.ranks": count} if many else {}, *_ways(config, count)):
        for cheap in _cheap(config):
            keys = {**way, **cheap}
            changed = with_keys(config, keys)
            if trainer_bytes(shape, changed) <= room and not any(problems_of(changed)):
                return keys
    return None


def _cheap(config: Config) -> Iterator[dict[str, Any]]:
    """Keys that only cost time, alone and together."""
    trainer, longest = config.trainer, config.workers.context_tokens
    one_by_one: list[dict[str, Any]] = []
    if trainer.head_chunk_tokens != "auto":
        one_by_one.append({"trainer.head_chunk_tokens": "auto"})
    if trainer.mlp_chunk_tokens != "auto" and not trainer.chunks_refused:
        one_by_one.append({"trainer.mlp_chunk_tokens": "auto"})
    if not trainer.gradient_checkpointing:
        one_by_one.append({"trainer.gradient_checkpointing": True})
    if trainer.micro_batch_tokens > longest:
        one_by_one.append({"trainer.micro_batch_tokens": longest})
    inputs = {"trainer.gradient_checkpointing": True, "trainer.activation_offload": True}
    for last in ({},) if trainer.activation_offload else ({}, inputs):
        for size in range(len(one_by_one) + 1):
            for some in combinations(one_by_one, size):
                yield {key: value for one in (*some, last) for key, value in one.items()}


def _ways(config: Config, count: int) -> Iterator[dict[str, Any]]:
    """Products in bfloat16, then DeepSpeed over so many GPUs, further and further apart."""
    if config.trainer.kind == "torch" and config.trainer.dtype != "bfloat16":
        yield {"trainer.dtype": "bfloat16"}
    for keys in zero_ways(config, count):
        yield {key: value for key, value in keys.items() if attrgetter(key)(config) != value}


def zero_ways(config: Config, count: int) -> list[dict[str, Any]]:
    """Keys of DeepSpeed's stages over so many GPUs, and of what lies elsewhere."""
    dtype = config.trainer.dtype
    further: list[dict[str, Any]] = [
        {"zero_stage": 3, "dtype": "bfloat16"},
        {"zero_stage": 3, "offload": "optimizer"},
        {"zero_stage": 3, "offload": "all"},
        {"zero_stage": 3, "dtype": "bfloat16", "offload": "all"},
    ]
    stages = [{"zero_stage": stage} for stage in range(dtype == "bfloat16", 4)]
    plain = {"kind": "deepspeed", "ranks": count, "dtype": dtype, "offload": "none"}
    plain |= {"optimizer": "adamw"}  # It has no other.
    if count % config.trainer.expert_parallel:
        plain |= {"expert_parallel": 1}
    ways: list[dict[str, Any]] = []
    for one in (*stages, *further):
        way = {f"trainer.{key}": value for key, value in {**plain, **one}.items()}
        if way not in ways:  # Those of a run in bfloat16 are there already.
            ways.append(way)
    return ways
