"""DeepSpeed engine around a causal LM.

ZeRO shards float32 weights and moments; tensors enter and leave whole, one at a time. Ranks make
collective calls in the same order. No meta device: probes compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dora_pipe.config.section import ComputeDtype
from dora_pipe.consumers.learners.deepspeed import import_deepspeed
from dora_pipe.consumers.learners.deepspeed.dealt_experts import DealtExperts, crossed
from dora_pipe.consumers.learners.torch.chunked_layers import mlp_width
from dora_pipe.consumers.learners.torch.device_states import tensors_in
from dora_pipe.consumers.learners.torch.lora import LoraOptions, Pairs
from dora_pipe.consumers.learners.torch.masters import Masters
from dora_pipe.consumers.learners.torch.memory import AT_ONCE, MemoryOptions, UnassignedRows
from dora_pipe.consumers.learners.torch.model import Passage, score
from dora_pipe.consumers.learners.torch.named_optimizers import MOMENTS
from dora_pipe.consumers.learners.torch.narrow_weights import NarrowWeights
from dora_pipe.consumers.learners.torch.network import SharedMemory, build, head_is_all
from dora_pipe.consumers.learners.torch.optimizer import REMAINDER, decay_groups
from dora_pipe.consumers.learners.torch.packed_attention import Cuts, goes_by_sequences, need_apart
from dora_pipe.consumers.learners.torch.routing import BalanceLoss, RoutedExperts
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.carried_tensors import further_layers
from dora_pipe.store.network_names import Piece, pieces, untied

Moment = Literal["exp_avg", "exp_avg_sq", "remainder"]
"""Checkpoint tensors of a weight."""

BUCKET_ELEMENTS: Final = {"cpu": 1_000_000, "cuda": 50_000_000}
"""Bucket elements, constant because sums depend on them. DeepSpeed's default fills 2 GB each:
seconds per step on a CPU.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine; see `dora_pipe.config.training.Trainer`."""

    zero_stage: int = 2
    offload: Literal["none", "optimizer", "all"] = "none"
    dtype: ComputeDtype = "float32"
    published: PolicyDtype = "float32"
    """Published dtype (`policies.dtype`); passes use the published values."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    device: str = "cpu"
    lora: LoraOptions | None = None
    temperature: float = 1.0
    memory: MemoryOptions = AT_ONCE
    routes: bool = False
    router_aux_loss: float = 0.0
    expert_parallel_size: int = 1
    """Ranks that share a layer's experts; divides ranks and experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """This rank's shard of a parameter's float32 state."""

    flat: Tensor
    at: int
    start: int
    elements: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the shard of a tensor laid out as `flat`."""
        return tensor.narrow(0, self.at, self.elements)


class _Scored(torch.nn.Module):
    """Module with log-probs inside `forward`, which ZeRO hooks."""

    def __init__(
        self,
        network: Any,
        pairs: Pairs | None,
        options: EngineOptions,
        *,
        lean: bool,
        narrow: NarrowWeights | None,
        dealt: DealtExperts | None,
    ) -> None:
        super().__init__()
        self.options = options
        self.experts = None if dealt is None else dealt.mark
        self.network = network
        self.pairs = pairs
        self.lean = lean
        self.narrow = narrow

    def forward(
        self,
        ids: Tensor,
        places: Tensor,
        targets: Tensor,
        positions: Tensor | None,
        cuts: Cuts | None = None,
    ) -> Tensor:
        with nullcontext() if self.narrow is None else self.narrow.kept_narrow():
            return score(
                self.network,
                ids,
                places,
                targets,
                lean=self.lean,
                temperature=self.options.temperature,
                chunks=self._chunks(len(targets)),
                positions=positions,
                cuts=cuts,
            )

    def _chunks(self, tokens: int) -> int:
        """Equal on all ranks under ZeRO 3, which gathers the head per chunk."""
        options = self.options
        count = options.memory.head_chunks(tokens, self.network.config.vocab_size)
        if options.zero_stage < 3 or not options.memory.head_chunk_tokens:
            return count
        most = torch.tensor(count, device=options.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)


