"""Runs the roles of a run that trains on the steps of another one: the trainer itself, in this
thread, and beside it who decides its batches. It decides nothing.

Commits are made by the trainer's own machine, with its own checks: it takes over from a trainer
that died, restores the weights and goes on where the log says. That is all there is to going on.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from threading import Event
from typing import Any, Final

from dora_pipe import __version__
from dora_pipe.audit.reading import records_of
from dora_pipe.bus.port import Append, Bus, TopicPartition
from dora_pipe.consumers.learners.registry import end_ranks, make_learner
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.consumers.trainer.role import LearnerFactory, run_trainer
from dora_pipe.core.clock import Clock, SystemClock
from dora_pipe.core.retry import retry_bus
from dora_pipe.core.run_lifecycle import await_stable_offset
from dora_pipe.core.runtime import Meter, Runtime
from dora_pipe.launch.retrain_plan import RetrainPlan, settings_again
from dora_pipe.orchestrator.batches_again import BatchesAgain, BatchRead, ReadBatch, Standing
from dora_pipe.schemas.control import RoleStarted, StepCommitted, decode_control
from dora_pipe.schemas.rounds import TakeBatch, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode

ROLE_STARTED: Final = b'"role-started"'

WHY: Final = "step {step} of {run} is trained again"

WHY_AGAIN: Final = (
    "groups of {run} that are there by its step {step}; the earliest deadlines go first"
)

Told = Callable[[int], None]
"""Hears of every step whose batch is taken."""


class SourceBatches:
    """Port: the batch of each step as the source's commit has it, or as it is taken again, in
    order."""

    effects: tuple[type, ...] = (ReadBatch,)

    def __init__(self, bus: Bus, plan: RetrainPlan, told: Told, clock: Clock) -> None:
        self._bus, self._plan, self._told, self._clock = bus, plan, told, clock
        self._commits: Iterator[StepCommitted] | None = None
        self._asked: list[ReadBatch] = []

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def start(self, effect: Any) -> None:
        """Read it with the next `poll`."""
        self._asked.append(effect)

    def poll(self) -> list[Any]:
        asked, self._asked = self._asked, []
        return [BatchRead(take=self._take(one.step)) for one in asked]

    def close(self) -> None:
        """Nothing runs."""

    def _take(self, step: int) -> TakeBatch:
        commit = self._next(step)
        retrained, batches = self._plan.retrained, self._plan.batches
        most = self._plan.config.sampling.max_tokens
        batch, why = (commit, WHY) if batches is None else (batches[step], WHY_AGAIN)
        self._told(step)
        return TakeBatch(
            reason=why.format(step=step, run=retrained.run),
            step=step,
            attempt=1,
            groups=batch.groups,
            settings=dict(settings_again(commit, retrained.settings, most)),
            parts=batch.parts,
        )

    def _next(self, step: int) -> StepCommitted:
        if self._commits is None:
            retrained = self._plan.retrained
            topics = Topics(retrained.run)
            history = read_history(self._bus, topics, self._clock)
            notes = history.notes[step : retrained.last + 1]
            self._commits = read_commits(self._bus, topics, notes, self._clock)
        found = next(self._commits)
        assert found.step == step
        return found


def train_again(
    plan: RetrainPlan,
    *,
    stop: Callable[[], bool],
    told: Told = lambda step: None,
    factory: LearnerFactory | None = None,
) -> bool:
    """Be both roles until the last step is committed; False when `stop` said so before.

    Raises InvariantBroken for a batch that is not what was trained, and what `run_trainer` raises.
    """
    directory, config = plan.directory, plan.config
    open_bus = partial(directory.open_bus, config)
    factory = factory or partial(make_learner, log=directory.log_location(config))
    over = Event()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as threads:
        deciding = threads.submit(_decide, open_bus, plan, told, lambda: stop() or over.is_set())
        try:
            run_trainer(
                open_bus,
                Topics(config.run.name),
                store=directory.policies(config),
                stop=lambda: stop() or (deciding.done() and deciding.exception() is not None),
                learner_factory=factory,
                config=config,
            )
        finally:
            over.set()
            end_ranks()
        return deciding.result()


def _decide(
    open_bus: Callable[[], Bus], plan: RetrainPlan, told: Told, stop: Callable[[], bool]
) -> bool:
    """Decide the batches until the end is decided; False when `stop` said so before."""
    topics, clock = Topics(plan.config.run.name), SystemClock()
    with closing(open_bus()) as bus:
        writer = retry_bus(
            "taking over", lambda: bus.writer(exclusive=f"{topics.run}.orchestrator"), clock
        )
        with closing(writer):
            named = (topics.control, topics.decisions)
            await_stable_offset(bus, [TopicPartition(one, 0) for one in named], clock)
            standing, epoch = _standing(bus, topics, first=plan.retrained.first)
            if standing.stopped:
                return True
            record = encode(_role_started(epoch + 1, clock))
            writer.append([Append(topic=topics.control, key=b"orchestrator", value=record)])
            machine = BatchesAgain(
                standing, topics=topics, last=plan.retrained.last, role_epoch=epoch + 1
            )
            runtime = Runtime(
                machine,
                bus=bus,
                writer=writer,
                ports=[SourceBatches(bus, plan, told, clock)],
                clock=clock,
                meter=Meter(),
                exclusive=True,
            )
            with closing(runtime):
                runtime.run(stop)
    return standing.stopped


def _standing(bus: Bus, topics: Topics, *, first: int) -> tuple[Standing, int]:
    """Where the rounds in the log stand, and the newest role epoch of who wrote them."""
    standing, epoch = Standing(step=first, decided=first - 1), -1
    decisions, control = TopicPartition(topics.decisions, 0), TopicPartition(topics.control, 0)
    for record in records_of(bus, {decisions: bus.end(decisions)}):
        standing.round(decode_round(record.value))
    # A commit is folded by the round that takes the batch after it.
    standing.step = max(first, standing.decided)
    for record in records_of(bus, {control: bus.end(control)}):
        if ROLE_STARTED in record.value:
            fact = decode_control(record.value)
            if isinstance(fact, RoleStarted) and fact.role == "orchestrator":
                epoch = max(epoch, fact.role_epoch)
    return standing, epoch


def _role_started(epoch: int, clock: Clock) -> RoleStarted:
    return RoleStarted(
        at_ns=clock.wall_ns(),
        role="orchestrator",
        role_epoch=epoch,
        instance=uuid.uuid4().hex,
        host=platform.node(),
        pid=os.getpid(),
        package=__version__,
    )
