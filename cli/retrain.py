"""`retrain`: trains steps of a run again from its log, as a run of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.audit.learnt import Learnt
from dora_pipe.audit.rescored_file import RescoredFile
from dora_pipe.audit.retrained import weights_distance
from dora_pipe.audit.taken_again import BesideSource, EndedGroups, beside_source
from dora_pipe.cli.output import emit_json, emit_line, emit_table
from dora_pipe.cli.progress import progress
from dora_pipe.cli.replay import open_trainer
from dora_pipe.cli.retrain_eval import Evaluation, Evaluator, evaluator, words
from dora_pipe.consumers.trainer.change_file import named_rows, weighed_rows
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.core.errors import PolicyError, UsageError
from dora_pipe.launch.retrain import train_again
from dora_pipe.launch.retrain_plan import Retraining, RetrainPlan, groups_again, plan_retrain
from dora_pipe.launch.roles import StopFlag
from dora_pipe.launch.run_dir import OpenRun, locked, opened
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore

FIGURES: Final = ("loss", "kl", "ratio_mean", "clipped_share", "grad_norm", "reward_mean")
"""Of a step, in the tables; `--json` has every one."""


KEPT: Final = "kept"
AGAIN: Final = "again"
BATCHES: Final = (KEPT, AGAIN)
"""Where batches come from: as they were, or taken again under the rewards and rules that count."""

ONE_OF: Final = f"one of: {', '.join(BATCHES)}"


ENDS: Final = (
    "no whole batch is left for step {step}, within deadlines: fewer than {many} groups; "
    "the run ends before it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one run shall have otherwise, as a command says it."""

    name: str
    overrides: tuple[str, ...] = ()
    batches: str = KEPT
    """Those of the source, or taken again: one of `BATCHES`."""
    rescored: str = ""
    drop: Path | None = None
    weights: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A run that is done: its steps beside those of the source."""

    name: str
    steps: Sequence[StepCommitted]
    digests: Sequence[str]
    """Of the source's versions behind the same steps."""
    distance: float | None
    """Of the last weights from the source's: norm of the difference over theirs; None where either
    is not there."""
    again: BesideSource | None = None
    """Its batches beside the source's, where they were taken again."""
    learnt: Learnt | None = None
    """What its last version is worth, where that was asked."""

    @property
    def first_other(self) -> int | None:
        """The first step with other weights than the source's."""
        pairs = zip(self.steps, self.digests, strict=True)
        return next((one.step for one, digest in pairs if one.digest_after != digest), None)


def retrain_run(
    run: str,
    setting: Setting,
    *,
    root: Path,
    first: int,
    end: int | None,
    evaluation: Evaluation | None = None,
    as_json: bool,
) -> bool:
    """Train a setting's run and print it; False where the user stopped it.

    Raises UsageError, ConfigError for what cannot be, before anything is made, and whatever ends a
    trainer or a probe.
    """
    if setting.batches not in BATCHES:
        raise UsageError(f"--batches is {setting.batches!r}", hint=ONE_OF)
    stop, last = StopFlag(), None if end is None else end - 1
    with evaluator(run, evaluation, root, stop) as evaluated:
        done = _done(run, setting, first, last, root=root, stop=stop)
        if done is not None and evaluated is not None:
            done = _evaluated(done, evaluated)
    if done is None:
        return False
    _print(done, as_json=as_json)
    return True


def _done(
    run: str, setting: Setting, first: int, last: int | None, *, root: Path, stop: StopFlag
) -> TrainedRun | None:
    """A setting's run, trained to its end; None where the user stopped it."""
    with opened(run, root) as source:
        wanted = wanted_of(source, setting, first, last)
        return _train(source, wanted, stop)


def _evaluated(done: TrainedRun, evaluated: Evaluator) -> TrainedRun | None:
    """The same with what it has learnt; None where the user stopped it."""
    found = evaluated.learnt(done.name, done.steps[-1].step + 1)
    return None if found is None else replace(done, learnt=found)


def _train(source: OpenRun, wanted: Retraining, stop: StopFlag) -> TrainedRun | None:
    """One run, from wherever it stands; None where the user stopped it."""
    with ExitStack() as stack:
        report = stack.enter_context(progress("reading the log"))
        plan = plan_retrain(source, wanted, open_trainer)
        stack.enter_context(locked(plan.directory))
        if not _is_over(plan):
            many = plan.retrained.last + 1 - wanted.first
            if plan.ends_early:
                say(ENDS.format(step=plan.retrained.last + 1, many=plan.config.groups.per_step))
            if plan.goes_on:
                say(f"{wanted.name} began before: it goes on where it was")
            over = train_again(
                plan, stop=stop, told=lambda step: report(f"step {step}", step - wanted.first, many)
            )
            if not over:
                return None
        return replace(_trained(source, plan), again=_beside(wanted, plan))


def _beside(wanted: Retraining, plan: RetrainPlan) -> BesideSource | None:
    if wanted.again is None or plan.batches is None:
        return None
    return beside_source(wanted.again, list(plan.batches.values()))


def _is_over(plan: RetrainPlan) -> bool:
    topics = Topics(plan.config.run.name)
    with closing(plan.directory.open_bus(plan.config)) as bus:
        from dora_pipe.launch.plan import is_over

        return is_over(bus, topics)


def _trained(source: OpenRun, plan: RetrainPlan) -> TrainedRun:
    """A run that is over, beside its source."""
    clock, retrained = SystemClock(), plan.retrained
    theirs = read_history(source.bus, source.topics, clock)
    with closing(plan.directory.open_bus(plan.config)) as bus:
        topics = Topics(plan.config.run.name)
        notes = read_history(bus, topics, clock).notes[retrained.first :]
        steps = [
            msgspec.structs.replace(one, groups=())
            for one in read_commits(bus, topics, notes, clock)
        ]
    digests = [theirs.notes[one.step].digest for one in steps]
    own = plan.directory.policies(plan.config)
    distance = _distance(own, steps[-1].digest_after, source.policies, digests[-1])
    return TrainedRun(name=plan.started.run, steps=steps, digests=digests, distance=distance)