class Engine:
    """DeepSpeed engine; construction is collective."""

    def __init__(self, assets: Path, options: EngineOptions) -> None:
        self.options = options
        narrow = NarrowWeights() if _holds_narrow(options) else None
        network = build(assets, options.memory, narrow, SharedMemory())
        buffers = {id(module): dict(module._buffers) for module in network.modules()}
        lean = head_is_all(network, "cpu")
        if options.memory.packing:
            need_apart(network, "cpu")
        self.varlen = options.memory.packing and goes_by_sequences(
            network, options.dtype, options.device
        )
        # Probes below need full weights; not collective.
        self._routed = RoutedExperts(network) if options.routes else None
        self._balance = BalanceLoss(network) if options.router_aux_loss else None
        self.pairs = None if options.lora is None else Pairs(network, options.lora)
        self.vocabulary: int = network.config.vocab_size
        self.unassigned: UnassignedRows = network.unassigned
        self.mlp_width = mlp_width(network)
        self.further = further_layers(network.config.get_text_config().to_dict())
        """Layers in files only."""
        checkpoint_pieces = pieces(network)
        adapter = {
            name: Piece(name, tuple(parameter.shape), tuple(parameter.stride()))
            for name, parameter in _named(self.pairs).items()
        }
        self.files: dict[str, Piece] = checkpoint_pieces if self.pairs is None else adapter
        """Stored tensors, or those of the adapter's base, by file name, sorted."""
        self.base_files: dict[str, Piece] = {} if self.pairs is None else checkpoint_pieces
        deepspeed = import_deepspeed(options.device)
        many = options.expert_parallel_size
        self._dealt = DealtExperts(network, many) if many > 1 else None
        module = _Scored(network, self.pairs, options, lean=lean, narrow=narrow, dealt=self._dealt)
        stored = _stored(network, self.pairs)
        self.names: tuple[str, ...] = tuple(stored)
        """Network names of stored tensors, sorted."""
        parameters = [
            parameter for parameter in stored.values() if isinstance(parameter, torch.nn.Parameter)
        ]
        groups = decay_groups(parameters, options.weight_decay)
        groups = groups if self._dealt is None else self._dealt.groups(groups)
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=options.betas)
        self._engine = _initialized(deepspeed, module, self._adamw, options)
        self._zero: Any = self._engine.optimizer
        # Conversion to bfloat16 would round rotary buffers.
        for inner in network.modules():
            for name, buffer in buffers[id(inner)].items():
                if buffer is not None:
                    inner._buffers[name] = buffer.to(options.device)
        self._stored = _stored(network, self.pairs)
        self._base: dict[str, Any] = {} if self.pairs is None else untied(network)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._shards = {name: self._shard(parameter) for name, parameter in self.parameters()}
        self._extents = self._extents_by_rank()
        self._flats = {str(id(shard.flat)): shard.flat for shard in self._shards.values()}
        self._narrow = options.published == "bfloat16"
        self._masters = Masters(self._flats if self._narrow else {})
        self.reset_moments()

    @property
    def base_names(self) -> tuple[str, ...]:
        return tuple(self._base)

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield trained parameters by name, sorted."""
        for name, tensor in self._stored.items():
            if isinstance(tensor, torch.nn.Parameter):
                yield name, tensor

    # Training step

    def logprobs(self, passage: Passage) -> Tensor:
        """Return log-probs of the counted tokens, [N] float32; collective under ZeRO 3. Raises
        PolicyError."""
        if self._routed is not None:
            self._routed.take(passage.routes)
        given = (passage.ids, passage.places, passage.targets, passage.positions)
        # A keyword: ZeRO 3 supports only tensors as positional arguments.
        output: Tensor = self._engine(*given, cuts=passage.cuts if self.varlen else None)
        return output

    def logprobs_and_balance(
        self, passage: Passage, weights: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs, and the weighted load-balancing losses."""
        assert self._balance is not None, "the engine has no router loss"
        return self._balance.beside(lambda: self.logprobs(passage), passage.spans, weights)

    def logprobs_instead(self, passage: Passage, matrices: Mapping[str, Tensor]) -> Tensor:
        """Return log-probs with another adapter, or none; collective."""
        assert self.pairs is not None, "whole weights have no base"
        with torch.no_grad(), self.pairs.instead(matrices):
            return self.logprobs(passage)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this rank's gradient; collective. `last`: an update follows.

        Scaled by the ranks: DeepSpeed averages gradients, but losses add up.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks, scale_wrt_gas=False)

    def update(self, learning_rate: float, norm_max: float, divisor: float = 1.0) -> float:
        """Divide, clip and update; return the norm before clipping, possibly not finite.
        Collective."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        with self._masters.present():
            norm = self._step(norm_max, divisor)
        if self._narrow:  # ZeRO's copies of the masters must be rounded too.
            for weight in self.weights():
                weight.copy_(weight.to(torch.bfloat16))
        return norm

    def _step(self, norm_max: float, divisor: float) -> float:
        if self.options.zero_stage == 0:
            own = [parameter for _, parameter in self.parameters()]
            for parameter in own:
                if divisor != 1 and parameter.grad is not None:
                    parameter.grad.div_(divisor)
            norm = self._clip(own, norm_max)
            self._engine.step()
            return norm
        self._zero.clip_grad = norm_max
        self._zero.loss_scale = divisor  # makes ZeRO divide the gradients
        self._engine.step()
        self._zero.loss_scale = 1.0
        norm = float(self._engine.get_global_grad_norm())
        return norm if norm >= 0.0 else math.inf  # DeepSpeed returns -1 if it is not finite

    def _clip(self, own: Sequence[Tensor], norm_max: float) -> float:
        """Clip gradients; return the norm including other ranks' experts."""
        dealt = [parameter for parameter in own if self._dealt and self._dealt.is_dealt(parameter)]
        if self._dealt is None or not dealt:
            return float(torch.nn.utils.clip_grad_norm_(own, norm_max))
        shared = [parameter for parameter in own if not self._dealt.is_dealt(parameter)]
        squares = self._dealt.square_norm(
            [parameter.grad for parameter in dealt if parameter.grad is not None]
        )
        norms = [parameter.grad.norm() for parameter in shared if parameter.grad is not None]
        norm = (torch.stack(norms).square().sum() + squares).sqrt()
        torch.nn.utils.clip_grads_with_norm_(own, norm_max, norm)
        return float(norm)

    # Weights and moments, tensor by tensor

    @property
    def updates(self) -> int:
        """Return the number of updates since the state was empty."""
        for state in self._adamw.state.values():
            return int(state["step"])
        return 0

    def read(self, name: str, moment: Moment | None = None) -> Tensor:
        """Return a tensor as stored, or a moment; complete on rank 0 only; collective."""
        tensor, shard = self._stored[name], self._shards.get(name)
        gathered, options = tensor.detach(), self.options
        beside = moment is None and options.zero_stage < 3 and options.dtype == "float32"
        if shard is not None and (not beside or tuple(gathered.shape) != self.shape(name)):
            gathered = self._gathered(name, shard.of(self._within(shard, moment)).detach())
        return gathered.to(self.stored_dtype(name, moment))

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        extents, shape, zeros = self._extents[name], self.shape(name), [0] * (self._ranks - 1)
        sizes = [elements for _, elements in extents]
        mine = part[: sizes[self._rank]].to(self.options.device)
        if sizes[0] < math.prod(shape):
            arriving = [0, *zeros] if self._rank else sizes
            mine = crossed(mine.unsqueeze(1), [len(mine), *zeros], arriving, None).flatten()
        if self._rank:
            return mine
        order = sorted(range(self._ranks), key=lambda rank: extents[rank][0])
        if order != sorted(order):
            parts = torch.split(mine, sizes)
            mine = torch.cat([parts[rank] for rank in order])
        return mine.reshape(shape)

    def _extents_by_rank(self) -> dict[str, list[list[int]]]:
        """Return start and size of each rank's part, by tensor; duplicates count once.
        Collective."""
        extents = [self._extent(*shard) for shard in self._shards.items()]
        own = torch.tensor(extents, device=self.options.device).reshape(-1)
        gathered = own.new_empty(self._ranks * len(own))
        dist.all_gather_single(gathered, own)
        by_rank = gathered.reshape(self._ranks, -1, 2)
        return dict(zip(self._shards, by_rank.transpose(0, 1).tolist(), strict=True))

    def _extent(self, name: str, shard: _Shard) -> tuple[int, int]:
        tensor, first = self._stored[name], self._rank == 0
        start, size = shard.start, _size(tensor)
        if self._dealt is not None and self._dealt.is_dealt(tensor):
            start, first = self._dealt.rank * size + start, self._dealt.is_first
        if self.options.zero_stage == 0 and not first:
            return start, 0
        return start, max(0, min(shard.elements, size - shard.start))

    def read_files(self) -> Iterator[Tensor]:
        """Yield every tensor of `files`, gathering each network tensor once; collective."""
        last = {piece.name: name for name, piece in self.files.items()}
        held: dict[str, Tensor] = {}
        for name, piece in self.files.items():
            if piece.name not in held:
                held[piece.name] = self.read(piece.name)
            view: Tensor = held[piece.name] if self._rank else piece.of(held[piece.name])
            if last[piece.name] == name:
                del held[piece.name]
            yield view

    def write(self, name: str, value: Tensor, moment: Moment | None = None) -> None:
        """Store this rank's shard of a full tensor."""
        tensor, shard = self._tensor(name), self._shards.get(name)
        if self._dealt is not None and self._dealt.is_dealt(tensor):
            value = self._dealt.part_of(value)
        with torch.no_grad():
            if shard is None:
                self._write_whole(tensor, value)
                return
            part = _part(value, shard.start, shard.elements)
            shard.of(self._within(shard, moment)).copy_(part)
            if moment is not None:
                return
            if self.options.zero_stage < 3:
                tensor.data.copy_(value)
            else:
                tensor.ds_tensor.data.copy_(part)

    def _write_whole(self, tensor: Any, value: Tensor) -> None:
        held = getattr(tensor, "ds_tensor", None)
        if held is None:
            tensor.copy_(value)
        else:
            count = held.numel()
            held.data.copy_(_part(value, tensor.ds_zero_partition_rank * count, count))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape."""
        tensor = self._tensor(name)
        if self._dealt is not None and self._dealt.is_dealt(tensor):
            return self._dealt.whole_shape(_shape(tensor))
        return _shape(tensor)

    def dtype(self, name: str, moment: Moment | None = None) -> torch.dtype:
        """Return the transfer dtype: float32 if trained, else as held."""
        if moment == REMAINDER:
            return torch.int32  # gloo lacks int16
        dtype: torch.dtype = self._tensor(name).dtype
        return torch.float32 if name in self._shards else dtype

    def stored_dtype(self, name: str, moment: Moment | None = None) -> torch.dtype:
        if moment == REMAINDER:
            return torch.int16
        dtype = self.dtype(name, moment)
        narrow = self._narrow and moment is None and dtype.is_floating_point
        return torch.bfloat16 if narrow else dtype

    def _tensor(self, name: str) -> Any:
        return self._stored[name] if name in self._stored else self._base[name]

    @property
    def moments(self) -> list[tuple[Moment, str]]:
        """Return the checkpoint's moments, sorted by name."""
        pairs: list[tuple[Moment, str]] = []
        kept: tuple[Moment, ...] = ("exp_avg", "exp_avg_sq", "remainder")
        for moment in kept if self._narrow else kept[:2]:
            pairs += [(moment, name) for name in self._shards]
        return sorted(pairs, key=lambda pair: f"{pair[0]}/{pair[1]}")

    def close(self) -> None:
        self._engine.destroy()

    def resident(self) -> Iterator[Tensor]:
        """Yield this rank's device tensors between steps, after releasing gathered weights."""
        self.written()
        module = self._engine.module
        yield from tensors_in([*module.parameters(), *module.buffers()])
        yield from tensors_in(
            [getattr(parameter, "ds_tensor", ()) for parameter in module.parameters()]
        )
        yield from tensors_in(vars(self._zero))
        buckets = getattr(self._zero, "ipg_buckets", {})
        yield from tensors_in([vars(bucket) for bucket in buckets.values()])
        states = list(self._adamw.state.values())
        yield from tensors_in([states, self._flats, self._masters.remainders])

    def reset_moments(self, updates: int = 0) -> None:
        """Reset moments, with a given update count."""
        for remainder in self._masters.remainders.values():
            remainder.zero_()
        for flat in self._flats.values():
            state: dict[str, Tensor] = {"step": torch.tensor(float(updates))}
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(flat, memory_format=torch.preserve_format)
            self._adamw.state[flat] = state

    def fit(self) -> None:
        """Drop remainders that do not match the loaded weights."""
        self._masters.fit()

    def weights(self) -> list[Tensor]:
        """Return this rank's weights that log-probs use."""
        return [
            getattr(parameter, "ds_tensor", parameter).data for _, parameter in self.parameters()
        ]

    def written(self) -> None:
        """Invalidate weights prefetched by ZeRO 3, after writes."""
        if self.options.zero_stage == 3:
            self._zero.parameter_offload.partition_all_parameters()

    def held(self) -> list[Tensor]:
        """Return all tensors that an update changes on this rank."""
        weights = self.weights()
        for flat in self._flats.values():
            weights += [flat.data, *self._adamw.state[flat].values()]
        return [*weights, *self._masters.remainders.values()]

    def _within(self, shard: _Shard, moment: Moment | None) -> Tensor:
        if moment is None:
            return shard.flat.data.reshape(-1)
        if moment == REMAINDER:
            return self._masters.remainders[str(id(shard.flat))].reshape(-1)
        state: Tensor = self._adamw.state[shard.flat][moment].reshape(-1)
        return state

    def _shard(self, parameter: Any) -> _Shard:
        stage, zero = self.options.zero_stage, self._zero
        if stage == 0:
            return _Shard(flat=parameter, at=0, start=0, elements=parameter.numel())
        if stage == 3:
            group, start, elements = zero.grad_position[zero.get_param_id(parameter)]
            flat = zero.fp32_partitioned_groups_flat[group]
            rank = getattr(parameter, "ds_zero_partition_rank", self._rank)
            return _Shard(flat=flat, at=start, start=elements * rank, elements=elements)
        flats: Sequence[Tensor] = (
            zero.single_partition_of_fp32_groups
            if hasattr(zero, "single_partition_of_fp32_groups")
            else zero.fp32_groups_flat_partition
        )
        mapping = parameter._hp_mapping
        if mapping is None:
            return _Shard(flat=flats[0], at=0, start=0, elements=0)
        address, part = mapping.lp_fragment_address, mapping.hp_fragment_address
        return _Shard(
            flat=flats[mapping.param_group_index],
            at=part.start,
            start=address.start,
            elements=part.numel,
        )


