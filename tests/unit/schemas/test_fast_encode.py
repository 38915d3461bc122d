"""Writing without Arrow gives the bytes that Arrow gives, and refuses what it refuses."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.codec import in_arrays, sample_trajectory
from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import fast_encode
from dora_pipe.schemas.fast_encode import write_trajectory
from dora_pipe.schemas.fast_validate import FastValidator
from dora_pipe.schemas.routes import Routes, none_of
from dora_pipe.schemas.trajectory import Headers, Segment, Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory, encode_trajectory
from tests.unit.schemas import strategies


def _said(write: Callable[[Trajectory], tuple[bytes, Headers]], one: Trajectory) -> Any:
    """The record, or path and message of the refusal."""
    try:
        return write(one)
    except SchemaError as error:
        return error.path, error.message


@pytest.fixture
def no_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks Arrow fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Arrow was asked")

    monkeypatch.setattr(fast_encode, "encode_trajectory", refuse)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 33, 64, 257, 9_000])
@pytest.mark.parametrize("reward", [-0.5, None])
@pytest.mark.usefixtures("no_arrow")
def test_what_a_worker_has_in_its_hands_needs_no_arrow(tokens: int, reward: float | None) -> None:
    one = in_arrays(sample_trajectory(tokens))
    error = None if reward is not None else "it raised"
    one = replace(one, reward=reward, meta=msgspec.structs.replace(one.meta, reward_error=error))
    assert write_trajectory(one, traceparent="00-1") == encode_trajectory(one, traceparent="00-1")


@pytest.mark.usefixtures("no_arrow")
def test_sampling_by_another_distribution_needs_no_arrow() -> None:
    one = in_arrays(sample_trajectory(100))
    other = array("f", np.asarray(one.logprobs, np.float32) * np.float32(0.5))
    one = replace(one, sampler_logprobs=other)
    assert write_trajectory(one) == encode_trajectory(one)


@pytest.mark.parametrize("tokens", [9, 2_000, 33_000])
@pytest.mark.parametrize("experts", [128, 300])
@pytest.mark.usefixtures("no_arrow")
def test_what_says_through_which_experts_it_went_needs_no_arrow(tokens: int, experts: int) -> None:
    one = in_arrays(sample_trajectory(tokens))
    choices = np.random.default_rng(tokens).integers(0, 128, (tokens, 5, 1), np.uint16)
    choices[:2] = none_of(experts)
    one = replace(one, routed_experts=Routes.of(choices, experts))
    value, headers = write_trajectory(one)
    assert (value, headers) == encode_trajectory(one)
    assert decode_trajectory(value).routed_experts == one.routed_experts
    assert write_trajectory(FastValidator().view(value)) == (value, headers)


@given(strategies.trajectories(), st.booleans())
def test_every_trajectory_has_the_bytes_that_arrow_writes(one: Trajectory, lists: bool) -> None:
    if not lists and one.token_ids:
        one = in_arrays(one)
    assert _said(write_trajectory, one) == _said(encode_trajectory, one)


def _segment(one: Trajectory, **changed: Any) -> Trajectory:
    return replace(one, segments=[one.segments[0], _with(one.segments[1], **changed)])


def _with(segment: Segment, **changed: Any) -> Segment:
    return msgspec.structs.replace(segment, **changed)


def _routed(one: Trajectory, **given: Any) -> Trajectory:
    sizes: dict[str, Any] = {"experts": 2, "layers": 1, "per_token": 1}
    return replace(one, routed_experts=Routes(**(sizes | given)))


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, token_ids=array("i", [-1, *one.token_ids[1:]])),
        lambda one: replace(one, token_ids=array("q", one.token_ids)),
        lambda one: replace(one, token_ids=one.token_ids[1:]),
        lambda one: replace(one, logprobs=array("f", [0.5] * 12)),
        lambda one: replace(one, logprobs=np.asarray(one.logprobs, np.float32)[::-1]),
        lambda one: replace(one, loss_mask=bytearray([2] * 12)),
        lambda one: replace(one, version=2**70),
        lambda one: replace(one, digest="zz"),
        lambda one: replace(one, reward=float("nan")),
        lambda one: replace(one, segments=[]),
        lambda one: replace(one, trajectory="g\ud800"),
        lambda one: _segment(one, tool="\ud800"),
        lambda one: _segment(one, ok=2),
        lambda one: _segment(one, epoch=2**63),
        lambda one: _segment(one, epoch=1.5),
        lambda one: _segment(one, worker=None),
        lambda one: replace(one, meta=msgspec.structs.replace(one.meta, error="\ud800")),
        lambda one: replace(one, meta=msgspec.structs.replace(one.meta, error="e" * 2**20)),
        lambda one: _routed(one, data=bytes(12)),
        lambda one: _routed(one, data=bytearray(12)),
        lambda one: _routed(one, data=bytes(11)),
        lambda one: _routed(one, data=b"\2" * 12),
        lambda one: _routed(one, data=b"\xff" * 12),
        lambda one: _routed(one, data=bytes(12), layers=0),
        lambda one: _routed(one, data=bytes(12), experts=1.5),
    ],
)
def test_what_is_unusual_or_wrong_is_for_arrow_to_say(
    change: Callable[[Trajectory], Trajectory],
) -> None:
    one = change(in_arrays(sample_trajectory(12)))
    said = _said(encode_trajectory, one)
    assert _said(write_trajectory, one) == said
