"""Repeat steps of a run with a change and write the result into a directory:

    model.safetensors, config.json, ...   the weights after the last step, as a model
    optimizer.safetensors                 the optimizer's state after it
    steps.jsonl                           per step: its digest, that of the source, its metrics
    change.json                           the source, its log and the change; written last

Results are reproducible. Without `change.json`, a directory is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe import __version__
from dora_pipe.analysis.change import EMPTY, Change
from dora_pipe.analysis.replay import SourceRun, StepResult, raise_if_diverged, replay_steps
from dora_pipe.audit.reading import record_at
from dora_pipe.config.logged import logged_config
from dora_pipe.consumers.trainer.recovery import read_commits
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.system.console import say
from dora_pipe.launch.inherit import CHANGE, OPTIMIZER, RetrainedModel, state_keys
from dora_pipe.schemas.rounds import decode_round
from dora_pipe.schemas.wire import canonical
from dora_pipe.store.model_dir import write_policy_dir

STEPS: Final = "steps.jsonl"
WEIGHTS: Final = "weights.partial"


class RetrainedStep(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    digest: str
    digest_source: str
    metrics: dict[str, float]

    @property
    def equal(self) -> bool:
        return self.digest == self.digest_source


def retrain(
    run: SourceRun,
    steps: range,
    change: Change,
    out: Path,
    *,
    report: Callable[[int], None] = lambda step: None,
) -> list[RetrainedStep]:
    """Repeat `steps` with a change, write `out`, return the steps.

    Raises UsageError for a directory in use and unknown rows, ReplayDiverged if an unchanged step
    differs, and what the trainer raises.
    """
    _check_change(run, steps, change)
    _begin(out)
    done: list[RetrainedStep] = []
    try:
        with (out / STEPS).open("wb") as lines:
            for result in replay_steps(run, steps, change):
                if change == EMPTY and not result.replayed.other_numerics:
                    raise_if_diverged(result)
                report(result.replayed.step)
                if result.wanted:
                    done.append(_step_of(result))
                    lines.write(msgspec.json.encode(done[-1]) + b"\n")
                    lines.flush()
        _write_model(run, out)
        about = canonical(_about(run, steps, change, done[-1].digest))
        (out / f"{CHANGE}.partial").write_bytes(about)
        (out / f"{CHANGE}.partial").replace(out / CHANGE)
    except OSError as error:
        raise ResourceError(f"cannot write {out}: {error.strerror or error}") from error
    return done


def _begin(out: Path) -> None:
    """Create or clear the directory. Raises UsageError, ResourceError."""
    if (out / CHANGE).exists():
        raise UsageError(f"{out} holds a retrained model", hint="choose another --out")
    if (out / STEPS).exists():
        say(f"{out} is unfinished: starting over")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not an empty directory", hint="choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot write {out}: {error.strerror or error}") from error


def _check_change(run: SourceRun, steps: range, change: Change) -> None:
    unknown = set(change.drop)
    if not unknown:
        return
    unknown.difference_update(_rows(run, steps))
    if unknown:
        raise UsageError(
            f"{min(unknown)} is trained in none of the steps {steps.start} to {steps.stop - 1}",
            hint=f"{len(unknown)} rows of the change are not; see `show RUN STEP`",
        )


def _rows(run: SourceRun, steps: range) -> Iterator[str]:
    notes = run.history.notes[steps.start : steps.stop]
    for commit in read_commits(run.bus, run.topics, notes, run.clock):
        for group in commit.groups:
            yield group.group
            yield from (trajectory.trajectory for trajectory in group.trajectories)


def _step_of(result: StepResult) -> RetrainedStep:
    step = result.replayed
    return RetrainedStep(
        step=step.step,
        digest=step.digest_replayed,
        digest_source=step.digest_committed,
        metrics=dict(step.metrics_replayed),
    )


def _write_model(run: SourceRun, out: Path) -> None:
    weights = out / WEIGHTS
    manifest = run.learner.save_weights(weights)
    assets = run.store.assets(run.started.assets_digest)
    write_policy_dir(run.store, weights, manifest.digest, manifest.dtype, assets, out)
    weights.unlink()
    run.learner.save_optimizer(out / OPTIMIZER)


def _about(run: SourceRun, steps: range, change: Change, digest: str) -> RetrainedModel:
    notes = run.history.notes[steps.stop - 1 : steps.stop]
    (commit,) = read_commits(run.bus, run.topics, notes, run.clock)
    decisions = TopicPartition(run.topics.decisions, 0)
    record = record_at(run.bus, decisions, commit.decisions_next - 1)
    return RetrainedModel(
        run=run.started.run,
        started_ns=run.started.at_ns,
        log_chain="" if record is None else decode_round(record.value).chain,
        first=steps.start,
        last=steps.stop - 1,
        change=change.plain,
        change_digest=change.digest,
        weights=digest,
        trainer=state_keys(logged_config(run.started.config)),
        package=__version__,
    )
