"""GPU memory and disk of a run: the formulas, and the keys that make a run fit.

Sizes of a model and a configuration go in, bytes come out. Formulas and sources:
docs/large-models.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, NamedTuple

import msgspec

from dora_pipe.config.checks import problems_of
from dora_pipe.config.model import Config, versions_resident
from dora_pipe.config.storage import (
    PATCH_BYTES,
    PATCHED_SHARE,
    bytes_per_step,
    checkpoint_bytes,
    whole_every,
)
from dora_pipe.consumers.learners.registry import published_dtype
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.local_roles import gpus_of, worker_names
from dora_pipe.launch.model_shape import Block, ModelShape
from dora_pipe.producers.engines.registry import engine_kind
from dora_pipe.producers.engines.vllm.core import BLOCK_TOKENS, STEP_TOKENS_MAX

USABLE: Final = 0.9
"""Share of a GPU that a plan may fill; CUDA contexts, kernels and fragmentation take the rest."""

HEAD_ELEMENTS: Final = 2**24
"""Logits of one chunk of the head."""

MLP_ELEMENTS: Final = 2**25
"""Numbers of one chunk of a dense block on a GPU ..."""

MLP_ELEMENTS_MIN: Final = 2**26
"""... in a pass with more of them than this."""

COPIES_IN_CHUNKS: Final = 4
"""Float32 copies of a chunk's logits during the backward pass of a head in chunks."""

COPIES_AT_ONCE: Final = 3
"""Copies of a pass's logits where the head is one chunk."""

SCORE_COPIES: Final = 5
"""Copies of one layer's attention scores where torch has no kernel without scores (docs/gpu.md)."""

UPDATE_COPIES: Final = 2
"""Copies of one tensor that torch's AdamW makes during its update (`foreach=False`)."""

LIVE_ELEMENTS: Final = 10**9
"""Weights that ZeRO 3 keeps gathered (DeepSpeed's stage3_max_live_parameters)."""

BUCKET_ELEMENTS: Final = 50_000_000
"""Numbers that ZeRO reduces or gathers at once on a GPU."""

SLOTS_LEAST: Final = 8
"""Slots below which a worker gets several GPUs."""

MACHINE_GPUS: Final = 8
"""Most GPUs of one machine, and so of one worker."""

GIGABYTE: Final = 10**9
WIDTHS: Final = {"float32": 4, "bfloat16": 2}
_GPUS: Final = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,4}(?:\.\d{1,3})?)")


class MemoryPart(NamedTuple):
    """Bytes of one thing on one GPU."""

    what: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Gpus:
    """A number of equal GPUs."""

    count: int
    size_bytes: int

    @property
    def usable(self) -> int:
        """Bytes of one GPU that a plan may fill."""
        return int(self.size_bytes * USABLE)


