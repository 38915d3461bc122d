"""Tests of traces of a log, read at once, in pieces, or after sent ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import BusError
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.ledger.account import GroupEnded
from dora_pipe.observe.traces import names, tree
from dora_pipe.observe.traces.history import History
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.tracer import RECENT_MIN, SlowGroups, Tracer, sampled_because
from dora_pipe.schemas.identity import group_id
from dora_pipe.schemas.rounds import Dispatch, End, Outcome, decode_round
from tests.support.account_stage import W0, began, place, spec, whole
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.traces import check_whole, traces_of


def _growing(bus: Bus, run: RecordedRun, path: Path) -> Iterator[Bus]:
    copy = SqliteBus(path)
    copy.create(
        [TopicSpec(name=name, partitions=bus.partitions(name)) for name in run.topics.all()]
    )
    writer = copy.writer()
    for topic in (run.topics.control, run.topics.trajectories):
        for end in ends_of(bus, topic):
            _refill(copy, bus, end)
    yield copy
    for record in records_of(bus, ends_of(bus, run.topics.decisions)):
        writer.append([Append(topic=record.topic, value=record.value)])
        yield copy


def _refill(copy: Bus, bus: Bus, partition: TopicPartition) -> None:
    records: list[Append] = []
    for record in records_of(bus, {partition: bus.end(partition)}):
        gap = Append(topic=partition.topic, partition=partition.partition, value=b"?")
        records += [gap] * (record.offset - len(records))
        records.append(
            Append(
                topic=partition.topic,
                partition=partition.partition,
                key=record.key,
                value=record.value,
                headers=record.headers,
            )
        )
    copy.writer().append(records)


def test_log_that_grows_gives_what_the_whole_one_gives(
    bus: SqliteBus, recorded: RecordedRun, tmp_path: Path
) -> None:
    grown: list[Span] = []
    growing = _growing(bus, recorded, tmp_path / "log.sqlite")
    copy = next(growing)
    with closing(Tracer(copy, recorded.topics)) as live:
        for _ in growing:
            for traced in live.turn():
                grown += traced.spans
        assert live.over
        assert live.open == 0
    copy.close()
    traces = traces_of(bus, recorded.topics)
    # Only offsets of rounds differ in the copy.
    assert [(span.span_id, span.start_ns, span.end_ns) for span in grown] == [
        (span.span_id, span.start_ns, span.end_ns) for span in traces
    ]


def test_share_leaves_groups_out_and_keeps_every_step(
    bus: SqliteBus, recorded: RecordedRun
) -> None:
    with closing(Tracer(bus, recorded.topics, 0.2)) as tracer:
        spans = []
        while not tracer.caught_up:
            spans += [span for entry in tracer.turn() for span in entry.spans]
        assert tracer.left_out > tracer.sampled > 0
        roots = [span for span in spans if span.stage == "group"]
        assert len(roots) == tracer.sampled
    check_whole(spans)
    traces = traces_of(bus, recorded.topics)
    assert len(roots) + tracer.left_out == sum(span.stage == "group" for span in traces)
    steps = [span.attributes[names.STEP] for span in spans if span.stage == "step"]
    assert steps == list(range(14))
    stage = {trace.span_id: trace for trace in traces}
    kept = {root.attributes[names.KEPT] for root in roots}
    assert kept >= {"ratio", "failed"}
    for span in spans:
        assert (span.start_ns, span.end_ns) == (
            stage[span.span_id].start_ns,
            stage[span.span_id].end_ns,
        )


def test_control_that_was_cut_is_told(bus: SqliteBus, recorded: RecordedRun) -> None:
    copy = MemoryBus(MemoryLog())
    copy.create(
        [TopicSpec(name=name, partitions=bus.partitions(name)) for name in recorded.topics.all()]
    )
    first = next(records_of(bus, ends_of(bus, recorded.topics.decisions)))
    assert decode_round(first.value).control_next > 0
    copy.writer().append([Append(topic=recorded.topics.decisions, value=first.value)])
    with closing(Tracer(copy, recorded.topics)) as cut, pytest.raises(BusError):
        list(cut.turn())


def test_trace_that_show_prints_is_that_of_the_whole_log(
    bus: SqliteBus, recorded: RecordedRun, spans: list[Span]
) -> None:
    by_trace: dict[str, list[Span]] = {}
    for span in spans:
        by_trace.setdefault(span.trace_id, []).append(span)
    for name in ("g0000000000", "g0000000010", "g0000000033", "e0000000001"):
        rows = History(bus, recorded.topics, group=name).group_trace()
        assert rows == tree.rows(by_trace[rows[0]["trace_id"]]), name
    for step in (0, 7, STEPS - 1):
        history = History(bus, recorded.topics, step=step)
        rows = history.step_trace()
        own = by_trace[rows[0]["trace_id"]]
        assert rows[: len(own)] == tree.rows(own)
        assert [row["stage"] for row in rows[len(own) :]] == ["group"] * len(history.members)
        assert len(history.members) == 4


def test_group_that_moved_is_traced_whatever_the_share_is() -> None:
    stage = whole()
    (moved, _) = stage.ended
    assert isinstance(moved, GroupEnded)
    because = [sampled_because(stage.run, moved, ratio, slow=True) for ratio in (0.0, 1.0)]
    assert because == ["migrated", "all"]


def _ended(ordinal: int, *, lasted_ms: float = 100.0, outcome: Outcome = "filtered") -> GroupEnded:
    own = spec(group_id("train", ordinal))
    stage = began().decide(100, Dispatch(reason="room", spec=own), place("w0", W0, 0, 1, of=own))
    (ended,) = stage.decide(100 + lasted_ms, End(reason="", group=own.group, outcome=outcome)).ended
    assert isinstance(ended, GroupEnded)
    return ended


@pytest.mark.parametrize(("outcome", "why"), [("filtered", ""), ("failed", "failed")])
def test_group_that_failed_is_traced_whatever_the_share_is(outcome: Outcome, why: str) -> None:
    assert sampled_because(began().run, _ended(0, outcome=outcome), 0.0, slow=False) == why


@pytest.mark.parametrize(
    ("before", "lasted_ms", "slow"),
    [(RECENT_MIN, 199.0, False), (RECENT_MIN, 201.0, True), (RECENT_MIN - 1, 1000.0, False)],
)
def test_group_that_took_twice_as_long_as_others_is_slow(
    before: int, lasted_ms: float, slow: bool
) -> None:
    groups = SlowGroups()
    assert not any([groups.is_slow(_ended(ordinal)) for ordinal in range(before)])
    ended = _ended(99, lasted_ms=lasted_ms)
    assert groups.is_slow(ended) == slow
    assert sampled_because(began().run, ended, 0.0, slow=slow) == ("slow" if slow else "")
