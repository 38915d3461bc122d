"""Tests of ratios of paradigms with paired seeds and intervals."""

from __future__ import annotations

import pytest

from dora_pipe.bench.studies.paradigms import crossing, isotonic


def test_an_evaluation_that_is_lucky_is_pooled_with_the_worse_ones_behind_it() -> None:
    course = [(0.0, 0.4), (1.0, 0.9), (2.0, 0.5), (3.0, 0.7), (4.0, 0.8)]
    rewards = [reward for _, reward in isotonic(course)]
    assert rewards == pytest.approx([0.4, 0.7, 0.7, 0.7, 0.8])
    assert crossing(course, 0.75) < 1.0  # type: ignore[operator]
    assert crossing(isotonic(course), 0.75) == pytest.approx(3.5)
