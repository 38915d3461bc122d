"""Invariants of the traces of a log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from dora_pipe.bus.bus import Bus
from dora_pipe.ledger.history import GroupHistory
from dora_pipe.observe.traces import names
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.tracer import Tracer
from dora_pipe.schemas.topics import Topics
from tests.support.ledgers import build_ledger
from tests.support.traces_page import stages

WAY = ("queued", "generated", "reward", "published")
"""Stages of a trajectory's time."""


def traces_of(bus: Bus, topics: Topics, *, after: int = -1) -> list[Span]:
    spans: list[Span] = []
    with closing(Tracer(bus, topics, after=after)) as tracer:
        while not tracer.caught_up:
            for traced in tracer.turn():
                spans += traced.spans
    return spans


def check_traces(bus: Bus, topics: Topics) -> int:
    """Compare the traces of a log with its ledger; return the number of trained trajectories."""
    spans = traces_of(bus, topics)
    check_whole(spans)
    roots = {str(span.attributes[names.GROUP]): span for span in spans if span.stage == "group"}
    steps = {span.attributes[names.STEP]: span for span in spans if span.stage == "step"}
    ledger = build_ledger(bus, topics)
    assert sorted(steps) == [step.step for step in ledger.steps.values()]
    ended = {
        name: group for name, group in ledger.accounts.groups.items() if group.outcome is not None
    }
    assert sorted(roots) == sorted(ended)
    by_trace = _by(spans, lambda value: value.trace_id)
    trained = 0
    for name, group in ended.items():
        root = roots[name]
        assert root.attributes[names.OUTCOME] == group.outcome, name
        assert root.attributes.get(names.STEP) == group.step, name
        if group.step is not None:
            trained += _check_trained(group, by_trace[root.trace_id], steps[group.step])
    return trained


def check_whole(spans: Sequence[Span]) -> None:
    """Check ids, parents, times and declared attributes of a trace."""
    ids = {(span.trace_id, span.span_id): span for span in spans}
    assert len(ids) == len(spans)
    for span in spans:
        declared = stages()[span.stage]
        assert span.start_ns <= span.end_ns, span
        assert undeclared(span) == [], span.stage
        if not declared.parent:
            assert span.parent_id == "", span
            continue
        parent = ids[span.trace_id, span.parent_id]
        assert parent.stage == declared.parent, span
        assert parent.start_ns <= span.start_ns, span
        assert span.end_ns <= parent.end_ns, span


def undeclared(span: Span) -> list[str]:
    figure = names.METRIC.removesuffix("*")
    keys = (names.METRIC if key.startswith(figure) else key for key in span.attributes)
    return [key for key in keys if key not in stages()[span.stage].attributes]


def _check_trained(group: GroupHistory, spans: Sequence[Span], step: Span) -> int:
    stages = _by(spans, lambda span: span.stage)
    (root,), (dispatched,) = stages["group"], stages["dispatched"]
    (selected,), (trained,) = stages["selected"], stages["trained"]
    own = {str(stage.attributes[names.TRAJECTORY]): stage for stage in stages["trajectory"]}
    links = {link.span_id: link for link in step.links}
    for logged in group.bound:
        name = logged.fact.trajectory
        trajectory = own[name]
        below = [span for span in spans if span.parent_id == trajectory.span_id]
        check_way(trajectory, below)
        assert dispatched.end_ns == trajectory.start_ns == root.start_ns, name
        published = below[-1]
        assert published.attributes[names.PARTITION] == str(logged.fact.partition), name
        assert published.attributes[names.OFFSET] == logged.fact.offset, name
        assert trajectory.attributes[names.STEP] == group.step, name
        assert published.end_ns <= selected.start_ns, name
        assert links[trajectory.span_id].trace_id == trajectory.trace_id, name
    last_ns = max(stage.end_ns for stage in stages["published"])
    assert selected.start_ns == last_ns
    assert selected.end_ns == trained.start_ns
    assert trained.end_ns == root.end_ns
    assert [(link.trace_id, link.span_id) for link in trained.links] == [
        (step.trace_id, step.span_id)
    ]
    return len(group.bound)


def check_way(trajectory: Span, below: Sequence[Span]) -> None:
    """Check that a published trajectory's stages are contiguous and complete."""
    assert [span for span in below if span.stage not in WAY] == []
    assert below[0].stage == "queued", trajectory
    assert below[-1].stage == "published", trajectory
    at_ns = trajectory.start_ns
    for entry in below:
        assert entry.start_ns == at_ns, (trajectory, entry)
        at_ns = entry.end_ns
    assert at_ns == trajectory.end_ns
    attempts = [span.attributes[names.OUTCOME] for span in below if span.stage == "generated"]
    assert attempts[-1] == "logged"
    assert "logged" not in attempts[:-1]


def _by(spans: Sequence[Span], key: Callable[[Span], str]) -> Mapping[str, list[Span]]:
    result: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        result[key(span)].append(span)
    return result
