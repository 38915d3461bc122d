"""What a run takes of GPUs, before there is one; decides what is counted.

Pure: sizes of a model and keys go in, bytes come out. Formulas and sources: docs/large-models.md.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from dora_pipe.config.model import Config, versions_resident
from dora_pipe.config.storage import (
    PATCH_BYTES,
    PATCHED_SHARE,
    checkpoint_bytes,
    keep_every,
    whole_every,
)
from dora_pipe.consumers.learners.registry import published_dtype
from dora_pipe.consumers.trainer.commits import made_of, retained
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.local_roles import gpus_of, worker_engine, worker_names
from dora_pipe.launch.model_shape import Block, ModelShape
from dora_pipe.producers.engines.registry import engine_kind
from dora_pipe.producers.engines.vllm.core import BLOCK_TOKENS, STEP_TOKENS_MAX
from dora_pipe.schemas.policy import Blob

USABLE: Final = 0.9
"""Of a GPU: the rest is left to CUDA's contexts, to kernels and to gaps between tensors."""

HEAD_ELEMENTS: Final = 2**24
"""Logits of a chunk with `trainer.head_chunk_tokens = "auto"`."""

MLP_ELEMENTS: Final = 2**25
"""Numbers of a block's chunk with `trainer.mlp_chunk_tokens = "auto"`, on a GPU ..."""

MLP_ELEMENTS_MIN: Final = 2**26
"""... in a pass that has more."""

COPIES_IN_CHUNKS: Final = 4
"""Of a chunk's logits in float32 while gradients go back through a head in chunks."""

COPIES_AT_ONCE: Final = 3
"""Of a pass's logits, where its head is computed at once."""

SCORE_COPIES: Final = 5
"""Of one layer's attention scores, where torch has no kernel that keeps none (docs/gpu.md)."""

MULTIPROCESSORS: Final = 132
"""Of an H100: so many heads at once, and copies of gradients where there are fewer."""

UPDATE_COPIES: Final = 2
"""Of one tensor, which torch's AdamW makes while it updates it (decision 0076)."""

LIVE_ELEMENTS: Final = 10**9
"""Of weights that ZeRO 3 keeps gathered (DeepSpeed's stage3_max_live_parameters)."""

BUCKET_ELEMENTS: Final = 50_000_000
"""Of what ZeRO reduces or gathers at once, on a GPU."""

VERSIONS: Final = 1000
"""Of a policy, for whose files an estimate is made."""

GIGABYTE: Final = 10**9
WIDTHS: Final = {"float32": 4, "bfloat16": 2}

_GPUS: Final = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,4}(?:\.\d{1,3})?)")


@dataclass(frozen=True, slots=True)
class Gpus:
    """So many equal GPUs."""

    count: int
    size_bytes: int

    @property
    def usable(self) -> int:
        """Bytes of one that a plan may fill."""
        return int(self.size_bytes * USABLE)


def parse_gpus(text: str) -> Gpus:
    """`8x80`: eight GPUs of 80 GB (10^9 bytes). Raises UsageError."""
    found = _GPUS.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--gpus {text!r} is no number of GPUs and GB",
            hint="--gpus 8x80 means eight GPUs of 80 GB each",
        )
    return Gpus(int(found[1]), int(float(found[2]) * GIGABYTE))


class MemoryPart(NamedTuple):
    """Bytes of one thing in one place."""

    what: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who has which of the GPUs."""

    workers: int
    """With an engine that computes on a GPU."""
    worker_gpus: int
    per_gpu: int
    """Workers, at most."""
    trainer_gpus: int
    """Those that are not workers'; one, if there is none."""
    shared: bool
    """Whether trainer and workers are on the same GPU."""


