"""Repeat committed steps from the log and a checkpoint, with or without a change.

Without one, weights, metrics and contributions must be bit-equal; a tolerance would hide errors.
The replay ends at the first difference, unless the numerics fingerprint differs (another machine or
torch version).
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from dora_pipe.analysis.change import EMPTY, Change, changed_batch
from dora_pipe.bus.bus import Bus
from dora_pipe.config.changes import LOGGED
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.consumers.learners.learner import Learner, Settings, TrainBatch
from dora_pipe.consumers.learners.registry import make_learner
from dora_pipe.consumers.learners.settings import changed_settings
from dora_pipe.consumers.trainer.commits import OF_DELTAS, CommitHistory
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.consumers.trainer.replay_steps import Alter, ReplayedStep, load_base
from dora_pipe.consumers.trainer.replay_steps import replay_steps as trained_again
from dora_pipe.core.errors import InvariantBroken, PolicyError, ReplayDiverged, UsageError
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore

if TYPE_CHECKING:
    import torch

LOG = logging.getLogger(__name__)

SETTABLE: Final = frozenset(key for key in LOGGED if key.startswith(("trainer.", "objective.")))
"""Keys that a change may set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistance:
    tensor: str
    differing: int
    elements: int
    absolute_max: float
    relative_max: float
    """Largest difference over the committed tensor's largest absolute value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """A differing metric, or a contribution such as ``g0000000042-003 advantage``."""

    name: str
    committed: object
    replayed: object

    @property
    def line(self) -> str:
        return f"{self.name} is {self.replayed!r}, committed is {self.committed!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a repeated step; lead-in steps are not `wanted`."""

    replayed: ReplayedStep
    wanted: bool
    distances: tuple[TensorDistance, ...] = ()
    """Largest first; empty with a change."""
    metrics: tuple[MetricDifference, ...] = ()

    @property
    def equal(self) -> bool:
        return self.replayed.equal and not self.metrics

    @property
    def time_ratio(self) -> float | None:
        """Compute time over the recorded one."""
        recorded_s = self.replayed.compute_s_committed
        return self.replayed.compute_s_replayed / recorded_s if recorded_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A rebuilt version.

    Example: ``Rebuilt(version=7, digest="ab..", base=4, steps=3)``: three steps from the checkpoint
    of version 4.
    """

    version: int
    digest: str
    base: int
    """Starting version."""
    steps: int

    @property
    def line(self) -> str:
        from_ = f"the checkpoint of version {self.base}" if self.base else "version 0"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return (
            f"version {self.version} is not in the store: rebuilding it from {from_} by {steps}, "
            f"weights {self.digest[:12]}..."
        )


@dataclass(kw_only=True)
class SourceRun:
    bus: Bus
    topics: Topics
    store: PolicyStore
    make: Callable[[RunStarted], Learner]
    clock: Clock
    altered: Alter | None = None
    """Applied before any `Change`, for studies."""
    on_rebuilt: Callable[[Rebuilt], None] = lambda rebuilt: LOG.warning("%s", rebuilt.line)
    """Called by `weights`."""

    @classmethod
    def of(cls, run: OpenRun) -> SourceRun:
        def make(started: RunStarted) -> Learner:
            config = logged_config(started.config)
            trainer = msgspec.structs.replace(config.trainer, device=run.config.trainer.device)
            return open_trainer(run, started, msgspec.structs.replace(config, trainer=trainer))

        return cls(
            bus=run.bus, topics=run.topics, store=run.policies, make=make, clock=SystemClock()
        )

    @cached_property
    def history(self) -> CommitHistory:
        """Commits when first read."""
        return read_history(self.bus, self.topics, self.clock)

    @property
    def started(self) -> RunStarted:
        """First control record. Raises InvariantBroken."""
        started = self.history.run_started
        if started is None:
            raise InvariantBroken(f"{self.topics.control} has no `run started`")
        return started

    @cached_property
    def learner(self) -> Learner:
        """State after the last repeated step."""
        return self.make(self.started)

    def steps(self, first: int | None, end: int | None) -> range:
        """Return the steps `first` .. `end - 1`, all by default. Raises UsageError."""
        committed = self.history.next_step
        steps = range(0 if first is None else first, committed if end is None else end)
        check_steps(self, steps)
        if not steps:
            raise UsageError(f"--from {steps.start} is not before --to {steps.stop}")
        return steps

    def weights(self, version: int) -> Path:
        """Return a version's file, rebuilt if needed. Raises UsageError for an uncommitted version,
        ReplayDiverged for other bytes, PolicyError, BusError."""
        history = self.history
        if version and not 0 <= version <= history.next_step:
            raise UsageError(
                f"version {version} was not published",
                hint=f"there are versions 0 to {history.next_step}",
            )
        digest = history.digest_of(version)
        if version and not self._has_weights(digest):
            self._rebuild(version, digest)
        return self.store.weights(digest)

    def _has_weights(self, digest: str) -> bool:
        """Report whether the store has a file or intact deltas."""
        if not self.store.has_weights(digest):
            return False
        try:
            self.store.weights(digest)
        except PolicyError as error:
            LOG.warning("%s", error.message)
            return False
        return True

    def _rebuild(self, version: int, digest: str) -> None:
        base = version
        for line in replay_steps(self, range(version, version)):
            step = line.replayed
            if not step.equal:
                other = step.other_numerics
                raise ReplayDiverged(
                    f"version {version} cannot be rebuilt here: step {step.step} gives other "
                    f"weights, first in {step.tensor}",
                    hint=f"other {', '.join(other)} than in the run" if other else None,
                )
            base = min(base, step.step)
        self.on_rebuilt(Rebuilt(version=version, digest=digest, base=base, steps=version - base))
        manifest = self.store.publish_weights(self.learner.save_weights)
        if manifest.digest != digest:
            raise InvariantBroken(f"version {version} was rebuilt as {manifest.digest}")


def open_trainer(run: OpenRun, started: RunStarted, config: Config | None = None) -> Learner:
    """Open the run's trainer without weights. Raises ConfigError, PolicyError."""
    store, config = run.policies, config or logged_config(started.config)
    return make_learner(
        assets=store.assets(started.assets_digest),
        reference=store.held_weights(started.policy.digest),
        config=with_modules(config, run),
        log=run.log,
    )


