"""Tests of spans of groups and steps, and of the printed tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from dora_pipe.ledger.account import GroupEnded, StepEnded
from dora_pipe.observe.traces import names, tree
from dora_pipe.observe.traces.ids import step_trace
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.spans import group_spans, step_spans
from dora_pipe.schemas.rounds import Dispatch, End, Fence, TakePart
from dora_pipe.schemas.trajectory import Trajectory
from tests.support.account_stage import (
    FIRST,
    GROUP,
    SECOND,
    W0,
    AccountStage,
    at,
    began,
    commit,
    contents,
    logged,
    place,
    spec,
    take,
    taken,
    whole,
)
from tests.support.traces import check_way, check_whole

GOLDEN = Path(__file__).parents[2] / "golden" / "traces"


def _spans(stage: AccountStage, given: dict[str, Trajectory] | None = None) -> list[Span]:
    spans: list[Span] = []
    run = stage.run
    for ended in stage.ended:
        if isinstance(ended, GroupEnded):
            spans += group_spans(run, ended, contents() if given is None else given)
        else:
            assert isinstance(ended, StepEnded)
            spans += step_spans(run, ended)
    check_whole(spans)
    return spans


def _one(spans: list[Span], stage: str, trajectory: str = "") -> Span:
    ids = {span.span_id for span in spans if span.attributes.get(names.TRAJECTORY) == trajectory}
    results = [
        span
        for span in spans
        if span.stage == stage and (not trajectory or span.parent_id in ids or span.span_id in ids)
    ]
    assert len(results) == 1, results
    return results[0]


def _drawn(spans: list[Span]) -> str:
    lines = [
        f"{span:<22}{after:>8}{lasted:>8}  {what}".rstrip()
        for span, after, lasted, what in tree.draw(tree.rows(spans))
    ]
    return "\n".join(lines) + "\n"


def test_tree_of_a_group_is_as_it_was() -> None:
    spans = [span for span in _spans(whole()) if span.trace_id != _step_id(whole())]
    assert _drawn(spans) == (GOLDEN / "group.txt").read_text()


def test_tree_of_a_step_is_as_it_was() -> None:
    spans = [span for span in _spans(whole()) if span.trace_id == _step_id(whole())]
    assert _drawn(spans) == (GOLDEN / "step.txt").read_text()


def _in_parts() -> list[Span]:
    other = "g0000000018"
    first, second = f"{other}-000", f"{other}-001"
    stage = began().decide(
        100,
        *(Dispatch(reason="room", spec=entry) for entry in (spec(), spec(other))),
        *(place("w0", W0, 0, 1, of=entry) for entry in (spec(), spec(other))),
    )
    stage.fact(logged(200, "w0", W0, first, offset=30))
    stage.fact(logged(210, "w0", W0, second, offset=31))
    part = TakePart(reason="one", step=4, attempt=1, part=0, groups=(taken(other),), settings={})
    stage.decide(300, part)
    stage.fact(logged(550, "w0", W0, FIRST)).fact(logged(600, "w0", W0, SECOND, offset=10))
    batch = replace(take(), groups=(taken(other), taken()), parts=(1,))
    stage.decide(700, batch)
    done = replace(commit(1000), groups=batch.groups, parts=(1,), early_s=(0.25,))
    return _spans(stage.fact(done), {})


def test_step_in_parts_shows_the_work_ahead_and_the_wait_behind_it() -> None:
    spans = _in_parts()
    step = [span for span in spans if span.trace_id == _step_id(whole())]
    assert _drawn(step) == (GOLDEN / "step-in-parts.txt").read_text()
    (part,) = [span for span in step if span.stage == "part"]
    assert part.attributes[names.PART] == 0
    assert (part.attributes[names.GROUPS], part.attributes[names.OUTPUT]) == (1, 40)


def test_group_of_a_part_is_selected_when_the_part_is_taken() -> None:
    selected = [part for part in _in_parts() if part.stage == "selected"]
    assert {span.attributes[names.PART]: span.end_ns for span in selected} == {
        0: at(300),
        1: at(700),
    }
    assert [span.attributes[names.REASON] for span in selected] == ["one", "the earliest deadlines"]


def test_tree_of_one_trajectory_leaves_its_samples_out() -> None:
    spans = [span for span in _spans(whole()) if span.trace_id != _step_id(whole())]
    drawn = _drawn(tree.branch(spans, SECOND))
    assert drawn == (GOLDEN / "trajectory.txt").read_text()
    assert SECOND in drawn
    assert FIRST not in drawn


def test_records_that_are_gone_leave_a_path_without_turns() -> None:
    spans = _spans(whole(), {})
    own = next(span for span in spans if span.attributes.get(names.TRAJECTORY) == SECOND)
    below = [span for span in spans if span.parent_id == own.span_id]
    check_way(own, below)
    assert [span.stage for span in below] == [
        *("queued", "generated", "queued", "generated"),
        "published",
    ]
    assert [span for span in spans if span.stage in ("sampled", "slot", "reward")] == []


@pytest.mark.parametrize(
    ("dispatched_ms", "taken_ms", "committed_ms", "skew_ms"),
    [
        pytest.param(500, 600, 700, 170, id="the worker is behind: it published before it began"),
        pytest.param(100, 200, 300, 190, id="the worker is ahead: it published after the take"),
        pytest.param(100, 600, 300, 300, id="the trainer is behind: it committed before the take"),
    ],
)
def test_clocks_that_disagree_are_told_and_break_no_path(
    dispatched_ms: float, taken_ms: float, committed_ms: float, skew_ms: float
) -> None:
    stage = began()
    stage.decide(dispatched_ms, Dispatch(reason="room", spec=spec()), place("w0", W0, 0))
    stage.fact(logged(390, "w0", W0, FIRST)).decide(taken_ms, take()).fact(commit(committed_ms))
    spans = _spans(stage)
    root = _one(spans, "group")
    assert root.attributes[names.SKEW] == pytest.approx(skew_ms)
    assert root.end_ns == at(max(taken_ms, committed_ms))
    check_way(*_request_history(spans, FIRST))


def _request_history(spans: list[Span], trajectory: str) -> tuple[Span, list[Span]]:
    own = next(
        span
        for span in spans
        if span.stage == "trajectory" and span.attributes[names.TRAJECTORY] == trajectory
    )
    return own, [span for span in spans if span.parent_id == own.span_id]


def test_group_that_failed_says_so_and_so_does_its_attempt() -> None:
    stage = began().decide(100, Dispatch(reason="room", spec=spec()), place("w0", W0, 0, 1))
    stage.decide(200, Fence(reason="nothing heard", worker="w0", incarnation=W0))
    stage.decide(300, End(reason="no worker", group=GROUP, outcome="failed"))
    spans = _spans(stage, {})
    root = _one(spans, "group")
    assert (root.error, root.attributes[names.ERROR]) == ("no worker", "failed")
    attempts = [span for span in spans if span.stage == "generated"]
    assert [(attempt.error, attempt.end_ns) for attempt in attempts] == [
        ("nothing heard", at(200))
    ] * 2
    assert "selected" not in {span.stage for span in spans}


def test_evaluation_uses_its_own_sampling_settings() -> None:
    group = "e0000000001"
    stage, own = began(), spec(group)
    stage.decide(100, Dispatch(reason="evaluation", spec=own), place("w0", W0, 0, of=own))
    stage.decide(200, End(reason="all logged", group=group, outcome="evaluated"))
    attempt = next(span for span in _spans(stage, {}) if span.stage == "generated")
    assert attempt.attributes[names.TEMPERATURE] == 0.0


def _step_id(stage: AccountStage) -> str:
    return step_trace(stage.run.key, 4)
