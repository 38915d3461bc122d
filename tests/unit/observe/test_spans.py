"""Tests of spans of groups and steps, and of the printed tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from dora_pipe.ledger.account import GroupEnded, StepEnded
from dora_pipe.observe.traces import names, tree
from dora_pipe.observe.traces.ids import RunKey, group_trace, span_id, step_trace, traceparent
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.spans import Content, group_spans, step_spans
from dora_pipe.schemas.rounds import Dispatch, End, Fence, TakePart
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
from tests.support.traces import check_way, check_whole, links_to

GOLDEN = Path(__file__).parents[2] / "golden" / "traces"


def _spans(told: AccountStage, known: dict[str, Content] | None = None) -> list[Span]:
    found: list[Span] = []
    run = told.run
    for one in told.ended:
        if isinstance(one, GroupEnded):
            found += group_spans(run, one, contents() if known is None else known)
        else:
            assert isinstance(one, StepEnded)
            found += step_spans(run, one)
    check_whole(found)
    return found


def _one(spans: list[Span], stage: str, trajectory: str = "") -> Span:
    ids = {one.span_id for one in spans if one.attributes.get(names.TRAJECTORY) == trajectory}
    found = [
        one
        for one in spans
        if one.stage == stage and (not trajectory or one.parent_id in ids or one.span_id in ids)
    ]
    assert len(found) == 1, found
    return found[0]


def _drawn(spans: list[Span]) -> str:
    lines = [
        f"{span:<22}{after:>8}{lasted:>8}  {what}".rstrip()
        for span, after, lasted, what in tree.draw(tree.rows(spans))
    ]
    return "\n".join(lines) + "\n"


def test_tree_of_a_group_is_as_it_was() -> None:
    spans = [one for one in _spans(whole()) if one.trace_id != _step_id(whole())]
    assert _drawn(spans) == (GOLDEN / "group.txt").read_text()


def test_tree_of_a_step_is_as_it_was() -> None:
    spans = [one for one in _spans(whole()) if one.trace_id == _step_id(whole())]
    assert _drawn(spans) == (GOLDEN / "step.txt").read_text()


def _in_parts() -> list[Span]:
    other = "g0000000018"
    first, second = f"{other}-000", f"{other}-001"
    told = began().decide(
        100,
        *(Dispatch(reason="room", spec=one) for one in (spec(), spec(other))),
        *(place("w0", W0, 0, 1, of=one) for one in (spec(), spec(other))),
    )
    told.fact(logged(200, "w0", W0, first)).fact(logged(210, "w0", W0, second))
    part = TakePart(reason="one", step=4, attempt=1, part=0, groups=(taken(other),), settings={})
    told.decide(300, part)
    told.fact(logged(550, "w0", W0, FIRST)).fact(logged(600, "w0", W0, SECOND))
    batch = replace(take(), groups=(taken(other), taken()), parts=(1,))
    told.decide(700, batch)
    done = replace(commit(1000), groups=batch.groups, parts=(1,), early_s=(0.25,))
    return _spans(told.fact(done), {})


def test_step_in_parts_shows_the_work_ahead_and_the_wait_behind_it() -> None:
    spans = _in_parts()
    step = [one for one in spans if one.trace_id == _step_id(whole())]
    assert _drawn(step) == (GOLDEN / "step-in-parts.txt").read_text()
    (part,) = [one for one in step if one.stage == "part"]
    assert part.attributes[names.PART] == 0
    assert (part.attributes[names.GROUPS], part.attributes[names.OUTPUT]) == (1, 40)


def test_group_of_a_part_is_selected_when_the_part_is_taken() -> None:
    selected = [one for one in _in_parts() if one.stage == "selected"]
    assert {one.attributes[names.PART]: one.end_ns for one in selected} == {0: at(300), 1: at(700)}
    assert [one.attributes[names.REASON] for one in selected] == ["one", "the earliest deadlines"]


def test_tree_of_one_trajectory_leaves_its_samples_out() -> None:
    spans = [one for one in _spans(whole()) if one.trace_id != _step_id(whole())]
    found = _drawn(tree.branch(spans, SECOND))
    assert found == (GOLDEN / "trajectory.txt").read_text()
    assert SECOND in found
    assert FIRST not in found


def test_step_and_its_trajectories_link_each_other() -> None:
    spans = _spans(whole())
    step = _one(spans, "step")
    assert [one.attributes[names.TRAJECTORY] for one in step.links] == [FIRST, SECOND]
    for name in (FIRST, SECOND):
        own = next(one for one in spans if one.attributes.get(names.TRAJECTORY) == name)
        assert len(links_to(spans, own)) == 1
    trained = _one(spans, "trained")
    assert [(one.trace_id, one.span_id) for one in trained.links] == [(step.trace_id, step.span_id)]


def test_ids_follow_from_the_run_and_what_a_span_is_about() -> None:
    key = RunKey("told", at(0))
    spans = _spans(whole())
    root = _one(spans, "group")
    assert root.trace_id == group_trace(key, GROUP)
    assert root.span_id == span_id(root.trace_id, "group")
    assert _one(spans, "step").trace_id == step_trace(key, 4)
    assert traceparent(root.trace_id, root.span_id) == f"00-{root.trace_id}-{root.span_id}-01"
    assert len(root.trace_id) == 32
    assert len(root.span_id) == 16
    other_day = RunKey("told", at(0) + 1)
    assert group_trace(other_day, GROUP) != root.trace_id


def test_request_speaks_the_words_of_the_conventions() -> None:
    attempt = next(one for one in _spans(whole()) if one.stage == "generated")
    said = dict(attempt.attributes)
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.model"] == "small"
    assert said["gen_ai.response.model"] == "small@3"
    assert said["gen_ai.usage.input_tokens"] == 5
    assert said["gen_ai.usage.output_tokens"] == 20
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert said["gen_ai.request.max_tokens"] == 64
    assert said["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.030)
    tool = _one(_spans(whole()), "tool")
    assert tool.attributes["gen_ai.operation.name"] == "execute_tool"
    assert tool.attributes["gen_ai.tool.name"] == "calculator"


def test_record_speaks_the_words_of_the_conventions() -> None:
    published = _one(_spans(whole()), "published", SECOND)
    said = dict(published.attributes)
    assert published.kind == "producer"
    assert said["messaging.system"] == "sqlite"
    assert said["messaging.destination.name"] == "told.trajectories"
    assert said["messaging.destination.partition.id"] == "1"
    assert said["messaging.kafka.offset"] == 10
    assert said["messaging.message.id"] == SECOND


def test_move_is_an_event_and_the_first_token_is_told_once() -> None:
    spans = _spans(whole())
    events = [(one.attributes[names.WORKER], e.name, e.at_ns) for one in spans for e in one.events]
    assert events == [
        ("w0", "first token", at(130)),
        ("w1", "first token", at(170)),
        ("w1", "migration requested", at(300)),
    ]


def test_records_that_are_gone_leave_a_path_without_turns() -> None:
    spans = _spans(whole(), {})
    own = next(one for one in spans if one.attributes.get(names.TRAJECTORY) == SECOND)
    below = [one for one in spans if one.parent_id == own.span_id]
    check_way(own, below)
    assert [one.stage for one in below] == [
        *("queued", "generated", "queued", "generated"),
        "published",
    ]
    assert [one for one in spans if one.stage in ("sampled", "slot", "reward")] == []


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
    told = began()
    told.decide(dispatched_ms, Dispatch(reason="room", spec=spec()), place("w0", W0, 0))
    told.fact(logged(390, "w0", W0, FIRST)).decide(taken_ms, take()).fact(commit(committed_ms))
    spans = _spans(told)
    root = _one(spans, "group")
    assert root.attributes[names.SKEW] == pytest.approx(skew_ms)
    assert root.end_ns == at(max(taken_ms, committed_ms))
    check_way(*_request_history(spans, FIRST))


def _request_history(spans: list[Span], trajectory: str) -> tuple[Span, list[Span]]:
    own = next(
        one
        for one in spans
        if one.stage == "trajectory" and one.attributes[names.TRAJECTORY] == trajectory
    )
    return own, [one for one in spans if one.parent_id == own.span_id]


def test_group_that_failed_says_so_and_so_does_its_attempt() -> None:
    told = began().decide(100, Dispatch(reason="room", spec=spec()), place("w0", W0, 0, 1))
    told.decide(200, Fence(reason="nothing heard", worker="w0", incarnation=W0))
    told.decide(300, End(reason="no worker", group=GROUP, outcome="failed"))
    spans = _spans(told, {})
    root = _one(spans, "group")
    assert (root.error, root.attributes[names.ERROR]) == ("no worker", "failed")
    attempts = [one for one in spans if one.stage == "generated"]
    assert [(one.error, one.end_ns) for one in attempts] == [("nothing heard", at(200))] * 2
    assert "selected" not in {one.stage for one in spans}


def test_evaluation_uses_its_own_sampling_settings() -> None:
    group = "e0000000001"
    told, own = began(), spec(group)
    told.decide(100, Dispatch(reason="evaluation", spec=own), place("w0", W0, 0, of=own))
    told.decide(200, End(reason="all logged", group=group, outcome="evaluated"))
    attempt = next(one for one in _spans(told, {}) if one.stage == "generated")
    assert attempt.attributes[names.TEMPERATURE] == 0.0


def _step_id(told: AccountStage) -> str:
    return step_trace(told.run.key, 4)
