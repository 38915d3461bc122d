"""Decides which trainer a configuration means; torch is imported only when one is made."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dora_pipe.config.model import Config, Lora
from dora_pipe.config.model import Trainer as Section
from dora_pipe.consumers.learners.deepspeed.package import NAME, absent, prepare
from dora_pipe.consumers.learners.port import Learner
from dora_pipe.core.errors import ConfigError
from dora_pipe.store.log_location import LogLocation
from dora_pipe.store.store import PolicyStore

if TYPE_CHECKING:
    from dora_pipe.consumers.learners.torch.learner import TorchLearner
    from dora_pipe.consumers.learners.torch.lora import LoraOptions


def make_learner(
    *, assets: Path, reference: Path, config: Config, log: LogLocation | None = None
) -> Learner:
    """The trainer of a run, without weights yet.

    `assets` is the directory of config and tokenizer files, `reference` the weights of version 0;
    `log` is where ranks beside this process read their share of a batch.
    Raises PolicyError for a model it cannot train, ConfigError where a package or GPU is missing,
    ResourceError when the other ranks do not come.
    """
    need_learner(config)
    try:
        device = device_of(config.trainer)
        if config.trainer.kind == "deepspeed":
            return _deepspeed(assets, reference, config, log, device)
        return _torch(assets, reference, config, device)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"trainer.kind = {config.trainer.kind!r} needs {error.name}, which is not installed",
            hint="pip install 'dora-pipe[torch]'",
        ) from error


def make_scorer(*, assets: Path, reference: Path, config: Config) -> TorchLearner:
    """What computes log-probs of a run's versions again: torch, whatever trained it.

    Raises PolicyError for a model it cannot take, ConfigError where a package or GPU is missing.
    """
    try:
        return _torch(assets, reference, config, device_of(config.trainer))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"log-probs are computed with {error.name}, which is not installed",
            hint="pip install 'dora-pipe[torch]'",
        ) from error


def need_learner(config: Config) -> None:
    """Raise ConfigError where DeepSpeed is wanted and not installed; imports nothing."""
    if config.trainer.kind == "deepspeed" and importlib.util.find_spec(NAME) is None:
        raise absent(NAME)


def device_of(section: Section) -> str:
    """`cpu` or `cuda`. Raises ConfigError for a GPU that is not there."""
    import torch

    if section.device == "cpu" or (section.device == "auto" and section.kind == "torch"):
        return "cpu"
    there = torch.cuda.is_available()
    if section.device == "cuda" and not there:
        raise ConfigError(
            "trainer.device is cuda, but torch finds no GPU here",
            hint="-o trainer.device=cpu, or a machine with a GPU and its driver",
        )
    return "cuda" if there else "cpu"


def follows(config: Config, log: LogLocation, store: PolicyStore) -> bool:
    """Be a rank above 0 until that one ends, if torchrun started this process as one.

    Raises ConfigError, ResourceError when another rank is lost.
    """
    if config.trainer.kind != "deepspeed" or os.environ.get("RANK", "0") in ("", "0"):
        return False
    device = device_of(config.trainer)
    prepare(device)
    from dora_pipe.consumers.learners.deepspeed.follow import follow_torchrun

    return follow_torchrun(device, log, store)


def end_ranks() -> None:
    """End the processes that trainers of this one have started; they would end with it, too."""
    group = sys.modules.get("dora_pipe.consumers.learners.deepspeed.rank_group")
    if group is not None:
        group.end_rank_group()


def _torch(assets: Path, reference: Path, config: Config, device: str) -> TorchLearner:
    from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions

    section = config.trainer
    if device != "cpu":
        prepare(device)
    options = TorchOptions(
        betas=section.betas,
        weight_decay=section.weight_decay,
        micro_batch_tokens=section.micro_batch_tokens,
        threads=section.threads,
        device=device,
        lora=_adapter(config.lora),
        temperature=config.sampling.logprob_temperature,
    )
    return TorchLearner(assets, reference=reference, options=options)


def _adapter(lora: Lora) -> LoraOptions | None:
    """What is trained, if not all weights."""
    from dora_pipe.consumers.learners.torch.lora import LoraOptions

    if not lora.rank:
        return None
    return LoraOptions(rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def _deepspeed(
    assets: Path, reference: Path, config: Config, log: LogLocation | None, device: str
) -> Learner:
    section = config.trainer
    prepare(device)
    from dora_pipe.consumers.learners.deepspeed.engine import EngineOptions
    from dora_pipe.consumers.learners.deepspeed.learner import DeepspeedLearner, DeepspeedOptions

    engine = EngineOptions(
        zero_stage=section.zero_stage,
        offload=section.offload,
        dtype=section.dtype,
        betas=section.betas,
        weight_decay=section.weight_decay,
        lora=_adapter(config.lora),
        temperature=config.sampling.logprob_temperature,
    )
    options = DeepspeedOptions(
        engine=engine,
        ranks=section.ranks,
        rounds_min=section.gradient_accumulation,
        micro_batch_tokens=section.micro_batch_tokens,
        threads=section.threads,
        device=device,
    )
    return DeepspeedLearner(assets, reference=reference, log=log, options=options)
