"""`bench tasks` measures what it says: slots are busy unless environments are asked in turn."""

from __future__ import annotations

import pytest

from dora_pipe.bench.tasks import Code, TaskCase, bench_tasks


@pytest.mark.parametrize(
    ("code", "least", "most"),
    [("async", 0.5, 1.0), ("plain", 0.5, 1.0), ("plain, threads = 1", 0.0, 0.2)],
)
def test_slots_are_busy_unless_steps_are_made_one_after_the_other(
    code: Code, least: float, most: float
) -> None:
    case = TaskCase(code=code, mean_ms=100.0, deviation_ms=100.0)
    (figure,) = bench_tasks([case], warm_s=1.0, seconds=1.0)
    assert least < figure.busy <= most
    assert figure.steps_per_s > 0
    assert figure.us_per_step > 0
