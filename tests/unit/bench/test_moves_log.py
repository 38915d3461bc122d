"""What moves cost a run is counted from slot to slot, and only where the log has both."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.moves_log import covered_s, figure_of, overhead_of, pause_of
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.port import TopicSpec
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.control import RequestReleased, Resume
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Segment
from tests.golden.arrow_values import PLAIN_TRAJECTORY

S = 1_000_000_000
SPANS = st.lists(
    st.tuples(st.integers(1, 200), st.integers(0, 50)).map(lambda at: (at[0], at[0] + at[1])),
    max_size=8,
)


def released(left_ns: int, tokens: int, kv: Blob | None = None) -> RequestReleased:
    return RequestReleased(
        at_ns=left_ns + 5,
        worker="w0",
        epoch=1,
        trajectory=PLAIN_TRAJECTORY.trajectory,
        attempt=1,
        resume=Resume(tokens=tokens, partition=0, offset=1),
        kv=kv,
        left_ns=left_ns,
    )


def stay(start: int, start_ns: int) -> Segment:
    return Segment(kind="model", start=start, end=start + 1, turn=0, start_ns=start_ns, end_ns=0)


def test_pause_is_from_the_slot_here_to_the_slot_there() -> None:
    prompt = PLAIN_TRAJECTORY.meta.prompt_tokens
    trajectory = replace(
        PLAIN_TRAJECTORY, segments=[stay(prompt, 10), stay(prompt + 7, 500), stay(prompt + 9, 900)]
    )
    assert pause_of(released(400, 7), trajectory) == (400, 500)
    assert pause_of(released(850, 9), trajectory) == (850, 900)
    assert pause_of(released(400, 8), trajectory) is None
    assert pause_of(released(600, 7), trajectory) == (600, 600), "two clocks that disagree"


def test_shares_are_of_all_requests_time_and_of_the_runs_time() -> None:
    pauses = [(10 * S, 11 * S), (10 * S, 12 * S), (30 * S, 31 * S)]
    moves = [released(1, 1, Blob(sha256="a" * 64, bytes=3_000_000)), released(1, 2), released(1, 3)]
    stays = [(0, 50 * S), (50 * S, 100 * S), (0, 100 * S)]
    figure = figure_of(pauses, moves, stays)
    assert (figure.moves, figure.with_cache, figure.megabytes) == (3, 1, 3.0)
    assert (figure.paused_s, figure.generating_s, figure.run_s) == (4.0, 200.0, 100.0)
    assert (figure.slot_share, figure.time_share) == (2.0, 3.0)
    assert (figure.pause_p50_ms, figure.pause_max_ms) == (1000.0, 2000.0)


@given(SPANS)
def test_covered_time_counts_every_moment_once(spans: list[tuple[int, int]]) -> None:
    moments = {at for start, end in spans for at in range(start, end)}
    assert covered_s(spans) == pytest.approx(len(moments) / 1e9)


def test_run_in_which_nothing_moved_has_no_figures() -> None:
    topics = Topics("quiet")
    bus = MemoryBus(MemoryLog(), now_ms=lambda: 0)
    bus.create([TopicSpec(name=name, partitions=1) for name in topics.all()])
    with pytest.raises(UsageError, match="no running request moved"):
        overhead_of(bus, topics)
