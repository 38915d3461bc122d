"""Tests of branching trajectories: tokens stored once, contexts restored."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.context_tokens import (
    call_fault,
    contexts_of,
    counted_places,
    counted_tokens,
    rows_of,
    tokens_before,
)
from dora_pipe.schemas.contexts import Context, prompt_digest
from dora_pipe.schemas.identity import call_seed
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory, encode_trajectory
from tests.golden.branched_values import CALL, CONTEXTS, branched
from tests.unit.schemas.strategies import trajectories


def test_every_context_comes_back_as_a_sequence_of_its_own() -> None:
    value, _ = encode_trajectory(branched())
    contexts = list(contexts_of(decode_trajectory(value)))
    assert [list(trajectory.token_ids) for trajectory in contexts] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 9, 10, 11],
        [0, 1, 2, 12],
        [0, 1, 2, 12, 13, 14, 15],
    ]
    assert [context.own for context in contexts] == [0, 0, 3, 4]


def test_what_another_context_sampled_is_given_and_has_no_log_prob() -> None:
    last = list(contexts_of(branched()))[3]
    assert list(last.loss_mask) == [0, 0, 0, 0, 0, 1, 1]
    assert list(np.isnan(last.logprobs)) == [True] * 5 + [False] * 2


@given(trajectories())
def test_each_sampled_token_is_trained_once(trajectory: Trajectory) -> None:
    contexts = list(contexts_of(trajectory))
    assert sum(int(trajectory.loss_mask.sum()) for trajectory in contexts) == trajectory.sampled
    assert [tokens.own + len(tokens.loss_mask[tokens.own :]) for tokens in contexts] == [
        len(trajectory.token_ids) for trajectory in contexts
    ]


@pytest.mark.parametrize(
    "contexts, why",
    [
        (CONTEXTS[:2], "not where its prompts begin"),
        ((CONTEXTS[0], CONTEXTS[1], Context(start=14)), "not where its prompts begin"),
        ((CONTEXTS[0], Context(start=12, parent=2, shared=3), CONTEXTS[2]), "not there"),
        ((CONTEXTS[0], Context(start=12, parent=0, shared=9), CONTEXTS[2]), "not there"),
        ((CONTEXTS[0], Context(start=12, parent=0), CONTEXTS[2]), "not there"),
    ],
)
def test_contexts_that_the_record_cannot_have_are_refused(
    contexts: tuple[Context, ...], why: str
) -> None:
    with pytest.raises(SchemaError, match=why):
        encode_trajectory(branched(contexts))


def test_call_that_no_model_answered_is_refused() -> None:
    with pytest.raises(SchemaError, match="not what a model sampled"):
        encode_trajectory(branched(calls=(msgspec.structs.replace(CALL, start=0),)))


@given(trajectories())
def test_what_is_counted_is_what_contexts_have_behind_their_first_token(
    trajectory: Trajectory,
) -> None:
    places = counted_places(trajectory).tolist()
    rows = rows_of(trajectory)
    assert counted_tokens(trajectory) == [int(sum(mask[1:])) for _, mask, _ in rows]
    assert [trajectory.token_ids[position] for position in places] == [
        token for ids, mask, _ in rows for token, bit in zip(ids[1:], mask[1:], strict=True) if bit
    ]
    earlier_rows = [
        value
        for _, mask, values in rows
        for value, bit in zip(values[1:], mask[1:], strict=True)
        if bit
    ]
    recorded = np.array([trajectory.logprobs[position] for position in places], np.float32)
    assert np.array_equal(recorded, np.array(earlier_rows, np.float32))


@given(trajectories())
def test_what_stood_before_a_token_is_the_beginning_of_its_context(trajectory: Trajectory) -> None:
    for tokens in contexts_of(trajectory):
        for index in range(tokens.own, len(tokens.token_ids)):
            before = tokens_before(trajectory, tokens.start + index - tokens.own)
            assert before == tokens.token_ids[:index].tolist()


def _served() -> Trajectory:
    trajectory = branched()
    spans = [(3, 5, 0), (6, 8, 0), (10, 12, 0), (12, 13, 1), (14, 16, 0)]
    calls = tuple(
        msgspec.structs.replace(
            CALL,
            start=start,
            end=end,
            occurrence=again,
            seed=call_seed(
                trajectory.meta.seed, prompt_digest(tokens_before(trajectory, start)), again
            ),
        )
        for start, end, again in spans
    )
    return branched(calls=calls)


def test_calls_that_follow_from_what_was_sampled_have_no_fault() -> None:
    assert call_fault(_served()) == ""
    assert call_fault(branched()) == "token 3 was sampled for no call"


@pytest.mark.parametrize(
    ("number", "changes", "why"),
    [
        (0, {"end": 4}, "token 4 was sampled for no call"),
        (0, {"end": 6}, "the call at token 3 has tokens that were given, or another call's"),
        (2, {"end": 13}, "the call at token 10 goes beyond its context"),
        (3, {"seed": 1}, "the seed of the call at token 12 does not follow from its prompt"),
        (3, {"occurrence": 0}, "the seed of the call at token 12 does not follow from its prompt"),
        (4, {"answered_ns": 0}, "the call at token 14 was answered before it was asked"),
    ],
)
def test_a_call_that_does_not_follow_is_named(
    number: int, changes: dict[str, int], why: str
) -> None:
    calls = list(_served().meta.calls)
    calls[number] = msgspec.structs.replace(calls[number], **changes)
    assert call_fault(branched(calls=tuple(calls))) == why


def test_two_calls_with_one_prompt_and_one_occurrence_are_named() -> None:
    calls = list(_served().meta.calls)
    calls[3] = msgspec.structs.replace(calls[3], occurrence=0, seed=calls[0].seed)
    assert call_fault(branched(calls=tuple(calls))) == "the call at token 12 occurs twice"