def with_modules(config: Config, run: OpenRun) -> Config:
    """Add this machine's user modules and teacher."""
    task = msgspec.structs.replace(config.task, directory=run.config.task.directory)
    teacher = config.teacher.on(run.config.teacher)
    return msgspec.structs.replace(config, task=task, teacher=teacher)


def replay_steps(run: SourceRun, steps: range, change: Change = EMPTY) -> Iterator[StepResult]:
    """Repeat `steps` with a change from the first of them on; yields lead-in steps too.

    `change.start` needs no lead-in; an empty range is lead-in only. `run.learner` then has the last
    weights.

    Raises UsageError for uncommitted steps, ConfigError for an invalid setting, ReplayDiverged for
    a change's lead-in step that differs under equal numerics, InvariantBroken for an unreadable
    trajectory.
    """
    check_steps(run, steps)
    alter = run.altered if change == EMPTY else _alter(run, steps, change)
    base = _load(run, steps.start, change)
    notes = run.history.notes[base : steps.stop]
    commits = read_commits(run.bus, run.topics, notes, run.clock)
    log, learner = (run.bus, run.topics), run.learner
    for step in trained_again(
        *log, run.store, run.history, learner, commits, clock=run.clock, alter=alter
    ):
        result = StepResult(replayed=step, wanted=step.step >= steps.start)
        if alter is None:
            result = _compared(run, result)
        led = not result.wanted and alter is not None and run.altered is None
        if led and not step.other_numerics:
            raise_if_diverged(result)
        yield result
        if alter is None and not step.equal and not step.other_numerics:
            return


def check_steps(run: SourceRun, steps: range) -> None:
    """Raise UsageError for uncommitted steps."""
    committed = run.history.next_step
    if not (run.started and 0 <= steps.start <= steps.stop <= committed):
        raise UsageError(
            f"--from {steps.start} --to {steps.stop}: these steps cannot be repeated",
            hint=f"steps 0 to {committed - 1} are committed (--to is exclusive)",
        )


def _load(run: SourceRun, first: int, change: Change) -> int:
    start = change.start
    if start is None:
        return load_base(run.store, run.learner, run.started, run.history.notes[:first])
    run.learner.load(start.weights, digest=start.digest, optimizer=start.optimizer)
    return first


