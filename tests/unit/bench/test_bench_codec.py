"""Tests of the codec benchmark."""

from __future__ import annotations

import typing

import pytest

from dora_pipe.bench import codec as bench
from dora_pipe.bench.codec import Encoding, bench_codec, sample_trajectory
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.trajectory_codec import decode_trajectory, encode_trajectory


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SECONDS_PER_FIGURE", 0.0)


def test_every_way_is_measured_at_every_length() -> None:
    figures = bench_codec([30, 300])
    assert [figure.way for figure in figures] == [*typing.get_args(Encoding)] * 2
    assert [figure.tokens for figure in figures] == [30] * 3 + [300] * 3
    for figure in figures:
        assert figure.encode_ms > 0
        assert figure.decode_ms > 0
        assert figure.bytes_per_token == figure.bytes / figure.tokens


@pytest.mark.parametrize("tokens", [1, 3, 2048])
def test_sample_is_a_sound_trajectory_and_the_same_one_every_time(tokens: int) -> None:
    sample = sample_trajectory(tokens)
    encode_trajectory(sample)
    assert sample == sample_trajectory(tokens)
    assert decode_trajectory(encode_trajectory(sample)[0]) == sample


@pytest.mark.parametrize("tokens", [0, -1, bench.TOKENS_MAX + 1])
def test_length_that_is_none_is_refused(tokens: int) -> None:
    with pytest.raises(UsageError, match=f"{tokens} tokens is not between"):
        bench_codec([30, tokens])