def _initialized(
    deepspeed: Any, module: torch.nn.Module, adamw: torch.optim.AdamW, options: EngineOptions
) -> Any:
    """Parameters get own memory, or shards in stage 3, loaded later. Collective."""
    if options.zero_stage < 3:
        for parameter in module.parameters():
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
    else:
        zero = deepspeed.zero.Init(module=torch.nn.Module(), config_dict_or_path=_config(options))
        for parameter in module.parameters():
            if options.dtype == "bfloat16":
                parameter.data = parameter.data.to(torch.bfloat16)
            zero._convert_to_zero_parameters([parameter])
    return deepspeed.initialize(
        model=module, optimizer=adamw, config=_config(options), dist_init_required=False
    )[0]


def _holds_narrow(options: EngineOptions) -> bool:
    """Return whether we hold the frozen base in bfloat16; with bfloat16 passes ZeRO does."""
    return options.lora is not None and (options.published, options.dtype) == (
        "bfloat16",
        "float32",
    )


def _stored(network: Any, pairs: Pairs | None) -> dict[str, Tensor]:
    return untied(network) if pairs is None else _named(pairs)


def _named(pairs: Pairs | None) -> dict[str, Tensor]:
    return {} if pairs is None else dict(sorted(pairs.named()))


def _part(value: Tensor, start: int, elements: int) -> Tensor:
    flat = value.detach().reshape(-1)
    missing = start + elements - len(flat)
    if missing > 0:  # ZeRO 3 pads to equal shards
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat[start : start + elements]


def _size(tensor: Any) -> int:
    return math.prod(_shape(tensor))


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _config(options: EngineOptions) -> dict[str, Any]:
    """`Engine.backward` handles gradient accumulation."""
    device = options.device.partition(":")[0]
    bucket = BUCKET_ELEMENTS[device]
    zero: dict[str, Any] = {
        "stage": options.zero_stage,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        # Small parameters kept whole would miss writes to their shards.
        "stage3_param_persistence_threshold": 0,
        "stage3_model_persistence_threshold": 0,
    }
    there = {"device": "cpu", "pin_memory": device == "cuda"}
    if options.offload != "none":
        zero["offload_optimizer"] = there
    if options.offload == "all":
        zero["offload_param"] = there
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": options.dtype == "bfloat16"},
    }
    if options.dtype == "bfloat16":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
