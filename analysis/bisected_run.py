"""Measure versions and trials of a run with a probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dora_pipe.analysis.bisect import (
    Comparison,
    Explanation,
    Fall,
    Limits,
    Subject,
    Trial,
    Values,
    explain,
    search,
    words,
)
from dora_pipe.analysis.change import Change, Start
from dora_pipe.analysis.probes import Probe
from dora_pipe.analysis.replay import SourceRun, StepResult, raise_if_diverged, replay_steps
from dora_pipe.analysis.suspects import suspects_of
from dora_pipe.consumers.contributions import stored_contributions
from dora_pipe.consumers.trainer.recovery import read_commits
from dora_pipe.consumers.trainer.replay_steps import numerics_again
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.store.safetensors_file import read_manifest

TRIAL: Final = "trial.weights"

Rows = list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Repeater:
    """Repeats steps of a run; `folder` keeps the state before a step."""

    run: SourceRun
    folder: Path
    _states: dict[int, Start] = field(default_factory=dict)
    _contributions: dict[int, Rows] = field(default_factory=dict)

    def version(self, version: int) -> Path:
        """Return a version's weights, stored or repeated. Raises as `replay_steps`."""
        if self.is_kept(version):
            return self.run.store.weights(self.run.history.digest_of(version))
        return self.before(version).weights

    def is_kept(self, version: int) -> bool:
        digest = self.run.history.digest_of(version)
        return bool(digest) and self.run.store.has_weights(digest)

    def before(self, step: int) -> Start:
        """Return the state before a step. Raises as `replay_steps`."""
        if step not in self._states:
            learner, stem = self.run.learner, self.folder / f"before-{step}"
            self._lead_to(step)
            manifest = learner.save_weights(stem.with_suffix(".weights"))
            optimizer = stem.with_suffix(".optimizer")
            learner.save_optimizer(optimizer)
            self._states[step] = Start(
                weights=stem.with_suffix(".weights"), digest=manifest.digest, optimizer=optimizer
            )
        return self._states[step]

    def trial(self, trial: Trial) -> Path:
        """Return a trial's weights; the next trial overwrites them."""
        change = Change(drop=trial.drop, start=self.before(trial.first))
        for result in replay_steps(self.run, range(trial.first, trial.last + 1), change):
            self._look(result, unchanged=not trial.drop)
        self.run.learner.save_weights(self.folder / TRIAL)
        return self.folder / TRIAL

    def other_numerics(self, step: int) -> bool:
        return numerics_again(self.run.learner, self._commit(step)) != self._commit(step).numerics

    def contributions(self, step: int) -> Rows:
        """Return a step's contributions, stored or repeated."""
        if step not in self._contributions and self.run.altered is None:
            sha256 = self._commit(step).contributions.sha256
            stored = stored_contributions(self.run.store, sha256)
            if stored:
                self._contributions[step] = stored
        if step not in self._contributions:
            self.trial(Trial(first=step, last=step))
        return self._contributions[step]

    def _commit(self, step: int) -> StepCommitted:
        notes = self.run.history.notes[step : step + 1]
        (commit,) = read_commits(self.run.bus, self.run.topics, notes, self.run.clock)
        return commit

    def _lead_to(self, step: int) -> None:
        kept = max((saved_step for saved_step in self._states if saved_step <= step), default=-1)
        checkpoints = (note.step + 1 for note in self.run.history.notes[:step] if note.checkpoint)
        if kept >= max(checkpoints, default=0):
            results = replay_steps(self.run, range(kept, step), Change(start=self._states[kept]))
        else:
            results = replay_steps(self.run, range(step, step))
        for result in results:
            self._look(result, unchanged=True)

    def _look(self, result: StepResult, *, unchanged: bool) -> None:
        if not unchanged:
            return
        self._contributions[result.replayed.step] = [*map(dict, result.replayed.contributions)]
        if not result.replayed.other_numerics and self.run.altered is None:
            raise_if_diverged(result)


@dataclass(slots=True, kw_only=True)
class BisectedRun:
    repeater: Repeater
    probe: Probe
    limits: Limits
    report: Callable[[str], None] = lambda words: None
    _values: dict[Subject, Values] = field(default_factory=dict)

    def search(self, good: int, bad: int) -> Fall:
        """Find the fall. Raises as the probe and the repeater."""
        return search(self.measure, good, bad, direction=self.probe.direction)

    def explain(self, fall: Fall, good: int) -> Explanation:
        """Find the group that caused a fall; trials begin at version `good` or later."""
        first = max(fall.step - self.limits.before, good)
        rows = {
            number: self.repeater.contributions(number) for number in range(first, fall.step + 1)
        }
        suspects = suspects_of(rows, self.limits.suspects)
        comparison, last = self._reference(fall, first)
        return explain(comparison, suspects, last, self.limits.steps)

    def measure(self, subject: Subject) -> Values:
        if subject not in self._values:
            self.report(words(subject))
            repeater = self.repeater
            weights = (
                repeater.version(subject) if isinstance(subject, int) else repeater.trial(subject)
            )
            digest = read_manifest(weights).digest
            self._values[subject] = self.probe.values(weights, digest, self.limits.draws)
        if not self._values[subject]:
            raise UsageError(f"the probe has no value for {words(subject)}")
        return self._values[subject]

    def _reference(self, fall: Fall, first: int) -> tuple[Comparison, int]:
        committed = self.repeater.run.history.next_step
        for last in range(min(fall.step + self.limits.after, committed - 1), fall.step, -1):
            comparison = self._comparison(fall, self._unchanged(first, last))
            if comparison.fall().low > 0:
                return comparison, last
        return self._comparison(fall, self._unchanged(first, fall.step)), fall.step

    def _comparison(self, fall: Fall, bad: Subject) -> Comparison:
        return Comparison(self.measure, fall.step, bad, fall.direction)

    def _unchanged(self, first: int, last: int) -> Subject:
        if self.repeater.other_numerics(last):
            return Trial(first=first, last=last)
        return last + 1
