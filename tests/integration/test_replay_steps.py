"""Committed steps trained again from the log and a checkpoint alone: equal, or named where not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.analysis.change import Change
from dora_pipe.analysis.replay import (
    SourceRun,
    StepResult,
    distances_of,
    raise_if_diverged,
    replay_steps,
    tensor_distances,
)
from dora_pipe.consumers.contributions import read_contributions, write_contributions
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.core.errors import InvariantBroken, ReplayDiverged, UsageError
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.store.safetensors_file import TensorSource, write_tensors
from dora_pipe.store.store import PolicyStore
from tests.support import damage
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.tamper import Tamper
from tests.support.worker import VirtualClock


def _replay(
    run: RecordedRun,
    first: int,
    last: int,
    *,
    trainer: SimulatedLearner | None = None,
    **settings: Any,
) -> list[StepResult]:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    with _source(run, trainer) as source:
        return list(replay_steps(source, range(first, last), Change(settings=named)))


@contextmanager
def _source(run: RecordedRun, trainer: SimulatedLearner | None = None) -> Iterator[SourceRun]:
    with closing(run.open()) as bus:
        yield SourceRun(
            bus=bus,
            topics=run.topics,
            store=PolicyStore(run.store),
            make=lambda started: trainer or SimulatedLearner(),
            clock=VirtualClock(),
        )


def _steps(lines: Sequence[StepResult], *, expected: bool) -> list[int]:
    return [line.replayed.step for line in lines if line.wanted == expected]


def test_every_step_gives_the_committed_weights_again(recorded: RecordedRun) -> None:
    lines = _replay(recorded, 0, STEPS)
    assert _steps(lines, expected=True) == list(range(STEPS))
    assert all(line.replayed.equal for line in lines)
    assert len({line.replayed.digest_replayed for line in lines}) == STEPS


def test_replay_begins_at_the_nearest_checkpoint_before(recorded: RecordedRun) -> None:
    # A checkpoint every 3 steps: after steps 2, 5, 8.
    lines = _replay(recorded, 7, 9)
    assert _steps(lines, expected=False) == [6]
    assert _steps(lines, expected=True) == [7, 8]
    assert _steps(_replay(recorded, 6, 7), expected=False) == []


def test_without_its_checkpoint_an_earlier_one_leads_there(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        kept = [f.checkpoint for _, f in log.facts(StepCommitted) if f.checkpoint is not None]
    (copy.store / "optimizer" / f"{kept[1].sha256}.safetensors").unlink()
    lines = _replay(copy, 7, 8)
    assert _steps(lines, expected=False) == [3, 4, 5, 6]
    assert all(line.replayed.equal for line in lines)


def test_changed_setting_is_named_with_step_and_tensor(recorded: RecordedRun) -> None:
    lines = _replay(recorded, 7, 9, trainer__learning_rate=1.1e-5)
    assert _steps(lines, expected=False) == [6]
    assert lines[0].replayed.equal, "what leads there is trained as it was"
    with pytest.raises(ReplayDiverged, match=r"step 7 gave other weights.* is weights") as diverged:
        raise_if_diverged(lines[1])
    assert diverged.value.exit_code == 6


def test_recorded_value_of_a_changed_setting_is_equal(recorded: RecordedRun) -> None:
    # The run continues with 2e-5 after step 5 (see `recorded_run`).
    assert _replay(recorded, 12, 13, trainer__learning_rate=2e-5)[-1].replayed.equal
    change = Change(settings={"trainer.learning_rate": 2e-5})
    with _source(recorded) as source:
        (line,) = replay_steps(source, range(1), change)
        assert not line.replayed.equal
        assert distances_of(source, line.replayed)[0].differing > 0


@pytest.mark.parametrize("damaging", [damage.change_token_and_record, damage.change_logprob])
def test_changed_trajectory_is_named_by_the_step_that_trained_it(
    copy: RecordedRun, damaging: Any
) -> None:
    with Tamper(copy) as log:
        name = damaging(log)
        step = _step_of(log, name)
    lines = _replay(copy, 0, STEPS)
    assert [line.replayed.equal for line in lines] == [True] * step + [False]
    assert lines[-1].replayed.step == step


def test_what_audit_cannot_see_is_named(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        name = damage.forge_everything(log)
        step = _step_of(log, name)
    lines = _replay(copy, 0, STEPS)
    assert not lines[-1].replayed.equal
    assert lines[-1].replayed.step == step


@pytest.mark.parametrize("figure", ["loss", "tokens"])
def test_forged_figure_is_named_although_the_weights_are_equal(
    copy: RecordedRun, figure: str
) -> None:
    with Tamper(copy) as log:
        row, fact = log.facts(StepCommitted)[5]
        metrics = {**fact.metrics, figure: fact.metrics[figure] + 0.5}
        log.rewrite(row, msgspec.structs.replace(fact, metrics=metrics))
    lines = _replay(copy, 0, STEPS)
    assert [line.replayed.step for line in lines if not line.equal] == [fact.step]
    (other,) = lines[fact.step].metrics
    assert (other.name, other.committed) == (figure, metrics[figure])
    with pytest.raises(
        ReplayDiverged, match=f"step 5 gave other metrics .*: {figure} is"
    ) as raised:
        raise_if_diverged(lines[fact.step])
    assert raised.value.exit_code == 6


def test_forged_contribution_is_named_although_the_weights_are_equal(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        row, fact = log.facts(StepCommitted)[5]
        file = copy.store / "contributions" / f"{fact.contributions.sha256}.arrow"
        rows = read_contributions(file)
        forged = [{**rows[0], "ratio_mean": 7.0}, *rows[1:]]
        blob = PolicyStore(copy.store).publish_blob(
            "contributions", lambda path: write_contributions(path, forged)
        )
        log.rewrite(row, msgspec.structs.replace(fact, contributions=blob))
    line = _replay(copy, 5, 6)[-1]
    assert line.replayed.equal and not line.equal
    (other,) = line.metrics
    assert other.name == f"{rows[0]['trajectory']} ratio_mean"


def test_removed_trajectory_is_an_invariant_broken(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        name = damage.remove_trajectory(log)
    with pytest.raises(InvariantBroken, match=name):
        _replay(copy, 0, STEPS)


def test_other_numerics_go_on_and_report_distances(recorded: RecordedRun) -> None:
    class Elsewhere(SimulatedLearner):
        def numerics(self) -> dict[str, str]:
            return super().numerics() | {"threads": "7"}

    lines = _replay(recorded, 0, 3, trainer=Elsewhere(flavour="another machine"))
    assert len(lines) == 3
    assert all(line.distances and not line.replayed.equal for line in lines)
    with pytest.raises(ReplayDiverged, match="the numerics differ in threads"):
        raise_if_diverged(lines[0])


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (0, STEPS + 1), (5, 2)])
def test_steps_that_were_not_committed_are_refused(
    recorded: RecordedRun, first: int, last: int
) -> None:
    with pytest.raises(UsageError, match="cannot be repeated"):
        _replay(recorded, first, last)


def test_setting_that_no_step_depends_on_is_refused(recorded: RecordedRun) -> None:
    with pytest.raises(UsageError, match=r"run\.steps is not a setting") as refused:
        _replay(recorded, 0, 1, run__steps=3)
    assert refused.value.hint is not None
    assert "trainer.learning_rate" in refused.value.hint


def test_distances_count_bits_and_measure_numbers(tmp_path: Path) -> None:
    def write(name: str, **tensors: bytes) -> Path:
        sources = [
            TensorSource(
                name=entry, dtype="F32", shape=(len(data) // 4,), data=partial(bytes, data)
            )
            for entry, data in tensors.items()
        ]
        write_tensors(tmp_path / name, sources)
        return tmp_path / name

    entry, two = b"\x00\x00\x80\x3f", b"\x00\x00\x00\x40"  # 1.0, 2.0
    first = write("a", same=entry, moved=entry + two, gone=entry)
    second = write("b", same=entry, moved=two + two)
    distances = tensor_distances(first, second)
    assert [distance.tensor for distance in distances] == ["gone", "moved"]
    assert (distances[1].differing, distances[1].elements) == (1, 2)
    assert (distances[1].absolute_max, distances[1].relative_max) == (1.0, 0.5)
    assert tensor_distances(first, first) == ()


def _step_of(log: Tamper, trajectory: str) -> int:
    return next(
        fact.step
        for _, fact in log.facts(StepCommitted)
        for group in fact.groups
        for entry in group.trajectories
        if entry.trajectory == trajectory
    )
