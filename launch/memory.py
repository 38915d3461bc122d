"""Estimate the GPU memory and disk of a run, and find keys that fit (docs/sizing.md)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, getitem
from typing import Any, Final, NamedTuple

import msgspec

from dora_pipe.config.checks import problems_of
from dora_pipe.config.model import Config, max_resident_versions
from dora_pipe.config.retention import bytes_per_step, checkpoint_bytes
from dora_pipe.consumers.learners.registry import published_dtype
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.local_roles import gpus_of, worker_names
from dora_pipe.launch.model_shape import ModelShape
from dora_pipe.producers.engines.registry import engine_kind
from dora_pipe.producers.engines.vllm.core import STEP_TOKENS_MAX

USABLE: Final = 0.9
"""Share of a GPU that a plan may fill; the rest is for contexts, kernels and fragmentation."""

GIGABYTE: Final = 10**9
WIDTHS: Final = {"float32": 4, "bfloat16": 2}

MOMENTS: Final = {"adamw": 8.0, "muon": 4.0, "adamw8bit": 2.03}
"""Optimizer bytes per parameter of a hidden layer; embedding and head take 8."""

HEAD_ELEMENTS: Final = 2**24
"""Logits per chunk of the head; four float32 copies exist at the same time."""

MLP_ELEMENTS: Final = 2**26
"""Elements of a dense block; above them a pass computes it in chunks of half this size."""

GATHERED: Final = 10**9
"""Weights that ZeRO 3 keeps gathered (`stage3_max_live_parameters` of DeepSpeed)."""

BUCKETS: Final = 400_000_000

SLOTS_LEAST: Final = 8
"""Below this many slots, a worker gets more GPUs."""

MACHINE_GPUS: Final = 8

_GPUS: Final = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,4}(?:\.\d{1,3})?)")

Parts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Gpus:
    """Equal GPUs."""

    count: int
    usable: int
    """Bytes of one GPU that a plan may fill."""


def parse_gpus(text: str) -> Gpus:
    """Parse `8x80`: eight GPUs of 80 GB (10^9 bytes). Raises UsageError."""
    match = _GPUS.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--gpus {text!r} is not COUNTxGB",
            hint="--gpus 8x80 means eight GPUs of 80 GB each",
        )
    return Gpus(int(match[1]), int(float(match[2]) * GIGABYTE * USABLE))


class Placement(NamedTuple):
    """Division of GPUs between workers and trainer."""

    workers: int
    worker_gpus: int
    per_gpu: int
    trainer_gpus: int
    shared: bool


def placement_of(config: Config, count: int) -> Placement:
    """Divide GPUs: those of `workers.gpus`, or one per worker with one left for the trainer.

    Raises UsageError if a key names a missing GPU.
    """
    on_gpus = engine_kind(config.workers.engine, config.task.directory).gpus
    names = worker_names(config) if on_gpus else ()
    named = [gpus_of(config, name)[1] for name in names]
    given = {number for numbers in named for number in numbers}
    for key, numbers in (("workers.gpus", given), ("trainer.gpus", set(config.trainer.gpus))):
        if numbers and max(numbers) >= count:
            raise UsageError(
                f"{key}: there is no GPU {max(numbers)} among {count}",
                hint="numbers start at 0; --gpus sets the count",
            )
    needed = len(names) * config.workers.vllm.gpus
    places = len(given) or min(needed, max(1, count - 1))
    per_gpu = max(map(named.count, named)) if given else math.ceil(needed / max(1, places))
    return Placement(
        workers=len(names),
        worker_gpus=places,
        per_gpu=per_gpu,
        trainer_gpus=len(config.trainer.gpus) or max(1, count - places),
        shared=bool(names) and (places >= count or bool(given & set(config.trainer.gpus))),
    )


def worker_parts(shape: ModelShape, config: Config) -> Parts:
    """Return the memory of one vLLM worker on each of its GPUs."""
    workers, vllm = config.workers, config.workers.vllm
    width, slots = WIDTHS[vllm.dtype], workers.max_num_seqs
    cache = int(vllm.kv_cache_gb * 2**30) or slots * workers.max_model_len * shape.kv_values * width
    tokens = STEP_TOKENS_MAX + slots
    step = tokens * width * (4 * shape.width + 2 * shape.hidden) + 8 * slots * shape.vocabulary
    adapter = _adapter(shape, config) if config.lora.rank else 0
    return {
        "weights of one version": shape.parameters * width // vllm.gpus,
        "adapters": max_resident_versions(config) * 4 * adapter,
        f"KV cache, {slots} slots of {workers.max_model_len} tokens": cache // vllm.gpus,
        f"a step of {tokens} tokens": step,
        "the embedding, while a version loads": 4 * shape.embedding,
    }


def slots_that_fit(shape: ModelShape, config: Config, room: int) -> int:
    """Return how many slots of full context length fit into `room` bytes."""

    def used(slots: int) -> int:
        keys = {"workers.vllm.kv_cache_gb": 0.0, "workers.max_num_seqs": slots}
        return sum(worker_parts(shape, with_keys(config, keys)).values())

    first, each = used(1), used(2) - used(1)
    return max(0, (room - first) // each + 1)


def state_parts(shape: ModelShape, config: Config) -> Parts:
    """Return a trainer's memory on one GPU between passes (ZeRO: arXiv 1910.02054, section 5)."""
    trainer, lora = config.trainer, bool(config.lora.rank)
    zero = trainer.kind == "deepspeed"
    stage = trainer.zero_stage if zero else 0
    here, narrow, held = trainer.offload == "none", _is_narrow(shape, config), _held(config)
    base_width, dealt = 2 if narrow else held, trainer.expert_parallel_size

    def spread(width: float, least: int) -> int:
        """Return the bytes of `width` per trained parameter, sharded from ZeRO stage `least`."""
        if stage >= least and least:
            return math.ceil(width * trained(shape, config) / trainer.ranks)
        elsewhere = 0 if lora else shape.experts * (dealt - 1) // dealt
        return int(width * (trained(shape, config) - elsewhere))

    base = base_width * shape.parameters // (trainer.ranks if stage == 3 else 1) if lora else 0
    weights = spread(held, 3) + base
    outside = 0 if lora else shape.ends
    hidden = 1 - outside / trained(shape, config)
    moments = MOMENTS[trainer.optimizer] * hidden + 8 * (1 - hidden)
    halves = 2 if trainer.dtype == "bfloat16" and stage == 1 else 0
    masters = (4 if stage else 0) + (2 if narrow else 0)
    live = min(GATHERED, shape.parameters) * (base_width if lora else held)
    copies = (14 if narrow else 12) if trainer.batch_parts > 1 and trainer.minibatches > 1 else 0
    return {
        "weights": weights if trainer.offload != "all" else 0,
        "gathered weights": live if stage == 3 else 0,
        "masters": spread(masters, 1) if here else 0,
        "gradients": spread(4 + halves, 2) if here else 0,
        "moments of the optimizer": spread(moments, 1) if here else 0,
        "buckets": BUCKETS if trainer.ranks > 1 else 0,
        "version 0 for the KL": 0 if lora or not config.objective.kl_coef else 4 * shape.parameters,
        "copy for parts that are updates": spread(copies, 1),
    }


