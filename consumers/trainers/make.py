"""Decides which trainer a configuration means; torch is imported only when one is made."""

from __future__ import annotations

from pathlib import Path

from dora_pipe.config.model import Config
from dora_pipe.consumers.trainers.port import Trainer
from dora_pipe.errors import ConfigError


def make_trainer(*, assets: Path, reference: Path, config: Config) -> Trainer:
    """The trainer of a run, without weights yet.

    `assets` is the directory of config and tokenizer files, `reference` the weights of version 0.
    Raises PolicyError for a model it cannot train, ConfigError where torch is not installed.
    """
    try:
        from dora_pipe.consumers.trainers.torch_trainer import TorchOptions, TorchTrainer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"trainer.kind = {config.trainer.kind!r} needs {error.name}, which is not installed",
            hint="pip install 'dora-pipe[torch]'",
        ) from error
    section = config.trainer
    options = TorchOptions(
        betas=section.betas,
        weight_decay=section.weight_decay,
        micro_batch_tokens=section.micro_batch_tokens,
        threads=section.threads,
    )
    return TorchTrainer(assets, reference=reference, options=options)
