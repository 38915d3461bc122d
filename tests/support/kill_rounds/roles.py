"""Processes of a kill round: production roles with wrapped bus and store, model builder, judge."""

from __future__ import annotations

import os
import platform
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe import __version__
from dora_pipe.bus import open_bus
from dora_pipe.bus.blobs import BlobBus
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.kafka.security import KafkaSecurity
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.registry import make_learner
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.core.system.linux import die_with
from dora_pipe.launch import local_roles, roles
from dora_pipe.launch.processes import end_process
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore
from tests.support.kill_rounds.inject import FaultBus, FaultStore, Files, Injector
from tests.support.kill_rounds.judge import judge
from tests.support.kill_rounds.order import ROLES

MODEL: Final = "model"
JUDGE: Final = "judge"
"""Process that is not a role."""

CONTEXT_TOKENS: Final = 96


class FaultStart(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    directory: str
    parent_pid: int


def first_of(directory: RunDir) -> Path:
    return directory.path / "first.json"


def verdict_of(directory: RunDir) -> Path:
    return directory.path / "verdict.json"


def be(name: str, directory: RunDir) -> int:
    """Run as this process for `directory`; return the exit code."""
    while (left_ns := Files(directory.path).dead_until_ns(name) - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)
    starts: dict[str, Callable[[], None]] = {
        MODEL: lambda: _make_model(directory.path / MODEL),
        JUDGE: lambda: _judge(directory),
        local_roles.ORCHESTRATOR: lambda: _orchestrator(directory),
        local_roles.TRAINER: lambda: _trainer(directory),
    }
    return roles.run_role(name, directory, starts.get(name, lambda: _worker(directory, name)))


def _rigged(directory: RunDir, name: str) -> tuple[Config, Topics, Injector, Clock]:
    config = directory.config()
    topics = Topics(config.run.name)
    injector = Injector(Files(directory.path), name, topics)
    return config, topics, injector, SystemClock()


def _bus(directory: RunDir, config: Config, injector: Injector) -> Bus:
    log = open_bus(directory.bus_url(config), KafkaSecurity.of(config.bus))
    blobs = directory.log_location(config).blob_store()
    assert blobs is not None
    return BlobBus(FaultBus(log, injector), blobs)


def _orchestrator(directory: RunDir) -> None:
    from dora_pipe.orchestrator.curriculum import Samplers
    from dora_pipe.orchestrator.process.role import Instance, run_orchestrator

    first = msgspec.json.decode(first_of(directory).read_bytes(), type=RunStarted)
    config, topics, injector, clock = _rigged(directory, local_roles.ORCHESTRATOR)
    with closing(_bus(directory, config, injector)) as bus:
        run_orchestrator(
            bus,
            topics,
            stop=roles.prepare_role(local_roles.ORCHESTRATOR, topics.run),
            timing=config.timing,
            clock=clock,
            instance=Instance(
                name=uuid.uuid4().hex, host=platform.node(), pid=os.getpid(), package=__version__
            ),
            run_started=first,
            samplers=Samplers.load(config),
        )


def _worker(directory: RunDir, name: str) -> None:
    from dora_pipe.producers.worker.kv_handover import KvHandover
    from dora_pipe.producers.worker.role import run_worker
    from dora_pipe.store.transfers.files import MappedFiles

    config, topics, injector, clock = _rigged(directory, name)

    with closing(_bus(directory, config, injector)) as bus:
        run_worker(
            bus,
            topics,
            worker=name,
            store=PolicyStore(directory.store(config)),
            engine_factory=open_engine,
            handover=KvHandover(MappedFiles(directory.handover, clock=clock)),
            stop=roles.prepare_role(name, topics.run),
            config=config,
            clock=clock,
        )


def _trainer(directory: RunDir) -> None:
    from dora_pipe.consumers.trainer.role import run_trainer

    config, topics, injector, clock = _rigged(directory, local_roles.TRAINER)

    run_trainer(
        lambda: _bus(directory, config, injector),
        topics,
        store=FaultStore(directory.store(config), injector),
        learner_factory=make_learner,
        snapshot=directory.commits,
        stop=roles.prepare_role(local_roles.TRAINER, topics.run),
        config=config,
        clock=clock,
    )


def _make_model(path: Path) -> None:
    from dora_pipe.launch.examples import make_model

    partial = path.with_suffix(".partial")
    make_model(partial, "arithmetic", context_tokens=CONTEXT_TOKENS)
    partial.rename(path)


def _judge(directory: RunDir) -> None:
    config = directory.config()
    topics, store = Topics(config.run.name), PolicyStore(directory.store(config))
    files = Files(directory.path)
    first = msgspec.json.decode(first_of(directory).read_bytes(), type=RunStarted)
    trainer = make_learner(
        assets=store.assets_path(first.assets_digest),
        reference=store.weights_path(first.policy.digest),
        config=config,
    )
    acks = [ack for name in ROLES for ack in files.acks(name)]
    with closing(directory.open_bus(config)) as bus:
        hits = files.read_hits()
        dead = [hit.role for hit in hits if hit.down_s]
        alone = dead[0] if dead else ""
        verdict = judge(bus, topics, store.root, acks, trainer, clock=SystemClock(), dead=alone)
    verdict_of(directory).write_bytes(msgspec.json.encode(verdict))


def _be(start: FaultStart) -> int:
    die_with(start.parent_pid)
    return be(start.name, RunDir(Path(start.directory)))


if __name__ == "__main__":
    end_process(lambda: _be(msgspec.json.decode(sys.stdin.buffer.read(), type=FaultStart)))
