"""Tests of the engine benchmark."""

from __future__ import annotations

import pytest

from dora_pipe.bench.engine import EngineFigure, bench_engine, demo_requests
from dora_pipe.core.errors import UsageError


def test_figures_hold_both_engines() -> None:
    (figure,) = bench_engine([8], requests_per_row=1)
    assert isinstance(figure, EngineFigure)
    assert (figure.rows, figure.requests) == (8, 32)
    assert figure.tokens == sum(request.params.max_tokens for request in demo_requests(32))
    assert figure.tokens_per_s > 0 and figure.cpu_tokens_per_s > 0
    expected = figure.cpu_tokens_per_s / figure.generate_cpu_tokens_per_s
    assert figure.ratio == pytest.approx(expected, rel=0.01)
    by_length = figure.cpu_tokens_per_s / figure.sorted_generate_cpu_tokens_per_s
    assert figure.sorted_ratio == pytest.approx(by_length, rel=0.01)
    assert figure.computed > figure.sorted_computed >= 1.0


def test_rows_that_cannot_be_are_refused() -> None:
    for rows in (0, 5000):
        with pytest.raises(UsageError):
            bench_engine([rows])
