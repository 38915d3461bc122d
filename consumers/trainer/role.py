"""Trainer process.

1. Wait for `run started`.
2. Take the exclusive writer, which fences the predecessor.
3. Wait for pending transactions, then read commits and last incarnation from control.
4. Append `role started` with the next incarnation.
5. Run the machine, which first restores the weights.

An append with unknown outcome ends the role (`OutcomeUnknown`); a restart reads whether it
succeeded.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from dora_pipe import __version__
from dora_pipe.bus.bus import Bus, Writer
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config, async_batches
from dora_pipe.config.retention import full_every, keep_every_of
from dora_pipe.consumers.learners.learner import Learner
from dora_pipe.consumers.learners.registry import make_learner
from dora_pipe.consumers.trainer.batch_reader import RECORDS_MAX
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.effect_handlers import EffectHandlers, HandlersSetup
from dora_pipe.consumers.trainer.machine import KEY, TrainerMachine, TrainerSetup
from dora_pipe.consumers.trainer.ports import ThreadPort
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.errors import InvariantBroken, PolicyError
from dora_pipe.core.loop.effect_runner import BackgroundWriter
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.loop.run_lifecycle import await_stable_offset, wait_for_run
from dora_pipe.core.loop.runtime import Meter, Runtime
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.core.pure.status_schedule import quiet_ns
from dora_pipe.core.pure.wait_tracker import Limits
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.schemas.control import RoleStarted, RunStarted
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.store.store import PolicyStore

LOG = logging.getLogger(__name__)

CACHE_SHARE: Final = 2
"""Cache capacity per trajectory in flight: superseded ones take space."""


class LearnerFactory(Protocol):
    """Makes a learner from config and tokenizer files."""

    def __call__(self, *, assets: Path, reference: Path, config: Config) -> Learner:
        """Return a learner; `reference` is the weights file of version 0. Raises PolicyError,
        ConfigError."""
        ...


def run_trainer(
    open_bus: Callable[[], Bus],
    topics: Topics,
    *,
    store: PolicyStore,
    stop: Callable[[], bool],
    learner_factory: LearnerFactory = make_learner,
    config: Config | None = None,
    adopt: bool = False,
    snapshot: Path | None = None,
    transfers: str = "",
    clock: Clock | None = None,
    meter: Meter | None = None,
) -> None:
    """Run the trainer until the run is over or `stop` returns True.

    Calls `open_bus` twice, for loop and working thread. Free keys (timing, checkpoints, threads)
    come from `config`, others from the log. `adopt` accepts committed weights that cannot be
    reproduced. `snapshot` is the file that shortens a restart. `transfers` is this process's weight
    server.

    Raises UsageError, ReplayDiverged, NonFinite, Fenced, OutcomeUnknown, PolicyError,
    ResourceError, BusError.
    """
    clock, meter = clock or SystemClock(), meter or Meter()
    with closing(open_bus()) as bus:
        if wait_for_run(bus, topics, stop, clock) is None:
            return
        writer = retry_bus(
            "taking over", lambda: bus.writer(exclusive=f"{topics.run}.trainer"), clock
        )
        with closing(writer):
            await_stable_offset(bus, [TopicPartition(topics.control, 0)], clock)
            history = read_history(bus, topics, clock, snapshot)
            run = history.run_started
            if run is None:
                raise InvariantBroken(f"the first record of {topics.control} cannot be read")
            config = _config_of(run, config)
            open_handlers = partial(
                _opened_handlers,
                open_bus,
                handlers_setup(topics, run, config, history, adopt=adopt, snapshot=snapshot),
                store=store,
                make_learner=partial(_make, learner_factory, store, run, config),
                clock=clock,
                meter=meter,
            )
            incarnation = _announce(writer, topics, history, clock)
            setup = trainer_setup(
                config, run, topics=topics, incarnation=incarnation, transfers=transfers
            )
            _serve(setup, history, bus, writer, ThreadPort(open_handlers), clock, meter, stop)


def handlers_setup(
    topics: Topics,
    run: RunStarted,
    config: Config,
    history: CommitHistory,
    *,
    adopt: bool,
    snapshot: Path | None = None,
) -> HandlersSetup:
    """Return start offsets and cache bounds."""
    batch = config.rollout.prompts_per_step * config.rollout.group_size
    in_flight = async_batches(config.staleness) * batch
    return HandlersSetup(
        topics=topics,
        started=run,
        starts=dict(history.starts),
        adopt=adopt,
        snapshot=snapshot,
        leaves_device=config.trainer.offload_between_steps,
        records_max=max(RECORDS_MAX, CACHE_SHARE * math.ceil(in_flight)),
    )


def _serve(
    setup: TrainerSetup,
    history: CommitHistory,
    bus: Bus,
    writer: Writer,
    port: ThreadPort,
    clock: Clock,
    meter: Meter,
    stop: Callable[[], bool],
) -> None:
    with closing(port), closing(BackgroundWriter(bus.writer())) as status:
        machine = TrainerMachine(setup, history, cost=meter.cost, cached=port.cached)
        runtime = Runtime(
            machine,
            bus=bus,
            writer=writer,
            port=port,
            clock=clock,
            meter=meter,
            exclusive=True,
            status=status,
        )
        with closing(runtime):
            runtime.run(stop)
    LOG.info("trainer ends before step %d", history.next_step)


def trainer_setup(config: Config, run: RunStarted, **own: Any) -> TrainerSetup:
    """Return an incarnation's settings."""
    timing = config.timing
    return TrainerSetup(
        checkpoint_every=config.trainer.checkpoint_every,
        keep_every=keep_every_of(config.store.keep_every, run),
        full_every=full_every(config, run.policy.dtype),
        heartbeat_ns=int(timing.heartbeat_s * 1e9),
        quiet_ns=quiet_ns(timing),
        limits=Limits(short_s=timing.alarm_s, work_s=timing.alarm_work_s),
        **own,
    )


