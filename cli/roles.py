"""What a forked or started process does to be one role; the only place that joins all parts."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import platform
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe import __version__
from dora_pipe.cli.output import complain
from dora_pipe.cli.rundir import RunDir
from dora_pipe.clock import SystemClock
from dora_pipe.config.model import Config, versions_resident
from dora_pipe.errors import ConfigError, DoraError, InvariantBroken, LogTruncated, UsageError
from dora_pipe.policies.store import PolicyStore
from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.role import Decode
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.topics import Topics
from dora_pipe.transfers.open import open_transfers
from dora_pipe.transfers.port import Transfers

ORCHESTRATOR = "orchestrator"
TRAINER = "trainer"
TRACES = "traces"
"""Sends traces of the run (`cli.traces`); the run goes on without it."""

ENGINES: Final = {
    "torch": ("torch", "transformers", "safetensors"),
    "vllm": ("vllm", "torch", "transformers", "safetensors"),
    "vllm-server": ("vllm", "torch", "transformers", "safetensors", "h11"),
}
"""Engines that a worker may have, and the packages they need."""

_VLLM_HINT: Final = "make vllm (CPU), make gpu or pip install 'dora-pipe[vllm]'; see docs/vllm.md"

HINTS: Final = {
    "torch": "pip install 'dora-pipe[torch]'",
    "vllm": _VLLM_HINT,
    "vllm-server": _VLLM_HINT,
}

WORKER_PRELOAD: Final = {
    "torch": ("torch", "dora_pipe.producers.role", "dora_pipe.producers.engines.torch_engine"),
    "vllm": ("dora_pipe.producers.role", "dora_pipe.producers.engines.vllm_imported"),
    "vllm-server": ("dora_pipe.producers.role", "dora_pipe.producers.engines.vllm_server"),
}
"""What workers of an engine need; imported once per machine. The torch engine does without
transformers, and who has a server without torch."""

TRAINER_PRELOAD = (
    "torch",
    "torch._dynamo",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "dora_pipe.consumers.role",
    "dora_pipe.consumers.trainers.torch_trainer",
)
"""What the trainer needs, with what transformers would else import when it makes a model: seconds
of CPU at every restart."""


COLLECT_AFTER: Final = (50_000, 20, 100)
"""Thresholds of Python's collector of cycles. By default it looks for them after every 700 new
objects, among all that torch has made: 3 % of a worker's CPU time, for next to no cycles."""


class StopFlag:
    """Set by SIGTERM or SIGINT; a role looks at it between two turns of its loop."""

    def __init__(self) -> None:
        self._set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._raise)

    def __call__(self) -> bool:
        return self._set

    def _raise(self, *_: object) -> None:
        self._set = True


def settle() -> StopFlag:
    """What the process of a role does first; the flag tells it when to stop."""
    gc.set_threshold(*COLLECT_AFTER)
    return StopFlag()


def worker_names(config: Config) -> tuple[str, ...]:
    """The workers that `run` starts: w0, w1, ..."""
    return tuple(f"w{number}" for number in range(config.workers.count))


def worker_engine(config: Config, name: str) -> str:
    """The engine of a worker that `run` starts; of any other, `workers.engine`.

    Example: with ``engines = ["vllm", "torch"]``, w0 and w2 have vLLM, w1 and w3 torch.
    """
    engines, names = config.workers.engines, worker_names(config)
    if not engines or name not in names:
        return config.workers.engine
    return engines[names.index(name) % len(engines)]


def worker_engines(config: Config) -> dict[str, str]:
    """The engines of the workers that `run` starts, by name."""
    return {name: worker_engine(config, name) for name in worker_names(config)}


def worker_address(config: Config, name: str) -> str:
    """Where the server of a worker that `run` starts runs already; empty where it does not."""
    pairs = zip(worker_names(config), config.workers.vllm.addresses, strict=False)
    return dict(pairs).get(name, "")


def with_engine(config: Config, engine: str, *, address: str = "") -> Config:
    """The configuration of a worker with this engine, and this server's address if it has one."""
    vllm = msgspec.structs.replace(config.workers.vllm, addresses=(address,) if address else ())
    workers = msgspec.structs.replace(config.workers, engine=engine, engines=(), vllm=vllm)
    return msgspec.structs.replace(config, workers=workers)