def placement_of(config: Config, count: int) -> Placement:
    """Of so many GPUs: those of `workers.gpus`, or one for each worker with one left for the
    trainer. Raises UsageError where the keys name others."""
    names = [
        name
        for name in worker_names(config)
        if engine_kind(worker_engine(config, name), config.task.directory).gpus
    ]
    named = {one: gpus_of(config, one)[1] for one in names}
    given = {number for numbers in named.values() for number in numbers}
    _refuse_others("workers.gpus", given, count)
    _refuse_others("trainer.gpus", set(config.trainer.gpus), count)
    if given:
        places, per_gpu = len(given), max(Counter(named.values()).values())
    else:
        wanted = len(names) * config.workers.vllm.gpus
        places = min(wanted, max(1, count - 1))
        per_gpu = math.ceil(wanted / max(1, places))
    left = count - places
    overlap = bool(given & set(config.trainer.gpus))
    return Placement(
        workers=len(names),
        worker_gpus=places,
        per_gpu=per_gpu,
        trainer_gpus=len(config.trainer.gpus) or max(1, left),
        shared=bool(names) and (left < 1 or overlap),
    )


def _refuse_others(key: str, numbers: set[int], count: int) -> None:
    odd = sorted(one for one in numbers if one >= count)
    if odd:
        raise UsageError(
            f"{key}: there is no GPU {odd[0]} among {count}",
            hint="they are counted from 0; --gpus says how many there are",
        )


# A worker.


def kv_token_bytes(shape: ModelShape, config: Config) -> int:
    """Of one token in the KV cache of an engine on a GPU."""
    return shape.kv_values * WIDTHS[config.workers.vllm.dtype]