def _distance(own: PolicyStore, digest: str, theirs: PolicyStore, other: str) -> float | None:
    if digest == other:
        return 0.0
    try:
        return weights_distance(own.weights(digest), theirs.weights(other))
    except PolicyError:
        return None


# What is otherwise.


def wanted_of(source: OpenRun, setting: Setting, first: int, last: int | None) -> Retraining:
    """What one run shall be. Raises UsageError, ConfigError."""
    wanted = Retraining(name=setting.name, first=first, last=last, overrides=setting.overrides)
    again = groups_again(source, wanted) if setting.batches == AGAIN else None
    change = change_of_setting(source, setting, first, last, again)
    return replace(wanted, change=change, again=again)


def change_of_setting(
    source: OpenRun,
    setting: Setting,
    first: int,
    last: int | None,
    again: EndedGroups | None = None,
) -> BatchChange:
    """What of the batches, or of the groups that they are taken from, shall be otherwise. Raises
    UsageError."""
    without = frozenset(named_rows(setting.drop)) if setting.drop is not None else frozenset[str]()
    weights = weighed_rows(setting.weights) if setting.weights is not None else {}
    rewards: dict[str, float] = {}
    if setting.rescored:
        if again is None:
            rows = _trained_rows(source, first, last)
        else:
            rows = {name for group in again.groups for name in group.rewards}
        rewards, lost = _rewards(source, setting.rescored, rows)
        without |= lost
    return BatchChange(without=without, rewards=rewards, weights=weights)


def _trained_rows(source: OpenRun, first: int, last: int | None) -> set[str]:
    """The trajectories of the steps."""
    clock = SystemClock()
    notes = read_history(source.bus, source.topics, clock).notes
    wanted = notes[first:] if last is None else notes[first : last + 1]
    return {
        one.trajectory
        for commit in read_commits(source.bus, source.topics, wanted, clock)
        for group in commit.groups
        for one in group.trajectories
    }


def _rewards(source: OpenRun, name: str, rows: set[str]) -> tuple[dict[str, float], frozenset[str]]:
    """The rewards that a `rescore` of the run has found for these trajectories, and which of them
    have none now. Raises UsageError where it is of another run, or not done."""
    folder = source.directory.path / "rescored"
    there = sorted(one.name for one in folder.glob("*/") if one.name.startswith(name))
    if len(there) != 1:
        known = ", ".join(sorted(one.name for one in folder.glob("*/"))) or "none"
        raise UsageError(
            f"{folder} has {'no' if not there else 'more than one'} {name}",
            hint=f"there are: {known}; `dora-pipe rescore` makes them",
        )
    file = RescoredFile(folder / there[0])
    about, found = file.about(), file.read(file.rewards) | file.read(file.groups)
    if (about.run, about.started_ns) != (source.topics.run, _started_ns(source)):
        raise UsageError(f"{file.folder} has the scores of another run of that name")
    if missing := sorted(rows - found.keys()):
        raise UsageError(
            f"{missing[0]} has no score in {file.folder} (and {len(missing) - 1} more)",
            hint="the same `rescore` goes on where it was",
        )
    scores = {one: found[one].reward for one in rows}
    rewards = {one: score for one, score in scores.items() if score is not None}
    return rewards, frozenset(one for one, score in scores.items() if score is None)


def _started_ns(source: OpenRun) -> int:
    started = read_history(source.bus, source.topics, SystemClock()).run_started
    return 0 if started is None else started.at_ns


# What came of it.


def _print(done: TrainedRun, *, as_json: bool) -> None:
    if as_json:
        emit_json(_plain(done))
        return
    rows = [
        (
            one.step,
            *(one.figures.get(name) for name in FIGURES),
            one.compute_s,
            "equal" if one.digest_after == digest else one.digest_after[:12],
        )
        for one, digest in zip(done.steps, done.digests, strict=True)
    ]
    emit_table(("step", *FIGURES, "compute s", "weights"), rows)
    if (again := done.again) is not None:
        emit_line(
            f"batches taken again: {again.groups} groups, {again.moved} of them at another step "
            f"than in the source, {again.untrained} that it has not trained; {again.left} that it "
            "trained at these steps are left out"
        )
    first = done.first_other
    if first is None:
        emit_line("every step gave the weights of the source")
    else:
        emit_line(f"first step with other weights than the source's: {first}")
        emit_line(f"distance of the last weights from the source's: {_far(done.distance)}")
    if done.learnt is not None:
        version = done.steps[-1].step + 1
        emit_line(
            f"evaluation of version {version}: {words(done.learnt.value)}, over the source's by "
            f"{words(done.learnt.gain)}"
        )
    say(f"look further: dora-pipe audit {done.name}; dora-pipe show {done.name}")


def _far(distance: float | None) -> str:
    return "not known: one of them is not in its store" if distance is None else f"{distance:.3g}"


def _plain(done: TrainedRun) -> dict[str, Any]:
    return {
        "run": done.name,
        "first_other": done.first_other,
        "distance": done.distance,
        "again": None if done.again is None else asdict(done.again),
        "evaluation": None if done.learnt is None else asdict(done.learnt),
        "steps": [
            {
                "step": one.step,
                "digest": one.digest_after,
                "digest_source": digest,
                "compute_s": one.compute_s,
                "figures": one.figures,
            }
            for one, digest in zip(done.steps, done.digests, strict=True)
        ],
    }
