"""Trains steps again from a version in the middle, without some of their rows, as often as asked.

The state before a step, weights and moments of the optimizer, is made once from the checkpoint
before it, and kept in a folder: every trial begins there. What leads there must have the committed
bits, except where the numerics are other ones; those are named.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from dora_pipe.audit.bisect import Trial
from dora_pipe.audit.suspects import TrainedRow
from dora_pipe.bus.port import Bus
from dora_pipe.consumers.contributions import stored_contributions
from dora_pipe.consumers.learners.port import Learner, TrainBatch
from dora_pipe.consumers.trainer.batch_reader import BatchReader, read_batch
from dora_pipe.consumers.trainer.change_file import change_of
from dora_pipe.consumers.trainer.changed_batch import UNCHANGED, BatchChange, changed
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.recovery import read_commits
from dora_pipe.consumers.trainer.replay_steps import (
    ReplayedStep,
    load_base,
    numerics_again,
    replay_steps,
)
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import InvariantBroken, ReplayDiverged
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.store.store import PolicyStore

WEIGHTS: Final = "weights.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
MADE: Final = "made.json"
TRIAL: Final = "trial"

Contributions = Sequence[Mapping[str, Any]]


class MadeWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that were made here. Example: ``MadeWeights(of="version 96", digest="ab12...")``."""

    of: str
    """In words."""
    digest: str
    dtype: PolicyDtype = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """What is otherwise in every step from `first` on than the log has it: a run as it might have
    gone, to look into."""

    first: int
    change: BatchChange = UNCHANGED
    settings: Mapping[str, float | int | str | bool]