def need_engines(engines: Iterable[str]) -> None:
    """Raise, before anything starts, where these engines cannot run: ConfigError for a package that
    is missing, UsageError for an engine that is unknown."""
    for engine in sorted(set(engines)):
        if engine not in ENGINES:
            raise UsageError(f"no engine {engine!r}", hint=f"one of {', '.join(ENGINES)}")
        for name in ENGINES[engine]:
            if importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"engine {engine!r} needs {name}, which is not installed",
                    hint=HINTS[engine],
                )


def be_role(name: str, directory: RunDir, start: Callable[[], None]) -> int:
    """Run a role with its talk in a file; the exit code says how it ended."""
    directory.logs.mkdir(exist_ok=True)
    log = os.open(directory.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    talk(name)
    try:
        start()
    except LogTruncated as error:
        complain(error)
        return InvariantBroken.exit_code  # a role that starts again might not even notice it
    except DoraError as error:
        complain(error)
        return error.exit_code
    except Exception:
        logging.exception("error: %s ended by a fault of its own", name)
        return 1
    return 0


def talk(name: str) -> None:
    """What a role says goes to stderr, with the time and the role's name before it."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s {name} %(levelname)s %(message)s",
        force=True,
    )


def orchestrator(directory: RunDir, config: Config, first: RunStarted) -> None:
    """Be the orchestrator until the run ends. `first` starts a run that has no record yet."""
    from dora_pipe.orchestrator.role import Instance, run_orchestrator

    stop = settle()
    bus = directory.open_bus(config)
    try:
        run_orchestrator(
            bus=bus,
            topics=Topics(config.run.name),
            timing=config.timing,
            clock=SystemClock(),
            instance=Instance(
                name=uuid.uuid4().hex, host=platform.node(), pid=os.getpid(), package=__version__
            ),
            stop=stop,
            run_started=first,
            snapshots=directory.snapshots,
        )
    finally:
        bus.close()


def worker(directory: RunDir, config: Config, name: str) -> None:
    """Be a rollout worker until the run ends or it is drained."""
    from dora_pipe.producers.handover_kv import KvHandover
    from dora_pipe.producers.role import run_worker

    stop = settle()
    with (
        transferring(directory, config) as (transfers, store),
        closing(directory.open_bus(config)) as bus,
    ):
        run_worker(
            bus,
            Topics(config.run.name),
            worker=name,
            store=store,
            engine_factory=open_engine,
            handover=KvHandover(transfers),
            transfers=transfers.address,
            stop=stop,
            config=config,
        )


@contextmanager
def transferring(directory: RunDir, config: Config) -> Iterator[tuple[Transfers, PolicyStore]]:
    """How this process hands bytes to others, and the policy store behind its peers."""
    weights = directory.store(config) / "weights"
    opened = open_transfers(
        config.transfers,
        directory.handover,
        topics=Topics(config.run.name),
        open_bus=lambda: directory.open_bus(config),
        weights=lambda name: weights / name,
        clock=SystemClock(),
    )
    with closing(opened.transfers):
        yield opened.transfers, directory.policies(config, opened.peers)


def trainer(directory: RunDir, config: Config, *, adopt: bool = False) -> None:
    """Be the trainer until the run ends; under torchrun, ranks above 0 obey rank 0 instead."""
    from dora_pipe.consumers.role import run_trainer
    from dora_pipe.consumers.trainers.make import end_ranks, follows, make_trainer, need_trainer

    need_trainer(config)
    log = directory.log_place(config)
    if follows(config, log, directory.policies(config)):
        return
    try:
        with transferring(directory, config) as (transfers, store):
            run_trainer(
                lambda: directory.open_bus(config),
                Topics(config.run.name),
                store=store,
                stop=settle(),
                trainer_factory=partial(make_trainer, log=log),
                config=config,
                adopt=adopt,
                transfers=transfers.address,
            )
    finally:
        end_ranks()


def open_engine(*, assets: Path, config: Config, decode: Decode) -> Engine:
    """The engine that a configuration means. Raises ConfigError where it is not installed."""
    workers = config.workers
    need_engines([workers.engine])
    if workers.engine != "torch":
        from dora_pipe.cli.roles_vllm import open_vllm

        return open_vllm(assets, config, decode)
    from dora_pipe.producers.engines.torch_engine import TorchEngine

    return TorchEngine.open(
        assets,
        slots=workers.slots,
        context_tokens=workers.context_tokens,
        threads=workers.threads,
        decode=decode,
        lora_rank=config.lora.rank,
        versions_resident=versions_resident(config),
    )
