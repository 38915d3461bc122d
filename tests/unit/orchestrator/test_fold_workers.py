"""Tests of workers in the fold, named by transition."""

from __future__ import annotations

import pytest

from dora_pipe.orchestrator.fold import apply_observation
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.rounds import Progressed
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage


def one_group(**changes: object) -> Stage:
    changes = {"rollout__prompts_per_step": 1, "staleness__max_staleness": 0, **changes}
    stage = Stage(**changes).begin()
    stage.worker("w0", slots=2)
    assert stage.running() == ["g0000000000-000", "g0000000000-001"]
    return stage


FIRST, SECOND = "g0000000000-000", "g0000000000-001"


def test_remains_loading_when_it_reports_another_version_or_other_weights() -> None:
    stage = Stage().begin()
    incarnation = stage.join("w0")
    stage.plan()
    stage.tell(records.ready("w0", incarnation, 1))
    stage.tell(records.ready("w0", incarnation, 0, digest=records.weights(1)))
    assert stage.state.workers["w0"].loading
    assert stage.state.counters.rejected == 2


@pytest.mark.parametrize(("error", "kept"), [("ReplayDiffers", False), ("EpisodeLost", True)])
def test_progress_of_an_episode_that_cannot_be_told_again_is_forgotten(
    error: str, kept: bool
) -> None:
    stage = one_group()
    resume = Resume(tokens=40, partition=0, offset=12)
    apply_observation(stage.state, Progressed(trajectory=FIRST, resume=resume))
    stage.tell(records.failed(stage.placed[FIRST], error=error))
    assert stage.state.requests[FIRST].resume == (resume if kept else None)
    assert stage.state.requests[FIRST].faults == 1
    stage.settle()
    assert stage.placed[FIRST].resume == (resume if kept else None)


@pytest.mark.parametrize("slots", [0, -1, 100_000])
def test_worker_with_impossible_slots_is_not_believed(slots: int) -> None:
    stage = Stage().begin()
    stage.join("w0", slots=slots)
    assert stage.state.workers == {}
    assert "slots" in stage.state.counters.rejection


def test_worker_with_another_tokenizer_is_not_let_in() -> None:
    stage = Stage().begin()
    stage.tell(records.joined("w0", assets="0" * 64))
    assert stage.state.workers == {}
    assert "tokenizer" in stage.state.counters.rejection
