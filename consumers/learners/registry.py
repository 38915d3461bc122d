"""Trainers by name, and `module:attribute` for user code; only `open` imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec.structs import replace

from dora_pipe.config.model import Config, Lora
from dora_pipe.config.objectives import is_own
from dora_pipe.config.section import OptimizerName
from dora_pipe.config.training import Trainer as Section
from dora_pipe.consumers.learners.deepspeed import HINT, NAME, prepare
from dora_pipe.consumers.learners.learner import Learner
from dora_pipe.consumers.learners.with_teacher import with_teacher
from dora_pipe.consumers.objectives.registry import need_objective
from dora_pipe.consumers.teachers.registry import key_of, open_teacher
from dora_pipe.core.errors import ConfigError, install_hint
from dora_pipe.core.system.own_code import importable, load_kind, need_packages, source_sha256
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.log_location import LogLocation
from dora_pipe.store.store import PolicyStore

if TYPE_CHECKING:
    from dora_pipe.consumers.learners.torch.learner import TorchLearner
    from dora_pipe.consumers.learners.torch.lora import LoraOptions

TORCH_PACKAGES: Final = ("torch", "transformers", "safetensors")
TORCH_HINT: Final = install_hint("torch")
EIGHT_BITS_HINT: Final = install_hint("adamw8bit")

Open = Callable[[Path, Path, Config, LogLocation | None], Learner]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerKind:
    """Capabilities of a trainer."""

    open: Open
    packages: tuple[str, ...] = ()
    """Required modules, and a hint if one is missing."""
    hint: str = ""
    moving_reference: bool = False
    """Required by `objective.reference_every`."""
    teacher: bool = False
    """Required by `objective.teacher_weight`."""
    bfloat16: bool = False
    """Required by `policies.dtype` bfloat16."""
    optimizers: tuple[OptimizerName, ...] = ("adamw",)
    """Values of `trainer.optimizer`."""
    routes: bool = False
    """Required by `sampling.return_routed_experts`."""
    router_aux_loss: bool = False
    """Required by `trainer.router_aux_loss`."""
    expert_parallel_size: bool = False
    """Required by `trainer.expert_parallel_size`."""
    leaves_device: bool = False
    """Required by `trainer.offload_between_steps`."""


def learner_kind(name: str, directory: str = "") -> LearnerKind:
    """Return a trainer's capabilities, importing user code. Raises ConfigError."""
    hint = "docs/training.md describes trainers"
    return load_kind("trainer.kind", name, LearnerKind, BUILT_IN, directory=directory, hint=hint)


def need_learner(config: Config) -> None:
    """Raise ConfigError if trainer or objective is unusable."""
    name = config.trainer.kind
    kind = learner_kind(name, config.task.directory)
    _need_taken(name, kind, config)
    if config.trainer.offload_between_steps and config.trainer.batch_parts > 1:
        raise ConfigError(
            f"trainer.offload_between_steps: trainer.batch_parts = {config.trainer.batch_parts} "
            "keeps the states in use",
            hint="remove the key; trainer.batch_parts = 1 in a new run",
        )
    need_packages(f"trainer.kind = {name!r}", kind.packages, kind.hint)
    if config.trainer.optimizer not in kind.optimizers:
        raise ConfigError(
            f"trainer.optimizer: trainer `{name}` has no {config.trainer.optimizer}",
            hint=f"trainer.optimizer = {kind.optimizers[0]!r}, or trainer.kind = 'torch'",
        )
    if name in BUILT_IN:
        need_optimizer(config.trainer.optimizer)
    need_objective(config)
    if config.teacher.path:
        need_packages("teacher.path", TORCH_PACKAGES, TORCH_HINT)
    key_of(config)


