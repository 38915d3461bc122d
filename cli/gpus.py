"""Decides which GPUs the process of a role sees, before anything in it asks for one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from dora_pipe.cli import roles
from dora_pipe.config.model import Config
from dora_pipe.errors import ConfigError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
"""Numbers are those of nvidia-smi; CUDA by itself counts the fastest first."""


def show_gpus(config: Config, name: str) -> None:
    """Let this process, which is to be a role, see its GPUs alone; all, where it is given none.

    Raises ConfigError for a GPU that is not among those that this process sees.
    """
    key, numbers = gpus_of(config, name)
    if not numbers:
        return
    os.environ.setdefault(*ORDER)
    os.environ[VISIBLE] = visible(key, numbers, os.environ.get(VISIBLE))


def need_gpus(config: Config) -> None:
    """Raise ConfigError, before anything starts, for a GPU that is not among those seen here."""
    for name in (roles.TRAINER, *roles.worker_names(config)):
        key, numbers = gpus_of(config, name)
        visible(key, numbers, os.environ.get(VISIBLE))


def gpus_of(config: Config, name: str) -> tuple[str, tuple[int, ...]]:
    """The key that gives a role its GPUs, and their numbers; none: it takes the first it sees.

    Example: with ``workers.gpus = [1, 2]``, w0 and w2 have 1, w1 and w3 have 2.
    """
    if name == roles.TRAINER:
        return "trainer.gpus", config.trainer.gpus
    gpus, names = config.workers.gpus, roles.worker_names(config)
    if not gpus or name not in names or roles.worker_engine(config, name) == "torch":
        return "workers.gpus", ()
    return "workers.gpus", (gpus[names.index(name) % len(gpus)],)


def visible(key: str, numbers: Iterable[int], seen: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for these numbers, counted among what it says now (None: nothing).

    Raises ConfigError.
    """
    if seen is None:
        return ",".join(map(str, numbers))
    there = [one.strip() for one in seen.split(",") if one.strip()]
    chosen = []
    for number in numbers:
        if number >= len(there):
            raise ConfigError(
                f"{key}: there is no GPU {number} among the {len(there)} of {VISIBLE}={seen}",
                hint="they are counted from 0 among those that are visible",
            )
        chosen.append(there[number])
    return ",".join(chosen)
