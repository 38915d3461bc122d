"""Bisection of a recorded run: the step that made it bad, and the group whose removal mends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dora_pipe.analysis.bisect import Limits, Values
from dora_pipe.analysis.bisected_run import BisectedRun, Repeater
from dora_pipe.analysis.replay import SourceRun
from dora_pipe.consumers.learners.learner import Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.recovery import read_commits
from dora_pipe.core.errors import ReplayDiverged
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.store.store import PolicyStore
from tests.support.recorded_run import RecordedRun
from tests.support.worker import VirtualClock

GOOD, STEP, BAD = 4, 8, 11
Seen = dict[str, frozenset[str]]
"""Groups that weights were trained on, by digest."""


class Remembering(SimulatedLearner):
    def __init__(self, observed: Seen, flavour: str = "") -> None:
        super().__init__(flavour=flavour)
        self.seen = observed

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        before = self.seen.get(self.manifest().digest, frozenset())
        result = super().train(batch, settings)
        self.seen[self.manifest().digest] = before | {group.group for group in batch.groups}
        return result


@dataclass
class Probe:
    seen: Seen
    bad: frozenset[str] = frozenset()
    direction: float | None = None
    asked: list[str] = field(default_factory=list)

    def values(self, weights: Path, digest: str, draws: int) -> Values:
        assert weights.is_file()
        self.asked.append(digest)
        worse = self.bad and self.bad <= self.seen[digest]
        return [float(index % 8 != 0) * (0.25 if worse else 1.0) for index in range(draws)]


@dataclass
class Stage:
    run: SourceRun
    commits: list[StepCommitted]
    seen: Seen
    folder: Path

    def bisected(self, *bad: str, steps: int = 20) -> BisectedRun:
        repeater = Repeater(run=self.run, folder=self.folder)
        probe = Probe(self.seen, frozenset(bad))
        limits = Limits(draws=64, steps=steps)
        return BisectedRun(repeater=repeater, probe=probe, limits=limits)

    def group(self, step: int) -> str:
        return self.commits[step].groups[0].group


@pytest.fixture
def stage(copy: RecordedRun, tmp_path: Path) -> Iterator[Stage]:
    with closing(copy.open()) as bus:
        observed: Seen = {}
        run = SourceRun(
            bus=bus,
            topics=copy.topics,
            store=PolicyStore(copy.store),
            make=lambda started: Remembering(observed),
            clock=VirtualClock(),
        )
        history = run.history
        observed[history.digest_of(0)] = frozenset()
        commits = list(read_commits(bus, run.topics, history.notes, run.clock))
        for commit in commits:
            groups = {group.group for group in commit.groups}
            observed[commit.digest_after] = observed[history.digest_of(commit.step)] | groups
        yield Stage(run, commits, observed, tmp_path)


def test_the_step_and_the_group_that_made_the_run_worse_are_named(stage: Stage) -> None:
    bad = stage.group(STEP)
    bisected = stage.bisected(bad)
    fall = bisected.search(GOOD, BAD)
    assert fall.step == STEP
    explanation = bisected.explain(fall, GOOD)
    assert [entry.name for entry in explanation.cause] == [bad]
    assert explanation.steps <= 20
    assert explanation.proof is not None and explanation.proof.before == pytest.approx(0.21875)


def test_a_group_of_an_earlier_step_is_named_where_the_fall_came_later(stage: Stage) -> None:
    early, late = stage.group(STEP - 1), stage.group(STEP)
    bisected = stage.bisected(early, late)
    fall = bisected.search(GOOD, BAD)
    assert fall.step == STEP
    explanation = bisected.explain(fall, GOOD)
    assert len(explanation.cause) == 1 and explanation.cause[0].name in (early, late)


def test_versions_that_the_store_lacks_are_repeated(stage: Stage) -> None:
    bisected = stage.bisected(stage.group(STEP))
    fall = bisected.search(GOOD, BAD)
    stage.run.store.drop_weights(stage.run.history.digest_of(STEP))
    again = stage.bisected(stage.group(STEP))
    assert not again.repeater.is_kept(STEP)
    assert again.search(GOOD, BAD) == fall


def test_without_a_fall_nothing_is_repeated(stage: Stage) -> None:
    bisected = stage.bisected()
    assert not bisected.search(GOOD, BAD).sure
    assert not bisected.repeater._states


def test_other_bits_under_equal_numerics_are_an_error(stage: Stage) -> None:
    bisected = stage.bisected(stage.group(STEP))
    stage.run.make = lambda started: Remembering(stage.seen, flavour="another machine")
    with pytest.raises(ReplayDiverged):
        bisected.repeater.before(STEP)