def _need_taken(name: str, kind: LearnerKind, config: Config) -> None:
    """Raise ConfigError for a key that the trainer does not support."""
    trainer = config.trainer
    for key, asked, taken in (
        ("sampling.return_routed_experts", config.sampling.return_routed_experts, "routes"),
        ("trainer.router_aux_loss", trainer.router_aux_loss, "router_aux_loss"),
        ("trainer.expert_parallel_size", trainer.expert_parallel_size > 1, "expert_parallel_size"),
        ("trainer.offload_between_steps", trainer.offload_between_steps, "leaves_device"),
        ("objective.reference_every", config.objective.reference_every, "moving_reference"),
        ("teacher", config.teacher.given, "teacher"),
        ("policies.dtype", config.policies.dtype == "bfloat16", "bfloat16"),
    ):
        if asked and not getattr(kind, taken):
            other = " or ".join(repr(kind) for kind in BUILT_IN if getattr(BUILT_IN[kind], taken))
            raise ConfigError(
                f"{key}: trainer `{name}` does not support it",
                hint=f"trainer.kind = {other}, or a LearnerKind with {taken} = True",
            )


def need_optimizer(optimizer: OptimizerName) -> None:
    """Raise ConfigError if the optimizer's library is missing."""
    if optimizer == "adamw8bit":
        need_packages("trainer.optimizer = 'adamw8bit'", ("bitsandbytes",), EIGHT_BITS_HINT)


def published_dtype(config: Config, says: str) -> PolicyDtype:
    """Return a new run's published dtype, for a model of dtype `says`. Raises ConfigError."""
    if config.policies.dtype != "auto":
        return config.policies.dtype
    kind = learner_kind(config.trainer.kind, config.task.directory)
    return "bfloat16" if kind.bfloat16 and says == "bfloat16" else "float32"


def make_learner(
    *, assets: Path, reference: Path, config: Config, log: LogLocation | None = None
) -> Learner:
    """Return the run's trainer, without weights. Raises as `LearnerKind.open`."""
    need_learner(config)
    kind = learner_kind(config.trainer.kind, config.task.directory)
    with importable(config.task.directory):
        learner = kind.open(assets, reference, config, log)
    named = {"trainer": config.trainer.kind, "objective": config.objective.kind}
    sources = {
        f"{name} source": f"{own} {source_sha256(own)}"
        for name, own in named.items()
        if is_own(own)
    }
    if sources:
        learner = cast("Learner", _WithSources(learner, sources))
    if not config.teacher.given:
        return learner
    device = device_of(config.trainer) if config.teacher.path else ""
    return with_teacher(learner, open_teacher(config, assets, device))


class _WithSources:
    """Learner whose fingerprint includes the digests of user code."""

    def __init__(self, learner: Learner, sources: Mapping[str, str]) -> None:
        self._learner, self._sources = learner, sources

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def numerics(self) -> dict[str, str]:
        return {**self._learner.numerics(), **self._sources}


def make_scorer(*, assets: Path, reference: Path, config: Config) -> TorchLearner:
    """Return a torch learner to rescore log-probs. Raises PolicyError, ConfigError."""
    need_packages("scoring", TORCH_PACKAGES, TORCH_HINT)
    trainer = replace(config.trainer, optimizer="adamw", router_aux_loss=0.0)
    plain = replace(config, trainer=trainer)
    return _torch(assets, reference, plain, None)  # Its optimizer is unused.


def device_of(section: Section) -> str:
    """Return `cpu` or `cuda`. Raises ConfigError without the requested GPU."""
    import torch

    if section.device == "cpu":
        return "cpu"
    there = torch.cuda.is_available()
    if section.device == "cuda" and not there:
        raise no_gpu()
    return "cuda" if there else "cpu"


def no_gpu() -> ConfigError:
    return ConfigError(
        "trainer.device is cuda, but torch finds no GPU here",
        hint="-o trainer.device=cpu, or a machine with a GPU and its driver",
    )