def _alter(run: SourceRun, steps: range, change: Change) -> Alter:
    if unknown := sorted(change.settings.keys() - SETTABLE):
        there = f"there are: {', '.join(sorted(SETTABLE))}"
        raise UsageError(f"{unknown[0]} is not a setting of a training step", hint=there)
    max_tokens = logged_config(run.started.config).sampling.max_tokens

    def alter(batch: TrainBatch, settings: Settings) -> tuple[TrainBatch, Settings]:
        if run.altered is not None:
            batch, settings = run.altered(batch, settings)
        if batch.step < steps.start:
            return batch, settings
        if change.settings:
            settings = changed_settings(settings, change.settings, max_tokens=max_tokens)
        return changed_batch(batch, change), settings

    return alter


def _compared(run: SourceRun, result: StepResult) -> StepResult:
    step, store = result.replayed, run.store
    return StepResult(
        replayed=step,
        wanted=result.wanted,
        distances=() if step.equal else distances_of(run, step),
        metrics=(*_other_metrics(step), *_other_contributions(store, step)),
    )


def raise_if_diverged(line: StepResult) -> None:
    """Raise ReplayDiverged for the first difference, if any."""
    step = line.replayed
    if line.equal:
        return
    other = step.other_numerics
    because = f"the numerics differ in {', '.join(other)}" if other else "the numerics are equal"
    if step.equal:
        message = f"gave other metrics than those committed: {line.metrics[0].line}"
    else:
        message = "gave other weights than those committed; "
        message += f"the first tensor that differs is {step.tensor}"
    raise ReplayDiverged(
        f"step {step.step} {message} ({because})",
        hint="bitwise equality requires equal numerics" if other else None,
    )


def tensor_distances(committed: Path, replayed: Path) -> tuple[TensorDistance, ...]:
    """Return the differing tensors, largest relative distance first.

    A missing tensor or another shape differs in every element.
    """
    from safetensors.torch import load_file

    theirs, ours = load_file(committed), load_file(replayed)
    distances = [_distance(name, theirs.get(name), ours.get(name)) for name in theirs.keys() | ours]
    differing = [distance for distance in distances if distance is not None]
    return tuple(sorted(differing, key=lambda distance: (-distance.relative_max, distance.tensor)))


def _distance(
    name: str, committed: torch.Tensor | None, replayed: torch.Tensor | None
) -> TensorDistance | None:
    a, b = committed, replayed
    if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return TensorDistance(
            tensor=name, differing=0, elements=0, absolute_max=math.inf, relative_max=math.inf
        )
    other = (_bits(a) != _bits(b)).any(dim=1)
    differing = int(other.count_nonzero())
    if not differing:
        return None
    largest = float((a.double() - b.double()).abs().max())
    scale = float(a.double().abs().max())
    return TensorDistance(
        tensor=name,
        differing=differing,
        elements=a.numel(),
        absolute_max=largest,
        relative_max=largest / scale if scale > 0 else math.inf,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.flatten().view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _other_metrics(replayed: ReplayedStep) -> Iterator[MetricDifference]:
    for name, committed in sorted(replayed.metrics_committed.items()):
        if name in OF_DELTAS:
            continue
        again = replayed.metrics_replayed.get(name)
        if again != committed:
            yield MetricDifference(name=name, committed=committed, replayed=again)


def _other_contributions(store: PolicyStore, replayed: ReplayedStep) -> Iterator[MetricDifference]:
    sha256 = replayed.contributions_committed
    if not store.has_blob("contributions", sha256):
        return
    again = {row["trajectory"]: row for row in replayed.contributions}
    for row in read_contributions(store.blob("contributions", sha256)):
        name = row["trajectory"]
        for column, committed in row.items():
            now = again.get(name, {}).get(column)
            if now != committed:
                what = f"{name} {column}"
                yield MetricDifference(name=what, committed=committed, replayed=now)


def distances_of(run: SourceRun, step: ReplayedStep) -> tuple[TensorDistance, ...]:
    """Return distances from committed weights that are still stored."""
    try:
        committed = run.store.weights(step.digest_committed)
    except PolicyError:
        return ()
    with tempfile.TemporaryDirectory(prefix="dora-pipe-replay-") as folder:
        replayed = Path(folder) / "replayed.safetensors"
        run.learner.save_weights(replayed)
        return tensor_distances(committed, replayed)
