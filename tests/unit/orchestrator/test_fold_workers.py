"""Tests of workers in the fold, named by transition."""

from __future__ import annotations

import pytest

from dora_pipe.orchestrator.fold import apply_observation
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.rounds import Fence, Progressed
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage


def one_group(**changes: object) -> Stage:
    changes = {"rollout__prompts_per_step": 1, "staleness__max_staleness": 0, **changes}
    stage = Stage(**changes).begin()
    stage.worker("w0", slots=2)
    assert stage.running() == ["g0000000000-000", "g0000000000-001"]
    return stage


FIRST, SECOND = "g0000000000-000", "g0000000000-001"


def test_nowhere_to_joined_takes_the_offset_as_incarnation() -> None:
    stage = Stage().begin()
    incarnation = stage.join("w0", slots=3, prefetch=2)
    worker = stage.state.workers["w0"]
    assert (worker.incarnation, worker.target, worker.served, worker.room) == (
        incarnation,
        -1,
        -1,
        5,
    )


def test_remains_loading_when_it_reports_another_version_or_other_weights() -> None:
    stage = Stage().begin()
    incarnation = stage.join("w0")
    stage.plan()
    stage.tell(records.ready("w0", incarnation, 1))
    stage.tell(records.ready("w0", incarnation, 0, digest=records.weights(1)))
    assert stage.state.workers["w0"].loading
    assert stage.state.counters.rejected == 2


def test_requests_of_a_worker_that_joins_again_queue_again_and_keep_their_attempts() -> None:
    stage = one_group(rollout__max_attempts=2)
    old = stage.placed[FIRST]
    incarnation = stage.join("w0", slots=2)
    assert stage.running() == []
    assert stage.state.requests[FIRST].faults == 1
    stage.settle()
    assert stage.placed[FIRST].attempt == 2
    assert stage.placed[FIRST].incarnation == incarnation
    stage.tell(records.logged(old))
    assert stage.state.counters.fenced == 1
    assert stage.state.groups["g0000000000"].ended == 0
    stage.join("w0", slots=2)
    assert stage.state.counters.samples_failed == 2, "two attempts, both lost"


def test_leaving_worker_hands_its_requests_back_with_their_progress() -> None:
    stage = one_group()
    incarnation = stage.state.workers["w0"].incarnation
    stage.worker("w1", slots=2)
    resume = Resume(tokens=40, partition=0, offset=12)
    stage.tell(records.left("w0", incarnation, {FIRST: resume, "g0000000077-000": resume}))
    assert "w0" not in stage.state.workers
    assert stage.state.requests[FIRST].faults == 0, "leaving in order is nobody's fault"
    stage.settle()
    assert stage.placed[FIRST].resume == resume
    assert stage.placed[FIRST].worker == "w1"
    assert stage.placed[SECOND].resume is None


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


def test_silent_to_fenced_and_its_requests_go_elsewhere() -> None:
    stage = one_group()
    stage.worker("w1", slots=2)
    old = stage.placed[FIRST]
    stage.lose("w0")
    fences = [decision for decision in stage.settle() if isinstance(decision, Fence)]
    assert [(fence.worker, fence.incarnation) for fence in fences] == [("w0", old.incarnation)]
    assert stage.placed[FIRST].worker == "w1"
    stage.tell(records.logged(old))
    assert stage.state.counters.fenced == 1
    stage.finish(FIRST)
    assert stage.state.groups["g0000000000"].ended == 1


def test_lost_request_goes_on_from_the_newest_progress_observed() -> None:
    stage = one_group()
    stage.worker("w1", slots=2)
    stage.lose("w0")
    for tokens in (20, 60, 40):
        resume = Resume(tokens=tokens, partition=0, offset=tokens)
        apply_observation(stage.state, Progressed(trajectory=FIRST, resume=resume))
    stage.settle()
    assert stage.placed[FIRST].resume == Resume(tokens=60, partition=0, offset=60)


def test_first_record_of_the_present_attempt_binds_and_a_doubled_append_is_harmless() -> None:
    stage = one_group()
    stage.tell(records.logged(stage.placed[FIRST], offset=100))
    stage.tell(records.logged(stage.placed[FIRST], offset=103))
    result = stage.state.groups["g0000000000"].results[0]
    assert result is not None and result.taken is not None
    assert result.taken.offset == 100
    assert (stage.state.counters.logged, stage.state.counters.superseded) == (1, 1)


def test_retryable_failure_queues_again_until_attempts_are_used_up() -> None:
    stage = one_group(rollout__max_attempts=3)
    for attempt in (1, 2, 3):
        assert stage.placed[FIRST].attempt == attempt
        stage.tell(records.failed(stage.placed[FIRST]))
        stage.settle()
    assert FIRST not in stage.state.requests
    assert stage.state.counters.samples_failed == 1
    assert stage.state.counters.outcomes == {"failed": 1}


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