def _gradient_device(section: Section) -> str:
    """Return the device. Raises ConfigError for offloading from a CPU."""
    device = device_of(section)
    asked = {
        "gradient_checkpointing": section.gradient_checkpointing == "offload",
        "offload_between_steps": section.offload_between_steps,
    }
    for key, given in asked.items():
        if device == "cpu" and given:
            raise ConfigError(
                f"trainer.{key}: not supported by a trainer on the CPU",
                hint="trainer.device = 'cuda', or remove the key",
            )
    return device


def follows(config: Config, log: LogLocation, store: PolicyStore) -> bool:
    """Run as a rank above 0, if the environment says so; return whether it did. Raises ConfigError,
    UsageError, BusError, ResourceError."""
    if config.trainer.kind != "deepspeed" or os.environ.get("RANK", "0") in ("", "0"):
        return False
    device = device_of(config.trainer)
    prepare(device)
    from dora_pipe.consumers.learners.deepspeed.follow import follow_environment

    return follow_environment(device, log, store)


def end_ranks() -> None:
    group = sys.modules.get("dora_pipe.consumers.learners.deepspeed.rank_group")
    if group is not None:
        group.end_rank_group()


def _torch(assets: Path, reference: Path, config: Config, log: LogLocation | None) -> TorchLearner:
    from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions
    from dora_pipe.consumers.learners.torch.memory import memory_options

    section, device = config.trainer, _gradient_device(config.trainer)
    if device != "cpu":
        prepare(device)
    options = TorchOptions(
        optimizer=section.optimizer,
        betas=section.betas,
        weight_decay=section.weight_decay,
        micro_batch_tokens=section.micro_batch_tokens,
        threads=section.threads,
        device=device,
        dtype=section.dtype,
        lora=adapter_options(config.lora),
        temperature=config.sampling.logprob_temperature,
        memory=memory_options(section),
        router_aux_loss=section.router_aux_loss,
    )
    return TorchLearner(assets, reference=reference, options=options)


def adapter_options(lora: Lora) -> LoraOptions | None:
    from dora_pipe.consumers.learners.torch.lora import LoraOptions

    if not lora.rank:
        return None
    return LoraOptions(rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def _deepspeed(assets: Path, reference: Path, config: Config, log: LogLocation | None) -> Learner:
    section, device = config.trainer, _gradient_device(config.trainer)
    prepare(device)
    from dora_pipe.consumers.learners.deepspeed.engine import EngineOptions
    from dora_pipe.consumers.learners.deepspeed.learner import DeepspeedLearner, DeepspeedOptions
    from dora_pipe.consumers.learners.torch.memory import memory_options

    engine = EngineOptions(
        zero_stage=section.zero_stage,
        offload=section.offload,
        dtype=section.dtype,
        betas=section.betas,
        weight_decay=section.weight_decay,
        lora=adapter_options(config.lora),
        temperature=config.sampling.logprob_temperature,
        memory=memory_options(section),
        routes=config.sampling.return_routed_experts,
        router_aux_loss=section.router_aux_loss,
        expert_parallel_size=section.expert_parallel_size,
    )
    options = DeepspeedOptions(
        engine=engine,
        ranks=section.ranks,
        micro_batch_tokens=section.micro_batch_tokens,
        threads=section.threads,
        device=device,
        modules=config.task.directory,
    )
    return DeepspeedLearner(assets, reference=reference, log=log, options=options)


BUILT_IN: Final[Mapping[str, LearnerKind]] = {
    "torch": LearnerKind(
        open=_torch,
        packages=TORCH_PACKAGES,
        hint=TORCH_HINT,
        moving_reference=True,
        teacher=True,
        bfloat16=True,
        optimizers=("adamw", "muon", "adamw8bit"),
        routes=True,
        router_aux_loss=True,
        leaves_device=True,
    ),
    "deepspeed": LearnerKind(
        open=_deepspeed,
        packages=(NAME,),
        hint=HINT,
        moving_reference=True,
        teacher=True,
        bfloat16=True,
        routes=True,
        router_aux_loss=True,
        expert_parallel_size=True,
        leaves_device=True,
    ),
}
