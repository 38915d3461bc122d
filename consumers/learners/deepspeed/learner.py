"""DeepSpeed learner on rank 0: port methods as commands to all ranks.

Ranks and ZeRO stage set the summation order, so both are in the numerics fingerprint.
"""

from __future__ import annotations

import itertools
import math
import platform
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
import torch
import transformers
from torch import Tensor

from dora_pipe.consumers.learners.deepspeed.commands import (
    Finish,
    Gather,
    Keep,
    LeaveDevice,
    Load,
    LoadBase,
    Open,
    RankCommand,
    Read,
    Ready,
    StepReply,
    Train,
    UpdateReply,
    places_of,
    share_commands,
    shares,
)
from dora_pipe.consumers.learners.deepspeed.engine import Engine, EngineOptions
from dora_pipe.consumers.learners.deepspeed.rank import Rank, engine_options
from dora_pipe.consumers.learners.deepspeed.rank_group import rank_group
from dora_pipe.consumers.learners.learner import Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.parts import StepInParts
from dora_pipe.consumers.learners.settings import (
    MICRO_BATCH_TOKENS,
    PACKING,
    ROUTER_AUX_LOSS,
    StepSettings,
    step_settings,
)
from dora_pipe.consumers.learners.step import Pass, updates_of
from dora_pipe.consumers.learners.step_metrics import Sums, contribution, metrics_of
from dora_pipe.consumers.learners.torch.device import capability, compute_clock, device_class
from dora_pipe.consumers.learners.torch.lora import AdapterBase
from dora_pipe.consumers.learners.torch.model import (
    DTYPES,
    NAMES,
    need_fit,
    published_dtype,
    read_tensor,
    temperature_numerics,
    tensor_source,
)
from dora_pipe.consumers.learners.torch.optimizer import STEPS
from dora_pipe.consumers.learners.torch.routing import balance_numerics
from dora_pipe.consumers.objectives.registry import needs_reference
from dora_pipe.core.errors import InvariantBroken, PolicyError, ResourceError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.carried_tensors import CarriedTensors, carried_names
from dora_pipe.store.log_location import LogLocation
from dora_pipe.store.network_names import Piece
from dora_pipe.store.safetensors_file import (
    Entry,
    TensorSource,
    file_sources,
    manifest_in_memory,
    mapped,
    read_entries,
    write_tensors,
)
from dora_pipe.store.verified import need_digest

VERSION: Final = "1"
_NUMBERS = itertools.count(1)
_RETIRED: list[int] = []

