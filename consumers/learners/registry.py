"""The trainers that a run may have: a row for each, and `module:attribute` for a user's own.

Nothing of a trainer is imported here, torch neither: `open` does that, in the trainer's process.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec.structs import replace

from dora_pipe.config.model import Config, Lora
from dora_pipe.config.objectives import is_own
from dora_pipe.config.section import OptimizerName
from dora_pipe.config.training import Trainer as Section
from dora_pipe.consumers.learners.deepspeed import HINT, NAME, prepare
from dora_pipe.consumers.learners.port import Learner
from dora_pipe.consumers.learners.with_teacher import with_teacher
from dora_pipe.consumers.objectives.registry import need_objective
from dora_pipe.consumers.teachers.registry import key_of, open_teacher
from dora_pipe.core.errors import ConfigError, install_hint
from dora_pipe.core.own_code import importable, load_attribute, nearest, source_sha256
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
    """What a run has to know of a trainer before one is opened."""

    open: Open
    """With the directory of config and tokenizer files, the weights of version 0, the run's keys,
    and where the log is, for ranks beside this process. Raises PolicyError for a model it cannot
    train, ConfigError for a GPU that is not there, ResourceError when ranks do not come."""
    packages: tuple[str, ...] = ()
    """Modules that it needs."""
    hint: str = ""
    """What to do where one is missing."""
    moving_reference: bool = False
    """Whether it takes `TrainBatch.reference`, which `objective.reference_every` asks for."""
    teacher: bool = False
    """Whether it takes `TrainBatch.teacher`, which `objective.teacher_weight` asks for."""
    bfloat16: bool = False
    """Whether it goes on in bfloat16 where version 0 is published so (`policies.dtype`)."""
    optimizers: tuple[OptimizerName, ...] = ("adamw",)
    """What it takes of `trainer.optimizer`."""
    routes: bool = False
    """Whether it sends tokens through the experts that a record names (`sampling.routes`)."""
    router_aux_loss: bool = False
    """Whether it takes `trainer.router_aux_loss`."""
    expert_parallel: bool = False
    """Whether its ranks share the experts of a mixture (`trainer.expert_parallel`)."""
    weights: bool = False
    """Whether it takes `TrainBatch.weights`, which a step that is trained again may have."""
    leaves_device: bool = False
    """Whether it has `port.LeavesDevice` (`trainer.offload_between_steps`)."""


def learner_kind(name: str, directory: str = "") -> LearnerKind:
    """The row of a trainer; `directory` is where a user's file lies. Raises ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not is_own(name):
        own = f"one of {', '.join(BUILT_IN)}, or module:attribute of your own"
        raise ConfigError(f"trainer.kind: no trainer `{name}`", hint=nearest(name, BUILT_IN) or own)
    with importable(directory):
        found = load_attribute("trainer.kind", name)
    if not isinstance(found, LearnerKind):
        raise ConfigError(
            f"trainer.kind: `{name}` is a {type(found).__name__}, not a LearnerKind",
            hint="docs/extending.md says what a trainer brings",
        )
    return found


def need_learner(config: Config) -> None:
    """Raise ConfigError, before anything starts, for a trainer or objective that cannot be used."""
    name = config.trainer.kind
    kind = learner_kind(name, config.task.directory)
    _need_taken(name, kind, config)
    if config.trainer.offload_between_steps and config.trainer.parts > 1:
        raise ConfigError(
            f"trainer.offload_between_steps: the run has {config.trainer.parts} parts of a batch, "
            "and so there is always one to compute",
            hint="leave the key out; trainer.parts = 1 in a new run",
        )
    _need(f"trainer.kind = {name!r}", kind.packages, kind.hint)
    if config.trainer.optimizer not in kind.optimizers:
        raise ConfigError(
            f"trainer.optimizer: trainer `{name}` has no {config.trainer.optimizer}",
            hint=f"trainer.optimizer = {kind.optimizers[0]!r}, or trainer.kind = 'torch'",
        )
    if name in BUILT_IN:
        need_optimizer(config.trainer.optimizer)
    need_objective(config)
    if config.teacher.path:
        _need("teacher.path", TORCH_PACKAGES, TORCH_HINT)
    key_of(config)


