"""What a worker starts slowly, kept for the next one of its process; decides only when it ends.

A command that is a worker again and again, each time on another log or under other weights, starts
its engine and the processes of its tasks once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from dora_pipe.config.model import Config, Task
from dora_pipe.core.clock import Clock
from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.requests import Decode
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.worker.role import EngineFactory


class KeptPool(TaskPool):
    """Processes of a task that outlive who closes them; `end` ends them."""

    def close(self) -> None:
        """Nothing: the next worker has them."""

    def end(self) -> None:
        """Stop, as `TaskPool.close` does."""
        super().close()


class _KeptEngine:
    """An engine that its worker cannot close."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        pass


class KeptParts:
    """Engine and task processes of workers that come one after the other, of one configuration.

    Example::

        with closing(KeptParts(open_engine)) as kept:
            run_worker(..., engine_factory=kept.engine, open_pool=kept.pool)
            kept.forget(version=1)
    """

    def __init__(self, factory: EngineFactory) -> None:
        self._factory = factory
        self._engine: Engine | None = None
        self._pools: list[tuple[Task, KeptPool]] = []

    def engine(self, *, assets: Path, config: Config, decode: Decode) -> Engine:
        """The engine; made when it is asked for first. Raises PolicyError."""
        if self._engine is None:
            self._engine = self._factory(assets=assets, config=config, decode=decode)
        return cast("Engine", _KeptEngine(self._engine))

    def pool(self, task: Task, *, clock: Clock) -> TaskPool:
        """The processes of a task; started when they are asked for first."""
        for own, pool in self._pools:
            if own == task:
                return pool
        pool = KeptPool(task, clock=clock)
        self._pools.append((task, pool))
        return pool

    def forget(self, version: int) -> None:
        """Let the engine drop a version, so that another one may have its number."""
        if self._engine is not None:
            self._engine.drop(version)

    def close(self) -> None:
        for _, pool in self._pools:
            pool.end()
        self._pools.clear()
        if self._engine is not None:
            self._engine.close()
