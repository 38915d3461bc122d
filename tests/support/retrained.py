"""Steps of a recorded run trained again by the trainer without torch, as runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dora_pipe.audit.replay_step import StepLine, replay
from dora_pipe.audit.retrained import RetrainedReport, audit_retrained
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.changed_batch import UNCHANGED, BatchChange
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.core.clock import SystemClock
from dora_pipe.launch.retrain import Told, train_again
from dora_pipe.launch.retrain_plan import Retraining, RetrainPlan, groups_again, plan_retrain
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.observe.lineage import policy_after
from dora_pipe.schemas.control import StepCommitted
from tests.support.recorded_run import RecordedRun

NAME = "recorded"
AGAIN = "again"
CLOCK = SystemClock()


def learner_of(**_: Any) -> SimulatedLearner:
    """What trains in place of torch."""
    return SimulatedLearner()


def planned(
    root: Path,
    name: str,
    first: int = 5,
    last: int | None = 7,
    *,
    change: BatchChange = UNCHANGED,
    overrides: tuple[str, ...] = (),
    source: str = NAME,
    again: bool = False,
) -> RetrainPlan:
    """A run beside its source, which has begun or goes on; its batches taken again, or kept."""
    wanted = Retraining(name=name, first=first, last=last, overrides=overrides, change=change)
    with opened(source, root) as run:
        if again:
            wanted = replace(wanted, again=groups_again(run, wanted))
        return plan_retrain(run, wanted, lambda of, started: SimulatedLearner())


def retrained(root: Path, name: str, **how: Any) -> list[StepCommitted]:
    """The same, trained to its end; its commits."""
    assert train_again(planned(root, name, **how), stop=lambda: False, factory=learner_of)
    return commits(root, name)


def runs_with_again(root: Path, recorded: RecordedRun, *, again: bool = False) -> Path:
    """The recorded run, and steps 5 to 7 of it trained again (`AGAIN`) with nothing otherwise, on
    the batches that it had or, where those are taken `again`, on such."""
    recorded.copy(root / NAME)
    retrained(root, AGAIN, again=again)
    return root


def broken_off(root: Path, name: str, steps: int, **how: Any) -> bool:
    """The same, until so many batches were taken; whether it came to its end."""
    taken: list[int] = []
    told: Told = taken.append
    stop: Callable[[], bool] = lambda: len(taken) > steps  # noqa: E731
    return train_again(planned(root, name, **how), stop=stop, told=told, factory=learner_of)


def commits(root: Path, name: str) -> list[StepCommitted]:
    """A run's own commits, in order."""
    with opened(name, root) as run:
        history = read_history(run.bus, run.topics, CLOCK)
        notes = history.notes[history.first_step :]
        return list(read_commits(run.bus, run.topics, notes, CLOCK))


def audited(root: Path, name: str) -> RetrainedReport:
    with opened(name, root) as run:
        return audit_of(run)


def audit_of(run: OpenRun) -> RetrainedReport:
    """The same, of a run that is open."""
    started, _ = policy_after(run.bus, run.topics, 0)
    return audit_retrained(run.bus, run.topics, run.policies, started, CLOCK)


def replayed(root: Path, name: str, first: int, end: int) -> list[StepLine]:
    """Its steps once more."""
    with opened(name, root) as run:
        lines = replay(
            run.bus,
            run.topics,
            run.policies,
            SimulatedLearner(),
            first=first,
            last=end,
            clock=CLOCK,
        )
        return list(lines)
