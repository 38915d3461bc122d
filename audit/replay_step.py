"""Trains committed steps again from the log and a checkpoint alone, and says where bits differ.

Steps between the checkpoint and the first wanted one are trained too, because nothing else leads
there; they are compared like the others: weights, the figures of the commit, and what it says each
trajectory contributed, all exactly; only times may differ. The first step whose weights differ ends
the replay: after it every step would differ. Only where the numerics fingerprint is another one
(another machine, another version of torch) does it go on, because then only the distance is of
interest.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from dora_pipe.bus.port import Bus
from dora_pipe.config.changes import LOGGED
from dora_pipe.config.logged import logged_config
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.consumers.learners.port import Learner
from dora_pipe.consumers.learners.settings import changed_settings
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.consumers.trainer.commits import OF_PATCHES, CommitHistory
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.consumers.trainer.replay_steps import ReplayedStep, load_base, replay_steps
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import InvariantBroken, PolicyError, ReplayDiverged, UsageError
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.safetensors_file import mapped, read_entries
from dora_pipe.store.store import PolicyStore, as_store

FLOATS: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""How numpy calls types of tensors; bfloat16 by its bits."""

SETTABLE: Final = frozenset(key for key in LOGGED if key.startswith(("trainer.", "objective.")))
"""What `--set` may change: the settings that a commit carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistance:
    """How far a replayed tensor is from the committed one.

    Example: ``TensorDistance(tensor="lm_head.weight", differing=12, elements=4096,
    absolute_max=1.2e-7, relative_max=3e-6)``.
    """

    tensor: str
    differing: int
    """Elements with other bits."""
    elements: int
    absolute_max: float
    relative_max: float
    """Largest absolute difference over the largest absolute value of the committed tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureDifference:
    """A figure that came out otherwise.

    Example: ``FigureDifference(name="loss", committed=0.25, replayed=0.5)``; what a trajectory
    contributed is called ``g0000000042-003 advantage``.
    """

    name: str
    committed: object
    replayed: object

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.name} is {self.replayed!r}, committed is {self.committed!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One replayed step; `wanted` is False for those that only lead to the first wanted one."""

    replayed: ReplayedStep
    wanted: bool
    distances: tuple[TensorDistance, ...] = ()
    """Of every tensor that differs, largest first; empty when the weights are bit-equal."""
    figures: tuple[FigureDifference, ...] = ()
    """Figures of the commit and of its contributions that came out otherwise."""

    @property
    def equal(self) -> bool:
        """Whether weights and figures are those that were committed."""
        return self.replayed.equal and not self.figures

    @property
    def time_ratio(self) -> float | None:
        """Compute time here over the recorded one."""
        recorded_s = self.replayed.compute_s_committed
        return self.replayed.compute_s_replayed / recorded_s if recorded_s > 0 else None


def replay(
    bus: Bus,
    topics: Topics,
    store: PolicyStore | Path,
    trainer: Learner,
    *,
    first: int,
    last: int,
    clock: Clock,
    changed: Mapping[str, float | int | str | bool] | None = None,
    change: BatchChange | None = None,
) -> Iterator[StepLine]:
    """Train steps `first` .. `last - 1` again; a line per step, lead-in steps among them.

    `changed` are logged keys to use from step `first` on instead of the recorded ones; `change` is
    what of the batches is otherwise, in the lead-in too, where it names rows of that; by default
    what the run itself says. Ends after
    the first step that differs although the numerics are the same (see `raise_if_diverged`).
    Raises UsageError for steps that were not committed, InvariantBroken for a trajectory that
    cannot be read.
    """
    store, history = as_store(store), read_history(bus, topics, clock)
    check_range(history, first, last)
    started = history.run_started
    assert started is not None
    base = load_base(store, trainer, started, history.notes[:first])
    commits = read_commits(bus, topics, history.notes[base:last], clock)
    settings = dict(changed or {})
    if unknown := sorted(settings.keys() - SETTABLE):
        there = f"there are: {', '.join(sorted(SETTABLE))}"
        raise UsageError(f"{unknown[0]} is not a setting of a training step", hint=there)
    if settings:
        most = logged_config(started.config).sampling.max_tokens
        commits = _with(commits, settings, first, max_tokens=most)
    again = replay_steps(bus, topics, store, history, trainer, commits, clock=clock, change=change)
    for replayed in again:
        distances: tuple[TensorDistance, ...] = ()
        if not replayed.equal:
            distances = _distances(store, trainer, replayed.digest_committed)
        figures = (*_other_figures(replayed), *_other_contributions(store, replayed))
        yield StepLine(
            replayed=dataclasses.replace(replayed, contributions=()),
            wanted=replayed.step >= first,
            distances=distances,
            figures=figures,
        )
        if not replayed.equal and not replayed.other_numerics:
            return


def raise_if_diverged(line: StepLine) -> None:
    """Raise ReplayDiverged, naming step and first tensor or figure, unless everything is equal."""
    step = line.replayed
    if line.equal:
        return
    other = step.other_numerics
    because = f"the numerics differ in {', '.join(other)}" if other else "the numerics are equal"
    if step.equal:
        said = f"gave other figures than those committed: {line.figures[0].line}"
    else:
        said = "gave other weights than those committed; "
        said += f"the first tensor that differs is {step.tensor}"
    raise ReplayDiverged(
        f"step {step.step} {said} ({because})",
        hint="equal bits are promised under equal numerics only" if other else None,
    )


def tensor_distances(committed: Path, replayed: Path) -> tuple[TensorDistance, ...]:
    """Every tensor of two safetensors files that differs, largest relative distance first.

    Tensors that only one of them has, or that have another shape, count as wholly different.
    Raises PolicyError.
    """
    ours = {entry.name: entry for entry in read_entries(replayed)}
    theirs = {entry.name: entry for entry in read_entries(committed)}
    found: list[TensorDistance] = []
    with mapped(committed) as a, mapped(replayed) as b:
        for name in sorted(ours.keys() | theirs.keys()):
            one, two = theirs.get(name), ours.get(name)
            if one is None or two is None or (one.dtype, one.shape) != (two.dtype, two.shape):
                nothing = float("inf")
                distance = TensorDistance(
                    tensor=name, differing=0, elements=0, absolute_max=nothing, relative_max=nothing
                )
                found.append(distance)
                continue
            before, after = bytes(a[one.start : one.end]), bytes(b[two.start : two.end])
            if before != after:
                found.append(_distance(name, one.dtype, before, after))
    return tuple(sorted(found, key=lambda one: (-one.relative_max, one.tensor)))


def _with(
    commits: Iterator[StepCommitted],
    changes: Mapping[str, float | int | str | bool],
    first: int,
    *,
    max_tokens: int,
) -> Iterator[StepCommitted]:
    """The commits, from step `first` on with other settings; what they are compared with stays."""
    for commit in commits:
        if commit.step >= first:
            settings = changed_settings(commit.settings, changes, max_tokens=max_tokens)
            commit = msgspec.structs.replace(commit, settings=dict(settings))
        yield commit


def check_range(history: CommitHistory, first: int, last: int) -> None:
    """Raise UsageError for steps that were not committed, InvariantBroken without `run started`."""
    if history.run_started is None:
        raise InvariantBroken("control has no `run started`")
    committed = len(history.notes)
    if not history.first_step <= first < last <= committed:
        raise UsageError(
            f"--from {first} --to {last}: these steps cannot be replayed",
            hint=f"steps {history.first_step} to {committed - 1} are committed "
            "(--to is the first one left out)",
        )


def _other_figures(replayed: ReplayedStep) -> Iterator[FigureDifference]:
    """Of the commit; one that this version computes and the commit does not have is a later one."""
    for name, committed in sorted(replayed.figures_committed.items()):
        if name in OF_PATCHES:
            continue
        again = replayed.figures_replayed.get(name)
        if again != committed:
            yield FigureDifference(name=name, committed=committed, replayed=again)


def _other_contributions(store: PolicyStore, replayed: ReplayedStep) -> Iterator[FigureDifference]:
    """Of the commit's contributions; nothing where the store does not have them any more."""
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
                yield FigureDifference(name=what, committed=committed, replayed=now)


def _distances(store: PolicyStore, trainer: Learner, digest: str) -> tuple[TensorDistance, ...]:
    try:
        committed = store.weights(digest)
    except PolicyError:  # gone, or damaged: there is nothing to measure from
        return ()
    with tempfile.TemporaryDirectory(prefix="dora-pipe-replay-") as folder:
        replayed = Path(folder) / "replayed.safetensors"
        trainer.save_weights(replayed)
        return tensor_distances(committed, replayed)


def _distance(name: str, dtype: str, before: bytes, after: bytes) -> TensorDistance:
    kind = FLOATS.get(dtype)
    if kind is None:
        a, b = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
        bits_a, bits_b = a, b
    else:
        a, b = np.frombuffer(before, kind), np.frombuffer(after, kind)
        bits = f"<u{a.itemsize}"
        bits_a, bits_b = a.view(bits), b.view(bits)
    if dtype == "BF16":
        a, b = ((one.astype("<u4") << 16).view("<f4") for one in (a, b))
    gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
    scale = float(np.max(np.abs(a.astype(np.float64)), initial=0.0))
    largest = float(np.max(gap, initial=0.0))
    return TensorDistance(
        tensor=name,
        differing=int(np.count_nonzero(bits_a != bits_b)),
        elements=len(a),
        absolute_max=largest,
        relative_max=largest / scale if scale > 0 else float("inf"),
    )
