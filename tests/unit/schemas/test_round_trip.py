"""Tests of round trips of records and deterministic bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings

from dora_pipe.bench.codec import in_arrays, sample_trajectory
from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.control import AnyControl, decode_control
from dora_pipe.schemas.dead_letter import DeadLetter, decode_dead_letter, encode_dead_letter
from dora_pipe.schemas.headers import header_pairs, matches, parse_headers
from dora_pipe.schemas.metrics import AnyMetrics, decode_metrics
from dora_pipe.schemas.rounds import Round, decode_round
from dora_pipe.schemas.trajectory import Progress, Trajectory, TurnProgress
from dora_pipe.schemas.trajectory_codec import (
    decode_any_progress,
    decode_trajectory,
    encode_any_progress,
    encode_trajectory,
)
from dora_pipe.schemas.wire import canonical, encode, sha256_hex
from tests.golden.arrow_values import PLAIN_TRAJECTORY, TRAJECTORY
from tests.unit.schemas import strategies


@given(strategies.CONTROL)
def test_control_record_comes_back_equal_with_equal_bytes(record: AnyControl) -> None:
    data = encode(record)
    back = decode_control(data)
    assert back == record
    assert encode(back) == data


@given(strategies.METRICS)
def test_metrics_record_comes_back_equal_with_equal_bytes(record: AnyMetrics) -> None:
    data = encode(record)
    back = decode_metrics(data)
    assert back == record
    assert encode(back) == data


@settings(max_examples=60)
@given(strategies.ROUNDS)
def test_round_comes_back_equal_with_equal_bytes(record: Round) -> None:
    data = encode(record)
    back = decode_round(data)
    assert back == record
    assert encode(back) == data


@given(strategies.JSON)
def test_plain_values_that_are_equal_have_equal_bytes_whatever_their_order(value: Any) -> None:
    assert canonical(_reordered(value)) == canonical(value)


@given(strategies.trajectories())
def test_trajectory_comes_back_with_its_log_probs_rounded_once(given_: Trajectory) -> None:
    value, headers = encode_trajectory(given_)
    back = decode_trajectory(value)
    assert back == replace(
        given_,
        logprobs=strategies.rounded(given_.logprobs),
        sampler_logprobs=strategies.rounded(given_.sampler_logprobs),
    )
    # Rounding twice changes nothing.
    assert decode_trajectory(encode_trajectory(back)[0]) == back
    assert headers.sha256 == sha256_hex(value)
    assert matches(headers, back) == []
    assert parse_headers(header_pairs(headers)) == headers


@given(strategies.progress())
def test_progress_comes_back_with_its_log_probs_rounded_once(given_: Progress) -> None:
    assert decode_any_progress(encode_any_progress(given_)) == replace(
        given_,
        logprobs=strategies.rounded(given_.logprobs),
        sampler_logprobs=strategies.rounded(given_.sampler_logprobs),
    )


@given(strategies.turn_progress())
def test_progress_of_a_call_comes_back_and_is_told_from_the_other(given_: TurnProgress) -> None:
    value = encode_any_progress(given_)
    back = decode_any_progress(value)
    assert back == replace(
        given_,
        logprobs=strategies.rounded(given_.logprobs),
        sampler_logprobs=strategies.rounded(given_.sampler_logprobs),
    )
    assert decode_any_progress(value) == back


@given(strategies.progress())
def test_progress_of_a_request_is_told_from_that_of_a_call(given_: Progress) -> None:
    value = encode_any_progress(given_)
    assert isinstance(decode_any_progress(value), Progress)


@given(strategies.DEAD_LETTERS)
def test_dead_letter_comes_back_equal(letter: DeadLetter) -> None:
    value, headers = encode_dead_letter(letter, max_record_bytes=100_000)
    assert decode_dead_letter(value, headers) == letter
    assert all(name.isascii() and data.isascii() for name, data in headers)


@given(strategies.trajectories())
def test_arrays_as_a_worker_has_them_have_the_bytes_of_lists(record: Trajectory) -> None:
    assert encode_trajectory(in_arrays(record)) == encode_trajectory(record)


def test_an_array_of_two_dimensions_is_refused() -> None:
    ids = np.array([TRAJECTORY.token_ids], np.int32)
    with pytest.raises(SchemaError, match="2 dimensions"):
        encode_trajectory(replace(TRAJECTORY, token_ids=cast(Any, ids)))


def test_numpy_arrays_are_written_like_lists_with_nan_for_none() -> None:
    arrays: dict[str, Any] = {
        "token_ids": np.array(TRAJECTORY.token_ids, np.int64),
        "logprobs": np.array(TRAJECTORY.logprobs, np.float64),
        "sampler_logprobs": np.array(TRAJECTORY.sampler_logprobs, np.float32),
        "loss_mask": np.array(TRAJECTORY.loss_mask, np.uint8),
    }
    assert encode_trajectory(replace(TRAJECTORY, **arrays)) == encode_trajectory(TRAJECTORY)


def test_sampler_log_probs_are_not_written_twice_when_they_are_equal() -> None:
    doubled = replace(PLAIN_TRAJECTORY, sampler_logprobs=[None, -0.5])
    plain, other = (
        len(zstandard.decompress(encode_trajectory(entry)[0]))
        for entry in (PLAIN_TRAJECTORY, doubled)
    )
    assert plain < other
    assert decode_trajectory(encode_trajectory(doubled)[0]).sampler_logprobs == [None, -0.5]


@pytest.mark.parametrize("value", [-0.1, -1e-45, -1e-60, -3.4e38, -0.0, -1 / 3, -87.33654475])
def test_log_prob_survives_as_exactly_its_float32(value: float) -> None:
    given_ = replace(PLAIN_TRAJECTORY, logprobs=[None, value], sampler_logprobs=[None, value])
    back = decode_trajectory(encode_trajectory(given_)[0]).logprobs[1]
    assert np.float32(back).tobytes() == np.float32(value).tobytes()


def test_threads_may_write_and_read_at_once() -> None:
    large = sample_trajectory(3000)

    def write_and_read(_: int) -> bool:
        return decode_trajectory(encode_trajectory(large)[0]) == large

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write_and_read, range(40)))


def test_any_arrow_reader_opens_a_trajectory() -> None:
    raw = zstandard.decompress(encode_trajectory(TRAJECTORY)[0])
    table = pa.ipc.open_stream(raw).read_all()
    assert table.num_rows == 1
    assert table["token_ids"].to_pylist() == [TRAJECTORY.token_ids]
    assert msgspec.json.decode(table["meta_json"][0].as_py())["group"] == "g0000000042"


def _reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reordered(value[key]) for key in reversed(value)}
    return [_reordered(entry) for entry in value] if isinstance(value, list) else value
