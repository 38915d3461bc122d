"""Run a process as one role of a run."""

from __future__ import annotations

import gc
import logging
import os
import platform
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from typing import Final

from dora_pipe import __version__
from dora_pipe.config.model import Config
from dora_pipe.core.errors import DoraError, InvariantBroken, LogTruncated
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import complain, log_to_stderr, name_process, say
from dora_pipe.launch.local_roles import (
    ORCHESTRATOR,
    TRACES,
    TRAINER,
    show_gpus,
    with_engine,
    worker_address,
)
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.launch.supervisor import WAITED_OUT
from dora_pipe.observe.following import Checkpoint
from dora_pipe.observe.traces.follow import TraceSender
from dora_pipe.observe.traces.sinks import HttpSink
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.open import open_transfers

STATUS_HOURS: Final = 168

NS_PER_HOUR: Final = 3600 * 10**9

TRAINER_PRELOAD = (
    "torch",
    "torch._dynamo",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "dora_pipe.consumers.trainer.role",
    "dora_pipe.consumers.learners.torch.learner",
)
"""Imported before the loop, so that the trainer's CPU seconds cover training only."""


TRACES_NICE: Final = 5

COLLECT_AFTER: Final = (50_000, 20, 100)
"""Cycle collector thresholds. The default costs 3 % of a worker's CPU time and finds almost
nothing."""


class StopFlag:
    """Flag set by SIGTERM or SIGINT; roles check it between iterations."""

    def __init__(self) -> None:
        self._set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._raise)

    def __call__(self) -> bool:
        return self._set

    def _raise(self, *_: object) -> None:
        self._set = True


def prepare_role(name: str, run: str) -> StopFlag:
    """Set up the process of a role; return the flag that stops it."""
    role = (name,) if name in (ORCHESTRATOR, TRAINER, TRACES) else ("worker", name)
    name_process(*role, run)
    gc.set_threshold(*COLLECT_AFTER)
    return StopFlag()


def run_role(name: str, directory: RunDir, start: Callable[[], None]) -> int:
    """Run a role and log to a file; return its exit code."""
    directory.logs.mkdir(exist_ok=True)
    log = os.open(directory.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    log_as(name)
    try:
        start()
    except LogTruncated as error:
        complain(error)
        return InvariantBroken.exit_code  # a restarted role might not notice it
    except DoraError as error:
        complain(error)
        return error.exit_code + (WAITED_OUT if error.waited_out else 0)
    return 0


def share_cores() -> None:
    """Bound how long idle torch threads spin; call before importing torch.

    By default they spin for longer than a pass: next to other work, two threads are ten times
    slower than one. Without spinning, two are no faster than one.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def log_as(name: str) -> None:
    log_to_stderr(logging.INFO, f"%(asctime)s {name} %(levelname)s %(message)s")


def orchestrator(
    directory: RunDir, config: Config, first: RunStarted, *, resumed_by: str = ""
) -> None:
    """Run the orchestrator until the run ends. `first` is the record of a new run."""
    from dora_pipe.orchestrator.curriculum import Samplers
    from dora_pipe.orchestrator.process.role import Instance, run_orchestrator, settle_memory
    from dora_pipe.orchestrator.process.trim_port import Trimmed

    samplers = Samplers.load(config)
    settle_memory()
    stop = prepare_role(ORCHESTRATOR, config.run.name)
    with closing(directory.open_bus(config)) as bus:
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
            resumed_by=resumed_by,
            samplers=samplers,
            trimmed=Trimmed(
                keep_ns=STATUS_HOURS * NS_PER_HOUR,
                open_bus=partial(directory.open_bus, config),
            ),
        )


def worker(directory: RunDir, config: Config, name: str, *, engine: str = "") -> None:
    """Run a rollout worker until the run ends or it is drained; `engine` may replace that of the
    configuration."""
    config = with_engine(
        config, engine or config.workers.engine, address=worker_address(config, name)
    )
    show_gpus(config, name)
    from dora_pipe.producers.worker.kv_handover import KvHandover
    from dora_pipe.producers.worker.role import run_worker

    stop = prepare_role(name, config.run.name)
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
def transferring(directory: RunDir, config: Config) -> Iterator[tuple[MappedFiles, PolicyStore]]:
    """Open this process's byte transfer, and the policy store that uses it."""
    root = directory.store(config)
    transfers = open_transfers(
        config.transfers,
        directory.handover,
        topics=Topics(config.run.name),
        open_bus=lambda: directory.open_bus(config),
        stored=lambda name: root / name,
        clock=SystemClock(),
    )
    with closing(transfers):
        yield transfers, directory.policies(config, transfers.peers)


def trainer(directory: RunDir, config: Config, *, adopt: bool = False) -> None:
    """Run the trainer until the run ends; ranks above 0 follow rank 0."""
    show_gpus(config, TRAINER)
    from dora_pipe.consumers.learners.registry import end_ranks, follows, make_learner, need_learner
    from dora_pipe.consumers.trainer.role import run_trainer

    need_learner(config)
    for module in TRAINER_PRELOAD:
        import_module(module)
    log = directory.log_location(config)
    if follows(config, log, directory.policies(config)):
        return
    try:
        with transferring(directory, config) as (transfers, store):
            run_trainer(
                lambda: directory.open_bus(config),
                Topics(config.run.name),
                store=store,
                stop=prepare_role(TRAINER, config.run.name),
                learner_factory=partial(make_learner, log=log),
                config=config,
                adopt=adopt,
                snapshot=directory.commits,
                transfers=transfers.address,
            )
    finally:
        end_ranks()


def traces(directory: RunDir, config: Config, stop: Callable[[], bool] | None = None) -> None:
    """Export traces until the run ends; report unsent ones."""
    stop = stop or prepare_role(TRACES, config.run.name)
    os.nice(TRACES_NICE)
    with (
        closing(HttpSink(config.telemetry.traces)) as sink,
        closing(directory.open_bus(config)) as bus,
    ):
        sent = TraceSender(
            bus,
            Topics(config.run.name),
            sink,
            clock=SystemClock(),
            checkpoint=Checkpoint(directory.path / "traces.sent"),
        ).follow(stop)
    spans = f"{sent.spans} spans sent, {sink.rejected} of them rejected by the endpoint"
    say(f"{sent.groups} groups traced, {spans}")
    if not sent.whole and not stop():
        say(f"some traces were not sent; dora-pipe export traces {config.run.name} URL sends all")