_Command = TypeVar("_Command", bound=RankCommand)
_REPLY = msgspec.msgpack.Decoder(StepReply)
_READY = msgspec.msgpack.Decoder(Ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepspeedOptions:
    """Options fixed for a run; see `dora_pipe.config.training.Trainer`."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    ranks: int = 1
    micro_batch_tokens: int = 16384
    threads: int = 1
    device: str = "cpu"
    modules: str = ""


class DeepspeedLearner:
    """Learner on DeepSpeed; several ranks need logged batches (`TrainGroup.places`)."""

    name = "deepspeed"
    version = VERSION

    def __init__(
        self,
        assets: Path,
        *,
        reference: Path,
        log: LogLocation | None = None,
        options: DeepspeedOptions | None = None,
    ) -> None:
        """Raises PolicyError, ConfigError, ResourceError."""
        self._options = _publishing(options or DeepspeedOptions(), reference)
        self._group = rank_group(self._options.ranks, self._options.device)
        self._number = next(_NUMBERS)
        self._first = reference
        self._parts = StepInParts()
        self._one_by_one = threading.Lock()
        """Serializes collectives of several threads."""
        self._kept_updated = False
        self._referred = ""
        lora = self._options.engine.lora
        self._adapter_base = AdapterBase(reference, lora) if lora else None
        self._carried = CarriedTensors()
        command = self._send(
            Open,
            assets=str(assets),
            log=log,
            options=engine_options(self._options.engine),
            threads=self._options.threads,
            modules=self._options.modules,
        )
        self._rank = Rank(self._group, command)
        weakref.finalize(self, _retire, self._number, self._rank).atexit = False

    @property
    def _engine(self) -> Engine:
        return self._rank.engine

    def load(self, weights: Path, *, digest: str, optimizer: Path | None) -> None:
        need_digest(weights, digest)
        engine = self._options.engine
        if engine.lora is None and published_dtype(weights) != engine.published:
            raise PolicyError(f"{weights} has weights of another type than version 0")
        self._parts.loaded()
        moments: dict[str, Entry] = {}
        updates = 0
        if optimizer is not None:
            moments = self._state(optimizer)
            with mapped(optimizer) as data:
                updates = int(read_tensor(data, moments.pop(STEPS)))
        with self._trained(weights) as trained, mapped(optimizer or weights) as state:
            command = self._send(Load, moments=bool(moments), updates=updates)

            def given(name: str) -> Tensor:
                return read_tensor(state, moments[name]) if name in moments else trained(name)

            self._rank.load(command, given)

    def leave_device(self) -> None:
        """See `LeavesDevice`; on every rank."""
        with self._one_by_one:
            self._send(LeaveDevice)
            self._rank.leave_device()

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        if batch.parts:
            return self._parts.train(self, batch, settings)
        self._parts.forget(self)
        clock = self.stopwatch()
        start_s = clock()
        step = self.settings_of(settings)
        items, updates = updates_of(batch, step)
        shared = [self._shares(passes) for passes in updates if passes]
        sums = _sums(shared, self._run_step(Train, batch, settings, shared))
        self._note_updates(sums)
        return StepResult(
            metrics=metrics_of(items, sums, step),
            contributions=[contribution(item) for item in items],
            compute_s=clock() - start_s,
        )

    def train_part(self, batch: TrainBatch, settings: Settings) -> None:
        """See `TrainsParts`. Raises NonFinite, InvariantBroken, ResourceError."""
        with self._one_by_one:
            self._parts.add(self, batch, settings)

    def stopwatch(self) -> Callable[[], float]:
        return compute_clock(self._group.device, self._options.threads)

    def settings_of(self, settings: Settings) -> StepSettings:
        return step_settings(self._settings(settings))

    def _settings(self, settings: Settings) -> dict[str, Any]:
        options = self._options
        own = {
            MICRO_BATCH_TOKENS: options.micro_batch_tokens,
            PACKING: options.engine.memory.packing,
            ROUTER_AUX_LOSS: options.engine.router_aux_loss,
        }
        return {**own, **settings}

    def gather(
        self, part: TrainBatch, passes: Sequence[Pass], settings: Settings, *, before: int
    ) -> Sums:
        shared = self._shares(passes)
        gathered = self._run_step(Gather, part, settings, [shared], fresh=not before)
        replies = [reply.updates[0] for reply in gathered]
        numbered = [
            [replace(pass_, number=before + pass_.number) for pass_ in own] for own in shared
        ]
        _note_rows(numbered, replies)
        return Sums(
            loss=_added([reply.loss for reply in replies]),
            router_aux=_added([reply.router_aux for reply in replies]),
            padded_tokens=sum(reply.padded_tokens for reply in replies),
            passes=sum(map(len, shared)),
        )

    def finish(self, divisor: int, step: StepSettings, sums: Sums) -> None:
        """See `ComputesParts`. Raises NonFinite."""
        command = self._send(
            Finish,
            divisor=divisor,
            learning_rate=step.learning_rate,
            max_grad_norm=step.max_grad_norm,
        )
        sums.note_update(self._rank.finish(command))
        self._note_updates(sums)

    def update(
        self, part: TrainBatch, passes: Sequence[Pass], settings: Settings, *, later: bool
    ) -> Sums:
        """See `ComputesParts`. Raises NonFinite."""
        shared = [self._shares(passes)]
        sums = _sums(shared, self._run_step(Train, part, settings, shared, later=later))
        self._note_updates(sums)
        return sums

    def keep(self) -> None:
        self._keep("take")
        self._kept_updated = self._adapter_base is not None and self._adapter_base.updated

    def restore_copy(self) -> None:
        self._keep("go-back")
        if self._adapter_base is not None:
            self._adapter_base.updated = self._kept_updated

    def free_copy(self) -> None:
        self._keep("let-go")

    def _keep(self, what: Literal["take", "go-back", "let-go"]) -> None:
        self._rank.keep(self._send(Keep, what=what))

    def _shares(self, passes: Sequence[Pass]) -> list[list[Pass]]:
        return shares(passes, ranks=self._options.ranks)

    def _note_updates(self, sums: Sums) -> None:
        if self._adapter_base is not None and sums.updates:
            self._adapter_base.updated = True

    def _reference_of(self, batch: TrainBatch, step: StepSettings) -> Path:
        reference = batch.reference
        if reference is None or not needs_reference(step.objective):
            return self._first
        if reference.digest != self._referred:
            need_digest(reference.weights, reference.digest)
            if self._adapter_base is not None:
                assert self._engine.pairs is not None
                self._adapter_base.other(reference.weights, self._engine.pairs.layers)
            self._referred = reference.digest
        return reference.weights

    def manifest(self) -> Manifest:
        """See `Learner`. Excludes speculative work."""
        self._parts.settle(self)
        return self._weights(manifest_in_memory)

    def save_weights(self, path: Path) -> Manifest:
        """Write the weights tensor by tensor, without a second copy. Raises OSError."""
        with self._one_by_one:
            self._parts.settle(self)
            return self._weights(lambda sources: write_tensors(path, sources))

    def save_optimizer(self, path: Path) -> None:
        """Write the full optimizer state by name, for any number of ranks. Raises OSError."""
        with self._one_by_one:
            self._parts.settle(self)
        updates = self._engine.updates
        steps = tensor_source(STEPS, torch.tensor(updates, dtype=torch.int64))
        if not updates:
            write_tensors(path, [steps])
            return
        engine = self._engine
        kept = [
            (f"{moment}/{name}", engine.stored_dtype(name, moment), engine.shape(name))
            for moment, name in engine.moments
        ]
        with self._one_by_one:
            self._whole(lambda sources: write_tensors(path, [*sources, steps]), kept, moments=True)

    def numerics(self) -> dict[str, str]:
        options, engine = self._options, self._options.engine
        lora = engine.lora.numerics if engine.lora else {}
        narrow = {} if engine.published == "float32" else {"policies": engine.published}
        dealt = engine.expert_parallel_size
        return (
            lora
            | narrow
            | ({} if dealt == 1 else {"expert_parallel_size": str(dealt)})
            | balance_numerics(engine.router_aux_loss)
            | temperature_numerics(engine.temperature)
            | self._engine.unassigned.numerics
            | engine.memory.numerics(
                self._engine.vocabulary,
                self._engine.mlp_width,
                options.micro_batch_tokens,
                self._group.device,
                varlen=self._engine.varlen,
            )
            | {
                "trainer": f"{self.name} {self.version}",
                "deepspeed": version("deepspeed"),
                "torch": str(torch.__version__),
                "transformers": str(transformers.__version__),
                "python": platform.python_version(),
                "device": device_class(self._group.device),
                "capability": capability(self._group.device),
                "world_size": str(options.ranks),
                "backend": self._group.backend,
                "zero_stage": str(engine.zero_stage),
                "offload": engine.offload,
                "dtype": engine.dtype,
                "threads": str(options.threads),
                "micro_batch_tokens": str(options.micro_batch_tokens),
            }
        )

    # Files

    @contextmanager
    def _trained(self, weights: Path) -> Iterator[Callable[[str], Tensor]]:
        """Load the base into all ranks; return trained tensors by name. Raises PolicyError."""
        if self._adapter_base is not None:
            assert self._engine.pairs is not None
            layers = self._engine.pairs.layers
            yield self._adapter_base.take(weights, layers=layers, have=self._have_base).__getitem__
            return
        with self._whole_tensors(weights, self._engine.files) as tensors:
            yield tensors

    def _have_base(self, weights: Path) -> None:
        with self._whole_tensors(weights, self._engine.base_files) as tensors:
            self._send(LoadBase)
            self._rank.load_base(tensors)

    @contextmanager
    def _whole_tensors(
        self, weights: Path, files: Mapping[str, Piece]
    ) -> Iterator[Callable[[str], Tensor]]:
        entries = {entry.name: entry for entry in read_entries(weights)}
        names = sorted(carried_names(entries, self._engine.further))
        self._carried = CarriedTensors(weights, [entries.pop(name) for name in names])
        need_fit(weights, entries, {name: piece.shape for name, piece in files.items()})
        of: dict[str, list[str]] = {}
        for name, piece in files.items():
            of.setdefault(piece.name, []).append(name)

        def whole(name: str) -> Tensor:
            parts = [(entries[part_name], files[part_name]) for part_name in of[name]]
            if len(parts) == 1:
                return read_tensor(data, parts[0][0])
            tensor = torch.empty(self._engine.shape(name), dtype=DTYPES[parts[0][0].dtype])
            for entry, piece in parts:
                piece.of(tensor).copy_(read_tensor(data, entry))
            return tensor

        with mapped(weights) as data:
            yield whole

    def _state(self, path: Path) -> dict[str, Entry]:
        entries = {entry.name: entry for entry in read_entries(path)}
        shapes = {f"{moment}/{name}": (name, moment) for moment, name in self._engine.moments}
        if entries.keys() not in ({STEPS}, {STEPS} | shapes.keys()):
            raise PolicyError(f"{path} is not the optimizer state of this model")
        for key, (name, moment) in shapes.items():
            entry = entries.get(key)
            if entry is None:
                continue
            kind = NAMES[self._engine.stored_dtype(name, moment)]
            if (entry.shape, entry.dtype) != (self._engine.shape(name), kind):
                raise PolicyError(f"{path}: {key} is {entry.dtype} {entry.shape}")
        return entries

    def _weights(self, use: Callable[[list[TensorSource]], Manifest]) -> Manifest:
        engine, adapter_base = self._engine, self._adapter_base
        kept = [
            (name, engine.stored_dtype(piece.name), piece.shape)
            for name, piece in engine.files.items()
        ]
        if adapter_base is None:
            carried = self._carried.sources()
            return self._whole(lambda sources: use([*sources, *carried]), kept, moments=False)
        if adapter_base.updated:
            base_tensors = adapter_base.base_tensors()
            return self._whole(lambda sources: use([*sources, *base_tensors]), kept, moments=False)
        with file_sources(adapter_base.base) as sources:
            return use(sources)

    def _whole(
        self,
        use: Callable[[list[TensorSource]], Manifest],
        kept: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        *,
        moments: bool,
    ) -> Manifest:
        """Pass every full tensor to `use`; read all of them in any case, as other ranks take
        part."""
        self._send(Read, moments=moments)
        following = self._rank.read(moments=moments)
        sources = [
            TensorSource(name=name, dtype=NAMES[kind], shape=shape, data=_next(following))
            for name, kind, shape in kept
        ]
        try:
            return use(sources)
        finally:
            for _ in following:
                pass

    # Other ranks

    def _send(self, kind: type[_Command], **fields: Any) -> _Command:
        command = kind(learner=self._number, retired=_retired(), **fields)
        self._group.send(command)
        return command

    def _run_step(
        self,
        kind: type[Train | Gather],
        batch: TrainBatch,
        settings: Settings,
        shared: Sequence[Sequence[Sequence[Pass]]],
        **fields: Any,
    ) -> list[StepReply]:
        """Return every rank's results. Raises InvariantBroken, ResourceError, NonFinite."""
        group, places = self._group, places_of(batch) if self._options.ranks > 1 else {}
        command = self._send(
            kind,
            settings=self._settings(settings),
            reference=str(self._reference_of(batch, self.settings_of(settings))),
            updates=[share_commands(by_rank, places) for by_rank in shared],
            **fields,
        )
        problem = ""
        broken = False
        for rank, data in enumerate(group.replies(), start=1):
            ready = _READY.decode(data)
            if ready.why and not problem:
                problem, broken = f"rank {rank} could not read its share: {ready.why}", ready.broken
        if not group.agree(good=not problem):
            raise InvariantBroken(problem) if broken else ResourceError(problem)
        own = [pass_ for by_rank in shared for pass_ in by_rank[0]]
        trajectories = [unit.item.trajectory for pass_ in own for unit in pass_.units]
        replies = [self._rank.compute(command, trajectories)]
        replies += [_REPLY.decode(data) for data in group.replies()]
        return replies


def _publishing(options: DeepspeedOptions, first: Path) -> DeepspeedOptions:
    return replace(options, engine=replace(options.engine, published=published_dtype(first)))


def _retired() -> tuple[int, ...]:
    retired = tuple(_RETIRED)
    _RETIRED.clear()
    return retired


def _retire(number: int, rank: Rank) -> None:
    rank.close()
    _RETIRED.append(number)


def _next(following: Iterator[Tensor]) -> Callable[[], memoryview]:
    def data() -> memoryview:
        return memoryview(tensor_source("", next(following)).data())

    return data


def _sums(shared: Sequence[Sequence[Sequence[Pass]]], replies: Sequence[StepReply]) -> Sums:
    sums = Sums()
    for number, by_rank in enumerate(shared):
        of_ranks = [reply.updates[number] for reply in replies]
        sums.loss += _added([reply.loss for reply in of_ranks])
        sums.router_aux += _added([reply.router_aux for reply in of_ranks])
        sums.padded_tokens += sum(reply.padded_tokens for reply in of_ranks)
        sums.note_update(of_ranks[0].norm)
        _note_rows(by_rank, of_ranks)
    return sums


def _added(losses: Sequence[float]) -> float:
    # `fsum` raises ValueError for infinities of both signs.
    return math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan


def _note_rows(by_rank: Sequence[Sequence[Pass]], of_ranks: Sequence[UpdateReply]) -> None:
    for passes, reply in zip(by_rank, of_ranks, strict=True):
        for done, metrics in zip(passes, reply.rows, strict=True):
            done.note(metrics)
