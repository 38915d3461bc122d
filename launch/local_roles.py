"""The roles that `run` starts: their names, and the engine, server and GPUs that each gets."""

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
"""Sends traces of the run, which goes on without it."""

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
LOOK_LIMIT_S: Final = 60.0
"""Limit for torch to report whether there is a GPU; it takes seconds."""

ORDER: Final = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
"""Numbers are those of nvidia-smi; CUDA by itself counts the fastest first."""


def worker_names(config: Config) -> tuple[str, ...]:
    """The workers that `run` starts: w0, w1, ..."""
    return tuple(f"w{number}" for number in range(config.workers.count))


def own_engines(config: Config) -> tuple[str, ...]:
    """The engines of the workers that `run` starts; none where it starts no worker."""
    return (config.workers.engine,) if config.workers.count else ()


def worker_address(config: Config, name: str) -> str:
    """Where the server of a worker that `run` starts runs already; empty where it does not."""
    pairs = zip(worker_names(config), config.workers.vllm.addresses, strict=False)
    return dict(pairs).get(name, "")


def with_engine(config: Config, engine: str, *, address: str = "") -> Config:
    """The configuration of a worker with this engine, and this server's address if it has one."""
    vllm = msgspec.structs.replace(config.workers.vllm, addresses=(address,) if address else ())
    workers = msgspec.structs.replace(config.workers, engine=engine, vllm=vllm)
    return msgspec.structs.replace(config, workers=workers)


def keeping_nothing(config: Config) -> Config:
    """The same, but what is generated again is prefilled, whatever else was: a proof of what was
    sampled behind kept prefixes does not stand on some."""
    return msgspec.structs.replace(
        config, workers=msgspec.structs.replace(config.workers, kv_keep=0.0)
    )


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
    """Raise ConfigError, before anything starts, for a GPU that is not among those seen here, and
    for GPUs of workers all of whose engines have none."""
    workers = config.workers
    some = engine_kind(workers.engine, config.task.directory).gpus
    if workers.count and not some and (workers.gpus or workers.vllm.gpus > 1):
        key = "gpus" if workers.gpus else "vllm, tensor_parallel and pipeline_parallel"
        raise ConfigError(
            f"workers.{key}: engine {workers.engine} computes on the CPU",
            hint="workers.engine = 'vllm', or leave the keys out",
        )
    for name in (TRAINER, *worker_names(config)):
        key, numbers = gpus_of(config, name)
        seen = visible(key, numbers, os.environ.get(VISIBLE)) if numbers else ""
        if name == TRAINER and config.trainer.device == "cuda" and not _torch_finds_gpu(seen):
            raise no_gpu()


@functools.cache
def _torch_finds_gpu(seen: str) -> bool:
    """Whether torch finds a GPU among those that a role is given; empty: among all.

    A process of its own looks: CUDA reads the variable once, and holds memory of a GPU.
    """
    words = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.is_available())"]
    given = dict([ORDER, (VISIBLE, seen)]) if seen else {}
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
        return True  # the trainer will say
    return looked.stdout.strip() != "False"


def gpus_of(config: Config, name: str) -> tuple[str, tuple[int, ...]]:
    """The key that gives a role its GPUs, and their numbers; none: it takes the first it sees.

    Example: with ``workers.gpus = [1, 2]``, w0 and w2 have 1, w1 and w3 have 2; with
    ``workers.vllm.tensor_parallel = 2`` all have both.
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
