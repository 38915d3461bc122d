"""Commands that are a worker on a log of their own (`audit.worker_log`): how it is configured, and
how far it is."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import msgspec

from dora_pipe.audit.worker_log import Joined, Work, WorkerLog
from dora_pipe.bus.port import TopicPartition
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.config.model import Config
from dora_pipe.launch.local_roles import with_engine
from dora_pipe.producers.worker.engine_port import Policies
from dora_pipe.producers.worker.role import EngineFactory, OpenPool, run_worker


def alone(config: Config, engine: str) -> Config:
    """This machine's part of such a worker's configuration: what is begun is not recorded midway,
    and nobody sleeps."""
    config = with_engine(config, engine)
    workers = msgspec.structs.replace(
        config.workers, elastic=0, checkpoint_tokens=config.workers.context_tokens
    )
    return msgspec.structs.replace(config, workers=workers)


def work_on(
    log: WorkerLog,
    name: str,
    parts: WorkerParts,
    *,
    phase: str,
    total: int,
    report: CommandProgress,
) -> Work:
    """What is the worker of this name on a log, and says how many records of `total` there are.

    Raises what `run_worker` does.
    """

    def work(joined: Joined) -> None:
        with closing(_HowFar(log, phase, total, report)) as how_far:
            run_worker(
                log.bus,
                log.topics,
                worker=name,
                store=parts.store,
                engine_factory=parts.engine,
                open_pool=parts.pool,
                stop=how_far,
                config=parts.config,
                joined=joined,
                source=parts.source,
            )

    return work


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What such a worker is made of."""

    store: Policies
    config: Config
    """Of this machine; see `alone`."""
    engine: EngineFactory
    pool: OpenPool | None = None
    """None: its own, which end with it."""
    source: str = ""
    """Of what it samples; empty: all tasks of the configuration are started."""


class _HowFar:
    """Says how many records there are; the worker asks it at every turn whether to stop, which it
    never wants."""

    def __init__(self, log: WorkerLog, phase: str, total: int, report: CommandProgress) -> None:
        self._phase, self._total, self._report = phase, total, report
        self._reader = log.bus.reader({TopicPartition(log.topics.trajectories, 0): 0})
        self._there = 0

    def __call__(self) -> bool:
        self._there += len(self._reader.poll(timeout_s=0.0))
        self._report(self._phase, self._there, self._total)
        return False

    def close(self) -> None:
        """Read no more."""
        self._reader.close()