def worker_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    """Of one worker with vLLM, on its GPU, or on each of them."""
    workers, many = config.workers, config.workers.vllm.gpus
    width, slots = WIDTHS[workers.vllm.dtype], workers.slots
    block = BLOCK_TOKENS["cuda"]
    slot = math.ceil(workers.context_tokens / block) * block
    held = int(workers.vllm.kv_gb * 2**30) or slots * slot * kv_token_bytes(shape, config)
    stages = workers.vllm.pipeline_parallel
    ends = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    layers = math.ceil(shape.layers / stages)  # The first and the last have an end as well.
    stage = (shape.parameters - ends) * layers // shape.layers
    stage += ends if stages == 1 else shape.vocabulary * shape.hidden
    parts = [MemoryPart("weights of one version", stage * width // workers.vllm.tensor_parallel)]
    if config.lora.rank:
        resident = versions_resident(config)
        parts.append(
            MemoryPart(f"{resident} adapters resident", resident * _adapter(shape, config) * 4)
        )
    tokens = STEP_TOKENS_MAX + slots
    step = tokens * _working(shape, width) + 2 * slots * shape.vocabulary * 4
    return [
        *parts,
        MemoryPart(f"KV cache, {slots} slots of {workers.context_tokens} tokens", held // many),
        MemoryPart(f"a step of {tokens} tokens and logits of {slots}", step),
        MemoryPart("largest tensor, while a version loads", shape.largest * 4),
    ]


def slots_that_fit(shape: ModelShape, config: Config, room: int) -> int:
    """Slots with whole contexts that one worker can have in so many bytes; 0: not one."""
    workers = msgspec.structs.replace(config.workers.vllm, kv_gb=0.0)

    def taken(slots: int) -> int:
        one = msgspec.structs.replace(config.workers, vllm=workers, slots=slots)
        return parts_bytes(worker_parts(shape, msgspec.structs.replace(config, workers=one)))

    first, each = taken(1), taken(2) - taken(1)
    return max(0, (room - first) // each + 1)


def host_worker_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    """Of one worker with the own engine, in the host's memory."""
    workers = config.workers
    cache = workers.slots * workers.context_tokens * shape.kv_values * 4
    return [
        MemoryPart("weights, float32", shape.parameters * 4),
        MemoryPart("KV cache, twice for its pools", 2 * cache),
        MemoryPart("kept prefixes, workers.kv_keep", int(workers.kv_keep * cache)),
    ]


# The trainer.


def trained(shape: ModelShape, config: Config) -> int:
    """Parameters that are trained: the adapter's, or all."""
    return _adapter(shape, config) if config.lora.rank else shape.parameters


def _adapter(shape: ModelShape, config: Config) -> int:
    return config.lora.rank * sum(shape.linears[one] for one in config.lora.targets)


def state_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    """What a trainer holds on one GPU between two passes."""
    deepspeed = config.trainer.kind == "deepspeed"
    parts = _zero_parts(shape, config) if deepspeed else _torch_parts(shape, config)
    if config.objective.kl and not config.lora.rank:
        parts.append(MemoryPart("version 0 for the KL, float32", 4 * shape.parameters))
    if config.trainer.parts > 1 and config.trainer.minibatches > 1:
        bytes_ = 14 if _remainders(shape, config) else 12
        parts.append(
            MemoryPart("copy for parts that are updates", _spread(shape, config, bytes_, 1))
        )
    return [one for one in parts if one.bytes]


def _remainders(shape: ModelShape, config: Config) -> bool:
    """Whether masters are numbers in bfloat16 and remainders."""
    return published_dtype(config, shape.dtype) == "bfloat16"


def _torch_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    count = trained(shape, config)
    return [
        MemoryPart(
            f"base, {'bfloat16' if _remainders(shape, config) else 'float32'}",
            _frozen_width(shape, config) * _frozen(shape, config),
        ),
        MemoryPart("a tensor of it, widened", _widened(shape, config)),
        MemoryPart("weights, float32", 4 * count),
        MemoryPart("remainders of masters", 2 * count if _remainders(shape, config) else 0),
        MemoryPart("gradients", 4 * count),
        MemoryPart("moments of the optimizer", _moment_bytes(shape, config)),
    ]


def _moment_bytes(shape: ModelShape, config: Config) -> int:
    """Two numbers a parameter; one of Muon's matrices, and two of eight bits each, with a scale for
    every 256 of them, of all but the embedding."""
    count, optimizer = trained(shape, config), config.trainer.optimizer
    if optimizer == "muon":
        return 8 * count - 4 * shape.hidden_matrices
    if optimizer == "adamw8bit":
        table = 0 if config.lora.rank else shape.vocabulary * shape.hidden
        return 8 * table + _ceil(2 * (256 + 4) * (count - table), 256)
    return 8 * count


def _frozen(shape: ModelShape, config: Config) -> int:
    """Parameters of what an adapter stands on."""
    return shape.parameters if config.lora.rank else 0


def _frozen_width(shape: ModelShape, config: Config) -> int:
    """Bytes of each, which are those of what is published, or of what DeepSpeed computes in."""
    return 2 if _remainders(shape, config) else _held_width(config)


def _widened(shape: ModelShape, config: Config) -> int:
    """Bytes of the float32 copy that a pass makes of one tensor of the base at a time."""
    narrow = _frozen(shape, config) and _remainders(shape, config)
    return 4 * shape.largest if narrow and config.trainer.dtype == "float32" else 0


def _shards(config: Config, stage: int) -> int:
    """Among how many ranks something is spread that is so from this stage on."""
    trainer = config.trainer
    spread = trainer.kind == "deepspeed" and trainer.zero_stage >= stage
    return trainer.ranks if spread else 1


def _on_a_rank(shape: ModelShape, config: Config) -> int:
    """Parameters that are trained on a rank and on those that have the same experts."""
    return trained(shape, config) - (0 if config.lora.rank else _dealt_away(shape, config))


def _dealt_away(shape: ModelShape, config: Config) -> int:
    """Parameters of the experts that other ranks have, and this one has not."""
    dealt = config.trainer.expert_parallel
    return shape.expert_matrices * (dealt - 1) // dealt


def _weights(shape: ModelShape, config: Config) -> int:
    """Bytes of weights on a rank; what is frozen beside an adapter is dealt as well."""
    frozen, shards = _frozen(shape, config), _shards(config, 3)
    here = frozen - _dealt_away(shape, config) if frozen and shards == 1 else frozen
    held = _ceil(_frozen_width(shape, config) * here, shards)
    return _spread(shape, config, WIDTHS[config.trainer.dtype], 3) + held


def _spread(shape: ModelShape, config: Config, width: int, stage: int) -> int:
    """Bytes on a rank of so many for each parameter that is trained, spread from this stage on.
    Then experts are so over fewer ranks, by as much as each of these has fewer of them."""
    shards = _shards(config, stage)
    count = trained(shape, config) if shards > 1 else _on_a_rank(shape, config)
    return _ceil(width * count, shards)


def _zero_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    """ZeRO's sums (arXiv 1910.02054, section 5) with float32 masters, which stage 0 has not."""
    trainer, count = config.trainer, _on_a_rank(shape, config)
    width, stage = WIDTHS[trainer.dtype], trainer.zero_stage
    here = trainer.offload == "none"
    frozen, narrow = _frozen(shape, config), _frozen_width(shape, config)
    weights = _weights(shape, config)
    live = min(LIVE_ELEMENTS, count + frozen) * (narrow if frozen else width)
    whole = stage < 2 and here
    halves = 2 if trainer.dtype == "bfloat16" and stage == 1 else 0  # bfloat16 beside float32
    gradients = (4 + halves) * count if whole else _spread(shape, config, 4, 2) if here else 0
    remainders = 2 if here and _remainders(shape, config) else 0
    return [
        MemoryPart("weights", 0 if trainer.offload == "all" else weights),
        MemoryPart("weights that are gathered", live if stage == 3 else 0),
        MemoryPart("a tensor of the base, widened", _widened(shape, config)),
        MemoryPart("masters, float32", _spread(shape, config, 4, 1) if stage and here else 0),
        MemoryPart("remainders of masters", _spread(shape, config, remainders, 1)),
        MemoryPart("gradients", gradients),
        MemoryPart("moments of the optimizer", _spread(shape, config, 8, 1) if here else 0),
        MemoryPart("buckets", 2 * min(BUCKET_ELEMENTS, count) * 4 if trainer.ranks > 1 else 0),
    ]


def host_trainer_bytes(shape: ModelShape, config: Config) -> int:
    """What all ranks together hold in the host's memory. When they start that is one layer of each
    kind, and below stage 3 what a rank keeps; of the torch trainer the network."""
    trainer, count = config.trainer, trained(shape, config)
    made = 2 if _widened(shape, config) else 4  # What a base is held in while it is made.
    start = made * shape.parameters
    if trainer.kind == "deepspeed":
        kept = _weights(shape, config) if trainer.zero_stage < 3 else 0
        start = _ranks(config) * (made * shape.layer_kinds + kept)
    held = 18 if _remainders(shape, config) else 16
    offloaded = 0 if trainer.offload == "none" else held * count
    width = _frozen_width(shape, config) if config.lora.rank else WIDTHS[trainer.dtype]
    weights = width * shape.parameters if trainer.offload == "all" else 0
    if trainer.offload_between_steps:
        offloaded = max(offloaded, _ranks(config) * parts_bytes(state_parts(shape, config)))
    inputs = (
        _ranks(config) * pass_tokens(config) * shape.layers * shape.hidden * _held_width(config)
    )
    return max(start, offloaded + weights + (inputs if trainer.activation_offload else 0))


def _ranks(config: Config) -> int:
    return config.trainer.ranks if config.trainer.kind == "deepspeed" else 1


def _width(config: Config) -> int:
    """Bytes of a number in a product of a pass."""
    return WIDTHS[config.trainer.dtype]


def _held_width(config: Config) -> int:
    """Bytes of a number of weights, and of what layers add up: torch's autocast has float32 there,
    whatever products are computed in."""
    return _width(config) if config.trainer.kind == "deepspeed" else 4


def pass_tokens(config: Config) -> int:
    """Padded tokens of the largest pass."""
    return config.trainer.micro_batch_tokens


def pass_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    """What forward and backward of one pass take beside the state, on one GPU."""
    trainer, tokens = config.trainer, pass_tokens(config)
    width, held = _width(config), _held_width(config)
    chunk = mlp_chunk(shape, config)
    outside = (2 if chunk else 3) * shape.hidden * held
    saved = tokens * (_layers_saved(shape, config) + outside)
    again = trainer.gradient_checkpointing
    layer = tokens * (max(_layers(shape, config)) if again else 0)
    if chunk:
        # Its input is there anyway, where it is computed again.
        beside = (1 if again else 2) * shape.hidden * held
        layer += tokens * beside + chunk * _chunk_inside(shape, width)
    else:
        layer += tokens * _working(shape, width)
    parts = [
        MemoryPart(f"activations of {tokens} tokens", saved),
        MemoryPart("scores of attention, at most", score_bytes(shape, config)),
        MemoryPart("weights, bfloat16 for its products", cast_bytes(shape, config)),
        MemoryPart("mask or copies for packed lines, at most", mask_bytes(shape, config)),
        MemoryPart("head and logits", head_bytes(shape, config)),
        MemoryPart("a layer, on the way back", layer),
    ]
    return [one for one in parts if one.bytes]


def pass_peak(shape: ModelShape, config: Config) -> int:
    """Most that a pass takes at one moment: gradients go through the head, then through layers."""
    *held, head, layer = pass_parts(shape, config)
    return parts_bytes(held) + max(head.bytes, layer.bytes)


def head_bytes(shape: ModelShape, config: Config) -> int:
    """Copies of logits while gradients go back through the head."""
    tokens, vocabulary = pass_tokens(config), shape.vocabulary
    asked = config.trainer.head_chunk_tokens
    chunk = max(1, HEAD_ELEMENTS // vocabulary) if asked == "auto" else asked
    if not chunk or chunk >= tokens:
        return COPIES_AT_ONCE * tokens * vocabulary * 4
    return COPIES_IN_CHUNKS * chunk * vocabulary * 4


def mask_bytes(shape: ModelShape, config: Config) -> int:
    """What attention of packed lines takes beside itself: a mask, or where a GPU computes each
    sequence by itself, copies of the gradient by queries, which is deterministic so."""
    trainer, tokens = config.trainer, pass_tokens(config)
    if not trainer.packing:
        return 0
    if trainer.device == "cpu" or _width(config) == 4:
        return 5 * tokens * min(config.workers.context_tokens, tokens // 2)
    copies = -(-MULTIPROCESSORS // (2 * shape.attention.heads))  # Of two sequences; of more, fewer.
    return 4 * copies * tokens * shape.attention.queries


def score_bytes(shape: ModelShape, config: Config) -> int:
    """Scores of attention: none are kept, but in float32 where several heads share keys and values,
    for which torch has no such kernel on a GPU."""
    attention, trainer = shape.attention, config.trainer
    if trainer.device == "cpu" or _width(config) < 4 or attention.keys == attention.queries:
        return 0
    tokens = pass_tokens(config)
    one = attention.heads * tokens * min(tokens, config.workers.context_tokens) * 4
    others = 0 if trainer.gradient_checkpointing else shape.layers - 1
    return (others + SCORE_COPIES) * one


def cast_bytes(shape: ModelShape, config: Config) -> int:
    """What torch's autocast multiplies with in place of float32 weights, kept while a pass lasts;
    a base in bfloat16 is taken as it is."""
    if config.trainer.kind == "deepspeed" or _width(config) == 4:
        return 0
    if config.lora.rank and _remainders(shape, config):
        return 2 * trained(shape, config)
    embedding = 0 if shape.tied else shape.vocabulary * shape.hidden
    return 2 * (shape.parameters - embedding)


def update_bytes(shape: ModelShape, config: Config) -> int:
    """Copies of what is updated: torch's trainer goes tensor by tensor, DeepSpeed's AdamW takes all
    of a rank at once."""
    if config.trainer.offload != "none":
        return 0
    whole = _spread(shape, config, 4, 1)
    if config.trainer.kind == "deepspeed":
        return whole
    return min(whole, UPDATE_COPIES * 4 * shape.largest_trained)


def trainer_bytes(shape: ModelShape, config: Config) -> int:
    """Most that a trainer takes of one GPU."""
    peak = max(pass_peak(shape, config), update_bytes(shape, config))
    return parts_bytes(state_parts(shape, config)) + peak


def _layers_saved(shape: ModelShape, config: Config) -> int:
    """Bytes per token that all layers hold for the way back."""
    if config.trainer.activation_offload:
        return 0
    if config.trainer.gradient_checkpointing:
        return shape.layers * shape.hidden * _held_width(config)
    return sum(_layers(shape, config))


def mlp_chunk(shape: ModelShape, config: Config) -> int:
    """Tokens that a dense block and the norms see at once; 0: all of a pass."""
    width = max((one.width for one in shape.blocks if not one.experts), default=0)
    tokens, asked = pass_tokens(config), config.trainer.mlp_chunk_tokens
    if not width or config.trainer.chunks_refused:
        return 0
    width = max(width, shape.hidden)
    fit = max(1, MLP_ELEMENTS // width) if tokens * width > MLP_ELEMENTS_MIN else 0
    chunk = fit if asked == "auto" else asked
    return chunk if chunk < tokens else 0


def _chunk_inside(shape: ModelShape, width: int) -> int:
    """Bytes per token of a chunk, while it is computed again: what its block saves, and as much
    again of gradients; what it is cut from is counted by the whole."""
    widest = max(one.width for one in shape.blocks if not one.experts)
    return width * 8 * widest


def _layers(shape: ModelShape, config: Config) -> list[int]:
    """Bytes per token that autograd saves in each layer of transformers' decoders."""
    width, held = _width(config), _held_width(config)
    norms = _norms_saved(shape, width, held, cut=mlp_chunk(shape, config) > 0)
    return [norms + _block_saved(shape, block, config) for block in shape.blocks]


def _norms_saved(shape: ModelShape, width: int, held: int, *, cut: bool) -> int:
    """Of each of two norms its input in float32, the scaled and the weighed, as it is multiplied
    with; where layers are `cut` into chunks the input and what is made of it."""
    each = held + width if cut else 4 + held + width
    return 2 * shape.hidden * each + shape.attention.normed * (4 + width)


def _block_saved(shape: ModelShape, block: Block, config: Config) -> int:
    """Queries, keys, values and their result; in a gated block gate, its activation, up and their
    product, but nothing of a dense one that is cut into chunks."""
    attention, cut = shape.attention, mlp_chunk(shape, config) > 0
    kept = attention.queries + attention.keys + attention.values + attention.out
    dense = 0 if cut and not block.experts else 4 * block.width
    gated = dense + block.per_token * (4 * block.expert_width + 2 * shape.hidden)
    return _width(config) * (kept + gated) + 4 * block.experts


def _working(shape: ModelShape, width: int) -> int:
    """Bytes per token of the gradients that a layer's block holds at once."""
    widest = max(one.width + one.per_token * one.expert_width for one in shape.blocks)
    return width * (4 * widest + 2 * shape.hidden)


def parts_bytes(parts: Sequence[MemoryPart]) -> int:
    """Of all of them together."""
    return sum(one.bytes for one in parts)


def _ceil(bytes_: int, count: int) -> int:
    return -(-bytes_ // count)


# Versions.


def version_parts(shape: ModelShape, config: Config) -> list[MemoryPart]:
    """Files of the policy in the store."""
    dtype = published_dtype(config, shape.dtype)
    count = trained(shape, config)
    whole = WIDTHS[dtype] * count
    # Where nearly all of it changes a patch is the whole again.
    patch = int(PATCHED_SHARE * count * PATCH_BYTES) if dtype == "bfloat16" else whole
    every, checkpoint = whole_every(config, dtype), config.trainer.checkpoint_every
    keep = keep_every(config, dtype, whole)
    stay = _kept_versions(every, checkpoint, keep)
    wholes = sum(_is_whole(version, every, checkpoint) for version in stay)
    patches = len(stay) * patch if every > 1 else 0
    states = sum(version % checkpoint == 0 for version in stay - {0})
    state = checkpoint_bytes(count, remainders=_remainders(shape, config))
    return [
        MemoryPart(f"a version, {dtype}", whole),
        MemoryPart("a patch, where 3 % changed", patch if every > 1 else 0),
        MemoryPart("a checkpoint of the optimizer", state),
        MemoryPart(
            f"of {VERSIONS} versions, whole_every = {every}, keep_every = {keep}: {len(stay)}",
            wholes * whole + patches,
        ),
        MemoryPart(f"their checkpoints of the optimizer: {states}", states * state),
    ]


def _kept_versions(every: int, checkpoint: int, keep: int) -> set[int]:
    """Versions whose files are there at the end of a run: those that stay, with `keep_every`, and
    what they are made of by patches."""
    some = Blob(sha256="", bytes=0)
    commits = [None if version % checkpoint else some for version in range(1, VERSIONS)]
    stay = retained(commits, {VERSIONS - 1}, keep)
    return made_of(stay, lambda version: _is_whole(version, every, checkpoint))


def _is_whole(version: int, every: int, checkpoint: int) -> bool:
    return version % every == 0 or version % checkpoint == 0
