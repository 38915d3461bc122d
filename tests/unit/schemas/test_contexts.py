"""A trajectory that branches stores each token once, and gives every context back whole."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.contexts import Context, contexts_of
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory, encode_trajectory
from tests.golden.branched_values import CALL, CONTEXTS, branched
from tests.unit.schemas.strategies import trajectories


def test_every_context_comes_back_as_a_sequence_of_its_own() -> None:
    value, _ = encode_trajectory(branched())
    found = list(contexts_of(decode_trajectory(value)))
    assert [list(one.token_ids) for one in found] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 9, 10, 11],
        [0, 1, 2, 12],
        [0, 1, 2, 12, 13, 14, 15],
    ]
    assert [one.own for one in found] == [0, 0, 3, 4]


def test_what_another_context_sampled_is_given_and_has_no_log_prob() -> None:
    last = list(contexts_of(branched()))[3]
    assert list(last.loss_mask) == [0, 0, 0, 0, 0, 1, 1]
    assert list(np.isnan(last.logprobs)) == [True] * 5 + [False] * 2


@given(trajectories())
def test_each_sampled_token_is_trained_once(trajectory: Trajectory) -> None:
    found = list(contexts_of(trajectory))
    assert sum(int(one.loss_mask.sum()) for one in found) == trajectory.sampled
    assert [one.own + len(one.loss_mask[one.own :]) for one in found] == [
        len(one.token_ids) for one in found
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
