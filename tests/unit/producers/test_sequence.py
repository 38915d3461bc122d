"""Property tests of token sequences: they tile and pass the record's check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.producers.worker.sequence import TokenSequence, chain_error, sequence_of
from dora_pipe.schemas.trajectory import Progress
from dora_pipe.schemas.trajectory_codec import encode_trajectory
from tests.support.batches import make_trajectory, progress_chunk

Turn = tuple[int, int | None]
"""Sampled tokens of a stay, and observation tokens after it (None: the turn continues on another
worker)."""


PROMPT = [1, 2]


def _chunk(start: int, count: int, **changes: Any) -> Progress:
    prompt = [] if start else PROMPT
    first = start - len(PROMPT) if start else 0
    return progress_chunk(start, range(first, first + count), prompt, **changes)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4) | st.none()), min_size=1, max_size=6),
)
def test_any_course_of_stays_and_observations_makes_a_record_that_passes_its_check(
    prompt: int, turns: list[Turn]
) -> None:
    sequence = TokenSequence([9] * prompt, at_ns=1)
    for number, (sampled, observed) in enumerate(turns):
        sequence.start_stay(2)
        sequence.sampled([3] * sampled, [-1.0] * sampled, [-0.5] * sampled)
        sequence.end_stay(3, worker="w0", incarnation=number, version=2)
        if observed is not None:
            sequence.observed([8] * observed, asked_ns=4, at_ns=5, tool="", ok=True)
    trajectory = make_trajectory("g0000000000-000")
    record = replace(
        trajectory,
        token_ids=sequence.token_ids,
        logprobs=sequence.logprobs,
        sampler_logprobs=sequence.sampler_logprobs,
        loss_mask=sequence.loss_mask,
        segments=sequence.segments,
        meta=msgspec.structs.replace(trajectory.meta, prompt_tokens=sequence.prompt_tokens),
    )
    encode_trajectory(record)
    assert sequence.sampled_tokens == sum(sampled for sampled, _ in turns) == record.sampled
    assert len(sequence.prefills) == len(turns)
    assert sequence.turns_taken == sum(observed is not None for _, observed in turns)
    assert sum(map(len, sequence.turns())) + prompt == len(sequence)


def test_stays_of_one_turn_are_one_answer() -> None:
    sequence = sequence_of([_chunk(0, 2), _chunk(4, 2, worker="w1")])
    assert isinstance(sequence, TokenSequence)
    sequence.start_stay(5)
    sequence.sampled([7], [-1.0], [-1.0])
    sequence.end_stay(6, worker="w2", incarnation=9, version=2)
    assert sequence.answer() == [0, 1, 2, 3, 7]
    assert sequence.turns() == [[0, 1, 2, 3, 7]]
    assert [segment.worker for segment in sequence.segments] == ["", "w0", "w1", "w2"]


def test_last_answer_is_the_last_turn_of_the_model_behind_which_an_observation_may_stand() -> None:
    sequence = TokenSequence([1], at_ns=0)
    for token in (5, 6):
        sequence.start_stay(1)
        sequence.sampled([token], [-1.0], [-1.0])
        sequence.end_stay(2, worker="w", incarnation=1, version=0)
        sequence.observed([8], asked_ns=3, at_ns=4, tool="calc", ok=False)
    assert sequence.answer() == [6]
    assert sequence.turns() == [[5], [8], [6], [8]]
    assert [segment.tool for segment in sequence.segments if segment.kind == "tool"] == [
        "calc",
        "calc",
    ]
    assert not sequence.segments[-1].ok


def test_stay_that_begins_with_a_cache_is_a_move_and_no_prefill() -> None:
    sequence = TokenSequence([5, 6], at_ns=0)
    for worker, imported in (("a", False), ("b", True), ("c", False), ("a", True)):
        sequence.start_stay(1, imported=imported)
        sequence.sampled([7], [-1.0], [-1.0])
        sequence.end_stay(2, worker=worker, incarnation=1, version=0)
    assert (sequence.prefills, sequence.moves) == ([2, 4], 2)


def _chain() -> list[Progress]:
    return [_chunk(0, 3), _chunk(5, 2)]


def _error(chunks: list[Progress], tokens: int = 5) -> str | None:
    return chain_error(
        chunks, trajectory="g0000000000-000", version=2, digest="0" * 64, tokens=tokens
    )


@pytest.mark.parametrize(
    ("chunks", "tokens", "why"),
    [
        ([], 5, "no progress record"),
        (_chain()[1:], 5, "starts at token 5, not 0"),
        (_chain(), 6, "reach 5 tokens, not 6"),
        ([_chunk(0, 3), _chunk(5, 2, version=3)], 5, "version 3, not 2"),
        ([_chunk(0, 3), _chunk(5, 2, digest="1" * 64)], 5, "made by version 2"),
        (
            [_chunk(0, 5, trajectory="g0000000000-001")],
            5,
            "g0000000000-001 is in the chain",
        ),
        ([_chunk(0, 3), _chunk(6, 1)], 5, "starts at token 6, not 5"),
    ],
)
def test_chain_with_a_fault_is_named(chunks: list[Progress], tokens: int, why: str) -> None:
    error = _error(chunks, tokens)
    assert error is not None and why in error