@contextmanager
def _opened_handlers(
    open_bus: Callable[[], Bus], setup: HandlersSetup, **own: Any
) -> Iterator[EffectHandlers]:
    with closing(open_bus()) as bus, closing(EffectHandlers(setup, bus=bus, **own)) as handlers:
        yield handlers


def _make(factory: LearnerFactory, store: PolicyStore, run: RunStarted, config: Config) -> Learner:
    assets = store.assets(run.assets_digest)
    if not assets.is_dir():
        raise PolicyError(
            f"no config and tokenizer files at {assets}",
            hint="set store.path to the directory of the run's start",
        )
    reference = store.held_weights(run.policy.digest)
    return factory(assets=assets, reference=reference, config=config)


def _announce(writer: Writer, topics: Topics, history: CommitHistory, clock: Clock) -> int:
    incarnation = history.incarnation + 1
    started = RoleStarted(
        at_ns=clock.wall_ns(),
        role="trainer",
        incarnation=incarnation,
        instance=uuid.uuid4().hex,
        host=platform.node(),
        pid=os.getpid(),
        package=__version__,
    )
    writer.append([Append(topic=topics.control, key=KEY, value=encode(started))])
    LOG.info("trainer started, incarnation %d, step %d is next", incarnation, history.next_step)
    return incarnation


def _config_of(run: RunStarted, local: Config | None) -> Config:
    config = logged_config(run.config)
    if local is None:
        return config
    trainer = msgspec.structs.replace(
        config.trainer,
        micro_batch_tokens=local.trainer.micro_batch_tokens,
        gradient_checkpointing=local.trainer.gradient_checkpointing,
        offload_between_steps=local.trainer.offload_between_steps,
        checkpoint_every=local.trainer.checkpoint_every,
        threads=local.trainer.threads,
        device=local.trainer.device,
    )
    task = msgspec.structs.replace(config.task, directory=local.task.directory)
    return msgspec.structs.replace(
        config,
        task=task,
        teacher=config.teacher.on(local.teacher),
        trainer=trainer,
        timing=local.timing,
        bus=local.bus,
        policies=local.policies,
        store=local.store,
    )