def trained(shape: ModelShape, config: Config) -> int:
    """Return the trained parameters: the adapter's, or all."""
    return _adapter(shape, config) if config.lora.rank else shape.parameters


def pass_parts(shape: ModelShape, config: Config) -> Parts:
    """Return the memory of one forward and backward pass on one GPU, without state."""
    trainer, tokens = config.trainer, config.trainer.micro_batch_tokens
    width, held = WIDTHS[trainer.dtype], _held(config)
    again, chunkable = trainer.gradient_checkpointing, not (shape.mixture or trainer.chunks_refused)
    chunked = chunkable and tokens * max(shape.width, shape.hidden) > MLP_ELEMENTS
    norms = 2 * shape.hidden * (held + width + (0 if chunked else 4))
    layer = norms + width * (shape.attention + (0 if chunked else 4 * shape.width))
    block = width * min(tokens * shape.width, MLP_ELEMENTS // 2) * (8 if chunked else 4)
    kept = shape.layers * (shape.hidden * held if again else layer)
    backward = tokens * ((layer if again else 0) + 2 * shape.hidden * width) + block
    rows = min(tokens, HEAD_ELEMENTS // shape.vocabulary + 1)
    head = (4 if rows < tokens else 3) * rows * shape.vocabulary * 4
    return {
        f"activations of {tokens} tokens": tokens
        * ((0 if again == "offload" else kept) + 3 * shape.hidden * held),
        "scores of attention": _score_bytes(shape, config),
        "weights, bfloat16 for its products": _cast_bytes(shape, config),
        "a layer of the backward pass, or the head": max(backward, head),
    }


def update_bytes(shape: ModelShape, config: Config) -> int:
    """Return the copied bytes of an update: 2x the largest tensor (torch), a rank (DeepSpeed)."""
    if config.trainer.offload != "none":
        return 0
    if config.trainer.kind == "deepspeed":
        return 4 * trained(shape, config) // config.trainer.ranks
    return 8 * min(shape.largest, trained(shape, config))


def trainer_bytes(shape: ModelShape, config: Config) -> int:
    """Return the peak memory of a trainer on one GPU."""
    peak = max(sum(pass_parts(shape, config).values()), update_bytes(shape, config))
    return sum(state_parts(shape, config).values()) + peak


def _adapter(shape: ModelShape, config: Config) -> int:
    return config.lora.rank * sum(shape.linears.get(name, 0) for name in config.lora.targets)


def _is_narrow(shape: ModelShape, config: Config) -> bool:
    return published_dtype(config, shape.dtype) == "bfloat16"


def _held(config: Config) -> int:
    """float32 under torch autocast."""
    return WIDTHS[config.trainer.dtype] if config.trainer.kind == "deepspeed" else 4


def _score_bytes(shape: ModelShape, config: Config) -> int:
    """Return the bytes of scores: torch keeps them only in float32 with grouped heads."""
    trainer = config.trainer
    if trainer.device == "cpu" or trainer.dtype == "bfloat16" or not shape.grouped:
        return 0
    tokens = trainer.micro_batch_tokens
    scores = shape.heads * tokens * min(tokens, config.workers.max_model_len) * 4
    return (5 if trainer.gradient_checkpointing else shape.layers + 4) * scores


def _cast_bytes(shape: ModelShape, config: Config) -> int:
    """Return the bytes of the bfloat16 weight copies that torch autocast keeps."""
    if config.trainer.kind == "deepspeed" or config.trainer.dtype == "float32":
        narrow_base = config.lora.rank and _is_narrow(shape, config)
        return 4 * shape.largest if narrow_base and config.trainer.dtype == "float32" else 0
    if config.lora.rank and _is_narrow(shape, config):
        return 2 * trained(shape, config)
    return 2 * (shape.parameters - (0 if shape.tied else shape.embedding))


def disk_parts(shape: ModelShape, config: Config) -> Parts:
    """Return the bytes of files in the store."""
    dtype = published_dtype(config, shape.dtype)
    count = trained(shape, config)
    version_bytes = WIDTHS[dtype] * count
    return {
        f"a version, {dtype}": version_bytes,
        "a checkpoint": checkpoint_bytes(count, remainders=dtype == "bfloat16"),
        "a step, keeping all files": bytes_per_step(config, dtype, version_bytes),
    }


# Keys that make a run fit


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    plain = msgspec.to_builtins(config)
    for key, value in keys.items():
        *sections, name = key.split(".")
        reduce(getitem, sections, plain)[name] = value
    return msgspec.convert(plain, Config)


def worker_keys(
    shape: ModelShape, config: Config, gpus: Gpus, per_gpu: int
) -> dict[str, Any] | None:
    """Find keys with which a worker fits, if any: bfloat16, fewer slots, several GPUs."""
    configured = config.workers.max_num_seqs
    if sum(worker_parts(shape, config).values()) <= gpus.usable // per_gpu:
        return {}
    few: dict[str, Any] | None = None
    for keys in _worker_ways(config, gpus.count):
        changed = with_keys(config, keys)
        if any(problems_of(changed)):
            continue
        alone = "workers.vllm.tensor_parallel_size" in keys
        slots = slots_that_fit(shape, changed, gpus.usable // (1 if alone else per_gpu))
        fitting = _changed(config, {**keys, "workers.max_num_seqs": min(configured, slots)})
        if slots >= min(SLOTS_LEAST, configured):
            return fitting
        few = few or (fitting if slots else None)
    return few


def _worker_ways(config: Config, count: int) -> Iterator[dict[str, Any]]:
    narrow = {"workers.vllm.dtype": "bfloat16", "workers.vllm.kv_cache_gb": 0.0}
    yield narrow
    vllm = config.workers.vllm
    for size in (2, 4, 8):
        fit = min(MACHINE_GPUS, count - 1) // size // vllm.pipeline_parallel_size
        if fit and size > vllm.tensor_parallel_size and not vllm.addresses:
            yield {
                **narrow,
                "workers.engine": "vllm",
                "workers.vllm.tensor_parallel_size": size,
                "workers.count": min(config.workers.count, (count - 1) // size),
                "workers.gpus": (),
            }


def trainer_keys(shape: ModelShape, config: Config, room: int, count: int) -> dict[str, Any] | None:
    """Find the smallest change with which a trainer on `count` GPUs fits, if any."""
    short = min(config.trainer.micro_batch_tokens, config.workers.max_model_len)
    again = "trainer.gradient_checkpointing"
    saving: tuple[dict[str, Any], ...] = (
        {},
        {again: config.trainer.gradient_checkpointing or True},
        {again: True, "trainer.micro_batch_tokens": short},
        {again: "offload", "trainer.micro_batch_tokens": short},
    )
    for way in _trainer_ways(config, count):
        for saved in saving:
            keys = _changed(config, {**way, **saved})
            changed = with_keys(config, keys)
            if trainer_bytes(shape, changed) <= room and not any(problems_of(changed)):
                return keys
    return None


def _trainer_ways(config: Config, count: int) -> Iterator[dict[str, Any]]:
    zero, dtype = config.trainer.kind == "deepspeed", config.trainer.dtype
    yield {"trainer.ranks": min(count, config.trainer.ranks)} if zero else {}
    if not zero:
        yield {"trainer.dtype": "bfloat16"}
    plain: dict[str, Any] = {"kind": "deepspeed", "ranks": count, "optimizer": "adamw"}
    if count % config.trainer.expert_parallel_size:
        plain["expert_parallel_size"] = 1
    stages = [(stage, "none", dtype) for stage in range(dtype == "bfloat16", 4)]
    offloaded = [(3, "optimizer", dtype), (3, "all", dtype), (3, "all", "bfloat16")]
    for stage, offload, products in (*stages, (3, "none", "bfloat16"), *offloaded):
        way = {**plain, "zero_stage": stage, "offload": offload, "dtype": products}
        yield {f"trainer.{key}": value for key, value in way.items()}


def _changed(config: Config, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if attrgetter(key)(config) != value}
