"""Tests of rows of an agent's calls."""

from __future__ import annotations

from dora_pipe.ledger.calls import call_rows
from dora_pipe.schemas.contexts import Call
from tests.golden.arrow_values import PLAIN_TRAJECTORY
from tests.golden.branched_values import branched

PLACED_NS = PLAIN_TRAJECTORY.meta.times.scheduled


def _call(start: int, asked: int, answered: int) -> Call:
    return Call(
        start=start,
        end=start + 1,
        seed=0,
        asked_ns=PLACED_NS + asked,
        answered_ns=PLACED_NS + answered,
    )


def test_time_is_idle_only_while_no_call_is_open() -> None:
    calls = (_call(3, 5, 20), _call(6, 10, 15), _call(10, 18, 40), _call(12, 50, 60))
    assert [row.idle_ns for row in call_rows(branched(calls=calls))] == [5, 0, 0, 10]


def test_a_call_is_of_the_context_that_sampled_it_and_has_all_before_as_its_prompt() -> None:
    calls = tuple(_call(start, 0, 1) for start in (3, 6, 10, 12, 14))
    rows = list(call_rows(branched(calls=calls)))
    assert [row.context for row in rows] == [0, 0, 1, 2, 3]
    assert [row.prompt_tokens for row in rows] == [3, 6, 2, 3, 5]