def parse_gpus(text: str) -> Gpus:
    """Read `8x80`: eight GPUs of 80 GB (10^9 bytes). Raises UsageError."""
    match = _GPUS.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--gpus {text!r} is no number of GPUs and GB",
            hint="--gpus 8x80 means eight GPUs of 80 GB each",
        )
    return Gpus(int(match[1]), int(float(match[2]) * GIGABYTE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The division of GPUs between workers and trainer."""

    workers: int
    """Workers with an engine that computes on a GPU."""
    worker_gpus: int
    per_gpu: int
    """Workers on one GPU, at most."""
    trainer_gpus: int
    shared: bool
    """Whether trainer and workers use the same GPU."""


def placement_of(config: Config, count: int) -> Placement:
    """Divide GPUs: those of `workers.gpus`, or one per worker with one left for the trainer.

    Raises UsageError where the keys name a GPU beyond `count`.
    """
    on_gpus = engine_kind(config.workers.engine, config.task.directory).gpus
    names = worker_names(config) if on_gpus else ()
    named = [gpus_of(config, name)[1] for name in names]
    given = {number for numbers in named for number in numbers}
    for key, numbers in (("workers.gpus", given), ("trainer.gpus", set(config.trainer.gpus))):
        if numbers and max(numbers) >= count:
            raise UsageError(
                f"{key}: there is no GPU {max(numbers)} among {count}",
                hint="they are counted from 0; --gpus says how many there are",
            )
    wanted = len(names) * config.workers.vllm.gpus
    places = len(given) or min(wanted, max(1, count - 1))
    per_gpu = max(map(named.count, named)) if given else math.ceil(wanted / max(1, places))
    return Placement(
        workers=len(names),
        worker_gpus=places,
        per_gpu=per_gpu,
        trainer_gpus=len(config.trainer.gpus) or max(1, count - places),
        shared=bool(names) and (places >= count or bool(given & set(config.trainer.gpus))),
    )


def parts_bytes(parts: Sequence[MemoryPart]) -> int:
    """Sum the parts."""
    return sum(part.bytes for part in parts)


# Workers


def kv_token_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes of one token in the KV cache of an engine on a GPU."""
    return shape.kv_values * WIDTHS[config.workers.vllm.dtype]


def worker_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    """Memory of one vLLM worker on each of its GPUs."""
    workers, vllm = config.workers, config.workers.vllm
    width, slots, block = WIDTHS[vllm.dtype], workers.slots, BLOCK_TOKENS["cuda"]
    slot = math.ceil(workers.context_tokens / block) * block
    cache = int(vllm.kv_gb * 2**30) or slots * slot * kv_token_bytes(shape, config)
    stages, embedding = vllm.pipeline_parallel, shape.vocabulary * shape.hidden
    ends = embedding * (1 if shape.tied else 2)
    layers = math.ceil(shape.layers / stages)  # The first and the last stage have an end as well.
    stage = (shape.parameters - ends) * layers // shape.layers
    stage += ends if stages == 1 else embedding
    adapters = versions_resident(config) if config.lora.rank else 0
    tokens = STEP_TOKENS_MAX + slots
    step = tokens * _working(shape, width) + 2 * slots * shape.vocabulary * 4
    parts = [
        MemoryPart("weights of one version", stage * width // vllm.tensor_parallel),
        MemoryPart(f"{adapters} adapters resident", adapters * _adapter(shape, config) * 4),
        MemoryPart(
            f"KV cache, {slots} slots of {workers.context_tokens} tokens", cache // vllm.gpus
        ),
        MemoryPart(f"a step of {tokens} tokens and logits of {slots}", step),
        MemoryPart("largest tensor, while a version loads", shape.largest * 4),
    ]
    return [part for part in parts if part.bytes]


def slots_that_fit(shape: ModelShape, config: Config, room: int) -> int:
    """Slots with whole contexts of one worker in `room` bytes; 0 where none fits."""

    def used(slots: int) -> int:
        keys = {"workers.vllm.kv_gb": 0.0, "workers.slots": slots}
        return parts_bytes(worker_parts(shape, with_keys(config, keys)))

    first, each = used(1), used(2) - used(1)
    return max(0, (room - first) // each + 1)


# The trainer between passes


def trained(shape: ModelShape, config: Config) -> int:
    """Number of trained parameters: the adapter's, or all."""
    return _adapter(shape, config) if config.lora.rank else shape.parameters


def ranks_of(config: Config) -> int:
    """Number of trainer processes."""
    return config.trainer.ranks if config.trainer.kind == "deepspeed" else 1


def state_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    """Memory of a trainer on one GPU between two passes (ZeRO: arXiv 1910.02054, section 5)."""
    trainer = config.trainer
    zero = trainer.kind == "deepspeed"
    stage = trainer.zero_stage if zero else 0
    here = trainer.offload == "none"
    narrow = _is_narrow(shape, config)
    base = shape.parameters if config.lora.rank else 0
    halves = 2 if trainer.dtype == "bfloat16" and stage == 1 else 0  # beside float32 gradients
    own = _on_a_rank(shape, config)
    gradients = (4 + halves) * own if stage < 2 else _spread(shape, config, 4, 2)
    live = min(LIVE_ELEMENTS, own + base) * (_base_width(shape, config) if base else _held(config))
    parts = [
        MemoryPart("base", _base_bytes(shape, config) if trainer.offload != "all" else 0),
        MemoryPart("a tensor of the base in float32", _widened(shape, config)),
        MemoryPart(
            "weights",
            _spread(shape, config, _held(config), 3) if trainer.offload != "all" else 0,
        ),
        MemoryPart("gathered weights", live if stage == 3 else 0),
        MemoryPart("masters, float32", _spread(shape, config, 4, 1) if stage and here else 0),
        MemoryPart("remainders of masters", _spread(shape, config, 2, 1) if narrow and here else 0),
        MemoryPart("gradients", gradients if here else 0),
        MemoryPart("moments of the optimizer", _moments(shape, config) if here else 0),
        MemoryPart("buckets", 2 * min(BUCKET_ELEMENTS, own) * 4 if ranks_of(config) > 1 else 0),
        MemoryPart(
            "version 0 for the KL, float32",
            4 * shape.parameters if config.objective.kl and not config.lora.rank else 0,
        ),
    ]
    if trainer.parts > 1 and trainer.minibatches > 1:
        copied = _spread(shape, config, 14 if narrow else 12, 1)
        parts.append(MemoryPart("copy for parts that are updates", copied))
    return [part for part in parts if part.bytes]


def _adapter(shape: ModelShape, config: Config) -> int:
    return config.lora.rank * sum(shape.linears[name] for name in config.lora.targets)


def _is_narrow(shape: ModelShape, config: Config) -> bool:
    """Whether weights are published in bfloat16, so that masters are numbers and remainders."""
    return published_dtype(config, shape.dtype) == "bfloat16"


def _moments(shape: ModelShape, config: Config) -> int:
    """Two numbers per parameter; Muon has one per hidden matrix, 8-bit AdamW two bytes and a scale
    per 256 of all but the embedding."""
    count, optimizer = trained(shape, config), config.trainer.optimizer
    if optimizer == "muon":
        return 8 * count - 4 * shape.hidden_matrices
    if optimizer == "adamw8bit":
        table = 0 if config.lora.rank else shape.vocabulary * shape.hidden
        return 8 * table + _ceil(2 * (256 + 4) * (count - table), 256)
    return _spread(shape, config, 8, 1)


def _base_width(shape: ModelShape, config: Config) -> int:
    """Bytes per parameter of the frozen base of an adapter."""
    return 2 if _is_narrow(shape, config) else _held(config)


def _base_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes of the frozen base on a rank."""
    if not config.lora.rank:
        return 0
    shards = _shards(config, 3)
    here = shape.parameters - (_other_experts(shape, config) if shards == 1 else 0)
    return _ceil(_base_width(shape, config) * here, shards)


def _widened(shape: ModelShape, config: Config) -> int:
    """Bytes of the float32 copy that a pass makes of one tensor of the base at a time."""
    narrow = config.lora.rank and _is_narrow(shape, config)
    return 4 * shape.largest if narrow and config.trainer.dtype == "float32" else 0


def _shards(config: Config, stage: int) -> int:
    """Ranks that share what ZeRO spreads from this stage on."""
    trainer = config.trainer
    spread = trainer.kind == "deepspeed" and trainer.zero_stage >= stage
    return trainer.ranks if spread else 1


def _other_experts(shape: ModelShape, config: Config) -> int:
    """Parameters of the experts on other ranks only."""
    dealt = config.trainer.expert_parallel
    return shape.expert_matrices * (dealt - 1) // dealt


def _on_a_rank(shape: ModelShape, config: Config) -> int:
    """Trained parameters of one rank before ZeRO spreads any."""
    return trained(shape, config) - (0 if config.lora.rank else _other_experts(shape, config))


def _spread(shape: ModelShape, config: Config, width: int, stage: int) -> int:
    """Bytes on one rank of `width` bytes per trained parameter, spread from `stage` on."""
    shards = _shards(config, stage)
    count = trained(shape, config) if shards > 1 else _on_a_rank(shape, config)
    return _ceil(width * count, shards)


# One pass of the trainer


def pass_tokens(config: Config) -> int:
    """Padded tokens of the largest pass."""
    return config.trainer.micro_batch_tokens


def _width(config: Config) -> int:
    """Bytes of a number in a product of a pass."""
    return WIDTHS[config.trainer.dtype]


def _held(config: Config) -> int:
    """Bytes of a number of weights and of residual sums: float32 under torch's autocast."""
    return _width(config) if config.trainer.kind == "deepspeed" else 4


def pass_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    """Memory of one forward and backward pass on one GPU, beside the state."""
    tokens, width, held = pass_tokens(config), _width(config), _held(config)
    again, chunk = config.trainer.gradient_checkpointing, mlp_chunk(shape, config)
    outside = (2 if chunk else 3) * shape.hidden * held
    layer = tokens * (max(_layers(shape, config)) if again else 0)
    if chunk:  # The block's input is there anyway where it is computed again.
        widest = max(block.width for block in shape.blocks if not block.experts)
        layer += tokens * (1 if again else 2) * shape.hidden * held + chunk * width * 8 * widest
    else:
        layer += tokens * _working(shape, width)
    return [
        MemoryPart(
            f"activations of {tokens} tokens", tokens * (_layers_saved(shape, config) + outside)
        ),
        MemoryPart("scores of attention, at most", score_bytes(shape, config)),
        MemoryPart("weights, bfloat16 for its products", cast_bytes(shape, config)),
        MemoryPart("head and logits", head_bytes(shape, config)),
        MemoryPart("a layer of the backward pass", layer),
    ]


def pass_peak(shape: ModelShape, config: Config) -> int:
    """Peak of a pass: gradients go through the head, then through the layers."""
    *held, head, layer = pass_parts(shape, config)
    return parts_bytes(held) + max(head.bytes, layer.bytes)


def head_bytes(shape: ModelShape, config: Config) -> int:
    """Copies of logits during the backward pass of the head."""
    tokens, vocabulary = pass_tokens(config), shape.vocabulary
    chunk = max(1, HEAD_ELEMENTS // vocabulary)
    if chunk >= tokens:
        return COPIES_AT_ONCE * tokens * vocabulary * 4
    return COPIES_IN_CHUNKS * chunk * vocabulary * 4


def score_bytes(shape: ModelShape, config: Config) -> int:
    """Attention scores: kept only in float32 on a GPU where heads share keys and values."""
    attention, trainer = shape.attention, config.trainer
    if trainer.device == "cpu" or _width(config) < 4 or attention.keys == attention.queries:
        return 0
    tokens = pass_tokens(config)
    one = attention.heads * tokens * min(tokens, config.workers.context_tokens) * 4
    others = 0 if trainer.gradient_checkpointing else shape.layers - 1
    return (others + SCORE_COPIES) * one


def cast_bytes(shape: ModelShape, config: Config) -> int:
    """Copies in bfloat16 of float32 weights, which torch's autocast keeps during a pass."""
    if config.trainer.kind == "deepspeed" or _width(config) == 4:
        return 0
    if config.lora.rank and _is_narrow(shape, config):
        return 2 * trained(shape, config)
    embedding = 0 if shape.tied else shape.vocabulary * shape.hidden
    return 2 * (shape.parameters - embedding)


def update_bytes(shape: ModelShape, config: Config) -> int:
    """Copies of an update: one tensor at a time in torch, all of a rank in DeepSpeed's AdamW."""
    if config.trainer.offload != "none":
        return 0
    whole = _spread(shape, config, 4, 1)
    if config.trainer.kind == "deepspeed":
        return whole
    return min(whole, UPDATE_COPIES * 4 * shape.largest_trained)


def trainer_bytes(shape: ModelShape, config: Config) -> int:
    """Peak of a trainer on one GPU."""
    peak = max(pass_peak(shape, config), update_bytes(shape, config))
    return parts_bytes(state_parts(shape, config)) + peak


def mlp_chunk(shape: ModelShape, config: Config) -> int:
    """Tokens that a dense block and the norms see at once; 0 for all of a pass."""
    width = max((block.width for block in shape.blocks if not block.experts), default=0)
    tokens, widest = pass_tokens(config), max(width, shape.hidden)
    if not width or config.trainer.chunks_refused or tokens * widest <= MLP_ELEMENTS_MIN:
        return 0
    chunk = max(1, MLP_ELEMENTS // widest)
    return chunk if chunk < tokens else 0


def _layers_saved(shape: ModelShape, config: Config) -> int:
    """Bytes per token that all layers keep for the backward pass."""
    if config.trainer.gradient_checkpointing == "offload":
        return 0
    if config.trainer.gradient_checkpointing:
        return shape.layers * shape.hidden * _held(config)
    return sum(_layers(shape, config))


def _layers(shape: ModelShape, config: Config) -> list[int]:
    """Bytes per token that autograd saves in each layer: two norms, attention, gated block."""
    width, held, cut = _width(config), _held(config), mlp_chunk(shape, config) > 0
    attention = shape.attention
    each = held + width if cut else 4 + held + width
    norms = 2 * shape.hidden * each + attention.normed * (4 + width)
    kept = attention.queries + attention.keys + attention.values + attention.out

    def block_bytes(block: Block) -> int:
        dense = 0 if cut and not block.experts else 4 * block.width
        gated = dense + block.per_token * (4 * block.expert_width + 2 * shape.hidden)
        return width * (kept + gated) + 4 * block.experts

    return [norms + block_bytes(block) for block in shape.blocks]


def _working(shape: ModelShape, width: int) -> int:
    """Bytes per token of the gradients that one block holds at once."""
    widest = max(block.width + block.per_token * block.expert_width for block in shape.blocks)
    return width * (4 * widest + 2 * shape.hidden)


def _ceil(bytes_: int, count: int) -> int:
    return -(-bytes_ // count)


# Disk


def disk_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    """Bytes of files in the store."""
    dtype = published_dtype(config, shape.dtype)
    count, patches = trained(shape, config), whole_every(config, dtype) > 1
    whole = WIDTHS[dtype] * count
    patch = int(PATCHED_SHARE * count * PATCH_BYTES) if dtype == "bfloat16" else whole
    state = checkpoint_bytes(count, remainders=_is_narrow(shape, config))
    parts = [
        MemoryPart(f"a version, {dtype}", whole),
        MemoryPart("a patch, where 3 % changed", patch if patches else 0),
        MemoryPart("a checkpoint of the optimizer", state),
        MemoryPart("a step, where everything is kept", bytes_per_step(config, dtype, whole)),
    ]
    return [part for part in parts if part.bytes]


# Keys that make a run fit


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    """Replace values of keys, such as ``{"trainer.zero_stage": 3}``."""
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


def worker_keys(
    shape: ModelShape, config: Config, gpus: Gpus, per_gpu: int
) -> dict[str, Any] | None:
    """Find keys with which a worker fits: bfloat16, fewer slots, several GPUs; None: none does."""
    room, wanted = gpus.usable // per_gpu, config.workers.slots
    narrow = {"workers.vllm.dtype": "bfloat16", "workers.vllm.kv_gb": 0.0}
    few: dict[str, Any] | None = None
    for tensor in _tensor_sizes(shape, config, gpus.count):
        keys = _split_keys(config, tensor, gpus.count)
        if any(problems_of(with_keys(config, keys))):
            continue
        space = gpus.usable if keys else room
        if parts_bytes(worker_parts(shape, with_keys(config, keys))) <= space:
            return keys
        keys |= narrow
        slots = min(wanted, slots_that_fit(shape, with_keys(config, keys), space))
        keys["workers.slots"] = slots
        if slots >= min(SLOTS_LEAST, wanted):
            return _changed(config, keys)
        few = few or (_changed(config, keys) if slots else None)
    return few


def _tensor_sizes(shape: ModelShape, config: Config, count: int) -> list[int]:
    """GPUs of one worker: as they are, then more that divide the heads of keys and values."""
    vllm, attention = config.workers.vllm, shape.attention
    heads = math.gcd(attention.heads, attention.keys * attention.heads // attention.queries)
    most = 0 if vllm.addresses else min(MACHINE_GPUS, count - 1) // vllm.pipeline_parallel
    more = [size for size in range(vllm.tensor_parallel + 1, most + 1) if not heads % size]
    return [vllm.tensor_parallel, *more]


def _split_keys(config: Config, tensor: int, count: int) -> dict[str, Any]:
    workers = config.workers
    if tensor == workers.vllm.tensor_parallel:
        return {}
    fit = (count - 1) // tensor // workers.vllm.pipeline_parallel
    keys: dict[str, Any] = {
        "workers.engine": "vllm-server",
        "workers.count": min(workers.count, fit),
        "workers.vllm.tensor_parallel": tensor,
        "workers.gpus": (),
    }
    return _changed(config, keys)


def trainer_keys(shape: ModelShape, config: Config, room: int, count: int) -> dict[str, Any] | None:
    """Find keys with which a trainer on `count` GPUs fits `room` bytes of each, smallest change
    first; None where none does."""
    for way in _trainer_ways(config, count):
        for cheap in _cheap(config):
            keys = _changed(config, {**way, **cheap})
            changed = with_keys(config, keys)
            if trainer_bytes(shape, changed) <= room and not any(problems_of(changed)):
                return keys
    return None


def _cheap(config: Config) -> Iterator[dict[str, Any]]:
    """Keys that only cost time, alone and together."""
    again: dict[str, Any] = {"trainer.gradient_checkpointing": True}
    short = {"trainer.micro_batch_tokens": config.workers.context_tokens}
    single = [] if config.trainer.gradient_checkpointing else [again]
    if config.trainer.micro_batch_tokens > config.workers.context_tokens:
        single.append(short)
    for last in ({}, {"trainer.gradient_checkpointing": "offload"}):
        for size in range(len(single) + 1):
            for some in combinations(single, size):
                yield {key: value for keys in (*some, last) for key, value in keys.items()}


def _trainer_ways(config: Config, count: int) -> Iterator[dict[str, Any]]:
    """Ways to train: as it is, in bfloat16, then DeepSpeed's stages over all GPUs, then offload."""
    zero = config.trainer.kind == "deepspeed"
    yield {"trainer.ranks": min(count, config.trainer.ranks)} if zero else {}
    if not zero:
        yield {"trainer.dtype": "bfloat16"}
    plain: dict[str, Any] = {"kind": "deepspeed", "ranks": count, "offload": "none"}
    plain["optimizer"] = "adamw"  # It has no other.
    if count % config.trainer.expert_parallel:
        plain["expert_parallel"] = 1
    dtype = config.trainer.dtype
    stages = [{"zero_stage": stage, "dtype": dtype} for stage in range(dtype == "bfloat16", 4)]
    further: list[dict[str, Any]] = [
        {"zero_stage": 3, "dtype": "bfloat16"},
        {"zero_stage": 3, "offload": "optimizer", "dtype": dtype},
        {"zero_stage": 3, "offload": "all", "dtype": dtype},
        {"zero_stage": 3, "offload": "all", "dtype": "bfloat16"},
    ]
    for way in (*stages, *further):
        yield {f"trainer.{key}": value for key, value in {**plain, **way}.items()}


def _changed(config: Config, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out keys that have these values already."""

    def value_of(key: str) -> Any:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        return value

    return {key: value for key, value in keys.items() if value_of(key) != value}
