"""The bench of resident adapters measures what it says: equal work on both sides, all versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dora_pipe.bench.engine import demo_requests
from dora_pipe.bench.engine_lora import (
    RESIDENT_MAX,
    ResidentFigure,
    TorchHosts,
    bench_resident,
    under_versions,
)
from dora_pipe.core.errors import UsageError
from dora_pipe.producers.engines.port import TokensSampled


def test_figures_hold_both_sides() -> None:
    figures = bench_resident([8], [1, 3], rank=2, requests_per_row=1, turns=1)
    tokens = sum(one.params.max_tokens for one in demo_requests(32))
    for figure, resident in zip(figures, (1, 3), strict=True):
        assert isinstance(figure, ResidentFigure)
        assert (figure.rows, figure.resident, figure.rank) == (8, resident, 2)
        assert (figure.requests, figure.tokens) == (32, tokens)
        wanted = figure.cpu_tokens_per_s / figure.merged_cpu_tokens_per_s
        assert figure.ratio == pytest.approx(wanted, abs=0.006)


def test_requests_are_the_same_and_meet_every_version() -> None:
    requests = demo_requests(30)
    spread = under_versions(requests, 4)
    assert Counter(one.version for one in spread) == {1: 8, 2: 8, 3: 7, 4: 7}
    assert [one.seed for one in spread] == [one.seed for one in requests]


def test_versions_are_resident_and_say_different_things() -> None:
    engine = TorchHosts().hosting(8, 2, rank=4)
    (request,) = demo_requests(1)
    found = []
    for version in (1, 2):
        engine.add(replace(request, version=version))
        said: list[Sequence[float]] = []
        while engine.active:
            said += [one.logprobs for one in engine.step() if isinstance(one, TokensSampled)]
        found.append(said)
    assert found[0] and found[0] != found[1]
    with pytest.raises(ValueError, match="not resident"):
        engine.add(replace(request, version=3))


def test_numbers_that_cannot_be_are_refused() -> None:
    for rows, resident in ((0, 1), (8, 0), (8, RESIDENT_MAX + 1)):
        with pytest.raises(UsageError):
            bench_resident([rows], [resident])
