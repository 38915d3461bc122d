"""Invariants of the traces of a log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing

from dora_pipe.audit.entries import GroupEntry
from dora_pipe.bus.bus import Bus
from dora_pipe.observe.traces import names
from dora_pipe.observe.traces.span import Link, Span
from dora_pipe.observe.traces.tracer import Tracer
from dora_pipe.schemas.topics import Topics
from tests.support.ledgers import build_ledger
from tests.support.traces_page import stages

WAY = ("queued", "generated", "reward", "published")
"""Stages of a trajectory's time."""


def traces_of(bus: Bus, topics: Topics, *, after: int = -1) -> list[Span]:
    found: list[Span] = []
    with closing(Tracer(bus, topics, after=after)) as tracer:
        while not tracer.caught_up:
            for traced in tracer.turn():
                found += traced.spans
    return found


def check_traces(bus: Bus, topics: Topics) -> int:
    """Compare the traces of a log with its ledger; return the number of trained trajectories."""
    spans = traces_of(bus, topics)
    check_whole(spans)
    roots = {str(one.attributes[names.GROUP]): one for one in spans if one.stage == "group"}
    steps = {one.attributes[names.STEP]: one for one in spans if one.stage == "step"}
    ledger = build_ledger(bus, topics)
    assert sorted(steps) == [one.step for one in ledger.steps.values()]
    ended = {name: one for name, one in ledger.accounts.groups.items() if one.outcome is not None}
    assert sorted(roots) == sorted(ended)
    by_trace = _by(spans, lambda one: one.trace_id)
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
    ids = {(one.trace_id, one.span_id): one for one in spans}
    assert len(ids) == len(spans)
    for one in spans:
        declared = stages()[one.stage]
        assert one.start_ns <= one.end_ns, one
        assert undeclared(one) == [], one.stage
        if not declared.parent:
            assert one.parent_id == "", one
            continue
        parent = ids[one.trace_id, one.parent_id]
        assert parent.stage == declared.parent, one
        assert parent.start_ns <= one.start_ns, one
        assert one.end_ns <= parent.end_ns, one


def undeclared(span: Span) -> list[str]:
    figure = names.METRIC.removesuffix("*")
    keys = (names.METRIC if key.startswith(figure) else key for key in span.attributes)
    return [key for key in keys if key not in stages()[span.stage].attributes]


def _check_trained(group: GroupEntry, spans: Sequence[Span], step: Span) -> int:
    """Check the path from dispatch to step for every trained trajectory."""
    stages = _by(spans, lambda one: one.stage)
    (root,), (dispatched,) = stages["group"], stages["dispatched"]
    (selected,), (trained,) = stages["selected"], stages["trained"]
    own = {str(one.attributes[names.TRAJECTORY]): one for one in stages["trajectory"]}
    links = {one.span_id: one for one in step.links}
    for logged in group.results:
        name = logged.fact.trajectory
        trajectory = own[name]
        below = [one for one in spans if one.parent_id == trajectory.span_id]
        check_way(trajectory, below)
        assert dispatched.end_ns == trajectory.start_ns == root.start_ns, name
        published = below[-1]
        assert published.attributes[names.PARTITION] == str(logged.fact.partition), name
        assert published.attributes[names.OFFSET] == logged.fact.offset, name
        assert trajectory.attributes[names.STEP] == group.step, name
        assert published.end_ns <= selected.start_ns, name
        assert links[trajectory.span_id].trace_id == trajectory.trace_id, name
    last_ns = max(one.end_ns for one in stages["published"])
    assert selected.start_ns == last_ns
    assert selected.end_ns == trained.start_ns
    assert trained.end_ns == root.end_ns
    assert [(one.trace_id, one.span_id) for one in trained.links] == [(step.trace_id, step.span_id)]
    return len(group.results)


def check_way(trajectory: Span, below: Sequence[Span]) -> None:
    """Check that a published trajectory's stages are contiguous and complete."""
    assert [one for one in below if one.stage not in WAY] == []
    assert below[0].stage == "queued", trajectory
    assert below[-1].stage == "published", trajectory
    at_ns = trajectory.start_ns
    for one in below:
        assert one.start_ns == at_ns, (trajectory, one)
        at_ns = one.end_ns
    assert at_ns == trajectory.end_ns
    attempts = [one.attributes[names.OUTCOME] for one in below if one.stage == "generated"]
    assert attempts[-1] == "logged"
    assert "logged" not in attempts[:-1]


def links_to(spans: Iterable[Span], span: Span) -> list[Link]:
    at = span.trace_id, span.span_id
    return [link for one in spans for link in one.links if (link.trace_id, link.span_id) == at]


def _by(spans: Sequence[Span], key: Callable[[Span], str]) -> Mapping[str, list[Span]]:
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for one in spans:
        found[key(one)].append(one)
    return found
