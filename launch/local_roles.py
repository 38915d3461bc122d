"""Names, engines, servers and GPUs of the roles that `run` starts."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.registry import no_gpu
from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.engines.registry import engine_kind

ORCHESTRATOR: Final = "orchestrator"
TRAINER: Final = "trainer"
TRACES: Final = "traces"

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
LOOK_LIMIT_S: Final = 60.0
"""Limit for the subprocess that imports torch, which takes seconds."""

ORDER: Final = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
"""Number GPUs as nvidia-smi does; by default CUDA lists the fastest first."""


def worker_names(config: Config) -> tuple[str, ...]:
    """Return the names of the workers that `run` starts: w0, w1, ..."""
    return tuple(f"w{number}" for number in range(config.workers.count))


def own_engines(config: Config) -> tuple[str, ...]:
    """Return the engines of the workers that `run` starts."""
    return (config.workers.engine,) if config.workers.count else ()


def worker_address(config: Config, name: str) -> str:
    """Return the address of a worker's external server; empty if it has none."""
    pairs = zip(worker_names(config), config.workers.vllm.addresses, strict=False)
    return dict(pairs).get(name, "")


def with_engine(config: Config, engine: str, *, address: str = "") -> Config:
    """Return the configuration of a worker with this engine and server address."""
    vllm = msgspec.structs.replace(config.workers.vllm, addresses=(address,) if address else ())
    workers = msgspec.structs.replace(config.workers, engine=engine, vllm=vllm)
    return msgspec.structs.replace(config, workers=workers)


def without_prefix_cache(config: Config) -> Config:
    """Disable prefix caching: verification must prefill everything."""
    return msgspec.structs.replace(
        config, workers=msgspec.structs.replace(config.workers, prefix_cache_ratio=0.0)
    )


def show_gpus(config: Config, name: str) -> None:
    """Limit the visible GPUs to those of a role; all, if it has none.

    Raises ConfigError for an invisible GPU.
    """
    key, numbers = gpus_of(config, name)
    if not numbers:
        return
    os.environ.setdefault(*ORDER)
    os.environ[VISIBLE] = visible(key, numbers, os.environ.get(VISIBLE))


def need_gpus(config: Config) -> None:
    """Raise ConfigError for invisible GPUs, and for GPUs of workers whose engines use none."""
    workers = config.workers
    on_gpu = engine_kind(workers.engine, config.task.directory).gpus
    if workers.count and not on_gpu and (workers.gpus or workers.vllm.gpus > 1):
        key = "gpus" if workers.gpus else "vllm, tensor_parallel_size and pipeline_parallel_size"
        raise ConfigError(
            f"workers.{key}: engine {workers.engine} computes on the CPU",
            hint="workers.engine = 'vllm', or leave the keys out",
        )
    for name in (TRAINER, *worker_names(config)):
        key, numbers = gpus_of(config, name)
        visible_gpus = visible(key, numbers, os.environ.get(VISIBLE)) if numbers else ""
        if (
            name == TRAINER
            and config.trainer.device == "cuda"
            and not _torch_finds_gpu(visible_gpus)
        ):
            raise no_gpu()


@functools.cache
def _torch_finds_gpu(visible_gpus: str) -> bool:
    """Return whether torch finds a GPU among these (empty: all).

    Runs in a subprocess: CUDA reads the variable only once, and holds GPU memory.
    """
    words = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.is_available())"]
    given = dict([ORDER, (VISIBLE, visible_gpus)]) if visible_gpus else {}
    try:
        looked = subprocess.run(
            words,
            env=os.environ | given,
            capture_output=True,
            text=True,
            timeout=LOOK_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # the trainer reports the error
    return looked.stdout.strip() != "False"


def gpus_of(config: Config, name: str) -> tuple[str, tuple[int, ...]]:
    """Return the key that assigns GPUs to a role, and their numbers.

    Example: with ``workers.gpus = [1, 2]``, w0 and w2 have 1, w1 and w3 have 2; with
    ``workers.vllm.tensor_parallel_size = 2`` all have both.
    """
    if name == TRAINER:
        return "trainer.gpus", config.trainer.gpus
    gpus, names = config.workers.gpus, worker_names(config)
    if not gpus or name not in names:
        return "workers.gpus", ()
    if not engine_kind(config.workers.engine, config.task.directory).gpus:
        return "workers.gpus", ()
    many = config.workers.vllm.gpus
    first = names.index(name) * many % len(gpus)
    return "workers.gpus", gpus[first : first + many]


def visible(key: str, numbers: Iterable[int], visible_gpus: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for indices into its current value (None: unset).

    Raises ConfigError.
    """
    if visible_gpus is None:
        return ",".join(map(str, numbers))
    there = [word.strip() for word in visible_gpus.split(",") if word.strip()]
    chosen = []
    for number in numbers:
        if number >= len(there):
            raise ConfigError(
                f"{key}: there is no GPU {number} among the {len(there)} of"
                f" {VISIBLE}={visible_gpus}",
                hint="numbers start at 0 among the visible GPUs",
            )
        chosen.append(there[number])
    return ",".join(chosen)