def _need_taken(name: str, kind: LearnerKind, config: Config) -> None:
    """Raise ConfigError for a key that asks for what the trainer does not say that it takes."""
    trainer = config.trainer
    for key, asked, taken in (
        ("sampling.routes", config.sampling.routes, "routes"),
        ("trainer.router_aux_loss", trainer.router_aux_loss, "router_aux_loss"),
        ("trainer.expert_parallel", trainer.expert_parallel > 1, "expert_parallel"),
        ("trainer.offload_between_steps", trainer.offload_between_steps, "leaves_device"),
        ("objective.reference_every", config.objective.reference_every, "moving_reference"),
        ("teacher", config.teacher.given, "teacher"),
        ("policies.dtype", config.policies.dtype == "bfloat16", "bfloat16"),
    ):
        if asked and not getattr(kind, taken):
            other = " or ".join(repr(one) for one in BUILT_IN if getattr(BUILT_IN[one], taken))
            raise ConfigError(
                f"{key}: trainer `{name}` does not take it",
                hint=f"trainer.kind = {other}, or a LearnerKind with {taken} = True",
            )


def need_optimizer(optimizer: OptimizerName) -> None:
    """Raise ConfigError for one whose library is not installed."""
    if optimizer == "adamw8bit":
        _need("trainer.optimizer = 'adamw8bit'", ("bitsandbytes",), EIGHT_BITS_HINT)


def published_dtype(config: Config, says: str) -> PolicyDtype:
    """What a new run publishes, of a model that `says` what it is (`policies.dtype`).

    Raises ConfigError for a trainer that is none.
    """
    if config.policies.dtype != "auto":
        return config.policies.dtype
    kind = learner_kind(config.trainer.kind, config.task.directory)
    return "bfloat16" if kind.bfloat16 and says == "bfloat16" else "float32"


def _need(who: str, packages: Sequence[str], hint: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{who} needs {name}, which is not installed", hint=hint or None)


def make_learner(
    *, assets: Path, reference: Path, config: Config, log: LogLocation | None = None
) -> Learner:
    """The trainer of a run, without weights yet: see `LearnerKind.open`, which may raise."""
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
    """A learner in which a user's code computes: what that was is in the fingerprint, too."""

    def __init__(self, learner: Learner, sources: Mapping[str, str]) -> None:
        self._learner, self._sources = learner, sources

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def numerics(self) -> dict[str, str]:
        return {**self._learner.numerics(), **self._sources}


def make_scorer(*, assets: Path, reference: Path, config: Config) -> TorchLearner:
    """What computes log-probs of a run's versions again: torch, whatever trained it.

    Raises PolicyError for a model it cannot take, ConfigError where a package or GPU is missing.
    """
    _need("scoring", TORCH_PACKAGES, TORCH_HINT)
    trainer = replace(config.trainer, optimizer="adamw", router_aux_loss=0.0)
    plain = replace(config, trainer=trainer)
    return _torch(assets, reference, plain, None)  # It updates nothing.


def device_of(section: Section) -> str:
    """`cpu` or `cuda`. Raises ConfigError for a GPU that is not there."""
    import torch

    if section.device == "cpu":
        return "cpu"
    there = torch.cuda.is_available()
    if section.device == "cuda" and not there:
        raise no_gpu()
    return "cuda" if there else "cpu"


def no_gpu() -> ConfigError:
    """The error of a trainer whose GPU is not there."""
    return ConfigError(
        "trainer.device is cuda, but torch finds no GPU here",
        hint="-o trainer.device=cpu, or a machine with a GPU and its driver",
    )


def _gradient_device(section: Section) -> str:
    """As `device_of`. Raises ConfigError for what lies in the host's memory anyway."""
    device = device_of(section)
    asked = {
        "gradient_checkpointing": section.gradient_checkpointing == "offload",
        "offload_between_steps": section.offload_between_steps,
    }
    for key, given in asked.items():
        if device == "cpu" and given:
            raise ConfigError(
                f"trainer.{key}: the trainer computes on a CPU, whose memory is the host's",
                hint="trainer.device = 'cuda', or leave the key out",
            )
    return device


def follows(config: Config, log: LogLocation, store: PolicyStore) -> bool:
    """Be a rank above 0 until that one ends, if this process was started as one.

    Raises ConfigError, UsageError, BusError, ResourceError when another rank is lost.
    """
    if config.trainer.kind != "deepspeed" or os.environ.get("RANK", "0") in ("", "0"):
        return False
    device = device_of(config.trainer)
    prepare(device)
    from dora_pipe.consumers.learners.deepspeed.follow import follow_environment

    return follow_environment(device, log, store)


def end_ranks() -> None:
    """End the processes that trainers of this one have started; they would end with it, too."""
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
    """What is trained, if not all weights."""
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
        routes=config.sampling.routes,
        router_aux_loss=section.router_aux_loss,
        expert_parallel=section.expert_parallel,
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
        weights=True,
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
        expert_parallel=True,
        weights=True,
        leaves_device=True,
    ),
}