class StepRepeater:
    """Trains steps of a run again. Example::

    repeater = StepRepeater(bus, topics, store, history, learner, folder=scratch, clock=clock)
    weights, made = repeater.train(Trial(first=96, last=98, without=frozenset({"g0000003871"})))
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        store: PolicyStore,
        history: CommitHistory,
        learner: Learner,
        *,
        folder: Path,
        clock: Clock,
        planted: Planted | None = None,
    ) -> None:
        self._bus, self._topics, self._store = bus, topics, store
        self._history, self._learner = history, learner
        self._folder, self._clock = folder, clock
        self._planted = planted
        self._own_change = change_of(store, history) if planted is None else planted.change
        """What the run itself says of its batches, or what is planted."""
        self._contributed: dict[int, Contributions] = {}
        self.other_numerics: frozenset[str] = frozenset()
        """Keys of the fingerprint that differ here: nothing then has the committed bits."""
        self.led = 0
        """Steps that were trained as they were: to lead somewhere, or to be compared with."""

    def train(self, trial: Trial) -> tuple[Path, MadeWeights]:
        """The weights that a trial ends with, and what they are; the last one's are kept.

        Raises UsageError, ReplayDiverged, InvariantBroken, PolicyError, NonFinite.
        """
        folder = self._folder / TRIAL
        if (made := _made(folder)) is not None and made.of == trial.words:
            return folder / WEIGHTS, made
        self._load(trial.first)
        change = self._change(trial.without)
        for step in self._again(trial.first, trial.last + 1, change):
            if not trial.without:
                self.led += 1
                self._contributed[step.step] = step.contributions
        return folder / WEIGHTS, self._keep(folder, trial.words, moments=False)

    def before(self, step: int) -> tuple[Path, MadeWeights]:
        """The weights before a step, made again as the steps before it go, and what they are.

        Steps asked for in ascending order share their way. Raises as `train`.
        """
        self._load(step)
        folder = self._before(step)
        made = _made(folder)
        assert made is not None
        return folder / WEIGHTS, made

    def rows(self, first: int, last: int) -> list[TrainedRow]:
        """The trajectories of steps `first` .. `last`, and what each did to the weights.

        A step whose contributions are not in the store is trained again for them.
        """
        self._load(first)
        found: list[TrainedRow] = []
        commits = self._commits(first, last + 1)
        here = numerics_again(self._learner, commits[0])
        then = commits[0].numerics
        keys = (one for one in here.keys() | then.keys() if here.get(one) != then.get(one))
        self.other_numerics |= frozenset(keys)
        missing = [one.step for one in commits if not self._contributions(one)]
        if missing:
            self.train(Trial(first=min(missing), last=max(missing)))
        run = self._history.sampled_by or self._topics.run
        reader = BatchReader(
            self._bus, self._topics.trajectories, run=run, starts={}, clock=self._clock
        )
        try:
            for commit in commits:
                batch = changed(read_batch(reader, commit, strict=False), self._change(frozenset()))
                found += _rows(batch, self._contributions(commit))
        finally:
            reader.close()
        return found

    def forget(self) -> None:
        """Remove what was kept."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _contributions(self, commit: StepCommitted) -> Contributions:
        there = self._contributed.get(commit.step)
        if there is None and (self._planted is None or commit.step < self._planted.first):
            there = stored_contributions(self._store, commit.contributions.sha256)
        return there or ()

    def _load(self, step: int) -> None:
        """Bring the learner to where it was before a step."""
        folder = self._before(step)
        made = _made(folder)
        if made is None:
            self._lead_to(step)
            self._keep(folder, f"before step {step}", moments=True)
            return
        started = self._history.run_started
        assert started is not None
        state = folder / OPTIMIZER if step or started.optimizer is not None else None
        self._learner.load(folder / WEIGHTS, digest=made.digest, optimizer=state)

    def _lead_to(self, step: int) -> None:
        started = self._history.run_started
        assert started is not None
        planted = self._planted
        # A checkpoint behind what is planted is of the run as it went.
        end = step if planted is None else min(step, planted.first)
        notes = self._history.notes[:end]
        near = [at for at in range(step) if _made(self._before(at)) is not None]
        base = max((note.step + 1 for note in notes if note.checkpoint), default=0)
        if near and near[-1] >= base:
            base = near[-1]
            self._load(base)
        else:
            base = load_base(self._store, self._learner, started, notes)
        for one in self._again(base, step, self._change(frozenset())):
            self.led += 1
            self._check(one)

    def _check(self, step: ReplayedStep) -> None:
        """What leads there must be what the run had, or its numerics are other ones."""
        self._contributed[step.step] = step.contributions
        planted = self._planted is not None and step.step >= self._planted.first
        if step.equal or planted:
            return
        self.other_numerics |= frozenset(step.other_numerics)
        if not step.other_numerics:
            raise ReplayDiverged(
                f"step {step.step} gives other weights here, first in {step.tensor}",
                hint="`dora-pipe replay RUN` compares every step",
            )

    def _again(self, first: int, end: int, change: BatchChange) -> list[ReplayedStep]:
        again = replay_steps(
            self._bus,
            self._topics,
            self._store,
            self._history,
            self._learner,
            self._commits(first, end),
            clock=self._clock,
            change=change,
        )
        return list(again)

    def _commits(self, first: int, end: int) -> list[StepCommitted]:
        """The commits of some steps, with the settings that are planted."""
        commits = read_commits(self._bus, self._topics, self._history.notes[first:end], self._clock)
        planted = self._planted
        if planted is None:
            return list(commits)
        return [
            msgspec.structs.replace(one, settings={**one.settings, **planted.settings})
            if one.step >= planted.first
            else one
            for one in commits
        ]

    def _change(self, without: frozenset[str]) -> BatchChange:
        own = self._own_change
        return replace(own, without=own.without | without) if without else own

    def _before(self, step: int) -> Path:
        return self._folder / f"before-{step}"

    def _keep(self, folder: Path, words: str, *, moments: bool) -> MadeWeights:
        """Write what the learner has now; it is there when `made.json` is."""
        (folder / MADE).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        manifest = self._learner.save_weights(folder / WEIGHTS)
        if moments:
            self._learner.save_optimizer(folder / OPTIMIZER)
        made = MadeWeights(of=words, digest=manifest.digest, dtype=manifest.dtype)
        partial = folder / f"{MADE}.partial"
        partial.write_bytes(msgspec.json.encode(made))
        partial.replace(folder / MADE)
        return made


def _made(folder: Path) -> MadeWeights | None:
    """What lies in a folder, if it is whole."""
    file = folder / MADE
    return msgspec.json.decode(file.read_bytes(), type=MadeWeights) if file.is_file() else None


def _rows(batch: TrainBatch, contributions: Contributions) -> list[TrainedRow]:
    by_name = {row["trajectory"]: row for row in contributions}
    found = []
    for group in batch.groups:
        for one in group.trajectories:
            if one.trajectory not in by_name:
                raise InvariantBroken(f"step {batch.step} says nothing of {one.trajectory}")
            row = by_name[one.trajectory]
            found.append(
                TrainedRow(
                    step=batch.step,
                    group=group.group,
                    trajectory=one.trajectory,
                    reward=one.reward,
                    advantage=row["advantage"],
                    tokens=row["tokens"],
                    ratio_max=row.get("ratio_max"),
                    loss_share=row.get("loss_share"),
                    answer=_sampled(one),
                )
            )
    return found


def _sampled(one: Trajectory) -> tuple[int, ...]:
    """The tokens that the policy sampled."""
    ids, mask = np.asarray(one.token_ids), np.asarray(one.loss_mask)
    return tuple(ids[mask == 1].tolist())
